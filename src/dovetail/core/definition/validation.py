"""Validates a definition: all problems at once, each with its position.

`read_fields` reads the model; pydantic finds the violations and this file puts them into plain
words. `DefinitionFacts` reads nodes and edges from the raw data, also of a broken definition, and
leaves out what has the wrong shape: `read_fields` reports that. `check` applies the table `RULES`
to the facts. So a node with a bad timeout still has its dependencies and templates checked. Nothing
recurses, and each rule is linear in the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from dovetail.core import dag
from dovetail.core.definition.config_schema import ConfigCheck, KnowsConfigSchemas
from dovetail.core.definition.model import (
    MAX_SECONDS,
    Cache,
    Defaults,
    ForEach,
    Node,
    RetrySettings,
    Webhook,
    Workflow,
)
from dovetail.core.definition.params import schema_findings
from dovetail.core.definition.source import MAX_TEXT_BYTES, MAX_TEXT_DEPTH, Source, gc_paused
from dovetail.core.errors import Finding, Path, Problem, Suggester, format_path, one_line, shown
from dovetail.core.redaction import KnowsSecretFields, misplaced
from dovetail.core.templates import (
    MAX_TEMPLATE_SIZE,
    ROOTS,
    Read,
    TemplateRefused,
    keys_read,
    parse_template,
)
from dovetail.core.templates.template_index import TemplateIndex
from dovetail.core.values import faults, is_json, plain

_MAX_SEARCHED_PARENTS = 16


@dataclass(frozen=True, slots=True)
class DefinitionLimits:
    """How large a definition may be. `max_body_bytes` is checked when a text is read."""

    max_nodes: int = 10_000
    max_edges: int = 100_000
    max_body_bytes: int = MAX_TEXT_BYTES
    max_depth: int = MAX_TEXT_DEPTH
    max_template_bytes: int = MAX_TEMPLATE_SIZE
    max_templates: int = 25_000
    """Different templates in one definition."""
    max_template_words: int = 150_000
    """Words and signs of all templates: a dozen for each node."""
    max_parsed_words: int = 10_000
    """The same; templates that differ only in names, numbers and quoted texts count once."""


class RawNode:
    """One entry of `nodes`, with the fields that have a usable shape."""

    __slots__ = ("_listed", "condition", "config", "dependencies", "handler", "id", "index", "raw")

    def __init__(self, index: int, raw: dict[str, Any]) -> None:
        self.index = index
        self.raw = raw
        self.id = _text(raw.get("id"))
        self.handler = _text(raw.get("handler"))
        self.condition = raw.get("condition")
        config = raw.get("config")
        self.config: dict[str, Any] = config if isinstance(config, dict) else {}
        self._listed = "dependencies" if raw.get("dependencies") is not None else "depends_on"
        names = raw.get(self._listed)
        self.dependencies: list[Any] = names if isinstance(names, list) else []
        """As they are listed; the model reports entries that are no text."""

    @property
    def path(self) -> Path:
        return ("nodes", self.index)

    def dependency_path(self, index: int) -> Path:
        return ("nodes", self.index, self._listed, index)

    @property
    def has_condition(self) -> bool:
        return self.condition is not None and self.condition is not True

    @property
    def for_each(self) -> tuple[Path, Any]:
        """Where the items of a mapped node are, and what is there; None for any other node."""
        given = self.raw.get("for_each")
        if isinstance(given, dict):
            return (*self.path, "for_each", "items"), given.get("items")
        return (*self.path, "for_each"), given

    @property
    def is_mapped(self) -> bool:
        return self.raw.get("for_each") is not None

    @property
    def allows_failure(self) -> bool:
        return self.raw.get("allow_failure") is True


class DefinitionFacts:
    """A definition's nodes, their names and their edges."""

    def __init__(
        self,
        data: Any,
        known_handlers: Container[str] | None,
        limits: DefinitionLimits,
        suggester: Suggester,
    ) -> None:
        self._is_mapping = isinstance(data, dict)
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}
        self.known_handlers = known_handlers
        self.limits = limits
        self.suggester = suggester
        listed = self.data.get("nodes")
        self._listed: list[Any] = listed if isinstance(listed, list) else []

    @cached_property
    def oversize(self) -> list[Finding]:
        """Why the definition is too large to be checked node by node; nothing if it is not."""
        limits = self.limits
        found = []
        if len(self._listed) > limits.max_nodes:
            message = f"{len(self._listed):,} nodes; at most {limits.max_nodes:,} are allowed"
            found.append(Finding("too_large", message, ("nodes",)))
        edges = sum(
            len(names)
            for raw in self._listed
            if isinstance(raw, dict)
            for names in (raw.get("dependencies"), raw.get("depends_on"))
            if isinstance(names, list)
        )
        if edges > limits.max_edges:
            message = f"{edges:,} dependencies; at most {limits.max_edges:,} are allowed"
            found.append(Finding("too_large", message, ("nodes",)))
        return found

    @property
    def is_empty(self) -> bool:
        """Whether `nodes` is missing or empty, rather than of a wrong type."""
        return self._is_mapping and self.data.get("nodes") in (None, [])

    @cached_property
    def nodes(self) -> list[RawNode]:
        return [RawNode(i, raw) for i, raw in enumerate(self._listed) if isinstance(raw, dict)]

    @cached_property
    def by_id(self) -> dict[str, int]:
        """The index of each id in `nodes`; of a repeated id the first."""
        found: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            if node.id is not None:
                found.setdefault(node.id, index)
        return found

    @cached_property
    def readable(self) -> list[str]:
        """All names that a template may read."""
        return [*self.by_id, *ROOTS]

    @cached_property
    def parents(self) -> list[list[int]]:
        """The edges to other nodes that exist, each once."""
        by_id = self.by_id
        return [
            list(
                dict.fromkeys(
                    by_id[name]
                    for name in node.dependencies
                    if isinstance(name, str) and by_id.get(name, index) != index
                )
            )
            if node.dependencies
            else []
            for index, node in enumerate(self.nodes)
        ]

    @cached_property
    def layers(self) -> list[list[int]]:
        return dag.layers(self.parents)

    def is_upstream(self, other: int, index: int) -> bool:
        """Whether the node at `other` is an ancestor of the node at `index`."""
        parents = self.parents[index]
        # Mostly it is one of a few parents; searching thousands would be slower than bits.
        if len(parents) <= _MAX_SEARCHED_PARENTS and other in parents:
            return True
        return bool(self._ancestors[index] >> other & 1)

    @cached_property
    def _ancestors(self) -> list[int]:
        return dag.ancestors(self.parents)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_NODE_ID = "letters, digits and underscores, and does not start with a digit"
