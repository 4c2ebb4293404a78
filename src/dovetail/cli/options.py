"""How commands are declared: groups, and the arguments and options that several commands share.

`--help` imports this file and the modules of the commands that it lists, so none of them imports
anything slow at its top.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group

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


def run_or(default: str) -> Any:
    """The argument of a command that takes other runs if none is named."""
    return typer.Argument(
        metavar="RUN", help=f"A run's id or its first digits; without it {default}."
    )


Cursor = Annotated[str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")]
Version = Annotated[
    str | None, typer.Option(metavar="N", help="A version's number or alias; default: latest.")
]
AliasName = Annotated[str, typer.Argument(metavar="ALIAS", help="Such as prod.")]
WorkflowName = Annotated[str, typer.Argument(metavar="NAME", help="A registered workflow.")]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait; on a server only.")]


def number_or_alias(version: str | None) -> int | str | None:
    """What `--version` names."""
    return int(version) if version is not None and version.isdecimal() else version


_TARGET: dict[str, tuple[Any, Any]] = {
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
"""The default and the declaration of each option that names the target."""

Command = TypeVar("Command", bound=Callable[..., int | None])


def on_target(command: Command) -> Command:
    """Add the options that name where runs are kept: a server, Redis or a file."""

    @wraps(command)
    def with_target(
        *,
        server: str | None = None,
        token: str | None = None,
        embedded: bool = False,
        **given: Any,
    ) -> int | None:
        from dovetail.cli.target import choose_target

        choose_target(server, token, embedded=embedded)
        return command(**given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, kind, default=default, annotation=form)
        for name, (default, form) in _TARGET.items()
    ]
    with_target.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return cast(Command, with_target)


def declarations() -> typer.Typer:
    """Where a module declares its commands. A command returns its exit code, or None for 0."""
    # Rich would cost more than everything else that `--help` does.
    return typer.Typer(rich_markup_mode=None, add_completion=False)


class LazyCommands(dict[str, Any]):
    """Commands by name. The module of each is imported when the command is first asked for."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, str):
            found = import_module(found).app
        if isinstance(found, typer.Typer):
            group = get_group(found)
            self[name] = found = group if found.info.name == name else group.commands[name]
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


def lazy_group(
    name: str, about: str | None, sources: Mapping[str, str | typer.Typer]
) -> typer.Typer:
    """A command that only has commands below it: each from a module's `app`, or a group itself."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = LazyCommands(sources)

        def invoke(self, ctx: Any) -> Any:
            code = super().invoke(ctx)
            if ctx.parent is None and code:
                raise typer.Exit(code)
            return code

    return typer.Typer(
        name=name,
        cls=LazyGroup,
        help=about,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
