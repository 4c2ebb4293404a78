"""The board and its views, event by event, without a run."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.cli.board import Board, PlainView, row_line
from dovetail.cli.text import bare
from dovetail.core.events import NODE_EVENTS, Event
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.views import event_view, run_snapshot, run_view

from ..core.walk import Walk


def event(
    kind: str, node: str | None = "a", at: float = 100.0, attempt: int = 1, **data: object
) -> dict[str, Any]:
    return event_view(Event(1, at, kind, 1, node, attempt, dict(data)))


def line(board: Board, now: float = 100.0) -> str:
    return bare(row_line(board.rows[0], 1, now))


def test_a_row_shows_the_progress_of_its_node() -> None:
    board = Board(["a", "b"])
    assert line(board) == "○ a"
    board.apply(event("node.queued", attempt=0))
    assert line(board) == "◌ a  queued"
    board.apply(event("node.parked", until=103.0, resource_tag="search\x1b[31m", attempt=0))
    assert line(board) == r"◌ a  rate limit search\x1b[31m: starts in 3 s"
    assert line(board, now=104) == "◌ a  queued"
    board.apply(event("node.started"))
    assert line(board, now=102.5) == "● a  2.5s"
    board.apply(event("node.progress", fraction=0.54, message="page 3 of 7"))
    assert line(board) == "● a  0.0s   54%  page 3 of 7"
    failure = {"type": "OSError", "message": "gone"}
    board.apply(event("node.retrying", error=failure, delay=12.0, retry=1))
    assert line(board) == "◌ a  retry 1 in 12s: OSError: gone"
    board.apply(event("node.started", at=120, attempt=2))
    assert line(board, now=121) == "● a  1.0s  attempt 2"
    board.apply(event("node.lost", attempt=2))
    assert line(board) == "◌ a  queued"
    board.apply(event("node.started", at=120, attempt=3))
    board.apply(event("node.completed", at=121, attempt=3))
    assert line(board, now=999) == "✓ a  1.0s  3 attempts"
    assert board.counts[NodeStatus.COMPLETED] == board.counts[NodeStatus.PENDING] == 1
    assert board.finished == 1
    assert not {**board.running, **board.failed, **board.delayed}


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("node.cached", {}, "✓ a  cached"),
        ("node.failed", {"error": {}}, "✗ a  not started"),
        ("node.failed", {"reason": "dependency_failed", "cause": "x"}, "– a  not run: x failed"),
        ("node.skipped", {"reason": "dependency_failed", "cause": "x"}, "– a  skipped: x failed"),
        ("node.skipped", {"reason": "condition_false"}, "– a  skipped: its condition is false"),
        (
            "node.skipped",
            {"reason": "dependency_skipped"},
            "– a  skipped: all it depends on was skipped",
        ),
        ("node.cancelled", {"reason": "run_failed"}, "– a  cancelled: the run failed"),
        ("node.cancelled", {"reason": "run_cancelled"}, "– a  cancelled"),
    ],
)
def test_a_node_that_did_not_run_says_why(kind: str, data: dict[str, object], said: str) -> None:
    board = Board(["a"])
    board.apply(event(kind, attempt=0, **data))
    assert line(board) == said


def test_the_board_shows_the_state_of_the_run() -> None:
    board = Board(["a"])
    assert board.apply(event("run.started", None)) is None
    assert board.status is RunStatus.RUNNING
    board.apply(event("run.failed", None))
    assert board.status is RunStatus.FAILED


def after(board: Board) -> dict[str, str]:
    return {row.id: row.status.value for row in board.rows}


def ended_badly() -> Board:
    """a and d completed, b failed, so c was skipped; e still runs."""
    board = Board(list("abcde"), [[1, 3], [2], [], [], []])
    board.apply(event("run.started", None))
    for node, kind in (("a", "completed"), ("b", "failed"), ("c", "skipped"), ("d", "completed")):
        board.apply(event("node.started", node))
        data = {"error": {}} if kind == "failed" else {"reason": "dependency_failed", "cause": "b"}
        board.apply(event(f"node.{kind}", node, **data))
    board.apply(event("node.started", "e"))
    board.apply(event("run.failed", None))
    return board


def test_a_retry_reopens_every_row_that_neither_completed_nor_still_runs() -> None:
    board = ended_badly()
    board.apply(event("run.retried", None))
    assert board.status is RunStatus.RUNNING
    assert after(board) == {
        "a": "COMPLETED",
        "b": "PENDING",
        "c": "PENDING",
        "d": "COMPLETED",
        "e": "RUNNING",
    }
    assert board.counts[NodeStatus.PENDING] == 2
    assert board.finished == 2
    assert not board.failed
    b = board.rows[1]
    assert (b.started, b.reason, b.attempt) == (None, None, 0)


def test_a_retry_from_a_node_reopens_all_its_descendants() -> None:
    board = ended_badly()
    board.apply(event("run.retried", None, **{"from": "a"}))
    assert set(after(board).values()) == {"PENDING", "RUNNING"}
    assert after(board)["e"] == "RUNNING"
    assert board.counts[NodeStatus.COMPLETED] == 0


def test_a_board_from_a_snapshot_equals_a_board_from_every_event() -> None:
    nodes = {
        "a": [],
        "b": ["a"],
        "c": ["b"],
        "parked": [],
        "off": [],
        "runs": [],
        "waits": ["runs"],
    }
    walk = Walk(
        {**nodes, "cached": []},
        on_failure="continue",
        parked={"resource_tag": "t"},
        off={"max_retries": 2},
    )
    walk.run("a")
    walk.break_("b")
    walk.park("parked", 7)
    walk.break_("off")
    walk.start("runs")
    walk.later(1)
    walk.lose("runs")
    walk.start("runs")
    walk.recall("cached", 1)
    reported = Board.before(run_view(walk.state)["nodes"])
    for said in walk.log:
        reported.apply(event_view(said))
    now = Board.now(run_snapshot(walk.state))
    assert now.status is reported.status
    assert +now.counts == +reported.counts
    for one, other in zip(now.rows, reported.rows, strict=True):
        assert bare(row_line(one, 6, walk.now)) == bare(row_line(other, 6, walk.now))
    for group in ("running", "failed", "delayed"):
        assert set(getattr(now, group)) == set(getattr(reported, group))


def test_the_plain_view_reports_a_retry_and_the_nodes_completed_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = PlainView(ended_badly())
    view.begin("flow", "0190f3aa", 0.0)
    view.show(event("run.retried", None))
    view.show(event("node.started", "b"))
    view.show(event("node.completed", "b", at=101))
    view.end()
    assert capsys.readouterr().out.splitlines() == [
        "RUNNING 0190f3 flow, 5 nodes, 2 completed before",
        "retried: 2 nodes to run",
        "✓ b  1.0s",
    ]


def test_every_node_event_is_handled_or_ignored_on_purpose() -> None:
    full = {"fraction": 0.5, "message": "", "until": 1.0, "resource_tag": "t", "delay": 1.0}
    full |= {"retry": 1, "error": {"type": "E", "message": "m"}, "reason": "run_cancelled"}
    changed = {kind for kind in NODE_EVENTS if Board(["a"]).apply(event(kind, **full))}
    assert set(NODE_EVENTS) - changed == {"result.refused"}


def test_a_quiet_run_still_prints_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    view = PlainView(Board([f"n{n}" for n in range(8)]))
    view.begin("flow", "0190f3aa")
    for n in range(8):
        view.show(event("node.started", f"n{n}"))
    now[0] = 29.0
    view.refresh()
    assert capsys.readouterr().out == "RUNNING 0190f3 flow, 8 nodes\n"
    now[0] = 31.0
    view.refresh()
    view.refresh()
    assert capsys.readouterr().out == "● still running: n0, n1, n2, n3, n4 and 3 more\n"


def test_progress_and_short_waits_do_not_flood_the_plain_view(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = PlainView(Board(["a"]))
    view.show(event("node.parked", until=100.4, resource_tag="t"))
    view.show(event("node.started"))
    for second in range(12):
        view.show(event("node.progress", at=100.0 + second, fraction=second / 12, message=""))
    assert capsys.readouterr().out.splitlines() == ["● a  5.0s   42%", "● a  10s   83%"]
