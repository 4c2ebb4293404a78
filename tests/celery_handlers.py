"""Handlers that workers of the tests load; see `celery_crew`. They run in processes of a pool."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import orjson
import redis
from celery import signals

from dovetail import Context, RetryableError, handler

_NAME = os.environ["CREW_NAME"]
_connections: dict[int, redis.Redis] = {}


def _note(where: str, *what: Any) -> None:
    pid = os.getpid()
    if pid not in _connections:  # never one that was made before a fork
        _connections[pid] = redis.Redis.from_url(os.environ["CREW_REDIS_URL"])
    _connections[pid].rpush(where, orjson.dumps(what))


@signals.task_prerun.connect
def _delivered(kwargs: Any = None, **_: Any) -> None:
    _note("test:delivered", *(kwargs.get(name) for name in ("run_id", "node_id", "token")))


@signals.task_postrun.connect
def _answered(task_id: str, kwargs: Any = None, retval: Any = None, **_: Any) -> None:
    reported = retval if isinstance(retval, dict) else repr(retval)
    _note("test:answered", task_id, kwargs.get("node_id"), reported)


def _begun(ctx: Context) -> None:
    _note("test:executed", ctx.run_id, ctx.node_id, ctx.attempt, _NAME, os.getpid())


async def _plain(config: dict[str, Any], ctx: Context) -> str:
    _begun(ctx)
    await asyncio.sleep(config.get("seconds", 0))
    return ctx.node_id


for _each in ("h", "another", "plain", "rare", "slow"):
    globals()[_each] = handler(_each)(_plain)


@handler
def thinks(config: dict[str, Any], ctx: Context) -> str:
    """Has the thread to itself, and cannot be interrupted if it is `stubborn`."""
    _begun(ctx)
    until = time.monotonic() + config["seconds"]
    while time.monotonic() < until:
        try:
            time.sleep(0.02)
        except BaseException:
            if not config.get("stubborn"):
                raise
    return "thought"


@handler
def looks(config: dict[str, Any], ctx: Context) -> str:
    """Looks whether it should stop, as a good handler does."""
    _begun(ctx)
    until = time.monotonic() + config["seconds"]
    while time.monotonic() < until and not ctx.cancelled.is_set():
        time.sleep(0.02)
    _note("test:looked", ctx.node_id, ctx.cancelled.is_set())
    return "looked"


@handler
async def sleeps_in_the_loop(config: dict[str, Any], ctx: Context) -> str:
    """What one should not do: it keeps its event loop from everything else."""
    _begun(ctx)
    time.sleep(config["seconds"])
    return "slept"


@handler
async def cleans_up(config: dict[str, Any], ctx: Context) -> str:
    _begun(ctx)
    try:
        await asyncio.sleep(config["seconds"])
    finally:
        _note("test:cleaned", ctx.node_id)
    return "never needed"


@handler(max_retries=1)
async def tells(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Everything a context has."""
    _begun(ctx)
    for step in range(3):
        ctx.progress(step / 3, f"step {step}")
    if ctx.attempt == 1:
        raise RetryableError("once more", after=0.01)
    return {"inputs": ctx.inputs, "params": ctx.params, "attempt": ctx.attempt}


@handler
def ends_its_process(config: dict[str, Any], ctx: Context) -> None:
    _begun(ctx)
    os._exit(9)


@handler
def reads_inputs(config: dict[str, Any], ctx: Context) -> list[int]:
    found = [ctx.inputs[name] for name in config["names"]]
    return [len(ctx.inputs), *(len(orjson.dumps(one)) for one in found)]


@handler
async def reads_inputs_async(config: dict[str, Any], ctx: Context) -> list[int]:
    await asyncio.sleep(0)
    return reads_inputs(config, ctx)
