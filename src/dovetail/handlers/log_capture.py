"""Collects what a handler logs and prints, for the log of its attempt.

A context variable names the attempt whose handler runs. It is set where the handler is called, and
that is all that a handler pays which logs nothing: the log itself is made with its first line. The
hooks on `logging`, structlog, `sys.stdout` and `sys.stderr`, on threads and thread pools only act
while that variable is set. They are there while an engine is open, and are removed with the last
one. docs/decisions/0046-logs-of-handlers.md has the reasons.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from dovetail.core.log_buffer import (
    DEFAULT_LOG_BYTES,
    MAX_HELD_CHARS,
    MAX_KEY_BYTES,
    AttemptKey,
    LogBuffer,
    byte_length,
    cut,
    fields_of,
    level_name,
    message_of,
    storable,
)
from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.core.redaction import Redactor

if TYPE_CHECKING:
    from dovetail.engine.ports import OnLines

HANDLER_LOGGER = "dovetail.handler"
"""Of `ctx.log`. All other loggers of Dovetail are about the engine, also inside a handler."""
WORKER_LOGGER = "dovetail.worker"
BLOCK_CHARS = 256 << 10
"""Printed text is redacted in pieces of this size, at line ends: one may be a gigabyte."""
BATCH_SECONDS = 0.002
"""Lines that are printed within this time are redacted together, and have one time."""
STREAM_LEVELS = {"stdout": "INFO", "stderr": "WARNING"}

# The fields of every record; all others were given as `extra`.
_OWN = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})


class LogRules(NamedTuple):
    """What is kept of logs."""

    level: int = logging.INFO
    """Of `logging` and structlog."""
    output: bool = True
    """What is printed is kept, too."""
    max_bytes: int = DEFAULT_LOG_BYTES


NO_LOG = LogRules(max_bytes=0)
"""Of attempts that have no log."""


class LogOwner(Protocol):
    """An attempt whose handler runs: its context, whose other names are for the handler."""

    @property
    def _log_rules(self) -> LogRules: ...

    def _open_log(self) -> AttemptLog | None:
        """Its log, made at the first call; None once the attempt has ended."""
        ...


CURRENT: ContextVar[LogOwner | None] = ContextVar("dovetail_attempt", default=None)
"""The attempt whose handler runs here."""


class _Part:
    """What was printed last: whole lines, and the beginning of a line."""

    __slots__ = ("since", "text", "unseen")

    def __init__(self) -> None:
        self.text = ""
        self.since = 0.0
        """When the text began."""
        self.unseen = 0
        """Bytes of the line behind the text."""

    def hold(self, text: str) -> None:
        room = MAX_HELD_CHARS - len(self.text)
        if len(text) > room:
            self.unseen += byte_length(storable(text[room:]))
            text = text[:room]
        self.text += text

    def has_room(self, text: str) -> bool:
        return not self.unseen and len(self.text) + len(text) <= MAX_HELD_CHARS

    def take(self) -> tuple[str, int]:
        found = self.text, self.unseen
        self.text, self.unseen = "", 0
        return found

    def __bool__(self) -> bool:
        return bool(self.text)


class AttemptLog:
    """The log of an attempt, from any thread."""

    def __init__(
        self,
        attempt: AttemptKey,
        redactor: Redactor,
        rules: LogRules,
        on_lines: OnLines,
    ) -> None:
        self._ids: dict[str, str | int] = {
            "run_id": attempt.run_id,
            "node_id": attempt.node,
            "attempt": attempt.attempt,
        }
        """What `ctx.log` adds to each record; a line of the log has them anyway."""
        if attempt.item is not None:
            self._ids["item"] = attempt.item
        self._redact: Callable[[Any], Any] = redactor.redact_shown
        self._log_rules = rules
        self._on_lines = on_lines
        self._buffer = LogBuffer(attempt, rules.max_bytes)
        self._parts: dict[str, _Part] = {}
        self.is_closed = False
        self._told = False
        # A signal, or the end of an object, may log while this thread is inside.
        self._lock = threading.RLock()

    # ── lines ────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        level: str,
        logger: str,
        message: str,
        fields: Mapping[Any, Any] | None = None,
        at: float | None = None,
    ) -> bool:
        """Add one line; False if the attempt has ended."""
        shown = fields_of(fields, self._redact) if fields else None
        name = cut(self._redact(storable(logger)[:MAX_HELD_CHARS]), max_bytes=MAX_KEY_BYTES)
        text = message_of(message, self._redact)
        line = LogLine(time.time() if at is None else at, level, name, text, shown)
        with self._lock:
            if self.is_closed:
                return False
            if self._parts:
                self._print_held_lines()
            self._buffer.add(line)
            untold, self._told = not self._told, True
        if untold:
            self._on_lines(self)
        return True

    def record(self, record: logging.LogRecord) -> bool:
        """Add a record of `logging`."""
        extra = {name: record.__dict__[name] for name in record.__dict__.keys() - _OWN}
        for name in extra.keys() & self._ids.keys():
            if extra[name] == self._ids[name]:
                del extra[name]
        words = [_words(record)]
        if record.exc_info and record.exc_info[0] is not None:
            words.append("".join(traceback.format_exception(*record.exc_info)).rstrip())
        elif record.exc_text:
            words.append(record.exc_text)
        if record.stack_info:
            words.append(record.stack_info)
        text = "\n".join(words)
        return self.add(level_name(record.levelno), record.name, text, extra, record.created)

    def printed(self, stream: str, text: str) -> None:
        """Add what was printed, by line; the rest of it waits for its end."""
        text = storable(text)
        now = time.time()
        with self._lock:
            if self.is_closed:
                return
            part = self._parts.get(stream)
            if part is None:
                part = self._parts[stream] = _Part()
            if len(self._parts) > 1:
                self._print_held_lines(but=stream)
            has_room = part.has_room(text)
            if part.text and (not has_room or now - part.since > BATCH_SECONDS):
                self._print_whole_lines(stream, part)
                has_room = part.has_room(text)
            if not part.text:
                part.since = now
            # Lines wait for lines that follow at once: to redact them together is much faster, and
            # a secret may go over several lines. `print` writes each word by itself.
            if not has_room and (end := text.rfind("\n")) >= 0:
                self._print_lines(stream, part, text[:end])
                text = text[end + 1 :]
            part.hold(text)
            untold, self._told = not self._told, True
        if untold:
            self._on_lines(self)

    def _print_held_lines(self, but: str = "") -> None:
        for stream, part in self._parts.items():
            if stream != but:
                self._print_whole_lines(stream, part)

    def _print_whole_lines(self, stream: str, part: _Part) -> None:
        """Lines whose end was printed; the beginning of the next one stays."""
        lines, line_end, rest = part.text.rpartition("\n")
        if line_end:
            part.text = rest
            self._print_block(stream, lines, part.since)

    def _print_lines(self, stream: str, part: _Part, text: str) -> None:
        if part.unseen:
            first, line_end, text = text.partition("\n")
            part.hold(first)
            self._print_part(stream, part)
            if not line_end:
                return
        elif part:  # with what follows: a secret may go over several lines
            text = part.take()[0] + text
        at = 0
        while len(text) - at > BLOCK_CHARS:
            if self._buffer.keeps_newest_only and len(text) - at > 2 * self._log_rules.max_bytes:
                at = self._skip(text, at)
            end = text.rfind("\n", at, at + BLOCK_CHARS)
            if end < 0:  # one line
                end = text.find("\n", at + BLOCK_CHARS)
                end = len(text) if end < 0 else end
                held = text[at : at + MAX_HELD_CHARS]
                shown = cut(self._redact(held), byte_length(text[at + MAX_HELD_CHARS : end]))
                self._print_line(stream, shown, time.time())
            else:
                self._print_block(stream, text[at:end], time.time())
            at = end + 1
        if at <= len(text):
            self._print_block(stream, text[at:], time.time())

    def _skip(self, text: str, at: int) -> int:
        """Where the newest lines begin that can stay; lines before them are only counted."""
        end = text.rfind("\n", at, len(text) - self._log_rules.max_bytes)
        if end < 0:
            return at
        lines = text.count("\n", at, end) + 1
        self._buffer.skip(lines, byte_length(text[at:end]) - lines + 1)
        return end + 1

    def _print_block(self, stream: str, text: str, at: float) -> None:
        for line in self._redact(text).split("\n"):
            self._print_line(stream, cut(line), at)

    def _print_part(self, stream: str, part: _Part) -> None:
        text, unseen = part.take()
        self._print_line(stream, cut(self._redact(text), unseen), part.since)

    def _print_line(self, stream: str, text: str, at: float) -> None:
        self._buffer.add(LogLine(at, STREAM_LEVELS[stream], stream, text))

    def _open_log(self) -> AttemptLog | None:
        return None if self.is_closed else self

    # ── for the worker ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """The attempt has ended: later lines are not part of it."""
        self.is_closed = True

    def drain(self) -> Sequence[LogChunk]:
        """Lines that were not handed in yet; of an ended attempt with the last line's beginning."""
        with self._lock:
            self._print_held_lines()
            if self.is_closed:
                for stream, part in self._parts.items():
                    if part:
                        self._print_part(stream, part)
            self._told = False
            return self._buffer.take()

    @property
    def chunk_count(self) -> int:
        """Chunks that were drained, all in all."""
        return self._buffer.chunk_count

    @property
    def is_waiting(self) -> bool:
        """The beginning of a line waits for its end."""
        return any(self._parts.values())


