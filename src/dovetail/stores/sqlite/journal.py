"""Journal entries to bytes and back: JSON, so that people can read it.

Entries are checked when they are read: a file may be damaged, or written by a newer version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from dovetail.core.audit.replay import KINDS, MAX_COUNT, JournalEntry, UnreadableJournal, extra_of
from dovetail.core.effects import new_tuple
from dovetail.core.events import Event
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.transitions import Complete, Decision, Recall, Submit, Transition

OUTPUTS = frozenset({KINDS[Complete], KINDS[Recall]})
"""Entries whose extra is an output."""


class Staged:
    """A decision on its way into the file."""

    __slots__ = ("decision", "move", "now", "seq")

    def __init__(self, move: Submit | Transition, now: float, seq: int, decision: Decision) -> None:
        self.move = move
        self.now = now
        self.seq = seq
        """Of its first event."""
        self.decision = decision


def encoded(staged: Iterable[Staged]) -> bytes:
    """One piece of a run's log."""
    return orjson.dumps(
        [
            (
                one.now,
                KINDS[type(one.move)],
                extra_of(one.move, one.decision),
                [order[1] for order in one.decision.dispatch],
                # Without `seq` and `time`, which follow from the piece and the entry.
                [event[2:] for event in one.decision.events],
            )
            for one in staged
        ]
    )


def decoded(rows: Iterable[tuple[int, int, bytes]]) -> Iterator[JournalEntry]:
    """The entries of these pieces (id, seq of the first event, bytes). Raises `Unreadable`."""
    for _, seq, piece in rows:
        if type(seq) is not int or not 0 < seq < 1 << 62:
            raise UnreadableJournal(f"{seq!r} is no number of an event")
        try:
            entries = orjson.loads(piece)
            if type(entries) is not list or not entries:
                raise UnreadableJournal(f"event {seq}: a piece of the log holds no entries")
            for time, kind, extra, dispatch, events in entries:
                made = _events(seq, time, events)
                if type(kind) is not str or type(dispatch) is not list:
                    raise UnreadableJournal(f"event {seq}: a field of its entry has another type")
                yield JournalEntry(seq, time, kind, extra, dispatch, made)
                seq += len(made)
        except UnreadableJournal:
            raise
        except (TypeError, ValueError) as problem:  # no JSON, or not as many fields as there are
            why = f"event {seq}: its entry cannot be read ({problem})"
            raise UnreadableJournal(why) from None


def _events(seq: int, time: float, events: Sequence[Sequence[Any]]) -> list[Event]:
    if type(time) is not float and type(time) is not int:
        raise UnreadableJournal(f"event {seq}: {time!r} is no time")
    made = []
    for number, (kind, epoch, node, attempt, data) in enumerate(events, seq):
        if (
            type(kind) is not str
            or type(epoch) is not int
            or not 0 <= epoch < MAX_COUNT
            or (node is not None and type(node) is not str)
            or (attempt is not None and (type(attempt) is not int or not 0 <= attempt < MAX_COUNT))
            or (data is not None and type(data) is not dict)
        ):
            raise UnreadableJournal(f"event {number}: a field of it has another type")
        made.append(new_tuple(Event, (number, time, kind, epoch, node, attempt, data)))
    return made


def thinned(
    row: tuple[int, int, bytes], room: ReadBudget | None, entries: list[JournalEntry]
) -> ReadBudget | None:
    """Add the entries of a piece, without the outputs that there is no room for.

    Returns the room that is left; without a room there is no output at all. One that is left out
    is an `Elsewhere` that says where in the piece its bytes are.
    """
    number, _, text = row
    if room is not None and len(text) <= min(room):
        entries += decoded([row])
        return ReadBudget(room.each, room.together - len(text))
    at = 0
    for entry in decoded([row]):
        if entry.kind not in OUTPUTS:
            entries.append(entry)
            continue
        output = None
        if room is not None:
            encoded = orjson.dumps(entry.extra)
            size, output = len(encoded), entry.extra
            found = -1
            if size <= min(room):
                room = ReadBudget(room.each, room.together - size)
            else:
                found = text.find(encoded, at)
            if found >= 0:
                at, output = found + size, OutputReference(size, (number, found))
        entries.append(entry._replace(extra=output))
    return room
