"""Runs one handler at a time, in the thread of its caller.

For pools whose processes do one thing each. The handler has the thread to itself, so it can be
interrupted anywhere. A `LeaseThread` renews its lease, receives orders to stop and watches its
timeout. A handler that ends soon is done before that thread has acted once, and costs no more than
its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.node_logs import LogChunk
from dovetail.core.transitions import Complete, Fail, Progress, Stop
from dovetail.engine.clock import Clock
from dovetail.engine.distributed.task_source import QueueTaskSource, keep_leases
from dovetail.engine.ports import Call, Calls, HandlerLog, Result, Task
from dovetail.engine.stacks import stack_of_coroutine, stack_of_thread
from dovetail.engine.watchdog import place_of_thread
from dovetail.engine.worker import (
    LOG_SECONDS,
    PROGRESS_SECONDS,
    STOP_GRACE_SECONDS,
    failure,
    log_failure,
    pause_asked_by,
    refusal,
    timeout,
)

LOOK_SECONDS = 0.1
AGAIN_SECONDS = 0.5
FAREWELL_SECONDS = 2.0
LATE_SECONDS = 0.2
"""So long after its timeout a handler is stopped here, if the pool has not stopped it."""
T = TypeVar("T")
log = logging.getLogger("dovetail.worker")


class Interrupted(BaseException):
    """Raised inside a handler that was stopped and did not return."""


class RunningTask:
    """A start that is claimed and not reported yet."""

    def __init__(self, task: Task, call: Call, interrupt: Callable[[], None] | None) -> None:
        self.task = task
        self.call = call
        self.began = time.monotonic()
        self.inside = False
        """The handler's own code has the thread: it may be interrupted."""
        self.expired = False
        self.is_warned = False
        """Its log says that it runs beyond its timeout."""
        self.stopped_at: float | None = None
        """When the handler was stopped."""
        self.interrupting = False
        self.has_progress = False
        self.log: HandlerLog | None = None
        """Once the handler has logged something."""
        self.doing: asyncio.Task[Any] | None = None
        self._interrupt = interrupt
        self._first = threading.Lock()
        self.thread = threading.get_ident()

    def finish(self) -> bool:
        """Take the right to report this start; False if another thread has taken it."""
        return self._first.acquire(blocking=False)

    def is_finished(self) -> bool:
        return self._first.locked()

    def stop(self) -> None:
        """Stop the handler; from another thread."""
        if self.stopped_at is None:
            if self.doing is None:
                self.stopped_at = time.monotonic()
                self.call.cancel()
            else:
                self.cancel(self.doing)

    def cancel(self, doing: asyncio.Task[Any]) -> None:
        """The same for one that runs in a loop, from any thread, and from a signal."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop was closed: it has ended
                doing.get_loop().call_soon_threadsafe(self._cancel)

    def stack(self) -> TracebackType | None:
        """Where the handler is, asked from another thread."""
        doing = self.doing
        # A coroutine that executes has no `cr_await`: its thread has the whole stack.
        waiting = doing is not None and asyncio.current_task(doing.get_loop()) is not doing
        coroutine = doing.get_coro() if doing is not None and waiting else None
        below = BlockingWorker._called.__code__
        return stack_of_coroutine(coroutine) or stack_of_thread(self.thread, below)

    def _cancel(self) -> None:
        self.call.cancel()
        if self.doing is not None:
            self.doing.cancel()

    def interrupt(self) -> None:
        if self.inside and self._interrupt is not None:
            self.interrupting = True
            self._interrupt()


class BlockingWorker:
    """Of one thread."""

    def __init__(
        self,
        calls: Calls,
        watch: LeaseThread,
        clock: Clock,
        *,
        log: Callable[[Sequence[LogChunk]], None],
        interrupt: Callable[[], None] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`log` hands lines in before a result. `interrupt` has `interrupted` called in this
        thread, whatever it is at."""
        self._calls = calls
        self._watch = watch
        self._clock = clock
        self._log = log
        self._interrupt = interrupt
        self._chance = chance
        self._loop: asyncio.AbstractEventLoop | None = None
        self.held: RunningTask | None = None
        self._leaving = False
        """The process ends: exceptions from now on are not the handler's."""

    def run(self, task: Task, send: Callable[[Result], None]) -> Result | None:
        """Call the handler of a claimed start, and send its result.

        None if it was stopped, given back, or reported by the lease thread.
        """
        try:
            call = self._calls.open(task, self._report, self._has_lines)
        except DovetailError as problem:
            described = refusal(problem)
            log_failure(task, described)
            result: Result = failure(task, problem, described, self._chance())
            send(result)
            return result
        held = self.held = RunningTask(task, call, self._interrupt)
        self._watch.hold(held)
        try:
            result = self._outcome(held)
            call.end_log()
            if held.finish():
                if held.has_progress:
                    self._watch.call(self._watch.flush)
                if isinstance(result, Fail):
                    log_failure(task, result.error)
                self._send(held, result, send)
                return result
            if isinstance(result, Complete):  # too late: it is only logged
                send(result._replace(output=None, cache=None))
            return None
        except BaseException:
            if self._leaving:
                self._watch.call(partial(self._watch.give_back, held), FAREWELL_SECONDS)
            raise
        finally:
            call.end_log()
            self.held = None
            self._watch.release(held)

    def _send(self, held: RunningTask, result: Result, send: Callable[[Result], None]) -> None:
        """Send the result behind the lines of its log."""
        chunks = held.log.drain() if held.log is not None else ()
        if held.log is not None and held.log.chunk_count > len(chunks):
            # The lease thread has sent lines on its own connection. On another connection these
            # lines and the result could overtake them.
            self._watch.call(partial(self._watch.report, chunks, result))
            return
        if chunks:
            self._log(chunks)
        send(result)

    def expire(self, error: type[BaseException] = Interrupted) -> None:
        """Its time is over: called in this thread, whatever it is at."""
        held = self.held
        if held is not None and _age(held) >= held.task.timeout_seconds / 2:  # not one before it
            held.expired = True
            if held.doing is not None:
                held.cancel(held.doing)
            elif held.inside:
                raise error

    def leave(self) -> None:
        """The process ends: give the running task back."""
        self._leaving = True

    def interrupted(self) -> None:
        """The handler was stopped a while ago and still runs: called in its thread."""
        held = self.held
        if held is not None and held.interrupting:
            held.interrupting = False
            if held.inside:
                raise Interrupted

    def _outcome(self, held: RunningTask) -> Result:
        task, call = held.task, held.call
        try:
            output = self._called(held)
            if held.expired:
                return timed_out(held, None, self._chance())
            sealed = call.seal(task, output)
        except BaseException as error:
            if self._leaving:
                raise
            if held.expired:
                return timed_out(held, sys.exc_info()[2], self._chance())
            pause = pause_asked_by(error)
            if pause is not None and task.resource_tag is not None:
                slow = partial(self._watch.slow, task.resource_tag, self._clock() + pause)
                self._watch.call(slow)
            return failure(task, error, call.describe(error), self._chance())
        cache = None if task.cache is None else call.caching(task)
        return Complete(task.run_id, task.node_id, task.token, sealed, cache)

    def _called(self, held: RunningTask) -> Any:
        context = copy_context()
        try:
            held.inside = True
            output = context.run(held.call.begin, held.task)
            if not inspect.isawaitable(output):
                return output
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            held.doing = self._loop.create_task(_awaited(output), context=context)
            return self._loop.run_until_complete(held.doing)
        finally:
            held.inside = False
            if held.doing is not None and not held.doing.done():
                self._abandon(held.doing)

    def _abandon(self, doing: asyncio.Task[Any]) -> None:
        """It was interrupted in the midst of its loop: let it clean up, and trust neither."""
        loop, self._loop = doing.get_loop(), None
        doing.cancel()
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait([doing], timeout=STOP_GRACE_SECONDS))
        doing._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    def _report(self, task: Task, fraction: float, message: str) -> None:
        held = self.held
        if held is not None and held.task is task:
            held.has_progress = True
        self._watch.note(Progress(task.run_id, task.node_id, task.token, fraction, message))

    def _has_lines(self, log: HandlerLog) -> None:
        """A log has lines; called in whichever thread of the handler."""
        held = self.held
        if held is not None:
            held.log = log
        self._watch.has_lines(log)


