"""Checks the config of a node against the schema of its handler, before a run needs it.

A schema is the JSON Schema that a handler announces. The check refuses only what the handler must
refuse, whatever its templates give: a template that is one whole expression may give any value, a
text with templates in it some text. What the schema leaves open is accepted. Single values are
checked by pydantic itself, as the handler will do it: "5" is a number, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from dovetail.core.errors import Finding, Path, Suggester, one_line, shown

CODE = "invalid_config"
MAX_DEPTH = 32
"""Deeper values of a config are not checked."""
MAX_REFERENCES = 32
MAX_FAULTS = 1000
"""In one list or mapping; a definition shows no more problems."""
MAX_NAMED = 20
"""So many fields, or values of an enum, are named in a message."""

Schema = Mapping[str, Any]


@runtime_checkable
class KnowsConfigSchemas(Protocol):
    """Known handlers that also say what their config may be."""

    def config_schema(self, name: str) -> Schema | None:
        """The schema of a handler's config; None if it has none, or only its name is known."""
        ...


class ConfigCheck:
    """Checks configs against the schema of one handler."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._check = _Check(schema)

    def findings(
        self, config: Mapping[str, Any], at: Path, suggester: Suggester
    ) -> Iterator[Finding]:
        """Everything that is wrong with the config at the path `at`."""
        for found in self._check.all_faults(self._schema, config):
            yield Finding(CODE, found.message(suggester), (*at, *found.path), found.on_key)


class _Fault:
    """One reason why a value is refused. Its words are made when they are needed."""

    __slots__ = ("known", "on_key", "path", "text", "wrong")

    def __init__(
        self,
        path: Path,
        text: str,
        wrong: str = "",
        known: Sequence[str] = (),
        on_key: bool = False,
    ) -> None:
        self.path = path
        self.text = text
        self.wrong = wrong
        self.known = known
        self.on_key = on_key

    def message(self, suggester: Suggester) -> str:
        hint = suggester.did_you_mean(self.wrong, self.known) if self.wrong else ""
        if self.on_key and not hint:
            names = [one_line(name) for name in self.known[:MAX_NAMED]]
            hint = f"; known are: {', '.join(names)}" if names else "; the handler takes none"
        return self.text + hint


class _Check:
    """Every fault alone means that the handler refuses the config; so a union refuses a value if
    each of its branches has a fault."""

    def __init__(self, schema: Schema) -> None:
        self._definitions: Mapping[str, Any] = schema.get("$defs") or {}
        self._unions: dict[tuple[int, Path, bool], list[_Fault]] = {}
        """Of a schema, by identity, and a place: else nested unions take exponential time."""
        self._validators: dict[int, list[SchemaValidator | None]] = {}
        """Of a schema of single values, by identity."""

    def all_faults(self, schema: Schema, config: Any) -> list[_Fault]:
        self._unions.clear()
        return self.faults(schema, config, (), 0, closed=True)

    def faults(
        self, schema: Any, value: Any, path: Path, depth: int, *, closed: bool
    ) -> list[_Fault]:
        """With `closed`, a field that a model would ignore is a fault, too."""
        schema = self._resolved(schema)
        if not schema or depth > MAX_DEPTH:
            return []
        if isinstance(value, str) and "{" in value and (template := _template(value)):
            if template is ANY or self._takes_text(schema):
                return []
            return [_not(self._words(schema), value, path)]
        if branches := schema.get("anyOf"):
            return self._of_union(schema, branches, value, path, depth, closed)
        if "enum" in schema or "const" in schema:
            members = schema["enum"] if "enum" in schema else [schema["const"]]
            return [] if _is_among(value, members) else [_not_among(value, members, path)]
        types = _types(schema)
        if not types:
            return []
        if isinstance(value, dict):
            if "object" in types:
                return self._of_object(schema, value, path, depth, closed)
        elif isinstance(value, list):
            if "array" in types:
                return self._of_array(schema, value, path, depth, closed)
        elif value is None:
            if "null" in types:
                return []
        else:
            return self._of_scalar(schema, types, value, path)
        return [_not(_type_words(schema), value, path)]

    def _resolved(self, schema: Any) -> Schema | None:
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                return None
            reference = schema.get("$ref")
            if reference is None:
                return schema
            schema = self._definitions.get(str(reference).removeprefix("#/$defs/"))
        return None

    def _takes_text(self, schema: Schema) -> bool:
        """Whether some text could be accepted: also a number may be written as text."""
        if branches := schema.get("anyOf"):
            return any(self._takes_text(self._resolved(one) or {}) for one in branches)
        types = _types(schema)
        return not types or not set(types) <= {"object", "array", "null"}

    def _of_object(
        self, schema: Schema, value: dict[str, Any], path: Path, depth: int, closed: bool
    ) -> list[_Fault]:
        properties = schema.get("properties")
        others = schema.get("additionalProperties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        is_closed = others is False or (closed and others is None and properties is not None)
        found: list[_Fault] = []
        for name, held in value.items():
            if len(found) > MAX_FAULTS:
                break
            below = known.get(name, others)
            if name not in known and is_closed:
                text = f"unknown field {shown(name)}"
                found.append(_Fault((*path, name), text, name, [*known], on_key=True))
            elif isinstance(below, Mapping) and below:
                found += self.faults(below, held, (*path, name), depth + 1, closed=closed)
        found += [
            _Fault((*path, name), f"{shown(name)} is required")
            for name in schema.get("required", ())
            if name not in value
        ]
        return found

    def _of_array(
        self, schema: Schema, value: list[Any], path: Path, depth: int, closed: bool
    ) -> list[_Fault]:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if len(value) < least:
            return [_Fault(path, f"must have {least:,} or more items, not {len(value):,}")]
        # The members of a set count after duplicates are gone.
        if most is not None and len(value) > most and not schema.get("uniqueItems"):
            return [_Fault(path, f"must have {most:,} or fewer items, not {len(value):,}")]
        first: Sequence[Any] = schema.get("prefixItems", ())
        rest = schema.get("items")
        found: list[_Fault] = []
        for index, held in enumerate(value):
            if len(found) > MAX_FAULTS:
                break
            below = first[index] if index < len(first) else rest
            if isinstance(below, Mapping) and below:
                found += self.faults(below, held, (*path, index), depth + 1, closed=closed)
        return found

    def _of_scalar(
        self, schema: Schema, types: Sequence[str], value: Any, path: Path
    ) -> list[_Fault]:
        validators = self._validators.get(id(schema))
        if validators is None:
            kinds = [kind for kind in types if kind in _SCALARS]
            form = schema.get("format")
            validators = [_validator(kind, form, _bounds(schema, kind)) for kind in kinds]
            self._validators[id(schema)] = validators
        violations: list[str] = []
        for validator in validators:
            if validator is None:
                return []
            try:
                validator.validate_python(value)
            except ValidationError as error:
                violations.append(_violation(error, value))
            else:
                return []
        bounded = [text for text in violations if text]
        if len(bounded) == 1:
            return [_Fault(path, bounded[0])]
        return [_not(_type_words(schema), value, path)]

    def _of_union(
        self,
        schema: Schema,
        branches: Sequence[Any],
        value: Any,
        path: Path,
        depth: int,
        closed: bool,
    ) -> list[_Fault]:
        key = (id(schema), path, closed)
        if key not in self._unions:
            self._unions[key] = self._in_each(branches, value, path, depth, closed)
        return self._unions[key]

    def _in_each(
        self, branches: Sequence[Any], value: Any, path: Path, depth: int, closed: bool
    ) -> list[_Fault]:
        # A model that ignores a field fits nevertheless.
        found = [self.faults(one, value, path, depth, closed=False) for one in branches]
        kin = [
            branch
            for branch, faults in zip(branches, found, strict=True)
            if not any(fault.path == path for fault in faults)
        ]
        if len(kin) == 1 and isinstance(value, dict | list):
            # The one that was meant: only its faults are said, with their own paths.
            return self.faults(kin[0], value, path, depth, closed=closed)
        if not all(found):
            return []
        if len(kin) > 1:
            return [_Fault(path, "fits none of the forms that the handler takes")]
        members = [one for branch in branches for one in self._members(branch)]
        bounded = [faults for faults in found if faults[0].text.startswith(_BOUNDED)]
        if len(bounded) == 1 and not members:
            return bounded[0]
        words = [word for branch in branches for word in self._words(branch)]
        if members and isinstance(value, str):
            words = [word for word in words if word != _WORDS["string"]]
        return [_not_among(value, members, path, words)]

    def _words(self, schema: Any) -> list[str]:
        """The types that it takes; nothing for an enum, whose members are named."""
        resolved = self._resolved(schema) or {}
        if branches := resolved.get("anyOf"):
            return [word for one in branches for word in self._words(one)]
        return [] if "enum" in resolved or "const" in resolved else _type_words(resolved)

    def _members(self, branch: Any) -> Sequence[Any]:
        resolved = self._resolved(branch) or {}
        members: Sequence[Any] = resolved.get("enum", ())
        return [resolved["const"]] if "const" in resolved else members


# ── templates ────────────────────────────────────────────────────────────────────────────

ANY = "any"
TEXT = "text"


def _template(text: str) -> str | None:
    """What a text gives when it is rendered: any value, some text; None: itself.

    It is not parsed: a text that begins and ends like one expression may be one.
    """
    if "{%" in text or "{#" in text:
        return ANY  # a finding of its own
    if "{{" not in text:
        return None
    return ANY if text.startswith("{{") and text.rstrip("\r\n").endswith("}}") else TEXT


# ── single values ────────────────────────────────────────────────────────────────────────

_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_FORMATS: dict[str, tuple[str, core_schema.CoreSchema]] = {
    "date-time": ("a date and time", core_schema.datetime_schema()),
    "date": ("a date", core_schema.date_schema()),
    "time": ("a time", core_schema.time_schema()),
    "duration": ("a duration", core_schema.timedelta_schema()),
    "uuid": ("a UUID", core_schema.uuid_schema()),
    "decimal": ("a number", core_schema.decimal_schema()),
}
_SCALARS = frozenset({"string", "integer", "number", "boolean"})
_BOUNDS = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "minLength": "min_length",
    "maxLength": "max_length",
    "pattern": "pattern",
}
_OF_TEXT = ("minLength", "maxLength", "pattern")
_BOUNDED = ("must be at", "must be more", "must be less", "must have")


def _types(schema: Schema) -> Sequence[str]:
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else types


def _bounds(schema: Schema, kind: str) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (_BOUNDS[name], schema[name])
        for name in _BOUNDS
        if name in schema and (name in _OF_TEXT) == (kind == "string") and kind != "boolean"
    )


@lru_cache(1024)
def _validator(
    kind: str, form: str | None, bounds: tuple[tuple[str, Any], ...]
) -> SchemaValidator | None:
    """pydantic's own check of such a value; None if there is none for this schema."""
    given: Any
    if form in _FORMATS:
        given = _FORMATS[form][1]
    elif kind == "string":
        given = {"type": "str", **dict(bounds)}
    elif kind == "boolean":
        given = {"type": "bool"}
    else:
        given = {"type": "int" if kind == "integer" else "float", **dict(bounds)}
    try:
        return SchemaValidator(given)
    except SchemaError:  # a bound or a pattern that pydantic does not know
        return None


