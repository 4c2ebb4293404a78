"""A duty of orchestrators on Redis: what runs and workers that are gone have left behind.

It is looked for where it lies, among all keys, and not where somebody noted it: whoever leaves
something behind may have died before the note. What it must not know: what makes it useless.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from dovetail.config import Settings
from dovetail.core.errors import BrokenRun
from dovetail.engine.clock import Clock
from dovetail.engine.isolating import told
from dovetail.pipe import Pipe
from dovetail.stores.redis_agenda import RedisAgenda
from dovetail.stores.redis_definitions import UnusedDefinitions
from dovetail.stores.redis_fleet import RedisFleet
from dovetail.transports.stream_remains import StreamRemains

log = logging.getLogger("dovetail.orchestrator")
LOOK_SECONDS, LONGEST_SECONDS = 60.0, 3600.0
"""How often it looks, at the most and at the least."""
REST = 1000
"""So many times as long as a look takes it rests, which goes through all keys."""
MANY_LEASES = 30
"""Nobody who is alive is silent for so long."""


async def clear_up(pipe: Pipe, clock: Clock, settings: Settings) -> None:
    """For ever, in as many processes as there are."""
    fleet = RedisFleet(pipe, heartbeat_timeout=settings.heartbeat_timeout)
    idle_seconds = MANY_LEASES * settings.lease_seconds
    remains = StreamRemains(pipe, fleet.workers, RedisAgenda(pipe).over, idle_seconds=idle_seconds)
    definitions = UnusedDefinitions(pipe)
    while True:
        began = time.monotonic()
        try:
            await remains.clear()
            await definitions.look(clock())
        except (BrokenRun, LookupError, ValueError) as problem:  # it would be met again at once
            log.error("what was left behind cannot be cleared up: %s", told(problem))
        rest = REST * (time.monotonic() - began)
        pause = min(max(LOOK_SECONDS, rest), LONGEST_SECONDS)
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311
