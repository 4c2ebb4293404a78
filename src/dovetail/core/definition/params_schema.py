"""Checks and compiles the JSON Schema of a workflow's params.

Definitions are untrusted. So a schema must not fetch (only references into itself are allowed),
loop or explode (references are followed and counted), or hang on a pattern (the linear-time regex
engine of jsonschema-rs has no look-around and no back-references).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import orjson

from dovetail.core.dag import cycles, layers
from dovetail.core.errors import Finding, Path, format_path, one_line, shown
from dovetail.core.values import NotJson, encode, faults

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MAX_SCHEMA_BYTES = 1 << 17
MAX_SCHEMA_DEPTH = 32
MAX_SUBSCHEMAS = 10_000
"""With all references followed: the most that one value can be checked against."""
# jsonschema-rs makes all its errors before it returns the first.
MAX_BYTES_FOR_ALL_ERRORS = 1 << 14
MAX_PATTERNS = 200
MAX_PATTERN_LENGTH = 1000
# Linear time still has a factor: measured at worst 1 µs per character for a pattern that
# compiles into 8 KiB (nearly all do), 23 µs for 256 KiB. So a pattern has a cost, its size in
# units of 8 KiB, and cost × length of the params is bounded.
PATTERN_SIZES = tuple(1 << bits for bits in (13, 15, 17, 20))
PATTERN_UNIT = PATTERN_SIZES[0]
MAX_PATTERN_SIZE = 4 << 20
"""Of all patterns together, as they are tried: 5 ms for each MiB."""
MAX_DEFAULT_CHECKS = 30_000
"""Parts that are filled in and checked, for every value in a default: 2 µs each at worst."""

JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

_ONE = (
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
_MAP = ("dependencies", "dependentSchemas", "patternProperties", "properties", *_DEFINITIONS)
_REFUSED = {
    "$id": "only the schema as a whole may have one",
    "$anchor": "refer to a part by its place, such as '#/$defs/name'",
    "$dynamicAnchor": "refer to a part by its place, such as '#/$defs/name'",
    "$dynamicRef": "use '$ref'",
    "$recursiveRef": "use '$ref'",
    "$recursiveAnchor": "use '$ref'",
    "$vocabulary": f"the vocabulary is that of {DRAFT}",
}
# Without any of these at the top it is not a schema but an example of params.
_AT_THE_TOP = frozenset(
    {*_ONE, *_LIST, *_MAP, *_REFUSED, "$comment", "$ref", "$schema", "const", "default"}
    | {"dependentRequired", "description", "enum", "examples", "maxProperties", "minProperties"}
    | {"required", "title", "type"}
)


@dataclass(slots=True)
class SubSchema:
    """One subschema with its path."""

    path: Path
    schema: dict[str, Any]
    inside: list[int] = field(default_factory=list)
    """The parts that check a value together with this one, its `$ref` included."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A checked and compiled schema."""

    root: dict[str, Any]
    validator: jsonschema_rs.Draft202012Validator
    targets: Mapping[str, dict[str, Any] | bool]
    """All subschemas by reference."""
    weight: int
    """The number of subschemas with all references expanded."""
    match_cost: int
    """Of all its patterns, in units of `PATTERN_UNIT`."""
    has_defaults: bool
    known: frozenset[str] | None
    """The params that the schema names; None if other params are described or allowed."""
    strict: jsonschema_rs.Draft202012Validator | None
    """Refuses a param that neither `known` nor a pattern covers; None if there is no pattern."""

    def target(self, schema: dict[str, Any]) -> dict[str, Any] | bool | None:
        """The subschema that `$ref` refers to."""
        return self.targets[unquote(schema["$ref"])] if "$ref" in schema else None

    def fill(self, schema: dict[str, Any], value: Any) -> None:
        """Put the defaults of `schema` into `value` where something is missing.

        Defaults come from `properties`, also behind `$ref` and `allOf` and in each item of a list.
        A missing object is not created only for the defaults of its properties.
        """
        todo: list[tuple[Any, Any]] = [(schema, value)]
        while todo:
            part, value = todo.pop()
            if not isinstance(part, dict) or not isinstance(value, dict | list):
                continue
            todo += [(other, value) for other in part.get("allOf", ())]
            todo.append((self.target(part), value))
            if isinstance(value, list):
                todo += [(part.get("items"), item) for item in value]
                continue
            for name, below in part.get("properties", {}).items():
                if name not in value:
                    found, default = self._default(below)
                    if not found:
                        continue
                    value[name] = deepcopy(default)
                todo.append((below, value[name]))

    def _default(self, schema: Any) -> tuple[bool, Any]:
        """The default of the subschema itself, else of the one it refers to."""
        while isinstance(schema, dict):
            if "default" in schema:
                return True, schema["default"]
            schema = self.target(schema)
        return False, None


