"""`/workflows`: register, check and read definitions, their versions and aliases."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from starlette.responses import Response

from dovetail.api import responses
from dovetail.api.events import chosen_kind
from dovetail.api.outputs import JSON, YAML
from dovetail.api.problems import InvalidRequest
from dovetail.api.request_body import (
    DEFINITION_SCHEMA,
    BodyField,
    RequestBody,
    check_definition,
    documented_body,
    is_whole,
    read_source,
)
from dovetail.api.responses import (
    AT,
    DEFINITION_EXAMPLE,
    ETAG,
    GRAPH_EXAMPLE,
    NOT_MODIFIED,
    Cursor,
    GraphLayout,
    Here,
    History,
    IfNoneMatch,
    Limit,
    ProblemFound,
    Reply,
    RunStatusName,
    Time,
    json_answer,
    location,
    made_replies,
    page_size,
    reply,
    unless_known,
)
from dovetail.api.security import actor_of
from dovetail.api.service import ApiService
from dovetail.core.aliases import MAX_WEIGHTS, check_weights
from dovetail.core.definition.editor_schema import EditorHandler, add_handlers
from dovetail.core.definition.model import definition_schema
from dovetail.core.definition.validation import Checked
from dovetail.core.definition.yaml_text import yaml_text
from dovetail.core.errors import Changed, InvalidDefinition, NotFound, Problem
from dovetail.engine.commands import MAX_LAST_RUNS, MAX_WORKFLOWS_WITH_RUNS, check_alias
from dovetail.engine.ports import Seen

router = APIRouter(prefix="/workflows", tags=["workflows"])


class Registered(Reply):
    name: str
    version: int
    created: bool


class Validation(Reply):
    valid: bool
    errors: list[ProblemFound]
    warnings: list[ProblemFound]
    layers: list[list[str]]
    graph: GraphLayout | None = Field(
        default=None,
        description="with `graph=true`: where to draw it; null if the definition is not valid",
    )


class LastRun(Reply):
    run_id: str
    version: int | None
    status: RunStatusName
    created_at: Time
    finished_at: Time | None
    duration: float | None


_Weights = Annotated[
    dict[str, float], Field(description="by version: how runs are divided between them")
]
AliasTarget = Annotated[int | _Weights, Field(description="a version's number, or weights")]


class WorkflowItem(Reply):
    name: str
    latest_version: int
    aliases: dict[str, AliasTarget]
    created_at: Time
    updated_at: Time
    runs: list[LastRun] | None = Field(
        default=None, description="with `runs`: its last runs, newest first"
    )


class Workflows(Reply):
    items: list[WorkflowItem]
    next_cursor: str | None


class Workflow(Reply):
    name: str
    version: int
    definition: dict[str, Any]
    aliases: dict[str, AliasTarget]
    created_at: Time


class VersionItem(Reply):
    version: int
    sha256: str
    created_at: Time


class Versions(Reply):
    items: list[VersionItem]


class FieldChange(Reply):
    from_: Any = Field(alias="from", description="null if it was not there")
    to: Any = Field(description="null if it is not there")


class NodeChange(Reply):
    id: str
    fields: dict[str, FieldChange]


class Difference(Reply):
    added: list[str]
    removed: list[str]
    changed: list[NodeChange]
    workflow: dict[str, FieldChange]


class Alias(Reply):
    name: str
    alias: str
    version: int | None = Field(None, description="if it names one")
    weights: _Weights | None = Field(None, description="if it divides runs between versions")


_REGISTERED = {"name": "greet", "version": 1, "created": True}
_ALIASES = {"latest": 2, "prod": {"1": 90, "2": 10}, "stable": 1}
_DEFINITION = documented_body(DEFINITION_SCHEMA, DEFINITION_EXAMPLE)
_ALIAS = RequestBody(
    "AliasRequest",
    {
        "version": BodyField("a version's number", is_whole, {"type": ["integer", "null"]}),
        "weights": BodyField(
            'weights by version, such as {"3": 90, "4": 10}',
            lambda value: isinstance(value, dict),
            {
                "type": ["object", "null"],
                "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
                "minProperties": 1,
                "maxProperties": MAX_WEIGHTS,
                "description": "by a version's number; instead of `version`",
            },
        ),
    },
    {"version": 1},
)
IfMatch = Annotated[
    str | None,
    Header(description="the `ETag` of the workflow as it was read: 412 if it is another by now"),
]
IfNew = Annotated[
    str | None, Header(description="`*`: register only a name that is new, 412 if there is one")
]
_NEVER_SEEN: Seen = {"latest": 0}
"""No workflow is so: only what is already as it was asked for is then no conflict."""


@router.post(
    "",
    summary="Register a definition",
    status_code=201,
    response_model=Registered,
    responses={
        **made_replies(_REGISTERED, Registered, 201, "known content: as it was"),
        412: {},
    },
    openapi_extra=_DEFINITION,
)
async def register(
    request: Request, here: Here, if_match: IfMatch = None, if_none_match: IfNew = None
) -> Response:
    checked = await check_definition(request, here, await read_source(request, here))
    seen: Seen | None = None
    refusal: Changed | None = None
    if checked.workflow is not None:
        try:
            seen = await _seen(request, here, checked.workflow.name)
        except Changed as error:
            seen, refusal = _NEVER_SEEN, error  # the store knows whether it is the latest content
    try:
        name, version, created = await here.commands.register(
            checked, seen=seen, actor=actor_of(request)
        )
    except Changed as error:
        raise refusal or error from None
    made = {"name": name, "version": version, "created": created}
    headers = location(f"workflows/{name}?version={version}")
    return json_answer(made, 201 if created else 200, headers)


@router.post(
    "/validate",
    summary="Check a definition, keeping nothing",
    response_model=Validation,
    responses={
        200: reply({"valid": True, "errors": [], "warnings": [], "layers": [["start"], ["end"]]})
    },
    openapi_extra=_DEFINITION,
)
async def validate(
    request: Request,
    here: Here,
    graph: Annotated[
        bool, Query(description="with the `graph` of a valid definition, for an editor")
    ] = False,
) -> Response:
    try:
        checked = await check_definition(request, here, await read_source(request, here))
    except InvalidDefinition as error:  # a text that is no data at all is a finding like others
        checked = Checked(None, error.problems, (), [])
    found: dict[str, Any] = {
        "valid": checked.valid,
        "errors": [problem.as_dict() for problem in checked.errors],
        "warnings": [problem.as_dict() for problem in checked.warnings],
        "layers": checked.layers,
    }
    if graph:
        workflow = checked.workflow
        found["graph"] = workflow and await here.commands.definition_graph(workflow)
    return json_answer(found)


schema_router = APIRouter(tags=["workflows"])


@schema_router.get(
    "/schema",
    summary="The JSON Schema of a definition, for editors",
    response_model=dict[str, Any],
    responses={
        200: reply({"title": "Dovetail workflow", "type": "object"}, headers=ETAG),
        304: NOT_MODIFIED,
    },
)
async def schema(request: Request, here: Here, if_none_match: IfNoneMatch = None) -> Response:
    """With the configs of the handlers that workers have announced."""
    known = {
        one["name"]: EditorHandler(one["name"], config=one["config_schema"])
        for worker in await here.fleet.workers(with_schemas=True)
        for one in worker["handler_details"]
    }
    found = definition_schema()
    add_handlers(found, known.values())
    return unless_known(request, found)


async def _seen(request: Request, here: ApiService, name: str) -> Seen | None:
    """The workflow as it is, if that is what the request says it has seen; else `Changed`.

    None if it says nothing, so that nothing is compared.
    """
    if not {"if-match", "if-none-match"} & set(request.headers):
        return None
    try:
        found = await here.commands.workflow(name)
    except NotFound:
        if request.method != "POST":  # which makes what is not there
            raise
        found = None
    tag = None if found is None else responses.tag_of(orjson.dumps(found))
    match = responses.names(request, "if-match", tag)
    known = responses.names(request, "if-none-match", tag, weak=True)
    if match is False:
        is_so = "is not what If-Match names" if found else "is not registered"
        raise Changed(f"workflow '{name}' {is_so}; read it again")
    if known:
        raise Changed(f"workflow '{name}' is there already, as If-None-Match names it")
    return {} if found is None else found["aliases"]


_ITEM = {
    "name": "greet",
    "latest_version": 2,
    "aliases": _ALIASES,
    "created_at": AT,
    "updated_at": AT,
}


@router.get(
    "",
    summary="List registered workflows",
    response_model=Workflows,
    responses={200: reply({"items": [_ITEM], "next_cursor": None})},
)
async def workflows(
    here: Here,
    limit: Limit = 50,
    cursor: Cursor = None,
    runs: Annotated[
        int,
        Query(
            ge=0,
            le=MAX_LAST_RUNS,
            description="so many of the last runs of each; a page then has "
            f"at most {MAX_WORKFLOWS_WITH_RUNS} workflows",
        ),
    ] = 0,
    q: Annotated[
        str | None,
        Query(
            description="a part of the name, in any case; a page may then be empty though "
            "another follows"
        ),
    ] = None,
) -> Response:
    found = await here.commands.workflows(limit=page_size(limit), cursor=cursor, runs=runs, q=q)
    return json_answer(found)


_WORKFLOW = {
    "name": "greet",
    "version": 2,
    "definition": DEFINITION_EXAMPLE,
    "aliases": _ALIASES,
    "created_at": AT,
}


@router.get(
    "/{name}",
    summary="One version of a workflow",
    response_model=Workflow,
    responses={
        200: {
            "description": "with `Accept: application/yaml` the definition alone, as YAML",
            "headers": ETAG,
            "content": {
                JSON: {"example": _WORKFLOW},
                YAML: {"schema": {"type": "string"}, "example": yaml_text(DEFINITION_EXAMPLE)},
            },
        },
        304: NOT_MODIFIED,
    },
)
async def workflow(
    name: str,
    request: Request,
    here: Here,
    version: Annotated[
        str | None, Query(description="a number or an alias; without it the latest")
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    found = await here.commands.workflow(name, version or None)
    if chosen_kind(request.headers.get("accept", ""), YAML, JSON) == JSON:
        return unless_known(request, found)
    # In a thread: of 10,000 nodes it takes long.
    text = await asyncio.to_thread(yaml_text, found["definition"])
    return unless_known(request, text.encode(), f"{YAML}; charset=utf-8")


@router.get(
    "/{name}/versions",
    summary="All its versions",
    response_model=Versions,
    responses={
        200: reply({"items": [{"version": 2, "sha256": "9f86d081884c7d65" * 4, "created_at": AT}]})
    },
)
async def versions(name: str, here: Here) -> Response:
    return json_answer(await here.commands.versions(name))


@router.get(
    "/{name}/versions/{version}/graph",
    summary="Where to draw the nodes and edges of a version",
    response_model=GraphLayout,
    responses={200: reply(GRAPH_EXAMPLE)},
)
async def graph(name: str, version: str, here: Here) -> Response:
    return json_answer(await here.commands.workflow_graph(name, version))


_DIFFERENCE = {
    "added": ["check"],
    "removed": [],
    "changed": [{"id": "end", "fields": {"max_retries": {"from": None, "to": 3}}}],
    "workflow": {"on_failure": {"from": "fail_fast", "to": "continue"}},
}


@router.get(
    "/{name}/diff",
    summary="What one version has that another has not",
    response_model=Difference,
    responses={200: reply(_DIFFERENCE)},
)
async def diff(
    name: str,
    here: Here,
    from_: Annotated[
        str | None, Query(alias="from", description="a number or an alias; without it the latest")
    ] = None,
    to: Annotated[
        str | None, Query(description="a number or an alias; without it the latest")
    ] = None,
) -> Response:
    return json_answer(await here.commands.diff_workflow(name, from_ or None, to or None))


@router.delete(
    "/{name}",
    summary="Forget a workflow; its runs stay",
    status_code=204,
    responses={409: {}, 412: {}},
)
async def delete(
    name: str,
    request: Request,
    here: Here,
    if_match: IfMatch = None,
) -> Response:
    seen = await _seen(request, here, name)
    await here.commands.delete_workflow(name, seen=seen, actor=actor_of(request))
    return Response(status_code=204)


@router.delete(
    "/{name}/versions/{version}",
    summary="Forget a version that no alias names; its runs stay",
    status_code=204,
    responses={409: {}, 412: {}},
)
async def delete_version(
    name: str, version: str, request: Request, here: Here, if_match: IfMatch = None
) -> Response:
    seen = await _seen(request, here, name)
    await here.commands.delete_version(name, version, seen=seen, actor=actor_of(request))
    return Response(status_code=204)


@router.get(
    "/{name}/history",
    summary="What was done to a workflow, when and by whom; newest first",
    response_model=History,
    responses={
        200: reply(
            {
                "items": [
                    {
                        "time": AT,
                        "actor": "ci",
                        "action": "alias",
                        "details": {"alias": "prod", "weights": {"1": 90, "2": 10}, "from": 1},
                    }
                ],
                "next_cursor": None,
            }
        )
    },
)
async def history(name: str, here: Here, limit: Limit = 50, cursor: Cursor = None) -> Response:
    size = page_size(limit)
    return json_answer(await here.commands.workflow_history(name, limit=size, cursor=cursor))


@router.put(
    "/{name}/aliases/{alias}",
    summary="Let an alias name a version, or divide runs between versions by weights",
    response_model=Alias,
    responses={
        200: reply({"name": "greet", "alias": "stable", "version": 1}),
        409: {},
        412: {},
    },
    openapi_extra=_ALIAS.openapi,
)
async def set_alias(
    name: str, alias: str, request: Request, here: Here, if_match: IfMatch = None
) -> Response:
    version, weights = (await _ALIAS.read(request, here)).fields.values()
    if (version is None) == (weights is None):
        message = "give either a version's number or weights by version"
        raise InvalidRequest([Problem("invalid_field", message, "version")])
    # What is wrong with the request itself comes before what it has seen: 422 before 412.
    check_alias(alias)
    target = check_weights(weights) if version is None else version
    seen = await _seen(request, here, name)
    actor = actor_of(request)
    return json_answer(await here.commands.set_alias(name, alias, target, seen=seen, actor=actor))


@router.delete(
    "/{name}/aliases/{alias}",
    summary="Forget an alias",
    status_code=204,
    responses={409: {}, 412: {}},
)
async def delete_alias(
    name: str, alias: str, request: Request, here: Here, if_match: IfMatch = None
) -> Response:
    seen = await _seen(request, here, name)
    await here.commands.delete_alias(name, alias, seen=seen, actor=actor_of(request))
    return Response(status_code=204)
