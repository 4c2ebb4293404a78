"""`dovetail limits`: the rate limits that all processes on this store share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import print_json
from dovetail.cli.target import ask
from dovetail.cli.text import Line, plain, table

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

app = declarations()


@app.command("list")
@on_target
def list_limits(as_json: AsJson = False) -> None:
    """List the rate limits that are set.

    Any other tag has 10 per second, burst 1.
    """

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.rate_limits()

    limits = ask(question)
    if as_json:
        print_json(limits)
        return
    if not limits["items"]:
        streams.say("none set: every resource_tag has 10 per second, burst 1")
        return
    head: Line = [("TAG", "dim"), ("PER SECOND", "dim"), ("BURST", "dim")]
    for line in table([head, *(_row(limit) for limit in limits["items"])], streams.room()):
        streams.say(line)


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

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.set_rate_limit(tag, rate, burst)

    limit = ask(question, create=True)
    if as_json:
        print_json(limit)
        return
    words = f"{limit['rate_per_second']:g} per second, burst {limit['burst']}"
    streams.say([(f"{plain(limit['tag'])}: ", "bold"), (words, "")])
