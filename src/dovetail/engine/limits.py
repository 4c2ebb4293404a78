"""Token buckets: how often the nodes of one resource tag may start.

Two questions, two numbers. *When shall I come back?* is answered by booking: each asker gets a
time of its own, so a thousand waiting nodes cost a thousand bookings and no stampede. *May I
start now?* is answered from what was really started: a node that comes late, because no worker
had room for it at its time, must not start together with all the others that were late.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

from dovetail.engine.clock import Clock
from dovetail.engine.ports import Author, Records

DEFAULT_RATE = 10.0
DEFAULT_BURST = 1
SLOWEST, FASTEST, LARGEST_BURST = 1e-9, 1e9, 1_000_000_000
"""Of a rate limit: once in thirty years, and more than anybody has. Beyond these a time that is
waited for, or a count in a store, would no longer be a number."""
LATENESS = 0.05
"""How late a timer may ring on a busy machine without costing the rate anything."""


class TokenBucket:
    """The generic cell rate algorithm, twice: a float is the whole state of each."""

    __slots__ = ("booked", "burst", "rate", "started")

    def __init__(self, rate_per_second: float = DEFAULT_RATE, burst: int = DEFAULT_BURST) -> None:
        if not 0 < rate_per_second < float("inf"):
            raise ValueError(f"rate_per_second must be above 0, not {rate_per_second!r}")
        if burst < 1:
            raise ValueError(f"burst must be at least 1, not {burst!r}")
        self.rate = rate_per_second
        self.burst = burst
        # When the bucket would be full again without further bookings or starts.
        self.booked = -math.inf
        self.started = -math.inf

    def book(self, now: float) -> float:
        """A time at which to start; no other caller gets the same token."""
        interval = 1.0 / self.rate
        taken = max(self.booked, self.started)
        at = max(now, taken - (self.burst - 1) * interval)
        self.booked = max(taken, at) + interval
        return at

    def start(self, now: float) -> bool:
        """Take a token now, if what was started before leaves one."""
        interval = 1.0 / self.rate
        if self.started - (self.burst - 1) * interval > now + LATENESS:
            return False
        self.started = max(self.started, now) + interval
        return True

    def set(self, rate_per_second: float, burst: int, now: float) -> None:
        """Use this rate and burst from now on. Starts and bookings still count, up to a burst.

        More than a burst is owed only if a service asked for a pause under the old limit; a new
        limit replaces that pause."""
        new = TokenBucket(rate_per_second, burst)
        if self.started > now:
            owed = min((self.started - now) * self.rate, new.burst)
            self.started = now + owed / new.rate
        if self.booked > now:
            self.booked = now + (self.booked - now) * self.rate / new.rate
        self.rate, self.burst = new.rate, new.burst

    def rebook(self, count: int, now: float) -> list[float]:
        """Times for all waiting nodes, in order. Every other booking is free again."""
        self.booked = -math.inf
        return [self.book(now) for _ in range(count)]

    def unbook(self, count: int) -> None:
        """So many bookings are not used: the next ones may come sooner."""
        self.booked -= count / self.rate

    def slow(self, until: float) -> None:
        """Start nothing before `until`, whatever was booked."""
        full = until + (self.burst - 1) / self.rate
        self.booked = max(self.booked, full)
        self.started = max(self.started, full + LATENESS)


class LocalLimits:
    """The buckets that this process uses, and shares with others if `new` makes such."""

    def __init__(
        self,
        buckets: Mapping[str, TokenBucket] | None = None,
        new: Callable[[str], TokenBucket] | None = None,
    ) -> None:
        self._buckets = dict(buckets or {})
        self._new = new

    def bucket(self, tag: str) -> TokenBucket:
        found = self._buckets.get(tag)
        if found is None:
            found = self._buckets[tag] = TokenBucket() if self._new is None else self._new(tag)
        return found

    def all(self) -> dict[str, TokenBucket]:
        return dict(self._buckets)

    async def book(self, tag: str, now: float) -> float:
        return self.bucket(tag).book(now)

    async def start(self, tag: str, now: float) -> bool:
        return self.bucket(tag).start(now)

    async def unbook(self, tag: str, count: int) -> None:
        self.bucket(tag).unbook(count)

    async def slow(self, tag: str, until: float) -> None:
        self.bucket(tag).slow(until)


Retime = Callable[[str, TokenBucket], Awaitable[None]]


class KeptLimits:
    """The buckets of this process, with what any process that shares the records has set."""

    def __init__(
        self, limits: LocalLimits, records: Records, clock: Clock, retime: Retime | None = None
    ) -> None:
        """`retime` is called with a bucket that was set: nodes may be parked by it."""
        self._limits = limits
        self._records = records
        self._clock = clock
        self._retime = retime

    async def all(self) -> dict[str, tuple[float, int]]:
        return {tag: (bucket.rate, bucket.burst) for tag, bucket in self._limits.all().items()}

    async def set(self, tag: str, rate: float, burst: int, by: Author) -> None:
        await self._set(tag, rate, burst)
        await self._records.set_limit(tag, rate, burst, by)

    async def refresh(self) -> None:
        """Take on what other processes have set."""
        for tag, kept in (await self._records.limits()).items():
            bucket = self._limits.bucket(tag)
            if (bucket.rate, bucket.burst) != kept:
                await self._set(tag, *kept)

    async def _set(self, tag: str, rate: float, burst: int) -> None:
        bucket = self._limits.bucket(tag)
        bucket.set(rate, burst, self._clock())
        if self._retime is not None:
            await self._retime(tag, bucket)


class SharedRates:
    """Limits that were set for all processes; for other tags, those of the settings."""

    def __init__(self, configured: Mapping[str, TokenBucket], records: Records) -> None:
        self._configured = {tag: (bucket.rate, bucket.burst) for tag, bucket in configured.items()}
        self._records = records

    async def all(self) -> dict[str, tuple[float, int]]:
        return {**self._configured, **await self._records.limits()}

    async def set(self, tag: str, rate: float, burst: int, by: Author) -> None:
        await self._records.set_limit(tag, rate, burst, by)
