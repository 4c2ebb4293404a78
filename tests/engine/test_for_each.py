"""Mapped nodes on the embedded engine: rendered, windowed, retried, cached, forked, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dovetail import Dovetail, Run
from dovetail.config import Settings
from dovetail.core.errors import InvalidParams, NotFound
from dovetail.engine.queues import read_queues
from dovetail.handlers.registry import handler
from dovetail.stores.sqlite import store as sqlite_store
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.wiring.embedded import attached

calls: Counter[Any] = Counter()
"""How often each item was started, by its value."""
failing: set[Any] = set()
gate = asyncio.Event()


@handler("numbers")
async def numbers(config: dict[str, Any], ctx: Any) -> Any:
    return config["value"]


@handler("square")
async def square(config: dict[str, Any], ctx: Any) -> Any:
    calls[ctx.item] += 1
    ctx.log.info("item %s", ctx.index)
    if ctx.item in failing:
        raise ValueError(f"{ctx.item} is broken")
    return {"of": config["x"], "square": config["x"] ** 2, "key": ctx.idempotency_key}


@handler("sees")
async def sees(config: dict[str, Any], ctx: Any) -> str:
    return f"saw {config['reads']} {getattr(ctx, config['reads'])}"


@handler("long")
async def long(config: dict[str, Any], ctx: Any) -> str:
    return "x" * int(config["characters"])


@handler("waits")
async def waits(config: dict[str, Any], ctx: Any) -> Any:
    calls["now"] += 1
    calls["most"] = max(calls["most"], calls["now"])
    await (gate.wait() if config.get("gate") else asyncio.sleep(0.005))
    calls["now"] -= 1
    return ctx.index


def flow(value: Any = 5, **each: Any) -> dict[str, Any]:
    """`value` is the list, or how many numbers are in it."""
    fields = {"handler": "square", "config": {"x": "{{ item }}"}, **each}
    fields.setdefault("for_each", "{{ start }}")
    listed = list(range(value)) if isinstance(value, int) else value
    return {
        "name": "squares",
        "nodes": [
            {"id": "start", "handler": "numbers", "config": {"value": listed}},
            {"id": "each", "dependencies": ["start"], **fields},
            {
                "id": "end",
                "handler": "output",
                "dependencies": ["each"],
                "config": {"all": "{{ each }}"},
            },
        ],
    }


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global gate
    calls.clear()
    failing.clear()
    gate = asyncio.Event()  # one that was waited for belongs to the loop of its test


@asynccontextmanager
async def client(path: Path, **settings: Any) -> AsyncIterator[Dovetail]:
    handlers = [long, numbers, square, waits, sees]
    async with Dovetail(str(path / "runs.db"), handlers=handlers, **settings) as dt:
        yield dt


def each(run: Run) -> Any:
    return run.nodes["each"]


async def test_the_output_is_in_the_order_of_the_items(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        run = await dt.run(flow(4))
        assert [one["square"] for one in run.result["all"]] == [0, 1, 4, 9]
        keys = [one["key"] for one in run.result["all"]]
        assert keys == [f"{run.run_id}:each[{i}]:1" for i in range(4)]
        node = each(run)
        assert (node.attempt, node.worker) == (1, None)
        done = {"pending": 0, "running": 0, "completed": 4, "failed": 0, "cancelled": 0}
        assert node.items == {"total": 4, **done}
        assert run.nodes["end"].items is None
        assert await dt._commands.verify(run.run_id) == []


async def test_events_and_lines_of_items_have_their_number(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        run = await dt.run(flow(2))
        events = [event.to_dict() async for event in dt.events(run.run_id)]
        of_items = [event for event in events if "item" in event]
        assert {event["node"] for event in of_items} == {"each"}
        first = [event["type"] for event in of_items if event["item"] == 0]
        assert first == ["node.queued", "node.started", "node.completed"]
        lines = [line async for line in dt.logs(run.run_id, node="each")]
        assert {line.fields for line in lines} == {None}, "a line has its number already"
        assert [(line.node, line.item, line.message) for line in lines] == [
            ("each", 0, "item 0"),
            ("each", 1, "item 1"),
        ]
        of_one = [line async for line in dt.logs(run.run_id, node="each", item=1)]
        assert [line.message for line in of_one] == ["item 1"]


@pytest.mark.parametrize(("characters", "first"), [(60_000, 69), (700_000, 95), (1, 100)])
async def test_a_page_of_items_with_large_outputs_ends_early(
    tmp_path: Path, characters: int, first: int
) -> None:
    """Outputs that are shown take at most 4 MiB in one page, all of them 64 MiB."""
    async with client(tmp_path) as dt:
        each = {"handler": "long", "config": {"characters": characters}}
        run = await dt.run(flow(100, **each))
        page = await dt.items(run.run_id, "each", limit=1000)
        assert len(page.items) == first
        assert (page.next_cursor is None) == (first == 100)
        assert page.counts["completed"] == 100
        found = list(page.items)
        while page.next_cursor is not None:
            page = await dt.items(run.run_id, "each", limit=1000, cursor=page.next_cursor)
            assert page.items
            found += page.items
        assert [item.index for item in found] == list(range(100))


async def test_every_count_of_items_is_the_number_of_items_with_that_status(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        fields = {"for_each": {"items": "{{ start }}", "max_concurrency": 3}, "handler": "waits"}
        held = {**flow(6, config={"gate": True}, **fields), "max_concurrency": 1}
        run = await dt.trigger(held)
        async with asyncio.timeout(10):
            while (page := await dt.items(run.run_id, "each")).counts["running"] < 1:
                await asyncio.sleep(0.01)
        assert [item.status for item in page.items] == [
            *("RUNNING", "QUEUED", "QUEUED", "PENDING", "PENDING", "PENDING")
        ]
        for status in ("pending", "running", "completed", "failed", "cancelled"):
            found = await dt.items(run.run_id, "each", status=status.upper())
            assert len(found.items) == page.counts[status], status
        assert len((await dt.items(run.run_id, "each", status="QUEUED")).items) == 2
        first = await dt.items(run.run_id, "each", status="PENDING", limit=3)
        assert [item.index for item in first.items] == [1, 2, 3]
        rest = await dt.items(run.run_id, "each", status="PENDING", cursor=first.next_cursor)
        assert [item.index for item in rest.items] == [4, 5]
        gate.set()
        await dt.wait(run.run_id)


async def test_items_are_listed_in_pages_and_by_status(tmp_path: Path) -> None:
    failing.update((1, 3))
    async with client(tmp_path) as dt:
        run = await dt.run(flow(5, for_each={"items": "{{ start }}", "max_failures": 2}))
        page = await dt.items(run.run_id, "each", limit=2)
        assert [(item.index, item.status) for item in page] == [(0, "COMPLETED"), (1, "FAILED")]
        assert page.counts["failed"] == 2
        rest = await dt.items(run.run_id, "each", cursor=page.next_cursor)
        assert [item.index for item in rest] == [2, 3, 4]
        assert rest.next_cursor is None
        failed = await dt.items(run.run_id, "each", status="FAILED")
        assert [item.error["message"] for item in failed if item.error] == [
            "1 is broken",
            "3 is broken",
        ]
        assert page.items[0].output["square"] == 0
        assert [one and one["square"] for one in run.result["all"]] == [0, None, 4, None, 16]
        with pytest.raises(NotFound, match="no items"):
            await dt.items(run.run_id, "start")
        with pytest.raises(NotFound, match="did you mean 'each'"):
            await dt.items(run.run_id, "eech")
        for wrong in ({"status": "BAD"}, {"cursor": "x"}):
            with pytest.raises(InvalidParams):
                await dt.items(run.run_id, "each", **wrong)


@pytest.mark.parametrize(
    ("value", "kind"), [("text", "not_a_list"), ({"a": 1}, "not_a_list"), (100_001, "too_large")]
)
async def test_a_value_that_is_no_list_fails_the_node(
    tmp_path: Path, value: Any, kind: str
) -> None:
    async with client(tmp_path) as dt:
        run = await dt.run(flow(value))
        assert run.error is not None
        assert (run.status, run.error["type"], run.error["node"]) == ("FAILED", kind, "each")
        assert each(run).items["total"] == 0


async def test_a_list_may_be_empty_or_a_literal_with_templates(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        assert (await dt.run(flow([]))).result == {"all": []}
        run = await dt.run(flow(3, for_each=["{{ start[2] }}", 7]))
        assert [one["of"] for one in run.result["all"]] == [2, 7]


async def test_as_many_items_as_the_window_run_at_once_and_never_more(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        window = {"items": "{{ start }}", "max_concurrency": 7}
        run = await dt.run(flow(60, handler="waits", for_each=window, config={}))
        assert run.result == {"all": list(range(60))}
        assert calls["most"] == 7


async def test_items_count_towards_the_max_concurrency_of_the_run(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        run = await dt.run(flow(20, handler="waits", config={}) | {"max_concurrency": 3})
        assert run.status == "COMPLETED"
        assert calls["most"] == 3


async def test_a_config_that_cannot_be_rendered_fails_its_item_alone(tmp_path: Path) -> None:
    items = [{"x": 2}, {"y": 3}, {"x": 4}]
    async with client(tmp_path) as dt:
        fields = {"for_each": {"items": "{{ start }}", "max_failures": 1}, "handler": "numbers"}
        run = await dt.run(flow(items, config={"value": "{{ item.x }}"}, **fields))
        assert run.result == {"all": [2, None, 4]}
        (item,) = await dt.items(run.run_id, "each", status="FAILED")
        assert item.error is not None
        assert "each[1]" in item.error["message"]
        assert item.attempt == 0


async def test_a_retry_runs_only_what_did_not_complete(tmp_path: Path) -> None:
    failing.add(2)
    async with client(tmp_path) as dt:
        run = await dt.run(flow(4))
        assert run.status == "FAILED"
        assert run.error is not None
        assert "item 2: 2 is broken (1 of 4 items failed, 0 may)" in run.error["message"]
        failing.clear()
        await dt.retry(run.run_id)
        run = await dt.wait(run.run_id)
        assert [one["square"] for one in run.result["all"]] == [0, 1, 4, 9]
        assert calls == {0: 1, 1: 1, 2: 2, 3: 1}
        await dt.retry(run.run_id, from_node="each")
        await dt.wait(run.run_id)
        assert calls[0] == 2
        assert await dt._commands.verify(run.run_id) == []


async def test_a_fork_reuses_a_mapped_node_whole(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        run = await dt.run(flow(3))
        fork = await dt.wait((await dt.fork(run.run_id, from_node="end")).run_id)
        assert fork.result == run.result
        assert each(fork).items == each(run).items
        assert calls == {0: 1, 1: 1, 2: 1}
        page = await dt.items(fork.run_id, "each")
        assert [(item.status, item.attempt) for item in page] == [("COMPLETED", 0)] * 3
        assert [item.output for item in page] == each(run).output
        changed = flow(3, for_each={"items": "{{ start }}", "max_concurrency": 2})
        again = await dt.fork(run.run_id, definition=changed)
        await dt.wait(again.run_id)
        assert calls == {0: 2, 1: 2, 2: 2}
        assert await dt._commands.verify(fork.run_id) == []


async def test_the_dry_run_of_a_retry_and_of_a_fork_lists_mapped_nodes(tmp_path: Path) -> None:
    failing.add(2)
    async with client(tmp_path) as dt:
        run_id = (await dt.run(flow(4))).run_id
        before = await dt._commands.get_run(run_id)
        plan = {"rerun": ["each", "end"], "reuse": ["start"]}
        assert await dt._commands.plan_retry(run_id) == plan
        assert await dt._commands.plan_retry(run_id, "each") == plan
        assert await dt._commands.plan_fork(run_id) == plan
        assert await dt._commands.get_run(run_id) == before
        assert calls[2] == 1
        failing.clear()
        await dt.retry(run_id)
        await dt.wait(run_id)
        assert await dt._commands.plan_retry(run_id, "end") == {
            "rerun": ["end"],
            "reuse": ["start", "each"],
        }
        whole = {"rerun": [], "reuse": ["start", "each", "end"]}
        assert await dt._commands.plan_fork(run_id) == whole
        wider = flow(4, for_each={"items": "{{ start }}", "max_concurrency": 2})
        assert await dt._commands.plan_fork(run_id, definition=wider) == plan
        with pytest.raises(NotFound, match="no node 'each\\[2\\]': it is an item"):
            await dt._commands.plan_retry(run_id, "each[2]")
        with pytest.raises(NotFound, match="each\\[2\\]"):
            await dt._commands.plan_fork(run_id, from_node="each[2]")


async def test_the_command_line_says_why_a_mapped_node_waits(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        await dt._commands.set_rate_limit("slow", 0.001, 1)
        accepted = await dt.trigger(flow(5, resource_tag="slow"))
        while (await dt.items(accepted.run_id, "each", limit=1)).counts["completed"] < 1:
            await asyncio.sleep(0.005)
        words = [sys.executable, "-m", "dovetail", "runs", "why", accepted.run_id]
        settings = {"DOVETAIL_DB": str(tmp_path / "runs.db")}
        done = await asyncio.to_thread(
            subprocess.run, words, env={**os.environ, **settings}, capture_output=True, text=True
        )
        assert "1 of 5 items completed, 4 wait for a rate limit" in done.stdout, done.stderr
        assert "waits for parent each" in done.stdout
        await dt.cancel(accepted.run_id)


async def test_a_cancel_stops_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        window = {"items": "{{ start }}", "max_concurrency": 3}
        config = {"gate": True}
        accepted = await dt.trigger(flow(50, handler="waits", for_each=window, config=config))
        while calls["now"] < 3:
            await asyncio.sleep(0.005)
        why = await dt._commands.explain(accepted.run_id)
        assert why["nodes"][0]["why"] == "0 of 50 items completed, 3 running"
        run = await dt.cancel(accepted.run_id)
        assert (run.status, each(run).items["cancelled"]) == ("CANCELLED", 50)
        page = await dt.items(run.run_id, "each", limit=4)
        assert [item.reason for item in page] == ["run_cancelled"] * 4


async def test_the_queues_list_items_that_run_and_count_items_that_are_parked(
    tmp_path: Path,
) -> None:
    async with client(tmp_path) as dt:
        await dt._commands.set_rate_limit("slow", 0.001, 1)
        window = {"items": "{{ start }}", "max_concurrency": 3}
        fields = {"handler": "waits", "for_each": window, "config": {"gate": True}}
        held = await dt.trigger(flow(50, **fields))
        limited = await dt.trigger(flow(50, resource_tag="slow", **fields))
        while calls["now"] < 4:
            await asyncio.sleep(0.005)
        found = await dt._commands.queues()
        running = [(one["run_id"], one["node"], one["item"]) for one in found["running"]]
        assert sorted(running) == sorted(
            [(held.run_id, "each", item) for item in range(3)] + [(limited.run_id, "each", 0)]
        )
        assert all(one["worker"] and one["attempt"] == 1 for one in found["running"])
        assert [(one["tag"], one["nodes"]) for one in found["parked"]] == [("slow", 2)]
        await dt.cancel(held.run_id)
        await dt.cancel(limited.run_id)


class TransportWithoutRunning:
    """A transport that has deleted the messages of running nodes."""

    async def workers(self, *, with_schemas: bool = False) -> list[dict[str, Any]]:
        return [{"alive": True, "handlers": ["waits", "square"]}]

    async def waiting(self, running: Mapping[str, int]) -> dict[str, int]:
        return {"waits": max(0, 2 - running["waits"]), "square": 0}


async def test_queues_count_items_that_wait_for_a_worker(tmp_path: Path) -> None:
    async with client(tmp_path, concurrency=3) as dt:
        accepted = await dt.trigger(flow(5, handler="waits", config={"gate": True}))
        while calls["now"] < 3:
            await asyncio.sleep(0.005)
        found = await read_queues(dt._commands, TransportWithoutRunning())
        assert [(one["handler"], one["waiting"], one["workers"]) for one in found["items"]] == [
            ("square", 0, 1),
            ("waits", 2, 1),
        ]
        assert len(found["running"]) == 3
        await dt.cancel(accepted.run_id)


async def test_items_are_found_in_the_cache(tmp_path: Path) -> None:
    cached = {"cache": {"ttl_seconds": 60}}
    async with client(tmp_path) as dt:
        await dt.run(flow(3, handler="numbers", config={"value": "{{ item }}"}, **cached))
        run = await dt.run(flow(4, handler="numbers", config={"value": "{{ item }}"}, **cached))
        attempts = [item.attempt for item in await dt.items(run.run_id, "each")]
        assert attempts == [0, 0, 0, 1]
        assert run.result == {"all": [0, 1, 2, 3]}


async def test_a_handler_that_reads_the_item_is_cached_by_it(tmp_path: Path) -> None:
    fields = {"config": {"x": 1}, "cache": {"ttl_seconds": 60}}
    async with client(tmp_path) as dt:
        await dt.run(flow(["a", "b"], **fields))
        await dt.run(flow(["c", "b"], **fields))
        assert calls == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("reads", ["item", "index"])
@pytest.mark.parametrize("first", ["node", "items"])
async def test_a_node_and_an_item_share_an_output_only_if_the_handler_saw_the_same(
    tmp_path: Path, reads: str, first: str
) -> None:
    fields = {"handler": "sees", "config": {"reads": reads}, "cache": {"ttl_seconds": 60}}
    plain = {"name": "plain", "nodes": [{"id": "each", **fields}]}
    async with client(tmp_path) as dt:
        for kind in ("node", "items") * 2 if first == "node" else ("items", "node") * 2:
            if kind == "node":
                assert (await dt.run(plain)).result == {"each": f"saw {reads} None"}
            else:
                run = await dt.run(flow([7, None], **fields))
                seen = [7, None] if reads == "item" else [0, 1]
                assert run.result == {"all": [f"saw {reads} {one}" for one in seen]}


async def test_items_wait_for_their_rate_limit_within_the_window(tmp_path: Path) -> None:
    async with client(tmp_path) as dt:
        await dt._commands.set_rate_limit("slow", 200.0, 1)
        window = {"items": "{{ start }}", "max_concurrency": 5}
        started = asyncio.get_running_loop().time()
        run = await dt.run(flow(30, resource_tag="slow", for_each=window))
        assert run.status == "COMPLETED"
        assert asyncio.get_running_loop().time() - started >= 29 / 200


async def test_a_large_output_of_an_item_is_a_reference_and_the_list_is_read_whole(
    tmp_path: Path,
) -> None:
    large = "x" * 100_000
    async with client(tmp_path) as dt:
        run = await dt.run(flow(["a", large], handler="numbers", config={"value": "{{ item }}"}))
        assert run.result == {"all": ["a", large]}
        small, big = await dt.items(run.run_id, "each")
        assert small.output == "a"
        assert big.output["$output"]["href"].endswith("/nodes/each%5B1%5D/output")
    async with client(tmp_path) as dt:  # read from the file
        assert (await dt.get_run(run.run_id)).nodes["each"].output == ["a", large]


async def read_pieces(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pieces of journals that the store reads from now on, as it reads them."""
    read: list[int] = []
    rows = store.rows

    def noting(name: str, *values: Any, **more: Any) -> list[Any]:
        found = rows(name, *values, **more)
        read.extend(row[0] for row in found if name == "read_entries")
        return found

    monkeypatch.setattr(store, "rows", noting)
    return read


