"""Submit, claim and complete: the calls of every node, each with a small script of its own.

These scripts take flat arguments and reply with numbers; the decision is built here. All other
transitions go through `apply.lua`.

Some nodes that a call will publish are known before it is sent: the roots of a run, and children
whose parents are all in the call. Their messages travel right behind the call and reach a worker a
roundtrip earlier. If the call decides otherwise, such a message holds a token that was never
issued, and its claim is refused like a late one.

`Claims` claims nodes of many runs in one call.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import islice

import orjson

from dovetail.core.dag import Graph
from dovetail.core.effects import new_tuple
from dovetail.core.events import NO_START, Event, Token
from dovetail.core.items import PLACES, item_name, item_place, node_id_of, split_name, split_place
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.step import first_events
from dovetail.core.transitions import NOTHING, TAKEN, Claim, Complete, Decision, Dispatch, Submit
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.records import StoredDefinition
from dovetail.stores.redis.codec import (
    SEPARATOR,
    GraphShape,
    leases_of,
    name_at,
    node_of,
    place_in,
    source,
    time_text,
)
from dovetail.stores.redis.run_index import batch_of
from dovetail.stores.redis.scope import RedisTemplateScope, RunHeaderCache

MAX_PREDICTED = 100
"""Nodes or items of one run and call. Of more, workers begin with these while the rest is made; and
if the call decides otherwise, no more messages than these are useless."""
MAX_PREDICTED_MAPS = 1000
"""Mapped nodes whose next items `NextItems` remembers: far more than run at once. Beyond it forgets
them all, and predicts again after the next results."""
Predicted = tuple[list[Dispatch], RedisTemplateScope]
"""The dispatches that a call will decide, and the scope in which they are rendered."""


def predict_roots(run: RunState, shape: GraphShape, token: Token) -> Predicted | None:
    """The dispatches of the first nodes of this run, with this token."""
    roots = shape.predictable_roots[:MAX_PREDICTED]
    if not roots:
        return None
    orders = [new_tuple(Dispatch, (run, index, token, None)) for index in roots]
    return orders, RedisTemplateScope(run)


def predict_children(
    run: RunState,
    shape: GraphShape,
    moves: Sequence[Complete],
    token: Token,
) -> Predicted | None:
    """The dispatches of the children that are ready with these results, with this token."""
    graph, predictable = run.graph, shape.predictable
    index, nodes, count = graph.index, graph.nodes, len(moves)
    outputs = {index[move.node]: move.output for move in moves}
    ready: dict[int, None] = {}
    for parent in outputs:
        for child, parents in predictable[parent]:
            if parents == 1 or (
                parents <= count
                and child not in ready
                and all(p in outputs for p in nodes[child].parents)
            ):
                ready[child] = None
        if len(ready) >= MAX_PREDICTED:
            break
    if not ready:
        return None
    scope = RedisTemplateScope(run)
    for parent, output in outputs.items():
        scope.add(parent, NodeStatus.COMPLETED, output, None)
    first = islice(ready, MAX_PREDICTED)
    return [new_tuple(Dispatch, (run, child, token, None)) for child in first], scope


class NextItems:
    """Predicts which items of a mapped node begin with the next results.

    That is possible while the window of the node is full and no other process applies its results.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], tuple[int, bool]] = {}
        """By run and node: the item that begins next, and whether the last reply showed that no
        other process begins items of the node."""

    def predict(
        self, run: RunState, shape: GraphShape, index: int, count: int, token: Token
    ) -> Predicted | None:
        """The dispatches that follow from `count` results of the node's items, with this token."""
        first, is_sure = self._next.get((run.id, index), (0, False))
        spec = run.graph.nodes[index]
        if not is_sure or shape.needs[index] or spec.cache_ttl is not None:
            return None
        items = range(first, first + min(count, MAX_PREDICTED))
        orders = [new_tuple(Dispatch, (run, index, token, item)) for item in items]
        return orders, RedisTemplateScope(run)

    def note_expanded(self, run: RunState, index: int, begun: Sequence[Dispatch]) -> None:
        """Note the next item behind the first window, if this process has begun that."""
        spec = run.graph.nodes[index].for_each
        window = 0 if spec is None else spec.window
        if window and [order.item for order in begun] == [*range(window)]:
            self._keep(run.id, index, window, is_sure=True)

    def note_completed(self, run_id: str, index: int, reply: Sequence[int]) -> None:
        """Note the next item from a reply of `complete_items.lua`."""
        done, _, first, *begun = reply
        expected, _ = self._next.pop((run_id, index), (-1, False))
        if not done or len(begun) != 2 * done:
            return  # the general rule goes on from here, or not each result began one item
        self._keep(run_id, index, first + done, is_sure=first == expected)

    def _keep(self, run_id: str, index: int, following: int, *, is_sure: bool) -> None:
        if len(self._next) >= MAX_PREDICTED_MAPS:
            self._next.clear()
        self._next[run_id, index] = (following, is_sure)


