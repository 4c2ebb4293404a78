"""The distributed part of the benchmark works: real services on a Redis of its own, tiny workloads.

How fast they are is not asked here. What it must not need: streaQ, which only the bench installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ONCE = {"count": 1, "warmup": 0}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scripts of bench/ as modules."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield import_module("run")
    for path in (ROOT / "bench").glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_services_run_every_workload_and_report_the_cost(bench: Any) -> None:
    shapes = bench.workloads
    works = [shapes.chain(4), shapes.fan(5), shapes.diamonds(3)]
    with bench.distributed.opened(["dovetail", "floor"], works) as contest:
        assert contest.failed == {}
        ours, floor = contest.those.values()
        for work in works:
            rows = bench.distributed.compete(contest, work, lambda _: ONCE)
            reported = rows["dovetail"]
            assert len(reported["seconds"]) == 1
            assert reported["times"].keys() == {"dovetail", "floor"}
            assert list(reported["cpu_seconds_per_node"]) == [
                *("redis", "orchestrator", "worker", "client")
            ]
            assert all(seconds > 0 for seconds in reported["cpu_seconds_per_node"].values())
            assert reported["commands_per_node"] > 1
            first, *others = bench.distributed.table(work, rows).splitlines()
            assert first.startswith(f"{work.name} over Redis, {work.nodes} nodes")
            assert [line.split()[0] for line in others] == ["dovetail", "floor"]
        assert bench.distributed.growth(contest, *works[:2], lambda _: ONCE)["times"] > 0
        pids = [pid for each in (ours, floor) for those in each.pids.values() for pid in those]
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def pretended(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three contestants, of whom nothing is real; streaq fails at its second call."""
    done = 0

    class There:
        def __init__(self, name: str) -> None:
            self.name, self.calls = name, 0

        def call(self, _: str) -> Any:
            nonlocal done
            self.calls += 1
            done += 1
            if self.name == "streaq" and self.calls == 2:
                raise bench.Failed("its process ended with 1")
            return import_module("apart").Answer(0.5, 0.1)

    def used(*_: object) -> Any:
        cpu = {"redis": 0.1 * done, "worker": 0.2 * done}
        return import_module("fleet").Used(cpu, {"get": 3 * done}, 2 * done, 500 * done)

    monkeypatch.setattr(bench.distributed, "used", used)
    names = ("dovetail", "celery", "streaq")
    those = {name: bench.distributed.Contestant(There(name), {"worker": [7]}) for name in names}
    redis = SimpleNamespace(url="redis://127.0.0.1:1/0", pid=6)
    return bench.distributed.Contest(redis, those)


def test_a_contestant_that_aborts_has_a_row_with_the_reason_and_the_others_continue(
    bench: Any, pretended: Any
) -> None:
    distributed = bench.distributed
    rows = distributed.compete(pretended, bench.fan(8), lambda _: {"count": 3, "warmup": 1})

    assert rows["streaq"] == {"failed": "its process ended with 1"}
    assert rows["dovetail"]["times"] == {"dovetail": 1.0, "celery": 1.0}
    assert rows["dovetail"]["cpu_seconds_per_node"] == pytest.approx(
        {"redis": 0.01, "worker": 0.02, "client": 0.01}
    )
    lines = distributed.table(bench.fan(8), rows).splitlines()
    reported = "— 1.0 — 20% 40000.0 10000.0 — 20000.0 10000.0 —"
    assert lines[1].split()[-10:] == reported.split()
    assert lines[3].split() == ["streaq", "failed:", "its", "process", "ended", "with", "1"]


def test_the_rest_time_of_a_contestant_is_awaited_but_not_counted(
    bench: Any, pretended: Any
) -> None:
    pretended.those = {"dovetail": pretended.those["dovetail"]}
    pretended.those["dovetail"].rests = True
    rows = bench.distributed.compete(pretended, bench.fan(8), lambda _: ONCE)
    assert rows["dovetail"]["seconds"] == [0.5]
    assert rows["dovetail"]["cpu_seconds_per_node"]["redis"] == pytest.approx(0.02)
    table = bench.distributed.table(bench.fan(8), rows)
    assert table.endswith("archived 500 ms later")


