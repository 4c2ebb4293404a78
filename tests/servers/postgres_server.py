"""A PostgreSQL of our own, with a new database for each caller.

PostgreSQL refuses root, so as root it runs as `nobody`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .binaries import NoServer, Program, find
from .server import HOST, Server, ServerFailed

OTHER_USER = "nobody"
OWNER = "dovetail"
AFTERMATH_SECONDS = 20.0
"""How long the children of a killed server may take to notice; usually a few milliseconds."""


class Databases:
    """New databases in a running PostgreSQL, ours or a given one."""

    def __init__(self, url: str) -> None:
        self.url = url

    def new_database(self, template: str | None = None) -> str:
        """The URL of a database of its own: empty, or a copy of the one at the URL `template`,
        which costs some ten milliseconds whatever is in it. No client may be connected to that."""
        name = f"dovetail_{secrets.token_hex(6)}"
        copied = f' TEMPLATE "{_database(template)}"' if template is not None else ""
        self.execute(f'CREATE DATABASE "{name}"{copied}')
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    def drop_database(self, url: str) -> None:
        """Clients that are still connected are thrown out."""
        self.execute(f'DROP DATABASE IF EXISTS "{_database(url)}" WITH (FORCE)')

    def execute(self, statement: str, url: str | None = None) -> None:
        """One statement on a connection of its own, from anywhere: also where a loop runs."""
        _in_a_thread(_execute(url or self.url, statement))


class PostgresServer(Server, Databases):
    name = "postgres"
    graceful = signal.SIGINT  # does not wait for its clients to leave
    farewell = signal.SIGQUIT  # at once, but with its shared memory given back

    def __init__(self, *, durable: bool = False, settings: dict[str, str] | None = None) -> None:
        """Not `durable`: survives kill -9 of itself, but not a power cut; much faster."""
        user = OTHER_USER if os.geteuid() == 0 else None
        initdb = find("initdb")
        Server.__init__(self, find("postgres"), user)
        try:
            self._initdb, self.program = self._reachable_programs(initdb)
        except BaseException:
            self.close()
            raise
        self.data = self.folder / "data"
        self._settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            # Files in its folder, so that a killed one leaves nothing elsewhere.
            "dynamic_shared_memory_type": "mmap",
            "max_connections": "200",
            "jit": "off",
            **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
            **(settings or {}),
        }

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"postgresql://{OWNER}@{HOST}:{self.port}/postgres"

    def command(self) -> list[str]:
        words = [str(self.program.path), "-D", str(self.data), "-p", str(self.port)]
        for name, value in self._settings.items():
            words += ["-c", f"{name}={value}"]
        return words

    def prepare(self) -> None:
        done = self._run_as_user(
            self._initdb,
            *("--pgdata", str(self.data), "--username", OWNER, "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        )
        if done.returncode:
            raise ServerFailed(f"initdb failed:\n{done.stderr or done.stdout}")

    def answers(self) -> bool:
        from asyncpg import InterfaceError, InternalClientError, PostgresError

        try:
            # An error in any other PostgreSQL: there is no such folder in its settings.
            self.execute(f"SELECT 1 / (current_setting('data_directory') = '{self.data}')::int")
        except (OSError, PostgresError, InterfaceError, InternalClientError):
            return False
        return True

    def _start(self) -> None:
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while True:
            try:
                super()._start()
                return
            except ServerFailed as failure:
                # The children of a killed one hold its memory until they notice.
                if "still in use" not in str(failure) or time.monotonic() > deadline:
                    raise
                (self.folder / "log").rename(self.folder / "log.before")
                time.sleep(0.02)

    def kill(self) -> None:
        """With its processes for connections: an orphan answers until it looks for its parent."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        super().kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def close(self) -> None:
        if self.pid is None:
            self._give_back_memory()
        super().close()

    def _give_back_memory(self) -> None:
        """A killed one could not: a few bytes of System V memory, named in its lock file."""
        with contextlib.suppress(OSError, IndexError):
            _, segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()
            subprocess.run(["ipcrm", "-m", segment], capture_output=True, check=False)

    # --- as another user -----------------------------------------------------------------------

    def _reachable_programs(self, initdb: Program) -> tuple[Program, Program]:
        """Both programs where the server's user can run them, in a copy if need be."""
        try:
            if self._run_as_user(initdb, "--version").returncode == 0:
                return initdb, self.program
            problem = f"{self._user} cannot run {initdb.path}"
        except PermissionError as error:
            problem = f"{self._user} cannot reach {initdb.path}: {error.strerror}"
        if initdb.unpacked is None:
            raise NoServer(f"{problem}. Install Debian's postgresql, or set TEST_DATABASE_URL")
        copy = self.folder / "programs"
        shutil.copytree(initdb.unpacked, copy, symlinks=True)
        copy.chmod(0o755)
        return initdb.copied_to(copy), self.program.copied_to(copy)

    def _run_as_user(self, program: Program, *words: str) -> subprocess.CompletedProcess[str]:
        other: dict[str, Any] = {}
        if self._user is not None:
            other = {"user": self._user, "group": "nogroup", "extra_groups": []}
        return subprocess.run(
            [str(program.path), *words],
            cwd=self.folder,
            env={"PATH": os.defpath, "LC_ALL": "C", **program.environment},
            capture_output=True,
            text=True,
            check=False,
            **other,
        )


def _database(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


async def _execute(url: str, statement: str) -> None:
    import asyncpg  # here: most test runs need no PostgreSQL and would pay for it

    connection = await asyncpg.connect(url, timeout=5.0)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _in_a_thread(work: Coroutine[Any, Any, None]) -> None:
    """A loop of its own beside the one that may run in this thread."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
