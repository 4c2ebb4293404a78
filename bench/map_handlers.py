"""The functions of the map as handlers, for workers: `dovetail worker --handlers` this file."""

from __future__ import annotations

from typing import Any

from dovetail import Context, handler


@handler(max_retries=0)
async def add_one(config: dict[str, Any], ctx: Context) -> int:
    number: int = config["number"]
    return number + 1


@handler(max_retries=0)
async def add_up(config: dict[str, Any], ctx: Context) -> int:
    return sum(ctx.inputs["each"])
