"""Runs a recorded run again, and compares.

Each node ends when its turn comes, one virtual second after the node before it. So a run that
failed fast, or was cancelled, has the same nodes behind it as the recorded one had.
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import DefinitionLimits, check
from dovetail.core.errors import InvalidDefinition, PermanentError, RetryableError
from dovetail.core.items import item_name
from dovetail.core.recording import COMPUTED, Difference, RecordedNode, Recording, compare
from dovetail.core.states import NodeStatus, Reason
from dovetail.core.transitions import Cancel, Submit
from dovetail.engine.ports import Call, Calls, OnLines, Report, Task
from dovetail.handlers.builtin import give_input, give_output
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Handler, Registry
from dovetail.testing.runner import FinishedRun, execute, in_virtual_time, node_of
from dovetail.wiring.embedded import LocalEngine

FAR = 1e8
"""Seconds: when a node that was never started would start. Nothing else happens by then."""
UNLIMITED = 1 << 40
"""Bytes, since what was stored once fits, and nodes at once, since each waits for its turn."""
_HELD = "held"
"""The resource tag of nodes that were never started."""
_LIMITS = DefinitionLimits(max_body_bytes=UNLIMITED)


class ReplayDiffers(AssertionError):
    """A replay went another way than the recording."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference

    @property
    def node(self) -> str | None:
        return self.difference.node

    @property
    def field(self) -> str:
        return self.difference.field

    @property
    def expected(self) -> Any:
        return self.difference.expected

    @property
    def got(self) -> Any:
        return self.difference.got


def replay(
    recording: Recording, definition: Mapping[str, Any] | Source | None = None
) -> FinishedRun:
    """Raises `ReplayDiffers`, or `InvalidDefinition` for a definition that is not valid."""
    checked = check(recording.definition if definition is None else definition, None, _LIMITS)
    if checked.workflow is None:
        raise InvalidDefinition(checked.errors)
    graph = _without_waits(build_graph(checked.workflow, {}), recording)
    reused = {
        name: node.output
        for name, node in recording.nodes.items()
        if node.reused and name in graph.index
    }
    submit = Submit(
        *(recording.run_id, graph, recording.params, recording.version), reused=reused or None
    )
    calls = _RecordedCalls(recording)
    cancelled = any(node.reason == Reason.RUN_CANCELLED for node in recording.nodes.values())

    async def cancel(engine: LocalEngine) -> None:
        await asyncio.sleep(calls.last_turn)
        await engine.orchestrator.apply([Cancel(recording.run_id)])

    run = in_virtual_time(
        lambda: execute(
            *(submit, lambda abort: calls, _HeldNodes()),
            concurrency=UNLIMITED,
            beside=cancel if cancelled else None,
        )
    )
    difference = compare(recording, run._state, calls.unexpected)
    if difference is not None:
        raise ReplayDiffers(difference)
    return run


def _without_waits(graph: Graph, recording: Recording) -> Graph:
    """The same graph without time-outs, retries, caches and limits: the recording has what came of
    them."""
    held = {
        name
        for name, node in recording.nodes.items()
        if node.status is NodeStatus.CANCELLED and not node.started
    }
    # An item without an end backs off until nothing else can happen.
    ordered = {name for name, node in recording.nodes.items() if node.item_ends is not None}
    nodes = (
        replace(
            spec,
            timeout_seconds=10 * FAR,
            max_retries=1 if spec.id in ordered else 0,
            cache_ttl=None,
            resource_tag=_HELD if spec.id in held else None,
        )
        for spec in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes), max_concurrency=None)


class _HeldNodes:
    """A rate limit that keeps nodes from starting until nothing else can happen."""

    async def book(self, tag: str, now: float) -> float:
        return now + FAR

    async def start(self, tag: str, now: float) -> bool:
        return True

    async def unbook(self, tag: str, count: int) -> None:
        pass

    async def slow(self, tag: str, until: float) -> None:
        pass


class _RecordedCalls:
    """Calls that end as the recording says."""

    def __init__(self, recording: Recording) -> None:
        self._nodes = recording.nodes
        ended = {name: node.ended for name, node in recording.nodes.items() if node.ended}
        order = sorted(ended, key=ended.__getitem__)
        self._turns: dict[str, float] = {name: at for at, name in enumerate(order, 1)}
        self.last_turn = len(self._turns) + 1
        self._turns |= self._turns_of_items([ended[name] for name in order])
        self.unexpected: dict[str, str] = {}
        """What nodes did that the recording does not have."""
        self._calls: Calls = RegistryCalls(
            _OneHandler(self._call),
            max_output_bytes=UNLIMITED,
            max_input_bytes=UNLIMITED,
        )
        self._handlers: dict[str, str] = {}

    def open(self, task: Task, report: Report, on_lines: OnLines) -> Call:
        self._handlers[node_of(task)] = task.handler
        # Without secrets: only `input` and `output` read the config, and these take none. A task of
        # this process has only the fields that it needs.
        fields: dict[str, Any] = dict(zip(Task._fields, task, strict=False))
        plain = Task(**{**fields, "deferred": (), "cache": None})
        return self._calls.open(plain, report, on_lines)

    def _turns_of_items(self, ended: Sequence[int]) -> dict[str, float]:
        """The turns of items, each between those of the nodes that ended before and after it.
        `ended` has the ends of nodes in order."""
        ends = sorted(
            (end, item_name(name, int(item)))
            for name, node in self._nodes.items()
            for item, end in (node.item_ends or {}).items()
        )
        return {
            name: bisect(ended, end) + at / (len(ends) + 1)
            for at, (end, name) in enumerate(ends, 1)
        }

    async def _call(self, config: Any, ctx: Context) -> Any:
        recorded = self._nodes.get(ctx.node_id)
        turn = self._turns.get(ctx.node_id)
        if recorded is not None and recorded.item_ends is not None and ctx.index is not None:
            turn = self._turns.get(item_name(ctx.node_id, ctx.index))
            if turn is None and ctx.attempt == 1:
                # It was not started, or was cancelled. A running item would not be cancelled when
                # another node fails; one that backs off is.
                raise RetryableError("the recording has no end of this item", after=FAR)
        if recorded is None or (turn is None and not recorded.started):
            self.unexpected[ctx.node_id] = "started"
            raise PermanentError("the recording has no end of this node", type="not_recorded")
        loop = asyncio.get_running_loop()
        # A node that runs and has no end is cancelled before that.
        until = 5 * FAR if turn is None else float(turn)
        await asyncio.sleep(max(0.0, until - loop.time()))
        return await self._end(recorded, config, ctx)

    async def _end(self, recorded: RecordedNode, config: Any, ctx: Context) -> Any:
        handler = self._handlers[ctx.node_id]
        item = getattr(ctx, "index", None)
        if item is not None:
            if error := (recorded.item_errors or {}).get(str(item)):
                raise _failure(error)
            outputs = recorded.output if isinstance(recorded.output, list) else ()
            return outputs[item] if item < len(outputs) else None
        if recorded.status is not NodeStatus.COMPLETED:
            raise _failure(recorded.error or {})
        if handler in COMPUTED and recorded.started:
            return await (give_input if handler == "input" else give_output)(config, ctx)
        return recorded.output


def _failure(error: Mapping[str, Any]) -> PermanentError:
    return PermanentError(error.get("message") or "", type=error.get("type") or "error")


class _OneHandler(Registry):
    """A registry in which every name is the same handler."""

    def __init__(self, fn: Callable[[Any, Context], Any]) -> None:
        super().__init__()
        self._only = Handler("recorded", fn, secrets=True)

    def get(self, name: str) -> Handler:
        return self._only
