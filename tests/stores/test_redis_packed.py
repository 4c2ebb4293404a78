"""Events and records of items in few bytes: what is unpacked is what was packed."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.items import MAX_ITEMS, PLACES, item_place
from dovetail.stores.redis.codec import time_text
from dovetail.stores.redis.items import joined_record, output_in, split_record
from dovetail.stores.redis.packed import KINDS, packed_event, unpacked_event, usual_event

times = st.floats(0, 1e11, allow_nan=False).map(lambda at: at + 0.0)
places = st.builds(item_place, st.integers(0, 10_000), st.integers(0, MAX_ITEMS - 1))
workers = st.text(st.characters(codec="utf-8", exclude_characters="|\n"), max_size=40)


@given(times, st.sampled_from(sorted(KINDS.values())), places, workers)
def test_an_unpacked_event_is_the_text_that_was_packed(
    at: float, kind: tuple[str, int], place: int, worker: str
) -> None:
    data = {"worker": worker} if kind[0] == "node.started" else None
    rest = orjson.dumps([1, place, kind[1], data])[1:]
    text = b'[%b,"%b",%b' % (time_text(at).encode(), kind[0].encode(), rest)
    packed = packed_event(text)
    assert len(packed) == 14 + (len(worker.encode()) if data else 0)
    assert unpacked_event(packed) == text


@pytest.mark.parametrize(
    "fields",
    [
        [1.5, "node.queued", 2, PLACES, 0, None],
        [1.5, "node.started", 1, PLACES, 2, {"worker": "w"}],
        [1.5, "node.started", 1, PLACES, 1, {"worker": "w", "restored": True}],
        [1.5, "node.started", 1, PLACES, 1, {"worker": None}],
        [1.5, "node.started", 1, PLACES, 1, None],
        [1.5, "node.queued", 1, 0, 0, None],
        [1.5, "node.queued", 1, 0, 0, {"items": 3}],
        [1.5, "node.failed", 1, PLACES, 1, {"error": {}}],
        [1.5, "run.completed", 1, None, None, None],
    ],
)
def test_other_events_stay_text(fields: list[object]) -> None:
    text = orjson.dumps(fields)
    assert packed_event(text) == unpacked_event(text) == text


def test_a_damaged_event_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="an event of 3 bytes"):
        usual_event(b"\1ab")


@given(st.none() | times, times, workers, st.integers(1, 9), st.binary(max_size=40))
def test_a_split_record_is_the_one_that_was_joined(
    started: float | None, finished: float, worker: str, epoch: int, output: bytes
) -> None:
    began = "" if started is None else time_text(started)
    head = f"C|{epoch}|1|{worker}|{began}|{time_text(finished)}".encode()
    record = joined_record(head, output)
    assert split_record(record) == (head, output)
    assert output_in(record) == output


def test_the_record_of_a_failed_item_stays_text() -> None:
    record = b'F|1|1|w|1.5|2.5||{"type":"X"}'
    assert split_record(record) == (record, None)
    assert joined_record(record, None) == record
    assert output_in(record) == b"null"
