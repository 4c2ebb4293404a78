"""Mistakes that the model must notice, each as a small change to a rule or to a process.

A search that finds nothing says little unless it finds these. They are found by what they lead to:
the comparison with the guards of the core is switched off. The harmless ones are what only looks
like a mistake; each says who makes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from dovetail.core import effects, item_rules, step
from dovetail.core.item_rules import FoundItem
from dovetail.core.items import PLACES, MapState
from dovetail.core.run import Phase, RunState
from dovetail.core.states import FINISHED, NodeStatus, Reason
from dovetail.core.transitions import Cancel, Claim, Complete, Decision, Expand, Reap

from . import processes, runs, scenarios, world
from .processes import Program, one
from .runs import EXPIRED, Facts, Move, Orders, Outcome, Runs, Start
from .search import Found, search
from .world import Scenario, World

Patch = Callable[[], Any]
NEVER_ENDS = "never ends"


@dataclass(frozen=True)
class Mutant:
    """What is wrong, where it shows, and what is then broken (a pattern)."""

    name: str
    scenario: Scenario
    shows: str
    patches: tuple[Patch, ...]
    nonces: bool = True

    def hunt(self) -> Found:
        with ExitStack() as stack:
            for planted in self.patches:
                stack.enter_context(planted())
            return search(World(self.scenario, oracle=False, nonces=self.nonces))


def rule(kind: type, planted: Callable[..., Decision]) -> Patch:
    return lambda: patch.dict(step.RULES, {kind: planted})


def item_rule(kind: type, planted: Callable[..., Decision]) -> Patch:
    return lambda: patch.dict(item_rules.ITEM_RULES, {kind: planted})


def process(name: str, planted: Callable[..., Any]) -> Patch:
    return lambda: patch.object(processes, name, planted)


# ── rules that forget to look ────────────────────────────────────────────────────────────


def claim_whatever_its_token(run: RunState, move: Claim, now: float, nonce: int) -> Decision:
    return step.claim(run, move._replace(token=run.node(move.node).token), now, nonce)


def claim_what_runs(run: RunState, move: Claim, now: float, nonce: int) -> Decision:
    node = run.node(move.node)
    if node.status is NodeStatus.RUNNING and node.token == move.token:
        node.phase = Phase.PUBLISHED
    return step.claim(run, move, now, nonce)


def complete_whatever_its_token(run: RunState, move: Complete, now: float, nonce: int) -> Decision:
    return step.complete(run, move._replace(token=run.node(move.node).token), now, nonce)


def complete_what_is_completed(run: RunState, move: Complete, now: float, nonce: int) -> Decision:
    node = run.node(move.node)
    if node.status is NodeStatus.COMPLETED and node.token == move.token:
        node.status = NodeStatus.RUNNING
    return step.complete(run, move, now, nonce)


def count_every_delivery(run: RunState, move: Complete, now: float, nonce: int) -> Decision:
    decision = step.complete(run, move, now, nonce)
    if not decision:
        for child in run.graph.nodes[run.graph.index[move.node]].children:
            run.nodes[child].waiting -= 1
    return decision


def reap_whatever_its_lease(run: RunState, move: Reap, now: float, nonce: int) -> Decision:
    if run.node(move.node).lease_until is not None:
        run.node(move.node).lease_until = EXPIRED
    return step.reap(run, move, now, nonce)


def reap_and_start_again(run: RunState, move: Reap, now: float, nonce: int) -> Decision:
    node, out = run.node(move.node), Decision()
    if node.token == move.token and node.lease_until == EXPIRED:
        run.active -= 1
        node.crashes += 1
        effects.release_lease(node)
        effects.queue_node(run, run.graph.index[move.node], out, now, nonce)
    return out


def cancel_only_what_waits(run: RunState, move: Cancel, now: float, nonce: int) -> Decision:
    out = Decision()
    for index, node in enumerate(run.nodes):
        if node.status not in FINISHED and node.status is not NodeStatus.QUEUED:
            if node.status is NodeStatus.RUNNING:
                run.active -= 1
            effects.cancel_node(run, index, Reason.RUN_CANCELLED, out, now)
    effects.fill_slots_and_finish(run, out, now)
    return out


def reset_what_runs(run: RunState, from_node: str | None = None) -> list[int] | str:
    if run.status.value != "FAILED":
        return "not failed"
    return [i for i, node in enumerate(run.nodes) if node.status is not NodeStatus.COMPLETED]


def close_over_the_held(run: RunState, out: Decision, now: float) -> None:
    if not run.unfinished and run.finished_at is None:
        effects.end_run(run, out, now)


def publish_over_the_limit(run: RunState, index: int, node: Any, out: Decision) -> None:
    run.active += 1
    node.phase = Phase.PUBLISHED
    out.dispatch.append(effects.Dispatch(run, index, node.token))


real_fail_node = effects.fail_node


def fail_the_run_anyway(run: RunState, index: int, *more: Any) -> list[int]:
    run.failed += run.graph.nodes[index].allow_failure
    return real_fail_node(run, index, *more)


def complete_item_whatever_its_token(
    run: RunState, found: FoundItem, move: Complete, now: float, nonce: int
) -> Decision:
    return item_rules.complete(run, found, move._replace(token=found.state.token), now, nonce)


def complete_item_that_has_ended(
    run: RunState, found: FoundItem, move: Complete, now: float, nonce: int
) -> Decision:
    """Each repeated delivery ends the node again, if no item is published or runs."""
    decision = item_rules.complete(run, found, move, now, nonce)
    if not decision.changed:
        decision = Decision()
        effects.advance_map(run, found.node_index, decision, now, nonce)
    return decision


def expand_again(run: RunState, move: Expand, now: float, nonce: int) -> Decision:
    """A second expansion starts the list anew, and forgets items that are published or run."""
    node = run.node(move.node)
    if node.items is not None and node.status not in FINISHED:
        run.active -= len(node.items.in_flight)
        node.items, node.phase = MapState(move.total), Phase.EXPANDING
    return item_rules.expand(run, move._replace(token=node.token), now, nonce)


real_advance_map = effects.advance_map


def end_with_the_first(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    real_advance_map(run, index, out, now, nonce)
    items = effects.map_of(run, index)[1]
    if items.in_flight and items.completed:
        effects.end_map(run, index, None, out, now, nonce)


def everywhere(name: str, planted: Callable[..., Any]) -> tuple[Patch, ...]:
    """A function that the rules know under two names."""
    return (
        lambda: patch.object(effects, name, planted),
        lambda: patch.object(step, name, planted),
    )


# ── processes that do things in another order, or not at all ─────────────────────────────

real_look_after, real_follow, real_go_on = (
    processes.look_after,
    processes.follow,
    processes.go_on,
)


def looks_without(name: str) -> Callable[[Facts, int], Program]:
    def look_after(run: Facts, noted: int) -> Program:
        program = real_look_after(run, noted)
        kept = (tuple(op for op in stage if op[0] != name) for stage in program)
        return tuple(stage for stage in kept if stage)

    return look_after


def looks_at_items_only(run: Facts, noted: int) -> Program:
    """Reconciliation publishes nodes and items again, but renders no list again."""
    items = tuple(start for start in run.published if start[0] >= PLACES)
    return real_look_after(run._replace(published=items), noted)


def follow_without_publishing(orders: Orders) -> Program:
    return real_follow(orders._replace(dispatch=()))


def take_in_after_ack(message: processes.Message) -> Program:
    _, start, kind, _ = message
    return (one("ack"), one("apply", (kind, *start), "result"))


def take_after_ack(start: Start) -> Program:
    claim = one("apply", ("claim", *start), "claim")
    return (one("lease"), one("ack"), claim, one("lease"), one("run", start))


def take_without_index_first(start: Start) -> Program:
    claim = one("apply", ("claim", *start), "claim")
    return (claim, one("ack"), one("lease"), one("run", start))


def made_before_it_is(noted: int = 0) -> Program:
    return (one("made"), one("moved", noted), one("apply", ("create",), "command"))


def command_without_note(move: Move, epoch: int) -> Program:
    return (one("apply", move, "command"),)


def settle_on_and_on(first: Orders, then: Orders) -> Program:
    return (one("verdicts", processes.joined(first, then)),)


def go_on_alike(move: Move, then: str, outcome: Outcome, rest: Program) -> Program:
    return real_go_on(move, "result" if then == "again" else then, outcome, rest)


def wake_after_forgetting(start: Start) -> Program:
    return (one("woken", start), one("apply", ("wake", *start), "command"))


real_write = world.write
real_apply = Runs._apply


def forget_whatever_its_epoch(book: world.Timers, name: str, about: Any) -> world.Timers:
    return book._replace(active=0) if name == "ended" else real_write(book, name, about)


def release_whatever_its_mark(book: world.Timers, name: str, about: Any) -> world.Timers:
    if name == "released":
        return book._replace(leased=False, marked=False)
    return real_write(book, name, about)


def create_again(self: Runs, number: int, move: Move) -> Outcome:
    return self._create() if move[0] == "create" else real_apply(self, number, move)


a_rerun = Scenario("", scenarios.one, {"retry": 1, "kill": 1, "lose": 1}, rerun_from=("a",))
a_condition = Scenario("", scenarios.condition, {"kill": 1}, outputs={"a": ("yes", "no")})
a_decision_over_a_rerun = Scenario(
    "",
    scenarios.condition,
    {"cancel": 1, "retry": 1},
    workers=1,
    outputs={"a": ("yes", "no")},
    rerun_from=("a",),
)
a_retried_condition = Scenario(
    "",
    scenarios.condition,
    {"kill": 1, "retry": 1},
    outputs={"a": ("no",)},
    rerun_from=("a",),
    workers=1,
)
a_memory_loss = Scenario("", scenarios.one, {"rollback": 1, "expire": 2})

MUTANTS = (
    Mutant(
        "a claim is granted whatever its token",
        Scenario("", scenarios.one, {"double": 1, "expire": 1}),
        "not of its token",
        (rule(Claim, claim_whatever_its_token),),
    ),
    Mutant(
        "a node that runs is claimed again",
        Scenario("", scenarios.one, {"double": 1}),
        "started 2 times and counts 1",
        (rule(Claim, claim_what_runs),),
    ),
    Mutant(
        "a result is taken whatever its token",
        Scenario("", scenarios.one, {"expire": 1}),
        "a stale attempt was applied",
        (rule(Complete, complete_whatever_its_token),),
    ),
    Mutant(
        "a result is taken twice",
        Scenario("", scenarios.chain, {"double": 1}),
        "ended twice",
        (rule(Complete, complete_what_is_completed),),
    ),
    Mutant(
        "a join counts deliveries instead of parents",
        Scenario("", scenarios.join, {"double": 1}),
        "a refused transition changed the run",
        (rule(Complete, count_every_delivery),),
    ),
    Mutant(
        "a renewed lease is reaped",
        Scenario("", scenarios.one, {"expire": 1}),
        "had renewed its lease",
        (rule(Reap, reap_whatever_its_lease),),
    ),
    Mutant(
        "an at-most-once node is started again",
        Scenario("", scenarios.at_most_once, {"kill": 1}),
        "may be at most once",
        (rule(Reap, reap_and_start_again),),
    ),
    Mutant(
        "a cancel leaves what is queued",
        Scenario("", scenarios.chain, {"cancel": 1}),
        "a cancel left something unfinished",
        (rule(Cancel, cancel_only_what_waits),),
    ),
    Mutant(
        "a retry forgets a sibling that runs",
        Scenario("", scenarios.side_by_side, {"fail": 1, "retry": 1}),
        "a retry started it again",
        (lambda: patch.object(step, "retry_plan", reset_what_runs),),
    ),
    Mutant(
        "held nodes are not released",
        Scenario("", scenarios.one_at_a_time, {}),
        "held although there is room",
        everywhere("fill_slots_and_finish", close_over_the_held),
    ),
    Mutant(
        "a woken node takes no notice of max_concurrency",
        Scenario("", scenarios.parked_in_turn, {"park": 1}),
        "run.active <= limit",
        everywhere("publish", publish_over_the_limit),
    ),
    Mutant(
        "an allowed failure is not counted off at its children",
        Scenario("", scenarios.allowed, {"fail": 1}),
        "node.waiting|left behind|never ends",
        (lambda: patch.object(effects, "feed_children", lambda run, index: []),),
    ),
    Mutant(
        "an allowed failure fails its run",
        Scenario("", scenarios.allowed, {"fail": 1}),
        "run.failed",
        everywhere("fail_node", fail_the_run_anyway),
    ),
    Mutant(
        "a result of an item is taken whatever its token",
        Scenario("", scenarios.mapped, {"expire": 1}),
        "a stale attempt was applied",
        (item_rule(Complete, complete_item_whatever_its_token),),
    ),
    Mutant(
        "a repeated result of an item ends its node again",
        Scenario("", scenarios.mapped, {"double": 1}),
        "m has ended twice|a finished run changed|m: it was COMPLETED and changed",
        (item_rule(Complete, complete_item_that_has_ended),),
    ),
    Mutant(
        "a list is expanded twice",
        Scenario("", scenarios.mapped, {"haste": 1}, workers=1),
        "m.0.: it was started 1 times and counts 0",
        (rule(Expand, expand_again),),
    ),
    Mutant(
        "a mapped node ends with the first of its items",
        Scenario("", scenarios.mapped, {}),
        "not items.in_flight",
        (lambda: patch.object(item_rules, "advance_map", end_with_the_first),),
    ),
    Mutant(
        "a list that an orchestrator died over is not rendered again",
        Scenario("", scenarios.mapped, {"kill": 1}),
        NEVER_ENDS,
        (process("look_after", looks_at_items_only),),
    ),
    Mutant(
        "a run is made again over itself",
        Scenario("", scenarios.one, {"haste": 1}),
        "same start|settled that the run needs",
        (lambda: patch.object(Runs, "_apply", create_again),),
    ),
    Mutant(
        "tokens have no nonce",
        a_memory_loss,
        "two workers run the same start",
        (),
        nonces=False,
    ),
    Mutant(
        "no process reconciles quiet runs",
        Scenario("", scenarios.one, {"kill": 1}),
        NEVER_ENDS,
        (process("look_after", lambda run, noted: ()),),
    ),
    Mutant(
        "what is looked after is not published again",
        Scenario("", scenarios.one, {"kill": 1}),
        NEVER_ENDS,
        (process("look_after", looks_without("publish")),),
    ),
    Mutant(
        "what is looked after is not woken",
        Scenario("", scenarios.tried_again, {"fail": 1, "kill": 1}),
        NEVER_ENDS,
        (process("look_after", looks_without("delay")),),
    ),
    Mutant(
        "what is looked after has no lease",
        Scenario("", scenarios.one, {"haste": 1, "kill": 1}),
        NEVER_ENDS,
        (process("look_after", looks_without("lease")),),
    ),
    Mutant(
        "conditions that a process died over stay undecided",
        a_condition,
        NEVER_ENDS,
        (process("look_after", looks_without("verdicts")),),
    ),
    Mutant(
        "one undecided condition is written over another",
        Scenario("", scenarios.two_conditions, {}),
        "left behind|never ends",
        (lambda: patch.object(runs, "keep_pending", lambda before, ready: tuple(ready)),),
    ),
    Mutant(
        "a verdict outlives the epoch it was made in",
        a_decision_over_a_rerun,
        "decided by other outputs",
        (lambda: patch.object(runs, "verdicts_hold", lambda run, epoch: True),),
    ),
    Mutant(
        "a process that settles goes on into the retry of another",
        a_retried_condition,
        NEVER_ENDS,
        (process("settled", settle_on_and_on),),
    ),
    Mutant(
        "an end is noted over a retry",
        a_rerun,
        NEVER_ENDS,
        (lambda: patch.object(world, "write", forget_whatever_its_epoch),),
    ),
    Mutant(
        "a retry is not noted before it is done",
        a_rerun,
        NEVER_ENDS,
        (process("command", command_without_note),),
    ),
    Mutant(
        "a run is called made before it is",
        Scenario("", scenarios.one, {"kill": 1}),
        NEVER_ENDS,
        (process("submit", made_before_it_is),),
    ),
    Mutant(
        "a result is settled before it is applied",
        Scenario("", scenarios.one, {}),
        "settled that the run needs",
        (process("take_in", take_in_after_ack),),
    ),
    Mutant(
        "a task is settled before it is claimed",
        Scenario("", scenarios.one, {}),
        "settled that the run needs",
        (process("take", take_after_ack),),
    ),
    Mutant(
        "what follows from a result is left to the sweep",
        Scenario("", scenarios.chain, {}, sweeps=False),
        NEVER_ENDS,
        (process("follow", follow_without_publishing),),
    ),
)

HARMLESS = (
    Mutant(
        "a claim before its entry in the index: the sweep makes the entry",
        Scenario("", scenarios.one, {"kill": 1, "expire": 1}),
        "",
        (process("take", take_without_index_first),),
    ),
    Mutant(
        "a run leaves the list over a worker's claim: the sweep puts it back",
        Scenario("", scenarios.one, {"kill": 1, "expire": 1, "haste": 1}),
        "",
        (lambda: patch.object(world, "write", release_whatever_its_mark),),
    ),
    Mutant(
        "results of the dead are taken like any other: the sweep publishes what they led to",
        Scenario("", scenarios.chain, {"kill": 1}),
        "",
        (process("go_on", go_on_alike),),
    ),
    Mutant(
        "a timer is forgotten before it is applied: the sweep sets it again",
        Scenario("", scenarios.tried_again, {"kill": 1, "fail": 1}),
        "",
        (process("wake_due", wake_after_forgetting),),
    ),
)
