"""`/workers` and `/dead-letters`, and the fleet of an embedded server: the process itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.api import schemas
from dovetail.api.answers import Here, json_answer
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.commands import Commands
from dovetail.engine.views import timestamp

router = APIRouter(tags=["fleet"])

PAGE = 1000
BACKLOG_SECONDS = 0.5
"""So old may a count of what waits be: it is asked for with every trigger, and counts each."""


@router.get("/workers", summary="Who runs nodes", response_model=schemas.Workers)
async def workers(here: Here) -> Response:
    return json_answer({"items": await here.fleet.workers()})


@router.get(
    "/dead-letters",
    summary="Messages that were refused as malformed or poison",
    response_model=schemas.DeadLetters,
)
async def dead_letters(here: Here) -> Response:
    return json_answer({"items": await here.fleet.dead_letters()})


class ThisProcess:
    """The one worker of an embedded server. Messages do not travel there, so none is refused."""

    def __init__(
        self,
        commands: Commands,
        handlers: Iterable[str],
        concurrency: int,
        depths: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`depths` says how many nodes wait, by handler."""
        self._commands = commands
        self._depths = depths
        self._backlog = 0
        self._counted_at = float("-inf")
        self._handlers = sorted(handlers)
        self._concurrency = concurrency
        self._host = socket.gethostname()
        self._started_at = commands.clock()

    async def workers(self) -> list[dict[str, Any]]:
        return [
            {
                "worker_id": f"{self._host}-{os.getpid()}",
                "host": self._host,
                "pid": os.getpid(),
                "started_at": timestamp(self._started_at),
                # Whoever answers is alive at this moment.
                "last_heartbeat": timestamp(self._commands.clock()),
                "handlers": self._handlers,
                "running": await self._running(),
                "concurrency": self._concurrency,
                "alive": True,
            }
        ]

    async def dead_letters(self) -> list[dict[str, Any]]:
        return []

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
            page = await self._commands.list_runs(
                status=RunStatus.RUNNING.value, limit=PAGE, cursor=cursor
            )
            for item in page["items"]:
                run_id = item["run_id"]
                if await self._commands.owner(run_id) == "here":
                    run = await self._commands.store.load(run_id)
                    count += sum(node.status is NodeStatus.RUNNING for node in run.nodes)
            cursor = page["next_cursor"]
            if cursor is None or count >= self._concurrency:
                return min(count, self._concurrency)
