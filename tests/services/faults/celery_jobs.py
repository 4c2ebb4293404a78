"""The same processes for services over Celery: what its workers import is imported here, once.

Not `dovetail.wiring.celery`, which names a worker when it is imported.
"""

from __future__ import annotations

from celery.apps import worker as celery_worker
from celery.concurrency import prefork
from celery.worker.consumer import consumer
from jobs import dovetail
from kombu.transport import redis as broker

from dovetail.transports.celery import application, sender

PRELOADED = [broker, application, sender, celery_worker, consumer, prefork]

__all__ = ["dovetail"]
