"""The tables of docs/scaling.md, made from capacity_costs.json; a test compares them with the page.

.venv/bin/python bench/capacity_page.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from capacity import HTTP, SIZES, recorded
from capacity_model import (
    ARCHIVED,
    CLUSTER,
    CLUSTER_ARCHIVED,
    COSTS_FILE,
    NOTHING,
    ONE,
    Cost,
    Demand,
    Measured,
    Plan,
    plan,
    shown_time,
)

SETUPS = {
    ONE: "one Redis",
    "one, 2 + 2": "one Redis, 2 + 2",
    ARCHIVED: "one Redis, archive",
    CLUSTER: "cluster",
    CLUSTER_ARCHIVED: "cluster, archive",
}
PROCESS_NAMES = {"redis": "Redis", "postgres": "PostgreSQL", "api": "API server"}
BYTES = {
    "in": "received by Redis",
    "out": "sent by Redis",
    "memory": "memory of Redis",
    "disk": "disk of PostgreSQL",
    "wal": "WAL of PostgreSQL",
}
KEYS = {
    "results": ("`wf:stream:results`", "9002"),
    "tasks": ("`tasks:<handler>`", "–"),
    "feed": ("`wf:feed:{all}`", "3894"),
    "unarchived": ("`wf:unarchived` (archive)", "1043"),
    "active": ("`wf:active`", "1012"),
    "lists": ("`wf:list:{runs}` and the list of each workflow (without archive)", "14900"),
    "others": ("leases, delayed nodes, ends of runs, workers, …", "–"),
}
PRICES = ("a run", "a wave", "a node", "a join", "1 kB of output")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def tables(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    measured = Measured.read(COSTS_FILE)
    yield sizes(measured)
    yield simulated_points(points)
    yield cpu(measured)
    yield sent_and_stored(measured)
    yield over_http(measured)
    yield shared_keys(measured)


# --- how many ----------------------------------------------------------------------------------


def sizes(measured: Measured) -> str:
    """The last column is that of the one before, if no process works in batches."""
    demands = [Demand(1e6), Demand(1e8), Demand(1e10), Demand(1e10, alone=True)]
    plans = [plan(demand, measured) for demand in demands]

    def row(title: str, value: Callable[[Plan], str]) -> list[str]:
        return [title, *map(value, plans)]

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"

    def hottest(one: Plan) -> str:
        key, used = max(one.hot_keys.items(), key=lambda item: item[1], default=("", 0.0))
        return f"{used:.2f} ({key})" if key else "–"

    rows = [
        row("at the busiest time, nodes/s", lambda one: f"{one.demand.nodes_per_second:,.0f}"),
        row("**installations**", lambda one: f"{one.installations}"),
        row("**servers of Redis**", lambda one: f"{one.installations * one.shards}"),
        row("**API servers**", lambda one: f"{one.api_servers:,}"),
        row("**orchestrators**", lambda one: f"{one.orchestrators:,}"),
        row("**workers**", lambda one: f"{one.workers:,}"),
        *(
            row(f"cores used: {title}", lambda one, kind=kind: number(one.cores[kind]))
            for kind, title in (
                ("api", "API servers"),
                ("orchestrator", "orchestrators"),
                ("worker", "workers, without handlers"),
                ("redis", "Redis"),
                ("postgres", "PostgreSQL"),
            )
        ),
        row("finished runs may stay in Redis for", lambda one: shown_time(one.retention_days)),
        row("memory of Redis, GB", lambda one: number(one.redis_gb)),
        row("traffic of Redis, MB/s", lambda one: number(one.network_mb_per_second)),
        row("connections to each Redis", lambda one: f"{one.connections:,.0f}"),
        row("PostgreSQL grows by GB a day", lambda one: number(one.disk_gb_per_day)),
        row("PostgreSQL writes WAL, MB/s", lambda one: number(one.wal_mb_per_second)),
        row("cores of the hottest key, of each cluster", hottest),
    ]
    return markdown(["nodes a day", "1 M", "100 M", "10 B", "10 B, worst case"], rows)


# --- how exact ---------------------------------------------------------------------------------


def simulated_points(points: Sequence[Mapping[str, Any]]) -> str:
    """How far predicted times and CPU are from the measured ones."""
    rows = []
    for setup, title in SETUPS.items():
        mine = [point for point in points if point["setup"] == setup]
        predicted = [point for point in mine if point["shape"] not in ("payload", HTTP)]
        http = ", and HTTP" if any(point["shape"] == HTTP for point in mine) else ""
        times = between([point["time_ratio"] for point in mine])
        work = between([point["cpu_ratio"] for point in predicted])
        rows.append([f"{title}{http}", f"{len(mine)}", times, work])
    return markdown(["set-up", "points", "predicted ÷ measured time", "CPU"], rows)


def between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


# --- what it costs -----------------------------------------------------------------------------


def prices(cost: Cost, unit: float, form: str) -> list[str]:
    found = [cost.run, cost.wave, cost.node, cost.join, 1e3 * cost.byte]
    return [f"{unit * value:{form}}" for value in found]


def cpu_of(kind: str, costs: Mapping[str, Cost]) -> Cost:
    """Of all processes of a kind: of all shards together, shared keys included."""
    mine = [cost for what, cost in costs.items() if what.split()[0] == kind]
    return Cost(*(sum(getattr(cost, f.name) for cost in mine) for f in fields(Cost)))


def cpu(measured: Measured) -> str:
    rows = []
    for setup, title in SETUPS.items():
        costs = measured.costs[setup]
        for kind in ("client", "redis", "worker", "orchestrator", "archiver", "postgres"):
            if kind in costs:
                row = prices(cpu_of(kind, costs), 1e6, ".1f")
                rows.append([f"{title}: {PROCESS_NAMES.get(kind, kind)}", *row])
    return markdown(["CPU µs", *PRICES], rows)


def sent_and_stored(measured: Measured) -> str:
    rows = [
        [f"{SETUPS[setup]}: {BYTES[what]}", *prices(measured.costs[setup][what], 1, ",.0f")]
        for setup in (ONE, ARCHIVED)
        for what in SIZES
        if what in measured.costs[setup]
    ]
    return markdown(["bytes", *PRICES], rows)


def over_http(measured: Measured) -> str:
    kinds = ("api", "orchestrator", "worker", "redis", "postgres")
    calls = (
        ("a trigger over HTTP, in place of “a run”", measured.http),
        ("`GET /runs/<id>`", measured.get),
    )
    rows = []
    for setup in (ONE, ARCHIVED):
        for title, found in calls:
            spent = found[setup]
            shown = [f"{1e6 * max(0.0, spent[k]):.0f}" if k in spent else "–" for k in kinds]
            rows.append([f"{SETUPS[setup]}: {title}", *shown])
    head = [PROCESS_NAMES.get(kind, kind) for kind in kinds]
    return markdown(["CPU µs", *head], rows)


def shared_keys(measured: Measured) -> str:
    rows = []
    for name, (key, slot) in KEYS.items():
        setup = CLUSTER if name == "lists" else CLUSTER_ARCHIVED
        cost = measured.costs[setup].get(f"redis {name}", NOTHING)
        run, wave, node, _, output = prices(cost, 1e6, ".1f")
        rows.append([key, slot, run, wave, node, output])
    return markdown(["key", "slot", "CPU µs: a run", "a wave", "a node", "1 kB of output"], rows)


if __name__ == "__main__":
    print("\n\n".join(tables(recorded()["points"])))
