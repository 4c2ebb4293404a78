"""The tools for agents, called by the client of the official SDK: over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx2
import pytest
import yaml
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from dovetail import Dovetail
from dovetail.mcp.tools import TOOLS, tool_name

from ..cli.conftest import HANDLERS, SCRIPT, cold, environment
from ..cli.test_server import Served
from ..pages import ROOT, call, write_files
from ..servers.redis_server import RedisServer

FLOWS = {
    "report": """
name: report
description: Greets somebody.
params:
  type: object
  required: [who]
  properties: {who: {type: string, description: a name}, loud: {type: boolean, default: false}}
nodes:
  - {id: start, handler: input}
  - {id: greeting, handler: greet, dependencies: [start], config: {name: "{{ start.who }}"}}
  - {id: end, handler: output, dependencies: [greeting], config: {said: "{{ greeting }}"}}
""",
    "needy": """
name: needy
nodes:
  - {id: shout, handler: broken, max_retries: 0, allow_failure: true, for_each: [1, 2]}
  - {id: find, handler: needs, dependencies: [shout], config: {file: treasure}}
""",
    "logs": "name: logs\nnodes: [{id: a, handler: input}]\n",
    "v1.2": "name: v1.2\nnodes: [{id: a, handler: input}]\n",
    "waits": "name: waits\nnodes: [{id: w, handler: until, config: {file: never}}]\n",
    "large": """
name: large
nodes:
  - {id: a, handler: input}
  - {id: b, handler: gives, dependencies: [a], config: {x: "{{ a.x }}"}}
""",
}
READS = ["list_workflows", "list_runs", "get_run", "explain_run", "run_logs"]
WRITES = ["retry_run", "fork_run", "cancel_run"]


class Agent:
    """A connected client."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder
        """Where handlers run."""

    async def tools(self) -> dict[str, Any]:
        found, cursor = {}, None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            found |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        result = await self.client.call_tool(name, arguments)
        text = result.content[0].text  # type: ignore[union-attr]
        assert not result.is_error, text
        assert json.loads(text) == result.structured_content
        return result.structured_content

    async def refused(self, name: str, /, **arguments: Any) -> str:
        result = await self.client.call_tool(name, arguments)
        text: str = result.content[0].text  # type: ignore[union-attr]
        assert result.is_error, text
        assert "Traceback" not in text
        return text


