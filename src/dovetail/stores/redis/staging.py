"""Writes a whole run to Redis at once: a run that is restored, or a fork.

Its outputs may have many megabytes, so it is written to staging keys first, in many pieces. Then
one script renames these keys, unless there is a run already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import orjson

from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis, RedisError
from dovetail.stores.records import StoredDefinition
from dovetail.stores.redis.codec import (
    PARTS,
    UNIT,
    end_text,
    event_text,
    failure_of,
    keys_of,
    node_text,
    source,
    time_text,
    weight_text,
)
from dovetail.stores.redis.definitions import definition_key
from dovetail.stores.redis.items import MapCounts

PIECE_SIZE = 1000
"""Of a hash or a list, in one command."""
OUTPUT_PIECE_SIZE = 64
"""Of outputs, which may be a megabyte each."""
STAGED_SECONDS = 600
"""Staged keys of a run that was not finished expire."""
COUNTED_BY = {"events": "LLEN", "held": "ZCARD", "queue": "ZCARD"}
"""The others are hashes."""
MAX_TRIES = 5


async def write_run(
    redis: PipelinedRedis,
    run_id: str,
    parts: Mapping[str, Any],
    definition: tuple[str, bytes],
    *,
    epoch: int = 1,
    replacing: int | None = None,
) -> bool:
    """Make a run of these parts. False if there is a run, unless `replacing` is its generation and
    it was not retried since. `definition` is the digest and the text of the run's definition."""
    digest, content = definition
    given: list[Argument] = ["" if replacing is None else replacing, epoch]
    for part in PARTS:
        given += (COUNTED_BY.get(part, "HLEN"), len(parts[part]))
    for _ in range(MAX_TRIES):
        aside = f"wf:{{{run_id}}}:restoring:{os.urandom(6).hex()}:"
        for commands in _writes(aside, parts):
            await redis.call_many(commands)
        # Last: what nothing refers to does not stay there for ever, and this may take long.
        await redis.call("SET", definition_key(digest), content, "NX")
        both = [*keys_of(run_id), *(aside + part for part in PARTS)]
        answer = int(await redis.call_script(source("snapshot_put_back"), both, given))
        if answer >= 0:  # else Redis was restarted meanwhile, and came back without some of it
            return answer == 1
    raise RedisError(f"run {run_id}: what is written of it does not stay in Redis")


def _writes(aside: str, parts: Mapping[str, Any]) -> Iterator[list[Command]]:
    """The commands that write these keys, beside their place, a few at a time."""
    verbs = {"events": "RPUSH", "held": "ZADD", "queue": "ZADD"}
    for part, content in parts.items():
        key = aside + part
        size = OUTPUT_PIECE_SIZE if part in ("out", "items") else PIECE_SIZE
        for piece in _pieces(content if part == "events" else content.items(), size):
            flat = piece if part == "events" else [value for pair in piece for value in pair]
            yield [(verbs.get(part, "HSET"), key, *flat), ("EXPIRE", key, STAGED_SECONDS)]


def _pieces(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while piece := list(islice(rest, size)):
        yield piece


# ── a run that has just begun ────────────────────────────────────────────────────────────


def fork_parts(run: RunState, events: Iterable[Event], stored: StoredDefinition) -> dict[str, Any]:
    """Every key of a fork, from its state in the core when it begins."""
    graph = run.graph
    counts = f"{run.unfinished}|{run.active}|0"
    if run.max_bytes is not None:
        counts += weight_text(run.kept_bytes, run.max_bytes)
    nodes: dict[int | str, str] = {"counts": counts}
    outputs: dict[int, bytes] = {}
    ends: dict[int, str] = {}
    maps: dict[int, str] = {}
    for index, node in enumerate(run.nodes):
        if node.status is NodeStatus.PENDING:
            continue
        nodes[index] = node_text(node)
        if node.status is NodeStatus.COMPLETED:
            outputs[index] = orjson.dumps(node.output)
            if (items := MapCounts.of_reused(graph, index, node)) is not None:
                maps[index] = items.text
        elif (end := end_text(node, graph)) is not None:
            ends[index] = end
    return {
        "meta": _meta(run, stored),
        "nodes": nodes,
        "deps": _settled_parents(run),
        "out": outputs,
        "ends": ends,
        "events": [event_text(event, graph) for event in events],
        "held": {str(index): index for index in run.held},
        "maps": maps,  # of reused nodes; no list is rendered yet
        "items": {},
        "queue": {},
    }


def _meta(run: RunState, stored: StoredDefinition) -> dict[str, Argument]:
    graph = run.graph
    meta: dict[str, Argument] = {
        "status": run.status.value,
        "epoch": run.epoch,
        "failed": run.failed,
        "cancelled": run.cancelled,
        "finished_at": "" if run.finished_at is None else time_text(run.finished_at),
        "error": "" if run.error is None else orjson.dumps(failure_of(run.error, graph)),
        "created_at": time_text(run.created_at),
        "size": len(graph.nodes),
        "workflow": graph.name,
        "version": "" if run.version is None else run.version,
        "definition": stored.sha256,
        "retries": stored.retries,
        "params": orjson.dumps(run.params),
    }
    if run.forked_from is not None:
        meta["forked_from"] = run.forked_from
    if graph.max_concurrency:
        meta["limit"] = graph.max_concurrency
    if not graph.fail_fast:
        meta["fail_fast"] = "0"
    return meta


def _settled_parents(run: RunState) -> dict[int, int]:
    """What `deps` has of each node that waits."""
    pending = (
        (index, len(spec.parents) - node.waiting, node.fed)
        for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True))
        if node.status is NodeStatus.PENDING
    )
    return {index: settled * UNIT + fed for index, settled, fed in pending if settled}
