"""Claims of nodes over many runs: take them, and see whether they are open or taken."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.events import Token
from dovetail.core.run import Phase
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.stores.redis.codec import held_of, node_of, source
from dovetail.stores.redis.fast_path import MAX_NODES_PER_CALL, claim_args, claimed_token
from dovetail.stores.redis.run_cache import RunHeaderCache

BATCH_SIZE = 64
"""Runs that are looked through in one go."""
Start = tuple[str, str, Token]


class Claims:
    def __init__(self, redis: PipelinedRedis, headers: RunHeaderCache) -> None:
        self._redis = redis
        self._headers = headers

    async def claim(
        self, tasks: Sequence[Task], worker: str, until: float, now: float
    ) -> list[bool]:
        """Which of these starts are this worker's now; see `Claim`."""
        by_run: dict[str, list[int]] = {}
        seen: set[Start] = set()
        for at, task in enumerate(tasks):
            start = (task.run_id, task.node_id, task.token)
            if start not in seen:  # a message that came twice
                seen.add(start)
                by_run.setdefault(task.run_id, []).append(at)
        same = claim_args(worker, until, now, again=True)
        claims = source("claim")
        commands: list[Command] = []
        asked: list[list[int]] = []
        last, token = None, ""
        for run_id, all_mine in by_run.items():
            keys = (_nodes_of(run_id), f"wf:{{{run_id}}}:events")
            for mine in _pieces(all_mine):
                known: list[int] = []
                args = [*same]
                for at in mine:
                    task = tasks[at]
                    place = await self._place(task) if task.place is None else task.place
                    if place is None:
                        continue
                    if task.token is not last:  # what became ready together has one
                        last, token = task.token, claimed_token(task.token)
                    args += (place, token)
                    known.append(at)
                if known:
                    commands.append(self._redis.script_command(claims, keys, args))
                    asked.append(known)
        granted = [False] * len(tasks)
        answers = await self._redis.call_many(commands, now=True)
        for mine, (_, *answer) in zip(asked, answers, strict=True):
            for at, flag in zip(mine, answer, strict=True):
                granted[at] = bool(flag)
        return granted

    async def offered(self, tasks: Sequence[Task]) -> list[bool]:
        """Which of these starts a worker may still claim."""
        seen: set[Start] = set()
        commands: list[Command] = []
        for task in tasks:
            place = await self._place(task)
            commands.append(("HGET", _nodes_of(task.run_id), -1 if place is None else place))
        found = []
        for task, state in zip(tasks, await self._redis.call_many(commands), strict=True):
            start = (task.run_id, task.node_id, task.token)
            node = None if state is None else node_of(state.decode())
            found.append(
                node is not None
                and node.phase is Phase.PUBLISHED
                and node.token == task.token
                and start not in seen
            )
            seen.add(start)
        return found

    async def phases(self, starts: Sequence[Start]) -> list[Phase | None]:
        """What these wait for; None of one that is no longer queued."""
        by_run: dict[str, list[int]] = {}
        for at, (run_id, _, _) in enumerate(starts):
            by_run.setdefault(run_id, []).append(at)
        found: list[Phase | None] = [None] * len(starts)
        run_ids = list(by_run)
        for first in range(0, len(run_ids), BATCH_SIZE):
            part = run_ids[first : first + BATCH_SIZE]
            await self._headers.look_for(part)
            asked: list[tuple[Command, list[int]]] = []
            for run_id in part:
                header = self._headers.get(run_id) or await self._headers.find(run_id)
                if header is None:  # it is gone, and all that waited in it
                    continue
                index = header.run.graph.index
                for some in _pieces(by_run[run_id]):
                    places = [index.get(starts[at][1], -1) for at in some]
                    asked.append((("HMGET", _nodes_of(run_id), *places), some))
            answers = await self._redis.call_many([command for command, _ in asked])
            for (_, some), states in zip(asked, answers, strict=True):
                for at, state in zip(some, states, strict=True):
                    node = None if state is None else node_of(state.decode())
                    if node is not None and node.token == starts[at][2]:
                        found[at] = node.phase
        return found

    async def running(self, run_ids: Sequence[str]) -> list[tuple[Start, float]]:
        """The running nodes of these runs, and the ends of their leases."""
        held: dict[str, list[tuple[int, Token, float]]] = {}
        for at in range(0, len(run_ids), BATCH_SIZE):  # a run may be large
            part = run_ids[at : at + BATCH_SIZE]
            asked: list[Command] = [("HGETALL", _nodes_of(run_id)) for run_id in part]
            for run_id, flat in zip(part, await self._redis.call_many(asked), strict=True):
                if own := held_of(flat):
                    held[run_id] = own
        await self._headers.look_for(held)
        found: list[tuple[Start, float]] = []
        for run_id, own in held.items():
            # One that had to make room for another of these is asked for again.
            header = self._headers.get(run_id) or await self._headers.find(run_id)
            if header is None:  # it was lost, or dropped, meanwhile
                continue
            nodes = header.run.graph.nodes
            found += [((run_id, nodes[place].id, token), until) for place, token, until in own]
        return found

    async def _place(self, task: Task) -> int | None:
        """Where the node is in its definition: the message says so, or the run does."""
        if task.place is not None:
            return task.place
        header = await self._headers.find(task.run_id)
        return None if header is None else header.run.graph.index.get(task.node_id)


def _nodes_of(run_id: str) -> str:
    return f"wf:{{{run_id}}}:nodes"


def _pieces(places: list[int]) -> list[list[int]]:
    if len(places) <= MAX_NODES_PER_CALL:
        return [places]
    return [
        places[at : at + MAX_NODES_PER_CALL] for at in range(0, len(places), MAX_NODES_PER_CALL)
    ]
