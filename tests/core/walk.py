"""A run driven by hand, so that a test of the rules reads as a sentence.

    walk = Walk({"a": [], "b": ["a"]}, on_failure="continue", b={"max_retries": 1})
    walk.run("a")
    walk.start("b")
    walk.fail("b")
    assert walk.phase("b") == "backing_off"

Time, chance and nonces are the walk's own. After every step it checks what must hold of any run
(`invariants`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Event, Token
from dovetail.core.run import NodeState
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    Transition,
    Wake,
)

from .invariants import Ledger, check_run, check_step, order_name

LEASE = 10.0
MAX_CRASHES = 3
BROKEN = {"type": "ValueError", "message": "broken"}


def graph(
    nodes: Mapping[str, Sequence[str]],
    *,
    on_failure: str = "fail_fast",
    max_concurrency: int | None = None,
    **more: Mapping[str, Any],
) -> Graph:
    """A graph from `{id: its parents}`; `more` holds further fields of a node, by its id."""
    definition = {
        "name": "walk",
        "on_failure": on_failure,
        "max_concurrency": max_concurrency,
        "nodes": [
            {"id": name, "handler": "h", "dependencies": list(parents), **more.get(name, {})}
            for name, parents in nodes.items()
        ],
    }
    return build_graph(Workflow.model_validate(definition), {})


class Walk:
    def __init__(
        self,
        nodes: Mapping[str, Sequence[str]] | Graph,
        *,
        params: dict[str, Any] | None = None,
        logged: bool = True,
        max_bytes: int | None = None,
        **fields: Any,
    ) -> None:
        self.now = 100.0
        self._nonces = count(1)
        self._ledger = Ledger()
        made = nodes if isinstance(nodes, Graph) else graph(nodes, **fields)
        submit = Submit("r", made, params or {}, logged=logged, max_bytes=max_bytes)
        self.state, self.begun = begin(submit, self.now, next(self._nonces))
        check_run(self.state)
        self._ledger.record(self.state, Cancel("r"), self.begun)
        self.log: list[Event] = list(self.begun.events)
        self.last = self.begun

    # ── what happens ─────────────────────────────────────────────────────────────────────

    def apply(self, transition: Transition) -> Decision:
        before = self.state.snapshot()
        decision = step(self.state, transition, self.now, next(self._nonces))
        check_step(before, self.state, transition, decision, self.now)
        self._ledger.record(self.state, transition, decision)
        self.log += decision.events
        self.last = decision
        return decision

    def later(self, seconds: float) -> None:
        self.now += seconds

    def start(self, *nodes: str, token: Token | None = None, worker: str = "w") -> Decision:
        for node in nodes:
            self.apply(Claim("r", node, token or self.token(node), worker, self.now + LEASE))
        return self.last

    def renew(self, node: str, token: Token | None = None) -> Decision:
        return self.apply(Renew("r", node, token or self.token(node), self.now + LEASE))

    def complete(self, node: str, output: Any = None, token: Token | None = None) -> Decision:
        return self.apply(Complete("r", node, token or self.token(node), output))

    def fail(
        self,
        node: str,
        error: Mapping[str, Any] = BROKEN,
        token: Token | None = None,
        **how: Any,
    ) -> Decision:
        return self.apply(Fail("r", node, token or self.token(node), dict(error), **how))

    def reap(self, node: str, token: Token | None = None, max_crashes: int = 3) -> Decision:
        return self.apply(Reap("r", node, token or self.token(node), max_crashes))

    def lose(self, node: str) -> Decision:
        """Its worker dies: the lease runs out and is reaped."""
        self.later(LEASE)
        return self.reap(node)

    def park(self, node: str, seconds: float, token: Token | None = None) -> Decision:
        return self.apply(Park("r", node, token or self.token(node), self.now + seconds))

    def wake(self, node: str, token: Token | None = None) -> Decision:
        return self.apply(Wake("r", node, token or self.token(node)))

    def progress(self, node: str, fraction: float, token: Token | None = None) -> Decision:
        return self.apply(Progress("r", node, token or self.token(node), fraction, "so far"))

    def recall(self, node: str, output: Any, token: Token | None = None) -> Decision:
        return self.apply(Recall("r", node, token or self.token(node), output))

    def expand(
        self,
        node: str,
        total: int = 0,
        error: Mapping[str, Any] | None = None,
        token: Token | None = None,
    ) -> Decision:
        """The list of a mapped node is rendered."""
        why = None if error is None else dict(error)
        return self.apply(Expand("r", node, token or self.token(node), total, why))

    def cancel(self) -> Decision:
        return self.apply(Cancel("r"))

    def retry(self, from_node: str | None = None) -> Decision:
        return self.apply(Retry("r", from_node))

    def run(self, *nodes: str, output: Any = None) -> Decision:
        """Start nodes and let them return, one after the other."""
        for node in nodes:
            self.start(node)
            self.complete(node, output)
        return self.last

    def break_(self, node: str, **how: Any) -> Decision:
        """Start a node and let it raise."""
        self.start(node)
        return self.fail(node, **how)

    # ── what is seen ─────────────────────────────────────────────────────────────────────

    def __getitem__(self, node: str) -> NodeState:
        return self.state.node(node)

    def token(self, node: str) -> Token:
        return self[node].token

    def phase(self, node: str) -> str | None:
        phase = self[node].phase
        return None if phase is None else phase.value

    @property
    def status(self) -> str:
        return self.state.status.value

    @property
    def ended(self) -> bool:
        return self.state.finished

    @property
    def states(self) -> dict[str, str]:
        """What became of each node, by id."""
        names = [spec.id for spec in self.state.graph.nodes]
        return dict(zip(names, (node.status.value for node in self.state.nodes), strict=True))

    def dispatched(self, decision: Decision | None = None) -> list[str]:
        """The nodes and items that the last decision, or this one, publishes, in order."""
        return [order_name(order) for order in (decision or self.last).dispatch]

    def types(self, node: str | None = None) -> list[str]:
        """The types of all events so far, or of those of one node."""
        return [event.type for event in self.log if node is None or event.node == node]

    def events_of(self, kind: str) -> list[Event]:
        return [event for event in self.log if event.type == kind]
