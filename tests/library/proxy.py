"""A line between a client and its server that can be bad: slow, cut, or dead. Real TCP, one hop.

It speaks no HTTP: it passes bytes on, and a test says what happens to them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

TRICKLE_BYTES = 3


class Line:
    """How the line behaves from now on; a test changes it while it is used."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self.url = ""
        self.connections = 0
        self.dead = False
        """Every connection is cut off at once."""
        self.cut_answers: list[int] = []
        """Of the next connections that are answered: cut after so many bytes of the answer."""
        self.trickles = False
        """Answers come a few bytes at a time."""
        self.forgets = 0
        """So many requests lose on the way where a stream was to go on."""
        self.instead: list[bytes] = []
        """What the next requests are answered with, as by a gateway; the server never sees them."""
        self.asked: list[bytes] = []
        """What clients have sent, one entry for each piece."""
        self._open: set[asyncio.StreamWriter] = set()

    def requests(self, method: str) -> list[bytes]:
        """The heads of what was asked with this method, in their order."""
        return [one for one in self.asked if one.startswith(method.encode() + b" ")]

    def cut(self) -> None:
        """Every connection that is open now, at once."""
        for writer in self._open:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            if self.dead:
                return
            if self.instead:
                self.asked.append(await reader.read(1 << 16))
                writer.write(self.instead.pop(0))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
                return
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            self._open.add(far_writer)
            try:
                await self._between(reader, writer, far_reader, far_writer)
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _between(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        there = asyncio.ensure_future(self._pass(reader, far_writer, self.asked.append))
        back = asyncio.ensure_future(self._answer(far_reader, writer))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[bytes], None],
    ) -> None:
        while piece := await reader.read(1 << 16):
            note(piece)
            if self.forgets and b"last-event-id" in piece.lower():
                self.forgets -= 1
                piece = re.sub(rb"(?i)last-event-id: \d+\r\n|\?after=\d+", b"", piece)
            writer.write(piece)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed, most = 0, None
        while piece := await reader.read(1 << 16):
            if not passed and self.cut_answers:
                most = self.cut_answers.pop(0)
            if most is not None:
                piece = piece[: most - passed]
            size = TRICKLE_BYTES if self.trickles else len(piece) or 1
            for start in range(0, len(piece), size):
                writer.write(piece[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            passed += len(piece)
            if most is not None and passed >= most:
                return


@asynccontextmanager
async def line_to(server: str) -> AsyncIterator[Line]:
    line = Line(server)
    listening = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        line.cut()
        listening.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(listening.wait_closed(), 1)