MAX_NODES_PER_CALL = 500
"""A longer script would block other clients of Redis."""


def submit_args(
    submit: Submit,
    shape: GraphShape,
    stored: StoredDefinition,
    now: float,
    nonce: int,
    *,
    listed: bool,
) -> list[Argument]:
    """The arguments of `submit.lua`. `listed`: the run is listed in Redis, which then has to know
    its batch."""
    graph = submit.graph
    batch: tuple[Argument, ...] = ()
    if listed and submit.place is not None:
        batch = ("batch", batch_of(submit.place[0]), "place", submit.place[1])
    return [
        *(time_text(now), nonce, _created_data(graph.name, submit.version), shape.roots_text),
        *("1" if shape.conditional_root else "0", graph.max_concurrency or 0, len(graph.nodes)),
        "" if submit.max_bytes is None else submit.max_bytes,
        *("workflow", graph.name, "version", "" if submit.version is None else submit.version),
        *("definition", stored.sha256, "retries", stored.retries),
        *("params", orjson.dumps(submit.params), *batch, *_unusual(graph)),
    ]


def _unusual(graph: Graph) -> tuple[Argument, ...]:
    limit = ("limit", graph.max_concurrency) if graph.max_concurrency else ()
    return limit if graph.fail_fast else (*limit, "fail_fast", "0")


@lru_cache(64)
def _created_data(workflow: str, version: int | None) -> bytes:
    """The data of run.created."""
    return orjson.dumps({"workflow": workflow, "version": version})


def submitted(
    submit: Submit,
    run: RunState,
    answer: Sequence[int],
    now: float,
    token: Token,
    sent: Container[int],
    *,
    events: bool,
) -> Decision:
    """The decision of a submit. If verdicts are pending, only its beginning. Roots that were `sent`
    already are not dispatched again.

    Without `events`, the decision says only which nodes are queued.
    """
    if not answer:
        return NOTHING
    _, pending, *published = answer
    graph = submit.graph
    decision = Decision()
    if events or pending:
        decision.events = first_events(submit, now)
    if not pending:
        decision.changed += graph.roots
        if events:
            for seq, root in enumerate(graph.roots, 3):
                decision.events.append(Event(seq, now, "node.queued", 1, graph.nodes[root].id, 0))
    decision.dispatch = [Dispatch(run, index, token) for index in published if index not in sent]
    return decision


def claim_args(worker: str, until: float, now: float, *, again: bool) -> list[Argument]:
    """The first arguments of a claim; behind them come the place and the token of each node or
    item. `again`: a call that is sent again gets the same reply."""
    name = worker.replace(SEPARATOR, "/")
    return [time_text(now), time_text(until), name, orjson.dumps(name), "1" if again else "0"]


MAP_NONCE = b"|%d|" % NO_START
"""In the state of a mapped node whose list is known: the nonce of its token."""
NODE_STARTED = 2
"""In a reply of `claim_items.lua`: the item is granted, and its node is RUNNING from now on."""


def claimed_token(token: Token) -> str:
    return "{}|{}|{}".format(*token)


def claim_script(run_id: str, *, of_items: bool) -> tuple[str, tuple[str, ...]]:
    """The script that claims nodes, or items of one node, and its keys."""
    own = f"wf:{{{run_id}}}:"
    if of_items:
        return "claim_items", (own + "maps", own + "events", own + "nodes")
    return "claim", (own + "nodes", own + "events")


