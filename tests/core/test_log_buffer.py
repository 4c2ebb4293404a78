"""What is kept of the log of an attempt."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.log_buffer import (
    MAX_FIELDS_BYTES,
    MAX_HELD_CHARS,
    AttemptKey,
    LogBuffer,
    cut,
    fields_of,
    level_name,
    measured,
    message_of,
    storable,
)
from dovetail.core.node_logs import MAX_CHUNK_BYTES, MAX_LINE_BYTES, LogChunk, LogLine
from dovetail.core.redaction import Redactor

ATTEMPT = AttemptKey("r", "n", 1, 2)


def line(message: str, **fields: Any) -> LogLine:
    return LogLine(1.5, "INFO", "stdout", message, fields or None)


class Stored:
    """A store: it keeps the chunks that it gets, and removes those that they name."""

    def __init__(self) -> None:
        self.chunks: dict[int, LogChunk] = {}
        self.handed_in = 0

    def log(self, chunks: list[LogChunk]) -> None:
        for chunk in chunks:
            self.handed_in += size_of(chunk)
            for number in chunk.drops:
                del self.chunks[number]
            assert chunk.number not in self.chunks
            self.chunks[chunk.number] = chunk

    def messages(self) -> list[str]:
        return [one.message for n in sorted(self.chunks) for one in self.chunks[n].lines]

    def missing(self) -> tuple[int, int]:
        last = self.chunks[max(self.chunks)]
        return last.missing_lines, last.missing_bytes


def size_of(chunk: LogChunk) -> int:
    return len(orjson.dumps([tuple(one) for one in chunk.lines]))


class TestLogBuffer:
    def test_a_short_log_is_one_chunk_with_nothing_missing(self) -> None:
        buffer = LogBuffer(ATTEMPT)
        for word in "abc":
            buffer.add(line(word))
        (chunk,) = buffer.take()
        assert chunk == LogChunk("r", "n", 1, 2, 0, [line(word) for word in "abc"])
        assert buffer.take() == []
        assert len(buffer) == 0

    def test_chunks_are_numbered_in_the_order_of_their_lines(self) -> None:
        buffer = LogBuffer(ATTEMPT)
        for word in "abc":
            buffer.add(line(word))
            (chunk,) = buffer.take()
            assert (chunk.number, chunk.lines) == ("abc".index(word), [line(word)])

    def test_a_chunk_has_no_more_than_its_bytes_as_json(self) -> None:
        buffer, stored = LogBuffer(ATTEMPT), Stored()
        for _ in range(100):
            buffer.add(line("\0" * 1500, path="/tmp/ä"))
        chunks = buffer.take()
        assert len(chunks) > 1
        assert all(size_of(chunk) <= MAX_CHUNK_BYTES for chunk in chunks)
        stored.log(chunks)
        assert len(stored.messages()) == 100

    def test_the_longest_possible_line_fits_into_one_chunk(self) -> None:
        longest = line(
            message_of("\0" * 50_000, str), **fields_of({"a": "\0" * 50_000}, lambda x: x)
        )
        assert measured(longest).size <= MAX_CHUNK_BYTES

    @given(
        st.lists(st.one_of(st.integers(1, 900), st.just("take")), min_size=1, max_size=200),
        st.integers(2000, 20_000),
    )
    def test_the_first_quarter_and_the_newest_rest_stay_and_what_is_missing_is_counted(
        self, steps: list[int | str], max_bytes: int
    ) -> None:
        buffer, stored, written = LogBuffer(ATTEMPT, max_bytes), Stored(), []
        for number, step in enumerate(steps):
            if isinstance(step, int):
                written.append(f"{number:04} {'x' * step}")
                buffer.add(line(written[-1]))
            else:
                stored.log(buffer.take())
        stored.log(buffer.take())
        kept = stored.messages()
        if not written:
            return
        sizes = [measured(line(one)).size for one in written]
        head, used = 0, 0
        while head < len(written) and used + sizes[head] <= max_bytes // 4:
            used += sizes[head]
            head += 1
        assert kept[:head] == written[:head]
        rest = kept[head:]
        assert rest == written[len(written) - len(rest) :]
        assert sum(measured(line(one)).size for one in kept) <= max_bytes
        gone = written[head : len(written) - len(rest)]
        assert stored.missing() == (len(gone), sum(map(len, gone)))
        if gone:
            # No more gives way than must: the bytes of one chunk.
            assert rest, "the newest line is always there"

    def test_without_a_hand_in_lines_give_way_one_by_one(self) -> None:
        buffer, stored = LogBuffer(ATTEMPT, 8000), Stored()
        for number in range(1000):
            buffer.add(line(f"{number:050}"))
        stored.log(buffer.take())
        size = measured(line("0" * 50)).size
        assert len(stored.messages()) == 2000 // size + 6000 // size

    def test_fifty_megabytes_stay_bounded_in_memory_and_in_what_is_handed_in(self) -> None:
        buffer, stored = LogBuffer(ATTEMPT), Stored()
        for number in range(6400):
            buffer.add(line("x" * 8000))
            assert buffer._rest_size <= 1 << 20
            if number % 3200 == 3199:  # twice a second
                stored.log(buffer.take())
        assert stored.handed_in <= 2 << 20
        lines, text = stored.missing()
        assert lines + len(stored.messages()) == 6400
        assert text + sum(map(len, stored.messages())) == 6400 * 8000


class TestMessages:
    @pytest.mark.parametrize(
        ("number", "name"),
        [
            *[(0, "DEBUG"), (5, "DEBUG"), (19, "DEBUG"), (20, "INFO"), (25, "INFO")],
            *[(30, "WARNING"), (39, "WARNING"), (40, "ERROR"), (50, "CRITICAL"), (99, "CRITICAL")],
        ],
    )
    def test_a_level_without_a_name_counts_as_the_next_lower_one(
        self, number: int, name: str
    ) -> None:
        assert level_name(number) == name

    def test_control_characters_stay_as_they_are(self) -> None:
        assert message_of("\x1b[31mred\x1b[0m \0 \r ä€😀", str) == "\x1b[31mred\x1b[0m \0 \r ä€😀"

    def test_a_lone_surrogate_is_written_as_its_escape(self) -> None:
        assert storable("a\ud800b") == "a\\ud800b"
        assert orjson.dumps(message_of("ä\udfff", str)) == '"ä\\\\udfff"'.encode()

    @pytest.mark.parametrize("text", ["x" * 9000, "ä" * 9000, "😀" * 9000, "x" * 10_000_000])
    def test_a_long_line_is_cut_to_its_bytes_and_says_so(self, text: str) -> None:
        shown = message_of(text, str)
        assert len(shown.encode()) <= MAX_LINE_BYTES
        words, _, note = shown.partition("… (")
        missing = int(note.removesuffix(" more bytes)").replace(",", ""))
        assert len(words.encode()) + missing == len(text.encode())
        assert len(words.encode()) > MAX_LINE_BYTES - 100

    def test_a_text_of_just_the_limit_is_whole(self) -> None:
        assert cut("x" * MAX_LINE_BYTES) == "x" * MAX_LINE_BYTES

    @given(st.integers(0, 200))
    def test_a_secret_is_redacted_wherever_the_text_is_cut(self, shift: int) -> None:
        secret = "Tr0ub4dor&3-" + "s3cret" * 20
        redact = Redactor({"KEY": secret}).redact_shown
        for edge in (MAX_LINE_BYTES, MAX_HELD_CHARS):
            text = "x" * (edge - shift) + secret + "y" * 50
            assert "s3cret" not in message_of(text, redact)
        # Redacted, this is short: its end is the beginning of a secret that was cut.
        assert "s3cret" not in message_of("x" * shift + secret * 500, redact)


class TestFields:
    def test_are_json_values(self) -> None:
        class Broken:
            def __str__(self) -> str:
                raise ZeroDivisionError

        given = {"n": 1, "f": 1.5, "t": True, "none": None, "l": (1, {"x"}), 3: {"a": {"b": 1}}}
        given |= {"nan": math.nan, "big": 1 << 70, "path": object, "broken": Broken()}
        found = fields_of(given, lambda value: value)
        assert orjson.loads(orjson.dumps(found)) == {
            "n": 1,
            "f": 1.5,
            "t": True,
            "none": None,
            "l": [1, ["x"]],
            "3": {"a": {"b": 1}},
            "nan": "nan",
            "big": str(1 << 70),
            "path": "<class 'object'>",
            "broken": "a Broken whose text cannot be made",
        }

    def test_are_bounded(self) -> None:
        deep: Any = "end"
        for _ in range(100):
            deep = [deep]
        wide = {f"key{number}": "x" * 3000 for number in range(1000)}
        for fields in (
            {"deep": deep},
            wide,
            {"k" * 100_000: "v" * 100_000},
            {"l": list(range(9999))},
        ):
            found = fields_of(fields, lambda value: value)
            assert len(orjson.dumps(found)) <= MAX_FIELDS_BYTES + 100
        assert fields_of(wide, lambda value: value)["…"].endswith("more")

    def test_have_no_secrets(self) -> None:
        redact = Redactor({"KEY": "hunter2hunter2"}).redact_shown
        given = {"a": "hunter2hunter2", "b": ["x hunter2hunter2"], "hunter2hunter2": 1}
        given |= {"long": "x" * (MAX_HELD_CHARS - 5) + "hunter2hunter2" + "y" * 1000}
        given |= {"many": "hunter2hunter2" * 5000}
        assert "hunter2" not in str(fields_of(given, redact))
