"""The replies to many callers agree with the log: no reply is lost, no event is replied twice.

Each caller does anything to the same runs at once, each time through another handle. Every event
that an answer names must stand in the log at its place, and the log must have no other. A store
that kept two pictures of a run would answer from one of them and write the other.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from dovetail.core.dag import Graph
from dovetail.core.events import Event, Token
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Park,
    Progress,
    Reap,
    Renew,
    Retry,
    Transition,
    Wake,
)

from ..core.invariants import check_run
from ..core.walk import BROKEN, MAX_CRASHES, graph
from .stores import Peers, create, read

T = 1000.0
SEEDS, RUNS, ACTORS, STEPS = 6, 6, 6, 30
NODES = {
    f"n{layer}_{i}": [f"n{layer - 1}_{i}", f"n{layer - 1}_{(i + 1) % 4}"] if layer else []
    for layer in range(4)
    for i in range(4)
}


class ConcurrentCallers:
    """The callers that move one run, and the replies that they got."""

    def __init__(
        self, peers: Peers, run_id: str, graph: Graph, begun: Decision, chance: random.Random
    ) -> None:
        self.peers, self.run_id, self.graph, self.chance = peers, run_id, graph, chance
        self.now = T
        self.starts: list[tuple[str, Token]] = []
        self.wakes: list[Wake] = []
        self.reported: list[Event] = []
        self._hear(begun)

    def _hear(self, decision: Decision) -> None:
        self.reported += decision.events
        self.starts += [
            (self.graph.nodes[one.node_index].id, one.token) for one in decision.dispatch
        ]
        self.wakes += [wake for _, wake in decision.wake]

    def _any_move(self) -> Transition:
        chance, run_id = self.chance, self.run_id
        if not self.starts or chance.random() < 0.03:
            name = chance.choice(self.graph.nodes).id
            return chance.choice([Cancel(run_id), Retry(run_id), Retry(run_id, name)])
        if self.wakes and chance.random() < 0.1:
            return chance.choice(self.wakes)
        lately = self.starts[-12:] if chance.random() < 0.9 else self.starts
        start = (run_id, *chance.choice(lately))
        until = self.now + chance.choice((0.0, 5.0))  # the first may be reaped at once
        often = [Claim(*start, f"w{chance.randrange(5)}", until), Complete(*start, 1)]
        seldom = [
            *(Fail(*start, BROKEN), Fail(*start, BROKEN, permanent=True)),
            *(Reap(*start, MAX_CRASHES), Park(*start, until)),
            *(Renew(*start, until), Progress(*start, 0.5, "half")),
        ]
        return chance.choice(often if chance.random() < 0.65 else seldom)

    async def act(self) -> None:
        for _ in range(STEPS):
            self.now += 0.01
            moves = [self._any_move() for _ in range(self.chance.choice((1, 1, 2)))]
            store = self.chance.choice(self.peers)
            for decision in await store.apply(moves, self.now, durable=True):
                self._hear(decision)
            for _ in range(self.chance.randrange(3)):
                await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_the_decisions_that_concurrent_callers_get_equal_the_log(
    peers: Peers, seed: int
) -> None:
    chance = random.Random(seed)
    mobs = []
    for number in range(RUNS):
        compiled = graph(
            NODES,
            on_failure=chance.choice(["continue", "fail_fast"]),
            max_concurrency=chance.choice([None, None, 3]),
            **{name: {"max_retries": 2} for name in list(NODES)[::3]},
        )
        run_id, begun = await create(peers[number % len(peers)], compiled)
        mobs.append(ConcurrentCallers(peers, run_id, compiled, begun, chance))
    await asyncio.wait_for(
        asyncio.gather(*(callers.act() for callers in mobs for _ in range(ACTORS))), 60
    )
    for callers in mobs:
        run = await peers[1].load(callers.run_id)
        check_run(run)
        log = await asyncio.wait_for(read(peers[0], callers.run_id, run.seq), 10)
        assert sorted(callers.reported, key=lambda event: event.seq) == log
