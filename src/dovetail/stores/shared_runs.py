"""Runs that many processes share, as the commands see them: hot in Redis, and then in the archive.

A run is in Redis while it goes on, and for a while after; one that Redis has dropped, or lost, is
read from the archive, if there is one. Nothing is driven here: whatever is decided is sent out to
whoever does. What it must not know: any rule, or who asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, Protocol

from dovetail.core.errors import BrokenRun, Conflict, NotFound
from dovetail.core.events import Event
from dovetail.core.outputs import Elsewhere, Room
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Decision, Submit, Transition
from dovetail.engine.damage import unread_run
from dovetail.engine.ports import Cached, Key, KeyUsed
from dovetail.engine.submissions import Submissions
from dovetail.pipe import Pipe
from dovetail.stores.postgres import Archived
from dovetail.stores.redis import RedisStore, keys_of

LOOK_SECONDS = 0.5
"""How often the archive is looked at for a run that will be back in Redis."""
MOST_TOLD = 5

log = logging.getLogger("dovetail.store")


class Archive(Protocol):
    """Runs that Redis does not have."""

    async def load(
        self, run_id: str, *, outputs: bool = True, room: Room | None = None
    ) -> RunState:
        """Raises `NotFound`."""
        ...

    async def read_outputs(self, run: RunState, wanted: Sequence[Elsewhere]) -> list[bytes]:
        """Those of a run that `load` gave. Raises `StoreError`."""
        ...

    async def log(self, run_id: str, after: int) -> list[Event]:
        """As far as it is archived."""
        ...

    async def bring_back(self, run_id: str) -> None:
        """Put it into Redis again. Raises `NotFound`."""
        ...

    async def has(self, run_id: str) -> bool:
        """Whether it can be put back as it was archived."""
        ...

    async def keep(self, run_ids: Sequence[str]) -> None:
        """Write down what became of these, if that can be done at once."""
        ...


class SharedRuns:
    def __init__(
        self, pipe: Pipe, hot: RedisStore, submissions: Submissions, archive: Archive | None
    ) -> None:
        self._pipe = pipe
        self._hot = hot
        self._submissions = submissions
        self._archive = archive

    # ── runs are made and moved ──────────────────────────────────────────────────────────

    async def create(self, submit: Submit, now: float) -> Decision:
        return await self._hot.create(submit, now)

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Decision]:
        """Whatever follows is sent out as the runs are made."""
        await self._submissions.submit_batch(batch_id, submits, key, now)
        return []

    async def made_under(self, key: Key) -> KeyUsed | None:
        return await self._submissions.made_under(key)

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        if self._archive is not None:
            for run_id in {move.run_id for move in moves}:
                if not await self._is_hot(run_id):
                    await self._archive.bring_back(run_id)
        decisions = await self._submissions.apply(moves, durable=durable)
        if durable and self._archive is not None:  # Redis may still lose it, in the next second
            decided = zip(moves, decisions, strict=True)
            await self._archive.keep([move.run_id for move, decision in decided if decision])
        return decisions

    async def _is_hot(self, run_id: str) -> bool:
        return bool(await self._pipe.call("HEXISTS", keys_of(run_id)[0], "status"))

    # ── runs that are damaged ────────────────────────────────────────────────────────────

    async def repair(self, run_id: str, *, dry_run: bool = False) -> list[str]:
        """From its log in Redis; if that is damaged, from the archive, as far as that has it."""
        now = self._submissions.now()
        try:
            found = await self._hot.repair(run_id, now, dry_run=dry_run)
        except BrokenRun as problem:
            found = await self._put_back(run_id, problem, now, dry_run=dry_run)
        if found and not dry_run:
            log.warning("run %s: repaired: %s", run_id, "; ".join(found[:MOST_TOLD]))
            await self._submissions.look_after(run_id)
            if self._archive is not None:
                await self._archive.keep([run_id])
        return found

    async def _put_back(
        self, run_id: str, problem: BrokenRun, now: float, *, dry_run: bool
    ) -> list[str]:
        if self._archive is None or not await self._archive.has(run_id):
            raise problem
        found = [f"what Redis has of it cannot be used ({problem}); the archive has it"]
        if not dry_run:
            await self._pipe.call("UNLINK", *keys_of(run_id))
            self._hot.forget(run_id)
            await self._archive.bring_back(run_id)
            found += await self._hot.repair(run_id, now)
        return found

    async def end_damaged(self, run_id: str, why: str, now: float) -> RunState:
        if not await self._hot.end_by_force(run_id, now):
            raise Conflict(f"run {run_id} has ended already: there is nothing to cancel")
        log.warning("run %s was ended by force: %s", run_id, why)
        await self._submissions.over(run_id)
        if self._archive is not None:
            await self._archive.keep([run_id])
        try:
            return await self._hot.load(run_id)
        except (BrokenRun, NotFound):  # its definition, say, is lost
            name, status = await self._pipe.call("HMGET", keys_of(run_id)[0], "workflow", "status")
            return unread_run(
                run_id,
                (name or b"").decode(errors="replace"),
                None,
                now,
                RunStatus((status or b"CANCELLED").decode()),
                now,
                why,
            )

    # ── runs are read ────────────────────────────────────────────────────────────────────

    async def load(
        self, run_id: str, *, outputs: bool = True, room: Room | None = None
    ) -> RunState:
        try:
            return await self._hot.load(run_id, outputs=outputs, room=room)
        except NotFound:
            if self._archive is None:
                raise
        return await self._archive.load(run_id, outputs=outputs, room=room)

    async def read_outputs(self, run: RunState, wanted: Sequence[Elsewhere]) -> list[bytes]:
        archived = [one for one in wanted if isinstance(one.where, Archived)]
        if archived and self._archive is not None:
            return await self._archive.read_outputs(run, archived)
        return await self._hot.read_outputs(run, wanted)

    async def wait(self, run_id: str) -> RunState:
        while True:
            try:
                return await self._hot.wait(run_id)
            except NotFound:
                if self._archive is None:
                    raise
            run = await self._archive.load(run_id)
            if run.finished:
                return run
            await asyncio.sleep(LOOK_SECONDS)

    async def ended(self, run_id: str) -> None:
        try:
            await self._hot.ended(run_id)
        except NotFound:
            await self.wait(run_id)

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        while True:
            try:
                async for event in self._hot.watch(run_id, after):
                    yield event
                    after = event.seq
                return
            except NotFound:
                if self._archive is None:
                    raise
            finished = (await self._archive.load(run_id, outputs=False)).finished
            for event in await self._archive.log(run_id, after):
                yield event
                after = event.seq
            if finished:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def recall(self, key: str, now: float) -> Cached | None:
        return await self._hot.recall(key, now)

    # ── who drives them ──────────────────────────────────────────────────────────────────

    async def owner_of(self, run_id: str) -> Literal["here", "elsewhere", "gone", "none"]:
        """The orchestrators, all of them, as long as it is not finished."""
        status, finished_at = await self._pipe.call(
            "HMGET", keys_of(run_id)[0], "status", "finished_at"
        )
        finished = (
            bool(finished_at) if status else (await self.load(run_id, outputs=False)).finished
        )
        return "none" if finished else "elsewhere"

    async def orphans(self) -> list[str]:
        return []

    async def adopt(
        self, run_ids: Iterable[str], now: float, max_crashes: int
    ) -> dict[str, Decision]:
        return {}
