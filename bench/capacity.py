"""What a run and a node cost each process, over Redis: CPU, bytes, memory, disk.

    ./dev bench --only capacity [--check] [--json > report.json]
    .venv/bin/python bench/capacity.py report.json     # shows it, keeps its costs and a round

Every set-up has servers and services of its own and runs the same shapes, interleaved. The costs
are fitted to the CPU times alone (capacity_model.py); the wall times are left to check the
simulation with. Other programs on the machine change wall times, so the simulation gets as many
cores as they left, which /proc/stat tells.

`apart` is a cluster whose shards have different keys: one has the keys of runs, the others have one
key each that all runs share, such as the stream of results. So the CPU of its shards says what a
node costs each of them. In a usual cluster the keys of runs are spread over all shards, but a
shared key is on one shard, and more shards do not help it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import api
import workloads
from apart import SeparateProcess
from capacity_model import (
    ARCHIVED,
    CLUSTER,
    CLUSTER_ARCHIVED,
    COSTS_FILE,
    NOTHING,
    ONE,
    Cost,
    Fleet,
    Shape,
    fit,
    simulate,
)
from fleet import cpu_seconds, private_postgres, private_redis, server_module, services, used
from measuring import rounds
from workloads import Workload

PAYLOAD_BYTES = 10_000
ALONE_NODES = 200
CLIENTS = 32
START_SECONDS = 60.0
GETS = 300
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

DOUBLED = "one, 2 + 2"
APART, APART_ARCHIVED = "apart, 2 + 2", "apart, 2 + 2, archived"
SIMULATED = [ONE, DOUBLED, ARCHIVED, CLUSTER, CLUSTER_ARCHIVED]
SETUPS = [*SIMULATED, APART, APART_ARCHIVED]


def shapes() -> dict[str, Workload]:
    made = [
        Workload("single", {"a": []}, ["a"], 1, runs=3000),
        replace(workloads.chain(10), runs=400),
        replace(workloads.fan(8), runs=800),
        replace(workloads.fan(98), runs=100),
        replace(workloads.layered(10, 10), runs=60),
        replace(workloads.diamonds(1200), name="diamonds"),
        replace(workloads.layered(4, 4), runs=300),
        replace(workloads.diamonds(150), name="payload", bytes=PAYLOAD_BYTES),
        replace(workloads.chain(ALONE_NODES), name="alone"),
    ]
    return {work.name: work for work in made}


FITTED = ("single", "chain10", "fan98", "layered10x10", "layered4x4")
"""The costs are fitted to the CPU of these. No time is in a fit."""
HELD_OUT = ("diamonds", "fan8")
"""These only check the fit."""
WITHOUT_ARCHIVE = {ARCHIVED: ONE, CLUSTER_ARCHIVED: CLUSTER}
KEYS_APART = {CLUSTER: APART, CLUSTER_ARCHIVED: APART_ARCHIVED}
"""Where the costs of the shared keys of a cluster are measured."""
MOST_ERROR = 0.2
RECORD_FILE = Path(__file__).with_name("capacity_points.json")
"""A round of the bench, which the simulation is tested with."""
HTTP = "http"
"""Single nodes that are triggered one by one over HTTP: each round has its own number of runs."""
PROCESSES = ("redis", "orchestrator", "archiver", "worker", "client", "postgres", "api")
SIZES = ("in", "out", "memory", "disk", "wal")
IDLE_SECONDS = 3.0


# --- the set-ups -------------------------------------------------------------------------------


@dataclass
class Setup:
    """Servers and services that are up."""

    job: SeparateProcess
    shards: dict[str, Any]
    pids: dict[str, list[int]]
    database_url: str | None = None
    api_url: str = ""
    idle: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each process in a second without work."""

    @property
    def url(self) -> str:
        return str(next(iter(self.shards.values())).url)

    def spent(self) -> dict[str, float]:
        """Totals since the start: subtract two of them."""
        found = {kind: sum(map(cpu_seconds, pids)) for kind, pids in self.pids.items()}
        for name, shard in self.shards.items():
            found[f"redis {name}"] = used(shard, {}).cpu["redis"]
            for key, what in (("net_input", "in"), ("net_output", "out")):
                found[f"{what} {name}"] = float(info(shard, "stats")[f"total_{key}_bytes"])
            found[f"memory {name}"] = float(info(shard, "memory")["used_memory"])
        if self.database_url is not None:
            size, wal = asyncio.run(postgres_bytes(self.database_url))
            found["disk"], found["wal"] = size, wal
        return found


