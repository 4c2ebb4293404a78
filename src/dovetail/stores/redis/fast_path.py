"""Submit, claim and complete: the calls of every node, each with a small script of its own.

These scripts take flat arguments and reply with numbers; the decision is built here. All other
transitions go through `apply.lua`.

Some nodes that a call will publish are known before it is sent: the roots of a run, and children
whose parents are all in the call. Their messages travel right behind the call and reach a worker a
roundtrip earlier. If the call decides otherwise, such a message holds a token that was never
issued, and its claim is refused like a late one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import islice

import orjson

from dovetail.core.dag import Graph
from dovetail.core.effects import new_tuple
from dovetail.core.events import Event, Token
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import NOTHING, TAKEN, Claim, Complete, Decision, Dispatch, Submit
from dovetail.redis_client.pipelined import Argument
from dovetail.stores.records import StoredDefinition
from dovetail.stores.redis.codec import SEPARATOR, GraphShape, time_text
from dovetail.stores.redis.run_index import batch_of
from dovetail.stores.redis.scope import RedisTemplateScope

MAX_DISPATCHED_AHEAD = 100
"""Nodes of one run. With the first of many, workers begin while the rest is made; and should the
call be refused, so few messages are of no use."""


Foreseen = tuple[list[Dispatch], RedisTemplateScope]
"""What will be published, and where it can be rendered."""


def foresee_roots(run: RunState, shape: GraphShape, token: Token) -> Foreseen | None:
    """What the beginning of this run will publish with this token."""
    roots = shape.foreseeable_roots[:MAX_DISPATCHED_AHEAD]
    if not roots:
        return None
    return [new_tuple(Dispatch, (run, place, token)) for place in roots], RedisTemplateScope(run)


def foresee(
    run: RunState,
    shape: GraphShape,
    moves: Sequence[Complete],
    token: Token,
) -> Foreseen | None:
    """What these results will publish with this token."""
    graph, foreseeable = run.graph, shape.foreseeable
    index, nodes, count = graph.index, graph.nodes, len(moves)
    outputs = {index[move.node]: move.output for move in moves}
    ready: dict[int, None] = {}
    for parent in outputs:
        for child, parents in foreseeable[parent]:
            if parents == 1 or (
                parents <= count
                and child not in ready
                and all(p in outputs for p in nodes[child].parents)
            ):
                ready[child] = None
        if len(ready) >= MAX_DISPATCHED_AHEAD:
            break
    if not ready:
        return None
    scope = RedisTemplateScope(run)
    for place, output in outputs.items():
        scope.add(place, NodeStatus.COMPLETED, output, None)
    ahead = islice(ready, MAX_DISPATCHED_AHEAD)
    return [new_tuple(Dispatch, (run, place, token)) for place in ahead], scope


MAX_NODES_PER_CALL = 500
"""A longer script would block other clients of Redis."""


def submit_args(
    submit: Submit,
    shape: GraphShape,
    stored: StoredDefinition,
    now: float,
    nonce: int,
    *,
    listed: bool,
) -> list[Argument]:
    """`listed`: in Redis, which has to know then what batch it is of."""
    graph = submit.graph
    batch: tuple[Argument, ...] = ()
    if listed and submit.place is not None:
        batch = ("batch", batch_of(submit.place[0]), "place", submit.place[1])
    return [
        *(time_text(now), nonce, _told(graph.name, submit.version), shape.roots_text),
        *("1" if shape.conditional_root else "0", graph.max_concurrency or 0, len(graph.nodes)),
        "" if submit.max_bytes is None else submit.max_bytes,
        *("workflow", graph.name, "version", "" if submit.version is None else submit.version),
        *("definition", stored.sha256, "retries", stored.retries),
        *("params", orjson.dumps(submit.params), *batch, *_unusual(graph)),
    ]


def _unusual(graph: Graph) -> tuple[Argument, ...]:
    limit = ("limit", graph.max_concurrency) if graph.max_concurrency else ()
    return limit if graph.fail_fast else (*limit, "fail_fast", "0")


@lru_cache(64)
def _told(workflow: str, version: int | None) -> bytes:
    """The data of run.created."""
    return orjson.dumps({"workflow": workflow, "version": version})


def submitted(
    submit: Submit,
    run: RunState,
    answer: Sequence[int],
    now: float,
    token: Token,
    sent: Container[int],
    *,
    events: bool,
) -> Decision:
    """What a submit decided, unless verdicts are pending: then the beginning of it. Roots that
    were `sent` already are not ordered again.

    Without `events`, only which nodes are queued.
    """
    if not answer:
        return NOTHING
    _, pending, *published = answer
    graph = submit.graph
    decision = Decision()
    if events or pending:
        told = {"workflow": graph.name, "version": submit.version}
        decision.events = [
            Event(1, now, "run.created", 1, None, None, told),
            Event(2, now, "run.started", 1),
        ]
    if not pending:
        decision.changed += graph.roots
        if events:
            for seq, root in enumerate(graph.roots, 3):
                decision.events.append(Event(seq, now, "node.queued", 1, graph.nodes[root].id, 0))
    decision.dispatch = [Dispatch(run, place, token) for place in published if place not in sent]
    return decision


def claim_args(worker: str, until: float, now: float, *, again: bool) -> list[Argument]:
    """What all claims of a worker at one time have in common; behind it come the place and token
    of each node. `again`: a repeated call gets the same reply."""
    name = worker.replace(SEPARATOR, "/")
    return [time_text(now), time_text(until), name, orjson.dumps(name), "1" if again else "0"]


def claimed_token(token: Token) -> str:
    return "{}|{}|{}".format(*token)


def claimed(move: Claim, place: int, answer: Sequence[int], now: float) -> Decision:
    """What the claim of one node decided."""
    seq, granted = answer
    if not granted:
        return NOTHING
    decision = Decision()
    decision.changed.append(place)
    told = {"worker": move.worker.replace(SEPARATOR, "/")}
    epoch, attempt, _ = move.token
    decision.events.append(Event(seq, now, "node.started", epoch, move.node, attempt, told))
    return decision


def complete_args(
    moves: Sequence[Complete], shape: GraphShape, now: float, nonce: int
) -> list[Argument] | None:
    """None if one of them is not for this script: of a node that is not there, or started twice. Or
    if already at the first it would have to stop, because a child has a condition."""
    index, children, dumps = shape.graph.index, shape.children_text, orjson.dumps
    args: list[Argument] = [time_text(now), nonce]
    for _, node, token, output, _ in moves:
        place = index.get(node)
        if place is None or token[0] != 1 or token[1] != 1:
            return None
        if children[place] == "?" and len(args) == 2:
            return None
        args += (place, token[2], dumps(output), children[place])
    return args


def completed(
    moves: Sequence[Complete],
    run: RunState,
    answer: Sequence[int],
    now: float,
    token: Token,
    *,
    sent: Container[int],
    events: bool,
) -> list[Decision]:
    """Of as many moves as the script did; nodes that were `sent` already are not ordered again.

    Without `events`, the decisions say only that the run has ended and which children are ready.
    """
    done, length, ended, *ready = answer
    graph: Graph = run.graph
    index, nodes = graph.index, graph.nodes
    decisions = [TAKEN] * done
    if events or ended:
        for at in range(done) if events else (done - 1,):
            decisions[at] = _moved(index[moves[at].node])
    pairs = iter(ready)
    for number, child in zip(pairs, pairs, strict=True):
        decision = decisions[number - 1]
        if decision is TAKEN:
            decision = decisions[number - 1] = _moved(index[moves[number - 1].node])
        decision.changed.append(child)
        if child not in sent:
            decision.dispatch.append(Dispatch(run, child, token))
    if events:
        seq = length - done - len(ready) // 2 - ended
        for move, decision in zip(moves, decisions, strict=False):
            seq += 1
            decision.events.append(Event(seq, now, "node.completed", 1, move.node, 1))
            for child in decision.changed[1:]:
                seq += 1
                decision.events.append(Event(seq, now, "node.queued", 1, nodes[child].id, 0))
    if ended:
        decisions[-1].ended = True
        decisions[-1].events.append(Event(length, now, "run.completed", 1))
    return decisions


def _moved(place: int) -> Decision:
    decision = Decision()
    decision.changed.append(place)
    return decision
