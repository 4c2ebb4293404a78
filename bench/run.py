"""`./dev bench`: Dovetail beside its peers, with the ratios that are promised.

    ./dev bench                      all but documents, some ten minutes
    ./dev bench --only library       in memory, beside Dask and bare asyncio: a minute
    ./dev bench --only durable       on a file, beside DBOS and a bare SQLite loop: four
    ./dev bench --distributed        over Redis, beside streaQ and Celery's canvas: four
    ./dev bench --celery             on Celery, beside its canvas and a plain task of its: three
    ./dev bench --api                over HTTP, beside a bare route that writes a row: four
    ./dev bench --documents          the document pipeline: eleven, and only when asked for
    ./dev bench --page               the web page in a browser: six, and only when asked for
    ./dev bench --map                a map over a list, beside Prefect, Dask, DBOS and Celery: five,
                                     and only when asked for
    ./dev bench --only capacity      CPU of each process, simulation: six, and only when asked for
    ./dev bench --only fan1000       one workload, in memory, on a file and over Redis
    ./dev bench --check              exits 1 if a target is missed
    ./dev bench --json > out.json    the numbers, every single time included

What is timed is said in contestants.py, durable.py, redis_contestants.py, burden.py and maps.py,
how in measuring.py. This file only puts them together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import api
import burden
import capacity
import celery_transport
import distributed
import documents
import durable
import maps
import page
import redis_contestants
import workloads
from apart import Failed, Missing, SeparateProcess
from contestants import BASELINE, CONTESTANTS, dovetail_definition, dovetail_library
from measuring import Times, best_ratio, ratio, rounds, summary
from workloads import Workload, definition, fan, layered, standard, yaml_text

TARGETS = {"layered10x100": 4.0, "chain100": 2.0, "fan1000": 3.0}
"""How many times as fast as Dask's synchronous scheduler the library must be."""
DURABLE_TARGETS = {"chain100": 6.0, "fan1000": 50.0, "diamonds500": 60.0}
"""How many times as fast as DBOS the embedded engine must be, at the same durability."""
MOST_GROWTH = 2.0
"""What a node may cost in a fan of 10,000 nodes, compared with one of 1,000."""
MOST_VALIDATION_SECONDS = 2.0
VALIDATED_NODES = 10_000

MOST_MEMORY = 100e6
"""Bytes that a run of 10,000 nodes may add to the idle process."""
LARGE_RUNS = [["layered", 100, 100], ["fan", 9998]]
MOST_SLOWDOWN = 1.5
"""What anything may take with a long history in the file, compared with a short one."""
SHORT_HISTORY, LONG_HISTORY = 200, 100_000

ALL_CONTESTANTS: dict[str, dict[str, Any]] = {
    "library": CONTESTANTS,
    "durable": durable.CONTESTANTS,
    "distributed": redis_contestants.CONTESTANTS,
    "celery": celery_transport.CONTESTANTS,
}
COMPETITIONS = list(ALL_CONTESTANTS)
OTHERS = ["scaling", "validation", "memory", "history", "api"]
OTHERS += ["documents", "page", "map", "capacity"]  # only when they are asked for
MAX_CAPACITY_ROUNDS = 5
ENOUGH_SECONDS = 60.0
"""A workload of the durable part is not measured for longer, as soon as it has its 3 rounds."""
TOO_SLOW_SECONDS = 25.0
"""A contestant that needs more for one run is shown and left out of the rounds."""

MICRO = 1e6
MILLI = 1e3


