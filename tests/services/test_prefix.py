"""A prefix before every key: a Redis that is shared, and users that may touch no other key."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from dovetail.config import Settings, SettingsError, load_settings
from dovetail.engine.ports import Author
from dovetail.handlers.builtin import builtin_registry
from dovetail.redis_client import pipelined
from dovetail.redis_client.cluster import slot_of
from dovetail.redis_client.pipelined import KeyPrefix, PipelinedRedis, UnknownKeyPositions
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.redis_client.url import read
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.wiring.distributed import commanding, orchestrate, working
from dovetail.wiring.embedded import redis_findings

from ..celery_crew import celery_worker
from ..servers.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
PREFIX = "team1:"
SECONDS = 60.0
FLOW: dict[str, Any] = {
    "name": "flow",
    "max_concurrency": 2,
    "nodes": [
        {"id": "start", "handler": "input"},
        {"id": "limited", "handler": "sleep", "config": {"seconds": 0}, "resource_tag": "slow",
         "dependencies": ["start"]},
        {"id": "cached", "handler": "input", "cache": {"ttl_seconds": 60},
         "dependencies": ["start"]},
        {"id": "asked", "handler": "input", "condition": "{{ start.x == 1 }}",
         "dependencies": ["start"]},
        {"id": "left", "handler": "input", "condition": "{{ start.x == 2 }}",
         "dependencies": ["start"]},
        {"id": "end", "handler": "output", "dependencies": ["limited", "cached", "asked", "left"]},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as made:
        yield made


@pytest.fixture
def connection(server: RedisServer) -> Iterator[redis.Redis]:
    server.flush()
    with redis.Redis.from_url(server.url, decode_responses=True) as made:
        yield made


# ── the table ────────────────────────────────────────────────────────────────────────────


def words_of_the_source() -> set[str]:
    """Every word in capital letters that a file says: commands of Redis are among them."""
    found = set()
    package = ROOT / "src" / "dovetail"
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("redis_client", "stores", "transports", "wiring"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {node.value} if re.fullmatch("[A-Z]+", node.value) else set()
    return found


NOT_COMMANDS = {"AUTH", "BRPOP", "EXEC", "MULTI", "READONLY", "SELECT", "SENTINEL"}
"""Sent as they are, at the beginning of a connection, or words of something else."""
BY_SHAPE = {"EVALSHA", "EVAL", "XREAD", "XREADGROUP", "SCAN"}


@pytest.fixture(scope="module")
def table(server: RedisServer) -> dict[str, tuple[int, int]]:
    """Of every command of Redis: the first of its words that is a key, and the last."""
    with redis.Redis.from_url(server.url) as made:
        return {
            name.upper(): (facts["first_key_pos"], facts["last_key_pos"])
            for name, facts in made.command().items()
        }


def test_the_keys_of_every_sent_command_are_known(
    table: dict[str, tuple[int, int]],
) -> None:
    commands = (words_of_the_source() - NOT_COMMANDS) & set(table)
    assert len(commands) > 30
    known = (
        pipelined.KEY_IS_FIRST
        | pipelined.KEY_IS_SECOND
        | pipelined.ALL_ARE_KEYS
        | pipelined.WITHOUT_KEYS
        | BY_SHAPE
    )
    assert commands <= known, "add them to the tables in redis_client/pipelined.py"


def test_redis_agrees_on_the_positions_of_keys(table: dict[str, tuple[int, int]]) -> None:
    for names, expected in (
        (pipelined.KEY_IS_FIRST, (1, 1)),
        (pipelined.ALL_ARE_KEYS, (1, -1)),
        (pipelined.WITHOUT_KEYS, (0, 0)),
    ):
        assert {name: table[name] for name in names} == dict.fromkeys(names, expected)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(UnknownKeyPositions, match="SUNIONSTORE"):
        KeyPrefix("p:").add(("SUNIONSTORE", "a", "b"))
    with pytest.raises(UnknownKeyPositions, match="RENAME"):
        KeyPrefix("p:").add(b"*3\r\n$6\r\nRENAME\r\n$1\r\na\r\n$1\r\nb\r\n")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("SET", "k", "v"), ("SET", "p:k", "v")),
        (("SET", b"k", "v"), ("SET", b"p:k", "v")),
        (("DEL", "a", "b"), ("DEL", "p:a", "p:b")),
        (("XINFO", "GROUPS", "s"), ("XINFO", "GROUPS", "p:s")),
        (("EVALSHA", "d", 2, "a", "b", "c"), ("EVALSHA", "d", 2, "p:a", "p:b", "c")),
        (("XREAD", "BLOCK", 1, "STREAMS", "a", "b", 0, 0),
         ("XREAD", "BLOCK", 1, "STREAMS", "p:a", "p:b", 0, 0)),
        (("SCAN", 0, "MATCH", "wf:*", "COUNT", 9), ("SCAN", 0, "MATCH", "p:wf:*", "COUNT", 9)),
        (("GET", "wf:unused:{wf:def:x}"), ("GET", "p:wf:unused:{p:wf:def:x}")),
        (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", b"*2\r\n$3\r\nGET\r\n$3\r\np:k\r\n"),
        (("PING",), ("PING",)),
    ],
)  # fmt: skip
def test_a_prefix_is_added_to_every_key_and_nothing_else(command: Any, expected: Any) -> None:
    assert KeyPrefix("p:").add(command) == expected


def test_keys_of_one_slot_share_a_slot_with_any_prefix() -> None:
    def slot(key: str) -> int:
        return slot_of(str(KeyPrefix(PREFIX).key(key)).encode())

    assert slot("wf:{run}:meta") == slot("wf:{run}:events") == slot_of(b"run")
    assert slot("wf:def:d1") == slot("wf:unused:{wf:def:d1}")
    assert KeyPrefix(PREFIX).remove(b"team1:wf:unused:{team1:wf:def:d1}") == "wf:unused:{wf:def:d1}"


# ── the setting ──────────────────────────────────────────────────────────────────────────


def test_the_prefix_setting_applies_to_redis_and_to_a_broker_in_redis() -> None:
    environ = {
        "DOVETAIL_REDIS_URL": "redis://h/1?client_name=x",
        "DOVETAIL_BROKER_URL": "rediss://b",
        "DOVETAIL_REDIS_PREFIX": PREFIX,
    }
    settings = load_settings(environ=environ)
    assert read(settings.redis_url or "").prefix == PREFIX
    assert read(settings.broker_url or "").prefix == PREFIX
    assert Settings.model_validate(settings.model_dump()) == settings
    amqp = load_settings(environ={**environ, "DOVETAIL_BROKER_URL": "amqp://b"})
    assert amqp.broker_url == "amqp://b"


@pytest.mark.parametrize("prefix", ["a b", "{x}", "x" * 65, "*"])
def test_an_invalid_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match=r"DOVETAIL_REDIS_PREFIX.*1 to 64 letters"):
        load_settings(environ={"DOVETAIL_REDIS_PREFIX": prefix})


def test_two_prefixes_are_refused() -> None:
    environ = {"DOVETAIL_REDIS_URL": "redis://h?key_prefix=a:", "DOVETAIL_REDIS_PREFIX": "b:"}
    with pytest.raises(SettingsError, match="DOVETAIL_REDIS_URL: its option key_prefix is 'a:'"):
        load_settings(environ=environ)


# ── connections ──────────────────────────────────────────────────────────────────────────


async def test_both_kinds_of_connection_add_the_prefix(
    server: RedisServer, connection: redis.Redis
) -> None:
    url = f"{server.url}?key_prefix={PREFIX}"
    async with PipelinedRedis(url) as pipe:
        await pipe.call("SET", "a", 1)
        pipe.enqueue([("SET", "b", 1)])
        await pipe.call_script("return redis.call('SET', KEYS[1], ARGV[1])", ["c"], ["a"])
        await pipe.transaction([("SET", "d", 1), ("SET", "e", 1), ("SET", "f", 1)])
    blocking = SyncRedis(url)
    blocking.enqueue([("SET", "g", 1)])
    done(blocking.call("SET", "h", 1))
    blocking.send_nowait([("SET", "i", 1)])
    blocking.flush_acks()
    blocking.close()
    assert sorted(connection.keys()) == [f"{PREFIX}{letter}" for letter in "abcdefghi"]


# ── services, each as a user of its own ──────────────────────────────────────────────────


def users_of_the_page() -> dict[str, str]:
    """The ACL lines as docs/services.md has them, by service."""
    text = (ROOT / "docs" / "services.md").read_text()
    return dict(re.findall(r"^user dovetail-(\w+) (on .*)$", text, re.MULTILINE))


CELERY = ("allchannels", "+@pubsub")
"""What the page has for Celery's workers, in addition."""


