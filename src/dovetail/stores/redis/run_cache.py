"""The parts of a run that never change: read once, and cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import orjson

from dovetail.core.dag import Graph
from dovetail.core.errors import BrokenRun
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import GraphShape
from dovetail.stores.redis.definitions import definition, definition_key
from dovetail.stores.redis.run_index import ORIGIN_FIELDS, RunOrigin, origin

MAX_CACHED_RUNS = 4096
SMALL_DEFINITION_BYTES = 4096
"""So few bytes are sent again with each run, in case Redis has lost them."""
_FACTS = ("definition", "retries", "params", *ORIGIN_FIELDS)


class RunOutline(RunState):
    """The constant parts of a run. It has no nodes: dispatching needs none."""

    __slots__ = ()

    def __init__(
        self,
        run_id: str,
        graph: Graph,
        params: dict[str, Any],
        now: float,
        version: int | None = None,
    ) -> None:
        self.id, self.graph, self.params = run_id, graph, params
        self.created_at, self.version = now, version


class RunHeader(NamedTuple):
    run: RunOutline
    shape: GraphShape
    origin: RunOrigin


class RunHeaderCache:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis
        self.definitions = Definitions()
        self._shapes: dict[int, GraphShape] = {}
        self._known: dict[str, RunHeader] = {}

    def get(self, run_id: str) -> RunHeader | None:
        """If it is known already."""
        return self._known.get(run_id)

    async def find(self, run_id: str) -> RunHeader | None:
        await self.look_for([run_id])
        return self._known.get(run_id)

    async def look_for(self, run_ids: Iterable[str]) -> None:
        """Read the headers of these runs, if they exist."""
        unknown = [run_id for run_id in run_ids if run_id not in self._known]
        if not unknown:
            return
        reading: list[Command] = [("HMGET", f"wf:{{{one}}}:meta", *_FACTS) for one in unknown]
        graphs: dict[tuple[bytes, bytes], Graph | None] = {}
        for run_id, facts in zip(unknown, await self._redis.call_many(reading), strict=True):
            digest, retries, params, *birth = facts
            if digest is None:
                continue
            if (digest, retries) not in graphs:
                graphs[digest, retries] = await self._graph(digest, retries)
            graph = graphs[digest, retries]
            if graph is not None:
                was = origin(*birth)
                number = int(birth[-1]) if was.registered else None
                run = RunOutline(run_id, graph, orjson.loads(params), was.created_at, number)
                self.keep(RunHeader(run, self.shape(graph), was))

    def made(self, submit: Submit, now: float) -> RunHeader:
        """That of a run that is about to be made."""
        run = RunOutline(submit.run_id, submit.graph, submit.params, now, submit.version)
        return RunHeader(run, self.shape(submit.graph), RunOrigin.of(submit, now))

    def keep(self, header: RunHeader) -> None:
        if len(self._known) >= MAX_CACHED_RUNS:
            # Many at once: to find the first of a dict is to pass all that was before it.
            for oldest in list(islice(self._known, MAX_CACHED_RUNS // 2)):
                del self._known[oldest]
        self._known[header.run.id] = header

    def forget(self, run_id: str) -> None:
        self._known.pop(run_id, None)

    def shape(self, graph: Graph) -> GraphShape:
        shape = self._shapes.get(id(graph))
        if shape is None:
            if len(self._shapes) >= MAX_CACHED_RUNS:
                self._shapes.clear()
            shape = self._shapes[id(graph)] = GraphShape(graph)
        return shape

    async def keeping(self, submits: Sequence[Submit]) -> list[Command]:
        """What keeps the definitions of these runs in Redis, whatever has happened to it."""
        stored = {id(one.graph): self.definitions.stored(one.graph) for one in submits}
        commands: list[Command] = []
        for one in {kept.sha256: kept for kept in stored.values()}.values():
            key = definition_key(one.sha256)
            if len(one.content) <= SMALL_DEFINITION_BYTES or not await self._redis.call(
                "EXISTS", key
            ):
                commands.append(("SET", key, one.content, "NX"))
        return commands

    async def _graph(self, digest: bytes, retries: bytes) -> Graph | None:
        graph = self.definitions.known(digest, retries)
        if graph is None:
            content = await definition(self._redis, digest.decode())
            if content is not None:  # else Redis was emptied this very moment
                try:
                    graph = self.definitions.graph(digest, retries, lambda: content)
                except ValueError as error:  # damaged, or of a version that is newer than ours
                    why = f"definition {digest.decode()} cannot be read: {error}"
                    raise BrokenRun(why) from error
        return graph
