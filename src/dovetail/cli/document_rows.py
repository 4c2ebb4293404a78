"""How a document reads: as a row of a table, and the words for its total and how sure it is.

What it must not know: whether it was found a moment ago or is kept in a review.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.cli.text import Line, Piece, clip, plain
from dovetail.core.errors import PermanentError
from dovetail.documents.files import read_file

LONGEST = 36
_LONGEST_WARNING = 200
SURE = 0.8
"""What is below it is worth a look, and is shown so."""
HEAD: Line = [
    (name, "dim") for name in ("DOCUMENT", "TYPE", "VENDOR", "DATE", "TOTAL", "CONFIDENCE", "STATE")
]


def document_row(name: str, found: Mapping[str, Any], state: str) -> Line:
    return [
        (clip(plain(name), LONGEST), "bold"),
        (plain(found.get("type") or "–"), ""),
        (clip(plain(found.get("vendor") or "–"), LONGEST), ""),
        (plain(found.get("date") or "–"), ""),
        (total_words(found), ""),
        sure_piece(found.get("confidence")),
        (state, _STYLES.get(state.partition(",")[0], "")),
    ]


_STYLES = {"approved": "good", "pending": "wait", "failed": "bad"}


def total_words(found: Mapping[str, Any]) -> str:
    total, currency = found.get("total"), found.get("currency")
    if total is None:
        return "–"
    return f"{money(total)} {plain(currency)}" if currency else money(total)


def money(amount: float) -> str:
    """With cents, and with more digits only if there are some."""
    cents = f"{amount:,.2f}"
    return cents if float(cents.replace(",", "")) == amount else f"{amount:,.4f}"


def kept_of(json_path: str) -> dict[str, Any]:
    """What its file says: how sure each field is, and the warnings. The file may be gone."""
    with suppress(OSError, ValueError, PermanentError):
        found = json.loads(read_file(Path(json_path)))
        if isinstance(found, dict):
            return found
    return {}


def warnings_in(kept: Mapping[str, Any]) -> list[str]:
    found = kept.get("warnings")
    return [clip(plain(one), _LONGEST_WARNING) for one in found] if isinstance(found, list) else []


def sure_piece(confidence: float | None) -> Piece:
    if confidence is None:
        return "–", "dim"
    return f"{confidence:.2f}", "" if confidence >= SURE else "wait"
