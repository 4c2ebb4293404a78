"""Reads the code blocks of a page and does what they say, so that no page can lie for long.

A block that begins with "yaml flow.yaml" is a file of that name. A block "console" has commands
after `$ `, each followed by all that it prints; only times and run ids may differ.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

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


def commands(page: Path) -> list[tuple[str, str]]:
    """Each command of the console blocks, and what the page says it prints."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((command, printed))
    return found


def call(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As typed in that folder, without the settings of whoever runs the tests."""
    words = shlex.split(command)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    return subprocess.run(
        [BIN / words[0], *words[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )


def comparable(printed: str) -> str:
    """Without what differs from run to run: durations and ids."""
    printed = re.sub(r"\b\d+(\.\d+)?( ?m?s)\b", r"0\2", printed)
    printed = re.sub(r"\b[0-9a-f]{6}\b", "ID", printed)
    return "\n".join(line.rstrip() for line in printed.strip().splitlines())
