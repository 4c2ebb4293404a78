"""Random runs while everything breaks: a seed decides what, and in the end every run is read.

async with Stage(…) as stage:
    storm = Storm(stage)
    await storm.rage(seconds=20)
    report = await storm.calm()
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from dovetail.core.errors import NotFound, StoreError
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus

from .side_file import Execution, executions
from .stage import RESULTS, TASKS, Fault, Stage
from .verdict import Evidence, violations
from .workload import Plan, draw

SERVICES = ("serve", "orchestrator", "orchestrator", "worker", "worker")
CROWD = 12
"""So many runs are under way at once."""
MAX_LOOKED_AT = 200
PATIENCE = 60.0
"""Once nothing breaks any more every run must end within these seconds, beyond a few leases."""
LEFT_OVER_SECONDS = 15.0
"""And nothing may be left over a lease and so long later: a sweep looks after what is silent."""

FAULTS: dict[str, tuple[int, Fault]] = {
    "a worker dies": (12, lambda stage: stage.die_and_come_back("worker")),
    "an orchestrator dies": (3, lambda stage: stage.die_and_come_back("orchestrator")),
    "an orchestrator dies over results": (1, lambda stage: stage.die_over_results()),
    "the API dies": (1, lambda stage: stage.die_and_come_back("serve")),
    "a worker sleeps": (3, lambda stage: stage.nap("worker")),
    "a worker oversleeps": (2, lambda stage: stage.oversleep()),
    "an orchestrator sleeps": (2, lambda stage: stage.nap("orchestrator")),
    "results come ten times": (3, lambda stage: stage.double([RESULTS], "orchestrator")),
    "tasks come ten times": (3, lambda stage: stage.double(TASKS, "worker")),
    "old messages come again": (2, lambda stage: stage.bring_up_old()),
    "task streams are deleted": (2, lambda stage: stage.delete_tasks()),
    "Redis dies": (2, lambda stage: stage.kill_redis()),
    "Redis sleeps": (1, lambda stage: stage.pause_redis()),
    "answers are lost": (2, lambda stage: stage.lose_answers()),
    "scripts are forgotten": (1, lambda stage: stage.forget_scripts()),
}
"""What happens, and how often beside the rest."""
SLOW_FAULTS: dict[str, tuple[int, Fault]] = {
    "a connection falls silent": (1, lambda stage: stage.fall_silent()),
}
"""A service that is hit by one of these needs many seconds."""
FLOODS: dict[str, tuple[int, Fault]] = {
    "Redis is emptied": (6, lambda stage: stage.empty_redis()),
    "Redis loses the end of its log": (4, lambda stage: stage.lose_the_end_of_the_log()),
    "PostgreSQL dies": (4, lambda stage: stage.kill_postgres()),
    "PostgreSQL sleeps": (3, lambda stage: stage.pause_postgres()),
}
"""What only a set-up with PostgreSQL bears, or notices."""
EVERY = {**FAULTS, **SLOW_FAULTS, **FLOODS}


Lost = dict[tuple[str, str], float]
"""When the message of a node with that token was last lost."""


@dataclass(slots=True)
class Report:
    """What a storm came to."""

    runs: int = 0
    executions: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    lost: int = 0
    """Starts whose worker was lost, or taken for lost."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """By run; what belongs to none stands under an empty name."""
    read: set[str] = field(default_factory=set)
    """The runs that were found, which are all of them."""

    def blame(self, run_id: str, sentences: list[str]) -> None:
        if sentences:
            self.wrong.setdefault(run_id, []).extend(sentences)


class Storm:
    def __init__(
        self,
        stage: Stage,
        faults: Iterable[str] = FAULTS,
        *,
        known: Mapping[str, tuple[int, Fault]] = EVERY,
        plan: Callable[[random.Random], Plan] = draw,
        crowd: int = CROWD,
        batch: int = 1,
        orders: bool = True,
    ) -> None:
        """`known` says how each of the faults is done. `plan` draws the runs, of which `crowd`
        are under way at once, `batch` of each plan; with `orders` some are cancelled and retried.
        """
        self._stage = stage
        self._known = known
        # One source each, so that a seed gives the same runs and the same faults in the same
        # order, however fast the machine is. Whom a fault hits, and when, is another matter.
        self._plans, self._weather, self._orders = (
            random.Random(f"{stage.seed} {of}") for of in ("runs", "faults", "orders")
        )
        self._draw = plan
        self._crowd = crowd
        self._batch = batch
        self._keys = itertools.count()
        self._orders_given = orders
        self._faults = list(faults)
        self.tried: set[str] = set()
        self.plans: dict[str, Plan] = {}
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._promised: dict[str, int] = {}
        """Epochs that a client knows of, and that the archive could know of."""
        self._ended: dict[str, int] = {}
        """The same of epochs that were cancelled."""
        self._under_way: set[asyncio.Task[None]] = set()

    async def rage(self, seconds: float, pause: tuple[float, float] = (0.1, 0.6)) -> None:
        """Runs come and things break, for so long."""
        for kind in SERVICES:
            self._stage.start(kind)
        await self._stage.ready()
        self._until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed())
            if self._orders_given:
                group.create_task(self._order())
            for fault in self._forecast():
                await asyncio.sleep(self._weather.uniform(*pause))
                self._happen(fault)
                if not self._rages and self.tried >= set(self._faults):
                    break

    def _forecast(self) -> Iterator[str]:
        """Each of the faults once, then any of them, for ever."""
        weights = [self._known[fault][0] for fault in self._faults]
        yield from self._weather.sample(self._faults, len(self._faults))
        while True:
            yield from self._weather.choices(self._faults, weights)

    @property
    def _rages(self) -> bool:
        return time.monotonic() < self._until

    def _happen(self, fault: str) -> None:
        self.tried.add(fault)
        _, act = self._known[fault]
        task = asyncio.ensure_future(act(self._stage))
        self._under_way.add(task)
        task.add_done_callback(self._passed)

    def _passed(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (problem := task.exception()):
            self._stage.complain(f"a fault could not be done: {problem!r}")

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def _feed(self) -> None:
        """As many runs as there is room for."""
        front = self._stage.front
        while self._rages:
            while len(self._open) < self._crowd and self._rages:
                plan = self._draw(self._plans)
                key = f"trigger {next(self._keys)}"
                if self._batch == 1:
                    made = [await front.trigger(key, plan.definition, plan.params)]
                else:
                    items = [plan.params] * self._batch
                    made = await front.batch(key, plan.definition, items)
                self.plans |= dict.fromkeys(made, plan)  # answered: they must not be lost
                self._open.update(made)
            await asyncio.sleep(0.2)
            await self._look()

    async def _look(self) -> None:
        """Which runs have ended? Of a crowd, as many as do not keep Redis from its work."""
        some = sorted(self._open)
        if len(some) > MAX_LOOKED_AT:
            some = random.sample(some, MAX_LOOKED_AT)
        runs = await asyncio.gather(*map(self._load, some))
        self._open.difference_update(run.id for run in runs if run is not None and run.finished)

    async def _load(self, run_id: str) -> RunState | None:
        """None if that cannot be known at this moment."""
        with suppress(NotFound, StoreError):
            return await self._stage.commands.store.load(run_id)
        return None

    async def _order(self) -> None:
        """Cancel some, retry some."""
        chance, front = self._orders, self._stage.front
        while self._rages:
            await asyncio.sleep(chance.uniform(0.1, 0.8))
            if not self.plans:
                continue
            # Most runs have ended, and only the others can be cancelled.
            some = sorted(self._open) if self._open and chance.random() < 0.5 else list(self.plans)
            run_id = chance.choice(some)
            run = await self._load(run_id)
            if run is None:
                continue
            if not run.finished:
                if chance.random() < 0.3:
                    self._cancelled.add(run_id)
                    self._stage.note(f"{run_id} is cancelled")
                    self._stage.counts["cancels"] += 1
                    asked_at = time.time()
                    epoch = await front.cancel(run_id)
                    if self._is_promise(asked_at):
                        self._ended[run_id] = max(epoch, self._ended.get(run_id, 0))
                continue
            first = None
            if run.status is RunStatus.COMPLETED or chance.random() < 0.3:
                first = chance.choice(list(self.plans[run_id].nodes))
            self._open.add(run_id)
            self._stage.note(f"{run_id} is retried from {first}")
            self._stage.counts["retries"] += 1
            asked_at = time.time()
            epoch = await front.retry(run_id, first)
            if self._is_promise(asked_at):
                self._promised[run_id] = max(epoch, self._promised.get(run_id, 0))

    def _is_promise(self, asked_at: float) -> bool:
        """Whether what was answered just now outlasts Redis: PostgreSQL was there to keep it."""
        return self._stage.archive is not None and asked_at > self._stage.postgres_well_since

    # ── the end ──────────────────────────────────────────────────────────────────────────

    async def calm(self, *, wait_for_sweeps: bool = True) -> Report:
        """Nothing breaks any more: everything must end, and everything must be right.

        That nothing is left over is known only after a sweep, which takes its time.
        """
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._stage.note("all is calm")
        if self._stage.forgot_until:  # whatever was too young to be put back is not any more
            await asyncio.sleep(self._stage.settings.recovery_timeout)
            await self._stage.die_and_come_back("orchestrator")
        give_up = time.monotonic() + PATIENCE + 5 * self._stage.settings.lease_seconds
        self._open = set(self.plans)
        while self._open and time.monotonic() < give_up:
            await self._look()
            await asyncio.sleep(0.1)
        stage, report = self._stage, Report(runs=len(self.plans))
        left_over = await self._left_over() if wait_for_sweeps else []
        report.blame("", [*left_over, *stage.complaints, *stage.front.complaints])
        listed = [run["run_id"] for run in await stage.front.list_runs()]
        if sorted(listed) != sorted(self.plans):
            strangers = sorted(set(listed) ^ set(self.plans))
            report.blame(
                "", [f"{len(listed)} runs are listed, {len(self.plans)} were made: {strangers}"]
            )
        executed = self._executed()
        report.executions = sum(map(len, executed.values()))
        times: list[tuple[str, float]] = []
        lost: dict[str, Lost] = {}
        for at, run_id, node, token in stage.lost_tasks:
            lost.setdefault(run_id, {})[node, token] = at
        for run_id in self.plans:
            try:
                evidence = await self._evidence(run_id, executed.get(run_id, []))
            except NotFound:
                report.blame(run_id, ["it is lost"])
                continue
            report.read.add(run_id)
            report.blame(run_id, violations(evidence))
            report.blame(run_id, await self._archived(evidence.run))
            if evidence.run.epoch < (promised := self._promised.get(run_id, 0)):
                report.blame(run_id, [f"it was retried, and epoch {promised} is lost"])
            if evidence.run.epoch <= (ended := self._ended.get(run_id, 0)) and (
                evidence.run.epoch < ended or evidence.run.status is RunStatus.COMPLETED
            ):
                report.blame(run_id, [f"it was cancelled in epoch {ended}, and that is lost"])
            status = str(evidence.run.status)
            report.statuses[status] = report.statuses.get(status, 0) + 1
            types = [event.type for event in evidence.events]
            report.refused += types.count("result.refused")
            report.lost += types.count("node.lost")
            self._measure(evidence.events, lost.get(run_id, {}))
            times += [(event.type, event.time) for event in evidence.events]
        self._stage.recovery.redis += _gone_on(self._stage.redis_deaths, times)
        self._stage.recovery.broker += _gone_on(self._stage.broker_deaths, times)
        return report

    async def _left_over(self) -> list[str]:
        give_up = time.monotonic() + LEFT_OVER_SECONDS + self._stage.settings.lease_seconds
        while left := await self._stage.left_over():
            if self._open or time.monotonic() > give_up:
                return left
            await asyncio.sleep(0.2)
        return []

    async def _evidence(self, run_id: str, executed: list[Execution]) -> Evidence:
        stage = self._stage
        run = await stage.commands.store.load(run_id)
        return Evidence(
            plan=self.plans[run_id],
            run=run,
            events=await self._events(run),
            executions=[execution.start for execution in executed],
            max_crashes=stage.settings.max_crashes,
            cancelled=run_id in self._cancelled,
            forgotten=sum(execution.time < stage.forgot_until for execution in executed),
        )

    async def _archived(self, run: RunState) -> list[str]:
        """Where the archive has something else, once it has everything."""
        if self._stage.archive is None or self._open:
            return []
        try:
            kept = await self._stage.archive.load(run.id)
        except NotFound:
            return ["it is not in the archive"]
        ours, theirs = ((one.status, one.epoch, one.seq) for one in (run, kept))
        return [] if ours == theirs else [f"it is {ours}, and in the archive {theirs}"]

    def _executed(self) -> dict[str, list[Execution]]:
        """By run."""
        found: dict[str, list[Execution]] = {}
        for execution in executions(self._stage.side):
            found.setdefault(execution.run_id, []).append(execution)
        return found

    async def _events(self, run: RunState) -> list[Event]:
        found: list[Event] = []
        if run.seq:
            async for event in self._stage.commands.store.watch(run.id):
                found.append(event)
                if len(found) == run.seq:
                    break
        return found

    def _measure(self, events: list[Event], lost: Lost) -> None:
        """From a worker's death, or the loss of a message, to the start that made it good."""
        recovery = self._stage.recovery
        starts = {
            (event.node, event.epoch, event.attempt): event.time
            for event in events
            if event.type == "node.started"
        }
        for event in events:
            again = starts.get((event.node, event.epoch, (event.attempt or 0) + 1))
            if event.type == "node.lost" and again is not None:
                worker = f"{(event.data or {}).get('worker')}/"
                died = [at for at, name in self._stage.deaths if name in worker and at < event.time]
                recovery.workers += [again - at for at in died]
        for (node, token), at in lost.items():
            epoch, attempt, _ = token.split(".")
            begun = starts.get((node, int(epoch), int(attempt)))
            if begun is not None and begun > at:
                recovery.tasks.append(begun - at)

    async def leave_evidence(self, report: Report, folder: Path) -> None:
        """What is needed to understand what went wrong: the faults, and all of each such run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "faults.txt").write_text("\n".join(self._stage.notes) + "\n")
        executed = self._executed()
        lines = []
        for run_id, sentences in report.wrong.items():
            lines += [f"{run_id or 'all'}: {sentence}" for sentence in sentences]
            if run_id in report.read:
                evidence = await self._evidence(run_id, executed.get(run_id, []))
                (folder / f"{run_id}.json").write_bytes(_shown(evidence, sentences))
        (folder / "wrong.txt").write_text("\n".join(lines) + "\n")


def _gone_on(
    deaths: list[tuple[float, float, float]], times: list[tuple[str, float]]
) -> list[float]:
    """From each death of a server until nodes start and end again and no old result waits."""
    found = []
    for died, served, settled in deaths:
        kinds = ("node.started", "node.completed")
        after = [[at for kind, at in times if kind == one and at > served] for one in kinds]
        if all(after):
            found.append(max(*map(min, after), settled) - died)
    return found


def _shown(evidence: Evidence, sentences: list[str]) -> bytes:
    shown: dict[str, Any] = {
        "wrong": sentences,
        "definition": evidence.plan.definition,
        "params": evidence.plan.params,
        "events": [list(event) for event in evidence.events],
        "executions": evidence.executions,
        "state": evidence.run.snapshot(),
    }
    return orjson.dumps(shown, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
