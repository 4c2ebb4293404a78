"""The commands: their names, arguments and help texts, and nothing of what they do.

Each imports its own module when it is called. What it must not know: anything that is slow to
import. A new command is a new function here and a new file in `commands`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dovetail.cli.groups import batches, limits, runs, workflows
from dovetail.cli.options import (
    AsJson,
    DefinitionFile,
    Handlers,
    Param,
    ParamsFile,
    WorkflowName,
    at_a_place,
)
from dovetail.documents import commands

app = typer.Typer(
    name="dovetail",
    no_args_is_help=True,
    add_completion=False,
    # Rich would cost more than everything else that `--help` does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(runs.app)
app.add_typer(batches.app)
app.add_typer(workflows.app)
app.add_typer(limits.app)
app.add_typer(commands.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dovetail import __version__
        from dovetail.cli.output import say

        say(f"dovetail {__version__}")
        raise typer.Exit


@app.callback()
def dovetail(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run workflows: nodes, what each runs, and what each depends on."""


@app.command()
def run(
    file: DefinitionFile,
    param: Param = None,
    params: ParamsFile = None,
    handlers: Handlers = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow here and show how it goes.

    Exit code: 0 completed, 1 failed or cancelled from elsewhere, 2 invalid definition or params,
    130 cancelled by Ctrl-C. SIGTERM hands the run back, to be resumed, with 0.
    """
    from dovetail.cli.commands.run import run_file

    code = run_file(file, param or [], params, handlers or [], as_json=as_json)
    raise typer.Exit(code)


@app.command()
@at_a_place
def trigger(
    name: WorkflowName,
    version: Annotated[
        str | None, typer.Option(metavar="N", help="A version's number or alias; default: latest.")
    ] = None,
    param: Param = None,
    params: ParamsFile = None,
    handlers: Handlers = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="K", help="The same key again is the same run, not another one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a registered workflow and show how it goes.

    Exit codes are those of `dovetail run`.
    """
    from dovetail.cli.commands.trigger import trigger_workflow

    code = trigger_workflow(
        name,
        version,
        param or [],
        params,
        handlers or [],
        idempotency_key=idempotency_key,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
@at_a_place
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
) -> None:
    """Run a workflow once for each line of a file.

    The same command again goes on where it was: nothing is run twice. Exit code: 0 all completed,
    1 some did not, 2 invalid definition or items, 130 cancelled by Ctrl-C.
    """
    from dovetail.cli.commands.batch import run_batch

    code = run_batch(file, items, handlers or [], key, retry_failed=retry_failed, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(metavar="H", help="Where to listen; beyond loopback only with a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 takes any that is free.")
    ] = 8700,
    handlers: Handlers = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="S,S",
            help="On Redis: run orchestrator and worker in this process, too.",
        ),
    ] = None,
) -> None:
    """Serve the HTTP API, and go on with interrupted runs.

    SIGTERM and Ctrl-C hand back what does not finish in time. Exit code: 0, or 1 if it could not
    listen or lost its store.
    """
    from dovetail.cli.commands.serve import serve_api

    raise typer.Exit(serve_api(host, port, handlers or [], beside))


@app.command()
def orchestrator() -> None:
    """Apply results and send out what follows: a service of a set-up on Redis.

    Start as many as you like. SIGTERM and Ctrl-C end it. Exit code: 0, or 1 if Redis is not there.
    """
    from dovetail.cli.commands.orchestrator import run_orchestrator

    raise typer.Exit(run_orchestrator())


@app.command()
def worker(
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Nodes that it runs at once; default: 32."),
    ] = None,
    handlers: Handlers = None,
) -> None:
    """Run the nodes whose handlers it knows: a service of a set-up on Redis.

    Start as many as you like. SIGTERM and Ctrl-C: it takes no more work, what runs may finish
    within DOVETAIL_DRAIN_SECONDS, the rest is handed back. Exit code: 0, or 1 if Redis is not
    there.
    """
    from dovetail.cli.commands.worker import run_worker

    raise typer.Exit(run_worker(concurrency, handlers or []))


@app.command()
@at_a_place
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Definitions; - reads one from stdin.")
    ],
    handlers: Handlers = None,
    as_json: AsJson = False,
) -> None:
    """Report every problem of a definition, with its place. Exit code: 0 valid, 2 not."""
    from dovetail.cli.commands.validate import validate_files

    raise typer.Exit(validate_files(files, handlers or [], as_json=as_json))


@app.command()
def graph(
    file: DefinitionFile,
    format: Annotated[  # noqa: A002  (the name of the option)
        Literal["text", "mermaid", "dot", "svg"], typer.Option(help="How to draw it.")
    ] = "text",
    handlers: Handlers = None,
) -> None:
    """Draw the layers of a workflow and what depends on what."""
    from dovetail.cli.commands.graph import draw_file

    raise typer.Exit(draw_file(file, format, handlers or []))


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the workflow is called.")],
) -> None:
    """Write NAME.yaml, a commented workflow to start from."""
    from dovetail.cli.commands.new import write_starter

    write_starter(name)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a definition, for editors."""
    from dovetail.cli.commands.schema import print_schema

    print_schema()


@app.command()
def migrate() -> None:
    """Bring the tables of PostgreSQL up to date, before services of this version start.

    Services do so themselves; this is for a job of its own. Exit code: 0, 1 if PostgreSQL is not
    there, 2 if DOVETAIL_DATABASE_URL is not set.
    """
    from dovetail.cli.commands.migrate import migrate

    migrate()


@app.command()
@at_a_place
def handlers(handlers: Handlers = None, as_json: AsJson = False) -> None:
    """List the handlers known here: origin, retries, version and config.

    On Redis or a server: those that workers have announced, and which workers.
    """
    from dovetail.cli.commands.handlers import list_handlers

    list_handlers(handlers or [], as_json=as_json)


@app.command()
@at_a_place
def doctor(handlers: Handlers = None, as_json: AsJson = False) -> None:
    """Check settings, handlers, and where runs are kept. Exit code: 0 fine, 1 not.

    That is the file, or Redis and PostgreSQL with the services on them.
    """
    from dovetail.cli.commands.doctor import examine

    raise typer.Exit(examine(handlers or [], as_json=as_json))
