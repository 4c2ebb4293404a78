"""Where a command finds its runs: on a server, in the stores of a set-up on Redis, or in a file.

The first of these that is named wins; a flag is a name like any other. What it must not know:
what is asked there.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from dovetail.cli.failures import InvalidInput
from dovetail.config import Settings, load_settings
from dovetail.core.errors import DovetailError
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry
from dovetail.wiring import attached, embedded

_flags: dict[str, str | None] = {}
_embedded = False


def choose(server: str | None, token: str | None, *, embedded: bool = False) -> None:
    """What the command line of this process says about the place."""
    global _embedded
    if embedded and server is not None:
        raise InvalidInput("--embedded and --server name two places: leave one of them out")
    _flags.update(server=server, token=token)
    _embedded = embedded


def typed_place() -> list[str]:
    """The words that lead another command to the same place; a token is never repeated."""
    if _embedded and is_shared(load_settings()):
        return ["--embedded"]
    server = _flags.get("server")
    return [] if server is None else ["--server", server]


def settings_of_this_place() -> Settings:
    from dovetail.client.arguments import server_url

    settings = load_settings(server=_flags.get("server"), token=_flags.get("token"))
    if _embedded:
        return settings.model_copy(update={"redis_url": None, "server": None})
    if settings.server is None:
        return settings
    try:
        return settings.model_copy(update={"server": server_url(settings.server)})
    except DovetailError as error:
        raise InvalidInput(str(error)) from None


def is_shared(settings: Settings) -> bool:
    """Runs are driven by services, wherever these are, and not by whoever asks."""
    return settings.server is not None or settings.redis_url is not None


def drivers(settings: Settings) -> str:
    """Who drives runs there."""
    if settings.server is not None:
        return f"the server at {settings.server}"
    return "orchestrators" if is_shared(settings) else "a process that is alive"


def looking(
    settings: Settings, registry: Registry | None = None, *, create: bool = False
) -> AbstractAsyncContextManager[Commands]:
    """Commands that drive nothing; a file that is not there is made only with `create`."""
    if is_shared(settings):
        return _elsewhere(settings, registry)
    return attached(settings, registry, create=create)


def driving(settings: Settings, registry: Registry) -> AbstractAsyncContextManager[Commands]:
    """Commands whose runs go on: in this process, or in those that are there for it."""
    if is_shared(settings):
        return _elsewhere(settings, registry)
    return embedded(settings, registry)


def _elsewhere(
    settings: Settings, registry: Registry | None
) -> AbstractAsyncContextManager[Commands]:
    if settings.server is not None:
        from dovetail.client import http_client

        with http_client():
            from dovetail.client.server import calling
        return calling(settings)
    from dovetail.cli.services import redis_client

    with redis_client(settings, "this command"):
        from dovetail.distributed import commanding
    return commanding(settings, registry)
