"""The SQL of the files in this folder, by the names in their comments."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def statements(file: str) -> dict[str, str]:
    """A comment with a name opens a statement; other comments are for people."""
    text = Path(__file__).with_name(file).read_text("utf-8")
    found: dict[str, str] = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        found[name.strip()] = "\n".join(lines).strip()
    return found
