"""Reviews: one for each document, with the fields found and the decisions of people.

The rules are functions here: what a new extraction, a correction and an approval do to a review.
Reviews are kept in SQLite or PostgreSQL; each store applies a rule to its review under a lock. The
measurements are kept with them, one for each processing of a document. All calls block, and may
come from any thread. The SQL is in the files of this folder, by the names in their comments.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

from dovetail import DovetailError, NotFound
from dovetail.documents.files import is_result, remove
from dovetail.documents.metrics import Measurement, MeasuringRule


@cache
def statements(file: str) -> dict[str, str]:
    """A comment with a name opens a statement; other comments are for people."""
    text = Path(__file__).with_name(file).read_text("utf-8")
    found: dict[str, str] = {}
    for piece in text.split("-- name: ")[1:]:
        name, _, body = piece.partition("\n")
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        found[name.strip()] = "\n".join(lines).strip()
    return found


PENDING, APPROVED = "pending", "approved"
STATUSES = (PENDING, APPROVED)
FIELDS = ("type", "vendor", "date", "currency", "total", "line_items")

FILE = "reviews.db"
URL_VARIABLE = "DOVETAIL_DATABASE_URL"
SYNC_VARIABLE = "DOVETAIL_DB_SYNC"
MOST_OPEN = 16
"""Shelves that a process keeps open; one more closes the one that was used longest ago."""


class ReviewError(DovetailError):
    """A correction that names no field, or a value that the field cannot have."""

    type = "invalid_review"


@dataclass(frozen=True, slots=True)
class Review:
    """One document before people. Times are seconds since the epoch."""

    document_id: str
    file_path: str
    sha256: str
    extractor: str
    fields: dict[str, Any]
    locked: tuple[str, ...]
    """The fields that a person has corrected: no extraction changes them any more."""
    status: str
    approved_by: str | None
    corrected_by: str | None
    confidence: float
    parquet_path: str
    json_path: str
    created_at: float
    updated_at: float
    corrected_at: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with times as the API writes them."""
        fields = asdict(self)
        for name in ("created_at", "updated_at", "corrected_at"):
            fields[name] = _rfc3339(fields[name])
        return {**fields, "locked": list(self.locked)}


Rule = Callable[[Review | None], Review]


Change = tuple[Measurement | None, Measurement]
"""A measurement before and after; the same object if nothing was written."""


class Shelf(Protocol):
    """Where reviews are kept; paths in them are relative to the folder they belong to."""

    def get(self, document_id: str) -> Review | None: ...

    def page(
        self, status: str | None, prefix: str, limit: int | None, after: str
    ) -> list[Review]: ...

    def change(self, document_id: str, rule: Rule) -> Review:
        """Replace a review by what the rule makes of it, under a lock.

        A rule that returns what it was given writes nothing. It may be asked more than once.
        What it raises is raised, and changes nothing.
        """

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        """Put what the rule makes of a measurement in its place, as `change` does; both of them."""

    def measured(self, document_id: str, key: str) -> Measurement | None: ...

    def measurements(self, since: float | None, until: float | None) -> list[Measurement]: ...

    def close(self) -> None:
        """Let go of what is open; the next call opens it again."""


