"""The distributed part of the bench: all contestants on one Redis, in one interleaved run.

Beside the times it tells the CPU seconds of every process, and from those of Redis the limit of the
same run: more nodes a second than Redis alone could serve are not to be had on it. By itself,

    .venv/bin/python bench/distributed.py --quick fan1000 [--rounds N]

runs Dovetail alone and says of each round where the time went, for work on its speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import workloads
from apart import Failed, Missing, Opener, SeparateProcess
from fleet import Pids, Used, private_postgres, private_redis, used
from measuring import Times, ratio, rounds, summary
from redis_contestants import ARCHIVED, CELERY, CONTESTANTS, DOUBLED, FLOOR, OURS, STREAQ
from workloads import Workload

TARGETS = {
    "chain100": {STREAQ: 4.0, CELERY: 2.5},
    "fan1000": {STREAQ: 20.0, CELERY: 30.0},
    "diamonds500": {STREAQ: 15.0, CELERY: 30.0},
}
"""How many times as fast as each peer one orchestrator and one worker must be."""
LEAST_SHARE = {"fan1000": 0.6, "diamonds500": 0.6}
"""Of what Redis could serve, if it did nothing else. A chain has one node at a time under way, so
there Redis waits for all contestants, and they wait for it."""
LEAST_ARCHIVED = 0.7
"""The speed with PostgreSQL behind it, of that without."""
LEAST_DOUBLED = 0.95
"""The speed of twice as many processes on the same cores: no slower, but for the noise."""
MOST_GROWTH = 1.3
"""What a node may cost in a fan of 10,000 nodes, compared with one of 1,000."""

MICRO = 1e6
MILLI = 1e3


@dataclass
class Contestant:
    """One that is open, and what its rounds have taken and used."""

    there: SeparateProcess
    pids: Pids
    rests: bool = False
    checks: bool = False
    """What both mean is said in redis_contestants.py."""
    used: list[Used] = field(default_factory=list)
    rested: Times = field(default_factory=list)


@dataclass
class Contest:
    """All who are open, on one Redis."""

    redis: Any
    those: dict[str, Contestant] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def redis_version(self) -> str:
        lines = self.redis.ask("INFO", "server").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)["redis_version"]

    def seconds(self, name: str, call: str) -> float:
        """Of one call; infinite for who has failed. What it used is kept with the contestant."""
        if name in self.failed:
            return inf
        contestant = self.those[name]
        try:
            before = used(self.redis, contestant.pids)
            answer = contestant.there.call(call)
            if contestant.rests:
                contestant.rested.append(contestant.there.call("rest").seconds)
            spent = used(self.redis, contestant.pids) - before
            contestant.used.append(spent.beside("client", answer.value))
            if contestant.checks:
                contestant.there.call(f"check {call}")
        except (Failed, OSError) as error:  # OSError: a process of its own has gone
            self.failed[name] = str(error)
            return inf
        return answer.seconds


Contestants = Mapping[str, tuple[Opener, dict[str, Any]]]


@contextmanager
def opened(
    names: list[str], works: list[Workload], contestants: Contestants = CONTESTANTS
) -> Iterator[Contest]:
    """Each contestant has its own database in the one Redis and sees only its own keys."""
    with ExitStack() as stack:
        found = Contest(stack.enter_context(private_redis()))
        for number, name in enumerate(names):
            opener, wishes = contestants[name]
            arguments, servers = dict(wishes), {}
            if arguments.pop("archive", False):
                postgres = stack.enter_context(private_postgres())
                arguments["database_url"] = postgres.new_database()
                servers["postgres"] = [postgres.pid]
            try:
                there = SeparateProcess(
                    f"{opener.__module__}:{opener.__name__}",
                    works=[asdict(work) for work in works],
                    url=found.redis.url.removesuffix("/0") + f"/{number}",
                    **arguments,
                )
            except Missing as error:
                sys.exit(f"{name}: {error} is not installed; ./dev bench installs it")
            except Failed as error:
                found.failed[name] = str(error)
                continue
            stack.callback(there.close)
            facts = dict(there.facts)
            found.those[name] = Contestant(there, servers | facts.pop("pids"), **facts)
        yield found


# --- the workloads -----------------------------------------------------------------------------

Effort = Callable[[float], Mapping[str, int]]
"""How many rounds and how many to throw away, if one takes so many seconds."""


def compete(contest: Contest, workload: Workload, effort: Effort) -> dict[str, Any]:
    """Rows by contestant. Who fails has a row that says so."""
    ready = {name: name for name in contest.those}
    seconds = lambda name: contest.seconds(name, workload.name)  # noqa: E731
    first = {name: seconds(name) for name in ready}
    planned = effort(sum(taken for taken in first.values() if taken < inf))
    for contestant in contest.those.values():
        contestant.used.clear()
        contestant.rested.clear()
    times = rounds(ready, **planned, timed=seconds) if ready else {}
    rows: dict[str, Any] = {}
    for name in contest.those | contest.failed:
        if name in contest.failed:
            rows[name] = {"failed": contest.failed[name]}
            continue
        spent = contest.those[name].used[planned["warmup"] :]
        others = {other: taken for other, taken in times.items() if other not in contest.failed}
        rows[name] = row(workload, times[name], spent) | {
            "times": {other: ratio(taken, times[name]) for other, taken in others.items()}
        }
        if contest.those[name].rests:
            rows[name]["rest_seconds"] = statistics.median(contest.those[name].rested)
    return rows


def row(workload: Workload, seconds: Times, spent: list[Used]) -> dict[str, Any]:
    reported, nodes = summary(seconds), workload.nodes
    shares = [each.cpu["redis"] / taken for each, taken in zip(spent, seconds, strict=True)]
    return {
        "nodes": nodes,
        "median_seconds": reported.median,
        "best_seconds": reported.best,
        "spread": reported.spread,
        "nodes_per_second": nodes / reported.median,
        "workflows_per_second": workload.runs / reported.median,
        "cpu_seconds_per_node": {
            kind: statistics.median(each.cpu[kind] for each in spent) / nodes
            for kind in spent[0].cpu
        },
        "all_cpu_seconds_per_node": statistics.median(sum(each.cpu.values()) for each in spent)
        / nodes,
        "reads_per_node": statistics.median(each.reads for each in spent) / nodes,
        "commands_per_node": statistics.median(sum(each.commands.values()) for each in spent)
        / nodes,
        # Nodes a second, divided by the nodes that Redis could serve with its CPU time per node.
        "share_of_redis_limit": statistics.median(shares),
        "seconds": seconds,
    }


def table(
    workload: Workload, rows: dict[str, Any], peers: Sequence[str] = (STREAQ, CELERY, FLOOR)
) -> str:
    head = f"{workload.name} over Redis, {workload.nodes:,} nodes"
    columns = f"{'median':>10} {'best':>10} {'spread':>6} {'nodes/s':>8} {'runs/s':>7}"
    against = " ".join(f"{'× ' + peer:>{_width(peer)}}" for peer in peers)
    cpu = "CPU µs a node: all, redis, orchestrator, worker, client, postgres"
    lines = [f"{head:36} {columns} {against}  of Redis' limit  {cpu}"]
    for name, reported in rows.items():
        if "failed" in reported:
            lines.append(f"  {name:34} failed: {reported['failed']}")
            continue
        line = (
            f"  {name:34} {reported['median_seconds'] * MILLI:7.1f} ms"
            f" {reported['best_seconds'] * MILLI:7.1f} ms {reported['spread']:6.0%}"
            f" {reported['nodes_per_second']:8,.0f} {reported['workflows_per_second']:7,.1f}"
        )
        for peer in peers:
            reached = f"{reported['times'][peer]:.1f}" if peer in reported["times"] else "—"
            line += f" {reached:>{_width(peer)}}"
        used_by = reported["cpu_seconds_per_node"]
        line += f"  {reported['share_of_redis_limit']:15.0%}"
        line += f"  {reported['all_cpu_seconds_per_node'] * MICRO:7.1f} "
        for kind in ("redis", "orchestrator", "worker", "client", "postgres"):
            line += f" {used_by[kind] * MICRO:6.1f}" if kind in used_by else f" {'—':>6}"
        if "rest_seconds" in reported:
            line += f"  archived {reported['rest_seconds'] * MILLI:.0f} ms later"
        lines.append(line)
    return "\n".join(lines)


def _width(peer: str) -> int:
    return max(8, len(peer) + 2)


Judge = Callable[[str, float, str, bool], dict[str, Any]]


def verdicts(workload: Workload, rows: dict[str, Any], judge: Judge) -> list[dict[str, Any]]:
    """Who failed has reached nothing."""

    def times(slower: str, name: str) -> float:
        found: float = rows[name].get("times", {}).get(slower, 0.0)
        return found

    found, what = [], f"{workload.name} over Redis"
    if OURS not in rows:
        return []
    for peer, wanted in TARGETS.get(workload.name, {}).items():
        if peer in rows:
            reached = times(peer, OURS)
            title = f"{what}: {OURS} × {peer}"
            found.append(judge(title, reached, f"at least {wanted:g}", reached >= wanted))
    if workload.name in LEAST_SHARE:
        least, reached = LEAST_SHARE[workload.name], rows[OURS].get("share_of_redis_limit", 0.0)
        title = f"{what}: of what Redis could serve"
        found.append(judge(title, reached, f"at least {least:g}", reached >= least))
    for other, least in ((ARCHIVED, LEAST_ARCHIVED), (DOUBLED, LEAST_DOUBLED)):
        if other in rows:
            reached = times(OURS, other)
            title = f"{what}: {other} × {OURS}"
            found.append(judge(title, reached, f"at least {least:g}", reached >= least))
    return found


# --- growth ------------------------------------------------------------------------------------


def growth(contest: Contest, small: Workload, large: Workload, effort: Effort) -> dict[str, Any]:
    """What a node costs in a large fan, as a multiple of its cost in a small one."""
    works = {work.name: work.name for work in (small, large)}
    seconds = lambda name: contest.seconds(OURS, name)  # noqa: E731
    first = sum(map(seconds, works))
    if first == inf:
        return {"failed": contest.failed[OURS]}
    times = rounds(works, **effort(first), timed=seconds)
    return {
        "seconds": times,
        "times": ratio(times[large.name], times[small.name]) * small.nodes / large.nodes,
    }


def verdict_on_growth(found: dict[str, Any], judge: Judge) -> dict[str, Any]:
    reached = found.get("times", inf)
    what = "fan of 10,000 against 1,000 nodes over Redis, cost of a node"
    return judge(what, reached, f"at most {MOST_GROWTH:g}", reached <= MOST_GROWTH)


# --- quick -------------------------------------------------------------------------------------


def quick(workload: Workload, count: int) -> None:
    with opened([OURS], [workload]) as contest:
        for name, problem in contest.failed.items():
            sys.exit(f"{name}: {problem}")
        ours = contest.those[OURS]
        print(f"{contest.redis.url} redis {contest.redis.pid}", ours.pids)
        for number in range(count + 1):
            seconds = contest.seconds(OURS, workload.name)
            if seconds == inf:
                sys.exit(f"{OURS}: {contest.failed[OURS]}")
            if number:  # the first is a warm-up
                print(story(workload, seconds, ours.used[-1]), flush=True)


def story(workload: Workload, seconds: float, spent: Used) -> str:
    nodes = workload.nodes
    cpu = "  ".join(f"{kind} {taken * MICRO / nodes:.1f}" for kind, taken in spent.cpu.items())
    most = sorted(spent.commands.items(), key=lambda item: -item[1])[:12]
    commands = "  ".join(f"{name} {count / nodes:.3f}" for name, count in most)
    return (
        f"{workload.name}: {seconds * MILLI:.1f} ms, {nodes / seconds:,.0f} nodes/s,"
        f" {seconds * MICRO / nodes:.1f} µs/node,"
        f" {spent.cpu['redis'] / seconds:.0%} of Redis' limit {nodes / spent.cpu['redis']:,.0f}\n"
        f"  CPU µs/node: {cpu}\n"
        f"  per node: {spent.reads / nodes:.3f} reads, {spent.received / nodes:.0f} bytes in,"
        f" {sum(spent.commands.values()) / nodes:.2f} commands: {commands}"
    )


def main() -> None:
    known = {workload.name: workload for workload in workloads.durable()}
    known["fan9998"] = workloads.fan(9998)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", choices=known, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    quick(known[options.quick], options.rounds)


if __name__ == "__main__":
    main()