_NAME = "up to 128 letters, digits, dots, underscores and hyphens, the first a letter or a digit"


def read_fields(
    data: Any, suggester: Suggester, max_problems: int
) -> tuple[Workflow | None, Iterator[Finding]]:
    """The workflow, or the problems of its fields, put into words lazily.

    At least the first `max_problems` are found. Missing `nodes` are reported by the rule for an
    empty graph.
    """
    if not isinstance(data, dict):
        message = f"a definition is a mapping with 'name' and 'nodes', not {shown(data)}"
        return None, iter([Finding("invalid_field", message)])
    enough = _Enough(max_problems)
    listed: list[Any] = data["nodes"] if isinstance(data.get("nodes"), list) else []
    head = {**data, "nodes": []} if listed else data
    workflow, errors = _read(_WORKFLOW, enough.of(head, Workflow))
    nodes: list[Node] = []
    # pydantic makes all its errors before it returns the first, so it gets a few nodes at a time.
    for since in range(0, len(listed), _NODES_AT_ONCE):
        some = listed[since : since + _NODES_AT_ONCE]
        read, wrong = _read(_NODES, [enough.of(raw, Node) for raw in some])
        nodes += read or []
        for error in wrong:
            index, *rest = error["loc"]
            error["loc"] = ("nodes", since + index, *rest)
        errors += wrong
        if len(errors) >= max_problems:
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
    """The model, or None and the errors."""
    try:
        return model.validate_python(data), []
    except ValidationError as error:
        return None, [dict(found) for found in error.errors(include_url=False)]


