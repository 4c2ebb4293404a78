"""A fork in any store is the fork that the core makes, event for event, and goes on so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from dovetail.core.fork import plan_fork
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.step import begin
from dovetail.core.transitions import Submit
from dovetail.engine.ports import Store

from ..core.drawn import changed, deeds, examples, limits
from ..core.test_fork import older_runs
from ..core.walk import graph
from .stores import STORES, Peers, new_run_id, opened, plain, read
from .twins import Twins

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


@pytest.mark.parametrize("name", STORES)
def test_a_fork_of_any_run_equals_the_core(name: str) -> None:
    with opened(name) as (runner, store):

        @examples(120)
        @given(st.data(), deeds, limits)
        def walk(data: st.DataObject, story: list[Any], max_bytes: int | None) -> None:
            old = data.draw(older_runs())
            new = data.draw(changed(old.graph))
            submit = Submit("fork", new, old.params, forked_from=old.id)
            plan = plan_fork(old, submit)
            runner.run(Twins([store], new, note, max_bytes, plan.reuse).walk(story))

        walk()


def fork(outputs: dict[str, Any], **fields: Any) -> Submit:
    return Submit(new_run_id(), graph(CHAIN, **fields), {}, reused=outputs, forked_from="older")


async def test_a_fork_that_is_made_twice_is_made_once(peers: Peers) -> None:
    submit = fork({"a": {"x": 1}})
    assert await peers[0].create(submit, 1000.0)
    assert not await peers[-1].create(submit._replace(reused={}), 1001.0)
    run = await peers[-1].load(submit.run_id)
    assert run.node("a").output == {"x": 1}
    assert run.seq == 4


async def test_a_fork_with_nothing_left_to_run_has_ended(peers: Peers) -> None:
    submit = fork({"a": 1, "b": 2, "c": 3})
    decision = await peers[0].create(submit, 1000.0)
    assert decision.ended
    run = await peers[-1].wait(submit.run_id)
    assert (run.status, run.finished_at, run.forked_from) == ("COMPLETED", 1000.0, "older")


async def test_a_fork_that_fails_as_it_begins_equals_the_core(peers: Peers) -> None:
    """A condition that cannot be evaluated fails its node, and with it the run."""
    for policy in ("fail_fast", "continue"):
        submit = fork({"a": {"x": 1}}, on_failure=policy, b={"condition": "{{ a.nothing.here }}"})
        await peers[0].create(submit, 1000.0)
        core, decision = begin(submit, 1000.0, 1)
        assert core.failed
        run = await peers[-1].load(submit.run_id)
        assert plain(run) == plain(core)
        assert await read(peers[0], submit.run_id, run.seq) == decision.events


@pytest.mark.parametrize("output", [[1, None, 3], [], "no list"])
async def test_a_reused_mapped_node_equals_the_core(peers: Peers, output: Any) -> None:
    submit = fork({"a": output}, a={"for_each": [1, 2, 3]}, b={"for_each": "{{ a }}"})
    await peers[0].create(submit, 1000.0)
    core, _ = begin(submit, 1000.0, 1)
    run = await peers[-1].load(submit.run_id)
    assert plain(run) == plain(core)


LARGE = {name: {"text": f"{number}" * 100_000} for number, name in enumerate(CHAIN)}


async def test_reused_outputs_are_read_like_any_other(peers: Peers) -> None:
    submit = fork(dict(list(LARGE.items())[:2]))
    await peers[0].create(submit, 1000.0)
    for store in peers:
        assert (await store.load(submit.run_id)).node("b").output == LARGE["b"]
        await _read_in_parts(store, submit.run_id)


async def _read_in_parts(store: Store, run_id: str) -> None:
    run = await store.load(run_id, room=ReadBudget(1000, 1000))
    outputs = [run.node(name).output for name in ("a", "b")]
    wanted = [one for one in outputs if isinstance(one, OutputReference)]
    texts = await store.read_outputs(run, wanted)
    assert all(b"text" in text for text in texts)
    assert len(wanted) in (0, 2), "in the memory of its owner, or not at all"
    assert (await store.load(run_id, outputs=False)).forked_from == "older"
