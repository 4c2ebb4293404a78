"""The archive: what became of every run, for good, in PostgreSQL.

A run is archived as Redis keeps it, byte for byte, so that it can be put back there. Any number of
archivers may write the same run, late and repeatedly: a snapshot that is older than what is kept
adds events and changes nothing else. What it must not know: any rule, or when to archive.

Redis may come back without the end of its log. Then numbers of events are used a second time, and
who notices that, or restores a run from here, goes on under the next *generation*. A generation
replaces the log of those before it from its first event on, unless the run was finished: what is
finished here stays so until a retry opens a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from dovetail.stores.postgres_pool import Connection, PostgresPool, statements
from dovetail.stores.redis_moves import time_text

PIECE_BYTES = 4 << 20
"""Of one statement: outputs may be a megabyte each, and there may be thousands."""
PIECE_ROWS = 10_000
ROW_BYTES = 64
"""What a row weighs beside its values."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as its keys in Redis have it at one moment, and a piece of its log up to then.

    A node that is in `nodes` is meant whole: without its output here, it has none. One that is
    not has not changed since before `first_seq`; the first of a generation must have them all.
    """

    run_id: str
    generation: int
    """From 1."""
    meta: dict[str, str]
    nodes: dict[int, str]
    """By place, as are the outputs and ends."""
    outputs: dict[int, bytes]
    ends: dict[int, bytes]
    first_seq: int
    events: Sequence[bytes]
    """From `first_seq` on, without a gap."""
    result: Any = None
    content: bytes | None = None
    """The definition. Only needed for a run that was never accepted here."""

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1

    @property
    def finished_at(self) -> float | None:
        return float(self.meta["finished_at"]) if self.meta.get("finished_at") else None


class Kept(NamedTuple):
    """How far the archive is with a run.

    After a write: of another generation than the snapshot, it refused that one for good, because
    it has a newer one or the run is finished. With an earlier event, it lacks those in between.
    """

    generation: int
    """Zero: accepted, and nothing seen of it since."""
    last_seq: int
    finished: bool


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
    def kept(self) -> Kept:
        return Kept(self.generation, self.last_seq, self.finished_at is not None)


class PostgresArchive:
    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool

    # ── writing ──────────────────────────────────────────────────────────────────────────

    async def write(self, snapshot: RunSnapshot) -> Kept | None:
        """Keep it. None if neither the run nor its definition is known: say its `content`."""
        return (await self.write_many([snapshot])).get(snapshot.run_id)

    async def write_many(self, snapshots: Sequence[RunSnapshot]) -> dict[str, Kept]:
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
        if not await self.kept([run_id]):
            return None
        return await self._pool.look(lambda connection: _read(connection, run_id))

    async def kept(self, run_ids: Iterable[str]) -> dict[str, Kept]:
        """How far it is with these; those that it does not know are not among them."""
        rows = await self._pool.rows("kept", list(run_ids))
        return {run_id: Kept(*rest) for run_id, *rest in rows}

    async def generation(self, run_id: str) -> int:
        """The one that is kept of a run; zero if none is."""
        found = (await self.kept([run_id])).get(run_id)
        return 0 if found is None else found.generation

    async def unfinished(
        self, created_before: float, limit: int = 1000, after: str | None = None
    ) -> list[str]:
        """A page of those that were accepted before then and are not finished, oldest first;
        the next one comes `after` the last of this."""
        rows = await self._pool.rows("unfinished", created_before, after, limit)
        return [run_id for (run_id,) in rows]


# ── a snapshot is written ────────────────────────────────────────────────────────────────


async def _write(connection: Connection, snapshots: dict[str, RunSnapshot]) -> dict[str, Kept]:
    rows = await _locked(connection, snapshots)
    if unknown := [snapshots[run_id] for run_id in snapshots if run_id not in rows]:
        for snapshot in unknown:
            await _add_run(connection, snapshot)
        rows = await _locked(connection, snapshots)
    found = {run_id: row.kept for run_id, row in rows.items()}
    pairs = [(row, snapshots[run_id]) for run_id, row in rows.items()]
    newer = [(row, snapshot) for row, snapshot in pairs if _is_newer(row, snapshot)]
    accepted = [(row, snapshot) for row, snapshot in newer if _follows(row, snapshot)]
    # One that leaves a gap comes again, whole. One that is refused is history all the same.
    gaps = {snapshot.run_id for row, snapshot in newer if not _follows(row, snapshot)}
    await _add_events(connection, [pair for pair in pairs if pair[1].run_id not in gaps])
    await _begin_generations(connection, accepted)
    await _save_nodes(connection, accepted)
    await _project(connection, accepted)
    for row, snapshot in accepted:
        finished = snapshot.finished_at is not None
        found[row.run_id] = Kept(snapshot.generation, snapshot.last_seq, finished)
    return found


def _is_newer(row: _Row, snapshot: RunSnapshot) -> bool:
    other_end = snapshot.generation != row.generation or snapshot.finished_at is None
    if row.finished_at is not None and int(snapshot.meta["epoch"]) <= row.epoch and other_end:
        return False  # only a late event of the same log is welcome
    return (snapshot.generation, snapshot.last_seq) >= (row.generation, row.last_seq)


def _follows(row: _Row, snapshot: RunSnapshot) -> bool:
    return snapshot.first_seq <= row.last_seq + 1


async def _locked(connection: Connection, run_ids: Iterable[str]) -> dict[str, _Row]:
    rows = await connection.fetch(statements()["lock_runs"], list(run_ids))
    return {row["run_id"]: _Row(*row) for row in rows}


async def _add_run(connection: Connection, snapshot: RunSnapshot) -> None:
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
    )


_Accepted = Sequence[tuple[_Row, RunSnapshot]]


async def _add_events(connection: Connection, pairs: _Accepted) -> None:
    events = (
        (row.number, snapshot.generation, seq, event)
        for row, snapshot in pairs
        for seq, event in enumerate(snapshot.events, snapshot.first_seq)
    )
    for columns in _pieces(events):
        await connection.execute(statements()["add_events"], *columns)


async def _begin_generations(connection: Connection, accepted: _Accepted) -> None:
    begun = [
        (row.number, snapshot.generation, snapshot.first_seq)
        for row, snapshot in accepted
        if snapshot.generation != row.generation
    ]
    if begun:
        columns = [list(column) for column in zip(*begun, strict=True)]
        await connection.execute(statements()["begin_generations"], *columns)
        await connection.execute(statements()["forget_nodes"], columns[0])


async def _save_nodes(connection: Connection, accepted: _Accepted) -> None:
    nodes = (
        (
            row.number,
            place,
            state.encode(),
            snapshot.outputs.get(place),
            snapshot.ends.get(place),
        )
        for row, snapshot in accepted
        for place, state in snapshot.nodes.items()
    )
    for columns in _pieces(nodes):
        await connection.execute(statements()["save_nodes"], *columns)


async def _project(connection: Connection, accepted: _Accepted) -> None:
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
            None if snapshot.finished_at is None else orjson.dumps(snapshot.result),
            orjson.dumps({k: v for k, v in snapshot.meta.items() if k not in _COLUMNS}),
        )
        for row, snapshot in accepted
    ]
    for columns in _pieces(projections):
        await connection.execute(statements()["project_runs"], *columns)


async def _names(connection: Connection, accepted: _Accepted) -> dict[int, list[str]]:
    """The nodes of those definitions that an error is to be told of."""
    wanted = {row.definition for row, snapshot in accepted if snapshot.meta.get("error")}
    if not wanted:
        return {}
    rows = await connection.fetch(statements()["read_definitions"], list(wanted))
    return {number: [n["id"] for n in orjson.loads(content)["nodes"]] for number, content in rows}


def _error(snapshot: RunSnapshot, names: Sequence[str]) -> bytes | None:
    """As everybody sees it: with the name of its node, which Redis knows by its place."""
    if not snapshot.meta.get("error"):
        return None
    told = orjson.loads(snapshot.meta["error"])
    return orjson.dumps({**told["error"], "node": names[told["at"]]})


def _pieces(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[list[Any]]]:
    """Columns of so many rows as one statement may carry, until all are told."""
    piece: list[tuple[Any, ...]] = []
    weight = 0
    for row in rows:
        piece.append(row)
        weight += ROW_BYTES + sum(len(value) for value in row if isinstance(value, bytes))
        if weight >= PIECE_BYTES or len(piece) >= PIECE_ROWS:
            yield [list(column) for column in zip(*piece, strict=True)]
            piece, weight = [], 0
    if piece:
        yield [list(column) for column in zip(*piece, strict=True)]


# ── and read ─────────────────────────────────────────────────────────────────────────────

_COLUMNS = frozenset({"workflow", "version", "definition", "retries", "params", "created_at"})
"""Of `meta`, what the trigger said: it has columns of its own."""


async def _read(connection: Connection, run_id: str) -> RunSnapshot:
    sql = statements()
    row = await connection.fetchrow(sql["read_run"], run_id)
    number, workflow, version, retries, params, created_at, *rest = row
    generation, result, meta, sha256, content = rest
    snapshot = RunSnapshot(
        run_id=run_id,
        generation=generation,
        meta={
            "workflow": workflow,
            "version": "" if version is None else str(version),
            "definition": sha256,
            "retries": retries.decode(),
            "params": params.decode(),
            "created_at": time_text(created_at),
            **({} if meta is None else orjson.loads(meta)),
        },
        nodes={},
        outputs={},
        ends={},
        first_seq=1,
        events=[
            event
            for place, (seq, event) in enumerate(
                await connection.fetch(sql["read_events"], number, 0), 1
            )
            if seq == place
        ],
        result=None if result is None else orjson.loads(result),
        content=content,
    )
    for place, state, output, ends in await connection.fetch(sql["read_nodes"], number):
        snapshot.nodes[place] = state.decode()
        if output is not None:
            snapshot.outputs[place] = output
        if ends is not None:
            snapshot.ends[place] = ends
    return snapshot
