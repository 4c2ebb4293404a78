"""Reads the code blocks of a page and does what they say, so that no page can lie for long.

A block that begins with "yaml flow.yaml" is a file of that name. A block "console" has commands
after `$ `, each followed by all that it prints; only times and run ids may differ. A block
"console on redis" is the same where the services of the block "sh services" are at work.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PORT = "localhost:8700"
"""Where the server of every page is."""
MARK = "--- what the next command prints ---"

_BLOCK = re.compile(r"^```(\w+)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    name: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    found = [Block(*match.groups()) for match in _BLOCK.finditer(page.read_text())]
    return [block for block in found if block.language == language]


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that have a file's name into the folder; returns the names."""
    named = [Block(*match.groups()) for match in _BLOCK.finditer(page.read_text())]
    files = [block for block in named if "." in block.name]
    for block in files:
        (folder / block.name).write_text(block.text)
    return [block.name for block in files]


def commands(page: Path, where: str = "") -> list[tuple[str, str]]:
    """Each command of the console blocks of that name, and what the page says it prints."""
    found = []
    for block in blocks(page, "console"):
        if block.name != where:
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((command, printed))
    return found


def call(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """As typed in that folder, without the settings of the user."""
    words = shlex.split(command)
    return subprocess.run(
        [BIN / words[0], *words[1:]],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )


def typed(page: Path, place: str, folder: Path, **env: str) -> list[tuple[str, str, str]]:
    """Each command, what the page says it prints, and what it prints in one shell."""
    reported = commands(page)
    script = "".join(f"echo '{MARK}'\n{command.replace(PORT, place)}\n" for command, _ in reported)
    done = subprocess.run(
        ["bash", "-u"],
        cwd=folder,
        env=environment(PATH=f"{BIN}:/usr/bin:/bin", **env),
        input=script,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(reported), done.stdout
    return [(command, says, out) for (command, says), out in zip(reported, printed, strict=True)]


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")} | more


@contextmanager
def services(page: Path, folder: Path, redis_url: str, **settings: str) -> Iterator[dict[str, str]]:
    """The services of the page, at work; gives what a command must have set to use them."""
    env = {"DOVETAIL_REDIS_URL": redis_url, **settings}
    (block,) = [block for block in blocks(page, "sh") if block.name == "services"]
    started = []
    try:
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[1] == "serve":
                words += ["--port", "0"]  # the one that the page means may be taken
            log = folder / f"{words[1]}.log"
            with log.open("wb") as out:
                command = [BIN / words[0], *words[1:]]
                process = subprocess.Popen(
                    command, cwd=folder, env=environment(**env), stdout=out, stderr=out
                )
            started.append((process, log))
        for _, log in started:
            _wait_for_start(log)
        yield env
        for process, log in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
    except BaseException:
        for _, log in started:  # with what pytest tells of the failure
            print(f"--- {log.name}\n{log.read_text()}")
        raise
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


def _wait_for_start(log: Path) -> None:
    deadline = time.monotonic() + 60
    while not re.search("started|serves|ready", log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def comparable(printed: str) -> str:
    """Without what differs from run to run: durations and ids."""
    printed = re.sub(r"\b\d+(\.\d+)?( ?m?s)\b", r"0\2", printed)
    printed = re.sub(r"\b[0-9a-f]{6}\b", "ID", printed)
    # A busy machine takes seconds for a moment, and its columns are as wide as what is in them.
    printed = re.sub(r"(?<=\S)  +", "  ", printed.replace("0 s ago", "just now"))
    return "\n".join(line.rstrip() for line in printed.strip().splitlines())
