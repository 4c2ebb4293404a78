"""`dovetail validate`, `new` and `schema` for files of definitions; `dovetail workflows` for
registered ones, with their versions and aliases."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.commands.handlers import editor_handlers, local_editor_handlers
from dovetail.cli.files import STDIN, File, checked_file, report_of
from dovetail.cli.options import (
    AliasName,
    AsJson,
    Cursor,
    DefinitionFile,
    Handlers,
    Version,
    WorkflowName,
    declarations,
    number_or_alias,
    on_target,
)
from dovetail.cli.output import (
    INVALID,
    InvalidInput,
    document,
    document_if,
    json_bytes,
    print_error,
    print_history,
    print_lines,
    print_page,
    print_reply,
    say,
)
from dovetail.cli.summary import command
from dovetail.cli.target import (
    RemoteHandlers,
    ask,
    is_shared,
    load_file,
    target_settings,
)
from dovetail.cli.text import Line, age, counted, plain
from dovetail.core.errors import Problem, shown

if TYPE_CHECKING:
    from dovetail.core.definition.editor_schema import EditorHandler
    from dovetail.core.definition.validation import Checked

SCHEMA_FILE = "dovetail.schema.json"
"""What the first line of a new definition names, for the language servers of editors."""

app = declarations()

# As the model has it; importing the model to write a file would take longer than all the rest.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@app.command()
@on_target
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Definitions; - reads one from stdin.")
    ],
    handlers: Handlers = None,
    as_json: AsJson = False,
) -> int:
    """Report every problem of a definition, with its place. Exit code: 0 valid, 2 not."""
    if files.count(STDIN) > 1:
        raise InvalidInput("stdin can be read once; give - only once")
    with document_if(as_json) as write:
        checks = _Checks(handlers or ())
        if write is not None:
            found = _found_in(files, checks)
            write(json_bytes(found))
            return 0 if all(entry["valid"] for entry in found) else INVALID
    valid = sum(_is_valid(path, checks) for path in files)
    if len(files) > 1:
        streams.say(f"{valid:,} of {counted(len(files), 'file')} valid")
    return 0 if valid == len(files) else INVALID


class _Checks:
    """Checks with the handlers known here and, where needed, the handlers of workers."""

    def __init__(self, handlers: Sequence[str]) -> None:
        from dovetail.handlers.builtin import load_registry
        from dovetail.wiring.embedded import definition_limits

        settings = target_settings()
        self.limits = definition_limits(settings)
        self._registry = load_registry(settings, handlers)
        self._remote = RemoteHandlers(settings, self._registry)

    def of(self, file: File) -> Checked:
        return self._remote.corrected(file, checked_file(file, self.limits, self._registry))


def _is_valid(path: str, checks: _Checks) -> bool:
    try:
        file = File(path, checks.limits)
    except InvalidInput as error:
        print_error(str(error))
        return False
    checked = checks.of(file)
    print_lines(report_of(file, checked))
    if not checked.valid:
        return False
    nodes = counted(sum(map(len, checked.layers)), "node")
    layers = counted(len(checked.layers), "layer")
    warned = f", {counted(len(checked.warnings), 'warning')}" if checked.warnings else ""
    streams.say(
        [(f"{file.name}: ", "bold"), ("valid", "good"), (f", {nodes} in {layers}{warned}", "")]
    )
    return True


def _found_in(paths: Sequence[str], checks: _Checks) -> list[dict[str, Any]]:
    from dovetail.core.definition.validation import Checked

    found = []
    for path in paths:
        try:
            checked = checks.of(File(path, checks.limits))
        except InvalidInput as error:
            checked = Checked(None, (Problem("unreadable_file", str(error), ""),), (), [])
        found.append(
            {
                "file": path,
                "valid": checked.valid,
                "errors": [asdict(problem) for problem in checked.errors],
                "warnings": [asdict(problem) for problem in checked.warnings],
            }
        )
    return found


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the workflow is called.")],
) -> None:
    """Write NAME.dovetail.yaml, a commented workflow to start from.

    A NAME that ends in .yaml or .yml is the name of the file. The schema for editors, which the
    file names, is written beside it.
    """
    given = name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".dovetail")
    if not _NAME.fullmatch(given):
        raise InvalidInput(
            f"'{name}' cannot be a workflow's name: up to 128 letters, digits, dots, underscores "
            "and hyphens, the first a letter or a digit; it is written to the current directory"
        )
    path = Path(name if name.endswith((".yaml", ".yml")) else f"{given}.dovetail.yaml")
    text = resources("dovetail.cli").joinpath("starter.yaml").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("name: starter", f'name: "{given}"', 1))
    except FileExistsError:
        raise InvalidInput(f"{path} is there already; choose another name") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
    wrote = [("wrote ", ""), (str(path), "bold")]
    if _write_schema(Path(SCHEMA_FILE)):
        wrote += [(" and, for editors, ", ""), (SCHEMA_FILE, "bold")]
    say([*wrote, ("; now try", "")])
    say(f"  dovetail validate {path}")
    say(f"  dovetail run {path} -p topic=otters")


def _write_schema(path: Path) -> bool:
    """Whether it was written; one that is there may have handlers of the user."""
    from dovetail.config import Settings
    from dovetail.handlers.builtin import builtin_registry

    try:
        with path.open("xb") as file:
            file.write(_schema_text(local_editor_handlers(builtin_registry(Settings()))))
    except FileExistsError:
        return False
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
    return True


def _schema_text(handlers: Iterable[EditorHandler]) -> bytes:
    from dovetail.core.definition.editor_schema import add_handlers
    from dovetail.core.definition.model import definition_schema

    found = definition_schema()
    add_handlers(found, handlers)
    # ASCII, so that a redirect gives the same file whatever the locale is.
    return json.dumps(found, indent=2).encode() + b"\n"


@app.command()
@on_target
def schema(handlers: Handlers = None) -> None:
    """Print the JSON Schema of a definition, for editors, with the configs of known handlers."""
    with document() as write:  # loading handlers may print
        write(_schema_text(editor_handlers(handlers or ())))


# --- registered workflows ----------------------------------------------------------------------


@app.command()
@on_target
def register(file: DefinitionFile, handlers: Handlers = None, as_json: AsJson = False) -> int:
    """Register a definition; changed content is a new version. Exit code: 0, or 2 invalid."""
    with document_if(as_json) as write:  # loading handlers may print
        settings, _, _, checked = load_file(file, handlers or ())
        if checked.workflow is None:
            return INVALID
        registered = ask(lambda commands: commands.register(checked), create=True)._asdict()
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


@app.command("list")
@on_target
def list_workflows(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List the registered workflows."""
    print_page(
        ask(lambda commands: commands.workflows(limit=limit, cursor=cursor)),
        ("NAME", "LATEST", "UPDATED", "ALIASES"),
        _row,
        empty="no workflow is registered here; dovetail workflows register FILE does that",
        as_json=as_json,
    )


