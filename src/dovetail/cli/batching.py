"""A batch from its items to its exit code: so many runs in flight, however many lines there are.

It can be killed at any moment and started again with the same command line: what is there is
not made again, what nobody drives any more is taken over, the rest is made. What it must not
know: how lines are read, or how progress looks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from dovetail.cli import streams
from dovetail.cli.driving import SHORT_ID, cancelled_from_outside
from dovetail.cli.ending import command, error_words, status_piece, typed_again
from dovetail.cli.failures import FAILED
from dovetail.cli.interrupts import Ask
from dovetail.cli.items import Item, Items, Survey
from dovetail.cli.json_output import Write, json_bytes
from dovetail.cli.lanes import MOST_SHARED, RUNS_PER_SLOT, Lanes
from dovetail.cli.places import driving, is_shared, looking
from dovetail.cli.stage import Stopping, perform
from dovetail.cli.tally import Progress, Tally, progress_of
from dovetail.cli.text import Line, clip, counted, duration, plain, table
from dovetail.config import Settings
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import Conflict
from dovetail.core.run import RunState
from dovetail.core.states import FINAL, RunStatus
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry

MOST_FAILURES = 10
RETRY = "--retry-failed"
_PAGE = 1000
_TURN = 500
"""After so many items that need no waiting, everything else gets its turn."""

# What an earlier process has left of an item, in one byte: there may be millions.
_ABSENT, _UNFINISHED = 0, 1
_ENDED = {status.value: code for code, status in enumerate(sorted(FINAL), 2)}
_STATUS = {code: status for status, code in _ENDED.items()}


class Failure(NamedTuple):
    line: int
    run_id: str
    why: str


class Batch:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        checked: Checked,
        items: Items,
        survey: Survey,
        key: str,
        write: Write | None,
        *,
        retry_failed: bool,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._checked = checked
        self._items = items
        self._survey = survey
        self._key = key
        self._write = write
        self._retry_failed = retry_failed
        self._shared = is_shared(settings)
        self._tally = Tally(survey.count)
        self._batch_id = ""
        self._known = bytearray(survey.count)
        self._lanes: Lanes | None = None
        self._failures: list[Failure] = []

    def run(self) -> int:
        return perform(self._perform, self._give_up, self._settings.drain_seconds)

    async def _perform(self, stopping: Stopping) -> int:
        async with driving(self._settings, self._registry) as commands:
            opened = await self._open(commands)
            self._batch_id = opened["batch_id"]
            if not opened["created"]:
                await self._look_back(commands)
            self._say_begin()
            progress = progress_of(self._tally) if self._write is None else None
            await self._drive(commands, stopping, progress)
        told = list(self._ending(stopping.asked))
        if self._write is not None:
            async with looking(self._settings) as commands:
                self._write(json_bytes(await commands.get_batch(self._batch_id, limit=_PAGE)))
            if stopping.asked is not None:
                streams.complain(told[-1])  # how to go on, which the document does not say
        else:
            for line in told:
                streams.say(line)
        if stopping.asked is not None and self._tally.done < self._survey.count:
            return stopping.asked.value
        completed = self._tally.counts[RunStatus.COMPLETED.value]
        return 0 if completed == self._survey.count else FAILED

    async def _open(self, commands: Commands) -> dict[str, Any]:
        return await commands.open_batch(
            self._checked,
            self._survey.count,
            idempotency_key=self._key,
            items=self._survey.digest,
        )

    async def _look_back(self, commands: Commands) -> None:
        """What an earlier process has made of this batch."""
        # A run may be FAILED and yet not finished: a node of it ran on when its process died.
        orphans = set(await commands.store.orphans())
        cursor: str | None = None
        while True:
            page = await commands.get_batch(
                self._batch_id, limit=_PAGE, cursor=cursor, counts=False
            )
            for run in page["runs"]:
                ended = _ENDED.get(run["status"], _UNFINISHED)
                self._known[run["index"]] = _UNFINISHED if run["run_id"] in orphans else ended
            cursor = page["next_cursor"]
            if cursor is None:
                return

    # ── driving ──────────────────────────────────────────────────────────────────────────

    async def _drive(
        self, commands: Commands, stopping: Stopping, progress: Progress | None
    ) -> None:
        items = iter(self._items)
        window = RUNS_PER_SLOT * self._settings.concurrency
        window = min(self._survey.count, MOST_SHARED if self._shared else window)
        self._lanes = lanes = Lanes(commands, stopping)
        made = [self._lane(commands, lanes, items, stopping) for _ in range(window)]
        await lanes.drive(made, progress)

    async def _lane(
        self, commands: Commands, lanes: Lanes, items: Iterator[Item], stopping: Stopping
    ) -> None:
        """One of the places in the window. All lanes take from the same items."""
        quick = 0
        for item in items:
            if stopping.asked is not None:
                return
            left = self._known[item.place]
            if left in _STATUS and not self._wants_retry(_STATUS[left]):
                self._tally.add(_STATUS[left], before=True)
                if (quick := quick + 1) % _TURN == 0:
                    await asyncio.sleep(0)
                if left != _ENDED[RunStatus.COMPLETED] and self._has_room():
                    await self._remember(commands, item)
                continue
            await self._see(commands, lanes, item, left)

    def _wants_retry(self, status: str) -> bool:
        return self._retry_failed and status != RunStatus.COMPLETED

    def _has_room(self) -> bool:
        return len(self._failures) < MOST_FAILURES

    async def _see(self, commands: Commands, lanes: Lanes, item: Item, left: int) -> None:
        place = (self._batch_id, item.place)
        accepted = await commands.trigger(self._checked, item.params, place=place)
        if left in _STATUS:
            with suppress(Conflict):  # another process retries the same batch
                await commands.retry(accepted.run_id)
        run = await lanes.see(accepted.run_id, just_made=accepted.created)
        if run is not None:
            self._tally.add(run.status.value)
            if run.status is not RunStatus.COMPLETED and self._has_room():
                self._failures.append(_failure(item, run))

    async def _remember(self, commands: Commands, item: Item) -> None:
        """A failure of an earlier process: there already, so this only looks it up."""
        place = (self._batch_id, item.place)
        accepted = await commands.trigger(self._checked, item.params, place=place)
        self._failures.append(_failure(item, await commands.store.load(accepted.run_id)))

    # ── words ────────────────────────────────────────────────────────────────────────────

    def _say_begin(self) -> None:
        if self._write is None:
            assert self._checked.workflow is not None  # noqa: S101
            name = plain(self._checked.workflow.name)
            runs = counted(self._survey.count, "run")
            ended = sum(code in _STATUS for code in self._known)
            before = f", {ended:,} had ended before" if ended else ""
            streams.say(f"RUNNING batch {self._batch_id[:SHORT_ID]} {name}, {runs}{before}")
            sys.stdout.flush()

    def _ending(self, asked: Ask | None) -> Iterator[Line]:
        tally = self._tally
        left = self._survey.count - tally.done
        bad = tally.done - tally.counts[RunStatus.COMPLETED.value]
        told = tally.summary() + (f", {left:,} left" if left else "")
        status = "COMPLETED" if not (bad or left) else "FAILED"
        if left:
            goes_on = asked is Ask.HAND_BACK or self._shared
            status = "RUNNING" if goes_on else "CANCELLED"
        short = self._batch_id[:SHORT_ID]
        yield [status_piece(status), (f" batch {short} in {duration(tally.passed)}: {told}", "")]
        rows: list[Line] = [
            [
                (f"  {self._items.name}:{failure.line}", ""),
                (failure.run_id[:SHORT_ID], "bold"),
                (failure.why, "bad"),
            ]
            for failure in sorted(self._failures)
        ]
        yield from table(rows, streams.room())
        if bad > len(rows):
            listing = command("runs", "list", "--batch", self._batch_id, "--status", "FAILED")
            yield [(f"  and {bad - len(rows):,} more:  {listing}", "dim")]
        if left and self._shared:
            again = "what was made goes on without this view; make the rest with:  "
            yield [(again, "dim"), (typed_again(), "bold")]
        elif asked is Ask.HAND_BACK and left:
            yield [("handed back; go on with:  ", "dim"), (typed_again(), "bold")]
        elif left:
            yield [("go on with:  ", "dim"), (typed_again(RETRY), "bold")]
        elif bad:
            again = f"      reruns {bad:,}, reuses {tally.done - bad:,}"
            yield [("fix it, then:  ", "dim"), (typed_again(RETRY), "bold"), (again, "dim")]

    def _give_up(self, asked: Ask) -> None:
        """In another thread, because this one is stuck."""
        cancels = asked.cancels and not self._shared
        flying = [] if self._lanes is None else list(self._lanes.flying)
        if cancels and cancelled_from_outside(self._settings, flying):
            words = "CANCELLED, without waiting for what still runs; go on with:  "
            words += typed_again(RETRY)
        else:
            words = f"handed back as it was; go on with:  {typed_again()}"
        os.write(2, words.encode() + b"\n")


def _failure(item: Item, run: RunState) -> Failure:
    error: dict[str, Any] = run.error or {}
    node = str(error.get("node", ""))
    why = f"{node}: {error_words(node, error)}" if error else run.status.value.lower()
    return Failure(item.line, run.id, clip(plain(why), 200))
