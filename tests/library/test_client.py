"""`Dovetail`, the client, on a file, on a server and on Redis: the whole surface, run for real.

What a test asks of `client` or `dt` holds in every place; what is about the file that embedded
engines share asks for `local`. What happens between processes is in `test_client_processes`, and
what can happen between a client and its server in `test_client_server`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import dovetail
from dovetail import (
    Conflict,
    Context,
    Dovetail,
    DovetailError,
    Event,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    PermanentError,
    Run,
    StoreError,
    WorkflowVersion,
    handler,
)
from dovetail.config import SettingsError
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import HandlerError

from .places import PLACES, on_a_file, over_http, over_redis

GREET: dict[str, Any] = {
    "name": "greet",
    "params": {
        "type": "object",
        "properties": {"who": {"type": "string", "default": "world"}},
        "additionalProperties": False,
    },
    "nodes": [
        {"id": "start", "handler": "input"},
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["start"],
            "config": {"text": "hello {{ start.who }}"},
        },
    ],
}
RUN_FIELDS = """run_id workflow version status epoch params created_at started_at finished_at
    duration error result forked_from nodes""".split()  # noqa: SIM905
NODE_FIELDS = """id handler status attempt epoch dependencies reason cause error started_at
    finished_at duration worker output items""".split()  # noqa: SIM905
BATCH_FIELDS = """batch_id workflow count counts created_at finished_at runs
    next_cursor""".split()  # noqa: SIM905


def flow(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A definition in which each node depends on the one before it."""
    chained = [
        {**node, **({"dependencies": [nodes[place - 1]["id"]]} if place else {})}
        for place, node in enumerate(nodes)
    ]
    return {"name": "flow", "nodes": chained, **more}


