"""Large `ctx.inputs`: a dict whose values are read on first use."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from dovetail.core.errors import PermanentError, RetryableError
from dovetail.core.outputs import check_room
from dovetail.core.values import encode
from dovetail.handlers import calls as module
from dovetail.handlers.calls import InputBudget, Inputs

PLAIN = {"a": {"x": [1, "ü"]}, "b": None, "c": 1.5}


class Kept:
    """A source that tells what was read of it."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        self.outputs = outputs
        self.read: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self.outputs)

    def texts(self, names: Sequence[str], read: int, limit: int) -> Iterator[tuple[str, bytes]]:
        texts = {name: orjson.dumps(self.outputs[name]) for name in names}
        check_room(read, {name: len(text) for name, text in texts.items()}, limit)
        for name, text in texts.items():
            self.read.append(name)
            yield name, text


def made(limit: int = 1 << 20) -> tuple[Inputs, Kept]:
    source = Kept(PLAIN)
    return Inputs(source.names(), source, InputBudget(limit)), source


def keywords(**given: Any) -> dict[str, Any]:
    return given


def popped(value: dict[str, Any]) -> Any:
    return value.pop("a"), value.pop("z", 7), value.popitem(), list(value)


def changed(value: dict[str, Any]) -> Any:
    value["new"] = 1
    value["a"] = 2
    del value["b"]
    return value.setdefault("c", 5), value.setdefault("d", 5), dict(value)


USES: dict[str, Callable[[Any], Any]] = {
    "one": lambda value: value["a"],
    "get": lambda value: (value.get("a"), value.get("z"), value.get("z", 3)),
    "dict": dict,
    "stars": lambda value: {**value},
    "keywords": lambda value: keywords(**value),
    "items": lambda value: list(value.items()),
    "values": lambda value: list(value.values()),
    "reversed": lambda value: list(reversed(value.items())),
    "equal": lambda value: (value == PLAIN, value != PLAIN, value == PLAIN, value == {}),
    "merged": lambda value: (value | {"z": 1}, {"z": 1} | value),
    "updates": lambda value: {
        "z": 1,
    }.__class__(value),
    "repr": repr,
    "str": str,
    "format": "{a} {b} {c}".format_map,
    "json": lambda value: json.dumps(value),
    "json sorted": lambda value: json.dumps(value, sort_keys=True, indent=1),
    "returned": encode,
    "orjson of a dict": lambda value: orjson.dumps(dict(value)),
    "copy": copy.copy,
    "method copy": lambda value: value.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "popped": popped,
    "changed": changed,
    "match": lambda value: _matched(value),
}


def _matched(value: Any) -> Any:
    match value:
        case {"a": {"x": found}, **rest}:
            return found, rest


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_lazy_inputs_behave_like_a_plain_dict(use: Callable[[Any], Any]) -> None:
    lazy, _ = made()
    assert use(lazy) == use(copy.deepcopy(PLAIN))


def test_names_are_available_without_a_read_and_a_value_is_read_once() -> None:
    lazy, source = made()
    assert list(lazy) == ["a", "b", "c"]
    assert (len(lazy), "a" in lazy, "z" in lazy, bool(lazy)) == (3, True, False, True)
    assert lazy.keys() >= {"a"}
    assert source.read == []
    assert lazy["b"] is None
    lazy["c"], lazy["b"]
    assert source.read == ["b", "c"]
    assert dict(lazy) == PLAIN
    assert source.read == ["b", "c", "a"]
    with pytest.raises(KeyError, match="z"):
        lazy["z"]


def test_a_c_extension_that_bypasses_lazy_inputs_gets_an_error_instead_of_wrong_values() -> None:
    lazy, _ = made()
    with pytest.raises(TypeError):
        orjson.dumps(lazy)
    assert orjson.loads(orjson.dumps(dict(lazy))) == PLAIN


def test_a_handler_changes_only_its_own_copy() -> None:
    lazy, source = made()
    lazy["a"]["x"].append("mine")
    assert lazy["a"]["x"][-1] == "mine"
    assert source.outputs["a"] == {"x": [1, "ü"]}


def test_the_limit_covers_all_inputs_that_a_node_reads() -> None:
    limit = len(orjson.dumps(PLAIN["a"])) + 3
    lazy, source = made(limit)
    lazy["a"], lazy["c"]
    with pytest.raises(PermanentError, match=rf"at most {limit}.*DOVETAIL_MAX_INPUT_BYTES") as no:
        lazy["b"]
    assert no.value.type == "too_large"
    assert source.read == ["a", "c"]


def test_the_inputs_held_by_all_nodes_of_a_worker_are_bounded_and_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WORKER_SHARE", 1)
    budget = InputBudget(30)
    one, two = (Inputs(PLAIN, Kept(PLAIN), budget) for _ in range(2))
    assert dict(one) == PLAIN

    async def in_a_loop() -> None:
        two["a"]

    with pytest.raises(RetryableError, match=r"1 times DOVETAIL_MAX_INPUT_BYTES \(30\)"):
        asyncio.run(in_a_loop())
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(two["a"]))
    waiting.start()
    waiting.join(0.05)
    assert not found, "a handler in a thread waits for others"
    del one
    waiting.join(10)
    assert found == [PLAIN["a"]]
