"""A batch on a server: sent there whole, and followed by its counts.

Its runs go on whoever looks on; the same command line again finds the batch by its key. What it
must not know: how lines are read, or how progress looks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from dovetail.cli.batching import MOST_FAILURES, Batch, Failure
from dovetail.cli.ending import error_words
from dovetail.cli.failures import InvalidInput
from dovetail.cli.lanes import tick
from dovetail.cli.stage import Stopping
from dovetail.cli.tally import Progress
from dovetail.cli.text import clip, plain
from dovetail.core.errors import InvalidDefinition
from dovetail.core.states import FINAL, RunStatus
from dovetail.engine.commands import Commands

LOOK_SECONDS = 0.5
_PAGE = 1000
_BAD = (RunStatus.FAILED.value, RunStatus.CANCELLED.value)


class SentBatch(Batch):
    async def _open(self, commands: Commands) -> dict[str, Any]:
        items = [item.params for item in self._items]
        try:
            return await commands.batch(self._checked, items, idempotency_key=self._key)
        except InvalidDefinition as error:
            reason = "; ".join(problem.message for problem in error.problems)
            if any(problem.code == "too_large" for problem in error.problems):
                reason = f"too much for one batch of a server: {reason}; split the file"
            raise InvalidInput(f"{self._items.name}: {reason}") from None

    async def _drive(
        self, commands: Commands, stopping: Stopping, progress: Progress | None
    ) -> None:
        if self._retry_failed and await self._went_badly(commands):
            await commands.retry_batch(self._batch_id)
        following = asyncio.create_task(self._follow(commands))
        asked = asyncio.create_task(stopping.wait())
        showing: list[asyncio.Task[None]] = []
        if progress is not None:
            progress.begin()
            showing.append(asyncio.create_task(stopping.while_read(tick(progress))))
        try:
            await asyncio.wait({following, asked}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                await self._find_failures(commands)
        finally:
            for task in (asked, following, *showing):
                task.cancel()
            await asyncio.gather(asked, following, *showing, return_exceptions=True)
            if progress is not None:
                progress.end()

    async def _went_badly(self, commands: Commands) -> bool:
        counts = (await commands.get_batch(self._batch_id, limit=1))["counts"]
        return any(counts.get(status) for status in _BAD)

    async def _follow(self, commands: Commands) -> None:
        """Returns when every run of it has finished."""
        while True:
            batch = await commands.get_batch(self._batch_id, limit=1)
            for status in FINAL:
                self._tally.counts[status.value] = batch["counts"].get(status.value, 0)
            if batch["finished_at"] is not None:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _find_failures(self, commands: Commands) -> None:
        """The first runs that went wrong, each with the line of its item."""
        if not any(self._tally.counts[status] for status in _BAD):
            return
        cursor: str | None = None
        bad: dict[int, str] = {}
        while len(bad) < MOST_FAILURES:
            page = await commands.get_batch(
                self._batch_id, limit=_PAGE, cursor=cursor, counts=False
            )
            bad |= {run["index"]: run["run_id"] for run in page["runs"] if run["status"] in _BAD}
            cursor = page["next_cursor"]
            if cursor is None:
                break
        for item in self._items:
            if item.place in bad and self._has_room():
                run = await commands.get_run(bad[item.place], nodes=False)
                self._failures.append(Failure(item.line, run["run_id"], _why(run)))


def _why(run: dict[str, Any]) -> str:
    error = run["error"]
    if error is None:
        return str(run["status"]).lower()
    node = str(error.get("node", ""))
    return clip(plain(f"{node}: {error_words(node, error)}"), 200)
