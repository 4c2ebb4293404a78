"""The operations of expressions: read values, compare, calculate, make text.

Values are plain JSON. Reading is a look-up in a dictionary or a list, never Python's `getattr`.
Each operation pays before it acts: `Frame.grow` for what it would produce, `Frame.work` for what
it must read. The orchestrator renders, so an expensive template would stop all runs. The price of
an operation is at most linear in its operands, and the sum over one rendering is bounded.

Messages have kinds and keys, never values: a value may be a secret.
"""

from __future__ import annotations

import heapq
import json
import operator
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, Protocol

import orjson

from dovetail.core.errors import MissingValue, TemplateError, TooLarge, shown
from dovetail.core.values import MAX_INT, MIN_INT

WITHOUT_OUTPUT = frozenset({"SKIPPED", "FAILED"})
"""The statuses of an ancestor that has no output. A FAILED one was allowed to fail."""

# Prices, in units of about two nanoseconds. One rendering has WORK units for each character that
# its result may have: at the usual limit of 1 MiB that is an eighth of a second.
WORK = 64
ITEM = 64  # an item of a list, handled by itself
WALKED = 4  # a character of JSON that is measured or compared
WRITTEN = 24  # a character of JSON that is written
DOCUMENT = 40 * ITEM  # each time that JSON is written or read, however short
_SHOWN_KEYS = 10

# Tuples, not `dict | list`: a union is built anew each time a line with one is reached.
CONTAINERS = (dict, list)
WITH_ITEMS = (list, str, dict)


class Scope(Protocol):
    """Where names are looked up: a run, or the part of one that was sent to a worker."""

    def get(self, name: str) -> Any:
        """A node id gives a `NodeValue`; params, run and secrets give JSON. Else `KeyError`."""
        ...


class NodeValue(NamedTuple):
    """An ancestor as templates read it. Every key of a SKIPPED or FAILED one reads as none, but for
    its `status` and the `error` of a FAILED one."""

    id: str
    status: str
    output: Any
    error: Any


class Missing:
    """A value that does not exist. `default` and `is defined` accept it, everything else raises.

    The reason completes a sentence that begins with the expression: "has no 'body'".
    """

    __slots__ = ("_why",)

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why  # called only for an error: naming keys costs more than reading one

    def error(self) -> MissingValue:
        return MissingValue(self._why())


class _Nothing:
    """A value below a skipped node: none, but not defined, so that `default` replaces it."""

    __slots__ = ()


NOTHING = _Nothing()
ABSENT = object()


class Frame:
    """One rendering: its scope and its remaining budget."""

    __slots__ = ("_room", "_weights", "get", "limit")

    def __init__(self, scope: Scope, limit: int) -> None:
        self.get = scope.get
        self.limit = limit
        self._room = WORK * max(limit, 1 << 16)
        # Keeps the value beside its weight: an id is unique only while its object lives.
        self._weights: dict[int, tuple[Any, int]] = {}

    def work(self, amount: int) -> None:
        """Pay for reading this much."""
        self._room -= amount
        if self._room < 0:
            raise TooLarge("takes too much work for values of this size; do it in a handler")

    def grow(self, size: int) -> None:
        """Pay for producing this much, before it is produced."""
        if size > self.limit:
            raise TooLarge(f"would take {size:,} characters; at most {self.limit:,} are allowed")
        self.work(size)

    def weigh(self, value: Any) -> int:
        """About how long a value is as JSON; each container is measured once."""
        if isinstance(value, str):
            return len(value) + 2
        if not isinstance(value, CONTAINERS):
            return 8
        known = self._weights.get(id(value))
        if known is None:
            known = value, json_size(value)
            self.work(WALKED * known[1])
            self._weights[id(value)] = known
        return known[1]

    def weighed(self, value: Any, weight: int) -> Any:
        """Remember the weight of a container that was just built from weighed parts."""
        self._weights[id(value)] = value, weight
        return value


def json_size(value: Any) -> int:
    """The length of a value as JSON, in bytes."""
    try:
        return len(orjson.dumps(value))
    except TypeError:
        raise TemplateError("reads something that is not JSON, or nested too deeply") from None


def kind(value: Any) -> str:
    """The kind of a value for people; never its content."""
    match value:
        case None:
            return "none"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a mapping" if value else "an empty mapping"
    return "not a JSON value"


# --- reading ---------------------------------------------------------------------------------


UNSETTLED = frozenset({Missing, NodeValue, _Nothing})
"""The classes of results of a read that are not yet values."""


