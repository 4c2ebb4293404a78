"""The archive: every run, for good, in PostgreSQL.

A run is archived as Redis stores it, byte for byte, so that it can be restored. Any number of
archivers may write the same run, late and repeatedly: a snapshot that is older than the stored one
changes nothing.

Redis may come back without the end of its log. Then event numbers are used a second time, and the
process that notices it, or restores a run, continues under the next *generation*. A generation
replaces the log of earlier ones from its first event on, unless the run was finished: a finished
run stays so until a retry opens a new epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import orjson

from dovetail.core.errors import StoreError
from dovetail.core.events import Event
from dovetail.core.items import PLACES, item_place, split_place
from dovetail.core.node_logs import LogChunk
from dovetail.core.outputs import ONLY_SIZES, OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Submit
from dovetail.engine.distributed.archiver import (
    ArchiveHead,
    ArchiveState,
    LogHead,
    RunSnapshot,
    UnarchivedLog,
)
from dovetail.stores.postgres.pool import PostgresConnection, PostgresPool, statements
from dovetail.stores.records import Definitions, no_run
from dovetail.stores.redis.codec import event_of, run_of, time_text
from dovetail.stores.redis.items import (
    MapCounts,
    StoredMaps,
    add_maps,
    joined_record,
    parsed_counts,
)

PIECE_BYTES = 4 << 20
"""Of one statement: outputs may be a megabyte each, and there may be thousands."""
PIECE_ROWS = 10_000
ROW_BYTES = 64
"""What a row weighs beside its values."""


ALL_OUTPUTS = ReadBudget(1 << 62, 1 << 62)


class StoredOutput(NamedTuple):
    """Where an output is."""

    run: int
    place: int


class _Row(NamedTuple):
    """A run's row, locked."""

    number: int
    run_id: str
    definition: int
    generation: int
    last_seq: int
    epoch: int
    finished_at: float | None

    @property
    def kept(self) -> ArchiveState:
        return ArchiveState(self.generation, self.last_seq, self.finished_at is not None)


