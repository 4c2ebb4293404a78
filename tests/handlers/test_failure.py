"""An exception of a handler as it is stored: whatever it is, it is told, and nothing leaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.core.redaction import Redactor
from dovetail.core.text import MAX_TRACEBACK_BYTES, cut_middle
from dovetail.core.values import encode
from dovetail.handlers.failure import describe

SECRET = "tok3n-of-a-service"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def caught(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def raising(error: BaseException) -> BaseException:
    def act() -> None:
        raise error

    return caught(act)


def traceback_of(error: BaseException, redact: Callable[[str], str] = str) -> str:
    described = describe(error, redact)
    orjson.dumps(described)
    text = described["traceback"]
    assert isinstance(text, str)
    assert len(text.encode()) <= MAX_TRACEBACK_BYTES
    return text


def with_cause() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("no such page") from error


def with_context() -> None:
    try:
        {}["missing"]
    except KeyError:
        raise ValueError("no such page")  # noqa: B904


class TestWhere:
    def test_it_names_file_line_and_function(self) -> None:
        line = with_cause.__code__.co_firstlineno + 4
        here = Path(__file__).relative_to(Path.cwd())
        assert describe(caught(with_cause))["where"] == f"{here}:{line} in with_cause"

    def test_it_is_of_the_last_exception_not_of_its_cause(self) -> None:
        def inner() -> None:
            raise KeyError("first")

        def outer() -> None:
            try:
                inner()
            except KeyError as error:
                raise ValueError("last") from error

        assert describe(caught(outer))["where"].endswith(" in outer")

    def test_it_is_the_innermost_frame_of_the_user(self) -> None:
        def reads() -> Any:
            return orjson.loads(b"{") and None

        def parses() -> Any:
            import json

            return json.loads("{")

        assert describe(caught(reads))["where"].endswith(" in reads")
        assert describe(caught(parses))["where"].endswith(" in parses")

    def test_an_error_that_was_never_raised_has_none(self) -> None:
        assert "where" not in describe(ValueError("x"))


class TestTraceback:
    @pytest.mark.parametrize(("act", "link"), [(with_cause, CAUSED), (with_context, DURING)])
    def test_it_has_the_causes_as_python_prints_them(
        self, act: Callable[[], None], link: str
    ) -> None:
        text = traceback_of(caught(act))
        first, last = text.split(link)
        for part in (first, last):
            assert part.startswith("Traceback (most recent call last):\n  File ")
        assert first.rstrip().endswith("KeyError: 'missing'")
        assert "    raise ValueError(" in last
        assert last.endswith("\nValueError: no such page")

    def test_a_suppressed_context_is_left_out(self) -> None:
        def act() -> None:
            try:
                {}["missing"]
            except KeyError:
                raise ValueError("only this") from None

        assert "KeyError" not in traceback_of(caught(act))

    def test_it_has_notes_and_the_members_of_a_group(self) -> None:
        member = raising(OSError("disk"))
        member.add_note("of the second volume")
        text = traceback_of(raising(ExceptionGroup("several", [ValueError("one"), member])))
        assert "Exception Group Traceback (most recent call last):" in text
        for words in ("several (2 sub-exceptions)", "ValueError: one", "OSError: disk"):
            assert words in text
        assert "of the second volume" in text

    def test_frames_of_dovetail_at_the_top_are_left_out(self) -> None:
        def mine() -> None:
            encode([object()], max_bytes=10)

        within = below(caught(lambda: _attempted_in_dovetail(mine)))
        frames = [line for line in traceback_of(within).splitlines() if line.startswith("  File ")]
        assert frames[0].endswith(" in mine")
        assert frames[1].endswith(" in encode")

    def test_an_error_of_dovetail_alone_keeps_its_innermost_frame(self) -> None:
        error = below(caught(lambda: encode(object())))
        lines = [line for line in traceback_of(error).splitlines() if line.startswith("  File ")]
        assert len(lines) == 1
        assert "/core/values.py" in lines[0]


def _attempted_in_dovetail(act: Callable[[], None]) -> None:
    """Call a function from a frame of a file of Dovetail."""
    code = compile("def ours(act):\n    act()\n", encode.__code__.co_filename, "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    space["ours"](act)


def below(error: BaseException) -> BaseException:
    """The error without the frames of this test above the first frame of Dovetail."""
    top = error.__traceback__
    while top is not None and top.tb_frame.f_code.co_filename != encode.__code__.co_filename:
        top = top.tb_next
    return error.with_traceback(top)


class TestSecrets:
    def test_a_secret_is_redacted_in_every_part(self) -> None:
        redact = Redactor({"KEY": SECRET}).redact_shown

        def act() -> None:
            try:
                raise KeyError(SECRET)
            except KeyError as error:
                error.add_note(f"sent with {SECRET}")
                raise ValueError(f"Bearer {SECRET}") from error

        described = describe(caught(act), redact)
        assert SECRET not in orjson.dumps(described).decode()
        assert described["traceback"].count("***") >= 3

    def test_it_is_redacted_before_it_is_cut(self) -> None:
        """Half a secret would not be recognised."""
        redact = Redactor({"KEY": SECRET}).redact_shown
        for shift in range(len(SECRET)):
            error = ValueError("x" * (MAX_TRACEBACK_BYTES // 2 - 1000 - shift) + SECRET * 4000)
            text = traceback_of(raising(error), redact)
            assert SECRET[:6] not in text
            assert SECRET[-6:] not in text


class TestBounds:
    def test_a_long_one_loses_its_middle_and_says_so(self) -> None:
        text = traceback_of(raising(ValueError("first\n" + "é" * 100_000 + "\nlast")))
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith("\nlast")
        assert text.count(" bytes left out …\n") == 1

    @pytest.mark.parametrize("text", ["x" * 40_000, "ü\n" * 40_000, "😀" * 20_000, "\n" * 40_000])
    def test_the_line_says_how_many_bytes_are_missing(self, text: str) -> None:
        cut = cut_middle(text)
        first, rest = cut.split("\n  … ", 1)
        number, last = rest.split(" bytes left out …\n", 1)
        missing = int(number.replace(",", ""))
        assert len(cut.encode()) <= MAX_TRACEBACK_BYTES
        assert missing + len(first.encode()) + len(last.encode()) == len(text.encode())
        assert text.startswith(first)
        assert text.endswith(last)
        assert missing < len(text.encode()) * 3 / 4

    @pytest.mark.parametrize("text", ["", "x", "é" * (MAX_TRACEBACK_BYTES // 2)])
    def test_a_short_one_is_whole(self, text: str) -> None:
        assert cut_middle(text) == text

    def test_a_lone_surrogate_can_be_stored(self) -> None:
        assert "\\ud800" in traceback_of(raising(ValueError(chr(0xD800))))

    def test_a_deep_recursion_is_short(self) -> None:
        def even(n: int) -> int:
            return odd(n + 1)

        def odd(n: int) -> int:
            return even(n + 1)

        before = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)
        try:
            error = caught(lambda: even(0))
        finally:
            sys.setrecursionlimit(before)
        text = traceback_of(error)
        assert "frames left out …" in text
        assert "RecursionError: maximum recursion depth exceeded" in text

    def test_a_huge_chain_shows_the_last_exceptions(self) -> None:
        error: BaseException = ValueError("number 0")
        for number in range(1, 20_000):
            link = ValueError(f"number {number}")
            link.__cause__ = error
            error = link
        text = traceback_of(error)
        assert text.startswith("… earlier exceptions left out …")
        assert text.endswith("ValueError: number 19999")
        while error.__cause__ is not None:  # a chain that is freed at once is a recursion in C
            error, error.__cause__ = error.__cause__, None

    def test_a_huge_group_shows_its_first_members(self) -> None:
        group = ExceptionGroup("many", [ValueError(f"number {at}") for at in range(5_000)])
        text = traceback_of(raising(group))
        assert "many (5000 sub-exceptions)" in text
        assert "ValueError: number 0" in text


class TestHostileExceptions:
    def test_a_cycle_of_causes_ends(self) -> None:
        one, other = raising(ValueError("one")), raising(ValueError("other"))
        one.__cause__, other.__cause__ = other, one
        assert "ValueError: one" in traceback_of(one)

    def test_a_cycle_of_contexts_under_a_strange_class_ends(self) -> None:
        class Strange(Exception):
            def __getattr__(self, name: str) -> Any:
                raise SystemExit(name)

        one, other = raising(Strange("one")), raising(Strange("other"))
        one.__context__, other.__context__ = other, one
        assert traceback_of(one).endswith("Strange: one")

    def test_a_text_that_cannot_be_made_is_said_so(self) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise SystemExit("no words")

        assert traceback_of(raising(Mute())).splitlines()[-1].endswith("<exception str() failed>")

    def test_a_cause_that_is_new_each_time_does_not_run_for_ever(self) -> None:
        class Endless(Exception):
            @property
            def __cause__(self) -> BaseException:  # type: ignore[override]
                return Endless("again")

        assert traceback_of(raising(Endless("first"))).endswith("Endless: first")

    @pytest.mark.parametrize(
        "name",
        ["__cause__", "__context__", "__traceback__", "__notes__", "__class__", "exceptions"],
    )
    def test_an_attribute_that_raises_is_not_asked(self, name: str) -> None:
        asked: list[str] = []

        def read(self: object) -> None:
            asked.append(name)
            raise KeyboardInterrupt(name)

        kind = type("Trap", (Exception,), {name: property(read)})
        text = traceback_of(raising(kind("sprung")))
        assert text.endswith("Trap: sprung")
        assert asked == []

    def test_notes_of_any_kind_do_no_harm(self) -> None:
        class Unspeakable:
            def __str__(self) -> str:
                raise SystemExit

        for notes in ("text", 5, [Unspeakable()], ["x"] * 100_000):
            error = ValueError("noted")
            error.__notes__ = notes  # type: ignore[assignment]
            assert "ValueError: noted" in traceback_of(raising(error))

    def test_a_class_beside_the_exception_is_printed_as_any(self) -> None:
        class Beside:
            pass

        class Mixed(Beside, ValueError):
            pass

        assert "    raise error\n" in traceback_of(raising(Mixed("x")))
