"""The OpenAPI document: what FastAPI reads off the endpoints, and what no signature says.

That is the problems and headers that many calls share, the definition's own schema, and the
names in paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from dovetail.api.events import FRAME, Event
from dovetail.api.problems import KIND_OF, RETRY_AFTER, URN
from dovetail.api.responses import PREFIX, header
from dovetail.api.schemas import BATCH, RUN, ProblemDetails
from dovetail.api.security import OPEN_PATHS
from dovetail.core.definition.model import definition_schema
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.idempotency import MAX_KEY_LENGTH

Part = dict[str, Any]

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


def describe(app: FastAPI, routers: Sequence[tuple[APIRouter, str]]) -> None:
    """Let the application give out the whole document; it is made once.

    `routers` are those of the application, with their prefixes.
    """
    generate = app.openapi

    def described() -> Part:
        if app.openapi_schema is None:
            document = generate()
            for router, prefix in routers:
                _put_examples(document["paths"], router, prefix)
            _complete(document)
        return generate()

    app.openapi = described  # type: ignore[method-assign]


def _put_examples(paths: Part, router: APIRouter, prefix: str) -> None:
    """The examples of replies as the endpoints have them: FastAPI leaves their nulls out."""
    for route in router.routes:
        assert isinstance(route, APIRoute)  # noqa: S101
        for method in route.methods or ():
            replies = paths[prefix + route.path_format][method.lower()]["responses"]
            for status, reply in route.responses.items():
                for kind, content in reply.get("content", {}).items():
                    if "example" in content:
                        replies[str(status)]["content"][kind]["example"] = content["example"]


def _complete(document: Part) -> None:
    parts = document["components"]
    known = parts["schemas"]
    for name, schema in (
        ("ProblemDetails", ProblemDetails.model_json_schema(ref_template=_REF)),
        ("Event", Event.model_json_schema(ref_template=_REF)),
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
        for call in calls.values():
            if path in OPEN_PATHS:
                call["security"] = []
            _describe(path, call)
            _name_body(call, known)
    for name, states in _ENUMS.items():
        document["paths"] = _with_enum(document["paths"], states, name)
        parts["schemas"] = _with_enum(parts["schemas"], states, name)
    for name, states in _ENUMS.items():
        parts["schemas"][name] = {"title": name, "type": "string", "enum": list(states)}
    document["servers"] = [{"url": "/", "description": "the server that gives this document"}]


_ENUMS = {"RunStatus": tuple(RunStatus), "NodeStatus": tuple(NodeStatus)}
_CONSTRAINTS: dict[str, Part] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    "Last-Event-ID": {"type": "string", "pattern": "^[0-9]{1,15}$"},
    "status": {"type": "string", "enum": list(RunStatus)},
}
"""Of parameters, as the server has them."""


def _name_body(call: Part, known: Part) -> None:
    """A body with a title becomes a schema of that name, for generated clients."""
    for content in call.get("requestBody", {}).get("content", {}).values():
        if (name := content["schema"].get("title")) is not None:
            known[name] = content["schema"]
            content["schema"] = {"$ref": _REF.format(model=name)}


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
    headers: Part = {"X-Request-Id": header("the caller's own, or a new one")}
    if status in RETRY_AFTER:
        headers["Retry-After"] = header("seconds", "integer")
    if status == 401:
        headers["WWW-Authenticate"] = header("how to ask")
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


def _describe(path: str, call: Part) -> None:
    for parameter in call.get("parameters", ()):
        parameter["name"] = _HEADERS.get(parameter["name"], parameter["name"])
        parameter["schema"] = _sent(parameter)
        if parameter["in"] == "path":
            parameter["description"], parameter["example"] = PARAMETERS[parameter["name"]]
    responses = call["responses"]
    for status in {*_statuses(path, call), *(int(one) for one in responses if one[0] in "45")}:
        own = responses.get(str(status), {}).get("content")
        if own is not None:  # it has a reply of its own, too
            own.update(_problem(status)["content"])
        else:
            responses[str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}
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


def _statuses(path: str, call: Part) -> Iterator[int]:
    """The problems of every call like this; an endpoint names its others in `responses`."""
    yield from (403, 500)
    if path == "/health/live":
        return
    yield 503
    if path in OPEN_PATHS:
        return
    yield from (401, 429)
    sent = {parameter["in"] for parameter in call.get("parameters", ())}
    if "path" in sent and "/rate-limits/" not in path:
        yield 404
    if "requestBody" in call:
        yield from (408, 413, 415)
    if ("requestBody" in call or sent - {"path"}) and not path.endswith("/validate"):
        yield 422
