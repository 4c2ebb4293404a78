"""`/health`, `/metrics`, `/rate-limits`, `/workers`, `/queues` and `/dead-letters`.

Health is asked often, so it costs little. `ThisProcess` is the worker of an embedded server.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import PlainTextResponse, Response

from dovetail.api.problems import KIND_OF, Refusal, answer
from dovetail.api.request_body import NO_FIELDS, BodyField, RequestBody, is_number, is_whole
from dovetail.api.responses import (
    AT,
    ENDED,
    RUN,
    STARTED,
    Cursor,
    Here,
    History,
    Limit,
    Reply,
    RunStatusName,
    Time,
    json_answer,
    page_size,
    reply,
)
from dovetail.api.security import actor_of
from dovetail.api.service import ApiService
from dovetail.core.outputs import ONLY_SIZES
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.api import ServedEngine
from dovetail.engine.limits import FASTEST, LARGEST_BURST, SLOWEST
from dovetail.engine.ports import RunQuery
from dovetail.engine.queues import read_queues
from dovetail.engine.views import timestamp

health_router = APIRouter(prefix="/health", tags=["health"])


class Health(Reply):
    status: Literal["ok"]


class WorkerCounts(Reply):
    alive: int
    dead: int


_OK = {"status": "ok"}

STOPPING = "the server is stopping"
UNKNOWN = "what runs are kept in cannot be used at the moment"


@health_router.get(
    "/live", summary="The process answers", response_model=Health, responses={200: reply(_OK)}
)
async def live() -> Response:
    return json_answer(_OK)


@health_router.get(
    "/ready", summary="Ready for work; else 503", response_model=Health, responses={200: reply(_OK)}
)
async def ready(request: Request) -> Response:
    here: ApiService = request.app.state.service
    if here.leaving.is_set() or here.closing.is_set():
        return _not_ready(request, KIND_OF[503], STOPPING)

    async def probe() -> None:
        """What a trigger needs; raises `StoreError`."""
        await here.fleet.check()
        await here.commands.list_runs(RunQuery(limit=1))
        await here.commands.check_writable()

    refused = await here.readiness(probe)
    if refused is not None:
        return _not_ready(request, refused.type, refused.reason or UNKNOWN)
    return json_answer(_OK)


def _not_ready(request: Request, kind: str, reason: str) -> Response:
    return answer(503, kind, reason, request.scope, reasons=[reason])


@health_router.get(
    "/workers",
    summary="How many workers there are; 503 if none is alive",
    response_model=WorkerCounts,
    responses={
        200: reply({"alive": 1, "dead": 0}),
        503: reply({"alive": 0, "dead": 1}, model=WorkerCounts, description="none is alive"),
    },
)
async def worker_counts(here: Here) -> Response:
    alive = [worker["alive"] for worker in await here.fleet.workers()]
    counts = {"alive": sum(alive), "dead": len(alive) - sum(alive)}
    if counts["alive"]:
        return json_answer(counts)
    return json_answer(counts, 503, {"Retry-After": "5"})


metrics_router = APIRouter(tags=["about"])


@metrics_router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}}, 404: {}},
)
async def metrics(request: Request) -> Response:
    here: ApiService = request.app.state.service  # also while its store is away: then most of all
    if here.metrics is None:
        raise Refusal(404, "nothing is counted here")
    text, kind = await here.metrics()
    return Response(text, headers={"Content-Type": kind})


limits_router = APIRouter(prefix="/rate-limits", tags=["rate limits"])


class RateLimit(Reply):
    tag: str
    rate_per_second: float
    burst: int


class RateLimits(Reply):
    items: list[RateLimit]


_LIMIT = {"tag": "search_api", "rate_per_second": 10.0, "burst": 1}
_SET_LIMIT = RequestBody(
    "RateLimitRequest",
    {
        "rate_per_second": BodyField(
            f"a number above 0 ({SLOWEST:g} to {FASTEST:g})",
            lambda value: is_number(value) and SLOWEST <= value <= FASTEST,
            {"type": "number", "minimum": SLOWEST, "maximum": FASTEST},
            required=True,
        ),
        "burst": BodyField(
            f"a whole number of at least 1 (at most {LARGEST_BURST:,})",
            lambda value: is_whole(value) and 1 <= value <= LARGEST_BURST,
            {"type": ["integer", "null"], "minimum": 1, "maximum": LARGEST_BURST},
        ),
    },
    {"rate_per_second": 10, "burst": 1},
)


class _Whole(Convertor[str]):
    """The rest of a path, whatever it is: a `resource_tag` may have slashes, encoded or not."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("whole", _Whole())


