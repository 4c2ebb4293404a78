"""What a caller means by a workflow: a definition as data, a file of one, or a registered name.

It reads files, within bounds, and says in one line why one cannot be read. What it must not
know: what makes a definition right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from dovetail.client.arguments import text
from dovetail.core.definition.source import Source, read_text
from dovetail.core.definition.validation import Limits
from dovetail.core.errors import DovetailError, NotFound
from dovetail.core.findings import shown

Workflow = Mapping[str, Any] | str | PathLike[str]

FORMATS: dict[str, Literal["yaml", "json"]] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
_WAYS = "a dict, a path (.yaml .yml .json) or the name of a registered workflow"


async def meant_by(workflow: Workflow, limits: Limits) -> Mapping[str, Any] | Source | str:
    """The definition, as data or with its text; a `str` is a registered workflow's name.

    Raises `NotFound` for a file that is not there, `InvalidDefinition` for a text that is
    neither YAML nor JSON.
    """
    if isinstance(workflow, Mapping):
        return workflow
    if isinstance(workflow, str):
        if Path(text("workflow", workflow)).suffix.lower() not in FORMATS:
            return workflow
    elif not isinstance(workflow, PathLike):
        raise TypeError(f"a workflow is {_WAYS}, not {type(workflow).__name__}")
    # Elsewhere: a large text takes a second to parse, and the runs of this process go on.
    return await asyncio.to_thread(_read, Path(workflow), limits)


async def definition_meant_by(definition: Workflow, limits: Limits) -> Mapping[str, Any] | Source:
    """The same where a name alone will not do."""
    found = await meant_by(definition, limits)
    if isinstance(found, str):
        raise DovetailError(
            f"{shown(found)} is no definition; give a dict or a path (.yaml .yml .json)"
        )
    return found


def _read(path: Path, limits: Limits) -> Source:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise DovetailError(f"{path} is no definition; its name ends in .yaml, .yml or .json")
    try:
        with path.open("rb") as file:
            content = file.read(limits.max_body_bytes + 1)  # one more: it is then too large
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}{_did_you_mean(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = error.strerror if isinstance(error, OSError) else None
        raise DovetailError(f"{path} cannot be read: {why or error}") from None
    return read_text(
        content,
        format=form,
        name=str(path),
        max_bytes=limits.max_body_bytes,
        max_depth=limits.max_depth,
    )


def _did_you_mean(path: Path) -> str:
    """A neighbour with nearly that name: flow.yml for flow.yaml."""
    try:
        names = [found.name for found in path.parent.iterdir() if found.suffix in FORMATS]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""