def _row(item: dict[str, Any]) -> Line:
    return [
        (plain(item["name"]), "bold"),
        (str(item["latest_version"]), ""),
        (age(item["updated_at"], time.time()), ""),
        (_aliases(item["aliases"]), "dim"),
    ]


def _aliases(aliases: dict[str, Any]) -> str:
    return ", ".join(
        f"{plain(name)} = {_named(target)}" for name, target in sorted(aliases.items())
    )


def _named(target: Any) -> str:
    """A version's number, or the weights of several as they are typed."""
    if not isinstance(target, dict):
        return str(target)
    return " ".join(f"{version}={weight:g}" for version, weight in target.items())


@app.command()
@on_target
def show(name: WorkflowName, version: Version = None, as_json: AsJson = False) -> None:
    """Print the definition of a workflow as YAML."""
    found = ask(lambda commands: commands.workflow(name, number_or_alias(version)))
    print_reply(found, _definition_lines, as_json=as_json)


def _definition_lines(found: dict[str, Any]) -> Iterator[Line | str]:
    from dovetail.core.definition.yaml_text import yaml_text

    # As a comment, so that the output is a definition again.
    title = f"# {plain(found['name'])} version {found['version']}, registered {found['created_at']}"
    aliases = _aliases(found["aliases"])
    yield [(f"{title}; {aliases}" if aliases else title, "dim")]
    yield from yaml_text(found["definition"], ascii_only=True).rstrip("\n").split("\n")


