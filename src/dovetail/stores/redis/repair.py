"""A damaged run in Redis, rebuilt from its own log.

The core replays the log, and the result replaces the stored state unless the run moves meanwhile.
The log has neither outputs nor nonces of tokens: these are taken from the stored state where it
agrees. A start whose nonce is lost is a lost start: its lease ends at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from dovetail.core.audit.event_check import RebuiltRun, rebuild
from dovetail.core.dag import Graph
from dovetail.core.effects import is_done
from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.events import Event
from dovetail.core.items import PLACES
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Submit
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.redis.codec import (
    UNIT,
    end_text,
    event_of,
    name_at,
    new_nonce,
    node_of,
    node_text,
    source,
    time_text,
)
from dovetail.stores.redis.items import split_record
from dovetail.stores.redis.scope import RunHeader

MAX_TRIES = 8
WHAT_TO_DO = "cancel it and trigger it anew, or retry it as a new run"


class DamagedLog(BrokenRun):
    """The log of a run cannot be replayed, so nothing can be rebuilt from it."""


async def rebuilt_from_log(
    redis: PipelinedRedis, header: RunHeader, keys: Sequence[str]
) -> RebuiltRun:
    """The run as its log in Redis says. Raises `DamagedLog`, or `NotFound` without a log."""
    run = header.run
    asked: list[Command] = [("LRANGE", keys[5], 0, -1), ("HGETALL", keys[3])]
    if header.shape.mapped:
        asked.append(("HGETALL", keys[8]))
    texts, flat, *of_items = await redis.send(asked)
    if not isinstance(texts, list):
        raise _damaged(run.id, f"its log is of another kind ({texts})")
    if not texts:
        raise _damaged(run.id, "its log is empty")
    outputs = _outputs(run.graph, flat if isinstance(flat, list) else ())
    for records in of_items:
        outputs |= _item_outputs(run.graph, records if isinstance(records, list) else ())
    events: list[Event] = []
    for seq, text in enumerate(texts, 1):
        try:
            events.append(event_of(text, seq, run.graph))
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(run.id, f"event {seq} cannot be read ({error})") from None
    submit = Submit(run.id, run.graph, run.params, run.version)
    made = rebuild(submit, events, outputs)
    if made.difference is not None:
        raise _damaged(run.id, made.difference)
    return made


def _damaged(run_id: str, why: str) -> DamagedLog:
    return DamagedLog(f"run {run_id}: the log itself is damaged: {why}; {WHAT_TO_DO}")


def _outputs(graph: Graph, flat: Sequence[bytes]) -> dict[str, Any]:
    found = {}
    for index, output in zip(flat[::2], flat[1::2], strict=False):
        if index.isdigit() and int(index) < len(graph.nodes):
            try:
                found[graph.nodes[int(index)].id] = orjson.loads(output)
            except ValueError:
                continue  # as a missing output, which is reported if a node needs it
    return found


def _item_outputs(graph: Graph, flat: Sequence[bytes]) -> dict[str, Any]:
    found = {}
    for place, record in zip(flat[::2], flat[1::2], strict=False):
        _, output = split_record(record)
        if output is not None and place.isdigit() and int(place) >= PLACES:
            with suppress(ValueError, IndexError):  # as a missing output
                found[name_at(graph, int(place))] = orjson.loads(output)
    return found


async def strays(
    redis: PipelinedRedis, made: RebuiltRun, kept: RunState, keys: Sequence[str]
) -> list[str]:
    """What is kept beside the nodes, of which a loaded run says nothing, where it is wrong."""
    asked: list[Command] = [("HGET", keys[0], "pending"), ("ZRANGE", keys[6], 0, -1)]
    pending, held = await redis.send(asked)
    found = []
    try:
        left = orjson.loads(pending) if pending else {"ready": [], "queue": []}
        waiting = {int(index) for index in (*left["ready"], *left["queue"])}
    except (LookupError, TypeError, ValueError):
        waiting = {-1}
    if waiting != set(made.undecided):
        found.append("the run waits for verdicts of other nodes than its log says")
    members = sorted(int(index) for index in held) if isinstance(held, list) else [-1]
    if members != sorted(kept.held):
        found.append(f"the run holds the nodes {members} back; held are {sorted(kept.held)}")
    return found


async def write_back(
    redis: PipelinedRedis, made: RebuiltRun, keys: Sequence[str], now: float
) -> bool:
    """Replace the stored state by the rebuilt run; False if the run has moved."""
    (flat,) = await redis.send([("HGETALL", keys[1])])
    kept = _nodes(flat if isinstance(flat, list) else ())
    right = _parts(made, kept, now)
    given: list[Argument] = [made.run.seq, orjson.dumps(right)]
    return bool(await redis.call_script(source("repair"), keys, given))


def _nodes(flat: Sequence[bytes]) -> dict[int, NodeState]:
    """What of the nodes' states can be read."""
    found = {}
    for index, text in zip(flat[::2], flat[1::2], strict=False):
        if index.isdigit():
            try:
                found[int(index)] = node_of(text.decode())
            except (LookupError, ValueError):
                continue
    return found


