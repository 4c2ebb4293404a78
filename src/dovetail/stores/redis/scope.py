"""Reads of a run in Redis without the whole run: its header, template scopes, conditions.

A header holds what never changes of a run. It is read once and cached.

Outputs are read in parts: an output may be a megabyte, a run may have thousands, and Redis serves
no other client while it replies. Parts of different moments do no harm within one epoch: a
completed node stays completed, with its output.

A condition reads the epoch first, then the outputs that it names. Its result counts only in that
epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import orjson

from dovetail.core.dag import Graph
from dovetail.core.effects import new_tuple
from dovetail.core.errors import BrokenRun, StoreError, TemplateError, TooLarge
from dovetail.core.items import item_place
from dovetail.core.outputs import MAX_INPUT_BYTES, PART_BYTES, check_rendering, parts
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue, Scope
from dovetail.core.transitions import Complete, Dispatch, Submit
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import UNIT, Fields, GraphShape, nodes_of, source
from dovetail.stores.redis.definitions import definition, definition_key
from dovetail.stores.redis.items import MapCounts, output_in
from dovetail.stores.redis.run_index import ORIGIN_FIELDS, RunOrigin, origin

MAX_CACHED_RUNS = 4096
SMALL_DEFINITION_BYTES = 4096
"""So few bytes are sent again with each run, in case Redis has lost them."""
_FACTS = ("definition", "retries", "params", *ORIGIN_FIELDS)


class RunOutline(RunState):
    """The constant parts of a run. It has no nodes: dispatching needs none."""

    __slots__ = ()

    def __init__(
        self,
        run_id: str,
        graph: Graph,
        params: dict[str, Any],
        now: float,
        version: int | None = None,
    ) -> None:
        self.id, self.graph, self.params = run_id, graph, params
        self.created_at, self.version = now, version


class RunHeader(NamedTuple):
    run: RunOutline
    shape: GraphShape
    origin: RunOrigin


class RunHeaderCache:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis
        self.definitions = Definitions()
        self._shapes: dict[int, GraphShape] = {}
        self._known: dict[str, RunHeader] = {}

    def get(self, run_id: str) -> RunHeader | None:
        """If it is known already."""
        return self._known.get(run_id)

    async def find(self, run_id: str) -> RunHeader | None:
        await self.look_for([run_id])
        return self._known.get(run_id)

    async def look_for(self, run_ids: Iterable[str]) -> None:
        """Read the headers of these runs, if they exist."""
        unknown = [run_id for run_id in run_ids if run_id not in self._known]
        if not unknown:
            return
        reading: list[Command] = [("HMGET", f"wf:{{{one}}}:meta", *_FACTS) for one in unknown]
        graphs: dict[tuple[bytes, bytes], Graph | None] = {}
        for run_id, facts in zip(unknown, await self._redis.call_many(reading), strict=True):
            digest, retries, params, *birth = facts
            if digest is None:
                continue
            if (digest, retries) not in graphs:
                graphs[digest, retries] = await self._graph(digest, retries)
            graph = graphs[digest, retries]
            if graph is not None:
                was = origin(*birth)
                number = int(birth[-1]) if was.registered else None
                run = RunOutline(run_id, graph, orjson.loads(params), was.created_at, number)
                self.keep(RunHeader(run, self.shape(graph), was))

    def made(self, submit: Submit, now: float) -> RunHeader:
        """That of a run that is about to be made."""
        run = RunOutline(submit.run_id, submit.graph, submit.params, now, submit.version)
        return RunHeader(run, self.shape(submit.graph), RunOrigin.of(submit, now))

    def keep(self, header: RunHeader) -> None:
        if len(self._known) >= MAX_CACHED_RUNS:
            # Many at once: to find the first of a dict is to pass all that was before it.
            for oldest in list(islice(self._known, MAX_CACHED_RUNS // 2)):
                del self._known[oldest]
        self._known[header.run.id] = header

    def forget(self, run_id: str) -> None:
        self._known.pop(run_id, None)

    def shape(self, graph: Graph) -> GraphShape:
        shape = self._shapes.get(id(graph))
        if shape is None:
            if len(self._shapes) >= MAX_CACHED_RUNS:
                self._shapes.clear()
            shape = self._shapes[id(graph)] = GraphShape(graph)
        return shape

    async def keeping(self, submits: Sequence[Submit]) -> list[Command]:
        """What keeps the definitions of these runs in Redis, whatever has happened to it."""
        stored = {id(one.graph): self.definitions.stored(one.graph) for one in submits}
        commands: list[Command] = []
        for one in {kept.sha256: kept for kept in stored.values()}.values():
            key = definition_key(one.sha256)
            if len(one.content) <= SMALL_DEFINITION_BYTES or not await self._redis.call(
                "EXISTS", key
            ):
                commands.append(("SET", key, one.content, "NX"))
        return commands

    async def _graph(self, digest: bytes, retries: bytes) -> Graph | None:
        graph = self.definitions.known(digest, retries)
        if graph is None:
            content = await definition(self._redis, digest.decode())
            if content is not None:  # else Redis was emptied this very moment
                try:
                    graph = self.definitions.graph(digest, retries, lambda: content)
                except ValueError as error:  # damaged, or of a version that is newer than ours
                    why = f"definition {digest.decode()} cannot be read: {error}"
                    raise BrokenRun(why) from error
        return graph


OUTPUT_PART_BYTES = 4 << 20
MAX_OUTPUTS_PER_CALL = 4000
"""That are asked for at once."""


class OutputPart(NamedTuple):
    epoch: bytes | None
    """That they are of. None if the run is not there."""
    outputs: list[bytes | None]
    """Of the first of the places that were asked for."""


class RedisOutputs:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis

    async def first(self, wanted: Mapping[str, Sequence[int]], most: int) -> dict[str, OutputPart]:
        """By run, as many of the wanted ones as have together so many bytes; maybe none."""
        asked = [self.read_command(run_id, places, most, 0) for run_id, places in wanted.items()]
        answers = await self._redis.call_many(asked)
        return {run_id: OutputPart(*part) for run_id, part in zip(wanted, answers, strict=True)}

    async def all(
        self, run_id: str, places: Sequence[int], epoch: bytes, key: str = "out"
    ) -> dict[int, bytes] | None:
        """The outputs of these nodes that exist; with the key `items`, the records of items. None
        if the run has left this epoch."""
        found: dict[int, bytes] = {}
        while places:
            part = await self.part(run_id, places, epoch, key)
            if part is None:
                return None
            found |= outputs_by_place(places, part)
            places = places[len(part) :]
        return found

    async def part(
        self, run_id: str, places: Sequence[int], epoch: bytes, key: str = "out"
    ) -> list[bytes | None] | None:
        """The same of the first of these places: as many as one call reads, and at least one."""
        (answer,) = await self._redis.call_many(
            [self.read_command(run_id, places, OUTPUT_PART_BYTES, 1, key)]
        )
        part = OutputPart(*answer)
        if part.epoch != epoch:
            return None
        return part.outputs

    def read_command(
        self, run_id: str, places: Sequence[int], most: int, least: int, key: str = "out"
    ) -> Command:
        """Reads as many of the first of these as have at most `most` bytes together, and in any
        case `least` of them. The reply is an `OutputPart`."""
        own = f"wf:{{{run_id}}}:"
        args: list[Argument] = [most, least, *places[:MAX_OUTPUTS_PER_CALL]]
        return self._redis.script_command(
            source("within", "outputs"), (own + "meta", own + key), args
        )

    async def mapped_output(self, run_id: str, index: int) -> bytes | None:
        """The output of a mapped node, a list with the outputs of its items. None if the run does
        not have them any more."""
        own = f"wf:{{{run_id}}}:"
        asked: list[Command] = [("HGET", own + "maps", index), ("HGET", own + "meta", "epoch")]
        counts, epoch = await self._redis.call_many(asked)
        if counts is None or epoch is None:
            return None
        first = item_place(index, 0)
        places = range(first, first + MapCounts.parse(counts).total)
        records = await self.all(run_id, places, epoch, key="items")
        if records is None:
            return None
        return b"[%b]" % b",".join(output_in(records.get(place)) for place in places)


def outputs_by_place(places: Sequence[int], outputs: Sequence[bytes | None]) -> dict[int, bytes]:
    """The outputs that exist. They are of the first of these places."""
    pairs = zip(places, outputs, strict=False)
    return {place: output for place, output in pairs if output is not None}


MAX_CACHED_OUTPUTS = 4096
PLAIN_READ_OUTPUTS = 4
"""Outputs that are asked for with one command, whatever they are: that is as cheap as can be, and
each is at most what a node may return."""
MIN_RUN_BYTES = 256 << 10
"""Of one run, where outputs of many runs are read together."""


class RedisTemplateScope:
    __slots__ = ("_inputs", "_nodes", "run", "unread")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.unread: set[str] = set()
        """Nodes that were asked for, and were too large to be read with the others."""
        self._nodes: dict[str, NodeValue] = {}
        self._inputs: tuple[Sequence[int], dict[str, Any]] | None = None

    def add(self, index: int, status: NodeStatus, output: Any, error: Any) -> None:
        self._inputs = None
        name = self.run.graph.nodes[index].id
        self._nodes[name] = new_tuple(NodeValue, (name, status, output, error))

    def add_completed(self, indexes: Sequence[int], outputs: Sequence[bytes]) -> None:
        """Add these nodes, from what was stored of them; a join may have thousands of parents."""
        self._inputs = None
        nodes, known, completed = self.run.graph.nodes, self._nodes, NodeStatus.COMPLETED
        for index, output in zip(indexes, orjson.loads(b"[%b]" % b",".join(outputs)), strict=True):
            name = nodes[index].id
            known[name] = new_tuple(NodeValue, (name, completed, output, None))

    def get(self, name: str) -> Any:
        found = self._nodes.get(name)
        if found is not None:
            return found
        if name in self.run.graph.index:
            raise KeyError(name)
        return self.run.get(name)

    def leave_unread(self, indexes: Iterable[int]) -> None:
        nodes = self.run.graph.nodes
        self.unread.update(nodes[index].id for index in indexes)

    def inputs(self, index: int) -> dict[str, Any] | None:
        """Outputs of the completed parents by id: the very same for siblings. None if one of them
        was not read: together they are too large to travel."""
        names = self.run.graph.nodes
        parents = names[index].parents
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


class OutputCache:
    """Outputs that were just stored, for the nodes that are about to be published for them.

    No longer: Redis may lose what it had, and a node may have another output then.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, Any]] = {}

    def keep(self, run: RunState, moves: Sequence[Complete]) -> None:
        if len(self._runs) >= MAX_CACHED_OUTPUTS:  # of publishes that failed
            self._runs.clear()
        index = run.graph.index
        self._runs[run.id] = {index[move.node]: move.output for move in moves}

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def taken(self, run_id: str) -> Mapping[int, Any]:
        """Outputs by index. Whatever is missing is read."""
        return self._runs.pop(run_id, {})


