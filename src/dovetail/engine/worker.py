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
from dovetail.core.retry import MAX_RETRY_AFTER_SECONDS
from dovetail.core.transitions import Complete, Fail, Progress, Stop
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Call, Calls, Result, Task, TaskSource
from dovetail.engine.stacks import stack_of_coroutine, stack_of_thread

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


class _Running:
    """A handler that waits for something."""

    __slots__ = ("call", "detached", "task", "thread", "timer", "waiter", "work")
    timer: asyncio.TimerHandle
    waiter: asyncio.Task[Any]

    def __init__(self, task: Task, call: Call) -> None:
        self.task = task
        self.call = call
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
    ) -> None:
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
        open_call, report = self._calls.open, self._report
        pause_at = now() + LEAD_SECONDS
        while True:
            if not claimed:
                self._driven = None
                await self._refill()
            if now() > pause_at:
                await asyncio.sleep(0)
                pause_at = now() + LEAD_SECONDS
                continue  # what was claimed may have been stopped meanwhile
            self._driven = task = claimed.popleft()
            try:
                call = open_call(task, report)
            except DovetailError as problem:
                self._settle(self._failure(task, problem, refusal(problem)))
                continue
            if not call.is_async:
                # Entered before its task has begun: a stop may come in between.
                running = self._enter(task, call)
                running.waiter = self._spawn(self._stay(running))
                continue
            context = copy_context()
            held = getrefcount(me)
            try:
                work = call.begin(task)
                waits_for = context.run(work.send, None)
            except StopIteration as returned:
                self._succeed(task, call, returned.value)
            except BaseException as error:
                self._fail(task, call, error)
                del error
            else:
                running = self._enter(task, call)
                running.waiter, running.work = me, work
                self._promote()
                await self._stay(running, _resume(work, context, waits_for))
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

    def _enter(self, task: Task, call: Call) -> _Running:
        running = _Running(task, call)
        running.timer = self._loop.call_later(task.timeout_seconds, self._expire, running)
        self._running[running] = None
        return running

    def _detach(self, running: _Running) -> None:
        """Stop a handler, and do not wait for it any longer."""
        running.detached = True
        running.timer.cancel()
        del self._running[running]
        running.call.cancel()
        running.waiter.cancel()

    def _expire(self, running: _Running) -> None:
        stack = stack_of_coroutine(running.work)
        stack = stack or stack_of_thread(running.thread, _begin_here.__code__)
        error, described = timeout(running.task, running.call, stack)
        self._detach(running)
        self._settle(self._failure(running.task, error, described))
        self._spawn(self._flush())

    def holding(self) -> list[Task]:
        """Every start that is claimed and not done with."""
        return [*(running.task for running in self._running), *self._claimed]

    def blocker(self) -> Task | None:
        """The start whose handler has the event loop just now; asked from another thread."""
        current = asyncio.current_task(self._loop)
        if current is None:
            return None
        for running in list(self._running):
            if getattr(running, "waiter", None) is current:
                return running.task
        return self._driven if current is self._leader else None

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
            self._loop.call_later(PROGRESS_SECONDS, lambda: self._spawn(self._flush()))
        self._progress[move.run_id, move.node] = move


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
    extra = {"run_id": task.run_id, "node_id": task.node_id, "attempt": task.token.attempt}
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
    work: Coroutine[Any, Any, Any], context: Context, waits_for: Any
) -> Generator[Any, Any, Any]:
    """Drive a coroutine that was started elsewhere, always in its own context."""
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
        try:
            waits_for = context.run(go, value)
        except StopIteration as returned:
            return returned.value
