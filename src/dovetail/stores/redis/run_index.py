"""Lists of runs by age, status, workflow and batch.

An index, not the truth: a run's own keys decide. Lists are in other slots than runs, so they are
written beside a run's script, not within it. `refresh` reads a run and lists it accordingly, as
often as needed. It is called for every run that was created or changed its status, before the run
leaves the timer index: if the caller dies in between, the sweep finds the run there. `begun` and
`ended` list a run without reading it, and check afterwards. A reader of a list checks each run, so
it never shows a wrong status.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple, TypeVar

from dovetail.core.errors import InvalidParams, Problem
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Submit
from dovetail.engine.ports import RunTally
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.records import weight
from dovetail.stores.redis.codec import source

RUNS = "wf:list:{runs}"
WORKFLOWS = "wf:workflows"
"""Every name that was ever registered: one that was deleted still has a number to go on from."""
_BATCHES = "wf:batch:"
ALL_BATCHES = "wf:batches:{all}"
"""Their ids behind the time at which they were made."""
BATCH_IDS = "wf:batches:{ids}"
"""The same in the order of the alphabet, to be found by a beginning."""
STATUSES = [status.value for status in RunStatus if status is not RunStatus.PENDING]
"""A run is stored once it was started."""
RUNNING = RunStatus.RUNNING.value
NOT_RUNNING = [status for status in STATUSES if status != RUNNING]
"""The statuses of which a batch has lists, beside the list of all: its other runs are running."""
OPEN = "open"
"""A workflow's list of the runs of its versions that are not finished. In its list of running ones
are only runs of an unregistered definition, which may have the same name."""
Read = Sequence[Any]
"""What Redis answers to `_reading`."""
ORIGIN_FIELDS = ("created_at", "workflow", "batch", "place", "version")
"""What `origin` takes."""
_MOVING = ("status", "finished_at", "epoch")
_FACTS = (*_MOVING, *ORIGIN_FIELDS)
_RUNNING = RUNNING.encode()
_ALL_RUNNING = f"{RUNS}:{RUNNING}"
_ENTRY = re.compile(r"[0-9]{25}-.+", re.DOTALL)
BATCH_SIZE = 500
FIRST_PAGE = 101
"""So many at first, where it is not known yet how many fit."""
T = TypeVar("T")


def workflow_key(name: str) -> str:
    return f"wf:workflow:{{{name}}}"


def batch_key(batch_id: str) -> str:
    return f"{_BATCHES}{{{batch_id}}}"


def batch_entry(batch_id: str, created_at: float) -> str:
    """In the order of the alphabet, entries are in the order of time."""
    return f"{_stamp(created_at)}{0:08d}-{batch_id}"


def batch_number(batch_id: str) -> int:
    """Its id, read as a number: so no mapping has to be stored."""
    return int.from_bytes(batch_id.encode(), "big")


@lru_cache(64)
def batch_of(number: int) -> str:
    return number.to_bytes((number.bit_length() + 7) // 8, "big").decode()


class RunOrigin(NamedTuple):
    """What of a run never changes and says where it is listed."""

    created_at: float
    workflow: str
    batch: str | None
    place: int
    registered: bool

    @classmethod
    def of(cls, submit: Submit, created_at: float) -> RunOrigin:
        batch, place = None, 0
        if submit.place is not None:
            batch, place = batch_of(submit.place[0]), submit.place[1]
        return cls(created_at, submit.graph.name, batch, place, submit.version is not None)

    def entry(self, run_id: str) -> str:
        """In the order of the alphabet, entries are in the order of time and place."""
        return f"{_stamp(self.created_at)}{self.place:08d}-{run_id}"


@lru_cache(64)
def _stamp(created_at: float) -> str:
    return f"{int(created_at * 1e6):017d}"


def run_id_of(entry: bytes) -> str:
    return entry[26:].decode()


def origin(
    created_at: bytes,
    workflow: bytes,
    batch: bytes | None,
    place: bytes | None,
    version: bytes | None,
) -> RunOrigin:
    batch_id = None if batch is None else batch.decode()
    return RunOrigin(float(created_at), workflow.decode(), batch_id, int(place or 0), bool(version))


class RunFacts(NamedTuple):
    """What of a run decides where it is listed."""

    status: str
    finished_at: float | None
    epoch: int
    origin: RunOrigin


class _Kind(NamedTuple):
    """What runs have in common that go into the same lists and out of the same."""

    status: str
    finished: bool
    registered: bool
    workflow: str
    batch: str | None
    listed: bool
    """As one that there is; for the rest see `_changes`."""


_Named = tuple[str, str, str]
"""Of a run: its id, its entry, when it ended."""


class RunIndex:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis

    # ── written ──────────────────────────────────────────────────────────────────────────

    async def refresh(self, run_ids: Iterable[str]) -> None:
        """List these runs as they are now."""
        for some in _some(list(dict.fromkeys(run_ids))):
            await self._refresh_some(some)

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        """List runs that were made just now: what is known of them need not be read."""
        for some in _some(submits):
            await self._list_begun(some, created_at)

    async def ended(self, ends: Mapping[str, RunFacts]) -> None:
        """List runs that ended just now, in their first epoch, as it is known how."""
        for some in _some(list(ends.items())):
            await self._list_ended(some)

    async def _list_begun(self, submits: Sequence[Submit], created_at: float) -> None:
        new = [
            (one.run_id, RunFacts(RUNNING, None, 1, RunOrigin.of(one, created_at)), False)
            for one in submits
        ]
        reading = [_status(one.run_id) for one in submits]
        _, answers = await self._list_and_read(new, reading)
        # Runs that have moved on meanwhile: no caller waited for this.
        await self.refresh(
            one.run_id for one, now in zip(submits, answers, strict=True) if now != _RUNNING
        )

    async def _list_ended(self, ends: Sequence[tuple[str, RunFacts]]) -> None:
        reading: list[Command] = [
            ("HGET", f"wf:{{{run_id}}}:meta", "finished_at") for run_id, _ in ends
        ]
        moved, answers = await self._list_and_read([(*end, True) for end in ends], reading)
        # It was retried meanwhile, and this call has just undone the new listing.
        doubtful = [
            end
            for end, now in zip(ends, answers, strict=True)
            if now != _ended(end[1].finished_at).encode()
        ]
        await asyncio.gather(*(self._set_right(*end) for end in doubtful))
        if moved < len(ends):
            # The creator of a run died before listing it, or is about to list it.
            asked = [run_id for run_id, _ in ends]
            scores = await self._redis.call("ZMSCORE", f"{RUNS}:ids", *asked)
            await self.refresh(
                run_id for run_id, score in zip(asked, scores, strict=True) if score is None
            )

    async def _refresh_some(self, run_ids: Sequence[str]) -> None:
        """Most of them are new or have ended, once: that changes few lists, and the same ones."""
        reading = [_reading(run_id) for run_id in run_ids]
        *read, scores = await self._redis.call_many(
            [*reading, ("ZMSCORE", f"{RUNS}:ids", *run_ids)]
        )
        simple: list[tuple[str, RunFacts, bool]] = []
        doubtful: list[tuple[str, RunFacts]] = []
        for run_id, was, score in zip(run_ids, read, scores, strict=True):
            facts = _facts_of(was)
            if facts is None:
                continue
            if facts.epoch == 1:
                simple.append((run_id, facts, score is not None))
            else:
                doubtful.append((run_id, facts))
        # Read again: another one may have listed what came after, and we have just undone it.
        reading = [_reading(run_id, _MOVING) for run_id, _, _ in simple]
        _, again = await self._list_and_read(simple, reading)
        doubtful += [
            (run_id, facts)
            for (run_id, facts, _), now in zip(simple, again, strict=True)
            if now != _moving(*facts[:3])
        ]
        await asyncio.gather(*(self._set_right(*one) for one in doubtful))

    async def _list_and_read(
        self, runs: Sequence[tuple[str, RunFacts, bool]], reading: Sequence[Command]
    ) -> tuple[int, list[Any]]:
        """List runs as they were a moment ago, in their first epoch; of each, whether it is listed
        already. Returns how many were listed as running until now, and are not any more, and the
        answers to what is read behind that."""
        kinds: dict[tuple[str, bool, bool, str, str | None, bool], list[_Named]] = {}
        for run_id, (status, finished_at, _, birth), listed in runs:
            ended = _ended(finished_at)
            kind = (status, bool(ended), birth.registered, birth.workflow, birth.batch, listed)
            kinds.setdefault(kind, []).append((run_id, birth.entry(run_id), ended))
        writing = [
            change for kind, alike in kinds.items() for change in _changes(_Kind(*kind), alike)
        ]
        if self._redis.keeps_order:
            answers = await self._redis.call_many([*writing, *reading])
        else:  # it might be read before it is listed
            answers = [*await self._redis.call_many(writing), *await self._redis.call_many(reading)]
        moved = sum(
            answer
            for change, answer in zip(writing, answers, strict=False)
            if change[:2] == ("ZREM", _ALL_RUNNING)
        )
        return moved, answers[len(writing) :]

    async def _set_right(self, run_id: str, known: RunFacts) -> None:
        """Every list there is, until the run is listed as it is."""
        facts: RunFacts | None = known
        while facts is not None:
            await self._put(run_id, facts)
            again = _facts_of(await self._redis.call(*_reading(run_id)))
            if again is None:
                await self.take_out(run_id, facts.origin)
            if again == facts:
                return
            facts = again

    async def _put(self, run_id: str, facts: RunFacts) -> None:
        entry = facts.origin.entry(run_id)
        ended = _ended(facts.finished_at)
        turned = [(s, "0" if s == facts.status else "", entry) for s in NOT_RUNNING]
        running = (RUNNING, "0" if facts.status == RUNNING else "", entry)
        under_way = _under_way(facts.status, ended != "", facts.origin.registered)
        alive = [(name, "0" if name == under_way else "", entry) for name in (OPEN, RUNNING)]
        work = [
            self._list(RUNS, [*turned, running, ("ids", "0", run_id), ("finished", ended, run_id)]),
            self._list(workflow_key(facts.origin.workflow), [*turned, *alive]),
        ]
        if facts.origin.batch is not None:
            batch = batch_key(facts.origin.batch)
            own = [("all", "0", entry), *turned, ("finished", ended, run_id)]
            work.append(self._list(batch, own))
        await asyncio.gather(*work)

    async def take_out(self, run_id: str, origin: RunOrigin) -> None:
        """The run is no more. It stays in `finished`, where its end is found again."""
        entry = origin.entry(run_id)
        statuses = [(name, "", entry) for name in STATUSES]
        work = [
            self._list(workflow_key(origin.workflow), [*statuses, (OPEN, "", entry)]),
            self._list(RUNS, [*statuses, ("ids", "", run_id)]),
        ]
        if origin.batch is not None:
            own = [("all", "", entry), *statuses, ("finished", "", run_id)]
            work.append(self._list(batch_key(origin.batch), own))
        await asyncio.gather(*work)

    async def _list(self, where: str, lists: Sequence[tuple[str, str, str]]) -> None:
        keys = [f"{where}:{name}" for name, _, _ in lists]
        given: list[Argument] = [part for _, *places in lists for part in places]
        await self._redis.call_script(source("records_list"), keys, given)

    # ── read ─────────────────────────────────────────────────────────────────────────────

    async def page(
        self,
        where: str,
        status: str | None,
        limit: int,
        cursor: str | None,
        show: Callable[[str], Awaitable[dict[str, Any] | None]],
        heaviest: int | None = None,
    ) -> dict[str, Any]:
        """Runs of a list, newest first, as `show` makes them; None for one that is gone.

        With `heaviest` the page ends early where it has more bytes than that.
        """
        below = "+" if cursor is None else f"({_checked(cursor)}"
        found: list[tuple[bytes, dict[str, Any]]] = []
        misplaced = []
        left = heaviest
        while len(found) <= limit:
            wanted = min(limit + 1 - len(found), BATCH_SIZE)
            if left is not None and heaviest is not None:
                likely = left * len(found) // max(1, heaviest - left) if found else FIRST_PAGE
                wanted = max(1, min(wanted, likely))
            entries = await self._entries(where, status, below, wanted)
            shown = await asyncio.gather(*(show(run_id_of(entry)) for entry in entries))
            for entry, view in zip(entries, shown, strict=True):
                if view is None:
                    continue
                if status is not None and view["status"] != status:
                    misplaced.append(run_id_of(entry))
                    continue
                if left is not None:
                    if left < 0:
                        limit = min(limit, len(found))
                    left -= weight(view)
                found.append((entry, view))
            if len(entries) < wanted:
                break
            below = f"({entries[-1].decode()}"
        await self.refresh(misplaced)
        more = found[limit - 1][0].decode() if len(found) > limit else None
        return {"items": [view for _, view in found[:limit]], "next_cursor": more}

    async def _entries(self, where: str, status: str | None, below: str, limit: int) -> list[bytes]:
        """The next of a list; fewer than the limit if there are no more."""
        of_batch = where.startswith(_BATCHES)
        if status == RUNNING and of_batch:
            return await self._running(where, below, limit)
        if of_batch or (status is not None and status != RUNNING):
            return await self._newest(f"{where}:{status or 'all'}", below, limit)
        names = [status] if status else STATUSES
        if where != RUNS:
            names = [OPEN, *names]
        # Read as one: a run that changes its status meanwhile is in one of them, or in both.
        found = await self._redis.transaction(
            [_newest_of(f"{where}:{name}", below, limit) for name in names]
        )
        return sorted(set(chain.from_iterable(found)), reverse=True)[:limit]

    async def _running(self, batch: str, below: str, limit: int) -> list[bytes]:
        """The same of a batch, which has no list of these: each of its runs is asked."""
        found: list[bytes] = []
        while len(found) < limit:
            entries = await self._newest(f"{batch}:all", below, BATCH_SIZE)
            statuses = await self._redis.call_many([_status(run_id_of(one)) for one in entries])
            found += [one for one, now in zip(entries, statuses, strict=True) if now == _RUNNING]
            if len(entries) < BATCH_SIZE:
                break
            below = f"({entries[-1].decode()}"
        return found[:limit]

    async def _newest(self, key: str, below: str, limit: int) -> list[bytes]:
        found: list[bytes] = await self._redis.call(*_newest_of(key, below, limit))
        return found

    async def beginning_with(self, prefix: str, limit: int) -> list[str]:
        found = await self._redis.call(
            *("ZRANGEBYLEX", f"{RUNS}:ids", f"[{prefix}", f"[{prefix}\U0010ffff"),
            *("LIMIT", 0, limit),
        )
        return [run_id.decode() for run_id in found]

    async def batches_beginning_with(self, prefix: str, limit: int) -> list[str]:
        found = await self._redis.call(
            *("ZRANGEBYLEX", BATCH_IDS, f"[{prefix}", f"[{prefix}\U0010ffff"), *("LIMIT", 0, limit)
        )
        return [batch_id.decode() for batch_id in found]

    async def batches(self, limit: int, cursor: str | None) -> tuple[list[str], str | None]:
        """Newest first, and where the next page begins."""
        below = "+" if cursor is None else f"({_checked(cursor)}"
        entries = await self._newest(ALL_BATCHES, below, limit + 1)
        more = entries[limit - 1].decode() if len(entries) > limit else None
        return [run_id_of(entry) for entry in entries[:limit]], more

    async def count(self, where: str, name: str) -> int:
        return int(await self._redis.call("ZCARD", f"{where}:{name}"))

    async def counts(self, where: str, edges: Sequence[float]) -> RunTally:
        """By status, all runs of a list, and those created between each time and the next."""
        # In the list of open runs of a workflow are a few that failed and have not ended.
        names = [*STATUSES, OPEN] if where != RUNS else STATUSES
        ranges = [(f"[{_stamp(low)}", f"({_stamp(high)}") for low, high in pairwise(edges)]
        keys = [f"{where}:{name}" for name in names]
        commands: list[Command] = [("ZCARD", key) for key in keys]
        commands += [("ZLEXCOUNT", key, *within) for within in ranges for key in keys]
        answers = await self._redis.call_many(commands)
        rows = [
            dict(zip(names, answers[at : at + len(names)], strict=True))
            for at in range(0, len(answers), len(names))
        ]
        for row in rows:
            row[RUNNING] += row.pop(OPEN, 0)
        return RunTally(rows[0], rows[1:])

    async def last_end(self, where: str) -> float | None:
        """When the last of a list's finished runs ended."""
        found = await self._redis.call("ZREVRANGE", f"{where}:finished", 0, 0, "WITHSCORES")
        return float(found[1]) if found else None


