"""`/health`: is it there, can it work, are there workers. Asked often, so it costs little."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import Here, json_answer
from dovetail.api.problems import KIND_OF, answer
from dovetail.api.service import Service

router = APIRouter(prefix="/health", tags=["health"])

STOPPING = "the server is stopping"
UNKNOWN = "what runs are kept in cannot be used at the moment"


@router.get("/live", summary="The process answers", response_model=schemas.Health)
async def live() -> Response:
    return json_answer({"status": "ok"})


@router.get("/ready", summary="It can be given work; else 503", response_model=schemas.Health)
async def ready(request: Request) -> Response:
    here: Service = request.app.state.service
    if here.closing.is_set():
        return _not_ready(request, KIND_OF[503], STOPPING)

    async def probe() -> None:
        """What a trigger needs; raises `StoreError`."""
        await here.fleet.check()
        await here.commands.list_runs(limit=1)
        await here.commands.check_writable()

    refused = await here.readiness(probe)
    if refused is not None:
        return _not_ready(request, refused.type, refused.reason or UNKNOWN)
    return json_answer({"status": "ok"})


def _not_ready(request: Request, kind: str, reason: str) -> Response:
    return answer(503, kind, reason, request.scope, reasons=[reason])


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
