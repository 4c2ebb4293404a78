"""Where the programs of Redis, PostgreSQL and RabbitMQ, and a browser, are on this machine.

Those of the system come first, then Debian's packages as `./dev` unpacked them without installing
anything. It fetches nothing itself.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path("/")
"""Below it Debian installs; its PostgreSQL is not on PATH."""

PACKAGES = {
    "redis-server": ("redis-server", "TEST_REDIS_URL"),
    "postgres": ("postgresql", "TEST_DATABASE_URL"),
    "initdb": ("postgresql", "TEST_DATABASE_URL"),
    "rabbitmq-server": ("rabbitmq-server", "TEST_RABBITMQ_URL"),
    "pgbouncer": ("pgbouncer", ""),
    "promtool": ("prometheus", ""),
}
"""Debian's package of each program, and the setting that makes it unnecessary, if there is one."""


class NoServer(Exception):
    """Nothing here to start; says where it was looked for, and what would help."""


@dataclass(frozen=True)
class Program:
    path: Path
    environment: dict[str, str]
    """What it must be started with, beside what every program needs."""
    unpacked: Path | None = None
    """The folder that holds all it needs, if it is one that may be copied elsewhere."""

    def copied_to(self, folder: Path) -> Program:
        """The same program in a copy of its folder."""
        assert self.unpacked is not None
        libraries = self.environment["LD_LIBRARY_PATH"].replace(str(self.unpacked), str(folder))
        path = folder / self.path.relative_to(self.unpacked)
        return Program(path, {"LD_LIBRARY_PATH": libraries}, folder)


def find(name: str) -> Program:
    """Of `redis-server`, `postgres` or `initdb`, the first that is there."""
    installed = shutil.which(name, path=os.environ.get("PATH", os.defpath))
    if installed is not None:
        return Program(Path(installed), {})
    for path in _of_debian(INSTALLED, name):
        return Program(path, {})
    package, setting = PACKAGES[name]
    folder = unpacked_folder() / package
    for path in _of_debian(folder, name):
        return Program(path, _libraries(folder), folder)
    given = f", and {setting} names no server that runs" if setting else ""
    raise NoServer(
        f"no {name} to start: none on PATH, in /usr/lib/postgresql or in {folder}{given}. ./dev "
        f"test fetches Debian's {package}; to install it yourself also works"
    )


@dataclass(frozen=True)
class RabbitPrograms:
    """RabbitMQ is no program but a library of Erlang."""

    home: Path
    """Of RabbitMQ: `plugins` is in it."""
    erlang: Path
    """Of Erlang: `lib` is in it."""
    binaries: Path
    """Of Erlang: `erlexec` is in it, which starts it."""
    environment: dict[str, str]

    @property
    def epmd(self) -> Program:
        return Program(self.binaries / "epmd", self.environment)


def find_rabbitmq() -> RabbitPrograms:
    """The first that is there, of the system or as `./dev` unpacked it."""
    package, setting = PACKAGES["rabbitmq-server"]
    unpacked = unpacked_folder() / package
    for root in (INSTALLED, unpacked):
        homes = [*_home_on_path("rabbitmq-server"), *root.glob("usr/lib/rabbitmq/lib/*")]
        erlangs = [*_home_on_path("erl"), root / "usr" / "lib" / "erlang"]
        for home in (each for each in homes if (each / "plugins").is_dir()):
            for starter in (path for each in erlangs for path in each.glob("erts-*/bin/erlexec")):
                libraries = {} if root == INSTALLED else _libraries(unpacked)
                return RabbitPrograms(home, starter.parents[2], starter.parent, libraries)
    raise NoServer(
        f"no rabbitmq-server to start, or no Erlang for it: none on PATH, in /usr/lib/rabbitmq or "
        f"in {unpacked}, and {setting} names no server that runs. ./dev test fetches Debian's "
        f"{package}; to install it yourself also works"
    )


def find_browser() -> Program:
    """Debian's Chromium. Its own script would read settings of the system; the program does not."""
    installed = shutil.which("chromium", path=os.environ.get("PATH", os.defpath))
    if installed is not None:
        return Program(Path(installed), {})
    folder = unpacked_folder() / "chromium"
    path = folder / "usr" / "lib" / "chromium" / "chromium"
    if path.exists():
        found = _libraries(folder)["LD_LIBRARY_PATH"]
        # PulseAudio has a part of its library in a folder below.
        below = [str(each.parent) for each in folder.glob("usr/lib/*/*/libpulsecommon-*")]
        return Program(path, {"LD_LIBRARY_PATH": ":".join([found, *below])}, folder)
    raise NoServer(
        f"no chromium to start: none on PATH or in {folder}. ./dev test fetches Debian's chromium; "
        "to install it yourself also works"
    )


def _home_on_path(name: str) -> list[Path]:
    """The folder above the one that holds this program, wherever links lead."""
    found = shutil.which(name, path=os.environ.get("PATH", os.defpath))
    return [] if found is None else [Path(found).resolve().parent.parent]


def unpacked_folder() -> Path:
    """Where `./dev` puts Debian's packages."""
    return Path(os.environ.get("TEST_SERVERS_FOLDER") or ROOT / ".boot" / "servers")


def _libraries(folder: Path) -> dict[str, str]:
    found = map(str, [*folder.glob("usr/lib/*-linux-*"), *folder.glob("lib/*-linux-*")])
    return {"LD_LIBRARY_PATH": ":".join(found)}


def _of_debian(root: Path, name: str) -> list[Path]:
    """The newest first."""
    usual = [root / "usr" / folder / name for folder in ("bin", "sbin")]
    versions = (root / "usr" / "lib" / "postgresql").glob(f"*/bin/{name}")
    newest = sorted(versions, key=lambda path: int(path.parts[-3]), reverse=True)
    return [*(path for path in usual if path.exists()), *newest]
