"""`dovetail open`: the page in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli import output as streams
from dovetail.cli.options import declarations, on_target
from dovetail.cli.output import InvalidInput

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

app = declarations()


@app.command("open")
@on_target
def open_page(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run's id or its first digits; without it all runs."),
    ] = None,
) -> None:
    """Open the page of a run, or of all runs, in a browser.

    It prints the address, too. A server must be running: `dovetail serve`.
    """
    from dovetail.cli.page import NO_SERVER, NOT_KNOWN, open_in_browser, page_url, run_link
    from dovetail.cli.target import ask, chosen_run, target_settings
    from dovetail.core.errors import NotFound

    settings = target_settings()
    url = page_url(settings)
    if url is None:
        if settings.redis_url is not None:
            raise InvalidInput(NOT_KNOWN)
        raise NotFound(NO_SERVER)

    async def wanted(commands: EngineApi) -> str:
        return await chosen_run(commands, run)

    link = url if run is None else run_link(url, ask(wanted))
    streams.say(link)
    open_in_browser(link)
