"""Joins the fields of the pages to the fields of the document.

The head of a document (type, vendor, date) is on its first page, and its total on its last one. So
the first page, or for the total the last page, decides, unless another page has a clearly higher
confidence. If pages contradict each other, the field has a low confidence, and a warning names the
pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from dovetail import PermanentError
from dovetail.documents.extraction import is_result
from dovetail.documents.fields import MAX_LINE_ITEMS, Confidences, Fields, LineItem, overall

CLEAR_MARGIN = 0.2
"""How much higher the confidence of another page must be, so that this page decides the field."""
DISPUTED = 0.5
"""The highest confidence of a field in which pages contradict each other: a person checks it."""
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
    confidence: float


def join(given: Any, run_id: str) -> dict[str, Any]:
    """The record of the document, in the form of `extraction.extract`.

    `given` has the outputs of `documents.extract_page` in the order of the pages; None stands for a
    page that failed for good. Raises `PermanentError` if no page has fields.
    """
    outputs = _checked(given)
    count, missing = len(outputs), _MissingPages(len(outputs))
    read: list[tuple[int, Mapping[str, Any]]] = []
    for number, output in enumerate(outputs, 1):
        if output is None:
            missing.add(number, "failed", "its extraction failed")
        elif error := output.get(LEFT_OUT_KEY):
            missing.add(number, error["type"], error["message"])
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
    error = output.get(LEFT_OUT_KEY) if isinstance(output, dict) else None
    return isinstance(error, dict) and {"type", "message"} <= error.keys()


def _fields(record: Mapping[str, Any]) -> Fields:
    try:
        return Fields.model_validate({name: record[name] for name in _FIELDS})
    except ValidationError as error:
        raise PermanentError(f"a page has invalid fields: {error}", type="invalid_config") from None


def merge(pages: Sequence[Page]) -> tuple[Fields, list[str]]:
    """The fields of a document, made of the fields of its pages, with warnings.

    The order of the pages decides, never the order in which they were extracted.
    """
    if len(pages) == 1:
        return pages[0].fields, []
    warnings: list[str] = []
    typed = [page for page in pages if page.fields.type != "other"]
    kind = _chosen("type", typed or pages, warnings)
    # A price in the annex of a letter is not its total. But a letter may come before an invoice:
    # then the pages contradict each other in the type.
    without_tables = kind.value in _NO_TABLES and not warnings
    vendor = _chosen("vendor", pages, warnings)
    date = _chosen("date", pages, warnings)
    priced = [page for page in pages if not without_tables or page.fields.type == kind.value]
    total = _chosen("total", list(reversed(priced)), warnings)
    # The page of the total decides the currency, if it names one.
    beside = [page for page in priced if page.number == total.page and page.fields.currency]
    currency = _chosen("currency", beside or priced, warnings)
    if total.value is None:
        currency = _Choice(0, None, 0.0)
    items = [item for page in priced for item in page.fields.line_items]
    if len(items) > MAX_LINE_ITEMS:
        warnings.append(f"only the first {MAX_LINE_ITEMS} of {len(items):,} line items are kept")
    confidences = {
        "type": kind.confidence,
        "vendor": vendor.confidence,
        "date": date.confidence,
        "currency": currency.confidence,
        "total": total.confidence,
        "line_items": _confidence_of_items(priced),
    }
    if total.value is not None and _add_up(items, total.value):
        confidences["line_items"] = max(confidences["line_items"], total.confidence)
    merged = Fields(
        type=kind.value,
        vendor=vendor.value,
        date=date.value,
        currency=currency.value,
        total=total.value,
        line_items=items[:MAX_LINE_ITEMS],
        confidence=overall(kind.value, confidences),
        confidences=Confidences(**confidences),
    )
    return merged, warnings


def _chosen(name: str, pages: Iterable[Page], warnings: list[str]) -> _Choice:
    """The value of a field on the first of these pages, unless another page is clearly surer."""
    found = [
        _Choice(page.number, value, getattr(page.fields.confidences, name))
        for page in pages
        if (value := getattr(page.fields, name)) is not None
    ]
    if not found:
        return _Choice(0, None, 0.0)
    best = found[0]
    for other in found[1:]:
        if other.confidence > best.confidence + CLEAR_MARGIN:
            best = other
    highest = max(other.confidence for other in found if other.value == best.value)
    rivals = [one for one in found if one.value != best.value and one.confidence >= highest]
    if not rivals:
        return best._replace(confidence=highest)
    both = sorted([best, rivals[0]], key=lambda one: one.page)
    words = " and ".join(f"page {one.page} has {str(one.value)[:_MAX_SHOWN]}" for one in both)
    warnings.append(f"its pages contradict each other in {name}: {words}")
    return best._replace(confidence=min(highest, DISPUTED))


def _confidence_of_items(pages: Sequence[Page]) -> float:
    """The mean over the pages, each weighted by the number of its line items, if there are any."""
    weights = [len(page.fields.line_items) for page in pages]
    if not any(weights):
        weights = [1] * len(pages)
    weighted = zip(weights, pages, strict=True)
    total = sum(weight * page.fields.confidences.line_items for weight, page in weighted)
    return round(total / sum(weights), 4)


def _add_up(items: Sequence[LineItem], total: float) -> bool:
    """Whether the amounts of the line items add up to the total, to the cent."""
    amounts = [item.amount for item in items]
    if not amounts or None in amounts:
        return False
    return abs(math.fsum(amount for amount in amounts if amount is not None) - total) < _HALF_A_CENT


class _MissingPages:
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
