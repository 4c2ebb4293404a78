"""Keeps leases from a thread of its own, while the worker's event loop is blocked.

A handler that blocks the loop, a reply of a gigabyte or a large output would otherwise cost every
other node of the worker its lease. But a thread that renews for ever would keep a worker that hangs
alive. So it renews while the loop turns, and otherwise only for as long as the handler that blocks
it, and each other start, may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from dovetail.core.events import Token
from dovetail.engine.ports import Task

GRACE_SECONDS = 1.0
"""So long after its timeout a start is still renewed: its failure may be on its way."""
UNKNOWN_SECONDS = 300.0
"""What may block the loop if it is no handler: as long as a handler may usually take."""
WARN_SECONDS = 3.0
JOIN_SECONDS = 5.0
log = logging.getLogger("dovetail.worker")

Start = tuple[str, str, Token]


class HeldStarts:
    """Starts that a worker has claimed and whose results have not arrived yet.

    This includes starts that wait for the loop to begin or to report them. The loop writes, the
    thread reads.
    """

    def __init__(self) -> None:
        self._tasks: dict[Start, Task] = {}

    def add(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._tasks[task.run_id, task.node_id, task.token] = task

    def drop(self, starts: Iterable[Start]) -> None:
        for start in starts:
            self._tasks.pop(start, None)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, start: object) -> bool:
        return start in self._tasks

    def tasks(self) -> list[Task]:
        return list(self._tasks.values())  # a copy: the loop goes on meanwhile


class Liveness:
    """Whether an event loop still serves its handlers, asked from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, blocker: Callable[[], Task | None]) -> None:
        """`blocker` says which start the loop is at."""
        self._loop = loop
        self._blocker = blocker
        self._asked_at: float | None = None
        """When the loop was asked to turn and has not since."""
        self._warned = False

    def renewable(self, tasks: Iterable[Task]) -> list[Task]:
        """Those that still may run: all while the loop turns."""
        blocked = self.blocked_seconds()
        if not blocked:
            return list(tasks)
        most = self._longest()
        return [
            task for task in tasks if blocked <= min(most, task.timeout_seconds + GRACE_SECONDS)
        ]

    def is_alive(self) -> bool:
        """It turns, or what blocks it may take that long."""
        blocked = self.blocked_seconds()
        return not blocked or blocked <= self._longest()

    def blocked_seconds(self) -> float:
        """For how long the loop has not turned, at least."""
        asked_at = self._asked_at
        if asked_at is None:
            self._asked_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # it is closed: nothing runs there any more
                self._loop.call_soon_threadsafe(self._turned)
            return 0.0
        return time.monotonic() - asked_at

    def _turned(self) -> None:
        self._asked_at = None
        self._warned = False

    def _longest(self) -> float:
        """How long the loop may be blocked by what it is at."""
        task = self._blocker()
        if not self._warned and self.blocked_seconds() > WARN_SECONDS:
            self._warned = True
            log.warning(
                "%s keeps the event loop: nothing else goes on in this process, but leases are "
                "renewed meanwhile. A handler that blocks belongs into a plain `def`",
                "something" if task is None else f"run {task.run_id}, node {task.node_id}",
            )
        return (UNKNOWN_SECONDS if task is None else task.timeout_seconds) + GRACE_SECONDS


class DutyThread:
    """Runs a coroutine in an event loop and a thread of its own; use `async with`."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """`on_crash` is called in the loop of the owner with what ended the work, if it ended."""
        self._work = work
        self._on_crash = on_crash
        self._owner = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._doing: asyncio.Task[None] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    async def __aenter__(self) -> DutyThread:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._cancel)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def _cancel(self) -> None:
        if self._doing is not None:
            self._doing.cancel()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except BaseException as error:
            self._tell(error)
        finally:
            self._loop.close()

    async def _run(self) -> None:
        if self._closing:
            return
        self._doing = asyncio.ensure_future(self._work())
        try:
            await self._doing
        except asyncio.CancelledError:
            if not self._closing:
                raise

    def _tell(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        with contextlib.suppress(RuntimeError):  # the owner is gone
            self._owner.call_soon_threadsafe(self._on_crash, error)
