"""A run's events: as a list, or live as `text/event-stream` until the last one. And the feed: the
run events of all runs, live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from math import inf
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse

from dovetail.api.admission import waits
from dovetail.api.outputs import JSON, Streamed
from dovetail.api.problems import invalid_field
from dovetail.api.responses import ENDED, Here, Time, header, json_answer
from dovetail.api.service import ApiService
from dovetail.core.errors import InvalidParams

router = APIRouter(tags=["runs"])

KEEP_ALIVE_SECONDS = 15.0
"""A comment after so much silence, or proxies would take the connection for dead."""
MAX_SEQ = 1 << 53
MAX_QUEUED_EVENTS = 1000
"""Events that were read for a client that is slower."""
PAGE = 1000
"""Events of a list that are read at once."""
PAGE_BYTES = 1 << 20
"""What such a page is taken to have."""
STREAM = "text/event-stream"
Queued = asyncio.Queue[dict[str, Any] | Exception | None]
Frame = Callable[[dict[str, Any]], bytes]


class Event(BaseModel):
    """Some types have more fields."""

    seq: int = Field(ge=1)
    time: Time
    type: str
    epoch: int
    node: str = ""
    attempt: int = 0


EVENT = {"$ref": "#/components/schemas/Event"}
_EXAMPLE = [
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
FRAME = {
    "title": "EventFrame",
    "description": "one event of the stream",
    "type": "object",
    "required": ["id", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$", "description": "its `seq`"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": EVENT,
        },
    },
}


@router.get(
    "/runs/{run_id}/events",
    summary="Its events, live until the last one, or as a list",
    responses={
        200: {
            "description": "a list; with `Accept: text/event-stream` a stream",
            "content": {
                "application/json": {
                    "schema": {"type": "array", "items": EVENT},
                    "example": _EXAMPLE,
                },
                STREAM: {"schema": {"$ref": "#/components/schemas/EventFrame"}},
            },
        },
        204: {"description": "the run has ended, and nothing comes after that event"},
    },
)
async def events(
    run_id: str,
    request: Request,
    here: Here,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="only those after this")] = 0,
    last_event_id: Annotated[
        str | None, Header(description="where a stream broke off; wins over `after`")
    ] = None,
) -> Response:
    if last_event_id:
        after = number_of(last_event_id)
    if chosen_kind(request.headers.get("accept", ""), STREAM, JSON) == JSON:
        first = await here.commands.events(run_id, after=after, limit=PAGE)
        if len(first) < PAGE:
            return json_answer(first)
        return Streamed(_listed(here, run_id, first), media_type=JSON)
    waits(request)
    # Or `NotFound`, before the stream begins.
    run = await here.commands.summary(run_id, max_result_bytes=0)
    ended = run["finished_at"] is not None
    # Compared with the run itself: its last events may not be in the list yet. One that goes on is
    # read because it may be damaged.
    last = await here.commands.last_seq(run_id) if after or not ended else inf
    if ended and last <= after:
        # A browser comes back whenever a stream ends; 204 says not to.
        return Response(status_code=204)
    return live(here, here.commands.watch(run_id, after), b"events of a run", MAX_QUEUED_EVENTS)


class FeedItem(Event):
    """An event of a run, and which run it is."""

    run_id: str
    workflow: str


FEED_FRAME = {
    "title": "FeedFrame",
    "description": "one event of the feed",
    "type": "object",
    "required": ["id", "data"],
    "properties": {
        "id": {"type": "string", "description": "opaque; the feed resumes after it"},
        "data": {
            "type": "string",
            "contentMediaType": JSON,
            "contentSchema": {"$ref": "#/components/schemas/FeedItem"},
        },
    },
}


@router.get(
    "/events",
    summary="The run events of all runs, live",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "a stream without an end: runs that are created, started, completed, "
            "failed, cancelled and retried",
            "headers": {"Last-Event-ID": header("the id after which the stream begins")},
            "content": {STREAM: {"schema": {"$ref": "#/components/schemas/FeedFrame"}}},
        },
        410: {"description": "events after that id may be missing"},
    },
)
async def feed(
    request: Request,
    here: Here,
    after: Annotated[
        str | None, Query(description="the `id` of an event; without it from now on")
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="where a stream broke off; wins over `after`")
    ] = None,
) -> Response:
    waits(request)
    try:
        # Empty is none, as with every parameter of a list.
        start = await here.commands.feed_start(last_event_id or after or None)
    except InvalidParams as error:
        name = "Last-Event-ID" if last_event_id else "after"
        raise invalid_field(error.problems[0].message, name) from None
    stream = here.commands.feed(start)
    answer = live(here, stream, b"events of all runs", MAX_QUEUED_EVENTS, _feed_frame)
    # So that a client that loses the connection before the first event misses none.
    answer.headers["Last-Event-ID"] = start
    return answer


def live(
    here: ApiService,
    feed: AsyncGenerator[dict[str, Any]],
    about: bytes,
    max_queued: int,
    frame: Frame | None = None,
) -> Response:
    """A stream of what comes out of the feed; it ends with the feed. The id of a frame is the `seq`
    of its event, unless `frame` makes it."""
    headers = {"X-Accel-Buffering": "no"}
    frames = _frames(here, feed, about, max_queued, frame or _frame)
    return StreamingResponse(frames, headers=headers, media_type=STREAM)


def number_of(last_event_id: str) -> int:
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 16):
        raise invalid_field("must be the id of an event, a number", "Last-Event-ID")
    return int(last_event_id)


def chosen_kind(accept: str, *offered: str) -> str:
    """The content type that is named, as a browser's `EventSource` does, and liked best; of equal
    ones the first.

    JSON is the default, because a client that takes anything expects an answer with an end.
    """
    liked = dict.fromkeys(offered, 0.0)
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind in liked:
            liked[kind] = _quality(parameters)
    best = max(liked, key=liked.__getitem__)
    return best if liked[best] > 0 else JSON


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


async def _listed(
    here: ApiService, run_id: str, page: list[dict[str, Any]]
) -> AsyncIterator[bytes]:
    """A list that is too long to be in memory at once, a page at a time."""
    opening = b"["
    while page:
        async with here.answers.taking(PAGE_BYTES):
            yield opening + orjson.dumps(page)[1:-1]
            opening, after = b",", page[-1]["seq"]
            last, page = len(page) < PAGE, []
            if not last:
                page = await here.commands.events(run_id, after=after, limit=PAGE)
    yield b"]"


async def _frames(
    here: ApiService,
    feed: AsyncGenerator[dict[str, Any]],
    about: bytes,
    max_queued: int,
    frame: Frame,
) -> AsyncIterator[bytes]:
    # The headers go out with the first bytes: a client shall know at once that it listens.
    yield b": %b\n\n" % about
    queue: Queued = asyncio.Queue(max_queued)
    pumping = asyncio.ensure_future(_pump(feed, queue))
    closing = asyncio.ensure_future(here.closing.wait())
    upcoming = asyncio.ensure_future(queue.get())
    try:
        while True:
            await asyncio.wait(
                {upcoming, closing},
                timeout=KEEP_ALIVE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if upcoming.done():
                event = upcoming.result()
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event  # the connection breaks: an orderly end would say the run is over
                yield frame(event)
                upcoming = asyncio.ensure_future(queue.get())
            elif closing.done():
                return  # the client comes back with `Last-Event-ID`
            else:
                yield b": still here\n\n"
    finally:
        for task in (upcoming, closing, pumping):
            task.cancel()


async def _pump(feed: AsyncGenerator[dict[str, Any]], queue: Queued) -> None:
    """In a task of its own, which is cancelled when the client leaves."""
    async with aclosing(feed):
        try:
            async for event in feed:
                await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)


def _frame(event: dict[str, Any]) -> bytes:
    # JSON has no line breaks of its own, so one `data:` line is the whole of it.
    return b"id: %d\ndata: %b\n\n" % (event["seq"], orjson.dumps(event))


def _feed_frame(event: dict[str, Any]) -> bytes:
    number = event.pop("id").encode()
    return b"id: %b\ndata: %b\n\n" % (number, orjson.dumps(event))
