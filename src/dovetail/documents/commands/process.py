"""`dovetail documents process` and `stats`: documents as runs, one each, and how fast that went.

A run is known by the content that it is about. So the same command line again finds what an
earlier process has left: what is done is not run, an interrupted run is taken over, a failed one is
tried again.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dovetail.cli import output as streams
from dovetail.cli.files import File
from dovetail.cli.interruptible import Stopping, StopRequest, cancel_tasks, run_interruptible
from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import FAILED as EXIT_FAILED
from dovetail.cli.output import (
    InvalidInput,
    document_if,
    headed,
    json_bytes,
    print_lines,
    print_reply,
)
from dovetail.cli.run_pool import (
    MAX_SHARED_RUNS,
    MIN_RUNS_FOR_ESTIMATE,
    RUNS_PER_SLOT,
    BatchCounts,
    RunPool,
    cancel_from_thread,
    progress_of,
    speed_words,
)
from dovetail.cli.summary import command, error_words, status_piece, typed_again
from dovetail.cli.target import drivers, is_shared, open_engine, open_reader, target_settings
from dovetail.cli.text import Line, bare, clip, countdown, counted, duration, listed, plain, table
from dovetail.cli.unblocked import write_last_words
from dovetail.core.errors import (
    Conflict,
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    PermanentError,
)
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.documents import PAGES, PIPELINE, ROUTED
from dovetail.documents.commands import Out, folder_of, typed_out
from dovetail.documents.commands.reviews import HEAD, SURE, document_row, warnings_in
from dovetail.documents.files import (
    OUT_VARIABLE,
    Findings,
    SourceDocument,
    allow,
    find_documents,
    name_problem,
    source_document,
)
from dovetail.documents.metrics import (
    MAX_P95_SECONDS,
    MIN_SUCCESS,
    Measurement,
    ServiceLevel,
    Statistics,
    run_ended,
    service_levels,
    settle_ended,
    statistics_of,
)
from dovetail.documents.reviews import Review, Reviews, extraction_of, open_reviews

if TYPE_CHECKING:
    from dovetail.config import Settings
    from dovetail.core.definition.validation import Checked
    from dovetail.engine.api import EngineApi
    from dovetail.handlers.registry import Registry

app = declarations()

OCR = "tesseract"
_LIBRARIES = ("pyarrow", "pypdfium2", "lxml")


@app.command()
@on_target
def process(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files, folders with all below them, or 'patterns/*'."),
    ],
    out: Out = None,
    routed: Annotated[
        bool,
        typer.Option("--routed", help="Approve what is sure (0.8) at once, list items apart."),
    ] = False,
    pages: Annotated[
        bool,
        typer.Option("--pages", help="Extract each page of a PDF on its own, then join them."),
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Nodes that run at once; on Redis or a server: documents in flight.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Find the fields of documents and put them up for review.

    They are saved as JSON and Parquet, too. The same command again goes on where it was: what is
    done is not done again. On Redis or a server its workers need --handlers dovetail.documents
    and see the same paths. Exit code: 0 all done, 1 some failed, 2 no such files, 130 cancelled
    by Ctrl-C.
    """
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs

    if routed and pages:
        raise InvalidInput("--routed and --pages are two workflows: choose one of them")
    settings = target_settings()
    shared = is_shared(settings)
    if concurrency is not None and not shared:
        settings = settings.model_copy(update={"concurrency": concurrency})
    folder = folder_of(out)
    # Whether images can be read is known here only of this machine.
    found = find_documents(paths, folder, images=shared or shutil.which(OCR) is not None)
    allow(*found.named)
    if not shared:
        _check_folder(folder)
        _check_libraries()
    work = Work(
        files=found.files,
        out=folder,
        definition=_definition(settings, ROUTED if routed else PAGES if pages else PIPELINE),
        extractor=_extractor(settings, pages=pages),
        routed=routed,
        pages=pages,
        in_flight=concurrency if shared else None,
    )
    with document_if(as_json) as write:
        registry = load_registry(settings, ["dovetail.documents"])
        show_logs(settings)
        reviews = open_reviews(folder)
        runs = DocumentRuns(settings, registry, work, reviews, quiet=as_json)

        def print_end(runs: DocumentRuns) -> None:
            if write is not None:
                write(json_bytes(document(runs, reviews)))
                if runs.unfinished:
                    streams.complain(going_on(runs))  # which is not in the document
                return
            print_lines(ending(runs, reviews, typed_out(out)))

        if not as_json:
            print_lines(beginning(runs, found))
            sys.stdout.flush()
        return runs.run(print_end)