class SchemaRefused(Exception):
    """A schema that is not accepted, with all findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("; ".join(f"{format_path(f.path)}: {f.message}" for f in findings))
        self.findings = findings


def compile_schema(schema: Any) -> Schema:
    """Raises `SchemaRefused`. Equal schemas are compiled once."""
    if not isinstance(schema, dict):
        message = f"must be a JSON Schema, not {shown(schema)}"
        raise SchemaRefused([Finding("invalid_field", message)])
    too_large = Finding("too_large", f"the schema has more than {MAX_SCHEMA_BYTES:,} bytes")
    if _is_long(schema):
        raise SchemaRefused([too_large])
    try:
        text = encode(schema, max_bytes=MAX_SCHEMA_BYTES, max_depth=MAX_SCHEMA_DEPTH)
    except NotJson:
        found = list(faults(schema, max_depth=MAX_SCHEMA_DEPTH))
        raise SchemaRefused(found or [too_large]) from None
    return _compiled(text)


def _is_long(schema: dict[str, Any]) -> bool:
    """By its size alone: a hundred times faster than a full check."""
    try:
        return len(orjson.dumps(schema)) > MAX_SCHEMA_BYTES
    except TypeError:  # no JSON; the caller finds out why
        return False


@lru_cache(maxsize=64)
def _compiled(text: bytes) -> Schema:
    root = orjson.loads(text)
    parts, booleans = _parts(root)
    indices = {_pointer(part.path): index for index, part in enumerate(parts)}
    match_cost, bad_patterns = _check_patterns(parts)
    findings = [
        *_shape(root),
        *_violations(root, len(text)),
        *(found for part in parts for found in _references(part, indices, booleans)),
        *bad_patterns,
    ]
    if not findings:
        # Only now all references are known to be valid.
        findings = _loops(parts) or _explosion(parts) or _large_defaults(parts)
    if findings:
        raise SchemaRefused(findings)
    weights = _weights(parts, MAX_SUBSCHEMAS)
    # At the top `$id` is only a name: all references begin with '#'.
    root.pop("$id", None)
    targets: dict[str, dict[str, Any] | bool] = {
        **{pointer: parts[index].schema for pointer, index in indices.items()},
        **booleans,
    }
    known, patterns = _known_params(root, targets)
    schema = Schema(
        root=root,
        validator=jsonschema_rs.Draft202012Validator(root, pattern_options=_PATTERNS, offline=True),
        targets=targets,
        weight=weights[0],
        match_cost=match_cost,
        has_defaults=any("default" in part.schema for part in parts),
        known=known,
        strict=_strict(known, patterns) if known is not None and patterns else None,
    )
    findings = _bad_defaults(schema, parts)
    if findings:
        raise SchemaRefused(findings)
    return schema


def _parts(root: dict[str, Any]) -> tuple[list[SubSchema], dict[str, bool]]:
    """All subschemas; and by reference the subschemas that are only `true` or `false`."""
    parts = [SubSchema((), root)]
    booleans: dict[str, bool] = {}
    for part in parts:  # grows in the loop
        for keyword, below in part.schema.items():
            for path, schema in _subschemas(keyword, below):
                if isinstance(schema, bool):
                    booleans[_pointer((*part.path, *path))] = schema
                if not isinstance(schema, dict):
                    continue
                if keyword not in _DEFINITIONS:
                    part.inside.append(len(parts))
                parts.append(SubSchema((*part.path, *path), schema))
    return parts, booleans


def _subschemas(keyword: str, below: Any) -> Iterator[tuple[Path, Any]]:
    if keyword in _ONE:
        yield (keyword,), below
    elif keyword in _LIST and isinstance(below, list):
        for index, schema in enumerate(below):
            yield (keyword, index), schema
    elif keyword in _MAP and isinstance(below, dict):
        for name, schema in below.items():
            yield (keyword, name), schema


def _shape(root: dict[str, Any]) -> Iterator[Finding]:
    """Params are an object, so their schema must describe one."""
    kind = root.get("type", "object")
    kinds = kind if isinstance(kind, list) else [kind]
    if "object" not in kinds and all(named in JSON_TYPES for named in kinds):
        message = f"params are an object, so the schema's type must be 'object', not {shown(kind)}"
        yield Finding("invalid_field", message, ("type",))
    if root and not _AT_THE_TOP & root.keys():
        message = f"not a JSON Schema: put {shown(next(iter(root)))} under 'properties'"
        yield Finding("invalid_field", message)
    if root.get("$schema", DRAFT) not in (DRAFT, f"{DRAFT}#"):
        yield Finding("invalid_field", f"the schema must be written for {DRAFT}", ("$schema",))


def _violations(root: dict[str, Any], size: int) -> list[Finding]:
    """Violations of the meta-schema; of a very large schema only the first."""
    # `_shape` reports another `$schema`; here it would change the rules.
    schema = {key: root[key] for key in root if key != "$schema"}
    if size <= MAX_BYTES_FOR_ALL_ERRORS:
        errors = list(_META.iter_errors(schema))
    else:
        try:
            _META.validate(schema)
            errors = []
        except jsonschema_rs.ValidationError as first:
            errors = [first]
    found: dict[tuple[Path, str], Finding] = {}  # each vocabulary reports the same again
    for error in errors:
        path: Path = tuple(error.instance_path)
        message = one_line(error.message, 200)
        if path[-1:] == ("type",) and error.kind.name == "anyOf":
            message = f"{shown(error.instance)} is not a JSON type"
        found[path, message] = Finding("invalid_field", message, path)
    return list(found.values())


_META = jsonschema_rs.Draft202012Validator({"$ref": DRAFT}, offline=True)


def _references(
    part: SubSchema, indices: Mapping[str, int], booleans: Mapping[str, bool]
) -> Iterator[Finding]:
    """Link a `$ref` to its target, which must be a subschema of the same document."""
    for keyword, instead in _REFUSED.items():
        if keyword in part.schema and (part.path or keyword != "$id"):
            message = f"'{keyword}' is not supported: {instead}"
            yield Finding("invalid_field", message, (*part.path, keyword), on_key=True)
    if "$schema" in part.schema and part.path:
        message = "'$schema' is allowed at the top only"
        yield Finding("invalid_field", message, (*part.path, "$schema"), on_key=True)
    ref = part.schema.get("$ref")
    if not isinstance(ref, str):
        return  # absent, or reported as a violation
    path = (*part.path, "$ref")
    if not ref.startswith("#"):
        message = f"{shown(ref)} is remote; only references within the schema (#/…) are followed"
        yield Finding("invalid_field", message, path)
    elif (pointer := unquote(ref)) in indices:
        part.inside.append(indices[pointer])
    elif pointer not in booleans:
        yield Finding("invalid_field", f"{shown(ref)} does not point to a subschema", path)


def _known_params(
    root: dict[str, Any], targets: Mapping[str, dict[str, Any] | bool]
) -> tuple[frozenset[str] | None, list[str]]:
    """The params that the schema names, and the patterns of others that it expects.

    All parts that apply to the params count, conditional ones too. None instead of names: the
    schema names none, or it describes all other params.
    """
    names: set[str] = set()
    patterns: dict[str, None] = {}
    described = False
    looked_at: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict) or id(part) in looked_at:
            continue
        looked_at.add(id(part))
        if any(keyword in part for keyword in _OF_OTHERS):
            return None, []
        described = described or "properties" in part
        names.update(part.get("properties", ()), part.get("required", ()))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            names.update(part.get(keyword, ()))
        for wanted in part.get("dependentRequired", {}).values():
            names.update(wanted)
        patterns |= dict.fromkeys(part.get("patternProperties", ()))
        todo += [part.get(keyword) for keyword in ("if", "then", "else")]
        for keyword in ("allOf", "anyOf", "oneOf"):
            todo += part.get(keyword, ())
        todo += part.get("dependentSchemas", {}).values()
        if "$ref" in part:
            todo.append(targets[unquote(part["$ref"])])
    return (frozenset(names), list(patterns)) if described else (None, [])


_OF_OTHERS = ("additionalProperties", "unevaluatedProperties", "propertyNames")


def _strict(names: frozenset[str], patterns: list[str]) -> jsonschema_rs.Draft202012Validator:
    schema = {
        "properties": dict.fromkeys(sorted(names), True),
        "patternProperties": dict.fromkeys(patterns, True),
        "additionalProperties": False,
    }
    return jsonschema_rs.Draft202012Validator(schema, pattern_options=_PATTERNS, offline=True)


def _pointer(path: Path) -> str:
    """The reference of a path."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "".join(("#", *(f"/{step}" for step in steps)))