class _Enough:
    """Leaves out of data what could only add to more problems than are shown."""

    def __init__(self, max_problems: int) -> None:
        self._left = max_problems

    def of(self, raw: Any, part: type[BaseModel]) -> Any:
        """The same without its last unknown fields, and dependencies that are no text."""
        if not isinstance(raw, dict):
            return raw
        if raw.get("depends_on", ...) is None:  # null means "not given", also beside `dependencies`
            raw = {name: raw[name] for name in raw if name != "depends_on"}
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
            for index, name in enumerate(names):
                if not isinstance(name, str) and not self._is_one_more():
                    return names[:index]
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
    code = "too_large" if kind == "too_many_items" else "invalid_field"
    return Finding(code, message, path)


def _unknown(path: Path, suggester: Suggester) -> str:
    name = str(path[-1])
    if name == "depends_on":
        return "'depends_on' is another name for 'dependencies'; give only one of the two"
    part = _part(path)
    if part is Node and name in _FIELDS[ForEach]:
        form = ", ".join(f"{one}: …" for one in dict.fromkeys(("items", name)))
        return f"unknown field '{name}'; it belongs into for_each, as in for_each: {{{form}}}"
    known = _FIELDS[part]
    hint = suggester.did_you_mean(name, known)
    return f"unknown field {shown(name)}{hint or '; known are: ' + ', '.join(known)}"


def _part(path: Path) -> type[BaseModel]:
    """The part that an unknown field was found in."""
    names = [step for step in path[:-1] if isinstance(step, str)]
    return _PARTS[names[-1]] if names else Workflow


_PARTS: dict[str, type[BaseModel]] = {
    "nodes": Node,
    "defaults": Defaults,
    "retry": RetrySettings,
    "cache": Cache,
    "for_each": ForEach,
    "notify": Webhook,
}
_MODELS: tuple[type[BaseModel], ...] = (Workflow, *_PARTS.values())
_FIELDS = {part: dict.fromkeys(part.model_fields) for part in _MODELS}
_FIELDS[Node]["depends_on"] = None
_INSIDE: dict[type[BaseModel], list[tuple[str, type[BaseModel] | None]]] = {
    part: [(name, _PARTS.get(name)) for name in known if name in {*_PARTS, *_TEXTS}]
    for part, known in _FIELDS.items()
}
"""The fields of a part that may have many problems themselves: parts, and lists of texts."""

Say = Callable[[Mapping[str, Any], Path], str]


def _must_be(what: str) -> Say:
    return lambda found, path: f"must be {what}, not {shown(found['input'])}"


def _bounded(words: str, limit: str) -> Say:
    def say(found: Mapping[str, Any], path: Path) -> str:
        bound = found["ctx"][limit]
        shown_bound = "ten years" if bound == MAX_SECONDS else f"{bound:g}"
        return f"must be {words} {shown_bound}, not {shown(found['input'])}"

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
    "bool_type": _must_be("true or false"),
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
    "too_short": lambda found, path: "must not be empty",
    "too_long": lambda found, path: f"must have at most {found['ctx']['max_length']} entries",
    "literal_error": _literal,
}


__all__ = ["RULES", "Checked", "DefinitionLimits", "check"]

