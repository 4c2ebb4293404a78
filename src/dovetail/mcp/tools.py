"""The tools that an agent gets, over any engine. `server` carries them over the protocol.

A reply is plain data of bounded size. An error is a `DovetailError`, whose text is the reply.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.core.errors import (
    Conflict,
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    Suggester,
    shown,
)
from dovetail.core.shortening import shortened
from dovetail.core.states import NodeStatus, Reason
from dovetail.engine.api import EngineApi, log_lines
from dovetail.engine.ports import LogQuery, RunQuery

MAX_REPLY_BYTES = 48_000
"""About 12,000 tokens."""
WAIT_SECONDS = 25.0
"""For the end of a run that a tool has started."""
MAX_PAGE = 100
MAX_LINES = 500
MAX_EXPLAINED = 3
"""Failed nodes whose traceback an explanation has."""
PREFIX = "run_"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every client accepts; the protocol itself allows more."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


_RUN_ID = Field(description="a run's id, or its first digits (at least four)", min_length=4)
_CURSOR = Field(default=None, description="`next_cursor` of the page before")
_LIMIT = Field(default=20, ge=1, le=MAX_PAGE)


class OnePage(_Arguments):
    limit: int = _LIMIT
    cursor: str | None = _CURSOR


class RunsPage(_Arguments):
    status: str | None = Field(
        default=None, description="PENDING, RUNNING, COMPLETED, FAILED or CANCELLED"
    )
    workflow: str | None = Field(default=None, description="only runs of this workflow")
    q: str | None = Field(
        default=None,
        description="beginning of an id, part of a workflow's name, or a value in the params",
    )
    limit: int = _LIMIT
    cursor: str | None = _CURSOR


class OneRun(_Arguments):
    run_id: str = _RUN_ID


class RunOrNode(_Arguments):
    run_id: str = _RUN_ID
    node: str | None = Field(
        default=None,
        description="a node's id: its config, inputs, output and attempts with tracebacks",
    )


class LogLines(_Arguments):
    run_id: str = _RUN_ID
    node: str | None = Field(default=None, description="only of this node")
    item: int | None = Field(
        default=None, ge=0, description="only of this item of a node with for_each"
    )
    attempt: int | None = Field(default=None, ge=1, description="only of this attempt")
    level: str | None = Field(default=None, description="this level and more severe ones")
    q: str | None = Field(default=None, description="only lines with these words")
    tail: int = Field(default=100, ge=1, le=MAX_LINES, description="so many of the last lines")


class RetryArguments(_Arguments):
    run_id: str = _RUN_ID
    from_node: str | None = Field(
        default=None, alias="from", description="also run this node and all nodes after it again"
    )


class ForkArguments(RetryArguments):
    params: dict[str, Any] | None = Field(
        default=None, description="other params, which replace the old ones whole"
    )
    version: int | str | None = Field(
        default=None, description="another version or alias of the workflow"
    )
    definition: dict[str, Any] | None = Field(default=None, description="another definition")


@dataclass(frozen=True, slots=True)
class AgentTool:
    name: str
    description: str
    arguments: type[BaseModel]
    call: Callable[[EngineApi, Any], Awaitable[dict[str, Any]]]
    writes: bool = False


class ListedTool(NamedTuple):
    """A tool as an agent sees it."""

    name: str
    description: str
    schema: dict[str, Any]
    writes: bool


# ── what the tools do ────────────────────────────────────────────────────────────────────


async def _list_workflows(engine: EngineApi, given: OnePage) -> dict[str, Any]:
    return await engine.workflows(limit=given.limit, cursor=given.cursor)


async def _list_runs(engine: EngineApi, given: RunsPage) -> dict[str, Any]:
    status = None if given.status is None else given.status.upper()
    query = RunQuery(status, given.workflow, None, given.limit, given.cursor, q=given.q)
    return await engine.list_runs(query)


async def _get_run(engine: EngineApi, given: RunOrNode) -> dict[str, Any]:
    run_id = await _whole(engine, given.run_id)
    if given.node is not None:
        return await engine.node_detail(run_id, given.node)
    return await engine.get_run(run_id, large=False)


async def _explain_run(engine: EngineApi, given: OneRun) -> dict[str, Any]:
    run_id = await _whole(engine, given.run_id)
    run = await engine.get_run(run_id, large=False)
    explained = await engine.explain(run_id)
    failed = [node for node in run["nodes"] if _failed_by_itself(node)]
    details = [await engine.node_detail(run_id, node["id"]) for node in failed[:MAX_EXPLAINED]]
    return {
        **explained,
        "error": run["error"],
        "failed": [
            {
                "id": node["id"],
                "handler": node["handler"],
                "config": node["config"],
                "error": node["attempts"][-1]["error"] if node["attempts"] else node["error"],
                "attempts": len(node["attempts"]),
            }
            for node in details
        ],
        "failed_more": len(failed) - len(details),
    }


def _failed_by_itself(node: Mapping[str, Any]) -> bool:
    return bool(node["status"] == NodeStatus.FAILED and node["reason"] != Reason.DEPENDENCY_FAILED)


async def _run_logs(engine: EngineApi, given: LogLines) -> dict[str, Any]:
    run_id = await _whole(engine, given.run_id)
    query = LogQuery(given.node, None, given.attempt, given.item, given.level, given.q)
    lines: deque[dict[str, Any]] = deque(maxlen=given.tail)
    count = 0
    async for line in log_lines(engine, run_id, query):
        lines.append(line)
        count += 1
    fields = ("seq", "time", "node", "item", "attempt", "level", "message")
    items = [{name: line[name] for name in fields} for line in lines]
    return {"run_id": run_id, "items": items, "earlier_lines": count - len(items)}


async def _retry_run(engine: EngineApi, given: RetryArguments) -> dict[str, Any]:
    run_id = await _whole(engine, given.run_id)
    await engine.retry_run(run_id, given.from_node)
    return await _ended(engine, run_id)


async def _fork_run(engine: EngineApi, given: ForkArguments) -> dict[str, Any]:
    made = await engine.fork(
        await _whole(engine, given.run_id),
        definition=given.definition,
        version=given.version,
        params=given.params,
        from_node=given.from_node,
    )
    return await _ended(engine, made.run_id)


async def _cancel_run(engine: EngineApi, given: OneRun) -> dict[str, Any]:
    run_id = await _whole(engine, given.run_id)
    await engine.cancel_run(run_id)
    return await engine.get_run(run_id, nodes=False)


async def _whole(engine: EngineApi, given: str) -> str:
    return await engine.find_run(given.strip().lower())


async def _ended(engine: EngineApi, run_id: str) -> dict[str, Any]:
    """The run once it has ended; after a while as it is then."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            return await engine.wait_run(run_id, nodes=False)
    except TimeoutError:
        run = await engine.get_run(run_id, nodes=False)
        return {**run, "note": f"it goes on; ask get_run for {run_id} later"}


