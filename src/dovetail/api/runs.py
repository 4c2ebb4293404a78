"""Runs: trigger, read, retry, fork, cancel, repair, delete. Their events are in `events`."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from dovetail.api.admission import caller_of, waits
from dovetail.api.events import chosen_kind
from dovetail.api.outputs import (
    FULL,
    JSON,
    SHOWN,
    YAML,
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
from dovetail.api.problems import public_error
from dovetail.api.request_body import (
    DEFINITION,
    FLAG,
    NO_FIELDS,
    OPTIONAL_DEFINITION,
    PARAMS,
    TEXT,
    VERSION,
    BodyField,
    BodyPart,
    IdempotencyKey,
    RequestBody,
    check_definition,
)
from dovetail.api.responses import (
    AT,
    DEFINITION_EXAMPLE,
    ENDED,
    ETAG,
    GRAPH_EXAMPLE,
    LOCATION,
    NOT_MODIFIED,
    PREFIX,
    RUN,
    STARTED,
    Cursor,
    GraphLayout,
    Here,
    IfNoneMatch,
    Limit,
    NodeStatusName,
    Reply,
    RunStatusName,
    Time,
    Warned,
    header,
    json_answer,
    location,
    made_replies,
    maker_of,
    page_size,
    reply,
    service_of,
    unless_known,
)
from dovetail.api.service import ApiService, unless
from dovetail.core.definition.yaml_text import yaml_text
from dovetail.core.outputs import LARGE_OUTPUT, OutputReference, looks_like_a_reference, reference
from dovetail.core.run import RunState
from dovetail.engine.api import Accepted
from dovetail.engine.commands import MAX_COUNTED_HOURS, MAX_MOVED_RUNS, check_run_ids
from dovetail.engine.idempotency import check_key
from dovetail.engine.ports import RunQuery
from dovetail.engine.views import run_view, with_warnings

router = APIRouter(tags=["runs"])
log = logging.getLogger("dovetail.api")

MAX_WAIT_SECONDS = 24 * 3600.0

# ── schemas ─────────────────────────────────────────────────────────────────────────────

Seconds = Annotated[float, Field(ge=0)]


class Triggered(Reply):
    run_id: str
    status: RunStatusName = Field(description="when the run was accepted")
    workflow: str
    version: int | None = Field(description="null for a definition that is not registered")
    created_at: Time
    warnings: list[Warned] = Field(default=[], description="left out if there are none")


class Failure(BaseModel):
    type: str
    message: str
    node: str = ""


_OUTPUT = (
    "a JSON value; one of more than 64 KiB, or one that has a key `$output` itself, is "
    '`{"$output": {"size", "href"}}` unless `outputs=full`: `href` has it'
)


class ItemCounts(Reply):
    total: int = Field(description="0 while the list is not known")
    pending: int
    running: int
    completed: int
    failed: int
    cancelled: int


class NodeItem(Reply):
    id: str
    handler: str
    status: NodeStatusName
    attempt: int
    epoch: int
    dependencies: list[str]
    reason: str | None
    cause: str | None
    error: Failure | None
    started_at: Time | None
    finished_at: Time | None
    duration: Seconds | None
    worker: str | None
    output: Any = Field(description=_OUTPUT)
    items: ItemCounts | None = Field(
        default=None, description="of a node with `for_each`; null for any other"
    )


class RunItem(Reply):
    run_id: str
    workflow: str
    version: int | None
    status: RunStatusName
    epoch: int
    params: dict[str, Any]
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    duration: Seconds | None
    error: Failure | None
    result: Any = Field(description=f"of each output in it: {_OUTPUT}")


class Run(RunItem):
    forked_from: str | None = Field(
        default=None, description="the run that it is a fork of; left out with `nodes=false`"
    )
    nodes: list[NodeItem] = Field(default=[], description="left out with `nodes=false`")


class Runs(Reply):
    items: list[RunItem]
    next_cursor: str | None


class CountedHour(Reply):
    time: Time = Field(description="when the hour began, in UTC")
    total: int = Field(description="runs that were created in this hour")
    failed: int = Field(description="how many of them failed")


class CountedRuns(Reply):
    counts: dict[RunStatusName, int]
    hours: list[CountedHour] = Field(description="oldest first")


class Results(Reply):
    status: RunStatusName
    result: Any = Field(description=f"of each output in it: {_OUTPUT}")
    outputs: dict[str, Any] = Field(description=f"by node; each is {_OUTPUT}")


class Reason(Reply):
    id: str
    status: NodeStatusName
    code: Literal[
        "waiting_for_parents",
        "rate_limited",
        "backing_off",
        "queued",
        "no_worker",
        "max_concurrency",
        "running",
        "damaged",
    ]
    why: str
    details: dict[str, Any]


class Explanation(Reply):
    run_id: str
    status: RunStatusName
    nodes: list[Reason]
    damage: list[str] = Field(
        description="where its state disagrees with itself or with its log: `repair` rebuilds it"
    )


class Verified(Reply):
    run_id: str
    divergences: list[str] = Field(description="none, if all is well")


class Repaired(Reply):
    run_id: str
    differences: list[str] = Field(
        description="where its state was not what its log says; none, if there was nothing to do"
    )
    repaired: bool


class OutcomeError(Reply):
    type: str = Field(description="as the last word of a problem's `type`")
    message: str


class Outcome(Reply):
    run_id: str
    ok: bool
    status: RunStatusName | None = Field(description="by now; null if there is no such run")
    error: OutcomeError | None


class Outcomes(Reply):
    items: list[Outcome]


class RunId(Reply):
    run_id: str


class RunDefinition(Reply):
    run_id: str
    workflow: str
    version: int | None = Field(description="null for a definition that is not registered")
    definition: dict[str, Any]


class RetryPlan(Reply):
    rerun: list[str]
    reuse: list[str]


class ForkPlan(Reply):
    rerun: list[str] = Field(description="the nodes that would run")
    reuse: list[str] = Field(
        description="the nodes that would begin with the old output, or be skipped again"
    )


# ── parameters, bodies and examples ─────────────────────────────────────────────────────

WhichOutputs = Annotated[
    Literal["full"] | None,
    Query(
        description=f"`full`: also the outputs of more than {LARGE_OUTPUT // 1024} KiB, in whose "
        'place there is `{"$output": {"size", "href"}}` otherwise'
    ),
]
_TRIGGERED = {
    "run_id": RUN,
    "status": "PENDING",
    "workflow": "greet",
    "version": 2,
    "created_at": AT,
}
_SUMMARY = {
    "run_id": RUN,
    "workflow": "greet",
    "version": 2,
    "status": "COMPLETED",
    "epoch": 1,
    "params": {"who": "Ada"},
    "created_at": AT,
    "started_at": STARTED,
    "finished_at": ENDED,
    "duration": 0.0125,
    "error": None,
    "result": {"text": "Hello Ada"},
}
_NODE = {
    "id": "end",
    "handler": "output",
    "status": "COMPLETED",
    "attempt": 1,
    "epoch": 1,
    "dependencies": ["start"],
    "reason": None,
    "cause": None,
    "error": None,
    "started_at": STARTED,
    "finished_at": ENDED,
    "duration": 0.0125,
    "worker": "host-4711",
    "output": {"text": "Hello Ada"},
    "items": None,
}
_LARGE_OUTPUT = {
    "$output": {"size": 912345, "href": f"/api/v1/runs/{RUN}/nodes/fetch/output"},
}
_LARGE = {
    **_NODE,
    "id": "fetch",
    "handler": "call_external_service",
    "dependencies": [],
    "output": _LARGE_OUTPUT,
}
_RUN = {**_SUMMARY, "forked_from": None, "nodes": [_NODE, _LARGE]}
_RUNNING = {
    **_RUN,
    "status": "RUNNING",
    "epoch": 2,
    "finished_at": None,
    "duration": None,
    "result": None,
}
_OF_RUN = {"run_id": RUN, "workflow": "greet", "version": 2}
_PLAN = {"rerun": ["end"], "reuse": ["start"]}
_TEXT = {"text": "Hello Ada"}
_ANY_VALUE: dict[str, Any] = {
    "description": "any JSON value",
    "content": {"application/json": {"schema": {}, "example": _TEXT}},
}
_TRIGGER = RequestBody(
    "TriggerRequest", {"params": PARAMS, "version": VERSION}, {"params": {"who": "Ada"}}
)
_RUN_DEFINITION = RequestBody(
    "RunRequest",
    {"definition": DEFINITION, "params": PARAMS},
    {"definition": DEFINITION_EXAMPLE, "params": {"who": "Ada"}},
)
_RETRY = RequestBody("RetryRequest", {"from": TEXT, "dry_run": FLAG}, {"from": "end"})
_FORK = RequestBody(
    "ForkRequest",
    {
        "definition": OPTIONAL_DEFINITION,
        "version": VERSION,
        "params": PARAMS,
        "from": TEXT,
        "dry_run": FLAG,
    },
    {"definition": DEFINITION_EXAMPLE},
)
_RUN_IDS = RequestBody(
    "RunIdsRequest",
    {
        "run_ids": BodyField(
            "a list of ids",
            lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
            {"type": "array", "items": {"type": "string"}, "maxItems": MAX_MOVED_RUNS},
            required=True,
        )
    },
    {"run_ids": [RUN]},
    deeper=1,
)
_OUTCOMES = {
    "items": [
        {"run_id": RUN, "ok": True, "status": "RUNNING", "error": None},
        {
            "run_id": "unknown",
            "ok": False,
            "status": None,
            "error": {"type": "not_found", "message": "no run 'unknown'"},
        },
    ]
}
_REPAIR = RequestBody("RepairRequest", {"dry_run": FLAG}, {})


# ── endpoints ───────────────────────────────────────────────────────────────────────────


@router.post(
    "/workflows/{name}/runs",
    summary="Run a registered workflow",
    status_code=202,
    response_model=Triggered,
    responses={**made_replies(_TRIGGERED, Triggered), 409: {}},
    openapi_extra=_TRIGGER.openapi,
)
async def trigger(name: str, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    here = await maker_of(request)
    params, version = (await _TRIGGER.read(request, here)).fields.values()
    async with here.making:
        accepted = await here.commands.trigger(
            name, params, version=version, idempotency_key=idempotency_key
        )
        return await _accepted(here, accepted)


@router.post(
    "/runs",
    summary="Run a definition that is not registered",
    status_code=202,
    response_model=Triggered,
    responses={**made_replies({**_TRIGGERED, "version": None}, Triggered), 409: {}},
    openapi_extra=_RUN_DEFINITION.openapi,
)
async def run_definition(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    here = await maker_of(request)
    body = await _RUN_DEFINITION.read(request, here)
    checked = await check_definition(request, here, BodyPart(body.source, "definition"))
    async with here.making:
        accepted = await here.commands.trigger(
            checked, body.fields["params"], idempotency_key=idempotency_key
        )
        return await _accepted(here, accepted)


async def _accepted(here: ApiService, accepted: Accepted) -> Response:
    made = with_warnings(await here.commands.receipt(accepted.run_id), accepted.warnings)
    return json_answer(made, 202 if accepted.created else 200, location(f"runs/{accepted.run_id}"))


@router.get(
    "/runs",
    summary="List runs, newest first, without nodes",
    response_model=Runs,
    responses={200: reply({"items": [_SUMMARY], "next_cursor": "17"}), 404: {}},  # no such batch
)
async def list_runs(
    here: Here,
    status: str | None = None,
    workflow: str | None = None,
    batch: str | None = None,
    q: Annotated[
        str | None,
        Query(
            description="the beginning of an id, a part of the workflow's name, or a string or "
            "number among the params' values, without regard to case"
        ),
    ] = None,
    created_after: Annotated[str | None, Query(description="a time of RFC 3339")] = None,
    created_before: Annotated[str | None, Query(description="a time of RFC 3339")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    query = RunQuery(
        *(status, workflow or None, batch or None, page_size(limit), cursor or None),
        *(LARGE_OUTPUT, q or None, created_after or None, created_before or None),
    )
    found = await here.commands.list_runs(query)
    for view in found["items"]:
        result = view["result"]
        if not _is_whole(result):
            size = result.size if isinstance(result, OutputReference) else len(orjson.dumps(result))
            view["result"] = reference(size, f"{PREFIX}/runs/{view['run_id']}/result")
    return json_answer(found)


_RUN_HEADERS = {
    **ETAG,
    "Last-Event-ID": {
        **header("with nodes: the `seq` of the last event that is in this answer"),
        "required": False,
    },
}


@router.get(
    "/run-counts",
    summary="How many runs there are in each status and in each of the last hours",
    response_model=CountedRuns,
    responses={
        200: reply(
            {
                "counts": {"PENDING": 0, "RUNNING": 1, "COMPLETED": 7, "FAILED": 2, "CANCELLED": 0},
                "hours": [{"time": AT, "total": 10, "failed": 2}],
            }
        )
    },
)
async def run_counts(
    here: Here,
    workflow: str | None = None,
    hours: Annotated[int, Query(ge=1, le=MAX_COUNTED_HOURS)] = 24,
) -> Response:
    return json_answer(await here.commands.run_counts(workflow=workflow or None, hours=hours))


@router.get(
    "/runs/{run_id}",
    summary="A run and its nodes",
    response_model=Run,
    responses={200: reply(_RUN, headers=_RUN_HEADERS), 304: NOT_MODIFIED},
)
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
        await here.unless_closing(_end(here, run_id, request), min(wait, MAX_WAIT_SECONDS))
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
        return answer_of(
            request, parts, read, here.answers, status=202, headers=location(f"runs/{run.id}")
        )
    headers = {"Last-Event-ID": str(run.seq)}
    tag = tag_of_parts(parts)
    return answer_of(request, parts, read, here.answers, headers=headers, tag=tag)


def _is_whole(result: Any) -> bool:
    """Whether a result that was read only if it is not large may be shown as it is."""
    return not isinstance(result, OutputReference) and not looks_like_a_reference(result)


def _reader(here: ApiService, run: RunState) -> Read:
    return lambda wanted: here.commands.read_outputs(run, wanted)


async def _end(here: ApiService, run_id: str, request: Request) -> None:
    """Returns when the run has finished, or the client has gone away. Raises `NotFound`."""
    await unless(_left(request), here.commands.ended(run_id))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/runs/{run_id}/results",
    summary="Its result and outputs",
    response_model=Results,
    responses={
        200: reply(
            {
                "status": "COMPLETED",
                "result": _TEXT,
                "outputs": {"fetch": _LARGE_OUTPUT, "end": _TEXT},
            }
        ),
        409: {},
    },
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
    responses={200: {**_ANY_VALUE, "headers": ETAG}, 304: NOT_MODIFIED, 409: {}},
)
async def node_output(
    run_id: str, node_id: str, request: Request, here: Here, if_none_match: IfNoneMatch = None
) -> Response:
    run, node = await here.commands.with_output(run_id, node_id)
    read = _reader(here, run)
    tag = tag_of_output(run, node, node_id)
    parts = await output_parts(node.output, read)
    return answer_of(request, parts, read, here.answers, tag=tag)


@router.get(
    "/runs/{run_id}/result",
    summary="Its result alone, as it is",
    responses={200: _ANY_VALUE, 409: {}},
)
async def result(run_id: str, request: Request, here: Here, partial: bool = False) -> Response:
    run = await here.commands.with_results(run_id, partial=partial, budget=FULL)
    parts = joined(await RunOutputs(run, PREFIX, full=True).result())
    return answer_of(request, parts, _reader(here, run), here.answers)


@router.get(
    "/runs/{run_id}/explain",
    summary="Why each node that has not finished is where it is",
    response_model=Explanation,
    responses={
        200: reply(
            {
                "run_id": RUN,
                "status": "RUNNING",
                "nodes": [
                    {
                        "id": "fetch",
                        "status": "QUEUED",
                        "code": "rate_limited",
                        "why": "rate limit 'search_api': starts in about 9 s",
                        "details": {"resource_tag": "search_api", "until": AT, "seconds": 9.1},
                    },
                    {
                        "id": "end",
                        "status": "PENDING",
                        "code": "waiting_for_parents",
                        "why": "waits for parent fetch",
                        "details": {"parents": ["fetch"]},
                    },
                ],
                "damage": [],
            }
        )
    },
)
async def explain(run_id: str, here: Here) -> Response:
    return json_answer(await here.commands.explain(run_id))


@router.get(
    "/runs/{run_id}/verify",
    summary="Whether its events agree with the rules",
    response_model=Verified,
    responses={200: reply({"run_id": RUN, "divergences": []})},
)
async def verify(run_id: str, here: Here) -> Response:
    return json_answer({"run_id": run_id, "divergences": await here.commands.verify(run_id)})


@router.get(
    "/runs/{run_id}/graph",
    summary="Where to draw its nodes and edges",
    response_model=GraphLayout,
    responses={200: reply(GRAPH_EXAMPLE)},
)
async def run_graph(run_id: str, here: Here) -> Response:
    return json_answer(await here.commands.run_graph(run_id))


@router.get(
    "/runs/{run_id}/definition",
    summary="The definition that the run was made of",
    response_model=RunDefinition,
    responses={
        200: {
            "description": "with `Accept: application/yaml` the definition alone, as YAML",
            "content": {
                JSON: {"example": {**_OF_RUN, "definition": DEFINITION_EXAMPLE}},
                YAML: {"schema": {"type": "string"}, "example": yaml_text(DEFINITION_EXAMPLE)},
            },
        }
    },
)
async def get_definition(run_id: str, request: Request, here: Here) -> Response:
    found = await here.commands.definition_of_run(run_id)
    if chosen_kind(request.headers.get("accept", ""), YAML, JSON) == JSON:
        return json_answer(found)
    # In a thread: of 10,000 nodes it takes long.
    text = await asyncio.to_thread(yaml_text, found["definition"])
    return Response(text, media_type=f"{YAML}; charset=utf-8")


@router.get(
    "/run-ids/{beginning}",
    summary="The whole id of the one run whose id begins so",
    response_model=RunId,
    responses={200: reply({"run_id": RUN}), 409: {}},
)
async def find_run(beginning: str, here: Here) -> Response:
    return json_answer({"run_id": await here.commands.find_run(beginning)})


@router.post(
    "/runs/{run_id}/retry",
    summary="Run again what did not complete, or all from a node on",
    status_code=202,
    response_model=Run,
    responses={
        200: reply(_PLAN, model=RetryPlan, description="with `dry_run`"),
        202: reply(_RUNNING, headers=LOCATION),
        409: {},
    },
    openapi_extra=_RETRY.openapi,
)
async def retry(
    run_id: str, request: Request, here: Here, outputs: WhichOutputs = None
) -> Response:
    from_node, dry_run = (await _RETRY.read(request, here)).fields.values()
    if dry_run:
        return json_answer(await here.commands.plan_retry(run_id, from_node))
    run = await here.commands.retry(run_id, from_node, budget=FULL if outputs else SHOWN)
    return await _run_answer(here, request, run, full=outputs is not None, moved=True)


@router.post(
    "/runs/{run_id}/fork",
    summary="A new run that begins with the finished nodes of this one",
    status_code=202,
    response_model=Triggered,
    responses={
        **made_replies(_TRIGGERED, Triggered),
        200: reply(
            _PLAN,
            model=Triggered | ForkPlan,
            description="the run that this key made before; with `dry_run`, the plan",
        ),
        409: {},
    },
    openapi_extra=_FORK.openapi,
)
async def fork(run_id: str, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    here = await maker_of(request)
    body = await _FORK.read(request, here)
    definition, version, params, from_node, dry_run = body.fields.values()
    if definition is not None:
        source = BodyPart(body.source, "definition")
        definition = await check_definition(request, here, source)
    given = {"definition": definition, "version": version, "params": params}
    async with here.making:
        if dry_run:
            if idempotency_key is not None:
                check_key(idempotency_key)  # a preview refuses what the fork would refuse
            plan = await here.commands.plan_fork(run_id, **given, from_node=from_node)
            return json_answer(plan)
        accepted = await here.commands.fork(
            run_id, **given, from_node=from_node, idempotency_key=idempotency_key
        )
        return await _accepted(here, accepted)


@router.post(
    "/runs/{run_id}/cancel",
    summary="Cancel what has not finished",
    status_code=202,
    response_model=Run,
    responses={
        202: reply({**_RUNNING, "epoch": 1, "status": "CANCELLED"}, headers=LOCATION),
        409: {},
    },
    openapi_extra=NO_FIELDS.openapi,
)
async def cancel(
    run_id: str, request: Request, here: Here, outputs: WhichOutputs = None
) -> Response:
    await NO_FIELDS.read(request, here)
    run = await here.commands.cancel(run_id, budget=FULL if outputs else SHOWN)
    return await _run_answer(here, request, run, full=outputs is not None, moved=True)


@router.post(
    "/runs/retry",
    summary="Retry many runs, each by itself",
    response_model=Outcomes,
    responses={200: reply(_OUTCOMES)},
    openapi_extra=_RUN_IDS.openapi,
)
async def retry_runs(request: Request, here: Here) -> Response:
    run_ids = await _asked_runs(request, here)
    return _outcomes(request, await here.commands.retry_runs(run_ids))


@router.post(
    "/runs/cancel",
    summary="Cancel many runs, each by itself",
    response_model=Outcomes,
    responses={200: reply(_OUTCOMES)},
    openapi_extra=_RUN_IDS.openapi,
)
async def cancel_runs(request: Request, here: Here) -> Response:
    run_ids = await _asked_runs(request, here)
    return _outcomes(request, await here.commands.cancel_runs(run_ids))


async def _asked_runs(request: Request, here: ApiService) -> list[str]:
    (run_ids,) = (await _RUN_IDS.read(request, here)).fields.values()
    check_run_ids(run_ids)
    return list(run_ids)


def _outcomes(request: Request, done: dict[str, Any]) -> Response:
    for item in done["items"]:
        if item["error"] is not None:
            item["error"] = public_error(request, item["error"])
    return json_answer(done)


@router.post(
    "/runs/{run_id}/repair",
    summary="Rebuild its state from its own log",
    response_model=Repaired,
    responses={
        200: reply(
            {
                "run_id": RUN,
                "differences": ["node 'b' is kept with status COMPLETED, the log makes it QUEUED"],
                "repaired": True,
            }
        )
    },
    openapi_extra=_REPAIR.openapi,
)
async def repair(run_id: str, request: Request, here: Here) -> Response:
    (dry_run,) = (await _REPAIR.read(request, here)).fields.values()
    return json_answer(await here.commands.repair(run_id, dry_run=bool(dry_run)))


@router.delete(
    "/runs/{run_id}",
    summary="Delete a finished run and everything that belongs to it",
    status_code=204,
    responses={409: {}},
)
async def delete_run(run_id: str, request: Request, here: Here) -> Response:
    await here.commands.delete_run(run_id)
    log.info("run %s was deleted for %s", run_id, caller_of(request))
    return Response(status_code=204)
