"""Shows that the servers of the tests start, survive what is done to them, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
import redis
from amqp.exceptions import NotAllowed
from kombu import Connection

from . import server as server_module
from .binaries import NoServer, Program, RabbitPrograms, find, find_rabbitmq
from .fixtures import GivenRabbit, GivenRedis
from .postgres_server import Databases, PostgresServer
from .rabbitmq_server import RabbitServer
from .redis_server import RedisRefused, RedisServer
from .server import HOST, Server, ServerFailed, free_port

TESTS = Path(__file__).resolve().parents[1]
ENDS = (signal.SIGKILL, signal.SIGTERM)

# A user of the servers outside pytest, as the bench is. It tells where its server is.
USER = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from servers.postgres_server import PostgresServer
from servers.rabbitmq_server import RabbitServer
from servers.redis_server import RedisServer
kinds = {{"redis": RedisServer, "postgres": PostgresServer, "rabbitmq": RabbitServer}}
server = kinds[sys.argv[1]]()
server.start()
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
print("server", server.pid, server.folder, child or "", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def durable_redis() -> Iterator[RedisServer]:
    """One to kill: what it confirmed, it has on the disk."""
    with RedisServer(fsync="always") as server:
        yield server


@pytest.fixture(scope="module")
def mortal_postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def mortal_rabbit() -> Iterator[RabbitServer]:
    with RabbitServer() as server:
        yield server


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def ask_postgres(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


# --- Redis -------------------------------------------------------------------------------------


def test_redis_appends_every_second_and_evicts_nothing() -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url) as connection:
        settings = connection.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["bind"] == HOST


def test_a_redis_killed_with_sigkill_restarts_with_its_data_and_address(
    durable_redis: RedisServer,
) -> None:
    port, pid = durable_redis.port, durable_redis.pid
    for number in range(20):
        durable_redis.ask("SET", f"key{number}", str(number))
    durable_redis.kill()
    with pytest.raises(OSError, match="refused"):
        durable_redis.ask("PING")
    durable_redis.start()
    assert durable_redis.port == port
    assert durable_redis.pid != pid
    assert [durable_redis.ask("GET", f"key{n}") for n in range(20)] == [str(n) for n in range(20)]


def test_a_redis_that_was_stopped_restarts_with_its_data(
    durable_redis: RedisServer,
) -> None:
    durable_redis.ask("SET", "kept", "yes")
    durable_redis.restart()
    assert durable_redis.ask("GET", "kept") == "yes"


def test_a_paused_redis_replies_after_it_is_resumed(durable_redis: RedisServer) -> None:
    durable_redis.pause()
    with socket.create_connection((HOST, durable_redis.port), timeout=0.1) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        durable_redis.resume()
        connection.settimeout(10)
        assert connection.recv(7) == b"+PONG\r\n"


def test_a_paused_redis_can_be_killed_and_started(durable_redis: RedisServer) -> None:
    durable_redis.pause()
    durable_redis.kill()
    durable_redis.start()
    assert durable_redis.ask("PING") == "PONG"


def test_a_cluster_of_one_node_serves_every_slot_and_refuses_cross_slot_commands() -> None:
    with RedisServer(cluster=True, fsync="always") as node:
        for number in range(50):
            node.ask("SET", f"key{number}", "x")
        with pytest.raises(RedisRefused, match="CROSSSLOT"):
            node.ask("EVAL", "return 1", "2", "key1", "key2")
        node.kill()
        node.start()
        assert node.ask("GET", "key49") == "x"


def test_settings_of_the_caller_override_the_defaults() -> None:
    with RedisServer(settings={"appendonly": "no", "maxmemory": "5mb"}) as server:
        info = server.ask("INFO")
    assert "aof_enabled:0" in info
    assert "maxmemory:5242880" in info


@pytest.mark.parametrize("redis_server", [{"fsync": "no"}], indirect=True)
def test_the_fixture_passes_arguments_to_the_server(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as connection:
        assert connection.config_get("appendfsync") == {"appendfsync": "no"}


@pytest.mark.parametrize("turn", [1, 2])
def test_a_test_finds_redis_empty_whatever_an_earlier_test_left(redis_url: str, turn: int) -> None:
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.dbsize() == 0
        connection.set("left", "over")


def test_a_given_redis_is_used_only_if_it_is_empty(durable_redis: RedisServer) -> None:
    durable_redis.flush()
    given = GivenRedis(durable_redis.url)
    durable_redis.ask("SET", "precious", "1")
    with pytest.raises(NoServer, match="holds keys"):
        GivenRedis(durable_redis.url)
    given.flush()
    assert durable_redis.ask("DBSIZE") == "0"


# --- PostgreSQL --------------------------------------------------------------------------------


async def test_every_new_database_is_empty_or_a_copy(postgres_server: Databases) -> None:
    first = postgres_server.new_database()
    postgres_server.execute("CREATE TABLE things AS SELECT 7 AS thing", first)
    copy, empty = postgres_server.new_database(first), postgres_server.new_database()
    assert await ask_postgres(copy, "SELECT thing FROM things") == 7
    assert await ask_postgres(empty, "SELECT to_regclass('things')") is None
    for url in (first, copy, empty):
        postgres_server.drop_database(url)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await ask_postgres(first, "SELECT 1")


async def test_a_database_is_dropped_even_with_an_open_connection(
    postgres_server: Databases,
) -> None:
    url = postgres_server.new_database()
    connection = await asyncpg.connect(url)
    postgres_server.drop_database(url)
    connection.terminate()
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await ask_postgres(url, "SELECT 1")


async def test_a_file_of_tests_has_a_database_in_utf8(postgres_url: str) -> None:
    assert await ask_postgres(postgres_url, "SHOW server_encoding") == "UTF8"
    assert await ask_postgres(postgres_url, "SELECT upper('x') || 'é'") == "Xé"


async def test_a_postgresql_killed_with_sigkill_restarts_with_its_data_and_address(
    mortal_postgres: PostgresServer,
) -> None:
    url = mortal_postgres.new_database()
    mortal_postgres.execute("CREATE TABLE things AS SELECT 7 AS thing", url)
    connection = await asyncpg.connect(url)
    mortal_postgres.kill()
    async with asyncio.timeout(10):
        while not connection.is_closed():
            await asyncio.sleep(0.01)
    mortal_postgres.start()
    assert await ask_postgres(url, "SELECT thing FROM things") == 7


async def test_a_paused_postgresql_replies_after_it_is_resumed(
    mortal_postgres: PostgresServer,
) -> None:
    mortal_postgres.pause()
    with pytest.raises(TimeoutError):
        await asyncpg.connect(mortal_postgres.url, timeout=0.2)
    mortal_postgres.resume()
    assert await ask_postgres(mortal_postgres.url, "SELECT 1") == 1


async def test_a_durable_postgresql_syncs_and_the_default_one_does_not(
    mortal_postgres: PostgresServer,
) -> None:
    assert await ask_postgres(mortal_postgres.url, "SHOW fsync") == "off"
    with PostgresServer(durable=True) as durable:
        assert await ask_postgres(durable.url, "SHOW fsync") == "on"


def test_postgres_does_not_run_as_root(mortal_postgres: PostgresServer) -> None:
    owner = Path(f"/proc/{mortal_postgres.pid}").stat().st_uid
    assert owner == (pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid())


def test_programs_in_a_folder_that_their_user_cannot_read_are_copied(
    mortal_postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root in a checkout that is 0700, with PostgreSQL unpacked inside."""
    folder = tmp_path / "postgresql"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "initdb").write_text("#!/bin/sh\nexit 0\n")
    (folder / "bin" / "initdb").chmod(0o755)
    tmp_path.chmod(0o700)
    program = Program(folder / "bin" / "initdb", {"LD_LIBRARY_PATH": f"{folder}/lib"}, folder)
    with tempfile.TemporaryDirectory(dir=mortal_postgres.folder.parent) as open_folder:
        Path(open_folder).chmod(0o755)
        monkeypatch.setattr(mortal_postgres, "program", program)
        monkeypatch.setattr(mortal_postgres, "folder", Path(open_folder))
        found, _ = mortal_postgres._reachable_programs(program)
        where = Path(open_folder) / "programs" if os.geteuid() == 0 else folder
        assert found.path == where / "bin" / "initdb"
        assert found.environment == {"LD_LIBRARY_PATH": f"{where}/lib"}
        assert mortal_postgres._run_as_user(found).returncode == 0


