"""Outputs that a reader has no room for: every store says how large they are, and gives them."""

from __future__ import annotations

import random

import orjson
import pytest

from dovetail.core.errors import StoreError
from dovetail.core.outputs import ONLY_SIZES, OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.transitions import Claim, Complete, Retry
from dovetail.engine.ports import Store
from dovetail.stores.sqlite import store as sqlite

from ..core.walk import graph
from .stores import Peers, create

T = 1000.0
WIDE = graph({f"n{place}": [] for place in range(8)})
OUTPUTS = [None, 0, "", "n1", ["x" * 100] * 3, {"$output": "y" * 5000}, "é" * 70_000, "z" * 90_000]


async def completed(store: Store, outputs: list[object]) -> str:
    run_id, decision = await create(store, WIDE)
    for order, output in zip(decision.dispatch, outputs, strict=True):
        name = order.run.graph.nodes[order.node_index].id
        claim = Claim(run_id, name, order.token, "w", T + 10)
        done = Complete(run_id, name, order.token, output)
        await store.apply([claim, done], T, durable=True)
    return run_id


async def whole(store: Store, run: RunState) -> list[object]:
    """Every output; the ones that are not at hand in one go."""
    left_out = [one.output for one in run.nodes if isinstance(one.output, OutputReference)]
    texts = await store.read_outputs(run, left_out)
    assert [len(text) for text in texts] == [one.size for one in left_out]
    read = iter(texts)
    return [
        orjson.loads(next(read)) if isinstance(one.output, OutputReference) else one.output
        for one in run.nodes
    ]


@pytest.mark.parametrize("part_bytes", [1, 4 << 20])
async def test_an_output_beyond_the_read_budget_is_a_reference_that_can_be_read(
    peers: Peers, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PART_BYTES", part_bytes)
    chance = random.Random(part_bytes)
    run_id = await completed(peers[0], OUTPUTS)
    sizes = [len(orjson.dumps(output)) for output in OUTPUTS]
    for _ in range(30):
        room = ReadBudget(
            chance.choice([-1, 0, 10, 5100, 65536, 1 << 20]), chance.choice([0, 400, 1 << 20])
        )
        for store in peers[:2]:
            run = await store.load(run_id, room=room)
            assert await whole(store, run) == OUTPUTS
            here = [
                size
                for node, size in zip(run.nodes, sizes, strict=True)
                if not isinstance(node.output, OutputReference)
            ]
            if type(store).__name__ == "RedisStore":
                assert all(size <= room.each for size in here)
                assert sum(here) <= room.together
    run = await peers[1].load(run_id, outputs=False)
    assert not any(isinstance(node.output, OutputReference) for node in run.nodes)


async def test_a_run_from_another_process_is_read_without_outputs_beyond_the_budget(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PART_BYTES", 1)
    run_id = await completed(peers[0], OUTPUTS)
    run = await peers[1].load(run_id, room=ONLY_SIZES)
    held = [node.output for node in run.nodes]
    if type(peers[1]).__name__ == "MemoryStore":
        assert held == OUTPUTS  # they are in memory in any case
    else:
        assert all(isinstance(output, OutputReference) for output in held)


async def test_outputs_of_an_earlier_epoch_are_the_seen_ones_or_are_refused(
    peers: Peers,
) -> None:
    run_id = await completed(peers[0], OUTPUTS)
    run = await peers[1].load(run_id, room=ONLY_SIZES)
    epoch = run.epoch
    left_out = [node.output for node in run.nodes if isinstance(node.output, OutputReference)]
    (retried,) = await peers[0].apply([Retry(run_id, "n7")], T, durable=True)
    assert retried
    again = await peers[1].load(run_id, room=ONLY_SIZES)
    assert again.epoch == epoch + 1
    assert again.nodes[7].output is None
    (order,) = retried.dispatch
    claim = Claim(run_id, "n7", order.token, "w", T + 10)
    await peers[0].apply([claim, Complete(run_id, "n7", order.token, "other")], T, durable=True)
    if type(peers[1]).__name__ == "RedisStore":
        with pytest.raises(StoreError, match="epoch 1"):
            await peers[1].read_outputs(run, left_out)
    else:
        texts = await peers[1].read_outputs(run, left_out)
        assert [orjson.loads(text) for text in texts] == OUTPUTS[len(OUTPUTS) - len(texts) :]
