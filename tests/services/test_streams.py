"""Messages on streams: what goes out comes in, and what is no message of ours stops no worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import hiredis
import orjson
import pytest

from dovetail.core.caching import Caching
from dovetail.core.events import Token
from dovetail.core.items import item_place
from dovetail.core.templates import Deferred
from dovetail.core.text import MAX_TRACEBACK_BYTES
from dovetail.core.transitions import Complete, Fail, Stop
from dovetail.core.values import MAX_DEPTH
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.transports.messages import DEAD, MAX_INPUTS, result_fields
from dovetail.transports.streams import reader as stream_inbox
from dovetail.transports.streams.reader import StopBroadcast, StreamInbox
from dovetail.transports.streams.sender import (
    RESULTS,
    WORKERS,
    StreamReader,
    StreamSender,
    stream_of,
)

TOKEN = Token(1, 2, 0xABCDEF)
TASK = Task(
    "run",
    "node",
    TOKEN,
    "h",
    {"x": [1, "ü"]},
    {"p": None},
    {"parent": {"y": 1.5}},
    12.5,
    "tag",
    (Deferred(("a", 0), "{{ secrets.S }}", {"params": {}}),),
    Caching("key", 60.0, {"params": "d1"}),
)
NESTED = "[" * 1000 + "]" * 1000


class Ends:
    def __init__(self, pipe: PipelinedRedis, inbox: StreamInbox, results: StreamReader) -> None:
        self.pipe = pipe
        self.sender = StreamSender(pipe)
        self.inbox = inbox
        self.results = results


@pytest.fixture
async def ends(redis_url: str) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        pipe, tasks, results = [
            await stack.enter_async_context(PipelinedRedis(redis_url)) for _ in range(3)
        ]
        reader = StreamReader(tasks, pipe, WORKERS, "w1")
        inbox = StreamInbox(reader, pipe, ["h", "other"])
        yield Ends(pipe, inbox, StreamReader(results, pipe, "orchestrators", "o1"))


async def test_a_task_arrives_unchanged(ends: Ends) -> None:
    await ends.sender.send([TASK])
    ((_, task),) = await ends.inbox.tasks(10)
    assert task == TASK
    assert task.inputs() == {"parent": {"y": 1.5}}


async def test_similar_tasks_each_arrive_unchanged(ends: Ends) -> None:
    plain = Task("run", "a", TOKEN, "h", {}, {"p": 1}, {"x": 1}, 300.0, None, (), None, 0)
    family = [plain._replace(node_id=f"n{i}", config={"i": i}, place=i) for i in range(3)]
    others = [
        plain._replace(token=Token(1, 3, 7)),
        plain._replace(source={"x": 2}),
        plain._replace(handler="other"),
        plain._replace(run_id="another", params={}),
        plain._replace(source={}, timeout_seconds=1.0),
        plain._replace(place=None),
    ]
    sent = [*family, *(task for other in others for task in (other, other, plain))]
    await ends.sender.send(sent)
    found = [task for _, task in await ends.inbox.tasks(100)]
    while len(found) < len(sent):
        found += [task for _, task in await ends.inbox.tasks(100)]
    for handler in ("h", "other"):
        of_it = [task for task in sent if task.handler == handler]
        assert [task for task in found if task.handler == handler] == of_it


async def test_too_large_inputs_are_not_sent_with_the_task(ends: Ends) -> None:
    large = TASK._replace(source={"parent": "x" * MAX_INPUTS})
    await ends.sender.send([large])
    ((_, task),) = await ends.inbox.tasks(10)
    assert task == large._replace(source=None)


@pytest.mark.parametrize(
    "result",
    [
        Complete("run", "node", TOKEN, {"a": [None, "ü"]}),
        Complete("run", "node", TOKEN, None, Caching("key", 60.0, {"params": "d1"})),
        Fail("run", "node", TOKEN, {"type": "E", "message": "m"}, permanent=True),
        Fail(
            *("run", "node", TOKEN, {"type": "E", "message": "m"}),
            after=1.5,
            at_least=2.5,
            chance=0.25,
        ),
    ],
)
async def test_a_result_arrives_unchanged(ends: Ends, result: Any) -> None:
    await ends.inbox.send([result])
    (message,) = await ends.results.read([RESULTS], 10)
    assert message.content == result


async def test_a_settled_message_is_gone(ends: Ends) -> None:
    await ends.sender.send([TASK] * 3)
    found = await ends.inbox.tasks(10)
    await ends.inbox.acknowledge([message for message, _ in found])
    assert len(found) == 3
    async with asyncio.timeout(10):
        while await ends.pipe.call("XLEN", stream_of("h")):
            await asyncio.sleep(0.01)
    assert (await ends.pipe.call("XPENDING", stream_of("h"), WORKERS))[0] == 0


async def test_messages_of_a_dead_consumer_are_claimed_by_another(ends: Ends) -> None:
    await ends.sender.send([TASK])
    await ends.inbox.tasks(10)
    other = StreamReader(ends.pipe, ends.pipe, WORKERS, "w2")
    assert [m.content for m in await other.claim_stale([stream_of("h")], 0.0, 10)] == [TASK]
    assert await other.claim_stale(["tasks:nobody"], 0.0, 10) == []


@pytest.mark.parametrize("held", [0, 1])
async def test_a_settled_message_that_was_not_deleted_is_deleted_later(
    ends: Ends, held: int
) -> None:
    """Who settled it died in between."""
    family = [TASK._replace(node_id=f"n{i}") for i in range(3)]
    await ends.sender.send(family)
    read = [message for message, _ in await ends.inbox.tasks(10)]
    settled = [message.id for message in read[: 3 - held]]
    await ends.pipe.call("XACK", stream_of("h"), WORKERS, *settled)
    await ends.sender.send([TASK])
    other = StreamReader(ends.pipe, ends.pipe, WORKERS, "w2")
    await other.claim_stale([stream_of("h")], 60.0, 10)
    left = [entry[0].decode() for entry in await ends.pipe.call("XRANGE", stream_of("h"), "-", "+")]
    assert left[:-1] == [message.id for message in read[3 - held :]]
    assert len(left) == held + 1, "what was not read stays"


async def test_a_message_that_another_group_has_not_read_stays(ends: Ends) -> None:
    await ends.sender.send([TASK])
    ((message, _),) = await ends.inbox.tasks(10)
    await ends.pipe.call("XGROUP", "CREATE", stream_of("h"), "auditors", "0")
    await ends.pipe.call("XACK", stream_of("h"), WORKERS, message.id)
    await StreamReader(ends.pipe, ends.pipe, WORKERS, "w2").claim_stale([stream_of("h")], 60.0, 10)
    assert await ends.pipe.call("XLEN", stream_of("h")) == 1


async def test_messages_whose_delivery_was_lost_are_read_after_redis_has_loaded_its_data(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Complete("run", "node", TOKEN, 1)
    await ends.inbox.send([result])
    assert len(await ends.results.read([RESULTS], 10)) == 1
    same = StreamReader(ends.pipe, ends.pipe, "orchestrators", "o1")
    await same._open(RESULTS)
    same._breaks = -1  # the connection broke
    ask, loading = (
        PipelinedRedis.send,
        [hiredis.ReplyError("LOADING Redis is loading the dataset in memory")],
    )

    def answer(self: PipelinedRedis, commands: Any, **more: Any) -> Any:
        if loading and commands[0][0] == "XREADGROUP":
            reported = asyncio.get_running_loop().create_future()
            reported.set_result([loading.pop()])
            return reported
        return ask(self, commands, **more)

    monkeypatch.setattr(PipelinedRedis, "send", answer)
    assert await same.read([RESULTS], 10) == []
    assert [message.content for message in await same.read([RESULTS], 10)] == [result]


async def test_all_messages_of_a_dead_worker_start_without_a_pause(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_inbox, "LOOK_SECONDS", 60.0)
    await ends.sender.send([TASK] * 25 + [TASK._replace(handler="other")] * 5)
    read = 0
    while read < 30:
        read += len(await ends.inbox.tasks(30))
    heir = StreamInbox(
        StreamReader(ends.pipe, ends.pipe, WORKERS, "w2"),
        ends.pipe,
        ["h", "other"],
        stale_seconds=0.0,
    )
    heir._look_at = 0.0
    async with asyncio.timeout(20):
        taken = [len(await heir.tasks(10)) for _ in range(4)]
    assert taken == [10, 5, 10, 5]


def plain_task(name: str, place: int) -> list[str | bytes]:
    """The fields of nearly every message, in their usual order."""
    return [
        *("run_id", "r", "node_id", name, "token", "1.1.1", "handler", "h"),
        *("config", "{}", "inputs", "{}", "place", str(place)),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        ["x", "y"],
        ["run_id", "r", "node_id", "n", "token", "t", "handler", "h"],
        [
            *("run_id", "r", "node_id", "n", "token", "nonsense", "handler", "h"),
            *("config", "{}", "params", "{}", "inputs", "{}"),
        ],
        [
            *("run_id", "r", "node_id", "n", "token", "1.1.1", "handler", "h"),
            *("config", "[1]", "params", "{}", "inputs", "{}"),
        ],
        [
            *("run_id", b"\xff\xfe", "node_id", "n", "token", "1.1.1", "handler", "h"),
            *("config", "{}", "params", "{}", "inputs", "{}"),
        ],
        [b"\x80\x04\x95", b"a pickle"],
        [*plain_task("n[3]", item_place(0, 5)), "item", "7"],
        [*plain_task("n[3]", 3), "item", "7"],
        [*plain_task("n", item_place(0, 3)), "timeout_seconds", "1"],
        plain_task("n[3]", item_place(0, 3)),
        plain_task("n", item_place(0, 3)),
    ],
)
async def test_a_malformed_task_becomes_a_dead_letter_and_the_next_one_is_served(
    ends: Ends, fields: list[str | bytes]
) -> None:
    await ends.pipe.call("XADD", stream_of("h"), "*", *fields)
    await ends.sender.send([TASK])
    ((_, task),) = await ends.inbox.tasks(10)
    assert task == TASK
    (letter,) = await ends.pipe.call("LRANGE", DEAD, 0, -1)
    assert orjson.loads(letter)["stream"] == stream_of("h")


async def test_a_deleted_stream_is_opened_again(ends: Ends) -> None:
    await ends.sender.send([TASK])
    await ends.inbox.tasks(10)
    await ends.pipe.call("DEL", stream_of("h"), stream_of("other"))
    await ends.sender.send([TASK])
    found: list[Any] = []
    for _ in range(3):
        found += await ends.inbox.tasks(10)
        if found:
            break
    assert [task for _, task in found] == [TASK]


async def test_a_stop_message_reaches_its_listeners(ends: Ends, redis_url: str) -> None:
    old, new = Stop("old", "node", TOKEN), Stop("new", "node", TOKEN)
    await ends.sender.stop(old)
    async with PipelinedRedis(redis_url) as listening:
        feed = StopBroadcast(listening)
        assert await feed.next() == []  # what was ordered before concerns no worker here
        await ends.sender.stop(new)
        assert await feed.next() == [new]


PLAIN = Task("run", "node", TOKEN, "h", {"x": 1}, {}, {}, 300.0, place=0)


def numbered(count: int) -> list[Task]:
    return [PLAIN._replace(node_id=f"n{n}", place=n) for n in range(count)]


async def test_a_waiting_worker_gets_all_tasks_that_were_sent_together(ends: Ends) -> None:
    taking = asyncio.ensure_future(ends.inbox.tasks(100))
    await blocked(ends.pipe)
    await ends.sender.send(numbered(30))
    assert [task for _, task in await taking] == numbered(30)


async def test_a_waiting_orchestrator_gets_all_results_that_were_sent_together(
    ends: Ends,
) -> None:
    reading = asyncio.ensure_future(ends.results.read([RESULTS], 100))
    await blocked(ends.pipe)
    reported = [Complete("run", f"n{n}", TOKEN, {"n": n}) for n in range(30)]
    await ends.inbox.send(reported)
    assert [message.content for message in await reading] == reported


def many_results() -> list[Any]:
    """Of several runs and starts, some of them not to be packed."""
    reported: list[Any] = [
        Complete(
            f"run{n // 50}", f"n{n}", TOKEN if n % 3 else Token(1, 1, 5), {"n": [n, "ü", None]}
        )
        for n in range(150)
    ]
    reported[7] = Fail("run", "failed", TOKEN, {"type": "E", "message": "m"})
    reported[8] = Complete("run", "cached", TOKEN, 1, Caching("key", 60.0))
    reported[9] = Complete("run", "large", TOKEN, "x" * 10_000)
    return reported


async def test_many_results_share_few_messages_and_arrive_unchanged(
    ends: Ends,
) -> None:
    reported = many_results()
    await ends.inbox.send(reported)
    found = await ends.results.read([RESULTS], 100)
    assert sorted(map(str, (message.content for message in found))) == sorted(map(str, reported))
    assert await ends.pipe.call("XLEN", RESULTS) == 3 + 3
    await ends.results.acknowledge(found)
    assert await ends.pipe.call("XLEN", RESULTS) == 0
    assert (await ends.pipe.call("XPENDING", RESULTS, "orchestrators"))[0] == 0


async def test_a_few_results_get_one_message_each(ends: Ends) -> None:
    reported = [Complete("run", f"n{n}", TOKEN, n) for n in range(7)]
    await ends.inbox.send(reported)
    found = await ends.results.read([RESULTS], 100)
    assert [message.content for message in found] == reported
    assert len({message.id for message in found}) == 7


@pytest.mark.parametrize(
    "more",
    [
        *("{", "7", "[7]", "[[1,2]]", '[["r"]]', '[["r","1.1.5","n"]]', '[["r","x","n",1]]'),
        *('[["r","1.1.5",7,1]]', '[[null,"1.1.5","n",1]]'),
        *(f'[["r","1.1.5","n",{NESTED}]]', f'[[{NESTED},"1.1.5","n",1]]'),
    ],
)
async def test_a_message_with_malformed_further_results_becomes_a_dead_letter(
    ends: Ends, more: str
) -> None:
    good = Complete("run", "n", TOKEN, 1)
    await ends.pipe.call("XADD", RESULTS, "*", *result_fields(good), "more", more)
    assert await ends.results.read([RESULTS], 10) == []
    (letter,) = await ends.pipe.call("LRANGE", DEAD, 0, -1)
    assert more.startswith(orjson.loads(letter)["fields"]["more"])  # the beginning is shown
    assert await ends.pipe.call("XLEN", RESULTS) == 0


async def test_each_result_that_redis_refused_is_sent_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers that wait end by themselves, and each reports while others do."""
    loading = hiredis.ReplyError("LOADING Redis is loading the dataset in memory")

    def send(_: Any, *, now: bool, ahead: Any) -> asyncio.Future[list[Any]]:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[list[Any]] = loop.create_future()
        loop.call_later(0.05, reply.set_result, [loading])
        return reply

    (reader, _), *_ = ends.inbox._readers
    monkeypatch.setattr(reader, "send", send)
    reported = [Complete("run", f"n{n}", TOKEN, n) for n in range(4)]
    await ends.inbox.send(reported[:1])
    # The first of these waits until that has arrived, and others come meanwhile.
    await asyncio.gather(*(ends.inbox.send([one]) for one in reported[1:]))
    await ends.inbox._arrived()
    found = [message.content for message in await ends.results.read([RESULTS], 100)]
    assert sorted(one.node for one in found) == ["n0", "n1", "n2", "n3"]


