"""Reading a definition into the model, and saying in plain words what its fields got wrong.

pydantic finds the violations; this file only translates them, so that nobody has to know what
an `int_type` error is. What it must not know: how nodes relate to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from dovetail.core.definition.model import MAX_SECONDS, Cache, Defaults, Node, Retry, Workflow
from dovetail.core.findings import Finding, Path, Suggester, shown

_NODE_ID = "letters, digits and underscores, and does not start with a digit"
_NAME = "up to 128 letters, digits, dots, underscores and hyphens, the first a letter or a digit"


def read_fields(
    data: Any, suggester: Suggester, most: int
) -> tuple[Workflow | None, Iterator[Finding]]:
    """The workflow, or what is wrong with its fields, put into words as it is asked for.

    At least the first `most` problems are found. `nodes` that are missing or null are left to
    the rule for an empty graph.
    """
    if not isinstance(data, dict):
        message = f"a definition is a mapping with 'name' and 'nodes', not {shown(data)}"
        return None, iter([Finding("invalid_field", message)])
    enough = _Enough(most)
    listed: list[Any] = data["nodes"] if isinstance(data.get("nodes"), list) else []
    head = {**data, "nodes": []} if listed else data
    workflow, errors = _read(_WORKFLOW, enough.of(head, Workflow))
    nodes: list[Node] = []
    # pydantic makes all its errors before it shows the first, so it gets few nodes at a time.
    for since in range(0, len(listed), _NODES_AT_ONCE):
        some = listed[since : since + _NODES_AT_ONCE]
        read, wrong = _read(_NODES, [enough.of(raw, Node) for raw in some])
        nodes += read or []
        for error in wrong:
            index, *rest = error["loc"]
            error["loc"] = ("nodes", since + index, *rest)
        errors += wrong
        if len(errors) >= most:
            break
    if workflow is None or errors:
        found = (error for error in errors if not _is_about_no_nodes(error))
        return None, (_finding(error, suggester) for error in found)
    return workflow.model_copy(update={"nodes": nodes}), iter(())


_WORKFLOW = TypeAdapter(Workflow)
_NODES = TypeAdapter(list[Node])
_NODES_AT_ONCE = 100
_TEXTS = ("dependencies", "depends_on")


def _read(model: TypeAdapter[Any], data: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What was read, or none and the errors."""
    try:
        return model.validate_python(data), []
    except ValidationError as error:
        return None, [dict(found) for found in error.errors(include_url=False)]


class _Enough:
    """Leaves out of data what could only add to more problems than anybody wants to see."""

    def __init__(self, most: int) -> None:
        self._left = most

    def of(self, raw: Any, part: type[BaseModel]) -> Any:
        """The same without its last unknown fields, and dependencies that are no text."""
        if not isinstance(raw, dict):
            return raw
        known = _FIELDS[part]
        if not raw.keys() <= known.keys():
            raw = {name: raw[name] for name in raw if name in known or self._is_one_more()}
        for name, below in _INSIDE[part]:
            if name in raw:
                given = raw[name]
                kept = self._texts(given) if below is None else self.of(given, below)
                raw = raw if kept is given else {**raw, name: kept}
        return raw

    def _texts(self, names: Any) -> Any:
        if isinstance(names, list) and not {*map(type, names)} <= {str}:
            for place, name in enumerate(names):
                if not isinstance(name, str) and not self._is_one_more():
                    return names[:place]
        return names

    def _is_one_more(self) -> bool:
        self._left -= 1
        return self._left >= 0


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
    known = _FIELDS[_part(path)]
    hint = suggester.did_you_mean(name, known)
    return f"unknown field {shown(name)}{hint or '; known are: ' + ', '.join(known)}"


def _part(path: Path) -> type[BaseModel]:
    """The part that an unknown field was found in."""
    names = [step for step in path[:-1] if isinstance(step, str)]
    return _PARTS[names[-1]] if names else Workflow


_PARTS: dict[str, type[BaseModel]] = {
    "nodes": Node,
    "defaults": Defaults,
    "retry": Retry,
    "cache": Cache,
}
_MODELS: tuple[type[BaseModel], ...] = (Workflow, *_PARTS.values())
_FIELDS = {part: dict.fromkeys(part.model_fields) for part in _MODELS}
_FIELDS[Node]["depends_on"] = None
_INSIDE: dict[type[BaseModel], list[tuple[str, type[BaseModel] | None]]] = {
    part: [(name, _PARTS.get(name)) for name in known if name in {*_PARTS, *_TEXTS}]
    for part, known in _FIELDS.items()
}
"""The fields of a part that can have many problems themselves: parts, and lists of texts."""

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
