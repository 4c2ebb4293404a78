"""Parents' outputs over Redis: read by a worker that asks for them, in parts, within a limit.

Bytes that Redis sends are counted by Redis itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.engine.commands import Commands
from dovetail.engine.ports import Task
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import Registry, describe, handler, marked
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.wiring.distributed import commanding, connected, orchestrate, working

from ..celery_crew import celery_worker

MANY, BYTES = 60, 780_000
PARENTS = [f"p{at}" for at in range(MANY)]
PATIENCE = 60.0


def one(config: dict[str, Any], ctx: Any) -> Any:
    return [len(ctx.inputs), list(ctx.inputs)[:2], len(ctx.inputs["p7"]["text"])]


async def async_one(config: dict[str, Any], ctx: Any) -> Any:
    return one(config, ctx)


async def idle(config: dict[str, Any], ctx: Any) -> str:
    return "read nothing"


def some(config: dict[str, Any], ctx: Any) -> int:
    return sum(len(ctx.inputs[name]["text"]) for name in config["names"])


class WaitingHandlers:
    """Handlers that wait for a test."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()

    async def door(self, config: dict[str, Any], ctx: Any) -> None:
        self.entered.set()
        await self.opened.wait()


class InputServices:
    def __init__(self, commands: Commands, pipe: PipelinedRedis, doors: WaitingHandlers) -> None:
        self.commands = commands
        self.pipe = pipe
        self.doors = doors

    async def run(self, nodes: dict[str, Any], params: Any = None, **fields: Any) -> RunState:
        return await self.end(await self.begin(nodes, params, **fields))

    async def begin(self, nodes: dict[str, Any], params: Any = None, **fields: Any) -> str:
        listed = [{"id": name, **node} for name, node in nodes.items()]
        definition = {"name": "t", "nodes": listed, **fields}
        return (await self.commands.trigger(definition, params)).run_id

    async def end(self, run_id: str) -> RunState:
        return await asyncio.wait_for(self.commands.wait(run_id), PATIENCE)

    async def sent(self) -> int:
        """Bytes, by Redis, to all its clients."""
        return int((await self.pipe.info("stats"))["total_net_output_bytes"])


def registry_with(settings: Settings, *handlers: Any) -> Registry:
    registry = builtin_registry(settings)
    for fn in handlers:
        for known in marked(fn, "tests") or [describe(fn, name=fn.__name__)]:
            registry.add(known)
    return registry


@asynccontextmanager
async def served(redis_url: str, **fields: Any) -> AsyncIterator[InputServices]:
    """An orchestrator and a worker in this process, over Redis Streams."""
    settings = Settings(redis_url=redis_url, **fields)
    doors = WaitingHandlers()
    registry = registry_with(settings, one, async_one, idle, some, doors.door)
    leading = asyncio.create_task(orchestrate(settings))
    async with (
        working(settings, registry),
        commanding(settings, registry) as commands,
        PipelinedRedis(redis_url) as pipe,
    ):
        yield InputServices(commands, pipe, doors)
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


def family(*children: str, **config: Any) -> dict[str, Any]:
    nodes: dict[str, Any] = {name: {"handler": "input"} for name in PARENTS}
    nodes["door"] = {"handler": "door", "dependencies": PARENTS}
    for name in children:
        handler = "idle" if name.startswith("idle") else name
        nodes[name] = {"handler": handler, "dependencies": [*PARENTS, "door"], "config": config}
    return nodes


async def test_a_request_with_many_large_outputs_costs_only_the_inputs_that_handlers_read(
    redis_url: str,
) -> None:
    children = [*(f"idle{at}" for at in range(6)), "one", "async_one"]
    async with served(redis_url) as place:
        run_id = await place.begin(family(*children), {"text": "x" * BYTES})
        await asyncio.wait_for(place.doors.entered.wait(), PATIENCE)
        before = await place.sent()
        place.doors.opened.set()
        async with asyncio.timeout(PATIENCE):
            await place.commands.store.ended(run_id)
        sent = await place.sent() - before
        view = await place.commands.records.summary(run_id)
        outputs = [await output_of(place, run_id, name) for name in ("one", "async_one")]
    assert view["status"] == "COMPLETED"
    assert outputs == [[MANY + 1, ["p0", "p1"], BYTES]] * 2
    # Of 47 MB: a part, for what may travel with eight tasks; for each of two handlers one output;
    # and once the run itself, with its params.
    assert sent < (4 << 20) + 3 * BYTES + (1 << 20), f"Redis has sent {sent:,} bytes"


