"""What the embedded engine keeps, and who goes on with it: real files, several engines on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import RateLimit, Settings
from dovetail.core.errors import Conflict, InvalidDefinition, InvalidParams, NotFound
from dovetail.core.states import RunStatus
from dovetail.engine.commands import (
    LAST_RUN_FIELDS,
    MAX_LAST_RUNS,
    MAX_WORKFLOWS_WITH_RUNS,
    Commands,
)
from dovetail.engine.ports import RunQuery
from dovetail.wiring.embedded import attached, embedded

from .harness import PATIENCE, Gate, definition, registry_of, statuses

ADD = {"a": {"handler": "add", "config": {"x": "{{ params.x | default(1) }}"}}}


async def add(config: dict[str, Any], ctx: Any) -> int:
    return int(config["x"]) + 1


class Flaky:
    """Fails until the test lets it succeed."""

    __name__ = "flaky"

    def __init__(self) -> None:
        self.broken = True
        self.calls: list[str] = []

    async def __call__(self, config: dict[str, Any], ctx: Any) -> str:
        self.calls.append(ctx.node_id)
        if self.broken:
            raise ValueError("broken")
        return f"epoch {ctx.epoch}"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "runs.db"


@asynccontextmanager
async def engine(db: Path, *handlers: Callable[..., Any], **fields: Any) -> AsyncIterator[Commands]:
    settings = Settings(db=db, db_sync="normal", **{"drain_seconds": 0, **fields})
    async with embedded(settings, registry_of(*handlers)) as commands:
        yield commands


@asynccontextmanager
async def shell(db: Path, **how: Any) -> AsyncIterator[Commands]:
    """Another process's view: nothing is driven there."""
    async with attached(Settings(db=db, db_sync="normal"), **how) as commands:
        yield commands


async def ended(commands: Commands, run_id: str) -> Any:
    return await asyncio.wait_for(commands.wait(run_id), PATIENCE)


class TestHistory:
    async def test_a_run_can_be_read_after_its_engine_closed(self, db: Path) -> None:
        async with engine(db, add) as commands:
            run_id = (await commands.trigger(definition(ADD), {"x": 4})).run_id
            before = await ended(commands, run_id)
        async with shell(db) as other:
            view = await other.get_run(run_id)
            assert (view["status"], view["result"]) == ("COMPLETED", {"a": 5})
            assert view["params"] == {"x": 4}
            run = await other.store.load(run_id)
            assert run.snapshot()["nodes"][0]["output"] == before.nodes[0].output
            assert (await other.results(run_id))["outputs"] == {"a": 5}
            assert await other.owner(run_id) == "none"
            assert await other.verify(run_id) == []

    async def test_runs_are_listed_newest_first_and_in_pages(self, db: Path) -> None:
        async with engine(db, add) as commands:
            ids = [(await commands.trigger(definition(ADD))).run_id for _ in range(5)]
            for run_id in ids:
                await ended(commands, run_id)
            seen: list[str] = []
            cursor = None
            while True:
                page = await commands.list_runs(RunQuery(limit=2, cursor=cursor))
                seen += [item["run_id"] for item in page["items"]]
                cursor = page["next_cursor"]
                if cursor is None:
                    break
            assert seen == ids[::-1]
            assert (await commands.list_runs(RunQuery(status="FAILED")))["items"] == []
            assert len((await commands.list_runs(RunQuery(workflow="test")))["items"]) == 5
            item = page["items"][0]
            assert "nodes" not in item
            assert item["result"] == {"a": 2}

    @pytest.mark.parametrize(
        "wanted", [{"status": "LOST"}, {"cursor": "x"}, {"cursor": "9" * 30}], ids=str
    )
    async def test_an_invalid_list_request_is_refused(self, db: Path, wanted: Any) -> None:
        async with shell(db) as commands:
            with pytest.raises(InvalidParams):
                await commands.list_runs(RunQuery(**wanted))

    async def test_a_run_is_found_by_its_id_prefix(self, db: Path) -> None:
        async with engine(db, add) as commands:
            ids = [(await commands.trigger(definition(ADD))).run_id for _ in range(40)]
            assert await commands.find_run(ids[3][:12]) == ids[3]
            assert await commands.find_run(ids[3]) == ids[3]
            for wrong in ("zzzzzz", "", "ab"):
                with pytest.raises(NotFound):
                    await commands.find_run(wrong)
            for call in (commands.get_run, commands.results, commands.verify, commands.owner):
                with pytest.raises(NotFound, match="nobody"):
                    await call("nobody")
                with pytest.raises(NotFound):
                    await call("\ud800")

    async def test_events_are_read_from_any_number(self, db: Path) -> None:
        async with engine(db, add) as commands:
            run_id = (await commands.trigger(definition(ADD))).run_id
            await ended(commands, run_id)
        async with shell(db) as other:
            events = await other.events(run_id)
            assert [event["seq"] for event in events] == list(range(1, 7))
            assert events[-1]["type"] == "run.completed"
            assert await other.events(run_id, after=4) == events[4:]
            for after in (99, 2**63, 10**30):
                assert await other.events(run_id, after=after) == []

    async def test_reading_creates_no_file(self, db: Path) -> None:
        async with shell(db) as commands:
            assert (await commands.list_runs())["items"] == []
        assert not db.parent.exists()


