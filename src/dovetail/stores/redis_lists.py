"""Which runs there are: lists of them in Redis by age, status, workflow and batch.

Indexes, not truth: a run is what its own keys say. Lists are in other slots than runs, so they are
written beside a run's script and not within it. `refresh` reads the run and lists it accordingly,
as often as one likes; it is called for whatever was made or changed its status, before that run
leaves the agenda: should its caller die in between, the sweep finds the run there. Who reads a
list looks at each run as well, so that nobody is shown a status that is no longer true.

What it must not know: any rule.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from dovetail.core.errors import InvalidParams, Problem
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Submit
from dovetail.pipe import Argument, Command, Pipe

RUNS = "wf:list:{runs}"
STATUSES = [status.value for status in RunStatus if status is not RunStatus.PENDING]
"""A run is stored once it was started."""
RUNNING = RunStatus.RUNNING.value.encode()
Read = Sequence[Any]
"""What Redis answers to `_reading`."""
_MOVING = ("status", "finished_at", "epoch")
_FACTS = (*_MOVING, "version", "created_at", "workflow", "batch", "place")
_BEGUN = [RUNNING, b"", b"1"]
_ENTRY = re.compile(r"[0-9]{25}-.+", re.DOTALL)
AT_ONCE = 500


def workflow_key(name: str) -> str:
    return f"wf:workflow:{{{name}}}"


def batch_key(batch_id: str) -> str:
    return f"wf:batch:{{{batch_id}}}"


def batch_number(batch_id: str) -> int:
    """Its id, read as a number: so there is nothing to keep that tells one from the other."""
    return int.from_bytes(batch_id.encode(), "big")


def batch_of(number: int) -> str:
    return number.to_bytes((number.bit_length() + 7) // 8, "big").decode()


@cache
def source(name: str) -> str:
    return resources.files("dovetail.stores").joinpath("lua", f"{name}.lua").read_text("utf-8")


class Born(NamedTuple):
    """What of a run never changes and says where it is listed."""

    created_at: float
    workflow: str
    batch: str | None
    place: int

    def entry(self, run_id: str) -> str:
        return _entry(run_id, self.created_at, self.place)


def _entry(run_id: str, created_at: float, place: int) -> str:
    """In the order of the alphabet, entries are in the order of time and place."""
    return f"{int(created_at * 1e6):017d}{place:08d}-{run_id}"


def run_id_of(entry: bytes) -> str:
    return entry[26:].decode()


def born(created_at: bytes, workflow: bytes, batch: bytes | None, place: bytes | None) -> Born:
    batch_id = None if batch is None else batch.decode()
    return Born(float(created_at), workflow.decode(), batch_id, int(place or 0))


class Facts(NamedTuple):
    """What of a run decides where it is listed."""

    status: str
    finished_at: float | None
    epoch: int
    registered: bool
    born: Born


class _Kind(NamedTuple):
    """What runs have in common that go into the same lists and out of the same."""

    status: bytes
    finished: bool
    registered: bool
    workflow: bytes
    batch: bytes | None
    listed: bool
    """As one that there is; for the rest see `_changes`."""


class RunLists:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    # ── written ──────────────────────────────────────────────────────────────────────────

    async def refresh(self, run_ids: Iterable[str]) -> None:
        """List these runs as they are now."""
        known = list(dict.fromkeys(run_ids))
        for first in range(0, len(known), AT_ONCE):
            await self._refresh_some(known[first : first + AT_ONCE])

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        """List runs that were made just now: what is known of them need not be read."""
        for first in range(0, len(submits), AT_ONCE):
            await self._list_begun(submits[first : first + AT_ONCE], repr(created_at).encode())

    async def _list_begun(self, submits: Sequence[Submit], created_at: bytes) -> None:
        kinds: dict[_Kind, list[tuple[str, Read]]] = {}
        for submit in submits:
            batch, place = None, 0
            if submit.place is not None:
                batch, place = batch_of(submit.place[0]).encode(), submit.place[1]
            workflow, version = submit.graph.name.encode(), submit.version
            kind = _Kind(RUNNING, False, version is not None, workflow, batch, False)
            read = (*_BEGUN, version, created_at, workflow, batch, place)
            kinds.setdefault(kind, []).append((submit.run_id, read))
        writing = [change for kind, runs in kinds.items() for change in _changes(kind, runs)]
        reading = [_reading(submit.run_id, _MOVING) for submit in submits]
        answers = (await self._pipe.many([*writing, *reading]))[len(writing) :]
        # Those that have moved on meanwhile, as nobody waited for this.
        await self.refresh(
            submit.run_id for submit, now in zip(submits, answers, strict=True) if now != _BEGUN
        )

    async def _refresh_some(self, run_ids: Sequence[str]) -> None:
        """Most of them are new or have ended, once: that changes few lists, and the same ones."""
        reading = [_reading(run_id) for run_id in run_ids]
        *read, scores = await self._pipe.many([*reading, ("ZMSCORE", f"{RUNS}:ids", *run_ids)])
        kinds: dict[_Kind, list[tuple[str, Read]]] = {}
        simple: list[tuple[str, Read]] = []
        doubtful: list[tuple[str, Read]] = []
        for run_id, was, score in zip(run_ids, read, scores, strict=True):
            status, finished_at, epoch, version, _, workflow, batch, _ = was
            if status is None:
                continue
            if epoch != b"1":
                doubtful.append((run_id, was))
                continue
            listed = score is not None
            kind = _Kind(status, bool(finished_at), bool(version), workflow, batch, listed)
            kinds.setdefault(kind, []).append((run_id, was))
            simple.append((run_id, was))
        writing = [change for kind, runs in kinds.items() for change in _changes(kind, runs)]
        # Read again behind the changes: another one may have listed what came after, and we have
        # just undone it.
        reading = [_reading(run_id, _MOVING) for run_id, _ in simple]
        answers = await self._pipe.many([*writing, *reading])
        again = zip(simple, answers[len(writing) :], strict=True)
        doubtful += [(run_id, was) for (run_id, was), now in again if now != was[: len(_MOVING)]]
        await asyncio.gather(*(self._set_right(run_id, was) for run_id, was in doubtful))

    async def _set_right(self, run_id: str, known: Read) -> None:
        """Every list there is, until the run is listed as it is."""
        facts = _facts_of(known)
        while facts is not None:
            await self._put(run_id, facts)
            again = _facts_of(await self._pipe.call(*_reading(run_id)))
            if again is None:
                await self.take_out(run_id, facts.born)
            if again == facts:
                return
            facts = again

    async def _put(self, run_id: str, facts: Facts) -> None:
        entry = facts.born.entry(run_id)
        ended = "" if facts.finished_at is None else repr(facts.finished_at)
        is_open = facts.registered and facts.finished_at is None
        by_status = [(s, "0" if s == facts.status else "", entry) for s in STATUSES]
        common = [("all", "0", entry), *by_status]
        work = [
            self._list(RUNS, [*common, ("ids", "0", run_id), ("finished", ended, run_id)]),
            self._list(
                workflow_key(facts.born.workflow),
                [*common, ("open", "0" if is_open else "", run_id)],
            ),
        ]
        if facts.born.batch is not None:
            batch = batch_key(facts.born.batch)
            work.append(self._list(batch, [*common, ("finished", ended, run_id)]))
        await asyncio.gather(*work)

    async def take_out(self, run_id: str, born: Born) -> None:
        """The run is no more. It stays in `finished`, where its end is found again."""
        entry = born.entry(run_id)
        common = [(name, "", entry) for name in ("all", *STATUSES)]
        work = [
            self._list(workflow_key(born.workflow), [*common, ("open", "", run_id)]),
            self._list(RUNS, [*common, ("ids", "", run_id)]),
        ]
        if born.batch is not None:
            work.append(self._list(batch_key(born.batch), [*common, ("finished", "", run_id)]))
        await asyncio.gather(*work)

    async def _list(self, where: str, lists: Sequence[tuple[str, str, str]]) -> None:
        keys = [f"{where}:{name}" for name, _, _ in lists]
        given: list[Argument] = [part for _, *places in lists for part in places]
        await self._pipe.script(source("records_list"), keys, given)

    # ── read ─────────────────────────────────────────────────────────────────────────────

    async def page(
        self,
        where: str,
        status: str | None,
        limit: int,
        cursor: str | None,
        show: Callable[[str], Awaitable[dict[str, Any] | None]],
    ) -> dict[str, Any]:
        """Runs of a list, newest first, as `show` makes them; None for one that is gone."""
        key = f"{where}:{status or 'all'}"
        below = "+" if cursor is None else f"({_checked(cursor)}"
        found: list[tuple[bytes, dict[str, Any]]] = []
        misplaced = []
        while len(found) <= limit:
            wanted = min(limit + 1 - len(found), AT_ONCE)
            entries = await self._pipe.call("ZREVRANGEBYLEX", key, below, "-", "LIMIT", 0, wanted)
            shown = await asyncio.gather(*(show(run_id_of(entry)) for entry in entries))
            for entry, view in zip(entries, shown, strict=True):
                if view is None:
                    continue
                if status is None or view["status"] == status:
                    found.append((entry, view))
                else:
                    misplaced.append(run_id_of(entry))
            if len(entries) < wanted:
                break
            below = f"({entries[-1].decode()}"
        await self.refresh(misplaced)
        more = found[limit - 1][0].decode() if len(found) > limit else None
        return {"items": [view for _, view in found[:limit]], "next_cursor": more}

    async def beginning_with(self, prefix: str, limit: int) -> list[str]:
        found = await self._pipe.call(
            *("ZRANGEBYLEX", f"{RUNS}:ids", f"[{prefix}", f"[{prefix}\U0010ffff"),
            *("LIMIT", 0, limit),
        )
        return [run_id.decode() for run_id in found]

    async def count(self, where: str, name: str) -> int:
        return int(await self._pipe.call("ZCARD", f"{where}:{name}"))

    async def last_end(self, where: str) -> float | None:
        """When the last of a list's finished runs ended."""
        found = await self._pipe.call("ZREVRANGE", f"{where}:finished", 0, 0, "WITHSCORES")
        return float(found[1]) if found else None


