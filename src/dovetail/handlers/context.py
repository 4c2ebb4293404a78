"""What a handler is given beside its config: who it is, what came before, and how to report.

One is made for every start of a node, so it costs next to nothing: the logger, the cancel event,
params and inputs exist once somebody asks for them. It must not know of stores, queues or
leases; what the worker wants to hear it passes in as a callable.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import orjson

from dovetail.core.caching import PARAMS, SECRETS
from dovetail.core.redaction import Redactor

Report = Callable[[float, str], None]

LONGEST_PROGRESS = 1000
"""Characters of a progress message that are kept: it is one line for people."""

_NO_SECRETS: Mapping[str, str] = {}

# Guards only the making and setting of cancel events: a handler in a thread may ask for the
# event in the very moment in which the loop cancels it.
_CANCEL = threading.Lock()


def _unheard(fraction: float, message: str) -> None:
    """Progress that nobody asked for."""


class Context:
    """The second argument of every handler."""

    __slots__ = (
        "_cancelled",
        "_event",
        "_given_inputs",
        "_given_params",
        "_inputs",
        "_log",
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
        run_id: str,
        node_id: str,
        attempt: int = 1,
        epoch: int = 1,
        params: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
        inputs: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
        secrets: Mapping[str, str] = _NO_SECRETS,
        secret_names: frozenset[str] = frozenset(),
        report_progress: Report = _unheard,
        redactor: Redactor | None = None,
        seen: Callable[[str, Any], None] | None = None,
    ) -> None:
        """`report_progress` is called in the handler's own thread, whichever that is.

        `secret_names` are those that the node's config has. `redactor` spares making one from
        `secrets` for each node that logs or reports. `seen` is told once what the handler has read
        of `params`, where somebody has to know.
        """
        self.run_id = run_id
        self.node_id = node_id
        self.attempt = attempt
        self.epoch = epoch
        self._given_params, self._given_inputs = params, inputs
        self._params: dict[str, Any] | None = None
        self._inputs: dict[str, Any] | None = None
        self.secrets = secrets
        self.secret_names = secret_names
        self._report = report_progress
        self._redactor = redactor
        self._seen = seen
        self._log: logging.LoggerAdapter[logging.Logger] | None = None
        self._event: asyncio.Event | None = None
        self._cancelled = False

    # Copies, so that a handler cannot change what is stored; made for those that look.

    @property
    def params(self) -> dict[str, Any]:
        """What the run was triggered with."""
        if self._params is None:
            given = self._given_params
            given = given() if callable(given) else given or {}
            if self._seen is not None:
                self._seen(PARAMS, given)
            self._params = orjson.loads(orjson.dumps(given))
        return self._params

    @property
    def inputs(self) -> dict[str, Any]:
        """Outputs of the parents by id; a large one is read when it is first asked for."""
        if self._inputs is None:
            given = self._given_inputs
            self._inputs = given() if callable(given) else given or {}
        return self._inputs

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt in an epoch; give it to services that can deduplicate."""
        return f"{self.run_id}:{self.node_id}:{self.epoch}"

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A standard logger that knows run, node and attempt, and writes no secret."""
        if self._log is None:
            names = {"run_id": self.run_id, "node_id": self.node_id, "attempt": self.attempt}
            self._log = _NodeLog(logging.getLogger("dovetail.handler"), names, self._redaction())
        return self._log

    def progress(self, fraction: float, message: str = "") -> None:
        """Tell how far the work is, from 0 to 1; what lies outside is cut to that."""
        if fraction != fraction:  # NaN, which would make the event no JSON
            raise ValueError("progress(fraction): fraction must be a number from 0 to 1, not NaN")
        text = "".join((str(message),))  # plain text: a subclass of str may change when it is cut
        if text and self._redaction():
            text = self.redact(text)  # whole: a cut secret would not be recognised
        text = text[:LONGEST_PROGRESS]
        self._report(min(1.0, max(0.0, float(fraction))), text)

    def decided_by_config(self) -> None:
        """Say that the output follows from the config alone, whatever else the handler has read:
        for the node cache, which else asks for equal params, inputs and secrets.

        A promise of the handler. It is called where it holds, such as for a file whose digest is
        in the config and was compared.
        """

    def redact(self, text: str) -> str:
        """The text without secrets, for what leaves the handler by another way than its output."""
        redacted: str = self._redaction().redact_shown(text)
        return redacted

    @property
    def cancelled(self) -> asyncio.Event:
        """Set once the node should stop. In a thread, ask `.is_set()`."""
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
    """Of a node whose output is kept for others: what its handler reads decides for whom."""

    __slots__ = ("_secrets", "on_decided")

    on_decided: Callable[[], None]
    """Set by whoever keeps what was read."""

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
    """Adds the node's names to each record and takes secrets out of it."""

    def __init__(self, logger: logging.Logger, names: dict[str, Any], redactor: Redactor) -> None:
        super().__init__(logger, names)
        self._redactor = redactor

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
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
    # As logging itself does: a single mapping fills %(name)s.
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
