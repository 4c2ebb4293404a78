"""`dovetail documents process` and `stats`: files to fields, and how fast that went."""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.cli import streams
from dovetail.cli.document_endings import beginning, document, ending, going_on
from dovetail.cli.document_runs import EXTRACT, MODULE, DocumentRuns, Work
from dovetail.cli.ending import command
from dovetail.cli.failures import InvalidInput
from dovetail.cli.files import File
from dovetail.cli.json_output import document_if, json_bytes, print_json
from dovetail.cli.places import is_shared, looking, settings_of_this_place
from dovetail.cli.text import plain
from dovetail.config import Settings
from dovetail.core.errors import DovetailError, NotFound, PermanentError
from dovetail.core.states import RunStatus
from dovetail.documents import PIPELINE, ROUTED
from dovetail.documents.confinement import allow
from dovetail.documents.files import default_out
from dovetail.documents.folder import find
from dovetail.documents.measuring import FAILED, Measurement
from dovetail.documents.metrics import settle
from dovetail.documents.reviews import open_reviews
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.wiring import definition_limits

OCR = "tesseract"
ASKED_AT_ONCE = 32
"""Runs that `documents stats` asks about at the same time."""
_LIBRARIES = ("pyarrow", "pypdfium2", "lxml")


def folder_of(out: str | None) -> Path:
    """Also where that may be: whoever names a folder on a command line means it."""
    # Not by Path, which raises for a home that nobody has.
    folder = default_out() if out is None else Path(os.path.expanduser(out)).absolute()  # noqa: PTH111
    allow(folder)
    return folder


def typed_out(out: str | None) -> list[str]:
    """The words that lead another command to the same folder."""
    return [] if out is None else ["--out", out]


def process_documents(
    paths: Sequence[str],
    out: str | None,
    *,
    routed: bool,
    concurrency: int | None,
    as_json: bool,
) -> int:
    settings = settings_of_this_place()
    shared = is_shared(settings)
    if concurrency is not None and not shared:
        settings = settings.model_copy(update={"concurrency": concurrency})
    folder = folder_of(out)
    # Whether images can be read is known here only of this machine.
    found = find(paths, folder, images=shared or shutil.which(OCR) is not None)
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
        registry = load_registry(settings, [MODULE])
        show_logs(settings)
        reviews = open_reviews(folder)
        runs = DocumentRuns(settings, registry, work, reviews, quiet=as_json)

        def tell(runs: DocumentRuns) -> None:
            if write is not None:
                write(json_bytes(document(runs, reviews)))
                if runs.unfinished:
                    streams.complain(going_on(runs))  # which the document does not say
                return
            for line in ending(runs, reviews, typed_out(out)):
                streams.say(line)

        if not as_json:
            for line in beginning(runs, found):
                streams.say(line)
            sys.stdout.flush()
        return runs.run(tell)


def _extractor(settings: Settings) -> str:
    """Who extracts; empty where that is for workers to know."""
    from dovetail.documents.extraction import extractor_name
    from dovetail.documents.reading import max_bytes

    try:
        max_bytes()  # a setting that cannot be is told before anything is made
        if is_shared(settings) and settings.llm_base_url is None:
            return ""
        return extractor_name(settings)
    except PermanentError as error:
        raise InvalidInput(str(error)) from None


def _definition(settings: Settings, *, routed: bool) -> dict[str, Any]:
    """The workflow. Where nobody but the rules can extract, nothing needs a rate limit."""
    file = File(str(ROUTED if routed else PIPELINE), definition_limits(settings))
    definition: dict[str, Any] = file.parse().data
    if not is_shared(settings) and settings.llm_base_url is None:
        definition = copy.deepcopy(definition)
        for node in definition["nodes"]:
            if node["id"] == EXTRACT:
                node.pop("resource_tag", None)
    return definition


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"documents need {', '.join(missing)}, not installed here: "
            "pip install 'dovetail[documents]'"
        )


def show_statistics(out: str | None, target: float, *, as_json: bool) -> None:
    from dovetail.documents import statistics

    folder = folder_of(out)
    reviews = open_reviews(folder)
    rows = reviews.measurements()
    if asked := [row for row in rows if row.may_change]:
        try:
            asyncio.run(settle_by_runs(settings_of_this_place(), folder, asked))
        except DovetailError as error:
            streams.complain(f"how these runs ended cannot be asked: {plain(str(error))}")
        rows = reviews.measurements()
    measured = statistics.of(rows, target=target)
    if as_json:
        print_json({"out": str(folder), **measured.as_data()})
        return
    verdict, *more = measured.sentences()
    if not measured.documents and not measured.unfinished:
        processing = command("documents", "process", "PATH", *typed_out(out))
        streams.say(f"{verdict}: {plain(str(folder))}")
        streams.say([("process some with:  ", "dim"), (processing, "bold")])
        return
    style = "bold" if measured.met is None else "bold good" if measured.met else "bold wait"
    streams.say([(verdict, style)])
    for sentence in more:
        streams.say(sentence)


async def settle_by_runs(settings: Settings, folder: Path, rows: Sequence[Measurement]) -> None:
    """Ask how the runs of these documents ended; a run that is not known here stays as it is.

    Those that failed are asked, too: a retry may have succeeded since.
    """
    async with looking(settings) as commands:

        async def settle_one(row: Measurement) -> None:
            try:
                run = await commands.get_run(row.key, nodes=False)
            except NotFound:
                return
            if run["finished_at"] is None:
                return
            good = run["status"] == RunStatus.COMPLETED
            if row.status == FAILED and not good:
                return
            ended_at = datetime.fromisoformat(run["finished_at"]).timestamp()
            await asyncio.to_thread(
                settle, folder, row.document_id, row.key, good=good, ended_at=ended_at, count=False
            )

        for first in range(0, len(rows), ASKED_AT_ONCE):
            await asyncio.gather(*map(settle_one, rows[first : first + ASKED_AT_ONCE]))
