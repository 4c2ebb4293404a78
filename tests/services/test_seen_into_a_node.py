"""What can be seen of a node, on every set-up: real processes, real handlers.

One run for each handler of seen_handlers.py. Then the API, the client and the command line are
asked about it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from dovetail import Dovetail

from ..api.conftest import Api, Server, on, wait_for
from ..api.test_events import frames
from ..api.test_security_secrets import kept_in_postgres, kept_in_redis
from ..celery_crew import CeleryWorker
from ..cli.conftest import Outcome, Shell
from ..servers.postgres_server import Databases
from ..servers.redis_server import RedisServer

HANDLERS = Path(__file__).with_name("seen_handlers.py")
SECRET = "hunter2_hunter2_key"
NODE_LOG_BYTES = 1 << 20
SHORT = {"timeout_seconds": 0.3}
SAID = [
    ("INFO", "dovetail.handler", "by ctx.log", None),
    ("ERROR", "shop", "by logging", {"rows": 3}),
    ("WARNING", "structlog", "by structlog", {"order": 7}),
    ("INFO", "stdout", "by print", None),
    ("WARNING", "stderr", "to stderr", None),
    ("INFO", "stdout", "in a thread", None),
]


@dataclass
class Setup:
    """A server, and what runs its nodes."""

    name: str
    folder: Path
    env: dict[str, str]
    options: tuple[str, ...] = ()
    redis: RedisServer | None = None
    database_url: str | None = None
    workers: list[CeleryWorker] = field(default_factory=list)
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        shutil.copy(HANDLERS, self.folder / "seen.py")
        self.shell = Shell(self.folder)
        self.serve()

    def serve(self) -> None:
        self.server = Server(self.folder, *self.options, "--handlers", "seen.py", **self.env)
        # What handlers print goes there, too, and a full pipe would hold them up.
        out = self.server.process.stdout
        assert out is not None
        threading.Thread(target=lambda: [None for _ in out], daemon=True).start()

    def add_worker(self) -> None:
        assert self.redis is not None
        env = {"DOVETAIL_TRANSPORT": "streams", **self.env, "DOVETAIL_HANDLERS": "seen.py"}
        name = f"worker{len(self.workers)}"
        self.workers.append(CeleryWorker(self.folder, self.redis.url, name=name, **env))

    @property
    def api(self) -> Api:
        return self.server.client()

    def begin(self, *nodes: dict[str, Any], **more: Any) -> str:
        definition = {"name": "flow", "nodes": list(nodes), **more}
        return str(self.api.post("/runs", {"definition": definition})["run_id"])

    def finished(self, run_id: str) -> dict[str, Any]:
        return self.api.finished(run_id)

    def node(self, run_id: str, node: str = "a") -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/runs/{run_id}/nodes/{node}")
        return found

    def log(self, run_id: str, query: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = "0"
        while after is not None:
            page = self.api.get(f"/runs/{run_id}/logs?limit=1000&after={after}&{query}")
            found += page["items"]
            after = page["next_cursor"]
        return found

    def text(self, run_id: str) -> str:
        answer = self.api("GET", f"/runs/{run_id}/logs", headers={"accept": "text/plain"})
        assert answer.status_code == 200
        return answer.text

    def stream(self, run_id: str) -> list[dict[str, Any]]:
        accept = {"accept": "text/event-stream"}
        path = f"/api/v1/runs/{run_id}/logs"
        with self.api.http.stream("GET", path, headers=accept) as answer:
            return [line for _, line in frames(answer)]

    def cli(self, *words: str) -> Outcome:
        return self.shell(*words, "--server", self.server.url)

    def ask(self, question: Callable[[Dovetail], Any]) -> Any:
        async def asked() -> Any:
            async with Dovetail(self.server.url) as dt:
                return await question(dt)

        return asyncio.run(asked())

    def kept(self) -> bytes:
        """Everything that its stores hold."""
        if self.redis is None:
            files = (self.folder / ".dovetail").iterdir()
            return b"".join(file.read_bytes() for file in files)
        found = kept_in_redis(self.redis.url)
        found += b"".join(p.read_bytes() for p in self.redis.folder.rglob("*.aof"))
        if self.database_url is not None:
            found += asyncio.run(kept_in_postgres(self.database_url))
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.server.close()


@contextmanager
def setup_of(kind: str, folder: Path, databases: Databases) -> Iterator[Setup]:
    env = {"DOVETAIL_SECRET_KEY": SECRET}
    with ExitStack() as stack:
        if kind == "embedded":
            made = Setup(kind, folder, env)
        else:
            redis = stack.enter_context(RedisServer())
            env |= on(redis.url, DOVETAIL_LEASE_SECONDS="1", DOVETAIL_TRANSPORT=kind)
            database_url = None
            if kind == "streams":
                database_url = env["DOVETAIL_DATABASE_URL"] = databases.new_database()
                stack.callback(databases.drop_database, database_url)
            made = Setup(kind, folder, env, ("--with", "orchestrator"), redis, database_url)
        stack.callback(made.close)
        if kind != "embedded":
            made.add_worker()
            made.workers[0].wait_until_ready()
        yield made


@pytest.fixture(scope="module", params=["embedded", "streams", "celery"])
def setup(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: Databases,
) -> Iterator[Setup]:
    with setup_of(request.param, tmp_path_factory.mktemp(request.param), postgres_server) as made:
        yield made


def node(handler: str, id_: str = "a", *above: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "handler": handler, "dependencies": list(above), **more}


@pytest.fixture(scope="module")
def runs(setup: Setup) -> dict[str, str]:
    """A finished run for each handler that ends by itself."""
    from_above = {"page": "{{ above.page }}", "missing": 1}
    above = node("input", "above", config={"page": 7})
    begun = {
        "says": setup.begin(node("says")),
        "raises": setup.begin(above, node("raises", "a", "above", config=from_above)),
        "waits": setup.begin(node("waits", **SHORT)),
        "sleeps": setup.begin(node("sleeps", **SHORT)),
        "refuses_to_end": setup.begin(node("refuses_to_end", **SHORT)),
        "tells": setup.begin(
            node("tells", config={"auth": "Bearer {{ secrets.KEY }}"}, max_retries=0)
        ),
        "odd": setup.begin(node("odd")),
        "counts": setup.begin(node("counts", config={"lines": 10_000})),
    }
    for run_id in begun.values():
        setup.finished(run_id)
    return begun


def parts(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(one["level"], one["logger"], one["message"], one["fields"]) for one in lines]


def messages(lines: list[dict[str, Any]]) -> list[str]:
    return [line["message"] for line in lines]


# ── logs ─────────────────────────────────────────────────────────────────────────────────


def test_each_way_of_logging_is_one_line_in_order_wherever_it_is_read(
    setup: Setup, runs: dict[str, str]
) -> None:
    run_id = runs["says"]
    items = setup.log(run_id)
    assert parts(items) == SAID
    assert [item["seq"] for item in items] == list(range(1, len(SAID) + 1))
    assert {(i["node"], i["epoch"], i["attempt"], i["item"]) for i in items} == {("a", 1, 1, None)}
    times = [item["time"] for item in items]
    assert times == sorted(times)
    assert setup.stream(run_id) == items

    async def followed(dt: Dovetail) -> list[Any]:
        return [line async for line in dt.logs(run_id, follow=True)]

    lines = setup.ask(followed)
    assert [(one.level, one.logger, one.message, one.fields) for one in lines] == SAID
    text = [line.split(" ", 2)[2] for line in setup.text(run_id).splitlines()]
    assert text == [
        "a[1] dovetail.handler: by ctx.log",
        'a[1] shop: by logging {"rows": 3}',
        'a[1] structlog: by structlog {"order": 7}',
        "a[1] stdout: by print",
        "a[1] stderr: to stderr",
        "a[1] stdout: in a thread",
    ]
    assert setup.cli("runs", "logs", run_id).out == setup.text(run_id)
    assert json.loads(setup.cli("runs", "logs", run_id, "--json").out)["items"] == items
    printed = setup.cli("runs", "logs", run_id, "--follow", "--json").out
    assert [json.loads(line) for line in printed.splitlines()] == items
    assert messages(setup.log(run_id, "level=warning")) == [
        "by logging",
        "by structlog",
        "to stderr",
    ]
    assert messages(setup.log(run_id, "q=STDERR")) == ["to stderr"]


def test_a_line_can_be_read_while_its_handler_runs(setup: Setup, tmp_path: Path) -> None:
    run_id = setup.begin(node("holds", config={"file": str(tmp_path / "go")}))

    async def followed(dt: Dovetail) -> list[str]:
        found = []
        async for line in dt.logs(run_id, node="a", follow=True):
            assert (await dt.node(run_id, "a")).status == "COMPLETED" or not found
            found.append(line.message)
            (tmp_path / "go").touch()
        return found

    assert setup.ask(followed) == ["waits in attempt 1", "goes on"]


def test_control_characters_are_stored_as_they_are_and_shown_escaped(
    setup: Setup, runs: dict[str, str]
) -> None:
    run_id = runs["odd"]
    assert messages(setup.log(run_id)) == [
        "über 日本 🎉",
        "\x1b[31mred\x1b[0m \x1b[2J",
        "a NUL \x00 and a bell \x07",
        "two\nlines",
    ]
    assert setup.node(run_id)["error"]["message"] == "\x1b[2Jclears \x00 the screen ü"
    text = [line.split(": ", 1)[1] for line in setup.text(run_id).splitlines()]
    assert text == [
        "über 日本 🎉",
        r"\x1b[31mred\x1b[0m \x1b[2J",
        r"a NUL \x00 and a bell \x07",
        r"two\nlines",
    ]
    for words in (["logs", run_id], ["show", run_id, "a"], ["show", run_id]):
        for more in ([], ["--json"]):
            out = setup.cli("runs", *words, *more).out
            assert not set(out) & {"\x1b", "\x00", "\x07"}
    assert r"\x1b[2Jclears \x00 the screen ü" in setup.cli("runs", "show", run_id, "a").out


def test_ten_thousand_lines_in_a_second_are_all_there(setup: Setup, runs: dict[str, str]) -> None:
    run_id = runs["counts"]
    assert messages(setup.log(run_id)) == [f"line {number}" for number in range(10_000)]
    assert setup.node(run_id)["output"] < 5_000, "milliseconds that the handler took"


def test_a_flood_is_bounded_counted_and_delays_no_other_node(setup: Setup, tmp_path: Path) -> None:
    # On Celery a process of the pool runs one node; the bound is the same.
    megabytes = 5 if setup.name == "celery" else 50
    file = str(tmp_path / "done")
    beside = setup.begin(node("ticks", config={"file": file}))
    wait_for(lambda: setup.node(beside)["status"] == "RUNNING", "it ticks")
    run_id = setup.begin(node("floods", config={"megabytes": megabytes}))
    run = setup.finished(run_id)
    Path(file).touch()
    setup.finished(beside)
    assert run["status"] == "COMPLETED"
    lines = setup.log(run_id)
    (note,) = [line for line in lines if line["logger"] == "dovetail"]
    kept = [line for line in lines if line is not note]
    assert (kept[0]["message"], kept[-1]["message"]) == ("the first line", "the last line")
    assert NODE_LOG_BYTES // 2 < sum(len(line["message"]) for line in kept) <= NODE_LOG_BYTES
    missing = megabytes * 1000 + 2 - len(kept)
    assert f"{missing:,} lines (" in note["message"]
    assert "DOVETAIL_NODE_LOG_BYTES" in note["message"]
    assert setup.node(run_id)["output"] < 10_000
    assert setup.node(beside)["output"] < 1.0


# ── attempts and errors ──────────────────────────────────────────────────────────────────


def test_a_failure_is_shown_with_its_cause_its_place_and_its_traceback(
    setup: Setup, runs: dict[str, str]
) -> None:
    run_id = runs["raises"]
    detail = setup.node(run_id)
    (attempt,) = detail["attempts"]
    error = attempt["error"]
    lines = HANDLERS.read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "the page is missing" in line)
    small = {
        "type": "no_page",
        "message": "the page is missing",
        "where": f"seen.py:{number} in read",
    }
    assert {name: error[name] for name in small} == small
    trace = error["traceback"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'first'" in trace
    assert "The above exception was the direct cause of the following exception" in trace
    assert trace.index("KeyError: 'first'") < trace.index("PermanentError: the page is missing")
    assert "in raises" in trace
    assert "dovetail/engine" not in trace
    assert detail["error"] == small
    run = setup.api.get(f"/runs/{run_id}")
    assert run["error"].items() >= {"type": "no_page", "message": "the page is missing"}.items()
    assert "traceback" not in run["error"]
    assert (attempt["epoch"], attempt["attempt"], attempt["status"]) == (1, 1, "FAILED")
    assert attempt["worker"] == detail["worker"] is not None
    assert attempt["started_at"] <= attempt["finished_at"]
    assert attempt["duration"] >= 0
    assert detail["template"] == {"page": "{{ above.page }}", "missing": 1}
    assert (detail["config"], detail["config_error"]) == ({"page": 7, "missing": 1}, None)
    assert detail["inputs"] == {"above": {"page": 7}}


def test_the_client_and_the_command_line_show_the_node_as_the_api_does(
    setup: Setup, runs: dict[str, str]
) -> None:
    run_id = runs["raises"]
    detail = setup.node(run_id)
    seen = setup.ask(lambda dt: dt.node(run_id, "a"))
    assert (seen.config, seen.inputs) == (detail["config"], detail["inputs"])
    assert seen.attempts[0].status == "FAILED"
    assert seen.attempts[0].error["traceback"] == detail["attempts"][0]["error"]["traceback"]
    assert json.loads(setup.cli("runs", "show", run_id, "a", "--json").out) == detail
    shown = setup.cli("runs", "show", run_id, "a").out
    assert shown.startswith(f"FAILED a of run {run_id[:6]}")
    for expected in (
        '"page": 7',
        "input above",
        "1.1  FAILED",
        "the page is missing",
        f"at {detail['error']['where']}",
        "KeyError: 'first'",
        "stdout: about to read",
    ):
        assert expected in shown


@pytest.mark.parametrize("handler", ["waits", "sleeps"])
def test_a_timeout_says_where_the_handler_was(
    setup: Setup, runs: dict[str, str], handler: str
) -> None:
    detail = setup.node(runs[handler])
    (attempt,) = detail["attempts"]
    error = attempt["error"]
    assert (attempt["status"], error["type"]) == ("FAILED", "timeout")
    assert error["message"] == "did not finish within 0.3 s (timeout_seconds)"
    assert error["where"].startswith("seen.py:")
    assert error["where"].endswith(f" in {handler}")
    assert "sleep(" in error["traceback"]
    first, *rest = setup.log(runs[handler])
    assert first["message"] == {"waits": "waiting", "sleeps": "sleeping"}[handler]
    # In a pool of Celery a plain function is interrupted at its timeout: nothing goes on.
    goes_on = handler == "sleeps" and setup.name != "celery"
    assert [line["level"] for line in rest] == ["WARNING"] * goes_on, rest


def test_a_plain_function_that_goes_on_after_its_timeout_is_named_in_its_log(
    setup: Setup, runs: dict[str, str]
) -> None:
    run_id = runs["refuses_to_end"]
    assert setup.node(run_id)["attempts"][0]["error"]["type"] == "timeout"
    first, warning = setup.log(run_id)
    assert (first["message"], warning["level"]) == ("staying", "WARNING")
    assert warning["message"].startswith("still runs in ")
    assert "beyond its timeout of 0.3 s" in warning["message"]


def test_a_secret_is_nowhere(setup: Setup, runs: dict[str, str]) -> None:
    run_id = runs["tells"]
    detail = setup.node(run_id)
    assert detail["config"] == {"auth": "Bearer ***"}
    error = detail["attempts"][0]["error"]
    assert (error["type"], error["message"]) == ("ValueError", "refused ***")
    assert "KeyError: '***'" in error["traceback"]
    lines = setup.log(run_id)
    assert ("INFO", "stdout", "printed ***", None) in parts(lines)
    assert ("WARNING", "stderr", "to stderr ***", None) in parts(lines)
    assert ("INFO", "dovetail.handler", "logged ***", {"given": ["***"]}) in parts(lines)
    assert ("INFO", "structlog", "by structlog", {"key": "***"}) in parts(lines)
    (failed,) = [line for line in lines if line["message"].startswith("failed")]
    assert "KeyError" in json.dumps(failed)
    shown = [json.dumps(detail), json.dumps(lines), setup.text(run_id)]
    shown += [json.dumps(setup.stream(run_id)), json.dumps(setup.api.get(f"/runs/{run_id}"))]
    shown += [setup.cli("runs", *words, run_id).out for words in (["show"], ["logs"], ["events"])]
    shown += [setup.cli("runs", "show", run_id, "a").out]
    if setup.database_url is not None:
        wait_for(lambda: has_ended_in_the_archive(setup, run_id), "the archive has it")
    stored = setup.kept()
    assert b"refused ***" in stored
    for text in (*(text.encode() for text in shown), stored):
        for piece in (SECRET[:12], SECRET[6:]):
            assert piece.encode() not in text


def archived(setup: Setup) -> bytes:
    assert setup.database_url is not None
    return asyncio.run(kept_in_postgres(setup.database_url))


def has_ended_in_the_archive(setup: Setup, run_id: str) -> bool:
    async def asked() -> Any:
        connection = await asyncpg.connect(setup.database_url)
        try:
            found = "SELECT status FROM dovetail.runs WHERE run_id = $1"
            return await connection.fetchval(found, run_id)
        finally:
            await connection.close()

    return asyncio.run(asked()) in ("COMPLETED", "FAILED")


def test_an_allowed_failure_lets_the_run_go_on(setup: Setup) -> None:
    said = {"was": "{{ a.status }}", "because": "{{ a.error.message }}"}
    run_id = setup.begin(node("raises", allow_failure=True), node("output", "b", "a", config=said))
    run = setup.finished(run_id)
    assert (run["status"], run["error"]) == ("COMPLETED", None)
    assert setup.node(run_id)["status"] == "FAILED"
    assert setup.node(run_id)["attempts"][0]["error"]["where"].endswith(" in read")
    child = setup.node(run_id, "b")
    assert child["output"] == {"was": "FAILED", "because": "the page is missing"}
    assert child["config"] == child["output"]
    assert setup.api("POST", f"/runs/{run_id}/retry").status_code == 409


def test_a_failed_run_is_forked_and_retried_and_keeps_what_was_seen(
    setup: Setup, tmp_path: Path
) -> None:
    file = tmp_path / "needed"
    last = node("wants", "b", "a", config={"file": str(file)})
    run_id = setup.begin(node("says"), last)
    assert setup.finished(run_id)["status"] == "FAILED"
    before = setup.node(run_id, "b")
    planned = setup.api.post(f"/runs/{run_id}/fork", {"dry_run": True}, 200)
    assert planned == {"rerun": ["b"], "reuse": ["a"]}
    file.touch()
    fork = setup.api.post(f"/runs/{run_id}/fork", {})["run_id"]
    assert setup.finished(fork)["status"] == "COMPLETED"
    assert setup.api.get(f"/runs/{fork}")["forked_from"] == run_id
    reused = setup.node(fork)
    assert (reused["output"], reused["attempt"], reused["worker"]) == ("said", 0, None)
    assert messages(setup.log(fork)) == ["looks for it"]
    assert setup.node(run_id, "b") == before, "the older run is untouched"
    setup.api.post(f"/runs/{run_id}/retry")
    assert setup.finished(run_id)["status"] == "COMPLETED"
    tried = setup.node(run_id, "b")["attempts"]
    assert [(one["epoch"], one["status"]) for one in tried] == [(1, "FAILED"), (2, "COMPLETED")]
    assert tried[0] == before["attempts"][0]
    lines = setup.log(run_id, "node=b")
    assert [(one["epoch"], one["message"]) for one in lines] == [
        (1, "looks for it"),
        (2, "looks for it"),
    ]
    assert len(setup.log(run_id, "node=a")) == len(SAID)


# ── crashes; last, because they end processes that other tests use ───────────────────────


def test_a_killed_attempt_is_lost_and_its_lines_are_kept(setup: Setup) -> None:
    run_id = setup.begin(node("dies"))
    if setup.name == "embedded":
        setup.server.process.wait(20)
        setup.server.close()
        setup.serve()
    elif setup.name == "streams":
        setup.workers[0].process.wait(20)
        setup.add_worker()
    assert setup.finished(run_id)["status"] == "COMPLETED"
    detail = setup.node(run_id)
    lost, completed = detail["attempts"]
    assert (lost["attempt"], lost["status"]) == (1, "LOST")
    assert (completed["attempt"], completed["status"]) == (2, "COMPLETED")
    assert lost["started_at"] < completed["started_at"]
    assert lost["worker"] is not None
    assert detail["output"] == "survived"
    first = messages(setup.log(run_id, "attempt=1"))
    assert first in (["long before the end"], ["long before the end", "last words"])
    assert messages(setup.log(run_id, "attempt=2")) == ["alive"]
    shown = setup.cli("runs", "show", run_id, "a").out
    assert "1.1  LOST" in shown
    assert "1.2  COMPLETED" in shown


@pytest.mark.parametrize("setup", ["streams"], indirect=True, scope="module")
def test_archived_lines_and_attempts_are_read_after_the_loss_of_redis(
    setup: Setup, tmp_path: Path
) -> None:
    assert setup.redis is not None
    file = tmp_path / "go"
    later = node("holds", "b", "a", config={"file": str(file)})
    run_id = setup.begin(node("says"), later)
    ended = setup.begin(node("raises"))
    setup.finished(ended)
    wait_for(lambda: len(setup.log(run_id, "node=b")) == 1, "it waits")
    wait_for(lambda: b"waits in attempt 1" in archived(setup), "its line is archived")
    wait_for(lambda: has_ended_in_the_archive(setup, ended), "the failed run is archived")
    before, of_ended = setup.node(run_id), setup.node(ended)
    said = setup.log(run_id, "node=a")
    logged = setup.log(ended)
    setup.redis.ask("FLUSHALL")
    assert setup.node(ended) == of_ended
    assert setup.log(ended) == logged
    assert setup.log(run_id, "node=a") == said
    assert setup.node(run_id)["attempts"] == before["attempts"]
    file.touch()
