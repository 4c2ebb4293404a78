"""A fork reuses exactly the finished nodes that are equal, and ends as a fresh run would."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st

from dovetail.core.audit.event_check import audit
from dovetail.core.audit.journal_check import verify
from dovetail.core.audit.replay import KINDS, JournalEntry, UnreadableJournal, extra_of, replay
from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import NotFound
from dovetail.core.events import Event
from dovetail.core.fork import ForkPlan, plan_fork
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import Cancel, Claim, Complete, Fail, Retry, Submit, Wake

from .drawn import CONDITIONS, Meaning, changed, deeds, error_of, examples, graphs, limits
from .invariants import check_run
from .walk import Walk, graph

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


def fork_of(
    old: RunState,
    new: Graph,
    params: dict[str, Any] | None = None,
    from_node: str | None = None,
    max_bytes: int | None = None,
) -> tuple[Submit, ForkPlan]:
    given = old.params if params is None else params
    submit = Submit("fork", new, given, max_bytes=max_bytes, forked_from=old.id)
    plan = plan_fork(old, submit, from_node)
    return submit._replace(reused=plan.reuse, reuse=[*plan.reuse]), plan


def planned(old: Walk, new: Graph, **how: Any) -> tuple[list[str], list[str]]:
    plan = fork_of(old.state, new, **how)[1]
    return [*plan.reuse], plan.rerun


# ── the rule, example by example ─────────────────────────────────────────────────────────


def broken_at_the_end() -> Walk:
    walk = Walk(CHAIN)
    walk.run("a", "b", output={"x": 1})
    walk.break_("c")
    return walk


def test_a_fork_on_a_repaired_definition_reruns_only_the_node_that_was_repaired() -> None:
    repaired = graph(CHAIN, c={"config": {"prompt": "right"}})
    assert planned(broken_at_the_end(), repaired) == (["a", "b"], ["c"])


@pytest.mark.parametrize(
    "change", [{"config": {"x": 1}}, {"handler": "g"}, {"condition": "{{ 1 == 1 }}"}]
)
def test_a_node_that_is_not_equal_runs_with_everything_below_it(change: dict[str, Any]) -> None:
    assert planned(broken_at_the_end(), graph(CHAIN, b=change)) == (["a"], ["b", "c"])


def test_a_node_with_other_dependencies_is_not_equal() -> None:
    old = Walk({"a": [], "b": [], "c": ["a"]})
    old.run("a", "b", "c")
    assert planned(old, graph({"a": [], "b": [], "c": ["a", "b"]})) == (["a", "b"], ["c"])


def test_the_order_of_nodes_and_of_dependencies_does_not_matter() -> None:
    old = Walk({"a": [], "b": [], "c": ["a", "b"]})
    old.run("a", "b", "c")
    assert planned(old, graph({"c": ["b", "a"], "b": [], "a": []})) == (["c", "b", "a"], [])


def test_fields_that_say_how_a_node_runs_do_not_matter() -> None:
    fields = {"timeout_seconds": 7, "max_retries": 2, "delivery": "at_least_once"}
    assert planned(broken_at_the_end(), graph(CHAIN, b=fields)) == (["a", "b"], ["c"])


def test_an_absent_field_equals_null_and_its_default() -> None:
    fields = {"config": None, "condition": None}
    assert planned(broken_at_the_end(), graph(CHAIN, b=fields)) == (["a", "b"], ["c"])


@pytest.mark.parametrize("value", [1.0, True, "1"])
def test_a_number_in_a_config_equals_neither_true_nor_a_float_nor_a_text(value: Any) -> None:
    old = Walk(CHAIN, a={"config": {"x": 1}})
    old.run("a", "b", "c")
    assert planned(old, graph(CHAIN, a={"config": {"x": value}})) == ([], ["a", "b", "c"])
    assert planned(old, graph(CHAIN, a={"config": {"x": 1}}))[1] == []


def test_with_other_params_nothing_is_reused_unless_from_says_where_to_begin() -> None:
    old = Walk(CHAIN, params={"p": 1})
    old.run("a", "b", "c")
    new = old.state.graph
    assert planned(old, new, params={"p": 2}) == ([], ["a", "b", "c"])
    assert planned(old, new, params={"p": True}) == ([], ["a", "b", "c"])
    assert planned(old, new, params={"p": 1}) == (["a", "b", "c"], [])
    assert planned(old, new, params={"p": 2}, from_node="b") == (["a"], ["b", "c"])


def test_from_excludes_that_node_and_its_descendants_and_nothing_else() -> None:
    old = Walk({"a": [], "b": ["a"], "c": ["b"], "d": ["a"]})
    old.run("a", "b", "c", "d")
    assert planned(old, old.state.graph, from_node="b") == (["a", "d"], ["b", "c"])


def test_from_a_node_that_is_not_there_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(NotFound, match=r"has no node 'summarize'; did you mean 'summarise'\?"):
        planned(Walk(CHAIN), graph({"summarise": []}), from_node="summarize")


def test_a_run_that_goes_on_may_be_forked_and_only_what_is_done_is_reused() -> None:
    old = Walk({"a": [], "b": [], "c": ["a", "b"]})
    old.run("a")
    old.start("b")
    assert planned(old, old.state.graph) == (["a"], ["b", "c"])


@pytest.mark.parametrize("kind", ["cached", "reused"])
def test_a_node_that_was_not_started_itself_counts_as_completed(kind: str) -> None:
    old = Walk(CHAIN)
    if kind == "cached":
        old.recall("a", 7)
    else:
        old.run("a", output=7)
        old.state = begin(fork_of(old.state, old.state.graph)[0], 200.0, 1)[0]
    submit, plan = fork_of(old.state, old.state.graph)
    assert plan.reuse == {"a": 7}
    assert submit.forked_from == old.state.id


def test_a_node_whose_failure_was_allowed_runs_again_with_everything_below_it() -> None:
    old = Walk({"a": [], "b": ["a"], "c": ["b"], "d": ["a"]}, b={"allow_failure": True})
    old.run("a")
    old.break_("b")
    old.run("c", "d")
    assert old.status == "COMPLETED"
    assert planned(old, old.state.graph) == (["a", "d"], ["b", "c"])


SKIPS = {
    "a": [],
    "s": ["a"],
    "t": ["s"],
    "z": ["a", "t"],
}


@pytest.mark.parametrize(("output", "skips"), [({"n": 1}, True), ({"n": 9}, False)])
def test_a_skipped_node_is_asked_again_and_counts_as_reused_if_it_is_skipped_again(
    output: dict[str, int], skips: bool
) -> None:
    condition = {"s": {"condition": "{{ a.n > params.most }}"}}
    old = Walk(SKIPS, params={"most": 5}, **condition)
    old.run("a", output={"n": 1})
    old.run("z")
    assert old.states == {"a": "COMPLETED", "s": "SKIPPED", "t": "SKIPPED", "z": "COMPLETED"}
    old["a"].output = output
    submit, plan = fork_of(old.state, old.state.graph)
    assert plan == (
        ({"a": output, "z": None}, ["s", "t"], [])
        if skips
        else ({"a": output}, [], ["s", "t", "z"])
    )
    run, decision = begin(submit, 200.0, 1)
    check_run(run)
    types = [(event.type, event.node) for event in decision.events]
    if skips:
        assert types[2:] == [
            ("node.reused", "a"),
            ("node.reused", "z"),
            ("node.skipped", "s"),
            ("node.skipped", "t"),
            ("run.completed", None),
        ]
    else:
        assert types[2:] == [("node.reused", "a"), ("node.queued", "s")]


def test_the_condition_of_a_skipped_node_is_asked_with_the_new_params() -> None:
    old = Walk(SKIPS, params={"most": 5}, s={"condition": "{{ a.n > params.most }}"})
    old.run("a", output={"n": 1})
    old.run("z")
    assert planned(old, old.state.graph, params={"most": 9}, from_node="z") == (["a"], ["z"])
    assert planned(old, old.state.graph, params={"most": 0}, from_node="z") == (
        ["a"],
        ["s", "t", "z"],
    )


def test_the_plan_of_an_accepted_fork_is_not_widened_by_what_completed_since() -> None:
    old = Walk({"a": [], "b": [], "c": ["a", "b"]})
    old.run("a")
    submit, _ = fork_of(old.state, old.state.graph)
    old.run("b", "c")
    again = plan_fork(old.state, submit, only=submit.reuse)
    assert ([*again.reuse], again.rerun) == (["a"], ["b", "c"])


# ── a fork begins ────────────────────────────────────────────────────────────────────────


def test_the_first_event_of_a_fork_names_the_run_it_was_made_of() -> None:
    old = broken_at_the_end()
    run, decision = begin(fork_of(old.state, old.state.graph)[0], 200.0, 1)
    assert decision.events[0].data == {"workflow": "walk", "version": None, "forked_from": "r"}
    assert run.forked_from == "r"
    node = run.node("b")
    assert (node.attempt, node.started_at, node.worker, node.finished_at) == (0, None, None, 200.0)


def test_reused_outputs_count_towards_the_limit_of_the_fork() -> None:
    old = broken_at_the_end()
    run, _ = begin(fork_of(old.state, old.state.graph, max_bytes=20)[0], 200.0, 1)
    check_run(run)
    assert (run.kept_bytes, run.node("a").size) == (14, 7)


def test_an_output_that_the_fork_may_not_keep_is_made_again_with_all_below_it() -> None:
    old = broken_at_the_end()
    submit, _ = fork_of(old.state, old.state.graph, max_bytes=10)
    run, decision = begin(submit, 200.0, 1)
    check_run(run)
    assert [node.status.value for node in run.nodes] == ["COMPLETED", "QUEUED", "PENDING"]
    assert len(decision.dispatch) == 1


def plain(run: RunState) -> dict[str, Any]:
    snapshot = run.snapshot()
    for node in snapshot["nodes"]:
        if node["status"] is not NodeStatus.PENDING:
            del node["waiting"], node["fed"]  # of no meaning once a node was ready
    return snapshot


def entry_of(submit: Submit) -> tuple[RunState, JournalEntry]:
    run, decision = begin(submit, 200.0, 1)
    orders = [order.node_index for order in decision.dispatch]
    extra = json.loads(json.dumps(extra_of(submit, decision)))
    return run, JournalEntry(1, 200.0, KINDS[Submit], extra, orders, decision.events)


def test_the_journal_of_a_fork_has_its_origin_and_its_reused_outputs() -> None:
    old = broken_at_the_end()
    submit, _ = fork_of(old.state, old.state.graph, max_bytes=10)
    run, entry = entry_of(submit)
    assert entry.extra["outputs"] == {"a": {"x": 1}}, "what is not kept is not written"
    bare = Submit("fork", submit.graph, submit.params)
    again = RunState("fork", submit.graph, submit.params, 0.0)
    replay(again, [entry])
    assert plain(again) == plain(run)
    assert verify(bare, [entry])[1] == []


@pytest.mark.parametrize("max_bytes", [None, 1000])
def test_a_reused_mapped_node_that_was_reset_is_still_in_the_log(max_bytes: int | None) -> None:
    walk = Walk({"a": [], "b": ["a"]}, a={"for_each": [1, 2, 3]})
    walk.expand("a", 3)
    walk.run("a[0]", "a[1]", "a[2]", output={"x": 1})
    walk.break_("b")
    submit, _ = fork_of(walk.state, walk.state.graph, max_bytes=max_bytes)
    run, decision = begin(submit, 200.0, 1)
    log = [*decision.events]
    bare = Submit("fork", submit.graph, submit.params, max_bytes=max_bytes)
    assert audit(bare, log, run) == []
    log += step(run, Cancel("fork"), 201.0, 2).events
    log += step(run, Retry("fork", "a"), 202.0, 3).events
    assert run.node("a").status is NodeStatus.QUEUED
    assert audit(bare, log, run) == []


def test_a_node_is_reused_only_when_its_run_begins() -> None:
    walk = Walk(CHAIN)
    late = Event(4, 101.0, "node.reused", 1, "a", 0)
    log = [*walk.log, late]
    assert len(walk.log) == 3
    (found,) = audit(Submit("r", walk.state.graph, {}), log, walk.state)
    assert found == "event 4: the log has node.reused of 'a' (attempt 0), the rules nothing"
    entry = JournalEntry(4, 101.0, "claim", None, [], [late])
    with pytest.raises(UnreadableJournal, match="a node is reused after its run has begun"):
        replay(walk.state, [entry])


def test_a_node_is_reused_only_in_a_fork() -> None:
    old = broken_at_the_end()
    submit, _ = fork_of(old.state, old.state.graph)
    run, decision = begin(submit._replace(forked_from=None), 200.0, 1)
    (found,) = audit(Submit("fork", submit.graph, {}), decision.events, run)
    assert "node.reused" in found


# ── any fork of any run ──────────────────────────────────────────────────────────────────


@st.composite
def older_runs(draw: st.DrawFn) -> RunState:
    """A run of any workflow to which anything has happened."""
    drawn = draw(graphs())
    run, _ = begin(Submit("r", drawn, {"p": 1}, max_bytes=draw(limits)), 1000.0, 1)
    meaning, now = Meaning("r", {}), 1000.0
    for nonce, deed in enumerate(draw(deeds), 2):
        now += deed.wait
        meaning.learn(run)
        step(run, meaning.of(deed, run, now), now, nonce)
    return run


ASKED: dict[str, Callable[[bool, Any], bool]] = {
    CONDITIONS[0]: lambda done, output: done and output["sum"] > 3,
    CONDITIONS[1]: lambda done, output: done,
    CONDITIONS[2]: lambda done, output: False,
    CONDITIONS[3]: lambda done, output: False,
    CONDITIONS[4]: lambda done, output: output["sum"] % 2 == 0,
    CONDITIONS[5]: lambda done, output: False,
}
"""What each condition says of a parent that is done or was skipped. The last one fails if done."""


def expected(
    old: RunState, new: Graph, same_params: bool, from_node: str | None
) -> tuple[set[str], set[str]]:
    """Reused and skipped again, by the words of the contract."""
    assert old.graph.workflow is not None
    assert new.workflow is not None
    before = {node["id"]: node for node in old.graph.workflow.model_dump()["nodes"]}
    after = {node["id"]: node for node in new.workflow.model_dump()["nodes"]}
    reused: set[str] = set()
    skipped: set[str] = set()
    if not same_params and from_node is None:
        return reused, skipped
    runs = {from_node}
    todo = dict(after)
    while todo:
        name = next(n for n in todo if not set(todo[n]["dependencies"]) & todo.keys())
        node = todo.pop(name)
        above = node["dependencies"]
        if name in runs or name not in before or not set(above) <= reused | skipped:
            continue
        texts = [
            json.dumps([one["handler"], one["config"], one["condition"]], sort_keys=True)
            for one in (node, before[name])
        ]
        if texts[0] != texts[1] or set(above) != set(before[name]["dependencies"]):
            continue
        status = old.node(name).status.value
        if status == "COMPLETED":
            reused.add(name)
        elif status == "SKIPPED" and says_no(old, node["condition"], above, reused):
            skipped.add(name)
    return reused, skipped


def says_no(old: RunState, condition: Any, above: list[str], reused: set[str]) -> bool:
    if above and not reused.intersection(above):
        return True
    if not isinstance(condition, str):
        return condition is False
    form, parent = next(
        (form, parent)
        for form in ASKED
        for parent in old.graph.index
        if form.format(parent=parent) == condition
    )
    return not ASKED[form](parent in reused, old.node(parent).output)


@examples(600)
@given(st.data())
def test_a_fork_of_any_run_reuses_exactly_the_nodes_that_are_equal(data: st.DataObject) -> None:
    old = data.draw(older_runs())
    new = data.draw(changed(old.graph))
    same_params = data.draw(st.booleans())
    from_node = data.draw(st.none() | st.sampled_from([spec.id for spec in new.nodes]))
    limit = data.draw(limits)
    params = dict(old.params) if same_params else {"p": 2}
    submit, plan = fork_of(old, new, params, from_node, limit)
    reused, skipped = expected(old, new, same_params, from_node)
    note(f"{old.graph.workflow}\n{new.workflow}")
    order = [spec.id for spec in new.nodes]
    assert [*plan.reuse] == [name for name in order if name in reused]
    assert plan.skip == [name for name in order if name in skipped]
    assert plan.rerun == [name for name in order if name not in reused | skipped]
    event(f"reuses {min(len(reused), 3)}, skips {min(len(skipped), 2)}")
    run, decision = begin(submit, 2000.0, 1)
    check_run(run)
    begun = [event.node for event in decision.events if event.type == "node.reused"]
    if limit is None:
        assert begun == [*plan.reuse]
        # A condition of a node that runs may fail the run before all are skipped.
        skipped_again = [run.node(name).status is NodeStatus.SKIPPED for name in plan.skip]
        assert all(skipped_again) or run.failed
    assert {name: run.node(name).output for name in begun if name} == {
        name: old.node(name).output for name in begun if name
    }
    assert audit(Submit("fork", new, params, max_bytes=limit), decision.events, run) == []
    made, entry = entry_of(submit)
    assert verify(Submit("fork", new, params), [entry])[1] == []
    again = RunState("fork", new, params, 0.0)
    replay(again, [entry])
    assert plain(again) == plain(made)


def outcome(run: RunState, name: str, salt: int) -> dict[str, Any] | None:
    """What the handler of a node does: None if it raises. It depends on the node as it is defined
    and on the outputs of its parents."""
    assert run.graph.workflow is not None
    node = run.graph.workflow.nodes[run.graph.index[name]]
    above = {one: run.node(one).output for one in sorted(node.dependencies)}
    seed = json.dumps([name, node.handler, node.config, above, salt], sort_keys=True)
    number = Random(seed).randrange(10)
    return {"sum": number} if number < 8 else None


def drive(run: RunState, salt: int, steps: int = 1000) -> None:
    now, nonce = 5000.0, 100
    for _ in range(steps):
        nonce += 1
        now += 1000.0
        found = next(
            (
                (spec.id, node)
                for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
                if node.phase is Phase.PUBLISHED or node.until is not None
            ),
            None,
        )
        if found is None:
            return
        name, node = found
        start = (run.id, name, node.token)
        if node.until is not None:
            step(run, Wake(*start), now, nonce)
            continue
        step(run, Claim(*start, "w", now + 10), now, nonce)
        output = outcome(run, name, salt)
        if output is None:
            step(run, Fail(*start, error_of(name)), now, nonce)
        else:
            step(run, Complete(*start, output), now, nonce)


@examples(400)
@given(st.data())
def test_a_fork_ends_as_a_fresh_run_with_the_same_outcomes_of_handlers(data: st.DataObject) -> None:
    drawn = data.draw(graphs())
    salt = data.draw(st.integers(0, 99))
    old, _ = begin(Submit("r", drawn, {}), 1000.0, 1)
    drive(old, salt, data.draw(st.sampled_from([1, 3, 6, 1000])))
    new = data.draw(changed(drawn))
    from_node = data.draw(st.none() | st.sampled_from([spec.id for spec in new.nodes]))
    fork, _ = begin(fork_of(old, new, from_node=from_node)[0], 2000.0, 1)
    fresh, _ = begin(Submit("fresh", new, {}), 2000.0, 1)
    drive(fork, salt)
    drive(fresh, salt)
    check_run(fork)
    assert fork.finished
    assert fork.status is fresh.status
    pairs = list(zip(fork.nodes, fresh.nodes, strict=True))
    if new.fail_fast and fresh.failed:
        # A failure ends what has not begun, and a fork has begun more.
        pairs = [pair for pair in pairs if all(one.status.value == "COMPLETED" for one in pair)]
    for one, other in pairs:
        assert (one.status, one.output, one.reason) == (other.status, other.output, other.reason)


def test_a_graph_of_functions_has_no_equal_nodes() -> None:
    old = broken_at_the_end()
    workflow = old.state.graph.workflow
    assert workflow is not None
    bare = build_graph(Workflow.model_validate(workflow.model_dump()), {})
    object.__setattr__(bare, "workflow", None)
    assert planned(old, bare) == ([], ["a", "b", "c"])
