"""`dovetail batches …`: the names, arguments and help texts; what they do is in `commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.options import AsJson, at_a_place, group

app = group("batches", "See how batches went.")


@app.command("list")
@at_a_place
def list_(
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many at most.")] = 20,
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List batches, the newest first."""
    from dovetail.cli.commands.batches import list_batches

    list_batches(limit, cursor, as_json=as_json)


@app.command()
@at_a_place
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
    from dovetail.cli.commands.batches import show_batch

    show_batch(batch, limit, cursor, as_json=as_json)
