"""Memory for large answers: no more than there is, and each caller in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api import outputs
from dovetail.api.outputs import CHUNK_BYTES, PART_BYTES, Hole, Part, streamed
from dovetail.api.service import Budget
from dovetail.core.outputs import OutputReference


@given(
    sizes=st.lists(st.integers(0, 30), max_size=12),
    order=st.randoms(use_true_random=False),
    leavers=st.sets(st.integers(0, 11)),
)
def test_the_byte_budget_is_never_exceeded_and_waiters_are_served_in_order(
    sizes: list[int], order: Any, leavers: set[int]
) -> None:
    async def work() -> None:
        budget = Budget(20)
        served: list[int] = []
        done = [asyncio.Event() for _ in sizes]

        async def take(nth: int) -> None:
            async with budget.taking(sizes[nth]):
                served.append(nth)
                assert budget.taken <= budget.most
                await done[nth].wait()

        tasks = [asyncio.create_task(take(nth)) for nth in range(len(sizes))]
        await asyncio.sleep(0)
        events = [(nth, "done") for nth in range(len(sizes))]
        events += [(nth, "left") for nth in leavers if nth < len(sizes)]
        order.shuffle(events)
        for nth, what in events:
            done[nth].set() if what == "done" else tasks[nth].cancel()
            for _ in range(4):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert served == sorted(served)
        assert {*range(len(sizes))} - leavers <= {*served}
        assert budget.taken == 0

    asyncio.run(work())


async def test_only_one_part_of_a_large_reply_is_in_memory() -> None:
    text = b'"%b"' % (b"x" * 300_000)
    parts: list[Part] = [b"["]
    for nth in range(40):
        parts += (b"," if nth else b"", Hole(OutputReference(len(text), nth), len(text), None))
    parts.append(b"]")
    budget = Budget(2 * PART_BYTES)
    asked: list[list[Any]] = []

    async def read(wanted: Sequence[OutputReference]) -> list[bytes]:
        assert sum(one.size for one in wanted) <= budget.taken <= PART_BYTES
        asked.append([one.where for one in wanted])
        return [text for _ in wanted]

    chunks = [chunk async for chunk in streamed(parts, read, budget)]
    assert max(map(len, chunks)) < 2 * CHUNK_BYTES
    assert orjson.loads(b"".join(chunks)) == ["x" * 300_000] * 40
    assert [where for some in asked for where in some] == list(range(40))
    assert budget.taken == 0


async def test_replies_to_clients_that_do_not_read_stay_within_the_byte_budget() -> None:
    budget = Budget(3 * PART_BYTES)
    held = 0

    async def read(wanted: Sequence[OutputReference]) -> list[bytes]:
        nonlocal held
        held += sum(one.size for one in wanted)
        return [b"0" * one.size for one in wanted]

    parts: list[Part] = [Hole(OutputReference(PART_BYTES, 0), PART_BYTES, None)] * 4
    answers = [streamed(list(parts), read, budget) for _ in range(20)]
    firsts = [asyncio.ensure_future(anext(answer)) for answer in answers]  # type: ignore[arg-type]
    for _ in range(50):
        await asyncio.sleep(0)
    assert held == 3 * PART_BYTES == budget.taken
    assert sum(first.done() for first in firsts) == 3
    for first in firsts:
        first.cancel()
    await asyncio.gather(*firsts, return_exceptions=True)
    for answer in answers:
        await answer.aclose()  # type: ignore[attr-defined]
    assert budget.taken == 0


async def test_one_output_larger_than_the_byte_budget_is_still_sent() -> None:
    size = 3 * outputs.PART_BYTES

    async def read(wanted: Sequence[OutputReference]) -> list[bytes]:
        return [b"0" * one.size for one in wanted]

    budget = Budget(outputs.PART_BYTES)
    sent = [
        chunk
        async for chunk in streamed([Hole(OutputReference(size, 0), size, None)], read, budget)
    ]
    assert sum(map(len, sent)) == size
