"""Where a command finds its runs: in the embedded file, or in the stores of a set-up on Redis.

What it must not know: what is asked there.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from dovetail.cli.failures import InvalidInput
from dovetail.config import Settings, env_name, load_settings
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry
from dovetail.wiring import attached, embedded


def settings_of_this_place() -> Settings:
    """The settings, if they lead somewhere this version knows."""
    settings = load_settings()
    if settings.server is not None:
        # Nowhere else instead: an answer from the wrong place is worse than none.
        other = "Redis" if is_shared(settings) else settings.db
        raise InvalidInput(
            f"{env_name('server')} is set, but this version does not talk to servers; "
            f"unset it to use {other}"
        )
    return settings


def is_shared(settings: Settings) -> bool:
    """Runs are driven by services, wherever these are, and not by whoever asks."""
    return settings.redis_url is not None


def looking(
    settings: Settings, registry: Registry | None = None, *, create: bool = False
) -> AbstractAsyncContextManager[Commands]:
    """Commands that drive nothing; a file that is not there is made only with `create`."""
    if is_shared(settings):
        return _commanding(settings, registry)
    return attached(settings, registry, create=create)


def driving(settings: Settings, registry: Registry) -> AbstractAsyncContextManager[Commands]:
    """Commands whose runs go on: in this process, or in those that are there for it."""
    if is_shared(settings):
        return _commanding(settings, registry)
    return embedded(settings, registry)


def _commanding(
    settings: Settings, registry: Registry | None
) -> AbstractAsyncContextManager[Commands]:
    from dovetail.cli.services import redis_client

    with redis_client(settings, "this command"):
        from dovetail.distributed import commanding
    return commanding(settings, registry)
