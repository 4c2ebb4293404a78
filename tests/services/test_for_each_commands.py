"""Mapped nodes as users see them on Redis with PostgreSQL: pages of items, retries, forks, logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import NotFound
from dovetail.engine.commands import Commands
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.redis.codec import all_keys_of
from dovetail.wiring.distributed import commanding

from .service_processes import ServiceProcesses

pytestmark = pytest.mark.parametrize("service_processes", ["postgres"], indirect=True)


@pytest.fixture
async def commands(service_processes: ServiceProcesses) -> AsyncIterator[Commands]:
    found = service_processes
    settings = Settings(redis_url=found.redis_url, database_url=found.database_url)
    async with commanding(settings) as made:
        yield made


def flow(handler: str, config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    each = {"items": "{{ start.list }}", **fields.pop("each", {})}
    return {
        "name": "mapped",
        "nodes": [
            {"id": "start", "handler": "input"},
            {
                "id": "each",
                "handler": handler,
                "dependencies": ["start"],
                "for_each": each,
                "config": config,
                **fields,
            },
            {"id": "end", "handler": "output", "dependencies": ["each"]},
        ],
    }


async def run(commands: Commands, definition: dict[str, Any], params: dict[str, Any]) -> str:
    run_id = (await commands.trigger(definition, params)).run_id
    await asyncio.wait_for(commands.wait(run_id), 60)
    return run_id


async def all_items(commands: Commands, run_id: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await commands.node_items(run_id, "each", cursor=cursor, **query)
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def is_archived(commands: Commands, run_id: str, redis_url: str) -> None:
    """Wait until the archive has it, then take it out of Redis, as retention does."""
    async with PipelinedRedis(redis_url) as pipe, asyncio.timeout(30):
        while await pipe.call("ZSCORE", "wf:unarchived", run_id) is not None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.7)
        await pipe.call("UNLINK", *all_keys_of(run_id))
    commands.store._hot.forget(run_id)  # type: ignore[attr-defined]


async def test_a_page_of_items_is_the_same_from_redis_and_from_the_archive(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    definition = flow("greet", {"name": "{{ item.who }} {{ index }}"})
    people = {"list": [{"who": f"p{n}"} for n in range(120)]}
    run_id = await run(commands, definition, people)
    items = await all_items(commands, run_id)
    assert [item["index"] for item in items] == list(range(120))
    assert [item["output"] for item in items] == [f"hello p{n} {n}" for n in range(120)]
    assert {item["status"] for item in items} == {"COMPLETED"}
    assert {item["attempt"] for item in items} == {1}
    assert all(item["worker"] and item["started_at"] and item["finished_at"] for item in items)
    detail = await commands.get_run(run_id)
    (mapped,) = [node for node in detail["nodes"] if node["id"] == "each"]
    assert (mapped["status"], mapped["attempt"], mapped["worker"]) == ("COMPLETED", 1, None)
    assert mapped["items"]["completed"] == mapped["items"]["total"] == 120
    assert detail["result"] == {"each": [f"hello p{n} {n}" for n in range(120)]}
    await is_archived(commands, run_id, service_processes.redis_url)
    assert await all_items(commands, run_id) == items
    assert await commands.get_run(run_id) == detail
    assert await all_items(commands, run_id, status="FAILED") == []
    assert service_processes.database_url is not None
    async with PostgresPool(service_processes.database_url) as pool:
        names = (
            "SELECT node, item FROM dovetail.v_events WHERE run_id = $1 AND type = 'node.completed'"
        )
        rows = await pool.look(lambda connection: connection.fetch(names, run_id))
        found = sorted((row[0], -1 if row[1] is None else row[1]) for row in rows)
        items_of_each = [("each", n) for n in range(-1, 120)]
        assert found == [*items_of_each, ("end", -1), ("start", -1)]


async def test_a_retry_and_a_fork_rerun_only_what_failed(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    folder = service_processes.folder
    (folder / "there").touch()
    definition = flow("needs", {"file": "{{ item }}"}, each={"max_concurrency": 2})
    files = {"list": ["there", "there", "missing", "there", "there", "there"]}
    run_id = await run(commands, definition, files)
    detail = await commands.get_run(run_id)
    assert detail["status"] == "FAILED"
    assert detail["error"]["node"] == "each"
    assert detail["error"]["message"].startswith("item 2: there is no missing (1 of 6 items failed")
    items = await all_items(commands, run_id)
    statuses = [item["status"] for item in items]
    assert statuses[:3] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert statuses[-1] == "CANCELLED"
    assert items[2]["error"]["message"] == "there is no missing"
    (folder / "missing").touch()
    plan = {"rerun": ["each", "end"], "reuse": ["start"]}
    assert await commands.plan_retry(run_id) == await commands.plan_fork(run_id) == plan
    await commands.retry(run_id)
    await asyncio.wait_for(commands.wait(run_id), 60)
    again = await all_items(commands, run_id)
    assert [item["status"] for item in again] == ["COMPLETED"] * 6
    assert [again[0][name] for name in ("started_at", "worker")] == [
        items[0][name] for name in ("started_at", "worker")
    ]
    (folder / "missing").unlink()
    fork = (await commands.fork(run_id)).run_id
    await asyncio.wait_for(commands.wait(fork), 60)
    assert (await commands.get_run(fork))["status"] == "COMPLETED"
    events = await commands.events(run_id)
    assert {event["item"] for event in events if event["type"] == "node.failed" and "item" in event}


async def test_the_items_of_a_node_that_a_fork_reuses_are_listed(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    definition = flow("needs", {"file": "{{ item }}"}, each={"max_failures": 1})
    first = await run(commands, definition, {"list": ["mine.py", "gone", "mine.py"]})
    fork = (await commands.fork(first)).run_id
    await asyncio.wait_for(commands.wait(fork), 60)
    items = await all_items(commands, fork)
    ends = [(item["status"], item["attempt"], item["worker"], item["output"]) for item in items]
    assert ends == [("COMPLETED", 0, None, output) for output in ("found", None, "found")]
    assert items == await all_items(commands, fork, limit=1)
    detail = await commands.get_run(fork)
    (mapped,) = [node for node in detail["nodes"] if node["id"] == "each"]
    zeros = dict.fromkeys(("pending", "running", "failed", "cancelled"), 0)
    assert mapped["items"] == {"total": 3, "completed": 3, **zeros}
    assert mapped["output"] == ["found", None, "found"]
    _, third = await commands.with_output(fork, "each[2]")
    assert third.output == "found"
    assert await commands.verify(fork) == []
    await is_archived(commands, fork, service_processes.redis_url)
    assert await all_items(commands, fork) == items
    assert await commands.get_run(fork) == detail
    assert await commands.verify(fork) == []


async def test_no_retry_begins_with_an_item(commands: Commands) -> None:
    run_id = await run(commands, flow("greet", {"name": "{{ item }}"}), {"list": [1, 2]})
    for name in ("each[1]", "each[9]", "start[0]", "nothing"):
        with pytest.raises(NotFound, match="has no node"):
            await commands.retry(run_id, name)


async def test_allowed_failures_are_null_in_the_list(commands: Commands) -> None:
    definition = flow("needs", {"file": "{{ item }}"}, each={"max_failures": "50%"})
    run_id = await run(commands, definition, {"list": ["mine.py", "gone", "mine.py"]})
    detail = await commands.get_run(run_id)
    assert detail["status"] == "COMPLETED"
    assert detail["result"] == {"each": ["found", None, "found"]}
    failed = await all_items(commands, run_id, status="FAILED")
    assert [item["index"] for item in failed] == [1]


@pytest.mark.parametrize(
    ("params", "kind"), [({"list": "text"}, "not_a_list"), ({"list": [0] * 100_001}, "too_large")]
)
async def test_what_is_no_list_or_too_long_fails_the_node(
    commands: Commands, params: dict[str, Any], kind: str
) -> None:
    run_id = await run(commands, flow("greet", {}), params)
    detail = await commands.get_run(run_id)
    assert (detail["status"], detail["error"]["type"]) == ("FAILED", kind)


async def test_a_rate_limit_holds_for_items(commands: Commands) -> None:
    await commands.set_rate_limit("slow_items", 40, 1)
    definition = flow("greet", {}, resource_tag="slow_items", each={"max_concurrency": 10})
    run_id = await run(commands, definition, {"list": list(range(40))})
    items = await all_items(commands, run_id)
    times = sorted(item["started_at"] for item in items)
    assert len(items) == 40
    detail = await commands.get_run(run_id)
    assert detail["duration"] > 39 / 40 * 0.9, times


async def test_a_cached_item_is_not_started_again(commands: Commands) -> None:
    definition = flow("greet", {"name": "cached {{ item }}"}, cache={"ttl_seconds": 60})
    first = await run(commands, definition, {"list": [1, 2, 3]})
    second = await run(commands, definition, {"list": [3, 2, 4]})
    attempts = [item["attempt"] for item in await all_items(commands, second)]
    assert attempts == [0, 0, 1]
    assert (await commands.get_run(first))["status"] == "COMPLETED"


async def test_the_run_limit_counts_items(commands: Commands) -> None:
    definition = flow("greet", {"name": "{{ item }}"}) | {"max_concurrency": 3}
    run_id = await run(commands, definition, {"list": list(range(30))})
    assert (await commands.get_run(run_id))["status"] == "COMPLETED"
    events = await commands.events(run_id)
    running = most = 0
    for event in events:
        if "item" in event:
            running += {"node.started": 1, "node.completed": -1}.get(event["type"], 0)
        most = max(most, running)
    assert most <= 3
