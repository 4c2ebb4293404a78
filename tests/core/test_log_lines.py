"""What may stand in a log: nothing that looks like another record, steers a terminal or tells."""

from __future__ import annotations

import base64
import traceback
from typing import Any

import pytest

from dovetail.telemetry.logs import MARGIN, MAX_TEXT_CHARS, LogLines

from .pace import seconds_of

SECRET = "hunter2-token"
LINES = LogLines({"A": SECRET, "token": "full-token"})

INJECTIONS = [
    "x\n2026-11-16 INFO dovetail: all is well",
    "x\r\n{\"level\":\"info\"}",
    "x\rhidden",
    "x\x0bvertical",
    "x\x0cform",
    "x\x1c\x1d\x1e",
    "x\x85next line",
    "x\u2028line\u2029paragraph",
    "\x1b[2J\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m",
    "\x08\x08\x08over",
    "\x00nul",
    "\x7fdel",
    "\u202edesrever\u202c",
    "\u2066isolate\u2069",
    "\u200bzero\u200dwidth\ufeff",
    "\ud800 lone",
    "\U000e0041tag",
]  # fmt: skip


def written(**record: Any) -> dict[str, Any]:
    return dict(LINES(None, "info", record))


@pytest.mark.parametrize("text", INJECTIONS, ids=ascii)
def test_one_text_is_one_line_that_steers_nothing(text: str) -> None:
    found = written(event=text, extra={text: [text, {"k": (text,)}]}, **{text: 1})
    for shown in (found["event"], *found["extra"], *found["extra"].values(), *found):
        assert repr_is_plain(shown), shown
    assert found["event"].encode("ascii", "strict")  # nothing is lost: it is spelled out
    assert len(found["event"]) > len(text)


def repr_is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(repr_is_plain, value))
    if isinstance(value, dict):
        return all(map(repr_is_plain, [*value, *value.values()]))
    return value.isprintable() and len(value.splitlines()) <= 1


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    for text in ("fetch: 12 pages", "größer als 3 €", "日本語", "𝕤 ✓", "a\\nb"):
        assert written(event=text) == {"event": text}


def test_secrets_are_in_no_value_and_no_key() -> None:
    basic = base64.b64encode(f"user:{SECRET}".encode()).decode()
    found = written(
        event=f"Authorization: Basic {basic}",
        exception=f"ValueError: {SECRET}",
        detail={SECRET: [SECRET, ValueError(SECRET)]},
        token="full-token",
    )
    assert SECRET not in repr(found)
    assert basic[8:20] not in repr(found)
    assert found["token"] == "***"
    assert found["detail"] == {"***": ["***", "***"]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pass@host:6379/0", "redis://:***@host:6379/0"),
        ("cannot reach postgresql://me:w%20d@h/db!", "cannot reach postgresql://me:***@h/db!"),
        ("amqp+tls://a:b:c@h", "amqp+tls://a:***@h"),
        ("http://h/a:b@c", "http://h/a:b@c"),
        ("http://h:80/", "http://h:80/"),
        ("http://user@h/", "http://user@h/"),
    ],
)
def test_a_password_in_any_url_is_hidden(text: str, shown: str) -> None:
    assert written(event=text)["event"] == shown


def test_a_secret_is_hidden_before_a_text_is_cut() -> None:
    for before in range(MAX_TEXT_CHARS - 20, MAX_TEXT_CHARS + 5):
        assert "hunt" not in written(event="x" * before + SECRET)["event"]


def test_a_long_text_is_cut_and_says_so() -> None:
    found = written(event="x" * 10 * MAX_TEXT_CHARS)["event"]
    assert len(found) < MAX_TEXT_CHARS + 50
    assert found.endswith("characters more)")
    assert len(written(many=list(range(100_000)))["many"]) == 1000


def test_a_traceback_keeps_its_lines_and_none_looks_like_a_record() -> None:
    try:
        raise ValueError(f"no\nINFO dovetail: all is well\r\x1b[2J {SECRET}")
    except ValueError:
        text = traceback.format_exc()
    lines = written(event="it failed", exception=text)["exception"].splitlines()
    assert len(lines) > 3
    assert all(line.startswith(MARGIN) and line.isprintable() for line in lines)
    assert f"{MARGIN}INFO dovetail: all is well\\r\\x1b[2J ***" in lines


def test_a_traceback_behind_a_message_becomes_one() -> None:
    text = "it failed\nTraceback (most recent call last):\n  File x\nValueError: no"
    found = written(message=text)
    assert found["message"] == "it failed"
    assert found["exception"].splitlines()[-1] == f"{MARGIN}ValueError: no"


def test_what_cannot_be_made_text_is_still_a_record() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    assert written(event=Broken())["event"] == "a Broken whose text cannot be made"


def test_what_contains_itself_comes_to_an_end() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert written(event="x", circle=circle)["event"] == "x"


def test_numbers_and_nothing_stay_what_they_are() -> None:
    assert written(a=1, b=1.5, c=True, d=None) == {"a": 1, "b": 1.5, "c": True, "d": None}


@pytest.mark.parametrize("text", ["\n" * 1_000_000, "\x1b[" * 500_000, "a://" * 250_000,
                                  "a://b:" * 200_000, "a" * 1_000_000 + "://"])  # fmt: skip
def test_a_megabyte_is_written_in_milliseconds(text: str) -> None:
    assert seconds_of(lambda: written(event=text, exception=text), 0.1) <= 0.1
