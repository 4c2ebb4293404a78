"""A run that was put back from an archive: what may have started is not started again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.audit.event_check import audit
from dovetail.core.states import NodeStatus
from dovetail.core.step import UNKNOWN_WORKER, counts_as_started, restore, step
from dovetail.core.transitions import Claim, Complete, Park, Reap, Submit

from .walk import Walk

ONCE = {"delivery": "at_most_once"}


def restored(walk: Walk, lease: float = 10.0) -> list[str]:
    """The nodes that count as started."""
    now = walk.now
    decision = restore(walk.state, now + lease, now)
    walk.log += decision.events
    return [event.node or "" for event in decision.events]


def differences(walk: Walk) -> list[str]:
    return audit(Submit("r", walk.state.graph, {}), walk.log, walk.state)


def test_an_at_most_once_node_that_was_published_counts_as_started() -> None:
    walk = Walk({"a": [], "b": [], "c": ["a"]}, a=ONCE, c=ONCE)
    token = walk.token("a")
    assert restored(walk) == ["a"], "'b' may run twice, and 'c' was never published"
    node = walk.state.node("a")
    assert (node.status, node.worker, node.attempt) == (NodeStatus.RUNNING, UNKNOWN_WORKER, 1)
    assert not step(walk.state, Claim("r", "a", token, "w", 99.0), walk.now, 7), "not again"
    assert differences(walk) == []


def test_the_result_of_the_worker_that_started_it_counts() -> None:
    walk = Walk({"a": []}, a=ONCE)
    token = walk.token("a")
    restored(walk)
    assert step(walk.state, Complete("r", "a", token, 1), walk.now, 7).ended
    assert walk.state.status.value == "COMPLETED"


def test_without_a_word_from_its_worker_it_is_lost_and_not_started_again() -> None:
    walk = Walk({"a": []}, a=ONCE)
    token = walk.token("a")
    restored(walk, lease=10.0)
    lost = step(walk.state, Reap("r", "a", token, 3), walk.now + 11.0, 7)
    walk.log += lost.events
    node = walk.state.node("a")
    assert (node.status, node.error["type"]) == (NodeStatus.FAILED, "worker_lost")  # type: ignore[index]
    assert not lost.dispatch
    assert differences(walk) == []


def test_one_that_was_held_or_parked_counts_as_started_too() -> None:
    walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=1, b=ONCE, c={**ONCE})
    assert walk.phase("b") == "held"
    assert restored(walk) == ["b", "c"]
    assert walk.state.held == []
    assert walk.state.active == 3
    assert differences(walk) == []
    walk = Walk({"a": []}, a={**ONCE, "resource_tag": "t"})
    out = step(walk.state, Park("r", "a", walk.token("a"), walk.now + 50), walk.now, 7)
    walk.log += out.events
    assert restored(walk) == ["a"]
    assert walk.state.node("a").until is None
    assert differences(walk) == []


def test_a_log_in_which_it_starts_a_second_time_is_a_difference() -> None:
    walk = Walk({"a": []}, a=ONCE)
    restored(walk)
    again = walk.log[-1]._replace(seq=walk.log[-1].seq + 1, data={"worker": "w"})
    (found,) = audit(Submit("r", walk.state.graph, {}), [*walk.log, again], walk.state)
    assert "'a', which is at_most_once, was started again in epoch 1" in found
    walk = Walk({"a": []}, a=ONCE)
    walk.start("a")
    again = walk.log[-1]._replace(seq=walk.log[-1].seq + 1)
    (found,) = audit(Submit("r", walk.state.graph, {}), [*walk.log, again], walk.state)
    assert "was started again" in found


@given(status=st.sampled_from(NodeStatus), once=st.booleans())
def test_only_a_queued_at_most_once_node_may_have_started(status: NodeStatus, once: bool) -> None:
    assert counts_as_started(status, once) == (once and status is NodeStatus.QUEUED)


@pytest.mark.parametrize("policy", ["continue", "fail_fast"])
@given(data=st.data())
def test_whenever_a_run_is_restored_no_at_most_once_node_starts_twice(
    policy: Any, data: st.DataObject
) -> None:
    """Nodes are done in any order; at any moment the run is restored as the archive has it."""
    shape = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    once = data.draw(st.sets(st.sampled_from(list(shape))))
    limit = data.draw(st.sampled_from([None, 1, 2]))
    walk = Walk(shape, on_failure=policy, max_concurrency=limit, **dict.fromkeys(once, ONCE))
    starts: dict[str, int] = {}
    for _ in range(data.draw(st.integers(0, 6))):
        ready = [name for name in shape if walk.phase(name) == "published"]
        if not ready:
            break
        name = data.draw(st.sampled_from(ready))
        walk.run(name)
        starts[name] = 1
    walked = {name for name in once if walk[name].status is NodeStatus.QUEUED}
    assert set(restored(walk)) == walked
    for name in walked:
        starts[name] = starts.get(name, 0) + 1
    assert all(starts.get(name, 0) <= 1 for name in once)
    assert not any(walk.phase(name) == "published" for name in once)
    assert differences(walk) == []