def info(shard: Any, section: str) -> dict[str, str]:
    lines = shard.ask("INFO", section).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def postgres_bytes(url: str) -> tuple[float, float]:
    """Of the database, and of all that was ever written to the log."""
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        row = await connection.fetchrow(
            "SELECT pg_database_size(current_database()), pg_current_wal_lsn() - '0/0'::pg_lsn"
        )
    finally:
        await connection.close()
    return float(row[0]), float(row[1])


def slots_apart() -> list[list[tuple[int, int]]]:
    """Of shards with a shared key each, and of the last one, which has the runs."""
    from dovetail.redis_client.cluster import SLOTS, slot_of

    names = [list(map(slot_of, map(str.encode, keys))) for keys in shared_keys().values()]
    taken = {slot: shard for shard, slots in enumerate(names) for slot in slots}
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(len(names) + 1)]
    for slot in range(SLOTS):
        mine = ranges[taken.get(slot, len(names))]
        if mine and mine[-1][1] == slot - 1:
            mine[-1] = (mine[-1][0], slot)
        else:
            mine.append((slot, slot))
    return ranges


def shared_keys() -> dict[str, list[str]]:
    """Keys that many runs write, each of which is in one slot."""
    from dovetail.stores.redis import archive, definitions, feed, run_index, timers, workers
    from dovetail.transports.messages import RESULTS, stream_of
    from dovetail.transports.streams import sender

    others = [
        *(timers.LEASES, timers.DELAYED, timers.PARKED, definitions.ACCEPTED, sender.STOPS),
        *(run_index.WORKFLOWS, run_index.BATCH_IDS, archive.ARCHIVED),
        *(workers.WORKERS, workers.SERVICES, workers.SCHEMAS, sender.ENDS),
    ]
    return {
        "results": [RESULTS],
        "tasks": [stream_of("noop")],
        "lists": [run_index.RUNS, *map(run_index.workflow_key, shapes())],
        "active": [timers.ACTIVE],
        "feed": [feed.FEED],  # and the list of batches, whose hash tag is the same
        "unarchived": [archive.UNARCHIVED],
        "others": others,
    }


@contextmanager
def opened(names: list[str], works: list[Workload]) -> Iterator[dict[str, Setup]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(setup(name, works)) for name in names}


@contextmanager
def setup(name: str, works: list[Workload]) -> Iterator[Setup]:
    """The services are those of the other benches (redis_contestants.py), and an API server."""
    many = 2 if "2 + 2" in name else 1
    with ExitStack() as stack:
        shards: dict[str, Any] = {"": None}
        if name.startswith(("cluster", "apart")):
            slots = slots_apart() if name.startswith("apart") else None
            cluster = stack.enter_context(server_module("redis_cluster").RedisCluster(slots=slots))
            titles = [*shared_keys(), "runs"] if slots else ["0", "1", "2"]
            shards = dict(zip(titles, cluster.nodes, strict=True))
        else:
            shards[""] = stack.enter_context(private_redis())
        url = str(next(iter(shards.values())).url)
        database_url, servers = None, {}
        if "archived" in name:
            postgres = stack.enter_context(private_postgres())
            database_url = postgres.new_database()
            servers["postgres"] = [postgres.pid]
        job = stack.enter_context(
            SeparateProcess(
                "redis_contestants:dovetail",
                works=[asdict(work) for work in works],
                url=url,
                database_url=database_url,
                orchestrators=many,
                workers=many,
            )
        )
        found = Setup(job, shards, servers | job.facts["pids"], database_url)
        if name in (ONE, ARCHIVED):
            found.api_url = stack.enter_context(api_server(found))
        yield found


@contextmanager
def api_server(of: Setup) -> Iterator[str]:
    port = server_module("server").free_port()
    settings = {"DOVETAIL_REDIS_URL": of.url, "DOVETAIL_DATABASE_URL": of.database_url or ""}
    command = ["-m", "dovetail", "serve", "--port", str(port)]
    with services(environment=settings, api=[command]) as pids:
        of.pids |= pids
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with suppress(urllib.error.URLError, ConnectionError):
                api.ask(url, "GET", "/workflows")
                break
            time.sleep(0.1)
        yield url


# --- measured ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One round of a shape on a set-up, with the archive's work behind it."""

    seconds: float
    cores: float
    """Those that other programs left to us."""
    spent: dict[str, float]
    """By process and by what is counted in bytes. Work that a process also has when it is idle is
    not in it."""


