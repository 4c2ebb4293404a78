"""What every keeper of records promises beside the state of runs; one suite over all of them.

A run is only accepted here, and ended by a cancel: nothing drives it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import Changed, Conflict, InvalidParams, NotFound
from dovetail.core.transitions import Cancel, Submit
from dovetail.engine.distributed.archiver import RunSnapshot
from dovetail.engine.ports import Author, KeyUsed, Records, RunQuery, WorkflowVersion
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.postgres.records import PostgresRecords
from dovetail.stores.records import stored_definition
from dovetail.stores.sqlite.records import SqliteRecords
from dovetail.stores.sqlite.store import SqliteStore

from ..servers.postgres_server import Databases

NOW = 1_700_000_000.25
BY = Author("tester", NOW)
Key = tuple[str, str, str]


class Keeper(Protocol):
    """Records, and the least that must happen to a run for them to show something."""

    records: Records

    async def accept(self, submit: Submit, now: float) -> object: ...
    async def accept_batch(
        self, batch_id: str, submits: list[Submit], key: Key | None, now: float
    ) -> object: ...
    async def cancel(self, submit: Submit, now: float) -> None: ...


class SqliteKeeper:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.records = SqliteRecords(store)
        self.accept = store.create
        self.accept_batch = store.create_batch

    async def cancel(self, submit: Submit, now: float) -> None:
        await self._store.apply([Cancel(submit.run_id)], now, durable=True)


class PostgresKeeper:
    def __init__(self, pool: PostgresPool) -> None:
        self.records = PostgresRecords(pool)
        self.accept = self.records.accept
        self.accept_batch = self.records.accept_batch
        self._archive = PostgresArchive(pool)

    async def cancel(self, submit: Submit, now: float) -> None:
        read = await self._archive.read(submit.run_id)
        assert read is not None
        meta = {**read.meta, "status": "CANCELLED", "epoch": "1", "finished_at": repr(now)}
        reported = [
            b'[%r,"run.created",1,null,null,null]' % NOW,
            b'[%r,"run.started",1,null,null,null]' % NOW,
        ]
        reported.append(b'[%r,"node.cancelled",1,0,0,{"reason":"run_cancelled"}]' % now)
        ended = b'[%r,"run.cancelled",1,null,null,null]' % now
        await self._archive.write(
            RunSnapshot(
                run_id=submit.run_id,
                generation=1,
                meta=meta,
                nodes={0: f"X|1|0|0|1|5|0|0|||||{now!r}|"},
                outputs={},
                ends={0: b'["run_cancelled",-1,""]'},
                first_seq=1,
                events=[*reported, ended],
                result=b'{"a":null}',
            )
        )


@asynccontextmanager
async def sqlite(request: pytest.FixtureRequest) -> AsyncIterator[Keeper]:
    folder: Path = request.getfixturevalue("tmp_path")
    async with SqliteStore(folder / "runs.db", sync="normal", drives=False) as store:
        yield SqliteKeeper(store)


@asynccontextmanager
async def postgres(request: pytest.FixtureRequest) -> AsyncIterator[Keeper]:
    server: Databases = request.getfixturevalue("postgres_server")
    url = server.new_database()
    async with PostgresPool(url) as pool:
        yield PostgresKeeper(pool)
    server.drop_database(url)


KEEPERS = {"sqlite": sqlite, "postgres": postgres}


@pytest.fixture(params=KEEPERS)
async def keeper(request: pytest.FixtureRequest) -> AsyncIterator[Keeper]:
    async with KEEPERS[request.param](request) as opened:
        yield opened


def workflow(name: str = "test", **fields: Any) -> Workflow:
    nodes = [{"id": "a", "handler": "input"}]
    return Workflow.model_validate({"name": name, "nodes": nodes, **fields})


def graph(name: str = "test", **fields: Any) -> Graph:
    return build_graph(workflow(name, **fields), {})


def submit(
    of: Graph | None = None, params: Any = None, *, version: int | None = None, **more: Any
) -> Submit:
    return Submit(os.urandom(16).hex(), of or graph(), params or {}, version, **more)


async def register(records: Records, name: str = "test", **fields: Any) -> Any:
    return await records.register(name, *stored_definition(workflow(name, **fields)), BY)


def test_a_definition_without_a_newer_field_keeps_its_digest() -> None:
    given = {"name": "w", "nodes": [{"id": "a", "handler": "input"}]}
    digest, _ = stored_definition(Workflow.model_validate(given))
    assert digest == "2f34046fa80417343e307526974c3f34f871476d45a28a9c697b94015ca567ef"
    given["nodes"][0]["allow_failure"] = True  # type: ignore[index]
    assert stored_definition(Workflow.model_validate(given))[0] != digest


async def test_a_receipt_reads_no_result(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(keeper.records)
    summary, asked = kind.summary, []

    async def noted(self: Any, run_id: str, most: int | None = None) -> dict[str, Any]:
        asked.append(most)
        found: dict[str, Any] = await summary(self, run_id, most)
        return found

    monkeypatch.setattr(kind, "summary", noted)
    one = submit(version=3)
    await keeper.accept(one, NOW)
    assert (await keeper.records.receipt(one.run_id))["version"] == 3
    assert asked == [0]


class TestWorkflows:
    async def test_versions_grow_only_with_changes(self, keeper: Keeper) -> None:
        records = keeper.records
        assert await register(records) == ("test", 1, True)
        assert await register(records) == ("test", 1, False)
        assert await register(records, description="more") == ("test", 2, True)
        assert await register(records) == ("test", 3, True)
        shown = await records.workflow("test", 2)
        assert shown["definition"]["description"] == "more"
        assert shown == {
            "name": "test",
            "version": 2,
            "definition": shown["definition"],
            "aliases": {"latest": 3},
            "created_at": "2023-11-14T22:13:20.250000Z",
        }
        versions = (await records.versions("test"))["items"]
        assert [v["version"] for v in versions] == [1, 2, 3]
        assert versions[0]["sha256"] == versions[2]["sha256"] != versions[1]["sha256"]
        first, last = await records.registered("test", 1), await records.registered("test")
        assert first.definition == last.definition
        assert first.content == last.content

    async def test_concurrent_registrations_get_different_version_numbers(
        self, keeper: Keeper
    ) -> None:
        made = await asyncio.gather(
            *(register(keeper.records, description=str(i)) for i in range(20)),
            *(register(keeper.records, "other") for _ in range(20)),
        )
        assert sorted(one.version for one in made[:20]) == list(range(1, 21))
        assert [one.version for one in made[20:]] == [1] * 20
        assert sum(one.created for one in made[20:]) == 1

    async def test_workflows_are_listed_by_name_and_in_pages(self, keeper: Keeper) -> None:
        for name in ("b", "a-b", "B", "a", "0"):
            await register(keeper.records, name)
        await keeper.records.set_alias("a", "stable", 1, BY)
        seen: list[str] = []
        cursor = None
        while True:
            page = await keeper.records.workflows(limit=2, cursor=cursor)
            seen += [item["name"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == ["0", "B", "a", "a-b", "b"]
        page = await keeper.records.workflows(cursor="B", limit=1)
        assert page["items"][0]["aliases"] == {"latest": 1, "stable": 1}
        assert page["items"][0]["latest_version"] == 1
        assert page["items"][0]["updated_at"] == "2023-11-14T22:13:20.250000Z"

    async def test_an_alias_names_a_version(self, keeper: Keeper) -> None:
        records = keeper.records
        await register(records)
        await register(records, description="2")
        named = {"name": "test", "alias": "stable", "version": 1}
        assert await records.set_alias("test", "stable", 1, BY) == named
        assert await records.target_of("test", "stable") == 1
        await records.set_alias("test", "stable", 2, BY)
        assert await records.target_of("test", "stable") == 2
        assert await records.target_of("test", "latest") == 2
        assert await records.target_of("test", "1") == 1
        with pytest.raises(Conflict, match="latest"):
            await records.set_alias("test", "latest", 1, BY)
        with pytest.raises(NotFound, match="it has: 1, 2"):
            await records.set_alias("test", "next", 3, BY)
        # No reply of a store may be mistaken for "set" or for "changed meanwhile".
        for number in (0, -1, 2**53 + 1, 2**63, -(2**63)):
            with pytest.raises(NotFound, match=f"version {number}"):
                await records.set_alias("test", "next", number, BY)

    @pytest.mark.parametrize("version", [9, 10**30, -1, "nope", "9" * 40, "\ud800", "\0", ""])
    async def test_an_unknown_version_is_not_found(self, keeper: Keeper, version: Any) -> None:
        await register(keeper.records)
        with pytest.raises(NotFound, match="test"):
            await keeper.records.registered("test", version)

    async def test_a_workflow_changed_by_another_caller_is_not_overwritten(
        self, keeper: Keeper
    ) -> None:
        records = keeper.records

        async def change(seen: dict[str, int], **fields: Any) -> WorkflowVersion:
            kept = stored_definition(workflow("test", **fields))
            return await records.register("test", *kept, BY, seen)

        with pytest.raises(Changed):
            await change({"latest": 1})
        assert await change({}) == ("test", 1, True)
        with pytest.raises(Changed, match="read it again"):
            await change({}, description="2")
        assert await change({}) == ("test", 1, False)  # all is as it was asked for
        assert await change({"latest": 1}, description="2") == ("test", 2, True)
        for seen in ({}, {"latest": 1}, {"latest": 2, "stable": 1}):
            with pytest.raises(Changed):
                await records.set_alias("test", "stable", 1, BY, seen)
            with pytest.raises(Changed):
                await records.delete_workflow("test", BY, seen)
        await records.set_alias("test", "stable", 1, BY, {"latest": 2})
        await records.set_alias("test", "stable", 1, BY, {"latest": 2})  # said twice
        await records.set_alias("test", "a", 2, BY, {"stable": 1, "latest": 2})
        with pytest.raises(Changed):
            await change({"latest": 2}, description="3")
        await records.delete_workflow("test", BY, {"latest": 2, "a": 2, "stable": 1})
        with pytest.raises(Changed):
            await change({"latest": 2})
        assert await change({}) == ("test", 3, True)

    async def test_a_deleted_workflow_keeps_its_runs_and_its_version_numbers(
        self, keeper: Keeper
    ) -> None:
        records = keeper.records
        await register(records)
        run, free = submit(version=1), submit()
        await keeper.accept(run, NOW)
        await keeper.accept(free, NOW)  # of a definition that only has the same name
        with pytest.raises(Conflict, match="1 run not finished"):
            await records.delete_workflow("test", BY)
        await keeper.cancel(run, NOW + 1)
        await records.set_alias("test", "stable", 1, BY)
        await records.delete_workflow("test", BY)
        for gone in (
            records.workflow("test"),
            records.versions("test"),
            records.delete_workflow("test", BY),
        ):
            with pytest.raises(NotFound, match="no workflow 'test'"):
                await gone
        assert (await records.workflows())["items"] == []
        assert (await records.summary(run.run_id))["version"] == 1
        assert await register(records) == ("test", 2, True)
        assert [v["version"] for v in (await records.versions("test"))["items"]] == [2]
        assert (await records.workflow("test"))["aliases"] == {"latest": 2}


class TestWeightedAliases:
    async def test_an_alias_with_weights_is_shown_as_it_was_set(self, keeper: Keeper) -> None:
        records = keeper.records
        for text in "123":
            await register(records, description=text)
        weights = {"1": 90, "3": 0.5}
        named = {"name": "test", "alias": "prod", "weights": weights}
        assert await records.set_alias("test", "prod", weights, BY) == named
        aliases = {"prod": weights, "latest": 3}
        assert (await records.workflow("test"))["aliases"] == aliases
        assert (await records.workflows())["items"][0]["aliases"] == aliases
        assert await records.target_of("test", "prod") == weights
        assert (await records.workflow("test", "prod"))["version"] == 1
        await records.set_alias("test", "prod", 2, BY)
        assert await records.target_of("test", "prod") == 2

    async def test_all_versions_of_weights_must_be_there(self, keeper: Keeper) -> None:
        await register(keeper.records)
        with pytest.raises(NotFound, match="no version 7; it has: 1"):
            await keeper.records.set_alias("test", "prod", {"1": 90, "7": 10}, BY)
        assert (await keeper.records.workflow("test"))["aliases"] == {"latest": 1}

    async def test_weights_changed_by_another_caller_are_not_overwritten(
        self, keeper: Keeper
    ) -> None:
        records = keeper.records
        await register(records)
        await register(records, description="2")
        await records.set_alias("test", "prod", {"1": 90, "2": 10}, BY)
        with pytest.raises(Changed):
            await records.set_alias("test", "prod", 2, BY, {"latest": 2, "prod": {"1": 90, "2": 9}})
        seen = {"latest": 2, "prod": {"1": 90, "2": 10}}
        await records.set_alias("test", "prod", {"1": 50, "2": 50}, BY, seen)
        assert await records.target_of("test", "prod") == {"1": 50, "2": 50}

    async def test_a_batch_may_have_runs_of_several_versions(self, keeper: Keeper) -> None:
        graphs = [graph(description="1"), graph(description="2")]
        runs = [submit(graphs[n % 2], {"n": n}, version=1 + n % 2) for n in range(5)]
        batch_id = os.urandom(16).hex()
        await keeper.accept_batch(batch_id, runs, None, NOW)
        shown = (await keeper.records.list_runs(RunQuery(batch=batch_id)))["items"]
        assert {(one["params"]["n"], one["version"]) for one in shown} == {
            (n, 1 + n % 2) for n in range(5)
        }
        listed = (await keeper.records.get_batch(batch_id))["runs"]
        assert [one["run_id"] for one in listed] == [run.run_id for run in runs]


class TestDeletedVersions:
    async def test_a_version_that_nothing_uses_is_deleted(self, keeper: Keeper) -> None:
        records = keeper.records
        await register(records)
        await register(records, description="2")
        run = submit(version=1)
        await keeper.accept(run, NOW)
        await keeper.cancel(run, NOW + 1)
        assert await records.delete_version("test", 1, BY) == 1
        assert [v["version"] for v in (await records.versions("test"))["items"]] == [2]
        with pytest.raises(NotFound, match="no version 1; it has: 2"):
            await records.target_of("test", 1)
        with pytest.raises(NotFound, match="no version 1"):
            await records.delete_version("test", "1", BY)
        assert (await records.summary(run.run_id))["version"] == 1
        assert await register(records) == ("test", 3, True)

    async def test_a_version_that_an_alias_names_stays(self, keeper: Keeper) -> None:
        records = keeper.records
        for text in "123":
            await register(records, description=text)
        await records.set_alias("test", "old", 1, BY)
        await records.set_alias("test", "prod", {"1": 1, "2": 1}, BY)
        with pytest.raises(Conflict, match="is its latest"):
            await records.delete_version("test", 3, BY)
        with pytest.raises(Conflict, match="has the alias 'old', 'prod'"):
            await records.delete_version("test", 1, BY)
        with pytest.raises(Conflict, match="has the alias 'prod'"):
            await records.delete_version("test", 2, BY)
        with pytest.raises(Conflict, match="is its latest"):
            await records.delete_version("test", "latest", BY)
        await records.delete_alias("test", "prod", BY)
        await records.delete_version("test", 2, BY)

    async def test_a_version_with_an_unfinished_run_stays(self, keeper: Keeper) -> None:
        records = keeper.records
        await register(records)
        await register(records, description="2")
        run = submit(version=1)
        await keeper.accept(run, NOW)
        await keeper.accept(submit(version=2), NOW)
        with pytest.raises(Conflict, match="version 1 of 'test' has 1 run not finished"):
            await records.delete_version("test", 1, BY)
        await keeper.cancel(run, NOW + 1)
        await records.delete_version("test", 1, BY)

    async def test_a_version_of_a_workflow_that_has_changed_stays(self, keeper: Keeper) -> None:
        await register(keeper.records)
        await register(keeper.records, description="2")
        with pytest.raises(Changed):
            await keeper.records.delete_version("test", 1, BY, {"latest": 1})
        await keeper.records.delete_version("test", 1, BY, {"latest": 2})


class TestHistory:
    async def test_every_change_is_kept_with_its_time_and_actor(self, keeper: Keeper) -> None:
        records = keeper.records
        ann = Author("ann", NOW + 1)
        await register(records)
        await register(records, description="2")
        await records.set_alias("test", "prod", 1, ann)
        await records.set_alias("test", "prod", {"1": 90, "2": 10}, ann)
        await records.delete_alias("test", "prod", ann)
        await records.delete_version("test", 1, ann)
        await register(records, description="3")
        await records.set_alias("test", "b", 2, ann)
        await records.delete_workflow("test", ann)
        page = await records.history("workflow", "test")
        assert page["next_cursor"] is None
        items = page["items"][::-1]
        assert [(one["action"], one["actor"]) for one in items] == [
            *[("register", "tester")] * 2,
            *[("alias", "ann")] * 2,
            *[("delete", "ann")] * 2,
            ("register", "tester"),
            ("alias", "ann"),
            ("delete", "ann"),
        ]
        assert items[0]["time"] == "2023-11-14T22:13:20.250000Z"
        assert items[2]["time"] == "2023-11-14T22:13:21.250000Z"
        details = [one["details"] for one in items]
        assert details[1]["version"] == 2
        assert len(details[1]["sha256"]) == 64
        assert details[2:6] == [
            {"alias": "prod", "version": 1, "from": None},
            {"alias": "prod", "weights": {"1": 90, "2": 10}, "from": 1},
            {"alias": "prod", "from": {"1": 90, "2": 10}},
            {"version": 1},
        ]
        assert details[8] == {"versions": [2, 3], "aliases": {"b": 2, "latest": 3}}

    async def test_what_changes_nothing_is_not_in_the_history(self, keeper: Keeper) -> None:
        records = keeper.records
        for _ in range(3):
            await register(records)
            await records.set_alias("test", "prod", 1, BY)
        with pytest.raises(NotFound):
            await records.set_alias("test", "prod", 9, BY)
        with pytest.raises(NotFound):
            await records.delete_alias("test", "none", BY)
        with pytest.raises(Conflict):
            await records.delete_version("test", 1, BY)
        with pytest.raises(Changed):
            await records.delete_workflow("test", BY, {"latest": 5})
        items = (await records.history("workflow", "test"))["items"]
        assert [one["action"] for one in items] == ["alias", "register"]

    async def test_a_history_is_read_in_pages(self, keeper: Keeper) -> None:
        records = keeper.records
        for number in range(5):
            await register(records, description=str(number))
        await register(records, "other")
        seen: list[int] = []
        cursor = None
        while True:
            page = await records.history("workflow", "test", limit=2, cursor=cursor)
            seen += [one["details"]["version"] for one in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == [5, 4, 3, 2, 1]
        with pytest.raises(InvalidParams, match="no cursor"):
            await records.history("workflow", "test", cursor="x")

    async def test_only_a_name_that_was_registered_has_a_history(self, keeper: Keeper) -> None:
        for name in ("test", "\ud800", "\0"):
            with pytest.raises(NotFound, match="no workflow"):
                await keeper.records.history("workflow", name)

    async def test_the_history_of_a_limit_has_its_changes(self, keeper: Keeper) -> None:
        records = keeper.records
        assert (await records.history("limit", "slow\0é"))["items"] == []
        for rate, burst in ((0.5, 3), (0.5, 3), (2.0, 1)):
            await records.set_limit("slow\0é", rate, burst, BY)
        page = await records.history("limit", "slow\0é", limit=1)
        assert page["items"] == [
            {
                "time": "2023-11-14T22:13:20.250000Z",
                "actor": "tester",
                "action": "limit",
                "details": {
                    "rate_per_second": 2.0,
                    "burst": 1,
                    "from": {"rate_per_second": 0.5, "burst": 3},
                },
            }
        ]
        (first,) = (await records.history("limit", "slow\0é", cursor=page["next_cursor"]))["items"]
        assert first["details"] == {"rate_per_second": 0.5, "burst": 3, "from": None}

    async def test_concurrent_changes_are_all_in_the_history(self, keeper: Keeper) -> None:
        records = keeper.records
        await register(records)
        await register(records, description="2")
        await asyncio.gather(
            *(records.set_alias("test", f"a{n}", 1 + n % 2, BY) for n in range(20))
        )
        items = (await records.history("workflow", "test"))["items"]
        assert {one["details"].get("alias") for one in items} == {None} | {
            f"a{n}" for n in range(20)
        }
        assert len(items) == 22


class TestRuns:
    async def test_an_accepted_run_shows_its_request(self, keeper: Keeper) -> None:
        params = {"text": "a\0b \U0001f600", "big": 2**63 + 1, "small": 1e-300, "none": None}
        run = submit(params=params, version=3)
        await keeper.accept(run, NOW)
        shown = await keeper.records.summary(run.run_id)
        assert shown["params"] == params
        assert (shown["workflow"], shown["version"], shown["epoch"]) == ("test", 3, 1)
        assert shown["status"] in ("PENDING", "RUNNING")
        assert shown["created_at"] == "2023-11-14T22:13:20.250000Z"
        assert (shown["finished_at"], shown["error"], shown["result"]) == (None, None, None)

    async def test_accepting_a_run_again_changes_nothing(self, keeper: Keeper) -> None:
        run = submit(params={"x": 1})
        await keeper.accept(run, NOW)
        await keeper.accept(run._replace(params={"x": 2}), NOW + 5)
        assert (await keeper.records.summary(run.run_id))["params"] == {"x": 1}
        assert len((await keeper.records.list_runs())["items"]) == 1

    async def test_runs_are_listed_newest_first_and_in_pages(self, keeper: Keeper) -> None:
        runs = [submit(graph("even" if i % 2 == 0 else "odd")) for i in range(5)]
        for i, run in enumerate(runs):
            await keeper.accept(run, NOW + i)
        await keeper.cancel(runs[1], NOW + 10)
        records = keeper.records
        seen: list[str] = []
        cursor = None
        while True:
            page = await records.list_runs(RunQuery(limit=2, cursor=cursor))
            seen += [item["run_id"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == [run.run_id for run in runs[::-1]]

        async def listed(**wanted: Any) -> list[str]:
            return [
                item["run_id"] for item in (await records.list_runs(RunQuery(**wanted)))["items"]
            ]

        assert await listed(status="CANCELLED") == [runs[1].run_id]
        assert await listed(status="CANCELLED", workflow="even") == []
        assert await listed(workflow="odd") == [runs[3].run_id, runs[1].run_id]
        assert await listed(workflow="\ud800") == await listed(workflow="\0") == []
        (ended,) = (await records.list_runs(RunQuery(status="CANCELLED")))["items"]
        assert ended["finished_at"] == "2023-11-14T22:13:30.250000Z"
        assert ended["duration"] is not None
        assert ended["result"] == {"a": None}

    async def test_runs_are_counted_by_status_and_by_the_hour_of_their_creation(
        self, keeper: Keeper
    ) -> None:
        runs = [submit(graph("even" if i % 2 == 0 else "odd")) for i in range(6)]
        for hour, run in zip((0, 0, 1, 1, 1, 3), runs, strict=True):
            await keeper.accept(run, NOW + 3600 * hour)
        await keeper.cancel(runs[2], NOW + 10_000)
        count = keeper.records.count_runs
        edges = [NOW + 3600 * hour - 1 for hour in range(5)]

        def hours(created: list[dict[str, int]]) -> list[int]:
            return [sum(one.values()) for one in created]

        every = await count(None, edges)
        assert every.by_status["CANCELLED"] == 1
        assert sum(every.by_status.values()) == 6
        assert hours(every.created) == [2, 3, 0, 1]
        assert [one.get("CANCELLED", 0) for one in every.created] == [0, 1, 0, 0]
        odd = await count("odd", edges)
        assert sum(odd.by_status.values()) == 3
        assert hours(odd.created) == [1, 1, 0, 1]
        assert hours((await count(None, edges[1:3])).created) == [3]
        for nothing in ("unknown", "\ud800", "\0"):
            none = await count(nothing, edges)
            assert sum(none.by_status.values()) == 0
            assert hours(none.created) == [0] * 4

    async def test_no_runs_are_counted_where_there_are_none(self, keeper: Keeper) -> None:
        none = await keeper.records.count_runs(None, [NOW, NOW + 1])
        assert sum(none.by_status.values()) == 0
        assert [sum(one.values()) for one in none.created] == [0]

    @pytest.mark.parametrize("cursor", ["x", "-1", "9" * 30, "", "\0", "٣"])
    async def test_an_invalid_cursor_is_refused(self, keeper: Keeper, cursor: str) -> None:
        with pytest.raises(InvalidParams, match="is no cursor"):
            await keeper.records.list_runs(RunQuery(cursor=cursor))

    async def test_a_run_is_found_by_its_id_prefix(self, keeper: Keeper) -> None:
        runs = [
            Submit(run_id, graph(), {}) for run_id in ("abcd12", "abcd1234", "abcdff", "zz99aa")
        ]
        for run in runs:
            await keeper.accept(run, NOW)
        records = keeper.records
        assert await records.find_run("zz99") == "zz99aa"
        assert await records.find_run("abcd12") == "abcd12"
        assert await records.find_run("abcd123") == "abcd1234"
        with pytest.raises(Conflict, match="abcd12, abcd1234, abcdff"):
            await records.find_run("abcd")
        with pytest.raises(NotFound, match="too short"):
            await records.find_run("zz9")
        for wrong in ("", "yyyy", "zz99aab", "\ud800" * 4, "abcd\0"):
            with pytest.raises(NotFound):
                await records.find_run(wrong)

    async def test_events_are_read_from_any_number(self, keeper: Keeper) -> None:
        run = submit()
        await keeper.accept(run, NOW)
        await keeper.cancel(run, NOW + 2)
        events = await keeper.records.events(run.run_id)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert events[-1] == {
            "seq": len(events),
            "time": "2023-11-14T22:13:22.250000Z",
            "type": "run.cancelled",
            "epoch": 1,
        }
        cancelled = events[-2]
        assert (cancelled["type"], cancelled["node"]) == ("node.cancelled", "a")
        assert cancelled["reason"] == "run_cancelled"
        assert await keeper.records.events(run.run_id, after=2) == events[2:]
        assert await keeper.records.events(run.run_id, after=99) == []

    @pytest.mark.parametrize("run_id", ["nobody", "", "\0", "\ud800"])
    async def test_an_unknown_run_is_not_found(self, keeper: Keeper, run_id: str) -> None:
        for call in (keeper.records.summary, keeper.records.events, keeper.records.entries):
            with pytest.raises(NotFound):
                await call(run_id)


class TestKeys:
    async def test_one_key_creates_one_run(self, keeper: Keeper) -> None:
        first = submit(key=("run of test", "k\0é", "body"))
        await keeper.accept(first, NOW)
        with pytest.raises(KeyUsed) as known:
            await keeper.accept(submit(key=("run of test", "k\0é", "body")), NOW)
        assert (known.value.made, known.value.same_body) == (first.run_id, True)
        with pytest.raises(KeyUsed) as known:
            await keeper.accept(submit(key=("run of test", "k\0é", "other")), NOW)
        assert (known.value.made, known.value.same_body) == (first.run_id, False)
        await keeper.accept(submit(key=("run of other", "k\0é", "body")), NOW)
        assert len((await keeper.records.list_runs())["items"]) == 2

    async def test_fifty_concurrent_requests_create_one_run(self, keeper: Keeper) -> None:
        runs = [submit(key=("run", "k", "body")) for _ in range(50)]
        made = await asyncio.gather(
            *(keeper.accept(run, NOW) for run in runs), return_exceptions=True
        )
        refused = [known for known in made if isinstance(known, KeyUsed)]
        assert len(refused) == 49
        (listed,) = (await keeper.records.list_runs())["items"]
        assert {known.made for known in refused} == {listed["run_id"]}


class TestBatches:
    async def test_a_batch_contains_all_its_runs(self, keeper: Keeper) -> None:
        runs = [submit(params={"x": i}) for i in range(120)]
        await keeper.accept_batch("batch", runs, ("batch", "k", "body"), NOW)
        with pytest.raises(KeyUsed) as known:
            await keeper.accept_batch("again", [submit()], ("batch", "k", "body"), NOW)
        assert (known.value.made, known.value.same_body) == ("batch", True)
        records = keeper.records
        batch = await records.get_batch("batch")
        assert (batch["workflow"], batch["count"]) == ("test", 120)
        assert sum(batch["counts"].values()) == 120
        assert batch["finished_at"] is None
        assert [run["run_id"] for run in batch["runs"]] == [run.run_id for run in runs[:100]]
        rest = await records.get_batch("batch", cursor=batch["next_cursor"], counts=False)
        assert [run["index"] for run in rest["runs"]] == list(range(100, 120))
        assert (rest["next_cursor"], rest["counts"]) == (None, {})
        listed = await records.list_runs(RunQuery(batch="batch", limit=500))
        assert [item["params"]["x"] for item in listed["items"]] == list(range(119, -1, -1))
        for wrong in ("again", "", "\0", "\ud800"):
            with pytest.raises(NotFound, match="no batch"):
                await records.get_batch(wrong)
            with pytest.raises(NotFound, match="no batch"):
                await records.list_runs(RunQuery(batch=wrong))
        with pytest.raises(InvalidParams):
            await records.get_batch("batch", cursor="x")

    async def test_a_batch_is_finished_when_all_its_runs_are(self, keeper: Keeper) -> None:
        runs = [submit(), submit()]
        await keeper.accept_batch("batch", runs, None, NOW)
        await keeper.cancel(runs[1], NOW + 3)
        assert (await keeper.records.get_batch("batch"))["finished_at"] is None
        await keeper.cancel(runs[0], NOW + 2)
        batch = await keeper.records.get_batch("batch")
        assert batch["counts"] == {"CANCELLED": 2}
        assert batch["finished_at"] == "2023-11-14T22:13:23.250000Z"

    async def test_an_item_of_an_open_batch_is_taken_once(self, keeper: Keeper) -> None:
        records = keeper.records
        await records.open_batch("batch", "test", 2, ("batch", "k", "b"), NOW)
        with pytest.raises(KeyUsed) as known:
            await records.open_batch("other", "test", 2, ("batch", "k", "c"), NOW)
        assert (known.value.made, known.value.same_body) == ("batch", False)
        number = await records.batch_number("batch")
        first = submit(place=(number, 1))
        await keeper.accept(first, NOW)
        await keeper.accept(first, NOW)
        with pytest.raises(KeyUsed) as known:
            await keeper.accept(submit(place=(number, 1), key=("run", "k", "b")), NOW)
        assert (known.value.made, known.value.same_body) == (first.run_id, True)
        await keeper.accept(submit(key=("run", "k", "b")), NOW)  # the key was not used up
        batch = await records.get_batch("batch")
        assert [run["index"] for run in batch["runs"]] == [1]
        with pytest.raises(NotFound):
            await records.batch_number("nobody")


class TestLimits:
    async def test_a_limit_is_the_last_that_was_set(self, keeper: Keeper) -> None:
        records = keeper.records
        assert await records.limits() == {}
        await records.set_limit("slow\0é", 0.5, 3, BY)
        await records.set_limit("fast", 1e9, 10**9, BY)
        await records.set_limit("slow\0é", 1 / 3, 1, BY)
        assert await records.limits() == {"fast": (1e9, 10**9), "slow\0é": (1 / 3, 1)}