_VIOLATIONS = {
    "greater_than": ("must be more than {}", "gt"),
    "greater_than_equal": ("must be at least {}", "ge"),
    "less_than": ("must be less than {}", "lt"),
    "less_than_equal": ("must be at most {}", "le"),
    "string_too_short": ("must have {} or more characters", "min_length"),
    "string_too_long": ("must have {} or fewer characters", "max_length"),
    "string_pattern_mismatch": ("must have the form {}", "pattern"),
}


def _violation(error: ValidationError, value: Any) -> str:
    """The bound that a value of the right type violates, as a sentence; empty for a wrong type."""
    (problem,) = error.errors(include_url=False, include_input=False)
    words, limit = _VIOLATIONS.get(problem["type"], ("", ""))
    if not words:
        return ""
    bound = problem.get("ctx", {})[limit]
    if isinstance(bound, float) and bound.is_integer():
        bound = int(bound)
    text = one_line(str(bound), 200)
    return f"{words.format(text)}, not {shown(value)}"


def _is_among(value: Any, members: Sequence[Any]) -> bool:
    """Whether a value is one of an enum, or may be read as one: "1" as 1."""
    if isinstance(value, dict | list):
        return any(isinstance(one, dict | list) for one in members)
    is_text = isinstance(value, str)
    if any(one == value for one in members if isinstance(one, str) == is_text):
        return True
    numbers = [one for one in members if isinstance(one, int | float)]
    if value is None or not numbers:
        return False
    for kind in ("integer", "number", "boolean"):
        validator = _validator(kind, None, ())
        try:
            if validator is None or validator.validate_python(value) in numbers:
                return True
        except ValidationError:
            continue
    return False


def _not_among(value: Any, members: Sequence[Any], path: Path, words: Sequence[str] = ()) -> _Fault:
    """`words` are what it may be beside the members of the enum."""
    texts = [one for one in members if isinstance(one, str)]
    text = f"must be {_listed([*map(shown, members), *words])}, not {shown(value)}"
    return _Fault(path, text, value if isinstance(value, str) else "", texts)


def _not(words: Sequence[str], value: Any, path: Path) -> _Fault:
    return _Fault(path, f"must be {_listed(words)}, not {shown(value)}")


def _type_words(schema: Schema) -> list[str]:
    form = schema.get("format")
    if form in _FORMATS:
        return [_FORMATS[form][0]]
    return [_WORDS[kind] for kind in _types(schema) if kind in _WORDS]


def _listed(words: Sequence[str]) -> str:
    """`a, b or c`, each once."""
    once = list(dict.fromkeys(words)) or ["something else"]
    if len(once) > MAX_NAMED:
        once = [*once[:MAX_NAMED], "…"]
    *first, last = once
    return f"{', '.join(first)} or {last}" if first else last
