"""What is due when, over all runs in Redis: who waits, whose lease ends, which run moved last.

Indexes, not truth: each can be made anew from the runs themselves, which the sweep does for a run
that nothing was heard of. They have keys of their own, outside every run's slot, so they are
written beside a run's script and not within it: an entry too many is refused by the rules, one
too few is found by the sweep. What it must not know: any rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.core.events import Token
from dovetail.core.transitions import Wake
from dovetail.pipe import Pipe

DELAYED, LEASES, ACTIVE = "wf:delayed", "wf:leases", "wf:active"


class RedisAgenda:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    # ── who waits ────────────────────────────────────────────────────────────────────────

    async def delay(self, wakes: Iterable[tuple[float, Wake]]) -> None:
        await self._add(DELAYED, [(at, _name(wake)) for at, wake in wakes])

    async def due(self, now: float, limit: int) -> list[Wake]:
        return [Wake(*_parts(name)) for name in await self._until(DELAYED, now, limit)]

    async def woken(self, wakes: Iterable[Wake]) -> None:
        await self._drop(DELAYED, [_name(wake) for wake in wakes])

    # ── whose lease ends ─────────────────────────────────────────────────────────────────

    async def lease(self, starts: Iterable[tuple[str, str, Token]], until: float) -> None:
        await self._add(LEASES, [(until, _name(start)) for start in starts])

    async def expired(self, now: float, limit: int) -> list[tuple[str, str, Token]]:
        return [_parts(name) for name in await self._until(LEASES, now, limit)]

    async def released(self, starts: Iterable[tuple[str, str, Token]]) -> None:
        await self._drop(LEASES, [_name(start) for start in starts])

    # ── which run moved last ─────────────────────────────────────────────────────────────

    async def moved(self, run_ids: Iterable[str], now: float) -> None:
        await self._add(ACTIVE, [(now, run_id) for run_id in run_ids])

    async def idle(self, since: float, limit: int) -> list[str]:
        return await self._until(ACTIVE, since, limit)

    async def ended(self, run_ids: Iterable[str]) -> None:
        await self._drop(ACTIVE, list(run_ids))

    # ── sorted sets ──────────────────────────────────────────────────────────────────────

    async def _add(self, key: str, entries: Sequence[tuple[float, str]]) -> None:
        if entries:
            flat = [part for at, name in entries for part in (repr(float(at)), name)]
            await self._pipe.call("ZADD", key, *flat)

    async def _until(self, key: str, at: float, limit: int) -> list[str]:
        found = await self._pipe.call(
            "ZRANGEBYSCORE", key, "-inf", repr(float(at)), "LIMIT", 0, limit
        )
        return [name.decode() for name in found]

    async def _drop(self, key: str, names: Sequence[str]) -> None:
        if names:
            await self._pipe.call("ZREM", key, *names)


def _name(start: tuple[str, str, Token]) -> str:
    run_id, node, token = start
    return f"{run_id} {node} {token}"


def _parts(name: str) -> tuple[str, str, Token]:
    run_id, node, token = name.rsplit(" ", 2)
    return run_id, node, Token.parse(token)
