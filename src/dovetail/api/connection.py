"""One client's connection before there is a request.

A client that connects and sends nothing holds a descriptor. So it has a time limit for its request,
and above a number of connections the oldest idle one is closed for the next. If none is idle, the
next one may only ask for health. Of pieces that arrive together a few are read in each turn of the
event loop, requests for health first. Bytes that are no request get a problem as their reply.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dovetail.api.admission import NOWHERE, Gate, Visit, network_of
from dovetail.api.problems import KIND_OF, answer
from dovetail.api.security import PROTECTIVE_HEADERS
from dovetail.core.errors import one_line

log = logging.getLogger("dovetail.api")

STRANGER_SECONDS = 5.0
"""For the request line and headers, from the connection or from the answer before."""
REQUEST_SECONDS = 20.0
"""The same, on a connection on which a request was let through before."""
MAX_CONNECTIONS = 4096
MAX_HEADERS = 200
"""Each costs 8 µs to read, in the loop that serves all clients; browsers send about twenty."""
SEND_SECONDS = 30.0
"""For reading anything at all of an answer."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes of answers that wait for clients to read, over all connections."""
UNNOTICED = 16 << 10
"""Less than this may wait in a connection without a warning: with a limit of zero every
small answer would be sent in two pieces."""
RESERVED_DESCRIPTORS = 128
"""For stores, files and what handlers open."""
ARRIVING = 8
"""This part of the descriptors is for connections that arrive together, before one is closed."""
HEALTH_CONNECTIONS = 16
"""So many more may ask for health while every other connection asks for something."""
CLOSING_SECONDS = 0.001
"""Between two connections that are closed because they asked for nothing."""
READS_EACH_TURN = 16
"""Pieces of requests that are read in one turn of the event loop. A piece takes up to 0.3 ms:
liveness would wait until the last of a thousand is read."""
HEALTH = (b"GET /health/", b"HEAD /health/")
"""A piece that begins so is read at once."""
ADDRESS_SHARE = 4
"""An address that has more than this part of all connections makes room by closing its own."""


def most_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """What this process can hold; a connection more would also keep it from opening its store."""
    try:
        import resource
    except ImportError:  # not on this platform, which has no such limit either
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    held_back = RESERVED_DESCRIPTORS + HEALTH_CONNECTIONS + soft // ARRIVING
    return max(1, min(wanted, soft - held_back))


