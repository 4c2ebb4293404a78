"""Orchestrators that are alive, so that the others can go on with what a dead one had read.

Each holds a lease of a few seconds, on the clock of Redis. Whoever finds one that has lapsed takes
over the results it had read and not settled. To be wrong about it costs nothing: what two take in,
the rules refuse the second time. What it must not know: what a result is.
"""

from __future__ import annotations

from dovetail.pipe import Pipe

ORCHESTRATORS_ALIVE = "wf:orchestrators"
LEASE_SECONDS = 4.0
BEAT_SECONDS = 0.5
_BEAT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], string.format('%.3f', now + ARGV[2]), ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.3f', now))
"""


class Peers:
    def __init__(self, pipe: Pipe, me: str) -> None:
        self._pipe = pipe
        self._me = me

    async def beat(self) -> list[str]:
        """Renew the own lease; returns whose has lapsed."""
        lapsed = await self._pipe.script(
            _BEAT, [ORCHESTRATORS_ALIVE], [self._me, repr(LEASE_SECONDS)]
        )
        return [name.decode() for name in lapsed]

    async def forget(self, name: str) -> None:
        """It is gone, and nothing of it is left to do."""
        await self._pipe.call("ZREM", ORCHESTRATORS_ALIVE, name)

    async def leave(self) -> None:
        await self.forget(self._me)