@limits_router.get(
    "",
    summary="The limits that are set",
    response_model=RateLimits,
    responses={200: reply({"items": [_LIMIT]})},
)
async def rate_limits(here: Here) -> Response:
    return json_answer(await here.commands.rate_limits())


@limits_router.get(
    "/{tag:whole}",
    summary="The limit of a tag",
    response_model=RateLimit,
    responses={200: reply(_LIMIT)},
)
async def rate_limit(tag: str, here: Here) -> Response:
    return json_answer(await here.commands.rate_limit(tag))


@limits_router.put(
    "/{tag:whole}",
    summary="Set the limit of a tag",
    response_model=RateLimit,
    responses={200: reply(_LIMIT)},
    openapi_extra=_SET_LIMIT.openapi,
)
async def set_rate_limit(tag: str, request: Request, here: Here) -> Response:
    rate, burst = (await _SET_LIMIT.read(request, here)).fields.values()
    return json_answer(
        await here.commands.set_rate_limit(tag, float(rate), burst or 1, actor=actor_of(request))
    )


limit_history_router = APIRouter(prefix="/rate-limit-history", tags=["rate limits"])


@limit_history_router.get(
    "/{tag:whole}",
    summary="How the limit of a tag was changed, when and by whom; newest first",
    response_model=History,
    responses={
        200: reply(
            {
                "items": [
                    {
                        "time": AT,
                        "actor": "ci",
                        "action": "limit",
                        "details": {"rate_per_second": 20.0, "burst": 1, "from": None},
                    }
                ],
                "next_cursor": None,
            }
        )
    },
)
async def rate_limit_history(
    tag: str, here: Here, limit: Limit = 50, cursor: Cursor = None
) -> Response:
    size = page_size(limit)
    return json_answer(await here.commands.rate_limit_history(tag, limit=size, cursor=cursor))


workers_router = APIRouter(tags=["fleet"])

PAGE = 1000
BACKLOG_SECONDS = 0.5
"""So old may a count of what waits be: it is asked for with every trigger, and counts each."""


class HandlerDetails(Reply):
    name: str
    max_retries: int
    secrets: bool | list[str] | None = Field(
        description="where its config may have secrets: anywhere, in these fields, nowhere; "
        "null if the worker does not say"
    )
    version: int
    config_schema: dict[str, Any] | None = Field(
        description="the JSON Schema of its config, as far as validation checks it; null if it "
        "has none, or one that is too large"
    )


class Worker(Reply):
    worker_id: str
    host: str
    pid: int
    started_at: Time
    last_heartbeat: Time
    handlers: list[str]
    handler_details: list[HandlerDetails]
    running: int
    concurrency: int
    alive: bool


class Workers(Reply):
    items: list[Worker]


class DeadLetters(Reply):
    items: list[dict[str, Any]]


class Requeued(Reply):
    letter_id: str
    run_id: str
    status: RunStatusName


class HandlerQueue(Reply):
    handler: str
    waiting: int = Field(description="nodes that no worker has claimed yet")
    workers: int = Field(description="workers that are alive and have the handler")


class LimitQueue(Reply):
    tag: str
    nodes: int
    next_at: Time = Field(description="when the first of them may start")
    rate_per_second: float
    burst: int


class RunningNode(Reply):
    run_id: str
    workflow: str
    node: str
    item: int | None = Field(description="of a node with `for_each`; null for any other")
    handler: str
    attempt: int
    worker: str | None
    started_at: Time | None


class Queues(Reply):
    items: list[HandlerQueue]
    parked: list[LimitQueue]
    running: list[RunningNode]
    complete: bool = Field(
        description="false: `parked` and `running` are those of the newest runs only"
    )
    looked_at: int = Field(description="how many runs `parked` and `running` were read from")


_WORKER = {
    "worker_id": "host-4711",
    "host": "host",
    "pid": 4711,
    "started_at": AT,
    "last_heartbeat": ENDED,
    "handlers": ["input", "output"],
    "handler_details": [
        {
            "name": name,
            "max_retries": 0,
            "secrets": False,
            "version": 1,
            "config_schema": None,
        }
        for name in ("input", "output")
    ],
    "running": 0,
    "concurrency": 32,
    "alive": True,
}
LETTER = "9f86d081884c7d659a2feaa0c55ad015"
_DEAD_LETTER = {
    "letter_id": LETTER,
    "time": AT,
    "stream": "wf:stream:results",
    "id": "1763273274123-0",
    "reason": "no token",
    "fields": {"run_id": RUN},
}


