"""Whether Redis takes writes at the moment, asked with a write of a few bytes.

What it must not know: what else is written, or who wants to know.
"""

from __future__ import annotations

from dovetail.pipe import Pipe, RedisError
from dovetail.stores.redis_lists import source

KEY = "wf:writable"
_WHY = {
    "OOM": "its memory is full",
    "MISCONF": "it could not save its data to its disk",
    "READONLY": "it is a replica",
    "NOREPLICAS": "too few of its replicas are there",
    "LOADING": "it is starting",
    "MASTERDOWN": "it has lost its primary",
    "CLUSTERDOWN": "a part of its cluster is away",
    "NOPERM": "its user may not write",
}


async def check_writable(pipe: Pipe) -> None:
    """Raises `RedisError`, with its reason, if Redis would refuse a write."""
    met = (await pipe.script(source("writable"), [KEY], [])).decode()
    if met:
        error = RedisError(f"Redis takes no writes: {met}")
        error.reason = "Redis accepts no writes" + because(met)
        raise error


def because(refusal: str) -> str:
    """In a few words, without an address: anybody may read it."""
    for word, why in _WHY.items():
        if word in refusal.split(" ", 1)[0].lstrip("-"):
            return f": {why}"
    return ""
