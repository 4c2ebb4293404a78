"""The nodes of a Redis Cluster: which of them has what, and the asking of each.

Every command names keys of one slot, so each goes to one node; what is asked of several at once is
put together again in its order. Between nodes there is no order. A node that has given a slot away
says where it is now, and one that is lost is replaced by whoever the others name: what it had not
answered is asked of that one. What it must not know: what a command does, only where its key is.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import hiredis

from dovetail.core.errors import StoreError

SLOTS = 16_384
MOST_REDIRECTIONS = 16
REDIRECTED_SECONDS = 0.05
LEARN_SECONDS = 0.5
"""How often the others are asked who has replaced a node that is lost."""
WITHOUT_KEY = {"CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "TIME"}
KEY_THIRD = {"XGROUP", "XINFO"}

MULTI, EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"

Address = tuple[str, int]
Command = tuple[Any, ...] | bytes


class ClusterNode(Protocol):
    """A connection to one of them."""

    @property
    def is_open(self) -> bool: ...
    def ask(
        self, commands: Sequence[Any], *, patience: float = ..., behind: bool = ...
    ) -> asyncio.Future[list[Any]]: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def bequeath(self, heir: Any) -> None:
        """What was not answered here is asked there; this one is closed."""
        ...


AnyNode = TypeVar("AnyNode", bound=ClusterNode)


def slot_of(key: bytes) -> int:
    opening = key.find(b"{")
    if opening >= 0:
        closing = key.find(b"}", opening + 1)
        if closing > opening + 1:
            key = key[opening + 1 : closing]
    return binascii.crc_hqx(key, 0) % SLOTS


def key_of(command: Command) -> bytes | None:
    """The key that says where a command belongs; none if any node will do."""
    if isinstance(command, bytes):  # as it is sent: the second word of it
        return command.split(b"\r\n", 5)[4]
    name = command[0]
    if name in WITHOUT_KEY:
        return None
    if name in ("EVALSHA", "EVAL"):
        if not int(command[2]):
            return None
        key = command[3]
    elif name in ("XREADGROUP", "XREAD"):
        key = command[command.index("STREAMS") + 1]
    else:
        key = command[2 if name in KEY_THIRD else 1]
    return key if isinstance(key, bytes) else str(key).encode()


def owners(told: Any, asked: Address) -> list[Address] | None:
    """Who has each slot, by the answer to CLUSTER SLOTS of `asked`; none if not all are known."""
    slots: list[Address | None] = [None] * SLOTS
    for first, last, (host, port, *_), *_ in told:
        address = (host.decode() if host else asked[0], port)
        slots[first : last + 1] = [address] * (last + 1 - first)
    known = [address for address in slots if address is not None]
    return known if len(known) == SLOTS else None


class Cluster(Generic[AnyNode]):
    def __init__(self, slots: list[Address], open_pipe: Callable[[Address], AnyNode]) -> None:
        """`open_pipe` gives a connection to one node, which may still be opening."""
        self._slots = slots
        self._open_pipe = open_pipe
        self._pipes: dict[Address, AnyNode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._learning: asyncio.Task[None] | None = None

    def pipes(self) -> list[AnyNode]:
        """One to each node that has slots."""
        return [self._pipe_to(address) for address in sorted(set(self._slots))]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for pipe in self._pipes.values():
            pipe.close()

    def flush(self) -> None:
        for pipe in self._pipes.values():
            pipe.flush()

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def pipe_for(self, command: Command) -> AnyNode:
        key = key_of(command)
        if key is not None:
            return self._pipe_to(self._slots[slot_of(key)])
        pipes = self.pipes()
        return next((pipe for pipe in pipes if pipe.is_open), pipes[0])

    def ask(self, commands: Sequence[Command], **how: Any) -> asyncio.Future[list[Any]]:
        """As `Pipe.ask`. A script is loaded everywhere; a scan goes through all nodes."""
        replies: list[Any] = [None] * len(commands)
        parts: dict[AnyNode, list[tuple[int, Command]]] = {}
        whole: AnyNode | None = None
        for at, command in enumerate(commands):
            if command == MULTI:  # all of it goes where its first command belongs
                whole = self.pipe_for(commands[at + 1])
            places = self._where(command) if whole is None else [(whole, command)]
            for pipe, asked in places:
                parts.setdefault(pipe, []).append((at, asked))
            if command == EXEC:
                whole = None
        waited_for = len(parts)
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if not parts:
            answer.set_result([])

        def arrived(part: list[tuple[int, Command]], told: asyncio.Future[list[Any]]) -> None:
            nonlocal waited_for
            waited_for -= 1
            if answer.done():
                told.cancelled() or told.exception()  # looked at, so that nobody complains
            elif told.cancelled():
                answer.cancel()
            elif (error := told.exception()) is not None:
                answer.set_exception(error)
            else:
                for (at, _), reply in zip(part, told.result(), strict=True):
                    if not isinstance(replies[at], hiredis.ReplyError):  # of one everywhere
                        replies[at] = reply
                if not waited_for:
                    self._put_together(commands, replies, answer)

        for pipe, part in parts.items():
            pipe.ask([one for _, one in part], **how).add_done_callback(partial(arrived, part))
        return answer

    def _where(self, command: Command) -> Iterable[tuple[AnyNode, Command]]:
        if isinstance(command, bytes):
            return [(self.pipe_for(command), command)]
        if command[0] == "SCRIPT":
            return [(pipe, command) for pipe in self.pipes()]
        if command[0] == "SCAN":
            node, cursor = _place(command[1])
            pipes = self.pipes()
            return [(pipes[min(node, len(pipes) - 1)], (command[0], cursor, *command[2:]))]
        return [(self.pipe_for(command), command)]

    def _put_together(
        self, commands: Sequence[Command], replies: list[Any], answer: asyncio.Future[list[Any]]
    ) -> None:
        for at, command in enumerate(commands):
            if command[0] == "SCAN" and not isinstance(replies[at], hiredis.ReplyError):
                replies[at][0] = self._next_place(command[1], int(replies[at][0]))
        if MULTI in commands:  # done as one or not at all: whoever asked asks again, one by one
            if any(map(_is_elsewhere, replies)):
                self.learn()
        elif any(map(_is_elsewhere, replies)):
            self._do(self._redirect(commands, replies, answer))
            return
        answer.set_result(replies)

    def _next_place(self, cursor: Any, told: int) -> bytes:
        node, _ = _place(cursor)
        if not told:
            node += 1
            if node >= len(set(self._slots)):
                return b"0"
        return f"{node} {told}".encode()

    async def _redirect(
        self, commands: Sequence[Command], replies: list[Any], answer: asyncio.Future[list[Any]]
    ) -> None:
        """Ask again whoever has it now; after many times, whatever is answered is the answer."""
        try:
            for times in range(MOST_REDIRECTIONS):
                elsewhere = [at for at, reply in enumerate(replies) if _is_elsewhere(reply)]
                if not elsewhere:
                    break
                if times:
                    await asyncio.sleep(REDIRECTED_SECONDS)
                asked = [self._ask_there(commands[at], str(replies[at])) for at in elsewhere]
                for at, told in zip(elsewhere, asked, strict=True):
                    replies[at] = (await told)[-1]
                self.learn()
            if not answer.done():
                answer.set_result(replies)
        except StoreError as error:
            if not answer.done():
                answer.set_exception(error)
        finally:
            answer.cancel()  # if we were: nobody will answer

    def _ask_there(self, command: Command, refusal: str) -> asyncio.Future[list[Any]]:
        kind, slot, where = refusal.split(" ")[:3]
        host, _, port = where.rpartition(":")
        address = (host or self._slots[int(slot)][0], int(port))
        if kind == "ASK":
            return self._pipe_to(address).ask([("ASKING",), command])
        self._slots[int(slot)] = address
        return self._pipe_to(address).ask([command])

    # ── nodes ────────────────────────────────────────────────────────────────────────────

    def _pipe_to(self, address: Address) -> AnyNode:
        pipe = self._pipes.get(address)
        if pipe is None:
            pipe = self._pipes[address] = self._open_pipe(address)
        return pipe

    def learn(self) -> None:
        """Find out who has what now, until every node that has something can be reached."""
        if self._learning is None or self._learning.done():
            self._learning = self._do(self._learn())

    async def _learn(self) -> None:
        while True:
            for address in [one for one, pipe in self._pipes.items() if pipe.is_open]:
                with suppress(StoreError, TimeoutError):
                    async with asyncio.timeout(LEARN_SECONDS):
                        (told,) = await self._pipes[address].ask([("CLUSTER", "SLOTS")])
                    slots = None
                    if not isinstance(told, hiredis.ReplyError):
                        slots = owners(told, address)
                    if slots is not None:
                        self._follow(slots)
                        break
            if all(pipe.is_open for pipe in self.pipes()):
                return
            await asyncio.sleep(LEARN_SECONDS)

    def _follow(self, slots: list[Address]) -> None:
        """What a node that is gone has not answered goes to whoever has its slots."""
        before, self._slots = self._slots, slots
        having = set(slots)
        for address in [one for one in self._pipes if one not in having]:
            if not self._pipes[address].is_open:
                gone = self._pipes.pop(address)
                heir = slots[before.index(address)] if address in before else slots[0]
                gone.bequeath(self._pipe_to(heir))

    def _do(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_elsewhere(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("MOVED ", "ASK "))


def _place(cursor: Any) -> tuple[int, int]:
    """Of a scan: the number of the node, and the cursor there."""
    text = cursor.decode() if isinstance(cursor, bytes) else str(cursor)
    node, _, there = text.rpartition(" ")
    return int(node or 0), int(there)
