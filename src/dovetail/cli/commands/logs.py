"""`dovetail runs logs`: what the handlers of a run logged and printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.node_report import last_items, log_lines_of
from dovetail.cli.options import AsJson, Run, declarations, on_target
from dovetail.cli.output import json_text, print_json, print_lines
from dovetail.cli.target import ask, chosen_run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dovetail.engine.api import EngineApi
    from dovetail.engine.ports import LogQuery

app = declarations()


@app.command()
@on_target
def logs(
    run: Run = None,
    node: Annotated[str | None, typer.Option(metavar="N", help="Only of this node.")] = None,
    item: Annotated[
        int | None,
        typer.Option(metavar="I", min=0, help="Only of this item of a node with for_each."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Only of this attempt.")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(metavar="E", min=1, help="Only of this epoch of the run.")
    ] = None,
    level: Annotated[
        str | None, typer.Option(metavar="L", help="Only this level and more severe ones.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option("-q", "--search", metavar="WORDS", help="Only lines with these words."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="COUNT", min=0, help="Only the last lines.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new lines, until the run ends.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Print what the handlers of a run logged and printed.

    With --follow and --json each line is a JSON object of its own.
    """
    from dovetail.engine.ports import LogQuery

    query = LogQuery(node, epoch, attempt, item, level, search or None)
    if follow:
        from dovetail.cli.following import follow_run

        return follow_run(
            run,
            lambda commands, run_id: _follow(commands, run_id, query, tail, as_json=as_json),
        )

    async def question(commands: EngineApi) -> None:
        run_id = await chosen_run(commands, run)
        if as_json:
            items = [item async for item in _stored(commands, run_id, query, tail)]
            print_json({"items": items, "next_cursor": None})
            return
        is_empty = True
        async for item in _stored(commands, run_id, query, tail):
            is_empty = False
            print_lines(log_lines_of(item))
        if is_empty:
            what = "nothing was logged" if query == LogQuery() else "no line fits"
            streams.complain([(what, "dim")])

    ask(question)
    return 0


async def _stored(
    commands: EngineApi, run_id: str, query: LogQuery, tail: int | None
) -> AsyncGenerator[dict[str, Any]]:
    from dovetail.engine.api import log_lines

    if tail is not None:
        for item in await last_items(commands, run_id, query, tail):
            yield item
        return
    async for item in log_lines(commands, run_id, query):
        yield item


async def _follow(
    commands: EngineApi, run_id: str, query: LogQuery, tail: int | None, *, as_json: bool
) -> None:
    if tail is not None:
        items = list(await last_items(commands, run_id, query, max(1, tail)))
        for item in items[:tail]:  # with 0 none, and new lines come after the last one
            _print(item, as_json=as_json)
        if items:
            query = replace(query, after=items[-1]["seq"])
    async for item in commands.follow_logs(run_id, query):
        _print(item, as_json=as_json)


def _print(item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        streams.say(json_text(item))
    else:
        print_lines(log_lines_of(item))
    sys.stdout.flush()
