"""Several tasks in a message: of handlers that are quick, and never to the harm of who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from dovetail.core.events import Token
from dovetail.core.items import item_place
from dovetail.core.transitions import Complete
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import Command, PipelinedRedis, RedisError
from dovetail.stores.redis.workers import MAX_READ_MESSAGES, WorkerFacts, WorkerRegistry
from dovetail.transports.messages import (
    DEAD,
    MAX_PACKED_BYTES,
    MAX_TASKS_PACKED,
    MIN_MESSAGES,
    task_fields,
)
from dovetail.transports.streams import reader as stream_inbox
from dovetail.transports.streams import sender as streams
from dovetail.transports.streams.reader import Received, StreamInbox
from dovetail.transports.streams.sender import WORKERS, StreamReader, StreamSender, stream_of

TOKEN = Token(1, 1, 77)
FAMILY: dict[str, Any] = {"parent": {"list": [1, "ü", None]}}
STREAM = stream_of("h")


def tasks(count: int, **changes: Any) -> list[Task]:
    plain = Task("run", "n0", TOKEN, "h", {}, {}, FAMILY, 300.0, None, (), None, 0)._replace(
        **changes
    )
    return [plain._replace(node_id=f"n{i}", config={"i": i}, place=i) for i in range(count)]


class PackedStreams:
    """One Redis, a sender that knows `h` to be quick, and any number of workers."""

    def __init__(self, pipe: PipelinedRedis, hire: Callable[..., Awaitable[StreamInbox]]) -> None:
        self.pipe = pipe
        self.sender = StreamSender(pipe)
        self.sender._quick = frozenset({"h"})
        self.hire = hire

    async def pending(self) -> int:
        return int((await self.pipe.call("XPENDING", STREAM, WORKERS))[0])

    async def length(self) -> int:
        return int(await self.pipe.call("XLEN", STREAM))

    async def emptied(self) -> None:
        """No caller waits for the reply."""
        async with asyncio.timeout(10):
            while await self.pending() or await self.length():
                await asyncio.sleep(0.001)


@pytest.fixture
async def post(redis_url: str) -> AsyncIterator[PackedStreams]:
    async with AsyncExitStack() as stack:
        pipe = await stack.enter_async_context(PipelinedRedis(redis_url))

        async def hire(name: str, stale_seconds: float | None = None) -> StreamInbox:
            blocking = await stack.enter_async_context(PipelinedRedis(redis_url))
            reader = StreamReader(blocking, pipe, WORKERS, name)
            return StreamInbox(reader, pipe, ["h", "other"], stale_seconds=stale_seconds)

        yield PackedStreams(pipe, hire)


async def settled(inbox: StreamInbox, found: Sequence[Received], post: PackedStreams) -> None:
    await inbox.acknowledge([message for message, _ in found])
    await post.pipe.call("PING")  # what is settled travels with whatever comes next


async def test_tasks_of_a_fast_handler_share_messages_and_arrive_unchanged(
    post: PackedStreams,
) -> None:
    sent = [
        *tasks(100),
        *tasks(20, run_id="r2", token=Token(1, 1, 78), params={"p": [1]}, source={"x": 1}),
        *tasks(20, run_id="r3", source=None),
        *tasks(5, timeout_seconds=1.0),
        *tasks(5, resource_tag="slow"),
    ]
    sent[7] = sent[7]._replace(config={"large": "x" * MAX_PACKED_BYTES})
    await post.sender.send(sent)
    inbox = await post.hire("w")
    found = [task for _, task in await inbox.tasks(1000)]
    assert sorted(map(repr, found)) == sorted(map(repr, sent))
    # Ten are unusual, and one is large.
    assert await post.length() == 11 + -(-139 // MAX_TASKS_PACKED)


async def test_items_of_several_nodes_share_messages_and_arrive_unchanged(
    post: PackedStreams,
) -> None:
    def item(owner: str, node: int, number: int) -> Task:
        (plain,) = tasks(1, source=None, params=None)
        name, place = f"{owner}[{number}]", item_place(node, number)
        return plain._replace(node_id=name, place=place, item=[number], item_index=number)

    sent = [item(owner, node, number) for node, owner in enumerate("ab") for number in range(70)]
    sent = [*sent[::2], *sent[1::2]]
    await post.sender.send(sent)
    found = [task for _, task in await (await post.hire("w")).tasks(1000)]
    assert sorted(found, key=str) == sorted(sent, key=str)
    assert await post.length() < len(sent) / 4


async def test_tasks_of_one_message_share_no_mutable_values(post: PackedStreams) -> None:
    await post.sender.send(tasks(128, params={"p": [1]}))
    found = [task for _, task in await (await post.hire("w")).tasks(128)]
    for task in found[::2]:
        task.inputs()["parent"]["list"].append("mine")
        task.params["p"].append("mine")
    assert all(task.inputs() == FAMILY and task.params == {"p": [1]} for task in found[1::2])


@pytest.mark.parametrize("count", [1, 2 * MIN_MESSAGES - 1])
async def test_a_few_tasks_get_one_message_each(post: PackedStreams, count: int) -> None:
    await post.sender.send(tasks(count))
    assert await post.length() == count


@pytest.mark.parametrize("count", [2 * MIN_MESSAGES, 64, 100, 1000])
async def test_there_are_enough_messages_for_many_workers(post: PackedStreams, count: int) -> None:
    await post.sender.send(tasks(count))
    assert MIN_MESSAGES <= await post.length() < count


async def test_a_handler_without_a_known_speed_gets_one_message_per_task(
    post: PackedStreams,
) -> None:
    await post.sender.send(tasks(100, handler="other"))
    assert await post.pipe.call("XLEN", stream_of("other")) == 100


async def test_a_message_is_settled_with_the_last_of_its_tasks(post: PackedStreams) -> None:
    await post.sender.send(tasks(128))
    inbox = await post.hire("w")
    first = await inbox.tasks(3)  # it could not know that three messages are not three tasks
    await settled(inbox, first, post)
    assert await post.pending() == 3
    second = await inbox.tasks(MAX_TASKS_PACKED - 3)
    await settled(inbox, second[:-1], post)
    assert await post.pending() == 3
    await settled(inbox, second[-1:], post)
    assert await post.pending() == 2
    assert await post.length() == MIN_MESSAGES - 1


async def test_all_tasks_of_a_message_of_a_dead_worker_are_reclaimed(post: PackedStreams) -> None:
    await post.sender.send(tasks(128))
    dead = await post.hire("dead")
    begun = await dead.tasks(5)
    await settled(dead, begun, post)
    heir = await post.hire("heir", 0.0)
    heir._look_at = 0.0
    found = await heir.tasks(1000)
    heir._look_at = float("inf")
    found += await heir.tasks(1000)  # and what was not read
    assert sorted(task.place or 0 for _, task in found) == list(range(128))
    await settled(heir, found, post)
    await post.emptied()


def _item(name: object, where: list[object], *others: object) -> str:
    return orjson.dumps([["r", "1.1.5", "{}", "{}", name, {}, where, *others]]).decode()


@pytest.mark.parametrize(
    "more",
    [
        *("{", "7", "[7]", "[[1,2]]", '[["r"]]', '[["r","1.1.5","{}","{}","n",{}]]'),
        *('[["r","x","{}","{}","n",{},1]]', '[["r","1.1.5","[]","{}","n",{},1]]'),
        *('[["r","1.1.5","{}","7","n",{},1]]', '[["r","1.1.5","{}","{}",5,{},1]]'),
        *('[["r","1.1.5","{}","{}","n",[],1]]', '[["r","1.1.5","{}","{}","n",{},"1"]]'),
        *('[[null,"1.1.5","{}","{}","n",{},1]]', '[["r","1.1.5",{},"{}","n",{},1]]'),
        *('[["r","1.1.5","{}","{}","n[1]",{},1]]', '[["r","1.1.5","{}","{}","n",{},[1048577,5]]]'),
        *(_item("n[1]", [1048578, 5]), _item("n[1]", [1048577]), _item("n[1]", ["1048577", 5])),
        *(_item("n[01]", [1048577, 5]), _item("n[1]", [1048577.0, 5]), _item(7, [1048577, 5])),
        _item("n[1]", [1048577, 5], "n[02]", {}, [1048578, 5]),
        *(_item("n[1]", [1, 5]), '[["r","1.1.5","{}","{}","n",{},1048577]]'),
    ],
)
async def test_a_message_with_malformed_further_tasks_becomes_a_dead_letter(
    post: PackedStreams, more: str
) -> None:
    (good,) = tasks(1)
    await post.pipe.call("XADD", STREAM, "*", *task_fields(good), "more", more)
    inbox = await post.hire("w")
    assert await inbox.tasks(10) == []
    (letter,) = await post.pipe.call("LRANGE", DEAD, 0, -1)
    assert orjson.loads(letter)["fields"]["more"] == more
    assert await post.length() == 0


async def test_further_tasks_are_found_at_any_position_of_their_message(
    post: PackedStreams,
) -> None:
    (good,) = tasks(1)
    more = '[["r","1.1.5","{}","{}","n",{},1]]'
    await post.pipe.call("XADD", STREAM, "*", "more", more, *task_fields(good))
    found = [task.run_id for _, task in await (await post.hire("w")).tasks(10)]
    assert found == ["run", "r"]


async def test_leftover_tasks_of_a_read_are_filled_up_from_the_next(post: PackedStreams) -> None:
    await post.sender.send(tasks(6000))
    inbox = await post.hire("w")
    given = []
    while sum(given) < 6000:
        found = await inbox.tasks(90)
        await settled(inbox, found, post)
        given.append(len(found))
    assert given == [90] * 66 + [60]


async def test_a_worker_with_leftover_tasks_does_not_wait_for_more(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BLOCK_MILLISECONDS", 60_000)
    await post.sender.send(tasks(4 * MIN_MESSAGES))
    inbox = await post.hire("w")
    first = await inbox.tasks(MIN_MESSAGES)  # which reads all that there is, and cannot know
    rest = await asyncio.wait_for(inbox.tasks(100), 20)
    assert len(first) + len(rest) == 4 * MIN_MESSAGES


async def test_waiting_work_is_counted_in_tasks_not_in_messages(post: PackedStreams) -> None:
    await post.sender.send(tasks(1000))
    await post.sender.send(tasks(3))
    await post.sender.send(tasks(100, handler="other"))
    for odd in ("many", "1e30", "-5", "nan", ""):
        await post.pipe.call("XADD", stream_of("odd"), "*", "tasks", odd)
    waiting = await WorkerRegistry(post.pipe).waiting(["h", "other", "odd", "none"])
    assert waiting == {"h": 1003, "other": 100, "odd": 5, "none": 0}


async def test_the_number_of_waiting_tasks_in_a_long_stream_is_estimated(
    post: PackedStreams,
) -> None:
    count = 2 * MAX_READ_MESSAGES * MAX_TASKS_PACKED
    await post.sender.send(tasks(7))
    await post.sender.send(tasks(count))
    waiting = await WorkerRegistry(post.pipe).waiting(["h"])
    assert waiting["h"] == pytest.approx(count, rel=0.1)


async def test_a_worker_with_few_free_slots_reads_few_messages(post: PackedStreams) -> None:
    await post.sender.send(tasks(1000))
    inbox = await post.hire("w")
    await settled(inbox, await inbox.tasks(2), post)  # this one could not know how many there are
    inbox._is_more = False
    while inbox._kept or inbox._unopened:
        await inbox.tasks(200)
    inbox._full = False
    before = await post.pending()
    assert len(await inbox.tasks(2 * MAX_TASKS_PACKED)) == 2 * MAX_TASKS_PACKED
    assert await post.pending() - before == 2


# ── who is quick ─────────────────────────────────────────────────────────────────────────


async def worked_off(post: PackedStreams, given: Sequence[Task], pause: float = 0.0) -> list[str]:
    """What a worker says of its handlers that was given these, and needed so long for them."""
    inbox = await post.hire("w")
    await StreamSender(post.pipe).send(given)
    inbox._busy_streams = len({task.handler for task in given})
    found = await inbox.tasks(100)
    assert len(found) == len(given)
    await asyncio.sleep(pause)
    await inbox.send([Complete(task.run_id, task.node_id, task.token, 1) for _, task in found])
    return inbox.quick()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(stream_inbox, "QUICK_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_worker_reports_which_handlers_are_fast(post: PackedStreams) -> None:
    assert await worked_off(post, tasks(20)) == ["h"]


@pytest.mark.usefixtures("patient")
async def test_a_few_results_do_not_show_that_a_handler_is_fast(post: PackedStreams) -> None:
    assert await worked_off(post, tasks(3)) == []


@pytest.mark.usefixtures("patient")
async def test_mixed_results_do_not_show_which_handler_is_fast(post: PackedStreams) -> None:
    both = [*tasks(20), *tasks(20, run_id="r2", handler="other")]
    assert await worked_off(post, both) == []


async def test_a_handler_that_becomes_slow_is_no_longer_fast(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_inbox, "QUICK_SECONDS", 60.0)
    inbox = await post.hire("w")
    await post.sender.send(tasks(20))
    found = await inbox.tasks(100)
    results = [Complete(task.run_id, task.node_id, task.token, 1) for _, task in found]
    await inbox.send(results[:10])
    assert inbox.quick() == ["h"]
    monkeypatch.setattr(stream_inbox, "QUICK_SECONDS", 0.0)
    await inbox.send(results[10:11])
    assert inbox.quick() == []


@pytest.mark.usefixtures("patient")
async def test_an_old_measurement_of_a_fast_handler_does_not_count(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_inbox, "QUICK_FOR_SECONDS", 0.0)
    assert await worked_off(post, tasks(20)) == []


async def test_a_sender_learns_the_fast_handlers_from_live_workers(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LEARN_SECONDS", 0.0)
    fleet = WorkerRegistry(post.pipe)
    sender = StreamSender(post.pipe, fleet.quick)

    async def messages() -> int:
        await post.pipe.call("DEL", STREAM)
        await sender.send(tasks(128))
        assert sender._asking is not None
        await sender._asking
        return await post.length()

    facts = WorkerFacts("w", "host", 1, 0.0, ["h"], 0, 8)
    await fleet.beat(facts)
    assert [await messages(), await messages()] == [128, 128]
    await fleet.beat(facts._replace(quick=["h"]))
    assert [await messages(), await messages()] == [128, MIN_MESSAGES]
    await post.pipe.call("DEL", "wf:worker:w")  # it died
    assert [await messages(), await messages()] == [MIN_MESSAGES, 128]
    await fleet.beat(facts._replace(quick=["h"]))
    await fleet.leave("w")
    assert [await messages(), await messages()] == [128, 128]


# ── what is kept is shared ───────────────────────────────────────────────────────────────


async def keeping(post: PackedStreams) -> tuple[StreamInbox, list[Received]]:
    """A worker that has begun some of what it has read, and what that is."""
    await post.sender.send(tasks(128))
    inbox = await post.hire("keeper")
    begun = await inbox.tasks(20)
    await settled(inbox, begun, post)
    assert len(begun) == 20
    return inbox, begun


async def test_tasks_that_cannot_start_here_are_shared_with_other_workers(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are taken by what is slow after all."""
    monkeypatch.setattr(stream_inbox, "SHARE_SECONDS", 0.0)
    keeper, begun = await keeping(post)
    await keeper.share_once()
    assert await post.length() == 108  # each by itself, so that many can take some
    other = await post.hire("other")
    found = await other.tasks(1000)
    assert sorted(task.place or 0 for _, task in (*begun, *found)) == list(range(128))
    await settled(other, found, post)
    await post.emptied()


