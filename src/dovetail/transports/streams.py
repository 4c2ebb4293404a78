"""Tasks and results on Redis Streams: one stream of tasks per handler, one of results.

A message is read by one consumer of its group, and removed once what it asked for is settled in
the run's own state. Losing one costs time: any queued node can be published again from state, and
any result whose start is not current is refused. What is no message of ours goes to the dead
letters and never stops anybody. What it must not know: any rule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import hiredis
import orjson

from dovetail.core.events import Token
from dovetail.core.templates import Deferred
from dovetail.core.transitions import Complete, Fail, Stop
from dovetail.engine.ports import Result, Task
from dovetail.pipe import Pipe, RedisError

RESULTS = "wf:stream:results"
STOPS = "wf:stream:stops"
DEAD = "wf:dead"
WORKERS, ORCHESTRATORS = "workers", "orchestrators"
MOST_DEAD = 10_000
MOST_STOPS = 10_000
BLOCK_MILLISECONDS = 1000
TASK_FIELDS = ("run_id", "node_id", "token", "handler", "config", "params", "inputs")
RESULT_FIELDS = ("run_id", "node_id", "token", "success", "output", "error")


class Message(NamedTuple):
    """A message that was read and is not settled yet."""

    stream: str
    id: str
    content: Any
    """A `Task`, a `Complete` or a `Fail`."""


class Malformed(ValueError):
    pass


def stream_of(handler: str) -> str:
    return f"tasks:{handler}"


class StreamSender:
    """The orchestrators' end: tasks go out, orders to stop go out."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def send(self, tasks: Sequence[Task]) -> None:
        asked = [self._pipe.call("XADD", stream_of(t.handler), "*", *task_fields(t)) for t in tasks]
        await asyncio.gather(*asked)

    async def stop(self, order: Stop) -> None:
        fields = ("run_id", order.run_id, "node_id", order.node, "token", str(order.token))
        await self._pipe.call("XADD", STOPS, "MAXLEN", "~", MOST_STOPS, "*", *fields)


class StreamReader:
    """One consumer of a group, on a connection of its own: its reads block."""

    def __init__(self, blocking: Pipe, pipe: Pipe, group: str, consumer: str) -> None:
        self._blocking = blocking
        self._pipe = pipe
        self._group = group
        self._consumer = consumer
        self._known: set[str] = set()

    async def read(self, streams: Sequence[str], limit: int) -> list[Message]:
        """New messages of these streams, at most so many of each; waits a second for some."""
        for stream in streams:
            if stream not in self._known:
                await self._open(stream)
        command: list[str | int] = ["XREADGROUP", "GROUP", self._group, self._consumer]
        command += ["COUNT", limit, "BLOCK", BLOCK_MILLISECONDS, "STREAMS", *streams]
        reply = await self._blocking.ask(*command, *[">"] * len(streams))
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("NOGROUP"):  # the stream was deleted, its group with it
                self._known.clear()
                return []
            if str(reply).startswith("UNBLOCKED"):
                return []
            raise RedisError(f"XREADGROUP: {reply}")
        found: list[Message] = []
        for stream, entries in reply or ():
            found += await self._understood(stream.decode(), entries)
        return found

    async def claim_stale(self, stream: str, idle_seconds: float, limit: int) -> list[Message]:
        """Messages that another consumer has read and not settled for so long."""
        reply = await self._pipe.ask(
            "XAUTOCLAIM",
            *(stream, self._group, self._consumer, int(idle_seconds * 1000)),
            *("0-0", "COUNT", limit),
        )
        if isinstance(reply, hiredis.ReplyError):
            return []  # no such stream or group: nobody has read anything
        return await self._understood(stream, reply[1])

    async def settle(self, messages: Iterable[Message]) -> None:
        """These are done with: they shall be read by nobody again."""
        by_stream: dict[str, list[str]] = {}
        for message in messages:
            by_stream.setdefault(message.stream, []).append(message.id)
        asked = []
        for stream, ids in by_stream.items():
            asked.append(self._pipe.call("XACK", stream, self._group, *ids))
            asked.append(self._pipe.call("XDEL", stream, *ids))
        await asyncio.gather(*asked)

    async def _open(self, stream: str) -> None:
        reply = await self._pipe.ask("XGROUP", "CREATE", stream, self._group, "0", "MKSTREAM")
        if isinstance(reply, hiredis.ReplyError) and not str(reply).startswith("BUSYGROUP"):
            raise RedisError(f"XGROUP CREATE {stream}: {reply}")
        self._known.add(stream)

    async def _understood(self, stream: str, entries: Any) -> list[Message]:
        found = []
        for entry in entries or ():
            if entry is None or entry[1] is None:
                continue  # deleted while somebody held it
            number, fields = entry[0].decode(), entry[1]
            try:
                content = _content(stream, fields)
            except (Malformed, ValueError, KeyError, TypeError) as problem:
                await self._bury(stream, number, fields, problem)
            else:
                found.append(Message(stream, number, content))
        return found

    async def _bury(self, stream: str, number: str, fields: Any, problem: Exception) -> None:
        shown = [_shown(field) for field in fields]
        letter = {
            "stream": stream,
            "id": number,
            "reason": str(problem) or type(problem).__name__,
            "fields": dict(zip(shown[::2], shown[1::2], strict=False)),
            "time": time.time(),
        }
        await self._pipe.call("LPUSH", DEAD, orjson.dumps(letter))
        await self._pipe.call("LTRIM", DEAD, 0, MOST_DEAD - 1)
        await self.settle([Message(stream, number, None)])


