"""The HTTP API as one ASGI application: every call under `/api/v1`, and what is beside it.

Each group of calls is a file with a router; this one puts them together with what holds for
all: problems for errors, the guard and the envelope. What it must not know: how it is served,
or which engine is behind the commands.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from dovetail.api import batches, events, fleet, health, limits, runs, schemas, workflows
from dovetail.api.answers import json_answer
from dovetail.api.docs_page import docs_page
from dovetail.api.envelope import Envelope
from dovetail.api.problems import tell_problems
from dovetail.api.security import Guard, Tokens
from dovetail.api.service import Service

PREFIX = "/api/v1"
_PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "RFC 9457",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}
        },
    }
}

beside = APIRouter(tags=["about"])


@beside.get("/openapi.json", summary="This API as OpenAPI")
async def openapi(request: Request) -> Response:
    return json_answer(request.app.openapi())


@beside.get("/docs", summary="This API as a page", response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    return HTMLResponse(docs_page(request.app.openapi()))


def create_app(service: Service, version: str) -> ASGIApp:
    """The application, guarded. Raises `SettingsError` for tokens that cannot be used."""
    app = FastAPI(
        title="Dovetail",
        version=version,
        description="Workflows over HTTP. Errors are problems of RFC 9457.",
        openapi_url=None,  # the two pages of its own are ours, behind the guard and offline
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for group in (workflows, runs, events, batches, limits, fleet):
        app.include_router(group.router, prefix=PREFIX, responses=_PROBLEM)
    for router in (health.router, beside):
        app.include_router(router, responses=_PROBLEM)
    _describe_problems(app)
    # Messages of a store name the place they are about, which is no business of a client.
    file = re.escape(str(service.settings.db))
    tell_problems(app, hidden=re.compile(rf" in ({file}|Redis( or .*)?|PostgreSQL at \S+)$"))
    settings = service.settings
    guard = Guard(
        app, hosts=[*settings.allowed_hosts, *service.hosts], tokens=Tokens(settings.tokens)
    )
    return Envelope(guard, closing=service.closing)


def _describe_problems(app: FastAPI) -> None:
    """Problems and tokens are in no endpoint's signature, so they are added to the document."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schema = schemas.ProblemDetails.model_json_schema(
                ref_template="#/components/schemas/{model}"
            )
            parts = document["components"]
            parts["schemas"].update(schema.pop("$defs"))
            parts["schemas"]["ProblemDetails"] = schema
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"token": []}]
        return generate()

    app.openapi = described  # type: ignore[method-assign]