class Crowd:
    """The connections of a server that ask for nothing at the moment, and how many there may be."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._strangers: dict[HttpConnection, None] = {}
        """Those on which nothing was let through yet, oldest first."""
        self._by_address: dict[str, dict[HttpConnection, None]] = {}
        """The same, by their address."""
        self._known: dict[HttpConnection, None] = {}
        self._closes_at = 0.0
        self.gate = Gate(READS_EACH_TURN)
        """In front of reading what they send."""

    def add(self, one: HttpConnection) -> None:
        if one.visit.known:
            self._known[one] = None
        else:
            self._strangers[one] = None
            self._by_address.setdefault(one.address, {})[one] = None

    def remove(self, one: HttpConnection) -> None:
        self._known.pop(one, None)
        if one in self._strangers:
            del self._strangers[one]
            same = self._by_address[one.address]
            del same[one]
            if not same:
                del self._by_address[one.address]

    def pause(self, now: float) -> float:
        """0 if a connection may be closed now. Those that came together are closed one after the
        other: all at once they would delay all other clients, and come back together."""
        if self._closes_at > now:
            self._closes_at += CLOSING_SECONDS
            return self._closes_at - now
        self._closes_at = now + CLOSING_SECONDS
        return 0.0

    def to_close(self, address: str) -> HttpConnection | None:
        """Which connection goes for a new one from this address; None if all of them are in use.

        The oldest one without a valid token. An address with many connections gives up one of its
        own: otherwise other clients would lose theirs before they send a request.
        """
        same = self._by_address.get(address, {})
        crowd = same if len(same) > self.most // ADDRESS_SHARE else self._strangers or self._known
        return next(iter(crowd), None)


class Sending:
    """The connections of a server whose clients do not read as fast as they are answered."""

    def __init__(self, timeout: float = SEND_SECONDS, most_unsent: int = MAX_UNSENT_BYTES) -> None:
        self.timeout = timeout
        self._most_unsent = most_unsent
        self._waiting: dict[HttpConnection, None] = {}

    def waits(self, connection: HttpConnection) -> None:
        """Its client has to read before more can be sent."""
        self._waiting[connection] = None
        unsent = self.unsent
        while unsent > self._most_unsent:
            # The one that has waited longest.
            first = next(iter(self._waiting))
            unsent -= first.unsent
            first.drop(f"{unsent + first.unsent:,} bytes wait for clients that do not read")

    def goes_on(self, connection: HttpConnection) -> None:
        self._waiting.pop(connection, None)

    @property
    def unsent(self) -> int:
        """Bytes that wait in all connections."""
        return sum(connection.unsent for connection in self._waiting)


class HttpConnection(H11Protocol):
    """uvicorn's, with a limit in number and in time, and with problems for answers."""

    def __init__(
        self, *args: Any, crowd: Crowd, sending: Sending | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._crowd = crowd
        self.visit = Visit()
        self.address = NOWHERE
        # Every request has a copy: the application learns of the connection by it.
        self.app_state = {**self.app_state, "visit": self.visit}
        self._sending = sending or Sending()
        self._reader: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._idle_since = self.loop.time()
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNNOTICED)
        if self.client is not None:
            self.address = network_of(self.client[0])
        crowd = self._crowd
        if len(self.connections) > crowd.most:
            other = crowd.to_close(self.address)
            if other is not None:
                other.make_room()
            elif len(self.connections) <= crowd.most + HEALTH_CONNECTIONS:
                self.visit.reserved = True
            else:
                self._refuse(429, "too many connections are open")
                return
        crowd.add(self)
        self._watch = self.loop.call_later(STRANGER_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._crowd.remove(self)
        self._goes_on()
        super().connection_lost(exc)

    # ── many clients that send at once ───────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if data.startswith(HEALTH) or not (passes := self._crowd.gate.enter(self.address)):
            super().data_received(data)
            return
        self.transport.pause_reading()
        passes.add_done_callback(lambda _: self._read_held(data))

    def _read_held(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self.flow.read_paused:  # else the endpoint continues it, when it wants more
            self.transport.resume_reading()

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
        if self.conn.their_state is h11.IDLE and self._lines() > MAX_HEADERS + 1:
            self._refuse(400, f"a request has at most {MAX_HEADERS} headers")
            return
        super().handle_events()
        if self._asks:
            self._crowd.remove(self)

    @property
    def _asks(self) -> bool:
        """A request is being answered. What comes in after its answer does not count."""
        return self.cycle is not None and not self.cycle.response_complete

    def make_room(self) -> None:
        """Another connection is wanted more."""
        self.connections.discard(self)  # at once: more may come before the loop has closed it
        self._end(429, "closed for a newer connection, of so many that are open")

    def _lines(self) -> int:
        """Of the head of the next request, as far as it is here and not read yet."""
        waiting, _ = self.conn.trailing_data
        ends = [at for at in (waiting.find(b"\n\r\n"), waiting.find(b"\n\n")) if at >= 0]
        return waiting.count(b"\n", 0, min(ends, default=len(waiting)))

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        if not self.transport.is_closing():
            self._crowd.add(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request that can be read")

    def _look(self, its_turn: bool = False) -> None:
        """One timer for the connection's whole life: one for each request would cost more."""
        allowed = REQUEST_SECONDS if self.visit.known else STRANGER_SECONDS
        now = self.loop.time()
        left = allowed - (now - self._idle_since)
        if self._asks or left > 0:
            self._watch = self.loop.call_later(allowed if self._asks else left, self._look)
        elif not its_turn and (pause := self._crowd.pause(now)) > 0:
            self._watch = self.loop.call_later(pause, self._look, True)
        else:
            self._end(408, f"no request within {allowed:g} s")

    def _end(self, status: int, words: str) -> None:
        """Close a connection that asks for nothing. One that was answered before, and has sent
        nothing since, expects nothing."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.conn.trailing_data[0]:
            self._refuse(status, words)
        else:
            self._crowd.remove(self)
            self.transport.close()

    def _refuse(self, status: int, words: str) -> None:
        """Answer, if nothing else was answered yet, and close."""
        self._crowd.remove(self)
        if self.cycle is not None and not self.cycle.response_complete:
            # The endpoint that works on the request learns that its client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = os.urandom(8).hex()
            scope = {"path": "/", "state": {"request_id": request_id}}
            problem = answer(status, KIND_OF[status], words, scope)
            headers = [
                *problem.raw_headers,
                *PROTECTIVE_HEADERS,
                (b"cache-control", b"no-store"),
                (b"x-request-id", request_id.encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=bytes(problem.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