def claimed(move: Claim, graph: Graph, place: int, answer: Sequence[int], now: float) -> Decision:
    """The decision of the claim of one node or item."""
    seq, granted = answer
    if not granted:
        return NOTHING
    decision = Decision()
    index, _ = split_place(place)
    decision.changed.append(index)
    data = {"worker": move.worker.replace(SEPARATOR, "/")}
    epoch, attempt, _ = move.token
    first = seq - (granted == NODE_STARTED)
    decision.events.append(Event(first, now, "node.started", epoch, move.node, attempt, data))
    if granted == NODE_STARTED:  # with its first item
        own = (epoch, graph.nodes[index].id, 1, {"worker": None})
        decision.events.append(Event(seq, now, "node.started", *own))
    return decision


def complete_args(
    moves: Sequence[Complete], shape: GraphShape, now: float, nonce: int
) -> list[Argument] | None:
    """The arguments of `complete_many.lua`.

    None if a move is not for this script, because the run has no such node, or the node was started
    twice; or if the script would stop at the first move, because a child has a condition.
    """
    index, children, dumps = shape.graph.index, shape.children_text, orjson.dumps
    args: list[Argument] = [time_text(now), nonce]
    for _, node, token, output, _ in moves:
        at = index.get(node)
        if at is None or token[0] != 1 or token[1] != 1:
            return None
        if children[at] == "?" and len(args) == 2:
            return None
        args += (at, token[2], dumps(output), children[at])
    return args


def complete_items_args(
    moves: Sequence[Complete], graph: Graph, now: float, nonce: int
) -> list[Argument] | None:
    """The arguments of `complete_items.lua`. None if a move is not for this script, because the
    items are of several nodes, or one was started twice."""
    owner, _ = split_name(moves[0].node)
    index = graph.index.get(owner)
    if index is None or graph.nodes[index].for_each is None:
        return None
    first, dumps = item_place(index, 0), orjson.dumps
    args: list[Argument] = [time_text(now), nonce, index]
    for _, name, token, output, _ in moves:
        node, item = split_name(name)
        if item is None or node != owner or token[0] != 1 or token[1] != 1:
            return None
        args += (first + item, token[2], dumps(output))
    return args


def completed_items(
    moves: Sequence[Complete],
    run: RunState,
    answer: Sequence[int],
    now: float,
    token: Token,
    *,
    sent: Container[int],
    events: bool,
) -> list[Decision]:
    """The decisions of the moves that the script has done. Items that were `sent` already are not
    dispatched again.

    Without `events`, the decisions say only which items are begun, all in the last one.
    """
    done, length, _, *begun = answer
    graph: Graph = run.graph
    index = graph.index[split_name(moves[0].node)[0]]
    if not events:
        decisions = [TAKEN] * done
        if begun:
            decisions[-1] = _changed(index)
            decisions[-1].changed.append(index)  # twice: an item completed, and others began
            decisions[-1].dispatch = [
                new_tuple(Dispatch, (run, index, token, place % PLACES))
                for place in begun[1::2]
                if place not in sent
            ]
        return decisions
    begun_by: dict[int, list[int]] = {}
    pairs = iter(begun)
    for number, place in zip(pairs, pairs, strict=True):
        begun_by.setdefault(number, []).append(place)
    decisions = []
    seq = length - done - len(begun) // 2
    for number, move in enumerate(moves[:done], 1):
        decision = _changed(index)
        seq += 1
        decision.events.append(Event(seq, now, "node.completed", 1, move.node, 1))
        for place in begun_by.get(number, ()):
            item = place % PLACES
            if place in sent:
                decision.changed.append(index)  # twice: an item completed, and others began
            else:
                decision.dispatch.append(new_tuple(Dispatch, (run, index, token, item)))
            seq += 1
            name = item_name(graph.nodes[index].id, item)
            decision.events.append(Event(seq, now, "node.queued", 1, name, 0))
        decisions.append(decision)
    return decisions


def completed(
    moves: Sequence[Complete],
    run: RunState,
    answer: Sequence[int],
    now: float,
    token: Token,
    *,
    sent: Container[int],
    events: bool,
) -> list[Decision]:
    """The decisions of the moves that the script has done. Nodes that were `sent` already are not
    dispatched again.

    Without `events`, the decisions say only that the run has ended and which children are ready.
    """
    done, length, ended, *ready = answer
    graph: Graph = run.graph
    index, nodes = graph.index, graph.nodes
    decisions = [TAKEN] * done
    if events or ended:
        for at in range(done) if events else (done - 1,):
            decisions[at] = _changed(index[moves[at].node])
    pairs = iter(ready)
    for number, child in zip(pairs, pairs, strict=True):
        decision = decisions[number - 1]
        if decision is TAKEN:
            decision = decisions[number - 1] = _changed(index[moves[number - 1].node])
        decision.changed.append(child)
        if child not in sent:
            decision.dispatch.append(Dispatch(run, child, token))
    if events:
        seq = length - done - len(ready) // 2 - ended
        for move, decision in zip(moves, decisions, strict=False):
            seq += 1
            decision.events.append(Event(seq, now, "node.completed", 1, move.node, 1))
            for child in decision.changed[1:]:
                seq += 1
                decision.events.append(Event(seq, now, "node.queued", 1, nodes[child].id, 0))
    if ended:
        decisions[-1].ended = True
        decisions[-1].events.append(Event(length, now, "run.completed", 1))
    return decisions


def _changed(index: int) -> Decision:
    decision = Decision()
    decision.changed.append(index)
    return decision


BATCH_SIZE = 64
"""Runs that are read in one call."""
Start = tuple[str, str, Token]