class PostgresArchive:
    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool
        self._definitions = Definitions()

    # ── writing ──────────────────────────────────────────────────────────────────────────

    async def write(self, snapshot: RunSnapshot) -> ArchiveState | None:
        """Keep it. None if neither the run nor its definition is known: say its `content`."""
        return (await self.write_many([snapshot])).get(snapshot.run_id)

    async def write_many(self, snapshots: Sequence[RunSnapshot]) -> dict[str, ArchiveState]:
        """Keep them all, or none; one of each run. Safe to repeat, and late. See `write`."""
        by_id = {snapshot.run_id: snapshot for snapshot in snapshots}
        if len(by_id) != len(snapshots):
            raise ValueError("several snapshots of one run in one write; write the newest")
        return await self._pool.transact(lambda connection: _write(connection, by_id))

    # ── reading ──────────────────────────────────────────────────────────────────────────

    async def read(self, run_id: str) -> RunSnapshot | None:
        """Everything there is of a run, its log from the first event on, with its `content`.

        Of one that was accepted and never seen since, `meta` has what the trigger said and no
        status, and there is nothing else.
        """
        if not await self.kept([run_id]):  # also of a text that PostgreSQL cannot have
            return None
        return await self._pool.look(lambda connection: _read(connection, run_id))

    async def kept(self, run_ids: Iterable[str]) -> dict[str, ArchiveState]:
        """How far these runs are archived; unknown ones are missing."""
        rows = await self._pool.rows("kept", list(run_ids))
        return {run_id: ArchiveState(*rest) for run_id, *rest in rows}

    async def heads(self, run_ids: Iterable[str]) -> dict[str, ArchiveHead]:
        """The same, with the last event, to see whether a log goes on from there."""
        rows = await self._pool.rows("heads", list(run_ids))
        return {
            run_id: ArchiveHead(ArchiveState(*kept), epoch, event)
            for run_id, *kept, epoch, event in rows
        }

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        """The run as far as it is archived, to read. Raises `NotFound`."""
        wanted = (room or ALL_OUTPUTS) if outputs else ONLY_SIZES
        found = None
        if await self.kept([run_id]):  # also of a text that PostgreSQL cannot have
            found = await self._pool.look(lambda one: _look(one, run_id, wanted))
        if found is None:  # or it was deleted since
            raise no_run(run_id, self._pool.where)
        snapshot, left_out = found
        given, meta = self.submission(snapshot), snapshot.meta
        created_at = float(meta["created_at"])
        run = RunState(run_id, given.graph, given.params, created_at, given.version)
        if "status" not in meta:
            run.forked_from = given.forked_from
            return run  # it was accepted, and nothing was seen of it since
        run_of(
            run,
            {name.encode(): value.encode() for name, value in meta.items()},
            {b"%d" % place: state.encode() for place, state in snapshot.nodes.items()},
            {},
            snapshot.outputs,
            {b"%d" % place: end for place, end in snapshot.ends.items()},
            snapshot.last_seq,
        )
        if "maps" in meta:
            _add_items(run, snapshot, left_out)
        for place, output in left_out.items() if outputs else ():
            if place < PLACES:
                run.nodes[place].output = output
        return run

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        """Outputs that `load` left out, in this order. Raises `StoreError`."""
        if not wanted:
            return []
        places = [one.where.place for one in wanted]
        rows = await self._pool.rows("read_outputs", wanted[0].where.run, run.epoch, places)
        found = {place: bytes(output) for place, output in rows}
        for place in places:
            items = run.nodes[place].items if place < PLACES else None
            if place not in found and items is not None:
                first = item_place(place, 0)
                mine = list(range(first, first + items.total))
                rows = await self._pool.rows("read_outputs", wanted[0].where.run, run.epoch, mine)
                texts = {one: bytes(output) for one, output in rows}
                found[place] = b"[%b]" % b",".join(texts.get(one, b"null") for one in mine)
        if any(place not in found for place in places):
            raise StoreError(f"run {run.id}: its outputs are not those of epoch {run.epoch} now")
        return [found[place] for place in places]

    async def log(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Event]:
        """Its events as far as they are archived. Raises `NotFound`."""
        row = await self._pool.row("definition_of_run", run_id)
        if row is None:
            raise no_run(run_id, self._pool.where)
        number, definition, retries, content = row
        graph = self._definitions.graph(definition, retries, lambda: content)
        rows = await self._pool.rows("read_events", number, after, limit)
        return [event_of(text, seq, graph) for seq, text in rows]

    # ── what handlers log ────────────────────────────────────────────────────────────────

    async def log_heads(self, run_ids: Iterable[str]) -> dict[str, LogHead]:
        """Where the logs of these runs end; unknown runs are missing."""
        rows = await self._pool.rows("log_heads", list(run_ids))
        return {row[0]: _log_head(row) for row in rows}

    async def write_logs(self, logs: Mapping[str, UnarchivedLog]) -> dict[str, LogHead]:
        """Keep these chunks, each once, and remove the chunks that they drop. Safe to repeat, and
        late; runs that are not archived are left out."""

        async def write(connection: PostgresConnection) -> dict[str, LogHead]:
            rows = await _locked(connection, logs)
            await _add_logs(connection, [(rows[run_id], logs[run_id]) for run_id in rows])
            heads = await connection.fetch(statements()["log_heads"], list(rows))
            return {row["run_id"]: _log_head(row) for row in heads}

        return await self._pool.transact(write)

    def submission(self, snapshot: RunSnapshot) -> Submit:
        """What was asked for, of a run that was read from here."""
        meta, content = snapshot.meta, snapshot.content or b""
        graph = self._definitions.graph(
            int(meta["definition"], 16), meta["retries"].encode(), lambda: content
        )
        version = int(meta["version"]) if meta["version"] else None
        return Submit(
            *(snapshot.run_id, graph, orjson.loads(meta["params"]), version),
            forked_from=meta.get("forked_from"),
            reuse=orjson.loads(meta.get("reuse", "[]")),
        )

    async def unfinished(
        self, created_before: float, limit: int = 1000, after: str | None = None
    ) -> list[str]:
        """A page of the runs that were accepted before then and are not finished, oldest first. The
        next page comes `after` the last run of this one."""
        rows = await self._pool.rows("unfinished", created_before, after, limit)
        return [run_id for (run_id,) in rows]

    # ── deleting ─────────────────────────────────────────────────────────────────────────

    async def delete(
        self, epochs: Mapping[str, int], now: float, ended_before: float = inf
    ) -> list[str]:
        """Delete runs that are finished in these epochs and ended by then; returns which. Safe to
        repeat. A late write does not bring one back, see `_take_back_deleted`."""
        request = os.urandom(16).hex()
        return await self._pool.transact(
            lambda connection: _delete(connection, epochs, now, ended_before, request)
        )

    async def ended_by(self, run_ids: Iterable[str], before: float) -> set[str]:
        """The ones of these that ended by then."""
        return {run_id for (run_id,) in await self._pool.rows("ended_by", list(run_ids), before)}

    async def ended(self, before: float, after: int, limit: int) -> tuple[list[str], int | None]:
        """Some runs that ended by then, oldest first, behind a number; and the number to go on
        with, if there may be more."""
        rows = await self._pool.rows("ended_runs", after, limit)
        found = [row[1] for row in rows if row[3] is not None and row[3] <= before]
        # A run ends after it was created, and numbers are given in this order.
        goes_on = len(rows) == limit and rows[-1][2] <= before
        return found, rows[-1][0] if goes_on else None

    async def forget_deleted(self, before: float) -> None:
        """Forget runs that were deleted before then."""
        await self._pool.execute("forget_deleted", before)


