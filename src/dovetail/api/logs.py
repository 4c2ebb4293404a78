"""What handlers logged in a run: a page as JSON, all of it as text, or live until the run ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from starlette.responses import Response

from dovetail.api.admission import waits
from dovetail.api.events import MAX_SEQ, PAGE_BYTES, STREAM, chosen_kind, live, number_of
from dovetail.api.outputs import JSON, Streamed
from dovetail.api.responses import (
    MAX_PAGE_SIZE,
    STARTED,
    Here,
    Reply,
    Time,
    json_answer,
    page_size,
)
from dovetail.api.service import ApiService
from dovetail.core.node_logs import LEVELS, log_text
from dovetail.engine.ports import LogQuery

router = APIRouter(tags=["runs"])

TEXT = "text/plain"
DEFAULT_LIMIT = 200
MAX_QUEUED_LINES = 100
"""Lines that were read for a client that is slower: each may have 8 KiB."""
TEXT_LINES = 500
"""That are read and sent at once."""
MAX_NUMBER = (1 << 31) - 1

Level = Annotated[
    str | None, Query(description=f"this one and more severe ones: {', '.join(LEVELS)}")
]
From1 = Annotated[int | None, Query(ge=1, le=MAX_NUMBER)]


class LogItem(Reply):
    seq: int = Field(
        ge=0, description="its number in the run; a line that says what is missing has the last one"
    )
    time: Time
    node: str | None = Field(description="null where lines of any node are missing")
    epoch: int | None
    attempt: int | None
    item: int | None = Field(description="the index in the list of a `for_each` node")
    level: str
    logger: str = Field(description="`stdout` or `stderr` for a line that was printed")
    message: str
    fields: dict[str, Any] | None


class LogItems(Reply):
    items: list[LogItem]
    next_cursor: str | None = Field(
        description="`after` of the next page; null if nothing follows by now"
    )


LINE = {"$ref": "#/components/schemas/LogItem"}
LOG_FRAME = {
    "title": "LogFrame",
    "description": "one line of the stream",
    "type": "object",
    "required": ["id", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$", "description": "its `seq`"},
        "data": {"type": "string", "contentMediaType": JSON, "contentSchema": LINE},
    },
}
_LINE = {
    "seq": 17,
    "time": STARTED,
    "node": "fetch",
    "epoch": 1,
    "attempt": 2,
    "item": None,
    "level": "WARNING",
    "logger": "shop.fetch",
    "message": "3 articles have no price",
    "fields": {"page": 4},
}


@router.get(
    "/runs/{run_id}/logs",
    summary="What its handlers logged: a page, all as text, or live until it ends",
    response_model=LogItems,
    responses={
        200: {
            "description": "a page; with `Accept: text/plain` lines of text, with "
            "`text/event-stream` a stream",
            "content": {
                JSON: {"example": {"items": [_LINE], "next_cursor": "17"}},
                TEXT: {"schema": {"type": "string"}, "example": f"{log_text(_LINE)}\n"},
                STREAM: {"schema": {"$ref": "#/components/schemas/LogFrame"}},
            },
        },
        204: {"description": "`Last-Event-ID` was the last one: do not come back"},
    },
)
async def logs(
    run_id: str,
    request: Request,
    here: Here,
    node: str | None = None,
    epoch: From1 = None,
    attempt: From1 = None,
    item: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="of a `for_each` node")
    ] = None,
    level: Level = None,
    q: Annotated[str | None, Query(description="words in the message, in any case")] = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="only lines after this `seq`")] = 0,
    limit: Annotated[
        int | None,
        Query(
            ge=1,
            description=f"lines of a page, {DEFAULT_LIMIT} unless said; more than "
            f"{MAX_PAGE_SIZE:,} are {MAX_PAGE_SIZE:,}. Text has all lines unless said",
        ),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="where a stream broke off; wins over `after`")
    ] = None,
) -> Response:
    kind = chosen_kind(request.headers.get("accept", ""), STREAM, TEXT, JSON)
    if last_event_id:
        after = number_of(last_event_id)
    query = LogQuery(node or None, epoch, attempt, item, level or None, q or None, after)
    if kind == JSON:
        size = page_size(DEFAULT_LIMIT if limit is None else limit)
        return json_answer(await here.commands.logs(run_id, replace(query, limit=size)))
    # Or `NotFound`, before the answer begins.
    first = await here.commands.logs(run_id, replace(query, limit=1))
    if kind == TEXT:
        return Streamed(_text(here, run_id, query, limit), media_type=f"{TEXT}; charset=utf-8")
    waits(request)
    if last_event_id and first["next_cursor"] is None:
        # A line under this number itself says what is missing before the next one, and was sent.
        is_new = any(line["seq"] > after for line in first["items"])
        ended = (await here.commands.summary(run_id, max_result_bytes=0))["finished_at"]
        if not is_new and ended is not None:
            return Response(status_code=204)  # a browser comes back whenever a stream ends
    feed = here.commands.follow_logs(run_id, query)
    return live(here, feed, b"log of a run", MAX_QUEUED_LINES)


async def _text(
    here: ApiService, run_id: str, query: LogQuery, limit: int | None
) -> AsyncIterator[bytes]:
    """A page at a time: a log may be larger than memory."""
    left = limit
    while left is None or left > 0:
        async with here.answers.taking(PAGE_BYTES):
            page = await here.commands.logs(run_id, replace(query, limit=TEXT_LINES))
            lines = page["items"][:left]
            yield "".join(f"{log_text(line)}\n" for line in lines).encode("utf-8", "replace")
        if page["next_cursor"] is None:
            return
        query = replace(query, after=int(page["next_cursor"]))
        left = None if left is None else left - len(lines)
