"""The ports of the engine: what it asks of stores and transports, and what they promise.

A promise says what holds after a crash, a repeat or a late arrival. One contract suite tests every
store and every transport against them.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from dovetail.core.aliases import AliasTarget
from dovetail.core.audit.replay import JournalEntry
from dovetail.core.caching import Caching, Facts
from dovetail.core.dag import Graph
from dovetail.core.effects import COMPLETED
from dovetail.core.events import Event, Token
from dovetail.core.feed import FeedEntry, FeedPosition
from dovetail.core.node_logs import LogChunk, StoredChunk
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.templates import Deferred
from dovetail.core.transitions import (
    Complete,
    Decision,
    Dispatch,
    Fail,
    Progress,
    Stop,
    Submit,
    Transition,
    Wake,
)
from dovetail.core.webhooks import Notification


class Store(Protocol):
    """Keeps runs and moves them by the rules of the core."""

    async def create(self, submit: Submit, now: float) -> Decision:
        """Make a run and queue its first nodes; it is durable when this returns.

        Safe to repeat: a known id decides nothing.
        """
        ...

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        """Step runs by these transitions, in order; state and orders are saved together.

        One decision per transition. Safe to repeat: what is late, known, or of an unknown run
        or node decides nothing. With `durable` it returns when all of it survives what the
        store survives; without, that may come a little later, but never after anything that
        was applied later and is durable.
        """
        ...

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        """The run as it is now, to read. Raises `NotFound`.

        Without `outputs` they may be left out: a run may have more than fit into memory. With
        `room` only so many are read: each other one is an `OutputReference`, unless it is in the
        memory of this process anyway.
        """
        ...

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        """These outputs of a run that `load` gave, as JSON, in this order.

        Raises `StoreError` if they are not there any more: the run was retried since, or removed.
        """
        ...

    async def read_items(
        self, run: RunState, index: int, numbers: Sequence[int], max_bytes: int
    ) -> int:
        """Add to a run that `load` gave what that left out of these items of a mapped node: how
        they ended, and their outputs or references to them. Returns of how many: about `max_bytes`
        are read, and at least one item.

        Raises `StoreError` if they are not there any more.
        """
        ...

    def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Every event from `after` on, then new ones as they come; ends with the run."""
        ...

    async def wait(self, run_id: str) -> RunState:
        """Return the run once it has finished. Raises `NotFound`."""
        ...

    async def ended(self, run_id: str) -> None:
        """Return once the run has finished, without reading all of it. Raises `NotFound`."""
        ...

    async def recall(self, key: str, now: float) -> Cached | None:
        """The output that a `Complete` left under this cache key, unless it is too old."""
        ...


@dataclass(frozen=True, slots=True)
class Cached:
    output: Any


Key = tuple[str, str, str]
"""An idempotency key: its scope, itself, and the digest of what is asked under it."""


class KeyUsed(Exception):
    """Something was made under this idempotency key, or at this place of a batch, before."""

    def __init__(self, made: str, same_body: bool) -> None:
        super().__init__(made)
        self.made = made
        """The run or batch."""
        self.same_body = same_body
        """What was asked is what was asked then."""


class WorkflowVersion(NamedTuple):
    """What registering a definition made, or found."""

    name: str
    version: int
    created: bool


class Registered(NamedTuple):
    """One version of a registered workflow."""

    name: str
    version: int
    definition: int
    """The same number is the same content."""
    content: bytes
    created_at: float


class DoctorFinding(NamedTuple):
    """What a doctor found."""

    check: str
    ok: bool
    message: str
    fix: str = ""
    """What would help, if it is not well."""


