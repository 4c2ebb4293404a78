"""Writes plain data as YAML for people. `source.read_text` reads exactly the same data back.

PyYAML's own writer follows YAML 1.1, in which `1e5` is text; our reader takes it for a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_LINE = 100
"""A list of scalars stays on one line up to this length."""
MAX_SIMPLE_KEY = 1000
"""YAML takes no longer key before a colon, only after a question mark."""

# A text that no reader of YAML, old or new, takes for anything else.
_PLAIN = re.compile(r"[A-Za-z_/$](?:[A-Za-z0-9_./@$ -]*[A-Za-z0-9_./@$-])?\Z")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off"})
_ESCAPED = re.compile(r'["\\]|[^\x20-\x7e]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def yaml_text(value: Any, *, ascii_only: bool = False) -> str:
    """`ascii_only`: every other character as an escape, which no terminal acts on."""
    return "".join(f"{line}\n" for line in _Writer(ascii_only).lines(value, ""))


class _Writer:
    def __init__(self, ascii_only: bool) -> None:
        self._ascii_only = ascii_only

    def lines(self, value: Any, indent: str) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for key, below in value.items():
                name = self._scalar(key)
                if len(name) > MAX_SIMPLE_KEY:
                    yield f"{indent}? {name}"
                    name = ""
                yield from self._member(f"{indent}{name}:", below, indent)
        elif isinstance(value, list) and value:
            for below in value:
                yield from self._item(below, indent)
        else:
            yield indent + self._short(value)

    def _member(self, head: str, value: Any, indent: str) -> Iterator[str]:
        deeper = f"{indent}  "
        if isinstance(value, str) and self._is_block(value):
            yield f"{head} {'|' if value.endswith(chr(10)) else '|-'}"
            for line in value.removesuffix("\n").split("\n"):
                yield f"{deeper}{line}" if line else ""
        elif (short := self._on_one_line(value, len(head))) is not None:
            yield f"{head} {short}"
        else:
            yield head
            yield from self.lines(value, deeper)

    def _item(self, value: Any, indent: str) -> Iterator[str]:
        if isinstance(value, str) and self._is_block(value):
            yield from self._member(f"{indent}-", value, indent)
            return
        if (short := self._on_one_line(value, len(indent) + 1)) is not None:
            yield f"{indent}- {short}"
            return
        inside = self.lines(value, f"{indent}  ")
        yield f"{indent}- {next(inside).lstrip(' ')}"
        yield from inside

    def _on_one_line(self, value: Any, column: int) -> str | None:
        """Scalars, what is empty, and short lists of scalars."""
        if not value or not isinstance(value, dict | list):
            return self._short(value)
        if isinstance(value, dict) or any(isinstance(one, dict | list) for one in value):
            return None
        listed = f"[{', '.join(map(self._scalar, value))}]"
        return listed if column + len(listed) < MAX_LINE else None

    def _short(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{}"
        return "[]" if isinstance(value, list) else self._scalar(value)

    def _scalar(self, value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if not isinstance(value, str):
            return repr(value)
        if _PLAIN.match(value) and value.lower() not in _WORDS:
            return value
        return f'"{_ESCAPED.sub(self._escaped, value)}"'

    def _escaped(self, found: re.Match[str]) -> str:
        character = found[0]
        if character in _ESCAPES:
            return _ESCAPES[character]
        if self._may_stand(character):
            return character
        code = ord(character)
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    def _may_stand(self, text: str) -> bool:
        return text.isprintable() and (text.isascii() or not self._ascii_only)

    def _is_block(self, text: str) -> bool:
        """Whether a text of several lines can stand as it is, below a `|`."""
        return (
            "\n" in text
            and text[0] not in " \n"
            and not text.endswith("\n\n")
            and self._may_stand(text.replace("\n", ""))
        )
