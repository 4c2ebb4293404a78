"""What the YAML and the JSON reader share: the tree they build and the refusals they collect.

Nothing recurses. What it must not know: either syntax.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from dovetail.core.findings import Path, shown
from dovetail.core.values import is_json

MOST_REFUSALS = 100
MOST_VALUES = 200_000
"""100,000 edges between 10,000 nodes are 190,000; a text of 1 MiB can hold 650,000."""


class Refusal(NamedTuple):
    code: str
    message: str
    path: Path
    offset: int


class Refused(Exception):
    """The reader cannot go on; the reasons are in `TextTree.refusals`."""


class TextTree:
    """Takes keys, values and brackets in the order of the text."""

    __slots__ = ("_max_depth", "_stack", "data", "innermost", "key", "refusals")

    def __init__(self, max_depth: int) -> None:
        self.data: Any = None
        self.refusals: list[Refusal] = []
        self.innermost: dict[str | None, Any] | list[Any] | None = None
        """The container that is open, and the key in it that awaits its value."""
        self.key: str | None = None
        self._max_depth = max_depth
        self._stack: list[tuple[Any, str | None]] = []

    @property
    def expects_key(self) -> bool:
        return self.key is None and type(self.innermost) is dict

    def name(self, key: str, at: int) -> None:
        """The key of the value that comes next."""
        known = self.innermost
        self.key = key
        if known and key in known:
            self.refuse_twice(key, at)

    def value(self, value: Any) -> None:
        container = self.innermost
        if type(container) is list:
            container.append(value)
        elif type(container) is dict:
            container[self.key] = value
            self.key = None
        else:
            self.data = value

    def refuse_twice(self, key: str, at: int) -> None:
        self.refuse(f"key {shown(key)} appears twice in one mapping; keep one of them", at)

    def check_text(self, text: str, at: int) -> None:
        """Escapes can spell what the text itself may not contain."""
        if "\0" in text:
            self.refuse("a NUL character cannot be stored", at)
        if not text.isascii() and not is_json(text):
            self.refuse("a lone surrogate is no valid text", at)

    def open(self, container: dict[str | None, Any] | list[Any], at: int) -> None:
        if len(self._stack) >= self._max_depth:
            self.fail(f"nested deeper than {self._max_depth} levels", at, code="too_large")
        self._stack.append((self.innermost, self.key))
        self.innermost, self.key = container, None

    def close(self) -> None:
        closed = self.innermost
        self.innermost, self.key = self._stack.pop()
        self.value(closed)

    @property
    def path(self) -> Path:
        """Of the value that comes next."""
        steps: list[str | int] = []
        for container, key in [*self._stack[1:], (self.innermost, self.key)]:
            if type(container) is list:
                steps.append(len(container))
            elif key is not None:
                steps.append(key)
        return tuple(steps)

    def refuse(self, message: str, at: int, *, code: str = "invalid_field") -> None:
        """Note it and read on, so that every such problem is reported at once."""
        self.refusals.append(Refusal(code, message, self.path, at))
        if len(self.refusals) >= MOST_REFUSALS:
            raise Refused

    def fail(self, message: str, at: int, *, code: str = "invalid_field") -> NoReturn:
        """Note it and stop: what follows could not be understood."""
        self.refusals.append(Refusal(code, message, self.path, at))
        raise Refused