RUN_TABLES = ("delete_events", "delete_nodes", "delete_generations", "delete_runs")
"""Everything that belongs to a run: a statement for each table, by name. Each takes the numbers of
runs. The rows of the runs come last."""


async def _delete(
    connection: PostgresConnection,
    epochs: Mapping[str, int],
    now: float,
    ended_before: float,
    request: str,
) -> list[str]:
    sql = statements()
    rows = await connection.fetch(
        sql["lock_finished"], list(epochs), list(epochs.values()), ended_before
    )
    run_ids = [row["run_id"] for row in rows]
    for name in RUN_TABLES:
        await connection.execute(sql[name], [row["number"] for row in rows])
    await connection.execute(sql["delete_keys"], run_ids)
    await connection.execute(sql["remember_deleted"], run_ids, now, request)
    if placed := [row for row in rows if row["batch"] is not None]:
        batches = [row["batch"] for row in placed]
        await connection.fetch(sql["lock_batches"], batches)
        ends = [row["finished_at"] for row in placed]
        await connection.execute(sql["count_deleted"], batches, ends)
        emptied = await connection.fetch(sql["delete_emptied_batches"], batches)
        await connection.execute(sql["delete_keys"], [batch_id for (batch_id,) in emptied])
    # Not `run_ids`: the work is repeated if the connection broke at the commit.
    mine = await connection.fetch(sql["deleted_by"], list(epochs), request)
    return [run_id for (run_id,) in mine]


# ── a snapshot is written ────────────────────────────────────────────────────────────────


