"""Messages on streams as they are sent: commands that add them.

Nearly all of a message is the same every time, and to fill in a form is a third of the work. What
it must not know: who reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from dovetail.core.transitions import Complete
from dovetail.engine.ports import Result, Task
from dovetail.redis_client.pipelined import Command
from dovetail.transports.messages import (
    USUAL_TIMEOUT,
    inputs_text,
    params_text,
    result_fields,
    task_fields,
)

RESULTS = "wf:stream:results"
TASKS = "tasks:"
FEWEST_PACKED, MOST_PACKED = 8, 64
"""Results that travel in one message. So many that what it costs to send, read and settle one is
shared, and so few that workers can begin with what follows from the first."""
MOST_TASKS_PACKED, FEWEST_MESSAGES = 32, 4
"""Tasks that travel in one message, and how many messages there are at least: as many workers find
something."""
MOST_PACKED_BYTES = 4096
"""Of one output, or of one task: a larger one costs more than its message."""


def stream_of(handler: str) -> str:
    return f"{TASKS}{handler}"


def _words(*words: str | bytes | None) -> bytes:
    """Words as Redis reads them, with a hole for each that is None."""
    return b"".join(
        b"$%d\r\n%s\r\n" if word is None else b"$%d\r\n%s\r\n" % (len(word), word)
        for word in (word.encode() if isinstance(word, str) else word for word in words)
    )


_RESULT = b"*15\r\n" + _words(
    *("XADD", RESULTS, "*", "run_id", None, "node_id", None, "token", None),
    *("success", "1", "output", None, "error", "null"),
)


_PACKED = b"*17\r\n" + _words(
    *("XADD", RESULTS, "*", "run_id", None, "node_id", None, "token", None),
    *("success", "1", "output", None, "error", "null", "more", None),
)


# A message in three pieces that siblings have in common, with node, config and place after each.
_BEFORE = b"*%d\r\n" + _words("XADD", None, "*", "run_id", None, "node_id")
_BETWEEN = _words("token", None, "handler", None, "config")
_BEHIND = _words("inputs", None, "place")
_BEHIND_WITH_PARAMS = _words("inputs", None, "params", None, "place")
_TASK = b"%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n"


def task_messages(tasks: Iterable[Task]) -> list[Command]:
    """What sends these, each by itself."""
    messages: list[Command] = []
    like: Task | None = None
    before = between = behind = b""
    for task in tasks:
        if not _is_usual(task):
            messages.append(("XADD", stream_of(task.handler), "*", *task_fields(task)))
            continue
        if like is None or task.handler != like.handler or not _are_siblings(task, like):
            like = task
            before, between, behind = _common(task)
        node_id, config = task.node_id.encode(), orjson.dumps(task.config)
        place = str(task.place).encode()
        message = (before, len(node_id), node_id, between, len(config), config, behind)
        messages.append(_TASK % (*message, len(place), place))
    return messages


def _is_usual(task: Task) -> bool:
    """Whether there is nothing to say of it but what nearly every task has."""
    named = task.resource_tag is not None or task.trace is not None
    unusual = named or task.deferred or task.cache or task.timeout_seconds != USUAL_TIMEOUT
    return not unusual and task.place is not None


def _are_siblings(task: Task, other: Task) -> bool:
    """What became ready together has one token; who has the same parents, one dict of inputs."""
    return (
        task.source is other.source
        and task.source is not None
        and task.token is other.token
        and task.run_id == other.run_id
    )


def packed_task_messages(tasks: Sequence[Task]) -> list[Command]:
    """What sends these, all of one handler that is quick: several in a message."""
    size = min(MOST_TASKS_PACKED, len(tasks) // FEWEST_MESSAGES)
    if size < 2:
        return task_messages(tasks)
    alone: list[Task] = []
    small: list[_Packable] = []
    like: Task | None = None
    shared: tuple[str, ...] = ()
    for task in tasks:
        if not _is_usual(task):
            alone.append(task)
            continue
        if like is None or not _are_siblings(task, like):
            like, shared = task, _shared(task)
        config = orjson.dumps(task.config)
        if sum(map(len, shared)) + len(config) > MOST_PACKED_BYTES:
            alone.append(task)
        else:
            small.append((task, shared, config))
    packs = (small[at : at + size] for at in range(0, len(small), size))
    return [*task_messages(alone), *map(_task_pack, packs)]


_Packable = tuple[Task, tuple[str, ...], bytes]
"""A task, what it shares with its siblings, and its config."""


def _shared(task: Task) -> tuple[str, ...]:
    """Inputs and params as text, so that no two handlers are given the same objects."""
    params = b"{}" if task.params == {} else params_text(task)
    return task.run_id, str(task.token), inputs_text(task).decode(), params.decode()


def _task_pack(pack: Sequence[_Packable]) -> Command:
    """The first as if it were alone, the others behind it, as `read_tasks` takes them; and how many
    they are, for who counts what waits."""
    (first, _, _), *others = pack
    (alone,) = task_messages([first])
    if not others:
        return alone
    more: list[list[Any]] = []
    like: tuple[str, ...] | None = None
    for task, shared, config in others:
        if shared is not like:
            like = shared
            more.append([*shared])
        more[-1] += (task.node_id, orjson.Fragment(config), task.place)
    assert isinstance(alone, bytes)  # noqa: S101
    count, _, words = alone.partition(b"\r\n")
    behind = _words("more", orjson.dumps(more), "tasks", str(len(pack)))
    return b"*%d\r\n%b%b" % (int(count[1:]) + 4, words, behind)


def _common(task: Task) -> tuple[bytes, bytes, bytes]:
    run_id, handler, token = task.run_id.encode(), task.handler.encode(), str(task.token).encode()
    inputs = inputs_text(task)
    between = _BETWEEN % (len(token), token, len(handler), handler)
    stream = b"tasks:" + handler
    where = (len(stream), stream, len(run_id), run_id)
    if task.params == {}:
        return _BEFORE % (17, *where), between, _BEHIND % (len(inputs), inputs)
    params = params_text(task)
    behind = _BEHIND_WITH_PARAMS % (len(inputs), inputs, len(params), params)
    return _BEFORE % (19, *where), between, behind


def result_messages(results: Sequence[Result]) -> list[Command]:
    """What sends these: many that are told together, as few messages."""
    if len(results) < FEWEST_PACKED:
        return [_result_message(result) for result in results]
    messages: list[Command] = []
    small: list[tuple[Complete, bytes]] = []
    for result in results:
        if not isinstance(result, Complete) or result.cache is not None:
            messages.append(_result_message(result))
            continue
        output = orjson.dumps(result.output)
        if len(output) > MOST_PACKED_BYTES:
            messages.append(_plain_message(result, output))
        else:
            small.append((result, output))
    packs = (small[at : at + MOST_PACKED] for at in range(0, len(small), MOST_PACKED))
    return [*messages, *map(_packed_message, packs)]


def _result_message(result: Result) -> Command:
    if not isinstance(result, Complete) or result.cache is not None:
        return ("XADD", RESULTS, "*", *result_fields(result))
    return _plain_message(result, orjson.dumps(result.output))


def _plain_message(result: Complete, output: bytes) -> Command:
    return _RESULT % tuple(_sized(*_names(result), output))


def _packed_message(pack: Sequence[tuple[Complete, bytes]]) -> Command:
    """The first as if it were alone, the others behind it, as `read_results` takes them."""
    (first, output), *others = pack
    if not others:
        return _plain_message(first, output)
    more: list[list[str | orjson.Fragment]] = []
    like: Complete | None = None
    for one, text in others:
        if like is None or one.run_id != like.run_id or one.token != like.token:
            like = one
            more.append([one.run_id, str(one.token)])
        more[-1] += (one.node, orjson.Fragment(text))
    return _PACKED % tuple(_sized(*_names(first), output, orjson.dumps(more)))


def _names(result: Complete) -> tuple[bytes, bytes, bytes]:
    return result.run_id.encode(), result.node.encode(), str(result.token).encode()


def _sized(*words: bytes) -> Iterator[int | bytes]:
    for word in words:
        yield len(word)
        yield word
