"""Guards a Celery worker against messages that would end it.

Celery and kombu end the whole worker over a message with damaged headers or text, and over a
connection that was lost in between. Such a message is refused here, with the signal that Celery has
for it. Work that they repeat for every message is done once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import bootsteps, signals  # type: ignore[import-untyped]

from dovetail.transports.celery.application import TASK
from dovetail.transports.messages import Malformed

MISREAD = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading something raises that is not what it should be."""

log = logging.getLogger("dovetail.worker")


class MessageGuard(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of Celery's consumer."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        make_handler = consumer.create_task_handler

        def guarded(*args: Any, **how: Any) -> Callable[[Any], None]:
            handle = make_handler(*args, **how)

            def received(message: Any) -> None:
                # Before Celery looks: it would stumble with a place of its pool in its hands.
                message.ack, message.reject = _tolerant(message.ack), _tolerant(message.reject)
                if wrong := wrong_headers(message.headers):
                    consumer.on_invalid_task(None, message, Malformed(wrong))
                    return
                try:
                    handle(message)
                except MISREAD as error:
                    consumer.on_invalid_task(None, message, error)

            return received

        consumer.create_task_handler = guarded

    def start(self, consumer: Any) -> None:
        """Of this connection: where the broker is Redis, anything may be on its list."""
        channel = consumer.task_consumer.channel
        readers = getattr(channel, "handlers", {})
        read = readers.get("BRPOP")
        if read is None:
            return
        _tells_that_it_was_given_up(channel)
        _keeps_its_client(channel)

        def guarded(**options: Any) -> Any:
            try:
                return read(**options)
            except MISREAD as error:
                log.warning("what was on the queue is no message of Celery's: %s", error)
                signals.task_rejected.send(sender=consumer, message=None, exc=error)
                return True

        readers["BRPOP"] = guarded

    def stop(self, consumer: Any) -> None:
        """With the connection."""

    shutdown = stop


def _tolerant(settle: Callable[..., object]) -> Callable[..., None]:
    """kombu stumbles over a message whose connection is gone, and Celery ends with it. To us such a
    message is settled: whoever gets it again is refused."""

    def settled(*args: Any, **how: Any) -> None:
        with suppress(AttributeError):
            settle(*args, **how)

    return settled


def _tells_that_it_was_given_up(channel: Any) -> None:
    """kombu gives messages back over a connection to Redis that was lost, too, and stumbles where
    Celery expects to be told of it and goes on."""
    parameters = channel._connparams

    def told(*args: Any, **how: Any) -> Any:
        if getattr(channel.connection, "client", None) is None:
            raise channel.connection_errors[0]("the connection was given up")
        return parameters(*args, **how)

    channel._connparams = told


def _keeps_its_client(channel: Any) -> None:
    """kombu makes a client for each message that it notes and for each that it settles, with all
    that one could ask of it: an eighth of what a main process does, for which its pool waits."""
    make = channel._create_client
    kept: dict[Any, Any] = {}

    def client(asynchronous: bool = False) -> Any:
        if asynchronous:  # it has a connection of its own, to wait for messages on
            return make(asynchronous=True)
        if channel.pool not in kept:  # else another one of the same connections
            kept.clear()
            kept[channel.pool] = make()
        return kept[channel.pool]

    channel._create_client = client


HEADERS: dict[str, Callable[[Any], bool]] = {
    "id": lambda value: isinstance(value, str),
    "timelimit": lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(one is None or (isinstance(one, int | float) and one > 0) for one in value)
    ),
    "eta": lambda value: value is None,
    "expires": lambda value: value is None,
    "retries": lambda value: value == 0,
    "group": lambda value: value is None or isinstance(value, str),
    "root_id": lambda value: value is None or isinstance(value, str),
    "parent_id": lambda value: value is None or isinstance(value, str),
}
"""What Celery reads of the headers of our messages, and what it can bear."""


def wrong_headers(headers: Any) -> str | None:
    """What is wrong with the headers of a message, if it is one of ours or nobody's."""
    if not isinstance(headers, dict) or not isinstance(headers.get("task"), str):
        return "it names no task"
    if headers["task"] != TASK:
        return None
    wrong = [name for name, is_right in HEADERS.items() if not is_right(headers.get(name))]
    return f"headers that cannot be: {', '.join(wrong)}" if wrong else None
