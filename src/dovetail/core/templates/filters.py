"""The filters and tests of expressions, each a row of a table.

They do on plain JSON what Jinja's filters of the same name do, with the same arguments; each
difference is noted at its filter. Each pays before it acts (see `operations`). `default` is part of
`compiler`, because it must decide before its value is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from dovetail.core.errors import MissingValue, TemplateError
from dovetail.core.templates.operations import (
    ABSENT,
    COMPARISONS,
    CONTAINERS,
    DOCUMENT,
    ITEM,
    WALKED,
    WITH_ITEMS,
    Frame,
    Missing,
    is_number,
    kind,
    number,
    step,
    text,
    to_json,
)

_MAX_ATTRIBUTE_STEPS = 32
_MAX_PRECISION = 18
_MAX_INDENT = 8
_WORD = re.compile(r"[^-\s({\[<]+")  # Jinja's own rule for `title`

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Filter:
    """`apply(frame, value, *arguments)`, the arguments in the order of `takes`."""

    apply: Callable[..., Any]
    takes: tuple[tuple[str, Any], ...] = ()
    by_name: bool = False
    """Whether its arguments must be given by name, as in `map(attribute='a')`."""
    chooses: bool = False
    """Whether the name of a test and its operand may follow its arguments. Then it is called as
    `apply(frame, value, test, *arguments)`."""


class ItemTest(NamedTuple):
    """What `select` and the like ask about each item: a test with its operand."""

    holds: Callable[[Frame, Any], bool]
    takes_absent: bool = False
    """`defined` and `undefined` are also asked about an attribute that an item does not have."""


Picked = TypeVar("Picked", bound=Iterable[Any])


def items(frame: Frame, value: Any, steps: int = 1) -> list[Any] | str | dict[str, Any]:
    """The items that a filter iterates over, `steps` operations each: of a mapping its keys."""
    if not isinstance(value, WITH_ITEMS):
        raise TemplateError(f"needs a list, a mapping or text, not {kind(value)}")
    frame.work(frame.weigh(value) + ITEM * steps * len(value))
    return value


# --- text ------------------------------------------------------------------------------------


def _on_text(change: Callable[[str], str], price: int = 1) -> Filter:
    def apply(frame: Frame, value: Any) -> str:
        whole = text(frame, value)
        frame.grow(len(whole))
        # Beyond ASCII Python looks up each character, and one character may become three.
        frame.work(len(whole) * (price if whole.isascii() else ITEM))
        return change(whole)

    return Filter(apply)


def _title(whole: str) -> str:
    return _WORD.sub(lambda word: word[0][0].upper() + word[0][1:].lower(), whole)


def _trim(frame: Frame, value: Any, chars: Any) -> str:
    whole = text(frame, value)
    if not (chars is None or isinstance(chars, str)):
        raise TemplateError(f"trim takes the characters as text, not {kind(chars)}")
    # Python searches `chars` for each character that it strips.
    frame.work(len(whole) * (1 + len(chars or "") // 8))
    return whole.strip(chars)


def _replace(frame: Frame, value: Any, old: Any, new: Any, count: Any) -> str:
    whole, old, new = text(frame, value), text(frame, old), text(frame, new)
    if not (count is None or isinstance(count, int)):
        raise TemplateError(f"replace takes the count as a number, not {kind(count)}")
    frame.work(len(whole))
    found = whole.count(old)
    if count is not None and 0 <= count < found:
        found = count
    frame.grow(len(whole) + found * (len(new) - len(old)))
    return whole.replace(old, new, found)


def _join(frame: Frame, value: Any, separator: Any, attribute: Any) -> str:
    picked = _picked(frame, value, attribute)
    frame.work(2 * ITEM * len(picked))
    texts = [text(frame, item) for item in picked]
    between = text(frame, separator)
    frame.grow(sum(map(len, texts)) + len(between) * max(len(texts) - 1, 0))
    return between.join(texts)


def _tojson(frame: Frame, value: Any, indent: Any) -> str:
    """Plain JSON with sorted keys; not escaped for HTML, as Jinja does."""
    if indent is None:
        return to_json(frame, value)
    if not isinstance(indent, int) or not 0 <= indent <= _MAX_INDENT:
        raise TemplateError(f"tojson takes an indent from 0 to {_MAX_INDENT}")
    frame.weigh(value)
    encoder = json.JSONEncoder(sort_keys=True, ensure_ascii=False, indent=indent)
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):  # piece by piece: indents may outgrow the value
        size += len(piece)
        frame.work(8 * ITEM)
        if size > frame.limit:
            break
        pieces.append(piece)
    frame.grow(size)
    return "".join(pieces)


# --- numbers ---------------------------------------------------------------------------------


def _int(frame: Frame, value: Any, default: Any, base: Any) -> Any:
    """As Jinja: text that is no number gives `default`; `'42.9'|int` is 42."""
    frame.work(2 * WALKED * frame.weigh(value))
    try:
        return number(int(value, base) if isinstance(value, str) else int(value))
    except (TypeError, ValueError):
        pass
    try:
        return number(int(float(value)))
    except (TypeError, ValueError):
        return default
    except OverflowError:
        return _endless(value, default)


def _float(frame: Frame, value: Any, default: Any) -> Any:
    frame.work(2 * WALKED * frame.weigh(value))
    try:
        found = float(value)
    except (TypeError, ValueError):
        return default
    return found if math.isfinite(found) else _endless(value, default)


def _endless(value: Any, default: Any) -> Any:
    """'inf' and 'nan' are not numbers here; '1e999' is one and must not become 0."""
    if any(char.isdigit() for char in value):
        raise TemplateError("the number is too large")
    return default


def _round(_: Frame, value: Any, precision: Any, method: Any) -> Any:
    _numeric("round", value)
    if not isinstance(precision, int) or abs(precision) > _MAX_PRECISION:
        raise TemplateError(f"round takes a precision from -{_MAX_PRECISION} to {_MAX_PRECISION}")
    try:
        match method:
            case "common":
                return number(round(value, precision))
            case "ceil":
                return number(math.ceil(value * 10**precision) / 10**precision)
            case "floor":
                return number(math.floor(value * 10**precision) / 10**precision)
    except OverflowError:
        raise TemplateError("the result is not a finite number") from None
    raise TemplateError("round takes the method 'common', 'ceil' or 'floor'")


def _abs(_: Frame, value: Any) -> Any:
    _numeric("abs", value)
    return number(abs(value))


def _sum(frame: Frame, value: Any, attribute: Any, start: Any) -> Any:
    total = start
    _numeric("sum", start)
    for item in _picked(frame, value, attribute):
        _numeric("sum", item)
        total += item
    return number(total)


def _numeric(name: str, value: Any) -> None:
    if not is_number(value):
        raise TemplateError(f"{name} works on numbers, not on {kind(value)}")


# --- lists -----------------------------------------------------------------------------------


def _length(_: Frame, value: Any) -> int:
    if not isinstance(value, WITH_ITEMS):
        raise TemplateError(f"{kind(value)} has no length")
    return len(value)


def _end(name: str, take: Callable[[Any], Iterator[Any]]) -> Filter:
    def apply(_: Frame, value: Any) -> Any:
        if not isinstance(value, WITH_ITEMS):
            raise TemplateError(f"{name} needs a list, a mapping or text, not {kind(value)}")
        for item in take(value):
            return item
        return _empty(name)

    return Filter(apply)


def _extreme(name: str, choose: Callable[..., Any]) -> Filter:
    def apply(frame: Frame, value: Any, case_sensitive: Any, attribute: Any) -> Any:
        if value in ("", [], {}):
            return _empty(name)
        keys = _keys(frame, value, case_sensitive, attribute)
        try:
            at = choose(range(len(keys)), key=keys.__getitem__)
        except TypeError:
            raise TemplateError(f"{name} cannot compare items of unlike kinds") from None
        return list(value)[at]

    return Filter(apply, (("case_sensitive", False), ("attribute", None)))


def _empty(name: str) -> Missing:
    return Missing(lambda: f"has nothing to take the {name} of; |default(…) after it gives a value")


def _sort(frame: Frame, value: Any, reverse: Any, case_sensitive: Any, attribute: Any) -> list[Any]:
    whole = list(items(frame, value, 3))
    keys = _sort_keys(frame, value, case_sensitive, attribute)
    try:
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=bool(reverse))
    except TypeError:
        raise TemplateError("sort cannot compare items of unlike kinds") from None
    return [whole[at] for at in order]


def _sort_keys(frame: Frame, value: Any, case_sensitive: Any, attribute: Any) -> list[Any]:
    """Several attributes, separated by commas, are compared one after the other."""
    if not isinstance(attribute, str) or "," not in attribute:
        return _keys(frame, value, case_sensitive, attribute)
    names = attribute.split(",", _MAX_ATTRIBUTE_STEPS)
    columns = [_keys(frame, value, case_sensitive, name) for name in names]
    return list(zip(*columns, strict=True))


def _unique(frame: Frame, value: Any, case_sensitive: Any, attribute: Any) -> list[Any]:
    """The first of each; also of lists and mappings, which Jinja cannot compare."""
    whole = items(frame, value)
    keys = _keys(frame, value, case_sensitive, attribute)
    seen: set[Any] = set()
    first: list[Any] = []
    for item, key in zip(whole, keys, strict=True):
        if isinstance(key, CONTAINERS):
            frame.work(DOCUMENT + WALKED * frame.weigh(key))
            key = orjson.dumps(key, option=orjson.OPT_SORT_KEYS)
        if key not in seen:
            seen.add(key)
            first.append(item)
    return first


def _reverse(frame: Frame, value: Any) -> Any:
    if isinstance(value, str):
        frame.grow(len(value))
        return value[::-1]
    return list(items(frame, value))[::-1]


def _list(frame: Frame, value: Any) -> list[Any]:
    whole = items(frame, value)
    if isinstance(whole, str):
        frame.grow(4 * len(whole))  # each character becomes an item of its own
    return list(whole)


def _keys(frame: Frame, value: Any, case_sensitive: Any, attribute: Any) -> list[Any]:
    picked = _picked(frame, value, attribute)
    if case_sensitive:
        return picked
    return [item.lower() if isinstance(item, str) else item for item in picked]


def _picked(frame: Frame, value: Any, attribute: Any) -> list[Any]:
    """The items, or the value of the dotted `attribute` of each."""
    if attribute is None:
        return list(items(frame, value))
    steps = _steps(attribute)
    picked = [_pick(item, steps) for item in items(frame, value, 1 + len(steps))]
    return _complete(picked, value)


def _steps(attribute: Any) -> list[str | int]:
    if attribute is None:
        return []
    if isinstance(attribute, bool) or not isinstance(attribute, (str, int)):
        raise TemplateError(f"attribute is a name such as 'a.b', not {kind(attribute)}")
    if isinstance(attribute, int):
        return [attribute]
    names = attribute.strip().split(".", _MAX_ATTRIBUTE_STEPS)
    if len(names) > _MAX_ATTRIBUTE_STEPS:
        raise TemplateError(f"attribute has more than {_MAX_ATTRIBUTE_STEPS} steps")
    return [int(name) if name.isdecimal() and len(name) < 10 else name for name in names]


def _pick(item: Any, steps: list[str | int]) -> Any:
    for key in steps:
        item = step(item, key)
        if item is ABSENT:
            return ABSENT
    return item


def _complete(picked: Picked, value: Any, hint: str = "") -> Picked:
    """The picked values, if every item has one."""
    for at, found in enumerate(picked):
        if found is ABSENT:
            owner = kind(list(value)[at])
            raise MissingValue(
                "names an attribute that an item of the list does not have: "
                f"item {at} is {owner}{hint}"
            )
    return picked


def _each(frame: Frame, value: Any, steps: int) -> list[Any] | str | dict[str, Any]:
    """As `items`, for a filter that gives a list: none has no items, as in Jinja."""
    if not value:
        return []
    if isinstance(value, str):
        frame.grow(4 * len(value))  # each character becomes an item of its own
    if isinstance(value, list):
        # The items are not measured: picking from many megabytes, such as the output of a mapped
        # node, is no more work. Tests pay for what they read, and a result for its size.
        frame.work(ITEM * steps * len(value))
        return value
    return items(frame, value, steps)


def _map(frame: Frame, value: Any, attribute: Any, default: Any) -> list[Any]:
    """Only an attribute: Jinja can also apply a filter. `default` replaces the whole path."""
    steps = _steps(attribute)
    whole = _each(frame, value, 1 + len(steps))
    picked = [_pick(item, steps) for item in whole]
    missing = sum(found is ABSENT for found in picked)
    if missing and default is not ABSENT:
        frame.grow(missing * frame.weigh(default))
        return [default if found is ABSENT else found for found in picked]
    return _complete(picked, whole, "; map(attribute=…, default=…) gives it a value")


def _choosing(keep: bool, takes: tuple[tuple[str, Any], ...] = ()) -> Filter:
    """`select` and `reject`, by the item itself or by an attribute of it."""

    def apply(frame: Frame, value: Any, test: ItemTest | None, attribute: Any = None) -> list[Any]:
        steps = _steps(attribute)
        whole = _each(frame, value, (2 if test is None else 6) + len(steps))
        picked = [_pick(item, steps) for item in whole] if steps else whole
        if steps and not (test is not None and test.takes_absent):
            _complete(picked, whole, "; the test 'defined' chooses the items that have it")
        pairs = zip(whole, picked, strict=True)
        if test is None:  # whether it is true costs no call of a function
            return [item for item, found in pairs if bool(found) is keep]
        chosen: list[Any] = []
        for item, found in pairs:
            if isinstance(found, CONTAINERS):
                frame.work(4 * ITEM)  # a comparison measures it, however small it is
            if bool(test.holds(frame, found)) is keep:
                chosen.append(item)
        return chosen

    return Filter(apply, takes, chooses=True)


def _pairs(frame: Frame, value: Any) -> list[Any]:
    """`[[key, value], …]` in the order of the keys in the mapping."""
    if not isinstance(value, dict):
        raise TemplateError(f"items needs a mapping, not {kind(value)}")
    frame.grow(frame.weigh(value) + 4 * len(value))
    # Each pair is a list of its own, which the garbage collector visits, too.
    frame.work(8 * ITEM * len(value))
    return [[key, inside] for key, inside in value.items()]


# --- the tables ------------------------------------------------------------------------------

_CHOOSING = (("case_sensitive", False), ("attribute", None))

FILTERS: dict[str, Filter] = {
    "lower": _on_text(str.lower),
    "upper": _on_text(str.upper),
    "title": _on_text(_title, ITEM),
    "capitalize": _on_text(str.capitalize),
    "trim": Filter(_trim, (("chars", None),)),
    "replace": Filter(_replace, (("old", REQUIRED), ("new", REQUIRED), ("count", None))),
    "join": Filter(_join, (("d", ""), ("attribute", None))),
    "length": Filter(_length),
    "count": Filter(_length),
    "first": _end("first", iter),
    "last": _end("last", reversed),
    "int": Filter(_int, (("default", 0), ("base", 10))),
    "float": Filter(_float, (("default", 0.0),)),
    "string": Filter(text),
    "round": Filter(_round, (("precision", 0), ("method", "common"))),
    "abs": Filter(_abs),
    "sort": Filter(_sort, (("reverse", False), *_CHOOSING)),
    "unique": Filter(_unique, _CHOOSING),
    "reverse": Filter(_reverse),
    "list": Filter(_list),
    "sum": Filter(_sum, (("attribute", None), ("start", 0))),
    "min": _extreme("min", min),
    "max": _extreme("max", max),
    "tojson": Filter(_tojson, (("indent", None),)),
    "map": Filter(_map, (("attribute", REQUIRED), ("default", ABSENT)), by_name=True),
    "select": _choosing(True),
    "reject": _choosing(False),
    "selectattr": _choosing(True, (("attribute", REQUIRED),)),
    "rejectattr": _choosing(False, (("attribute", REQUIRED),)),
    "items": Filter(_pairs),
}

# `compiler` handles `defined` and `undefined`, before the value is settled.
TESTS: dict[str, Callable[[Any], bool]] = {
    "none": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "number": is_number,  # a boolean is a number, as in Jinja
    "boolean": lambda value: isinstance(value, bool),
    "mapping": lambda value: isinstance(value, dict),
    "sequence": lambda value: isinstance(value, WITH_ITEMS),  # what has items, as in Jinja
    "true": lambda value: value is True,
    "false": lambda value: value is False,
}

# Tests with an operand: `x is gt 5`, `rows|selectattr('n', 'gt', 5)`.
COMPARING_TESTS: dict[str, Callable[[Frame, Any, Any], bool]] = {
    "equalto": COMPARISONS["eq"],
    "eq": COMPARISONS["eq"],
    "ne": COMPARISONS["ne"],
    "gt": COMPARISONS["gt"],
    "ge": COMPARISONS["gteq"],
    "lt": COMPARISONS["lt"],
    "le": COMPARISONS["lteq"],
    "in": COMPARISONS["in"],
}
