"""What is accepted is made, at once or later, and the caller gets a true reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import NotFound, StoreError
from dovetail.core.transitions import Submit
from dovetail.engine.distributed import triggers
from dovetail.engine.distributed.triggers import PendingRun, TriggerService
from dovetail.engine.ports import KeyUsed

GRAPH = build_graph(
    Workflow.model_validate({"name": "f", "nodes": [{"id": "a", "handler": "input"}]}), {}
)
ASKED = Submit("asked", GRAPH, {})
KEY = ("batch of f", "k", "digest")


class Kept:
    """What was accepted, and what of it is said to be made."""

    def __init__(self, outlives: bool, renamed: str | None = None) -> None:
        self.outlives = outlives
        self._renamed = renamed
        self.settled: list[Any] = []
        self.left: list[PendingRun] = []
        self.used: KeyUsed | None = None

    async def accept(self, submit: Submit, now: float) -> Submit:
        return submit._replace(run_id=self._renamed or submit.run_id)

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Any, now: float
    ) -> list[Submit]:
        if self.used is not None:
            raise self.used
        return list(submits)

    async def known(self, key: Any) -> KeyUsed | None:
        return self.used

    async def unmade_under(self, key: Any, made: str) -> PendingRun | None:
        return next((left for left in self.left if left.name == made), None)

    async def made(self, submit: Submit) -> None:
        self.settled.append(submit.run_id)

    async def batch_made(self, batch_id: str) -> None:
        self.settled.append(batch_id)

    async def unmade(self, accepted_before: float) -> list[PendingRun]:
        return [left for left in self.left if left.created_at < accepted_before]

    async def settle(self, unmade: PendingRun) -> None:
        self.settled.append(unmade.name)


class Maker:
    """An orchestrator that makes what it can."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self._error = error
        self._seconds = seconds
        self.made: list[tuple[str, float]] = []

    async def submit_many(self, submits: Sequence[Submit], now: float) -> None:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        self.made += [(submit.run_id, now) for submit in submits]


def submitting(kept: Kept, maker: Maker) -> tuple[TriggerService, list[str]]:
    reported: list[str] = []
    made = TriggerService(kept, maker, lambda: 1000.0, lambda why: reported.append(str(why)))  # type: ignore[arg-type]
    return made, reported


async def test_a_run_is_accepted_created_and_settled() -> None:
    kept, maker = Kept(outlives=False), Maker()
    them, reported = submitting(kept, maker)
    await them.submit(ASKED)
    await them.submit_batch("b", [ASKED, ASKED._replace(run_id="other")], None, 900.0)
    assert maker.made == [("asked", 1000.0), ("asked", 900.0), ("other", 900.0)]
    assert kept.settled == ["asked", "b"]
    assert not reported


async def test_a_run_whose_creator_died_is_created_under_its_id() -> None:
    kept, maker = Kept(outlives=False, renamed="first"), Maker()
    them, _ = submitting(kept, maker)
    with pytest.raises(KeyUsed) as known:
        await them.submit(ASKED)
    assert (known.value.made, known.value.same_body) == ("first", True)
    assert maker.made == [("first", 1000.0)]
    assert kept.settled == ["first"]


@pytest.mark.parametrize("same", [True, False])
async def test_the_rest_of_a_batch_whose_creator_died_is_created_if_the_body_is_the_same(
    same: bool,
) -> None:
    kept, maker = Kept(outlives=False), Maker()
    kept.used = KeyUsed("first", same_body=same)
    kept.left = [PendingRun("first", [ASKED], 980.0)]
    them, _ = submitting(kept, maker)
    with pytest.raises(KeyUsed):
        await them.submit_batch("second", [ASKED._replace(run_id="other")], KEY, 1000.0)
    assert maker.made == [("asked", 980.0)] * same
    assert kept.settled == ["first"] * same


@pytest.mark.parametrize("same", [True, False])
async def test_a_pending_run_is_also_created_when_its_key_is_looked_up(same: bool) -> None:
    kept, maker = Kept(outlives=False), Maker()
    them, _ = submitting(kept, maker)
    assert await them.made_under(KEY) is None
    kept.used = KeyUsed("first", same_body=same)
    kept.left = [PendingRun("first", [ASKED], 980.0)]
    assert await them.made_under(KEY) is kept.used
    assert maker.made == [("asked", 980.0)] * same
    assert kept.settled == ["first"] * same


@pytest.mark.parametrize("error", [StoreError("away"), NotFound("flushed meanwhile")])
async def test_a_run_stored_in_the_archive_is_accepted_even_if_it_cannot_be_created_now(
    error: Exception,
) -> None:
    kept = Kept(outlives=True)
    them, reported = submitting(kept, Maker(error))
    await them.submit(ASKED)
    await them.submit_batch("b", [ASKED], None, 900.0)
    assert reported == [str(error)] * 2
    assert kept.settled == [], "it is still to be made"


async def test_a_trigger_does_not_wait_long_for_a_run_that_the_archive_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triggers, "MAKING_SECONDS", 0.01)
    them, reported = submitting(Kept(outlives=True), Maker(seconds=60))
    await asyncio.wait_for(them.submit(ASKED), 5)
    assert reported == ["not made within 0.02 s"]


async def test_a_run_stored_nowhere_else_is_refused_if_it_cannot_be_created() -> None:
    kept = Kept(outlives=False)
    them, _ = submitting(kept, Maker(StoreError("away")))
    with pytest.raises(StoreError):
        await them.submit(ASKED)
    assert kept.settled == []


async def test_only_a_run_accepted_some_time_ago_has_lost_its_creator() -> None:
    kept, maker = Kept(outlives=False), Maker()
    kept.left = [PendingRun("old", [ASKED], 980.0), PendingRun("new", [ASKED], 995.0)]
    them, _ = submitting(kept, maker)
    await them.recover_accepted()
    assert (kept.settled, maker.made) == (["old"], [("asked", 980.0)])
