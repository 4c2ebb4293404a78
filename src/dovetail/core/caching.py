"""The keys of the node cache.

An output depends on the handler, its version, the rendered config, and on what the handler reads
of its run: params, outputs of parents, secrets. What it reads is known only after it has run. So
an entry has two levels. Under the *base key* (handler and config) stands what was read. Under the
base key with a digest of the read values stands the output. A lookup finds out what was read, takes
the digest of the present values, and finds the output only if they are the same.

`run_id`, `node_id`, `attempt`, `epoch` and `idempotency_key` are no part of a key: a handler may
use them for logs and for services that deduplicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

VERSION, PARAMS, NAMES, SECRETS = "version", "params", "names", "secrets"
"""What a handler may have read; the version is always part. NAMES: which parents have an output."""
ITEM, INDEX = "item", "index"
"""The same, of an item of a mapped node. A node without items reads None, so that neither gets the
output of the other. The rendered config is part of the key in any case."""
INPUT = "input:"
"""Before the name of a parent whose output was read."""
_SECRET_ROUNDS = 20_000
"""A key in the store has a digest of secrets: guessing a secret from it must be expensive."""

Facts = Mapping[str, str]
"""What was read, with the digest of each value."""


class Caching(NamedTuple):
    """How a node's output is cached, and what it depends on."""

    key: str
    """The base key."""
    seconds: float
    facts: Facts | None = None
    """What the handler has read. None before it has run, and from a worker that does not report
    it: such an output is not cached."""


def base_key(handler: str, config: Any, deferred: Sequence[Any]) -> str:
    """The same for the same handler and rendered config. It has secrets by name; `secrets_digest`
    is for their values."""
    return digest_of([2, handler, config, deferred])


def digest_of(value: Any) -> str:
    """Of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def names_digest(names: Iterable[str]) -> str:
    """The order matters: a handler may iterate over the names."""
    return digest_of(list(names))


def secrets_digest(secrets: Mapping[str, str]) -> str:
    """A slow digest of the values, so that they cannot be guessed from it."""
    return _stretched(tuple(sorted(secrets.items())))


@lru_cache(16)
def _stretched(secrets: tuple[tuple[str, str], ...]) -> str:
    text = orjson.dumps(secrets)
    return hashlib.pbkdf2_hmac("sha256", text, b"dovetail node cache", _SECRET_ROUNDS).hex()


def entry_key(key: str, facts: Facts) -> str:
    """The key of the output for these read values."""
    return f"{key}:{digest_of(sorted(facts.items()))}"


def entries(caching: Caching, output: Any) -> list[tuple[str, Any]]:
    """The cache entries of a completed node, by key."""
    facts = caching.facts
    if facts is None:
        return []
    if facts.keys() <= {VERSION}:  # most handlers: one entry, one lookup
        return [(caching.key, {"reads": [], "version": facts.get(VERSION), "output": output})]
    return [
        (caching.key, {"reads": sorted(facts)}),
        (entry_key(caching.key, facts), {"output": output}),
    ]


def reads_of(entry: Any) -> list[str]:
    """What must be compared, by the entry under a base key."""
    reads: list[str] = entry["reads"]
    return reads


def answers(entry: Any, version: str) -> bool:
    """Whether an entry without reads is of this version of the handler."""
    return bool(entry["version"] == version)


def is_facts(value: Any) -> bool:
    """Whether a value from a worker has the form of `Facts`."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(digest, str) for name, digest in value.items()
    )
