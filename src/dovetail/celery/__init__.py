"""Dovetail inside your own Celery app: a whole DAG as one task, and many DAGs as a group.

`run_dag` is a shared task: import this package in a module that your workers load. With the Celery
transport (`transports/celery`) instead, each node is a task, and a lost worker costs one node and
not the whole DAG.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "celery": ("celery", "kombu", "billiard", "vine", "amqp"),
    "redis": ("redis", "hiredis"),
    "postgres": ("asyncpg",),
    "documents": ("lxml", "pyarrow", "pypdfium2"),
}
"""The packages of each extra."""


@contextmanager
def imports_of(module: str, extra: str) -> Iterator[None]:
    """Wraps the imports of a module; raises a `ModuleNotFoundError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not any(missing in packages for packages in PACKAGES.values()):
            raise  # another mistake, which an extra would not fix
        raise ModuleNotFoundError(
            f"{module} needs '{missing}', which is not installed: pip install 'dovetail[{extra}]'",
            name=error.name,
        ) from None


with imports_of("dovetail.celery", "celery"):
    from dovetail.celery.dag_registry import DagRefused, register_dag, register_handlers
    from dovetail.celery.task import (
        DagGroup,
        DagGroupResult,
        DagTask,
        configure,
        dag_ended,
        result_of,
        run_dag,
        run_dag_group,
    )

__all__ = [
    "DagGroup",
    "DagGroupResult",
    "DagRefused",
    "DagTask",
    "configure",
    "dag_ended",
    "register_dag",
    "register_handlers",
    "result_of",
    "run_dag",
    "run_dag_group",
]
