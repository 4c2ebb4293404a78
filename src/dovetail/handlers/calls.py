"""Turns tasks into calls of handlers: checks the config, builds the context, seals the output.

Secrets end here: outputs, errors and progress are redacted.

Inputs are the outputs of a node's parents, as its handler reads them. Up to `INLINE_BYTES` they are
a plain dict. Larger ones are `Inputs`, a dict whose values are read on first use: one parent at a
time or, for a handler that iterates over all, in parts. There are limits on what a node reads and
on what all nodes of a worker hold.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from dovetail.core.caching import (
    INPUT,
    NAMES,
    SECRETS,
    VERSION,
    Caching,
    digest_of,
    names_digest,
    secrets_digest,
)
from dovetail.core.conversion import encode_rich
from dovetail.core.effects import COMPLETED
from dovetail.core.errors import DovetailError, PermanentError, RetryableError, SecretInKey
from dovetail.core.items import node_id_of
from dovetail.core.outputs import INLINE_BYTES, MAX_INPUT_BYTES, SETTING, check_room
from dovetail.core.redaction import Redactor
from dovetail.core.templates import MAX_CONFIG_SIZE, render_deferred, secrets_read
from dovetail.core.values import MAX_BYTES, NotJson, encode
from dovetail.engine.ports import OnLines, Report, Task
from dovetail.handlers.context import Context, TrackedContext, unread
from dovetail.handlers.failure import describe
from dovetail.handlers.log_capture import CURRENT, ENDED, NO_LOG, WORKER_LOGGER, LogRules
from dovetail.handlers.registry import Handler, Registry

# ── inputs ───────────────────────────────────────────────────────────────────────────────

WORKER_SHARE = 8
"""All nodes of a worker may hold this many times the limit of one node."""
ROOM_SECONDS = 30.0
"""How long a handler in a thread waits for other handlers to release what they hold."""


class ParentOutputs(Protocol):
    """The outputs of one node's parents."""

    def names(self) -> Sequence[str]:
        """The parents that have an output, in the order of the definition."""
        ...

    def texts(self, names: Sequence[str], read: int, limit: int) -> Iterator[tuple[str, bytes]]:
        """These outputs as JSON. Raises a `PermanentError` of type `too_large` if they exceed the
        limit together with the `read` bytes."""
        ...


class OutputSource(ParentOutputs, Protocol):
    """The source of what is not in a task: its inputs, and the params of its run."""

    def params(self) -> dict[str, Any]: ...


class InputBudget:
    """How much the nodes of one worker hold of their parents' outputs."""

    def __init__(self, limit: int = MAX_INPUT_BYTES) -> None:
        self.limit = limit
        """Of one node."""
        self._most = WORKER_SHARE * limit
        self._held = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            # The event loop must not wait for other handlers: they need it to end.
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
    """The value in the dict of an output that was not read yet."""

    def __repr__(self) -> str:
        return "<not read yet>"


UNREAD: Any = _Unread()
Seen = Callable[[str, Any], None]


class Inputs(dict[str, Any]):
    """Outputs of the parents by id; a value is read on first use.

    It is a dict, for code that needs one. Code that reads the memory of a dict directly
    (`orjson.dumps`, pydantic) finds unread values and refuses them: pass `dict(ctx.inputs)` to it.
    """

    __slots__ = ("_budget", "_held", "_lock", "_seen", "_source")

    def __init__(
        self,
        names: Iterable[str],
        source: ParentOutputs,
        budget: InputBudget,
        seen: Seen | None = None,
    ) -> None:
        """`seen` is called with each value that is read."""
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

    # Without this method, `dict(…)`, `{**…}` and `f(**…)` would copy unread values.
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
        """The plain dict, with all values read."""
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
    """The outputs of a run in this process; copied when read."""

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
    """The `ctx.inputs` of a task. `elsewhere` gives the source of inputs that a task lacks."""
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
        run, index, *_ = given
        parents = [(run.graph.nodes[i].id, run.nodes[i]) for i in run.graph.nodes[index].parents]
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


