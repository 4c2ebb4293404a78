"""What Redis wrote down before it started is written anew.

A log that ends within a transaction, because the power failed, Redis cuts after the last whole
command of it, and not before its `MULTI` (7.0; Valkey mends that with its pull request 4342). What
follows is then read as part of it at the next start: half of a transition is carried out, long
after. A log that was rewritten since the start has no such end. What it must not know: what a
transition is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import hiredis

from dovetail.pipe import Pipe

log = logging.getLogger("dovetail.redis")


async def seen_to_breaks(pipe: Pipe) -> AsyncIterator[bool]:
    """As `pipe.after_breaks`, with the log seen to first."""
    await renew_log(pipe)
    async for is_another in pipe.after_breaks():
        if is_another:
            await renew_log(pipe)
        yield is_another


async def renew_log(pipe: Pipe) -> None:
    """On every server that has a log and has not written it anew since its start."""
    for node in pipe.nodes():
        facts = await node.info("persistence")
        if facts.get("aof_enabled") != "1" or facts.get("aof_last_rewrite_time_sec") != "-1":
            continue
        (answer,) = await node.ask([("BGREWRITEAOF",)])
        if isinstance(answer, hiredis.ReplyError):  # it is at it, or we may not ask for that
            log.debug("Redis at %s does not rewrite its log: %s", node.where, answer)
