"""The JSON Schema of a pydantic model, as far as it says what the model must refuse.

`core/definition/config_schema.py` checks configs against it, workers announce it, and editors
complete by it. pydantic's own schema says what a model is for; it refuses values that validators,
aliases and defaults let pass. So this one is made of the core schema, from the types that are
known here. Everything else is left open: a validator that runs before or around the type, a custom
type, a discriminated union. `WithJsonSchema` is the word of the model's author and is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from inspect import cleandoc
from math import isfinite
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_SCHEMA_BYTES = 64 << 10
"""A larger schema is not announced."""

Schema = dict[str, Any]
Core = Mapping[str, Any]


@lru_cache(1024)
def schema_of(model: type[BaseModel]) -> Schema | None:
    """The schema of a model; None if it says nothing."""
    maker = _Maker()
    made = maker.of(model.__pydantic_core_schema__, {})
    if set(made) <= {"description"}:
        return None
    return {**made, "$defs": maker.definitions} if maker.definitions else made


def is_announced(schema: Schema) -> bool:
    """Whether a schema is small enough to be announced."""
    return len(orjson.dumps(schema)) <= MAX_SCHEMA_BYTES


class _Maker:
    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._names: dict[str, str] = {}
        """Reference of the core schema → name in `$defs`."""

    def of(self, core: Core, config: Core) -> Schema:
        """`config` is that of the model around it."""
        if (declared := _declared(core)) is not None:
            return declared
        make = _TYPES.get(core["type"])
        return {} if make is None else make(self, core, config)

    def _name(self, reference: str) -> str:
        if reference not in self._names:
            plain = reference.rpartition(".")[2].partition(":")[0]
            taken = {*self._names.values()}
            name = plain
            while name in taken:
                name += "_"
            self._names[reference] = name
        return self._names[reference]

    def definitions_(self, core: Core, config: Core) -> Schema:
        for one in core["definitions"]:
            self._name(one["ref"])
        made = {self._name(one["ref"]): self.of(one, config) for one in core["definitions"]}
        self.definitions.update(made)
        root = self.of(core["schema"], config)
        # The root is resolved, so that it is an object for editors, too.
        name = str(root.get("$ref", "")).removeprefix("#/$defs/")
        return {**self.definitions[name]} if name else root

    def reference(self, core: Core, config: Core) -> Schema:
        return {"$ref": f"#/$defs/{self._name(core['schema_ref'])}"}

    # ── models ───────────────────────────────────────────────────────────────────────────

    def model(self, core: Core, config: Core) -> Schema:
        if core.get("custom_init"):
            return {}
        made = self.of(core["schema"], core.get("config") or {})
        fields = getattr(core["cls"], "__pydantic_fields__", {})
        if not core.get("root_model") and made.get("type") == "object":
            _describe(made, fields)
        words = core["cls"].__doc__
        return {"description": cleandoc(words), **made} if words and made else made

    def fields(self, core: Core, config: Core) -> Schema:
        own = core.get("config") or config
        properties: dict[str, Schema] = {}
        required: list[str] = []
        is_open = False
        for name, field in core["fields"].items():
            known_as = _name_of(name, field, own)
            if known_as is None:
                is_open = True
                continue
            properties[known_as] = made = self.of(field["schema"], own)
            default = _default_of(field["schema"])
            if default is None:
                required.append(known_as)
            else:
                _add_default(made, default)
            if known_as != name:
                made["$field"] = name
        made = {"type": "object", "properties": properties}
        if is_open:  # the same field has several names
            return {**made, "additionalProperties": True}
        if required:
            made["required"] = required
        extra = core.get("extra_behavior") or own.get("extra_fields_behavior")
        if extra == "forbid":
            made["additionalProperties"] = False
        elif extra == "allow":
            others = core.get("extras_schema")
            made["additionalProperties"] = self.of(others, own) if others else True
        return made

    # ── containers ───────────────────────────────────────────────────────────────────────

    def inner(self, core: Core, config: Core) -> Schema:
        return self.of(core["schema"], config)

    def default(self, core: Core, config: Core) -> Schema:
        if core.get("on_error", "raise") != "raise":
            return {}
        return self.of(core["schema"], config)

    def nullable(self, core: Core, config: Core) -> Schema:
        made = self.of(core["schema"], config)
        return _any_of([made, {"type": "null"}])

    def union(self, core: Core, config: Core) -> Schema:
        choices = [one[0] if isinstance(one, tuple) else one for one in core["choices"]]
        return _any_of([self.of(one, config) for one in choices])

    def array(self, core: Core, config: Core) -> Schema:
        made: Schema = {"type": "array"}
        if items := self.of(core.get("items_schema") or {"type": "any"}, config):
            made["items"] = items
        _bound(made, core, {"min_length": "minItems", "max_length": "maxItems"})
        if core["type"] != "list":
            made["uniqueItems"] = True
        return made

    def tuple(self, core: Core, config: Core) -> Schema:
        made: Schema = {"type": "array"}
        if core.get("variadic_item_index") is None:
            first = [self.of(one, config) for one in core["items_schema"]]
            made |= {"minItems": len(first), "maxItems": len(first), "prefixItems": first}
        return made

    def dict(self, core: Core, config: Core) -> Schema:
        held = self.of(core.get("values_schema") or {"type": "any"}, config)
        return {"type": "object", "additionalProperties": held or True}

    # ── single values ────────────────────────────────────────────────────────────────────

    def number(self, core: Core, config: Core) -> Schema:
        made: Schema = {"type": "integer" if core["type"] == "int" else "number"}
        _bound(made, core, _OF_NUMBERS)
        return made

    def text(self, core: Core, config: Core) -> Schema:
        if core.get("coerce_numbers_to_str", config.get("coerce_numbers_to_str")):
            return {"type": ["string", "number", "boolean"]}
        made: Schema = {"type": "string"}
        changed = ("strip_whitespace", "to_lower", "to_upper")
        if any(core.get(one, config.get(f"str_{one}")) for one in changed):
            return made  # lengths and patterns are those of the changed text
        _bound(made, core, {"min_length": "minLength", "max_length": "maxLength"})
        engine = core.get("regex_engine") or config.get("regex_engine") or "rust-regex"
        if isinstance(core.get("pattern"), str) and engine == "rust-regex":
            made["pattern"] = core["pattern"]
        return made

    def members(self, core: Core, config: Core) -> Schema:
        if core["type"] == "enum" and _finds_members(core["cls"]):
            return {}
        given = core["expected"] if core["type"] == "literal" else core["members"]
        members = [one.value if isinstance(one, Enum) else one for one in given]
        if not all(one is None or isinstance(one, str | int | float) for one in members):
            return {}
        return {"enum": members}


def _finds_members(kind: type[Enum]) -> bool:
    """Whether an enum has its own way from a value to a member."""
    return getattr(kind._missing_, "__func__", None) is not Enum._missing_.__func__  # type: ignore[attr-defined]


def _plain(schema: Schema) -> Callable[[_Maker, Core, Core], Schema]:
    return lambda maker, core, config: dict(schema)


_OF_NUMBERS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_TYPES: dict[str, Callable[[_Maker, Core, Core], Schema]] = {
    "definitions": _Maker.definitions_,
    "definition-ref": _Maker.reference,
    "model": _Maker.model,
    "model-fields": _Maker.fields,
    # A validator that runs afterwards can only refuse more.
    "function-after": _Maker.inner,
    "default": _Maker.default,
    "nullable": _Maker.nullable,
    "union": _Maker.union,
    "list": _Maker.array,
    "set": _Maker.array,
    "frozenset": _Maker.array,
    "tuple": _Maker.tuple,
    "dict": _Maker.dict,
    "int": _Maker.number,
    "float": _Maker.number,
    "str": _Maker.text,
    "literal": _Maker.members,
    "enum": _Maker.members,
    "bool": _plain({"type": "boolean"}),
    "none": _plain({"type": "null"}),
    "bytes": _plain({"type": "string"}),
    "datetime": _plain({"type": ["string", "number"], "format": "date-time"}),
    "date": _plain({"type": ["string", "number"], "format": "date"}),
    "time": _plain({"type": ["string", "number"], "format": "time"}),
    "timedelta": _plain({"type": ["string", "number"], "format": "duration"}),
    "decimal": _plain({"type": ["string", "number"], "format": "decimal"}),
    "uuid": _plain({"type": "string", "format": "uuid"}),
}
"""Each type of pydantic's core schema that is known here. A new one is a new row."""


