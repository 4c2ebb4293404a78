"""Chunks of lines as pages: each line once, in order, and a note where lines are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.node_logs import (
    LEVELS,
    LogChunk,
    LogLine,
    StoredChunk,
    decode_lines,
    encode_lines,
    log_page,
    log_text,
)

CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE

LINES = st.builds(
    LogLine,
    st.floats(0, 2e9),
    st.sampled_from([*LEVELS, "TRACE", "info"]),
    st.sampled_from(["stdout", "a.b"]),
    st.sampled_from(["x", "Needle in it", "straße", "NEEDLE", ""]),
    st.none() | st.just({"n": 1}),
)


@st.composite
def stored(draw: st.DrawFn) -> list[StoredChunk]:
    """A log with gaps between its numbers, chunks without lines, and lines that are missing."""
    seq, found = 1, []
    for number in range(draw(st.integers(0, 6))):
        seq += draw(st.integers(0, 3))
        lines = draw(st.lists(LINES, max_size=4))
        node = draw(st.sampled_from(["a", "b", ""]))
        lines = lines if node else []
        missing = draw(st.integers(0, 2)) if node else 5
        chunk = LogChunk("r", node, 1, 1, number, lines, missing_lines=missing, missing_bytes=9)
        found.append(StoredChunk(seq, chunk))
        seq = found[-1].last_seq + 1
    return found


def read(chunks: Sequence[StoredChunk], after: int, count: int) -> list[StoredChunk]:
    """As `Records.logs`, so many chunks at a time."""
    return [one for one in chunks if one.last_seq > after][:count]


@given(
    stored(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.none() | st.sampled_from(LEVELS),
    st.none() | st.just("needle"),
)
def test_pages_of_any_size_have_each_line_once_and_in_order(
    chunks: list[StoredChunk], limit: int, count: int, level: str | None, q: str | None
) -> None:
    whole = log_page(chunks, limit=10**6, level=level, q=q)
    after, found = 0, []
    while some := read(chunks, after, count):
        page = log_page(some, after, limit, level=level, q=q)
        assert page.cursor > after
        assert sum(item["logger"] != "dovetail" for item in page.items) <= limit
        found += page.items
        after = page.cursor
    assert _shown(found) == _shown(whole.items)
    assert after == whole.cursor


def _shown(items: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    # The time of a note is that of the next line of its page.
    return [(item["seq"], item["node"], item["message"]) for item in items]


@given(stored(), st.sampled_from(LEVELS))
def test_a_level_is_that_one_and_above(chunks: list[StoredChunk], level: str) -> None:
    found = log_page(chunks, limit=10**6, level=level).items
    named = [item["level"].upper() for item in found if item["logger"] != "dovetail"]
    severities = [LEVELS.index(name) if name in LEVELS else 1 for name in named]
    assert all(one >= LEVELS.index(level) for one in severities)
    every = log_page(chunks, limit=10**6, level="DEBUG").items
    assert every == log_page(chunks, limit=10**6).items


def test_an_item_has_the_fields_of_the_api() -> None:
    line = LogLine(2.5, "ERROR", "l", "text", {"k": 1})
    page = log_page([StoredChunk(4, LogChunk("r", "n", 2, 3, 0, [line], item=0))])
    assert page.items == [
        {
            "seq": 4,
            "time": 2.5,
            "node": "n",
            "epoch": 2,
            "attempt": 3,
            "item": 0,
            "level": "ERROR",
            "logger": "l",
            "message": "text",
            "fields": {"k": 1},
        }
    ]
    assert page.cursor == 4


def test_a_search_takes_no_notice_of_case() -> None:
    lines = [LogLine(1.0, "INFO", "l", text) for text in ("Straße", "STRASSE", "road")]
    page = log_page([StoredChunk(1, LogChunk("r", "n", 1, 1, 0, lines))], q="strasse")
    assert [item["seq"] for item in page.items] == [1, 2]
    assert page.cursor == 3, "so that the next page does not look at them again"


def test_what_is_missing_is_said_where_it_is_missing() -> None:
    line = LogLine(7.0, "INFO", "l", "after it")
    chunk = LogChunk("r", "n", 1, 1, 5, [line], missing_lines=12_345, missing_bytes=1_234_567)
    note, shown = log_page([StoredChunk(9, chunk)], node_log_bytes=1 << 20).items
    assert note["message"] == (
        "… 12,345 lines (1.2 MB) are missing here: DOVETAIL_NODE_LOG_BYTES is 1048576"
    )
    assert (note["seq"], note["time"], note["level"], note["node"]) == (8, 7.0, "WARNING", "n")
    assert shown["seq"] == 9
    (one, _) = log_page([StoredChunk(9, chunk._replace(missing_lines=1, missing_bytes=1))]).items
    assert one["message"] == "… 1 line (1 byte) is missing here: see DOVETAIL_NODE_LOG_BYTES"
    assert log_page([StoredChunk(9, chunk)], after=9).items == []


@given(st.lists(LINES))
def test_lines_are_encoded_and_decoded(lines: list[LogLine]) -> None:
    assert decode_lines(encode_lines(lines)) == lines


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1 << 70},
        {"t": "half \udc80"},
        {"f": float("nan"), "t": "\udc80"},
        {("a", 1): 1},
        {"o": object(), "t": "\udc80"},
        CIRCLE,
    ],
    ids=["number", "text", "nan", "key", "object", "circle"],
)
def test_a_line_is_written_whatever_its_fields_are(fields: dict[str, Any]) -> None:
    line = LogLine(1.0, "INFO", "l", "half \udc80", fields)
    (found,) = decode_lines(encode_lines([line]))
    assert found[:4] == (1.0, "INFO", "l", "half ?")


def test_a_damaged_chunk_has_no_lines() -> None:
    for text in (b"", b"{", b"7", b"[[1]]", b"[[1,2,3,4]]", b'["abc"]', "\x00"):
        assert decode_lines(text) == []


ITEM: dict[str, Any] = {
    "seq": 1,
    "time": "2026-11-18T08:01:37.924353Z",
    "node": "fetch",
    "epoch": 1,
    "attempt": 2,
    "item": None,
    "level": "INFO",
    "logger": "shop",
    "message": "done",
    "fields": None,
}


def test_a_line_of_text_names_the_node_its_attempt_and_the_item() -> None:
    assert log_text(ITEM) == "2026-11-18T08:01:37.924353Z INFO fetch[2] shop: done"
    assert " fetch[2]#0 shop: " in log_text({**ITEM, "item": 0})
    of_the_run = {**ITEM, "node": None, "epoch": None, "attempt": None}
    assert " INFO - shop: done" in log_text(of_the_run)
    assert log_text({**ITEM, "fields": {"n": "é"}}).endswith(' done {"n": "é"}')


@given(st.text(), st.text(), st.text(), st.text())
def test_a_line_of_text_is_one_line_that_a_terminal_may_see(
    node: str, logger: str, message: str, field: str
) -> None:
    fields = {field: field}
    item = {**ITEM, "node": node, "logger": logger, "message": message, "fields": fields}
    spaces = "\xa0\u1680\u202f\u205f\u3000\u200c\u200d"
    for char in log_text(item):
        assert char.isprintable() or char in spaces or "\u2000" <= char <= "\u200a"
