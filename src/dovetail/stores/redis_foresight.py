"""Which nodes a call will publish, known before it is made.

Those are that a run begins with, and those whose parents are all among the results of one call:
their messages can travel right behind it and reach a worker a roundtrip earlier. Should the call
decide otherwise, a message holds a token that was never given out, and its claim is refused like
that of any late one. What it must not know: how a message is written, or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from dovetail.core.consequences import new_tuple
from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Complete, Dispatch
from dovetail.stores.redis_moves import Shape
from dovetail.stores.redis_scene import RedisScene

MOST_AHEAD = 100
"""Nodes of one run. With the first of many, workers begin while the rest is made; and should the
call be refused, so few messages are of no use."""


Foreseen = tuple[list[Dispatch], RedisScene]
"""What will be published, and where it can be rendered."""


def foresee_roots(run: RunState, shape: Shape, token: Token) -> Foreseen | None:
    """What the beginning of this run will publish with this token."""
    roots = shape.foreseeable_roots[:MOST_AHEAD]
    if not roots:
        return None
    return [new_tuple(Dispatch, (run, place, token)) for place in roots], RedisScene(run)


def foresee(
    run: RunState,
    shape: Shape,
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
        if len(ready) >= MOST_AHEAD:
            break
    if not ready:
        return None
    scene = RedisScene(run)
    for place, output in outputs.items():
        scene.add(place, NodeStatus.COMPLETED, output, None)
    ahead = islice(ready, MOST_AHEAD)
    return [new_tuple(Dispatch, (run, place, token)) for place in ahead], scene
