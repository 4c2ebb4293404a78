"""Serves the application on a socket until it is asked to stop, with uvicorn.

It binds before anything else is opened, so that a port in use costs nothing. It leaves signals to
its caller.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, cast

import anyio
import uvicorn
from starlette.types import ASGIApp

from dovetail.api.connection import (
    MAX_CONNECTIONS,
    REQUEST_SECONDS,
    Crowd,
    HttpConnection,
    Sending,
    most_connections,
)
from dovetail.core.errors import DovetailError

LAST_REQUESTS_SECONDS = 1
"""What is being answered when the server stops gets this long."""
BACKLOG = 1024
ACCEPTED_EACH_TURN = 128
"""Without a limit the loop would do nothing else for as long as clients keep connecting."""
SWITCH_SECONDS = 0.0001
"""A thread that validates a large body hands the interpreter back after this, not after Python's
5 ms. The event loop asks for it again after each piece that it reads: with 1 ms, 150 pieces of
large bodies took 150 ms, and liveness has 100 ms in all."""


class CannotListen(DovetailError):
    """The address cannot be had."""

    type = "cannot_listen"


def addresses_of(host: str) -> list[str]:
    """Every address that the host stands for. Raises `CannotListen`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise CannotListen(f"--host {host}: there is no such address here") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets that listen, on one port; port 0 is any free one. Raises `CannotListen`."""
    listening: list[socket.socket] = []
    try:
        for address in addresses:
            try:
                listening.append(_bound(address, port))
            except OSError as error:
                # A name may stand for an IPv6 address where there is no IPv6.
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(addresses) > 1:
                    continue
                raise CannotListen(_explained(error, address, port)) from None
            port = listening[0].getsockname()[1]
        if not listening:
            raise CannotListen(f"none of {', '.join(addresses)} is an address of this machine")
    except CannotListen:
        for one in listening:
            one.close()
        raise
    return listening


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it, every
    # answer on an open connection would wait 40 ms for the client's acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address, port))
        # At once: a port that is only bound can be bound again by another process.
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _explained(error: OSError, address: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {address} is in use; choose another with --port"
        case errno.EACCES:
            return f"port {port} of {address} needs rights that this user has not; try --port 8700"
        case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
            return f"{address} is no address of this machine"
    return f"cannot listen on port {port} of {address}: {error.strerror}"


def url_of(listening: Sequence[socket.socket]) -> str:
    host, port = listening[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp,
    listening: list[socket.socket],
    closing: asyncio.Event,
    connections: int = MAX_CONNECTIONS,
    sending: Sending | None = None,
) -> None:
    """Answer requests until `closing` is set; then take no more and finish those under way.

    `connections`: no more than these at once.
    """
    crowd = Crowd(most_connections(connections))
    made = partial(HttpConnection, crowd=crowd, sending=sending or Sending())
    arrivals = Arrivals(listening, made)
    config = uvicorn.Config(
        app,
        http=cast("Any", arrivals.connected),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=ceil(REQUEST_SECONDS),
        timeout_graceful_shutdown=LAST_REQUESTS_SECONDS,
    )
    server = _UvicornServer(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    anyio.get_current_task()  # imports a backend: 80 ms, for which the first stream would stop all
    serving = asyncio.ensure_future(server.serve(sockets=listening))
    asked = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        server.should_exit = True
        await serving


class Arrivals:
    """Accepts the connections that wait, whenever the event loop has accepted one of them.

    uvloop accepts one connection in each turn. A question about health would wait for as many
    turns as there are connections before it.
    """

    def __init__(
        self, listening: Sequence[socket.socket], made: Callable[..., HttpConnection]
    ) -> None:
        self._listening = listening
        self._made = made
        self._connecting: set[asyncio.Task[Any]] = set()

    def connected(self, **given: Any) -> HttpConnection:
        """The protocol of a connection that the loop has accepted; uvicorn calls it."""
        self._accept_others(partial(self._made, **given))
        return self._made(**given)

    def _accept_others(self, made: Callable[[], HttpConnection]) -> None:
        loop = asyncio.get_running_loop()
        for one in self._listening:
            for _ in range(ACCEPTED_EACH_TURN):
                try:
                    accepted, _address = one.accept()
                except OSError:  # none waits; or too many files are open, as the loop will report
                    break
                accepted.setblocking(False)
                task = loop.create_task(loop.connect_accepted_socket(made, accepted))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)


class _UvicornServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