# --- RabbitMQ ----------------------------------------------------------------------------------


def put(url: str, message: str) -> None:
    """Returns once the server has it on its disk."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        connection.SimpleQueue("things").put(message)


def waiting(url: str) -> int:
    with Connection(url) as connection:
        return connection.SimpleQueue("things").qsize()


def test_every_rabbitmq_virtual_host_is_empty_and_a_dropped_one_is_gone(
    mortal_rabbit: RabbitServer,
) -> None:
    first, second = mortal_rabbit.new_host(), mortal_rabbit.new_host()
    put(first, "a thing")
    assert (waiting(first), waiting(second)) == (1, 0)
    mortal_rabbit.drop_host(first)
    with pytest.raises(NotAllowed, match="not found"):
        waiting(first)
    mortal_rabbit.drop_host(second)


def test_a_rabbitmq_killed_with_sigkill_restarts_with_its_data_and_address(
    mortal_rabbit: RabbitServer,
) -> None:
    url = mortal_rabbit.new_host()
    put(url, "a thing")
    port, pid = mortal_rabbit.port, mortal_rabbit.pid
    mortal_rabbit.kill()
    assert not mortal_rabbit.answers()
    mortal_rabbit.start()
    assert mortal_rabbit.port == port
    assert mortal_rabbit.pid != pid
    assert waiting(url) == 1


def test_a_paused_rabbitmq_replies_after_it_is_resumed(mortal_rabbit: RabbitServer) -> None:
    mortal_rabbit.pause()
    with socket.create_connection((HOST, mortal_rabbit.port), timeout=0.2) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        mortal_rabbit.resume()
        connection.settimeout(10)
        assert connection.recv(1)


def test_only_our_queue_of_a_given_rabbitmq_is_emptied(mortal_rabbit: RabbitServer) -> None:
    url = mortal_rabbit.new_host()
    put(url, "precious")
    with Connection(url) as connection:
        connection.SimpleQueue("dovetail").put("left over")
    given = GivenRabbit(url)
    assert given.new_host() == url
    with Connection(url) as connection:
        assert connection.SimpleQueue("dovetail").qsize() == 0
    given.drop_host(url)
    assert waiting(url) == 1


def test_a_rabbitmq_without_the_virtual_host_says_so(mortal_rabbit: RabbitServer) -> None:
    with pytest.raises(ServerFailed, match="no_such_vhost"):
        mortal_rabbit.drop_host("amqp://guest:guest@127.0.0.1/nowhere")


def test_nothing_is_left_of_a_rabbitmq_not_even_the_erlang_name_server(
    mortal_rabbit: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a port that was taken in between is left for another."""
    ports = [mortal_rabbit.port]
    free = server_module.free_port
    monkeypatch.setattr(server_module, "free_port", lambda: ports.pop() if ports else free())
    with RabbitServer() as server:
        assert server.port != mortal_rabbit.port
        pid, folder = server.pid, server.folder
        assert pid is not None
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        named = [Path(f"/proc/{child}/comm").read_text().strip() for child in children]
        assert "epmd" in named
    assert not any(is_alive(int(child)) for child in (pid, *children))
    assert not folder.exists()


