"""What the API says when the engine behind it fails: a problem, and nothing of its insides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dovetail.api import events
from dovetail.api import service as readiness
from dovetail.api.app import create_app
from dovetail.api.service import ApiService
from dovetail.config import Settings
from dovetail.core.errors import DovetailError, NotFound, StoreError

DB = Path("private/place.db")


class Broken:
    """Commands of which each raises this."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: Any, **__: Any) -> None:
            raise self._error

        return fail


class NoWorkers:
    async def workers(self) -> list[dict[str, Any]]:
        return [{"alive": False}]

    async def dead_letters(self) -> list[dict[str, Any]]:
        return []

    async def drop_dead_letter(self, letter_id: str) -> bool:
        return False

    async def waiting(self, running: Any) -> dict[str, int]:
        return {}

    async def backlog(self) -> int:
        return 0

    async def check(self) -> None:
        pass


def service(commands: Any) -> ApiService:
    return ApiService(commands, NoWorkers(), Settings(db=DB))


async def get(service: ApiService, path: str, **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=create_app(service, "1"), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers=headers)


async def test_a_bug_is_a_logged_500_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = await get(service(Broken(ZeroDivisionError("the secret"))), "/api/v1/runs")
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:dovetail:problem:internal_error"
    assert answer.headers["content-type"] == "application/problem+json"
    assert "the secret" not in answer.text
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert answer.json()["request_id"] in record.getMessage()


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v1/runs/x/events", "/health/ready"])
async def test_an_unavailable_store_is_a_503_with_retry_after(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await get(service(Broken(StoreError(f"disk full: {DB}"))), path)
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:dovetail:problem:store_error"
    assert int(answer.headers["retry-after"]) > 0
    assert str(DB) not in answer.text
    assert "disk full" in caplog.text


async def test_an_unmapped_error_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    answer = await get(service(Broken(DovetailError("odd"))), "/api/v1/runs")
    assert answer.status_code == 500
    assert "odd" in caplog.text
    assert "odd" not in answer.text


async def test_an_overloaded_engine_is_a_429_with_its_own_retry_after() -> None:
    error = DovetailError("the backlog is full")
    error.type, error.retry_after = "overloaded", 2.2  # type: ignore[attr-defined]
    answer = await get(service(Broken(error)), "/api/v1/runs")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["detail"] == "the backlog is full"


@pytest.mark.parametrize(
    "place", [str(DB), "Redis", "Redis or in the archive", "PostgreSQL at host:5432/db"]
)
async def test_an_error_reply_does_not_reveal_where_runs_are_stored(place: str) -> None:
    answer = await get(service(Broken(NotFound(f"no run 'x' in {place}"))), "/api/v1/runs/x")
    assert answer.json()["detail"] == "no run 'x'"


async def test_an_unavailable_redis_is_a_503_before_the_store_is_read() -> None:
    class Away(NoWorkers):
        async def check(self) -> None:
            raise StoreError("Redis did not answer")

    asked = ApiService(Broken(ZeroDivisionError()), Away(), Settings(db=DB))  # type: ignore[arg-type]
    for path in ("/api/v1/runs", "/health/ready", "/health/workers"):
        answer = await get(asked, path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert (await get(asked, "/health/live")).status_code == 200


async def test_a_store_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs:
        async def list_runs(self, *_: Any) -> None:
            await asyncio.sleep(3600)

    monkeypatch.setattr(readiness, "READY_SECONDS", 0.05)
    assert (await get(service(Hangs()), "/health/ready")).status_code == 503


async def test_without_a_live_worker_the_workers_health_is_503() -> None:
    answer = await get(service(Broken(StoreError("x"))), "/health/workers")
    assert (answer.status_code, answer.json()) == (503, {"alive": 0, "dead": 1})
    assert "retry-after" in answer.headers


async def test_a_server_that_stops_is_alive_but_not_ready() -> None:
    stopping = service(Broken(StoreError("x")))
    stopping.closing.set()
    assert (await get(stopping, "/health/live")).status_code == 200
    answer = await get(stopping, "/health/ready")
    assert answer.status_code == 503
    assert "stopping" in answer.json()["detail"]


class OneRun:
    """Commands that know one run, whose events are given."""

    def __init__(self, feed: AsyncIterator[dict[str, Any]]) -> None:
        self.watch = lambda run_id, after: feed

    async def summary(self, run_id: str, *, max_result_bytes: int | None) -> dict[str, Any]:
        assert max_result_bytes == 0, "a stream has no result in it"
        return {"finished_at": None}

    async def last_seq(self, run_id: str) -> int:
        return 1


async def test_a_silent_stream_sends_keep_alive_comments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def feed() -> AsyncIterator[dict[str, Any]]:
        yield {"seq": 1, "type": "run.created"}
        await asyncio.sleep(0.1)

    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.03)
    answer = await get(service(OneRun(feed())), "/api/v1/runs/x/events", accept=events.STREAM)
    assert answer.text.count(": still here\n\n") >= 2
    assert answer.text.count("id: ") == 1


async def test_a_stream_whose_store_fails_is_aborted_instead_of_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An orderly end would tell the client that the run is over."""

    async def feed() -> AsyncIterator[dict[str, Any]]:
        yield {"seq": 1, "type": "run.created"}
        raise StoreError("gone")

    app = create_app(service(OneRun(feed())), "1")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/api/v1/runs/x/events", "raw_path": b"",
        "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/event-stream")],
        "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1),
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[arg-type]
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert all(message["more_body"] for message in bodies)
    (record,) = caplog.records
    assert "gone" in record.getMessage()
    assert not record.exc_info
