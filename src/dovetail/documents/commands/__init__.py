"""`dovetail documents …`, which the command line finds by this module's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.options import lazy_group

_HERE = "dovetail.documents.commands"

app = lazy_group(
    "documents",
    "The document pipeline: fields of invoices and the like, from files.",
    {
        **dict.fromkeys(("process", "stats"), f"{_HERE}.process"),
        "reviews": lazy_group(
            "reviews",
            "What was found in documents, for people to correct and approve.",
            dict.fromkeys(("list", "show", "correct", "approve"), f"{_HERE}.reviews"),
        ),
    },
)

Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The folder of results; default: DOVETAIL_DOCUMENTS_OUT, else ./documents.",
    ),
]
Document = Annotated[
    str, typer.Argument(metavar="ID", help="A document's id, or as much of it as tells it apart.")
]
By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who says so; default: your user name.")
]


def folder_of(out: str | None) -> Path:
    """The folder of results, which documents may now be read from and written to."""
    from dovetail.documents.files import allow, default_out

    # Not by Path, which raises for the home of an unknown user.
    folder = default_out() if out is None else Path(os.path.expanduser(out)).absolute()  # noqa: PTH111
    allow(folder)
    return folder


def typed_out(out: str | None) -> list[str]:
    """The options that give another command the same folder."""
    return [] if out is None else ["--out", out]
