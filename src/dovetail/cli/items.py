"""The items of a batch: a file with one JSON object per line, read twice, never held whole.

The first reading checks every line, so that nothing is made of a file with a slip in it; the
second gives the params one by one. What it must not know: what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.cli.failures import InvalidInput
from dovetail.cli.files import STDIN, opened
from dovetail.cli.text import plain
from dovetail.core.definition.params import check_params
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import Limits
from dovetail.core.errors import InvalidDefinition, InvalidParams

MOST_PROBLEMS = 20
"""So many bad lines are told; the others are counted."""
_MARK = b"\xef\xbb\xbf"  # that some editors put at the start of a file
_LONGEST_SHOWN = 60


class Item(NamedTuple):
    place: int
    """In the batch: empty lines do not count."""
    line: int
    params: dict[str, Any]


@dataclass
class Survey:
    """What the first reading found."""

    count: int = 0
    digest: str = ""
    problems: list[str] = field(default_factory=list)
    """The first ones, as `items.jsonl:3: …`."""
    bad_lines: int = 0
    warnings: list[str] = field(default_factory=list)
    """The first ones, in the same form."""
    more_warnings: int = 0


class Items:
    def __init__(self, path: str, schema: Mapping[str, Any] | None, limits: Limits) -> None:
        """The limits are those of a line. Raises `InvalidInput` if it cannot be read twice."""
        if path == STDIN:
            raise InvalidInput("items are read twice, so not from stdin; save them to a file first")
        self.name = plain(path)
        self._path = path
        self._schema = schema
        self._limits = limits
        # Before it is opened: opening a pipe waits for whoever writes to it.
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise InvalidInput(f"{path} is no regular file; items are read twice")
        with opened(path):
            pass  # it is there, and may be read

    def survey(self, on_line: Callable[[int], None] = lambda line: None) -> Survey:
        """Check every line; `on_line` hears of each."""
        found = Survey()
        digest = sha256()
        for number, raw in self._lines():
            on_line(number)
            digest.update(raw)
            if not raw.strip():
                continue
            found.count += 1
            problems, warnings = self._problems(raw)
            room = MOST_PROBLEMS - len(found.warnings)
            found.warnings += [f"{self.name}:{number}: {w}" for w in warnings[:room]]
            found.more_warnings += max(0, len(warnings) - room)
            if problems:
                found.bad_lines += 1
                room = MOST_PROBLEMS - len(found.problems)
                found.problems += [f"{self.name}:{number}: {p}" for p in problems[:room]]
        found.digest = digest.hexdigest()
        return found

    def __iter__(self) -> Iterator[Item]:
        """Raises `InvalidInput` where the file is not what was surveyed any more."""
        place = 0
        for number, raw in self._lines():
            if not raw.strip():
                continue
            try:
                params = self._data(raw)
            except InvalidDefinition:
                params = None
            if not isinstance(params, dict):
                raise InvalidInput(f"{self.name}:{number}: was changed while the batch ran")
            yield Item(place, number, params)
            place += 1

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        most = self._limits.max_body_bytes
        with opened(self._path) as stream:
            number = 0
            # With a bound: a file without a line break must not be read into memory.
            while raw := stream.readline(most + 1):
                number += 1
                if len(raw) > most:
                    raise InvalidInput(
                        f"{self.name}:{number}: has more than {most:,} bytes, "
                        "which is all that is allowed in a line"
                    )
                yield number, raw.removeprefix(_MARK) if number == 1 else raw

    def _data(self, raw: bytes) -> Any:
        """As strictly as params are read from a file, or by a server from a request."""
        most, depth = self._limits.max_body_bytes, self._limits.max_depth
        return read_text(raw, format="json", max_bytes=most, max_depth=depth).data

    def _problems(self, raw: bytes) -> tuple[list[str], list[str]]:
        """And warnings."""
        try:
            params = self._data(raw)
        except InvalidDefinition as error:
            return [f"{problem.message}: {_shown(raw)}" for problem in error.problems], []
        if not isinstance(params, dict):
            wrong = f'an item is an object with params, as in {{"topic": 1}}, not {_shown(raw)}'
            return [wrong], []
        try:
            _, warnings = check_params(self._schema, params)
        except InvalidParams as error:
            return [f"{problem.path}: {problem.message}" for problem in error.problems], []
        return [], [f"{problem.path}: {problem.message}" for problem in warnings]


def _shown(raw: bytes) -> str:
    text = plain(raw.decode(errors="replace"))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
