"""The capacity part of the benchmark: the fit, the simulation and the calculator, without servers.

The simulation is compared with a round that `bench/capacity_points.json` keeps; `./dev bench
--only capacity --check` measures again.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
COMMAND = "$ .venv/bin/python bench/capacity_model.py "


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The scripts of bench/ as modules."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "bench")
        yield import_module("capacity")
    for path in (ROOT / "bench").glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def model(bench: Any) -> Any:
    return import_module("capacity_model")


@pytest.fixture(scope="module")
def measured(model: Any) -> Any:
    return model.Measured.read(model.COSTS_FILE)


# --- the fit -----------------------------------------------------------------------------------


def shapes(model: Any) -> list[Any]:
    return [model.Shape((1,)), model.Shape((1,) * 10), model.Shape((1, 98, 1), 1)] + [
        model.Shape((width,) * width, width * (width - 1)) for width in (3, 10)
    ]


def test_a_fit_finds_the_prices_that_made_the_points(model: Any) -> None:
    price = model.Cost(40.0, 7.0, 3.0, 2.0)
    found = model.fit([(shape, price.of(shape)) for shape in shapes(model)])
    assert [found.run, found.wave, found.node, found.join] == pytest.approx([40, 7, 3, 2])


def test_a_fit_has_no_price_below_zero(model: Any) -> None:
    odd = [(shape, 100.0 / shape.nodes + 1) for shape in shapes(model)]
    found = model.fit(odd)
    assert min(found.run, found.wave, found.node, found.join) >= 0
    assert model.fit([(model.Shape((1,)), 0.0)]) == model.NOTHING


# --- the simulation ----------------------------------------------------------------------------


def costs(model: Any) -> dict[str, Any]:
    return {
        "client": model.Cost(run=30e-6),
        "redis": model.Cost(40e-6, 10e-6, 20e-6),
        "orchestrator": model.Cost(10e-6, 5e-6, 10e-6),
        "worker": model.Cost(0, 5e-6, 10e-6),
    }


def test_on_one_core_the_work_of_all_processes_adds_up(model: Any) -> None:
    shape = model.Shape((1, 2, 1), 1)
    found = model.simulate(shape, 200, costs(model), model.Fleet(cores=1))
    whole = 200 * sum(cost.of(shape) for cost in costs(model).values())
    # Redis gives its part of a wave in two halves; nothing is lost.
    assert sum(found.busy.values()) == pytest.approx(whole)
    assert found.seconds == pytest.approx(whole / model.SCHEDULED_SHARE, rel=0.03)  # and replies
    assert found.limit == "cores"


def test_with_enough_cores_the_busiest_process_is_the_limit(model: Any) -> None:
    dear = costs(model) | {"redis": model.Cost(node=1e-3)}
    shape = model.Shape((1, 4, 4, 1))
    found = model.simulate(shape, 300, dear, model.Fleet(cores=8))
    assert found.limit == "redis"
    more = model.simulate(shape, 300, dear, model.Fleet(cores=8, shards=3))
    assert more.seconds < found.seconds / 1.6


def test_more_shards_do_not_help_a_key_that_all_runs_share(model: Any) -> None:
    dear = costs(model) | {"redis results": model.Cost(node=1e-3)}
    shape = model.Shape((1, 4, 4, 1))
    times = [
        model.simulate(shape, 100, dear, model.Fleet(cores=20, shards=shards), {"results": 0})
        for shards in (3, 9)
    ]
    assert [one.limit for one in times] == ["redis", "redis"]
    assert times[1].seconds > 0.9 * times[0].seconds


def test_a_process_takes_no_batch_before_the_reply_to_its_last(model: Any) -> None:
    chain = {"worker": model.Cost(node=1.0), "redis": model.Cost(node=2.0)}
    found = model.simulate(model.Shape((1,)), 200, chain, model.Fleet(cores=4))
    # 128 nodes work and are written, half of Redis' part; then the other 72.
    assert found.seconds >= 128 + 128 + 72 + 72


def test_the_archive_begins_after_its_delay_and_is_waited_for(model: Any) -> None:
    kept = costs(model) | {"postgres": model.Cost(run=1e-3), "archiver": model.Cost(run=1e-4)}
    found = model.simulate(model.Shape((1,)), 1, kept, model.Fleet(cores=2))
    assert found.seconds == pytest.approx(model.ARCHIVE_DELAY_SECONDS, rel=0.01)
    assert found.busy["postgres 0"] == pytest.approx(1e-3)
    assert found.limit == "waiting"


@pytest.fixture(scope="module")
def points(bench: Any) -> Any:
    """Of the round that is kept."""
    return bench.recorded()["points"]


def test_the_simulation_reproduces_every_measured_point_within_20_percent(
    bench: Any, points: Any
) -> None:
    shapes = [name for name in bench.shapes() if name != "alone"]
    over_http = {(setup, bench.HTTP) for setup in (bench.ONE, bench.ARCHIVED)}
    places = {(point["setup"], point["shape"]): point for point in points}
    assert (
        places.keys() == {(one, shape) for one in bench.SIMULATED for shape in shapes} | over_http
    )
    for (setup, shape), point in places.items():
        assert point["time_ratio"] == pytest.approx(1, abs=0.2), f"{setup}: {shape}"
        if shape != "payload":
            assert point["cpu_ratio"] == pytest.approx(1, abs=0.2), f"{setup}: {shape}"


# --- the calculator ----------------------------------------------------------------------------


def test_a_small_load_takes_two_of_each_process_and_one_redis(model: Any, measured: Any) -> None:
    found = model.plan(model.Demand(nodes_per_day=1e5), measured)
    assert (found.installations, found.shards) == (1, 1)
    assert (found.api_servers, found.orchestrators, found.workers) == (2, 2, 2)
    assert found.retention_days == model.DEFAULT_RETENTION_DAYS


def test_nothing_is_used_more_than_allowed(model: Any, measured: Any) -> None:
    for nodes in (1e6, 1e8, 1e9, 1e10, 1e11):
        found = model.plan(model.Demand(nodes_per_day=nodes), measured)
        many = {
            "api": found.api_servers,
            "orchestrator": found.orchestrators,
            "worker": found.workers,
            "redis": found.shards * found.installations,
        }
        for kind, count in many.items():
            assert found.cores[kind] / count <= 0.6 + 1e-9, (nodes, kind)
        assert max(found.hot_keys.values(), default=0.0) <= 0.6 + 1e-9
        space = found.shards * found.installations * found.demand.redis_gb
        assert found.redis_gb <= space + 1e-9


@pytest.mark.parametrize("nodes", [1e8, 5e8])
def test_a_simulated_fleet_of_the_plan_does_a_second_of_the_busiest_time_in_a_second(
    model: Any, measured: Any, nodes: float
) -> None:
    demand = model.Demand(nodes_per_day=nodes)
    made = model.plan(demand, measured)
    costs = dict(measured.costs_for(demand, cluster=made.shards > 1))
    costs["client"] = costs["api"]
    fleet = model.Fleet(
        cores=1e6,
        clients=made.api_servers,
        orchestrators=made.orchestrators,
        workers=made.workers,
        shards=made.shards,
        backends=model.POSTGRES_CORES,
    )
    shared = {name: at % made.shards for at, name in enumerate(made.hot_keys)}
    found = model.simulate(demand.shape, round(demand.runs_per_second), costs, fleet, shared)
    # The runs come all at once here, and the archive begins half a second later.
    assert found.seconds < 1.0 + model.ARCHIVE_DELAY_SECONDS


def test_waiting_handlers_take_workers_and_busy_ones_take_cores(model: Any, measured: Any) -> None:
    quick = model.Demand(nodes_per_day=1e8, handler_seconds=0.01)
    plain, slow, busy = (
        model.plan(demand, measured)
        for demand in (
            quick,
            replace(quick, handler_seconds=10.0),
            replace(quick, handler_cpu_seconds=0.01),
        )
    )
    assert slow.workers == pytest.approx(1e8 / 86_400 * 3 * 10 / 32, abs=1)
    assert busy.cores["worker"] == pytest.approx(plain.cores["worker"] + 1e8 / 86_400 * 3 * 0.01)


def test_limits_come_in_order_and_do_not_depend_on_the_load(model: Any, measured: Any) -> None:
    small, large = (
        model.limits(model.Demand(nodes_per_day=nodes), measured) for nodes in (1e6, 1e9)
    )
    assert [name for _, name in small] == [name for _, name in large]
    assert [most for most, _ in small] == pytest.approx([most for most, _ in large])
    assert sorted(small) == small


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"nodes_per_day": 0}, "--nodes-per-day is 0"),
        ({"nodes_per_day": float("nan")}, "--nodes-per-day is nan"),
        ({"nodes_per_day": 1, "handler_seconds": -1}, "--handler-seconds is -1"),
        ({"nodes_per_day": 1, "waves_per_run": 11}, "--waves-per-run is above --nodes-per-run"),
        ({"nodes_per_day": 1, "use": 60}, "as in 0.6"),
    ],
)
def test_a_wrong_demand_is_refused_by_its_name(
    model: Any, wrong: dict[str, float], named: str
) -> None:
    assert named in model.problem_of(model.Demand(**wrong))


def test_the_page_shows_what_the_calculator_prints(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [block for block in PAGE.read_text().split("```")[1::2] if COMMAND in block]
    assert len(blocks) == 2
    for block in blocks:
        command, _, output = block.partition(COMMAND)[2].partition("\n")
        monkeypatch.setattr(sys, "argv", ["capacity_model.py", *shlex.split(command)])
        model.main()
        assert capsys.readouterr().out == output, command


def test_the_page_has_the_tables_of_the_kept_prices(bench: Any, points: Any) -> None:
    text = PAGE.read_text()
    made = list(import_module("capacity_page").tables(points))
    assert len(made) == 6
    for table in made:
        assert table in text, f"bench/capacity_page.py prints another one:\n{table}"


def test_the_worst_case_of_100_million_nodes_takes_the_same_fleet(
    model: Any, measured: Any
) -> None:
    for nodes in (1e6, 1e8):
        usual, worst = (
            model.plan(model.Demand(nodes, alone=alone), measured) for alone in (False, True)
        )
        for part in ("installations", "shards", "api_servers", "orchestrators", "workers"):
            assert getattr(usual, part) == getattr(worst, part), part


# --- the report --------------------------------------------------------------------------------


def test_a_report_is_made_of_samples(bench: Any, model: Any, monkeypatch: Any) -> None:
    small = {name: replace(work, runs=3) for name, work in bench.shapes().items()}
    monkeypatch.setattr(bench, "shapes", lambda: small)
    prices = {"orchestrator": 1e-5, "worker": 1e-5, "client": 1e-5}

    def sample(name: str, shape: Any, runs: int) -> Any:
        spent = dict(prices)
        shards = [""]
        if name.startswith("cluster"):
            shards = ["0", "1", "2"]
        elif name.startswith("apart"):
            shards = [*bench.shared_keys(), "runs"]
        for shard in shards:
            spent |= {f"redis {shard}": 1e-5, f"memory {shard}": 100.0}
        if "archived" in name:
            spent |= {"postgres": 1e-5, "orchestrator": 3e-5, "disk": 50.0}
        return bench.Sample(0.01, 2.0, {what: runs * shape.nodes * v for what, v in spent.items()})

    samples: dict[str, Any] = {}
    for name in bench.SETUPS:
        for work in small.values():
            samples[f"{name}: {work.name}"] = [sample(name, bench.shape_of(work), work.runs)]
    for name in (bench.ONE, bench.ARCHIVED):
        single = sample(name, model.Shape((1,)), 10)
        single.spent["api"] = 1e-3
        samples |= {f"{name}: http": [(single, 10)], f"{name}: get": [single]}
    found = bench.evaluated(samples)
    one = model.Cost(**found["costs"]["one"]["orchestrator"])
    assert [one.run, one.wave, one.node, one.join] == pytest.approx([0, 0, 1e-5, 0], abs=1e-12)
    assert found["costs"]["archived"]["archiver"]["node"] == pytest.approx(2e-5)
    cluster = found["costs"]["cluster, 2 + 2"]
    assert cluster["redis results"]["node"] == pytest.approx(1e-5)
    assert {point["setup"] for point in found["points"] if point["held_out"]} == {
        *("one", "one, 2 + 2", "archived", "cluster, 2 + 2", "cluster, 2 + 2, archived")
    }
    assert all(point["cpu_ratio"] > 0 for point in found["points"])
    record = bench.condensed(samples, found["points"])
    again = bench.evaluated(bench.restored(record))
    assert again["costs"] == found["costs"]
    for one, other in zip(again["points"], found["points"], strict=True):
        assert one["time_ratio"] == pytest.approx(other["time_ratio"])
    assert "cluster, 2 + 2, archived" in bench.table(found)
    verdicts = bench.verdicts(found, lambda what, found, wanted, reached: {"reached": reached})
    assert [one["reached"] for one in verdicts][1] is False  # the times are made up


def test_slots_apart_are_all_slots_once(bench: Any) -> None:
    ranges = [both for shard in bench.slots_apart() for both in shard]
    slots = sorted(slot for low, high in ranges for slot in range(low, high + 1))
    assert slots == list(range(16_384))
    assert all(bench.slots_apart())