def _any_of(branches: list[Schema]) -> Schema:
    """One schema for several; open if one of them is."""
    if not all(branches):
        return {}
    flat = [one for each in branches for one in each.get("anyOf", [each])]
    return {"anyOf": flat}


def _bound(made: Schema, core: Core, names: Mapping[str, str]) -> None:
    for name, keyword in names.items():
        bound = core.get(name)
        if isinstance(bound, int | float) and isfinite(bound):
            made[keyword] = bound


def _name_of(name: str, field: Core, config: Core) -> str | None:
    """The one name of a field in a config; None if it has several."""
    alias = field.get("validation_alias")
    if alias is None or config.get("validate_by_alias") is False:
        return name
    if config.get("validate_by_name") or config.get("populate_by_name"):
        return None
    if isinstance(alias, str):
        return alias
    match alias:
        case [str(only)] | [[str(only)]]:
            return only
    return None


def _default_of(core: Core) -> Core | None:
    """The part of a field's schema that gives it a default; None: the field is required."""
    while core["type"] != "default":
        if not core["type"].startswith("function-") or "schema" not in core:
            return None
        core = core["schema"]
    return core


def _add_default(made: Schema, core: Core) -> None:
    default = core.get("default")
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, float) and not isfinite(default):
        return
    if isinstance(default, str | int | float):
        made["default"] = default


