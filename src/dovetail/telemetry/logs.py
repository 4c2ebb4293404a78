"""Every log line of a process, from whichever logger, in one of two forms on stderr.

Whoever logs uses Python's own logging and knows nothing of this; structlog makes the line. A line
for people is short: `fetch: 12 pages`. As JSON it has every field there is. Either way a record is
one line, no secret is in it, and a traceback is marked as one (`core/log_lines.py`). structlog is
loaded with the first line: a command that logs nothing does not wait for it. What it must not
know: who logs, beyond the names a record carries.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import orjson

from dovetail.config import Settings
from dovetail.core.log_lines import LogLines
from dovetail.engine.listening import REQUEST_ID

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