def _extractor(settings: Settings, *, pages: bool) -> str:
    """The name of the extractor; empty where only the workers know it."""
    from dovetail.documents.extraction import BY_PAGES, extractor_name
    from dovetail.documents.reading import max_bytes, max_pages

    try:
        max_bytes(), max_pages()  # an invalid setting is an error before any run is made
        if is_shared(settings) and settings.llm_base_url is None:
            return ""
        return f"{extractor_name(settings)}{BY_PAGES if pages else ''}"
    except PermanentError as error:
        raise InvalidInput(str(error)) from None


def _definition(settings: Settings, path: Path) -> dict[str, Any]:
    """The workflow. Without a language model no node needs a rate limit."""
    from dovetail.wiring.embedded import definition_limits

    file = File(str(path), definition_limits(settings))
    definition: dict[str, Any] = file.parse().data
    if not is_shared(settings) and settings.llm_base_url is None:
        definition = copy.deepcopy(definition)
        for node in definition["nodes"]:
            node.pop("resource_tag", None)
    return definition


def _check_folder(folder: Path) -> None:
    """A file in its place would fail every document, one after the other."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.is_file():
            raise InvalidInput(
                f"{folder}: {place} is a file; --out or {OUT_VARIABLE} names a folder"
            )


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"documents need {', '.join(missing)}, not installed here: "
            "pip install 'dovetail[documents]'"
        )


@app.command()
@on_target
def stats(
    out: Out = None,
    target: Annotated[float, typer.Option(metavar="N", min=0, help="Documents an hour.")] = 5000,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a figure misses its limit.")
    ] = False,
    p95: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds that 95 % may take at most.")
    ] = MAX_P95_SECONDS,
    success: Annotated[
        float, typer.Option(metavar="P", min=0, max=100, help="Percent that must succeed.")
    ] = 100 * MIN_SUCCESS,
    as_json: AsJson = False,
) -> int:
    """Tell documents an hour, how long they took, how well it went.

    With --check the exit code is 1 if the speed, the 95th percentile or the share of successes
    misses its limit, or if nothing was measured.

    A document counts by how its run ended. Where that is not known yet, it is asked: on the
    server or Redis that is set, else in the file of runs.
    """
    folder = folder_of(out)
    reviews = open_reviews(folder)
    rows = reviews.measurements()
    if asked := [row for row in rows if row.may_change]:
        try:
            asyncio.run(settle_by_runs(target_settings(), folder, asked))
        except DovetailError as error:
            streams.complain(f"how these runs ended cannot be asked: {plain(str(error))}")
        rows = reviews.measurements()
    measured = statistics_of(rows, target=target)
    data = {"out": str(folder), **measured.as_data()}
    levels = service_levels(measured, max_p95_seconds=p95, min_success=success / 100)
    if check:
        names = ("name", "value", "limit", "ok")
        data["checks"] = [{name: getattr(level, name) for name in names} for level in levels]

    def lines(_: object) -> Iterator[Line | str]:
        yield from _statistics_lines(measured, folder, out)
        yield from _level_lines(levels if check and measured.documents else ())

    print_reply(data, lines, as_json=as_json)
    missed = not measured.documents or any(level.ok is False for level in levels)
    return int(check and missed)


def _level_lines(levels: Sequence[ServiceLevel]) -> Iterator[Line | str]:
    words = {True: ("met", "good"), False: ("missed", "bad"), None: ("too few to say", "dim")}
    for level in levels:
        verdict, style = words[level.ok]
        yield [(f"{level.sentence}: ", ""), (verdict, style)]


def _statistics_lines(measured: Statistics, folder: Path, out: str | None) -> Iterator[Line | str]:
    verdict, *more = measured.sentences()
    if not measured.documents and not measured.unfinished:
        processing = command("documents", "process", "PATH", *typed_out(out))
        yield f"{verdict}: {plain(str(folder))}"
        yield [("process some with:  ", "dim"), (processing, "bold")]
        return
    style = "bold" if measured.met is None else "bold good" if measured.met else "bold wait"
    yield [(verdict, style)]
    yield from more


async def settle_by_runs(settings: Settings, folder: Path, rows: Sequence[Measurement]) -> None:
    """Ask how the runs of these documents ended; a run that is not known here stays as it is."""
    async with open_reader(settings) as commands:
        await settle_ended(commands.get_run, folder, rows)


# --- documents in flight -----------------------------------------------------------------------

COMPLETED, CACHED, FAILED, CANCELLED = "completed", "cached", "failed", "cancelled"
_LISTED = (FAILED, CANCELLED, CACHED)
RECENT = 200
"""The speed is that of so many documents, the last ones."""
_NAMED = 3
"""Files at work that are named; the others are counted."""
_LONGEST_NAME = 40


class DocumentCounts(BatchCounts):
    def __init__(self, total: int, at_work: Mapping[str, object]) -> None:
        """`at_work` has the paths of files that are processed now, the one that has waited
        longest first; it changes meanwhile."""
        super().__init__(total)
        self.counts = Counter(dict.fromkeys((COMPLETED, CACHED, FAILED, CANCELLED), 0))
        self.calls_left = total
        """How many of the remaining documents will call the model. It is an upper bound until each
        of them was looked at."""
        self.calls_per_second: float | None = None
        """The rate limit, where there is something to limit."""
        self.trouble = ""
        """What keeps the one that has waited longest."""
        self.pages: tuple[str, str] | None = None
        """The path of that one, and how many of its pages are done."""
        self._at_work = at_work
        self._ends: deque[float] = deque(maxlen=RECENT)
        """When the last of them ended that were not done before."""

    def add(self, status: str, *, before: bool = False) -> None:
        super().add(status, before=before)
        if not before:
            self._ends.append(self.passed)

    def line(self) -> Line:
        done = self.done
        words = [f"{done:,} of {self.total:,} done"]
        words += [f"{self.counts[state]:,} {state}" for state in _LISTED if self.counts[state]]
        speed = self._speed()
        if speed is not None and done < self.total:
            words += [f"{speed_words(speed)} ({speed * 3600:,.0f}/h)", self._estimate(speed)]
        return [(", ".join(words), "")]

    def picture(self) -> Sequence[Line]:
        lines = [*super().picture()]
        if names := self._names():
            lines.append([(f"  {listed(names, _NAMED)}", "dim")])
        if names and self.trouble:
            lines.append([(f"  {self.trouble}", "wait")])
        return lines

    def standstill(self) -> Line:
        words = bare(super().standstill())
        if names := self._names():
            words += f", at {listed(names, 1)}"
        return [(f"{words}; {self.trouble}" if names and self.trouble else words, "")]

    def _names(self) -> list[str]:
        # Another thread takes files away while this one paints: a list of them is made at once.
        paths = [*self._at_work]
        names = [clip(plain(Path(path).name), _LONGEST_NAME) for path in paths]
        if paths and self.pages is not None and self.pages[0] == paths[0]:
            names[0] += f" ({self.pages[1]})"
        return names

    def summary(self) -> str:
        order = (COMPLETED, CACHED, FAILED, CANCELLED)
        words = [f"{self.counts[state]:,} {state}" for state in order if self.counts[state]]
        return ", ".join(words) or "none done"

    def _speed(self) -> float | None:
        """Of the last ones: what was fast an hour ago says little about the rest."""
        ends = self._ends
        if len(ends) < MIN_RUNS_FOR_ESTIMATE:
            return None
        return (len(ends) - 1) / max(self.passed - ends[0], 0.001)

    def _estimate(self, speed: float) -> str:
        seconds = (self.total - self.done) / speed
        if self.calls_per_second is not None:
            allowed = self.calls_left / self.calls_per_second
            if allowed > seconds:
                return f"about {countdown(allowed)} left: {self.calls_per_second:g}/s are allowed"
        return f"about {countdown(seconds)} left"


EXTRACT, EXTRACT_PAGE = "extract", "extract_page"
PAGES_WORKFLOW = "document_pages"
MODULE = "dovetail.documents"
MAX_ON_SERVER = 100
"""Documents in flight where each that is waited for holds a connection."""
MAX_QUEUED = 10_000
"""Documents that were read ahead and wait for their run: they make the estimate better."""
READ_AT_ONCE = 32
WATCHED_PAGES = 20
"""So many pages that wait are looked at for an error: as many as may run at once."""
CHECK_SECONDS = 2.0
"""Between two checks of the rate limit and of the oldest run, for the view."""


@dataclass(frozen=True)
class Work:
    """The files to process, and how."""

    files: Sequence[str]
    out: Path
    definition: Mapping[str, Any]
    extractor: str
    """Empty where only the workers know it."""
    routed: bool
    pages: bool
    in_flight: int | None
    """So many at once at most, if the command line says so."""

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def tag(self) -> str | None:
        """The rate limit of whatever asks the model."""
        tags = (node.get("resource_tag") for node in self.definition["nodes"])
        return next((str(tag) for tag in tags if tag is not None), None)

    @property
    def handler(self) -> str:
        """A handler that its workers must have."""
        return str(self.definition["nodes"][0]["handler"])

    def params(self, document: SourceDocument) -> dict[str, str]:
        return {
            "document_id": document.id,
            "file_path": document.path,
            "out": str(self.out),
            "sha256": document.sha256,
            "extractor": self.extractor,
        }


@dataclass
class DocumentOutcome:
    """The outcome of one file."""

    place: int
    document: SourceDocument
    state: str
    run_id: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    """What was extracted, if it was; of a document that was done before, what is in its review."""
    error: Mapping[str, Any] | None = None


class Queued(NamedTuple):
    place: int
    document: SourceDocument
    calls: bool
    """Whether it will probably call the model."""


class DocumentRuns:
    def __init__(
        self, settings: Settings, registry: Registry, work: Work, reviews: Reviews, *, quiet: bool
    ) -> None:
        self._settings = settings
        self._registry = registry
        self.work = work
        self._reviews = reviews
        self._quiet = quiet
        self.shared = is_shared(settings)
        self._at_work: dict[str, str | None] = {}
        """The files that slots work on, and their runs once these are made."""
        self._pool: RunPool | None = None
        self._seen: set[str] = set()
        """The contents that will be extracted: of a second file with the same no call is made."""
        self._digest = sha256(repr(work.definition).encode()).hexdigest()
        self.tally = DocumentCounts(len(work.files), self._at_work)
        self.outcomes: list[DocumentOutcome] = []
        self.asked: StopRequest | None = None

    @property
    def left(self) -> int:
        """Files without an outcome."""
        return self.tally.total - self.tally.done

    @property
    def unfinished(self) -> int:
        return self.left + self.tally.counts[CANCELLED]

    def run(self, on_end: Callable[[DocumentRuns], None]) -> int:
        """Process them to the exit code; `on_end` is called when all is over."""

        async def work(stopping: Stopping) -> int:
            async with open_engine(self._settings, self._registry) as commands:
                await self._drive(commands, stopping)
                self.asked = stopping.asked
            self.outcomes.sort(key=lambda outcome: outcome.place)
            on_end(self)
            if self.asked is not None and self.unfinished:
                return self.asked.value
            good = self.tally.counts[COMPLETED] + self.tally.counts[CACHED]
            return 0 if good == self.tally.total else EXIT_FAILED

        def go_on() -> Line | None:
            if self._pool is None or self.shared:
                return None
            return [("then go on with:  ", "dim"), (typed_again(), "bold")]

        patience = self._settings.drain_seconds
        return run_interruptible(work, self._give_up, patience, go_on=go_on)

    # ── driving ──────────────────────────────────────────────────────────────────────────

    async def _drive(self, commands: EngineApi, stopping: Stopping) -> None:
        await commands.learn_handlers()
        checked = commands.validate(self.work.definition)
        await self._say_who_works(commands)
        self._pool = pool = RunPool(commands, stopping)
        window = min(self.tally.total, self.work.in_flight or self._most_in_flight())
        queue: asyncio.Queue[Queued | None] = asyncio.Queue()
        slots = [self._slot(commands, pool, checked, queue, stopping) for _ in range(window)]
        looking = self._look_ahead(queue, window, stopping)
        around = asyncio.create_task(self._look_around(commands))
        try:
            progress = None if self._quiet else progress_of(self.tally)
            await pool.drive([looking, *slots], progress)
        finally:
            await cancel_tasks(around)

    def _most_in_flight(self) -> int:
        if self._settings.server is not None:
            return MAX_ON_SERVER
        return MAX_SHARED_RUNS if self.shared else RUNS_PER_SLOT * self._settings.concurrency

    async def _look_ahead(
        self, queue: asyncio.Queue[Queued | None], slots: int, stopping: Stopping
    ) -> None:
        """Look at each file before its turn: what is done needs none, and the estimate knows."""

        def look_at(paths: Sequence[str]) -> list[SourceDocument]:
            return [self._look(path) for path in paths if stopping.asked is None]

        files = self.work.files
        for first in range(0, len(files), READ_AT_ONCE):
            # Not by a bounded queue: after a stop request no slot takes from it.
            while queue.qsize() >= MAX_QUEUED and stopping.asked is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            found = await asyncio.to_thread(look_at, files[first : first + READ_AT_ONCE])
            if stopping.asked is not None:
                break
            for place, document in enumerate(found, first):
                calls = self._calls_the_model(document)
                self.tally.calls_left -= not calls
                if self._is_settled(document):
                    self._add(_done_before(place, document), before=True)
                else:
                    queue.put_nowait(Queued(place, document, calls))
        for _ in range(slots):
            queue.put_nowait(None)

    def _look(self, path: str) -> SourceDocument:
        work = self.work
        return source_document(path, work.out, self._reviews, work.extractor, by_pages=work.pages)

    def _calls_the_model(self, document: SourceDocument) -> bool:
        calls = not document.is_known and document.sha256 not in self._seen
        if calls and document.sha256:
            self._seen.add(document.sha256)
        return calls

    def _is_settled(self, document: SourceDocument) -> bool:
        """What is up for review without the conditions has not been through them."""
        if document.review is None or not document.is_done:
            return False
        return not self.work.routed or document.review.status == "approved"

    async def _slot(
        self,
        commands: EngineApi,
        pool: RunPool,
        checked: Checked,
        queue: asyncio.Queue[Queued | None],
        stopping: Stopping,
    ) -> None:
        while (entry := await queue.get()) is not None and stopping.asked is None:
            self._at_work[entry.document.path] = None
            try:
                outcome = await self._process(commands, pool, checked, entry)
            finally:
                del self._at_work[entry.document.path]
            if outcome is not None:
                self.tally.calls_left -= entry.calls
                self._add(outcome)

    async def _process(
        self, commands: EngineApi, pool: RunPool, checked: Checked, entry: Queued
    ) -> DocumentOutcome | None:
        """Its outcome; None if another process drives the run to its end."""
        document = entry.document
        if problem := name_problem(document.path):
            return DocumentOutcome(entry.place, document, FAILED, error=problem)
        for turn in count(1):
            run_id, is_new = await self._trigger(commands, checked, document, turn)
            if not is_new:
                before = await commands.get_run(run_id, nodes=False)
                if before["finished_at"] is not None and before["status"] == RunStatus.COMPLETED:
                    # Again: another process may have done it since.
                    again = await asyncio.to_thread(self._look, document.path)
                    if again.is_done:
                        return _done_before(entry.place, again)
                    continue  # what it wrote is gone, or has been overwritten: once more
                if _has_pages_of_two_extractors(before):
                    continue  # a retry keeps these pages, and would fail again
                if before["finished_at"] is not None:
                    with suppress(Conflict):  # another process does the same
                        await commands.retry_run(run_id)
            self._at_work[document.path] = run_id
            run = await pool.follow(run_id, just_made=is_new)
            if run is None:
                return None
            await asyncio.to_thread(self._count, document, run)
            return _outcome(entry, run)
        raise AssertionError("there is always another turn")

    def _count(self, document: SourceDocument, run: Mapping[str, Any]) -> None:
        """Settle the document by how its run ended. Where services process it, its folder may be
        on another machine: nothing is made here then."""
        if self.shared and self._reviews.measured(document.id, run["run_id"]) is None:
            return
        run_ended(self.work.params(document), run["run_id"], run["status"], count=False)

    async def _trigger(
        self, commands: EngineApi, checked: Checked, document: SourceDocument, turn: int
    ) -> tuple[str, bool]:
        """The run of this content, made now or by an earlier process."""
        params = self.work.params(document)
        known = [self._digest, *params.values(), str(turn)]
        key = f"document-{sha256(chr(0).join(known).encode(errors='surrogateescape')).hexdigest()}"
        try:
            accepted = await commands.trigger(checked, params, idempotency_key=key)
        except InvalidParams:
            raise
        except InvalidDefinition as error:
            reasons = "; ".join(problem.message for problem in error.problems)
            raise InvalidInput(
                f"{drivers(self._settings)} cannot run this: {reasons}; "
                f"its workers need --handlers {MODULE}"
            ) from None
        return accepted.run_id, accepted.created

    def _add(self, outcome: DocumentOutcome, *, before: bool = False) -> None:
        self.outcomes.append(outcome)
        self.tally.add(outcome.state, before=before)

    async def _look_around(self, commands: EngineApi) -> None:
        """For the view only: errors here are reported by the slots themselves."""
        while True:
            if self.work.tag is not None:
                limit = await commands.rate_limit(self.work.tag)
                self.tally.calls_per_second = limit["rate_per_second"]
            await asyncio.sleep(CHECK_SECONDS)
            path, oldest = next(iter(self._at_work.items()), ("", None))
            run = None if oldest is None else await commands.get_run(oldest)
            self.tally.trouble = "" if run is None else await trouble_now(commands, run)
            pages = "" if run is None else pages_of(run)
            self.tally.pages = (path, pages) if pages else None

    # ── words ────────────────────────────────────────────────────────────────────────────

    async def _say_who_works(self, commands: EngineApi) -> None:
        served = await commands.served_handlers()
        if served is None or self.work.handler in served:
            return
        worker = f"dovetail worker --handlers {MODULE}"
        streams.complain(
            [
                (f"no worker that is alive has {self.work.handler}; start one with:  ", "wait"),
                (worker, "bold"),
                ("      it must see the same paths", "dim"),
            ]
        )

    def _give_up(self, asked: StopRequest) -> None:
        """In another thread, because this one is stuck."""
        cancels = asked.cancels and not self.shared
        flying = [] if self._pool is None else list(self._pool.in_flight)
        if cancels and cancel_from_thread(self._settings, flying):
            words = "CANCELLED, without waiting for what still runs; go on with:  "
        else:
            words = "handed back as it was; go on with:  "
        write_last_words(f"{words}{typed_again()}\n")


async def trouble_now(commands: EngineApi, run: Mapping[str, Any]) -> str:
    """The node or the page of a run that is tried again, and why."""
    if trouble := trouble_of(run["nodes"]):
        return trouble
    if not any(node["id"] == EXTRACT_PAGE and _waits(node["items"]) for node in run["nodes"]):
        return ""
    run_id, queued = run["run_id"], NodeStatus.QUEUED.value
    page = await commands.node_items(run_id, EXTRACT_PAGE, status=queued, limit=WATCHED_PAGES)
    return trouble_of([{**item, "id": f"page {item['index'] + 1}"} for item in page["items"]])


def _waits(items: Mapping[str, int] | None) -> bool:
    return items is not None and items["pending"] > 0


def trouble_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The first of these nodes that is tried again, and why."""
    for node in nodes:
        if node["error"] is not None and node["status"] in _TRIED_AGAIN:
            words = clip(plain(error_words(node["id"], node["error"])), _LONGEST_TROUBLE)
            return f"{node['id']} is tried again: {words}"
    return ""


