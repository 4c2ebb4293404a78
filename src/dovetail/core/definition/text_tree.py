"""What the YAML and the JSON reader share: the tree they build and the refusals they collect.

The data grows together with the offset of every key and value, so that any later problem can
be shown where it stands. Nothing recurses. What it must not know: either syntax.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from dovetail.core.findings import Path, shown
from dovetail.core.values import is_json

# A scalar's offset, or a container's offset with the marks of what is in it.
Mark = Any  # int | tuple[int, list[Mark]] | tuple[int, dict[str, tuple[int, Mark]]]

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

    __slots__ = (
        "_at",
        "_key",
        "_key_at",
        "_marks",
        "_max_depth",
        "_open",
        "_stack",
        "data",
        "mark",
        "refusals",
    )

    def __init__(self, max_depth: int) -> None:
        self.data: Any = None
        self.mark: Mark = 0
        self.refusals: list[Refusal] = []
        self._max_depth = max_depth
        self._open: dict[str | None, Any] | list[Any] | None = None
        """The innermost open container, its marks, its offset, and the key that awaits a value."""
        self._marks: Any = None
        self._at = 0
        self._key: str | None = None
        self._key_at = 0
        self._stack: list[tuple[Any, Any, int, str | None, int]] = []

    @property
    def expects_key(self) -> bool:
        return self._key is None and type(self._open) is dict

    def key(self, name: str, at: int) -> None:
        self._key, self._key_at = name, at
        if name in self._marks:
            self.refuse(f"key {shown(name)} appears twice in one mapping; keep one of them", at)
        self.check_text(name, at)

    def value(self, value: Any, at: Mark) -> None:
        container = self._open
        if type(container) is list:
            container.append(value)
            self._marks.append(at)
        elif type(container) is dict:
            container[self._key] = value
            self._marks[self._key] = (self._key_at, at)
            self._key = None
        else:
            self.data, self.mark = value, at

    def check_text(self, text: str, at: int) -> None:
        """Escapes can spell what the text itself may not contain."""
        if "\0" in text:
            self.refuse("a NUL character cannot be stored", at)
        if not text.isascii() and not is_json(text):
            self.refuse("a lone surrogate is no valid text", at)

    def open(self, container: dict[str | None, Any] | list[Any], at: int) -> None:
        if len(self._stack) >= self._max_depth:
            self.fail(f"nested deeper than {self._max_depth} levels", at, code="too_large")
        self._stack.append((self._open, self._marks, self._at, self._key, self._key_at))
        self._open, self._marks, self._at = container, type(container)(), at
        self._key = None

    def close(self) -> None:
        closed, mark = self._open, (self._at, self._marks)
        self._open, self._marks, self._at, self._key, self._key_at = self._stack.pop()
        self.value(closed, mark)

    @property
    def path(self) -> Path:
        """Of the value that comes next."""
        steps: list[str | int] = []
        for container, _, _, key, _ in [*self._stack[1:], (self._open, 0, 0, self._key, 0)]:
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
