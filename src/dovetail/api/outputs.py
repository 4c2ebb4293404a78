"""Replies with outputs, which may be large and many.

A small output is in the reply. A large one is a reference, unless the caller wants all in full. A
reply is a list of parts: bytes, or an output that is read while the reply is sent, so that memory
holds only a few of them at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import orjson
from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from dovetail.api import responses
from dovetail.api.service import Budget
from dovetail.core.outputs import (
    LARGE_OUTPUT,
    OutputReference,
    ReadBudget,
    is_shown,
    looks_like_a_reference,
    reference,
)
from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus

JSON = "application/json"
YAML = "application/yaml"
MAX_INLINE_BYTES = 1 << 20
"""Bytes of outputs that may be in an answer which is made in one piece."""
PART_BYTES = 1 << 20
"""Of outputs that are read at once for an answer that is made in parts."""
CHUNK_BYTES = 256 << 10
"""Of what is sent at once: no more than this waits in a connection of such an answer."""
TURN_BYTES = 1 << 20
"""So much is encoded before others get their turn."""
SHOWN = ReadBudget(LARGE_OUTPUT, MAX_INLINE_BYTES)
FULL = ReadBudget(MAX_INLINE_BYTES, MAX_INLINE_BYTES)


class Hole(NamedTuple):
    """A place in an answer for an output that is read when its turn comes."""

    source: Any
    """An `Elsewhere`, or the output itself."""
    size: int
    """Bytes; of an output that was not measured, an estimate."""
    href: str | None
    """What to refer to if the output turns out to be none that is shown."""


Part = bytes | Hole
Read = Callable[[Sequence[OutputReference]], Awaitable[list[bytes]]]


def output_href(prefix: str, run_id: str, node: str) -> str:
    return f"{prefix}/runs/{quote(run_id, safe='')}/nodes/{quote(node, safe='')}/output"


class RunOutputs:
    """The outputs of one run as one answer has them."""

    def __init__(self, run: RunState, prefix: str, *, full: bool) -> None:
        self._run = run
        # Taken now: what happens to the run while these are encoded is not of this moment.
        self._outputs = [node.output for node in run.nodes]
        self._prefix = prefix
        self._full = full
        self._left = MAX_INLINE_BYTES
        self._worked = 0
        self._known: dict[int, Part] = {}

    async def part(self, place: int) -> Part:
        """The output of the node at this place; the same part each time."""
        if self._outputs[place] is None:
            return b"null"
        if place not in self._known:
            self._known[place] = await self._made(place, self._outputs[place])
        return self._known[place]

    async def _made(self, place: int, output: Any) -> Part:
        href = output_href(self._prefix, self._run.id, self._run.graph.nodes[place].id)
        if isinstance(output, OutputReference):
            if not self._full and output.size > LARGE_OUTPUT:
                return orjson.dumps(reference(output.size, href))
            return Hole(output, output.size, None if self._full else href)
        if self._full and self._left <= 0:
            return Hole(output, PART_BYTES, None)
        encoded = orjson.dumps(output)
        size = len(encoded)
        self._worked += size
        if self._worked > TURN_BYTES:
            self._worked = 0
            await asyncio.sleep(0)
        if not self._full and not is_shown(output, size):
            return orjson.dumps(reference(size, href))
        if size > self._left:
            self._left = 0
            return Hole(output, size, None)
        self._left -= size
        return encoded

    async def result(self) -> list[Part]:
        """As `views.result` has it: one output, or those of the exit nodes by id."""
        graph = self._run.graph
        if graph.output_node is not None:
            return [await self.part(graph.output_node)]
        return await self.by_node(graph.exits)

    async def by_node(self, places: Sequence[int]) -> list[Part]:
        parts: list[Part] = [b"{"]
        for nth, place in enumerate(places):
            name = orjson.dumps(self._run.graph.nodes[place].id)
            parts += (b"," + name if nth else name, b":", await self.part(place))
        return [*parts, b"}"]

    async def in_nodes(self, nodes: Sequence[dict[str, Any]]) -> list[Part]:
        """The list of a run's nodes, each with its output as its last field."""
        parts: list[Part] = [b"["]
        for place, fields in enumerate(nodes):
            facts = {name: value for name, value in fields.items() if name != "output"}
            begun = orjson.dumps(facts)[:-1] + b',"output":'
            parts += (b"," + begun if place else begun, await self.part(place), b"}")
        return [*parts, b"]"]


