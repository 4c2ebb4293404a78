"""The same races between real processes, on one file or one Redis, let go at the same moment.

That several handles in one process agree does not imply this: here locks, caches and pages are
those of different processes. None of them may ever see that the store was busy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit
from dovetail.redis_client.pipelined import PipelinedRedis

from ..core.invariants import check_run
from ..faults.process_forker import Child, ProcessForker
from .replayed import ReportedStep, retell
from .shared_runs import graph, opened
from .stores import plain, read, redis_url

WIDE: dict[str, list[str]] = {f"n{i}": [] for i in range(40)}
PAIRS: dict[str, list[str]] = {f"p{i}": [] for i in range(40)} | {
    f"c{i}": [f"p{i}"] for i in range(40)
}
LAYERED = {
    f"n{layer}_{i}": [f"n{layer - 1}_{i}", f"n{layer - 1}_{(i + 1) % 6}"] if layer else []
    for layer in range(6)
    for i in range(6)
}


@pytest.fixture(scope="module")
def shared_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessForker]:
    jobs = Path(__file__).with_name("process_jobs.py")
    with ProcessForker(jobs, tmp_path_factory.mktemp("reported")) as process_forker:
        yield process_forker


@dataclass(frozen=True)
class StoreProcesses:
    """A store that several processes open, and the processes."""

    process_forker: ProcessForker
    folder: Path
    url: str | None
    processes: int

    def race(self, job: str, *, each: bool = False, **given: Any) -> list[Any]:
        """What each of the processes printed after all had begun together."""
        started = self.folder / "start"
        started.unlink(missing_ok=True)
        children: list[Child] = []
        for number in range(self.processes):
            own = {"me": f"w{number}"} if each else {}
            children.append(self.start(job, **own, **given))
        for child in children:
            assert child.hear() == "ready"
        started.touch()
        for child in children:
            child.done()  # says so if one of them saw an error
        reported = [child.reported()[1:] for child in children]
        return [one[0] if len(one) == 1 else one for one in reported]

    def start(self, job: str, **given: Any) -> Child:
        where = {"folder": str(self.folder)} | ({"url": self.url} if self.url else {})
        return self.process_forker.start(job, **where, **given)

    def make(self, nodes: dict[str, list[str]], **given: Any) -> list[str]:
        made: list[str] = self.start("make", nodes=nodes, **given).done()
        return made

    async def look(self, run_id: str) -> tuple[RunState, list[Event]]:
        async with opened(str(self.folder), self.url) as store:
            run = await store.load(run_id)
            return run, await read(store, run_id, run.seq)


@pytest.fixture(params=["sqlite", "redis"])
def store_processes(
    request: pytest.FixtureRequest, shared_forker: ProcessForker, tmp_path: Path
) -> Iterator[StoreProcesses]:
    if request.param == "sqlite":
        yield StoreProcesses(shared_forker, tmp_path, None, 4)
    else:
        yield StoreProcesses(shared_forker, tmp_path, empty_redis(), 8)
    shared_forker.clear()


def empty_redis() -> str:
    async def flush() -> None:
        async with PipelinedRedis(redis_url()) as pipe:
            await pipe.call("FLUSHDB")

    asyncio.run(flush())
    return redis_url()


in_a_file = pytest.mark.parametrize("store_processes", ["sqlite"], indirect=True)


def test_of_many_claims_of_one_start_exactly_one_wins(store_processes: StoreProcesses) -> None:
    (run_id,) = store_processes.make(WIDE)
    granted = store_processes.race("claim", each=True, run_id=run_id)
    assert Counter(name for one in granted for name in one) == Counter(dict.fromkeys(WIDE, 1))


def test_of_many_completions_exactly_one_counts_and_the_child_is_published_once(
    store_processes: StoreProcesses,
) -> None:
    (run_id,) = store_processes.make(PAIRS)
    started = store_processes.start("start", run_id=run_id).done()
    reported = store_processes.race("complete", each=True, run_id=run_id, tokens=started)
    counted = Counter(name for one, _ in reported for name in one)
    published = Counter(name for _, one in reported for name in one)
    assert counted == Counter({name: 1 for name in PAIRS if name.startswith("p")})
    assert published == Counter({name: 1 for name in PAIRS if name.startswith("c")})


@pytest.mark.parametrize(
    "condition", [None, "{{{{ {0}.status == 'COMPLETED' }}}}"], ids=["plain", "conditional"]
)
def test_many_processes_run_every_node_once_and_agree_on_the_end(
    store_processes: StoreProcesses, condition: str | None
) -> None:
    (run_id,) = store_processes.make(LAYERED, condition=condition)
    reported = store_processes.race("work", each=True, run_id=run_id)
    done = {f"w{number}": names for number, (names, _) in enumerate(reported)}
    assert Counter(name for names in done.values() for name in names) == Counter(
        dict.fromkeys(LAYERED, 1)
    )
    ends = [end for _, end in reported]
    assert all(end == ends[0] for end in ends)
    status, outputs = ends[0]
    assert status == "COMPLETED"
    assert outputs == {name: who for who, names in done.items() for name in names}


@in_a_file
def test_one_key_creates_one_run_and_every_process_finds_it(
    store_processes: StoreProcesses,
) -> None:
    keys = 25
    store_processes.make(WIDE)
    reported = store_processes.race("create", each=True, keys=keys)
    made = {run_id.partition("-")[2]: run_id for ours, _ in reported for run_id in ours}
    assert sum(len(ours) for ours, _ in reported) == len(made) == keys
    for _, found in reported:
        assert all(made[number] == run_id for number, run_id in found.items())


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_concurrent_cancels_or_retries_of_one_run_take_effect_once(
    store_processes: StoreProcesses, command: str
) -> None:
    run_ids = store_processes.make({"a": [], "b": ["a"]}, runs=25)
    reported = store_processes.race("order", run_ids=run_ids, command="cancel")
    if command == "retry":
        reported = store_processes.race("order", run_ids=run_ids, command="retry")
    assert Counter(run_id for one in reported for run_id in one) == Counter(
        dict.fromkeys(run_ids, 1)
    )


@in_a_file
def test_runs_without_an_owner_are_taken_once_and_every_node_is_executed_once(
    store_processes: StoreProcesses,
) -> None:
    run_ids = store_processes.make({"a": [], "b": ["a"], "c": ["a"]}, runs=25)
    reported = store_processes.race("adopt", run_ids=run_ids)
    assert Counter(run_id for taken, _ in reported for run_id in taken) == Counter(
        dict.fromkeys(run_ids, 1)
    )
    executed = Counter(line for _, lines in reported for line in lines)
    assert executed == Counter({f"{run_id} {node}": 1 for run_id in run_ids for node in "abc"})


@in_a_file
def test_many_processes_can_open_a_new_file_at_once(store_processes: StoreProcesses) -> None:
    attempts = 8
    children = [
        store_processes.start("open_new", attempts=attempts)
        for _ in range(store_processes.processes)
    ]
    for number in range(attempts):
        for child in children:
            child.hear(number + 1)
        (store_processes.folder / f"start-{number}").touch()
    for child in children:
        assert child.done() == attempts - 1


LAYERS = {
    f"n{layer}_{i}": [f"n{layer - 1}_{i}", f"n{layer - 1}_{(i + 1) % 3}"] if layer else []
    for layer in range(4)
    for i in range(3)
}
OFTEN = {"max_retries": 2, "retry": {"base_delay_seconds": 0.001}}


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_concurrency": 2}, {"on_failure": "continue", "max_concurrency": 4}],
    ids=["plain", "narrow", "continue"],
)
def test_concurrent_decisions_equal_a_sequential_order(
    store_processes: StoreProcesses, fields: dict[str, Any]
) -> None:
    fields = {**fields, "each": OFTEN}
    run_ids = store_processes.make(LAYERS, runs=4, **fields)
    reported = store_processes.race("hammer", each=True, run_ids=run_ids, rounds=100)
    compiled = graph(LAYERS, **fields)
    kinds: Counter[str] = Counter()
    for run_id in run_ids:
        tellers = [
            [ReportedStep.read(line) for line in lines[:-1] if line[1][0] == run_id]
            for lines in reported
        ]
        run, log = asyncio.run(store_processes.look(run_id))
        replayed_run, events = retell(Submit(run_id, compiled, {}), log, tellers)
        assert events == log
        assert plain(run) == plain(replayed_run)
        check_run(run)
        kinds.update(event.type for event in log)
    missing = {"node.lost", "node.parked", "node.retrying", "run.retried"} - kinds.keys()
    assert not missing, "a crowd that meets nothing proves nothing"