class TestContinuingRuns:
    async def test_an_unfinished_run_continues_in_another_engine(self, db: Path) -> None:
        gate = Gate()
        calls = Flaky()
        calls.broken = False
        nodes = {
            "a": "flaky",
            "b": {"handler": "gate", "after": ["a"]},
            "c": {"handler": "flaky", "after": ["b"]},
        }
        async with engine(db, gate, calls) as commands:
            run_id = (await commands.trigger(definition(nodes))).run_id
            await gate.entered.wait()
            assert await commands.owner(run_id) == "here"
        async with shell(db) as other:
            assert await other.owner(run_id) == "gone"
            run = await other.store.load(run_id)
            assert statuses(run) == {"a": "COMPLETED", "b": "QUEUED", "c": "PENDING"}
        gate.opened.set()
        async with engine(db, gate, calls) as commands:
            assert await commands.resume() == [run_id]
            run = await ended(commands, run_id)
            assert run.status is RunStatus.COMPLETED
            assert (run.node("b").attempt, run.node("b").crashes) == (2, 1)
            assert await commands.verify(run_id) == []
        assert calls.calls == ["a", "c"]

    async def test_repeated_hand_backs_fail_no_node(self, db: Path) -> None:
        gate = Gate()
        run_id = ""
        for attempt in range(5):
            async with engine(db, gate, max_crashes=2) as commands:
                if attempt:
                    await commands.resume(run_id)
                else:
                    run_id = (await commands.trigger(definition({"a": "gate"}))).run_id
                gate.entered.clear()
                async with asyncio.timeout(PATIENCE):
                    while not gate.inside:
                        await asyncio.sleep(0.001)
        async with shell(db) as other:
            assert statuses(await other.store.load(run_id)) == {"a": "QUEUED"}

    async def test_an_at_most_once_node_that_ran_is_not_restarted(self, db: Path) -> None:
        gate = Gate()
        nodes = {"a": {"handler": "gate", "delivery": "at_most_once"}}
        async with engine(db, gate) as commands:
            run_id = (await commands.trigger(definition(nodes))).run_id
            await gate.entered.wait()
        async with shell(db) as other:
            run = await other.store.load(run_id)
            assert (run.status, run.node("a").reason) == (RunStatus.FAILED, "worker_lost")

    async def test_running_nodes_may_finish_while_the_engine_closes(self, db: Path) -> None:
        gate = Gate()
        nodes = {"a": "gate", "b": {"handler": "gate", "after": ["a"]}}
        async with engine(db, gate, drain_seconds=PATIENCE) as commands:
            run_id = (await commands.trigger(definition(nodes))).run_id
            await gate.entered.wait()
            asyncio.get_running_loop().call_later(0.05, gate.opened.set)
        async with shell(db) as other:
            run = await other.store.load(run_id)
            assert statuses(run) == {"a": "COMPLETED", "b": "QUEUED"}
            assert run.node("a").attempt == 1

    async def test_a_run_with_an_owner_is_not_taken_over(self, db: Path) -> None:
        gate = Gate()
        async with engine(db, gate) as one, engine(db, gate) as other:
            run_id = (await one.trigger(definition({"a": "gate"}))).run_id
            await gate.entered.wait()
            assert await other.owner(run_id) == "elsewhere"
            assert await other.resume() == []
            with pytest.raises(Conflict, match="another process"):
                await other.resume(run_id)
            gate.opened.set()
            run = await ended(other, run_id)
            assert run.node("a").attempt == 1
            with pytest.raises(Conflict, match="nothing to resume"):
                await other.resume(run_id)

    async def test_a_run_with_unknown_handlers_is_left_to_other_processes(self, db: Path) -> None:
        gate = Gate()
        async with engine(db, gate) as commands:
            run_id = (await commands.trigger(definition({"a": "gate"}))).run_id
        async with engine(db) as commands:
            assert await commands.resume() == []
            with pytest.raises(Conflict, match="'gate'"):
                await commands.resume(run_id)

    async def test_a_node_that_backs_off_is_woken_by_the_next_owner(self, db: Path) -> None:
        flaky = Flaky()
        nodes = {"a": {"handler": "flaky", "max_retries": 1, "retry": {"base_delay_seconds": 0.2}}}
        async with engine(db, flaky) as commands:
            run_id = (await commands.trigger(definition(nodes))).run_id
            async with asyncio.timeout(PATIENCE):
                async for event in commands.store.watch(run_id):
                    if event.type == "node.retrying":
                        break
        flaky.broken = False
        async with engine(db, flaky) as commands:
            await commands.resume()
            run = await ended(commands, run_id)
        assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)


