"""All services on a Redis have one transport: a service with another is refused with a message."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import Settings
from dovetail.core.errors import StoreError
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.doctor import reach
from dovetail.stores.redis.workers import (
    SERVICES,
    AnnouncedService,
    OtherTransport,
    ServiceRegistry,
    announced,
    conflict,
    mixture,
)
from dovetail.wiring.distributed import commanding, orchestrate
from dovetail.wiring.health import await_redis

from ..celery_crew import environment

SCRIPT = str(Path(sys.executable).parent / "dovetail")
FLOW = {"name": "f", "nodes": [{"id": "a", "handler": "input"}]}
CELERY = AnnouncedService("celery", "worker", "host-1")


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as pipe:
        await pipe.call("DEL", SERVICES)
        yield pipe
        await pipe.call("DEL", SERVICES)


some = st.lists(
    st.builds(
        AnnouncedService,
        st.sampled_from(["streams", "celery"]),
        st.sampled_from(["api", "orchestrator", "worker"]),
        st.uuids().map(str),
    )
)


@given(alive=some, mine=st.sampled_from(["streams", "celery"]))
def test_only_a_live_service_with_another_transport_is_a_conflict(
    alive: list[AnnouncedService], mine: str
) -> None:
    others = {one.transport for one in alive} - {mine}
    refused = conflict(mine, alive)
    assert (refused is not None) == bool(others)
    if refused is not None:
        assert "streams" in refused
        assert "celery" in refused
        assert f"DOVETAIL_TRANSPORT={others.pop()}" in refused
    assert (mixture(alive) is not None) == (len({one.transport for one in alive}) == 2)


async def test_a_service_with_another_transport_cannot_join_while_the_first_is_alive(
    pipe: PipelinedRedis,
) -> None:
    services = ServiceRegistry(pipe)
    await services.join(CELERY)
    await services.join(CELERY._replace(service_id="host-2"))
    late = AnnouncedService("streams", "orchestrator", "host-3")
    with pytest.raises(OtherTransport, match=r"celery \(2 workers\).*this one has streams"):
        await services.join(late)
    assert len(await services.alive()) == 2, "it has left nothing"
    for number in (1, 2):
        await services.leave(CELERY._replace(service_id=f"host-{number}"))
    await services.join(late)


async def test_a_silent_service_is_no_conflict(pipe: PipelinedRedis) -> None:
    await ServiceRegistry(pipe, heartbeat_timeout=0.05).join(CELERY)
    async with asyncio.timeout(10):
        while await ServiceRegistry(pipe).alive():
            await asyncio.sleep(0.01)
    await ServiceRegistry(pipe).join(AnnouncedService("streams", "api", "x"))


async def test_a_service_is_registered_while_it_works_and_again_after_redis_was_emptied(
    pipe: PipelinedRedis,
) -> None:
    async with asyncio.timeout(20), announced(pipe, CELERY, heartbeat_timeout=15, pause=0.02):
        assert await ServiceRegistry(pipe).alive() == [CELERY]
        await pipe.call("DEL", SERVICES)
        while await ServiceRegistry(pipe).alive() != [CELERY]:
            await asyncio.sleep(0.01)
    assert await ServiceRegistry(pipe).alive() == []


async def test_an_orchestrator_an_api_server_and_a_start_are_refused(
    pipe: PipelinedRedis, redis_url: str
) -> None:
    await ServiceRegistry(pipe).join(CELERY)
    streams = Settings(redis_url=redis_url)
    with pytest.raises(OtherTransport):
        await await_redis(streams, print)
    with pytest.raises(OtherTransport):
        await orchestrate(streams)
    with pytest.raises(OtherTransport):
        async with commanding(streams, kind="api"):
            pass


async def test_a_client_with_another_transport_may_read_but_not_trigger(
    pipe: PipelinedRedis, redis_url: str
) -> None:
    streams = Settings(redis_url=redis_url)
    async with commanding(streams) as commands:
        run = await commands.trigger(FLOW)
    await ServiceRegistry(pipe).join(CELERY)
    async with commanding(streams) as commands:
        (why,) = (await commands.explain(run.run_id))["nodes"]
        assert "the transport celery" in why["why"]
        with pytest.raises(StoreError, match="transport celery"):
            await commands.trigger(FLOW)
        await commands.cancel(run.run_id)
        with pytest.raises(StoreError, match="transport celery"):
            await commands.retry(run.run_id)


async def test_the_doctor_reports_mixed_transports(pipe: PipelinedRedis, redis_url: str) -> None:
    async def found() -> tuple[bool, str]:
        (only,) = [f for f in await reach(Settings(redis_url=redis_url)) if f.check == "transport"]
        return only.ok, only.message

    assert await found() == (True, "streams")
    await ServiceRegistry(pipe).join(CELERY)
    ok, reported = await found()
    assert not ok
    assert "transport celery (1 worker)" in reported
    await ServiceRegistry(pipe).beat(AnnouncedService("streams", "orchestrator", "x"))
    ok, reported = await found()
    assert not ok
    assert "celery (1 worker) and streams (1 orchestrator)" in reported


@pytest.mark.parametrize(
    ("words", "transport"),
    [
        (("orchestrator",), "celery"),
        (("worker",), "celery"),
        (("serve", "--port", "0"), "celery"),
        (("worker",), "streams"),
    ],
)
async def test_a_refused_process_exits_with_1_and_names_both_transports(
    pipe: PipelinedRedis, redis_url: str, tmp_path: Path, words: tuple[str, ...], transport: str
) -> None:
    other = "streams" if transport == "celery" else "celery"
    await ServiceRegistry(pipe).join(AnnouncedService(other, "orchestrator", "host-9"))
    done = await asyncio.to_thread(
        subprocess.run,
        [SCRIPT, *words],
        cwd=tmp_path,
        env=environment(DOVETAIL_REDIS_URL=redis_url, DOVETAIL_TRANSPORT=transport),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (
        f"have the transport {other} (1 orchestrator), and this one has {transport}" in done.stderr
    )
    assert "Traceback" not in done.stderr
