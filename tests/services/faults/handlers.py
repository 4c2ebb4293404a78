"""Handlers that write down every execution before anything else, then do as their config says.

The side file counts what was executed outside of everything that could be wrong about it. The
worker under test loads this file like any other (`--handlers`).
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Any

from dovetail import Context, PermanentError, RetryableError, handler

SO_LATE = 5.0
"""Seconds that a handler takes which shall run out of time."""


@handler
async def act(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    seconds = _seconds(config, ctx)
    write_down(ctx, seconds)
    await asyncio.sleep(seconds)
    return outcome(config, ctx)


@handler
def act_in_thread(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    seconds = _seconds(config, ctx)
    write_down(ctx, seconds)
    time.sleep(seconds)
    return outcome(config, ctx)


@handler
def cling(config: dict[str, Any], ctx: Context) -> None:
    """It ignores every order and goes on, until its process is killed."""
    write_down(ctx, config["seconds"])
    end = time.monotonic() + config["seconds"]
    while time.monotonic() < end:
        with suppress(BaseException):
            time.sleep(config["seconds"])


def write_down(ctx: Context, seconds: float) -> None:
    """One line in one piece: a killed worker leaves no half of it."""
    name = ctx.idempotency_key.split(":")[1]  # of the node, or of the item
    start = f"{ctx.run_id} {name} {ctx.epoch} {ctx.attempt}"
    file = os.open(os.environ["SIDE_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{start} {os.getpid()} {time.time()} {seconds}\n".encode())
    os.close(file)


def _fails(config: dict[str, Any], ctx: Context) -> bool:
    return bool(ctx.attempt <= config.get("fails", 0))


def _seconds(config: dict[str, Any], ctx: Context) -> float:
    if config["way"] == "late" and _fails(config, ctx):
        return SO_LATE
    return float(config["seconds"])


def outcome(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """It says which attempt it is of: that of another must not be taken for it."""
    if config["way"] == "broken":
        raise PermanentError(f"attempt {ctx.attempt} is broken")
    if config["way"] == "failing" or _fails(config, ctx):
        raise RetryableError(f"attempt {ctx.attempt} fails")
    return {"n": config["adds"] + sum(config["of"]), "attempt": ctx.attempt}