def _shown(field: bytes) -> str:
    return field[:2000].decode(errors="replace")


# ── messages ─────────────────────────────────────────────────────────────────────────────


def task_fields(task: Task) -> list[str | bytes]:
    dumps = orjson.dumps
    fields: list[str | bytes] = [
        *("run_id", task.run_id, "node_id", task.node_id, "token", str(task.token)),
        *("handler", task.handler, "config", dumps(task.config), "params", dumps(task.params)),
        *("inputs", dumps(task.inputs()), "timeout_seconds", repr(task.timeout_seconds)),
    ]
    if task.resource_tag is not None:
        fields += ["resource_tag", task.resource_tag]
    if task.deferred:
        kept = [[list(one.path), one.source, one.scope] for one in task.deferred]
        fields += ["deferred", dumps(kept)]
    if task.cache is not None:
        fields += ["cache", dumps(task.cache)]
    return fields


def result_fields(result: Result) -> list[str | bytes]:
    dumps = orjson.dumps
    fields: list[str | bytes] = ["run_id", result.run_id, "node_id", result.node]
    fields += ["token", str(result.token)]
    if isinstance(result, Complete):
        fields += ["success", "1", "output", dumps(result.output), "error", "null"]
        if result.cache is not None:
            fields += ["cache", dumps(result.cache)]
        return fields
    hints = {
        "permanent": result.permanent,
        "after": result.after,
        "at_least": result.at_least,
        "chance": result.chance,
    }
    fields += ["success", "0", "output", "null", "error", dumps(result.error)]
    return [*fields, "hints", dumps(hints)]


def _content(stream: str, fields: list[bytes]) -> Task | Result:
    given = dict(zip((f.decode() for f in fields[::2]), fields[1::2], strict=True))
    if stream == RESULTS:
        return _result(given)
    return _task(given)


