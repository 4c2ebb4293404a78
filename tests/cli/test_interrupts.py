"""Ctrl-C and SIGTERM with real signals, whatever the handlers do.

All the runs of this file are started together and interrupted together: each has to wait for
most of its time, and none has to wait for another.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import SECONDS, SOON, Shell

HANDLERS = """
import asyncio, pathlib, time
from dovetail import handler

def mark(ctx, what="started"):
    pathlib.Path(f"{ctx.params['case']}.{what}").touch()

@handler
async def waits(config, ctx):
    mark(ctx)
    try:
        await asyncio.sleep(60)
    finally:
        mark(ctx, "stopped")

@handler
def blocks_a_thread(config, ctx):
    mark(ctx)
    time.sleep(60)

@handler
async def uses_to_thread(config, ctx):
    mark(ctx)
    await asyncio.to_thread(time.sleep, 60)

@handler
async def swallows_the_cancellation(config, ctx):
    mark(ctx)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@handler
async def blocks_the_loop(config, ctx):
    mark(ctx)
    time.sleep(60)
"""

NAMES = (
    "waits",
    "blocks_a_thread",
    "uses_to_thread",
    "swallows_the_cancellation",
    "blocks_the_loop",
)


@dataclass
class Case:
    name: str
    handler: str
    signals: list[signal.Signals]
    args: tuple[str, ...] = ()
    drain: str = "0.3"
    code: int | None = None
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    stopped: bool = False
    status: str = ""
    """Of the run, as the file has it afterwards."""


CASES = [
    *(Case(f"ctrl_c_{name}", name, [signal.SIGINT]) for name in NAMES),
    *(Case(f"terminated_{name}", name, [signal.SIGTERM]) for name in NAMES),
    Case("terminated_twice", "waits", [signal.SIGTERM, signal.SIGTERM], drain="60"),
    Case("as_json", "waits", [signal.SIGINT], ("--json",)),
    Case("twice", "blocks_the_loop", [signal.SIGINT, signal.SIGINT]),
]
PAUSE = 0.3  # between the first signal and the second


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    directory = tmp_path_factory.mktemp("interrupts")
    shell = Shell(directory)
    shell.write("mine.py", HANDLERS)
    running = {}
    for case in CASES:
        shell.write(
            f"{case.name}.yaml",
            f"name: f\nnodes:\n  - {{id: stuck, handler: {case.handler}}}\n"
            "  - {id: after, handler: output, dependencies: [stuck]}\n",
        )
        asked = (f"{case.name}.yaml", "--handlers", "mine.py", "-p", f"case={case.name}")
        running[case.name] = shell.start(
            "run", *asked, *case.args, DOVETAIL_DRAIN_SECONDS=case.drain
        )
    try:
        _wait_for([directory / f"{case.name}.started" for case in CASES])
        time.sleep(0.2)  # so that each is inside its handler's wait
        _interrupt(running)
        for case in CASES:
            case.stopped = (directory / f"{case.name}.stopped").exists()
        for run in json.loads(shell("runs", "list", "--json").out)["items"]:
            case = next(case for case in CASES if case.name == run["params"]["case"])
            case.status = run["status"]
        yield {case.name: case for case in CASES}
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def _wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "a run did not start its handler"
        time.sleep(0.02)


def _interrupt(running: dict[str, subprocess.Popen[bytes]]) -> None:
    began = time.monotonic()
    for case in CASES:
        running[case.name].send_signal(case.signals[0])
    left = {case.name: case for case in CASES}
    again = [case for case in CASES if len(case.signals) > 1]
    while left and time.monotonic() - began < SECONDS:
        if again and time.monotonic() - began >= PAUSE:
            case = again.pop()
            running[case.name].send_signal(case.signals[1])
        for name in [name for name in left if running[name].poll() is not None]:
            case = left.pop(name)
            case.seconds = time.monotonic() - began
            out, err = running[name].communicate()
            case.code, case.out, case.err = running[name].returncode, out.decode(), err.decode()
        time.sleep(0.01)


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_cancels_the_run_soon_with_exit_code_130(cases: dict[str, Case], name: str) -> None:
    case = cases[f"ctrl_c_{name}"]
    assert case.code == 130
    assert case.seconds < SOON
    assert "CANCELLED" in case.out + case.err
    for noise in ("Traceback", "was destroyed", "never retrieved", "never awaited", "Fatal"):
        assert noise not in case.out + case.err


@pytest.mark.parametrize("name", NAMES)
def test_after_ctrl_c_the_file_has_the_run_as_cancelled_whatever_the_handler_did(
    cases: dict[str, Case], name: str
) -> None:
    assert cases[f"ctrl_c_{name}"].status == "CANCELLED"
    assert cases["twice"].status == "CANCELLED"


def test_a_cancelled_run_prints_each_cancelled_node_and_the_next_command(
    cases: dict[str, Case],
) -> None:
    lines = cases["ctrl_c_waits"].out.splitlines()
    assert lines[-4].startswith("– stuck  ")
    assert lines[-4].endswith("s  cancelled")
    assert lines[-3] == "– after  cancelled"
    assert lines[-2].startswith("CANCELLED ")
    assert re.fullmatch(
        r"go on with:  dovetail runs retry [0-9a-f]{6} --handlers mine\.py"
        r"      reruns 2, reuses 0",
        lines[-1],
    )
    assert cases["ctrl_c_waits"].err == ""


def test_a_handler_is_asked_to_stop(cases: dict[str, Case]) -> None:
    assert cases["ctrl_c_waits"].stopped


@pytest.mark.parametrize("name", NAMES)
def test_sigterm_hands_the_run_back_with_exit_code_0_for_any_handler(
    cases: dict[str, Case], name: str
) -> None:
    case = cases[f"terminated_{name}"]
    assert case.code == 0
    assert case.status == "RUNNING"
    assert "go on with:  dovetail runs resume " in case.out + case.err
    assert case.seconds < 5.0
    for noise in ("Traceback", "was destroyed", "never retrieved", "never awaited", "Fatal"):
        assert noise not in case.out + case.err


def test_a_second_sigterm_does_not_wait_for_the_drain(cases: dict[str, Case]) -> None:
    case = cases["terminated_twice"]
    assert case.code == 0
    assert case.seconds < PAUSE + 1.0
    assert "handed back as it was; go on with:  dovetail runs resume " in case.err


def test_a_cancelled_run_is_a_json_document_too(cases: dict[str, Case]) -> None:
    case = cases["as_json"]
    assert case.code == 130
    run = json.loads(case.out)
    assert run["status"] == "CANCELLED"
    assert {node["reason"] for node in run["nodes"]} == {"run_cancelled"}
    assert case.err == ""


def test_a_second_ctrl_c_ends_the_command_immediately(cases: dict[str, Case]) -> None:
    case = cases["twice"]
    assert case.code == 130
    assert case.seconds < PAUSE + 1.0
    assert "CANCELLED" in case.err
