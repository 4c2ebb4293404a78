"""Nodes as Celery tasks: what a worker with a pool of processes does with each message.

One worker serves most of these tests, on a Redis of its own, with leases of two seconds. What may
happen to workers and brokers in the midst of it is in `test_celery_faults`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Token
from dovetail.core.items import item_place
from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Cancel, Submit
from dovetail.engine.ports import Task
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.transports.celery.application import QUEUE, make_app
from dovetail.transports.celery.sender import Envelopes, redis_message
from dovetail.transports.messages import DEAD
from dovetail.wiring.distributed import ServiceParts, connected, orchestrate
from dovetail.wiring.health import watching

from ..celery_crew import ANSWERED, EXECUTED, HANDLERS, CeleryWorker, celery_worker
from ..servers.redis_server import RedisServer

LEASE = "2"
SECONDS = 40.0
numbers = itertools.count()


class CeleryServices:
    """A worker, and an orchestrator while a test runs."""

    def __init__(self, worker: CeleryWorker, url: str, broker: str | None = None) -> None:
        self.worker = worker
        self.url = url
        self.settings = Settings(
            redis_url=url, broker_url=broker, transport="celery", lease_seconds=float(LEASE)
        )

    @asynccontextmanager
    async def led(self) -> AsyncIterator[CeleryRuns]:
        async with connected(self.settings) as parts:
            leading = asyncio.create_task(orchestrate(self.settings))
            yield CeleryRuns(parts)
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)


class CeleryRuns:
    def __init__(self, parts: ServiceParts) -> None:
        self.parts = parts
        self.pipe = parts.pipe
        self.run_id = f"run{next(numbers)}"

    async def begin(self, nodes: dict[str, dict[str, Any]], **fields: Any) -> str:
        await self.parts.orchestrator.submit(submission(self.run_id, nodes, **fields))
        return self.run_id

    async def run(self, nodes: dict[str, dict[str, Any]], **fields: Any) -> RunState:
        await self.begin(nodes, **fields)
        return await self.end()

    async def end(self) -> RunState:
        return await asyncio.wait_for(self.parts.store.wait(self.run_id), SECONDS)

    async def events(self) -> list[str]:
        return [event.type async for event in self.parts.store.watch(self.run_id)]

    async def traceback(self) -> str:
        """Of the last attempt that failed."""
        log = [event async for event in self.parts.store.watch(self.run_id)]
        return str([e.data["traceback"] for e in log if e.data and "traceback" in e.data][-1])

    async def executed(self) -> list[list[Any]]:
        return [one for one in await self.noted(EXECUTED) if one[0] == self.run_id]

    async def noted(self, where: str) -> list[Any]:
        return [orjson.loads(one) for one in await self.pipe.call("LRANGE", where, 0, -1)]

    async def answered(self) -> list[Any]:
        """What Celery was answered of this run: message, node, answer."""
        return [one for one in await self.noted(ANSWERED) if one[0].startswith(f"{self.run_id}:")]

    async def answers(self, task_id: str) -> list[Any]:
        return [reported for named, _, reported in await self.noted(ANSWERED) if named == task_id]

    async def answer(self, task_id: str) -> Any:
        await until(lambda: self.answers(task_id))
        return (await self.answers(task_id))[0]

    async def send(self, text: bytes) -> None:
        await self.pipe.call("LPUSH", QUEUE, text)


def submission(
    run_id: str, nodes: dict[str, dict[str, Any]], params: dict[str, Any] | None = None
) -> Submit:
    listed = [{"id": name, "handler": "plain", **fields} for name, fields in nodes.items()]
    workflow = Workflow.model_validate({"name": "t", "nodes": listed})
    return Submit(run_id, build_graph(workflow, {"tells": 1}), params or {})


async def until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.01)


def node(run: RunState, name: str = "n") -> NodeState:
    return run.node(name)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryServices]:
    folder = tmp_path_factory.mktemp("celery")
    with (
        RedisServer() as redis,
        celery_worker(folder, redis.url, DOVETAIL_LEASE_SECONDS=LEASE) as worker,
    ):
        yield CeleryServices(worker, redis.url)


@pytest.fixture
async def play(stage: CeleryServices) -> AsyncIterator[CeleryRuns]:
    async with stage.led() as play:
        yield play


# ── what a handler is given, and what becomes of what it gives ───────────────────────────


async def test_celery_has_the_same_params_inputs_progress_and_retries(play: CeleryRuns) -> None:
    run = await play.run(
        {"a": {}, "n": {"handler": "tells", "dependencies": ["a"], "config": {"of": "{{ a }}"}}},
        params={"p": 1},
    )
    assert run.status is RunStatus.COMPLETED
    assert node(run).output == {"inputs": {"a": "a"}, "params": {"p": 1}, "attempt": 2}
    events = await play.events()
    assert events.count("node.retrying") == 1
    assert "node.progress" in events


async def test_a_fork_gives_reused_outputs_to_the_nodes_that_run(play: CeleryRuns) -> None:
    """Without the outputs in its submit, as an orchestrator finds an accepted fork."""
    nodes = {
        "a": {},
        "n": {"handler": "tells", "dependencies": ["a"], "config": {"of": "{{ a }}"}},
    }
    old = await play.run(nodes)
    fork = submission(f"{old.id}-fork", nodes)._replace(forked_from=old.id, reuse=["a"])
    await play.parts.orchestrator.submit(fork)
    play.run_id = fork.run_id
    run = await play.end()
    assert (run.status, run.forked_from) == (RunStatus.COMPLETED, old.id)
    assert (run.node("a").attempt, run.node("a").output) == (0, "a")
    assert node(run).output == {"inputs": {"a": "a"}, "params": {}, "attempt": 2}


async def test_a_plain_function_runs_in_the_thread_that_celery_may_interrupt(
    play: CeleryRuns,
) -> None:
    run = await play.run({"n": {"handler": "thinks", "config": {"seconds": 0.1}}})
    assert node(run).output == "thought"


async def test_inputs_that_are_too_large_for_a_message_are_fetched(play: CeleryRuns) -> None:
    parents = {f"p{i}": {"handler": "input", "config": {"x": "y" * 40_000}} for i in range(2)}
    run = await play.run({**parents, "n": {"handler": "output", "dependencies": [*parents]}})
    assert len(node(run).output["p1"]["x"]) == 40_000


# ── time ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("handler", "config"),
    [
        ("plain", {}),
        ("thinks", {}),
        ("sleeps_in_the_loop", {}),
        ("thinks", {"stubborn": True}),
    ],
)
async def test_a_soft_time_limit_is_the_timeout_of_the_node(
    play: CeleryRuns, handler: str, config: dict[str, Any]
) -> None:
    """Whatever the handler is at: even one that cannot be interrupted has its node fail."""
    config = {"seconds": 3, **config}
    run = await play.run({"n": {"handler": handler, "config": config, "timeout_seconds": 0.3}})
    assert node(run).status is NodeStatus.FAILED
    error = node(run).error
    assert error is not None
    where = error.pop("where")
    assert error == {
        "type": "timeout",
        "message": "did not finish within 0.3 s (timeout_seconds)",
    }
    function = {"plain": "_plain"}.get(handler, handler)
    assert where.endswith(f" in {function}"), "it names the line that the handler was at"
    assert f" in {function}\n" in await play.traceback()
    assert len(await play.executed()) == 1
    await until(play.answered)
    ((_, _, reported),) = await play.answered()
    # The watch reports a handler that clings on, and has nothing to say afterwards.
    clings = "stubborn" in config or handler == "sleeps_in_the_loop"
    assert reported == ({"stopped": True} if clings else failed({**error, "where": where}))


def failed(error: Any) -> dict[str, Any]:
    return {"success": False, "error": error}


async def test_a_handler_that_runs_longer_than_its_lease_keeps_the_lease(play: CeleryRuns) -> None:
    run = await play.run({"n": {"handler": "thinks", "config": {"seconds": float(LEASE) * 2}}})
    assert run.status is RunStatus.COMPLETED
    assert len(await play.executed()) == 1
    assert "node.lost" not in await play.events()


async def test_an_item_that_runs_longer_than_its_lease_keeps_the_lease(play: CeleryRuns) -> None:
    config = {"seconds": float(LEASE) * 2}
    run = await play.run({"n": {"handler": "thinks", "config": config, "for_each": [1, 2]}})
    assert run.status is RunStatus.COMPLETED
    assert len(await play.executed()) == 2
    assert "node.lost" not in await play.events()


# ── a cancel reaches what runs ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("handler", ["cleans_up", "looks", "thinks"])
async def test_a_cancel_reaches_a_running_handler(
    play: CeleryRuns, stage: CeleryServices, handler: str
) -> None:
    await play.begin({"n": {"handler": handler, "config": {"seconds": 30}}})
    await until(play.executed)
    await play.parts.orchestrator.apply([Cancel(play.run_id)])
    assert (await play.end()).status is RunStatus.CANCELLED

    async def is_free() -> bool:
        alive = [one for one in await WorkerRegistry(play.pipe).workers() if one["alive"]]
        return bool(alive) and not await play.pipe.call("HLEN", "unacked")

    await until(is_free, 10)
    if handler == "cleans_up":
        assert ["n"] in await play.noted("test:cleaned")
    if handler == "looks":
        assert ["n", True] in await play.noted("test:looked")


# ── messages that come twice, or are no messages ─────────────────────────────────────────


async def test_a_duplicate_of_a_finished_node_returns_its_output(play: CeleryRuns) -> None:
    await play.run({"n": {}})
    await until(play.answered)
    assert [reported for _, _, reported in await play.answered()] == [{"success": True}]
    message = message_of(play, task_of(play, await play.parts.store.load(play.run_id)))
    await play.send(message)
    again = orjson.loads(message)["headers"]["id"]
    assert await play.answer(again) == {"skipped": True, "output": "n"}
    assert len(await play.executed()) == 1


async def test_a_duplicate_of_a_running_node_is_skipped(play: CeleryRuns) -> None:
    await play.begin({"n": {"config": {"seconds": 1}}})
    await until(play.executed)
    message = message_of(play, task_of(play, await play.parts.store.load(play.run_id)))
    await play.send(message)
    assert await play.answer(orjson.loads(message)["headers"]["id"]) == {"skipped": True}
    assert (await play.end()).status is RunStatus.COMPLETED
    assert len(await play.executed()) == 1


async def test_a_duplicate_of_a_finished_item_returns_its_output(play: CeleryRuns) -> None:
    run = await play.run({"n": {"for_each": ["a", "b"]}})
    message = message_of(play, item_task(run, 1))
    await play.send(message)
    again = orjson.loads(message)["headers"]["id"]
    await until(lambda: play.answers(again))
    assert (await play.answers(again))[-1] == {"skipped": True, "output": run.node("n").output[1]}
    assert len(await play.executed()) == 2


async def test_a_duplicate_of_an_item_that_begins_anew_has_no_output(play: CeleryRuns) -> None:
    """The records of a node's old items stay in Redis if the run has another mapped node."""
    nodes = {"n": {"for_each": [1, 2]}, "m": {"for_each": [3]}}
    run = await play.run(nodes)
    await play.pipe.call("HDEL", keys_of(run.id)[7], 0)  # as after a retry from the node
    message = message_of(play, item_task(run, 1))
    await play.send(message)
    again = orjson.loads(message)["headers"]["id"]
    await until(lambda: play.answers(again))
    assert (await play.answers(again))[-1] == {"skipped": True}


