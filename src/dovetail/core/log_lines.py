"""What may stand in a log: one line for one record, without secrets, that steers no terminal.

Names, paths and messages come from whoever writes a definition or sends a request. A line break
in one of them must not look like a second record, and an escape sequence must not be obeyed by
the terminal that shows the log. What it must not know: which library logs, or in which form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from dovetail.core.redaction import MASK, Redactor
from dovetail.core.visible import visible
from dovetail.core.words import counted

LONGEST_TEXT = 20_000
"""Characters of one text that are logged; a handler may log its whole output."""
MOST_VALUES = 1000
"""Values of one list or mapping that are logged."""
BLOCKS = frozenset({"exception", "stack"})
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
            if name in BLOCKS and isinstance(value, str)
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