def pages_of(run: Mapping[str, Any]) -> str:
    """How many pages of the document have ended; "" before it is split and without `--pages`."""
    items = next((node["items"] for node in run["nodes"] if node["id"] == EXTRACT_PAGE), None)
    if items is None:
        return ""
    return f"{items['completed'] + items['failed']:,} of {counted(items['total'], 'page')}"


_TRIED_AGAIN = (NodeStatus.QUEUED, NodeStatus.RUNNING)
_LONGEST_TROUBLE = 120


def _has_pages_of_two_extractors(run: Mapping[str, Any]) -> bool:
    """Whether `join_pages` has refused the pages: in the pipeline, a retry extracts again."""
    error = run["error"] or {}
    return bool(
        run["workflow"] == PAGES_WORKFLOW
        and (error.get("node"), error.get("type")) == (EXTRACT, "other_extractor")
    )


def _done_before(place: int, document: SourceDocument) -> DocumentOutcome:
    review = document.review
    assert review is not None  # noqa: S101
    found = {**review.fields, "confidence": review.confidence}
    return DocumentOutcome(place, document, CACHED, found=_shown_result(found))


def _outcome(entry: Queued, run: Mapping[str, Any]) -> DocumentOutcome:
    (extract,) = (node for node in run["nodes"] if node["id"] == EXTRACT)
    found = extract["output"] or {}
    state = _STATES[run["status"]]
    # Another run extracted this content first, or extracted it while this one waited.
    if state == COMPLETED and found.get("run_id", run["run_id"]) != run["run_id"]:
        state = CACHED
    error = run["error"] if state == FAILED else None
    return DocumentOutcome(
        entry.place, entry.document, state, run["run_id"], _shown_result(found), error
    )


