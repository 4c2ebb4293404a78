"""Dovetail's Celery application: `celery -A dovetail.transports.celery worker` works as ever.

A message names one start of one node, and is a hint. The claim decides which worker starts a node,
leases decide what becomes of a start whose process died, and results go back on the stream that all
transports share. So Celery only carries messages: no result backend, no retries, no visibility
timeouts. What a worker does with a message is in `dovetail.wiring.celery`, which the worker
imports.

A worker has a guard, too: Celery and kombu end the whole worker over a message with damaged headers
or text, and over a connection that was lost in between. The guard refuses such a message, with the
signal that Celery has for it. It does once what Celery and kombu repeat for every message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery, bootsteps, signals  # type: ignore[import-untyped]
from kombu.entity import Exchange, Queue

from dovetail.config import Settings, SettingsError, env_name
from dovetail.redis_client.url import SCHEMES, read, to_celery
from dovetail.transports.messages import MISREAD, Malformed

QUEUE = "dovetail"
TASK = "dovetail.execute_node"
GRACE_SECONDS = 5.0
"""Beyond a node's timeout its process may clean up for so long; then it is killed."""
WORKS_IN = "dovetail.wiring.celery"


def broker_url(settings: Settings) -> str:
    """As we spell it; see `reached`. Raises `SettingsError` if there is none."""
    url = settings.broker_url or settings.redis_url
    if url is None:
        raise SettingsError(
            f"neither {env_name('broker_url')} nor {env_name('redis_url')} is set: Celery needs a "
            "broker, as in redis://localhost:6379/0 or amqp://guest@localhost//"
        )
    return url


def is_redis(url: str) -> bool:
    return url.partition("://")[0] in SCHEMES


def reached(url: str) -> dict[str, Any]:
    """How Celery reaches this broker. For Redis all options are given: without them, Celery does
    not check the certificate of a `rediss` URL."""
    if not is_redis(url):
        return {"broker_url": url}
    found = to_celery(read(url))
    given: dict[str, Any] = {"broker_url": found.url}
    if found.use_ssl is not None:
        given["broker_use_ssl"] = found.use_ssl
    if found.transport_options:
        given["broker_transport_options"] = found.transport_options
    return given


def make_app(settings: Settings) -> Celery:
    place = reached(broker_url(settings))
    app = Celery("dovetail", broker=place["broker_url"], include=[WORKS_IN], set_as_current=False)
    app.conf.update(configuration(settings) | place)
    return app


def check_broker(app: Celery) -> None:
    """Raises `SettingsError` for a URL that Celery cannot use; connects to nothing."""
    try:
        app.connection_for_write().release()
    except KeyError as unknown:
        why = " ".join(str(unknown.args[0]).split())
    except ImportError as missing:
        why = f"its transport needs more: {missing}"
    except ValueError:  # its text may show a part of the password
        why = "no URL of a broker"
    else:
        return
    raise SettingsError(
        f"{env_name('broker_url')} (value not shown): {why} (as in "
        "amqp://user:password@host:5672// or redis://host:6379/0)"
    )


def configuration(settings: Settings) -> dict[str, Any]:
    given = settings.concurrency if "concurrency" in settings.model_fields_set else None
    return {
        "task_queues": [_queue()],
        "task_default_queue": QUEUE,
        "task_default_exchange": QUEUE,
        "task_default_routing_key": QUEUE,
        # JSON alone: a pickle is refused before anybody looks into it.
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        # A message goes once its node is done. One whose process was killed goes, too: another
        # copy would be refused while the lease is held, and afterwards the node is queued anew.
        "task_acks_late": True,
        "task_acks_on_failure_or_timeout": True,
        "task_reject_on_worker_lost": False,
        "worker_prefetch_multiplier": 1,
        "task_track_started": True,
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # Whatever runs has its lease, and reports to another place: it need not be ended.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_concurrency": given,  # unset: Celery's own choice, one process for each core
        "worker_hijack_root_logger": False,
        "enable_utc": True,
    }


def _queue() -> Queue:
    return Queue(QUEUE, Exchange(QUEUE), routing_key=QUEUE)  # type: ignore[no-untyped-call]


# ── the guard of a worker ─────────────────────────────────────────────────────────────────────


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
    message is settled: a worker that gets it again is refused."""

    def settled(*args: Any, **how: Any) -> None:
        with suppress(AttributeError):
            settle(*args, **how)

    return settled


def _tells_that_it_was_given_up(channel: Any) -> None:
    """kombu gives messages back over a connection to Redis that was lost, too, and stumbles where
    Celery expects an error of the connection and goes on."""
    parameters = channel._connparams

    def checked(*args: Any, **how: Any) -> Any:
        if getattr(channel.connection, "client", None) is None:
            raise channel.connection_errors[0]("the connection was given up")
        return parameters(*args, **how)

    channel._connparams = checked


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
    """What is wrong with the headers of a message, if it is one of ours or names no task."""
    if not isinstance(headers, dict) or not isinstance(headers.get("task"), str):
        return "it names no task"
    if headers["task"] != TASK:
        return None
    wrong = [name for name, is_right in HEADERS.items() if not is_right(headers.get(name))]
    return f"headers that cannot be: {', '.join(wrong)}" if wrong else None
