"""The runs that a test and its processes share: how they are made, and where they are kept.

Both import it, so it does not depend on either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.engine.ports import Store
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.sqlite.store import SqliteStore


def graph(
    nodes: dict[str, list[str]],
    *,
    each: dict[str, Any] | None = None,
    condition: str | None = None,
    **fields: Any,
) -> Graph:
    """`fields` are the workflow's, `each` those of every node; `condition` is for every node that
    has parents, with its first parent in the place of `{0}`."""
    listed = []
    for name, parents in nodes.items():
        node = {"id": name, "handler": "step", "dependencies": parents, **(each or {})}
        if parents and condition is not None:
            node["condition"] = condition.format(*parents)
        listed.append(node)
    definition = {"name": "race", **fields, "nodes": listed}
    return build_graph(Workflow.model_validate(definition), {})


@asynccontextmanager
async def opened(folder: str, url: str | None) -> AsyncIterator[Store]:
    if url is None:
        async with SqliteStore(Path(folder) / "runs.db", sync="normal", drives=False) as store:
            yield store
    else:
        async with PipelinedRedis(url) as pipe:
            yield RedisStore(pipe)
