"""Where the programs of Redis and PostgreSQL are on this machine.

Those of the system come first, then Debian's packages as `./dev` unpacked them without installing
anything. It fetches nothing itself. What it must not know: how a server is started.
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
}
"""Debian's package of each program, and the setting that makes it unnecessary."""


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
        libraries = map(str, [*folder.glob("usr/lib/*-linux-*"), *folder.glob("lib/*-linux-*")])
        return Program(path, {"LD_LIBRARY_PATH": ":".join(libraries)}, folder)
    raise NoServer(
        f"no {name} to start: none on PATH, in /usr/lib/postgresql or in {folder}, and {setting} "
        f"names no server that runs. ./dev test fetches Debian's {package}; to install it yourself "
        "also works"
    )


def unpacked_folder() -> Path:
    """Where `./dev` puts Debian's packages."""
    return Path(os.environ.get("TEST_SERVERS_FOLDER") or ROOT / ".boot" / "servers")


def _of_debian(root: Path, name: str) -> list[Path]:
    """The newest first."""
    usual = root / "usr" / "bin" / name
    versions = (root / "usr" / "lib" / "postgresql").glob(f"*/bin/{name}")
    newest = sorted(versions, key=lambda path: int(path.parts[-3]), reverse=True)
    return [usual, *newest] if usual.exists() else newest
