"""`dovetail workflows`: definitions kept under their names, with versions and aliases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import yaml

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID
from dovetail.cli.files import File, report_of
from dovetail.cli.output import document_if, json_bytes, print_json
from dovetail.cli.summary import command
from dovetail.cli.target import ask, checked_for_this_place, is_shared, settings_of_this_place
from dovetail.cli.text import Line, age, plain, table
from dovetail.core.definition.validation import Checked
from dovetail.engine.api import EngineApi
from dovetail.handlers.builtin import load_registry
from dovetail.wiring.embedded import definition_limits


def register_file(path: str, handlers: Sequence[str], *, as_json: bool) -> int:
    settings = settings_of_this_place()
    with document_if(as_json) as write:  # loading handlers may print
        limits = definition_limits(settings)
        file = File(path, limits)
        checked = checked_for_this_place(file, limits, load_registry(settings, handlers))
        for line in report_of(file, checked):
            streams.complain(line)
        if checked.workflow is None:
            return INVALID
        registered = _register(checked)
        if write is not None:
            write(json_bytes(registered))
            return 0
    name = plain(registered["name"])
    said = "registered" if registered["created"] else "unchanged"
    streams.say([(f"{name} ", "bold"), (f"version {registered['version']}, {said}", "")])
    if registered["created"]:
        known = () if is_shared(settings) else handlers
        typed = command("trigger", registered["name"], handlers=known)
        streams.say([("run it with:  ", "dim"), (typed, "bold")])
    return 0


def _register(checked: Checked) -> dict[str, Any]:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return (await commands.register(checked))._asdict()

    return ask(question, keeps=True)


def list_workflows(limit: int, cursor: str | None, *, as_json: bool) -> None:
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


def show_workflow(name: str, version: str | None, *, as_json: bool) -> None:
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


def delete_workflow(name: str, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> None:
        await commands.delete_workflow(name)

    ask(question)
    if as_json:
        print_json({"name": name, "deleted": True})
        return
    streams.say([(f"{plain(name)} ", "bold"), ("deleted; its runs stay", "")])


def set_alias(name: str, alias: str, version: int, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.set_alias(name, alias, version)

    answer = ask(question)
    if as_json:
        print_json(answer)
        return
    streams.say([(f"{plain(name)} ", "bold"), (f"{plain(alias)} = {version}", "")])


def delete_alias(name: str, alias: str, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> None:
        await commands.delete_alias(name, alias)

    ask(question)
    if as_json:
        print_json({"name": name, "alias": alias, "deleted": True})
        return
    streams.say([(f"{plain(name)} ", "bold"), (f"{plain(alias)} deleted", "")])