_STATES = {
    RunStatus.COMPLETED.value: COMPLETED,
    RunStatus.FAILED.value: FAILED,
    RunStatus.CANCELLED.value: CANCELLED,
}
SHOWN = ("type", "vendor", "date", "currency", "total", "confidence")


def _shown_result(found: Mapping[str, Any]) -> dict[str, Any]:
    """Only what is printed at the end: there may be a hundred thousand documents."""
    return {name: found.get(name) for name in SHOWN} if found else {}


MAX_ROWS = 25
MAX_FAILURES = 20
_LONGEST_ERROR = 300
_GOOD = (COMPLETED, CACHED)


def beginning(runs: DocumentRuns, found: Findings) -> Iterator[Line]:
    """What is about to happen, and what will not."""
    work = runs.work
    by = f", by {plain(work.extractor)}" if work.extractor else ""
    documents = counted(len(work.files), "document")
    into = plain(_shown_path(work.out))
    yield [("RUNNING", "bold"), (f" {work.name}, {documents} into {into}{by}", "")]
    if found.images:
        images = counted(found.images, "image")
        yield [(f"{images} left out: reading them needs tesseract, which is not here", "wait")]
    if found.others:
        files = counted(found.others, "file")
        yield [(f"{files} of other kinds left out; one that is named itself is taken", "dim")]