def main() -> int:
    options = parse()
    # Progress goes to stderr: with --json, stdout is one document.
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    report: dict[str, Any] = {"environment": environment(), "workloads": {}, "verdicts": []}
    if not options.json:
        print(*(f"{name} {value}" for name, value in report["environment"].items()), sep=" · ")
    for workload in standard():
        if not competes("library", workload, options):
            continue
        say(f"… {workload.name}: {options.warmup} + {options.rounds} rounds")
        times = compete(workload, options)
        report["workloads"][workload.name] = numbers(workload, times)
        report["verdicts"] += verdict_on_speed(workload, times)
        if not options.json:
            print("\n" + table(workload, times))
    for workload in workloads.durable():
        if not competes("durable", workload, options):
            continue
        say(f"… {workload.name} on a file")
        found = compete_durably(workload, options)
        report.setdefault("durable", {})[workload.name] = found
        report["verdicts"] += verdicts_on_durable_speed(workload, found)
        if not options.json:
            print("\n" + durable_table(workload, found))
    compete_over_redis(report, options, say)
    compete_on_celery(report, options, say)
    if not options.only or "api" in options.only:
        say(f"… API: {api.CLIENTS} clients for {api.SECONDS:g} s a round")
        report["api"] = api.measure(max(1, options.rounds // 5), min(1, options.warmup))
        report["verdicts"] += api.verdicts(report["api"], verdict)
        if not options.json:
            print("\n" + api.table(report["api"]))
    if not options.only or "scaling" in options.only:
        say("… scaling: fans of 1,000 and of 10,000 nodes")
        report["scaling"] = scaling(options)
        report["verdicts"] += verdicts_on_growth(report["scaling"])
    if not options.only or "validation" in options.only:
        say(f"… validation of {VALIDATED_NODES:,} nodes")
        report["validation"] = validation(options)
        report["verdicts"] += verdicts_on_validation(report["validation"])
    if not options.only or "memory" in options.only:
        say("… memory of runs of 10,000 nodes on a file")
        report["memory"] = memory()
        report["verdicts"] += verdicts_on_memory(report["memory"])
    if not options.only or "history" in options.only:
        say(f"… history: {LONG_HISTORY:,} finished runs in the file")
        report["history"] = history(options)
        report["verdicts"] += verdicts_on_history(report["history"])
        if not options.json:
            print("\n" + history_table(report["history"]))
    if "documents" in (options.only or []):  # not by itself: most of it is waiting for a model
        with scratch() as folder:
            report["documents"] = documents.measure(folder, say)
        report["verdicts"] += documents.verdicts(report["documents"], verdict)
        if not options.json:
            print("\n" + documents.table(report["documents"]))
    if "page" in (options.only or []):  # not by itself: it needs a browser
        with scratch() as folder:
            report["page"] = page.measure(folder, say)
        report["verdicts"] += page.verdicts(report["page"], verdict)
        if not options.json:
            print("\n" + page.table(report["page"]))
    if "map" in (options.only or []):  # not by itself: its peers have an environment of their own
        with scratch() as folder:
            names = chosen(maps.CONTESTANTS, options)
            report["map"] = maps.measure(
                names, partial(within_reason, options=options), folder, say
            )
        if not options.json:
            print("\n" + maps.table(report["map"]))
    if "capacity" in (options.only or []):  # not by itself: it is for docs/scaling.md
        count = min(MAX_CAPACITY_ROUNDS, options.rounds)
        report["capacity"] = capacity.measure(count, min(1, options.warmup), say)
        report["verdicts"] += capacity.verdicts(report["capacity"], verdict)
        if not options.json:
            print("\n" + capacity.table(report["capacity"]))
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n" + "\n".join(shown(verdict) for verdict in report["verdicts"]))
    missed = [verdict for verdict in report["verdicts"] if not verdict["reached"]]
    return 1 if options.check and missed else 0


def parse() -> argparse.Namespace:
    known = {workload.name: None for workload in [*standard(), *workloads.durable()]}
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds (25)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds thrown away (3)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*COMPETITIONS, *known, *OTHERS],
        help="a part, a workload, or both; repeatable",
    )
    parser.add_argument(
        "--distributed",
        action="append_const",
        dest="only",
        const="distributed",
        help="the same as --only distributed",
    )
    parser.add_argument(
        "--celery",
        action="append_const",
        dest="only",
        const="celery",
        help="the same as --only celery",
    )
    parser.add_argument(
        "--api", action="append_const", dest="only", const="api", help="the same as --only api"
    )
    parser.add_argument(
        "--documents",
        action="append_const",
        dest="only",
        const="documents",
        help="the same as --only documents",
    )
    parser.add_argument(
        "--page", action="append_const", dest="only", const="page", help="the same as --only page"
    )
    parser.add_argument(
        "--map", action="append_const", dest="only", const="map", help="the same as --only map"
    )
    parser.add_argument(
        "--contestant",
        action="append",
        choices=list(
            dict.fromkeys(n for part in [*ALL_CONTESTANTS.values(), maps.CONTESTANTS] for n in part)
        ),
        help="repeatable; else all",
    )
    parser.add_argument("--json", action="store_true", help="numbers instead of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 0:
        parser.error("--rounds is at least 1, --warmup at least 0")
    return options


def competes(part: str, workload: Workload, options: argparse.Namespace) -> bool:
    """Whether this workload is measured in this part, after `--only` and `--contestant`."""
    if options.contestant and not set(options.contestant) & ALL_CONTESTANTS[part].keys():
        return False
    if not options.only:
        return True
    named = [name for name in options.only if name not in OTHERS]
    parts = [name for name in named if name in COMPETITIONS]
    names = [name for name in named if name not in COMPETITIONS]
    return bool(named) and part in (parts or [part]) and workload.name in (names or [workload.name])


def chosen(contestants: dict[str, Any], options: argparse.Namespace) -> list[str]:
    return [name for name in contestants if name in (options.contestant or contestants)]


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "dovetail": version("dovetail"),
        "dask": installed("dask"),
        "dbos": installed("dbos"),
        "streaq": installed("streaq"),
        "celery": installed("celery"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


# --- the workloads ---------------------------------------------------------------------------


def compete(workload: Workload, options: argparse.Namespace) -> dict[str, Times]:
    prepared = {}
    for name in chosen(CONTESTANTS, options):
        try:
            prepared[name] = CONTESTANTS[name](workload)
        except ModuleNotFoundError as error:
            sys.exit(f"{name}: {error.name} is not installed; ./dev bench installs it")
        workload.check(prepared[name]())
    return rounds(prepared, count=options.rounds, warmup=options.warmup)


def numbers(workload: Workload, times: dict[str, Times]) -> dict[str, Any]:
    found = {}
    for name, seconds in times.items():
        reported = summary(seconds)
        found[name] = {
            "nodes": workload.nodes,
            "median_seconds": reported.median,
            "best_seconds": reported.best,
            "spread": reported.spread,
            "nodes_per_second": workload.nodes / reported.median,
            "seconds": seconds,
        }
        if BASELINE in times:
            found[name]["times_dask_synchronous"] = ratio(times[BASELINE], seconds)
            found[name]["times_dask_synchronous_best"] = best_ratio(times[BASELINE], seconds)
    return found


def table(workload: Workload, times: dict[str, Times]) -> str:
    head = f"{workload.name}, {workload.nodes:,} nodes"
    columns = f"{'median':>9} {'best':>9} {'spread':>7} {'nodes/s':>9}"
    lines = [f"{head:30} {columns}  × {BASELINE}: by rounds, by best"]
    for name, row in numbers(workload, times).items():
        per_node = [row[key] * MICRO / workload.nodes for key in ("median_seconds", "best_seconds")]
        line = (
            f"  {name:28} {per_node[0]:6.1f} µs {per_node[1]:6.1f} µs {row['spread']:6.0%}"
            f" {row['nodes_per_second']:9,.0f}"
        )
        if BASELINE in times:
            against = row["times_dask_synchronous"], row["times_dask_synchronous_best"]
            line += f"  {against[0]:5.2f} {against[1]:5.2f}"
        lines.append(line)
    return "\n".join(lines)


def verdict_on_speed(workload: Workload, times: dict[str, Times]) -> list[dict[str, Any]]:
    ours = times.get("dovetail library")
    if ours is None or BASELINE not in times:
        return []
    found = ratio(times[BASELINE], ours)
    wanted = TARGETS[workload.name]
    what = f"{workload.name}: library × {BASELINE}"
    return [verdict(what, found, f"at least {wanted:g}", found >= wanted)]


# --- the durable workloads ---------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the checkout's own disk: a temporary one may be memory, where syncs are free."""
    root = Path(__file__).resolve().parent.parent / ".cache"
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
        yield Path(folder)


def compete_durably(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Rows by contestant. Who fails, or is too slow for rounds, has a row that says so."""
    rows: dict[str, Any] = {}
    there: dict[str, SeparateProcess] = {}

    def seconds(name: str) -> float:
        if "failed" in rows[name]:
            return inf
        try:
            return there[name].call("run").seconds
        except Failed as error:
            rows[name]["failed"] = str(error)
            return inf

    with scratch() as folder, ExitStack() as stack:
        for number, name in enumerate(chosen(durable.CONTESTANTS, options)):
            own = folder / str(number)
            own.mkdir()
            opener = f"durable:{durable.CONTESTANTS[name].__name__}"
            try:
                there[name] = SeparateProcess(opener, workload=asdict(workload), folder=str(own))
            except Missing as error:
                sys.exit(f"{name}: {error} is not installed; ./dev bench installs it")
            except Failed as error:
                rows[name] = {"failed": str(error)}
                continue
            stack.callback(there[name].close)
            rows[name] = {"nodes": workload.nodes, **there[name].facts}
        first = {name: seconds(name) for name in rows}
        for name in rows:
            if TOO_SLOW_SECONDS < first[name] < inf:
                rows[name]["once_seconds"] = first[name]
        ready = {name: name for name in rows if first[name] <= TOO_SLOW_SECONDS}
        sync = durable.sync_seconds(folder)
        effort = within_reason(sum(first[name] for name in ready), options)
        times = rounds(ready, **effort, timed=seconds)
    times = {name: taken for name, taken in times.items() if "failed" not in rows[name]}
    for name, row in numbers(workload, times).items():
        rows[name] |= row
        rows[name]["times"] = {other: ratio(times[other], times[name]) for other in times}
    return {"sync_seconds": sync, "rows": rows}


def within_reason(seconds: float, options: argparse.Namespace) -> dict[str, int]:
    """How many rounds there are if one takes so long: at most what was asked for."""
    fit = int(ENOUGH_SECONDS / max(seconds, 0.001))
    return {"count": min(options.rounds, max(3, fit)), "warmup": min(options.warmup, fit // 6)}


def durable_table(workload: Workload, found: dict[str, Any]) -> str:
    head = f"{workload.name} on a file, {workload.nodes:,} nodes"
    columns = f"{'median':>11} {'best':>11} {'spread':>6} {'nodes/s':>8}"
    lines = [
        f"{head:36} {columns}  {'  '.join(f'× {peer}' for peer in durable.PEERS)}  of the floor"
        f"  (a sync here: {found['sync_seconds'] * MILLI:.2f} ms)"
    ]
    for name, row in found["rows"].items():
        line = f"  {name:20} {row.get('uses', ''):13}"
        if "failed" in row:
            line += f" failed: {row['failed']}"
        elif "once_seconds" in row:
            line += f" one run alone took {row['once_seconds']:.1f} s"
        else:
            line += (
                f" {row['median_seconds'] * MILLI:8.1f} ms {row['best_seconds'] * MILLI:8.1f} ms"
                f" {row['spread']:6.0%} {row['nodes_per_second']:8,.0f}"
            )
            for peer in durable.PEERS:
                found_times = f"{row['times'][peer]:.1f}" if peer in row["times"] else "—"
                line += f"  {found_times:>{len(peer) + 2}}"
            if durable.FLOOR in row["times"]:
                line += f"  {row['times'][durable.FLOOR]:12.1%}"
        lines.append(line)
    return "\n".join(lines)


def verdicts_on_durable_speed(workload: Workload, found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = found["rows"]
    if durable.OURS not in rows or durable.PEER not in rows:
        return []
    # A contestant that failed has reached nothing.
    reached = rows[durable.OURS].get("times", {}).get(durable.PEER, 0.0)
    wanted = DURABLE_TARGETS[workload.name]
    what = f"{workload.name} on a file: embedded × {durable.PEER}"
    return [verdict(what, reached, f"at least {wanted:g}", reached >= wanted)]


# --- the workloads over Redis ------------------------------------------------------------------


def compete_over_redis(
    report: dict[str, Any], options: argparse.Namespace, say: Callable[[str], None]
) -> None:
    works = [work for work in workloads.durable() if competes("distributed", work, options)]
    names = chosen(redis_contestants.CONTESTANTS, options)
    if not works:
        return
    effort = partial(within_reason, options=options)
    grows = redis_contestants.OURS in names and {"fan1000"} & {work.name for work in works}
    # With root and join they have exactly 1,000 and 10,000 nodes, the most that is allowed.
    small, large = fan(998), fan(9998)
    with distributed.opened(names, [*works, *([small, large] if grows else [])]) as contest:
        for work in works:
            say(f"… {work.name} over Redis {contest.redis_version}")
            rows = distributed.compete(contest, work, effort)
            report.setdefault("distributed", {})[work.name] = rows
            report["verdicts"] += distributed.verdicts(work, rows, verdict)
            if not options.json:
                print("\n" + distributed.table(work, rows))
        if grows:
            say("… fans of 1,000 and of 10,000 nodes over Redis")
            found = distributed.growth(contest, small, large, effort)
            report["distributed"]["growth"] = found
            report["verdicts"].append(distributed.verdict_on_growth(found, verdict))


def compete_on_celery(
    report: dict[str, Any], options: argparse.Namespace, say: Callable[[str], None]
) -> None:
    works = [work for work in workloads.durable() if competes("celery", work, options)]
    names = chosen(celery_transport.CONTESTANTS, options)
    if not works:
        return
    effort = partial(within_reason, options=options)
    with distributed.opened(names, works, celery_transport.CONTESTANTS) as contest:
        for work in works:
            say(f"… {work.name} on Celery over Redis {contest.redis_version}")
            rows = distributed.compete(contest, work, effort)
            report.setdefault("celery", {})[work.name] = rows
            report["verdicts"] += celery_transport.verdicts(work, rows, verdict)
            if not options.json:
                print("\n" + distributed.table(work, rows, celery_transport.PEERS))


# --- growth and validation -------------------------------------------------------------------


def scaling(options: argparse.Namespace) -> dict[str, float]:
    """What a node costs in a fan of 10,000 nodes, as a multiple of its cost in one of 1,000."""
    growth = {}
    for name, prepare in (
        ("dovetail library", dovetail_library),
        ("dovetail definition", dovetail_definition),
    ):
        # With root and join they have exactly 1,000 and 10,000 nodes, the most that is allowed.
        small, large = fan(998), fan(9998)
        work = {"small": prepare(small), "large": prepare(large)}
        small.check(work["small"]())
        large.check(work["large"]())
        times = rounds(work, count=max(3, options.rounds // 3), warmup=1)
        growth[name] = ratio(times["large"], times["small"]) * small.nodes / large.nodes
    return growth


def verdicts_on_growth(growth: dict[str, float]) -> list[dict[str, Any]]:
    return [
        verdict(
            f"fan of 10,000 against 1,000 nodes, cost of a node: {name}",
            found,
            f"at most {MOST_GROWTH:g}",
            found <= MOST_GROWTH,
        )
        for name, found in growth.items()
    ]


def validation(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to check a definition of 10,000 nodes with a template for each of 19,800 edges."""
    from dovetail.core.definition.source import read_text
    from dovetail.core.definition.validation import check

    workload = layered(100, VALIDATED_NODES // 100)
    data, text = definition(workload), yaml_text(workload)

    def as_data() -> None:
        assert check(data, {"noop"}).valid

    def as_text() -> None:
        assert check(read_text(text, format="yaml"), {"noop"}).valid

    times = rounds({"data": as_data, "yaml": as_text}, count=max(1, options.rounds // 3), warmup=1)
    return {name: summary(seconds).median for name, seconds in times.items()}


def verdicts_on_validation(seconds: dict[str, float]) -> list[dict[str, Any]]:
    limit = MOST_VALIDATION_SECONDS
    return [
        verdict(
            f"validation of {VALIDATED_NODES:,} nodes from {name}, seconds",
            found,
            f"below {limit:g}",
            found < limit,
        )
        for name, found in seconds.items()
    ]


# --- memory and history ----------------------------------------------------------------------


def memory() -> dict[str, int]:
    """Bytes by which each large run made its process grow."""
    grown = {}
    for size in LARGE_RUNS:
        with (
            scratch() as folder,
            SeparateProcess("burden:memory", workload=size, folder=str(folder)) as job,
        ):
            grown[burden.shape(*size).name] = job.call("run").value
    return grown


def verdicts_on_memory(grown: dict[str, int]) -> list[dict[str, Any]]:
    return [
        verdict(
            f"{name} on a file, MB above the idle process",
            found / 1e6,
            f"below {MOST_MEMORY / 1e6:g}",
            found < MOST_MEMORY,
        )
        for name, found in grown.items()
    ]


def history(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one call with a short and with a long history, and how they compare."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        files = {}
        for name, runs in (("short", SHORT_HISTORY), ("long", LONG_HISTORY)):
            folder = stack.enter_context(scratch())
            job = SeparateProcess("burden:history", runs=runs, folder=str(folder))
            files[name] = stack.enter_context(job)
        for call in files["long"].facts["calls"]:
            times = rounds(
                files,
                count=max(1, options.rounds // 3),
                warmup=min(1, options.warmup),
                timed=lambda job, call=call: job.call(call).seconds,  # type: ignore[misc]
            )
            found[call] = {
                name: summary(seconds).median / burden.REPEATS for name, seconds in times.items()
            }
            found[call]["times"] = ratio(times["long"], times["short"])
    return found


def history_table(found: dict[str, Any]) -> str:
    lines = [f"{'a history of':24} {SHORT_HISTORY:>9,} {LONG_HISTORY:>9,} runs"]
    for call, row in found.items():
        lines.append(
            f"  {call:22} {row['short'] * MILLI:6.2f} ms {row['long'] * MILLI:6.2f} ms"
            f"  {row['times']:.2f} ×"
        )
    return "\n".join(lines)


def verdicts_on_history(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        verdict(
            f"{call}, {LONG_HISTORY:,} runs against {SHORT_HISTORY}",
            row["times"],
            f"at most {MOST_SLOWDOWN:g}",
            row["times"] <= MOST_SLOWDOWN,
        )
        for call, row in found.items()
    ]


def verdict(what: str, found: float, wanted: str, reached: bool) -> dict[str, Any]:
    return {"what": what, "found": round(found, 3), "wanted": wanted, "reached": reached}


def shown(verdict: dict[str, Any]) -> str:
    sign = "✓" if verdict["reached"] else "✗"
    return f"{sign} {verdict['what']}: {verdict['found']:.2f} ({verdict['wanted']})"


if __name__ == "__main__":
    sys.exit(main())
