"""Why each unfinished node of a run is where it is, in words and as data.

A pure reading of the run: it decides nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.core.dag import NodeSpec
from dovetail.core.effects import why_stopped
from dovetail.core.errors import one_line
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.text import counted
from dovetail.engine.views import item_counts, timestamp

MAX_NAMED_PARENTS = 5
"""So many parents are named in a sentence; `details` has them all."""

NEVER_RUN = "never run"
_COUNTED = {
    NodeStatus.COMPLETED: "completed",
    NodeStatus.FAILED: "failed",
    NodeStatus.SKIPPED: "skipped",
    NodeStatus.CANCELLED: "cancelled",
    NodeStatus.RUNNING: "running",
    NodeStatus.QUEUED: "queued",
    NodeStatus.PENDING: "pending",
}


class Why(NamedTuple):
    code: str
    sentence: str
    details: dict[str, Any]


def explain(
    run: RunState,
    now: float,
    driven: bool,
    served: Container[str] | None = None,
    damage: Sequence[str] = (),
    hindered: str | None = None,
) -> list[dict[str, Any]]:
    """Every node that has not finished, as `GET /runs/<id>/explain` answers.

    `driven`: a live process works on the run. Without one nothing moves, whatever a node waits
    for besides. `served`: the handlers of live workers; None if the process that drives the
    run has them all. `damage`: where the run's state disagrees with itself or with its log. Then
    it is not known what a node waits for. `hindered`: why published nodes do not reach a worker, if
    that is so.
    """
    explained = []
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        if node.status in FINISHED:
            continue
        why = _damaged(damage) if damage else _why(run, spec, node, now, driven, served, hindered)
        explained.append(
            {
                "id": spec.id,
                "status": node.status.value,
                "code": why.code,
                "why": why.sentence,
                "details": why.details,
            }
        )
    return explained


_ENDED = {
    Reason.CONDITION_FALSE: "skipped: its condition is false",
    Reason.DEPENDENCY_SKIPPED: "skipped: all its parents were skipped",
    Reason.RUN_FAILED: "cancelled: its run has failed",
    Reason.RUN_CANCELLED: "cancelled with its run",
    Reason.WORKER_LOST: "failed: its worker was lost",
    Reason.TOO_MANY_FAILURES: "cancelled: too many items of its node failed",
}


def explain_end(node: NodeState) -> dict[str, Any] | None:
    """Why a finished node ended so, if its handler did not decide it."""
    if node.reason is None:
        return None
    details = {} if node.cause is None else {"cause": node.cause}
    ended = "skipped" if node.status is NodeStatus.SKIPPED else "never started"
    sentence = _ENDED.get(node.reason) or f"{ended}: '{node.cause}' failed"
    return {"code": node.reason.value, "why": sentence, "details": details}


def counts(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many of a run's nodes are in which state, in words; only states that some node is in.

    A node that `fail_fast` failed along with its parent is FAILED, too, but it never ran.
    """
    found = dict.fromkeys(_COUNTED.values(), 0) | {NEVER_RUN: 0}
    for node in nodes:
        status = NodeStatus(node["status"])
        never = node["reason"] == Reason.DEPENDENCY_FAILED and status is NodeStatus.FAILED
        found[NEVER_RUN if never else _COUNTED[status]] += 1
    return {word: count for word, count in found.items() if count}


def _damaged(damage: Sequence[str]) -> Why:
    sentence = f"damaged: {damage[0]}; `dovetail runs repair` rebuilds the run from its log"
    return Why("damaged", sentence, {"damage": list(damage)})


def _why(
    run: RunState,
    spec: NodeSpec,
    node: NodeState,
    now: float,
    driven: bool,
    served: Container[str] | None,
    hindered: str | None,
) -> Why:
    if node.status is NodeStatus.PENDING:
        return _waiting_for_parents(run, spec)
    if not driven:
        return _no_worker(node)
    if node.items is not None and node.phase is not Phase.EXPANDING:
        return _items(run, spec, node, now, _hindrance(spec, served, hindered))
    if node.status is NodeStatus.RUNNING:
        return _running(node, now)
    if node.phase is Phase.EXPANDING:
        return Why("queued", "queued: its list is about to be made", {"handler": spec.handler})
    if node.phase is Phase.HELD:
        limit = run.graph.max_concurrency
        details = {"max_concurrency": limit, "active": run.active}
        return Why("max_concurrency", f"run at its max_concurrency {limit}", details)
    if node.phase is Phase.PARKED:
        return _rate_limited(spec, node, now)
    if node.phase is Phase.BACKING_OFF:
        return _backing_off(spec, node, now)
    if why_not := _hindrance(spec, served, hindered):
        return Why("no_worker", f"queued, {why_not}", {"handler": spec.handler})
    return Why("queued", "queued: waits for a free slot of a worker", {"handler": spec.handler})


def _hindrance(spec: NodeSpec, served: Container[str] | None, hindered: str | None) -> str | None:
    """Why no worker starts what is queued, if that is so."""
    if hindered is not None:
        return f"but {hindered}"
    if served is not None and spec.handler not in served:
        return f"no live worker serves handler '{spec.handler}'"
    return None


