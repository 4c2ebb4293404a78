"""Published nodes become messages: rendered where the run's outputs are, then sent to workers.

The counterpart of the intake, for workers in other processes. A node whose config cannot be made
fails here, and one whose output is in the node cache is answered here. What it must not know: how
a message travels.
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

FIRST, MOST_TOGETHER = 100, 400
"""Tasks that go out in one go: few at first, as workers wait for them."""
RECORD_AGAIN_SECONDS = 5.0
"""Until an archive that was away is asked again before a message is sent."""

log = logging.getLogger("dovetail.archive")


class Publisher:
    """The transport of an orchestrator whose workers are elsewhere."""

    apply: Callable[[Sequence[Transition]], Awaitable[object]]
    """Set by the wiring: the orchestrator's, for what is decided while rendering."""
    record: Callable[[Sequence[str]], Awaitable[bool]] | None = None
    """Set by the wiring where there is an archive: brings it up to these runs, or says that it
    cannot."""

    def __init__(
        self,
        store: Store,
        scenes: ScopeReader,
        sender: Sender,
        clock: Clock,
        *,
        max_config_size: int = MAX_CONFIG_SIZE,
        cache: NodeCache | None = None,
    ) -> None:
        self._cache = cache or NodeCache(store, clock)
        self._scenes = scenes
        self._sender = sender
        self._max_config_size = max_config_size
        self._clock = clock
        self._record_again_at = -inf

    async def publish(self, dispatches: Sequence[Dispatch]) -> None:
        by_run: dict[str, list[Dispatch]] = {}
        for dispatch in dispatches:
            by_run.setdefault(dispatch.run.id, []).append(dispatch)
        if self.record is not None:
            # Before any message: who restores a run must know what may have started.
            await self._record_once(by_run)
        tasks: list[Task] = []
        moves: list[Transition] = []
        sending: list[asyncio.Task[None]] = []
        together = FIRST
        scenes = await self._scenes.scenes(by_run)
        for scene, orders in zip(scenes, by_run.values(), strict=True):
            for order in orders:
                made: Task | Transition
                if scene.unread and not _reads_of(order).isdisjoint(scene.unread):
                    made = await self._make_large(order)
                else:
                    made = self._make(order, scene)
                if isinstance(made, Task) and made.cache is not None:
                    made = await self._recalled(made, order)
                if isinstance(made, Task):
                    tasks.append(made)
                else:
                    moves.append(made)
                if len(tasks) == together:  # workers can begin while the rest is made
                    together = min(2 * together, MOST_TOGETHER)
                    sending.append(asyncio.ensure_future(self._sender.send(tasks)))
                    tasks = []
                    for _ in range(2):  # it is asked for, and then goes out
                        await asyncio.sleep(0)
        if tasks:
            await self._sender.send(tasks)
        if sending:
            await asyncio.gather(*sending)
        if moves:
            await self.apply(moves)

    async def _record_once(self, by_run: Mapping[str, Sequence[Dispatch]]) -> None:
        """Have the archive know which at-most-once nodes are about to be sent.

        An archive that is away stops no run, and is not waited for at every message: should Redis
        lose its runs meanwhile, such a node may start twice (decision 0042).
        """
        once = [
            run_id
            for run_id, orders in by_run.items()
            if any(order.run.graph.nodes[order.place].at_most_once for order in orders)
        ]
        if not once or self._clock() < self._record_again_at or self.record is None:
            return
        if not await self.record(once):
            self._record_again_at = self._clock() + RECORD_AGAIN_SECONDS
            log.warning(
                "PostgreSQL does not answer: at_most_once nodes are sent before it knows of them; "
                "if Redis loses its data now, they may start twice"
            )

    def rendered(self, dispatches: Sequence[Dispatch], scene: TemplateScope) -> dict[int, Task]:
        """The tasks of these by place, for who sends them ahead. One whose config cannot be made
        has none: what becomes of it is told when it is published."""
        if self.record is not None:  # those are in the archive first
            dispatches = [
                order for order in dispatches if not order.run.graph.nodes[order.place].at_most_once
            ]
        made = {order.place: self._make(order, scene) for order in dispatches}
        return {place: task for place, task in made.items() if isinstance(task, Task)}

    async def stop(self, order: Stop) -> None:
        await self._sender.stop(order)

    def _make(self, order: Dispatch, scene: TemplateScope) -> Task | Fail:
        run, place, token = order
        spec = run.graph.nodes[place]
        try:
            rendered = spec.config.render(scene, self._max_config_size)
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
            scene.inputs(place),
            spec.timeout_seconds,
            spec.resource_tag,
            rendered.deferred,
            cache,
            place,
            None,
        )
        return new_tuple(Task, fields)

    async def _make_large(self, order: Dispatch) -> Task | Fail:
        """Of a node whose templates read what was too large to be read with all the others."""
        try:
            scene = await self._scenes.scene_of(order)
        except TooLarge as problem:
            return _unrendered(order, problem)
        return self._make(order, scene)

    async def _recalled(self, task: Task, order: Dispatch) -> Task | Recall:
        """Answered from the node cache, if its output is there."""
        assert task.cache is not None  # noqa: S101

        async def of_parents(reads: Container[str]) -> Facts | None:
            if isinstance(task.source, dict):
                return facts_of(task.source, reads)
            return await self._scenes.parents_facts(order, reads)

        found = await self._cache.find(task.cache, task.handler, order.run.params, of_parents)
        if found is None:
            return task
        if isinstance(found, Caching):
            return task._replace(cache=found)
        return Recall(task.run_id, task.node_id, task.token, found.output)


def _reads_of(order: Dispatch) -> frozenset[str]:
    return order.run.graph.nodes[order.place].config.reads


def _unrendered(order: Dispatch, problem: TemplateError) -> Fail:
    run, place, token = order
    name = run.graph.nodes[place].id
    error = {"type": problem.type, "message": f"node '{name}': {problem}"}
    return Fail(run.id, name, token, error, permanent=True, unrendered=True)
