"""How far a batch is: counts, speed, and a line that shows them while it goes on.

On a terminal one line is painted in place by a thread of its own, as the view of a run is;
elsewhere a line is printed every few seconds. What it must not know: how an item becomes a run.

So many runs in flight at once, however many there are to make, and one end for all of them.

A lane makes one run after the other and waits for each. What it must not know: what is run, or
where the next one comes from.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from dovetail.cli import output as streams
from dovetail.cli.interruptible import Stopping
from dovetail.cli.text import Line, countdown, duration
from dovetail.cli.waiting import cancel_all, see_to_end
from dovetail.core.states import FINAL, RunStatus
from dovetail.engine.api import EngineApi

LINE_SECONDS = 5.0
WORTH_AN_ESTIMATE = 5
"""So many runs must have ended before their speed says anything."""


class BatchCounts:
    def __init__(self, total: int) -> None:
        self.total = total
        # Every key from the start: another thread sums them up while it paints.
        self.counts: Counter[str] = Counter({status.value: 0 for status in FINAL})
        self.before = 0
        """Of them, those that had ended before this process began."""
        self._began = time.monotonic()

    def add(self, status: str, *, before: bool = False) -> None:
        self.counts[status] += 1
        self.before += before

    @property
    def done(self) -> int:
        return self.counts.total()

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def line(self) -> Line:
        done = self.done
        here = done - self.before
        told = [f"{done:,} of {self.total:,} done"]
        told += [f"{self.counts[s]:,} {s.lower()}" for s in _WORSE if self.counts[s]]
        if here >= WORTH_AN_ESTIMATE and done < self.total:
            speed = here / max(self.passed, 0.001)
            told += [speed_words(speed), f"about {countdown((self.total - done) / speed)} left"]
        return [(", ".join(told), "")]

    def picture(self) -> Sequence[Line]:
        """The line with a bar before it, and what else is worth a look while it goes on."""
        full = round(_BAR * self.done / self.total)
        return [[("━" * full, "good"), ("━" * (_BAR - full), "dim"), ("  ", ""), *self.line()]]

    def standstill(self) -> Line:
        """Said where nothing has ended since the last line."""
        return [(f"{self.done:,} of {self.total:,} done, {duration(self.passed)} passed", "")]

    def summary(self) -> str:
        told = [f"{n:,} {status.lower()}" for status, n in sorted(self.counts.items()) if n]
        return ", ".join(told) or "none done"


_BAR = 30
_WORSE = (RunStatus.FAILED.value, RunStatus.CANCELLED.value)


def speed_words(per_second: float) -> str:
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{per_second * 60:.1f}/min"


class ProgressLine(Protocol):
    refresh_seconds: float

    def begin(self) -> None: ...
    def refresh(self) -> None: ...
    def end(self) -> None: ...


class PlainProgress:
    refresh_seconds = LINE_SECONDS

    def __init__(self, tally: BatchCounts) -> None:
        self._tally = tally
        self._told = 0

    def begin(self) -> None:
        """Nothing yet."""

    def refresh(self) -> None:
        if self._tally.done != self._told:
            self._told = self._tally.done
            streams.say(self._tally.line())
        else:
            streams.say(self._tally.standstill())
        sys.stdout.flush()

    def end(self) -> None:
        """Nothing was left open."""


def progress_of(tally: BatchCounts) -> ProgressLine:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainProgress(tally)
    from dovetail.cli.live import LiveLines

    return LiveLines(tally.picture)


RUNS_PER_SLOT = 4
"""Runs in flight for each node that may run at once: enough to keep all slots busy."""
MOST_SHARED = 500
"""Runs in flight where services drive them: nobody here knows how many slots they have."""


class Lanes:
    def __init__(self, commands: EngineApi, stopping: Stopping) -> None:
        self._commands = commands
        self._stopping = stopping
        self.flying: dict[str, asyncio.Task[Any]] = {}
        """The runs that lanes wait for, the one that has waited longest first."""

    async def drive(
        self, lanes: Sequence[Coroutine[Any, Any, None]], progress: ProgressLine | None
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

    async def see(
        self, run_id: str, *, just_made: bool, nodes: bool = True
    ) -> dict[str, Any] | None:
        """The run at its end, from within a lane; None if it is somebody else's to end."""
        lane = asyncio.current_task()
        assert lane is not None  # noqa: S101
        self.flying[run_id] = lane
        try:
            if self._stopping.cancels:  # while it was made: too late for `_cancel_ours`
                if await self._commands.owner(run_id) != "here":
                    return None
                await cancel_all(self._commands, [run_id])
            return await see_to_end(
                self._commands, run_id, take_over=True, just_made=just_made, nodes=nodes
            )
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


async def tick(progress: ProgressLine) -> None:
    while True:
        await asyncio.sleep(progress.refresh_seconds)
        progress.refresh()
