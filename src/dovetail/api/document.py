"""The OpenAPI document: what FastAPI reads off the endpoints, and what no signature says.

That is every problem a call may be answered with, the headers, the definition's own schema, and
the examples. What it must not know: how a call is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from dovetail.api import schemas
from dovetail.api.answers import PREFIX
from dovetail.api.examples import EXAMPLES, PARAMETERS, RUN, Example
from dovetail.api.problems import KIND_OF, RETRY_AFTER, URN
from dovetail.api.security import OPEN_PATHS
from dovetail.core.definition.model import definition_schema

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
    "POST /workflows/{name}/runs",
    "POST /runs",
    "POST /workflows/{name}/batches",
    "POST /batches",
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
        ("Definition", _definition()),
    ):
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
