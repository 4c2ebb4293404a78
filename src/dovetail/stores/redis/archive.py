"""The archive's view of Redis: runs to archive, archived runs, and snapshots.

The queue has hints, not the truth: one too many costs a read, a missing one is found by the
archiver's sweep. A snapshot is read by one script at one moment, except outputs, which stay the
same within an epoch, and the definition. A restored run is written to staging keys first, in many
pieces, and then renamed at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.items import PLACES, split_place
from dovetail.core.step import STARTED, UNKNOWN_WORKER, counts_as_started
from dovetail.core.transitions import Submit
from dovetail.engine.clock import Clock
from dovetail.engine.distributed.archiver import (
    ArchiveClaim,
    ArchiveEntry,
    ArchiveHead,
    ArchiveState,
    HotReading,
    RunSnapshot,
)
from dovetail.redis_client.pipelined import Argument, PipelinedRedis
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import (
    PARTS,
    SEPARATOR,
    UNIT,
    all_keys_of,
    keys_of,
    new_nonce,
    node_status,
    pairs,
    source,
    take_counts,
    time_text,
    weight_text,
)
from dovetail.stores.redis.definitions import definition, stored_graph
from dovetail.stores.redis.items import (
    StoredMaps,
    joined_record,
    parsed_counts,
    places_in,
    recounted_maps,
    split_record,
)
from dovetail.stores.redis.logs import RedisLogs, log_keys_of
from dovetail.stores.redis.packed import packed_event, unpacked_event
from dovetail.stores.redis.scope import RedisOutputs, outputs_by_place
from dovetail.stores.redis.staging import STAGED_SECONDS, write_run
from dovetail.stores.redis.timers import ACTIVE

UNARCHIVED, ARCHIVED = "wf:unarchived", "wf:archived"
CLAIM_SECONDS = 5.0
"""After so long another archiver tries what one has claimed and not settled."""


def queueing(entries: Iterable[ArchiveEntry]) -> tuple[Argument, ...]:
    """The command that says since when the archive is behind with each run; none for no run."""
    flat = [part for run_id, since in entries for part in (repr(since), run_id)]
    # LT: a claim is later than now, and gives way to what moved during it.
    return ("ZADD", UNARCHIVED, "LT", *flat) if flat else ()


class RedisArchiveQueue:
    """Runs to archive; a `RunObserver` of an orchestrator."""

    every_move = True

    def __init__(self, redis: PipelinedRedis, clock: Clock) -> None:
        self._redis = redis
        self._clock = clock

    # ── what has moved ───────────────────────────────────────────────────────────────────

    async def moved(
        self,
        run_ids: Sequence[str],
        turned: Sequence[str] = (),
        ended: Mapping[str, Event | None] | None = None,
    ) -> None:
        """The archive is behind with these, from now on unless it was before."""
        await self._add(ArchiveEntry(run_id, self._clock()) for run_id in run_ids)

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        await self.moved([submit.run_id for submit in submits])

    async def _add(self, entries: Iterable[ArchiveEntry]) -> None:
        if command := queueing(entries):
            await self._redis.call(*command)

    async def claim(self, limit: int, rested: float = 0.0) -> list[ArchiveClaim]:
        """Some that moved so many seconds ago, oldest first; other archivers skip them for a
        while."""
        now = self._clock()
        until = now + CLAIM_SECONDS
        given: list[Argument] = [repr(now - rested), repr(until), limit]
        flat = await self._redis.call_script(source("archive_claim"), [UNARCHIVED], given)
        return [ArchiveClaim(name.decode(), float(since), until) for name, since in pairs(flat)]

    async def acknowledge(self, claims: Sequence[ArchiveClaim]) -> None:
        """The archive has them, as they were when they were claimed."""
        await self._strike(
            UNARCHIVED, [ArchiveEntry(claim.run_id, claim.until) for claim in claims]
        )

    async def give_back(self, claims: Sequence[ArchiveClaim]) -> None:
        """They wait as long as they did."""
        await self._add(ArchiveEntry(claim.run_id, claim.since) for claim in claims)

    async def lag(self) -> float:
        """For how many seconds the archive has been behind."""
        first = await self._redis.call("ZRANGE", UNARCHIVED, 0, 0, "WITHSCORES")
        return max(0.0, self._clock() - float(first[1])) if first else 0.0

    # ── what is archived for good ────────────────────────────────────────────────────────

    async def archived(self, entries: Sequence[ArchiveEntry]) -> None:
        """These are finished and kept: their hot state need not be, some time from then on."""
        if flat := [part for run_id, since in entries for part in (repr(since), run_id)]:
            # GT: one that was brought back stays longer than its end alone would have it.
            await self._redis.call("ZADD", ARCHIVED, "GT", *flat)

    async def archived_before(self, before: float, limit: int) -> list[ArchiveEntry]:
        flat = await self._redis.call(
            *("ZRANGEBYSCORE", ARCHIVED, "-inf", repr(before)),
            *("WITHSCORES", "LIMIT", 0, limit),
        )
        return [ArchiveEntry(name.decode(), float(since)) for name, since in pairs(flat)]

    async def forget(self, entries: Sequence[ArchiveEntry]) -> None:
        """They are not hot any more, or not finished; unless they were archived again since."""
        await self._strike(ARCHIVED, entries)

    async def _strike(self, key: str, entries: Sequence[ArchiveEntry]) -> None:
        if flat := [part for run_id, score in entries for part in (run_id, repr(score))]:
            await self._redis.call_script(source("remove_unchanged"), [key], flat)


PIECE_SIZE = 1000
"""Active runs that one command reads."""
MAX_BATCH_BYTES = 8 << 20
"""Of outputs of several runs; what has more than its share of it is read by itself."""
MARK_SECONDS = 2 * STAGED_SECONDS
"""So long a deleted run is not put back: longer than a restore takes that has read it before."""
STATE, EPOCH, ATTEMPT, TOKEN_ATTEMPT, NONCE, PHASE, UNTIL, LEASE, WORKER, BEGAN = (
    *(0, 1, 2, 4, 5, 8, 9, 10, 11, 12),
)
"""Positions of a node's fields that are used here."""
JSON_NULL = b"null"
NOTHING = ArchiveState(0, 0, False)


