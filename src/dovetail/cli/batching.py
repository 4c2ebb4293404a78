"""A batch of a command line, from its items (one JSON object per line) to its exit code.

The file is read twice and never held whole: first every line is checked, so that a file with an
error makes no run; then the params are read one by one. The process can be killed at any moment:
the same command line again takes over what no process drives, and makes only the missing runs. On a
server the batch is sent whole, and the process follows its counts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.cli import output as streams
from dovetail.cli.files import STDIN, opened
from dovetail.cli.interruptible import (
    Stopping,
    StopRequest,
    finished_before_stop,
    run_interruptible,
)
from dovetail.cli.output import FAILED, InvalidInput, Write, json_bytes, print_lines
from dovetail.cli.run_pool import (
    MAX_SHARED_RUNS,
    RUNS_PER_SLOT,
    BatchCounts,
    ProgressLine,
    RunPool,
    cancel_from_thread,
    progress_of,
    shown,
)
from dovetail.cli.summary import SHORT_ID, command, error_words, status_piece, typed_again
from dovetail.cli.target import is_shared, open_engine, open_reader
from dovetail.cli.text import Line, clip, counted, duration, plain, table
from dovetail.cli.unblocked import write_last_words
from dovetail.config import Settings
from dovetail.core.definition.params import check_params
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import Checked, DefinitionLimits
from dovetail.core.errors import Conflict, InvalidDefinition, InvalidParams
from dovetail.core.states import FINAL, RunStatus
from dovetail.engine.api import EngineApi
from dovetail.handlers.registry import Registry

MAX_PROBLEMS = 20
"""So many bad lines are printed; the others are counted."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_SHOWN = 60


class Item(NamedTuple):
    number: int
    """In the batch: empty lines do not count."""
    line: int
    params: dict[str, Any]


@dataclass
class ItemsSummary:
    """What the first reading found."""

    count: int = 0
    digest: str = ""
    problems: list[str] = field(default_factory=list)
    """The first ones, as `items.jsonl:3: …`."""
    bad_lines: int = 0
    warnings: list[str] = field(default_factory=list)
    """The first ones, in the same form."""
    more_warnings: int = 0


class Items:
    def __init__(
        self, path: str, schema: Mapping[str, Any] | None, limits: DefinitionLimits
    ) -> None:
        """The limits apply to each line. Raises `InvalidInput` if it cannot be read twice."""
        if path == STDIN:
            raise InvalidInput("items are read twice, so not from stdin; save them to a file first")
        self.name = plain(path)
        self._path = path
        self._schema = schema
        self._limits = limits
        # Before it is opened: opening a pipe waits for its writer.
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise InvalidInput(f"{path} is no regular file; items are read twice")
        with opened(path):
            pass  # it is there, and may be read

    def check_all(self, on_line: Callable[[int], None] = lambda line: None) -> ItemsSummary:
        """Check every line; `on_line` is called for each."""
        found = ItemsSummary()
        digest = sha256()
        for number, raw in self._lines():
            on_line(number)
            digest.update(raw)
            if not raw.strip():
                continue
            found.count += 1
            problems, warnings = self._problems(raw)
            room = MAX_PROBLEMS - len(found.warnings)
            found.warnings += [f"{self.name}:{number}: {w}" for w in warnings[:room]]
            found.more_warnings += max(0, len(warnings) - room)
            if problems:
                found.bad_lines += 1
                room = MAX_PROBLEMS - len(found.problems)
                found.problems += [f"{self.name}:{number}: {p}" for p in problems[:room]]
        found.digest = digest.hexdigest()
        return found

    def __iter__(self) -> Iterator[Item]:
        """Raises `InvalidInput` if the file was changed since it was checked."""
        position = 0
        for number, raw in self._lines():
            if not raw.strip():
                continue
            try:
                params = self._data(raw)
            except InvalidDefinition:
                params = None
            if not isinstance(params, dict):
                raise InvalidInput(f"{self.name}:{number}: was changed while the batch ran")
            yield Item(position, number, params)
            position += 1

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        most = self._limits.max_body_bytes
        with opened(self._path) as stream:
            number = 0
            # With a bound: a file without a line break must not be read into memory.
            while raw := stream.readline(most + 1):
                number += 1
                if len(raw) > most:
                    raise InvalidInput(
                        f"{self.name}:{number}: has more than {most:,} bytes, "
                        "which is all that is allowed in a line"
                    )
                yield number, raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw

    def _data(self, raw: bytes) -> Any:
        """As strictly as params from a file or a request are read."""
        most, depth = self._limits.max_body_bytes, self._limits.max_depth
        return read_text(raw, format="json", max_bytes=most, max_depth=depth).data

    def _problems(self, raw: bytes) -> tuple[list[str], list[str]]:
        """And warnings."""
        try:
            params = self._data(raw)
        except InvalidDefinition as error:
            return [f"{problem.message}: {_shown(raw)}" for problem in error.problems], []
        if not isinstance(params, dict):
            wrong = f'an item is an object with params, as in {{"topic": 1}}, not {_shown(raw)}'
            return [wrong], []
        try:
            _, warnings = check_params(self._schema, params)
        except InvalidParams as error:
            return [f"{problem.path}: {problem.message}" for problem in error.problems], []
        return [], [f"{problem.path}: {problem.message}" for problem in warnings]


