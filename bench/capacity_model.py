"""From the measured cost of a run and of a node to a fleet: fit, simulation, calculator.

    .venv/bin/python bench/capacity_model.py --nodes-per-day 100e6 [--nodes-per-run 10 …]

prints how many processes, shards, bytes and connections this load takes, and what is full first.
The costs are those of capacity_costs.json, or of a report: `./dev bench --only capacity --json >
report.json`, then `--costs report.json`. Nothing here measures or waits: all functions are pure.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from itertools import combinations
from math import ceil, inf
from pathlib import Path

DAY_SECONDS = 86_400
BATCH_NODES = 128
"""A process takes so many nodes at once, if they wait."""
PACK_NODES = 32
"""So many nodes of one run travel together."""
SUBMIT_RUNS = 500
"""A client creates so many runs of a batch at once."""
ARCHIVE_DELAY_SECONDS = 0.525
"""A run is archived so long after it has moved: it rests for 0.4 s, then half of the archiver's
pause passes, and half of the pause of the bench, which looks whether all are archived."""
SCHEDULED_SHARE = 0.9
"""Of the cores: processes that wait for each other never fill all of them."""
REPLY_SECONDS = 0.0001
"""Until a process that waits for Redis is woken by the reply."""
FULL = 0.9
"""A resource that is used for so much of the time limits the rest."""


# --- costs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A run: how many nodes are ready together, wave after wave; how many nodes have several
    parents; the bytes of an output."""

    waves: tuple[int, ...]
    joins: int = 0
    bytes: int = 0

    @property
    def nodes(self) -> int:
        return sum(self.waves)


