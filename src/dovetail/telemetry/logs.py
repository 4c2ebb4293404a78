"""The log of a process on stderr: one line per record, without secrets.

Code logs with Python's own `logging`; structlog makes the line, either short for people
(`fetch: 12 pages`) or JSON with all fields. Names, paths and messages come from definitions and
requests. A line break in one must not look like a second record, and a terminal must not obey an
escape sequence. structlog is imported with the first line: a command that logs nothing does not
wait for it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import orjson

from dovetail.config import Settings
from dovetail.core.redaction import MASK, Redactor
from dovetail.core.text import counted, visible
from dovetail.engine.listener import REQUEST_ID

MAX_TEXT_CHARS = 20_000
"""Of one text that is logged; a handler may log its whole output."""
MAX_VALUES = 1000
"""Of one list or mapping that is logged."""
TEXT_BLOCKS = frozenset({"exception", "stack"})
"""Tracebacks: they keep their lines."""
MARGIN = "  | "
"""Before each line of a traceback, so that no line of it looks like a record."""

_TRACEBACK = re.compile(r"\n(?=(?:  \+ Exception Group )?Traceback \(most recent call last\):\n)")
# Errors of a connection may quote `redis://user:password@host`, of any server.
_URL_PASSWORD = re.compile(r"(://[^\s/?#@:]{0,200}:)[^\s/?#@]{1,500}@")


class LogLines:
    """Redacts, cuts and escapes records. A processor of structlog: the last one before the
    renderer, when tracebacks are text already."""

    def __init__(self, sensitive: Mapping[str, str]) -> None:
        """`sensitive` are the values that no log may show, from `Settings.sensitive`."""
        self._redactor = Redactor(sensitive)

    def __call__(
        self, logger: Any, method: str, record: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {
            self.line(str(name)): self.block(value)
            if name in TEXT_BLOCKS and isinstance(value, str)
            else self.value(value)
            for name, value in _apart(record).items()
        }

    def value(self, value: Any, depth: int = 8) -> Any:
        """Numbers as they are, containers piece by piece, everything else as one line."""
        if value is None or isinstance(value, bool | int | float):
            return self._redactor.redact_shown(value)
        if depth and isinstance(value, Mapping):
            items = list(value.items())[:MAX_VALUES]
            return {self.line(str(key)): self.value(item, depth - 1) for key, item in items}
        if depth and isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, depth - 1) for item in list(value)[:MAX_VALUES]]
        return self.line(_text(value))

    def line(self, text: str) -> str:
        return visible(_cut(self._hidden(text)))

    def block(self, text: str) -> str:
        lines = _cut(self._hidden(text)).split("\n")
        return "\n".join(MARGIN + visible(line) for line in lines)

    def _hidden(self, text: str) -> str:
        """Redact before the text is cut: half a secret would not be recognised."""
        text = self._redactor.redact_shown(text)
        return _URL_PASSWORD.sub(rf"\1{MASK}@", text) if "://" in text else text


def _apart(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a traceback that a logger has put behind its message into `exception`."""
    for name in ("event", "message"):
        text = record.get(name)
        if not isinstance(text, str) or record.get("exception"):
            continue
        words, *rest = _TRACEBACK.split(text, maxsplit=1)
        if rest:
            return {**record, name: words, "exception": rest[0]}
    return record


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a record about a broken object is still worth having
        return f"a {type(value).__name__} whose text cannot be made"


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}… ({counted(len(text) - MAX_TEXT_CHARS, 'character')} more)"


FIRST = (
    *("time", "level", "logger", "message"),
    *("run_id", "node_id", "item", "attempt", "request_id"),
)
"""The first fields, in this order; then all others, and tracebacks last."""
BLOCKS = ("stack", "exception")
NOT_FOR_PEOPLE = frozenset({"time", "level", "logger", "message", "node_id", *BLOCKS})

# The fields of every record; all others were given as `extra`.
_OWN = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})

Record = MutableMapping[str, Any]


def show_logs(settings: Settings, *, names: bool = False) -> None:
    """Log handlers and Dovetail from INFO on, all other loggers from WARNING on.

    With `names` a line for people also has its time and names its run: a service works on many, and
    its lines are read later.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Stderr):
            root.removeHandler(handler)
    root.addHandler(_Stderr(settings, names))
    logging.getLogger("dovetail").setLevel(logging.INFO)
    # A command for one run ends with its errors; in between, its live view shows each attempt.
    attempts = logging.getLogger("dovetail.attempts")
    attempts.setLevel(logging.NOTSET if names else logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.captureWarnings(True)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`: the live view replaces it."""

    def __init__(self, settings: Settings, names: bool) -> None:
        super().__init__()
        self._settings = settings
        self._names = names

    @cached_property
    def _lines(self) -> logging.Formatter:
        from structlog.processors import format_exc_info
        from structlog.stdlib import ProcessorFormatter

        as_json = self._settings.log_format == "json"
        return ProcessorFormatter(
            processors=[
                _named,
                format_exc_info,
                _ordered,
                LogLines(self._settings.sensitive()),
                _as_json if as_json else _with_names if self._names else _for_people,
            ]
        )

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self._lines.format(record) + "\n")
        except Exception:
            self.handleError(record)


def _named(logger: Any, method: str, event: Record) -> Record:
    """The record's own fields, with the ids of its request and its trace."""
    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    found = {name: value for name, value in record.__dict__.items() if name not in _OWN}
    if (request_id := REQUEST_ID.get()) is not None:
        found.setdefault("request_id", request_id)
    found |= _trace_of_now()
    if "stack_info" in event:
        found["stack"] = event["stack_info"]
    return {
        **found,
        "exc_info": event.get("exc_info"),
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": event["event"],
    }


def _trace_of_now() -> dict[str, str]:
    if "opentelemetry.sdk.trace" not in sys.modules:  # tracing is off
        return {}
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}


def _ordered(logger: Any, method: str, event: Record) -> Record:
    names = [name for name in event if name not in FIRST and name not in BLOCKS]
    return {name: event[name] for name in (*FIRST, *names, *BLOCKS) if name in event}


def _as_json(logger: Any, method: str, event: Record) -> str:
    try:
        return orjson.dumps(event).decode()
    except TypeError:  # a number of more than 64 bits
        return json.dumps(event)


def _for_people(logger: Any, method: str, event: Record) -> str:
    source = event.get("node_id") or event["logger"]
    level = event["level"]
    words = f"{level}: " if level not in ("debug", "info") else ""
    return "\n".join([f"{source}: {words}{event['message']}", *_blocks(event)])


def _with_names(logger: Any, method: str, event: Record) -> str:
    first, *blocks = _for_people(logger, method, event).split("\n")
    names = [f"{name}={event[name]}" for name in event if name not in NOT_FOR_PEOPLE]
    return "\n".join([" ".join([_time_for_people(event["time"]), first, *names]), *blocks])


def _time_for_people(time: str) -> str:
    """`2026-11-16T08:00:00.123Z`."""
    return f"{time[:23] if '.' in time else time[:19] + '.000'}Z"


def _blocks(event: Record) -> list[str]:
    return [event[name] for name in BLOCKS if event.get(name)]
