"""`dovetail runs list|show|why|events|results|verify`: read runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.cli import output as streams
from dovetail.cli.board import LONGEST_ID, Board, NodeRow, id_width, row_line
from dovetail.cli.node_report import failure_lines, item_lines, node_lines
from dovetail.cli.options import AsJson, Cursor, Run, declarations, on_target
from dovetail.cli.output import (
    FAILED,
    headed,
    json_text,
    next_page,
    print_answer,
    print_reply,
)
from dovetail.cli.summary import (
    INTERRUPTED,
    allowed_failures,
    causes,
    command,
    error_words,
    fork_hint,
    interrupted,
    result_lines,
    resume_hint,
    retry_hint,
    seconds_taken,
    short_id,
    status_piece,
)
from dovetail.cli.target import (
    ask,
    chosen_run,
    drivers,
    handlers_hint,
    target_settings,
)
from dovetail.cli.text import Line, age, clip, counted, duration, plain, printable, seconds, table
from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.items import split_name
from dovetail.core.states import RunStatus

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi
    from dovetail.engine.views import RunDetail

MAX_ROWS = 100
"""Nodes of one run on a screen; all of them are in `--json`."""
_PAGE = 500
MAX_DAMAGE = 5

app = declarations()


# ── list ─────────────────────────────────────────────────────────────────────────────────


@app.command("list")
@on_target
def list_runs(
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
    search: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Only runs with this beginning of an id, part of a workflow's name, or value "
            "among their params.",
        ),
    ] = None,
    created_after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 2026-11-18T08:00:00Z.")
    ] = None,
    created_before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 2026-11-18T09:00:00+01:00.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    from dataclasses import replace

    from dovetail.engine.ports import RunQuery

    searched: dict[str, Any] = {
        "q": search,
        "created_after": created_after,
        "created_before": created_before,
    }

    async def question(commands: EngineApi) -> tuple[dict[str, Any], set[str], set[str]]:
        whole = None if batch is None else await commands.find_batch(batch)
        query = RunQuery(status, workflow, whole, limit, cursor, **searched)
        page = await commands.list_runs(query)
        items = page["items"]
        # A page of a search may be short or empty though another follows.
        while any(searched.values()) and page["next_cursor"] and len(items) < limit:
            rest = replace(query, limit=limit - len(items), cursor=page["next_cursor"])
            page = await commands.list_runs(rest)
            items += page["items"]
        page = {**page, "items": items}
        undriven = set() if as_json else await _undriven(commands, page["items"])
        unread = {run_id for run_id in undriven if not await _can_be_read(commands, run_id)}
        return page, undriven - unread, unread

    page, undriven, unread = ask(question)
    is_filtered = any([status, workflow, batch, *searched.values()])
    empty = "no such run here" if is_filtered else "no run here yet"
    print_reply(page, lambda page: _page(page, undriven, unread, empty), as_json=as_json)


def _page(
    page: dict[str, Any], undriven: set[str], unread: set[str], empty: str
) -> Iterator[Line | str]:
    if not page["items"]:
        yield empty
        return
    notes = dict.fromkeys(undriven, INTERRUPTED)
    notes |= dict.fromkeys(unread, "damaged: it cannot be read")
    rows = (_list_row(run, notes.get(run["run_id"])) for run in page["items"])
    yield from map(_fitted, headed(("RUN", "STATUS", "WORKFLOW", "CREATED", "TOOK", ""), rows))
    if undriven:
        of_these = " of these" if page["next_cursor"] else ""
        words = f"{interrupted(len(undriven), of_these)}: "
        yield [(words, "wait"), (command("runs", "resume"), "bold")]
    yield from next_page(page)


async def _undriven(commands: EngineApi, items: Iterable[dict[str, Any]]) -> set[str]:
    if target_settings().server is not None:
        return set()  # the server takes over runs that no process drives
    return {
        run["run_id"]
        for run in items
        if run["finished_at"] is None and await commands.owner(run["run_id"]) == "gone"
    }


async def _can_be_read(commands: EngineApi, run_id: str) -> bool:
    try:
        await commands.get_run(run_id, nodes=False)
    except BrokenRun:
        return False
    return True


def _list_row(run: dict[str, Any], note: str | None) -> Line:
    version = "" if run["version"] is None else f" v{run['version']}"
    took = "" if run["duration"] is None else duration(run["duration"])
    last = (_error_note(run["error"]), "dim") if note is None else (note, "wait")
    return [
        (run["run_id"][:6], "bold"),
        status_piece(run["status"]),
        (clip(plain(run["workflow"]), LONGEST_ID) + version, ""),
        (age(run["created_at"], time.time()), ""),
        (took, ""),
        last,
    ]


def _error_note(error: dict[str, Any] | None) -> str:
    if error is None:
        return ""
    node = str(error.get("node", ""))
    return plain(f"{clip(node, LONGEST_ID)}: {error_words(node, error)}")


def _fitted(line: Line) -> Line:
    """The last column may be long; it is cut where the terminal ends."""
    *columns, (text, style) = line
    room = streams.width() - sum(len(column) for column, _ in columns)
    return [*columns, (clip(text, max(10, room)), style)]


# ── show ─────────────────────────────────────────────────────────────────────────────────


@app.command()
@on_target
def show(
    run: Run = None,
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE",
            help="Only this node: config, inputs, attempts, log; or 'NODE[3]', one item of it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run and what failed in it, or one of its nodes or items."""

    async def question(commands: EngineApi) -> dict[str, Any] | list[Line]:
        run_id = await chosen_run(commands, run)
        if node is not None and split_name(node)[1] is not None:
            found = await _item(commands, run_id, node)
            if as_json:
                return found
            short = await short_id(commands, run_id)
            return await item_lines(commands, run_id, split_name(node)[0], found, short)
        if node is not None:
            detail = await commands.node_detail(run_id, node)
            short = await short_id(commands, run_id)
            return detail if as_json else await node_lines(commands, run_id, detail, short)
        if as_json:
            return await commands.get_run(run_id)
        return await _shown(commands, await commands.snapshot(run_id))

    print_answer(ask(question))


