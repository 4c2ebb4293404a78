"""`/health`: is it there, can it work, are there workers. Asked often, so it costs little."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import Here, json_answer
from dovetail.api.problems import Refusal
from dovetail.core.errors import StoreError

router = APIRouter(prefix="/health", tags=["health"])

READY_SECONDS = 3.0
"""Whoever asks has given up by then."""


@router.get("/live", summary="The process answers", response_model=schemas.Health)
async def live() -> Response:
    return json_answer({"status": "ok"})


@router.get("/ready", summary="It can be given work; else 503", response_model=schemas.Health)
async def ready(here: Here) -> Response:
    if here.closing.is_set():
        raise Refusal(503, "the server is stopping")
    try:
        async with asyncio.timeout(READY_SECONDS):
            await here.commands.list_runs(limit=1)  # or a `StoreError`, which is a 503
    except TimeoutError:
        raise StoreError(f"no list of runs within {READY_SECONDS:g} s") from None
    return json_answer({"status": "ok"})


@router.get(
    "/workers",
    summary="How many workers there are; 503 if none is alive",
    response_model=schemas.WorkerCounts,
    responses={
        503: {
            "model": schemas.WorkerCounts,
            "description": "none is alive",
            "content": {"application/json": {"example": {"alive": 0, "dead": 1}}},
        }
    },
)
async def worker_counts(here: Here) -> Response:
    alive = [worker["alive"] for worker in await here.fleet.workers()]
    counts = {"alive": sum(alive), "dead": len(alive) - sum(alive)}
    if counts["alive"]:
        return json_answer(counts)
    return json_answer(counts, 503, {"Retry-After": "5"})
