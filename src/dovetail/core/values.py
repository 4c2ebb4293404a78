"""Checks that a value from outside is JSON: params, outputs, definitions.

JSON has finite numbers, integers of 64 bits, text that UTF-8 can encode, text as keys, and bounded
nesting. Python's types allow more (NaN, a lone surrogate, a list that contains itself), and a store
would notice it only much later. A subclass of a Python type may do anything when it is read: raise
any error, or never end.

Params and definitions may not have NUL characters either (`nul=False`), like any text of a request
or a file. Outputs may: a handler cannot choose what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import isfinite
from typing import Any

import orjson

from dovetail.core.errors import Finding, Path, format_path, one_line, shown

MAX_BYTES = 1 << 20
MAX_DEPTH = 100
# orjson, msgpack and all our databases hold this range; the first one fails at 2^64.
MIN_INT = -(1 << 63)
MAX_INT = (1 << 64) - 1


class NotJson(ValueError):
    """A value that cannot be stored. `code` is `invalid_value` or `too_large`; `kind` is the Python
    type that JSON does not have, if that is the reason."""

    def __init__(
        self,
        message: str,
        path: Path = (),
        code: str = "invalid_value",
        kind: type | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.path = path
        self.kind = kind

    def of_output(self) -> str:
        """A sentence about an output, with what to return instead."""
        if self.kind is None:
            return f"the output cannot be stored: {self}"
        name = one_line(self.kind.__name__)
        article = "an" if name[:1].lower() in "aeio" else "a"
        where = format_path(("output", *self.path))
        return f"{where} is {article} {name}, which JSON cannot hold: return {instead(self.kind)}"


def is_json(
    value: Any, *, max_depth: int = MAX_DEPTH, max_values: int = MAX_BYTES, nul: bool = True
) -> bool:
    """Whether a value is JSON within the bounds; `faults` says why not.

    Level by level, so that no depth exhausts the stack. The count of values also stops at a
    container that contains itself. `[]` has depth 1, a number has depth 0.
    """
    level = [value]
    depth = 0
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind not in _KINDS:
                kind, item = _unmasked(item)
            if kind is str:
                if not (item.isascii() or _encodable(item)) or (not nul and "\0" in item):
                    return False
            elif kind is dict:
                for key in item:
                    if type(key) is not str:
                        kind, key = _unmasked(key)
                        if kind is not str:
                            return False
                    if not (key.isascii() or _encodable(key)):
                        return False
                    if not nul and "\0" in key:
                        return False
                if depth >= max_depth:
                    return False
                below.extend(item.values())
            elif kind is list:
                if depth >= max_depth:
                    return False
                below.extend(item)
            elif kind is int:
                if not MIN_INT <= item <= MAX_INT:
                    return False
            elif kind is float:
                if not isfinite(item):
                    return False
            elif kind is object:
                return False
            if len(below) > max_values:
                return False
        max_values -= len(below)
        level = below
        depth += 1
    return True


def faults(
    value: Any,
    *,
    at: Path = (),
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_BYTES,
    nul: bool = True,
) -> Iterator[Finding]:
    """All reasons why a value is not JSON, each with its path below `at`."""
    stack: list[tuple[Any, Path, int]] = [(value, at, 0)]
    while stack:
        item, path, depth = stack.pop()
        if type(item) not in _KINDS:
            item = _unmasked(item)[1]
        fault = _fault(item, nul)
        if fault:
            yield Finding("invalid_field", fault, path)
            continue
        if not isinstance(item, dict | list):
            continue
        max_values -= len(item)
        if max_values < 0:
            yield Finding("too_large", "has more values than can be stored", at)
            return
        if depth >= max_depth:
            yield Finding("too_large", f"is nested deeper than {max_depth} levels", path)
            continue
        if not isinstance(item, dict):
            stack += [(item[i], (*path, i), depth + 1) for i in reversed(range(len(item)))]
            continue
        below: list[tuple[Any, Path, int]] = []
        for given, held in item.items():
            kind, key = _unmasked(given)
            if kind is not str:
                message = f"key {shown(given)} is not text; JSON keys are"
                yield Finding("invalid_field", message, path, on_key=True)
            elif fault := _fault(key, nul):
                yield Finding("invalid_field", f"a key {fault}", path, on_key=True)
            else:
                below.append((held, (*path, key), depth + 1))
        stack += reversed(below)


def encode(
    value: Any, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, nul: bool = True
) -> bytes:
    """A value as JSON text. Raises `NotJson` with the first fault, or if it is too large."""
    if not is_json(value, max_depth=max_depth, max_values=max_bytes, nul=nul):
        first = next(faults(value, max_depth=max_depth, max_values=max_bytes, nul=nul))
        where = format_path(first.path)
        message = f"{where}: {first.message}" if where else first.message
        code = "too_large" if first.code == "too_large" else "invalid_value"
        raise NotJson(message, first.path, code, _kind_at(value, first.path))
    text = _written(value)
    if len(text) > max_bytes:
        message = f"takes {len(text):,} bytes as JSON; at most {max_bytes:,} are allowed"
        raise NotJson(message, (), "too_large")
    return text


_INSTEAD = {
    ("datetime", "datetime"): "value.isoformat()",
    ("datetime", "date"): "value.isoformat()",
    ("datetime", "time"): "value.isoformat()",
    ("datetime", "timedelta"): "value.total_seconds()",
    ("decimal", "Decimal"): "str(value)",
    ("fractions", "Fraction"): "str(value)",
    ("uuid", "UUID"): "str(value)",
    ("pathlib", "PurePath"): "str(value)",
    ("ipaddress", "_IPAddressBase"): "str(value)",
    ("enum", "Enum"): "value.value",
    ("builtins", "set"): "sorted(value)",
    ("builtins", "frozenset"): "sorted(value)",
    ("builtins", "range"): "list(value)",
    ("builtins", "generator"): "list(value)",
    ("builtins", "map"): "list(value)",
    ("builtins", "filter"): "list(value)",
    ("builtins", "zip"): "list(value)",
    ("builtins", "dict_keys"): "list(value)",
    ("builtins", "dict_values"): "list(value)",
    ("builtins", "dict_items"): "dict(value)",
    ("builtins", "mappingproxy"): "dict(value)",
    ("collections", "deque"): "list(value)",
    ("builtins", "bytes"): "value.decode() of a text, else base64.b64encode(value).decode()",
    ("builtins", "bytearray"): "value.decode() of a text, else base64.b64encode(value).decode()",
    ("builtins", "memoryview"): "base64.b64encode(value).decode()",
    ("builtins", "complex"): "[value.real, value.imag]",
    ("builtins", "BaseException"): "str(value), or raise it",
    ("builtins", "coroutine"): "what it gives: await it",
}
"""What to return instead of a value, by the module and name of its type or of a base."""
_INSTEAD_BY_MEMBER = (
    ("model_dump", 'value.model_dump(mode="json")'),  # pydantic
    ("__dataclass_fields__", "dataclasses.asdict(value)"),
    ("__attrs_attrs__", "attrs.asdict(value)"),
    ("to_dicts", "value.to_dicts()"),  # polars
    ("to_dict", "value.to_dict()"),  # pandas
    ("tolist", "value.tolist()"),  # numpy, torch, array
)
"""The same by a member of its type, for types of packages that may not be installed."""


def instead(kind: type) -> str:
    """What to return instead of a value of this type. It reads only the type: a value may do
    anything when it is read."""
    bases = type.mro(kind)
    for base in bases:
        if found := _INSTEAD.get((base.__module__, base.__name__)):
            return found
    for member, found in _INSTEAD_BY_MEMBER:
        if any(member in vars(base) for base in bases):
            return found
    return "text, a number, true, false, None, a list or a dict"


def _kind_at(value: Any, path: Path) -> type | None:
    """The type of the value at `path`, if JSON does not have it."""
    for step in path:
        value = _unmasked(value)[1][step]
    return type(value) if _unmasked(value)[0] is object and value is not None else None


def plain(value: Any) -> Any:
    """A copy of a value that `is_json`, in plain types."""
    return orjson.loads(_written(value))


def _written(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError:  # a key that is a subclass of str, such as a StrEnum
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)


_KINDS = frozenset({str, int, float, bool, dict, list, type(None)})


_BASES: tuple[tuple[type, type, Callable[[Any], Any]], ...] = (
    (str, str, lambda item: "".join((item,))),
    (int, int, int.__index__),
    (float, float, float.__float__),
    (dict, dict, lambda item: dict(zip(_some(item), _some(item.values()), strict=False))),
    (list, list, lambda item: _some(item)),
    (tuple, list, lambda item: _some(item)),
)


def _some(items: Iterable[Any]) -> list[Any]:
    """At most one more than can be stored: the iterator of a subclass may never end."""
    return list(islice(items, MAX_BYTES + 1))


def _unmasked(item: Any) -> tuple[type, Any]:
    """The JSON type of a subclass, such as a `StrEnum` or an `OrderedDict`, and the value in that
    type."""
    for base, kind, read in _BASES:
        if issubclass(type(item), base):  # not `isinstance`, which calls the item
            return kind, read(item)
    return object, item


def _plain(item: Any) -> Any:
    """Subclasses, which orjson does not write by itself."""
    kind, value = _unmasked(item)
    if kind is object:
        raise TypeError(f"{type(item).__name__} is no JSON value")
    return value


def _fault(item: Any, nul: bool) -> str | None:
    """What is wrong with one value itself, not with its members."""
    if item is None or isinstance(item, bool | dict | list):
        return None
    if isinstance(item, str):
        if not _encodable(item):
            return "contains a lone surrogate, which is no valid text"
        return None if nul or "\0" not in item else "contains a NUL character; it cannot be stored"
    if isinstance(item, int):
        if MIN_INT <= item <= MAX_INT:
            return None
        return f"{shown(item)} does not fit into 64 bits; write it as text"
    if isinstance(item, float):
        return None if isfinite(item) else f"{item} is not a JSON number; numbers are finite"
    return f"{shown(item)} is not a JSON value: give {instead(type(item))}"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
