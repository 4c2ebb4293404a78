"""The way to PostgreSQL: what happens when it is away, refuses, breaks off or is another's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import ArchiveDown, StoreError
from dovetail.core.transitions import Submit
from dovetail.engine.ports import DoctorFinding, RunQuery
from dovetail.stores.postgres import pool as postgres_pool
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import MAX_CONNECTIONS, SCHEMA_VERSION, PostgresPool
from dovetail.stores.postgres.records import PostgresRecords

from ..servers.postgres_server import Databases, PostgresServer
from ..servers.server import free_port

GRAPH = build_graph(
    Workflow.model_validate({"name": "one", "nodes": [{"id": "a", "handler": "h"}]}), {}
)


def submit(**fields: Any) -> Submit:
    return Submit(os.urandom(16).hex(), GRAPH, {}, **fields)


@pytest.fixture
def url(postgres_server: Databases) -> Iterator[str]:
    """An empty database for one test."""
    made = postgres_server.new_database()
    yield made
    postgres_server.drop_database(made)


@pytest.fixture
async def pool(url: str) -> AsyncIterator[PostgresPool]:
    async with PostgresPool(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """One that a test may kill, and has to start again."""
    with PostgresServer() as server:
        yield server


class TestConnecting:
    async def test_no_connection_is_opened_before_it_is_needed(self) -> None:
        async with PostgresPool(f"postgresql://nobody@127.0.0.1:{free_port()}/none"):
            pass

    async def test_libpq_options_reach_the_server(self, url: str) -> None:
        given = "connect_timeout=3&keepalives=1&options=-c%20search_path%3Dpg_catalog"
        async with PostgresPool(f"{url}?{given}") as pool:
            assert await pool.transact(lambda c: c.fetchval("SHOW search_path")) == "pg_catalog"

    async def test_many_concurrent_first_calls_all_succeed(self, url: str) -> None:
        pools = [PostgresPool(url) for _ in range(6)]
        await asyncio.gather(*(pool.ping() for pool in pools for _ in range(5)))
        assert [row[0] for row in await pools[0].rows("schema_version")] == [SCHEMA_VERSION]
        await asyncio.gather(*(pool.close() for pool in pools))

    def test_processes_that_migrate_concurrently_do_no_harm(self, url: str) -> None:
        script = (
            "import asyncio, sys\n"
            "from dovetail.stores.postgres.pool import PostgresPool\n"
            "async def main():\n"
            "    async with PostgresPool(sys.argv[1]) as pool:\n"
            "        await pool.ping()\n"
            "asyncio.run(main())\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", script, url], stderr=subprocess.PIPE)
            for _ in range(4)
        ]
        for process in processes:
            _, reported = process.communicate(timeout=60)
            assert process.returncode == 0, reported.decode()

    async def test_a_pool_is_bounded(self, pool: PostgresPool, url: str) -> None:
        async with PostgresPool(url) as other:
            await asyncio.gather(
                *(other.transact(lambda c: c.execute("SELECT pg_sleep(0.05)")) for _ in range(40)),
                pool.ping(),
            )
            count = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
            used = await pool.look(lambda c: c.fetchval(count))
        assert used == MAX_CONNECTIONS + 1

    async def test_a_connection_is_returned_without_another_roundtrip(
        self, pool: PostgresPool, url: str
    ) -> None:
        await pool.ping()
        last = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1"
        async with PostgresPool(url) as other:
            own = await other.look(lambda c: c.fetchval("SELECT pg_backend_pid()"))
            assert await other.look(lambda c: c.fetchval(last, own)) == "SELECT 1;"

    async def test_a_closed_pool_opens_again(self, pool: PostgresPool) -> None:
        await pool.ping()
        await pool.close()
        await pool.ping()

    async def test_a_missing_library_is_reported(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "asyncpg", None)
        with pytest.raises(StoreError, match=r"dovetail\[postgres\]"):
            await PostgresPool(url).ping()

    def test_importing_the_module_loads_no_library(self) -> None:
        script = (
            "import sys, dovetail.stores.postgres.archive, dovetail.stores.postgres.records\n"
            "sys.exit('asyncpg' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class TestTheSchema:
    async def test_a_newer_schema_is_refused(self, pool: PostgresPool, url: str) -> None:
        await pool.ping()
        await pool.execute("set_schema_version", SCHEMA_VERSION + 1)
        async with PostgresPool(url) as other:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"newer Dovetail.*upgrade Dovetail"):
                    await other.ping()
            await pool.execute("set_schema_version", SCHEMA_VERSION)
            await other.ping()

    async def test_tables_of_another_program_do_no_harm(
        self, postgres_server: Databases, url: str, pool: PostgresPool
    ) -> None:
        postgres_server.execute("CREATE TABLE runs (x INT); CREATE TABLE events (y INT)", url)
        await PostgresRecords(pool).accept(submit(), 1.0)

    async def test_the_schema_of_another_program_is_not_used(
        self, postgres_server: Databases, url: str, pool: PostgresPool
    ) -> None:
        postgres_server.execute("CREATE SCHEMA dovetail; CREATE TABLE dovetail.runs (x INT)", url)
        with pytest.raises(StoreError, match="of another program"):
            await pool.ping()
        postgres_server.execute("DROP TABLE dovetail.runs", url)
        await pool.ping()

    async def test_tables_of_the_first_version_are_brought_up_to_date(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_pool, "SCHEMA_VERSION", 1)
        monkeypatch.setitem(postgres_pool.statements(), "views", "SELECT 1")
        async with PostgresPool(url) as old:
            await old.ping()
            added = "INSERT INTO dovetail.batches (batch_id, workflow, count, created_at) VALUES ('b', 'w', 2, 1)"  # noqa: E501
            await old.transact(lambda connection: connection.execute(added))
        monkeypatch.undo()
        async with PostgresPool(url) as pool:
            assert [row[0] for row in await pool.rows("schema_version")] == [SCHEMA_VERSION]
            assert (await pool.row("read_batch", "b"))[-2:] == (0, None)

    async def test_a_migration_that_fails_leaves_nothing(
        self, url: str, pool: PostgresPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            postgres_pool.statements(), "schema_1", "CREATE TABLE dovetail.half (x INT); nonsense"
        )
        with pytest.raises(StoreError, match="syntax error"):
            await pool.ping()
        monkeypatch.undo()
        await pool.ping()

    async def test_a_database_of_the_first_version_is_upgraded(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_pool, "SCHEMA_VERSION", 1)
        monkeypatch.setitem(postgres_pool.statements(), "views", "SELECT 1")
        async with PostgresPool(url) as old:
            await old.ping()
            assert [row[0] for row in await old.rows("schema_version")] == [1]
        monkeypatch.undo()
        async with PostgresPool(url) as new:
            assert await new.rows("log_heads", ["no run"]) == []
            assert [row[0] for row in await new.rows("schema_version")] == [SCHEMA_VERSION]

    async def test_a_user_without_permission_gets_an_error_with_the_missing_grant(
        self, postgres_server: Databases, url: str
    ) -> None:
        role = f"guest_{os.urandom(4).hex()}"
        postgres_server.execute(f"CREATE ROLE {role} LOGIN", url)
        guest = url.replace("//dovetail@", f"//{role}@")
        assert guest != url
        async with PostgresPool(guest) as pool:
            with pytest.raises(StoreError, match="GRANT CREATE ON DATABASE"):
                await pool.ping()
            postgres_server.execute(f"CREATE SCHEMA dovetail AUTHORIZATION {role}", url)
            await pool.ping()  # a schema of its own will do as well
        postgres_server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}", url)


class TestFailures:
    @pytest.mark.parametrize(
        ("code", "reported"),
        [
            ("53100", "disk .* is full.*free some space"),
            ("53300", "no connection left.*max_connections"),
            ("53200", "run out of something"),
            ("25006", "read-only.*primary"),
            ("28P01", "refuses the login.*user and password"),
            ("57P03", "starting or stopping.*try again"),
            ("58030", "disk full or failing"),
            ("XX001", "damaged"),
            ("55P03", "migrating"),
            ("22012", r"as asked \(22012\)"),
        ],
    )
    async def test_an_error_of_postgresql_is_explained(
        self, pool: PostgresPool, code: str, reported: str
    ) -> None:
        sql = f"DO $$ BEGIN RAISE EXCEPTION 'as asked' USING ERRCODE = '{code}'; END $$"
        with pytest.raises(StoreError, match=reported) as raised:
            await pool.transact(lambda c: c.execute(sql))
        assert "as asked" in str(raised.value) or code == "25006" or code == "55P03"
        assert "nothing that was acknowledged is lost" in str(raised.value)
        await pool.ping()

    async def test_an_unreachable_postgresql_is_reported_immediately(self) -> None:
        port = free_port()
        url = f"postgresql://user:geheim@127.0.0.1:{port}/runs?password=geheim"
        async with PostgresPool(url) as pool:
            with pytest.raises(StoreError, match=r"cannot be reached.*is PostgreSQL running") as at:
                await pool.ping()
        assert f"127.0.0.1:{port}/runs" in str(at.value)
        assert "geheim" not in str(at.value)

    async def test_an_unknown_user_or_database_is_reported(self, url: str) -> None:
        async with PostgresPool(url.replace("//dovetail@", "//nobody:geheim@")) as pool:
            with pytest.raises(StoreError, match="refuses the login") as raised:
                await pool.ping()
            assert "geheim" not in str(raised.value)
        async with PostgresPool(url + "_not") as pool:
            with pytest.raises(StoreError, match="does not exist; create it with createdb"):
                await pool.ping()

    async def test_a_database_that_is_not_utf8_is_reported(
        self, postgres_server: Databases, url: str
    ) -> None:
        name = f"{url.rpartition('/')[2]}_latin"
        postgres_server.execute(
            f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
        )
        latin = f"{url.rpartition('/')[0]}/{name}"
        async with PostgresPool(latin) as pool:
            with pytest.raises(StoreError, match=r"LATIN1.*createdb --encoding UTF8"):
                await pool.ping()
        postgres_server.drop_database(latin)

    @pytest.mark.parametrize(
        "wrong", ["postgresql://h:port/x", "postgresql://u:a#b@h/x", "mysql://h/x", "nonsense"]
    )
    async def test_an_invalid_database_url_is_reported(self, wrong: str) -> None:
        async with PostgresPool(wrong) as pool:
            with pytest.raises(StoreError, match="DOVETAIL_DATABASE_URL"):
                await pool.ping()

    async def test_a_read_only_database_is_reported_and_the_next_connection_may_be_the_primary(
        self, postgres_server: Databases, url: str, pool: PostgresPool
    ) -> None:
        await pool.ping()
        name = url.rpartition("/")[2]
        postgres_server.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        records = PostgresRecords(pool)
        await pool.close()
        with pytest.raises(StoreError, match="read-only"):
            await records.accept(submit(), 1.0)
        postgres_server.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        await records.accept(submit(), 1.0)  # on a connection of its own, made after that

    async def test_a_statement_that_takes_too_long_is_cancelled(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_pool, "STATEMENT_SECONDS", 0.1)
        async with PostgresPool(url) as pool:
            with pytest.raises(StoreError, match="took more than"):
                await pool.transact(lambda c: c.execute("SELECT pg_sleep(5)"))
            await pool.ping()

    async def test_dropped_tables_are_not_silently_created_again(
        self, postgres_server: Databases, url: str, pool: PostgresPool
    ) -> None:
        await pool.ping()
        postgres_server.execute("DROP SCHEMA dovetail CASCADE", url)
        for _ in range(2):
            with pytest.raises(StoreError, match="lost its tables"):
                await pool.rows("limits")

    async def test_a_broken_connection_is_replaced_and_the_work_repeated(
        self, pool: PostgresPool
    ) -> None:
        tries = []

        async def work(connection: Any) -> int:
            tries.append(1)
            if len(tries) == 1:
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            return len(tries)

        assert await pool.transact(work) == 2

    async def test_the_work_is_not_repeated_forever(self, pool: PostgresPool) -> None:
        tries = []

        async def work(connection: Any) -> None:
            tries.append(1)
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

        with pytest.raises(StoreError):
            await pool.transact(work)
        assert len(tries) == 2
        await pool.ping()

    async def test_an_exception_in_a_transaction_is_raised_and_rolls_it_back(
        self, pool: PostgresPool
    ) -> None:
        async def work(connection: Any) -> None:
            await connection.execute("INSERT INTO dovetail.limits VALUES ('x', 1, 1)")
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await pool.transact(work)
        assert await pool.rows("limits") == []

    async def test_a_cancelled_caller_returns_its_connection(self, url: str) -> None:
        async with PostgresPool(url, connections=1) as pool:
            await pool.ping()
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await pool.transact(lambda c: c.execute("SELECT pg_sleep(60)"))
            began = time.monotonic()
            await pool.ping()
            assert time.monotonic() - began < 20


class TestRepeatedRequests:
    """The answer to a commit may be lost: a caller that asks again finds what was made."""

    async def test_a_repeated_trigger_gives_the_same_run(self, pool: PostgresPool) -> None:
        records = PostgresRecords(pool)
        run = submit(key=("run", "k", "body"))
        for _ in range(2):
            await records.accept(run, 1.0)
        assert len((await records.list_runs())["items"]) == 1

    @pytest.mark.parametrize("key", [None, ("batch", "k", "body")])
    async def test_a_repeated_batch_gives_the_same_batch(
        self, pool: PostgresPool, key: tuple[str, str, str] | None
    ) -> None:
        records = PostgresRecords(pool)
        runs = [submit(), submit()]
        for _ in range(2):
            await records.accept_batch("batch", runs, key, 1.0)
        assert len((await records.get_batch("batch"))["runs"]) == 2


class TestServerDown:
    async def test_acknowledged_runs_survive_kill_9_of_postgresql(
        self, own_server: PostgresServer
    ) -> None:
        async with PostgresPool(own_server.new_database()) as pool:
            records, archive = PostgresRecords(pool), PostgresArchive(pool)
            accepted = []

            async def trigger() -> None:
                while True:
                    run = submit(key=("run", os.urandom(8).hex(), "b"))
                    await records.accept(run, 1.0)
                    accepted.append(run.run_id)

            triggers = [asyncio.create_task(trigger()) for _ in range(8)]
            while len(accepted) < 100:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_server.kill)
            ended = await asyncio.gather(*triggers, return_exceptions=True)
            assert {type(error) for error in ended} == {ArchiveDown}, ended
            with pytest.raises(StoreError):
                await records.accept(submit(), 1.0)
            with pytest.raises(StoreError):
                await pool.ping()
            await asyncio.to_thread(own_server.start)
            await pool.ping()
            known = set()
            after = None
            while page := await archive.unfinished(2.0, 1000, after):
                known |= set(page)
                after = page[-1]
            assert known >= set(accepted)

    async def test_a_restart_between_two_calls_is_not_noticed(
        self, own_server: PostgresServer
    ) -> None:
        async with PostgresPool(own_server.new_database()) as pool:
            records = PostgresRecords(pool)
            for _ in range(3):
                await asyncio.gather(*(records.accept(submit(), 1.0) for _ in range(20)))
                own_server.restart()  # our loop sees nothing of it before the next call
            assert len((await records.list_runs(RunQuery(limit=100)))["items"]) == 60

    async def test_a_hanging_postgresql_costs_a_bounded_time(
        self, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_pool, "ANSWER_SECONDS", 0.4)
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", 0.4)
        async with (
            PostgresPool(own_server.new_database()) as pool,
            PostgresPool(own_server.new_database()) as unopened,
        ):
            await asyncio.gather(*(pool.rows("limits") for _ in range(5)))
            stopped = _stop(own_server)
            began = time.monotonic()
            for tried in (pool, unopened):
                reported = await asyncio.gather(
                    *(tried.rows("limits") for _ in range(20)), return_exceptions=True
                )
                assert {type(error) for error in reported} == {ArchiveDown}, reported
                assert all("did not answer" in str(error) for error in reported), reported
                with pytest.raises(StoreError, match="did not answer"):
                    await PostgresRecords(tried).accept(submit(), 1.0)
            assert time.monotonic() - began < 30
            _go_on(stopped)
            for tried in (pool, unopened):
                await _patiently(tried)


def _stop(server: PostgresServer) -> list[int]:
    """SIGSTOP the server with every child that serves a connection."""
    assert server.pid is not None
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    pids = [server.pid, *map(int, children)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def _patiently(pool: PostgresPool) -> None:
    for _ in range(50):
        try:
            await pool.rows("limits")
            return
        except StoreError:
            await asyncio.sleep(0.1)
    await pool.rows("limits")


class TestDoctor:
    async def test_a_healthy_database_passes_the_doctor(self) -> None:
        with PostgresServer(durable=True) as server:
            async with PostgresPool(server.url) as pool:
                found = await PostgresRecords(pool).doctor()
        assert [finding for finding in found if not finding.ok] == []
        assert {"database", "schema", "writable", "durability"} <= {f.check for f in found}

    @pytest.mark.parametrize(
        ("setting", "check", "fix"),
        [
            ("synchronous_commit = off", "durability", "synchronous_commit = on"),
            ("default_transaction_read_only = on", "writable", "primary"),
        ],
    )
    async def test_a_setting_that_endangers_runs_is_found(
        self, own_server: PostgresServer, setting: str, check: str, fix: str
    ) -> None:
        url = own_server.new_database()
        async with PostgresPool(url) as pool:
            await pool.ping()
        own_server.execute(f'ALTER DATABASE "{url.rpartition("/")[2]}" SET {setting}')
        async with PostgresPool(url) as pool:
            found = await _findings(pool)
        assert not found["durability"].ok, "our test server has fsync off"
        assert found[check].fix

    async def test_fsync_off_is_found(self, own_server: PostgresServer) -> None:
        async with PostgresPool(own_server.new_database()) as pool:
            found = (await _findings(pool))["durability"]
        assert (found.ok, found.fix) == (False, "ALTER SYSTEM SET fsync = on")

    async def test_an_unreachable_database_is_a_finding(self) -> None:
        async with PostgresPool(f"postgresql://u@127.0.0.1:{free_port()}/x") as pool:
            (found,) = await PostgresRecords(pool).doctor()
        assert not found.ok
        assert "DOVETAIL_DATABASE_URL" in found.fix


async def _findings(pool: PostgresPool) -> dict[str, DoctorFinding]:
    return {found.check: found for found in await PostgresRecords(pool).doctor()}