def _require(given: dict[str, bytes], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise Malformed(f"it has no {', '.join(missing)}")


def _token(text: bytes) -> Token:
    try:
        return Token.parse(text.decode())
    except ValueError:
        raise Malformed(f"its token is {_shown(text)!r}") from None


def _result(given: dict[str, bytes]) -> Result:
    _require(given, RESULT_FIELDS)
    run_id, node = given["run_id"].decode(), given["node_id"].decode()
    token = _token(given["token"])
    if given["success"] in (b"1", b"true", b"True"):
        cache = orjson.loads(given["cache"]) if "cache" in given else None
        output = orjson.loads(given["output"])
        return Complete(
            run_id, node, token, output, None if cache is None else (cache[0], cache[1])
        )
    if given["success"] not in (b"0", b"false", b"False"):
        raise Malformed(f"its success is {_shown(given['success'])!r}")
    error = orjson.loads(given["error"])
    if not isinstance(error, dict):
        error = {"type": "error", "message": str(error)}
    hints = orjson.loads(given["hints"]) if "hints" in given else {}
    return Fail(
        run_id,
        node,
        token,
        error,
        permanent=bool(hints.get("permanent")),
        after=hints.get("after"),
        at_least=hints.get("at_least"),
        chance=float(hints.get("chance") or 0.0),
    )


def _task(given: dict[str, bytes]) -> Task:
    _require(given, TASK_FIELDS)
    config, params = orjson.loads(given["config"]), orjson.loads(given["params"])
    inputs = orjson.loads(given["inputs"])
    for name, value in (("config", config), ("params", params), ("inputs", inputs)):
        if not isinstance(value, dict):
            raise Malformed(f"its {name} is no object")
    deferred = orjson.loads(given.get("deferred", b"[]"))
    cache = orjson.loads(given["cache"]) if "cache" in given else None
    tag = given.get("resource_tag")
    return Task(
        given["run_id"].decode(),
        given["node_id"].decode(),
        _token(given["token"]),
        given["handler"].decode(),
        config,
        params,
        inputs,
        float(given.get("timeout_seconds", b"300")),
        None if tag is None else tag.decode(),
        tuple(Deferred(tuple(path), source, scope) for path, source, scope in deferred),
        None if cache is None else (cache[0], cache[1]),
    )


class StreamInbox:
    """The workers' end: tasks come in, results go out."""

    def __init__(self, reader: StreamReader, pipe: Pipe, handlers: Sequence[str]) -> None:
        self._reader = reader
        self._pipe = pipe
        self._streams = [stream_of(handler) for handler in handlers]

    async def tasks(self, limit: int) -> list[tuple[Message, Task]]:
        # COUNT is for each stream: all of them together must not bring more than was asked for.
        share = max(1, limit // len(self._streams)) if limit > len(self._streams) else 1
        messages = await self._reader.read(self._rotated(), share)
        return [(message, message.content) for message in messages]

    def _rotated(self) -> list[str]:
        """Another stream first each time, so that none is always served last."""
        self._streams = [*self._streams[1:], self._streams[0]]
        return self._streams

    async def stale(self, idle_seconds: float, limit: int) -> list[tuple[Message, Task]]:
        """What a worker has read and then died over."""
        found: list[tuple[Message, Task]] = []
        for stream in self._streams:
            messages = await self._reader.claim_stale(stream, idle_seconds, limit)
            found += [(message, message.content) for message in messages]
        return found

    async def settle(self, messages: Sequence[Message]) -> None:
        await self._reader.settle(messages)

    async def send(self, results: Sequence[Result]) -> None:
        asked = [self._pipe.call("XADD", RESULTS, "*", *result_fields(r)) for r in results]
        await asyncio.gather(*asked)


class StopFeed:
    """Orders to stop, as every worker hears them."""

    def __init__(self, blocking: Pipe) -> None:
        self._blocking = blocking
        self._after = ""

    async def next(self) -> list[Stop]:
        """The orders since the last call; waits a second for some."""
        if not self._after:  # not "$", which would mean another moment at each call
            newest = await self._blocking.call("XREVRANGE", STOPS, "+", "-", "COUNT", 1)
            self._after = newest[0][0].decode() if newest else "0-0"
        command = ("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", STOPS, self._after)
        reply = await self._blocking.call(*command)
        found: list[Stop] = []
        for _, entries in reply or ():
            for number, fields in entries:
                self._after = number.decode()
                given = dict(zip(fields[::2], fields[1::2], strict=True))
                token = Token.parse(given[b"token"].decode())
                found.append(Stop(given[b"run_id"].decode(), given[b"node_id"].decode(), token))
        return found
