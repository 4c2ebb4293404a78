"""The benchmark works, and the claims about growth hold by counting rather than by the clock.

Times depend on the machine; the number of bytecodes that a transition executes and the number of
calls that a run makes do not. What it must not need: Dask and DBOS.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dovetail import Context
from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.validation import check
from dovetail.core.run import RunState
from dovetail.core.step import begin, step
from dovetail.core.transitions import Claim, Complete, Decision, Dispatch, Submit
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import describe
from dovetail.wiring.embedded import embedded

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_DASK = [
    "dovetail library",
    "dovetail execute_sync",
    "dovetail definition",
    "asyncio, a task per node",
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scripts of bench/ as modules, as if Dask were not installed."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setitem(sys.modules, "dask", None)
    run = import_module("run")

    yield run
    for path in (ROOT / "bench").glob("*.py"):
        sys.modules.pop(path.stem, None)


# --- the benchmark itself ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_DASK)
def test_a_contestant_passes_outputs_along_every_edge(bench: Any, name: str) -> None:
    workloads = import_module("workloads")

    for workload in (workloads.chain(7), workloads.fan(9), workloads.layered(4, 5)):
        run = bench.CONTESTANTS[name](workload)
        workload.check(run())
        workload.check(run())  # a second time: the graph is built once and run often


def test_the_map_of_the_bench_adds_up_in_the_library_and_embedded(
    bench: Any, tmp_path: Path
) -> None:
    with bench.maps.library() as job:
        job.calls["run"]()
    with bench.maps.embedded(str(tmp_path)) as job:
        job.calls["run"]()
    with pytest.raises(AssertionError, match="7 instead of 500500"):
        bench.maps.checked(lambda: 7)()


def test_a_peer_of_the_map_that_is_missing_has_a_row_that_says_so(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.maps, "ENVIRONMENT", tmp_path / "nowhere")
    names, once = ["dovetail library", "dask bag, 2 threads"], {"count": 1, "warmup": 0}
    rows = bench.maps.measure(names, lambda _: once, tmp_path, lambda _: None)
    assert rows["dovetail library"]["times"] == {"dovetail library": 1.0}
    assert rows["dovetail library"]["cpu_seconds_per_item"] > 0
    shown = bench.maps.table(rows).splitlines()
    assert shown[1].split()[:3] == ["dovetail", "library", "process"]
    assert shown[2].endswith("nowhere/bin/python; ./dev bench --map installs it")


def test_a_wrong_value_at_the_end_is_noticed(bench: Any) -> None:
    workloads = import_module("workloads")

    with pytest.raises(AssertionError, match="chain3"):
        workloads.chain(3).check([{"n": 2}])


def test_the_workloads_are_those_of_the_targets(bench: Any) -> None:
    sizes = {workload.name: workload.nodes for workload in bench.standard()}
    assert sizes == {"chain100": 100, "fan1000": 1002, "layered10x100": 1000}
    assert sizes.keys() == bench.TARGETS.keys()


def test_every_contestant_runs_once_per_round_in_a_rotating_order(bench: Any) -> None:
    order: list[str] = []
    work = {name: lambda name=name: order.append(name) for name in "abc"}
    times = bench.rounds(work, count=2, warmup=1)
    assert order == [*"abc", *"bca", *"cab"]
    assert [len(seconds) for seconds in times.values()] == [2, 2, 2]


def test_a_ratio_is_computed_within_the_rounds(bench: Any) -> None:
    """The second round was ten times as slow for both, which must not matter."""
    assert bench.ratio([4.0, 40.0, 4.0], [1.0, 10.0, 2.0]) == 4.0
    assert bench.best_ratio([6.0, 40.0, 4.0], [1.0, 10.0, 2.0]) == 4.0


def test_a_missed_target_is_reported(bench: Any) -> None:
    workload = bench.layered(10, 100)

    def verdict(ours: float) -> dict[str, Any]:
        times = {"dovetail library": [ours], "dask synchronous": [1.0]}
        (found,) = bench.verdict_on_speed(workload, times)
        return dict(found)

    assert verdict(0.25)["reached"]
    assert not verdict(0.26)["reached"]
    assert bench.shown(verdict(0.5)) == (
        "✗ layered10x100: library × dask synchronous: 2.00 (at least 4)"
    )


def test_without_dask_the_bench_says_how_to_install_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "chain100", "--rounds", "1"])
    with pytest.raises(SystemExit, match=r"dask.* is not installed; \./dev bench installs it"):
        bench.main()


def test_the_definitions_that_are_validated_have_ten_thousand_nodes_and_are_equal(
    bench: Any,
) -> None:
    workloads = import_module("workloads")
    from dovetail.core.definition.source import read_text

    small = workloads.layered(3, 4)
    text = workloads.yaml_text(small)
    assert read_text(text, format="yaml").data == workloads.definition(small)
    large = workloads.layered(100, 100)
    assert large.nodes == 10_000
    assert len(workloads.yaml_text(large)) <= 1 << 20


def test_the_bench_prints_one_json_document() -> None:
    names = [word for name in WITHOUT_DASK for word in ("--contestant", name)]
    command = [sys.executable, "bench/run.py", "--json", "--only", "chain100", *names]
    done = subprocess.run(
        [*command, "--rounds", "2", "--warmup", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["workloads"]["chain100"]
    assert list(rows) == WITHOUT_DASK
    assert all(len(row["seconds"]) == 2 and row["nodes_per_second"] > 0 for row in rows.values())


# --- on a file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dovetail embedded", "floor"])
def test_a_durable_contestant_passes_outputs_and_syncs_every_commit(
    bench: Any, name: str, tmp_path: Path
) -> None:
    workloads = import_module("workloads")

    for number, workload in enumerate(
        [workloads.chain(5), workloads.fan(7), workloads.diamonds(4)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        opened = bench.durable.CONTESTANTS[name](workload=asdict(workload), folder=str(folder))
        with opened as job:
            assert job.facts == {"uses": "WAL, FULL"}
            job.calls["run"]()
            job.calls["run"]()
        wrong = asdict(workload) | {"depth": 99}
        with bench.durable.CONTESTANTS[name](workload=wrong, folder=str(tmp_path)) as job:
            with pytest.raises(AssertionError, match=workload.name):
                job.calls["run"]()
            for file in tmp_path.glob("*.db*"):
                file.unlink()


async def commits_per_node(workload: Any, folder: Path) -> float:
    """Syncs to the disk that a run costs, trigger and end included."""

    async def noop(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return dict(import_module("workloads").node(*config["of"]))

    settings = Settings(db=folder / "dovetail.db")
    registry = builtin_registry(settings)
    registry.add(describe(noop, name="noop", max_retries=0, origin="test"))
    definition = import_module("workloads").definition(workload)
    async with embedded(settings, registry) as engine:
        writer: Any = engine.store.writer  # type: ignore[attr-defined]
        before = writer.commits
        accepted = await engine.trigger(definition)
        ended = await engine.wait(accepted.run_id)
        workload.check([ended.node(name).output for name in workload.exits])
        return float((writer.commits - before) / workload.nodes)


async def test_a_node_of_a_chain_costs_one_commit(bench: Any, tmp_path: Path) -> None:
    """Its claim rides with the result of the node before it."""
    assert await commits_per_node(bench.workloads.chain(100), tmp_path) <= 1.1


async def test_the_nodes_of_a_fan_out_share_their_commits(bench: Any, tmp_path: Path) -> None:
    assert await commits_per_node(bench.fan(1000), tmp_path) <= 0.05


def test_the_durable_workloads_are_those_of_the_targets(bench: Any) -> None:
    sizes = {workload.name: workload.nodes for workload in bench.workloads.durable()}
    assert sizes == {"chain100": 100, "fan1000": 1002, "diamonds500": 2000}
    assert sizes.keys() == bench.DURABLE_TARGETS.keys()


def test_waves_are_the_nodes_that_may_start_together(bench: Any) -> None:
    assert bench.workloads.diamonds(1).waves() == [["a"], ["b", "c"], ["d"]]
    assert [len(wave) for wave in bench.fan(9).waves()] == [1, 9, 1]


def durable_rows(**rows: dict[str, Any]) -> dict[str, Any]:
    ours = rows.get("ours", {"times": {"dbos, WAL": 50.0}})
    return {"rows": {"dovetail embedded": ours, "dbos, WAL": rows.get("dbos", {})}}


def test_a_missed_durable_target_and_a_failure_are_reported(bench: Any) -> None:
    workload = bench.fan(1000)
    verdicts = bench.verdicts_on_durable_speed

    assert verdicts(workload, durable_rows())[0]["reached"]
    (missed,) = verdicts(workload, durable_rows(ours={"times": {"dbos, WAL": 49.9}}))
    assert bench.shown(missed) == ("✗ fan1000 on a file: embedded × dbos, WAL: 49.90 (at least 50)")
    assert not verdicts(workload, durable_rows(ours={"failed": "boom"}))[0]["reached"]
    assert not verdicts(workload, durable_rows(ours={}, dbos={"once_seconds": 70}))[0]["reached"]
    assert verdicts(workload, {"rows": {"floor": {}}}) == []


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, "library chain100, library fan1000, library layered10x100, "
               "durable chain100, durable fan1000, durable diamonds500, "
               "distributed chain100, distributed fan1000, distributed diamonds500"),
        (["durable"], "durable chain100, durable fan1000, durable diamonds500"),
        (["chain100"], "library chain100, durable chain100, distributed chain100"),
        (["durable", "chain100"], "durable chain100"),
        (["distributed", "chain100"], "distributed chain100"),
        (["diamonds500", "scaling"], "durable diamonds500, distributed diamonds500"),
        (["scaling"], ""),
    ],
)  # fmt: skip
def test_only_selects_parts_and_workloads(
    bench: Any, only: list[str] | None, expected: str
) -> None:
    options = Namespace(only=only, contestant=None)
    parts = {
        "library": bench.standard(),
        "durable": bench.workloads.durable(),
        "distributed": bench.workloads.durable(),
    }
    found = [
        f"{part} {workload.name}"
        for part, workloads in parts.items()
        for workload in workloads
        if bench.competes(part, workload, options)
    ]
    assert ", ".join(found) == expected


def test_slow_contestants_run_at_least_three_rounds_and_never_more_than_requested(
    bench: Any,
) -> None:
    options = Namespace(rounds=25, warmup=3)
    assert bench.within_reason(0.5, options) == {"count": 25, "warmup": 3}
    assert bench.within_reason(5.0, options) == {"count": 12, "warmup": 2}
    assert bench.within_reason(40.0, options) == {"count": 3, "warmup": 0}
    assert bench.within_reason(40.0, Namespace(rounds=1, warmup=0)) == {"count": 1, "warmup": 0}


def test_a_contestant_that_fails_or_is_too_slow_has_a_row_with_the_reason(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {
        "dovetail": 0.01,
        "dovetail_on_uvloop": 0.01,
        "dbos": 0.5,
        "dbos_one_connection": 26.0,
        "dbos_as_it_comes": 0.6,
        "floor": 0.005,
    }
    calls = dict.fromkeys(seconds, 0)

    class There:
        def __init__(self, opener: str, **_: object) -> None:
            self.name = opener.removeprefix("durable:")
            self.facts, self.close = {"uses": "WAL, FULL"}, lambda: None

        def call(self, _: str) -> Any:
            calls[self.name] += 1
            if self.name == "dbos_as_it_comes" and calls[self.name] == 3:
                raise bench.Failed("TimeoutError: no connection (impl.py:165)")
            return import_module("apart").Answer(seconds[self.name], None)

    monkeypatch.setattr(bench, "SeparateProcess", There)
    options = Namespace(rounds=3, warmup=0, contestant=None)
    found = bench.compete_durably(bench.fan(1000), options)

    assert list(calls.values()) == [4, 4, 4, 1, 3, 4]
    lines = bench.durable_table(bench.fan(1000), found).splitlines()
    assert lines[1].split()[:4] == ["dovetail", "embedded", "WAL,", "FULL"]
    assert lines[1].split()[-3:] == ["50.0", "—", "50.0%"]
    assert lines[4].endswith("WAL, FULL     one run alone took 26.0 s")
    assert lines[5].endswith("failed: TimeoutError: no connection (impl.py:165)")
    assert len(found["rows"]["floor"]["seconds"]) == 3


def test_without_dbos_the_bench_says_how_to_install_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise bench.Missing("dbos")

    monkeypatch.setattr(bench, "SeparateProcess", missing)
    options = Namespace(rounds=1, warmup=0, contestant=["dbos, WAL"])
    with pytest.raises(SystemExit, match=r"WAL: dbos is not installed; \./dev bench installs it"):
        bench.compete_durably(bench.fan(3), options)


def test_the_bench_on_a_file_prints_one_json_document() -> None:
    command = [sys.executable, "bench/run.py", "--json", "--only", "durable", "--only", "chain100"]
    chosen = ["--contestant", "dovetail embedded", "--contestant", "floor"]
    done = subprocess.run(
        [*command, *chosen, "--rounds", "2", "--warmup", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    rows = report["durable"]["chain100"]["rows"]
    assert list(rows) == ["dovetail embedded", "floor"]
    assert all(len(row["seconds"]) == 2 and row["times"]["floor"] > 0 for row in rows.values())
    assert report["workloads"] == {}


# --- in a process of its own ---------------------------------------------------------------------


WORK = """
import time
from contextlib import contextmanager
from apart import Job