class DurableStore(Store, Protocol):
    """A store that outlives its process and that several processes share.

    A run is *driven* by at most one of them: it hands the run's nodes to its workers. That is
    a matter of liveness only: another process that steps a run does no harm.
    """

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Decision]:
        """Make a batch and all its runs, or none of them; with what is still to be sent out.

        Raises `KeyUsed`.
        """
        ...

    async def made_under(self, key: Key) -> KeyUsed | None:
        """What `create` or `create_batch` would say of this key: there in any case, if the same
        was asked for, though its maker may have died over it."""
        ...

    async def owner_of(self, run_id: str) -> Literal["here", "elsewhere", "gone", "none"]:
        """Where its owner is: `gone` if the owner died, `none` if the run needs no owner."""
        ...

    async def graph(self, run_id: str) -> Graph:
        """The compiled definition of a run; its log need not be read. Raises `NotFound`."""
        ...

    async def orphans(self) -> list[str]:
        """The unfinished runs without an owner, oldest first."""
        ...

    async def adopt(
        self, run_ids: Iterable[str], now: float, max_crashes: int
    ) -> dict[str, Decision]:
        """Own those of these runs that have no owner, and return their outstanding effects.
        A run that cannot be read is left as it is."""
        ...

    async def repair(self, run_id: str, *, dry_run: bool = False) -> list[str]:
        """Make the state of a run what its log says; where the two differed, as sentences.

        Raises `NotFound`, or `BrokenRun` for a log that is damaged itself. Nothing is written if
        another process steps the run meanwhile: it is compared again.
        """
        ...

    async def end_damaged(self, run_id: str, why: str, now: float) -> RunState:
        """End a run that cannot be read, whatever is left of it; its log stays as it is.

        Raises `NotFound`, or `Conflict` for a run that has ended.
        """
        ...

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        """Delete the finished ones of these runs, with everything that belongs to them; returns
        the runs that this call deleted.

        A run that is not there, is not finished, or ended after that time, stays as it is. Of a
        deletion and a retry at the same moment, one wins. Nothing that arrives later for a deleted
        run brings it back. Safe to repeat after a crash.
        """
        ...

    async def reclaim_space(self) -> None:
        """Give the space of deleted runs back to the disk, where the store does not do it."""
        ...


class Driver(Protocol):
    """Creates runs, applies transitions and dispatches their effects."""

    async def submit(self, submit: Submit) -> None:
        """Make the run; returns when it cannot be lost any more. Raises `KeyUsed`."""
        ...

    async def apply(
        self, moves: Sequence[Transition], *, durable: bool = False
    ) -> list[Decision]: ...
    async def dispatch_effects(self, decisions: Iterable[Decision]) -> None:
        """Dispatch the effects of decisions that were made elsewhere."""
        ...


class Rates(Protocol):
    """The rate limits of all processes on a store, as rate per second and burst by tag."""

    async def all(self) -> dict[str, tuple[float, int]]: ...
    async def set(self, tag: str, rate: float, burst: int, by: Author) -> None:
        """For every process, from now on."""
        ...


class Author(NamedTuple):
    """Of a change that a history keeps: who made it, and when."""

    actor: str
    time: float


HistoryOf = Literal["workflow", "limit"]

Seen = Mapping[str, AliasTarget]
"""A workflow as its caller has seen it: its aliases, `latest` among them; none if it was not there.

A change that carries it is made only if the workflow is still so. Else `Changed` is raised, unless
all is already as the caller wants it.
"""


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs a listing has: newest first, without nodes, a page at a time."""

    status: str | None = None
    workflow: str | None = None
    batch: str | None = None
    limit: int = 50
    cursor: str | None = None
    max_result_bytes: int | None = None
    """A larger result is an `OutputReference` with its size alone."""
    q: str | None = None
    """The beginning of an id, a part of the workflow's name, or a text or number in the params."""
    created_after: str | None = None
    """A time of RFC 3339."""
    created_before: str | None = None


ALL_RUNS = RunQuery()


class DeadLetters(Protocol):
    """Messages that were refused as malformed or poison, and notifications that were given up."""

    async def dead_letters(self) -> list[dict[str, Any]]:
        """The newest first, in the fields of `GET /dead-letters`."""
        ...

    async def drop_dead_letter(self, letter_id: str) -> bool:
        """Whether it was there."""
        ...

    async def requeue_notification(self, letter_id: str, now: float) -> Notification | None:
        """Send the notification of a letter again, and drop the letter; None if the letter is not
        there, or has none."""
        ...


