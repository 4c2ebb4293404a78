"""The log of a service as a test reads it."""

from __future__ import annotations

import re

_ATTEMPT = re.compile(
    r"^(?:\S+Z )?\S+: warning: attempt \d+ of node '.*\n(?:  \| .*\n?)*", re.MULTILINE
)
"""On a console; the log of a service has times."""
_AS_JSON = re.compile(r'^\{.*"logger":"dovetail\.attempts".*\n?', re.MULTILINE)


def without_attempts(log: str) -> str:
    """The log without the records of failed attempts: each has the traceback of a handler."""
    return _AS_JSON.sub("", _ATTEMPT.sub("", log))
