"""`dovetail documents process` and `stats`: from files to fields, and how fast that went."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.files import File
from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import (
    InvalidInput,
    document_if,
    json_bytes,
    print_lines,
    print_reply,
)
from dovetail.cli.summary import command
from dovetail.cli.target import is_shared, open_reader, target_settings
from dovetail.cli.text import Line, plain
from dovetail.core.errors import DovetailError, NotFound, PermanentError
from dovetail.core.states import RunStatus
from dovetail.documents import PIPELINE, ROUTED
from dovetail.documents.commands import Out, folder_of, typed_out
from dovetail.documents.files import allow, find_documents
from dovetail.documents.metrics import FAILED as FAILED_STATUS
from dovetail.documents.metrics import Measurement, Statistics, settle, statistics_of
from dovetail.documents.reviews import open_reviews

if TYPE_CHECKING:
    from dovetail.config import Settings

app = declarations()

OCR = "tesseract"
RUNS_ASKED_AT_ONCE = 32
"""Requests of `documents stats` at the same time."""
_LIBRARIES = ("pyarrow", "pypdfium2", "lxml")


@app.command()
@on_target
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
) -> int:
    """Find the fields of documents and put them up for review.

    They are saved as JSON and Parquet, too. The same command again goes on where it was: what is
    done is not done again. On Redis or a server its workers need --handlers dovetail.documents
    and see the same paths. Exit code: 0 all done, 1 some failed, 2 no such files, 130 cancelled
    by Ctrl-C.
    """
    from dovetail.documents.commands.document_runs import (
        DocumentRuns,
        Work,
        beginning,
        document,
        ending,
        going_on,
    )
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs

    settings = target_settings()
    shared = is_shared(settings)
    if concurrency is not None and not shared:
        settings = settings.model_copy(update={"concurrency": concurrency})
    folder = folder_of(out)
    # Whether images can be read is known here only of this machine.
    found = find_documents(paths, folder, images=shared or shutil.which(OCR) is not None)
    allow(*found.named)
    if not shared:
        _check_libraries()
    work = Work(
        files=found.files,
        out=folder,
        definition=_definition(settings, routed=routed),
        extractor=_extractor(settings),
        routed=routed,
        in_flight=concurrency if shared else None,
    )
    with document_if(as_json) as write:
        registry = load_registry(settings, ["dovetail.documents"])
        show_logs(settings)
        reviews = open_reviews(folder)
        runs = DocumentRuns(settings, registry, work, reviews, quiet=as_json)

        def print_end(runs: DocumentRuns) -> None:
            if write is not None:
                write(json_bytes(document(runs, reviews)))
                if runs.unfinished:
                    streams.complain(going_on(runs))  # which is not in the document
                return
            print_lines(ending(runs, reviews, typed_out(out)))

        if not as_json:
            print_lines(beginning(runs, found))
            sys.stdout.flush()
        return runs.run(print_end)


def _extractor(settings: Settings) -> str:
    """The name of the extractor; empty where only the workers know it."""
    from dovetail.documents.extraction import extractor_name
    from dovetail.documents.reading import max_bytes

    try:
        max_bytes()  # an invalid setting is an error before any run is made
        if is_shared(settings) and settings.llm_base_url is None:
            return ""
        return extractor_name(settings)
    except PermanentError as error:
        raise InvalidInput(str(error)) from None


def _definition(settings: Settings, *, routed: bool) -> dict[str, Any]:
    """The workflow. Without a language model no node needs a rate limit."""
    from dovetail.wiring.embedded import definition_limits

    file = File(str(ROUTED if routed else PIPELINE), definition_limits(settings))
    definition: dict[str, Any] = file.parse().data
    if not is_shared(settings) and settings.llm_base_url is None:
        definition = copy.deepcopy(definition)
        for node in definition["nodes"]:
            if node["id"] == "extract":
                node.pop("resource_tag", None)
    return definition


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"documents need {', '.join(missing)}, not installed here: "
            "pip install 'dovetail[documents]'"
        )


@app.command()
@on_target
def stats(
    out: Out = None,
    target: Annotated[float, typer.Option(metavar="N", min=0, help="Documents an hour.")] = 5000,
    as_json: AsJson = False,
) -> None:
    """Tell documents an hour, how long they took, how well it went.

    A document counts by how its run ended. Where that is not known yet, it is asked: on the
    server or Redis that is set, else in the file of runs.
    """
    import asyncio

    folder = folder_of(out)
    reviews = open_reviews(folder)
    rows = reviews.measurements()
    if asked := [row for row in rows if row.may_change]:
        try:
            asyncio.run(settle_by_runs(target_settings(), folder, asked))
        except DovetailError as error:
            streams.complain(f"how these runs ended cannot be asked: {plain(str(error))}")
        rows = reviews.measurements()
    measured = statistics_of(rows, target=target)
    data = {"out": str(folder), **measured.as_data()}
    print_reply(data, lambda _: _statistics_lines(measured, folder, out), as_json=as_json)


def _statistics_lines(measured: Statistics, folder: Path, out: str | None) -> Iterator[Line | str]:
    verdict, *more = measured.sentences()
    if not measured.documents and not measured.unfinished:
        processing = command("documents", "process", "PATH", *typed_out(out))
        yield f"{verdict}: {plain(str(folder))}"
        yield [("process some with:  ", "dim"), (processing, "bold")]
        return
    style = "bold" if measured.met is None else "bold good" if measured.met else "bold wait"
    yield [(verdict, style)]
    yield from more


async def settle_by_runs(settings: Settings, folder: Path, rows: Sequence[Measurement]) -> None:
    """Ask how the runs of these documents ended; a run that is not known here stays as it is.

    Failed runs are asked, too: a retry may have succeeded since.
    """
    import asyncio

    async with open_reader(settings) as commands:

        async def settle_one(row: Measurement) -> None:
            try:
                run = await commands.get_run(row.key, nodes=False)
            except NotFound:
                return
            if run["finished_at"] is None:
                return
            good = run["status"] == RunStatus.COMPLETED
            if row.status == FAILED_STATUS and not good:
                return
            ended_at = datetime.fromisoformat(run["finished_at"]).timestamp()
            await asyncio.to_thread(
                settle, folder, row.document_id, row.key, good=good, ended_at=ended_at, count=False
            )

        for first in range(0, len(rows), RUNS_ASKED_AT_ONCE):
            await asyncio.gather(*map(settle_one, rows[first : first + RUNS_ASKED_AT_ONCE]))
