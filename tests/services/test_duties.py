"""What an orchestrator does beside moving runs, and what it lives through."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import NotFound
from dovetail.core.transitions import Stop
from dovetail.engine.commands import Commands
from dovetail.engine.distributed import deletion, orchestrator, triggers
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.ports import RunQuery, Task
from dovetail.handlers.builtin import builtin_registry
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.store import RedisLeases
from dovetail.transports.streams.sender import RESULTS
from dovetail.wiring import distributed
from dovetail.wiring.distributed import commanding, orchestrate, working

from ..servers.redis_server import RedisServer

SECONDS = 20.0
FLOW = {"name": "f", "nodes": [{"id": "a", "handler": "input"}]}


@asynccontextmanager
async def beside(settings: Settings) -> AsyncIterator[asyncio.Task[None]]:
    orchestrating = asyncio.create_task(orchestrate(settings))
    try:
        yield orchestrating
    finally:
        orchestrating.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await orchestrating


@asynccontextmanager
async def everything(settings: Settings) -> AsyncIterator[Commands]:
    async with (
        commanding(settings) as commands,
        beside(settings),
        working(settings, builtin_registry(settings)),
        asyncio.timeout(SECONDS),
    ):
        yield commands


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duties that come round while one looks."""
    monkeypatch.setattr(distributed, "EXPIRE_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "RECOVER_SECONDS", 0.05)
    monkeypatch.setattr(triggers, "AGE_SECONDS", 0.05)


async def gone(commands: Commands, run_id: str) -> None:
    while True:
        try:
            await commands.get_run(run_id)
        except NotFound:
            return
        await asyncio.sleep(0.02)


@pytest.mark.usefixtures("impatient")
async def test_without_an_archive_old_runs_are_deleted_with_all_their_keys(
    redis_url: str,
) -> None:
    async with everything(Settings(redis_url=redis_url, retention_days=1e-6)) as commands:
        run_id = (await commands.trigger(FLOW, idempotency_key="k")).run_id
        await commands.wait(run_id)
        await gone(commands, run_id)
        while (await commands.list_runs())["items"]:
            await asyncio.sleep(0.02)
        again = await commands.trigger(FLOW, idempotency_key="k")
        assert again.created, "a key is kept as long as the run"


@pytest.mark.usefixtures("impatient")
async def test_orchestrators_delete_from_the_archive_what_is_older_than_its_retention(
    redis_url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "RETENTION_PAUSE_SECONDS", 0.05)
    settings = Settings(
        redis_url=redis_url, database_url=postgres_url, archive_retention_days=1 / 86400
    )
    async with everything(settings) as commands:
        run_id = (await commands.trigger(FLOW, idempotency_key="k")).run_id
        await commands.wait(run_id)
        await gone(commands, run_id)
        assert (await commands.list_runs(RunQuery(workflow="f")))["items"] == []
        assert (await commands.trigger(FLOW, idempotency_key="k")).created


@pytest.mark.usefixtures("impatient")
async def test_an_unavailable_store_ends_no_duty(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = RedisRecords.expire, 2

    async def expire(self: RedisRecords, *given: Any) -> int:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RedisError("Redis did not come back")
        return await real(self, *given)

    monkeypatch.setattr(RedisRecords, "expire", expire)
    with caplog.at_level(logging.WARNING, "dovetail"):
        async with everything(Settings(redis_url=redis_url, retention_days=1e-6)) as commands:
            run_id = (await commands.trigger(FLOW)).run_id
            await gone(commands, run_id)
    assert caplog.messages == ["retention: Redis did not come back; trying again"] * 2


@pytest.mark.parametrize("error", [RedisError("gone"), NotFound("no run 'x' in Redis")])
async def test_an_error_in_a_group_of_duties_is_logged_by_its_cause(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    async def wake(self: DistributedOrchestrator) -> None:
        if not caplog.messages:
            raise error
        woken.set()

    woken = asyncio.Event()
    monkeypatch.setattr(DistributedOrchestrator, "wake_due", wake)
    async with beside(Settings(redis_url=redis_url)), asyncio.timeout(SECONDS):
        await woken.wait()
    assert caplog.messages == [f"duties: {error}; trying again"]


async def test_a_bug_in_a_duty_ends_the_orchestrator(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep(self: DistributedOrchestrator) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(DistributedOrchestrator, "reap", sweep)
    async with beside(Settings(redis_url=redis_url)) as orchestrating, asyncio.timeout(SECONDS):
        with pytest.raises(BaseExceptionGroup) as raised:
            await orchestrating
    assert raised.value.subgroup(ZeroDivisionError) is not None


async def test_a_stopping_orchestrator_leaves_no_result_unapplied(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url)
    stopping = asyncio.Event()
    async with (
        commanding(settings) as commands,
        working(settings, builtin_registry(settings)),
        asyncio.timeout(SECONDS),
    ):
        orchestrating = asyncio.create_task(orchestrate(settings, stopping))
        pipe = commands.store._redis  # type: ignore[attr-defined]
        while not isinstance((await pipe.send([("XINFO", "GROUPS", RESULTS)]))[0], list):
            await asyncio.sleep(0.001)  # until it reads
        made = await commands.batch(FLOW, [{}] * 20)
        stopping.set()
        await orchestrating
        pending = await pipe.call("XPENDING", "wf:stream:results", "orchestrators")
        assert pending[0] == 0
        async with beside(settings):
            await commands.wait_batch(made["batch_id"])


async def test_a_crashed_worker_reports_its_error(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tasks(self: distributed.StreamInbox, limit: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(distributed.StreamInbox, "tasks", tasks)
    settings = Settings(redis_url=redis_url)
    with pytest.raises(ZeroDivisionError):
        async with working(settings, builtin_registry(settings)) as at_work:
            await asyncio.wait_for(at_work.crashed, SECONDS)


async def test_a_result_that_redis_lost_at_a_crash_is_sent_again() -> None:
    """It was answered before it was written, and then Redis died."""
    with RedisServer() as server:
        settings = Settings(redis_url=server.url)
        async with (
            PipelinedRedis(server.url) as pipe,
            commanding(settings) as commands,
            working(settings, builtin_registry(settings)),
            asyncio.timeout(settings.lease_seconds - 2.0),  # by then no worker is missed yet
        ):
            run_id = (await commands.trigger(FLOW)).run_id
            while not await pipe.call("XLEN", RESULTS):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # it is answered
            await pipe.call("DEL", RESULTS)
            await asyncio.to_thread(server.restart)
            async with beside(settings):
                run = await commands.wait(run_id)
    assert run.status == "COMPLETED"
    assert [node.attempt for node in run.nodes] == [1]


async def test_a_live_worker_is_not_lost_if_redis_was_down_for_longer_than_a_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orchestrator, "REAP_SECONDS", 0.05)  # sooner than anybody renews
    lease = 2.0  # so that a worker beside other tests renews it in time
    flow = {
        "name": "long",
        "nodes": [{"id": "a", "handler": "sleep", "config": {"seconds": 4 * lease}}],
    }
    with RedisServer() as server:
        settings = Settings(redis_url=server.url, lease_seconds=lease)
        async with everything(settings) as commands:
            made = await commands.trigger(flow)
            while (await commands.store.load(made.run_id)).node("a").status != "RUNNING":
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.2)  # it is in the log of Redis by now
            server.kill()
            await asyncio.sleep(1.5 * lease)
            server.start()
            run = await commands.store.wait(made.run_id)
            assert (run.status, run.node("a").attempt) == ("COMPLETED", 1)
    assert "broke; waiting for it" in caplog.text
    assert "answers again after a restart" in caplog.text


async def test_a_live_worker_is_not_lost_if_the_orchestrators_were_down_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renew = RedisLeases.renew

    async def slowly(leases: RedisLeases, tasks: Sequence[Task]) -> list[Stop]:
        await asyncio.sleep(0.3)  # so that the orchestrator looks first
        return await renew(leases, tasks)

    monkeypatch.setattr(RedisLeases, "renew", slowly)
    monkeypatch.setattr(orchestrator, "REAP_SECONDS", 0.05)
    with RedisServer() as server:
        settings = Settings(redis_url=server.url, lease_seconds=2.0)
        async with (
            commanding(settings) as commands,
            working(settings, builtin_registry(settings)),
            asyncio.timeout(SECONDS),
        ):
            config = {"seconds": 8.0}
            flow = {"name": "long", "nodes": [{"id": "a", "handler": "sleep", "config": config}]}
            async with beside(settings):
                made = await commands.trigger(flow)
                while (await commands.store.load(made.run_id)).node("a").status != "RUNNING":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1.2)  # it is in the log of Redis by now
            server.kill()
            await asyncio.sleep(3.0)
            server.start()
            async with beside(settings):
                run = await commands.store.wait(made.run_id)
            assert (run.status, run.node("a").attempt) == ("COMPLETED", 1)
