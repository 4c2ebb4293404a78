"""`dovetail` from a process that has it loaded: most of the time of a command goes into imports.

For each call it forks, and the child is what the installed script would be after its imports: with
its own folder, environment, streams and end. A test of a start, a signal or a terminal starts
the script itself.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

STREAMS = ("in", "out", "err")


class WarmDovetail:
    """Use `with`. Calls may be made at once: each has a connection of its own."""

    def __init__(self, script: str, environment: dict[str, str]) -> None:
        self._script = script
        self._environment = environment

    def __enter__(self) -> WarmDovetail:
        self._folder = TemporaryDirectory(prefix="dovetail-warm-")
        self._address = f"{self._folder.name}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, self._address, self._script],
            env=self._environment,
            stdin=subprocess.PIPE,  # it ends with us, for this is closed then
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)
        self._folder.cleanup()

    def __call__(
        self, args: list[str], folder: Path, env: dict[str, str], stdin: bytes, seconds: float
    ) -> tuple[int, bytes, bytes]:
        """The exit code, negative if a signal ended it, and what was written to both streams."""
        with (
            TemporaryDirectory(dir=self._folder.name) as streams_folder,
            socket.socket(socket.AF_UNIX) as line,
        ):
            files = {stream: Path(streams_folder, stream) for stream in STREAMS}
            for stream, file in files.items():
                file.write_bytes(stdin if stream == "in" else b"")
            order = {
                "args": args,
                "folder": str(folder),
                "env": env,
                "streams_folder": streams_folder,
            }
            line.settimeout(seconds)
            line.connect(self._address)
            line.sendall(json.dumps(order).encode())
            line.shutdown(socket.SHUT_WR)
            answers = line.makefile()
            pid = int(answers.readline())
            try:
                code = int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
            return code, files["out"].read_bytes(), files["err"].read_bytes()


# ── in the process that forks ────────────────────────────────────────────────────────────


def load() -> None:
    """Every module of the command line, and with them what they need."""
    package = import_module("dovetail.cli")
    for module in pkgutil.walk_packages(package.__path__, "dovetail.cli."):
        import_module(module.name)
    for name in (
        "dovetail.api.app",
        "dovetail.api.server",
        "dovetail.client.arguments",
        "dovetail.wiring.embedded",
        "dovetail.handlers.builtin",
        "dovetail.engine.commands",
    ):
        import_module(name)


def serve(address: str, script: str) -> None:
    """Returns in a child, with everything as the script has it, and ends with its user."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    os.write(1, b"ready\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are not waited for here
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if listener not in readable:
            sys.exit()
        line, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            order = json.loads(line.makefile().read())
            pid = os.fork()
            if pid:
                _tell_its_end(line, pid)
            line.close()
            become(order, script)
            return
        line.close()


def _tell_its_end(line: socket.socket, pid: int) -> NoReturn:
    line.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(order: dict[str, object], script: str) -> None:
    os.chdir(str(order["folder"]))
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    for number, stream in enumerate(STREAMS):
        file = os.open(
            f"{order['streams_folder']}/{stream}", os.O_WRONLY if number else os.O_RDONLY
        )
        os.dup2(file, number)
        os.close(file)
    sys.argv = [script, *order["args"]]  # type: ignore[misc]
    sys.path.insert(0, str(Path(script).parent))


if __name__ == "__main__":
    load()
    serve(*sys.argv[1:])
    from dovetail.cli import main

    main()