async def _write(
    connection: PostgresConnection, snapshots: dict[str, RunSnapshot]
) -> dict[str, ArchiveState]:
    rows = await _locked(connection, snapshots)
    if unknown := [snapshots[run_id] for run_id in snapshots if run_id not in rows]:
        for snapshot in unknown:
            await _add_run(connection, snapshot)
        await _take_back_deleted(connection, [snapshot.run_id for snapshot in unknown])
        rows = await _locked(connection, snapshots)
    found = {run_id: row.kept for run_id, row in rows.items()}
    pairs = [(row, snapshots[run_id]) for run_id, row in rows.items()]
    if others := await _of_another_log(connection, pairs):
        pairs = [pair for pair in pairs if pair[1].run_id not in others]
        for run_id in others:  # what was read to make it is all that they have in common
            one = snapshots[run_id]
            found[run_id] = ArchiveState(one.generation, one.first_seq - 1, finished=False)
    newer = [(row, snapshot) for row, snapshot in pairs if _is_newer(row, snapshot)]
    accepted = [(row, snapshot) for row, snapshot in newer if _follows(row, snapshot)]
    # One that leaves a gap comes again, whole. One that is refused is history all the same.
    gaps = {snapshot.run_id for row, snapshot in newer if not _follows(row, snapshot)}
    logged = [pair for pair in pairs if pair[1].run_id not in gaps]
    await _add_events(connection, logged, accepted)
    await _begin_generations(connection, accepted)
    await _forget_items(connection, accepted)
    await _save_nodes(connection, accepted)
    await _project(connection, accepted)
    for row, snapshot in accepted:
        finished = snapshot.finished_at is not None
        found[row.run_id] = ArchiveState(snapshot.generation, snapshot.last_seq, finished)
    return found


async def _of_another_log(connection: PostgresConnection, pairs: _Accepted) -> set[str]:
    """The runs whose log in the archive is another one. Another archiver wrote events that Redis
    lost, and Redis has other events in their place. A comparison of the logs shows that."""
    overlapping = {
        row.run_id: snapshot.events[row.last_seq - snapshot.first_seq]
        for row, snapshot in pairs
        if row.generation == snapshot.generation
        and snapshot.first_seq <= row.last_seq <= snapshot.last_seq
    }
    if not overlapping:
        return set()
    rows = await connection.fetch(statements()["heads"], list(overlapping))
    return {run_id for run_id, *_, event in rows if event != overlapping[run_id]}


def _is_newer(row: _Row, snapshot: RunSnapshot) -> bool:
    goes_on = snapshot.generation == row.generation or snapshot.first_seq == row.last_seq + 1
    other_end = not goes_on or snapshot.finished_at is None
    if row.finished_at is not None and int(snapshot.meta["epoch"]) <= row.epoch and other_end:
        return False  # only a late event is welcome, of a log that has this end
    return (snapshot.generation, snapshot.last_seq) >= (row.generation, row.last_seq)


def _follows(row: _Row, snapshot: RunSnapshot) -> bool:
    return snapshot.first_seq <= row.last_seq + 1


async def _locked(connection: PostgresConnection, run_ids: Iterable[str]) -> dict[str, _Row]:
    rows = await connection.fetch(statements()["lock_runs"], list(run_ids))
    return {row["run_id"]: _Row(*row) for row in rows}


async def _add_run(connection: PostgresConnection, snapshot: RunSnapshot) -> None:
    """One that Redis had before there was an archive, or that a restored database lost."""
    meta = snapshot.meta
    if snapshot.content is not None:
        await connection.execute(
            statements()["add_definition"], meta["definition"], snapshot.content
        )
    await connection.execute(
        statements()["add_runs"],
        meta["workflow"],
        int(meta["version"]) if meta["version"] else None,
        meta["definition"],
        meta["retries"].encode(),
        None,
        float(meta["created_at"]),
        [snapshot.run_id],
        [meta["params"].encode()],
        [None],
        None,
    )


async def _take_back_deleted(connection: PostgresConnection, added: Sequence[str]) -> None:
    """A run that was deleted after its snapshot was read stays deleted.

    Asked after the runs were added: a deletion that was committed until then is seen, and a later
    one finds the run.
    """
    rows = await connection.fetch(statements()["find_deleted"], added)
    if rows:
        found = await _locked(connection, [run_id for (run_id,) in rows])
        await connection.execute(
            statements()["delete_runs"], [row.number for row in found.values()]
        )


