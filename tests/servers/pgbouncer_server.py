"""A PgBouncer of our own, in front of a PostgreSQL."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from .binaries import find
from .postgres_server import OTHER_USER, OWNER
from .server import HOST, Server


class PgBouncerServer(Server):
    name = "pgbouncer"

    def __init__(self, database_url: str, mode: str, **settings: str) -> None:
        """`mode` is transaction or session; the database it serves is the URL's."""
        super().__init__(find("pgbouncer"), OTHER_USER if os.geteuid() == 0 else None)
        self._target = urlsplit(database_url)
        self._settings = {"pool_mode": mode, "default_pool_size": "3", **settings}

    @property
    def url(self) -> str:
        return f"postgresql://{OWNER}@{HOST}:{self.port}{self._target.path}"

    def command(self) -> list[str]:
        name = self._target.path.removeprefix("/")
        server = f"host={self._target.hostname} port={self._target.port} dbname={name}"
        lines = [
            "[databases]",
            f"{name} = {server} user={OWNER}",
            "[pgbouncer]",
            f"listen_addr = {HOST}",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            *(f"{name} = {value}" for name, value in self._settings.items()),
        ]
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(lines))
        file.chmod(0o644)
        return [str(self.program.path), str(file)]

    def answers(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), 1).close()
        except OSError:
            return False
        return True