def machine_busy() -> float:
    """CPU seconds that all programs of this machine have taken so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[:8])
    return (user + nice + system + irq + softirq + steal) * TICK_SECONDS


def measured(of: Setup, work: Callable[[], Mapping[str, float]]) -> Sample:
    """`work` returns the CPU seconds of processes that are not of the set-up."""
    before, busy, began = of.spent(), machine_busy(), time.perf_counter()
    beside = work()
    seconds, busy = time.perf_counter() - began, machine_busy() - busy
    spent = {name: value - before[name] for name, value in of.spent().items()} | beside
    ours = sum(value for name, value in spent.items() if name.split()[0] in PROCESSES)
    cores = (os.cpu_count() or 1) - max(0.0, busy - ours) / seconds
    without_idle = {name: value - seconds * of.idle.get(name, 0.0) for name, value in spent.items()}
    return Sample(seconds, cores, without_idle)


def shape_sample(of: Setup, work: Workload) -> Sample:
    def run() -> dict[str, float]:
        client: float = of.job.call(work.name).value
        if of.database_url is not None:
            of.job.call("rest")
        return {"client": client}

    found = measured(of, run)
    of.job.call(f"check {work.name}")
    return found


def http_sample(of: Setup) -> tuple[Sample, int]:
    """Triggers one by one, as fast as the server takes them, until all of their runs have ended."""
    count = 0

    def run() -> dict[str, float]:
        nonlocal count
        path = "/api/v1/workflows/single/runs"
        count = api.load(of.api_url, path, clients=CLIENTS)["count"]
        if of.database_url is not None:
            of.job.call("rest")
        api.settled(of.api_url)
        return {}

    return measured(of, run), count


def get_sample(of: Setup) -> Sample:
    run_id = api.ask(of.api_url, "POST", "/workflows/single/runs", {})["run_id"]
    api.settled(of.api_url)

    def run() -> dict[str, float]:
        for _ in range(GETS // api.REPEATS):
            api.again(of.api_url, f"/runs/{run_id}")
        return {}

    return measured(of, run)


def measure(count: int, warmup: int, say: Callable[[str], None]) -> dict[str, Any]:
    works = shapes()
    say(f"… capacity: {len(SETUPS)} set-ups, {count + warmup} rounds of {len(works)} shapes each")
    samples: dict[str, list[Any]] = {}
    with opened(SETUPS, list(works.values())) as setups:
        before = {name: of.spent() for name, of in setups.items()}
        time.sleep(IDLE_SECONDS)
        for name, of in setups.items():
            after = of.spent()
            of.idle = {
                what: (after[what] - value) / IDLE_SECONDS
                for what, value in before[name].items()
                if what.split()[0] in PROCESSES
            }
        connections = {name: connections_of(of) for name, of in setups.items()}
        jobs: dict[str, Callable[[], Any]] = {}
        for name, of in setups.items():
            for work in works.values():
                jobs[f"{name}: {work.name}"] = partial(shape_sample, of, work)
            if of.api_url:
                jobs[f"{name}: http"] = partial(http_sample, of)
                jobs[f"{name}: get"] = partial(get_sample, of)

        def keep(job: str) -> float:
            samples.setdefault(job, []).append(jobs[job]())
            return 0.0

        rounds({job: job for job in jobs}, count=count, warmup=warmup, timed=keep)
        idle = {name: grouped(of.idle) for name, of in setups.items()}
    kept = {job: found[warmup:] for job, found in samples.items()}
    found = evaluated(kept) | {"idle": idle, "connections": connections}
    return found | {"samples": condensed(kept, found["points"])}


def connections_of(of: Setup) -> dict[str, float]:
    """Open sockets of one process of each kind to the servers."""
    return {
        kind: statistics.mean(map(sockets, pids))
        for kind, pids in of.pids.items()
        if kind != "postgres"
    }


def sockets(pid: int) -> int:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    mine = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = "01"
    return sum(row[9] in mine and row[3] == established for row in rows)


# --- evaluated ---------------------------------------------------------------------------------


def shape_of(work: Workload) -> Shape:
    joins = sum(len(parents) > 1 for parents in work.graph.values())
    return Shape(tuple(len(wave) for wave in work.waves()), joins, work.bytes)


def grouped(spent: Mapping[str, float]) -> dict[str, float]:
    """By process: shards are added up, but a shard of `apart` with a shared key stays alone."""
    found: dict[str, float] = {}
    for name, value in spent.items():
        kind, _, shard = name.partition(" ")
        alone = kind == "redis" and shard in shared_keys()
        found[name if alone else kind] = found.get(name if alone else kind, 0.0) + value
    return found


def per_run(samples: list[Sample], runs: int) -> dict[str, float]:
    """Medians of CPU; means of bytes, because Redis and PostgreSQL take space in large steps."""
    rows = [grouped(one.spent) for one in samples]
    found = {}
    for name in rows[0]:
        middle = statistics.mean if name in SIZES else statistics.median
        found[name] = middle(row[name] for row in rows) / runs
    return found


def evaluated(samples: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Costs, and points with what the model makes of them."""
    works = shapes().values()
    spent = {
        name: {work.name: per_run(samples[f"{name}: {work.name}"], work.runs) for work in works}
        for name in SETUPS
    }
    costs = costs_of(spent)
    report: dict[str, Any] = {"costs": {}, "alone": {}, "points": [], "http": {}, "get": {}}
    for name, found in costs.items():
        report["costs"][name] = {what: asdict(cost) for what, cost in found.items()}
        apart = spent[KEYS_APART[name]]["alone"] if name in KEYS_APART else {}
        report["alone"][name] = alone(spent[name]["alone"], apart, found)
    for name in SIMULATED:
        for work in works:
            if work.name == "alone":  # it waits for replies most of the time
                continue
            found = samples[f"{name}: {work.name}"]
            report["points"].append(point(name, work, found, spent[name][work.name], costs[name]))
    for name in (ONE, ARCHIVED):
        report["http"][name], checked = http_costs(name, samples[f"{name}: http"], costs[name])
        report["points"].append(checked)
        report["get"][name] = per_run(samples[f"{name}: get"], GETS)
    return report


