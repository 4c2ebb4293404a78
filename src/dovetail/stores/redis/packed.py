"""Packs the usual events of items, and the records of completed items: a node may have 100,000.

An event of an item is usual if the item is queued, started or completed in its first epoch and
attempt. All other events are stored as JSON: `[time, kind, epoch, place, attempt, data]`. A usual
event is packed: a byte for kind and attempt, the time in 8 bytes, the place in 5 bytes, and for
`node.started` the worker.

A packed record has the letter C, start and end in 8 bytes each, then epoch, attempt and worker as
text, a line break, and the output. The archive stores both as text.
"""

from __future__ import annotations

from struct import Struct

import orjson

from dovetail.core.items import PLACES

KINDS = {b"\1": ("node.queued", 0), b"\2": ("node.started", 1), b"\3": ("node.completed", 1)}
"""The kind and the attempt of a packed event, by its first byte. JSON begins with none of these."""
CODES = {kind: code for code, kind in KINDS.items()}
TIME, TIMES = Struct(">d"), Struct(">dd")
PLACE_OFFSET, WORKER_OFFSET = 9, 14
"""Of an event: kind (1 byte) and time (8) come first, then the place (5), then the worker."""
RECORD_REST_OFFSET = 17
"""Of a record: letter (1 byte) and two times (8 each) come first, then epoch, attempt, worker."""
NOT_STARTED = -1.0
"""Of a record: the start of an item whose output was in the node cache."""

UsualEvent = tuple[float, str, int, int, int, dict[str, str] | None]


def usual_event(text: bytes) -> UsualEvent:
    """The fields of a packed event. Raises `ValueError` if it is damaged."""
    if len(text) < WORKER_OFFSET:
        raise ValueError(f"an event of {len(text)} bytes")
    kind, attempt = KINDS[text[:1]]
    (time,) = TIME.unpack_from(text, 1)
    place = int.from_bytes(text[PLACE_OFFSET:WORKER_OFFSET], "big")
    data = {"worker": text[WORKER_OFFSET:].decode()} if kind == "node.started" else None
    return time, kind, 1, place, attempt, data


def unpacked_event(text: bytes) -> bytes:
    """An event as JSON, whether it is packed or not."""
    if text[:1] not in KINDS:
        return text
    time, kind, epoch, place, attempt, data = usual_event(text)
    end = orjson.dumps([epoch, place, attempt, data])[1:]
    return b'[%b,"%b",%b' % (repr(time).encode(), kind.encode(), end)


def packed_event(text: bytes) -> bytes:
    """The reverse of `unpacked_event`; an event that is not usual stays as it is."""
    time, kind, _, place, attempt, data = orjson.loads(text)
    code = CODES.get((kind, attempt))
    if code is None or place is None or place < PLACES:
        return text
    worker = (data or {}).get("worker") or ""
    packed = b"".join((code, TIME.pack(time), place.to_bytes(5, "big"), worker.encode()))
    return packed if unpacked_event(packed) == text else text


def packed_record(head: bytes, output: bytes) -> bytes:
    """The record of a completed item from its text, `C|epoch|attempt|worker|start|end`."""
    _, epoch, attempt, worker, started, finished = head.split(b"|")
    times = TIMES.pack(float(started or NOT_STARTED), float(finished))
    return b"C%b%b|%b|%b\n%b" % (times, epoch, attempt, worker, output)


def unpacked_record(record: bytes) -> tuple[bytes, bytes]:
    """The reverse of `packed_record`: the text and the output. Raises `ValueError` if the record is
    damaged."""
    head, found, output = record[RECORD_REST_OFFSET:].partition(b"\n")
    if not found:
        raise ValueError(f"a record of {len(record)} bytes")
    started, finished = (b"" if at == NOT_STARTED else repr(at).encode() for at in _times(record))
    return b"C|%b|%b|%b" % (head, started, finished), output


def _times(record: bytes) -> tuple[float, float]:
    times: tuple[float, float] = TIMES.unpack_from(record, 1)
    return times