class TestOtherProcesses:
    async def test_a_cancel_from_another_process_stops_the_handler_immediately(
        self, db: Path
    ) -> None:
        gate = Gate()
        async with engine(db, gate, lease_seconds=60.0) as commands, shell(db) as other:
            nodes = {"a": "gate", "b": {"handler": "gate", "after": ["a"]}}
            run_id = (await commands.trigger(definition(nodes))).run_id
            await gate.entered.wait()
            run = await other.cancel(run_id)
            assert run.status is RunStatus.CANCELLED
            async with asyncio.timeout(PATIENCE):
                run = await commands.wait(run_id)
                while gate.inside:
                    await asyncio.sleep(0.001)
            assert statuses(run) == {"a": "CANCELLED", "b": "CANCELLED"}
            with pytest.raises(Conflict):
                await other.cancel(run_id)
            assert await commands.verify(run_id) == []

    async def test_a_retry_from_another_process_reaches_the_owner(self, db: Path) -> None:
        gate, flaky = Gate(), Flaky()
        async with (
            engine(db, gate, flaky, lease_seconds=60.0) as commands,
            shell(db) as other,
        ):
            run_id = (await commands.trigger(definition({"a": "gate", "b": "flaky"}))).run_id
            async with asyncio.timeout(PATIENCE):
                while (await other.get_run(run_id, nodes=False))["status"] != "FAILED":
                    await asyncio.sleep(0.01)
            assert await other.owner(run_id) == "elsewhere"  # a still runs
            flaky.broken = False
            run = await other.retry(run_id)
            assert run.epoch == 2
            async with asyncio.timeout(PATIENCE):
                while len(flaky.calls) < 2:
                    await asyncio.sleep(0.001)
            gate.opened.set()
            run = await ended(commands, run_id)
            assert run.status is RunStatus.COMPLETED
            assert (run.node("a").epoch, run.node("b").output) == (1, "epoch 2")
            assert await commands.verify(run_id) == []

    async def test_a_watcher_in_another_process_sees_every_event_once(self, db: Path) -> None:
        gate = Gate()
        async with engine(db, gate, add) as commands, shell(db) as other:
            nodes = {"g": "gate", **{f"n{i}": {**ADD["a"], "after": ["g"]} for i in range(50)}}
            run_id = (await commands.trigger(definition(nodes))).run_id

            async def watch() -> list[int]:
                return [event.seq async for event in other.store.watch(run_id)]

            watching = asyncio.create_task(watch())
            waiting = asyncio.create_task(other.store.wait(run_id))
            await gate.entered.wait()
            gate.opened.set()
            run = await ended(commands, run_id)
            seen = await asyncio.wait_for(watching, PATIENCE)
            assert seen == list(range(1, run.seq + 1))
            assert (await asyncio.wait_for(waiting, PATIENCE)).status is RunStatus.COMPLETED


