"""The fields of the pages of a document become the fields of the document.

The head of a document (type, vendor, date) is on its first page, and its total on its last one. So
the first page, or for the total the last page, decides, unless another page is clearly surer.
Where pages contradict each other, the field is not sure, and a warning names the pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from dovetail import PermanentError
from dovetail.documents.extraction import is_result
from dovetail.documents.fields import MAX_LINE_ITEMS, Confidences, Fields, LineItem, overall

CLEARLY_SURER = 0.2
"""By so much another page must be surer to decide a field."""
DISPUTED = 0.5
"""The highest confidence of a field that pages contradict: a person looks at the document."""
BLANK = "empty_file"
"""The type of the error of a page without text."""
LEFT_OUT = frozenset({"corrupt", BLANK})
"""A page with such an error is left out: the same bytes give the same error, on every worker.
`no_ocr` is not among them: another worker may have tesseract, and a retry may find it."""
LEFT_OUT_KEY = "left_out"
"""In the output of such a page: the type and the message of its error."""
_NO_TABLES = ("contract", "letter")
_MAX_LISTED = 10
_MAX_SHOWN = 60
_HALF_A_CENT = 0.005

_FIELDS = tuple(Fields.model_fields)


class Page(NamedTuple):
    number: int
    fields: Fields


class _Choice(NamedTuple):
    page: int
    value: Any
    sure: float


def joined(given: Any, run_id: str) -> dict[str, Any]:
    """The record of the document, in the form of `extraction.extract`.

    It is given the outputs of `documents.extract_page`, in the order of the pages; None is a page
    that failed for good. Raises `PermanentError` if no page has fields.
    """
    outputs = _checked(given)
    count, missing = len(outputs), _Missing(len(outputs))
    read: list[tuple[int, Mapping[str, Any]]] = []
    for number, output in enumerate(outputs, 1):
        if output is None:
            missing.add(number, "failed", "its extraction failed")
        elif said := output.get(LEFT_OUT_KEY):
            missing.add(number, said["type"], said["message"])
        else:
            read.append((number, output))
    if not read:
        raise missing.error()
    if len(extractors := {record["extractor"] for _, record in read}) > 1:
        raise PermanentError(
            f"its pages were extracted by {' and '.join(sorted(extractors))}; set the same "
            "DOVETAIL_LLM_BASE_URL and DOVETAIL_LLM_MODEL on all workers, or the param extractor",
            type="other_extractor",
        )
    merged, warnings = merge([Page(number, _fields(record)) for number, record in read])
    for number, record in read:
        named = "" if count == 1 else f"page {number}: "
        warnings += [f"{named}{warning}" for warning in record["warnings"]]
    # It counts as known content if no page was extracted by this run.
    mine = [record for _, record in read if record["run_id"] == run_id]
    origin = min(mine or [record for _, record in read], key=lambda one: one["started_at"])
    first = read[0][1]
    return {
        **{name: first[name] for name in ("sha256", "kind", "extractor")},
        "pages": count,
        "characters": sum(record["characters"] for _, record in read),
        "warnings": [*missing.warnings(), *warnings],
        **merged.model_dump(),
        "run_id": origin["run_id"],
        "started_at": origin["started_at"],
    }


def _checked(given: Any) -> list[dict[str, Any] | None]:
    if isinstance(given, list) and all(map(_is_page, given)):
        return given
    raise PermanentError(
        "documents.join_pages: its one parent must be a node of documents.extract_page that has "
        "for_each",
        type="invalid_config",
    )


def _is_page(output: Any) -> bool:
    if output is None or is_result(output):
        return True
    said = output.get(LEFT_OUT_KEY) if isinstance(output, dict) else None
    return isinstance(said, dict) and {"type", "message"} <= said.keys()


def _fields(record: Mapping[str, Any]) -> Fields:
    try:
        return Fields.model_validate({name: record[name] for name in _FIELDS})
    except ValidationError as error:
        raise PermanentError(f"a page has invalid fields: {error}", type="invalid_config") from None


def merge(pages: Sequence[Page]) -> tuple[Fields, list[str]]:
    """The fields of a document by those of its pages, with warnings. A single page is the document.

    The order of the pages decides, never the order in which they were extracted.
    """
    if len(pages) == 1:
        return pages[0].fields, []
    warnings: list[str] = []
    typed = [page for page in pages if page.fields.type != "other"]
    kind = _chosen("type", typed or pages, warnings)
    # A price in the annex of a letter is not its total. But an invoice may have a letter before it:
    # then the pages contradict each other in the type.
    without_tables = kind.value in _NO_TABLES and not warnings
    vendor = _chosen("vendor", pages, warnings)
    date = _chosen("date", pages, warnings)
    priced = [page for page in pages if not without_tables or page.fields.type == kind.value]
    total = _chosen("total", list(reversed(priced)), warnings)
    # The currency is that of the total, where its page names one.
    beside = [page for page in priced if page.number == total.page and page.fields.currency]
    currency = _chosen("currency", beside or priced, warnings)
    if total.value is None:
        currency = _Choice(0, None, 0.0)
    items = [item for page in priced for item in page.fields.line_items]
    if len(items) > MAX_LINE_ITEMS:
        warnings.append(f"only the first {MAX_LINE_ITEMS} of {len(items):,} line items are kept")
    sure = {
        "type": kind.sure,
        "vendor": vendor.sure,
        "date": date.sure,
        "currency": currency.sure,
        "total": total.sure,
        "line_items": _sure_of_items(priced),
    }
    if total.value is not None and _add_up(items, total.value):
        sure["line_items"] = max(sure["line_items"], total.sure)
    merged = Fields(
        type=kind.value,
        vendor=vendor.value,
        date=date.value,
        currency=currency.value,
        total=total.value,
        line_items=items[:MAX_LINE_ITEMS],
        confidence=overall(kind.value, sure),
        confidences=Confidences(**sure),
    )
    return merged, warnings


def _chosen(name: str, pages: Iterable[Page], warnings: list[str]) -> _Choice:
    """The value of a field: that of the first of these pages, unless another is clearly surer."""
    found = [
        _Choice(page.number, value, getattr(page.fields.confidences, name))
        for page in pages
        if (value := getattr(page.fields, name)) is not None
    ]
    if not found:
        return _Choice(0, None, 0.0)
    best = found[0]
    for other in found[1:]:
        if other.sure > best.sure + CLEARLY_SURER:
            best = other
    same = [other for other in found if other.value == best.value]
    sure = max(other.sure for other in same)
    rivals = [other for other in found if other.value != best.value and other.sure >= sure]
    if not rivals:
        return best._replace(sure=sure)
    said = sorted([best, rivals[0]])
    words = " and ".join(f"page {one.page} has {str(one.value)[:_MAX_SHOWN]}" for one in said)
    warnings.append(f"its pages contradict each other in {name}: {words}")
    return best._replace(sure=min(sure, DISPUTED))


def _sure_of_items(pages: Sequence[Page]) -> float:
    """The mean of the pages, each weighted by its line items; without any, of all pages."""
    weights = [len(page.fields.line_items) for page in pages]
    if not any(weights):
        weights = [1] * len(pages)
    weighted = zip(weights, pages, strict=True)
    total = sum(weight * page.fields.confidences.line_items for weight, page in weighted)
    return round(total / sum(weights), 4)


def _add_up(items: Sequence[LineItem], total: float) -> bool:
    """Whether the line items of all pages are the total, to the cent."""
    amounts = [item.amount for item in items]
    if not amounts or None in amounts:
        return False
    return abs(math.fsum(amount for amount in amounts if amount is not None) - total) < _HALF_A_CENT


class _Missing:
    """The pages without fields, by the reason."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pages: dict[str, list[int]] = {}
        self._messages: dict[str, str] = {}

    def add(self, number: int, kind: str, message: str) -> None:
        self._pages.setdefault(kind, []).append(number)
        self._messages.setdefault(kind, message)

    def warnings(self) -> list[str]:
        """A blank page loses nothing, so it has no warning."""
        return [
            f"{len(numbers)} of {self._count} pages {'is' if len(numbers) == 1 else 'are'} left "
            f"out ({_listed(numbers)}): {self._messages[kind]}"
            for kind, numbers in self._pages.items()
            if kind != BLANK
        ]

    def error(self) -> PermanentError:
        """Why there is nothing to join; a blank page is the reason only if all are blank."""
        kinds = sorted(self._pages, key=lambda kind: kind == BLANK)
        if not kinds:
            return PermanentError("the document has no page", type="corrupt")
        message = self._messages[kinds[0]]
        if self._count > 1:
            message = f"none of its {self._count} pages gives any text: {message}"
        return PermanentError(message, type=kinds[0])


def _listed(numbers: Sequence[int]) -> str:
    more = len(numbers) - _MAX_LISTED
    listed = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return f"{listed} and {more} more" if more > 0 else listed
