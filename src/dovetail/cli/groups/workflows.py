"""`dovetail workflows …`: the names, arguments and help texts; what they do is in `commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.options import AsJson, DefinitionFile, Handlers, WorkflowName, at_a_place, group

app = group("workflows", "Register workflows under their names, with versions.")


@app.command()
@at_a_place
def register(file: DefinitionFile, handlers: Handlers = None, as_json: AsJson = False) -> None:
    """Register a definition; changed content is a new version. Exit code: 0, or 2 invalid."""
    from dovetail.cli.commands.workflows import register_file

    raise typer.Exit(register_file(file, handlers or [], as_json=as_json))


@app.command("list")
@at_a_place
def list_(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    cursor: Annotated[
        str | None, typer.Option(metavar="C", help="Go on where an earlier list ended.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the registered workflows."""
    from dovetail.cli.commands.workflows import list_workflows

    list_workflows(limit, cursor, as_json=as_json)


@app.command()
@at_a_place
def show(
    name: WorkflowName,
    version: Annotated[
        str | None, typer.Option(metavar="N", help="A version's number or alias; default: latest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the definition of a workflow as YAML."""
    from dovetail.cli.commands.workflows import show_workflow

    show_workflow(name, version, as_json=as_json)


@app.command()
@at_a_place
def delete(name: WorkflowName, as_json: AsJson = False) -> None:
    """Delete a workflow with all its versions; its finished runs stay."""
    from dovetail.cli.commands.workflows import delete_workflow

    delete_workflow(name, as_json=as_json)


@app.command()
@at_a_place
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
    from dovetail.cli.commands.workflows import delete_alias, set_alias

    if delete == (version is not None):
        raise typer.BadParameter("give a version, or --delete")
    if version is None:
        delete_alias(name, alias, as_json=as_json)
    else:
        set_alias(name, alias, version, as_json=as_json)
