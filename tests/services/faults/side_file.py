"""What was executed, as the handlers themselves wrote it down (see `handlers.write_down`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

Start = tuple[str, int, int]
"""Node, epoch, attempt."""


class Execution(NamedTuple):
    """One line of the side file."""

    run_id: str
    start: Start
    pid: int
    time: float
    seconds: float
    """How long it takes."""

    @property
    def next(self) -> tuple[str, Start]:
        """What the next execution begins."""
        node, epoch, attempt = self.start
        return self.run_id, (node, epoch, attempt + 1)


def executions(side: Path) -> list[Execution]:
    """In order."""
    found = []
    for line in side.read_text().splitlines() if side.exists() else ():
        run_id, node, epoch, attempt, pid, at, seconds = line.split()
        start = (node, int(epoch), int(attempt))
        found.append(Execution(run_id, start, int(pid), float(at), float(seconds)))
    return found
