"""`/workflows`: registering, checking and reading definitions, their versions and aliases."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import Here, body_of, fields_of, json_answer
from dovetail.api.bodies import LARGE_BYTES, Field, is_whole, read_fields, read_source
from dovetail.api.paging import Cursor, Limit, page_size
from dovetail.api.service import Service
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import InvalidDefinition

router = APIRouter(prefix="/workflows", tags=["workflows"])

_DEFINITION = body_of({"type": "object", "description": "a definition; see `dovetail schema`"})
_ALIAS = {"version": Field("a version's number", is_whole, required=True)}


@router.post(
    "",
    summary="Register a definition",
    status_code=201,
    response_model=schemas.Registered,
    responses={200: {"model": schemas.Registered, "description": "known content: as it was"}},
    openapi_extra=_DEFINITION,
)
async def register(request: Request, here: Here) -> Response:
    checked = await check(here, await read_source(request, here.settings))
    name, version, created = await here.commands.register(checked)
    made = {"name": name, "version": version, "created": created}
    headers = {"Location": f"/api/v1/workflows/{name}?version={version}"}
    return json_answer(made, 201 if created else 200, headers)


@router.post(
    "/validate",
    summary="Check a definition, keeping nothing",
    response_model=schemas.Validation,
    openapi_extra=_DEFINITION,
)
async def validate(request: Request, here: Here) -> Response:
    try:
        checked = await check(here, await read_source(request, here.settings))
    except InvalidDefinition as error:  # a text that is no data at all is a finding like others
        checked = Checked(None, error.problems, (), [])
    found: dict[str, Any] = {
        "valid": checked.valid,
        "errors": [problem.as_dict() for problem in checked.errors],
        "warnings": [problem.as_dict() for problem in checked.warnings],
        "layers": checked.layers,
    }
    return json_answer(found)


async def check(here: Service, definition: Source) -> Checked:
    """In a thread, if it is large: everybody else shall not wait for it."""
    await here.commands.learn_handlers()
    if len(definition.text or "") > LARGE_BYTES:
        return await asyncio.to_thread(here.commands.validate, definition)
    return here.commands.validate(definition)


@router.get("", summary="List registered workflows", response_model=schemas.Workflows)
async def workflows(here: Here, limit: Limit = 50, cursor: Cursor = None) -> Response:
    return json_answer(await here.commands.workflows(limit=page_size(limit), cursor=cursor))


@router.get("/{name}", summary="One version of a workflow", response_model=schemas.Workflow)
async def workflow(
    name: str,
    here: Here,
    version: Annotated[
        str | None, Query(description="a number or an alias; without it the latest")
    ] = None,
) -> Response:
    return json_answer(await here.commands.workflow(name, version or None))


@router.get("/{name}/versions", summary="All its versions", response_model=schemas.Versions)
async def versions(name: str, here: Here) -> Response:
    return json_answer(await here.commands.versions(name))


@router.delete("/{name}", summary="Forget a workflow; its runs stay", status_code=204)
async def delete(name: str, here: Here) -> Response:
    await here.commands.delete_workflow(name)
    return Response(status_code=204)


@router.put(
    "/{name}/aliases/{alias}",
    summary="Let an alias name a version",
    response_model=schemas.Alias,
    openapi_extra=fields_of({"version": {"type": "integer"}}, ("version",)),
)
async def set_alias(name: str, alias: str, request: Request, here: Here) -> Response:
    body = await read_fields(request, here.settings, _ALIAS)
    return json_answer(await here.commands.set_alias(name, alias, body.fields["version"]))
