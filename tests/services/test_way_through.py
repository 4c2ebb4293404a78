"""One run on its way through the files of Dovetail, traced, and as docs/architecture.md draws it.

A profile function sees every call of a function of Dovetail. A call counts if it handles the run's
data: its id, or a text that only its params and outputs have, is in an argument, a local variable
or the return value. `self` is not searched: a heartbeat that fires meanwhile does not count.

A file is a hop if it hands the data on to another file. A file that only computes something for
its caller, or writes to a connection, is a helper. Both are counted, and both may only become
fewer. A run before the traced one fills the caches: the definition is compiled already.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

from dovetail import WorkflowDAG, WorkflowExecutor
from dovetail.api.app import create_app
from dovetail.api.operations import ThisProcess
from dovetail.api.server import listen, serve, url_of
from dovetail.api.service import ApiService
from dovetail.config import Settings
from dovetail.engine import commands as engine_commands
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import Registry, describe
from dovetail.wiring.distributed import commanding, connected, orchestrate, working
from dovetail.wiring.embedded import embedded
from dovetail.wiring.health import watching

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dovetail"
DRAWING = (ROOT / "docs" / "architecture.md").read_text().partition(", hop by hop")[2]
MARK, FIRST = "waythrough", "first"
RUN_ID, WARM_UP = "facade" * 5 + "fa", "0" * 32
MAX_HOPS = {"Redis": 30, "embedded": 20, "library": 9}
MAX_FILES = {"Redis": 46, "embedded": 33, "library": 10}
"""Hops and helpers."""
SECONDS = 60
DEPTH = 5
FLOW = {
    "name": "flow",
    "nodes": [
        {"id": "parent", "handler": "mark", "config": {"of": "{{ params.text }}"}},
        {
            "id": "child",
            "handler": "mark",
            "dependencies": ["parent"],
            "config": {"of": "{{ parent.text }}"},
        },
    ],
}


async def mark(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if config["of"] == FIRST:
        await asyncio.sleep(0.2)  # so that a caller waits for its end, which opens the listener
    return {"text": config["of"]}


# ── the trace ────────────────────────────────────────────────────────────────────────────


def mentions(value: Any, depth: int = DEPTH) -> bool:
    """Whether the run's data is in this value."""
    if isinstance(value, str):
        return MARK in value or RUN_ID in value
    if isinstance(value, bytes | bytearray | memoryview):
        held = bytes(value)
        return MARK.encode() in held or RUN_ID.encode() in held
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(mentions(one, depth - 1) for pair in list(value.items()) for one in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(mentions(one, depth - 1) for one in list(value))
    if type(value).__module__.startswith("dovetail.core"):
        return any(mentions(getattr(value, name, None), 2) for name in ("id", "run_id", "params"))
    return False


class Trace:
    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}
        """The functions that handled the run's data, by file."""
        self.hops: set[str] = set()
        self.is_on = False
        self._seen: set[Any] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.is_on or event not in ("call", "return") or not _is_ours(frame):
            return
        if not self._sees(frame, arg if event == "return" else None):
            return
        file = _file(frame)
        self.functions.setdefault(file, set()).add(frame.f_code.co_name)
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        if caller is not None and _file(caller) != file and self._sees(caller):
            self.hops.add(_file(caller))

    def _sees(self, frame: FrameType, returned: Any = None) -> bool:
        if frame.f_code not in self._seen:
            given = [value for name, value in frame.f_locals.items() if name not in ("self", "cls")]
            if not mentions([*given, returned]):
                return False
            self._seen.add(frame.f_code)
        return True

    @contextmanager
    def installed(self) -> Iterator[Trace]:
        """From before any thread starts; it records while `is_on`."""
        before = sys.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            self.is_on = False
            sys.setprofile(before)
            threading.setprofile(None)  # type: ignore[arg-type]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{SOURCE}/")


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(f"{SOURCE}/")


# ── the three ways ───────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def api_server(settings: Settings, commands: Commands, fleet: Any) -> AsyncIterator[str]:
    """The address of the HTTP API over these commands."""
    service = ApiService(commands, fleet, settings, ["127.0.0.1"])
    listening = listen(["127.0.0.1"], 0)
    serving = asyncio.create_task(serve(create_app(service, "0"), listening, service.closing))
    try:
        yield url_of(listening)
    finally:
        service.closing.set()
        await serving


async def trigger(url: str, trace: Trace) -> None:
    """`POST …/runs`, for a first run and then for the traced one."""
    base = f"{url}/api/v1"
    async with httpx2.AsyncClient(base_url=base, timeout=SECONDS, trust_env=False) as http:
        made = await http.post("/workflows", json=FLOW)
        assert made.is_success, made.text
        for run_id, text in ((WARM_UP, FIRST), (RUN_ID, MARK)):
            trace.is_on = text == MARK
            answer = await http.post("/workflows/flow/runs", json={"params": {"text": text}})
            assert answer.json().get("run_id") == run_id, answer.text
            if run_id == WARM_UP:
                run = (await http.get(f"/runs/{run_id}?wait={SECONDS}")).json()
                assert run["status"] == "COMPLETED"