def _patterns(part: SubSchema) -> Iterator[tuple[Path, str]]:
    pattern = part.schema.get("pattern")
    if isinstance(pattern, str):
        yield (*part.path, "pattern"), pattern
    by_name = part.schema.get("patternProperties")
    if isinstance(by_name, dict):
        for name in by_name:
            yield (*part.path, "patternProperties", name), name


def _check_patterns(parts: list[SubSchema]) -> tuple[int, list[Finding]]:
    """The cost of matching, and a finding for each refused pattern."""
    patterns = [found for part in parts for found in _patterns(part)]
    if len(patterns) > MAX_PATTERNS:
        message = f"the schema has {len(patterns):,} patterns; at most {MAX_PATTERNS} are allowed"
        return 0, [Finding("too_large", message)]
    sizes: dict[str, int | None] = {}
    tried = 0
    findings = []
    for path, pattern in patterns:
        if len(pattern) > MAX_PATTERN_LENGTH:
            message = f"a pattern may have {MAX_PATTERN_LENGTH:,} characters, not {len(pattern):,}"
            findings.append(Finding("too_large", message, path))
            continue
        if pattern not in sizes:
            size = next(filter(lambda size: _compiles(pattern, size), PATTERN_SIZES), None)
            sizes[pattern] = size
            tried += size or PATTERN_SIZES[-1]
        if sizes[pattern] is None:
            message = (
                f"{shown(pattern)} is not a pattern that can be matched in linear time "
                "(no look-around, no back-references, no huge repetitions)"
            )
            findings.append(Finding("invalid_field", message, path))
        if tried > MAX_PATTERN_SIZE:
            message = (
                "the patterns up to this one take more than "
                f"{MAX_PATTERN_SIZE:,} bytes in memory; repeat less, or classes of fewer characters"
            )
            findings.append(Finding("too_large", message, path))
            break
    return sum(sizes.get(pattern) or 0 for _, pattern in patterns) // PATTERN_UNIT, findings


