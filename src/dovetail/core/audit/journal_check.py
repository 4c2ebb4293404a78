"""Checks a journal against the rules: `step` makes each decision again and the two are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.core.audit.replay import (
    JournalEntry,
    UnreadableJournal,
    is_too_large,
    published,
    submit_of,
)
from dovetail.core.events import TRACEBACK, Event, Token
from dovetail.core.run import Phase, RunState, UnreadOutput
from dovetail.core.states import Reason
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    TakeOver,
    Transition,
    Wake,
)


def verify(submit: Submit, entries: Iterable[JournalEntry]) -> tuple[RunState | None, list[str]]:
    """The run as the rules make it, and where the journal differs from it, as sentences.

    It stops at the first difference: everything after it depends on another state.
    """
    run: RunState | None = None
    expected_seq = 1
    for entry in entries:
        if entry.seq != expected_seq:
            return run, [f"event {expected_seq} is missing: the log goes on with {entry.seq}"]
        expected_seq += len(entry.events)
        if run is None:
            if entry.kind != "submit":
                return None, [f"the log begins with '{entry.kind}', not with 'submit'"]
            try:
                given = submit_of(submit, entry.extra)
            except (KeyError, UnreadableJournal) as problem:
                return None, [f"event {entry.seq}: 'submit' cannot be understood: {problem!r}"]
            run, decision = begin(given, entry.time, entry.seq)
        else:
            try:
                transition = _transition_of(run, entry)
            except (KeyError, IndexError, TypeError, ValueError) as problem:
                return run, [f"event {entry.seq}: '{entry.kind}' cannot be understood: {problem!r}"]
            decision = step(run, transition, entry.time, entry.seq)
        if found := _differences(entry, decision):
            return run, found
    if run is None:
        return None, ["the log is empty"]
    return run, []


def _differences(entry: JournalEntry, decision: Decision) -> list[str]:
    if found := compare(entry.events, decision.events):
        return [found]
    ruled = published(decision.dispatch)
    if list(entry.dispatch) != ruled:
        return [
            f"event {entry.seq}: '{entry.kind}' published the nodes {list(entry.dispatch)}, "
            f"the rules publish {ruled}"
        ]
    return []


def compare(kept: Sequence[Event], made: Sequence[Event]) -> str | None:
    """The first difference between the events of one decision, as a sentence."""
    for logged, ruled in zip(kept, made, strict=False):
        if logged != ruled and not same_but_for_words(logged, ruled):
            return f"event {logged.seq}: {_contrast(logged, ruled)}"
    if len(kept) > len(made):
        surplus = kept[len(made)]
        return f"event {surplus.seq}: the log has {describe(surplus)}, the rules nothing"
    if len(kept) < len(made):
        lacking = made[len(kept)]
        return f"event {lacking.seq}: the rules make {describe(lacking)}, the log has nothing"
    return None


def same_but_for_words(one: Any, other: Any) -> bool:
    """Whether two values differ at most in the message about a lost worker: a log with an older
    wording of that message is not damaged."""
    if isinstance(one, Event) and isinstance(other, Event):
        return one._replace(data=None) == other._replace(data=None) and same_but_for_words(
            one.data, other.data
        )
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        return bool(one == other)
    lost = one.get("type") == other.get("type") == Reason.WORKER_LOST
    return all(
        (lost and name == "message") or same_but_for_words(one[name], other[name]) for name in one
    )


def _contrast(logged: Event, ruled: Event) -> str:
    if describe(logged) != describe(ruled):
        return f"the log has {describe(logged)}, the rules make it {describe(ruled)}"
    field = next(name for name in Event._fields if getattr(logged, name) != getattr(ruled, name))
    has, makes = getattr(logged, field), getattr(ruled, field)
    return f"{describe(logged)} has {field} {has} in the log, {makes} by the rules"


def describe(event: Event) -> str:
    where = "" if event.node is None else f" of '{event.node}' (attempt {event.attempt})"
    data = {name: str(v) if isinstance(v, str) else v for name, v in (event.data or {}).items()}
    return f"{event.type}{where}" + (f" {data}" if data else "")


def _transition_of(run: RunState, entry: JournalEntry) -> Transition:
    if entry.events and entry.events[0].type == "result.refused":
        return _refused(run, entry.events[0])
    return _TRANSITIONS[entry.kind](run, entry)


def _refused(run: RunState, event: Event) -> Complete:
    """A result that was refused; the log does not keep its output."""
    name = event.node or ""
    token = run.node(name).token
    if (event.data or {}).get("reason") == "stale":
        token = Token(event.epoch, event.attempt or 0, -1)
    return Complete(run.id, name, token, None)


def _subject(run: RunState, entry: JournalEntry) -> tuple[str, str, Token]:
    name = entry.events[0].node
    if name is None:
        raise ValueError("it has no node")
    return run.id, name, run.node(name).token


def _at(run: RunState, index: int | str) -> tuple[str, str, Token]:
    if isinstance(index, str):
        return run.id, index, run.node(index).token
    return run.id, run.graph.nodes[index].id, run.nodes[index].token


def _data(entry: JournalEntry) -> dict[str, Any]:
    return entry.events[0].data or {}


def _lease(until: float | None) -> float:
    return math.inf if until is None else until


def _output(entry: JournalEntry) -> Any:
    """The node's output; of one that was too large for its run only the size was kept."""
    return UnreadOutput(int(entry.extra)) if is_too_large(entry.events) else entry.extra


def _fail(run: RunState, entry: JournalEntry) -> Fail:
    data = _data(entry)
    subject = _subject(run, entry)
    error = reported_error(data)
    if entry.events[0].type == "node.retrying":
        return Fail(*subject, error, after=data["delay"])
    unrendered = run.node(subject[1]).phase is Phase.PUBLISHED
    return Fail(*subject, error, permanent=True, unrendered=unrendered)


def reported_error(data: dict[str, Any]) -> dict[str, Any]:
    """The error as the worker reported it, from the data of the attempt's event."""
    error: dict[str, Any] = data["error"]
    return error if TRACEBACK not in data else {**error, TRACEBACK: data[TRACEBACK]}


def _progress(run: RunState, entry: JournalEntry) -> Progress:
    data = _data(entry)
    return Progress(*_subject(run, entry), data["fraction"], data["message"])


def _expand(run: RunState, entry: JournalEntry) -> Expand:
    data = _data(entry)
    if "error" in data:
        return Expand(*_subject(run, entry), 0, reported_error(data))
    return Expand(*_subject(run, entry), data["items"])


_TRANSITIONS: dict[str, Callable[[RunState, JournalEntry], Transition]] = {
    "claim": lambda run, e: Claim(*_subject(run, e), _data(e)["worker"], _lease(e.extra)),
    "renew": lambda run, e: Renew(*_at(run, e.extra[0]), _lease(e.extra[1])),
    "complete": lambda run, e: Complete(*_subject(run, e), _output(e)),
    "recall": lambda run, e: Recall(*_subject(run, e), _output(e)),
    "fail": _fail,
    "reap": lambda run, e: Reap(*_subject(run, e), e.extra),
    "take_over": lambda run, e: TakeOver(run.id, *e.extra),
    "cancel": lambda run, e: Cancel(run.id),
    "retry": lambda run, e: Retry(run.id, _data(e).get("from")),
    "park": lambda run, e: Park(*_subject(run, e), _data(e)["until"]),
    "wake": lambda run, e: Wake(*_at(run, e.extra)),
    "progress": _progress,
    "expand": _expand,
}
