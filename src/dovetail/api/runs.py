"""Runs: triggered, read, retried, cancelled. Their events are in `events`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.admission import waits
from dovetail.api.outputs import (
    FULL,
    SHOWN,
    Read,
    RunOutputs,
    answer_of,
    joined,
    output_parts,
    result_parts,
    run_parts,
    tag_of_output,
    tag_of_parts,
)
from dovetail.api.request_body import (
    ANYTHING,
    DEFINITION,
    FLAG,
    TEXT,
    VERSION,
    BodyPart,
    read_fields,
)
from dovetail.api.responses import DEFINITION as DEFINITION_SCHEMA
from dovetail.api.responses import (
    PREFIX,
    Cursor,
    Here,
    Limit,
    fields_of,
    json_answer,
    location,
    maker_of,
    page_size,
    service_of,
    unless_known,
)
from dovetail.api.service import ApiService
from dovetail.api.workflows import IfNoneMatch, check
from dovetail.core.outputs import LARGE_OUTPUT, OutputReference, looks_like_a_reference, reference
from dovetail.core.run import RunState
from dovetail.engine.api import Accepted
from dovetail.engine.ports import RunQuery
from dovetail.engine.views import run_view, with_warnings

router = APIRouter(tags=["runs"])

LONGEST_WAIT = 24 * 3600.0

IdempotencyKey = Annotated[
    str | None,
    Header(description="the same key again gives the same answer, and makes nothing new"),
]
WhichOutputs = Annotated[
    Literal["full"] | None,
    Query(
        description=f"`full`: also the outputs of more than {LARGE_OUTPUT // 1024} KiB, in whose "
        'place there is `{"$output": {"size", "href"}}` otherwise'
    ),
]
_TRIGGER = {"params": ANYTHING, "version": VERSION}
_AD_HOC = {"definition": DEFINITION, "params": ANYTHING}
_RETRY = {"from": TEXT, "dry_run": FLAG}
_REPAIR = {"dry_run": FLAG}
_SAME_KEY: dict[int | str, dict[str, Any]] = {
    200: {"model": schemas.Triggered, "description": "the key was used before: the same answer"}
}
VERSION_SCHEMA = {"type": ["integer", "string", "null"], "description": "a number or an alias"}
_PARAMS = {"type": ["object", "null"]}


@router.post(
    "/workflows/{name}/runs",
    summary="Run a registered workflow",
    status_code=202,
    response_model=schemas.Triggered,
    responses=_SAME_KEY,
    openapi_extra=fields_of({"params": _PARAMS, "version": VERSION_SCHEMA}),
)
async def trigger(name: str, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    here = await maker_of(request)
    params, version = (await read_fields(request, here, _TRIGGER)).fields.values()
    async with here.making:
        accepted = await here.commands.trigger(
            name, params, version=version, idempotency_key=idempotency_key
        )
        return await _accepted(here, accepted)


@router.post(
    "/runs",
    summary="Run a definition that is not registered",
    status_code=202,
    response_model=schemas.Triggered,
    responses=_SAME_KEY,
    openapi_extra=fields_of({"definition": DEFINITION_SCHEMA, "params": _PARAMS}, ("definition",)),
)
async def run_definition(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    here = await maker_of(request)
    body = await read_fields(request, here, _AD_HOC)
    checked = await check(request, here, BodyPart(body.source, "definition"))
    async with here.making:
        accepted = await here.commands.trigger(
            checked, body.fields["params"], idempotency_key=idempotency_key
        )
        return await _accepted(here, accepted)


async def _accepted(here: ApiService, accepted: Accepted) -> Response:
    made = with_warnings(await here.commands.receipt(accepted.run_id), accepted.warnings)
    return json_answer(made, 202 if accepted.created else 200, location(accepted.run_id))


@router.get("/runs", summary="List runs, newest first, without nodes", response_model=schemas.Runs)
async def list_runs(
    here: Here,
    status: str | None = None,
    workflow: str | None = None,
    batch: str | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    query = RunQuery(
        status, workflow or None, batch or None, page_size(limit), cursor or None, LARGE_OUTPUT
    )
    found = await here.commands.list_runs(query)
    for view in found["items"]:
        result = view["result"]
        if not _is_whole(result):
            size = result.size if isinstance(result, OutputReference) else len(orjson.dumps(result))
            view["result"] = reference(size, f"{location(view['run_id'])['Location']}/result")
    return json_answer(found)


@router.get("/runs/{run_id}", summary="A run and its nodes", response_model=schemas.Run)
async def get_run(
    run_id: str,
    request: Request,
    nodes: bool = True,
    outputs: WhichOutputs = None,
    wait: Annotated[
        float,
        Query(ge=0, allow_inf_nan=False, description="answer when it has finished, or after this"),
    ] = 0.0,
    if_none_match: IfNoneMatch = None,
) -> Response:
    here = await service_of(request)
    if wait:
        waits(request)
        await here.unless_closing(_end(here, run_id, request), min(wait, LONGEST_WAIT))
    if not nodes:
        view = await here.commands.summary(run_id, max_result_bytes=LARGE_OUTPUT)
        # What goes on has a result in parts, and one that is large is made of references.
        if view["finished_at"] is not None and _is_whole(view["result"]):
            return unless_known(request, view)
    run = await here.commands.load_run(run_id, FULL if outputs else SHOWN)
    return await _run_answer(here, request, run, nodes=nodes, full=outputs is not None)


async def _run_answer(
    here: ApiService,
    request: Request,
    run: RunState,
    *,
    nodes: bool = True,
    full: bool = False,
    moved: bool = False,
) -> Response:
    """A run's detail; `moved`: it was asked to change, and this is what became of it."""
    parts = await run_parts(run, run_view(run, nodes=nodes), PREFIX, full=full)
    read = _reader(here, run)
    if moved:
        return answer_of(request, parts, read, here.answers, status=202, headers=location(run.id))
    return answer_of(request, parts, read, here.answers, tag=tag_of_parts(parts))


