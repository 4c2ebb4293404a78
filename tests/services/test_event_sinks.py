"""Event sinks: every event at least once, those of one run in their order, whatever dies.

The same on the embedded file, on Redis and on Redis with PostgreSQL.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from dovetail import Dovetail, PermanentError, handler
from dovetail.config import SettingsError, load_settings
from dovetail.engine import event_export
from dovetail.engine.event_export import SinkError
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.sinks.jsonl import JsonLinesSink
from dovetail.sinks.kafka import KafkaSink
from dovetail.stores.redis.codec import keys_of

from ..api.conftest import Server, on, wait_for
from ..library.places import on_a_file, over_redis
from ..servers.redis_server import RedisServer

SECONDS = 20.0


@handler
async def breaks(config: dict[str, Any], ctx: Any) -> None:
    raise PermanentError("broken")


@pytest.fixture(params=["file", "redis", "archive"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def at(events: str) -> AsyncIterator[Dovetail]:
        settings = {"events": events}
        if request.param == "file":
            async with on_a_file(tmp_path, [breaks], settings) as dt:
                yield dt
            return
        if request.param == "archive":
            settings["database_url"] = request.getfixturevalue("postgres_url")
        async with over_redis(request.getfixturevalue("redis_url"), [breaks], settings) as dt:
            yield dt

    return at


def flow(*handlers: str) -> dict[str, Any]:
    nodes = [
        {"id": f"n{at}", "handler": name, "dependencies": [f"n{at - 1}"] if at else []}
        for at, name in enumerate(handlers)
    ]
    return {"name": "flow", "nodes": nodes}


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


async def exported(
    read: Callable[[], list[dict[str, Any]]], dt: Dovetail, *run_ids: str
) -> dict[str, list[dict[str, Any]]]:
    """What the sink has of these runs, once it has their last events."""
    logs = {one: [e.to_dict() async for e in dt.events(one)] for one in run_ids}
    async with asyncio.timeout(SECONDS):
        while True:
            found: dict[str, list[dict[str, Any]]] = {one: [] for one in run_ids}
            for record in read():
                found.setdefault(record["run_id"], []).append(record)
            if all(len(found[one]) >= len(logs[one]) for one in run_ids):
                break
            await asyncio.sleep(0.05)
    for run_id, own in logs.items():
        expected = [{**event, "run_id": run_id, "workflow": "flow"} for event in own]
        distinct = {record["seq"]: record for record in reversed(found[run_id])}
        assert [distinct[seq] for seq in sorted(distinct)] == expected
    return found


def in_order(records: list[dict[str, Any]]) -> bool:
    """The first appearance of each event."""
    return list(dict.fromkeys(r["seq"] for r in records)) == list(range(1, len(records) + 1))


async def test_every_event_is_a_line_of_the_file(place: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "out" / "events.jsonl"
    async with place(f"file://{path}") as dt:
        runs = [await dt.run(flow("input", "output"), timeout=SECONDS) for _ in range(20)]
        runs.append(await dt.run(flow("input", "breaks"), timeout=SECONDS))
        found = await exported(lambda: lines(path), dt, *(run.run_id for run in runs))
    assert all(in_order(found[run.run_id]) for run in runs)
    assert len(lines(path)) == sum(len(found[run.run_id]) for run in runs), "none is twice"
    assert path.stat().st_mode & 0o077 == 0
    assert found[runs[-1].run_id][-1]["type"] == "run.failed"


async def test_a_file_that_is_moved_away_is_begun_anew_and_a_torn_line_is_ended(
    place: Callable[..., Any], tmp_path: Path
) -> None:
    path, moved = tmp_path / "events.jsonl", tmp_path / "events.1"
    path.write_bytes(b'{"run_id": "torn')
    async with place(f"file://{path}") as dt:
        first = await dt.run(flow("output"), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while b"run.completed" not in path.read_bytes():
                await asyncio.sleep(0.02)
        path.rename(moved)
        second = await dt.run(flow("output"), timeout=SECONDS)
        await exported(lambda: lines(path), dt, second.run_id)
    torn, *rest = moved.read_bytes().splitlines()
    assert torn == b'{"run_id": "torn'
    assert {json.loads(line)["run_id"] for line in rest} == {first.run_id}


async def test_a_pipe_gets_events_as_a_file_does(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonLinesSink(path)
    await sink.write([RECORD])
    await sink.close()
    assert json.loads(os.read(reader, 1000)) == RECORD
    os.close(reader)


async def test_events_are_on_a_redis_stream(place: Callable[..., Any]) -> None:
    with RedisServer() as other:
        url = other.url.replace("redis://", "redis+stream://")
        join = "&" if "?" in url else "?"
        async with place(f"{url}{join}stream=mine") as dt, PipelinedRedis(other.url) as pipe:
            run = await dt.run(flow("input", "output"), timeout=SECONDS)
            async with asyncio.timeout(SECONDS):
                while not (found := await pipe.call("XRANGE", "mine", "-", "+")) or (
                    b"run.completed" not in found[-1][1]
                ):
                    await asyncio.sleep(0.05)
    records = [json.loads(dict(zip(f[::2], f[1::2], strict=True))[b"event"]) for _, f in found]
    assert in_order(records)
    assert {record["run_id"] for record in records} == {run.run_id}
    assert found[0][1][:4] == [b"run_id", run.run_id.encode(), b"workflow", b"flow"]


async def test_a_sink_that_is_away_delays_no_run_and_misses_nothing(
    place: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_export, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(event_export, "LONGEST_PAUSE_SECONDS", 0.1)
    folder = tmp_path / "sink"
    folder.write_text("in the way")
    path = folder / "events.jsonl"
    async with place(f"file://{path}") as dt:
        runs = [await dt.run(flow("output"), timeout=SECONDS) for _ in range(5)]
        folder.unlink()
        found = await exported(lambda: lines(path), dt, *(run.run_id for run in runs))
    assert all(in_order(found[run.run_id]) for run in runs)


async def test_a_run_whose_log_is_damaged_stops_neither_the_export_nor_its_process(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    async with Dovetail(redis_url) as dt, PipelinedRedis(redis_url) as pipe:
        damaged = await dt.trigger(flow("output"))
        await pipe.call("LSET", keys_of(damaged.run_id)[5], 0, "nonsense")
    async with over_redis(redis_url, [], {"events": f"file://{path}"}) as dt:
        run = await dt.run(flow("input", "output"), timeout=SECONDS)
        await exported(lambda: lines(path), dt, run.run_id)
        more = await dt.run(flow("input"), timeout=SECONDS)
        await exported(lambda: lines(path), dt, more.run_id)
    assert damaged.run_id not in {one["run_id"] for one in lines(path)}
    assert caplog.text.count(f"events of run {damaged.run_id} cannot be exported") == 1


async def test_what_a_process_did_not_export_is_exported_by_the_next(
    place: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    async with place(f"file://{path}") as dt:
        first = await dt.run(flow("output"), timeout=SECONDS)
        await exported(lambda: lines(path), dt, first.run_id)
        with monkeypatch.context() as patch:

            async def stuck(*_: Any) -> None:
                await asyncio.Event().wait()

            patch.setattr("dovetail.sinks.jsonl.JsonLinesSink.write", stuck)
            patch.setattr("dovetail.wiring.embedded.LAST_SEND_SECONDS", 0.01)
            second = await dt.run(flow("output"), timeout=SECONDS)
            await asyncio.sleep(0.7)
    assert {one["run_id"] for one in lines(path)} <= {first.run_id, second.run_id}
    async with place(f"file://{path}") as dt:
        found = await exported(lambda: lines(path), dt, second.run_id)
    assert in_order(found[second.run_id])
    assert [one["run_id"] for one in lines(path)].count(first.run_id) == len(
        {(one["run_id"], one["seq"]) for one in lines(path) if one["run_id"] == first.run_id}
    )


def test_events_survive_the_kill_of_the_process_that_exports(tmp_path: Path) -> None:
    """Embedded, and on Redis with all services in one process."""
    with RedisServer() as redis:
        setups = [("file", [], {}), ("redis", ["--with", "orchestrator,worker"], on(redis.url))]
        for name, words, env in setups:
            folder = tmp_path / name
            folder.mkdir()
            path = folder / "events.jsonl"
            own = {**env, "DOVETAIL_EVENTS": f"file://{path}", "DOVETAIL_LEASE_SECONDS": "1"}
            server = Server(folder, *words, **own)
            api = server.client()
            api.register(flow("input", "output"))
            api.post("/workflows/flow/batches", {"items": [{}] * 200})
            wait_for(lambda path=path: len(lines_so_far(path)) > 100, "some were exported")
            server.process.kill()
            server.process.wait()
            server.close()
            again = Server(folder, *words, **own)
            api = again.client()
            ended = "/runs?status=COMPLETED&limit=1000"
            wait_for(lambda api=api, ended=ended: len(api.get(ended)["items"]) == 200, "all ended")
            done = lambda path=path: sum(  # noqa: E731
                one["type"] == "run.completed" for one in distinct(lines_so_far(path))
            )
            wait_for(lambda done=done: done() == 200, "all were exported")
            by_run: dict[str, list[int]] = {}
            for record in lines_so_far(path):
                by_run.setdefault(record["run_id"], []).append(record["seq"])
            for run_id, numbers in by_run.items():
                firsts = list(dict.fromkeys(numbers))
                assert firsts == list(range(1, len(firsts) + 1)), run_id
            assert again.stop() == 0


def distinct(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(one["run_id"], one["seq"]): one for one in records}.values())


def lines_so_far(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # the line that a kill cut short
            continue
    return found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://x", "must begin with file://"),
        ("file://relative", "must be an absolute path"),
        ("file:///folder/", "must be an absolute path"),
        ("redis+stream://h:6379/0?maxlen=x", "maxlen must be a whole number"),
        ("redis+stream://h:6379/zero", ""),
        ("kafka://h:9092", "must be as in kafka://host:9092"),
        ("kafka:///topic", "must be as in kafka://host:9092"),
        ("kafka://h:port/topic", "must be as in kafka://host:9092"),
        ("kafka://h:0/topic", "must be as in kafka://host:9092"),
        ("kafka://h:99999/topic", "must be as in kafka://host:9092"),
        ("kafka://h:9092,/topic", "must be as in kafka://host:9092"),
        ("kafka://user:hunter2@h:9092/topic", "must be as in kafka://host:9092"),
        ("kafka://h:9092/a b", "must be as in kafka://host:9092"),
        ("kafka://h:9092/..", "must be as in kafka://host:9092"),
    ],
)
def test_a_wrong_url_stops_the_start_with_what_would_work(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match="DOVETAIL_EVENTS") as refused:
        load_settings(environ={"DOVETAIL_EVENTS": url})
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


# ── Kafka ────────────────────────────────────────────────────────────────────────────────


RECORD = {"run_id": "r", "workflow": "w", "type": "run.created"}


@pytest.fixture
def brokers() -> Iterator[str]:
    """The mock cluster of librdkafka: three brokers that speak Kafka's protocol over TCP. No broker
    is to be had from a package index."""
    cluster = Producer({"test.mock.num.brokers": 3, "bootstrap.servers": "replaced"})
    found = cluster.list_topics(timeout=SECONDS).brokers.values()
    yield ",".join(f"{one.host}:{one.port}" for one in found)
    cluster.flush(0)


def consumed(brokers: str, topic: str) -> list[tuple[int, bytes, dict[str, Any]]]:
    """Everything on a topic: the partition, the key and the event of each message."""
    consumer = Consumer(
        {"bootstrap.servers": brokers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    found: list[tuple[int, bytes, dict[str, Any]]] = []
    quiet_until = time.monotonic() + 5.0
    try:
        while time.monotonic() < quiet_until:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.append((message.partition(), message.key(), json.loads(message.value())))
                quiet_until = time.monotonic() + 1.0
        return found
    finally:
        consumer.close()


async def test_events_are_on_a_kafka_topic_with_the_run_as_the_key(
    brokers: str, tmp_path: Path
) -> None:
    async with on_a_file(tmp_path, [], {"events": f"kafka://{brokers}/runs"}) as dt:
        runs = [await dt.run(flow("input", "output"), timeout=SECONDS) for _ in range(5)]
    found = await asyncio.to_thread(consumed, brokers, "runs")
    for run in runs:
        mine = [one for one in found if one[1] == run.run_id.encode()]
        assert len({partition for partition, _, _ in mine}) == 1, "so they are in order"
        records = [record for *_, record in mine]
        assert in_order(records)
        assert records[-1]["type"] == "run.completed"
        assert {(record["run_id"], record["workflow"]) for record in records} == {
            (run.run_id, "flow")
        }


async def test_a_kafka_that_is_away_is_a_sink_error_that_says_why_and_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sink = KafkaSink("127.0.0.1:1", "runs", {"message.timeout.ms": 300})
    with pytest.raises(SinkError, match=r"Kafka topic runs: .*Connection refused"):
        await sink.write([RECORD])
    await sink.close()
    assert capfd.readouterr() == ("", "")


async def test_a_kafka_that_comes_back_gets_what_waited(brokers: str) -> None:
    host, _, port = brokers.partition(",")[0].partition(":")
    with socket.create_server(("127.0.0.1", 0)) as free:
        ours = free.getsockname()[1]
    sink = KafkaSink(f"127.0.0.1:{ours}", "runs", {"message.timeout.ms": 1000})
    with pytest.raises(SinkError):
        await sink.write([RECORD])
    server = await asyncio.start_server(partial(forward, host, int(port)), "127.0.0.1", ours)
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(SinkError):
                await sink.write([RECORD])
                break
    await sink.close()
    server.close()
    found = await asyncio.to_thread(consumed, brokers, "runs")
    assert RECORD in [record for *_, record in found]


async def forward(
    host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry what a connection says to another address, and back."""
    there_reader, there_writer = await asyncio.open_connection(host, port)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
