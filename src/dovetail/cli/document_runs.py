"""Documents from their files to the exit code: one run for each, so many of them in flight.

A run is known by the content that it is about. So the same command line again finds what an
earlier process has left: what is done is not run, what was killed is taken over, what failed is
tried again. What it must not know: how files are found, or how the outcome is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.cli import streams
from dovetail.cli.document_tally import CACHED, CANCELLED, COMPLETED, FAILED, DocumentTally
from dovetail.cli.driving import cancelled_from_outside
from dovetail.cli.ending import error_words, typed_again
from dovetail.cli.failures import FAILED as EXIT_FAILED
from dovetail.cli.failures import InvalidInput
from dovetail.cli.interrupts import Ask
from dovetail.cli.lanes import MOST_SHARED, RUNS_PER_SLOT, Lanes
from dovetail.cli.places import drivers, driving, is_shared
from dovetail.cli.stage import Stopping, perform
from dovetail.cli.tally import progress_of
from dovetail.cli.text import clip, plain
from dovetail.config import Settings
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import Conflict, InvalidDefinition, InvalidParams
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.documents.folder import Document, look, name_problem
from dovetail.documents.metrics import run_ended
from dovetail.documents.reviews import Reviews
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry

EXTRACT = "extract"
HANDLER = "documents.extract"
MODULE = "dovetail.documents"
MOST_ON_A_SERVER = 100
"""Documents in flight where each that is waited for holds a connection."""
AHEAD = 10_000
"""Documents that were looked at and wait for their run: what makes the estimate a good one."""
LOOKED_AT_ONCE = 32
LOOK_SECONDS = 2.0
"""How often it looks what the rate limit is by now, and what keeps the oldest one."""


@dataclass(frozen=True)
class Work:
    """What is to be done to which files."""

    files: Sequence[str]
    out: Path
    definition: Mapping[str, Any]
    extractor: str
    """Empty where it is not known who extracts."""
    routed: bool
    in_flight: int | None
    """So many at once at most, where somebody has said so."""

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def tag(self) -> str | None:
        """The rate limit of whatever asks the model."""
        nodes = {node["id"]: node for node in self.definition["nodes"]}
        tag = nodes[EXTRACT].get("resource_tag")
        return None if tag is None else str(tag)

    def params(self, document: Document) -> dict[str, str]:
        return {
            "document_id": document.id,
            "file_path": document.path,
            "out": str(self.out),
            "sha256": document.sha256,
            "extractor": self.extractor,
        }


@dataclass
class Outcome:
    """What became of one file."""

    place: int
    document: Document
    state: str
    run_id: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    """What was extracted, if it was; of a document that was done before, what is in its review."""
    error: Mapping[str, Any] | None = None


class Queued(NamedTuple):
    place: int
    document: Document
    calls: bool
    """It will ask the model, as far as can be told."""


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
        """The files that lanes are at, and their runs once these are made."""
        self._lanes: Lanes | None = None
        self._seen: set[str] = set()
        """The contents that will be extracted: of a second file with the same no call is made."""
        self._digest = sha256(repr(work.definition).encode()).hexdigest()
        self.tally = DocumentTally(len(work.files), self._at_work)
        self.outcomes: list[Outcome] = []
        self.asked: Ask | None = None

    @property
    def left(self) -> int:
        """Files whose end was not seen."""
        return self.tally.total - self.tally.done

    @property
    def unfinished(self) -> int:
        return self.left + self.tally.counts[CANCELLED]

    def run(self, tell: Callable[[DocumentRuns], None]) -> int:
        """Process them to the exit code; `tell` is called once all of that is over."""

        async def work(stopping: Stopping) -> int:
            async with driving(self._settings, self._registry) as commands:
                await self._drive(commands, stopping)
                self.asked = stopping.asked
            self.outcomes.sort(key=lambda outcome: outcome.place)
            tell(self)
            if self.asked is not None and self.unfinished:
                return self.asked.value
            good = self.tally.counts[COMPLETED] + self.tally.counts[CACHED]
            return 0 if good == self.tally.total else EXIT_FAILED

        return perform(work, self._give_up, self._settings.drain_seconds)

    # ── driving ──────────────────────────────────────────────────────────────────────────

    async def _drive(self, commands: Commands, stopping: Stopping) -> None:
        await commands.learn_handlers()
        checked = commands.validate(self.work.definition)
        await self._say_who_works(commands)
        self._lanes = lanes = Lanes(commands, stopping)
        window = min(self.tally.total, self.work.in_flight or self._most_in_flight())
        queue: asyncio.Queue[Queued | None] = asyncio.Queue()
        made = [self._lane(commands, lanes, checked, queue, stopping) for _ in range(window)]
        looking = self._look_ahead(queue, window, stopping)
        around = asyncio.create_task(self._look_around(commands))
        try:
            progress = None if self._quiet else progress_of(self.tally)
            await lanes.drive([looking, *made], progress)
        finally:
            around.cancel()
            await asyncio.gather(around, return_exceptions=True)

    def _most_in_flight(self) -> int:
        if self._settings.server is not None:
            return MOST_ON_A_SERVER
        return MOST_SHARED if self.shared else RUNS_PER_SLOT * self._settings.concurrency

    async def _look_ahead(
        self, queue: asyncio.Queue[Queued | None], lanes: int, stopping: Stopping
    ) -> None:
        """Look at each file before its turn: what is done needs none, and the estimate knows."""

        def look_at(paths: Sequence[str]) -> list[Document]:
            return [self._look(path) for path in paths if stopping.asked is None]

        files = self.work.files
        for first in range(0, len(files), LOOKED_AT_ONCE):
            # By looking, not by a queue that is full: nobody takes from it once it is to stop.
            while queue.qsize() >= AHEAD and stopping.asked is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            found = await asyncio.to_thread(look_at, files[first : first + LOOKED_AT_ONCE])
            if stopping.asked is not None:
                break
            for place, document in enumerate(found, first):
                calls = self._calls_the_model(document)
                self.tally.calls_left -= not calls
                if self._is_settled(document):
                    self._add(_done_before(place, document), before=True)
                else:
                    queue.put_nowait(Queued(place, document, calls))
        for _ in range(lanes):
            queue.put_nowait(None)

    def _look(self, path: str) -> Document:
        return look(path, self.work.out, self._reviews, self.work.extractor)

    def _calls_the_model(self, document: Document) -> bool:
        calls = not document.is_known and document.sha256 not in self._seen
        if calls and document.sha256:
            self._seen.add(document.sha256)
        return calls

    def _is_settled(self, document: Document) -> bool:
        """What is up for review without the conditions has not been through them."""
        if document.review is None or not document.is_done:
            return False
        return not self.work.routed or document.review.status == "approved"

    async def _lane(
        self,
        commands: Commands,
        lanes: Lanes,
        checked: Checked,
        queue: asyncio.Queue[Queued | None],
        stopping: Stopping,
    ) -> None:
        while (entry := await queue.get()) is not None and stopping.asked is None:
            self._at_work[entry.document.path] = None
            try:
                outcome = await self._see(commands, lanes, checked, entry)
            finally:
                del self._at_work[entry.document.path]
            if outcome is not None:
                self.tally.calls_left -= entry.calls
                self._add(outcome)

    async def _see(
        self, commands: Commands, lanes: Lanes, checked: Checked, entry: Queued
    ) -> Outcome | None:
        """What became of it; None if that is to be seen by others."""
        document = entry.document
        if problem := name_problem(document.path):
            return Outcome(entry.place, document, FAILED, error=problem)
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
                if before["finished_at"] is not None:
                    with suppress(Conflict):  # another process does the same
                        await commands.retry(run_id)
            self._at_work[document.path] = run_id
            run = await lanes.see(run_id, just_made=is_new)
            if run is None:
                return None
            await asyncio.to_thread(self._count, document, run)
            return _outcome(entry, commands.view(run))
        raise AssertionError("there is always another turn")

    def _count(self, document: Document, run: RunState) -> None:
        """Settle the document by how its run ended. Where services process it, its folder may be
        on another machine: nothing is made here then."""
        if self.shared and self._reviews.measured(document.id, run.id) is None:
            return
        run_ended(self.work.params(document), run.id, run.status.value, count=False)

    async def _trigger(
        self, commands: Commands, checked: Checked, document: Document, turn: int
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

    def _add(self, outcome: Outcome, *, before: bool = False) -> None:
        self.outcomes.append(outcome)
        self.tally.add(outcome.state, before=before)

    async def _look_around(self, commands: Commands) -> None:
        """For the view only: whatever it cannot learn, the lanes learn themselves."""
        while True:
            if self.work.tag is not None:
                limit = await commands.rate_limit(self.work.tag)
                self.tally.calls_per_second = limit["rate_per_second"]
            await asyncio.sleep(LOOK_SECONDS)
            oldest = next(iter(self._at_work.values()), None)
            told = None if oldest is None else await commands.get_run(oldest)
            self.tally.trouble = "" if told is None else trouble_of(told)

    # ── words ────────────────────────────────────────────────────────────────────────────

    async def _say_who_works(self, commands: Commands) -> None:
        if commands.serving is None or HANDLER in await commands.serving():
            return
        worker = f"dovetail worker --handlers {MODULE}"
        streams.complain(
            [
                (f"no worker that is alive has {HANDLER}; start one with:  ", "wait"),
                (worker, "bold"),
                ("      it must see the same paths", "dim"),
            ]
        )

    def _give_up(self, asked: Ask) -> None:
        """In another thread, because this one is stuck."""
        cancels = asked.cancels and not self.shared
        flying = [] if self._lanes is None else list(self._lanes.flying)
        if cancels and cancelled_from_outside(self._settings, flying):
            words = "CANCELLED, without waiting for what still runs; go on with:  "
        else:
            words = "handed back as it was; go on with:  "
        os.write(2, f"{words}{typed_again()}\n".encode())


def trouble_of(run: Mapping[str, Any]) -> str:
    """What is tried again, and why."""
    for node in run["nodes"]:
        if node["error"] is not None and node["status"] in _TRIED_AGAIN:
            words = clip(plain(error_words(node["id"], node["error"])), _LONGEST_TROUBLE)
            return f"{node['id']} is tried again: {words}"
    return ""


_TRIED_AGAIN = (NodeStatus.QUEUED, NodeStatus.RUNNING)
_LONGEST_TROUBLE = 120


def _done_before(place: int, document: Document) -> Outcome:
    review = document.review
    assert review is not None  # noqa: S101
    found = {**review.fields, "confidence": review.confidence}
    return Outcome(place, document, CACHED, found=_shown(found))


def _outcome(entry: Queued, run: Mapping[str, Any]) -> Outcome:
    (extract,) = (node for node in run["nodes"] if node["id"] == EXTRACT)
    found = extract["output"] or {}
    state = _STATES[run["status"]]
    # Whoever extracted this content first is another run, or it was not even started here.
    if state == COMPLETED and found.get("run_id", run["run_id"]) != run["run_id"]:
        state = CACHED
    error = run["error"] if state == FAILED else None
    return Outcome(entry.place, entry.document, state, run["run_id"], _shown(found), error)


_STATES = {
    RunStatus.COMPLETED.value: COMPLETED,
    RunStatus.FAILED.value: FAILED,
    RunStatus.CANCELLED.value: CANCELLED,
}
SHOWN = ("type", "vendor", "date", "currency", "total", "confidence")


def _shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """As much as is told at the end: there may be a hundred thousand of them."""
    return {name: found.get(name) for name in SHOWN} if found else {}
