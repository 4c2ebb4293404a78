"""Is this definition a workflow? Every problem at once, each with its place.

`check` gathers what can be known of a definition, however broken, into `Facts`, and runs the
table of `RULES` over it. A rule looks at the raw data rather than at the model, so that a node
with a bad timeout still has its dependencies and templates checked. Nothing recurses, and every
rule is linear in the definition. What it must not know: how a text was read, or how a problem
is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dovetail.core import dag
from dovetail.core.definition.facts import Facts, Limits, RawNode
from dovetail.core.definition.fields import read_fields
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.params import schema_findings
from dovetail.core.definition.source import Source
from dovetail.core.definition.uncollected import uncollected
from dovetail.core.errors import Problem
from dovetail.core.findings import Finding, Path, Suggester, format_path, one_line, shown
from dovetail.core.secret_fields import KnowsSecretFields, misplaced
from dovetail.core.templates import ROOTS, Read, TemplateRefused
from dovetail.core.templates.survey import Survey
from dovetail.core.values import faults, is_json, plain

__all__ = ["RULES", "Checked", "Limits", "check"]

MOST_PROBLEMS = 1000
_LONGEST_WAY = 12
_WARNINGS = frozenset({"template_may_be_skipped"})


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome: the workflow if there are no errors, the layers if it has an order."""

    workflow: Workflow | None
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    layers: list[list[str]]
    parsed: Workflow | None = None
    """The workflow also with errors, as long as its fields could be read."""

    @property
    def valid(self) -> bool:
        return not self.errors


def check(
    definition: Source | Mapping[str, Any],
    known_handlers: Container[str] | None = None,
    limits: Limits | None = None,
) -> Checked:
    """Check a definition. `known_handlers` has aliases too; None: handlers are not checked.

    One that also has `secret_fields` says which of them take secrets; without it none does.
    """
    source = definition if isinstance(definition, Source) else Source(definition)
    with uncollected():
        return _check(source, known_handlers, limits or Limits())


def _check(source: Source, known_handlers: Container[str] | None, limits: Limits) -> Checked:
    data = dict(source.data) if isinstance(source.data, Mapping) else source.data
    workflow: Workflow | None = None
    layers: list[list[str]] = []
    findings = list(_not_json(data, limits)) if source.text is None else []
    if source.text is None and not findings:
        data = plain(data)  # a tuple is a list, as it is for a server
    if not any(found.code == "too_large" for found in findings):
        suggester = Suggester()
        facts = Facts(data, known_handlers, limits, suggester)
        if facts.oversize:
            findings += facts.oversize
        else:
            workflow, wrong_fields = read_fields(data, suggester, MOST_PROBLEMS + 1)
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
        parsed=workflow,
    )


def _enough(found: Iterable[Finding]) -> Iterator[Finding]:
    """One more than is shown: who reads a thousand problems needs no others.

    Warnings are counted for themselves, as no number of them may hide an error.
    """
    errors = warnings = 0
    for each in found:
        if each.code in _WARNINGS:
            warnings += 1
            if warnings > MOST_PROBLEMS + 1:
                continue
        else:
            errors += 1
        yield each
        if errors > MOST_PROBLEMS:
            return


def _not_json(data: Any, limits: Limits) -> Iterator[Finding]:
    """Data that did not come from a text must be what a text could have said."""
    # It has no body whose bytes could be counted, but no more values than one could have.
    most = limits.max_body_bytes
    if not is_json(data, max_depth=limits.max_depth, max_values=most, nul=False):
        found = faults(data, max_depth=limits.max_depth, max_values=most, nul=False)
        yield from islice(found, MOST_PROBLEMS)


def empty_graph(facts: Facts) -> Iterator[Finding]:
    if facts.is_empty:
        yield Finding("empty_graph", "a workflow needs at least one node", ("nodes",))


def duplicate_ids(facts: Facts) -> Iterator[Finding]:
    for place, node in enumerate(facts.nodes):
        if node.id is not None and facts.by_id[node.id] != place:
            first = format_path(facts.nodes[facts.by_id[node.id]].path)
            message = f"{shown(node.id)} is already the id of {first}"
            yield Finding("duplicate_id", message, (*node.path, "id"))


