"""What every process does, step by step, as the engine does it; it may die between any two steps.

A program is a row of stages, a stage a set of operations that go out together and arrive in any
order. What a process learns from an operation decides how its program goes on. The names of the
functions are those of `engine/shared.py` and `engine/remote_desk.py`, which this is a picture of:
a change of the order of two calls there is made here too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .runs import Facts, Move, Orders, Outcome, Start

Op = tuple[Any, ...]
Stage = tuple[Op, ...]
Program = tuple[Stage, ...]
Message = tuple[Any, ...]
"""("task", start) or ("result", start, kind, whether a process had it before)."""


class Process(NamedTuple):
    """What it holds of the messages it has read, and what it has yet to do."""

    hand: Message | None = None
    program: Program = ()


IDLE = Process()


def one(*op: Any) -> Stage:
    return (op,)


# ── orchestrators, and the server of a command ───────────────────────────────────────────


def submit(noted: int = 0) -> Program:
    """After the run was accepted. The agenda first: a sweep may look for a run not yet there."""
    return (one("moved", noted), one("apply", ("create",), "command"), one("made"))


def make_up(run: Facts) -> Program:
    """What was accepted and is not said to be made: its maker died, before or after it was.

    Its note is newer than the one of that maker, which a sweeper may be about to forget.
    """
    return (one("made"),) if run.known else submit(1)


def command(move: Move, epoch: int) -> Program:
    """A run that has ended is on no agenda: the process that opens it again notes that first."""
    if move[0] == "retry":
        return (one("moved", epoch + 1), one("apply", move, "command"))
    return (one("apply", move, "command"),)


def take_in(message: Message) -> Program:
    """A result; it is settled last, when no process needs it any more."""
    _, start, kind, again = message
    return (one("apply", (kind, *start), "again" if again else "result"), one("ack"))


def wake_due(start: Start) -> Program:
    return (one("apply", ("wake", *start), "command"), one("woken", start))


def reap() -> Program:
    """The mark before the reading: a claim that this misses is announced after the mark."""
    return (one("put_off"), one("running"))


def reap_in(run: Facts) -> Program:
    """What was found; the run stays on the list if a worker in it is not lost."""
    reaps = [one("apply", ("reap", *start), "reap") for start in run.expired]
    is_held = len(run.running) > len(run.expired)
    return (*reaps, one("lease" if is_held else "released"))


def follow(orders: Orders) -> Program:
    together = [("publish", start) for start in orders.dispatch]
    together += [("delay", start) for start in orders.wake]
    if orders.moved and not orders.ended:
        together.append(("moved", orders.epoch))
    program: Program = (tuple(together),) if together else ()
    if orders.ended:
        program += (one("ended", orders.epoch),)
    return program


def look_after(run: Facts, noted: int) -> Program:
    """Everything that is outstanding is made known again, from the run as it was read.

    `noted` is the newest epoch on the agenda before that: a newer one is not forgotten.
    """
    if not run.known or run.finished:
        return (one("ended", noted),)
    again: list[Op] = [("lease",)] if run.running else []
    again += [("publish", start) for start in run.published]
    again += [("delay", start) for start in run.waiting]
    return (
        one("moved", run.epoch),
        one("verdicts", Orders(epoch=run.epoch)),
        *((tuple(again),) if again else ()),
    )


def settling(epoch: int, verdicts: Any, orders: Orders) -> Program:
    """Conditions were asked; nothing follows before they are decided."""
    return (one("settle", epoch, verdicts, orders),)


def settled(first: Orders, then: Orders) -> Program:
    """Until nothing is undecided; what is so after the run has ended belongs to a retry."""
    orders = joined(first, then)
    return follow(orders) if then.ended else (one("verdicts", orders),)


def joined(first: Orders, then: Orders) -> Orders:
    return Orders(
        first.dispatch + then.dispatch,
        first.wake + then.wake,
        first.moved or then.moved,
        first.ended or then.ended,
        then.epoch,
    )


# ── workers ──────────────────────────────────────────────────────────────────────────────


def take(start: Start) -> Program:
    """The index before the claim: in a run outside the index no node would be reaped."""
    claim = one("apply", ("claim", *start), "claim")
    return (one("lease"), claim, one("ack"), one("run", start))


def park(start: Start) -> Program:
    return (one("apply", ("park", *start), "command"), one("ack"))


def renew(start: Start) -> Program:
    """The index does not learn it: a process that looks at the run finds the lease as it is."""
    return (one("apply", ("renew", *start), "renew"), one("run", start))


def report(start: Start, kind: str) -> Program:
    return (one("send", ("result", start, kind, False)),)


# ── how a program goes on ────────────────────────────────────────────────────────────────


def go_on(move: Move, then: str, outcome: Outcome, rest: Program) -> Program:
    """After the store has answered."""
    if then == "claim":
        return rest if outcome.taken else rest[:1]
    if then == "renew":
        return rest if outcome.taken else ()  # it is ours no longer: the handler is stopped
    if outcome.pending:
        program: Program = (one("verdicts", outcome.orders),)
    else:
        program = follow(outcome.orders)
    if then in ("command", "reap"):
        return program + rest
    if then == "reap" and not outcome.taken:  # renewed meanwhile, or ended: look again
        return (*program, *rest[:-1], one("lease"))
    # A process had this result before, and may have died before anything followed from it.
    if then == "again" and not outcome.orders.moved:
        program += (one("look"),)
    return program + rest


def start_of(process: Process) -> Start | None:
    """The start that it has claimed or is about to, if any."""
    for stage in process.program:
        for op in stage:
            if op[0] == "run":
                return op[1]
            if op[0] == "send":
                return op[1][1]
    return None


def runs_handler(process: Process) -> bool:
    """Its claim was granted, and its handler runs or is about to."""
    names = [op[0] for stage in process.program for op in stage]
    claims = [op for stage in process.program for op in stage if op[0] == "apply"]
    return "run" in names and not any(op[2] == "claim" for op in claims)
