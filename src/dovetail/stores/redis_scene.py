"""Some nodes of a run in Redis as they are, without all of it: enough to render others.

What it must not know: any rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from dovetail.core.consequences import new_tuple
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue
from dovetail.core.transitions import Complete, Dispatch
from dovetail.pipe import Command, Pipe
from dovetail.stores.redis_moves import nodes_of
from dovetail.stores.redis_shells import Shells

MOST_RUNS = 4096


class RedisScene:
    __slots__ = ("_inputs", "_nodes", "run")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._nodes: dict[str, NodeValue] = {}
        self._inputs: tuple[Sequence[int], dict[str, Any]] | None = None

    def add(self, place: int, status: NodeStatus, output: Any, error: Any) -> None:
        self._inputs = None
        name = self.run.graph.nodes[place].id
        self._nodes[name] = new_tuple(NodeValue, (name, status, output, error))

    def add_completed(self, places: Sequence[int], outputs: Sequence[bytes]) -> None:
        """Add these nodes, from what was stored of them; a join may have thousands of parents."""
        self._inputs = None
        nodes, known, completed = self.run.graph.nodes, self._nodes, NodeStatus.COMPLETED
        for place, output in zip(places, orjson.loads(b"[%b]" % b",".join(outputs)), strict=True):
            name = nodes[place].id
            known[name] = new_tuple(NodeValue, (name, completed, output, None))

    def get(self, name: str) -> Any:
        found = self._nodes.get(name)
        if found is not None:
            return found
        if name in self.run.graph.index:
            raise KeyError(name)
        return self.run.get(name)

    def inputs(self, place: int) -> dict[str, Any]:
        """Outputs of the completed parents by id: the very same for siblings."""
        names = self.run.graph.nodes
        parents = names[place].parents
        if self._inputs is None or self._inputs[0] != parents:
            known, completed, found = self._nodes, NodeStatus.COMPLETED, {}
            for parent in parents:
                name, status, output, _ = known[names[parent].id]
                if status is completed:
                    found[name] = output
            self._inputs = (parents, found)
        return self._inputs[1]


class AtHand:
    """Outputs that were just stored, for the nodes that are about to be published for them.

    No longer: Redis may lose what it had, and a node may have another output then.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, Any]] = {}

    def keep(self, run: RunState, moves: Sequence[Complete]) -> None:
        if len(self._runs) >= MOST_RUNS:  # of publishes that failed
            self._runs.clear()
        index = run.graph.index
        self._runs[run.id] = {index[move.node]: move.output for move in moves}

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def taken(self, run_id: str) -> Mapping[int, Any]:
        """Outputs by place. Whatever is missing is read."""
        return self._runs.pop(run_id, {})


class Scenes:
    """What it takes to render nodes, read for those that are about to be published."""

    def __init__(self, pipe: Pipe, shells: Shells) -> None:
        self._pipe = pipe
        self._shells = shells
        self.at_hand = AtHand()

    async def read(self, orders: Mapping[str, Sequence[Dispatch]]) -> list[RedisScene]:
        """For these nodes of each run: their parents, and whatever their templates read."""
        made: list[RedisScene] = []
        commands: list[Command] = []
        missing: list[tuple[RedisScene, list[int]]] = []
        for run_id, dispatches in orders.items():
            run = dispatches[0].run
            needs = self._shells.shape(run.graph).needs
            at_hand = self.at_hand.taken(run_id)
            scene = RedisScene(run)
            made.append(scene)
            lacking = []
            for need in {need for _, place, _ in dispatches for need in needs[place]}:
                if need in at_hand:
                    scene.add(need, NodeStatus.COMPLETED, at_hand[need], None)
                else:
                    lacking.append(need)
            if lacking:
                commands.append(("HMGET", f"wf:{{{run_id}}}:out", *lacking))
                missing.append((scene, lacking))
        await self._add(missing, await self._pipe.many(commands))
        return made

    async def of(
        self, run: RunState, places: list[int], *, behind: Sequence[Command]
    ) -> tuple[RedisScene, list[Any]]:
        """These nodes, read behind what is asked first, with the answers to that."""
        scene = RedisScene(run)
        reading: list[Command] = [("HMGET", f"wf:{{{run.id}}}:out", *places)] if places else []
        answers = await self._pipe.many([*behind, *reading])
        await self._add([(scene, places)] if places else [], answers[len(behind) :])
        return scene, answers[: len(behind)]

    async def _add(
        self, missing: Sequence[tuple[RedisScene, list[int]]], answers: Sequence[Any]
    ) -> None:
        """Add nodes to scenes, from what was answered when their outputs were asked for."""
        doubtful: list[tuple[RedisScene, list[int]]] = []
        for (scene, places), outputs in zip(missing, answers, strict=True):
            known = [output for output in outputs if output is not None]
            if len(known) == len(places):  # who has an output is completed, and nobody else
                scene.add_completed(places, known)
            else:
                doubtful.append((scene, places))
        await self._look_closer(doubtful)

    async def _look_closer(self, doubtful: Sequence[tuple[RedisScene, list[int]]]) -> None:
        """Add nodes some of which had no output: they were skipped, or failed, or run again since
        a retry. The outputs last: one that completes in between has its output then."""
        commands: list[Command] = [
            ("HMGET", f"wf:{{{scene.run.id}}}:{part}", *places)
            for scene, places in doubtful
            for part in ("nodes", "ends", "out")
        ]
        answers = iter(await self._pipe.many(commands))
        for scene, places in doubtful:
            states, ends, outputs = next(answers), next(answers), next(answers)
            found = nodes_of(scene.run.graph, places, states, outputs, ends)
            for place, node in found.items():
                output = node.output if node.status is NodeStatus.COMPLETED else None
                scene.add(place, node.status, output, node.error)