async def run_parts(run: RunState, view: dict[str, Any], prefix: str, *, full: bool) -> list[Part]:
    """A run's detail: `view` is what `run_view` makes of it."""
    outputs = RunOutputs(run, prefix, full=full)
    nodes = view.pop("nodes", None)
    del view["result"]
    parts = [orjson.dumps(view)[:-1], b',"result":', *await outputs.result()]
    if nodes is not None:
        parts += (b',"nodes":', *await outputs.in_nodes(nodes))
    return joined([*parts, b"}"])


async def result_parts(run: RunState, prefix: str, *, full: bool) -> list[Part]:
    """A run's status, result and outputs."""
    completed = [
        place for place, node in enumerate(run.nodes) if node.status is NodeStatus.COMPLETED
    ]
    outputs = RunOutputs(run, prefix, full=full)
    head = orjson.dumps({"status": run.status.value})[:-1]
    result = await outputs.result()
    every = await outputs.by_node(completed)
    return joined([head, b',"result":', *result, b',"outputs":', *every, b"}"])


async def output_parts(output: Any, read: Read) -> list[Part]:
    """One output and nothing else. A small one is read at once."""
    if not isinstance(output, OutputReference):
        encoded = orjson.dumps(output)
        return [encoded] if len(encoded) <= CHUNK_BYTES else [Hole(output, len(encoded), None)]
    if output.size <= LARGE_OUTPUT:
        return list(await read([output]))
    return [Hole(output, output.size, None)]


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with as few parts as possible."""
    found: list[Part] = []
    texts: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            texts.append(part)
        else:
            found += (b"".join(texts), part)
            texts.clear()
    return [*found, b"".join(texts)]


def tag_of_parts(parts: Sequence[Part]) -> str:
    """An output that was not read stays the same while the facts of its node do."""
    whole = blake2b(digest_size=12)
    for part in parts:
        if isinstance(part, bytes):
            whole.update(part)
        else:
            size = part.size if isinstance(part.source, OutputReference) else ""
            whole.update(b"\0%s" % str(size).encode())
    return f'"{whole.hexdigest()}"'


def tag_of_output(run: RunState, node: NodeState, name: str) -> str:
    facts = (run.id, name, node.epoch, node.attempt, node.finished_at)
    return responses.tag_of(orjson.dumps(facts))


def answer_of(
    request: Request,
    parts: list[Part],
    read: Read,
    budget: Budget,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    tag: str | None = None,
) -> Response:
    """The parts as a response: in one piece if they are all there. With a `tag` 304 if known."""
    headers = dict(headers or {})
    if tag is not None:
        headers["ETag"] = tag
        if responses.names(request, "if-none-match", tag, weak=True):
            return Response(status_code=304, headers=headers)
    if all(isinstance(part, bytes) for part in parts):
        return Response(b"".join(cast("list[bytes]", parts)), status, headers, JSON)
    return Streamed(streamed(parts, read, budget), status, headers, JSON)


class Streamed(StreamingResponse):
    """It closes its parts as soon as it ends, however it ends."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast("AsyncGenerator[bytes]", self.body_iterator)):
            await super().stream_response(send)


async def streamed(parts: list[Part], read: Read, budget: Budget) -> AsyncIterator[bytes]:
    """The parts as bytes; of the outputs that are not there, some at a time."""
    todo = list(reversed(parts))
    while todo:
        group, size = _group(todo)
        async with budget.taking(size):
            wanted = [
                part.source
                for part in group
                if isinstance(part, Hole) and isinstance(part.source, OutputReference)
            ]
            texts = iter(await read(wanted) if wanted else ())
            pending: list[bytes] = []
            for part in group:
                text = _filled(part, texts)
                for at in range(0, len(text), CHUNK_BYTES):
                    pending.append(text[at : at + CHUNK_BYTES])
                    if sum(map(len, pending)) >= CHUNK_BYTES:
                        yield b"".join(pending)
                        pending.clear()
            yield b"".join(pending)
            del group, wanted, texts, text, pending  # or they would wait for the next ones


def _group(todo: list[Part]) -> tuple[list[Part], int]:
    """The next parts, up to so many bytes of outputs; at least one output, if there is one."""
    group: list[Part] = []
    size = 0
    while todo:
        part = todo[-1]
        if isinstance(part, Hole):
            if size and size + part.size > PART_BYTES:
                break
            size += part.size
        group.append(todo.pop())
    return group, size


def _filled(part: Part, texts: Any) -> bytes:
    if isinstance(part, bytes):
        return part
    if not isinstance(part.source, OutputReference):
        return orjson.dumps(part.source)
    text: bytes = next(texts)
    # As `is_shown` decides for an output in memory.
    if part.href is not None and b"$output" in text and looks_like_a_reference(orjson.loads(text)):
        return orjson.dumps(reference(len(text), part.href))
    return text
