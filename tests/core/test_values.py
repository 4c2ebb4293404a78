"""What counts as a JSON value, and how a value that does not is described."""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dovetail.core.values import MAX_INT, MIN_INT, NotJson, encode, faults, is_json

from .pace import at_most

# Measuring coverage makes everything some times slower.

ANY_JSON = "text, a number, true, false, None, a list or a dict"


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    left: int
    right: str


class Metres(float):
    pass


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(MIN_INT, MAX_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=3)
    | st.just(object()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(json_values)
def test_a_json_value_is_encoded_without_loss(value: Any) -> None:
    assert is_json(value)
    assert list(faults(value)) == []
    assert json.loads(encode(value)) == value


@given(anything)
def test_a_value_that_is_not_json_has_a_fault_and_is_not_encoded(value: Any) -> None:
    found = list(faults(value))
    assert is_json(value) is (not found)
    if found:
        with pytest.raises(NotJson):
            encode(value)
    else:
        json.loads(encode(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Colour.RED, b'"red"'),
        (Level.HIGH, b"3"),
        (Metres(1.5), b"1.5"),
        ((1, 2), b"[1,2]"),
        (Pair(1, "a"), b'[1,"a"]'),
        (OrderedDict(a=1), b'{"a":1}'),
        ({Colour.RED: [Colour.RED]}, b'{"red":["red"]}'),
    ],
)
def test_subclasses_and_tuples_are_encoded_as_their_json_type(value: Any, text: bytes) -> None:
    assert encode(value) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [math.nan]}, "a[0]: nan is not a JSON number; numbers are finite"),
        ({"a b": -math.inf}, '["a b"]: -inf is not a JSON number; numbers are finite'),
        (MAX_INT + 1, "18446744073709551616 does not fit into 64 bits; write it as text"),
        (MIN_INT - 1, "-9223372036854775809 does not fit into 64 bits; write it as text"),
        ([10**5000], "[0]: a very large integer does not fit into 64 bits; write it as text"),
        (["a\ud800"], "[0]: contains a lone surrogate, which is no valid text"),
        ({"a\ud800": 1}, "a key contains a lone surrogate, which is no valid text"),
        ({1: 2}, "key 1 is not text; JSON keys are"),
        ({True: 2}, "key true is not text; JSON keys are"),
        ({"x": {1, 2}}, "x: a Python set is not a JSON value: give sorted(value)"),
        (object(), f"a Python object is not a JSON value: give {ANY_JSON}"),
    ],
)
def test_a_fault_names_the_problem_and_its_path(value: Any, message: str) -> None:
    with pytest.raises(NotJson) as error:
        encode(value)
    assert str(error.value) == message
    assert error.value.code == "invalid_value"


ISO = "value.isoformat()"
DECODED = "value.decode() of a text, else base64.b64encode(value).decode()"
MODEL = 'value.model_dump(mode="json")'


class Hue(Enum):
    RED = 1


class Model(BaseModel):
    x: int = 1


@dataclass
class Point:
    x: int = 1


class Table:
    def tolist(self) -> list[int]:
        raise AssertionError("it is never called")