class RedisSnapshots:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis
        self._definitions = Definitions()
        self._outputs = RedisOutputs(redis)
        self.logs = RedisLogs(redis).unarchived

    # ── out of Redis ─────────────────────────────────────────────────────────────────────

    async def lengths(self) -> AsyncIterator[dict[str, int]]:
        """How many events each active run has, some runs at a time."""
        cursor = b"0"
        while True:
            cursor, flat = await self._redis.call("ZSCAN", ACTIVE, cursor, "COUNT", PIECE_SIZE)
            run_ids = [name.decode() for name in flat[::2]]
            logs = [("LLEN", _keys(run_id)["events"]) for run_id in run_ids]
            counts = zip(run_ids, await self._redis.send(logs) if logs else (), strict=True)
            # A log that is none says nothing of the others.
            yield {run_id: count for run_id, count in counts if isinstance(count, int)}
            if cursor == b"0":
                return

    async def known(self, run_ids: Sequence[str]) -> set[str]:
        """Which of these runs Redis has."""
        asked = [("HEXISTS", _keys(run_id)["meta"], "status") for run_id in run_ids]
        there = await self._redis.call_many(asked)
        return {run_id for run_id, found in zip(run_ids, there, strict=True) if found}

    async def finished(self, run_ids: Sequence[str]) -> list[str]:
        """Which of these runs are in Redis and have ended."""
        asked = [("HGET", _keys(run_id)["meta"], "finished_at") for run_id in run_ids]
        ended = await self._redis.call_many(asked)
        return [run_id for run_id, at in zip(run_ids, ended, strict=True) if at]

    async def read(
        self, heads: Mapping[str, ArchiveHead | None]
    ) -> AsyncIterator[dict[str, HotReading]]:
        """What each run has beyond a head, or everything; a run that is not there is left out. Some
        at a time: as many as have few outputs, and each other one by itself."""
        todo = dict(heads)
        while todo:
            readings = await self._states(todo)
            yield {one: reading for one, reading in readings.items() if not reading.continues}
            going_on = {
                one: reading.snapshot for one, reading in readings.items() if reading.continues
            }
            todo = {run_id: heads[run_id] for run_id in going_on}
            async for some in self._with_outputs(going_on):
                yield {snapshot.run_id: HotReading(snapshot, True) for snapshot in some}
                for snapshot in some:
                    del todo[snapshot.run_id]

    async def _states(self, heads: Mapping[str, ArchiveHead | None]) -> dict[str, HotReading]:
        asked = []
        for run_id, head in heads.items():
            keys = _keys(run_id)
            names = [keys[part] for part in ("meta", "nodes", "ends", "events")]
            names += (log_keys_of(run_id)[0], keys["maps"], keys["queue"])
            kept = NOTHING if head is None else head.kept
            epoch = 0 if head is None else head.epoch
            given: list[Argument] = [kept.last_seq, kept.generation, epoch]
            asked.append(self._redis.script_command(source("snapshot"), names, given))
        answers = zip(heads.items(), await self._redis.call_many(asked), strict=True)
        return {run_id: _reading(run_id, head, got) for (run_id, head), got in answers if got}

    async def _with_outputs(
        self, snapshots: Mapping[str, RunSnapshot]
    ) -> AsyncIterator[list[RunSnapshot]]:
        """These with their outputs, without runs that were retried or dropped meanwhile."""
        if not snapshots:
            return
        snapshots = await self._with_items(snapshots)
        wanted = {
            run_id: [
                i for i, state in snapshot.nodes.items() if i < PLACES and state.startswith("C|")
            ]
            for run_id, snapshot in snapshots.items()
        }
        if not wanted:
            return
        parts = await self._outputs.first(wanted, MAX_BATCH_BYTES // len(wanted))
        small: list[RunSnapshot] = []
        large: list[tuple[RunSnapshot, list[int]]] = []
        for run_id, part in parts.items():
            places = wanted[run_id]
            one = snapshots[run_id]
            one = replace(one, outputs={**one.outputs, **outputs_by_place(places, part.outputs)})
            if part.epoch != _epoch(one):
                continue
            if rest := places[len(part.outputs) :]:
                large.append((one, rest))
            elif (whole := await self._with_result(one)) is not None:
                small.append(whole)
        yield small
        for one, rest in large:
            more = await self._outputs.all(one.run_id, rest, _epoch(one))
            if more is not None:
                # A copy: what was given away is not to be kept until all the others are.
                filled = replace(one, outputs=one.outputs | more)
                if (whole := await self._with_result(filled)) is not None:
                    yield [whole]

    async def _with_items(self, snapshots: Mapping[str, RunSnapshot]) -> dict[str, RunSnapshot]:
        """These with the records of items that have ended, of which `ENDED_ITEM` stands for each;
        without runs that were retried or dropped meanwhile."""
        found: dict[str, RunSnapshot] = {}
        for run_id, one in snapshots.items():
            places = [place for place, state in one.nodes.items() if state == ENDED_ITEM]
            if places:
                records = await self._outputs.all(run_id, places, _epoch(one), key="items")
                if records is None:
                    continue
                nodes = {place: text for place, text in one.nodes.items() if text != ENDED_ITEM}
                outputs: dict[int, bytes] = {}
                for place, record in records.items():
                    head, output = split_record(record)
                    nodes[place] = head.decode()
                    if output is not None:
                        outputs[place] = output
                one = replace(one, nodes=nodes, outputs=outputs)
            found[run_id] = one
        return found

    async def _with_result(self, snapshot: RunSnapshot) -> RunSnapshot | None:
        """With its result, if it is finished. None if it was retried, or dropped, meanwhile."""
        if not snapshot.finished:
            return snapshot
        result = await self._result(snapshot)
        return None if result is None else replace(snapshot, result=result)

    async def _result(self, snapshot: RunSnapshot) -> bytes | None:
        """As `views.result` says it, made of the outputs as they are. None if these are of another
        epoch by now."""
        try:
            graph = await self._graph(snapshot)
        except LookupError:
            return JSON_NULL  # its definition is gone
        wanted = list(graph.exits) if graph.output_node is None else [graph.output_node]
        lacking = [index for index in wanted if index not in snapshot.outputs]
        more = await self._outputs.all(snapshot.run_id, lacking, _epoch(snapshot))
        if more is None:
            return None
        outputs = {**snapshot.outputs, **more}
        for index in wanted:
            if index not in outputs and graph.nodes[index].for_each is not None:
                text = await self._outputs.mapped_output(snapshot.run_id, index)
                is_done = snapshot.nodes.get(index, "C").startswith("C")
                outputs[index] = text if text is not None and is_done else JSON_NULL
        if graph.output_node is not None:
            return outputs.get(graph.output_node, JSON_NULL)
        fields = (
            b'"%s":%s' % (graph.nodes[index].id.encode(), outputs.get(index, JSON_NULL))
            for index in wanted
        )
        return b"{%s}" % b",".join(fields)

    async def _graph(self, snapshot: RunSnapshot) -> Graph:
        """Raises `LookupError` if its definition is gone."""
        retries, digest = snapshot.meta.get("retries", "{}").encode(), snapshot.meta["definition"]
        graph = await stored_graph(
            self._redis, self._definitions, digest, retries, snapshot.content
        )
        if graph is None:
            raise LookupError(f"the definition of run {snapshot.run_id} is not in Redis")
        return graph

    async def definition(self, snapshot: RunSnapshot) -> bytes:
        """The text of a run's definition."""
        content = await definition(self._redis, snapshot.meta["definition"])
        if content is None:
            raise LookupError(f"the definition of run {snapshot.run_id} is not in Redis")
        return content

    # ── into Redis ───────────────────────────────────────────────────────────────────────

    async def renumber(self, run_id: str, was: int, generation: int) -> None:
        """Continue its log under another generation, unless another process did."""
        given: list[Argument] = [was, generation]
        await self._redis.call_script(source("snapshot_generation"), [_keys(run_id)["meta"]], given)

    async def put_back(
        self,
        snapshot: RunSnapshot,
        lease_until: float,
        *,
        replacing: int | None = None,
        now: float = 0.0,
    ) -> bool:
        """Make the run as it was, its workers with a lease until then. False if it is there.

        At `now` those of its nodes count as started that may be: see `core/step.py`.

        `replacing` is the generation of a run in Redis whose place it takes, unless that was
        retried since.
        """
        graph = await self._graph(snapshot)
        content = snapshot.content or await self.definition(snapshot)
        parts = _parts(snapshot, graph, lease_until, now)
        digest = (snapshot.meta["definition"], content)
        return await write_run(
            self._redis,
            snapshot.run_id,
            parts,
            digest,
            epoch=snapshot.epoch,
            replacing=replacing,
        )

    async def drop(self, run_id: str, head: ArchiveHead) -> int:
        """Forget a run that the archive has: 1 it is gone, 0 it goes on, -1 it has more."""
        keys = _keys(run_id)
        names = [keys.pop("meta"), keys.pop("events"), *log_keys_of(run_id), *keys.values()]
        given: list[Argument] = [head.epoch, head.kept.generation, head.kept.last_seq]
        return int(await self._redis.call_script(source("snapshot_drop"), names, given))

    async def delete(self, run_id: str, head: ArchiveHead) -> int:
        """Delete a finished run that the archive has, and mark it, so that it is not put back: 1 it
        is gone, 0 it goes on, -1 it has more."""
        keys = _keys(run_id)
        first = [keys["meta"], keys["events"]]
        names = [*first, *(key for key in all_keys_of(run_id) if key not in first)]
        given: list[Argument] = [head.epoch, head.kept.generation, head.kept.last_seq, MARK_SECONDS]
        return int(await self._redis.call_script(source("snapshot_delete"), names, given))

    async def unmark(self, run_ids: Sequence[str]) -> None:
        """These may be put back again: the archive has not deleted them."""
        await self._redis.call_many(
            [("HDEL", _keys(run_id)["meta"], "dropped") for run_id in run_ids]
        )


def _reading(run_id: str, head: ArchiveHead | None, answer: Sequence[Any]) -> HotReading:
    """What `snapshot.lua` answered; the outputs are read later."""
    flat, count, has_logs, *rest = answer
    packed, nodes, ends, maps, queue, all_items = rest or ([], [], [], [], [], 0)
    events = [unpacked_event(text) for text in packed]
    fields, states = dict(pairs(flat)), dict(pairs(nodes))
    if states:
        fields |= take_counts(states)
    meta = {name.decode(): value.decode() for name, value in fields.items()}
    kept = NOTHING if head is None else head.kept
    continues = count >= kept.last_seq
    if continues and kept.last_seq:
        known, *events = events
        continues = head is not None and known == head.event
    snapshot = RunSnapshot(
        run_id=run_id,
        generation=int(meta.pop("generation", "1")),
        meta=meta,
        nodes={int(place): state.decode() for place, state in states.items()},
        outputs={},
        ends={int(place): end for place, end in pairs(ends)},
        first_seq=kept.last_seq + 1,
        events=events,
        has_logs=bool(has_logs),
        has_all_items=bool(all_items),
    )
    if maps:
        stored = StoredMaps.parse(maps, queue)
        snapshot.meta[MAPS] = stored.counts_text()
        touched = None if all_items else places_in(events)
        for place, text in stored.items(touched):
            snapshot.nodes[place] = ENDED_ITEM if text is None else text.decode()
    return HotReading(snapshot, continues)


MAPS = "maps"
"""The field of a run's `meta` that has the counts of its mapped nodes."""
ENDED_ITEM = "ended"
"""In place of the record of an item, until that is read."""


# ── a run as Redis wants it ──────────────────────────────────────────────────────────────


def _parts(snapshot: RunSnapshot, graph: Graph, lease_until: float, now: float) -> dict[str, Any]:
    """Every key of a run, made from what is archived of it.

    Some things move without an event, so the archive may not have heard: a lease is renewed, a
    node that was held back or waited is published. Counts are therefore made anew, and:
    - a live worker may hold a lease that is not archived, so each gets a new one;
    - whatever was published is offered again, and may run already: a new token makes that a
      start of which nothing counts any more;
    - but an at-most-once node that was queued is not: it counts as started, under its token, as
      `core.step.restore` has it.
    """
    nonce = str(new_nonce())
    nodes: dict[int, list[str]] = {}
    """Nodes, and items that are in flight."""
    records: dict[int, bytes] = {}
    """Items that have ended."""
    for place, text in snapshot.nodes.items():
        if place >= PLACES and text[0] in "CFX":
            records[place] = joined_record(text.encode(), snapshot.outputs.get(place))
        else:
            nodes[place] = text.split(SEPARATOR)
    active, held, started = 0, [], []
    for place in sorted(nodes, key=_order):
        fields = nodes[place]
        spec = graph.nodes[split_place(place)[0]]
        status, once = node_status(fields[STATE]), spec.at_most_once
        if spec.for_each is not None and place < PLACES:
            if fields[PHASE] == "H":
                fields[PHASE] = ""  # unless one of its items is held
        elif counts_as_started(status, once):
            active += 1
            started.append(_as_started(place, fields, lease_until, now))
        elif fields[STATE] == "R":
            active += 1
            fields[LEASE] = time_text(max(lease_until, float(fields[LEASE] or 0)))
        elif fields[PHASE] == "P":
            active += 1
            fields[NONCE] = nonce
        elif fields[PHASE] == "H":
            held.append(place)
    limit = int(snapshot.meta.get("limit", 0))
    while held and active < limit:
        fields = nodes[held.pop(0)]
        fields[PHASE], fields[NONCE] = "P", nonce
        active += 1
    owners = dict.fromkeys(split_place(place)[0] for place in held)
    for index in owners:
        nodes[index][PHASE] = "H"
    meta: dict[str, Any] = {**snapshot.meta, "generation": snapshot.generation}
    meta.pop("active", None)
    counts = parsed_counts(meta.pop(MAPS, "{}"))
    maps, queue = recounted_maps(counts, nodes, records)
    for index, fields in nodes.items():  # started with one of its items, just now
        if index in counts and fields[STATE] == "Q" and counts[index].running < maps[index].running:
            started.append(_map_started(index, fields, now))
    # Not as plain: whatever happens to it next says whether it is.
    states: dict[int | str, str] = {"counts": f"{meta.pop('unfinished')}|{active}|0"}
    meta.pop("kept_bytes", None)
    if (most := meta.pop("max_bytes", None)) is not None:
        states["counts"] += weight_text(sum(map(len, snapshot.outputs.values())), int(most))
    texts = {place: SEPARATOR.join(fields) for place, fields in nodes.items()}
    return {
        "meta": meta,
        "nodes": states | {place: text for place, text in texts.items() if place < PLACES},
        "deps": _counts(nodes, graph),
        "out": {place: text for place, text in snapshot.outputs.items() if place < PLACES},
        "ends": snapshot.ends,
        "events": [packed_event(text) for text in (*snapshot.events, *started)],
        "held": {str(index): index for index in owners},
        "maps": {index: one.text for index, one in maps.items()}
        | {place: text for place, text in texts.items() if place >= PLACES},
        "items": records,
        "queue": queue,
    }


def _order(place: int) -> tuple[int, int]:
    index, item = split_place(place)
    return index, -1 if item is None else item


def _map_started(index: int, fields: list[str], now: float) -> bytes:
    """An item of the node counts as started, and so does the node; the event that says so."""
    fields[STATE], fields[ATTEMPT], fields[BEGAN] = "R", "1", time_text(now)
    return orjson.dumps([now, "node.started", int(fields[EPOCH]), index, 1, {"worker": None}])


def _as_started(place: int, fields: list[str], lease_until: float, now: float) -> bytes:
    """The node's fields become those of one that runs; the event that says so."""
    fields[STATE], fields[PHASE], fields[UNTIL] = "R", "", ""
    fields[ATTEMPT] = fields[TOKEN_ATTEMPT]
    fields[LEASE], fields[WORKER], fields[BEGAN] = (
        *(time_text(lease_until), UNKNOWN_WORKER, time_text(now)),
    )
    epoch, attempt = int(fields[EPOCH]), int(fields[TOKEN_ATTEMPT])
    return orjson.dumps([now, "node.started", epoch, place, attempt, STARTED])


def _counts(nodes: dict[int, list[str]], graph: Graph) -> dict[int, int]:
    """Of each node that waits, its parents that are settled."""
    states = [nodes[i][STATE] if i in nodes else "W" for i in range(len(graph.nodes))]
    # A failed parent of a node that still waits: its failure is allowed.
    worth = {"C": UNIT + 1, "F": UNIT + 1, "S": UNIT}
    counts = {
        index: sum(worth.get(states[parent], 0) for parent in spec.parents)
        for index, spec in enumerate(graph.nodes)
        if states[index] == "W"
    }
    return {index: count for index, count in counts.items() if count}


def _epoch(snapshot: RunSnapshot) -> bytes:
    return snapshot.meta["epoch"].encode()


def _keys(run_id: str) -> dict[str, str]:
    return dict(zip(PARTS, keys_of(run_id), strict=True))