async def test_a_parked_item_says_that_it_is_parked(play: CeleryRuns) -> None:
    await RedisLimits(play.pipe).set("crawls", 0.01, 1)
    await play.begin({"n": {"for_each": [1, 2], "resource_tag": "crawls"}})

    async def is_answered() -> bool:
        return len(await play.answered()) == 2

    await until(is_answered)
    answers = [reported for _, _, reported in await play.answered()]
    assert sorted(answers, key=str) == [{"parked": True}, {"success": True}]
    await play.parts.orchestrator.apply([Cancel(play.run_id)])


def item_task(run: RunState, number: int) -> Task:
    token = run.node(f"n[{number}]").token
    plain = Task(run.id, f"n[{number}]", token, "plain", {}, {}, {}, 60.0)
    return plain._replace(place=item_place(0, number), item=number, item_index=number)


def task_of(play: CeleryRuns, run: RunState, name: str = "n") -> Task:
    place = run.graph.index[name]
    spec = run.graph.nodes[place]
    token = run.nodes[place].token
    return Task(run.id, name, token, spec.handler, {}, {}, {}, 60.0, place=place)


def message_of(play: CeleryRuns, task: Task) -> bytes:
    app = make_app(Settings(redis_url="redis://127.0.0.1:1", transport="celery"))
    return redis_message(Envelopes(app).made([task])[0])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"run_id": "r", "node_id": "n"},
        {"run_id": 7, "node_id": None, "token": [], "handler": {}},
        {
            "run_id": "r",
            "node_id": "n",
            "token": "nonsense",
            "handler": "plain",
            "config": "{}",
            "params": "{}",
            "inputs": "{}",
        },
        {
            "run_id": "r",
            "node_id": "n",
            "token": "1.1.1",
            "handler": "plain",
            "config": "[1]",
            "params": "{}",
            "inputs": "{}",
        },
        {
            "run_id": "r",
            "node_id": "n[3]",
            "token": "1.1.1",
            "handler": "plain",
            "config": "{}",
            "params": "{}",
            "inputs": "{}",
            "place": str(item_place(0, 5)),
            "item": "7",
        },
    ],
)
async def test_a_malformed_task_becomes_a_dead_letter_and_the_next_task_runs(
    play: CeleryRuns, fields: dict[str, Any]
) -> None:
    await play.pipe.call("DEL", DEAD)
    envelope = orjson.loads(message_of(play, UNKNOWN_TASK))
    envelope["body"] = orjson.dumps([[], fields, {}]).decode()
    await play.send(orjson.dumps(envelope))
    await until(lambda: play.pipe.call("LLEN", DEAD))
    (letter,) = await play.noted(DEAD)
    assert letter["stream"] == QUEUE
    assert letter["id"] == envelope["headers"]["id"]
    assert (await play.run({"n": {}})).status is RunStatus.COMPLETED


