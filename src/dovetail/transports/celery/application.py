"""Dovetail's Celery application: `celery -A dovetail.transports.celery worker` works as ever.

A message names one start of one node, and is a hint. The claim decides which worker starts a node,
leases decide what becomes of a start whose process died, and results go back on the stream that all
transports share. So Celery only carries messages: no result backend, no retries, no visibility
timeouts. What a worker does with a message is in `dovetail.wiring.celery`, which the worker
imports.
"""

from __future__ import annotations

from typing import Any

from celery import Celery  # type: ignore[import-untyped]
from kombu.entity import Exchange, Queue

from dovetail.config import Settings, SettingsError, env_name
from dovetail.redis_client.url import SCHEMES, read, to_celery

QUEUE = "dovetail"
TASK = "dovetail.execute_node"
GRACE_SECONDS = 5.0
"""Beyond a node's timeout its process may clean up for so long; then it is killed."""
SHOWN_RESULT = 1024
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
    """How Celery reaches this broker. Of Redis we tell it all: by itself it would take a `rediss`
    without options for one whose certificate nobody need look at."""
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
