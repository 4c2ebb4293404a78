"""Every error a user can meet, and the `Problem` a validation reports.

An error says what, where and what would have worked; its `type` is the stable word that
API answers, events and run records carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
    """The root of everything Dovetail raises on purpose."""

    type = "error"


class InvalidDefinition(DovetailError):
    """A definition with every problem found in it."""

    type = "invalid_definition"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.path or '.'}: {p.message}" for p in self.problems))


class InvalidParams(InvalidDefinition):
    """Params that violate the workflow's schema."""

    type = "invalid_params"


class Conflict(DovetailError):
    """The run's state forbids what was asked."""

    type = "conflict"


class Changed(DovetailError):
    """It is no longer as whoever asked has seen it."""

    type = "precondition_failed"


class NotFound(DovetailError):
    """No run, node or workflow of that name."""

    type = "not_found"


class StoreError(DovetailError):
    """What runs are kept in cannot be used; nothing that was acknowledged is lost."""

    type = "store_error"
    reason = ""
    """The same for anybody: a few words, without a file, an address or a user."""


class BrokenRun(StoreError):
    """What the store has of one run, or is asked to do with it, makes no sense to it. All others
    go on."""

    type = "run_damaged"


class BrokenRecord(StoreError):
    """One record beside the runs (a workflow, a batch, a key) cannot be read. All others can."""

    type = "record_damaged"


class StoreLost(StoreError):
    """The file was deleted or replaced while this process had it open. Whatever is written now
    is lost, so nothing is accepted any more."""

    type = "store_lost"
    reason = "the file that runs are kept in was deleted or replaced; this process stops"


class ArchiveDown(StoreError):
    """The database that keeps runs for good is away. Runs go on; new ones are not accepted."""

    type = "archive_down"


class TemplateError(DovetailError):
    """A template that could not be rendered. The node fails without a retry."""

    type = "template_error"


class MissingValue(TemplateError):
    """A template read something that is not there."""

    type = "missing_value"


class TemplateForbidden(TemplateError):
    """A template that no definition may have, as it does more with a secret than name it."""

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
