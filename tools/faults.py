"""`./dev faults`: random runs for minutes while everything breaks, and every one of them is read.

    ./dev faults                     ten minutes
    ./dev faults --minutes 60        longer
    ./dev faults --seed 7            the same runs and faults again, as far as time allows
    ./dev faults --only storms       or recovery, crowds, floods
    ./dev faults --transport celery  the same over Celery, whose broker breaks too; has no floods
    ./dev faults --api               a minute: a server is flooded, and answers others in time

`recovery` measures at the default settings how long a death holds up runs, `crowds` the same while
there are a thousand of them; `storms` are short rounds of all faults at once, with short leases;
`floods` empty a Redis that has PostgreSQL behind it. It exits 1 if anything is lost, stuck, done
twice or too slow, and says where the evidence is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.process_forker import ProcessForker  # noqa: E402
from tests.servers.postgres_server import PostgresServer  # noqa: E402
from tests.servers.redis_server import RedisServer  # noqa: E402
from tests.services.faults.celery_stage import (  # noqa: E402
    CELERY_FAULTS,
    IMPATIENT_POOL,
    CeleryStage,
)
from tests.services.faults.celery_stage import JOBS as CELERY_JOBS  # noqa: E402
from tests.services.faults.stage import IMPATIENT, JOBS, Fault, Stage  # noqa: E402
from tests.services.faults.storm import (  # noqa: E402
    EVERY,
    FAULTS,
    FLOODS,
    SLOW_FAULTS,
    Report,
    Storm,
)
from tests.services.faults.workload import draw, draw_any, draw_quick, draw_slow  # noqa: E402
from tools import api_floods  # noqa: E402

from dovetail.config import Settings  # noqa: E402

EVIDENCE = ROOT / ".cache" / "faults"
PARTS = ("recovery", "crowds", "floods", "storms")
STORM_SECONDS = 40.0
FLOOD_SECONDS = 40.0
CROWD_SECONDS = 15.0
CROWD_PAUSE = (3.0, 5.0)
BATCH = 100
"""Runs of a crowd that are asked for together."""
FLOODED = {**IMPATIENT, "recovery_timeout": 1.0, "checkpoint_interval": 2.0}
KILLS = ("a worker dies", "an orchestrator dies", "the API dies")
LEASE = float(Settings.model_fields["lease_seconds"].default)
LIMITS = {"workers": LEASE + 2.0, "orchestrators": 5.0, "redis": 3.0, "tasks": LEASE + 10.0}
"""Seconds that a fault may hold up a run at the default settings; of a hundred one may be late."""
CELERY_LIMITS = {"workers": LEASE + 5.0, "broker": LEASE + 5.0, "tasks": LEASE + 10.0}
MEANS = {
    "workers": "a worker's death until the next attempt",
    "orchestrators": "an orchestrator's until a peer took its results",
    "redis": "Redis' until nodes go on and no old result waits",
    "tasks": "the loss of a task's message until the node started",
    "broker": "the broker's until nodes start and end again",
}
Trials = Mapping[str, tuple[tuple[str, ...], float, tuple[float, float]]]
TRIALS: Trials = {
    "workers": (("a worker dies",), 40.0, (0.8, 1.2)),
    "orchestrators": (("an orchestrator dies over results",), 30.0, (2.0, 3.0)),
    "redis": (("Redis dies",), 25.0, (2.0, 3.0)),
    "tasks": (("task streams are deleted",), 20.0, (0.5, 1.0)),
}
"""Which faults are measured, for how long they happen, and with what pauses."""
CELERY_TRIALS: Trials = {
    # Few: a pool of processes takes its time to start, and no node runs meanwhile.
    "workers": (("a worker dies", "a process of a pool dies"), 60.0, (4.0, 6.0)),
    "broker": (("the broker dies",), 60.0, (8.0, 12.0)),
    "tasks": (("the broker loses everything",), 60.0, (8.0, 12.0)),
}
CROWDS = {"workers": 20, "tasks": 20}
"""Runs at once: held-up ones wait for a while, and others shall run meanwhile."""


NOT_IN_A_CROWD = ("a worker oversleeps", "a connection falls silent")
"""What waits for a node that takes its time, and what holds up all runs for many seconds."""


@dataclass
class Tally:
    """What all rounds came to."""

    runs: int = 0
    executions: int = 0
    refused: int = 0
    wrong: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, list[float]] = field(default_factory=dict)

    def add(self, stage: Stage, report: Report) -> None:
        self.runs += report.runs
        self.executions += report.executions
        self.refused += report.refused
        self.wrong += sum(map(len, report.wrong.values()))
        self.counts.update(stage.counts)
        self.statuses.update(report.statuses)
        for kind in MEANS:
            self.recovery.setdefault(kind, []).extend(getattr(stage.recovery, kind))


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--api", action="store_true", help="flood a server, nothing else")
    parser.add_argument("--transport", choices=TRANSPORTS, default="streams")
    given = parser.parse_args()
    if given.api:
        return api_floods.run(say)
    over = f" --transport {given.transport}" if given.transport != "streams" else ""
    say(f"seed {given.seed}: ./dev faults --seed {given.seed}{over}")
    parts = [given.only] if given.only else PARTS
    return asyncio.run(run(given.seed, given.minutes * 60, parts, TRANSPORTS[given.transport]))


async def run(
    seed: int, seconds: float, parts: Sequence[str], over: Transport | None = None
) -> int:
    over = over or STREAMS
    end = time.monotonic() + seconds
    tally = Tally()
    slow = False
    if "recovery" in parts:
        say(f"\nrecovery at the default settings (a lease is {LEASE:g} s)")
        for kind in over.trials:
            slow |= not await recover(kind, seed, tally, over)
    if "crowds" in parts:
        say(f"\nthe same with {over.many} quick runs at once, then all that can happen to them")
        for kind in over.trials:
            slow |= not await recover(kind, seed, tally, over, crowded=True)
        await rage(seed, tally, over, crowded=True)
    if "floods" in parts and over is STREAMS:
        say("\nflood: the same over PostgreSQL, which is killed too, and Redis is emptied")
        await flood(seed, tally)
    number = 0
    if "storms" in parts:
        say("\nstorms: an API, two orchestrators, two workers, leases of a second")
    while "storms" in parts and (number == 0 or time.monotonic() + STORM_SECONDS < end):
        number += 1
        await rage(seed + number, tally, over)
    tell(tally)
    return 1 if tally.wrong or slow else 0


# ── parts ────────────────────────────────────────────────────────────────────────────────


async def recover(
    kind: str, seed: int, tally: Tally, over: Transport, *, crowded: bool = False
) -> bool:
    """One fault again and again, at the default settings; whether it is in time."""
    faults, seconds, pause = over.trials[kind]
    plan = draw_slow if kind == "workers" else draw
    async with over.stage(seed, {"concurrency": over.concurrency}) as stage:
        if crowded:
            storm = crowd(stage, faults, over)
            await storm.rage(CROWD_SECONDS, CROWD_PAUSE)
        else:
            many = over.crowds.get(kind, 6)
            storm = Storm(stage, faults, known=over.known, plan=plan, crowd=many)
            await storm.rage(seconds, pause)
        report = await storm.calm()
        if kind != "workers" and report.lost and over is STREAMS:
            report.blame("", [f"{report.lost} starts were lost, and no worker was"])
        await judge(f"{'crowd' if crowded else 'recovery'} of {kind}", seed, storm, report)
        tally.add(stage, report)
        return figure(kind, getattr(stage.recovery, kind), over.limits[kind])


def crowd(stage: Stage, faults: Sequence[str], over: Transport) -> Storm:
    return Storm(stage, faults, known=over.known, plan=draw_quick, crowd=over.many, batch=BATCH)


async def rage(seed: int, tally: Tally, over: Transport, *, crowded: bool = False) -> None:
    async with over.stage(seed, over.impatient) as stage:
        if crowded:
            storm = crowd(stage, [one for one in over.faults if one not in NOT_IN_A_CROWD], over)
            await storm.rage(CROWD_SECONDS)
        else:
            storm = Storm(stage, over.faults, known=over.known, plan=draw_any, crowd=over.crowd)
            await storm.rage(STORM_SECONDS)
        await end("crowd" if crowded else "storm", seed, stage, storm, tally)


async def flood(seed: int, tally: Tally) -> None:
    with PostgresServer() as postgres:
        settings = {**FLOODED, "database_url": postgres.new_database()}
        async with stage_for(seed, settings, postgres) as stage:
            storm = Storm(stage, [*FLOODS, *KILLS])
            await storm.rage(FLOOD_SECONDS, pause=(1.0, 2.0))
            await end("flood", seed, stage, storm, tally)


async def end(part: str, seed: int, stage: Stage, storm: Storm, tally: Tally) -> None:
    report = await storm.calm()
    reported = ", ".join(f"{many} {what}" for what, many in sorted(stage.counts.items()))
    say(f"  seed {seed}: {report.runs} runs, {report.executions} executions; {reported}")
    await judge(part, seed, storm, report)
    tally.add(stage, report)


@asynccontextmanager
async def stage_for(
    seed: int, settings: dict[str, Any], postgres: PostgresServer | None = None
) -> AsyncIterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="dovetail-faults-"))
    try:
        # What Redis has answered must survive its kill -9, as the contract asks of Redis alone.
        with RedisServer(fsync="always") as redis, ProcessForker(JOBS, folder) as process_forker:
            async with Stage(folder, redis, process_forker, seed, settings, postgres) as stage:
                yield stage
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def celery_stage_for(seed: int, settings: dict[str, Any]) -> AsyncIterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="dovetail-faults-"))
    try:
        with (
            RedisServer(fsync="always") as redis,
            RedisServer(fsync="always") as broker,
            ProcessForker(CELERY_JOBS, folder) as process_forker,
        ):
            async with CeleryStage(folder, redis, broker, process_forker, seed, settings) as stage:
                yield stage
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Transport:
    """What differs between the ways that tasks travel."""

    stage: Callable[[int, dict[str, Any]], AbstractAsyncContextManager[Stage]]
    known: Mapping[str, tuple[int, Fault]]
    faults: Sequence[str]
    trials: Trials
    limits: Mapping[str, float]
    impatient: dict[str, Any]
    concurrency: int
    crowd: int
    crowds: Mapping[str, int]
    many: int


STREAMS = Transport(
    stage=stage_for,
    known=EVERY,
    faults=[*FAULTS, *SLOW_FAULTS],
    trials=TRIALS,
    limits=LIMITS,
    impatient=IMPATIENT,
    concurrency=32,
    crowd=20,
    crowds=CROWDS,
    many=1000,
)
CELERY = Transport(
    stage=celery_stage_for,
    known=CELERY_FAULTS,
    faults=list(CELERY_FAULTS),
    trials=CELERY_TRIALS,
    limits=CELERY_LIMITS,
    impatient=IMPATIENT_POOL,
    concurrency=4,
    crowd=12,
    # No more than there are processes: who waits for one is held up by that, not by the fault.
    crowds={"workers": 1, "broker": 3, "tasks": 6},
    many=200,
)
TRANSPORTS = {"streams": STREAMS, "celery": CELERY}


async def judge(part: str, seed: int, storm: Storm, report: Report) -> None:
    if not report.wrong:
        return
    where = EVIDENCE / f"{part.replace(' ', '_')}_{seed}"
    shutil.rmtree(where, ignore_errors=True)
    await storm.leave_evidence(report, where)
    for run_id, sentences in report.wrong.items():
        for sentence in sentences:
            say(f"  WRONG {run_id}: {sentence}")
    say(f"  the evidence is in {where.relative_to(ROOT)}: wrong.txt, faults.txt, one file per run")


# ── words ────────────────────────────────────────────────────────────────────────────────


def figure(kind: str, seconds: list[float], limit: float) -> bool:
    if not seconds:
        say(f"  {MEANS[kind]:52} never happened")
        return False
    found = sorted(seconds)
    late = quantile(found, 0.99)
    fine = late <= limit
    say(
        f"  {MEANS[kind]:52} {len(found):4} ×  p50 {quantile(found, 0.5):5.2f} s  "
        f"p99 {late:5.2f} s  worst {found[-1]:5.2f} s  of {limit:g} s{'' if fine else '  TOO SLOW'}"
    )
    return fine


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def tell(tally: Tally) -> None:
    say(f"\n{tally.runs} runs, {tally.executions} executions, {tally.refused} late results refused")
    say(
        "  ended "
        + ", ".join(f"{many} {status}" for status, many in sorted(tally.statuses.items()))
    )
    for what, many in sorted(tally.counts.items()):
        say(f"  {many:7} {what}")
    say(f"{tally.wrong} violations: runs lost, stuck, moved twice or executed without an attempt")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
