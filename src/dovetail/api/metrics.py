"""`/metrics`: what was counted here and what can be asked, for Prometheus.

What it must not know: what is counted, or how it is written down.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from dovetail.api.problems import Refusal
from dovetail.api.service import Service

router = APIRouter(tags=["about"])


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}}},
)
async def metrics(request: Request) -> Response:
    here: Service = request.app.state.service  # also while its store is away: then most of all
    if here.metrics is None:
        raise Refusal(404, "nothing is counted here")
    text, kind = await here.metrics()
    return Response(text, headers={"Content-Type": kind})