@pytest.mark.parametrize(
    ("value", "name", "advice"),
    [
        (datetime(2026, 1, 2, tzinfo=UTC), "a datetime", ISO),
        (date(2026, 1, 2), "a date", ISO),
        (timedelta(1), "a timedelta", "value.total_seconds()"),
        (Decimal("1.5"), "a Decimal", "str(value)"),
        (UUID(int=1), "a UUID", "str(value)"),
        (Path("x"), "a PosixPath", "str(value)"),
        ({1}, "a set", "sorted(value)"),
        (frozenset({1}), "a frozenset", "sorted(value)"),
        (b"x", "a bytes", DECODED),
        (Point(), "a Point", "dataclasses.asdict(value)"),
        (Model(), "a Model", MODEL),
        (Table(), "a Table", "value.tolist()"),
        (Hue.RED, "a Hue", "value.value"),
        ((n for n in ()), "a generator", "list(value)"),
        ({}.items(), "a dict_items", "dict(value)"),
        (ValueError("x"), "a ValueError", "str(value), or raise it"),
        (Level, "an EnumType", ANY_JSON),
        (len, "a builtin_function_or_method", ANY_JSON),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_with_what_to_return_instead(
    value: Any, name: str, advice: str
) -> None:
    for output, where in (
        (value, "output"),
        ({"when": value}, "output.when"),
        ([1, {"a b": (value,)}], 'output[1]["a b"][0]'),
    ):
        with pytest.raises(NotJson) as error:
            encode(output)
        reported = f"{where} is {name}, which JSON cannot hold: return {advice}"
        assert error.value.of_output() == reported


@given(st.recursive(st.dates() | st.binary() | st.uuids(), lambda s: st.lists(s, min_size=1)))
def test_the_value_that_the_advice_suggests_can_be_stored(value: Any) -> None:
    with pytest.raises(NotJson) as error:
        encode(value)
    for step in error.value.path:
        value = value[step]
    advice = error.value.of_output().rpartition(" return ")[2].rpartition(" else ")[2]
    encode(eval(advice, {"value": value, "base64": base64}))


def test_the_advice_does_not_access_attributes_of_the_value() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise SystemExit

    with pytest.raises(NotJson) as error:
        encode([Hostile()])
    reported = f"output[0] is a Hostile, which JSON cannot hold: return {ANY_JSON}"
    assert error.value.of_output() == reported


def test_other_faults_of_an_output_name_their_path() -> None:
    for value, reported in (({"x": math.nan}, "x: nan is not a"), ({1: 2}, "key 1 is not text")):
        with pytest.raises(NotJson) as error:
            encode(value)
        assert error.value.of_output().startswith(f"the output cannot be stored: {reported}")


def test_every_fault_is_found_in_order() -> None:
    value = {"a": math.nan, "b": {"c": [1, b""], "d": {2: 3}}, "e": 10**30}
    assert [found.path for found in faults(value)] == [("a",), ("b", "c", 1), ("b", "d"), ("e",)]


def test_values_are_counted_on_all_levels() -> None:
    assert is_json([[1, 1], [1, 1]], max_values=6)
    assert not is_json([[1, 1], [1, 1]], max_values=5)


def test_depth_counts_containers() -> None:
    assert is_json(nested(3), max_depth=3)
    assert not is_json(nested(4), max_depth=3)
    assert not is_json({"a": {"b": {}}}, max_depth=2)
    (found,) = faults(nested(4), max_depth=3)
    assert (found.code, found.path) == ("too_large", (0, 0, 0))


def test_a_value_that_contains_itself_is_refused_immediately() -> None:
    loop: list[Any] = []
    loop.extend([loop] * 10)
    with at_most(2):
        with pytest.raises(NotJson) as error:
            encode(loop)
        assert error.value.code == "too_large"


def test_very_deep_nesting_does_not_exhaust_the_stack() -> None:
    with pytest.raises(NotJson) as error:
        encode(nested(100_000))
    assert error.value.code == "too_large"


def test_size_is_bounded_in_bytes_of_json() -> None:
    assert len(encode("é" * 10, max_bytes=22)) == 22
    with pytest.raises(NotJson, match="takes 22 bytes as JSON; at most 21 are allowed") as error:
        encode("é" * 10, max_bytes=21)
    assert error.value.code == "too_large"


def test_a_list_with_more_values_than_the_allowed_bytes_is_not_encoded() -> None:
    with pytest.raises(NotJson, match="has more values than can be stored") as error:
        encode([1] * 10, max_bytes=5)
    assert error.value.code == "too_large"
    assert [found.code for found in faults([1] * 10, max_values=5)] == ["too_large"]
