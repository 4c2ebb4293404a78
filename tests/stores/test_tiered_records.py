"""Lists and batches while the archive is behind: it has every run, and Redis what moved since."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import Conflict
from dovetail.engine.commands import Commands
from dovetail.engine.ports import RunQuery
from dovetail.stores import tiered
from dovetail.stores.redis.limits import RedisLimits
from dovetail.wiring import distributed
from dovetail.wiring.distributed import commanding, connected

from ..servers.redis_server import RedisServer

FLOW = {"name": "f", "nodes": [{"id": "a", "handler": "input"}]}


@pytest.fixture
def settings(redis_url: str, postgres_url: str) -> Settings:
    return Settings(redis_url=redis_url, database_url=postgres_url)


@pytest.fixture
async def commands(settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[Commands]:
    async with commanding(settings) as found:
        yield found


def flow(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each test has a workflow of its own: they share a database."""
    return {**FLOW, "name": request.node.name.replace("[", ".").rstrip("]")[:100]}


async def archive_all(settings: Settings) -> None:
    async with connected(settings) as parts:
        archive = parts.archive
        assert archive is not None
        while await parts.pipe.call("ZCARD", "wf:unarchived"):
            await archive.archiver.archive_what_moved()
            await asyncio.sleep(0.01)


async def listed(commands: Commands, **wanted: Any) -> list[str]:
    """Page by page, to the end."""
    found: list[str] = []
    cursor = None
    while True:
        page = await commands.list_runs(RunQuery(limit=2, cursor=cursor, **wanted))
        found += [run["run_id"] for run in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize("archived", ["never", "early", "always"])
async def test_runs_are_listed_with_their_current_status_however_far_the_archive_is(
    commands: Commands, settings: Settings, request: pytest.FixtureRequest, archived: str
) -> None:
    one = flow(request)
    ids = [(await commands.trigger(one, {"n": n})).run_id for n in range(7)]
    if archived != "never":
        await archive_all(settings)
    for run_id in ids[::2]:
        await commands.cancel(run_id)
    if archived == "always":
        await archive_all(settings)
    of = {"workflow": one["name"]}
    assert await listed(commands, **of) == ids[::-1]
    assert await listed(commands, **of, status="CANCELLED") == ids[::-2]
    assert await listed(commands, **of, status="RUNNING") == ids[-2::-2]
    assert await listed(commands, **of, status="PENDING") == []
    await commands.retry(ids[0])
    assert await listed(commands, **of, status="CANCELLED") == ids[:0:-2]
    assert await listed(commands, **of, status="RUNNING") == [*ids[-2::-2], ids[0]]
    (newest,) = (await commands.list_runs(RunQuery(**of, limit=1)))["items"]
    assert newest == await commands.get_run(ids[-1], nodes=False)


async def test_a_page_is_filled_even_if_many_runs_changed_without_a_queue_entry(
    commands: Commands, settings: Settings, request: pytest.FixtureRequest
) -> None:
    one = flow(request)
    ids = [(await commands.trigger(one, {"n": n})).run_id for n in range(8)]
    await archive_all(settings)
    for run_id in ids[2:]:
        await commands.cancel(run_id)
    await commands.store._redis.call("DEL", "wf:unarchived")  # type: ignore[attr-defined]
    assert await listed(commands, workflow=one["name"], status="RUNNING") == ids[1::-1]


@pytest.mark.parametrize("archived", ["never", "early", "always"])
async def test_a_batch_is_counted_with_current_statuses_however_far_the_archive_is(
    commands: Commands, settings: Settings, request: pytest.FixtureRequest, archived: str
) -> None:
    batch_id = (await commands.batch(flow(request), [{"n": n} for n in range(4)]))["batch_id"]
    if archived != "never":
        await archive_all(settings)
    batch = await commands.get_batch(batch_id)
    assert (batch["counts"], batch["finished_at"]) == ({"RUNNING": 4}, None)
    first, *rest = [run["run_id"] for run in batch["runs"]]
    await commands.cancel(first)
    if archived == "always":
        await archive_all(settings)
    batch = await commands.get_batch(batch_id, limit=2)
    assert batch["counts"] == {"RUNNING": 3, "CANCELLED": 1}
    assert [run["status"] for run in batch["runs"]] == ["CANCELLED", "RUNNING"]
    assert batch["next_cursor"] == "2"
    for run_id in rest:
        await commands.cancel(run_id)
    batch = await commands.get_batch(batch_id)
    assert batch["counts"] == {"CANCELLED": 4}
    last = (await commands.get_run(rest[-1], nodes=False))["finished_at"]
    assert batch["finished_at"] == last
    await commands.retry(first)
    batch = await commands.get_batch(batch_id)
    assert (batch["counts"], batch["finished_at"]) == ({"CANCELLED": 3, "RUNNING": 1}, None)


async def test_a_run_that_redis_lost_is_shown_from_the_archive(
    commands: Commands, settings: Settings, request: pytest.FixtureRequest
) -> None:
    one = flow(request)
    ended, open_ = [(await commands.trigger(one)).run_id for _ in range(2)]
    await commands.cancel(ended)
    await archive_all(settings)
    await commands.store._redis.call("FLUSHDB")  # type: ignore[attr-defined]
    assert await listed(commands, workflow=one["name"], status="CANCELLED") == [ended]
    assert await listed(commands, workflow=one["name"], status="RUNNING") == [open_]
    assert (await commands.get_run(open_))["nodes"][0]["status"] == "QUEUED"


async def test_a_workflow_can_be_deleted_once_its_last_end_is_archived(
    commands: Commands,
    settings: Settings,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def not_now(_: object) -> None: ...

    monkeypatch.setattr(commands.store._archive, "keep", not_now)  # type: ignore[attr-defined]
    one = flow(request)
    await commands.register(one)
    run_id = (await commands.trigger(one["name"])).run_id
    with pytest.raises(Conflict, match="1 run not finished yet"):
        await commands.delete_workflow(one["name"])
    await commands.cancel(run_id)
    deleting = asyncio.create_task(commands.delete_workflow(one["name"]))
    await asyncio.sleep(0.1)
    assert not deleting.done(), "it waits for the archive"
    await archive_all(settings)
    await deleting
    await commands.register(one)
    await commands.cancel((await commands.trigger(one["name"])).run_id)
    monkeypatch.setattr(tiered, "ARCHIVED_SECONDS", 0.1)
    with pytest.raises(Conflict):  # no archiver runs
        await commands.delete_workflow(one["name"])


async def test_a_rate_limit_is_stored_durably_and_applies_immediately(
    commands: Commands, settings: Settings
) -> None:
    await commands.set_rate_limit("both", 3, 4)
    async with connected(settings) as parts:
        assert (await RedisLimits(parts.pipe).all())["both"] == (3.0, 4)
        await parts.pipe.call("FLUSHDB")
        assert (await commands.rate_limit("both"))["burst"] == 4


async def test_a_trigger_succeeds_even_if_redis_dies_after_the_run_is_stored(
    postgres_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "ASKING_SECONDS", 0.3)
    one = flow(request)
    with RedisServer() as redis:
        settings = Settings(redis_url=redis.url, database_url=postgres_url)
        async with commanding(settings) as commands, asyncio.timeout(20):
            checked = commands.validate(one)
            await commands.trigger(checked)
            redis.kill()
            accepted = await commands.trigger(checked, {"n": 1}, idempotency_key="k")
            receipt = await commands.receipt(accepted.run_id)
            assert (accepted.created, receipt["status"]) == (True, "PENDING")
            assert (receipt["workflow"], receipt["version"]) == (one["name"], None)
            again = await commands.trigger(checked, {"n": 1}, idempotency_key="k")
            assert again[:2] == (accepted.run_id, False)
            redis.start()
            assert (await commands.get_run(accepted.run_id))["status"] == "PENDING"
