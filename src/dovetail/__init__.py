"""Dovetail: a DAG workflow engine that ends right whatever dies on the way.

Everything public is named here and loaded when first used, so that `import dovetail` is free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dovetail.core.errors import (
        DovetailError,
        InvalidDefinition,
        InvalidParams,
        PermanentError,
        RetryableError,
    )
    from dovetail.core.retry import RetryPolicy
    from dovetail.executor import (
        StepResult,
        TokenBucketRateLimiter,
        WorkflowDAG,
        WorkflowExecutor,
        WorkflowResult,
    )
    from dovetail.handlers.context import Context
    from dovetail.handlers.registry import handler

_HOMES = {
    "Context": "dovetail.handlers.context",
    "DovetailError": "dovetail.core.errors",
    "InvalidDefinition": "dovetail.core.errors",
    "InvalidParams": "dovetail.core.errors",
    "PermanentError": "dovetail.core.errors",
    "RetryPolicy": "dovetail.core.retry",
    "RetryableError": "dovetail.core.errors",
    "StepResult": "dovetail.executor",
    "TokenBucketRateLimiter": "dovetail.executor",
    "WorkflowDAG": "dovetail.executor",
    "WorkflowExecutor": "dovetail.executor",
    "WorkflowResult": "dovetail.executor",
    "handler": "dovetail.handlers.registry",
}

__all__ = [
    "Context",
    "DovetailError",
    "InvalidDefinition",
    "InvalidParams",
    "PermanentError",
    "RetryPolicy",
    "RetryableError",
    "StepResult",
    "TokenBucketRateLimiter",
    "WorkflowDAG",
    "WorkflowExecutor",
    "WorkflowResult",
    "__version__",
    "handler",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
