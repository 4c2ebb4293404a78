"""`dovetail limits`: the rate limits that all processes on this store share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from dovetail.cli.options import AsJson, Cursor, declarations, on_target
from dovetail.cli.output import print_history, print_page, print_reply
from dovetail.cli.target import ask
from dovetail.cli.text import Line, plain

app = declarations()


@app.command("list")
@on_target
def list_limits(as_json: AsJson = False) -> None:
    """List the rate limits that are set.

    Any other tag has 10 per second, burst 1.
    """
    print_page(
        ask(lambda commands: commands.rate_limits()),
        ("TAG", "PER SECOND", "BURST"),
        _row,
        empty="none set: every resource_tag has 10 per second, burst 1",
        as_json=as_json,
    )


def _row(limit: dict[str, Any]) -> Line:
    return [
        (plain(limit["tag"]), "bold"),
        (f"{limit['rate_per_second']:g}", ""),
        (str(limit["burst"]), ""),
    ]


@app.command("set")
@on_target
def set_limit(
    tag: Annotated[str, typer.Argument(metavar="TAG", help="The resource_tag of nodes.")],
    rate: Annotated[float, typer.Argument(metavar="RATE", help="Starts per second, above 0.")],
    burst: Annotated[
        int, typer.Argument(metavar="BURST", help="Starts at once after a pause, at least 1.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Set a rate limit; processes that run pick it up."""
    limit = ask(lambda commands: commands.set_rate_limit(tag, rate, burst), create=True)
    print_reply(limit, _lines, as_json=as_json)


@app.command()
@on_target
def history(
    tag: Annotated[str, typer.Argument(metavar="TAG", help="The resource_tag of nodes.")],
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List how a rate limit was changed, when and by whom."""
    page = ask(lambda commands: commands.rate_limit_history(tag, limit=limit, cursor=cursor))
    print_history(page, as_json=as_json)


def _lines(limit: dict[str, Any]) -> Iterator[Line]:
    words = f"{limit['rate_per_second']:g} per second, burst {limit['burst']}"
    yield [(f"{plain(limit['tag'])}: ", "bold"), (words, "")]
