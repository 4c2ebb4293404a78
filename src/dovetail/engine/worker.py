"""Runs handlers: takes claimed tasks, and reports their results.

One asyncio task at a time leads. The leader takes tasks and drives each handler itself until it
first waits for something; it then stays with that handler, and another asyncio task becomes the
leader. So a handler that never waits costs no task, no timer and no turn of the event loop, and one
that waits costs one of each. Every handler still runs in an asyncio task and in a context of its
own, so timeouts, cancel scopes and context variables inside it work as they would anywhere.

Plain functions run in daemon threads. The standard executor joins its threads when the interpreter
exits, so a handler stuck in a `sleep` would hold up Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from sys import getrefcount
from types import TracebackType, coroutine
from typing import Any

from dovetail.core.effects import new_tuple
from dovetail.core.errors import DovetailError, PermanentError, RetryableError, TemplateError
from dovetail.core.events import LATE, Token
from dovetail.core.items import split_name
from dovetail.core.node_logs import LogChunk
from dovetail.core.retry import MAX_RETRY_AFTER_SECONDS
from dovetail.core.transitions import Complete, Fail, Progress, Stop
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Call, Calls, HandlerLog, Result, Task, TaskSource
from dovetail.engine.stacks import stack_of_coroutine, stack_of_thread
from dovetail.engine.watchdog import WATCHDOG, place_of_thread

attempts_log = logging.getLogger("dovetail.attempts")
"""Failed attempts. A program that has not set up its logging does not see them."""
attempts_log.addHandler(logging.NullHandler())

_Job = tuple[
    Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], None] | None
]


class Threads:
    """As many threads as calls at once, reused; the caller bounds how many that are."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._closed = False

    def submit(
        self, work: Callable[[], Any], late: Callable[[], None] | None = None
    ) -> asyncio.Future[Any]:
        """`late` is called, in the loop, if it returns after its caller has gone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((partial(copy_context().run, work), loop, future, late))
        if not self._idle.acquire(blocking=False):
            self._started += 1
            name = f"dovetail-handler-{self._started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        self._closed = True
        for _ in range(self._started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future, late = job
            output: Any = None
            error: BaseException | None = None
            try:
                output = work()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_resolve, future, late, output, error)
            except RuntimeError:
                return  # the loop is gone, and the caller with it
            del job, work, future, late, output, error  # an idle thread holds no data
            if self._closed:
                return
            self._idle.release()


def _resolve(
    future: asyncio.Future[Any],
    late: Callable[[], None] | None,
    output: Any,
    error: BaseException | None,
) -> None:
    if future.done():  # it ran out of time or was stopped
        if error is None and late is not None:
            late()
        return
    if error is None:
        future.set_result(output)
    # Not `isinstance`, which asks the object: what that raises here would end the loop.
    elif issubclass(type(error), StopIteration):  # a future cannot carry it
        future.set_exception(RuntimeError("the handler raised StopIteration"))
    else:
        future.set_exception(error)


LEAD_SECONDS = 0.01
"""How long handlers that never wait may keep the event loop from everything else."""
STOP_GRACE_SECONDS = 1.0
"""How long a handler may take to return after it was stopped."""
MAX_UNMET = 1000
PROGRESS_SECONDS = 0.05
"""The shortest time between two progress reports of a node: only people read them."""
LOG_SECONDS = 0.5
"""How long lines of a log wait to be handed in, unless a result comes first."""
TICK_SECONDS = 0.1
"""How often a loop with handlers that wait notes the time. A longer pause is a blocked loop."""
BLOCK_SECONDS = TICK_SECONDS / 2
log = logging.getLogger("dovetail.worker")


class _Running:
    """A handler that waits for something."""

    __slots__ = (
        "blocked_before",
        "blocks",
        "call",
        "detached",
        "task",
        "thread",
        "timer",
        "waiter",
        "work",
    )
    timer: asyncio.TimerHandle
    waiter: asyncio.Task[Any]

    def __init__(self, task: Task, call: Call, blocked_before: float, blocks: float) -> None:
        self.task = task
        self.call = call
        self.blocked_before = blocked_before
        """For how long the loop had been blocked when this began, or got more time."""
        self.blocks = blocks
        """For how long it has blocked the loop itself since."""
        self.detached = False
        """It ran out of time or was stopped: what it does from now on counts no more."""
        self.work: Coroutine[Any, Any, Any] | None = None
        """The coroutine of an async handler."""
        self.thread: int | None = None
        """The thread that runs a plain function at the moment."""


class Worker:
    def __init__(
        self,
        task_source: TaskSource,
        calls: Calls,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        *,
        concurrency: int,
        chance: Callable[[], float] = random.random,
        watches_loop: bool = True,
    ) -> None:
        """With `watches_loop` it notices handlers that block its loop. A loop whose clock is not
        the machine's cannot be watched."""
        self._task_source = task_source
        self._calls = calls
        self._clock = clock
        self._on_crash = on_crash
        self._concurrency = concurrency
        self._chance = chance
        self._threads: Threads | None = None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._claimed: deque[Task] = deque()
        self._busy = 0
        """Slots in use: claimed, whether its handler has begun or not."""
        self._slot_freed = asyncio.Event()
        # By start and not by node: one whose lease was lost, or forgotten with the end of a log,
        # may start here again while its handler still runs.
        self._running: dict[_Running, None] = {}
        self._results: list[Result] = []
        self._progress: dict[tuple[str, str], Progress] = {}
        self._telling = asyncio.Lock()
        """Held while progress is being reported: after its node's result, it would be refused."""
        self._slowed: list[tuple[str, float]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reporting: set[asyncio.Task[Any]] = set()
        self._leader: asyncio.Task[None] | None = None
        self._driven: Task | None = None
        """The start that the leader drives, or drove last."""
        self._driven_call: Call | None = None
        self._logs: dict[HandlerLog, None] = {}
        """Logs with lines that are not handed in."""
        self._logs_are_due = False
        # Of no handler: what follows from a line of one must not be taken for the handler's.
        self._context = copy_context()
        self._blocked = 0.0
        """For how long the loop was blocked while handlers waited, in seconds, all in all."""
        self._ticked_at = 0.0
        self._ticks = False
        self._is_watched = False
        self._watches_loop = watches_loop
        self._blocking: tuple[Task, float] | None = None
        """The start that the watchdog found at the loop, and since when."""
        self._warned_of: Task | None = None
        self._unmet: set[tuple[str, str, Token]] = set()
        """Starts that were stopped and are not here. Each is named once, so none is stopped that
        should not be."""
        self._draining = False
        self._closing = False

    # ── life ─────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._promote()

    async def drain(
        self,
        seconds: float,
        give_back: Callable[[list[Task]], Awaitable[None]] | None = None,
    ) -> None:
        """Take no more work, and give what runs this long to finish.

        What has not begun then is given back at once, and in the end what has not finished.
        """
        self._draining = True
        leader = self._leader
        if leader is not None and leader not in self._stayers():
            leader.cancel()
            await asyncio.wait([leader], timeout=STOP_GRACE_SECONDS)  # it may be at a report
        if give_back is not None:
            unbegun = list(self._claimed)
            self._claimed.clear()
            await give_back(unbegun)
        if left := self._stayers():
            await asyncio.wait(left, timeout=seconds)
        await self._flush()
        # What is done and still being reported is neither lost nor given back.
        while self._reporting:
            await asyncio.wait(self._reporting)
            await self._flush()
        self._hand_in()
        if give_back is not None:
            await give_back(self.holding())

    def _stayers(self) -> set[asyncio.Task[Any]]:
        return {running.waiter for running in self._running}

    async def close(self) -> None:
        """Take no more work and stop what runs, with a short grace."""
        self._closing = self._draining = True
        for running in list(self._running):
            self._detach(running)
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)  # enough for nearly every one of them
        if left := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(left, timeout=STOP_GRACE_SECONDS)
        self._hand_in()
        WATCHDOG.forget(self)
        if self._threads is not None:
            self._threads.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A bug or a lost store must end the worker loudly, never leave it half alive."""
        self._tasks.discard(task)
        if task.cancelled():
            # Not by us: a handler kept hold of the task it ran in, and cancelled it.
            if task is self._leader:
                self._promote()
            elif self._results and not self._draining:
                self._spawn(self._flush())  # the task was at this
        elif error := task.exception():
            self._on_crash(error)

    # ── leading ──────────────────────────────────────────────────────────────────────────

    def _promote(self) -> None:
        if not self._draining:
            self._leader = self._spawn(self._lead())

    async def _lead(self) -> None:
        me = asyncio.current_task()
        assert me is not None  # noqa: S101
        now, claimed = time.monotonic, self._claimed
        open_call, report, on_lines = self._calls.open, self._report, self._has_lines
        at = now()
        pause_at = at + LEAD_SECONDS
        held = getrefcount(me)
        while True:
            if not claimed:
                self._driven = None
                await self._refill()
                at, held = now(), getrefcount(me)
            if at > pause_at:
                await asyncio.sleep(0)
                at, held = now(), getrefcount(me)
                pause_at = at + LEAD_SECONDS
                continue  # what was claimed may have been stopped meanwhile
            self._driven = task = claimed.popleft()
            try:
                self._driven_call = call = open_call(task, report, on_lines)
            except DovetailError as problem:
                self._settle(self._failure(task, problem, refusal(problem)))
                at = now()
                continue
            if not call.is_async:
                # Entered before its task has begun: a stop may come in between.
                running = self._enter(task, call, 0.0)
                running.waiter = self._spawn(self._stay(running))
                at = now()
                continue
            context = copy_context()
            try:
                work = context.run(call.begin, task) if call.is_logged else call.begin(task)
                waits_for = context.run(work.send, None)
            except StopIteration as returned:
                began, at = at, now()
                # The first comparison alone for nearly every node.
                if at > pause_at and at - began > task.timeout_seconds:
                    self._refuse_late(task, call)
                else:
                    self._succeed(task, call, returned.value)
            except BaseException as error:
                self._fail(task, call, error)
                at = now()
                del error
            else:
                running = self._enter(task, call, now() - at)
                running.waiter, running.work = me, work
                self._promote()
                await self._stay(running, _resume(work, context, waits_for, running))
                return
            if me.cancelling() or getrefcount(me) != held:
                # The handler cancelled the task it ran in, or kept it to do so later: the next
                # handler runs in another one, and is not cancelled in its place.
                self._promote()
                return

    async def _refill(self) -> None:
        """Report what is done, then take as much as there are free slots."""
        while not self._claimed:
            if self._progress or self._slowed or self._telling.locked():
                await self._flush()
            elif self._results:  # the same, shorter: this is every node of a chain
                results, self._results = self._results, []
                if self._logs:
                    self._hand_in(ended=True)
                try:
                    await self._task_source.report(results)
                except asyncio.CancelledError:  # by a drain, which reports what is left
                    self._results[:0] = results
                    raise
            free = self._concurrency - self._busy
            if free > 0:
                tasks = await self._task_source.take(free)
                if self._unmet:
                    tasks = [task for task in tasks if _order(task) not in self._unmet]
                self._busy += len(tasks)
                self._claimed.extend(tasks)
                if not self._is_watched and self._watches_loop:
                    self._is_watched = True
                    WATCHDOG.watch(self)
            else:
                self._slot_freed.clear()
                await self._slot_freed.wait()

    # ── staying with a handler that waits ────────────────────────────────────────────────

    async def _stay(self, running: _Running, work: Awaitable[Any] | None = None) -> None:
        task, call = running.task, running.call
        try:
            output = await (work or self._in_thread(running))
        except BaseException as error:
            if not running.detached:
                self._fail(task, call, error)
        else:
            if running.detached:
                self._note_late(task)
            elif (
                running.blocks
                and self._loop.time() >= running.timer.when()
                and not self._spare(running)
            ):
                self._refuse_late(task, call)
            else:
                self._succeed(task, call, output)
        if not running.detached:
            running.timer.cancel()
            del self._running[running]
        if self._closing:
            return
        me = asyncio.current_task()
        if me is not None and me.cancelling():  # by us, or by its handler: a flush would be, too
            self._spawn(self._flush())
        else:
            await self._flush()

    async def _in_thread(self, running: _Running) -> Any:
        # A thread cannot be stopped from outside: one that is detached is left to itself.
        if self._threads is None:
            self._threads = Threads()
        late = partial(self._late, running.task)
        output = await self._threads.submit(partial(_begin_here, running), late)
        return await output if inspect.isawaitable(output) else output

    def _note_late(self, task: Task) -> None:
        """Too late: the log shall tell, nothing follows from it. Not even if the store has lost
        that the node was stopped: what a handler returns then may be half of it, or nothing."""
        late = task.token._replace(nonce=LATE)
        self._results.append(Complete(task.run_id, task.node_id, late, None))

    def _late(self, task: Task) -> None:
        """The same of a thread that was left to itself."""
        if not self._closing:
            self._note_late(task)
            self._spawn(self._flush())

    def _refuse_late(self, task: Task, call: Call) -> None:
        """It returned after its timeout, and blocked the loop until then."""
        if self._warned_of is not task:
            call.warn(f"kept the event loop {_beyond(task)}, so it fails. {BELONGS}")
        self._settle(self._failure(task, *timeout(task, call, None)))
        self._note_late(task)

    def _enter(self, task: Task, call: Call, spent: float) -> _Running:
        """`spent` is how long it has had the loop already."""
        blocks = spent if spent > BLOCK_SECONDS else 0.0
        running = _Running(task, call, self._blocked, blocks)
        running.timer = self._loop.call_later(task.timeout_seconds - spent, self._expire, running)
        self._running[running] = None
        if not self._ticks and self._watches_loop:
            self._ticks = True
            self._ticked_at = time.monotonic()
            self._loop.call_later(TICK_SECONDS, self._tick)
        return running

    # ── a loop that was blocked ──────────────────────────────────────────────────────────

    def _tick(self) -> None:
        self._measure()
        self._ticks = bool(self._running)
        if self._ticks:
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _measure(self) -> None:
        now = time.monotonic()
        passed = now - self._ticked_at
        if self._ticks and passed > TICK_SECONDS + BLOCK_SECONDS:
            self._blocked += passed
        self._ticked_at = now

    def _spare(self, running: _Running) -> bool:
        """Give a handler the time back that others have blocked the loop; False if that is over."""
        self._measure()
        lost = self._blocked - running.blocked_before - running.blocks
        running.blocked_before, running.blocks = self._blocked, 0.0
        at = running.timer.when() + lost
        if lost <= TICK_SECONDS or at <= self._loop.time():
            return False
        running.timer.cancel()
        running.timer = self._loop.call_at(at, self._expire, running)
        return True

    @property
    def is_busy(self) -> bool:
        return self._busy > 0

    def unwatched(self) -> None:
        self._is_watched = False

    def look(self, now: float) -> None:
        """Warn of a handler that blocks the loop beyond its timeout; called by the watchdog."""
        task, call, deadline = self._at_the_loop()
        if task is None or call is None:
            self._blocking = None
            return
        if self._blocking is None or self._blocking[0] is not task:
            self._blocking = (task, now)
        since = self._blocking[1]
        if deadline is None:  # it is driven by the leader, and has never waited
            is_over = now - since > task.timeout_seconds
        else:
            is_blocked = now - max(since, self._ticked_at) > 2 * TICK_SECONDS
            is_over = is_blocked and self._loop.time() > deadline
        if is_over and self._warned_of is not task:
            self._warned_of = task
            place = place_of_thread(self._loop_thread)
            message = f"blocks the event loop in {place}, {_beyond(task)}: it fails when it returns"
            call.warn(f"{message}. {BELONGS}")
            log.warning("run %s, node %s: %s. %s", task.run_id, task.node_id, message, BELONGS)

    def _at_the_loop(self) -> tuple[Task | None, Call | None, float | None]:
        """Whose handler has the loop, and its deadline if it has waited before."""
        current = asyncio.current_task(self._loop)
        if current is not None:
            for running in list(self._running):
                if getattr(running, "waiter", None) is current:
                    return running.task, running.call, running.timer.when()
            if current is self._leader:
                return self._driven, self._driven_call, None
        return None, None, None

    def _detach(self, running: _Running) -> None:
        """Stop a handler, and do not wait for it any longer."""
        running.detached = True
        running.timer.cancel()
        del self._running[running]
        running.call.end_log()
        running.call.cancel()
        running.waiter.cancel()

    def _expire(self, running: _Running) -> None:
        if self._spare(running):
            return
        task, call = running.task, running.call
        if running.thread is not None:
            self._warn_of_thread(task, call, running.thread)
        stack = stack_of_coroutine(running.work)
        stack = stack or stack_of_thread(running.thread, _begin_here.__code__)
        error, described = timeout(task, call, stack)
        self._detach(running)
        self._settle(self._failure(task, error, described))
        self._spawn(self._flush())

    def _warn_of_thread(self, task: Task, call: Call, thread: int) -> None:
        message = f"still runs in its thread, {place_of_thread(thread)}, {_beyond(task)}"
        call.warn(f"{message}. {CHECK_CANCELLED}")
        log.warning("run %s, node %s: %s", task.run_id, task.node_id, message)

    def holding(self) -> list[Task]:
        """Every start that is claimed and not done with."""
        return [*(running.task for running in self._running), *self._claimed]

    def blocker(self) -> Task | None:
        """The start whose handler has the event loop just now; asked from another thread."""
        return self._at_the_loop()[0]

    def stop(self, order: Stop) -> None:
        """Stop this start of this node, wherever it is. Its result would be refused anyway."""
        begun = [one for one in self._running if _order(one.task) == order]
        unbegun = [one for one in self._claimed if _order(one) == order]
        for running in begun:
            self._detach(running)
            self._free()
        for task in unbegun:
            self._claimed.remove(task)
            self._free()
        if not begun and not unbegun:  # it is another one's, or on its way here
            if len(self._unmet) >= MAX_UNMET:
                self._unmet.clear()
            self._unmet.add(order)

    # ── results ──────────────────────────────────────────────────────────────────────────

    def _succeed(self, task: Task, call: Call, output: Any) -> None:
        try:
            sealed = call.seal(task, output)
        except PermanentError as problem:
            self._fail(task, call, problem)
            return
        cache = None if task.cache is None else call.caching(task)
        fields = (task.run_id, task.node_id, task.token, sealed, cache)
        self._results.append(new_tuple(Complete, fields))
        if self._busy == self._concurrency:  # as `_free`, without the call: every node comes here
            self._slot_freed.set()
        self._busy -= 1

    def _fail(self, task: Task, call: Call, error: BaseException) -> None:
        self._settle(self._failure(task, error, call.describe(error)))

    def _failure(self, task: Task, error: BaseException, described: dict[str, Any]) -> Fail:
        pause = pause_asked_by(error)
        if pause is not None and task.resource_tag is not None:
            self._slowed.append((task.resource_tag, self._clock() + pause))
        log_failure(task, described)
        return failure(task, error, described, self._chance())

    def _settle(self, result: Result) -> None:
        self._results.append(result)
        self._free()

    def _free(self) -> None:
        if self._busy == self._concurrency:
            self._slot_freed.set()
        self._busy -= 1

    async def _flush(self) -> None:
        """Report everything that waits to be reported, progress before its node's result."""
        progress, results = list(self._progress.values()), self._results
        self._progress.clear()
        self._results = []
        if not progress and not results and not self._slowed:
            return
        me = asyncio.current_task()
        assert me is not None  # noqa: S101
        self._reporting.add(me)
        try:
            while self._slowed:
                await self._task_source.slow(*self._slowed.pop())
            if progress or self._telling.locked():  # another task may be reporting theirs now
                async with self._telling:
                    if progress:
                        await self._task_source.report(progress)
            if results:
                if self._logs:
                    self._hand_in(ended=True)
                await self._task_source.report(results)
        except asyncio.CancelledError:  # as above
            self._results[:0] = results
            raise
        finally:
            self._reporting.discard(me)

    def _report(self, task: Task, fraction: float, message: str) -> None:
        """Progress, from the handler's own thread, whichever that is."""
        move = Progress(task.run_id, task.node_id, task.token, fraction, message)
        if threading.get_ident() == self._loop_thread:
            self._note(move)
        else:
            self._loop.call_soon_threadsafe(self._note, move)

    def _note(self, move: Progress) -> None:
        if not self._progress:
            self._loop.call_later(
                PROGRESS_SECONDS, lambda: self._spawn(self._flush()), context=self._context
            )
        self._progress[move.run_id, move.node] = move

    # ── logs ─────────────────────────────────────────────────────────────────────────────

    def _has_lines(self, log: HandlerLog) -> None:
        """A log has lines; called in the handler's own thread, whichever that is."""
        if threading.get_ident() == self._loop_thread:
            self._note_lines(log)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._note_lines, log, context=self._context)

    def _note_lines(self, log: HandlerLog) -> None:
        self._logs[log] = None
        if not self._logs_are_due:
            self._logs_are_due = True
            self._loop.call_later(LOG_SECONDS, self._hand_in_due, context=self._context)

    def _hand_in_due(self) -> None:
        self._logs_are_due = False
        self._hand_in()

    def _hand_in(self, *, ended: bool = False) -> None:
        """Hand in what was logged; with `ended` only of attempts that have ended."""
        chunks: list[LogChunk] = []
        for one in list(self._logs):
            if one.is_closed or not ended:
                chunks += one.drain()
                if one.is_closed or not one.is_waiting:
                    del self._logs[one]
        if chunks:
            self._task_source.log(chunks)


