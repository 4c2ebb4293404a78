"""`dovetail documents …`: the names, arguments and help texts; what they do is in `commands`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dovetail.cli.options import AsJson, at_a_place, group

app = group("documents", "The document pipeline: fields of invoices and the like, from files.")
reviews = group("reviews", "What was found in documents, for people to correct and approve.")
app.add_typer(reviews)

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


@app.command()
@at_a_place
def process(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files, folders with all below them, or 'patterns/*'."),
    ],
    out: Out = None,
    routed: Annotated[
        bool,
        typer.Option("--routed", help="Approve what is sure (0.8) at once, list items apart."),
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Nodes that run at once; on Redis or a server: documents in flight.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fields of documents and put them up for review.

    They are saved as JSON and Parquet, too. The same command again goes on where it was: what is
    done is not done again. On Redis or a server its workers need --handlers dovetail.documents
    and see the same paths. Exit code: 0 all done, 1 some failed, 2 no such files, 130 cancelled
    by Ctrl-C.
    """
    from dovetail.documents.commands.process import process_documents

    raise typer.Exit(
        process_documents(paths, out, routed=routed, concurrency=concurrency, as_json=as_json)
    )


@app.command()
@at_a_place
def stats(
    out: Out = None,
    target: Annotated[float, typer.Option(metavar="N", min=0, help="Documents an hour.")] = 5000,
    as_json: AsJson = False,
) -> None:
    """Tell documents an hour, how long they took, how well it went.

    A document counts by how its run ended. Where that is not known yet, it is asked: on the
    server or Redis that is set, else in the file of runs.
    """
    from dovetail.documents.commands.process import show_statistics

    show_statistics(out, target, as_json=as_json)


@reviews.command("list")
def list_(
    status: Annotated[
        Literal["pending", "approved"] | None, typer.Option(help="Only those in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    after: Annotated[
        str, typer.Option(metavar="ID", help="Go on after this document, where a list ended.")
    ] = "",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """List documents with what was found in them."""
    from dovetail.documents.commands.reviews import list_reviews

    list_reviews(out, status=status, limit=limit, after=after, as_json=as_json)


@reviews.command()
def show(document: Document, out: Out = None, as_json: AsJson = False) -> None:
    """Show all that was found in a document, and how sure that is."""
    from dovetail.documents.commands.reviews import show_review

    show_review(out, document, as_json=as_json)


@reviews.command()
def correct(
    document: Document,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE", help="As in total=12.50; nothing after the = empties a field."
        ),
    ],
    by: By = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Put fields right. No extraction changes them after that."""
    from dovetail.documents.commands.reviews import correct_review

    correct_review(out, document, changes, by, as_json=as_json)


@reviews.command()
def approve(document: Document, by: By = None, out: Out = None, as_json: AsJson = False) -> None:
    """Say that a document's fields are right."""
    from dovetail.documents.commands.reviews import approve_review

    approve_review(out, document, by, as_json=as_json)
