"""Which nodes some results will make ready, known before they are taken in.

Where every parent of a node is among the results of one call, its message can travel right behind
that call and reach a worker a roundtrip earlier. Should the call decide otherwise, the message
holds a token that was never given out, and its claim is refused like that of any late one. What it
must not know: how a message is written, or sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Complete, Dispatch
from dovetail.stores.redis_moves import Shape
from dovetail.stores.redis_scene import RedisScene

MOST_AHEAD = 32
"""Nodes of one run: of many, workers had better begin with the first while the rest is made."""


def foresee(
    run: RunState,
    shape: Shape,
    moves: Sequence[Complete],
    token: Token,
) -> tuple[list[Dispatch], RedisScene] | None:
    """What these results will publish with this token, and where it can be rendered."""
    graph = run.graph
    index, nodes, count = graph.index, graph.nodes, len(moves)
    within_reach: dict[int, None] = {}
    for move in moves:
        for child, parents in shape.foreseeable[index[move.node]]:
            if parents <= count:
                within_reach[child] = None
    if not within_reach:
        return None
    outputs = {index[move.node]: move.output for move in moves}
    ready = [child for child in within_reach if all(p in outputs for p in nodes[child].parents)]
    if not 0 < len(ready) <= MOST_AHEAD:
        return None
    scene = RedisScene(run)
    for place, output in outputs.items():
        scene.add(place, NodeStatus.COMPLETED, output, None)
    return [Dispatch(run, place, token) for place in ready], scene
