"""Asks sentinels for the address of the primary.

Only when a connection is opened, so it may be slow: it blocks, with a connection for each question.
A sentinel may be behind, so the caller checks the role of the server itself.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import hiredis

from dovetail.redis_client.url import Address, RedisUrl, WrongUrl

ANSWER_SECONDS = 1.0
"""A sentinel that takes longer counts as lost: the next one is asked."""
READ_BYTES = 65536
PRIMARY_ADDRESS = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME")
ROLE = ("ROLE",)


def leader(target: RedisUrl) -> Address:
    """The address of the primary.

    Raises `OSError` if none of them answers, `WrongUrl` if none of them knows the service.
    """
    silent, ignorant = [], []
    for address in target.addresses:
        try:
            (reply,) = ask(target, address, [(*PRIMARY_ADDRESS, target.service)])
        except OSError as error:
            silent.append(f"{address[0]}:{address[1]}: {error}")
            continue
        if reply is not None:
            return reply[0].decode(), int(reply[1])
        ignorant.append(address)
    if not ignorant:
        raise ConnectionError(f"no sentinel answers ({'; '.join(silent)})")
    raise WrongUrl(f"no sentinel knows the service '{target.service}'{_meant(target, ignorant[0])}")


def leads(role: Any) -> bool:
    """From a server's reply to ROLE; where ROLE is forbidden the sentinel is believed."""
    return isinstance(role, hiredis.ReplyError) or role[0] == b"master"


def _meant(target: RedisUrl, address: Address) -> str:
    try:
        (reply,) = ask(target, address, [("SENTINEL", "MASTERS")])
    except OSError:
        return ""
    names = [one[one.index(b"name") + 1].decode() for one in reply]
    near = get_close_matches(target.service, names, n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; they know {', '.join(names)}" if names else "; they know none"


def ask(target: RedisUrl, address: Address, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """The replies of one sentinel. Raises `OSError` if it is away or refuses."""
    seconds = min(ANSWER_SECONDS, target.connect_seconds or ANSWER_SECONDS)
    with socket.create_connection(address, seconds) as plain:
        wire = plain
        if target.tls is not None:
            wire = target.tls.context().wrap_socket(plain, server_hostname=address[0])
        with wire:
            every = [*target.sentinel_greetings(), *commands]
            wire.sendall(b"".join(hiredis.pack_command(one) for one in every))  # type: ignore[arg-type]
            replies = _replies(wire, len(every))
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise ConnectionRefusedError(str(reply))
    return replies[-len(commands) :]


def _replies(wire: socket.socket, count: int) -> list[Any]:
    reader = hiredis.Reader()
    found: list[Any] = []
    while len(found) < count:
        data = wire.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection broke")
        reader.feed(data)
        while len(found) < count and (reply := reader.gets()) is not False:
            found.append(reply)
    return found