def ending(runs: DocumentRuns, reviews: Reviews, out: Sequence[str]) -> Iterator[Line]:
    """What became of them. `out` are the words that lead other commands to the same folder."""
    good = [outcome for outcome in runs.outcomes if outcome.state in _GOOD]
    shown = good[:MAX_ROWS]
    kept = {outcome.document.id: reviews.get(outcome.document.id) for outcome in shown}
    if shown:
        rows = [_row(outcome, kept[outcome.document.id]) for outcome in shown]
        yield from headed(HEAD, rows)
    if len(good) > len(shown):
        listing = _reviews_command("list", *out)
        yield [(f"and {len(good) - len(shown):,} more:  {listing}", "dim")]
    for outcome in shown:
        yield from _warnings(outcome, kept[outcome.document.id])
    yield from _failures(runs)
    yield _verdict(runs)
    if good:
        folder = plain(_shown_path(runs.work.out))
        yield [("written to:  ", "dim"), (f"{folder}/json, {folder}/parquet", "")]
    yield from _next(runs, reviews, shown, out)


def document(runs: DocumentRuns, reviews: Reviews) -> dict[str, Any]:
    """The same as data, with every document."""
    counts = {state: runs.tally.counts[state] for state in (*_GOOD, FAILED, CANCELLED)}
    return {
        "workflow": runs.work.name,
        "out": str(runs.work.out),
        "extractor": runs.work.extractor or None,
        "count": runs.tally.total,
        "counts": counts,
        "left": runs.left,
        "seconds": round(runs.tally.passed, 3),
        "documents": [
            _described(outcome, reviews.get(outcome.document.id)) for outcome in runs.outcomes
        ],
    }