class RunTally(NamedTuple):
    """How many runs there are. A workflow's tally has its runs only."""

    by_status: dict[str, int]
    """A status without runs may be left out."""
    created: list[dict[str, int]]
    """By status, the runs that were created in each interval."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines of a run's log: in the order of their numbers, a page at a time."""

    node: str | None = None
    epoch: int | None = None
    attempt: int | None = None
    item: int | None = None
    level: str | None = None
    """This one and more severe ones; one of `core.node_logs.LEVELS`, in any case."""
    q: str | None = None
    """Words in the message, without regard to case."""
    after: int = 0
    """Only lines with a greater number."""
    limit: int = 1000


ALL_LINES = LogQuery()

MAX_LOG_PAGE_BYTES = 4 << 20
"""Of the chunks of a log that are read at once."""


class Records(Protocol):
    """What is kept beside runs, in the fields of the HTTP API."""

    async def register(
        self, name: str, sha256: str, content: bytes, by: Author, seen: Seen | None = None
    ) -> WorkflowVersion: ...
    async def target_of(self, name: str, version: int | str | None = None) -> AliasTarget:
        """What a version's number or an alias names; without one the latest version, always a
        version that is there. Raises `NotFound`."""
        ...

    async def registered(self, name: str, version: int | str | None = None) -> Registered: ...
    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]: ...
    async def workflows(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]: ...
    async def versions(self, name: str) -> dict[str, Any]: ...
    async def delete_workflow(self, name: str, by: Author, seen: Seen | None = None) -> None: ...
    async def delete_version(
        self, name: str, version: int | str, by: Author, seen: Seen | None = None
    ) -> int:
        """Returns its number. Raises `NotFound`, `Changed`, or `Conflict` while an alias names it,
        `latest` among them, or a run of it is not finished."""
        ...

    async def set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None = None
    ) -> dict[str, Any]: ...
    async def delete_alias(
        self, name: str, alias: str, by: Author, seen: Seen | None = None
    ) -> None:
        """Raises `NotFound`, `Changed`, or `Conflict` for `latest`."""
        ...

    async def history(
        self, of: HistoryOf, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """The changes of a workflow, also a deleted one, or of a rate limit; newest first. Each is
        written in the transaction of its change. Raises `NotFound` for a workflow that was never
        registered."""
        ...

    async def find_run(self, prefix: str) -> str: ...
    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        """Without regard to `q` and the times of creation: `Commands` searches."""
        ...

    async def count_runs(self, workflow: str | None, edges: Sequence[float]) -> RunTally:
        """All runs, and those created between each time of `edges` and the next. Where clocks
        differ, a run near an edge may be counted beside it."""
        ...

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]: ...
    async def receipt(self, run_id: str) -> dict[str, Any]:
        """What a trigger is answered with, from where it was accepted; see `receipt_view`."""
        ...

    async def entries(self, run_id: str, after: int = 0) -> list[JournalEntry] | None:
        """The journal of a run; None where only its events are kept."""
        ...

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Those after that number, in order; no more than `limit`."""
        ...

    async def logs(
        self,
        run_id: str,
        after: int = 0,
        *,
        node: str | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        item: int | None = None,
        max_bytes: int = MAX_LOG_PAGE_BYTES,
    ) -> list[StoredChunk]:
        """Chunks with lines after that number, in the order of their numbers.

        At least one, if there is one, and no more than `max_bytes` together. The first may begin
        with lines that are not after that number. Raises `NotFound`.
        """
        ...

    async def open_batch(
        self, batch_id: str, workflow: str, count: int, key: Key | None, now: float
    ) -> None: ...
    async def batch_number(self, batch_id: str) -> int: ...
    async def find_batch(self, prefix: str) -> str: ...
    async def batch_ids(
        self, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        """Newest first, and the cursor of the next page, if there is one."""
        ...

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]: ...
    async def limits(self) -> dict[str, tuple[float, int]]: ...
    async def set_limit(self, tag: str, rate: float, burst: int, by: Author) -> None: ...
    async def doctor(self) -> list[DoctorFinding]: ...


class Task(NamedTuple):
    """One start of a node or item, as a worker gets it."""

    run_id: str
    node_id: str
    token: Token
    handler: str
    config: dict[str, Any]
    params: dict[str, Any] | None
    """None if they are too large to travel: a handler that asks for them has them read then."""
    source: Dispatch | dict[str, Any] | None
    """The order that made it; from another process, the inputs themselves, or None if they are
    too large to travel: a handler that asks for one has it read then."""
    timeout_seconds: float
    resource_tag: str | None = None
    deferred: Sequence[Deferred] = ()
    """Strings of the config that need secrets: rendered in the worker, stored nowhere."""
    cache: Caching | None = None
    place: int | None = None
    """Over Redis the place of the node or item (`core.items.item_place`), where that is known; in
    the process of the engine the index of the node."""
    trace: str | None = None
    """The `traceparent` of its run, if runs are traced."""
    item: Any = None
    """Of a mapped node: the item itself."""
    item_index: int | None = None
    """Of a mapped node: the number of the item. `node_id` is then the item's name."""

    def inputs(self) -> dict[str, Any]:
        """Outputs of the completed parents by id, to be sent. They are copies of what is stored. A
        handler reads through `handlers.calls`."""
        if isinstance(self.source, dict):
            return self.source
        assert self.source is not None, "they are too large to travel"  # noqa: S101
        run, index, *_ = self.source
        parents = [(run.graph.nodes[i].id, run.nodes[i]) for i in run.graph.nodes[index].parents]
        return {
            name: orjson.loads(orjson.dumps(parent.output))
            for name, parent in parents
            if parent.status is COMPLETED
        }