def test_the_quick_mode_shows_where_the_time_went(
    bench: Any,
    pretended: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench.distributed, "opened", lambda *_: nullcontext(pretended))
    bench.distributed.quick(bench.workloads.chain(4), 1)
    assert capsys.readouterr().out.splitlines() == [
        "redis://127.0.0.1:1/0 redis 6 {'worker': [7]}",
        "chain4: 500.0 ms, 8 nodes/s, 125000.0 µs/node, 20% of Redis' limit 40",
        "  CPU µs/node: redis 25000.0  worker 50000.0  client 25000.0",
        "  per node: 0.500 reads, 125 bytes in, 0.75 commands: get 0.750",
    ]


def rows(**changes: Any) -> dict[str, Any]:
    ours = {"times": {"streaq": 20.0, "celery": 30.0}, "share_of_redis_limit": 0.6}
    archived, doubled = {"times": {"dovetail": 0.7}}, {"times": {"dovetail": 0.95}}
    return {
        "dovetail": ours | changes.get("ours", {}),
        "dovetail, archived": archived | changes.get("archived", {}),
        "dovetail, 2 + 2": doubled | changes.get("doubled", {}),
        "streaq": {},
        "celery": {},
    }


def test_every_target_of_the_services_is_checked(bench: Any) -> None:
    def missed(found: dict[str, Any]) -> list[str]:
        reported = bench.distributed.verdicts(bench.fan(1000), found, bench.verdict)
        assert len(reported) == 5
        return [bench.shown(each) for each in reported if not each["reached"]]

    assert missed(rows()) == []
    assert missed(rows(ours={"times": {"streaq": 19.0, "celery": 29.0}})) == [
        "✗ fan1000 over Redis: dovetail × streaq: 19.00 (at least 20)",
        "✗ fan1000 over Redis: dovetail × celery: 29.00 (at least 30)",
    ]
    assert missed(rows(ours={"share_of_redis_limit": 0.5})) == [
        "✗ fan1000 over Redis: of what Redis could serve: 0.50 (at least 0.6)"
    ]
    assert missed(rows(archived={"times": {"dovetail": 0.6}}, doubled={"times": {}})) == [
        "✗ fan1000 over Redis: dovetail, archived × dovetail: 0.60 (at least 0.7)",
        "✗ fan1000 over Redis: dovetail, 2 + 2 × dovetail: 0.00 (at least 0.95)",
    ]


def test_the_targets_are_for_the_announced_workloads(bench: Any) -> None:
    names = {work.name for work in bench.workloads.durable()}
    assert bench.distributed.TARGETS.keys() == names
    assert bench.distributed.LEAST_SHARE.keys() < names


def test_the_speed_page_has_the_targets(bench: Any) -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    _, *names = cells(page, "target")
    targets, shares = bench.distributed.TARGETS, bench.distributed.LEAST_SHARE
    for peer in ("streaq", "celery"):
        assert cells(page, f"× {peer}")[1:] == [f"{targets[name][peer]:g}" for name in names]
    assert cells(page, "of what Redis could serve")[1:] == [
        f"{shares[name]:.0%}".replace("%", " %") if name in shares else "–" for name in names
    ]
    for other, least in (("archived", "LEAST_ARCHIVED"), ("2 + 2", "LEAST_DOUBLED")):
        assert set(cells(page, f"{other} × dovetail")[1:]) == {
            f"{getattr(bench.distributed, least):g}"
        }
    assert f"at most {bench.distributed.MOST_GROWTH:g} times" in page