def _options(size: int) -> jsonschema_rs.RegexOptions:
    return jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=1 << 20)


_PATTERNS = _options(PATTERN_SIZES[-1])


def _compiles(pattern: str, size: int) -> bool:
    try:
        jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=_options(size))
    except ValueError:
        return False
    return True


def _loops(parts: list[SubSchema]) -> list[Finding]:
    inside = [part.inside for part in parts]
    found = [cycle.members[0] for cycle in cycles(inside)]
    found += [index for index, below in enumerate(inside) if index in below]
    message = "this part of the schema contains itself through '$ref'; recursion is not supported"
    return [Finding("invalid_field", message, parts[index].path) for index in sorted(found)]


def _weights(parts: list[SubSchema], limit: int, own: Sequence[int] | None = None) -> list[int]:
    """The number of parts in each part with all references expanded, up to `limit` + 1.

    `own`: what each part itself counts, if not 1.
    """
    weights = [0] * len(parts)
    for layer in layers([part.inside for part in parts]):
        for index in layer:
            below = sum(weights[other] for other in parts[index].inside)
            weights[index] = min(below + (own[index] if own else 1), limit + 1)
    return weights


def _explosion(parts: list[SubSchema]) -> list[Finding]:
    if max(_weights(parts, MAX_SUBSCHEMAS)) <= MAX_SUBSCHEMAS:
        return []
    message = f"with its references followed the schema has more than {MAX_SUBSCHEMAS:,} parts"
    return [Finding("too_large", message)]


def _large_defaults(parts: list[SubSchema]) -> list[Finding]:
    """A finding if defaults are too large, or have too many parts, to be checked."""
    sizes = [
        count_values(part.schema["default"]) if "default" in part.schema else 0 for part in parts
    ]
    if not any(sizes):
        return []
    # A default may be filled from other defaults, so those count with their parent.
    weights = _weights(parts, MAX_DEFAULT_CHECKS, [1 + size for size in sizes])
    checks = sum(
        (weight - size) * max(1, size) for weight, size in zip(weights, sizes, strict=True)
    )
    if checks <= MAX_DEFAULT_CHECKS:
        return []
    message = (
        "its defaults are too large, or shared by too many parts, to be checked: "
        f"more than {MAX_DEFAULT_CHECKS:,} values and parts to compare"
    )
    return [Finding("too_large", message)]


def count_values(value: Any) -> int:
    """The number of values at any depth."""
    count, level = 0, [value]
    while level:
        count += len(level)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
    return count


def _bad_defaults(schema: Schema, parts: list[SubSchema]) -> list[Finding]:
    """Each default must be valid by its own schema."""
    if not schema.has_defaults:
        return []
    validators = jsonschema_rs.validator_map_for(
        schema.root, pattern_options=_PATTERNS, offline=True
    )
    findings = []
    for part in parts:
        if "default" not in part.schema:
            continue
        default = deepcopy(part.schema["default"])
        schema.fill(part.schema, default)
        if not validators[_pointer(part.path)].is_valid(default):
            message = f"the default {shown(part.schema['default'])} violates its own schema"
            findings.append(Finding("invalid_field", message, (*part.path, "default")))
    return findings
