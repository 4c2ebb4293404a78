"""A Redis Cluster of several nodes: commands go where their keys are, also while these move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.redis_client.cluster import SLOTS, key_of, slot_of, slot_owners
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.timers import ACTIVE, LEASES
from dovetail.transports.streams.sender import RESULTS, stream_of

from ..servers.postgres_server import Databases
from ..servers.redis_cluster import RedisCluster
from .test_cluster import services, whole_life

SECONDS = 60.0
QUICK = {"lease_seconds": 2.0, "stale_result_timeout": 2.0, "stale_claim_interval": 1.0}
STEPS: dict[str, Any] = {
    "name": "steps",
    "nodes": [
        {"id": "a", "handler": "add", "config": {"to": 1}},
        {"id": "b", "handler": "twice", "dependencies": ["a"], "config": {"of": "{{ a.n }}"}},
        {"id": "c", "handler": "twice", "dependencies": ["a"], "config": {"of": "{{ a.n }}"}},
        {
            "id": "d",
            "handler": "add",
            "dependencies": ["b", "c"],
            "config": {"to": "{{ b.n + c.n }}"},
        },
    ],
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def empty(nodes: RedisCluster) -> RedisCluster:
    for node in nodes.nodes:
        node.flush()
    return nodes


@pytest.mark.parametrize("archive", [False, True], ids=["redis alone", "with an archive"])
async def test_the_whole_life_of_runs_over_three_nodes(
    empty: RedisCluster, postgres_server: Databases, archive: bool
) -> None:
    database = postgres_server.new_database() if archive else None
    settings = Settings(redis_url=empty.url, database_url=database, drain_seconds=1)
    async with (
        asyncio.timeout(SECONDS),
        PipelinedRedis(empty.url) as pipe,
        services(settings) as commands,
    ):
        await whole_life(commands, pipe)
    assert all(int(node.ask("DBSIZE")) for node in empty.nodes), "each has something of it"


async def test_runs_go_on_while_slots_move(empty: RedisCluster) -> None:
    settings = Settings(redis_url=empty.url, drain_seconds=1)
    async with asyncio.timeout(SECONDS), services(settings) as commands:
        batches = [await commands.batch(STEPS, [{}] * 200)]
        runs = (await commands.get_batch(batches[0]["batch_id"], limit=10))["runs"]
        shared = [RESULTS, stream_of("twice"), ACTIVE, LEASES]
        for key in [*shared, *(run["run_id"] for run in runs)]:
            slot = slot_of(key.encode())
            batches.append(await commands.batch(STEPS, [{}] * 20))
            at = empty.nodes.index(empty.having(slot))
            await asyncio.to_thread(empty.move, slot, empty.nodes[(at + 1) % 3])
        await all_is_well(commands, batches)


async def all_is_well(commands: Commands, batches: list[dict[str, Any]]) -> Counter[int]:
    """How many nodes needed so many attempts."""
    attempts: Counter[int] = Counter()
    for batch in batches:
        ended = await commands.wait_batch(batch["batch_id"])
        assert ended["counts"] == {"COMPLETED": batch["count"]}
        page = await commands.get_batch(batch["batch_id"], limit=batch["count"])
        for run in page["runs"]:
            state = await commands.store.load(run["run_id"])
            assert state.node("d").output == {"n": 9}
            attempts.update(node.attempt for node in state.nodes)
    return attempts


async def test_runs_go_on_when_a_node_dies_and_its_replica_takes_over() -> None:
    with RedisCluster(replicas=True) as cluster:
        settings = Settings(redis_url=cluster.nodes[1].url, drain_seconds=1, **QUICK)
        async with asyncio.timeout(SECONDS), services(settings) as commands:
            batches = [await commands.batch(STEPS, [{}] * 100)]
            await all_is_well(commands, batches)
            victim = cluster.having(slot_of(RESULTS.encode()))
            going_on = asyncio.create_task(commands.batch(STEPS, [{}] * 300))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(victim.kill)
            batches += [await going_on, await commands.batch(STEPS, [{}] * 20)]
            assert cluster.having(slot_of(RESULTS.encode())) is not victim
            await all_is_well(commands, batches)


async def test_a_script_is_loaded_and_a_scan_goes_through_all_of_them(empty: RedisCluster) -> None:
    async with PipelinedRedis(empty.url) as pipe:
        assert not pipe.keeps_order
        keys = [f"key {n}".encode() for n in range(300)]
        await pipe.call_many([("SET", key, n) for n, key in enumerate(keys)])
        assert await pipe.call_many([("GET", key) for key in keys]) == [
            b"%d" % n for n in range(300)
        ]
        script = "return redis.call('GET', KEYS[1])"
        calls = [pipe.script_command(script, [key.decode()], []) for key in keys]
        assert (await pipe.call_many(calls))[7] == b"7"
        assert await pipe.transaction([("INCR", "n")] * 5) == [1, 2, 3, 4, 5]
        found: list[bytes] = []
        cursor: Any = b"0"
        while True:
            cursor, some = await pipe.call("SCAN", cursor, "MATCH", "key *", "COUNT", 20)
            found += some
            if cursor == b"0":
                break
        assert sorted(found) == sorted(keys)
        assert (await pipe.server()).count(b"run_id:") == 3


async def test_a_key_is_looked_for_where_redis_would(empty: RedisCluster) -> None:
    node = empty.nodes[0]
    for key in ("key", "wf:{id}:meta", "{}x", "a{b", "a{b}c{d}", "{{x}}", "wf:batch:{ä}:all"):
        assert str(slot_of(key.encode())) == node.ask("CLUSTER", "KEYSLOT", key), key


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("HGET", "k", "f"), b"k"),
        (("EVALSHA", "digest", 2, "k", "l"), b"k"),
        (("EVALSHA", "digest", 0), None),
        (("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "BLOCK", 1, "STREAMS", "k", ">"), b"k"),
        (("XGROUP", "CREATE", "k", "g", "0"), b"k"),
        (("XINFO", "GROUPS", b"k"), b"k"),
        (("TIME",), None),
        (b"*3\r\n$4\r\nXADD\r\n$1\r\nk\r\n$1\r\n*\r\n", b"k"),
    ],
)
def test_where_the_key_of_a_command_stands(command: Any, key: bytes | None) -> None:
    assert key_of(command) == key


def test_who_has_what_is_known_if_every_slot_is_somebodys() -> None:
    whole = [[0, 9999, [b"h", 1, b"id"], [b"r", 9, b"id"]], [10000, SLOTS - 1, [None, 2, b"id"]]]
    found = slot_owners(whole, ("asked", 7))
    assert found is not None
    assert (found[0], found[9999], found[10000]) == (("h", 1), ("h", 1), ("asked", 2))
    assert slot_owners(whole[:1], ("asked", 7)) is None
