"""Runs in one SQLite file, listened to: the same store, which also tells what it has written.

Told is what a commit holds, not what was staged: a decision that another process overtook is made
anew and told once. How long a node ran follows from the two events of its start and its end. What
it must not know: who listens, or any rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.transitions import Decision, Submit
from dovetail.engine.listening import Listener
from dovetail.stores.journal import Staged
from dovetail.stores.sqlite import SqliteStore
from dovetail.stores.sqlite_writer import PIECES, piece

MOST_CALLERS = 10_000
MOST_STARTED = 100_000
"""More cannot run here: those that came first are of runs that went on elsewhere."""
ENDS = frozenset({"node.completed", "node.failed", "node.retrying", "node.lost", "node.cancelled"})
MEASURED = frozenset({"node.completed", "node.failed"})


class HeardSqliteStore(SqliteStore):
    def __init__(self, path: Path, listener: Listener, **options: Any) -> None:
        super().__init__(path, **options)
        self._listener = listener
        self._started: dict[tuple[str, str], float] = {}
        """When each node that runs was started."""
        self._callers: dict[str, str] = {}

    async def __aenter__(self) -> HeardSqliteStore:
        await super().__aenter__()
        self._rounds.heard = self._written
        return self

    async def create(self, submit: Submit, now: float) -> Decision:
        self._note_caller([submit])
        decision = await super().create(submit, now)
        self._pass_on(submit.run_id, submit.graph, decision.events, ended=decision.ended)
        return decision

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: tuple[str, str, str] | None, now: float
    ) -> list[Decision]:
        self._note_caller(submits)
        decisions = await super().create_batch(batch_id, submits, key, now)
        for submit, made in zip(submits, decisions, strict=True):
            self._pass_on(submit.run_id, submit.graph, made.events, ended=made.ended)
        return decisions

    def caller_of(self, run_id: str) -> str | None:
        """The `traceparent` that a run was asked for under, if that was here."""
        return self._callers.get(run_id)

    def _note_caller(self, submits: Sequence[Submit]) -> None:
        caller = self._listener.caller()
        if caller is not None:
            while len(self._callers) > MOST_CALLERS:
                del self._callers[next(iter(self._callers))]
            self._callers.update((submit.run_id, caller) for submit in submits)

    def _written(self, run: RunState, staged: Sequence[Staged]) -> None:
        for one in staged:
            decision = one.decision
            self._pass_on(run.id, run.graph, decision.events, ended=decision.ended)

    def _pass_on(self, run_id: str, graph: Graph, events: Sequence[Event], *, ended: bool) -> None:
        if events:
            self._listener.told(run_id, graph, events)
        for _, time, kind, _, node, _, _ in events:
            if node is None:
                continue
            if kind == "node.started":
                if len(self._started) > MOST_STARTED:
                    del self._started[next(iter(self._started))]
                self._started[run_id, node] = time
            elif kind in ENDS:
                began = self._started.pop((run_id, node), None)
                if began is not None and kind in MEASURED:
                    handler = graph.nodes[graph.index[node]].handler
                    self._listener.took(handler, time - began)
        if ended and self._listener.whole_logs:
            log = self._log(run_id)
            self._listener.over(run_id, graph, log, self._callers.get(run_id))

    def _log(self, run_id: str) -> list[Event]:
        number, _ = self._query("is_finished", run_id)
        rows = self.rows("read_entries", piece(number, 0), piece(number, PIECES - 1))
        return [event for entry in self.entries_of(run_id, rows) for event in entry.events]