async def test_tasks_that_could_not_be_sent_again_are_not_settled(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_inbox, "SHARE_SECONDS", 0.0)
    keeper, _ = await keeping(post)
    before = await post.pending()
    many = PipelinedRedis.call_many

    async def refused(pipe: PipelinedRedis, commands: Sequence[Command]) -> list[Any]:
        if any(isinstance(one, bytes) and b"XADD" in one for one in commands):
            raise RedisError("it is away")
        return await many(pipe, commands)

    monkeypatch.setattr(PipelinedRedis, "call_many", refused)
    with pytest.raises(RedisError):
        await keeper.share_once()
    assert await post.pending() == before  # so others find it after a lease


async def test_tasks_that_would_take_long_in_sequence_are_shared_with_other_workers(
    post: PackedStreams,
) -> None:
    keeper, _ = await keeping(post)
    keeper._pace = stream_inbox.LONG_SECONDS / 108
    await keeper.share_once()
    assert await post.length() == 108


async def test_tasks_that_can_start_soon_are_kept(post: PackedStreams) -> None:
    keeper, _ = await keeping(post)
    await keeper.share_once()
    assert await post.length() == await post.pending() == MIN_MESSAGES
    assert len(await keeper.tasks(1000)) == 108


async def test_tasks_are_kept_while_other_workers_have_messages_to_read(
    post: PackedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to wait behind all of that."""
    monkeypatch.setattr(stream_inbox, "SHARE_SECONDS", 0.0)
    keeper, _ = await keeping(post)
    await post.sender.send(tasks(1, run_id="later"))
    await keeper.share_once()
    assert await post.length() == MIN_MESSAGES + 1
    assert len(await keeper.tasks(1000)) == 108


async def test_a_leaving_worker_returns_the_tasks_that_it_did_not_start(
    post: PackedStreams,
) -> None:
    keeper, begun = await keeping(post)
    await keeper.close()
    found = await (await post.hire("other")).tasks(1000)
    assert sorted(task.place or 0 for _, task in (*begun, *found)) == list(range(128))
