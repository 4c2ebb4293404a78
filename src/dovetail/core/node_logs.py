"""What handlers write to their log: lines, in chunks, by attempt.

A worker collects the lines of an attempt and hands them to the store in chunks. A store gives each
chunk the next sequence numbers of its run, one for each line. The log of an attempt is bounded: its
first quarter stays, and of the rest the newest; `LogChunk.drops` names chunks that give way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
"""From the least to the most severe."""
MAX_LINE_BYTES = 8 << 10
MAX_CHUNK_BYTES = 64 << 10
"""Of one chunk as JSON. A chunk is written and read as one value."""


class LogLine(NamedTuple):
    """One line, redacted, with its control characters as the handler wrote them."""

    time: float
    level: str
    logger: str
    """The name of the logger; `stdout` or `stderr` for a line that was printed."""
    message: str
    fields: dict[str, Any] | None = None


class LogChunk(NamedTuple):
    """Lines of one attempt that are written together.

    A chunk is named by its attempt and its number. To write it twice is to write it once.
    """

    run_id: str
    node: str
    epoch: int
    attempt: int
    number: int
    """In its attempt, from 0."""
    lines: Sequence[LogLine]
    item: int | None = None
    """The index in the list of a `for_each` node."""
    drops: Sequence[int] = ()
    """Numbers of earlier chunks of the same attempt that the store removes."""
    missing_lines: int = 0
    """Lines of this attempt that are missing before this chunk, all in all."""
    missing_bytes: int = 0


class StoredChunk(NamedTuple):
    """A chunk as a store returns it."""

    seq: int
    """Of its first line, in the run; the next lines have the next numbers."""
    chunk: LogChunk
