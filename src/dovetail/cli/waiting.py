"""Waiting for runs that may change hands: this process, another one, or nobody drives them.

What it must not know: what is shown meanwhile, or how a run is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from dovetail.cli.target import looking
from dovetail.config import Settings
from dovetail.core.errors import Conflict
from dovetail.engine.api import EngineApi

LOOK_SECONDS = 1.0
"""How often it looks whether somebody still drives the run."""
GONE_SECONDS = 3.0
"""A run between two hands, such as one that a server is about to take over, gets this long."""
CANCEL_SECONDS = 1.0
SHORT_ID = 6


async def see_to_end(
    commands: EngineApi,
    run_id: str,
    *,
    take_over: bool,
    just_made: bool = False,
    nodes: bool = True,
) -> dict[str, Any] | None:
    """The run once it has finished, whoever drives it.

    If whoever does is gone, it is taken over here; without `take_over` the answer is then None,
    because nobody knows whether the end will ever come.
    """
    waiting = asyncio.ensure_future(commands.wait_run(run_id, nodes=nodes))
    # The first look is at once, because it may have been gone for long.
    gone, patience = 0.0, LOOK_SECONDS if just_made else 0.0
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=patience)
            if done:
                return waiting.result()
            if await commands.owner(run_id) != "gone":
                gone = 0.0
            elif take_over:
                await _take_over(commands, run_id)
            elif (gone := gone + patience) >= GONE_SECONDS:
                return None
            patience = LOOK_SECONDS
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await waiting


async def _take_over(commands: EngineApi, run_id: str) -> None:
    try:
        await commands.resume(run_id)
    except Conflict:
        # Somebody was faster, or it has just ended. Neither: it cannot be driven here.
        if await commands.owner(run_id) == "gone":
            raise


async def cancel_all(commands: EngineApi, run_ids: Iterable[str]) -> None:
    """Cancel what of these has not finished."""

    async def cancel(run_id: str) -> None:
        with suppress(Conflict):  # it ended in this very moment
            await commands.cancel_run(run_id)

    await asyncio.gather(*map(cancel, run_ids))


def cancelled_from_outside(settings: Settings, run_ids: Iterable[str]) -> bool:
    """Cancel as another shell would: for a thread whose event loop is stuck."""

    async def cancel() -> None:
        async with looking(settings) as commands:
            await asyncio.wait_for(cancel_all(commands, run_ids), CANCEL_SECONDS)

    try:
        asyncio.run(cancel())
    except Exception:  # whatever it is, the process must end now
        return False
    return True


async def short_id(commands: EngineApi, run_id: str) -> str:
    """As much of the id as tells it from all others here, at least six digits."""
    for length in range(SHORT_ID, len(run_id)):
        with suppress(Conflict):
            await commands.find_run(run_id[:length])
            return run_id[:length]
    return run_id


INTERRUPTED = "interrupted: no process is running it"


def interrupted(count: int, of_these: str) -> str:
    """`2 runs are interrupted` as the start of a sentence."""
    noun, verb = ("run", "is") if count == 1 else ("runs", "are")
    return f"{count:,} {noun}{of_these} {verb} interrupted"
