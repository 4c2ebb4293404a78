"""The whole set-up as one state: a run, the agenda, the messages, every process, and bad luck.

`successors` gives every step that any process could take next, and every fault that there is luck
left for: a death, a message that is lost, doubled or read late, a lease that ends although its
worker lives, a call that was executed and timed out, a Redis that forgets its newest writes. States
are packed into one number, each part being a number of a table; the tables also remember what
follows from what, so that most steps are a few look-ups. Processes of a kind are alike, so a crew
is sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dovetail.core.dag import Graph
from dovetail.core.events import Token

from . import processes
from .processes import IDLE, Message, Process, Program
from .runs import NO_RUN, Move, Orders, Runs, Start

FAULTS = {
    "kill": "a process dies between two of its steps, and another one takes its place",
    "double": "a message is delivered once more, at any time",
    "lose": "a message is lost",
    "expire": "a lease ends although its worker lives, or its result is on its way",
    "repeat": "a call is executed, times out, and is made again",
    "rollback": "Redis dies and comes back without its newest writes",
    "haste": "a duty that waits until nothing was heard for long comes while others are at work",
    "fail": "a handler raises",
    "park": "a rate limit has no token",
    "cancel": "a caller cancels the run",
    "retry": "a caller retries the run, or from one of its nodes",
}
"""What happens only so often: bad luck, and what a caller wants."""
_NAMES = tuple(FAULTS)
MOST_COPIES = 2
"""Of one message: a third one could do nothing that the second cannot."""

Label = tuple[Any, ...]
Step = tuple[Label, int, bool]
"""What happens, the state after it, and whether it needs no luck, good or bad."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A graph, how many processes there are, and how often what may happen."""

    name: str
    graph: Graph
    luck: Mapping[str, int]
    orchestrators: int = 2
    workers: int = 2
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What handlers may return, by node: `yes` unless said."""
    rerun_from: tuple[str, ...] = ()
    """A retry is of the whole run, or from one of these."""
    cached: tuple[str, ...] = ()
    """Nodes whose output may be found in the node cache."""
    every_order: bool = False
    """Operations of different processes mix in every order, also where it should not matter."""
    sweeps: bool = True
    """Without, whatever is not followed at once is lost: only for runs without faults."""


class Timers(NamedTuple):
    active: int = 0
    """One more than the epoch in which the run was last heard of, which may be the one that
    a process is about to open; 0 if it is not on the agenda."""
    made: bool = False
    """What was accepted is made, as its acceptance says."""
    leased: bool = False
    """The run is on the list of those to look at for leases that have ended."""
    marked: bool = False
    """A process has put that off to look, and none has asked for a look since. The mark of one
    is not distinguished from another's here: more is taken off the list than really would be."""
    delayed: frozenset[Start] = frozenset()


class Broken(Exception):
    """A promise does not hold after this step."""

    def __init__(self, label: Label, what: str) -> None:
        super().__init__(what)
        self.label = label
        self.what = what