@asynccontextmanager
async def services(urls: dict[str, str], **more: Any) -> AsyncIterator[Any]:
    settings = {name: Settings(redis_url=url, **more) for name, url in urls.items()}
    async with AsyncExitStack() as stack:
        leading = asyncio.create_task(orchestrate(settings["orchestrator"]))
        stack.callback(leading.cancel)
        if more.get("transport") != "celery":
            registry = builtin_registry(settings["worker"])
            await stack.enter_async_context(working(settings["worker"], registry))
        yield await stack.enter_async_context(commanding(settings["api"]))


async def test_a_workflow_runs_with_the_acl_users_of_the_page(
    server: RedisServer, connection: redis.Redis
) -> None:
    users = users_of_the_page()
    assert set(users) == {"api", "orchestrator", "worker"}
    urls = {}
    for name, line in users.items():
        words = line.replace("PASSWORD", "sesame").split()
        connection.execute_command("ACL", "SETUSER", f"dovetail-{name}", *words)
        urls[name] = server.url.replace("//", f"//dovetail-{name}:sesame@")
    connection.execute_command("ACL", "LOG", "RESET")
    connection.set("theirs", "untouched")
    async with services(urls, redis_prefix=PREFIX, drain_seconds=0.0) as commands:
        await commands.rates.set("slow", 100.0, 1, Author("test", 1.0))
        for _ in range(2):
            run_id = (await commands.trigger(FLOW, {"x": 1})).run_id
            run = await asyncio.wait_for(commands.wait(run_id), SECONDS)
            assert run.status.value == "COMPLETED"
        held = await commands.trigger(
            {"name": "held", "nodes": [{"id": "a", "handler": "sleep", "config": {"seconds": 60}}]}
        )
        await commands.cancel(held.run_id)
        await commands.register(FLOW)
        assert len((await commands.list_runs())["items"]) == 3
        found = await redis_findings(Settings(redis_url=urls["orchestrator"], redis_prefix=PREFIX))
    denied = connection.execute_command("ACL", "LOG")
    assert denied == [], "what a service asks for, its user may"
    assert not [one for one in found if one.check == "backlog" and not one.ok]
    keys = set(connection.keys())
    assert {key for key in keys if not key.startswith(PREFIX)} == {"theirs"}
    with redis.Redis.from_url(urls["worker"]) as mine, pytest.raises(NoPermissionError):
        mine.get("theirs")