TOOLS = (
    AgentTool(
        "list_workflows",
        "List the registered workflows with their versions and aliases.",
        OnePage,
        _list_workflows,
    ),
    AgentTool("list_runs", "List runs, the newest first, without nodes.", RunsPage, _list_runs),
    AgentTool(
        "get_run",
        "Show one run: its status, result, error and nodes with outputs; or one node in detail.",
        RunOrNode,
        _get_run,
    ),
    AgentTool(
        "explain_run",
        "Say why a run failed, with config, error and traceback of the nodes that failed, and why "
        "each unfinished node waits.",
        OneRun,
        _explain_run,
    ),
    AgentTool("run_logs", "Show the last lines that handlers logged.", LogLines, _run_logs),
    AgentTool(
        "retry_run",
        "Run what did not complete again: the same run in a new epoch. Waits for its end for a "
        "while.",
        RetryArguments,
        _retry_run,
        writes=True,
    ),
    AgentTool(
        "fork_run",
        "Make a new run that begins with the finished nodes of an old one, with other params, "
        "another version or another definition. Waits for its end for a while.",
        ForkArguments,
        _fork_run,
        writes=True,
    ),
    AgentTool(
        "cancel_run", "Cancel what has not finished of a run.", OneRun, _cancel_run, writes=True
    ),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}


# ── workflows as tools ───────────────────────────────────────────────────────────────────


def tool_name(workflow: str) -> str:
    """`run_<workflow>`. A name that not every client accepts, or that another tool has, gets its
    odd characters replaced and a digest, by which `AgentTools` finds it again."""
    plain = PREFIX + workflow
    if _TOOL_NAME.fullmatch(plain) and plain not in _BY_NAME:
        return plain
    digest = sha256(workflow.encode()).hexdigest()[:10]
    beginning = re.sub(r"[^A-Za-z0-9_-]", "_", workflow)[: 64 - len(PREFIX) - len(digest) - 1]
    return f"{PREFIX}{beginning}_{digest}"


