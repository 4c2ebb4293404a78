"""Many at once: what one applies never gets in the way of another, and nothing happens twice.

That a store equals the core one transition after the other does not imply this. Each contestant
has a handle of its own on the store, as another process would, and believes a decision only once
it is durable.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import cycle

import pytest

from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Reap,
    Retry,
    Transition,
    Wake,
)
from dovetail.engine.ports import Store

from ..core.invariants import check_run
from ..core.walk import graph
from .stores import Peers, create, read

T = 1000.0
LAYERED = {
    f"n{layer}_{i}": [f"n{layer - 1}_{i}", f"n{layer - 1}_{(i + 1) % 6}"] if layer else []
    for layer in range(5)
    for i in range(6)
}
FAN = {"a": [], **{f"n{i}": ["a"] for i in range(20)}, "z": [f"n{i}" for i in range(20)]}


async def contest(peers: Peers, moves: list[Transition], now: float = T) -> list[Decision]:
    """Each of these moves at once, each through a handle of its own."""

    async def one(store: Store, move: Transition) -> Decision:
        await asyncio.sleep(0)
        (decision,) = await store.apply([move], now, durable=True)
        return decision

    return await asyncio.gather(
        *(one(store, move) for store, move in zip(cycle(peers), moves, strict=False))
    )


def won(decisions: list[Decision]) -> list[int]:
    return [place for place, decision in enumerate(decisions) if decision.changed]


async def test_of_many_claims_of_one_start_exactly_one_wins(peers: Peers) -> None:
    run_id, begun = await create(peers[0], graph({"a": []}))
    token = begun.dispatch[0].token
    claims = [Claim(run_id, "a", token, f"w{i}", T + 10) for i in range(16)]
    winners = won(await contest(peers, [*claims]))
    assert len(winners) == 1
    run = await peers[-1].load(run_id)
    assert run.node("a").worker == f"w{winners[0]}"
    assert run.node("a").attempt == 1


async def test_of_many_completions_exactly_one_counts_and_the_child_is_published_once(
    peers: Peers,
) -> None:
    run_id, begun = await create(peers[0], graph({"a": [], "b": ["a"]}))
    token = begun.dispatch[0].token
    await peers[0].apply([Claim(run_id, "a", token, "w", T + 10)], T, durable=True)
    results = [Complete(run_id, "a", token, output) for output in range(16)]
    decisions = await contest(peers, [*results])
    (winner,) = won(decisions)
    assert sum(len(decision.dispatch) for decision in decisions) == 1
    assert (await peers[-1].load(run_id)).node("a").output == winner


async def test_parents_that_finish_together_publish_the_join_once(peers: Peers) -> None:
    run_id, begun = await create(peers[0], graph({"a": [], "b": [], "c": [], "z": ["a", "b", "c"]}))
    tokens = dict(zip("abc", (order.token for order in begun.dispatch), strict=True))
    await contest(peers, [Claim(run_id, n, t, "w", T + 10) for n, t in tokens.items()])
    results = [Complete(run_id, name, tokens[name], None) for name in "abc" * 4]
    decisions = await contest(peers, [*results])
    assert len(won(decisions)) == 3
    assert [order.node_index for decision in decisions for order in decision.dispatch] == [3]


async def test_a_lost_node_is_reaped_once_and_its_late_result_changes_nothing(
    peers: Peers,
) -> None:
    run_id, begun = await create(peers[0], graph({"a": []}))
    token = begun.dispatch[0].token
    await peers[0].apply([Claim(run_id, "a", token, "w", T)], T, durable=True)
    moves: list[Transition] = [Reap(run_id, "a", token, 3)] * 8
    moves += [Complete(run_id, "a", token, "late")] * 8
    random.Random(1).shuffle(moves)
    decisions = await contest(peers, moves)
    assert len(won(decisions)) == 1, "either the reaper or the result, never both"
    run = await peers[-1].load(run_id)
    check_run(run)
    assert run.node("a").crashes <= 1


async def test_of_many_retries_exactly_one_opens_an_epoch(peers: Peers) -> None:
    run_id, _ = await create(peers[0], graph({"a": []}))
    assert len(won(await contest(peers, [Cancel(run_id)] * 8))) == 1
    decisions = await contest(peers, [Retry(run_id)] * 8)
    assert len(won(decisions)) == 1
    assert sum(len(decision.dispatch) for decision in decisions) == 1
    assert (await peers[-1].load(run_id)).epoch == 2


async def test_a_cancel_among_results_leaves_no_partial_state(peers: Peers) -> None:
    for seed in range(10):
        run_id, begun = await create(peers[0], graph(FAN))
        token = begun.dispatch[0].token
        _, done = await peers[0].apply(
            [Claim(run_id, "a", token, "w", T + 10), Complete(run_id, "a", token, 1)],
            T,
            durable=True,
        )
        orders = [(f"n{order.node_index - 1}", order.token) for order in done.dispatch]
        await contest(peers, [Claim(run_id, n, t, "w", T + 10) for n, t in orders])
        moves: list[Transition] = [Complete(run_id, n, t, 1) for n, t in orders]
        moves.append(Cancel(run_id))
        random.Random(seed).shuffle(moves)
        await contest(peers, moves)
        run = await peers[-1].load(run_id)
        check_run(run)
        assert run.status is RunStatus.CANCELLED
        assert run.finished


class RacingWorkers:
    """Workers that take every published node at once, each several times, and answer twice."""

    def __init__(self, peers: Peers, run_id: str, graph: Graph, seed: int) -> None:
        self.peers = peers
        self.run_id = run_id
        self.graph = graph
        self.chance = random.Random(seed)
        self.published: Counter[tuple[str, Token]] = Counter()
        self.won: Counter[str] = Counter()
        self.now = T

    async def work(self, begun: Decision, answer: Callable[[str, Token], Transition]) -> None:
        async with asyncio.TaskGroup() as group:
            self._send(begun, group, answer)

    def _send(
        self, decision: Decision, group: asyncio.TaskGroup, answer: Callable[..., Transition]
    ) -> None:
        for order in decision.dispatch:
            name = self.graph.nodes[order.node_index].id
            self.published[name, order.token] += 1
            for contestant in range(3):
                group.create_task(self._run(contestant, name, order.token, group, answer))
        for _, wake in decision.wake:
            for _ in range(2):
                group.create_task(self._wake(wake, group, answer))

    async def _run(
        self,
        contestant: int,
        name: str,
        token: Token,
        group: asyncio.TaskGroup,
        answer: Callable[..., Transition],
    ) -> None:
        store = self.chance.choice(self.peers)
        await self._dawdle()
        claim = Claim(self.run_id, name, token, f"w{contestant}", T + 1e6)
        (claimed,) = await store.apply([claim], self.now, durable=True)
        if not claimed.changed:
            return
        self.won[name] += 1
        await self._dawdle()
        for _ in range(2):
            (decision,) = await self.chance.choice(self.peers).apply(
                [answer(name, token)], self.now, durable=True
            )
            self._send(decision, group, answer)

    async def _wake(
        self, wake: Wake, group: asyncio.TaskGroup, answer: Callable[..., Transition]
    ) -> None:
        await self._dawdle()
        (decision,) = await self.chance.choice(self.peers).apply(
            [wake], self.now + 1e6, durable=True
        )
        self._send(decision, group, answer)

    async def _dawdle(self) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("nodes", [LAYERED, FAN], ids=["layered", "fan"])
async def test_many_workers_run_every_node_once(
    peers: Peers, nodes: dict[str, list[str]], limit: int | None
) -> None:
    for seed in range(5):
        compiled = graph(nodes, max_concurrency=limit)
        run_id, begun = await create(peers[0], compiled)
        crowd = RacingWorkers(peers, run_id, compiled, seed)
        await asyncio.wait_for(
            crowd.work(
                begun, lambda name, token, run_id=run_id: Complete(run_id, name, token, name)
            ),  # type: ignore[misc]
            30,
        )
        run = await asyncio.wait_for(peers[-1].wait(run_id), 10)
        check_run(run)
        assert run.status is RunStatus.COMPLETED
        assert {name: node.output for name, node in zip(nodes, run.nodes, strict=True)} == {
            name: name for name in nodes
        }
        assert set(crowd.published.values()) == {1}
        assert crowd.won == Counter(dict.fromkeys(nodes, 1))
        events = await read(peers[0], run_id, run.seq)
        assert [event.seq for event in events] == list(range(1, run.seq + 1))
        assert Counter(event.type for event in events)["node.completed"] == len(nodes)


async def test_many_workers_complete_every_node_once_even_if_each_fails_once(
    peers: Peers,
) -> None:
    compiled = graph(LAYERED, max_concurrency=4, **{name: {"max_retries": 1} for name in LAYERED})
    run_id, begun = await create(peers[0], compiled)
    crowd = RacingWorkers(peers, run_id, compiled, 7)

    def answer(name: str, token: Token) -> Transition:
        if token.attempt == 1:
            return Fail(run_id, name, token, {"type": "E", "message": "once"})
        return Complete(run_id, name, token, token.attempt)

    await asyncio.wait_for(crowd.work(begun, answer), 30)
    run = await asyncio.wait_for(peers[-1].wait(run_id), 10)
    check_run(run)
    assert {node.status for node in run.nodes} == {NodeStatus.COMPLETED}
    assert {node.output for node in run.nodes} == {2}
    assert crowd.won == Counter(dict.fromkeys(LAYERED, 2))


async def test_concurrent_runs_do_not_mix(peers: Peers) -> None:
    compiled = graph(FAN)

    async def whole(number: int) -> None:
        run_id, begun = await create(peers[number % len(peers)], compiled)
        crowd = RacingWorkers(peers, run_id, compiled, number)
        await crowd.work(begun, lambda name, token: Complete(run_id, name, token, number))
        run = await peers[0].wait(run_id)
        assert {node.output for node in run.nodes} == {number}

    runs: list[Awaitable[None]] = [whole(number) for number in range(8)]
    await asyncio.wait_for(asyncio.gather(*runs), 30)