async def test_celery_adds_the_prefix_to_its_keys(
    server: RedisServer, connection: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    assert f"`{' '.join(CELERY)}`" in (ROOT / "docs" / "services.md").read_text()
    line = users_of_the_page()["worker"].replace("PASSWORD", "sesame")
    connection.execute_command("ACL", "SETUSER", "dovetail-pool", *line.split(), *CELERY)
    connection.execute_command("ACL", "LOG", "RESET")
    given = {
        "DOVETAIL_REDIS_PREFIX": PREFIX,
        "DOVETAIL_REDIS_URL": server.url.replace("//", "//dovetail-pool:sesame@"),
        "CREW_REDIS_URL": redis_url,
    }
    names = ("api", "orchestrator")
    async with AsyncExitStack() as stack:
        commands = await stack.enter_async_context(
            services(dict.fromkeys(names, server.url), redis_prefix=PREFIX, transport="celery")
        )
        worker = celery_worker(tmp_path, server.url, known=f"{PREFIX}wf:workers", **given)
        stack.enter_context(worker)
        run_id = (await commands.trigger(FLOW, {"x": 1})).run_id
        run = await asyncio.wait_for(commands.wait(run_id), SECONDS)
        assert run.status.value == "COMPLETED"
        async with PipelinedRedis(f"{server.url}?key_prefix={PREFIX}") as pipe:
            assert len(await WorkerRegistry(pipe).workers()) == 1
    assert connection.execute_command("ACL", "LOG") == []
    assert not [key for key in connection.scan_iter() if not key.startswith(PREFIX)]