BELONGS = "A handler that blocks belongs into a plain `def`"
CHECK_CANCELLED = (
    "A thread cannot be stopped: the handler itself has to check ctx.cancelled.is_set()"
)


def _beyond(task: Task) -> str:
    return f"beyond its timeout of {task.timeout_seconds:g} s"


def _begin_here(running: _Running) -> Any:
    """Call a plain function; its stack can be read from outside as long as it runs."""
    running.thread = threading.get_ident()
    try:
        return running.call.begin(running.task)
    finally:
        running.thread = None


def _order(task: Task) -> tuple[str, str, Token]:
    """What stops it."""
    return task.run_id, task.node_id, task.token


def refusal(problem: DovetailError) -> dict[str, Any]:
    """The error of a call that could not be opened."""
    details = problem.details if isinstance(problem, PermanentError) else {}
    return {"type": problem.type, "message": str(problem), **details}


def timeout(
    task: Task, call: Call, stack: TracebackType | None
) -> tuple[TimeoutError, dict[str, Any]]:
    """The error of a handler that ran out of time while it was there, and its description."""
    message = f"did not finish within {task.timeout_seconds:g} s (timeout_seconds)"
    error = TimeoutError(message).with_traceback(stack)
    return error, call.describe(error) | {"type": "timeout", "message": message}


