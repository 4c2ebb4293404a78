"""One client's connection, as far as it can harm before there is a request.

A client that connects and never asks holds a descriptor, and there are only so many: it has a
time to say what it wants, and beyond a number of connections the next one is sent away. What
cannot be read as a request is answered like every other mistake. What it must not know: who may
ask, or what for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dovetail.api.problems import KIND_OF, answer
from dovetail.api.security import PROTECTIVE_HEADERS
from dovetail.core.findings import one_line

log = logging.getLogger("dovetail.api")

REQUEST_SECONDS = 20.0
"""For the request line and headers, from the connection or from the answer before."""
MOST_CONNECTIONS = 4096
MOST_HEADERS = 200
"""Each costs 8 µs to read, in the loop that serves everybody; browsers send about twenty."""
SEND_SECONDS = 30.0
"""For reading anything at all of an answer."""
MOST_UNSENT = 64 << 20
"""Bytes of answers that wait for clients to read, over all connections."""
UNNOTICED = 16 << 10
"""Less than this may wait in a connection without anybody being told: with a limit of zero every
small answer would be sent in two pieces."""
RESERVED_DESCRIPTORS = 128
"""For stores, files and what handlers open."""


def most_connections() -> int:
    """What this process can hold; a connection more would also keep it from opening its store."""
    try:
        import resource
    except ImportError:  # not on this platform, which has no such limit either
        return MOST_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - RESERVED_DESCRIPTORS))


class Sending:
    """The connections of a server whose clients do not read as fast as they are answered."""

    def __init__(self, timeout: float = SEND_SECONDS, most_unsent: int = MOST_UNSENT) -> None:
        self.timeout = timeout
        self._most_unsent = most_unsent
        self._waiting: dict[Connection, None] = {}

    def waits(self, connection: Connection) -> None:
        """Its client has to read before more can be sent."""
        self._waiting[connection] = None
        unsent = self.unsent
        while unsent > self._most_unsent:
            # The one that has waited longest.
            first = next(iter(self._waiting))
            unsent -= first.unsent
            first.drop(f"{unsent + first.unsent:,} bytes wait for clients that do not read")

    def goes_on(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    @property
    def unsent(self) -> int:
        """Bytes that wait in all connections."""
        return sum(connection.unsent for connection in self._waiting)


class Connection(H11Protocol):
    """uvicorn's, with a limit in number and in time, and with problems for answers."""

    def __init__(self, *args: Any, sending: Sending | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending = sending or Sending()
        self._reader: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._idle_since = self.loop.time()
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNNOTICED)
        if len(self.connections) > most_connections():
            self._refuse(429, "too many connections are open")
            return
        self._watch = self.loop.call_later(REQUEST_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._goes_on()
        super().connection_lost(exc)

    # ── a client that does not read ──────────────────────────────────────────────────────

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._unsent = self.unsent
            self._reader = self.loop.call_later(self._sending.timeout, self._look_at_reader)
        self._sending.waits(self)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.unsent and self._reader is None:  # too little to be noticed, and yet not read
            self.pause_writing()

    def resume_writing(self) -> None:
        self._goes_on()
        super().resume_writing()

    def _goes_on(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self._sending.goes_on(self)

    def _look_at_reader(self) -> None:
        unsent = self.unsent
        if unsent < self._unsent:  # a slow reader is one
            self._unsent = unsent
            self._reader = self.loop.call_later(self._sending.timeout, self._look_at_reader)
        else:
            self.drop(f"it read nothing for {self._sending.timeout:g} s")

    def drop(self, why: str) -> None:
        """Give up on the client, and on what it was to be sent."""
        asked = "" if self.scope is None else f" after {one_line(str(self.scope['path']), 200)}"
        peer = "a client" if self.client is None else f"the client at {self.client[0]}"
        log.warning("%s was dropped%s: %s; %d bytes unsent", peer, asked, why, self.unsent)
        self._goes_on()
        self.transport.abort()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and self._lines() > MOST_HEADERS + 1:
            self._refuse(400, f"a request has at most {MOST_HEADERS} headers")
            return
        super().handle_events()

    def _lines(self) -> int:
        """Of the head of the next request, as far as it is here and not read yet."""
        waiting, _ = self.conn.trailing_data
        ends = [at for at in (waiting.find(b"\n\r\n"), waiting.find(b"\n\n")) if at >= 0]
        return waiting.count(b"\n", 0, min(ends, default=len(waiting)))

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request that can be read")

    def _look(self) -> None:
        """One timer for the connection's whole life: one for each request would cost more."""
        asks = self.conn.their_state is not h11.IDLE
        left = REQUEST_SECONDS - (self.loop.time() - self._idle_since)
        if asks or left > 0:
            self._watch = self.loop.call_later(REQUEST_SECONDS if asks else left, self._look)
        elif not self.transport.is_closing():
            self._refuse(408, f"no request within {REQUEST_SECONDS:g} s")

    def _refuse(self, status: int, words: str) -> None:
        """Answer, if nothing else was answered yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Whoever works on the request is told that its client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = os.urandom(8).hex()
            scope = {"path": "/", "state": {"request_id": request_id}}
            told = answer(status, KIND_OF[status], words, scope)
            headers = [
                *told.raw_headers,
                *PROTECTIVE_HEADERS,
                (b"cache-control", b"no-store"),
                (b"x-request-id", request_id.encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=bytes(told.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