_Accepted = Sequence[tuple[_Row, RunSnapshot]]


async def _add_events(
    connection: PostgresConnection, pairs: _Accepted, accepted: _Accepted
) -> None:
    """What of the log is new; and what was refused, which is history all the same."""
    going_on = [pair for pair in accepted if pair[0].generation in (0, pair[1].generation)]
    for columns in _pieces(_columns(_logs(going_on, known=False)), [3]):
        await connection.execute(statements()["add_events"], *columns)
    others = [
        (row, snapshot)
        for row, snapshot in pairs
        # Of the generation that is kept, nothing is ever beyond its last event.
        if row.generation not in (0, snapshot.generation) and snapshot.events
    ]
    for columns in _pieces(_columns(_logs(others, known=True)), [3]):
        await connection.execute(statements()["add_other_events"], *columns)


def _logs(pairs: _Accepted, *, known: bool) -> Iterator[tuple[int, int, int, str]]:
    """Run, generation, number of the first event, and events, one on each line.

    An event is JSON, which has no line breaks. A column of single events would take longer to
    send than to store. `known` events are included on request.
    """
    for row, snapshot in pairs:
        skipped = 0 if known else max(0, row.last_seq + 1 - snapshot.first_seq)
        for at in range(skipped, len(snapshot.events), PIECE_ROWS):
            lines = snapshot.events[at : at + PIECE_ROWS]
            text = b"\n".join(lines)
            if text.count(b"\n") != len(lines) - 1:
                raise StoreError(f"run {snapshot.run_id} has an event that is no line of JSON")
            yield row.number, snapshot.generation, snapshot.first_seq + at, text.decode()


async def _add_logs(
    connection: PostgresConnection, logs: Sequence[tuple[_Row, UnarchivedLog]]
) -> None:
    sql = statements()
    rows = [
        (
            *(row.number, one.seq, one.chunk.node, one.chunk.epoch, one.chunk.attempt),
            *(one.chunk.item, one.chunk.number, one.lines, one.content),
        )
        for row, log in logs
        for one in log.chunks
        if one.content is not None
    ]
    for columns in _pieces(_columns(rows), [8]):
        await connection.execute(sql["add_logs"], *columns)
    for row, log in logs:
        for one in log.chunks:
            chunk = one.chunk
            mine = (row.number, chunk.node, chunk.epoch, chunk.attempt, chunk.item)
            behind = chunk.number
            if chunk.drops:
                behind = max(chunk.drops) + 1
                await connection.execute(sql["drop_logs"], *mine, list(chunk.drops))
            if chunk.missing_lines:
                missing = (chunk.missing_lines, chunk.missing_bytes)
                await connection.execute(sql["note_missing"], *mine, behind, *missing)
        last = max((one.last_seq for one in log.chunks), default=0)
        await connection.execute(sql["end_logs"], row.number, last, *log.lost)


def _log_head(row: Sequence[Any]) -> LogHead:
    run_id, last_seq, seq, node, epoch, attempt, item, number = row
    if seq is None:
        return LogHead(last_seq)
    return LogHead(last_seq, seq, LogChunk(run_id, node, epoch, attempt, number, (), item).name)


async def _begin_generations(connection: PostgresConnection, accepted: _Accepted) -> None:
    """The first needs no word: a log begins with it."""
    begun = [
        (row.number, snapshot.generation, snapshot.first_seq)
        for row, snapshot in accepted
        if snapshot.generation not in (row.generation, 1)
    ]
    if begun:
        columns = [list(column) for column in zip(*begun, strict=True)]
        await connection.execute(statements()["begin_generations"], *columns)
        await connection.execute(statements()["forget_nodes"], columns[0])


