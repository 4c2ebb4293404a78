"""What the archive keeps of a run, whichever process writes it, however late and however often."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import StoreError
from dovetail.core.transitions import Claim, Complete, Fail, Retry, Submit
from dovetail.engine.distributed.archiver import ArchiveHead, ArchiveState, RunSnapshot
from dovetail.engine.views import result
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres import archive as postgres
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import SCHEMA_VERSION, PostgresPool, statements
from dovetail.stores.postgres.records import PostgresRecords
from dovetail.stores.records import Definitions
from dovetail.stores.redis.codec import keys_of, take_counts, time_text
from dovetail.stores.redis.store import RedisStore

NOW = 1_700_000_000.123456
GRAPH = build_graph(
    Workflow.model_validate(
        {
            "name": "pair",
            "nodes": [
                {"id": "first", "handler": "h"},
                {"id": "second", "handler": "h", "dependencies": ["first"]},
            ],
        }
    ),
    {},
)
STORED = Definitions().stored(GRAPH)


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[PostgresPool]:
    async with PostgresPool(postgres_url) as opened:
        yield opened


@pytest.fixture
def archive(pool: PostgresPool) -> PostgresArchive:
    return PostgresArchive(pool)


@pytest.fixture
def records(pool: PostgresPool) -> PostgresRecords:
    return PostgresRecords(pool)


async def accepted(records: PostgresRecords, **fields: Any) -> Submit:
    submit = Submit(os.urandom(16).hex(), GRAPH, {"x": 1}, **fields)
    await records.accept(submit, NOW)
    return submit


def snapshot(
    run_id: str,
    last: int,
    *,
    first: int = 1,
    generation: int = 1,
    status: str = "RUNNING",
    epoch: int = 1,
    finished: float | None = None,
    mark: str = "",
    **fields: Any,
) -> RunSnapshot:
    """A run after its event `last`; what it has of it says which generation and event made it."""
    made = f"{generation}.{last}{mark}"
    meta = {
        "workflow": "pair",
        "version": "",
        "definition": STORED.sha256,
        "retries": STORED.retries.decode(),
        "params": '{"x":1}',
        "created_at": time_text(NOW),
        "status": status,
        "epoch": str(epoch),
        "finished_at": "" if finished is None else repr(finished),
        "error": "",
        "pending": "",
        "made": made,
    }
    whole: dict[str, Any] = {
        "nodes": {0: f"C|{made}", 1: f"Q|{made}"},
        "outputs": {0: orjson.dumps(made)},
        "ends": {},
        "events": [
            orjson.dumps([NOW, f"{generation}.{seq}", epoch, None, None, None])
            for seq in range(first, last + 1)
        ],
    }
    return RunSnapshot(run_id, generation, meta, first_seq=first, **{**whole, **fields})


def ended(run_id: str, last: int, **fields: Any) -> RunSnapshot:
    return snapshot(run_id, last, **{"status": "COMPLETED", "finished": NOW + last, **fields})


async def log_of(archive: PostgresArchive, run_id: str) -> list[str]:
    """Generation and number of every event that is shown."""
    read = await archive.read(run_id)
    assert read is not None
    return [orjson.loads(text)[1] for text in read.events]


async def made_by(archive: PostgresArchive, run_id: str) -> str:
    read = await archive.read(run_id)
    assert read is not None
    for place, state in read.nodes.items():
        assert state.endswith(read.meta["made"]), (place, state, read.meta)
    assert read.outputs == {0: orjson.dumps(read.meta["made"])}
    return read.meta["made"]


class TestWriting:
    async def test_a_written_snapshot_is_read_back_unchanged(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        written = snapshot(
            run_id,
            3,
            outputs={0: b'{"nul":"\\u0000","raw":"' + bytes(range(1, 256)) + b'"}', 1: b"null"},
            ends={1: b'["",-1,"{\\"type\\":\\"x\\",\\"message\\":\\"\\u0000\\"}"]'},
        )
        assert await archive.write(written) == ArchiveState(1, 3, False)
        assert await archive.read(run_id) == replace(written, content=STORED.content)

    async def test_writing_a_snapshot_again_changes_nothing(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        for _ in range(3):
            assert await archive.write(ended(run_id, 4, result=b"[1]")) == ArchiveState(1, 4, True)
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3", "1.4"]
        assert (await records.summary(run_id))["result"] == [1]

    async def test_a_late_snapshot_undoes_nothing(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 6))
        assert await archive.write(snapshot(run_id, 4)) == ArchiveState(1, 6, True)
        assert await made_by(archive, run_id) == "1.6"
        assert (await records.summary(run_id))["status"] == "COMPLETED"

    async def test_a_part_of_the_log_continues_the_stored_log(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 2))
        assert await archive.write(snapshot(run_id, 5, first=3)) == ArchiveState(1, 5, False)
        assert await archive.write(snapshot(run_id, 6, first=4)) == ArchiveState(1, 6, False)
        assert await log_of(archive, run_id) == [f"1.{seq}" for seq in range(1, 7)]

    async def test_a_gap_in_the_log_is_reported_and_nothing_is_stored(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        assert await archive.write(snapshot(run_id, 5, first=3)) == ArchiveState(0, 0, False)
        await archive.write(snapshot(run_id, 2))
        assert await archive.write(snapshot(run_id, 7, first=4)) == ArchiveState(1, 2, False)
        assert await made_by(archive, run_id) == "1.2"
        assert await log_of(archive, run_id) == ["1.1", "1.2"]

    async def test_nodes_that_a_snapshot_does_not_mention_stay_unchanged(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 2))
        changed = snapshot(run_id, 3, first=3, nodes={1: "R|x"}, outputs={})
        await archive.write(changed)
        read = await archive.read(run_id)
        assert read is not None
        assert read.nodes == {0: "C|1.2", 1: "R|x"}
        assert read.outputs == {0: b'"1.2"'}

    async def test_a_reset_node_has_no_output(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 2, status="FAILED", ends={1: b"[]"}))
        again = snapshot(run_id, 3, first=3, epoch=2, nodes={0: "W", 1: "W"}, outputs={})
        assert await archive.write(again) == ArchiveState(1, 3, False)
        read = await archive.read(run_id)
        assert read is not None
        assert (read.nodes, read.outputs, read.ends) == ({0: "W", 1: "W"}, {}, {})
        summary = await records.summary(run_id)
        assert (summary["status"], summary["epoch"]) == ("RUNNING", 2)
        assert summary["finished_at"] is summary["result"] is None

    async def test_an_error_names_its_node(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        failed = ended(run_id, 2, status="FAILED")
        failed.meta["error"] = '{"error":{"type":"t","message":"\\u0000"},"at":1}'
        await archive.write(failed)
        error = {"type": "t", "message": "\0", "node": "second"}
        assert (await records.summary(run_id))["error"] == error

    async def test_a_run_without_an_acceptance_record_needs_its_definition(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = os.urandom(16).hex()
        content = b'{"name":"pair","nodes":[]}'
        unknown = snapshot(run_id, 2)
        unknown.meta["definition"] = sha = os.urandom(32).hex()
        unknown.meta["version"] = "7"
        assert await archive.write(unknown) is None
        assert await archive.read(run_id) is None
        assert await archive.write(replace(unknown, content=content)) == ArchiveState(1, 2, False)
        read = await archive.read(run_id)
        assert read == replace(unknown, content=content)
        assert (await records.summary(run_id))["version"] == 7
        assert read.meta["definition"] == sha

    async def test_an_event_with_a_line_break_is_refused(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        with pytest.raises(StoreError, match=f"run {run_id} has an event that is no line"):
            await archive.write(snapshot(run_id, 2, events=[b"[1]", b"[\n2]"]))
        assert await archive.kept([run_id]) == {run_id: ArchiveState(0, 0, False)}

    async def test_many_runs_are_written_together(
        self, archive: PostgresArchive, records: PostgresRecords, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres, "PIECE_BYTES", 500)
        runs = [(await accepted(records)).run_id for _ in range(20)]
        kept = await archive.write_many([ended(run_id, n) for n, run_id in enumerate(runs, 2)])
        assert kept == {run_id: ArchiveState(1, n, True) for n, run_id in enumerate(runs, 2)}
        for n, run_id in enumerate(runs, 2):
            assert len(await log_of(archive, run_id)) == n
            assert await made_by(archive, run_id) == f"1.{n}"
        assert await archive.kept([*runs, "nobody"]) == kept
        with pytest.raises(ValueError, match="one run"):
            await archive.write_many([snapshot(runs[0], 2), snapshot(runs[0], 3)])
        assert await archive.write_many([]) == {}

    async def test_a_run_of_ten_thousand_nodes_is_stored_in_parts(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        large = snapshot(
            run_id,
            30_000,
            nodes=dict.fromkeys(range(10_000), "C"),
            outputs={place: b'"%d"' % place * 100 for place in range(10_000)},
        )
        await archive.write(large)
        assert await archive.read(run_id) == replace(large, content=STORED.content)

    async def test_concurrent_archivers_end_with_the_newest_state(
        self, postgres_url: str, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        runs = [(await accepted(records)).run_id for _ in range(5)]
        async with PostgresPool(postgres_url) as other:
            archives = [archive, PostgresArchive(other)]
            await asyncio.gather(
                *(
                    archives[last % 2].write_many(
                        [
                            snapshot(run_id, last) if last < 40 else ended(run_id, last)
                            for run_id in (runs if last % 3 else runs[::-1])
                        ]
                    )
                    for last in range(1, 41)
                )
            )
        for run_id in runs:
            assert await made_by(archive, run_id) == "1.40"
            assert len(await log_of(archive, run_id)) == 40


class TestGenerations:
    async def test_a_head_is_the_end_of_the_visible_log(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        assert await archive.heads([run_id, "nobody"]) == {
            run_id: ArchiveHead(ArchiveState(0, 0, False), 1, None)
        }
        written = snapshot(run_id, 6)
        await archive.write(written)
        head = ArchiveHead(ArchiveState(1, 6, False), 1, written.events[-1])
        assert await archive.heads([run_id]) == {run_id: head}
        await archive.write(snapshot(run_id, 6, first=7, generation=2, epoch=2))
        head = ArchiveHead(ArchiveState(2, 6, False), 2, written.events[-1])
        assert await archive.heads([run_id]) == {run_id: head}
        replaced = snapshot(run_id, 4, generation=3)
        await archive.write(replaced)
        head = ArchiveHead(ArchiveState(3, 4, False), 1, replaced.events[-1])
        assert await archive.heads([run_id]) == {run_id: head}

    async def test_a_new_generation_replaces_the_end_of_the_log(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 6))
        again = snapshot(run_id, 4, first=4, generation=2)
        assert await archive.write(again) == ArchiveState(2, 4, False)
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3", "2.4"]
        assert await made_by(archive, run_id) == "2.4"
        shown = [event["type"] for event in await records.events(run_id)]
        assert shown == ["1.1", "1.2", "1.3", "2.4"]

    @pytest.mark.parametrize("last", [5, 6, 8])
    async def test_a_log_that_lost_events_since_the_comparison_is_not_mixed_with_them(
        self, archive: PostgresArchive, records: PostgresRecords, last: int
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 4))
        await archive.write(snapshot(run_id, 6, first=5))  # by a process that saw what is lost now
        others = [
            orjson.dumps([NOW + 1, f"1.{seq}", 1, None, None, None]) for seq in range(5, last + 1)
        ]
        went_on = snapshot(run_id, last, first=5, events=others, mark=" again")
        kept = await archive.write(went_on)
        assert kept != (1, last, False), "it is to be compared, and written as another generation"
        before = snapshot(run_id, 6)
        read = await archive.read(run_id)
        assert read is not None
        assert (read.events, read.nodes) == (before.events, before.nodes)
        whole = [*before.events[:4], *others]
        again = snapshot(run_id, last, generation=2, events=whole, mark=" again")
        assert await archive.write(again) == (2, last, False)
        read = await archive.read(run_id)
        assert read is not None
        assert read.events == whole

    async def test_the_state_of_the_earlier_generation_is_replaced(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 6))
        older = snapshot(run_id, 3, first=3, generation=2, nodes={0: "R|2.3"}, outputs={})
        await archive.write(older)
        read = await archive.read(run_id)
        assert read is not None
        assert (read.nodes, read.outputs) == ({0: "R|2.3"}, {})

    async def test_a_late_writer_of_the_earlier_generation_changes_nothing(
        self, archive: PostgresArchive, records: PostgresRecords, pool: PostgresPool
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 3))
        await archive.write(snapshot(run_id, 5, first=4, generation=2))
        assert await archive.write(ended(run_id, 9)) == ArchiveState(2, 5, False)
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3", "2.4", "2.5"]
        assert await made_by(archive, run_id) == "2.5"

    async def test_a_generation_without_an_event_starts_at_the_end_of_the_log(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(snapshot(run_id, 3))
        empty = snapshot(run_id, 3, first=4, generation=2)
        assert not empty.events
        assert await archive.write(empty) == ArchiveState(2, 3, False)
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3"]
        await archive.write(snapshot(run_id, 4, first=4, generation=2))
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3", "2.4"]

    @pytest.mark.parametrize("finished", [None, NOW + 99])
    async def test_a_finished_run_stays_finished(
        self, archive: PostgresArchive, records: PostgresRecords, finished: float | None
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5))
        other = snapshot(run_id, 9, first=4, generation=2, status="FAILED", finished=finished)
        assert await archive.write(other) == ArchiveState(1, 5, True)
        assert (await records.summary(run_id))["status"] == "COMPLETED"
        assert await made_by(archive, run_id) == "1.5"
        assert await log_of(archive, run_id) == [f"1.{seq}" for seq in range(1, 6)]

    async def test_the_events_of_a_refused_generation_are_stored_for_an_audit(
        self, archive: PostgresArchive, records: PostgresRecords, pool: PostgresPool
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5))
        await archive.write(snapshot(run_id, 6, first=4, generation=2))
        (row,) = await pool.rows("definition_of_run", run_id)
        count = "SELECT COUNT(*) FROM dovetail.events WHERE run = $1"
        assert await pool.look(lambda c: c.fetchval(count, row["number"])) == 8

    async def test_a_retry_reopens_a_finished_run(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5, status="FAILED"))
        again = snapshot(run_id, 7, first=6, generation=2, epoch=2)
        assert await archive.write(again) == ArchiveState(2, 7, False)
        assert await archive.write(ended(run_id, 6, status="FAILED")) == ArchiveState(2, 7, False)
        assert (await records.summary(run_id))["status"] == "RUNNING"
        log = [f"1.{seq}" for seq in range(1, 6)] + ["2.6", "2.7"]
        assert await log_of(archive, run_id) == log

    async def test_a_refused_generation_that_is_retried_stores_its_whole_log(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5))
        await archive.write(snapshot(run_id, 5, first=4, generation=2, finished=NOW))
        await archive.write(snapshot(run_id, 6, first=6, generation=2, epoch=2))
        assert await log_of(archive, run_id) == ["1.1", "1.2", "1.3", "2.4", "2.5", "2.6"]

    async def test_a_late_event_of_a_finished_run_is_stored(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5))
        late = ended(run_id, 6, first=6, finished=NOW + 5)
        assert await archive.write(late) == ArchiveState(1, 6, True)
        assert len(await log_of(archive, run_id)) == 6

    async def test_a_late_event_is_stored_even_if_the_run_was_restored_to_redis(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        """It goes on from the very end, under a generation of its own."""
        run_id = (await accepted(records)).run_id
        await archive.write(ended(run_id, 5))
        late = ended(run_id, 6, first=6, finished=NOW, generation=2)
        assert await archive.write(late) == ArchiveState(2, 6, True)
        assert await log_of(archive, run_id) == [*(f"1.{seq}" for seq in range(1, 6)), "2.6"]


class TestReading:
    async def test_an_accepted_run_without_a_snapshot_equals_its_request(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        submit = await accepted(records, version=4)
        read = await archive.read(submit.run_id)
        assert read == RunSnapshot(
            run_id=submit.run_id,
            generation=0,
            meta={
                "workflow": "pair",
                "version": "4",
                "definition": STORED.sha256,
                "retries": STORED.retries.decode(),
                "params": '{"x":1}',
                "created_at": time_text(NOW),
            },
            nodes={},
            outputs={},
            ends={},
            first_seq=1,
            events=[],
            content=STORED.content,
        )
        assert await archive.kept([submit.run_id]) == {submit.run_id: ArchiveState(0, 0, False)}

    @pytest.mark.parametrize("run_id", ["nobody", "", "\0", "\ud800"])
    async def test_an_unknown_run_is_none(self, archive: PostgresArchive, run_id: str) -> None:
        assert await archive.read(run_id) is None
        assert await archive.kept([run_id]) == {}

    async def test_unfinished_runs_are_found_in_pages_oldest_first(
        self, archive: PostgresArchive, records: PostgresRecords
    ) -> None:
        for run_id in await archive.unfinished(float("inf")):
            await archive.write(ended(run_id, 99, generation=9))
        runs = []
        for age in range(7):
            run = Submit(os.urandom(16).hex(), GRAPH, {})
            await records.accept(run, NOW + age)
            runs.append(run.run_id)
        await archive.write(ended(runs[2], 1))
        await archive.write(snapshot(runs[3], 1, status="FAILED"))  # something of it still runs
        pages = []
        after = None
        while page := await archive.unfinished(NOW + 5.5, 2, after):
            pages.append(page)
            after = page[-1]
        assert pages == [[runs[0], runs[1]], [runs[3], runs[4]], [runs[5]]]

    async def test_a_journal_is_not_archived(self, records: PostgresRecords) -> None:
        assert await records.entries((await accepted(records)).run_id) is None


async def kept_by_redis(pipe: PipelinedRedis, run_id: str) -> dict[str, Any]:
    """Everything under the run's keys."""
    meta, nodes, _, out, ends, events, _ = keys_of(run_id)
    hashes = []
    for key in (meta, nodes, out, ends):
        flat = await pipe.call("HGETALL", key)
        hashes.append(dict(zip(flat[::2], flat[1::2], strict=True)))
    fields, states, outputs, endings = hashes
    fields |= take_counts(states)
    return {
        "meta": {name.decode(): value.decode() for name, value in fields.items()},
        "nodes": {int(place): state.decode() for place, state in states.items()},
        "outputs": {int(place): output for place, output in outputs.items()},
        "ends": {int(place): ending for place, ending in endings.items()},
        "events": await pipe.call("LRANGE", events, 0, -1),
    }