async def test_the_latest_results_are_sent_again_if_redis_may_have_lost_them(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = many_results()
    await ends.inbox.send(reported[:20])
    monkeypatch.setattr(stream_inbox, "REPEAT_SECONDS", -1.0)
    await ends.inbox.send(reported[20:30])
    monkeypatch.undo()
    await ends.inbox.send(reported[30:])
    await ends.inbox._arrived()
    await ends.pipe.call("DEL", RESULTS)
    await ends.inbox.resend()
    found = [message.content for message in await ends.results.read([RESULTS], 100)]
    assert sorted(map(str, found)) == sorted(map(str, reported[30:])), (
        "what is old is in the log by now"
    )


async def test_the_results_kept_for_sending_again_are_bounded(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_inbox, "MAX_SENT_BYTES", 100_000)
    for n in range(30):
        await ends.inbox.send([Complete("run", f"n{n}", TOKEN, "x" * 10_000)])
    await ends.inbox._arrived()
    await ends.pipe.call("DEL", RESULTS)
    await ends.inbox.resend()
    found = [message.content.node for message in await ends.results.read([RESULTS], 100)]
    assert found == [f"n{n}" for n in range(21, 30)]


@pytest.mark.parametrize("field", [{}, {"hints": "{}"}])
async def test_a_too_deeply_nested_output_becomes_a_dead_letter(
    ends: Ends, field: dict[str, str]
) -> None:
    """It can be read, and not be written again: a process that applied it would end over it."""
    given = {"run_id": "r", "node_id": "n", "token": str(TOKEN), "success": "1"}
    given |= {"output": NESTED, "error": "null", **field}
    await ends.pipe.call("XADD", RESULTS, "*", *(part for pair in given.items() for part in pair))
    assert await ends.results.read([RESULTS], 10) == []
    assert await ends.pipe.call("LLEN", DEAD) == 1


def failed(error: str, **more: str) -> list[str]:
    given = {"run_id": "r", "node_id": "n", "token": str(TOKEN), "success": "0"}
    given |= {"output": "null", "error": error, **more}
    return [part for pair in given.items() for part in pair]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("short", "short"),
        (5, None),
        ({"a": ["b"]}, None),
        (None, None),
        ("x" * 100_000, MAX_TRACEBACK_BYTES),
    ],
)
async def test_a_received_traceback_is_a_bounded_text_or_left_out(
    ends: Ends, given: Any, kept: Any
) -> None:
    reported = orjson.dumps({"type": "E", "message": "m", "traceback": given}).decode()
    await ends.pipe.call("XADD", RESULTS, "*", *failed(reported))
    (found,) = await ends.results.read([RESULTS], 10)
    assert await ends.pipe.call("LLEN", DEAD) == 0
    error = found.content.error
    if isinstance(kept, int):
        assert len(error["traceback"]) <= kept
    else:
        assert error.get("traceback") == kept
    assert ("traceback" in error) is (kept is not None)