MAX_PROBLEMS = 1000
_WARNINGS = frozenset({"template_may_be_skipped"})


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome: the workflow if it is valid, the layers if it has an order."""

    workflow: Workflow | None
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    layers: list[list[str]]
    parsed: Workflow | None = None
    """The workflow even if it is not valid, if it is JSON and its fields could be read."""

    @property
    def valid(self) -> bool:
        return not self.errors


def check(
    definition: Source | Mapping[str, Any],
    known_handlers: Container[str] | None = None,
    limits: DefinitionLimits | None = None,
) -> Checked:
    """Check a definition. `known_handlers` has aliases too; None: handlers are not checked.

    If it also has `secret_fields`, that says which handlers take secrets; else none does. If it has
    `config_schema`, configs are checked against the schemas of their handlers.
    """
    source = definition if isinstance(definition, Source) else Source(definition)
    with gc_paused():
        return _check(source, known_handlers, limits or DefinitionLimits())


def _check(
    source: Source, known_handlers: Container[str] | None, limits: DefinitionLimits
) -> Checked:
    data = dict(source.data) if isinstance(source.data, Mapping) else source.data
    workflow: Workflow | None = None
    layers: list[list[str]] = []
    findings = list(_not_json(data, limits)) if source.text is None else []
    is_data = not findings
    if source.text is None and is_data:
        data = plain(data)  # a tuple becomes a list, as it does on the way to a server
    if not any(found.code == "too_large" for found in findings):
        suggester = Suggester()
        facts = DefinitionFacts(data, known_handlers, limits, suggester)
        if facts.oversize:
            findings += facts.oversize
        else:
            workflow, wrong_fields = read_fields(data, suggester, MAX_PROBLEMS + 1)
            for found in (wrong_fields, *(rule(facts) for rule in RULES)):
                findings += _enough(found)
            layers = _named_layers(facts, findings)
    errors = [found for found in findings if found.code not in _WARNINGS]
    warnings = [found for found in findings if found.code in _WARNINGS]
    return Checked(
        workflow=None if errors else workflow,
        errors=_problems(errors, source),
        warnings=_problems(warnings, source),
        layers=layers,
        # Values that are no JSON can be neither digested nor stored.
        parsed=workflow if is_data else None,
    )


def _enough(found: Iterable[Finding]) -> Iterator[Finding]:
    """One more than `MAX_PROBLEMS`, which are shown.

    Warnings are counted separately: no number of them may hide an error.
    """
    errors = warnings = 0
    for each in found:
        if each.code in _WARNINGS:
            warnings += 1
            if warnings > MAX_PROBLEMS + 1:
                continue
        else:
            errors += 1
        yield each
        if errors > MAX_PROBLEMS:
            return


def _not_json(data: Any, limits: DefinitionLimits) -> Iterator[Finding]:
    """Data that did not come from a text must be JSON all the same."""
    # It has no body whose bytes could be counted, so its values are.
    max_values = limits.max_body_bytes
    if not is_json(data, max_depth=limits.max_depth, max_values=max_values, nul=False):
        found = faults(data, max_depth=limits.max_depth, max_values=max_values, nul=False)
        yield from islice(found, MAX_PROBLEMS)


def empty_graph(facts: DefinitionFacts) -> Iterator[Finding]:
    if facts.is_empty:
        yield Finding("empty_graph", "a workflow needs at least one node", ("nodes",))


def duplicate_ids(facts: DefinitionFacts) -> Iterator[Finding]:
    for index, node in enumerate(facts.nodes):
        if node.id is not None and facts.by_id[node.id] != index:
            first = format_path(facts.nodes[facts.by_id[node.id]].path)
            message = f"{shown(node.id)} is already the id of {first}"
            yield Finding("duplicate_id", message, (*node.path, "id"))


def dependencies(facts: DefinitionFacts) -> Iterator[Finding]:
    for node in facts.nodes:
        seen: set[str] = set()
        for index, name in enumerate(node.dependencies):
            if not isinstance(name, str):
                continue
            repeated = name in seen
            seen.add(name)
            if name == node.id:
                code, message = "self_dependency", f"{shown(name)} depends on itself"
            elif repeated:
                code, message = "invalid_field", f"{shown(name)} is listed twice; once is enough"
            elif name not in facts.by_id:
                hint = facts.suggester.did_you_mean(name, facts.by_id)
                code, message = "missing_dependency", f"there is no node {shown(name)}{hint}"
            else:
                continue
            yield Finding(code, message, node.dependency_path(index))


def cycles(facts: DefinitionFacts) -> Iterator[Finding]:
    """Each cycle once, and the nodes that can never start because they come after one."""
    ordered = {index for layer in facts.layers for index in layer}
    if len(ordered) == len(facts.nodes):
        return
    found = dag.cycles(facts.parents)
    for cycle in found:
        node = facts.nodes[cycle.way[0]]
        closing = node.dependencies.index(facts.nodes[cycle.way[-1]].id)
        way = dag.spell_out([one_line(str(facts.nodes[index].id)) for index in cycle.way])
        message = f"{len(cycle.members):,} nodes wait for each other: {way}"
        yield Finding("cycle", message, node.dependency_path(closing))
    ordered.update(index for cycle in found for index in cycle.members)
    for index, node in enumerate(facts.nodes):
        if index not in ordered:
            message = f"{shown(node.id)} can never start: it comes after a cycle"
            yield Finding("unreachable", message, node.path)


def handlers(facts: DefinitionFacts) -> Iterator[Finding]:
    known = facts.known_handlers
    if known is None:
        return
    candidates = list(known) if isinstance(known, Iterable) else []
    for node in facts.nodes:
        if node.handler and node.handler not in known:
            hint = facts.suggester.did_you_mean(node.handler, candidates)
            hint = hint or "; `dovetail handlers` lists the known handlers"
            message = f"there is no handler {shown(node.handler)}{hint}"
            yield Finding("unknown_handler", message, (*node.path, "handler"))


def configs(facts: DefinitionFacts) -> Iterator[Finding]:
    """Whether each config fits its handler, as far as the schema of the handler is known."""
    known = facts.known_handlers
    if not isinstance(known, KnowsConfigSchemas):
        return
    checks: dict[str, ConfigCheck | None] = {}
    for node in facts.nodes:
        name = node.handler
        if not name or not isinstance(node.raw.get("config"), dict | None):
            continue
        if name not in checks:
            schema = known.config_schema(name)
            checks[name] = None if schema is None else ConfigCheck(schema)
        check_config = checks[name]
        if check_config is not None:
            path = (*node.path, "config")
            yield from check_config.findings(node.config, path, facts.suggester)


def delivery(facts: DefinitionFacts) -> Iterator[Finding]:
    for node in facts.nodes:
        retries = node.raw.get("max_retries")
        if node.raw.get("delivery") == "at_most_once" and isinstance(retries, int) and retries > 0:
            message = "an at_most_once node is never retried by itself: leave max_retries out"
            yield Finding("invalid_field", message, (*node.path, "max_retries"))


def params_schema(facts: DefinitionFacts) -> Iterator[Finding]:
    schema = facts.data.get("params")
    if isinstance(schema, dict):
        for found in schema_findings(schema):
            yield Finding(found.code, found.message, ("params", *found.path), found.on_key)


def templates(facts: DefinitionFacts) -> Iterator[Finding]:
    """Whether each template is well formed and reads only ancestors."""
    limits = facts.limits
    survey = TemplateIndex(limits.max_template_bytes)
    found = []
    for index, node in enumerate(facts.nodes):
        for path, text, is_condition in _texts(node):
            found.append((index, path, text, is_condition))
            if text not in survey:
                survey.add(text)
                if message := _too_much(survey, limits):
                    # Parsing is the most expensive step, so a template that is too long is not.
                    yield Finding("too_large", f"{message}; none of them was checked", path)
                    return
    outcomes: dict[tuple[str, bool], tuple[Read, ...] | TemplateRefused] = {}
    for index, path, text, is_condition in found:
        outcome = outcomes.get((text, is_condition))
        if outcome is None:
            try:
                outcome = survey.reads(text, is_condition=is_condition)
            except TemplateRefused as refused:
                outcome = refused
                if survey.parsed_words > limits.max_parsed_words:
                    message = "so many templates are wrong that from here on none was checked"
                    yield Finding("too_large", message, path)
                    return
            outcomes[text, is_condition] = outcome
        if isinstance(outcome, TemplateRefused):
            yield Finding(outcome.code, outcome.message, path)
            continue
        node, field = facts.nodes[index], path[2]
        own = ITEM_NAMES if node.is_mapped and field == "config" else ()
        for code, message in _misread(facts, index, outcome, own):
            yield Finding(code, message, path)
        for message in _misread_lists(facts, text, outcome, own):
            yield Finding("template_unknown_key", message, path)
        if field == "for_each":
            yield from _wrong_list(node, path, text, outcome)
        elif any(read.name == "secrets" for read in outcome):
            why = _secret_misplaced(facts, facts.nodes[index], path)
            if why is not None:
                yield Finding("template_forbidden", why, path)


def _wrong_list(node: RawNode, path: Path, text: str, reads: tuple[Read, ...]) -> Iterator[Finding]:
    """Why this text cannot give the items of a mapped node, or one of them."""
    if any(read.name == "secrets" for read in reads):
        message = "for_each may not read secrets: a list is made where no secret is known"
        yield Finding("template_forbidden", message, path)
    elif node.for_each == (path, text):
        template = parse_template(text.strip())
        if template is None or not template.whole:
            message = "for_each is one expression that gives a list, or a list; write it inside "
            yield Finding("template_syntax", message + "{{ }}: {{ fetch.json.items }}", path)


def _misread_lists(
    facts: DefinitionFacts, text: str, reads: tuple[Read, ...], own: Container[str]
) -> Iterator[str]:
    """Keys that a template reads of the output of a mapped node, which is a list."""
    mapped = {
        read.name
        for read in reads
        if read.name not in own
        and (other := facts.by_id.get(read.name)) is not None
        and facts.nodes[other].is_mapped
    }
    if not mapped:
        return
    for name, keys in dict.fromkeys(keys_read(text)):
        key = keys.removeprefix("output.")
        if name in mapped and key and (key != keys or key not in _OF_EVERY_NODE):
            yield (
                f"{shown(name)} has for_each: its output is a list, and has no key {shown(key)}; "
                f"write {{{{ {name} | map(attribute='{key}') }}}}"
            )


_OF_EVERY_NODE = frozenset(
    {"output", "status", "error", "error.type", "error.message", "error.where"}
)


def _secret_misplaced(facts: DefinitionFacts, node: RawNode, path: Path) -> str | None:
    """Why a secret is not allowed here; None if it is, or the handler is unknown."""
    known = facts.known_handlers
    if known is None or not node.handler or node.handler not in known:
        return None  # an unknown handler is a finding already
    fields = known.secret_fields(node.handler) if isinstance(known, KnowsSecretFields) else None
    field = path[len(node.path) + 1]
    return misplaced(node.handler, fields, field)


def _too_much(survey: TemplateIndex, limits: DefinitionLimits) -> str | None:
    if len(survey) > limits.max_templates:
        return f"more than {limits.max_templates:,} different templates"
    if survey.words > limits.max_template_words:
        return f"the templates have more than {limits.max_template_words:,} words and signs"
    if survey.parsed_words > limits.max_parsed_words:
        return (
            f"the templates have more than {limits.max_parsed_words:,} words and signs, "
            "not counting templates that differ in names, numbers and quoted texts only"
        )
    return None


def _texts(node: RawNode) -> Iterator[tuple[Path, str, bool]]:
    """All texts that may be templates, in order, each with whether it is a condition."""
    if isinstance(node.condition, str):
        yield (*node.path, "condition"), node.condition, True
    path, items = node.for_each
    stack: list[tuple[Path, Iterator[tuple[Any, Any]]]] = []
    if node.config:
        stack.append(((*node.path, "config"), iter(node.config.items())))
    if isinstance(items, str):
        yield path, items, False
    elif isinstance(items, list):
        stack.append((path, iter(enumerate(items))))
    while stack:
        path, rest = stack[-1]
        for step, value in rest:
            if isinstance(value, str):
                # A brace alone, as in a JSON text, makes no template.
                if "{" in value and ("{{" in value or "{%" in value or "{#" in value):
                    yield (*path, step), value, False
            elif isinstance(value, dict):
                stack.append(((*path, step), iter(value.items())))
                break
            elif isinstance(value, list):
                stack.append(((*path, step), iter(enumerate(value))))
                break
        else:
            stack.pop()


ITEM_NAMES = ("item", "index")
"""What the config of a mapped node reads beside nodes."""


def _misread(
    facts: DefinitionFacts, index: int, reads: tuple[Read, ...], own: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The names that a template of the node at `index` may not read, or not like this. `own` are
    the names that exist only here."""
    unguarded = {read.name for read in reads if not read.guarded}
    for name in dict.fromkeys(read.name for read in reads):
        if name in ROOTS or name in own:
            continue
        other = facts.by_id.get(name)
        if other is None and name in ITEM_NAMES:
            message = f"there is no node {shown(name)} to read; `item` and `index` exist only in "
            yield "template_unknown_node", message + "the config of a node with for_each"
        elif other is None:
            suggest = facts.suggester.did_you_mean
            hint = (suggest(name, own) if own else "") or suggest(name, facts.readable)
            yield "template_unknown_node", f"there is no node {shown(name)} to read{hint}"
        elif other == index:
            yield "template_not_upstream", f"{shown(name)} cannot read its own output"
        elif not facts.is_upstream(other, index):
            reader = shown(facts.nodes[index].id)
            message = f"{shown(name)} need not be done before {reader} starts"
            yield "template_not_upstream", f"{message}; add it to the dependencies to read it"
        elif name in unguarded and facts.nodes[other].has_condition:
            message = f"{shown(name)} has a condition, and reads as none if it was skipped"
            yield "template_may_be_skipped", f"{message}; say what then: | default(…)"
        elif name in unguarded and facts.nodes[other].allows_failure:
            message = f"{shown(name)} has allow_failure: if it fails, its keys read as none, else "
            message += "its error"
            yield "template_may_be_skipped", f"{message}; say what then: | default(…)"