def settle(value: Any) -> Any:
    """The value to use: a node is its output, or none; a missing value is an error."""
    kind_ = value.__class__
    if kind_ is Missing:
        raise value.error()
    if kind_ is NodeValue:
        return None if value.status in WITHOUT_OUTPUT else value.output
    return None if kind_ is _Nothing else value


def step(value: Any, key: str | int) -> Any:
    """One step into a value, or ABSENT."""
    if isinstance(value, dict):
        return value.get(key, ABSENT)
    if isinstance(value, NodeValue):
        return _step_node(value, key)
    if isinstance(value, (Missing, _Nothing)):
        return value
    if isinstance(value, (list, str)) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return ABSENT


def _step_node(node: NodeValue, key: str | int) -> Any:
    if node.status in WITHOUT_OUTPUT:
        if key == "status":
            return str(node.status)
        return node.error if key == "error" and node.error is not None else NOTHING
    found = step(node.output, key)
    if found is not ABSENT:
        return found
    match key:
        case "output":
            return node.output
        case "status":
            return str(node.status)
        case "error":
            return node.error
    return ABSENT


class Path:
    """`a.b[0].c`: a name and fixed steps from it."""

    __slots__ = ("root", "steps")

    def __init__(self, root: str, steps: tuple[str | int, ...]) -> None:
        self.root = root
        self.steps = steps

    def read(self, get: Callable[[str], Any]) -> Any:
        """The value, or `Missing`, or something that `settle` turns into a value."""
        try:
            value = inside = get(self.root)
        except KeyError:
            return Missing(self._unknown)
        if value.__class__ is NodeValue and self.steps and value.status not in WITHOUT_OUTPUT:
            inside = value.output
        for key in self.steps:  # keys of mappings, nearly always: this loop is the hot path
            if inside.__class__ is not dict or key not in inside:
                return self._walk(value)
            inside = inside[key]
        return inside

    def _walk(self, value: Any) -> Any:
        for at, key in enumerate(self.steps):
            found = step(value, key)
            if found is ABSENT:
                return Missing(partial(self._lacks, at, value))
            value = found
        return value

    def text(self, length: int) -> str:
        """The name and its first `length` steps, as written in a template."""
        text = self.root
        for key in self.steps[:length]:
            if isinstance(key, str) and key.isidentifier():
                text += f".{key}"
            else:
                text += f"[{key if isinstance(key, int) else shown(key)}]"
        return text

    def _unknown(self) -> str:
        return (
            f"reads '{self.root}', and nothing has that name here; "
            "a template reads params, run, secrets and the nodes before its own"
        )

    def _lacks(self, at: int, value: Any) -> str:
        key = self.steps[at]
        if self.root == "secrets" and at == 0:
            return f"reads a secret that is not set; set DOVETAIL_SECRET_{key}"
        if isinstance(value, NodeValue):
            owner, verb, value = f"'{self.root}'", "returned", value.output
        elif at == 0:
            owner, verb = self.root, "has"
        else:
            owner, verb = f"'{self.text(at)}'", "has"
        named = f"item {key}" if isinstance(key, int) else shown(key)
        return f"has no {named}; {owner} {_holding(verb, value)}"


def _holding(verb: str, value: Any) -> str:
    """`returned: a, b`, or `returned a list of 3`, or `is text`."""
    if not isinstance(value, dict) or not value:
        return f"{'is' if verb == 'has' else verb} {kind(value)}"
    first = heapq.nsmallest(_SHOWN_KEYS, value)
    more = len(value) - len(first)
    names = ", ".join(shown(key)[1:-1] for key in first)
    return f"{verb}: {names}" + (f" and {more} more" if more else "")


# --- text ------------------------------------------------------------------------------------


def text(frame: Frame, value: Any) -> str:
    """A value inside text. None is empty; lists and mappings are JSON.

    JSON, because the text is a prompt, a body or a header; Jinja would give Python's notation.
    """
    if value.__class__ is str:
        return value
    if isinstance(value, CONTAINERS):
        return to_json(frame, value)
    return "" if value is None else str(value)


def to_json(frame: Frame, value: Any) -> str:
    weight = frame.weigh(value)
    frame.grow(weight)
    frame.work(DOCUMENT + WRITTEN * weight)
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def concatenate(frame: Frame, values: list[Any]) -> str:
    """`a ~ b ~ c`."""
    size = 0
    texts = []
    for value in values:
        texts.append(text(frame, value))
        size += len(texts[-1])
        if size > frame.limit:
            break
    frame.grow(size)
    return "".join(texts)


