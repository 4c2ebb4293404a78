"""Batches: one run per item of a list, made together or not at all."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.problems import InvalidRequest
from dovetail.api.request_body import DEFINITION, VERSION, BodyPart, Field, read_fields
from dovetail.api.responses import DEFINITION as DEFINITION_SCHEMA
from dovetail.api.responses import (
    PREFIX,
    Cursor,
    Here,
    Limit,
    fields_of,
    json_answer,
    maker_of,
    page_size,
)
from dovetail.api.runs import VERSION_SCHEMA, IdempotencyKey
from dovetail.api.workflows import check
from dovetail.core.errors import Problem

router = APIRouter(tags=["batches"])

MOST_ITEMS = 10_000
"""They are made in one transaction, for which everybody else waits."""
_BATCH_ITEMS = {
    "items": Field(
        "a list, each item the params of a run",
        lambda value: isinstance(value, list),
        required=True,
    ),
}
_BATCH = {**_BATCH_ITEMS, "version": VERSION}
_ITEMS = {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MOST_ITEMS}
_SAME_KEY: dict[int | str, dict[str, Any]] = {
    200: {"model": schemas.BatchMade, "description": "the key was used before: the same answer"}
}


@router.post(
    "/workflows/{name}/batches",
    summary="Run a workflow once for each item",
    status_code=202,
    response_model=schemas.BatchMade,
    responses=_SAME_KEY,
    openapi_extra=fields_of({"items": _ITEMS, "version": VERSION_SCHEMA}, ("items",)),
)
async def make_batch(
    name: str, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    here = await maker_of(request)
    body = await read_fields(request, here, _BATCH, deeper=2)
    items, version = body.fields.values()
    _check_items(items)
    made = await here.commands.batch(name, items, version=version, idempotency_key=idempotency_key)
    return _made(made)


@router.post(
    "/batches",
    summary="Run a definition that is not registered once for each item",
    status_code=202,
    response_model=schemas.BatchMade,
    responses=_SAME_KEY,
    openapi_extra=fields_of(
        {"definition": DEFINITION_SCHEMA, "items": _ITEMS}, ("definition", "items")
    ),
)
async def make_batch_of_definition(
    request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    here = await maker_of(request)
    body = await read_fields(request, here, {"definition": DEFINITION, **_BATCH_ITEMS}, deeper=2)
    _check_items(body.fields["items"])
    checked = await check(request, here, BodyPart(body.source, "definition"))
    made = await here.commands.batch(checked, body.fields["items"], idempotency_key=idempotency_key)
    return _made(made)


def _made(made: dict[str, Any]) -> Response:
    told = {name: made[name] for name in ("batch_id", "count", "warnings") if name in made}
    headers = {"Location": f"{PREFIX}/batches/{made['batch_id']}"}
    return json_answer(told, 202 if made["created"] else 200, headers)


def _check_items(items: list[Any]) -> None:
    if len(items) > MOST_ITEMS:
        message = f"{len(items):,} items; a batch has at most {MOST_ITEMS:,}"
        raise InvalidRequest([Problem("too_large", message, "items")])
    # Elsewhere no params at all are fine; an item that says nothing is a mistake.
    empty = [place for place, item in enumerate(items) if item is None]
    if empty:
        message = "must be an object, not null"
        found = [Problem("invalid_field", message, f"items[{place}]") for place in empty[:100]]
        raise InvalidRequest(found)


@router.get(
    "/batches", summary="List batches, newest first, without runs", response_model=schemas.Batches
)
async def list_batches(here: Here, limit: Limit = 50, cursor: Cursor = None) -> Response:
    found = await here.commands.list_batches(limit=page_size(limit), cursor=cursor or None)
    return json_answer(found)


@router.get(
    "/batch-ids/{beginning}",
    summary="The whole id of the one batch whose id begins so",
    response_model=schemas.BatchId,
)
async def find_batch(beginning: str, here: Here) -> Response:
    return json_answer({"batch_id": await here.commands.find_batch(beginning)})


@router.get("/batches/{batch_id}", summary="A batch and its runs", response_model=schemas.Batch)
async def get_batch(
    batch_id: str, here: Here, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    found = await here.commands.get_batch(batch_id, limit=page_size(limit), cursor=cursor or None)
    return json_answer(found)


@router.post(
    "/batches/{batch_id}/retry",
    summary="Retry its runs that failed or were cancelled",
    status_code=202,
    response_model=schemas.Batch,
    openapi_extra=fields_of({}),
)
async def retry_batch(batch_id: str, request: Request, here: Here) -> Response:
    await read_fields(request, here, {})
    return json_answer(await here.commands.retry_batch(batch_id), 202)
