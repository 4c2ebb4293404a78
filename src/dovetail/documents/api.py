"""The reviews over HTTP: what was found in documents, to be corrected and approved.

A server shows one folder of results, its own `DOVETAIL_DOCUMENTS_OUT`, and opens every file
within its roots, as `files.py` does for all of the pipeline. The path of a document comes from the
params of a run, so a caller could name any file in the roots. So a file is given out only if its
name is that of a document, no part of its path is hidden, and its content is what was reviewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from dovetail.api.problems import Refusal, invalid_field
from dovetail.api.request_body import TEXT, BodyField, RequestBody
from dovetail.api.responses import (
    AT,
    ENDED,
    Cursor,
    Here,
    Limit,
    Reply,
    Time,
    json_answer,
    page_size,
    reply,
)
from dovetail.api.security import actor_of
from dovetail.api.service import ApiService
from dovetail.core.errors import Conflict, NotFound, PermanentError, RetryableError, StoreError
from dovetail.documents.files import default_out, is_file_name
from dovetail.documents.metrics import HANDLERS, TARGET, settle_ended, statistics_of
from dovetail.documents.reading import Reading, has_known_ending, load, parse
from dovetail.documents.reviews import (
    FIELDS,
    Review,
    ReviewError,
    Reviews,
    extraction_of,
    open_reviews,
)

router = APIRouter(prefix="/documents", tags=["documents"], responses={409: {}})

T = TypeVar("T")

DOCUMENT = "invoice-779c2fa1fc"
MAX_NAME = 100
MAX_ASKED_RUNS = 500
"""Of so many documents, the last ones, a request for statistics asks how their runs ended."""
PICTURES = {"png": "image/png", "jpeg": "image/jpeg"}
"""What a browser may show. Any other file is only to be saved: a page in it must not run here."""

ReviewStatus = Literal["pending", "approved"]


class DocumentsInUse(Reply):
    in_use: bool = Field(
        description="whether a worker has the handlers, or there are reviews: pages show them then"
    )
    out: str = Field(description="the folder of results that this server shows")
    counts: dict[ReviewStatus, int]


class ReviewItem(Reply):
    document_id: str
    file_path: str
    sha256: str
    extractor: str
    fields: dict[str, Any]
    locked: list[str] = Field(description="the fields that a person has corrected")
    status: ReviewStatus
    approved_by: str | None
    corrected_by: str | None
    confidence: float
    parquet_path: str
    json_path: str
    created_at: Time
    updated_at: Time
    corrected_at: Time | None


class ReviewPage(Reply):
    items: list[ReviewItem]
    next_cursor: str | None


class ReviewDetail(ReviewItem):
    confidences: dict[str, float] = Field(description="how sure the extraction was of each field")
    warnings: list[str]
    has_picture: bool = Field(description="whether its file is a picture that a browser can show")


class DocumentText(Reply):
    document_id: str
    kind: str | None
    pages: int | None
    text: str | None = Field(description="null if it cannot be read here; `problem` says why")
    problem: str | None


class DocumentStatistics(Reply):
    documents: int
    completed: int
    failed: int
    cached: int
    unfinished: int
    docs_per_hour: float | None
    target: float
    met: bool | None
    busy_seconds: float
    windows: int
    first_at: Time | None
    last_at: Time | None
    p50_seconds: float | None
    p95_seconds: float | None
    success_rate: float | None
    mean_confidence: float | None
    cached_share: float | None
    sentences: list[str] = Field(description="the same for people, the answer first")


_REVIEW: dict[str, Any] = {
    "document_id": DOCUMENT,
    "file_path": "/srv/inbox/invoice.pdf",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "extractor": "rules-1",
    "fields": {
        "type": "invoice",
        "vendor": "Northwind Paper & Ink Ltd",
        "date": "2026-03-16",
        "currency": "GBP",
        "total": 621.36,
        "line_items": [],
    },
    "locked": [],
    "status": "pending",
    "approved_by": None,
    "corrected_by": None,
    "confidence": 0.94,
    "parquet_path": "/srv/documents/parquet/day=2026-03-16/type=invoice/invoice-779c2fa1fc.parquet",
    "json_path": "/srv/documents/json/invoice-779c2fa1fc.json",
    "created_at": AT,
    "updated_at": ENDED,
    "corrected_at": None,
}
_DETAIL = {**_REVIEW, "confidences": {"total": 0.9}, "warnings": [], "has_picture": False}
_BYTES = {"type": "string", "format": "binary"}
_NAME = TEXT._replace(
    expected=f"a name of 1 to {MAX_NAME} characters",
    fits=lambda value: isinstance(value, str) and 0 < len(value.strip()) <= MAX_NAME,
    schema={
        "type": ["string", "null"],
        "minLength": 1,
        "maxLength": MAX_NAME,
        "description": "who says so; default: the caller",
    },
)
_SEEN = TEXT._replace(
    schema={
        "type": ["string", "null"],
        "description": "`updated_at` of the review as you saw it: 409 if it was changed since",
    }
)
_CHANGES = BodyField(
    f"an object of fields, of {', '.join(FIELDS)}",
    lambda value: isinstance(value, dict),
    {"type": ["object", "null"], "description": "new values; a field that is null is emptied"},
)
_CORRECT = RequestBody(
    "CorrectionRequest",
    {
        "fields": _CHANGES._replace(required=True, schema={"type": "object"}),
        "by": _NAME,
        "seen": _SEEN,
    },
    {"fields": {"total": 12.5}, "by": "ada"},
)
_APPROVE = RequestBody(
    "ApprovalRequest", {"fields": _CHANGES, "by": _NAME, "seen": _SEEN}, {"by": "ada"}
)


async def _blocking(work: Callable[[], T]) -> T:
    """Work on files and databases, in a thread, with its errors as the API has them."""
    try:
        return await asyncio.to_thread(work)
    except ReviewError as error:
        raise invalid_field(str(error), "fields") from None
    except RetryableError as error:
        raise StoreError(str(error)) from error
    except PermanentError as error:
        if error.type == "not_allowed":
            raise Refusal(403, str(error)) from None
        raise Conflict(str(error)) from None


def _reviews() -> Reviews:
    return open_reviews(default_out())


def _found(document_id: str) -> Review:
    review = _reviews().get(document_id) if is_file_name(document_id) else None
    if review is None:
        raise NotFound("there is no review of such a document")
    return review


@router.get(
    "",
    summary="Whether documents are processed here",
    response_model=DocumentsInUse,
    responses={
        200: reply(
            {"in_use": True, "out": "/srv/documents", "counts": {"pending": 1, "approved": 5}}
        )
    },
)
async def documents(here: Here) -> Response:
    out = default_out()
    workers = await here.fleet.workers()
    known = any(name.startswith(HANDLERS) for one in workers for name in one["handlers"])
    counts = {"pending": 0, "approved": 0}
    if known or out.is_dir():  # else the pipeline is not in use: open no database
        counts = await _blocking(lambda: _reviews().counts())
    in_use = known or any(counts.values())
    return json_answer({"in_use": in_use, "out": str(out), "counts": counts})


@router.get(
    "/reviews",
    summary="List reviews, by the ids of their documents",
    response_model=ReviewPage,
    responses={200: reply({"items": [_REVIEW], "next_cursor": None})},
)
async def reviews(
    here: Here,
    status: Annotated[ReviewStatus | None, Query(description="only those in this state")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    size = page_size(limit)
    # One more than wanted says whether there are more.
    found = await _blocking(lambda: _reviews().list(status, limit=size + 1, after=cursor or ""))
    items = [review.as_dict() for review in found[:size]]
    after = items[-1]["document_id"] if len(found) > size else None
    return json_answer({"items": items, "next_cursor": after})


@router.get(
    "/reviews/{document_id}",
    summary="A review, with how sure the extraction was of each field",
    response_model=ReviewDetail,
    responses={200: reply(_DETAIL)},
)
async def review(document_id: str, here: Here) -> Response:
    return json_answer(await _blocking(lambda: _detail(_found(document_id))))


def _detail(review: Review) -> dict[str, Any]:
    kept = extraction_of(review)
    sure = kept.get("confidences")
    warnings = kept.get("warnings")
    return {
        **review.as_dict(),
        "confidences": {
            name: value
            for name, value in (sure.items() if isinstance(sure, dict) else ())
            if name in FIELDS and isinstance(value, int | float)
        },
        "warnings": [str(one) for one in warnings] if isinstance(warnings, list) else [],
        "has_picture": kept.get("kind") in PICTURES,
    }


@router.get(
    "/reviews/{document_id}/text",
    summary="The text of a document, as the extraction read it",
    response_model=DocumentText,
    responses={
        200: reply(
            {
                "document_id": DOCUMENT,
                "kind": "pdf",
                "pages": 1,
                "text": "Northwind Paper & Ink Ltd\nInvoice",
                "problem": None,
            }
        )
    },
)
async def text(document_id: str, here: Here) -> Response:
    def read() -> tuple[Reading | None, str | None]:
        review = _found(document_id)
        try:
            return parse(_content(review), Path(review.file_path)), None
        except (PermanentError, RetryableError) as error:
            return None, str(error)

    found, problem = await _blocking(read)
    return json_answer(
        {
            "document_id": document_id,
            "kind": None if found is None else found.kind,
            "pages": None if found is None else found.pages,
            "text": None if found is None else found.text,
            "problem": problem,
        }
    )


@router.get(
    "/reviews/{document_id}/file",
    summary="The document itself",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {"schema": _BYTES}}}},
)
async def file(document_id: str, here: Here) -> Response:
    content = await _blocking(lambda: _content(_found(document_id)))
    kind = next((kind for magic, kind in _PICTURE_MAGIC if content.startswith(magic)), None)
    if kind is not None:
        return Response(content, headers={"Content-Type": PICTURES[kind]})
    headers = {"Content-Disposition": "attachment"}
    return Response(content, headers=headers, media_type="application/octet-stream")


_PICTURE_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"))


def _content(review: Review) -> bytes:
    """The bytes of a document, if these are what was reviewed. Raises `PermanentError`."""
    path = Path(review.file_path)
    is_hidden = any(part.startswith(".") for part in path.parts)
    if is_hidden or not has_known_ending(path):
        raise PermanentError(
            f"{path} is not given out: only files that have the ending of a document, such as "
            ".pdf, and no hidden ones",
            type="not_allowed",
        )
    content = load(path)
    if sha256(content).hexdigest() != review.sha256:
        raise PermanentError(
            f"{path.name} was changed after it was processed; process it again", type="changed"
        )
    return content


@router.post(
    "/reviews/{document_id}/correct",
    summary="Set fields of a review; no extraction changes them after that",
    response_model=ReviewDetail,
    responses={200: reply(_DETAIL)},
    openapi_extra=_CORRECT.openapi,
)
async def correct(document_id: str, request: Request, here: Here) -> Response:
    return await _decided(document_id, request, here, _CORRECT, Reviews.correct)


@router.post(
    "/reviews/{document_id}/approve",
    summary="Say that the fields are right, after these corrections if there are any",
    response_model=ReviewDetail,
    responses={200: reply(_DETAIL)},
    openapi_extra=_APPROVE.openapi,
)
async def approve(document_id: str, request: Request, here: Here) -> Response:
    return await _decided(document_id, request, here, _APPROVE, Reviews.approve)


async def _decided(
    document_id: str,
    request: Request,
    here: ApiService,
    body: RequestBody,
    decide: Callable[..., Review],
) -> Response:
    changes, by, seen = (await body.read(request, here)).fields.values()
    name = by or actor_of(request)

    def work() -> dict[str, Any]:
        _found(document_id)
        return _detail(decide(_reviews(), document_id, changes, by=name, seen=seen))

    return json_answer(await _blocking(work))


@router.get(
    "/statistics",
    summary="How many documents an hour, against a target",
    response_model=DocumentStatistics,
    responses={
        200: reply(
            {
                "documents": 6,
                "completed": 6,
                "failed": 0,
                "cached": 0,
                "unfinished": 0,
                "docs_per_hour": None,
                "target": TARGET,
                "met": None,
                "busy_seconds": 0.9,
                "windows": 1,
                "first_at": AT,
                "last_at": ENDED,
                "p50_seconds": 0.1,
                "p95_seconds": 0.4,
                "success_rate": 1.0,
                "mean_confidence": 0.84,
                "cached_share": 0.0,
                "sentences": ["6 documents in 900 ms of work"],
            }
        )
    },
)
async def statistics(
    here: Here,
    target: Annotated[float, Query(gt=0, le=1e9, description="documents an hour")] = TARGET,
) -> Response:
    out = default_out()
    rows = await _blocking(lambda: _reviews().measurements())
    if asked := [row for row in rows if row.may_change][-MAX_ASKED_RUNS:]:
        await settle_ended(here.commands.get_run, out, asked)
        rows = await _blocking(lambda: _reviews().measurements())
    measured = statistics_of(rows, target=target)
    return json_answer({**measured.as_data(), "sentences": measured.sentences()})
