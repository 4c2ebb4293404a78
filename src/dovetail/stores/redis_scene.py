"""Some nodes of a run in Redis as they are, without all of it: enough to render others.

What it must not know: any rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from dovetail.core.consequences import new_tuple
from dovetail.core.inputs import MAX_INPUT_BYTES, PART_BYTES, check_rendering, parts
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue
from dovetail.core.transitions import Complete, Dispatch
from dovetail.pipe import Command, Pipe
from dovetail.stores.redis_lists import source
from dovetail.stores.redis_moves import nodes_of
from dovetail.stores.redis_outputs import MOST_PLACES, bounded
from dovetail.stores.redis_shells import Shells

MOST_RUNS = 4096
FEW_PLACES = 4
"""Outputs that are asked for with one command, whatever they are: that is as cheap as can be, and
each is at most what a node may return."""
LEAST_BYTES = 256 << 10
"""Of one run, where outputs of many runs are read together."""


class RedisScene:
    __slots__ = ("_inputs", "_nodes", "run", "unread")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.unread: set[str] = set()
        """Nodes that were asked for, and were too large to be read with the others."""
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

    def leave_unread(self, places: Iterable[int]) -> None:
        nodes = self.run.graph.nodes
        self.unread.update(nodes[place].id for place in places)

    def inputs(self, place: int) -> dict[str, Any] | None:
        """Outputs of the completed parents by id: the very same for siblings. None if one of them
        was not read: together they are too large to travel."""
        names = self.run.graph.nodes
        parents = names[place].parents
        if self.unread and any(names[parent].id in self.unread for parent in parents):
            return None
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

    def __init__(self, pipe: Pipe, shells: Shells, max_input_bytes: int = MAX_INPUT_BYTES) -> None:
        self._pipe = pipe
        self._shells = shells
        self.max_input_bytes = max_input_bytes
        """What one node may read."""
        self.at_hand = AtHand()

    async def read(self, orders: Mapping[str, Sequence[Dispatch]]) -> list[RedisScene]:
        """For these nodes of each run: their parents, and whatever their templates read.

        As far as that is not large: one request shall not fill the memory of an orchestrator. What
        a template reads and was left out is read for its node alone, see `only`; parents that were
        left out are read by a handler that asks for them.
        """
        made: list[RedisScene] = []
        commands: list[Command] = []
        missing: list[tuple[RedisScene, list[int]]] = []
        most = max(PART_BYTES // max(1, len(orders)), LEAST_BYTES)
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
                commands.append(self._reading(run_id, lacking, most))
                missing.append((scene, lacking))
        answers = await self._pipe.many(commands)
        await self._add(
            missing, [_outputs(one[1], a) for one, a in zip(missing, answers, strict=True)]
        )
        return made

    def _reading(self, run_id: str, places: Sequence[int], most: int) -> Command:
        """Asks for the outputs of these; if they are many, for as many as fit into `most`."""
        own = f"wf:{{{run_id}}}:"
        if len(places) <= FEW_PLACES:
            return ("HMGET", own + "out", *places)
        args = [most, 0, *places[:MOST_PLACES]]
        return self._pipe.evaluation(bounded("outputs"), (own + "meta", own + "out"), args)

    async def only(self, run: RunState, names: Iterable[str]) -> RedisScene:
        """With these nodes alone, in parts. Raises `TooLarge` if a node may not read so much."""
        scene = RedisScene(run)
        index = run.graph.index
        places = {name: index[name] for name in names if name in index}
        sizes = await self.sizes(run.id, places)
        check_rendering(sizes, self.max_input_bytes)
        for part in parts(sizes):
            wanted = [places[name] for name in part]
            answer = await self._pipe.call("HMGET", f"wf:{{{run.id}}}:out", *wanted)
            await self._add([(scene, wanted)], [answer])
        return scene

    async def sizes(self, run_id: str, places: Mapping[str, int]) -> dict[str, int]:
        """The bytes of these outputs, 0 for one that is not there."""
        wanted = [*places.values()]
        asked = [
            self._pipe.evaluation(
                source("input_sizes"), [f"wf:{{{run_id}}}:out"], wanted[at : at + MOST_PLACES]
            )
            for at in range(0, len(wanted), MOST_PLACES)
        ]
        answers = await self._pipe.many(asked)
        return dict(zip(places, (size for answer in answers for size in answer), strict=True))

    async def of(
        self, run: RunState, places: list[int], *, behind: Sequence[Command]
    ) -> tuple[RedisScene, list[Any]]:
        """These nodes, read behind what is asked first, with the answers to that."""
        scene = RedisScene(run)
        reading: list[Command] = [self._reading(run.id, places, PART_BYTES)] if places else []
        answers = await self._pipe.many([*behind, *reading])
        if places:
            await self._add([(scene, places)], [_outputs(places, answers[-1])])
        return scene, answers[: len(behind)]

    async def _add(
        self, missing: Sequence[tuple[RedisScene, list[int]]], answers: Sequence[Any]
    ) -> None:
        """Add nodes to scenes, from what was answered when their outputs were asked for."""
        doubtful: list[tuple[RedisScene, list[int]]] = []
        for (scene, places), answer in zip(missing, answers, strict=True):
            if len(answer) < len(places):  # as many as fitted
                scene.leave_unread(places[len(answer) :])
            known = [output for output in answer if output is not None]
            if len(known) == len(places):  # who has an output is completed, and nobody else
                scene.add_completed(places, known)
                continue
            pairs = [*zip(places, answer, strict=False)]
            scene.add_completed([place for place, output in pairs if output is not None], known)
            if lacking := [place for place, output in pairs if output is None]:
                doubtful.append((scene, lacking))
        await self._look_closer(doubtful)

    async def _look_closer(self, doubtful: Sequence[tuple[RedisScene, list[int]]]) -> None:
        """Add nodes that had no output: they were skipped, or failed, or run again since a retry.
        The outputs last: one that completes in between has its output then."""
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


def _outputs(places: Sequence[int], answer: Any) -> Sequence[bytes | None]:
    """Of the first of these places, from what `_reading` was answered."""
    found: Sequence[bytes | None] = answer if len(places) <= FEW_PLACES else answer[1]
    return found
