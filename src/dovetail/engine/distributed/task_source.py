"""Where a worker gets its tasks if the orchestrators are other processes.

Messages are hints: a node is started only after its claim was granted, and its lease is renewed
while it runs. A message is acknowledged once the run's own state has taken it over. If a process
dies in between, another one reads the message again, or the lease runs out.

Outputs and params that are too large for a message are read by a handler in the middle of its own
code. The read blocks, and must not need the worker's event loop: it has a thread with a loop and a
connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

from dovetail.core.errors import StoreError
from dovetail.core.node_logs import LogChunk
from dovetail.core.outputs import check_room, parts
from dovetail.core.transitions import (
    NOTHING,
    Complete,
    Decision,
    Park,
    Progress,
    Reap,
    Renew,
    Stop,
    Transition,
    Wake,
)
from dovetail.engine.cache import answer
from dovetail.engine.clock import Clock
from dovetail.engine.lease_keeper import HeldStarts
from dovetail.engine.ports import (
    ParkedNode,
    RateLimiter,
    Result,
    SharedStore,
    Start,
    Task,
    TimerIndex,
)
from dovetail.engine.supervisor import bisect_failures, describe_error

T = TypeVar("T")
LONGEST_READ_SECONDS = 60.0
"""Of one part. A store that is away says so earlier; this is for one that says nothing."""


class InputStore(Protocol):
    """What is asked of a store."""

    async def params_of(self, task: Task) -> dict[str, Any]:
        """What its run was triggered with."""
        ...

    async def input_sizes(self, task: Task) -> dict[str, int]:
        """The bytes of the output of each completed parent, in the order of the definition."""
        ...

    async def read_inputs(self, task: Task, names: Sequence[str]) -> dict[str, bytes]:
        """These outputs as JSON, in one answer."""
        ...


StoreWork = Callable[[InputStore], Coroutine[Any, Any, Any]]
StoreCall = Callable[[StoreWork], Any]
"""Has this done with a store, and waits for it, in any thread."""


class RemoteInputs:
    """The inputs of one start of a node."""

    __slots__ = ("_call", "_sizes", "_task")

    def __init__(self, call: StoreCall, task: Task) -> None:
        self._call = call
        self._task = task
        self._sizes: dict[str, int] = {}

    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call(lambda store: store.params_of(self._task))
        return found

    def names(self) -> Sequence[str]:
        self._sizes = self._call(lambda store: store.input_sizes(self._task))
        return list(self._sizes)

    def texts(self, names: Sequence[str], read: int, limit: int) -> Iterator[tuple[str, bytes]]:
        sizes = {name: self._sizes[name] for name in names}
        check_room(read, sizes, limit)  # before anything is read
        for part in parts(sizes):
            yield from self._part(part).items()

    def _part(self, names: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = self._call(lambda store: store.read_inputs(self._task, names))
        return found


class StoreReader:
    """A thread that reads a store for others. It is started when it is first needed."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[InputStore]]) -> None:
        self._opening = opening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: asyncio.Future[InputStore] | None = None
        self._stack = contextlib.AsyncExitStack()
        self._first = threading.Lock()

    def call(self, work: StoreWork) -> Any:
        with self._first:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._main, name="dovetail-inputs", daemon=True).start()
        return waited_for(self._done(work), self._loop)

    def close(self) -> None:
        """Stop the thread."""
        with self._first:
            if self._loop is not None:
                loop, self._loop = self._loop, None
                asyncio.run_coroutine_threadsafe(self._stack.aclose(), loop).add_done_callback(
                    lambda _: loop.call_soon_threadsafe(loop.stop)
                )

    def _main(self) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    async def _done(self, work: StoreWork) -> Any:
        if self._store is None:
            self._store = asyncio.ensure_future(self._stack.enter_async_context(self._opening()))
        try:
            store = await asyncio.shield(self._store)
        except BaseException:
            self._store = None  # the next read tries again
            raise
        return await work(store)