async def _forget_items(connection: PostgresConnection, accepted: _Accepted) -> None:
    """Items that a retry reset: they wait again, or there are none. Or their list was kept by the
    retry, and had another length when it was known, perhaps later than the retry was archived."""
    for row, snapshot in accepted:
        if snapshot.has_all_items and row.generation:
            kept = [place for place in snapshot.nodes if place >= PLACES]
            await connection.execute(statements()["forget_items"], row.number, PLACES, kept)
        elif snapshot.epoch > 1 and "maps" in snapshot.meta:
            counts = parsed_counts(snapshot.meta["maps"])
            firsts = [item_place(index, one.next) for index, one in counts.items()]
            ends = [item_place(index + 1, 0) for index in counts]
            await connection.execute(statements()["forget_unbegun"], row.number, firsts, ends)


async def _save_nodes(connection: PostgresConnection, accepted: _Accepted) -> None:
    runs: list[int] = []
    places: list[int] = []
    states: list[bytes] = []
    outputs: list[bytes | None] = []
    ends: list[bytes | None] = []
    for row, snapshot in accepted:
        nodes = snapshot.nodes
        runs += [row.number] * len(nodes)
        places += nodes
        states += map(str.encode, nodes.values())
        outputs += map(snapshot.outputs.get, nodes)
        ends += map(snapshot.ends.get, nodes)
    for columns in _pieces([runs, places, states, outputs, ends], [2, 3, 4]):
        await connection.execute(statements()["save_nodes"], *columns)


async def _project(connection: PostgresConnection, accepted: _Accepted) -> None:
    names = await _names(connection, accepted)
    projections = [
        (
            row.number,
            snapshot.generation,
            snapshot.last_seq,
            snapshot.meta["status"],
            int(snapshot.meta["epoch"]),
            float(snapshot.meta["created_at"]),
            snapshot.finished_at,
            _error(snapshot, names.get(row.definition, [])),
            None if snapshot.finished_at is None else snapshot.result or b"null",
            orjson.dumps({k: v for k, v in snapshot.meta.items() if k not in _COLUMNS}),
        )
        for row, snapshot in accepted
    ]
    for columns in _pieces(_columns(projections), [7, 8, 9]):
        await connection.execute(statements()["project_runs"], *columns)


async def _names(connection: PostgresConnection, accepted: _Accepted) -> dict[int, list[str]]:
    """Node names of the definitions of runs with an error."""
    wanted = {row.definition for row, snapshot in accepted if snapshot.meta.get("error")}
    if not wanted:
        return {}
    rows = await connection.fetch(statements()["read_definitions"], list(wanted))
    return {number: [n["id"] for n in orjson.loads(content)["nodes"]] for number, content in rows}


def _error(snapshot: RunSnapshot, names: Sequence[str]) -> bytes | None:
    """As views show it: with the name of its node, which Redis stores as an index."""
    if not snapshot.meta.get("error"):
        return None
    kept = orjson.loads(snapshot.meta["error"])
    return orjson.dumps({**kept["error"], "node": names[kept["at"]]})


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _pieces(columns: list[list[Any]], large: Sequence[int]) -> Iterator[list[list[Any]]]:
    """As many rows at a time as one statement may carry. `large` columns decide how many."""
    count = len(columns[0]) if columns else 0
    texts = [columns[at] for at in large] if columns else []
    whole = ROW_BYTES * count + sum(sum(map(len, filter(None, text))) for text in texts)
    if count <= PIECE_ROWS and whole <= PIECE_BYTES:
        if count:
            yield columns
        return
    first = weight = 0
    for at, values in enumerate(zip(*texts, strict=True)):
        weight += ROW_BYTES + sum(map(len, filter(None, values)))
        if weight >= PIECE_BYTES or at + 1 - first >= PIECE_ROWS or at + 1 == count:
            yield [column[first : at + 1] for column in columns]
            first, weight = at + 1, 0


# ── and read ─────────────────────────────────────────────────────────────────────────────

_COLUMNS = frozenset({"workflow", "version", "definition", "retries", "params", "created_at"})
"""Of `meta`, what the trigger said: it has columns of its own."""


