"""A server's engine as commands: each asks the server, and answers as the engine here would.

So the client and the command line need not know where they work. What is read comes in the words
of the ports; whatever decides or moves a run is asked of the server, because only it knows its
handlers, versions and keys. What it must not know: how a call is sent, or how an answer is shown.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import quote

import orjson

from dovetail.client.connection import Query, ServerConnection
from dovetail.client.decode import DecodedRun, event_from, run_from
from dovetail.client.errors import findings_of
from dovetail.config import Settings
from dovetail.core.definition.params import apply_params, apply_to_items
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked, check
from dovetail.core.errors import (
    DovetailError,
    InvalidDefinition,
    InvalidParams,
    NotFound,
    Problem,
    shown,
)
from dovetail.core.events import Event
from dovetail.core.outputs import ReadBudget, looks_like_a_reference
from dovetail.core.run import RunState
from dovetail.core.values import NotJson, encode
from dovetail.engine.commands import Accepted, Commands, Given, with_warnings
from dovetail.engine.ports import Seen, WorkflowVersion
from dovetail.engine.views import receipt_view
from dovetail.wiring.embedded import definition_limits

WAIT_SECONDS = 25.0
"""Of one request for the end of a run: below what proxies take for dead."""
FIRST_LOOK, LONGEST_LOOK = 0.05, 1.0
"""Seconds between two looks at a batch, which grow."""
FULL: Query = {"outputs": "full"}
"""An answer with every output in it, however large."""
JSON, YAML = "application/json", "application/yaml"
LARGEST_BODY = 1 << 30
"""How much a body may have is the server's to say; this is what memory is there for."""


@asynccontextmanager
async def calling(settings: Settings) -> AsyncIterator[Commands]:
    """The commands of the server that the settings name. Nothing is sent before one is called."""
    assert settings.server is not None  # noqa: S101
    async with ServerConnection(settings.server, settings.token) as connection:
        runs = ServerReader(connection)
        nothing: Any = None  # whatever would use it is asked of the server instead
        yield ServerCommands(
            store=cast("Any", runs),
            records=cast("Any", runs),
            orchestrator=nothing,
            wait=runs.wait,
            clock=time.time,
            known_handlers=None,
            default_retries={},
            limits=definition_limits(settings),
            rates=nothing,
            max_crashes=settings.max_crashes,
            digest=nothing,
            drives=False,
            why_not_here=f"{connection.url} goes on with its runs itself: there is nothing to "
            "resume from here",
            serving=runs.serving,
            connection=connection,
        )


