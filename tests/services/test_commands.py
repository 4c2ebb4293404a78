"""What a user can ask for over Redis, alone and with PostgreSQL, while services do the work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import RateLimit, Settings, SettingsError
from dovetail.core.errors import ArchiveDown, Conflict, InvalidDefinition, InvalidParams, NotFound
from dovetail.core.run import RunState
from dovetail.engine.commands import Commands
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.ports import RunQuery
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.codec import keys_of
from dovetail.wiring.distributed import ARCHIVE, commanding

from ..servers.server import free_port
from .service_processes import ServiceProcesses

SECONDS = 20.0
BOTH = pytest.mark.parametrize("service_processes", ["redis", "redis and postgres"], indirect=True)
ARCHIVED = pytest.mark.parametrize("service_processes", ["redis and postgres"], indirect=True)
PATIENT = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def settings_of(service_processes: ServiceProcesses, **more: Any) -> Settings:
    return Settings(
        redis_url=service_processes.redis_url, database_url=service_processes.database_url, **more
    )


@pytest.fixture
async def commands(service_processes: ServiceProcesses) -> AsyncIterator[Commands]:
    async with commanding(settings_of(service_processes)) as found, asyncio.timeout(SECONDS):
        yield found


def flow(name: str, *nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    listed = nodes or ({"id": "a", "handler": "greet"},)
    return {"name": name, "nodes": list(listed), **fields}


def until(file: str, **fields: Any) -> dict[str, Any]:
    return {"id": "a", "handler": "until", "config": {"file": file}, **fields}


async def run_of(commands: Commands, *given: Any, **more: Any) -> RunState:
    return await commands.wait((await commands.trigger(*given, **more)).run_id)


async def started(service_processes: ServiceProcesses, run_id: str) -> None:
    while not service_processes.executions(run_id):
        await asyncio.sleep(0.02)


async def ids(commands: Commands, **wanted: Any) -> list[str]:
    return [run["run_id"] for run in (await commands.list_runs(RunQuery(**wanted)))["items"]]


# --- workflows -----------------------------------------------------------------------------------


@BOTH
async def test_workflows_have_versions_and_aliases_and_can_be_deleted(commands: Commands) -> None:
    assert await commands.register(flow("kept")) == ("kept", 1, True)
    assert await commands.register(flow("kept")) == ("kept", 1, False)
    assert await commands.register(flow("kept", description="more")) == ("kept", 2, True)
    assert (await commands.set_alias("kept", "prod", 1))["version"] == 1
    assert (await commands.workflow("kept", "prod"))["version"] == 1
    assert len((await commands.versions("kept"))["items"]) == 2
    listed = (await commands.workflows())["items"]
    assert [w["latest_version"] for w in listed if w["name"] == "kept"] == [2]
    assert (await run_of(commands, "kept", version="prod")).version == 1
    await commands.delete_workflow("kept")
    with pytest.raises(NotFound):
        await commands.trigger("kept")


@BOTH
async def test_a_workflow_is_not_deleted_while_it_has_an_unfinished_run(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    await commands.register(flow("busy", until("busy")))
    run_id = (await commands.trigger("busy")).run_id
    with pytest.raises(Conflict, match="1 run not finished yet"):
        await commands.delete_workflow("busy")
    service_processes.touch("busy")
    await commands.wait(run_id)
    await commands.delete_workflow("busy")
    assert (await commands.get_run(run_id))["status"] == "COMPLETED"


@BOTH
async def test_handlers_are_known_after_a_worker_announced_them(commands: Commands) -> None:
    nodes = [{"id": "a", "handler": "greet"}, {"id": "b", "handler": "ghost"}]
    with pytest.raises(InvalidDefinition) as caught:
        await commands.register(flow("f", *nodes))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("unknown_handler", "nodes[1].handler")
    nodes = [{"id": "a", "handler": "greet"}, {"id": "b", "handler": "llm_service"}]
    run = await commands.store.load((await commands.trigger(flow("f", *nodes))).run_id)
    assert [spec.max_retries for spec in run.graph.nodes] == [2, 3], "each handler's own"


# --- runs ----------------------------------------------------------------------------------------


@BOTH
async def test_a_run_is_created_executed_and_read(commands: Commands) -> None:
    nodes = [
        {"id": "a", "handler": "input"},
        {"id": "b", "handler": "greet", "dependencies": ["a"], "config": {"name": "{{ a.n }}"}},
        {"id": "c", "handler": "output", "dependencies": ["b"]},
    ]
    await commands.register(flow("read", *nodes, params=PATIENT))
    with pytest.raises(InvalidParams):
        await commands.trigger("read", {"n": "x"})
    accepted = await commands.trigger("read", {"n": 3})
    run_id = accepted.run_id
    assert accepted.created
    assert await ids(commands, workflow="read") == [run_id], "listed as soon as it is accepted"
    assert (await commands.wait(run_id)).status == "COMPLETED"
    assert await commands.owner(run_id) == "none"
    assert await ids(commands, workflow="read", status="RUNNING") == []
    assert await ids(commands, workflow="read", status="COMPLETED") == [run_id]
    short = await commands.get_run(run_id, nodes=False)
    whole = await commands.get_run(run_id)
    assert whole.pop("nodes")[1]["output"] == "hello 3"
    assert whole.pop("forked_from") is None
    assert short == whole
    (listed,) = (await commands.list_runs(RunQuery(workflow="read")))["items"]
    assert listed == short
    assert (await commands.results(run_id))["result"] == {"b": "hello 3"}
    assert await commands.find_run(run_id[:8]) == run_id
    events = await commands.events(run_id)
    async with aclosing(commands.store.watch(run_id, 2)) as feed:  # type: ignore[type-var]
        seen = [event.seq async for event in feed]
    assert seen == [event["seq"] for event in events][2:]
    assert (events[0]["type"], events[-1]["type"]) == ("run.created", "run.completed")


@BOTH
async def test_a_running_run_is_shown_with_its_current_state(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    run_id = (await commands.trigger(flow("seen", until("seen")))).run_id
    await started(service_processes, run_id)
    assert await ids(commands, workflow="seen", status="RUNNING") == [run_id]
    assert await commands.owner(run_id) == "elsewhere"
    (why,) = (await commands.explain(run_id))["nodes"]
    assert why["code"] == "running"
    with pytest.raises(Conflict, match="has no result yet"):
        await commands.results(run_id)
    with pytest.raises(Conflict, match="dovetail orchestrator"):
        await commands.resume(run_id)
    service_processes.touch("seen")
    await commands.wait(run_id)


@BOTH
async def test_a_cancel_reaches_the_handler_and_a_retry_continues_the_run(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    name = "never-seen"
    run_id = (await commands.trigger(flow("stopped", until(name)))).run_id
    await started(service_processes, run_id)
    assert (await commands.cancel(run_id)).status == "CANCELLED"
    with pytest.raises(Conflict):
        await commands.cancel(run_id)
    assert await ids(commands, workflow="stopped", status="CANCELLED") == [run_id]
    assert await commands.plan_retry(run_id) == {"rerun": ["a"], "reuse": []}
    service_processes.touch(name)
    assert (await commands.retry(run_id)).epoch == 2
    assert (await commands.wait(run_id)).status == "COMPLETED"
    assert await ids(commands, workflow="stopped", status="CANCELLED") == []
    assert await ids(commands, workflow="stopped", status="COMPLETED") == [run_id]
    with pytest.raises(Conflict):
        await commands.retry(run_id)
    await commands.retry(run_id, "a")
    assert (await commands.wait(run_id)).epoch == 3


@BOTH
async def test_an_unknown_id_is_reported_by_every_command(commands: Commands) -> None:
    for question in (
        commands.get_run("f" * 32),
        commands.get_run("f" * 32, nodes=False),
        commands.results("f" * 32),
        commands.events("f" * 32),
        commands.explain("f" * 32),
        commands.cancel("f" * 32),
        commands.retry("f" * 32),
        commands.owner("f" * 32),
        commands.wait("f" * 32),
        commands.get_batch("f" * 32),
        commands.find_run("ffff"),
        commands.trigger("nobody"),
    ):
        with pytest.raises(NotFound):
            await question
    with pytest.raises(NotFound):
        await anext(commands.store.watch("f" * 32))


# --- one key, one run ----------------------------------------------------------------------------


@BOTH
async def test_a_key_belongs_to_one_request(commands: Commands) -> None:
    await commands.register(flow("keyed"))
    first = await commands.trigger("keyed", {"x": 1}, idempotency_key="k")
    again = await commands.trigger("keyed", {"x": 1}, idempotency_key="k")
    assert again[:2] == (first.run_id, False)
    with pytest.raises(Conflict, match="used before, for another request"):
        await commands.trigger("keyed", {"x": 2}, idempotency_key="k")
    assert await ids(commands, workflow="keyed") == [first.run_id]


CROWD = """
import asyncio, sys
from dovetail.config import load_settings
from dovetail.wiring.distributed import commanding

