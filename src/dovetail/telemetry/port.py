"""`/metrics` and the health of a service that has no API: on a port of its own, from a thread.

A thread, because a service may be a pool of processes without an event loop, and because the page
must come while the loop is busy; whether the loop still turns is what `/health/live` asks. Without
tokens only this machine may ask; with some, everybody who has one, as in the API. What it must not
know: what is counted, or what the service does.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dovetail.config import env_name
from dovetail.core.errors import DovetailError

log = logging.getLogger("dovetail.metrics")

MOST_AT_ONCE = 16
SLOW_SECONDS = 5.0
"""Who takes longer to say what they want is not waited for."""
PLAIN = "text/plain; charset=utf-8"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1"})


class MetricsPortError(DovetailError):
    type = "cannot_listen"


class MetricsPort:
    """Use `with`: it answers until the end of it."""

    def __init__(
        self,
        port: int,
        page: Callable[[], tuple[bytes, str]],
        *,
        live: Callable[[], bool],
        ready: Callable[[], bool],
        allowed: Callable[[bytes], bool] | None,
    ) -> None:
        """`page` gives a text and its content type; `allowed` says whether a token is good, and is
        None where no token is asked for."""
        self._port = port
        self.page = page
        self.live = live
        self.ready = ready
        self.allowed = allowed

    def __enter__(self) -> MetricsPort:
        try:
            self._server = _MetricsServer(self, self._port)
        except OSError as error:
            raise MetricsPortError(
                f"port {self._port} ({env_name('metrics_port')}): {error.strerror}; "
                "each service on a machine needs a port of its own"
            ) from None
        # A child that outlives us must not keep the port from whoever takes our place.
        listening = weakref.ref(self._server.socket)
        os.register_at_fork(after_in_child=lambda: _close(listening()))
        thread = threading.Thread(
            target=self._server.serve_forever, name="dovetail-metrics", daemon=True
        )
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _close(listening: socket.socket | None) -> None:
    if listening is not None:
        listening.close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, about: MetricsPort, port: int) -> None:
        self.about = about
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        everywhere = about.allowed is not None
        if everywhere and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        host = "" if everywhere else "127.0.0.1"
        super().__init__((host, port), _MetricsRequest)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "", self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a question about metrics was broken off", exc_info=True)


class _MetricsRequest(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = SLOW_SECONDS
    server_version = "dovetail"
    sys_version = ""

    def do_GET(self) -> None:
        path, about = self.path.partition("?")[0], self.server.about
        if path == "/health/live":
            self._say(about.live(), b"ok\n", b"the service does not answer\n")
        elif path == "/health/ready":
            self._say(about.ready(), b"ok\n", b"Redis does not answer, or the service is ending\n")
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /health/live, /health/ready\n")
        elif self._is_allowed():
            text, kind = about.page()
            self._answer(HTTPStatus.OK, text, kind)

    def _is_allowed(self) -> bool:
        """Whether the asker may know; if not, that was said."""
        allowed = self.server.about.allowed
        if allowed is None:
            # A page of another site may have its own name resolve to this machine.
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name.lower() in LOOPBACK_NAMES:
                return True
            self._answer(HTTPStatus.FORBIDDEN, b"this service is not called that\n")
            return False
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and allowed(token.strip().encode("latin-1", "replace")):
            return True
        self._answer(
            HTTPStatus.UNAUTHORIZED,
            b"a token is needed: Authorization: Bearer <token>\n",
            challenge='Bearer realm="dovetail"',
        )
        return False

    def _say(self, well: bool, yes: bytes, no: bytes) -> None:
        self._answer(*((HTTPStatus.OK, yes) if well else (HTTPStatus.SERVICE_UNAVAILABLE, no)))

    def _answer(
        self, status: HTTPStatus, text: bytes, kind: str = PLAIN, *, challenge: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if challenge is not None:
            self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: who asks every few seconds is no news."""