async def test_a_pickle_and_an_unknown_task_are_refused_and_the_worker_survives(
    play: CeleryRuns, stage: CeleryServices, tmp_path: Path
) -> None:
    """A pickle that is read would leave a file."""
    await play.pipe.call("DEL", DEAD)
    canary = tmp_path / "canary"
    envelope = orjson.loads(message_of(play, UNKNOWN_TASK))
    envelope["content-type"], envelope["content-encoding"] = (
        "application/x-python-serialize",
        "binary",
    )
    envelope["properties"]["body_encoding"] = "base64"
    envelope["body"] = b64encode(pickle.dumps(Evil(str(canary)))).decode()
    await play.send(orjson.dumps(envelope))
    stranger = orjson.loads(message_of(play, UNKNOWN_TASK))
    stranger["headers"]["task"] = "somebody.elses"
    await play.send(orjson.dumps(stranger))
    assert (await play.run({"n": {}})).status is RunStatus.COMPLETED
    assert [letter["reason"] for letter in await play.noted(DEAD)] == [
        "no such task: 'somebody.elses'",
        "Refusing to deserialize untrusted content of type pickle (application/x-python-serialize)",
    ]
    assert not canary.exists()
    assert stage.worker.process.poll() is None


@pytest.mark.parametrize(
    "change",
    [
        {"body": '{"a":1}'},
        {"body": "no JSON"},
        {"headers": {"timelimit": "x"}},
        {"headers": {"timelimit": [1]}},
        {"headers": {"id": {"a": 1}}},
        {"headers": {"task": {"a": 1}}},
        {"headers": {"eta": 7}},
        {"headers": {"expires": []}},
        {"headers": {"retries": "x"}},
        {"headers": None},
        {"properties": None},
        b"no envelope",
        b"[]",
        b"7",
        b"\xff\xfe",
        pickle.dumps({"a": 1}),
    ],
)
async def test_a_malformed_message_does_not_end_a_worker(
    play: CeleryRuns, stage: CeleryServices, change: dict[str, Any] | bytes
) -> None:
    await play.pipe.call("DEL", DEAD)
    if isinstance(change, dict):
        whole = orjson.loads(message_of(play, UNKNOWN_TASK))
        for name, value in change.items():
            whole[name] = {**whole[name], **value} if isinstance(value, dict) else value
        change = orjson.dumps(whole)
    for _ in range(3):  # more than its pool has processes
        await play.send(change)
    assert (await play.run({"n": {}})).status is RunStatus.COMPLETED
    assert stage.worker.process.poll() is None


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