class Table:
    """Values as numbers, in the order they were first seen."""

    def __init__(self, *first: Any) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}
        for value in first:
            self.number(value)

    def number(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            assert number <= MASK, "more values than a state has room for"
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> Any:
        return self.values[number]


BITS = 20
MASK = (1 << BITS) - 1
RUN, AGENDA, QUEUE, CREW, WORKERS, LUCK, KEPT = (place * BITS for place in range(7))
_ROLES = {CREW: "orchestrator", WORKERS: "worker"}
LOCAL = frozenset(("reads", "wakes", "wants to", "returns", "raises", "renews"))
"""Steps after which a process knows what to do, and no other process knows that it does."""
UNDISTURBED = frozenset(("publish", "send", "moved", "made", "ack"))
"""Operations that come to the same before and after whatever another process does meanwhile."""


class World:
    def __init__(self, scenario: Scenario, *, oracle: bool = True, nonces: bool = True) -> None:
        self.scenario = scenario
        self.runs = Runs(scenario.graph, oracle=oracle, nonces=nonces)
        self._agendas = Table(Timers())
        self._queues = Table(())
        self._processes = Table(IDLE)
        self._crews = Table()
        self._lucks = Table()
        self._kept = Table(None)
        self._idle_orchestrators = self._crew([0] * scenario.orchestrators)
        self._idle_workers = self._crew([0] * scenario.workers)
        self._at_work: set[int] = set()
        """Processes that know what to do next."""
        self._changed_crews: dict[tuple[int, int, int], int] = {}
        self._spent: dict[tuple[int, str], int | None] = {}
        self._advances: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
        self._readings: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
        self._duties: dict[tuple[int, int], list[tuple[Label, str | None, int]]] = {}
        self._starts: dict[int, frozenset[Start]] = {}
        self._running_only: dict[int, bool] = {}
        self._first_undisturbed: dict[int, int] = {}
        self._twice: dict[int, Start | None] = {}

    def first(self) -> int:
        """A run was accepted, and its maker is about to make it."""
        maker = self._processes.number(Process(None, processes.submit()))
        crew = self._crew([maker] + [0] * (self.scenario.orchestrators - 1))
        luck = self._lucks.number(tuple(self.scenario.luck.get(name, 0) for name in _NAMES))
        return crew << CREW | self._idle_workers << WORKERS | luck << LUCK

    def is_done(self, state: int) -> bool:
        """The run has ended, and nothing about it is left anywhere."""
        run, agenda = state & MASK, state >> AGENDA & MASK
        return (
            self.runs.facts[run].finished
            and state >> QUEUE & MASK == 0
            and state >> CREW & MASK == self._idle_orchestrators
            and state >> WORKERS & MASK == self._idle_workers
            and self._agendas[agenda] == Timers(made=True)
        )

    # ── every next step ──────────────────────────────────────────────────────────────────

    def successors(self, state: int) -> Iterator[Step]:
        """In a reduced search a process whose next operations no other could disturb goes first."""
        crew, workers = state >> CREW & MASK, state >> WORKERS & MASK
        if not self.scenario.every_order:
            for team, shift in ((crew, CREW), (workers, WORKERS)):
                process = self._undisturbed(team)
                if process:
                    yield from self._goes_on(state, shift, process, False)
                    yield from self._kills(state, shift, process)
                    return
        quiet = (
            state >> QUEUE & MASK == 0
            and crew == self._idle_orchestrators
            and self._only_runs(workers)
        )
        kills = self._spend(state >> LUCK & MASK, "kill") is not None
        for team, shift in ((crew, CREW), (workers, WORKERS)):
            for process in dict.fromkeys(self._crews[team]):
                yield from self._goes_on(state, shift, process, quiet)
                if kills and process:
                    yield from self._kills(state, shift, process)
        if not self.scenario.every_order:
            yield from self._deaths_over_a_result(state)
        yield from self._nature(state)

    def _goes_on(self, state: int, shift: int, process: int, quiet: bool) -> Iterator[Step]:
        run, agenda, queue = state & MASK, state >> AGENDA & MASK, state >> QUEUE & MASK
        team, luck = state >> shift & MASK, state >> LUCK & MASK
        # What stays as it is: everything but the team, the run, the agenda, queue and luck.
        rest = state & ~(MASK | MASK << AGENDA | MASK << QUEUE | MASK << shift | MASK << LUCK)
        steps = self._steps(_ROLES[shift], process, run, agenda, queue, quiet)
        if not self.scenario.every_order and process not in self._at_work:
            steps = self._at_once(steps)
        for label, fault, after, run2, agenda2, queue2 in steps:
            luck2 = luck if fault is None else self._spend(luck, fault)
            if luck2 is None:
                continue
            team2 = self._replaced(team, process, after)
            if shift == WORKERS and run2 != run:
                self._check_holders(team2, run2, label)
            to = rest | run2 | agenda2 << AGENDA | queue2 << QUEUE | team2 << shift | luck2 << LUCK
            yield label, to, fault is None

    def _at_once(self, steps: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Who only made up its mind acts on it before anybody else does something."""
        for step in steps:
            label, fault, after, run, agenda, queue = step
            program = self._processes[after].program
            if label[1] not in LOCAL or program[0][0][0] != "apply":
                yield step
                continue
            for label2, fault2, after2, run2, *_ in self._advance(
                label[0], after, run, agenda, queue
            ):
                if fault is None or fault2 is None:
                    yield (*label, "and", *label2[1:]), fault or fault2, after2, run2, agenda, queue

    def _undisturbed(self, team: int) -> int:
        """The first process, if any, whose next operations do not depend on anybody's."""
        known = self._first_undisturbed.get(team)
        if known is None:
            known = 0
            for number in self._crews[team]:
                program = self._processes[number].program
                if program and all(op[0] in UNDISTURBED for op in program[0]):
                    known = number
                    break
            self._first_undisturbed[team] = known
        return known

    def _steps(
        self, who: str, process: int, run: int, agenda: int, queue: int, quiet: bool
    ) -> Iterator[tuple[Any, ...]]:
        """What it may do next: label, fault, itself after it, then run, agenda and queue."""
        if process:
            for label, fault, after, run2, agenda2, queue2 in self._advance(
                who, process, run, agenda, queue
            ):
                yield (
                    label,
                    fault,
                    after,
                    run if run2 is None else run2,
                    agenda if agenda2 is None else agenda2,
                    queue if queue2 is None else queue2,
                )
            return
        for label, fault, after, queue2 in self._read(who, queue):
            yield label, fault, after, run, agenda, queue2
        if who == "orchestrator":
            for label, hasty, after in self._due(run, agenda):
                yield label, None if quiet else hasty, after, run, agenda, queue
            for label, fault, after in self._commands(run):
                yield label, fault, after, run, agenda, queue

    # ── an idle process finds something to do ────────────────────────────────────────────

    def _read(self, who: str, queue: int) -> list[tuple[Any, ...]]:
        known = self._readings.get((who, queue))
        if known is None:
            known = self._readings[who, queue] = list(self._messages(who, self._queues[queue]))
        return known

    def _messages(self, who: str, queue: tuple[Message, ...]) -> Iterator[tuple[Any, ...]]:
        for message in dict.fromkeys(queue):
            if (message[0] == "result") is not (who == "orchestrator"):
                continue
            left = self._queues.number(_without(queue, message))
            if message[0] == "result":
                process = Process(message, processes.take_in(message))
                yield (who, "reads", message), None, self._number(process), left
                continue
            process = Process(message, processes.take(message[1]))
            yield (who, "reads", message), None, self._number(process), left
            if self.runs.spec(message[1][0]).resource_tag is not None:
                process = Process(message, processes.park(message[1]))
                yield (who, "has no token for", message), "park", self._number(process), left

    def _due(self, run: int, agenda: int) -> list[tuple[Label, str | None, int]]:
        known = self._duties.get((run, agenda))
        if known is None:
            known = self._duties[run, agenda] = [
                (("orchestrator", *why), hasty, self._number(Process(None, program)))
                for why, hasty, program in self._duty(run, self._agendas[agenda])
            ]
        return known

    def _duty(self, run: int, agenda: Timers) -> Iterator[tuple[Label, str | None, Program]]:
        """And what it costs if it does not wait until nothing was heard for long."""
        facts = self.runs.facts[run]
        for start in sorted(agenda.delayed):
            yield ("wakes", start), None, processes.wake_due(start)
        # One whose nodes all run and are held would only be written down again as it is.
        if agenda.leased and (facts.expired or not facts.running):
            yield ("reaps",), None if facts.expired else "haste", processes.reap()
        if agenda.active and self.scenario.sweeps:
            noted = agenda.active - 1
            # A note that is newer than the run is of a process that makes or retries it just now.
            hasty = "haste" if facts.known and noted <= facts.epoch else "never"
            yield ("sweeps",), hasty, processes.look_after(facts, noted)
        elif facts.known and facts.forgotten and not facts.finished:
            # After a Redis that forgot, the indexes are made anew from all runs there are.
            yield ("mends",), "never", processes.look_after(facts, facts.epoch)
        if not agenda.made and self.scenario.sweeps:
            yield ("finds it unmade",), "haste", processes.make_up(facts)

    def _commands(self, run: int) -> Iterator[tuple[Label, str, int]]:
        facts = self.runs.facts[run]
        if run == NO_RUN:
            return
        moves: list[tuple[str, Move]] = []
        if not facts.finished:
            moves.append(("cancel", ("cancel",)))
        if facts.final:
            moves += [
                ("retry", ("retry", place))
                for place in (None, *(self.runs.places[name] for name in self.scenario.rerun_from))
            ]
        for fault, move in moves:
            process = Process(None, processes.command(move, facts.epoch))
            yield ("somebody", "wants to", move), fault, self._number(process)

    # ── a busy one goes on ───────────────────────────────────────────────────────────────

    def _advance(
        self, who: str, process: int, run: int, agenda: int, queue: int
    ) -> list[tuple[Any, ...]]:
        stage = self._processes[process].program[0]
        by_run = stage[0][0] in ("apply", "run", "ack", "verdicts", "settle", "look", "running")
        key = (process, run) if by_run else (process, agenda, queue)
        known = self._advances.get(key)
        if known is None:
            made = self._by_run(process, run) if by_run else self._by_rest(process, agenda, queue)
            known = self._advances[key] = [((who, *label), *rest) for label, *rest in made]
        return known

    def _by_run(self, number: int, run: int) -> Iterator[tuple[Any, ...]]:
        """Operations that look at the run, or move it. They stand alone in their stage."""
        (op,), *rest_ = self._processes[number].program
        hand, rest = self._processes[number].hand, tuple(rest_)
        facts = self.runs.facts[run]
        name, *about = op

        def then(program: Program, hand: Message | None = hand) -> int:
            return self._number(Process(hand, program))

        match name:
            case "apply":
                move, kind = about
                outcome = self.runs.apply(run, move)
                if outcome.wrong is not None:
                    raise Broken(("somebody", "applies", op), outcome.wrong)
                after = then(processes.go_on(move, kind, outcome, rest))
                yield ("applies", move), None, after, outcome.run, None, None
                # A claim that is asked for again is granted again to the same worker.
                if outcome.run != run and kind != "claim":
                    second = self.runs.apply(outcome.run, move)
                    after = then(processes.go_on(move, kind, second, rest))
                    yield ("repeats", move), "repeat", after, second.run, None, None
            case "verdicts":
                orders: Orders = about[0]
                if facts.pending:
                    verdicts = self.runs.verdicts(run)
                    program = processes.settling(facts.epoch, verdicts, orders)
                else:
                    program = processes.follow(orders)
                yield ("asks the conditions",), None, then(program + rest), None, None, None
            case "settle":
                epoch, verdicts, orders = about
                outcome = self.runs.apply(run, ("settle", epoch, verdicts))
                if outcome.wrong is not None:
                    raise Broken(("somebody", "applies", op), outcome.wrong)
                program = processes.settled(orders, outcome.orders)
                reported = (
                    "settles",
                    *((self.runs.names[place], said) for place, said in verdicts),
                )
                yield reported, None, then(program + rest), outcome.run, None, None
            case "look":
                program = processes.look_after(facts, facts.epoch)
                yield op, None, then(program + rest), None, None, None
            case "running":
                program = processes.reap_in(facts)
                yield op, None, then(program + rest), None, None, None
            case "ack":
                self._check_settled(hand, run, rest)
                yield op, None, then(rest, None), None, None, None
            case "run":
                yield from self._handler(about[0], facts, then)

    def _handler(self, start: Start, facts: Any, then: Any) -> Iterator[tuple[Any, ...]]:
        if start not in facts.running:  # a stop has reached it, or its renewal was refused
            yield ("is stopped", start), None, then(()), None, None, None
        if start in facts.expired:
            yield ("renews", start), None, then(processes.renew(start)), None, None, None
        kinds = self.scenario.outputs.get(self.runs.spec(start[0]).id, ("yes",))
        for kind in kinds:
            program = processes.report(start, kind)
            yield ("returns", start, kind), None, then(program), None, None, None
        program = processes.report(start, "fail")
        yield ("raises", start), "fail", then(program), None, None, None

    def _by_rest(self, number: int, agenda: int, queue: int) -> Iterator[tuple[Any, ...]]:
        """Operations on the agenda and the messages, any that go out together."""
        hand, (stage, *rest) = self._processes[number]
        book: Timers = self._agendas[agenda]
        for op in stage:
            left = tuple(other for other in stage if other != op)
            after = self._number(Process(hand, ((left,) if left else ()) + tuple(rest)))
            name, about = op[0], op[1] if len(op) > 1 else None
            if name == "publish" and self.runs.is_mapped(about[0]):
                expand = (("apply", ("expand", *about), "command"),)
                program = (expand, *((left,) if left else ()), *rest)
                renders = self._number(Process(hand, program))
                yield ("renders the list", about), None, renders, None, None, None
                continue
            if name in ("publish", "send"):
                message = about if name == "send" else ("task", about)
                yield op, None, after, None, None, self._sent(queue, message)
                if name == "publish" and self.runs.spec(about[0]).id in self.scenario.cached:
                    found = (("apply", ("recall", *about), "command"),)
                    program = (found, *((left,) if left else ()), *rest)
                    answered = self._number(Process(hand, program))
                    yield ("finds cached", about), None, answered, None, None, None
                continue
            yield op, None, after, None, self._agendas.number(write(book, name, about)), None

    # ── nature, and what is not supposed to happen ───────────────────────────────────────

    def _nature(self, state: int) -> Iterator[Step]:
        run, luck = state & MASK, state >> LUCK & MASK
        messages = self._queues[state >> QUEUE & MASK]
        facts = self.runs.facts[run]
        for start in facts.running:
            if start in facts.expired:
                continue
            held = (
                start in self._held_by(state >> WORKERS & MASK)
                or start in self._held_by(state >> CREW & MASK)
                or any(message[:2] == ("result", start) for message in messages)
            )
            luck2 = self._spend(luck, "expire") if held else luck
            if luck2 is not None:
                to = _with(state, RUN, self.runs.expire(run, start))
                label = ("time", "passes over the lease of", start)
                yield label, _with(to, LUCK, luck2), not held
        if (luck2 := self._spend(luck, "lose")) is not None:
            for message in dict.fromkeys(messages):
                left = self._queues.number(_without(messages, message))
                yield ("lost", message), _with(_with(state, QUEUE, left), LUCK, luck2), False
        if (luck2 := self._spend(luck, "double")) is not None:
            for message in dict.fromkeys(messages):
                more = self._sent(state >> QUEUE & MASK, message)
                yield ("doubled", message), _with(_with(state, QUEUE, more), LUCK, luck2), False
        if (luck2 := self._spend(luck, "rollback")) is not None and run != NO_RUN:
            redis = state & (1 << CREW) - 1  # the run, the agenda and the messages
            kept = state >> KEPT & MASK
            if not kept:
                label = ("Redis", "writes no more to its disk")
                yield label, _with(state, KEPT, self._kept.number(redis)), False
            else:
                before = self._kept[kept]
                back = _with(before, RUN, self.runs.forget(before & MASK, run))
                to = _with(_with(state ^ redis | back, KEPT, 0), LUCK, luck2)
                yield ("Redis", "dies and comes back as it was then"), to, False

    def _deaths_over_a_result(self, state: int) -> Iterator[Step]:
        """In a reduced search no worker holds a result that is read and not applied."""
        luck = self._spend(state >> LUCK & MASK, "kill")
        messages = self._queues[state >> QUEUE & MASK]
        if luck is None:
            return
        for message in dict.fromkeys(messages):
            if message[0] == "result" and not message[3]:
                left = (*_without(messages, message), (*message[:3], True))
                queue = self._queues.number(tuple(sorted(left)))
                label = ("an orchestrator", "dies before it applies", message)
                yield label, _with(_with(state, QUEUE, queue), LUCK, luck), False

    def _kills(self, state: int, shift: int, process: int) -> Iterator[Step]:
        luck = self._spend(state >> LUCK & MASK, "kill")
        if luck is None:
            return
        queue = state >> QUEUE & MASK
        team = self._replaced(state >> shift & MASK, process, 0)
        dead = _with(_with(state, shift, team), LUCK, luck)
        queues = {self._handed_back(process, queue)}
        if shift == WORKERS:  # what it had read is read by another worker, or by none
            queues.add(queue)
        for left in queues:
            yield ("kill", _ROLES[shift], process), _with(dead, QUEUE, left), False

    def _handed_back(self, process: int, queue: int) -> int:
        """What a dead process had read and not settled is given to another one."""
        message = self._processes[process].hand
        if message is None:
            return queue
        if message[0] == "result":
            message = (*message[:3], True)
        return self._sent(queue, message)

    # ── promises that are about several parts ────────────────────────────────────────────

    def _check_settled(self, hand: Message | None, run: int, rest: Program) -> None:
        """A message is settled only once the run's own state has taken it over.

        (A Redis that forgot its newest writes has forgotten that, too.)
        """
        if hand is None or self.runs.may_happen_again(run, hand[1]):
            return
        facts = self.runs.facts[run]
        needed = facts.running if hand[0] == "result" else facts.published
        # A node that was parked may have been woken: its message has been sent anew.
        if hand[1] in needed and (hand[0] == "result" or rest):
            raise Broken(("a process", "ack", hand), "a message was settled that the run needs")

    def _check_holders(self, workers: int, run: int, label: Label) -> None:
        if workers not in self._twice:
            running = [
                processes.start_of(process)
                for process in (self._processes[number] for number in self._crews[workers])
                if processes.runs_handler(process)
            ]
            twice = [start for start in running if running.count(start) > 1]
            self._twice[workers] = twice[0] if twice else None
        again = self._twice[workers]
        if again is not None and not self.runs.may_happen_again(run, again):
            name = self.runs.names[again[0]]
            raise Broken(label, f"{name}: two workers run the same start {again[1]}")

    # ── parts as numbers ─────────────────────────────────────────────────────────────────

    def _number(self, process: Process) -> int:
        number = self._processes.number(process if process.program else IDLE)
        if number and process.program[0][0][0] != "run":
            self._at_work.add(number)
        return number

    def _crew(self, numbers: list[int]) -> int:
        return self._crews.number(tuple(sorted(numbers)))

    def _replaced(self, crew: int, process: int, after: int) -> int:
        key = (crew, process, after)
        known = self._changed_crews.get(key)
        if known is None:
            numbers = list(self._crews[crew])
            numbers[numbers.index(process)] = after
            known = self._changed_crews[key] = self._crew(numbers)
        return known

    def _held_by(self, crew: int) -> frozenset[Start]:
        known = self._starts.get(crew)
        if known is None:
            found = set()
            for number in self._crews[crew]:
                process = self._processes[number]
                start = processes.start_of(process)
                if start is not None:
                    found.add(start)
                if process.hand is not None and process.hand[0] == "result":
                    found.add(process.hand[1])
            known = self._starts[crew] = frozenset(found)
        return known

    def _only_runs(self, workers: int) -> bool:
        known = self._running_only.get(workers)
        if known is None:
            found = [self._processes[number].program for number in self._crews[workers]]
            known = all(not program or program[0][0][0] == "run" for program in found)
            self._running_only[workers] = known
        return known

    def _sent(self, queue: int, message: Message) -> int:
        kept = self._queues[queue]
        if kept.count(message) >= MOST_COPIES:
            return queue
        return self._queues.number(tuple(sorted((*kept, message))))

    def _spend(self, luck: int, fault: str) -> int | None:
        key = (luck, fault)
        if key not in self._spent:
            self._spent[key] = None
            if fault in FAULTS and self._lucks[luck][_NAMES.index(fault)]:
                left = list(self._lucks[luck])
                left[_NAMES.index(fault)] -= 1
                self._spent[key] = self._lucks.number(tuple(left))
        return self._spent[key]

    # ── to read ──────────────────────────────────────────────────────────────────────────

    def show(self, state: int) -> str:
        agenda: Timers = self._agendas[state >> AGENDA & MASK]
        queue = self._queues[state >> QUEUE & MASK]
        parts = [self.runs.show(state & MASK)]
        if queue:
            parts.append("messages " + ", ".join(map(self._words, queue)))
        if not agenda.active:
            parts.append("not active")
        if agenda.leased:
            parts.append("leased, put off" if agenda.marked else "leased")
        if agenda.delayed:
            parts.append("delayed " + ", ".join(map(self._words, sorted(agenda.delayed))))
        return "; ".join(parts)

    def tell(self, label: Label) -> str:
        if label[0] == "kill":
            process: Process = self._processes[label[2]]
            doing = [self._words(op) for stage in process.program[:1] for op in stage]
            return f"KILL {label[1]} before: {', '.join(doing)}"
        return self._words(label)

    def _words(self, thing: Any) -> str:
        match thing:
            case (int() as place, Token() as token):
                return f"{self.runs.names[place]} {token.epoch}.{token.attempt}"
            case (str() as kind, int() as place, Token() as token):
                return f"{kind} {self._words((place, token))}"
            case ("result", start, kind, bool() as again):
                return f"result {self._words(start)} {kind}{' again' if again else ''}"
            case ("retry", int() as place):
                return f"retry from {self.runs.names[place]}"
            case ("apply", move, _):
                return self._words(move)
            case ("settle" | "verdicts" as name, *_):
                return str(name)
            case tuple():
                return " ".join(filter(None, map(self._words, thing)))
        return "" if thing is None else str(thing)


def write(book: Timers, name: str, about: Any) -> Timers:
    """The agenda after one operation."""
    match name:
        case "moved":
            return book._replace(active=max(book.active, about + 1))
        case "ended":
            # A retry may have opened another epoch since this was decided: it is not ended.
            if book.active > about + 1:
                return book
            return book._replace(active=0, leased=False, marked=False)
        case "made":
            return book._replace(made=True)
        case "lease":
            return book._replace(leased=True, marked=False)
        case "put_off":
            return book._replace(marked=book.leased)
        case "released":
            # Who claimed since the mark has lowered it, and must be missed if it dies.
            return book._replace(leased=False, marked=False) if book.marked else book
        case "delay":
            return book._replace(delayed=book.delayed | {about})
        case "woken":
            return book._replace(delayed=book.delayed - {about})
    raise ValueError(f"the agenda knows nothing of '{name}'")


def _with(state: int, part: int, number: int) -> int:
    return state & ~(MASK << part) | number << part


def _without(queue: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    place = queue.index(message)
    return queue[:place] + queue[place + 1 :]