def alone(
    spent: Mapping[str, float], apart: Mapping[str, float], costs: Mapping[str, Cost]
) -> dict[str, float]:
    """What a wave costs if it travels alone, in place of `wave` of `Cost`: no batch shares it.

    `apart` has what the shared keys took, where each has a shard of its own.
    """
    keys = {what: value for what, value in apart.items() if what.startswith("redis ")}
    whole = dict(spent) | keys | {"redis": spent["redis"] - sum(keys.values())}
    archiver = costs.get("archiver", NOTHING)
    found = {}
    for what in sorted(whole.keys() & costs.keys()):
        cost, value = costs[what], whole[what]
        beside = archiver.wave + archiver.node if what == "orchestrator" else 0.0
        found[what] = max(cost.wave, value / ALONE_NODES - cost.node - beside)
    return found


def costs_of(spent: Mapping[str, Any]) -> dict[str, dict[str, Cost]]:
    """By set-up and resource."""
    fits = {name: fitted(found) for name, found in spent.items()}
    for name, apart in KEYS_APART.items():
        for key in shared_keys():
            fits[name][f"redis {key}"] = fits[apart][f"redis {key}"]
            fits[name]["redis"] -= fits[apart][f"redis {key}"]
    for name, without in WITHOUT_ARCHIVE.items():
        archiver = fits[name]["orchestrator"] - fits[without]["orchestrator"]
        fits[name] |= {"archiver": archiver}
        fits[name]["orchestrator"] -= archiver
    return {name: fits[name] for name in SIMULATED}


def fitted(spent: Mapping[str, Mapping[str, float]]) -> dict[str, Cost]:
    """From what a run took, by shape and by resource."""
    works = shapes()
    size = works["payload"].bytes * len(works["payload"].graph)
    found = {}
    for what in spent["single"]:
        cost = fit([(shape_of(works[name]), spent[name][what]) for name in FITTED])
        more = spent["payload"][what] - spent["diamonds"][what]
        found[what] = replace(cost, byte=max(0.0, more / size))
    return found


