"""A run as the hot state and the archive hand it to each other.

States, outputs and events are what the hot store keeps, byte for byte: only the stores understand
them. What is decided here is whether the two still tell the same story. What it must not know:
where either of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as its keys in Redis have it at one moment, and a piece of its log up to then.

    A node that is in `nodes` is meant whole: without its output here, it has none. One that is
    not has not changed since before `first_seq`; the first of a generation must have them all.
    """

    run_id: str
    generation: int
    """From 1."""
    meta: dict[str, str]
    nodes: dict[int, str]
    """By place, as are the outputs and ends."""
    outputs: dict[int, bytes]
    ends: dict[int, bytes]
    first_seq: int
    events: Sequence[bytes]
    """From `first_seq` on, without a gap."""
    result: bytes | None = None
    """JSON, of a run that is finished."""
    content: bytes | None = None
    """The definition. Only needed for a run that was never accepted in the archive."""

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1

    @property
    def epoch(self) -> int:
        return int(self.meta["epoch"])

    @property
    def finished_at(self) -> float | None:
        return float(self.meta["finished_at"]) if self.meta.get("finished_at") else None

    @property
    def finished(self) -> bool:
        return bool(self.meta.get("finished_at"))


class Kept(NamedTuple):
    """How far the archive is with a run.

    After a write: of another generation than the snapshot, it refused that one for good, because
    it has a newer one or the run is finished. With an earlier event, it lacks those in between,
    or has others in their place.
    """

    generation: int
    """Zero: accepted, and nothing seen of it since."""
    last_seq: int
    finished: bool


class Head(NamedTuple):
    """Where the archive's log of a run ends."""

    kept: Kept
    epoch: int
    event: bytes | None
    """The last one."""


class Reading(NamedTuple):
    """What the hot state has beyond a head."""

    snapshot: RunSnapshot
    continues: bool
    """The log has the head's last event where the archive has it: nothing was lost between."""


class Course(Enum):
    """What is to be done about a run."""

    LEAVE = auto()
    WRITE = auto()
    """The archive gets what it lacks."""
    RENUMBER = auto()
    """The hot state came back without its end: it goes on under the next generation."""
    REPLACE = auto()
    """The same, of a run that is finished in the archive: what is finished is not undone."""
    RESUME = auto()
    """The hot state has lost that a finished run was retried, so nobody goes on with it: it is made
    as it is archived."""


def course(head: Head | None, reading: Reading) -> Course:
    """Which of the two is behind, if any."""
    here = reading.snapshot
    if head is None or head.kept.generation == 0:
        return Course.WRITE
    kept = head.kept
    if kept.finished and here.epoch <= head.epoch:
        if not (reading.continues and here.finished):
            return Course.REPLACE
        # What comes after the end, a late result that was refused, only a log may add that goes on
        # from there: the same, or that of a run that was made again as it is archived.
        news = here.generation >= kept.generation and here.events
        return Course.WRITE if news else Course.LEAVE
    if here.finished and here.epoch < head.epoch:
        return Course.RESUME
    if not reading.continues or here.generation < kept.generation:
        return Course.RENUMBER
    return Course.WRITE if here.events or here.generation > kept.generation else Course.LEAVE
