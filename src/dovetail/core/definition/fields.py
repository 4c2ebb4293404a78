"""Reading a definition into the model, and saying in plain words what its fields got wrong.

pydantic finds the violations; this file only translates them, so that nobody has to know what
an `int_type` error is. What it must not know: how nodes relate to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dovetail.core.definition.model import MAX_SECONDS, Cache, Defaults, Node, Retry, Workflow
from dovetail.core.findings import Finding, Path, Suggester, shown

_NODE_ID = "letters, digits and underscores, and does not start with a digit"
_NAME = "up to 128 letters, digits, dots, underscores and hyphens, the first a letter or a digit"


def read_fields(data: Any, suggester: Suggester) -> tuple[Workflow | None, Iterable[Finding]]:
    """The workflow, or every field that is wrong, put into words as they are asked for.

    `nodes` that are missing or null are left to the rule for an empty graph.
    """
    if not isinstance(data, dict):
        message = f"a definition is a mapping with 'name' and 'nodes', not {shown(data)}"
        return None, [Finding("invalid_field", message)]
    try:
        return Workflow.model_validate(data), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    return None, (_finding(found, suggester) for found in errors if not _is_about_no_nodes(found))


def _is_about_no_nodes(found: Mapping[str, Any]) -> bool:
    missing = found["type"] == "missing" or found["input"] is None
    return found["loc"] == ("nodes",) and missing


def _finding(found: Mapping[str, Any], suggester: Suggester) -> Finding:
    path: Path = found["loc"]
    kind: str = found["type"]
    if kind == "extra_forbidden":
        message = _unknown(path, suggester)
        return Finding("invalid_field", message, path, on_key=True)
    say = _MESSAGES.get(kind)
    message = say(found, path) if say else found["msg"]
    return Finding("invalid_field", message, path)


def _unknown(path: Path, suggester: Suggester) -> str:
    name = str(path[-1])
    if name == "depends_on":
        return "'depends_on' is another name for 'dependencies'; give only one of the two"
    known = _known_fields(path)
    hint = suggester.did_you_mean(name, known)
    return f"unknown field {shown(name)}{hint or '; known are: ' + ', '.join(known)}"


def _known_fields(path: Path) -> list[str]:
    """The fields of the part that an unknown one was found in."""
    names = [step for step in path[:-1] if isinstance(step, str)]
    part: type[BaseModel] = Workflow
    for name in names:
        part = _PARTS[name]
    known = list(part.model_fields)
    return [*known, "depends_on"] if part is Node else known


_PARTS: dict[str, type[BaseModel]] = {
    "nodes": Node,
    "defaults": Defaults,
    "retry": Retry,
    "cache": Cache,
}

Say = Callable[[Mapping[str, Any], Path], str]


def _must_be(what: str) -> Say:
    return lambda found, path: f"must be {what}, not {shown(found['input'])}"


def _bounded(words: str, limit: str) -> Say:
    def say(found: Mapping[str, Any], path: Path) -> str:
        bound = found["ctx"][limit]
        told = "ten years" if bound == MAX_SECONDS else f"{bound:g}"
        return f"must be {words} {told}, not {shown(found['input'])}"

    return say


def _missing(found: Mapping[str, Any], path: Path) -> str:
    return f"'{path[-1]}' is required"


def _pattern(found: Mapping[str, Any], path: Path) -> str:
    rule = _NAME if path[-1] == "name" else _NODE_ID
    return f"{shown(found['input'])} is not a valid {path[-1]}: it has {rule}"


def _length(words: str, limit: str) -> Say:
    return lambda found, path: f"must have {words} {found['ctx'][limit]} characters"


def _literal(found: Mapping[str, Any], path: Path) -> str:
    return f"must be {found['ctx']['expected']}, not {shown(found['input'])}"


_MESSAGES: dict[str, Say] = {
    "missing": _missing,
    "string_type": _must_be("text"),
    "int_type": _must_be("a whole number"),
    "float_type": _must_be("a number"),
    "list_type": _must_be("a list"),
    "dict_type": _must_be("a mapping"),
    "model_type": _must_be("a mapping"),
    "finite_number": _must_be("a finite number"),
    "greater_than": _bounded("more than", "gt"),
    "greater_than_equal": _bounded("at least", "ge"),
    "less_than_equal": _bounded("at most", "le"),
    "string_pattern_mismatch": _pattern,
    "string_too_short": lambda found, path: "must not be empty",
    "string_too_long": _length("at most", "max_length"),
    "literal_error": _literal,
}
