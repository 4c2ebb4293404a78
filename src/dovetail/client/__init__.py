"""Dovetail from Python: `Dovetail`, an engine as a handful of calls, wherever it is.

The engine is in this process on a file, in the services on a Redis, or behind an API server. Where
the process that waits for runs also drives them, a run whose process died goes on here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import orjson

from dovetail.client.answers import (
    Batch,
    BatchPage,
    BatchRun,
    DeadLetter,
    Event,
    FeedEvent,
    HistoryPage,
    InspectedNode,
    ItemPage,
    Layout,
    LoggedLine,
    NodeAttempt,
    Page,
    Queues,
    Repaired,
    Requeued,
    Run,
    RunCounts,
    RunNode,
    RunOutcome,
    WorkflowDiff,
    WorkflowVersion,
)
from dovetail.client.arguments import (
    Workflow,
    definition_meant_by,
    meant_by,
    params_or_none,
    seconds_or_none,
    server_url,
    text,
    text_or_none,
    version_or_none,
    whole_number,
)
from dovetail.config import Settings, SettingsError, load_settings
from dovetail.core.aliases import AliasTarget, check_weights
from dovetail.core.errors import Conflict, DovetailError, StoreError
from dovetail.engine.api import Accepted, EngineApi, log_lines
from dovetail.engine.ports import LogQuery, RunQuery
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import HandlerError, Registry, marked
from dovetail.redis_client.url import SCHEMES as REDIS_SCHEMES
from dovetail.wiring.embedded import definition_limits, embedded

__all__ = [
    "Batch",
    "BatchRun",
    "Dovetail",
    "Event",
    "FeedEvent",
    "InspectedNode",
    "ItemPage",
    "LoggedLine",
    "NodeAttempt",
    "Page",
    "Run",
    "RunNode",
    "WorkflowVersion",
]

T = TypeVar("T")
HandlerSource = str | PathLike[str] | Callable[..., Any]

LOOK_SECONDS = 0.5
"""How soon a run is taken over that another process drove until it died."""
PAGE = 1000
HTTP_SCHEMES = ("http", "https")
LAST_LOOK_SECONDS = 2.0
"""For the state of a run or batch when the time for waiting is over."""


class Dovetail:
    """The embedded engine on one file, services on Redis, or a server; use `async with`.

    `Dovetail()` takes the file of the settings, `./.dovetail/dovetail.db` unless they say
    otherwise; `Dovetail("path.db")` that one. Any number of them, in any number of processes,
    may be open on one file. `handlers` are functions with `@handler`, or files and modules to
    load as with `--handlers`; every other keyword is a setting: `concurrency=8`.

    On leaving, handlers that still run get `drain_seconds` to finish. What is not finished
    then waits in the file until a process waits for it or resumes it.

    `Dovetail("redis://…")` has the same calls, and drives nothing: `dovetail orchestrator` and
    `dovetail worker` do, and go on with every run. `handlers` are then only known
    here, and run where a worker has them. `database_url=` is the archive, if there is one.

    `Dovetail("http://host:8700", token="…")` asks a `dovetail serve`, which drives its runs with
    the handlers it was started with; `handlers` mean nothing there. Without `token` it is the
    setting DOVETAIL_TOKEN. A connection that breaks is made again; while the server is started
    anew, callers go on waiting.
    """

    def __init__(
        self,
        target: str | PathLike[str] | None = None,
        *,
        handlers: HandlerSource | Iterable[HandlerSource] = (),
        token: str | None = None,
        **settings: Any,
    ) -> None:
        self._settings = _settings(target, {**settings, "token": token})
        self._registry = _registry(self._settings, handlers)
        self._limits = definition_limits(self._settings)
        self._engine: AbstractAsyncContextManager[EngineApi] | None = None
        self._opened: EngineApi | None = None

    def __repr__(self) -> str:
        state = "closed" if self._opened is None else "open"
        return f"<Dovetail {self._where()!r}, {state}>"

    def _where(self) -> str:
        """Without what may be a password."""
        if self._settings.server is not None:
            return self._settings.server
        if self._settings.redis_url is None:
            return str(self._settings.db)
        scheme, _, rest = self._settings.redis_url.partition("?")[0].partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    async def __aenter__(self) -> Self:
        if self._engine is not None:
            raise DovetailError("this Dovetail is already open; make another one beside it")
        self._engine = _engine(self._settings, self._registry)
        try:
            self._opened = await self._engine.__aenter__()
        except BaseException:
            self._engine = None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        engine, self._engine, self._opened = self._engine, None, None
        if engine is not None:
            await engine.__aexit__(kind, error, traceback)

    @property
    def _commands(self) -> EngineApi:
        if self._opened is None:
            raise DovetailError("not open; call it inside  async with Dovetail() as dt:")
        return self._opened

    # --- workflows ---------------------------------------------------------------------------

    async def register(self, definition: Workflow) -> WorkflowVersion:
        """Keep a definition under its name; changed content becomes the next version.

        Raises `InvalidDefinition` with every problem.
        """
        commands = self._commands
        name, version, created = await commands.register(
            await definition_meant_by(definition, self._limits)
        )
        return WorkflowVersion(name, version, created)

    async def diff_workflow(
        self, name: str, from_version: int | str | None, to_version: int | str | None = None
    ) -> WorkflowDiff:
        """How two versions differ, by their numbers or aliases; without the second, from the first
        to the latest. Raises `NotFound`."""
        found = await self._commands.diff_workflow(
            text("name", name),
            version_or_none("from_version", from_version),
            version_or_none("to_version", to_version),
        )
        return WorkflowDiff.from_api(_own(found))

    async def workflow_graph(self, name: str, version: int | str | None = None) -> Layout:
        """Where to draw a version of a workflow, the latest if none is named. `NotFound`."""
        wanted = version_or_none("version", version)
        return Layout.from_api(
            _own(await self._commands.workflow_graph(text("name", name), wanted))
        )

    async def set_alias(
        self,
        name: str,
        alias: str,
        version: int | None = None,
        *,
        weights: Mapping[int | str, float] | None = None,
    ) -> None:
        """Let an alias name a version, or divide runs between versions by weights, such as
        `weights={3: 90, 4: 10}`. The version of a run is chosen once, by its idempotency key, else
        by its id. Raises `NotFound`, `InvalidParams`; `Conflict` for `latest`."""
        if (version is None) == (weights is None):
            raise TypeError("give either a version or weights")
        target: AliasTarget = (
            check_weights(weights) if version is None else whole_number("version", version)
        )
        await self._commands.set_alias(text("name", name), text("alias", alias), target)

    async def delete_alias(self, name: str, alias: str) -> None:
        """Forget an alias of a workflow. Raises `NotFound`; `Conflict` for `latest`."""
        await self._commands.delete_alias(text("name", name), text("alias", alias))

    async def delete_version(self, name: str, version: int) -> None:
        """Forget a version of a workflow; its finished runs stay. Raises `NotFound`; `Conflict`
        for the latest one, and while an alias names it or a run of it is not finished."""
        await self._commands.delete_version(text("name", name), whole_number("version", version))

    async def workflow_history(
        self, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> HistoryPage:
        """What was done to a workflow, when and by whom, newest first; also of a deleted one.
        Raises `NotFound` for a name that was never registered."""
        page = await self._commands.workflow_history(
            text("name", name),
            limit=whole_number("limit", limit, least=1),
            cursor=text_or_none("cursor", cursor),
        )
        return HistoryPage.from_api(_own(page))

    # --- runs --------------------------------------------------------------------------------

    async def trigger(
        self,
        workflow: Workflow,
        params: Mapping[str, Any] | None = None,
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Start a run; it cannot be lost any more when this returns.

        `version`, a number or an alias, is of a registered workflow. With an `idempotency_key`
        that was used before the answer is that run. Raises `InvalidDefinition`,
        `InvalidParams`, `NotFound`, and `Conflict` for a known key with another request.
        """
        accepted = await self._trigger(workflow, params, version, idempotency_key)
        if not accepted.created:
            with suppress(Conflict):  # its handlers are not known here: it is the run all the same
                await self._take_over([accepted.run_id])
        return _warned(await self.get_run(accepted.run_id), accepted)

    async def run(
        self,
        workflow: Workflow,
        params: Mapping[str, Any] | None = None,
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  (a name of the contract)
    ) -> Run:
        """`trigger` and `wait`. A run that failed is an answer, not an error: see its `status`."""
        seconds_or_none("timeout", timeout)  # before there is a run
        accepted = await self._trigger(workflow, params, version, idempotency_key)
        perhaps_elsewhere = [] if accepted.created else [accepted.run_id]
        return _warned(await self._wait(accepted.run_id, timeout, perhaps_elsewhere), accepted)

    async def _trigger(
        self,
        workflow: Workflow,
        params: Mapping[str, Any] | None,
        version: int | str | None,
        key: str | None,
    ) -> Accepted:
        commands = self._commands
        return await commands.trigger(
            await meant_by(workflow, self._limits),
            params_or_none(params),
            version=version_or_none("version", version),
            idempotency_key=text_or_none("idempotency_key", key),
        )

    async def get_run(self, run_id: str) -> Run:
        """The run as it is now. Raises `NotFound`."""
        return _run(await self._commands.get_run(text("run_id", run_id)))

    async def wait(
        self,
        run_id: str,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Run:
        """The run once it has finished, whichever process drives it.

        If none does, it goes on here. Raises `TimeoutError` after so many seconds; the run goes
        on. Raises `Conflict` if no process drives it and its handlers are not known here.
        """
        return await self._wait(run_id, timeout, [text("run_id", run_id)])

    async def _wait(
        self,
        run_id: str,
        timeout: float | None,  # noqa: ASYNC109
        perhaps_elsewhere: list[str],
    ) -> Run:
        commands = self._commands
        limit = asyncio.timeout(seconds_or_none("timeout", timeout))
        elsewhere = await self._take_over(perhaps_elsewhere)
        try:
            async with limit:
                return _run(await self._attended(commands.wait_run(run_id), elsewhere))
        except TimeoutError:
            if not limit.expired():
                raise
            run = await _last_look(self.get_run(run_id), f"run {run_id}", timeout)
            if run.finished_at is None:
                raise _ran_out(f"run {run_id} is {run.status}", timeout) from None
            return run

    async def retry(self, run_id: str, *, from_node: str | None = None) -> Run:
        """Run again what did not complete, or everything from a node on; returns at once.

        Raises `NotFound`, and `Conflict` when the state of the run forbids it.
        """
        commands = self._commands
        wanted = text_or_none("from_node", from_node)
        return _run(await commands.retry_run(text("run_id", run_id), wanted))

    async def fork(
        self,
        run_id: str,
        *,
        definition: Workflow | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Start a new run that begins with the finished nodes of this one; returns at once.

        Without `definition`, a dict or a path, and without `version` of the same workflow, the
        new run has the definition of the old one; without `params`, its params. Reused are the
        nodes that are equal in both and COMPLETED there, with all their ancestors; with other
        params only with `from_node`, and never that node or what depends on it. The old run may be
        in any state and stays as it is. Raises as `trigger`.
        """
        commands = self._commands
        given = None
        if definition is not None:
            given = await definition_meant_by(definition, self._limits)
        accepted = await commands.fork(
            text("run_id", run_id),
            definition=given,
            version=version_or_none("version", version),
            params=params_or_none(params),
            from_node=text_or_none("from_node", from_node),
            idempotency_key=text_or_none("idempotency_key", idempotency_key),
        )
        if not accepted.created:
            with suppress(Conflict):  # as with `trigger`
                await self._take_over([accepted.run_id])
        return _warned(await self.get_run(accepted.run_id), accepted)

    async def cancel(self, run_id: str) -> Run:
        """Cancel what has not finished, whichever process drives it. `NotFound`, `Conflict`."""
        return _run(await self._commands.cancel_run(text("run_id", run_id)))

    async def retry_runs(self, run_ids: Iterable[str]) -> list[RunOutcome]:
        """Retry up to 1,000 runs, each once; what became of each, in this order."""
        done = await self._commands.retry_runs([text("run_ids", one) for one in run_ids])
        return [RunOutcome.from_api(item) for item in done["items"]]

    async def cancel_runs(self, run_ids: Iterable[str]) -> list[RunOutcome]:
        """Cancel up to 1,000 runs, each once; what became of each, in this order."""
        done = await self._commands.cancel_runs([text("run_ids", one) for one in run_ids])
        return [RunOutcome.from_api(item) for item in done["items"]]

    async def run_graph(self, run_id: str) -> Layout:
        """Where to draw the nodes of a run. Raises `NotFound`."""
        return Layout.from_api(_own(await self._commands.run_graph(text("run_id", run_id))))

    async def delete_run(self, run_id: str) -> None:
        """Delete a finished run and everything that belongs to it. `NotFound`, `Conflict`."""
        await self._commands.delete_run(text("run_id", run_id))

    async def repair(self, run_id: str, *, dry_run: bool = False) -> Repaired:
        """Rebuild a run's state from its own log; with `dry_run`, only say what differs.

        Raises `NotFound`, and `BrokenRun` when the log itself is damaged: cancel the run then.
        """
        commands = self._commands
        done = await commands.repair(text("run_id", run_id), dry_run=bool(dry_run))
        return Repaired.from_api(done)

    async def resume(self, run_id: str | None = None) -> list[str]:
        """Go on here with a run that no process drives; without an id, with all whose handlers
        are known here. Returns the ids; `wait` returns each at its end. `NotFound`, `Conflict`.
        """
        return await self._commands.resume(text_or_none("run_id", run_id))

    async def list_runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        batch: str | None = None,
        q: str | None = None,
        created_after: str | None = None,
        created_before: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """Runs, newest first, without their nodes; at most 1,000 at a time.

        `q` is the beginning of an id, a part of the workflow's name, or a string or number among
        the params' values. The times are of RFC 3339. A page of a search may be short or empty
        though another follows.
        """
        query = RunQuery(
            status=text_or_none("status", status),
            workflow=text_or_none("workflow", workflow),
            batch=text_or_none("batch", batch),
            q=text_or_none("q", q),
            created_after=text_or_none("created_after", created_after),
            created_before=text_or_none("created_before", created_before),
            limit=whole_number("limit", limit, least=1),
            cursor=text_or_none("cursor", cursor),
        )
        return Page.from_api(_own(await self._commands.list_runs(query)))

    async def run_counts(self, *, workflow: str | None = None, hours: int = 24) -> RunCounts:
        """How many runs are in each status, and in each of the last hours, at most 168."""
        wanted = text_or_none("workflow", workflow)
        number = whole_number("hours", hours, least=1)
        return RunCounts.from_api(await self._commands.run_counts(workflow=wanted, hours=number))

    async def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Every event after the one with the number `after`, live; ends with the run.

        Like `wait`, it goes on here with a run that no process drives.
        """
        feed = self._commands.watch(text("run_id", run_id), whole_number("after", after))
        async with aclosing(self._followed(run_id, feed)) as events:
            async for event in events:
                yield Event.from_api(_own(event))

    async def feed(self, after: str | None = None) -> AsyncIterator[FeedEvent]:
        """The run events of all runs, live and for ever: runs that are created, started, completed,
        failed, cancelled and retried, by any process.

        It begins now, or after the event whose `id` is `after`. Raises `Expired` if events after
        that may be missing: they are kept for a day, and no more than 100,000 of them.
        """
        feed = self._commands.feed(text_or_none("after", after))
        async with aclosing(feed):
            async for event in feed:
                yield FeedEvent.from_api(_own(event))

    async def node(self, run_id: str, node: str) -> InspectedNode:
        """A node with its config, its inputs and all its attempts. Raises `NotFound`."""
        found = await self._commands.node_detail(text("run_id", run_id), text("node", node))
        return InspectedNode.from_api(_own(found))

    async def items(
        self,
        run_id: str,
        node: str,
        *,
        status: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> ItemPage:
        """Some items of a node with `for_each`, in order. Raises `NotFound`, also for a node
        without items."""
        page = await self._commands.node_items(
            text("run_id", run_id),
            text("node", node),
            status=text_or_none("status", status),
            limit=whole_number("limit", limit, least=1),
            cursor=text_or_none("cursor", cursor),
        )
        return ItemPage.from_api(_own(page))

    async def logs(
        self,
        run_id: str,
        *,
        node: str | None = None,
        attempt: int | None = None,
        item: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[LoggedLine]:
        """Every line that the handlers of a run logged; with `follow` live, until the run ends.

        Like `events`, `follow` goes on here with a run that no process drives. Raises `NotFound`,
        also for a node that the run does not have.
        """
        commands = self._commands
        query = LogQuery(
            node=text_or_none("node", node),
            attempt=None if attempt is None else whole_number("attempt", attempt, least=1),
            item=None if item is None else whole_number("item", item),
        )
        if follow:
            feed = self._followed(run_id, commands.follow_logs(text("run_id", run_id), query))
        else:
            feed = log_lines(commands, text("run_id", run_id), query)
        async with aclosing(feed) as lines:
            async for line in lines:
                yield LoggedLine.from_api(_own(line))

    async def _followed(
        self, run_id: str, feed: AsyncGenerator[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any]]:
        """What comes out of the feed of a run, which goes on here if no process drives it."""
        async with aclosing(feed):
            owner = await self._attended(self._commands.owner(run_id), [])
            # What is stored of a run that no process drives comes before it is taken over.
            elsewhere = [] if owner in ("here", "none") else [run_id]
            while (news := await self._attended(anext(feed, None), elsewhere)) is not None:
                yield news

    # --- batches -----------------------------------------------------------------------------

    async def batch(
        self,
        workflow: Workflow,
        items: Iterable[Mapping[str, Any]],
        *,
        idempotency_key: str | None = None,
    ) -> Batch:
        """One run for the params of each item: all of them, or with one bad item none."""
        commands = self._commands
        made = await commands.batch(
            await meant_by(workflow, self._limits),
            # What is no mapping, the check of the params reports, with its place.
            [dict(item) if isinstance(item, Mapping) else item for item in items],
            idempotency_key=text_or_none("idempotency_key", idempotency_key),
        )
        batch = await self._whole_batch(made["batch_id"])
        return replace(batch, warnings=made["warnings"]) if "warnings" in made else batch

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None
    ) -> Batch:
        """The batch as it is now, with so many of its runs. Raises `NotFound`."""
        found = await self._commands.get_batch(
            text("batch_id", batch_id),
            limit=whole_number("limit", limit, least=1),
            cursor=text_or_none("cursor", cursor),
        )
        return Batch.from_api(_own(found))

    async def list_batches(self, *, limit: int = 50, cursor: str | None = None) -> BatchPage:
        """Batches, newest first, without their runs; at most 100 at a time."""
        page = await self._commands.list_batches(
            limit=whole_number("limit", limit, least=1), cursor=text_or_none("cursor", cursor)
        )
        return BatchPage.from_api(_own(page))

    async def find_batch(self, beginning: str) -> str:
        """The id of the one batch whose id begins so. Raises `NotFound`, `Conflict`."""
        return await self._commands.find_batch(text("beginning", beginning))

    async def wait_batch(
        self,
        batch_id: str,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Batch:
        """The batch with all its runs once they have finished; else like `wait`."""
        commands = self._commands
        limit = asyncio.timeout(seconds_or_none("timeout", timeout))
        text("batch_id", batch_id)
        driven = await self._unfinished(batch_id) if commands.drives else []
        elsewhere = await self._take_over(driven)
        try:
            async with limit:
                await self._attended(commands.wait_batch(batch_id), elsewhere)
        except TimeoutError:
            if not limit.expired():
                raise
            look = self.get_batch(batch_id, limit=1)
            batch = await _last_look(look, f"batch {batch_id}", timeout)
            if batch.finished_at is None:
                raise _ran_out(f"batch {batch_id} has {batch.counts}", timeout) from None
        return await self._whole_batch(batch_id)

    async def retry_batch(self, batch_id: str) -> Batch:
        """Retry its failed runs; returns at once. `NotFound`, `Conflict`."""
        await self._commands.retry_batch(text("batch_id", batch_id))
        return await self._whole_batch(batch_id)

    async def _whole_batch(self, batch_id: str) -> Batch:
        """With all its runs: a caller that had all items at once has room for them."""
        commands = self._commands
        batch = await commands.get_batch(batch_id, limit=PAGE)
        runs, cursor = list(batch["runs"]), batch["next_cursor"]
        while cursor is not None:
            page = await commands.get_batch(batch_id, limit=PAGE, cursor=cursor, counts=False)
            runs += page["runs"]
            cursor = page["next_cursor"]
        return Batch.from_api(_own({**batch, "runs": runs, "next_cursor": None}))

    async def _unfinished(self, batch_id: str) -> list[str]:
        """Not by status: a run is FAILED while its last nodes still run."""
        commands = self._commands
        found: list[str] = []
        cursor = None
        while True:
            page = await commands.list_runs(RunQuery(batch=batch_id, limit=PAGE, cursor=cursor))
            found += [run["run_id"] for run in page["items"] if run["finished_at"] is None]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    # --- queues and dead letters -------------------------------------------------------------

    async def queues(self) -> Queues:
        """What waits for workers and rate limits, and what runs, over all runs."""
        return Queues.from_api(_own(await self._commands.queues()))

    async def dead_letters(self) -> list[DeadLetter]:
        """Messages that were refused, and notifications that were given up; the newest first."""
        found = await self._commands.dead_letters()
        return [DeadLetter.from_api(_own(one)) for one in found["items"]]

    async def requeue_dead_letter(self, letter_id: str) -> Requeued:
        """Retry the run that a letter names, and drop the letter. `NotFound`, `Conflict`."""
        made = await self._commands.requeue_dead_letter(text("letter_id", letter_id))
        return Requeued.from_api(made)

    async def drop_dead_letter(self, letter_id: str) -> None:
        """Delete a letter; the run that it names stays as it is. Raises `NotFound`."""
        await self._commands.drop_dead_letter(text("letter_id", letter_id))

    # --- keeping runs alive ------------------------------------------------------------------

    async def _take_over(self, run_ids: Iterable[str]) -> list[str]:
        """Go on here with the runs that no process drives; returns the runs of other processes."""
        commands = self._commands
        elsewhere: list[str] = []
        for run_id in run_ids if commands.drives else ():
            owner = await commands.owner(run_id)
            if owner == "gone":
                try:
                    await commands.resume(run_id)
                except Conflict:
                    # Another process was faster, or it has ended; if neither, it cannot go on here.
                    if await commands.owner(run_id) == "gone":
                        raise
                owner = await commands.owner(run_id)
            if owner not in ("here", "none"):
                elsewhere.append(run_id)
        return elsewhere

    async def _attended(self, news: Awaitable[T], elsewhere: list[str]) -> T:
        """Await news of runs; meanwhile take over runs of `elsewhere` that lost their process.

        A run that is taken over, or has ended, is removed from the list.
        """
        try:
            if not elsewhere:
                return await news
            coming = asyncio.ensure_future(news)
            try:
                while not (await asyncio.wait({coming}, timeout=LOOK_SECONDS))[0]:
                    elsewhere[:] = await self._take_over(elsewhere)
                return coming.result()
            finally:
                if coming.cancel():
                    await asyncio.gather(coming, return_exceptions=True)
        except (RuntimeError, StoreError) as error:
            if self._opened is not None:
                raise
            raise DovetailError(
                "the block was left before the run had finished; wait for it in another one"
            ) from error


def _settings(target: str | PathLike[str] | None, given: dict[str, Any]) -> Settings:
    # An argument ends in tracebacks and in other people's logs.
    if {"secrets", "secret_hosts"} & given.keys():
        raise SettingsError("secrets are read from the environment: set DOVETAIL_SECRET_<NAME>")
    if target is not None:
        place = _place(target)
        if place in given:
            raise TypeError(f"Dovetail(target, {place}=…): these are two places; give one of them")
        given[place] = _file(target) if place == "db" else os.fspath(target)
    if given.get("server"):
        given["server"] = server_url(given["server"])
    settings = load_settings(**given)
    # Nowhere else, whatever the settings of this place name: the caller did not.
    elsewhere = [name for name in ("server", "redis_url") if not given.get(name)]
    return settings.model_copy(update=dict.fromkeys(elsewhere))


def _place(target: str | PathLike[str]) -> Literal["server", "redis_url", "db"]:
    scheme, is_url, _ = os.fspath(target).partition("://")
    if is_url and scheme in REDIS_SCHEMES:
        return "redis_url"
    return "server" if is_url and scheme in HTTP_SCHEMES else "db"


def _engine(settings: Settings, registry: Registry) -> AbstractAsyncContextManager[EngineApi]:
    if settings.server is not None:
        return open_server(settings)
    if settings.redis_url is None:
        return embedded(settings, registry)
    try:  # here: the embedded engine works without a client for Redis
        from dovetail.wiring.distributed import commanding
    except ModuleNotFoundError as error:
        raise DovetailError(
            f"the client for Redis is not installed ({error}): pip install 'dovetail[redis]'"
        ) from None
    return commanding(settings, registry)


def open_server(settings: Settings) -> AbstractAsyncContextManager[EngineApi]:
    """The engine behind the server of the settings."""
    with http_client():
        from dovetail.client.server import calling
    return calling(settings)


@contextmanager
def http_client() -> Iterator[None]:
    """Around the import of what calls a server: what may be missing, in words."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("httpx2", "httpcore2"):
            raise
        raise DovetailError(
            f"the client for servers is not installed ({error}): pip install 'dovetail[http]'"
        ) from None


def _file(target: str | PathLike[str]) -> Path:
    path = os.fspath(target)
    scheme, is_url, _ = path.partition("://")
    if is_url:  # only its scheme is shown: there may be a password in the rest
        raise DovetailError(
            f"{scheme}:// leads nowhere: give a file, as in Dovetail('path.db'), services on "
            "Redis, as in Dovetail('redis://host'), or a server, as in "
            "Dovetail('http://host:8700')"
        )
    if path in ("", ":memory:"):
        raise DovetailError(
            f"Dovetail({path!r}): runs are kept in a file; give its path, as in 'path.db'"
        )
    return Path(path)


def _registry(settings: Settings, handlers: HandlerSource | Iterable[HandlerSource]) -> Registry:
    if settings.server is not None:
        return Registry()  # handlers are the server's
    if callable(handlers) or isinstance(handlers, str | PathLike):
        handlers = [handlers]
    given = list(handlers)
    specs = [os.fspath(one) for one in given if isinstance(one, str | PathLike)]
    registry = load_registry(settings, specs)
    for one in given:
        if isinstance(one, str | PathLike):
            continue
        found = marked(one, getattr(one, "__module__", "") or "handlers=")
        if not found:
            raise HandlerError(
                f"handlers=: {one!r} is no handler; give functions with @handler, "
                "or FILE.py or package.module as text"
            )
        for known in found:
            registry.add(known)
    return registry


def _warned(run: Run, accepted: Accepted) -> Run:
    if not accepted.warnings:
        return run
    return replace(run, warnings=[problem.as_dict() for problem in accepted.warnings])


def _run(view: dict[str, Any]) -> Run:
    return Run.from_api(_own(view))


def _own(view: dict[str, Any]) -> dict[str, Any]:
    """A deep copy: a view shares its values with the engine."""
    copied: dict[str, Any] = orjson.loads(orjson.dumps(view))
    return copied


async def _last_look(look: Awaitable[T], what: str, timeout: float | None) -> T:  # noqa: ASYNC109
    """Its state when the time is over. A server that is away is not waited for any longer."""
    try:
        async with asyncio.timeout(LAST_LOOK_SECONDS):
            return await look
    except (TimeoutError, StoreError):
        raise _ran_out(f"{what} could not be asked about", timeout) from None


def _ran_out(state: str, timeout: float | None) -> TimeoutError:
    return TimeoutError(f"{state} after {timeout:g} s of waiting; it goes on, so wait again")
