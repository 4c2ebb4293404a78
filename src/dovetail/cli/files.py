"""Definitions and params as files: found, read within bounds, and parsed.

A path may name anything, a directory or an endless device too; each is told in one line. What
it must not know: what a workflow is.
"""

from __future__ import annotations

import codecs
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from dovetail.cli.failures import InvalidInput
from dovetail.cli.text import plain
from dovetail.core.definition.source import Source, read_text
from dovetail.core.definition.validation import Limits
from dovetail.core.errors import InvalidDefinition, Problem

STDIN = "-"
_SEEN_NEIGHBOURS = 1000
# What YAML calls a line break, and so what positions are counted by.
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


class File:
    """One file as it was named, with its content."""

    def __init__(self, path: str, limits: Limits) -> None:
        """Raises `InvalidInput` if it cannot be read at all."""
        self.name = "<stdin>" if path == STDIN else plain(path)
        self._limits = limits
        self._suffix = "" if path == STDIN else Path(path).suffix.lower()
        self._content = _read(path, limits.max_body_bytes + 1)
        self._lines: list[str] | None = None

    def parse(self) -> Source:
        """Raises `InvalidDefinition` with every problem of the text."""
        most = self._limits.max_body_bytes
        if len(self._content) > most:
            message = f"the file has more than {most:,} bytes, which is all that is allowed"
            raise InvalidDefinition([Problem("too_large", message, "", 1, 1)])
        if self._suffix == ".json":
            return self._parse_as("json")
        begins = self._content.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if self._suffix not in (".yaml", ".yml") and begins == b"{":
            # JSON may be indented with tabs, which YAML refuses.
            try:
                return self._parse_as("json")
            except InvalidDefinition:
                pass
        return self._parse_as("yaml")

    def line(self, number: int) -> str:
        """One line of it, counted as positions are; empty if there is none."""
        if self._lines is None:
            text = self._content.decode(errors="replace").removeprefix("\ufeff")
            self._lines = _LINE_BREAK.split(text)
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""

    def _parse_as(self, form: str) -> Source:
        return read_text(
            self._content,
            format="json" if form == "json" else "yaml",
            name=self.name,
            max_bytes=self._limits.max_body_bytes,
            max_depth=self._limits.max_depth,
        )


def _read(path: str, most: int) -> bytes:
    if path == STDIN:
        try:
            return sys.stdin.buffer.read(most)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None
    with opened(path) as stream:
        return stream.read(most)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The file to read from. Whatever goes wrong with it is `InvalidInput`."""
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            raise InvalidInput(f"{path} is a directory; name a file in it")
        with Path(path).open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}{_did_you_mean(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(f"{path} cannot be read: {why or error}") from None


def _did_you_mean(path: str) -> str:
    """A neighbour with nearly that name: flow.yml for flow.yaml."""
    try:
        neighbours = islice(Path(path).parent.iterdir(), _SEEN_NEIGHBOURS)
        names = [found.name for found in neighbours if found.is_file()]
    except OSError:
        return ""
    near = get_close_matches(Path(path).name, names, n=1, cutoff=0.75)
    return f"; did you mean {Path(path).with_name(near[0])}?" if near else ""
