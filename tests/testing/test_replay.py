"""Recorded runs are replayed as they went, whatever became of them; a difference is found."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail import Dovetail, InvalidDefinition, NotFound, PermanentError, handler
from dovetail.core.recording import FORMAT, InvalidRecording, Recording, read_recording, record
from dovetail.core.redaction import Redactor
from dovetail.testing import FinishedRun, ReplayDiffers, Runner
from dovetail.testing.replay import replay

from ..engine.harness import definition

FETCH = {"handler": "call_external_service", "config": {"url": "https://x.example/{{ params.t }}"}}
FLOW = definition(
    {
        "start": "input",
        "fetch": {**FETCH, "after": ["start"]},
        "note": {
            "handler": "note",
            "after": ["fetch"],
            "condition": "{{ fetch.n > 5 }}",
            "config": {"text": "{{ fetch.n }} of {{ run.id }}"},
        },
        "end": {
            "handler": "output",
            "after": ["fetch", "note"],
            "config": {"n": "{{ fetch.n }}", "note": "{{ note.id | default('none') }}"},
        },
    }
)


def recorded(flow: dict[str, Any], run: FinishedRun, **secrets: str) -> Recording:
    made = record(run.to_dict(), flow, run.events, Redactor(secrets), "2026-11-18T10:00:00Z")
    again = read_recording(made.to_json())
    assert again == made
    return again


def played(flow: dict[str, Any], *args: Any, **given: Any) -> Recording:
    return recorded(flow, Runner().run(flow, *args, **given))


def statuses(run: FinishedRun) -> dict[str, str]:
    return {name: node.status for name, node in run.nodes.items()}


@pytest.mark.parametrize("n", [3, 7], ids=["skipped", "taken"])
def test_a_run_that_completed_is_replayed_without_its_handlers(n: int) -> None:
    made = played(FLOW, {"t": "x"}, mock={"fetch": {"n": n}, "note": {"id": 9}})
    run = replay(made)
    assert run.status == "COMPLETED"
    assert run.outputs["end"] == {"n": n, "note": 9 if n > 5 else "none"}
    assert run.run_id == made.run_id


FAST = definition(
    {
        "a": {"handler": "thing", "config": {"order": 1}},
        "b": {"handler": "thing", "max_retries": 2},
        "c": {"handler": "slow"},
        "after_a": {"handler": "thing", "after": ["a"]},
        "after_b": {"handler": "thing", "after": ["b"]},
        "after_c": {"handler": "thing", "after": ["c"]},
        "limited": {"handler": "thing", "resource_tag": "slow_api"},
        "limited_too": {"handler": "thing", "resource_tag": "slow_api"},
    }
)


async def slow(config: Any, ctx: Any) -> str:
    await asyncio.sleep(100)
    return "late"


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
def test_a_failed_run_is_replayed_with_every_node_as_it_ended(policy: str) -> None:
    flow = {**FAST, "on_failure": policy}
    limits = {"slow_api": {"rate_per_second": 0.001, "burst": 1}}
    mock = {"thing": 1, "slow": slow, "b": KeyError("price")}
    run = Runner().run(flow, mock=mock, rate_limits=limits)
    assert run.status == "FAILED"
    assert statuses(run)["c"] == "COMPLETED"
    again = replay(recorded(flow, run))
    assert statuses(again) == statuses(run)
    assert again.nodes["b"].error == {**run.nodes["b"].error, **again.nodes["b"].error}  # type: ignore[dict-item]
    assert again.error["message"] == run.error["message"]  # type: ignore[index]


def test_allowed_failures_template_errors_and_caches_are_replayed() -> None:
    flow = definition(
        {
            "may": {"handler": "thing", "allow_failure": True},
            "told": {
                "handler": "output",
                "after": ["may"],
                "config": {"why": "{{ may.error.message }}", "how": "{{ may.status }}"},
            },
            "kept": {"handler": "kept", "cache": {"ttl_seconds": 60}, "config": {"x": 1}},
            "kept_too": {
                "handler": "kept",
                "cache": {"ttl_seconds": 60},
                "config": {"x": 1},
                "after": ["kept"],
            },
            "wrong": {
                "handler": "output",
                "after": ["kept_too"],
                "config": {"x": "{{ kept.nothing.at_all }}"},
            },
        }
    )
    run = Runner().run(flow, mock={"thing": PermanentError("no luck"), "kept": {"y": 2}})
    assert run.nodes["kept_too"].attempt == 0
    assert run.outputs["told"] == {"why": "no luck", "how": "FAILED"}
    again = replay(recorded(flow, run))
    assert statuses(again) == statuses(run)
    assert again.error["type"] == "missing_value"  # type: ignore[index]
    assert again.outputs["told"] == run.outputs["told"]


MAPPED_EACH: dict[str, Any] = {
    "handler": "summarise",
    "after": ["list"],
    "for_each": {"items": "{{ list }}"},
    "config": {"text": "{{ item }}"},
}
MAPPED = definition(
    {
        "list": {"handler": "thing"},
        "each": {
            "handler": "summarise",
            "after": ["list"],
            "for_each": {"items": "{{ list | select }}", "max_failures": 1},
            "config": {"text": "{{ item }}"},
        },
        "end": {
            "handler": "output",
            "after": ["each"],
            "config": {"texts": "{{ each | select | map(attribute='text') }}"},
        },
    }
)


async def summary(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if ctx.item == "bad":
        raise PermanentError("it is bad")
    return {"text": f"{ctx.index} {config['text']}"}


@pytest.mark.parametrize("given", [["a", "bad", "c"], ["bad", "bad", "c"], []])
def test_a_run_with_items_is_replayed_with_every_item_as_it_ended(given: list[str]) -> None:
    run = Runner().run(MAPPED, mock={"thing": given, "summarise": summary})
    assert run.status == ("FAILED" if given.count("bad") > 1 else "COMPLETED")
    again = replay(recorded(MAPPED, run))
    assert statuses(again) == statuses(run)
    assert again.outputs == run.outputs
    counts = {name: node.items for name, node in run.nodes.items()}
    assert {name: node.items for name, node in again.nodes.items()} == counts


def failing_after(seconds: float) -> Any:
    async def fails(config: Any, ctx: Any) -> None:
        await asyncio.sleep(seconds)
        raise PermanentError("no")

    return fails


async def slow_item(config: Any, ctx: Any) -> int:
    await asyncio.sleep(0.1 + ctx.index % 3 * 0.3)
    if ctx.item == "bad":
        raise PermanentError(f"item {ctx.index}")
    return int(ctx.index)


@pytest.mark.parametrize(
    ("given", "fails_at", "window", "status"),
    [
        (["a", "b", "bad", "bad", *"defgh"], 0.45, 2, "FAILED"),
        (["a", "b", "c", "d", "e"], 0.6, 2, "COMPLETED"),
        (["a", "bad", *"cdefghijklm"], 1.0, 2, "CANCELLED"),
    ],
)
def test_items_end_in_the_recorded_order_around_a_failure_elsewhere(
    given: list[str], fails_at: float, window: int, status: str
) -> None:
    each = {**MAPPED_EACH, "for_each": {"items": "{{ list }}", "max_concurrency": window}}
    if status == "CANCELLED":
        each["for_each"]["max_failures"] = 1
    flow = definition({"list": "thing", "each": each, "other": "fails"})
    mock = {"thing": given, "summarise": slow_item, "fails": failing_after(fails_at)}
    run = Runner().run(flow, mock=mock)
    assert statuses(run) == {"list": "COMPLETED", "each": status, "other": "FAILED"}
    again = replay(recorded(flow, run))
    assert statuses(again) == statuses(run)
    assert again.nodes["each"].items == run.nodes["each"].items


def test_an_item_that_was_never_started_does_not_start_in_a_replay() -> None:
    """All items were begun, and most of them waited for a rate limit when the run failed."""
    flow = definition(
        {"list": "thing", "each": {**MAPPED_EACH, "resource_tag": "t"}, "other": "fails"}
    )
    mock = {"thing": list("abcde"), "summarise": slow_item, "fails": failing_after(5)}
    limits = {"t": {"rate_per_second": 0.25, "burst": 1}}
    run = Runner().run(flow, mock=mock, rate_limits=limits)
    assert statuses(run)["each"] == "CANCELLED"
    made = recorded(flow, run)
    again = replay(made)
    assert statuses(again) == statuses(run)
    assert again.nodes["each"].items == run.nodes["each"].items
    may = {**flow, "nodes": [*flow["nodes"][:2], {**flow["nodes"][2], "allow_failure": True}]}
    with pytest.raises(ReplayDiffers, match=r"node 'each': status: .*got \"COMPLETED\""):
        replay(made, may)


async def test_a_cancelled_and_a_retried_run_with_items_are_replayed(tmp_path: Path) -> None:
    gate = asyncio.Event()

    @handler("thing")
    async def thing(config: Any, ctx: Any) -> list[int]:
        return [0, 1, 2, 3, 4]

    @handler("summarise")
    async def summarise(config: Any, ctx: Any) -> int:
        if ctx.index == 1:
            raise PermanentError("no")
        if ctx.index == 3 and ctx.epoch == 1:
            gate.set()
            await asyncio.Event().wait()
        return int(ctx.index)

    for_each = {"items": "{{ list }}", "max_concurrency": 2, "max_failures": 1}
    flow = definition({"list": "thing", "each": {**MAPPED_EACH, "for_each": for_each}})
    made = []
    async with Dovetail(tmp_path / "runs.db", handlers=[thing, summarise]) as dt:
        run = await dt.trigger(flow)
        await gate.wait()
        await dt.cancel(run.run_id)
        made.append(await recorded_from(dt, flow, run.run_id))
        counts = [(await dt.wait(run.run_id)).nodes["each"].items]
        await dt.retry(run.run_id)
        made.append(await recorded_from(dt, flow, run.run_id))
        counts.append((await dt.wait(run.run_id)).nodes["each"].items)
    assert [one.status for one in made] == ["CANCELLED", "COMPLETED"]
    for one, items in zip(made, counts, strict=True):
        assert replay(one).nodes["each"].items == items


def test_a_difference_in_an_item_is_found() -> None:
    run = Runner().run(MAPPED, mock={"thing": ["a", "b"], "summarise": summary})
    fields = orjson.loads(recorded(MAPPED, run).to_json())
    fields["nodes"]["each"]["output"][1]["text"] = "something else"
    with pytest.raises(ReplayDiffers) as found:
        replay(read_recording(orjson.dumps(fields)))
    assert "node 'end'" in str(found.value)
    assert "something else" in str(found.value)


async def test_a_cancelled_a_retried_and_a_forked_run_are_replayed(tmp_path: Path) -> None:
    started = asyncio.Event()

    @handler("waits")
    async def waits(config: dict[str, Any], ctx: Any) -> str:
        started.set()
        if ctx.epoch == 1:
            await asyncio.Event().wait()
        return "done"

    flow = definition(
        {
            "start": "input",
            "w": {"handler": "waits", "after": ["start"]},
            "x": {"handler": "output", "after": ["w"]},
            "y": {"handler": "output", "after": ["start"], "condition": "{{ params.t > 1 }}"},
        }
    )
    async with Dovetail(tmp_path / "runs.db", handlers=[waits]) as dt:
        run = await dt.trigger(flow, {"t": 5})
        await started.wait()
        await dt.cancel(run.run_id)
        recordings = [await recorded_from(dt, flow, run.run_id)]
        await dt.retry(run.run_id)
        await dt.wait(run.run_id)
        recordings.append(await recorded_from(dt, flow, run.run_id))
        fork = await dt.fork(run.run_id, params={"t": 1}, from_node="w")
        await dt.cancel(fork.run_id)
        recordings.append(await recorded_from(dt, flow, fork.run_id))
    for made in recordings:
        again = replay(made)
        assert again.status == made.status
        assert statuses(again) == {name: node.status for name, node in made.nodes.items()}
    assert [made.status for made in recordings] == ["CANCELLED", "COMPLETED", "CANCELLED"]
    assert recordings[2].nodes["start"].reused


async def recorded_from(dt: Any, flow: dict[str, Any], run_id: str) -> Recording:
    run = await dt.wait(run_id)
    events = [event.to_dict() async for event in dt.events(run_id)]
    return record(run.to_dict(), flow, events, Redactor({}), "now")


def test_more_nodes_than_a_worker_runs_at_once_end_in_the_recorded_order() -> None:
    nodes: dict[str, Any] = {f"n{at}": "thing" for at in range(80)}
    flow = definition(nodes, max_concurrency=2)
    made = played(flow, mock={"thing": 1})
    ends = sorted(made.nodes, key=lambda name: -(made.nodes[name].ended or 0))
    turned = {"nodes": {name: {"ended": 1000 + at} for at, name in enumerate(ends)}}
    data = json.loads(made.to_json())
    for name, changes in turned["nodes"].items():
        data["nodes"][name] |= changes
    run = replay(read_recording(json.dumps(data).encode()))
    ended = [event["node"] for event in run.events if event["type"] == "node.completed"]
    assert ended == ends


# ── differences ──────────────────────────────────────────────────────────────────────────


def changed(made: Recording, *path: Any, to: Any) -> Recording:
    data = json.loads(made.to_json())
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return read_recording(json.dumps(data).encode())


@pytest.fixture(scope="module")
def made() -> Recording:
    return played(FLOW, {"t": "x"}, mock={"fetch": {"n": 7}, "note": {"id": 9}})


@pytest.mark.parametrize(
    ("path", "to", "node", "field", "expected", "got"),
    [
        (("nodes", "end", "output", "n"), 8, "end", "output.n", 8, 7),
        (("nodes", "start", "output"), {"t": "y"}, "start", "output.t", "y", "x"),
        (
            ("nodes", "fetch", "config", "url"),
            "u",
            "fetch",
            "config.url",
            "u",
            "https://x.example/x",
        ),
        (("nodes", "fetch", "output", "n"), 8, "note", "config.text", None, None),
        (("nodes", "fetch", "output", "n"), 2, "note", None, None, None),
        (("params", "t"), "z", "start", "output.t", "x", "z"),
        (("status",), "FAILED", None, "status", "FAILED", "COMPLETED"),
        (("definition", "nodes", 3, "config", "more"), 1, "end", "config.more", None, 1),
        (("nodes", "note", "status"), "SKIPPED", "note", "status", "SKIPPED", None),
    ],
)
def test_the_first_difference_is_raised(
    made: Recording, path: Any, to: Any, node: Any, field: Any, expected: Any, got: Any
) -> None:
    with pytest.raises(ReplayDiffers) as caught:
        replay(changed(made, *path, to=to))
    assert caught.value.node == node
    assert field is None or caught.value.field == field
    assert expected is None or caught.value.expected == expected
    assert got is None or caught.value.got == got
    assert ("the run" if node is None else f"node '{node}'") in str(caught.value)


def test_another_definition_is_compared_node_by_node(made: Recording) -> None:
    replay(made, FLOW)
    nodes = {node["id"]: node for node in FLOW["nodes"]}
    more = {**FLOW, "nodes": [*FLOW["nodes"], {"id": "extra", "handler": "input"}]}
    with pytest.raises(ReplayDiffers, match=r"node 'extra': node: expected"):
        replay(made, more)
    fewer = {**FLOW, "nodes": [nodes["start"], nodes["fetch"]]}
    with pytest.raises(ReplayDiffers, match=r"node 'note': node: expected .*no such node"):
        replay(made, fewer)
    never = {
        **FLOW,
        "nodes": [*FLOW["nodes"][:2], {**nodes["note"], "condition": "{{ false }}"}, nodes["end"]],
    }
    with pytest.raises(ReplayDiffers) as caught:
        replay(made, never)
    assert (caught.value.node, caught.value.got) == ("note", "SKIPPED")
    with pytest.raises(InvalidDefinition):
        replay(made, {"name": "x", "nodes": []})


def test_a_node_that_was_skipped_and_now_starts_is_a_difference() -> None:
    made = played(FLOW, {"t": "x"}, mock={"fetch": {"n": 3}, "note": {"id": 9}})
    nodes = {node["id"]: node for node in FLOW["nodes"]}
    always = {
        **FLOW,
        "nodes": [*FLOW["nodes"][:2], {**nodes["note"], "condition": "{{ true }}"}, nodes["end"]],
    }
    with pytest.raises(
        ReplayDiffers, match=r'node \'note\': status: expected "SKIPPED", got "started"'
    ):
        replay(made, always)


def test_a_node_that_was_never_started_and_now_starts_is_a_difference() -> None:
    flow = definition(
        {
            "a": "thing",
            "b": {"handler": "thing", "resource_tag": "t"},
            "c": {"handler": "thing", "resource_tag": "t"},
        }
    )
    limits = {"t": {"rate_per_second": 0.001}}
    made = played(flow, mock={"thing": 1, "a": [PermanentError("x"), 1]}, rate_limits=limits)
    assert made.nodes["c"].status == "CANCELLED"
    may = {**flow, "nodes": [{**flow["nodes"][0], "allow_failure": True}, *flow["nodes"][1:]]}
    with pytest.raises(ReplayDiffers) as caught:
        replay(made, may)
    assert (caught.value.node, caught.value.got) == ("c", "started")


def test_secrets_are_stars_in_a_recording() -> None:
    flow = definition(
        {
            "a": {
                **FETCH,
                "config": {"url": "https://x.example", "headers": {"k": "{{ secrets.KEY }}"}},
            }
        }
    )
    secret = "correct-horse-battery"
    run = Runner().run(
        flow,
        {"typed": f"is {secret}"},
        mock={"a": lambda c, ctx: c["headers"]},
        secrets={"KEY": secret},
    )
    made = recorded(flow, run, KEY=secret)
    assert secret not in made.to_json().decode()
    assert made.params == {"typed": "is ***"}
    assert made.nodes["a"].config == {"url": "https://x.example", "headers": {"k": "***"}}
    assert replay(made).outputs == {"a": {"k": "***"}}


# ── files ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not valid JSON"),
        (b"[]", "has no 'dovetail_recording'"),
        (b'{"name": "x"}', "has no 'dovetail_recording'"),
        (b'{"dovetail_recording": 99}', "a recording of format 99; this version reads format 1"),
        (b'{"dovetail_recording": 1}', "no whole recording: recorded_at"),
        (b'{"dovetail_recording": true}', "no whole recording"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_name(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "wrong.json").write_bytes(content)
    with pytest.raises(InvalidRecording, match=why) as caught:
        Runner(tmp_path).replay("wrong.json")
    assert "wrong.json" in str(caught.value)
    with pytest.raises(NotFound, match=r"there is no file none.json"):
        Runner(tmp_path).replay("none.json")


def test_the_format_is_written_and_read(made: Recording, tmp_path: Path) -> None:
    (tmp_path / "recorded.json").write_bytes(made.to_json())
    data = json.loads(made.to_json())
    assert data["dovetail_recording"] == FORMAT == 1
    assert data["nodes"]["fetch"] == {
        "status": "COMPLETED",
        "config": {"url": "https://x.example/x"},
        "output": {"n": 7},
        "started": True,
        "ended": data["nodes"]["fetch"]["ended"],
    }
    assert Runner(tmp_path).replay("recorded.json").status == "COMPLETED"
