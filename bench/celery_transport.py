"""The Celery part of the bench: Dovetail on Celery beside what Celery itself does, on one Redis.

A plain task is what any message for each node costs at least; canvas is what Celery has for graphs.
All have one worker of two processes. How they are timed is said in redis_contestants.py.
"""

from __future__ import annotations

from typing import Any

import redis_contestants
from apart import Opener
from distributed import Judge
from workloads import Workload

OURS = "dovetail on celery"
PLAIN = "plain task"
CANVAS = "canvas"
PEERS = (PLAIN, CANVAS)

TARGETS = {
    "chain100": {CANVAS: 1.0},
    "fan1000": {PLAIN: 0.8, CANVAS: 1.4},
    "diamonds500": {PLAIN: 0.8, CANVAS: 1.4},
}
"""How many times as fast as each peer Dovetail on Celery must be. In a chain a node waits for the
one before; plain tasks wait for nothing, so there they are only shown."""


CONTESTANTS: dict[str, tuple[Opener, dict[str, Any]]] = {
    OURS: (redis_contestants.dovetail, {"transport": "celery"}),
    PLAIN: (redis_contestants.peer, {"module": "celery_task_peer"}),
    CANVAS: (redis_contestants.peer, {"module": "celery_peer"}),
}


def verdicts(workload: Workload, rows: dict[str, Any], judge: Judge) -> list[dict[str, Any]]:
    """Who failed has reached nothing."""
    found = []
    for peer, wanted in TARGETS.get(workload.name, {}).items():
        if OURS in rows and peer in rows:
            reached = rows[OURS].get("times", {}).get(peer, 0.0)
            title = f"{workload.name} on Celery: {OURS} × {peer}"
            found.append(judge(title, reached, f"at least {wanted:g}", reached >= wanted))
    return found
