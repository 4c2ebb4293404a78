"""What a transport promises while nothing fails: each published node once, in order, to one taker.

Under a crash a transport may lose or double anything (the claim decides); that is for the fault
tests of transports that can crash.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from dovetail.core.events import Token
from dovetail.core.transitions import Dispatch, Stop

from ..core.walk import graph
from .transports import TRANSPORTS, TransportEnds, seen


@pytest.fixture(params=TRANSPORTS)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[TransportEnds]:
    async with TRANSPORTS[request.param]() as both:
        yield both


async def orders(ends: TransportEnds, count: int, run_id: str = "r") -> list[Dispatch]:
    """So many nodes to publish, as a run orders it."""
    return await ends.submit(run_id, graph({f"n{i}": [] for i in range(count)}))


async def take_all(
    ends: TransportEnds, count: int, limit: int = 100
) -> list[tuple[str, str, Token]]:
    taken: list[tuple[str, str, Token]] = []
    while len(taken) < count:
        taken += await asyncio.wait_for(ends.take(limit), 60)
    return taken


async def test_nodes_are_received_in_the_order_in_which_they_were_published(
    ends: TransportEnds,
) -> None:
    batch = await orders(ends, 20)
    await ends.transport.publish(batch[:7])
    await ends.transport.publish(batch[7:])
    assert await take_all(ends, 20) == [seen(order) for order in batch]


async def test_a_consumer_gets_at_most_the_requested_number_of_nodes(ends: TransportEnds) -> None:
    batch = await orders(ends, 10)
    await ends.transport.publish(batch)
    first = await ends.take(3)
    assert 1 <= len(first) <= 3
    rest = await take_all(ends, 10 - len(first), limit=2)
    assert first + rest == [seen(order) for order in batch]


async def test_a_consumer_waits_until_a_node_is_published(ends: TransportEnds) -> None:
    taking = asyncio.create_task(ends.take(5))
    await asyncio.sleep(0.01)
    assert not taking.done()
    await ends.transport.publish(await orders(ends, 1))
    assert len(await asyncio.wait_for(taking, 60)) == 1


async def test_publishing_nothing_wakes_no_consumer(ends: TransportEnds) -> None:
    taking = asyncio.create_task(ends.take(5))
    await ends.transport.publish([])
    await asyncio.sleep(0.01)
    assert not taking.done()
    await ends.transport.publish(await orders(ends, 1))
    assert len(await asyncio.wait_for(taking, 60)) == 1


async def test_no_two_consumers_get_the_same_node_and_no_node_is_lost(ends: TransportEnds) -> None:
    batch = await orders(ends, 300)
    chance = random.Random(3)
    taken: list[tuple[str, str, Token]] = []

    async def taker(limit: int) -> None:
        while True:
            taken.extend(await ends.take(limit))
            await asyncio.sleep(0)

    takers = [asyncio.create_task(taker(limit)) for limit in (1, 2, 5, 50)]
    rest = list(batch)
    while rest:
        size = chance.randrange(1, 20)
        await ends.transport.publish(rest[:size])
        del rest[:size]
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while len(taken) < len(batch):
            await asyncio.sleep(0.001)
    for task in takers:
        task.cancel()
    await asyncio.gather(*takers, return_exceptions=True)
    assert sorted(taken) == sorted(seen(order) for order in batch)


async def test_a_cancelled_consumer_loses_no_node(ends: TransportEnds) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ends.take(5), 0.01)
    batch = await orders(ends, 3)
    await ends.transport.publish(batch)
    assert await take_all(ends, 3) == [seen(order) for order in batch]


async def test_a_node_may_be_published_again(ends: TransportEnds) -> None:
    batch = await orders(ends, 1)
    for _ in range(3):
        await ends.transport.publish(batch)
        assert await take_all(ends, 1) == [seen(batch[0])]


async def test_nodes_of_several_runs_are_published_together(ends: TransportEnds) -> None:
    one, other = await orders(ends, 2, "one"), await orders(ends, 2, "other")
    await ends.transport.publish([*one, *other])
    assert [run_id for run_id, _, _ in await take_all(ends, 4)] == ["one", "one", "other", "other"]


async def test_a_stop_message_reaches_the_worker_with_its_token(ends: TransportEnds) -> None:
    stop = Stop("r", "n0", Token(1, 2, 3))
    await ends.transport.stop(stop)
    async with asyncio.timeout(60):
        while not ends.stopped:
            await asyncio.sleep(0.001)
    assert ends.stopped == [stop]