def _describe(made: Schema, fields: Mapping[str, Any]) -> None:
    """Add the words of the model's fields, for people."""
    for known_as, schema in made["properties"].items():
        info = fields.get(schema.pop("$field", known_as))
        if info is None:
            continue
        if info.description:
            schema["description"] = cleandoc(info.description)
        if info.examples and _is_json(info.examples):
            schema["examples"] = info.examples


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


# What the check reads of a schema that a person wrote, and of which type it must be.
_KEYWORDS: dict[str, tuple[type, ...]] = {
    "type": (str, list),
    "enum": (list,),
    "const": (str, int, float, bool),
    "description": (str,),
    "minimum": (int, float),
    "maximum": (int, float),
    "exclusiveMinimum": (int, float),
    "exclusiveMaximum": (int, float),
    "minLength": (int,),
    "maxLength": (int,),
    "minItems": (int,),
    "maxItems": (int,),
    "pattern": (str,),
    "required": (list,),
    "uniqueItems": (bool,),
}


def _declared(core: Core) -> Schema | None:
    """The schema that `WithJsonSchema` gives to this type, if it does."""
    from pydantic import WithJsonSchema

    metadata = core.get("metadata") or {}
    for function in metadata.get("pydantic_js_annotation_functions", ()):
        said = getattr(function, "__self__", None)
        if isinstance(said, WithJsonSchema) and said.mode != "serialization":
            return _known_part(said.json_schema)
    return None


def _known_part(schema: Any) -> Schema:
    """What can be checked of it; open where it has other keywords that could accept more."""
    if not isinstance(schema, dict):
        return {}
    made = {
        name: schema[name]
        for name, kinds in _KEYWORDS.items()
        if isinstance(schema.get(name), kinds)
    }
    if isinstance(branches := schema.get("anyOf"), list):
        return {**_any_of([_known_part(one) for one in branches])}
    if isinstance(properties := schema.get("properties"), dict):
        made["properties"] = {name: _known_part(one) for name, one in properties.items()}
    if isinstance(others := schema.get("additionalProperties"), bool | dict):
        made["additionalProperties"] = others if others is False else _known_part(others) or True
    elif "properties" in made:
        made["additionalProperties"] = True
    if items := _known_part(schema.get("items")):
        made["items"] = items
    return made
