"""Batches: one run per item of a list, made together or not at all."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from dovetail.api.problems import InvalidRequest
from dovetail.api.request_body import (
    DEFINITION,
    NO_FIELDS,
    VERSION,
    BodyField,
    BodyPart,
    IdempotencyKey,
    RequestBody,
    check_definition,
)
from dovetail.api.responses import (
    AT,
    BATCH,
    DEFINITION_EXAMPLE,
    ENDED,
    RUN,
    Cursor,
    Here,
    Limit,
    Reply,
    RunStatusName,
    Time,
    Warned,
    json_answer,
    location,
    made_replies,
    maker_of,
    page_size,
    reply,
)
from dovetail.core.errors import Problem

router = APIRouter(tags=["batches"])

MAX_ITEMS = 10_000
"""They are made in one transaction, and other writes wait for it."""


class BatchMade(Reply):
    batch_id: str
    count: int
    warnings: list[Warned] = Field(default=[], description="left out if there are none")


class BatchRun(Reply):
    index: int
    run_id: str
    status: RunStatusName


class BatchItem(Reply):
    batch_id: str
    workflow: str
    count: int
    counts: dict[RunStatusName, int]
    created_at: Time
    finished_at: Time | None


class Batches(Reply):
    items: list[BatchItem]
    next_cursor: str | None


class BatchId(Reply):
    batch_id: str


class Batch(BatchItem):
    runs: list[BatchRun]
    next_cursor: str | None


_MADE = {"batch_id": BATCH, "count": 2}
_LISTED = {
    "batch_id": BATCH,
    "workflow": "greet",
    "count": 2,
    "counts": {"COMPLETED": 2},
    "created_at": AT,
    "finished_at": ENDED,
}
_BATCH = {
    **_LISTED,
    "runs": [{"index": 0, "run_id": RUN, "status": "COMPLETED"}],
    "next_cursor": "1",
}
_ITEMS = BodyField(
    "a list, each item the params of a run",
    lambda value: isinstance(value, list),
    {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_ITEMS},
    required=True,
)
_TWO_ITEMS = [{"who": "Ada"}, {"who": "Grace"}]
_MAKE = RequestBody(
    "BatchRequest", {"items": _ITEMS, "version": VERSION}, {"items": _TWO_ITEMS}, deeper=2
)
_MAKE_OF_DEFINITION = RequestBody(
    "DefinitionBatchRequest",
    {"definition": DEFINITION, "items": _ITEMS},
    {"definition": DEFINITION_EXAMPLE, "items": _TWO_ITEMS},
    deeper=2,
)
_MADE_REPLIES = {**made_replies(_MADE, BatchMade), 409: {}}


@router.post(
    "/workflows/{name}/batches",
    summary="Run a workflow once for each item",
    status_code=202,
    response_model=BatchMade,
    responses=_MADE_REPLIES,
    openapi_extra=_MAKE.openapi,
)
async def make_batch(
    name: str, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    here = await maker_of(request)
    body = await _MAKE.read(request, here)
    items, version = body.fields.values()
    _check_items(items)
    made = await here.commands.batch(name, items, version=version, idempotency_key=idempotency_key)
    return _made(made)


@router.post(
    "/batches",
    summary="Run a definition that is not registered once for each item",
    status_code=202,
    response_model=BatchMade,
    responses=_MADE_REPLIES,
    openapi_extra=_MAKE_OF_DEFINITION.openapi,
)
async def make_batch_of_definition(
    request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    here = await maker_of(request)
    body = await _MAKE_OF_DEFINITION.read(request, here)
    _check_items(body.fields["items"])
    checked = await check_definition(request, here, BodyPart(body.source, "definition"))
    made = await here.commands.batch(checked, body.fields["items"], idempotency_key=idempotency_key)
    return _made(made)


def _made(made: dict[str, Any]) -> Response:
    reply_fields = {name: made[name] for name in ("batch_id", "count", "warnings") if name in made}
    headers = location(f"batches/{made['batch_id']}")
    return json_answer(reply_fields, 202 if made["created"] else 200, headers)


def _check_items(items: list[Any]) -> None:
    if len(items) > MAX_ITEMS:
        message = f"{len(items):,} items; a batch has at most {MAX_ITEMS:,}"
        raise InvalidRequest([Problem("too_large", message, "items")])
    # Elsewhere no params at all are fine; an item that says nothing is a mistake.
    empty = [place for place, item in enumerate(items) if item is None]
    if empty:
        message = "must be an object, not null"
        found = [Problem("invalid_field", message, f"items[{place}]") for place in empty[:100]]
        raise InvalidRequest(found)


@router.get(
    "/batches",
    summary="List batches, newest first, without runs",
    response_model=Batches,
    responses={200: reply({"items": [_LISTED], "next_cursor": None})},
)
async def list_batches(here: Here, limit: Limit = 50, cursor: Cursor = None) -> Response:
    found = await here.commands.list_batches(limit=page_size(limit), cursor=cursor or None)
    return json_answer(found)


@router.get(
    "/batch-ids/{beginning}",
    summary="The whole id of the one batch whose id begins so",
    response_model=BatchId,
    responses={200: reply({"batch_id": BATCH}), 409: {}},
)
async def find_batch(beginning: str, here: Here) -> Response:
    return json_answer({"batch_id": await here.commands.find_batch(beginning)})


@router.get(
    "/batches/{batch_id}",
    summary="A batch and its runs",
    response_model=Batch,
    responses={200: reply(_BATCH)},
)
async def get_batch(
    batch_id: str, here: Here, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    found = await here.commands.get_batch(batch_id, limit=page_size(limit), cursor=cursor or None)
    return json_answer(found)


@router.post(
    "/batches/{batch_id}/retry",
    summary="Retry its runs that failed or were cancelled",
    status_code=202,
    response_model=Batch,
    responses={202: reply(_BATCH), 409: {}},
    openapi_extra=NO_FIELDS.openapi,
)
async def retry_batch(batch_id: str, request: Request, here: Here) -> Response:
    await NO_FIELDS.read(request, here)
    return json_answer(await here.commands.retry_batch(batch_id), 202)