# --- both: how they end ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
@pytest.mark.parametrize("how", ["closed", "paused and closed", "killed and closed"])
def test_nothing_is_left_of_a_stopped_server(kind: type[Server], how: str) -> None:
    with kind() as server:
        pid, folder, port = server.pid, server.folder, server.port
        assert pid is not None
        assert is_alive(pid)
        if how.startswith("paused"):
            server.pause()
        if how.startswith("killed"):
            server.kill()
    assert not is_alive(pid)
    assert not folder.exists()
    assert not processes_in(folder)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *[(kind, number) for kind in ("redis", "postgres") for number in ENDS],
        ("rabbitmq", signal.SIGKILL),
    ],
)
def test_a_server_ends_with_its_parent_however_the_parent_dies(
    kind: str, number: signal.Signals
) -> None:
    with start_user(kind) as user:
        _, pid, folder = read_words(user)
        user.send_signal(number)
        user.wait()
    assert eventually(lambda: not is_alive(int(pid)) and not Path(folder).exists())
    assert eventually(lambda: not processes_in(Path(folder)))


def test_a_server_ends_with_its_parent_even_if_a_child_of_the_parent_lives_on() -> None:
    """A forked child holds every pipe open, so the pipe alone would not tell."""
    with start_user("redis", "fork") as user:
        _, pid, folder, forked = read_words(user)
        child = int(forked)
        user.kill()
        user.wait()
        try:
            assert eventually(lambda: not is_alive(int(pid)) and not Path(folder).exists())
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def start_user(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", USER, *words], stdout=subprocess.PIPE, text=True)


def read_words(user: subprocess.Popen[str]) -> list[str]:
    assert user.stdout is not None
    return user.stdout.readline().split()


def processes_in(folder: Path) -> list[str]:
    """Everything that runs and names this folder: keepers, servers and their children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


# --- both: what goes wrong ---------------------------------------------------------------------


def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing() -> None:
    server = RedisServer(settings={"appendfsync": "sometimes"})
    with pytest.raises(ServerFailed, match="sometimes"):
        server.start()
    assert not server.folder.exists()
    assert not processes_in(server.folder)


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(
    kind: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a server that would answer in its place."""
    with kind() as first:
        ports = [first.port, free_port()]
        monkeypatch.setattr(server_module, "free_port", lambda: ports.pop(0))
        with kind() as second:
            assert second.port != first.port
            assert second.answers()


def test_a_port_is_outside_the_range_of_outgoing_connections() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert all(10_000 <= free_port() < int(given[0]) for _ in range(100))


def test_a_server_that_ended_by_itself_says_so_and_can_be_restarted(
    durable_redis: RedisServer,
) -> None:
    pid = durable_redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not durable_redis.runs)
    for act in (durable_redis.kill, durable_redis.stop, durable_redis.pause, durable_redis.resume):
        with pytest.raises(ServerFailed, match="does not run"):
            act()
    durable_redis.start()