async def test_the_next_page_of_a_long_run_reads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "PART_BYTES", 500)  # so that this run is a long one
    settings = Settings(db=tmp_path / "runs.db")
    async with client(tmp_path) as dt, attached(settings) as reader:
        window = {"items": "{{ start }}", "max_concurrency": 5}
        config = {"gate": "{{ index > 60 }}"}
        waiting = flow(70, handler="waits", for_each=window, config=config)
        run_id = (await dt.trigger(waiting)).run_id
        while (await dt.items(run_id, "each", limit=1)).counts["completed"] < 61:
            await asyncio.sleep(0.005)
        await dt._commands.store._commits.flush()  # type: ignore[attr-defined]
        read = await read_pieces(reader.store, monkeypatch)  # type: ignore[arg-type]
        first = await reader.node_items(run_id, "each", limit=3)
        assert len(read) > 10
        read.clear()
        assert await reader.node_items(run_id, "each", limit=3) == first
        assert read == []
        gate.set()
        await dt.wait(run_id)
        # Two at once, with something new: one of them reads all of it anew.
        last, again = await asyncio.gather(
            reader.node_items(run_id, "each", cursor="60"),
            reader.node_items(run_id, "each", cursor="60"),
        )
        assert [item["output"] for item in last["items"]] == list(range(60, 70))
        assert again == last
        read.clear()
        assert await reader.node_items(run_id, "each", cursor="60") == last
        assert read == []
        async with attached(settings) as fresh:
            shown = await fresh.get_run(run_id, large=False)
            assert shown["nodes"][0]["output"] == list(range(70))
            assert await reader.get_run(run_id, large=False) == shown
            assert await fresh.node_items(run_id, "each", cursor="60") == last


