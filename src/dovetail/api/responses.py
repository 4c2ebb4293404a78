"""How endpoints reply: JSON, `ETag` and its conditions, pages, and what the document says of it.

Schemas and examples that several resources share are here. Each resource has its own beside its
endpoints. The schemas describe: a reply is what the engine gives, and is not validated on the way
out. The tests do that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Literal

import orjson
from fastapi import Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from dovetail.api.service import ApiService

COMPRESSED = "-gzip"
"""Ends the tag of a compressed answer: its bytes are others, what it says is not."""
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


def tag_of(body: bytes) -> str:
    """Of an answer, so that the same answer has the same."""
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'


def names(request: Request, header: str, tag: str | None, *, weak: bool = False) -> bool | None:
    """Whether the header names this tag; None if it was not sent.

    `*` names whatever there is, and nothing names what is not there (a tag of None). A tag that
    only says "much the same" (`W/`) counts where that is good enough.
    """
    sent = request.headers.getlist(header)
    if not sent:
        return None
    text = ", ".join(sent)
    if tag is None or text.strip() == "*":
        return tag is not None
    found = {
        value.removesuffix(COMPRESSED) for mark, value in _TAG.findall(text) if weak or not mark
    }
    return tag.strip('"') in found


MAX_PAGE_SIZE = 1000

Limit = Annotated[
    int,
    Query(
        ge=1, description=f"items of one page; more than {MAX_PAGE_SIZE:,} are {MAX_PAGE_SIZE:,}"
    ),
]
Cursor = Annotated[
    str | None, Query(description="`next_cursor` of the page before; without it the first page")
]
IfNoneMatch = Annotated[
    str | None, Header(description="an `ETag` that is known already; `*`: whatever there is")
]


def page_size(limit: int) -> int:
    return min(limit, MAX_PAGE_SIZE)


PREFIX = "/api/v1"


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def unless_known(request: Request, value: Any, kind: str = "application/json") -> Response:
    """The answer with its `ETag`; 304 if the client has it already (`If-None-Match`).

    Bytes are sent as they are, as this kind of content.
    """
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    tag = tag_of(body)
    headers = {"ETag": tag}
    if names(request, "if-none-match", tag, weak=True):
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, kind)


async def service_of(request: Request) -> ApiService:
    """What an endpoint works with.

    The calls that come by the thousand ask for it themselves: FastAPI takes longer to resolve a
    `Depends` than the engine to make a run.
    """
    service: ApiService = request.app.state.service
    # First of all: a store that is away shall cost a caller moments, not its whole patience.
    await service.fleet.check()
    return service


Here = Annotated[ApiService, Depends(service_of)]
"""An endpoint's parameter: what it works with."""


async def maker_of(request: Request) -> ApiService:
    """The same for a call that makes runs: if too much waits, the caller has to come back later."""
    here = await service_of(request)
    await here.admit()
    return here


def location(resource: str) -> dict[str, str]:
    """The header for what is below the prefix, such as `runs/<id>`."""
    return {"Location": f"{PREFIX}/{resource}"}


# ── for the OpenAPI document ─────────────────────────────────────────────────────────────


def header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "required": True, "schema": {"type": kind}}


LOCATION = {"Location": header("where it is")}
ETAG = {"ETag": header("of this answer, for `If-None-Match` and `If-Match`")}
NOT_MODIFIED = {"description": "as `If-None-Match` has it", "headers": ETAG}


def reply(example: Any, **more: Any) -> dict[str, Any]:
    """For `responses` of an endpoint: a JSON reply like this one."""
    return {"content": {"application/json": {"example": example}}, **more}


def made_replies(
    example: Any,
    model: type[BaseModel],
    status: int = 202,
    known: str = "the key was used before: the same answer",
) -> dict[int | str, dict[str, Any]]:
    """For `responses` of an endpoint that makes something: `status` if it is new, 200 if not."""
    return {
        200: reply(example, headers=LOCATION, model=model, description=known),
        status: reply(example, headers=LOCATION),
    }


# ── schemas ──────────────────────────────────────────────────────────────────────────────

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
NodeStatusName = Literal[
    "PENDING", "QUEUED", "RUNNING", "COMPLETED", "FAILED", "SKIPPED", "CANCELLED"
]
RunStatusName = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProblemFound(Reply):
    """One problem of a definition, of params or of a request."""

    code: str
    message: str
    path: str
    line: int = Field(default=1, ge=1)
    column: int = Field(default=1, ge=1)


class ProblemDetails(Reply):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[ProblemFound] = []
    reasons: list[str] = []


class Warned(Reply):
    """A param that the schema neither names nor forbids."""

    code: Literal["unknown_param"]
    message: str
    path: str


class GraphNode(Reply):
    id: str
    x: float
    y: float
    layer: int = Field(ge=0, description="0 has no dependencies; edges go to later layers")


class GraphEdge(Reply):
    from_: str = Field(alias="from")
    to: str
    points: list[list[float]] = Field(
        description="x and y of each, from the lower side of one node to the upper side of another"
    )


class Change(Reply):
    time: Time
    actor: str = Field(description="the token's name, or the first digits of its digest")
    action: str = Field(description="`register`, `alias`, `delete` or `limit`")
    details: dict[str, Any]


class History(Reply):
    items: list[Change]
    next_cursor: str | None


class GraphLayout(Reply):
    """`x` and `y` are the middle of a node's box, which is 180 wide and 40 high."""

    nodes: list[GraphNode]
    edges: list[GraphEdge]
    width: float
    height: float


# ── examples ─────────────────────────────────────────────────────────────────────────────

RUN = "3f9a51c20b7e4d6f8a1c5e7092b4d6f8"
BATCH = "b7e4d6f83f9a51c28a1c5e7092b4d6f8"
AT = "2026-11-16T06:07:54.123456Z"
STARTED = "2026-11-16T06:07:54.125000Z"
ENDED = "2026-11-16T06:07:54.137500Z"
DEFINITION_EXAMPLE: dict[str, Any] = {
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
GRAPH_EXAMPLE: dict[str, Any] = {
    "nodes": [
        {"id": "start", "x": 110.0, "y": 40.0, "layer": 0},
        {"id": "end", "x": 110.0, "y": 140.0, "layer": 1},
    ],
    "edges": [{"from": "start", "to": "end", "points": [[110.0, 60.0], [110.0, 120.0]]}],
    "width": 220.0,
    "height": 180.0,
}