@app.command()
@on_target
def diff(
    name: WorkflowName,
    from_version: Annotated[
        str, typer.Argument(metavar="FROM", help="A version's number, or an alias.")
    ],
    to_version: Annotated[
        str, typer.Argument(metavar="TO", help="Another one; without it the latest.")
    ] = "latest",
    as_json: AsJson = False,
) -> None:
    """Print what one version of a workflow has that another has not."""
    versions = number_or_alias(from_version), number_or_alias(to_version)
    found = ask(lambda commands: commands.diff_workflow(name, *versions))
    print_reply(found, _diff_lines, as_json=as_json)


def _diff_lines(found: dict[str, Any]) -> Iterator[Line | str]:
    if not any(found.values()):
        yield "no difference"
    yield from _field_lines("", found["workflow"])
    yield from ([(f"- {plain(name)}", "bad")] for name in found["removed"])
    yield from ([(f"+ {plain(name)}", "good")] for name in found["added"])
    for node in found["changed"]:
        yield [(f"~ {plain(node['id'])}", "bold")]
        yield from _field_lines("    ", node["fields"])


def _field_lines(indent: str, fields: dict[str, dict[str, Any]]) -> Iterator[Line]:
    for name, change in fields.items():
        old, new = (plain(json.dumps(change[end], ensure_ascii=False)) for end in ("from", "to"))
        yield [(f"{indent}{plain(name)}: ", ""), (old, "bad"), (" → ", "dim"), (new, "good")]


@app.command()
@on_target
def delete(
    name: WorkflowName,
    version: Annotated[
        str | None, typer.Option(metavar="N", help="Only this version, by its number.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete a workflow, or one version of it.

    Its finished runs stay.
    """
    if version is None:
        ask(lambda commands: commands.delete_workflow(name))
        reply: dict[str, Any] = {"name": name, "deleted": True}
        _print_done(name, "deleted; its runs stay", reply, as_json=as_json)
        return
    number = number_or_alias(version)
    assert number is not None  # noqa: S101
    ask(lambda commands: commands.delete_version(name, number))
    reply = {"name": name, "version": number, "deleted": True}
    _print_done(name, f"version {number} deleted; its runs stay", reply, as_json=as_json)


@app.command()
@on_target
def history(
    name: WorkflowName,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List what was done to a workflow, when and by whom.

    The history of a deleted workflow stays.
    """
    page = ask(lambda commands: commands.workflow_history(name, limit=limit, cursor=cursor))
    print_history(page, as_json=as_json)


@app.command()
@on_target
def alias(
    name: WorkflowName,
    alias: AliasName,
    version: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VERSION",
            help="A version's number, or weights of versions, as in 3=90 4=10.",
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="As `unalias`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let an alias name a version, or weights of versions.

    Weights divide the runs that are triggered by the alias between the versions.
    """
    if delete == bool(version):
        raise typer.BadParameter("give a version, or --delete")
    if delete:
        _forget(name, alias, as_json=as_json)
        return
    target = _target(version or ())
    reply = ask(lambda commands: commands.set_alias(name, alias, target))
    _print_done(name, f"{plain(alias)} = {_named(target)}", reply, as_json=as_json)


@app.command()
@on_target
def unalias(name: WorkflowName, alias: AliasName, as_json: AsJson = False) -> None:
    """Forget an alias; the version stays."""
    _forget(name, alias, as_json=as_json)


def _forget(name: str, alias: str, *, as_json: bool) -> None:
    ask(lambda commands: commands.delete_alias(name, alias))
    reply = {"name": name, "alias": alias, "deleted": True}
    _print_done(name, f"{plain(alias)} deleted", reply, as_json=as_json)


def _target(words: Sequence[str]) -> int | dict[str, float]:
    """`3`, or `3=90 4=10`."""
    if len(words) == 1 and words[0].isdecimal() and int(words[0]):
        return int(words[0])
    weights: dict[str, float] = {}
    for word in words:
        version, equals, weight = word.partition("=")
        if not equals or version in weights:
            raise typer.BadParameter(
                f"{shown(word)}: give a version's number, or a weight for each, as in 3=90 4=10"
            )
        try:
            weights[version] = float(weight)
        except ValueError:
            raise typer.BadParameter(f"{shown(word)}: {shown(weight)} is no number") from None
    return weights


def _print_done(name: str, words: str, reply: dict[str, Any], *, as_json: bool) -> None:
    print_reply(reply, lambda _: [[(f"{plain(name)} ", "bold"), (words, "")]], as_json=as_json)
