"""Random workflows and random things that happen to them, for Hypothesis.

A thing that happens is drawn as plain numbers (`DrawnAction`) and given its meaning only when its
turn comes, from the run as it is then: so any list of deeds is a walk, and a shorter list is a
simpler one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import Phase as Phases
from hypothesis import settings
from hypothesis import strategies as st

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import NO_START, Token
from dovetail.core.items import split_name
from dovetail.core.run import Phase, RunState
from dovetail.core.states import FINAL, NodeStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    TakeOver,
    Transition,
    Wake,
)

from .invariants import startable
from .walk import graph

LEASE = 10.0
MAX_CRASHES = 2


def examples(count: int) -> settings:
    """So many examples in the continuous integration; `DOVETAIL_EXAMPLES=20` for twenty times.

    `DOVETAIL_SHRINK=no`: whether a walk fails is enough, the shortest that does is not wanted.
    """
    times = float(os.environ.get("DOVETAIL_EXAMPLES", "1"))
    unshrunk = os.environ.get("DOVETAIL_SHRINK") == "no"
    phases = [phase for phase in Phases if not unshrunk or phase is not Phases.shrink]
    return settings(max_examples=max(1, int(count * times)), deadline=None, phases=phases)


# What a node may ask of what came before it. The last two are errors if it has no output.
CONDITIONS = (
    "{{{{ {parent}.sum | default(0) > 3 }}}}",
    "{{{{ {parent}.status == 'COMPLETED' }}}}",
    "{{{{ {parent}.status == 'FAILED' }}}}",
    "{{{{ '{parent}' in ({parent}.error.message | default('')) }}}}",
    "{{{{ {parent}.sum % 2 == 0 }}}}",
    "{{{{ {parent}.nothing.here }}}}",
)


@st.composite
def graphs(draw: st.DrawFn, most: int = 8, *, maps: bool = False) -> Graph:
    """Any small workflow: its shape, policy, limit, conditions, retries, deliveries, and the nodes
    whose failure is allowed; with `maps`, mapped nodes too."""
    size = draw(st.integers(1, most))
    order = draw(st.permutations(range(size)))  # where in the definition the i-th of the order is
    parents: dict[int, list[int]] = {place: [] for place in range(size)}
    more: dict[str, dict[str, Any]] = {}
    for i, place in enumerate(order):
        if i:
            above = st.lists(st.sampled_from(order[:i]), unique=True, max_size=3)
            parents[place] = draw(above)
        fields: dict[str, Any] = {}
        match draw(st.integers(0, 9)):
            case 0 | 1 if parents[place]:
                condition = draw(st.sampled_from(CONDITIONS))
                fields["condition"] = condition.format(parent=f"n{parents[place][0]}")
            case 0 | 1 | 2:
                fields["condition"] = draw(st.booleans())
            case 3:
                fields["delivery"] = "at_most_once"
            case 4 | 5 | 6 | 7:
                fields["max_retries"] = draw(st.integers(1, 2))
        if draw(st.integers(0, 2)) == 2:
            fields["allow_failure"] = True
        if maps and draw(st.integers(0, 2)) == 2:
            fields["for_each"] = {
                "items": list(range(draw(st.sampled_from([0, 1, 2, 3, 5])))),
                "max_concurrency": draw(st.sampled_from([1, 2, 100])),
                "max_failures": draw(st.sampled_from([0, 0, 1, "50%"])),
            }
        if fields:
            more[f"n{place}"] = fields
    return graph(
        {f"n{place}": [f"n{parent}" for parent in parents[place]] for place in range(size)},
        on_failure=draw(st.sampled_from(["fail_fast", "continue"])),
        max_concurrency=draw(st.sampled_from([None, None, 1, 2])),
        **more,
    )


EDITS = ("config", "handler", "condition", "retries", "parents", "order", "drop", "add", "policy")


@st.composite
def changed(draw: st.DrawFn, graph: Graph) -> Graph:
    """The same workflow after some edits, or after none."""
    assert graph.workflow is not None
    definition = graph.workflow.model_dump(mode="json", exclude_unset=True)
    nodes: list[dict[str, Any]] = definition["nodes"]
    for number, edit in enumerate(draw(st.lists(st.sampled_from(EDITS), max_size=3))):
        node = draw(st.sampled_from(nodes))
        asks = isinstance(node.get("condition"), str)
        match edit:
            case "config":
                node["config"] = {"x": draw(st.sampled_from([0, 1, 1.0, True, "1"]))}
            case "handler":
                node["handler"] = draw(st.sampled_from(["h", "g"]))
            case "condition":
                node["condition"] = draw(st.sampled_from([None, True, False]))
            case "retries":
                node["timeout_seconds"] = draw(st.sampled_from([5.0, 300.0]))
            case "parents" if not asks:
                node["dependencies"] = draw(st.permutations(node["dependencies"]))
                if draw(st.booleans()):
                    node["dependencies"] = node["dependencies"][1:]
            case "order":
                nodes[:] = draw(st.permutations(nodes))
            case "drop" if len(nodes) > 1:
                nodes.remove(node)
                for other in nodes:
                    if other["dependencies"][:1] == [node["id"]]:
                        other.pop("condition", None)  # it may ask the node that is gone
                    other["dependencies"] = [n for n in other["dependencies"] if n != node["id"]]
            case "add":
                nodes.append({"id": f"m{number}", "handler": "h", "dependencies": []})
                if draw(st.booleans()):
                    nodes[-1]["dependencies"] = [node["id"]]
            case "policy":
                definition["on_failure"] = draw(st.sampled_from(["fail_fast", "continue"]))
    return build_graph(Workflow.model_validate(definition), {})


# What a failed handler says of its next attempt; the last two are a service's Retry-After.
HINTS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"after": 3.0}),
    *({"at_least": 25.0}, {"at_least": 5000.0}),
)


class DrawnAction(NamedTuple):
    """Something that may happen. What the numbers mean depends on the run."""

    kind: int
    place: int
    token: int
    wait: float


LIMITS = (None, None, 8, 20, 35, 50)
"""Bytes that a run may keep; an output has 9 or 10."""
limits = st.sampled_from(LIMITS)

KINDS = (
    # Some stand here thrice: without them a walk never gets anywhere.
    *("claim", "complete") * 3,
    *("fail", "wake", "reap") * 2,
    *("park", "recall", "renew", "progress", "permanent", "unrendered"),
    *("retry", "retry_from", "cancel", "take_over"),
    *("expand",) * 3,
)
WAITS = (0.0, 0.0, 1.0, 10.0, 30.0)
TOKENS = ("own",) * 12 + ("earlier",) * 3 + ("forged", "none", "next")

deed = st.builds(
    DrawnAction,
    kind=st.integers(0, len(KINDS) - 1),
    place=st.integers(0, 40),
    token=st.integers(0, len(TOKENS) - 1),
    wait=st.sampled_from(WAITS),
)
# Left to itself Hypothesis draws five of them on average, and little can happen in five.
deeds = st.lists(deed, max_size=10) | st.lists(deed, min_size=30, max_size=70)


@dataclass
class Meaning:
    """Gives deeds their meaning in one run, and remembers every token it ever had."""

    run_id: str
    tokens: dict[str, list[Token]]

    def learn(self, run: RunState) -> None:
        nodes = ((spec.id, run.node(spec.id)) for spec in run.graph.nodes)
        for name, node in (*nodes, *startable(run)):
            known = self.tokens.setdefault(name, [])
            if node.token not in known and node.token.nonce != NO_START:
                known.append(node.token)

    def of(self, deed: DrawnAction, run: RunState, now: float) -> Transition:
        """Mostly something that could happen next, sometimes just anything."""
        nodes = [spec.id for spec in run.graph.nodes]
        kind, able = KINDS[deed.kind], [*nodes, *named_items(run)]
        if deed.place % 5:
            fitting = [kind for kind in KINDS if fits(kind, run)]
            kind = fitting[deed.kind % len(fitting)] if fitting else kind
            able = fits(kind, run) or able
        name = able[deed.place % len(able)]
        if kind in ("retry_from", "expand"):
            name = split_name(name)[0]
        token = self._token(name, deed, run)
        match kind:
            case "claim":
                return Claim(self.run_id, name, token, f"w{deed.place}", now + LEASE)
            case "complete":
                return Complete(self.run_id, name, token, output_of(run, name))
            case "fail":
                hints = HINTS[deed.place // 5 % len(HINTS)]
                return Fail(self.run_id, name, token, error_of(name), chance=0.5, **hints)
            case "permanent":
                return Fail(self.run_id, name, token, error_of(name), permanent=True)
            case "unrendered":
                error = error_of(name)
                return Fail(self.run_id, name, token, error, permanent=True, unrendered=True)
            case "park":
                return Park(self.run_id, name, token, now + (5, 20)[deed.place % 2])
            case "wake":
                return Wake(self.run_id, name, token)
            case "recall":
                return Recall(self.run_id, name, token, output_of(run, name))
            case "reap":
                return Reap(self.run_id, name, token, MAX_CRASHES)
            case "progress":
                return Progress(self.run_id, name, token, 0.5)
            case "expand" if all(spec.for_each is None for spec in run.graph.nodes):
                pass
            case "expand" if deed.place % 7 == 6:
                return Expand(self.run_id, name, token, 0, error_of(name))
            case "expand":
                return Expand(self.run_id, name, token, length_of(run, name))
            case "cancel" if deed.token < 3:  # seldom: it ends most stories
                return Cancel(self.run_id)
            case "retry":
                return Retry(self.run_id)
            case "retry_from":
                return Retry(self.run_id, name)
            case "take_over":
                return TakeOver(self.run_id, MAX_CRASHES, float(deed.place % 3))
        return Renew(self.run_id, name, token, now + LEASE)

    def _token(self, name: str, deed: DrawnAction, run: RunState) -> Token:
        try:
            own = run.node(name).token
        except KeyError:  # there is no such item
            return Token(1, 1, 1)
        if own.nonce == NO_START:
            own = Token(own.epoch, own.attempt, 1)  # no message has its token
        match TOKENS[deed.token]:
            case "earlier":
                known = self.tokens.get(name, [own])
                return known[deed.place % len(known)]
            case "forged":
                return own._replace(nonce=own.nonce ^ 1)
            case "next":
                return own._replace(attempt=own.attempt + 1)
            case "none":
                return Token(0, 0, 0)
        return own


def fits(kind: str, run: RunState) -> list[str]:
    """The nodes and items to which this could happen now; for what happens to a run, all or
    none."""
    nodes = startable(run)
    match kind:
        case "claim" | "recall" | "unrendered":
            return [name for name, node in nodes if node.phase is Phase.PUBLISHED]
        case "park":
            phases = (Phase.PUBLISHED, Phase.PARKED)
            return [name for name, node in nodes if node.phase in phases]
        case "wake":
            return [name for name, node in nodes if node.until is not None]
        case "expand":
            return expanding(run)
        case "cancel" | "take_over":
            return [] if run.finished else [run.graph.nodes[0].id]
        case "retry" | "retry_from":
            return [spec.id for spec in run.graph.nodes] if run.status in FINAL else []
    return [name for name, node in nodes if node.status is NodeStatus.RUNNING]


def expanding(run: RunState) -> list[str]:
    """The mapped nodes whose lists are being rendered."""
    specs = zip(run.graph.nodes, run.nodes, strict=True)
    return [spec.id for spec, node in specs if node.phase is Phase.EXPANDING]


def named_items(run: RunState) -> list[str]:
    """All items, also those that wait or have ended, and one that there is not."""
    specs = zip(run.graph.nodes, run.nodes, strict=True)
    totals = [(spec.id, node.items.total) for spec, node in specs if node.items is not None]
    return [f"{name}[{item}]" for name, total in totals for item in range(total + 1)]


def length_of(run: RunState, name: str) -> int:
    spec = run.graph.nodes[run.graph.index[name]]
    return 0 if spec.for_each is None else len(spec.for_each.items(run))


def output_of(run: RunState, name: str) -> dict[str, Any]:
    """What a handler would return: it depends on the node, or item, and on the outputs of its
    parents alone."""
    node_id, item = split_name(name)
    index = run.graph.index[node_id]
    above = [run.nodes[parent].output for parent in run.graph.nodes[index].parents]
    return {"sum": index + 1 + (item or 0) + sum(map(_sum, above))}


def _sum(output: Any) -> int:
    if isinstance(output, list):
        return sum(map(_sum, output))
    return output["sum"] if output else 0


def error_of(name: str) -> dict[str, Any]:
    """As a worker reports it: with a traceback, which only the event of the attempt keeps."""
    error = {"type": "ValueError", "message": f"{name} is broken", "where": "mine.py:3 in f"}
    return error | {"traceback": f'Traceback\n  "{name}" \x00 é\nValueError: {name} is broken'}
