"""An endpoint's answer as a response, and what the OpenAPI document says about it.

What it must not know: any field of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request
from starlette.responses import Response

from dovetail.api import conditions
from dovetail.api.service import Service

PREFIX = "/api/v1"
DEFINITION = {"$ref": "#/components/schemas/Definition"}
"""For a body that has one."""


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def unless_known(request: Request, value: Any) -> Response:
    """The answer with its `ETag`; 304 if the client has it already (`If-None-Match`)."""
    body = orjson.dumps(value)
    tag = conditions.tag_of(body)
    headers = {"ETag": tag}
    if conditions.names(request, "if-none-match", tag, weak=True):
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, "application/json")


async def service_of(request: Request) -> Service:
    """What an endpoint works with.

    The calls that come by the thousand ask for it themselves: FastAPI takes longer to resolve a
    `Depends` than the engine to make a run.
    """
    service: Service = request.app.state.service
    # First of all: a store that is away shall cost a caller moments, not its whole patience.
    await service.fleet.check()
    return service


Here = Annotated[Service, Depends(service_of)]
"""An endpoint's parameter: what it works with."""


async def maker_of(request: Request) -> Service:
    """The same for a call that makes runs: if too much waits, it is told to come back later."""
    here = await service_of(request)
    await here.admit()
    return here


def location(run_id: str) -> dict[str, str]:
    return {"Location": f"{PREFIX}/runs/{run_id}"}


def body_of(schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    """For `openapi_extra`: a body that the endpoint reads itself."""
    content = {form: {"schema": schema} for form in ("application/json", "application/yaml")}
    return {"requestBody": {"required": required, "content": content}}


def fields_of(properties: Mapping[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """A body that is an object of these fields and no others."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return body_of(schema, required=bool(required))