def test_a_missing_server_program_fails_with_the_searched_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.servers.binaries.INSTALLED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TEST_SERVERS_FOLDER", str(tmp_path))
    for name, setting in (("redis-server", "TEST_REDIS_URL"), ("initdb", "TEST_DATABASE_URL")):
        with pytest.raises(NoServer) as caught:
            find(name)
        for clue in (name, "PATH", str(tmp_path), setting, "./dev test"):
            assert clue in str(caught.value)
    with pytest.raises(NoServer) as caught:
        find_rabbitmq()
    for clue in ("rabbitmq-server", "PATH", str(tmp_path), "TEST_RABBITMQ_URL", "./dev test"):
        assert clue in str(caught.value)


def test_unpacked_programs_are_found_with_their_libraries_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.servers.binaries.INSTALLED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TEST_SERVERS_FOLDER", str(tmp_path / "servers"))
    folder = tmp_path / "servers" / "postgresql"
    for version in ("9", "15", "17"):
        program = folder / "usr" / "lib" / "postgresql" / version / "bin" / "postgres"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir()
    assert find("postgres") == Program(
        folder / "usr/lib/postgresql/17/bin/postgres", {"LD_LIBRARY_PATH": str(libraries)}, folder
    )


@pytest.mark.parametrize("place", ["installed", "unpacked"])
def test_rabbitmq_is_found_with_its_erlang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("tests.servers.binaries.INSTALLED", tmp_path / "installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TEST_SERVERS_FOLDER", str(tmp_path / "servers"))
    folder = tmp_path / "servers" / "rabbitmq-server" if place == "unpacked" else tmp_path / place
    home = folder / "usr" / "lib" / "rabbitmq" / "lib" / "rabbitmq_server-3.10.8"
    starter = folder / "usr" / "lib" / "erlang" / "erts-13.1.5" / "bin" / "erlexec"
    (home / "plugins").mkdir(parents=True)
    with pytest.raises(NoServer, match="no Erlang"):
        find_rabbitmq()
    starter.parent.mkdir(parents=True)
    starter.touch(0o755)
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir()
    needs = {"LD_LIBRARY_PATH": str(libraries)} if place == "unpacked" else {}
    erlang = starter.parents[2]
    assert find_rabbitmq() == RabbitPrograms(home, erlang, starter.parent, needs)
