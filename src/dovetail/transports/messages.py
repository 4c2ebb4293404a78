"""Tasks and results as messages: flat fields of text or JSON, and the stream entries of them.

A message that lacks a field, or has a wrong one, is `Malformed` and becomes a dead letter. Nearly
all of a message is the same every time, so the common shape is filled in, not built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Any

import orjson

from dovetail.core.caching import Caching, is_facts
from dovetail.core.effects import new_tuple
from dovetail.core.events import TRACEBACK, Token
from dovetail.core.items import PLACES, split_name, split_place
from dovetail.core.outputs import INLINE_BYTES as MAX_INPUTS
from dovetail.core.redaction import Redactor
from dovetail.core.templates import Deferred
from dovetail.core.text import cut_middle
from dovetail.core.transitions import Complete, Fail
from dovetail.core.values import MAX_DEPTH, is_json
from dovetail.engine.ports import Result, Task
from dovetail.redis_client.pipelined import Command, PipelinedRedis

TASK_FIELDS = ("run_id", "node_id", "token", "handler", "config", "inputs")
RESULT_FIELDS = ("run_id", "node_id", "token", "success", "output", "error")
_PLAIN_TASK = [name.encode() for name in (*TASK_FIELDS, "place")]
_PLAIN_TASK_WITH_PARAMS = [*_PLAIN_TASK[:-1], b"params", b"place"]
USUAL_TIMEOUT = 300.0
"""The default of nodes. A message leaves it out, and empty params too."""
_PLAIN_RESULT = [name.encode() for name in RESULT_FIELDS]
_PACKED_RESULT = [*_PLAIN_RESULT, b"more"]
SHOWN_BYTES = 2000
"""Of a field, in a dead letter or an error: enough to recognise it."""
MAX_PLACES = 1 << 44
"""No run has a place so large (`core.items.item_place`)."""
FEW_INPUTS = 8
"""Parents whose outputs are encoded together. The outputs of more parents are encoded one by one,
and no further than they may travel: together they may be large."""


MISREAD = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading a malformed message may raise."""


ITEM_MISMATCH = (
    "its node_id, its place and its item do not match: a message for an item has a name such as "
    "'node[3]', the place of that item, and the item; any other message has none of them"
)


class Malformed(ValueError):
    pass


def shown(field: bytes) -> str:
    return field[:SHOWN_BYTES].decode(errors="replace")


# ── written ──────────────────────────────────────────────────────────────────────────────


def task_fields(task: Task) -> list[str | bytes]:
    dumps = orjson.dumps
    fields: list[str | bytes] = [
        *("run_id", task.run_id, "node_id", task.node_id, "token", str(task.token)),
        *("handler", task.handler, "config", dumps(task.config), "inputs", inputs_text(task)),
    ]
    if task.place is not None:
        fields += ["place", str(task.place)]
    if task.params != {}:
        fields += ["params", params_text(task)]
    if task.timeout_seconds != USUAL_TIMEOUT:
        fields += ["timeout_seconds", repr(task.timeout_seconds)]
    if task.resource_tag is not None:
        fields += ["resource_tag", task.resource_tag]
    if task.deferred:
        kept = [[list(one.path), one.source, one.scope] for one in task.deferred]
        fields += ["deferred", dumps(kept)]
    if task.cache is not None:
        fields += _cache_fields(task.cache)
    if task.trace is not None:
        fields += ["traceparent", task.trace]
    if task.item_index is not None:
        fields += ["item", dumps(task.item)]
    return fields


def inputs_text(task: Task) -> bytes:
    """The inputs as JSON; `null` if they are too large to travel. A handler that asks for one then
    has it read."""
    if task.source is None:
        return b"null"
    inputs = task.inputs()
    if len(inputs) > FEW_INPUTS:
        room = MAX_INPUTS
        for output in inputs.values():
            room -= len(orjson.dumps(output))
            if room < 0:
                return b"null"
    text = orjson.dumps(inputs)
    return text if len(text) <= MAX_INPUTS else b"null"


def _cache_fields(caching: Caching) -> list[str | bytes]:
    fields: list[str | bytes] = ["cache", orjson.dumps([caching.key, caching.seconds])]
    if caching.facts is not None:
        fields += ["reads", orjson.dumps(caching.facts)]
    return fields


def params_text(task: Task) -> bytes:
    """The params as JSON; `null` if they are too large to travel with each task. A handler that
    asks for them then has them read."""
    if task.params is None:
        return b"null"
    text = orjson.dumps(task.params)
    return text if len(text) <= MAX_INPUTS else b"null"


def result_fields(result: Result) -> list[str | bytes]:
    dumps = orjson.dumps
    fields: list[str | bytes] = ["run_id", result.run_id, "node_id", result.node]
    fields += ["token", str(result.token)]
    if isinstance(result, Complete):
        fields += ["success", "1", "output", dumps(result.output), "error", "null"]
        if result.cache is not None:
            fields += _cache_fields(result.cache)
        return fields
    hints = {
        "permanent": result.permanent,
        "after": result.after,
        "at_least": result.at_least,
        "chance": result.chance,
    }
    fields += ["success", "0", "output", "null", "error", dumps(result.error)]
    return [*fields, "hints", dumps(hints)]


# ── and read ─────────────────────────────────────────────────────────────────────────────


def _given(fields: Sequence[bytes], names: Sequence[str]) -> dict[str, bytes]:
    given = dict(zip((field.decode() for field in fields[::2]), fields[1::2], strict=True))
    missing = [name for name in names if name not in given]
    if missing:
        raise Malformed(f"it has no {', '.join(missing)}")
    return given


@lru_cache(256)
def _token(text: bytes) -> Token:
    """Cached, because nodes and items that became ready together share a token."""
    try:
        return Token.parse(text.decode())
    except ValueError:
        raise Malformed(f"its token is {shown(text)!r}") from None


def _object(name: str, text: bytes) -> dict[str, Any]:
    if text == b"{}":
        return {}
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise Malformed(f"its {name} is no object")
    return value


def _object_or_none(name: str, text: bytes) -> dict[str, Any] | None:
    """The object in a field; None for `null`: it was too large to travel."""
    return None if text == b"null" else _object(name, text)


def read_results(fields: Sequence[bytes]) -> list[Result]:
    """The results of a message: one, and `more` of them that travel with it."""
    names = fields[::2]
    if names in (_PLAIN_RESULT, _PACKED_RESULT) and fields[7] == b"1":  # nearly every one
        named = (fields[1].decode(), fields[3].decode(), _token(fields[5]))
        found: list[Result] = [new_tuple(Complete, (*named, _output(fields[9]), None))]
        return [*found, *_more(fields[13])] if len(fields) > 12 else found
    given = _given(fields, RESULT_FIELDS)
    return [_result(given), *_more(given.get("more", b"[]"))]


def _more(text: bytes) -> Iterator[Result]:
    """The completed nodes and items of a field `more`: [run_id, token, node, output, node, output,
    …], …"""
    for run_id, token, *nodes in _output(text, behind=2):
        start = (_text(run_id), _token(_text(token).encode()))
        for node, output in zip(nodes[::2], nodes[1::2], strict=True):
            yield new_tuple(Complete, (start[0], _text(node), start[1], output, None))


def _output(text: bytes, behind: int = 0) -> Any:
    """The value of a field. Refuses a value that is nested deeper than an output may be: it could
    be read, but not written again. `behind` is how deep the outputs are inside the field."""
    value, deepest = orjson.loads(text), MAX_DEPTH + behind
    if text.count(b"[") + text.count(b"{") > deepest and not is_json(value, max_depth=deepest):
        raise Malformed(f"an output is nested deeper than {MAX_DEPTH}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):  # the value is not shown: it may be of any size
        raise Malformed(f"it has {type(value).__name__} where a text belongs")
    return value


def _result(given: dict[str, bytes]) -> Result:
    run_id, node = given["run_id"].decode(), given["node_id"].decode()
    token = _token(given["token"])
    if given["success"] in (b"1", b"true", b"True"):
        return Complete(run_id, node, token, _output(given["output"]), _cache(given))
    if given["success"] not in (b"0", b"false", b"False"):
        raise Malformed(f"its success is {shown(given['success'])!r}")
    error = _error(_output(given["error"]))
    hints = orjson.loads(given["hints"]) if "hints" in given else {}
    return Fail(
        run_id,
        node,
        token,
        error,
        permanent=bool(hints.get("permanent")),
        after=_seconds(hints.get("after")),
        at_least=_seconds(hints.get("at_least")),
        chance=_chance(hints.get("chance")),
    )


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise Malformed("a pause that it asks for is no number of seconds")
    return float(value)


def _chance(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Malformed("its chance is no number from 0 to 1")
    return float(value)


def _cache(given: dict[str, bytes]) -> Caching | None:
    """The key under which the output is cached, for how many seconds, and the facts that its
    handler has read. A worker of an earlier version sends no facts: its output is not cached."""
    if "cache" not in given:
        return None
    key, seconds = orjson.loads(given["cache"])
    kept_for = _seconds(seconds)
    if kept_for is None:
        raise Malformed("its output is kept for no time")
    facts = orjson.loads(given["reads"]) if "reads" in given else None
    if facts is not None and not is_facts(facts):
        raise Malformed("what its handler has read is no object of texts")
    return Caching(_text(key), kept_for, facts)


def _error(value: Any) -> dict[str, Any]:
    """An error with a type and a message, both texts, and a traceback only if it is a text."""
    error = value if isinstance(value, dict) else {"message": value}
    if TRACEBACK in error:
        trace = error.pop(TRACEBACK)
        if isinstance(trace, str):
            error[TRACEBACK] = cut_middle(trace)
    kind, message = error.get("type"), error.get("message")
    if not isinstance(message, str):
        message = "it did not say how" if message is None else shown(orjson.dumps(message))
    return error | {"type": kind if isinstance(kind, str) else "error", "message": message}


def read_tasks(fields: Sequence[bytes]) -> list[Task]:
    """The tasks of a message: one, and `more` of the same handler that travel with it."""
    if b"more" not in fields[::2]:
        return [read_task(fields)]
    at = 2 * fields[::2].index(b"more")
    has_count = fields[at + 2 : at + 3] == [b"tasks"]  # which is not of the first task
    first = read_task([*fields[:at], *fields[at + (4 if has_count else 2) :]])
    return [first, *_more_tasks(fields[at + 1], first.handler)]


def _more_tasks(text: bytes, handler: str) -> Iterator[Task]:
    """The tasks of a field `more`: [run_id, token, inputs, params, node, config, place, node,
    config, place, …], … A task of an item has [place, item] instead of the place."""
    for run_id, token, inputs, params, *nodes in orjson.loads(text):
        start = (_text(run_id), _token(_text(token).encode()))
        with_inputs, with_params = _text(inputs).encode(), _text(params).encode()
        owner = None  # the node of the item before
        for node, config, where in zip(nodes[::3], nodes[1::3], nodes[2::3], strict=True):
            place, item, number = where, None, None
            if isinstance(where, list):
                place, item = where
                number = place % PLACES
                if place < PLACES:
                    raise Malformed(ITEM_MISMATCH)
                # Nearly all items are of the same node: then its name is not parsed again.
                if owner is None or node != f"{owner}[{number}]":
                    owner, named = split_name(_text(node))
                    if named != number:
                        raise Malformed(ITEM_MISMATCH)
            elif split_name(_text(node))[1] is not None:
                raise Malformed(ITEM_MISMATCH)
            if not isinstance(config, dict) or not isinstance(place, int):
                raise Malformed("a config is no object, or a place no number")
            if not 0 <= place < MAX_PLACES:
                raise Malformed(f"a place is {place}")
            if number is None and place >= PLACES:
                raise Malformed(ITEM_MISMATCH)
            plain = (
                start[0],
                node,
                start[1],
                handler,
                config,
                _object_or_none("params", with_params),
                _object_or_none("inputs", with_inputs),
                USUAL_TIMEOUT,
                None,
                (),
                None,
                place,
                None,
                item,
                number,
            )
            yield new_tuple(Task, plain)


def read_task(fields: Sequence[bytes]) -> Task:
    names = fields[::2]
    if names in (_PLAIN_TASK, _PLAIN_TASK_WITH_PARAMS):
        run_id, node_id, token, handler, config, inputs, *params, place = fields[1::2]
        index = _place(place)
        if index >= PLACES or node_id.endswith(b"]"):
            _item(node_id.decode(), index, None)
        plain = (
            run_id.decode(),
            node_id.decode(),
            _token(token),
            handler.decode(),
            _object("config", config),
            _object_or_none("params", params[0]) if params else {},
            _object_or_none("inputs", inputs),
            USUAL_TIMEOUT,
            None,
            (),
            None,
            index,
            None,
            None,
            None,
        )
        return new_tuple(Task, plain)
    given = _given(fields, TASK_FIELDS)
    timeout = float(given.get("timeout_seconds", USUAL_TIMEOUT))
    if not 0 < timeout < inf:
        raise Malformed(f"its timeout_seconds is {timeout}")
    tag, name = given.get("resource_tag"), given["node_id"].decode()
    where = _place(given["place"]) if "place" in given else None
    return Task(
        given["run_id"].decode(),
        name,
        _token(given["token"]),
        given["handler"].decode(),
        _object("config", given["config"]),
        _object_or_none("params", given.get("params", b"{}")),
        _object_or_none("inputs", given["inputs"]),
        timeout,
        None if tag is None else tag.decode(),
        _deferred(given.get("deferred", b"[]")),
        _cache(given),
        where,
        given["traceparent"].decode() if "traceparent" in given else None,
        *_item(name, where, given.get("item")),
    )


def _item(name: str, place: int | None, text: bytes | None) -> tuple[Any, int | None]:
    """The item of a task, and its number, which is in the task's name; None twice for a node.

    The claim goes by the place and the result by the name, so both must be of the same item.
    """
    _, number = split_name(name)
    if (number is None) is not (text is None):
        raise Malformed(ITEM_MISMATCH)
    if place is not None and split_place(place)[1] != number:
        raise Malformed(ITEM_MISMATCH)
    return (None, None) if text is None else (orjson.loads(text), number)


def _place(text: bytes) -> int:
    place = int(text)
    if not 0 <= place < MAX_PLACES:
        raise Malformed(f"its place is {place}")
    return place


def _deferred(text: bytes) -> tuple[Deferred, ...]:
    found = []
    for path, source, scope in orjson.loads(text):
        if not isinstance(path, list) or not isinstance(scope, dict):
            raise Malformed("what it leaves to be rendered has no path, or no scope")
        found.append(Deferred(tuple(path), _text(source), scope))
    return tuple(found)


RESULTS = "wf:stream:results"
TASKS = "tasks:"
MIN_RESULTS_PACKED, MAX_RESULTS_PACKED = 8, 64
"""Results per message. Fewer than the minimum travel one by one: there is little to share. With
more than the maximum, workers would wait for what follows from the first."""
MAX_ITEM_RESULTS_PACKED = 128
"""Results of items per message: a whole window of the usual size (100). The next items begin when
these end. Two messages would make two rounds of half a window from then on, at twice the price."""
MAX_TASKS_PACKED, MIN_MESSAGES = 32, 4
"""Tasks in one message at the most, and messages at the least: so many workers find something."""
MAX_PACKED_BYTES = 4096
"""Of one output or task that travels with others. A larger one costs more than a message of its
own."""


def stream_of(handler: str) -> str:
    return f"{TASKS}{handler}"


def _words(*words: str | bytes | None) -> bytes:
    """The words of a command as Redis reads them, with a placeholder for each None."""
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


# A message in three pieces that siblings have in common. The node, the config and the place of the
# task come behind them, one behind each.
_BEFORE = b"*%d\r\n" + _words("XADD", None, "*", "run_id", None, "node_id")
_BETWEEN = _words("token", None, "handler", None, "config")
_BEHIND = _words("inputs", None, "place")
_BEHIND_WITH_PARAMS = _words("inputs", None, "params", None, "place")
_TASK = b"%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n"


def task_messages(tasks: Iterable[Task]) -> list[Command]:
    """The commands that send these tasks, each in a message of its own."""
    messages: list[Command] = []
    like: Task | None = None
    before = between = behind = b""
    for task in tasks:
        if not _is_usual(task) or task.item_index is not None:
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
    """Whether a task has only the fields that nearly every task has."""
    named = task.resource_tag is not None or task.trace is not None
    unusual = named or task.deferred or task.cache or task.timeout_seconds != USUAL_TIMEOUT
    return not unusual and task.place is not None


def _are_siblings(task: Task, other: Task) -> bool:
    """Whether two tasks share run, token, inputs and params. Nodes and items that became ready
    together share a token; nodes with the same parents share inputs."""
    are_items = task.item_index is not None and other.item_index is not None
    return (
        task.source is other.source
        and (task.source is not None or are_items)
        and task.token is other.token
        and task.run_id == other.run_id
    )


def packed_task_messages(tasks: Sequence[Task]) -> list[Command]:
    """The commands that send these tasks, several in a message. All are of one quick handler."""
    size = min(MAX_TASKS_PACKED, len(tasks) // MIN_MESSAGES)
    if size < 2:
        return task_messages(tasks)
    alone: list[Task] = []
    small: list[_Packable] = []
    like: Task | None = None
    shared: tuple[str, ...] = ()
    room = 0
    for task in tasks:
        if not _is_usual(task):
            alone.append(task)
            continue
        if like is None or not _are_siblings(task, like):
            like, shared = task, _shared(task)
            room = MAX_PACKED_BYTES - sum(map(len, shared))
        config = orjson.dumps(task.config)
        item = 0 if task.item_index is None else len(orjson.dumps(task.item))
        if len(config) + item > room:
            alone.append(task)
        else:
            small.append((task, shared, config))
    packs = (small[at : at + size] for at in range(0, len(small), size))
    return [*task_messages(alone), *map(_task_pack, packs)]


_Packable = tuple[Task, tuple[str, ...], bytes]
"""A task, what it shares with its siblings, and its config."""


def _shared(task: Task) -> tuple[str, ...]:
    """What siblings have in common. Inputs and params are text, so that no two handlers get the
    same objects."""
    params = b"{}" if task.params == {} else params_text(task)
    return task.run_id, str(task.token), inputs_text(task).decode(), params.decode()


def _task_pack(pack: Sequence[_Packable]) -> Command:
    """A message with these tasks: the first as if it were alone, the others in `more`, as
    `read_tasks` takes them, and their number in `tasks`, for the count of waiting tasks."""
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
        where = task.place if task.item_index is None else [task.place, task.item]
        more[-1] += (task.node_id, orjson.Fragment(config), where)
    if not isinstance(alone, bytes):  # an item
        return (*alone, "more", orjson.dumps(more), "tasks", str(len(pack)))
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
    """The commands that send these results, many in few messages."""
    if len(results) < MIN_RESULTS_PACKED:
        return [_result_message(result) for result in results]
    messages: list[Command] = []
    small: list[tuple[Complete, bytes]] = []
    for result in results:
        if not isinstance(result, Complete) or result.cache is not None:
            messages.append(_result_message(result))
            continue
        output = orjson.dumps(result.output)
        if len(output) > MAX_PACKED_BYTES:
            messages.append(_plain_message(result, output))
        else:
            small.append((result, output))
    are_items = small and small[0][0].node.endswith("]")
    size = MAX_ITEM_RESULTS_PACKED if are_items else MAX_RESULTS_PACKED
    packs = (small[at : at + size] for at in range(0, len(small), size))
    return [*messages, *map(_packed_message, packs)]


def _result_message(result: Result) -> Command:
    if not isinstance(result, Complete) or result.cache is not None:
        return ("XADD", RESULTS, "*", *result_fields(result))
    return _plain_message(result, orjson.dumps(result.output))


def _plain_message(result: Complete, output: bytes) -> Command:
    return _RESULT % tuple(_sized(*_names(result), output))


def _packed_message(pack: Sequence[tuple[Complete, bytes]]) -> Command:
    """A message with these results: the first as if it were alone, the others in `more`, as
    `read_results` takes them."""
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


# ── dead letters ──────────────────────────────────────────────────────────────────────────────


DEAD = "wf:dead"
MAX_DEAD = 10_000
"""Dead letters that are kept, the newest, for `GET /dead-letters`."""


def dead_letter_commands(
    stream: str,
    number: str,
    reason: str,
    fields: Mapping[str, str],
    redact: Callable[[str], str],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[Command]:
    """The commands that keep a message as a dead letter, redacted. `more` is kept as it is."""

    def text(field: str) -> str:
        return shown(redact(field).encode())

    letter = {
        "stream": stream,
        "id": number,
        "reason": redact(reason),
        "fields": {text(name): text(value) for name, value in fields.items()},
        "time": time.time(),
        **more,
    }
    return [("LPUSH", DEAD, orjson.dumps(letter)), ("LTRIM", DEAD, 0, MAX_DEAD - 1)]


class DeadLetterQueue:
    """The dead letters of nodes that lost their worker too often, and of notifications that no
    receiver accepts."""

    def __init__(self, pipe: PipelinedRedis, redactor: Redactor) -> None:
        self._pipe = pipe
        self._redact = redactor.redact_shown

    async def add(self, letter: Mapping[str, Any]) -> None:
        """Keep something else that is given up: its `stream`, `id`, `reason`, `fields` and more."""
        named = ("stream", "id", "reason", "fields")
        stream, number, reason, fields = (letter[name] for name in named)
        more = {name: letter[name] for name in letter if name not in named}
        await self._pipe.call_many(
            dead_letter_commands(stream, number, reason, fields, self._redact, more)
        )

    async def bury(self, start: tuple[str, str, Token], handler: str, reason: str) -> None:
        run_id, node_id, token = start
        fields = {"run_id": run_id, "node_id": node_id, "token": str(token), "handler": handler}
        # Its messages are acknowledged and have no number any more; its key says what it was.
        number = f"{run_id}:{node_id}:{token.epoch}"
        await self._pipe.call_many(
            dead_letter_commands(stream_of(handler), number, reason, fields, self._redact)
        )
