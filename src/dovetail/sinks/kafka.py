"""Events on a Kafka topic, with the run as the key: those of one run are on one partition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from dovetail.core.text import counted
from dovetail.engine.event_export import SinkError

DELIVERY_SECONDS = 30.0
CLOSE_SECONDS = 1.0


class KafkaSink:
    def __init__(self, brokers: str, topic: str, options: dict[str, Any] | None = None) -> None:
        """`options` are of librdkafka, beside ours."""
        self._topic = topic
        self._options = {
            "bootstrap.servers": brokers,
            "client.id": "dovetail",
            "acks": "all",
            # Keeps the order of a partition also when a batch is sent again.
            "enable.idempotence": True,
            # Later than our own time-out, which gives up all messages at once: none of them can be
            # given up alone, and a later one arrive before it.
            "message.timeout.ms": int(2 * DELIVERY_SECONDS * 1000),
            # Else it writes each failed connection to stderr, many a second.
            "log_level": 0,
            "error_cb": self._on_error,
            **(options or {}),
        }
        self._producer: Any = None
        self._problem = ""
        """What the brokers' connections failed with last: a message only says that it timed out."""

    def _on_error(self, error: Any) -> None:
        self._problem = error.str()

    async def write(self, records: Sequence[dict[str, Any]]) -> None:
        await asyncio.to_thread(self._send, records)

    async def close(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await asyncio.to_thread(producer.flush, CLOSE_SECONDS)

    def _send(self, records: Sequence[dict[str, Any]]) -> None:
        try:
            from confluent_kafka import KafkaException, Producer
        except ModuleNotFoundError:
            raise SinkError(
                "the package 'confluent_kafka' is not installed: pip install 'dovetail[kafka]'"
            ) from None
        failures: list[str] = []
        self._problem = ""

        def on_delivery(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error.str())

        # Kept only if all goes well: after some errors a producer never sends anything again.
        producer, self._producer = self._producer, None
        try:
            producer = producer or Producer(self._options)
            for record in records:
                producer.produce(
                    self._topic,
                    key=record["run_id"],
                    value=orjson.dumps(record),
                    on_delivery=on_delivery,
                )
            left = producer.flush(DELIVERY_SECONDS)
        except (KafkaException, BufferError) as error:
            raise SinkError(f"Kafka topic {self._topic}: {error}") from error
        if left:
            producer.purge()
        if left or failures:
            not_sent = counted(left, "event was", "events were")
            why = failures[0] if failures else f"{not_sent} not accepted in time"
            because = f" ({self._problem})" if self._problem else ""
            raise SinkError(f"Kafka topic {self._topic}: {why}{because}")
        self._producer = producer