def test_the_speed_page_has_the_targets_on_celery(bench: Any) -> None:
    page, ours = (ROOT / "docs" / "speed.md").read_text(), bench.celery_transport
    _, *names = cells(page, "target on Celery")
    assert names == list(ours.TARGETS)
    for peer in ours.PEERS:
        wanted = [ours.TARGETS[name].get(peer) for name in names]
        reported = ["–" if least is None else f"{least:g}" for least in wanted]
        assert cells(page, f"× {peer}")[1:] == reported


def test_every_target_on_celery_is_checked(bench: Any) -> None:
    ours = bench.celery_transport

    def missed(**times: float) -> list[str]:
        reached = {"plain task": 0.8, "canvas": 1.4} | times
        rows = {ours.OURS: {"times": reached}, ours.PLAIN: {}, ours.CANVAS: {}}
        reported = ours.verdicts(bench.fan(1000), rows, bench.verdict)
        assert len(reported) == 2
        return [bench.shown(each) for each in reported if not each["reached"]]

    assert missed() == []
    assert missed(canvas=1.3) == [
        "✗ fan1000 on Celery: dovetail on celery × canvas: 1.30 (at least 1.4)"
    ]
    failed = {ours.OURS: {"failed": "boom"}, ours.PLAIN: {}, ours.CANVAS: {}}
    assert not any(
        reported["reached"] for reported in ours.verdicts(bench.fan(1000), failed, bench.verdict)
    )


def test_celery_runs_every_workload_beside_a_plain_task(bench: Any) -> None:
    shapes, ours = bench.workloads, bench.celery_transport
    works = [shapes.chain(3), shapes.diamonds(2)]
    names = [ours.OURS, ours.PLAIN]
    with bench.distributed.opened(names, works, ours.CONTESTANTS) as contest:
        assert contest.failed == {}
        for work in works:
            rows = bench.distributed.compete(contest, work, lambda _: ONCE)
            assert list(rows) == names
            assert rows[ours.OURS]["times"].keys() == set(names)
            table = bench.distributed.table(work, rows, ours.PEERS).splitlines()
            assert [line.split()[0] for line in table[1:]] == ["dovetail", "plain"]


def cells(page: str, first: str) -> list[str]:
    """Those of the row that begins with this."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_fan_out_whose_node_cost_grows_is_reported(bench: Any) -> None:
    reported = bench.distributed.verdict_on_growth({"times": 1.31}, bench.verdict)
    assert bench.shown(reported) == (
        "✗ fan of 10,000 against 1,000 nodes over Redis, cost of a node: 1.31 (at most 1.3)"
    )
    failed = bench.distributed.verdict_on_growth({"failed": "boom"}, bench.verdict)
    assert not failed["reached"]


def test_without_a_peer_the_bench_says_how_to_install_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise bench.Missing("streaq")

    monkeypatch.setattr(bench.distributed, "SeparateProcess", missing)
    message = r"streaq: streaq is not installed; \./dev bench installs it"
    with (
        pytest.raises(SystemExit, match=message),
        bench.distributed.opened(["streaq"], [bench.fan(3)]),
    ):
        pass


def test_the_cpu_time_of_a_process_includes_its_children(bench: Any) -> None:
    fleet = import_module("fleet")
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        own = Path(f"/proc/{process.pid}/schedstat")
        while fleet.cpu_seconds(process.pid) < int(own.read_text().split()[0]) * 1e-9 + 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.communicate(b"\n")


def test_a_service_ends_with_its_parent_however_the_parent_ends(bench: Any) -> None:
    script = (
        "import os, fleet\n"
        "with fleet.services(sleeper=[['-c', 'import time; time.sleep(600)']]) as pids:\n"
        "    print(*pids['sleeper'], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT / "bench")},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -9
    deadline = time.monotonic() + 30
    while alive(int(done.stdout)) and " Z " not in stat(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stat(pid: int) -> str:
    """A process without a waiting parent stays as a zombie, where process 1 buries none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "
