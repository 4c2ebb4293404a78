"""`dovetail runs delete|prune`: delete finished runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.cli.options import AsJson, declarations, on_target
from dovetail.cli.output import InvalidInput, print_reply
from dovetail.cli.target import act_on_each, ask, chosen_run, report_refused
from dovetail.cli.text import Line, counted

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

app = declarations()

_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])|0", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
@on_target
def delete(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Ids of runs, or their first digits.")
    ],
    as_json: AsJson = False,
) -> int:
    """Delete finished runs and everything that belongs to them.

    Exit code: 0 all are deleted, 1 one of them is not.
    """

    async def question(commands: EngineApi) -> dict[str, Any]:
        deleted: set[str] = set()

        async def one(given: str) -> str:
            run_id = await chosen_run(commands, given)
            if run_id not in deleted:  # two beginnings may be of one run
                await commands.delete_run(run_id)
                deleted.add(run_id)
            return run_id

        done, refused = await act_on_each(runs, one, "run")
        if done:
            await commands.reclaim_space()
        return {"deleted": list(dict.fromkeys(done)), "refused": refused}

    done = ask(question)
    print_reply(done, _deleted_lines, as_json=as_json)
    return report_refused(done["refused"])


def _deleted_lines(done: dict[str, Any]) -> Iterator[Line]:
    for run_id in done["deleted"]:
        yield [("deleted ", ""), (run_id[:6], "bold")]


@app.command()
@on_target
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Time since the end of a run: 90s, 15m, 12h, 30d; 0 is every finished run.",
        ),
    ],
    status: Annotated[
        Literal["COMPLETED", "FAILED", "CANCELLED"] | None,
        typer.Option(case_sensitive=False, help="Only runs in this state."),
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how many would be deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete finished runs that ended long ago.

    Runs that go on are never deleted. Other processes keep working meanwhile.
    """
    from dovetail.engine.prune import prune as prune_runs

    age = _seconds(older_than)
    before = time.time() - age if age else inf

    async def question(commands: EngineApi) -> int:
        return await prune_runs(
            commands, ended_before=before, status=status, workflow=workflow, dry_run=dry_run
        )

    count = ask(question)
    done = {"runs": count, "dry_run": dry_run}
    verb = "would delete" if dry_run else "deleted"
    print_reply(done, lambda done: [f"{verb} {counted(done['runs'], 'run')}"], as_json=as_json)


def _seconds(age: str) -> float:
    """Raises `InvalidInput`."""
    found = _AGE.fullmatch(age.strip().lower())
    if found is None:
        raise InvalidInput(
            f"--older-than {age[:40]!r} is no age: give a number and one of s, m, h, d, as in 30d "
            "or 12h; 0 means every finished run"
        )
    number, unit = found.groups()
    return 0.0 if number is None else float(number) * _UNITS[unit]