class RedisScopes:
    """Reads the scopes of nodes that are about to be published."""

    def __init__(
        self, redis: PipelinedRedis, headers: RunHeaderCache, max_input_bytes: int = MAX_INPUT_BYTES
    ) -> None:
        self._redis = redis
        self._headers = headers
        self._outputs = RedisOutputs(redis)
        self.max_input_bytes = max_input_bytes
        """What one node may read."""
        self.just_written = OutputCache()

    async def read(self, orders: Mapping[str, Sequence[Dispatch]]) -> list[RedisTemplateScope]:
        """For these nodes of each run: their parents, and whatever their templates read.

        As far as that is not large: one request shall not fill the memory of an orchestrator. What
        a template reads and was left out is read for its node alone, see `only`; parents that were
        left out are read by a handler that asks for them.
        """
        made: list[RedisTemplateScope] = []
        commands: list[Command] = []
        missing: list[tuple[RedisTemplateScope, list[int]]] = []
        most = max(PART_BYTES // max(1, len(orders)), MIN_RUN_BYTES)
        for run_id, dispatches in orders.items():
            run = dispatches[0].run
            shape = self._headers.shape(run.graph)
            just_written = self.just_written.taken(run_id)
            scope = RedisTemplateScope(run)
            made.append(scope)
            lacking = []
            for need in {need for order in dispatches for need in shape.needs_of(order)}:
                if need in just_written:
                    scope.add(need, NodeStatus.COMPLETED, just_written[need], None)
                else:
                    lacking.append(need)
            if lacking:
                commands.append(self._reading(run_id, lacking, most))
                missing.append((scope, lacking))
        answers = await self._redis.call_many(commands)
        await self._add(
            missing, [_outputs(one[1], a) for one, a in zip(missing, answers, strict=True)]
        )
        return made

    def _reading(self, run_id: str, indexes: Sequence[int], most: int) -> Command:
        """Asks for the outputs of these; if they are many, for as many as fit into `most`."""
        if len(indexes) <= PLAIN_READ_OUTPUTS:
            return ("HMGET", f"wf:{{{run_id}}}:out", *indexes)
        return self._outputs.read_command(run_id, indexes, most, 0)

    async def only(self, run: RunState, names: Iterable[str]) -> RedisTemplateScope:
        """With these nodes alone, in parts. Raises `TooLarge` if a node may not read so much."""
        scope = RedisTemplateScope(run)
        index = run.graph.index
        indexes = {name: index[name] for name in names if name in index}
        sizes = await self.sizes(run, indexes)
        check_rendering(sizes, self.max_input_bytes)
        for part in parts(sizes):
            wanted = [indexes[name] for name in part]
            answer = await self._redis.call("HMGET", f"wf:{{{run.id}}}:out", *wanted)
            await self._add([(scope, wanted)], [answer])
        return scope

    async def sizes(self, run: RunState, indexes: Mapping[str, int]) -> dict[str, int]:
        """The bytes of these outputs, 0 for one that is not there."""
        own = f"wf:{{{run.id}}}:"
        wanted = [*indexes.values()]
        asked = [
            self._redis.script_command(
                source("input_sizes"), [own + "out"], wanted[at : at + MAX_OUTPUTS_PER_CALL]
            )
            for at in range(0, len(wanted), MAX_OUTPUTS_PER_CALL)
        ]
        answers = await self._redis.call_many(asked)
        found = dict(zip(indexes, (size for answer in answers for size in answer), strict=True))
        shape = self._headers.shape(run.graph)
        if maps := [name for name, size in found.items() if not size and shape.mapped]:
            maps = [name for name in maps if shape.is_mapped(indexes[name])]
            keys = ("nodes", "maps")
            asked = [("HGET", own + key, indexes[name]) for name in maps for key in keys]
            states = iter(await self._redis.call_many(asked))
            for name, state, counts in zip(maps, states, states, strict=False):
                if state is not None and state[:1] == b"C" and counts is not None:
                    found[name] = MapCounts.parse(counts).output_size
        return found

    async def mapped_output(self, run: RunState, index: int) -> bytes:
        """The output of a completed mapped node. Raises `StoreError` if it is gone."""
        found = await self._outputs.mapped_output(run.id, index)
        if found is None:
            name = run.graph.nodes[index].id
            raise StoreError(f"run {run.id}: the items of '{name}' are not there any more")
        return found

    async def of(
        self, run: RunState, indexes: list[int], *, behind: Sequence[Command]
    ) -> tuple[RedisTemplateScope, list[Any]]:
        """These nodes, read behind what is asked first, with the answers to that."""
        scope = RedisTemplateScope(run)
        reading: list[Command] = [self._reading(run.id, indexes, PART_BYTES)] if indexes else []
        answers = await self._redis.call_many([*behind, *reading])
        if indexes:
            await self._add([(scope, indexes)], [_outputs(indexes, answers[-1])])
        return scope, answers[: len(behind)]

    async def _add(
        self, missing: Sequence[tuple[RedisTemplateScope, list[int]]], answers: Sequence[Any]
    ) -> None:
        """Add nodes to scopes, from the replies to the commands that read their outputs."""
        doubtful: list[tuple[RedisTemplateScope, list[int]]] = []
        for (scope, indexes), answer in zip(missing, answers, strict=True):
            if len(answer) < len(indexes):  # as many as fitted
                scope.leave_unread(indexes[len(answer) :])
            known = [output for output in answer if output is not None]
            if len(known) == len(indexes):  # only a completed node has an output
                scope.add_completed(indexes, known)
                continue
            pairs = [*zip(indexes, answer, strict=False)]
            scope.add_completed([index for index, output in pairs if output is not None], known)
            if lacking := [index for index, output in pairs if output is None]:
                doubtful.append((scope, lacking))
        await self._look_closer(doubtful)

    async def _look_closer(self, doubtful: Sequence[tuple[RedisTemplateScope, list[int]]]) -> None:
        """Add nodes that had no output: they were skipped, or failed, or run again since a retry.
        The outputs last: one that completes in between has its output then."""
        commands: list[Command] = [
            ("HMGET", f"wf:{{{scope.run.id}}}:{part}", *indexes)
            for scope, indexes in doubtful
            for part in ("nodes", "ends", "out")
        ]
        answers = iter(await self._redis.call_many(commands))
        for scope, indexes in doubtful:
            states, ends, outputs = next(answers), next(answers), next(answers)
            found = nodes_of(scope.run.graph, indexes, states, outputs, ends)
            shape = self._headers.shape(scope.run.graph)
            for (index, node), stored in zip(found.items(), outputs, strict=True):
                output = None
                if node.status is NodeStatus.COMPLETED:
                    output = node.output
                    if stored is None and shape.is_mapped(index):
                        output = orjson.loads(await self.mapped_output(scope.run, index))
                scope.add(index, node.status, output, node.error)


def _outputs(indexes: Sequence[int], answer: Any) -> Sequence[bytes | None]:
    """Of the first of these indexes, from what `_reading` was answered."""
    found: Sequence[bytes | None] = answer if len(indexes) <= PLAIN_READ_OUTPUTS else answer[1]
    return found


class ConditionResults(NamedTuple):
    fields: Fields
    """As `settle.lua` takes them."""
    graph: bytes
    """The whole, if that has to come with them."""


class ConditionEvaluator:
    def __init__(self, redis: PipelinedRedis, headers: RunHeaderCache, scopes: RedisScopes) -> None:
        self._redis = redis
        self._headers = headers
        self._scopes = scopes

    async def results(self, header: RunHeader, ready: Sequence[int]) -> ConditionResults | None:
        """On what is pending in a run: `ready`, as far as is known. None if nothing is."""
        run, shape = header.run, header.shape
        own = f"wf:{{{run.id}}}:"
        while True:
            reads = {index: None for node in ready for index in shape.asks[node]}
            commands: list[Command] = [("HMGET", own + "meta", "status", "epoch", "pending")]
            if ready:
                commands.append(("HMGET", own + "deps", *ready))
            scope, replies = await self._scopes.of(run, [*reads], behind=commands)
            status, epoch, pending = replies[0]
            if status is None:  # dropped, or lost with Redis
                self._headers.forget(run.id)
            if not pending:
                return None
            named = orjson.loads(pending)["ready"]
            if {*named} <= {*ready}:
                break
            ready = named
        fed = _fed(header, ready, replies[1])
        results = {
            index: await self._evaluate(header, index, scope)
            for index in named
            if index in fed and run.graph.nodes[index].condition is not None
        }
        fields: Fields = {
            "epoch": int(epoch),
            "verdicts": {str(index): verdict for index, verdict in results.items()},
            "families": {},
        }
        if any(isinstance(verdict, str) for verdict in results.values()):
            return ConditionResults(fields, shape.whole)
        skipped = [index for index in named if index not in fed or results.get(index) is False]
        return ConditionResults(fields | {"families": shape.families(named, skipped)}, b"")

    async def _evaluate(
        self, header: RunHeader, index: int, scope: RedisTemplateScope
    ) -> bool | str:
        nodes = header.run.graph.nodes
        names = [nodes[asked].id for asked in header.shape.asks[index]]
        if scope.unread.isdisjoint(names):
            return _evaluate(header, index, scope)
        try:  # it names many, or large ones
            return _evaluate(header, index, await self._scopes.only(header.run, names))
        except TooLarge as problem:
            return _failed(nodes[index].id, problem)


def _fed(header: RunHeader, ready: Iterable[int], counts: Iterable[bytes | None]) -> set[int]:
    """Nodes that run if their condition says so: a parent completed, or they have none."""
    nodes = header.run.graph.nodes
    return {
        index
        for index, count in zip(ready, counts, strict=True)
        if not nodes[index].parents or int(count or 0) % UNIT
    }


def _evaluate(header: RunHeader, index: int, scope: Scope) -> bool | str:
    spec = header.run.graph.nodes[index]
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
