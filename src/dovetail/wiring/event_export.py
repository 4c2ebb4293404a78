"""Builds what exports events to the sink of the settings."""

from __future__ import annotations

from pathlib import Path

from dovetail.config import Settings, read_sink
from dovetail.core.redaction import Redactor
from dovetail.engine.clock import Clock
from dovetail.engine.event_export import EventExporter, EventSink, EventSource
from dovetail.engine.listener import Listener, SafeListener
from dovetail.sinks.jsonl import JsonLinesSink


def event_exporter(
    settings: Settings, source: EventSource, clock: Clock, listener: Listener | None = None
) -> EventExporter | None:
    """None if no sink is set."""
    if settings.events is None:
        return None
    redactor = Redactor(settings.sensitive())
    count = _uncounted if listener is None else SafeListener(listener).on_exported
    return EventExporter(
        source, _sink(settings.events), clock, redact=redactor.redact_shown, count=count
    )


def _sink(url: str) -> EventSink:
    target = read_sink(url)
    if target.kind == "file":
        return JsonLinesSink(Path(target.address))
    if target.kind == "kafka":
        from dovetail.sinks.kafka import KafkaSink

        return KafkaSink(target.address, target.name)
    from dovetail.sinks.redis_stream import RedisStreamSink

    return RedisStreamSink(target.address, target.name, target.max_length)


def _uncounted(outcome: str, many: int, seconds: float) -> None: ...
