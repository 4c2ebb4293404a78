"""Celery carries the tasks: `celery -A dovetail.transports.celery worker` finds `app` here."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app` is made when it is first asked for: a process with settings makes an app of its own."""
    if name != "app":
        raise AttributeError(name)
    from dovetail.config import load_settings
    from dovetail.transports.celery.application import make_app

    made = globals()["app"] = make_app(load_settings())
    return made
