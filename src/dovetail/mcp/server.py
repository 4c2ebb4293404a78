"""The tools over the protocol, by the official SDK: over stdio, or at `/mcp` of an API server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import orjson
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from starlette.routing import Route

from dovetail.core.errors import DovetailError
from dovetail.mcp.tools import AgentTools, ListedTool, may_wait, sentence

PATH = "/mcp"
INSTRUCTIONS = (
    "Dovetail runs workflows: graphs of nodes that are retried and never lost. list_runs finds "
    "runs, explain_run says why one failed or waits, run_logs has what its handlers logged."
)
log = logging.getLogger("dovetail.mcp")


def make_server(
    tools: AgentTools,
    version: str,
    may_write: Callable[[Any], bool],
    public: Callable[[Any, DovetailError], str] = lambda ctx, error: sentence(error),
    on_wait: Callable[[Any], None] = lambda ctx: None,
) -> Server[Any]:
    """`may_write` is asked with the context of each request; `public` is what an agent reads of an
    error. `on_wait` is called before a tool waits for a run; it may refuse."""

    async def list_tools(
        ctx: Any, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        cursor = None if params is None else params.cursor
        listed, following = await tools.listed(cursor, writes=may_write(ctx))
        return types.ListToolsResult(tools=[_tool(one) for one in listed], next_cursor=following)

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            if may_wait(params.name):
                on_wait(ctx)
            reply = await tools.call(params.name, params.arguments or {}, writes=may_write(ctx))
        except DovetailError as error:
            return _failed(public(ctx, error))
        except Exception:
            log.exception("the tool %s", params.name)
            return _failed("something went wrong here; the log of the server has it")
        text = types.TextContent(type="text", text=orjson.dumps(reply).decode())
        return types.CallToolResult(content=[text], structured_content=reply)

    return Server(
        "dovetail",
        version=version,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _tool(listed: ListedTool) -> types.Tool:
    return types.Tool(
        name=listed.name,
        description=listed.description,
        input_schema=listed.schema,
        annotations=types.ToolAnnotations(
            read_only_hint=not listed.writes, destructive_hint=listed.name == "cancel_run"
        ),
    )


def _failed(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=words)], is_error=True)


async def serve_stdio(tools: AgentTools, version: str, *, allow_writes: bool) -> None:
    """Serve one client until it closes stdin."""
    server = make_server(tools, version, lambda ctx: allow_writes)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


@asynccontextmanager
async def http_route(server: Server[Any], max_body_bytes: int) -> AsyncIterator[Route]:
    """The route of an API server. No session is kept: each request stands alone."""
    manager = StreamableHTTPSessionManager(
        server, json_response=True, stateless=True, max_request_body_size=max_body_bytes
    )
    async with manager.run():
        # The protocol's GET is for messages that a server begins; there are none without sessions.
        yield Route(PATH, StreamableHTTPASGIApp(manager), methods=["POST"])
