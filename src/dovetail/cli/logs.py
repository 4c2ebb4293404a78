"""What handlers log while `dovetail run` runs them, on stderr: `fetch: 12 pages`.

What it must not know: who logs, beyond the names a record carries.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from dovetail.cli.text import plain_lines


def show_logs(form: Literal["console", "json"]) -> None:
    """Show what `ctx.log` and Dovetail itself have to say, from INFO on."""
    logger = logging.getLogger("dovetail")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [_Stderr(_Json() if form == "json" else _Console())]


class _Stderr(logging.Handler):
    """Whatever stderr is at that moment: the live view puts itself in its place."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        who = getattr(record, "node_id", record.name)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = plain_lines(super().format(record)) or [""]
        return "\n  ".join([f"{who}: {level}{lines[0]}", *lines[1:]])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("run_id", "node_id", "attempt"):
            if hasattr(record, name):
                said[name] = getattr(record, name)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)
