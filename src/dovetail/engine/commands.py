"""The engine in this process, as the command line, the API server and the client ask it.

The edges parse and print. What is allowed and what happens is decided here and in the core.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Container,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf
from typing import Any, NamedTuple, cast

import orjson

from dovetail.core.aliases import AliasTarget, check_weights, choose_version, main_version
from dovetail.core.attempts import AttemptEvents
from dovetail.core.audit.event_check import audit, inconsistencies
from dovetail.core.audit.journal_check import verify
from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.diff import diff_definitions
from dovetail.core.definition.model import MAX_LABEL_CHARS, STORED, Workflow
from dovetail.core.definition.params import check_items, check_params
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked, DefinitionLimits, check
from dovetail.core.errors import (
    BrokenRecord,
    BrokenRun,
    Conflict,
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    StoreError,
    one_line,
    shown,
)
from dovetail.core.events import RUN_ENDS, Event
from dovetail.core.fork import ForkPlan, plan_fork
from dovetail.core.items import item_name, split_name
from dovetail.core.layout import layout, layout_view
from dovetail.core.node_logs import LEVELS, MAX_CHUNK_BYTES, StoredChunk, log_page
from dovetail.core.outputs import (
    LARGE_OUTPUT,
    ONLY_SIZES,
    OutputReference,
    ReadBudget,
    is_shown,
    parts,
    reference,
)
from dovetail.core.run import NodeState, RunState, encoded_size
from dovetail.core.states import FINAL, FINISHED, NodeStatus, RunStatus
from dovetail.core.step import explain_refusal, retry_plan
from dovetail.core.templates import MAX_CONFIG_SIZE
from dovetail.core.text import counted
from dovetail.core.transitions import Cancel, Retry, Submit
from dovetail.core.values import NotJson, faults
from dovetail.engine.api import Accepted, Given, Owner
from dovetail.engine.clock import Clock
from dovetail.engine.explain import explain
from dovetail.engine.idempotency import KeyedRequest
from dovetail.engine.limits import DEFAULT_BURST, DEFAULT_RATE, FASTEST, LARGEST_BURST, SLOWEST
from dovetail.engine.node_detail import (
    MAX_ITEM_PAGE_BYTES,
    SHOWN,
    NodeDetail,
    item_page,
    page_length,
)
from dovetail.engine.ports import (
    ALL_LINES,
    ALL_RUNS,
    Author,
    DeadLetters,
    Driver,
    DurableStore,
    Feed,
    KeyUsed,
    LogQuery,
    Rates,
    Records,
    RunQuery,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.queues import QueueInspector, read_queues
from dovetail.engine.run_search import RunSearch
from dovetail.engine.views import (
    RunDetail,
    event_view,
    feed_view,
    item_counts,
    item_view,
    log_view,
    output_href,
    outputs,
    result,
    run_snapshot,
    run_view,
    small_run_view,
    timestamp,
    with_warnings,
)
from dovetail.engine.webhooks import WEBHOOKS

MAX_COMPILED = 64
MAX_LAYOUTS = 16
BATCH_POLL_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""Pauses between looks at a batch whose known runs have all ended but that is not finished: its
last runs may not be made yet."""
BATCH_WAIT_SIZE = 20
"""Runs of a batch that are waited for at a time."""
RETRY_BATCH_SIZE = 100
"""Runs of a batch, or of a list, that are retried together: they share commits."""
MAX_MOVED_RUNS = 1_000
"""That one call retries or cancels."""
MAX_COUNTED_HOURS = 168
"""A week."""
MAX_BATCHES_PER_PAGE = 100
"""In a page: each is counted."""
MAX_SEARCHED_WORKFLOWS = 5_000
"""For one page: a search that finds little ends after so many."""
MAX_WORKFLOWS_WITH_RUNS = 100
"""In a page that has the last runs of each."""
WORKFLOWS_AT_ONCE = 10
"""Whose last runs are read at the same time."""
MAX_LAST_RUNS = 20
"""Of each workflow in a list."""
LAST_RUN_FIELDS = ("run_id", "version", "status", "created_at", "finished_at", "duration")
MAX_SEARCHED_RUNS = 5_000
SEARCH_SECONDS = 1.0
"""For one page of runs: a search that finds little ends after so much."""
MAX_AUDITED_EVENTS = 2_000
"""Events of a run that are read to explain it; `verify` reads all of them."""
LOG_SECONDS = 10.0
"""To read the log of a run up to an event that was there."""
LOG_POLL_SECONDS = 0.3
"""Between two looks at the log of a run that goes on. A worker hands lines in every 0.5 s: a reader
sees each within a second."""
LOG_LAG_SECONDS = 1.0
"""So late a line may be stored after it was written."""
END_POLL_SECONDS = 0.05
"""Until the end of a run is stored."""
LOG_LINES_AT_ONCE = 200
"""That are held of a log that is followed."""
LOG_LINE_BYTES = 200
"""What a line is taken to have, where only some lines are wanted."""
MAX_LOG_READ_BYTES = 1 << 20
MAX_LOG_READS = 16
"""For one page: a search that finds little ends after so much."""
MAX_TRIES = 3
"""To cancel or retry a run in a store that does not keep the change."""
_AGAIN = (RunStatus.FAILED, RunStatus.CANCELLED)
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_ALIAS_LENGTH = 128


class _PlannedFork(NamedTuple):
    submit: Submit
    """Without the outputs that it reuses."""
    plan: ForkPlan
    warnings: Sequence[Problem]
    sha256: str | None
    """Of a definition that is not registered."""


class _Compiled(NamedTuple):
    graph: Graph
    params: dict[str, Any] | None
    """The schema."""
    version: int | None
    sha256: str | None
    """Of a definition that is not registered."""
    source: Any
    """Held, so that its identity stays its own."""


async def _nothing_new() -> None:
    """The handlers of this process are known."""