class ServerReader:
    """What can be read of a server, in the words of the ports `DurableStore` and `Records`."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        # The events first: what happens in between is then told twice, and not left out.
        events = [event_from(fields) for fields in await self.events(run_id)]
        query = FULL if outputs else {}
        return run_from(await self._get(at("runs", run_id), **query), events)

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        feed = self._connection.events(at("runs", run_id, "events"), after)
        async with aclosing(cast("AsyncGenerator[dict[str, Any]]", feed)):
            async for fields in feed:
                yield event_from(fields)

    async def wait(self, run_id: str) -> RunState:
        while True:
            await self.ended(run_id)
            run = await self._get(at("runs", run_id), **FULL)
            if run["finished_at"] is not None:  # else somebody has retried it meanwhile
                return run_from(run)

    async def ended(self, run_id: str) -> None:
        query: Query = {"nodes": "false", "wait": WAIT_SECONDS}
        seen: dict[str, Any] = {"finished_at": None}
        while seen["finished_at"] is None:
            path = at("runs", run_id)
            seen = await self._connection.call("GET", path, query=query, waits=WAIT_SECONDS)

    async def owner_of(self, run_id: str) -> Literal["elsewhere", "none"]:
        return "elsewhere" if (await self.summary(run_id))["finished_at"] is None else "none"

    async def orphans(self) -> list[str]:
        return []  # the server takes them over itself

    async def find_run(self, prefix: str) -> str:
        return str((await self._get(at("run-ids", prefix)))["run_id"])

    async def list_runs(self, *, most: int | None = None, **wanted: Any) -> dict[str, Any]:
        page = await self._get(at("runs"), **wanted)
        for run in page["items"]:
            # A page has room for small results; each other one is fetched by itself.
            if looks_like_a_reference(run["result"]):
                path = at("runs", run["run_id"], "result")
                run["result"] = await self._connection.call("GET", path, query={"partial": "true"})
        return page

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        """With what there is of a large result: who wants it asks for the run."""
        return await self._get(at("runs", run_id), nodes="false")

    async def receipt(self, run_id: str) -> dict[str, Any]:
        return receipt_view(await self.summary(run_id))

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        path = at("runs", run_id, "events")
        return list(await self._connection.call("GET", path, query={"after": after}))[:limit]

    async def serving(self) -> set[str]:
        """The handlers that its live workers have."""
        workers = (await self._get(at("workers")))["items"]
        return {name for worker in workers if worker["alive"] for name in worker["handlers"]}

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        return await self._get(at("batches", batch_id), limit=limit, cursor=cursor)

    async def find_batch(self, prefix: str) -> str:
        return str((await self._get(at("batch-ids", prefix)))["batch_id"])

    # ── workflows ────────────────────────────────────────────────────────────────────────

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        return await self._get(at("workflows", name), version=version)

    async def workflows(self, **wanted: Any) -> dict[str, Any]:
        return await self._get(at("workflows"), **wanted)

    async def versions(self, name: str) -> dict[str, Any]:
        return await self._get(at("workflows", name, "versions"))

    async def delete_workflow(self, name: str, seen: Seen | None = None) -> None:
        _without(seen)
        await self._connection.call("DELETE", at("workflows", name))

    async def set_alias(
        self, name: str, alias: str, version: int, seen: Seen | None = None
    ) -> dict[str, Any]:
        _without(seen)
        path = at("workflows", name, "aliases", alias)
        return dict(await self._connection.call("PUT", path, body=_json({"version": version})))

    async def delete_alias(self, name: str, alias: str, seen: Seen | None = None) -> None:
        _without(seen)
        await self._connection.call("DELETE", at("workflows", name, "aliases", alias))

    async def _get(self, path: str, **query: Any) -> dict[str, Any]:
        return dict(await self._connection.call("GET", path, query=query))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommands(Commands):
    """What decides is asked of the server; the rest is inherited and reads."""

    connection: ServerConnection

    # ── definitions ──────────────────────────────────────────────────────────────────────

    def validate(self, definition: Source | Mapping[str, Any]) -> Checked:
        """As far as can be told from here: only the server knows its handlers; see `judge`."""
        return check(definition, None, self.limits)

    async def judge(self, definition: Source) -> Checked:
        """As the server validates a text, with its handlers and limits."""
        found = await self._ask(at("workflows", "validate"), *_sent(definition), repeatable=True)
        errors, warnings = findings_of(found["errors"]), findings_of(found["warnings"])
        workflow = None if errors else self.validate(definition).workflow
        return Checked(workflow, errors, warnings, found["layers"])

    async def register(
        self, definition: Source | Mapping[str, Any] | Checked, *, seen: Seen | None = None
    ) -> WorkflowVersion:
        _without(seen)
        if isinstance(definition, Source) and definition.text is not None:
            body, form = _sent(definition)
        else:
            body, form = self._as_json(self._data(definition)), JSON
        try:
            made = await self._ask(at("workflows"), body, form, repeatable=True)
        except InvalidDefinition as error:
            raise await self._found_by(error, definition) from None
        return WorkflowVersion(made["name"], made["version"], made["created"])

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

    async def _make(
        self,
        what: Literal["runs", "batches"],
        workflow: Given,
        body: dict[str, Any],
        version: int | str | None,
        key: str | None,
    ) -> tuple[dict[str, Any], bool]:
        """What was made of a workflow, and whether it was made now.

        With a key in any case: the answer may be lost, and the request has to be repeated.
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
            made, status = await self.connection.made(path, self._as_json(body), own)
        except InvalidParams:
            raise
        except InvalidDefinition as error:
            if isinstance(workflow, str):
                raise
            raise await self._found_by(error, workflow) from None
        return made, key is None or status != 200

    async def get_run(self, run_id: str, *, nodes: bool = True) -> dict[str, Any]:
        query = FULL if nodes else {"nodes": "false", **FULL}
        return dict(await self.connection.call("GET", at("runs", run_id), query=query))

    def view(self, run: RunState) -> dict[str, Any]:
        assert isinstance(run, DecodedRun)  # noqa: S101
        return dict(run.fields)

    async def results(self, run_id: str, *, partial: bool = False) -> dict[str, Any]:
        query = {"partial": "true", **FULL} if partial else FULL
        return dict(await self.connection.call("GET", at("runs", run_id, "results"), query=query))

    async def explain(self, run_id: str) -> dict[str, Any]:
        return dict(await self.connection.call("GET", at("runs", run_id, "explain")))

    async def damage(self, run_id: str) -> list[str]:
        return list((await self.explain(run_id)).get("damage", ()))

    async def verify(self, run_id: str) -> list[str]:
        found = await self.connection.call("GET", at("runs", run_id, "verify"))
        return list(found["divergences"])

    async def cancel(self, run_id: str, *, room: ReadBudget | None = None) -> RunState:
        return await self._moved(run_id, await self._ask(at("runs", run_id, "cancel"), _json({})))

    async def repair(self, run_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        body = _json({"dry_run": dry_run})
        return dict(await self._ask(at("runs", run_id, "repair"), body, repeatable=True))

    async def retry(
        self, run_id: str, from_node: str | None = None, *, room: ReadBudget | None = None
    ) -> RunState:
        body = _json({} if from_node is None else {"from": from_node})
        return await self._moved(run_id, await self._ask(at("runs", run_id, "retry"), body))

    async def _moved(self, run_id: str, told: dict[str, Any]) -> RunState:
        """A run that was told to change, in full. Not asked for with the change: a long answer
        that breaks may be asked for again, and a change may not."""
        if any(looks_like_a_reference(node["output"]) for node in told["nodes"]):
            told = await self.get_run(run_id)
        return run_from(told)

    async def plan_retry(self, run_id: str, from_node: str | None = None) -> dict[str, Any]:
        body = _json({"from": from_node, "dry_run": True})
        return dict(await self._ask(at("runs", run_id, "retry"), body, repeatable=True))

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
        answer = {"batch_id": made["batch_id"], "count": made["count"], "created": created}
        return with_warnings(answer, findings_of(made.get("warnings", ())))

    async def open_batch(
        self, workflow: Given, count: int, *, idempotency_key: str, items: str = ""
    ) -> dict[str, Any]:
        raise DovetailError("a batch on a server is made with all its items at once")

    async def list_batches(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        query: Query = {"limit": limit, "cursor": cursor}
        return dict(await self.connection.call("GET", at("batches"), query=query))

    async def wait_batch(self, batch_id: str) -> dict[str, Any]:
        pause = FIRST_LOOK
        while True:
            batch = await self.get_batch(batch_id, limit=1)
            if batch["finished_at"] is not None:
                return batch
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK, pause * 1.5)

    async def retry_batch(self, batch_id: str) -> dict[str, Any]:
        return dict(await self._ask(at("batches", batch_id, "retry"), _json({})))

    # ── rate limits ──────────────────────────────────────────────────────────────────────

    async def rate_limits(self) -> dict[str, Any]:
        return dict(await self.connection.call("GET", at("rate-limits")))

    async def rate_limit(self, tag: str) -> dict[str, Any]:
        return dict(await self.connection.call("GET", at("rate-limits", tag)))

    async def set_rate_limit(self, tag: str, rate_per_second: float, burst: int) -> dict[str, Any]:
        body = self._as_json({"rate_per_second": rate_per_second, "burst": burst})
        return dict(await self.connection.call("PUT", at("rate-limits", tag), body=body))

    # ── what is sent ─────────────────────────────────────────────────────────────────────

    async def _ask(
        self, path: str, body: bytes, form: str = JSON, *, repeatable: bool = False
    ) -> Any:
        return await self.connection.call("POST", path, body=body, form=form, repeatable=repeatable)

    def _data(self, given: Source | Mapping[str, Any] | Checked) -> Any:
        if isinstance(given, Checked):
            if given.workflow is None:
                raise InvalidDefinition(given.errors)
            return given.workflow.model_dump(mode="json", exclude_unset=True)
        data = given.data if isinstance(given, Source) else dict(given)
        try:
            encode(data, max_bytes=LARGEST_BODY, nul=False)
        except NotJson as error:
            found = self.validate(given).errors
            raise InvalidDefinition(found or [Problem(error.code, str(error), "")]) from None
        return data

    def _as_json(self, body: Any) -> bytes:
        try:
            return encode(body, max_bytes=LARGEST_BODY)
        except NotJson as error:
            raise InvalidParams([Problem(error.code, str(error), "")]) from None

    async def _found_by(
        self, error: InvalidDefinition, given: Source | Mapping[str, Any] | Checked
    ) -> InvalidDefinition:
        """The same problems with the places that they have in what the caller gave."""
        if isinstance(given, Source) and given.text is not None:
            return InvalidDefinition((await self.judge(given)).errors or error.problems)
        return InvalidDefinition(
            [Problem(one.code, one.message, one.path) for one in error.problems]
        )


def at(*names: str) -> str:
    """A path below the API's. Raises `NotFound` for what no path can name."""
    if "" in names or "." in names or ".." in names:
        raise NotFound(f"nothing is called {shown(next(n for n in names if n in ('', '.', '..')))}")
    return "/api/v1/" + "/".join(quote(name, safe="") for name in names)


def _without(seen: Seen | None) -> None:
    assert seen is None, "what a caller has seen is for who answers If-Match"  # noqa: S101


def _sent(definition: Source) -> tuple[bytes, str]:
    """A text as it was read, so that the server tells the places of its problems."""
    text, name = definition.text or "", definition.name.lower()
    is_json = name.endswith(".json") or (
        not name.endswith((".yaml", ".yml")) and text.lstrip()[:1] == "{"
    )
    return text.encode(), JSON if is_json else YAML


def _json(value: Any) -> bytes:
    return orjson.dumps(value)
