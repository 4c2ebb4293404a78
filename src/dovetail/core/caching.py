"""Under which keys a node's output is kept for others, and whether one that is kept is the answer.

An output follows from the handler, its version and the rendered config, and from whatever of its
run the handler has read: params, outputs of parents, secrets. What it reads is known once it has
run. So an entry has two levels: under the *base key* (handler and config) stands what was read, and
under that key with a digest of the values that were read stands the output. A lookup asks what was
read, makes the digest of what these values are now, and finds the output only if they are equal.

Who a start is (`run_id`, `node_id`, `attempt`, `epoch`, `idempotency_key`) decides no output: it is
there for logs and for services that deduplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

VERSION, PARAMS, NAMES, SECRETS = "version", "params", "names", "secrets"
"""What a handler may have read; its version always decides. NAMES: which parents have an output."""
INPUT = "input:"
"""Before the name of a parent whose output was read."""
_SECRET_ROUNDS = 20_000
"""A digest of a secret is part of a key in the store: to try passwords against it shall cost."""

Facts = Mapping[str, str]
"""Of each thing that was read, the digest of its value."""


class Caching(NamedTuple):
    """That a node's output is kept for others, and what it followed from."""

    key: str
    """Of handler and config."""
    seconds: float
    facts: Facts | None = None
    """What the handler has read. None while it has not run, and from a worker that does not say:
    such an output is not kept."""


def base_key(handler: str, config: Any, deferred: Sequence[Any]) -> str:
    """Same handler and same rendered config, same key. Secrets enter by name; see `secrets_digest`
    for their values."""
    return digest_of([2, handler, config, deferred])


def digest_of(value: Any) -> str:
    """Of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def names_digest(names: Iterable[str]) -> str:
    """In their order: a handler may go through them."""
    return digest_of(list(names))


def secrets_digest(secrets: Mapping[str, str]) -> str:
    """Another one for other values, from which no value is found."""
    return _stretched(tuple(sorted(secrets.items())))


@lru_cache(16)
def _stretched(secrets: tuple[tuple[str, str], ...]) -> str:
    text = orjson.dumps(secrets)
    return hashlib.pbkdf2_hmac("sha256", text, b"dovetail node cache", _SECRET_ROUNDS).hex()


def entry_key(key: str, facts: Facts) -> str:
    """Where the output is kept that followed from these."""
    return f"{key}:{digest_of(sorted(facts.items()))}"


def entries(caching: Caching, output: Any) -> list[tuple[str, Any]]:
    """What a store keeps of a completed node, by key."""
    facts = caching.facts
    if facts is None:
        return []
    if facts.keys() <= {VERSION}:  # of most handlers: one entry, one lookup
        return [(caching.key, {"reads": [], "version": facts.get(VERSION), "output": output})]
    return [
        (caching.key, {"reads": sorted(facts)}),
        (entry_key(caching.key, facts), {"output": output}),
    ]


def reads_of(entry: Any) -> list[str]:
    """What the entry under a base key says that has to be compared, beside what is in it."""
    reads: list[str] = entry["reads"]
    return reads


def answers(entry: Any, version: str) -> bool:
    """Whether an entry without reads has the output of this version of its handler."""
    return bool(entry["version"] == version)


def is_facts(value: Any) -> bool:
    """Whether this can be what a worker says that a handler has read."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(digest, str) for name, digest in value.items()
    )
