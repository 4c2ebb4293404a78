"""What may stand in a log: one line for one record, without secrets, that steers no terminal.

Names, paths and messages come from whoever writes a definition or sends a request. A line break
in one of them must not look like a second record, and an escape sequence must not be obeyed by
the terminal that shows the log. What it must not know: which library logs, or in which form.

Every log line of a process, from whichever logger, in one of two forms on stderr.

Whoever logs uses Python's own logging and knows nothing of this; structlog makes the line. A line
for people is short: `fetch: 12 pages`. As JSON it has every field there is. Either way a record is
one line, no secret is in it, and a traceback is marked as one (`telemetry/logs.py`). structlog is
loaded with the first line: a command that logs nothing does not wait for it. What it must not
know: who logs, beyond the names a record carries.
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

LONGEST_TEXT = 20_000
"""Characters of one text that are logged; a handler may log its whole output."""
MOST_VALUES = 1000
"""Values of one list or mapping that are logged."""
TEXT_BLOCKS = frozenset({"exception", "stack"})
"""Tracebacks: they keep their lines."""
MARGIN = "  | "
"""Before each line of a block, so that none of them can look like a record of its own."""

_TRACEBACK = "\nTraceback (most recent call last):\n"
# Whatever a connection error quotes: `redis://user:password@host`, of anybody's server.
_URL_PASSWORD = re.compile(r"(://[^\s/?#@:]{0,200}:)[^\s/?#@]{1,500}@")


class LogLines:
    """Makes records fit to be written. Callable as a processor of structlog: the last one
    before the renderer, when tracebacks are text already."""

    def __init__(self, sensitive: Mapping[str, str]) -> None:
        """`sensitive` is what no log may show, as of `Settings.sensitive`."""
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
            items = list(value.items())[:MOST_VALUES]
            return {self.line(str(key)): self.value(item, depth - 1) for key, item in items}
        if depth and isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, depth - 1) for item in list(value)[:MOST_VALUES]]
        return self.line(_text(value))

    def line(self, text: str) -> str:
        return visible(_cut(self._hidden(text)))

    def block(self, text: str) -> str:
        lines = _cut(self._hidden(text)).split("\n")
        return "\n".join(MARGIN + visible(line) for line in lines)

    def _hidden(self, text: str) -> str:
        """Whole, before it is cut: a cut secret would not be recognised."""
        text = self._redactor.redact_shown(text)
        return _URL_PASSWORD.sub(rf"\1{MASK}@", text) if "://" in text else text


def _apart(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A traceback that a handler's logger has put behind its message, as a block of its own."""
    for name in ("event", "message"):
        text = record.get(name)
        if isinstance(text, str) and _TRACEBACK in text and not record.get("exception"):
            words, _, rest = text.partition(_TRACEBACK)
            return {**record, name: words, "exception": _TRACEBACK[1:] + rest}
    return record


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a record about an object that is broken is still worth having
        return f"a {type(value).__name__} whose text cannot be made"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… ({counted(len(text) - LONGEST_TEXT, 'character')} more)"


FIRST = ("time", "level", "logger", "message", "run_id", "node_id", "attempt", "request_id")
"""In this order; what else a record has comes after it, and tracebacks last."""
BLOCKS = ("stack", "exception")
NOT_FOR_PEOPLE = frozenset({"time", "level", "logger", "message", "node_id", *BLOCKS})

# What a record has by itself; everything else was given as `extra`.
_OWN = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})

Record = MutableMapping[str, Any]


def show_logs(settings: Settings, *, names: bool = False) -> None:
    """Show what handlers and Dovetail have to say from INFO on, and all others from WARNING on.

    With `names` a line for people also names the run: a service works on many.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Stderr):
            root.removeHandler(handler)
    root.addHandler(_Stderr(settings, names))
    logging.getLogger("dovetail").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.captureWarnings(True)


class _Stderr(logging.Handler):
    """Whatever stderr is at that moment: the live view puts itself in its place."""

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
    """The record's own fields, and the names of what was going on when it was made."""
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
    if "opentelemetry.sdk.trace" not in sys.modules:  # nobody traces
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
    who = event.get("node_id") or event["logger"]
    level = event["level"]
    words = f"{level}: " if level not in ("debug", "info") else ""
    return "\n".join([f"{who}: {words}{event['message']}", *_blocks(event)])


def _with_names(logger: Any, method: str, event: Record) -> str:
    first, *blocks = _for_people(logger, method, event).split("\n")
    names = [f"{name}={event[name]}" for name in event if name not in NOT_FOR_PEOPLE]
    return "\n".join([" ".join([first, *names]), *blocks])


def _blocks(event: Record) -> list[str]:
    return [event[name] for name in BLOCKS if event.get(name)]
