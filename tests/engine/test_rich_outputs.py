"""Outputs richer than JSON are stored the way pydantic's JSON mode writes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_serializer
from pydantic_core import to_jsonable_python

from dovetail.core.conversion import encode_rich
from dovetail.core.values import MAX_BYTES, NotJson

from .harness import engine

BERLIN = timezone(timedelta(hours=1))
NUMBER = UUID(int=7)


class Colour(Enum):
    RED = "red"
    PAIR = (1, NUMBER)


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    A = "a"


@dataclass
class Point:
    x: int
    when: date
    tags: set[str] = field(default_factory=set)


@dataclass
class Nested:
    points: list[Point]
    colour: Colour = Colour.RED
    other: Any = None


@pydantic.dataclasses.dataclass
class Priced:
    price: Decimal


class Item(BaseModel):
    model_config = ConfigDict(extra="allow")

    at: datetime
    size: Decimal = Decimal("1.50")
    took: timedelta = timedelta(seconds=90)
    secret: str = Field(default="hidden", exclude=True)
    name: str = Field(default="n", serialization_alias="Name")

    @field_serializer("size", when_used="json")
    def _size(self, size: Decimal) -> str:
        return f"{size} kg"


class Looped(BaseModel):
    me: Any = None


class Items(RootModel[list[Item]]):
    pass


AT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
RICH: dict[str, tuple[Any, Any]] = {
    "a_datetime": (AT, "2026-01-02T03:04:05.000678Z"),
    "a_zone": (datetime(2026, 1, 2, tzinfo=BERLIN), "2026-01-02T00:00:00+01:00"),
    "no_zone": (AT.replace(tzinfo=None), "2026-01-02T03:04:05.000678"),
    "a_date": (date(2026, 1, 2), "2026-01-02"),
    "a_uuid": (NUMBER, str(NUMBER)),
    "a_decimal": (Decimal("1.10"), "1.10"),
    "an_enum": (Colour.RED, "red"),
    "an_enum_of_more": (Colour.PAIR, [1, str(NUMBER)]),
    "an_int_enum": (Level.HIGH, 3),
    "a_set": ({3, 1, 2}, [1, 2, 3]),
    "a_frozenset": (frozenset({"b", "a"}), ["a", "b"]),
    "a_set_of_uuids": ({UUID(int=2), UUID(int=1)}, [str(UUID(int=1)), str(UUID(int=2))]),
    "a_tuple": ((1, (NUMBER,)), [1, [str(NUMBER)]]),
    "a_dataclass": (
        Point(1, date(2026, 1, 2), {"b", "a"}),
        {"x": 1, "when": "2026-01-02", "tags": ["a", "b"]},
    ),
    "nested": (Nested([Point(1, date(2026, 1, 2))], other=Priced(Decimal("2.0"))), None),
    "a_pydantic_dataclass": (Priced(Decimal("2.0")), {"price": "2.0"}),
    "a_model": (
        Item(at=AT, more=NUMBER),
        {
            "at": "2026-01-02T03:04:05.000678Z",
            "size": "1.50 kg",
            "took": "PT1M30S",
            "name": "n",
            "more": str(NUMBER),
        },
    ),
    "infinity_in_a_model": (Looped(me=float("inf")), {"me": None}),
    "a_root_model": (Items([Item(at=AT)]), None),
    "in_dicts_and_lists": ({"a": [{"b": (AT,)}]}, {"a": [{"b": ["2026-01-02T03:04:05.000678Z"]}]}),
    "keys": (
        {Colour.RED: 1, NUMBER: 2, date(2026, 1, 2): 3, Decimal("1.5"): 4, Word.A: 5},
        {"red": 1, str(NUMBER): 2, "2026-01-02": 3, "1.5": 4, "a": 5},
    ),
}


async def give(output: Any) -> Any:
    async def gives(config: dict[str, Any], ctx: Any) -> Any:
        return output

    async with engine(gives) as it:
        return (await it.run({"a": {"handler": "gives"}})).nodes[0]


@pytest.mark.parametrize("name", RICH)
async def test_a_rich_output_is_stored_as_pydantic_writes_it(name: str) -> None:
    output, expected = RICH[name]
    node = await give(output)
    assert node.error is None
    if expected is not None:
        assert node.output == expected
    else:
        assert node.output == to_jsonable_python(output, by_alias=False)


def looped_dataclass() -> Nested:
    loop = Nested([])
    loop.other = loop
    return loop


def looped_model() -> Looped:
    loop = Looped()
    loop.me = loop
    return loop


class Foreign:
    pass


@dataclass
class Leaving:
    @property
    def x(self) -> int:  # read by nothing: it is no field
        raise SystemExit

    y: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "y":
            raise SystemExit("from within")
        return super().__getattribute__(name)


WRONG: dict[str, tuple[Any, str, str]] = {
    "bytes": (b"x", "invalid_output", "output is a bytes, which JSON cannot hold: return value."),
    "bytes_inside": (Point(1, b"x"), "invalid_output", "output.when is a bytes"),  # type: ignore[arg-type]
    "a_path": ([Path("x")], "invalid_output", "output[0] is a PosixPath"),
    "a_time": (time(1), "invalid_output", "return value.isoformat()"),
    "a_timedelta": (timedelta(1), "invalid_output", "return value.total_seconds()"),
    "a_number_as_key": ({1: AT}, "invalid_output", "key 1 is not text"),
    "an_object": ({"when": AT, "x": [Foreign()]}, "invalid_output", "output.x[0] is a Foreign"),
    "a_generator": ((n for n in ()), "invalid_output", "return list(value)"),
    "nan_beside": ([AT, float("nan")], "invalid_output", "[1]: nan is not a JSON number"),
    "an_endless_iterator": (Looped(me=[itertools.count()]), "invalid_output", "output.me[0] is a"),
    "a_foreign_type": (Looped(me=Foreign()), "invalid_output", "serialize unknown type"),
    "keys_that_meet": ({NUMBER: 1, str(NUMBER): 2}, "invalid_output", "two keys are both"),
    "itself_a_dataclass": (looped_dataclass(), "too_large", "nested deeper than 100"),
    "itself_a_model": (looped_model(), "invalid_output", ""),
    "too_many": ([AT, [0] * MAX_BYTES], "too_large", ""),
    "too_large": ([AT, "x" * MAX_BYTES], "too_large", "takes"),
    "leaving": ([AT, Leaving()], "invalid_output", "SystemExit"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_stored_stays_the_failure_of_its_node(name: str) -> None:
    output, kind, message = WRONG[name]
    node = await give(output)
    assert node.error["type"] == kind
    assert message in node.error["message"]


def leaves() -> st.SearchStrategy[Any]:
    # pydantic writes no dates before the year 1, and neither does JSON hold odd floats.
    return (
        st.dates()
        | st.datetimes()
        | st.uuids()
        | st.decimals(allow_nan=False, allow_infinity=False)
        | st.sampled_from([*Colour, *Level])
        | st.integers(-(2**63), 2**63)
        | st.text()
        | st.none()
    )


@given(
    st.recursive(
        leaves(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text() | st.uuids(), inner)
            | st.builds(Nested, st.just([]), other=inner)
            | st.builds(Looped, me=inner)
            | st.tuples(inner)
        ),
    )
)
def test_any_nesting_is_written_as_pydantic_writes_it(output: Any) -> None:
    try:
        text = encode_rich(output)
    except NotJson as problem:
        assert "surrogate" in str(problem)  # noqa: PT017
        return
    assert orjson.loads(text) == to_jsonable_python(output)


async def test_an_output_that_is_json_is_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any, **__: Any) -> bytes:
        raise AssertionError("the plain path pays for nothing more")

    monkeypatch.setattr("dovetail.handlers.calls.encode_rich", called)
    assert (await give({"a": [1, (2,)]})).output == {"a": [1, [2]]}
    assert (await give({"a": AT})).error is not None
