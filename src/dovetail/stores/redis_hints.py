"""Which runs the archive may be behind with, and which ones it has for good.

Hints, not truth: one too many costs a look at a run, one too few is found by the archiver's
sweep. They have keys of their own, outside every run's slot. What it must not know: what a
run is, or how it is archived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dovetail.core.events import Event
from dovetail.core.transitions import Submit
from dovetail.engine.archiver import Claim, Entry
from dovetail.engine.clock import Clock
from dovetail.pipe import Argument, Pipe
from dovetail.stores.redis_lists import source

UNARCHIVED, ARCHIVED = "wf:unarchived", "wf:archived"
CLAIM_SECONDS = 5.0
"""After so long another archiver tries what one has claimed and not settled."""


class RedisHints:
    """Is told what moves, as the `Notices` of an orchestrator."""

    every_move = True

    def __init__(self, pipe: Pipe, clock: Clock) -> None:
        self._pipe = pipe
        self._clock = clock

    # ── what has moved ───────────────────────────────────────────────────────────────────

    async def moved(
        self,
        run_ids: Sequence[str],
        turned: Sequence[str] = (),
        ended: Mapping[str, Event | None] | None = None,
    ) -> None:
        """The archive is behind with these, from now on unless it was before."""
        await self._add(Entry(run_id, self._clock()) for run_id in run_ids)

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        await self.moved([submit.run_id for submit in submits])

    async def _add(self, entries: Iterable[Entry]) -> None:
        flat = [part for run_id, since in entries for part in (repr(since), run_id)]
        if flat:
            # LT: a claim is later than now, and gives way to what moved during it.
            await self._pipe.call("ZADD", UNARCHIVED, "LT", *flat)

    async def claim(self, limit: int, rested: float = 0.0) -> list[Claim]:
        """Some that moved so many seconds ago, longest first; nobody else gets them for a while."""
        now = self._clock()
        until = now + CLAIM_SECONDS
        given: list[Argument] = [repr(now - rested), repr(until), limit]
        flat = await self._pipe.script(source("hints_claim"), [UNARCHIVED], given)
        return [Claim(flat[at].decode(), float(flat[at + 1]), until) for at in _pairs(flat)]

    async def settle(self, claims: Sequence[Claim]) -> None:
        """The archive has them, as they were when they were claimed."""
        await self._strike(UNARCHIVED, [Entry(claim.run_id, claim.until) for claim in claims])

    async def give_back(self, claims: Sequence[Claim]) -> None:
        """They wait as long as they did."""
        await self._add(Entry(claim.run_id, claim.since) for claim in claims)

    async def lag(self) -> float:
        """For how many seconds the archive has been behind."""
        first = await self._pipe.call("ZRANGE", UNARCHIVED, 0, 0, "WITHSCORES")
        return max(0.0, self._clock() - float(first[1])) if first else 0.0

    # ── what is archived for good ────────────────────────────────────────────────────────

    async def archived(self, entries: Sequence[Entry]) -> None:
        """These are finished and kept: their hot state need not be, some time from then on."""
        if flat := [part for run_id, since in entries for part in (repr(since), run_id)]:
            # GT: one that was brought back stays longer than its end alone would have it.
            await self._pipe.call("ZADD", ARCHIVED, "GT", *flat)

    async def archived_before(self, before: float, limit: int) -> list[Entry]:
        flat = await self._pipe.call(
            *("ZRANGEBYSCORE", ARCHIVED, "-inf", repr(before)),
            *("WITHSCORES", "LIMIT", 0, limit),
        )
        return [Entry(flat[at].decode(), float(flat[at + 1])) for at in _pairs(flat)]

    async def forget(self, entries: Sequence[Entry]) -> None:
        """They are not hot any more, or not finished; unless they were archived again since."""
        await self._strike(ARCHIVED, entries)

    async def _strike(self, key: str, entries: Sequence[Entry]) -> None:
        if flat := [part for run_id, score in entries for part in (run_id, repr(score))]:
            await self._pipe.script(source("hints_settle"), [key], flat)


def _pairs(flat: Sequence[object]) -> range:
    return range(0, len(flat), 2)