@dataclass(frozen=True)
class Cost:
    """What one resource gives for a run, a wave of it, a node, a node with several parents (in
    addition), and a byte of an output."""

    run: float = 0.0
    wave: float = 0.0
    node: float = 0.0
    join: float = 0.0
    byte: float = 0.0

    def of(self, shape: Shape) -> float:
        """For a whole run."""
        waves = self.wave * len(shape.waves)
        return self.run + waves + shape.nodes * self._node(shape)

    def of_part(self, shape: Shape, nodes: int) -> float:
        """For so many nodes of one wave."""
        return self.wave + nodes * self._node(shape)

    def _node(self, shape: Shape) -> float:
        return self.node + self.join * shape.joins / shape.nodes + self.byte * shape.bytes

    def __sub__(self, other: Cost) -> Cost:
        """What this costs more."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(Cost))
        return Cost(*(max(0.0, mine - others) for mine, others in pairs))


NOTHING = Cost()
Costs = Mapping[str, Cost]
"""By resource: a kind of process, or bytes of something."""
FITTED_PRICES = 4
"""Run, wave, node and join."""


def fit(points: Sequence[tuple[Shape, float]]) -> Cost:
    """The cost that fits what runs of these shapes took: least squares of the relative errors, and
    no price below zero. So a price is 0 where the best one would be negative."""
    rows = [
        ((1, len(shape.waves), shape.nodes, shape.joins), value)
        for shape, value in points
        if value > 0
    ]
    best, least = NOTHING, inf
    for size in range(1, FITTED_PRICES + 1):
        for chosen in combinations(range(FITTED_PRICES), size):
            prices = _least_squares([[row[at] / y for at in chosen] for row, y in rows])
            if prices is None or min(prices) < 0:
                continue
            full = [0.0] * FITTED_PRICES
            for at, price in zip(chosen, prices, strict=True):
                full[at] = price
            error = sum(
                (sum(p * c for p, c in zip(full, row, strict=True)) / y - 1) ** 2 for row, y in rows
            )
            if error < least - 1e-12:
                best, least = Cost(*full), error
    return best


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """x for which every row · x is near 1; None if the rows do not determine it."""
    if not rows:
        return None
    size = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda at: abs(table[at][i]))
        if abs(table[pivot][i]) < 1e-18 * max(1.0, abs(table[0][0])):
            return None
        table[i], table[pivot] = table[pivot], table[i]
        for other in range(size):
            if other != i:
                factor = table[other][i] / table[i][i]
                pairs = zip(table[other], table[i], strict=True)
                table[other] = [a - factor * b for a, b in pairs]
    return [table[i][size] / table[i][i] for i in range(size)]


# --- the simulation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """Processes, and the cores that all of them share."""

    cores: float
    orchestrators: int = 1
    workers: int = 1
    shards: int = 1
    clients: int = 1
    backends: int = 2
    """Processes of PostgreSQL that write at the same time."""


@dataclass(frozen=True)
class Outcome:
    seconds: float
    busy: dict[str, float]
    """Seconds that each process worked."""
    limit: str
    """What is full: `cores`, a kind of process, or `waiting` if nothing is."""


Then = Callable[[], None]


@dataclass
class _Process:
    batch_size: float
    queue: deque[tuple[int, float, Then]] = field(default_factory=deque)
    """Nodes, seconds of work, and what follows."""
    left: float = 0.0
    batch: list[Then] = field(default_factory=list)
    waits: int = 0
    """Replies of other processes that come before the next batch."""
    busy: float = 0.0

    def take(self) -> None:
        """What waits, up to a batch. What follows it follows when all of it is done."""
        nodes = 0
        while self.queue and nodes < self.batch_size:
            count, work, then = self.queue.popleft()
            nodes += count
            self.left += work
            self.batch.append(then)

    def end_batch(self) -> None:
        batch, self.batch, self.left = self.batch, [], 0.0
        for then in batch:
            then()

    def until_reply(self, call: Callable[[Then], None], then: Then) -> Then:
        """Makes a call to another process, and takes no other batch before its reply."""

        def replied() -> None:
            self.waits -= 1
            then()

        def make() -> None:
            self.waits += 1
            call(replied)

        return make


def simulate(
    shape: Shape, runs: int, costs: Costs, fleet: Fleet, shared: Mapping[str, int] | None = None
) -> Outcome:
    """Runs of one shape, all triggered at once, until the last has ended and is archived.

    A process does one thing at a time: it takes what waits for it, up to a batch, works, calls
    Redis, and takes the next batch after the reply. All processes share the cores evenly. The keys
    of a run are on one shard. Keys that all runs share are on the shard that `shared` says, and
    cost `redis <name>`. What an orchestrator does for the archive costs `archiver`.
    """
    kinds = {
        "client": (fleet.clients, SUBMIT_RUNS),
        "redis": (fleet.shards, BATCH_NODES),
        "orchestrator": (fleet.orchestrators, BATCH_NODES),
        "worker": (fleet.workers, BATCH_NODES),
        "postgres": (fleet.backends, BATCH_NODES),
    }
    processes = {
        f"{kind} {at}": _Process(size) for kind, (many, size) in kinds.items() for at in range(many)
    }
    clock = _Clock()

    def price(kind: str) -> Cost:
        return costs.get(kind, NOTHING)

    def one(kind: str, number: int) -> _Process:
        return processes[f"{kind} {number % kinds[kind][0]}"]

    def work(process: _Process, nodes: int, seconds: float, then: Then) -> None:
        process.queue.append((nodes, seconds, then))

    def in_redis(run: int, nodes: int, cost: Callable[[Cost], float]) -> Callable[[Then], None]:
        """At the shard of the run and at those of the shared keys, side by side."""
        parts = [(run, cost(price("redis")))]
        parts += [(at, cost(price(f"redis {name}"))) for name, at in (shared or {}).items()]

        def call(then: Then) -> None:
            left = len(parts)

            def replied() -> None:
                nonlocal left
                left -= 1
                if not left:
                    clock.at(clock.now + REPLY_SECONDS, then)

            for at, seconds in parts:
                work(one("redis", at), nodes, seconds, replied)

        return call

    created = [0.0] * runs

    def start(run: int) -> None:
        def begin() -> None:
            created[run] = clock.now
            wave(run, 0)

        client = one("client", run)
        create = in_redis(run, 1, lambda cost: cost.run)
        work(client, 1, price("client").of(shape), client.until_reply(create, begin))

    def wave(run: int, number: int) -> None:
        if number == len(shape.waves):
            end(run)
            return
        whole = shape.waves[number]
        packs = [min(PACK_NODES, whole - at) for at in range(0, whole, PACK_NODES)]
        left = len(packs)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                wave(run, number + 1)

        for at, nodes in enumerate(packs):
            pack(run, run + number + at, nodes, done)

    def pack(run: int, turn: int, nodes: int, done: Then) -> None:
        """A worker runs some nodes of a wave, and an orchestrator applies their results."""
        worker, orchestrator = one("worker", turn), one("orchestrator", turn)
        half = in_redis(run, nodes, lambda cost: cost.of_part(shape, nodes) / 2)

        def apply() -> None:
            seconds = price("orchestrator").of_part(shape, nodes)
            work(orchestrator, nodes, seconds, orchestrator.until_reply(half, done))

        seconds = price("worker").of_part(shape, nodes)
        work(worker, nodes, seconds, worker.until_reply(half, apply))

    def end(run: int) -> None:
        orchestrator = one("orchestrator", run)
        work(orchestrator, 1, price("orchestrator").run, _nothing)
        if price("postgres") != NOTHING:
            due = max(clock.now, created[run] + ARCHIVE_DELAY_SECONDS)
            clock.at(due, lambda: archive(run, orchestrator))

    def archive(run: int, orchestrator: _Process) -> None:
        def write() -> None:
            work(one("postgres", run), shape.nodes, price("postgres").of(shape), _nothing)

        work(orchestrator, shape.nodes, price("archiver").of(shape), write)

    for run in range(runs):
        start(run)
    seconds = _work_off(processes, clock, fleet.cores)
    busy = {name: process.busy for name, process in processes.items() if process.busy}
    return Outcome(seconds, busy, _limit(busy, seconds, fleet.cores))


def _nothing() -> None:
    pass


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._count = 0

    def at(self, due: float, then: Then) -> None:
        self._count += 1  # so that functions are never compared
        heappush(self._due, (due, self._count, then))

    def next(self) -> float:
        return self._due[0][0] if self._due else inf

    def ring(self) -> None:
        while self._due and self._due[0][0] <= self.now + 1e-12:
            heappop(self._due)[2]()


def _work_off(processes: Mapping[str, _Process], clock: _Clock, cores: float) -> float:
    """Until no process has work. Returns the time that this took."""
    while True:
        for process in processes.values():
            if not process.batch and not process.waits:
                process.take()
        working = [process for process in processes.values() if process.batch]
        if not working and clock.next() == inf:
            return clock.now
        speed = min(1.0, SCHEDULED_SHARE * cores / len(working)) if working else 1.0
        step = min([process.left for process in working], default=inf)
        step = min(step, (clock.next() - clock.now) * speed)
        clock.now += step / speed
        for process in working:
            process.left -= step
            process.busy += step
            if process.left <= 1e-12:
                process.end_batch()
        clock.ring()


def _limit(busy: Mapping[str, float], seconds: float, cores: float) -> str:
    if not seconds:
        return "waiting"
    name, most = max(busy.items(), key=lambda one: one[1])
    if most / seconds >= FULL:
        return name.split()[0]
    return "cores" if sum(busy.values()) / seconds / cores >= FULL * SCHEDULED_SHARE else "waiting"


# --- the calculator ----------------------------------------------------------------------------

COSTS_FILE = Path(__file__).with_name("capacity_costs.json")
ONE, ARCHIVED = "one", "archived"
CLUSTER, CLUSTER_ARCHIVED = "cluster, 2 + 2", "cluster, 2 + 2, archived"
LEAST_SHARDS = 3
LEAST_PROCESSES = 2
"""One may die."""
DEFAULT_RETENTION_DAYS = 7.0
LEAST_RETENTION_DAYS = 1 / 24
"""Finished runs stay in Redis for an hour at least, if memory decides."""
POSTGRES_CORES, POSTGRES_WAL_MB = 16, 200.0
"""Of one server, and what it may write in a second: assumed, not measured."""
REDIS_CONNECTIONS = 5
"""Of one process to each server of Redis."""
POSTGRES_CONNECTIONS = 10
"""At most, of an API server or an orchestrator."""
MAX_POSTGRES_CONNECTIONS = 100
"""The default of PostgreSQL."""
BACKLOG_NODES = 100_000
"""DOVETAIL_MAX_BACKLOG."""
BACKLOG_SECONDS = 10.0
"""A backlog that is full sooner refuses runs at every hiccup."""
FEED_EVENTS, EVENTS_PER_RUN = 100_000, 3
FEED_SECONDS = 60.0
"""A reader of the feed may be away for so long."""


@dataclass(frozen=True)
class Demand:
    """What is to be done, and how full anything may be at the busiest time."""

    nodes_per_day: float
    nodes_per_run: int = 10
    waves_per_run: int = 4
    joins_per_run: int = 1
    output_bytes: int = 1000
    handler_seconds: float = 0.1
    handler_cpu_seconds: float = 0.0
    handlers: int = 4
    gets_per_run: float = 1.0
    batched: bool = False
    """Runs are triggered in batches, not one by one over HTTP."""
    alone: bool = False
    """Each wave travels alone: many processes, none of them busy enough to work in batches."""
    archive: bool = True
    peak: float = 3.0
    use: float = 0.6
    concurrency: int = 32
    redis_gb: float = 32.0

    @property
    def shape(self) -> Shape:
        each, more = divmod(self.nodes_per_run, self.waves_per_run)
        waves = tuple(each + (at < more) for at in range(self.waves_per_run))
        return Shape(waves, self.joins_per_run, self.output_bytes)

    @property
    def nodes_per_second(self) -> float:
        return self.nodes_per_day / DAY_SECONDS * self.peak

    @property
    def runs_per_second(self) -> float:
        return self.nodes_per_second / self.nodes_per_run

    @property
    def runs_per_day(self) -> float:
        return self.nodes_per_day / self.nodes_per_run


@dataclass(frozen=True)
class Measured:
    """The report of the bench."""

    costs: Mapping[str, Costs]
    alone: Mapping[str, Mapping[str, float]]
    http: Mapping[str, Mapping[str, float]]
    get: Mapping[str, Mapping[str, float]]

    @classmethod
    def read(cls, path: Path) -> Measured:
        found = json.loads(path.read_text())
        found = found.get("capacity", found)
        costs = {
            name: {what: Cost(**prices) for what, prices in one.items()}
            for name, one in found["costs"].items()
        }
        return cls(costs, found["alone"], found["http"], found["get"])

    def costs_for(self, demand: Demand, *, cluster: bool) -> Costs:
        """With what a run costs that is triggered alone over HTTP. That was measured on one Redis;
        on a cluster it is assumed to add as much."""
        alone = ARCHIVED if demand.archive else ONE
        name = (CLUSTER_ARCHIVED if demand.archive else CLUSTER) if cluster else alone
        found = dict(self.costs[name])
        if demand.alone:
            for what, wave in self.alone[name].items():
                found[what] = replace(found[what], wave=wave)
        if demand.batched:
            found["api"] = found["client"]
            return found
        for what in ("redis", "orchestrator", "worker", "postgres"):
            if what in found:
                run = self.costs[alone][what].run
                more = max(0.0, self.http[alone].get(what, 0.0) - run)
                if what == "orchestrator":  # the archiver is inside it
                    more = max(0.0, more - self.costs[alone].get("archiver", NOTHING).run)
                found[what] = replace(found[what], run=found[what].run + more)
        found["api"] = Cost(run=self.http[alone]["api"])
        return found


@dataclass(frozen=True)
class Plan:
    demand: Demand
    installations: int
    """Each has its own Redis or cluster, its own PostgreSQL and its own processes."""
    shards: int
    """Of one installation; 1 is a Redis without a cluster."""
    api_servers: int
    orchestrators: int
    workers: int
    cores: dict[str, float]
    """Used at the busiest time, of all installations."""
    hot_keys: dict[str, float]
    """Cores that a key of one slot uses, of one installation."""
    retention_days: float
    redis_gb: float
    """Of all installations."""
    disk_gb_per_day: float
    wal_mb_per_second: float
    network_mb_per_second: float

    @property
    def connections(self) -> float:
        """To each server of Redis."""
        processes = self.api_servers + self.orchestrators + self.workers
        return REDIS_CONNECTIONS * processes / self.installations


def plan(demand: Demand, measured: Measured) -> Plan:
    """Everything is sized for the busiest time, with each core used no more than `use`."""
    costs = measured.costs_for(demand, cluster=False)
    cluster = demand.runs_per_second * costs["redis"].of(demand.shape) > demand.use
    if cluster:
        costs = measured.costs_for(demand, cluster=True)
    cores = _cores(demand, measured, costs)
    hot = _hot_keys(demand, costs) if cluster else {}
    wal = demand.runs_per_second * costs.get("wal", NOTHING).of(demand.shape) / 1e6
    installations = ceil(
        max(
            1,
            max(hot.values(), default=0.0) / demand.use,
            cores["postgres"] / demand.use / POSTGRES_CORES,
            wal / POSTGRES_WAL_MB,
        )
    )
    gb_per_day = demand.runs_per_day * costs["memory"].of(demand.shape) / 1e9
    seconds = demand.waves_per_run * demand.handler_seconds
    unfinished_gb = demand.runs_per_second * seconds * costs["memory"].of(demand.shape) / 1e9
    shards = 1
    if cluster:
        least = (unfinished_gb + LEAST_RETENTION_DAYS * gb_per_day) / demand.redis_gb
        wanted = max(cores["redis"] / demand.use, least) / installations
        shards = max(LEAST_SHARDS, ceil(wanted))
    space = installations * shards * demand.redis_gb - unfinished_gb
    days = min(DEFAULT_RETENTION_DAYS, max(0.0, space / gb_per_day))
    slots = demand.nodes_per_second * demand.handler_seconds
    workers = max(cores["worker"] / demand.use, slots / demand.concurrency)

    def processes(wanted: float) -> int:
        return max(LEAST_PROCESSES, ceil(wanted / installations)) * installations

    traffic = demand.runs_per_second * sum(costs[name].of(demand.shape) for name in ("in", "out"))
    return Plan(
        demand,
        installations,
        shards,
        processes(cores["api"] / demand.use),
        processes(cores["orchestrator"] / demand.use),
        processes(workers),
        cores,
        {name: used / installations for name, used in hot.items()},
        days,
        unfinished_gb + days * gb_per_day,
        demand.runs_per_day * costs.get("disk", NOTHING).of(demand.shape) / 1e9,
        wal,
        traffic / 1e6,
    )


def _cores(demand: Demand, measured: Measured, costs: Costs) -> dict[str, float]:
    """At the busiest time."""

    def used(*names: str) -> float:
        prices = (costs.get(name, NOTHING).of(demand.shape) for name in names)
        return demand.runs_per_second * sum(prices)

    get = measured.get[ARCHIVED if demand.archive else ONE]
    gets = demand.runs_per_second * demand.gets_per_run
    handlers = demand.nodes_per_second * demand.handler_cpu_seconds
    shared = [name for name in costs if name.startswith("redis ")]
    return {
        "api": used("api") + gets * get["api"],
        "orchestrator": used("orchestrator", "archiver"),
        "worker": used("worker") + handlers,
        "redis": used("redis", *shared) + gets * get["redis"],
        "postgres": used("postgres"),
    }


def _hot_keys(demand: Demand, costs: Costs) -> dict[str, float]:
    """Cores of each key that all runs share. Each handler has its own stream of tasks."""
    found = {
        name.removeprefix("redis "): demand.runs_per_second * cost.of(demand.shape)
        for name, cost in costs.items()
        if name.startswith("redis ")
    }
    if "tasks" in found:
        found["tasks"] /= demand.handlers
    return found


def limits(demand: Demand, measured: Measured) -> list[tuple[float, str]]:
    """Nodes a day at which one of each thing is full, the smallest first."""
    one = measured.costs_for(demand, cluster=False)
    cores = _cores(demand, measured, one)
    hot = _hot_keys(demand, measured.costs_for(demand, cluster=True))
    hottest = max(hot, key=lambda name: hot[name])
    memory = DEFAULT_RETENTION_DAYS * demand.runs_per_day * one["memory"].of(demand.shape) / 1e9
    slots = demand.nodes_per_second * demand.handler_seconds
    events = demand.runs_per_second * EVENTS_PER_RUN
    processes = (cores["api"] + cores["orchestrator"]) / demand.use
    wal = demand.runs_per_second * one.get("wal", NOTHING).of(demand.shape) / 1e6
    fullness = {
        "one API server": cores["api"] / demand.use,
        "one orchestrator": cores["orchestrator"] / demand.use,
        "one worker, by its CPU": cores["worker"] / demand.use,
        f"one worker, {demand.concurrency} nodes at once": slots / demand.concurrency,
        "one Redis, by its core": cores["redis"] / demand.use,
        f"one Redis of {demand.redis_gb:g} GB, finished runs for 7 days": memory / demand.redis_gb,
        f"a cluster, by its hottest key ({hottest})": hot[hottest] / demand.use,
        "the feed keeps less than a minute": events * FEED_SECONDS / FEED_EVENTS,
        "the backlog is full after 10 s without workers": (
            demand.nodes_per_second * BACKLOG_SECONDS / BACKLOG_NODES
        ),
    }
    if demand.archive:
        fullness |= {
            f"PostgreSQL with {POSTGRES_CORES} cores": (
                cores["postgres"] / demand.use / POSTGRES_CORES
            ),
            f"PostgreSQL, {POSTGRES_WAL_MB:g} MB of WAL a second": wal / POSTGRES_WAL_MB,
            f"{MAX_POSTGRES_CONNECTIONS} connections to PostgreSQL": (
                processes * POSTGRES_CONNECTIONS / MAX_POSTGRES_CONNECTIONS
            ),
        }
    found = [(demand.nodes_per_day / used, name) for name, used in fullness.items() if used > 0]
    return sorted(found)


def shown(made: Plan, measured: Measured) -> str:
    demand = made.demand
    cluster = f"{made.shards} shards" if made.shards > 1 else "1, no cluster"
    rows = [
        ("at the busiest time", f"{demand.nodes_per_second:,.0f} nodes/s"),
        ("installations", f"{made.installations:,}"),
        ("Redis, of each installation", cluster),
        ("API servers", f"{made.api_servers:,}"),
        ("orchestrators", f"{made.orchestrators:,}"),
        ("workers", f"{made.workers:,}"),
        ("cores used", ", ".join(f"{name} {used:.1f}" for name, used in made.cores.items())),
        ("finished runs in Redis", f"{shown_time(made.retention_days)}, {made.redis_gb:,.1f} GB"),
        ("traffic of Redis", f"{made.network_mb_per_second:,.1f} MB/s"),
    ]
    if demand.archive:
        disk = f"{made.disk_gb_per_day:,.1f} GB a day, WAL {made.wal_mb_per_second:,.1f} MB/s"
        rows.append(("PostgreSQL", disk))
    if made.hot_keys:
        hot = sorted(made.hot_keys.items(), key=lambda one: -one[1])[:3]
        keys = ", ".join(f"{name} {used:.2f}" for name, used in hot)
        rows.append(("cores of the hottest keys", keys))
    rows.append(("connections", f"{made.connections:,.0f} to each server of Redis"))
    passed = [name for most, name in limits(demand, measured) if most <= demand.nodes_per_day]
    rows.append(("more than", "; ".join(passed) or "nothing: one of each is enough"))
    return "\n".join(f"{name:28} {value}" for name, value in rows)


def shown_time(days: float) -> str:
    return f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} hours"


FLAGS = {
    "batched": "runs are triggered in batches, not one by one",
    "alone": "no process works in batches: the dearest case",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for one in fields(Demand):
        flag = f"--{one.name.replace('_', '-')}"
        if one.name == "archive":
            parser.add_argument("--no-archive", dest="archive", action="store_false")
        elif one.name in ("batched", "alone"):
            parser.add_argument(flag, action="store_true", help=FLAGS[one.name])
        elif one.name == "nodes_per_day":
            parser.add_argument(flag, type=float, required=True)
        else:
            kind = type(one.default)
            parser.add_argument(flag, type=kind, default=one.default, help=f"{one.default}")
    parser.add_argument("--costs", type=Path, default=COSTS_FILE, help="a report of the bench")
    parser.add_argument("--limits", action="store_true", help="when one of each is full, instead")
    options = vars(parser.parse_args())
    measured, listed = Measured.read(options.pop("costs")), options.pop("limits")
    demand = Demand(**options)
    problem = problem_of(demand)
    if problem:
        parser.error(problem)
    if listed:
        print("\n".join(f"{most:18,.0f}  {name}" for most, name in limits(demand, measured)))
        return
    print(shown(plan(demand, measured), measured))


def problem_of(demand: Demand) -> str:
    """What is wrong with it; empty if nothing is."""
    zero_is_fine = {"output_bytes", "handler_seconds", "handler_cpu_seconds", "gets_per_run"}
    zero_is_fine |= {"joins_per_run", "batched", "alone", "archive"}
    for one in fields(Demand):
        value = getattr(demand, one.name)
        if not (0 <= value < inf) or (not value and one.name not in zero_is_fine):
            return f"--{one.name.replace('_', '-')} is {value}: give a number above 0"
    if demand.waves_per_run > demand.nodes_per_run:
        return "--waves-per-run is above --nodes-per-run: each wave has a node at least"
    if demand.use > 1:
        return "--use is the share of a core that may be used, as in 0.6"
    return ""


if __name__ == "__main__":
    main()
