"""Bounds the log of an attempt: what is kept, in which chunks, and what gives way.

The first quarter of the bytes stays. Of the rest the newest lines stay. Lines that wait to be
handed in give way one by one. Chunks that were handed in give way as a whole, and are named in
`drops`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from dovetail.core.node_logs import LEVELS, MAX_CHUNK_BYTES, MAX_LINE_BYTES, LogChunk, LogLine

DEFAULT_LOG_BYTES = 1 << 20
MIN_LOG_BYTES = 2 * MAX_CHUNK_BYTES
LINE_OVERHEAD_BYTES = 48
"""Of a line as JSON: its time, its level, brackets and commas."""
MARGIN_CHARS = 16 << 10
"""A text is redacted before it is cut. So much of it behind the cut is redacted as well, and thrown
away: it may hold the rest of a secret that begins before."""
MAX_HELD_CHARS = MAX_LINE_BYTES + MARGIN_CHARS
"""Of one text that is redacted. The rest of it is only counted."""
MAX_FIELDS_BYTES = MAX_LINE_BYTES
MAX_FIELD_VALUES = 100
MAX_FIELD_DEPTH = 6
MAX_FIELD_BYTES = 2 << 10
MAX_KEY_BYTES = 200

Redact = Callable[[Any], Any]
"""`Redactor.redact_shown` of the attempt."""


class Waiting(NamedTuple):
    """A line that is not handed in yet."""

    line: LogLine
    size: int
    """Of the line as JSON, in bytes."""
    text: int
    """Of its message, in bytes."""


class _Kept(NamedTuple):
    """A chunk behind the first quarter that was handed in."""

    number: int
    lines: int
    size: int
    text: int


class AttemptKey(NamedTuple):
    """The attempt that a log belongs to."""

    run_id: str
    node: str
    epoch: int
    attempt: int
    item: int | None = None


class LogBuffer:
    """The log of one attempt, while it runs. Not thread-safe."""

    def __init__(self, attempt: AttemptKey, max_bytes: int = DEFAULT_LOG_BYTES) -> None:
        self._attempt = attempt
        self._head_room = max_bytes // 4
        self._rest_room = max_bytes - self._head_room
        self._head: list[Waiting] | None = []
        """Lines of the first quarter that wait; None once it is full and handed in."""
        self._head_is_full = False
        self._rest: deque[Waiting] = deque()
        self._kept: deque[_Kept] = deque()
        self._rest_size = 0
        """Of both."""
        self._drops: list[int] = []
        """Chunks that have given way, and are not named yet."""
        self.chunk_count = 0
        """Chunks that were handed in."""
        self.missing_lines = 0
        self.missing_bytes = 0

    def __len__(self) -> int:
        """Lines that wait to be handed in."""
        return len(self._head or ()) + len(self._rest)

    def add(self, line: LogLine) -> None:
        waiting = measured(line)
        if not self._head_is_full:
            if waiting.size <= self._head_room:
                self._head_room -= waiting.size
                self._head.append(waiting)  # type: ignore[union-attr]
                return
            # For good: a short line behind a long one would otherwise stand before it.
            self._head_is_full = True
        self._rest.append(waiting)
        self._rest_size += waiting.size
        while self._rest_size > self._rest_room:
            self._give_way()

    def _give_way(self) -> None:
        """The oldest first: chunks that were handed in, then lines that wait."""
        if self._kept:
            chunk = self._kept.popleft()
            self._drops.append(chunk.number)
            self._rest_size -= chunk.size
            self.skip(chunk.lines, chunk.text)
        else:
            line = self._rest.popleft()
            self._rest_size -= line.size
            self.skip(1, line.text)

    def skip(self, lines: int, text: int) -> None:
        """Count lines as missing that stand behind the first quarter."""
        self.missing_lines += lines
        self.missing_bytes += text

    @property
    def keeps_newest_only(self) -> bool:
        """The first quarter is full."""
        return self._head_is_full

    def take(self) -> list[LogChunk]:
        """The waiting lines as chunks, to be handed in."""
        chunks = []
        if self._head:
            chunks += [self._chunk(part) for part in _parts(self._head)]
            self._head = []
        if self._head_is_full:
            self._head = None
        if self._rest:
            rest, self._rest = self._rest, deque()
            chunks += [self._chunk_behind(part) for part in _parts(rest)]
        return chunks

    def _chunk(self, part: list[Waiting], **fields: Any) -> LogChunk:
        run_id, node, epoch, attempt, item = self._attempt
        lines = [waiting.line for waiting in part]
        number, self.chunk_count = self.chunk_count, self.chunk_count + 1
        return LogChunk(run_id, node, epoch, attempt, number, lines, item, **fields)

    def _chunk_behind(self, part: list[Waiting]) -> LogChunk:
        size, text = sum(one.size for one in part), sum(one.text for one in part)
        self._kept.append(_Kept(self.chunk_count, len(part), size, text))
        drops, self._drops = self._drops, []
        return self._chunk(
            part,
            drops=drops,
            missing_lines=self.missing_lines,
            missing_bytes=self.missing_bytes,
        )


def _parts(lines: list[Waiting] | deque[Waiting]) -> list[list[Waiting]]:
    """The lines in pieces of at most `MAX_CHUNK_BYTES`, a longer line alone."""
    parts: list[list[Waiting]] = []
    room = 0
    for waiting in lines:
        if waiting.size > room or not parts:
            parts.append([])
            room = MAX_CHUNK_BYTES
        parts[-1].append(waiting)
        room -= waiting.size
    return parts


def measured(line: LogLine) -> Waiting:
    message = line.message
    size = LINE_OVERHEAD_BYTES + len(orjson.dumps(message)) + len(line.logger)
    if line.fields:
        size += len(orjson.dumps(line.fields))
    return Waiting(line, size, byte_length(message))


# ── what a line is made of ───────────────────────────────────────────────────────────────


def level_name(number: int) -> str:
    """The name of a numeric level, or of the next lower one that has a name."""
    return LEVELS[min(max(int(number) // 10, 1), len(LEVELS)) - 1]


def storable(text: str) -> str:
    """The text as JSON can hold it: lone surrogates are written as escapes."""
    if type(text) is not str:
        text = "".join((text,))  # a plain str: a subclass may change when it is cut
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def cut(text: str, unseen: int = 0, max_bytes: int = MAX_LINE_BYTES) -> str:
    """The beginning of a redacted text, with how much is missing.

    `unseen` bytes of the line were not redacted and are not in the text. Then the end of the text
    may be the beginning of a secret, and is thrown away.
    """
    if not unseen and len(text) * 4 <= max_bytes:  # whatever the characters are
        return text
    encoded = text.encode()
    if not unseen and len(encoded) <= max_bytes:
        return text
    keep = encoded[: max(0, len(encoded) - MARGIN_CHARS)] if unseen else encoded
    left = len(encoded) + unseen
    room = max_bytes - len(_cut_note(left))
    shown = keep[: max(0, room)].decode(errors="ignore")
    return shown + _cut_note(left - len(shown.encode())).decode()


def _cut_note(missing: int) -> bytes:
    return f"… ({missing:,} more bytes)".encode()


def message_of(text: str, redact: Redact) -> str:
    """A text as the message of a line: redacted, then cut."""
    text = storable(text)
    if len(text) <= MAX_HELD_CHARS:
        return cut(redact(text))
    return cut(redact(text[:MAX_HELD_CHARS]), byte_length(text[MAX_HELD_CHARS:]))


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def fields_of(fields: Mapping[Any, Any], redact: Redact) -> dict[str, Any]:
    """Fields as JSON values: redacted, and bounded in depth, number and size.

    Objects that JSON does not know become their text.
    """
    found = _cut_texts(redact(_plain(dict(fields), MAX_FIELD_DEPTH, redact)))
    kept: dict[str, Any] = {}
    room = MAX_FIELDS_BYTES
    for key, value in found.items():
        room -= len(orjson.dumps({key: value}))
        if room < 0:
            kept["…"] = f"{len(fields) - len(kept)} more"
            break
        kept[key] = value
    return kept


def _plain(value: Any, depth: int, redact: Redact) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < (1 << 63) else str(value)
    if kind is float:
        return value if value - value == 0 else str(value)
    try:
        if depth and isinstance(value, Mapping):
            items = list(value.items())[:MAX_FIELD_VALUES]
            return {_text(key, redact): _plain(item, depth - 1, redact) for key, item in items}
        if depth and isinstance(value, list | tuple | set | frozenset):
            return [_plain(item, depth - 1, redact) for item in list(value)[:MAX_FIELD_VALUES]]
        return _text(value, redact)
    except Exception:  # a line about a broken object is still worth having
        return f"a {kind.__name__} whose text cannot be made"


def _text(value: object, redact: Redact) -> str:
    text = storable(str(value))
    if len(text) <= MAX_HELD_CHARS:
        return text
    unseen = byte_length(text[MAX_HELD_CHARS:])
    return cut(redact(text[:MAX_HELD_CHARS]), unseen, MAX_FIELD_BYTES)


def _cut_texts(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value, max_bytes=MAX_FIELD_BYTES)
    if isinstance(value, dict):
        return {cut(key, max_bytes=MAX_KEY_BYTES): _cut_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut_texts(item) for item in value]
    return value
