"""`WorkflowDAG`: steps, what they depend on, and every mistake one can make with them."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail import InvalidDefinition, WorkflowDAG


def noop(ctx: dict[str, Any]) -> None:
    return None


def dag(**depends_on: list[str]) -> WorkflowDAG:
    made = WorkflowDAG("test")
    for name, above in depends_on.items():
        made.add_step(name, noop, depends_on=above)
    return made


def codes(made: WorkflowDAG) -> list[str]:
    with pytest.raises(InvalidDefinition) as caught:
        made.validate()
    return [problem.code for problem in caught.value.problems]


def test_layers_order_steps_by_their_distance_from_the_roots() -> None:
    made = dag(
        extract=[],
        save_parquet=["extract"],
        save_json=["extract"],
        record_metrics=["extract"],
        create_review=["save_parquet", "save_json"],
    )
    made.validate()
    assert made.get_execution_layers() == [
        ["extract"],
        ["save_parquet", "save_json", "record_metrics"],
        ["create_review"],
    ]


def test_ready_steps_are_the_steps_with_completed_dependencies() -> None:
    made = dag(a=[], b=["a"], c=["a", "b"])
    assert made.get_ready_nodes() == ["a"]
    assert made.get_ready_nodes(completed={"a"}) == ["b"]
    assert made.get_ready_nodes(completed=["a", "b"]) == ["c"]
    assert made.get_ready_nodes(completed={"a", "b", "c"}) == []


def test_a_step_may_be_added_before_its_dependencies() -> None:
    assert dag(b=["a"], a=[]).get_execution_layers() == [["a"], ["b"]]


def test_a_dependency_named_twice_counts_once() -> None:
    assert dag(a=[], b=["a", "a"]).get_execution_layers() == [["a"], ["b"]]


def test_calls_can_be_chained_and_dependencies_left_out() -> None:
    made = WorkflowDAG().add_step("a", noop).add_step("b", noop, depends_on=None)
    assert made.get_execution_layers() == [["a", "b"]]


def test_an_empty_graph_is_refused() -> None:
    assert codes(WorkflowDAG("empty")) == ["empty_graph"]


def test_every_problem_of_a_graph_is_reported_at_once() -> None:
    made = dag(a=["ghost"], b=["b"])
    made.add_step("a", noop)
    assert sorted(codes(made)) == ["duplicate_id", "missing_dependency", "self_dependency"]


def test_a_cycle_is_named_with_its_size_and_spelled_out() -> None:
    made = dag(a=["c"], b=["a"], c=["b"], d=["a"])
    spelled_out = "a cycle of 3 steps: a needs c, c needs b, b needs a"
    with pytest.raises(InvalidDefinition, match=spelled_out):
        made.validate()
    for look in (made.get_execution_layers, made.get_ready_nodes):
        with pytest.raises(InvalidDefinition):
            look()


def test_a_chain_of_ten_thousand_steps_is_no_problem() -> None:
    made = WorkflowDAG()
    for i in range(10_000):
        made.add_step(f"n{i}", noop, depends_on=[f"n{i - 1}"] if i else [])
    assert len(made.get_execution_layers()) == 10_000


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        (("", noop), {}, ValueError),
        ((3, noop), {}, ValueError),
        (("a", "not callable"), {}, TypeError),
        (("a", noop), {"depends_on": "b"}, TypeError),
        (("a", noop), {"condition": True}, TypeError),
        (("a", noop), {"max_retries": -1}, ValueError),
        (("a", noop), {"retry": None}, TypeError),
        (("a", noop), {"retry": {"base_delay_seconds": 1}}, TypeError),
        (("a", noop), {"timeout_seconds": 0}, ValueError),
        (("a", noop), {"timeout_seconds": "3"}, TypeError),
        (("a", noop), {"timeout_seconds": None}, TypeError),
        (("a", noop), {"max_retries": "3"}, TypeError),
        (("a", noop), {"depends_on": 3}, TypeError),
        (("a", noop), {"depends_on": [["b"]]}, TypeError),
        (("a", noop), {"timeout_seconds": float("nan")}, ValueError),
    ],
)
def test_an_impossible_step_is_refused_when_it_is_added(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception]
) -> None:
    name = next(iter(kwargs), "")
    with pytest.raises(error, match=f"step 'a': {name} " if name else "step"):
        WorkflowDAG().add_step(*args, **kwargs)


def test_an_async_condition_is_refused_since_it_would_always_be_true() -> None:
    async def condition(ctx: dict[str, Any]) -> bool:
        return False

    with pytest.raises(TypeError, match="condition"):
        WorkflowDAG().add_step("a", noop, condition=condition)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="on_failure"):
        WorkflowDAG("x", on_failure="explode")  # type: ignore[arg-type]
