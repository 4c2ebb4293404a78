"""`dovetail workflows`: definitions kept under their names, with versions and aliases."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID
from dovetail.cli.files import File, report_of
from dovetail.cli.options import (
    AsJson,
    DefinitionFile,
    Handlers,
    WorkflowName,
    declarations,
    on_target,
)
from dovetail.cli.output import document_if, json_bytes, print_json
from dovetail.cli.summary import command
from dovetail.cli.target import ask, check_on_target, is_shared, target_settings
from dovetail.cli.text import Line, age, plain, table

if TYPE_CHECKING:
    from dovetail.core.definition.validation import Checked
    from dovetail.engine.api import EngineApi

app = declarations()


@app.command()
@on_target
def register(file: DefinitionFile, handlers: Handlers = None, as_json: AsJson = False) -> int:
    """Register a definition; changed content is a new version. Exit code: 0, or 2 invalid."""
    from dovetail.handlers.builtin import load_registry
    from dovetail.wiring.embedded import definition_limits

    settings = target_settings()
    with document_if(as_json) as write:  # loading handlers may print
        limits = definition_limits(settings)
        read = File(file, limits)
        checked = check_on_target(read, limits, load_registry(settings, handlers or ()))
        for line in report_of(read, checked):
            streams.complain(line)
        if checked.workflow is None:
            return INVALID
        registered = _register(checked)
        if write is not None:
            write(json_bytes(registered))
            return 0
    name = plain(registered["name"])
    outcome = "registered" if registered["created"] else "unchanged"
    streams.say([(f"{name} ", "bold"), (f"version {registered['version']}, {outcome}", "")])
    if registered["created"]:
        known = () if is_shared(settings) else handlers or ()
        typed = command("trigger", registered["name"], handlers=known)
        streams.say([("run it with:  ", "dim"), (typed, "bold")])
    return 0


def _register(checked: Checked) -> dict[str, Any]:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return (await commands.register(checked))._asdict()

    return ask(question, create=True)


@app.command("list")
@on_target
def list_workflows(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the registered workflows."""

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.workflows(limit=limit, cursor=cursor)

    page = ask(question)
    if as_json:
        print_json(page)
        return
    if not page["items"]:
        streams.say("no workflow is registered here; dovetail workflows register FILE does that")
        return
    now = time.time()
    head: Line = [(name, "dim") for name in ("NAME", "LATEST", "UPDATED", "ALIASES")]
    for line in table([head, *(_row(item, now) for item in page["items"])], streams.room()):
        streams.say(line)
    if page["next_cursor"]:
        streams.say([(f"more:  --cursor {page['next_cursor']}", "dim")])


def _row(item: dict[str, Any], now: float) -> Line:
    return [
        (plain(item["name"]), "bold"),
        (str(item["latest_version"]), ""),
        (age(item["updated_at"], now), ""),
        (_aliases(item["aliases"]), "dim"),
    ]


def _aliases(aliases: dict[str, int]) -> str:
    return ", ".join(f"{plain(name)} = {version}" for name, version in sorted(aliases.items()))


@app.command()
@on_target
def show(
    name: WorkflowName,
    version: Annotated[
        str | None, typer.Option(metavar="N", help="A version's number or alias; default: latest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the definition of a workflow as YAML."""
    import yaml

    wanted = int(version) if version is not None and version.isdecimal() else version

    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.workflow(name, wanted)

    found = ask(question)
    if as_json:
        print_json(found)
        return
    # As a comment, so that the output is a definition again.
    title = f"# {plain(found['name'])} version {found['version']}, registered {found['created_at']}"
    aliases = _aliases(found["aliases"])
    streams.say([(f"{title}; {aliases}" if aliases else title, "dim")])
    text = yaml.safe_dump(found["definition"], sort_keys=False, allow_unicode=False, width=100)
    for row in text.rstrip("\n").split("\n"):
        streams.say(row)


@app.command()
@on_target
def delete(name: WorkflowName, as_json: AsJson = False) -> None:
    """Delete a workflow with all its versions; its finished runs stay."""

    async def question(commands: EngineApi) -> None:
        await commands.delete_workflow(name)

    ask(question)
    if as_json:
        print_json({"name": name, "deleted": True})
        return
    streams.say([(f"{plain(name)} ", "bold"), ("deleted; its runs stay", "")])


@app.command()
@on_target
def alias(
    name: WorkflowName,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Such as prod.")],
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", min=1, help="A version's number.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Forget the alias; the version stays.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let an alias name a version, or forget the alias."""
    if delete == (version is not None):
        raise typer.BadParameter("give a version, or --delete")
    if version is None:
        _delete_alias(name, alias, as_json=as_json)
    else:
        _set_alias(name, alias, version, as_json=as_json)


def _set_alias(name: str, alias: str, version: int, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.set_alias(name, alias, version)

    answer = ask(question)
    if as_json:
        print_json(answer)
        return
    streams.say([(f"{plain(name)} ", "bold"), (f"{plain(alias)} = {version}", "")])


def _delete_alias(name: str, alias: str, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> None:
        await commands.delete_alias(name, alias)

    ask(question)
    if as_json:
        print_json({"name": name, "alias": alias, "deleted": True})
        return
    streams.say([(f"{plain(name)} ", "bold"), (f"{plain(alias)} deleted", "")])
