"""Log lines: one per record, from any logger, without secrets, in both forms."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from dovetail.config import Settings
from dovetail.core.events import Token
from dovetail.engine.listener import REQUEST_ID
from dovetail.engine.ports import Task
from dovetail.engine.worker import log_failure
from dovetail.telemetry.logs import show_logs

from .conftest import Three
from .services import SECRET, node, wait_for

SETTINGS = {"secrets": {"KEY": SECRET}, "tokens": ("a-token-of-the-api:read",)}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dovetail")
    attempts = logging.getLogger("dovetail.attempts")
    handlers, level = list(root.handlers), ours.level
    yield
    attempts.setLevel(logging.NOTSET)
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    ours.setLevel(level)


def test_a_worker_writes_one_json_object_for_each_record(three: Three) -> None:
    run_id = three.api.run(node("a", "talks"), node("b", "spans", "a"), name="logged")
    three.api.ended(run_id)
    log = three.services.log(three.worker)
    wait_for(lambda: "inside" in three.services.log(three.worker), "the last line")
    log = three.services.log(three.worker)
    assert SECRET not in three.services.logs()
    assert "\x1b" not in log
    records = [json.loads(line) for line in log.splitlines()]
    assert "forged" not in {record["level"] for record in records}
    by_message = {record["message"]: record for record in records}
    first = by_message['one\\n{"level": "forged"} and ***']
    assert (first["run_id"], first["node_id"], first["attempt"]) == (run_id, "a", 1)
    assert first["logger"] == "dovetail.handler"
    assert by_message["of a library: ***\\x1b[31m"]["logger"] == "mine"
    assert "not shown" not in log
    broke = by_message["it broke"]
    assert broke["pages"] == 12
    assert "ValueError: inner ***" in str(broke)
    # And a line that was written inside a span says which.
    inside = next(r for r in records if r["message"] == "inside" and r["run_id"] == run_id)
    assert len(inside["trace_id"]) == 32
    assert len(inside["span_id"]) == 16


def test_every_log_line_of_all_services_is_a_record(three: Three) -> None:
    for process in three.services.processes[:2]:
        for line in three.services.log(process).splitlines():
            assert {"time", "level", "logger", "message"} <= json.loads(line).keys()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_console_log_line_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs(Settings.model_validate(SETTINGS))
    log = logging.getLogger("dovetail.worker")
    log.info("started, pid %d", 7, extra={"run_id": "r"})
    log.warning("redis://:%s@host is away", "a-password")
    logging.getLogger("dovetail.handler").info("12 pages", extra={"node_id": "fetch"})
    logging.getLogger("else").info("not of interest")
    logging.getLogger("else").error("of interest\nnot a record: x\x1b[2J")
    assert said(capsys) == [
        "dovetail.worker: started, pid 7",
        "dovetail.worker: warning: redis://:***@host is away",
        "fetch: 12 pages",
        "else: error: of interest\\nnot a record: x\\x1b[2J",
    ]


def test_a_service_names_the_run_and_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs(Settings.model_validate(SETTINGS), names=True)
    names = {"node_id": "fetch", "run_id": "r1", "attempt": 2}
    logging.getLogger("dovetail.handler").info("12 pages", extra=names)
    token = REQUEST_ID.set("abc")
    logging.getLogger("dovetail.api").info("of a request with a-token-of-the-api")
    REQUEST_ID.reset(token)
    lines = said(capsys)
    assert [line.partition(" ")[2] for line in lines] == [
        "fetch: 12 pages run_id=r1 attempt=2",
        "dovetail.api: of a request with *** request_id=abc",
    ]
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line)
        at = datetime.fromisoformat(line.partition(" ")[0])
        assert abs(at - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_traceback_cannot_be_mistaken_for_records(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs(Settings.model_validate(SETTINGS))
    try:
        raise ValueError(f"{SECRET}\ndovetail.api: error: forged")
    except ValueError:
        logging.getLogger("dovetail.api").exception("it broke")
    first, *block = said(capsys)
    assert first == "dovetail.api: error: it broke"
    assert all(line.startswith("  | ") for line in block)
    assert SECRET not in str(block)
    assert "  | dovetail.api: error: forged" in block


@pytest.mark.parametrize(
    "head",
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
    ],
)
def test_a_failed_attempt_is_logged_by_services_with_its_traceback(
    head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_logs(Settings.model_validate(SETTINGS), names=True)
    task = Task("r1", "fetch", Token(1, 2, 3), "h", {}, {}, {}, 1.0)
    log_failure(task, {"traceback": f"{head}\n  File \nValueError: x"})
    first, *block = said(capsys)
    assert first.partition(" ")[2].startswith(
        "fetch: warning: attempt 2 of node 'fetch' of run r1 failed"
    )
    assert block == [f"  | {head}", "  |   File ", "  | ValueError: x"]
    show_logs(Settings.model_validate(SETTINGS))
    log_failure(task, {"traceback": head})
    assert said(capsys) == [], "a command for one run has its own display of attempts"


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_failed_attempt_of_an_item_has_its_node_and_its_number(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_logs(Settings.model_validate({**SETTINGS, "log_format": form}), names=True)
    task = Task("r1", "each[7]", Token(1, 2, 3), "h", {}, {}, {}, 1.0, item="x", item_index=7)
    log_failure(task, {"traceback": "ValueError: x"})
    first = said(capsys)[0]
    if form == "console":
        assert first.partition(" ")[2] == (
            "each: warning: attempt 2 of node 'each[7]' of run r1 failed\\nValueError: x "
            "run_id=r1 item=7 attempt=2"
        )
        return
    record = json.loads(first)
    assert [record[name] for name in ("run_id", "node_id", "item", "attempt")] == [
        "r1",
        "each",
        7,
        2,
    ]


def test_a_program_without_logging_does_not_see_failed_attempts() -> None:
    code = (
        "from dovetail import WorkflowDAG, WorkflowExecutor\n"
        "def broken(ctx): raise ValueError('x')\n"
        "dag = WorkflowDAG().add_step('a', broken)\n"
        "print(WorkflowExecutor().execute_sync(dag).steps['a'].error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ValueError: x\n", "")


@pytest.mark.parametrize("form", ["console", "json"])
def test_every_log_record_is_one_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    show_logs(Settings.model_validate({**SETTINGS, "log_format": form}), names=True)
    log = logging.getLogger("dovetail.x")
    hostile = [
        "a\r\nb",
        "\u2028",
        "\ud800",
        "\x00",
        "\x9b31m",
        10**30,
        float("nan"),
        Odd(),
        {1: [b"\n"]},
    ]
    for value in hostile:
        log.info("reported", extra={"value": value, "event": "mine", "na\nme": 1})
    lines = said(capsys)
    assert len(lines) == len(hostile)
    for line in lines:
        assert line.isprintable()
        if form == "json":
            assert json.loads(line.replace("NaN", "null"))["message"] == "reported"
        else:
            assert line.partition(" ")[2].startswith("dovetail.x: reported ")


def test_warnings_are_records_and_setting_up_logs_twice_shows_them_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_logs(Settings.model_validate(SETTINGS))
    show_logs(Settings.model_validate({**SETTINGS, "log_format": "json"}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", stacklevel=1)
    (line,) = said(capsys)
    assert json.loads(line)["logger"] == "py.warnings"


def test_a_command_that_logs_nothing_does_not_wait_for_structlog() -> None:
    script = (
        "import sys, dovetail\n"
        "from dovetail.config import Settings\n"
        "from dovetail.telemetry.logs import show_logs\n"
        "show_logs(Settings())\n"
        "print(sorted({'structlog', 'prometheus_client', 'opentelemetry'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
