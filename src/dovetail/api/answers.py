"""An endpoint's answer as a response, and what the OpenAPI document says about it.

What it must not know: any field of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request
from starlette.responses import Response

from dovetail.api.service import Service


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    # First of all: a store that is away shall cost a caller moments, not its whole patience.
    await service.fleet.check()
    return service


Here = Annotated[Service, Depends(_service)]
"""An endpoint's parameter: what it works with."""


async def _admit(here: Here) -> None:
    await here.admit()


MAKES_RUNS = [Depends(_admit)]
"""An endpoint's `dependencies`: it adds to what waits, and may be told to come back later."""


def location(run_id: str) -> dict[str, str]:
    return {"Location": f"/api/v1/runs/{run_id}"}


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
