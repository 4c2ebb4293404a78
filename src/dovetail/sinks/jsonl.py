"""Events as lines of JSON in a file, which another program may move away at any time."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from dovetail.engine.event_export import SinkError

MODE = 0o600
"""Events have errors of people's runs: the file is for its owner alone."""


class JsonLinesSink:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    async def write(self, records: Sequence[dict[str, Any]]) -> None:
        lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
        try:
            await asyncio.to_thread(self._append, lines)
        except OSError as error:
            await self.close()
            raise SinkError(f"{self._path} cannot be written: {error.strerror}") from error

    async def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, lines: bytes) -> None:
        if self._file is not None and not self._is_in_place(self._file):
            os.close(self._file)  # it was moved away: go on with a new one
            self._file = None
        if self._file is None:
            self._file = self._open()
        while lines:
            lines = lines[os.write(self._file, lines) :]
        if stat.S_ISREG(os.fstat(self._file).st_mode):  # a pipe, as /dev/stdout may be, has no disk
            os.fsync(self._file)

    def _is_in_place(self, file: int) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(file)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, MODE)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")  # a crash cut the last line short: its event comes again
        return file
