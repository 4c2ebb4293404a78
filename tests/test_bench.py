"""The benchmark works, and the claims about growth hold by counting rather than by the clock.

Times depend on the machine; the number of bytecodes that a transition executes and the number of
calls that a run makes do not. What it must not need: Dask.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.validation import check
from dovetail.core.run import RunState
from dovetail.core.step import begin, step
from dovetail.core.transitions import Claim, Complete, Decision, Dispatch, Submit

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
    for name in ("run", "contestants", "measuring", "workloads"):
        del sys.modules[name]


# --- the benchmark itself ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_DASK)
def test_a_contestant_carries_outputs_along_every_edge(bench: Any, name: str) -> None:
    workloads = import_module("workloads")

    for workload in (workloads.chain(7), workloads.fan(9), workloads.layered(4, 5)):
        run = bench.CONTESTANTS[name](workload)
        workload.check(run())
        workload.check(run())  # a second time: the graph is built once and run often


def test_a_wrong_value_at_the_end_is_noticed(bench: Any) -> None:
    workloads = import_module("workloads")

    with pytest.raises(AssertionError, match="chain3"):
        workloads.chain(3).check([{"n": 2}])


def test_the_workloads_are_those_that_were_promised(bench: Any) -> None:
    sizes = {workload.name: workload.nodes for workload in bench.standard()}
    assert sizes == {"chain100": 100, "fan1000": 1002, "layered10x100": 1000}
    assert sizes.keys() == bench.TARGETS.keys()


def test_everybody_runs_once_per_round_in_a_rotating_order(bench: Any) -> None:
    order: list[str] = []
    work = {name: lambda name=name: order.append(name) for name in "abc"}
    times = bench.rounds(work, count=2, warmup=1)
    assert order == [*"abc", *"bca", *"cab"]
    assert [len(seconds) for seconds in times.values()] == [2, 2, 2]


def test_a_ratio_is_taken_within_the_rounds(bench: Any) -> None:
    """The second round was ten times as slow for both, which must not matter."""
    assert bench.ratio([4.0, 40.0, 4.0], [1.0, 10.0, 2.0]) == 4.0
    assert bench.best_ratio([6.0, 40.0, 4.0], [1.0, 10.0, 2.0]) == 4.0


def test_a_missed_target_is_told(bench: Any) -> None:
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


def test_without_dask_it_says_how_to_get_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- growth, by counting -----------------------------------------------------------------------


class Course:
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
        name = self.run.graph.nodes[dispatch.place].id
        assert step(self.run, Claim("r", name, dispatch.token, "w", 1e9), 1.0, 2)
        return dispatch

    def _finish(self, dispatch: Dispatch) -> Decision:
        name = self.run.graph.nodes[dispatch.place].id
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


def test_a_completion_in_a_chain_costs_the_same_however_long_the_chain_is() -> None:
    short, long = Course(chain(100)), Course(chain(10_000))
    for course in (short, long):
        for _ in range(10):
            course.complete()
    price = short.price()
    assert price == long.price() > 0
    assert short.complete().changed == [11, 12]  # itself and its child, nobody else


def test_a_completion_in_a_fan_costs_the_same_however_wide_the_fan_is() -> None:
    narrow, wide = Course(fan(998)), Course(fan(9998))
    assert len(narrow.complete().changed) == 1 + 998
    assert len(wide.complete().changed) == 1 + 9998
    assert narrow.price() == wide.price() > 0
    assert narrow.complete().changed == [2]


def test_the_last_parent_of_a_join_costs_the_same_however_many_there_are() -> None:
    narrow, wide = Course(fan(10)), Course(fan(1000))
    for course, width in ((narrow, 10), (wide, 1000)):
        for _ in range(width):  # the root and all leaves but one
            course.complete()
    assert narrow.price() == wide.price() > 0
    assert [dispatch.place for dispatch in wide.waiting] == [1001]


def test_a_completion_costs_one_fixed_price_for_each_child() -> None:
    prices = [Course(fan(width)).price() for width in (100, 200, 400)]
    assert prices[2] - prices[1] == 2 * (prices[1] - prices[0]) > 0


def test_a_node_takes_as_many_calls_in_a_fan_of_10_000_as_in_one_of_1_000(bench: Any) -> None:
    narrow, wide = [calls_per_node(bench, "dovetail library", bench.fan(n)) for n in (998, 9998)]
    assert wide < 1.2 * narrow


def test_a_node_of_a_definition_takes_as_many_calls_in_a_fan_ten_times_as_wide(bench: Any) -> None:
    narrow, wide = [calls_per_node(bench, "dovetail definition", bench.fan(n)) for n in (200, 2000)]
    assert wide < 1.2 * narrow


def test_a_node_takes_as_many_calls_in_a_chain_ten_times_as_long(bench: Any) -> None:
    workloads = import_module("workloads")

    chains = workloads.chain(300), workloads.chain(3000)
    short, long = [calls_per_node(bench, "dovetail library", each) for each in chains]
    assert long < 1.2 * short


def calls_per_node(bench: Any, contestant: str, workload: Any) -> float:
    run = bench.CONTESTANTS[contestant](workload)
    run()  # what is made once is made now
    return calls(run) / float(workload.nodes)
