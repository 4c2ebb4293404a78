"""What a store promises beside the rules: repeats, unknown names, the log, waiting, the cache."""

from __future__ import annotations

import asyncio

import pytest

from dovetail.core.caching import Caching, Facts, digest_of, entry_key
from dovetail.core.errors import NotFound
from dovetail.core.events import Token
from dovetail.core.states import RunStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    Transition,
    Wake,
)
from dovetail.engine.ports import Store

from ..core.walk import graph
from .stores import create, new_run_id, read

CHAIN = graph({"a": [], "b": ["a"]})
SINGLE = graph({"a": []})
T = 1000.0


async def run_node(
    store: Store, run_id: str, decision: Decision, output: object = None
) -> Decision:
    """Claim and complete the first node that a decision publishes."""
    order = decision.dispatch[0]
    name = order.run.graph.nodes[order.node_index].id
    claim = Claim(run_id, name, order.token, "w", T + 10)
    done = Complete(run_id, name, order.token, output)
    claimed, completed = await store.apply([claim, done], T)
    assert claimed.changed
    return completed


class TestCreating:
    async def test_a_created_run_can_be_loaded(self, store: Store) -> None:
        run_id, decision = await create(store, CHAIN, {"x": 1})
        run = await store.load(run_id)
        assert (run.id, run.params, run.status) == (run_id, {"x": 1}, RunStatus.RUNNING)
        assert (run.created_at, run.started_at) == (T, T)
        assert [order.node_index for order in decision.dispatch] == [0]

    async def test_creating_a_run_again_decides_nothing_and_changes_nothing(
        self, store: Store
    ) -> None:
        run_id, first = await create(store, CHAIN)
        await run_node(store, run_id, first)
        before = (await store.load(run_id)).snapshot()
        again = await store.create(Submit(run_id, SINGLE, {"other": 1}), T + 5)
        assert not again
        assert not again.dispatch
        assert (await store.load(run_id)).snapshot() == before

    async def test_runs_are_isolated_from_each_other(self, store: Store) -> None:
        one, decision = await create(store, CHAIN)
        other, _ = await create(store, CHAIN)
        await run_node(store, one, decision)
        assert [node.status for node in (await store.load(other)).nodes] == ["QUEUED", "PENDING"]

    async def test_a_run_that_ends_at_its_creation_has_ended(self, store: Store) -> None:
        skipped = graph({"a": []}, a={"condition": False})
        run_id, decision = await create(store, skipped)
        assert decision.ended
        assert (await store.wait(run_id)).status is RunStatus.COMPLETED

    async def test_two_starts_of_one_node_have_different_tokens(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        tokens = {decision.dispatch[0].token}
        for _ in range(20):
            _, decision = await store.apply([Cancel(run_id), Retry(run_id)], T)
            tokens.add(decision.dispatch[0].token)
        assert len(tokens) == 21


class TestApplying:
    async def test_there_is_one_decision_per_transition_in_order(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        token = decision.dispatch[0].token
        claim = Claim(run_id, "a", token, "w", T + 10)
        moves = [claim, claim, Cancel("nobody"), Complete(run_id, "a", token, 1)]
        decisions = await store.apply(moves, T)
        assert [bool(decision) for decision in decisions] == [True, False, False, True]
        assert decisions[3].ended

    async def test_applying_nothing_decides_nothing(self, store: Store) -> None:
        assert await store.apply([], T) == []

    @pytest.mark.parametrize("durable", [False, True])
    async def test_a_repeated_transition_decides_nothing(self, store: Store, durable: bool) -> None:
        run_id, decision = await create(store, CHAIN)
        token = decision.dispatch[0].token
        for move in (Claim(run_id, "a", token, "w", T + 10), Complete(run_id, "a", token, 1)):
            (first,) = await store.apply([move], T, durable=durable)
            assert first.changed
            snapshot = (await store.load(run_id)).snapshot()
            (again,) = await store.apply([move], T + 1, durable=durable)
            assert not again
            assert (await store.load(run_id)).snapshot() == snapshot

    async def test_a_transition_for_an_unknown_run_or_node_decides_nothing(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, SINGLE)
        token = decision.dispatch[0].token
        before = (await store.load(run_id)).snapshot()
        for run, node in (("nobody", "a"), (run_id, "ghost")):
            moves: list[Transition] = [
                Claim(run, node, token, "w", T + 10),
                Renew(run, node, token, T + 10),
                Complete(run, node, token, 1),
                Fail(run, node, token, {"type": "E", "message": "m"}),
                Reap(run, node, token, 3),
                Park(run, node, token, T + 1),
                Wake(run, node, token),
                Progress(run, node, token, 0.5),
                Recall(run, node, token, 1),
                Retry(run, node),
            ]
            if run != run_id:
                moves.append(Cancel(run))
            for decided in await store.apply(moves, T):
                assert not decided
                assert not decided.dispatch
        assert (await store.load(run_id)).snapshot() == before
        with pytest.raises(NotFound, match="nobody"):
            await store.load("nobody")

    @pytest.mark.parametrize(
        ("max_crashes", "said"), [(1, "during attempt 2"), (3, "during 3 attempts")]
    )
    async def test_a_node_that_lost_its_worker_too_often_names_the_attempts(
        self, store: Store, max_crashes: int, said: str
    ) -> None:
        run_id, _ = await create(store, graph({"a": []}, a={"max_retries": 1}))
        now = T

        async def start() -> Token:
            token = (await store.load(run_id)).node("a").token
            await store.apply([Claim(run_id, "a", token, "w", now + 10)], now)
            return token

        broken = {"type": "E", "message": "m"}
        await store.apply([Fail(run_id, "a", await start(), broken)], now)
        now += 1000
        await store.apply([Wake(run_id, "a", (await store.load(run_id)).node("a").token)], now)
        for _ in range(max_crashes):
            token = await start()
            now += 1000
            await store.apply([Reap(run_id, "a", token, max_crashes)], now)
        error = (await store.load(run_id)).node("a").error
        assert error == {"type": "worker_lost", "message": f"its worker died {said}"}

    async def test_an_unknown_node_does_not_affect_transitions_applied_with_it(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, SINGLE)
        token = decision.dispatch[0].token
        moves: list[Transition] = [
            Claim(run_id, "a", token, "w", T + 10),
            Complete(run_id, "ghost", token, 1),
            Complete(run_id, "a", token, 1),
        ]
        decisions = await store.apply(moves, T)
        assert [bool(decided) for decided in decisions] == [True, False, True]


class TestEventLog:
    async def test_a_watcher_gets_every_event_once_in_order_until_the_run_ends(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, CHAIN)

        async def watch() -> list[int]:
            return [event.seq async for event in store.watch(run_id)]

        watcher = asyncio.create_task(watch())
        for _ in range(2):
            await asyncio.sleep(0)
            decision = await run_node(store, run_id, decision)
        assert decision.ended
        seqs = await asyncio.wait_for(watcher, 10)
        assert seqs == list(range(1, (await store.load(run_id)).seq + 1))

    async def test_a_late_watcher_gets_every_event(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        await run_node(store, run_id, decision)
        types = [event.type async for event in store.watch(run_id)]
        assert types == [
            "run.created",
            "run.started",
            "node.queued",
            "node.started",
            "node.completed",
            "run.completed",
        ]

    async def test_a_watcher_resumes_after_the_event_it_names(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        await run_node(store, run_id, decision)
        assert [event.seq async for event in store.watch(run_id, after=4)] == [5, 6]
        assert [event.seq async for event in store.watch(run_id, after=6)] == []

    async def test_several_watchers_each_get_every_event(self, store: Store) -> None:
        run_id, decision = await create(store, CHAIN)

        async def watch(after: int) -> list[int]:
            return [event.seq async for event in store.watch(run_id, after)]

        watchers = [asyncio.create_task(watch(after)) for after in (0, 0, 3)]
        for _ in range(2):
            await asyncio.sleep(0)
            decision = await run_node(store, run_id, decision)
        whole, same, part = await asyncio.wait_for(asyncio.gather(*watchers), 10)
        assert whole == same == list(range(1, len(whole) + 1))
        assert part == whole[3:]

    async def test_a_failed_run_is_watched_until_its_last_node_has_finished(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, graph({"a": [], "b": []}))
        tokens = [order.token for order in decision.dispatch]
        claims = [
            Claim(run_id, name, token, "w", T + 10)
            for name, token in zip("ab", tokens, strict=True)
        ]
        await store.apply(claims, T)
        await store.apply([Fail(run_id, "a", tokens[0], {"type": "E", "message": "m"})], T)
        assert (await store.load(run_id)).status is RunStatus.FAILED
        watching = asyncio.create_task(read(store, run_id, 100))
        waiting = asyncio.create_task(store.wait(run_id))
        done, _ = await asyncio.wait({watching, waiting}, timeout=0.05)
        assert not done
        await store.apply([Complete(run_id, "b", tokens[1], "late")], T + 1)
        events = await asyncio.wait_for(watching, 10)
        assert events[-1].type == "node.completed"
        assert (await asyncio.wait_for(waiting, 10)).node("b").output == "late"

    async def test_a_watcher_continues_through_a_retry_and_sees_late_results(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, SINGLE)
        order = decision.dispatch[0]
        await store.apply([Claim(run_id, "a", order.token, "w", T + 10), Cancel(run_id)], T)
        await store.apply([Complete(run_id, "a", order.token, "late")], T)
        (retried,) = await store.apply([Retry(run_id)], T)
        await run_node(store, run_id, retried)
        types = [event.type async for event in store.watch(run_id)]
        assert types[types.index("run.cancelled") :] == [
            "run.cancelled",
            "result.refused",
            "run.retried",
            "node.queued",
            "node.started",
            "node.completed",
            "run.completed",
        ]

    async def test_an_unknown_run_cannot_be_watched(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await read(store, new_run_id(), 1)

    async def test_a_decision_keeps_its_own_events(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        await run_node(store, run_id, decision)
        assert [event.seq for event in decision.events] == [1, 2, 3]

    async def test_a_watcher_that_left_has_no_effect(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        assert len(await read(store, run_id, 2)) == 2
        await run_node(store, run_id, decision)
        assert (await store.wait(run_id)).finished


class TestWaiting:
    async def test_every_waiter_gets_the_outcome(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        waiters = [asyncio.create_task(store.wait(run_id)) for _ in range(3)]
        await asyncio.sleep(0)
        await run_node(store, run_id, decision, output=5)
        for run in await asyncio.wait_for(asyncio.gather(*waiters), 10):
            assert (run.status, run.node("a").output) == (RunStatus.COMPLETED, 5)

    async def test_waiting_for_a_finished_run_returns_immediately(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        await run_node(store, run_id, decision)
        assert (await asyncio.wait_for(store.wait(run_id), 10)).finished

    async def test_a_cancelled_wait_does_not_affect_other_waits(self, store: Store) -> None:
        run_id, decision = await create(store, SINGLE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.wait(run_id), 0.01)
        other = asyncio.create_task(store.wait(run_id))
        await asyncio.sleep(0)
        await run_node(store, run_id, decision)
        assert (await asyncio.wait_for(other, 10)).finished

    async def test_the_end_of_a_run_can_be_awaited_without_loading_the_run(
        self, store: Store
    ) -> None:
        run_id, decision = await create(store, SINGLE)
        ended = asyncio.create_task(store.ended(run_id))
        done, _ = await asyncio.wait({ended}, timeout=0.05)
        assert not done
        await run_node(store, run_id, decision)
        await asyncio.wait_for(ended, 10)
        await asyncio.wait_for(store.ended(run_id), 10)

    async def test_an_unknown_run_is_not_found(self, store: Store) -> None:
        for unknown in (store.wait, store.ended):
            with pytest.raises(NotFound):
                await unknown(new_run_id())

    async def test_a_wait_outlives_a_retry(self, store: Store) -> None:
        run_id, _ = await create(store, SINGLE)
        waiter = asyncio.create_task(store.wait(run_id))
        await asyncio.sleep(0)
        _, retried = await store.apply([Cancel(run_id), Retry(run_id)], T)
        await asyncio.sleep(0)
        await run_node(store, run_id, retried, output=2)
        assert (await asyncio.wait_for(waiter, 10)).node("a").output == 2


NO_READS: Facts = {"version": "1"}


class TestTheNodeCache:
    async def complete(
        self, store: Store, key: str, output: object, ttl: float, facts: Facts | None = NO_READS
    ) -> None:
        run_id, decision = await create(store, SINGLE)
        token = decision.dispatch[0].token
        moves = [
            Claim(run_id, "a", token, "w", T + 10),
            Complete(run_id, "a", token, output, Caching(key, ttl, facts)),
        ]
        await store.apply(moves, T)

    async def test_a_cached_output_is_found_until_it_expires(self, store: Store) -> None:
        key = new_run_id()
        await self.complete(store, key, {"x": 1}, ttl=60)
        for now in (T, T + 59.9):
            found = await store.recall(key, now)
            assert found is not None
            assert found.output["output"] == {"x": 1}
        assert await store.recall(key, T + 60) is None

    async def test_a_cached_none_output_is_found(self, store: Store) -> None:
        key = new_run_id()
        await self.complete(store, key, None, ttl=60)
        found = await store.recall(key, T)
        assert found is not None
        assert found.output["output"] is None

    async def test_an_unknown_key_finds_nothing(self, store: Store) -> None:
        assert await store.recall(new_run_id(), T) is None

    async def test_a_newer_cached_output_replaces_the_older(self, store: Store) -> None:
        key = new_run_id()
        for output in (1, 2):
            await self.complete(store, key, output, ttl=60)
        found = await store.recall(key, T)
        assert found is not None
        assert found.output["output"] == 2

    async def test_an_output_that_depends_on_params_is_cached_under_a_key_with_the_params(
        self, store: Store
    ) -> None:
        key = new_run_id()
        for who in ("alice", "bob"):
            facts = {"version": "1", "params": digest_of(who)}
            await self.complete(store, key, who, ttl=60, facts=facts)
        found = await store.recall(key, T)
        assert found is not None
        assert found.output == {"reads": ["params", "version"]}
        for who in ("alice", "bob"):
            facts = {"version": "1", "params": digest_of(who)}
            kept = await store.recall(entry_key(key, facts), T)
            assert kept is not None
            assert kept.output == {"output": who}

    async def test_an_output_without_known_inputs_is_not_cached(self, store: Store) -> None:
        key = new_run_id()
        await self.complete(store, key, 1, ttl=60, facts=None)
        assert await store.recall(key, T) is None

    async def test_a_refused_result_is_not_cached(self, store: Store) -> None:
        key = new_run_id()
        run_id, _ = await create(store, SINGLE)
        stale = Complete(run_id, "a", Token(1, 1, 7), "forged", Caching(key, 60.0, NO_READS))
        (decision,) = await store.apply([stale], T)
        assert not decision.changed
        assert await store.recall(key, T) is None