class Claims:
    """Claims nodes and items for workers, and reads what is claimed or may be."""

    def __init__(self, redis: PipelinedRedis, headers: RunHeaderCache) -> None:
        self._redis = redis
        self._headers = headers

    async def claim(
        self, tasks: Sequence[Task], worker: str, until: float, now: float
    ) -> list[bool]:
        """Which of these starts are this worker's now; see `Claim`."""
        groups: dict[tuple[str, str], list[int]] = {}
        """The positions of tasks in `tasks` by run and, for items, by the id of their node."""
        seen: set[Start] = set()
        for at, task in enumerate(tasks):
            start = (task.run_id, task.node_id, task.token)
            if start not in seen:  # a message that came twice
                seen.add(start)
                owner = "" if task.item_index is None else node_id_of(task.node_id)
                groups.setdefault((task.run_id, owner), []).append(at)
        first_args = claim_args(worker, until, now, again=True)
        commands: list[Command] = []
        asked: list[list[int]] = []
        parsed, token = None, ""
        for (run_id, owner), group in groups.items():
            of_items = owner != ""
            script, keys = claim_script(run_id, of_items=of_items)
            for piece in _pieces(group):
                known: list[int] = []
                args = [*first_args]
                token_before = ""
                for at in piece:
                    task = tasks[at]
                    place = await self._place(task) if task.place is None else task.place
                    if place is None or (place >= PLACES) is not of_items:
                        continue
                    if task.token is not parsed:  # tasks that became ready together share a token
                        parsed, token = task.token, claimed_token(task.token)
                    # Only `claim_items.lua` takes an empty token for the one before.
                    args += (place, "" if of_items and token == token_before else token)
                    token_before = token
                    known.append(at)
                if known:
                    commands.append(self._redis.script_command(source(script), keys, args))
                    asked.append(known)
        granted = [False] * len(tasks)
        replies = await self._redis.call_many(commands, now=True)
        for known, (_, *flags) in zip(asked, replies, strict=True):
            for at, flag in zip(known, flags, strict=True):
                granted[at] = bool(flag)
        return granted

    async def offered(self, tasks: Sequence[Task]) -> list[bool]:
        """Which of these starts a worker may still claim."""
        seen: set[Start] = set()
        commands: list[Command] = []
        for task in tasks:
            place = await self._place(task)
            commands.append(("HGET", _key_of(task.run_id, place), -1 if place is None else place))
        found = []
        for task, state in zip(tasks, await self._redis.call_many(commands), strict=True):
            start = (task.run_id, task.node_id, task.token)
            node = None if state is None else node_of(state.decode())
            found.append(
                node is not None
                and node.phase is Phase.PUBLISHED
                and node.token == task.token
                and start not in seen
            )
            seen.add(start)
        return found

    async def phases(self, starts: Sequence[Start]) -> list[Phase | None]:
        """The phase of each start: what it waits for. None if it is no longer queued."""
        by_run: dict[str, list[int]] = {}
        for at, (run_id, _, _) in enumerate(starts):
            by_run.setdefault(run_id, []).append(at)
        found: list[Phase | None] = [None] * len(starts)
        run_ids = list(by_run)
        for first in range(0, len(run_ids), BATCH_SIZE):
            part = run_ids[first : first + BATCH_SIZE]
            await self._headers.look_for(part)
            asked: list[tuple[Command, list[int]]] = []
            for run_id in part:
                header = self._headers.get(run_id) or await self._headers.find(run_id)
                if header is None:  # it is gone, and all that waited in it
                    continue
                graph = header.run.graph
                for some in _pieces(by_run[run_id]):
                    places = [place_in(graph, starts[at][1]) for at in some]
                    asked += _reading(run_id, places, some)
            answers = await self._redis.call_many([command for command, _ in asked])
            for (_, some), states in zip(asked, answers, strict=True):
                for at, state in zip(some, states, strict=True):
                    node = None if state is None else node_of(state.decode())
                    if node is not None and node.token == starts[at][2]:
                        found[at] = node.phase
        return found

    async def running(self, run_ids: Sequence[str]) -> list[tuple[Start, float]]:
        """The running nodes and items of these runs, and the ends of their leases."""
        leases: dict[str, list[tuple[int, Token, float]]] = {}
        for at in range(0, len(run_ids), BATCH_SIZE):  # a run may be large
            part = run_ids[at : at + BATCH_SIZE]
            asked: list[Command] = [("HGETALL", _nodes_of(run_id)) for run_id in part]
            with_items: list[str] = []
            for run_id, flat in zip(part, await self._redis.call_many(asked), strict=True):
                if own := leases_of(flat):
                    leases[run_id] = own
                if any(MAP_NONCE in state for state in flat[1::2]):
                    with_items.append(run_id)
            maps: list[Command] = [("HGETALL", f"wf:{{{one}}}:maps") for one in with_items]
            for run_id, flat in zip(with_items, await self._redis.call_many(maps), strict=True):
                if own := leases_of(flat):
                    leases.setdefault(run_id, []).extend(own)
        await self._headers.look_for(leases)
        found: list[tuple[Start, float]] = []
        for run_id, own in leases.items():
            # A header that had to make room for another of these is read again.
            header = self._headers.get(run_id) or await self._headers.find(run_id)
            if header is None:  # it was lost, or dropped, meanwhile
                continue
            graph = header.run.graph
            found += [
                ((run_id, name_at(graph, place), token), until) for place, token, until in own
            ]
        return found

    async def _place(self, task: Task) -> int | None:
        """The place of the node or item: the message has it, else the run."""
        if task.place is not None:
            return task.place
        header = await self._headers.find(task.run_id)
        return None if header is None else place_in(header.run.graph, task.node_id)


def _nodes_of(run_id: str) -> str:
    return f"wf:{{{run_id}}}:nodes"


def _key_of(run_id: str, place: int | None) -> str:
    """The key of the hash that has the state of a node, or of an item in flight."""
    return f"wf:{{{run_id}}}:{'nodes' if place is None or place < PLACES else 'maps'}"


def _reading(
    run_id: str, places: Sequence[int | None], positions: Sequence[int]
) -> list[tuple[Command, list[int]]]:
    """The commands that read the states at these places; behind each, the positions of its
    starts."""
    by_key: dict[str, tuple[list[int], list[int]]] = {}
    for place, at in zip(places, positions, strict=True):
        fields, asked = by_key.setdefault(_key_of(run_id, place), ([], []))
        fields.append(-1 if place is None else place)
        asked.append(at)
    return [(("HMGET", key, *fields), asked) for key, (fields, asked) in by_key.items()]


def _pieces(positions: list[int]) -> list[list[int]]:
    if len(positions) <= MAX_NODES_PER_CALL:
        return [positions]
    starts = range(0, len(positions), MAX_NODES_PER_CALL)
    return [positions[at : at + MAX_NODES_PER_CALL] for at in starts]
