"""Batches: one run per item of a list, made together or not at all."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import MAKES_RUNS, Here, fields_of, json_answer
from dovetail.api.bodies import VERSION, Field, read_fields
from dovetail.api.paging import Cursor, Limit, page_size
from dovetail.api.problems import InvalidRequest
from dovetail.api.runs import IdempotencyKey
from dovetail.core.errors import Problem

router = APIRouter(tags=["batches"])

MOST_ITEMS = 10_000
"""They are made in one transaction, for which everybody else waits."""
_BATCH = {
    "items": Field(
        "a list, each item the params of a run",
        lambda value: isinstance(value, list),
        required=True,
    ),
    "version": VERSION,
}


@router.post(
    "/workflows/{name}/batches",
    summary="Run a workflow once for each item",
    dependencies=MAKES_RUNS,
    status_code=202,
    response_model=schemas.BatchMade,
    responses={
        200: {"model": schemas.BatchMade, "description": "the key was used before: the same answer"}
    },
    openapi_extra=fields_of(
        {
            "items": {"type": "array", "items": {"type": "object"}, "maxItems": MOST_ITEMS},
            "version": {"type": ["integer", "string", "null"]},
        },
        ("items",),
    ),
)
async def make_batch(
    name: str, request: Request, here: Here, idempotency_key: IdempotencyKey = None
) -> Response:
    body = await read_fields(request, here.settings, _BATCH, deeper=2)
    items, version = body.fields.values()
    _check_items(items)
    made = await here.commands.batch(name, items, version=version, idempotency_key=idempotency_key)
    told = {"batch_id": made["batch_id"], "count": made["count"]}
    headers = {"Location": f"/api/v1/batches/{made['batch_id']}"}
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
    await read_fields(request, here.settings, {})
    return json_answer(await here.commands.retry_batch(batch_id), 202)