async def main():
    async with commanding(load_settings()) as commands:
        sys.stdin.readline()
        made = await asyncio.gather(
            *(commands.trigger("crowd", {"x": 1}, idempotency_key="one") for _ in range(25))
        )
        print(*{run_id for run_id, _ in made}, sum(created for _, created in made))

asyncio.run(main())
"""


@BOTH
async def test_fifty_concurrent_requests_from_two_processes_create_one_run(
    commands: Commands, service_processes: ServiceProcesses, tmp_path: Path
) -> None:
    await commands.register(flow("crowd"))
    script = tmp_path / "crowd.py"
    script.write_text(CROWD)
    crowd = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **service_processes.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = await asyncio.gather(*(asyncio.to_thread(one.communicate, "\n") for one in crowd))
    answers = [out.split() for out, _ in said]
    assert len({run_id for run_id, _ in answers}) == 1
    assert sum(int(created) for _, created in answers) == 1
    assert await ids(commands, workflow="crowd") == [answers[0][0]]
    assert (await commands.wait(answers[0][0])).status == "COMPLETED"


KILLED = """
import asyncio, os, time
from dovetail.config import load_settings
from dovetail.wiring.distributed import commanding
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator

async def die(self, submits, now=None):
    print(*(submit.run_id for submit in submits), flush=True)
    os._exit(9)

