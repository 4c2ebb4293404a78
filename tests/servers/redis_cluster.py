"""A Redis Cluster of several nodes, with or without replicas; slots can move, and nodes die."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import redis

from .redis_server import SLOTS, RedisRefused, RedisServer
from .server import HOST, START_SECONDS, ServerFailed, free_port

MASTERS = 3
SILENT_MILLISECONDS = 1000
"""A node that says nothing for so long has failed."""

SlotRange = tuple[int, int]


class RedisCluster:
    """Use `with`; the first nodes are masters, and each may have a replica.

    `slots` are those of each master, as ranges with both ends; by default three equal parts.
    """

    def __init__(
        self, *, replicas: bool = False, slots: Sequence[Sequence[SlotRange]] | None = None
    ) -> None:
        self._slots = slots or equal_parts(MASTERS)
        self._bus = [free_port() for _ in range(len(self._slots) * (1 + replicas))]
        self.nodes = [
            RedisServer(
                settings={
                    "cluster-enabled": "yes",
                    "cluster-port": str(port),
                    "cluster-node-timeout": str(SILENT_MILLISECONDS),
                    "repl-diskless-sync-delay": "0",
                }
            )
            for port in self._bus
        ]

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for node in self.nodes:
            self._stack.enter_context(node)
        first = self.nodes[0]
        masters = len(self._slots)
        for node, ranges in zip(self.nodes, self._slots, strict=False):
            ends = [str(end) for both in ranges for end in both]
            node.ask("CLUSTER", "ADDSLOTSRANGE", *ends)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", HOST, str(first.port), str(self._bus[0]))
        contest = f"cluster_known_nodes:{len(self.nodes)}\r\n"
        self._until(lambda: all(contest in _info(node) for node in self.nodes))
        for master, node in zip(self.nodes, self.nodes[masters:], strict=False):
            known = master.ask("CLUSTER", "MYID")
            self._until(lambda node=node, known=known: _replicates(node, known))  # type: ignore[misc]
        self._until(lambda: all("cluster_state:ok" in _info(node) for node in self.nodes))
        self._until(lambda: all(map(_has_caught_up, self.nodes[masters:])))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def having(self, slot: int) -> RedisServer:
        """The node that has it now."""
        for node in self.nodes:
            if node.runs and slot in _own_slots(self._client(node)):
                return node
        raise LookupError(slot)

    def move(self, slot: int, where: RedisServer) -> None:
        """With its keys, one by one, as a resharding does."""
        source = self.having(slot)
        ids = {one.port: one.ask("CLUSTER", "MYID") for one in (source, where)}
        where.ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[source.port])
        source.ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[where.port])
        client = self._client(source)
        while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            for key in keys:
                client.execute_command("MIGRATE", HOST, where.port, key, 0, 5000)
                time.sleep(0.005)  # so that others meet a slot that is half here, half there
        for node in (where, source, *self.nodes[: len(self._slots)]):
            node.ask("CLUSTER", "SETSLOT", str(slot), "NODE", ids[where.port])

    @staticmethod
    def _client(node: RedisServer) -> redis.Redis:
        return redis.Redis(HOST, node.port)

    @staticmethod
    def _until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise ServerFailed("the nodes did not become a cluster")
            time.sleep(0.02)


def equal_parts(masters: int) -> list[list[SlotRange]]:
    return [[(SLOTS * at // masters, SLOTS * (at + 1) // masters - 1)] for at in range(masters)]


def _info(node: RedisServer) -> str:
    return node.ask("CLUSTER", "INFO")


def _replicates(node: RedisServer, master: str) -> bool:
    try:
        node.ask("CLUSTER", "REPLICATE", master)
    except RedisRefused:  # it does not know that one yet
        return False
    return True


def _has_caught_up(replica: RedisServer) -> bool:
    return "master_link_status:up" in replica.ask("INFO", "replication")


def _own_slots(client: redis.Redis) -> set[int]:
    """Of the node that is asked."""
    found: set[int] = set()
    for line in client.execute_command("CLUSTER", "NODES").decode().splitlines():
        words = line.split()
        if "myself" in words[2]:
            for part in words[8:]:
                if not part.startswith("["):
                    low, _, high = part.partition("-")
                    found |= set(range(int(low), int(high or low) + 1))
    return found
