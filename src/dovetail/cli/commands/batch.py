"""`dovetail batch`: one run for each line of a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256

from dovetail.cli import output as streams
from dovetail.cli.batching import BatchSession, Items, ItemsSummary, SentBatch
from dovetail.cli.failures import INVALID, InvalidInput
from dovetail.cli.files import File, report_of
from dovetail.cli.output import Write, document_if
from dovetail.cli.target import checked_for_this_place, settings_of_this_place
from dovetail.cli.text import counted
from dovetail.core.definition.model import Workflow
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.wiring.embedded import definition_limits

QUIET_SECONDS = 2.0


def run_batch(
    path: str,
    items_path: str,
    handlers: Sequence[str],
    key: str | None,
    *,
    retry_failed: bool,
    as_json: bool,
) -> int:
    with document_if(as_json) as write:
        return _run(path, items_path, handlers, key, retry_failed, write)


def _run(
    path: str,
    items_path: str,
    handlers: Sequence[str],
    key: str | None,
    retry_failed: bool,
    write: Write | None,
) -> int:
    settings = settings_of_this_place()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = checked_for_this_place(file, limits, registry)
    for line in report_of(file, checked):
        streams.complain(line)
    if checked.workflow is None:
        return INVALID
    items = Items(items_path, checked.workflow.params, limits)
    survey = items.survey(_sign_of_life(items.name))
    if survey.bad_lines:
        _report(items.name, survey)
        return INVALID
    if not survey.count:
        raise InvalidInput(f"{items.name} has no items: one JSON object per line, each a run")
    for warning in survey.warnings:
        streams.complain([("warning: ", "bold wait"), (warning, "")])
    if survey.more_warnings:
        more = counted(survey.more_warnings, "more warning")
        streams.complain([("warning: ", "bold wait"), (f"{items.name}: and {more}", "")])
    show_logs(settings)
    key = key or _key(checked.workflow, survey)
    kind = BatchSession if settings.server is None else SentBatch
    batch = kind(settings, registry, checked, items, survey, key, write, retry_failed=retry_failed)
    return batch.run()


def _key(workflow: Workflow, survey: ItemsSummary) -> str:
    """The same for the same definition and items, so that the same command line goes on."""
    definition = sha256(workflow.model_dump_json().encode()).hexdigest()
    return f"batch-{sha256(f'{definition} {survey.digest}'.encode()).hexdigest()}"


def _report(name: str, survey: ItemsSummary) -> None:
    for problem in survey.problems:
        streams.complain(problem)
    bad = f"{counted(survey.bad_lines, 'line')} of {survey.count:,} cannot be run"
    streams.complain([(f"{name}: ", "bold"), (f"{bad}; nothing was made", "bad")])


def _sign_of_life(name: str) -> Callable[[int], None]:
    """Checking a million lines takes a while: say so, once it does."""
    say_at = time.monotonic() + QUIET_SECONDS
    told = False

    def on_line(number: int) -> None:
        nonlocal told
        if not told and number % 1000 == 0 and time.monotonic() > say_at:
            told = True
            streams.complain([(f"checking {name} …", "dim")])
            sys.stderr.flush()

    return on_line
