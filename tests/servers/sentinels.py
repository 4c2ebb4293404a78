"""A Redis with a replica and three sentinels that let the replica take over; and a sentinel that
names whichever server a test wants, for what is to be quick.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import hiredis

from .binaries import find
from .redis_server import RedisRefused, RedisServer, ask
from .server import HOST, START_SECONDS, Server, ServerFailed

SERVICE = "mymaster"
SENTINELS = 3
SILENT_MILLISECONDS = 1000
"""A server that says nothing for so long has failed."""


class SentinelServer(Server):
    name = "sentinel"

    def __init__(self, master: RedisServer) -> None:
        super().__init__(find("redis-server"))
        self._master = master

    def command(self) -> list[str]:
        conf = self.folder / "sentinel.conf"
        if not conf.exists():  # it writes down there what it has learnt
            conf.write_text(
                f"port {self.port}\nbind {HOST}\ndir {self.folder}\n"
                f"sentinel monitor {SERVICE} {HOST} {self._master.port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {SILENT_MILLISECONDS}\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
            )
        return [str(self.program.path), str(conf), "--sentinel"]

    def answers(self) -> bool:
        try:
            return f"process_id:{self.pid}\r\n" in ask(self.port, "INFO", "server")
        except (OSError, RedisRefused):
            return False

    def knows_all(self) -> bool:
        reported = ask(self.port, "INFO", "sentinel")
        return f"slaves=1,sentinels={SENTINELS}" in reported


class Sentinels:
    """Use `with`."""

    def __init__(self) -> None:
        quick = {"repl-diskless-sync-delay": "0"}
        self.master, self.replica = RedisServer(settings=quick), RedisServer(settings=quick)
        self.sentinels = [SentinelServer(self.master) for _ in range(SENTINELS)]

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with ExitStack() as stack:
            for server in (self.master, self.replica):
                stack.enter_context(server)
            follow(self.replica, self.master)
            for one in self.sentinels:
                stack.enter_context(one)
            until(lambda: all(one.knows_all() for one in self.sentinels))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, db: int = 0) -> str:
        hosts = ",".join(f"{HOST}:{one.port}" for one in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/{db}"


def follow(replica: RedisServer, master: RedisServer) -> None:
    """Returns when the replica has everything."""
    replica.ask("REPLICAOF", HOST, str(master.port))
    until(lambda: "master_link_status:up" in replica.ask("INFO", "replication"))


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + START_SECONDS
    while not true():
        if time.monotonic() > give_up:
            raise ServerFailed("the sentinels did not find each other")
        time.sleep(0.02)


class NamingSentinel:
    """Names the server that it is given; use `with`."""

    def __init__(self, port: int, password: str = "") -> None:
        self.names = port
        self.asked = 0
        self._password = password
        self._listening = socket.create_server((HOST, 0))
        self.port = self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A listening socket that is closed does not wake who waits for it.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def url(self, rest: str = f"/{SERVICE}", *, before: str = "") -> str:
        return f"redis+sentinel://{before}{HOST}:{self.port}{rest}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5.0)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        let_in = not self._password
        while data := connection.recv(4096):
            reader.feed(data)
            while (command := reader.gets()) is not False:
                let_in = let_in or command[-1] == self._password.encode()
                connection.sendall(self._reply(command) if let_in else b"-NOAUTH\r\n")

    def _reply(self, command: Any) -> bytes:
        words = [word.decode() for word in command]
        if words[0] == "AUTH":
            return b"+OK\r\n"
        if words[1] == "MASTERS":
            return b"*1\r\n" + _packed("name", SERVICE)
        if words[-1] != SERVICE:
            return b"*-1\r\n"
        self.asked += 1
        return _packed(HOST, str(self.names))


def _packed(*words: str) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed
