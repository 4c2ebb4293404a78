"""So many runs in flight at once, however many there are to make, and one end for all of them.

A lane makes one run after the other and waits for each. What it must not know: what is run, or
where the next one comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from dovetail.cli.driving import cancel_all, see_to_end
from dovetail.cli.stage import Stopping
from dovetail.cli.tally import Progress
from dovetail.core.run import RunState
from dovetail.engine.commands import Commands

RUNS_PER_SLOT = 4
"""Runs in flight for each node that may run at once: enough to keep all slots busy."""
MOST_SHARED = 500
"""Runs in flight where services drive them: nobody here knows how many slots they have."""


class Lanes:
    def __init__(self, commands: Commands, stopping: Stopping) -> None:
        self._commands = commands
        self._stopping = stopping
        self.flying: dict[str, asyncio.Task[Any]] = {}
        """The runs that lanes wait for, the one that has waited longest first."""

    async def drive(
        self, lanes: Sequence[Coroutine[Any, Any, None]], progress: Progress | None
    ) -> None:
        """Until all lanes have ended, or something asks to stop."""
        stopping = self._stopping
        tasks = [asyncio.create_task(lane) for lane in lanes]
        asked = asyncio.create_task(stopping.wait())
        showing: list[asyncio.Task[None]] = []
        if progress is not None:
            progress.begin()
            showing.append(asyncio.create_task(stopping.while_read(tick(progress))))
        whole: asyncio.Future[Any] = asyncio.gather(*tasks)
        try:
            await asyncio.wait([whole, asked], return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                if stopping.cancels:
                    await self._cancel_ours(tasks)
                return
            await whole
        finally:
            for task in (asked, *tasks, *showing):
                task.cancel()
            await asyncio.gather(asked, whole, *showing, return_exceptions=True)
            if progress is not None:
                progress.end()

    async def see(self, run_id: str, *, just_made: bool) -> RunState | None:
        """The run at its end, from within a lane; None if it is somebody else's to end."""
        lane = asyncio.current_task()
        assert lane is not None  # noqa: S101
        self.flying[run_id] = lane
        try:
            if self._stopping.cancels:  # while it was made: too late for `_cancel_ours`
                if await self._commands.owner(run_id) != "here":
                    return None
                await cancel_all(self._commands, [run_id])
            return await see_to_end(self._commands, run_id, take_over=True, just_made=just_made)
        finally:
            del self.flying[run_id]

    async def _cancel_ours(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        """Cancel what is driven here, and wait for its end; runs of others are theirs."""
        ours, followed = [], set()
        for run_id, lane in list(self.flying.items()):
            if await self._commands.owner(run_id) == "here":
                ours.append(run_id)
            else:
                followed.add(lane)
        await cancel_all(self._commands, ours)
        if ending := set(lanes) - followed:
            await asyncio.wait(ending)


async def tick(progress: Progress) -> None:
    while True:
        await asyncio.sleep(progress.refresh_seconds)
        progress.refresh()
