"""The functions of the map as Celery tasks, with the settings of celery_peer.py: Celery's defaults,
so that a task is acknowledged before it runs."""

from __future__ import annotations

from celery_peer import app


@app.task(name="add_one")
def add_one(number: int) -> int:
    return number + 1


@app.task(name="add_up")
def add_up(numbers: list[int]) -> int:
    return sum(numbers)
