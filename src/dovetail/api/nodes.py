"""One node of a run in detail: its config, its inputs and its attempts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from dovetail.api.responses import (
    ENDED,
    ETAG,
    NOT_MODIFIED,
    RUN,
    STARTED,
    Cursor,
    Here,
    IfNoneMatch,
    Limit,
    NodeStatusName,
    Reply,
    Time,
    reply,
    unless_known,
)
from dovetail.api.runs import Failure, ItemCounts, NodeItem, Seconds

router = APIRouter(tags=["runs"])


class AttemptError(Reply):
    type: str | None
    message: str | None
    where: str | None = Field(description="`file:line in function`, in the code of the handler")
    traceback: str | None = Field(description="as Python prints it, with all causes")


class AttemptItem(Reply):
    epoch: int
    attempt: int
    status: Literal["RUNNING", "COMPLETED", "FAILED", "LOST", "CANCELLED"]
    worker: str | None
    started_at: Time
    finished_at: Time | None
    duration: Seconds | None
    error: AttemptError | None


class Why(Reply):
    code: str
    why: str
    details: dict[str, Any]


class NodeDetails(NodeItem):
    template: dict[str, Any] = Field(description="its config as the definition has it")
    config: dict[str, Any] | None = Field(
        description="as its last attempt got it, secrets as `***`; null before the node was ready"
    )
    config_error: str | None = Field(
        description="why there is no config: it cannot be rendered, or it differs by item"
    )
    inputs: dict[str, Any] = Field(description="the outputs of its dependencies that completed")
    why: Why | None = Field(
        description="why it waits, or was never started; null where its handler decided"
    )
    attempts: list[AttemptItem] = Field(description="all of them, of all epochs, oldest first")


_EXAMPLE = {
    "id": "fetch",
    "handler": "fetch",
    "status": "FAILED",
    "attempt": 1,
    "epoch": 1,
    "dependencies": ["start"],
    "reason": None,
    "cause": None,
    "error": {"type": "KeyError", "message": "'price'", "where": "shop.py:12 in fetch"},
    "started_at": STARTED,
    "finished_at": ENDED,
    "duration": 0.0125,
    "worker": "host-4711",
    "output": None,
    "items": None,
    "template": {"shop": "{{ start.shop }}", "key": "{{ secrets.SHOP }}"},
    "config": {"shop": "books", "key": "***"},
    "config_error": None,
    "inputs": {
        "start": {"$output": {"size": 912345, "href": f"/api/v1/runs/{RUN}/nodes/start/output"}}
    },
    "why": None,
    "attempts": [
        {
            "epoch": 1,
            "attempt": 1,
            "status": "FAILED",
            "worker": "host-4711",
            "started_at": STARTED,
            "finished_at": ENDED,
            "duration": 0.0125,
            "error": {
                "type": "KeyError",
                "message": "'price'",
                "where": "shop.py:12 in fetch",
                "traceback": "Traceback (most recent call last):\n…\nKeyError: 'price'",
            },
        }
    ],
}


class ItemReply(Reply):
    index: int
    status: NodeStatusName
    attempt: int
    worker: str | None
    started_at: Time | None
    finished_at: Time | None
    reason: str | None
    error: Failure | None
    output: Any = Field(description='one of more than 64 KiB is `{"$output": {size, href}}`')


class ItemsReply(Reply):
    items: list[ItemReply]
    counts: ItemCounts
    next_cursor: str | None


_ITEM = {
    "index": 0,
    "status": "COMPLETED",
    "attempt": 1,
    "worker": "host-4711",
    "started_at": STARTED,
    "finished_at": ENDED,
    "reason": None,
    "error": None,
    "output": {"text": "A summary"},
}
_COUNTS = {"total": 200, "pending": 180, "running": 19, "completed": 1, "failed": 0, "cancelled": 0}


@router.get(
    "/runs/{run_id}/nodes/{node_id}/items",
    summary="The items of a node with `for_each`",
    response_model=ItemsReply,
    responses={
        200: reply({"items": [_ITEM], "counts": _COUNTS, "next_cursor": "1"}, headers=ETAG),
        304: NOT_MODIFIED,
    },
)
async def get_items(
    run_id: str,
    node_id: str,
    request: Request,
    here: Here,
    status: Annotated[
        NodeStatusName | None,
        BeforeValidator(lambda given: given or None),
        Query(description="only items in this state; PENDING also finds the queued ones"),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """In the order of the list. `next_cursor` is the `cursor` of the next page."""
    page = await here.commands.node_items(
        run_id, node_id, status=status, limit=limit, cursor=cursor or None
    )
    return unless_known(request, page)


@router.get(
    "/runs/{run_id}/nodes/{node_id}",
    summary="A node with its config, inputs and attempts",
    response_model=NodeDetails,
    responses={200: reply(_EXAMPLE, headers=ETAG), 304: NOT_MODIFIED},
)
async def get_node(
    run_id: str, node_id: str, request: Request, here: Here, if_none_match: IfNoneMatch = None
) -> Response:
    return unless_known(request, await here.commands.node_detail(run_id, node_id))
