"""What callers hand over, checked before it goes further.

Of the wrong Python type: `TypeError`. Of the right one but impossible, as a text that cannot be
written or a number that no store can hold: an error of ours, like any other bad input. What it
must not know: what the values are for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dovetail.core.errors import DovetailError, InvalidParams, Problem
from dovetail.core.findings import shown

_HOST = re.compile(r"[\w.\-\[\]:%]+")
MOST = (1 << 63) - 1
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
    if not least <= given <= MOST:
        raise _wrong(name, f"must be from {least} to {MOST}, not {given}")
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
