"""Logs, metrics and traces of a service. What they say about runs comes from the stores' events.

The library imports nothing from here: a program that only runs workflows needs neither structlog
nor Prometheus nor OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_ROUTE = "(none)"
"""The route of a request that matched none, or was refused before routing."""


def route_of(scope: Mapping[str, Any]) -> str:
    """`/api/v1/runs/{run_id}`, from the ASGI scope of an answered request.

    The template, not the path: callers may send any number of paths.
    """
    template = getattr(scope.get("route"), "path", None)
    if template is None:
        return NO_ROUTE
    # A route knows only the path below its router.
    above = scope["path"].split("/")[: -(template.count("/")) or None]
    return "/".join(above) + str(template)
