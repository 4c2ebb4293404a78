"""A run replayed by the core: what several processes decided, in the order of the log.

Each process says what it asked for and what was decided; the numbers of the events tell in which
order all of it happened. If the bare rules give the same answers in that order, the store has
behaved as if one process after the other had asked.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

from dovetail.core import transitions
from dovetail.core.events import Event, Token
from dovetail.core.run import RunState
from dovetail.core.step import begin, step
from dovetail.core.transitions import Decision, Submit, Transition

FORGED = -1
"""The nonce of a token that was never given out."""


class ReportedStep(NamedTuple):
    """One decision, as the process that asked for it tells."""

    move: Transition
    now: float
    events: list[Event]
    published: list[int]
    ended: bool

    @classmethod
    def read(cls, line: list[Any]) -> ReportedStep:
        kind, fields, now, events, published, ended = line
        made = getattr(transitions, kind)(*fields)
        if hasattr(made, "token"):
            made = made._replace(token=Token(*made.token))
        return cls(made, now, [Event(*event) for event in events], published, ended)


def in_order(tellers: list[list[ReportedStep]]) -> list[ReportedStep]:
    """What leaves no event stands right before what the same teller tells next."""
    placed: list[tuple[float, int, ReportedStep]] = []
    for reported in tellers:
        following = float("inf")
        for back, one in enumerate(reversed(reported)):
            following = one.events[0].seq if one.events else following
            placed.append((following, -back, one))
    return [one for _, _, one in sorted(placed, key=lambda place: place[:2])]


def retell(
    submit: Submit, log: list[Event], tellers: list[list[ReportedStep]]
) -> tuple[RunState, list[Event]]:
    """The run as the core makes it of all this, and its log. Fails at the first difference."""
    nonces = count(1)
    run, begun = begin(submit, log[0].time, next(nonces))
    replayed = list(begun.events)
    ours: dict[tuple[str, int, int], Token] = {}
    for one in in_order(tellers):
        _learn(ours, run)
        move = _translated(one.move, ours)
        decision = step(run, move, one.now, next(nonces))
        assert _said(decision) == (one.events, one.published, one.ended), one
        replayed += decision.events
    return run, replayed


def _learn(ours: dict[tuple[str, int, int], Token], run: RunState) -> None:
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        ours[spec.id, node.token.epoch, node.token.attempt] = node.token


def _translated(move: Any, ours: dict[tuple[str, int, int], Token]) -> Transition:
    token: Token | None = getattr(move, "token", None)
    if token is not None and token.nonce != FORGED:
        move = move._replace(token=ours[move.node, token.epoch, token.attempt])
    return move  # type: ignore[no-any-return]


def _said(decision: Decision) -> tuple[list[Event], list[int], bool]:
    return decision.events, [order.node_index for order in decision.dispatch], decision.ended
