"""Runs in Redis, listened to: the same store, which also tells what it has written.

How long a node ran is known to Redis alone, since its worker and the orchestrator that takes its
result are two processes: it is asked for afterwards, for many nodes at once, where nobody waits
for it. What it must not know: who listens, or any rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dovetail.core.dag import Graph
from dovetail.core.errors import NotFound, StoreError
from dovetail.core.events import Event
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Decision, Submit, Transition
from dovetail.engine.listening import Listener, end_in
from dovetail.engine.ports import Sender
from dovetail.pipe import Command, Pipe
from dovetail.stores.redis import RedisStore, keys_of
from dovetail.stores.redis_moves import SEPARATOR, event_of

MEASURE_SECONDS = 0.2
FAREWELL_SECONDS = 1.0
CALLER_DAYS = 30
_SEPARATOR = SEPARATOR.encode()
ENDS = frozenset({"node.completed", "node.failed"})


class HeardRedisStore(RedisStore):
    def __init__(self, pipe: Pipe, listener: Listener, **options: Any) -> None:
        super().__init__(pipe, **{**options, "events": True})
        self._listener = listener
        self._ended: dict[str, tuple[Graph, list[int]]] = {}
        """By run, the places of the nodes whose times are yet to be read."""
        self._alarm: asyncio.TimerHandle | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def create_many(self, submits: Sequence[Submit], now: float) -> list[Decision]:
        caller = self._listener.caller()
        if caller is not None:  # before the runs: their first nodes are sent out at once
            life = CALLER_DAYS * 86400
            keys = [_caller_key(submit.run_id) for submit in submits]
            await self._pipe.many([("SET", key, caller, "NX", "EX", life) for key in keys])
        decisions = await super().create_many(submits, now)
        for submit, decision in zip(submits, decisions, strict=True):
            if decision.events:
                await self._tell(submit.run_id, decision)
        return decisions

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        decisions = await super().apply(moves, now, durable=durable)
        for move, decision in zip(moves, decisions, strict=True):
            if decision.events or decision.ended:
                await self._tell(move.run_id, decision)
        return decisions

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        decision = await super().settle_pending(run_id, now)
        if decision.events or decision.ended:
            await self._tell(run_id, decision)
        return decision

    async def callers_of(self, run_ids: Sequence[str]) -> list[str | None]:
        """The `traceparent` of each, as it was kept with the run."""
        found = await self._pipe.many([("GET", _caller_key(run_id)) for run_id in run_ids])
        return [None if text is None else text.decode() for text in found]

    def listened(self, sender: Sender) -> Sender:
        """One whose tasks say what they belong to, if the listener wants them to."""
        return self._listener.sender(sender, self.callers_of)

    async def close(self) -> None:
        """What is still to be read is read now; what cannot be is let go."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._measure()
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=FAREWELL_SECONDS)
            for task in late:
                task.cancel()

    async def _tell(self, run_id: str, decision: Decision) -> None:
        shell = await self._shells.find(run_id)
        if shell is None:  # dropped, or lost with Redis
            return
        graph = shell.run.graph
        self._listener.told(run_id, graph, decision.events)
        for _, _, kind, _, node, attempt, _ in decision.events:
            if kind in ENDS and attempt and node is not None:
                self._ended.setdefault(run_id, (graph, []))[1].append(graph.index[node])
        if self._ended and self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(MEASURE_SECONDS, self._measure)
        status = end_in(decision.events)
        if status is not None and (wanted := self._listener.outputs_wanted(graph)) is not None:
            if wanted and status is RunStatus.COMPLETED:
                self._spawn(self._read_end(run_id, graph, wanted))
            else:
                self._listener.ended(run_id, graph, status, {})
        if decision.ended and self._listener.whole_logs:
            self._spawn(self._read_log(run_id))

    def _measure(self) -> None:
        self._alarm = None
        ended, self._ended = self._ended, {}
        self._spawn(self._read_times(ended))

    async def _read_times(self, ended: Mapping[str, tuple[Graph, list[int]]]) -> None:
        commands: list[Command] = [
            ("HMGET", keys_of(run_id)[1], *places) for run_id, (_, places) in ended.items()
        ]
        for (graph, places), states in zip(
            ended.values(), await self._pipe.many(commands), strict=True
        ):
            for place, state in zip(places, states, strict=True):
                started, finished = times_of(state)
                if started and finished:
                    handler = graph.nodes[place].handler
                    self._listener.took(handler, float(finished) - float(started))

    async def _read_end(self, run_id: str, graph: Graph, wanted: Sequence[str]) -> None:
        outputs: dict[str, Any] = {}
        with suppress(StoreError, NotFound):  # archived and dropped since: it ended all the same
            nodes = (await self.load(run_id)).nodes
            outputs = {name: nodes[graph.index[name]].output for name in wanted}
        self._listener.ended(run_id, graph, RunStatus.COMPLETED, outputs)

    async def _read_log(self, run_id: str) -> None:
        graph = (await self._known(run_id)).run.graph
        texts = await self._pipe.call("LRANGE", keys_of(run_id)[5], 0, -1)
        log: list[Event] = [event_of(text, seq, graph) for seq, text in enumerate(texts, 1)]
        (caller,) = await self.callers_of([run_id])
        self._listener.over(run_id, graph, log, caller)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quiet(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)


async def _quiet(work: Coroutine[Any, Any, None]) -> None:
    """Whoever listens is not worth an error: with Redis away, something is not counted."""
    with suppress(StoreError, NotFound):
        await work


def times_of(state: bytes | None) -> tuple[bytes, bytes]:
    """When a node was started and finished, the last two fields of its state; empty if it was not.

    As `node_of` has it, at a tenth of the price: it is asked of every node.
    """
    if state is None:
        return b"", b""
    _, started, finished = state.rsplit(_SEPARATOR, 2)
    return started, finished


def _caller_key(run_id: str) -> str:
    return f"wf:{{{run_id}}}:caller"