def _meta(
    workflow: str,
    version: int | None,
    retries: bytes,
    params: bytes,
    created_at: float,
    sha256: str,
    meta: bytes | None,
) -> dict[str, str]:
    """As Redis has it, from the columns of a run's row."""
    return {
        "workflow": workflow,
        "version": "" if version is None else str(version),
        "definition": sha256,
        "retries": retries.decode(),
        "params": params.decode(),
        "created_at": time_text(created_at),
        **({} if meta is None else orjson.loads(meta)),
    }


def _snapshot(run_id: str, row: Sequence[Any], **rest: Any) -> RunSnapshot:
    """From a run's row without number and result; its nodes and events are added later."""
    workflow, version, retries, params, created_at, generation, meta, sha256, content = row
    return RunSnapshot(
        run_id=run_id,
        generation=generation,
        meta=_meta(workflow, version, retries, params, created_at, sha256, meta),
        nodes={},
        outputs={},
        ends={},
        content=content,
        **rest,
    )


def _add_node(
    snapshot: RunSnapshot, index: int, state: bytes, output: bytes | None, ends: bytes | None
) -> None:
    snapshot.nodes[index] = state.decode()
    if output is not None:
        snapshot.outputs[index] = output
    if ends is not None:
        snapshot.ends[index] = ends


def _add_items(
    run: RunState, snapshot: RunSnapshot, left_out: Mapping[int, OutputReference]
) -> None:
    """The items of mapped nodes. A list of which an item is left out becomes a reference."""
    stored = StoredMaps.of_archive(snapshot.meta["maps"], snapshot.nodes)
    records = {
        place: joined_record(text.encode(), snapshot.outputs.get(place))
        for place, text in snapshot.nodes.items()
        if place >= PLACES and text[0] in "CFX"
    }
    add_maps(run, stored, {b"%d" % place: end for place, end in snapshot.ends.items()}, records)
    for place, reference in left_out.items():
        index, item = split_place(place)
        items = run.nodes[index].items
        if item is None or items is None:
            continue
        items.outputs[item] = reference
        if run.nodes[index].status is NodeStatus.COMPLETED:
            size = MapCounts.parse(stored.maps[index]).output_size
            where = StoredOutput(reference.where.run, index)
            run.nodes[index].output = OutputReference(size, where)


async def _look(
    connection: PostgresConnection, run_id: str, room: ReadBudget
) -> tuple[RunSnapshot, dict[int, OutputReference]] | None:
    """A run without its log, with the outputs that there is room for; and references to others.

    None if it is not archived.
    """
    sql = statements()
    found = await connection.fetchrow(sql["look_at_run"], run_id)
    if found is None:
        return None
    number, *columns, last_seq, meta, sha256, content = found
    row = (*columns, meta, sha256, content)
    snapshot = _snapshot(run_id, row, first_seq=last_seq + 1, events=[])
    left_out: dict[int, OutputReference] = {}
    nodes = await connection.fetch(sql["look_at_nodes"], number, *room)
    for index, state, ends, size, output in nodes:
        _add_node(snapshot, index, state, output, ends)
        if output is None and size is not None:
            left_out[index] = OutputReference(size, StoredOutput(number, index))
    return snapshot, left_out


async def _read(connection: PostgresConnection, run_id: str) -> RunSnapshot | None:
    sql = statements()
    found = await connection.fetchrow(sql["read_run"], run_id)
    if found is None:
        return None
    number, *columns, result, log_seq, meta, sha256, content = found
    log = await connection.fetch(sql["read_events"], number, 0, None)
    events = [event for place, (seq, event) in enumerate(log, 1) if seq == place]
    row = (*columns, meta, sha256, content)
    snapshot = _snapshot(run_id, row, first_seq=1, events=events, result=result)
    if log_seq:
        snapshot.meta["log_base"] = str(log_seq)
    for index, state, output, ends in await connection.fetch(sql["read_nodes"], number):
        _add_node(snapshot, index, state, output, ends)
    return snapshot
