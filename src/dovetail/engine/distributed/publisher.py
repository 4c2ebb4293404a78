"""Renders published nodes into tasks, where the run's outputs are, and sends the tasks to workers.

The counterpart of `engine/local/task_source.py` for workers in other processes. A node whose config
cannot be rendered fails here; a node whose output is in the node cache completes here; and the list
of a mapped node is rendered here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import orjson

from dovetail.core.caching import INDEX, ITEM, Caching, Facts
from dovetail.core.effects import new_tuple
from dovetail.core.errors import TemplateError, TooLarge
from dovetail.core.items import item_place
from dovetail.core.templates import MAX_CONFIG_SIZE, ItemScope, Scope
from dovetail.core.transitions import Dispatch, Expand, Fail, Recall, Stop, Transition
from dovetail.engine.cache import NodeCache, caching_of, facts_of
from dovetail.engine.clock import Clock
from dovetail.engine.expansion import list_failure, render_list
from dovetail.engine.ports import ScopeReader, Sender, Store, Task, TemplateScope

FIRST_BATCH_SIZE, MAX_BATCH_SIZE = 100, 400
"""Tasks that are sent together: few at first, because workers wait for them."""
MAX_KEPT_LISTS = 16
"""Lists of mapped nodes that a process keeps: one may have many megabytes."""
MAX_ITEM_PARAMS = 1024
"""Bytes of params that travel with each item. Larger ones do not: the list may be in them."""
RECORD_AGAIN_SECONDS = 5.0
"""How long after a failed write the archive is not tried again."""

log = logging.getLogger("dovetail.archive")

Record = Callable[[Sequence[str]], Awaitable[bool]]
"""Writes these runs to the archive; returns False if it could not."""


class ItemList(NamedTuple):
    """The list of a mapped node, and the params that travel with each item."""

    values: Sequence[Any]
    params: dict[str, Any] | None
    """None if they are too large to travel with each item."""


class TaskRenderer:
    """Renders published nodes and items into tasks, and keeps the lists of mapped nodes."""

    def __init__(
        self,
        *,
        max_config_size: int = MAX_CONFIG_SIZE,
        has_archive: bool = False,
        breaks: Callable[[], int] = lambda: 0,
    ) -> None:
        """`breaks`: how often the connection to the store was lost."""
        self._max_config_size = max_config_size
        self._has_archive = has_archive
        self._breaks = breaks
        self._kept_since = breaks()
        self._lists: OrderedDict[tuple[str, int, int], ItemList] = OrderedDict()
        """The lists that were used last, by run, node and epoch."""

    def forget_lists(self) -> None:
        """To be called when the store has lost writes: the node before may run again and return
        another list, from which another process makes the items."""
        self._lists.clear()

    def _forget_after_break(self) -> None:
        """After a break the store may have come back without its last writes."""
        if (breaks := self._breaks()) != self._kept_since:
            self._kept_since = breaks
            self.forget_lists()

    def keep_list(self, order: Dispatch, values: Sequence[Any]) -> ItemList:
        """Keep the list of a mapped node, for the tasks of its items."""
        self._forget_after_break()
        params: dict[str, Any] | None = order.run.params
        if len(orjson.dumps(params)) > MAX_ITEM_PARAMS:
            params = None
        kept = self._lists[_list_key(order)] = ItemList(values, params)
        while len(self._lists) > MAX_KEPT_LISTS:
            self._lists.popitem(last=False)
        return kept

    def kept_list(self, order: Dispatch) -> ItemList | None:
        """The list of the node that the order is about, if this process keeps it."""
        self._forget_after_break()
        key = _list_key(order)
        if key not in self._lists:
            return None
        self._lists.move_to_end(key)
        return self._lists[key]

    def render_ahead(self, dispatches: Sequence[Dispatch], scope: TemplateScope) -> dict[int, Task]:
        """The tasks, by place, that may be sent before their dispatch is decided.

        A node has no task here if its config cannot be rendered, or if the archive must know of it
        first. Such a node is rendered when it is published.
        """
        if self._has_archive:
            dispatches = [
                order
                for order in dispatches
                if not order.run.graph.nodes[order.node_index].at_most_once
            ]
        if dispatches and dispatches[0].item is not None:
            return self._render_items_ahead(dispatches, scope)
        made = {order.node_index: self.render(order, scope) for order in dispatches}
        return {index: task for index, task in made.items() if isinstance(task, Task)}

    def _render_items_ahead(
        self, dispatches: Sequence[Dispatch], scope: TemplateScope
    ) -> dict[int, Task]:
        """The same for items of one node. Dispatches beyond the end of the list have no task."""
        kept = self.kept_list(dispatches[0])
        if kept is None:
            return {}
        first = item_place(dispatches[0].node_index, 0)
        made: dict[int, Task] = {}
        for order in dispatches:
            if order.item is None or order.item >= len(kept.values):
                continue
            task = self.render_item(order, scope, kept)
            if isinstance(task, Task):
                made[first + order.item] = task
        return made

    def render_known_item(self, order: Dispatch, scope: TemplateScope) -> Task | Fail | None:
        """The task of an item, if this process keeps its list and `scope` has all that it reads."""
        kept = self.kept_list(order)
        if order.item is None or kept is None or scope.unread or order.item >= len(kept.values):
            return None
        return self.render_item(order, scope, kept)

    def render(self, order: Dispatch, scope: TemplateScope) -> Task | Fail:
        """The task of a published node, or its failure if its config cannot be rendered."""
        return self._render(order, scope, scope, order.run.params, None)

    def render_item(self, order: Dispatch, scope: TemplateScope, kept: ItemList) -> Task | Fail:
        """The same for an item of a mapped node.

        The inputs do not travel with it: they are the same for each item. Raises `IndexError` if
        the list has no such item.
        """
        item = order.item
        assert item is not None  # noqa: S101 - the caller has looked
        value = kept.values[item]
        return self._render(order, scope, ItemScope(scope, value, item), kept.params, value)

    def _render(
        self,
        order: Dispatch,
        scope: TemplateScope,
        reading: Scope,
        params: dict[str, Any] | None,
        value: Any,
    ) -> Task | Fail:
        """`reading` is the scope from which the config is rendered; `value` is the item, if any."""
        run, index, token, item = order
        spec = run.graph.nodes[index]
        try:
            rendered = spec.config.render(reading, self._max_config_size)
        except TemplateError as problem:
            return _unrendered(order, problem)
        cache = None
        if spec.cache_ttl is not None:
            cache = caching_of(spec, rendered)
        fields = (
            run.id,
            spec.id if item is None else order.name,
            token,
            spec.handler,
            rendered.config,
            params,
            scope.inputs(index) if item is None else None,
            spec.timeout_seconds,
            spec.resource_tag,
            rendered.deferred,
            cache,
            index if item is None else item_place(index, item),
            None,
            value,
            item,
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
        """Send the tasks of these nodes and items. For a node that needs no worker, return the
        transition that it needs instead."""
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
                made: Task | Transition | None
                if order.item is not None:
                    made = self._renderer.render_known_item(order, scope)
                    if made is None:
                        made = await self._make_item_task(order, scope)
                elif order.run.graph.nodes[order.node_index].for_each is not None:
                    made = await self._expand(order, scope)
                elif scope.unread and not _reads_of(order).isdisjoint(scope.unread):
                    made = await self._make_large(order)
                else:
                    made = self._renderer.render(order, scope)
                if isinstance(made, Task) and made.cache is not None:
                    made = await self._look_in_cache(made, order)
                if isinstance(made, Task):
                    tasks.append(made)
                else:
                    transitions.append(made)
                if len(tasks) == batch_size:  # workers can begin while the rest is made
                    batch_size = min(2 * batch_size, MAX_BATCH_SIZE)
                    sending.append(asyncio.ensure_future(self._sender.send(tasks)))
                    tasks = []
                    for _ in range(2):  # in the first turn it is enqueued, in the next written
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

    async def _expand(self, order: Dispatch, scope: TemplateScope) -> Expand:
        """Render the list of a mapped node, and keep it for the items."""
        run, index, token, _ = order
        try:
            if scope.unread:
                scope = await self._scopes.scope_of(order)
        except TemplateError as problem:
            return list_failure(run, index, token, problem)
        expand, values = render_list(run, index, token, scope)
        if values is not None:
            self._renderer.keep_list(order, values)
        return expand

    async def _make_item_task(self, order: Dispatch, scope: TemplateScope) -> Task | Fail:
        """The task of an item, for which the list or large outputs may have to be read first."""
        try:
            if scope.unread:
                scope = await self._scopes.scope_of(order)
            return self._renderer.render_item(order, scope, await self._list_of(order))
        except IndexError:
            problem = TemplateError("for_each has fewer items than when they were counted")
            return _unrendered(order, problem)
        except TemplateError as problem:
            return _unrendered(order, problem)

    async def _list_of(self, order: Dispatch) -> ItemList:
        """The list of an item's node. Another process may have rendered it, or this one before a
        restart: then it is rendered again."""
        kept = self._renderer.kept_list(order)
        if kept is None:
            scope = await self._scopes.scope_of(order._replace(item=None))
            expand, values = render_list(order.run, order.node_index, order.token, scope)
            if values is None:
                raise TemplateError((expand.error or {}).get("message", "for_each gives no list"))
            kept = self._renderer.keep_list(order, values)
        return kept

    async def _make_large(self, order: Dispatch) -> Task | Fail:
        """The task of a node that reads an output too large to be read with the others."""
        try:
            scope = await self._scopes.scope_of(order)
        except TooLarge as problem:
            return _unrendered(order, problem)
        return self._renderer.render(order, scope)

    async def _look_in_cache(self, task: Task, order: Dispatch) -> Task | Recall:
        """The transition that takes the output from the node cache, or the task without one."""
        assert task.cache is not None  # noqa: S101

        async def of_parents(reads: Container[str]) -> Facts | None:
            if isinstance(task.source, dict):
                return facts_of(task.source, reads)
            return await self._scopes.parents_facts(order, reads)

        own = {ITEM: task.item, INDEX: task.item_index}
        found = await self._cache.find(task.cache, task.handler, order.run.params, of_parents, own)
        if found is None:
            return task
        if isinstance(found, Caching):
            return task._replace(cache=found)
        return Recall(task.run_id, task.node_id, task.token, found.output)


def _list_key(order: Dispatch) -> tuple[str, int, int]:
    return order.run.id, order.node_index, order.token.epoch


def _reads_of(order: Dispatch) -> frozenset[str]:
    return order.run.graph.nodes[order.node_index].config.reads


def _unrendered(order: Dispatch, problem: TemplateError) -> Fail:
    error = {"type": problem.type, "message": f"node '{order.name}': {problem}"}
    return Fail(order.run.id, order.name, order.token, error, permanent=True, unrendered=True)