def log_failure(task: Task, described: Mapping[str, Any]) -> None:
    """Log a failed attempt with its traceback, which is redacted already."""
    node, item = split_name(task.node_id)
    extra: dict[str, Any] = {"run_id": task.run_id, "node_id": node, "attempt": task.token.attempt}
    if item is not None:
        extra["item"] = item
    text = described.get("traceback") or f"{described['type']}: {described['message']}"
    attempts_log.warning(
        "attempt %d of node '%s' of run %s failed\n%s",
        task.token.attempt,
        task.node_id,
        task.run_id,
        text,
        extra=extra,
    )


def failure(
    task: Task, error: BaseException, described: dict[str, Any], chance: float = 0.0
) -> Fail:
    """The result of a start whose handler raised this.

    The exception's class is asked and not `isinstance`, which asks the exception: it is the user's
    object, and may raise anything.
    """
    after, at_least = _delays(error)
    return Fail(
        task.run_id,
        task.node_id,
        task.token,
        described,
        permanent=issubclass(type(error), PermanentError | TemplateError),
        after=after,
        at_least=at_least,
        chance=chance,
    )


def pause_asked_by(error: BaseException) -> float | None:
    """For how long a service asked to be left alone, if it did."""
    _, at_least = _delays(error)
    return None if at_least is None else min(at_least, MAX_RETRY_AFTER_SECONDS)


