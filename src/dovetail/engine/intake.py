"""From a published node to a claimed task: rendered, within its rate limit, and ours.

A node is rendered when a worker has room for it, not when it is published: a thousand waiting
nodes must not hold a thousand rendered configs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from dovetail.core.consequences import COMPLETED, PUBLISHED
from dovetail.core.dag import NodeSpec
from dovetail.core.errors import TemplateError
from dovetail.core.run import RunState
from dovetail.core.templates import MAX_CONFIG_SIZE, Rendered
from dovetail.core.transitions import Claim, Dispatch, Fail, Park, Progress, Recall
from dovetail.engine.clock import Clock
from dovetail.engine.orchestrator import Orchestrator
from dovetail.engine.ports import Grant, Limits, Result, Store, Task

FOREVER = float("inf")
FEWEST_GRANTS = 1000
"""Below this it is not worth looking for reservations that nobody will use."""
new_tuple = tuple.__new__  # a named tuple without its Python-level constructor: half the time


class Published(Protocol):
    """The queue of published nodes."""

    def next(self, limit: int) -> list[Dispatch]: ...

    async def news(self) -> None: ...


class Intake:
    """The desk of a worker that lives in the orchestrator's own process."""

    def __init__(
        self,
        published: Published,
        store: Store,
        orchestrator: Orchestrator,
        limits: Limits,
        clock: Clock,
        *,
        worker_id: str,
        isolate: bool = True,
        max_config_size: int = MAX_CONFIG_SIZE,
    ) -> None:
        self._published = published
        self._store = store
        self.report: Callable[[Sequence[Result | Progress]], Awaitable[object]]
        self.report = orchestrator.apply
        self._orchestrator = orchestrator
        self._limits = limits
        self._clock = clock
        self._worker_id = worker_id
        # Outputs are data: a handler gets copies, so that it cannot change what is stored.
        self._copy = _copy if isolate else _same
        self._max_config_size = max_config_size
        self._grants: dict[tuple[str, str], Grant] = {}
        self._sweep_at = FEWEST_GRANTS

    async def take(self, limit: int) -> list[Task]:
        while True:
            tasks: list[Task] = []
            claims: list[Claim] = []
            batch = self._published.next(limit)
            if not batch:
                await self._published.news()
                continue
            for dispatch in batch:
                run, place, token = dispatch
                spec, node = run.graph.nodes[place], run.nodes[place]
                if node.phase is not PUBLISHED or node.token != token:
                    continue  # cancelled on the way
                try:
                    rendered = spec.config.render(run, self._max_config_size)
                except TemplateError as problem:
                    error = {"type": problem.type, "message": f"node '{spec.id}': {problem}"}
                    refusal = Fail(run.id, spec.id, token, error, permanent=True)
                    await self._orchestrator.apply([refusal])
                    continue
                cache = None
                if spec.cache_ttl is not None:
                    cache = (cache_key(spec, rendered), spec.cache_ttl)
                    if await self._recall(cache[0], dispatch):
                        continue
                if spec.resource_tag is not None and not await self._admit(dispatch):
                    continue
                fields = (
                    run.id,
                    spec.id,
                    token,
                    spec.handler,
                    self._copy(rendered.config),
                    run.params,
                    partial(self._inputs, run, spec),
                    spec.timeout_seconds,
                    spec.resource_tag,
                    rendered.deferred,
                    cache,
                )
                tasks.append(new_tuple(Task, fields))
                claim = (run.id, spec.id, token, self._worker_id, FOREVER)
                claims.append(new_tuple(Claim, claim))
            if claims:
                decisions = await self._store.apply(claims, self._clock(), durable=True)
                granted = [decision.changed for decision in decisions]
                if all(granted):
                    return tasks
                return [task for task, mine in zip(tasks, granted, strict=True) if mine]

    async def slow(self, tag: str, until: float) -> None:
        await self._limits.slow(tag, until)

    async def _recall(self, key: str, dispatch: Dispatch) -> bool:
        """Whether the node cache has the node's output; it then needs no start."""
        found = await self._store.recall(key, self._clock())
        if found is None:
            return False
        run, place, token = dispatch
        output = self._copy(found.output)
        await self._orchestrator.apply([Recall(run.id, run.graph.nodes[place].id, token, output)])
        return True

    async def _admit(self, dispatch: Dispatch) -> bool:
        """Whether its rate limit lets the node start now; if not, it is parked."""
        run, place, token = dispatch
        spec = run.graph.nodes[place]
        now = self._clock()
        key = (run.id, spec.id)
        grant = self._grants.pop(key, None)
        if grant is None or not await self._limits.holds(grant, now):
            grant = await self._limits.reserve(spec.resource_tag or "", now)
        if grant.at <= now:
            return True
        (parked,) = await self._orchestrator.apply([Park(run.id, spec.id, token, grant.at)])
        if parked:
            if len(self._grants) >= self._sweep_at:  # of nodes that never came back for theirs
                self._grants = {key: old for key, old in self._grants.items() if old.at > now}
                self._sweep_at = 2 * len(self._grants) + FEWEST_GRANTS
            self._grants[key] = grant
        return False

    def _inputs(self, run: RunState, spec: NodeSpec) -> dict[str, Any]:
        specs, nodes = run.graph.nodes, run.nodes
        return {
            specs[parent].id: self._copy(nodes[parent].output)
            for parent in spec.parents
            if nodes[parent].status is COMPLETED
        }


def cache_key(spec: NodeSpec, rendered: Rendered) -> str:
    """Same handler and same rendered config, same key. Secrets enter by name, not by value."""
    deferred = [[list(d.path), d.source, d.scope] for d in rendered.deferred]
    basis = [spec.handler, rendered.config, deferred]
    return hashlib.sha256(orjson.dumps(basis, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _copy(value: Any) -> Any:
    """A JSON value of its own."""
    return orjson.loads(orjson.dumps(value))


def _same(value: Any) -> Any:
    return value