def _shown(raw: bytes) -> str:
    text = plain(raw.decode(errors="replace"))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


MAX_FAILURES = 10
RETRY = "--retry-failed"
MAX_RESULTS = 10_000
"""Runs of a batch in a document, so that it fits into memory; `next_cursor` has the rest."""
_PAGE = 1000
_VIEWS_AT_ONCE = 50
_ITEMS_PER_TURN = 500
"""After so many items that need no waiting, the event loop runs other tasks."""

# What an earlier process made of an item, in one byte: there may be millions. 0 is nothing.
_UNFINISHED = 1
_ENDED = {status.value: code for code, status in enumerate(sorted(FINAL), 2)}
_STATUS = {code: status for status, code in _ENDED.items()}


class ItemFailure(NamedTuple):
    line: int
    run_id: str
    why: str


class BatchSession:
    """Makes the runs of a batch and drives them here, or leaves them to services on Redis."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        checked: Checked,
        items: Items,
        summary: ItemsSummary,
        key: str,
        write: Write | None,
        *,
        retry_failed: bool,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._checked = checked
        self._items = items
        self._summary = summary
        self._key = key
        self._write = write
        self._retry_failed = retry_failed
        self._shared = is_shared(settings)
        self._tally = BatchCounts(summary.count)
        self._batch_id = ""
        self._known = bytearray(summary.count)
        self._pool: RunPool | None = None
        self._failures: list[ItemFailure] = []

    def run(self) -> int:
        patience = self._settings.drain_seconds
        return run_interruptible(self._run, self._give_up, patience, go_on=self._go_on)

    def _go_on(self) -> Line | None:
        if not self._batch_id or self._shared:
            return None
        return [("then go on with:  ", "dim"), (typed_again(), "bold")]

    async def _run(self, stopping: Stopping) -> int:
        async with open_engine(self._settings, self._registry) as commands:
            opened = await self._open(commands)
            self._batch_id = opened["batch_id"]
            if not opened["created"]:
                await self._read_earlier(commands)
            self._say_begin()
            progress = progress_of(self._tally) if self._write is None else None
            await self._drive(commands, stopping, progress)
        lines = list(self._ending(stopping.asked))
        if self._write is not None:
            async with open_reader(self._settings) as commands:
                self._write(json_bytes(await self._document(commands)))
            if stopping.asked is not None:
                streams.complain(lines[-1])  # how to continue, which is not in the document
        else:
            print_lines(lines)
        if stopping.asked is not None and self._tally.done < self._summary.count:
            return stopping.asked.value
        completed = self._tally.counts[RunStatus.COMPLETED.value]
        return 0 if completed == self._summary.count else FAILED

    async def _document(self, commands: EngineApi) -> dict[str, Any]:
        """The batch with its runs, each with its result or what failed."""
        batch = await commands.get_batch(self._batch_id, limit=_PAGE)
        while batch["next_cursor"] is not None and len(batch["runs"]) < MAX_RESULTS:
            cursor = batch["next_cursor"]
            page = await commands.get_batch(
                self._batch_id, limit=_PAGE, cursor=cursor, counts=False
            )
            batch["runs"] += page["runs"]
            batch["next_cursor"] = page["next_cursor"]
        for at in range(0, len(batch["runs"]), _VIEWS_AT_ONCE):
            some = batch["runs"][at : at + _VIEWS_AT_ONCE]
            views = (commands.get_run(run["run_id"], nodes=False) for run in some)
            for run, view in zip(some, await asyncio.gather(*views), strict=True):
                run |= {"result": view["result"], "error": view["error"]}
        return batch

    async def _open(self, commands: EngineApi) -> dict[str, Any]:
        return await commands.open_batch(
            self._checked,
            self._summary.count,
            idempotency_key=self._key,
            items=self._summary.digest,
        )

    async def _read_earlier(self, commands: EngineApi) -> None:
        """Read what an earlier process made of this batch."""
        # A run may be FAILED and not finished: a node of it still ran when its process died.
        orphans = set(await commands.orphans())
        cursor: str | None = None
        while True:
            page = await commands.get_batch(
                self._batch_id, limit=_PAGE, cursor=cursor, counts=False
            )
            for run in page["runs"]:
                ended = _ENDED.get(run["status"], _UNFINISHED)
                self._known[run["index"]] = _UNFINISHED if run["run_id"] in orphans else ended
            cursor = page["next_cursor"]
            if cursor is None:
                return

    # ── driving ──────────────────────────────────────────────────────────────────────────

    async def _drive(
        self, commands: EngineApi, stopping: Stopping, progress: ProgressLine | None
    ) -> None:
        items = iter(self._items)
        window = RUNS_PER_SLOT * self._settings.concurrency
        window = min(self._summary.count, MAX_SHARED_RUNS if self._shared else window)
        self._pool = pool = RunPool(commands, stopping)
        slots = [self._slot(commands, pool, items, stopping) for _ in range(window)]
        await pool.drive(slots, progress)

    async def _slot(
        self, commands: EngineApi, pool: RunPool, items: Iterator[Item], stopping: Stopping
    ) -> None:
        """One slot of the pool. All slots take from the same items."""
        quick = 0
        for item in items:
            if stopping.asked is not None:
                return
            left = self._known[item.number]
            if left in _STATUS and not self._wants_retry(_STATUS[left]):
                self._tally.add(_STATUS[left], before=True)
                if (quick := quick + 1) % _ITEMS_PER_TURN == 0:
                    await asyncio.sleep(0)
                if left != _ENDED[RunStatus.COMPLETED] and self._has_room():
                    await self._add_earlier_failure(commands, item)
                continue
            await self._follow_item(commands, pool, item, left)

    def _wants_retry(self, status: str) -> bool:
        return self._retry_failed and status != RunStatus.COMPLETED

    def _has_room(self) -> bool:
        return len(self._failures) < MAX_FAILURES

    async def _follow_item(self, commands: EngineApi, pool: RunPool, item: Item, left: int) -> None:
        place = (self._batch_id, item.number)
        accepted = await commands.trigger(self._checked, item.params, place=place)
        if left in _STATUS:
            with suppress(Conflict):  # another process retries the same batch
                await commands.retry_run(accepted.run_id)
        run = await pool.follow(accepted.run_id, just_made=accepted.created, nodes=False)
        if run is not None:
            self._tally.add(run["status"])
            if run["status"] != RunStatus.COMPLETED and self._has_room():
                self._failures.append(ItemFailure(item.line, run["run_id"], _why(run)))

    async def _add_earlier_failure(self, commands: EngineApi, item: Item) -> None:
        """A failure of an earlier process; the trigger only finds the run."""
        place = (self._batch_id, item.number)
        accepted = await commands.trigger(self._checked, item.params, place=place)
        run = await commands.get_run(accepted.run_id, nodes=False)
        self._failures.append(ItemFailure(item.line, run["run_id"], _why(run)))

    # ── words ────────────────────────────────────────────────────────────────────────────

    def _say_begin(self) -> None:
        if self._write is None:
            assert self._checked.workflow is not None  # noqa: S101
            name = plain(self._checked.workflow.name)
            runs = counted(self._summary.count, "run")
            ended = sum(code in _STATUS for code in self._known)
            before = f", {ended:,} had ended before" if ended else ""
            streams.say(f"RUNNING batch {self._batch_id[:SHORT_ID]} {name}, {runs}{before}")
            sys.stdout.flush()

    def _ending(self, asked: StopRequest | None) -> Iterator[Line]:
        tally = self._tally
        left = self._summary.count - tally.done
        bad = tally.done - tally.counts[RunStatus.COMPLETED.value]
        words = tally.summary() + (f", {left:,} left" if left else "")
        status = "COMPLETED" if not (bad or left) else "FAILED"
        if left:
            goes_on = asked is StopRequest.HAND_BACK or self._shared
            status = "RUNNING" if goes_on else "CANCELLED"
        short = self._batch_id[:SHORT_ID]
        yield [status_piece(status), (f" batch {short} in {duration(tally.passed)}: {words}", "")]
        rows: list[Line] = [
            [
                (f"  {self._items.name}:{failure.line}", ""),
                (failure.run_id[:SHORT_ID], "bold"),
                (failure.why, "bad"),
            ]
            for failure in sorted(self._failures)
        ]
        yield from table(rows, streams.room())
        if bad > len(rows):
            listing = command("runs", "list", "--batch", self._batch_id, "--status", "FAILED")
            yield [(f"  and {bad - len(rows):,} more:  {listing}", "dim")]
        if left and self._shared:
            again = "what was made goes on without this view; make the rest with:  "
            yield [(again, "dim"), (typed_again(), "bold")]
        elif asked is StopRequest.HAND_BACK and left:
            yield [("handed back; go on with:  ", "dim"), (typed_again(), "bold")]
        elif left:
            yield [("go on with:  ", "dim"), (typed_again(RETRY), "bold")]
        elif bad:
            again = f"      reruns {bad:,}, reuses {tally.done - bad:,}"
            yield [("fix it, then:  ", "dim"), (typed_again(RETRY), "bold"), (again, "dim")]

    def _give_up(self, asked: StopRequest) -> None:
        """In another thread, because this one is stuck."""
        cancels = asked.cancels and not self._shared
        in_flight = [] if self._pool is None else list(self._pool.in_flight)
        if cancels and cancel_from_thread(self._settings, in_flight):
            words = "CANCELLED, without waiting for what still runs; go on with:  "
            words += typed_again(RETRY)
        else:
            words = f"handed back as it was; go on with:  {typed_again()}"
        write_last_words(f"{words}\n")


POLL_SECONDS = 0.5
_RUNS_PAGE = 1000
_BAD = (RunStatus.FAILED.value, RunStatus.CANCELLED.value)


class ServerBatch(BatchSession):
    """A batch that a server makes and drives; this process only follows it."""

    async def _open(self, commands: EngineApi) -> dict[str, Any]:
        items = [item.params for item in self._items]
        try:
            return await commands.batch(self._checked, items, idempotency_key=self._key)
        except InvalidDefinition as error:
            reason = "; ".join(problem.message for problem in error.problems)
            if any(problem.code == "too_large" for problem in error.problems):
                reason = f"too much for one batch of a server: {reason}; split the file"
            raise InvalidInput(f"{self._items.name}: {reason}") from None

    async def _drive(
        self, commands: EngineApi, stopping: Stopping, progress: ProgressLine | None
    ) -> None:
        if self._retry_failed and await self._has_failures(commands):
            await commands.retry_batch(self._batch_id)
        async with shown(progress, stopping):
            if await finished_before_stop(self._follow(commands), stopping):
                await self._find_failures(commands)

    async def _has_failures(self, commands: EngineApi) -> bool:
        counts = (await commands.get_batch(self._batch_id, limit=1))["counts"]
        return any(counts.get(status) for status in _BAD)

    async def _follow(self, commands: EngineApi) -> None:
        """Until every run has finished."""
        while True:
            batch = await commands.get_batch(self._batch_id, limit=1)
            for status in FINAL:
                self._tally.counts[status.value] = batch["counts"].get(status.value, 0)
            if batch["finished_at"] is not None:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _find_failures(self, commands: EngineApi) -> None:
        """The first runs that did not complete, each with the line of its item."""
        if not any(self._tally.counts[status] for status in _BAD):
            return
        cursor: str | None = None
        bad: dict[int, str] = {}
        while len(bad) < MAX_FAILURES:
            page = await commands.get_batch(
                self._batch_id, limit=_RUNS_PAGE, cursor=cursor, counts=False
            )
            bad |= {run["index"]: run["run_id"] for run in page["runs"] if run["status"] in _BAD}
            cursor = page["next_cursor"]
            if cursor is None:
                break
        for item in self._items:
            if item.number in bad and self._has_room():
                run = await commands.get_run(bad[item.number], nodes=False)
                self._failures.append(ItemFailure(item.line, run["run_id"], _why(run)))


def _why(run: dict[str, Any]) -> str:
    error = run["error"]
    if error is None:
        return str(run["status"]).lower()
    node = str(error.get("node", ""))
    return clip(plain(f"{node}: {error_words(node, error)}"), 200)