def _delays(error: BaseException) -> tuple[float | None, float | None]:
    """What a `RetryableError` asks for: `after` and `at_least`, each if it is a delay."""
    if not issubclass(type(error), RetryableError):
        return None, None
    return _seconds(error, "after"), _seconds(error, "at_least")


def _seconds(error: BaseException, name: str) -> float | None:
    try:
        value = getattr(error, name)
        if issubclass(type(value), int | float) and 0 <= (seconds := float(value)) < math.inf:
            return seconds
    except BaseException:  # noqa: S110  (an attribute or a number of the user's own kind)
        pass
    return None


@coroutine
def _resume(
    work: Coroutine[Any, Any, Any], context: Context, waits_for: Any, running: _Running
) -> Generator[Any, Any, Any]:
    """Drive a coroutine that was started elsewhere, always in its own context."""
    now = time.monotonic
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            context.run(work.close)
            raise
        except BaseException as error:
            go: Callable[[Any], Any] = work.throw
            value = error
        else:
            go = work.send
        began = now()
        try:
            waits_for = context.run(go, value)
        except StopIteration as returned:
            if (spent := now() - began) > BLOCK_SECONDS:
                running.blocks += spent
            return returned.value
        if (spent := now() - began) > BLOCK_SECONDS:
            running.blocks += spent
