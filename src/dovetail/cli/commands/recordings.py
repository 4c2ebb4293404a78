"""`dovetail runs record` writes a run to a file, and `dovetail test` runs such files again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.options import AsJson, Run, declarations, on_target
from dovetail.cli.output import (
    FAILED,
    INVALID,
    InvalidInput,
    complain,
    document,
    print_error,
    print_json,
    say,
)
from dovetail.cli.target import ask, chosen_run, target_settings
from dovetail.cli.text import Line, counted, plain
from dovetail.core.errors import Conflict, DovetailError, InvalidDefinition

if TYPE_CHECKING:
    from dovetail.core.recording import Recording
    from dovetail.engine.api import EngineApi

app = declarations()


@app.command()
@on_target
def record(
    run: Run = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to; default: stdout."),
    ] = None,
) -> None:
    """Write a finished run to a file for `dovetail test`."""
    recording = ask(lambda commands: _recorded(commands, run))
    content = recording.to_json()
    if output is None:
        with document() as write:
            write(content)
        return
    path = Path(output)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
    nodes = counted(len(recording.nodes), "node")
    say([("wrote ", ""), (plain(str(path)), "bold"), (f", {nodes} of ", ""), _name(recording)])
    say([("replay it with:  ", "dim"), (f"dovetail test {plain(str(path))}", "bold")])


def _name(recording: Recording) -> tuple[str, str]:
    return f"{recording.run_id[:6]} {plain(recording.workflow)}", "bold"


async def _recorded(commands: EngineApi, given: str | None) -> Recording:
    from datetime import UTC, datetime

    from dovetail.core.recording import record
    from dovetail.core.redaction import Redactor

    run_id = await chosen_run(commands, given)
    view = await commands.get_run(run_id)
    if view["finished_at"] is None:
        raise Conflict(
            f"run {run_id} is {view['status']}: only a finished run can be recorded; "
            f"`dovetail runs watch {run_id[:6]}` waits for its end"
        )
    definition = (await commands.definition_of_run(run_id))["definition"]
    events = await commands.events(run_id)
    settings = target_settings()
    # Workers redact what handlers return. What is left is what a person wrote into params.
    redactor = Redactor({**settings.secrets, **settings.sensitive()})
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return record(view, definition, events, redactor, now)


@app.command("test")
def replay_files(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Recordings of `dovetail runs record`.")
    ],
    definition: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Run this definition with what was recorded, not the recorded one."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run recorded runs again. Exit code: 0 the same, 1 a difference, 2 not readable."""
    outcomes = [_outcome(file, definition) for file in files]
    if as_json:
        print_json(outcomes)
    else:
        for one in outcomes:
            _print(one)
        if len(files) > 1:
            same = sum(one["ok"] for one in outcomes)
            say(f"{same:,} of {counted(len(files), 'recording')} the same")
    if any(one["error"] for one in outcomes):
        return INVALID
    return 0 if all(one["ok"] for one in outcomes) else FAILED


def _outcome(file: str, definition: str | None) -> dict[str, Any]:
    from dovetail.testing import ReplayDiffers, Runner

    found: dict[str, Any] = {"file": file, "ok": False, "difference": None, "error": None}
    try:
        run = Runner().replay(file, definition=definition)
    except ReplayDiffers as differs:
        found["difference"] = differs.difference.as_dict()
        found["message"] = str(differs)
    except InvalidDefinition as error:
        found["error"] = f"{definition or file}: {error}"
    except DovetailError as error:
        found["error"] = str(error)
    else:
        return {**found, "ok": True, "nodes": len(run.nodes)}
    return found


def _print(outcome: dict[str, Any]) -> None:
    if outcome["error"] is not None:
        print_error(outcome["error"])
        return
    name: Line = [(f"{plain(outcome['file'])}: ", "bold")]
    if outcome["ok"]:
        say([*name, ("the same", "good"), (f", {counted(outcome['nodes'], 'node')}", "")])
        return
    complain([*name, (plain(outcome["message"]), "bad")])
