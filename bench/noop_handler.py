"""The no-op of the workloads as a handler, for workers: `dovetail worker --handlers` this file."""

from __future__ import annotations

import os
from typing import Any

from dovetail import Context, handler
from workloads import node


@handler(max_retries=0)
async def noop(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    output = node(*config["of"])
    if "bytes" in config:  # random: PostgreSQL compresses texts
        output["text"] = os.urandom(config["bytes"] // 2).hex()
    return output
