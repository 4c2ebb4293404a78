"""Encodes outputs that are richer than JSON, the way pydantic's JSON mode writes them.

Accepted beside JSON are pydantic models, dataclasses, datetimes, dates, UUIDs, Decimals, enums and
sets, nested as deep as JSON may be. An output that is JSON already never comes here. Types are
recognised by reading the type only: an object may do anything when it is read.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from dovetail.core.errors import Path, format_path, one_line
from dovetail.core.values import MAX_BYTES, MAX_DEPTH, NotJson, encode


def encode_rich(value: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """An output that `encode` refused as JSON text. Raises `NotJson` with the first fault, or if it
    is too large."""
    # What is not converted stays in its place, and `encode` reports it with its path.
    return encode(_Conversion(max_bytes).of(value, (), 0), max_bytes=max_bytes)


_LEAVES = frozenset(
    {("datetime", "datetime"), ("datetime", "date"), ("uuid", "UUID"), ("decimal", "Decimal")}
)
"""By module and name: the core imports no module that could read a clock."""
_ENUM = ("enum", "Enum")
_PLAIN = (str, int, float, type(None))
_SETS = (set, frozenset)


class _Conversion:
    """Copies a value into JSON types, within bounds. It does not convert what it does not know."""

    def __init__(self, max_values: int) -> None:
        self._left = max_values

    def of(self, item: Any, path: Path, depth: int) -> Any:
        kind = type(item)
        if issubclass(kind, _PLAIN):
            return item
        if depth > MAX_DEPTH:
            message = f"is nested deeper than {MAX_DEPTH} levels"
            raise NotJson(f"{format_path(path)}: {message}", path, "too_large")
        if issubclass(kind, dict):
            return self._of_dict(item, path, depth)
        if issubclass(kind, list | tuple):
            return [self.of(one, (*path, i), depth + 1) for i, one in enumerate(self._some(item))]
        if issubclass(kind, _SETS):
            return _ordered([self.of(one, path, depth + 1) for one in self._some(item)])
        names = {(base.__module__, base.__name__) for base in type.mro(kind)}
        if names & _LEAVES:
            return _written(item, path)
        if _ENUM in names:
            return self.of(item.value, path, depth + 1)
        if _declares(kind, "__pydantic_serializer__"):
            self._refuse_iterators(item, path, depth)
            return _written(item, path)
        if _declares(kind, "__dataclass_fields__"):
            fields = {name: getattr(item, name) for name in _field_names(kind)}
            return self._of_dict(fields, path, depth)
        return item

    def _of_dict(self, item: dict[Any, Any], path: Path, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in self._some(zip(item, item.values(), strict=False)):
            name = key if issubclass(type(key), str) else self._key(key, path)
            if name in found:
                message = f"two keys are both '{one_line(str(name))}' as JSON"
                raise NotJson(f"{format_path(path)}: {message}" if path else message, path)
            step = name if issubclass(type(name), str) else "?"
            found[name] = self.of(value, (*path, step), depth + 1)
        return found

    def _key(self, key: Any, path: Path) -> Any:
        """The text of a UUID, date, Decimal or enum; other keys stay, and are refused."""
        if issubclass(type(key), _PLAIN):
            return key
        text = self.of(key, path, MAX_DEPTH)
        return text if issubclass(type(text), str) else key

    def _some(self, items: Any) -> list[Any]:
        found = list(islice(items, self._left + 1))
        self._left -= len(found)
        if self._left < 0:
            raise NotJson("has more values than can be stored", (), "too_large")
        return found

    def _refuse_iterators(self, item: Any, path: Path, depth: int) -> None:
        """pydantic reads an iterator inside a model to its end, and it may have none."""
        kind = type(item)
        if depth > MAX_DEPTH or issubclass(kind, _PLAIN):
            return
        if _declares(kind, "__next__"):
            raise NotJson(f"{format_path(path)}: is an iterator", path, kind=kind)
        inside: list[tuple[Any, Any]] = []
        if _declares(kind, "__pydantic_serializer__"):
            fields = getattr(kind, "__pydantic_fields__", {})
            held = {**vars(item), **(getattr(item, "__pydantic_extra__", None) or {})}
            inside = [
                (name, one)
                for name, one in held.items()
                if getattr(fields.get(name), "exclude", None) is not True
            ]
        elif issubclass(kind, dict):
            inside = list(zip(item, item.values(), strict=False))
        elif issubclass(kind, list | tuple | set | frozenset):
            inside = list(enumerate(item))
        for step, one in self._some(inside):
            name = step if isinstance(step, str | int) else "?"
            self._refuse_iterators(one, (*path, name), depth + 1)


def _declares(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in type.mro(kind))


def _field_names(kind: type) -> list[str]:
    from dataclasses import fields

    return [field.name for field in fields(kind)]


def _written(item: Any, path: Path) -> Any:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        # Without this a model with a value of a wrong type would warn for each of them.
        dump = getattr(type(item), "__pydantic_serializer__", None)
        if dump is not None:
            return dump.to_python(item, mode="json", warnings=False)
        return to_jsonable_python(item)
    except PydanticSerializationError as error:
        where = format_path(("output", *path))
        raise NotJson(
            f"{where} cannot be written as JSON by pydantic ({one_line(str(error), 200)}): "
            "return values of types that JSON has, or give the field a serializer",
            path,
        ) from None


def _ordered(items: list[Any]) -> list[Any]:
    """The members of a set, sorted if they are all text or all numbers: the order of a set differs
    from process to process."""
    for kinds in ((str,), (int, float)):
        if all(issubclass(type(item), kinds) for item in items):
            return sorted(items)
    return items
