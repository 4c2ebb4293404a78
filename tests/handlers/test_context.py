"""What a handler is given, and what it can tell."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from dovetail.core.redaction import Redactor
from dovetail.handlers.context import Context


def made(**given) -> Context:
    return Context(run_id="r1", node_id="n", **given)


def test_the_idempotency_key_is_the_same_for_every_attempt_of_an_epoch():
    assert made(attempt=1, epoch=2).idempotency_key == "r1:n:2"
    assert made(attempt=3, epoch=2).idempotency_key == "r1:n:2"
    assert made(epoch=3).idempotency_key == "r1:n:3"


def test_omitted_fields_of_a_context_are_empty():
    ctx = made()
    assert (ctx.params, ctx.inputs, dict(ctx.secrets)) == ({}, {}, {})
    assert (ctx.attempt, ctx.epoch) == (1, 1)
    ctx.params["a"] = 1
    assert made().params == {}


class TestProgress:
    def test_is_passed_on(self):
        reported = []
        made(
            report_progress=lambda fraction, message: reported.append((fraction, message))
        ).progress(0.5, "half way")
        assert reported == [(0.5, "half way")]

    def test_is_cut_to_the_range_from_0_to_1(self):
        reported = []
        ctx = made(report_progress=lambda fraction, message: reported.append(fraction))
        for fraction in (-1, 1.0000001, 5, float("inf"), 1, True):
            ctx.progress(fraction)
        assert reported == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def test_refuses_nan(self):
        with pytest.raises(ValueError, match="not NaN"):
            made().progress(float("nan"))

    def test_shows_no_secret(self):
        reported = []
        ctx = made(
            secrets={"T": "hunter2"},
            report_progress=lambda fraction, message: reported.append(message),
        )
        ctx.progress(0, "with hunter2")
        assert reported == ["with ***"]

    def test_without_a_reporter_is_ignored(self):
        made().progress(0.1, "alone")


class TestCancelled:
    async def test_wakes_a_waiting_handler(self):
        ctx = made()
        waiting = asyncio.create_task(ctx.cancelled.wait())
        await asyncio.sleep(0)
        assert not ctx.cancelled.is_set()
        ctx.cancel()
        assert await waiting is True

    def test_is_set_if_it_is_read_late(self):
        ctx = made()
        ctx.cancel()
        assert ctx.cancelled.is_set()

    def test_is_one_event_for_all_threads(self):
        for _ in range(50):
            ctx = made()
            start = threading.Barrier(3)
            seen = []

            def ask(ctx=ctx, start=start, seen=seen):
                start.wait()
                seen.append(ctx.cancelled)

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            start.wait()
            ctx.cancel()
            for thread in threads:
                thread.join()
            assert seen[0] is seen[1]
            assert seen[0].is_set()


class TestLog:
    def test_has_run_node_and_attempt(self, caplog):
        with caplog.at_level(logging.INFO, "dovetail.handler"):
            made(attempt=2).log.info("done %d", 3, extra={"rows": 7})
        record = caplog.records[0]
        assert record.getMessage() == "done 3"
        assert (record.run_id, record.node_id, record.attempt, record.rows) == ("r1", "n", 2, 7)
        assert record.filename == "test_context.py"

    def test_is_one_logger_per_node(self):
        ctx = made()
        assert ctx.log is ctx.log

    def test_writes_no_secret(self, caplog):
        ctx = made(secrets={"T": "hunter2"})
        with caplog.at_level(logging.INFO, "dovetail.handler"):
            ctx.log.info("token %s", "hunter2", extra={"url": "http://h/?t=hunter2"})
            ctx.log.warning("hunter2")
            ctx.log.info("map %(t)s", {"t": "hunter2"})
            ctx.log.debug("not written: hunter2")
            ctx.log.info("bad %d", "hunter2")
        assert [record.getMessage() for record in caplog.records] == [
            "token ***", "***", "map ***", "bad %d ('***',)",
        ]  # fmt: skip
        assert "hunter2" not in str([vars(record) for record in caplog.records])
        assert caplog.records[0].filename == "test_context.py"

    def test_writes_no_secret_of_a_traceback(self, caplog):
        ctx = made(secrets={"T": "hunter2"}, redactor=Redactor({"T": "hunter2"}))
        try:
            raise ValueError("bad token hunter2")
        except ValueError as error:
            ctx.log.exception("failed")
            ctx.log.error("again", exc_info=error)
            ctx.log.error("and again", exc_info=(type(error), error, error.__traceback__))
        for record in caplog.records:
            assert "ValueError: bad token ***" in record.getMessage()
            assert record.exc_info is None
        assert "hunter2" not in caplog.text


def test_a_progress_message_is_cut_to_its_maximum_length() -> None:
    reported: list[str] = []
    ctx = Context(run_id="r", node_id="n", report_progress=lambda _, text: reported.append(text))
    ctx.progress(0.5, "x" * 5000)
    assert reported == ["x" * 1000]