async def output_of(place: InputServices, run_id: str, name: str) -> Any:
    run = await place.commands.store.load(run_id)
    return run.node(name).output


async def test_a_handler_that_reads_beyond_the_limit_fails_and_others_continue(
    redis_url: str,
) -> None:
    parents = {f"p{at}": {"handler": "input"} for at in range(8)}
    nodes: dict[str, Any] = {
        **parents,
        "some": {"handler": "some", "config": {"names": ["p0", "p1"]}},
        "beyond": {
            "handler": "some",
            "config": {"names": ["p0", "p1", "p2"]},
            "max_retries": 2,
        },
        "output": {"handler": "output"},
        "idle": {"handler": "idle"},
        "names": {
            "handler": "idle",
            "config": {name: f"{{{{ {name}.text }}}}" for name in parents},
        },
        "asks": {
            "handler": "idle",
            "condition": "{{ " + " and ".join(f"{name}.text" for name in parents) + " }}",
        },
    }
    for name in nodes.keys() - parents.keys():
        nodes[name]["dependencies"] = [*parents]
    async with served(redis_url, max_input_bytes=1_700_000) as place:
        run = await place.run(nodes, {"text": "x" * BYTES}, on_failure="continue")
    good = {name for name in nodes if run.node(name).status.value == "COMPLETED"}
    assert good == {*parents, "some", "idle"}
    assert run.node("some").output == 2 * BYTES
    for name in ("beyond", "output", "names", "asks"):
        error = run.node(name).error
        assert error is not None
        assert error["type"] == "too_large", error
        assert "at most 1,700,000 (DOVETAIL_MAX_INPUT_BYTES)" in error["message"]
        assert run.node(name).attempt <= 1, "it would fail again"


async def test_templates_and_conditions_that_read_large_values_within_the_limit_are_rendered(
    redis_url: str,
) -> None:
    parents = {f"p{at}": {"handler": "input"} for at in range(8)}
    nodes: dict[str, Any] = {
        **parents,
        "names": {
            "handler": "output",
            "config": {name: f"{{{{ {name}.text | length }}}}" for name in parents},
            "condition": "{{ " + " and ".join(f"{name}.text" for name in parents) + " }}",
            "dependencies": [*parents],
        },
    }
    async with served(redis_url) as place:
        run = await place.run(nodes, {"text": "x" * BYTES})
    assert run.node("names").output == dict.fromkeys(parents, BYTES)


async def test_small_inputs_are_sent_with_the_task_and_cost_no_read(redis_url: str) -> None:
    nodes = {
        "a": {"handler": "input"},
        "b": {"handler": "output", "dependencies": ["a"]},
    }
    async with served(redis_url) as place:
        await place.run(nodes, {"x": 1})
        before = await calls(place)
        run = await place.run(nodes, {"x": 1})
        after = await calls(place)
    assert run.node("b").output == {"a": {"x": 1}}
    assert after.get("hstrlen", 0) == before.get("hstrlen", 0), "sizes were asked for"


async def calls(place: InputServices) -> dict[str, int]:
    reported = await place.pipe.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): int(value.split(",")[0].removeprefix("calls="))
        for name, value in reported.items()
    }


