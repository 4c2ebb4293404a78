"""The document pipeline beside its targets: how many documents an hour, and what bounds it.

Three times over Redis, with `dovetail orchestrator` and `dovetail worker --handlers
dovetail.documents` as anybody starts them, against an endpoint of our own that takes 3 s a call;
the log of that endpoint says how many calls were made, and when. Once embedded, with no model and
no limit: what the pipeline itself can do. By itself,

    .venv/bin/python bench/documents.py [--quick] [--only "2 × 16"]

`--quick` is for trying it: so few documents that the figures say little.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from apart import Job, SeparateProcess
from burden import resident
from document_files import make
from durable import sync_seconds
from fleet import Used, cpu_seconds, private_redis, server_module, services, used

TAG = "gemini_api"
MODEL_SECONDS = 3.0
LIMIT = 10.0
"""Calls a second, for all workers together: the default of a tag that is not configured."""
HOUR = 3600.0
START_SECONDS = 60.0
POLL_SECONDS = 0.05
MILLI = 1e3


@dataclass(frozen=True)
class WorkerSetup:
    """Workers over Redis, and what they must reach."""

    workers: int
    slots: int
    """Of each worker: how many nodes it runs at once."""
    least_an_hour: float

    @property
    def name(self) -> str:
        return f"{self.workers} × {self.slots}"

    @property
    def all_slots(self) -> int:
        return self.workers * self.slots

    @property
    def most_a_second(self) -> float:
        """With a model that takes its time, and nothing else that takes any."""
        return min(LIMIT, self.all_slots / MODEL_SECONDS)


CREWS = [
    WorkerSetup(1, 4, least_an_hour=4_700),
    WorkerSetup(2, 4, least_an_hour=9_400),
    WorkerSetup(2, 16, least_an_hour=0.98 * LIMIT * HOUR),
]
EMBEDDED = "embedded"
LEAST_A_SECOND = 100.0
WINDOWS = (1.0, 10.0)
LATE = {"starts": 1, "calls": 2}
"""How many a stretch may have above the limit, beside the first, which does not wait. A start is
written down a moment after its token, and some documents are read sooner than others, so the way
from there to the endpoint is not always the same."""
MEASURED_SECONDS, QUICK_SECONDS = 170.0, 15.0
"""How long each crew is kept busy."""
DOCUMENTS, FEW_DOCUMENTS = 3_000, 300
"""Those of the embedded part."""
PARTS = 200
"""Documents with which each step is timed alone."""


# --- over Redis --------------------------------------------------------------------------------


def over_redis(crew: WorkerSetup, folder: Path, seconds: float) -> dict[str, Any]:
    """One batch that keeps the crew busy for so long."""
    stub_module = server_module("llm_stub")
    count = round(crew.most_a_second * seconds) + crew.all_slots
    files = make(folder / "in", count)
    with private_redis() as redis, stub_module.LlmStub(delay=MODEL_SECONDS) as llm:
        environment = {
            **llm.environment,
            "DOVETAIL_REDIS_URL": redis.url,
            "DOVETAIL_DOCUMENTS_OUT": str(folder / "out"),
            "DOVETAIL_DOCUMENTS_ROOTS": str(folder),
        }
        words = ["--handlers", "dovetail.documents", "--concurrency", str(crew.slots)]
        with services(
            orchestrator=[["-m", "dovetail", "orchestrator"]],
            worker=[["-m", "dovetail", "worker", *words]] * crew.workers,
            environment=environment,
        ) as pids:
            _await_workers(redis, crew.workers)
            before = used(redis, pids | {"model": [llm.pid]})
            done = asyncio.run(_batch(redis.url, _items(files, folder / "out", "model:stub")))
            spent = used(redis, pids | {"model": [llm.pid]}) - before
        calls = llm.calls()
    clock = time.time() - time.monotonic()
    begins = [clock + call.began for call in calls]
    found = pace(done.began, begins, done.ended, crew.all_slots)
    # The first calls wait for what a new worker has to load, and then come together.
    steady = [begin for begin in begins if begin >= done.began + found["ramp_up_seconds"]]
    return {
        **found,
        "documents": count,
        "calls": len(calls),
        "failed_calls": sum(call.status != 200 for call in calls),
        "most_starts_within": most(done.extracting),
        "most_calls_within": most(steady),
        "most_calls_within_at_first": most(begins),
        "most_calls_at_once": overlapping(calls),
        "node_seconds": done.node_seconds,
        "cpu_seconds_per_document": per(count, spent),
        "an_hour": found["steady_per_second"] * HOUR,
        "of_what_is_possible": found["steady_per_second"] / crew.most_a_second,
    }


def most(times: Sequence[float]) -> dict[str, int]:
    """By a number of seconds, how many of these lie in any stretch of so many."""
    return {
        f"{within:g}": server_module("llm_stub").most_within(times, within) for within in WINDOWS
    }


def _await_workers(redis: Any, count: int) -> None:
    """Until so many have said what they can do."""
    give_up = time.monotonic() + START_SECONDS
    while int(redis.ask("HLEN", "wf:workers")) < count:
        if time.monotonic() > give_up:
            sys.exit(f"no {count} workers within {START_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def _items(files: Sequence[Path], out: Path, extractor: str) -> list[dict[str, str]]:
    """What each run is given, as `dovetail documents process` gives it."""
    from dovetail.documents.extraction import content_hash
    from dovetail.documents.files import allow, document_id

    allow(out, *{path.parent for path in files})
    return [
        {
            "document_id": document_id(str(path)),
            "file_path": str(path),
            "out": str(out),
            "sha256": content_hash(path),
            "extractor": extractor,
        }
        for path in files
    ]


@dataclass(frozen=True)
class Done:
    """A batch that has ended, by the clock of the machine."""

    began: float
    ended: float
    first_end: float
    extracting: list[float]
    """When each extract began, in order: what the limit counts."""
    node_seconds: dict[str, float]
    """Of each node, on average."""


async def _batch(where: str, items: list[dict[str, str]], **settings: Any) -> Done:
    from dovetail import Dovetail
    from dovetail.documents import PIPELINE

    async with Dovetail(where, handlers="dovetail.documents", **settings) as dt:
        await dt.register(PIPELINE)
        began = time.time()
        batch = await dt.batch("document_processing", items)
        await dt.wait_batch(batch.batch_id)
        listed, cursor = [], None
        while True:
            page = await dt.list_runs(batch=batch.batch_id, limit=1000, cursor=cursor)
            listed += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        runs = [await dt.get_run(run.run_id) for run in listed]
    wrong = [run for run in runs if run.status != "COMPLETED"]
    if wrong or len(runs) != len(items):
        first = wrong[0].error if wrong else None
        raise RuntimeError(f"{len(runs)} of {len(items)} runs, {len(wrong)} failed: {first}")
    ends = [_at(run.finished_at) for run in runs]
    nodes = {
        name: sum(run.nodes[name].duration or 0.0 for run in runs) / len(runs)
        for name in runs[0].nodes
    }
    extracting = sorted(_at(run.nodes["extract"].started_at) for run in runs)
    return Done(began, max(ends), min(ends), extracting, nodes)


def _at(time_of_api: str) -> float:
    return datetime.fromisoformat(time_of_api).timestamp()


def pace(began: float, starts: Sequence[float], ended: float, slots: int) -> dict[str, float]:
    """How fast calls of the model began once all slots were busy, and as long as they were.

    Calls, because documents that have ended would be counted too well while a backlog of their
    small nodes drains; what was left of that when the last call began is in the tail. Slots that
    are in step begin together, so the stretch is a whole number of rounds.
    """
    first = min(slots, len(starts) // 4)
    last = first + (len(starts) - 1 - first) // slots * slots
    return {
        "steady_per_second": (last - first) / (starts[last] - starts[first]),
        "steady_documents": last - first,
        "steady_seconds": starts[last] - starts[first],
        "ramp_up_seconds": starts[first] - began,
        "tail_seconds": ended - starts[last],
        "all_per_second": len(starts) / (ended - began),
    }


def overlapping(calls: Sequence[Any]) -> int:
    """The largest number of calls that were under way together."""
    moves = [(call.began, 1) for call in calls]
    moves += [(call.ended, -1) for call in calls if call.ended is not None]
    now = most = 0
    for _, change in sorted(moves):
        now += change
        most = max(most, now)
    return most


def per(count: int, spent: Used) -> dict[str, float]:
    return {kind: seconds / count for kind, seconds in spent.cpu.items()}


# --- embedded ----------------------------------------------------------------------------------


@contextmanager
def embedded(folder: str, count: int) -> Iterator[Job]:
    """One process, its default settings but for the limit, and rules instead of a model."""
    here = Path(folder)
    for name in [name for name in os.environ if name.startswith("DOVETAIL_")]:
        del os.environ[name]
    few, many = make(here / "few", 50), make(here / "in", count)

    def run(name: str, files: list[Path]) -> dict[str, Any]:
        out = here / f"out-{name}"
        items = _items(files, out, "rules-1")
        own, readers = time.process_time(), _of_children()
        limits = {TAG: {"rate_per_second": 1e6, "burst": 1_000_000}}
        done = asyncio.run(_batch(str(here / f"{name}.db"), items, rate_limits=limits))
        return {
            "documents": len(files),
            "seconds": done.ended - done.began,
            "per_second": len(files) / (done.ended - done.began),
            "first_end_seconds": done.first_end - done.began,
            "node_seconds": done.node_seconds,
            "cpu_seconds_per_document": {
                "engine and steps": (time.process_time() - own) / len(files),
                "processes that read": (_of_children() - readers) / len(files),
            },
            "most_bytes": resident("VmHWM"),
        }

    yield Job(
        {},
        {
            "warm up": lambda: run("few", few),
            "run": lambda: run("many", many),
            "parts": lambda: asyncio.run(_parts(_items(many[:PARTS], here / "parts", "rules-1"))),
        },
    )


def _of_children() -> float:
    """CPU seconds of the processes that this one has started, and that still run."""
    threads = Path("/proc/self/task").iterdir()
    children = ""
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            children += f"{(thread / 'children').read_text()} "
    return sum(map(cpu_seconds, map(int, children.split())))


async def _parts(items: list[dict[str, str]]) -> dict[str, float]:
    """CPU seconds of each step alone, without an engine."""
    from dovetail import Context, documents

    def context(name: str, item: dict[str, str], inputs: dict[str, Any]) -> Context:
        return Context(run_id=item["document_id"], node_id=name, params=item, inputs=inputs)

    taken = dict.fromkeys(
        ("extract", "save_parquet", "save_json", "record_metrics", "create_review"), 0.0
    )
    for item in items:
        outputs: dict[str, Any] = {}
        for name in taken:
            config = {"extracted": outputs.get("extract")}
            if name == "create_review":
                config |= {"parquet": outputs["save_parquet"], "json": outputs["save_json"]}
            began = time.process_time()
            answer = getattr(documents, name)(config, context(name, item, outputs))
            outputs[name] = await answer if inspect.isawaitable(answer) else answer
            taken[name] += time.process_time() - began
    return {name: seconds / len(items) for name, seconds in taken.items()}


def by_command(folder: Path, count: int) -> dict[str, float]:
    """The same as people have it, with whatever the command does beside it."""
    make(folder / "in", count)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")
    }
    command = [sys.executable, "-m", "dovetail", "documents", "process", "in", "--out", "out"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"dovetail documents process: {done.stderr[-1000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "per_second": count / seconds, "cpu_seconds": cpu / count}


# --- the report --------------------------------------------------------------------------------

Judge = Callable[[str, float, str, bool], dict[str, Any]]
Say = Callable[[str], None]


def measure(folder: Path, say: Say, *, quick: bool = False, only: str = "") -> dict[str, Any]:
    """What each crew and the embedded engine reached; `folder` is on a disk that syncs."""
    found: dict[str, Any] = {}
    seconds = QUICK_SECONDS if quick else MEASURED_SECONDS
    for number, crew in enumerate(CREWS):
        if only in ("", crew.name):
            say(
                f"… documents, {crew.name}: {seconds:g} s with a model that takes {MODEL_SECONDS:g}"
            )
            found[crew.name] = over_redis(crew, folder / str(number), seconds)
    if only in ("", EMBEDDED):
        count = FEW_DOCUMENTS if quick else DOCUMENTS
        say(f"… {count:,} documents, embedded")
        with SeparateProcess(
            "documents:embedded", folder=str(folder / EMBEDDED), count=count
        ) as job:
            job.call("warm up")
            found[EMBEDDED] = {
                **job.call("run").value,
                "parts": job.call("parts").value,
                "command": by_command(folder / "command", count),
                "sync_seconds": sync_seconds(folder),
            }
    return found


def verdicts(found: dict[str, Any], judge: Judge) -> list[dict[str, Any]]:
    reported = []
    for crew in CREWS:
        if crew.name not in found:
            continue
        row, what = found[crew.name], f"documents, {crew.name}"
        an_hour, least = row["an_hour"], crew.least_an_hour
        title = f"{what}, a model of {MODEL_SECONDS:g} s: documents an hour"
        reported.append(judge(title, an_hour, f"at least {least:,.0f}", an_hour >= least))
        calls = row["calls"]
        same = calls == row["documents"]
        title = f"{what}: calls of the model"
        reported.append(judge(title, calls, f"exactly {row['documents']}", same))
        for thing, late in LATE.items():
            for within, number in row[f"most_{thing}_within"].items():
                allowed = LIMIT * float(within) + 1 + late
                title = f"{what}: most {thing} in any {within} s, all workers together"
                reported.append(judge(title, number, f"at most {allowed:g}", number <= allowed))
    if EMBEDDED in found:
        reached = found[EMBEDDED]["per_second"]
        title = "documents, embedded, no model, no limit: documents a second"
        wanted = f"at least {LEAST_A_SECOND:g}"
        reported.append(judge(title, reached, wanted, reached >= LEAST_A_SECOND))
    return reported


def table(found: dict[str, Any]) -> str:
    return "\n".join(
        line
        for name, row in found.items()
        for line in (_lines_of_embedded(row) if name == EMBEDDED else _lines_of_workers(name, row))
    )


def _lines_of_workers(name: str, row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"documents, {name} over Redis: {row['an_hour']:,.0f} an hour,"
        f" {row['of_what_is_possible']:.1%} of what slots and limit allow"
    )
    yield (
        f"  steady: {row['steady_documents']:,} documents in {row['steady_seconds']:.1f} s;"
        f" ramp-up {row['ramp_up_seconds']:.1f} s, tail {row['tail_seconds']:.1f} s;"
        f" all {row['documents']:,} with both: {row['all_per_second'] * HOUR:,.0f} an hour"
    )
    yield (
        f"  {row['calls']} calls, {row['failed_calls']} failed, at most"
        f" {row['most_calls_at_once']} at once; most in any second:"
        f" {row['most_starts_within']['1']} starts, {row['most_calls_within']['1']} calls,"
        f" {row['most_calls_within_at_first']['1']} with the ramp-up"
    )
    yield f"  CPU ms a document: {_milliseconds(row['cpu_seconds_per_document'])}"
    yield f"  a node takes, ms: {_milliseconds(row['node_seconds'])}"


def _lines_of_embedded(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"documents, embedded: {row['per_second']:,.1f} a second; {row['documents']:,} in"
        f" {row['seconds']:.1f} s, the first after {row['first_end_seconds']:.1f} s"
    )
    yield (
        f"  CPU ms a document: {_milliseconds(row['cpu_seconds_per_document'])};"
        f" the steps alone, without an engine: {_milliseconds(row['parts'])}"
    )
    command = row["command"]
    yield (
        f"  `dovetail documents process`, from its start to its end: {command['seconds']:.1f} s,"
        f" {command['per_second']:.1f} a second, {command['cpu_seconds'] * MILLI:.1f} ms CPU each"
    )
    yield (
        f"  memory: at most {row['most_bytes'] / 1e6:.0f} MB;"
        f" a sync here: {row['sync_seconds'] * MILLI:.2f} ms"
    )
    yield f"  a node takes, ms: {_milliseconds(row['node_seconds'])}"


def _milliseconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {taken * MILLI:.1f}" for name, taken in seconds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few documents, to try it")
    names = [*(crew.name for crew in CREWS), EMBEDDED]
    parser.add_argument("--only", choices=names, default="")
    parser.add_argument("--json", action="store_true", help="numbers instead of sentences")
    options = parser.parse_args()
    from run import scratch, shown, verdict

    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    with scratch() as folder:
        found = measure(folder, say, quick=options.quick, only=options.only)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(table(found), *map(shown, verdicts(found, verdict)), sep="\n")


if __name__ == "__main__":
    main()