async def test_a_long_run_that_has_ended_here_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "LARGE_RUN_EVENTS", 100)
    failing.add(3)
    async with client(tmp_path) as dt:
        run_id = (await dt.run(flow(50))).run_id
        read = await read_pieces(dt._commands.store, monkeypatch)  # type: ignore[arg-type]
        page = await dt._commands.node_items(run_id, "each", limit=5)
        assert page["items"][3]["status"] == "FAILED"
        assert read == []
        async with attached(Settings(db=tmp_path / "runs.db")) as other:
            assert await other.node_items(run_id, "each", limit=5) == page
            failing.clear()
            await other.retry(run_id)  # it is read again here, and driven here
        await dt.wait(run_id)
        page = await dt._commands.node_items(run_id, "each", limit=5)
        assert [item["status"] for item in page["items"]] == ["COMPLETED"] * 5
        monkeypatch.setattr(sqlite_store, "MAX_KEPT_BYTES", 100)
        run_id = (await dt.run(flow(50))).run_id
        await dt._commands.node_items(run_id, "each", limit=5)
        assert read[-1] >> 24 == 2  # the second run of the file


async def test_a_resume_reads_the_log_of_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(tmp_path, drain_seconds=0) as dt:
        config = {"gate": "{{ index == 30 }}"}
        run_id = (await dt.trigger(flow(40, handler="waits", config=config))).run_id
        while calls["now"] != 1 or calls["most"] < 2:
            await asyncio.sleep(0.005)
    calls.clear()
    gate.set()
    async with client(tmp_path) as dt:
        read = await read_pieces(dt._commands.store, monkeypatch)  # type: ignore[arg-type]
        assert await dt.resume(run_id) == [run_id]
        assert len(read) == len(set(read)) > 3
        assert (await dt.wait(run_id)).result == {"all": list(range(40))}


