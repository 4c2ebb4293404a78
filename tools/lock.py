"""Pins every set of requirements again, with hashes and download sizes: `./dev lock`.

Each set is a superset of `run`, so one environment can grow from one to the next. The files
name no index: the user's own is used. Runs at the root of the checkout.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

PROJECT = ["pyproject.toml", "--all-extras", "requirements/build.in"]

# In this order: a later set is held to the versions of an earlier one.
SETS = {
    "boot": ["requirements/boot.in"],
    "client": ["requirements/client.in"],
    "editor": ["requirements/editor.in"],
    "maps": ["requirements/maps.in"],
    "run": PROJECT,
    "test": [*PROJECT, "requirements/test.in", "-c", "requirements/run.txt"],
    "bench": [*PROJECT, "requirements/bench.in", "-c", "requirements/test.txt"],
}

ONLY_SOURCE = {"crontab"}
"""Published without a wheel, but pure Python: it is built where it is installed, not compiled."""


def compile_pins(uv: str, name: str, sources: list[str], arguments: list[str]) -> None:
    pins = f"requirements/{name}.txt"
    compiler = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    hashed = ["--generate-hashes", "--custom-compile-command", "./dev lock"]
    subprocess.run([*compiler, *sources, *hashed, "--output-file", pins, *arguments], check=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "pylock.toml"
        subprocess.run(
            [*compiler, pins, "--format", "pylock.toml", "--output-file", str(found)], check=True
        )
        wheels = wheels_for_this_machine(tomllib.loads(found.read_text()))
    with ThreadPoolExecutor(8) as pool:
        size = sum(pool.map(download_size, wheels))
    note = f"# download: {round(size / 1e6)} MB, packages: {len(wheels)}\n"
    Path(pins).write_text(note + Path(pins).read_text())
    print(f"{pins}  {note[2:-1]}")


def wheels_for_this_machine(lock: dict[str, Any]) -> list[str]:
    """The address of what is downloaded, a wheel, for each package that would be installed."""
    preference = {tag: place for place, tag in enumerate(sys_tags())}
    chosen = []
    for package in lock["packages"]:
        if "marker" in package and not Marker(str(package["marker"])).evaluate():
            continue
        if package["name"] in ONLY_SOURCE and "wheels" not in package:
            chosen.append(package["sdist"]["url"])
            continue
        ranked = []
        for wheel in package["wheels"]:
            tags = parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])[3]
            places = [preference[tag] for tag in tags if tag in preference]
            if places:
                ranked.append((min(places), wheel["url"]))
        if not ranked:
            sys.exit(f"{package['name']} has no wheel for this machine: it would be compiled here")
        chosen.append(min(ranked)[1])
    return chosen


def download_size(address: str) -> int:
    request = urllib.request.Request(address, method="HEAD")
    with urllib.request.urlopen(request, context=ssl.create_default_context()) as answer:
        return int(answer.headers["Content-Length"])


def main() -> None:
    uv, *arguments = sys.argv[1:]
    for name, sources in SETS.items():
        compile_pins(uv, name, sources, arguments)


if __name__ == "__main__":
    main()
