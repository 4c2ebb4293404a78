"""`dovetail batch`, one run for each line of a file, and `dovetail batches list|show`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.board import LONGEST_ID
from dovetail.cli.options import AsJson, Cursor, DefinitionFile, Handlers, declarations, on_target
from dovetail.cli.output import (
    INVALID,
    InvalidInput,
    Write,
    document_if,
    headed,
    next_page,
    print_page,
    print_reply,
    warn,
)
from dovetail.cli.summary import SHORT_ID, status_piece
from dovetail.cli.target import ask, load_file
from dovetail.cli.text import Line, age, clip, counted, plain
from dovetail.core.errors import NotFound
from dovetail.core.states import RunStatus

if TYPE_CHECKING:
    from dovetail.cli.batching import ItemsSummary
    from dovetail.core.definition.model import Workflow
    from dovetail.engine.api import EngineApi

QUIET_SECONDS = 2.0
"""A check of the items that takes longer is announced."""

app = declarations()


async def _find_batch(commands: EngineApi, beginning: str | None) -> str:
    """The id that begins so; without a beginning, the newest. Raises `NotFound`, `Conflict`."""
    if beginning is not None:
        return await commands.find_batch(beginning)
    newest = (await commands.list_batches(limit=1))["items"]
    if not newest:
        raise NotFound("no batch here yet")
    return str(newest[0]["batch_id"])


@app.command("list")
@on_target
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many at most.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List batches, the newest first."""
    print_page(
        ask(lambda commands: commands.list_batches(limit=limit, cursor=cursor)),
        ("BATCH", "STATUS", "WORKFLOW", "CREATED", "RUNS"),
        _row,
        empty="no batch here yet; dovetail batch FILE --items ITEMS makes one",
        as_json=as_json,
    )


def _row(batch: dict[str, Any]) -> Line:
    return [
        (batch["batch_id"][:SHORT_ID], "bold"),
        status_piece(_status(batch)),
        (clip(plain(batch["workflow"]), LONGEST_ID), ""),
        (age(batch["created_at"], time.time()), ""),
        (_counts(batch), ""),
    ]


def _status(batch: dict[str, Any]) -> str:
    """One status for the batch: the worst of its runs, once all have ended."""
    if batch["finished_at"] is None:
        return RunStatus.RUNNING.value
    for status in (RunStatus.FAILED, RunStatus.CANCELLED):
        if batch["counts"].get(status.value):
            return status.value
    return RunStatus.COMPLETED.value


def _counts(batch: dict[str, Any]) -> str:
    words = [f"{count:,} {status.lower()}" for status, count in batch["counts"].items()]
    missing = batch["count"] - sum(batch["counts"].values())
    if missing > 0:
        words.append(f"{missing:,} not made yet")
    return f"{batch['count']:,}: {', '.join(words)}"


@app.command()
@on_target
def show(
    batch: Annotated[
        str | None,
        typer.Argument(
            metavar="BATCH", help="A batch's id or its first digits; without it the newest."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many runs at most.")] = 100,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """Show a batch: its counts, and its runs in the order of the items."""

    async def question(commands: EngineApi) -> dict[str, Any]:
        batch_id = await _find_batch(commands, batch)
        return await commands.get_batch(batch_id, limit=limit, cursor=cursor)

    print_reply(ask(question), _lines, as_json=as_json)


def _lines(batch: dict[str, Any]) -> Iterator[Line]:
    runs = counted(batch["count"], "run")
    title = f" batch {batch['batch_id'][:SHORT_ID]} of {plain(batch['workflow'])}, {runs}"
    yield [status_piece(_status(batch)), (title, "")]
    yield [(_counts(batch), "dim")]
    rows: Iterator[Line] = (
        [(str(run["index"]), ""), (run["run_id"][:SHORT_ID], "bold"), status_piece(run["status"])]
        for run in batch["runs"]
    )
    yield from headed(("ITEM", "RUN", "STATUS"), rows)
    yield from next_page(batch)


@app.command()
@on_target
def batch(
    file: DefinitionFile,
    items: Annotated[
        str, typer.Option(metavar="FILE", help="JSON Lines: one object per line, a run's params.")
    ],
    handlers: Handlers = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="What tells this batch from others; default: the content of both files.",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry its runs that failed or were cancelled.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run a workflow once for each line of a file.

    The same command again goes on where it was: nothing is run twice. Exit code: 0 all completed,
    1 some did not, 2 invalid definition or items, 130 cancelled by Ctrl-C.
    """
    with document_if(as_json) as write:
        return _run(file, items, handlers or (), key, retry_failed, write)


def _run(
    path: str,
    items_path: str,
    handlers: Sequence[str],
    key: str | None,
    retry_failed: bool,
    write: Write | None,
) -> int:
    from dovetail.cli.batching import BatchSession, Items, ServerBatch
    from dovetail.telemetry.logs import show_logs

    settings, registry, limits, checked = load_file(path, handlers)
    if checked.workflow is None:
        return INVALID
    items = Items(items_path, checked.workflow.params, limits)
    summary = items.check_all(_sign_of_life(items.name))
    if summary.bad_lines:
        _report(items.name, summary)
        return INVALID
    if not summary.count:
        raise InvalidInput(f"{items.name} has no items: one JSON object per line, each a run")
    for warning in summary.warnings:
        warn(warning)
    if summary.more_warnings:
        warn(f"{items.name}: and {counted(summary.more_warnings, 'more warning')}")
    show_logs(settings)
    key = key or _key(checked.workflow, summary)
    kind = BatchSession if settings.server is None else ServerBatch
    batch = kind(settings, registry, checked, items, summary, key, write, retry_failed=retry_failed)
    return batch.run()


def _key(workflow: Workflow, summary: ItemsSummary) -> str:
    """The same for the same definition and items, so that the same command line continues."""
    # A definition without newer fields keeps the key that earlier versions gave it.
    newer = ("allow_failure", "for_each")
    unused = {name for name in newer if not any(getattr(node, name) for node in workflow.nodes)}
    left_out: dict[str, Any] = {"nodes": {"__all__": unused}}
    if not workflow.notify:
        left_out["notify"] = True
    definition = sha256(workflow.model_dump_json(exclude=left_out).encode()).hexdigest()
    return f"batch-{sha256(f'{definition} {summary.digest}'.encode()).hexdigest()}"


def _report(name: str, summary: ItemsSummary) -> None:
    for problem in summary.problems:
        streams.complain(problem)
    bad = f"{counted(summary.bad_lines, 'line')} of {summary.count:,} cannot be run"
    streams.complain([(f"{name}: ", "bold"), (f"{bad}; nothing was made", "bad")])


def _sign_of_life(name: str) -> Callable[[int], None]:
    """Print once that the lines are checked, if that takes long."""
    say_at = time.monotonic() + QUIET_SECONDS
    printed = False

    def on_line(number: int) -> None:
        nonlocal printed
        if not printed and number % 1000 == 0 and time.monotonic() > say_at:
            printed = True
            streams.complain([(f"checking {name} …", "dim")])
            sys.stderr.flush()

    return on_line
