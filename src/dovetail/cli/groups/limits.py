"""`dovetail limits …`: the names, arguments and help texts; what they do is in `commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.options import AsJson, at_a_place, group

app = group("limits", "Rate limits: how often nodes of a resource_tag may start.")


@app.command("list")
@at_a_place
def list_(as_json: AsJson = False) -> None:
    """List the rate limits that are set.

    Any other tag has 10 per second, burst 1.
    """
    from dovetail.cli.commands.limits import list_limits

    list_limits(as_json=as_json)


@app.command("set")
@at_a_place
def set_(
    tag: Annotated[str, typer.Argument(metavar="TAG", help="The resource_tag of nodes.")],
    rate: Annotated[float, typer.Argument(metavar="RATE", help="Starts per second, above 0.")],
    burst: Annotated[
        int, typer.Argument(metavar="BURST", help="Starts at once after a pause, at least 1.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Set a rate limit; processes that run pick it up."""
    from dovetail.cli.commands.limits import set_limit

    set_limit(tag, rate, burst, as_json=as_json)
