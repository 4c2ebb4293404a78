"""Dovetail inside your own Celery app: a whole DAG as one task, and many DAGs as a group.

`run_dag` is a shared task: import this package in a module that your workers load. With the Celery
transport (`transports/celery`) instead, each node is a task, and a lost worker costs one node and
not the whole DAG.
"""

try:
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
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("celery", "kombu", "billiard", "vine", "amqp", "redis", "hiredis"):
        raise  # another mistake, which the extra would not fix
    raise ModuleNotFoundError(
        f"dovetail.celery needs '{missing}', which is not installed: "
        "pip install 'dovetail[celery]'",
        name=error.name,
    ) from None

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
