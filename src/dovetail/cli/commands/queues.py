"""`dovetail queues` and `dovetail dead-letters`: what waits, what runs, and what was refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import headed, print_page, print_reply
from dovetail.cli.target import act_on_each, ask, report_refused
from dovetail.cli.text import Line, counted, plain
from dovetail.core.states import FINAL, RunStatus

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

app = declarations()

Letters = Annotated[
    list[str], typer.Argument(metavar="LETTER…", help="Ids as `dovetail dead-letters list` has.")
]


@app.command()
@on_target
def queues(as_json: AsJson = False) -> None:
    """Show what waits for workers and rate limits, and what runs."""
    print_reply(ask(lambda commands: commands.queues()), _lines, as_json=as_json)


def _lines(found: dict[str, Any]) -> Iterator[Line | str]:
    waiting = [one for one in found["items"] if one["waiting"]]
    if waiting:
        yield from headed(("HANDLER", "WAITING", "WORKERS"), map(_queue, waiting))
    else:
        yield "no node waits for a worker"
    if found["parked"]:
        yield ""
        yield from headed(
            ("RATE LIMIT", "PARKED", "NEXT", "PER SECOND"), map(_parked, found["parked"])
        )
    if found["running"]:
        yield ""
        yield from headed(("RUN", "NODE", "HANDLER", "WORKER"), map(_running, found["running"]))
    if not found["complete"]:
        yield ""
        looked_at = counted(found["looked_at"], "run")
        yield [(f"parked and running nodes are those of the newest {looked_at}", "dim")]


def _queue(one: dict[str, Any]) -> Line:
    workers = (str(one["workers"]), "") if one["workers"] else ("none has it", "bad")
    return [(plain(one["handler"]), "bold"), (f"{one['waiting']:,}", ""), workers]


def _parked(one: dict[str, Any]) -> Line:
    return [
        (plain(one["tag"]), "bold"),
        (f"{one['nodes']:,}", ""),
        (one["next_at"] or "", ""),
        (f"{one['rate_per_second']:g}", ""),
    ]


def _running(one: dict[str, Any]) -> Line:
    item = "" if one["item"] is None else f"[{one['item']}]"
    return [
        (f"{one['run_id'][:6]} {plain(one['workflow'])}", ""),
        (plain(one["node"]) + item, "bold"),
        (plain(one["handler"]), ""),
        (plain(one["worker"] or ""), "dim"),
    ]


@app.command("list")
@on_target
def list_letters(as_json: AsJson = False) -> None:
    """List dead letters, the newest first."""
    print_page(
        ask(lambda commands: commands.dead_letters()),
        ("LETTER", "TIME", "FROM", "RUN", "REASON"),
        _letter,
        empty="there are no dead letters",
        as_json=as_json,
    )


def _letter(letter: dict[str, Any]) -> Line:
    return [
        (plain(letter["letter_id"]), "bold"),
        (letter["time"] or "", ""),
        (plain(letter["stream"]), ""),
        (plain(str(letter["fields"].get("run_id") or ""))[:6], ""),
        (plain(letter["reason"]), "bad"),
    ]


@app.command()
@on_target
def requeue(letters: Letters, as_json: AsJson = False) -> int:
    """Retry the runs of letters, or send notifications again.

    The letters are dropped. Exit code: 0 all are requeued, 1 one of them is not.
    """

    async def one(commands: EngineApi, letter: str) -> dict[str, Any]:
        return await commands.requeue_dead_letter(letter)

    return _each(letters, one, "requeued", as_json=as_json)


@app.command()
@on_target
def drop(letters: Letters, as_json: AsJson = False) -> int:
    """Delete letters for good.

    The runs that they name stay as they are. Exit code: 0 all are dropped, 1 one of them is not.
    """

    async def one(commands: EngineApi, letter: str) -> dict[str, Any]:
        await commands.drop_dead_letter(letter)
        return {"letter_id": letter}

    return _each(letters, one, "dropped", as_json=as_json)


def _each(
    letters: list[str],
    act: Callable[[EngineApi, str], Awaitable[dict[str, Any]]],
    verb: str,
    *,
    as_json: bool,
) -> int:
    async def question(commands: EngineApi) -> dict[str, Any]:
        done, refused = await act_on_each(letters, lambda one: act(commands, one), "letter")
        return {verb: done, "refused": refused}

    def lines(found: dict[str, Any]) -> Iterator[Line]:
        for one in found[verb]:
            yield [(f"{verb} ", ""), (plain(one["letter_id"]), "bold"), (_outcome(one), "")]

    found = ask(question)
    print_reply(found, lines, as_json=as_json)
    return report_refused(found["refused"])


def _outcome(one: dict[str, Any]) -> str:
    if "run_id" not in one:
        return ""
    run = one["run_id"][:6]
    if RunStatus(one["status"]) in FINAL:
        return f": the notification of run {run} is sent again"
    return f": run {run} goes on"
