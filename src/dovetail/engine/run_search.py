"""Which runs a search keeps: by words, and by the time of their creation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import inf
from typing import Any

from dovetail.core.errors import InvalidParams, Problem, shown
from dovetail.engine.ports import RunQuery

ORDER_SLACK_SECONDS = 300.0
"""A run that is listed after another may be so much newer: the clocks of its makers differ."""
_RFC_3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+ -]\d\d:\d\d)", re.ASCII
)
"""With a space also where the offset has its plus: that is what a `+` in a query means."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d{1,4})?", re.ASCII)


class RunSearch:
    """Raises `InvalidParams` for a time that is none."""

    def __init__(self, query: RunQuery) -> None:
        self._word = None if query.q is None else query.q.casefold()
        self._number = _number(query.q)
        self._after = _seconds("created_after", query.created_after, -inf)
        self._before = _seconds("created_before", query.created_before, inf)

    @property
    def keeps_all(self) -> bool:
        return self._word is None and self._after == -inf and self._before == inf

    def keeps(self, run: Mapping[str, Any]) -> bool:
        if not self._after < _created_at(run) < self._before:
            return False
        word = self._word
        if word is None or word in run["workflow"].casefold() or run["run_id"].startswith(word):
            return True
        return _is_among(word, self._number, run["params"])

    def is_past(self, run: Mapping[str, Any]) -> bool:
        """Whether this run and all that follow it in a list are too old."""
        return _created_at(run) < self._after - ORDER_SLACK_SECONDS


def _created_at(run: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(run["created_at"]).timestamp()


def _seconds(name: str, given: str | None, default: float) -> float:
    if given is None:
        return default
    try:
        if _RFC_3339.fullmatch(given):
            return datetime.fromisoformat(given.upper().replace(" ", "+")).timestamp()
    except (ValueError, OverflowError):
        pass
    message = f"{shown(given)} is no time of RFC 3339, such as 2026-11-18T08:00:00Z"
    raise InvalidParams([Problem("invalid_field", message, name)])


def _number(text: str | None) -> Decimal | None:
    return Decimal(text) if text and _NUMBER.fullmatch(text) else None


def _is_among(word: str, number: Decimal | None, params: Any) -> bool:
    """Whether a value, however deep, is this text or number."""
    todo = [params]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, str):
            if value.casefold() == word:
                return True
        elif (
            number is not None
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and number == Decimal(str(value))
        ):
            return True
    return False