def registry(settings: Settings) -> Registry:
    found = builtin_registry(settings)
    found.add(describe(mark, name="mark"))
    return found


async def on_redis(trace: Trace, redis_url: str, postgres_url: str) -> None:
    settings = Settings(redis_url=redis_url, database_url=postgres_url, heartbeat_interval=0.2)
    handlers = registry(settings)
    async with AsyncExitStack() as stack:
        stopping = asyncio.Event()
        orchestrating = asyncio.create_task(orchestrate(settings, stopping))
        await stack.enter_async_context(working(settings, handlers))
        commands = await stack.enter_async_context(commanding(settings, handlers))
        fleet = await stack.enter_async_context(watching(settings, list(handlers)))
        parts = await stack.enter_async_context(connected(settings))
        assert parts.archive is not None
        url = await stack.enter_async_context(api_server(settings, commands, fleet))
        await trigger(url, trace)
        async with asyncio.timeout(SECONDS):
            while not (kept := await parts.archive.runs.read(RUN_ID)) or not kept.finished:
                await asyncio.sleep(0.05)
            while "_listen" not in trace.functions.get("transports/streams/reader.py", ()):
                await asyncio.sleep(0.05)  # its end is announced beside that
        trace.is_on = False
        stopping.set()
        await orchestrating


async def in_this_process(trace: Trace, folder: Path) -> None:
    settings = Settings(db=folder / "runs.db")
    handlers = registry(settings)
    async with embedded(settings, handlers) as commands, asyncio.timeout(SECONDS):
        fleet = ThisProcess(commands, [{"name": name} for name in handlers], 1, dict)
        async with api_server(settings, commands, fleet) as url:
            await trigger(url, trace)
            await commands.wait(RUN_ID)


async def in_the_library(trace: Trace) -> None:
    async def parent(ctx: dict[str, Any]) -> str:
        return str(ctx["text"])

    async def child(ctx: dict[str, Any]) -> str:
        return str(ctx["step_outputs"]["parent"])

    dag = WorkflowDAG("flow").add_step("parent", parent)
    dag.add_step("child", child, depends_on=["parent"])
    for text in ("first", MARK):
        trace.is_on = text == MARK
        result = await WorkflowExecutor().execute(dag, {"text": text})
        assert result.to_dict()["status"] == "COMPLETED"


@pytest.fixture(params=["Redis", "embedded", "library"])
async def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, Trace]:
    ids = [RUN_ID, WARM_UP]
    monkeypatch.setattr(engine_commands, "new_id", lambda: ids.pop())
    name = str(request.param)
    with Trace().installed() as trace:
        if name == "Redis":
            urls = [request.getfixturevalue(url) for url in ("redis_url", "postgres_url")]
            await on_redis(trace, *urls)
        elif name == "embedded":
            await in_this_process(trace, tmp_path)
        else:
            await in_the_library(trace)
    return name, trace


# ── what it shows ────────────────────────────────────────────────────────────────────────


def drawn(name: str) -> tuple[dict[str, set[str]], set[str]]:
    """The hops that the page draws, file by file with their functions; and the helpers it names."""
    (text,) = re.findall(rf"^### [^\n]*\b{name}\b[^\n]*\n(.*?)(?=^##|\Z)", DRAWING, re.M | re.S)
    steps, _, helpers = text.partition("Helpers: ")
    hops: dict[str, set[str]] = {}
    for file, function in re.findall(r"`([\w/]+\.py): (\w+)`", steps):
        hops.setdefault(file, set()).add(function)
    return hops, set(re.findall(r"`([\w/]+\.py)`", helpers))


async def test_a_run_goes_through_the_files_that_the_page_draws(way: tuple[str, Trace]) -> None:
    name, trace = way
    hops, helpers = drawn(name)
    for file, functions in hops.items():
        assert functions <= trace.functions.get(file, set()), f"the run does not go through {file}"
    assert trace.hops <= hops.keys(), "hops that the page lacks"
    assert trace.functions.keys() <= hops.keys() | helpers, "helpers that the page lacks"
    assert len(trace.hops) <= MAX_HOPS[name]
    assert len(trace.functions) <= MAX_FILES[name]


@pytest.mark.parametrize("folder", ["wiring", "engine"])
def test_no_part_gets_an_attribute_from_outside_after_it_is_made(folder: str) -> None:
    """Wiring builds each part from finished parts."""
    parts = {"store", "publisher", "orchestrator", "transport", "worker", "sender", "listener"}
    for path in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute):
                    owner = ast.unparse(target.value).rpartition(".")[2].strip("_")
                    assert owner not in parts, f"{path}:{target.lineno}: {ast.unparse(target)}"
