"""All keys of Redis that match a pattern, on a cluster those of every node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from dovetail.pipe import Pipe

SCANNED = 1000


async def scanned(pipe: Pipe, pattern: str, *, kind: str | None = None) -> AsyncIterator[list[str]]:
    """Some at a time, so that nobody has to wait for all of them; one may come twice. Of one
    `kind`, if that is given: `stream`, say."""
    cursor: Any = b"0"
    of_kind = () if kind is None else ("TYPE", kind)
    while True:
        asking = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED, *of_kind)
        cursor, keys = await pipe.call(*asking)
        yield [pipe.name_of(key) for key in keys]
        if cursor == b"0":
            return


async def every_key(pipe: Pipe, pattern: str, *, kind: str | None = None) -> list[str]:
    """All of them at once, each once."""
    return sorted({key async for keys in scanned(pipe, pattern, kind=kind) for key in keys})
