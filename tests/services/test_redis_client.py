"""One connection for many: what is asked together travels together, and a break is survived."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import hiredis
import pytest

from dovetail.core.errors import StoreError
from dovetail.redis_client import pipelined as pipe_module
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.stores.redis.doctor import eviction_policies

from ..servers.redis_server import RedisServer


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as opened:
        yield opened


async def test_commands_of_one_loop_turn_are_sent_in_one_roundtrip(pipe: PipelinedRedis) -> None:
    before = pipe.roundtrips
    answers = await asyncio.gather(*(pipe.call("INCR", "n") for _ in range(100)))
    assert answers == list(range(1, 101))
    assert pipe.roundtrips == before + 1


async def test_a_reply_of_any_size_arrives_complete(pipe: PipelinedRedis) -> None:
    text = b"x" * 3_000_000
    await pipe.call("SET", "k", text)
    assert await pipe.call("GET", "k") == text


async def test_a_refused_command_raises_and_other_commands_of_the_batch_do_not(
    pipe: PipelinedRedis,
) -> None:
    await pipe.call("SET", "k", "text")
    wrong, right = await asyncio.gather(
        pipe.call("LPUSH", "k", 1), pipe.call("GET", "k"), return_exceptions=True
    )
    assert isinstance(wrong, RedisError)
    assert right == b"text"


async def test_a_cancelled_call_takes_no_reply_of_another(pipe: PipelinedRedis) -> None:
    given_up = asyncio.ensure_future(pipe.call("SET", "a", 1))
    other = asyncio.ensure_future(pipe.call("ECHO", "mine"))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await other == b"mine"


async def test_a_script_is_sent_once_and_again_after_redis_forgot_it(pipe: PipelinedRedis) -> None:
    source = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
    assert await pipe.call_script(source, ["n"], [2]) == 2
    await pipe.call("SCRIPT", "FLUSH")
    assert await pipe.call_script(source, ["n"], [2]) == 4
    with pytest.raises(RedisError, match="script"):
        await pipe.call_script("return redis.call('LPUSH', KEYS[1], 1)", ["n"], [])


async def test_a_blocked_reader_sees_a_transaction_completely(
    pipe: PipelinedRedis, redis_url: str
) -> None:
    added = [("XADD", "s", "*", "n", n) for n in range(20)]
    async with PipelinedRedis(redis_url) as waiting:
        asked = asyncio.ensure_future(waiting.call("XREAD", "BLOCK", 5000, "STREAMS", "s", "0"))
        async with asyncio.timeout(5):
            while b"blocked_clients:1" not in await pipe.call("INFO", "clients"):
                await asyncio.sleep(0.001)
        ids = await pipe.transaction(added)
        ((_, found),) = await asked
    assert [number for number, _ in found] == ids


async def test_in_a_transaction_only_the_refused_command_has_no_effect(
    pipe: PipelinedRedis,
) -> None:
    counting = [("INCR", "n")] * 3
    assert await pipe.transaction([*counting, ("GET", "n")]) == [1, 2, 3, b"3"]
    with pytest.raises(RedisError, match="INCR"):  # nothing of it was queued
        await pipe.transaction([*counting, ("INCR",)])
    assert await pipe.call("GET", "n") == b"6"
    await pipe.call("SET", "text", "x")
    with pytest.raises(RedisError, match="INCR"):  # the others were done
        await pipe.transaction([*counting, ("INCR", "text")])
    assert await pipe.call("GET", "n") == b"9"


async def test_delayed_commands_are_sent_with_the_next_and_trailing_ones_after_it(
    pipe: PipelinedRedis,
) -> None:
    before = pipe.roundtrips
    last = pipe.send([("RPUSH", "l", "last")], delay=60, last=True)
    first = pipe.send([("RPUSH", "l", "first")], delay=60)
    await pipe.call("RPUSH", "l", "second")
    assert (await first, await last) == ([1], [3])
    assert await pipe.call("LRANGE", "l", 0, -1) == [b"first", b"second", b"last"]
    assert pipe.roundtrips == before + 2


async def test_a_delayed_command_is_sent_at_its_deadline(pipe: PipelinedRedis) -> None:
    patient = pipe.send([("INCR", "n")], delay=60)
    other = pipe.send([("INCR", "n")], delay=0.001)
    async with asyncio.timeout(5):
        assert (await patient, await other) == ([1], [2])


async def test_a_redis_that_dies_and_restarts_is_only_a_delay() -> None:
    with RedisServer(fsync="always") as server:
        async with PipelinedRedis(server.url) as pipe:
            await pipe.call("SET", "k", "kept")
            server.kill()
            asked = [asyncio.ensure_future(pipe.call("GET", "k")) for _ in range(5)]
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.start)
            assert await asyncio.wait_for(asyncio.gather(*asked), 10) == [b"kept"] * 5
            assert await pipe.call_script("return 7", [], []) == 7


async def test_many_commands_refused_by_a_loading_redis_wait_together(
    pipe: PipelinedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pause for all: each with one of its own would take minutes of a batch."""
    ask, loads = PipelinedRedis.send, [True, True]
    rests: list[float] = []

    def answer(self: PipelinedRedis, commands: Any, **more: Any) -> Any:
        if not loads:
            return ask(self, commands, **more)
        loads.pop()
        reported = asyncio.get_running_loop().create_future()
        refusal = hiredis.ReplyError("LOADING Redis is loading the dataset in memory")
        reported.set_result([refusal] * len(commands))
        return reported

    async def rest(self: PipelinedRedis, seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(PipelinedRedis, "send", answer)
    monkeypatch.setattr(PipelinedRedis, "_sleep", rest)
    assert await pipe.call_many([("INCR", "n")] * 50) == list(range(1, 51))
    assert len(rests) == 2
    loads.append(True)
    with pytest.raises(RedisError, match="LPUSH: WRONGTYPE"):
        await pipe.call_many([("INCR", "n"), ("LPUSH", "n", "x"), ("INCR", "n")])
    assert await pipe.call("GET", "n") == b"52"


async def test_a_connection_that_breaks_before_it_is_used_is_opened_again(
    pipe: PipelinedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does to a server that is about to die: the kernel makes it, no process takes it."""
    greet, dying = PipelinedRedis._greet, [True]

    async def greet_and_die(self: PipelinedRedis, wire: Any) -> None:
        await greet(self, wire)
        if dying:
            dying.pop()
            wire.transport.abort()
            await asyncio.sleep(0.05)

    monkeypatch.setattr(PipelinedRedis, "_greet", greet_and_die)
    pipe._break()
    async with asyncio.timeout(10):
        assert await pipe.call("PING") in (b"PONG", "PONG")
    assert dying == []


class StubServer:
    """Takes every connection, and answers each greeting the same, or not at all."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.taken = 0
        self.open = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        self.open += 1
        with suppress(ConnectionError):
            while await reader.read(1000):
                writer.write(self.answer)
        self.open -= 1
        writer.close()


@pytest.mark.parametrize("answer", [b"-WRONGPASS invalid password\r\n", b""])
async def test_a_connection_that_is_refused_is_closed(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one is left open with every try, for as long as a password is not the right one."""
    monkeypatch.setattr(pipe_module, "CONNECT_SECONDS", 0.02)
    monkeypatch.setattr(pipe_module, "LONGEST_RETRY_SECONDS", 0.01)
    doorman = StubServer(answer)
    server = await asyncio.start_server(doorman.take, "127.0.0.1", 0)
    url = f"redis://:wrong@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    async with server, asyncio.timeout(10):
        with pytest.raises(RedisError):
            async with PipelinedRedis(url):
                pass
        trying = PipelinedRedis(url)
        trying.open_in_background()
        while doorman.taken < 10:
            await asyncio.sleep(0.01)
        assert doorman.open <= 2, "the last one, and one whose end is on its way"
        trying.close()
        while doorman.open:
            await asyncio.sleep(0.001)


async def test_a_blocking_connection_that_is_refused_is_closed() -> None:
    doorman = StubServer(b"-WRONGPASS invalid password\r\n")
    server = await asyncio.start_server(doorman.take, "127.0.0.1", 0)
    url = f"redis://:wrong@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    async with server, asyncio.timeout(10):
        waiting = SyncRedis(url)
        for _ in range(3):
            with pytest.raises(RedisError, match="WRONGPASS"):
                await asyncio.to_thread(waiting.send, [("PING",)])
        while doorman.open:
            await asyncio.sleep(0.001)
        waiting.close()


async def test_an_unreachable_redis_is_reported_in_words() -> None:
    with RedisServer() as server:
        url = server.url
    with pytest.raises(StoreError, match="cannot be reached"):
        async with PipelinedRedis(url):
            pass


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("redis", "Redis cannot be reached: no answer in time"),
        (
            "rediss",
            "Redis cannot be reached: no answer in time (rediss:// needs a Redis that speaks TLS)",
        ),
    ],
)
async def test_a_redis_that_says_nothing_is_reported_in_words(
    scheme: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe_module, "CONNECT_SECONDS", 0.1)
    silent = StubServer(b"")
    server = await asyncio.start_server(silent.take, "127.0.0.1", 0)
    url = f"{scheme}://:pw@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    async with server, asyncio.timeout(10):
        with pytest.raises(RedisError) as raised:
            async with PipelinedRedis(url):
                pass
        while silent.open:
            await asyncio.sleep(0.001)
    assert str(raised.value) == said


async def test_a_missing_password_is_reported_with_its_place_in_the_url() -> None:
    guard = StubServer(b"-NOAUTH Authentication required.\r\n")
    server = await asyncio.start_server(guard.take, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    said = "asks for a password: put it into the URL, as in redis://:PASSWORD@host:6379/0"
    async with server, asyncio.timeout(10):
        async with PipelinedRedis(url) as pipe:
            with pytest.raises(RedisError, match=said):
                await pipe.call("PING")
            with pytest.raises(RedisError, match=said):
                await eviction_policies(pipe)
        while guard.open:
            await asyncio.sleep(0.001)


async def test_a_closed_connection_fails_every_call_with_an_error(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        blocked = asyncio.ensure_future(pipe.call("BLPOP", "nothing", 30))
        await asyncio.sleep(0.05)
    with pytest.raises(RedisError, match="closed"):
        await asyncio.wait_for(blocked, 5)
    with pytest.raises(RedisError, match="closed"):
        await pipe.call("PING")


# ── options of the URL ───────────────────────────────────────────────────────────────────


async def test_a_connection_has_the_name_that_its_url_gives_it(redis_url: str) -> None:
    url = f"{redis_url}?client_name=mine"
    async with PipelinedRedis(url) as pipe:
        assert await pipe.call("CLIENT", "GETNAME") == b"mine"
    blocking = SyncRedis(url)
    assert done(blocking.call("CLIENT", "GETNAME")) == b"mine"
    blocking.close()


async def test_the_timeout_of_a_silent_connection_comes_from_the_url(redis_url: str) -> None:
    url = f"{redis_url}?socket_timeout=3&socket_connect_timeout=1&socket_keepalive=true"
    async with PipelinedRedis(url) as pipe:
        assert 2 < pipe._silence_timer.when() - pipe._loop.time() <= 3
    blocking = SyncRedis(url)
    done(blocking.call("PING"))
    assert blocking._socket is not None
    assert blocking._socket.gettimeout() == 3
    assert blocking._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    blocking.close()


async def test_an_idle_connection_is_pinged(redis_url: str) -> None:
    url = f"{redis_url}?health_check_interval=0.01"
    async with PipelinedRedis(url) as pipe:
        before = pipe.commands
        async with asyncio.timeout(10):
            while pipe.commands < before + 3:
                await asyncio.sleep(0.01)
    blocking = SyncRedis(url)
    number = done(blocking.call("CLIENT", "ID"))
    async with PipelinedRedis(redis_url) as other:
        await asyncio.sleep(0.02)
        assert done(blocking.call("CLIENT", "ID")) == number, "it lives, and stays"
        await other.call("CLIENT", "KILL", "ID", number)
        await asyncio.sleep(0.02)
        assert done(blocking.call("CLIENT", "ID")) != number
        assert blocking.breaks == 0, "noticed before anything was asked"
    blocking.close()
