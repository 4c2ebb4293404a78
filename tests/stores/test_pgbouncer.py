"""PostgreSQL behind a real PgBouncer, in both of its modes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.documents import reviews_postgres
from dovetail.engine.ports import DoctorFinding
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.postgres.records import PostgresRecords

from ..servers.pgbouncer_server import PgBouncerServer
from ..servers.postgres_server import Databases

MODES = ["transaction", "session"]


@pytest.fixture(scope="module", params=MODES)
def bouncer(
    request: pytest.FixtureRequest, postgres_server: Databases
) -> Iterator[PgBouncerServer]:
    """Three sessions for many clients: each transaction gets another one."""
    url = postgres_server.new_database()
    with PgBouncerServer(url, request.param, server_round_robin="1") as server:
        yield server
    postgres_server.drop_database(url)


async def test_pgbouncer_is_detected_and_a_direct_connection_is_not(
    bouncer: PgBouncerServer, postgres_server: Databases
) -> None:
    async with PostgresPool(bouncer.url) as behind, PostgresPool(postgres_server.url) as direct:
        await asyncio.gather(behind.ping(), direct.ping())
        assert (behind.is_pooled, direct.is_pooled) == (True, False)


async def test_all_concurrent_statements_succeed_through_pgbouncer(
    bouncer: PgBouncerServer,
) -> None:
    """Prepared in one session and executed in another, a third of them would fail."""
    async with PostgresPool(bouncer.url, connections=3) as pool:

        async def all_kinds(number: int) -> None:
            await pool.ping()
            await pool.rows("schema_version")
            assert await pool.transact(lambda c: c.fetchval("SELECT $1::int", number)) == number
            assert await pool.look(lambda c: c.fetchval("SELECT $1::int", -number)) == -number

        for _ in range(5):
            await asyncio.gather(*(all_kinds(number) for number in range(20)))


async def test_timeouts_hold_in_each_transaction(bouncer: PgBouncerServer) -> None:
    async with PostgresPool(bouncer.url, connections=2) as pool:
        for _ in range(4):
            limit = await pool.transact(lambda c: c.fetchval("SHOW statement_timeout"))
            idle = await pool.look(lambda c: c.fetchval("SHOW idle_in_transaction_session_timeout"))
            assert (limit, idle) == ("10s", "15s")


async def test_the_doctor_reports_pgbouncer(bouncer: PgBouncerServer) -> None:
    async with PostgresPool(bouncer.url, connections=1) as pool:
        findings: list[DoctorFinding] = await PostgresRecords(pool).doctor()
    assert ("pooler", True) in [(finding.check, finding.ok) for finding in findings]


def test_reviews_of_documents_are_stored_through_pgbouncer(
    bouncer: PgBouncerServer, tmp_path: Path
) -> None:
    store = reviews_postgres.PostgresReviewStore(bouncer.url, tmp_path)
    try:
        for _ in range(10):
            assert store.get("none") is None
            assert store.measurements(None, None) == []
    finally:
        reviews_postgres.close_databases()