def _row(outcome: DocumentOutcome, review: Review | None) -> Line:
    found = outcome.found
    state = outcome.state
    if review is not None:
        # As people have corrected it, if they have.
        found = {**review.fields, "confidence": review.confidence}
        state = f"{review.status}, {CACHED}" if state == CACHED else review.status
    return document_row(Path(outcome.document.path).name, found, state)


def _described(outcome: DocumentOutcome, review: Review | None) -> dict[str, Any]:
    described = {
        "document_id": outcome.document.id,
        # Bytes that are no text are escaped.
        "file_path": os.fsencode(outcome.document.path).decode(errors="backslashreplace"),
        "sha256": outcome.document.sha256 or None,
        "state": outcome.state,
        "run_id": outcome.run_id,
        **outcome.found,
        "error": outcome.error,
        "review": None,
        "json_path": None,
        "parquet_path": None,
    }
    if review is not None and outcome.state in _GOOD:
        described |= {
            "review": review.status,
            "json_path": review.json_path,
            "parquet_path": review.parquet_path,
        }
    return described


def _warnings(outcome: DocumentOutcome, review: Review | None) -> Iterator[Line]:
    for warning in warnings_in(extraction_of(review)) if review is not None else ():
        name = plain(Path(outcome.document.path).name)
        yield [("! ", "wait"), (name, "bold"), (f"  {warning}", "wait")]