async def _item(commands: EngineApi, run_id: str, name: str) -> dict[str, Any]:
    node, item = split_name(name)
    with suppress(NotFound):
        page = await commands.node_items(run_id, node, limit=1, cursor=str(item))
        if page["items"]:
            return dict(page["items"][0])
    return await commands.node_detail(run_id, name)  # raises, with words about what is wrong


async def _shown(commands: EngineApi, snapshot: RunDetail) -> list[Line]:
    now = time.time()
    run = snapshot.view
    run_id = run["run_id"]
    short = await short_id(commands, run_id)
    owner = await commands.owner(run_id)
    created = f"{age(run['created_at'], now)}, {run['created_at']}"
    facts = [("id", run_id), ("created", created), ("took", _took(run, now))]
    if run["forked_from"] is not None:
        facts.append(("forked from", run["forked_from"]))
    if owner in ("here", "elsewhere"):
        facts.append(("driven by", drivers(target_settings())))
    if params := run["params"]:
        facts.append(("params", clip(printable(json.dumps(params, ensure_ascii=False)), 500)))
    lines: list[Line] = [
        [*_title(run), (f", epoch {run['epoch']}" if run["epoch"] > 1 else "", "")]
    ]
    lines += _damage_lines(await commands.damage(run_id), short)
    lines += table([[(f"  {name}", "dim"), (value, "")] for name, value in facts])
    lines += _rows(Board.now(snapshot), now)
    if run["status"] == RunStatus.COMPLETED:
        lines += (*result_lines(run["result"]), *allowed_failures(run))
    elif run["status"] == RunStatus.FAILED:
        lines += (*causes(run), *await failure_lines(commands, run, short))
    return lines + await _next_step(commands, run, owner, short)


def _damage_lines(damage: Sequence[str], short: str) -> Iterator[Line]:
    """How the run's state is damaged, and the commands that rebuild or end it."""
    for sentence in damage[:MAX_DAMAGE]:
        yield [("  damaged: ", "bad"), (plain(sentence), "")]
    if len(damage) > MAX_DAMAGE:
        yield [(f"  and {len(damage) - MAX_DAMAGE:,} more; runs verify tells all", "dim")]
    if damage:
        yield [("  rebuild it:  ", "dim"), (command("runs", "repair", short), "bold")]
        yield [("  or end it:  ", "dim"), (command("runs", "cancel", short), "bold")]


