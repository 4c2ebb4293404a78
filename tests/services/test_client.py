"""`Dovetail("redis://…")`: the calls of the embedded engine, over services on Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail import Conflict, Dovetail, DovetailError, InvalidDefinition, NotFound, handler
from dovetail.client import REDIS_SCHEMES

from ..servers.server import free_port
from .service_processes import ServiceProcesses

SECONDS = 20.0

pytestmark = pytest.mark.parametrize("service_processes", ["redis"], indirect=True)


def flow(name: str, *nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "nodes": list(nodes or ({"id": "a", "handler": "input"},)), **fields}


def until(file: str) -> dict[str, Any]:
    return {"id": "a", "handler": "until", "config": {"file": file}}


async def test_the_methods_are_those_of_the_embedded_engine(
    service_processes: ServiceProcesses,
) -> None:
    async with Dovetail(service_processes.redis_url) as dt, asyncio.timeout(SECONDS):
        made = await dt.register(flow("calls"))
        assert (made.version, made.created) == (1, True)
        run = await dt.run("calls", {"x": 1}, timeout=SECONDS)
        assert (run.status, run.result, run.nodes["a"].output) == (
            *("COMPLETED", {"a": {"x": 1}}, {"x": 1}),
        )
        again = await dt.trigger("calls", {"x": 2}, idempotency_key="k")
        assert (await dt.trigger("calls", {"x": 2}, idempotency_key="k")).run_id == again.run_id
        assert (await dt.wait(again.run_id)).outputs == {"a": {"x": 2}}
        listed = await dt.list_runs(workflow="calls", limit=1)
        assert ([run.run_id for run in listed.items], bool(listed.next_cursor)) == (
            *([again.run_id], True),
        )
        events = [event async for event in dt.events(run.run_id, after=1)]
        assert (events[0].seq, events[-1].type) == (2, "run.completed")
        batch = await dt.batch("calls", [{"x": n} for n in range(5)])
        done = await dt.wait_batch(batch.batch_id)
        assert (done.counts, len(done.runs)) == ({"COMPLETED": 5}, 5)


async def test_a_run_is_followed_cancelled_and_retried(service_processes: ServiceProcesses) -> None:
    async with Dovetail(service_processes.redis_url) as dt, asyncio.timeout(SECONDS):
        run = await dt.trigger(flow("followed", until("followed")))
        with pytest.raises(TimeoutError, match="it goes on"):
            await dt.wait(run.run_id, timeout=0.1)
        types = []
        async for event in dt.events(run.run_id):
            types.append(event.type)
            if event.type == "node.started":
                await dt.cancel(run.run_id)
        assert types[-1] == "run.cancelled"
        with pytest.raises(Conflict, match="dovetail orchestrator"):
            await dt.resume(run.run_id)
        service_processes.touch("followed")
        assert (await dt.retry(run.run_id)).epoch == 2
        assert (await dt.wait(run.run_id)).status == "COMPLETED"


async def test_given_handlers_are_known_and_run_on_workers(
    service_processes: ServiceProcesses,
) -> None:
    @handler("mine_alone", max_retries=4)
    async def mine_alone(config: Any, ctx: Any) -> None:
        raise AssertionError("nothing runs here")

    async with (
        Dovetail(service_processes.redis_url, handlers=mine_alone) as dt,
        asyncio.timeout(SECONDS),
    ):
        run = await dt.trigger(flow("mine", {"id": "a", "handler": "mine_alone"}))
        await asyncio.sleep(0.2)
        assert (await dt.get_run(run.run_id)).nodes["a"].status == "QUEUED"
        assert (await dt.cancel(run.run_id)).status == "CANCELLED"
        with pytest.raises(InvalidDefinition, match="ghost"):
            await dt.trigger(flow("bad", {"id": "a", "handler": "ghost"}))
        with pytest.raises(NotFound):
            await dt.get_run("f" * 32)


async def test_a_waiting_call_on_redis_gets_an_error_when_the_client_closes(
    service_processes: ServiceProcesses,
) -> None:
    async with Dovetail(service_processes.redis_url) as dt:
        run = await dt.trigger(flow("left", {"id": "a", "handler": "sleep", "config": LONG}))
        waiting = asyncio.ensure_future(dt.wait(run.run_id))
        await asyncio.sleep(0.1)
    with pytest.raises(DovetailError, match="the block was left"):
        await asyncio.wait_for(waiting, SECONDS)
    async with Dovetail(service_processes.redis_url) as dt:
        await dt.cancel(run.run_id)


LONG = {"seconds": 60}


async def test_an_unreachable_redis_is_reported_without_its_password(
    service_processes: ServiceProcesses,
) -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"
    assert "hunter2" not in repr(Dovetail(url))
    with pytest.raises(DovetailError, match="Redis cannot be reached") as raised:
        async with Dovetail(url):
            raise AssertionError
    assert "hunter2" not in str(raised.value)


def test_the_environment_alone_does_not_select_redis(
    service_processes: ServiceProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_REDIS_URL", service_processes.redis_url)
    assert "dovetail.db" in repr(Dovetail())
    assert "path.db" in repr(Dovetail("path.db"))
    assert repr(Dovetail(redis_url=service_processes.redis_url)) == repr(
        Dovetail(service_processes.redis_url)
    )
    for scheme in REDIS_SCHEMES:
        host = "" if scheme == "unix" else "host"
        shown = repr(Dovetail(f"{scheme}://me:pw@{host}/1?client_name=hidden"))
        assert f"'{scheme}://{host}/1'" in shown
    with pytest.raises(TypeError, match="two places"):
        Dovetail(service_processes.redis_url, redis_url=service_processes.redis_url)