class TestRetrying:
    async def test_an_engine_retries_a_failed_run_of_another_engine(self, db: Path) -> None:
        flaky = Flaky()
        nodes = {**ADD, "b": {"handler": "flaky", "after": ["a"]}}
        async with engine(db, add, flaky) as commands:
            run_id = (await commands.trigger(definition(nodes))).run_id
            assert (await ended(commands, run_id)).status is RunStatus.FAILED
        flaky.broken = False
        async with engine(db, add, flaky) as commands:
            plan = await commands.plan_retry(run_id)
            assert plan == {"rerun": ["b"], "reuse": ["a"]}
            assert (await commands.plan_retry(run_id, "a"))["rerun"] == ["a", "b"]
            run = await commands.retry(run_id)
            assert await commands.owner(run_id) == "here"
            run = await ended(commands, run_id)
            assert (run.status, run.epoch) == (RunStatus.COMPLETED, 2)
            assert run.node("a").epoch == 1
            with pytest.raises(Conflict):
                await commands.plan_retry(run_id)
            with pytest.raises(NotFound, match="ghost"):
                await commands.plan_retry(run_id, "ghost")

    async def test_a_run_is_not_reopened_if_its_handlers_are_unknown(self, db: Path) -> None:
        flaky = Flaky()
        async with engine(db, flaky) as commands:
            run_id = (await commands.trigger(definition({"a": "flaky"}))).run_id
            await ended(commands, run_id)
        async with engine(db) as commands:
            with pytest.raises(Conflict, match="'flaky'"):
                await commands.retry(run_id)
            assert (await commands.get_run(run_id))["epoch"] == 1

    async def test_a_process_without_workers_only_reopens_a_run_without_an_owner(
        self, db: Path
    ) -> None:
        flaky = Flaky()
        async with engine(db, flaky) as commands:
            run_id = (await commands.trigger(definition({"a": "flaky"}))).run_id
            await ended(commands, run_id)
        async with shell(db) as other:
            await other.retry(run_id)
            assert await other.owner(run_id) == "gone"
        flaky.broken = False
        async with engine(db, flaky) as commands:
            assert await commands.resume() == [run_id]
            assert (await ended(commands, run_id)).status is RunStatus.COMPLETED