def fail():
    raise ValueError("no such luck\\nand a second line")

@contextmanager
def opened(word, file):
    print("this does not come between the answers")
    yield Job({"word": word}, {
        "count": lambda: len(word), "sleep": lambda: time.sleep(0.05),
        "fail": fail, "hang": lambda: time.sleep(60), "exit": lambda: __import__("os")._exit(3),
    })
    open(file, "w").write("closed")

def without():
    import a_package_that_is_not_there
"""


@pytest.fixture
def apart(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "work_elsewhere.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return import_module("apart")


def test_work_in_another_process_is_called_timed_and_closed(apart: Any, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    with apart.SeparateProcess("work_elsewhere:opened", word="dove", file=str(file)) as there:
        assert there.facts == {"word": "dove"}
        assert there.call("count").value == 4
        assert 0.05 <= there.call("sleep").seconds < 10
    assert file.read_text() == "closed"


def test_an_error_in_another_process_is_raised_here_with_its_message(
    apart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(call: str) -> str:
        with apart.SeparateProcess(
            "work_elsewhere:opened", word="", file=str(tmp_path / "x")
        ) as there:
            monkeypatch.setattr(apart, "PATIENCE", 0.2 if call == "hang" else 60.0)
            with pytest.raises(apart.Failed) as failure:
                there.call(call)
            monkeypatch.undo()
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return str(failure.value)

    assert failing("fail") == "ValueError: no such luck (work_elsewhere.py:7)"
    assert failing("exit") == "its process ended with 3"
    assert failing("hang") == "not done after 0.2 s"


def test_a_package_that_is_missing_in_another_process_is_named(apart: Any) -> None:
    with pytest.raises(apart.Missing, match="a_package_that_is_not_there"):
        apart.SeparateProcess("work_elsewhere:without")


# --- what large runs and long histories cost -----------------------------------------------------


def test_the_memory_growth_of_a_process_during_a_run_is_measured(
    bench: Any, tmp_path: Path
) -> None:
    with bench.burden.memory(workload=["layered", 3, 4], folder=str(tmp_path)) as job:
        assert job.calls["run"]() >= 0  # how little is only seen in a process of its own


def test_a_history_is_copied_from_real_runs_and_can_be_used(bench: Any, tmp_path: Path) -> None:
    with bench.burden.history(runs=300, folder=str(tmp_path)) as job:
        assert job.facts["calls"] == [
            "list",
            "list --status FAILED",
            "list --workflow rare",
            "show",
            "a new run",
            "open and close",
        ]
        for call in job.calls.values():
            call()


def test_a_history_that_slows_a_command_is_reported(bench: Any) -> None:
    found = {"show": {"short": 0.001, "long": 0.0016, "times": 1.6}}
    (verdict,) = bench.verdicts_on_history(found)
    assert bench.shown(verdict) == "✗ show, 100,000 runs against 200: 1.60 (at most 1.5)"
    assert bench.history_table(found).splitlines()[1].split() == [
        "show", "1.00", "ms", "1.60", "ms", "1.60", "×"
    ]  # fmt: skip


def test_a_run_that_needs_too_much_memory_is_reported(bench: Any) -> None:
    (verdict,) = bench.verdicts_on_memory({"fan9998": 120_000_000})
    assert bench.shown(verdict) == (
        "✗ fan9998 on a file, MB above the idle process: 120.00 (below 100)"
    )


# --- growth, by counting -----------------------------------------------------------------------


class CoreRun:
    """A run of the core alone, driven by hand."""

    def __init__(self, parents: list[list[int]]) -> None:
        nodes = [
            {"id": f"n{i}", "handler": "noop", "dependencies": [f"n{p}" for p in above]}
            for i, above in enumerate(parents)
        ]
        workflow = check({"name": "growth", "nodes": nodes}).workflow
        assert workflow is not None
        self.run: RunState
        self.run, first = begin(Submit("r", build_graph(workflow, {}), {}), 0.0, 1)
        self.waiting = list(first.dispatch)

    def complete(self) -> Decision:
        """Complete the node that was published first."""
        return self._finish(self._start())

    def price(self) -> int:
        """The same, and how many bytecodes the transition executes."""
        dispatch = self._start()
        return bytecodes(lambda: self._finish(dispatch))

    def _start(self) -> Dispatch:
        dispatch = self.waiting.pop(0)
        name = self.run.graph.nodes[dispatch.node_index].id
        assert step(self.run, Claim("r", name, dispatch.token, "w", 1e9), 1.0, 2)
        return dispatch

    def _finish(self, dispatch: Dispatch) -> Decision:
        name = self.run.graph.nodes[dispatch.node_index].id
        decision = step(self.run, Complete("r", name, dispatch.token, {"n": 1}), 2.0, 3)
        self.waiting += decision.dispatch
        return decision


def chain(length: int) -> list[list[int]]:
    return [[i - 1] if i else [] for i in range(length)]


def fan(width: int) -> list[list[int]]:
    return [[], *[[0] for _ in range(width)], [*range(1, width + 1)]]


def bytecodes(work: Callable[[], object]) -> int:
    executed = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    before = sys.gettrace()  # that of a coverage run
    gc.disable()  # or the finalizers of other tests' garbage would be counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return executed


def calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions, resumed generators included."""
    made = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


