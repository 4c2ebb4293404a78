"""The port through which stores report what they wrote, for metrics and traces.

An instrumented store reports each event once, after it is written, and only events of transitions
that were applied through it. So over all processes each event is reported by the one that made it.
A store without a listener pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar

from dovetail.core.dag import Graph
from dovetail.core.events import RUN_ENDS, Event
from dovetail.core.states import RunStatus
from dovetail.engine.ports import Calls, Sender

REQUEST_ID: ContextVar[str | None] = ContextVar("dovetail_request_id", default=None)
"""Of the request that is being answered, for each line that is logged meanwhile."""

CallersOf = Callable[[Sequence[str]], Awaitable[Sequence[str | None]]]
"""For each of these runs the `traceparent` of the request that triggered it, if it had one."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger("dovetail.telemetry")


class ClientCall:
    """One call of a handler to another service. Telemetry extends it; this one reports nothing."""

    headers: Mapping[str, str] = MappingProxyType({})
    """To send along."""

    def answered(self, attributes: Mapping[str, Any]) -> None:
        """By the names of OpenTelemetry's semantic conventions."""

    def failed(self, kind: str) -> None:
        """`kind` is the type of the error."""


ClientCalls = Callable[[str, Mapping[str, Any]], AbstractContextManager[ClientCall]]
"""A call by its name and its first attributes; it lasts as long as the context."""
_client_calls: list[ClientCalls] = []
"""The listener of this process, if there is one."""


def client_call(name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[ClientCall]:
    """A call to another service that begins now, as `hear_client_calls` asked for it."""
    return _client_calls[-1](name, attributes) if _client_calls else nullcontext(_UNHEARD)


def hear_client_calls(listener: ClientCalls | None) -> None:
    """From now on this listener gets the calls of handlers in this process; None ends that."""
    _client_calls[:] = [] if listener is None else [listener]


_UNHEARD = ClientCall()


def end_in(events: Sequence[Event]) -> RunStatus | None:
    """How a run ended, if these events end it."""
    return next((RUN_ENDS[event.type] for event in events if event.type in RUN_ENDS), None)


class Listener(Protocol):
    whole_logs: bool
    """Whether `on_run_finished` is called, with the whole log of the run."""

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None:
        """Published nodes wait in the memory of this process: `depths` counts them by handler."""
        ...

    def on_events(
        self, run_id: str, graph: Graph, events: Sequence[Event], version: int | None = None
    ) -> None:
        """These were written just now, in this order. `version` is the run's, if its definition is
        registered."""
        ...

    def on_duration(self, handler: str, seconds: float) -> None:
        """A node ended this long after its last start."""
        ...

    def caller(self) -> str | None:
        """The `traceparent` of the request that this process is answering at the moment."""
        ...

    def on_run_finished(
        self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None
    ) -> None:
        """Nothing of the run is running any more. `caller` is the `traceparent` it began under."""
        ...

    def outputs_wanted(self, graph: Graph) -> Sequence[str] | None:
        """The nodes whose outputs `on_outcome` needs; None if it need not be called."""
        ...

    def on_outcome(
        self, run_id: str, graph: Graph, status: RunStatus, outputs: Mapping[str, Any]
    ) -> None:
        """The run's status became final. `outputs` are those wanted of a run that completed; one
        that can no longer be read is missing. After a retry the run ends again."""
        ...

    def on_notification(self, outcome: str, seconds: float) -> None:
        """A webhook was `delivered`, `failed` or is `dead`, so long after the end of its run."""
        ...

    def on_exported(self, outcome: str, many: int, seconds: float) -> None:
        """So many events were `written` to the sink, or `failed`; the first was so old."""
        ...

    def sender(self, sender: Sender, callers_of: CallersOf) -> Sender:
        """A sender whose tasks carry their trace; the same one if nothing is traced."""
        ...

    def calls(self, calls: Calls, caller_of: Callable[[str], str | None] | None = None) -> Calls:
        """Calls with a span around each handler; the same ones if nothing is traced.

        `caller_of` is given where tasks do not carry their trace.
        """
        ...


class SafeListener:
    """The hooks of a listener as a store calls them: an error in one never reaches the store.

    The first error of each hook is logged. Later ones are not: a hook that fails once usually
    fails for every node.
    """

    def __init__(self, listener: Listener) -> None:
        self._failed: set[str] = set()
        self.whole_logs = listener.whole_logs
        self.on_events = self._guard(listener.on_events, None)
        self.on_duration = self._guard(listener.on_duration, None)
        self.on_run_finished = self._guard(listener.on_run_finished, None)
        self.on_outcome = self._guard(listener.on_outcome, None)
        self.outputs_wanted = self._guard(listener.outputs_wanted, None)
        self.on_notification = self._guard(listener.on_notification, None)
        self.on_exported = self._guard(listener.on_exported, None)
        self.caller = self._guard(listener.caller, None)

    def _guard(self, hook: Callable[_P, _T], otherwise: _T) -> Callable[_P, _T]:
        def guarded(*args: _P.args, **named: _P.kwargs) -> _T:
            try:
                return hook(*args, **named)
            except Exception:
                name = hook.__name__
                if name not in self._failed:
                    self._failed.add(name)
                    log.exception(
                        "telemetry: %s failed; runs go on, and its further errors are not logged",
                        name,
                    )
                return otherwise

        return guarded