def _waiting_for_parents(run: RunState, spec: NodeSpec) -> Why:
    names = [run.graph.nodes[i].id for i in spec.parents if run.nodes[i].status not in FINISHED]
    if not names:
        # Seen before the run is made, and between the end of the last parent and a verdict.
        made = run.status is not RunStatus.PENDING
        sentence = (
            "is about to be queued" if made else "accepted: an orchestrator will make the run"
        )
        return Why("queued", sentence, {"handler": spec.handler})
    noun = "parent" if len(names) == 1 else "parents"
    shown = ", ".join(names[:MAX_NAMED_PARENTS])
    more = len(names) - MAX_NAMED_PARENTS
    rest = f" and {more:,} more" if more > 0 else ""
    return Why("waiting_for_parents", f"waits for {noun} {shown}{rest}", {"parents": names})


def _no_worker(node: NodeState) -> Why:
    if node.status is NodeStatus.RUNNING:
        sentence = "interrupted: it was running when its process ended; no process is running it"
    else:
        sentence = "interrupted: queued, and no process is running the run"
    return Why("no_worker", sentence, {"worker": node.worker, "attempt": node.attempt})


def _running(node: NodeState, now: float) -> Why:
    passed = max(0.0, now - (node.started_at or now))
    attempt = f", attempt {node.attempt}" if node.attempt > 1 else ""
    details = {
        "worker": node.worker,
        "attempt": node.attempt,
        "started_at": timestamp(node.started_at),
        "seconds": round(passed, 3),
    }
    return Why("running", f"has been running for {_seconds(passed)}{attempt}", details)


_STOPPED = {
    Reason.TOO_MANY_FAILURES: "no more are started: too many failed",
    Reason.RUN_FAILED: "no more are started: the run has failed",
}


def _items(run: RunState, spec: NodeSpec, node: NodeState, now: float, why_not: str | None) -> Why:
    """A mapped node: how far its items are, and what they wait for. `why_not` says why no worker
    starts queued ones."""
    counts = item_counts(spec, node) or {}
    in_flight = [] if node.items is None else list(node.items.in_flight.values())
    waiting = {
        "waits for a rate limit": sum(one.phase is Phase.PARKED for one in in_flight),
        "backs off": sum(one.phase is Phase.BACKING_OFF for one in in_flight),
        "waits for max_concurrency": sum(one.phase is Phase.HELD for one in in_flight),
        "is queued": sum(one.phase is Phase.PUBLISHED for one in in_flight),
    }
    done = f"{counts['completed']} of {counted(counts['total'], 'item')} completed"
    words = [f"{counts['running']} running"] if counts["running"] else []
    failed = _first_failed(node)
    if failed is not None:
        error = failed["error"] or {}
        message = one_line(str(error.get("message") or error.get("type") or "no error"))
        which = "first item" if counts["failed"] > 1 else "item"
        words.append(f"{counts['failed']} failed ({which} {failed['index']}: {message})")
    words += [f"{many} {_plural(what, many)}" for what, many in waiting.items() if many]
    if why_not is not None and waiting["is queued"]:
        words.append(why_not)
    if stopped := why_stopped(run, spec.index):
        words.append(_STOPPED[stopped])
    codes = {
        "running": bool(counts["running"]),
        "rate_limited": bool(waiting["waits for a rate limit"]),
        "backing_off": bool(waiting["backs off"]),
        "max_concurrency": bool(waiting["waits for max_concurrency"]),
        "no_worker": why_not is not None and bool(waiting["is queued"]),
    }
    code = next((code for code, holds in codes.items() if holds), "queued")
    details: dict[str, Any] = {"items": counts, "failed": failed}
    waits = [one for one in in_flight if one.until is not None]
    if code in ("rate_limited", "backing_off") and waits:
        first = min(waits, key=lambda one: one.until or 0.0)
        details |= {"resource_tag": spec.resource_tag, **_until(first, _left(first, now))}
    return Why(code, ", ".join([done, *words]), details)


def _first_failed(node: NodeState) -> dict[str, Any] | None:
    """The failed item with the lowest number, and its error."""
    if node.items is None or not node.items.failed:
        return None
    index = node.items.first_failed()
    end = node.items.ended.get(index)
    return {"index": index, "error": None if end is None else end.error}


def _plural(what: str, many: int) -> str:
    if many == 1:
        return what
    return what.replace("waits", "wait").replace("backs", "back").replace("is ", "are ")


def _rate_limited(spec: NodeSpec, node: NodeState, now: float) -> Why:
    left = _left(node, now)
    sentence = f"rate limit '{spec.resource_tag}': starts in about {_seconds(left)}"
    details = {"resource_tag": spec.resource_tag, **_until(node, left)}
    return Why("rate_limited", sentence, details)


def _backing_off(spec: NodeSpec, node: NodeState, now: float) -> Why:
    left = _left(node, now)
    attempt = node.attempt + 1
    # Starts that were lost with their worker do not use up a retry.
    most = spec.max_retries + 1 + node.crashes
    sentence = f"backing off, attempt {attempt} of {most} in {_seconds(left)}"
    details = {"attempt": attempt, "max_attempts": most, "error": node.error, **_until(node, left)}
    return Why("backing_off", sentence, details)


def _left(node: NodeState, now: float) -> float:
    return max(0.0, (node.until or now) - now)


def _until(node: NodeState, left: float) -> dict[str, Any]:
    return {"until": timestamp(node.until), "seconds": round(left, 3)}


def _seconds(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h`: a wait is a guess, its tenths would only pretend."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
