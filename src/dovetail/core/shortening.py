"""Cuts a JSON value until it fits: for a reader that has little room, such as a model's context."""

from __future__ import annotations

from typing import Any

import orjson

STEPS = ((20_000, 200), (4_000, 50), (1_000, 20), (200, 10), (50, 5))
"""The longest text, and the most entries of a list or a mapping, step by step."""


def shortened(value: Any, max_bytes: int) -> tuple[Any, bool]:
    """The value if its JSON fits, else as much of it as does; and whether it was cut.

    What was cut says how much is missing.
    """
    if _size(value) <= max_bytes:
        return value, False
    for chars, entries in STEPS:
        cut = _cut(value, chars, entries)
        if _size(cut) <= max_bytes:
            return cut, True
    text = orjson.dumps(value).decode()
    # Quotes are escaped when the text is written as JSON again.
    return text[: max_bytes // 4] + "…", True


def _size(value: Any) -> int:
    return len(orjson.dumps(value))


def _cut(value: Any, chars: int, entries: int) -> Any:
    if isinstance(value, str) and len(value) > chars:
        return f"{value[:chars]}… ({len(value) - chars:,} characters more)"
    if isinstance(value, list):
        kept = [_cut(one, chars, entries) for one in value[:entries]]
        more = len(value) - len(kept)
        return [*kept, f"… ({more:,} more)"] if more else kept
    if isinstance(value, dict):
        names = list(value)[:entries]
        found = {_cut(name, chars, entries): _cut(value[name], chars, entries) for name in names}
        more = len(value) - len(names)
        return {**found, "…": f"{more:,} more"} if more else found
    return value