def timed_out(held: RunningTask, stack: TracebackType | None, chance: float) -> Fail:
    error, described = timeout(held.task, held.call, stack)
    return failure(held.task, error, described, chance)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def _unless_away(work: Coroutine[Any, Any, None]) -> None:
    """A store that is away learns the same a little later, by a lease that runs out."""
    try:
        await work
    except StoreError as error:
        log.warning("not reported: %s", error)


def _age(held: RunningTask) -> float:
    return time.monotonic() - held.began


class LeaseThreadTasks(NamedTuple):
    """What a watch does its work with, in its own loop."""

    task_source: QueueTaskSource
    stops: Stops


class Stops(Protocol):
    """Orders to stop."""

    async def open(self) -> None:
        """Listen from now on."""
        ...

    async def next(self) -> list[Stop]:
        """The orders since the last call; waits a moment for some."""
        ...


class LeaseThread:
    """A thread with an event loop, for all blocking workers of a process."""

    def __init__(
        self,
        duties: Callable[[], AbstractAsyncContextManager[LeaseThreadTasks]],
        supervise: Callable[[str, Callable[[], Awaitable[None]]], Coroutine[Any, Any, None]],
        on_crash: Callable[[BaseException], None],
        *,
        lease_seconds: float,
        give_back_at: Callable[[], float],
        confirm: Callable[[], None],
    ) -> None:
        """`supervise` restarts a duty while a store is away. At `give_back_at`, a wall time,
        running tasks are given back. `confirm` returns when all reports of the workers have
        arrived."""
        self._open = duties
        self._supervise = supervise
        self._on_crash = on_crash
        self._lease_seconds = lease_seconds
        self._give_back_at = give_back_at
        self._confirm = confirm
        self._held: dict[int, RunningTask] = {}
        self._progress: dict[tuple[str, str], Progress] = {}
        self._logs: dict[HandlerLog, None] = {}
        self._asleep = False
        self._wanted = asyncio.Event()
        self._opened = asyncio.Event()
        self._duties: LeaseThreadTasks | None = None
        self.loop = self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        threading.Thread(target=self._main, name="dovetail-watch", daemon=True).start()

    # ── for the threads that run handlers ────────────────────────────────────────────────

    def hold(self, held: RunningTask) -> None:
        self._held[id(held)] = held
        if self._asleep:
            self._loop.call_soon_threadsafe(self._wanted.set)

    def release(self, held: RunningTask) -> None:
        del self._held[id(held)]

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None) -> T:
        """Run this in the loop of the thread, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(seconds)

    def note(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._noted, progress)

    def has_lines(self, log: HandlerLog) -> None:
        """Hand the lines of this log in, soon."""
        self._loop.call_soon_threadsafe(self._note_lines, log)

    async def opened(self) -> None:
        """Return once the thread can do its work."""
        await self._opened.wait()

    async def slow(self, tag: str, until: float) -> None:
        await (await self._ready()).task_source.slow(tag, until)

    async def start(self, task: Task) -> list[Task]:
        """Claim a task; returns no task if it was refused or parked."""
        return await (await self._ready()).task_source.start([(None, task)])

    async def give_back(self, held: RunningTask) -> None:
        if held.finish():
            await (await self._ready()).task_source.hand_back([held.task])

    async def report(self, chunks: Sequence[LogChunk], result: Result) -> None:
        """Report a result, behind these lines and the ones that were handed in before."""
        task_source = (await self._ready()).task_source
        if chunks:
            task_source.log(chunks)
        await task_source.report([result])

    async def flush(self) -> None:
        """Report progress."""
        noted = list(self._progress.values())
        self._progress.clear()
        if noted:
            await (await self._ready()).task_source.report(noted)

    # ── its own thread ───────────────────────────────────────────────────────────────────

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._supervise("watch", self._run))
        except BaseException as error:
            self._on_crash(error)

    async def _run(self) -> None:
        async with self._open() as duties:
            self._duties = duties
            self._opened.set()
            renewing = partial(
                keep_leases, duties.task_source, self._holding, self._ordered, self._lease_seconds
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self._supervise("leases", renewing))
                group.create_task(self._supervise("orders to stop", self._hear_stops))
                group.create_task(self._look_around())

    async def _ready(self) -> LeaseThreadTasks:
        await self._opened.wait()
        assert self._duties is not None  # noqa: S101
        return self._duties

    def _holding(self) -> list[Task]:
        """The tasks whose lease must be renewed. Nearly all tasks end before, and cost no
        renewal."""
        young = self._lease_seconds / 3
        return [held.task for held in list(self._held.values()) if _age(held) >= young]

    async def _hear_stops(self) -> None:
        task_source, stops = await self._ready()
        await stops.open()
        # An order from before we listened: the renewal of its task is refused.
        for order in await task_source.renew([held.task for held in list(self._held.values())]):
            self._ordered(order)
        while True:
            for order in await stops.next():
                self._ordered(order)

    def _ordered(self, order: Stop) -> None:
        """Stop the task that the order names: its result would be refused anyway."""
        for held in list(self._held.values()):
            if (held.task.run_id, held.task.node_id, held.task.token) == order and held.finish():
                held.stop()

    async def _look_around(self) -> None:
        while True:
            if not self._held:
                self._asleep = True
                await self._confirmed()  # from here on a new task wakes this thread
                if not self._held:
                    await self._wanted.wait()
                self._asleep = False
                self._wanted.clear()
            await asyncio.sleep(LOOK_SECONDS)
            for held in list(self._held.values()):
                self._look_at(held)

    async def _confirmed(self) -> None:
        while True:
            try:
                return await asyncio.to_thread(self._confirm)
            except StoreError as error:
                log.warning("a result is kept until it can be sent: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _look_at(self, held: RunningTask) -> None:
        age, limit = _age(held), held.task.timeout_seconds
        if age >= limit + LATE_SECONDS and not held.is_finished():
            # The pool may have interrupted it already: it caught that, and goes on.
            if not held.is_warned:
                held.is_warned = True
                self._warn_of_timeout(held)
            held.expired = True
            held.stop()
            # It clings on, and may be killed for it before it can say so.
            if age >= limit + STOP_GRACE_SECONDS and held.finish():
                # Its stack is read now: below it is interrupted.
                late = timed_out(held, held.stack(), random.random())  # noqa: S311
                self._spawn(self._tell_timeout(held, late))
        if time.time() >= self._give_back_at() and not held.is_finished():
            self._spawn(self._hand_back(held))
        stopped_at = held.stopped_at
        if stopped_at is not None and time.monotonic() - stopped_at >= STOP_GRACE_SECONDS:
            held.interrupt()

    def _warn_of_timeout(self, held: RunningTask) -> None:
        task, place = held.task, place_of_thread(held.thread)
        message = f"still runs in {place}, beyond its timeout of {task.timeout_seconds:g} s"
        held.call.warn(message)
        log.warning("run %s, node %s: %s", task.run_id, task.node_id, message)

    async def _tell_timeout(self, held: RunningTask, late: Fail) -> None:
        log_failure(held.task, late.error)
        await self.report(held.log.drain() if held.log is not None else (), late)

    async def _hand_back(self, held: RunningTask) -> None:
        await self.give_back(held)
        held.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(_unless_away(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _noted(self, progress: Progress) -> None:
        if not self._progress:
            self._loop.call_later(PROGRESS_SECONDS, lambda: self._spawn(self.flush()))
        self._progress[progress.run_id, progress.node] = progress

    def _note_lines(self, log: HandlerLog) -> None:
        if not self._logs:
            self._loop.call_later(LOG_SECONDS, self._hand_in)
        self._logs[log] = None

    def _hand_in(self) -> None:
        if self._duties is None:  # not open yet
            self._loop.call_later(LOG_SECONDS, self._hand_in)
            return
        logs, self._logs = list(self._logs), {}
        if chunks := [chunk for one in logs for chunk in one.drain()]:
            self._duties.task_source.log(chunks)