def waited_for(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """The outcome of what another thread's loop does."""
    asked = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return asked.result(LONGEST_READ_SECONDS)
    except TimeoutError:
        asked.cancel()
        raise StoreError(
            f"outputs of parents could not be read within {LONGEST_READ_SECONDS:g} s"
        ) from None


PAUSE_SECONDS = 0.5
NO_LIMIT = 1_000_000_000
log = logging.getLogger("dovetail.worker")


class TaskInbox(Protocol):
    """The workers' end of a transport between processes."""

    async def tasks(self, limit: int) -> list[tuple[Any, Task]]:
        """Wait a moment for tasks; each comes with the message to acknowledge."""
        ...

    @property
    def has_more(self) -> bool:
        """`open_more` has something to do."""
        ...

    async def open_more(self) -> None:
        """Decode messages for the next call, while this worker waits anyway."""
        ...

    async def acknowledge(self, messages: Sequence[Any]) -> None: ...
    async def send(self, results: Sequence[Result]) -> None: ...
    def log(self, chunks: Sequence[LogChunk]) -> None:
        """As `TaskSource.log`."""
        ...

    def put_back(self, found: Sequence[tuple[Any, Task]]) -> None:
        """This worker does not take these."""
        ...

    async def close(self) -> None:
        """Every result that was sent has arrived, and other workers may have what was put back."""
        ...


class QueueTaskSource:
    def __init__(
        self,
        inbox: TaskInbox,
        store: SharedStore,
        timers: TimerIndex,
        limits: RateLimiter,
        clock: Clock,
        apply: Callable[[Sequence[Transition]], Awaitable[object]],
        *,
        worker_id: str,
        lease_seconds: float,
        secrets: Mapping[str, str] | None = None,
        held: HeldStarts | None = None,
    ) -> None:
        """`apply` also dispatches effects. `secrets` are the worker's, for the node cache. `held`
        has the starts that are claimed here and not reported."""
        self._secrets = secrets or {}
        self._inbox = inbox
        self._store = store
        self._timers = timers
        self._limits = limits
        self._clock = clock
        self._apply = apply
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._held = HeldStarts() if held is None else held
        self._holds = held is not None
        self._taking: asyncio.Task[list[Task]] | None = None
        self._is_claiming = False
        self._leaving = False
        """This worker takes no more tasks: what it reads is for other workers."""

    async def take(self, limit: int) -> list[Task]:
        self._leaving = False
        while True:
            # Tasks that are claimed stay claimed, even if the caller is cancelled.
            if self._taking is None:
                self._taking = asyncio.ensure_future(self._take(limit))
            granted = await _kept(self._taking)
            self._taking = None
            if granted:
                return granted

    async def _take(self, limit: int) -> list[Task]:
        found = await self._inbox.tasks(limit)
        if not found:
            return []
        if self._leaving:
            self._inbox.put_back(found)
            return []
        self._is_claiming = True
        try:
            return await self.start(found)
        finally:
            self._is_claiming = False

    async def start(self, found: Sequence[tuple[Any, Task]]) -> list[Task]:
        """Claim the tasks that may start now, and acknowledge all messages."""
        messages, tasks = [message for message, _ in found], [task for _, task in found]
        if any(task.resource_tag is not None for task in tasks):
            # What was doubled on the way shall not use up a limit.
            offered = await bisect_failures(self._store.offered, tasks, _left_alone)
            tasks = [task for task, is_offered in zip(tasks, offered, strict=True) if is_offered]
            times = await asyncio.gather(*map(self._admit, tasks))
            waits = [
                ParkedNode(at, task.resource_tag or "", Wake(*_start_of(task)))
                for task, at in zip(tasks, times, strict=True)
                if at is not None
            ]
            tasks = [task for task, at in zip(tasks, times, strict=True) if at is None]
            if waits:
                # First: a node that is not in the index is never rescheduled.
                await self._timers.add_parked(waits)
                await self._apply([Park(*wait.wake, wait.at) for wait in waits])
        if not tasks:
            await self._inbox.acknowledge(messages)
            return []
        now = self._clock()
        until = now + self._lease_seconds
        # In this order: a claim without a lease in the timers would be reaped late, and a message
        # that is acknowledged before its claim would have to be sent again.
        await self._timers.lease({task.run_id for task in tasks}, until)
        # Repeated if one of them fails: a claim that was granted is granted again.
        claiming = bisect_failures(partial(self._claim, until=until, now=now), tasks, _left_alone)
        if self._inbox.has_more:
            claims = asyncio.ensure_future(claiming)
            for _ in range(2):  # they are asked for, and then go out
                await asyncio.sleep(0)
            try:
                await self._inbox.open_more()
            except StoreError as error:  # the claims hold all the same
                log.warning("tasks that were read are left to other workers: %s", error)
            granted = await claims
        else:
            granted = await claiming
        mine = [task for task, is_mine in zip(tasks, granted, strict=True) if is_mine]
        if self._holds:
            self._held.add(mine)  # first: the next calls may take longer than a lease
        await self._inbox.acknowledge(messages)
        if any(task.cache is not None and task.cache.facts is not None for task in mine):
            mine = await self._unanswered(mine)
        return mine

    async def _unanswered(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose handlers have to be called. The outputs of the others are in the node
        cache, under keys with digests of secrets, which only workers know."""
        left: list[Task] = []
        for task in tasks:
            found = None
            if task.cache is not None and task.cache.facts is not None:
                try:
                    found = await answer(self._store, task.cache, self._secrets, self._clock())
                except StoreError as error:  # the claim holds all the same
                    log.warning("the node cache was not read: %s", error)
            if found is None:
                left.append(task)
            else:
                await self.report([Complete(*_start_of(task), found.output)])
        return left

    async def _claim(self, tasks: Sequence[Task], until: float, now: float) -> Sequence[bool]:
        return await self._store.claim(tasks, self._worker_id, until, now)

    async def _admit(self, task: Task) -> float | None:
        """None if the node may start now, else when to come back."""
        if task.resource_tag is None:
            return None
        now = self._clock()
        if await self._limits.start(task.resource_tag, now):
            return None
        return await self._limits.book(task.resource_tag, now)

    async def report(self, reports: Sequence[Result | Progress]) -> None:
        progress = [one for one in reports if isinstance(one, Progress)]
        results = [one for one in reports if not isinstance(one, Progress)]
        if progress:
            try:
                await self._store.apply(progress, self._clock())
            except StoreError as error:  # nothing follows from it, and handlers shall go on
                log.warning("progress is not reported: %s", error)
        while results:
            try:
                await self._inbox.send(results)
                self._held.drop([(one.run_id, one.node, one.token) for one in results])
                return
            except StoreError as error:  # they are all that is left of the work
                log.warning("results are kept until they can be sent: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)

    def log(self, chunks: Sequence[LogChunk]) -> None:
        self._inbox.log(chunks)

    async def hand_back(self, tasks: Sequence[Task]) -> None:
        """Give back starts that will not finish here: they are queued again at once.

        Such a start is lost, but is no crash: a node does not fail because workers are replaced.
        """
        self._leaving = True
        left: list[Task] = []
        if self._taking is not None and (self._is_claiming or self._taking.done()):
            left = await _kept(self._taking)  # also claims that were granted and not returned
            self._taking = None
        starts = [_start_of(task) for task in (*tasks, *left)]
        self._held.drop(starts)  # first: a lease that is renewed cannot be reaped
        if starts:
            now = self._clock()
            await self._renew(starts, now)
            # If this process dies before they are queued again, the next reap does it.
            await self._timers.lease({run_id for run_id, _, _ in starts}, now)
            await self._apply([Reap(*start, max_crashes=NO_LIMIT) for start in starts])

    async def close(self) -> None:
        """Give back tasks that were read and not claimed."""
        self._leaving = True
        if self._taking is not None:
            await self._taking
            self._taking = None
        await self._inbox.close()

    async def slow(self, tag: str, until: float) -> None:
        """If the store is away, the service itself refuses a call that comes too early."""
        try:
            await self._limits.slow(tag, until)
        except StoreError as error:
            log.warning("the rate of %s stays as it is: %s", tag, error)

    async def renew(self, tasks: Sequence[Task]) -> list[Stop]:
        """Renew the leases of these starts; returns those to stop, which this worker no longer
        holds.

        The timers are not changed: a reap reads the lease from the run.
        """
        starts = [_start_of(task) for task in tasks]
        kept = await self._renew(starts, self._clock() + self._lease_seconds)
        return [Stop(*start) for start, mine in zip(starts, kept, strict=True) if not mine]

    async def _renew(self, starts: Sequence[Start], until: float) -> list[bool]:
        if not starts:
            return []
        moves = [Renew(*start, until) for start in starts]
        decisions = await bisect_failures(self._renewed, moves, self._leave_unrenewed)
        return [bool(decision.changed) for decision in decisions]

    async def _renewed(self, moves: Sequence[Renew]) -> Sequence[Decision]:
        return await self._store.apply(moves, self._clock(), durable=True)

    async def _leave_unrenewed(self, move: Renew, problem: Exception) -> Sequence[Decision]:
        log.error(
            "run %s, node %s: its lease ends: %s", move.run_id, move.node, describe_error(problem)
        )
        return [NOTHING]


async def _kept(work: asyncio.Task[list[T]]) -> list[T]:
    """What it brings; nothing if a store was away: messages are read again, leases run out."""
    try:
        return await asyncio.shield(work)
    except StoreError as error:
        log.warning("no work: %s", error)
        await asyncio.sleep(PAUSE_SECONDS)
        return []


async def _left_alone(task: Task, problem: Exception) -> Sequence[bool]:
    log.error(
        "run %s, node %s cannot start: %s", task.run_id, task.node_id, describe_error(problem)
    )
    return [False]


def _start_of(task: Task) -> Start:
    return task.run_id, task.node_id, task.token


class LeaseRenewer(Protocol):
    async def renew(self, tasks: Sequence[Task]) -> list[Stop]:
        """Say that these still run; what must stop, because it is ours no longer."""
        ...


async def keep_leases(
    task_source: LeaseRenewer,
    holding: Callable[[], Sequence[Task]],
    stop: Callable[[Stop], None],
    lease_seconds: float,
) -> None:
    """Renew every third of a lease, for ever; stop what was taken from us."""
    pause = lease_seconds / 3
    while True:
        asked_at = time.monotonic()
        for order in await task_source.renew(holding()):
            stop(order)
        if (now := time.monotonic()) - asked_at > pause:
            continue  # the store was away: until when we asked to have them is soon, or over
        await asyncio.sleep(pause)
        if (late := time.monotonic() - now - pause) > pause:
            log.warning(
                "no lease could be renewed for %.0f s: the machine stood still, or a handler kept "
                "the interpreter; leases may be lost",
                late,
            )
