"""The web page: its static files, which need no token. Every datum comes from the API.

The files are in `dovetail/web`, without a build step. Their address has a hash of all of them, so
that a browser may keep them for good: `/assets/<hash>/<file>`. They are read and compressed at the
first request, not when the server starts.
"""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail.api.middleware import reads_gzip
from dovetail.api.problems import Refusal
from dovetail.api.responses import COMPRESSED, names

FOLDER = Path(__file__).parent.parent / "web"
INDEX = "index.html"
ASSETS = "/assets/"

KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
}
"""What is served, by its suffix. Licences and the manifest stay in the package."""

BARE_IMPORTS = {b'from"preact"': b'from"./preact.mjs"'}
"""Names of packages in vendored files, as paths.

A browser resolves such a name only with an inline import map, which the policy forbids. The files
in the package stay as they were published.
"""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
)
LARGE_FILE = 200_000
"""Bytes."""
FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class StaticFile:
    body: bytes
    kind: str
    cached: str
    """Its `Cache-Control`."""

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.body, 9, mtime=0)

    @cached_property
    def tag(self) -> str:
        return f'"{sha256(self.body).hexdigest()[:24]}"'

    def answer(self, request: Request) -> Response:
        headers = {
            "Cache-Control": self.cached,
            "Content-Security-Policy": POLICY,
            "ETag": self.tag,
            "Vary": "accept-encoding",
        }
        if names(request, "if-none-match", self.tag, weak=True):
            return Response(status_code=304, headers=headers)
        if not reads_gzip(request.scope):
            return Response(self.body, 200, headers, self.kind)
        headers |= {"Content-Encoding": "gzip", "ETag": f'{self.tag[:-1]}{COMPRESSED}"'}
        return Response(self.compressed, 200, headers, self.kind)


class WebPage:
    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    @cached_property
    def files(self) -> dict[str, StaticFile]:
        """By path."""
        found = {
            path.relative_to(self._folder).as_posix(): path.read_bytes()
            for path in sorted(self._folder.rglob("*"))
            if path.suffix in KINDS
        }
        for name in found:
            if name.startswith("vendor/"):
                for bare, relative in BARE_IMPORTS.items():
                    found[name] = found[name].replace(bare, relative)
        seal = sha256()
        for name, body in found.items():
            seal.update(b"%b\0%d\0%b" % (name.encode(), len(body), body))
        base = f"{ASSETS}{seal.hexdigest()[:16]}/"
        index = found.pop(INDEX).replace(b"{{ assets }}", base.encode())
        return {"/": StaticFile(index, KINDS[".html"], "no-cache")} | {
            base + name: StaticFile(body, KINDS[Path(name).suffix], FOREVER)
            for name, body in found.items()
        }

    def address(self, name: str) -> str:
        """The path of one of the files, such as `docs.js`."""
        return next(path for path in self.files if path.endswith(f"/{name}"))

    def holds(self, path: str) -> bool:
        """Whether this is the path of a static file."""
        return path == "/" or (path.startswith(ASSETS) and path in self.files)

    async def serve(self, request: Request) -> Response:
        found = self.files.get(request.url.path)
        if found is None:
            raise Refusal(404, "the page has no such file; load the page again")
        if len(found.body) > LARGE_FILE:
            # In a thread: it takes a third of a second, once, and runs go on meanwhile.
            await asyncio.to_thread(getattr, found, "compressed")
        return found.answer(request)

    @cached_property
    def routes(self) -> list[Route]:
        return [
            Route("/", self.serve, methods=["GET"]),
            Route(ASSETS + "{tag}/{file:path}", self.serve, methods=["GET"]),
        ]
