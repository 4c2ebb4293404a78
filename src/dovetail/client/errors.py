"""A server's refusal, as the error that the embedded engine would have raised.

The last word of a problem's `type` (RFC 9457) names the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from dovetail.config import env_name
from dovetail.core.errors import (
    ArchiveDown,
    BrokenRecord,
    BrokenRun,
    Changed,
    Conflict,
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    StoreError,
    StoreLost,
    one_line,
)

PROBLEM = "application/problem+json"
HOW_TO_GIVE_A_TOKEN = f"give it with token=…, --token or {env_name('token')}"
_MAX_DETAIL_LENGTH = 2_000


class AccessDenied(DovetailError):
    """The server wants a token, does not know this one, or does not let it do that."""

    type = "access_denied"


class ServerError(DovetailError):
    """The server could not, and it is not the caller's fault."""

    type = "server_error"


class NoDovetail(ServerError):
    """Something answers there, but not as Dovetail does."""

    type = "no_dovetail"


_BY_WORDS: dict[str, Callable[[str], DovetailError]] = {
    "not_found": NotFound,
    "conflict": Conflict,
    "precondition_failed": Changed,
    "run_damaged": BrokenRun,
    "record_damaged": BrokenRecord,
    "store_error": StoreError,
    "store_lost": StoreLost,
    "archive_down": ArchiveDown,
}
_BY_FINDINGS: dict[str, type[InvalidDefinition]] = {
    "invalid_definition": InvalidDefinition,
    "invalid_params": InvalidParams,
    "invalid_request": InvalidParams,
}


def error_of(status: int, headers: Mapping[str, str], content: bytes, url: str) -> DovetailError:
    """The error for an answer that is none; `url` is the server's."""
    problem = _problem(headers, content)
    if problem is None:
        return _not_ours(status, headers, url)
    detail = one_line(str(problem.get("detail", "")), _MAX_DETAIL_LENGTH)
    if status == 401:
        return AccessDenied(f"{url}: {detail}; {HOW_TO_GIVE_A_TOKEN}")
    if status == 403:
        about_the_token = "www-authenticate" in headers
        return AccessDenied(f"{url}: {detail}" + f"; {HOW_TO_GIVE_A_TOKEN}" * about_the_token)
    if status == 413:
        return InvalidDefinition([Problem("too_large", detail, "")])
    kind = str(problem.get("type", "")).rpartition(":")[2]
    if kind in _BY_FINDINGS:
        return _BY_FINDINGS[kind](_findings(problem, detail))
    if kind in _BY_WORDS:
        return _BY_WORDS[kind](detail)
    request_id = headers.get("x-request-id")
    where = f" (request {one_line(request_id)} in its log)" if request_id and status >= 500 else ""
    return ServerError(f"{url} answers {status}: {detail}{where}")


def findings_of(found: Any) -> tuple[Problem, ...]:
    """Problems of a validation, from the fields of the API."""
    return tuple(
        Problem(
            str(one["code"]),
            str(one["message"]),
            str(one["path"]),
            one.get("line"),
            one.get("column"),
        )
        for one in found
    )


def _findings(problem: Mapping[str, Any], detail: str) -> tuple[Problem, ...]:
    return findings_of(problem.get("errors", ())) or (Problem("invalid_field", detail, ""),)


def _problem(headers: Mapping[str, str], content: bytes) -> dict[str, Any] | None:
    if headers.get("content-type", "").partition(";")[0].strip().lower() != PROBLEM:
        return None
    try:
        problem = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return problem if isinstance(problem, dict) else None


def _not_ours(status: int, headers: Mapping[str, str], url: str) -> DovetailError:
    """From something in between, or from another server altogether."""
    if status in (502, 503, 504, 429):
        return ServerError(
            f"{url} answers {status}: what is in front of the server cannot reach it"
        )
    to = headers.get("location")
    if 300 <= status < 400 and to:
        # Not followed: the token is for the named server alone.
        return NoDovetail(f"{url} sends its callers to {one_line(to)}; use that address instead")
    kind = one_line(headers.get("content-type", "nothing"))
    return NoDovetail(
        f"{url} answers {status} with {kind}, which no Dovetail server does; is the address right?"
    )
