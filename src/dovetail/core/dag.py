"""The graph of a workflow: order, cycles, ancestors and descendants.

First come pure functions over indices, for the validation and the library. A node is its index in
the definition, and `parents[i]` are the indices that node `i` depends on. Then comes the compiled
`Graph` of a run. Nothing here recurses: a chain of 10,000 nodes costs what a fan of 10,000 does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from dovetail.core.definition.model import (
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    Defaults,
    Node,
    RetrySettings,
    Webhook,
    Workflow,
)
from dovetail.core.retry import DEFAULT_RETRY, RetryPolicy
from dovetail.core.templates import (
    ConfigTemplate,
    Scope,
    compile_config,
    compile_list,
    parse_condition,
)

Edges = Sequence[Sequence[int]]
"""For each node the indices of its neighbours in one direction."""
_MAX_SPELLED_OUT = 12


def children_of(parents: Edges) -> list[list[int]]:
    """The same edges seen from the other end, each list in definition order."""
    children: list[list[int]] = [[] for _ in parents]
    for child, above in enumerate(parents):
        for parent in above:
            children[parent].append(child)
    return children


def layers(parents: Edges) -> list[list[int]]:
    """Kahn's algorithm: each layer depends only on layers before it, as early as it can be.

    Nodes on a cycle, and nodes behind one, are in no layer.
    """
    children = children_of(parents)
    waiting = [len(above) for above in parents]
    layer = [index for index, count in enumerate(waiting) if not count]
    found: list[list[int]] = []
    while layer:
        found.append(layer)
        ready: list[int] = []
        for index in layer:
            for child in children[index]:
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
        ready.sort()
        layer = ready
    return found


def ready_nodes(parents: Edges, completed: Container[int]) -> list[int]:
    """The nodes not completed themselves whose parents all are, in definition order."""
    return [
        index
        for index, above in enumerate(parents)
        if index not in completed and all(parent in completed for parent in above)
    ]


def ancestors(parents: Edges) -> list[int]:
    """For each node all its ancestors as a bit set: `ancestors(p)[i] >> j & 1`.

    With one integer per node 100,000 edges take milliseconds. Nodes on a cycle are ancestors of
    each other and of themselves.
    """
    above = [0] * len(parents)
    for members in reversed(_components(children_of(parents))):
        bits = 0
        for index in members:
            for parent in parents[index]:
                bits |= above[parent] | 1 << parent
        for index in members:
            above[index] = bits
    return above


def descendants(children: Edges, start: int) -> list[int]:
    """Every node below `start`, in definition order, without `start` itself."""
    seen = {start}
    todo = [start]
    while todo:
        for child in children[todo.pop()]:
            if child not in seen:
                seen.add(child)
                todo.append(child)
    seen.discard(start)
    return sorted(seen)


class Cycle(NamedTuple):
    """Nodes that all depend on each other, and one shortest cycle through the first."""

    members: list[int]
    way: list[int]


def cycles(parents: Edges) -> list[Cycle]:
    """One `Cycle` per strongly connected component of more than one node.

    A node that depends on itself is not among them: the validation reports it as another mistake.
    """
    children = children_of(parents)
    found = sorted(members for members in _components(children) if len(members) > 1)
    return [Cycle(members, _way_around(children, members)) for members in found]


def spell_out(names: Sequence[str]) -> str:
    """`a needs b, b needs c, c needs a`, of the names of a cycle's `way`. In a way each node is a
    child of the node before, so it is read from its end. A long one is cut in the middle."""
    around = [names[0], *reversed(names)]
    needs = [f"{node} needs {parent}" for node, parent in pairwise(around)]
    if len(needs) > _MAX_SPELLED_OUT:
        needs[_MAX_SPELLED_OUT - 1 : -1] = ["…"]
    return ", ".join(needs)


def _components(children: Edges) -> list[list[int]]:
    """Tarjan's strongly connected components, each before those it is reached from."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in range(len(children)):
        if root in order:
            continue
        walk: list[tuple[int, Iterator[int]]] = [(root, iter(children[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while walk:
            node, rest = walk[-1]
            for child in rest:
                if child not in order:
                    order[child] = low[child] = len(order)
                    stack.append(child)
                    on_stack.add(child)
                    walk.append((child, iter(children[child])))
                    break
                if child in on_stack:
                    low[node] = min(low[node], order[child])
            else:
                walk.pop()
                if walk:
                    above = walk[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == order[node]:
                    members = [stack.pop()]
                    while members[-1] != node:
                        members.append(stack.pop())
                    on_stack.difference_update(members)
                    found.append(sorted(members))
    return found


def _way_around(children: Edges, members: Sequence[int]) -> list[int]:
    """A shortest cycle through the first member, breadth first; there is one by definition."""
    inside = set(members)
    start = members[0]
    came_from: dict[int, int] = {}
    todo = deque([start])
    while start not in came_from:
        node = todo.popleft()
        for child in children[node]:
            if child in inside and child not in came_from:
                came_from[child] = node
                todo.append(child)
    way = [came_from[start]]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    way.reverse()
    return way


@dataclass(frozen=True, slots=True)
class MapSpec:
    """How a mapped node goes through its items."""

    items: Callable[[Scope], Any]
    """Makes the list. Raises `TemplateError`."""
    window: int = DEFAULT_WINDOW
    """Items that may be out at once: begun and not ended."""
    max_failures: int | tuple[int, int] = 0
    """So many items may fail, or this fraction of them."""
    template: str | None = None
    """What the list is made from, as it is written, for messages."""

    def tolerated(self, total: int) -> int:
        """How many of so many items may fail."""
        allowed = self.max_failures
        return allowed if isinstance(allowed, int) else total * allowed[0] // allowed[1]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node with all defaults filled in."""

    index: int
    id: str
    handler: str
    config: ConfigTemplate
    condition: Callable[[Scope], bool] | None
    parents: tuple[int, ...]
    children: tuple[int, ...]
    timeout_seconds: float
    max_retries: int
    retry: RetryPolicy
    cache_ttl: float | None
    resource_tag: str | None
    at_most_once: bool
    allow_failure: bool
    for_each: MapSpec | None = None
    is_direct: bool = field(init=False)
    """Once its parents are done it is published: it has no condition and is not mapped."""

    def __post_init__(self) -> None:
        is_direct = self.condition is None and self.for_each is None
        object.__setattr__(self, "is_direct", is_direct)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Graph:
    """A validated workflow, compiled once and shared by all runs of it."""

    name: str
    nodes: tuple[NodeSpec, ...]
    index: Mapping[str, int]
    fail_fast: bool
    max_concurrency: int | None
    roots: tuple[int, ...]
    exits: tuple[int, ...]
    output_node: int | None
    """The `output` node whose output is the run's result, if there is exactly one."""
    workflow: Workflow | None = field(default=None, repr=False)
    """The definition; None for a graph of Python functions, which no store can keep."""
    default_retries: Mapping[str, int] = field(default_factory=dict)
    """The retries that its handlers declare themselves, as the graph was built with."""

    @property
    def webhooks(self) -> Sequence[Webhook]:
        """Who is notified when a run ends."""
        return () if self.workflow is None else self.workflow.notify

    def descendants(self, index: int) -> Iterator[int]:
        """Every node below `index`, in definition order."""
        yield from descendants([spec.children for spec in self.nodes], index)


def build_graph(workflow: Workflow, default_retries: Mapping[str, int]) -> Graph:
    """Compile a valid workflow.

    A node's own fields win over the workflow's `defaults`, these over the handler's own retries
    (`default_retries` by handler name), these over the contract's defaults.
    """
    index = {node.id: number for number, node in enumerate(workflow.nodes)}
    parents = [tuple(index[name] for name in node.dependencies) for node in workflow.nodes]
    children = children_of(parents)
    defaults = workflow.defaults or Defaults()
    fallback_timeout = defaults.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    nodes = tuple(
        NodeSpec(
            index=number,
            id=node.id,
            handler=node.handler,
            config=compile_config(node.config),
            condition=None if node.condition is None else parse_condition(node.condition),
            parents=parents[number],
            children=tuple(children[number]),
            timeout_seconds=node.timeout_seconds or fallback_timeout,
            max_retries=_retries(node, defaults, default_retries),
            retry=_retry(node, defaults),
            cache_ttl=None if node.cache is None else node.cache.ttl_seconds,
            resource_tag=node.resource_tag or defaults.resource_tag,
            at_most_once=node.delivery == "at_most_once",
            allow_failure=node.allow_failure,
            for_each=_map_spec(node),
        )
        for number, node in enumerate(workflow.nodes)
    )
    outputs = [spec.index for spec in nodes if spec.handler == "output"]
    return Graph(
        name=workflow.name,
        nodes=nodes,
        index=index,
        fail_fast=workflow.on_failure == "fail_fast",
        max_concurrency=workflow.max_concurrency,
        roots=tuple(spec.index for spec in nodes if not spec.parents),
        exits=tuple(spec.index for spec in nodes if not spec.children),
        output_node=outputs[0] if len(outputs) == 1 else None,
        workflow=workflow,
        default_retries={
            handler: default_retries[handler]
            for handler in {node.handler for node in workflow.nodes}
            if handler in default_retries
        },
    )


def _retries(node: Node, defaults: Defaults, own: Mapping[str, int]) -> int:
    if node.delivery == "at_most_once":
        return 0  # `at_most_once` implies it, whatever `defaults` or the handler say
    if node.max_retries is not None:
        return node.max_retries
    if defaults.max_retries is not None:
        return defaults.max_retries
    return own.get(node.handler, 0)


def _map_spec(node: Node) -> MapSpec | None:
    given = node.for_each
    if given is None:
        return None
    failures = given.max_failures
    allowed = fraction_of(failures) if isinstance(failures, str) else failures
    window = min(given.max_concurrency, MAX_WINDOW)
    template = given.items.strip() if isinstance(given.items, str) else None
    return MapSpec(compile_list(given.items), window, allowed, template)


def fraction_of(share: str) -> tuple[int, int]:
    """Of a share such as "12.5%"; a float would be a little off."""
    whole, _, decimals = share.rstrip("%").partition(".")
    return int(whole + decimals), 100 * 10 ** len(decimals)


def _retry(node: Node, defaults: Defaults) -> RetryPolicy:
    """Field by field, so that a node may change the base delay alone."""
    given = {**_given(defaults.retry), **_given(node.retry)}
    return replace(DEFAULT_RETRY, **given) if given else DEFAULT_RETRY


def _given(retry: RetrySettings | None) -> dict[str, float]:
    return {} if retry is None else retry.model_dump(exclude_none=True)