UNKNOWN_TASK = Task("nobody", "n", Token(1, 1, 1), "plain", {}, {}, {}, 1.0, place=0)


# ── who knows a handler ──────────────────────────────────────────────────────────────────


async def test_a_node_whose_handler_no_worker_has_waits_for_one(
    play: CeleryRuns, stage: CeleryServices, tmp_path: Path
) -> None:
    (tmp_path / "more.py").write_text(
        "from datetime import date\nfrom dovetail import handler\n"
        "@handler\nasync def special(config, ctx): return {date(2026, 1, 2): {'done'}}\n"
    )
    await play.begin({"n": {"handler": "special"}})
    await asyncio.sleep(0.5)
    assert node(await play.parts.store.load(play.run_id)).status is NodeStatus.QUEUED
    more = f"{HANDLERS},{tmp_path / 'more.py'}"
    how = {"DOVETAIL_HANDLERS": more, "DOVETAIL_LEASE_SECONDS": LEASE, "name": "two"}
    with celery_worker(tmp_path, stage.url, **how):
        assert node(await play.end()).output == {"2026-01-02": ["done"]}, "stored as JSON"


# ── limits ───────────────────────────────────────────────────────────────────────────────


async def test_workers_share_a_rate_limit_and_park_the_nodes_above_it(play: CeleryRuns) -> None:
    await play.parts.pipe.call("DEL", "wf:limit:slowly")
    began = play.parts.clock()
    run = await play.run({f"n{i}": {"resource_tag": "slowly"} for i in range(6)})
    assert run.status is RunStatus.COMPLETED
    assert play.parts.clock() - began >= 0.5 * 0.9  # ten a second, the first at once
    assert "node.parked" in await play.events()


