"""Dovetail inside the user's own Celery: a whole DAG as one task, and many of them as a group.

`run_dag` is a shared task: to import this package in a module that the workers load is all it
takes. Over the transport (`transports/celery`) each node is a task of its own, and a lost worker
costs one node instead of the whole DAG.
"""

from dovetail.extras import imports_of

with imports_of("dovetail.celery", "celery"):
    from dovetail.celery.dag_registry import DagRefused, register_dag, register_handlers
    from dovetail.celery.runner import dag_ended
    from dovetail.celery.task import (
        DagGroup,
        DagGroupResult,
        DagTask,
        configure,
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
