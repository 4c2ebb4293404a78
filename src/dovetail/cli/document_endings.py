"""How the processing of documents ended: a table, every failure, where the files are, what next.

What it must not know: how documents were processed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail.cli import streams
from dovetail.cli.document_rows import HEAD, SURE, document_row, kept_of, warnings_in
from dovetail.cli.document_runs import DocumentRuns, Outcome
from dovetail.cli.document_tally import CACHED, CANCELLED, COMPLETED, FAILED
from dovetail.cli.ending import command, error_words, status_piece, typed_again
from dovetail.cli.interrupts import Ask
from dovetail.cli.text import Line, clip, counted, duration, plain, table
from dovetail.documents.folder import Findings
from dovetail.documents.reviews import Review, Reviews

MOST_ROWS = 25
MOST_FAILURES = 20
_LONGEST_ERROR = 300
_GOOD = (COMPLETED, CACHED)


def beginning(runs: DocumentRuns, found: Findings) -> Iterator[Line]:
    """What is about to happen, and what will not."""
    work = runs.work
    by = f", by {plain(work.extractor)}" if work.extractor else ""
    documents = counted(len(work.files), "document")
    into = plain(_shown(work.out))
    yield [("RUNNING", "bold"), (f" {work.name}, {documents} into {into}{by}", "")]
    if found.images:
        images = counted(found.images, "image")
        yield [(f"{images} left out: reading them needs tesseract, which is not here", "wait")]
    if found.others:
        files = counted(found.others, "file")
        yield [(f"{files} of other kinds left out; one that is named itself is taken", "dim")]


def ending(runs: DocumentRuns, reviews: Reviews, out: Sequence[str]) -> Iterator[Line]:
    """What became of them. `out` are the words that lead other commands to the same folder."""
    good = [outcome for outcome in runs.outcomes if outcome.state in _GOOD]
    shown = good[:MOST_ROWS]
    kept = {outcome.document.id: reviews.get(outcome.document.id) for outcome in shown}
    if shown:
        rows = [_row(outcome, kept[outcome.document.id]) for outcome in shown]
        yield from table([HEAD, *rows], streams.room())
    if len(good) > len(shown):
        listing = _reviews_command("list", *out)
        yield [(f"and {len(good) - len(shown):,} more:  {listing}", "dim")]
    for outcome in shown:
        yield from _warnings(outcome, kept[outcome.document.id])
    yield from _failures(runs)
    yield _verdict(runs)
    if good:
        folder = plain(_shown(runs.work.out))
        yield [("written to:  ", "dim"), (f"{folder}/json, {folder}/parquet", "")]
    yield from _next(runs, reviews, shown, out)


def document(runs: DocumentRuns, reviews: Reviews) -> dict[str, Any]:
    """The same as data, with every document."""
    counts = {state: runs.tally.counts[state] for state in (*_GOOD, FAILED, CANCELLED)}
    return {
        "workflow": runs.work.name,
        "out": str(runs.work.out),
        "extractor": runs.work.extractor or None,
        "count": runs.tally.total,
        "counts": counts,
        "left": runs.left,
        "seconds": round(runs.tally.passed, 3),
        "documents": [
            _described(outcome, reviews.get(outcome.document.id)) for outcome in runs.outcomes
        ],
    }


def _row(outcome: Outcome, review: Review | None) -> Line:
    found = outcome.found
    state = outcome.state
    if review is not None:
        # As people have corrected it, if they have.
        found = {**review.fields, "confidence": review.confidence}
        state = f"{review.status}, {CACHED}" if state == CACHED else review.status
    return document_row(Path(outcome.document.path).name, found, state)


def _described(outcome: Outcome, review: Review | None) -> dict[str, Any]:
    told = {
        "document_id": outcome.document.id,
        # What is no text is told as well as can be.
        "file_path": os.fsencode(outcome.document.path).decode(errors="backslashreplace"),
        "sha256": outcome.document.sha256 or None,
        "state": outcome.state,
        "run_id": outcome.run_id,
        **outcome.found,
        "error": outcome.error,
        "review": None,
        "json_path": None,
        "parquet_path": None,
    }
    if review is not None and outcome.state in _GOOD:
        told |= {
            "review": review.status,
            "json_path": review.json_path,
            "parquet_path": review.parquet_path,
        }
    return told


def _warnings(outcome: Outcome, review: Review | None) -> Iterator[Line]:
    for warning in warnings_in(kept_of(review.json_path)) if review is not None else ():
        name = plain(Path(outcome.document.path).name)
        yield [("! ", "wait"), (name, "bold"), (f"  {warning}", "wait")]


def _failures(runs: DocumentRuns) -> Iterator[Line]:
    failed = [outcome for outcome in runs.outcomes if outcome.state == FAILED]
    for outcome in failed[:MOST_FAILURES]:
        error = outcome.error or {}
        words = error_words(str(error.get("node", "")), error)
        yield [
            ("✗ ", "bad"),
            (plain(Path(outcome.document.path).name), "bold"),
            (f"  {clip(plain(words), _LONGEST_ERROR)}", "bad"),
        ]
    if len(failed) > MOST_FAILURES:
        listing = command("runs", "list", "--workflow", runs.work.name, "--status", "FAILED")
        yield [(f"and {len(failed) - MOST_FAILURES:,} more failed:  {listing}", "dim")]


def _verdict(runs: DocumentRuns) -> Line:
    tally = runs.tally
    status = "FAILED" if tally.counts[FAILED] else "COMPLETED"
    if runs.unfinished:
        goes_on = runs.asked is Ask.HAND_BACK or runs.shared
        status = "RUNNING" if goes_on else "CANCELLED"
    told = tally.summary() + (f", {runs.left:,} left" if runs.left else "")
    documents = counted(tally.total, "document")
    return [status_piece(status), (f" {documents} in {duration(tally.passed)}: {told}", "")]


def _next(
    runs: DocumentRuns, reviews: Reviews, shown: Sequence[Outcome], out: Sequence[str]
) -> Iterator[Line]:
    if runs.unfinished:
        yield going_on(runs)
        return
    tally = runs.tally
    if tally.counts[FAILED]:
        yield [
            ("fix it, then:  ", "dim"),
            (typed_again(), "bold"),
            (f"      tries {tally.counts[FAILED]:,} again", "dim"),
        ]
    if not shown:
        return
    doubtful = min(shown, key=lambda outcome: outcome.found.get("confidence") or 0.0)
    name = _short_id(doubtful.document.id, reviews)
    proposals = (
        ("next:", ("show", name), "what was found" if _is_sure(doubtful) else "the least sure"),
        ("", ("correct", name, "total=12.50"), "put right, for good"),
        ("", ("list", "--status", "pending"), "to be approved"),
    )
    rows: list[Line] = [
        [(head, "dim"), (_reviews_command(*words, *out), "bold"), (why, "dim")]
        for head, words, why in proposals
    ]
    yield from table(rows)


def going_on(runs: DocumentRuns) -> Line:
    """How to go on with what was not seen to its end."""
    again = "go on with:  "
    if runs.shared:
        again = "what was made goes on without this view; the rest with:  "
    elif runs.asked is Ask.HAND_BACK:
        again = "handed back; go on with:  "
    return [(again, "dim"), (typed_again(), "bold")]


def _short_id(name: str, reviews: Reviews) -> str:
    """Without the digits at its end, where that is enough."""
    stem = name.rpartition("-")[0]
    return stem if len(reviews.list(prefix=stem, limit=2)) == 1 else name


def _reviews_command(*words: str) -> str:
    return command("documents", "reviews", *words, placed=False)


def _is_sure(outcome: Outcome) -> bool:
    return (outcome.found.get("confidence") or 0.0) >= SURE


def _shown(folder: Path) -> str:
    """Relative to where we are, if it is below."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