async def test_a_run_from_redis_is_read_back_byte_for_byte(
    redis_url: str, archive: PostgresArchive, records: PostgresRecords
) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        store = RedisStore(pipe)
        submit = Submit(os.urandom(16).hex(), GRAPH, {"x": "a\0b é"})
        await records.accept(submit, NOW)
        (order,) = (await store.create(submit, NOW)).dispatch
        start = (submit.run_id, "first", order.token)
        await store.apply([Claim(*start, "w", NOW + 10)], NOW)
        (done,) = await store.apply([Complete(*start, {"text": "a\0b é", "n": 2**63})], NOW + 1)
        start = (submit.run_id, "second", done.dispatch[0].token)
        await store.apply([Claim(*start, "w", NOW + 10)], NOW + 2)
        error = {"type": "t", "message": "a\0b é"}
        await store.apply([Fail(*start, error, permanent=True)], NOW + 3)
        run = await store.load(submit.run_id)
        raw = await kept_by_redis(pipe, submit.run_id)
        written = RunSnapshot(
            submit.run_id, 1, first_seq=1, result=orjson.dumps(result(run)), **raw
        )
        assert await archive.write(written) == ArchiveState(1, run.seq, True)
        assert await archive.read(submit.run_id) == replace(written, content=STORED.content)
        summary = await records.summary(submit.run_id)
        assert summary["status"] == "FAILED"
        assert summary["error"] == {**error, "node": "second"} == run.error
        assert summary["finished_at"] is not None
        events = await records.events(submit.run_id)
        assert [event["seq"] for event in events] == list(range(1, run.seq + 1))
        assert [event.get("node") for event in events].count("second") == 3
        await store.apply([Retry(submit.run_id)], NOW + 4)
        raw = await kept_by_redis(pipe, submit.run_id)
        raw["events"] = raw["events"][run.seq :]
        again = RunSnapshot(submit.run_id, 1, first_seq=run.seq + 1, **raw)
        kept = await archive.write(again)
        assert kept is not None
        assert not kept.finished
        assert (await records.summary(submit.run_id))["epoch"] == 2
        read = await archive.read(submit.run_id)
        assert read is not None
        assert (read.nodes, read.outputs, read.ends) == (again.nodes, again.outputs, again.ends)


def test_every_statement_is_used() -> None:
    files = Path(postgres.__file__).parents[1].rglob("*.py")
    source = "".join(path.read_text() for path in files)
    numbered = {f"schema_{number}" for number in range(1, SCHEMA_VERSION + 1)}
    assert not [name for name in statements() if f'"{name}"' not in source and name not in numbered]
