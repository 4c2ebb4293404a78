"""Renders published nodes into tasks, where the run's outputs are, and sends the tasks to workers.

The counterpart of `engine/local/task_source.py` for workers in other processes. A node whose config
cannot be rendered fails here; a node whose output is in the node cache completes here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from math import inf

from dovetail.core.caching import Caching, Facts
from dovetail.core.effects import new_tuple
from dovetail.core.errors import TemplateError, TooLarge
from dovetail.core.templates import MAX_CONFIG_SIZE
from dovetail.core.transitions import Dispatch, Fail, Recall, Stop, Transition
from dovetail.engine.cache import NodeCache, caching_of, facts_of
from dovetail.engine.clock import Clock
from dovetail.engine.ports import ScopeReader, Sender, Store, Task, TemplateScope

FIRST_BATCH_SIZE, MAX_BATCH_SIZE = 100, 400
"""Tasks per message to Redis: few at first, because workers wait for them."""
RECORD_AGAIN_SECONDS = 5.0
"""After a failed write the archive is not tried again for so long."""

log = logging.getLogger("dovetail.archive")

Record = Callable[[Sequence[str]], Awaitable[bool]]
"""Brings the archive up to these runs; False if it could not."""


class TaskRenderer:
    """Makes the task of a published node from the node's config and the outputs that it reads."""

    def __init__(
        self, *, max_config_size: int = MAX_CONFIG_SIZE, has_archive: bool = False
    ) -> None:
        self._max_config_size = max_config_size
        self._has_archive = has_archive

    def render_ahead(self, dispatches: Sequence[Dispatch], scope: TemplateScope) -> dict[int, Task]:
        """The tasks, by node index, that may be sent before their dispatch is decided.

        A node without a task here is rendered again when it is published: its config could not be
        rendered, or the archive must know of it first.
        """
        if self._has_archive:
            dispatches = [
                order
                for order in dispatches
                if not order.run.graph.nodes[order.node_index].at_most_once
            ]
        made = {order.node_index: self.render(order, scope) for order in dispatches}
        return {index: task for index, task in made.items() if isinstance(task, Task)}

    def render(self, order: Dispatch, scope: TemplateScope) -> Task | Fail:
        """The task of one published node, or its failure if its config cannot be rendered."""
        run, place, token, _ = order
        spec = run.graph.nodes[place]
        try:
            rendered = spec.config.render(scope, self._max_config_size)
        except TemplateError as problem:
            return _unrendered(order, problem)
        cache = None
        if spec.cache_ttl is not None:
            cache = caching_of(spec, rendered)
        fields = (
            run.id,
            spec.id,
            token,
            spec.handler,
            rendered.config,
            run.params,
            scope.inputs(place),
            spec.timeout_seconds,
            spec.resource_tag,
            rendered.deferred,
            cache,
            place,
            None,
        )
        return new_tuple(Task, fields)


class Publisher:
    """The transport of an orchestrator whose workers are other processes."""

    def __init__(
        self,
        store: Store,
        scopes: ScopeReader,
        sender: Sender,
        clock: Clock,
        *,
        renderer: TaskRenderer | None = None,
        cache: NodeCache | None = None,
        record: Record | None = None,
    ) -> None:
        self._renderer = renderer or TaskRenderer()
        self._cache = cache or NodeCache(store, clock)
        self._scopes = scopes
        self._sender = sender
        self._clock = clock
        self._record = record
        self._record_again_at = -inf

    async def publish(self, dispatches: Sequence[Dispatch]) -> list[Transition]:
        """Send these nodes. Nodes that need no worker become the transitions that it returns."""
        by_run: dict[str, list[Dispatch]] = {}
        for dispatch in dispatches:
            by_run.setdefault(dispatch.run.id, []).append(dispatch)
        if self._record is not None:
            # Before any message: a restore must know which nodes may have started.
            await self._record_once(by_run)
        tasks: list[Task] = []
        transitions: list[Transition] = []
        sending: list[asyncio.Task[None]] = []
        batch_size = FIRST_BATCH_SIZE
        scopes = await self._scopes.scopes(by_run)
        for scope, orders in zip(scopes, by_run.values(), strict=True):
            for order in orders:
                made: Task | Transition
                if scope.unread and not _reads_of(order).isdisjoint(scope.unread):
                    made = await self._make_large(order)
                else:
                    made = self._renderer.render(order, scope)
                if isinstance(made, Task) and made.cache is not None:
                    made = await self._recalled(made, order)
                if isinstance(made, Task):
                    tasks.append(made)
                else:
                    transitions.append(made)
                if len(tasks) == batch_size:  # workers can begin while the rest is made
                    batch_size = min(2 * batch_size, MAX_BATCH_SIZE)
                    sending.append(asyncio.ensure_future(self._sender.send(tasks)))
                    tasks = []
                    for _ in range(2):  # it is asked for, and then goes out
                        await asyncio.sleep(0)
        if tasks:
            await self._sender.send(tasks)
        if sending:
            await asyncio.gather(*sending)
        return transitions

    async def _record_once(self, by_run: Mapping[str, Sequence[Dispatch]]) -> None:
        """Write to the archive which at-most-once nodes are about to be sent.

        An archive that is away stops no run and is not awaited at every message. If Redis loses
        its runs meanwhile, such a node may start twice (decision 0042).
        """
        once = [
            run_id
            for run_id, orders in by_run.items()
            if any(order.run.graph.nodes[order.node_index].at_most_once for order in orders)
        ]
        if not once or self._clock() < self._record_again_at or self._record is None:
            return
        if not await self._record(once):
            self._record_again_at = self._clock() + RECORD_AGAIN_SECONDS
            log.warning(
                "PostgreSQL does not answer: at_most_once nodes are sent before it knows of them; "
                "if Redis loses its data now, they may start twice"
            )

    async def stop(self, order: Stop) -> None:
        await self._sender.stop(order)

    async def _make_large(self, order: Dispatch) -> Task | Fail:
        """The task of a node that reads an output too large to be read with the others."""
        try:
            scope = await self._scopes.scope_of(order)
        except TooLarge as problem:
            return _unrendered(order, problem)
        return self._renderer.render(order, scope)

    async def _recalled(self, task: Task, order: Dispatch) -> Task | Recall:
        """The task, or the output of its node from the node cache."""
        assert task.cache is not None  # noqa: S101

        async def of_parents(reads: Container[str]) -> Facts | None:
            if isinstance(task.source, dict):
                return facts_of(task.source, reads)
            return await self._scopes.parents_facts(order, reads)

        found = await self._cache.find(task.cache, task.handler, order.run.params, of_parents)
        if found is None:
            return task
        if isinstance(found, Caching):
            return task._replace(cache=found)
        return Recall(task.run_id, task.node_id, task.token, found.output)


def _reads_of(order: Dispatch) -> frozenset[str]:
    return order.run.graph.nodes[order.node_index].config.reads


def _unrendered(order: Dispatch, problem: TemplateError) -> Fail:
    run, place, token, _ = order
    name = run.graph.nodes[place].id
    error = {"type": problem.type, "message": f"node '{name}': {problem}"}
    return Fail(run.id, name, token, error, permanent=True, unrendered=True)