def dependencies(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        seen: set[str] = set()
        for place, name in enumerate(node.dependencies):
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
            yield Finding(code, message, node.dependency_path(place))


def cycles(facts: Facts) -> Iterator[Finding]:
    """Each cycle once, and beside it what can never start because it comes after one."""
    ordered = {place for layer in facts.layers for place in layer}
    if len(ordered) == len(facts.nodes):
        return
    found = dag.cycles(facts.parents)
    for cycle in found:
        node = facts.nodes[cycle.way[0]]
        closing = node.dependencies.index(facts.nodes[cycle.way[-1]].id)
        way = _way([one_line(str(facts.nodes[place].id)) for place in cycle.way])
        message = f"{len(cycle.members):,} nodes wait for each other: {way}"
        yield Finding("cycle", message, node.dependency_path(closing))
    ordered.update(place for cycle in found for place in cycle.members)
    for place, node in enumerate(facts.nodes):
        if place not in ordered:
            message = f"{shown(node.id)} can never start: it comes after a cycle"
            yield Finding("unreachable", message, node.path)


def _way(names: list[str]) -> str:
    names = [*names, names[0]]
    if len(names) > _LONGEST_WAY:
        names[_LONGEST_WAY - 2 : -2] = ["…"]
    return " → ".join(names)


def handlers(facts: Facts) -> Iterator[Finding]:
    known = facts.known_handlers
    if known is None:
        return
    candidates = list(known) if isinstance(known, Iterable) else []
    for node in facts.nodes:
        if node.handler and node.handler not in known:
            hint = facts.suggester.did_you_mean(node.handler, candidates)
            hint = hint or "; `dovetail handlers` lists those that are known"
            message = f"there is no handler {shown(node.handler)}{hint}"
            yield Finding("unknown_handler", message, (*node.path, "handler"))


def delivery(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        retries = node.raw.get("max_retries")
        if node.raw.get("delivery") == "at_most_once" and isinstance(retries, int) and retries > 0:
            message = "an at_most_once node is never retried by itself: leave max_retries out"
            yield Finding("invalid_field", message, (*node.path, "max_retries"))


def params_schema(facts: Facts) -> Iterator[Finding]:
    schema = facts.data.get("params")
    if isinstance(schema, dict):
        for found in schema_findings(schema):
            yield Finding(found.code, found.message, ("params", *found.path), found.on_key)


def templates(facts: Facts) -> Iterator[Finding]:
    """Every text of a config and every condition: is it well formed, may it read what it reads?"""
    limits = facts.limits
    survey = Survey(limits.max_template_bytes)
    found = []
    for place, node in enumerate(facts.nodes):
        for path, text, is_condition in _texts(node):
            found.append((place, path, text, is_condition))
            if text not in survey:
                survey.add(text)
                if message := _too_much(survey, limits):
                    # Parsing is by far the dearest step per byte, so it is not begun.
                    yield Finding("too_large", f"{message}; none of them was checked", path)
                    return
    outcomes: dict[tuple[str, bool], tuple[Read, ...] | TemplateRefused] = {}
    for place, path, text, is_condition in found:
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
        for code, message in _misread(facts, place, outcome):
            yield Finding(code, message, path)
        if any(read.name == "secrets" for read in outcome):
            why = _secret_misplaced(facts, facts.nodes[place], path)
            if why is not None:
                yield Finding("template_forbidden", why, path)


def _secret_misplaced(facts: Facts, node: RawNode, path: Path) -> str | None:
    """Why a secret may not stand here, as far as the handlers are known."""
    known = facts.known_handlers
    if known is None or not node.handler or node.handler not in known:
        return None  # an unknown handler is a finding already
    fields = known.secret_fields(node.handler) if isinstance(known, KnowsSecretFields) else None
    field = path[len(node.path) + 1]
    return misplaced(node.handler, fields, field)


def _too_much(survey: Survey, limits: Limits) -> str | None:
    if len(survey) > limits.max_templates:
        return f"more than {limits.max_templates:,} different templates"
    if survey.words > limits.max_template_words:
        return f"the templates have more than {limits.max_template_words:,} words and signs"
    if survey.parsed_words > limits.max_parsed_words:
        return (
            f"the templates have more than {limits.max_parsed_words:,} words and signs, "
            "not counting those that differ in names, numbers and quoted texts only"
        )
    return None


def _texts(node: RawNode) -> Iterator[tuple[Path, str, bool]]:
    """What may be a template, in the order it is written, and whether it is a condition."""
    if isinstance(node.condition, str):
        yield (*node.path, "condition"), node.condition, True
    stack: list[tuple[Path, Iterator[tuple[Any, Any]]]] = []
    if node.config:
        stack.append(((*node.path, "config"), iter(node.config.items())))
    while stack:
        path, rest = stack[-1]
        for step, value in rest:
            if isinstance(value, str):
                if "{" in value:
                    yield (*path, step), value, False
            elif isinstance(value, dict):
                stack.append(((*path, step), iter(value.items())))
                break
            elif isinstance(value, list):
                stack.append(((*path, step), iter(enumerate(value))))
                break
        else:
            stack.pop()


def _misread(facts: Facts, place: int, reads: tuple[Read, ...]) -> Iterator[tuple[str, str]]:
    """The names a template of the node at `place` should not read, or not like this."""
    unguarded = {read.name for read in reads if not read.guarded}
    for name in dict.fromkeys(read.name for read in reads):
        if name in ROOTS:
            continue
        other = facts.by_id.get(name)
        if other is None:
            hint = facts.suggester.did_you_mean(name, facts.readable)
            yield "template_unknown_node", f"there is no node {shown(name)} to read{hint}"
        elif other == place:
            yield "template_not_upstream", f"{shown(name)} cannot read its own output"
        elif not facts.is_upstream(other, place):
            reader = shown(facts.nodes[place].id)
            message = f"{shown(name)} need not be done before {reader} starts"
            yield "template_not_upstream", f"{message}; add it to the dependencies to read it"
        elif name in unguarded and facts.nodes[other].has_condition:
            message = f"{shown(name)} has a condition, and reads as none if it was skipped"
            yield "template_may_be_skipped", f"{message}; say what then: | default(…)"


Rule = Callable[[Facts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    empty_graph,
    duplicate_ids,
    dependencies,
    cycles,
    handlers,
    delivery,
    params_schema,
    templates,
)
"""What is checked beyond the fields themselves. A new rule is a new row."""

_NO_ORDER = frozenset(
    {"empty_graph", "duplicate_id", "missing_dependency", "self_dependency", "cycle"}
)


def _named_layers(facts: Facts, findings: list[Finding]) -> list[list[str]]:
    """The order of execution, unless what is wrong leaves none."""
    if any(found.code in _NO_ORDER for found in findings) or None in (n.id for n in facts.nodes):
        return []
    return [[str(facts.nodes[place].id) for place in layer] for layer in facts.layers]


def _problems(findings: list[Finding], source: Source) -> tuple[Problem, ...]:
    """With their positions, in the order of the text; of data without a text, node by node."""
    findings.sort(key=_node_of)  # so that no kind of problem hides the others behind the cap
    places = [source.position(found.path, key=found.on_key) for found in findings[:MOST_PROBLEMS]]
    problems = [
        Problem(found.code, found.message, format_path(found.path), *(place or (None, None)))
        for found, place in zip(findings, places, strict=False)
    ]
    if source.text is not None:
        problems.sort(key=lambda found: (found.line or 0, found.column or 0))
    if len(findings) > MOST_PROBLEMS:
        message = f"more than these {MOST_PROBLEMS:,} problems; the others are not shown"
        problems.append(Problem("too_large", message, ""))
    return tuple(problems)


def _node_of(found: Finding) -> int:
    match found.path:
        case ("nodes", int(place), *_):
            return place
    return -1
