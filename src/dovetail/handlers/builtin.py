"""The built-in handlers `input`, `output`, `sleep` and `fail`, and the registry of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.core.errors import PermanentError
from dovetail.handlers.context import Context
from dovetail.handlers.external import call_external_service
from dovetail.handlers.llm import llm_service
from dovetail.handlers.registry import BUILT_IN, Registry, describe

if TYPE_CHECKING:
    from dovetail.config import Settings


A_YEAR = 365 * 24 * 3600


async def give_input(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Returns the run's params, with its config merged over them."""
    return {**ctx.params, **config}


async def give_output(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Returns its config; without one, the outputs of its parents by id, without skipped ones."""
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
    raise PermanentError("stopped while sleeping", type="cancelled")


class FailConfig(BaseModel):
    """The config of `fail`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    message: Any = Field(default="failed on purpose", description="what the error says")


async def fail(config: FailConfig, ctx: Context) -> None:
    """Fails with a message, for trying things out; retried like any other failure."""
    raise RuntimeError(str(config.message))


# A service may answer next time; a handler without one would fail in the same way.
REMOTE_RETRIES = 3


SECRET_FIELDS = {"call_external_service": ("headers", "params", "json", "body")}
"""Never the url: servers log it, and it decides where a secret is sent."""


def builtin_registry(settings: Settings) -> Registry:
    """The built-in handlers only."""
    registry = Registry()
    for name, fn, retries, aliases in (
        ("input", give_input, 0, ()),
        ("output", give_output, 0, ()),
        ("call_external_service", call_external_service(settings), REMOTE_RETRIES, ()),
        ("llm_service", llm_service(settings), REMOTE_RETRIES, ("llm_generate",)),
        ("sleep", sleep, 0, ()),
        ("fail", fail, 0, ()),
    ):
        secrets = SECRET_FIELDS.get(name, False)
        known = describe(fn, name=name, max_retries=retries, origin=BUILT_IN, secrets=secrets)
        registry.add(known, *aliases)
    return registry


def load_registry(settings: Settings, specs: Iterable[str] = ()) -> Registry:
    """Handlers that are built in, of installed packages, `DOVETAIL_HANDLERS` and `--handlers`."""
    registry = builtin_registry(settings)
    registry.load_entry_points()
    for spec in (*settings.handlers, *specs):
        registry.load(spec)
    return registry