def _is_whole(result: Any) -> bool:
    """Whether a result that was read only if it is not large may be shown as it is."""
    return not isinstance(result, OutputReference) and not looks_like_a_reference(result)


def _reader(here: ApiService, run: RunState) -> Read:
    return lambda wanted: here.commands.read_outputs(run, wanted)


async def _end(here: ApiService, run_id: str, request: Request) -> None:
    """Returns when the run has finished, or the client has gone away. Raises `NotFound`."""
    ended = asyncio.ensure_future(here.commands.ended(run_id))
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
    finally:
        ended.cancel()
        left.cancel()
        await asyncio.gather(ended, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/runs/{run_id}/results", summary="Its result and outputs", response_model=schemas.Results
)
async def results(
    run_id: str,
    request: Request,
    here: Here,
    partial: bool = False,
    outputs: WhichOutputs = None,
) -> Response:
    budget = FULL if outputs else SHOWN
    run = await here.commands.with_results(run_id, partial=partial, budget=budget)
    parts = await result_parts(run, PREFIX, full=outputs is not None)
    return answer_of(request, parts, _reader(here, run), here.answers)


@router.get(
    "/runs/{run_id}/nodes/{node_id}/output",
    summary="The output of one node, as it is",
    responses={
        200: {"description": "any JSON value", "content": {"application/json": {"schema": {}}}}
    },
)
async def node_output(
    run_id: str, node_id: str, request: Request, here: Here, if_none_match: IfNoneMatch = None
) -> Response:
    run, place = await here.commands.with_output(run_id, node_id)
    read = _reader(here, run)
    tag = tag_of_output(run, run.nodes[place], node_id)
    parts = await output_parts(run, place, read)
    return answer_of(request, parts, read, here.answers, tag=tag)


@router.get(
    "/runs/{run_id}/result",
    summary="Its result alone, as it is",
    responses={
        200: {"description": "any JSON value", "content": {"application/json": {"schema": {}}}}
    },
)
async def result(run_id: str, request: Request, here: Here, partial: bool = False) -> Response:
    run = await here.commands.with_results(run_id, partial=partial, budget=FULL)
    parts = joined(await RunOutputs(run, PREFIX, full=True).result())
    return answer_of(request, parts, _reader(here, run), here.answers)


@router.get(
    "/runs/{run_id}/explain",
    summary="Why each node that has not finished is where it is",
    response_model=schemas.Explanation,
)
async def explain(run_id: str, here: Here) -> Response:
    return json_answer(await here.commands.explain(run_id))


@router.get(
    "/runs/{run_id}/verify",
    summary="Whether its events agree with the rules",
    response_model=schemas.Verified,
)
async def verify(run_id: str, here: Here) -> Response:
    return json_answer({"run_id": run_id, "divergences": await here.commands.verify(run_id)})


@router.get(
    "/run-ids/{beginning}",
    summary="The whole id of the one run whose id begins so",
    response_model=schemas.RunId,
)
async def find_run(beginning: str, here: Here) -> Response:
    return json_answer({"run_id": await here.commands.find_run(beginning)})


@router.post(
    "/runs/{run_id}/retry",
    summary="Run again what did not complete, or all from a node on",
    status_code=202,
    response_model=schemas.Run,
    responses={200: {"model": schemas.RetryPlan, "description": "with `dry_run`"}},
    openapi_extra=fields_of(
        {"from": {"type": ["string", "null"]}, "dry_run": {"type": ["boolean", "null"]}}
    ),
)
async def retry(
    run_id: str, request: Request, here: Here, outputs: WhichOutputs = None
) -> Response:
    from_node, dry_run = (await read_fields(request, here, _RETRY)).fields.values()
    if dry_run:
        return json_answer(await here.commands.plan_retry(run_id, from_node))
    run = await here.commands.retry(run_id, from_node, budget=FULL if outputs else SHOWN)
    return await _run_answer(here, request, run, full=outputs is not None, moved=True)


@router.post(
    "/runs/{run_id}/cancel",
    summary="Cancel what has not finished",
    status_code=202,
    response_model=schemas.Run,
    openapi_extra=fields_of({}),
)
async def cancel(
    run_id: str, request: Request, here: Here, outputs: WhichOutputs = None
) -> Response:
    await read_fields(request, here, {})
    run = await here.commands.cancel(run_id, budget=FULL if outputs else SHOWN)
    return await _run_answer(here, request, run, full=outputs is not None, moved=True)


@router.post(
    "/runs/{run_id}/repair",
    summary="Rebuild its state from its own log",
    response_model=schemas.Repaired,
    openapi_extra=fields_of({"dry_run": {"type": ["boolean", "null"]}}),
)
async def repair(run_id: str, request: Request, here: Here) -> Response:
    (dry_run,) = (await read_fields(request, here, _REPAIR)).fields.values()
    return json_answer(await here.commands.repair(run_id, dry_run=bool(dry_run)))
