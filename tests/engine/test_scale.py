"""Large runs: ten thousand nodes in a row and beside each other, in reasonable time.

The limits are several times what a slow machine needs, in time of this process and not of the
clock: they catch a cost that grows with the run, not a slow day. Speed itself is measured in
`bench/`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit
from dovetail.handlers.calls import RegistryCalls
from dovetail.wiring.embedded import LocalEngine

from ..core.walk import graph
from .harness import registry_of

SIZE = 10_000


async def h(config: dict[str, Any], ctx: Any) -> int:
    return len(ctx.inputs)


async def run(compiled: Graph) -> tuple[RunState, float]:
    async with LocalEngine(RegistryCalls(registry_of(h)), concurrency=32) as engine:
        began = time.process_time()
        await engine.orchestrator.submit(Submit("r", compiled, {}))
        done = await engine.wait("r")
        return done, time.process_time() - began


def chain(size: int) -> Graph:
    return graph({f"n{i}": [f"n{i - 1}"] if i else [] for i in range(size)})


def fan(size: int) -> Graph:
    middle = [f"n{i}" for i in range(size - 2)]
    return graph({"a": [], **{name: ["a"] for name in middle}, "z": middle})


@pytest.mark.parametrize("shape", [chain, fan])
async def test_ten_thousand_nodes_run_in_seconds(shape: Any) -> None:
    done, took = await run(shape(SIZE))
    assert done.status == "COMPLETED"
    assert done.seq == 3 * SIZE + 3
    assert took < 10


@pytest.mark.parametrize("shape", [chain, fan])
async def test_a_node_of_a_large_run_costs_the_same_as_a_node_of_a_small_run(shape: Any) -> None:
    small, large = shape(1000), shape(SIZE)
    per_node = min([(await run(small))[1] for _ in range(5)]) / 1000
    large_per_node = min([(await run(large))[1] for _ in range(2)]) / SIZE
    assert large_per_node < 3 * per_node + 20e-6  # ten times, had each node looked at all of them


async def test_a_concurrency_limit_does_not_slow_a_large_fan_out() -> None:
    middle = [f"n{i}" for i in range(SIZE)]
    compiled = graph({"a": [], **{name: ["a"] for name in middle}}, max_concurrency=4)
    done, took = await run(compiled)
    assert done.status == "COMPLETED"
    assert took < 10


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
async def test_a_failure_above_ten_thousand_nodes_ends_the_run_immediately(policy: str) -> None:
    nodes = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(SIZE)}
    compiled = graph(nodes, on_failure=policy, n0={"config": {"x": "{{ params.missing }}"}})
    done, took = await run(compiled)
    assert done.status == "FAILED"
    assert took < 5
