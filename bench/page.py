"""The web page under load, in a real browser before a real server.

How soon a run of 1,000 and of 10,000 nodes can be used and its graph is painted, how smoothly the
graph moves, what a thousand events a second do to the frames, how many bytes the first load has,
and how long a page of 100,000 runs takes, in the embedded file and in Redis.

The times are taken in the page, from the start of its navigation. Other programs on the machine
make all of them longer.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from playwright.sync_api import Browser, Page, sync_playwright

from api import ask, served
from fleet import private_redis, server_module
from measuring import summary

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = {1_000: (0.5, 1.5), 10_000: (1.5, None)}
"""Seconds by which a run of so many nodes is usable, and its graph painted."""
LEAST_FRAMES = 30.0
MAX_FRAME = 0.2
MAX_FIRST_LOAD = 100_000
LISTED_RUNS = 100_000
MAX_PAGE_SECONDS = 0.2
UPDATES_SECONDS = 10.0
SLEEPERS, UPDATED_NODES = 800, 9_000
"""So many nodes sleep for a second at once, and each has three events."""
ROUNDS = 5
TABS = {"nodes": ".row.node", "graph": ".boxes[style]", "timeline": ".row.span"}
"""What is there when a tab is."""

Verdict = Callable[[str, float, str, bool], dict[str, Any]]


@contextmanager
def server(folder: Path, *args: str, **env: str) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    with served(SCRIPT, "serve", "--port", "0", *args, folder=folder, **env) as url:
        yield url


@contextmanager
def browser() -> Iterator[Browser]:
    program = server_module("binaries").find_browser()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=str(program.path),
            env={**os.environ, **program.environment},
            args=FLAGS,
        )
        yield opened
        opened.close()


def new_page(opened: Browser) -> Page:
    """With an empty cache."""
    context = opened.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    return page


def seconds_until(page: Page, selector: str) -> float:
    """From the start of the navigation until this is in the document and painted."""
    found: float = page.evaluate(
        """(selector) => new Promise((resolve) => {
          const look = () => (document.querySelector(selector)
            ? requestAnimationFrame(() => resolve(performance.now() / 1000))
            : requestAnimationFrame(look));
          look();
        })""",
        selector,
    )
    return found


def large_run(url: str, count: int) -> str:
    width = count // 10
    nodes = [
        {
            "id": f"node_{n}",
            "handler": "input",
            "dependencies": [f"node_{n - width}"] if n >= width else [],
        }
        for n in range(count)
    ]
    body = {"definition": {"name": "large", "nodes": nodes}}
    run_id: str = ask(url, "POST", "/runs", body)["run_id"]
    ask(url, "GET", f"/runs/{run_id}?nodes=false&wait=300")
    return run_id


def opened_run(opened: Browser, url: str, run_id: str) -> dict[str, float]:
    usable, painted = [], []
    for _ in range(ROUNDS):
        page = new_page(opened)
        page.goto(f"{url}/#/runs/{run_id}/nodes", wait_until="commit")
        usable.append(seconds_until(page, ".row.node"))
        page.context.close()
        page = new_page(opened)
        page.goto(f"{url}/#/runs/{run_id}/graph", wait_until="commit")
        painted.append(seconds_until(page, ".boxes[style]"))
        page.context.close()
    return {"usable": summary(usable).median, "graph": summary(painted).median}


PAN = """
(collapse) => new Promise((resolve) => {
  const canvas = document.querySelector(".canvas");
  const box = canvas.getBoundingClientRect();
  const at = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, {
    pointerId: 1, button: 0, buttons: 1, bubbles: true,
    clientX: box.left + x, clientY: box.top + y }));
  canvas.setPointerCapture = () => {};
  at("pointerdown", 400, 200);
  const gaps = [];
  let last = performance.now();
  const begun = last;
  const step = (now) => {
    gaps.push(now - last);
    last = now;
    const turn = (now - begun) / 300;
    at("pointermove", 400 + 300 * Math.sin(turn), 200 + 120 * Math.cos(turn));
    if (now - begun < 3000) return requestAnimationFrame(step);
    at("pointerup", 400, 200);
    resolve({ frames: gaps.length / 3, worst: Math.max(...gaps.slice(2)) / 1000 });
  };
  requestAnimationFrame(step);
})
"""


def panned(opened: Browser, url: str, run_id: str, collapse: int) -> dict[str, float]:
    page = new_page(opened)
    page.goto(f"{url}/#/runs/{run_id}/graph?collapse={collapse}", wait_until="commit")
    seconds_until(page, ".boxes[style]")
    page.get_by_role("button", name="Fit").click()
    page.wait_for_timeout(300)
    found: dict[str, float] = page.evaluate(PAN)
    page.context.close()
    return found


FRAMES = """
(seconds) => new Promise((resolve) => {
  const gaps = [];
  let last = performance.now();
  const begun = last;
  const step = (now) => {
    gaps.push(now - last);
    last = now;
    if (now - begun < seconds * 1000) requestAnimationFrame(step);
    else resolve({ frames: gaps.length / seconds, worst: Math.max(...gaps.slice(2)) / 1000 });
  };
  requestAnimationFrame(step);
})
"""


def updated(opened: Browser, folder: Path, tab: str) -> dict[str, float]:
    """The frames of a page while a run of the server has a thousand events a second."""
    with server(folder, DOVETAIL_CONCURRENCY=str(SLEEPERS)) as url:
        rest = {"handler": "sleep", "config": {"seconds": 1}}
        nodes = [{"id": f"node_{n}", **rest} for n in range(UPDATED_NODES)]
        body = {"definition": {"name": "busy", "nodes": nodes}}
        run_id = ask(url, "POST", "/runs", body)["run_id"]
        page = new_page(opened)
        page.goto(f"{url}/#/runs/{run_id}/{tab}", wait_until="commit")
        seconds_until(page, TABS[tab])
        before = len(ask(url, "GET", f"/runs/{run_id}/events"))
        began = time.perf_counter()
        found: dict[str, float] = page.evaluate(FRAMES, UPDATES_SECONDS)
        events = len(ask(url, "GET", f"/runs/{run_id}/events")) - before
        found["rate"] = events / (time.perf_counter() - began)
        page.context.close()
        if ask(url, "GET", f"/runs/{run_id}?nodes=false")["finished_at"] is None:
            ask(url, "POST", f"/runs/{run_id}/cancel", {})
    return found


def first_load(opened: Browser, url: str) -> int:
    """Bytes of the page and its files, compressed."""
    page = new_page(opened)
    page.goto(url)
    seconds_until(page, "main .empty, main .rows")
    total: int = page.evaluate(
        """performance.getEntriesByType("resource").filter((one) => one.name.includes("/assets/"))
          .concat(performance.getEntriesByType("navigation"))
          .reduce((sum, one) => sum + one.encodedBodySize, 0)"""
    )
    page.context.close()
    return total


# ── a long list ─────────────────────────────────────────────────────────────────────────────


def fill_file(path: Path) -> None:
    """Copies of the one run that is there. A list reads their rows only."""
    with sqlite3.connect(path) as file:
        columns = [row[1] for row in file.execute("PRAGMA table_info(runs)")]
        row = dict(zip(columns, file.execute("SELECT * FROM runs").fetchone(), strict=True))
        statuses = ["COMPLETED"] * 9 + ["FAILED"]
        rows = (
            {
                **row,
                "number": row["number"] + 1 + n,
                "run_id": str(uuid4()),
                "status": statuses[n % 10],
                "created_at": row["created_at"] - (LISTED_RUNS - n) / 2,
            }
            for n in range(LISTED_RUNS)
        )
        marks = ", ".join(f":{name}" for name in columns)
        file.executemany(f"INSERT INTO runs ({', '.join(columns)}) VALUES ({marks})", rows)


def listed(opened: Browser, url: str) -> dict[str, float]:
    """Seconds of each call for a page of the list, and of the list on the screen."""
    calls = {
        "first page": "/runs?limit=50",
        "failed": "/runs?status=FAILED&limit=50",
        "counts": "/run-counts",
        "counts of a workflow": "/run-counts?workflow=bench",
        "last hour": f"/runs?limit=50&created_after={_ago(3600)}",
    }
    cursor = ask(url, "GET", "/runs?limit=1000")["next_cursor"]
    calls["older page"] = f"/runs?limit=100&cursor={cursor}"
    found = {}
    for name, path in calls.items():
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            ask(url, "GET", path)
            times.append(time.perf_counter() - began)
        found[name] = summary(times).median
    page = new_page(opened)
    page.goto(url, wait_until="commit")
    found["on the screen"] = seconds_until(page, ".row.run")
    page.context.close()
    return found


def _ago(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))


def embedded_list(opened: Browser, folder: Path) -> dict[str, float]:
    with server(folder) as url:
        ask(
            url, "POST", "/workflows", {"name": "bench", "nodes": [{"id": "a", "handler": "input"}]}
        )
        run_id = ask(url, "POST", "/workflows/bench/runs", {})["run_id"]
        ask(url, "GET", f"/runs/{run_id}?nodes=false&wait=30")
    fill_file(folder / ".dovetail" / "dovetail.db")
    with server(folder) as url:
        return listed(opened, url)


def redis_list(opened: Browser, folder: Path, say: Callable[[str], None]) -> dict[str, float]:
    with private_redis() as redis:
        env = {"DOVETAIL_REDIS_URL": redis.url}
        with server(folder, "--with", "orchestrator,worker", **env) as url:
            flow = {"name": "bench", "nodes": [{"id": "a", "handler": "input"}]}
            ask(url, "POST", "/workflows", flow)
            say(f"… {LISTED_RUNS:,} runs in Redis")
            for begin in range(0, LISTED_RUNS, 10_000):
                items = [{"n": number} for number in range(begin, begin + 10_000)]
                made = ask(url, "POST", "/workflows/bench/batches", {"items": items})["batch_id"]
                while ask(url, "GET", f"/batches/{made}?limit=1")["finished_at"] is None:
                    time.sleep(0.2)
            return listed(opened, url)


# ── all of it ───────────────────────────────────────────────────────────────────────────────


def measure(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    report: dict[str, Any] = {"runs": {}, "updates": {}}
    with browser() as opened:
        with server(folder / "runs") as url:
            report["first load"] = first_load(opened, url)
            for count in SIZES:
                say(f"… a run of {count:,} nodes")
                run_id = large_run(url, count)
                report["runs"][count] = opened_run(opened, url, run_id)
            report["pan"] = {
                "every node": panned(opened, url, run_id, 0),
                "collapsed": panned(opened, url, run_id, 1),
            }
        for tab in TABS:
            say(f"… a thousand events a second on the tab {tab}")
            report["updates"][tab] = updated(opened, folder / f"updates-{tab}", tab)
        say(f"… {LISTED_RUNS:,} runs in the file")
        report["list"] = {"embedded": embedded_list(opened, folder / "list")}
        report["list"]["redis"] = redis_list(opened, folder / "redis", say)
    return report


def verdicts(found: dict[str, Any], verdict: Verdict) -> list[dict[str, Any]]:
    kilobytes = found["first load"] / 1e3
    reported = [
        verdict("first load, kB gzip", kilobytes, "at most 100", kilobytes * 1e3 <= MAX_FIRST_LOAD)
    ]
    for count, (usable, painted) in SIZES.items():
        run = found["runs"][count]
        for name, most in (("usable", usable), ("graph", painted)):
            if most is not None:
                what = f"{count:,} nodes: {name}, s"
                reported.append(verdict(what, run[name], f"at most {most:g}", run[name] <= most))
    for name, pan in found["pan"].items():
        frames = pan["frames"]
        what = f"10,000 nodes, {name}: frames a second while it is dragged"
        reported.append(verdict(what, frames, f"at least {LEAST_FRAMES:g}", frames >= LEAST_FRAMES))
    for tab, row in found["updates"].items():
        what = f"{row['rate']:,.0f} events a second, {tab}: longest frame, ms"
        worst = 1e3 * row["worst"]
        reported.append(verdict(what, worst, "at most 200", row["worst"] <= MAX_FRAME))
    for where, calls in found["list"].items():
        for name, seconds in calls.items():
            if name != "on the screen":
                what = f"{LISTED_RUNS:,} runs, {where}: {name}, ms"
                is_quick = seconds <= MAX_PAGE_SECONDS
                reported.append(verdict(what, 1e3 * seconds, "at most 200", is_quick))
    return reported


def table(found: dict[str, Any]) -> str:
    lines = ["The page", "", f"  {'first load':34} {found['first load'] / 1e3:8.1f} kB"]
    for count, row in found["runs"].items():
        lines += [
            f"  {f'{count:,} nodes: the list is there':34} {row['usable']:8.2f} s",
            f"  {f'{count:,} nodes: the graph is painted':34} {row['graph']:8.2f} s",
        ]
    for name, pan in found["pan"].items():
        what = f"dragged, {name}"
        lines.append(
            f"  {what:34} {pan['frames']:8.0f} frames / s, worst {1e3 * pan['worst']:.0f} ms"
        )
    for tab, row in found["updates"].items():
        what = f"{row['rate']:,.0f} events / s, {tab}"
        lines.append(
            f"  {what:34} {row['frames']:8.0f} frames / s, worst {1e3 * row['worst']:.0f} ms"
        )
    for where, calls in found["list"].items():
        for name, seconds in calls.items():
            what = f"{LISTED_RUNS:,} runs, {where}: {name}"
            lines.append(f"  {what:44} {1e3 * seconds:8.1f} ms")
    return "\n".join(lines)


def main() -> None:
    """By itself, without the other parts of the benchmark."""
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        print(table(measure(Path(folder), say)))


if __name__ == "__main__":
    main()
