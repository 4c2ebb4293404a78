"""The commands by name, each with the module that declares it.

A module is imported when its command is called, or listed by `--help`. A new command is a function
in a file of `commands` and a row here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.options import lazy_group

_HERE = "dovetail.cli.commands"


def _at(module: str, *names: str) -> dict[str, str | typer.Typer]:
    return dict.fromkeys(names, f"{_HERE}.{module}")


app = lazy_group(
    "dovetail",
    "Run workflows: nodes, what each runs, and what each depends on.",
    {
        **_at("run", "run", "trigger"),
        **_at("batches", "batch"),
        **_at("services", "serve", "orchestrator", "worker"),
        **_at("page", "open"),
        **_at("definitions", "validate"),
        **_at("recordings", "test"),
        **_at("graph", "graph"),
        **_at("definitions", "new", "schema"),
        **_at("services", "migrate", "mcp"),
        **_at("handlers", "handlers"),
        **_at("doctor", "doctor"),
        "runs": lazy_group(
            "runs",
            "See how runs went, and go on with them.",
            {
                **_at("runs", "list", "show", "why"),
                **_at("logs", "logs"),
                **_at("run_control", "watch", "retry", "fork", "resume", "cancel", "repair"),
                **_at("runs", "results", "events", "verify"),
                **_at("recordings", "record"),
                **_at("deletion", "delete", "prune"),
            },
        ),
        "batches": lazy_group("batches", "See how batches went.", _at("batches", "list", "show")),
        "workflows": lazy_group(
            "workflows",
            "Register workflows under their names, with versions.",
            {
                **_at("definitions", "register", "list", "show", "diff", "delete"),
                **_at("definitions", "alias", "unalias", "history"),
            },
        ),
        "limits": lazy_group(
            "limits",
            "Rate limits: how often nodes of a resource_tag may start.",
            _at("limits", "list", "set", "history"),
        ),
        **_at("queues", "queues"),
        "dead-letters": lazy_group(
            "dead-letters",
            "Messages that were refused, and notifications that were given up.",
            _at("queues", "list", "requeue", "drop"),
        ),
        "documents": "dovetail.documents.commands",
    },
)


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
    """Its help is that of the group."""
