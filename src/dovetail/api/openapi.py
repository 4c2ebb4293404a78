"""An example for every call: what is sent, and what comes back.

They are part of the OpenAPI document and of `/docs`; the tests hold each against its schema, and
send those that can be sent. What it must not know: how a call is answered.

The OpenAPI document: what FastAPI reads off the endpoints, and what no signature says.

That is every problem a call may be answered with, the headers, the definition's own schema, and
the examples. What it must not know: how a call is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI

from dovetail.api import schemas
from dovetail.api.events import FRAME
from dovetail.api.problems import KIND_OF, RETRY_AFTER, URN
from dovetail.api.responses import PREFIX
from dovetail.api.security import OPEN_PATHS
from dovetail.core.definition.model import definition_schema
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.idempotency import MOST_CHARACTERS

RUN = "3f9a51c20b7e4d6f8a1c5e7092b4d6f8"
BATCH = "b7e4d6f83f9a51c28a1c5e7092b4d6f8"
AT = "2026-11-16T06:07:54.123456Z"
STARTED = "2026-11-16T06:07:54.125000Z"
ENDED = "2026-11-16T06:07:54.137500Z"

DEFINITION = {
    "name": "greet",
    "params": {"type": "object", "required": ["who"], "properties": {"who": {"type": "string"}}},
    "nodes": [
        {"id": "start", "handler": "input"},
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["start"],
            "config": {"text": "Hello {{ start.who }}"},
        },
    ],
}
_ALIASES = {"latest": 2, "stable": 1}
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
_RUN = {**_SUMMARY, "nodes": [_NODE, _LARGE]}
_RUNNING = {
    **_RUN,
    "status": "RUNNING",
    "epoch": 2,
    "finished_at": None,
    "duration": None,
    "result": None,
}
_BATCH = {
    "batch_id": BATCH,
    "workflow": "greet",
    "count": 2,
    "counts": {"COMPLETED": 2},
    "created_at": AT,
    "finished_at": ENDED,
    "runs": [{"index": 0, "run_id": RUN, "status": "COMPLETED"}],
    "next_cursor": "1",
}
_LIMIT = {"tag": "search_api", "rate_per_second": 10.0, "burst": 1}
_WORKER = {
    "worker_id": "host-4711",
    "host": "host",
    "pid": 4711,
    "started_at": AT,
    "last_heartbeat": ENDED,
    "handlers": ["input", "output"],
    "handler_details": [
        {"name": name, "max_retries": 0, "secrets": False, "version": 1}
        for name in ("input", "output")
    ],
    "running": 0,
    "concurrency": 32,
    "alive": True,
}
_ITEMS = [{"who": "Ada"}, {"who": "Grace"}]


class Example(NamedTuple):
    answer: Any
    """What is sent back with the first of the 2xx statuses that has a body."""
    body: Any = None
    other: Any = None
    """Of its other 2xx status, where that is something else."""


EXAMPLES = {
    "POST /workflows": Example({"name": "greet", "version": 1, "created": True}, DEFINITION),
    "POST /workflows/validate": Example(
        {"valid": True, "errors": [], "warnings": [], "layers": [["start"], ["end"]]}, DEFINITION
    ),
    "GET /workflows": Example(
        {
            "items": [
                {
                    "name": "greet",
                    "latest_version": 2,
                    "aliases": _ALIASES,
                    "created_at": AT,
                    "updated_at": AT,
                }
            ],
            "next_cursor": None,
        }
    ),
    "GET /workflows/{name}": Example(
        {
            "name": "greet",
            "version": 2,
            "definition": DEFINITION,
            "aliases": _ALIASES,
            "created_at": AT,
        }
    ),
    "GET /workflows/{name}/versions": Example(
        {"items": [{"version": 2, "sha256": "9f86d081884c7d65" * 4, "created_at": AT}]}
    ),
    "PUT /workflows/{name}/aliases/{alias}": Example(
        {"name": "greet", "alias": "stable", "version": 1}, {"version": 1}
    ),
    "POST /workflows/{name}/runs": Example(_TRIGGERED, {"params": {"who": "Ada"}}),
    "POST /runs": Example(
        {**_TRIGGERED, "version": None}, {"definition": DEFINITION, "params": {"who": "Ada"}}
    ),
    "GET /runs": Example({"items": [_SUMMARY], "next_cursor": "17"}),
    "GET /runs/{run_id}": Example(_RUN),
    "GET /runs/{run_id}/results": Example(
        {
            "status": "COMPLETED",
            "result": {"text": "Hello Ada"},
            "outputs": {"fetch": _LARGE_OUTPUT, "end": {"text": "Hello Ada"}},
        }
    ),
    "GET /runs/{run_id}/result": Example({"text": "Hello Ada"}),
    "GET /runs/{run_id}/nodes/{node_id}/output": Example({"text": "Hello Ada"}),
    "GET /runs/{run_id}/explain": Example(
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
    ),
    "GET /runs/{run_id}/verify": Example({"run_id": RUN, "divergences": []}),
    "POST /runs/{run_id}/repair": Example(
        {
            "run_id": RUN,
            "differences": ["node 'b' is kept with status COMPLETED, the log makes it QUEUED"],
            "repaired": True,
        },
        {},
    ),
    "GET /run-ids/{beginning}": Example({"run_id": RUN}),
    "POST /runs/{run_id}/retry": Example(
        _RUNNING, {"from": "end"}, {"rerun": ["end"], "reuse": ["start"]}
    ),
    "POST /runs/{run_id}/cancel": Example({**_RUNNING, "epoch": 1, "status": "CANCELLED"}, {}),
    "GET /runs/{run_id}/events": Example(
        [
            {
                "seq": 8,
                "time": ENDED,
                "type": "node.completed",
                "epoch": 1,
                "node": "end",
                "attempt": 1,
            },
            {"seq": 9, "time": ENDED, "type": "run.completed", "epoch": 1},
        ]
    ),
    "POST /workflows/{name}/batches": Example({"batch_id": BATCH, "count": 2}, {"items": _ITEMS}),
    "POST /batches": Example(
        {"batch_id": BATCH, "count": 2}, {"definition": DEFINITION, "items": _ITEMS}
    ),
    "GET /batches": Example(
        {
            "items": [{k: v for k, v in _BATCH.items() if k not in ("runs", "next_cursor")}],
            "next_cursor": None,
        }
    ),
    "GET /batch-ids/{beginning}": Example({"batch_id": BATCH}),
    "GET /batches/{batch_id}": Example(_BATCH),
    "POST /batches/{batch_id}/retry": Example(_BATCH, {}),
    "GET /rate-limits": Example({"items": [_LIMIT]}),
    "GET /rate-limits/{tag}": Example(_LIMIT),
    "PUT /rate-limits/{tag}": Example(_LIMIT, {"rate_per_second": 10, "burst": 1}),
    "GET /workers": Example({"items": [_WORKER]}),
    "GET /dead-letters": Example(
        {
            "items": [
                {
                    "time": AT,
                    "stream": "wf:stream:results",
                    "id": "1763273274123-0",
                    "reason": "no token",
                    "fields": {"run_id": RUN},
                }
            ]
        }
    ),
    "GET /health/live": Example({"status": "ok"}),
    "GET /health/ready": Example({"status": "ok"}),
    "GET /health/workers": Example({"alive": 1, "dead": 0}),
}

PARAMETERS = {
    "name": ("a workflow's name", "greet"),
    "alias": ("a name for a version", "stable"),
    "run_id": ("the id of a run", RUN),
    "node_id": ("the id of a node", "end"),
    "beginning": ("at least 4 characters of an id", RUN[:6]),
    "batch_id": ("the id of a batch", BATCH),
    "tag": ("a `resource_tag`", "search_api"),
}
"""What each name in a path is, and an example of it."""


Part = dict[str, Any]

_WORDS = {
    401: "a token is needed, or this one is not known",
    403: "the token may only read, or the request comes from where it may not",
    404: "there is no such thing",
    408: "the body took too long",
    409: "its state forbids it, or the key was used for another request",
    412: "it is no longer as it was seen",
    413: "the body is too large",
    415: "the body is neither JSON nor YAML",
    422: "the request has fields that cannot be used; `errors` has all of them",
    429: "too much is going on; come back later",
    500: "a bug; the log has it under the request id",
    503: "a store is away, or the server is stopping; come back later",
}
_KINDS = {**KIND_OF, 409: "conflict", 422: "invalid_request", 503: "store_error"}
_CONFLICTS = {
    "DELETE /workflows/{name}",
    "PUT /workflows/{name}/aliases/{alias}",
    "DELETE /workflows/{name}/aliases/{alias}",
    "POST /workflows/{name}/runs",
    "POST /runs",
    "POST /workflows/{name}/batches",
    "POST /batches",
    "GET /batch-ids/{beginning}",
    "GET /runs/{run_id}/results",
    "GET /runs/{run_id}/result",
    "GET /runs/{run_id}/nodes/{node_id}/output",
    "GET /run-ids/{beginning}",
    "POST /runs/{run_id}/retry",
    "POST /runs/{run_id}/cancel",
    "POST /batches/{batch_id}/retry",
}
_MAY_BE_MISSING = {"GET /runs", "GET /metrics"}  # a batch, or what counts
_CHANGED = {
    "POST /workflows",
    "DELETE /workflows/{name}",
    "PUT /workflows/{name}/aliases/{alias}",
    "DELETE /workflows/{name}/aliases/{alias}",
}
_TAGGED = {
    "GET /workflows/{name}",
    "GET /runs/{run_id}",
    "GET /runs/{run_id}/nodes/{node_id}/output",
}
_LOCATED = {
    "POST /workflows",
    "POST /workflows/{name}/runs",
    "POST /runs",
    "POST /workflows/{name}/batches",
    "POST /batches",
    "POST /runs/{run_id}/retry",
    "POST /runs/{run_id}/cancel",
}


def describe(app: FastAPI) -> None:
    """Let the application give out the whole document; it is made once."""
    generate = app.openapi

    def described() -> Part:
        if app.openapi_schema is None:
            _complete(generate())
        return generate()

    app.openapi = described  # type: ignore[method-assign]


def _complete(document: Part) -> None:
    parts = document["components"]
    known = parts["schemas"]
    for name, schema in (
        ("ProblemDetails", schemas.ProblemDetails.model_json_schema(ref_template=_REF)),
        ("Event", schemas.Event.model_json_schema(ref_template=_REF)),
        ("EventFrame", FRAME),
        ("Definition", _definition()),
    ):
        schema = dict(schema)
        known.update(schema.pop("$defs", {}))
        known[name] = schema
    parts["responses"] = {_name(status): _problem(status) for status in _WORDS}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            name = f"{method.upper()} {path.removeprefix(PREFIX)}"
            if path in OPEN_PATHS:
                call["security"] = []
            _describe(name, path, call)
            _name_body(name, call, known)
    for name, states in _ENUMS.items():
        document["paths"] = _with_enum(document["paths"], states, name)
        parts["schemas"] = _with_enum(parts["schemas"], states, name)
    for name, states in _ENUMS.items():
        parts["schemas"][name] = {"title": name, "type": "string", "enum": list(states)}
    document["servers"] = [{"url": "/", "description": "the server that gives this document"}]


_ENUMS = {"RunStatus": tuple(RunStatus), "NodeStatus": tuple(NodeStatus)}
_BODIES = {
    "POST /workflows/{name}/runs": "TriggerRequest",
    "POST /runs": "RunRequest",
    "POST /workflows/{name}/batches": "BatchRequest",
    "POST /batches": "DefinitionBatchRequest",
    "POST /runs/{run_id}/retry": "RetryRequest",
    "POST /runs/{run_id}/repair": "RepairRequest",
    "POST /runs/{run_id}/cancel": "EmptyRequest",
    "POST /batches/{batch_id}/retry": "EmptyRequest",
    "PUT /workflows/{name}/aliases/{alias}": "AliasRequest",
    "PUT /rate-limits/{tag}": "RateLimitRequest",
}
"""What generated clients call the bodies that have fields of their own."""
_CONSTRAINTS: dict[str, Part] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS},
    "Last-Event-ID": {"type": "string", "pattern": "^[0-9]{1,15}$"},
    "status": {"type": "string", "enum": list(RunStatus)},
}
"""Of parameters, as the server has them."""


def _name_body(name: str, call: Part, known: Part) -> None:
    if name not in _BODIES:
        return
    for content in call["requestBody"]["content"].values():
        known[_BODIES[name]] = {"title": _BODIES[name], **content["schema"]}
        content["schema"] = {"$ref": _REF.format(model=_BODIES[name])}


def _with_enum(value: Any, states: Sequence[str], name: str) -> Any:
    """The same with a reference wherever these states are listed."""
    if isinstance(value, list):
        return [_with_enum(inner, states, name) for inner in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("enum"), list) and sorted(value["enum"]) == sorted(states):
        rest = {key: value[key] for key in value if key in ("description",)}
        return {"$ref": _REF.format(model=name), **rest}
    return {key: _with_enum(inner, states, name) for key, inner in value.items()}


_REF = "#/components/schemas/{model}"


def _definition() -> Part:
    """The schema that editors use, with its parts where this document keeps them."""
    schema = _moved(definition_schema())
    del schema["$schema"]
    return {**schema, "$defs": {f"Definition{k}": v for k, v in schema["$defs"].items()}}


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        moved = {key: _moved(inner) for key, inner in value.items()}
        if isinstance(value.get("$ref"), str):
            name = value["$ref"].removeprefix("#/$defs/")
            moved["$ref"] = _REF.format(model=f"Definition{name}")
        return moved
    return [_moved(inner) for inner in value] if isinstance(value, list) else value


def _name(status: int) -> str:
    return _KINDS[status].title().replace("_", "")


def _problem(status: int) -> Part:
    kind = _KINDS[status]
    example = {
        "type": URN + kind,
        "title": kind.replace("_", " ").capitalize(),
        "status": status,
        "detail": _WORDS[status],
        "instance": f"{PREFIX}/runs/{RUN}",
        "request_id": "9c1185a5c5e9fc54",
    }
    if status == 422:
        example["errors"] = [
            {"code": "invalid_field", "message": "'who' is required", "path": "params.who"}
        ]
    headers: Part = {"X-Request-Id": _header("the caller's own, or a new one")}
    if status in RETRY_AFTER:
        headers["Retry-After"] = _header("seconds", "integer")
    if status == 401:
        headers["WWW-Authenticate"] = _header("how to ask")
    return {
        "description": _WORDS[status],
        "headers": headers,
        "content": {
            "application/problem+json": {
                "schema": {"$ref": _REF.format(model="ProblemDetails")},
                "example": example,
            }
        },
    }


def _header(words: str, kind: str = "string") -> Part:
    return {"description": words, "required": True, "schema": {"type": kind}}


def _describe(name: str, path: str, call: Part) -> None:
    for parameter in call.get("parameters", ()):
        parameter["name"] = _HEADERS.get(parameter["name"], parameter["name"])
        parameter["schema"] = _sent(parameter)
        if parameter["in"] == "path":
            parameter["description"], parameter["example"] = PARAMETERS[parameter["name"]]
    _add_examples(call, EXAMPLES.get(name))
    responses = call["responses"]
    if name in _TAGGED:
        tag = {"ETag": _header("of this answer, for `If-None-Match` and `If-Match`")}
        responses["200"]["headers"] = tag
        responses["304"] = {"description": "as `If-None-Match` has it", "headers": tag}
    for status in ("200", "201", "202"):
        if name in _LOCATED and status in responses and (name, status) != _A_PLAN:
            responses[status]["headers"] = {"Location": _header("where it is")}
    for number in _statuses(name, path, call):
        problem = {"$ref": f"#/components/responses/{_name(number)}"}
        if str(number) in responses:  # it has an answer of its own, too
            responses[str(number)]["content"].update(_problem(number)["content"])
        else:
            responses[str(number)] = problem
    call["responses"] = dict(sorted(responses.items()))


_HEADERS = {
    "idempotency-key": "Idempotency-Key",
    "last-event-id": "Last-Event-ID",
    "if-match": "If-Match",
    "if-none-match": "If-None-Match",
}


def _sent(parameter: Part) -> Part:
    """Its schema without null: what is not given is left out."""
    schema = dict(parameter["schema"])
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        schema |= kinds[0]
    return {**schema, **_CONSTRAINTS.get(parameter["name"], {})}


_A_PLAN = ("POST /runs/{run_id}/retry", "200")


def _add_examples(call: Part, example: Example | None) -> None:
    if example is None:
        return
    if example.body is not None:
        call["requestBody"]["content"]["application/json"]["example"] = example.body
    answers = [example.answer, example.other or example.answer]
    found = [
        call["responses"][status]["content"]["application/json"]
        for status in ("202", "201", "200")
        if status in call["responses"]
    ]
    for content, answer in zip(found, answers, strict=False):
        content["example"] = answer


def _statuses(name: str, path: str, call: Part) -> Iterator[int]:
    """The problems that a call may be answered with."""
    yield from (403, 500)
    if path == "/health/live":
        return
    yield 503
    if path in OPEN_PATHS:
        return
    yield from (401, 429)
    sent = {parameter["in"] for parameter in call.get("parameters", ())}
    if ("path" in sent and "/rate-limits/" not in path) or name in _MAY_BE_MISSING:
        yield 404
    if "requestBody" in call:
        yield from (408, 413, 415)
    if ("requestBody" in call or sent - {"path"}) and not path.endswith("/validate"):
        yield 422
    if name in _CONFLICTS:
        yield 409
    if name in _CHANGED:
        yield 412