class TestWorkflows:
    async def test_versions_grow_only_with_changes(self, db: Path) -> None:
        async with engine(db, add) as commands:
            first = definition(ADD)
            changed = definition(ADD, description="more")
            assert await commands.register(first) == ("test", 1, True)
            assert await commands.register(dict(reversed(first.items()))) == ("test", 1, False)
            assert await commands.register(changed) == ("test", 2, True)
            assert await commands.register(first) == ("test", 3, True)
            shown = await commands.workflow("test", 2)
            assert shown["definition"]["description"] == "more"
            assert [v["version"] for v in (await commands.versions("test"))["items"]] == [1, 2, 3]
            assert (await commands.workflows())["items"][0]["latest_version"] == 3
            with pytest.raises(InvalidDefinition):
                await commands.register({"name": "x", "nodes": []})

    async def test_a_list_has_the_last_runs_of_each_within_bounds(self, db: Path) -> None:
        async with engine(db, add) as commands:
            for number in range(MAX_WORKFLOWS_WITH_RUNS + 1):
                await commands.register({**definition(ADD), "name": f"w{number:03}"})
            made = [(await commands.trigger("w001")).run_id for _ in range(MAX_LAST_RUNS + 1)]
            for run_id in made:
                await ended(commands, run_id)
            page = await commands.workflows(limit=1000, runs=1000)
            assert len(page["items"]) == MAX_WORKFLOWS_WITH_RUNS
            assert page["next_cursor"] is not None
            first, second = page["items"][:2]
            assert first["runs"] == []
            assert [run["run_id"] for run in second["runs"]] == made[:0:-1]
            assert set(second["runs"][0]) == set(LAST_RUN_FIELDS)
            assert "runs" not in (await commands.workflows())["items"][0]

    async def test_a_search_by_name_leaves_no_workflow_out(self, db: Path) -> None:
        async with engine(db, add) as commands:
            names = [f"{kind}-{number:02}" for number in range(30) for kind in ("Ship", "pack")]
            for name in names:
                await commands.register({**definition(ADD), "name": name})
            found, cursor = [], None
            while True:
                page = await commands.workflows(q="sHIP-", limit=7, cursor=cursor)
                assert len(page["items"]) <= 7
                found += [one["name"] for one in page["items"]]
                cursor = page["next_cursor"]
                if cursor is None:
                    break
            assert found == sorted(name for name in names if name.startswith("Ship"))
            assert (await commands.workflows(q="none"))["items"] == []

    async def test_an_alias_names_a_version(self, db: Path) -> None:
        async with engine(db, add) as commands:
            await commands.register(definition(ADD))
            await commands.register(definition(ADD, description="2"))
            await commands.set_alias("test", "stable", 1)
            run_id = (await commands.trigger("test", version="stable")).run_id
            assert (await ended(commands, run_id)).version == 1
            assert (await commands.workflow("test"))["aliases"] == {"latest": 2, "stable": 1}
            assert (await commands.workflow("test", "2"))["version"] == 2
            with pytest.raises(Conflict):
                await commands.set_alias("test", "latest", 1)
            for wrong in ("", "7", "a b", "x" * 200):
                with pytest.raises(InvalidParams):
                    await commands.set_alias("test", wrong, 1)
            for version in (9, 10**30, "nope", "latests", "\ud800"):
                with pytest.raises(NotFound):
                    await commands.trigger("test", version=version)
            with pytest.raises(NotFound, match="ghost"):
                await commands.trigger("ghost")

    async def test_a_deleted_workflow_keeps_its_runs_and_its_version_numbers(
        self, db: Path
    ) -> None:
        gate = Gate()
        async with engine(db, gate) as commands:
            await commands.register(definition({"a": "gate"}))
            run_id = (await commands.trigger("test")).run_id
            with pytest.raises(Conflict, match="1 run"):
                await commands.delete_workflow("test")
            gate.opened.set()
            await ended(commands, run_id)
            await commands.delete_workflow("test")
            for call in (commands.workflow, commands.versions, commands.delete_workflow):
                with pytest.raises(NotFound):
                    await call("test")
            assert (await commands.get_run(run_id))["status"] == "COMPLETED"
            assert await commands.register(definition({"a": "gate"})) == ("test", 2, True)
            assert [v["version"] for v in (await commands.versions("test"))["items"]] == [2]