async def main():
    DistributedOrchestrator.submit_many = die
    async with commanding(load_settings()) as commands:
        # Long ago, so that no process waits for its maker any more.
        object.__setattr__(commands, "clock", lambda: time.time() - 100)
        commands.orchestrator._clock = commands.clock
        await commands.{call}

asyncio.run(main())
"""


async def accepted_by_who_dies(
    service_processes: ServiceProcesses, folder: Path, call: str, killed: str = KILLED
) -> list[str]:
    """The runs of a caller that is killed before they are made."""
    script = folder / "killed.py"
    script.write_text(textwrap.dedent(killed.replace("{call}", call)))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, script],
        env={**os.environ, **service_processes.env},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 9
    return done.stdout.split()


@BOTH
@pytest.mark.parametrize(
    "call",
    [
        'trigger("left", {"x": 1}, idempotency_key="k")',
        'batch("left", [{"x": n} for n in range(3)])',
    ],
)
async def test_a_run_whose_trigger_process_died_is_created(
    commands: Commands, service_processes: ServiceProcesses, tmp_path: Path, call: str
) -> None:
    await commands.register(flow("left"))
    accepted = await accepted_by_who_dies(service_processes, tmp_path, call)
    if (
        service_processes.database_url is not None
    ):  # a new one looks at once, the others within a minute
        service_processes.start("orchestrator")
    while True:
        try:
            made = [await commands.wait(run_id) for run_id in accepted]
            break
        except NotFound:
            await asyncio.sleep(0.1)
    assert [run.status for run in made] == ["COMPLETED"] * len(accepted)
    assert set(accepted) <= set(await ids(commands, workflow="left"))


@BOTH
async def test_a_fork_whose_process_died_is_created_and_reuses_what_was_done(
    commands: Commands, service_processes: ServiceProcesses, tmp_path: Path
) -> None:
    nodes = [{"id": "a", "handler": "greet"}, {"id": "b", "handler": "greet"}]
    old = await run_of(commands, flow("forked", *nodes))
    call = f'fork("{old.id}", from_node="b", idempotency_key="k")'
    (accepted,) = await accepted_by_who_dies(service_processes, tmp_path, call)
    if service_processes.database_url is not None:
        service_processes.start("orchestrator")
    while True:
        try:
            made = await commands.wait(accepted)
            break
        except NotFound:
            await asyncio.sleep(0.1)
    assert (made.status, made.forked_from) == ("COMPLETED", old.id)
    assert [node.attempt for node in made.nodes] == [0, 1]
    assert made.node("a").output == old.node("a").output
    assert await commands.verify(accepted) == []
    again = await commands.fork(old.id, from_node="b", idempotency_key="k")
    assert again == (accepted, False)


@BOTH
async def test_a_fork_of_a_fork_reuses_the_outputs_of_the_first_run(commands: Commands) -> None:
    nodes = [{"id": "a", "handler": "greet"}, {"id": "b", "handler": "greet"}]
    run = await run_of(commands, flow("again", *nodes))
    for _ in range(3):
        made = await commands.wait((await commands.fork(run.id)).run_id)
        assert (made.status, made.forked_from) == ("COMPLETED", run.id)
        assert [node.attempt for node in made.nodes] == [0, 0]
        assert [node.output for node in made.nodes] == [node.output for node in run.nodes]
        assert await ids(commands, workflow="again", status="COMPLETED", limit=1) == [made.id]
        run = made


@BOTH
@pytest.mark.parametrize(
    "call",
    [
        'trigger("asked", {"x": 0}, idempotency_key="k")',
        'batch("asked", [{"x": n} for n in range(3)], idempotency_key="k")',
    ],
)
async def test_a_repeated_trigger_immediately_creates_the_pending_run(
    commands: Commands, service_processes: ServiceProcesses, tmp_path: Path, call: str
) -> None:
    await commands.register(flow("asked", max_concurrency=len(call)))  # one for each call
    just_now = KILLED.replace("- 100", "- 0")
    accepted = await accepted_by_who_dies(service_processes, tmp_path, call, just_now)
    if "trigger" in call:
        again = await commands.trigger("asked", {"x": 0}, idempotency_key="k")
        assert (again.run_id, again.created) == (accepted[0], False)
    else:
        batch = await commands.batch("asked", [{"x": n} for n in range(3)], idempotency_key="k")
        assert not batch["created"]
        runs = (await commands.get_batch(batch["batch_id"]))["runs"]
        assert [run["run_id"] for run in runs] == accepted
    assert set(accepted) <= set(await ids(commands, workflow="asked"))
    async with asyncio.timeout(5):  # an orchestrator would look for them after ten seconds
        made = [await commands.wait(run_id) for run_id in accepted]
    assert [run.status for run in made] == ["COMPLETED"] * len(accepted)


@BOTH
@pytest.mark.parametrize("becomes", [{"description": "changed"}, {"params": PATIENT}])
@pytest.mark.parametrize(
    "call",
    [
        'trigger("NAME", {"x": 0}, idempotency_key="k")',
        'batch("NAME", [{"x": n} for n in range(3)], idempotency_key="k")',
    ],
)
async def test_a_pending_run_is_created_from_the_first_request(
    commands: Commands,
    service_processes: ServiceProcesses,
    tmp_path: Path,
    call: str,
    becomes: dict[str, Any],
) -> None:
    name = f"{call[:5]}-{next(iter(becomes))}"  # one for each call
    first = await commands.register(flow(name))
    just_now = KILLED.replace("- 100", "- 0")
    accepted = await accepted_by_who_dies(
        service_processes, tmp_path, call.replace("NAME", name), just_now
    )
    await commands.register(flow(name, **becomes))
    if "trigger" in call:
        again = await commands.trigger(name, {"x": 0}, idempotency_key="k")
        assert again == (accepted[0], False)
    else:
        batch = await commands.batch(name, [{"x": n} for n in range(3)], idempotency_key="k")
        assert not batch["created"]
    made = [await commands.get_run(run_id) for run_id in accepted]
    assert [run["version"] for run in made] == [first.version] * len(accepted)
    async with asyncio.timeout(5):
        ended = [await commands.wait(run_id) for run_id in accepted]
    assert [run.status for run in ended] == ["COMPLETED"] * len(accepted)


# --- batches -------------------------------------------------------------------------------------


@BOTH
async def test_a_batch_is_created_completely_and_counted(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    needs = {"id": "a", "handler": "needs", "config": {"file": "{{ params.file }}"}}
    await commands.register(flow("batched", needs))
    with pytest.raises(InvalidParams) as caught:
        await commands.batch("batched", [{"file": "x"}, 3])  # type: ignore[list-item]
    assert caught.value.problems[0].path == "items[1]"
    assert await ids(commands, workflow="batched") == []
    service_processes.touch("there")
    files = ["there", "missing", "there"]
    made = await commands.batch("batched", [{"file": file} for file in files], idempotency_key="b")
    again = await commands.batch("batched", [{"file": file} for file in files], idempotency_key="b")
    assert again == {**made, "created": False}
    batch = await commands.wait_batch(made["batch_id"])
    assert batch["counts"] == {"COMPLETED": 2, "FAILED": 1}
    assert [(run["index"], run["status"]) for run in batch["runs"]] == [
        *((0, "COMPLETED"), (1, "FAILED"), (2, "COMPLETED")),
    ]
    assert await ids(commands, batch=made["batch_id"], status="FAILED") == [
        batch["runs"][1]["run_id"]
    ]
    service_processes.touch("missing")
    await commands.retry_batch(made["batch_id"])
    batch = await commands.wait_batch(made["batch_id"])
    assert batch["counts"] == {"COMPLETED": 3}


@BOTH
async def test_an_item_of_a_batch_is_taken_once(commands: Commands) -> None:
    await commands.learn_handlers()
    checked = commands.validate(flow("placed"))
    batch_id = (await commands.open_batch(checked, 2, idempotency_key="b"))["batch_id"]
    first = await commands.trigger(checked, place=(batch_id, 0))
    again = await commands.trigger(checked, place=(batch_id, 0))
    assert again[:2] == (first.run_id, False)
    assert (await commands.get_batch(batch_id))["finished_at"] is None
    await commands.trigger(checked, place=(batch_id, 1))
    assert (await commands.wait_batch(batch_id))["counts"] == {"COMPLETED": 2}


@BOTH
async def test_a_batch_of_five_hundred_costs_few_roundtrips(commands: Commands) -> None:
    await commands.register(flow("large"))
    pipe = commands.store._redis  # type: ignore[attr-defined]
    before = pipe.roundtrips
    made = await commands.batch("large", [{"n": n} for n in range(500)])
    assert pipe.roundtrips - before < 120  # thirty, and what the services ask meanwhile
    batch = await commands.wait_batch(made["batch_id"])
    assert batch["counts"] == {"COMPLETED": 500}


# --- limits --------------------------------------------------------------------------------------


@BOTH
async def test_rate_limits_are_shared_by_all_processes(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    assert (await commands.rate_limit("new"))["rate_per_second"] == 10.0
    await commands.set_rate_limit("shared", 2.5, 3)
    with pytest.raises(InvalidParams):
        await commands.set_rate_limit("shared", 0, 3)
    rates = {"mine": RateLimit(rate_per_second=7, burst=2), "shared": RateLimit()}
    async with commanding(settings_of(service_processes, rate_limits=rates)) as others:
        shown = await others.rate_limit("shared")
        assert shown == {"tag": "shared", "rate_per_second": 2.5, "burst": 3}
        items = (await others.rate_limits())["items"]
        assert {"tag": "mine", "rate_per_second": 7.0, "burst": 2} in items


# --- with an archive -----------------------------------------------------------------------------


async def forget(commands: Commands, run_id: str) -> None:
    """Redis drops the run, once it is archived."""
    pipe = commands.store._redis  # type: ignore[attr-defined]
    while await pipe.call("ZSCORE", "wf:unarchived", run_id) is not None:
        await asyncio.sleep(0.02)
    await pipe.call("DEL", *keys_of(run_id))


@ARCHIVED
async def test_a_run_that_redis_dropped_is_read_from_the_archive(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    run = await run_of(commands, flow("dropped"))
    seen = [await question(commands, run.id) for question in QUESTIONS]
    await forget(commands, run.id)
    async with commanding(settings_of(service_processes)) as others:
        assert [await question(others, run.id) for question in QUESTIONS] == seen
        assert [event.seq async for event in others.store.watch(run.id)] == list(
            range(1, run.seq + 1)
        )
        assert await ids(others, workflow="dropped", status="COMPLETED") == [run.id]
        await others.retry(run.id, "a")
        again = await others.wait(run.id)
        assert (again.status, again.epoch) == ("COMPLETED", 2)


QUESTIONS: list[Any] = [
    lambda commands, run_id: commands.get_run(run_id),
    lambda commands, run_id: commands.get_run(run_id, nodes=False),
    lambda commands, run_id: commands.results(run_id),
    lambda commands, run_id: commands.events(run_id),
    lambda commands, run_id: commands.owner(run_id),
]


@ARCHIVED
async def test_a_run_in_the_archive_is_accepted_even_if_redis_then_fails(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RedisError("gone")

    monkeypatch.setattr(DistributedOrchestrator, "submit_many", fail)
    accepted = await commands.trigger(flow("late"), {"x": 1})
    assert accepted.created
    run = await commands.get_run(accepted.run_id)
    assert (run["status"], run["params"]) == ("PENDING", {"x": 1})
    assert await ids(commands, workflow="late", status="PENDING") == [accepted.run_id]
    assert await commands.owner(accepted.run_id) == "elsewhere"


@ARCHIVED
async def test_a_process_without_the_archive_setting_is_refused(
    service_processes: ServiceProcesses,
) -> None:
    async with asyncio.timeout(10), PipelinedRedis(service_processes.redis_url) as pipe:
        while not await pipe.call("EXISTS", ARCHIVE):  # an orchestrator says so when it begins
            await asyncio.sleep(0.01)
    with pytest.raises(SettingsError, match="DOVETAIL_DATABASE_URL"):
        async with commanding(Settings(redis_url=service_processes.redis_url)):
            raise AssertionError


@ARCHIVED
async def test_without_the_archive_no_run_is_accepted_but_runs_are_still_read(
    commands: Commands, service_processes: ServiceProcesses
) -> None:
    run = await run_of(commands, flow("before"))
    nowhere = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    settings = Settings(redis_url=service_processes.redis_url, database_url=nowhere)
    async with commanding(settings) as cut_off:
        with pytest.raises(ArchiveDown):
            await cut_off.trigger(flow("refused"))
        assert (await cut_off.get_run(run.id))["status"] == "COMPLETED"
        assert (await cut_off.results(run.id))["status"] == "COMPLETED"
    assert await ids(commands, workflow="refused") == []
