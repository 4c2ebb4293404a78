"""The handlers that touch nothing outside: `input`, `output`, `sleep`, `fail`."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.core.errors import PermanentError
from dovetail.handlers.context import Context

A_YEAR = 365 * 24 * 3600


async def give_input(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Returns the run's params, with its config merged over them."""
    return {**ctx.params, **config}


async def give_output(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Returns its config, or without one the outputs of its parents by id (skipped ones absent)."""
    return config or dict(ctx.inputs)


class SleepConfig(BaseModel):
    """The config of `sleep`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: float = Field(ge=0, le=A_YEAR, allow_inf_nan=False, description="how long")


async def sleep(config: SleepConfig, ctx: Context) -> dict[str, Any]:
    """Waits for some seconds and returns them."""
    try:
        async with asyncio.timeout(config.seconds):
            await ctx.cancelled.wait()
    except TimeoutError:
        return {"seconds": config.seconds}
    raise PermanentError("told to stop while sleeping", type="cancelled")


class FailConfig(BaseModel):
    """The config of `fail`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    message: Any = Field(default="failed on purpose", description="what the error says")


async def fail(config: FailConfig, ctx: Context) -> None:
    """Fails with a message, for trying things out; retried like any other failure."""
    raise RuntimeError(str(config.message))
