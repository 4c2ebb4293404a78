"""Every order in which two items and what is behind them can be started, lost, answered and
answered again: the join fires once in each epoch, and every state is one that the rules allow.

The search is over the core alone: any message that was ever sent may come at any time, as often as
it likes. `tests/model` adds processes and their deaths.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import pytest

from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.states import FINAL
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Expand,
    Fail,
    Reap,
    Retry,
    Submit,
    Transition,
)

from .invariants import check_run, check_step
from .walk import BROKEN, graph

NOW, NONCE, MAX_CRASHES = 0.0, 1, 3


class Luck(NamedTuple):
    """What may still happen."""

    losses: int = 0
    failures: int = 0
    retries: int = 0
    cancels: int = 0


def moves(run: RunState, luck: Luck) -> Iterator[tuple[Transition, Luck]]:
    """Every message of every start so far, and of the next; with what it costs."""
    for name in ("m", "m[0]", "m[1]", "z"):
        tokens = [Token(e, a, NONCE) for e in range(1, run.epoch + 1) for a in (1, 2)]
        for token in tokens:
            who = ("r", name, token)
            yield Expand(*who, 2), luck
            yield Claim(*who, "w", NOW), luck
            yield Complete(*who, name), luck
            if luck.failures:
                yield Fail(*who, BROKEN, after=0.0), luck._replace(failures=luck.failures - 1)
            if luck.losses:
                yield Reap(*who, MAX_CRASHES), luck._replace(losses=luck.losses - 1)
    if luck.cancels:
        yield Cancel("r"), luck._replace(cancels=luck.cancels - 1)
    if luck.retries and run.status in FINAL:
        yield Retry("r"), luck._replace(retries=luck.retries - 1)


def key(run: RunState, luck: Luck) -> str:
    return repr(({**run.snapshot(), "seq": 0, "graph": 0}, luck))


@pytest.mark.parametrize(
    ("window", "failures", "luck"),
    [
        (2, 0, Luck(losses=2)),
        (1, 0, Luck(losses=1, failures=1)),
        (2, 1, Luck(failures=2)),
        (2, 0, Luck(failures=1, retries=1)),
        (1, 0, Luck(cancels=1, retries=1)),
        (2, 0, Luck(losses=2, failures=1, retries=1)),
    ],
)
def test_the_join_fires_once_in_every_order(window: int, failures: int, luck: Luck) -> None:
    each = {"items": [7, 8], "max_concurrency": window, "max_failures": failures}
    compiled = graph({"m": [], "z": ["m"]}, m={"for_each": each})
    run, _ = begin(Submit("r", compiled, {}), NOW, NONCE)
    seen = {key(run, luck)}
    todo: list[tuple[RunState, Luck, frozenset[int]]] = [(run, luck, frozenset())]
    ends: set[str] = set()
    while todo:
        at, left, joined = todo.pop()
        for move, after in moves(at, left):
            next_run: Any = deepcopy(at, {id(compiled): compiled})
            before: dict[str, Any] = at.snapshot()
            decision = step(next_run, move, NOW, NONCE)
            if not decision.changed:
                continue
            check_step(before, next_run, move, decision, NOW)
            check_run(next_run)
            queued = [e.epoch for e in decision.events if (e.type, e.node) == ("node.queued", "z")]
            if not isinstance(move, Reap):
                assert joined.isdisjoint(queued), "the join fired twice in an epoch"
            if next_run.finished:
                ends.add(next_run.status.value)
            found = key(next_run, after)
            if found not in seen:
                seen.add(found)
                todo.append((next_run, after, joined | set(queued)))
    assert "COMPLETED" in ends
    assert len(seen) > 30
