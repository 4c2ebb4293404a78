"""Aliases with weights over the engine: which versions their runs have, and the history."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.aliases import choose_version
from dovetail.core.errors import InvalidParams, NotFound
from dovetail.engine.commands import Commands
from dovetail.engine.ports import RunQuery
from dovetail.handlers.builtin import builtin_registry
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.wiring.distributed import commanding
from dovetail.wiring.embedded import attached

WEIGHTS = {"1": 90, "2": 10}
SECONDS = 60.0


@pytest.fixture(params=["embedded", "redis", "redis and postgres"])
async def commands(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Commands]:
    """Runs are created and not driven: only their versions matter."""
    settings = Settings(db=tmp_path / "runs.db", db_sync="normal")
    if request.param != "embedded":
        urls = {"redis_url": request.getfixturevalue("redis_url")}
        if request.param == "redis and postgres":
            urls["database_url"] = request.getfixturevalue("postgres_url")
        settings = Settings(**urls)
    async with AsyncExitStack() as stack:
        registry = builtin_registry(settings)
        engine = (
            attached(settings, registry, create=True)
            if request.param == "embedded"
            else commanding(settings, registry)
        )
        found = await stack.enter_async_context(engine)
        async with asyncio.timeout(SECONDS):
            yield found


async def two_versions(commands: Commands, name: str, **second: Any) -> None:
    nodes = [{"id": "a", "handler": "input"}]
    await commands.register({"name": name, "nodes": nodes})
    await commands.register({"name": name, "nodes": nodes, "description": "2", **second})
    await commands.set_alias(name, "prod", WEIGHTS)


async def version_of(commands: Commands, run_id: str) -> int:
    version: int = (await commands.receipt(run_id))["version"]
    return version


async def versions_in(commands: Commands, batch_id: str) -> Counter[int]:
    found: Counter[int] = Counter()
    cursor = None
    while True:
        page = await commands.list_runs(RunQuery(batch=batch_id, limit=1000, cursor=cursor))
        found.update(run["version"] for run in page["items"])
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def test_ten_thousand_runs_are_divided_within_1_percent_of_the_weights(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = Random(7)  # one time in a thousand random ids would be off by more
    monkeypatch.setattr("dovetail.engine.commands.new_id", lambda: ids.randbytes(16).hex())
    await two_versions(commands, "divided")
    batch = await commands.batch("divided", [{}] * 10_000, version="prod")
    found = await versions_in(commands, batch["batch_id"])
    assert found[1] + found[2] == 10_000
    assert abs(found[2] - 1_000) <= 100


async def test_a_key_has_one_version_and_changed_weights_hold_from_the_next_run_on(
    commands: Commands,
) -> None:
    await two_versions(commands, "keyed")
    keys = [f"key-{number}" for number in range(40)]
    made = [await commands.trigger("keyed", version="prod", idempotency_key=key) for key in keys]
    versions = [await version_of(commands, one.run_id) for one in made]
    assert versions == [choose_version(WEIGHTS, "keyed", key) for key in keys]
    assert set(versions) == {1, 2}
    await commands.set_alias("keyed", "prod", {"2": 1})
    again = await commands.trigger("keyed", version="prod", idempotency_key=keys[0])
    assert again == (made[0].run_id, False)
    fresh = await commands.trigger("keyed", version="prod", idempotency_key="another")
    assert await version_of(commands, fresh.run_id) == 2
    plain = await commands.trigger("keyed", version="prod")
    assert await version_of(commands, plain.run_id) == 2


async def test_each_item_of_a_batch_is_checked_with_the_schema_of_its_version(
    commands: Commands,
) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"default": 7}}}
    await two_versions(commands, "schemas", params={**schema, "required": []})
    batch = await commands.batch("schemas", [{}] * 200, version="prod")
    page = await commands.list_runs(RunQuery(batch=batch["batch_id"], limit=1000))
    assert {(run["version"], run["params"].get("n")) for run in page["items"]} == {
        (1, None),
        (2, 7),
    }
    await two_versions(commands, "strict", params={"type": "object", "required": ["n"]})
    with pytest.raises(InvalidParams) as refused:
        await commands.batch("strict", [{}] * 200, version="prod")
    assert 0 < len(refused.value.problems) < 100


async def test_a_deleted_version_is_not_run_by_a_process_that_knew_it(commands: Commands) -> None:
    await two_versions(commands, "gone")
    await commands.cancel((await commands.trigger("gone", version=1)).run_id)
    await commands.delete_alias("gone", "prod")
    await commands.delete_version("gone", 1)
    with pytest.raises(NotFound, match="no version 1; it has: 2"):
        await commands.trigger("gone", version=1)


async def test_the_history_names_the_user_or_the_caller(commands: Commands) -> None:
    await two_versions(commands, "told")
    await commands.delete_alias("told", "prod", actor="ci")
    items = (await commands.workflow_history("told"))["items"]
    assert [one["action"] for one in items] == ["delete", "alias", "register", "register"]
    assert items[0]["actor"] == "ci"
    assert items[1]["actor"] == commands.actor != "unknown"


async def test_aliases_and_history_survive_the_loss_of_redis(
    redis_url: str, postgres_url: str
) -> None:
    settings = Settings(redis_url=redis_url, database_url=postgres_url)
    async with commanding(settings, builtin_registry(settings)) as commands:
        await two_versions(commands, "survives")
        await commands.set_rate_limit("survives", 5.0, 1)
        async with PipelinedRedis(redis_url) as redis:
            await redis.call("FLUSHALL")
        assert (await commands.workflow("survives"))["aliases"] == {"prod": WEIGHTS, "latest": 2}
        items = (await commands.workflow_history("survives"))["items"]
        assert [one["action"] for one in items] == ["alias", "register", "register"]
        (limit,) = (await commands.rate_limit_history("survives"))["items"]
        assert limit["details"]["rate_per_second"] == 5.0
