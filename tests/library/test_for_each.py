"""Steps that run once for each item of a list that an earlier step returned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from dovetail import WorkflowDAG, WorkflowExecutor, WorkflowResult
from dovetail.core.errors import InvalidDefinition

Ctx = dict[str, Any]


def listed(name: str) -> Any:
    return lambda ctx: ctx["step_outputs"][name]


def digest(**fields: Any) -> WorkflowDAG:
    """The graph of the contract: articles, a summary of each, and a join."""
    dag = WorkflowDAG("digest")
    dag.add_step("articles", lambda ctx: ["a", "b", "c"])
    dag.add_step(
        "summarise",
        fields.pop("fn", lambda ctx: f"{ctx['index']}{ctx['item']}"),
        depends_on=["articles"],
        for_each=fields.pop("for_each", listed("articles")),
        **fields,
    )
    join = listed("summarise")
    return dag.add_step("digest", lambda ctx: "+".join(join(ctx)), depends_on=["summarise"])


def run(dag: WorkflowDAG, **options: Any) -> WorkflowResult:
    return WorkflowExecutor(**options).execute_sync(dag)


def test_the_output_is_the_list_of_outputs_in_order() -> None:
    async def summarise(ctx: Ctx) -> str:
        await asyncio.sleep(0.003 * (3 - ctx["index"]))
        return f"{ctx['index']}{ctx['item']}"

    result = run(digest(fn=summarise))
    assert result.outputs["summarise"] == ["0a", "1b", "2c"]
    assert result.outputs["digest"] == "0a+1b+2c"
    assert (result.completed, result.failed, result.skipped) == (3, 0, 0)


def test_plain_functions_run_in_threads() -> None:
    assert run(digest()).outputs["digest"] == "0a+1b+2c"


@pytest.mark.parametrize("items", [[], (), range(0)])
def test_an_empty_list_completes_at_once(items: Any) -> None:
    result = run(digest(for_each=lambda ctx: items))
    assert result.outputs["summarise"] == []
    assert result.outputs["digest"] == ""


def test_items_may_be_any_objects_and_any_iterable_but_text_and_mappings() -> None:
    seen: list[Any] = []
    marks = [object(), {1}]
    result = run(digest(fn=lambda ctx: seen.append(ctx["item"]) or "", for_each=lambda _: marks))
    assert all(one in marks for one in seen)
    assert result.status == "COMPLETED"
    for wrong in ("abc", {"a": 1}, 3, None):
        result = run(digest(for_each=lambda ctx, wrong=wrong: wrong))
        assert result.error is not None
        assert result.error["type"] == "not_a_list"


@pytest.mark.parametrize("wrong", [range(10**12), count(), (0,) * 100_001])
def test_more_items_than_are_allowed_are_not_all_made(wrong: Any) -> None:
    result = run(digest(for_each=lambda ctx: wrong))
    assert result.error is not None
    assert result.error["type"] == "too_large"
    assert "has 100,001 items; at most 100,000" in result.error["message"]


def test_a_list_instead_of_a_function_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"of ctx, not list: write for_each=lambda ctx: …"):
        WorkflowDAG().add_step("a", print, for_each=[1, 2])  # type: ignore[arg-type]


def test_the_list_is_asked_for_once() -> None:
    asked = []

    def items(ctx: Ctx) -> list[int]:
        asked.append(1)
        return list(range(50))

    result = run(digest(fn=lambda ctx: "x", for_each=items))
    assert len(result.outputs["summarise"]) == 50
    assert len(asked) == 1


def test_an_error_of_the_list_fails_the_step() -> None:
    result = run(digest(for_each=lambda ctx: ctx["nothing"]))
    assert result.error is not None
    assert "KeyError" in result.error["message"]
    assert result.steps["digest"].error == "Dependency failed"


def test_an_error_of_a_generator_fails_the_step() -> None:
    def items(ctx: Ctx) -> Iterator[int]:
        yield 1
        raise ValueError("the second page is missing")

    result = run(digest(for_each=items))
    assert result.error is not None
    assert "ValueError: the second page is missing" in result.error["message"]
    assert result.steps["digest"].error == "Dependency failed"


def test_an_endless_generator_is_too_large() -> None:
    result = run(digest(for_each=lambda ctx: count()))
    assert result.error is not None
    assert result.error["type"] == "too_large"


def test_an_item_is_tried_again_alone() -> None:
    calls: list[int] = []

    def summarise(ctx: Ctx) -> str:
        calls.append(ctx["index"])
        if ctx["index"] == 1 and calls.count(1) < 3:
            raise ValueError("not yet")
        return str(ctx["item"])

    from dovetail.core.retry import RetryPolicy

    quick = RetryPolicy(base_delay_seconds=0.001, jitter=0)
    result = run(digest(fn=summarise, max_retries=2, retry=quick))
    assert result.outputs["summarise"] == ["a", "b", "c"]
    assert sorted(calls) == [0, 1, 1, 1, 2]


def test_a_failed_item_fails_the_step_and_is_named() -> None:
    def summarise(ctx: Ctx) -> str:
        if ctx["item"] == "b":
            raise ValueError("broken")
        return "fine"

    result = run(digest(fn=summarise))
    assert result.error is not None
    assert result.error["message"] == "item 1: broken (1 of 3 items failed, 0 may)"
    assert result.error["node"] == "summarise"


def test_not_more_run_at_once_than_the_executor_allows() -> None:
    running = most = 0

    async def summarise(ctx: Ctx) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return ""

    result = run(digest(fn=summarise, for_each=lambda ctx: range(40)), max_concurrency=3)
    assert result.status == "COMPLETED"
    assert most == 3


def test_conditions_read_the_list_and_a_resumed_workflow_keeps_it() -> None:
    dag = digest()
    dag.add_step(
        "more",
        lambda ctx: len(ctx["step_outputs"]["summarise"]),
        depends_on=["summarise"],
        condition=lambda ctx: len(ctx["step_outputs"]["summarise"]) == 3,
    )
    first = run(dag)
    assert first.outputs["more"] == 3
    again = WorkflowExecutor().execute_sync(dag, resume=first)
    assert again.outputs == first.outputs


def test_two_mapped_steps_after_each_other() -> None:
    dag = digest()
    dag.add_step(
        "longer",
        lambda ctx: ctx["item"] * 2,
        depends_on=["summarise"],
        for_each=listed("summarise"),
    )
    assert run(dag).outputs["longer"] == ["0a0a", "1b1b", "2c2c"]


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(TypeError, match="for_each must be a plain function"):
        WorkflowDAG().add_step("a", lambda ctx: 1, for_each=[1, 2])  # type: ignore[arg-type]
    dag = WorkflowDAG().add_step("a", lambda ctx: 1, for_each=lambda ctx: [1])
    dag.add_step("a[0]", lambda ctx: 1)
    with pytest.raises(InvalidDefinition, match="has the name of an item"):
        dag.validate()
    dag = WorkflowDAG().add_step("a[en]", lambda ctx: 1, for_each=lambda ctx: [1])
    with pytest.raises(InvalidDefinition, match=r"no \[ or \] in its id"):
        run(dag)


def test_the_events_of_a_step_that_is_called_like_an_item_are_its_own() -> None:
    events: list[Any] = []
    dag = WorkflowDAG().add_step("a[1]", lambda ctx: 1)
    dag.add_step("b", lambda ctx: 1, depends_on=["a[1]"], for_each=lambda ctx: [1])
    run(dag, on_event=events.append)
    of_nodes = [event.to_dict() for event in events if event.node is not None]
    assert [one.get("item") for one in of_nodes if one["node"] == "a[1]"] == [None] * 3
    assert [one["node"] for one in of_nodes if one.get("item") == 0] == ["b"] * 3
