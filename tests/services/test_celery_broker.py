"""The orchestrators' end of Celery: messages as Celery makes them, and none that stays lost.

No worker runs here unless a test says so: what is sent lies in the broker, to be looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings, SettingsError
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Token
from dovetail.core.transitions import Submit
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import RedisError, RedisUnreachable
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.transports.celery import counts
from dovetail.transports.celery.application import GRACE_SECONDS, QUEUE, TASK, make_app
from dovetail.transports.celery.sender import (
    CelerySender,
    Envelopes,
    RedisBroker,
    examine,
    redis_message,
)
from dovetail.wiring.distributed import ServiceParts, commanding, connected, orchestrate
from dovetail.wiring.embedded import broker_findings

from ..celery_crew import celery_worker
from ..servers.redis_server import RedisServer
from ..servers.server import free_port

TASK_OF_A_RUN = Task(
    "run", "node", Token(1, 2, 3), "h", {"x": "ü"}, {}, {"a": 1}, 12.5, "tag", place=4
)


def celery(url: str, **given: Any) -> Settings:
    return Settings(redis_url=url, transport="celery", **given)


def submission(run_id: str, count: int = 1, **fields: Any) -> Submit:
    nodes = [{"id": f"n{i}", "handler": "plain", **fields} for i in range(count)]
    workflow = Workflow.model_validate({"name": "t", "nodes": nodes})
    return Submit(run_id, build_graph(workflow, {}), {})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ampq://u:hunter2@h", "No such transport: ampq. Did you mean amqp?"),
        ("amqp://u:hunter2@[::1", "no URL of a broker"),
        ("amqp://u:hunter2@h:99999", "no URL of a broker"),
    ],
)
async def test_a_broker_that_celery_cannot_use_is_refused_at_the_start_without_its_password(
    redis_url: str, url: str, said: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        async with connected(celery(redis_url, broker_url=url)):
            pass
    assert str(raised.value) == (
        f"DOVETAIL_BROKER_URL (value not shown): {said} "
        "(as in amqp://user:password@host:5672// or redis://host:6379/0)"
    )


async def waiting(parts: ServiceParts) -> list[dict[str, Any]]:
    """Oldest first."""
    return [orjson.loads(one) for one in await parts.pipe.call("LRANGE", QUEUE, 0, -1)][::-1]


@pytest.fixture
async def parts(redis_url: str) -> AsyncIterator[ServiceParts]:
    async with connected(celery(redis_url)) as parts:
        yield parts


@asynccontextmanager
async def led(settings: Settings) -> AsyncIterator[ServiceParts]:
    async with connected(settings) as parts:
        leading = asyncio.create_task(orchestrate(settings))
        yield parts
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


# ── messages ─────────────────────────────────────────────────────────────────────────────


async def test_a_message_equals_one_that_celery_sends_itself(
    parts: ServiceParts, redis_url: str
) -> None:
    app = make_app(celery(redis_url))
    with app.connection_for_write() as connection, connection.Producer() as producer:
        app.send_task(TASK, kwargs={}, producer=producer, queue=QUEUE, ignore_result=True)
    (theirs,) = await waiting(parts)
    ours = orjson.loads(redis_message(Envelopes(app).made([TASK_OF_A_RUN])[0]))
    for part in ("headers", "properties"):
        assert ours.pop(part).keys() == theirs.pop(part).keys()
    assert ours.pop("body") != theirs.pop("body")
    assert ours == theirs


async def test_a_message_has_the_fields_of_its_task_and_its_limits(redis_url: str) -> None:
    (message,) = Envelopes(make_app(celery(redis_url))).made([TASK_OF_A_RUN])
    args, fields, _ = orjson.loads(message.body)
    assert args == []
    assert fields == {
        "run_id": "run",
        "node_id": "node",
        "token": str(Token(1, 2, 3)),
        "handler": "h",
        "config": '{"x":"ü"}',
        "inputs": '{"a":1}',
        "timeout_seconds": "12.5",
        "place": "4",
        "resource_tag": "tag",
    }
    assert message.headers["timelimit"] == [12.5 + GRACE_SECONDS, 12.5]
    assert message.headers["task"] == TASK
    assert message.id.startswith("run:node:1.2:")


async def test_each_message_has_its_own_name(redis_url: str) -> None:
    """Else one that was revoked would be thrown away however often it is published again."""
    made = Envelopes(make_app(celery(redis_url))).made([TASK_OF_A_RUN] * 50)
    assert len({message.id for message in made}) == 50


async def test_the_roots_of_a_batch_are_one_celery_group(parts: ServiceParts) -> None:
    await parts.orchestrator.submit_many([submission(f"r{i}") for i in range(20)])
    headers = [message["headers"] for message in await waiting(parts)]
    assert len(headers) == 20
    (group_id,) = {one["group"] for one in headers}
    assert group_id is not None
    assert sorted(one["group_index"] for one in headers) == list(range(20))
    assert {one["timelimit"][1] for one in headers} == {300}


async def test_nodes_of_one_run_are_not_a_group(parts: ServiceParts) -> None:
    await parts.orchestrator.submit(submission("r", 3))
    assert [message["headers"]["group"] for message in await waiting(parts)] == [None] * 3


# ── what is lost is missed, and a backlog is not ─────────────────────────────────────────


@asynccontextmanager
async def sender_of(parts: ServiceParts, url: str) -> AsyncIterator[CelerySender]:
    app = make_app(celery(url))

    async def service_processes() -> int:
        return 4

    async with CelerySender(
        app, RedisBroker(url, parts.pipe), parts.pipe, service_processes
    ) as sender:
        yield sender


async def test_a_queue_that_was_emptied_is_noticed_once(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        await sender.send([TASK_OF_A_RUN] * 7)
        assert [await sender.lost() for _ in range(4)] == [[]] * 4
        await parts.pipe.call("DEL", QUEUE)
        assert [await sender.lost() for _ in range(6)] == [[], [], [QUEUE], [], [], []]


async def test_a_loss_is_noticed_even_if_other_messages_wait(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        await sender.send([TASK_OF_A_RUN] * 7)
        await parts.pipe.call("DEL", QUEUE)
        await sender.send([TASK_OF_A_RUN] * 2)
        assert [await sender.lost() for _ in range(5)] == [[], [], ["h"], [], []]


async def test_a_few_messages_that_workers_might_hold_are_checked_later_and_rarely(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        for looks in ([[], [], [], ["h"], []], [[]] * 8):
            await sender.send([TASK_OF_A_RUN] * 4)
            await parts.pipe.call("RPOP", QUEUE, 3)
            assert [await sender.lost() for _ in looks] == looks


async def test_a_long_backlog_is_not_duplicated_for_a_few_missing_messages(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        await sender.send([TASK_OF_A_RUN] * 200)
        await parts.pipe.call("RPOP", QUEUE, 6)
        assert [await sender.lost() for _ in range(8)] == [[]] * 8


async def test_messages_that_workers_took_do_not_count_as_lost(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        await sender.send([TASK_OF_A_RUN] * 3)
        await parts.pipe.call("DEL", QUEUE)
        for _ in range(3):
            await parts.pipe.call_many(counts.taken("h"))
        assert [await sender.lost() for _ in range(5)] == [[]] * 5
        assert await counts.waiting(parts.pipe) == {}


async def test_duplicate_messages_hide_no_later_loss(parts: ServiceParts, redis_url: str) -> None:
    async with sender_of(parts, redis_url) as sender:
        for _ in range(5):
            await parts.pipe.call_many(counts.taken("h"))
        assert await sender.lost() == []
        await sender.send([TASK_OF_A_RUN])
        await parts.pipe.call("DEL", QUEUE)
        assert [await sender.lost() for _ in range(3)] == [[], [], [QUEUE]]


async def test_the_time_of_the_oldest_waiting_message_follows_from_its_position(
    parts: ServiceParts, redis_url: str
) -> None:
    async with sender_of(parts, redis_url) as sender:
        assert await sender.oldest_waiting("h") is None
        for sent, at in ((0, 100.0), (5, 200.0), (9, 300.0)):
            await counts.mark(parts.pipe, sent, at)
        await sender.send([TASK_OF_A_RUN] * 9)
        for taken, oldest in ((0, 100.0), (4, 100.0), (1, 200.0), (3, 200.0)):
            if taken:
                await parts.pipe.call("RPOP", QUEUE, taken)
            sender._seen_at = float("-inf")
            assert await sender.oldest_waiting("h") == oldest


async def test_a_long_backlog_is_not_sent_again(redis_url: str) -> None:
    """Runs that wait in it do not move for longer than a lease, and nothing of them is lost."""
    settings = celery(redis_url, lease_seconds=0.2)
    async with connected(settings) as parts:
        await parts.orchestrator.submit_many([submission(f"r{i}", 5) for i in range(10)])
        now = parts.clock()
        for at in range(5):
            await parts.sender.lost()  # type: ignore[attr-defined]
            for run_id, since in await parts.orchestrator.timers.idle(now + 3600, 100):
                await parts.orchestrator.reconcile_run(run_id, since, {})
            assert len(await waiting(parts)) == 50, f"look {at}"


async def test_a_queue_that_was_emptied_is_published_again_while_its_run_moves(
    redis_url: str, tmp_path: Path
) -> None:
    """One node runs all the time, so that it cannot be said that the run is silent."""
    settings = celery(redis_url, lease_seconds=2)
    async with led(settings) as parts:
        nodes = [{"id": f"n{i}", "handler": "plain"} for i in range(10)]
        nodes[0]["config"] = {"seconds": 30}  # type: ignore[assignment]
        workflow = Workflow.model_validate({"name": "t", "nodes": nodes})
        await parts.orchestrator.submit(Submit("r", build_graph(workflow, {}), {}))
        while len(await waiting(parts)) < 10:
            await asyncio.sleep(0.01)
        await parts.pipe.call("LTRIM", QUEUE, -1, -1)  # all but the first are lost
        with celery_worker(tmp_path, redis_url, DOVETAIL_LEASE_SECONDS="2"):
            async with asyncio.timeout(40):
                while True:
                    run = await parts.store.load("r")
                    if sum(node.status.value == "COMPLETED" for node in run.nodes) == 9:
                        break
                    await asyncio.sleep(0.05)


async def test_messages_that_the_broker_cannot_take_are_kept_until_it_can(redis_url: str) -> None:
    with RedisServer() as broker:
        async with AsyncExitStack() as stack:
            settings = celery(redis_url, broker_url=broker.url)
            parts = await stack.enter_async_context(connected(settings))
            await parts.orchestrator.submit(submission("first"))
            broker.kill()
            await asyncio.wait_for(parts.orchestrator.submit(submission("second", 3)), 20)
            broker.start()
            async with RedisBrokerLength(broker.url) as length:
                async with asyncio.timeout(20):
                    while await length() < 3:
                        await asyncio.sleep(0.05)


class RedisBrokerLength:
    def __init__(self, url: str) -> None:
        self._broker = RedisBroker(url)

    async def __aenter__(self) -> Any:
        return self._broker.waiting

    async def __aexit__(self, *_: object) -> None:
        await self._broker.close()


# ── RabbitMQ ─────────────────────────────────────────────────────────────────────────────


async def test_runs_end_over_rabbitmq(redis_url: str, rabbitmq_url: str, tmp_path: Path) -> None:
    settings = celery(redis_url, broker_url=rabbitmq_url)
    with celery_worker(tmp_path, redis_url, DOVETAIL_BROKER_URL=rabbitmq_url) as worker:
        async with led(settings), commanding(settings) as commands:
            nodes: list[dict[str, Any]] = [{"id": f"n{i}", "handler": "plain"} for i in range(20)]
            names = [str(node["id"]) for node in nodes]
            nodes.append({"id": "z", "handler": "output", "dependencies": names})
            await commands.register({"name": "t", "nodes": nodes})
            batch = await commands.batch("t", [{}] * 5)
            done = await asyncio.wait_for(commands.wait_batch(batch["batch_id"]), 60)
            assert done["counts"] == {"COMPLETED": 5}
            (found,) = await examine(settings)
        assert worker.terminate() == 0
    assert found.message == "amqp, reachable; 0 messages wait in queue 'dovetail'"


# ── the doctor ───────────────────────────────────────────────────────────────────────────


async def test_an_unreachable_broker_is_reported_with_a_fix(redis_url: str) -> None:
    for url in (f"redis://127.0.0.1:{free_port()}", f"amqp://127.0.0.1:{free_port()}//"):
        (found,) = await broker_findings(celery(redis_url, broker_url=url))
        assert not found.ok
        assert "DOVETAIL_BROKER_URL" in found.fix
    (found,) = await broker_findings(celery(redis_url))
    assert (found.ok, found.message) == (
        True,
        "redis, reachable; 0 messages wait in queue 'dovetail'",
    )
    assert await broker_findings(Settings(redis_url=redis_url)) == []


async def test_a_broker_that_may_evict_messages_is_reported() -> None:
    with RedisServer(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        (found,) = await broker_findings(celery(server.url))
    assert not found.ok
    assert "allkeys-lru" in found.message


# ── the connection of a process of the pool ──────────────────────────────────────────────


def test_a_blocking_connection_gives_the_same_replies(redis_url: str) -> None:
    pipe = SyncRedis(redis_url)
    assert done(pipe.call("PING")) == b"PONG"
    pipe.enqueue([("INCR", "n"), ("INCR", "n")])
    assert done(pipe.call_many([("GET", "n"), ("STRLEN", "n")])) == [b"2", 1]
    assert pipe.roundtrips == 2
    with pytest.raises(RedisError, match="WRONGTYPE"):
        done(pipe.call("LPUSH", "n", 1))
    assert done(pipe.call_script("return ARGV[1]", [], ["x"])) == b"x"
    done(pipe.call("SCRIPT", "FLUSH"))
    assert done(pipe.call_script("return ARGV[1]", [], ["y"])) == b"y"
    assert done(pipe.call_many([pipe.script_command("return 7", [], []), ("PING",)])) == [
        7,
        b"PONG",
    ]
    pipe.close()


def test_a_broken_blocking_connection_sends_again() -> None:
    with RedisServer() as server:
        pipe = SyncRedis(server.url, patience=20)
        done(pipe.call("SET", "a", "1"))
        server.restart()
        assert done(pipe.call("GET", "a")) == b"1"
        assert pipe.breaks >= 1
        pipe.close()


def test_send_nowait_is_sent_immediately_and_costs_no_roundtrip(redis_url: str) -> None:
    pipe = SyncRedis(redis_url)
    done(pipe.call("PING"))
    pipe.send_nowait([("RPUSH", "reported", "a")])
    other = SyncRedis(redis_url)
    while not done(other.call("LLEN", "reported")):
        pass
    other.close()
    pipe.send_nowait([("RPUSH", "reported", "b")])
    pipe.enqueue([("RPUSH", "reported", "c")])
    assert done(pipe.call("LRANGE", "reported", 0, -1)) == [b"a", b"b", b"c"]
    assert pipe.roundtrips == 2
    pipe.flush_acks()  # nothing is left to wait for
    pipe.close()


def test_send_nowait_over_a_broken_connection_is_sent_again() -> None:
    with RedisServer() as server:
        pipe = SyncRedis(server.url, patience=20)
        done(pipe.call("PING"))
        server.stop()
        pipe.send_nowait([("RPUSH", "reported", "a")])
        pipe.send_nowait([("RPUSH", "reported", "b")])
        server.start()
        pipe.flush_acks()
        assert done(pipe.call("LRANGE", "reported", 0, -1)) == [b"a", b"b"]
        server.stop()
        pipe.send_nowait([("RPUSH", "reported", "c")])
        server.start()
        assert done(pipe.call("LINDEX", "reported", -1)) == b"c"
        pipe.close()


def test_a_refused_send_nowait_is_sent_again(redis_url: str) -> None:
    pipe = SyncRedis(redis_url)
    done(pipe.call("SET", "reported", "in the way"))
    pipe.send_nowait([("RPUSH", "reported", "a")])
    assert done(pipe.call("GET", "reported")) == b"in the way"
    with pytest.raises(RedisError, match="refused"):
        pipe.flush_acks()
    done(pipe.call("DEL", "reported"))
    pipe.flush_acks()
    assert done(pipe.call("LRANGE", "reported", 0, -1)) == [b"a"]
    pipe.close()


def test_an_unreachable_redis_is_reported_after_its_patience() -> None:
    pipe = SyncRedis(f"redis://127.0.0.1:{free_port()}", patience=0.1)
    with pytest.raises(RedisUnreachable):
        done(pipe.call("PING"))
    pipe.close()


def test_a_pending_awaitable_is_refused_by_a_blocking_connection() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    async def yields() -> None:
        class Pending:
            def __await__(self) -> Any:
                yield

        await Pending()

    with pytest.raises(RuntimeError, match="this coroutine waits"):
        done(yields())
    with pytest.raises(RuntimeError):
        done(waits())