def _reading(run_id: str, facts: Sequence[str] = _FACTS) -> Command:
    return ("HMGET", f"wf:{{{run_id}}}:meta", *facts)


def _status(run_id: str) -> Command:
    return ("HGET", f"wf:{{{run_id}}}:meta", "status")


def _newest_of(key: str, below: str, limit: int) -> tuple[Argument, ...]:
    return ("ZREVRANGEBYLEX", key, below, "-", "LIMIT", 0, limit)


def _facts_of(answer: Read) -> RunFacts | None:
    status, finished_at, epoch, *birth = answer
    if status is None:
        return None
    ended = float(finished_at) if finished_at else None
    return RunFacts(status.decode(), ended, int(epoch), origin(*birth))


@lru_cache(64)
def _moving(status: str, finished_at: float | None, epoch: int) -> Read:
    """What may change, as Redis has it: the same of many that ended together."""
    return [status.encode(), _ended(finished_at).encode(), b"%d" % epoch]


@lru_cache(64)
def _ended(finished_at: float | None) -> str:
    return "" if finished_at is None else repr(finished_at)


def _changes(kind: _Kind, runs: Sequence[_Named]) -> Iterator[Command]:
    """List runs in their first epoch: they are new, or were running until now."""
    ids, entries, ends = zip(*runs, strict=True)
    scored = _scored(entries)
    name = workflow_key(kind.workflow)
    batch = None if kind.batch is None else batch_key(kind.batch)
    # Into a list before out of another one: nothing is ever in none.
    if batch is not None and not kind.listed:
        yield ("ZADD", f"{batch}:all", *scored)
    if kind.status != RUNNING:
        wheres = [RUNS, name] if batch is None else [RUNS, name, batch]
        yield from (("ZADD", f"{where}:{kind.status}", *scored) for where in wheres)
    if under_way := _under_way(kind.status, kind.finished, kind.registered):
        yield ("ZADD", f"{name}:{under_way}", *scored)
    else:
        yield ("ZREM", f"{name}:{OPEN if kind.registered else RUNNING}", *entries)
    if kind.finished:  # after its status, so that counts never miss it
        wheres = [RUNS] if batch is None else [RUNS, batch]
        ended = _scored(ids, ends)
        yield from (("ZADD", f"{where}:finished", *ended) for where in wheres)
    if not kind.listed:  # after all of the above: a reader relies on it
        yield ("ZADD", f"{RUNS}:ids", *_scored(ids))
    # Last: a run in this list is listed everywhere.
    if kind.status == RUNNING:
        yield ("ZADD", _ALL_RUNNING, *scored)
    else:
        yield ("ZREM", _ALL_RUNNING, *entries)


def _under_way(status: str, finished: bool, registered: bool) -> str:
    """In which list of its workflow a run is while it is under way; empty: in none any more."""
    if registered:
        return "" if finished else OPEN
    return RUNNING if status == RUNNING else ""


def _scored(names: Sequence[str], scores: Iterable[str] = repeat("0")) -> list[str]:
    """As ZADD takes them."""
    return list(chain.from_iterable(zip(scores, names, strict=False)))


def _some(those: Sequence[T]) -> Iterator[Sequence[T]]:
    return (those[first : first + BATCH_SIZE] for first in range(0, len(those), BATCH_SIZE))


def _checked(cursor: str) -> str:
    if not _ENTRY.fullmatch(cursor) or not is_text(cursor):
        raise no_cursor(cursor)
    return cursor


def is_text(text: str) -> bool:
    """Whether it can be a name: half of a character, as JSON can say it, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def no_cursor(cursor: str) -> InvalidParams:
    message = f"'{cursor[:40]}' is no cursor; use the `next_cursor` of the page before"
    return InvalidParams([Problem("invalid_field", message, "cursor")])
