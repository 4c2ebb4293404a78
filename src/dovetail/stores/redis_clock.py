"""The time of Redis, for everybody who shares it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from dovetail.engine.clock import StoreClock
from dovetail.pipe import Pipe, RedisError

LOOK_SECONDS = 10.0


async def set_clock(pipe: Pipe, clock: StoreClock) -> None:
    asked = time.monotonic()
    seconds, micros = await pipe.call("TIME")
    clock.told(int(seconds) + int(micros) / 1e6, asked, time.monotonic())


async def follow_clock(pipe: Pipe, clock: StoreClock) -> None:
    """For ever: clocks are set, also that of Redis, and machines sleep."""
    while True:
        with suppress(RedisError):
            await set_clock(pipe, clock)
        await asyncio.sleep(LOOK_SECONDS)
