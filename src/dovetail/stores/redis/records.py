"""Records in Redis without PostgreSQL: workflows, lists of runs, batches, idempotency keys, limits.

Views have the fields of the HTTP API. No script or command touches keys of two slots. No key of a
live run expires: `expire` deletes runs that ended long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import orjson

from dovetail.core.aliases import AliasTarget, decode_weights, encode_weights, versions_named
from dovetail.core.dag import Graph
from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.events import RUN_ENDS, Event
from dovetail.core.node_logs import StoredChunk
from dovetail.core.outputs import OutputReference
from dovetail.core.transitions import Submit
from dovetail.engine.distributed.triggers import PendingRun
from dovetail.engine.ports import (
    ALL_RUNS,
    MAX_LOG_PAGE_BYTES,
    Author,
    DoctorFinding,
    HistoryOf,
    Key,
    KeyUsed,
    Registered,
    RunQuery,
    RunTally,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.views import damage_error, event_view, summary_view
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.records import (
    LATEST,
    PAGE_BYTES,
    BaseRecords,
    Definitions,
    WorkflowHead,
    batch_end,
    batch_view,
    changed,
    check_seen,
    history_page,
    list_position,
    no_alias,
    no_batch,
    no_run,
    no_workflow,
    page_size,
    refuse_named,
    run_status,
    target_view,
    version_item,
    with_lost_lines,
    workflow_item,
)
from dovetail.stores.redis.accepted import RedisAcceptedRuns
from dovetail.stores.redis.codec import all_keys_of, event_of, keys_of, run_error, source
from dovetail.stores.redis.definitions import definition, definition_key, stored_graph
from dovetail.stores.redis.feed import trim_feed
from dovetail.stores.redis.items import MapCounts
from dovetail.stores.redis.limits import RedisLimits, change_row, encode_author, open_json
from dovetail.stores.redis.logs import LogReading, RedisLogs
from dovetail.stores.redis.run_index import (
    NOT_RUNNING,
    OPEN,
    ORIGIN_FIELDS,
    RUNNING,
    RUNS,
    STATUSES,
    WORKFLOWS,
    RunFacts,
    RunIndex,
    RunOrigin,
    batch_key,
    batch_number,
    is_text,
    origin,
    run_id_of,
    workflow_key,
)
from dovetail.stores.redis.scope import RedisOutputs

MAX_CHECKED = 1000
MAX_SEQ = 1 << 53
"""Numbers beyond it are not exact in a script."""
DELETE_SIZE = 50
"""Runs that are deleted side by side."""
DROPPED_NOW = 1
"""What `records_drop` says of a run that nothing had dropped before."""
LATEST_TIME = 1e300
"""Redis reads no infinity."""
RETENTION_SECONDS = 7 * 86400.0
HISTORY = "history"

_SUMMARY = (
    *("status", "epoch", "workflow", "version", "params"),
    *("created_at", "finished_at", "error", "definition", "retries"),
)


class RedisRecords(BaseRecords):
    every_move = False
    outlives = False
    """What is accepted here is lost with this Redis, as are the runs."""

    def __init__(
        self,
        redis: PipelinedRedis,
        *,
        limits: RedisLimits | None = None,
        retention_seconds: float = RETENTION_SECONDS,
        examine: Callable[[], Awaitable[list[DoctorFinding]]] | None = None,
        origin: Callable[[str], RunOrigin | None] | None = None,
    ) -> None:
        """`examine` is what a doctor finds of this Redis; `origin` says of a run where it is
        listed, if its store knows that without asking."""
        self._redis = redis
        self._outputs = RedisOutputs(redis)
        self._logs = RedisLogs(redis)
        self._limits = limits or RedisLimits(redis)
        self._retention_seconds = retention_seconds
        self._examine = examine
        self._origin_of = origin or _unknown_origin
        self._definitions = Definitions()
        self._lists = RunIndex(redis)
        self._acceptance = RedisAcceptedRuns(redis, self._definitions)

    @property
    def _where(self) -> object:
        return "Redis"

    # ── registered workflows ─────────────────────────────────────────────────────────────

    async def register(
        self, name: str, sha256: str, content: bytes, by: Author, seen: Seen | None = None
    ) -> WorkflowVersion:
        await self._redis.call("SET", definition_key(sha256), content, "NX")
        await self._redis.call("ZADD", WORKFLOWS, 0, name)  # first: what is there must be seen
        key = workflow_key(name)
        version, created = await self._redis.call_script(
            source("records_seen", "records_remember", "records_register"),
            [key, f"{key}:versions", f"{key}:aliases", f"{key}:{HISTORY}"],
            [sha256, repr(by.time), _as_seen(seen), encode_author(by)],
        )
        if not version:
            raise changed(name)
        return WorkflowVersion(name, version, created=bool(created))

    async def _read_version(self, name: str, version: int) -> Registered | None:
        kept = await self._redis.call("HGET", f"{workflow_key(name)}:versions", version)
        if kept is None:
            return None
        sha256, created_at = kept.decode().split(" ")
        content = await definition(self._redis, sha256)
        if content is None:
            raise NotFound(f"the definition of workflow '{name}' is not in Redis any more")
        return Registered(name, version, int(sha256, 16), content, float(created_at))

    async def _latest(self, name: str) -> int:
        latest, deleted = None, None
        if is_text(name):
            latest, deleted = await self._redis.call(
                "HMGET", workflow_key(name), "latest", "deleted"
            )
        if latest is None or deleted == b"1":
            raise no_workflow(name, "Redis")
        return int(latest)

    async def _head(self, name: str, version: int | None = None) -> WorkflowHead:
        if not is_text(name):
            raise no_workflow(name, "Redis")
        key = workflow_key(name)
        commands: list[Command] = [
            ("HMGET", key, "latest", "deleted"),
            ("HGETALL", f"{key}:aliases"),
            ("HEXISTS", f"{key}:versions", "" if version is None else version),
        ]
        (latest, deleted), flat, has_version = await self._redis.call_many(commands)
        if latest is None or deleted == b"1":
            raise no_workflow(name, "Redis")
        kept = sorted((flat[at].decode(), _target(flat[at + 1])) for at in range(0, len(flat), 2))
        return WorkflowHead(int(latest), {**dict(kept), LATEST: int(latest)}, bool(has_version))

    async def workflows(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        limit = page_size(limit)
        items: list[dict[str, Any]] = []
        after = f"({cursor}" if cursor else "-"
        while len(items) <= limit:
            wanted = limit + 1 - len(items)
            names = await self._redis.call("ZRANGEBYLEX", WORKFLOWS, after, "+", "LIMIT", 0, wanted)
            found = await asyncio.gather(*(self._listed(name.decode()) for name in names))
            items += [item for item in found if item is not None]
            if len(names) < wanted:
                break
            after = f"({names[-1].decode()}"
        more = items[limit - 1]["name"] if len(items) > limit else None
        return {"items": items[:limit], "next_cursor": more}

    async def _listed(self, name: str) -> dict[str, Any] | None:
        try:
            head, (created_at, updated_at) = await asyncio.gather(
                self._head(name),
                self._redis.call("HMGET", workflow_key(name), "created_at", "updated_at"),
            )
        except NotFound:
            return None
        times = float(created_at), float(updated_at)
        return workflow_item(name, head.latest, head.aliases, *times)

    async def versions(self, name: str) -> dict[str, Any]:
        await self._latest(name)
        flat = await self._redis.call("HGETALL", f"{workflow_key(name)}:versions")
        items = []
        for version, kept in sorted((int(flat[at]), flat[at + 1]) for at in range(0, len(flat), 2)):
            sha256, created_at = kept.decode().split(" ")
            items.append(version_item(version, sha256, float(created_at)))
        return {"items": items}

    async def _delete_workflow(self, name: str, by: Author, seen: Seen | None) -> int:
        active = await self._delete(name, by, seen)
        if active:  # as the list has it, which may be behind
            key = f"{workflow_key(name)}:{OPEN}"
            listed = await self._redis.call("ZRANGE", key, 0, MAX_CHECKED - 1)
            await self._lists.refresh(map(run_id_of, listed))
            active = await self._delete(name, by, seen)
        return active

    async def _delete(self, name: str, by: Author, seen: Seen | None) -> int:
        key = workflow_key(name)
        keys = [key, *(f"{key}:{part}" for part in ("versions", "aliases", OPEN, HISTORY))]
        script = source("records_seen", "records_remember", "records_delete")
        given = [_as_seen(seen), encode_author(by)]
        active = int(await self._redis.call_script(script, keys, given))
        if active < 0:
            raise changed(name)
        return active

    async def _delete_version(self, name: str, version: int, by: Author, seen: Seen | None) -> int:
        """A run that is triggered in the same moment keeps its definition, and goes on."""
        key = workflow_key(name)
        keys = [f"{key}:versions", f"{key}:aliases", key, f"{key}:{HISTORY}"]
        script = source("records_seen", "records_remember", "records_delete_version")
        while True:
            head = await self._head(name, version)
            check_seen(name, seen, head.aliases)
            refuse_named(name, version, head.aliases)
            if active := await self._active_of(name, version):
                return active
            given: list[Argument] = [version, _as_seen(head.aliases), encode_author(by)]
            done = await self._redis.call_script(script, keys, given)
            if done > 0:
                return 0
            if not done:
                raise await self._no_version(name, version)

    async def _active_of(self, name: str, version: int) -> int:
        """How many runs of a version are not finished."""
        key, active, first = f"{workflow_key(name)}:{OPEN}", 0, 0
        while listed := await self._redis.call("ZRANGE", key, first, first + MAX_CHECKED - 1):
            metas = [keys_of(run_id_of(one))[0] for one in listed]
            found = await self._redis.call_many(
                [("HMGET", meta, "version", "status", "finished_at") for meta in metas]
            )
            active += sum(
                bool(status) and not finished_at and number == b"%d" % version
                for number, status, finished_at in found
            )
            first += len(listed)
        return active

    async def _set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None
    ) -> int | None:
        key = workflow_key(name)
        details = open_json({"alias": alias, **target_view(target)}) + '"from":'
        keys = [f"{key}:versions", f"{key}:aliases", key, f"{key}:{HISTORY}"]
        given: list[Argument] = [alias, _encoded(target), _as_seen(seen)]
        versions = versions_named(target)
        given += [encode_author(by), details, *versions]
        script = source("records_seen", "records_remember", "records_alias")
        missing = await self._redis.call_script(script, keys, given)
        if missing < 0:
            raise changed(name)
        return versions[missing - 1] if missing else None

    async def _delete_alias(self, name: str, alias: str, by: Author, seen: Seen | None) -> None:
        key = workflow_key(name)
        done = await self._redis.call_script(
            source("records_seen", "records_remember", "records_unalias"),
            [f"{key}:aliases", key, f"{key}:{HISTORY}"],
            [alias, _as_seen(seen), encode_author(by)],
        )
        if done < 0:
            raise changed(name)
        if not done:
            raise no_alias(name, alias, (await self._head(name)).aliases)

    async def _was_registered(self, name: str) -> bool:
        return is_text(name) and bool(await self._redis.call("EXISTS", workflow_key(name)))

    async def _history(
        self, of: HistoryOf, name: str, limit: int, cursor: str | None
    ) -> dict[str, Any]:
        if of == "limit":
            return await self._limits.history(name, limit, cursor)
        key = f"{workflow_key(name)}:{HISTORY}"
        before = list_position(cursor, await self._redis.call("LLEN", key))
        first = max(0, before - limit - 1)
        kept = [] if before < 1 else await self._redis.call("LRANGE", key, first, before - 1)
        rows = [change_row(number, one) for number, one in enumerate(kept, first)]
        return history_page(rows[::-1], limit)

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def refresh(self, run_ids: Iterable[str]) -> None:
        """List these runs as they are now: they were made, or their status is another.

        To be called while such a run is still active: if the caller dies, the run is found there.
        """
        await self._lists.refresh(run_ids)

    async def moved(
        self,
        run_ids: Sequence[str],
        turned: Sequence[str],
        ended: Mapping[str, Event | None] | None = None,
    ) -> None:
        """As `RunObserver`."""
        unclear = list(turned)
        known: dict[str, RunFacts] = {}
        for run_id, event in (ended or {}).items():
            where = self._origin_of(run_id)
            if event and where and event.epoch == 1 and event.type in RUN_ENDS:
                known[run_id] = RunFacts(RUN_ENDS[event.type].value, event.time, 1, where)
            else:
                unclear.append(run_id)
        await self._lists.refresh(unclear)
        await self._lists.ended(known)

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        await self._lists.begun(submits, created_at)

    async def _runs_beginning_with(self, prefix: str) -> list[str]:
        return await self._lists.beginning_with(prefix, 5) if is_text(prefix) else []

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        most = query.max_result_bytes
        where = RUNS if query.workflow is None else workflow_key(query.workflow)
        if query.batch is not None:
            of, _, _ = await self._batch(query.batch)
            if query.workflow not in (None, of):
                return {"items": [], "next_cursor": None}
            where = batch_key(query.batch)
        if not is_text(where):
            return {"items": [], "next_cursor": None}
        heaviest = None if most is None else PAGE_BYTES
        show = partial(self._summary, most=most)
        limit = page_size(query.limit)
        return await self._lists.page(where, query.status, limit, query.cursor, show, heaviest)

    async def count_runs(self, workflow: str | None, edges: Sequence[float]) -> RunTally:
        where = RUNS if workflow is None else workflow_key(workflow)
        if not is_text(where):
            return RunTally({}, [{} for _ in edges[1:]])
        return await self._lists.counts(where, edges)

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        view = await self._summary(run_id, most) if is_text(run_id) else None
        if view is None:
            raise no_run(run_id, "Redis")
        return view

    async def _summary(self, run_id: str, most: int | None = None) -> dict[str, Any] | None:
        """What of a damaged run cannot be read is left out: it must not hide all others."""
        try:
            return await self._whole_summary(run_id, most)
        except (AttributeError, BrokenRun, LookupError, TypeError, ValueError) as problem:
            (reply,) = await self._redis.send([("HMGET", keys_of(run_id)[0], *_SUMMARY)])
            kept = dict(zip(_SUMMARY, reply if isinstance(reply, list) else (), strict=False))
            return _damaged_summary(run_id, kept, problem)

    async def _whole_summary(self, run_id: str, most: int | None) -> dict[str, Any] | None:
        meta = keys_of(run_id)[0]
        kept = dict(zip(_SUMMARY, await self._redis.call("HMGET", meta, *_SUMMARY), strict=True))
        if kept["status"] is None:
            return None
        created_at = float(kept["created_at"])
        error, result = None, None
        if kept["error"] or kept["finished_at"]:
            graph = await self._graph(kept["definition"], kept["retries"])
            if kept["error"]:
                error = run_error(orjson.loads(kept["error"]), graph)
            if kept["finished_at"]:
                result = await self._result(run_id, graph, most)
        return summary_view(
            run_id=run_id,
            workflow=kept["workflow"].decode(),
            version=int(kept["version"]) if kept["version"] else None,
            status=kept["status"].decode(),
            epoch=int(kept["epoch"]),
            params=orjson.loads(kept["params"]),
            created_at=created_at,
            started_at=created_at,
            finished_at=float(kept["finished_at"]) if kept["finished_at"] else None,
            error=error,
            result=result,
        )

    async def _result(self, run_id: str, graph: Graph, most: int | None) -> Any:
        """As `views.result` says it, from the outputs that it needs and no others."""
        single = graph.output_node is not None
        indexes = [graph.output_node] if graph.output_node is not None else list(graph.exits)
        out = keys_of(run_id)[3]
        if most is None:
            kept = await self._redis.call("HMGET", out, *indexes)
        else:
            # Items first: a list of them may be larger than memory.
            lists = await self._sizes_of_lists(run_id, graph, indexes)
            room = most - sum(lists.values())
            small = room >= 0 and (await self._outputs.first({run_id: indexes}, room))[run_id]
            kept = small.outputs if small else []
            if len(kept) < len(indexes):
                sizes = await self._redis.call_many([("HSTRLEN", out, index) for index in indexes])
                size = sum(
                    lists.get(at) or size or len("null")
                    for at, size in zip(indexes, sizes, strict=True)
                )
                names = 0 if single else sum(len(graph.nodes[at].id) + 4 for at in indexes) + 1
                return OutputReference(size + names, None)
        for at, index in enumerate(indexes):
            if kept[at] is None and graph.nodes[index].for_each is not None:
                kept[at] = await self._list_of(run_id, index)
        found = [None if value is None else orjson.loads(value) for value in kept]
        if single:
            return found[0]
        return {graph.nodes[at].id: value for at, value in zip(indexes, found, strict=True)}

    async def _sizes_of_lists(
        self, run_id: str, graph: Graph, indexes: Sequence[int]
    ) -> dict[int, int]:
        """How many bytes the outputs of these mapped nodes have, of those that are completed."""
        mapped = [index for index in indexes if graph.nodes[index].for_each is not None]
        if not mapped:
            return {}
        nodes, maps = keys_of(run_id)[1], keys_of(run_id)[7]
        asked: list[Command] = [("HMGET", nodes, *mapped), ("HMGET", maps, *mapped)]
        states, texts = await self._redis.call_many(asked)
        counts = {
            index: MapCounts.parse(text)
            for index, state, text in zip(mapped, states, texts, strict=True)
            if text is not None and state is not None and state.startswith(b"C")
        }
        # What a fork reused is kept as one output, like that of any other node.
        return {index: one.output_size for index, one in counts.items() if not one.is_reused}

    async def _list_of(self, run_id: str, index: int) -> bytes | None:
        """The output of a mapped node, if it is completed."""
        state = await self._redis.call("HGET", keys_of(run_id)[1], index)
        if state is None or not state.startswith(b"C"):
            return None
        return await self._outputs.mapped_output(run_id, index)

    async def _graph(self, digest: bytes, retries: bytes) -> Graph:
        graph = await stored_graph(self._redis, self._definitions, digest.decode(), retries)
        if graph is None:
            raise NotFound(f"the definition {digest.decode()} is not in Redis any more")
        return graph

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        if not is_text(run_id):
            raise no_run(run_id, "Redis")
        meta, log = keys_of(run_id)[0], keys_of(run_id)[5]
        status, digest, retries = await self._redis.call(
            "HMGET", meta, "status", "definition", "retries"
        )
        if status is None:
            raise no_run(run_id, "Redis")
        graph = await self._graph(digest, retries)
        last = -1 if limit is None else after + limit - 1
        texts = await self._redis.call("LRANGE", log, after, last)
        return [event_view(event_of(text, seq, graph)) for seq, text in enumerate(texts, after + 1)]

    async def logs(
        self,
        run_id: str,
        after: int = 0,
        *,
        node: str | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        item: int | None = None,
        max_bytes: int = MAX_LOG_PAGE_BYTES,
    ) -> list[StoredChunk]:
        given = {"node": node, "epoch": epoch, "attempt": attempt, "item": item}
        _, lost, chunks = await self.log_reading(run_id, after, max_bytes, **given)
        return with_lost_lines(chunks, run_id, after, lost)

    async def log_reading(
        self, run_id: str, after: int, max_bytes: int, **given: Any
    ) -> LogReading:
        """The same, and where Redis has everything. Raises `NotFound`."""
        found = None
        if is_text(run_id) and is_text(given["node"] or ""):
            after = min(after, MAX_SEQ)
            found = await self._logs.read(run_id, after, max_bytes, **given)
        if found is None:
            raise no_run(run_id, "Redis")
        return found

    # ── what is asked for, and made afterwards ───────────────────────────────────────────

    async def accept(self, submit: Submit, now: float) -> Submit:
        """See `RedisAcceptedRuns.accept`. The caller makes the run that it returns."""
        return await self._acceptance.accept(submit, now)

    async def made(self, submit: Submit) -> None:
        """What was accepted is there."""
        await self._acceptance.made(submit)

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Submit]:
        return await self._acceptance.accept_batch(batch_id, submits, key, now)

    async def batch_made(self, batch_id: str) -> None:
        await self._acceptance.batch_made(batch_id)

    async def unmade(self, accepted_before: float) -> list[PendingRun]:
        """What was accepted before that time and whose maker died; see `settle`."""
        return await self._acceptance.unmade(accepted_before)

    async def known(self, key: Key) -> KeyUsed | None:
        return await self._acceptance.known(key)

    async def unmade_under(self, key: Key, made: str) -> PendingRun | None:
        return await self._acceptance.unmade_under(key, made)

    async def settle(self, unmade: PendingRun) -> None:
        """All runs of an accepted request are created now: list them, and delete the request."""
        await self.refresh(unmade.there)
        await self._acceptance.settle(str(unmade.name))

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def _batch(self, batch_id: str) -> tuple[str, int, float]:
        workflow, count, created_at = None, b"", b""
        if is_text(batch_id):
            workflow, count, created_at = await self._redis.call(
                "HMGET", batch_key(batch_id), "workflow", "count", "created_at"
            )
        if workflow is None:
            raise no_batch(batch_id, "Redis")
        return workflow.decode(), int(count), float(created_at)

    async def _deleted_of(self, batch_id: str) -> tuple[int, float]:
        """How many runs of a batch were deleted, and when the last of these had ended."""
        deleted, ended = await self._redis.call(
            "HMGET", batch_key(batch_id), "deleted", "deleted_end"
        )
        return int(deleted or 0), float(ended or 0)

    async def open_batch(
        self, batch_id: str, workflow: str, count: int, key: Key | None, now: float
    ) -> None:
        """Make a batch whose runs come later. Raises `KeyUsed`."""
        await self._acceptance.open_batch(batch_id, workflow, count, key, now)

    async def _batches_beginning_with(self, prefix: str) -> list[str]:
        return await self._lists.batches_beginning_with(prefix, 5) if is_text(prefix) else []

    async def batch_ids(
        self, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        return await self._lists.batches(page_size(limit), cursor)

    async def batch_number(self, batch_id: str) -> int:
        await self._batch(batch_id)
        return batch_number(batch_id)

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        limit = page_size(limit)
        workflow, count, created_at = await self._batch(batch_id)
        first = list_position(cursor, 0)
        by_status: dict[str, int] = {}
        ended = None
        if counts:
            where = batch_key(batch_id)
            # In this order: a batch that is finished has no run that is counted as running.
            counting = (self._lists.count(where, s) for s in ("finished", *NOT_RUNNING, "all"))
            (finished, *numbers, there), last, deleted = await asyncio.gather(
                asyncio.gather(*counting), self._lists.last_end(where), self._deleted_of(batch_id)
            )
            turned = dict(zip(NOT_RUNNING, numbers, strict=True))
            every = {RUNNING: there - sum(numbers), **turned}
            by_status = {s: every[s] for s in STATUSES if every[s] > 0}
            ended = batch_end(count, by_status, finished, last or 0.0, *deleted)
        runs = await self._runs_of(batch_id, first, count, limit + 1)
        return batch_view(
            (batch_id, workflow, count, created_at),
            by_status,
            ended,
            runs,
            limit,
        )

    async def _runs_of(
        self, batch_id: str, first: int, count: int, limit: int
    ) -> list[tuple[int, str, str]]:
        """The runs that exist, in order: others may be created later."""
        runs: list[tuple[int, str, str]] = []
        while first < count and len(runs) < limit:
            places = range(first, min(count, first + limit))
            kept = await self._redis.call("HMGET", f"{batch_key(batch_id)}:places", *places)
            taken = [(at, r.decode()) for at, r in zip(places, kept, strict=True) if r is not None]
            statuses = await self._redis.call_many(
                [("HGET", keys_of(run_id)[0], "status") for _, run_id in taken]
            )
            runs += [
                (at, run_id, status.decode())
                for (at, run_id), status in zip(taken, statuses, strict=True)
                if status is not None
            ]
            first = places.stop
        return runs[:limit]

    # ── limits ───────────────────────────────────────────────────────────────────────────

    async def limits(self) -> dict[str, tuple[float, int]]:
        return await self._limits.all()

    async def set_limit(self, tag: str, rate: float, burst: int, by: Author) -> None:
        await self._limits.set(tag, rate, burst, by)

    # ── the end ──────────────────────────────────────────────────────────────────────────

    async def expire(self, now: float, limit: int = 100) -> int:
        """Forget runs that ended long ago, with their keys, and old events of the feed; how many
        runs were looked at.

        The runs of a batch go when the last of them ended long ago, and the batch with them.
        """
        long_ago = now - self._retention_seconds
        due = await self._redis.call(
            "ZRANGEBYSCORE", f"{RUNS}:finished", "-inf", repr(long_ago), "LIMIT", 0, limit
        )
        await asyncio.gather(*(self._expire(name.decode(), long_ago, now) for name in due))
        for batch_id in await self._acceptance.opened(long_ago, limit):
            await self._expire_opened(batch_id)
        await trim_feed(self._redis, now)
        return len(due)

    async def _expire(self, run_id: str, long_ago: float, now: float) -> None:
        keys = all_keys_of(run_id)
        batch = await self._redis.call("HGET", keys[0], "batch")
        if batch is not None:
            where = batch_key(batch.decode())
            unfinished = await self._lists.count(where, "all") - await self._lists.count(
                where, "finished"
            )
            last = now if unfinished > 0 else await self._lists.last_end(where)
            if last is not None and last > long_ago:
                # Not before that; until then it is not in the way of others.
                await self._redis.call("ZADD", f"{RUNS}:finished", "XX", repr(last), run_id)
                return
        if await self._redis.call_script(source("records_drop"), keys, [repr(long_ago)]):
            # What is left of it says where it is listed: a crash here, and we come again.
            await self._take_out(run_id, whole_batch=True)
        else:
            await self._lists.refresh([run_id])  # it was retried
        if not await self._redis.call("EXISTS", keys[0]):
            await self._redis.call("ZREM", f"{RUNS}:finished", run_id)

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        """As `DurableStore`. A crash on the way leaves a run that is not shown any more; `expire`
        removes the rest of it."""
        deleted: list[str] = []
        for first in range(0, len(run_ids), DELETE_SIZE):
            some = run_ids[first : first + DELETE_SIZE]
            found = await asyncio.gather(*(self._delete_run(one, ended_before) for one in some))
            deleted += [run_id for run_id, done in zip(some, found, strict=True) if done]
        return deleted

    async def _delete_run(self, run_id: str, ended_before: float) -> bool:
        keys = all_keys_of(run_id)
        before = repr(min(ended_before, LATEST_TIME))
        dropped = int(await self._redis.call_script(source("records_drop"), keys, [before]))
        if dropped:
            await self._take_out(run_id, whole_batch=False)
            await self._redis.call("ZREM", f"{RUNS}:finished", run_id)
        return dropped == DROPPED_NOW

    async def _take_out(self, run_id: str, *, whole_batch: bool) -> None:
        """Remove what is left of a run that was dropped. With `whole_batch` its batch goes when no
        run of it is left; else only if all that were asked for were there."""
        meta = keys_of(run_id)[0]
        key, ended, *birth = await self._redis.call("HMGET", meta, "key", "ended", *ORIGIN_FIELDS)
        if birth[0] is None:
            return  # another one is done with it
        if key is not None:
            await self._acceptance.unclaim(key.decode(), run_id)
        was = origin(*birth)
        await self._lists.take_out(run_id, was)
        if was.batch is not None:
            where = batch_key(was.batch)
            left = [was.place, run_id, ended or b"0"]
            deleted, count = await self._redis.call_script(
                source("batch_leave"), [where, f"{where}:places"], left
            )
            is_over = whole_batch or deleted >= count
            if is_over and not await self._lists.count(where, "all"):
                await self._drop_batch(was.batch)
        await self._redis.call("DEL", meta)

    async def _expire_opened(self, batch_id: str) -> None:
        """Its caller may have died before its first run, with which it would be deleted."""
        if not await self._lists.count(batch_key(batch_id), "all"):
            await self._drop_batch(batch_id)
        await self._acceptance.no_longer_opened(batch_id)

    async def _drop_batch(self, batch_id: str) -> None:
        name = batch_key(batch_id)
        key = await self._redis.call("HGET", name, "key")
        if key is not None:
            await self._acceptance.unclaim(key.decode(), batch_id)
        await self._acceptance.drop_batch(batch_id)

    # ── the doctor ───────────────────────────────────────────────────────────────────────

    async def doctor(self) -> list[DoctorFinding]:
        return [] if self._examine is None else await self._examine()


def _as_seen(seen: Seen | None) -> str:
    """As the scripts spell it."""
    if seen is None:
        return ""
    if LATEST not in seen:
        return "nothing"
    others = sorted(f"{one}={_encoded(target)}" for one, target in seen.items() if one != LATEST)
    return f"latest={seen[LATEST]} {' '.join(others)}"


def _encoded(target: AliasTarget) -> str:
    return str(target) if isinstance(target, int) else encode_weights(target)


def _target(kept: bytes) -> AliasTarget:
    return int(kept) if kept.isdigit() else decode_weights(kept)


def _unknown_origin(_: str) -> None:
    return None


def _damaged_summary(
    run_id: str, kept: dict[str, bytes | None], problem: Exception
) -> dict[str, Any]:
    def text(name: str) -> str:
        return (kept.get(name) or b"").decode(errors="replace")

    def time(name: str) -> float | None:
        try:
            return float(text(name)) if text(name) else None
        except ValueError:
            return None

    epoch, version = text("epoch"), text("version")
    why = " ".join(f"{type(problem).__name__}: {problem}".split())
    return summary_view(
        run_id=run_id,
        workflow=text("workflow"),
        version=int(version) if version.isdigit() else None,
        status=run_status(text("status")),
        epoch=int(epoch) if epoch.isdigit() else 0,
        params={},
        created_at=time("created_at") or 0.0,
        started_at=time("created_at"),
        finished_at=time("finished_at"),
        error=damage_error(f"what Redis has of it cannot be read: {why}"),
        result=None,
    )