@pytest.mark.parametrize(
    ("reported", "kind", "message"),
    [
        ('{"type": "E", "message": "m", "where": "x.py:3"}', "E", "m"),
        ('{"type": 1}', "error", "it did not say how"),
        ('{"type": "E", "message": {"a": 5}}', "E", '{"a":5}'),
        ('"a text"', "error", "a text"),
        ("null", "error", "it did not say how"),
        ("[1]", "error", "[1]"),
    ],
)
async def test_every_received_error_has_a_type_and_a_message(
    ends: Ends, reported: str, kind: str, message: str
) -> None:
    await ends.pipe.call("XADD", RESULTS, "*", *failed(reported))
    (found,) = await ends.results.read([RESULTS], 10)
    assert (found.content.error["type"], found.content.error["message"]) == (kind, message)


@pytest.mark.parametrize(
    "given",
    [
        failed(NESTED),
        failed('{"type": "E", "cause": ' + NESTED + "}"),
        failed("{}", hints='{"after": "soon"}'),
        failed("{}", hints='{"at_least": -1}'),
        failed("{}", hints='{"after": true}'),
        failed("{}", hints="[]"),
    ],
)
async def test_a_failure_that_cannot_be_applied_becomes_a_dead_letter(
    ends: Ends, given: list[str]
) -> None:
    await ends.pipe.call("XADD", RESULTS, "*", *given)
    assert await ends.results.read([RESULTS], 10) == []
    assert await ends.pipe.call("LLEN", DEAD) == 1