Result = Complete | Fail


class Transport(Protocol):
    """Carries published nodes to workers. A hint, never the truth.

    Anything may be lost, doubled or reordered on the way: the claim decides which worker starts
    a node, and the token decides which result counts.
    """

    async def publish(self, dispatches: Sequence[Dispatch]) -> Sequence[Transition]:
        """Offer these nodes to the workers.

        The caller applies the transitions that this returns: nodes that need no worker, because
        their config cannot be rendered or their output is cached.
        """
        ...

    async def stop(self, order: Stop) -> None:
        """Have the worker that runs this start stop it; its result is refused in any case."""
        ...


class TemplateScope(Protocol):
    """What of a run a node's config reads."""

    def get(self, name: str) -> Any:
        """What a template reads under `name`."""
        ...

    def inputs(self, index: int) -> dict[str, Any] | None:
        """Outputs of the completed parents by id. None if they were too large to be read."""
        ...

    @property
    def unread(self) -> Collection[str]:
        """Nodes that belong to it, and were too large to be read with the others."""
        ...


class ScopeReader(Protocol):
    """Where the nodes of a run can be looked at without the whole run."""

    async def scope_of(self, order: Dispatch) -> TemplateScope:
        """For rendering this node: whatever its templates read, and nothing else.

        Raises `TooLarge` if that is more than a node may read.
        """
        ...

    async def parents_facts(self, order: Dispatch, reads: Container[str]) -> Facts | None:
        """What of these reads is about the node's parents: which of them have an output, and
        digests of outputs. None if that is more than a node may read."""
        ...

    async def scopes(self, orders: Mapping[str, Sequence[Dispatch]]) -> Sequence[TemplateScope]:
        """For rendering these nodes, by run: their parents, and whatever their templates read."""
        ...


class Sender(Protocol):
    """The orchestrators' end of a transport between processes."""

    async def send(self, tasks: Sequence[Task]) -> None: ...
    async def stop(self, order: Stop) -> None: ...


class TaskSource(Protocol):
    """Where a worker gets its work and says what became of it."""

    async def take(self, limit: int) -> list[Task]:
        """Wait for work; give at most `limit` tasks, claimed for this worker.

        A claim survives what the store survives before this returns: no handler starts on a
        promise that could be forgotten.
        """
        ...

    @property
    def report(self) -> Callable[[Sequence[Result | Progress]], Awaitable[object]]:
        """Hand results in, in this order."""
        ...

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """Hand lines of logs in, and return at once.

        They are written before a result that is reported after them, in the same write where
        there is one. Lines that cannot be written are lost, with a warning: a log is never in the
        way of a run.
        """
        ...

    async def slow(self, tag: str, until: float) -> None:
        """A service asked to be left alone until then."""
        ...


class HandlerLog(Protocol):
    """The log of an attempt, as far as it is not handed in."""

    @property
    def is_closed(self) -> bool:
        """The attempt has ended."""
        ...

    @property
    def is_waiting(self) -> bool:
        """The beginning of a line waits for its end."""
        ...

    @property
    def chunk_count(self) -> int:
        """Chunks that were drained, all in all."""
        ...

    def drain(self) -> Sequence[LogChunk]:
        """Lines that were not drained yet; of an ended attempt with the last line's beginning."""
        ...


