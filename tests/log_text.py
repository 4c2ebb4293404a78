"""The log of a service as a test reads it."""

from __future__ import annotations

import re

_ATTEMPT = re.compile(r"^\S+: warning: attempt \d+ of node '.*\n(?:  \| .*\n?)*", re.MULTILINE)
_AS_JSON = re.compile(r'^\{.*"logger":"dovetail\.attempts".*\n?', re.MULTILINE)


def without_attempts(log: str) -> str:
    """The log without the records of failed attempts: each has the traceback of a handler."""
    return _AS_JSON.sub("", _ATTEMPT.sub("", log))
