"""`dovetail runs …`: the names, arguments and help texts; what they do is in `commands`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dovetail.cli.options import AsJson, Detach, Handlers, Run, at_a_place, group

app = group("runs", "See how runs went, and go on with them.")


@app.command("list")
@at_a_place
def list_(
    status: Annotated[
        Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"] | None,
        typer.Option(case_sensitive=False, help="Only runs in this state."),
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="ID", help="Only runs of this batch; its first digits do.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    from dovetail.cli.commands.runs import list_runs

    list_runs(
        status=status,
        workflow=workflow,
        batch=batch,
        limit=limit,
        cursor=cursor,
        as_json=as_json,
    )


@app.command()
@at_a_place
def show(run: Run = None, as_json: AsJson = False) -> None:
    """Show a run: its nodes, and its result or what failed."""
    from dovetail.cli.commands.runs import show_run

    show_run(run, as_json=as_json)


@app.command()
@at_a_place
def why(run: Run = None, as_json: AsJson = False) -> None:
    """Explain what each unfinished node waits for."""
    from dovetail.cli.commands.runs import explain_run

    explain_run(run, as_json=as_json)


@app.command()
@at_a_place
def watch(run: Run = None, as_json: AsJson = False) -> None:
    """Follow a run to its end, whichever process drives it.

    Ctrl-C stops looking, not the run. Exit code: 0 completed, 1 failed, cancelled, or driven by
    nobody.
    """
    from dovetail.cli.commands.run_control import watch_run

    raise typer.Exit(watch_run(run, as_json=as_json))


@app.command()
@at_a_place
def retry(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's id or its first digits; without it the newest that did not complete.",
        ),
    ] = None,
    from_node: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="NODE", help="Also rerun this node and all that depends on it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be rerun and reused.")
    ] = False,
    handlers: Handlers = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Run again what did not complete.

    Outputs that are there are reused. Drives the run here and waits, with the exit codes of
    `dovetail run`; if another process still drives it, that one does, and this one follows.
    """
    from dovetail.cli.commands import run_control

    if dry_run:
        run_control.plan_retry(run, from_node, as_json=as_json)
        return
    raise typer.Exit(
        run_control.retry_run(run, from_node, handlers or [], detach=detach, as_json=as_json)
    )


@app.command()
@at_a_place
def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's id or its first digits; without it every interrupted run.",
        ),
    ] = None,
    handlers: Handlers = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Go on with runs whose process is gone.

    What completed is not run again. Drives them here and waits, with the exit codes of
    `dovetail run`.
    """
    from dovetail.cli.commands.run_control import resume_runs

    raise typer.Exit(resume_runs(run, handlers or [], detach=detach, as_json=as_json))


@app.command()
@at_a_place
def cancel(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's id or its first digits; without it the newest unfinished one.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Cancel what has not finished, whichever process drives it."""
    from dovetail.cli.commands.run_control import cancel_run

    cancel_run(run, as_json=as_json)


@app.command()
@at_a_place
def repair(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or its first digits.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the state of a damaged run from its own log.

    Exit code: 0 it is as its log says, 1 the log itself is damaged.
    """
    from dovetail.cli.commands.run_control import repair_run

    repair_run(run, dry_run=dry_run, as_json=as_json)


@app.command()
@at_a_place
def results(
    run: Run = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also of a run that has not ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the result of a run; --json: every output, too."""
    from dovetail.cli.commands.runs import print_results

    print_results(run, partial=partial, as_json=as_json)


@app.command()
@at_a_place
def events(
    run: Run = None,
    after: Annotated[
        int, typer.Option(metavar="SEQ", min=0, help="Only events after this number.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what happens, until the run's last event.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what has happened to a run so far.

    With --follow and --json each event is a line of its own.
    """
    from dovetail.cli.commands.runs import follow_events, list_events

    if follow:
        raise typer.Exit(follow_events(run, after, as_json=as_json))
    list_events(run, after, as_json=as_json)


@app.command()
@at_a_place
def verify(
    run: Run = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a run's stored events through the rules. Exit code: 0 they agree, 1 they do not."""
    from dovetail.cli.commands.runs import verify_runs

    raise typer.Exit(verify_runs(run, every=every, as_json=as_json))