def _nowhere(log: object) -> None:
    """Ignores lines."""


ENDED = AttemptLog(AttemptKey("", "", 0, 0), Redactor({}), NO_LOG, _nowhere)
"""Of every attempt that has ended without a line."""
ENDED.close()


class _Muted:
    """Stands for an attempt while an event that its log has already is also printed."""

    def __init__(self) -> None:
        self._log_rules = LogRules(level=sys.maxsize)

    def _open_log(self) -> None:
        return None


_MUTED = _Muted()


# ── logging ──────────────────────────────────────────────────────────────────────────────

# What the hooks call. Set again when they are installed: another library may have its own there.
_is_enabled = logging.Logger.isEnabledFor
_call_handlers = logging.Logger.callHandlers


def _hooked_is_enabled(self: logging.Logger, level: int) -> bool:
    if _is_enabled(self, level):
        return True
    owner = CURRENT.get()
    return owner is not None and _is_kept(self, level, owner)


def _hooked_call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
    owner = CURRENT.get()
    if owner is None:
        return _call_handlers(self, record)
    if _is_kept(self, record.levelno, owner):
        try:
            if log := owner._open_log():
                log.record(record)
        except Exception:  # noqa: S110  (a log is never in the way of a handler)
            pass
    if _is_enabled(self, record.levelno):  # as without this hook
        token = CURRENT.set(None)  # what prints it is not the handler
        try:
            _call_handlers(self, record)
        finally:
            CURRENT.reset(token)
    return None