async def test_results_share_messages_for_any_depth_of_their_outputs(ends: Ends) -> None:
    deepest: Any = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest]
    results = [Complete("r", f"n{at}", TOKEN, deepest) for at in range(10)]
    await ends.inbox.send(results)
    assert [message.content for message in await ends.results.read([RESULTS], 100)] == results


async def test_a_task_of_every_handler_arrives(ends: Ends) -> None:
    both = [PLAIN, PLAIN._replace(handler="other")]
    await ends.sender.send(both * 5)
    taken = []
    while len(taken) < 10:
        taken += [task for _, task in await ends.inbox.tasks(100)]
    assert sorted(task.handler for task in taken) == ["h"] * 5 + ["other"] * 5


async def test_messages_that_were_read_but_not_opened_are_returned_to_other_workers(
    ends: Ends, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it was asked for, some was made ready for the next time, and one is no task."""
    monkeypatch.setattr(stream_inbox, "QUICK_SECONDS", 60)
    sent = numbered(14)
    await ends.sender.send(sent[:10])
    await ends.pipe.call("XADD", stream_of("h"), "*", "run_id", "x")
    await ends.sender.send(sent[10:])
    first = [*await ends.inbox.tasks(2), *await ends.inbox.tasks(2), *await ends.inbox.tasks(2)]
    assert [task for _, task in first] == sent[:6]
    assert await ends.pipe.call("LLEN", DEAD) == 0
    while await ends.pipe.call("LLEN", DEAD) == 0:
        first += await ends.inbox.tasks(2)
    assert ends.inbox.has_more
    await ends.inbox.open_more()
    await ends.inbox.acknowledge([message for message, _ in first])
    await ends.inbox.close()
    assert await ends.pipe.call("LLEN", DEAD) == 1
    async with PipelinedRedis(redis_url) as blocking:
        other = StreamInbox(StreamReader(blocking, ends.pipe, WORKERS, "w2"), ends.pipe, ["h"])
        left = [task for _, task in await other.tasks(100)]
    known = [task for _, task in first]
    assert sorted(task.place or 0 for task in (*known, *left)) == list(range(14))


async def blocked(pipe: PipelinedRedis) -> None:
    """A worker waits for something to read."""
    async with asyncio.timeout(5):
        while b"blocked_clients:1" not in await pipe.call("INFO", "clients"):
            await asyncio.sleep(0.001)
