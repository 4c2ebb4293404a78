"""One run twice: in a store, and in the bare core beside it. Whatever happens, happens to both.

Nonces are the store's own, so a token is compared by its epoch and attempt, and translated on the
way in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count, cycle
from typing import Any

from dovetail.core.dag import Graph
from dovetail.core.events import NO_START, NO_TOKEN, Event, Token
from dovetail.core.step import begin, step
from dovetail.core.transitions import Complete, Decision, Submit, Transition
from dovetail.engine.ports import Store

from ..core.drawn import DrawnAction, Meaning
from ..core.invariants import order_name, startable
from .stores import Peers, new_run_id, plain, read


def in_silence(_: str) -> None:
    """Ignores the story."""


class Twins:
    """One run in a store and the same run in the bare core."""

    def __init__(
        self,
        peers: Peers,
        graph: Graph,
        tell: Callable[[str], None],
        max_bytes: int | None = None,
        reused: Mapping[str, Any] | None = None,
    ) -> None:
        """With `reused` outputs the run is a fork."""
        self._reused = reused
        self._max_bytes = max_bytes
        self._peers = cycle(peers)
        self._tell = tell
        self.graph = graph
        self.id = new_run_id()
        self.now = 1000.0
        self.log: list[Event] = []
        self._nonces = count(1)
        self._batch: list[tuple[Transition, Decision]] = []
        self._theirs: dict[tuple[str, int, int], Token] = {}
        self.met: Counter[tuple[type, bool]] = Counter()
        """Which transitions were taken, and which were refused."""

    @property
    def store(self) -> Store:
        """Another handle each time: what one has done, all of them see."""
        return next(self._peers)

    async def walk(self, story: list[DrawnAction]) -> None:
        await self.begin()
        for deed in story:
            await self.happen(deed)
        await self.end()

    async def begin(self) -> None:
        submit = Submit(self.id, self.graph, {"p": 1}, max_bytes=self._max_bytes)
        if self._reused is not None:
            submit = submit._replace(reused=self._reused, forked_from="older")
        self.core, ours = begin(submit, self.now, next(self._nonces))
        self.log += ours.events
        theirs = await self.store.create(submit, self.now)
        assert decided(theirs) == decided(ours)
        self.meaning = Meaning(self.id, {})
        await self._compare()

    async def happen(self, deed: DrawnAction) -> None:
        if deed.wait:  # what happens at the same time is applied together
            await self.settle()
            self.now += deed.wait
        move = self.meaning.of(deed, self.core, self.now)
        token = getattr(move, "token", None)
        if token is not None and not self._known(move):
            await self.settle()  # its token was made in this very batch
        self._add(move)
        if deed.place % 3 == 0:  # delivered twice, and a message of another run in between
            self._add(move)

    async def together(self, moves: list[Transition], wait: float, *, heard: bool = True) -> None:
        """All of these at once; not `heard`: what was decided may not have reached who asked."""
        self.now += wait
        for move in moves:
            self._add(move)
        await self.settle(heard=heard)

    def _add(self, move: Transition) -> None:
        ours = step(self.core, move, self.now, next(self._nonces))
        self.met[type(move), bool(ours)] += 1
        self.log += ours.events
        self.meaning.learn(self.core)
        self._batch.append((self._translated(move), ours))

    async def settle(self, *, heard: bool = True) -> None:
        if not self._batch:
            return
        moves = [move for move, _ in self._batch]
        for move in moves:
            self._tell(f"{self.now}: {move}")
        stranger = Complete("nobody", "a", Token(1, 1, 1), None)
        *theirs, nothing = await self.store.apply([*moves, stranger], self.now)
        assert not nothing
        if heard:
            assert [decided(decision) for decision in theirs] == [
                decided(decision) for _, decision in self._batch
            ]
        self._batch.clear()
        await self._compare()

    async def end(self) -> None:
        await self.settle()
        for after in (0, len(self.log) // 2):
            events = await read(self.store, self.id, len(self.log) - after, after)
            assert events == self.log[after:]

    async def _compare(self) -> None:
        run = await self.store.load(self.id)
        assert plain(run) == plain(self.core)
        nodes = zip((spec.id for spec in self.graph.nodes), run.nodes, strict=True)
        for name, node in (*nodes, *startable(run)):
            if node.token.nonce != NO_START:  # no message has such a token
                self._theirs[name, node.token.epoch, node.token.attempt] = node.token
        self.meaning.learn(self.core)

    def _known(self, move: Any) -> bool:
        token: Token = move.token
        genuine = token in self.meaning.tokens.get(move.node, [])
        return not genuine or (move.node, token.epoch, token.attempt) in self._theirs

    def _translated(self, move: Any) -> Transition:
        token: Token | None = getattr(move, "token", None)
        if token is None or token == NO_TOKEN:
            return move  # type: ignore[no-any-return]
        theirs = self._theirs.get((move.node, token.epoch, token.attempt))
        genuine = token in self.meaning.tokens.get(move.node, [])
        if theirs is None:  # a forged one of this very batch must not be theirs by chance
            return move if genuine else move._replace(token=token._replace(nonce=-1))  # type: ignore[no-any-return]
        if not genuine:
            theirs = theirs._replace(nonce=theirs.nonce ^ 1)  # as forged there as it is here
        return move._replace(token=theirs)  # type: ignore[no-any-return]


def decided(decision: Decision) -> dict[str, Any]:
    """Everything a decision says, without nonces and whose run it is."""
    return {
        "changed": set(decision.changed),
        "events": decision.events,
        "dispatch": [(order_name(order), order.token[:2]) for order in decision.dispatch],
        "wake": [(at, wake.node, wake.token[:2]) for at, wake in decision.wake],
        "stop": [(stop.node, stop.token[:2]) for stop in decision.stop],
        "ended": decision.ended,
        "something": bool(decision),
    }