KILLED = """
import asyncio, os, sys
from pathlib import Path
from dovetail import Dovetail
from dovetail.handlers.registry import handler

side = Path(sys.argv[2])

@handler("slow")
async def slow(config, ctx):
    with side.open("a") as file:
        file.write(f"{ctx.index}\\n")
    await asyncio.sleep(0.01)
    return ctx.index

@handler("join")
async def join(config, ctx):
    with side.open("a") as file:
        file.write("join\\n")
    return config

FLOW = {"name": "killed", "nodes": [
    {"id": "each", "handler": "slow",
     "for_each": {"items": list(range(200)), "max_concurrency": 8}},
    {"id": "join", "handler": "join", "dependencies": ["each"], "config": {"all": "{{ each }}"}},
]}

async def main():
    async with Dovetail(sys.argv[1], handlers=[slow, join]) as dt:
        if len(sys.argv) > 3:
            for run_id in await dt.resume():
                run = await dt.wait(run_id)
                print(run.status, run.nodes["join"].output == {"all": list(range(200))})
        else:
            await dt.run(FLOW)

asyncio.run(main())
"""


def test_a_killed_engine_goes_on_and_joins_once(tmp_path: Path) -> None:
    script, side = tmp_path / "killed.py", tmp_path / "side"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, str(script), str(tmp_path / "runs.db"), str(side)]
    with subprocess.Popen(command) as process:
        while not side.exists() or len(side.read_text().splitlines()) < 60:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    before = side.read_text().splitlines()
    out = subprocess.run(
        [*command, "resume"], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.split() == ["COMPLETED", "True"]
    starts = Counter(side.read_text().splitlines())
    assert starts["join"] == 1
    twice = [name for name, many in starts.items() if many > 1]
    assert len(twice) <= 2 * 8, "more ran again than were under way"
    assert all(name in before for name in twice)
    assert sorted(map(int, starts.keys() - {"join"})) == list(range(200))


async def test_the_digest_of_the_example_against_a_flaky_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`bench/digest.py` shows the same at 20 a second."""
    monkeypatch.setenv("DOVETAIL_ALLOW_PRIVATE_ADDRESSES", "127.0.0.1/32")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    rate = 100
    found = await import_module("digest").measure(rate, 200)
    run = found.run
    assert run.status == "COMPLETED"
    fetched = run.nodes["fetch"].output
    assert [n for n, one in enumerate(fetched) if one is None] == list(range(7, 200, 20))
    assert (run.result["articles"], run.result["missing"]) == (200, 10)
    assert len(run.nodes["summarise"].output) == 190
    assert found.requests == 220
    # A machine that stands still for more than 50 ms loses turns, which are not made up for.
    assert 0.4 * rate <= found.rate <= 1.05 * rate
