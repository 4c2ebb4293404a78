"""A Redis that answers and takes no writes, because its memory or its disk is full: as one that is
away, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import hiredis
import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import StoreError
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Claim, Complete, Progress, Submit
from dovetail.engine.distributed import orchestrator as shared
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.ports import Result
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Registry, describe
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.limits import RedisLimits
from dovetail.transports.messages import RESULTS, result_messages, stream_of
from dovetail.transports.streams.reader import StreamInbox
from dovetail.transports.streams.sender import WORKERS, StreamReader, StreamSender
from dovetail.wiring import distributed
from dovetail.wiring.distributed import ServiceParts, commanding, connected, orchestrate, working

from ..core.walk import graph
from ..servers.redis_server import RedisServer

SECONDS = 10.0
SOON = 4.0
"""A moment, on a busy machine; a result without a reader waits for half a minute."""
LITTLE_PATIENCE = 0.1
FLOW = graph({"a": [], "b": ["a"]})


class Refusing:
    """A Redis, and what makes it refuse."""

    def __init__(self, server: RedisServer, how: str) -> None:
        self._ask = server.ask
        self.url = server.url
        self.refusal, *self._begin, self._end = {
            "memory": ("OOM", ("maxmemory", "1"), ("maxmemory", "0")),
            "disk": (
                "MISCONF",
                ("stop-writes-on-bgsave-error", "yes"),
                ("stop-writes-on-bgsave-error", "no"),
            ),
        }[how]
        self.end()
        if how == "disk":  # a snapshot that cannot be written
            (server.folder / "dump.rdb" / "in the way").mkdir(parents=True)
            self._ask("CONFIG", "SET", "save", "3600 1000000")
            self._ask("BGSAVE")
            while "rdb_last_bgsave_status:err" not in self._ask("INFO", "persistence"):
                time.sleep(0.01)

    @property
    def beginning(self) -> tuple[str, ...]:
        """The command with which it begins."""
        return ("CONFIG", "SET", *self._begin[0])

    def begin(self) -> None:
        self._ask(*self.beginning)

    def end(self) -> None:
        self._ask("CONFIG", "SET", *self._end)


@pytest.fixture(params=["memory", "disk"])
def full(request: pytest.FixtureRequest) -> Iterator[Refusing]:
    with RedisServer() as server:  # its own: others would be refused, too
        yield Refusing(server, request.param)


@asynccontextmanager
async def orchestrating(settings: Settings) -> AsyncIterator[None]:
    task = asyncio.create_task(orchestrate(settings))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task


async def until_read(parts: ServiceParts) -> None:
    """An orchestrator reads results."""
    while not isinstance((await parts.pipe.send([("XINFO", "GROUPS", RESULTS)]))[0], list):
        await asyncio.sleep(0.01)


async def claimed(parts: ServiceParts, run_id: str, lease: float = 300.0) -> Complete:
    """A run whose first node is claimed, and the result of that."""
    await parts.orchestrator.submit(Submit(run_id, FLOW, {}))
    token = (await parts.store.load(run_id)).node("a").token
    now = parts.clock()
    await parts.orchestrator.timers.lease([run_id], now + lease)
    await parts.store.apply([Claim(run_id, "a", token, "w", now + lease)], now)
    return Complete(run_id, "a", token, 1)


async def followed(parts: ServiceParts, run_id: str) -> None:
    while (await parts.store.load(run_id)).node("b").status is NodeStatus.PENDING:
        await asyncio.sleep(0.05)


# ── the connection ───────────────────────────────────────────────────────────────────────


async def test_a_refused_command_is_sent_again_and_done_once(
    full: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    async with PipelinedRedis(full.url) as pipe, asyncio.timeout(SECONDS):
        full.begin()
        added = [("RPUSH", "l", n) for n in range(4)]
        asked = [
            asyncio.ensure_future(one)
            for one in (
                pipe.call("INCR", "called"),
                pipe.call_many([("INCR", "many"), ("GET", "many"), ("INCR", "many")]),
                pipe.transaction(added),
                pipe.call_script("return redis.call('INCR', KEYS[1])", ["scripted"], []),
            )
        ]
        pipe.enqueue([("INCR", "soon")])
        await asyncio.sleep(0.3)
        assert not any(one.done() for one in asked)
        full.end()
        called, (first, _, second), together, scripted = await asyncio.gather(*asked)
        assert (called, first, second, together, scripted) == (1, 1, 2, [1, 2, 3, 4], 1)
        while await pipe.call("GET", "soon") != b"1":
            await asyncio.sleep(0.01)
    (reported,) = caplog.messages  # once, and not by every caller that waits
    assert f"refuses what it is asked: {full.refusal} " in reported


async def test_a_script_is_refused_before_its_first_write_or_not_at_all(
    full: Refusing,
) -> None:
    """Else to ask it again would not be safe."""
    makes_first = "redis.call('SET', KEYS[1], 1) redis.call('DEL', KEYS[2])"
    takes_first = "redis.call('DEL', KEYS[2]) redis.call('SET', KEYS[1], 1)"
    async with PipelinedRedis(full.url, patience=LITTLE_PATIENCE) as pipe:
        for script in (makes_first, takes_first):
            await pipe.call("DEL", "made")
            await pipe.call("SET", "taken", 1)
            full.begin()
            try:
                await pipe.call_script(script, ["made", "taken"], [])
                done = True
            except RedisError:
                done = False
            full.end()
            there = await pipe.call("EXISTS", "made"), await pipe.call("EXISTS", "taken")
            assert there == ((1, 0) if done else (0, 1))


async def test_the_oom_error_of_a_redis_6_script_is_recognized(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = PipelinedRedis.send
    refusals = [
        "ERR Error running script (call to f_8f55): @user_script:41: @user_script: 41: "
        "-OOM command not allowed when used memory > 'maxmemory'."
    ]

    def answer(self: PipelinedRedis, commands: Any, **more: Any) -> Any:
        if commands[0][0] != "EVALSHA" or not refusals:
            return ask(self, commands, **more)
        reported = asyncio.get_running_loop().create_future()
        reported.set_result([hiredis.ReplyError(refusals.pop())])
        return reported

    async with PipelinedRedis(redis_url) as pipe:
        monkeypatch.setattr(PipelinedRedis, "send", answer)
        assert await pipe.call_script("return 7", [], []) == 7
    assert refusals == []


async def test_a_trigger_fails_quickly_and_creates_no_run_while_redis_refuses_writes(
    full: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "ASKING_SECONDS", LITTLE_PATIENCE)
    flow = {"name": "f", "nodes": [{"id": "a", "handler": "input"}]}
    async with commanding(Settings(redis_url=full.url)) as commands, asyncio.timeout(SECONDS):
        full.begin()
        with pytest.raises(StoreError, match=full.refusal):
            await commands.trigger(flow)
        assert (await commands.list_runs())["items"] == []
        full.end()
        made = await commands.trigger(flow)
        assert [one["run_id"] for one in (await commands.list_runs())["items"]] == [made.run_id]


# ── a worker ─────────────────────────────────────────────────────────────────────────────


async def chatty(config: dict[str, Any], ctx: Context) -> int:
    for step in range(20):
        ctx.progress(step / 20)
        await asyncio.sleep(0.1)
    return ctx.attempt


async def quiet(config: dict[str, Any], ctx: Context) -> int:
    await asyncio.sleep(config["seconds"])
    return ctx.attempt


async def test_a_worker_keeps_its_handlers_and_results_while_redis_refuses_writes(
    full: Refusing,
) -> None:
    nodes = [
        {"id": "chatty", "handler": "chatty"},
        {"id": "ends", "handler": "quiet", "config": {"seconds": 1.0}},
        {"id": "once", "handler": "quiet", "config": {"seconds": 3.0}, "delivery": "at_most_once"},
    ]
    flow = build_graph(Workflow.model_validate({"name": "w", "nodes": nodes}), {})
    registry = Registry()
    for fn in (chatty, quiet):
        registry.add(describe(fn, name=fn.__name__))
    settings = Settings(redis_url=full.url)
    async with (
        connected(settings) as parts,
        orchestrating(settings),
        working(settings, registry) as at_work,
        asyncio.timeout(SECONDS),
    ):
        await parts.orchestrator.submit(Submit("r", flow, {}))
        while len(at_work.holding()) < len(nodes):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        full.begin()
        await asyncio.sleep(1.5)
        full.end()
        run = await parts.store.wait("r")
        assert not at_work.crashed.done()
    assert run.status is RunStatus.COMPLETED
    assert [node.attempt for node in run.nodes] == [1, 1, 1]


async def test_results_are_delivered_after_redis_refused_writes_for_long(full: Refusing) -> None:
    """Redis refuses for longer than anybody waits for it."""
    async with (
        connected(Settings(redis_url=full.url), patience=LITTLE_PATIENCE) as parts,
        PipelinedRedis(full.url) as blocking,
        asyncio.timeout(SECONDS),
    ):
        done = await claimed(parts, "r")
        reader = StreamReader(blocking, parts.pipe, WORKERS, "w")
        task_source = QueueTaskSource(
            StreamInbox(reader, parts.pipe, ["h"]),
            parts.store,
            parts.orchestrator.timers,
            RedisLimits(parts.pipe),
            parts.clock,
            parts.orchestrator.apply,
            worker_id="w",
            lease_seconds=60.0,
        )
        full.begin()
        await task_source.slow("tag", parts.clock() + 60)
        await task_source.report([Progress("r", "a", done.token, 0.5, "half"), done])
        full.end()
        while not await parts.pipe.call("XLEN", RESULTS):
            await task_source.report([done])  # whatever comes next sees to what was sent before
            await asyncio.sleep(0.05)


# ── an orchestrator ──────────────────────────────────────────────────────────────────────


async def test_results_read_while_writes_were_refused_are_applied_soon(full: Refusing) -> None:
    settings = Settings(redis_url=full.url)
    async with connected(settings) as parts, orchestrating(settings), asyncio.timeout(SECONDS):
        done = await claimed(parts, "r")
        await until_read(parts)
        await parts.pipe.call_many(
            [("MULTI",), *result_messages([done]), full.beginning, ("EXEC",)]
        )
        await asyncio.sleep(1.0)
        full.end()
        async with asyncio.timeout(SOON):
            await followed(parts, "r")


@pytest.mark.parametrize("crash", ["before", "after"])
async def test_results_that_could_not_be_applied_are_applied_soon(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """Whatever the reason, and also if it was applied and nothing could follow."""
    apply_results, dispatch = (
        DistributedOrchestrator.apply_results,
        DistributedOrchestrator._dispatch,
    )
    failures = [RedisError("refused for long")] * 2
    monkeypatch.setattr(StreamSender, "sends_ahead", False)

    async def fail_first(
        self: DistributedOrchestrator, results: Sequence[Result], **more: Any
    ) -> bool:
        if failures and crash == "before":
            raise failures.pop()
        return await apply_results(self, results, **more)

    async def fail_to_follow(self: DistributedOrchestrator, *what: Any, **more: Any) -> None:
        if failures and crash == "after" and self is not parts.orchestrator:
            raise failures.pop()
        await dispatch(self, *what, **more)

    monkeypatch.setattr(DistributedOrchestrator, "apply_results", fail_first)
    settings = Settings(redis_url=redis_url)
    async with connected(settings) as parts, orchestrating(settings), asyncio.timeout(SECONDS):
        done = await claimed(parts, "r")
        await until_read(parts)
        monkeypatch.setattr(DistributedOrchestrator, "_dispatch", fail_to_follow)
        await parts.pipe.call_many(result_messages([done]))
        async with asyncio.timeout(SOON + 2):  # it fails twice
            await followed(parts, "r")
            while await parts.pipe.call("XLEN", stream_of("h")) < len(FLOW.nodes):
                await asyncio.sleep(0.05)
            while (await parts.pipe.call("XPENDING", RESULTS, "orchestrators"))[0]:
                await asyncio.sleep(0.05)
    assert failures == []


async def test_workers_get_a_moment_to_renew_when_writes_are_accepted_again(
    full: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not renew their leases, though all could be read."""
    now = 1000.0
    monkeypatch.setattr(shared, "monotonic", lambda: now)
    async with connected(Settings(redis_url=full.url)) as parts, asyncio.timeout(SECONDS):
        orchestrator = parts.orchestrator
        await orchestrator.reap()
        await claimed(parts, "r", lease=-1.0)
        full.begin()
        look = asyncio.create_task(orchestrator.reap())
        await asyncio.sleep(0.3)
        assert not look.done()
        now += orchestrator._lease_seconds
        full.end()
        await look
        assert (await parts.store.load("r")).node("a").crashes == 0
        for leases, lost in ((0.4, 0), (0.2, 1)):
            now += leases * orchestrator._lease_seconds
            await orchestrator.reap()
            assert (await parts.store.load("r")).node("a").crashes == lost


async def test_no_task_stream_is_taken_as_lost(full: Refusing) -> None:
    async with PipelinedRedis(full.url) as pipe:
        sender = StreamSender(pipe)
        sender._sent_to.add("h")
        await pipe.call("XGROUP", "CREATE", stream_of("h"), WORKERS, "0", "MKSTREAM")
        assert await sender.lost() == []
        full.begin()
        assert await sender.lost() == []
        full.end()
        assert await sender.lost() == []
        await pipe.call("DEL", stream_of("h"))
        assert await sender.lost() == ["h"]
