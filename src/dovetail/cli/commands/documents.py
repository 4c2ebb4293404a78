"""`dovetail documents process` and `stats`: files to fields, and how fast that went."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Sequence
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
from dovetail.cli.places import is_shared, settings_of_this_place
from dovetail.cli.text import plain
from dovetail.config import Settings
from dovetail.core.errors import PermanentError
from dovetail.documents import PIPELINE, ROUTED
from dovetail.documents.confinement import allow
from dovetail.documents.files import default_out
from dovetail.documents.folder import find
from dovetail.documents.reviews import open_reviews
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.wiring import definition_limits

OCR = "tesseract"
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
    measured = statistics.of(open_reviews(folder).measurements(), target=target)
    if as_json:
        print_json({"out": str(folder), **measured.as_data()})
        return
    verdict, *more = measured.sentences()
    if measured.met is None:
        processing = command("documents", "process", "PATH", *typed_out(out))
        streams.say(f"{verdict}: {plain(str(folder))}")
        streams.say([("process some with:  ", "dim"), (processing, "bold")])
        return
    streams.say([(verdict, "bold good" if measured.met else "bold wait")])
    for sentence in more:
        streams.say(sentence)