def _copied_if_small(outputs: Mapping[str, Any], max_bytes: int) -> dict[str, Any] | None:
    texts: dict[str, bytes] = {}
    for name, output in outputs.items():
        texts[name] = text = orjson.dumps(output)
        max_bytes -= len(text)
        if max_bytes < 0:
            return None
    return {name: orjson.loads(text) for name, text in texts.items()}


def _seen_at_once(
    inputs: dict[str, Any], seen: Seen | None, seen_names: Callable[[Iterable[str]], None] | None
) -> dict[str, Any]:
    """All of a plain dict counts as read."""
    if seen_names is not None:
        seen_names(inputs)
    if seen is not None:
        for name, value in inputs.items():
            seen(name, value)
    return inputs


_NO_NAMES: frozenset[str] = frozenset()

# ── calls ────────────────────────────────────────────────────────────────────────────────


class RegistryCalls:
    def __init__(
        self,
        registry: Registry,
        *,
        secrets: Mapping[str, str] | None = None,
        sensitive: Mapping[str, str] | None = None,
        max_config_bytes: int = MAX_CONFIG_SIZE,
        max_output_bytes: int = MAX_BYTES,
        max_input_bytes: int = MAX_INPUT_BYTES,
        outputs_as_text: bool = False,
        elsewhere: Callable[[Task], OutputSource] | None = None,
        log_rules: LogRules = NO_LOG,
    ) -> None:
        """`sensitive` are values beside the secrets that are redacted, such as the API's tokens.
        `elsewhere` gives the source of inputs that are not in a task. With `log_rules` attempts
        have logs.

        With `outputs_as_text` an output may be JSON text, for a caller that only stores it.
        """
        self._registry = registry
        self._secrets = dict(secrets or {})
        self._max_config_bytes = max_config_bytes
        self.max_output_bytes = max_output_bytes
        self._budget = InputBudget(max_input_bytes)
        self._elsewhere = elsewhere
        self.log_rules = log_rules
        self.redactor = Redactor({**self._secrets, **(sensitive or {})})
        self.outputs_as_text = outputs_as_text and not self.redactor

    def open(self, task: Task, report: Report, on_lines: OnLines = unread) -> HandlerCall:
        try:
            handler = self._registry.get(task.handler)
            config = task.config
            names = _NO_NAMES
            if task.deferred:
                # Checked again: a definition may be older than the rule, a message may be forged.
                config = render_deferred(
                    config,
                    task.deferred,
                    self._secrets,
                    self._max_config_bytes,
                    handler=task.handler,
                    fields=handler.secrets,
                )
                names = secrets_read(task.deferred)
            prepared = handler.prepare(config)
        except DovetailError as problem:
            # Not retried: the same definition would fail again on this worker.
            described = describe(problem, self.redactor.redact_shown)
            message = f"node '{task.node_id}': {described['message']}"
            raise _refusal(message, described["type"], described) from None
        except BaseException as problem:  # the handler's own validator is broken
            described = describe(problem, self.redactor.redact_shown)
            message = f"node '{task.node_id}': its config could not be checked: "
            message += f"{described['type']}: {described['message']}"
            raise _refusal(message, "invalid_config", described) from None
        reads = None if task.cache is None else self._reads(task, handler)
        if reads is None:
            context: Context = TaskContext(self, task, handler, names, report, on_lines)
        else:
            context = self._tracked(task, handler, names, report, on_lines, reads)
        return HandlerCall(self, handler, prepared, context, reads)

    def _tracked(
        self,
        task: Task,
        handler: Handler,
        names: frozenset[str],
        report: Report,
        on_lines: OnLines,
        reads: Reads,
    ) -> TrackedContext:
        context = TrackedContext(
            run_id=task.run_id,
            node_id=_node_of(task),
            item=task.item,
            index=task.item_index,
            attempt=task.token.attempt,
            epoch=task.token.epoch,
            params=self.params_of(task),
            inputs=partial(self.inputs_of, task, reads),
            secrets=self.secrets_of(handler),
            secret_names=names,
            report_progress=partial(report, task),
            redactor=self.redactor,
            seen=reads.saw,
            log_rules=self.log_rules,
            on_lines=on_lines,
        )
        context.on_decided = reads.decide_by_config
        return context

    def _reads(self, task: Task, handler: Handler) -> Reads:
        digest = partial(secrets_digest, self._secrets)
        return Reads(handler.version, digest, config_has_secrets=bool(task.deferred))

    def params_of(self, task: Task) -> dict[str, Any] | Callable[[], dict[str, Any]]:
        if task.params is not None:
            return task.params
        assert self._elsewhere is not None, "a worker that takes such tasks can read them"  # noqa: S101
        return self._elsewhere(task).params

    def secrets_of(self, handler: Handler) -> Mapping[str, str]:
        return self._secrets if handler.secrets else _NotDeclared(handler.name)

    def inputs_of(self, task: Task, reads: Reads | None) -> dict[str, Any]:
        if reads is None:
            return inputs_of(task, self._elsewhere, self._budget, None, None)
        return inputs_of(task, self._elsewhere, self._budget, reads.saw_input, reads.saw_names)