def _is_kept(logger: logging.Logger | None, level: int, owner: LogOwner) -> bool:
    """The level of the log counts in place of the root logger's, other levels as they are set."""
    if level < owner._log_rules.level:
        return False
    if logger is not None and level <= logger.manager.disable:
        return False
    while logger is not None and logger.name != HANDLER_LOGGER:
        if logger.name == "dovetail":
            return False  # a logger of the engine
        if logger.parent is None:
            return True
        if logger.level:
            return level >= logger.level
        logger = logger.parent
    return True


def _words(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a slip in a log line must not fail the node
        return f"{record.msg} {record.args}"


# ── stdout and stderr ────────────────────────────────────────────────────────────────────


class CapturedStream:
    """Stands before a stream: hands what a handler prints to its log, and passes on the rest."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        owner = CURRENT.get()
        if owner is None or not isinstance(text, str):
            return self._stream.write(text)
        if owner._log_rules.output:
            # A log is never in the way of a handler.
            with suppress(Exception):
                if (log := owner._open_log()) is not None:
                    log.printed(self._name, text)
        token = CURRENT.set(None)  # the stream may be one that logs
        try:
            return self._stream.write(text)
        finally:
            CURRENT.reset(token)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def cover_streams() -> None:
    """Stand before streams that were replaced after the capture began, such as by a live view."""
    if _hooks.output:
        _cover("stdout")
        _cover("stderr")


def _cover(name: str) -> None:
    stream = getattr(sys, name)
    if stream is not None and not isinstance(stream, CapturedStream):
        setattr(sys, name, CapturedStream(stream, name))


def _uncover(name: str) -> None:
    """What another one has put before it stays: it then only passes on."""
    stream = getattr(sys, name)
    if isinstance(stream, CapturedStream):
        setattr(sys, name, stream._stream)


# ── threads ──────────────────────────────────────────────────────────────────────────────

_start_thread = threading.Thread.start
_submit = ThreadPoolExecutor.submit


def _hooked_start(self: threading.Thread) -> None:
    owner = CURRENT.get()
    if owner is not None:
        run = self.run

        def carried() -> None:
            self.__dict__.pop("run", None)
            CURRENT.set(owner)
            run()

        self.run = carried  # type: ignore[method-assign]
    _start_thread(self)


def _hooked_submit(self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    owner = CURRENT.get()
    if owner is None:
        return _submit(self, fn, *args, **kwargs)
    token = CURRENT.set(None)  # a thread of the pool begins without: it serves other attempts, too
    try:
        return _submit(self, _carried, owner, fn, args, kwargs)
    finally:
        CURRENT.reset(token)


def _carried(owner: LogOwner, fn: Any, args: Any, kwargs: Any) -> Any:
    token = CURRENT.set(owner)
    try:
        return fn(*args, **kwargs)
    finally:
        CURRENT.reset(token)


# ── structlog ────────────────────────────────────────────────────────────────────────────

_STRUCTLOG = "structlog._base"
_METHOD_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "err": logging.ERROR,
    "error": logging.ERROR,
    "failure": logging.ERROR,
    "exception": logging.ERROR,
    "fatal": logging.CRITICAL,
    "critical": logging.CRITICAL,
}
_NOT_FIELDS = frozenset(
    {"event", "level", "log_level", "level_number", "timestamp", "logger", "logger_name"}
    | {"exc_info", "exception", "stack", "stack_info", "_record", "_from_structlog", "_logger"}
    | {"_name", "positional_args"}
)
_TEXTS = ("exception", "stack")


def _hooked_proxy(original: Callable[..., Any]) -> Callable[..., Any]:
    def proxy_to_logger(
        self: Any, method_name: str, event: Any = None, *args: Any, **fields: Any
    ) -> Any:
        owner = CURRENT.get()
        if owner is None:
            return original(self, method_name, event, *args, **fields)
        level = _METHOD_LEVELS.get(method_name, logging.INFO)
        logger = self._logger if isinstance(self._logger, logging.Logger) else None
        target = self
        if not isinstance(owner, _Muted) and _is_kept(logger, level, owner):
            # Before the last processor, which makes a text of the event: processors before it may
            # have taken out what must stay private.
            steps = list(self._processors)
            steps.insert(max(0, len(steps) - 1), _Recorder(owner, level))
            with suppress(Exception):
                target = type(self)(self._logger, steps, self._context)
        token = CURRENT.set(_MUTED)
        try:
            return original(target, method_name, event, *args, **fields)
        finally:
            CURRENT.reset(token)

    proxy_to_logger.original = original  # type: ignore[attr-defined]
    return proxy_to_logger


class _Recorder:
    """A processor of structlog that adds its events to a log."""

    def __init__(self, owner: LogOwner, level: int) -> None:
        self._owner = owner
        self._level = level

    def __call__(self, logger: Any, method: str, event: Any) -> Any:
        with suppress(Exception):
            if log := self._owner._open_log():
                log.add(level_name(self._level), _name_of(logger, event), *_event_parts(event))
        return event


def _name_of(logger: Any, event: Any) -> str:
    named = event.get("logger") if isinstance(event, Mapping) else None
    return str(named or getattr(logger, "name", None) or "structlog")


def _event_parts(event: Any) -> tuple[str, dict[Any, Any] | None]:
    """Message and fields."""
    if not isinstance(event, Mapping):  # an earlier processor made a text of it
        return (event.decode(errors="replace") if isinstance(event, bytes) else str(event)), None
    words = [str(event.get("event", ""))]
    if (args := event.get("positional_args")) is not None:
        with suppress(Exception):
            words[0] %= args
    error = event.get("exc_info")
    if isinstance(error, BaseException):
        words.append("".join(traceback.format_exception(error)).rstrip())
    elif isinstance(error, tuple) and len(error) == 3 and error[0] is not None:
        words.append("".join(traceback.format_exception(*error)).rstrip())
    elif error and sys.exc_info()[0] is not None:
        words.append(traceback.format_exc().rstrip())
    words += [str(event[name]) for name in _TEXTS if isinstance(event.get(name), str)]
    fields = {key: value for key, value in event.items() if key not in _NOT_FIELDS}
    if not isinstance(event.get("exception"), str | None):  # a traceback as data
        fields["exception"] = event["exception"]
    return "\n".join(words), fields


def _hook_structlog(module: ModuleType) -> None:
    base = module.BoundLoggerBase
    if not hasattr(base._proxy_to_logger, "original"):
        base._proxy_to_logger = _hooked_proxy(base._proxy_to_logger)


def _unhook_structlog() -> None:
    if (module := sys.modules.get(_STRUCTLOG)) is not None:
        base = module.BoundLoggerBase
        base._proxy_to_logger = getattr(base._proxy_to_logger, "original", base._proxy_to_logger)


class _StructlogFinder(importlib.abc.MetaPathFinder):
    """Sets the hook when structlog is imported: to import it only for that takes too long."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _STRUCTLOG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if _hooks.engines:
                _hook_structlog(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ── all of it ────────────────────────────────────────────────────────────────────────────


_Hook = tuple[Any, str, Any, str]
"""Where it is set, under which name, the function, and the global that has what it replaces."""

_HOOKS: tuple[_Hook, ...] = (
    (logging.Logger, "isEnabledFor", _hooked_is_enabled, "_is_enabled"),
    (logging.Logger, "callHandlers", _hooked_call_handlers, "_call_handlers"),
    (threading.Thread, "start", _hooked_start, "_start_thread"),
    (ThreadPoolExecutor, "submit", _hooked_submit, "_submit"),
)


class _Hooks:
    """The hooks of this process: there while an engine is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finder = _StructlogFinder()
        self._buried: set[str] = set()
        """Hooks that another library has put its own before. They stay, and do nothing."""
        self.engines = 0
        self.output = 0
        """Engines that keep what is printed."""

    def install(self, rules: LogRules) -> None:
        with self._lock:
            self.engines += 1
            self.output += rules.output
            if self.engines == 1:
                self._set()
            cover_streams()

    def uninstall(self, rules: LogRules) -> None:
        with self._lock:
            self.engines -= 1
            self.output -= rules.output
            if not self.output:
                _uncover("stdout")
                _uncover("stderr")
            if not self.engines:
                self._remove()

    def _set(self) -> None:
        for place, name, hook, replaced in _HOOKS:
            if name not in self._buried:
                globals()[replaced] = getattr(place, name)
                setattr(place, name, hook)
        self._buried.clear()
        if (module := sys.modules.get(_STRUCTLOG)) is not None:
            _hook_structlog(module)
        else:
            sys.meta_path.insert(0, self._finder)

    def _remove(self) -> None:
        for place, name, hook, replaced in _HOOKS:
            if getattr(place, name) is hook:
                setattr(place, name, globals()[replaced])
            else:
                self._buried.add(name)
        _unhook_structlog()
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)


_hooks = _Hooks()


@contextmanager
def capturing(rules: LogRules) -> Iterator[None]:
    """Collect what handlers log and print, while this is open."""
    _hooks.install(rules)
    try:
        yield
    finally:
        _hooks.uninstall(rules)


def capture_for_good(rules: LogRules) -> None:
    """The same until this process ends."""
    _hooks.install(rules)


def _forget_attempt() -> None:
    """In a child process: its lines would stay in its copy of the log, and be lost."""
    CURRENT.set(None)


os.register_at_fork(after_in_child=_forget_attempt)
