"""The orchestrator of a set-up with several processes: all its state is in the shared store.

Any number of orchestrators run side by side, and none knows of the others. An action that one
repeats, or that two take at once, is refused by the rules the second time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.events import Event, Token
from dovetail.core.fork import plan_fork
from dovetail.core.items import item_name, split_name
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.step import first_events
from dovetail.core.text import counted, died_during
from dovetail.core.transitions import (
    NOTHING,
    TAKEN,
    Decision,
    Dispatch,
    Park,
    Reap,
    Retry,
    Submit,
    Transition,
    Wake,
)
from dovetail.engine.clock import Clock
from dovetail.engine.limits import TokenBucket
from dovetail.engine.ports import (
    FeedWriter,
    ParkedIndex,
    ParkedNode,
    QueueInspector,
    Result,
    RunObserver,
    SharedStore,
    Start,
    Store,
    TimerIndex,
    Transport,
)
from dovetail.engine.supervisor import bisect_failures, describe_error, run_every

Bury = Callable[[Start, str, str], Awaitable[None]]
"""Adds a dead letter: the start that is given up, its handler, and the reason."""


class CrashLimit:
    """Adds a dead letter for a node that crashed as many workers as it may.

    Only the orchestrator that gives the node up does it, so there is one dead letter at most.
    """

    def __init__(self, store: Store, bury: Bury, *, max_crashes: int) -> None:
        self._store = store
        self._bury = bury
        self._max_crashes = max_crashes

    async def reaped(self, start: Start, decision: Decision) -> None:
        lost = decision.events[0].data or {}
        if lost["crashes"] < self._max_crashes:
            return  # it is retried, or starts at most once: that proves nothing
        try:
            graph = (await self._store.load(start[0], outputs=False)).graph
        except NotFound:
            return
        reason = f"poison: {died_during(lost['crashes'], decision.events[0].attempt or 0)}"
        index = graph.index[split_name(start[1])[0]]
        await self._bury(start, graph.nodes[index].handler, reason)


WAKE_SECONDS = 0.1
PUNCTUAL_SECONDS = (0.001, 0.006)
"""How late a node is woken, so that not all orchestrators wake it at once."""
REAP_SECONDS = 1.0
MISSED_REAPS = 4
"""An orchestrator that missed so many reaps was away."""
SWEEP_SECONDS = 2.0
BATCH_SIZE = 500
MAX_NODES_LOGGED = 5
"""Lost nodes that one log line names."""
SUBMIT_BATCH_SIZE = 500
NODE_BATCH_SIZE = 64
"""Results that are applied before their effects are dispatched."""
MAX_RESULTS_PER_RUN = 256
"""Results of one run per batch: above that, the store does not take its fast path."""
MAX_RECONCILES = 16
MAX_NOTED_RUNS = 10_000
ALL_RUNS = 1_000_000
BACKLOG_SECONDS = 5.0
"""A run that is silent for so long beyond a lease is reconciled."""
HEARD_SECONDS = 1.0
"""A message this old has reached every process, though their clocks differ a little."""
MAX_SKEW_SECONDS = 5.0
"""How far apart the clocks of two machines may be."""

log = logging.getLogger("dovetail.orchestrator")


class DistributedOrchestrator:
    """Applies transitions and dispatches their effects; its timers outlive it."""

    def __init__(
        self,
        store: SharedStore,
        transport: Transport,
        timers: TimerIndex,
        traffic: QueueInspector,
        clock: Clock,
        *,
        lease_seconds: float,
        max_crashes: int,
        observer: RunObserver | None = None,
        reaped: Callable[[Start, Decision], Awaitable[None]] | None = None,
        older_run: Callable[[str], Awaitable[RunState]] | None = None,
        feed: FeedWriter | None = None,
    ) -> None:
        """`older_run` reads a run that was forked, wherever it is; by default from the store."""
        self._store = store
        self._older_run = older_run or store.load
        self._transport = transport
        self.timers = timers
        self._traffic = traffic
        self.observer = observer
        self._feed = feed
        self._reaped = reaped
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._max_crashes = max_crashes
        self._noted: dict[str, float] = {}
        """When a run's activity was last written to the timers."""
        self._dispatching: set[asyncio.Task[None]] = set()
        self._looked_at: float | None = None
        """When leases were last read, by the monotonic clock."""
        self._patient_until = 0.0

    async def submit(self, submit: Submit, now: float | None = None) -> None:
        await self.submit_many([submit], now)

    async def submit_many(self, submits: Sequence[Submit], now: float | None = None) -> None:
        """`now` is when they were accepted, if another process did that."""
        accepted = self._clock() if now is None else now
        if any(submit.forked_from and submit.reused is None for submit in submits):
            submits = [await self._with_outputs(submit) for submit in submits]
        before: asyncio.Task[None] | None = None
        for at in range(0, len(submits), SUBMIT_BATCH_SIZE):
            part = submits[at : at + SUBMIT_BATCH_SIZE]
            run_ids = [submit.run_id for submit in part]
            # Before the runs: if this process dies in between, the sweep finds no run, and no harm.
            noted = self._clock()
            _, decisions = await asyncio.gather(
                self.timers.moved(run_ids, noted, is_new=True),
                self._store.create_many(part, accepted),
            )
            if len(self._noted) >= MAX_NOTED_RUNS:
                self._noted.clear()
            self._noted.update(dict.fromkeys(run_ids, noted))
            if before is not None:
                await before
            before = asyncio.create_task(self._dispatch_created(part, decisions, accepted))
            # Runs that are created are dispatched, even if the next batch fails.
            self._dispatching.add(before)
            before.add_done_callback(self._dispatched)
        if before is not None:
            await before

    async def _with_outputs(self, submit: Submit) -> Submit:
        """A fork that another process accepted, with the outputs that it reuses. If the older run
        is gone, the fork reuses nothing: it was accepted, so it runs."""
        if submit.forked_from is None or submit.reused is not None:
            return submit
        try:
            older = await self._older_run(submit.forked_from)
        except (NotFound, BrokenRun) as problem:
            log.warning("run %s, a fork, reuses nothing: %s", submit.run_id, problem)
            return submit._replace(reused={})
        plan = plan_fork(older, submit, only=frozenset(submit.reuse))
        return submit._replace(reused=plan.reuse)

    def _dispatched(self, following: asyncio.Task[None]) -> None:
        self._dispatching.discard(following)
        if not following.cancelled():
            following.exception()  # the caller that awaits it gets it

    async def _dispatch_created(
        self, submits: Sequence[Submit], decisions: Sequence[Decision], accepted: float
    ) -> None:
        made = list(zip(submits, decisions, strict=True))
        begun = [submit for submit, decision in made if decision and not decision.ended]
        # Created by another process, which may have died before it notified the observer.
        others = [submit.run_id for submit, decision in made if not decision]
        decided = [(submit.run_id, decision) for submit, decision in made]
        news = {one.run_id: first_events(one, accepted) for one, decision in made if decision}
        # Before a node of a fork can end: the process that ends it does not know the first event.
        forks = [one.run_id for one in begun if one.forked_from is not None]
        await self._add_to_feed({run_id: news.pop(run_id) for run_id in forks})
        work: list[Awaitable[object]] = [self._dispatch(decided, are_new=True, news=news)]
        if self.observer is not None:
            if begun:
                work.append(self.observer.begun(begun, accepted))
            if others:
                work.append(self.observer.moved(others, others))
        await asyncio.gather(*work, self._add_to_feed({}, others))
        # A fork is not made by a script that a repeated call gets the same reply from.
        for submit, decision in made:
            if submit.forked_from is not None and not decision:
                await self.reconcile_run(submit.run_id)

    async def apply(self, moves: Sequence[Transition], *, durable: bool = False) -> list[Decision]:
        return await self._apply(moves, durable=durable)

    async def apply_each(self, moves: Sequence[Transition]) -> list[Decision]:
        """The same, each by itself: a transition that cannot be applied decides nothing."""
        again = False

        async def apply(some: Sequence[Transition]) -> Sequence[Decision]:
            nonlocal again
            had_before, again = again, True
            return await self._apply(some, again=had_before)

        return list(await bisect_failures(apply, moves, _left_alone))

    async def _apply(
        self, moves: Sequence[Transition], *, durable: bool = False, again: bool = False
    ) -> list[Decision]:
        now = self._clock()
        if reopened := [move.run_id for move in moves if isinstance(move, Retry)]:
            # Before the retry: a run that has ended is in no index, so if this process died, no
            # other one would find it. Ahead in time, for processes whose clock is ahead.
            await self.timers.moved(reopened, now + MAX_SKEW_SECONDS)
        breaks = self._store.breaks
        decisions = await self._store.apply(moves, now, durable=durable)
        decided = list(zip([move.run_id for move in moves], decisions, strict=True))
        await self._dispatch(decided, now)
        if again or self._store.breaks != breaks:
            await self._reconcile_refused(decided)
        return decisions

    async def dispatch_effects(self, decisions: Iterable[Decision]) -> None:
        await self._dispatch([("", decision) for decision in decisions])

    async def _dispatch(
        self,
        decided: Sequence[tuple[str, Decision]],
        since: float | None = None,
        *,
        are_new: bool = False,
        news: dict[str, list[Event]] | None = None,
    ) -> None:
        """Dispatch the effects of decisions. `since` is a time before they were made: any later
        activity of a run is another process's. Of runs that `are_new`, the observer gets only
        ends, and `news` has their first events."""
        now = self._clock()
        news = {} if news is None else news
        unclear: list[str] = []
        dispatches: list[Dispatch] = []
        wakes: list[tuple[float, Wake]] = []
        moved: dict[str, None] = {}
        turned: dict[str, None] = {}
        ended: dict[str, Event | None] = {}
        work: list[Awaitable[object]] = []
        for run_id, decision in decided:
            if decision is TAKEN:
                moved[run_id] = None
                continue
            dispatches += decision.dispatch
            wakes += decision.wake
            work += [self._transport.stop(order) for order in decision.stop]
            if run_id and decision:
                happened = [event for event in decision.events if event.node is None]
                if are_new:  # its first events are in `news`
                    happened = [event for event in happened if event.seq > 2]
                if happened:
                    news.setdefault(run_id, []).extend(happened)
                if decision.ended:
                    # A run that failed fast ends without an event when its last node does.
                    ended[run_id] = decision.events[-1] if decision.events else None
                    if not happened:
                        unclear.append(run_id)
                    continue
                moved[run_id] = None
                if happened and not are_new:
                    turned[run_id] = None
        if wakes:
            work.append(self.timers.delay(wakes))
        if still := [
            run_id for run_id in moved if run_id not in ended and self._is_news(run_id, now)
        ]:
            work.append(self.timers.moved(still, now))
        every_move = self.observer is not None and self.observer.every_move and not are_new
        if self.observer is not None and (turned or ended or (every_move and moved)):
            work.append(self.observer.moved([*moved, *ended], [*turned], ended))
        if news or unclear:
            work.append(self._add_to_feed(news, unclear))
        if dispatches:
            work.append(self._publish(dispatches))
        if len(work) == 1:
            await work[0]
        else:
            await asyncio.gather(*work)
        if ended:
            # After the observer: a caller that waits for the end then finds the run in the lists.
            seen = now if since is None else since
            await asyncio.gather(self.timers.ended(ended, seen), self._traffic.announce(ended))
        await self._store.sent()

    async def _add_to_feed(
        self, news: Mapping[str, Sequence[Event]], unclear: Sequence[str] = ()
    ) -> None:
        """Add these events, and whatever the logs of unclear runs have."""
        if self._feed is not None:
            if news:
                await self._feed.append(news)
            if unclear:
                await self._feed.catch_up(unclear)

    async def _publish(self, dispatches: Sequence[Dispatch]) -> None:
        if transitions := await self._transport.publish(dispatches):
            await self.apply(transitions)

    def _is_news(self, run_id: str, now: float) -> bool:
        """Whether the timers need a run's activity: once a second is enough, counted from its
        creation."""
        noted = self._noted.get(run_id) or self._store.made_at(run_id) or 0.0
        if now - noted < HEARD_SECONDS:
            return False
        if len(self._noted) >= MAX_NOTED_RUNS:
            self._noted.clear()
        self._noted[run_id] = now
        return True

    # ── duties ───────────────────────────────────────────────────────────────────────────

    async def apply_results(self, results: Sequence[Result], *, again: bool = False) -> bool:
        """Apply results of handlers; returns whether more followed than their own completion.

        `again`: another orchestrator had read them, and may have died while applying them.
        """
        if len(results) <= NODE_BATCH_SIZE:
            return await self._apply_part(results, again=again)
        await self._store.look_up({result.run_id for result in results})
        parts = []
        for part in _parts(results):
            parts.append(asyncio.create_task(self._apply_part(part, again=again)))
            await asyncio.sleep(0)  # it is sent, and workers can begin
        return any(await asyncio.gather(*parts))

    async def _apply_part(self, results: Sequence[Result], *, again: bool) -> bool:
        now = self._clock()
        breaks = self._store.breaks
        decisions = await self._store.apply(results, now)
        decided = list(zip([result.run_id for result in results], decisions, strict=True))
        await self._dispatch(decided, now)
        if again or self._store.breaks != breaks:
            await self._reconcile_refused(decided)
        return any(
            decision.ended or len(decision.changed) > 1 or decision.dispatch
            for decision in decisions
        )

    async def _reconcile_refused(self, decided: Sequence[tuple[str, Decision]]) -> None:
        """A refused transition may have been decided before, by a process that died at once."""
        for run_id in {run_id for run_id, decision in decided if not decision}:
            await self.reconcile_run(run_id)

    async def wake_due(self) -> None:
        due = await self.timers.due(self._clock(), BATCH_SIZE)
        if due:
            await self.apply_each([wake for _, wake in due])
            await self.timers.woken(due)

    async def _wake_in_time(self) -> None:
        """Wake each node at its own time, for ever. Nodes parked by a rate limit come one by one:
        of two that came together, one would be parked again and its token lost."""
        while True:
            _, soonest = await asyncio.gather(self.wake_due(), self.timers.next_due())
            pause = WAKE_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311
            if soonest is not None:
                # Not all orchestrators at the same moment: the first does it for all.
                own = random.uniform(*PUNCTUAL_SECONDS)  # noqa: S311
                pause = min(pause, max(0.0, soonest - self._clock()) + own)
            await asyncio.sleep(pause)

    async def reap(self) -> None:
        """Reap nodes whose worker has not renewed its lease in time."""
        now = self._clock()  # once: a run that is read is due later, so each run has its turn
        run_ids = await self.timers.expired(now, BATCH_SIZE)
        if self._was_away():
            return
        while run_ids:
            if not await self._all_heard():
                return
            try:
                await bisect_failures(
                    partial(self._reap_in, now=now), run_ids, self._leave_unreaped
                )
            except BaseException:  # stopped, or failed: another orchestrator goes on at once
                await self.timers.lease(run_ids, now)
                raise
            self._looked_at = monotonic()
            if len(run_ids) < BATCH_SIZE:
                return
            run_ids = await self.timers.expired(now, BATCH_SIZE)

    def _was_away(self) -> bool:
        """Whether the store was unreachable for long, or this process was stopped, until a moment
        ago. Live workers could not renew their leases either, and need a moment."""
        before, self._looked_at = self._looked_at, monotonic()
        long = max(self._lease_seconds / 2, MISSED_REAPS * REAP_SECONDS)
        if before is not None and self._looked_at - before > long:
            self._patient_until = self._looked_at + self._lease_seconds / 2
        return self._looked_at < self._patient_until

    async def _leave_unreaped(self, run_id: str, problem: Exception) -> Sequence[str]:
        log.error("run %s: its lost nodes cannot be reaped: %s", run_id, describe_error(problem))
        return ()

    async def _reap_in(self, run_ids: Sequence[str], now: float) -> Sequence[str]:
        """Reap the lost nodes of these runs, and set when to read their leases again.

        The mark comes before the reading: a worker writes its lease before it claims, and that
        removes the mark. (The sweep finds a lease that was written before the mark and claimed
        after the reading.) If this process dies after the mark, another one reads the leases two
        leases later.
        """
        mark = now + 2 * self._lease_seconds
        await self.timers.put_off(run_ids, mark)
        held = await self._store.running(run_ids)
        reaped = await self._reap([start for start, until in held if until <= now])
        looks: dict[str, float] = {}
        for start, until in held:
            if start not in reaped:
                # A refused reap is tried again next time.
                at = until if until > now else now + REAP_SECONDS / 2
                looks[start[0]] = min(at, looks.get(start[0], math.inf))
        for run_id, at in looks.items():
            await self.timers.lease([run_id], at)
        await self.timers.released([one for one in run_ids if one not in looks], mark)
        return run_ids

    async def _reap(self, starts: Sequence[Start]) -> set[Start]:
        """Which of these starts were lost. One that was renewed or has ended meanwhile was not."""
        reaped = set()
        lost: dict[str, list[Start]] = {}
        for at in range(0, len(starts), BATCH_SIZE):
            part = starts[at : at + BATCH_SIZE]
            decisions = await self.apply_each([Reap(*start, self._max_crashes) for start in part])
            for start, decided in zip(part, decisions, strict=True):
                if decided:
                    reaped.add(start)
                    for event in decided.events[:1]:
                        lost.setdefault(str((event.data or {}).get("worker")), []).append(start)
                    if self._reaped is not None:
                        await self._reaped(start, decided)
        for worker, its_starts in lost.items():
            log.warning("lost worker %s: %s", worker, lost_nodes(its_starts))
        return reaped

    async def _all_heard(self) -> bool:
        """Whether every result sent a while ago is applied: a node must not run again because its
        result waits for an orchestrator."""
        oldest = await self._traffic.oldest_result()
        return oldest is None or oldest > self._clock() - HEARD_SECONDS

    async def sweep(self) -> None:
        """Reconcile runs that are silent, or whose tasks were lost."""
        now = self._clock()
        lost = await self._traffic.lost()
        if lost:
            await self.sweep_all(lost)
        waiting: dict[str, float | None] = {}
        before = now - self._lease_seconds - BACKLOG_SECONDS
        while silent := await self.timers.idle(before, BATCH_SIZE):
            for some in _some_at_a_time(silent):
                await asyncio.gather(*(self._try_to_reconcile(*run, waiting) for run in some))
            if len(silent) < BATCH_SIZE:
                return

    async def sweep_all(self, lost: Sequence[str] | None = None) -> None:
        """Reconcile every run that has not ended. Publish again the tasks of these handlers, or all
        tasks that are not known to wait."""
        known: dict[str, float | None] = {} if lost is None else dict.fromkeys(lost)
        for some in _some_at_a_time(await self.timers.idle(math.inf, ALL_RUNS)):
            waiting = dict(known)
            await asyncio.gather(*(self._try_to_reconcile(*run, waiting) for run in some))

    async def _try_to_reconcile(
        self, run_id: str, since: float, waiting: dict[str, float | None]
    ) -> None:
        """Reconcile a run; one that fails has its next turn once it was silent again."""

        async def reconcile(run_ids: Sequence[str]) -> Sequence[str]:
            await self.reconcile_run(run_id, since, waiting)
            return run_ids

        async def leave(run_id: str, problem: Exception) -> Sequence[str]:
            log.error("run %s cannot be reconciled: %s", run_id, describe_error(problem))
            await self.timers.moved([run_id], self._clock())
            return ()

        await bisect_failures(reconcile, [run_id], leave)

    async def reconcile_run(
        self,
        run_id: str,
        since: float | None = None,
        waiting: dict[str, float | None] | None = None,
    ) -> None:
        """Re-derive the outstanding work of a run from its state: tasks, timers, leases.

        `since` is the run's last activity, from the timers. `waiting` caches the oldest waiting
        task of each handler. Without them every task is sent again.
        """
        now = self._clock()
        run = await self._find(run_id)
        if run is not None:
            await self._note_changes(run_id)
        if run is None or run.finished:
            await self.timers.ended([run_id], now if since is None else since)
            return
        await self.timers.moved([run_id], now)
        await self._dispatch([(run_id, await self._store.settle_pending(run_id, now))], now)
        orders = Decision()
        wakes = []
        waits = []
        leases = []
        for index, item, name, node in _nodes_and_items(run):
            spec = run.graph.nodes[index]
            if node.phase is Phase.EXPANDING:
                orders.dispatch.append(Dispatch(run, index, node.token))
            elif node.phase is Phase.PUBLISHED:
                if await self._is_lost(spec.handler, since, waiting):
                    orders.dispatch.append(Dispatch(run, index, node.token, item))
            elif node.until is not None:
                wakes.append((node.until, Wake(run_id, name, node.token)))
                if node.phase is Phase.PARKED:
                    waits.append(ParkedNode(node.until, spec.resource_tag or "", wakes[-1][1]))
            elif node.status is NodeStatus.RUNNING and node.lease_until is not None:
                leases.append(node.lease_until)
        if leases:
            await self.timers.lease([run_id], min(leases))
        await self.timers.add_parked(waits)
        orders.wake = wakes
        await self._dispatch([("", orders)])

    async def announce_end(self, run_id: str) -> None:
        """Announce the end of a run that was ended by force."""
        ended: dict[str, Event | None] = {run_id: None}
        await self._note_changes(run_id)
        await self.timers.ended(ended, self._clock())
        await self._traffic.announce(ended)

    async def _note_changes(self, run_id: str) -> None:
        """Have the lists and the feed follow a run, whatever was missed."""
        if self.observer is not None:
            await self.observer.moved([run_id], [run_id])
        await self._add_to_feed({}, [run_id])

    async def _is_lost(
        self, handler: str, since: float | None, waiting: dict[str, float | None] | None
    ) -> bool:
        """Whether no message of a node that was published before `since` can still wait.

        Workers read in order: if every waiting task is younger, this one was read or is lost. To
        send it twice is harmless; to send a long backlog repeatedly would make it longer.
        """
        if since is None or waiting is None:
            return True
        if handler not in waiting:
            waiting[handler] = await self._traffic.oldest_waiting(handler)
        oldest = waiting[handler]
        return oldest is None or oldest > since + HEARD_SECONDS

    async def _find(self, run_id: str) -> RunState | None:
        try:
            return await self._store.load(run_id, outputs=False)
        except NotFound:
            return None

    async def run(self) -> None:
        """Every duty but the results, for ever."""
        # A store that has just started was away before, for an unknown time.
        missing = self._lease_seconds / 2 - await self.timers.age()
        self._patient_until = max(self._patient_until, monotonic() + missing)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_in_time())
            for duty, seconds in (
                (self.reap, REAP_SECONDS),
                (self.sweep, SWEEP_SECONDS),
            ):
                group.create_task(run_every(seconds, duty))


