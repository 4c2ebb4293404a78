"""Every store gives the answer that the core gives, transition by transition.

Random walks go through the store and through the bare rules side by side (`twins`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, note, settings

from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.run import Phase
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Expand,
    Fail,
    Retry,
    Transition,
    Wake,
)

from ..core.drawn import (
    KINDS,
    LEASE,
    LIMITS,
    TOKENS,
    WAITS,
    DrawnAction,
    deeds,
    error_of,
    examples,
    expanding,
    graphs,
    limits,
    output_of,
)
from ..core.invariants import startable
from ..core.walk import graph
from .stores import STORES, Peers, opened
from .twins import Twins, in_silence

MANY, LONG = 500, 30
PARTS = 4
"""So many tests share the walks: one alone would take longer than any other."""


@pytest.mark.parametrize("name", STORES)
def test_a_store_equals_the_core_for_any_transitions(name: str) -> None:
    with opened(name) as (runner, store):

        @examples(60 if name == "redis" else 250)  # the many below are Redis' own
        @given(graphs(maps=True), deeds, limits)
        def walk(graph: Graph, story: list[DrawnAction], max_bytes: int | None) -> None:
            runner.run(Twins([store], graph, note, max_bytes).walk(story))

        walk()


WIDE = {
    **{f"a{i}": [] for i in range(12)},
    **{f"b{i}": [f"a{i}", f"a{(i + 1) % 12}"] for i in range(12)},
    **{f"c{i}": [f"b{j}" for j in range(i, 12, 3)] for i in range(3)},
    "z": ["c0", "c1", "c2", "a0"],
}


@pytest.mark.parametrize("fields", [{}, {"max_concurrency": 5}, {"on_failure": "continue"}])
async def test_whole_layers_in_one_batch_equal_the_core(
    peers: Peers, fields: dict[str, Any]
) -> None:
    """As an orchestrator takes results in: many of one run at once, some of them twice."""
    retried = {name: {"max_retries": 1} for name in ("a1", "b2", "c1")}
    retried |= {name: {"allow_failure": True} for name in ("a3", "a4", "b5", "c2")}
    for seed in range(4):
        chance = Random(seed)
        twins = Twins(peers, graph(WIDE, **fields, **retried), in_silence)
        await twins.begin()
        fails = 0.0 if seed == 0 else 0.05
        while not twins.core.finished:
            moves: list[Transition] = []
            for spec, node in zip(twins.graph.nodes, twins.core.nodes, strict=True):
                start = (twins.id, spec.id, node.token)
                if node.phase is Phase.PUBLISHED:
                    moves.append(Claim(*start, "w", twins.now + LEASE))
                elif node.until is not None:
                    moves.append(Wake(*start))
                elif node.status is NodeStatus.RUNNING and chance.random() < fails:
                    moves.append(Fail(*start, error_of(spec.id)))
                elif node.status is NodeStatus.RUNNING:
                    moves.append(Complete(*start, output_of(twins.core, spec.id)))
            moves += chance.choices(moves, k=3)
            chance.shuffle(moves)
            await twins.together(moves, 20.0)
        await twins.end()


@pytest.mark.parametrize("fields", [{}, {"max_concurrency": 5}, {"on_failure": "continue"}])
@pytest.mark.parametrize("max_bytes", [None, 900])
async def test_many_items_in_one_batch_equal_the_core(
    peers: Peers, fields: dict[str, Any], max_bytes: int | None
) -> None:
    """As an orchestrator takes results of items in: many at once, some of them twice."""
    each = {"items": list(range(60)), "max_concurrency": 9, "max_failures": 3}
    more = {"m": {"for_each": each, "max_retries": 1}, "z": {"condition": "{{ m | length > 0 }}"}}
    for seed in range(3):
        chance = Random(seed)
        flow = graph({"a": [], "m": ["a"], "n": ["a"], "z": ["m", "n"]}, **fields, **more)
        twins = Twins(peers, flow, in_silence, max_bytes)
        await twins.begin()
        while not twins.core.finished:
            moves: list[Transition] = []
            for name, node in startable(twins.core):
                start = (twins.id, name, node.token)
                if node.phase is Phase.PUBLISHED:
                    moves.append(Claim(*start, "w", twins.now + LEASE))
                elif node.until is not None:
                    moves.append(Wake(*start))
                elif node.status is NodeStatus.RUNNING and chance.random() < 0.05 * seed:
                    moves.append(Fail(*start, error_of(name)))
                elif node.status is NodeStatus.RUNNING:
                    moves.append(Complete(*start, output_of(twins.core, name)))
            moves += [
                Expand(twins.id, name, twins.core.node(name).token, 60)
                for name in expanding(twins.core)
            ]
            results: list[Any] = [move for move in moves if isinstance(move, Complete)]
            if results and chance.random() < 0.7:
                moves = results  # alone, as they mostly come, and some with a token of their own
                one = chance.choice(results)
                moves.append(one._replace(token=one.token._replace(nonce=987_654)))
            moves += chance.choices(moves, k=2)
            chance.shuffle(moves)
            await twins.together(moves, 20.0)
        await twins.end()


async def test_two_retries_from_a_mapped_node_in_one_batch_equal_the_core(peers: Peers) -> None:
    each = {"items": [1, 2, 3], "max_concurrency": 2}
    twins = Twins(peers, graph({"m": []}, m={"for_each": each}), in_silence)
    await twins.begin()
    await twins.together([Expand(twins.id, "m", twins.core.node("m").token, 3)], 1.0)
    token = twins.core.node("m[0]").token
    await twins.together([Claim(twins.id, "m[0]", token, "w", twins.now + LEASE)], 1.0)
    await twins.together([Complete(twins.id, "m[0]", token, {"sum": 1}), Cancel(twins.id)], 1.0)
    again = Retry(twins.id, "m")
    await twins.together([again, Cancel(twins.id), again, Cancel(twins.id), again], 1.0)
    await twins.together([Expand(twins.id, "m", twins.core.node("m").token, 3)], 1.0)
    await twins.end()


@pytest.mark.parametrize("total", [0, 2, 5])
async def test_a_kept_list_that_has_another_length_equals_the_core(
    peers: Peers, total: int
) -> None:
    """A retry keeps the items, and another list is made: the old outputs count no longer."""
    each = {"items": [1, 2, 3], "max_concurrency": 2}
    twins = Twins(peers, graph({"m": []}, m={"for_each": each}), in_silence, max_bytes=100)
    await twins.begin()
    await twins.together([Expand(twins.id, "m", twins.core.node("m").token, 3)], 1.0)
    token = twins.core.node("m[0]").token
    await twins.together([Claim(twins.id, "m[0]", token, "w", twins.now + LEASE)], 1.0)
    await twins.together([Complete(twins.id, "m[0]", token, {"sum": 1}), Cancel(twins.id)], 1.0)
    await twins.together([Retry(twins.id)], 1.0)
    await twins.together([Expand(twins.id, "m", twins.core.node("m").token, total)], 1.0)
    assert (await twins.store.load(twins.id)).kept_bytes == 0
    await twins.end()


@pytest.mark.parametrize("others", [{}, {"other": []}])
async def test_records_that_a_rerun_leaves_behind_do_not_answer_for_the_items(
    peers: Peers, others: dict[str, list[str]]
) -> None:
    """Redis does not delete the records of items that begin anew, if it has those of others."""
    each = {"items": list(range(5)), "max_concurrency": 2}
    maps = {name: {"for_each": each} for name in ("m", *others)}
    twins = Twins(peers, graph({"m": [], **others}, **maps), in_silence)
    await twins.begin()

    async def expand_all() -> None:
        names = expanding(twins.core)
        moves = [Expand(twins.id, one, twins.core.node(one).token, 5) for one in names]
        await twins.together(moves, 1.0)

    async def complete(name: str) -> Token:
        token = twins.core.node(name).token
        await twins.together([Claim(twins.id, name, token, "w", twins.now + LEASE)], 1.0)
        await twins.together([Complete(twins.id, name, token, {"sum": 1})], 1.0)
        return token

    await expand_all()
    tokens = [await complete(f"m[{item}]") for item in range(4)]
    await twins.together([Cancel(twins.id)], 1.0)
    await twins.together([Retry(twins.id, "m")], 1.0)
    late = [Complete(twins.id, f"m[{item}]", token, {}) for item, token in enumerate(tokens)]
    await twins.together(late, 1.0)  # before the list is known again, and after
    await expand_all()
    await complete("m[0]")
    await twins.together(late, 1.0)
    await twins.together([Cancel(twins.id)], 1.0)
    await twins.end()


@cache
def stories() -> list[tuple[Graph, list[DrawnAction]]]:
    """Many long walks. Their deeds are not drawn by Hypothesis, which would take half the time."""
    found: list[tuple[Graph, list[DrawnAction]]] = []

    @settings(examples(MANY), phases=[Phases.generate])
    @given(graphs(maps=True))
    def drawn(graph: Graph) -> None:
        chance = Random(len(found))
        story = [
            DrawnAction(
                chance.randrange(len(KINDS)),
                chance.randrange(41),
                chance.randrange(len(TOKENS)),
                chance.choice(WAITS),
            )
            for _ in range(chance.randrange(LONG, LONG + 10))
        ]
        found.append((graph, story))

    drawn()
    return found


@pytest.mark.parametrize("part", range(PARTS))
async def test_hundreds_of_concurrent_random_walks_in_redis_equal_the_core(part: int) -> None:
    assert len(stories()) >= MANY or examples(MANY).max_examples < MANY
    drawn = stories()[part::PARTS]
    met: Counter[tuple[type, bool]] = Counter()
    heavy: list[bool] = []

    async def walk(number: int, graph: Graph, story: list[DrawnAction]) -> None:
        reported: list[str] = []
        most = LIMITS[number % len(LIMITS)]
        twins = Twins(peers[number % 4 :] + peers[: number % 4], graph, reported.append, most)
        try:
            await twins.walk(story)
        except BaseException as failure:
            reported.insert(0, f"walk {number}, {graph}")
            failure.add_note("\n".join(reported))
            raise
        met.update(twins.met)
        heavy.append(
            any(
                (event.data or {}).get("error", {}).get("type") == "too_large"
                for event in twins.log
            )
        )

    async with STORES["redis"](4) as peers, asyncio.TaskGroup() as group:
        for number, (graph, story) in enumerate(drawn):
            group.create_task(walk(number, graph, story))
    for kind in get_args(Transition):  # a walk that meets nothing proves nothing
        assert met[kind, True] >= 2, kind
        assert met[kind, False] >= 2, kind
    assert sum(heavy) >= 2