class Reviews:
    """The reviews of one folder."""

    def __init__(self, out: Path, shelf: Shelf) -> None:
        self.out = out
        self._shelf = shelf

    def get(self, document_id: str) -> Review | None:
        found = self._shelf.get(document_id)
        return None if found is None else self._with_whole_paths(found)

    def upsert(
        self,
        document_id: str,
        *,
        file_path: str,
        extracted: Mapping[str, Any],
        parquet_path: str | Path,
        json_path: str | Path,
        now: float | None = None,
    ) -> Review:
        """Take in what was extracted. The same again changes nothing, not even a time.

        What a person corrected stays. An approved review becomes pending again when the
        content, or a field that no person corrected, is no longer what was approved.
        """
        at = time.time() if now is None else now
        paths = self._relative(parquet_path), self._relative(json_path)

        def rule(before: Review | None) -> Review:
            after = renewed(before, document_id, file_path, extracted, paths, at)
            if before is not None and before.parquet_path != after.parquet_path:
                # It is in another partition now. Before the review forgets the old one: whoever
                # dies in between finds it here again. A row may say anything: only what is a
                # result of this document is deleted.
                old = self.out / before.parquet_path
                if is_result("parquet", self.out, document_id, old):
                    remove(old)
            return after

        return self._with_whole_paths(self._shelf.change(document_id, rule))

    def correct(
        self, document_id: str, changes: Mapping[str, Any], *, by: str, now: float | None = None
    ) -> Review:
        """Set fields by hand and lock them. `NotFound`, `ReviewError`."""
        at = time.time() if now is None else now
        return self._decide(document_id, lambda before: corrected(before, changes, by, at))

    def approve(self, document_id: str, *, by: str, now: float | None = None) -> Review:
        """A second approval changes nothing. Raises `NotFound`."""
        at = time.time() if now is None else now
        return self._decide(document_id, lambda before: approved(before, by, at))

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        """Change the measurement of one processing by a rule; gives it before and after."""
        return self._shelf.measure(document_id, key, rule)

    def measured(self, document_id: str, key: str) -> Measurement | None:
        """The measurement of one processing; to look makes no file."""
        return self._shelf.measured(document_id, key)

    def measurements(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[Measurement]:
        """By the time they finished, from `since` on and before `until`."""
        return self._shelf.measurements(since, until)

    def close(self) -> None:
        """Let go of what is open; the next call opens it again."""
        self._shelf.close()

    def _decide(self, document_id: str, decision: Callable[[Review], Review]) -> Review:
        def rule(before: Review | None) -> Review:
            if before is None:
                raise NotFound(f"no review of '{document_id}' in {self.out}")
            return decision(before)

        rule(self._shelf.get(document_id))  # to decide on nothing makes no file either
        return self._with_whole_paths(self._shelf.change(document_id, rule))

    # In the database they are relative, so that a folder can be moved or copied with its reviews.

    def _relative(self, path: str | Path) -> str:
        return str(Path(path).relative_to(self.out))

    def _with_whole_paths(self, review: Review) -> Review:
        return replace(
            review,
            parquet_path=str(self.out / review.parquet_path),
            json_path=str(self.out / review.json_path),
        )

    # Last, since it takes the name of the type away from what comes after it.
    def list(
        self,
        status: str | None = None,
        *,
        prefix: str = "",
        limit: int | None = None,
        after: str = "",
    ) -> list[Review]:
        """In the order of ids: reviews whose id begins with `prefix` and comes after `after`."""
        if status is not None and status not in STATUSES:
            raise ReviewError(f"no status '{status}'; there are: {', '.join(STATUSES)}")
        found = self._shelf.page(status, prefix, limit, after)
        return [self._with_whole_paths(review) for review in found]


# --- the rules ---------------------------------------------------------------------------------


def renewed(
    before: Review | None,
    document_id: str,
    file_path: str,
    extracted: Mapping[str, Any],
    paths: tuple[str, str],
    now: float,
) -> Review:
    """The review after an extraction."""
    found = {name: extracted[name] for name in FIELDS}
    new = Review(
        document_id=document_id,
        file_path=file_path,
        sha256=extracted["sha256"],
        extractor=extracted["extractor"],
        fields=found,
        locked=(),
        status=PENDING,
        approved_by=None,
        corrected_by=None,
        confidence=extracted["confidence"],
        parquet_path=paths[0],
        json_path=paths[1],
        created_at=now,
        updated_at=now,
        corrected_at=None,
    )
    if before is None:
        return new
    after = replace(
        new,
        fields=found | {name: before.fields[name] for name in before.locked},
        locked=before.locked,
        status=before.status,
        approved_by=before.approved_by,
        corrected_by=before.corrected_by,
        created_at=before.created_at,
        updated_at=before.updated_at,
        corrected_at=before.corrected_at,
    )
    if after == before:
        return before
    if (after.sha256, after.fields) != (before.sha256, before.fields):
        after = replace(after, status=PENDING, approved_by=None)
    return replace(after, updated_at=now)


def corrected(before: Review, changes: Mapping[str, Any], by: str, now: float) -> Review:
    """The review after a person has set some of its fields."""
    values = _checked(before, changes)
    fields = before.fields | values
    locked = tuple(name for name in FIELDS if name in before.locked or name in values)
    if (fields, locked) == (before.fields, before.locked):
        return before
    return replace(
        before, fields=fields, locked=locked, corrected_by=by, corrected_at=now, updated_at=now
    )


def approved(before: Review, by: str, now: float) -> Review:
    """The review after an approval."""
    if before.status == APPROVED:
        return before
    return replace(before, status=APPROVED, approved_by=by, updated_at=now)


def _checked(before: Review, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The new values as the fields have them. Raises `ReviewError` with every problem."""
    from pydantic import ValidationError

    from dovetail.documents.fields import Fields

    if not changes:
        raise ReviewError(f"nothing to correct; name a field: {', '.join(FIELDS)}")
    problems = [_unknown(name) for name in changes if name not in FIELDS]
    known = {name: value for name, value in changes.items() if name in FIELDS}
    try:
        valid = Fields.model_validate({**before.fields, **known, "confidence": before.confidence})
    except ValidationError as error:
        problems += [
            f"{'.'.join(str(part) for part in problem['loc'])}: "
            f"{problem['msg'].removeprefix('Value error, ')}, not {problem['input']!r}"
            for problem in error.errors(include_url=False, include_context=False)
        ]
    if problems:
        raise ReviewError("; ".join(problems))
    values = valid.model_dump(mode="json")
    return {name: values[name] for name in known}


def _unknown(name: str) -> str:
    near = get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(FIELDS)}"
    return f"no field '{name}'; {hint}"


def _rfc3339(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


# --- the reviews that are open in this process -------------------------------------------------

_open: OrderedDict[tuple[Path, str | None], Reviews] = OrderedDict()
_opening = threading.Lock()
_of_the_parent: list[object] = []


def open_reviews(out: str | Path) -> Reviews:
    """The reviews of a folder: in a file there, or in PostgreSQL if DOVETAIL_DATABASE_URL is set.

    One for each folder, kept by the process; nothing is made before something is written.
    """
    url, sync = _settings(os.environ.get(URL_VARIABLE), os.environ.get(SYNC_VARIABLE), Path.cwd())
    place = Path(out).absolute(), url
    with _opening:
        found = _open.get(place)
        if found is None:
            found = _open[place] = Reviews(place[0], _shelf(*place, sync))
            if len(_open) > MOST_OPEN:
                _open.popitem(last=False)[1].close()
        else:
            _open.move_to_end(place)
    return found


@lru_cache(maxsize=8)
def _settings(url: str | None, sync: str | None, folder: Path) -> tuple[str | None, str]:
    """The two that matter here; read once, and again where what they depend on is another."""
    from dovetail.config import load_settings

    settings = load_settings()
    return settings.database_url, settings.db_sync


def _shelf(out: Path, url: str | None, sync: str) -> Shelf:
    if url is None:
        from dovetail.documents.reviews_sqlite import SqliteShelf

        return SqliteShelf(out / FILE, sync)
    from dovetail.documents.reviews_postgres import PostgresShelf

    return PostgresShelf(url, out)


def close_reviews() -> None:
    """Close everything that is open in this process; the next use opens it again."""
    with _opening:
        while _open:
            _open.popitem()[1].close()
    if "dovetail.documents.reviews_postgres" in sys.modules:
        from dovetail.documents.reviews_postgres import close_databases

        close_databases()


def _leave_to_the_parent() -> None:
    """After a fork: neither used nor closed here, for a database must not be carried across."""
    global _open, _opening
    _of_the_parent.append(_open)
    _open, _opening = OrderedDict(), threading.Lock()


atexit.register(close_reviews)
os.register_at_fork(after_in_child=_leave_to_the_parent)