class TestIdempotency:
    async def test_a_repeated_key_gives_the_same_run(self, db: Path) -> None:
        async with engine(db, add) as commands:
            await commands.register(definition(ADD))
            first = await commands.trigger("test", {"x": 1}, idempotency_key="k")
            again = await commands.trigger("test", {"x": 1}, idempotency_key="k")
            assert (first.created, again.created) == (True, False)
            assert first.run_id == again.run_id
            with pytest.raises(Conflict, match="'k'"):
                await commands.trigger("test", {"x": 2}, idempotency_key="k")
            other = await commands.trigger(definition(ADD), {"x": 2}, idempotency_key="k")
            assert other.created, "a key belongs to one workflow"
            for wrong in ("", "x" * 300, "\ud800"):
                with pytest.raises(InvalidParams):
                    await commands.trigger("test", idempotency_key=wrong)
            given: Any = []
            with pytest.raises(InvalidParams):
                await commands.trigger("test", given)

    async def test_fifty_concurrent_requests_from_two_engines_create_one_run(
        self, db: Path
    ) -> None:
        async with engine(db, add) as one, engine(db, add) as other:
            await one.register(definition(ADD))
            triggers = [
                commands.trigger("test", idempotency_key="k")
                for _ in range(25)
                for commands in (one, other)
            ]
            accepted = await asyncio.gather(*triggers)
            assert len({run.run_id for run in accepted}) == 1
            assert sum(run.created for run in accepted) == 1
            assert len((await one.list_runs())["items"]) == 1


class TestBatches:
    async def test_a_batch_creates_all_its_runs_or_none(self, db: Path) -> None:
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        async with engine(db, add) as commands:
            await commands.register(definition(ADD, params=schema))
            with pytest.raises(InvalidParams, match=r"items\[1\]"):
                await commands.batch("test", [{"x": 1}, {"x": "no"}])
            with pytest.raises(InvalidParams):
                await commands.batch("test", [])
            assert (await commands.list_runs())["items"] == []
            made = await commands.batch("test", [{"x": i} for i in range(120)], idempotency_key="k")
            again = await commands.batch(
                "test", [{"x": i} for i in range(120)], idempotency_key="k"
            )
            assert made["batch_id"] == again["batch_id"]
            assert (made["created"], again["created"]) == (True, False)
            assert made["count"] == again["count"] == 120
            batch = await asyncio.wait_for(commands.wait_batch(made["batch_id"]), PATIENCE)
            assert batch["counts"] == {"COMPLETED": 120}
            assert [run["index"] for run in batch["runs"]] == list(range(100))
            rest = await commands.get_batch(made["batch_id"], cursor=batch["next_cursor"])
            assert [run["index"] for run in rest["runs"]] == list(range(100, 120))
            listed = await commands.list_runs(RunQuery(batch=made["batch_id"], limit=500))
            assert len(listed["items"]) == 120
            with pytest.raises(NotFound):
                await commands.get_batch("nobody")

    async def test_failed_runs_of_a_batch_are_retried(self, db: Path) -> None:
        flaky = Flaky()
        async with engine(db, flaky) as commands:
            made = await commands.batch(definition({"a": "flaky"}), [{}, {}])
            await asyncio.wait_for(commands.wait_batch(made["batch_id"]), PATIENCE)
            flaky.broken = False
            await commands.retry_batch(made["batch_id"])
            batch = await asyncio.wait_for(commands.wait_batch(made["batch_id"]), PATIENCE)
            assert batch["counts"] == {"COMPLETED": 2}

    async def test_an_item_of_an_open_batch_is_taken_once(self, db: Path) -> None:
        async with engine(db, add) as commands:
            checked = commands.validate(definition(ADD))
            opened = await commands.open_batch(checked, 2, idempotency_key="k")
            again = await commands.open_batch(checked, 2, idempotency_key="k")
            assert (opened["created"], again["created"]) == (True, False)
            batch_id = opened["batch_id"]
            assert again["batch_id"] == batch_id
            first = await commands.trigger(checked, place=(batch_id, 0))
            again = await commands.trigger(checked, place=(batch_id, 0))
            assert (again.run_id, again.created) == (first.run_id, False)
            assert (await commands.get_batch(batch_id))["finished_at"] is None
            await commands.trigger(checked, place=(batch_id, 1))
            batch = await asyncio.wait_for(commands.wait_batch(batch_id), PATIENCE)
            assert batch["finished_at"] is not None


