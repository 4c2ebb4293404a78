"""Everything at once: processes come, fall silent, wake up and die, while others give orders.

Each round is one run and a few seconds of that; DOVETAIL_ROUNDS says how many. The seed of a round
that failed is printed, and DOVETAIL_SEED begins with it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .process_forker import Child, ProcessForker
from .side_file import check_executions, starts

ROUNDS = int(os.environ.get("DOVETAIL_ROUNDS", "2"))
SEED = int(os.environ.get("DOVETAIL_SEED", random.randrange(1 << 32)))
EVENTS = 25
IMPATIENT = {"lease_seconds": 0.3, "max_crashes": 1000}
COMMITS = ["thread", "loop"]


class RunProcesses:
    """Processes that all have to do with one run."""

    def __init__(self, process_forker: ProcessForker, folder: Path, chance: random.Random) -> None:
        self._process_forker = process_forker
        self._folder = str(folder)
        self._chance = chance
        first = process_forker.start("run", folder=self._folder, workflow="everything", **IMPATIENT)
        self.run_id: str = first.hear()
        self.drivers = [first]
        self.orders: list[Child] = []

    def something_happens(self) -> None:
        happening = [self.come, self.come, self.fall_silent, self.wake_up, self.die]
        self._chance.choice([*happening, self.order, self.order, self.order])()
        time.sleep(self._chance.uniform(0.0, 0.15))

    def come(self) -> None:
        given = {"folder": self._folder, "commits": self._chance.choice(COMMITS), **IMPATIENT}
        self.drivers.append(self._process_forker.start("resume", **given))

    def fall_silent(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake_up(self) -> None:
        self._signal(signal.SIGCONT)

    def die(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._chance.choice(self.drivers).signal(number)

    def order(self) -> None:
        given = {"folder": self._folder, "commits": self._chance.choice(COMMITS)}
        command = self._chance.choice(["cancel", "retry", "retry"])
        self.orders.append(
            self._process_forker.start("order", command=command, run_id=self.run_id, **given)
        )

    def check(self) -> None:
        """Once all are awake again: every process is content, and the log is right."""
        for driver in self.drivers:
            with suppress(ProcessLookupError):
                driver.signal(signal.SIGCONT)
        for order in self.orders:
            assert order.wait() == 0 or "Conflict: run " in order.errors, order.errors
        self._process_forker.start("finish", folder=self._folder, workflow="everything").done()
        for driver in self.drivers:
            assert driver.wait() in (0, -signal.SIGKILL), driver.errors
        look = self._process_forker.start("look", folder=self._folder, run_id=self.run_id).done()
        assert (look["status"], look["owner"]) == ("COMPLETED", "none")
        assert look["differences"] == []
        executed = starts(self._folder, self.run_id)
        check_executions(executed, look["events"])
        of_once = [epoch for node, epoch, _ in executed if node == "once"]
        assert len(of_once) == len(set(of_once)), "it started twice in one epoch"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_under_random_faults_the_run_ends_and_its_log_is_consistent(
    process_forker: ProcessForker, tmp_path: Path, number: int
) -> None:
    print(f"DOVETAIL_SEED={SEED + number} DOVETAIL_ROUNDS=1")  # shown when the test fails
    crowd = RunProcesses(process_forker, tmp_path, random.Random(SEED + number))
    for _ in range(EVENTS):
        crowd.something_happens()
    crowd.check()