def _reading(run_id: str, facts: Sequence[str] = _FACTS) -> Command:
    return ("HMGET", f"wf:{{{run_id}}}:meta", *facts)


def _facts_of(answer: Read) -> Facts | None:
    status, finished_at, epoch, version, *birth = answer
    if status is None:
        return None
    ended = float(finished_at) if finished_at else None
    return Facts(status.decode(), ended, int(epoch), bool(version), born(*birth))


def _changes(kind: _Kind, runs: Sequence[tuple[str, Read]]) -> Iterator[Command]:
    """List runs in their first epoch: they are new, or were running until now."""
    ids = [run_id for run_id, _ in runs]
    entries = [_entry(run_id, float(read[4]), int(read[7] or 0)) for run_id, read in runs]
    scored = [part for entry in entries for part in ("0", entry)]
    name = workflow_key(kind.workflow.decode())
    wheres = [RUNS, name]
    if kind.batch is not None:
        wheres.append(batch_key(kind.batch.decode()))
    # Into a list before out of another one: nothing is ever in none.
    for where in wheres:
        yield ("ZADD", f"{where}:{kind.status.decode()}", *scored)
        if not kind.listed:
            yield ("ZADD", f"{where}:all", *scored)
    if kind.registered and not kind.finished:
        yield ("ZADD", f"{name}:open", *(part for run_id in ids for part in ("0", run_id)))
    if kind.status != RUNNING:
        yield from (("ZREM", f"{where}:{RUNNING.decode()}", *entries) for where in wheres)
    if kind.finished:  # behind its status: who counts it here first counts that right
        ended = [part for run_id, read in runs for part in (read[1], run_id)]
        yield from (("ZADD", f"{where}:finished", *ended) for where in wheres if where != name)
        if kind.registered:
            yield ("ZREM", f"{name}:open", *ids)
    if not kind.listed:  # last: who finds it here takes the rest for granted
        yield ("ZADD", f"{RUNS}:ids", *(part for run_id in ids for part in ("0", run_id)))


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
