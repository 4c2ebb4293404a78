"""Accepted runs that are not created yet: idempotency keys, places in batches, whole batches.

A key, a place and a run are in different slots and cannot be written together. The first of them
stores everything that is needed to create the rest, ids included. If its process dies, a repeated
request creates the same runs, and so does an orchestrator that finds them pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from dovetail.core.dag import Graph
from dovetail.core.errors import NotFound
from dovetail.core.transitions import Submit
from dovetail.engine.distributed.triggers import PendingRun
from dovetail.engine.idempotency import is_for_a_batch
from dovetail.engine.ports import Key, KeyUsed
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import keys_of, source
from dovetail.stores.redis.definitions import ACCEPTED, definition, definition_key
from dovetail.stores.redis.run_index import (
    ALL_BATCHES,
    BATCH_IDS,
    batch_entry,
    batch_key,
    batch_number,
    batch_of,
)

OPEN_BATCHES = "wf:opened"
"""Batches that were opened before their runs, by time: the caller may never trigger any."""
MAX_WORDS_PER_COMMAND = 2000
"""A larger command would block other clients of Redis."""
BATCH_SIZE = 100
"""Runs of a batch that are looked for together."""


class RedisAcceptedRuns:
    def __init__(self, redis: PipelinedRedis, definitions: Definitions) -> None:
        self._redis = redis
        self._definitions = definitions

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def accept(self, submit: Submit, now: float) -> Submit:
        """Claim the run's key and its place in a batch, before it is made.

        Returns what is to be made: under another id if it was accepted before and its maker
        died. Raises `KeyUsed` if the run is there, or if the key was used for something else.
        """
        if submit.key is not None:
            submit = await self._claim_key(submit, submit.key, now)
        if submit.place is not None:
            submit = await self._claim_place(submit, submit.place)
        return submit

    async def made(self, submit: Submit) -> None:
        """The run is there, so what was kept to make it is not needed any more."""
        if submit.key is not None:
            await self.settle(_key_name(submit.key))

    async def _claim_key(self, submit: Submit, key: Key, now: float) -> Submit:
        name = _key_name(key)
        known = await self.known(key)
        if known is None:
            todo = await self._todo([submit], None, now)
            # In one roundtrip, so that no reader finds one for long without the other.
            _, (body, made) = await asyncio.gather(
                self._redis.call("ZADD", ACCEPTED, "NX", repr(now), name),
                self._redis.call_script(
                    source("records_claim"), [name], [key[2], submit.run_id, todo]
                ),
            )
            known = KeyUsed(made.decode(), same_body=body.decode() == key[2])
        if not known.same_body:
            raise known
        if known.made != submit.run_id:
            submit = await self._first_asked(key, submit._replace(run_id=known.made))
        if await self._is_there(submit.run_id):
            raise known
        # The key is deleted with the run.
        await self._redis.call("HSET", keys_of(submit.run_id)[0], "key", name)
        return submit

    async def known(self, key: Key) -> KeyUsed | None:
        """What was accepted under a key, without accepting anything."""
        name = _key_name(key)
        body, made = await self._redis.call("HMGET", name, "body", "made")
        if made is None:
            return None
        if await self._is_forgotten(made.decode()):
            await self.unclaim(name, made.decode())
            return None
        return KeyUsed(made.decode(), same_body=body.decode() == key[2])

    async def _first_asked(self, key: Key, submit: Submit) -> Submit:
        """The run as it was accepted, while it is not created: the workflow may have changed, and
        two processes that create it must create the same."""
        todo = await self._redis.call("HGET", _key_name(key), "todo")
        if todo is None:
            return submit
        with suppress(NotFound):
            (submit,) = await self._kept(orjson.loads(todo), key)
        return submit

    async def _claim_place(self, submit: Submit, place: tuple[int, int]) -> Submit:
        batch_id, index = batch_of(place[0]), place[1]
        places = f"{batch_key(batch_id)}:places"
        await self._redis.call("HSETNX", places, index, submit.run_id)
        made = (await self._redis.call("HGET", places, index)).decode()
        if made != submit.run_id:
            if submit.key is not None:  # it is for a run that will never be
                await self._release(_key_name(submit.key), submit.run_id)
            submit = submit._replace(run_id=made)
            if await self._is_there(made) or await self._is_forgotten(made):
                raise KeyUsed(made, same_body=True)
        return submit

    async def _release(self, name: str, run_id: str) -> None:
        await self.unclaim(name, run_id)
        await self._redis.call("DEL", keys_of(run_id)[0])
        await self._redis.call("ZREM", ACCEPTED, name)

    async def unclaim(self, name: str, made: str) -> None:
        """The key is free again, if it is for that run or batch."""
        await self._redis.call_script(source("records_unclaim"), [name], [made])

    async def _is_forgotten(self, run_id: str) -> bool:
        """It ended long ago, and a process is about to remove it from the lists."""
        return bool(await self._redis.call("HEXISTS", keys_of(run_id)[0], "dropped"))

    async def _is_there(self, run_id: str) -> bool:
        return bool(await self._redis.call("HEXISTS", keys_of(run_id)[0], "status"))

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def open_batch(
        self, batch_id: str, workflow: str, count: int, key: Key | None, now: float
    ) -> None:
        """Make a batch whose runs come later. Raises `KeyUsed`."""
        await self._write_batch(batch_id, workflow, count, key, now)
        await self._claim_for_batch(batch_id, key)

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Submit]:
        """Make a batch; from now on all its runs will be made. Raises `KeyUsed`.

        Returns them with their places. The caller calls `batch_made` once they are created.
        """
        number = batch_number(batch_id)
        placed = [one._replace(place=(number, index)) for index, one in enumerate(submits)]
        todo = await self._todo(placed, batch_id, now)
        workflow = placed[0].graph.name
        # Safe: every process that creates these runs reads their ids in `todo`.
        taken = [word for index, one in enumerate(placed) for word in (index, one.run_id)]
        places: list[Command] = [
            ("HSET", f"{batch_key(batch_id)}:places", *taken[first : first + MAX_WORDS_PER_COMMAND])
            for first in range(0, len(taken), MAX_WORDS_PER_COMMAND)
        ]
        await self._write_batch(batch_id, workflow, len(placed), key, now, todo, places)
        await self._claim_for_batch(batch_id, key)
        return placed

    async def batch_made(self, batch_id: str) -> None:
        await self.settle(batch_key(batch_id))

    async def _write_batch(
        self,
        batch_id: str,
        workflow: str,
        count: int,
        key: Key | None,
        now: float,
        todo: bytes = b"",
        places: Sequence[Command] = (),
    ) -> None:
        name = batch_key(batch_id)
        fields: list[str | bytes | int] = ["workflow", workflow, "count", count]
        fields += ["created_at", repr(now)]
        if key is not None:
            fields += ["key", _key_name(key), "body", key[2]]
        # Listed first: an entry whose batch was never written is passed over.
        commands: list[Command] = [
            ("ZADD", ALL_BATCHES, 0, batch_entry(batch_id, now)),
            ("ZADD", BATCH_IDS, 0, batch_id),
        ]
        if todo:
            fields += ["todo", todo]
            commands.append(("ZADD", ACCEPTED, repr(now), name))
        else:
            commands.append(("ZADD", OPEN_BATCHES, repr(now), batch_id))
        await self._redis.call_many([*commands, ("HSET", name, *fields), *places])

    async def _claim_for_batch(self, batch_id: str, key: Key | None) -> None:
        if key is None:
            return
        known = await self._claimed(_key_name(key), key[2], batch_id)
        if known is not None:
            await self._forget_batch(batch_id)
            raise known

    async def _claimed(self, name: str, body: str, batch_id: str) -> KeyUsed | None:
        kept, made = await self._redis.call_script(
            source("records_claim"), [name], [body, batch_id, ""]
        )
        if made.decode() == batch_id:
            return None
        return KeyUsed(made.decode(), same_body=kept.decode() == body)

    async def _forget_batch(self, batch_id: str) -> None:
        name = batch_key(batch_id)
        await self.drop_batch(batch_id)
        await self._redis.call("ZREM", ACCEPTED, name)
        await self.no_longer_opened(batch_id)

    async def drop_batch(self, batch_id: str) -> None:
        """The batch itself and where it is listed. Safe to repeat: a crash on the way leaves the
        batch, and so it is dropped again."""
        name = batch_key(batch_id)
        created_at = await self._redis.call("HGET", name, "created_at")
        commands: list[Command] = [("ZREM", BATCH_IDS, batch_id)]
        if created_at is not None:
            commands.append(("ZREM", ALL_BATCHES, batch_entry(batch_id, float(created_at))))
        await self._redis.call_many(commands)
        await self._redis.call("DEL", name, f"{name}:places")

    async def opened(self, before: float, limit: int) -> list[str]:
        """Batches that were opened before that time."""
        found = await self._redis.call(
            "ZRANGEBYSCORE", OPEN_BATCHES, "-inf", repr(before), "LIMIT", 0, limit
        )
        return [batch_id.decode() for batch_id in found]

    async def no_longer_opened(self, batch_id: str) -> None:
        """It goes with its runs from now on, or is gone."""
        await self._redis.call("ZREM", OPEN_BATCHES, batch_id)

    # ── what a maker left behind ─────────────────────────────────────────────────────────

    async def unmade(self, accepted_before: float, limit: int = 100) -> list[PendingRun]:
        """What was accepted before that time and has runs that are not there."""
        names = await self._redis.call(
            "ZRANGEBYSCORE", ACCEPTED, "-inf", repr(accepted_before), "LIMIT", 0, limit
        )
        found = [await self._left(name.decode()) for name in names]
        return [left for left in found if left is not None]

    async def unmade_under(self, key: Key, made: str) -> PendingRun | None:
        return await self._left(batch_key(made) if is_for_a_batch(key) else _key_name(key))

    async def _left(self, name: str) -> PendingRun | None:
        try:
            left = await self._left_of(name)
        except NotFound:
            left = None  # half of it was deleted: it cannot be created, and others wait
        if left is None:
            await self._redis.call("ZREM", ACCEPTED, name)
        return left

    async def _left_of(self, name: str) -> PendingRun | None:
        todo, key, body = await self._redis.call("HMGET", name, "todo", "key", "body")
        if todo is None:
            return None
        kept = orjson.loads(todo)
        batch_id = kept["batch"]
        own_key: Key | None = None
        if batch_id is None:
            scope, text = name.removeprefix(_KEYS).split(":", 1)
            own_key = (scope, text, body.decode())
        # Its maker may have died before it claimed the batch's key: then it is claimed now.
        elif key is not None and await self._claimed(key.decode(), body.decode(), batch_id):
            await self._forget_batch(batch_id)
            return None
        submits = await self._kept(kept, own_key)
        unmade: list[Submit] = []
        there: list[str] = []
        for first in range(0, len(submits), BATCH_SIZE):
            some = submits[first : first + BATCH_SIZE]
            accepting = (self.accept(submit, kept["created_at"]) for submit in some)
            for accepted in await asyncio.gather(*accepting, return_exceptions=True):
                if isinstance(accepted, Submit):
                    unmade.append(accepted)
                elif isinstance(accepted, KeyUsed):
                    there.append(accepted.made)
                else:
                    raise accepted
        return PendingRun(name, unmade, kept["created_at"], there)

    async def _kept(self, todo: dict[str, Any], key: Key | None) -> list[Submit]:
        """What `_todo` has written down. Raises `NotFound`."""
        versions = [(todo["version"], todo["definition"], todo["retries"]), *todo.get("others", ())]
        graphs = [await self._graph(sha256, retries) for _, sha256, retries in versions]
        return [
            Submit(
                run_id,
                graphs[which[0] if which else 0],
                params,
                versions[which[0] if which else 0][0],
                key=key,
                place=None if place is None else (batch_number(place[0]), place[1]),
                forked_from=todo.get("forked_from"),
                reuse=todo.get("reuse", ()),
            )
            for run_id, params, place, *which in todo["runs"]
        ]

    async def _graph(self, sha256: str, retries: str) -> Graph:
        content = await definition(self._redis, sha256)
        if content is None:
            raise NotFound(f"the definition {sha256} is not in Redis any more")
        return self._definitions.graph(int(sha256, 16), retries.encode(), lambda: content)

    async def settle(self, name: str) -> None:
        await self._redis.call_many([("HDEL", name, "todo"), ("ZREM", ACCEPTED, name)])

    async def _todo(self, submits: Sequence[Submit], batch_id: str | None, now: float) -> bytes:
        first = submits[0]
        graphs = {id(one.graph): one for one in submits}  # several, by an alias with weights
        versions = []
        for one in graphs.values():
            stored = self._definitions.stored(one.graph)
            await self._redis.call("SET", definition_key(stored.sha256), stored.content, "NX")
            versions.append((one.version, stored.sha256, stored.retries.decode()))
        which = {graph: number for number, graph in enumerate(graphs)}
        version, sha256, retries = versions[0]
        kept: dict[str, Any] = {
            "version": version,
            "definition": sha256,
            "retries": retries,
            "created_at": now,
            "batch": batch_id,
            "runs": [
                [one.run_id, one.params, _place(one)]
                + ([which[id(one.graph)]] if which[id(one.graph)] else [])
                for one in submits
            ],
        }
        if len(versions) > 1:
            kept["others"] = versions[1:]
        if first.forked_from is not None:
            kept |= {"forked_from": first.forked_from, "reuse": list(first.reuse)}
        return orjson.dumps(kept)


_KEYS = "wf:key:"


def _key_name(key: Key) -> str:
    scope, text, _ = key
    return f"{_KEYS}{scope}:{text}"


def _place(submit: Submit) -> tuple[str, int] | None:
    return None if submit.place is None else (batch_of(submit.place[0]), submit.place[1])
