"""Definitions in Redis: each is stored once, under its digest.

Runs, registered versions and accepted triggers refer to it from other slots. There is no reference
count that could be wrong: now and then all of them are read. A definition without a reference is
set aside. A process that creates a run writes it again, and a reader brings it back. After a grace
time without a reference it is deleted. Only a process that stood still for the whole grace time
could miss it, and it checks again (`RedisStore.create_many`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from dovetail.core.dag import Graph
from dovetail.engine.supervisor import bisect_failures
from dovetail.redis_client.pipelined import Command, PipelinedRedis, scanned
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import source
from dovetail.stores.redis.run_index import WORKFLOWS, workflow_key

GRACE_SECONDS = 600.0
"""So long a definition stays aside before it is forgotten."""
ACCEPTED = "wf:accepted"
"""What was accepted and may not be made yet, by time: names of keys that have a `todo`."""
BATCH_SIZE = 500
_KEPT, _ASIDE = "wf:def:", "wf:unused:{wf:def:"


def definition_key(digest: str) -> str:
    return f"{_KEPT}{digest}"


def aside_key(digest: str) -> str:
    return f"{_ASIDE}{digest}}}"


async def definition(redis: PipelinedRedis, digest: str) -> bytes | None:
    """Its text, also if it was set aside."""
    content: bytes | None = await redis.call("GET", definition_key(digest))
    return await _bring_back(redis, digest) if content is None else content


async def stored_graph(
    redis: PipelinedRedis,
    definitions: Definitions,
    digest: str,
    retries: bytes,
    content: bytes | None = None,
) -> Graph | None:
    """The graph of a definition, read if it is neither given nor known; None if it is gone."""
    number = int(digest, 16)
    graph = definitions.known(number, retries)
    if graph is None:
        text = content or await definition(redis, digest)
        if text is not None:
            graph = definitions.graph(number, retries, lambda: text)
    return graph


async def _bring_back(redis: PipelinedRedis, digest: str) -> bytes | None:
    keys = [definition_key(digest), aside_key(digest)]
    content: bytes | None = await redis.call_script(source("definition_back"), keys, [])
    return content


class UnusedDefinitions:
    def __init__(self, redis: PipelinedRedis, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._redis = redis
        self._grace_seconds = grace_seconds

    async def look(self, now: float) -> None:
        """Put aside what none refers to, and forget what has been aside for long. Any number of
        processes may do so at once."""
        kept, aside = await self._there()
        used = await self._registered()
        if not kept | aside.keys() <= used:  # else there is no need to look at all runs
            # In this order: what was accepted is a run before it is accepted no longer.
            used |= await self._accepted()
            used |= await self._of_runs()
        for digest, since in aside.items():
            if digest in used:
                await _bring_back(self._redis, digest)
            elif float(since) <= now - self._grace_seconds:
                await self._redis.call_script(
                    source("definition_forget"), [aside_key(digest)], [since]
                )
        for digest in kept - used:
            keys = [definition_key(digest), aside_key(digest)]
            await self._redis.call_script(source("definition_aside"), keys, [repr(now)])

    async def _there(self) -> tuple[set[str], dict[str, bytes]]:
        """What there is, and what is aside since when."""
        kept: set[str] = set()
        aside: list[str] = []
        async for names in scanned(self._redis, "wf:*def:*"):
            kept |= {name.removeprefix(_KEPT) for name in names if name.startswith(_KEPT)}
            aside += [name[len(_ASIDE) : -1] for name in names if name.startswith(_ASIDE)]
        asked = [("HGET", aside_key(digest), "since") for digest in aside]
        times = zip(aside, await self._answers(asked), strict=True)
        return kept, {digest: since for digest, since in times if since is not None}

    # ── references ───────────────────────────────────────────────────────────────────────

    async def _registered(self) -> set[str]:
        names = await self._redis.call("ZRANGE", WORKFLOWS, 0, -1)
        asked = [("HVALS", f"{workflow_key(name.decode())}:versions") for name in names]
        found = await self._answers(asked)
        return {version.decode().split(" ")[0] for versions in found for version in versions}

    async def _accepted(self) -> set[str]:
        names = await self._redis.call("ZRANGE", ACCEPTED, 0, -1)
        found = await self._answers([("HGET", name.decode(), "todo") for name in names])
        todos = [orjson.loads(todo) for todo in found if todo is not None]
        others = {sha256 for todo in todos for _, sha256, _ in todo.get("others", ())}
        return {todo["definition"] for todo in todos} | others

    async def _of_runs(self) -> set[str]:
        used: set[str] = set()
        async for names in scanned(self._redis, "wf:{*}:meta"):
            if names:
                used |= set(await bisect_failures(self._of_some, names, _of_none))
        return used

    async def _of_some(self, names: Sequence[str]) -> Sequence[str]:
        found = await self._answers([("HGET", name, "definition") for name in names])
        return [digest.decode() for digest in found if digest is not None]

    # ── asking ───────────────────────────────────────────────────────────────────────────

    async def _answers(self, commands: Iterable[Command]) -> list[Any]:
        """Some at a time: there may be many, and others wait meanwhile."""
        asked, found = list(commands), []
        for at in range(0, len(asked), BATCH_SIZE):
            found += await self._redis.call_many(asked[at : at + BATCH_SIZE])
        return found


async def _of_none(_: str, problem: Exception) -> Sequence[str]:
    """What is left of such a run is no run."""
    return ()
