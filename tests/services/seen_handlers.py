"""Handlers of test_seen_into_a_node.py. The suite copies this file beside its services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from dovetail import Context, PermanentError, handler

MEGABYTE = 1_000_000


@handler
def says(config: dict[str, Any], ctx: Context) -> str:
    """Logs in each way."""
    ctx.log.info("by ctx.log")
    ctx.log.debug("not kept")
    logging.getLogger("shop").error("by logging", extra={"rows": 3})
    structlog.get_logger().warning("by structlog", order=7)
    print("by print")
    print("to stderr", file=sys.stderr)
    thread = threading.Thread(target=print, args=["in a thread"])
    thread.start()
    thread.join()
    return "said"


def read(pages: dict[str, str]) -> str:
    try:
        return pages["first"]
    except KeyError as error:
        raise PermanentError("the page is missing", type="no_page") from error


@handler
async def raises(config: dict[str, Any], ctx: Context) -> str:
    """Raises with a cause."""
    print("about to read")
    return read({})


@handler
async def waits(config: dict[str, Any], ctx: Context) -> None:
    ctx.log.info("waiting")
    await asyncio.sleep(60)


@handler
def sleeps(config: dict[str, Any], ctx: Context) -> None:
    """Does not hear that it should stop."""
    ctx.log.info("sleeping")
    time.sleep(1.5)


@handler
def refuses_to_end(config: dict[str, Any], ctx: Context) -> None:
    """Catches even what interrupts it."""
    ctx.log.info("staying")
    until = time.monotonic() + 2
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(2)


@handler
def dies(config: dict[str, Any], ctx: Context) -> str:
    """Kills its process the first time."""
    if ctx.attempt == 1:
        print("long before the end")
        time.sleep(1.2)
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    print("alive")
    return "survived"


@handler(secrets=True)
def tells(config: dict[str, Any], ctx: Context) -> None:
    """Puts a secret wherever it can."""
    secret = ctx.secrets["KEY"]
    print("printed", secret)
    print("half of it", secret[:10], end="")
    print(secret[10:])
    print("to stderr", secret, file=sys.stderr)
    ctx.log.info("logged %s", secret, extra={"given": [secret]})
    logging.getLogger(secret).warning("named by it")
    structlog.get_logger().info("by structlog", key=secret)
    space: dict[str, Any] = {}
    source = f"def {secret}(text):\n    {secret}_local = text\n    raise KeyError({secret}_local)\n"
    exec(compile(source, f"{secret}.py", "exec"), space)
    try:
        space[secret](secret)
    except KeyError as error:
        ctx.log.exception("failed")
        raise ValueError(f"refused {secret}") from error


@handler
def odd(config: dict[str, Any], ctx: Context) -> None:
    """Prints what a terminal would obey."""
    print("über 日本 🎉")
    print("\x1b[31mred\x1b[0m \x1b[2J")
    print("a NUL \x00 and a bell \x07")
    ctx.log.info("two\nlines")
    raise PermanentError("\x1b[2Jclears \x00 the screen ü")


@handler
def floods(config: dict[str, Any], ctx: Context) -> int:
    """Prints so many megabytes."""
    line = "x" * 999
    began = time.monotonic()
    print("the first line")
    for _ in range(config["megabytes"] * MEGABYTE // 1000):
        print(line)
    print("the last line")
    return round(1000 * (time.monotonic() - began))


@handler
def counts(config: dict[str, Any], ctx: Context) -> int:
    """Logs so many lines."""
    began = time.monotonic()
    for number in range(config["lines"]):
        ctx.log.info("line %d", number)
    return round(1000 * (time.monotonic() - began))


@handler
async def ticks(config: dict[str, Any], ctx: Context) -> float:
    """The longest that it was held up, in seconds, until the file is there."""
    longest = 0.0
    while not Path(config["file"]).exists():
        before = time.monotonic()
        await asyncio.sleep(0.02)
        longest = max(longest, time.monotonic() - before - 0.02)
    return longest


@handler
async def holds(config: dict[str, Any], ctx: Context) -> str:
    """Waits for a file."""
    print("waits in attempt", ctx.attempt)
    while not Path(config["file"]).exists():
        await asyncio.sleep(0.02)
    print("goes on")
    return "seen"


@handler
def wants(config: dict[str, Any], ctx: Context) -> str:
    """Fails until there is a file."""
    print("looks for it")
    if not Path(config["file"]).exists():
        raise PermanentError("it is not there")
    return "found"