def _parts(made: RebuiltRun, kept: Mapping[int, NodeState], now: float) -> dict[str, list[Any]]:
    run = made.run
    nonce = new_nonce()
    limit = run.graph.max_concurrency
    # Whatever was published is offered again, under a token of its own.
    active = sum(node.status is NodeStatus.RUNNING for node in run.nodes)
    held: list[int] = []
    for index, node in enumerate(run.nodes):
        if node.status is NodeStatus.QUEUED and node.until is None:
            if limit is not None and active >= limit:
                node.phase = Phase.HELD
                held.append(index)
            else:
                node.phase = Phase.PUBLISHED
                active += 1
    nodes: list[Any] = ["counts", f"{run.unfinished}|{active}|0"]
    deps: list[Any] = []
    ends: list[Any] = []
    for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
        if node.status is NodeStatus.PENDING:
            done = sum(is_done(run, parent) for parent in spec.parents)
            skipped = sum(run.nodes[p].status is NodeStatus.SKIPPED for p in spec.parents)
            if count := UNIT * (done + skipped) + done:
                deps += (index, str(count))
            if node.epoch == 1:
                continue  # as if nothing had happened to it
        nodes += (index, _text(node, kept.get(index), nonce, now))
        if (end := end_text(node, run.graph)) is not None:
            ends += (index, end)
    completed = {i for i, n in enumerate(run.nodes) if n.status is NodeStatus.COMPLETED}
    return {
        "meta": _meta(made),
        "nodes": nodes,
        "deps": deps,
        "ends": ends,
        "held": [value for index in held for value in (index, index)],
        "outputs": [index for index in range(len(run.nodes)) if index not in completed],
    }


def _meta(made: RebuiltRun) -> list[Any]:
    run = made.run
    error = ""
    if run.error is not None:
        at = run.graph.index[str(run.error["node"])]
        error = orjson.dumps({"error": run.nodes[at].error, "at": at}).decode()
    pending = ""
    if made.undecided:
        pending = orjson.dumps({"ready": list(made.undecided), "queue": []}).decode()
    finished_at = "" if run.finished_at is None else time_text(run.finished_at)
    fields = {
        "status": run.status.value,
        "epoch": str(run.epoch),
        "failed": str(run.failed),
        "cancelled": str(run.cancelled),
        "finished_at": finished_at,
        "error": error,
        "pending": pending,
        "size": str(len(run.nodes)),
        "created_at": time_text(run.created_at),
    }
    return [part for item in fields.items() for part in item]


def _text(node: NodeState, kept: NodeState | None, nonce: int, now: float) -> str:
    """As the scripts keep a node; see `node_of`."""
    token, answered, lease = node.token, node.answered, None
    known = kept is not None and kept.epoch == node.epoch
    own = token.nonce
    if node.status is NodeStatus.RUNNING:
        if kept is not None and known and kept.token[:2] == token[:2] and kept.token.nonce:
            own = kept.token.nonce
        else:
            own = nonce
        # A start that is kept keeps its lease; the lease of any other is unknown.
        runs = kept is not None and kept.status is node.status and own == kept.token.nonce
        until = kept.lease_until if runs and kept is not None else None
        lease = now if until is None else until
    elif node.status is NodeStatus.QUEUED:
        own = nonce
    elif known and kept is not None and kept.token[:2] == token[:2]:
        own = kept.token.nonce
    last = answered.nonce
    if known and kept is not None and kept.answered[:2] == answered[:2]:
        last = kept.answered.nonce
    node.token = token._replace(nonce=own if token.nonce else 0)
    node.answered = answered._replace(nonce=last if answered.nonce else 0)
    node.lease_until = lease
    return node_text(node)


async def end_by_force(
    redis: PipelinedRedis, run_id: str, keys: Sequence[str], size: int, allowed: str, now: float
) -> bool:
    """End a run whatever is left of it; False if it has ended. Raises `NotFound`."""
    given: list[Argument] = [time_text(now), size, allowed]
    answer = int(await redis.call_script(source("cancel_damaged"), keys, given))
    if answer < 0:
        raise NotFound(f"no run '{run_id}' can be read in Redis: nothing is left of its record")
    return answer == 1


def loses_output(made: RebuiltRun) -> str | None:
    """The sentence for a run whose log is whole, and of which an output is lost."""
    if not made.lost:
        return None
    names = ", ".join(f"'{name}'" for name in made.lost[:5])
    return (
        f"the output of {names} is lost, and no log has outputs; cancel the run, then "
        f"`dovetail runs retry --from {made.lost[0]}`"
    )
