"""What can be known of a definition before it is known to be right.

Read leniently from the raw data: whatever has the wrong shape is left out here, because the
rule for fields reports it. What it must not know: the rules.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dovetail.core import dag
from dovetail.core.definition.source import MAX_TEXT_BYTES, MAX_TEXT_DEPTH
from dovetail.core.findings import Finding, Path, Suggester
from dovetail.core.templates import MAX_TEMPLATE_SIZE, ROOTS

_FEW = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a definition may be. A text is held to `max_body_bytes` when it is read."""

    max_nodes: int = 10_000
    max_edges: int = 100_000
    max_body_bytes: int = MAX_TEXT_BYTES
    max_depth: int = MAX_TEXT_DEPTH
    max_template_bytes: int = MAX_TEMPLATE_SIZE
    max_templates: int = 25_000
    """Different ones in one definition: twice as many as nodes, and some."""
    max_template_words: int = 150_000
    """Words and signs of those together: a condition of a dozen for each node."""
    max_parsed_words: int = 10_000
    """The same, counting once what differs in names, numbers and quoted texts only."""


class RawNode:
    """One entry of `nodes`, with the fields that have a usable shape."""

    __slots__ = ("_listed", "condition", "config", "dependencies", "handler", "id", "index", "raw")

    def __init__(self, index: int, raw: dict[str, Any]) -> None:
        self.index = index
        self.raw = raw
        self.id = _text(raw.get("id"))
        self.handler = _text(raw.get("handler"))
        self.condition = raw.get("condition")
        config = raw.get("config")
        self.config: dict[str, Any] = config if isinstance(config, dict) else {}
        self._listed = "dependencies" if raw.get("dependencies") is not None else "depends_on"
        names = raw.get(self._listed)
        self.dependencies: list[Any] = names if isinstance(names, list) else []
        """As they are listed: what is no text among them is the model's to report."""

    @property
    def path(self) -> Path:
        return ("nodes", self.index)

    def dependency_path(self, place: int) -> Path:
        return ("nodes", self.index, self._listed, place)

    @property
    def has_condition(self) -> bool:
        return self.condition is not None and self.condition is not True


class Facts:
    """A definition's nodes, their names and their edges."""

    def __init__(
        self,
        data: Any,
        known_handlers: Container[str] | None,
        limits: Limits,
        suggester: Suggester,
    ) -> None:
        self._is_mapping = isinstance(data, dict)
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}
        self.known_handlers = known_handlers
        self.limits = limits
        self.suggester = suggester
        listed = self.data.get("nodes")
        self._listed: list[Any] = listed if isinstance(listed, list) else []

    @cached_property
    def oversize(self) -> list[Finding]:
        """Whether it is too large to be looked at node by node."""
        limits = self.limits
        found = []
        if len(self._listed) > limits.max_nodes:
            message = f"{len(self._listed):,} nodes; at most {limits.max_nodes:,} are allowed"
            found.append(Finding("too_large", message, ("nodes",)))
        edges = sum(
            len(names)
            for raw in self._listed
            if isinstance(raw, dict)
            for names in (raw.get("dependencies"), raw.get("depends_on"))
            if isinstance(names, list)
        )
        if edges > limits.max_edges:
            message = f"{edges:,} dependencies; at most {limits.max_edges:,} are allowed"
            found.append(Finding("too_large", message, ("nodes",)))
        return found

    @property
    def is_empty(self) -> bool:
        """No nodes at all, as opposed to something else in their place."""
        return self._is_mapping and self.data.get("nodes") in (None, [])

    @cached_property
    def nodes(self) -> list[RawNode]:
        return [RawNode(i, raw) for i, raw in enumerate(self._listed) if isinstance(raw, dict)]

    @cached_property
    def by_id(self) -> dict[str, int]:
        """The place in `nodes` of each id; of a repeated one, its first."""
        found: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            if node.id is not None:
                found.setdefault(node.id, place)
        return found

    @cached_property
    def readable(self) -> list[str]:
        """Every name that a template may know."""
        return [*self.by_id, *ROOTS]

    @cached_property
    def parents(self) -> list[list[int]]:
        """The edges that lead to another node that exists, each once."""
        by_id = self.by_id
        return [
            list(
                dict.fromkeys(
                    by_id[name]
                    for name in node.dependencies
                    if isinstance(name, str) and by_id.get(name, place) != place
                )
            )
            if node.dependencies
            else []
            for place, node in enumerate(self.nodes)
        ]

    @cached_property
    def layers(self) -> list[list[int]]:
        return dag.layers(self.parents)

    def is_upstream(self, other: int, place: int) -> bool:
        """Whether the node at `other` is done whenever the one at `place` starts."""
        parents = self.parents[place]
        # Mostly it is one of few parents; looking through thousands would take longer than bits.
        if len(parents) <= _FEW and other in parents:
            return True
        return bool(self._ancestors[place] >> other & 1)

    @cached_property
    def _ancestors(self) -> list[int]:
        return dag.ancestors(self.parents)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