def _title(run: dict[str, Any]) -> Line:
    version = "" if run["version"] is None else f" version {run['version']}"
    name = f" {run['run_id'][:6]} {plain(run['workflow'])}{version}"
    return [status_piece(run["status"]), (name, "")]


def _took(run: dict[str, Any], now: float) -> str:
    if run["finished_at"] is not None:
        return duration(seconds_taken(run))
    return f"{duration(now - seconds(run['created_at']))} so far"


def _rows(board: Board, now: float) -> Iterator[Line]:
    """All nodes; of a large run only the nodes that failed, run or wait for a time."""
    rows: Iterable[NodeRow] = board.rows
    if len(board.rows) > MAX_ROWS:
        telling = chain(board.failed.values(), board.running.values(), board.delayed.values())
        rows = islice(telling, MAX_ROWS)
    ids = id_width(board.rows)
    shown = 0
    for row in rows:
        yield row_line(row, ids, now)
        shown += 1
    if shown < len(board.rows):
        counts = ", ".join(f"{n:,} {status.lower()}" for status, n in board.counts.items() if n)
        yield [(f"{counted(len(board.rows), 'node')}: {counts}; --json prints all", "dim")]


async def _next_step(
    commands: EngineApi, run: dict[str, Any], owner: str, short: str
) -> list[Line]:
    if owner == "gone":
        return [[(f"{INTERRUPTED}; ", "wait"), *resume_hint(short, handlers_hint(run))]]
    if run["finished_at"] is not None and run["status"] != RunStatus.COMPLETED:
        handlers = handlers_hint(run)
        hint = await retry_hint(commands, run, short, handlers)
        return [*fork_hint(run, short, None, handlers), hint]
    return []


# ── why ──────────────────────────────────────────────────────────────────────────────────


@app.command()
@on_target
def why(run: Run = None, as_json: AsJson = False) -> None:
    """Explain what each unfinished node waits for."""

    async def question(commands: EngineApi) -> dict[str, Any] | list[Line]:
        run_id = await chosen_run(commands, run)
        explained = await commands.explain(run_id)
        if as_json:
            return explained
        loaded = await commands.get_run(run_id)
        short = await short_id(commands, run_id)
        lines = await _explained(commands, loaded, explained["nodes"], short)
        return [*lines, *_damage_lines(explained.get("damage", ()), short)]

    print_answer(ask(question))


async def _explained(
    commands: EngineApi, run: dict[str, Any], nodes: list[dict[str, Any]], short: str
) -> list[Line]:
    from dovetail.engine.explain import counts

    found = counts(run["nodes"])
    every = counted(len(run["nodes"]), "node")
    completed = f"{found.pop('completed', 0):,} of {every} completed"
    words = ", ".join([completed, *(f"{count:,} {word}" for word, count in found.items())])
    rows: list[Line] = [
        [
            (f"  {clip(node['id'], LONGEST_ID)}", "bold"),
            (node["status"], ""),
            (plain(node["why"]), ""),
        ]
        for node in nodes[:MAX_ROWS]
    ]
    lines: list[Line] = [[*_title(run), (f": {words}", "")], *table(rows)]
    if len(nodes) > MAX_ROWS:
        lines.append([(f"  and {len(nodes) - MAX_ROWS:,} more; --json prints all", "dim")])
    if run["status"] == RunStatus.FAILED:
        lines += causes(run)
    elif not nodes:
        lines.append([("  nothing waits: every node has finished", "dim")])
    owner = await commands.owner(run["run_id"])
    return lines + await _next_step(commands, run, owner, short)


# ── events, results ──────────────────────────────────────────────────────────────────────


