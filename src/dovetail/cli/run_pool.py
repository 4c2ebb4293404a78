"""Runs that a command follows to their ends: one, or many with so many in flight at once.

A run may change its driver: this process, another process, or none. A batch shows its counts and
its speed meanwhile: on a terminal in one line that a thread repaints, elsewhere in a line every
few seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.cli import output as streams
from dovetail.cli.board import LiveLines
from dovetail.cli.interruptible import Stopping, cancel_tasks
from dovetail.cli.target import open_reader
from dovetail.cli.text import Line, countdown, duration
from dovetail.core.errors import Conflict
from dovetail.core.states import FINAL, RunStatus

if TYPE_CHECKING:
    from dovetail.config import Settings
    from dovetail.engine.api import EngineApi

OWNER_CHECK_SECONDS = 1.0
"""Between two checks whether a process still drives the run."""
WITHOUT_OWNER_SECONDS = 3.0
"""So long a run may have no driver: a server may be about to take it over."""
CANCEL_SECONDS = 1.0


async def wait_for_end(
    commands: EngineApi,
    run_id: str,
    *,
    take_over: bool,
    just_made: bool = False,
    nodes: bool = True,
) -> dict[str, Any] | None:
    """Wait until a run has finished, whichever process drives it, and return it.

    If its driver is gone, this process takes the run over; without `take_over` it returns None.
    """
    waiting = asyncio.ensure_future(commands.wait_run(run_id, nodes=nodes))
    # The first check is at once, because the driver may have been gone for long.
    gone, patience = 0.0, OWNER_CHECK_SECONDS if just_made else 0.0
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=patience)
            if done:
                return waiting.result()
            if await commands.owner(run_id) != "gone":
                gone = 0.0
            elif take_over:
                await _take_over(commands, run_id)
            elif (gone := gone + patience) >= WITHOUT_OWNER_SECONDS:
                return None
            patience = OWNER_CHECK_SECONDS
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await waiting


async def _take_over(commands: EngineApi, run_id: str) -> None:
    try:
        await commands.resume(run_id)
    except Conflict:
        # Another process was faster, or the run has just ended. Else it cannot be driven here.
        if await commands.owner(run_id) == "gone":
            raise


async def cancel_all(commands: EngineApi, run_ids: Iterable[str]) -> None:
    """Cancel the runs that have not finished."""

    async def cancel(run_id: str) -> None:
        with suppress(Conflict):  # it has just ended
            await commands.cancel_run(run_id)

    await asyncio.gather(*map(cancel, run_ids))


def cancel_from_thread(settings: Settings, run_ids: Iterable[str]) -> bool:
    """Cancel in an event loop of its own, because that of the command is stuck."""

    async def cancel() -> None:
        async with open_reader(settings) as commands:
            await asyncio.wait_for(cancel_all(commands, run_ids), CANCEL_SECONDS)

    try:
        asyncio.run(cancel())
    except Exception:  # the process must end now
        return False
    return True


LINE_SECONDS = 5.0
MIN_RUNS_FOR_ESTIMATE = 5
"""So many runs must have ended before a speed is shown."""


class BatchCounts:
    """How many runs of a batch have ended, by status, and how fast."""

    def __init__(self, total: int) -> None:
        self.total = total
        # Every key from the start: another thread sums them up while it paints.
        self.counts: Counter[str] = Counter({status.value: 0 for status in FINAL})
        self.before = 0
        """How many had ended before this process began."""
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
        ended_here = done - self.before
        words = [f"{done:,} of {self.total:,} done"]
        words += [f"{self.counts[s]:,} {s.lower()}" for s in _WORSE if self.counts[s]]
        if ended_here >= MIN_RUNS_FOR_ESTIMATE and done < self.total:
            speed = ended_here / max(self.passed, 0.001)
            words += [speed_words(speed), f"about {countdown((self.total - done) / speed)} left"]
        return [(", ".join(words), "")]

    def picture(self) -> Sequence[Line]:
        """The lines for a terminal: a bar before the line, and more in subclasses."""
        full = round(_BAR_CELLS * self.done / self.total)
        rest = _BAR_CELLS - full
        return [[("━" * full, "good"), ("━" * rest, "dim"), ("  ", ""), *self.line()]]

    def standstill(self) -> Line:
        """The line if no run has ended since the last one."""
        return [(f"{self.done:,} of {self.total:,} done, {duration(self.passed)} passed", "")]

    def summary(self) -> str:
        words = [f"{n:,} {status.lower()}" for status, n in sorted(self.counts.items()) if n]
        return ", ".join(words) or "none done"


_BAR_CELLS = 30
_WORSE = (RunStatus.FAILED.value, RunStatus.CANCELLED.value)


def speed_words(per_second: float) -> str:
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{per_second * 60:.1f}/min"


class Refreshed(Protocol):
    """A view that is brought up to date at an interval."""

    refresh_seconds: float

    def refresh(self) -> None: ...
    def end(self) -> None: ...


class ProgressLine(Refreshed, Protocol):
    def begin(self) -> None: ...


class PlainProgress:
    refresh_seconds = LINE_SECONDS

    def __init__(self, counts: BatchCounts) -> None:
        self._counts = counts
        self._printed = 0

    def begin(self) -> None:
        """Nothing yet."""

    def refresh(self) -> None:
        if self._counts.done != self._printed:
            self._printed = self._counts.done
            streams.say(self._counts.line())
        else:
            streams.say(self._counts.standstill())
        sys.stdout.flush()

    def end(self) -> None:
        """Nothing was left open."""


def progress_of(counts: BatchCounts) -> ProgressLine:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainProgress(counts)
    return LiveLines(counts.picture)


RUNS_PER_SLOT = 4
"""Runs in flight for each node that may run at once: enough to keep all slots busy."""
MAX_SHARED_RUNS = 500
"""Runs in flight where services drive them: this process does not know their slots."""


class RunPool:
    """Runs in flight. Each slot makes one run after the other and waits for it."""

    def __init__(self, commands: EngineApi, stopping: Stopping) -> None:
        self._commands = commands
        self._stopping = stopping
        self.in_flight: dict[str, asyncio.Task[Any]] = {}
        """The slot that waits for each run, the oldest first."""

    async def drive(
        self, slots: Sequence[Coroutine[Any, Any, None]], progress: ProgressLine | None
    ) -> None:
        """Until all slots have ended, or a stop is requested."""
        async with shown(progress, self._stopping):
            tasks = [asyncio.create_task(slot) for slot in slots]
            stop = asyncio.create_task(self._stopping.wait())
            whole: asyncio.Future[Any] = asyncio.gather(*tasks)
            try:
                await asyncio.wait([whole, stop], return_when=asyncio.FIRST_COMPLETED)
                if whole.done():
                    await whole
                elif self._stopping.cancels:
                    await self._cancel_own(tasks)
            finally:
                await cancel_tasks(stop, *tasks)
                await asyncio.gather(whole, return_exceptions=True)

    async def follow(
        self, run_id: str, *, just_made: bool, nodes: bool = True
    ) -> dict[str, Any] | None:
        """Called by a slot: the run at its end; None if another process drives it to its end."""
        slot = asyncio.current_task()
        assert slot is not None  # noqa: S101
        self.in_flight[run_id] = slot
        try:
            if self._stopping.cancels:  # while it was made: too late for `_cancel_own`
                if await self._commands.owner(run_id) != "here":
                    return None
                await cancel_all(self._commands, [run_id])
            return await wait_for_end(
                self._commands, run_id, take_over=True, just_made=just_made, nodes=nodes
            )
        finally:
            del self.in_flight[run_id]

    async def _cancel_own(self, slots: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the runs that this process drives, and wait for their ends."""
        own, followed = [], set()
        for run_id, slot in list(self.in_flight.items()):
            if await self._commands.owner(run_id) == "here":
                own.append(run_id)
            else:
                followed.add(slot)
        await cancel_all(self._commands, own)
        if ending := set(slots) - followed:
            await asyncio.wait(ending)


async def tick(view: Refreshed) -> None:
    while True:
        await asyncio.sleep(view.refresh_seconds)
        view.refresh()


@asynccontextmanager
async def shown(progress: ProgressLine | None, stopping: Stopping) -> AsyncIterator[None]:
    """Show the progress of what is done within."""
    if progress is None:
        yield
        return
    progress.begin()
    ticking = asyncio.create_task(stopping.while_read(tick(progress)))
    try:
        yield
    finally:
        await cancel_tasks(ticking)
        progress.end()
