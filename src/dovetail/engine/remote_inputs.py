"""Outputs of parents, and params, that did not travel with their task: read from the store by any
thread.

A handler asks for an input in the middle of its own code, in a thread or in the worker's event
loop, so the read has to block, and must not need that loop. It is made in a thread with a loop and
a connection of its own. What it must not know: which store it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from dovetail.core.errors import StoreError
from dovetail.core.inputs import check_room, parts
from dovetail.engine.ports import Task

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
        """Nobody reads any more."""
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
