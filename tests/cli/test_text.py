"""Text for people: what is taken out of it, how wide it is, how long it took."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.text import (
    JOINERS,
    age,
    ago,
    bare,
    cells,
    clip,
    countdown,
    duration,
    plain,
    plain_lines,
    printable,
    table,
)


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
def test_what_could_steer_a_terminal_is_spelled_out(text: str, left: str) -> None:
    assert plain(text) == left


@given(st.text())
def test_nothing_that_steers_ever_passes_and_nothing_is_taken_out(text: str) -> None:
    shown = plain(text)
    assert all(char.isprintable() or char in JOINERS for char in shown)
    assert all(char.isprintable() or char in JOINERS for char in "".join(plain_lines(text)))
    for char in text:
        if not char.isspace():
            assert char in shown or char.encode("unicode_escape").decode() in shown


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists))
def test_a_printable_json_text_means_the_same(value: object) -> None:
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
def test_a_duration_is_as_exact_as_it_is_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_countdown_never_says_zero_before_it_is_over() -> None:
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
def test_an_age_is_told_in_the_unit_that_says_most(seconds: float, said: str) -> None:
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
