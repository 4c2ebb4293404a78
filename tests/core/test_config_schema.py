"""Validation finds what a handler must refuse in a config, with its position; never more than that.

The schemas come from pydantic models through `handlers/config_schema.py`, as in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    PlainValidator,
    RootModel,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
)

from dovetail.config import load_settings
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import Checked, check
from dovetail.core.errors import Problem
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.config_schema import is_announced, schema_of
from dovetail.handlers.external import ExternalConfig
from dovetail.handlers.llm import LlmConfig
from dovetail.handlers.registry import Registry, describe


def registry_of(**models: type[BaseModel]) -> Registry:
    """The built-in handlers, and one for each model."""
    registry = builtin_registry(load_settings())
    for name, model in models.items():

        def fn(config: Any, ctx: Any) -> None: ...

        fn.__annotations__["config"] = model
        registry.add(describe(fn, name=name, origin=name))
    return registry


def problems(text: str, registry: Registry) -> list[Problem]:
    return list(check(read_text(text, format="yaml"), registry).errors)


def checked(model: type[BaseModel], config: Any) -> Checked:
    flow = {"name": "w", "nodes": [{"id": "a", "handler": "mine", "config": config}]}
    return check(flow, registry_of(mine=model))


def said(model: type[BaseModel], config: Any) -> list[str]:
    """What is wrong with it: the path below the config and the message."""
    found = checked(model, config).errors
    assert all(one.code == "invalid_config" for one in found), found
    return [f"{one.path.removeprefix('nodes[0].config')}: {one.message}" for one in found]


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Part(BaseModel):
    """A part of it."""

    model_config = ConfigDict(extra="forbid")

    weight: float = Field(ge=0)
    size: Size = Size.SMALL


class Mine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    topic: str = Field(min_length=2, description="what it is about")
    count: int = Field(default=1, ge=1, le=10)
    size: Size = Size.SMALL
    parts: list[Part] = []
    main: Part | None = None
    by_name: dict[str, Part] = {}
    when: datetime | None = None
    pair: tuple[int, str] | None = None


FLOW = """\
name: w
nodes:
  - id: a
    handler: {handler}
    config:
      {field}
