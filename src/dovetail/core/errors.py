"""The errors that users meet, and the problems that a validation reports.

An error says what is wrong, where, and what would have worked. Its `type` is the stable word in
API answers, events and run records. A check reports a `Finding` with a path of keys and indices;
the validation turns it into a `Problem` with a line and a column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dovetail.core.text import visible


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of a validation. `line` and `column` count from 1, where a text is known."""

    code: str
    message: str
    path: str
    line: int | None = None
    column: int | None = None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"code": self.code, "message": self.message, "path": self.path}
        if self.line is not None:
            found["line"] = self.line
            found["column"] = self.column
        return found


class DovetailError(Exception):
    """The base of all errors that Dovetail raises on purpose."""

    type = "error"


class InvalidDefinition(DovetailError):
    """A definition with all problems that were found in it."""

    type = "invalid_definition"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.path or '.'}: {p.message}" for p in self.problems))


class InvalidParams(InvalidDefinition):
    """Params that violate the workflow's schema."""

    type = "invalid_params"


class Conflict(DovetailError):
    """The state of the run forbids the request."""

    type = "conflict"


class Changed(DovetailError):
    """The resource has changed since the caller read it."""

    type = "precondition_failed"


class Expired(DovetailError):
    """A position in the feed of all runs that events after it may be missing for by now."""

    type = "expired"


class NotFound(DovetailError):
    """No run, node or workflow of that name."""

    type = "not_found"


class StoreError(DovetailError):
    """The store cannot be used; nothing that was acknowledged is lost."""

    type = "store_error"
    reason = ""
    """A few words for any caller, without a file, an address or a user."""


class BrokenRun(StoreError):
    """The store cannot make sense of one run's data, or of a request about it. Other runs go
    on."""

    type = "run_damaged"


class BrokenRecord(StoreError):
    """One record beside the runs (a workflow, a batch, a key) cannot be read. Others can."""

    type = "record_damaged"


class StoreLost(StoreError):
    """The file was deleted or replaced while this process had it open. Anything written now would
    be lost, so nothing is accepted any more."""

    type = "store_lost"
    reason = "the file that runs are kept in was deleted or replaced; this process stops"


class ArchiveDown(StoreError):
    """The archive database cannot be reached. Runs go on; new ones are not accepted."""

    type = "archive_down"


class TemplateError(DovetailError):
    """A template that could not be rendered. The node fails without a retry."""

    type = "template_error"


class MissingValue(TemplateError):
    """A template read something that is not there."""

    type = "missing_value"


class TemplateForbidden(TemplateError):
    """A template that does more with a secret than name it."""

    type = "template_forbidden"


class TooLarge(TemplateError):
    """A value grew past its limit."""

    type = "too_large"


class SecretInKey(DovetailError):
    """An output with a secret in the key of an object: keys are never rewritten."""

    type = "secret_in_key"


class PermanentError(DovetailError):
    """Raised by a handler: trying again would not help."""

    def __init__(self, message: str = "", *, type: str = "PermanentError") -> None:  # noqa: A002
        super().__init__(message)
        self.type = type
        self.details: dict[str, Any] = {}
        """`where` and `traceback` of the error that it replaces, if there is one."""


class RetryableError(DovetailError):
    """Raised by a handler: try again.

    `after` sets the delay in seconds. `at_least` only lengthens the usual backoff: it is what
    a called service asked for with `Retry-After`, and it slows the node's whole resource tag.
    """

    def __init__(
        self,
        message: str = "",
        *,
        after: float | None = None,
        at_least: float | None = None,
        type: str = "RetryableError",  # noqa: A002
    ) -> None:
        super().__init__(message)
        self.after = after
        self.at_least = at_least
        self.type = type


Path = tuple[str | int, ...]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `on_key`: the key itself is wrong, not its value."""

    code: str
    message: str
    path: Path = ()
    on_key: bool = False


def format_path(path: Path) -> str:
    """`nodes[2].config.headers["a b"]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _IDENTIFIER.match(step) and len(step) <= _MAX_SHOWN_CHARS:
            text += f".{step}" if text else step
        else:
            text += f'["{one_line(step)}"]'
    return text


def one_line(text: str, longest: int = _MAX_SHOWN_CHARS) -> str:
    """A text cut short, with line breaks and control characters escaped."""
    cut = visible(text[: longest + 1])
    return cut if len(cut) <= longest else cut[: longest - 1] + "…"


def shown(value: Any) -> str:
    """A value as an error message quotes it: short and on one line."""
    if isinstance(value, str):
        return f"'{one_line(value)}'"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        # Python refuses to turn a very long integer into text.
        wide = isinstance(value, int) and value.bit_length() > 256
        return "a very large integer" if wide else one_line(str(value))
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"a Python {type(value).__name__}"


class Suggester:
    """Finds the name that was probably meant, within a budget.

    difflib takes about 20 µs per comparison. So it compares only the candidates that share the
    most letter pairs with the wrong name, and of many wrong names only the first get a suggestion:
    a definition with 10,000 wrong names must not cost minutes.
    """

    _COST_OF_ONE = 50

    def __init__(self, budget: int = 20_000) -> None:
        self._budget = budget

    def did_you_mean(self, wrong: str, candidates: Collection[str]) -> str:
        """`"; did you mean 'fetch'?"`, or an empty text."""
        found = self._closest(wrong, candidates)
        return f"; did you mean {shown(found)}?" if found else ""

    def _closest(self, wrong: str, candidates: Collection[str]) -> str | None:
        if self._budget < 0:
            return None
        self._budget -= len(candidates) + self._COST_OF_ONE
        if self._budget < 0 or len(wrong) > _MAX_SHOWN_CHARS:
            return None
        by_lower = {name.lower(): name for name in candidates if len(name) <= _MAX_SHOWN_CHARS}
        low = wrong.lower()
        if low in by_lower:
            return by_lower[low]
        likely = list(by_lower)
        if len(likely) > self._COST_OF_ONE:
            pairs = _pairs(low)
            likely.sort(key=lambda name: len(pairs & _pairs(name)), reverse=True)
            del likely[self._COST_OF_ONE :]
        close = get_close_matches(low, likely, n=1)
        return by_lower[close[0]] if close else None


def _pairs(name: str) -> set[str]:
    """Its letter pairs, its ends included."""
    framed = f"^{name}$"
    return {framed[at : at + 2] for at in range(len(framed) - 1)}