async def test_the_cache_gives_each_run_its_own_data(redis_url: str) -> None:
    cached = {"cache": {"ttl_seconds": 60}}
    nodes = {
        "a": {"handler": "input", **cached},
        "b": {"handler": "output", "dependencies": ["a"], **cached},
        "c": {"handler": "idle", "dependencies": ["b"], **cached},
    }
    people = ("alice", "bob", "alice", "bob")
    async with served(redis_url) as place:
        runs = [await place.run(nodes, {"who": who}) for who in people]
    assert [run.node("b").output for run in runs] == [{"a": {"who": who}} for who in people]
    attempts = [[run.node(name).attempt for name in "abc"] for run in runs]
    assert attempts == [[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]


async def test_an_output_made_with_a_secret_is_found_by_workers_that_have_the_secret(
    redis_url: str,
) -> None:
    """Orchestrators have none."""
    nodes = {
        "a": {
            "handler": "made",
            "config": {"key": "{{ secrets.KEY }}"},
            "cache": {"ttl_seconds": 60},
        }
    }
    called: list[str] = []

    @handler("made", secrets=True)
    async def made(config: dict[str, Any], ctx: Any) -> int:
        called.append(config["key"])
        return len(called)

    leading = asyncio.create_task(orchestrate(Settings(redis_url=redis_url)))
    found = []
    for secret in ("first-secret", "other-secret", "first-secret"):
        settings = Settings(redis_url=redis_url, secrets={"KEY": secret})
        registry = registry_with(settings, made)
        async with working(settings, registry), commanding(settings, registry) as commands:
            place = InputServices(commands, PipelinedRedis(redis_url), WaitingHandlers())
            found += [(await place.run(nodes)).node("a").output for _ in range(2)]
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    assert called == ["first-secret", "other-secret"]
    assert found == [1, 1, 2, 2, 1, 1]


async def test_the_outputs_of_large_parents_are_part_of_the_cache_key(redis_url: str) -> None:
    """More than is read with a node that is published."""
    parents = {f"p{at}": {"handler": "input", "config": {"at": at}} for at in range(7)}
    nodes = {
        **parents,
        "some": {
            "handler": "some",
            "config": {"names": ["p0", "p6"]},
            "dependencies": [*parents],
            "cache": {"ttl_seconds": 60},
        },
    }
    async with served(redis_url) as place:
        texts = ("x" * BYTES, "y" * (BYTES + 1), "x" * BYTES)
        runs = [await place.run(nodes, {"text": text}) for text in texts]
    assert [run.node("some").output for run in runs] == [2 * len(text) for text in texts]
    assert [run.node("some").attempt for run in runs] == [1, 1, 0]


async def test_the_announced_version_of_a_handler_decides_which_cached_output_is_found(
    redis_url: str,
) -> None:
    settings = Settings(redis_url=redis_url)
    nodes = {"a": {"handler": "made", "cache": {"ttl_seconds": 60}}}
    found = []
    for version in (1, 2, 2):

        async def made(config: dict[str, Any], ctx: Any, version: int = version) -> int:
            return version

        registry = builtin_registry(settings)
        registry.add(describe(made, name="made", version=version))
        leading = asyncio.create_task(orchestrate(settings))
        async with working(settings, registry), commanding(settings, registry) as commands:
            run = await InputServices(commands, PipelinedRedis(redis_url), WaitingHandlers()).run(
                nodes
            )
            found.append((run.node("a").output, run.node("a").attempt))
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
    assert found == [(1, 1), (2, 1), (2, 0)]


async def test_reading_inputs_of_a_missing_run_is_a_clear_error(
    redis_url: str,
) -> None:
    async with connected(Settings(redis_url=redis_url)) as parts:
        task = Task("nobody", "n", Token(1, 1, 1), "h", {}, {}, None, 1.0)
        with pytest.raises(Exception, match="no run 'nobody'"):
            await parts.store.input_sizes(task)


async def test_a_celery_pool_reads_the_requested_inputs_within_the_limit(
    redis_url: str, tmp_path: Path
) -> None:
    settings = Settings(redis_url=redis_url, transport="celery", max_input_bytes=1_000_000)
    parents = {f"p{at}": {"handler": "input"} for at in range(6)}
    nodes: dict[str, Any] = {
        **parents,
        "one": {"handler": "reads_inputs", "config": {"names": ["p3"]}},
        "async": {"handler": "reads_inputs_async", "config": {"names": ["p3"]}},
        "beyond": {"handler": "reads_inputs", "config": {"names": [*parents]}},
        "output": {"handler": "output"},
    }
    for name in nodes.keys() - parents.keys():
        nodes[name]["dependencies"] = [*parents]
    with celery_worker(tmp_path, redis_url, DOVETAIL_MAX_INPUT_BYTES="1000000"):
        leading = asyncio.create_task(orchestrate(settings))
        async with commanding(settings) as commands, PipelinedRedis(redis_url) as pipe:
            place = InputServices(commands, pipe, WaitingHandlers())
            text = "x" * 300_000
            run = await place.run(nodes, {"text": text}, on_failure="continue")
            kept = orjson.dumps({"text": text})
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
    assert run.node("one").output == run.node("async").output == [6, len(kept)]
    for name in ("beyond", "output"):
        error = run.node(name).error
        assert error is not None
        assert error["type"] == "too_large"
        assert "1,000,000 (DOVETAIL_MAX_INPUT_BYTES)" in error["message"]
