"""Where the page is: the server that is alive, or one beside `dovetail run --web`.

A server on an embedded file writes its address to a file beside it, and holds a lock on that file
while it lives. So every command knows at once, without a request, whether a server is alive: the
system drops the lock with the process, however that ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.config import Settings, env_name

if TYPE_CHECKING:
    from dovetail.engine.api import ServedEngine
    from dovetail.handlers.registry import Registry

SUFFIX = "-server"
MAX_ADDRESS_BYTES = 300
USUAL_PORT = 8700
_ANY_ADDRESS = (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:"))


def page_url(settings: Settings) -> str | None:
    """The address of the server that shows the runs of this target; None if none is known."""
    if settings.server is not None:
        return settings.server
    return None if settings.redis_url is not None else live_server(settings.db)


def run_link(url: str, run_id: str) -> str:
    return f"{url}/#/runs/{run_id}"


def live_server(db: Path) -> str | None:
    """The address of a server on this file that is alive."""
    try:
        file = os.open(_address_file(db), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # its server has ended
    except BlockingIOError:
        address = os.read(file, MAX_ADDRESS_BYTES).decode("ascii", "replace")
        return address if address.isprintable() and address.startswith("http://") else None
    except OSError:
        return None
    finally:
        os.close(file)


@contextmanager
def announced_address(db: Path, url: str) -> Iterator[None]:
    """Let other commands find this server. Of several servers on one file the first is found."""
    file = None
    with suppress(OSError):  # the server works without it
        file = os.open(_address_file(db), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for everywhere, here in _ANY_ADDRESS:  # where it listens is no address to open
            url = url.replace(everywhere, here)
        os.ftruncate(file, 0)
        os.pwrite(file, url.encode(), 0)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def _address_file(db: Path) -> str:
    return f"{db.absolute()}{SUFFIX}"


def open_in_browser(url: str) -> bool:
    """Whether a browser was started: not where there is no screen, as on a server over SSH."""
    if not (os.environ.get("BROWSER") or _has_screen()):
        return False
    import webbrowser

    return webbrowser.open(url)


def _has_screen() -> bool:
    if not sys.stdout.isatty():
        return False
    on_desktop = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return on_desktop or sys.platform in ("darwin", "win32")


@asynccontextmanager
async def page_beside(
    commands: ServedEngine, settings: Settings, registry: Registry
) -> AsyncIterator[str]:
    """The address of a page that shows the runs of this engine: of the server that is alive on
    its file, else of one in this process."""
    found = live_server(settings.db)
    if found is not None:
        yield found
        return
    from dovetail import __version__
    from dovetail.api.app import create_app
    from dovetail.api.operations import ThisProcess
    from dovetail.api.server import CannotListen, listen, serve, url_of
    from dovetail.api.service import ApiService
    from dovetail.documents.api import router as documents_router

    try:
        sockets = listen(["127.0.0.1"], USUAL_PORT)
    except CannotListen:
        sockets = listen(["127.0.0.1"], 0)
    handlers = [known.announcement() for known in registry.handlers()]
    fleet = ThisProcess(commands, handlers, settings.concurrency)
    service = ApiService(commands, fleet, settings)
    app = create_app(service, __version__, applications=[documents_router])
    serving = asyncio.ensure_future(serve(app, sockets, service.closing, settings.max_connections))
    try:
        with announced_address(settings.db, url_of(sockets)):
            yield url_of(sockets)
    finally:
        service.closing.set()
        await serving
        for one in sockets:
            one.close()


NO_SERVER = (
    "no server runs on this file; start one with `dovetail serve`, or run a workflow with "
    "`dovetail run --web FILE`"
)
NOT_KNOWN = (
    "which server shows the runs of this Redis is not known; name it with --server or "
    f"{env_name('server')}"
)
