"""Every error as RFC 9457 `application/problem+json`, and the table of their statuses.

The `type` of an error decides, so an error of a new store is a new row here. The details of a
server error (5xx) are in the log, under the same request id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from dovetail.core.errors import (
    DovetailError,
    InvalidDefinition,
    Problem,
    StoreError,
    StoreLost,
    one_line,
)

log = logging.getLogger("dovetail.api")

# Errors that the engine raises, by their `type`.
STATUS_OF = {
    "invalid_request": 422,
    "invalid_definition": 422,
    "invalid_params": 422,
    "not_found": 404,
    "conflict": 409,
    "expired": 410,
    "precondition_failed": 412,
    "overloaded": 429,
    "run_damaged": 409,
    "record_damaged": 409,
    "store_error": 503,
    "store_lost": 503,
    "archive_down": 503,
}
# What HTTP itself refuses. Words of our own: Python's change from version to version.
KIND_OF = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    412: "precondition_failed",
    413: "too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    500: "internal_error",
    503: "unavailable",
}
RETRY_AFTER = {429: 1, 503: 5}
"""Seconds after which it is worth asking again, where the error does not say it itself."""
URN = "urn:dovetail:problem:"


class Refusal(DovetailError):
    """A request that is wrong as a request, before its meaning is looked at."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = KIND_OF[status]
        self.headers = dict(headers or {})


class InvalidRequest(InvalidDefinition):
    """A body, a query or a header with fields that cannot be used."""

    type = "invalid_request"


def invalid_field(message: str, path: str) -> InvalidRequest:
    """One wrong field of a request."""
    return InvalidRequest([Problem("invalid_field", message, path)])


def answer(
    status: int,
    kind: str,
    detail: str,
    scope: Scope,
    *,
    errors: Iterable[Problem] | None = None,
    reasons: Iterable[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response; `kind` is the stable word that programs compare."""
    problem: dict[str, Any] = {
        "type": URN + kind,
        "title": kind.replace("_", " ").capitalize(),
        "status": status,
        "detail": detail,
        "instance": scope["path"],
    }
    if "request_id" in scope.get("state", {}):
        problem["request_id"] = scope["state"]["request_id"]
    if errors is not None:
        problem["errors"] = [one.as_dict() for one in errors]
    if reasons is not None:
        problem["reasons"] = list(reasons)
    headers = dict(headers or {})
    if status in RETRY_AFTER:
        headers.setdefault("Retry-After", str(RETRY_AFTER[status]))
    return Response(orjson.dumps(problem), status, headers, "application/problem+json")


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """The same from outside the application, where nothing catches a `Refusal`."""
    response = answer(refusal.status, refusal.type, str(refusal), scope, headers=refusal.headers)
    await response(scope, receive, send)


def answer_problems(app: FastAPI, hidden: re.Pattern[str], doubt: Callable[[], None]) -> None:
    """Let the application answer every error as a problem.

    `hidden` is what no client shall read in a message. `doubt` is called when a store has failed a
    request: whether the server is ready is to be found out anew.
    """

    app.state.hidden = hidden

    async def of_dovetail(request: Request, error: Exception) -> Response:
        if isinstance(error, Refusal):
            return answer(
                error.status, error.type, str(error), request.scope, headers=error.headers
            )
        kind = getattr(error, "type", "error")
        status = STATUS_OF.get(kind, 500)
        if status >= 500:
            log.error("%s: %s", _called(request), error)
            words = _AWAY
            if isinstance(error, StoreLost):
                words = error.reason
            if isinstance(error, StoreError):
                doubt()
            return answer(status, kind, words if status == 503 else _BUG, request.scope)
        headers = {}
        if status in RETRY_AFTER and getattr(error, "retry_after", None) is not None:
            headers["Retry-After"] = str(max(1, ceil(error.retry_after)))  # type: ignore[attr-defined]
        if isinstance(error, InvalidDefinition):
            count = len(error.problems)
            words = error.problems[0].message if count == 1 else f"{count} problems; see errors"
            return answer(status, kind, words, request.scope, errors=error.problems)
        return answer(status, kind, hidden.sub("", str(error)), request.scope, headers=headers)

    async def of_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        found = [_query_problem(one) for one in error.errors()]
        return await of_dovetail(request, InvalidRequest(found))

    async def of_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        headers = dict(error.headers or {})
        status, words = error.status_code, str(error.detail)
        if status == 404:
            words = "there is nothing here; /docs lists every call"
        elif status == 405:
            if methods := allowed_methods(app, request.scope["path"]):  # else it is no call of ours
                headers["Allow"] = ", ".join(methods)
            allowed = headers.get("Allow", "other methods")
            words = f"{one_line(request.method, 20)} is not allowed here, only {allowed}"
        return answer(status, KIND_OF.get(status, "error"), words, request.scope, headers=headers)

    async def of_a_lost_client(request: Request, error: Exception) -> Response:
        return answer(400, KIND_OF[400], "the client went away", request.scope)

    async def of_a_bug(request: Request, error: Exception) -> Response:
        return answer(500, KIND_OF[500], _BUG, request.scope)

    app.add_exception_handler(DovetailError, of_dovetail)
    app.add_exception_handler(RequestValidationError, of_query)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(ClientDisconnect, of_a_lost_client)
    app.add_exception_handler(Exception, of_a_bug)


_AWAY = "what runs are kept in cannot be used at the moment"
_BUG = "something went wrong here; the log has it under the request id"


def public_error(request: Request, error: Mapping[str, Any]) -> dict[str, Any]:
    """An error of one item of a reply, `type` and `message`, as its own call would show it."""
    status = STATUS_OF.get(error["type"], 500)
    if status >= 500:
        log.error("%s: %s", _called(request), error["message"])
    message = _AWAY if status == 503 else _BUG
    if status < 500:
        message = request.app.state.hidden.sub("", error["message"])
    return {"type": error["type"], "message": message}


def _called(request: Request) -> str:
    return f"{request.method} {request.scope['path']} ({request.state.request_id})"


def _query_problem(error: Mapping[str, Any]) -> Problem:
    where = [str(part) for part in error["loc"][1:]] or [str(error["loc"][0])]
    message = str(error["msg"]).replace("Input should be", "must be", 1)
    return Problem("invalid_field", message, ".".join(where))


def allowed_methods(app: FastAPI, path: str) -> list[str]:
    """Of every call at this path; routing itself only knows those of the first that fits."""
    found: set[str] = set()
    for template, calls in app.openapi()["paths"].items():
        # The document does not say that a tag may have slashes.
        if compile_path(template.replace("{tag}", "{tag:whole}"))[0].match(path):
            found.update(method.upper() for method in calls)
    if "GET" in found:
        found.add("HEAD")
    return sorted(found)
