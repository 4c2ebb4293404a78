"""Reviews: one for each document, with the fields that were found and the corrections of people.

The rules are functions: they say what an extraction, a correction and an approval do to a review.
Two stores keep reviews, SQLite and PostgreSQL; each gives a rule exclusive access to its review.
The stores also keep the measurements, one for each run. All calls block, and may come from any
thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from dovetail import Conflict, DovetailError, NotFound, PermanentError
from dovetail.documents.files import is_result, read_file, remove
from dovetail.documents.metrics import Measurement, MeasuringRule


@cache
def statements(file: str) -> dict[str, str]:
    """The SQL statements of a file in this folder, by the names in its comments."""
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
MAX_OPEN = 16
"""Open stores per process; one more closes the least recently used."""


class ReviewError(DovetailError):
    """A correction that names no field, or a value that the field cannot have."""

    type = "invalid_review"


@dataclass(frozen=True, slots=True)
class Review:
    """The review of one document. Times are seconds since 1970."""

    document_id: str
    file_path: str
    sha256: str
    extractor: str
    fields: dict[str, Any]
    locked: tuple[str, ...]
    """The fields that a person has corrected: extractions no longer change them."""
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
        data = asdict(self)
        for name in ("created_at", "updated_at", "corrected_at"):
            data[name] = _rfc3339(data[name])
        return {**data, "locked": list(self.locked)}


def extraction_of(review: Review) -> dict[str, Any]:
    """What the JSON file of its document says, such as `confidences` and `warnings`; empty if the
    file is gone."""
    with suppress(OSError, ValueError, PermanentError):
        found = orjson.loads(read_file(Path(review.json_path)))
        if isinstance(found, dict):
            return found
    return {}


T = TypeVar("T")
Rule = Callable[[Review | None], Review]


Change = tuple[Measurement | None, Measurement]
"""A measurement before and after; the same object if nothing was written."""


class ReviewStore(Protocol):
    """Keeps reviews and measurements; paths in reviews are relative to the folder of results."""

    def get(self, document_id: str) -> Review | None: ...

    def page(
        self, status: str | None, prefix: str, limit: int | None, after: str
    ) -> list[Review]: ...

    def counts(self) -> dict[str, int]:
        """How many reviews have each status."""

    def change(self, document_id: str, rule: Rule) -> Review:
        """Replace a review by the result of the rule, with no other change in between.

        A rule that returns its argument writes nothing. It may be called more than once. An error
        of the rule is raised, and nothing is changed.
        """

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        """As `change`, for a measurement; returns it before and after."""

    def measured(self, document_id: str, key: str) -> Measurement | None: ...

    def measurements(self, since: float | None, until: float | None) -> list[Measurement]: ...

    def close(self) -> None:
        """Close what is open; the next call opens it again."""


class SqlReviewStore(ABC):
    """A `ReviewStore` in two tables. A database brings a way to read and a way to update."""

    no_limit: int | None
    """What `LIMIT` takes for all rows."""

    def get(self, document_id: str) -> Review | None:
        rows = self._read("get", document_id)
        return _review_of(rows[0]) if rows else None

    def page(self, status: str | None, prefix: str, limit: int | None, after: str) -> list[Review]:
        most = self.no_limit if limit is None else limit
        return [_review_of(row) for row in self._read("page", status, after, prefix, most)]

    def counts(self) -> dict[str, int]:
        return {row[0]: row[1] for row in self._read("counts")}

    def change(self, document_id: str, rule: Rule) -> Review:
        _, after = self._update("get", (document_id,), _review_of, rule, "put", _row_of)
        return after

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        keys = document_id, key
        return self._update("measured", keys, _measurement_of, rule, "measure", astuple)

    def measured(self, document_id: str, key: str) -> Measurement | None:
        rows = self._read("measured", document_id, key)
        return _measurement_of(rows[0]) if rows else None

    def measurements(self, since: float | None, until: float | None) -> list[Measurement]:
        first = float("-inf") if since is None else since
        last = float("inf") if until is None else until
        return [_measurement_of(row) for row in self._read("measurements", first, last)]

    @abstractmethod
    def _read(self, name: str, *values: Any) -> list[Any]:
        """The rows of the statement with this name."""

    @abstractmethod
    def _update(
        self,
        get: str,
        keys: tuple[str, ...],
        decode: Callable[[Any], T],
        rule: Callable[[T | None], T],
        put: str,
        encode: Callable[[T], tuple[Any, ...]],
    ) -> tuple[T | None, T]:
        """Read a row, apply the rule and write the result, in one transaction.

        Returns the row before and after. A rule that returns its argument writes nothing.
        """


def _measurement_of(row: Any) -> Measurement:
    return Measurement(*row)


def _review_of(row: Any) -> Review:
    values = list(row)
    values[4:6] = orjson.loads(row[4]), tuple(orjson.loads(row[5]))
    return Review(*values)


def _row_of(review: Review) -> tuple[Any, ...]:
    return (
        *(review.document_id, review.file_path, review.sha256, review.extractor),
        *(orjson.dumps(review.fields).decode(), orjson.dumps(review.locked).decode()),
        *(review.status, review.approved_by, review.corrected_by, review.confidence),
        *(review.parquet_path, review.json_path),
        *(review.created_at, review.updated_at, review.corrected_at),
    )


class Reviews:
    """The reviews of one folder."""

    def __init__(self, out: Path, store: ReviewStore) -> None:
        self.out = out
        self._store = store

    def get(self, document_id: str) -> Review | None:
        found = self._store.get(document_id)
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
        """Create or update the review after an extraction. An equal one changes nothing.

        Corrected fields stay. An approved review becomes pending again if the content or a
        field differs from what was approved.
        """
        at = time.time() if now is None else now
        paths = self._relative(parquet_path), self._relative(json_path)

        def rule(before: Review | None) -> Review:
            after = renewed(before, document_id, file_path, extracted, paths, at)
            if before is not None and before.parquet_path != after.parquet_path:
                # The file is in another partition now. Delete the old file before the review
                # changes, so that a retry still knows its path. The path of a row is not trusted:
                # only a result of this document is deleted.
                old = self.out / before.parquet_path
                if is_result("parquet", self.out, document_id, old):
                    remove(old)
            return after

        return self._with_whole_paths(self._store.change(document_id, rule))

    def correct(
        self,
        document_id: str,
        changes: Mapping[str, Any],
        *,
        by: str,
        seen: str | None = None,
        now: float | None = None,
    ) -> Review:
        """Set fields and lock them. Raises `NotFound`, `ReviewError`, and `Conflict` if the review
        was changed after it was `seen`: that is its `updated_at` as `as_dict` has it."""
        at = time.time() if now is None else now
        return self._decide(document_id, lambda before: corrected(before, changes, by, at), seen)

    def approve(
        self,
        document_id: str,
        changes: Mapping[str, Any] | None = None,
        *,
        by: str,
        seen: str | None = None,
        now: float | None = None,
    ) -> Review:
        """Approve, after these corrections if there are any; a second approval changes nothing.

        Raises as `correct`.
        """
        at = time.time() if now is None else now

        def decision(before: Review) -> Review:
            return approved(corrected(before, changes, by, at) if changes else before, by, at)

        return self._decide(document_id, decision, seen)

    def counts(self) -> dict[str, int]:
        """How many reviews have each status; creates no file."""
        return dict.fromkeys(STATUSES, 0) | self._store.counts()

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        """Change the measurement of one run by a rule; returns it before and after."""
        return self._store.measure(document_id, key, rule)

    def measured(self, document_id: str, key: str) -> Measurement | None:
        """The measurement of one run; creates no file."""
        return self._store.measured(document_id, key)

    def measurements(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[Measurement]:
        """Ordered by their end, from `since` on and before `until`."""
        return self._store.measurements(since, until)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self._store.close()

    def _decide(
        self, document_id: str, decision: Callable[[Review], Review], seen: str | None = None
    ) -> Review:
        def rule(before: Review | None) -> Review:
            if before is None:
                raise NotFound(f"no review of '{document_id}' in {self.out}")
            if seen is not None and seen != _rfc3339(before.updated_at):
                raise Conflict(f"the review of '{document_id}' was changed since; look at it again")
            return decision(before)

        rule(self._store.get(document_id))  # without a review, create no file
        return self._with_whole_paths(self._store.change(document_id, rule))

    # Paths are relative in the database, so that a folder can be moved or copied with its reviews.

    def _relative(self, path: str | Path) -> str:
        return str(Path(path).relative_to(self.out))

    def _with_whole_paths(self, review: Review) -> Review:
        return replace(
            review,
            parquet_path=str(self.out / review.parquet_path),
            json_path=str(self.out / review.json_path),
        )

    # Last, because it hides the type `list` from the methods after it.
    def list(
        self,
        status: str | None = None,
        *,
        prefix: str = "",
        limit: int | None = None,
        after: str = "",
    ) -> list[Review]:
        """Ordered by document id; only ids that begin with `prefix` and follow `after`."""
        if status is not None and status not in STATUSES:
            raise ReviewError(f"no status '{status}'; there are: {', '.join(STATUSES)}")
        found = self._store.page(status, prefix, limit, after)
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
    """The validated new values. Raises `ReviewError` with every problem."""
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


# --- open in this process ----------------------------------------------------------------------

_open: OrderedDict[tuple[Path, str | None], Reviews] = OrderedDict()
_opening = threading.Lock()
_of_the_parent: list[object] = []


def open_reviews(out: str | Path) -> Reviews:
    """The reviews of a folder: in a file there, or in PostgreSQL if DOVETAIL_DATABASE_URL is set.

    One per folder and process. Reading creates nothing.
    """
    url, sync = _settings(os.environ.get(URL_VARIABLE), os.environ.get(SYNC_VARIABLE), Path.cwd())
    place = Path(out).absolute(), url
    with _opening:
        found = _open.get(place)
        if found is None:
            found = _open[place] = Reviews(place[0], _store(*place, sync))
            if len(_open) > MAX_OPEN:
                _open.popitem(last=False)[1].close()
        else:
            _open.move_to_end(place)
    return found


@lru_cache(maxsize=8)
def _settings(url: str | None, sync: str | None, folder: Path) -> tuple[str | None, str]:
    """Database URL and sync mode, cached by what they depend on."""
    from dovetail.config import load_settings

    settings = load_settings()
    return settings.database_url, settings.db_sync


def _store(out: Path, url: str | None, sync: str) -> ReviewStore:
    if url is None:
        from dovetail.documents.reviews_sqlite import SqliteReviewStore

        return SqliteReviewStore(out / FILE, sync)
    from dovetail.documents.reviews_postgres import PostgresReviewStore

    return PostgresReviewStore(url, out)


def close_reviews() -> None:
    """Close everything that is open in this process; the next call opens it again."""
    with _opening:
        while _open:
            _open.popitem()[1].close()
    if "dovetail.documents.reviews_postgres" in sys.modules:
        from dovetail.documents.reviews_postgres import close_databases

        close_databases()


def _leave_to_the_parent() -> None:
    """After a fork: neither use nor close the connections of the parent."""
    global _open, _opening
    _of_the_parent.append(_open)
    _open, _opening = OrderedDict(), threading.Lock()


atexit.register(close_reviews)
os.register_at_fork(after_in_child=_leave_to_the_parent)
