"""What only the memory store promises: it does not grow without end."""

from __future__ import annotations

from dovetail.stores import memory
from dovetail.stores.memory import MemoryStore


async def test_the_node_cache_evicts_its_oldest_entry(monkeypatch) -> None:
    monkeypatch.setattr(memory, "MAX_CACHED", 3)
    store = MemoryStore()
    for key in ("a", "b", "c", "a", "d"):
        store._keep(key, 100.0, key)
    found = {key for key in "abcd" if await store.recall(key, 1.0)}
    assert found == {"c", "a", "d"}
