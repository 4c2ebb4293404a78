"""Outputs of a node's parents as its handler reads them: each when it is first asked for.

Small ones are there at once, in a plain dict. Beyond `INLINE_BYTES` it is `Inputs`, a dict whose
values are read on first use, one parent at a time or, for a handler that goes through all of them,
in parts. What a node reads and what the nodes of one worker hold together is bounded.

What it must not know: where outputs are kept; `Outputs` says that.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from dovetail.core.effects import COMPLETED
from dovetail.core.errors import RetryableError
from dovetail.core.outputs import INLINE_BYTES, MAX_INPUT_BYTES, SETTING, check_room
from dovetail.engine.ports import Task

WORKER_SHARE = 8
"""So many times what one node may read is what all nodes of a worker may hold together."""
ROOM_SECONDS = 30.0
"""For which a handler in a thread waits until others have given back what they read."""


class ParentOutputs(Protocol):
    """The outputs of one node's parents."""

    def names(self) -> Sequence[str]:
        """The parents that have an output, in the order of the definition."""
        ...

    def texts(self, names: Sequence[str], read: int, limit: int) -> Iterator[tuple[str, bytes]]:
        """These outputs as JSON. Raises a `PermanentError` of type `too_large` if they do not fit
        into the limit beside the bytes that were read before."""
        ...


class OutputSource(ParentOutputs, Protocol):
    """Where that is which did not travel with a task: its inputs, and the params of its run."""

    def params(self) -> dict[str, Any]: ...


class InputBudget:
    """What the nodes of one worker hold of their parents' outputs."""

    def __init__(self, limit: int = MAX_INPUT_BYTES) -> None:
        self.limit = limit
        """Of one node."""
        self._most = WORKER_SHARE * limit
        self._held = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            # The event loop may not wait for other handlers: it is what they need to end.
            if not self._has_room(size) and (
                _in_a_loop()
                or not self._changed.wait_for(lambda: self._has_room(size), ROOM_SECONDS)
            ):
                raise RetryableError(
                    f"the nodes of this worker hold {self._held:,} bytes of their parents' outputs "
                    f"and {size:,} more do not fit: together they may hold {WORKER_SHARE} times "
                    f"{SETTING} ({self._most:,}). Run fewer nodes at a time on it "
                    f"(DOVETAIL_CONCURRENCY), or raise {SETTING}",
                    after=1.0,
                    type="inputs_busy",
                )
            self._held += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._held + size <= self._most


class _Unread:
    """Stands in the dict for an output that was not asked for yet."""

    def __repr__(self) -> str:
        return "<not read yet>"


UNREAD: Any = _Unread()
Seen = Callable[[str, Any], None]


class Inputs(dict[str, Any]):
    """Outputs of the parents by id. Names are there; a value is read when it is first asked for.

    It is a dict, so that whatever takes a dict takes it. Code that reads a dict's memory without
    asking it (`orjson.dumps`, pydantic) finds values that were not read, and refuses them: give
    such code `dict(ctx.inputs)`.
    """

    __slots__ = ("_budget", "_held", "_lock", "_seen", "_source")

    def __init__(
        self,
        names: Iterable[str],
        source: ParentOutputs,
        budget: InputBudget,
        seen: Seen | None = None,
    ) -> None:
        """`seen` is told what was read."""
        super().__init__(dict.fromkeys(names, UNREAD))
        self._source = source
        self._budget = budget
        self._seen = seen
        self._held = 0
        self._lock = threading.RLock()

    def __del__(self) -> None:
        if self._held:
            self._budget.give_back(self._held)

    # ── one value ────────────────────────────────────────────────────────────────────────

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is UNREAD:
            self._read([name])
            value = super().__getitem__(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (that would be ourselves)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self[name]
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        for name in reversed(self):
            return name, self.pop(name)
        raise KeyError("ctx.inputs is empty")

    # ── all of them ──────────────────────────────────────────────────────────────────────

    # Without one of its own, `dict(…)`, `{**…}` and `f(**…)` would copy what is not read yet.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self) -> Any:
        return self._whole().items()

    def values(self) -> Any:
        return self._whole().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __ne__(self, other: object) -> bool:
        return self.copy() != other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    def _whole(self) -> Any:
        """As what it is a subclass of, once every value is there."""
        with self._lock:
            if unread := [name for name, value in super().items() if value is UNREAD]:
                self._read(unread)
        return super()

    def _read(self, names: Sequence[str]) -> None:
        with self._lock:
            unread = [name for name in names if super(Inputs, self).get(name) is UNREAD]
            limit = self._budget.limit
            for name, text in self._source.texts(unread, self._held, limit):
                self._budget.take(len(text))
                self._held += len(text)
                value = orjson.loads(text)
                if self._seen is not None:
                    self._seen(name, value)
                super().__setitem__(name, value)


class _InProcess:
    """Of a run that is in memory here: its outputs are referred to, and copied when read."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self._outputs = outputs

    def names(self) -> Sequence[str]:
        return list(self._outputs)

    def texts(self, names: Sequence[str], read: int, limit: int) -> Iterator[tuple[str, bytes]]:
        sizes: dict[str, int] = {}
        for name in names:
            text = orjson.dumps(self._outputs[name])
            sizes[name] = len(text)
            check_room(read, sizes, limit)
            yield name, text


def inputs_of(
    task: Task,
    elsewhere: Callable[[Task], OutputSource] | None,
    budget: InputBudget,
    seen: Seen | None,
    seen_names: Callable[[Iterable[str]], None] | None,
) -> dict[str, Any]:
    """What a handler gets as `ctx.inputs`. `elsewhere` says where those are that did not travel."""
    given = task.source
    if isinstance(given, dict):
        if budget.limit < INLINE_BYTES:
            check_room(
                0, {name: len(orjson.dumps(one)) for name, one in given.items()}, budget.limit
            )
        return _seen_at_once(given, seen, seen_names)
    source: ParentOutputs
    if given is None:
        assert elsewhere is not None, "a worker that takes such tasks can read them"  # noqa: S101
        source = elsewhere(task)
    else:
        run, place, _ = given
        parents = [(run.graph.nodes[i].id, run.nodes[i]) for i in run.graph.nodes[place].parents]
        outputs = {name: node.output for name, node in parents if node.status is COMPLETED}
        small = _copied_if_small(outputs, min(INLINE_BYTES, budget.limit))
        if small is not None:
            return _seen_at_once(small, seen, seen_names)
        source = _InProcess(outputs)
    names = source.names()
    if seen_names is not None:
        seen_names(names)
    return Inputs(names, source, budget, seen)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _copied_if_small(outputs: Mapping[str, Any], most: int) -> dict[str, Any] | None:
    texts: dict[str, bytes] = {}
    for name, output in outputs.items():
        texts[name] = text = orjson.dumps(output)
        most -= len(text)
        if most < 0:
            return None
    return {name: orjson.loads(text) for name, text in texts.items()}


def _seen_at_once(
    inputs: dict[str, Any], seen: Seen | None, seen_names: Callable[[Iterable[str]], None] | None
) -> dict[str, Any]:
    """Whoever is given a plain dict may have read all of it."""
    if seen_names is not None:
        seen_names(inputs)
    if seen is not None:
        for name, value in inputs.items():
            seen(name, value)
    return inputs
