"""The verdicts on conditions of nodes that became ready in Redis, made of what they read.

Nothing else of their run is read, and nothing else of the graph is told: so what a node costs does
not grow with its run. It is not read at one moment, but for the epoch first: within that neither an
output changes any more nor what fed a ready node, and a verdict counts only in the epoch that it
was made in. What it must not know: what follows from a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from dovetail.core.errors import TemplateError, TooLarge
from dovetail.core.templates import Scope
from dovetail.pipe import Command, Pipe
from dovetail.stores.redis_moves import UNIT, Fields
from dovetail.stores.redis_scene import RedisScene, Scenes
from dovetail.stores.redis_shells import Shell, Shells


class Verdicts(NamedTuple):
    fields: Fields
    """As `settle.lua` takes them."""
    graph: bytes
    """The whole, if that has to come with them."""


class Judge:
    def __init__(self, pipe: Pipe, shells: Shells, scenes: Scenes) -> None:
        self._pipe = pipe
        self._shells = shells
        self._scenes = scenes

    async def verdicts(self, shell: Shell, ready: Sequence[int]) -> Verdicts | None:
        """On what is pending in a run: `ready`, as far as is known. None if nothing is."""
        run, shape = shell.run, shell.shape
        own = f"wf:{{{run.id}}}:"
        while True:
            reads = {place: None for node in ready for place in shape.asks[node]}
            commands: list[Command] = [("HMGET", own + "meta", "status", "epoch", "pending")]
            if ready:
                commands.append(("HMGET", own + "deps", *ready))
            scene, told = await self._scenes.of(run, [*reads], behind=commands)
            status, epoch, pending = told[0]
            if status is None:  # dropped, or lost with Redis
                self._shells.forget(run.id)
            if not pending:
                return None
            named = orjson.loads(pending)["ready"]
            if {*named} <= {*ready}:
                break
            ready = named
        fed = _fed(shell, ready, told[1])
        verdicts = {
            place: await self._verdict(shell, place, scene)
            for place in named
            if place in fed and run.graph.nodes[place].condition is not None
        }
        fields: Fields = {
            "epoch": int(epoch),
            "verdicts": {str(place): verdict for place, verdict in verdicts.items()},
            "families": {},
        }
        if any(isinstance(verdict, str) for verdict in verdicts.values()):
            return Verdicts(fields, shape.whole)
        skipped = [place for place in named if place not in fed or verdicts.get(place) is False]
        return Verdicts(fields | {"families": shape.families(named, skipped)}, b"")

    async def _verdict(self, shell: Shell, place: int, scene: RedisScene) -> bool | str:
        nodes = shell.run.graph.nodes
        names = [nodes[asked].id for asked in shell.shape.asks[place]]
        if scene.unread.isdisjoint(names):
            return _verdict(shell, place, scene)
        try:  # it names many, or large ones
            return _verdict(shell, place, await self._scenes.only(shell.run, names))
        except TooLarge as problem:
            return _failed(nodes[place].id, problem)


def _fed(shell: Shell, ready: Iterable[int], counts: Iterable[bytes | None]) -> set[int]:
    """Those of these that run if their condition says so: a parent completed, or there is none."""
    nodes = shell.run.graph.nodes
    return {
        place
        for place, count in zip(ready, counts, strict=True)
        if not nodes[place].parents or int(count or 0) % UNIT
    }


def _verdict(shell: Shell, place: int, scope: Scope) -> bool | str:
    spec = shell.run.graph.nodes[place]
    assert spec.condition is not None  # noqa: S101
    try:
        return bool(spec.condition(scope))
    except TemplateError as problem:
        return _failed(spec.id, problem)


def _failed(name: str, problem: TemplateError) -> str:
    error: dict[str, Any] = {
        "type": problem.type,
        "message": f"node '{name}': condition {problem}",
    }
    return orjson.dumps(error).decode()