# --- numbers ---------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def number(value: Any) -> Any:
    """A calculated number; an error if JSON or a store cannot hold it."""
    if isinstance(value, float):
        if not isfinite(value):
            raise TemplateError("the result is not a finite number")
    elif not MIN_INT <= value <= MAX_INT:
        raise TemplateError("the result does not fit in 64 bits")
    return value


def add(frame: Frame, left: Any, right: Any) -> Any:
    if is_number(left) and is_number(right):
        return number(left + right)
    if isinstance(left, str) and isinstance(right, str):
        frame.grow(len(left) + len(right))
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        weight = frame.weigh(left) + frame.weigh(right)
        frame.grow(weight)
        return frame.weighed([*left, *right], weight)
    raise TemplateError(
        f"cannot add {kind(left)} and {kind(right)}; use ~ to join anything as text, "
        "or |int or |float to calculate"
    )


def calculation(sign: str, apply: Callable[[Any, Any], Any]) -> Callable[[Frame, Any, Any], Any]:
    """`-`, `/`, `//` or `%`: on numbers only, so that `'%999999d' % 1` is an error, not a bomb."""

    def calculate(_: Frame, left: Any, right: Any) -> Any:
        if not (is_number(left) and is_number(right)):
            raise TemplateError(
                f"{sign} works on numbers, not on {kind(left)} and {kind(right)}; "
                "|int and |float make numbers of text"
            )
        try:
            return number(apply(left, right))
        except ZeroDivisionError:
            raise TemplateError(f"division by zero in {sign}; guard it with `if`") from None

    return calculate


def signed(sign: str, apply: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def calculate(value: Any) -> Any:
        if not is_number(value):
            raise TemplateError(f"a sign {sign} works on numbers, not on {kind(value)}")
        return number(apply(value))

    return calculate


# --- comparisons -----------------------------------------------------------------------------


def equal(frame: Frame, left: Any, right: Any) -> bool:
    if isinstance(left, WITH_ITEMS) and left.__class__ is right.__class__:
        frame.work(WALKED * min(frame.weigh(left), frame.weigh(right)))
    return bool(left == right)


def unequal(frame: Frame, left: Any, right: Any) -> bool:
    return not equal(frame, left, right)


def ordering(sign: str, apply: Callable[[Any, Any], bool]) -> Callable[[Frame, Any, Any], bool]:
    """`<`, `<=`, `>` or `>=`."""

    def compare(frame: Frame, left: Any, right: Any) -> bool:
        if not (is_number(left) and is_number(right)):
            frame.work(WALKED * min(frame.weigh(left), frame.weigh(right)))
        try:
            return apply(left, right)
        except TypeError:
            raise TemplateError(
                f"cannot compare {kind(left)} {sign} {kind(right)}; |int and |float make "
                "numbers of text"
            ) from None

    return compare


def contains(frame: Frame, item: Any, box: Any) -> bool:
    """`item in box`."""
    match box:
        case str():
            if not isinstance(item, str):
                raise TemplateError(f"text can contain text, not {kind(item)}; use |string")
            frame.work(len(box))
            return item in box
        case list():
            frame.work(WALKED * frame.weigh(box))
            return item in box
        case dict():
            return isinstance(item, str) and item in box
    raise TemplateError(f"`in` looks into a list, a mapping or text, not into {kind(box)}")


def excludes(frame: Frame, item: Any, box: Any) -> bool:
    return not contains(frame, item, box)


CALCULATIONS: dict[str, Callable[[Frame, Any, Any], Any]] = {
    "+": add,
    "-": calculation("-", operator.sub),
    "/": calculation("/", operator.truediv),
    "//": calculation("//", operator.floordiv),
    "%": calculation("%", operator.mod),
}

SIGNS: dict[str, Callable[[Any], Any]] = {
    "-": signed("-", operator.neg),
    "+": signed("+", operator.pos),
}

# By the names that Jinja's tree gives them.
COMPARISONS: dict[str, Callable[[Frame, Any, Any], bool]] = {
    "eq": equal,
    "ne": unequal,
    "lt": ordering("<", operator.lt),
    "lteq": ordering("<=", operator.le),
    "gt": ordering(">", operator.gt),
    "gteq": ordering(">=", operator.ge),
    "in": contains,
    "notin": excludes,
}
