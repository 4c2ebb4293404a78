"""`./dev bench`: Dovetail beside Dask and bare asyncio, with the ratios that are promised.

    ./dev bench                      all of it, about a minute
    ./dev bench --check              exits 1 if a target is missed
    ./dev bench --json > out.json    the numbers, every single time included

What is timed is said in contestants.py, how in measuring.py. This file only puts them together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from contestants import BASELINE, CONTESTANTS, dovetail_definition, dovetail_library
from measuring import Times, best_ratio, ratio, rounds, summary
from workloads import Workload, definition, fan, layered, standard, yaml_text

TARGETS = {"layered10x100": 4.0, "chain100": 2.0, "fan1000": 3.0}
"""How many times as fast as Dask's synchronous scheduler the library must be."""
MOST_GROWTH = 2.0
"""What a node may cost in a fan of 10,000 nodes, compared with one of 1,000."""
MOST_VALIDATION_SECONDS = 2.0
VALIDATED_NODES = 10_000

MICRO = 1e6


def main() -> int:
    options = parse()
    # Progress goes to stderr: with --json, stdout is one document.
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    report: dict[str, Any] = {"environment": environment(), "workloads": {}, "verdicts": []}
    if not options.json:
        print(*(f"{name} {value}" for name, value in report["environment"].items()), sep=" · ")
    for workload in standard():
        if options.only and workload.name not in options.only:
            continue
        say(f"… {workload.name}: {options.warmup} + {options.rounds} rounds")
        times = compete(workload, options)
        report["workloads"][workload.name] = numbers(workload, times)
        report["verdicts"] += verdict_on_speed(workload, times)
        if not options.json:
            print("\n" + table(workload, times))
    if not options.only or "scaling" in options.only:
        say("… scaling: fans of 1,000 and of 10,000 nodes")
        report["scaling"] = scaling(options)
        report["verdicts"] += verdicts_on_growth(report["scaling"])
    if not options.only or "validation" in options.only:
        say(f"… validation of {VALIDATED_NODES:,} nodes")
        report["validation"] = validation(options)
        report["verdicts"] += verdicts_on_validation(report["validation"])
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n" + "\n".join(shown(verdict) for verdict in report["verdicts"]))
    missed = [verdict for verdict in report["verdicts"] if not verdict["reached"]]
    return 1 if options.check and missed else 0


def parse() -> argparse.Namespace:
    names = [*(workload.name for workload in standard()), "scaling", "validation"]
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds (25)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds thrown away (3)")
    parser.add_argument("--only", action="append", choices=names, help="repeatable")
    parser.add_argument(
        "--contestant", action="append", choices=list(CONTESTANTS), help="repeatable; else all"
    )
    parser.add_argument("--json", action="store_true", help="numbers instead of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 0:
        parser.error("--rounds is at least 1, --warmup at least 0")
    return options


def environment() -> dict[str, Any]:
    try:
        dask = version("dask")
    except PackageNotFoundError:
        dask = "missing"
    return {
        "python": platform.python_version(),
        "dovetail": version("dovetail"),
        "dask": dask,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


# --- the workloads ---------------------------------------------------------------------------


def compete(workload: Workload, options: argparse.Namespace) -> dict[str, Times]:
    prepared = {}
    for name in options.contestant or CONTESTANTS:
        try:
            prepared[name] = CONTESTANTS[name](workload)
        except ModuleNotFoundError as error:
            sys.exit(f"{name}: {error.name} is not installed; ./dev bench installs it")
        workload.check(prepared[name]())
    return rounds(prepared, count=options.rounds, warmup=options.warmup)


def numbers(workload: Workload, times: dict[str, Times]) -> dict[str, Any]:
    found = {}
    for name, seconds in times.items():
        told = summary(seconds)
        found[name] = {
            "nodes": workload.nodes,
            "median_seconds": told.median,
            "best_seconds": told.best,
            "spread": told.spread,
            "nodes_per_second": workload.nodes / told.median,
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


def verdict(what: str, found: float, wanted: str, reached: bool) -> dict[str, Any]:
    return {"what": what, "found": round(found, 3), "wanted": wanted, "reached": reached}


def shown(verdict: dict[str, Any]) -> str:
    sign = "✓" if verdict["reached"] else "✗"
    return f"{sign} {verdict['what']}: {verdict['found']:.2f} ({verdict['wanted']})"


if __name__ == "__main__":
    sys.exit(main())
