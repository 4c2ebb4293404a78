"""Checks the params of a run against the workflow's schema and applies its defaults.

All violations come at once, with paths such as `params.topic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import jsonschema_rs
import orjson

from dovetail.core.definition.params_schema import (
    Schema,
    SchemaRefused,
    compile_schema,
    count_values,
)
from dovetail.core.definition.source import gc_paused
from dovetail.core.errors import (
    Finding,
    InvalidParams,
    Path,
    Problem,
    Suggester,
    format_path,
    one_line,
    shown,
)
from dovetail.core.values import MAX_BYTES, NotJson, encode, faults

MAX_VIOLATIONS = 100
MAX_WARNINGS = 100
# Beyond these products a check could take seconds; no schema that people write comes near.
MAX_CHECKS = 20_000_000
MAX_MATCHES = 8_000_000
# jsonschema-rs makes all its errors before it returns the first: 10 µs each.
MAX_VALUES_FOR_ALL_ERRORS = 20_000

_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "text",
}


def check_schema(schema: Any) -> list[Problem]:
    """All problems of a schema; none if it is accepted."""
    return [_problem(found) for found in schema_findings(schema)]


def schema_findings(schema: Any) -> list[Finding]:
    """The same with paths relative to the schema."""
    try:
        compile_schema(schema)
    except SchemaRefused as refused:
        return refused.findings
    return []


def apply_params(
    schema: Mapping[str, Any] | None, params: Any, *, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """A copy of the params with defaults applied. Raises `InvalidParams` with all violations.

    A workflow without a schema accepts any object; None is an empty object.
    """
    return check_params(schema, params, max_bytes=max_bytes)[0]


def check_params(
    schema: Mapping[str, Any] | None, params: Any, *, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, Any], Sequence[Problem]]:
    """The same, with a warning for each param that the schema neither names nor forbids."""
    if params is None:
        params = {}
    if not isinstance(params, dict):
        message = f"params must be a JSON object, not {shown(params)}"
        raise InvalidParams([Problem("invalid_field", message, "params")])
    try:
        text = encode(params, max_bytes=max_bytes, nul=False)
    except NotJson as error:
        found = list(islice(faults(params, max_values=max_bytes, nul=False), MAX_VIOLATIONS))
        too_large = Finding("too_large", str(error))
        raise InvalidParams([_problem(fault) for fault in found or [too_large]]) from None
    given: dict[str, Any] = orjson.loads(text)
    if schema is None:
        return given, ()
    try:
        checker = compile_schema(schema)
    except SchemaRefused as refused:
        raise InvalidParams([_problem(found) for found in refused.findings]) from None
    findings = _too_much(checker, given, len(text))
    if not findings:
        if checker.has_defaults:
            checker.fill(checker.root, given)
        if checker.validator.is_valid(given):
            return given, _unknown(checker, given)
        findings = _violations(checker, given)
    raise InvalidParams([_problem(found) for found in findings])


def _unknown(checker: Schema, given: dict[str, Any]) -> Sequence[Problem]:
    """A warning for each param that the schema does not name, though it names others."""
    if checker.known is None or given.keys() <= checker.known:
        return ()
    names = [name for name in given if name not in checker.known]
    if checker.strict is not None:
        try:
            checker.strict.validate(dict.fromkeys(names))
            return ()
        except jsonschema_rs.ValidationError as error:
            names = list(cast("Any", error.kind).unexpected)
    suggester, known = Suggester(), sorted(checker.known)
    return cut_warnings(
        [
            _problem(
                Finding(
                    "unknown_param",
                    f"{shown(name)} is not in the params schema"
                    f"{suggester.did_you_mean(name, known)}",
                    (name,),
                )
            )
            for name in names[: MAX_WARNINGS + 1]
        ],
        len(names),
    )


def cut_warnings(warnings: list[Problem], count: int) -> list[Problem]:
    """At most `MAX_WARNINGS`, and the number of the others."""
    if count > MAX_WARNINGS:
        message = f"and {count - MAX_WARNINGS:,} more params are not in the params schema"
        warnings[MAX_WARNINGS:] = [Problem("unknown_param", message, "params")]
    return warnings


def apply_to_items(schema: Mapping[str, Any] | None, items: Sequence[Any]) -> list[dict[str, Any]]:
    """The params of each item. Raises `InvalidParams` with the violations of all of them."""
    return check_items([schema] * len(items), items)[0]


def check_items(
    schemas: Sequence[Mapping[str, Any] | None], items: Sequence[Any]
) -> tuple[list[dict[str, Any]], Sequence[Problem]]:
    """The same, each item with its own schema, and the warnings of all of them."""
    if not items:
        raise InvalidParams([Problem("invalid_field", "there must be an item", "items")])
    given: list[dict[str, Any]] = []
    problems: list[Problem] = []
    warnings: list[Problem] = []
    count = 0
    with gc_paused():
        for index, (schema, params) in enumerate(zip(schemas, items, strict=True)):
            try:
                checked, unknown = check_params(schema, params)
            except InvalidParams as error:
                problems += [_within_item(problem, index) for problem in error.problems]
                continue
            given.append(checked)
            if unknown:
                count += len(unknown)
                if len(warnings) <= MAX_WARNINGS:
                    warnings += [_within_item(problem, index) for problem in unknown]
    if problems:
        raise InvalidParams(problems)
    return given, cut_warnings(warnings, count)


def _within_item(problem: Problem, place: int) -> Problem:
    """An item is the params of a run: its path begins where theirs does."""
    path = f"items[{place}]{problem.path.removeprefix('params')}"
    return Problem(problem.code, problem.message, path)


def typed(schema: Mapping[str, Any] | None, name: str, text: str) -> Any:
    """A param given as text (`-p depth=2`) as the type the schema wants, else as the text.

    What does not fit is left as text: `apply_params` then says what was expected.
    """
    try:
        checker = compile_schema(schema or {})
    except SchemaRefused:
        return text
    properties = checker.root.get("properties", {})
    types, choices = _expected(checker, properties.get(name))
    if text in choices:
        return text
    value = _parsed(text)
    if value in choices:
        return value
    if "string" in types:
        types.discard("null")  # where text is allowed, `null` is a word
    return value if any(_is(kind, value) for kind in types - {"string"}) else text


def _expected(checker: Schema, schema: Any) -> tuple[set[str], list[Any]]:
    """The types a subschema names, and the values if it lists them."""
    types: set[str] = set()
    choices: list[Any] = []
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        named = part.get("type", [])
        types.update([named] if isinstance(named, str) else named)
        choices += part.get("enum", [])
        choices += [part["const"]] if "const" in part else []
        for keyword in ("allOf", "anyOf", "oneOf"):
            todo += part.get(keyword, [])
        todo.append(checker.target(part))
    return types, choices


def _parsed(text: str) -> Any:
    """The JSON value, or the text itself if it is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES[kind])


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
}