def _nodes_and_items(run: RunState) -> Iterator[tuple[int, int | None, str, NodeState]]:
    """The nodes of a run, and the items in flight of mapped nodes: index, item, name, state."""
    for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
        yield index, None, spec.id, node
        if node.items is not None:
            for item, state in sorted(node.items.in_flight.items()):
                yield index, item, item_name(spec.id, item), state


async def _left_alone(move: Transition, problem: Exception) -> Sequence[Decision]:
    log.error("run %s: %s fails: %s", move.run_id, type(move).__name__, describe_error(problem))
    return [NOTHING]


def _parts(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Batches of results, with those of one run together: their effects are then seen at once."""
    by_run: dict[str, list[Result]] = {}
    for result in results:
        by_run.setdefault(result.run_id, []).append(result)
    part: list[Result] = []
    for own in by_run.values():
        for at in range(0, len(own), MAX_RESULTS_PER_RUN):
            part += own[at : at + MAX_RESULTS_PER_RUN]
            if len(part) >= NODE_BATCH_SIZE:
                yield part
                part = []
    if part:
        yield part


def lost_nodes(starts: Sequence[Start]) -> str:
    """`its lease on 2 nodes ran out: a of run 12ab34 (attempt 1), b of run 12ab34 (attempt 2)`."""
    first = sorted(starts)[:MAX_NODES_LOGGED]
    named = ", ".join(
        f"{node} of run {run_id[:6]} (attempt {token.attempt})" for run_id, node, token in first
    )
    more = f" and {len(starts) - MAX_NODES_LOGGED:,} more" if len(starts) > MAX_NODES_LOGGED else ""
    return f"its lease on {counted(len(starts), 'node')} ran out: {named}{more}"


def _some_at_a_time(runs: Sequence[tuple[str, float]]) -> Iterator[Sequence[tuple[str, float]]]:
    """A reconcile takes several roundtrips and has the run in memory."""
    return (runs[at : at + MAX_RECONCILES] for at in range(0, len(runs), MAX_RECONCILES))


# ── parked nodes ──────────────────────────────────────────────────────────────────────────────


PARKED_SECONDS = 1.0
MAX_TIME_SHARE = 0.1
"""A look at a line of a hundred thousand takes its time: so much of ours, and no more."""
LATE_SECONDS, LATE_SHARE = 1.0, 0.1
"""A node is rescheduled if it would start so many seconds too late, and by such a share of its
wait: it is an event in the log of its run."""
IN_LINE = (Phase.PARKED, Phase.PUBLISHED)
"""A node that was woken and has not asked for its token yet comes before the others."""


class StartPhases(Protocol):
    async def phases(self, starts: Sequence[tuple[str, str, Token]]) -> list[Phase | None]:
        """What these starts wait for; None of one that is no longer queued."""
        ...


class Buckets(Protocol):
    async def look(self, tag: str, now: float) -> TokenBucket: ...
    async def pull_back(self, tag: str, until: float, now: float) -> None: ...


class ParkedRescheduler:
    """Nodes parked by a shared rate limit. When nodes ahead of them are cancelled, or the limit is
    raised, they are rescheduled earlier, in the same order.

    Nothing here takes a token, so no mistake starts a node too early. Any number of processes may
    do it at once.
    """

    def __init__(
        self,
        parked: ParkedIndex,
        store: StartPhases,
        buckets: Buckets,
        clock: Clock,
        apply: Callable[[Sequence[Transition]], Awaitable[object]],
    ) -> None:
        self._parked = parked
        self._store = store
        self._buckets = buckets
        self._clock = clock
        self._apply = apply

    async def run(self) -> None:
        """Every second, for ever."""
        while True:
            began = monotonic()
            await self.look()
            pause = max(PARKED_SECONDS, (monotonic() - began) / MAX_TIME_SHARE)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311

    async def look(self) -> None:
        """Reschedule the nodes whose time is later than their place in the queue needs."""
        waits = await self._parked.parked(self._clock(), LATE_SECONDS)
        if not waits:
            return
        phases = await bisect_failures(
            self._store.phases, [wait.wake for wait in waits], _taken_for_gone
        )
        lines: dict[str, list[tuple[ParkedNode, Phase | None]]] = {}
        for wait, phase in zip(waits, phases, strict=True):
            lines.setdefault(wait.tag, []).append((wait, phase))
        for tag, line in lines.items():
            await self._move_up(tag, [one for one in line if one[1] in IN_LINE])
        gone = [wait for wait, phase in zip(waits, phases, strict=True) if phase not in IN_LINE]
        for at in range(
            0, len(gone), BATCH_SIZE
        ):  # last: if this process dies, another one finds them again
            await self._parked.remove_parked(gone[at : at + BATCH_SIZE])

    async def _move_up(self, tag: str, line: Sequence[tuple[ParkedNode, Phase | None]]) -> None:
        now = self._clock()
        bucket = await self._buckets.look(tag, now)
        booked = bucket.booked
        times = bucket.rebook(len(line), now)
        if booked > bucket.booked + LATE_SECONDS:
            await self._buckets.pull_back(tag, bucket.booked, now)
        late = [
            wait._replace(at=time)
            for (wait, phase), time in zip(line, times, strict=True)
            if phase is Phase.PARKED
            and wait.at - time > max(LATE_SECONDS, LATE_SHARE * (wait.at - now))
        ]
        for first in range(0, len(late), BATCH_SIZE):
            some = late[first : first + BATCH_SIZE]
            await self._parked.add_parked(some)
            await self._apply([Park(*wait.wake, wait.at) for wait in some])


async def _taken_for_gone(wake: Wake, problem: Exception) -> Sequence[Phase | None]:
    log.error("run %s, node %s cannot be rescheduled: %s", *wake[:2], describe_error(problem))
    return [None]
