"""Services whose PostgreSQL is behind a PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio

import pytest

from dovetail.config import Settings
from dovetail.core.errors import StoreError
from dovetail.engine.ports import RunQuery
from dovetail.wiring.distributed import commanding

from ..servers.pgbouncer_server import PgBouncerServer
from ..servers.postgres_server import Databases
from ..servers.redis_server import RedisServer
from .service_processes import at_work

SECONDS = 60.0
FLOW = {"name": "pooled", "nodes": [{"id": "a", "handler": "greet"}]}


async def test_every_trigger_gets_a_reply_and_a_failed_one_is_found_by_its_key(
    postgres_server: Databases, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = postgres_server.new_database()
    folder = tmp_path_factory.mktemp("pooled")
    with (
        RedisServer() as redis,
        PgBouncerServer(database, "transaction", server_round_robin="1") as bouncer,
        at_work(folder, redis.url, bouncer.url),
    ):
        settings = Settings(redis_url=redis.url, database_url=bouncer.url)
        async with commanding(settings) as commands, asyncio.timeout(SECONDS):
            made = await asyncio.gather(*(commands.trigger(FLOW) for _ in range(60)))
            for one in made:
                assert (await commands.wait(one.run_id)).status == "COMPLETED"

            async def trigger(number: int) -> str | None:
                try:
                    return (await commands.trigger(FLOW, idempotency_key=f"k{number}")).run_id
                except StoreError:
                    return None

            first = asyncio.gather(*(trigger(number) for number in range(60)))
            await asyncio.sleep(0.05)
            bouncer.kill()
            bouncer.start()
            answered = await first
            again = await asyncio.gather(*(trigger(number) for number in range(60)))
            assert None not in again
            assert len(set(again)) == 60
            for before, after in zip(answered, again, strict=True):
                assert before in (None, after)
            for run_id in again:
                assert run_id is not None
                await commands.wait(run_id)
            counted = await commands.list_runs(RunQuery(workflow="pooled", limit=500))
            assert len(counted["items"]) == 120
    postgres_server.drop_database(database)
