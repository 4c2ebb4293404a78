"""A receiver of webhooks, as a thread: it accepts, refuses, hangs or redirects, as a test wants."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

KEY = b"0123456789abcdef01234567"
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def message(self) -> Any:
        return json.loads(self.body)

    def is_signed(self) -> bool:
        """As the standard says it is verified."""
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode()
        expected = hmac.new(KEY, signed + self.body, hashlib.sha256).digest()
        given = self.headers["webhook-signature"].split(" ")
        fresh = abs(time.time() - int(self.headers["webhook-timestamp"])) < 300
        return fresh and f"v1,{base64.b64encode(expected).decode()}" in given


class Receiver:
    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answer: Callable[[Received], int] = lambda received: 204
        """The status of each answer; it may take its time."""
        self.reached_by_redirects: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                one = Received(self.path, headers, body, time.monotonic())
                receiver.received.append(one)
                self.send_response(receiver.answer(one))
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                receiver.reached_by_redirects.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def of(self, run_id: str) -> list[Received]:
        return [one for one in self.received if one.message["data"]["run_id"] == run_id]
