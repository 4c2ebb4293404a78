"""Workflows in a test: mocks, failures in turn, virtual time, and errors that say what to do."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from pydantic import BaseModel

from dovetail import (
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    PermanentError,
    handler,
)
from dovetail.testing import Runner

from ..engine.harness import definition

FETCH = {"handler": "call_external_service", "config": {"url": "https://x.example/{{ params.t }}"}}
DAY = 24 * 3600


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def one(handler: str = "thing", **fields: Any) -> dict[str, Any]:
    return definition({"a": {"handler": handler, **fields}})


# ── mocks ────────────────────────────────────────────────────────────────────────────────


def test_a_value_is_the_output_and_templates_read_it(runner: Runner) -> None:
    flow = definition(
        {"a": FETCH, "b": {"handler": "output", "after": ["a"], "config": {"x": "{{ a.json.n }}"}}}
    )
    run = runner.run(flow, {"t": "otters"}, mock={"a": {"json": {"n": 7}}})
    assert run.status == "COMPLETED"
    assert run.outputs == {"a": {"json": {"n": 7}}, "b": {"x": 7}}
    assert run.node("a").config == {"url": "https://x.example/otters"}
    assert run.node("b").inputs == {"a": {"json": {"n": 7}}}


async def answers(config: dict[str, Any], ctx: Any) -> Any:
    return {"said": config["prompt"], "by": ctx.node_id}


@pytest.mark.parametrize(
    "mock",
    [answers, lambda config, ctx: {"said": config["prompt"], "by": ctx.node_id}],
    ids=["async", "plain"],
)
@pytest.mark.parametrize("name", ["a", "llm_service", "llm_generate"])
@pytest.mark.parametrize("used", ["llm_service", "llm_generate"])
def test_a_function_gets_the_rendered_config_by_node_handler_or_alias(
    runner: Runner, mock: Any, name: str, used: str
) -> None:
    run = runner.run(one(used, config={"prompt": "{{ params.p }}"}), {"p": "hi"}, mock={name: mock})
    assert run.outputs == {"a": {"said": "hi", "by": "a"}}


def test_a_mock_of_a_node_wins_over_that_of_its_handler(runner: Runner) -> None:
    flow = definition({"a": "thing", "b": "thing"})
    assert runner.run(flow, mock={"thing": 1, "b": 2}).outputs == {"a": 1, "b": 2}


def test_objects_of_unittest_mock_are_functions(runner: Runner) -> None:
    plain, later = Mock(return_value=1), AsyncMock(return_value=2)
    assert runner.run(definition({"a": "x", "b": "y"}), mock={"x": plain, "y": later}).outputs == {
        "a": 1,
        "b": 2,
    }
    plain.assert_called_once()
    later.assert_awaited_once()


def test_a_mock_may_ask_for_a_model_of_its_config(runner: Runner) -> None:
    class Config(BaseModel):
        size: int

    def mock(config: Config, ctx: Any) -> int:
        return config.size + 1

    mock.__annotations__["config"] = Config
    assert runner.run(one(config={"size": "3"}), mock={"a": mock}).outputs == {"a": 4}


def test_the_config_of_a_mocked_handler_is_checked_as_in_a_real_run(runner: Runner) -> None:
    flow = one("sleep", config={"seconds": "{{ params.s }}"})
    run = runner.run(flow, {"s": -1}, mock={"sleep": 1})
    assert run.error is not None
    assert run.error["type"] == "invalid_config"


def test_a_value_is_copied_for_each_start(runner: Runner) -> None:
    given = {"list": []}
    run = runner.run(
        definition({"a": "x", "b": {"handler": "y", "after": ["a"]}}),
        mock={"x": given, "y": lambda c, ctx: ctx.inputs["a"]["list"].append(1)},
    )
    assert run.outputs["a"] == {"list": []}
    assert given == {"list": []}


def test_an_exception_fails_the_node_and_a_list_with_exceptions_is_taken_in_turn(
    runner: Runner,
) -> None:
    run = runner.run(one(max_retries=2), mock={"a": PermanentError("no")})
    assert (run.status, len(run.node("a").attempts)) == ("FAILED", 1)
    run = runner.run(one(max_retries=2), mock={"a": [ValueError("no"), OSError, {"n": 1}]})
    assert (run.outputs, len(run.node("a").attempts)) == ({"a": {"n": 1}}, 3)
    assert runner.run(one(), mock={"a": [1, 2]}).outputs == {"a": [1, 2]}
    starts = [lambda config, ctx: {"t": 1 / 0}, lambda config, ctx: {"n": ctx.attempt}]
    run = runner.run(one(max_retries=2), mock={"a": starts})
    assert (run.outputs, len(run.node("a").attempts)) == ({"a": {"n": 2}}, 2)
    with pytest.raises(DovetailError, match="mock of 'a'"):
        runner.run(one(), mock={"a": [TimeoutError, lambda: 1]})


def test_failures_come_in_turn_and_then_the_node_does_what_it_does_otherwise(
    runner: Runner,
) -> None:
    flow = definition({"a": {"handler": "thing", "max_retries": 3}, "b": "input"})
    run = runner.run(
        flow, {"t": 1}, mock={"thing": 5}, fail={"a": [TimeoutError, OSError("x"), None]}
    )
    assert run.outputs == {"a": 5, "b": {"t": 1}}
    assert run.node("a").attempts[1]["error"]["message"] == "x"
    with pytest.raises(KeyError):
        run.node("a").attempts[1]["to_dict"]
    assert [(one.status, one.error and one.error["type"]) for one in run.node("a").attempts] == [
        ("FAILED", "TimeoutError"),
        ("FAILED", "OSError"),
        ("COMPLETED", None),
    ]
    assert runner.run(flow, mock={"thing": 5}, fail={"thing": OSError}).status == "FAILED"
    assert runner.run(flow, mock={"thing": 5}, fail={"input": [OSError]}).status == "FAILED"


def test_by_a_handlers_name_each_of_its_nodes_fails_in_turn(runner: Runner) -> None:
    flow = definition({"a": "thing", "b": "thing"}, defaults={"max_retries": 1})
    run = runner.run(flow, mock={"thing": 1}, fail={"thing": [OSError]})
    assert [node.attempt for node in run.nodes.values()] == [2, 2]


def test_an_assert_in_a_mock_fails_the_test_and_no_node(runner: Runner) -> None:
    def wrong(config: Any, ctx: Any) -> None:
        assert config == {"x": 1}

    with pytest.raises(AssertionError):
        runner.run(one(max_retries=3), mock={"a": wrong})

    def fails(config: Any, ctx: Any) -> None:
        pytest.fail("by hand")

    with pytest.raises(pytest.fail.Exception, match=r"by hand"):
        runner.run(one(), mock={"a": fails})


# ── real handlers ────────────────────────────────────────────────────────────────────────


def test_handlers_are_functions_modules_or_files(runner: Runner, tmp_path: Path) -> None:
    @handler("doubled")
    def doubled(config: dict[str, Any], ctx: Any) -> int:
        return 2 * int(config["n"])

    (tmp_path / "tripled_for_a_test.py").write_text(
        'from dovetail import handler\n@handler("tripled")\n'
        "async def tripled(config, ctx):\n    return 3 * config['n']\n"
    )
    flow = definition(
        {
            "a": {"handler": "doubled", "config": {"n": 2}},
            "b": {"handler": "tripled", "config": {"n": 2}},
        }
    )
    run = runner.run(flow, handlers=[doubled, "tripled_for_a_test.py"])
    assert run.outputs == {"a": 4, "b": 6}
    with pytest.raises(DovetailError, match=r"is no handler"):
        runner.run(flow, handlers=[one])


@handler("by_thread")
def by_thread(config: dict[str, Any], ctx: Any) -> str:
    time.sleep(config["seconds"])
    return threading.current_thread().name


def test_a_thread_is_waited_for_in_real_time(runner: Runner) -> None:
    flow = one("by_thread", config={"seconds": 0.05}, timeout_seconds=20)
    run = runner.run(flow, handlers=by_thread)
    assert run.status == "COMPLETED"
    assert run.duration is not None
    assert 0.01 <= run.duration < 10
    hangs = one("by_thread", config={"seconds": 0.3}, timeout_seconds=0.05)
    assert runner.run(hangs, handlers=by_thread).error["type"] == "timeout"  # type: ignore[index]


@handler("asks")
async def asks(config: dict[str, Any], ctx: Any) -> Any:
    """Waits for what is outside the loop, in the way that its config names."""
    if config["how"] == "to_thread":
        return await asyncio.to_thread(lambda: time.sleep(0.03) or "thread")
    if config["how"] == "socket":
        server = await asyncio.start_server(_greet, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            said = await reader.read()
            writer.close()
            await writer.wait_closed()
            return said.decode()
    done = threading.Event()
    threading.Timer(0.03, done.set).start()
    while not done.is_set():
        await asyncio.sleep(0.005)
    return "polled"


async def _greet(reader: Any, writer: Any) -> None:
    await asyncio.to_thread(time.sleep, 0.03)
    writer.write(b"hello")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("how", "said"), [("to_thread", "thread"), ("socket", "hello"), ("poll", "polled")]
)
def test_an_async_handler_that_waits_outside_the_loop_does_not_time_out(
    runner: Runner, how: str, said: str
) -> None:
    run = runner.run(one("asks", config={"how": how}, timeout_seconds=20), handlers=asks)
    assert run.outputs == {"a": said}


@handler("naps")
async def naps(config: dict[str, Any], ctx: Any) -> str:
    await asyncio.sleep(3 * DAY)
    return "rested"


def test_a_handler_that_only_sleeps_takes_no_time(runner: Runner) -> None:
    began = time.monotonic()
    run = runner.run(one("naps", timeout_seconds=4 * DAY), handlers=naps)
    assert run.outputs == {"a": "rested"}
    assert run.duration == pytest.approx(3 * DAY)
    assert time.monotonic() - began < 5


# ── time ─────────────────────────────────────────────────────────────────────────────────


def test_backoff_rate_limits_sleep_and_timeouts_take_no_real_time(runner: Runner) -> None:
    flow = definition(
        {
            "a": {"handler": "thing", "max_retries": 3, "resource_tag": "api"},
            "b": {"handler": "thing", "resource_tag": "api"},
            "c": {"handler": "sleep", "config": {"seconds": 200}},
        }
    )
    warm = runner.run(flow, mock={"thing": 1})
    assert warm.status == "COMPLETED"
    limits = {"api": {"rate_per_second": 0.01, "burst": 1}}
    began = time.process_time()
    run = runner.run(flow, mock={"thing": 1}, fail={"a": [OSError] * 3}, rate_limits=limits)
    took = time.process_time() - began
    assert run.status == "COMPLETED"
    assert run.duration is not None
    # Five starts at one in 100 s; the backoffs of 10, 20 and 40 s are over by then.
    assert run.duration == pytest.approx(400, abs=1)
    assert took < 0.05


def test_backoffs_are_exact(runner: Runner) -> None:
    run = runner.run(one(max_retries=3), mock={"a": 1}, fail={"a": [OSError] * 3})
    assert run.duration == pytest.approx(10 + 20 + 40)


def test_a_mock_that_hangs_times_out(runner: Runner) -> None:
    async def hang(config: Any, ctx: Any) -> None:
        await asyncio.Event().wait()

    run = runner.run(one(timeout_seconds=50), mock={"a": hang})
    assert run.error is not None
    assert run.error["message"] == "did not finish within 50 s (timeout_seconds)"
    assert run.duration == pytest.approx(50, abs=1)


async def test_it_works_in_an_async_test(runner: Runner) -> None:
    run = runner.run(one(max_retries=1), mock={"a": answers_nothing}, fail={"a": [OSError]})
    assert run.status == "COMPLETED"
    with pytest.raises(AssertionError):
        runner.run(one(), mock={"a": asserts})


async def answers_nothing(config: Any, ctx: Any) -> None:
    await asyncio.sleep(10)


def asserts(config: Any, ctx: Any) -> None:
    raise AssertionError


# ── errors ───────────────────────────────────────────────────────────────────────────────


def test_virtual_time_comes_though_less_than_its_resolution_is_left(runner: Runner) -> None:
    """The time of day is a large float: a timer may be called a moment before its time."""

    async def thing(config: Any, ctx: Any) -> int:
        loop, waits = asyncio.get_running_loop(), 0
        until = loop.time() + 1e-7
        while loop.time() < until and waits < 100:
            await asyncio.sleep(until - loop.time())
            waits += 1
        return waits

    assert runner.run(one(), mock={"thing": thing}).outputs["a"] == 1


def test_a_mock_for_nothing_names_what_there_is(runner: Runner) -> None:
    flow = definition({"fetch": FETCH, "end": {"handler": "output", "after": ["fetch"]}})
    with pytest.raises(NotFound) as caught:
        runner.run(flow, {"t": 1}, mock={"fetsh": 1})
    assert str(caught.value) == (
        "mock: the workflow has no node and no handler 'fetsh'; did you mean 'fetch'? "
        "Nodes: fetch, end. Handlers: call_external_service, output"
    )
    with pytest.raises(NotFound, match=r"^fail: .* 'zzz'\. Nodes: fetch, end"):
        runner.run(flow, {"t": 1}, mock={"fetch": 1}, fail={"zzz": [OSError]})
    run = runner.run(flow, {"t": 1}, mock={"fetch": 1, "llm_service": 2})
    assert run.status == "COMPLETED", "a handler that exists may be mocked though it is not used"
    with pytest.raises(NotFound, match=r"did you mean 'fetch'"):
        run.node("fetsch")


def test_an_invalid_definition_is_raised_with_all_its_problems(runner: Runner) -> None:
    flow = definition({"a": "thing", "b": "thing", "c": {"handler": "output", "after": ["z"]}})
    with pytest.raises(InvalidDefinition) as caught:
        runner.run(flow, mock={"a": 1})
    assert {(problem.code, problem.path) for problem in caught.value.problems} == {
        ("unknown_handler", "nodes[1].handler"),
        ("missing_dependency", "nodes[2].dependencies[0]"),
    }


@pytest.mark.parametrize(
    "wrong", [[], "flow", {"nodes": 3}, {"nodes": [1, {"id": []}]}, {"nodes": [{"id": 10**5000}]}]
)
def test_nonsense_is_refused_with_a_sentence(runner: Runner, wrong: Any) -> None:
    with pytest.raises((DovetailError, TypeError)):
        runner.run(wrong, mock={"a": 1})


def test_wrong_params_wrong_mocks_and_wrong_failures_are_refused(runner: Runner) -> None:
    flow = {**one(), "params": {"type": "object", "required": ["t"]}}
    with pytest.raises(InvalidParams, match=r"t"):
        runner.run(flow, mock={"a": 1})
    with pytest.raises(DovetailError, match=r"mock of 'a': a handler takes \(config, ctx\)"):
        runner.run(one(), mock={"a": lambda config: 1})
    with pytest.raises(DovetailError, match=r"fail of 'a': an exception, or a list"):
        runner.run(one(), mock={"a": 1}, fail={"a": ["TimeoutError"]})


def test_a_file_is_looked_for_here_and_beside_the_test(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flow.yaml").write_text("name: f\nnodes: [{id: a, handler: input}]\n")
    assert runner.run("flow.yaml", {"x": 1}).result == {"a": {"x": 1}}
    here = tmp_path / "here"
    here.mkdir()
    (here / "flow.yaml").write_text("name: f\nnodes: [{id: b, handler: input}]\n")
    monkeypatch.chdir(here)
    assert set(runner.run("flow.yaml").outputs) == {"b"}
    with pytest.raises(NotFound, match=r"there is no file none.yaml, neither in .* nor in"):
        runner.run("none.yaml")
    with pytest.raises(DovetailError, match=r"'registered' is no definition; give a dict"):
        runner.run("registered")


def test_secrets_are_given_and_shown_as_stars(runner: Runner) -> None:
    flow = definition(
        {
            "a": {
                **FETCH,
                "config": {
                    "url": "https://x.example",
                    "headers": {"k": "Bearer {{ secrets.KEY }}"},
                },
            }
        }
    )
    seen: list[Any] = []

    def mock(config: Any, ctx: Any) -> Any:
        seen.append(config["headers"]["k"])
        return {"echo": config["headers"]["k"]}

    run = runner.run(flow, mock={"a": mock}, secrets={"KEY": "correct-horse-battery"})
    assert seen == ["Bearer correct-horse-battery"]
    assert run.outputs == {"a": {"echo": "Bearer ***"}}
    assert run.node("a").config["headers"] == {"k": "Bearer ***"}  # type: ignore[index]


def test_the_environment_decides_nothing(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_REDIS_URL", "redis://nowhere:1")
    monkeypatch.setenv("DOVETAIL_HANDLERS", "no_such_module")
    assert runner.run(one(), mock={"a": 1}).status == "COMPLETED"


def test_a_run_keeps_its_large_outputs_whole_and_nothing_between_runs(runner: Runner) -> None:
    large = "x" * 200_000
    flow = definition(
        {
            "a": {"handler": "thing", "cache": {"ttl_seconds": 60}},
            "b": {"handler": "output", "after": ["a"]},
        }
    )
    run = runner.run(flow, mock={"a": large})
    assert run.node("b").inputs == {"a": large}
    assert run.node("a").output == large
    assert runner.run(flow, mock={"a": 1}).outputs["a"] == 1
    assert run.events[-1]["type"] == "run.completed"


# ── mapped nodes ─────────────────────────────────────────────────────────────────────────


def summaries(**each: Any) -> dict[str, Any]:
    """A list, a mapped node over it, and a node that reads what came of it."""
    fields = {"for_each": "{{ list }}", "config": {"prompt": "{{ index }}: {{ item }}"}, **each}
    return definition(
        {
            "list": "articles",
            "each": {"handler": "llm_service", "after": ["list"], **fields},
            "end": {
                "handler": "output",
                "after": ["each"],
                "config": {"all": "{{ each }}", "missing": "{{ each | reject | length }}"},
            },
        }
    )


def upper(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if ctx.item == "bad":
        raise PermanentError("it is bad")
    return {"said": config["prompt"].upper(), "index": ctx.index}


def test_a_mock_of_a_mapped_node_is_called_for_each_item(dovetail_runner: Runner) -> None:
    run = dovetail_runner.run(summaries(), mock={"articles": ["a", "b"], "each": upper})
    assert run.outputs["each"] == [{"said": "0: A", "index": 0}, {"said": "1: B", "index": 1}]
    assert run.outputs["end"]["missing"] == 0
    node = run.node("each")
    assert (node.status, node.items["completed"], len(node.attempts)) == ("COMPLETED", 2, 1)  # type: ignore[index]
    assert node.config is None
    assert "for each item" in (node.config_error or "")
    one = dovetail_runner.run(summaries(), mock={"articles": ["a", "b"], "each": {"text": "t"}})
    assert one.outputs["each"] == [{"text": "t"}, {"text": "t"}]
    assert dovetail_runner.run(summaries(), mock={"articles": [], "each": upper}).outputs == {
        "list": [],
        "each": [],
        "end": {"all": [], "missing": 0},
    }


def test_failures_of_items_come_in_turn_for_each_item(dovetail_runner: Runner) -> None:
    flow = summaries(max_retries=1, retry={"base_delay_seconds": DAY})
    run = dovetail_runner.run(
        flow, mock={"articles": ["a", "b"], "each": upper}, fail={"each": [TimeoutError, None]}
    )
    assert run.status == "COMPLETED"
    retried = [event["item"] for event in run.events if event["type"] == "node.retrying"]
    assert sorted(retried) == [0, 1]


def test_so_many_items_may_fail(dovetail_runner: Runner) -> None:
    mock = {"articles": ["a", "bad", "c"], "each": upper}
    run = dovetail_runner.run(
        summaries(for_each={"items": "{{ list }}", "max_failures": "34%"}), mock=mock
    )
    assert run.status == "COMPLETED"
    assert [one and one["index"] for one in run.outputs["each"]] == [0, None, 2]
    assert run.outputs["end"]["missing"] == 1
    run = dovetail_runner.run(summaries(), mock=mock)
    assert run.status == "FAILED"
    assert run.error is not None
    assert run.error["message"] == "item 1: it is bad (1 of 3 items failed, 0 may)"
    failed = [event for event in run.events if event["type"] == "node.failed" and "item" in event]
    assert [(event["item"], event["error"]["type"]) for event in failed] == [(1, "PermanentError")]


def test_an_item_is_not_a_node(dovetail_runner: Runner) -> None:
    run = dovetail_runner.run(summaries(), mock={"articles": ["a"], "each": upper})
    with pytest.raises(NotFound, match=r"each\[0\].*did you mean 'each'"):
        run.node("each[0]")
