"""Dovetail: a durable DAG workflow engine.

All public names are here. They are loaded on first use, so that `import dovetail` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dovetail.client import Dovetail
    from dovetail.client.answers import (
        Batch,
        BatchRun,
        Event,
        FeedEvent,
        InspectedNode,
        LoggedLine,
        NodeAttempt,
        Page,
        Run,
        RunNode,
        WorkflowVersion,
    )
    from dovetail.core.errors import (
        Conflict,
        DovetailError,
        Expired,
        InvalidDefinition,
        InvalidParams,
        NotFound,
        PermanentError,
        RetryableError,
        StoreError,
    )
    from dovetail.core.retry import RetryPolicy
    from dovetail.dag_metrics import step_metrics
    from dovetail.executor import (
        StepResult,
        TokenBucketRateLimiter,
        WorkflowDAG,
        WorkflowExecutor,
        WorkflowResult,
    )
    from dovetail.handlers.context import Context
    from dovetail.handlers.llm import ask_llm
    from dovetail.handlers.registry import handler

_HOMES = {
    "Batch": "dovetail.client.answers",
    "BatchRun": "dovetail.client.answers",
    "Conflict": "dovetail.core.errors",
    "Context": "dovetail.handlers.context",
    "Dovetail": "dovetail.client",
    "DovetailError": "dovetail.core.errors",
    "Event": "dovetail.client.answers",
    "Expired": "dovetail.core.errors",
    "FeedEvent": "dovetail.client.answers",
    "InspectedNode": "dovetail.client.answers",
    "InvalidDefinition": "dovetail.core.errors",
    "InvalidParams": "dovetail.core.errors",
    "LoggedLine": "dovetail.client.answers",
    "NodeAttempt": "dovetail.client.answers",
    "NotFound": "dovetail.core.errors",
    "Page": "dovetail.client.answers",
    "PermanentError": "dovetail.core.errors",
    "RetryPolicy": "dovetail.core.retry",
    "RetryableError": "dovetail.core.errors",
    "Run": "dovetail.client.answers",
    "RunNode": "dovetail.client.answers",
    "StepResult": "dovetail.executor",
    "StoreError": "dovetail.core.errors",
    "TokenBucketRateLimiter": "dovetail.executor",
    "WorkflowDAG": "dovetail.executor",
    "WorkflowExecutor": "dovetail.executor",
    "WorkflowResult": "dovetail.executor",
    "WorkflowVersion": "dovetail.client.answers",
    "ask_llm": "dovetail.handlers.llm",
    "handler": "dovetail.handlers.registry",
    "step_metrics": "dovetail.dag_metrics",
}

__all__ = [
    "Batch",
    "BatchRun",
    "Conflict",
    "Context",
    "Dovetail",
    "DovetailError",
    "Event",
    "Expired",
    "FeedEvent",
    "InspectedNode",
    "InvalidDefinition",
    "InvalidParams",
    "LoggedLine",
    "NodeAttempt",
    "NotFound",
    "Page",
    "PermanentError",
    "RetryPolicy",
    "RetryableError",
    "Run",
    "RunNode",
    "StepResult",
    "StoreError",
    "TokenBucketRateLimiter",
    "WorkflowDAG",
    "WorkflowExecutor",
    "WorkflowResult",
    "WorkflowVersion",
    "__version__",
    "ask_llm",
    "handler",
    "step_metrics",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
