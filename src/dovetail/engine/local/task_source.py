"""From a published node to a claimed task: rendered, within its rate limit, and ours.

A node is rendered when a worker has room for it, not when it is published: a thousand waiting
nodes must not hold a thousand rendered configs.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Protocol

import orjson

from dovetail.core.caching import INDEX, ITEM, Caching, Facts
from dovetail.core.effects import COMPLETED, PUBLISHED, QUEUED, RUNNING, new_tuple
from dovetail.core.errors import TemplateError
from dovetail.core.node_logs import LogChunk
from dovetail.core.run import Phase
from dovetail.core.templates import MAX_CONFIG_SIZE, ItemScope, Scope
from dovetail.core.transitions import Claim, Dispatch, Fail, Park, Progress, Recall
from dovetail.engine.cache import NodeCache, caching_of, facts_of
from dovetail.engine.clock import Clock
from dovetail.engine.expansion import list_of, render_list
from dovetail.engine.limits import TokenBucket
from dovetail.engine.local.orchestrator import LocalOrchestrator
from dovetail.engine.ports import Cached, RateLimiter, Result, Store, Task

LONG_WAIT = 1.0
"""A node that would be parked longer first checks that the nodes before it still wait."""


class PublishedQueue(Protocol):
    """The queue of published nodes."""

    def next(self, limit: int) -> list[Dispatch]: ...

    async def news(self) -> None: ...


class LoggingStore(Store, Protocol):
    def log(self, chunks: Sequence[LogChunk]) -> None:
        """As `TaskSource.log`."""
        ...


class LocalTaskSource:
    """The task source of a worker in the orchestrator's own process."""

    def __init__(
        self,
        published: PublishedQueue,
        store: LoggingStore,
        orchestrator: LocalOrchestrator,
        limits: RateLimiter,
        clock: Clock,
        *,
        worker_id: str,
        isolate: bool = True,
        max_config_size: int = MAX_CONFIG_SIZE,
        cache: NodeCache | None = None,
    ) -> None:
        self._cache = cache or NodeCache(store, clock, secrets={})
        self._published = published
        self._store = store
        self.report: Callable[[Sequence[Result | Progress]], Awaitable[object]]
        self.report = orchestrator.apply
        self.log = store.log
        self._orchestrator = orchestrator
        self._limits = limits
        self._clock = clock
        self._worker_id = worker_id
        # Outputs are data: a handler gets copies, so that it cannot change what is stored.
        self._isolate = isolate
        self._copy = _copy if isolate else _same
        self._max_config_size = max_config_size
        self._booked: dict[tuple[str, int, int | None], tuple[Dispatch, float]] = {}
        """When each parked node shall come back."""
        self._sweep_at = 0.0
        self._left_behind: list[Task] = []

    async def take(self, limit: int) -> list[Task]:
        while True:
            if self._left_behind:
                await self._store.apply([], self._clock(), durable=True)
                left, self._left_behind = self._left_behind[:limit], self._left_behind[limit:]
                if mine := [task for task in left if _is_running(task)]:
                    return mine
            tasks: list[Task] = []
            batch = self._published.next(limit)
            if not batch:
                await self._published.news()
                continue
            for dispatch in batch:
                run, index, token, item = dispatch
                spec, node = run.graph.nodes[index], run.nodes[index]
                name, value = spec.id, None
                scope: Scope = run
                # Also true for every item: a mapped node itself is never published.
                if node.phase is not PUBLISHED or node.token != token:
                    if item is None or not is_published(dispatch):
                        await self._expand(dispatch)
                        continue  # or it was cancelled on the way
                    name = dispatch.name
                template = spec.config
                try:
                    if item is not None:
                        value = list_of(run, index)[item]
                        scope = ItemScope(run, value, item)
                    if template.templates or template.fixed_size > self._max_config_size:
                        rendered = template.render(scope, self._max_config_size)
                    else:
                        rendered = template.plain
                except TemplateError as problem:
                    error = {"type": problem.type, "message": f"node '{name}': {problem}"}
                    refusal = Fail(run.id, name, token, error, permanent=True, unrendered=True)
                    await self._orchestrator.apply([refusal])
                    continue
                cache = None
                if spec.cache_ttl is not None:
                    cache = caching_of(spec, rendered)
                    if cache is not None and await self._recall(cache, dispatch, value):
                        continue
                if spec.resource_tag is not None and not await self._admit(dispatch):
                    continue
                config = rendered.config
                if self._isolate:
                    config = _copy(config)
                fields = (
                    run.id,
                    name,
                    token,
                    spec.handler,
                    config,
                    run.params,
                    dispatch,
                    spec.timeout_seconds,
                    spec.resource_tag,
                    rendered.deferred,
                    cache,
                    index,
                    None,
                    value,
                    item,
                )
                tasks.append(new_tuple(Task, fields))
            if tasks:
                me = self._worker_id
                claims = [
                    new_tuple(Claim, (task.run_id, task.node_id, task.token, me, math.inf))
                    for task in tasks
                ]
                try:
                    decisions = await self._store.apply(claims, self._clock(), durable=True)
                except asyncio.CancelledError:
                    # A handler cancelled the task that it had once run in, and that is us. What
                    # was claimed stays claimed, for the next `take`.
                    self._left_behind += tasks
                    raise
                granted = [decision.changed for decision in decisions]
                if all(granted):
                    return tasks
                return [task for task, mine in zip(tasks, granted, strict=True) if mine]

    async def slow(self, tag: str, until: float) -> None:
        await self._limits.slow(tag, until)

    async def _expand(self, dispatch: Dispatch) -> None:
        """Render the list of a mapped node, if this is still wanted."""
        run, index, token, item = dispatch
        node = run.nodes[index]
        if item is not None or node.phase is not Phase.EXPANDING or node.token != token:
            return
        expand, values = render_list(run, index, token)
        (opened,) = await self._orchestrator.apply([expand])
        items = run.nodes[index].items
        if opened and items is not None:
            items.values = values  # so that it is not rendered again for the first item

    async def _recall(self, caching: Caching, dispatch: Dispatch, value: Any) -> bool:
        """Whether the node cache has the node's output; it then needs no start."""
        run, index, token, item = dispatch
        spec = run.graph.nodes[index]

        async def of_parents(reads: Container[str]) -> Facts:
            parents = [(run.graph.nodes[i].id, run.nodes[i]) for i in spec.parents]
            done = {name: node.output for name, node in parents if node.status is COMPLETED}
            return facts_of(done, reads)

        own = {ITEM: value, INDEX: item}
        found = await self._cache.find(caching, spec.handler, run.params, of_parents, own)
        if not isinstance(found, Cached):
            return False
        output = self._copy(found.output)
        await self._orchestrator.apply([Recall(run.id, dispatch.name, token, output)])
        return True

    async def _admit(self, dispatch: Dispatch) -> bool:
        """Whether its rate limit lets the node start now; if not, it is parked."""
        run, index, token, item = dispatch
        spec = run.graph.nodes[index]
        tag = spec.resource_tag or ""
        now = self._clock()
        booked = self._booked.pop((run.id, index, item), None)
        at = booked[1] if booked else await self._limits.book(tag, now)
        if at > now + LONG_WAIT and now >= self._sweep_at:
            await self._sweep(now)
            await self._limits.unbook(tag, 1)
            at = await self._limits.book(tag, now)
        if at <= now:
            if await self._limits.start(tag, now):
                return True
            at = await self._limits.book(tag, now)  # too many have come late
        (parked,) = await self._orchestrator.apply([Park(run.id, dispatch.name, token, at)])
        if parked:
            self._booked[run.id, index, item] = (dispatch, at)
        return False

    async def retime(self, tag: str, bucket: TokenBucket) -> None:
        """The bucket of this tag was replaced: nodes parked by it are rescheduled earlier."""
        now = self._clock()
        await self._sweep(now)
        waiting = [
            (at, key, dispatch)
            for key, (dispatch, at) in self._booked.items()
            if dispatch.run.graph.nodes[dispatch.node_index].resource_tag == tag and at > now
        ]
        waiting.sort(key=lambda one: one[0])
        sooner = []
        for (at, key, dispatch), time in zip(
            waiting, bucket.rebook(len(waiting), now), strict=True
        ):
            if time < at:
                # Before it is parked again: it may be woken at once.
                self._booked[key] = (dispatch, time)
                sooner.append(Park(dispatch.run.id, dispatch.name, dispatch.token, time))
        if sooner:
            await self._orchestrator.apply(sooner)

    async def _sweep(self, now: float) -> None:
        """Give back what was booked for nodes that were cancelled meanwhile."""
        gone: Counter[str] = Counter()
        for key, (dispatch, _) in list(self._booked.items()):
            state = dispatch.state
            if state is None or state.status is not QUEUED or state.token != dispatch.token:
                del self._booked[key]
                spec = dispatch.run.graph.nodes[dispatch.node_index]
                gone[spec.resource_tag or ""] += 1
        for tag, count in gone.items():
            await self._limits.unbook(tag, count)
        self._sweep_at = now + LONG_WAIT


def is_published(dispatch: Dispatch) -> bool:
    state = dispatch.state
    return state is not None and state.phase is PUBLISHED and state.token == dispatch.token


def _is_running(task: Task) -> bool:
    order = task.source
    if not isinstance(order, Dispatch):
        return False
    state = order.state
    return state is not None and state.status is RUNNING and state.token == task.token


def _copy(value: Any) -> Any:
    """A JSON value of its own."""
    return orjson.loads(orjson.dumps(value))


def _same(value: Any) -> Any:
    return value
