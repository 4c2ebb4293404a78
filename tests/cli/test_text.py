"""Text for people: what is taken out of it, how wide it is, how long it took."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail
from dovetail.cli.text import (
    JOINERS,
    Line,
    age,
    ago,
    bare,
    cells,
    clip,
    countdown,
    counted,
    duration,
    plain,
    plain_lines,
    printable,
    table,
)
from dovetail.documents.commands.reviews import HEAD, document_row


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("fine [bold]text[/bold]", "fine [bold]text[/bold]"),
        ("\x1b[1;31mred\x1b[0m", r"\x1b[1;31mred\x1b[0m"),
        ("\x1b]8;;http://evil\x07link", r"\x1b]8;;http://evil\x07link"),
        ("\x9b31mred \x9d0;title\x9c", r"\x9b31mred \x9d0;title\x9c"),
        ("a\r\nb\tc\x00\x7f\u202ed\u200b", r"a b c\x00\x7f\u202ed\u200b"),
        ("good\rbad", r"good\rbad"),
        ("1\u00a0234\u3000x", "1 234 x"),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
        ("\ud800", r"\ud800"),
    ],
)
def test_terminal_control_characters_are_escaped(text: str, left: str) -> None:
    assert plain(text) == left


@given(st.text())
def test_no_control_character_passes_and_no_character_is_lost(text: str) -> None:
    shown = plain(text)
    assert all(char.isprintable() or char in JOINERS for char in shown)
    assert all(char.isprintable() or char in JOINERS for char in "".join(plain_lines(text)))
    for char in text:
        if not char.isspace():
            assert char in shown or char.encode("unicode_escape").decode() in shown


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists))
def test_printable_json_text_keeps_its_value(value: object) -> None:
    shown = printable(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(shown) == value
    assert all(line.isprintable() for line in shown.split("\n"))


@given(st.text(), st.integers(2, 40))
def test_a_clipped_text_fits(text: str, width: int) -> None:
    clipped = clip(plain(text), width)
    assert cells(clipped) <= width
    assert clipped == plain(text) or clipped.endswith("…")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0.0s"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (125, "2m 05s"),
        (3599.9, "1h 00m"),
        (7380, "2h 03m"),
    ],
)
def test_a_duration_is_short_and_precise(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_countdown_never_shows_zero_before_its_end() -> None:
    assert [countdown(left) for left in (12.4, 1.2, 0.1, 0.0, -3.0)] == [
        *("12s", "2s", "1s", "0s", "0s")
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "just now"),
        (0.4, "just now"),
        (1, "1 s ago"),
        (89, "89 s ago"),
        (200, "3 min ago"),
        (5399, "89 min ago"),
        (2.5 * 3600, "2 h ago"),
        (47.9 * 3600, "47 h ago"),
        (3 * 86400, "3 days ago"),
    ],
)
def test_an_age_is_shown_in_its_largest_useful_unit(seconds: float, said: str) -> None:
    assert ago(seconds) == said


def test_the_age_of_a_timestamp_is_counted_from_now() -> None:
    assert age("1970-01-01T00:01:00.000000Z", 60 + 180) == "3 min ago"


def test_a_table_pads_every_column_but_the_last_to_its_widest() -> None:
    rows = [
        [("RUN", "dim"), ("STATUS", "dim"), ("", "")],
        [("0190f3", "bold"), ("語", ""), ("a note", "")],
    ]
    assert [bare(line) for line in table(rows)] == [
        "RUN     STATUS",
        "0190f3  語      a note",
    ]
    assert list(table([])) == []


# ── tables ───────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.lists(st.text(max_size=60), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(30, 120),
)
def test_a_table_fits_the_terminal_and_no_cell_leaves_its_column(
    given: list[list[str]], width: int
) -> None:
    rows: list[Line] = [[(plain(cell), "") for cell in row] for row in given]
    lines = list(table(rows, width))
    whole = list(table(rows))
    for line, wide, row in zip(lines, whole, rows, strict=True):
        assert cells(bare(line)) <= width
        if max(cells(bare(one)) for one in whole) <= width:
            assert bare(line) == bare(wide), "nothing is cut that fits"
        for (shown, _), (cell, _) in zip(line, row, strict=True):
            assert shown.rstrip() == cell.rstrip() or shown.rstrip().endswith("…")
    starts = {tuple(cells(text) for text, _ in line[:-1]) for line in lines}
    assert len(starts) == 1, "columns stand below each other"


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_of_documents_fits(width: int) -> None:
    found = {
        "type": "invoice",
        "vendor": "Northwind Traders International GmbH & Co. KG",
        "date": "2026-11-18",
        "total": 1234567.89,
        "currency": "EUR",
        "confidence": 0.93,
    }
    row = document_row("a-rather-long-name-of-a-scanned-document.pdf", found, "pending")
    head, line = table([[(name, "dim") for name in HEAD], row], width)
    assert cells(bare(line)) <= width
    assert "CONFIDENCE" in bare(head)
    for kept in ("2026-11-18", "0.93", "pending"):
        assert kept in bare(line)


# ── numbers ──────────────────────────────────────────────────────────────────────────────

NOUNS = (
    *("runs", "tasks", "nodes", "items", "messages", "workers", "documents", "handlers", "events"),
    *("processes", "reviews", "versions", "retries", "attempts", "errors", "files", "warnings"),
)
NEVER_ONE = {
    # Above a bound of thousands, or of one that is distinct beside it.
    "{len(items):,} items; a batch has",
    "{len(self._listed):,} nodes; at most",
    "{len(cycle.members):,} nodes wait for each other",
    "{self.docs_per_hour:,.0f} documents an hour",
    "{active} runs",
    "{crashes} attempts",
    "{MAX_READINGS} processes",
    "{subject} runs and",
    "{documents:,} documents",
    "{count:,} messages wait",
    "{count} items; at most",
    "{len(value):,} items; at most",
    "{items.total} items failed",  # "1 of 1 items"
}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("noun", NOUNS)
def test_a_count_of_one_is_singular(number: int, noun: str) -> None:
    one = {"processes": "process", "retries": "retry"}.get(noun, noun[:-1])
    assert counted(number, one, noun) == f"{number} {one if number == 1 else noun}"


def test_every_sentence_with_a_count_handles_the_singular() -> None:
    """Every text in the source that has a number before a plural asks `counted` for it."""
    number = r"(?:\{[^{}]*\}|%d)"
    pattern = re.compile(rf"{number} (?:{'|'.join(NOUNS)})\b[^\"'\n]{{0,30}}")
    source = Path(dovetail.__file__).parent
    found = [
        f"{path.relative_to(source)}: {hit[0]}"
        for path in sorted(source.rglob("*.py"))
        for hit in pattern.finditer(path.read_text())
        if not any(hit[0].startswith(allowed) for allowed in NEVER_ONE)
    ]
    assert found == []