def test_a_completion_in_a_chain_costs_the_same_for_any_length() -> None:
    short, long = CoreRun(chain(100)), CoreRun(chain(10_000))
    for course in (short, long):
        for _ in range(10):
            course.complete()
    price = short.price()
    assert price == long.price() > 0
    assert short.complete().changed == [11, 12]  # itself and its child, no other


def test_a_completion_in_a_fan_out_costs_the_same_for_any_width() -> None:
    narrow, wide = CoreRun(fan(998)), CoreRun(fan(9998))
    assert len(narrow.complete().changed) == 1 + 998
    assert len(wide.complete().changed) == 1 + 9998
    assert narrow.price() == wide.price() > 0
    assert narrow.complete().changed == [2]


def test_the_last_parent_of_a_join_costs_the_same_for_any_number_of_parents() -> None:
    narrow, wide = CoreRun(fan(10)), CoreRun(fan(1000))
    for course, width in ((narrow, 10), (wide, 1000)):
        for _ in range(width):  # the root and all leaves but one
            course.complete()
    assert narrow.price() == wide.price() > 0
    assert [dispatch.node_index for dispatch in wide.waiting] == [1001]


def test_a_completion_costs_one_fixed_price_for_each_child() -> None:
    prices = [CoreRun(fan(width)).price() for width in (100, 200, 400)]
    assert prices[2] - prices[1] == 2 * (prices[1] - prices[0]) > 0


def test_a_node_needs_as_many_calls_in_a_fan_out_of_10_000_as_in_one_of_1_000(bench: Any) -> None:
    narrow, wide = [calls_per_node(bench, "dovetail library", bench.fan(n)) for n in (998, 9998)]
    assert wide < 1.2 * narrow


def test_a_node_of_a_definition_needs_as_many_calls_in_a_fan_out_ten_times_as_wide(
    bench: Any,
) -> None:
    narrow, wide = [calls_per_node(bench, "dovetail definition", bench.fan(n)) for n in (200, 2000)]
    assert wide < 1.2 * narrow


def test_a_node_needs_as_many_calls_in_a_chain_ten_times_as_long(bench: Any) -> None:
    workloads = import_module("workloads")

    chains = workloads.chain(300), workloads.chain(3000)
    short, long = [calls_per_node(bench, "dovetail library", each) for each in chains]
    assert long < 1.2 * short


def calls_per_node(bench: Any, contestant: str, workload: Any) -> float:
    run = bench.CONTESTANTS[contestant](workload)
    run()  # what is made once is made now
    return calls(run) / float(workload.nodes)