def point(
    name: str, work: Workload, samples: list[Sample], spent: Mapping[str, float], costs: Any
) -> dict[str, Any]:
    """Measured and predicted: the CPU of all processes for a run, and the time of all runs."""
    shape = shape_of(work)
    cpu = sum(value for what, value in spent.items() if what.split()[0] in PROCESSES)
    predicted = sum(cost.of(shape) for what, cost in costs.items() if what.split()[0] in PROCESSES)
    shared = shard_of_keys() if name in KEYS_APART else None
    many = 2 if "2 + 2" in name else 1
    ratios, limits = [], []
    for one in samples:
        fleet = Fleet(one.cores, many, many, shards=3 if shared else 1)
        outcome = simulate(shape, work.runs, costs, fleet, shared)
        ratios.append(outcome.seconds / one.seconds)
        limits.append(outcome.limit)
    seconds = statistics.median(one.seconds for one in samples)
    return {
        "setup": name,
        "shape": work.name,
        "runs": work.runs,
        "nodes": work.nodes,
        "seconds": [one.seconds for one in samples],
        "cores": [one.cores for one in samples],
        "spent": dict(spent),
        "nodes_per_second": work.nodes / seconds,
        "use": statistics.median(cpu * work.runs / one.seconds / one.cores for one in samples),
        "cpu_ratio": predicted / cpu,
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
        "limit": statistics.mode(limits),
        "held_out": work.name in HELD_OUT,
    }


