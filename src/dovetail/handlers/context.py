"""The context of a handler: ids, params, inputs, secrets, log, progress and cancellation.

One is made for each start of a node, so it must be cheap: the logger, the cancel event, params and
inputs are made on first use. It does not know stores, queues or leases; the worker passes in
callables.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import orjson

from dovetail.core.caching import INDEX, ITEM, PARAMS, SECRETS
from dovetail.core.items import item_name
from dovetail.core.log_buffer import AttemptKey
from dovetail.core.redaction import Redactor
from dovetail.handlers.log_capture import (
    CURRENT,
    ENDED,
    HANDLER_LOGGER,
    NO_LOG,
    AttemptLog,
    LogRules,
)

if TYPE_CHECKING:  # an application that names `Context` need not load the engine
    from dovetail.engine.ports import HandlerLog, OnLines

Report = Callable[[float, str], None]

MAX_PROGRESS_CHARS = 1000
"""Of a progress message, which is one line for people."""

_NO_SECRETS: Mapping[str, str] = {}

# Guards the making and setting of cancel events: a handler in a thread may ask for the event while
# the loop sets it.
_CANCEL = threading.Lock()
_MAKING = threading.Lock()
"""Of a log, by whichever thread of the handler writes first."""


def _unheard(fraction: float, message: str) -> None:
    """Ignores progress."""


def unread(log: HandlerLog) -> None:
    """Ignores lines."""


class Context:
    """The second argument of every handler."""

    __slots__ = (
        "_cancelled",
        "_event",
        "_given_index",
        "_given_inputs",
        "_given_item",
        "_given_params",
        "_inputs",
        "_lines",
        "_log",
        "_log_rules",
        "_on_lines",
        "_params",
        "_redactor",
        "_report",
        "_seen",
        "attempt",
        "epoch",
        "node_id",
        "run_id",
        "secret_names",
        "secrets",
    )

    def __init__(
        self,
        *,
        run_id: str = "run",
        node_id: str = "node",
        attempt: int = 1,
        epoch: int = 1,
        item: Any = None,
        index: int | None = None,
        params: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
        inputs: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
        secrets: Mapping[str, str] = _NO_SECRETS,
        secret_names: frozenset[str] = frozenset(),
        report_progress: Report = _unheard,
        redactor: Redactor | None = None,
        seen: Callable[[str, Any], None] | None = None,
        log_rules: LogRules = NO_LOG,
        on_lines: OnLines = unread,
    ) -> None:
        """Without arguments it is a context for the test of a handler.

        `report_progress` is called in the handler's own thread.

        With `log_rules` the attempt has a log; `on_lines` is called when it has lines.
        `secret_names` are the secrets in the node's config. With `redactor` none is made from
        `secrets` for each node. `seen` is called once if the handler reads `params`.
        """
        self.run_id = run_id
        self.node_id = node_id
        self.attempt = attempt
        self.epoch = epoch
        self._given_params, self._given_inputs = params, inputs
        self._given_item, self._given_index = item, index
        self._params: dict[str, Any] | None = None
        self._inputs: dict[str, Any] | None = None
        self.secrets = secrets
        self.secret_names = secret_names
        self._report = report_progress
        self._redactor = redactor
        self._seen = seen
        self._log: logging.LoggerAdapter[logging.Logger] | None = None
        self._log_rules = log_rules
        self._on_lines = on_lines
        self._lines: AttemptLog | None = None
        self._event: asyncio.Event | None = None
        self._cancelled = False

    # Copies, so that a handler cannot change what is stored; made on first use.

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run."""
        if self._params is None:
            given = self._given_params
            given = given() if callable(given) else given or {}
            if self._seen is not None:
                self._seen(PARAMS, given)
            self._params = orjson.loads(orjson.dumps(given))
        return self._params

    @property
    def item(self) -> Any:
        """Of a mapped node: the item that this start is for."""
        if self._seen is not None:  # also of a node without items: that there is none is a fact
            self._seen(ITEM, self._given_item)
        return orjson.loads(orjson.dumps(self._given_item))

    @property
    def index(self) -> int | None:
        """Of a mapped node: the number of the item, from 0."""
        if self._seen is not None:
            self._seen(INDEX, self._given_index)
        return self._given_index

    @property
    def inputs(self) -> dict[str, Any]:
        """Outputs of the parents by id; a large one is read on first use."""
        if self._inputs is None:
            given = self._given_inputs
            self._inputs = given() if callable(given) else given or {}
        return self._inputs

    @property
    def idempotency_key(self) -> str:
        """The same for all attempts of an epoch; send it to services that can deduplicate."""
        name = self.node_id
        if self._given_index is not None:
            name = item_name(name, self._given_index)
        return f"{self.run_id}:{name}:{self.epoch}"

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A standard logger that adds run, node and attempt, and masks secrets."""
        if self._log is None:
            names = {"run_id": self.run_id, "node_id": self.node_id, "attempt": self.attempt}
            if self._given_index is not None:
                names["item"] = self._given_index
            logger = logging.getLogger(HANDLER_LOGGER)
            self._log = _NodeLog(logger, names, self._redaction(), self._open_log())
        return self._log

    def _open_log(self) -> AttemptLog | None:
        """The log of this attempt, made on first use; None if there is none, or it has ended."""
        if self._lines is None:
            if self._log_rules is NO_LOG:
                return None
            with _MAKING:
                if self._lines is None:
                    ids = (self.run_id, self.node_id, self.epoch, self.attempt)
                    attempt = AttemptKey(*ids, self._given_index)
                    self._lines = AttemptLog(
                        attempt, self._redaction(), self._log_rules, self._on_lines
                    )
        return self._lines._open_log()

    def _end_log(self) -> None:
        """The attempt has ended: later lines are not part of its log."""
        if self._lines is None:
            self._lines = ENDED
        else:
            self._lines.close()

    def progress(self, fraction: float, message: str = "") -> None:
        """Report how far the work is, from 0 to 1; other values are cut to that range."""
        if fraction != fraction:  # NaN, which would make the event no JSON
            raise ValueError("progress(fraction): fraction must be a number from 0 to 1, not NaN")
        text = "".join((str(message),))  # a plain str: a subclass may change when it is cut
        if text and self._redaction():
            text = self.redact(text)  # before it is cut: half a secret would not be recognised
        text = text[:MAX_PROGRESS_CHARS]
        self._report(min(1.0, max(0.0, float(fraction))), text)

    def decided_by_config(self) -> None:
        """Promise that the output depends on the config alone, whatever else the handler has read.

        Otherwise the node cache also compares the params, inputs and secrets that were read. Call
        it where the promise holds, such as for a file whose digest is in the config and was
        compared.
        """

    def redact(self, text: str) -> str:
        """The text without secrets, for text that the handler sends elsewhere itself."""
        redacted: str = self._redaction().redact_shown(text)
        return redacted

    @property
    def cancelled(self) -> asyncio.Event:
        """Set when the node should stop. In a thread, use `.is_set()`."""
        if self._event is None:
            with _CANCEL:
                if self._event is None:
                    event = asyncio.Event()
                    if self._cancelled:
                        event.set()
                    self._event = event
        return self._event

    def cancel(self) -> None:
        """Tell the handler to stop. Called by the worker, in the event loop."""
        with _CANCEL:
            self._cancelled = True
            if self._event is not None:
                self._event.set()

    def _redaction(self) -> Redactor:
        if self._redactor is None:
            self._redactor = Redactor(self.secrets)
        return self._redactor


class TrackedContext(Context):
    """The context of a cached node: it records what the handler reads."""

    __slots__ = ("_secrets", "on_decided")

    on_decided: Callable[[], None]
    """Called by `decided_by_config`."""

    def decided_by_config(self) -> None:
        self.on_decided()

    @property
    def secrets(self) -> Mapping[str, str]:
        if self._seen is not None:
            self._seen(SECRETS, None)
        return self._secrets

    @secrets.setter
    def secrets(self, secrets: Mapping[str, str]) -> None:
        self._secrets = secrets

    def _redaction(self) -> Redactor:
        if self._redactor is None:
            self._redactor = Redactor(self._secrets)
        return self._redactor


class _NodeLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the node's ids to each record and masks secrets."""

    def __init__(
        self,
        logger: logging.Logger,
        names: dict[str, Any],
        redactor: Redactor,
        lines: AttemptLog | None,
    ) -> None:
        super().__init__(logger, names)
        self._redactor = redactor
        self._lines = lines

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
        if self._lines is None:
            self._write(level, msg, args, kwargs)
            return
        token = CURRENT.set(self._lines)  # its own, in whichever thread
        try:
            self._write(level, msg, args, kwargs)
        finally:
            CURRENT.reset(token)

    def _write(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.isEnabledFor(level):
            return
        if self._redactor:
            msg, args = self._redactor.redact_shown(_formatted(msg, args)), ()
            if error := kwargs.pop("exc_info", None):
                msg = f"{msg}\n{self._redactor.redact_shown(_traceback(error))}"
            if "extra" in kwargs:
                kwargs["extra"] = self._redactor.redact_shown(kwargs["extra"])
        super().log(level, msg, *args, **kwargs)


def _formatted(msg: object, args: tuple[object, ...]) -> str:
    if not args:
        return str(msg)
    # As in logging: a single mapping fills %(name)s.
    values: Any = args[0] if len(args) == 1 and isinstance(args[0], Mapping) and args[0] else args
    try:
        return str(str(msg) % values)
    except (TypeError, ValueError, KeyError):  # a slip in a log line must not fail the node
        return f"{msg} {args}"


def _traceback(error: object) -> str:
    """The traceback that logging would print for `exc_info=error`."""
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, tuple):
        return "".join(traceback.format_exception(*error)).rstrip()
    return traceback.format_exc().rstrip()
