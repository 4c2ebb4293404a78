"""Runs in Redis: the rules as scripts, one call per run and batch, safe to repeat.

Every key of a run has its hash tag, and every script touches one run, so a cluster will do. A
call may be executed twice (the client repeats what timed out): the token decides. Conditions are
templates and are not evaluated in Redis; a script leaves what became ready pending, and whoever
applied it asks the conditions and settles it. A crash in between leaves the run pending, which
`unsettled` finds.

What it must not know: how tasks travel, or what is archived.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

import orjson

from dovetail.core.errors import NotFound, TemplateError
from dovetail.core.events import Event
from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue
from dovetail.core.transitions import NOTHING, Complete, Decision, Submit, Transition
from dovetail.engine.ports import Cached
from dovetail.pipe import Pipe
from dovetail.stores.definitions import Definitions
from dovetail.stores.redis_moves import (
    Fields,
    Shape,
    decision_of,
    event_of,
    joined,
    nodes_of,
    request_of,
    run_of,
    time_text,
)

RULES = (
    "consequences",
    "submit",
    "claim",
    "renew",
    "complete",
    "recall",
    "fail",
    "reap",
    "take_over",
    "cancel",
    "retry",
    "park",
    "wake",
    "progress",
    "settle",
    "apply",
)
PARTS = ("meta", "nodes", "deps", "out", "ends", "events", "held")
POLL_SECONDS = 0.02
MOST_SHELLS = 4096


@cache
def script() -> str:
    """The files of `lua/` that make up the rules, joined in this order."""
    return "\n".join(map(_source, RULES))


@cache
def reading() -> str:
    return _source("load")


def _source(name: str) -> str:
    return resources.files("dovetail.stores").joinpath("lua", f"{name}.lua").read_text("utf-8")


def keys_of(run_id: str) -> list[str]:
    return [f"wf:{{{run_id}}}:{part}" for part in PARTS]


class _Shell:
    """What never changes of a run: its graph and params."""

    __slots__ = ("run", "shape")

    def __init__(self, run: RunState, shape: Shape) -> None:
        self.run = run
        self.shape = shape


class RedisStore:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._definitions = Definitions()
        self._shapes: dict[int, Shape] = {}
        self._shells: dict[str, _Shell] = {}

    # ── runs are made and moved ──────────────────────────────────────────────────────────

    async def create(self, submit: Submit, now: float) -> Decision:
        run = RunState(submit.run_id, submit.graph, submit.params, now, submit.version)
        shape = self._shape(submit.graph)
        stored = self._definitions.stored(submit.graph)
        await self._pipe.call("SET", f"wf:def:{stored.sha256}", stored.content, "NX")
        request = request_of(submit, shape, now, _nonce())
        assert request is not None  # noqa: S101
        request["meta"] = [
            *("workflow", submit.graph.name),
            *("version", "" if submit.version is None else str(submit.version)),
            *("definition", stored.sha256),
            *("retries", stored.retries.decode()),
            *("params", orjson.dumps(submit.params).decode()),
            *("created_at", time_text(now)),
            *("fail_fast", "1" if submit.graph.fail_fast else "0"),
            *("limit", str(submit.graph.max_concurrency or 0)),
            *("size", str(len(submit.graph.nodes))),
        ]
        shell = _Shell(run, shape)
        (decision,) = await self._step(submit.run_id, shell, [request])
        if decision:
            self._remember(submit.run_id, shell)
        return decision

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        decisions = [NOTHING] * len(moves)
        by_run: dict[str, list[int]] = {}
        for place, move in enumerate(moves):
            by_run.setdefault(move.run_id, []).append(place)
        await asyncio.gather(
            *(
                self._apply_to(run_id, moves, places, now, decisions)
                for run_id, places in by_run.items()
            )
        )
        await self._keep_outputs(moves, decisions, now)
        return decisions

    async def _apply_to(
        self,
        run_id: str,
        moves: Sequence[Transition],
        places: Sequence[int],
        now: float,
        decisions: list[Decision],
    ) -> None:
        shell = await self._shell(run_id)
        if shell is None:
            return
        sent, requests = [], []
        for place in places:
            request = request_of(moves[place], shell.shape, now, _nonce())
            if request is not None:
                sent.append(place)
                requests.append(request)
        if requests:
            for place, decision in zip(
                sent, await self._step(run_id, shell, requests), strict=True
            ):
                decisions[place] = decision

    async def _step(self, run_id: str, shell: _Shell, requests: Sequence[Fields]) -> list[Decision]:
        """All of these, in order; stops on the way to fetch what a rule asks for."""
        decisions: list[Decision] = []
        todo = list(requests)
        graph: bytes = b""
        while todo:
            go_on, why, seq, answers = await self._call(run_id, todo, graph)
            for answer in answers:
                decisions.append(decision_of(answer, shell.run, seq))
                seq += len(answer[1])
            if why == b"pending":
                decisions[-1] = joined(
                    decisions[-1], await self._settle(run_id, shell, todo[len(answers) - 1])
                )
            graph = shell.shape.whole if why == b"graph" else b""
            todo = todo[go_on - 1 :] if go_on else []
        return decisions

    async def _call(
        self, run_id: str, requests: Sequence[Fields], graph: bytes
    ) -> tuple[int, bytes, int, list[Any]]:
        body = orjson.dumps({"moves": requests})
        go_on, why, seq, answers = await self._pipe.script(script(), keys_of(run_id), [body, graph])
        return go_on, why, seq, answers

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        """Decide on conditions that somebody left undecided, if there are any."""
        cause = {"now": time_text(now), "nonce": str(_nonce())}
        return await self._settle(run_id, await self._known(run_id), cause)

    async def _settle(self, run_id: str, shell: _Shell, cause: Fields) -> Decision:
        """Ask the conditions of the nodes that became ready, until none is left to ask."""
        whole = NOTHING
        while True:
            run, pending = await self._load(run_id, shell)
            if not pending:
                return whole
            verdicts = {}
            for place in orjson.loads(pending)["ready"]:
                condition = run.graph.nodes[place].condition
                if condition is not None:
                    verdicts[str(place)] = _verdict(run, place)
            request = {
                "kind": "settle",
                "now": cause["now"],
                "nonce": cause["nonce"],
                "verdicts": verdicts,
            }
            _, _, seq, (answer,) = await self._call(run_id, [request], shell.shape.whole)
            whole = joined(whole, decision_of(answer, shell.run, seq))

    async def _keep_outputs(
        self, moves: Sequence[Transition], decisions: Sequence[Decision], now: float
    ) -> None:
        for move, decision in zip(moves, decisions, strict=True):
            if type(move) is Complete and move.cache and decision.changed:
                key, ttl = move.cache
                kept = orjson.dumps([now + ttl, move.output])
                life = max(1, int(ttl * 1000))
                await self._pipe.call("SET", f"wf:cache:{key}", kept, "PX", life)

    # ── runs are read ────────────────────────────────────────────────────────────────────

    async def load(self, run_id: str) -> RunState:
        run, _ = await self._load(run_id, await self._known(run_id))
        return run

    async def _load(self, run_id: str, shell: _Shell) -> tuple[RunState, bytes]:
        *hashes, seq = await self._pipe.script(reading(), keys_of(run_id)[:6], [])
        fields, nodes, counts, outputs, ends = map(_pairs, hashes)
        known = shell.run
        run = RunState(run_id, known.graph, known.params, known.created_at, known.version)
        return run_of(run, fields, nodes, counts, outputs, ends, seq), fields[b"pending"]

    async def wait(self, run_id: str) -> RunState:
        shell = await self._known(run_id)
        while True:
            if await self._is_finished(run_id):
                run, _ = await self._load(run_id, shell)
                if run.finished:
                    return run
            await asyncio.sleep(POLL_SECONDS)

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        shell = await self._known(run_id)
        events = keys_of(run_id)[5]
        while True:
            finished = await self._is_finished(run_id)
            texts = await self._pipe.call("LRANGE", events, after, -1)
            for text in texts:
                after += 1
                yield event_of(text, after, shell.run.graph)
            if finished and not texts:
                return
            if not texts:
                await asyncio.sleep(POLL_SECONDS)

    async def scene(self, run_id: str, places: Sequence[int]) -> RedisScene:
        """For rendering these nodes: their parents, and whatever their templates read."""
        shell = await self._known(run_id)
        graph = shell.run.graph
        wanted: dict[int, None] = {}
        for place in places:
            spec = graph.nodes[place]
            wanted.update(dict.fromkeys(spec.parents))
            wanted.update({graph.index[n]: None for n in spec.config.reads if n in graph.index})
        if not wanted:
            return RedisScene(shell.run, {})
        _, nodes, _, out, ends, *_ = keys_of(run_id)
        answers = await asyncio.gather(
            *(self._pipe.call("HMGET", key, *wanted) for key in (nodes, out, ends))
        )
        return RedisScene(shell.run, nodes_of(graph, wanted, *answers))

    async def _is_finished(self, run_id: str) -> bool:
        return bool(await self._pipe.call("HGET", keys_of(run_id)[0], "finished_at"))

    async def recall(self, key: str, now: float) -> Cached | None:
        kept = await self._pipe.call("GET", f"wf:cache:{key}")
        if kept is None:
            return None
        until, output = orjson.loads(kept)
        return Cached(output) if now < until else None

    # ── what never changes of a run ──────────────────────────────────────────────────────

    async def _known(self, run_id: str) -> _Shell:
        shell = await self._shell(run_id)
        if shell is None:
            raise NotFound(f"no run '{run_id}' in Redis")
        return shell

    async def _shell(self, run_id: str) -> _Shell | None:
        shell = self._shells.get(run_id)
        if shell is not None:
            return shell
        names = ("definition", "retries", "params", "created_at", "version")
        digest, retries, params, created_at, version = await self._pipe.call(
            "HMGET", keys_of(run_id)[0], *names
        )
        if digest is None:
            return None
        content = await self._pipe.call("GET", f"wf:def:{digest.decode()}")
        graph = self._definitions.graph(digest, retries, lambda: content)
        number = int(version) if version else None
        run = RunState(run_id, graph, orjson.loads(params), float(created_at), number)
        shell = _Shell(run, self._shape(graph))
        self._remember(run_id, shell)
        return shell

    def _remember(self, run_id: str, shell: _Shell) -> None:
        if len(self._shells) >= MOST_SHELLS:
            del self._shells[next(iter(self._shells))]
        self._shells[run_id] = shell

    def _shape(self, graph: Any) -> Shape:
        shape = self._shapes.get(id(graph))
        if shape is None:
            if len(self._shapes) >= MOST_SHELLS:
                self._shapes.clear()
            shape = self._shapes[id(graph)] = Shape(graph)
        return shape


class RedisScene:
    """Some nodes of a run, as they are: enough to render others."""

    __slots__ = ("_nodes", "_run")

    def __init__(self, run: RunState, nodes: dict[int, NodeState]) -> None:
        self._run = run
        self._nodes = nodes

    def get(self, name: str) -> Any:
        place = self._run.graph.index.get(name)
        if place is None:
            return self._run.get(name)
        node = self._nodes[place]
        return NodeValue(name, node.status, node.output, node.error)

    def inputs(self, place: int) -> dict[str, Any]:
        graph = self._run.graph
        return {
            graph.nodes[parent].id: self._nodes[parent].output
            for parent in graph.nodes[place].parents
            if self._nodes[parent].status is NodeStatus.COMPLETED
        }


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    """A hash, as Redis answers it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _verdict(run: RunState, place: int) -> bool | str:
    spec = run.graph.nodes[place]
    if spec.condition is None:
        return True
    try:
        return bool(spec.condition(run))
    except TemplateError as problem:
        message = f"node '{spec.id}': condition {problem}"
        return orjson.dumps({"type": problem.type, "message": message}).decode()


def _nonce() -> int:
    return int.from_bytes(os.urandom(6), "big") | 1