def register(folder: Path, target: Any, **settings: str) -> None:
    """Register every workflow; in a thread, as the loop of a test may run in this one."""
    (folder / "mine.py").write_text(HANDLERS)

    async def all_of_them() -> None:
        async with Dovetail(target, handlers=str(folder / "mine.py"), **settings) as dt:
            for text in FLOWS.values():
                await dt.register(yaml.safe_load(text))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, all_of_them()).result()


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy, with every workflow in its embedded file."""
    folder = tmp_path_factory.mktemp("registered")
    register(folder, folder / ".dovetail" / "dovetail.db")
    return folder


@asynccontextmanager
async def over_stdio(folder: Path, *words: str, **env: str) -> AsyncIterator[Client]:
    started = StdioServerParameters(
        command=SCRIPT, args=["mcp", *words], env=environment(**env), cwd=folder
    )
    async with Client(started) as client:
        yield client


@asynccontextmanager
async def over_http(
    url: str, token: str | None = None, *, mode: str = "auto"
) -> AsyncIterator[Client]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


TOKENS = {"DOVETAIL_TOKENS": "all-of-it,looks:read", "DOVETAIL_DRAIN_SECONDS": "0"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    server = Served(folder, "--mcp", "--allow-writes", **TOKENS)
    register(folder, server.url, token="all-of-it")
    yield server
    server.close()


@pytest.fixture(scope="module")
def on_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer() as redis:
        env = {"DOVETAIL_REDIS_URL": redis.url, "DOVETAIL_DRAIN_SECONDS": "0"}
        server = Served(folder, "--with", "orchestrator,worker", **env)
        register(folder, redis.url)
        yield folder, env
        server.close()


@asynccontextmanager
async def connected(place: str, request: pytest.FixtureRequest, tmp: Path) -> AsyncIterator[Agent]:
    if place == "embedded":
        copytree(request.getfixturevalue("registered"), tmp, dirs_exist_ok=True)
        async with over_stdio(tmp, "--allow-writes", "--handlers", "mine.py") as client:
            yield Agent(client, tmp)
    elif place == "redis":
        folder, env = request.getfixturevalue("on_redis")
        async with over_stdio(tmp, "--allow-writes", **env) as client:
            yield Agent(client, folder)
    elif place == "server":
        served = request.getfixturevalue("served")
        env = {"DOVETAIL_TOKEN": "all-of-it"}
        async with over_stdio(tmp, "--allow-writes", "--server", served.url, **env) as client:
            yield Agent(client, served.folder)
    else:
        served = request.getfixturevalue("served")
        async with over_http(served.url, "all-of-it", mode=place.partition(" ")[2]) as client:
            yield Agent(client, served.folder)


PLACES = ["embedded", "redis", "server", "http auto", "http legacy"]


@pytest.mark.parametrize("place", PLACES)
async def test_an_agent_lists_runs_explains_reads_logs_and_retries(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with connected(place, request, tmp_path) as agent:
        tools = await agent.tools()
        assert [*READS, *WRITES] == list(tools)[:8]
        assert tools["run_report"].input_schema == {
            "type": "object",
            "required": ["who"],
            "properties": {
                "who": {"type": "string", "description": "a name"},
                "loud": {"type": "boolean", "default": False},
            },
        }
        assert "Greets somebody." in tools["run_report"].description
        assert tools["get_run"].annotations.read_only_hint
        assert not tools["run_report"].annotations.read_only_hint

        run = await agent("run_report", who="Ada")
        assert (run["status"], run["result"]) == ("COMPLETED", {"said": "hello Ada"})
        shown = await agent("get_run", run_id=run["run_id"][:8])
        assert [node["id"] for node in shown["nodes"]] == ["start", "greeting", "end"]
        node = await agent("get_run", run_id=run["run_id"], node="greeting")
        assert node["config"] == {"name": "Ada"}

        treasure = agent.folder / "treasure"
        treasure.unlink(missing_ok=True)
        failed = await agent("run_needy")
        assert failed["status"] == "FAILED"
        why = await agent("explain_run", run_id=failed["run_id"])
        assert why["error"]["message"] == "there is no treasure"
        by_id = {node["id"]: node for node in why["failed"]}
        assert "Traceback" in by_id["find"]["error"]["traceback"]
        assert by_id["find"]["config"] == {"file": "treasure"}
        lines = await agent("run_logs", run_id=failed["run_id"], node="shout", item=1)
        assert "logged by a handler" in [line["message"] for line in lines["items"]]
        assert {line["item"] for line in lines["items"]} == {1}
        treasure.touch()
        again = await agent("retry_run", run_id=failed["run_id"])
        assert (again["status"], again["epoch"]) == ("COMPLETED", 2)
        fork = await agent("fork_run", run_id=run["run_id"], params={"who": "Bob"})
        assert fork["result"] == {"said": "hello Bob"}

        listed = await agent("list_runs", workflow="report", limit=1)
        assert listed["items"][0]["run_id"] == fork["run_id"]
        names = [one["name"] for one in (await agent("list_workflows"))["items"]]
        assert set(FLOWS) <= set(names)


@pytest.mark.parametrize("place", PLACES[:4])
async def test_wrong_calls_are_answered_with_sentences(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with connected(place, request, tmp_path) as agent:
        assert "no run" in await agent.refused("get_run", run_id="ffffffff")
        assert "Field required" in await agent.refused("get_run")
        said = await agent.refused("get_run", run_id="ffffffff", nodes=True)
        assert "nodes: Extra inputs" in said
        assert "It takes: run_id, node" in said
        assert "did you mean 'get_run'?" in await agent.refused("get_runs", run_id="x")
        assert "who" in await agent.refused("run_report")
        assert "who" in await agent.refused("run_report", who=3)
        assert "no workflow" in await agent.refused("run_nothing")
        assert "is no status" in await agent.refused("list_runs", status="DONE")
        run = await agent("run_report", who="Ada")
        assert "COMPLETED" in await agent.refused("cancel_run", run_id=run["run_id"])
        assert "has no node" in await agent.refused("get_run", run_id=run["run_id"], node="grete")


async def test_workflows_with_odd_names_are_tools_and_replies_are_bounded(
    served: Served,
) -> None:
    async with over_http(served.url, "all-of-it") as client:
        agent = Agent(client, served.folder)
        tools = await agent.tools()
        (dotted,) = [name for name in tools if name.startswith("run_v1_2_")]
        assert (await agent(dotted, x=1))["workflow"] == "v1.2"
        assert (await agent("run_v1.2"))["workflow"] == "v1.2"
        (taken,) = [name for name in tools if name.startswith("run_logs_")]
        assert (await agent(taken))["workflow"] == "logs"
        assert "LogLines" in str(tools["run_logs"].input_schema["title"])
        run = await agent("run_large", x=["long " * 1000] * 100)
        assert "cut" in run["shortened"]
        shown = await client.call_tool("get_run", {"run_id": run["run_id"]})
        assert len(shown.content[0].text) < 60_000  # type: ignore[union-attr]
        whole = await agent("get_run", run_id=run["run_id"])
        assert whole["nodes"][1]["output"]["$output"]["size"] > 500_000, "it is not even read"
        assert whole["result"]["b"]["$output"]["href"].endswith("/nodes/b/output")


async def test_without_allow_writes_nothing_can_be_changed(registered: Path) -> None:
    async with over_stdio(registered) as client:
        agent = Agent(client, registered)
        assert list(await agent.tools()) == READS
        for name in (*WRITES, "run_report"):
            said = await agent.refused(name, who="Ada", run_id="ffffffff")
            assert "was started without --allow-writes" in said
        assert (await agent("list_runs"))["items"] == []


async def test_an_agent_that_was_there_first_sees_the_runs_that_come_later(tmp_path: Path) -> None:
    async with over_stdio(tmp_path) as client:
        agent = Agent(client, tmp_path)
        assert (await agent("list_runs"))["items"] == []
        await asyncio.to_thread(register, tmp_path, tmp_path / ".dovetail" / "dovetail.db")
        assert len((await agent("list_workflows"))["items"]) == len(FLOWS)


async def test_tokens_and_hosts_hold_for_agents_too(served: Served) -> None:
    async with over_http(served.url, "looks") as client:
        agent = Agent(client, served.folder)
        assert list(await agent.tools()) == READS
        assert "the token may only read" in await agent.refused("run_report", who="Ada")
        assert "items" in await agent("list_runs")
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accept = {"Accept": "application/json, text/event-stream"}

    def post(**headers: str) -> int:
        where = f"{served.url}/mcp"
        return httpx2.post(where, json=call, headers=accept | headers, trust_env=False).status_code

    assert post() == 401
    assert post(Authorization="Bearer wrong") == 401
    bearer = {"Authorization": "Bearer all-of-it"}
    assert post(**bearer) == 200
    assert post(**bearer, Host="evil.example") == 403
    assert post(**bearer, Origin="https://evil.example") == 403
    for method in ("GET", "DELETE"):  # there is no session to listen to, or to end
        other = httpx2.request(
            method, f"{served.url}/mcp", headers=accept | bearer, trust_env=False, timeout=10
        )
        assert (other.status_code, other.headers["allow"]) == (405, "POST")
    large = httpx2.post(
        f"{served.url}/mcp", content=b" " * (2 << 20), headers=accept | bearer, trust_env=False
    )
    assert large.status_code == 413


async def test_a_server_without_it_has_no_such_path(tmp_path: Path) -> None:
    server = Served(tmp_path, DOVETAIL_DRAIN_SECONDS="0")
    try:
        assert httpx2.post(f"{server.url}/mcp", json={}, trust_env=False).status_code == 404
    finally:
        server.close()
    code, _, err = cold(["serve", "--allow-writes"], tmp_path, environment(), b"", 60)
    assert (code, b"give both" in err) == (2, True)


async def test_a_tool_that_waits_for_a_run_counts_among_the_requests_that_wait(
    tmp_path: Path,
) -> None:
    env = {"DOVETAIL_MAX_WAITING_READS": "1", "DOVETAIL_DRAIN_SECONDS": "0"}
    server = Served(tmp_path, "--mcp", "--allow-writes", **env)
    try:
        register(tmp_path, server.url)
        async with (
            over_http(server.url) as client,
            httpx2.AsyncClient(trust_env=False) as http,
        ):
            agent = Agent(client, tmp_path)
            assert (await agent("run_report", who="Ada"))["status"] == "COMPLETED"
            events = f"{server.url}/api/v1/events"
            async with http.stream("GET", events, headers={"Accept": "text/event-stream"}):
                assert "wait" in await agent.refused("run_report", who="Ada")
                assert "items" in await agent("list_runs")
    finally:
        server.close()


async def test_a_run_that_takes_long_is_left_to_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.client.connection import ServerConnection
    from dovetail.client.server import RemoteEngine
    from dovetail.core.definition.validation import DefinitionLimits
    from dovetail.mcp import tools

    monkeypatch.setattr(tools, "WAIT_SECONDS", 0.1)
    async with ServerConnection(served.url, "all-of-it") as connection:
        agent = tools.AgentTools(RemoteEngine(connection, DefinitionLimits()))
        run = await agent.call("run_waits", {}, writes=True)
        assert run["status"] == "RUNNING"
        assert "it goes on" in run["note"]
        waiting = await agent.call("explain_run", {"run_id": run["run_id"]}, writes=False)
        assert waiting["nodes"][0]["code"] == "running"
        ended = await agent.call("cancel_run", {"run_id": run["run_id"]}, writes=True)
        assert ended["status"] == "CANCELLED"


def test_the_page_about_agents_has_every_tool(tmp_path: Path) -> None:
    page = ROOT / "docs" / "agents.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert listed == [tool.name for tool in TOOLS]
    write_files(page, tmp_path)
    given = json.loads((tmp_path / "mcp.json").read_text())["mcpServers"]["dovetail"]
    assert call(f"{given['command']} {' '.join(given['args'])} --help", tmp_path).returncode == 0


@pytest.mark.parametrize(
    "name", ["a", "a-b_c", "v1.2", "v1_2", "logs", "x" * 60, "x" * 61, "x" * 127 + "y", "é" * 3]
)
def test_a_name_of_a_workflow_gives_a_name_that_every_client_accepts(name: str) -> None:
    assert re.fullmatch(r"run_[A-Za-z0-9_-]{1,60}", tool_name(name))
    assert tool_name(name) not in {tool.name for tool in TOOLS}
    assert tool_name(name) not in {tool_name(other) for other in ("v1-2", "x" * 62, "é" * 2)}


@pytest.mark.parametrize(
    ("words", "number"),
    [((), signal.SIGTERM), (("--allow-writes", "--handlers", "mine.py"), signal.SIGINT)],
)
def test_a_signal_ends_the_server_of_stdio_though_its_client_is_still_there(
    registered: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [SCRIPT, "mcp", *words],
        cwd=registered,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        about = {"protocolVersion": "2025-06-18", "capabilities": {}}
        about["clientInfo"] = {"name": "test", "version": "1"}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr.read() == b""
