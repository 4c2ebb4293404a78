"""What `--json` prints: one document on stdout, and nothing else there.

What it must not know: what the document says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import orjson

from dovetail.cli import streams
from dovetail.cli.text import printable

Write = Callable[[bytes], None]


def json_bytes(value: Any) -> bytes:
    return f"{json_text(value, orjson.OPT_INDENT_2)}\n".encode()


def json_text(value: Any, option: int = 0) -> str:
    """The same value, with every character that could steer a terminal as `\\uXXXX`."""
    return printable(orjson.dumps(value, option=option).decode())


def document_if(wanted: bool) -> AbstractContextManager[Write | None]:
    """Keep stdout for a document that comes at the end, if one is wanted."""
    return streams.document() if wanted else nullcontext()


def print_json(value: Any) -> None:
    """The document at once, where nobody else prints."""
    with streams.document() as write:
        write(json_bytes(value))
