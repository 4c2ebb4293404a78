"""The digest of the examples against a flaky server: does its rate limit hold?

    .venv/bin/python bench/digest.py [--rate 20] [--articles 200]

5 % of the articles always fail, and 10 % more fail once. Prints the status of the run, and the rate
of the requests; the exit code is 1 if the rate is not within 5 % of the limit. At 20 a second it
takes 11 seconds.

The rate is the slope of a line through the times of all requests, so that a single late request at
the beginning or the end does not decide it. One request is made before: the first request of a
process also loads the HTTP client, and requests that become due meanwhile would be sent at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import yaml

from dovetail import Dovetail, Run

FLOW = Path(__file__).resolve().parent.parent / "examples" / "digest.yaml"
TOLERANCE = 0.05
GONE = range(7, 1 << 30, 20)
"""The numbers of the articles that always fail."""


class FlakyServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Articles)
        self.asked: Counter[str] = Counter()
        self.times: list[float] = []

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.server_port}/{number}"

    def rate(self) -> float:
        return linear_regression(sorted(self.times), range(len(self.times))).slope


class Articles(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        number = int(self.path.removeprefix("/"))
        self.server.times.append(time.monotonic())
        self.server.asked[self.path] += 1
        status = 404 if number in GONE else 200
        if number % 10 == 3 and self.server.asked[self.path] == 1:
            status = 503
        body = b'{"url": "article %d"}' % number
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def flaky_server() -> Iterator[FlakyServer]:
    server = FlakyServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Measured(NamedTuple):
    run: Run
    requests: int
    rate: float


async def measure(rate: float, articles: int) -> Measured:
    """Needs `DOVETAIL_ALLOW_PRIVATE_ADDRESSES` to have 127.0.0.1."""
    digest: dict[str, Any] = yaml.safe_load(FLOW.read_text())
    digest["nodes"][0]["retry"] = {"base_delay_seconds": 0.02, "jitter": 0}
    with flaky_server() as server, tempfile.TemporaryDirectory() as folder:
        async with Dovetail(str(Path(folder) / "runs.db")) as dt:
            first = {"id": "first", "handler": "call_external_service"}
            await dt.run({"name": "first", "nodes": [{**first, "config": {"url": server.url(0)}}]})
            server.times.clear()
            await dt._commands.set_rate_limit("news", rate, 1)
            urls = [server.url(number) for number in range(articles)]
            run = await dt.run(digest, {"articles": urls})
        return Measured(run, len(server.times), server.rate())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--articles", type=int, default=200)
    asked = parser.parse_args(words)
    os.environ["DOVETAIL_ALLOW_PRIVATE_ADDRESSES"] = "127.0.0.1/32"
    found = asyncio.run(measure(asked.rate, asked.articles))
    missing = sum(one is None for one in found.run.nodes["fetch"].output or ())
    off = found.rate / asked.rate - 1
    print(f"{found.run.status}: {asked.articles} articles, {missing} missing")
    print(f"{found.requests} requests at {found.rate:.2f}/s: {off:+.1%} of {asked.rate:g}/s")
    return 0 if found.run.status == "COMPLETED" and abs(off) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
