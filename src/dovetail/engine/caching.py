"""The node cache: whether another node's output is the answer for a node that is about to start.

What has to be equal for that is said in `core.caching`. What it must not know: how a store keeps
outputs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from dovetail.core.caching import (
    INPUT,
    NAMES,
    PARAMS,
    SECRETS,
    VERSION,
    Caching,
    Facts,
    answers,
    base_key,
    digest_of,
    entry_key,
    names_digest,
    reads_of,
    secrets_digest,
)
from dovetail.core.dag import NodeSpec
from dovetail.core.templates import Rendered
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Cached, Store

Versions = Callable[[str], Awaitable[int]]
"""The version of a handler that would run now."""


class NodeCache:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        versions: Versions | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """`secrets` are those known here: what was made with others is not found."""
        self._store = store
        self._clock = clock
        self._versions = versions or _first_version
        self._secrets = dict(secrets or {})

    async def find(
        self,
        caching: Caching,
        handler: str,
        params: Mapping[str, Any],
        of_parents: Callable[[Container[str]], Awaitable[Facts | None]],
    ) -> Cached | None:
        """The output that this node would have, if it is kept. `of_parents` gives what of some
        reads is about the node's parents."""
        found = await self._store.recall(caching.key, self._clock())
        if found is None:
            return None
        version = str(await self._versions(handler))
        reads = reads_of(found.output)
        if not reads:
            return Cached(found.output["output"]) if answers(found.output, version) else None
        facts: dict[str, str] = {VERSION: version}
        if PARAMS in reads:
            facts[PARAMS] = digest_of(params)
        if SECRETS in reads:
            facts[SECRETS] = secrets_digest(self._secrets)
        if any(read == NAMES or read.startswith(INPUT) for read in reads):
            told = await of_parents(reads)
            if told is None:
                return None
            facts |= told
        if facts.keys() != {*reads}:  # a parent that was read has no output this time
            return None
        kept = await self._store.recall(entry_key(caching.key, facts), self._clock())
        return None if kept is None else Cached(kept.output["output"])


def caching_of(spec: NodeSpec, rendered: Rendered) -> Caching | None:
    if spec.cache_ttl is None:
        return None
    deferred = [[list(d.path), d.source, d.scope] for d in rendered.deferred]
    return Caching(base_key(spec.handler, rendered.config, deferred), spec.cache_ttl)


def facts_of(outputs: Mapping[str, Any], reads: Container[str]) -> Facts:
    """What of these reads is about parents with these outputs."""
    facts = {INPUT + name: digest_of(outputs[name]) for name in outputs if INPUT + name in reads}
    if NAMES in reads:
        facts[NAMES] = names_digest(outputs)
    return facts


async def _first_version(handler: str) -> int:
    return 1