"""

BEFORE = {"URL": "url: http://x", "PROMPT": "prompt: x", "TOPIC": "topic: ok"}
# handler, the field as written, its column, what is said
# fmt: off
FOUND = [
    ("call_external_service", "URLmethd: GET", (7, 7), "did you mean 'method'?"),
    ("call_external_service", "URLmethod: FETCH", (7, 15), "must be 'GET', 'HEAD'"),
    ("call_external_service", "URLheaders: 5", (7, 16), "must be a mapping, not 5"),
    ("call_external_service", "URLheaders: {A: []}", (7, 20), "not a list"),
    ("call_external_service", "URLtimeout_seconds: soon", (7, 24), "a number, not"),
    ("call_external_service", "URLtimeout_seconds: 0", (7, 24), "more than 0"),
    ("call_external_service", "URLexpect_status: [2]", (7, 23), "at least 100"),
    ("call_external_service", "URLexpect_status: 200", (7, 22), "list or null"),
    ("call_external_service", "URLbody: {a: 1}", (7, 13), "must be text or null"),
    ("call_external_service", "URLparams: {a: {b: 1}}", (7, 19), "not a mapping"),
    ("call_external_service", "method: GET", (6, 7), "'url' is required"),
    ("call_external_service", "url: 5", (6, 12), "must be text, not 5"),
    ("llm_service", "promt: hello", (6, 7), "did you mean 'prompt'?"),
    ("llm_generate", "promt: hello", (6, 7), "did you mean 'prompt'?"),
    ("llm_service", "PROMPTresponse_format: jsn", (7, 24), "must be 'text', 'json_object'"),
    ("llm_service", "PROMPTresponse_format: {type: txt}", (7, 31), "did you mean 'text'?"),
    ("llm_service", "PROMPTtemperature: warm", (7, 20), "must be a number or null"),
    ("llm_service", "PROMPTtemperature: 3", (7, 20), "must be at most 2, not 3"),
    ("llm_service", "PROMPTmax_tokens: 0.5", (7, 19), "must be a whole number or null"),
    ("llm_service", "messages: hello", (6, 17), "must be a list or null, not 'hello'"),
    ("llm_service", "messages: [{content: hi}]", (6, 18), "'role' is required"),
    ("llm_service", "messages: [{role: 5}]", (6, 25), "must be text, not 5"),
    ("sleep", "second: 5", (6, 7), "did you mean 'seconds'?"),
    ("sleep", "seconds: long", (6, 16), "must be a number, not 'long'"),
    ("sleep", "seconds: -1", (6, 16), "must be at least 0, not -1"),
    ("fail", "mesage: x", (6, 7), "did you mean 'message'?"),
    ("mine", "TOPICtpic: x", (7, 7), "did you mean 'topic'?"),
    ("mine", "TOPICsize: smal", (7, 13), "did you mean 'small'?"),
    ("mine", "TOPICcount: many", (7, 14), "must be a whole number, not 'many'"),
    ("mine", "TOPICparts: [{weight: 1, siz: 2}]", (7, 27), "did you mean 'size'?"),
    ("mine", "TOPICmain: {weight: heavy}", (7, 22), "must be a number, not 'heavy'"),
    ("mine", "TOPICby_name: {x: {size: huge, weight: 1}}", (7, 27), "'small' or 'large'"),
    ("mine", "TOPICwhen: tomorrow", (7, 13), "must be a date and time or null"),
    ("mine", "TOPICpair: [1]", (7, 13), "must have 2 or more items, not 1"),
]
# fmt: on


@pytest.mark.parametrize(("handler", "field", "place", "message"), FOUND)
def test_a_wrong_config_is_found_with_line_and_column(
    handler: str, field: str, place: tuple[int, int], message: str
) -> None:
    for short, line in BEFORE.items():
        field = field.replace(short, f"{line}\n      ")
    found = problems(FLOW.format(handler=handler, field=field), registry_of(mine=Mine))
    (one,) = [one for one in found if message in one.message]
    assert (one.code, one.line, one.column) == ("invalid_config", *place)


def test_a_missing_config_is_found_in_the_line_of_the_node() -> None:
    text = "name: w\nnodes:\n  - {id: a, handler: output}\n  - {id: b, handler: sleep}\n"
    (one,) = problems(text, registry_of())
    assert (one.code, one.path, one.line) == ("invalid_config", "nodes[1].config.seconds", 4)
    assert one.message == "'seconds' is required"


def test_all_problems_of_a_config_are_found_at_once() -> None:
    config = {"topic": 5, "count": 0, "cuont": 1, "parts": [{"weight": 1}, {}, 7]}
    assert said(Mine, config) == [
        ".topic: must be text, not 5",
        ".count: must be at least 1, not 0",
        ".cuont: unknown field 'cuont'; did you mean 'count'?",
        ".parts[1].weight: 'weight' is required",
        ".parts[2]: must be a mapping, not 7",
    ]


@pytest.mark.parametrize("handler", ["input", "output"])
def test_input_and_output_take_any_config(handler: str) -> None:
    assert not problems(FLOW.format(handler=handler, field="what: [ever]"), registry_of())


def test_a_handler_without_a_model_takes_any_config() -> None:
    registry = registry_of()
    registry.add(describe(lambda config, ctx: None, name="plain"))
    assert not problems(FLOW.format(handler="plain", field="what: [ever]"), registry)


class Ignoring(BaseModel):
    x: int = 1


class Allowing(BaseModel):
    model_config = ConfigDict(extra="allow")

    x: int = 1


def test_an_unknown_field_is_refused_unless_the_model_allows_more() -> None:
    assert said(Ignoring, {"y": 1}) == [".y: unknown field 'y'; known are: x"]
    assert said(Allowing, {"y": 1}) == []
    assert said(Allowing, {"x": "much"}) == [".x: must be a whole number, not 'much'"]


ACCEPTED = [
    {"topic": "{{ params.topic }}"},
    {"topic": "on {{ params.topic }}", "count": "{{ params.n }}", "size": "{{ params.size }}"},
    {"topic": "ok", "count": "1{{ params.n }}"},
    {"topic": "ok", "parts": "{{ params.parts }}"},
    {"topic": "ok", "parts": ["{{ params.part }}", {"weight": "{{ params.w }}"}]},
    {"topic": "ok", "main": "{{ params.part }}", "by_name": {"x": "{{ params.part }}"}},
    {"topic": "ok", "main": {"weight": "1", "size": "sm{{ params.x }}"}},
    {"topic": "ok", "when": "{{ params.a }}-{{ params.b }}", "pair": ["{{ params.a }}", "x"]},
    {"topic": "ok", "count": "5", "when": 1700000000, "pair": [True, "x"]},
    {"topic": "ok", "count": 3.0, "main": None},
]


@pytest.mark.parametrize("config", ACCEPTED)
def test_a_template_counts_as_any_value_that_it_may_give(config: dict[str, Any]) -> None:
    assert said(Mine, config) == []


def test_a_text_with_a_template_in_it_is_a_text() -> None:
    assert said(Mine, {"topic": "ok", "parts": "x {{ params.y }}"}) == [
        ".parts: must be a list, not 'x {{ params.y }}'"
    ]
    assert said(Mine, {"topic": "ok", "main": "x {{ params.y }}"}) == [
        ".main: must be a mapping or null, not 'x {{ params.y }}'"
    ]


def test_fields_beside_a_template_are_checked_nevertheless() -> None:
    config = {"topic": "{{ params.x }}", "main": {"weight": "{{ params.w }}", "sise": 1}}
    assert said(Mine, config) == [".main.sise: unknown field 'sise'; did you mean 'size'?"]


# --- what cannot be decided beforehand -------------------------------------------------------


def _legacy(data: Any) -> Any:
    return {"x": data["old"]} if isinstance(data, dict) and "old" in data else data


class Before(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int

    @model_validator(mode="before")
    @classmethod
    def _migrated(cls, data: Any) -> Any:
        return _legacy(data)


class Wrapped(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int

    @model_validator(mode="wrap")
    @classmethod
    def _migrated(cls, data: Any, handler: Any) -> Any:
        return handler(_legacy(data))


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    x: int = Field(alias="ex")


class Choosing(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int = Field(validation_alias=AliasChoices("a", "b"))


class OnlyAlias(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int = Field(alias="ex")


class Initialised(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int

    def __init__(self, **data: Any) -> None:
        super().__init__(**_legacy(data))


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]


class Numbered(IntEnum):
    ONE = 1


class Large(IntEnum):
    ODD = 2**53 + 1


class Finding(Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value: object) -> Finding:
        return cls.A


def field_model(annotation: Any, **config: Any) -> type[BaseModel]:
    return create_model("Made", __config__=ConfigDict(**config), x=(annotation, ...))


SILENT: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Before, {"old": 1}),
    (Wrapped, {"old": 1}),
    (Initialised, {"old": 1}),
    (Aliased, {"x": 1}),
    (Aliased, {"ex": 1}),
    (Choosing, {"b": 1}),
    (OnlyAlias, {"ex": 1}),
    (field_model(Annotated[int, BeforeValidator(len)]), {"x": "abc"}),
    (field_model(Annotated[int, WrapValidator(lambda v, h: 1)]), {"x": "abc"}),
    (field_model(Annotated[int, PlainValidator(len)]), {"x": "abc"}),
    (field_model(Annotated[Cat | Dog, Field(discriminator="kind")]), {"x": {"kind": "dog"}}),
    (
        field_model(
            Annotated[
                Annotated[Cat, Tag("c")] | Annotated[Dog, Tag("d")],
                Discriminator(lambda v: "d"),
            ]
        ),
        {"x": {"kind": "dog"}},
    ),
    (field_model(Cat | Dog), {"x": {"kind": "dog", "more": 1}}),
    (field_model(Cat | dict[str, Any]), {"x": {"any": 1}}),
    (field_model(str, coerce_numbers_to_str=True), {"x": 5}),
    (field_model(Annotated[str, Field(max_length=2)], str_strip_whitespace=True), {"x": " ab "}),
    (
        field_model(Annotated[str, StringConstraints(strip_whitespace=True, max_length=1)]),
        {"x": " a "},
    ),
    (field_model(Annotated[str, Field(pattern=r"^(?=a)a")], regex_engine="python-re"), {"x": "a"}),
    (field_model(Json[list[int]]), {"x": "[1]"}),
    (field_model(set[int]), {"x": [1, 1, "2"]}),
    (field_model(Annotated[set[int], Field(max_length=1)]), {"x": [1, 1]}),
    (field_model(Sequence[int]), {"x": [1]}),
    (field_model(Mapping[str, int]), {"x": {"a": 1}}),
    (field_model(tuple[int, ...]), {"x": [1, 2, 3]}),
    (field_model(Numbered), {"x": "1"}),
    (field_model(Large), {"x": str(2**53 + 1)}),
    (field_model(Literal[1, "a"]), {"x": 1}),
    (field_model(Finding), {"x": "whatever"}),
    (field_model(bool), {"x": "yes"}),
    (field_model(float), {"x": "nan"}),
    (field_model(Decimal), {"x": "1.5"}),
    (field_model(UUID), {"x": "00000000-0000-0000-0000-000000000001"}),
    (field_model(date), {"x": 0}),
    (field_model(Path), {"x": "a/b"}),
    (field_model(bytes), {"x": "abc"}),
    (field_model(int, extra="allow"), {"x": 1, "y": 2}),
    (field_model(Annotated[Any, AfterValidator(str)]), {"x": [1]}),
]


@pytest.mark.parametrize(("model", "config"), SILENT)
def test_what_the_model_accepts_is_not_refused(
    model: type[BaseModel], config: dict[str, Any]
) -> None:
    model.model_validate(config)
    assert said(model, config) == []


def test_the_schema_that_the_author_gives_to_a_type_is_checked() -> None:
    upper = Annotated[str, BeforeValidator(str.upper), WithJsonSchema({"enum": ["a", "b"]})]
    assert said(field_model(upper), {"x": "c"}) == [".x: must be 'a' or 'b', not 'c'"]
    odd = Annotated[Any, WithJsonSchema({"type": 5, "$ref": "#/nowhere", "allOf": 3, "items": 1})]
    assert said(field_model(odd), {"x": [1]}) == []


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: int
    left: Union[Tree, None] = None  # noqa: UP007
    children: list[Union[Tree, Bush]] = []  # noqa: UP007


class Bush(BaseModel):
    model_config = ConfigDict(extra="forbid")

    twigs: list[Union[Tree, Bush]]  # noqa: UP007


Tree.model_rebuild()


def test_a_model_that_contains_itself_is_checked_at_every_depth() -> None:
    assert said(Tree, {"value": 1, "left": {"value": 2, "left": {"value": "x"}}}) == [
        ".left.left.value: must be a whole number, not 'x'"
    ]
    bush = {"twigs": [{"twigs": [{"value": "x"}]}]}
    assert said(Tree, {"value": 1, "children": [bush]}) == [
        ".children[0]: fits none of the forms that the handler takes"
    ]


def test_nested_unions_are_checked_in_linear_time() -> None:
    bush: dict[str, Any] = {"twigs": []}
    for _ in range(10):
        bush = {"twigs": [bush]}
    began = time.process_time()
    assert said(Tree, {"value": 1, "children": [bush]}) == []
    assert time.process_time() - began < 5


def test_a_large_config_that_is_wrong_throughout_is_refused_quickly() -> None:
    began = time.process_time()
    found = checked(field_model(list[int]), {"x": ["no"] * 200_000})
    assert len(found.errors) == 1001
    wrong = {f"f{i}": 1 for i in range(20_000)}
    assert len(checked(Mine, wrong).errors) == 1001
    assert time.process_time() - began < 5


def test_a_schema_that_is_too_large_is_not_announced() -> None:
    large = create_model("Large", **{f"field_{i}": (int, i) for i in range(3000)})
    schema = schema_of(large)
    assert schema is not None
    assert not is_announced(schema)
    registry = registry_of(large=large, mine=Mine)
    assert "mine" in registry.announced_schemas()
    assert "large" not in registry.announced_schemas()
    assert registry.get("large").announcement()["config_schema"] is None
    assert registry.config_schema("large") == schema, "here it is checked all the same"


def test_a_schema_survives_the_way_through_json() -> None:
    for model in (Mine, Tree, ExternalConfig, LlmConfig):
        schema = schema_of(model)
        assert orjson.loads(orjson.dumps(schema)) == schema


# --- no false alarm --------------------------------------------------------------------------

MODELS: list[type[BaseModel]] = [Mine, Tree, Allowing, OnlyAlias, ExternalConfig, LlmConfig]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([0.5, 3.0, "", "a", "5", "ok", "small", "GET", "get", "true", "2026-01-02"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["weight", "size", "value", "type", "a"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def values(annotation: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """JSON that fits a type, mostly."""
    if depth > 3:
        return st.nothing()
    origin, inside = get_origin(annotation), get_args(annotation)
    below = depth + 1
    if origin is Annotated:
        return values(inside[0], depth)
    if origin in (Union, UnionType):
        return st.one_of([values(one, depth) for one in inside])
    if origin is Literal:
        return st.sampled_from([*inside, str(inside[0]).lower()])
    if origin is list:
        items = values(inside[0], below)
        return st.just([]) if items.is_empty else st.lists(items, max_size=3)
    if origin is tuple:
        return st.tuples(*(values(one, below) for one in inside)).map(list)
    if origin is dict:
        return st.dictionaries(st.sampled_from(["a", "b-c"]), values(inside[1], below), max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return configs(annotation, below)
    return FITTING.get(annotation, JSON)


FITTING: dict[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    str: st.sampled_from(["ok", "a text", "http://x", "{", "}}"]),
    int: st.integers(1, 10) | st.integers(100, 599) | st.sampled_from(["7", 3.0, True]),
    float: st.floats(0.5, 2) | st.integers(1, 2) | st.sampled_from(["1.5", " 2 ", True]),
    Size: st.sampled_from(["small", "large"]),
    datetime: st.sampled_from(["2026-01-02", "2026-01-02 03:04", 0, 1.5, "1700000000"]),
}


def configs(model: type[BaseModel], depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    known = {name: values(field.annotation, depth) for name, field in fields.items()}
    needed = {name: known[name] for name, field in fields.items() if field.is_required()}
    optional = {name: one for name, one in known.items() if name not in needed and not one.is_empty}
    return st.fixed_dictionaries(needed, optional=optional)


def with_templates(value: Any, draw: Any) -> Any:
    """The same config with templates for some of its values, which may give just these values."""
    if draw(st.integers(0, 3)) == 0:
        return "{{ params.value }}"
    if isinstance(value, str) and draw(st.booleans()):
        at = draw(st.integers(0, len(value)))
        return f"{value[:at]}{{{{ params.rest }}}}"
    if isinstance(value, dict):
        return {name: with_templates(one, draw) for name, one in value.items()}
    if isinstance(value, list):
        return [with_templates(one, draw) for one in value]
    return value


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_what_the_model_accepts_is_not_refused_when_templates_stand_for_its_values(
    data: st.DataObject,
) -> None:
    model = data.draw(st.sampled_from(MODELS))
    config = data.draw(configs(model))
    try:
        model.model_validate(config)
    except ValidationError:
        assume(False)
    written = {name: with_templates(value, data.draw) for name, value in config.items()}
    for one in (config, written):
        found = [problem.code for problem in checked(model, one).errors]
        assert "invalid_config" not in found, one


TYPES: list[Any] = [
    *(str, int, float, bool, Decimal, date, datetime, UUID, Size, Numbered, Part, Cat, Any),
    *(list[int], dict[str, int], tuple[int, str], set[str], int | None, str | int, Cat | Dog),
    *(list[Part] | None, dict[str, list[Part | None]], Literal["a", 1, True], bytes),
    Annotated[int, Field(ge=0, lt=5)],
    Annotated[str, Field(min_length=1, max_length=2)],
    Annotated[str, Field(pattern="^[a-z]*$")],
    Annotated[list[int], Field(min_length=1, max_length=2)],
]


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(TYPES), JSON | st.from_type(dict).map(lambda _: {"kind": "cat"}))
def test_a_value_that_a_type_accepts_is_not_refused(annotation: Any, value: Any) -> None:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return
    ignored = isinstance(value, dict) and annotation in (Cat, Cat | Dog)
    if not ignored:  # a field that a model would ignore is refused on purpose
        assert said(field_model(annotation), {"x": value}) == []


def test_the_config_of_a_root_model_is_checked() -> None:
    class Sizes(RootModel[dict[str, int]]):
        pass

    assert said(Sizes, {"a": 1, "b": "{{ params.b }}"}) == []
    assert said(Sizes, {"a": "x"}) == [".a: must be a whole number, not 'x'"]
