"""A RabbitMQ of our own, with a new virtual host for each caller.

Erlang is started here and not by RabbitMQ's scripts: those of Debian want to be installed, to be
root and to have the machine's only node. Ports, cookie, name and folders are all private.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import subprocess
from pathlib import Path

from .binaries import RabbitPrograms, find_rabbitmq
from .server import HOST, Server, ServerFailed, free_port

USER = "guest"  # RabbitMQ makes it at the first start, and lets it in from here only
PROTOCOL = b"AMQP\x00\x00\x09\x01"
MOST_OF_A_GREETING = 4096
ANSWER_SECONDS = 30.0
PERMISSIONS = '<<".*">>, <<".*">>, <<".*">>'


class RabbitServer(Server):
    name = "rabbitmq"

    def __init__(self, *, settings: dict[str, str] | None = None) -> None:
        """`settings` are lines of rabbitmq.conf."""
        self._programs = find_rabbitmq()
        super().__init__(self._programs.epmd)
        self._settings = settings or {}
        self._node = f"dovetail-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        return self._url("%2F")

    def _url(self, host: str) -> str:
        return f"amqp://{USER}:{USER}@{HOST}:{self.port}/{host}"

    def command(self) -> list[str]:
        script = self.folder / "start.sh"
        script.write_text(self._script())
        return ["/bin/sh", str(script)]

    def prepare(self) -> None:
        """Erlang looks for a module in one folder after the other, so those of the many plugins
        that were not asked for cost most of a start."""
        libraries = self.folder / "libraries"
        libraries.mkdir()
        for path in _needed(self._programs):
            (libraries / path.name).symlink_to(path)
        lines = [f"{name} = {value}\n" for name, value in self._settings.items()]
        (self.folder / "rabbitmq.conf").write_text("".join(lines))
        (self.folder / "enabled_plugins").write_text("[].\n")

    def _script(self) -> str:
        # New ones at each start: one of them may have been taken by another program.
        self._environment = self._own_environment(epmd_port=free_port(), dist_port=free_port())
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in self._environment.items()
        ]
        epmd, emulator = (
            shlex.quote(str(self._programs.binaries / name)) for name in ("epmd", "erlexec")
        )
        flags = [
            *("-noinput", "-s", "rabbit", "boot", "-boot", "start_sasl"),
            *("+W", "w", "+S", "2:2", "+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none"),
            *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
            *("-kernel", "prevent_overlapping_partitions", "false"),
        ]
        return "\n".join(
            [
                *exports,
                # Else RabbitMQ starts one as a daemon, which would outlive it.
                f"setpriv --pdeathsig KILL {epmd} &",
                f"exec {emulator} {shlex.join(flags)}",
                "",
            ]
        )

    def _own_environment(self, epmd_port: int, dist_port: int) -> dict[str, str]:
        folder = str(self.folder)
        return {
            "HOME": folder,
            "LC_ALL": "C.UTF-8",
            "EMU": "beam",
            "PROGNAME": "erl",
            "ROOTDIR": str(self._programs.erlang),
            "BINDIR": str(self._programs.binaries),
            "ERL_LIBS": f"{folder}/libraries",
            "ERL_CRASH_DUMP_SECONDS": "0",
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(epmd_port),
            "RABBITMQ_HOME": str(self._programs.home),
            "RABBITMQ_NODENAME": f"{self._node}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/logs",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/none",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
        }

    def answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=5.0) as connection:
                connection.sendall(PROTOCOL)
                # It tells its name, which no other has.
                return self._node.encode() in connection.recv(MOST_OF_A_GREETING)
        except OSError:
            return False

    # --- virtual hosts ---------------------------------------------------------------------------

    def new_host(self) -> str:
        """The URL of one that is empty; costs some fifty milliseconds."""
        name = secrets.token_hex(6)
        host, who = f'<<"{name}">>', f'<<"{USER}">>'
        self._evaluate(
            f"ok = rabbit_vhost:add({host}, {who}), ok = rabbit_auth_backend_internal:"
            f"set_permissions({who}, {host}, {PERMISSIONS}, {who})."
        )
        return self._url(name)

    def drop_host(self, url: str) -> None:
        """With its queues; clients that are still connected are thrown out."""
        host, who = f'<<"{url.rpartition("/")[2]}">>', f'<<"{USER}">>'
        self._evaluate(f"ok = rabbit_vhost:delete({host}, {who}).")

    def _evaluate(self, erlang: str) -> None:
        cookie = (self.folder / ".erlang.cookie").read_text()
        words = [str(self._programs.binaries / "erl_call"), "-c", cookie, "-e"]
        done = subprocess.run(
            [*words, "-sname", f"{self._node}@localhost"],
            input=f"{erlang}\n",
            env={"PATH": os.defpath, **self._programs.environment, **self._environment},
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
        if done.stdout.strip() != "{ok, ok}":
            raise ServerFailed(f"rabbitmq did not do {erlang}\n{done.stdout}{done.stderr}")


def _needed(programs: RabbitPrograms) -> list[Path]:
    """The folders of RabbitMQ's own application and of all that it needs, as they name them."""
    folders = {path.name.rpartition("-")[0]: path for path in programs.home.glob("plugins/*-*")}
    found: dict[str, Path] = {}
    wanted = ["rabbit"]
    while wanted:
        name = wanted.pop()
        if name in found or name not in folders:
            continue  # what is not RabbitMQ's is Erlang's
        found[name] = folders[name]
        text = (folders[name] / "ebin" / f"{name}.app").read_text()
        listed = re.search(r"\{\s*applications\s*,\s*\[([^]]*)\]", text)
        wanted += re.findall(r"\w+", listed.group(1)) if listed else []
    return list(found.values())
