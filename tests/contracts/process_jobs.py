"""What the processes of `test_store_processes` do; the forker of the fault tests starts them.

Each opens the store, tells that it is ready and waits for the others, so that they collide. The
store is the file in the folder, or the Redis at `url`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from process_forker import tell
from shared_runs import graph, opened

from dovetail.config import Settings
from dovetail.core.events import Token
from dovetail.core.run import Phase, RunState
from dovetail.core.states import FINAL, NodeStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
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
from dovetail.engine.ports import KeyUsed, Store
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.context import Context
from dovetail.handlers.registry import describe
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.wiring.embedded import embedded

FOREVER = float("inf")


async def contest(folder: str) -> None:
    """Wait until the test lets all of them go."""
    tell("ready")
    while not (Path(folder) / "start").exists():
        await asyncio.sleep(0)


@asynccontextmanager
async def contestant(folder: str, url: str | None = None) -> AsyncIterator[Store]:
    async with opened(folder, url) as store:
        await contest(folder)
        yield store


async def make(
    folder: str, nodes: dict[str, list[str]], runs: int = 1, url: str | None = None, **fields: Any
) -> None:
    """Runs without an owner; prints the ids."""
    compiled = graph(nodes, **fields)
    made = [f"run-{number:04}" for number in range(runs)]
    async with opened(folder, url) as store:
        for run_id in made:
            await store.create(Submit(run_id, compiled, {}), time.time())
    tell(made)


async def claim(folder: str, run_id: str, me: str, url: str | None = None) -> None:
    """Claim every published node, each by itself; tells which were granted."""
    async with contestant(folder, url) as store:
        run = await store.load(run_id)
        granted = []
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
            move = Claim(run_id, spec.id, node.token, me, FOREVER)
            (decision,) = await store.apply([move], time.time(), durable=True)
            if decision.changed:
                granted.append(spec.id)
        tell(granted)


async def start(folder: str, run_id: str, url: str | None = None) -> None:
    """Start every published node; tells their tokens."""
    async with opened(folder, url) as store:
        run = await store.load(run_id)
        tokens = {
            spec.id: node.token
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
            if node.phase is Phase.PUBLISHED
        }
        claims = [Claim(run_id, name, token, "w", FOREVER) for name, token in tokens.items()]
        await store.apply(claims, time.time(), durable=True)
        tell(tokens)


async def complete(
    folder: str, run_id: str, tokens: dict[str, list[int]], me: str, url: str | None = None
) -> None:
    """Complete these starts; tells which results counted, and which nodes were published."""
    async with contestant(folder, url) as store:
        counted, published = [], []
        for name, token in tokens.items():
            move = Complete(run_id, name, Token(*token), me)
            (decision,) = await store.apply([move], time.time(), durable=True)
            if decision.changed:
                counted.append(name)
            published += [order.run.graph.nodes[order.node_index].id for order in decision.dispatch]
        tell([counted, published])


async def work(folder: str, run_id: str, me: str, url: str | None = None) -> None:
    """Take whatever is published until the run has ended; tells what was done, and the end."""
    done = []
    chance = random.Random(me)
    async with contestant(folder, url) as store:
        while not (run := await store.load(run_id)).finished:
            ready = [
                (spec.id, node.token)
                for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
                if node.phase is Phase.PUBLISHED
            ]
            chance.shuffle(ready)
            for name, token in ready[:3]:
                now = time.time()
                claim = Claim(run_id, name, token, me, FOREVER)
                (granted,) = await store.apply([claim], now, durable=True)
                if granted.changed:
                    done.append(name)
                    result = Complete(run_id, name, token, me)
                    await store.apply([result], now, durable=chance.random() < 0.5)
        ended = await store.wait(run_id)
        tell(done)
        names = [spec.id for spec in ended.graph.nodes]
        outputs = [node.output for node in ended.nodes]
        tell([ended.status.value, dict(zip(names, outputs, strict=True))])


async def create(folder: str, keys: int, me: str) -> None:
    """Make a run under each key; prints our own ids, and what was found under the rest."""
    compiled = graph({"a": []})
    async with contestant(folder) as store:
        ours, found = [], {}
        for number in range(keys):
            key = ("run", f"key-{number}", "the same")
            run_id = f"{me}-{number}"
            try:
                await store.create(Submit(run_id, compiled, {}, key=key), time.time())
                ours.append(run_id)
            except KeyUsed as known:
                found[number] = known.made
        tell([ours, found])


async def order(folder: str, run_ids: list[str], command: str, url: str | None = None) -> None:
    """Cancel or retry each of these runs; tells where that was granted."""
    moves = {"cancel": Cancel, "retry": Retry}
    async with contestant(folder, url) as store:
        granted = []
        for run_id in run_ids:
            (decision,) = await store.apply([moves[command](run_id)], time.time(), durable=True)
            if decision:
                granted.append(run_id)
        tell(granted)


async def hammer(
    folder: str, run_ids: list[str], rounds: int, me: str, url: str | None = None
) -> None:
    """Whatever could happen to these runs, twice; tells every decision that was one."""
    chance = random.Random(me)
    known: dict[tuple[str, str], list[Token]] = {}
    async with contestant(folder, url) as store:
        for _ in range(rounds):
            run = await store.load(chance.choice(run_ids))
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
                tokens = known.setdefault((run.id, spec.id), [])
                if node.token.nonce and node.token not in tokens:
                    tokens.append(node.token)
            now = time.time()
            moves = [move for _ in range(3) for move in _any_of(run, known, now, chance, me)]
            for batch in (moves, moves) if chance.random() < 0.3 else (moves,):
                decisions = await store.apply(batch, now)
                for move, decision in zip(batch, decisions, strict=True):
                    if decision:
                        published = [order.node_index for order in decision.dispatch]
                        kind = type(move).__name__
                        tell([kind, move, now, decision.events, published, decision.ended])
        tell("end")


def _any_of(
    run: RunState, known: dict[tuple[str, str], list[Token]], now: float, chance: Any, me: str
) -> list[Transition]:
    """One thing that may happen; with a mark in the log behind it if it leaves none itself."""
    if chance.random() < 0.005:
        return [Cancel(run.id)]
    if run.status in FINAL and chance.random() < 0.5:
        return [Retry(run.id, chance.choice([None, chance.choice(run.graph.nodes).id]))]
    able = [
        spec
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        if node.status in (NodeStatus.QUEUED, NodeStatus.RUNNING)
    ]
    spec = chance.choice(able if able and chance.random() < 0.9 else run.graph.nodes)
    tokens = known[run.id, spec.id]
    if not tokens:
        return []
    token = tokens[-1] if chance.random() < 0.8 else chance.choice(tokens)
    start = (run.id, spec.id, token)
    mark = Complete(run.id, spec.id, token._replace(nonce=-1), None)
    error = {"type": "E", "message": "m"}
    node = run.node(spec.id)
    if node.phase is Phase.PUBLISHED:
        likely: list[list[Transition]] = [[Claim(*start, me, now + 0.002)]] * 3
        likely += [[Park(*start, now + 0.001)], [Recall(*start, spec.id)]]
    elif node.until is not None:
        likely = [[Wake(*start), mark]]
    else:
        likely = [[Complete(*start, spec.id)]] * 3
        likely += [[Fail(*start, error)], [Fail(*start, error, permanent=True)]]
        likely += [[Reap(*start, 3)], [Renew(*start, now + 0.005), mark], [Progress(*start, 0.5)]]
    return chance.choice(likely)


async def open_new(folder: str, attempts: int) -> None:
    """Open files that are not there yet, each together with all the others."""
    tell("ready")
    for number in range(attempts):
        while not (Path(folder) / f"start-{number}").exists():
            await asyncio.sleep(0)
        async with SqliteStore(Path(folder) / f"{number}.db", sync="normal") as store:
            await store.create(Submit(store.owner.name, graph({"a": []}), {}), time.time())
        tell(number)


async def adopt(folder: str, run_ids: list[str]) -> None:
    """Drive every run without an owner to its end; tells what was taken, and what was executed."""
    executed = []

    async def step(config: Any, ctx: Context) -> None:
        executed.append(f"{ctx.run_id} {ctx.node_id}")

    settings = Settings(db=Path(folder) / "runs.db", db_sync="normal")
    registry = builtin_registry(settings)
    registry.add(describe(step, name="step"))
    async with embedded(settings, registry) as commands:
        await contest(folder)
        taken = await commands.resume()
        for run_id in run_ids:
            await commands.wait(run_id)
        tell([taken, executed])
