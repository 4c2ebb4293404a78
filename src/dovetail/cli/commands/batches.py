"""`dovetail batches list|show`: what is known of batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.board import LONGEST_ID
from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import print_json
from dovetail.cli.summary import SHORT_ID, status_piece
from dovetail.cli.target import ask
from dovetail.cli.text import Line, age, clip, counted, plain, table
from dovetail.core.errors import NotFound
from dovetail.core.states import RunStatus

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

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
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List batches, the newest first."""

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.list_batches(limit=limit, cursor=cursor)

    page = ask(question)
    if as_json:
        print_json(page)
        return
    if not page["items"]:
        streams.say("no batch here yet; dovetail batch FILE --items ITEMS makes one")
        return
    now = time.time()
    head: Line = [(name, "dim") for name in ("BATCH", "STATUS", "WORKFLOW", "CREATED", "RUNS")]
    for line in table([head, *(_row(batch, now) for batch in page["items"])], streams.room()):
        streams.say(line)
    if page["next_cursor"]:
        streams.say([(f"more:  --cursor {page['next_cursor']}", "dim")])


def _row(batch: dict[str, Any], now: float) -> Line:
    return [
        (batch["batch_id"][:SHORT_ID], "bold"),
        status_piece(_status(batch)),
        (clip(plain(batch["workflow"]), LONGEST_ID), ""),
        (age(batch["created_at"], now), ""),
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
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a batch: its counts, and its runs in the order of the items."""

    async def question(commands: EngineApi) -> dict[str, Any]:
        batch_id = await _find_batch(commands, batch)
        return await commands.get_batch(batch_id, limit=limit, cursor=cursor)

    found = ask(question)
    if as_json:
        print_json(found)
        return
    runs = counted(found["count"], "run")
    streams.say(
        [
            status_piece(_status(found)),
            (f" batch {found['batch_id'][:SHORT_ID]} of {plain(found['workflow'])}, {runs}", ""),
        ]
    )
    streams.say([(_counts(found), "dim")])
    head: Line = [(name, "dim") for name in ("ITEM", "RUN", "STATUS")]
    rows: list[Line] = [
        [(str(run["index"]), ""), (run["run_id"][:SHORT_ID], "bold"), status_piece(run["status"])]
        for run in found["runs"]
    ]
    for line in table([head, *rows], streams.room()):
        streams.say(line)
    if found["next_cursor"]:
        streams.say([(f"more:  --cursor {found['next_cursor']}", "dim")])
