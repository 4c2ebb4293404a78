"""Runs in Redis: the rules as Lua scripts, one call per run and batch, safe to repeat.

Every key of a run has its hash tag and every script touches one run, so a cluster works. A call may
be executed twice: the token decides. Redis cannot evaluate conditions, which are templates: a
script leaves the nodes that became ready pending, and the caller evaluates their conditions and
settles them. A crash in between leaves the run pending, which `settle_pending` repairs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import orjson

from dovetail.core.audit.replay import is_taken
from dovetail.core.caching import INPUT, NAMES, Facts, digest_of, entries, names_digest
from dovetail.core.dag import Graph
from dovetail.core.definition.source import gc_paused
from dovetail.core.errors import BrokenRun, NotFound, StoreError
from dovetail.core.events import Event, Token
from dovetail.core.items import PLACES, item_place, node_id_of, split_name, split_place
from dovetail.core.outputs import (
    LARGE_OUTPUT,
    MAX_INPUT_BYTES,
    OutputReference,
    ReadBudget,
    parts,
)
from dovetail.core.run import Phase, RunState
from dovetail.core.states import RunStatus
from dovetail.core.step import begin
from dovetail.core.transitions import (
    NOTHING,
    Cancel,
    Claim,
    Complete,
    Decision,
    Dispatch,
    Expand,
    Renew,
    Retry,
    Stop,
    Submit,
    TakeOver,
    Transition,
    bounded_submit,
)
from dovetail.engine.clock import Clock
from dovetail.engine.listener import Listener, SafeListener, end_in
from dovetail.engine.ports import Cached, Task
from dovetail.engine.supervisor import bisect_failures, describe_error
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.records import no_run
from dovetail.stores.redis.codec import (
    LEFT_PENDING,
    SEPARATOR,
    WIDE,
    Fields,
    decode_decision,
    encode_transition,
    event_of,
    joined,
    keys_of,
    new_nonce,
    pairs,
    place_in,
    run_of,
    source,
    take_counts,
    time_text,
)
from dovetail.stores.redis.definitions import GRACE_SECONDS
from dovetail.stores.redis.fast_path import (
    MAX_NODES_PER_CALL,
    Claims,
    NextItems,
    Predicted,
    claim_args,
    claim_script,
    claimed,
    claimed_token,
    complete_args,
    complete_items_args,
    completed,
    completed_items,
    predict_children,
    predict_roots,
    submit_args,
    submitted,
)
from dovetail.stores.redis.items import (
    MapCounts,
    StoredMaps,
    add_ended,
    add_maps,
    output_in,
    refer_to_large_maps,
)
from dovetail.stores.redis.repair import (
    MAX_TRIES,
    end_by_force,
    loses_output,
    rebuilt_from_log,
    strays,
    write_back,
)
from dovetail.stores.redis.run_index import RunOrigin
from dovetail.stores.redis.scope import (
    OUTPUT_PART_BYTES,
    ConditionEvaluator,
    RedisOutputs,
    RedisScopes,
    RedisTemplateScope,
    RunHeader,
    RunHeaderCache,
    outputs_by_place,
)
from dovetail.stores.redis.staging import fork_parts, write_run
from dovetail.stores.redis.timers import ACTIVE

RULES = (
    "effects",
    "items",
    "renew",
    "complete",
    "recall",
    "fail",
    "reap",
    "take_over",
    "cancel",
    "retry",
    "park",
    "wake",
    "progress",
    "settle",
    "item_rules",
    "apply",
)
HOT = ("submit", "complete_many", "complete_items")
POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.2
WATCH_PAGE = 500
"""Events that are read at once: one with a traceback may have 32 KiB."""
BATCH_SIZE = 64
"""Runs that are made in one go."""
LISTED_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class SpeculativeDispatch(NamedTuple):
    """What it takes to send what is about to be published."""

    rendered: Callable[[Sequence[Dispatch], RedisTemplateScope], dict[int, Task]]
    """The tasks of these nodes, by place."""
    sending: Callable[[Sequence[Task]], Awaitable[object]]
    """They are on their way when this returns, and there when that does."""


class RedisStore:
    def __init__(
        self,
        redis: PipelinedRedis,
        *,
        events: bool = True,
        listed: bool = True,
        news: Callable[[str], Awaitable[None]] | None = None,
        max_input_bytes: int = MAX_INPUT_BYTES,
        max_run_bytes: int | None = None,
        ahead: SpeculativeDispatch | None = None,
    ) -> None:
        """Without `events` a decision may lack the events of nodes, which dispatching does not
        need. Without `listed` the lists of runs are kept elsewhere.

        `news` returns when it is worth to look whether a run has ended. `max_run_bytes` is what
        the outputs of a run that is made here may have together, unless its submit says so. `ahead`
        sends the tasks of nodes that are about to be published.
        """
        self._redis = redis
        self._events = events
        self._listed = listed
        self._news = news or _a_moment
        self._max_run_bytes = max_run_bytes
        self.ahead = ahead
        self._sending: list[asyncio.Future[object]] = []
        self._loaded_at = -1
        """How often the connection had been lost when Redis was last given the hot scripts."""
        self._headers = RunHeaderCache(redis)
        self._scopes = RedisScopes(redis, self._headers, max_input_bytes)
        self._next_items = NextItems()
        self._claims = Claims(redis, self._headers)
        self._outputs = RedisOutputs(redis)
        self._conditions = ConditionEvaluator(redis, self._headers, self._scopes)

    @property
    def breaks(self) -> int:
        """How often an answer may have been lost: what was asked then was asked again."""
        return self._redis.breaks

    # ── runs are made and moved ──────────────────────────────────────────────────────────

    async def create(self, submit: Submit, now: float) -> Decision:
        (decision,) = await self.create_many([submit], now)
        return decision

    async def create_many(self, submits: Sequence[Submit], now: float) -> list[Decision]:
        """Make these runs, each by itself; nothing is decided of one that is there."""
        nonce, began = new_nonce(), monotonic()
        submits = [bounded_submit(submit, self._max_run_bytes) for submit in submits]
        if any(submit.forked_from is not None for submit in submits):
            return [await self._create_whole(submit, now, nonce) for submit in submits]
        definitions = await self._headers.keeping(submits)
        if not self._redis.keeps_order:  # else the runs come behind these anyway
            await self._redis.call_many(definitions)
            definitions = []
        # Each is sent when it is put together, so that workers can begin with the first.
        parts = [submits[at : at + BATCH_SIZE] for at in range(0, len(submits), BATCH_SIZE)]
        creating = (self._create(part, now, nonce) for part in parts)
        _, *made = await asyncio.gather(self._redis.call_many(definitions), *creating)
        if monotonic() - began > GRACE_SECONDS / 2:
            # We stood still, and before the runs were there nothing referred to what they are of.
            await self._redis.call_many(await self._headers.keeping(submits))
        return [decision for decisions in made for decision in decisions]

    async def _create(self, submits: Sequence[Submit], now: float, nonce: int) -> list[Decision]:
        headers: list[RunHeader] = []
        calls: list[Command] = []
        token = Token(1, 1, nonce)
        with gc_paused():
            for submit in submits:
                header = self._headers.made(submit, now)
                headers.append(header)
                own = f"wf:{{{submit.run_id}}}:"
                keys = (own + "meta", own + "nodes", own + "events", own + "held")
                stored = self._headers.definitions.stored(submit.graph)
                args = submit_args(submit, header.shape, stored, now, nonce, listed=self._listed)
                calls.append(self._redis.script_command(source("submit"), keys, args))
        decisions = []
        predicted = (predict_roots(header.run, header.shape, token) for header in headers)
        is_wide = any(header.shape.is_wide for header in headers)
        answers, aheads = await self._with_ahead(calls, predicted, is_wide=is_wide)
        for submit, header, sent, answer in zip(submits, headers, aheads, answers, strict=True):
            decision = submitted(submit, header.run, answer, now, token, sent, events=self._events)
            if decision:
                self._headers.keep(header)
                if answer[1]:  # verdicts are pending
                    cause = {"now": time_text(now), "nonce": str(nonce)}
                    rest = await self._settle(header, cause, submit.graph.roots)
                    decision = joined(decision, rest)
            decisions.append(decision)
        return decisions

    async def _create_whole(self, submit: Submit, now: float, nonce: int) -> Decision:
        """Make a fork as the core begins it: its outputs are too much for one call of a script."""
        run, decision = begin(submit, now, nonce)
        header = self._headers.made(submit, now)
        stored = self._headers.definitions.stored(submit.graph)
        parts = fork_parts(run, decision.events, stored)
        definition = (stored.sha256, stored.content)
        if not await write_run(self._redis, submit.run_id, parts, definition):
            return NOTHING  # by another process; or by this one, whose connection broke
        self._headers.keep(header)
        decision.dispatch = [order._replace(run=header.run) for order in decision.dispatch]
        return decision

    async def _with_ahead(
        self, calls: Sequence[Command], predicted: Iterable[Predicted | None], *, is_wide: bool
    ) -> tuple[list[Any], Sequence[Mapping[int, Task]]]:
        """Send these calls, and right behind each the tasks that it is predicted to dispatch.
        Returns the replies, and the tasks that were sent behind each call. `is_wide`: there may be
        many tasks."""
        if self._loaded_at != self._redis.breaks:  # else the first of these calls are refused
            self._loaded_at = self._redis.breaks
            await self._redis.call_many([("SCRIPT", "LOAD", source(name)) for name in HOT])
        refusals = self._redis.refusals
        asked = self._redis.send(calls)
        if len(calls) > WIDE or is_wide:
            self._redis.flush()  # Redis need not wait until what follows is made
        aheads: list[dict[int, Task]] = [{}] * len(calls)
        sending: asyncio.Future[object] | None = None
        if self.ahead is not None:
            with gc_paused():
                aheads = [{} if one is None else self.ahead.rendered(*one) for one in predicted]
            if tasks := [task for ahead in aheads for task in ahead.values()]:
                sending = asyncio.ensure_future(self.ahead.sending(tasks))
        self._redis.flush()
        try:
            answers = await self._redis.retry_errors(calls, await asked)
        except BaseException:
            if sending is not None:  # what went ahead of nothing concerns no later caller
                sending.add_done_callback(_ignore_error)
            raise
        if sending is not None:
            self._sending.append(sending)
        if self._redis.refusals != refusals:
            # A call may have come after the messages behind it, which no worker could claim then.
            return answers, [{}] * len(calls)
        return answers, aheads

    def forget(self, run_id: str) -> None:
        """What is known of a run that is about to be another."""
        self._headers.forget(run_id)
        self._scopes.just_written.forget(run_id)

    async def look_up(self, run_ids: Iterable[str]) -> None:
        await self._headers.look_for(run_ids)

    def made_at(self, run_id: str) -> float | None:
        header = self._headers.get(run_id)
        return None if header is None else header.run.created_at

    def origin(self, run_id: str) -> RunOrigin | None:
        """Where a run is listed, if that is known here."""
        header = self._headers.get(run_id)
        return None if header is None else header.origin

    def outline(self, run_id: str) -> RunState | None:
        """What never changes of a run, if that is known here."""
        header = self._headers.get(run_id)
        return None if header is None else header.run

    async def find_outline(self, run_id: str) -> RunState | None:
        """The same, read where it is not known; None if the run is not there."""
        header = await self._headers.find(run_id)
        return None if header is None else header.run

    async def sent(self) -> None:
        """Returns when what goes out ahead has arrived."""
        while self._sending:
            await self._sending.pop()

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        decisions = [NOTHING] * len(moves)
        by_run: dict[str, list[int]] = {}
        for position, move in enumerate(moves):
            by_run.setdefault(move.run_id, []).append(position)
        await self._headers.look_for(by_run)
        left = await self._apply_plain(by_run, moves, now, decisions)
        if left:
            for run_id in left:  # whatever goes the long way makes it doubtful
                self._scopes.just_written.forget(run_id)
            await asyncio.gather(
                *(
                    self._apply_to(run_id, moves, positions, now, decisions)
                    for run_id, positions in left.items()
                )
            )
        await self._keep_outputs(moves, decisions, now)
        return decisions

    async def _apply_plain(
        self,
        by_run: dict[str, list[int]],
        moves: Sequence[Transition],
        now: float,
        decisions: list[Decision],
    ) -> dict[str, list[int]]:
        """Apply the moves that have a script of their own, in one call. Returns the positions of
        the other moves by run."""
        left: dict[str, list[int]] = {}
        calls: list[Command] = []
        asked: list[tuple[RunHeader, list[int], list[Complete]]] = []
        item_calls: list[tuple[RunHeader, list[int], list[Complete], list[Argument]]] = []
        nonce, complete_many = new_nonce(), source("complete_many")
        for run_id, positions in by_run.items():
            header = self._headers.get(run_id)
            if header is None:  # it is not there, or had to make room for another of these
                left[run_id] = positions
                continue
            mine = [move for position in positions if type(move := moves[position]) is Complete]
            args = None
            is_fit = len(mine) == len(positions) <= MAX_NODES_PER_CALL
            if is_fit and header.shape.mapped and mine[0].node.endswith("]"):
                args = complete_items_args(mine, header.run.graph, now, nonce)
                if args is not None:
                    item_calls.append((header, positions, mine, args))
                    continue
            elif is_fit:
                args = complete_args(mine, header.shape, now, nonce)
            if args is None:
                left[run_id] = positions
                continue
            own = f"wf:{{{run_id}}}:"
            keys = (own + "meta", own + "nodes", own + "deps", own + "out", own + "events")
            calls.append(self._redis.script_command(complete_many, keys, args))
            asked.append((header, positions, mine))
        token = Token(1, 1, nonce)
        if item_calls:
            await self._complete_items(item_calls, left, now, token, decisions)
        if not calls:
            return left
        predicted = (
            predict_children(header.run, header.shape, mine, token) for header, _, mine in asked
        )
        is_wide = any(header.shape.is_wide for header, *_ in asked)
        answers, aheads = await self._with_ahead(calls, predicted, is_wide=is_wide)
        for (header, positions, mine), sent, answer in zip(asked, aheads, answers, strict=True):
            done = answer[0]
            run = header.run
            if done:
                made = completed(mine, run, answer, now, token, sent=sent, events=self._events)
                for position, decision in zip(positions, made, strict=False):
                    decisions[position] = decision
                if len(answer) > 3 and not sent.keys() >= {*answer[4::2]}:
                    self._scopes.just_written.keep(run, mine[:done])
            if done < len(positions):
                left[run.id] = positions[done:]
        return left

    async def _complete_items(
        self,
        asked: Sequence[tuple[RunHeader, list[int], list[Complete], list[Argument]]],
        left: dict[str, list[int]],
        now: float,
        token: Token,
        decisions: list[Decision],
    ) -> None:
        """Complete items of mapped nodes: of each run the items of one node. Adds to `left` the
        positions of moves that the script has not done."""
        script = source("complete_items")
        calls = []
        for header, _, _, args in asked:
            own = f"wf:{{{header.run.id}}}:"
            keys = (own + "nodes", own + "maps", own + "items", own + "events")
            calls.append(self._redis.script_command(script, keys, args))
        owners = [one.run.graph.index[node_id_of(mine[0].node)] for one, _, mine, _ in asked]
        predicted = (
            self._next_items.predict(header.run, header.shape, owner, len(mine), token)
            for (header, _, mine, _), owner in zip(asked, owners, strict=True)
        )
        is_wide = any(len(mine) > WIDE for _, _, mine, _ in asked)
        answers, aheads = await self._with_ahead(calls, predicted, is_wide=is_wide)
        for (header, positions, mine, _), owner, sent, answer in zip(
            asked, owners, aheads, answers, strict=True
        ):
            self._next_items.note_completed(header.run.id, owner, answer)
            made = completed_items(
                mine, header.run, answer, now, token, sent=sent, events=self._events
            )
            for position, decision in zip(positions, made, strict=False):
                decisions[position] = decision
            if len(made) < len(positions):
                left[header.run.id] = positions[len(made) :]

    async def claim(
        self, tasks: Sequence[Task], worker: str, until: float, now: float
    ) -> list[bool]:
        return await self._claims.claim(tasks, worker, until, now)

    async def offered(self, tasks: Sequence[Task]) -> list[bool]:
        return await self._claims.offered(tasks)

    async def phases(self, starts: Sequence[tuple[str, str, Token]]) -> list[Phase | None]:
        return await self._claims.phases(starts)

    async def running(self, run_ids: Sequence[str]) -> list[tuple[tuple[str, str, Token], float]]:
        return await self._claims.running(run_ids)

    async def _apply_to(
        self,
        run_id: str,
        moves: Sequence[Transition],
        positions: Sequence[int],
        now: float,
        decisions: list[Decision],
    ) -> None:
        header = await self._headers.find(run_id)
        if header is None:
            return
        todo = [position for position in positions if _is_about(header.run.graph, moves[position])]
        while todo:
            move = moves[todo[0]]
            if type(move) is Claim:  # it has a script of its own
                count, made = 1, [await self._claim(header, move, now)]
            else:
                count = next((n for n, p in enumerate(todo) if type(moves[p]) is Claim), len(todo))
                requests = [
                    encode_transition(moves[position], header.shape, now, new_nonce())
                    for position in todo[:count]
                ]
                made = await self._step(run_id, header, requests)
            for position, decision in zip(todo, made, strict=False):
                decisions[position] = decision
            if type(move) is Expand and made:
                index = header.run.graph.index[move.node]
                self._next_items.note_expanded(header.run, index, made[0].dispatch)
            todo = todo[count:]

    async def _claim(self, header: RunHeader, move: Claim, now: float) -> Decision:
        place = place_in(header.run.graph, move.node)
        assert place is not None  # noqa: S101 - the caller has looked
        args = claim_args(move.worker, move.lease_until, now, again=False)
        args += (place, claimed_token(move.token))
        script, keys = claim_script(move.run_id, of_items=place >= PLACES)
        answer = await self._redis.call_script(source(script), keys, args)
        return claimed(move, header.run.graph, place, answer, now)

    async def _step(
        self, run_id: str, header: RunHeader, requests: Sequence[Fields]
    ) -> list[Decision]:
        """All of these, in order; stops on the way to fetch what a rule asks for."""
        decisions: list[Decision] = []
        todo = list(requests)
        graph: bytes = b""
        while todo:
            go_on, why, seq, answers = await self._call(header, todo, graph)
            for answer in answers:
                decisions.append(decode_decision(answer, header.run, seq, usual=self._events))
                seq += len(answer[1])
            if why == b"pending":
                cause, ready = todo[len(answers) - 1], answers[-1][LEFT_PENDING]
                decisions[-1] = joined(decisions[-1], await self._settle(header, cause, ready))
                if cause["kind"] == "take_over":  # it stopped there; its last orders are all orders
                    (rest,) = await self._step(run_id, header, [{**cause, "behind": "0.0"}])
                    decisions[-1].dispatch = []
                    decisions[-1] = joined(decisions[-1], rest)
            graph = header.shape.whole if why == b"graph" else b""
            todo = todo[go_on - 1 :] if go_on else []
        return decisions

    async def _call(
        self, header: RunHeader, requests: Sequence[Fields], graph: bytes
    ) -> tuple[int, bytes, int, list[Any]]:
        go_on, why, seq, answers = await self._redis.call_script(
            source(*RULES), keys_of(header.run.id), [header.shape.request(requests), graph]
        )
        return go_on, why, seq, answers

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        """Evaluate conditions that another process left pending, if there are any."""
        cause = {"now": time_text(now), "nonce": str(new_nonce())}
        header = await self._headers.find(run_id)
        return NOTHING if header is None else await self._settle(header, cause, ())

    async def _settle(self, header: RunHeader, cause: Fields, ready: Sequence[int]) -> Decision:
        """Ask the conditions of the nodes that became ready, until none is left to ask."""
        whole = NOTHING
        while results := await self._conditions.results(header, ready):
            request = {"kind": "settle", "now": cause["now"], "nonce": cause["nonce"]}
            request |= results.fields
            _, _, seq, (answer,) = await self._call(header, [request], results.graph)
            decision, ready = decode_decision(answer, header.run, seq), answer[LEFT_PENDING]
            whole = joined(whole, decision)
            if decision and not ready:
                break
            if whole.ended:  # what is pending from now on is of another epoch, and not ours
                break
        return whole

    # ── runs that are damaged ────────────────────────────────────────────────────────────

    async def repair(self, run_id: str, now: float, *, dry_run: bool = False) -> list[str]:
        """Rebuild the state of a run from its log; where the two differed, as sentences.

        Raises `NotFound`, or `BrokenRun` if the log itself is damaged.
        """
        header, keys = await self._known(run_id), keys_of(run_id)
        before: list[str] = []
        for _ in range(MAX_TRIES):
            made = await rebuilt_from_log(self._redis, header, keys)
            try:
                kept = await self._load(run_id, header)
                found = made.differences(kept)
                found += await strays(self._redis, made, kept, keys)
            except BrokenRun as problem:
                found = [f"its state cannot be read: {problem}"]
            if found and await self._redis.call("LLEN", keys[5]) != made.run.seq:
                continue  # it moved between two looks, which is no damage
            if found and found != before:
                before = found
                continue  # compared twice: a node is woken, or held, without an event
            if found and (lost := loses_output(made)) is not None:
                raise BrokenRun(f"run {run_id}: {lost}")
            if dry_run or not found:
                return found
            if header.shape.mapped:
                raise BrokenRun(
                    f"run {run_id}: {found[0]}; the state of a run with mapped nodes cannot be "
                    "rebuilt in Redis: cancel the run, then retry it"
                )
            self._scopes.just_written.forget(run_id)
            if await write_back(self._redis, made, keys, now):
                return found
        if dry_run:
            return []
        raise BrokenRun(f"run {run_id} moves while it is repaired: try again, or cancel it first")

    async def end_by_force(self, run_id: str, now: float) -> bool:
        """End a run whatever is left of it; False if it has ended. Raises `NotFound`."""
        self._scopes.just_written.forget(run_id)
        try:
            header = await self._headers.find(run_id)
        except BrokenRun:
            header = None
        size = 0 if header is None else len(header.run.graph.nodes)
        allowed = "" if header is None else header.shape.allowed
        return await end_by_force(self._redis, run_id, keys_of(run_id), size, allowed, now)

    async def _keep_outputs(
        self, moves: Sequence[Transition], decisions: Sequence[Decision], now: float
    ) -> None:
        for move, decision in zip(moves, decisions, strict=True):
            if type(move) is Complete and move.cache and is_taken(decision):
                until, life = now + move.cache.seconds, max(1, int(move.cache.seconds * 1000))
                await self._redis.call_many(
                    [
                        ("SET", f"wf:cache:{key}", orjson.dumps([until, kept]), "PX", life)
                        for key, kept in entries(move.cache, move.output)
                    ]
                )

    # ── runs are read ────────────────────────────────────────────────────────────────────

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        return await self._load(run_id, await self._known(run_id), outputs=outputs, room=room)

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        places = [one.where for one in wanted]
        epoch = b"%d" % run.epoch
        of_nodes = [place for place in places if place < PLACES]
        of_items = [place for place in places if place >= PLACES]
        found = await self._outputs.all(run.id, of_nodes, epoch)
        records = await self._outputs.all(run.id, of_items, epoch, key="items")
        if found is not None and records is not None:
            found |= {place: output_in(record) for place, record in records.items()}
            shape = self._headers.shape(run.graph)
            for place in of_nodes:
                if place in found or not shape.is_mapped(place):
                    continue
                if (text := await self._outputs.mapped_output(run.id, place)) is not None:
                    found[place] = text
        if found is None or any(place not in found for place in places):
            raise StoreError(f"run {run.id}: its outputs are not those of epoch {run.epoch} now")
        return [found[place] for place in places]

    async def read_items(
        self, run: RunState, index: int, numbers: Sequence[int], max_bytes: int
    ) -> int:
        items = run.nodes[index].items
        if items is None or items.is_reused:
            return len(numbers)
        left_out = [n for n in numbers if items.status(n) is not None and n not in items.ended]
        places = [item_place(index, number) for number in left_out]
        read = 0
        while places and read < max_bytes:
            records = await self._outputs.part(run.id, places, b"%d" % run.epoch, key="items")
            if records is None or None in records:
                raise StoreError(f"run {run.id}: its items are not those of epoch {run.epoch} now")
            for place, record in zip(places, records, strict=False):
                assert record is not None  # noqa: S101 - see above
                add_ended(items, place, record, LARGE_OUTPUT)
                read += len(record)
            places = places[len(records) :]
        return numbers.index(places[0] % PLACES) if places else len(numbers)

    async def _load(
        self,
        run_id: str,
        header: RunHeader,
        *,
        outputs: bool = True,
        room: ReadBudget | None = None,
    ) -> RunState:
        try:
            return await self._read(run_id, header, outputs=outputs, room=room)
        except (LookupError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BrokenRun(
                f"run {run_id}: Redis has only parts of it ({what}); rebuild it with `dovetail "
                f"runs repair {run_id[:6]}`, or end it with `dovetail runs cancel {run_id[:6]}`"
            ) from error

    async def _read(
        self, run_id: str, header: RunHeader, *, outputs: bool, room: ReadBudget | None
    ) -> RunState:
        meta, nodes, deps, out, ends, events, _, maps, _, queue = keys_of(run_id)
        keys = [meta, nodes, deps, ends, out, events]
        if header.shape.mapped:
            keys += (maps, queue)
        asked: list[Argument] = [OUTPUT_PART_BYTES if outputs else -1]
        if outputs and room is not None:
            asked = [room.together, room.each]
        while True:
            answer = await self._redis.call_script(source("within", "load"), keys, asked)
            stored = StoredMaps.parse(*answer[8:]) if header.shape.mapped else None
            *hashes, seq, placed, small, sizes = answer[:8]
            fields, states, counts, endings = (dict(pairs(flat)) for flat in hashes)
            if b"status" not in fields:  # dropped, or lost with Redis
                self._headers.forget(run_id)
                raise no_run(run_id, "Redis")
            places = [int(place) for place in placed]
            rest = await self._outputs.all(run_id, places[len(small) :], fields[b"epoch"])
            records: dict[int, bytes] | None = {}
            if stored is not None:
                records = await self._records(run_id, stored, fields[b"epoch"], outputs, room)
            if rest is not None and records is not None:  # else it was retried, or dropped
                break
        known = header.run
        run = RunState(run_id, known.graph, known.params, known.created_at, known.version)
        fields |= take_counts(states)
        run_of(run, fields, states, counts, outputs_by_place(places, small) | rest, endings, seq)
        if stored is not None:
            add_maps(run, stored, endings, records or {})
            if outputs and room is not None:
                refer_to_large_maps(run, stored, room)
        for place, size in zip(map(int, sizes[::2]), sizes[1::2], strict=True):
            run.nodes[place].output = OutputReference(size, place)
        return run

    async def _records(
        self,
        run_id: str,
        stored: StoredMaps,
        epoch: bytes,
        outputs: bool,
        room: ReadBudget | None,
    ) -> dict[int, bytes] | None:
        """The records of items that have ended. Without `outputs`, or without room for them, only
        the records of items that have no output. None if the run has left this epoch."""
        found: dict[int, bytes] = {}
        for index, text in stored.maps.items():
            if index >= PLACES:
                continue
            size = MapCounts.parse(text).output_size
            whole = outputs and (room is None or size <= room.each)
            places = stored.ended(index, without_output=not whole)
            part = await self._outputs.all(run_id, places, epoch, key="items")
            if part is None:
                return None
            found |= part
        return found

    async def wait(self, run_id: str) -> RunState:
        """Raises `NotFound` for a run that is not there, or not any more."""
        header = await self._known(run_id)
        while True:
            await self.ended(run_id)
            run = await self._load(run_id, header)
            if run.finished:  # else it was retried meanwhile
                return run

    async def ended(self, run_id: str) -> None:
        asking: list[Command] = [
            ("HGET", keys_of(run_id)[0], "finished_at"),
            ("ZSCORE", ACTIVE, run_id),  # it is active until the lists have its end
        ]
        pauses = iter(LISTED_SECONDS)
        while True:
            finished_at, active = await self._redis.call_many(asking)
            if finished_at is None:
                raise no_run(run_id, "Redis")
            if not finished_at:
                await self._news(run_id)
            elif active is None or (pause := next(pauses, None)) is None:
                return
            else:
                await asyncio.sleep(pause)

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        header = await self._known(run_id)
        events = keys_of(run_id)[5]
        pause = POLL_SECONDS
        while True:
            finished = await self._is_finished(run_id)
            texts = await self._redis.call("LRANGE", events, after, after + WATCH_PAGE - 1)
            for text in texts:
                after += 1
                yield event_of(text, after, header.run.graph)
            if finished and not texts:
                return
            pause = POLL_SECONDS if texts else min(pause * 1.5, LONGEST_POLL_SECONDS)
            if not finished and len(texts) < WATCH_PAGE:
                await asyncio.sleep(pause)

    async def scopes(self, orders: Mapping[str, Sequence[Dispatch]]) -> list[RedisTemplateScope]:
        """For rendering these nodes: their parents, and whatever their templates read."""
        return await self._scopes.read(orders)

    async def scope_of(self, order: Dispatch) -> RedisTemplateScope:
        run, index, *_ = order
        nodes = run.graph.nodes
        if nodes[index].for_each is not None:
            needs = self._headers.shape(run.graph).needs_of(order)
            return await self._scopes.only(run, [nodes[need].id for need in needs])
        scope = await self._scopes.only(run, nodes[index].config.reads)
        scope.leave_unread(
            parent
            for parent in nodes[index].parents
            if nodes[parent].id not in nodes[index].config.reads
        )
        return scope

    async def parents_facts(self, order: Dispatch, reads: Container[str]) -> Facts | None:
        run, index, *_ = order
        sizes = await self._input_sizes(run, index)
        facts = {NAMES: names_digest(sizes)} if NAMES in reads else {}
        read = {name: size for name, size in sizes.items() if INPUT + name in reads}
        if sum(read.values()) > self._scopes.max_input_bytes:
            return None
        for part in parts(read):
            for name, text in (await self._read_outputs(run, part)).items():
                facts[INPUT + name] = digest_of(orjson.loads(text))
        return facts

    async def params_of(self, task: Task) -> dict[str, Any]:
        return (await self._known(task.run_id)).run.params

    async def input_sizes(self, task: Task) -> dict[str, int]:
        """The bytes of the outputs of a node's completed parents by id; no output is read."""
        run = (await self._known(task.run_id)).run
        return await self._input_sizes(run, run.graph.index[split_name(task.node_id)[0]])

    async def _input_sizes(self, run: RunState, index: int) -> dict[str, int]:
        nodes = run.graph.nodes
        parents = {nodes[parent].id: parent for parent in nodes[index].parents}
        sizes = await self._scopes.sizes(run, parents)
        return {name: size for name, size in sizes.items() if size}  # only completed ones have one

    async def read_inputs(self, task: Task, names: Sequence[str]) -> dict[str, bytes]:
        """These outputs as JSON, in one reply: the caller knows their sizes."""
        return await self._read_outputs((await self._known(task.run_id)).run, names)

    async def _read_outputs(self, run: RunState, names: Sequence[str]) -> dict[str, bytes]:
        indexes = [run.graph.index[name] for name in names]
        found = await self._redis.call("HMGET", keys_of(run.id)[3], *indexes)
        shape = self._headers.shape(run.graph)
        if shape.mapped:
            for at, index in enumerate(indexes):
                if found[at] is None and shape.is_mapped(index):
                    found[at] = await self._scopes.mapped_output(run, index)
        if gone := [name for name, text in zip(names, found, strict=True) if text is None]:
            raise StoreError(
                f"run {run.id}: the output of '{gone[0]}' is not there any more; the run was "
                "retried, or dropped, while a node of it read it"
            )
        return dict(zip(names, found, strict=True))

    async def _is_finished(self, run_id: str) -> bool:
        finished_at = await self._redis.call("HGET", keys_of(run_id)[0], "finished_at")
        if finished_at is None:
            raise no_run(run_id, "Redis")
        return bool(finished_at)

    async def recall(self, key: str, now: float) -> Cached | None:
        kept = await self._redis.call("GET", f"wf:cache:{key}")
        if kept is None:
            return None
        until, output = orjson.loads(kept)
        return Cached(output) if now < until else None

    # ── what never changes of a run ──────────────────────────────────────────────────────

    async def _known(self, run_id: str) -> RunHeader:
        header = await self._headers.find(run_id)
        if header is None:
            raise no_run(run_id, "Redis")
        return header


