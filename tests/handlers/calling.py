"""Calling `call_external_service` the way a worker does: config checked first."""

from __future__ import annotations

from typing import Any

from dovetail.config import Settings
from dovetail.handlers.context import Context
from dovetail.handlers.external import call_external_service
from dovetail.handlers.registry import BUILT_IN, describe


async def call(settings: Settings, ctx: Context, resolver: Any = None, **config: Any) -> Any:
    fn = call_external_service(settings, *([resolver] if resolver else []))
    known = describe(fn, name="call_external_service", origin=BUILT_IN)
    return await known.fn(known.prepare(config), ctx)
