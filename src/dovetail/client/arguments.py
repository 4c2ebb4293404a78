"""The arguments of callers, checked before they go further.

A wrong Python type is a `TypeError`. A value that is impossible, such as a number that no store can
hold, is an error of ours. A workflow is a definition as data, a file of one, or a registered name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dovetail.core.definition.source import Source, read_text
from dovetail.core.definition.validation import DefinitionLimits
from dovetail.core.errors import DovetailError, InvalidParams, NotFound, Problem, shown

_HOST = re.compile(r"[\w.\-\[\]:%]+")
MAX_INTEGER = (1 << 63) - 1
"""What a column of SQLite holds."""


def text(name: str, given: str) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{name} is a str, not {type(given).__name__}")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise _wrong(name, "contains a lone surrogate, which is no valid text") from None
    return given


def text_or_none(name: str, given: str | None) -> str | None:
    return None if given is None else text(name, given)


def whole_number(name: str, given: int, *, least: int = 0) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} is an int, not {type(given).__name__}")
    if not least <= given <= MAX_INTEGER:
        raise _wrong(name, f"must be from {least} to {MAX_INTEGER}, not {given}")
    return given


def version_or_none(name: str, given: int | str | None) -> int | str | None:
    """A number or an alias."""
    if isinstance(given, int):
        return whole_number(name, given)
    return text_or_none(name, given)


def seconds_or_none(name: str, given: float | None) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{name} is a number of seconds or None, not {type(given).__name__}")
    if not given >= 0:  # so that NaN fails too
        raise _wrong(name, f"must be a number of seconds ≥ 0 or None, not {given}")
    return given


def params_or_none(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is not None and not isinstance(given, Mapping):
        raise _wrong("params", f"must be a JSON object, not {shown(given)}")
    return None if given is None else dict(given)


def server_url(given: str) -> str:
    """A server's address, without a slash at its end. No message quotes what may be a password."""
    try:
        parts = urlsplit(given)
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError:
        raise no_address() from None
    if parts.scheme not in ("http", "https") or not host or not _HOST.fullmatch(parts.netloc):
        if "@" in parts.netloc:
            raise DovetailError(
                "a server's address has no user and password; a token is given as token=…"
            )
        raise no_address()
    if parts.query or parts.fragment:
        raise DovetailError("a server's address ends before ? and #, as in http://host:8700")
    return given.rstrip("/")


def no_address() -> DovetailError:
    return DovetailError("the server's address cannot be read; write it as http://host:8700")


def _wrong(name: str, message: str) -> InvalidParams:
    return InvalidParams([Problem("invalid_field", message, name)])


Workflow = Mapping[str, Any] | str | PathLike[str]

FORMATS: dict[str, Literal["yaml", "json"]] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
_WAYS = "a dict, a path (.yaml .yml .json) or the name of a registered workflow"


async def meant_by(
    workflow: Workflow, limits: DefinitionLimits
) -> Mapping[str, Any] | Source | str:
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
    return await asyncio.to_thread(read_definition, Path(workflow), limits)


async def definition_meant_by(
    definition: Workflow, limits: DefinitionLimits
) -> Mapping[str, Any] | Source:
    """The same where a name alone will not do."""
    found = await meant_by(definition, limits)
    if isinstance(found, str):
        raise DovetailError(
            f"{shown(found)} is no definition; give a dict or a path (.yaml .yml .json)"
        )
    return found


def read_definition(path: Path, limits: DefinitionLimits) -> Source:
    """The definition in a file. Raises as `meant_by`."""
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
