"""`dovetail batches list|show`: what is known of batches."""

from __future__ import annotations

import time
from typing import Any

from dovetail.cli import output as streams
from dovetail.cli.board import LONGEST_ID
from dovetail.cli.output import print_json
from dovetail.cli.summary import status_piece
from dovetail.cli.target import ask
from dovetail.cli.text import Line, age, clip, counted, plain, table
from dovetail.cli.waiting import SHORT_ID
from dovetail.core.errors import NotFound
from dovetail.core.states import RunStatus
from dovetail.engine.api import EngineApi


async def batch_meant(commands: EngineApi, beginning: str | None) -> str:
    """The id of the batch that begins so; without one, of the newest. `NotFound`, `Conflict`."""
    if beginning is not None:
        return await commands.find_batch(beginning)
    newest = (await commands.list_batches(limit=1))["items"]
    if not newest:
        raise NotFound("no batch here yet")
    return str(newest[0]["batch_id"])


def list_batches(limit: int, cursor: str | None, *, as_json: bool) -> None:
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
    """One word for all its runs: the worst of them, once all have ended."""
    if batch["finished_at"] is None:
        return RunStatus.RUNNING.value
    for status in (RunStatus.FAILED, RunStatus.CANCELLED):
        if batch["counts"].get(status.value):
            return status.value
    return RunStatus.COMPLETED.value


def _counts(batch: dict[str, Any]) -> str:
    told = [f"{count:,} {status.lower()}" for status, count in batch["counts"].items()]
    missing = batch["count"] - sum(batch["counts"].values())
    if missing > 0:
        told.append(f"{missing:,} not made yet")
    return f"{batch['count']:,}: {', '.join(told)}"


def show_batch(beginning: str | None, limit: int, cursor: str | None, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any]:
        batch_id = await batch_meant(commands, beginning)
        return await commands.get_batch(batch_id, limit=limit, cursor=cursor)

    batch = ask(question)
    if as_json:
        print_json(batch)
        return
    runs = counted(batch["count"], "run")
    streams.say(
        [
            status_piece(_status(batch)),
            (f" batch {batch['batch_id'][:SHORT_ID]} of {plain(batch['workflow'])}, {runs}", ""),
        ]
    )
    streams.say([(_counts(batch), "dim")])
    head: Line = [(name, "dim") for name in ("ITEM", "RUN", "STATUS")]
    rows: list[Line] = [
        [(str(run["index"]), ""), (run["run_id"][:SHORT_ID], "bold"), status_piece(run["status"])]
        for run in batch["runs"]
    ]
    for line in table([head, *rows], streams.room()):
        streams.say(line)
    if batch["next_cursor"]:
        streams.say([(f"more:  --cursor {batch['next_cursor']}", "dim")])
