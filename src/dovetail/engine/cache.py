"""The node cache: whether another node's output is the answer for a node that is about to start.

`core.caching` has the rule of what must be equal. Stores keep the outputs.
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
        """`secrets` are those known here: what was made with others is not found. With None they
        are known to workers alone, and what was made with secrets is for a worker to find."""
        self._store = store
        self._clock = clock
        self._versions = versions or _first_version
        self._secrets = secrets

    async def find(
        self,
        caching: Caching,
        handler: str,
        params: Mapping[str, Any],
        of_parents: Callable[[Container[str]], Awaitable[Facts | None]],
        own: Mapping[str, Any],
    ) -> Cached | Caching | None:
        """The output that this node would have, if it is kept. `of_parents` gives what of some
        reads is about the node's parents; `own` are the item and its index, None for a node.

        A `Caching` if a worker has to look, see `answer`: with all facts but that of its secrets.
        """
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
        facts |= {name: digest_of(value) for name, value in own.items() if name in reads}
        if SECRETS in reads and self._secrets is not None:
            facts[SECRETS] = secrets_digest(self._secrets)
        if any(read == NAMES or read.startswith(INPUT) for read in reads):
            digests = await of_parents(reads)
            if digests is None:
                return None
            facts |= digests
        lacking = {*reads} - facts.keys()
        if lacking == {SECRETS}:
            return caching._replace(facts=facts)
        if lacking:  # a parent that was read has no output this time
            return None
        return await _kept(self._store, entry_key(caching.key, facts), self._clock())


async def answer(
    store: Store, caching: Caching, secrets: Mapping[str, str], now: float
) -> Cached | None:
    """The output of a start whose worker has these secrets, if it is kept. `caching` has all other
    facts: what `find` has left to a worker."""
    assert caching.facts is not None  # noqa: S101
    facts = {**caching.facts, SECRETS: secrets_digest(secrets)}
    return await _kept(store, entry_key(caching.key, facts), now)


async def _kept(store: Store, key: str, now: float) -> Cached | None:
    found = await store.recall(key, now)
    return None if found is None else Cached(found.output["output"])


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
