"""The HTTP API as one ASGI application: every call under `/api/v1`, health, metrics and the docs.

Each resource is a file with a router. This file adds what holds for all of them: problems for
errors, the guard, and the request context.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from dovetail.api import batches, events, operations, runs, workflows
from dovetail.api.admission import Admission, Budgets, limits_of
from dovetail.api.connection import most_connections
from dovetail.api.docs_page import STYLE, docs_page
from dovetail.api.middleware import Answered, Compression, Heads, RequestContext
from dovetail.api.openapi import describe
from dovetail.api.problems import answer_problems
from dovetail.api.responses import PREFIX, json_answer
from dovetail.api.security import Guard, Tokens, page_policy
from dovetail.api.service import ApiService

_PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "any other problem, as of RFC 9457",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}
        },
    }
}

about_router = APIRouter(tags=["about"])


@about_router.get("/openapi.json", summary="This API as OpenAPI")
async def openapi(request: Request) -> Response:
    return json_answer(request.app.openapi())


@about_router.get("/docs", summary="This API as a page", response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    page = docs_page(request.app.openapi())
    return HTMLResponse(page, headers={"Content-Security-Policy": page_policy(STYLE)})


_ROUTERS = (
    (workflows.router, PREFIX),
    (runs.router, PREFIX),
    (events.router, PREFIX),
    (batches.router, PREFIX),
    (operations.limits_router, PREFIX),
    (operations.workers_router, PREFIX),
    (operations.health_router, ""),
    (operations.metrics_router, ""),
    (about_router, ""),
)


def create_app(service: ApiService, version: str, answered: Answered | None = None) -> ASGIApp:
    """The application, guarded. Raises `SettingsError` for tokens that cannot be used.

    `answered` is called after every request.
    """
    app = FastAPI(
        title="Dovetail",
        version=version,
        description="Workflows over HTTP. Errors are problems of RFC 9457.",
        openapi_url=None,  # the two pages of its own are ours, behind the guard and offline
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        # Its own spans know nothing of refusals, and show the text of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = service
    for router, prefix in _ROUTERS:
        app.include_router(router, prefix=prefix, responses=_PROBLEM)
    describe(app, _ROUTERS)
    # Messages of a store name the place they are about, which is no business of a client.
    file = re.escape(str(service.settings.db))
    hidden = re.compile(rf" in ({file}|Redis( or .*)?|PostgreSQL at \S+)$")
    answer_problems(app, hidden, service.readiness.doubt)
    settings = service.settings
    guard = Guard(
        Admission(
            Compression(app),
            Budgets(limits_of(settings, most_connections(settings.max_connections))),
            settings.trusted_proxies,
        ),
        hosts=[*settings.allowed_hosts, *service.hosts],
        tokens=Tokens(settings.tokens),
    )
    return RequestContext(Heads(guard), closing=service.closing, answered=answered)
