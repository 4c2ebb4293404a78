"""A node that killed every worker it was given to is told of where refused messages are.

Only whoever decided that it is given up tells of it, so it is told once; one who dies before that
leaves it to the run, which says so in any case. What it must not know: where it is told.

The orchestrator of a set-up with many processes: what it must remember, all of them can see.

Any number of them run side by side, all duties in each, and none knows of the others. Whatever
one does twice, or two do at once, the rules refuse the second time. What it must not know: how a
handler runs, or any rule.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic

from dovetail.core.errors import NotFound
from dovetail.core.events import Event
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.text import counted, died_during
from dovetail.core.transitions import (
    NOTHING,
    TAKEN,
    Decision,
    Dispatch,
    Reap,
    Retry,
    Submit,
    Transition,
    Wake,
)
from dovetail.engine.clock import Clock
from dovetail.engine.ports import (
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
"""Takes a start that nobody will be given any more, its handler, and why."""


class CrashLimit:
    def __init__(self, store: Store, bury: Bury, *, max_crashes: int) -> None:
        self._store = store
        self._bury = bury
        self._max_crashes = max_crashes

    async def reaped(self, start: Start, decision: Decision) -> None:
        lost = decision.events[0].data or {}
        if lost["crashes"] < self._max_crashes:
            return  # it is tried again, or may start but once: that proves nothing
        try:
            graph = (await self._store.load(start[0], outputs=False)).graph
        except NotFound:
            return
        reason = f"poison: {died_during(lost['crashes'], decision.events[0].attempt or 0)}"
        await self._bury(start, graph.nodes[graph.index[start[1]]].handler, reason)


WAKE_SECONDS = 0.1
PUNCTUAL_SECONDS = (0.001, 0.006)
"""How late a node is woken on purpose."""
REAP_SECONDS = 1.0
MISSED_LOOKS = 4
"""Who comes so late to look at leases was away."""
SWEEP_SECONDS = 2.0
BATCH_SIZE = 500
MOST_NAMED = 5
"""So many lost nodes are named in a line of the log."""
TOGETHER = 500
NODE_BATCH_SIZE = 64
"""Results that are taken in before what follows from them is sent out."""
MOST_OF_A_RUN = 256
"""Results of one run in one part. A store has its bounds, beyond which it takes its time."""
LOOKED_AFTER = 16
"""Runs at once."""
MOST_NOTED = 10_000
EVER, EVERYBODY = float("inf"), 1_000_000
BACKLOG_SECONDS = 5.0
"""Beyond its lease a run may be silent for so long before somebody looks whether it is stuck."""
HEARD_SECONDS = 1.0
"""What was told so long ago should be known everywhere, by clocks that are nearly the same."""
MOST_SKEW_SECONDS = 5.0
"""So far apart the clocks of two machines may be, at the very most."""

log = logging.getLogger("dovetail.orchestrator")


class DistributedOrchestrator:
    """Applies what happened and sends out what follows, with timers that outlive it."""

    def __init__(
        self,
        store: SharedStore,
        transport: Transport,
        agenda: TimerIndex,
        traffic: QueueInspector,
        clock: Clock,
        *,
        lease_seconds: float,
        max_crashes: int,
        notices: RunObserver | None = None,
        reaped: Callable[[Start, Decision], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._transport = transport
        self.agenda = agenda
        self._traffic = traffic
        self.notices = notices
        self._reaped = reaped
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._max_crashes = max_crashes
        self._noted: dict[str, float] = {}
        """When the agenda was last told that a run has moved."""
        self._following: set[asyncio.Task[None]] = set()
        self._looked_at: float | None = None
        """When leases were last looked at, by a clock that nobody sets."""
        self._patient_until = 0.0

    async def submit(self, submit: Submit, now: float | None = None) -> None:
        await self.submit_many([submit], now)

    async def submit_many(self, submits: Sequence[Submit], now: float | None = None) -> None:
        """`now` is when they were accepted, if that was somewhere else."""
        accepted = self._clock() if now is None else now
        before: asyncio.Task[None] | None = None
        for at in range(0, len(submits), TOGETHER):
            part = submits[at : at + TOGETHER]
            run_ids = [submit.run_id for submit in part]
            # Before the runs: if we die in between, the sweep looks for a run that is not there.
            noted = self._clock()
            _, decisions = await asyncio.gather(
                self.agenda.moved(run_ids, noted, is_new=True),
                self._store.create_many(part, accepted),
            )
            if len(self._noted) >= MOST_NOTED:
                self._noted.clear()
            self._noted.update(dict.fromkeys(run_ids, noted))
            if before is not None:
                await before
            before = asyncio.create_task(self._follow_made(part, decisions, accepted))
            # What is made is followed, also if what comes after it cannot be.
            self._following.add(before)
            before.add_done_callback(self._followed)
        if before is not None:
            await before

    def _followed(self, following: asyncio.Task[None]) -> None:
        self._following.discard(following)
        if not following.cancelled():
            following.exception()  # who waits for it is told

    async def _follow_made(
        self, submits: Sequence[Submit], decisions: Sequence[Decision], accepted: float
    ) -> None:
        made = list(zip(submits, decisions, strict=True))
        begun = [submit for submit, decision in made if decision and not decision.ended]
        decided = [(submit.run_id, decision) for submit, decision in made]
        work: list[Awaitable[object]] = [self._follow(decided, are_new=True)]
        if self.notices is not None:
            if begun:
                work.append(self.notices.begun(begun, accepted))
            # Made by somebody else, who may be dead by now and have told nobody.
            if others := [submit.run_id for submit, decision in made if not decision]:
                work.append(self.notices.moved(others, others))
        await asyncio.gather(*work)

    async def apply(self, moves: Sequence[Transition], *, durable: bool = False) -> list[Decision]:
        return await self._apply(moves, durable=durable)

    async def apply_each(self, moves: Sequence[Transition]) -> list[Decision]:
        """The same; of one that cannot be applied nothing is decided, and the others are."""
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
            # Before it is done: a run that has ended is in no index, and if we die over it nobody
            # would know. Ahead, so that nobody whose clock is ahead takes its end for the last.
            await self.agenda.moved(reopened, now + MOST_SKEW_SECONDS)
        breaks = self._store.breaks
        decisions = await self._store.apply(moves, now, durable=durable)
        decided = list(zip([move.run_id for move in moves], decisions, strict=True))
        await self._follow(decided, now)
        if again or self._store.breaks != breaks:
            await self._look_after_refused(decided)
        return decisions

    async def follow(self, decisions: Iterable[Decision]) -> None:
        await self._follow([("", decision) for decision in decisions])

    async def _follow(
        self,
        decided: Sequence[tuple[str, Decision]],
        since: float | None = None,
        *,
        are_new: bool = False,
    ) -> None:
        """`since` is from before it was decided: what moves a run later than that is not ours.
        Of runs that `are_new`, only what has ended already is told here."""
        now = self._clock()
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
                if decision.ended:
                    # A run that failed at once ends without a word when its last node does.
                    ended[run_id] = decision.events[-1] if decision.events else None
                    continue
                moved[run_id] = None
                if not are_new and any(event.node is None for event in decision.events):
                    turned[run_id] = None
        if wakes:
            work.append(self.agenda.delay(wakes))
        if still := [
            run_id for run_id in moved if run_id not in ended and self._is_news(run_id, now)
        ]:
            work.append(self.agenda.moved(still, now))
        every_move = self.notices is not None and self.notices.every_move and not are_new
        if self.notices is not None and (turned or ended or (every_move and moved)):
            work.append(self.notices.moved([*moved, *ended], [*turned], ended))
        if dispatches:
            work.append(self._publish(dispatches))
        if len(work) == 1:
            await work[0]
        else:
            await asyncio.gather(*work)
        if ended:
            # After the notices: whoever waited for the end then finds the run in the lists.
            seen = now if since is None else since
            await asyncio.gather(self.agenda.ended(ended, seen), self._traffic.announce(ended))
        await self._store.sent()

    async def _publish(self, dispatches: Sequence[Dispatch]) -> None:
        if transitions := await self._transport.publish(dispatches):
            await self.apply(transitions)

    def _is_news(self, run_id: str, now: float) -> bool:
        """Whether the agenda should know that a run has moved: to the second is enough. Who made
        it has noted it, too."""
        noted = self._noted.get(run_id) or self._store.made_at(run_id) or 0.0
        if now - noted < HEARD_SECONDS:
            return False
        if len(self._noted) >= MOST_NOTED:
            self._noted.clear()
        self._noted[run_id] = now
        return True

    # ── duties ───────────────────────────────────────────────────────────────────────────

    async def take_in(self, results: Sequence[Result], *, again: bool = False) -> bool:
        """Results of handlers; whether anything followed from them but that they are noted.

        `again`: somebody had them before, and may have died over them.
        """
        if len(results) <= NODE_BATCH_SIZE:
            return await self._take_part(results, again=again)
        await self._store.look_up({result.run_id for result in results})
        parts = []
        for part in _parts(results):
            parts.append(asyncio.create_task(self._take_part(part, again=again)))
            await asyncio.sleep(0)  # it goes out, and others can begin with it
        return any(await asyncio.gather(*parts))

    async def _take_part(self, results: Sequence[Result], *, again: bool) -> bool:
        now = self._clock()
        breaks = self._store.breaks
        decisions = await self._store.apply(results, now)
        decided = list(zip([result.run_id for result in results], decisions, strict=True))
        await self._follow(decided, now)
        if again or self._store.breaks != breaks:
            await self._look_after_refused(decided)
        return any(decision.ended or len(decision.changed) > 1 for decision in decisions)

    async def _look_after_refused(self, decided: Sequence[tuple[str, Decision]]) -> None:
        """They may have been decided before, and nobody has followed."""
        for run_id in {run_id for run_id, decision in decided if not decision}:
            await self.look_after(run_id)

    async def wake_due(self) -> None:
        due = await self.agenda.due(self._clock(), BATCH_SIZE)
        if due:
            await self.apply_each([wake for _, wake in due])
            await self.agenda.woken(due)

    async def _wake_in_time(self) -> None:
        """Each at its own time, for ever: those that wait for the tokens of a rate limit come one
        after the other, and of two that came together one would be sent away, its token lost."""
        while True:
            _, soonest = await asyncio.gather(self.wake_due(), self.agenda.next_due())
            pause = WAKE_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311
            if soonest is not None:
                # Not all orchestrators at the same moment: the first does it for all.
                own = random.uniform(*PUNCTUAL_SECONDS)  # noqa: S311
                pause = min(pause, max(0.0, soonest - self._clock()) + own)
            await asyncio.sleep(pause)

    async def reap(self) -> None:
        """Nodes whose worker was not heard of for longer than its lease."""
        now = self._clock()  # once: what is looked at is due later, so each run has its turn
        run_ids = await self.agenda.expired(now, BATCH_SIZE)
        if self._was_away():
            return
        while run_ids:
            if not await self._all_heard():
                return
            try:
                await bisect_failures(
                    partial(self._reap_in, now=now), run_ids, self._leave_unreaped
                )
            except BaseException:  # we are stopped, or cannot go on: others need not wait that long
                await self.agenda.lease(run_ids, now)
                raise
            self._looked_at = monotonic()
            if len(run_ids) < BATCH_SIZE:
                return
            run_ids = await self.agenda.expired(now, BATCH_SIZE)

    def _was_away(self) -> bool:
        """Whether the store could not be asked for long, or we were stopped, and it is not yet
        over for long: workers that live could not say so either, and need a moment."""
        before, self._looked_at = self._looked_at, monotonic()
        long = max(self._lease_seconds / 2, MISSED_LOOKS * REAP_SECONDS)
        if before is not None and self._looked_at - before > long:
            self._patient_until = self._looked_at + self._lease_seconds / 2
        return self._looked_at < self._patient_until

    async def _leave_unreaped(self, run_id: str, problem: Exception) -> Sequence[str]:
        log.error("run %s cannot be asked for lost nodes: %s", run_id, describe_error(problem))
        return ()

    async def _reap_in(self, run_ids: Sequence[str], now: float) -> Sequence[str]:
        """Reap what was lost in these runs, and say when to look at them again.

        The mark before the reading: who claims what we have not read says so before its claim, and
        then the mark stands no more. (One who said so before the mark, and whose claim still came
        after the reading, is found by the sweep.) Should we die after the mark, another looks two
        leases later.
        """
        mark = now + 2 * self._lease_seconds
        await self.agenda.put_off(run_ids, mark)
        held = await self._store.running(run_ids)
        reaped = await self._reap([start for start, until in held if until <= now])
        looks: dict[str, float] = {}
        for start, until in held:
            if start not in reaped:
                # What was refused, for whatever reason, is for the next time.
                at = until if until > now else now + REAP_SECONDS / 2
                looks[start[0]] = min(at, looks.get(start[0], EVER))
        for run_id, at in looks.items():
            await self.agenda.lease([run_id], at)
        await self.agenda.released([one for one in run_ids if one not in looks], mark)
        return run_ids

    async def _reap(self, starts: Sequence[Start]) -> set[Start]:
        """Which of these were lost; who was renewed or has ended meanwhile was not."""
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
        """Whether everything that was told a while ago is taken in: a node shall not run again
        because its result has to wait for an orchestrator."""
        oldest = await self._traffic.oldest_result()
        return oldest is None or oldest > self._clock() - HEARD_SECONDS

    async def sweep(self) -> None:
        """Runs that nothing was heard of, or whose tasks are lost: is something missing?"""
        now = self._clock()
        lost = await self._traffic.lost()
        if lost:
            await self.sweep_all(lost)
        waiting: dict[str, float | None] = {}
        before = now - self._lease_seconds - BACKLOG_SECONDS
        while silent := await self.agenda.idle(before, BATCH_SIZE):
            for some in _some_at_a_time(silent):
                await asyncio.gather(*(self._try_to_look_after(*run, waiting) for run in some))
            if len(silent) < BATCH_SIZE:
                return

    async def sweep_all(self, lost: Sequence[str] | None = None) -> None:
        """Look after every run that has not ended; publish again what these handlers wait for,
        or everything that is not known to wait."""
        known: dict[str, float | None] = {} if lost is None else dict.fromkeys(lost)
        for some in _some_at_a_time(await self.agenda.idle(EVER, EVERYBODY)):
            waiting = dict(known)
            await asyncio.gather(*(self._try_to_look_after(*run, waiting) for run in some))

    async def _try_to_look_after(
        self, run_id: str, since: float, waiting: dict[str, float | None]
    ) -> None:
        """The same; what cannot be looked after has its next turn once it was silent again."""

        async def look(run_ids: Sequence[str]) -> Sequence[str]:
            await self.look_after(run_id, since, waiting)
            return run_ids

        async def leave(run_id: str, problem: Exception) -> Sequence[str]:
            log.error("run %s cannot be looked after: %s", run_id, describe_error(problem))
            await self.agenda.moved([run_id], self._clock())
            return ()

        await bisect_failures(look, [run_id], leave)

    async def look_after(
        self,
        run_id: str,
        since: float | None = None,
        waiting: dict[str, float | None] | None = None,
    ) -> None:
        """Make everything that is outstanding of a run known again, from the run itself.

        `since` is when it last moved, as the agenda has it; `waiting` keeps of each handler the
        oldest task that waits. Without them every task is sent again.
        """
        now = self._clock()
        run = await self._find(run_id)
        if run is not None and self.notices is not None:
            await self.notices.moved([run_id], [run_id])
        if run is None or run.finished:
            await self.agenda.ended([run_id], now if since is None else since)
            return
        await self.agenda.moved([run_id], now)
        await self._follow([(run_id, await self._store.settle_pending(run_id, now))], now)
        orders = Decision()
        wakes = []
        waits = []
        leases = []
        for place, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
            if node.phase is Phase.PUBLISHED:
                if await self._is_lost(spec.handler, since, waiting):
                    orders.dispatch.append(Dispatch(run, place, node.token))
            elif node.until is not None:
                wakes.append((node.until, Wake(run_id, spec.id, node.token)))
                if node.phase is Phase.PARKED:
                    waits.append(ParkedNode(node.until, spec.resource_tag or "", wakes[-1][1]))
            elif node.status is NodeStatus.RUNNING and node.lease_until is not None:
                leases.append(node.lease_until)
        if leases:
            await self.agenda.lease([run_id], min(leases))
        await self.agenda.line_up(waits)
        orders.wake = wakes
        await self._follow([("", orders)])

    async def over(self, run_id: str) -> None:
        """Tell of the end of a run that no rule has brought about."""
        ended: dict[str, Event | None] = {run_id: None}
        if self.notices is not None:
            await self.notices.moved([run_id], [run_id])
        await self.agenda.ended(ended, self._clock())
        await self._traffic.announce(ended)

    async def _is_lost(
        self, handler: str, since: float | None, waiting: dict[str, float | None] | None
    ) -> bool:
        """Whether no message of a node that was published before `since` can still wait.

        Workers read in order: if all that waits is younger, its own was read or is lost. To send
        it twice is harmless; to send a long backlog again and again would make it longer.
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
        # A store that has just started was away before, for how long nobody here can say.
        missing = self._lease_seconds / 2 - await self.agenda.age()
        self._patient_until = max(self._patient_until, monotonic() + missing)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_in_time())
            for duty, seconds in (
                (self.reap, REAP_SECONDS),
                (self.sweep, SWEEP_SECONDS),
            ):
                group.create_task(run_every(seconds, duty))