class WaitingHandler:
    """A handler `knock` that waits until the test opens, and counts who came."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.knocked = asyncio.Event()
        self.attempts: list[int] = []

        @handler("knock")
        async def knock(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
            self.attempts.append(ctx.attempt)
            self.knocked.set()
            await self.opened.wait()
            return {"attempt": ctx.attempt}

        self.handler = knock


KNOCK = flow({"id": "door", "handler": "knock"})


class FailingHandler:
    """A handler `moody` that fails until it is cheered up."""

    def __init__(self) -> None:
        self.cheerful = False
        self.asked = 0

        @handler("moody")
        def moody(config: dict[str, Any], ctx: Context) -> str:
            self.asked += 1
            if not self.cheerful:
                raise PermanentError("not today")
            return "fine"

        self.handler = moody


MOODY = flow({"id": "first", "handler": "input"}, {"id": "ask", "handler": "moody"})

Open = Callable[..., Dovetail]
OpenAnywhere = Callable[..., AbstractAsyncContextManager[Dovetail]]

# A worker on Redis takes a second to end, so not every test is worth one: tests/services has more.
everywhere = pytest.mark.parametrize("client", PLACES, indirect=True)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither of the user who runs the tests, nor of the directory they are run in."""
    for name in list(os.environ):
        if name.startswith("DOVETAIL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=("file", "http"))
def client(request: pytest.FixtureRequest, tmp_path: Path) -> OpenAnywhere:
    """Clients whose place gives up at once what it has not finished."""
    redis_url = request.getfixturevalue("redis_url") if request.param == "redis" else ""

    def open_client(*handlers: Any, **settings: Any) -> AbstractAsyncContextManager[Dovetail]:
        settings = {"db_sync": "normal", "drain_seconds": 0, **settings}
        if request.param == "redis":
            return over_redis(redis_url, handlers, settings)
        where = {"file": on_a_file, "http": over_http}[request.param]
        return where(tmp_path, handlers, settings)

    return open_client


@pytest.fixture
async def dt(client: OpenAnywhere) -> AsyncIterator[Dovetail]:
    async with client() as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Open:
    """Clients on one file, that give up at once what they have not finished."""

    def open_client(*handlers: Any, **settings: Any) -> Dovetail:
        settings = {"db_sync": "normal", "drain_seconds": 0, **settings}
        return Dovetail(tmp_path / "runs.db", handlers=handlers, **settings)

    return open_client


@pytest.fixture
async def here(local: Open) -> AsyncIterator[Dovetail]:
    async with local() as opened:
        yield opened


async def soon(condition: Callable[[], Any], seconds: float = 5) -> None:
    """Until an awaitable condition holds."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


# --- runs --------------------------------------------------------------------------------------


async def test_the_example_of_the_contract_runs(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(json.dumps(GREET))
    async with Dovetail() as dt:
        run = await dt.run("flow.yaml", params={"who": "Ada"})
    assert (run.status, run.result) == ("COMPLETED", {"text": "hello Ada"})
    assert (tmp_path / ".dovetail" / "dovetail.db").is_file()


@everywhere
async def test_a_run_has_the_fields_of_the_api(dt: Dovetail) -> None:
    run = await dt.run(GREET)
    assert (run.workflow, run.version, run.epoch, run.error) == ("greet", None, 1, None)
    assert run.params == {"who": "world"}
    assert run.outputs == {"start": {"who": "world"}, "end": {"text": "hello world"}}
    assert list(run.nodes) == ["start", "end"]
    node = run.nodes["end"]
    assert (node.status, node.attempt, node.dependencies) == ("COMPLETED", 1, ["start"])
    assert node.output == run.result == {"text": "hello world"}
    view = run.to_dict()
    assert list(view) == RUN_FIELDS
    assert [list(each) for each in view["nodes"]] == [NODE_FIELDS, NODE_FIELDS]
    assert json.loads(json.dumps(view)) == view
    assert run.finished_at is not None
    assert run.created_at <= run.finished_at
    assert run.finished_at.endswith("Z")


async def test_an_answer_cannot_be_changed_and_is_not_shared(dt: Dovetail) -> None:
    run = await dt.run(GREET)
    with pytest.raises(AttributeError):
        run.status = "FAILED"  # type: ignore[misc]
    run.params["who"] = "nobody"
    run.outputs["start"]["who"] = "nobody"
    run.result["text"] = "nothing"
    again = await dt.get_run(run.run_id)
    assert again.params == again.outputs["start"] == {"who": "world"}
    assert again.result == {"text": "hello world"}


async def test_changing_an_answer_changes_nothing_of_the_run(
    client: OpenAnywhere,
) -> None:
    door = WaitingHandler()
    spoken = {"id": "say", "handler": "output", "config": {"text": "{{ params.who }} {{ a.who }}"}}
    async with client(door.handler) as dt:
        run = await dt.trigger(
            flow({"id": "a", "handler": "input"}, {"id": "door", "handler": "knock"}, spoken),
            {"who": "Ada"},
        )
        await door.knocked.wait()
        seen = await dt.get_run(run.run_id)
        seen.params["who"] = seen.outputs["a"]["who"] = "nobody"
        door.opened.set()
        assert (await dt.wait(run.run_id)).result == {"text": "Ada Ada"}


async def test_the_repr_of_a_returned_object_is_short(dt: Dovetail) -> None:
    run = await dt.run(flow({"id": "no", "handler": "fail", "config": {"message": "as asked"}}))
    assert repr(run).startswith(f"Run(run_id='{run.run_id}', workflow='flow', status='FAILED'")
    assert "as asked" in repr(run)
    assert repr(run.nodes["no"]).startswith("RunNode(id='no', status='FAILED', attempt=1")
    events = [event async for event in dt.events(run.run_id)]
    assert repr(events[0]).startswith("Event(seq=1, type='run.created', epoch=1, workflow='flow'")
    for answer in (run, run.nodes["no"], events[0]):
        assert copy.deepcopy(answer) == pickle.loads(pickle.dumps(answer)) == answer


def test_a_field_of_a_newer_server_is_ignored() -> None:
    version = WorkflowVersion.from_api({"name": "x", "version": 1, "created": True, "new": 7})
    assert version == WorkflowVersion("x", 1, created=True)
    reported = {"seq": 1, "time": "…", "type": "run.created", "epoch": 1, "new": 7}
    assert Event.from_api(reported).new == 7, "of an event it may be news"


@everywhere
async def test_a_trigger_returns_immediately_and_a_wait_when_the_run_has_finished(
    client: OpenAnywhere,
) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        assert run.status in ("PENDING", "RUNNING")
        assert list(run.nodes) == ["door"]
        waiting = asyncio.create_task(dt.wait(run.run_id))
        await door.knocked.wait()
        assert (await dt.get_run(run.run_id)).nodes["door"].status == "RUNNING"
        assert not waiting.done()
        door.opened.set()
        finished = await waiting
    assert (finished.run_id, finished.status) == (run.run_id, "COMPLETED")
    assert run.status != "COMPLETED", "a picture of one moment"


async def test_a_failed_run_is_a_result_not_an_error(dt: Dovetail) -> None:
    run = await dt.run(flow({"id": "no", "handler": "fail", "config": {"message": "as asked"}}))
    assert run.status == "FAILED"
    assert run.error is not None
    assert (run.error["node"], "as asked" in run.error["message"]) == ("no", True)
    assert run.outputs == {}


async def test_many_runs_complete_concurrently(dt: Dovetail) -> None:
    runs = await asyncio.gather(*(dt.run(GREET, {"who": str(i)}) for i in range(50)))
    assert [run.result["text"] for run in runs] == [f"hello {i}" for i in range(50)]


async def test_a_retry_reruns_failed_nodes_and_keeps_completed_ones(
    client: OpenAnywhere,
) -> None:
    mood = FailingHandler()
    async with client(mood.handler) as dt:
        failed = await dt.run(MOODY)
        assert (failed.status, mood.asked) == ("FAILED", 1)
        mood.cheerful = True
        reopened = await dt.retry(failed.run_id)
        assert (reopened.run_id, reopened.epoch) == (failed.run_id, 2)
        run = await dt.wait(failed.run_id)
    assert (run.status, run.outputs["ask"], mood.asked) == ("COMPLETED", "fine", 2)
    assert (run.nodes["first"].epoch, run.nodes["ask"].epoch) == (1, 2)


async def test_a_retry_from_a_node_reruns_a_completed_run(client: OpenAnywhere) -> None:
    mood = FailingHandler()
    mood.cheerful = True
    async with client(mood.handler) as dt:
        run = await dt.run(MOODY)
        with pytest.raises(Conflict):
            await dt.retry(run.run_id)
        with pytest.raises(NotFound, match="nobody"):
            await dt.retry(run.run_id, from_node="nobody")
        await dt.retry(run.run_id, from_node="ask")
        again = await dt.wait(run.run_id)
    assert (again.status, again.epoch, mood.asked) == ("COMPLETED", 2, 2)
    assert again.nodes["first"].epoch == 1


@everywhere
async def test_a_fork_begins_with_the_finished_nodes_of_an_older_run(
    client: OpenAnywhere,
) -> None:
    moody = FailingHandler()
    async with client(moody.handler) as dt:
        failed = await dt.run(MOODY)
        assert (failed.status, failed.forked_from) == ("FAILED", None)
        calm = flow({"id": "first", "handler": "input"}, {"id": "ask", "handler": "output"})
        made = await dt.fork(failed.run_id, definition=calm, idempotency_key="once")
        again = await dt.fork(failed.run_id, definition=calm, idempotency_key="once")
        assert again.run_id == made.run_id
        run = await dt.wait(made.run_id)
        assert (run.status, run.forked_from) == ("COMPLETED", failed.run_id)
        assert [node.attempt for node in run.nodes.values()] == [0, 1]
        assert (await dt.get_run(failed.run_id)).to_dict() == failed.to_dict()
        with pytest.raises(NotFound, match="did you mean 'ask'"):
            await dt.fork(failed.run_id, from_node="aks")
        with pytest.raises(InvalidParams):
            await dt.fork(failed.run_id, definition=calm, version=1)
        with pytest.raises(InvalidDefinition):
            await dt.fork(failed.run_id, definition=flow({"id": "a", "handler": "ghost"}))
        with pytest.raises(NotFound):
            await dt.fork("f" * 32)
        moody.cheerful = True
        whole = await dt.wait((await dt.fork(failed.run_id, params={"p": 1})).run_id)
        assert [node.attempt for node in whole.nodes.values()] == [1, 1]
        part = await dt.fork(failed.run_id, params={"p": 2}, from_node="ask")
        assert [node.attempt for node in (await dt.wait(part.run_id)).nodes.values()] == [0, 1]


@everywhere
async def test_a_cancelled_run_ends_for_waiting_callers(client: OpenAnywhere) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        waiting = asyncio.create_task(dt.wait(run.run_id))
        await door.knocked.wait()
        cancelled = await dt.cancel(run.run_id)
        assert cancelled.status == (await waiting).status == "CANCELLED"
        with pytest.raises(Conflict):
            await dt.cancel(run.run_id)


@everywhere
async def test_an_unknown_run_is_not_found_by_any_method(dt: Dovetail) -> None:
    for run_id in ("0" * 32, "", "ab", "..", "a/b", "x' OR '1'='1", "\0", "é" * 5000):
        for ask in (dt.get_run, dt.wait, dt.retry, dt.cancel):
            with pytest.raises(NotFound):
                await ask(run_id)
        with pytest.raises(NotFound if dt._commands.drives else Conflict):
            await dt.resume(run_id)
        with pytest.raises(NotFound):
            await drained(dt.events(run_id))
        for ask_batch in (dt.get_batch, dt.wait_batch, dt.retry_batch):
            with pytest.raises(NotFound):
                await ask_batch(run_id)


LONE = "\ud800"  # half a character: no file and no wire can hold it


IMPOSSIBLE: list[Callable[[Dovetail], Any]] = [
    lambda dt: dt.get_run(LONE),
    lambda dt: dt.wait(LONE),
    lambda dt: dt.retry(LONE),
    lambda dt: dt.fork(LONE),
    lambda dt: dt.retry("x", from_node=LONE),
    lambda dt: dt.cancel(LONE),
    lambda dt: dt.resume(LONE),
    lambda dt: anext(dt.events(LONE)),
    lambda dt: anext(dt.events("x", after=10**30)),
    lambda dt: anext(dt.events("x", after=-1)),
    lambda dt: dt.run(LONE),
    lambda dt: dt.run("greet", version=LONE),
    lambda dt: dt.run("greet", version=10**30),
    lambda dt: dt.run("greet", version=-1),
    lambda dt: dt.run("greet", idempotency_key=LONE),
    lambda dt: dt.run("greet", idempotency_key=""),
    lambda dt: dt.run("greet", idempotency_key="x" * 256),
    lambda dt: dt.run(GREET, version=1),
    lambda dt: dt.batch("greet", [{}], idempotency_key=LONE),
    lambda dt: dt.batch("greet", []),
    lambda dt: dt.batch("greet", "ab"),
    lambda dt: dt.wait_batch(LONE),
    lambda dt: dt.get_batch("x", limit=-1),
    lambda dt: dt.list_runs(workflow=LONE),
    lambda dt: dt.list_runs(status="DONE"),
    lambda dt: dt.list_runs(limit=10**30),
    lambda dt: dt.list_runs(limit=0),
    lambda dt: dt.get_batch("x", limit=0),
    lambda dt: dt.run("greet", {"who": "a\0b"}),
    lambda dt: dt.run("greet", {"who\0": "Ada"}),
    lambda dt: dt.batch("greet", [{"who": "Ada"}, {"who": "\0"}]),
    lambda dt: dt.list_runs(cursor="nonsense"),
    lambda dt: dt.list_runs(cursor="9" * 40),
    lambda dt: dt.list_runs(cursor="9" * 100_000),
    lambda dt: dt.get_run("0" * 100_000),
    lambda dt: dt.get_batch("0" * 100_000),
    lambda dt: anext(dt.events("0" * 100_000)),
]


@everywhere
async def test_a_wrong_argument_is_reported_and_breaks_nothing(dt: Dovetail) -> None:
    await dt.register(GREET)
    for place, ask in enumerate(IMPOSSIBLE):
        try:
            await ask(dt)
        except (InvalidParams, NotFound):
            continue
        except Conflict:
            if dt._commands.drives:
                raise
            continue  # nothing is resumed where others drive
        pytest.fail(f"IMPOSSIBLE[{place}] was taken")
    assert (await dt.list_runs()).items == ()
    assert (await dt.run("greet")).status == "COMPLETED"


@everywhere
async def test_every_target_refuses_with_the_same_message(dt: Dovetail) -> None:
    for limit in (0, -1):
        with pytest.raises(InvalidParams, match=f"limit: must be from 1 to .*, not {limit}"):
            await dt.list_runs(limit=limit)
    nul = "contains a NUL character; it cannot be stored"
    with pytest.raises(InvalidParams, match=f"params.who: {nul}"):
        await dt.run(GREET, {"who": "\0"})
    for definition in ({**GREET, "description": "a\0b"}, {**GREET, "de\0scription": "ab"}):
        for ask in (dt.register, dt.run):
            with pytest.raises(InvalidDefinition, match=nul):
                await ask(definition)


@everywhere
@pytest.mark.parametrize(
    ("value", "instead"),
    [
        ({1}, r"sorted\(value\)"),
        (datetime(2026, 1, 1, tzinfo=UTC), r"value\.isoformat\(\)"),
        (object(), "text, a number"),
        (float("nan"), "numbers are finite"),
        (1 << 70, "write it as text"),
        ("\ud800", "a lone surrogate"),
        ({frozenset([1]): 1}, "is not text; JSON keys are"),
    ],
)
async def test_a_definition_with_a_value_that_json_cannot_hold_is_refused(
    dt: Dovetail, value: Any, instead: str
) -> None:
    node = {"id": "a", "handler": "input"}
    in_list: dict[str, Any] = {"name": "w", "nodes": [{**node, "for_each": [1, value]}]}
    in_config: dict[str, Any] = {"name": "w", "nodes": [{**node, "config": {"x": value}}]}
    for definition, path in ((in_list, r"for_each\[1\]"), (in_config, r"config\.x")):
        for ask in (dt.register, dt.trigger, dt.run, lambda given: dt.batch(given, [{}])):
            with pytest.raises(InvalidDefinition, match=rf"nodes\[0\]\.{path}: .*{instead}"):
                await ask(definition)
    assert (await dt.list_runs()).items == ()


@everywhere
async def test_an_item_does_not_get_the_cached_output_of_a_node_without_items(
    client: OpenAnywhere,
) -> None:
    @handler("sees")
    def sees(config: dict[str, Any], ctx: Context) -> str:
        return f"item {ctx.item}"

    node = {"id": "a", "handler": "sees", "cache": {"ttl_seconds": 60}}
    async with client(sees) as dt:
        for _ in range(2):
            assert (await dt.run(flow(node))).result == {"a": "item None"}
            mapped = await dt.run(flow({**node, "for_each": [7, 8]}))
            assert mapped.result == {"a": ["item 7", "item 8"]}


@everywhere
async def test_a_tuple_counts_as_a_list(dt: Dovetail) -> None:
    definition = {**GREET, "nodes": tuple(GREET["nodes"])}
    assert (await dt.register(definition)).created
    assert not (await dt.register(GREET)).created
    assert (await dt.run(definition, {"who": "Ada"})).status == "COMPLETED"


WRONG_TYPES: list[Callable[[Any, Run], Any]] = [
    lambda dt, run: dt.get_run(run),
    lambda dt, run: dt.wait(run),
    lambda dt, run: dt.wait(run.run_id, "5"),
    lambda dt, run: dt.run(GREET, timeout="5"),
    lambda dt, run: dt.retry(run.run_id, from_node=3),
    lambda dt, run: dt.resume(3),
    lambda dt, run: anext(dt.events(run.run_id, after=None)),
    lambda dt, run: anext(dt.events(run.run_id, after=True)),
    lambda dt, run: dt.run([GREET]),
    lambda dt, run: dt.run("greet", version=1.5),
    lambda dt, run: dt.run("greet", version=True),
    lambda dt, run: dt.run("greet", idempotency_key=7),
    lambda dt, run: dt.batch("greet", None),
    lambda dt, run: dt.wait_batch(3),
    lambda dt, run: dt.list_runs(limit="3"),
    lambda dt, run: dt.list_runs(status=3),
    lambda dt, run: dt.list_runs(cursor=3),
]


async def test_an_argument_of_the_wrong_type_is_a_type_error(dt: Dovetail) -> None:
    run = await dt.run(GREET)
    for ask in WRONG_TYPES:
        with pytest.raises(TypeError, match=r" is | not "):
            await ask(dt, run)
    assert len(await dt.list_runs()) == 1


# --- time --------------------------------------------------------------------------------------


@everywhere
async def test_a_wait_that_times_out_raises_and_the_run_continues(client: OpenAnywhere) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        with pytest.raises(TimeoutError, match=r"is RUNNING after 0\.05 s .* it goes on"):
            await dt.run(KNOCK, timeout=0.05)
        (run,) = (await dt.list_runs()).items
        with pytest.raises(TimeoutError, match=run.run_id):
            await dt.wait(run.run_id, timeout=0)
        door.opened.set()
        assert (await dt.wait(run.run_id, timeout=10)).status == "COMPLETED"
    assert door.attempts == [1]


async def test_waiting_for_a_finished_run_needs_no_time(dt: Dovetail) -> None:
    run = await dt.run(GREET, timeout=float("inf"))
    assert (await dt.wait(run.run_id, timeout=0)).status == "COMPLETED"


async def test_a_run_that_finishes_at_the_timeout_has_finished(
    here: Dovetail, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await here.wait_batch((await here.batch(GREET, [{}])).batch_id)

    async def never_ends(commands: Commands, of: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Commands, "wait_batch", never_ends)
    assert (await here.wait_batch(batch.batch_id, timeout=0.01)) == batch
    deaf = replace(here._commands, wait=lambda of: never_ends(here._commands, of))
    monkeypatch.setattr(here, "_opened", deaf)
    assert (await here.wait(batch.runs[0].run_id, timeout=0.01)).status == "COMPLETED"


async def test_a_timeout_is_a_number_of_seconds(dt: Dovetail) -> None:
    run = await dt.run(GREET)
    for wrong in (-1, float("nan")):
        with pytest.raises(InvalidParams, match="timeout: must be a number of seconds ≥ 0"):
            await dt.wait(run.run_id, wrong)
        with pytest.raises(InvalidParams, match="timeout"):
            await dt.run(GREET, timeout=wrong)
    assert len(await dt.list_runs()) == 1


# --- what a workflow is ------------------------------------------------------------------------


async def test_a_workflow_is_a_dict_a_path_or_a_registered_name(
    dt: Dovetail, tmp_path: Path
) -> None:
    for name in ("a.yaml", "b.yml", "c.json", "D.JSON"):
        (tmp_path / name).write_text(json.dumps(GREET))
    await dt.register(GREET)
    given = ["a.yaml", "./b.yml", tmp_path / "c.json", str(tmp_path / "D.JSON"), GREET, "greet"]
    for workflow in [*given, MappingProxyType(GREET)]:
        assert (await dt.run(workflow)).result == {"text": "hello world"}


async def test_a_registered_definition_has_a_version_that_grows_with_its_content(
    dt: Dovetail,
) -> None:
    first = await dt.register(GREET)
    assert first.to_dict() == {"name": "greet", "version": 1, "created": True}
    again = await dt.register(GREET)
    assert (again.version, again.created) == (1, False)
    nodes = [GREET["nodes"][0], {**GREET["nodes"][1], "config": {"text": "bye {{ start.who }}"}}]
    assert (await dt.register({**GREET, "nodes": nodes})).version == 2
    newest = await dt.run("greet")
    assert (newest.version, newest.result) == (2, {"text": "bye world"})
    for version in (1, "1"):
        older = await dt.run("greet", version=version)
        assert (older.version, older.result) == (1, {"text": "hello world"})
    assert (await dt.run("greet", version="latest")).version == 2
    with pytest.raises(NotFound):
        await dt.run("greet", version=3)


async def test_an_unknown_workflow_is_not_found(dt: Dovetail, tmp_path: Path) -> None:
    (tmp_path / "flow.yml").write_text(json.dumps(GREET))
    with pytest.raises(NotFound, match=r"there is no file flow\.yaml; did you mean flow\.yml\?"):
        await dt.run("flow.yaml")
    with pytest.raises(NotFound, match=r"there is no file .*elsewhere"):
        await dt.run(tmp_path / "elsewhere" / "flow.yaml")
    with pytest.raises(NotFound, match="nobody"):
        await dt.run("nobody")


async def test_a_wrong_definition_is_reported(dt: Dovetail, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "flow.txt").write_text(json.dumps(GREET))
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    (tmp_path / "large.json").write_text(json.dumps({**GREET, "description": "x" * (1 << 20)}))
    with pytest.raises(DovetailError, match=r"folder\.yaml cannot be read: Is a directory"):
        await dt.run("folder.yaml")
    with pytest.raises(DovetailError, match=r"flow\.txt is no definition; its name ends in"):
        await dt.run(tmp_path / "flow.txt")
    with pytest.raises(DovetailError, match="cannot be read"):
        await dt.run("\0.yaml")
    with pytest.raises(DovetailError, match="'greet' is no definition; give a dict or a path"):
        await dt.register("greet")
    with pytest.raises(TypeError, match=r"a workflow is a dict, a path .* not list"):
        await dt.run([GREET])  # type: ignore[arg-type]
    for name in ("latin.json", "large.json"):
        with pytest.raises(InvalidDefinition):
            await dt.run(name)


async def test_an_invalid_definition_is_refused_with_every_problem_and_its_line(
    dt: Dovetail, tmp_path: Path
) -> None:
    (tmp_path / "typo.yaml").write_text(
        "name: typo\nnodes:\n  - {id: start, handler: inptu}\n  - {id: end, hander: output}\n"
    )
    for call in (dt.register, dt.trigger, dt.run):
        with pytest.raises(InvalidDefinition) as refused:
            await call("typo.yaml")
        assert {problem.line for problem in refused.value.problems} == {3, 4}
        with pytest.raises(InvalidDefinition):
            await call({})
    with pytest.raises(InvalidDefinition):
        await dt.batch("typo.yaml", [{}])
    assert (await dt.list_runs()).items == ()


@everywhere
async def test_invalid_params_are_refused(dt: Dovetail) -> None:
    await dt.register(GREET)
    unfit: list[Any] = [{"who": 3}, {"whom": "x"}, [], "who", 3, {"who": float("nan")}, {1: 2}]
    for params in unfit:
        for workflow in (GREET, "greet"):
            with pytest.raises(InvalidParams):
                await dt.run(workflow, params)
    assert (await dt.list_runs()).items == ()


async def test_params_may_be_any_mapping(dt: Dovetail) -> None:
    params: Mapping[str, Any] = MappingProxyType({"who": "Ada"})
    assert (await dt.run(GREET, params)).params == {"who": "Ada"}


# --- idempotency keys --------------------------------------------------------------------------


async def test_the_same_key_gives_the_same_run(client: OpenAnywhere) -> None:
    async with client() as dt:
        await dt.register(GREET)
        first = await dt.run("greet", {"who": "Ada"}, idempotency_key="order 7")
        again = await dt.trigger("greet", {"who": "Ada"}, idempotency_key="order 7")
        other = await dt.run("greet", {"who": "Ada"}, idempotency_key="order 8")
        assert again.run_id == first.run_id != other.run_id
    async with client() as later:
        assert (await later.run("greet", {"who": "Ada"}, idempotency_key="order 7")) == first
        assert len(await later.list_runs()) == 2


async def test_the_same_key_with_another_request_is_a_conflict(dt: Dovetail) -> None:
    await dt.run(GREET, {"who": "Ada"}, idempotency_key="order 7")
    with pytest.raises(Conflict, match="order 7"):
        await dt.run(GREET, {"who": "Bob"}, idempotency_key="order 7")
    with pytest.raises(Conflict, match="order 7"):
        await dt.run({**GREET, "description": "new"}, {"who": "Ada"}, idempotency_key="order 7")
    await dt.batch(GREET, [{"who": "Ada"}], idempotency_key="order 9")
    with pytest.raises(Conflict, match="order 9"):
        await dt.batch(GREET, [{"who": "Ada"}, {}], idempotency_key="order 9")


@everywhere
async def test_a_key_may_be_in_any_script(dt: Dovetail) -> None:
    await dt.register(GREET)
    keys = ["注文" * 127, "注文" * 126 + "書", "bestellung ä 7", "é" * 255]
    made = [(await dt.run("greet", idempotency_key=key)).run_id for key in keys]
    again = [(await dt.trigger("greet", idempotency_key=key)).run_id for key in keys]
    assert again == made
    assert len(set(made)) == len(keys)
    with pytest.raises(InvalidParams, match="1 to 255 characters"):
        await dt.run("greet", idempotency_key="é" * 256)


async def test_a_key_matches_the_request_even_if_the_workflow_changed(client: OpenAnywhere) -> None:
    async with client() as dt:
        await dt.register(GREET)
        first = await dt.run("greet", {"who": "Ada"}, idempotency_key="order 7")
        batch = await dt.batch("greet", [{"who": "Ada"}], idempotency_key="order 7")
        await dt.register({**GREET, "params": {"type": "object", "required": ["whom"]}})
        assert await dt.run("greet", {"who": "Ada"}, idempotency_key="order 7") == first
        again = await dt.batch("greet", [{"who": "Ada"}], idempotency_key="order 7")
        assert again.batch_id == batch.batch_id
        with pytest.raises(InvalidParams):
            await dt.run("greet", {"who": "Ada"}, idempotency_key="order 8")
        with pytest.raises(Conflict, match="order 7"):
            await dt.run("greet", {"who": "Bob"}, idempotency_key="order 7")


async def test_concurrent_requests_with_one_key_create_one_run(dt: Dovetail) -> None:
    runs = await asyncio.gather(*(dt.run(GREET, idempotency_key="once") for _ in range(20)))
    assert len({run.run_id for run in runs}) == len(await dt.list_runs()) == 1


# --- lists -------------------------------------------------------------------------------------


async def test_runs_are_listed_newest_first_page_by_page_without_nodes(dt: Dovetail) -> None:
    made = [(await dt.run(GREET)).run_id for _ in range(7)]
    page = await dt.list_runs(limit=3)
    found = list(page)
    while page.next_cursor is not None:
        page = await dt.list_runs(limit=3, cursor=page.next_cursor)
        found += page
    assert [run.run_id for run in found] == made[::-1]
    assert len(page) == len(page.items) == 1
    assert list(found[0].to_dict()) == RUN_FIELDS[:-2]
    assert page.to_dict() == {"items": [found[-1].to_dict()], "next_cursor": None}
    assert not hasattr(found[0], "nodes")
    assert not hasattr(found[0], "forked_from")
    with pytest.raises(AttributeError, match=rf"get_run\('{made[-1]}'\) has nodes and outputs"):
        found[0].outputs  # noqa: B018


async def test_runs_are_listed_by_status_and_workflow(dt: Dovetail) -> None:
    good = await dt.run(GREET)
    bad = await dt.run(flow({"id": "no", "handler": "fail"}))
    batch = await dt.batch(GREET, [{}])
    await dt.wait_batch(batch.batch_id)

    async def ids(**chosen: Any) -> set[str]:
        return {run.run_id for run in await dt.list_runs(**chosen)}

    assert await ids(status="FAILED") == await ids(workflow="flow") == {bad.run_id}
    assert await ids(batch=batch.batch_id) == {batch.runs[0].run_id}
    assert await ids(status="COMPLETED", workflow="greet") == {good.run_id, batch.runs[0].run_id}
    assert await ids(status="RUNNING") == await ids(workflow="nobody") == set()


# --- events ------------------------------------------------------------------------------------


async def test_events_arrive_live_and_end_with_the_run(client: OpenAnywhere) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        types = []
        async for event in dt.events(run.run_id):
            types.append(event.type)
            if event.type == "node.started":
                assert (event.node, event.attempt, event.seq) == ("door", 1, len(types))
                door.opened.set()
    assert types == [
        *("run.created", "run.started"),
        *("node.queued", "node.started", "node.completed"),
        "run.completed",
    ]


async def test_events_continue_after_the_last_one_seen(dt: Dovetail) -> None:
    run = await dt.run(GREET)
    all_of_them = [event async for event in dt.events(run.run_id)]
    assert [event.seq for event in all_of_them] == list(range(1, len(all_of_them) + 1))
    for after in range(len(all_of_them) + 1):
        assert [event async for event in dt.events(run.run_id, after=after)] == all_of_them[after:]
    assert [event async for event in dt.events(run.run_id, after=999)] == []


async def test_the_data_of_an_event_are_its_attributes(dt: Dovetail) -> None:
    run = await dt.run(flow({"id": "no", "handler": "fail", "config": {"message": "as asked"}}))
    events = {event.type: event async for event in dt.events(run.run_id)}
    failed, created = events["node.failed"], events["run.created"]
    assert "as asked" in failed.error["message"]
    assert failed.more["error"] == failed.error
    assert created.workflow == "flow"
    with pytest.raises(AttributeError, match="no 'error'; it has: seq, time, type, epoch"):
        created.error  # noqa: B018
    assert list(created.to_dict())[:4] == ["seq", "time", "type", "epoch"]
    assert "node" not in created.to_dict()
    assert (failed.to_dict()["node"], failed.to_dict()["attempt"]) == ("no", 1)


async def test_a_caller_that_stops_listening_leaves_the_run_alone(client: OpenAnywhere) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        async for _ in dt.events(run.run_id):
            break
        listening = asyncio.create_task(anext(dt.events(run.run_id, after=4)))
        await door.knocked.wait()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        door.opened.set()
        assert (await dt.wait(run.run_id)).status == "COMPLETED"


# --- batches -----------------------------------------------------------------------------------


async def test_a_batch_of_200_items_is_200_runs_in_order(
    dt: Dovetail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.client.PAGE", 60)  # so that it takes several
    batch = await dt.batch(GREET, ({"who": str(i)} for i in range(200)))
    assert (batch.workflow, batch.count, sum(batch.counts.values())) == ("greet", 200, 200)
    assert [run.index for run in batch.runs] == list(range(200))
    done = await dt.wait_batch(batch.batch_id)
    assert (done.counts, done.next_cursor) == ({"COMPLETED": 200}, None)
    assert done.finished_at is not None
    assert {run.status for run in done.runs} == {"COMPLETED"}
    assert [run.run_id for run in done.runs] == [run.run_id for run in batch.runs]
    for index in (0, 117, 199):
        run = await dt.get_run(done.runs[index].run_id)
        assert run.result == {"text": f"hello {index}"}
    assert "count=200" in repr(done)


async def test_a_batch_can_be_read_page_by_page(dt: Dovetail) -> None:
    made = await dt.batch(GREET, [{}] * 25)
    page = await dt.get_batch(made.batch_id, limit=10)
    runs = list(page.runs)
    assert list(page.to_dict()) == BATCH_FIELDS
    while page.next_cursor is not None:
        page = await dt.get_batch(made.batch_id, limit=10, cursor=page.next_cursor)
        runs += page.runs
    assert [run.run_id for run in runs] == [run.run_id for run in made.runs]


@everywhere
async def test_one_bad_item_creates_nothing_of_a_batch(dt: Dovetail) -> None:
    for bad in ({"who": 7}, {"whom": "x"}, "text", 3):
        with pytest.raises(InvalidParams, match=r"items\[2\]"):
            await dt.batch(GREET, [{}, {}, bad, {}])  # type: ignore[list-item]
    assert (await dt.list_runs()).items == ()


async def test_the_same_key_gives_the_same_batch(dt: Dovetail) -> None:
    items = [{"who": "Ada"}, {"who": "Bob"}]
    first = await dt.batch(GREET, items, idempotency_key="monday")
    again = await dt.batch(GREET, items, idempotency_key="monday")
    assert first.batch_id == again.batch_id
    assert len(await dt.list_runs()) == 2


async def test_a_batch_of_a_registered_workflow_keeps_its_version(dt: Dovetail) -> None:
    await dt.register(GREET)
    batch = await dt.batch("greet", [{}])
    assert (await dt.wait(batch.runs[0].run_id)).version == 1
    with pytest.raises(NotFound):
        await dt.batch("nobody", [{}])


async def test_a_wait_for_a_batch_that_times_out_raises_and_the_batch_continues(
    client: OpenAnywhere,
) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        batch = await dt.batch(KNOCK, [{}, {}, {}])
        with pytest.raises(TimeoutError, match=rf"batch {batch.batch_id} has .* it goes on"):
            await dt.wait_batch(batch.batch_id, timeout=0.05)
        door.opened.set()
        done = await dt.wait_batch(batch.batch_id)
        assert done.counts == {"COMPLETED": 3}
        assert (await dt.wait_batch(batch.batch_id, timeout=0)).counts == {"COMPLETED": 3}


async def test_the_failed_runs_of_a_batch_can_be_retried_together(client: OpenAnywhere) -> None:
    mood = FailingHandler()
    async with client(mood.handler) as dt:
        batch = await dt.wait_batch((await dt.batch(MOODY, [{}, {}])).batch_id)
        assert batch.counts == {"FAILED": 2}
        mood.cheerful = True
        await dt.retry_batch(batch.batch_id)
        assert (await dt.wait_batch(batch.batch_id)).counts == {"COMPLETED": 2}


# --- opening and leaving -----------------------------------------------------------------------


async def test_a_client_can_be_opened_again_but_not_twice_at_once(local: Open) -> None:
    dt = local()
    with pytest.raises(DovetailError, match="not open; call it inside"):
        await dt.run(GREET)
    assert "closed" in repr(dt)
    async with dt as opened:
        assert opened is dt
        assert "open" in repr(dt)
        run = await dt.run(GREET)
        with pytest.raises(DovetailError, match="already open"):
            await dt.__aenter__()
        assert (await dt.get_run(run.run_id)) == run
    async with dt:
        assert (await dt.get_run(run.run_id)) == run
    with pytest.raises(DovetailError, match="not open"):
        await dt.get_run(run.run_id)


async def test_an_unfinished_run_waits_for_a_later_client(
    local: Open,
) -> None:
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    async with local(first.handler) as dt:
        begun = await dt.trigger(KNOCK)
        await first.knocked.wait()
    async with local(second.handler) as dt:
        assert (await dt.get_run(begun.run_id)).status == "RUNNING"
        assert not second.attempts, "it was not asked for yet"
        run = await dt.wait(begun.run_id, timeout=10)
    assert run.status == "COMPLETED"
    assert (first.attempts, second.attempts) == ([1], [2])


async def test_a_running_handler_has_time_to_finish_when_the_client_closes(
    local: Open,
) -> None:
    door = WaitingHandler()
    async with local(door.handler, drain_seconds=10) as dt:
        run = await dt.trigger(KNOCK)
        await door.knocked.wait()
        asyncio.get_running_loop().call_later(0.1, door.opened.set)
    async with local(door.handler) as dt:
        assert (await dt.wait(run.run_id)).nodes["door"].output == {"attempt": 1}
    assert door.attempts == [1]


async def test_all_unfinished_runs_can_be_resumed_together(local: Open) -> None:
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    async with local(first.handler) as dt:
        left = {(await dt.trigger(KNOCK)).run_id for _ in range(3)}
        finished = await dt.run(GREET)
    async with local() as dt:
        assert await dt.resume() == [], "its handlers are not known here"
    async with local(second.handler) as dt:
        assert set(await dt.resume()) == left
        assert {(await dt.wait(run_id, 10)).status for run_id in left} == {"COMPLETED"}
        with pytest.raises(Conflict):
            await dt.resume(finished.run_id)


async def test_an_unfinished_run_continues_when_its_key_is_used_again(local: Open) -> None:
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    async with local(first.handler) as dt:
        begun = await dt.trigger(KNOCK, idempotency_key="once")
    async with local(second.handler) as dt:
        assert (await dt.trigger(KNOCK, idempotency_key="once")).run_id == begun.run_id
        await soon(lambda: is_completed(dt, begun.run_id))


async def is_completed(dt: Dovetail, run_id: str) -> bool:
    return (await dt.get_run(run_id)).status == "COMPLETED"


async def test_a_batch_that_was_left_goes_on_for_a_waiting_caller(
    local: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.client.PAGE", 4)
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    async with local(first.handler, concurrency=2) as dt:
        batch = await dt.batch(KNOCK, [{}] * 6)
        await first.knocked.wait()
    async with local(second.handler) as dt:
        done = await dt.wait_batch(batch.batch_id, timeout=10)
    assert done.counts == {"COMPLETED": 6}


async def test_a_later_client_retries_a_failed_run_and_runs_it(local: Open) -> None:
    mood = FailingHandler()
    async with local(mood.handler) as dt:
        failed = await dt.run(MOODY)
    mood.cheerful = True
    async with local(mood.handler) as dt:
        await dt.retry(failed.run_id)
        await soon(lambda: is_completed(dt, failed.run_id))


async def test_a_run_that_this_process_cannot_drive_is_reported(local: Open) -> None:
    door = WaitingHandler()
    async with local(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        await door.knocked.wait()
    async with local() as dt:
        with pytest.raises(Conflict, match="knock"):
            await dt.wait(run.run_id, timeout=10)
        with pytest.raises(Conflict, match="knock"):
            await dt.resume(run.run_id)
        events = dt.events(run.run_id)
        reported = [(await anext(events)).type for _ in range(4)]
        assert reported[-1] == "node.started", "what is stored comes first"
        with pytest.raises(Conflict, match="knock"):
            await asyncio.wait_for(drained(events), 10)
        assert (await dt.cancel(run.run_id)).status == "CANCELLED"
        assert (await dt.wait(run.run_id)).status == "CANCELLED"


@everywhere
async def test_a_caller_that_still_waits_when_the_block_is_left_gets_an_error(
    client: OpenAnywhere,
) -> None:
    door = WaitingHandler()
    async with client(door.handler) as dt:
        run = await dt.trigger(KNOCK)
        waiting = asyncio.create_task(dt.wait(run.run_id))
        listening = asyncio.create_task(drained(dt.events(run.run_id)))
        await asyncio.sleep(0)  # so that both have begun
        await door.knocked.wait()
    for task in (waiting, listening):
        with pytest.raises(DovetailError, match="the block was left before the run had finished"):
            await asyncio.wait_for(task, 5)


async def drained(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def test_leaving_the_block_by_an_error_also_hands_the_runs_back(local: Open) -> None:
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    run_ids = []

    async def stumble() -> None:
        async with local(first.handler) as dt:
            run_ids.append((await dt.trigger(KNOCK)).run_id)
            await first.knocked.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stumble()
    async with local(second.handler) as dt:
        assert (await dt.wait(run_ids[0], 10)).status == "COMPLETED"


# --- two clients on one file -------------------------------------------------------------------


async def test_two_clients_on_one_file_see_the_runs_of_each_other(local: Open) -> None:
    door = WaitingHandler()
    async with local(door.handler) as owner, local(door.handler) as other:
        run = await owner.trigger(KNOCK)
        waiting = asyncio.create_task(other.wait(run.run_id))
        reported = asyncio.create_task(types_of(other, run.run_id))
        await door.knocked.wait()
        with pytest.raises(Conflict):
            await other.resume(run.run_id)
        door.opened.set()
        assert (await asyncio.wait_for(waiting, 10)).status == "COMPLETED"
        assert await asyncio.wait_for(reported, 10) == await types_of(owner, run.run_id)
    assert door.attempts == [1]


async def types_of(dt: Dovetail, run_id: str) -> list[str]:
    return [event.type async for event in dt.events(run_id)]


async def test_a_cancel_by_another_client_reaches_the_owner(local: Open) -> None:
    door = WaitingHandler()
    async with local(door.handler) as owner, local() as other:
        run = await owner.trigger(KNOCK)
        waiting = asyncio.create_task(owner.wait(run.run_id))
        await door.knocked.wait()
        assert (await other.cancel(run.run_id)).status == "CANCELLED"
        assert (await asyncio.wait_for(waiting, 8)).status == "CANCELLED"


async def test_when_the_owner_leaves_the_waiting_client_continues_the_run(local: Open) -> None:
    first, second = WaitingHandler(), WaitingHandler()
    second.opened.set()
    async with local(second.handler) as other:
        async with local(first.handler) as owner:
            run = await owner.trigger(KNOCK)
            waiting = asyncio.create_task(other.wait(run.run_id))
            await first.knocked.wait()
        assert (await asyncio.wait_for(waiting, 10)).status == "COMPLETED"
    assert (first.attempts, second.attempts) == ([1], [2])


async def test_two_clients_that_wait_for_the_same_lost_run_execute_it_once(local: Open) -> None:
    left, door = WaitingHandler(), WaitingHandler()
    door.opened.set()
    async with local(left.handler) as dt:
        run = await dt.trigger(KNOCK)
        await left.knocked.wait()
    async with local(door.handler) as one, local(door.handler) as two:
        runs = await asyncio.gather(one.wait(run.run_id, 10), two.wait(run.run_id, 10))
    assert [each.status for each in runs] == ["COMPLETED", "COMPLETED"]
    assert door.attempts == [2]


async def test_a_caller_that_finds_a_lost_run_taken_follows_it(
    local: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = WaitingHandler()
    asked: list[str] = []
    true_owner = Commands.owner

    async def outdated(commands: Commands, run_id: str) -> Any:
        asked.append(run_id)
        return "gone" if len(asked) == 1 else await true_owner(commands, run_id)

    async with local(door.handler) as owner, local(door.handler) as other:
        run = await owner.trigger(KNOCK)
        await door.knocked.wait()
        monkeypatch.setattr(Commands, "owner", outdated)
        waiting = asyncio.create_task(other.wait(run.run_id))
        async with asyncio.timeout(10):
            while len(asked) < 4:  # it looks again from time to time
                await asyncio.sleep(0.01)
        door.opened.set()
        assert (await asyncio.wait_for(waiting, 10)).status == "COMPLETED"
    assert door.attempts == [1]


# --- what a client is made of ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["amqp://me:pw@host", "postgresql://me:pw@host/db"])
def test_a_wrong_target_is_reported(target: str) -> None:
    with pytest.raises(DovetailError, match=r"leads nowhere: .*Dovetail\('path\.db'\)") as error:
        Dovetail(target)
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("target", ["", ":memory:"])
def test_runs_are_stored_in_a_file(target: str) -> None:
    with pytest.raises(DovetailError, match="runs are kept in a file"):
        Dovetail(target)


async def test_a_file_that_cannot_be_used_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, whatever it is called\n" * 100)
    (tmp_path / "folder.db").mkdir()
    for name in ("text.db", "folder.db", "text.db/below.db"):
        with pytest.raises(StoreError, match=r"\.db"):
            async with Dovetail(tmp_path / name) as dt:
                await dt.run(GREET)


async def test_a_keyword_is_a_setting(local: Open) -> None:
    doors = WaitingHandler()
    async with local(doors.handler, concurrency=2) as dt:
        for _ in range(4):
            await dt.trigger(KNOCK)
        await doors.knocked.wait()
        await asyncio.sleep(0.1)
        assert len(doors.attempts) == 2


def test_a_setting_that_is_wrong_or_unknown_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'concurrency'"):
        Dovetail(tmp_path / "x.db", concurency=8)
    with pytest.raises(SettingsError, match="must be greater than or equal to 1"):
        Dovetail(tmp_path / "x.db", concurrency=0)
    with pytest.raises(SettingsError, match="DOVETAIL_SECRET_<NAME>"):
        Dovetail(tmp_path / "x.db", secrets={"KEY": "hunter2"})
    with pytest.raises(TypeError, match="two places"):
        Dovetail(tmp_path / "x.db", db="y.db")
    assert "other.db" in repr(Dovetail(db="other.db"))


async def test_handlers_are_functions_files_and_modules(tmp_path: Path) -> None:
    @handler("twice")
    def twice(config: dict[str, Any], ctx: Context) -> int:
        return 2 * int(config["of"])

    (tmp_path / "thrice.py").write_text(
        "from dovetail import handler\n\n\n"
        '@handler("thrice")\ndef thrice(config, ctx):\n    return 3 * config["of"]\n'
    )
    both = flow(
        {"id": "two", "handler": "twice", "config": {"of": 7}},
        {"id": "three", "handler": "thrice", "config": {"of": "{{ two.output }}"}},
    )
    for given in (["thrice.py", twice], [tmp_path / "thrice.py", twice, twice]):
        async with Dovetail(tmp_path / "x.db", handlers=given) as dt:
            assert (await dt.run(both)).outputs == {"two": 14, "three": 42}
    alone = flow({"id": "two", "handler": "twice", "config": {"of": 7}})
    async with Dovetail(tmp_path / "x.db", handlers=twice) as dt:
        assert (await dt.run(alone)).outputs == {"two": 14}
        with pytest.raises(InvalidDefinition, match="thrice"):
            await dt.run(both)
    Dovetail(tmp_path / "x.db", handlers="thrice.py")


def test_a_wrong_handler_is_reported(tmp_path: Path) -> None:
    def plain(config: dict[str, Any], ctx: Context) -> None: ...

    for wrong in (plain, [plain], [7]):
        with pytest.raises(HandlerError, match="give functions with @handler"):
            Dovetail(tmp_path / "x.db", handlers=wrong)  # type: ignore[arg-type]
    with pytest.raises(HandlerError, match=r"missing\.py"):
        Dovetail(tmp_path / "x.db", handlers="missing.py")

    @handler("sleep")
    def sleep(config: dict[str, Any], ctx: Context) -> None: ...

    with pytest.raises(HandlerError, match="is built in and cannot be replaced"):
        Dovetail(tmp_path / "x.db", handlers=sleep)


def test_exactly_the_public_names_exist() -> None:
    assert set(dir(dovetail)) == set(dovetail.__all__)
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Dovetale'"):
        dovetail.Dovetale  # noqa: B018
    assert dovetail.Run is Run


async def test_params_that_the_schema_does_not_name_give_warnings_in_the_reply(
    dt: Dovetail,
) -> None:
    lenient = {**GREET, "params": {"properties": {"who": {"type": "string", "default": "x"}}}}
    message = "'whom' is not in the params schema; did you mean 'who'?"
    warning = {"code": "unknown_param", "message": message, "path": "params.whom"}
    run = await dt.run(lenient, {"whom": "Ada"}, timeout=20)
    assert (run.status, run.warnings, run.to_dict()["warnings"]) == (
        "COMPLETED",
        [warning],
        [warning],
    )
    assert (await dt.trigger(lenient, {"whom": "Ada"})).warnings == [warning]
    again = await dt.get_run(run.run_id)
    assert again.warnings == []
    assert "warnings" not in again.to_dict()
    batch = await dt.batch(lenient, [{"who": "a"}, {"whom": "b"}])
    assert batch.warnings == [{**warning, "path": "items[1].whom"}]
    assert (await dt.wait_batch(batch.batch_id, timeout=20)).warnings == []


async def test_batches_are_listed_and_found_and_an_alias_is_deleted(dt: Dovetail) -> None:
    first, second = [await dt.batch(GREET, [{"who": who}] * 2) for who in ("a", "b")]
    page = await dt.list_batches(limit=1)
    assert [batch.batch_id for batch in page] == [second.batch_id]
    assert page.items[0].runs == ()
    rest = await dt.list_batches(cursor=page.next_cursor)
    assert rest.items[0].batch_id == first.batch_id
    assert await dt.find_batch(first.batch_id[:10]) == first.batch_id
    with pytest.raises(NotFound, match="no batch 'nobody'"):
        await dt.find_batch("nobody")
    await dt.register(GREET)
    with pytest.raises(Conflict, match="cannot be deleted"):
        await dt.delete_alias("greet", "latest")
    with pytest.raises(NotFound, match="has no alias 'prod'"):
        await dt.delete_alias("greet", "prod")


async def test_aliases_take_weights_versions_are_deleted_and_a_history_is_kept(
    dt: Dovetail,
) -> None:
    await dt.register(GREET)
    await dt.register({**GREET, "description": "2"})
    await dt.set_alias("greet", "prod", weights={1: 1, "2": 1.5})
    run = await dt.trigger("greet", {"who": "a"}, version="prod", idempotency_key="k")
    assert run.version in (1, 2)
    with pytest.raises(Conflict, match="has the alias 'prod'"):
        await dt.delete_version("greet", 1)
    await dt.set_alias("greet", "prod", 2)
    await dt.wait(run.run_id)
    await dt.delete_version("greet", 1)
    with pytest.raises(NotFound, match="no version 1"):
        await dt.trigger("greet", {"who": "a"}, version=1)
    page = await dt.workflow_history("greet", limit=2)
    assert [one.action for one in page.items] == ["delete", "alias"]
    assert page.items[1].details == {"alias": "prod", "version": 2, "from": {"1": 1, "2": 1.5}}
    rest = await dt.workflow_history("greet", cursor=page.next_cursor)
    assert [one.action for one in rest.items] == ["alias", "register", "register"]
    assert rest.next_cursor is None
    assert rest.items[0].to_dict()["actor"]
    for wrong in ({}, {"1": 0}, {"prod": 1}):
        with pytest.raises(InvalidParams):
            await dt.set_alias("greet", "prod", weights=wrong)
    with pytest.raises(TypeError, match="either a version or weights"):
        await dt.set_alias("greet", "prod")
    with pytest.raises(NotFound):
        await dt.workflow_history("nobody")
