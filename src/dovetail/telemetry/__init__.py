"""What is seen of a service from outside: its logs, its metrics, its traces.

Everything about runs is made from the events that the stores write. Nothing here is imported by
the library: who only runs workflows needs neither structlog nor Prometheus nor OpenTelemetry.

Which call a request was: by its template, because anybody may ask for any path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_ROUTE = "(none)"
"""Of what was refused before anybody looked for it, or is not there."""


def route_of(scope: Mapping[str, Any]) -> str:
    """`/api/v1/runs/{run_id}`, of the ASGI scope of a request that was answered."""
    template = getattr(scope.get("route"), "path", None)
    if template is None:
        return NO_ROUTE
    # A route may know only its part of the path, below where its router was put.
    above = scope["path"].split("/")[: -(template.count("/")) or None]
    return "/".join(above) + str(template)