def _is_about(graph: Graph, move: Transition) -> bool:
    """Whether the transition is about the run, or about a node or an item that it has."""
    if isinstance(move, Retry):  # from a node, not from an item
        return move.from_node is None or move.from_node in graph.index
    return isinstance(move, Cancel | TakeOver) or place_in(graph, move.node) is not None


def _ignore_error(sending: asyncio.Future[object]) -> None:
    if not sending.cancelled():
        sending.exception()


async def _a_moment(_: str) -> None:
    await asyncio.sleep(POLL_SECONDS)


MEASURE_SECONDS = 0.2
FAREWELL_SECONDS = 1.0
CALLER_DAYS = 30
_SEPARATOR = SEPARATOR.encode()
ENDS = frozenset({"node.completed", "node.failed"})


class InstrumentedRedisStore(RedisStore):
    def __init__(self, redis: PipelinedRedis, listener: Listener, **options: Any) -> None:
        super().__init__(redis, **{**options, "events": True})
        self._listener = SafeListener(listener)
        self._ended: dict[str, tuple[Graph, list[int]]] = {}
        """By run, the places of the nodes whose times are yet to be read."""
        self._alarm: asyncio.TimerHandle | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def create_many(self, submits: Sequence[Submit], now: float) -> list[Decision]:
        caller = self._listener.caller()
        if caller is not None:  # before the runs: their first nodes are sent out at once
            life = CALLER_DAYS * 86400
            keys = [_caller_key(submit.run_id) for submit in submits]
            await self._redis.call_many([("SET", key, caller, "NX", "EX", life) for key in keys])
        decisions = await super().create_many(submits, now)
        for submit, decision in zip(submits, decisions, strict=True):
            if decision.events:
                await self._tell(submit.run_id, decision)
        return decisions

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        decisions = await super().apply(moves, now, durable=durable)
        for move, decision in zip(moves, decisions, strict=True):
            if decision.events or decision.ended:
                await self._tell(move.run_id, decision)
        return decisions

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        decision = await super().settle_pending(run_id, now)
        if decision.events or decision.ended:
            await self._tell(run_id, decision)
        return decision

    async def close(self) -> None:
        """Read outstanding durations now, as far as possible."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._measure()
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=FAREWELL_SECONDS)
            for task in late:
                task.cancel()

    async def _tell(self, run_id: str, decision: Decision) -> None:
        header = await self._headers.find(run_id)
        if header is None:  # dropped, or lost with Redis
            return
        graph = header.run.graph
        self._listener.on_events(run_id, graph, decision.events, header.run.version)
        for _, _, kind, _, node, attempt, _ in decision.events:
            if kind in ENDS and attempt and node is not None:
                place = place_in(graph, node)
                if place is not None and (place >= PLACES or not _is_mapped(graph, place)):
                    self._ended.setdefault(run_id, (graph, []))[1].append(place)
        if self._ended and self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(MEASURE_SECONDS, self._measure)
        status = end_in(decision.events)
        if status is not None and (wanted := self._listener.outputs_wanted(graph)) is not None:
            if wanted and status is RunStatus.COMPLETED:
                self._spawn(self._read_end(run_id, graph, wanted))
            else:
                self._listener.on_outcome(run_id, graph, status, {})
        if decision.ended and self._listener.whole_logs:
            self._spawn(self._read_log(run_id))

    def _measure(self) -> None:
        self._alarm = None
        ended, self._ended = self._ended, {}
        self._spawn(self._read_times(ended))

    async def _read_times(self, ended: Mapping[str, tuple[Graph, list[int]]]) -> None:
        commands: list[Command] = []
        for run_id, (_, places) in ended.items():
            nodes, items = keys_of(run_id)[1], keys_of(run_id)[8]
            if max(places) < PLACES:
                commands.append(("HMGET", nodes, *places))
            else:
                script = source("node_times")
                commands.append(self._redis.script_command(script, (nodes, items), places))
        for (graph, places), states in zip(
            ended.values(), await self._redis.call_many(commands), strict=True
        ):
            for place, state in zip(places, states, strict=True):
                started, finished = times_of(state)
                if started and finished:
                    handler = graph.nodes[split_place(place)[0]].handler
                    self._listener.on_duration(handler, float(finished) - float(started))

    async def _read_end(self, run_id: str, graph: Graph, wanted: Sequence[str]) -> None:
        outputs: dict[str, Any] = {}
        with suppress(StoreError, NotFound):  # archived and dropped since: it ended all the same
            nodes = (await self.load(run_id)).nodes
            outputs = {name: nodes[graph.index[name]].output for name in wanted}
        self._listener.on_outcome(run_id, graph, RunStatus.COMPLETED, outputs)

    async def _read_log(self, run_id: str) -> None:
        graph = (await self._known(run_id)).run.graph
        texts = await self._redis.call("LRANGE", keys_of(run_id)[5], 0, -1)
        log: list[Event] = [event_of(text, seq, graph) for seq, text in enumerate(texts, 1)]
        (caller,) = await callers_of(self._redis, [run_id])
        self._listener.on_run_finished(run_id, graph, log, caller)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quiet(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)


async def _quiet(work: Coroutine[Any, Any, None]) -> None:
    """Telemetry must not raise: with Redis away, something is not counted."""
    with suppress(StoreError, NotFound):
        await work


def _is_mapped(graph: Graph, index: int) -> bool:
    return graph.nodes[index].for_each is not None


def times_of(state: bytes | None) -> tuple[bytes, bytes]:
    """When a node was started and finished, the last two fields of its state; empty if it was not.

    As `node_of` has it, at a tenth of the price: it is asked of every node.
    """
    if state is None:
        return b"", b""
    _, started, finished = state.rsplit(_SEPARATOR, 2)
    return started, finished


async def callers_of(redis: PipelinedRedis, run_ids: Sequence[str]) -> list[str | None]:
    """The `traceparent` of the request that triggered each run."""
    found = await redis.call_many([("GET", _caller_key(run_id)) for run_id in run_ids])
    return [None if text is None else text.decode() for text in found]


def _caller_key(run_id: str) -> str:
    return f"wf:{{{run_id}}}:caller"


# ── leases ────────────────────────────────────────────────────────────────────────────────────


worker_log = logging.getLogger("dovetail.worker")


class RedisLeases:
    """Leases in Redis, renewed with the node's index alone.

    It has a connection of its own and reads no definition, so a renewal is small whatever the run
    is.
    """

    def __init__(self, redis: PipelinedRedis, clock: Clock, lease_seconds: float) -> None:
        self._redis = redis
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._store = RedisStore(redis, events=False)
        """For a start whose message did not have its node's index."""

    async def renew(self, tasks: Sequence[Task]) -> list[Stop]:
        """Say that these still run; what must stop, because it is ours no longer."""
        kept = await bisect_failures(self._renewed, tasks, _left_unrenewed) if tasks else ()
        return [
            Stop(task.run_id, task.node_id, task.token)
            for task, is_kept in zip(tasks, kept, strict=True)
            if not is_kept
        ]

    async def _renewed(self, tasks: Sequence[Task]) -> Sequence[bool]:
        now = self._clock()
        until = now + self._lease_seconds
        kept = [False] * len(tasks)
        by_run: dict[str, list[int]] = {}
        for at, task in enumerate(tasks):
            if task.place is not None:
                by_run.setdefault(task.run_id, []).append(at)
        asked = [
            self._redis.script_command(
                source(*RULES),
                keys_of(run_id),
                [
                    orjson.dumps({"moves": [_renewal(tasks[at], now, until) for at in positions]}),
                    b"",
                ],
            )
            for run_id, positions in by_run.items()
        ]
        if asked:
            answers = await self._redis.call_many(asked)
            for positions, (_, _, _, decisions) in zip(by_run.values(), answers, strict=True):
                for at, decision in zip(positions, decisions, strict=True):
                    kept[at] = bool(decision[0])
        if unindexed := [at for at, task in enumerate(tasks) if task.place is None]:
            moves = [
                Renew(tasks[at].run_id, tasks[at].node_id, tasks[at].token, until)
                for at in unindexed
            ]
            made = await self._store.apply(moves, now)
            for at, moved in zip(unindexed, made, strict=True):
                kept[at] = bool(moved.changed)
        return kept


def _renewal(task: Task, now: float, until: float) -> Fields:
    """As `renew.lua` takes it."""
    epoch, attempt, nonce = task.token
    return {
        "kind": "renew",
        "now": time_text(now),
        "nonce": str(new_nonce()),
        "i": task.place,
        "te": epoch,
        "ta": attempt,
        "n": str(nonce),
        "lease": time_text(until),
    }


async def _left_unrenewed(task: Task, problem: Exception) -> Sequence[bool]:
    worker_log.error(
        "run %s, node %s: its lease ends: %s", task.run_id, task.node_id, describe_error(problem)
    )
    return [False]