def _refusal(message: str, kind: str, described: dict[str, Any]) -> PermanentError:
    """The error of a call that cannot be opened, because of the error that is described."""
    refusal = PermanentError(message, type=kind)
    refusal.details = {n: described[n] for n in ("where", "traceback") if n in described}
    return refusal


def _node_of(task: Task) -> str:
    return task.node_id if task.item_index is None else node_id_of(task.node_id)


class Reads:
    """What the handler of a cached node has read, as digests of the values."""

    __slots__ = ("_config_has_secrets", "_facts", "_is_decided", "_secrets")

    def __init__(
        self, version: int, secrets: Callable[[], str], *, config_has_secrets: bool
    ) -> None:
        self._facts = {VERSION: str(version)}
        self._secrets = secrets
        self._is_decided = False
        self._config_has_secrets = config_has_secrets
        if config_has_secrets:
            self.saw(SECRETS, None)

    def decide_by_config(self) -> None:
        self._is_decided = True

    @property
    def facts(self) -> dict[str, str]:
        """The digests that a cache lookup compares. The config itself may have secrets."""
        if not self._is_decided:
            return dict(self._facts)
        kept = (VERSION, SECRETS) if self._config_has_secrets else (VERSION,)
        return {what: self._facts[what] for what in kept}

    def saw(self, what: str, value: Any) -> None:
        if what not in self._facts:
            self._facts[what] = self._secrets() if what == SECRETS else digest_of(value)

    def saw_input(self, name: str, value: Any) -> None:
        self.saw(INPUT + name, value)

    def saw_names(self, names: Iterable[str]) -> None:
        self._facts[NAMES] = names_digest(names)


class _NotDeclared(dict[str, str]):
    """The `ctx.secrets` of a handler that does not declare that it takes secrets: empty."""

    __slots__ = ("_handler",)

    def __init__(self, handler: str) -> None:
        super().__init__()
        self._handler = handler

    def __missing__(self, name: str) -> str:
        raise KeyError(
            f"the handler '{self._handler}' gets no secrets, as it does not declare that it takes "
            f"them: @handler({self._handler!r}, secrets=True)"
        )


