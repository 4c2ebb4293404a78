"""Exports every event of every run to a sink, at least once, and those of one run in their order.

One process at a time exports. It keeps for each run how far its log is exported, and notes that
after the sink has written: what a crash leaves in doubt is written again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.events import Event
from dovetail.engine.clock import Clock
from dovetail.engine.views import event_view

LEAD_SECONDS = 4.0
"""A process that exports and dies is replaced after so long."""
LOOK_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""After a failure of the sink, doubled each time."""
PAGE_SIZE = 500
"""Events of one run that are written at once."""
RUNS_AT_ONCE = 50
"""Their events are one write and one note of what was exported: short runs cost little more."""

log = logging.getLogger("dovetail.events")


class SinkError(DovetailError):
    """A sink cannot be written. The events wait in the store."""

    type = "sink_error"


class UnexportedRun(NamedTuple):
    """Events of a run that follow what was exported."""

    run_id: str
    workflow: str
    events: Sequence[Event]
    goes_on: bool
    """There are more of them."""


class EventSource(Protocol):
    async def leads(self, seconds: float) -> bool:
        """Whether this process exports, for so long; no other one does meanwhile."""
        ...

    async def leave(self) -> None:
        """Let another process export at once."""
        ...

    async def changed(self) -> Sequence[str]:
        """The runs that may have events to export."""
        ...

    async def settle(self) -> None:
        """The runs that `changed` gave are exported."""
        ...

    async def unexported(self, run_ids: Sequence[str], limit: int) -> list[UnexportedRun]:
        """The next events of each run, in order. A run that has none, is gone or cannot be read is
        left out."""
        ...

    async def exported(self, runs: Sequence[UnexportedRun]) -> None:
        """The sink has these, as `unexported` gave them last."""
        ...

    async def news(self, seconds: float) -> None:
        """Returns when a run may have changed, or so much later."""
        ...


class EventSink(Protocol):
    async def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Returns when the sink keeps these, in this order. Raises `SinkError`.

        Each has the fields of an event in the API, and `run_id` and `workflow`.
        """
        ...

    async def close(self) -> None: ...


class EventExporter:
    def __init__(
        self,
        source: EventSource,
        sink: EventSink,
        clock: Clock,
        *,
        redact: Callable[[str], str] = str,
        count: Callable[[str, int, float], None] = lambda outcome, many, seconds: None,
    ) -> None:
        """`count` gets how many events were `written` or `failed`, and how old the first is."""
        self._source = source
        self._sink = sink
        self._clock = clock
        self._redact = redact
        self._count = count
        self._pause = 0.0
        self._exporting = asyncio.Lock()

    async def run(self) -> None:
        """Export, for ever."""
        try:
            while True:
                if await self._source.leads(LEAD_SECONDS):
                    await self.export_changed()
                    await self._source.news(LOOK_SECONDS)
                else:
                    await asyncio.sleep(LEAD_SECONDS / 5)
        finally:
            await self._sink.close()
            with suppress(StoreError):  # then another process exports when the lead ends
                await self._source.leave()

    async def drain(self, seconds: float) -> None:
        """Export what is left before this process ends, within this time. Another process exports
        the rest."""
        try:
            with suppress(StoreError):
                async with asyncio.timeout(seconds):
                    if await self._source.leads(LEAD_SECONDS):
                        await self.export_changed()
        except TimeoutError:
            log.warning("the sink did not take the last events within %g s; they wait", seconds)

    async def export_changed(self) -> None:
        """Export what the runs have by now; returns early if another process has taken over."""
        async with self._exporting:
            left = list(await self._source.changed())
            while left:
                pages = await self._source.unexported(left[:RUNS_AT_ONCE], PAGE_SIZE)
                if pages:
                    await self._write(pages)
                    await self._source.exported(pages)
                if not await self._source.leads(LEAD_SECONDS):
                    return
                left[:RUNS_AT_ONCE] = [page.run_id for page in pages if page.goes_on]
            await self._source.settle()

    async def _write(self, pages: Sequence[UnexportedRun]) -> None:
        records = [
            {**event_view(event), "run_id": page.run_id, "workflow": page.workflow}
            for page in pages
            for event in page.events
        ]
        first = min(page.events[0].time for page in pages)
        while True:
            age = max(0.0, self._clock() - first)
            try:
                await self._sink.write(records)
            except SinkError as problem:
                self._count("failed", len(records), age)
                self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
                why = self._redact(str(problem))
                log.warning("events are not exported: %s; trying again", why)
                await self._wait(self._pause)
            else:
                self._count("written", len(records), age)
                self._pause = 0.0
                return

    async def _wait(self, seconds: float) -> None:
        """Keep the lead meanwhile: another process would fail, too."""
        while seconds > 0:
            await self._source.leads(LEAD_SECONDS)
            await asyncio.sleep(min(seconds, LEAD_SECONDS / 3))
            seconds -= LEAD_SECONDS / 3
