"""Graphs to keep and graphs that were kept: compiled once each, however many runs share them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import orjson

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow

MOST_GRAPHS = 64


class StoredDefinition(NamedTuple):
    sha256: str
    content: bytes
    retries: bytes
    """The handlers' own retries when the run was triggered: they may be others tomorrow."""


def stored_definition(workflow: Workflow) -> tuple[str, bytes]:
    """A definition's digest and its text. The order of keys does not make another definition."""
    data = workflow.model_dump(mode="json", exclude_unset=True)
    ordered = orjson.dumps(data, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(ordered).hexdigest(), orjson.dumps(data)


class Definitions:
    def __init__(self) -> None:
        self._stored: OrderedDict[int, tuple[Graph, StoredDefinition]] = OrderedDict()
        self._graphs: OrderedDict[tuple[int | bytes, bytes], Graph] = OrderedDict()

    def stored(self, graph: Graph) -> StoredDefinition:
        """What a store writes of a graph."""
        # By identity: a graph cannot be hashed cheaply, and whoever triggers often reuses it.
        known = self._stored.get(id(graph))
        if known is not None:
            return known[1]
        if graph.workflow is None:
            raise ValueError("a graph of Python functions cannot be stored")
        sha256, content = stored_definition(graph.workflow)
        retries = orjson.dumps(dict(graph.default_retries), option=orjson.OPT_SORT_KEYS)
        stored = StoredDefinition(sha256, content, retries)
        self._stored[id(graph)] = (graph, stored)
        if len(self._stored) > MOST_GRAPHS:
            self._stored.popitem(last=False)
        return stored

    def known(self, number: int | bytes, retries: bytes) -> Graph | None:
        """The graph of a stored definition, if it was asked for lately."""
        return self._graphs.get((number, retries))

    def graph(self, number: int | bytes, retries: bytes, read: Callable[[], bytes]) -> Graph:
        """The graph of a stored definition."""
        key = (number, retries)
        known = self._graphs.get(key)
        if known is None:
            workflow = Workflow.model_validate(orjson.loads(read()))
            known = self._graphs[key] = build_graph(workflow, orjson.loads(retries))
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        return known