async def _never() -> None:
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Commands:
    store: DurableStore
    records: Records
    run_feed: Feed
    orchestrator: Driver
    wait: Callable[[str], Awaitable[RunState]]
    """Returns the run once it has finished."""
    clock: Clock
    known_handlers: Container[str] | None
    default_retries: Mapping[str, int]
    limits: DefinitionLimits
    rates: Rates
    max_crashes: int
    digest: Callable[[Workflow], tuple[str, bytes]]
    """The digest and the text under which a definition is kept."""
    drives: bool = True
    """Runs are driven in this process. If not, it only reads them and sends commands."""
    why_not_here: str = "nothing is driven here"
    """The message of `resume` where runs are not driven here."""
    learn_handlers: Callable[[], Awaitable[object]] = _nothing_new
    """Brings `known_handlers` and `default_retries` up to date with what workers announced."""
    hindered: Callable[[], Awaitable[str | None]] | None = None
    """Says what keeps published nodes from their workers, if something does."""
    serving: Callable[[], Awaitable[Container[str]]] | None = None
    """The handlers of live workers; None where the process that drives a run has them."""
    check_writable: Callable[[], Awaitable[object]] = _nothing_new
    """Raises `StoreError`, with its reason, if a run that is asked for now would not be accepted.
    It may write, so it is not to be asked often."""
    lost: Callable[[], Awaitable[None]] = _never
    """Raises what ended the store of this process, when something does."""
    letters: DeadLetters | None = None
    """None where no message is refused and no notification sent."""
    inspector: QueueInspector | None = None
    """None where messages do not travel between processes."""
    max_config_bytes: int = MAX_CONFIG_SIZE
    """Of a node's rendered config."""
    actor: str = "unknown"
    """The author of a change in the history, if the call names no other author."""
    _compiled: dict[Any, _Compiled] = field(default_factory=dict)
    _layouts: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    """By a digest of the nodes and their dependencies."""

    # ── definitions ──────────────────────────────────────────────────────────────────────

    def validate(self, definition: Source | Mapping[str, Any]) -> Checked:
        """With the handlers known so far: `learn_handlers` first, where workers announce them."""
        return check(definition, self.known_handlers, self.limits)

    async def judge(self, definition: Source) -> Checked:
        """The same with the handlers that are known by now."""
        await self.learn_handlers()
        return self.validate(definition)

    async def register(
        self,
        definition: Source | Mapping[str, Any] | Checked,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> WorkflowVersion:
        workflow = await self._valid(definition)
        sha256, content = self.digest(workflow)
        return await self.records.register(workflow.name, sha256, content, self._by(actor), seen)

    def _by(self, actor: str | None) -> Author:
        return Author(actor or self.actor, self.clock())

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        return await self.records.workflow(name, version)

    async def workflows(
        self, *, limit: int = 50, cursor: str | None = None, runs: int = 0, q: str | None = None
    ) -> dict[str, Any]:
        if runs:
            limit = min(limit, MAX_WORKFLOWS_WITH_RUNS)
        if q:
            page = await self._search_workflows(q, limit, cursor)
        else:
            page = await self.records.workflows(limit=limit, cursor=cursor)
        items = page["items"] if runs else []
        for first in range(0, len(items), WORKFLOWS_AT_ONCE):
            part = items[first : first + WORKFLOWS_AT_ONCE]
            found = await asyncio.gather(*(self._last_runs(item["name"], runs) for item in part))
            for item, last in zip(part, found, strict=True):
                item["runs"] = last
            await asyncio.sleep(0)  # others get their turn, also where reading does not wait
        return page

    async def _search_workflows(self, q: str, limit: int, cursor: str | None) -> dict[str, Any]:
        """A page that may be short or empty though another follows, as of `_search_runs`."""
        found: list[dict[str, Any]] = []
        examined = 0
        while True:
            page = await self.records.workflows(limit=limit - len(found), cursor=cursor)
            found += [one for one in page["items"] if q.lower() in one["name"].lower()]
            examined, cursor = examined + len(page["items"]), page["next_cursor"]
            is_enough = examined >= MAX_SEARCHED_WORKFLOWS or len(found) * 2 >= limit
            if cursor is None or is_enough:
                return {"items": found, "next_cursor": cursor}
            await asyncio.sleep(0)

    async def _last_runs(self, workflow: str, count: int) -> list[dict[str, Any]]:
        query = RunQuery(workflow=workflow, limit=min(count, MAX_LAST_RUNS), max_result_bytes=0)
        found = await self.records.list_runs(query)
        return [{name: run[name] for name in LAST_RUN_FIELDS} for run in found["items"]]

    async def versions(self, name: str) -> dict[str, Any]:
        return await self.records.versions(name)

    async def diff_workflow(
        self, name: str, from_version: int | str | None, to_version: int | str | None = None
    ) -> dict[str, Any]:
        old = await self._registered(name, from_version)
        return diff_definitions(old, await self._registered(name, to_version))

    async def _registered(self, name: str, version: int | str | None) -> Workflow:
        found = await self.records.registered(name, version)
        try:
            return Workflow.model_validate(orjson.loads(found.content), context=STORED)
        except ValueError as error:  # damaged, or of a version that is newer than ours
            raise BrokenRecord(
                f"version {found.version} of workflow '{name}' cannot be read "
                f"({one_line(' '.join(str(error).split()), 200)}): register it again"
            ) from None

    async def delete_workflow(
        self, name: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        await self.records.delete_workflow(name, self._by(actor), seen)

    async def delete_version(
        self, name: str, version: int | str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        await self.records.delete_version(name, version, self._by(actor), seen)

    async def set_alias(
        self,
        name: str,
        alias: str,
        target: AliasTarget,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> dict[str, Any]:
        check_alias(alias)
        target = target if isinstance(target, int) else check_weights(target)
        return await self.records.set_alias(name, alias, target, self._by(actor), seen)

    async def delete_alias(
        self, name: str, alias: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        await self.records.delete_alias(name, alias, self._by(actor), seen)

    async def workflow_history(
        self, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        return await self.records.history("workflow", name, limit=limit, cursor=cursor)

    async def workflow_graph(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        return await self._layout((await self._compile(name, version)).graph)

    async def definition_graph(self, definition: Workflow) -> dict[str, Any]:
        graph = await asyncio.to_thread(build_graph, definition, self.default_retries)
        return await self._layout(graph)

    async def run_graph(self, run_id: str) -> dict[str, Any]:
        return await self._layout(await self.store.graph(run_id))

    async def _layout(self, graph: Graph) -> dict[str, Any]:
        nodes = [(spec.id, spec.parents) for spec in graph.nodes]
        key = hashlib.sha256(orjson.dumps(nodes)).digest()
        if key not in self._layouts:
            # In a thread: of 10,000 nodes it takes half a second, and runs go on meanwhile.
            found = await asyncio.to_thread(layout, [spec.parents for spec in graph.nodes])
            if len(self._layouts) >= MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = layout_view([spec.id for spec in graph.nodes], found)
        return self._layouts[key]

    async def _valid(self, definition: Source | Mapping[str, Any] | Checked) -> Workflow:
        await self.learn_handlers()
        checked = definition if isinstance(definition, Checked) else self.validate(definition)
        if checked.workflow is None:
            raise InvalidDefinition(checked.errors)
        return checked.workflow

    async def _compile(
        self, given: Given, version: int | str | None, key: str | None = None
    ) -> _Compiled:
        """The graph to run; the same one for the same definition, as far as that is cheap.

        An alias with weights gives the version that it has for this key; without a key, its main
        version.
        """
        (compiled,) = await self._compile_each(given, version, [key])
        return compiled

    async def _compile_each(
        self, given: Given, version: int | str | None, keys: Sequence[str | None]
    ) -> list[_Compiled]:
        """The same for several runs, with one look at the alias."""
        if not isinstance(given, str):
            return [await self._compile_definition(given, version)] * len(keys)
        target = await self.records.target_of(given, version)
        if isinstance(target, int):
            return [await self._compile_version(given, target)] * len(keys)
        numbers = [
            main_version(target) if key is None else choose_version(target, given, key)
            for key in keys
        ]
        compiled = {one: await self._compile_version(given, one) for one in sorted({*numbers})}
        return [compiled[number] for number in numbers]

    async def _compile_version(self, name: str, version: int) -> _Compiled:
        key = (name, version)
        if key not in self._compiled:
            await self.learn_handlers()
            self._remember(key, await self._registered(name, version), version, None, None)
        return self._compiled[key]

    async def _compile_definition(
        self, given: Source | Mapping[str, Any] | Checked, version: int | str | None
    ) -> _Compiled:
        if version is not None:
            message = "a version is of a registered workflow; this is a definition"
            raise InvalidParams([Problem("invalid_field", message, "version")])
        key: Any = id(given)
        if not isinstance(given, Checked) or key not in self._compiled:
            workflow = await self._valid(given)
            self._remember(key, workflow, None, self.digest(workflow)[0], given)
        return self._compiled[key]

    def _remember(
        self, key: Any, workflow: Workflow, version: int | None, sha256: str | None, source: Any
    ) -> None:
        if len(self._compiled) >= MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        graph = build_graph(workflow, self.default_retries)
        self._compiled[key] = _Compiled(graph, workflow.params, version, sha256, source)

    # ── runs are made ────────────────────────────────────────────────────────────────────

    async def trigger(
        self,
        workflow: Given,
        params: Mapping[str, Any] | None = None,
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
        place: tuple[str, int] | None = None,
    ) -> Accepted:
        params = {} if params is None else params
        request = KeyedRequest("run", _name(workflow), version, params, idempotency_key)
        run_id = new_id()
        try:
            compiled = await self._compile(workflow, version, idempotency_key or run_id)
            given, warnings = check_params(compiled.params, params)
        except (InvalidDefinition, NotFound) as refusal:
            known_run = await self._made_before(request, workflow, refusal)
            return Accepted(known_run, created=False)
        key = request.key(compiled.sha256)
        where = None if place is None else (await self.records.batch_number(place[0]), place[1])
        submit = Submit(run_id, compiled.graph, given, compiled.version, key=key, place=where)
        try:
            await self.orchestrator.submit(submit)
        except KeyUsed as known:
            return Accepted(request.answer(known), created=False, warnings=warnings)
        return Accepted(run_id, created=True, warnings=warnings)

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
        body = {"params": params, "from": from_node}
        request = KeyedRequest("fork", run_id, version, body, idempotency_key)
        try:
            fork = await self._planned_fork(
                run_id, definition, version, params, from_node, idempotency_key
            )
        except (InvalidDefinition, NotFound) as refusal:
            given: Given = "" if definition is None else definition
            return Accepted(await self._made_before(request, given, refusal), created=False)
        submit = fork.submit._replace(
            key=request.key(fork.sha256), reused=fork.plan.reuse, reuse=[*fork.plan.reuse]
        )
        try:
            await self.orchestrator.submit(submit)
        except KeyUsed as known:
            return Accepted(request.answer(known), created=False, warnings=fork.warnings)
        return Accepted(submit.run_id, created=True, warnings=fork.warnings)

    async def plan_fork(
        self,
        run_id: str,
        *,
        definition: Source | Mapping[str, Any] | Checked | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
    ) -> dict[str, Any]:
        fork = await self._planned_fork(run_id, definition, version, params, from_node)
        rerun = set(fork.plan.rerun)
        names = [spec.id for spec in fork.submit.graph.nodes]
        return {"rerun": fork.plan.rerun, "reuse": [one for one in names if one not in rerun]}

    async def _planned_fork(
        self,
        run_id: str,
        definition: Source | Mapping[str, Any] | Checked | None,
        version: int | str | None,
        params: Mapping[str, Any] | None,
        from_node: str | None,
        idempotency_key: str | None = None,
    ) -> _PlannedFork:
        if definition is not None and version is not None:
            message = "give a definition or a version of the run's workflow, not both"
            raise InvalidParams([Problem("invalid_field", message, "version")])
        old = await self.store.load(run_id)
        fork_id = new_id()
        graph, schema, number, sha256 = old.graph, None, old.version, None
        if definition is not None or version is not None:
            given: Given = old.graph.name if definition is None else definition
            key = idempotency_key or fork_id
            graph, schema, number, sha256, _ = await self._compile(given, version, key)
        else:
            schema = None if graph.workflow is None else graph.workflow.params
            if self.drives:
                await self._check_handlers(run_id)
        checked, warnings = check_params(schema, old.params if params is None else params)
        submit = Submit(fork_id, graph, checked, number, forked_from=run_id)
        return _PlannedFork(submit, plan_fork(old, submit, from_node), warnings, sha256)

    async def _made_before(
        self, request: KeyedRequest, given: Given, refusal: InvalidDefinition | NotFound
    ) -> str:
        """The run or batch that the same request has made already; else raises the refusal.

        Later changes of the workflow, its schema and its handlers do not matter to a repeated
        request. Looked up after the refusal, so that nothing can be made in between.
        """
        sha256 = None
        if not isinstance(given, str):
            checked = given if isinstance(given, Checked) else self.validate(given)
            if checked.parsed is None:
                raise refusal
            sha256 = self.digest(checked.parsed)[0]
        try:
            key = request.key(sha256)
        except NotJson:
            raise refusal from None
        known = None if key is None else await self.store.made_under(key)
        if known is None:
            raise refusal
        return request.answer(known)

    async def receipt(self, run_id: str) -> dict[str, Any]:
        return await self.records.receipt(run_id)

    # ── runs are read ────────────────────────────────────────────────────────────────────

    async def find_run(self, prefix: str) -> str:
        return await self.records.find_run(prefix)

    async def get_run(
        self, run_id: str, *, nodes: bool = True, large: bool = True
    ) -> dict[str, Any]:
        if not large:
            return small_run_view(await self.store.load(run_id, room=SHOWN), nodes=nodes)
        if not nodes:
            view = await self.records.summary(run_id)
            if view["finished_at"] is not None:
                return view  # one row; what goes on is in memory, and has a result in parts
        return run_view(await self.store.load(run_id), nodes=nodes)

    async def definition_of_run(self, run_id: str) -> dict[str, Any]:
        run = await self.store.load(run_id, outputs=False)
        if run.graph.workflow is None:  # a damaged run that was ended unread
            raise NotFound(f"run {run_id} has no definition any more")
        return {
            "run_id": run_id,
            "workflow": run.graph.name,
            "version": run.version,
            "definition": orjson.loads(self.digest(run.graph.workflow)[1]),
        }

    async def snapshot(self, run_id: str) -> RunDetail:
        return run_snapshot(await self.store.load(run_id))

    async def load_run(self, run_id: str, budget: ReadBudget) -> RunState:
        """The run with as many outputs as the budget allows; `read_outputs` has the rest."""
        return await self.store.load(run_id, room=budget)

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        return await self.store.read_outputs(run, wanted)

    async def last_seq(self, run_id: str) -> int:
        return (await self.store.load(run_id, outputs=False)).seq

    async def summary(self, run_id: str, *, max_result_bytes: int | None = None) -> dict[str, Any]:
        return await self.records.summary(run_id, max_result_bytes)

    async def ended(self, run_id: str) -> None:
        """Returns once the run has finished; `wait` reads all of it then. Raises `NotFound`."""
        await self.store.ended(run_id)

    async def wait_run(self, run_id: str, *, nodes: bool = True) -> dict[str, Any]:
        return run_view(await self.wait(run_id), nodes=nodes)

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        status = query.status
        if status is not None and status not in RunStatus.__members__:
            message = f"'{status[:40]}' is no status; one of {', '.join(RunStatus)}"
            raise InvalidParams([Problem("invalid_field", message, "status")])
        search = RunSearch(query)
        if search.keeps_all:
            return await self.records.list_runs(query)
        return await self._search_runs(query, search)

    async def run_counts(self, *, workflow: str | None = None, hours: int = 24) -> dict[str, Any]:
        if not 1 <= hours <= MAX_COUNTED_HOURS:
            message = f"{hours} is no number of hours; from 1 to {MAX_COUNTED_HOURS}"
            raise InvalidParams([Problem("invalid_field", message, "hours")])
        last = self.clock() // 3600 * 3600
        starts = [last - 3600 * back for back in range(hours - 1, -1, -1)]
        tally = await self.records.count_runs(workflow, [*starts, last + 3600])
        return {
            "counts": {status.value: tally.by_status.get(status.value, 0) for status in RunStatus},
            "hours": [
                {
                    "time": timestamp(start),
                    "total": sum(created.values()),
                    "failed": created.get(RunStatus.FAILED.value, 0),
                }
                for start, created in zip(starts, tally.created, strict=True)
            ],
        }

    async def _search_runs(self, query: RunQuery, search: RunSearch) -> dict[str, Any]:
        """A page that may be short or empty though another follows: each request examines so many
        runs at most. It never reads more runs than fit on its page, so that no run is left out."""
        found: list[dict[str, Any]] = []
        examined, cursor = 0, query.cursor
        until = asyncio.get_running_loop().time() + SEARCH_SECONDS
        while True:
            room = query.limit - len(found)
            page = await self.records.list_runs(replace(query, limit=room, cursor=cursor))
            runs, cursor = page["items"], page["next_cursor"]
            found += filter(search.keeps, runs)
            examined += len(runs)
            if runs and search.is_past(runs[-1]):
                cursor = None
            is_enough = examined >= MAX_SEARCHED_RUNS or len(found) * 2 >= query.limit
            if cursor is None or is_enough or asyncio.get_running_loop().time() > until:
                return {"items": found, "next_cursor": cursor}
            await asyncio.sleep(0)  # others get their turn, also where reading does not wait

    async def results(self, run_id: str, *, partial: bool = False) -> dict[str, Any]:
        run = await self.with_results(run_id, partial=partial)
        return {"status": run.status.value, "result": result(run), "outputs": outputs(run)}

    async def with_results(
        self, run_id: str, *, partial: bool = False, budget: ReadBudget | None = None
    ) -> RunState:
        run = await self.store.load(run_id, room=budget)
        if run.status not in FINAL and not partial:
            raise Conflict(f"run {run_id} is {run.status}: it has no result yet")
        return run

    async def with_output(self, run_id: str, node: str) -> tuple[RunState, NodeState]:
        run = await self.store.load(run_id, room=ONLY_SIZES)
        if (item := run.find_item(node)) is not None:
            await self._read_items(run, item[0], [item[1]])
        found = run.node(node) if item else run.nodes[_index_of(run, node)]
        if found.status not in FINISHED:
            message = f"node '{node}' of run {run_id} is {found.status}: it has no output yet"
            raise Conflict(message)
        if found.status is not NodeStatus.COMPLETED:
            raise NotFound(f"node '{node}' of run {run_id} is {found.status}: it has no output")
        return run, found

    async def node_items(
        self,
        run_id: str,
        node: str,
        *,
        status: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        run = await self.store.load(run_id, room=ONLY_SIZES)
        index = _index_of(run, node)
        counts = item_counts(run.graph.nodes[index], run.nodes[index])
        if counts is None:
            raise NotFound(f"node '{node}' of run {run_id} has no items: it has no for_each")
        numbers, following = item_page(run.nodes[index], status, limit, cursor)
        there = await self._read_items(run, index, numbers)
        views = [item_view(run, index, number) for number in numbers[:there]]
        views = views[: page_length(views)]
        if len(views) < len(numbers):
            following = str(numbers[len(views)])
        unread = {
            str(view["index"]): view["output"].size
            for view in views
            if isinstance(view["output"], OutputReference) and view["output"].size <= LARGE_OUTPUT
        }
        by_index = {str(view["index"]): view for view in views}
        for names in parts(unread):
            wanted = [by_index[name]["output"] for name in names]
            for name, text in zip(names, await self.store.read_outputs(run, wanted), strict=True):
                by_index[name]["output"] = orjson.loads(text)
        for view in views:
            size = 0 if view["output"] is None else encoded_size(view["output"])
            if isinstance(view["output"], OutputReference) or not is_shown(view["output"], size):
                href = output_href(run_id, item_name(node, view["index"]))
                view["output"] = reference(size, href)
        return {"items": views, "counts": counts, "next_cursor": following}

    async def _read_items(self, run: RunState, index: int, numbers: Sequence[int]) -> int:
        """Returns how many of these were read, for a page of them; at least one."""
        node = run.nodes[index]
        if node.items is None or not node.items.is_reused:
            return await self.store.read_items(run, index, numbers, MAX_ITEM_PAGE_BYTES)
        if isinstance(node.output, OutputReference):  # a fork has the list as one output
            (text,) = await self.store.read_outputs(run, [node.output])
            node.items.outputs = orjson.loads(text)
        return len(numbers)

    async def node_detail(self, run_id: str, node: str) -> dict[str, Any]:
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._node_detail(run_id, node)
            except StoreError as problem:
                if type(problem) is not StoreError:  # the store is away, or the run is damaged
                    raise
                # Else the run was retried while it was read, or went to the archive.
        return await self._node_detail(run_id, node)

    async def _node_detail(self, run_id: str, node: str) -> dict[str, Any]:
        run = await self.store.load(run_id, room=ONLY_SIZES)
        index = _index_of(run, node)
        is_finished, seq = run.nodes[index].status in FINISHED, run.seq
        detail = NodeDetail(run, index, self.max_config_bytes)
        for names in parts({name: one.size for name, one in detail.unread.items()}):
            wanted = [detail.unread[name] for name in names]
            for name, text in zip(names, await self.store.read_outputs(run, wanted), strict=True):
                detail.put(name, orjson.loads(text))
        why = None
        if not is_finished:
            explained = (await self.explain(run_id))["nodes"]
            fields = ("code", "why", "details")
            why = next(
                ({f: one[f] for f in fields} for one in explained if one["id"] == node), None
            )
        events = AttemptEvents(node)
        try:
            async with asyncio.timeout(LOG_SECONDS):
                async for event in self._log_up_to(run_id, seq):
                    events.add(event)
        except TimeoutError:  # the store has lost the end of the log since
            raise StoreError(f"run {run_id}: its log ends before event {seq}") from None
        return detail.view(events.picked, why)

    async def events(
        self, run_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        return await self.records.events(run_id, after, limit)

    async def watch(self, run_id: str, after: int = 0) -> AsyncGenerator[dict[str, Any]]:
        feed = self.store.watch(run_id, after)
        async with aclosing(cast("AsyncGenerator[Event]", feed)):
            async for event in feed:
                yield event_view(event)

    async def feed(self, after: str | None = None) -> AsyncGenerator[dict[str, Any]]:
        feed = self.run_feed.follow_feed(await self.run_feed.feed_start(after))
        async with aclosing(feed):
            async for item in feed:
                yield feed_view(item)

    async def feed_start(self, after: str | None) -> str:
        return str(await self.run_feed.feed_start(after))

    async def logs(self, run_id: str, query: LogQuery = ALL_LINES) -> dict[str, Any]:
        items, cursor, more = await self._log_page(run_id, query)
        return {"items": items, "next_cursor": str(cursor) if more else None}

    async def follow_logs(
        self, run_id: str, query: LogQuery = ALL_LINES
    ) -> AsyncGenerator[dict[str, Any]]:
        query = replace(query, limit=LOG_LINES_AT_ONCE)
        ending: asyncio.Future[None] | None = None
        try:
            while True:
                if ending is None:
                    ending = asyncio.ensure_future(self.store.ended(run_id))
                # Asked before the lines are read: a run that has finished has all of them.
                if ended := ending.done():
                    ending.result()
                    ending = None
                    # By what is stored: its last lines are committed with its end.
                    run = await self.records.summary(run_id, 0)
                    ended = run["finished_at"] is not None
                    if ended and run["status"] == RunStatus.CANCELLED:
                        # It does not wait for its handlers: what they wrote before is on its way.
                        await asyncio.sleep(LOG_LAG_SECONDS)
                more = True
                while more:
                    items, cursor, more = await self._log_page(run_id, query)
                    for item in items:
                        yield item
                    query = replace(query, after=cursor)
                if ended:
                    return
                if ending is None:  # its end is not stored yet, or it was retried
                    await asyncio.sleep(END_POLL_SECONDS)
                else:
                    await asyncio.wait({ending}, timeout=LOG_POLL_SECONDS)
        finally:
            if ending is not None:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    async def _log_page(
        self, run_id: str, query: LogQuery
    ) -> tuple[list[dict[str, Any]], int, bool]:
        """Lines of a log, the number after which the next ones come, and whether there may be
        some."""
        check_level(query.level)
        where = {"node": query.node, "epoch": query.epoch}
        given: dict[str, Any] = {**where, "attempt": query.attempt, "item": query.item}
        items: list[dict[str, Any]] = []
        cursor = query.after
        for _ in range(MAX_LOG_READS):
            left = query.limit - len(items)
            room = min(MAX_CHUNK_BYTES + left * LOG_LINE_BYTES, MAX_LOG_READ_BYTES)
            chunks = await self._log_chunks(run_id, cursor, room, given)
            if not chunks:
                if cursor == 0 and query.node is not None:
                    # Only of the first page: a caller of a later one has seen lines of this node.
                    _index_of(await self.store.load(run_id, outputs=False), query.node)
                return items, cursor, False
            page = log_page(chunks, cursor, left, level=query.level, q=query.q)
            items += map(log_view, page.items)
            # A chunk that cannot be read has no lines: it is passed over, number by number.
            cursor = max(page.cursor, cursor + 1)
            if len(items) >= query.limit:
                more = cursor < chunks[-1].last_seq
                return items, cursor, more or bool(await self._log_chunks(run_id, cursor, 1, given))
            await asyncio.sleep(0)  # others get their turn, also where reading does not wait
        return items, cursor, True

    async def _log_chunks(
        self, run_id: str, after: int, max_bytes: int, given: dict[str, Any]
    ) -> list[StoredChunk]:
        try:
            return await self.records.logs(run_id, after, max_bytes=max_bytes, **given)
        except NotFound:
            await self.records.summary(run_id, 0)  # if it is accepted and not made yet
            return []

    async def explain(self, run_id: str) -> dict[str, Any]:
        run = await self.store.load(run_id, outputs=False)
        driven = await self.store.owner_of(run_id) != "gone"
        served = await self.served_handlers()
        damage = await self._damage(run)
        hindered = None if self.hindered is None else await self.hindered()
        nodes = explain(run, self.clock(), driven, served, damage, hindered)
        return {"run_id": run_id, "status": run.status.value, "nodes": nodes, "damage": damage}

    async def damage(self, run_id: str) -> list[str]:
        return await self._damage(await self.store.load(run_id, outputs=False))

    async def _damage(self, run: RunState) -> list[str]:
        found = inconsistencies(run)
        if not found and not run.finished and 0 < run.seq <= MAX_AUDITED_EVENTS:
            try:
                found = await self.store.repair(run.id, dry_run=True)
            except BrokenRun as problem:
                found = [str(problem)]
        return found

    async def verify(self, run_id: str) -> list[str]:
        try:
            return await self._verified(run_id)
        except BrokenRun as problem:
            return [str(problem)]

    async def _verified(self, run_id: str) -> list[str]:
        run = await self.store.load(run_id)
        submit = Submit(run_id, run.graph, run.params, run.version, max_bytes=run.max_bytes)
        entries = await self.records.entries(run_id)
        if entries is None:
            return audit(submit, await self._events_of(run), run)
        _, differences = verify(submit, entries)
        return differences or await self.store.repair(run_id, dry_run=True)

    async def _events_of(self, run: RunState) -> list[Event]:
        """Its log up to the moment at which it was loaded."""
        return [event async for event in self._log_up_to(run.id, run.seq)]

    async def _log_up_to(self, run_id: str, last: int) -> AsyncGenerator[Event]:
        if not last:
            return  # the run is not made yet, and a watch would wait for that
        feed = self.store.watch(run_id)
        async with aclosing(cast("AsyncGenerator[Event]", feed)):
            async for event in feed:
                yield event
                if event.seq >= last:
                    break

    # ── runs are moved ───────────────────────────────────────────────────────────────────

    async def cancel(self, run_id: str, *, budget: ReadBudget | None = None) -> RunState:
        """A damaged run ends, too, if only as a run of which nothing else is known."""
        try:
            return await self._move(Cancel(run_id), budget)
        except BrokenRun as problem:
            return await self.store.end_damaged(run_id, str(problem), self.clock())

    async def cancel_run(self, run_id: str) -> dict[str, Any]:
        return run_view(await self.cancel(run_id))

    async def retry_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        return await self._each(run_ids, lambda run_id: self.retry(run_id, budget=ONLY_SIZES))

    async def cancel_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        return await self._each(run_ids, lambda run_id: self.cancel(run_id, budget=ONLY_SIZES))

    async def _each(
        self, run_ids: Sequence[str], move: Callable[[str], Awaitable[RunState]]
    ) -> dict[str, Any]:
        """The outcome of a change of each run, in their order. A run that is named twice is
        changed once, and its outcome is given twice."""
        check_run_ids(run_ids)
        wanted = list(dict.fromkeys(run_ids))
        outcomes: dict[str, dict[str, Any]] = {}
        for at in range(0, len(wanted), RETRY_BATCH_SIZE):
            some = wanted[at : at + RETRY_BATCH_SIZE]
            done = await asyncio.gather(*(self._outcome(one, move) for one in some))
            outcomes.update(zip(some, done, strict=True))
        return {"items": [dict(outcomes[run_id]) for run_id in run_ids]}

    async def _outcome(
        self, run_id: str, move: Callable[[str], Awaitable[RunState]]
    ) -> dict[str, Any]:
        status: str | None = None
        error: dict[str, Any] | None = None
        try:
            status = (await move(run_id)).status.value
        except DovetailError as problem:
            error = {"type": problem.type, "message": str(problem)}
            with suppress(DovetailError):
                status = (await self.records.summary(run_id, 0))["status"]
        return {"run_id": run_id, "ok": error is None, "status": status, "error": error}

    async def repair(self, run_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        found = await self.store.repair(run_id, dry_run=dry_run)
        return {
            "run_id": run_id,
            "differences": found,
            "repaired": bool(found) and not dry_run,
        }

    async def retry(
        self, run_id: str, from_node: str | None = None, *, budget: ReadBudget | None = None
    ) -> RunState:
        """Open a new epoch; the run is driven here if no process drives it."""
        if self.drives and await self.store.owner_of(run_id) in ("none", "gone"):
            await self._check_handlers(run_id)
        run = await self._move(Retry(run_id, from_node), budget)
        if self.drives and await self.store.owner_of(run_id) == "gone":
            await self._take_over([run_id])
            run = await self.store.load(run_id, room=budget)
        return run

    async def retry_run(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        return run_view(await self.retry(run_id, from_node))

    async def _move(self, move: Cancel | Retry, budget: ReadBudget | None) -> RunState:
        epoch = (await self.store.load(move.run_id, outputs=False)).epoch
        for again in range(MAX_TRIES):
            if await self.store.owner_of(move.run_id) == "here":
                (decision,) = await self.orchestrator.apply([move], durable=True)
            else:  # the process that drives it learns of it and sends out the effects
                (decision,) = await self.store.apply([move], self.clock(), durable=True)
            run = await self.store.load(move.run_id, room=budget)
            if (decision or again) and _is_done(move, epoch, run):
                return run
            if not decision:
                raise explain_refusal(run, move)
            # The hot store was emptied in this very moment, or came back without the end of its
            # log: a change that is lost already is not reported as done.
        raise StoreError(f"run '{move.run_id}': the store did not keep what was asked for")

    async def plan_retry(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        run = await self.store.load(run_id, outputs=False)
        plan = retry_plan(run, from_node)
        if isinstance(plan, str):
            raise explain_refusal(run, Retry(run_id, from_node))
        rerun = set(plan)
        names = [spec.id for spec in run.graph.nodes]
        return {
            "rerun": [name for index, name in enumerate(names) if index in rerun],
            "reuse": [name for index, name in enumerate(names) if index not in rerun],
        }

    # ── runs are deleted ─────────────────────────────────────────────────────────────────

    async def delete_run(self, run_id: str) -> None:
        for _ in range(MAX_TRIES):
            if await self.store.delete([run_id]):
                return
            view = await self.records.summary(run_id, 0)
            if view["finished_at"] is None:
                goes_on = " and some of its nodes still run" if view["status"] in FINAL else ""
                raise Conflict(
                    f"run {run_id} is {view['status']}{goes_on}: only a finished run can be "
                    "deleted; cancel it, or wait for its end"
                )
        raise StoreError(f"run '{run_id}' changes while it is deleted; try again")

    async def delete_runs(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        return await self.store.delete(run_ids, ended_before=ended_before)

    async def reclaim_space(self) -> None:
        await self.store.reclaim_space()

    # ── ownership of runs ────────────────────────────────────────────────────────────────

    async def owner(self, run_id: str) -> Owner:
        return await self.store.owner_of(run_id)

    async def orphans(self) -> list[str]:
        return await self.store.orphans()

    async def served_handlers(self) -> Container[str] | None:
        return None if self.serving is None else await self.serving()

    async def resume(self, run_id: str | None = None) -> list[str]:
        if not self.drives:
            raise Conflict(self.why_not_here)
        if run_id is None:
            orphans = await self.store.orphans()
            able = [one for one in orphans if await self._can_be_driven(one)]
            return await self._take_over(able)
        match await self.store.owner_of(run_id):
            case "here":
                return [run_id]
            case "none":
                run = await self.store.load(run_id, outputs=False)
                raise Conflict(f"run {run_id} is {run.status}: there is nothing to resume")
            case "elsewhere":
                raise Conflict(f"run {run_id} is driven by another process, which is alive")
        await self._check_handlers(run_id)
        taken = await self._take_over([run_id])
        if not taken:  # another process was first, or it cannot be read: then this raises
            await self.store.load(run_id, outputs=False)
        return taken

    async def _can_be_driven(self, run_id: str) -> bool:
        try:
            return not await self._unknown_handlers(run_id)
        except BrokenRun:
            return (
                True  # the process that takes it over finds that it cannot be read, and leaves it
            )

    async def _check_handlers(self, run_id: str) -> None:
        if unknown := await self._unknown_handlers(run_id):
            names = ", ".join(f"'{name}'" for name in unknown)
            raise Conflict(
                f"run {run_id} needs handlers that are not known here: {names}; "
                "load them with --handlers"
            )

    async def _take_over(self, run_ids: Sequence[str]) -> list[str]:
        adopted = await self.store.adopt(run_ids, self.clock(), self.max_crashes)
        await self.orchestrator.dispatch_effects(adopted.values())
        return list(adopted)

    async def _unknown_handlers(self, run_id: str) -> list[str]:
        if self.known_handlers is None:
            return []
        used = dict.fromkeys(spec.handler for spec in (await self.store.graph(run_id)).nodes)
        return [name for name in used if name not in self.known_handlers]

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def batch(
        self,
        workflow: Given,
        items: Sequence[Mapping[str, Any]],
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        request = KeyedRequest("batch", _name(workflow), version, list(items), idempotency_key)
        run_ids = [new_id() for _ in items]
        try:
            # By their ids: an idempotency key is the batch's, and its runs are divided too.
            compiled = await self._compile_each(workflow, version, run_ids or [None])
            given, warnings = check_items([one.params for one in compiled][: len(items)], items)
        except (InvalidDefinition, NotFound) as refusal:
            known_batch = await self._made_before(request, workflow, refusal)
            return {"batch_id": known_batch, "count": len(items), "created": False}
        submits = [
            Submit(run_id, one.graph, params, one.version)
            for run_id, one, params in zip(run_ids, compiled, given, strict=True)
        ]
        key = request.key(compiled[0].sha256)
        batch_id = new_id()
        try:
            decisions: Sequence[Any] | None = await self.store.create_batch(
                batch_id, submits, key, self.clock()
            )
        except KeyUsed as known:
            batch_id, decisions = request.answer(known), None
        if decisions is not None:
            await self.orchestrator.dispatch_effects(decisions)
        made = {"batch_id": batch_id, "count": len(items), "created": decisions is not None}
        return with_warnings(made, warnings)

    async def open_batch(
        self, workflow: Given, count: int, *, idempotency_key: str, items: str = ""
    ) -> dict[str, Any]:
        compiled = await self._compile(workflow, None)
        request = KeyedRequest("batch", _name(workflow), None, [count, items], idempotency_key)
        key = request.key(compiled.sha256)
        batch_id = new_id()
        name = compiled.graph.name
        try:
            await self.records.open_batch(batch_id, name, count, key, self.clock())
        except KeyUsed as known:
            return {"batch_id": request.answer(known), "count": count, "created": False}
        return {"batch_id": batch_id, "count": count, "created": True}

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        return await self.records.get_batch(batch_id, limit=limit, cursor=cursor, counts=counts)

    async def find_batch(self, prefix: str) -> str:
        return await self.records.find_batch(prefix)

    async def list_batches(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        limit = min(limit, MAX_BATCHES_PER_PAGE)
        batch_ids, more = await self.records.batch_ids(limit=limit, cursor=cursor)
        found = await asyncio.gather(*map(self._listed_batch, batch_ids))
        return {"items": [batch for batch in found if batch is not None], "next_cursor": more}

    async def _listed_batch(self, batch_id: str) -> dict[str, Any] | None:
        try:
            batch = await self.get_batch(batch_id, limit=1)
        except NotFound:  # it went in this very moment
            return None
        del batch["runs"], batch["next_cursor"]
        return batch

    async def wait_batch(self, batch_id: str) -> dict[str, Any]:
        # Some from all over it: when these have ended, most have. To wait for each would be to
        # read them all, so that comes last.
        count = (await self.get_batch(batch_id, limit=1, counts=False))["count"]
        await asyncio.gather(*map(self.ended, await self._some_of(batch_id, count)))
        pauses = iter(BATCH_POLL_SECONDS)
        while True:
            batch = await self.get_batch(batch_id)
            if batch["finished_at"] is not None:
                return batch
            runs = [run_id async for run_id, s in self._runs_of(batch_id) if s not in FINAL]
            if going_on := runs[:: -max(1, len(runs) // BATCH_WAIT_SIZE)]:
                await asyncio.gather(*map(self.ended, going_on))
            else:
                await asyncio.sleep(next(pauses, BATCH_POLL_SECONDS[-1]))

    async def retry_batch(self, batch_id: str) -> dict[str, Any]:
        wanted = [run_id async for run_id, status in self._runs_of(batch_id) if status in _AGAIN]
        for at in range(0, len(wanted), RETRY_BATCH_SIZE):
            await asyncio.gather(*map(self._retry_one, wanted[at : at + RETRY_BATCH_SIZE]))
        return await self.get_batch(batch_id)

    async def _retry_one(self, run_id: str) -> None:
        try:
            await self.retry(run_id)
        except Conflict:
            if (await self.store.load(run_id, outputs=False)).status in _AGAIN:
                raise  # and not because another process was faster

    async def _some_of(self, batch_id: str, count: int) -> list[str]:
        """The last run of a batch and others at even distances that have not finished."""
        places = range(count - 1, -1, -max(1, count // BATCH_WAIT_SIZE))
        pages = await asyncio.gather(
            *(self.get_batch(batch_id, limit=1, cursor=str(at), counts=False) for at in places)
        )
        return [
            run["run_id"] for page in pages for run in page["runs"] if run["status"] not in FINAL
        ]

    async def _runs_of(self, batch_id: str) -> Any:
        cursor = None
        while True:
            page = await self.get_batch(batch_id, limit=1000, cursor=cursor, counts=False)
            for run in page["runs"]:
                yield run["run_id"], run["status"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    # ── rate limits ──────────────────────────────────────────────────────────────────────

    async def rate_limits(self) -> dict[str, Any]:
        return {
            "items": [
                {"tag": tag, "rate_per_second": rate, "burst": burst}
                for tag, (rate, burst) in sorted((await self.rates.all()).items())
            ]
        }

    async def rate_limit(self, tag: str) -> dict[str, Any]:
        rate, burst = (await self.rates.all()).get(tag, (DEFAULT_RATE, DEFAULT_BURST))
        return {"tag": tag, "rate_per_second": rate, "burst": burst}

    async def rate_limit_history(
        self, tag: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        return await self.records.history("limit", tag, limit=limit, cursor=cursor)

    async def set_rate_limit(
        self, tag: str, rate_per_second: float, burst: int, *, actor: str | None = None
    ) -> dict[str, Any]:
        """Set it for every process that shares the store."""
        if not 1 <= len(tag) <= MAX_LABEL_CHARS:
            message = f"a tag has 1 to {MAX_LABEL_CHARS} characters, not {len(tag):,}"
            raise InvalidParams([Problem("invalid_field", message, "tag")])
        if wrong := [Problem("invalid_field", one.message, "tag") for one in faults(tag)]:
            raise InvalidParams(wrong)
        problems = []
        if not SLOWEST <= rate_per_second <= FASTEST:
            message = f"must be from {SLOWEST:g} to {FASTEST:g}, not {rate_per_second:g}"
            problems.append(Problem("invalid_field", message, "rate_per_second"))
        if not 1 <= burst <= LARGEST_BURST:
            message = f"must be from 1 to {LARGEST_BURST:,}, not {burst:,}"
            problems.append(Problem("invalid_field", message, "burst"))
        if problems:
            raise InvalidParams(problems)
        await self.rates.set(tag, rate_per_second, burst, self._by(actor))
        return await self.rate_limit(tag)

    # ── queues and dead letters ──────────────────────────────────────────────────────────

    async def queues(self) -> dict[str, Any]:
        return await read_queues(self, self.inspector)

    async def dead_letters(self) -> dict[str, Any]:
        return {"items": [] if self.letters is None else await self.letters.dead_letters()}

    async def drop_dead_letter(self, letter_id: str) -> None:
        if self.letters is None or not await self.letters.drop_dead_letter(letter_id):
            raise _no_letter(letter_id)

    async def requeue_dead_letter(self, letter_id: str) -> dict[str, Any]:
        letters = (await self.dead_letters())["items"]
        letter = next((one for one in letters if one["letter_id"] == letter_id), None)
        if letter is None:
            raise _no_letter(letter_id)
        if letter["stream"] == WEBHOOKS:
            return await self._requeue_notification(letter_id)
        run_id = letter["fields"].get("run_id")
        if not run_id:
            # A message is stored redacted and escaped, so it cannot be sent again as it was.
            raise Conflict("this letter names no run, so there is nothing to start again; drop it")
        try:
            run = await self.retry(run_id, budget=ONLY_SIZES)
        except NotFound:
            message = "the run that this letter names is not there any more; drop it"
            raise Conflict(message) from None
        with suppress(NotFound):  # dropped meanwhile
            await self.drop_dead_letter(letter_id)
        return {"letter_id": letter_id, "run_id": run.id, "status": run.status.value}

    async def _requeue_notification(self, letter_id: str) -> dict[str, Any]:
        assert self.letters is not None  # noqa: S101  (the letter came from there)
        sent = await self.letters.requeue_notification(letter_id, self.clock())
        if sent is None:
            raise Conflict(
                "this letter is a notification that an older version gave up, without what was "
                "to be sent; drop it"
            )
        status = RUN_ENDS[sent.type].value
        return {"letter_id": letter_id, "run_id": sent.run_id, "status": status}


def _no_letter(letter_id: str) -> NotFound:
    return NotFound(f"there is no dead letter '{one_line(letter_id)}'; it may be dropped already")


def _index_of(run: RunState, node: str) -> int:
    """Raises `NotFound` for a node that the run does not have."""
    index = run.graph.index.get(node)
    if index is None:
        owner, item = split_name(node)
        if item is not None and owner in run.graph.index:
            raise NotFound(_no_node_but_item(run, owner, item))
        near = get_close_matches(node, run.graph.index, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise NotFound(f"run {run.id} has no node {shown(node)}{hint}")
    return index


def _no_node_but_item(run: RunState, node: str, item: int) -> str:
    """What to ask for instead, where an item is named and a node is needed."""
    name = item_name(node, item)
    if run.graph.nodes[run.graph.index[node]].for_each is None:
        return f"run {run.id} has no node '{name}': node '{node}' has no for_each, so no items"
    items = run.nodes[run.graph.index[node]].items
    if items is None:
        return f"run {run.id} has no item {item} of node '{node}': its list is not known"
    if item >= items.total:
        many = counted(items.total, "item")
        return f"run {run.id} has no item {item} of node '{node}': it has {many}, counted from 0"
    return (
        f"run {run.id} has no node '{name}': it is item {item} of node '{node}'. The items are at "
        f"/api/v1/runs/{run.id}/nodes/{node}/items, their outputs at "
        f"/api/v1/runs/{run.id}/nodes/{name}/output; a log takes `node={node}` and `item={item}`"
    )


def check_run_ids(run_ids: Sequence[str]) -> None:
    """Raises `InvalidParams` for more runs than one call may change."""
    if len(run_ids) > MAX_MOVED_RUNS:
        message = f"{counted(len(run_ids), 'run')}; a call changes at most {MAX_MOVED_RUNS:,}"
        raise InvalidParams([Problem("too_large", message, "run_ids")])


def check_level(level: str | None) -> None:
    """Raises `InvalidParams` for a level that does not exist."""
    if level is not None and level.upper() not in LEVELS:
        near = get_close_matches(level.upper(), LEVELS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        message = f"{shown(level)} is no level; one of {', '.join(LEVELS)}{hint}"
        raise InvalidParams([Problem("invalid_field", message, "level")])


def check_alias(alias: str) -> None:
    """Raises `InvalidParams` for a name that no alias may have."""
    if wrong := _wrong_with_alias(alias):
        message = f"'{alias[:40]}' cannot be an alias: {wrong}"
        raise InvalidParams([Problem("invalid_field", message, "alias")])


def _wrong_with_alias(alias: str) -> str | None:
    if not _ALIAS.fullmatch(alias):
        return "use letters, digits, '.', '_' and '-', a letter or digit first"
    if alias.isdigit():
        return "digits alone are a version's number"
    if len(alias) > _MAX_ALIAS_LENGTH:
        return f"it has {len(alias):,} characters, and {_MAX_ALIAS_LENGTH} are allowed"
    return None


def _name(given: Given) -> str | None:
    return given if isinstance(given, str) else None


def _is_done(move: Cancel | Retry, epoch: int, run: RunState) -> bool:
    """Whether the run, which was in that epoch, shows the change; it may have gone on since."""
    return run.epoch > epoch or (isinstance(move, Cancel) and run.finished)


def new_id() -> str:
    """Random from the first digit on, so that six of them identify a run at a prompt."""
    return os.urandom(16).hex()
