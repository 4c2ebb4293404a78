"""Token buckets: how often the nodes of one resource tag may start.

A bucket gives out times rather than yes or no: the caller parks until its time and never
asks again, so a thousand waiting nodes cost a thousand reservations and no stampede.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.engine.ports import Grant

DEFAULT_RATE = 10.0
DEFAULT_BURST = 1
LATEST_START = 0.05
"""How long after its time a token is good: as late as a timer may come on a busy machine."""


class TokenBucket:
    """The generic cell rate algorithm: one float is the whole state."""

    __slots__ = ("_full_at", "burst", "generation", "rate")

    def __init__(self, rate_per_second: float = DEFAULT_RATE, burst: int = DEFAULT_BURST) -> None:
        if not 0 < rate_per_second < float("inf"):
            raise ValueError(f"rate_per_second must be above 0, not {rate_per_second!r}")
        if burst < 1:
            raise ValueError(f"burst must be at least 1, not {burst!r}")
        self.rate = rate_per_second
        self.burst = burst
        self.generation = 0
        self._full_at = float("-inf")
        """When the bucket would be full again if nobody took anything."""

    def reserve(self, now: float) -> float:
        """Take a token and return the time from which it is good."""
        interval = 1.0 / self.rate
        at = max(now, self._full_at - (self.burst - 1) * interval)
        self._full_at = max(self._full_at, at) + interval
        return at

    def slow(self, until: float) -> None:
        """Give no token before `until`, not even those reserved already."""
        self.generation += 1
        interval = 1.0 / self.rate
        self._full_at = max(self._full_at, until + (self.burst - 1) * interval)


class LocalLimits:
    """The buckets of one process."""

    def __init__(self, buckets: Mapping[str, TokenBucket] | None = None) -> None:
        self._buckets = dict(buckets or {})

    def bucket(self, tag: str) -> TokenBucket:
        return self._buckets.setdefault(tag, TokenBucket())

    async def reserve(self, tag: str, now: float) -> Grant:
        bucket = self.bucket(tag)
        return Grant(tag, bucket.reserve(now), bucket.generation)

    async def holds(self, grant: Grant, now: float) -> bool:
        unslowed = self.bucket(grant.tag).generation == grant.generation
        return unslowed and now <= grant.at + LATEST_START

    async def slow(self, tag: str, until: float) -> None:
        self.bucket(tag).slow(until)
