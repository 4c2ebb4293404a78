"""`/metrics`, `/health/live` and `/health/ready` of a service without an API, on its own port.

A thread serves them: the service may be a pool of processes without an event loop, and the page
must come while a loop is busy. Without tokens the port listens on the loopback address only. With
tokens a caller needs one, as in the API.
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

MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_SECONDS = 5.0
"""A client that takes longer to send its request is disconnected."""
PLAIN = "text/plain; charset=utf-8"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1"})


class MetricsPortError(DovetailError):
    type = "cannot_listen"


class MetricsPort:
    """A context manager: it serves until its end."""

    def __init__(
        self,
        port: int,
        page: Callable[[], tuple[bytes, str]],
        *,
        live: Callable[[], bool],
        ready: Callable[[], bool],
        allowed: Callable[[bytes], bool] | None,
    ) -> None:
        """`page` gives a text and its content type. `allowed` says whether a token is valid; None
        if no token is needed."""
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
        # A child process that outlives this one must not keep the port from the next service.
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
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
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
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics was broken off", exc_info=True)


class _MetricsRequest(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = REQUEST_TIMEOUT_SECONDS
    server_version = "dovetail"
    sys_version = ""

    def do_GET(self) -> None:
        path, about = self.path.partition("?")[0], self.server.about
        if path == "/health/live":
            self._answer_health(about.live(), b"ok\n", b"the service does not answer\n")
        elif path == "/health/ready":
            self._answer_health(
                about.ready(), b"ok\n", b"Redis does not answer, or the service is ending\n"
            )
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /health/live, /health/ready\n")
        elif self._is_allowed():
            text, kind = about.page()
            self._answer(HTTPStatus.OK, text, kind)

    def _is_allowed(self) -> bool:
        """Whether the caller may see the metrics; if not, the refusal was sent."""
        allowed = self.server.about.allowed
        if allowed is None:
            # DNS rebinding: a website may let its own name resolve to this machine.
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

    def _answer_health(self, well: bool, yes: bytes, no: bytes) -> None:
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
        """Nothing: scrapes come every few seconds."""
