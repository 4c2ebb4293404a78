"""What handlers write to their log: lines, in chunks, by attempt.

A worker collects the lines of an attempt and hands them to the store in chunks. A store gives each
chunk the next sequence numbers of its run, one for each line. The log of an attempt is bounded: its
first quarter stays, and of the rest the newest; `LogChunk.drops` names chunks that give way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from dovetail.core.text import HARMLESS, counted, visible

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
"""From the least to the most severe."""
MAX_LINE_BYTES = 8 << 10
MAX_CHUNK_BYTES = 64 << 10
"""Of one chunk as JSON. A chunk is written and read as one value."""
MISSING_LOGGER = "dovetail"
"""The logger of the line that says how much is missing."""


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

    @property
    def attempt_name(self) -> str:
        """Names the attempt in its run."""
        item = "" if self.item is None else self.item
        return f"{self.node}:{self.epoch}:{self.attempt}:{item}:"

    @property
    def name(self) -> str:
        """Names the chunk in its run."""
        return f"{self.attempt_name}{self.number}"


class StoredChunk(NamedTuple):
    """A chunk as a store returns it.

    Its `missing_lines` are missing right before it, and its `drops` are empty. A chunk without a
    node has no lines: it stands for lines of any node that the bound of the run's log took away.
    """

    seq: int
    """Of its first line, in the run; the next lines have the next numbers."""
    chunk: LogChunk

    @property
    def last_seq(self) -> int:
        """A chunk without lines has a number, too."""
        return self.seq + max(1, len(self.chunk.lines)) - 1


class LogPage(NamedTuple):
    """Lines as the HTTP API shows them, with `time` in seconds."""

    items: list[dict[str, Any]]
    cursor: int
    """The next page comes after this number."""


def log_page(
    chunks: Sequence[StoredChunk],
    after: int = 0,
    limit: int = 1000,
    *,
    level: str | None = None,
    q: str | None = None,
    node_log_bytes: int | None = None,
    run_log_bytes: int | None = None,
) -> LogPage:
    """Lines of these chunks after a number, at most `limit`, of this level or a more severe one.

    `q` is in the message, without regard to case. Where lines are missing, one more item says how
    many, right before the next line and under the number before it. It counts towards no limit.
    `node_log_bytes` and `run_log_bytes` are the bounds that it names.
    """
    least = -1 if level is None else _severity(level)
    words = None if q is None else q.casefold()
    items: list[dict[str, Any]] = []
    found = 0
    for place, stored in enumerate(chunks):
        first, chunk = stored
        if chunk.missing_lines and first > after:
            if found == limit:
                break
            bound = node_log_bytes if chunk.node else run_log_bytes
            time = next((c.lines[0].time for _, c in chunks[place:] if c.lines), 0.0)
            items.append(_item(first - 1, chunk, _missing_line(chunk, bound, time)))
        for seq, line in enumerate(chunk.lines, first):
            if seq <= after:
                continue
            if found == limit:
                return LogPage(items, after)
            after = seq
            is_severe = _severity(line.level) >= least
            if is_severe and (words is None or words in line.message.casefold()):
                items.append(_item(seq, chunk, line))
                found += 1
        after = max(after, stored.last_seq)
    return LogPage(items, after)


def _severity(level: str) -> int:
    """A level without a place in the order counts as INFO."""
    name = level.upper()
    return LEVELS.index(name if name in LEVELS else "INFO")


def _item(seq: int, chunk: LogChunk, line: LogLine) -> dict[str, Any]:
    return {
        "seq": seq,
        "time": line.time,
        "node": chunk.node or None,
        "epoch": chunk.epoch if chunk.node else None,
        "attempt": chunk.attempt if chunk.node else None,
        "item": chunk.item,
        "level": line.level,
        "logger": line.logger,
        "message": line.message,
        "fields": line.fields,
    }


def _missing_line(chunk: LogChunk, bound: int | None, time: float) -> LogLine:
    is_one = chunk.missing_lines == 1
    what = counted(chunk.missing_lines, "line") + ("" if chunk.node else " of this run")
    name = "DOVETAIL_NODE_LOG_BYTES" if chunk.node else "DOVETAIL_RUN_LOG_BYTES"
    why = f"see {name}" if bound is None else f"{name} is {bound}"
    verb = "is" if is_one else "are"
    message = f"… {what} ({_size(chunk.missing_bytes)}) {verb} missing here: {why}"
    return LogLine(time, "WARNING", MISSING_LOGGER, message)


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return counted(count, "byte")


# ── as people read them ──────────────────────────────────────────────────────────────────


class LogWords(NamedTuple):
    """The words of a line, all but the message without control characters."""

    time: str
    level: str
    place: str
    """`fetch[2]`: the node and the attempt; of an item `fetch[2]#17`."""
    logger: str
    message: str
    """As the handler wrote it."""
    fields: str
    """As JSON; empty if there are none."""


def log_words(item: Mapping[str, Any]) -> LogWords:
    """`item` is a line as the HTTP API shows it."""
    place = "-"
    if item["node"] is not None:
        nth = "" if item["item"] is None else f"#{item['item']}"
        place = f"{visible(item['node'], HARMLESS)}[{item['attempt']}]{nth}"
    fields = ""
    if item["fields"]:
        fields = visible(json.dumps(item["fields"], ensure_ascii=False), HARMLESS)
    level, logger = visible(item["level"]), visible(item["logger"], HARMLESS)
    return LogWords(item["time"], level, place, logger, item["message"], fields)


def log_text(item: Mapping[str, Any]) -> str:
    """`time level node[attempt] logger: message`, one line, its control characters escaped."""
    time, level, place, logger, message, fields = log_words(item)
    line = f"{time} {level} {place} {logger}: {visible(message, HARMLESS)}"
    return f"{line} {fields}" if fields else line


# ── as stores keep them ──────────────────────────────────────────────────────────────────


def encode_lines(lines: Iterable[LogLine]) -> bytes:
    """A JSON array: an array of time, level, logger, message and maybe fields for each line.

    It never fails: what cannot be written is left out, or replaced.
    """
    rows = [tuple(line if line.fields else line[:4]) for line in lines]
    try:
        return orjson.dumps(rows, default=str)
    except TypeError:  # half of a surrogate pair, or a number of more than 64 bits
        try:
            text = json.dumps(rows, default=str, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = json.dumps([row[:4] for row in rows], default=str, ensure_ascii=False)
        return text.encode("utf-8", "replace")


def decode_lines(text: bytes | str) -> list[LogLine]:
    """Nothing of what cannot be read: a damaged chunk does not hide the others."""
    try:
        return [_line(*row) for row in orjson.loads(text)]
    except (TypeError, ValueError):
        return []


def _line(
    time: float, level: str, logger: str, message: str, fields: dict[str, Any] | None = None
) -> LogLine:
    if not isinstance(level, str) or not isinstance(message, str):
        raise TypeError("a line of a log has no level, or no message")
    return LogLine(float(time), level, str(logger), message, fields)
