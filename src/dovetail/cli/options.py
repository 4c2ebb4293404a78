"""Arguments and options that several commands share, with one wording for each.

What it must not know: anything that is slow to import; `--help` reads this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

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


_PLACE: dict[str, tuple[Any, Any]] = {
    "server": (
        None,
        Annotated[
            str | None,
            typer.Option(
                "--server",
                metavar="URL",
                help="Work on this server, as in http://host:8700; default: DOVETAIL_SERVER.",
            ),
        ],
    ),
    "token": (
        None,
        Annotated[
            str | None,
            typer.Option(
                "--token",
                metavar="T",
                help="The server's token; better DOVETAIL_TOKEN, which other users cannot see.",
            ),
        ],
    ),
    "embedded": (
        False,
        Annotated[
            bool,
            typer.Option("--embedded", help="Work on the file, whatever server or Redis is set."),
        ],
    ),
}
"""The default and the form of each option that says where."""


def at_a_place(command: Callable[..., None]) -> Callable[..., None]:
    """A command that works wherever runs are kept; it gets the options that say where."""

    @wraps(command)
    def placed(
        *,
        server: str | None = None,
        token: str | None = None,
        embedded: bool = False,
        **given: Any,
    ) -> None:
        from dovetail.cli.target import choose

        choose(server, token, embedded=embedded)
        command(**given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, kind, default=default, annotation=form)
        for name, (default, form) in _PLACE.items()
    ]
    placed.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return placed


def group(name: str, about: str) -> typer.Typer:
    """A command that only has commands below it."""
    return typer.Typer(
        name=name, help=about, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )
