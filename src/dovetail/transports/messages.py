"""What travels between processes, as flat fields: a task to a worker, its result back.

Values are plain text or JSON, never a pickle, so anybody can write and read them. What lacks a
field or has a wrong one is `Malformed` and becomes a dead letter. What it must not know: what
carries a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Any

import orjson

from dovetail.core.caching import Caching, is_facts
from dovetail.core.effects import new_tuple
from dovetail.core.events import Token
from dovetail.core.outputs import INLINE_BYTES as MOST_INPUTS
from dovetail.core.templates import Deferred
from dovetail.core.transitions import Complete, Fail
from dovetail.core.values import MAX_DEPTH, is_json
from dovetail.engine.ports import Result, Task

TASK_FIELDS = ("run_id", "node_id", "token", "handler", "config", "inputs")
RESULT_FIELDS = ("run_id", "node_id", "token", "success", "output", "error")
_PLAIN_TASK = [name.encode() for name in (*TASK_FIELDS, "place")]
_PLAIN_TASK_WITH_PARAMS = [*_PLAIN_TASK[:-1], b"params", b"place"]
USUAL_TIMEOUT = 300.0
"""Not told, like params that there are none of."""
_PLAIN_RESULT = [name.encode() for name in RESULT_FIELDS]
_PACKED_RESULT = [*_PLAIN_RESULT, b"more"]
SHOWN_BYTES = 2000
MOST_PLACES = 1 << 31
"""No run has so many nodes."""
FEW_INPUTS = 8
"""Parents whose outputs are written in one go. More are written one by one: they may be large."""


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
    return fields


def inputs_text(task: Task) -> bytes:
    """None if they are too large to travel: a handler that asks for one has it read."""
    if task.source is None:
        return b"null"
    inputs = task.inputs()
    if len(inputs) > FEW_INPUTS:
        room = MOST_INPUTS
        for output in inputs.values():
            room -= len(orjson.dumps(output))
            if room < 0:
                return b"null"
    text = orjson.dumps(inputs)
    return text if len(text) <= MOST_INPUTS else b"null"


def _cache_fields(caching: Caching) -> list[str | bytes]:
    fields: list[str | bytes] = ["cache", orjson.dumps([caching.key, caching.seconds])]
    if caching.facts is not None:
        fields += ["reads", orjson.dumps(caching.facts)]
    return fields


def params_text(task: Task) -> bytes:
    """None if they are too large to travel with every node: a handler that asks has them read."""
    if task.params is None:
        return b"null"
    text = orjson.dumps(task.params)
    return text if len(text) <= MOST_INPUTS else b"null"


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
    """Children of one node have one token among them."""
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
    """None for what was too large to travel."""
    return None if text == b"null" else _object(name, text)


def read_results(fields: Sequence[bytes]) -> list[Result]:
    """What a message tells: one result, and `more` of them that travel with it."""
    names = fields[::2]
    if names in (_PLAIN_RESULT, _PACKED_RESULT) and fields[7] == b"1":  # nearly every one
        named = (fields[1].decode(), fields[3].decode(), _token(fields[5]))
        found: list[Result] = [new_tuple(Complete, (*named, _output(fields[9]), None))]
        return [*found, *_more(fields[13])] if len(fields) > 12 else found
    given = _given(fields, RESULT_FIELDS)
    return [_result(given), *_more(given.get("more", b"[]"))]


def _more(text: bytes) -> Iterator[Result]:
    """Completed nodes as [run_id, token, node, output, node, output, …], …"""
    for run_id, token, *told in _output(text, behind=2):
        start = (_text(run_id), _token(_text(token).encode()))
        for node, output in zip(told[::2], told[1::2], strict=True):
            yield new_tuple(Complete, (start[0], _text(node), start[1], output, None))


def _output(text: bytes, behind: int = 0) -> Any:
    """What is nested deeper than a handler's output may be could be read, and not written again.
    They may be so deep `behind` brackets of ours."""
    value, deepest = orjson.loads(text), MAX_DEPTH + behind
    if text.count(b"[") + text.count(b"{") > deepest and not is_json(value, max_depth=deepest):
        raise Malformed(f"an output is nested deeper than {MAX_DEPTH}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):  # which is not shown: it may be anything
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


def _seconds(told: Any) -> float | None:
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or told < 0:
        raise Malformed("a pause that it asks for is no number of seconds")
    return float(told)


def _chance(told: Any) -> float:
    if told is None:
        return 0.0
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told <= 1:
        raise Malformed("its chance is no number from 0 to 1")
    return float(told)


def _cache(given: dict[str, bytes]) -> Caching | None:
    """Under which key its output is kept, for how many seconds, and what its handler has read. A
    worker of an earlier version does not say what: its output is not kept."""
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


def _error(told: Any) -> dict[str, Any]:
    """As everybody may read it: with a type and a message, both texts."""
    error = told if isinstance(told, dict) else {"message": told}
    kind, message = error.get("type"), error.get("message")
    if not isinstance(message, str):
        message = "it did not say how" if message is None else shown(orjson.dumps(message))
    return error | {"type": kind if isinstance(kind, str) else "error", "message": message}


def read_tasks(fields: Sequence[bytes]) -> list[Task]:
    """What a message asks for: one task, and `more` of the same handler that travel with it."""
    if b"more" not in fields[::2]:
        return [read_task(fields)]
    at = 2 * fields[::2].index(b"more")
    counted = 2 if fields[at + 2 : at + 3] == [b"tasks"] else 0
    first = read_task([*fields[:at], *fields[at + 2 + counted :]])
    return [first, *_more_tasks(fields[at + 1], first.handler)]


def _more_tasks(text: bytes, handler: str) -> Iterator[Task]:
    """As [run_id, token, inputs, params, node, config, place, node, config, place, …], …"""
    for run_id, token, inputs, params, *told in orjson.loads(text):
        start = (_text(run_id), _token(_text(token).encode()))
        with_inputs, with_params = _text(inputs).encode(), _text(params).encode()
        for node, config, place in zip(told[::3], told[1::3], told[2::3], strict=True):
            if not isinstance(config, dict) or not isinstance(place, int):
                raise Malformed("a config is no object, or a place no number")
            if not 0 <= place < MOST_PLACES:
                raise Malformed(f"a place is {place}")
            plain = (
                start[0],
                _text(node),
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
            )
            yield new_tuple(Task, plain)


def read_task(fields: Sequence[bytes]) -> Task:
    names = fields[::2]
    if names in (_PLAIN_TASK, _PLAIN_TASK_WITH_PARAMS):
        run_id, node_id, token, handler, config, inputs, *params, place = fields[1::2]
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
            _place(place),
            None,
        )
        return new_tuple(Task, plain)
    given = _given(fields, TASK_FIELDS)
    timeout = float(given.get("timeout_seconds", USUAL_TIMEOUT))
    if not 0 < timeout < inf:
        raise Malformed(f"its timeout_seconds is {timeout}")
    tag = given.get("resource_tag")
    return Task(
        given["run_id"].decode(),
        given["node_id"].decode(),
        _token(given["token"]),
        given["handler"].decode(),
        _object("config", given["config"]),
        _object_or_none("params", given.get("params", b"{}")),
        _object_or_none("inputs", given["inputs"]),
        timeout,
        None if tag is None else tag.decode(),
        _deferred(given.get("deferred", b"[]")),
        _cache(given),
        _place(given["place"]) if "place" in given else None,
        given["traceparent"].decode() if "traceparent" in given else None,
    )


def _place(text: bytes) -> int:
    place = int(text)
    if not 0 <= place < MOST_PLACES:
        raise Malformed(f"its place is {place}")
    return place


def _deferred(text: bytes) -> tuple[Deferred, ...]:
    found = []
    for path, source, scope in orjson.loads(text):
        if not isinstance(path, list) or not isinstance(scope, dict):
            raise Malformed("what it leaves to be rendered has no path, or no scope")
        found.append(Deferred(tuple(path), _text(source), scope))
    return tuple(found)
