"""`dovetail batch`: one run for each line of a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID, InvalidInput
from dovetail.cli.files import File, report_of
from dovetail.cli.options import AsJson, DefinitionFile, Handlers, declarations, on_target
from dovetail.cli.output import Write, document_if
from dovetail.cli.target import check_on_target, target_settings
from dovetail.cli.text import counted

if TYPE_CHECKING:
    from dovetail.cli.batching import ItemsSummary
    from dovetail.core.definition.model import Workflow

QUIET_SECONDS = 2.0

app = declarations()


@app.command()
@on_target
def batch(
    file: DefinitionFile,
    items: Annotated[
        str, typer.Option(metavar="FILE", help="JSON Lines: one object per line, a run's params.")
    ],
    handlers: Handlers = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="What tells this batch from others; default: the content of both files.",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry its runs that failed or were cancelled.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run a workflow once for each line of a file.

    The same command again goes on where it was: nothing is run twice. Exit code: 0 all completed,
    1 some did not, 2 invalid definition or items, 130 cancelled by Ctrl-C.
    """
    with document_if(as_json) as write:
        return _run(file, items, handlers or (), key, retry_failed, write)


def _run(
    path: str,
    items_path: str,
    handlers: Sequence[str],
    key: str | None,
    retry_failed: bool,
    write: Write | None,
) -> int:
    from dovetail.cli.batching import BatchSession, Items, ServerBatch
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs
    from dovetail.wiring.embedded import definition_limits

    settings = target_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = check_on_target(file, limits, registry)
    for line in report_of(file, checked):
        streams.complain(line)
    if checked.workflow is None:
        return INVALID
    items = Items(items_path, checked.workflow.params, limits)
    summary = items.check_all(_sign_of_life(items.name))
    if summary.bad_lines:
        _report(items.name, summary)
        return INVALID
    if not summary.count:
        raise InvalidInput(f"{items.name} has no items: one JSON object per line, each a run")
    for warning in summary.warnings:
        streams.complain([("warning: ", "bold wait"), (warning, "")])
    if summary.more_warnings:
        more = counted(summary.more_warnings, "more warning")
        streams.complain([("warning: ", "bold wait"), (f"{items.name}: and {more}", "")])
    show_logs(settings)
    key = key or _key(checked.workflow, summary)
    kind = BatchSession if settings.server is None else ServerBatch
    batch = kind(settings, registry, checked, items, summary, key, write, retry_failed=retry_failed)
    return batch.run()


def _key(workflow: Workflow, summary: ItemsSummary) -> str:
    """The same for the same definition and items, so that the same command line continues."""
    # A definition without `allow_failure` keeps the key that earlier versions gave it.
    unused = not any(node.allow_failure for node in workflow.nodes)
    left_out = {"nodes": {"__all__": {"allow_failure"}}} if unused else None
    definition = sha256(workflow.model_dump_json(exclude=left_out).encode()).hexdigest()
    return f"batch-{sha256(f'{definition} {summary.digest}'.encode()).hexdigest()}"


def _report(name: str, summary: ItemsSummary) -> None:
    for problem in summary.problems:
        streams.complain(problem)
    bad = f"{counted(summary.bad_lines, 'line')} of {summary.count:,} cannot be run"
    streams.complain([(f"{name}: ", "bold"), (f"{bad}; nothing was made", "bad")])


def _sign_of_life(name: str) -> Callable[[int], None]:
    """Print once that the lines are checked, if that takes long."""
    say_at = time.monotonic() + QUIET_SECONDS
    printed = False

    def on_line(number: int) -> None:
        nonlocal printed
        if not printed and number % 1000 == 0 and time.monotonic() > say_at:
            printed = True
            streams.complain([(f"checking {name} …", "dim")])
            sys.stderr.flush()

    return on_line
