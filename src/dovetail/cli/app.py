"""The commands: their names, arguments and help texts, and nothing of what they do.

Each imports its own module when it is called. What it must not know: anything that is slow to
import. A new command is a new function here and a new file in `commands`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="dovetail",
    no_args_is_help=True,
    add_completion=False,
    # Rich would cost more than everything else that `--help` does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

DefinitionFile = Annotated[
    str, typer.Argument(metavar="FILE", help="A definition, YAML or JSON; - reads it from stdin.")
]
Handlers = Annotated[
    list[str] | None,
    typer.Option(
        "--handlers",
        metavar="F",
        help="Load handlers from FILE.py or package.module; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from dovetail import __version__
        from dovetail.cli.streams import say

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
    param: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--param",
            metavar="K=V",
            help="A param, typed by the workflow's schema; may be repeated, the last one wins.",
        ),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Params from a YAML or JSON file (- is stdin); -p wins over it."
        ),
    ] = None,
    handlers: Handlers = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow here and show how it goes.

    Exit code: 0 completed, 1 failed, 2 invalid definition or params, 130 cancelled by Ctrl-C.
    """
    from dovetail.cli.commands.run import run_file

    code = run_file(file, param or [], params, handlers or [], as_json=as_json)
    raise typer.Exit(code)


@app.command()
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
) -> None:
    """Draw the layers of a workflow and what depends on what."""
    from dovetail.cli.commands.graph import draw_file

    raise typer.Exit(draw_file(file, format))


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
def handlers(handlers: Handlers = None, as_json: AsJson = False) -> None:
    """List the handlers known here: origin, retries and config."""
    from dovetail.cli.commands.handlers import list_handlers

    list_handlers(handlers or [], as_json=as_json)