def _too_much(checker: Schema, given: dict[str, Any], size: int) -> list[Finding]:
    """A finding if checking could take seconds because schema and params are both large."""
    if checker.match_cost * size > MAX_MATCHES:
        message = f"{size:,} bytes are too much for the patterns of this workflow's params schema"
        return [Finding("too_large", message)]
    if checker.weight * size > MAX_CHECKS and checker.weight * count_values(given) > MAX_CHECKS:
        message = "there are too many values in it for a params schema of this size"
        return [Finding("too_large", message)]
    return []


def _violations(checker: Schema, given: dict[str, Any]) -> list[Finding]:
    if count_values(given) > MAX_VALUES_FOR_ALL_ERRORS:
        try:
            checker.validator.validate(given)
        except jsonschema_rs.ValidationError as error:
            errors = [error]
    else:
        errors = list(checker.validator.iter_errors(given))
    suggester = Suggester()
    findings = [found for error in errors for found in _findings(checker, error, suggester)]
    if len(findings) > MAX_VIOLATIONS:
        more = len(findings) - MAX_VIOLATIONS
        findings[MAX_VIOLATIONS:] = [Finding("too_large", f"and {more:,} more problems")]
    return findings


def _findings(
    checker: Schema, error: jsonschema_rs.ValidationError, suggester: Suggester
) -> Iterator[Finding]:
    """One violation in plain words; a missing or unknown param has its own path."""
    path: Path = tuple(error.instance_path)
    kind = error.kind
    match kind:
        case jsonschema_rs.ValidationErrorKind.Required():
            yield Finding(
                "invalid_field", f"{shown(kind.property)} is required", (*path, kind.property)
            )
        case (
            jsonschema_rs.ValidationErrorKind.AdditionalProperties()
            | jsonschema_rs.ValidationErrorKind.UnevaluatedProperties()
        ):
            known = list(checker.root.get("properties", {})) if not path else []
            for name in kind.unexpected:
                hint = suggester.did_you_mean(name, known)
                message = f"{shown(name)} is not expected{hint}"
                yield Finding("invalid_field", message, (*path, name), on_key=True)
        case jsonschema_rs.ValidationErrorKind.Type():
            wanted = " or ".join(_TYPES[name] for name in sorted(kind.types))
            yield Finding("invalid_field", f"must be {wanted}, not {shown(error.instance)}", path)
        case jsonschema_rs.ValidationErrorKind.Enum():
            wanted = ", ".join(shown(option) for option in islice(kind.options, 20))
            message = f"must be one of {wanted}; not {shown(error.instance)}"
            yield Finding("invalid_field", message, path)
        case _:
            # The library's message begins with the value, which may be long.
            words = one_line(error.message, 200)
            if len(error.message) > 200:
                words = f"{shown(error.instance)} violates '{kind.name}' of the params schema"
            yield Finding("invalid_field", words, path)


def _problem(found: Finding) -> Problem:
    return Problem(found.code, found.message, format_path(("params", *found.path)))
