"""Arguments and options that several commands share, with one wording for each.

What it must not know: anything that is slow to import; `--help` reads this file.
"""

from __future__ import annotations

from typing import Annotated

import typer

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
Param = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--param",
        metavar="K=V",
        help="A param, typed by the workflow's schema; may be repeated, the last one wins.",
    ),
]
ParamsFile = Annotated[
    str | None,
    typer.Option(
        "--params",
        metavar="FILE",
        help="Params from a YAML or JSON file (- is stdin); -p wins over it.",
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run's id, or its first digits (at least four); without it the newest run.",
    ),
]
WorkflowName = Annotated[str, typer.Argument(metavar="NAME", help="A registered workflow.")]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait; on a server only.")]


def group(name: str, about: str) -> typer.Typer:
    """A command that only has commands below it."""
    return typer.Typer(
        name=name, help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )
