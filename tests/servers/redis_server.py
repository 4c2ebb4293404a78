"""A Redis of our own, alone or as a cluster of one.

It keeps every write, as the contract asks of a Redis that we serve from: appendonly, nothing
evicted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Literal

from .binaries import find
from .server import HOST, START_SECONDS, Server, ServerFailed, free_port

SLOTS = 16_384


class RedisServer(Server):
    name = "redis"

    def __init__(
        self,
        *,
        fsync: Literal["everysec", "always", "no"] = "everysec",
        cluster: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are lines of redis.conf, and win over ours."""
        super().__init__(find("redis-server"))
        self._cluster = cluster
        self._bus_port = 0
        self._settings = {
            "bind": HOST,
            "save": "",
            "appendonly": "yes",
            "appendfsync": fsync,
            "maxmemory-policy": "noeviction",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def command(self) -> list[str]:
        settings = {**self._settings, "port": str(self.port), "dir": str(self.folder)}
        if self._cluster:
            # By default it is the port + 10000, which may be taken.
            self._bus_port = self._bus_port or free_port()
            settings |= {"cluster-enabled": "yes", "cluster-port": str(self._bus_port)}
        words = [str(self.program.path)]
        for name, value in settings.items():
            words += [f"--{name}", value]
        return words

    def answers(self) -> bool:
        try:
            ours = f"process_id:{self.pid}\r\n" in self.ask("INFO", "server")
            self.ask("DBSIZE")  # refused while it loads its data
        except (OSError, RedisRefused):
            return False
        return ours and (not self._cluster or self._slots_are_served())

    def after_first_start(self) -> None:
        if not self._cluster:
            return
        self.ask("CLUSTER", "ADDSLOTS", *map(str, range(SLOTS)))
        deadline = time.monotonic() + START_SECONDS
        while "cluster_state:ok" not in self.ask("CLUSTER", "INFO"):  # it takes Redis two seconds
            if time.monotonic() > deadline:
                raise ServerFailed(f"redis did not become a cluster:\n{self._end_of_log()}")
            time.sleep(0.02)

    def _slots_are_served(self) -> bool:
        info = self.ask("CLUSTER", "INFO")
        return "cluster_state:ok" in info or "cluster_slots_assigned:0" in info

    def flush(self) -> None:
        """Forgets every key, and every script."""
        self.ask("FLUSHALL")
        self.ask("SCRIPT", "FLUSH")

    def ask(self, *words: str) -> str:
        return ask(self.port, *words)


class RedisRefused(Exception):
    """Redis said that the command is an error."""


def ask(port: int, *words: str) -> str:
    """One command on a connection of its own; for answers of one line or one text."""
    with socket.create_connection((HOST, port), timeout=5.0) as connection:
        parts = [f"*{len(words)}\r\n", *(f"${len(w.encode())}\r\n{w}\r\n" for w in words)]
        connection.sendall("".join(parts).encode())
        with connection.makefile("rb") as answer:
            first = answer.readline().decode().rstrip()
            match first[:1]:
                case "$":
                    return answer.read(max(0, int(first[1:]))).decode()
                case "+" | ":":
                    return first[1:]
                case "-":
                    raise RedisRefused(first[1:])
                case _:
                    raise OSError(f"redis answered {first!r} to {words[:2]}")