async def _left_alone(move: Transition, problem: Exception) -> Sequence[Decision]:
    log.error("run %s: %s fails: %s", move.run_id, type(move).__name__, describe_error(problem))
    return [NOTHING]


def _parts(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Those of a run in as few as can be: what follows from them together is seen at once."""
    by_run: dict[str, list[Result]] = {}
    for result in results:
        by_run.setdefault(result.run_id, []).append(result)
    part: list[Result] = []
    for own in by_run.values():
        for at in range(0, len(own), MOST_OF_A_RUN):
            part += own[at : at + MOST_OF_A_RUN]
            if len(part) >= NODE_BATCH_SIZE:
                yield part
                part = []
    if part:
        yield part


def lost_nodes(starts: Sequence[Start]) -> str:
    """`its lease on 2 nodes ran out: a of run 12ab34, b of run 12ab34`."""
    first = sorted(starts)[:MOST_NAMED]
    named = ", ".join(f"{node} of run {run_id[:6]}" for run_id, node, _ in first)
    more = f" and {len(starts) - MOST_NAMED:,} more" if len(starts) > MOST_NAMED else ""
    return f"its lease on {counted(len(starts), 'node')} ran out: {named}{more}"


def _some_at_a_time(runs: Sequence[tuple[str, float]]) -> Iterator[Sequence[tuple[str, float]]]:
    """To look after one takes several roundtrips, and all of it in memory."""
    return (runs[at : at + LOOKED_AFTER] for at in range(0, len(runs), LOOKED_AFTER))