# ── what others see of it ────────────────────────────────────────────────────────────────


async def test_a_worker_announces_its_handlers_and_a_node_names_its_worker(
    play: CeleryRuns, stage: CeleryServices
) -> None:
    pid = stage.worker.process.pid
    known = await WorkerRegistry(play.pipe).workers(with_schemas=True)
    (one,) = [each for each in known if each["pid"] == pid]
    assert one["alive"]
    schemas = {each["name"]: each["config_schema"] for each in one["handler_details"]}
    assert schemas["sleep"]["required"] == ["seconds"]
    assert schemas["plain"] is None
    assert one["concurrency"] == 2
    assert {"plain", "sleep", "llm_service"} <= set(one["handlers"])
    run = await play.run({"n": {}})
    name, child = str(node(run).worker).rsplit("/", 1)
    assert name == one["worker_id"]
    assert int(child) in stage.worker.pool()


async def test_messages_at_the_broker_are_counted_by_handler(
    play: CeleryRuns, stage: CeleryServices
) -> None:
    async with watching(stage.settings, ["plain"]) as fleet:
        os.kill(stage.worker.process.pid, signal.SIGSTOP)
        try:
            await play.begin({f"n{i}": {} for i in range(5)})
            await until(lambda: at_least(fleet.depths, 5))
        finally:
            os.kill(stage.worker.process.pid, signal.SIGCONT)
        await play.end()
        assert (await fleet.depths())["plain"] == 0
        assert await fleet.backlog() == 0


async def at_least(depths: Callable[[], Any], count: int) -> bool:
    return bool((await depths())["plain"] >= count)
