"""The SQL views have what the API shows, in the file and in PostgreSQL; the page's queries run."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]
import orjson
import pytest

from dovetail import Context, handler
from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import Registry, describe
from dovetail.wiring.distributed import commanding, orchestrate, working
from dovetail.wiring.embedded import embedded

from ..servers.postgres_server import Databases

SECONDS = 60.0
DOCS = Path(__file__).parents[2] / "docs" / "sql.md"
NODES = [
    {"id": "a", "handler": "input"},
    {"id": "b", "handler": "output", "dependencies": ["a"], "config": {"flag": True, "n": 1.5}},
    {
        "id": "c",
        "handler": "fail",
        "dependencies": ["a"],
        "config": {"message": "no way"},
        "max_retries": 1,
        "retry": {"base_delay_seconds": 0.01, "jitter": 0},
    },
    {"id": "d", "handler": "sleep", "dependencies": ["c"], "config": {"seconds": 0}},
    {
        "id": "e",
        "handler": "sleep",
        "dependencies": ["a"],
        "condition": "{{ false }}",
        "config": {"seconds": 0},
    },
    {
        "id": "f",
        "handler": "input",
        "config": {"only": "once"},
        "cache": {"ttl_seconds": 600},
        "dependencies": ["a"],
    },
]
FLOW = {"name": "flow", "on_failure": "continue", "nodes": NODES}
WIDE = {
    "name": "wide",
    "nodes": [
        *({"id": f"n{number}", "handler": "input"} for number in range(50)),
        {"id": "end", "handler": "output", "dependencies": [f"n{number}" for number in range(50)]},
    ],
}
TRUTH = {"name": "truth", "nodes": [{"id": "a", "handler": "odd"}, {"id": "b", "handler": "true"}]}
SLOW = {"name": "slow", "nodes": [{"id": "s", "handler": "sleep", "config": {"seconds": 60}}]}


@handler("odd")
async def odd(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    ctx.log.warning("odd", extra={"n": 1})
    return {"text": "a\0\0b \\u0000 é", "yes": True, "no": False, "none": None}


@handler("true")
async def true(config: dict[str, Any], ctx: Context) -> bool:
    return True


def registry_of(settings: Settings) -> Registry:
    registry = builtin_registry(settings)
    registry.add(describe(odd))
    registry.add(describe(true))
    return registry


class World(NamedTuple):
    commands: Commands
    rows: Callable[..., Awaitable[list[dict[str, Any]]]]
    dialect: str
    run_ids: list[str]


@pytest.fixture(params=["sqlite", "postgresql"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with asyncio.timeout(SECONDS):
        if request.param == "sqlite":
            settings = Settings(db=tmp_path / "runs.db", db_sync="normal")
            async with embedded(settings, registry_of(settings)) as commands:
                yield await _filled(commands, _of_file(settings.db), "sqlite")
            return
        databases: Databases = request.getfixturevalue("postgres_server")
        url = databases.new_database()
        settings = Settings(redis_url=request.getfixturevalue("redis_url"), database_url=url)
        registry = registry_of(settings)
        leading = asyncio.create_task(orchestrate(settings))
        async with working(settings, registry), commanding(settings, registry) as commands:
            yield await _filled(commands, _of_database(url), "postgresql")
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        databases.drop_database(url)


def _of_file(path: Path) -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    async def rows(query: str) -> list[dict[str, Any]]:
        connection = sqlite3.connect(path)
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute(query)]
        finally:
            connection.close()

    return rows


def _of_database(url: str) -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    async def rows(query: str) -> list[dict[str, Any]]:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("SET search_path = dovetail")
            return [dict(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return rows


async def _filled(
    commands: Commands, rows: Callable[..., Awaitable[list[dict[str, Any]]]], dialect: str
) -> World:
    await commands.register(FLOW)
    params = {"text": "\\u0000 é", "n": 2**40, "none": None}
    failed = (await commands.trigger("flow", params, idempotency_key="k1")).run_id
    await commands.ended(failed)
    await commands.retry(failed)
    await commands.ended(failed)
    again = (await commands.trigger("flow", params)).run_id  # f is cached by now
    await commands.ended(again)
    fork = (await commands.fork(again, definition={**FLOW, "nodes": NODES[:2]})).run_id
    batch = await commands.batch("flow", [{}, {"x": 1}])
    wide = (await commands.trigger(WIDE)).run_id
    truth = (await commands.trigger(TRUTH)).run_id
    slow = (await commands.trigger(SLOW)).run_id
    await commands.wait_batch(batch["batch_id"])
    for run_id in (fork, wide, truth):
        await commands.ended(run_id)
    while (await commands.get_run(slow))["nodes"][0]["status"] != "RUNNING":
        await asyncio.sleep(0.02)
    await commands.cancel(slow)
    await commands.ended(slow)
    items = (await commands.get_batch(batch["batch_id"]))["runs"]
    run_ids = [failed, again, fork, wide, truth, slow, *(run["run_id"] for run in items)]
    ends = {run_id: await commands.last_seq(run_id) for run_id in run_ids}
    while True:  # the archive is a moment behind
        shown = await rows("SELECT run_id, MAX(seq) AS seq FROM v_events GROUP BY run_id")
        if {row["run_id"]: row["seq"] for row in shown} == ends:
            return World(commands, rows, dialect, run_ids)
        await asyncio.sleep(0.1)


def as_json(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value


def seconds(value: Any) -> float | None:
    if value is None:
        return None
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    assert moment.tzinfo is not None
    return float(moment.astimezone(UTC).timestamp())


def shown_text(value: Any) -> Any:
    """As PostgreSQL shows a text: it has no U+0000."""
    if isinstance(value, dict):
        return {name: shown_text(one) for name, one in value.items()}
    return value.replace("\0", "�") if isinstance(value, str) else value


def same_time(one: Any, other: Any) -> bool:
    first, second = seconds(one), seconds(other)
    if first is None or second is None:
        return first is second
    return abs(first - second) < 0.0011


async def test_the_views_show_what_the_api_shows(world: World) -> None:
    await _check_runs_and_nodes(world)
    await _check_events(world)
    await _check_logs(world)
    await _check_keys_batches_and_forks(world)


async def _check_runs_and_nodes(world: World) -> None:
    for run_id in world.run_ids:
        run = await world.commands.get_run(run_id)
        (row,) = await world.rows(f"SELECT * FROM v_runs WHERE run_id = '{run_id}'")
        clean = shown_text if world.dialect == "postgresql" else lambda value: value
        for name in ("workflow", "version", "status", "epoch", "forked_from"):
            assert row[name] == run[name], name
        for name in ("params", "result", "error"):
            assert as_json(row[name]) == clean(run[name]), name
        for name in ("created_at", "started_at", "finished_at"):
            assert same_time(row[name], run[name]), name
        rows = await world.rows(f"SELECT * FROM v_nodes WHERE run_id = '{run_id}'")
        assert {one["node"] for one in rows} == {node["id"] for node in run["nodes"]}
        shown = {one["node"]: one for one in rows}
        for node in run["nodes"]:
            one = shown[node["id"]]
            for name in ("handler", "status", "epoch", "attempt", "worker", "reason", "cause"):
                assert one[name] == node[name], (node["id"], name)
            for name in ("output", "error"):
                assert as_json(one[name]) == clean(node[name]), (node["id"], name)
            for name in ("started_at", "finished_at"):
                assert same_time(one[name], node[name]), (node["id"], name)


async def _check_events(world: World) -> None:
    for run_id in world.run_ids:
        rows = await world.rows(f"SELECT * FROM v_events WHERE run_id = '{run_id}' ORDER BY seq")
        events = await world.commands.events(run_id)
        assert [row["seq"] for row in rows] == [event["seq"] for event in events]
        for row, event in zip(rows, events, strict=True):
            data = as_json(row["data"]) or {}
            data.pop("traceback", None)
            for name in ("type", "epoch", "node", "attempt"):
                assert row[name] == event.get(name), name
            assert same_time(row["time"], event["time"])
            for name in data.keys() & event.keys() - {"until"}:
                assert data[name] == event[name]
            assert not {"error", "reason", "cause", "worker", "delay"} & (
                event.keys() - data.keys()
            )


async def _check_logs(world: World) -> None:
    rows: list[dict[str, Any]] = []
    while not rows:  # lines are stored a moment later
        rows = await world.rows("SELECT * FROM v_logs WHERE node = 'a' AND workflow = 'truth'")
        await asyncio.sleep(0.05)
    (row,) = rows
    (line,) = (await world.commands.logs(row["run_id"]))["items"]
    clean = shown_text if world.dialect == "postgresql" else lambda value: value
    for name in ("seq", "node", "epoch", "attempt", "item", "level", "logger"):
        assert row[name] == line[name], name
    assert row["message"] == clean(line["message"])
    assert as_json(row["fields"]) == line["fields"]
    assert same_time(row["time"], line["time"])


async def _check_keys_batches_and_forks(world: World) -> None:
    rows = await world.rows("SELECT * FROM v_runs ORDER BY created_at")
    by_id = {row["run_id"]: row for row in rows}
    failed, again, fork, *_ = world.run_ids
    assert by_id[failed]["idempotency_key"] == "k1"
    assert by_id[again]["idempotency_key"] is None
    assert by_id[fork]["forked_from"] == again
    in_batch = [row for row in rows if row["batch_id"] is not None]
    assert sorted(row["batch_index"] for row in in_batch) == [0, 1]


async def test_every_query_of_the_page_runs(world: World) -> None:
    blocks = re.findall(
        r"^```sql(?: (\w+))?\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    wanted = [text for dialect, text in blocks if dialect in ("", world.dialect)]
    assert len(wanted) >= 8
    found = 0
    for query in wanted:
        found += bool(await world.rows(query))
    assert found >= len(wanted) - 3  # most of them have something to show here
