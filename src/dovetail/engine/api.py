"""What the command line, the client and the API server ask of an engine: one protocol.

`Commands` is the engine in this process, on a file or on Redis. `client.server.RemoteEngine` is the
engine of an API server. Replies that are dictionaries have the fields of the HTTP API (`views`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Container, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

from dovetail.core.aliases import AliasTarget
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import Problem
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import NodeState, RunState
from dovetail.engine.ports import (
    ALL_LINES,
    ALL_RUNS,
    LogQuery,
    RunQuery,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.views import RunDetail

Given = Source | Mapping[str, Any] | Checked | str
"""A definition in any form, or the name of a registered workflow."""
Owner = Literal["here", "elsewhere", "gone", "none"]
"""The process that drives a run: this one, another one, one that died, or none is needed."""


class _Accepted(NamedTuple):
    run_id: str
    created: bool


class Accepted(_Accepted):
    """A run that cannot be lost any more: made now, or found under its idempotency key or its
    index in a batch. A pair; the warnings about its params are an attribute.
    """

    warnings: Sequence[Problem]

    def __new__(cls, run_id: str, created: bool, warnings: Sequence[Problem] = ()) -> Accepted:
        made = super().__new__(cls, run_id, created)
        made.warnings = warnings
        return made


class EngineApi(Protocol):
    """Workflows, runs, batches and rate limits of one engine.

    Every call about a run, a batch or a workflow raises `NotFound` where there is none.
    """

    @property
    def drives(self) -> bool:
        """Runs go on in this process. If not, other processes drive them."""
        ...

    # ── workflows ────────────────────────────────────────────────────────────────────────

    def validate(self, definition: Source | Mapping[str, Any]) -> Checked:
        """Check with the handlers known so far; `learn_handlers` brings them up to date."""
        ...

    def learn_handlers(self) -> Awaitable[object]: ...
    async def served_handlers(self) -> Container[str] | None:
        """The handlers of live workers; None where the process that drives a run has them."""
        ...

    async def judge(self, definition: Source) -> Checked:
        """Check with the handlers of the engine as they are now."""
        ...

    async def register(
        self,
        definition: Source | Mapping[str, Any] | Checked,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> WorkflowVersion:
        """Keep a definition under its name. Raises `InvalidDefinition`, or `Changed`.

        `actor` is whom the history names for this change, here and below.
        """
        ...

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]: ...
    async def workflows(
        self, *, limit: int = 50, cursor: str | None = None, runs: int = 0, q: str | None = None
    ) -> dict[str, Any]:
        """With `runs`, each has so many of its last runs, at most 20; a page then has at most 100
        workflows. `q` is a part of the name: then a page may be empty though another follows."""
        ...

    async def versions(self, name: str) -> dict[str, Any]: ...
    async def diff_workflow(
        self, name: str, from_version: int | str | None, to_version: int | str | None = None
    ) -> dict[str, Any]:
        """What another version, the latest if none is named, has added, removed and changed."""
        ...

    async def workflow_graph(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        """Where to draw the nodes and edges of a version; see `core/layout.py`."""
        ...

    async def delete_workflow(
        self, name: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        """Raises `Changed`, or `Conflict` while runs of it are not finished."""
        ...

    async def delete_version(
        self, name: str, version: int | str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        """Raises `Changed`, or `Conflict` while an alias names it, `latest` among them, or a run
        of it is not finished."""
        ...

    async def set_alias(
        self,
        name: str,
        alias: str,
        target: AliasTarget,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> dict[str, Any]:
        """Let it name a version, or divide runs between versions by weights. Raises `NotFound` for
        a version that is not there, `InvalidParams` for a name or weights that cannot be, or
        `Changed`."""
        ...

    async def delete_alias(
        self, name: str, alias: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        """Raises `Changed`, or `Conflict` for `latest`."""
        ...

    async def workflow_history(
        self, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """What was done to a workflow, also a deleted one, and by whom; newest first."""
        ...

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def trigger(
        self,
        workflow: Given,
        params: Mapping[str, Any] | None = None,
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
        place: tuple[str, int] | None = None,
    ) -> Accepted:
        """Run a workflow; returns once the run cannot be lost any more.

        `place` is a batch and an index in it. Raises `InvalidDefinition`, or `InvalidParams` for
        the params alone; `Conflict` for a key that was used for another request.
        """
        ...

    async def fork(
        self,
        run_id: str,
        *,
        definition: Source | Mapping[str, Any] | Checked | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
        idempotency_key: str | None = None,
    ) -> Accepted:
        """Make a new run that begins with the finished nodes of an older run, in any state.

        `version` is of the older run's workflow. Without both, the definition is the older run's
        own; without `params`, the params are. Raises as `trigger`, and `NotFound` for a `from_node`
        that the definition does not have.
        """
        ...

    async def plan_fork(
        self,
        run_id: str,
        *,
        definition: Source | Mapping[str, Any] | Checked | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
    ) -> dict[str, Any]:
        """The nodes that a fork would run, and those it would reuse. Raises as a fork."""
        ...

    async def receipt(self, run_id: str) -> dict[str, Any]:
        """The reply to a trigger: readable as soon as the trigger was accepted."""
        ...

    async def find_run(self, prefix: str) -> str:
        """The full id of the one run whose id begins so. Raises `Conflict` for several."""
        ...

    async def get_run(
        self, run_id: str, *, nodes: bool = True, large: bool = True
    ) -> dict[str, Any]:
        """Without `large`, a reference replaces each output above 64 KiB, and those beyond 1 MiB in
        all."""
        ...

    async def definition_of_run(self, run_id: str) -> dict[str, Any]:
        """The definition that a run was made of: `run_id`, `workflow`, `version`, `definition`."""
        ...

    async def snapshot(self, run_id: str) -> RunDetail: ...
    async def wait_run(self, run_id: str, *, nodes: bool = True) -> dict[str, Any]:
        """The run once it has finished."""
        ...

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        """Raises `InvalidParams` for a status that does not exist."""
        ...

    async def run_counts(self, *, workflow: str | None = None, hours: int = 24) -> dict[str, Any]:
        """How many runs are in each status, and of each of the last hours how many were created
        and how many of these failed. Raises `InvalidParams` for a number of hours out of bounds."""
        ...

    async def results(self, run_id: str, *, partial: bool = False) -> dict[str, Any]:
        """Raises `Conflict` while its status is not final, unless `partial`."""
        ...

    async def node_detail(self, run_id: str, node: str) -> dict[str, Any]:
        """A node with its template, rendered config, inputs and attempts. Raises `NotFound`."""
        ...

    async def node_items(
        self,
        run_id: str,
        node: str,
        *,
        status: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """A page of the items of a mapped node, in their order, and how many are in which state.
        Raises `NotFound`, also for a node without items, and `InvalidParams`."""
        ...

    async def events(
        self, run_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The events that are stored so far, in order; no more than `limit`."""
        ...

    def watch(self, run_id: str, after: int = 0) -> AsyncGenerator[dict[str, Any]]:
        """Every event after that number, then new ones as they come; ends with the run."""
        ...

    def feed(self, after: str | None = None) -> AsyncGenerator[dict[str, Any]]:
        """The run events of all runs after the event with that id, or from now on, for ever.

        Each has its `id`, the `run_id` and the `workflow`. Raises `InvalidParams` for what is no
        id, and `Expired` if events after it may be missing.
        """
        ...

    async def logs(self, run_id: str, query: LogQuery = ALL_LINES) -> dict[str, Any]:
        """A page of what its handlers logged: `items`, and the `next_cursor` that is `after` of the
        next page; None if nothing follows by now. A page may be empty though another follows.

        Raises `NotFound`, also for a node that the run does not have, and `InvalidParams` for a
        level that does not exist.
        """
        ...

    def follow_logs(
        self, run_id: str, query: LogQuery = ALL_LINES
    ) -> AsyncGenerator[dict[str, Any]]:
        """Every line after that number, then new ones as they come, whatever the limit says; ends
        with the run. Raises as `logs` does."""
        ...

    async def run_graph(self, run_id: str) -> dict[str, Any]:
        """Where to draw its nodes and edges; see `core/layout.py`."""
        ...

    async def explain(self, run_id: str) -> dict[str, Any]:
        """Why each node that has not finished is where it is."""
        ...

    async def damage(self, run_id: str) -> list[str]:
        """Where the state of a run disagrees with itself or with its log, as sentences."""
        ...

    async def verify(self, run_id: str) -> list[str]:
        """Where the run's log departs from the rules, as sentences; why, if it cannot be read."""
        ...

    async def cancel_run(self, run_id: str) -> dict[str, Any]:
        """Cancel what has not finished. Raises `Conflict` when nothing is left to cancel."""
        ...

    async def retry_run(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        """Open a new epoch. Raises `Conflict` when the state of the run forbids it."""
        ...

    async def retry_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        """Retry each of these runs once; the outcome of each, in this order.

        An item has `run_id`, `ok`, `status` and `error`. Raises `InvalidParams` for too many.
        """
        ...

    async def cancel_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        """The same for a cancel."""
        ...

    async def plan_retry(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        """The nodes that a retry would run again, and those it would reuse. Raises as a retry."""
        ...

    async def repair(self, run_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Rebuild a run's state from its log; with where the two differ, as sentences.

        Raises `BrokenRun` for a log that is damaged itself.
        """
        ...

    async def delete_run(self, run_id: str) -> None:
        """Delete a run with everything that belongs to it. Raises `Conflict` if it is not
        finished."""
        ...

    async def delete_runs(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        """Delete the finished ones of these runs; returns the deleted ones. See `DurableStore`."""
        ...

    async def reclaim_space(self) -> None:
        """Give the space of deleted runs back to the disk, as far as that is this engine's."""
        ...

    async def owner(self, run_id: str) -> Owner: ...
    async def orphans(self) -> list[str]:
        """The unfinished runs that no process drives, oldest first."""
        ...

    async def resume(self, run_id: str | None = None) -> list[str]:
        """Drive a run whose owner is gone, or every such run whose handlers are known here.

        Raises `Conflict` where runs are not driven here.
        """
        ...

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def batch(
        self,
        workflow: Given,
        items: Sequence[Mapping[str, Any]],
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """One run per item: all of them, or none if one item is invalid.

        The reply has `warnings` only if there are some.
        """
        ...

    async def open_batch(
        self, workflow: Given, count: int, *, idempotency_key: str, items: str = ""
    ) -> dict[str, Any]:
        """A batch whose runs are triggered one by one, each with its index.

        `items` is a digest of them: the same key for other items is a `Conflict`.
        """
        ...

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        """Without `counts` only a page of its runs, at a cost that does not grow with the batch."""
        ...

    async def find_batch(self, prefix: str) -> str: ...
    async def list_batches(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """Newest first, without runs; at most 100 of them, because each is counted."""
        ...

    async def wait_batch(self, batch_id: str) -> dict[str, Any]:
        """The batch once every run of it has finished."""
        ...

    async def retry_batch(self, batch_id: str) -> dict[str, Any]:
        """Retry its runs that failed or were cancelled."""
        ...

    # ── rate limits ──────────────────────────────────────────────────────────────────────

    async def rate_limits(self) -> dict[str, Any]: ...
    async def rate_limit(self, tag: str) -> dict[str, Any]:
        """The limit of a tag; the default for a tag without one of its own."""
        ...

    async def rate_limit_history(
        self, tag: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """How it was changed, and by whom; newest first."""
        ...

    async def set_rate_limit(
        self, tag: str, rate_per_second: float, burst: int, *, actor: str | None = None
    ) -> dict[str, Any]:
        """For every process that shares the store. Raises `InvalidParams`."""
        ...

    # ── queues and dead letters ──────────────────────────────────────────────────────────

    async def queues(self) -> dict[str, Any]:
        """What waits for workers and rate limits, and what runs, as `GET /queues` has it."""
        ...

    async def dead_letters(self) -> dict[str, Any]:
        """`items`, the newest first."""
        ...

    async def drop_dead_letter(self, letter_id: str) -> None:
        """Delete a letter; the run that it names stays as it is. Raises `NotFound`."""
        ...

    async def requeue_dead_letter(self, letter_id: str) -> dict[str, Any]:
        """Retry the run that a letter names, or send its notification again, and drop the letter.
        Raises `NotFound`, and `Conflict` if it names no run, or the state of the run forbids a
        retry."""
        ...


class ServedEngine(EngineApi, Protocol):
    """The engine behind an API server, which sends large outputs in parts.

    A reply with outputs is made of a `RunState`: each output that is over the budget is an
    `OutputReference` there, and is read while the reply is sent.
    """

    async def definition_graph(self, definition: Workflow) -> dict[str, Any]:
        """Where to draw the nodes and edges of a definition that need not be registered."""
        ...

    async def load_run(self, run_id: str, budget: ReadBudget) -> RunState: ...
    async def with_results(
        self, run_id: str, *, partial: bool = False, budget: ReadBudget | None = None
    ) -> RunState:
        """The run, if it has results: `Conflict` while its status is not final."""
        ...

    async def with_output(self, run_id: str, node: str) -> tuple[RunState, NodeState]:
        """The run, and a node or item that has an output, which may be a reference.

        Raises `NotFound` for a node that is not there or ended without an output, and `Conflict`
        for one that may still have one.
        """
        ...

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        """These outputs of a run that `load_run` gave, as JSON, in this order.

        Raises `StoreError` if they are not there any more: the run was retried since, or removed.
        """
        ...

    async def cancel(self, run_id: str, *, budget: ReadBudget | None = None) -> RunState: ...
    async def retry(
        self, run_id: str, from_node: str | None = None, *, budget: ReadBudget | None = None
    ) -> RunState: ...
    async def summary(self, run_id: str, *, max_result_bytes: int | None = None) -> dict[str, Any]:
        """As a list has it. A larger result is an `OutputReference`."""
        ...

    async def ended(self, run_id: str) -> None:
        """Returns once the run has finished, without reading all of it."""
        ...

    async def last_seq(self, run_id: str) -> int:
        """The number of its last event, by the run itself: the list may not have it yet."""
        ...

    async def feed_start(self, after: str | None) -> str:
        """The id after which `feed` would begin. Raises as `feed` does."""
        ...

    def check_writable(self) -> Awaitable[object]:
        """Raises `StoreError`, with its reason, if a trigger would not be accepted now.

        It may write, so it is not to be asked often.
        """
        ...

    def clock(self) -> float: ...


async def log_lines(
    engine: EngineApi, run_id: str, query: LogQuery = ALL_LINES
) -> AsyncGenerator[dict[str, Any]]:
    """Every line there is by now, read page by page."""
    while True:
        page = await engine.logs(run_id, query)
        for item in page["items"]:
            yield item
        if page["next_cursor"] is None:
            return
        query = replace(query, after=int(page["next_cursor"]))