class Call(Protocol):
    """One invocation of a handler, ready to go."""

    @property
    def is_async(self) -> bool: ...
    @property
    def is_logged(self) -> bool:
        """`begin` has to be called in the context of the handler, to set whose log it is."""
        ...

    def begin(self, task: Task) -> Any:
        """A coroutine if `is_async`; else the work itself, to be done in a thread."""
        ...

    def cancel(self) -> None:
        """Ask the handler to stop, if it checks for that."""
        ...

    def warn(self, message: str) -> None:
        """Add a line of the worker to the log of the attempt."""
        ...

    def end_log(self) -> None:
        """The attempt has ended: what is written later is not part of its log."""
        ...

    def seal(self, task: Task, output: Any) -> Any:
        """What is stored of an output; ends the log. Raises `PermanentError` for one that cannot
        be stored."""
        ...

    def caching(self, task: Task) -> Caching | None:
        """How the output is kept for other nodes, with what the handler has read for it. Asked for
        once the handler has returned, of tasks with a `cache`."""
        ...

    def describe(self, error: BaseException) -> dict[str, Any]:
        """What is stored of an error: `type`, `message` and, where known, `where` and
        `traceback`. Ends the log."""
        ...


Report = Callable[[Task, float, str], None]
OnLines = Callable[[HandlerLog], None]


class Calls(Protocol):
    """Makes calls of tasks: finds the handler, checks its config, builds its context."""

    def open(self, task: Task, report: Report, on_lines: OnLines) -> Call:
        """Make the call; `report` is for its progress, from whichever thread.

        `on_lines` is called from any thread when its log has lines, once until they are drained.

        Raises `PermanentError` or `TemplateError` if the task can never be run.
        """
        ...


class RateLimiter(Protocol):
    """Token buckets by resource tag."""

    async def book(self, tag: str, now: float) -> float:
        """When to come for a token of the tag's bucket: `now`, or a time of the caller's own.

        A hint: only `start` takes a token.
        """
        ...

    async def start(self, tag: str, now: float) -> bool:
        """Take a token and start now. False if the bucket has none: book again."""
        ...

    async def unbook(self, tag: str, count: int) -> None:
        """Give back this many bookings: their nodes will not start."""
        ...

    async def slow(self, tag: str, until: float) -> None:
        """A service asked to be left alone: no token of this tag before `until`."""
        ...


Start = tuple[str, str, Token]


class ParkedNode(NamedTuple):
    """A node that is parked until it may take a token of its rate limit."""

    at: float
    tag: str
    wake: Wake


class ParkedIndex(Protocol):
    """The nodes that each rate limit has parked. An index: it may lack some and have stale ones."""

    async def add_parked(self, waits: Iterable[ParkedNode]) -> None:
        """Add these nodes, or change their times."""
        ...

    async def parked(self, now: float, soon: float) -> list[ParkedNode]:
        """All parked nodes in the order of their times; none if all are due so soon."""
        ...

    async def remove_parked(self, waits: Iterable[ParkedNode]) -> None: ...


class TimerIndex(ParkedIndex, Protocol):
    """What is due when, over all runs: wakes, leases, the last activity."""

    async def delay(self, wakes: Iterable[tuple[float, Wake]]) -> None: ...
    async def due(self, now: float, limit: int) -> list[tuple[float, Wake]]: ...
    async def next_due(self) -> float | None: ...
    async def woken(self, due: Iterable[tuple[float, Wake]]) -> None:
        """These are woken. One that has another time by now goes on waiting."""
        ...

    async def lease(self, run_ids: Iterable[str], until: float) -> None:
        """Read the leases of these runs then, or earlier if another lease ends earlier."""
        ...

    async def expired(self, now: float, limit: int) -> list[str]:
        """Runs in which a lease may have run out.

        Returns no sooner than a lease can be renewed."""
        ...

    async def put_off(self, run_ids: Iterable[str], mark: float) -> None:
        """Read the leases of these no earlier than then, unless a `lease` comes from now on."""
        ...

    async def released(self, run_ids: Iterable[str], mark: float) -> None:
        """These have no lease left, unless a `lease` came since they were put off."""
        ...

    async def moved(self, run_ids: Iterable[str], now: float, *, is_new: bool = False) -> None:
        """These had activity now. `is_new`: they are about to be created; one that is known already
        may be known because its creator died, and has had no activity."""
        ...

    async def idle(self, since: float, limit: int) -> list[tuple[str, float]]: ...
    async def ended(self, run_ids: Iterable[str], since: float) -> None:
        """Expect neither activity nor leases of these, unless one has had activity since."""
        ...

    async def remember_all(self, now: float) -> None: ...
    async def age(self) -> float:
        """For how many seconds it has been there without a break, at least."""
        ...


