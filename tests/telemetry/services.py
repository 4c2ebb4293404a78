"""Services as processes, and what is seen of them from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from ..cli.conftest import environment
from ..servers.server import free_port

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
SECONDS = 30.0
SERVE = ("serve", "--port", "0", "--handlers", "mine.py")
SECRET = "canary-4711-of-a-secret"

HANDLERS = '''
import asyncio, logging, time
from pathlib import Path
from dovetail import PermanentError, RetryableError, handler

FOLDER = Path(__file__).parent

@handler
async def quick(config, ctx):
    return config

@handler
def plain(config, ctx):
    time.sleep(0.02)
    return config

@handler("flaky", max_retries=3)
async def flaky(config, ctx):
    if ctx.attempt <= config.get("fails", 1):
        raise RetryableError("not yet", after=0.01)
    return ctx.attempt

@handler(secrets=True)
async def broken(config, ctx):
    raise PermanentError(f"cannot: {ctx.secrets.get('KEY')}")

@handler
async def hold(config, ctx):
    """Waits for a file; a message that it does not get does not stop it."""
    (FOLDER / f"{config['file']}.started").touch()
    while not (FOLDER / config["file"]).exists():
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            if not config.get("clings"):
                raise
    return "seen"

@handler(secrets=True)
async def talks(config, ctx):
    ctx.log.info("one\\n{\\"level\\": \\"forged\\"} and %s", ctx.secrets["KEY"])
    logging.getLogger("mine").warning("of a library: %s\\x1b[31m", ctx.secrets["KEY"])
    logging.getLogger("mine").info("not shown")
    try:
        raise ValueError("inner " + ctx.secrets["KEY"])
    except ValueError:
        ctx.log.exception("it broke", extra={"pages": 12})
    return "said"

@handler
async def spans(config, ctx):
    from opentelemetry import trace
    with trace.get_tracer("mine").start_as_current_span("of the handler"):
        ctx.log.info("inside")
    return "traced"
'''


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
    return found


Labels = frozenset[tuple[str, str]]


class Page:
    """What `/metrics` says."""

    def __init__(self, text: str) -> None:
        self.text = text
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def all(self, name: str) -> dict[Labels, float]:
        return {labels: value for (found, labels), value in self.samples.items() if found == name}


class Services:
    """Processes in one folder with one environment."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.env = {"DOVETAIL_SECRET_KEY": SECRET, **env}
        self._all: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._apis: list[Api] = []
        (folder / "mine.py").write_text(HANDLERS)

    def start(self, *args: str, until: str, **env: str) -> subprocess.Popen[bytes]:
        process = self.launch(*args, **env)
        self.wait(process, until)
        return process

    def launch(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """Without waiting for it."""
        log = self.folder / f"log-{len(self._all)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [SCRIPT, *args],
                cwd=self.folder,
                env=environment(**{**self.env, **env}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self._all.append((process, log))
        return process

    def wait(self, process: subprocess.Popen[bytes], until: str) -> None:
        wait_for(lambda: until in self.log(process) or process.poll() is not None, until)
        assert until in self.log(process), self.log(process)

    def serve(self, *args: str, **env: str) -> Api:
        return self.api(self.launch(*SERVE, *args, **env))

    def api(self, process: subprocess.Popen[bytes]) -> Api:
        self.wait(process, "serves http")
        (line,) = [one for one in self.log(process).splitlines() if "serves http" in one]
        self._apis.append(Api(line.split()[-1]))
        return self._apis[-1]

    def watched(self, *args: str, **env: str) -> tuple[subprocess.Popen[bytes], int]:
        """A service with a port for metrics, on its way."""
        port = free_port()
        env["DOVETAIL_METRICS_PORT"] = str(port)
        return self.launch(*args, **env), port

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process, _ in self._all]

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return next(log for one, log in self._all if one is process).read_text()

    def logs(self) -> str:
        return "\n".join(log.read_text() for _, log in self._all)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def is_held(self, name: str) -> bool:
        return (self.folder / f"{name}.started").exists()

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, self.log(process)

    def close(self) -> None:
        for process, _ in self._all:
            process.kill()
            process.wait()
        for api in self._apis:
            api.http.close()


class Api:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx2.Client(base_url=url, timeout=SECONDS, trust_env=False)

    def run(
        self, *nodes: dict[str, Any], headers: dict[str, str] | None = None, **more: Any
    ) -> str:
        """The id of a run of these nodes."""
        definition = {"name": more.pop("name", "f"), "nodes": list(nodes), **more}
        answer = self.http.post(
            "/api/v1/runs", json={"definition": definition, "params": {}}, headers=headers
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["run_id"])

    def ended(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.http.get(f"/api/v1/runs/{run_id}?wait={SECONDS}").json()
        assert run["finished_at"] is not None, run["status"]
        return run

    def events(self, run_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get(
            f"/api/v1/runs/{run_id}/events", headers={"accept": "application/json"}
        ).json()
        return found

    def page(self) -> Page:
        answer = self.http.get("/metrics")
        assert answer.status_code == 200, answer.text
        return Page(answer.text)


def page_of(port: int, **headers: str) -> Page:
    answer = ask(port, "/metrics", **headers)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def ask(port: int, path: str, **headers: str) -> httpx2.Response:
    with httpx2.Client(trust_env=False, timeout=SECONDS) as http:
        return http.get(f"http://127.0.0.1:{port}{path}", headers=headers)


def node(id_: str, handler: str = "quick", *dependencies: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "handler": handler, "dependencies": list(dependencies), **more}