@workers_router.get(
    "/workers",
    summary="Who runs nodes",
    response_model=Workers,
    responses={200: reply({"items": [_WORKER]})},
)
async def workers(here: Here) -> Response:
    return json_answer({"items": await here.fleet.workers(with_schemas=True)})


@workers_router.get(
    "/dead-letters",
    summary="Messages that were refused as malformed or poison",
    response_model=DeadLetters,
    responses={200: reply({"items": [_DEAD_LETTER]})},
)
async def dead_letters(here: Here) -> Response:
    return json_answer(await here.commands.dead_letters())


@workers_router.delete(
    "/dead-letters/{letter_id}", summary="Drop a dead letter", status_code=204, responses={204: {}}
)
async def drop_dead_letter(letter_id: str, here: Here) -> Response:
    await here.commands.drop_dead_letter(letter_id)
    return Response(status_code=204)


@workers_router.post(
    "/dead-letters/{letter_id}/requeue",
    summary="Retry the run that a dead letter names, or send its notification again",
    status_code=202,
    response_model=Requeued,
    responses={
        202: reply({"letter_id": LETTER, "run_id": RUN, "status": "RUNNING"}),
        409: {},
    },
    openapi_extra=NO_FIELDS.openapi,
)
async def requeue_dead_letter(letter_id: str, request: Request, here: Here) -> Response:
    await NO_FIELDS.read(request, here)
    return json_answer(await here.commands.requeue_dead_letter(letter_id), 202)


@workers_router.get(
    "/queues",
    summary="What waits for workers and rate limits, and what runs",
    response_model=Queues,
    responses={
        200: reply(
            {
                "items": [{"handler": "output", "waiting": 3, "workers": 1}],
                "parked": [{**_LIMIT, "nodes": 12, "next_at": ENDED}],
                "running": [
                    {
                        "run_id": RUN,
                        "workflow": "greet",
                        "node": "end",
                        "item": None,
                        "handler": "output",
                        "attempt": 1,
                        "worker": "host-4711",
                        "started_at": STARTED,
                    }
                ],
                "complete": True,
                "looked_at": 3,
            }
        )
    },
)
async def queues(here: Here) -> Response:
    return json_answer(await read_queues(here.commands, here.fleet))


class ThisProcess:
    """The one worker of an embedded server. Messages do not travel there."""

    def __init__(
        self,
        commands: ServedEngine,
        handlers: Iterable[Mapping[str, Any]],
        concurrency: int,
        depths: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`handlers` are as they are announced; `depths` is how many nodes wait, by handler."""
        self._commands = commands
        self._depths = depths
        self._backlog = 0
        self._counted_at = float("-inf")
        self._handlers = sorted(handlers, key=itemgetter("name"))
        self._concurrency = concurrency
        self._host = socket.gethostname()
        self._started_at = commands.clock()

    async def workers(self, *, with_schemas: bool = False) -> list[dict[str, Any]]:
        return [
            {
                "worker_id": f"{self._host}-{os.getpid()}",
                "host": self._host,
                "pid": os.getpid(),
                "started_at": timestamp(self._started_at),
                # The process that answers is alive at this moment.
                "last_heartbeat": timestamp(self._commands.clock()),
                "handlers": [handler["name"] for handler in self._handlers],
                "handler_details": self._handlers,
                "running": await self._running(),
                "concurrency": self._concurrency,
                "alive": True,
            }
        ]

    async def waiting(self, running: Mapping[str, int]) -> dict[str, int]:
        known = dict.fromkeys((handler["name"] for handler in self._handlers), 0)
        return known | dict(self._depths())

    async def backlog(self) -> int:
        now = self._commands.clock()
        if not 0 <= now - self._counted_at <= BACKLOG_SECONDS:
            self._backlog, self._counted_at = sum(self._depths().values()), now
        return self._backlog

    async def check(self) -> None:
        """Nothing travels anywhere."""

    async def _running(self) -> int:
        """Counted from the runs that are driven here, which are in memory."""
        count, cursor = 0, None
        while True:
            query = RunQuery(status=RunStatus.RUNNING.value, limit=PAGE, cursor=cursor)
            page = await self._commands.list_runs(query)
            for item in page["items"]:
                run_id = item["run_id"]
                if await self._commands.owner(run_id) == "here":
                    run = await self._commands.load_run(run_id, ONLY_SIZES)
                    count += sum(node.status is NodeStatus.RUNNING for node in run.nodes)
            cursor = page["next_cursor"]
            if cursor is None or count >= self._concurrency:
                return min(count, self._concurrency)
