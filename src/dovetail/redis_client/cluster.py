"""A Redis Cluster: which node has which slot, and a connection to each node.

Every command names keys of one slot, so each goes to one node. Replies of several nodes are put
together in the order of the commands, but there is no order of execution between nodes. A node that
has given a slot away names the new node. A lost node is replaced by the one that the others name,
which gets its unanswered commands.
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
from dovetail.redis_client.url import Address

SLOTS = 16_384
MAX_REDIRECTIONS = 16
REDIRECT_SECONDS = 0.05
REFRESH_SECONDS = 0.5
"""How often the other nodes are asked for the slots while a node is lost."""
WITHOUT_KEY = {"CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "TIME"}
KEY_THIRD = {"XGROUP", "XINFO"}

MULTI, EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"

Command = tuple[Any, ...] | bytes


class ClusterNode(Protocol):
    """A connection to one node."""

    @property
    def is_open(self) -> bool: ...
    def send(
        self, commands: Sequence[Any], *, delay: float = ..., last: bool = ...
    ) -> asyncio.Future[list[Any]]: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def transfer_pending(self, target: Any) -> None:
        """Send commands without a reply to another node, and close this connection."""
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
    """The key that decides the node of a command; None if any node will do."""
    if isinstance(command, bytes):  # packed: the second word
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


def slot_owners(reply: Any, source: Address) -> list[Address] | None:
    """The node of each slot, from the reply of `source` to CLUSTER SLOTS; None if a slot has
    none."""
    slots: list[Address | None] = [None] * SLOTS
    for first, last, (host, port, *_), *_ in reply:
        address = (host.decode() if host else source[0], port)
        slots[first : last + 1] = [address] * (last + 1 - first)
    known = [address for address in slots if address is not None]
    return known if len(known) == SLOTS else None


class Cluster(Generic[AnyNode]):
    def __init__(self, slots: list[Address], open_node: Callable[[Address], AnyNode]) -> None:
        """`open_node` returns a connection to one node. It may still be opening."""
        self._slots = slots
        self._open_node = open_node
        self._nodes: dict[Address, AnyNode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshing: asyncio.Task[None] | None = None

    def nodes(self) -> list[AnyNode]:
        """A connection to each node that has slots."""
        return [self._node_at(address) for address in sorted(set(self._slots))]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for node in self._nodes.values():
            node.close()

    def flush(self) -> None:
        for node in self._nodes.values():
            node.flush()

    # ── sending ───────────────────────────────────────────────────────────────────────────

    def node_for(self, command: Command) -> AnyNode:
        key = key_of(command)
        if key is not None:
            return self._node_at(self._slots[slot_of(key)])
        nodes = self.nodes()
        return next((node for node in nodes if node.is_open), nodes[0])

    def send(self, commands: Sequence[Command], **how: Any) -> asyncio.Future[list[Any]]:
        """As `PipelinedRedis.send`. A script is loaded on every node; a scan goes through all
        nodes."""
        replies: list[Any] = [None] * len(commands)
        parts: dict[AnyNode, list[tuple[int, Command]]] = {}
        whole: AnyNode | None = None
        for at, command in enumerate(commands):
            if command == MULTI:  # all of it goes to the node of its first command
                whole = self.node_for(commands[at + 1])
            targets = self._targets(command) if whole is None else [(whole, command)]
            for node, one in targets:
                parts.setdefault(node, []).append((at, one))
            if command == EXEC:
                whole = None
        waited_for = len(parts)
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if not parts:
            answer.set_result([])

        def arrived(part: list[tuple[int, Command]], replying: asyncio.Future[list[Any]]) -> None:
            nonlocal waited_for
            waited_for -= 1
            if answer.done():
                replying.cancelled() or replying.exception()  # else asyncio warns
            elif replying.cancelled():
                answer.cancel()
            elif (error := replying.exception()) is not None:
                answer.set_exception(error)
            else:
                for (at, _), reply in zip(part, replying.result(), strict=True):
                    if not isinstance(replies[at], hiredis.ReplyError):  # from one node
                        replies[at] = reply
                if not waited_for:
                    self._finish(commands, replies, answer)

        for node, part in parts.items():
            node.send([one for _, one in part], **how).add_done_callback(partial(arrived, part))
        return answer

    def _targets(self, command: Command) -> Iterable[tuple[AnyNode, Command]]:
        if isinstance(command, bytes):
            return [(self.node_for(command), command)]
        if command[0] == "SCRIPT":
            return [(node, command) for node in self.nodes()]
        if command[0] == "SCAN":
            node, cursor = _scan_position(command[1])
            nodes = self.nodes()
            return [(nodes[min(node, len(nodes) - 1)], (command[0], cursor, *command[2:]))]
        return [(self.node_for(command), command)]

    def _finish(
        self, commands: Sequence[Command], replies: list[Any], answer: asyncio.Future[list[Any]]
    ) -> None:
        for at, command in enumerate(commands):
            if command[0] == "SCAN" and not isinstance(replies[at], hiredis.ReplyError):
                replies[at][0] = self._next_scan_position(command[1], int(replies[at][0]))
        if MULTI in commands:  # all or nothing: the caller sends them again, one by one
            if any(map(_is_redirect, replies)):
                self.refresh()
        elif any(map(_is_redirect, replies)):
            self._spawn(self._redirect(commands, replies, answer))
            return
        answer.set_result(replies)

    def _next_scan_position(self, cursor: Any, reply: int) -> bytes:
        node, _ = _scan_position(cursor)
        if not reply:
            node += 1
            if node >= len(set(self._slots)):
                return b"0"
        return f"{node} {reply}".encode()

    async def _redirect(
        self, commands: Sequence[Command], replies: list[Any], answer: asyncio.Future[list[Any]]
    ) -> None:
        """Send again to the node that has the slot now; after many times, the last reply stands."""
        try:
            for times in range(MAX_REDIRECTIONS):
                elsewhere = [at for at, reply in enumerate(replies) if _is_redirect(reply)]
                if not elsewhere:
                    break
                if times:
                    await asyncio.sleep(REDIRECT_SECONDS)
                replying = [self._send_to(commands[at], str(replies[at])) for at in elsewhere]
                for at, future in zip(elsewhere, replying, strict=True):
                    replies[at] = (await future)[-1]
                self.refresh()
            if not answer.done():
                answer.set_result(replies)
        except StoreError as error:
            if not answer.done():
                answer.set_exception(error)
        finally:
            answer.cancel()  # if this task was cancelled

    def _send_to(self, command: Command, refusal: str) -> asyncio.Future[list[Any]]:
        kind, slot, where = refusal.split(" ")[:3]
        host, _, port = where.rpartition(":")
        address = (host or self._slots[int(slot)][0], int(port))
        if kind == "ASK":
            return self._node_at(address).send([("ASKING",), command])
        self._slots[int(slot)] = address
        return self._node_at(address).send([command])

    # ── nodes ────────────────────────────────────────────────────────────────────────────

    def _node_at(self, address: Address) -> AnyNode:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._open_node(address)
        return node

    def refresh(self) -> None:
        """Read the slots anew, until every node that has some can be reached."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._spawn(self._refresh())

    async def _refresh(self) -> None:
        while True:
            for address in [one for one, node in self._nodes.items() if node.is_open]:
                with suppress(StoreError, TimeoutError):
                    async with asyncio.timeout(REFRESH_SECONDS):
                        (reply,) = await self._nodes[address].send([("CLUSTER", "SLOTS")])
                    slots = None
                    if not isinstance(reply, hiredis.ReplyError):
                        slots = slot_owners(reply, address)
                    if slots is not None:
                        self._use_slots(slots)
                        break
            if all(node.is_open for node in self.nodes()):
                return
            await asyncio.sleep(REFRESH_SECONDS)

    def _use_slots(self, slots: list[Address]) -> None:
        """Unanswered commands of a lost node go to the node that has its slots now."""
        before, self._slots = self._slots, slots
        having = set(slots)
        for address in [one for one in self._nodes if one not in having]:
            if not self._nodes[address].is_open:
                gone = self._nodes.pop(address)
                successor = slots[before.index(address)] if address in before else slots[0]
                gone.transfer_pending(self._node_at(successor))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_redirect(reply: Any) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("MOVED ", "ASK "))


def _scan_position(cursor: Any) -> tuple[int, int]:
    """The number of the node, and the cursor there."""
    text = cursor.decode() if isinstance(cursor, bytes) else str(cursor)
    node, _, there = text.rpartition(" ")
    return int(node or 0), int(there)
