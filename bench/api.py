"""The HTTP API of the embedded engine under load, from a second process on loopback.

Three questions: how many triggers it answers in a second, beside a bare FastAPI route that
durably writes one row per request; what that load does to the time of a `GET /runs/<id>`; and
whether ten thousand finished runs make any list or detail slower.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import Times, ratio, rounds, summary

HERE = Path(__file__).resolve().parent
SCRIPT = str(Path(sys.executable).with_name("dovetail"))
OURS, PEER = "POST /workflows/<name>/runs", "a bare route and one row"
CLIENTS = 32
SECONDS = 3.0
"""Of load in one round."""
LEAST_RATE = 0.5
"""Of the bare route's rate."""
MOST_DELAY = 0.050
"""Seconds that the load may add to the slowest of a hundred GETs."""
SHORT_HISTORY, LONG_HISTORY = 100, 10_000
MOST_SLOWDOWN = 1.5
REPEATS = 100
FLOW = {"name": "bench", "nodes": [{"id": "a", "handler": "input"}]}

Verdict = Callable[[str, float, str, bool], dict[str, Any]]


@contextmanager
def served(*command: str, folder: Path, **settings: str) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    process = subprocess.Popen(
        command, cwd=folder, env=env | settings, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def dovetail(folder: Path) -> Iterator[str]:
    folder.mkdir()
    with served(SCRIPT, "serve", "--port", "0", folder=folder) as url:
        ask(url, "POST", "/workflows", FLOW)
        yield url


@contextmanager
def bare_route(folder: Path) -> Iterator[str]:
    folder.mkdir()
    peer = str(HERE / "api_peer.py")
    with served(sys.executable, peer, "rows.db", folder=folder) as url:
        yield url


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/api/v1{path}", data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def load(url: str, path: str, *, clients: int = CLIENTS, look: str = "") -> dict[str, Any]:
    asked = {"url": url, "path": path, "clients": clients, "seconds": SECONDS, "look": look}
    command = [sys.executable, str(HERE / "api_load.py"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settled(url: str) -> None:
    """Nothing is left to do of what was triggered: a round begins with a server at rest."""
    while ask(url, "GET", "/runs?status=RUNNING&limit=1")["items"]:
        time.sleep(0.1)


def measure(count: int, warmup: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch,
        dovetail(Path(scratch, "ours")) as ours,
        bare_route(Path(scratch, "peer")) as peer,
    ):
        run_id = ask(ours, "POST", "/workflows/bench/runs", {})["run_id"]
        detail = f"/api/v1/runs/{run_id}"
        busy: Times = []
        idle: Times = []

        def triggers() -> float:
            found = load(ours, "/api/v1/workflows/bench/runs", look=detail)
            busy.append(p99(found["looks"]))
            settled(ours)
            idle.append(p99(load(ours, "", clients=0, look=detail)["looks"]))
            return 1 / float(found["rate"])

        def rows() -> float:
            return 1 / float(load(peer, "/rows")["rate"])

        times = rounds(
            {OURS: triggers, PEER: rows}, count=count, warmup=warmup, timed=lambda work: work()
        )
    return {
        "rates": {name: 1 / summary(seconds).median for name, seconds in times.items()},
        "times": ratio(times[PEER], times[OURS]),
        "p99 idle": statistics.median(idle[warmup:]),
        "p99 loaded": statistics.median(busy[warmup:]),
        "history": history(count, warmup),
    }


def p99(times: Times) -> float:
    return statistics.quantiles(times, n=100)[-1]


def history(count: int, warmup: int) -> dict[str, Any]:
    """Seconds of each reading call with few and with many finished runs, and how they compare."""
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch,
        dovetail(Path(scratch, "short")) as short,
        dovetail(Path(scratch, "long")) as long,
    ):
        calls = {"short": past(short, SHORT_HISTORY), "long": past(long, LONG_HISTORY)}
        for name in calls["long"]:
            work = {which: paths[name] for which, paths in calls.items()}
            times = rounds(work, count=max(3, count), warmup=max(1, warmup))
            found[name] = {
                which: summary(seconds).median / REPEATS for which, seconds in times.items()
            }
            found[name]["times"] = ratio(times["long"], times["short"])
    return found


def past(url: str, runs: int) -> dict[str, Callable[[], object]]:
    """Calls on a server with so many runs that have ended, each made many times."""
    made = []
    for begin in range(0, runs, SHORT_HISTORY):
        items = [{"n": number} for number in range(begin, begin + SHORT_HISTORY)]
        made.append(ask(url, "POST", "/workflows/bench/batches", {"items": items})["batch_id"])
    for batch_id in made:
        while ask(url, "GET", f"/batches/{batch_id}?limit=1")["finished_at"] is None:
            time.sleep(0.1)
    run_id = ask(url, "GET", f"/batches/{made[0]}?limit=1")["runs"][0]["run_id"]
    paths = {
        "GET /runs": "/runs?limit=20",
        "GET /runs?status=": "/runs?status=COMPLETED&limit=20",
        "GET /runs?workflow=": "/runs?workflow=bench&limit=20",
        "GET /runs?batch=": f"/runs?batch={made[0]}&limit=20",
        "GET /runs/<id>": f"/runs/{run_id}",
        "GET /runs/<id>/events": f"/runs/{run_id}/events",
        "GET /runs/<id>/results": f"/runs/{run_id}/results",
        "GET /workflows": "/workflows",
    }
    return {name: lambda path=path: again(url, path) for name, path in paths.items()}  # type: ignore[misc]


def again(url: str, path: str) -> None:
    """On one connection, so that the call is what is timed."""
    from http.client import HTTPConnection
    from urllib.parse import urlsplit

    connection = HTTPConnection(urlsplit(url).netloc)
    for _ in range(REPEATS):
        connection.request("GET", f"/api/v1{path}", headers={"Accept": "application/json"})
        connection.getresponse().read()
    connection.close()


def verdicts(found: dict[str, Any], verdict: Verdict) -> list[dict[str, Any]]:
    delay = found["p99 loaded"] - found["p99 idle"]
    reported = [
        verdict(
            f"triggers over HTTP × {PEER}",
            found["times"],
            f"at least {LEAST_RATE:g}",
            found["times"] >= LEAST_RATE,
        ),
        verdict(
            "p99 of GET /runs/<id> under that load, ms above idle",
            1e3 * delay,
            f"at most {1e3 * MOST_DELAY:g}",
            delay <= MOST_DELAY,
        ),
    ]
    for name, row in found["history"].items():
        reported.append(
            verdict(
                f"{LONG_HISTORY:,} finished runs against {SHORT_HISTORY}: {name}",
                row["times"],
                f"at most {MOST_SLOWDOWN:g}",
                row["times"] <= MOST_SLOWDOWN,
            )
        )
    return reported


def table(found: dict[str, Any]) -> str:
    lines = [f"API, embedded, {CLIENTS} clients", ""]
    lines += [f"  {name:30} {rate:8,.0f} / s" for name, rate in found["rates"].items()]
    lines += [
        f"  {'ratio':30} {found['times']:8.2f}",
        f"  {'p99 of GET /runs/<id>, idle':30} {1e3 * found['p99 idle']:8.1f} ms",
        f"  {'p99 of GET /runs/<id>, loaded':30} {1e3 * found['p99 loaded']:8.1f} ms",
        "",
        f"  {'':30} {SHORT_HISTORY:>8,} {LONG_HISTORY:>8,} runs",
    ]
    for name, row in found["history"].items():
        numbers = f"{1e3 * row['short']:8.2f} {1e3 * row['long']:8.2f} ms"
        lines.append(f"  {name:30} {numbers}   × {row['times']:.2f}")
    return "\n".join(lines)
