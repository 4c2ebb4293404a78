"""`dovetail validate`, `new` and `schema`: definitions before they are run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID, InvalidInput, print_error
from dovetail.cli.files import STDIN, File, checked_file, report_of
from dovetail.cli.options import AsJson, Handlers, declarations, on_target
from dovetail.cli.output import json_bytes, say
from dovetail.cli.target import RemoteHandlers, target_settings
from dovetail.cli.text import counted
from dovetail.core.errors import Problem

if TYPE_CHECKING:
    from dovetail.core.definition.validation import Checked

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
    if as_json:
        with streams.document() as write:
            found = _found_in(files, _Checks(handlers or ()))
            write(json_bytes(found))
        return 0 if all(entry["valid"] for entry in found) else INVALID
    checks = _Checks(handlers or ())
    valid = sum(_is_valid(path, checks) for path in files)
    if len(files) > 1:
        streams.say(f"{valid:,} of {counted(len(files), 'file')} valid")
    return 0 if valid == len(files) else INVALID


class _Checks:
    """Checks with the handlers known here and, where needed, those that workers announced."""

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
    for line in report_of(file, checked):
        streams.say(line)
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
    """Write NAME.yaml, a commented workflow to start from."""
    given = name.removesuffix(".yaml").removesuffix(".yml")
    if not _NAME.fullmatch(given):
        raise InvalidInput(
            f"'{name}' cannot be a workflow's name: up to 128 letters, digits, dots, underscores "
            "and hyphens, the first a letter or a digit; it is written to the current directory"
        )
    path = Path(f"{given}.yaml")
    text = resources("dovetail.cli").joinpath("starter.yaml").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("name: starter", f'name: "{given}"', 1))
    except FileExistsError:
        raise InvalidInput(f"{path} is there already; choose another name") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
    say([("wrote ", ""), (str(path), "bold"), ("; now try", "")])
    say(f"  dovetail validate {path}")
    say(f"  dovetail run {path} -p topic=otters")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a definition, for editors."""
    from dovetail.core.definition.model import definition_schema

    # ASCII, so that a redirect gives the same file whatever the locale is.
    say(json.dumps(definition_schema(), indent=2))
