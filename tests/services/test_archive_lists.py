"""The archive of a mapped node that runs again with another list: nothing of the old list stays."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.items import PLACES
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Cancel, Complete, Expand, Retry

from .archive_world import World, graph, lose_everything

OLD = [1, 2, 3, 4, 5, 6]


def with_list() -> Any:
    """A mapped node whose list is the output of another node, unless that is 0."""
    each = {"items": "{{ list.of }}", "max_concurrency": 2}
    condition = "{{ list.of != 0 }}"
    return graph(
        {"list": {}, "each": {"dependencies": ["list"], "for_each": each, "condition": condition}}
    )


async def make_list(world: World, run_id: str, values: Any) -> None:
    await world.start(run_id, "list")
    token = (await world.load(run_id)).node("list").token
    await world.orchestrator.apply([Complete(run_id, "list", token, {"of": values})])


async def first_attempt(world: World) -> str:
    """A finished run with an archived list."""
    run_id = await world.begin(with_list())
    await make_list(world, run_id, OLD)
    await world.finish(run_id)
    await world.archiver.archive_what_moved()
    assert len(items_of((await world.archived(run_id))["nodes"])) == len(OLD)
    return run_id


def items_of(nodes: dict[int, str]) -> list[int]:
    return sorted(place % PLACES for place in nodes if place >= PLACES)


async def assert_same(world: World, run_id: str) -> RunState:
    """Redis and the archive have the same of the run."""
    hot = await world.load(run_id)
    await world.archive.load(run_id, outputs=False)
    kept = await world.archive.load(run_id)
    assert [node.snapshot() for node in kept.nodes] == [node.snapshot() for node in hot.nodes]
    archived = (await world.archived(run_id))["nodes"]
    items = hot.node("each").items
    begun = [] if items is None else [*items.in_flight, *items.ended]
    assert items_of(archived) == sorted(begun)
    return hot


@pytest.mark.parametrize("archived", ["before the list", "with the list", "before and with it"])
@pytest.mark.parametrize("values", [[7], [7, 8, 9], [], OLD, [*OLD, 7, 8], "text", 0], ids=str)
async def test_a_list_that_is_made_again_replaces_the_archived_one(
    world: World, values: Any, archived: str
) -> None:
    run_id = await first_attempt(world)
    await world.orchestrator.apply([Retry(run_id, "list")])
    if "before" in archived:
        await world.archiver.archive_what_moved()
        await assert_same(world, run_id)
    await make_list(world, run_id, values)
    await world.expand(run_id)
    if "with" in archived:
        await world.archiver.archive_what_moved()
        await assert_same(world, run_id)
    run = await world.load(run_id)
    if not run.finished:
        await world.start(run_id, "each[0]")
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        assert await world.restorer.restore() == 1
        run = await world.finish(run_id)
    await world.archiver.archive_what_moved()
    await assert_same(world, run_id)
    await world.assert_archived(run_id)
    status = {"text": NodeStatus.FAILED, "0": NodeStatus.SKIPPED}
    assert run.node("each").status is status.get(str(values), NodeStatus.COMPLETED)
    if isinstance(values, list):
        assert len(run.node("each").output) == len(values)


@pytest.mark.parametrize("total", [1, 4, 8])
async def test_a_kept_list_that_has_another_length_replaces_the_archived_one(
    world: World, total: int
) -> None:
    """A retry keeps a list that cannot change. If it does, its items begin anew when it is known:
    later than the retry, which may be archived by then."""
    submit = (await world.accept(with_list()))._replace(max_bytes=1000)
    await world.orchestrator.submit(submit)
    run_id = submit.run_id
    await make_list(world, run_id, OLD)
    await world.expand(run_id)
    await world.do(run_id, "each[0]", "each[1]", "each[2]")
    await world.orchestrator.apply([Cancel(run_id)])
    await world.orchestrator.apply([Retry(run_id)])
    await world.archiver.archive_what_moved()
    run = await assert_same(world, run_id)
    assert run.node("each").items is not None
    token = run.node("each").token
    await world.orchestrator.apply([Expand(run_id, "each", token, total)])
    await world.archiver.archive_what_moved()
    await assert_same(world, run_id)
