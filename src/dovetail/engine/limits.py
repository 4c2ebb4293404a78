"""Token buckets: how often the nodes of one resource tag may start.

Two questions, two numbers. *When shall I come back?* is answered by booking: each asker gets a
time of its own, so a thousand waiting nodes cost a thousand bookings and no stampede. *May I
start now?* is answered from what was really started: a node that comes late, because no worker
had room for it at its time, must not start together with all the others that were late.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.engine.ports import Records

DEFAULT_RATE = 10.0
DEFAULT_BURST = 1
LATENESS = 0.05
"""How late a timer may ring on a busy machine without costing the rate anything."""


class TokenBucket:
    """The generic cell rate algorithm, twice: a float is the whole state of each."""

    __slots__ = ("_booked", "_started", "burst", "rate")

    def __init__(self, rate_per_second: float = DEFAULT_RATE, burst: int = DEFAULT_BURST) -> None:
        if not 0 < rate_per_second < float("inf"):
            raise ValueError(f"rate_per_second must be above 0, not {rate_per_second!r}")
        if burst < 1:
            raise ValueError(f"burst must be at least 1, not {burst!r}")
        self.rate = rate_per_second
        self.burst = burst
        # When the bucket would be full again if nobody booked, or started, any more.
        self._booked = float("-inf")
        self._started = float("-inf")

    def book(self, now: float) -> float:
        """A time at which to come and start; nobody else gets the same token."""
        interval = 1.0 / self.rate
        at = max(now, max(self._booked, self._started) - (self.burst - 1) * interval)
        self._booked = max(self._booked, at) + interval
        return at

    def start(self, now: float) -> bool:
        """Take a token now, if what was started before leaves one."""
        interval = 1.0 / self.rate
        if self._started - (self.burst - 1) * interval > now + LATENESS:
            return False
        self._started = max(self._started, now) + interval
        return True

    def unbook(self, count: int) -> None:
        """So many of those that booked will not come. Who books next may come sooner."""
        self._booked -= count / self.rate

    def slow(self, until: float) -> None:
        """Let nobody start before `until`, whatever was booked."""
        full = until + (self.burst - 1) / self.rate
        self._booked = max(self._booked, full)
        self._started = max(self._started, full + LATENESS)


class LocalLimits:
    """The buckets of one process."""

    def __init__(self, buckets: Mapping[str, TokenBucket] | None = None) -> None:
        self._buckets = dict(buckets or {})

    def bucket(self, tag: str) -> TokenBucket:
        return self._buckets.setdefault(tag, TokenBucket())

    def configure(self, tag: str, rate_per_second: float, burst: int) -> None:
        """Change a bucket that may be in use: what was started counts on."""
        bucket = self.bucket(tag)
        checked = TokenBucket(rate_per_second, burst)
        bucket.rate, bucket.burst = checked.rate, checked.burst

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


class KeptLimits:
    """The buckets of this process, with what any process that shares the records has set."""

    def __init__(self, limits: LocalLimits, records: Records) -> None:
        self._limits = limits
        self._records = records

    async def all(self) -> dict[str, tuple[float, int]]:
        return {tag: (bucket.rate, bucket.burst) for tag, bucket in self._limits.all().items()}

    async def set(self, tag: str, rate: float, burst: int) -> None:
        self._limits.configure(tag, rate, burst)
        await self._records.set_limit(tag, rate, burst)

    async def refresh(self) -> None:
        """Take on what other processes have set."""
        for tag, (rate, burst) in (await self._records.limits()).items():
            self._limits.configure(tag, rate, burst)


class SharedRates:
    """What is set for everybody; for the rest, what the settings say."""

    def __init__(self, configured: Mapping[str, TokenBucket], records: Records) -> None:
        self._configured = {tag: (bucket.rate, bucket.burst) for tag, bucket in configured.items()}
        self._records = records

    async def all(self) -> dict[str, tuple[float, int]]:
        return {**self._configured, **await self._records.limits()}

    async def set(self, tag: str, rate: float, burst: int) -> None:
        await self._records.set_limit(tag, rate, burst)