def may_wait(name: str) -> bool:
    """Whether a tool waits for the end of a run."""
    return name in ("retry_run", "fork_run") or (name.startswith(PREFIX) and name not in _BY_NAME)


class AgentTools:
    def __init__(
        self, engine: EngineApi, admit: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """`admit` is called before a run is made; it may refuse."""
        self._engine = engine
        self._admit = admit
        self._listed: dict[tuple[str, int], ListedTool] = {}
        """Workflows by name and version, which never change."""

    async def listed(
        self, cursor: str | None, *, writes: bool
    ) -> tuple[list[ListedTool], str | None]:
        """A page of tools: workflows only with `writes`, after all others."""
        found = []
        if cursor is None:
            found = [
                ListedTool(
                    tool.name, tool.description, tool.arguments.model_json_schema(), tool.writes
                )
                for tool in TOOLS
                if writes or not tool.writes
            ]
        if not writes:
            return found, None
        page = await self._engine.workflows(limit=MAX_PAGE, cursor=cursor)
        for item in page["items"]:
            found.append(await self._workflow_tool(item["name"], item["latest_version"]))
        return found, page["next_cursor"]

    async def _workflow_tool(self, name: str, version: int) -> ListedTool:
        known = self._listed.get((name, version))
        if known is None:
            definition = (await self._engine.workflow(name, version))["definition"]
            about = definition.get("description") or "Run it and wait for its end for a while."
            known = ListedTool(
                *(tool_name(name), f"Run the workflow '{name}'. {about}"),
                {**(definition.get("params") or {}), "type": "object"},
                writes=True,
            )
            for old in [key for key in self._listed if key[0] == name]:
                del self._listed[old]
            self._listed[name, version] = known
        return known

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, writes: bool
    ) -> dict[str, Any]:
        """The reply of a tool. Raises `DovetailError` with a sentence."""
        tool = _BY_NAME.get(name)
        if tool is not None and (writes or not tool.writes):
            if tool.writes and self._admit is not None:
                await self._admit()
            return _bounded(await tool.call(self._engine, _read(tool, arguments)))
        if tool is not None or name.startswith(PREFIX):
            if not writes:
                raise Conflict(
                    f"{shown(name)} changes something, and this server only reads: it was started "
                    "without --allow-writes, or the token may only read"
                )
            return _bounded(await self._run(name, arguments))
        hint = Suggester().did_you_mean(name, _BY_NAME)
        raise NotFound(f"no tool {shown(name)}{hint or '; tools/list has them all'}")

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        workflow = await self._workflow_of(name)
        if self._admit is not None:
            await self._admit()
        made = await self._engine.trigger(workflow, arguments)
        return await _ended(self._engine, made.run_id)

    async def _workflow_of(self, name: str) -> str:
        plain = name.removeprefix(PREFIX)
        with suppress(NotFound):  # also a name that is listed with a digest
            await self._engine.workflow(plain)
            return plain
        async for workflow in self._names():
            if tool_name(workflow) == name:
                return workflow
        raise NotFound(f"no workflow of the tool {shown(name)}; tools/list has them all")

    async def _names(self) -> AsyncIterator[str]:
        cursor = None
        while True:
            page = await self._engine.workflows(limit=1000, cursor=cursor)
            for item in page["items"]:
                yield item["name"]
            cursor = page["next_cursor"]
            if cursor is None:
                return


def _read(tool: AgentTool, arguments: Mapping[str, Any]) -> BaseModel:
    try:
        return tool.arguments.model_validate(dict(arguments))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        known = ", ".join(tool.arguments.model_json_schema()["properties"])
        said = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in problems[:5]
        )
        message = f"{said}. It takes: {known}"
        raise InvalidParams([Problem("invalid_field", message, tool.name)]) from None


def _bounded(reply: dict[str, Any]) -> dict[str, Any]:
    cut, was_cut = shortened(reply, MAX_REPLY_BYTES)
    if not was_cut:
        return reply
    note = "long values were cut; get_run with `node` shows one node"
    return {"shortened": note, **(cut if isinstance(cut, dict) else {"reply": cut})}


def sentence(error: DovetailError) -> str:
    """What an agent reads of an error; of an invalid definition or params, every problem."""
    if isinstance(error, InvalidDefinition):
        return "\n".join(
            f"{problem.path}: {problem.message}" if problem.path else problem.message
            for problem in error.problems
        )
    return str(error)