Rule = Callable[[DefinitionFacts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    empty_graph,
    duplicate_ids,
    dependencies,
    cycles,
    handlers,
    configs,
    delivery,
    params_schema,
    templates,
)
"""The checks beyond single fields. A new rule is a new row."""

_NO_ORDER = frozenset(
    {"empty_graph", "duplicate_id", "missing_dependency", "self_dependency", "cycle"}
)


def _named_layers(facts: DefinitionFacts, findings: list[Finding]) -> list[list[str]]:
    """The order of execution; empty if the problems leave none."""
    if any(found.code in _NO_ORDER for found in findings) or None in (n.id for n in facts.nodes):
        return []
    return [[str(facts.nodes[index].id) for index in layer] for layer in facts.layers]


def _problems(findings: list[Finding], source: Source) -> tuple[Problem, ...]:
    """With their positions, in the order of the text; of data without a text, node by node."""
    findings.sort(key=_node_of)  # so that no kind of problem uses up the limit alone
    positions = [source.position(found.path, key=found.on_key) for found in findings[:MAX_PROBLEMS]]
    problems = [
        Problem(found.code, found.message, format_path(found.path), *(position or (None, None)))
        for found, position in zip(findings, positions, strict=False)
    ]
    if source.text is not None:
        problems.sort(key=lambda found: (found.line or 0, found.column or 0))
    if len(findings) > MAX_PROBLEMS:
        message = f"more than these {MAX_PROBLEMS:,} problems; the others are not shown"
        problems.append(Problem("too_large", message, ""))
    return tuple(problems)


def _node_of(found: Finding) -> int:
    match found.path:
        case ("nodes", int(index), *_):
            return index
    return -1
