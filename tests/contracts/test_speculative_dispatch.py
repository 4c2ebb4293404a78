"""Messages that travel with the call that makes their nodes ready: they save a roundtrip, and a
run is as if they had been sent afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.transitions import Complete, Decision, Dispatch, Submit
from dovetail.engine.distributed.publisher import Publisher, TaskRenderer
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.fast_path import MAX_PREDICTED
from dovetail.stores.redis.store import RedisStore, SpeculativeDispatch
from dovetail.transports.messages import read_task
from dovetail.transports.streams.sender import StreamSender

from ..core.walk import graph

LACKS = "{{ params.lacks }}"
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


class Hot:
    """A store that sends ahead, and what it has sent."""

    def __init__(self, pipe: PipelinedRedis) -> None:
        self.pipe = pipe
        sender, renderer = StreamSender(pipe), TaskRenderer()
        ahead = SpeculativeDispatch(renderer.render_ahead, sender.sending)
        self.store = RedisStore(pipe, ahead=ahead)
        self.publisher = Publisher(self.store, self.store, sender, lambda: 1.0, renderer=renderer)
        self.seen = 0

    async def begun(self, of: Graph) -> list[Task]:
        decision = await self.store.create(Submit("r", of, {}), 1.0)
        await self.publisher.publish(decision.dispatch)
        await self.store.sent()
        return await self.started()

    async def sent(self) -> list[Task]:
        """The tasks on the stream that were not seen before."""
        entries = await self.pipe.call("XRANGE", "tasks:h", "-", "+")
        new = entries[self.seen :]
        self.seen = len(entries)
        return [read_task(fields) for _, fields in new]

    async def started(self) -> list[Task]:
        """Everything that was sent, claimed."""
        tasks = await self.sent()
        granted = await self.store.claim(tasks, "w", 20.0, 2.0)
        return [task for task, mine in zip(tasks, granted, strict=True) if mine]

    async def complete(self, *tasks: Task) -> list[Decision]:
        decisions = await self.store.apply([completion(task) for task in tasks], 3.0)
        await self.store.sent()
        return decisions


def completion(task: Task) -> Complete:
    return Complete(task.run_id, task.node_id, task.token, {"x": task.node_id})


def ordered(decisions: list[Decision]) -> list[str]:
    def name(dispatch: Dispatch) -> str:
        return dispatch.run.graph.nodes[dispatch.node_index].id

    return [name(dispatch) for decision in decisions for dispatch in decision.dispatch]


@pytest.fixture
async def hot(redis_url: str) -> AsyncIterator[Hot]:
    async with PipelinedRedis(redis_url) as pipe:
        yield Hot(pipe)


async def test_the_children_of_a_result_are_published_in_the_same_call(hot: Hot) -> None:
    (a,) = await hot.begun(graph(DIAMOND, b={"config": {"of": "{{ a.x }}"}}))
    before = hot.pipe.roundtrips
    decisions = await hot.complete(a)
    assert hot.pipe.roundtrips == before + 1
    assert ordered(decisions) == []
    assert [event.type for event in decisions[0].events] == [
        "node.completed",
        "node.queued",
        "node.queued",
    ]
    b, c = await hot.started()
    assert (b.config, b.inputs()) == ({"of": "a"}, {"a": {"x": "a"}})
    assert ordered(await hot.complete(b, c)) == []
    (d,) = await hot.started()
    assert d.inputs() == {"b": {"x": "b"}, "c": {"x": "c"}}
    (end,) = await hot.complete(d)
    assert end.ended


async def test_the_roots_of_a_run_are_published_in_the_same_call(hot: Hot) -> None:
    await hot.begun(graph(DIAMOND))
    before = hot.pipe.roundtrips
    decision = await hot.store.create(Submit("r2", graph(DIAMOND), {}), 1.0)
    assert hot.pipe.roundtrips == before + 1  # with its definition before it
    assert ordered([decision]) == []
    await hot.store.sent()
    (a,) = await hot.started()
    assert (a.run_id, a.node_id) == ("r2", "a")


@pytest.mark.parametrize(
    "given",
    [{"max_concurrency": 2}, {"a": {"condition": "{{ 1 == 1 }}"}}, {"a": {"config": {"x": LACKS}}}],
    ids=["max_concurrency", "condition", "cannot be rendered"],
)
async def test_roots_with_a_limit_a_condition_or_a_failing_template_are_dispatched_instead(
    hot: Hot, given: dict[str, Any]
) -> None:
    decision = await hot.store.create(Submit("r", graph({"a": []}, **given), {}), 1.0)
    assert ordered([decision]) == ["a"]
    assert await hot.sent() == []


async def test_an_existing_run_is_not_created_again(hot: Hot) -> None:
    assert [task.node_id for task in await hot.begun(graph(DIAMOND))] == ["a"]
    assert not await hot.store.create(Submit("r", graph(DIAMOND), {}), 2.0)
    await hot.store.sent()
    assert await hot.started() == []


async def test_of_many_nodes_the_first_are_published_and_the_others_dispatched(hot: Hot) -> None:
    wide = {"a": []} | {f"n{n}": ["a"] for n in range(MAX_PREDICTED + 20)}
    (a,) = await hot.begun(graph(wide))
    decisions = await hot.complete(a)
    sent = [task.node_id for task in await hot.started()]
    assert len(sent) == MAX_PREDICTED
    assert {*sent, *ordered(decisions)} == {name for name in wide if name != "a"}
    assert len(ordered(decisions)) == 20


async def test_a_node_with_a_parent_in_another_call_is_dispatched(hot: Hot) -> None:
    (a,) = await hot.begun(graph(DIAMOND))
    await hot.complete(a)
    b, c = await hot.started()
    assert ordered(await hot.complete(b)) == []
    assert await hot.sent() == []
    assert ordered(await hot.complete(c)) == ["d"]
    assert await hot.sent() == []


async def test_messages_sent_with_a_refused_result_start_nothing(hot: Hot) -> None:
    (a,) = await hot.begun(graph(DIAMOND))
    await hot.complete(a)
    assert [task.node_id for task in await hot.started()] == ["b", "c"]
    again = await hot.complete(a)
    assert not again[0].changed
    assert ordered(again) == []
    assert await hot.started() == []


async def test_after_redis_forgot_the_script_every_node_is_dispatched(hot: Hot) -> None:
    """What was sent then came before the node was ready, and may have been read in vain."""
    (a,) = await hot.begun(graph(DIAMOND))
    await hot.pipe.call("SCRIPT", "FLUSH")
    assert ordered(await hot.complete(a)) == ["b", "c"]


@pytest.mark.parametrize(
    "given",
    [
        {"max_concurrency": 2},
        {"c": {"condition": "{{ b.x == 'b' }}"}},
        {"c": {"cache": {"ttl_seconds": 60}}},
        {"c": {"config": {"of": "{{ a.x }}"}}},
        {"c": {"config": {"of": "{{ b.lacks }}"}}},
    ],
    ids=["max_concurrency", "condition", "cache", "reads a grandparent", "cannot be rendered"],
)
async def test_a_child_that_depends_on_more_than_the_results_is_dispatched(
    hot: Hot, given: dict[str, Any]
) -> None:
    (a,) = await hot.begun(graph({"a": [], "b": ["a"], "c": ["b"]}, **given))
    decisions = await hot.complete(a)
    await hot.publisher.publish([one for each in decisions for one in each.dispatch])
    (b,) = await hot.started()
    assert ordered(await hot.complete(b)) == ["c"]
    assert await hot.sent() == []


async def test_an_output_from_before_redis_lost_it_is_not_used(hot: Hot) -> None:
    """Others have run the parent again meanwhile, and it has another output by now."""
    of = graph({"a": [], "c": [], "b": ["a", "c"]})
    a, c = await hot.begun(of)
    await hot.complete(a)
    await hot.pipe.call("HSET", "wf:{r}:out", of.index["a"], '{"x":"new"}')
    (order,) = [one for each in await hot.complete(c) for one in each.dispatch]
    (scene,) = await hot.store.scopes({"r": [order]})
    assert scene.inputs(order.node_index) == {"a": {"x": "new"}, "c": {"x": "c"}}


async def test_parents_of_many_runs_are_read_together_even_if_some_were_skipped(hot: Hot) -> None:
    of = graph({"a": [], "b": [], "c": ["a", "b"]}, b={"condition": False})
    orders = {}
    for number in range(20):
        run_id = f"r{number}"
        decision = await hot.store.create(Submit(run_id, of, {}), 1.0)
        (a,) = decision.dispatch
        start = Task(run_id, "a", a.token, "h", {}, {}, {}, 1.0, place=a.node_index)
        await hot.store.claim([start], "w", 20.0, 2.0)
        await hot.store.apply([completion(start)], 3.0)
        orders[run_id] = [Dispatch(a.run, of.index["c"], a.token)]
    before = hot.pipe.roundtrips
    scenes = await hot.store.scopes(orders)
    assert hot.pipe.roundtrips - before == 2
    assert [scene.inputs(of.index["c"]) for scene in scenes] == [{"a": {"x": "a"}}] * 20
    assert {scene.get("b").status for scene in scenes} == {"SKIPPED"}


async def items_begun(hot: Hot, total: int) -> list[Task]:
    """A run with a mapped node, whose first items are started."""
    each = {"items": list(range(total)), "max_concurrency": 3}
    config = {"of": "{{ item }}"}
    of = graph({"m": []}, m={"for_each": each, "config": config})
    decision = await hot.store.create(Submit("r", of, {}), 1.0)
    expands = await hot.publisher.publish(decision.dispatch)
    (expanded,) = await hot.store.apply(expands, 1.0)
    await hot.publisher.publish(expanded.dispatch)
    return await hot.started()


async def test_the_next_items_are_sent_with_the_results(hot: Hot) -> None:
    tasks = await items_begun(hot, 12)
    for number in range(3):
        decisions = await hot.complete(*tasks)
        assert not any(decision.dispatch for decision in decisions)
        tasks = await hot.started()
        assert [task.item for task in tasks] == [3 * number + 3 + item for item in range(3)]
        assert [task.config for task in tasks] == [{"of": task.item} for task in tasks]
    (*_, last) = await hot.complete(*tasks)  # the list has come to its end
    assert (last.ended, await hot.sent()) == (True, [])
    assert (await hot.store.load("r")).node("m").output == [{"x": f"m[{n}]"} for n in range(12)]


async def test_items_are_not_predicted_while_another_process_begins_some(hot: Hot) -> None:
    tasks = await items_begun(hot, 30)
    other = RedisStore(hot.pipe)
    # The first is right, the second is not, as the other one began that item: none after that.
    for predicted, is_right in ((1, True), (1, False), (0, False), (0, False)):
        first, *rest = tasks
        decisions = await hot.complete(first)
        ahead = await hot.sent()
        assert len(ahead) == predicted
        assert await hot.store.claim(ahead, "w", 20.0, 2.0) == [is_right] * predicted
        decisions += await other.apply([completion(task) for task in rest], 3.0)
        orders = [order for decision in decisions for order in decision.dispatch]
        assert len(orders) == 3 - is_right
        await hot.publisher.publish(orders)
        tasks = [*(ahead if is_right else ()), *await hot.started()]
        assert len(tasks) == 3


async def test_items_that_were_predicted_wrongly_start_all_the_same(hot: Hot) -> None:
    tasks = await items_begun(hot, 30)
    decisions = await RedisStore(hot.pipe).apply([completion(task) for task in tasks], 3.0)
    await hot.publisher.publish([order for one in decisions for order in one.dispatch])
    tasks = await hot.started()
    assert [task.item for task in tasks] == [3, 4, 5]
    decisions = await hot.complete(*tasks)
    predicted = await hot.sent()
    assert [task.item for task in predicted] == [3, 4, 5]
    assert await hot.store.claim(predicted, "w", 20.0, 2.0) == [False] * 3
    await hot.publisher.publish([order for one in decisions for order in one.dispatch])
    assert [task.item for task in await hot.started()] == [6, 7, 8]