def _failures(runs: DocumentRuns) -> Iterator[Line]:
    failed = [outcome for outcome in runs.outcomes if outcome.state == FAILED]
    for outcome in failed[:MAX_FAILURES]:
        error = outcome.error or {}
        words = error_words(str(error.get("node", "")), error)
        yield [
            ("✗ ", "bad"),
            (plain(Path(outcome.document.path).name), "bold"),
            (f"  {clip(plain(words), _LONGEST_ERROR)}", "bad"),
        ]
    if len(failed) > MAX_FAILURES:
        listing = command("runs", "list", "--workflow", runs.work.name, "--status", "FAILED")
        yield [(f"and {len(failed) - MAX_FAILURES:,} more failed:  {listing}", "dim")]


def _verdict(runs: DocumentRuns) -> Line:
    tally = runs.tally
    status = "FAILED" if tally.counts[FAILED] else "COMPLETED"
    if runs.unfinished:
        goes_on = runs.asked is StopRequest.HAND_BACK or runs.shared
        status = "RUNNING" if goes_on else "CANCELLED"
    words = tally.summary() + (f", {runs.left:,} left" if runs.left else "")
    documents = counted(tally.total, "document")
    return [status_piece(status), (f" {documents} in {duration(tally.passed)}: {words}", "")]