class QueueInspector(Protocol):
    """What waits between the processes."""

    async def oldest_result(self) -> float | None:
        """When the oldest result that is not applied yet was sent."""
        ...

    async def oldest_waiting(self, handler: str) -> float | None:
        """When the oldest task of a handler that no worker has got yet was sent."""
        ...

    async def lost(self) -> list[str]:
        """Handlers whose waiting tasks were all lost since this was last asked."""
        ...

    async def announce(self, run_ids: Iterable[str]) -> None:
        """Announce the end of these runs to callers that wait for it."""
        ...


class RunObserver(Protocol):
    """Gets the changes of runs: a list of runs, or the queue of the archive."""

    every_move: bool
    """Whether it needs every change, not only those of a run's status."""

    async def moved(
        self,
        run_ids: Sequence[str],
        turned: Sequence[str],
        ended: Mapping[str, Event | None] | None = None,
    ) -> None:
        """These have new events; those in `turned` are new or have another status. `ended` has the
        runs that ended now, with their last event if that is known.

        Called before such a run leaves the timers: if the caller dies, the sweep calls it again.
        """
        ...

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        """These are new."""
        ...


class Feed(Protocol):
    """The run events of all runs on a store, whichever process wrote them."""

    async def feed_start(self, after: str | None) -> FeedPosition:
        """Where to read from: after the event with that id, or from now on.

        Raises `InvalidParams` for what is no id, and `Expired` if events after it may be missing.
        """
        ...

    def follow_feed(self, after: FeedPosition) -> AsyncGenerator[FeedEntry]:
        """Every event after that position, then new ones as they come, for ever. Each comes once,
        and those of one run come in their order.

        Raises `Expired` if events left the feed before this reader had them.
        """
        ...


class FeedWriter(Protocol):
    """Adds run events to the feed. Safe to repeat: an event is added once."""

    async def append(self, events: Mapping[str, Sequence[Event]]) -> None:
        """Add these events of runs, and the events before them that are not in the feed yet.

        Called before a run leaves the timers: if the caller dies, the sweep has it caught up.
        """
        ...

    async def catch_up(self, run_ids: Sequence[str]) -> None:
        """Add whatever the logs of these runs have and the feed has not."""
        ...


class SharedStore(Store, Protocol):
    @property
    def breaks(self) -> int:
        """How often the connection to it broke. A call that was repeated then may have been done
        the first time, and was refused the second."""
        ...

    async def create_many(self, submits: Sequence[Submit], now: float) -> list[Decision]:
        """Make these runs, each by itself; nothing is decided of one that is there."""
        ...

    async def offered(self, tasks: Sequence[Task]) -> list[bool]:
        """Which of these starts a worker may still claim."""
        ...

    async def claim(
        self, tasks: Sequence[Task], worker: str, until: float, now: float
    ) -> list[bool]:
        """Which of these starts are this worker's from now on; see `Claim`."""
        ...

    async def running(self, run_ids: Sequence[str]) -> list[tuple[Start, float]]:
        """The running starts of these runs, and when their leases end."""
        ...

    def made_at(self, run_id: str) -> float | None:
        """When this run was created, if that is known without a roundtrip."""
        ...

    async def look_up(self, run_ids: Iterable[str]) -> None:
        """Read the headers of these runs in one roundtrip, before transitions are applied to
        each."""
        ...

    async def sent(self) -> None:
        """Returns when every task that it has sent ahead has arrived."""
        ...

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        """Decide conditions that a process left undecided."""
        ...
