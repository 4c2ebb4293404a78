"""`dovetail new`: a commented workflow to start from."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from dovetail.cli.failures import InvalidInput
from dovetail.cli.output import say

# As the model has it; importing the model to write a file would take longer than all the rest.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def write_starter(name: str) -> None:
    """Write `<name>.yaml` here; an existing file is never touched."""
    given = name.removesuffix(".yaml").removesuffix(".yml")
    if not _NAME.fullmatch(given):
        raise InvalidInput(
            f"'{name}' cannot be a workflow's name: up to 128 letters, digits, dots, underscores "
            "and hyphens, the first a letter or a digit; it is written to the current directory"
        )
    path = Path(f"{given}.yaml")
    text = files("dovetail.cli").joinpath("starter.yaml").read_text("utf-8")
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
