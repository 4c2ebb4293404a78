"""What is known of one processing of a document, from its beginning to the end of its run.

A row is provisional while the run goes on: `started`, and from `documents.record_metrics` on
`extracted` or `known`. Only the end of the run makes it `success`, `cached` or `failed`, because a
later step may fail, be killed or run out of time. The key is the run's id, so a step or a run that
is delivered again finds its own row. The rules are pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

STARTED, EXTRACTED, KNOWN = "started", "extracted", "known"
SUCCESS, FAILED, CACHED = "success", "failed", "cached"

PROVISIONAL = frozenset({STARTED, EXTRACTED, KNOWN})
COMPLETED = "completed"
"""What earlier versions wrote for `success`, before the run had ended."""
ENDED_WELL = frozenset({SUCCESS, CACHED, COMPLETED})


@dataclass(frozen=True, slots=True)
class Measurement:
    """One processing of a document. Its `key` is the id of the run."""

    document_id: str
    key: str
    status: str
    seconds: float | None
    """None while nothing is measured, and for content that was known: it took no extraction."""
    confidence: float | None
    finished_at: float
    """When it was measured, or its run ended; while it is `started`, when that was."""

    @property
    def may_change(self) -> bool:
        """Whether the run may have ended otherwise since. Earlier versions had keys of three
        parts, which are no ids of runs: their rows stay as they are."""
        return self.status not in ENDED_WELL and ":" not in self.key


MeasuringRule = Callable[[Measurement | None], Measurement]


def begun(document_id: str, key: str, now: float) -> MeasuringRule:
    """An extraction begins. In a run that has succeeded it is only delivered again."""

    def rule(before: Measurement | None) -> Measurement:
        if before is not None and before.status in ENDED_WELL:
            return before
        return Measurement(document_id, key, STARTED, None, None, now)

    return rule


def measured(
    document_id: str, key: str, seconds: float | None, confidence: float, now: float
) -> MeasuringRule:
    """An extraction is done; `seconds` are None where the content was known."""

    def rule(before: Measurement | None) -> Measurement:
        if before is not None and before.status in ENDED_WELL:
            return before
        status = KNOWN if seconds is None else EXTRACTED
        return Measurement(document_id, key, status, seconds, confidence, now)

    return rule


def settled(document_id: str, key: str, *, good: bool, ended_at: float) -> MeasuringRule:
    """The run has ended. The last end counts: a run that failed may be retried and succeed."""

    def rule(before: Measurement | None) -> Measurement:
        if before is None:
            # No step of this package began: the extraction came from the node cache, or the run
            # ended before it could start.
            status, seconds = (CACHED, None) if good else (FAILED, 0.0)
            return Measurement(document_id, key, status, seconds, None, ended_at)
        if not good:
            status = FAILED
        elif before.status in ENDED_WELL:
            return before
        else:
            known = before.status == KNOWN or (before.status == FAILED and before.seconds is None)
            status = CACHED if known else SUCCESS
        if status == before.status:
            return before
        if before.status == STARTED:
            seconds = max(0.0, ended_at - before.finished_at)
            return replace(before, status=status, seconds=seconds, finished_at=ended_at)
        return replace(before, status=status)

    return rule