def _next(
    runs: DocumentRuns, reviews: Reviews, shown: Sequence[DocumentOutcome], out: Sequence[str]
) -> Iterator[Line]:
    if runs.unfinished:
        yield going_on(runs)
        return
    tally = runs.tally
    if tally.counts[FAILED]:
        yield [
            ("fix it, then:  ", "dim"),
            (typed_again(), "bold"),
            (f"      tries {tally.counts[FAILED]:,} again", "dim"),
        ]
    if not shown:
        return
    doubtful = min(shown, key=lambda outcome: outcome.found.get("confidence") or 0.0)
    name = _short_id(doubtful.document.id, reviews)
    proposals = (
        ("next:", ("show", name), "what was found" if _is_sure(doubtful) else "the least sure"),
        ("", ("correct", name, "total=12.50"), "put right, for good"),
        ("", ("list", "--status", "pending"), "to be approved"),
    )
    rows: list[Line] = [
        [(head, "dim"), (_reviews_command(*words, *out), "bold"), (why, "dim")]
        for head, words, why in proposals
    ]
    yield from table(rows)


def going_on(runs: DocumentRuns) -> Line:
    """How to continue with the files without an outcome."""
    again = "go on with:  "
    if runs.shared:
        again = "what was made goes on without this view; the rest with:  "
    elif runs.asked is StopRequest.HAND_BACK:
        again = "handed back; go on with:  "
    return [(again, "dim"), (typed_again(), "bold")]


def _short_id(name: str, reviews: Reviews) -> str:
    """Without the digits at its end, where that is enough."""
    stem = name.rpartition("-")[0]
    return stem if len(reviews.list(prefix=stem, limit=2)) == 1 else name


def _reviews_command(*words: str) -> str:
    return command("documents", "reviews", *words, placed=False)


def _is_sure(outcome: DocumentOutcome) -> bool:
    return (outcome.found.get("confidence") or 0.0) >= SURE


def _shown_path(folder: Path) -> str:
    """Relative to where we are, if it is below."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
