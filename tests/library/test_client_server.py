"""What can happen between a client and its server: bad lines, restarts, tokens, other servers.

The line is a real one (see `proxy`); the server is the one of `dovetail serve`, in this process
or, where it is killed, in one of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail import (
    Conflict,
    Context,
    Dovetail,
    DovetailError,
    InvalidDefinition,
    NotFound,
    RetryableError,
    StoreError,
    handler,
)
from dovetail.cli.board import Board
from dovetail.client import connection
from dovetail.client.connection import AccessDenied, NoDovetail, ServerError, ServerUnreachable
from dovetail.client.server import RemoteEngine
from dovetail.engine.api import EngineApi, ServedEngine
from dovetail.engine.commands import Commands
from dovetail.engine.views import timestamp

from ..servers.server import free_port
from .places import serving
from .proxy import Line, line_to

SECONDS = 20.0
GREET: dict[str, Any] = {"name": "greet", "nodes": [{"id": "hello", "handler": "input"}]}
CHAIN = {
    "name": "chain",
    "nodes": [
        {"id": f"n{n}", "handler": "input", "dependencies": [f"n{n - 1}"] if n else []}
        for n in range(12)
    ],
}
LONG = {"name": "long", "nodes": [{"id": "a", "handler": "sleep", "config": {"seconds": 60}}]}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither of the user who runs the tests, nor of the directory they are run in."""
    for name in list(os.environ):
        if name.startswith("DOVETAIL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connection, "FIRST_PAUSE", 0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives up within moments; else tests of what never works would take minutes."""
    for name in ("FIRST_SECONDS", "AWAY_SECONDS", "BUSY_SECONDS"):
        monkeypatch.setattr(connection, name, 0.3)


@asynccontextmanager
async def over_a_line(folder: Path, *handlers: Any) -> AsyncIterator[tuple[Dovetail, Line]]:
    async with (
        serving(folder, handlers, drain_seconds=0) as url,
        line_to(url) as line,
        Dovetail(line.url) as dt,
        asyncio.timeout(SECONDS),
    ):
        yield dt, line


# --- bad lines ---------------------------------------------------------------------------------


async def test_a_reply_that_arrives_byte_by_byte_is_read_completely(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        line.trickles = True
        run = await dt.run(GREET, {"text": "päö\u2028\n"})
        assert run.result == {"hello": {"text": "päö\u2028\n"}}
        events = [event async for event in dt.events(run.run_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_a_read_whose_reply_is_cut_off_is_repeated(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.run(GREET)
        for length in (0, 1, 12, 100, 400, 700):
            line.cut()  # the connection that is idle, so that there is a new one
            line.cut_answers = [length]
            assert await dt.get_run(run.run_id) == run
            assert not line.cut_answers


async def test_a_trigger_whose_reply_is_lost_creates_one_run(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        await dt.register(GREET)
        for workflow in ("greet", GREET):
            for key in (None, "order 7", "bestellung ä\n7"):
                before = len(await dt.list_runs())
                line.cut()
                line.asked.clear()
                line.cut_answers = [0, 30]
                run = await dt.trigger(workflow, {"key": key}, idempotency_key=key)
                posts = line.requests("POST")
                keys = {re.search(rb"idempotency-key: (.*)\r", one, re.I)[1] for one in posts}  # type: ignore[index]
                assert (len(posts), len(keys)) == (3, 1), "asked three times, with one key"
                assert len(await dt.list_runs()) == before + 1
                assert (await dt.wait(run.run_id)).params == {"key": key}


async def test_a_batch_whose_reply_is_lost_is_created_once(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        line.cut_answers = [0]
        batch = await dt.batch(GREET, [{"n": n} for n in range(3)])
        assert (await dt.wait_batch(batch.batch_id)).counts == {"COMPLETED": 3}
        assert len(await dt.list_runs()) == 3


async def test_a_request_that_is_not_idempotent_is_not_repeated(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.trigger(LONG)
        line.cut()
        line.asked.clear()
        line.cut_answers = [0]
        with pytest.raises(
            ServerUnreachable, match=r"cancel was answered; whether it was done is not"
        ):
            await dt.cancel(run.run_id)
        assert len(line.requests("POST")) == 1
        assert (await dt.wait(run.run_id)).status == "CANCELLED"
        line.cut()
        line.cut_answers = [0]
        with pytest.raises(StoreError, match="look before you ask again"):
            await dt.retry(run.run_id)
        assert (await dt.get_run(run.run_id)).epoch == 2, "it was"


async def test_a_deletion_whose_reply_is_lost_has_happened(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        await dt.register(GREET)
        line.cut()
        line.asked.clear()
        line.cut_answers = [0]
        await dt._commands.delete_workflow("greet")
        assert len(line.requests("DELETE")) == 2
        with pytest.raises(NotFound, match="greet"):
            await dt._commands.delete_workflow("greet")


async def test_a_run_that_is_deleted_while_runs_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = connection.ServerConnection.call

    async def deletes_first(self: Any, method: str, path: str, **options: Any) -> Any:
        if path.endswith("/result"):
            await call(self, "DELETE", path.removesuffix("/result"))
        return await call(self, method, path, **options)

    monkeypatch.setattr(connection.ServerConnection, "call", deletes_first)
    async with over_a_line(tmp_path) as (dt, _):
        small = await dt.run(GREET)
        large = await dt.run(GREET, {"text": "x" * 100_000})
        assert [run.run_id for run in (await dt.list_runs()).items] == [small.run_id]
        with pytest.raises(NotFound):
            await dt.get_run(large.run_id)


async def test_events_arrive_once_and_in_order_even_if_the_connection_breaks_often(
    tmp_path: Path,
) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.run(CHAIN)
        reported = [event async for event in dt.events(run.run_id)]
        assert [event.seq for event in reported] == list(range(1, 40))
        for first in (0, 150, 612, 1500):
            line.asked.clear()
            line.cut()
            line.cut_answers = [first, 640, 0, 900, 1400]
            assert [event async for event in dt.events(run.run_id)] == reported
            assert not line.cut_answers
        line.cut()
        line.cut_answers, line.forgets = [1500], 1
        assert [event async for event in dt.events(run.run_id)] == reported, (
            "sent again from the first"
        )
        assert not line.forgets
        resumed = [one for one in line.requests("GET") if b"last-event-id: " in one.lower()]
        assert len(resumed) >= 4


async def test_a_live_stream_that_breaks_continues_where_it_stopped(tmp_path: Path) -> None:
    opened, knocked = asyncio.Event(), asyncio.Event()

    @handler("knock")
    async def knock(config: dict[str, Any], ctx: Context) -> None:
        ctx.progress(0.5, "line\u2028break")
        knocked.set()
        await opened.wait()

    door = {"name": "door", "nodes": [{"id": "a", "handler": "knock"}]}
    async with over_a_line(tmp_path, knock) as (dt, line):
        run = await dt.trigger(door)
        seen = []

        async def listen() -> None:
            async for event in dt.events(run.run_id):
                seen.append(event)  # noqa: PERF401  (each when it comes)

        listening = asyncio.create_task(listen())
        await knocked.wait()
        while not any(event.type == "node.progress" for event in seen):
            await asyncio.sleep(0.01)
        line.cut()
        opened.set()
        await listening
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].type == "run.completed"
    (progress,) = [event for event in seen if event.type == "node.progress"]
    assert progress.message == "line\u2028break"


# --- servers that are away ---------------------------------------------------------------------


async def test_a_server_that_was_never_there_is_reported_within_moments() -> None:
    port = free_port()
    async with Dovetail(f"http://127.0.0.1:{port}") as dt, asyncio.timeout(SECONDS):
        with pytest.raises(ServerUnreachable) as raised:
            await dt.list_runs()
    words = str(raised.value)
    assert f"the server at http://127.0.0.1:{port} cannot be reached: " in words
    assert re.search(r"tried \d+ times within \d+ s; is it running, as in  dovetail serve\?", words)


async def test_a_waiting_caller_goes_on_while_the_server_restarts(tmp_path: Path) -> None:
    port = free_port()
    doors = [asyncio.Event(), asyncio.Event()]
    doors[1].set()
    knocked = asyncio.Event()

    def knocks(place: int) -> Any:
        @handler("knock")
        async def knock(config: dict[str, Any], ctx: Context) -> int:
            knocked.set()
            await doors[place].wait()
            return place

        return knock

    door = {"name": "door", "nodes": [{"id": "a", "handler": "knock"}]}
    async with Dovetail(f"http://127.0.0.1:{port}") as dt, asyncio.timeout(SECONDS):
        async with serving(tmp_path, [knocks(0)], port, drain_seconds=0):
            run = await dt.trigger(door)
            waiting = asyncio.create_task(dt.wait(run.run_id))
            listening = asyncio.create_task(collected(dt, run.run_id))
            await knocked.wait()
        async with serving(tmp_path, [knocks(1)], port, drain_seconds=0) as url:
            async with Dovetail(tmp_path / "served.db", handlers=knocks(1)) as other:
                await other.resume(run.run_id)
                done = await waiting
                seqs = await listening
            assert url.endswith(str(port))
    assert (done.status, done.outputs) == ("COMPLETED", {"a": 1})
    assert seqs == list(range(1, len(seqs) + 1))


async def collected(dt: Dovetail, run_id: str) -> list[int]:
    return [event.seq async for event in dt.events(run_id)]


HANDLERS = """
import asyncio
from pathlib import Path
from dovetail import handler

@handler
async def until(config, ctx):
    Path(f"started.{ctx.attempt}").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.02)
    return ctx.attempt
"""


async def serve_process(folder: Path, port: int) -> Process:
    script = str(Path(sys.executable).with_name("dovetail"))
    words = ("serve", "--port", str(port), "--handlers", "mine.py")
    process = await asyncio.create_subprocess_exec(script, *words, cwd=folder, stdout=PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"dovetail serves")
    return process


async def test_a_waiting_caller_goes_on_when_the_server_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(HANDLERS)
    port = free_port()
    server = await serve_process(tmp_path, port)
    flow = {"name": "flow", "nodes": [{"id": "a", "handler": "until"}]}
    try:
        async with Dovetail(f"http://127.0.0.1:{port}") as dt, asyncio.timeout(2 * SECONDS):
            run = await dt.trigger(flow)
            batch = await dt.batch(GREET, [{}, {}])
            waiting = asyncio.create_task(dt.wait(run.run_id))
            listening = asyncio.create_task(collected(dt, run.run_id))
            while not (tmp_path / "started.1").exists():
                await asyncio.sleep(0.02)
            server.send_signal(signal.SIGKILL)
            await server.wait()
            (tmp_path / "go").touch()
            server = await serve_process(tmp_path, port)
            done = await waiting
            assert (done.status, done.outputs) == ("COMPLETED", {"a": 2})
            seqs = await listening
            assert seqs == list(range(1, len(seqs) + 1))
            assert (await dt.wait_batch(batch.batch_id)).counts == {"COMPLETED": 2}
    finally:
        server.terminate()
        await server.wait()


async def test_a_wait_times_out_on_time_even_if_the_server_is_down(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.trigger(LONG)
        line.dead = True
        line.cut()
        with pytest.raises(TimeoutError, match=r"could not be asked about after 0\.2 s"):
            await dt.wait(run.run_id, timeout=0.2)


async def test_a_server_that_stays_down_is_reported(tmp_path: Path, impatient: None) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.trigger(LONG)
        line.dead = True
        line.cut()
        for ask in (dt.get_run, dt.wait, lambda run_id: collected(dt, run_id), dt.cancel):
            with pytest.raises(StoreError, match=r"cannot be reached|not known"):
                await ask(run.run_id)


# --- servers that are busy, or something else --------------------------------------------------


def reported(status: str, body: bytes = b"", **headers: str) -> bytes:
    head = {"content-length": str(len(body)), "connection": "close", **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{n.replace('_', '-')}: {v}" for n, v in head.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BUSY = reported("429 Too Many", retry_after="0")
AWAY = reported("502 Bad Gateway", b"<html>", content_type="text/html")


async def test_a_busy_server_is_called_again_after_its_retry_after(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        run = await dt.trigger(LONG)
        for answers in ([BUSY], [AWAY, reported("503 Away", retry_after="0")], [BUSY, BUSY, BUSY]):
            line.cut()
            line.instead = list(answers)
            assert (await dt.get_run(run.run_id)).run_id == run.run_id
            line.cut()
            line.instead = list(answers)
            assert await collected_some(dt, run.run_id) == [1, 2]
            assert not line.instead
        line.cut()
        line.instead = [BUSY]
        assert (await dt.cancel(run.run_id)).status == "CANCELLED", "429: it was not even looked at"


async def collected_some(dt: Dovetail, run_id: str) -> list[int]:
    seen = []
    async for event in dt.events(run_id):
        seen.append(event.seq)
        if len(seen) == 2:
            break
    return seen


async def test_retry_after_is_obeyed_within_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        await dt.list_runs()
        line.cut()
        line.instead = [reported("503 Away", retry_after="1")]
        began = asyncio.get_running_loop().time()
        await dt.list_runs()
        assert asyncio.get_running_loop().time() - began >= 1.0
        line.cut()
        line.instead = [reported("503 Away", retry_after="3600")]
        with pytest.raises(ServerError, match="answers 503"):
            await dt.list_runs()
        run = await dt.trigger(LONG)
        line.cut()
        line.instead = [AWAY]
        with pytest.raises(ServerError, match="answers 502: what is in front of the server"):
            await dt.cancel(run.run_id)
        assert (await dt.get_run(run.run_id)).status != "CANCELLED"


async def test_another_kind_of_server_is_reported(tmp_path: Path, impatient: None) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        page = reported("200 OK", b"<html>hello", content_type="text/html")
        line.instead = [page]
        with pytest.raises(NoDovetail, match="200 with text/html, which no Dovetail server does"):
            await dt.list_runs()
        line.instead = [reported("404 Not Found", b"nope", content_type="text/plain")]
        with pytest.raises(NoDovetail, match="is the address right"):
            await dt.get_run("0" * 32)
        line.instead = [page]
        with pytest.raises(NoDovetail, match="is the address right"):
            await collected(dt, "0" * 32)
        line.asked.clear()
        line.instead = [reported("308 Moved", location="https://elsewhere.example/")]
        with pytest.raises(NoDovetail, match=r"sends its callers to https://elsewhere"):
            await dt.list_runs()
        assert len(line.requests("GET")) == 1, "not followed, with a token in hand"


async def test_a_bug_of_the_server_is_reported_with_its_request_id(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (dt, line):
        problem = b'{"type": "urn:dovetail:problem:internal_error", "detail": "went wrong"}'
        kind = {"content_type": "application/problem+json", "x_request_id": "abc123"}
        line.instead = [reported("500 Internal", problem, **kind)]
        with pytest.raises(ServerError, match=r"500: went wrong \(request abc123 in its log\)"):
            await dt.list_runs()


# --- who may ask -------------------------------------------------------------------------------


async def test_a_missing_token_is_reported_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ("hunter2-all", "hunter3-reads:read")
    async with serving(tmp_path, tokens=tokens) as url, asyncio.timeout(SECONDS):
        for token in (None, "hunter4-wrong"):
            async with Dovetail(url, token=token) as dt:
                for ask in (dt.list_runs(), dt.trigger(GREET), collected(dt, "0" * 32)):
                    with pytest.raises(AccessDenied, match=r"token=…, --token or DOVETAIL_TOKEN"):
                        await ask
        async with Dovetail(url, token="hunter3-reads") as dt:
            assert (await dt.list_runs()).items == ()
            with pytest.raises(AccessDenied, match="may only read; give it with token="):
                await dt.run(GREET)
        async with Dovetail(url, token="hunter2-all") as dt:
            assert (await dt.run(GREET)).status == "COMPLETED"
            assert "hunter2" not in repr(dt)
        monkeypatch.setenv("DOVETAIL_TOKEN", "hunter2-all")
        async with Dovetail(url) as dt:
            assert len(await dt.list_runs()) == 1
        with pytest.raises(DovetailError, match="no header can carry") as wrong:
            async with Dovetail(url, token="hunter5\n"):
                raise AssertionError
        assert "hunter5" not in str(wrong.value)


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "cannot be read"),
        ("http://ho st", "cannot be read"),
        ("http://host:99999", "cannot be read"),
        ("http://host:port", "cannot be read"),
        ("http://[::1", "cannot be read"),
        ("https://me:hunter2@host", "token=…"),
        ("http://host/?token=hunter2", "ends before"),
        ("http://host/#hunter2", "ends before"),
    ],
)
def test_a_wrong_address_is_reported_before_anything_is_sent(url: str, words: str) -> None:
    with pytest.raises(DovetailError, match=re.escape(words)) as error:
        Dovetail(url)
    assert "hunter2" not in str(error.value)


async def test_an_address_may_end_in_a_slash_and_loopback_uses_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with serving(tmp_path) as url, Dovetail(f"{url}/") as dt:
        assert (await dt.run(GREET)).status == "COMPLETED"
        assert repr(dt) == f"<Dovetail '{url}', open>"
    assert repr(Dovetail(server=url)) == f"<Dovetail '{url}', closed>"
    with pytest.raises(TypeError, match="two places"):
        Dovetail(url, server=url)


def test_the_environment_alone_does_not_select_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_SERVER", "http://host:8700")
    assert "dovetail.db" in repr(Dovetail())
    assert "redis://host" in repr(Dovetail("redis://host"))


async def test_a_client_without_the_http_library_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("dovetail.client.connection", "dovetail.client.server"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(DovetailError, match=r"pip install 'dovetail\[http\]'"):
        async with Dovetail("http://127.0.0.1:1"):
            raise AssertionError


# --- the same answers --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Commands, RemoteEngine])
def test_every_engine_has_every_call_of_the_protocol(engine: type) -> None:
    asked = {name for name in vars(EngineApi) if not name.startswith("_")}
    assert asked <= {*vars(engine), *getattr(engine, "__dataclass_fields__", ())}


def test_an_engine_has_no_public_call_that_is_in_no_protocol() -> None:
    asked = {name for one in (EngineApi, ServedEngine) for name in vars(one)}
    fields = set(Commands.__dataclass_fields__)
    for engine in (Commands, RemoteEngine):
        assert {name for name in vars(engine) if not name.startswith("_")} - fields <= asked


async def test_a_run_reads_the_same_locally_and_through_a_server(tmp_path: Path) -> None:
    @handler("stumbles", max_retries=3)
    async def stumbles(config: dict[str, Any], ctx: Context) -> None:
        raise RetryableError("not yet", after=60)

    def node(name: str, of: str, *above: str, **more: Any) -> dict[str, Any]:
        return {"id": name, "handler": of, "dependencies": list(above), **more}

    slow = {"resource_tag": "slow"}
    flow = {
        "name": "all-kinds",
        "on_failure": "continue",
        "nodes": [
            node("fine", "input"),
            node("never", "input", "fine", condition="{{ false }}"),
            node("broken", "fail", "fine", config={"message": "as asked"}),
            node("below", "output", "broken", "never"),
            node("again", "stumbles"),
            node("first", "input", **slow),
            node("second", "input", **slow),
            node("end", "output", "again", "second"),
        ],
    }
    settled = "COMPLETED SKIPPED FAILED SKIPPED QUEUED COMPLETED QUEUED PENDING".split()  # noqa: SIM905
    async with serving(tmp_path, [stumbles], drain_seconds=0) as url, Dovetail(url) as dt:
        commands = dt._commands
        await commands.set_rate_limit("slow", 0.001, 1)
        run = await dt.trigger(flow)
        async with asyncio.timeout(SECONDS):
            while True:
                run = await dt.get_run(run.run_id)
                events = [event["type"] for event in await commands.events(run.run_id)]
                waits = "node.parked" in events and "node.retrying" in events
                if waits and [one.status for one in run.nodes.values()] == settled:
                    break
        async with (
            Dovetail(tmp_path / "served.db", handlers=[stumbles]) as beside,
            asyncio.timeout(SECONDS),
        ):
            while True:  # one that is parked may be woken meanwhile, and parked again
                there = await commands.snapshot(run.run_id)
                here = await beside._commands.snapshot(run.run_id)
                if there.seq == here.seq:
                    break
        assert there.view == here.view == await commands.get_run(run.run_id)
        assert rows(Board.now(there)) == rows(Board.now(here))
        assert {row["until"] is not None for row in rows(Board.now(there))} == {True, False}
        assert await commands.verify(run.run_id) == []
        assert (await commands.find_run(run.run_id[:8])) == run.run_id
        with pytest.raises(Conflict, match="goes on with its runs itself"):
            await dt.resume()


def rows(board: Board) -> list[dict[str, Any]]:
    """With times as a server tells them: to the microsecond."""

    def plain_of(value: Any) -> Any:
        return timestamp(value) if isinstance(value, float) else value

    return [{name: plain_of(getattr(row, name)) for name in row.__slots__} for row in board.rows]


async def test_a_definition_is_refused_with_the_positions_of_its_own_text(tmp_path: Path) -> None:
    text = "name: typo\nnodes:\n  - {id: a, handler: nobody}\n"
    (tmp_path / "typo.yaml").write_text(text)
    (tmp_path / "typo.json").write_text('{"name": "typo",\n "nodes": [\n{"id": "a"}]}')
    async with serving(tmp_path) as url, Dovetail(url) as dt:
        for call in (dt.register, dt.trigger):
            for name in ("typo.yaml", "typo.json"):
                with pytest.raises(InvalidDefinition) as refused:
                    await call(name)
                assert {problem.line for problem in refused.value.problems} == {3}
            with pytest.raises(InvalidDefinition) as refused:
                await call({"name": "typo", "nodes": [{"id": "a", "handler": "nobody"}]})
            (problem,) = refused.value.problems
            assert (problem.code, problem.line) == ("unknown_handler", None)
        large = {**GREET, "description": "x" * (2 << 20)}
        with pytest.raises(InvalidDefinition, match="1,048,576"):
            await dt.run(large)
