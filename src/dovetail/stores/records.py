"""Records that SQLite, Redis and PostgreSQL share: definitions, pages, views and messages."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import orjson

from dovetail.core.aliases import (
    AliasTarget,
    decode_weights,
    encode_weights,
    main_version,
    versions_named,
)
from dovetail.core.audit.replay import JournalEntry
from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import STORED, Workflow
from dovetail.core.errors import Changed, Conflict, InvalidParams, NotFound, Problem
from dovetail.core.node_logs import LogChunk, StoredChunk, decode_lines
from dovetail.core.outputs import OutputReference
from dovetail.core.states import RunStatus
from dovetail.engine.ports import Author, HistoryOf, Registered, RunQuery, Seen
from dovetail.engine.views import damage_error, receipt_view, summary_view, timestamp

MAX_GRAPHS = 64


class StoredDefinition(NamedTuple):
    sha256: str
    content: bytes
    retries: bytes
    """The handlers' own retries when the run was triggered: they may be others tomorrow."""


def stored_definition(workflow: Workflow) -> tuple[str, bytes]:
    """A definition's digest and its text. The order of keys does not make another definition."""
    data = workflow.model_dump(mode="json", exclude_unset=True)
    ordered = orjson.dumps(data, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(ordered).hexdigest(), orjson.dumps(data)


class Definitions:
    def __init__(self) -> None:
        self._stored: OrderedDict[int, tuple[Graph, StoredDefinition]] = OrderedDict()
        self._graphs: OrderedDict[tuple[int | bytes, bytes], Graph] = OrderedDict()

    def stored(self, graph: Graph) -> StoredDefinition:
        """What a store writes of a graph."""
        # By identity: a graph cannot be hashed cheaply, and callers reuse it.
        known = self._stored.get(id(graph))
        if known is not None:
            return known[1]
        if graph.workflow is None:
            raise ValueError("a graph of Python functions cannot be stored")
        sha256, content = stored_definition(graph.workflow)
        retries = orjson.dumps(dict(graph.default_retries), option=orjson.OPT_SORT_KEYS)
        stored = StoredDefinition(sha256, content, retries)
        self._stored[id(graph)] = (graph, stored)
        if len(self._stored) > MAX_GRAPHS:
            self._stored.popitem(last=False)
        return stored

    def known(self, number: int | bytes, retries: bytes) -> Graph | None:
        """The graph of a stored definition, if it was asked for lately."""
        return self._graphs.get((number, retries))

    def graph(self, number: int | bytes, retries: bytes, read: Callable[[], bytes]) -> Graph:
        """The graph of a stored definition."""
        key = (number, retries)
        known = self._graphs.get(key)
        if known is None:
            workflow = Workflow.model_validate(orjson.loads(read()), context=STORED)
            known = self._graphs[key] = build_graph(workflow, orjson.loads(retries))
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        return known


MAX_LISTED = 1000
SHORTEST_PREFIX = 4
PAGE_BYTES = 4 << 20
"""A page of runs for an answer ends early if its params and results have more bytes than this."""
LATEST = "latest"
MAX_VERSION = 1 << 53
"""A larger number names no version."""


def named_statements(package: str) -> dict[str, str]:
    """The statements of the `queries.sql` of a package, by the names in its comments."""
    text = resources.files(package).joinpath("queries.sql").read_text("utf-8")
    found: dict[str, str] = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        found[name.strip()] = "\n".join(lines).strip()
    return found


def stored_chunk(run_id: str, row: Sequence[Any]) -> StoredChunk:
    """From a row of `logs`."""
    seq, node, epoch, attempt, item, number, missing_lines, missing_bytes, content = row
    chunk = LogChunk(
        *(run_id, node, epoch, attempt, number, decode_lines(content), item),
        missing_lines=missing_lines,
        missing_bytes=missing_bytes,
    )
    return StoredChunk(seq, chunk)


def with_lost_lines(
    chunks: Sequence[StoredChunk], run_id: str, after: int, lost: Sequence[int]
) -> list[StoredChunk]:
    """The same, and between them one that stands for lines that are gone. `lost` is the number of
    the last of these, how many lines they are, and how many bytes."""
    seq, lines, size = lost
    behind = next((place for place, one in enumerate(chunks) if one.seq > seq), None)
    if seq <= after or behind is None:  # else a reader would leave out what comes in between
        return list(chunks)
    gone = LogChunk(run_id, "", 0, 0, 0, (), missing_lines=lines, missing_bytes=size)
    return [*chunks[:behind], StoredChunk(seq, gone), *chunks[behind:]]


def page_size(limit: int) -> int:
    return max(1, min(limit, MAX_LISTED))


def list_position(cursor: str | None, start: int) -> int:
    """Where a page begins: `start` without a cursor. Raises `InvalidParams` for a foreign
    cursor."""
    if cursor is None:
        return start
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        message = f"'{cursor[:40]}' is no cursor; use the `next_cursor` of the page before"
        raise InvalidParams([Problem("invalid_field", message, "cursor")])
    return int(cursor)


def conditions(query: RunQuery, batch: int | None) -> dict[str, Any]:
    """The columns that a query asks for, with their values; `batch` is the number of its batch."""
    wanted = {"status": query.status, "workflow": query.workflow, "batch": batch}
    return {column: value for column, value in wanted.items() if value is not None}


class WorkflowHead(NamedTuple):
    """What is read of a workflow at once."""

    latest: int
    aliases: dict[str, AliasTarget]
    """`latest` among them."""
    has_version: bool
    """The version that was asked for is there."""


def number_meant(version: int | str) -> int | None:
    """The number, if this is one and no alias. No workflow has so many versions as the largest."""
    if isinstance(version, str):
        if not (version.isascii() and version.isdigit()):
            return None
        version = int(version[:18])
    return min(max(version, 0), MAX_VERSION)


def stored_target(target: AliasTarget) -> tuple[int, str | None]:
    """The columns `version` and `weights` of an alias."""
    weights = None if isinstance(target, int) else encode_weights(target)
    return main_version(target), weights


def target_of_row(version: Any, weights: Any) -> AliasTarget:
    """What `stored_target` gave. Raises `ValueError` for anything else."""
    if weights is not None:
        return decode_weights(weights)
    if not isinstance(version, int):
        raise ValueError("a version is a number")
    return version


def target_view(target: AliasTarget) -> dict[str, Any]:
    """As it is set."""
    return {"version": target} if isinstance(target, int) else {"weights": dict(target)}


def alias_details(alias: str, target: AliasTarget, before: AliasTarget | None) -> dict[str, Any]:
    return {"alias": alias, **target_view(target), "from": before}


def limit_details(rate: float, burst: int, before: tuple[float, int] | None) -> dict[str, Any]:
    old = None if before is None else {"rate_per_second": before[0], "burst": before[1]}
    return {"rate_per_second": rate, "burst": burst, "from": old}


def history_item(time: Any, actor: Any, action: Any, details: Any) -> dict[str, Any]:
    return {
        "time": shown_time(time),
        "actor": str(actor),
        "action": str(action),
        "details": _json(details, "details", [], {}),
    }


def history_page(rows: Sequence[Any], limit: int) -> dict[str, Any]:
    """From rows of number, time, actor, action and details: newest first, and one more if another
    page follows."""
    items = [history_item(*row[1:]) for row in rows[:limit]]
    return {"items": items, "next_cursor": str(rows[limit - 1][0]) if len(rows) > limit else None}


def check_seen(
    name: str, seen: Mapping[str, AliasTarget] | None, found: Mapping[str, AliasTarget]
) -> None:
    """Raises `Changed` unless a workflow's aliases are the ones that were seen."""
    if seen is not None and dict(seen) != dict(found):
        raise changed(name)


def changed(name: str) -> Changed:
    return Changed(f"workflow '{name}' is not as it was seen any more; read it again")


def long_enough(prefix: str) -> None:
    """Raises `NotFound` for a prefix that is too short to name a run."""
    if prefix and len(prefix) < SHORTEST_PREFIX:
        raise NotFound(f"'{prefix}' is too short: give at least {SHORTEST_PREFIX} characters")


def id_range(prefix: str) -> tuple[str, str]:
    """Between these are the ids that begin so."""
    return prefix, prefix + "\U0010ffff"


def run_meant(prefix: str, found: Sequence[str], where: object, what: str = "run") -> str:
    """The one run, or batch, whose id begins so, of some that do. `NotFound`, `Conflict`."""
    if prefix in found or len(found) == 1:
        return prefix if prefix in found else found[0]
    if not found or not prefix:
        raise NotFound(f"no {what} '{prefix}' in {where}")
    some = ", ".join(run_id[: len(prefix) + 4] for run_id in found)
    raise Conflict(f"'{prefix}' could be any of {some}; give more characters")


def no_alias(name: str, alias: str, aliases: Iterable[str]) -> NotFound:
    have = ", ".join(aliases)
    return NotFound(f"workflow '{name}' has no alias '{alias}'; aliases: {have}")


def refuse_latest(alias: str, verb: str) -> None:
    """Raises `Conflict` for the alias that every workflow has."""
    if alias == LATEST:
        raise Conflict(f"'latest' always names the newest version and cannot be {verb}")


def refuse_named(name: str, version: int, aliases: Mapping[str, AliasTarget]) -> None:
    """Raises `Conflict` for a version that an alias names, so that it cannot be deleted."""
    naming = [alias for alias, target in aliases.items() if version in versions_named(target)]
    if LATEST in naming:
        raise Conflict(
            f"version {version} of workflow '{name}' is its latest: register another one first, "
            "or delete the workflow"
        )
    if naming:
        names = ", ".join(f"'{alias}'" for alias in naming)
        raise Conflict(
            f"version {version} of workflow '{name}' has the alias {names}: let it name another "
            "version, or delete it"
        )


def no_run(run_id: str, where: object) -> NotFound:
    return NotFound(f"no run '{run_id}' in {where}")


def no_batch(batch_id: str, where: object) -> NotFound:
    return NotFound(f"no batch '{batch_id}' in {where}")


def no_workflow(name: str, where: object) -> NotFound:
    return NotFound(f"no workflow '{name}' is registered in {where}")


def no_version(name: str, version: int | str | None, versions: Iterable[Any]) -> NotFound:
    have = ", ".join(map(str, versions))
    return NotFound(f"workflow '{name}' has no version {version}; it has: {have}")


def refuse_active(name: str, active: int, version: int | None = None) -> None:
    """Raises `Conflict` for a workflow, or a version of it, with unfinished runs."""
    if active:
        runs = "1 run" if active == 1 else f"{active} runs"
        what = f"workflow '{name}'" if version is None else f"version {version} of '{name}'"
        raise Conflict(f"{what} has {runs} not finished yet; cancel or await them")


def workflow_view(
    found: Registered, aliases: Mapping[str, AliasTarget], definition: Any = None
) -> dict[str, Any]:
    return {
        "name": found.name,
        "version": found.version,
        "definition": orjson.loads(found.content) if definition is None else definition,
        "aliases": dict(aliases),
        "created_at": timestamp(found.created_at),
    }


def workflow_item(
    name: str, latest: int, aliases: Mapping[str, AliasTarget], created_at: Any, updated_at: Any
) -> dict[str, Any]:
    """A workflow of a list."""
    return {
        "name": name,
        "latest_version": latest,
        "aliases": dict(aliases),
        "created_at": shown_time(created_at),
        "updated_at": shown_time(updated_at),
    }


def version_item(version: int, sha256: Any, created_at: Any) -> dict[str, Any]:
    return {"version": version, "sha256": str(sha256), "created_at": shown_time(created_at)}


def shown_time(seconds: Any) -> str | None:
    """None for a time that cannot be read."""
    return timestamp(seconds) if isinstance(seconds, int | float) else None


def batch_counts(rows: Iterable[Sequence[Any]]) -> tuple[dict[str, int], int, float]:
    """How many runs of a batch have which status, how many are finished, and the last end.

    A row has a status, the number of its runs, how many of them are finished, and their last end.
    """
    by_status: dict[str, int] = {}
    finished, ended = 0, 0.0
    for status, runs, done, last in rows:
        known = run_status(status)
        by_status[known] = by_status.get(known, 0) + runs
        finished += done
        ended = max(ended, last if isinstance(last, float) else 0.0)
    return by_status, finished, ended


def batch_end(
    count: int,
    counts: Mapping[str, int],
    finished: int,
    ended: float,
    deleted: int,
    deleted_end: float | None,
) -> float | None:
    """When the last run of a batch ended, if all have; 0 if no end is known.

    `deleted` runs had ended, the last of them at `deleted_end`: the batch does not wait for them.
    """
    there = sum(counts.values())
    if finished < there or there + deleted < count:
        return None
    return max(ended, deleted_end or 0.0)


def batch_view(
    batch: tuple[str, str, int, Any],
    counts: dict[str, int],
    ended: float | None,
    rows: Sequence[tuple[Any, Any, str]],
    limit: int,
) -> dict[str, Any]:
    """`batch` is its id, workflow, count and creation time; `ended` is the last end if all runs are
    finished, and 0 if none is known; `rows` has the runs of the page, and one more if there is a
    next page."""
    batch_id, workflow, count, created_at = batch
    return {
        "batch_id": batch_id,
        "workflow": workflow,
        "count": count,
        "counts": counts,
        "created_at": shown_time(created_at),
        "finished_at": None if ended is None else shown_time(ended or created_at),
        "runs": [
            {"index": index, "run_id": run_id, "status": status}
            for index, run_id, status in rows[:limit]
            if isinstance(index, int) and isinstance(run_id, str)  # else the row is damaged
        ],
        "next_cursor": str(rows[limit][0]) if len(rows) > limit else None,
    }


def batch_page(rows: Sequence[Any], limit: int) -> tuple[list[str], str | None]:
    """The ids of a page of batches, and its cursor, from rows of number and id."""
    more = str(rows[limit - 1][0]) if len(rows) > limit else None
    return [str(row[1]) for row in rows[:limit]], more


def summary_of(row: Sequence[Any]) -> dict[str, Any]:
    """A run of a list, from its row: number, id, workflow and on, as the summaries select it.

    What of it cannot be read is left out, and its error says so: one damaged row must not hide
    all others.
    """
    _, run_id, workflow, version, status, epoch, params, *rest = row
    created_at, started_at, finished_at, error, result, size = rest
    lost: list[str] = []
    shown = None if result is None else _json(result, "result", lost)
    if result is None and size is not None:
        shown = OutputReference(size, None)
    view = summary_view(
        run_id=_text(run_id, "id", lost),
        workflow=_text(workflow, "workflow", lost),
        version=version if isinstance(version, int | None) else _left_out("version", lost),
        status=status if status in _STATUSES else _left_out("status", lost, run_status(status)),
        epoch=epoch if isinstance(epoch, int) else _left_out("epoch", lost, 0),
        params=_json(params, "params", lost, {}),
        created_at=_time(created_at, "created_at", lost) or 0.0,
        started_at=_time(started_at, "started_at", lost),
        finished_at=_time(finished_at, "finished_at", lost),
        error=None if error is None else _json(error, "error", lost, None),
        result=shown,
    )
    if lost:
        what = f"its record is damaged: {', '.join(lost)} cannot be read"
        view["error"] = damage_error(what)
    return view


_STATUSES = frozenset(RunStatus)


def run_status(status: Any) -> str:
    """As it is kept; a run whose status cannot be read is no run that went well."""
    return str(status) if status in _STATUSES else RunStatus.FAILED.value


def _left_out(name: str, lost: list[str], instead: Any = None) -> Any:
    lost.append(name)
    return instead


def _text(value: Any, name: str, lost: list[str]) -> str:
    if isinstance(value, str):
        return value
    lost.append(name)
    return repr(value)[:80]


def _time(value: Any, name: str, lost: list[str]) -> float | None:
    if value is None or isinstance(value, int | float):
        return value
    lost.append(name)
    return None


def _json(value: Any, name: str, lost: list[str], like: Any = ...) -> Any:
    """`like` is what stands for it where it cannot be read; its type is the one that it has."""
    instead = None if like is ... else like
    try:
        found = orjson.loads(value)
    except (TypeError, ValueError):
        return _left_out(name, lost, instead)
    if like is not ... and not isinstance(found, dict):
        return _left_out(name, lost, instead)
    return found


def until_cut(rows: Sequence[Any]) -> Sequence[Any]:
    """The rows of a page up to where it was heavy enough: those behind have no params."""
    return rows[: next((at for at, row in enumerate(rows) if row[6] is None), len(rows))]


def weight(view: dict[str, Any]) -> int:
    """About how many bytes a run of a list has."""
    result = view["result"]
    size = 0 if result is None or isinstance(result, OutputReference) else len(orjson.dumps(result))
    return size + len(orjson.dumps(view["params"]))


class BaseRecords(ABC):
    """What the records of every store do in the same way, over what each store reads and writes.

    The promises are in `engine/ports.py`.
    """

    @property
    @abstractmethod
    def _where(self) -> object:
        """The name of the store in messages."""

    # ── registered workflows ─────────────────────────────────────────────────────────────

    @abstractmethod
    async def _latest(self, name: str) -> int:
        """The newest version of a workflow. Raises `NotFound`."""

    @abstractmethod
    async def _head(self, name: str, version: int | None = None) -> WorkflowHead:
        """In one roundtrip. Raises `NotFound`."""

    @abstractmethod
    async def versions(self, name: str) -> dict[str, Any]:
        """Raises `NotFound`."""

    @abstractmethod
    async def _read_version(self, name: str, version: int) -> Registered | None: ...

    async def registered(self, name: str, version: int | str | None = None) -> Registered:
        """A version by its number or alias; the latest if none is named. Raises `NotFound`."""
        number = main_version(await self.target_of(name, version))
        found = await self._read_version(name, number)
        if found is None:
            raise await self._no_version(name, version)
        return found

    async def target_of(self, name: str, version: int | str | None = None) -> AliasTarget:
        """As `Records`."""
        if version is None or version == LATEST:
            return await self._latest(name)
        number = number_meant(version)
        head = await self._head(name, number)
        if isinstance(version, str) and version in head.aliases:
            return head.aliases[version]
        if number is None:
            have = ", ".join(head.aliases)
            raise NotFound(
                f"workflow '{name}' has no version or alias '{version}'; aliases: {have}"
            )
        if not head.has_version:
            raise await self._no_version(name, version)
        return number

    async def _no_version(self, name: str, version: int | str | None) -> NotFound:
        items = (await self.versions(name))["items"]
        return no_version(name, version, [item["version"] for item in items])

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        found = await self.registered(name, version)
        return workflow_view(found, (await self._head(name)).aliases)

    async def delete_workflow(self, name: str, by: Author, seen: Seen | None = None) -> None:
        await self._latest(name)
        refuse_active(name, await self._delete_workflow(name, by, seen))

    @abstractmethod
    async def _delete_workflow(self, name: str, by: Author, seen: Seen | None) -> int:
        """Delete it unless it has unfinished runs; returns how many. Raises `Changed`."""

    async def delete_version(
        self, name: str, version: int | str, by: Author, seen: Seen | None = None
    ) -> int:
        number = main_version(await self.target_of(name, version))
        refuse_active(name, await self._delete_version(name, number, by, seen), number)
        return number

    @abstractmethod
    async def _delete_version(self, name: str, version: int, by: Author, seen: Seen | None) -> int:
        """Delete it unless it has unfinished runs; returns how many. Raises `Changed`, `NotFound`,
        or `Conflict` if an alias names it."""

    async def set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None = None
    ) -> dict[str, Any]:
        refuse_latest(alias, "set")
        await self._latest(name)
        missing = await self._set_alias(name, alias, target, by, seen)
        if missing is not None:
            raise await self._no_version(name, missing)
        return {"name": name, "alias": alias, **target_view(target)}

    @abstractmethod
    async def _set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None
    ) -> int | None:
        """Unless a version is not there: then returns it. Raises `Changed`."""

    async def delete_alias(
        self, name: str, alias: str, by: Author, seen: Seen | None = None
    ) -> None:
        refuse_latest(alias, "deleted")
        await self._latest(name)
        await self._delete_alias(name, alias, by, seen)

    @abstractmethod
    async def _delete_alias(self, name: str, alias: str, by: Author, seen: Seen | None) -> None:
        """Raises `NotFound`, `Changed`."""

    async def history(
        self, of: HistoryOf, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        if of == "workflow" and not await self._was_registered(name):
            raise no_workflow(name, self._where)
        return await self._history(of, name, page_size(limit), cursor)

    @abstractmethod
    async def _was_registered(self, name: str) -> bool:
        """Also if it was deleted since."""

    @abstractmethod
    async def _history(
        self, of: HistoryOf, name: str, limit: int, cursor: str | None
    ) -> dict[str, Any]: ...

    # ── runs and batches ─────────────────────────────────────────────────────────────────

    @abstractmethod
    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        """Raises `NotFound`."""

    async def receipt(self, run_id: str) -> dict[str, Any]:
        return receipt_view(await self.summary(run_id, 0))  # it has no result

    async def entries(self, run_id: str, after: int = 0) -> list[JournalEntry] | None:
        """A run that lives in Redis has a log of events, and no journal of transitions."""
        await self.summary(run_id, 0)
        return None

    async def find_run(self, prefix: str) -> str:
        """The one run whose id begins so."""
        long_enough(prefix)
        return run_meant(prefix, await self._runs_beginning_with(prefix), self._where)

    async def find_batch(self, prefix: str) -> str:
        """The one batch whose id begins so."""
        long_enough(prefix)
        found = await self._batches_beginning_with(prefix)
        return run_meant(prefix, found, self._where, "batch")

    @abstractmethod
    async def _runs_beginning_with(self, prefix: str) -> list[str]:
        """Some of the ids that begin so."""

    @abstractmethod
    async def _batches_beginning_with(self, prefix: str) -> list[str]:
        """Some of the ids that begin so."""
