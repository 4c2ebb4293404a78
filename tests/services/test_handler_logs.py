"""What handlers log in workers that are processes of their own reaches their logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.node_logs import LogLine
from dovetail.stores.redis.records import RedisRecords

from ..celery_crew import CELERY, SCRIPT, celery_worker
from ..servers.redis_server import RedisServer
from .test_celery import CeleryRuns, CeleryServices

SECONDS = 40.0
HANDLERS = """
import asyncio, logging, sys, threading, time
import structlog
from concurrent.futures import ThreadPoolExecutor
from dovetail import handler

POOL = ThreadPoolExecutor(1)

def say(ctx):
    ctx.log.info("by ctx.log")
    logging.getLogger("shop").info("by logging", extra={"rows": 3})
    structlog.get_logger().warning("by structlog", order=7)
    print("by print")
    print("to stderr", file=sys.stderr)
    thread = threading.Thread(target=print, args=["in a thread"])
    thread.start()
    thread.join()
    POOL.submit(print, "in a pool").result()
    print("the token is", "hunter2-hunter2")

@handler
def plain(config, ctx):
    say(ctx)
    time.sleep(config.get("seconds", 0))

@handler
async def waits(config, ctx):
    say(ctx)
    await asyncio.to_thread(print, "in another thread")
"""
SAID = [
    ("INFO", "dovetail.handler", "by ctx.log", None),
    ("INFO", "shop", "by logging", {"rows": 3}),
    ("WARNING", "structlog", "by structlog", {"order": 7}),
    ("INFO", "stdout", "by print", None),
    ("WARNING", "stderr", "to stderr", None),
    ("INFO", "stdout", "in a thread", None),
    ("INFO", "stdout", "in a pool", None),
    ("INFO", "stdout", "the token is ***", None),
]


@pytest.fixture(
    params=[
        pytest.param((SCRIPT, "worker", "streams"), id="streams"),
        pytest.param((SCRIPT, "worker"), id="dovetail worker"),
        pytest.param(
            (CELERY, "-A", "dovetail.transports.celery", "worker", "-c", "2"), id="celery worker"
        ),
        pytest.param(
            (CELERY, "-A", "dovetail.transports.celery", "worker", "-P", "threads", "-c", "2"),
            id="threads",
        ),
    ]
)
async def play(request: Any, tmp_path: Path) -> AsyncIterator[CeleryRuns]:
    (tmp_path / "mine.py").write_text(HANDLERS)
    transport = "streams" if "streams" in request.param else "celery"
    command = [word for word in request.param if word != "streams"]
    with (
        RedisServer() as redis,
        celery_worker(
            tmp_path,
            redis.url,
            command=command,
            DOVETAIL_TRANSPORT=transport,
            DOVETAIL_HANDLERS="mine.py",
            DOVETAIL_SECRET_KEY="hunter2-hunter2",
        ) as worker,
    ):
        services = CeleryServices(worker, redis.url)
        services.settings = services.settings.model_copy(update={"transport": transport})
        async with services.led() as it:
            yield it


async def lines(play: CeleryRuns, node: str, count: int) -> list[LogLine]:
    records = RedisRecords(play.parts.pipe)
    async with asyncio.timeout(SECONDS):
        while True:
            chunks = await records.logs(play.run_id, node=node)
            found = [line for _, chunk in chunks for line in chunk.lines]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)


def parts(found: list[LogLine]) -> list[tuple[Any, ...]]:
    return [line[1:] for line in found]


async def test_every_way_of_logging_reaches_the_log_of_its_node(play: CeleryRuns) -> None:
    await play.run({"a": {"handler": "plain"}, "b": {"handler": "waits"}})
    assert parts(await lines(play, "a", len(SAID))) == SAID
    last = ("INFO", "stdout", "in another thread", None)
    assert parts(await lines(play, "b", len(SAID) + 1)) == [*SAID, last]


async def test_lines_of_a_handler_that_runs_can_be_read(play: CeleryRuns) -> None:
    await play.begin({"a": {"handler": "plain", "config": {"seconds": 5}}})
    assert parts(await lines(play, "a", len(SAID))) == SAID
    run = await play.parts.store.load(play.run_id)
    assert run.node("a").finished_at is None
    await play.end()
    assert parts(await lines(play, "a", len(SAID))) == SAID, "each line once"
