"""The engine of an API server, as the client and the command line ask any engine.

Every call is a request to the server: only the server knows its handlers, versions and keys.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from math import inf
from typing import Any, Literal, cast
from urllib.parse import quote

import orjson

from dovetail.client.connection import Query, ServerConnection, findings_of
from dovetail.config import Settings
from dovetail.core.aliases import AliasTarget, check_weights
from dovetail.core.definition.params import apply_params, apply_to_items
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked, DefinitionLimits, check
from dovetail.core.errors import (
    Conflict,
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    shown,
)
from dovetail.core.feed import FeedPosition
from dovetail.core.outputs import looks_like_a_reference
from dovetail.core.states import NodeStatus
from dovetail.core.values import NotJson, encode
from dovetail.engine.api import Accepted, EngineApi, Given, Owner
from dovetail.engine.commands import check_alias
from dovetail.engine.ports import (
    ALL_LINES,
    ALL_RUNS,
    LogQuery,
    RunQuery,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.views import NodeWait, RunDetail, receipt_view, seconds, with_warnings
from dovetail.wiring.embedded import definition_limits

WAIT_SECONDS = 25.0
"""Of one request for the end of a run: proxies give up on longer ones."""
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 1.0
"""Between two requests for the state of a batch; the pause grows."""
FULL: Query = {"outputs": "full"}
"""A reply with every output in it, however large."""
DELETE_SIZE = 8
"""Runs that are deleted side by side."""
JSON, YAML = "application/json", "application/yaml"
MAX_BODY_BYTES = 1 << 30
"""The server sets the limit; this one protects the memory here."""
MAX_PATH_LENGTH = 1 << 15
"""In characters, quoted: nothing has so long a name, and httpx2 takes an address of 64 KiB."""


@asynccontextmanager
async def calling(settings: Settings) -> AsyncIterator[EngineApi]:
    """The engine of the server that the settings name. Nothing is sent before the first call."""
    assert settings.server is not None  # noqa: S101
    async with ServerConnection(settings.server, settings.token) as connection:
        yield RemoteEngine(connection, definition_limits(settings))


class RemoteEngine:
    """`EngineApi` over HTTP."""

    drives = False

    def __init__(self, connection: ServerConnection, limits: DefinitionLimits) -> None:
        self._connection = connection
        self._limits = limits

    # ── workflows ────────────────────────────────────────────────────────────────────────

    def validate(self, definition: Source | Mapping[str, Any]) -> Checked:
        """Without handlers, which only the server knows: `judge` asks it."""
        return check(definition, None, self._limits)

    async def learn_handlers(self) -> None:
        """The server checks handlers itself."""

    async def served_handlers(self) -> set[str]:
        workers = (await self._get(at("workers")))["items"]
        return {name for worker in workers if worker["alive"] for name in worker["handlers"]}

    async def judge(self, definition: Source) -> Checked:
        found = await self._post(at("workflows", "validate"), *_sent(definition), repeatable=True)
        errors, warnings = findings_of(found["errors"]), findings_of(found["warnings"])
        workflow = None if errors else self.validate(definition).workflow
        return Checked(workflow, errors, warnings, found["layers"])

    async def register(
        self,
        definition: Source | Mapping[str, Any] | Checked,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> WorkflowVersion:
        _without(seen, actor)
        if isinstance(definition, Source) and definition.text is not None:
            body, form = _sent(definition)
        else:
            body, form = self._as_json(self._data(definition)), JSON
        try:
            made = await self._post(at("workflows"), body, form, repeatable=True)
        except InvalidDefinition as error:
            raise await self._found_by(error, definition) from None
        return WorkflowVersion(made["name"], made["version"], made["created"])

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        return await self._get(at("workflows", name), version=version)

    async def workflows(
        self, *, limit: int = 50, cursor: str | None = None, runs: int = 0, q: str | None = None
    ) -> dict[str, Any]:
        query = {"limit": limit, "cursor": cursor, "runs": runs or None, "q": q}
        return await self._get(at("workflows"), **query)

    async def versions(self, name: str) -> dict[str, Any]:
        return await self._get(at("workflows", name, "versions"))

    async def diff_workflow(
        self, name: str, from_version: int | str | None, to_version: int | str | None = None
    ) -> dict[str, Any]:
        query = {"from": from_version, "to": to_version}
        return await self._get(at("workflows", name, "diff"), **query)

    async def workflow_graph(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        number = "latest" if version is None else str(version)
        return await self._get(at("workflows", name, "versions", number, "graph"))

    async def delete_workflow(
        self, name: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        _without(seen, actor)
        await self._connection.call("DELETE", at("workflows", name))

    async def delete_version(
        self, name: str, version: int | str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        _without(seen, actor)
        await self._connection.call("DELETE", at("workflows", name, "versions", str(version)))

    async def set_alias(
        self,
        name: str,
        alias: str,
        target: AliasTarget,
        *,
        seen: Seen | None = None,
        actor: str | None = None,
    ) -> dict[str, Any]:
        _without(seen, actor)
        check_alias(alias)
        is_plain = isinstance(target, int)
        body = {"version": target} if is_plain else {"weights": check_weights(target)}
        return await self._put(at("workflows", name, "aliases", alias), _json(body))

    async def delete_alias(
        self, name: str, alias: str, *, seen: Seen | None = None, actor: str | None = None
    ) -> None:
        _without(seen, actor)
        await self._connection.call("DELETE", at("workflows", name, "aliases", alias))

    async def workflow_history(
        self, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        return await self._get(at("workflows", name, "history"), limit=limit, cursor=cursor)

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def trigger(
        self,
        workflow: Given,
        params: Mapping[str, Any] | None = None,
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
        place: tuple[str, int] | None = None,
    ) -> Accepted:
        given = apply_params(None, params)
        body: dict[str, Any] = {"params": given}
        made, created = await self._make("runs", workflow, body, version, idempotency_key)
        return Accepted(made["run_id"], created, findings_of(made.get("warnings", ())))

    async def fork(
        self,
        run_id: str,
        *,
        definition: Source | Mapping[str, Any] | Checked | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
        idempotency_key: str | None = None,
    ) -> Accepted:
        key = os.urandom(16).hex() if idempotency_key is None else idempotency_key
        body = self._fork_body(definition, version, params, from_node)
        try:
            made, status = await self._connection.made(at("runs", run_id, "fork"), body, key)
        except InvalidParams:
            raise
        except InvalidDefinition as error:
            raise await self._found_by(error, definition or {}) from None
        created = idempotency_key is None or status != 200
        return Accepted(made["run_id"], created, findings_of(made.get("warnings", ())))

    async def plan_fork(
        self,
        run_id: str,
        *,
        definition: Source | Mapping[str, Any] | Checked | None = None,
        version: int | str | None = None,
        params: Mapping[str, Any] | None = None,
        from_node: str | None = None,
    ) -> dict[str, Any]:
        body = self._fork_body(definition, version, params, from_node, dry_run=True)
        try:
            return await self._post(at("runs", run_id, "fork"), body, repeatable=True)
        except InvalidParams:
            raise
        except InvalidDefinition as error:
            raise await self._found_by(error, definition or {}) from None

    def _fork_body(
        self,
        definition: Source | Mapping[str, Any] | Checked | None,
        version: int | str | None,
        params: Mapping[str, Any] | None,
        from_node: str | None,
        **more: Any,
    ) -> bytes:
        fields = {
            "definition": None if definition is None else self._data(definition),
            "version": version,
            "params": None if params is None else apply_params(None, params),
            "from": from_node,
            **more,
        }
        return self._as_json({name: value for name, value in fields.items() if value is not None})

    async def _make(
        self,
        what: Literal["runs", "batches"],
        workflow: Given,
        body: dict[str, Any],
        version: int | str | None,
        key: str | None,
    ) -> tuple[dict[str, Any], bool]:
        """The run or batch that was made of a workflow, and whether it was made now.

        With a key in any case: the reply may be lost, and the request has to be repeated.
        """
        own = os.urandom(16).hex() if key is None else key
        if isinstance(workflow, str):
            body = body if version is None else {**body, "version": version}
            path = at("workflows", workflow, what)
        elif version is not None:
            message = "a version is of a registered workflow; this is a definition"
            raise InvalidParams([Problem("invalid_field", message, "version")])
        else:
            body = {"definition": self._data(workflow), **body}
            path = at(what)
        try:
            made, status = await self._connection.made(path, self._as_json(body), own)
        except InvalidParams:
            raise
        except InvalidDefinition as error:
            if isinstance(workflow, str):
                raise
            raise await self._found_by(error, workflow) from None
        return made, key is None or status != 200

    async def receipt(self, run_id: str) -> dict[str, Any]:
        return receipt_view(await self._get(at("runs", run_id), nodes="false"))

    async def find_run(self, prefix: str) -> str:
        return str((await self._get(at("run-ids", prefix)))["run_id"])

    async def get_run(
        self, run_id: str, *, nodes: bool = True, large: bool = True
    ) -> dict[str, Any]:
        query = {**({} if nodes else {"nodes": "false"}), **(FULL if large else {})}
        return await self._get(at("runs", run_id), **query)

    async def definition_of_run(self, run_id: str) -> dict[str, Any]:
        return await self._get(at("runs", run_id, "definition"))

    async def snapshot(self, run_id: str) -> RunDetail:
        # The events first: an event in between is then shown twice, and not left out.
        events = await self.events(run_id)
        view = await self.get_run(run_id)
        queued = {node["id"] for node in view["nodes"] if node["status"] == NodeStatus.QUEUED}
        waits = {node: wait for node, wait in _waits(events).items() if node in queued}
        return RunDetail(view, events[-1]["seq"] if events else 0, waits)

    async def wait_run(self, run_id: str, *, nodes: bool = True) -> dict[str, Any]:
        path = at("runs", run_id)
        query: Query = {"nodes": "false", "wait": WAIT_SECONDS}
        while True:
            ended = await self._connection.call("GET", path, query=query, waits=WAIT_SECONDS)
            if ended["finished_at"] is None:
                continue
            run = await self.get_run(run_id, nodes=nodes)
            if run["finished_at"] is not None:  # else it was retried meanwhile
                return run

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        wanted = asdict(query)
        del wanted["max_result_bytes"]
        page = await self._get(at("runs"), **wanted)
        if query.max_result_bytes is None:
            found = [run for run in page["items"] if await self._has_result(run)]
            page["items"] = found
        return page

    async def _has_result(self, run: dict[str, Any]) -> bool:
        """Whether the run is still there. A page has room for small results only: a large one is
        fetched by itself."""
        if looks_like_a_reference(run["result"]):
            path = at("runs", run["run_id"], "result")
            try:
                run["result"] = await self._connection.call("GET", path, query={"partial": "true"})
            except NotFound:  # deleted since the page was read
                return False
        return True

    async def run_counts(self, *, workflow: str | None = None, hours: int = 24) -> dict[str, Any]:
        return await self._get(at("run-counts"), workflow=workflow, hours=hours)

    async def results(self, run_id: str, *, partial: bool = False) -> dict[str, Any]:
        query = {"partial": "true", **FULL} if partial else FULL
        return await self._get(at("runs", run_id, "results"), **query)

    async def node_detail(self, run_id: str, node: str) -> dict[str, Any]:
        return await self._get(at("runs", run_id, "nodes", node))

    async def node_items(
        self,
        run_id: str,
        node: str,
        *,
        status: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        path = at("runs", run_id, "nodes", node, "items")
        return await self._get(path, status=status, limit=limit, cursor=cursor)

    async def events(
        self, run_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        path = at("runs", run_id, "events")
        return list(await self._connection.call("GET", path, query={"after": after}))[:limit]

    async def watch(self, run_id: str, after: int = 0) -> AsyncGenerator[dict[str, Any]]:
        feed = self._connection.events(at("runs", run_id, "events"), after)
        async with aclosing(cast("AsyncGenerator[dict[str, Any]]", feed)):
            async for event in feed:
                yield event

    async def feed(self, after: str | None = None) -> AsyncGenerator[dict[str, Any]]:
        if after is not None:
            FeedPosition.parse(after)  # no header can carry every text
        feed = self._connection.feed(at("events"), after)
        async with aclosing(cast("AsyncGenerator[dict[str, Any]]", feed)):
            async for event in feed:
                yield event

    async def logs(self, run_id: str, query: LogQuery = ALL_LINES) -> dict[str, Any]:
        return await self._get(at("runs", run_id, "logs"), **asdict(query))

    async def follow_logs(
        self, run_id: str, query: LogQuery = ALL_LINES
    ) -> AsyncGenerator[dict[str, Any]]:
        wanted = asdict(query)
        after = wanted.pop("after")
        feed = self._connection.events(at("runs", run_id, "logs"), after, wanted)
        async with aclosing(cast("AsyncGenerator[dict[str, Any]]", feed)):
            async for line in feed:
                yield line

    async def run_graph(self, run_id: str) -> dict[str, Any]:
        return await self._get(at("runs", run_id, "graph"))

    async def explain(self, run_id: str) -> dict[str, Any]:
        return await self._get(at("runs", run_id, "explain"))

    async def damage(self, run_id: str) -> list[str]:
        return list((await self.explain(run_id)).get("damage", ()))

    async def verify(self, run_id: str) -> list[str]:
        return list((await self._get(at("runs", run_id, "verify")))["divergences"])

    async def cancel_run(self, run_id: str) -> dict[str, Any]:
        return await self._whole(await self._post(at("runs", run_id, "cancel"), _json({})))

    async def retry_run(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        body = _json({} if from_node is None else {"from": from_node})
        return await self._whole(await self._post(at("runs", run_id, "retry"), body))

    async def retry_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        return await self._post(at("runs", "retry"), _json({"run_ids": list(run_ids)}))

    async def cancel_runs(self, run_ids: Sequence[str]) -> dict[str, Any]:
        return await self._post(at("runs", "cancel"), _json({"run_ids": list(run_ids)}))

    async def _whole(self, view: dict[str, Any]) -> dict[str, Any]:
        """With all its outputs. Not asked for with the change: a long reply that breaks may be
        asked for again, and a change may not."""
        if any(looks_like_a_reference(node["output"]) for node in view["nodes"]):
            return await self.get_run(view["run_id"])
        return view

    async def plan_retry(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        body = _json({"from": from_node, "dry_run": True})
        return await self._post(at("runs", run_id, "retry"), body, repeatable=True)

    async def repair(self, run_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        body = _json({"dry_run": dry_run})
        return await self._post(at("runs", run_id, "repair"), body, repeatable=True)

    async def delete_run(self, run_id: str) -> None:
        await self._connection.call("DELETE", at("runs", run_id))

    async def delete_runs(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        """The server has no time limit for a deletion: the caller has read when they ended."""
        deleted: list[str] = []
        for first in range(0, len(run_ids), DELETE_SIZE):
            some = run_ids[first : first + DELETE_SIZE]
            done = await asyncio.gather(*map(self._delete_finished, some))
            deleted += [run_id for run_id, is_gone in zip(some, done, strict=True) if is_gone]
        return deleted

    async def _delete_finished(self, run_id: str) -> bool:
        try:
            await self.delete_run(run_id)
        except (Conflict, NotFound):
            return False
        return True

    async def reclaim_space(self) -> None:
        """The server does so itself."""

    async def owner(self, run_id: str) -> Owner:
        run = await self._get(at("runs", run_id), nodes="false")
        return "elsewhere" if run["finished_at"] is None else "none"

    async def orphans(self) -> list[str]:
        return []  # the server takes them over itself

    async def resume(self, run_id: str | None = None) -> list[str]:
        raise Conflict(
            f"{self._connection.url} goes on with its runs itself: there is nothing to "
            "resume from here"
        )

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def batch(
        self,
        workflow: Given,
        items: Sequence[Mapping[str, Any]],
        *,
        version: int | str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        body = {"items": apply_to_items(None, items)}
        made, created = await self._make("batches", workflow, body, version, idempotency_key)
        reply = {"batch_id": made["batch_id"], "count": made["count"], "created": created}
        return with_warnings(reply, findings_of(made.get("warnings", ())))

    async def open_batch(
        self, workflow: Given, count: int, *, idempotency_key: str, items: str = ""
    ) -> dict[str, Any]:
        raise DovetailError("a batch on a server is made with all its items at once")

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        return await self._get(at("batches", batch_id), limit=limit, cursor=cursor)

    async def find_batch(self, prefix: str) -> str:
        return str((await self._get(at("batch-ids", prefix)))["batch_id"])

    async def list_batches(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        return await self._get(at("batches"), limit=limit, cursor=cursor)

    async def wait_batch(self, batch_id: str) -> dict[str, Any]:
        pause = FIRST_POLL_SECONDS
        while True:
            batch = await self.get_batch(batch_id, limit=1)
            if batch["finished_at"] is not None:
                return batch
            await asyncio.sleep(pause)
            pause = min(MAX_POLL_SECONDS, pause * 1.5)

    async def retry_batch(self, batch_id: str) -> dict[str, Any]:
        return await self._post(at("batches", batch_id, "retry"), _json({}))

    # ── rate limits ──────────────────────────────────────────────────────────────────────

    async def rate_limits(self) -> dict[str, Any]:
        return await self._get(at("rate-limits"))

    async def rate_limit(self, tag: str) -> dict[str, Any]:
        return await self._get(at("rate-limits", tag))

    async def rate_limit_history(
        self, tag: str, *, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        return await self._get(at("rate-limit-history", tag), limit=limit, cursor=cursor)

    async def set_rate_limit(
        self, tag: str, rate_per_second: float, burst: int, *, actor: str | None = None
    ) -> dict[str, Any]:
        _without(None, actor)
        body = self._as_json({"rate_per_second": rate_per_second, "burst": burst})
        return await self._put(at("rate-limits", tag), body)

    # ── queues and dead letters ──────────────────────────────────────────────────────────

    async def queues(self) -> dict[str, Any]:
        return await self._get(at("queues"))

    async def dead_letters(self) -> dict[str, Any]:
        return await self._get(at("dead-letters"))

    async def drop_dead_letter(self, letter_id: str) -> None:
        await self._connection.call("DELETE", at("dead-letters", letter_id))

    async def requeue_dead_letter(self, letter_id: str) -> dict[str, Any]:
        return await self._post(at("dead-letters", letter_id, "requeue"), _json({}))

    # ── requests ─────────────────────────────────────────────────────────────────────────

    async def _get(self, path: str, **query: Any) -> dict[str, Any]:
        return dict(await self._connection.call("GET", path, query=query))

    async def _put(self, path: str, body: bytes) -> dict[str, Any]:
        return dict(await self._connection.call("PUT", path, body=body))

    async def _post(
        self, path: str, body: bytes, form: str = JSON, *, repeatable: bool = False
    ) -> dict[str, Any]:
        return dict(
            await self._connection.call("POST", path, body=body, form=form, repeatable=repeatable)
        )

    def _data(self, given: Source | Mapping[str, Any] | Checked) -> Any:
        if isinstance(given, Checked):
            if given.workflow is None:
                raise InvalidDefinition(given.errors)
            return given.workflow.model_dump(mode="json", exclude_unset=True)
        data = given.data if isinstance(given, Source) else dict(given)
        try:
            encode(data, max_bytes=MAX_BODY_BYTES, nul=False)
        except NotJson as error:
            found = self.validate(given).errors
            raise InvalidDefinition(found or [Problem(error.code, str(error), "")]) from None
        return data

    def _as_json(self, body: Any) -> bytes:
        try:
            return encode(body, max_bytes=MAX_BODY_BYTES)
        except NotJson as error:
            raise InvalidParams([Problem(error.code, str(error), "")]) from None

    async def _found_by(
        self, error: InvalidDefinition, given: Source | Mapping[str, Any] | Checked
    ) -> InvalidDefinition:
        """The same problems with their positions in the definition that the caller gave."""
        if isinstance(given, Source) and given.text is not None:
            return InvalidDefinition((await self.judge(given)).errors or error.problems)
        return InvalidDefinition(
            [Problem(one.code, one.message, one.path) for one in error.problems]
        )


def at(*names: str) -> str:
    """A path below the API's. Raises `NotFound` for what no path can name."""
    if "" in names or "." in names or ".." in names:
        raise NotFound(f"nothing is called {shown(next(n for n in names if n in ('', '.', '..')))}")
    path = "/api/v1/" + "/".join(quote(name, safe="") for name in names)
    if len(path) > MAX_PATH_LENGTH:
        raise NotFound(f"nothing is called {shown(max(names, key=len))}")
    return path


def _without(seen: Seen | None, actor: str | None) -> None:
    assert seen is None, "the client sends no If-Match"  # noqa: S101
    assert actor is None, "the server knows its caller by the token"  # noqa: S101


def _sent(definition: Source) -> tuple[bytes, str]:
    """The text as it was read, so that the server names the positions of its problems."""
    text, name = definition.text or "", definition.name.lower()
    is_json = name.endswith(".json") or (
        not name.endswith((".yaml", ".yml")) and text.lstrip()[:1] == "{"
    )
    return text.encode(), JSON if is_json else YAML


def _json(value: Any) -> bytes:
    return orjson.dumps(value)


def _waits(events: Iterable[Mapping[str, Any]]) -> dict[str, NodeWait]:
    """What each node waits for after these events of its run."""
    waits: dict[str, NodeWait] = {}
    for event in events:
        if (node := event.get("node")) is None:
            continue
        waits.pop(node, None)
        if event["type"] == "node.parked":
            waits[node] = NodeWait(seconds(event["until"]), event.get("resource_tag"))
        elif event["type"] == "node.retrying":
            until = seconds(event["time"]) + event["delay"]
            waits[node] = NodeWait(until, None, event["retry"], event["error"])
    return waits
