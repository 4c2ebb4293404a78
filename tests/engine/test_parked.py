"""Who waits for a rate limit moves up when those before it are gone, or the limit is another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from dovetail.core.events import Token
from dovetail.core.run import Phase
from dovetail.core.transitions import Park, Transition, Wake
from dovetail.engine.distributed.orchestrator import ParkedRescheduler
from dovetail.engine.limits import TokenBucket
from dovetail.engine.ports import ParkedNode

NOW = 1000.0
PARKED, PUBLISHED, HELD = Phase.PARKED, Phase.PUBLISHED, Phase.HELD


class Buckets(dict[str, TokenBucket]):
    async def look(self, tag: str, now: float) -> TokenBucket:
        copy = TokenBucket(self[tag].rate, self[tag].burst)
        copy.booked, copy.started = self[tag].booked, self[tag].started
        return copy

    async def pull_back(self, tag: str, until: float, now: float) -> None:
        self[tag].booked = min(self[tag].booked, until)


class ParkedNodes:
    """Nodes that wait for the tokens of buckets, and who keeps their lines."""

    def __init__(self, **buckets: TokenBucket) -> None:
        self.buckets = Buckets(buckets)
        self.waits: dict[str, ParkedNode] = {}
        self.found: dict[str, Phase | None] = {}
        self.moved_up: list[str] = []
        self.keeper = ParkedRescheduler(self, self, self.buckets, lambda: NOW, self._apply)

    def park(self, tag: str, *names: str) -> None:
        """Each is parked until the time that the bucket says."""
        for name in names:
            at = self.buckets[tag].book(NOW)
            self.waits[name] = ParkedNode(at, tag, Wake("r", name, Token(1, 1, 7)))
            self.found[name] = PARKED

    def times(self) -> dict[str, float]:
        return {name: wait.at - NOW for name, wait in self.waits.items()}

    async def _apply(self, moves: Sequence[Transition]) -> None:
        for move in moves:
            assert isinstance(move, Park)
            assert move.until == self.waits[move.node].at
            self.moved_up.append(move.node)

    async def add_parked(self, waits: Iterable[ParkedNode]) -> None:
        self.waits |= {wait.wake.node: wait for wait in waits}

    async def parked(self, now: float, soon: float) -> list[ParkedNode]:
        waits = sorted(self.waits.values())
        return waits if waits and waits[-1].at > now + soon else []

    async def remove_parked(self, waits: Iterable[ParkedNode]) -> None:
        for wait in waits:
            del self.waits[wait.wake.node]

    async def phases(self, starts: Sequence[tuple[str, str, Token]]) -> list[Phase | None]:
        return [self.found[node] for _, node, _ in starts]


def busy(rate: float, burst: int = 1) -> TokenBucket:
    """A bucket whose tokens were all taken just now."""
    bucket = TokenBucket(rate, burst)
    for _ in range(burst):
        assert bucket.start(NOW)
    return bucket


async def test_nodes_parked_behind_cancelled_ones_move_up_in_the_same_order() -> None:
    office = ParkedNodes(api=busy(1), other=busy(1))
    office.park("api", "a", "b", "c", "d", "e")
    office.park("other", "x", "y")
    office.found |= {"a": None, "b": None, "d": None}
    await office.keeper.look()
    assert office.times() == pytest.approx({"c": 1, "e": 2, "x": 1, "y": 2})
    assert office.moved_up == ["c", "e"]
    office.park("api", "f")
    assert office.times()["f"] == pytest.approx(3), "who comes next comes behind them"


async def test_nothing_is_left_of_a_queue_whose_nodes_are_gone() -> None:
    office = ParkedNodes(api=busy(5))
    names = [f"n{i}" for i in range(150)]
    office.park("api", *names)
    office.found = dict.fromkeys(names)
    await office.keeper.look()
    assert office.waits == {}
    office.park("api", "next")
    assert office.times() == pytest.approx({"next": 0.2})


async def test_a_correct_queue_of_parked_nodes_is_not_changed() -> None:
    office = ParkedNodes(api=busy(0.1, 3))
    office.park("api", "a", "b", "c", "d")
    before = office.times(), office.buckets["api"].booked
    for _ in range(3):
        await office.keeper.look()
    assert (office.times(), office.buckets["api"].booked) == before
    assert office.moved_up == []


async def test_a_raised_limit_applies_to_parked_nodes() -> None:
    office = ParkedNodes(api=busy(0.05))
    office.park("api", "a", "b", "c")
    office.buckets["api"].set(2, 1, NOW)
    await office.keeper.look()
    assert office.times() == pytest.approx({"a": 0.5, "b": 1.0, "c": 1.5})


async def test_no_parked_node_gets_a_later_time() -> None:
    office = ParkedNodes(api=busy(10))
    office.park("api", *(f"n{i}" for i in range(30)))
    before = office.times()
    office.buckets["api"].set(0.1, 1, NOW)
    await office.keeper.look()
    assert office.times() == before, "they are sent away when they come, and book again"


async def test_a_woken_node_without_a_token_comes_before_the_others() -> None:
    office = ParkedNodes(api=TokenBucket(0.1, 1))
    office.park("api", "woken", "next", "last")
    office.found["woken"] = PUBLISHED
    await office.keeper.look()
    assert office.moved_up == []
    office.found["woken"] = HELD  # by max_concurrency: for an unknown time
    await office.keeper.look()
    assert office.times() == pytest.approx({"next": 0, "last": 10})


async def test_a_small_gain_beside_a_long_wait_causes_no_event() -> None:
    office = ParkedNodes(api=busy(1))
    office.park("api", *(f"n{i}" for i in range(100)))
    office.found |= dict.fromkeys([f"n{i}" for i in range(5)])
    await office.keeper.look()
    assert office.moved_up == [f"n{i}" for i in range(5, 49)], "nodes that wait less than 50 s"


async def test_a_short_queue_of_parked_nodes_is_not_checked() -> None:
    office = ParkedNodes(api=busy(10))
    office.park("api", *(f"n{i}" for i in range(9)))
    office.found = dict.fromkeys(office.found)
    await office.keeper.look()
    assert len(office.waits) == 9