def shard_of_keys() -> dict[str, int]:
    """Of three shards with equal parts of the slots."""
    from dovetail.redis_client.cluster import SLOTS, slot_of

    first = {name: slot_of(keys[0].encode()) for name, keys in shared_keys().items()}
    return {
        name: next(at for at in range(3) if slot < SLOTS * (at + 1) // 3)
        for name, slot in first.items()
    }


def middle_of(samples: list[tuple[Sample, int]]) -> dict[str, float]:
    """Of a run, where each round has its own number of runs."""
    rows = [per_run([one], count) for one, count in samples]
    return {what: statistics.median(row[what] for row in rows) for what in rows[0]}


def http_costs(
    name: str, samples: list[tuple[Sample, int]], costs: Mapping[str, Cost]
) -> tuple[dict[str, float], dict[str, Any]]:
    """What a run costs if it is triggered alone over HTTP, in place of `run` of `Cost`."""
    shape = shape_of(shapes()["single"])
    spent = middle_of(samples)
    found = {
        what: max(0.0, value - replace(costs.get(what, NOTHING), run=0.0).of(shape))
        for what, value in spent.items()
    }
    as_client = {
        what: replace(costs.get(what, NOTHING), run=value) for what, value in found.items()
    }
    as_client["client"] = as_client.pop("api")
    ratios = []
    for one, count in samples:
        outcome = simulate(shape, count, as_client, Fleet(one.cores))
        ratios.append(outcome.seconds / one.seconds)
    checked = {
        "setup": name,
        "shape": "http",
        "nodes": statistics.median(count for _, count in samples),
        "seconds": [one.seconds for one, _ in samples],
        "cores": [one.cores for one, _ in samples],
        "spent": spent,
        "nodes_per_second": statistics.median(count / one.seconds for one, count in samples),
        "use": statistics.median(
            sum(value for what, value in one.spent.items() if what.split()[0] in PROCESSES)
            / one.seconds
            / one.cores
            for one, _ in samples
        ),
        "cpu_ratio": 1.0,
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
        "limit": outcome.limit,
        "held_out": False,
    }
    return found, checked


Verdict = Callable[[str, float, str, bool], dict[str, Any]]


def verdicts(found: dict[str, Any], verdict: Verdict) -> list[dict[str, Any]]:
    """The worst of the points: how far the simulated time is from the measured one."""
    reported = []
    for title, chosen in (
        ("fitted", [one for one in found["points"] if not one["held_out"]]),
        ("not in the fit", [one for one in found["points"] if one["held_out"]]),
    ):
        for what, key in (("CPU", "cpu_ratio"), ("time", "time_ratio")):
            rated = [one for one in chosen if one["shape"] != "payload" or what == "time"]
            worst = max(rated, key=lambda one: abs(one[key] - 1))
            reported.append(
                verdict(
                    f"capacity: predicted × measured {what}, the worst of {len(rated)} points"
                    f" {title}: {worst['setup']}: {worst['shape']}",
                    worst[key],
                    f"within {MOST_ERROR:.0%} of 1",
                    abs(worst[key] - 1) <= MOST_ERROR,
                )
            )
    return reported


def table(found: dict[str, Any]) -> str:
    prices = "".join(f"{title:>9}" for title in ("a run", "a wave", "a node", "a join", "1 kB"))
    lines = [f"{'CPU µs':36}{prices}"]
    for name, costs in found["costs"].items():
        for what, cost in costs.items():
            if what.split()[0] in PROCESSES and what != "api":
                lines.append(f"  {name:24} {what:16}{_prices(cost, 1e6, '9.1f')}")
    lines += ["", f"{'bytes':36}{prices}"]
    for name, costs in found["costs"].items():
        for what, cost in costs.items():
            if what in SIZES:
                lines.append(f"  {name:24} {what:16}{_prices(cost, 1, '9.0f')}")
    lines += ["", "CPU µs of a wave that travels alone"]
    for name, prices_alone in found["alone"].items():
        spent = {what: price for what, price in prices_alone.items() if what not in SIZES}
        shown = "  ".join(f"{what} {1e6 * price:.0f}" for what, price in spent.items())
        lines.append(f"  {name:24} {shown}")
    lines += ["", "CPU µs of a trigger over HTTP, and of a GET /runs/<id>"]
    for name in found["http"]:
        for title in ("http", "get"):
            spent = {what: value for what, value in found[title][name].items() if what in PROCESSES}
            shown = "  ".join(f"{what} {1e6 * value:.0f}" for what, value in spent.items())
            lines.append(f"  {name:10} {title:5} {shown}")
    # Where the cores were full, the time follows from the CPU, and says nothing else.
    columns = f"{'nodes/s':>9} {'cores':>6} {'used':>5}"
    title = f"{'':24} {'':13} {columns}   predicted × measured: CPU, time"
    lines += ["", title]
    for one in found["points"]:
        mark = "not in the fit" if one["held_out"] else ""
        cores, ratios = statistics.median(one["cores"]), (one["cpu_ratio"], one["time_ratio"])
        lines.append(
            f"  {one['setup']:24} {one['shape']:13} {one['nodes_per_second']:7,.0f}"
            f" {cores:6.2f} {one['use']:5.0%}   {ratios[0]:5.2f} {ratios[1]:5.2f}"
            f"  limit: {one['limit']:12} {mark}"
        )
    return "\n".join(lines)


def _prices(cost: Mapping[str, float], unit: float, form: str) -> str:
    values = [*(cost[name] for name in ("run", "wave", "node", "join")), 1e3 * cost["byte"]]
    return "".join(f"{unit * value:{form}}" for value in values)


def rounded(value: Any) -> Any:
    """With four digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the calculator needs of a report."""
    parts = ("costs", "alone", "http", "get", "idle", "connections")
    capacity = {part: report["capacity"][part] for part in parts}
    found: dict[str, Any] = rounded({"environment": report["environment"]} | capacity)
    return found


def condensed(samples: Mapping[str, list[Any]], points: list[dict[str, Any]]) -> dict[str, Any]:
    """One round of each job: CPU and bytes as `per_run` has them, time and cores of the round whose
    simulated time was off by the amount in the middle."""
    ratios = {f"{one['setup']}: {one['shape']}": one["time_ratios"] for one in points}
    found = {}
    for job, rows in samples.items():
        shape = job.partition(": ")[2]
        runs = GETS if shape == "get" else 0 if shape == HTTP else shapes()[shape].runs
        pairs = rows if shape == HTTP else [(one, runs) for one in rows]
        spent = middle_of(pairs) if shape == HTTP else per_run(rows, runs)
        order = ratios.get(job) or [one.seconds for one, _ in pairs]
        ordered = sorted(range(len(pairs)), key=lambda at, order=order: order[at])
        middle, count = pairs[ordered[(len(pairs) - 1) // 2]]
        total = {what: value * count for what, value in spent.items()}
        found[job] = asdict(Sample(middle.seconds, middle.cores, total)) | {"runs": count}
    return found


def restored(record: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Samples for `evaluated`."""
    found: dict[str, list[Any]] = {}
    for job, one in record.items():
        sample = Sample(one["seconds"], one["cores"], one["spent"])
        found[job] = [(sample, one["runs"])] if job.endswith(f": {HTTP}") else [sample]
    return found


def recorded() -> dict[str, Any]:
    """What the bench makes of the round that is kept."""
    return evaluated(restored(json.loads(RECORD_FILE.read_text())["samples"]))


def write_record(environment: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(job)}: {json.dumps(rounded(samples[job]))}" for job in samples)
    about = json.dumps(environment)
    RECORD_FILE.write_text(f'{{"environment": {about}, "samples": {{\n{lines}\n}}}}\n')


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: capacity.py report.json, as ./dev bench --only capacity --json prints it")
    report = json.loads(Path(sys.argv[1]).read_text())
    print(table(report["capacity"]))
    COSTS_FILE.write_text(json.dumps(kept(report), indent=1) + "\n")
    write_record(report["environment"], report["capacity"]["samples"])
    print("\nbench/capacity_page.py prints the tables of docs/scaling.md")


if __name__ == "__main__":
    main()