class TestLimits:
    async def test_a_rate_limit_applies_in_every_engine(self, db: Path) -> None:
        configured = {"slow": RateLimit(rate_per_second=5, burst=2)}
        async with engine(db, add, rate_limits=configured) as one, engine(db, add) as other:
            assert (await one.rate_limit("slow"))["rate_per_second"] == 5
            assert await one.rate_limit("new") == {
                "tag": "new",
                "rate_per_second": 10.0,
                "burst": 1,
            }
            await one.set_rate_limit("new", 1000.0, 7)
            async with asyncio.timeout(PATIENCE):
                while (await other.rate_limit("new"))["burst"] != 7:
                    await asyncio.sleep(0.01)
            for rate, burst, *wrong in (
                (0.0, 1, "rate_per_second"),
                (-1.0, 1, "rate_per_second"),
                (float("nan"), 1, "rate_per_second"),
                (float("inf"), 1, "rate_per_second"),
                (1e-320, 1, "rate_per_second"),
                (1.0, 0, "burst"),
                (1.0, 2**70, "burst"),
                (0.0, 0, "rate_per_second", "burst"),
            ):
                with pytest.raises(InvalidParams) as refused:
                    await one.set_rate_limit("new", rate, burst)
                assert [problem.path for problem in refused.value.problems] == wrong
            for tag in ("", "x" * 201):
                with pytest.raises(InvalidParams, match="1 to 200 characters"):
                    await one.set_rate_limit(tag, 1.0, 1)
        async with shell(db) as later:
            assert [item["tag"] for item in (await later.rate_limits())["items"]] == ["new"]


class TestTheNodeCache:
    async def test_an_output_is_reused_by_a_later_engine(self, db: Path) -> None:
        flaky = Flaky()
        flaky.broken = False
        nodes = {"a": {"handler": "flaky", "cache": {"ttl_seconds": 60}}}
        for _ in range(2):
            async with engine(db, flaky) as commands:
                run_id = (await commands.trigger(definition(nodes))).run_id
                run = await ended(commands, run_id)
                assert run.node("a").output == "epoch 1"
                assert await commands.verify(run_id) == []
        assert flaky.calls == ["a"]
        assert run.node("a").attempt == 0


async def test_a_log_changed_from_outside_is_detected(db: Path) -> None:
    async with engine(db, add) as commands:
        run_id = (await commands.trigger(definition(ADD))).run_id
        await ended(commands, run_id)
        store: Any = commands.store
        store.reader.execute(
            "UPDATE journal SET entries = CAST("
            "replace(CAST(entries AS TEXT), 'node.completed', 'node.skipped') AS BLOB)"
        )
        (difference,) = await commands.verify(run_id)
        assert "the rules make it node.completed" in difference


async def test_the_doctor_finds_runs_without_an_owner(db: Path) -> None:
    gate = Gate()
    async with engine(db, gate) as commands:
        await commands.trigger(definition({"a": "gate"}))
        assert all(finding.ok for finding in await commands.records.doctor())
    async with shell(db) as other:
        (finding,) = [found for found in await other.records.doctor() if not found.ok]
        assert (finding.check, finding.fix) == ("drivers", "dovetail runs resume")


async def test_the_end_of_a_run_is_visible_only_after_it_is_in_the_file(db: Path) -> None:
    async with engine(db, add) as commands, shell(db) as other:
        for _ in range(20):
            run_id = (await commands.trigger(definition(ADD))).run_id
            while (await commands.get_run(run_id))["status"] != "COMPLETED":
                await asyncio.sleep(0)
            assert (await other.get_run(run_id))["status"] == "COMPLETED"
            assert (await commands.events(run_id))[-1]["type"] == "run.completed"