class TaskContext(Context):
    """The context of a claimed task, made for each start: it reads from the task what handlers
    seldom ask for."""

    __slots__ = ("_calls", "_handler", "_task", "_tell")

    def __init__(
        self,
        calls: RegistryCalls,
        task: Task,
        handler: Handler,
        names: frozenset[str],
        report: Report,
        on_lines: OnLines,
    ) -> None:
        self._calls, self._task, self._handler, self._tell = calls, task, handler, report
        self.run_id, self.node_id = task.run_id, task.node_id
        if task.item_index is not None:
            self.node_id = _node_of(task)
        self.epoch, self.attempt, _ = task.token
        self.secret_names = names
        self._log_rules, self._redactor, self._on_lines = calls.log_rules, calls.redactor, on_lines
        self._seen = self._params = self._inputs = self._log = self._lines = self._event = None
        self._cancelled = False

    @property
    def _given_item(self) -> Any:
        return self._task.item

    @property
    def _given_index(self) -> int | None:  # type: ignore[override]
        return self._task.item_index

    @property
    def _given_params(self) -> Any:  # type: ignore[override]
        return self._calls.params_of(self._task)

    @property
    def _given_inputs(self) -> Any:  # type: ignore[override]
        return self._calls.inputs_of(self._task, None)

    @property
    def secrets(self) -> Mapping[str, str]:  # type: ignore[override]  # a handler only reads it
        return self._calls.secrets_of(self._handler)

    def _report(self, fraction: float, message: str) -> None:
        self._tell(self._task, fraction, message)


class HandlerCall:
    __slots__ = ("_calls", "_config", "_context", "_handler", "_reads", "is_async", "is_logged")

    def __init__(
        self,
        calls: RegistryCalls,
        handler: Handler,
        config: Any,
        context: Context,
        reads: Reads | None,
    ) -> None:
        self._calls = calls
        self._handler = handler
        self._config = config
        self._context = context
        self._reads = reads
        self.is_async = handler.is_async
        self.is_logged = calls.log_rules is not NO_LOG

    def begin(self, task: Task) -> Any:
        if self.is_logged:
            CURRENT.set(self._context)
        return self._handler.fn(self._config, self._context)

    def cancel(self) -> None:
        self._context.cancel()

    def warn(self, message: str) -> None:
        if (log := self._context._open_log()) is not None:
            log.add("WARNING", WORKER_LOGGER, message)

    def end_log(self) -> None:
        self._context._end_log()

    def seal(self, task: Task, output: Any) -> Any:
        """A JSON copy, so that the handler cannot change it any more."""
        if self._context._lines is None:  # as `_end_log`, without the call: every node comes here
            self._context._lines = ENDED
        else:
            self._context._end_log()
        try:
            text = self._encoded(output)
        except NotJson as problem:
            kind = "too_large" if problem.code == "too_large" else "invalid_output"
            message = self._calls.redactor.redact_shown(problem.of_output())
            raise PermanentError(message, type=kind) from None
        except BaseException as problem:  # a type of the handler's own that raises when read
            described = self.describe(problem)
            message = (
                f"the handler's output cannot be read: {described['type']}: {described['message']}"
            )
            raise PermanentError(message, type="invalid_output") from problem
        if self._calls.outputs_as_text:
            return orjson.Fragment(text)
        try:
            return self._calls.redactor.redact(orjson.loads(text))
        except SecretInKey as problem:
            message = f"the output cannot be stored: {problem}"
            message = self._calls.redactor.redact_shown(message)
            raise PermanentError(message, type=problem.type) from None

    def _encoded(self, output: Any) -> bytes:
        try:
            return encode(output, max_bytes=self._calls.max_output_bytes)
        except NotJson as problem:
            if problem.code == "too_large":
                raise
        return encode_rich(output, max_bytes=self._calls.max_output_bytes)

    def caching(self, task: Task) -> Caching | None:
        if task.cache is None or self._reads is None:
            return None
        return task.cache._replace(facts=self._reads.facts)

    def describe(self, error: BaseException) -> dict[str, Any]:
        self._context._end_log()
        return describe(error, self._calls.redactor.redact_shown)