@app.command()
@on_target
def events(
    run: Run = None,
    after: Annotated[
        int, typer.Option(metavar="SEQ", min=0, help="Only events after this number.")
    ] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what happens, until the run's last event.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List what has happened to a run so far.

    With --follow and --json each event is a line of its own.
    """
    if follow:
        from dovetail.cli.following import follow_run

        return follow_run(
            run, lambda commands, run_id: _print_events(commands, run_id, after, as_json=as_json)
        )

    async def question(commands: EngineApi) -> list[dict[str, Any]]:
        return await commands.events(await chosen_run(commands, run), after=after)

    print_reply(ask(question), _event_lines, as_json=as_json)
    return 0


def _event_lines(found: list[dict[str, Any]]) -> Iterator[Line]:
    width = len(str(found[-1]["seq"])) if found else 0
    return (_event_line(event, width) for event in found)


async def _print_events(commands: EngineApi, run_id: str, after: int, *, as_json: bool) -> None:
    async for event in commands.watch(run_id, after):
        streams.say(json_text(event) if as_json else _event_line(event, _SEQ_WIDTH))
        sys.stdout.flush()


_SEQ_WIDTH = 4
_IN_THE_LINE = ("seq", "time", "type", "epoch", "node", "attempt")
_TYPE_WIDTH = len("node.completed")


def _event_line(event: dict[str, Any], width: int) -> Line:
    rest = {name: value for name, value in event.items() if name not in _IN_THE_LINE}
    data = f"  {printable(json.dumps(rest, ensure_ascii=False))}" if rest else ""
    # To the millisecond: an event is looked for by eye, and the log has the rest.
    when = f"{event['time'][:-4]}Z"
    node = f"  {event['node']}" if "node" in event else ""
    attempt = f" #{event['attempt']}" if event.get("attempt") else ""
    return [
        (f"{event['seq']:>{width}}  {when}  ", "dim"),
        (event["type"].ljust(_TYPE_WIDTH if node else 0), ""),
        (node, "bold"),
        (attempt, "dim"),
        (clip(data, 500), "dim"),
    ]


@app.command()
@on_target
def results(
    run: Run = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also of a run that has not ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the result of a run; --json: every output, too."""

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.results(await chosen_run(commands, run), partial=partial)

    print_reply(ask(question), _result_lines, as_json=as_json)


def _result_lines(found: dict[str, Any]) -> Iterator[str]:
    # The result of a run that did not complete is incomplete; its outputs are all there is.
    whole = found["status"] == RunStatus.COMPLETED
    if not whole:
        streams.complain([status_piece(found["status"]), (": the outputs that are there", "dim")])
    value = found["result" if whole else "outputs"]
    yield printable(json.dumps(value, indent=2, ensure_ascii=False))


# ── verify ───────────────────────────────────────────────────────────────────────────────


@app.command()
@on_target
def verify(
    run: Run = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every run.")] = False,
    as_json: AsJson = False,
) -> int:
    """Replay a run's stored events through the rules. Exit code: 0 they agree, 1 they do not."""

    async def question(commands: EngineApi) -> list[dict[str, Any]]:
        if not every:
            run_id = await chosen_run(commands, run)
            return [{"run_id": run_id, "divergences": await commands.verify(run_id)}]
        return [
            {"run_id": run_id, "divergences": await commands.verify(run_id)}
            async for run_id in _every_run(commands)
        ]

    verified = ask(question)
    print_reply({"items": verified}, _verified_lines, as_json=as_json)
    return FAILED if any(one["divergences"] for one in verified) else 0


def _verified_lines(verified: dict[str, Any]) -> Iterator[Line | str]:
    items = verified["items"]
    wrong = [one for one in items if one["divergences"]]
    for one in wrong:
        yield [(one["run_id"][:6], "bold"), (": diverges from the rules", "bad")]
        for sentence in one["divergences"]:
            yield f"  {plain(sentence)}"
    good = len(items) - len(wrong)
    if good or not items:
        obeys = "obeys" if good == 1 else "obey"
        yield [(f"{counted(good, 'run')} {obeys} the rules", "good")]


async def _every_run(commands: EngineApi) -> AsyncIterator[str]:
    from dovetail.engine.ports import RunQuery

    cursor: str | None = None
    while True:
        page = await commands.list_runs(RunQuery(limit=_PAGE, cursor=cursor))
        for run in page["items"]:
            yield run["run_id"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
