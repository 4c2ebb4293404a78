"""One node with its config, inputs and attempts, as `GET /runs/<id>/nodes/<node>` answers.

The config is rendered again from what the store has: the outputs that a node reads do not change
within its epoch. Only the outputs that are shown or rendered are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from dovetail.core.attempts import attempts_of
from dovetail.core.errors import InvalidParams, Problem, TemplateError, shown
from dovetail.core.events import NO_TOKEN, Event
from dovetail.core.outputs import (
    LARGE_OUTPUT,
    MAX_INPUT_BYTES,
    OutputReference,
    ReadBudget,
    check_rendering,
    is_shown,
    parts,
    reference,
)
from dovetail.core.run import NodeState, RunState, encoded_size
from dovetail.core.states import NodeStatus
from dovetail.core.templates import MAX_CONFIG_SIZE, NodeValue, masked_config
from dovetail.engine.explain import explain_end
from dovetail.engine.views import attempt_view, item_status, node_view, output_href

MAX_ITEMS_SHOWN = 1000


def item_page(
    node: NodeState, status: str | None, limit: int, cursor: str | None
) -> tuple[list[int], str | None]:
    """The items of a page by number, in order, and the cursor of the next page. Raises
    `InvalidParams` for a foreign cursor, or a status that does not exist."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        message = f"'{cursor[:40]}' is no cursor; use the `next_cursor` of the page before"
        raise InvalidParams([Problem("invalid_field", message, "cursor")])
    if status is not None and status not in set(NodeStatus):
        message = f"{shown(status)} is no status; one of {', '.join(NodeStatus)}"
        raise InvalidParams([Problem("invalid_field", message, "status")])
    total = 0 if node.items is None else node.items.total
    # `counts` has the queued items among the pending ones.
    wanted = (NodeStatus.PENDING, NodeStatus.QUEUED) if status == NodeStatus.PENDING else (status,)
    rest = (
        item
        for item in range(int(cursor or 0), total)
        if status is None or item_status(node, item) in wanted
    )
    found = list(islice(rest, max(1, min(limit, MAX_ITEMS_SHOWN)) + 1))
    following = str(found.pop()) if len(found) > min(max(1, limit), MAX_ITEMS_SHOWN) else None
    return found, following


MAX_ITEM_PAGE_BYTES = 64 << 20
"""Of the outputs of one page of items, also where it shows references instead."""


def page_length(views: Sequence[Mapping[str, Any]]) -> int:
    """How many of the first of these items one page has: at least one."""
    outputs = {str(view["index"]): encoded_size(view["output"]) for view in views}
    written = {
        str(view["index"]): encoded_size(view["error"]) + (size if size <= LARGE_OUTPUT else 0)
        for view, size in zip(views, outputs.values(), strict=True)
    }
    fitting = next(parts(outputs, MAX_ITEM_PAGE_BYTES), []), next(parts(written), [])
    return min(map(len, fitting))


SHOWN = ReadBudget(LARGE_OUTPUT, 1 << 20)
"""Of the inputs and the output together; every other one is a reference."""


PER_ITEM = "the config is rendered for each item of for_each, with its `item` and `index`"
"""Why a mapped node has no config of its own."""


class NodeDetail:
    """What is known of a node when its run was loaded. `unread` names the outputs that the caller
    reads and gives back with `put`; then `view` is complete."""

    def __init__(self, run: RunState, index: int, max_config_bytes: int = MAX_CONFIG_SIZE) -> None:
        # Everything is taken now: a run in memory goes on while outputs are read.
        self._graph, self._run_id = run.graph, run.id
        self._spec, node = run.graph.nodes[index], run.nodes[index]
        self._max_config_bytes = max_config_bytes
        self._view = node_view(run, index)
        self._why = explain_end(node)
        self._was_ready = node.status is NodeStatus.COMPLETED or node.token != NO_TOKEN
        self._is_mapped = self._spec.for_each is not None
        known = {"params": run.params, "run": run.get("run")}
        reads = [name for name in self._spec.config.reads if name in run.graph.index]
        self._scope: dict[str, Any] = known | {name: run.get(name) for name in reads}
        parents = [(run.graph.nodes[i].id, run.nodes[i]) for i in self._spec.parents]
        self._inputs = {n: p.output for n, p in parents if p.status is NodeStatus.COMPLETED}
        self._too_large: TemplateError | None = None
        self.unread: dict[str, OutputReference] = {}
        if self._was_ready and not self._is_mapped:
            self._want_for_templates(reads)
        self._want_shown()

    def _want_for_templates(self, reads: Iterable[str]) -> None:
        wanted = {
            name: self._scope[name].output
            for name in reads
            if isinstance(self._scope[name].output, OutputReference)
        }
        try:
            check_rendering({name: one.size for name, one in wanted.items()}, MAX_INPUT_BYTES)
        except TemplateError as problem:
            self._too_large = problem
        else:
            self.unread |= wanted

    def _want_shown(self) -> None:
        left = SHOWN.together
        for name, output in {**self._inputs, self._spec.id: self._view["output"]}.items():
            if isinstance(output, OutputReference) and output.size <= min(SHOWN.each, left):
                self.unread[name] = output
                left -= output.size

    def put(self, name: str, output: Any) -> None:
        """The output of this node was read."""
        value = self._scope.get(name)
        if isinstance(value, NodeValue):
            self._scope[name] = value._replace(output=output)
        if name in self._inputs:
            self._inputs[name] = output
        if name == self._spec.id:
            self._view["output"] = output

    def view(self, events: Iterable[Event], why: Mapping[str, Any] | None) -> dict[str, Any]:
        """`events` are of the run; `why` is the reason that an unfinished node is where it is."""
        config, problem = self._rendered() if self._was_ready else (None, None)
        output = self._view.pop("output")
        shown = self._shown({**self._inputs, self._spec.id: output})
        return {
            **self._view,
            "output": shown.pop(self._spec.id),
            "template": self._spec.config.raw,
            "config": config,
            "config_error": problem,
            "inputs": shown,
            "why": self._why if why is None else why,
            "attempts": [
                attempt_view(one) for one in attempts_of(events, self._graph, self._spec.id)
            ],
        }

    def _rendered(self) -> tuple[dict[str, Any] | None, str | None]:
        spec, limit = self._spec, self._max_config_bytes
        if self._is_mapped:
            return None, PER_ITEM
        try:
            if self._too_large is not None:
                raise self._too_large
            return masked_config(spec.config, _Scope(self._scope), limit), None
        except TemplateError as problem:
            return None, f"node '{spec.id}': {problem}"

    def _shown(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Each output, or a reference to one that is large."""
        left = SHOWN.together
        found: dict[str, Any] = {}
        for name, output in outputs.items():
            size = 0 if output is None else encoded_size(output)
            unread = isinstance(output, OutputReference)
            if unread or size > left or not is_shown(output, size):
                found[name] = reference(size, output_href(self._run_id, name))
            else:
                found[name] = output
                left -= size
        return found


class _Scope:
    __slots__ = ("get",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.get = values.__getitem__
