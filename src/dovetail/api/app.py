"""The HTTP API as one ASGI application: every call under `/api/v1`, health, metrics, docs, page.

Each resource is a file with a router. This file adds what holds for all of them: problems for
errors, the guard, and the request context.

It also makes the OpenAPI document: what FastAPI reads off the endpoints, and what no signature
says. That is the problems and headers that many calls share, the definition's own schema, and the
names in paths. `/docs` is the same document as a page that can also send each call, without a
request to another server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from dovetail.api import batches, events, logs, nodes, operations, runs, workflows
from dovetail.api.admission import Admission, Budgets, limits_of
from dovetail.api.connection import most_connections
from dovetail.api.events import FEED_FRAME, FRAME, Event, FeedItem
from dovetail.api.logs import LOG_FRAME
from dovetail.api.middleware import Answered, Compression, Heads, RequestContext
from dovetail.api.page import WebPage
from dovetail.api.problems import KIND_OF, RETRY_AFTER, URN, answer_problems
from dovetail.api.responses import (
    BATCH,
    PREFIX,
    RUN,
    ProblemDetails,
    Reply,
    header,
    json_answer,
    reply,
)
from dovetail.api.security import (
    OPEN_PATHS,
    Guard,
    Tokens,
    actor_of,
    opens_page,
    page_policy,
    scope_of,
)
from dovetail.api.service import ApiService
from dovetail.core.definition.model import definition_schema
from dovetail.core.node_logs import LEVELS
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.engine.idempotency import MAX_KEY_LENGTH

_PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "any other problem, as of RFC 9457",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}
        },
    }
}

about_router = APIRouter(tags=["about"])


@about_router.get("/openapi.json", summary="This API as OpenAPI")
async def openapi(request: Request) -> Response:
    return json_answer(request.app.openapi())


@about_router.get("/docs", summary="This API as a page", response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    is_browser = opens_page(request.headers.getlist("accept"))
    script = request.app.state.web_page.address("docs.js") if is_browser else None
    page = docs_page(request.app.openapi(), script)
    policy = page_policy(STYLE, script=is_browser)
    headers = {"Content-Security-Policy": policy, "Vary": "accept"}
    return HTMLResponse(page, headers=headers)


me_router = APIRouter(tags=["about"])


class Me(Reply):
    name: str = Field(description="as histories name the caller; `anonymous` without tokens")
    scope: Literal["full", "read"] = Field(description="`read`: every call that writes is a 403")


@me_router.get(
    "/me",
    summary="Which token this is, and what it may do",
    response_model=Me,
    responses={200: reply({"name": "ci", "scope": "read"})},
)
async def me(request: Request) -> Response:
    return json_answer({"name": actor_of(request), "scope": scope_of(request)})


# A request tries them in this order, a microsecond for each call: the most used come first.
_ROUTERS = (
    (runs.router, PREFIX),
    (workflows.router, PREFIX),
    (nodes.router, PREFIX),
    (events.router, PREFIX),
    (logs.router, PREFIX),
    (batches.router, PREFIX),
    (workflows.schema_router, PREFIX),
    (operations.limits_router, PREFIX),
    (operations.limit_history_router, PREFIX),
    (operations.workers_router, PREFIX),
    (me_router, PREFIX),
    (operations.health_router, ""),
    (operations.metrics_router, ""),
    (about_router, ""),
)


def create_app(
    service: ApiService,
    version: str,
    answered: Answered | None = None,
    applications: Sequence[APIRouter] = (),
    more: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The application, guarded. Raises `SettingsError` for tokens that cannot be used.

    `answered` is called after every request. `applications` are the calls of what is built on
    Dovetail, under the same prefix and rules. `more` are routes beside the API, behind the same
    guard.
    """
    routers = (*_ROUTERS, *((router, PREFIX) for router in applications))
    app = FastAPI(
        title="Dovetail",
        version=version,
        description="Workflows over HTTP. Errors are problems of RFC 9457.",
        openapi_url=None,  # the two pages of its own are ours, behind the guard and offline
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        # Its own spans know nothing of refusals, and show the text of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = service
    for router, prefix in routers:
        app.include_router(router, prefix=prefix, responses=_PROBLEM)
    describe(app, routers)
    page = app.state.web_page = WebPage()
    app.router.routes.extend([*more, *page.routes])
    # Messages of a store name the place they are about, which is no business of a client.
    file = re.escape(str(service.settings.db))
    hidden = re.compile(rf" in ({file}|Redis( or .*)?|PostgreSQL at \S+)$")
    answer_problems(app, hidden, service.readiness.doubt)
    settings = service.settings
    guard = Guard(
        Admission(
            Compression(app),
            Budgets(limits_of(settings, most_connections(settings.max_connections))),
            settings.trusted_proxies,
        ),
        hosts=[*settings.allowed_hosts, *service.hosts],
        tokens=Tokens(settings.tokens, settings.named_tokens),
        is_static=page.holds,
    )
    return RequestContext(Heads(guard), closing=service.closing, answered=answered)


# ── the OpenAPI document ─────────────────────────────────────────────────────────────────

Part = dict[str, Any]

PARAMETERS = {
    "name": ("a workflow's name", "greet"),
    "alias": ("a name for a version", "stable"),
    "version": ("a version's number, or an alias", "latest"),
    "run_id": ("the id of a run", RUN),
    "node_id": ("the id of a node", "end"),
    "beginning": ("at least 4 characters of an id", RUN[:6]),
    "batch_id": ("the id of a batch", BATCH),
    "tag": ("a `resource_tag`", "search_api"),
    "document_id": ("the id of a document", "invoice-779c2fa1fc"),
    "letter_id": ("the id of a dead letter", operations.LETTER),
}
"""What each name in a path is, and an example of it."""

_WORDS = {
    401: "a token is needed, or this one is not known",
    403: "the token may only read, or the request comes from where it may not",
    404: "there is no such thing",
    408: "the body took too long",
    409: "its state forbids it, or the key was used for another request",
    410: "it is not kept any more",
    412: "it is no longer as it was seen",
    413: "the body is too large",
    415: "the body is neither JSON nor YAML",
    422: "the request has fields that cannot be used; `errors` has all of them",
    429: "too much is going on; come back later",
    500: "a bug; the log has it under the request id",
    503: "a store is away, or the server is stopping; come back later",
}
_KINDS = {**KIND_OF, 409: "conflict", 410: "expired", 422: "invalid_request", 503: "store_error"}


def describe(app: FastAPI, routers: Sequence[tuple[APIRouter, str]]) -> None:
    """Let the application give out the whole document; it is made once.

    `routers` are those of the application, with their prefixes.
    """
    generate = app.openapi

    def described() -> Part:
        if app.openapi_schema is None:
            document = generate()
            for router, prefix in routers:
                _put_examples(document["paths"], router, prefix)
            _complete(document)
        return generate()

    app.openapi = described  # type: ignore[method-assign]


def _put_examples(paths: Part, router: APIRouter, prefix: str) -> None:
    """The examples of replies as the endpoints have them: FastAPI leaves their nulls out."""
    for route in router.routes:
        assert isinstance(route, APIRoute)  # noqa: S101
        for method in route.methods or ():
            replies = paths[prefix + route.path_format][method.lower()]["responses"]
            for status, example in route.responses.items():
                for kind, content in example.get("content", {}).items():
                    if "example" in content:
                        replies[str(status)]["content"][kind]["example"] = content["example"]


def _complete(document: Part) -> None:
    parts = document["components"]
    known = parts["schemas"]
    for name, schema in (
        ("ProblemDetails", ProblemDetails.model_json_schema(ref_template=_REF)),
        ("Event", Event.model_json_schema(ref_template=_REF)),
        ("EventFrame", FRAME),
        ("FeedItem", FeedItem.model_json_schema(ref_template=_REF)),
        ("FeedFrame", FEED_FRAME),
        ("LogFrame", LOG_FRAME),
        ("Definition", _definition()),
    ):
        schema = dict(schema)
        known.update(schema.pop("$defs", {}))
        known[name] = schema
    parts["responses"] = {_name(status): _problem(status) for status in _WORDS}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]
    for path, calls in document["paths"].items():
        for call in calls.values():
            if path in OPEN_PATHS:
                call["security"] = []
            _describe(path, call)
            _name_body(call, known)
    for name, states in _ENUMS.items():
        document["paths"] = _with_enum(document["paths"], states, name)
        parts["schemas"] = _with_enum(parts["schemas"], states, name)
    for name, states in _ENUMS.items():
        parts["schemas"][name] = {"title": name, "type": "string", "enum": list(states)}
    document["servers"] = [{"url": "/", "description": "the server that gives this document"}]


_ENUMS = {"RunStatus": tuple(RunStatus), "NodeStatus": tuple(NodeStatus)}
_CONSTRAINTS: dict[str, Part] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    "Last-Event-ID": {"type": "string", "pattern": "^[0-9]{0,15}$"},
    "level": {"type": "string", "enum": list(LEVELS)},
    "status": {"type": "string", "enum": list(RunStatus)},
}
"""Of parameters whose own schema does not say it."""


def _name_body(call: Part, known: Part) -> None:
    """A body with a title becomes a schema of that name, for generated clients."""
    for content in call.get("requestBody", {}).get("content", {}).values():
        if (name := content["schema"].get("title")) is not None:
            known[name] = content["schema"]
            content["schema"] = {"$ref": _REF.format(model=name)}


def _with_enum(value: Any, states: Sequence[str], name: str) -> Any:
    """The same with a reference wherever these states are listed."""
    if isinstance(value, list):
        return [_with_enum(inner, states, name) for inner in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("enum"), list) and sorted(value["enum"]) == sorted(states):
        rest = {key: value[key] for key in value if key in ("description",)}
        return {"$ref": _REF.format(model=name), **rest}
    return {key: _with_enum(inner, states, name) for key, inner in value.items()}


_REF = "#/components/schemas/{model}"


def _definition() -> Part:
    """The schema that editors use, with its parts where this document keeps them."""
    schema = _moved(definition_schema())
    del schema["$schema"]
    return {**schema, "$defs": {f"Definition{k}": v for k, v in schema["$defs"].items()}}


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        moved = {key: _moved(inner) for key, inner in value.items()}
        if isinstance(value.get("$ref"), str):
            name = value["$ref"].removeprefix("#/$defs/")
            moved["$ref"] = _REF.format(model=f"Definition{name}")
        return moved
    return [_moved(inner) for inner in value] if isinstance(value, list) else value


def _name(status: int) -> str:
    return _KINDS[status].title().replace("_", "")


def _problem(status: int) -> Part:
    kind = _KINDS[status]
    example = {
        "type": URN + kind,
        "title": kind.replace("_", " ").capitalize(),
        "status": status,
        "detail": _WORDS[status],
        "instance": f"{PREFIX}/runs/{RUN}",
        "request_id": "9c1185a5c5e9fc54",
    }
    if status == 422:
        example["errors"] = [
            {"code": "invalid_field", "message": "'who' is required", "path": "params.who"}
        ]
    headers: Part = {"X-Request-Id": header("the caller's own, or a new one")}
    if status in RETRY_AFTER:
        headers["Retry-After"] = header("seconds", "integer")
    if status == 401:
        headers["WWW-Authenticate"] = header("how to ask")
    return {
        "description": _WORDS[status],
        "headers": headers,
        "content": {
            "application/problem+json": {
                "schema": {"$ref": _REF.format(model="ProblemDetails")},
                "example": example,
            }
        },
    }


def _describe(path: str, call: Part) -> None:
    for parameter in call.get("parameters", ()):
        parameter["name"] = _HEADERS.get(parameter["name"], parameter["name"])
        parameter["schema"] = _sent(parameter, path)
        if parameter["in"] == "path":
            parameter["description"], parameter["example"] = PARAMETERS[parameter["name"]]
    responses = call["responses"]
    for status in {*_statuses(path, call), *(int(one) for one in responses if one[0] in "45")}:
        own = responses.get(str(status), {}).get("content")
        if own is not None:  # it has a reply of its own, too
            own.update(_problem(status)["content"])
        else:
            responses[str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}
    call["responses"] = dict(sorted(responses.items()))


_HEADERS = {
    "idempotency-key": "Idempotency-Key",
    "last-event-id": "Last-Event-ID",
    "if-match": "If-Match",
    "if-none-match": "If-None-Match",
}


def _sent(parameter: Part, path: str) -> Part:
    """Its schema without null: what is not given is left out."""
    schema = dict(parameter["schema"])
    kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        schema |= kinds[0]
    if path == f"{PREFIX}/events":  # its ids are opaque
        return schema
    return {**_CONSTRAINTS.get(parameter["name"], {}), **schema}


def _statuses(path: str, call: Part) -> Iterator[int]:
    """The problems of every call like this; an endpoint names its others in `responses`."""
    yield from (403, 500)
    if path == "/health/live":
        return
    yield 503
    if path in OPEN_PATHS:
        return
    yield from (401, 429)
    sent = {parameter["in"] for parameter in call.get("parameters", ())}
    if "path" in sent and "/rate-limits/" not in path:
        yield 404
    if "requestBody" in call:
        yield from (408, 413, 415)
    if ("requestBody" in call or sent - {"path"}) and not path.endswith("/validate"):
        yield 422


# ── the document as a page ───────────────────────────────────────────────────────────────

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
background: Canvas; color: CanvasText }
code { font: 14px ui-monospace, monospace } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem }
table { border-collapse: collapse; table-layout: fixed; width: 100% }
td { border-top: 1px solid #8884; padding: .4rem .6rem .4rem 0; vertical-align: top;
overflow-wrap: anywhere } td:first-child { width: 4.5rem; font-weight: 600 }
pre { font: 13px ui-monospace, monospace; overflow-x: auto; margin: .2rem 0 .6rem }
small, summary { opacity: .8 } :root { color-scheme: light dark }
button, input, textarea { font: inherit; padding: .2rem .5rem } textarea { width: 100%;
box-sizing: border-box; font-family: ui-monospace, monospace } button { cursor: pointer }
form label { display: grid; grid-template-columns: 12rem 1fr; gap: .5rem; margin: .3rem 0 }
form label:has(textarea) { grid-template-columns: 1fr } .try { margin: .4rem 0 }
@media (max-width: 40rem) { form label { grid-template-columns: 1fr } }
.reply { border-left: 3px solid #8888; padding-left: .6rem } .reply pre { max-height: 24rem;
overflow: auto } nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem }
.token { border: 1px solid #8884; padding: .6rem; margin: 1rem 0 }
"""


def docs_page(document: Mapping[str, Any], script: str | None) -> str:
    """The page; `script` is the address of the file that lets a reader send the calls."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    loads = "" if script is None else f'<script type="module" src="{escape(script)}"></script>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>{loads}</head><body><main><h1>{title}</h1>"
        f"<p>{_words(document['info']['description'])} "
        '<a href="/openapi.json">openapi.json</a> has every field, '
        '<a href="/">the page</a> shows runs.</p><div id="token"></div>'
        f"{_contents(document)}{''.join(_sections(document))}</main></body></html>"
    )


def _contents(document: Mapping[str, Any]) -> str:
    names = dict.fromkeys(
        _section(call) for calls in document["paths"].values() for call in calls.values()
    )
    links = " ".join(
        f'<a href="#{_anchor(name)}">{escape(name.capitalize())}</a>' for name in names
    )
    return f'<nav aria-label="Sections">{links}</nav>'


def _anchor(section: str) -> str:
    return escape(section.replace(" ", "-"))


def _section(call: Mapping[str, Any]) -> str:
    return str(call.get("tags", ["more"])[0])


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            rows = sections.setdefault(_section(call), [])
            rows.append(_row(method, path, call, document["components"]["schemas"]))
    for name, rows in sections.items():
        title = escape(name.capitalize())
        yield f'<h2 id="{_anchor(name)}">{title}</h2><table>{"".join(rows)}</table>'


def _words(text: str) -> str:
    """What is between backticks there, as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _json(value: Any) -> str:
    return escape(json.dumps(value, indent=1))


def _row(method: str, path: str, call: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    lines = [f"<code>{escape(path)}</code><br>{_words(call['summary'])}"]
    for parameter in call.get("parameters", ()):
        if parameter["in"] != "path":
            said = _words(parameter.get("description", ""))
            lines.append(f"<small><code>{escape(parameter['name'])}</code> {said}</small>")
    body = call.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = named.get(body.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
    # The fields of a definition are many, and its page has them.
    fields = () if schema.get("title") == "Dovetail workflow" else schema.get("properties", ())
    lines += [f"<small>body: <code>{escape(name)}</code></small>" for name in fields]
    codes = ", ".join(code for code in call["responses"] if code != "default")
    lines.append(f"<small>{escape(codes)}</small>")
    sent = body.get("example")
    answers = [
        (code, reply["content"]["application/json"]["example"])
        for code, reply in call["responses"].items()
        if "example" in reply.get("content", {}).get("application/json", {})
    ]
    if answers:
        shown = "" if sent is None else f"<pre>{_json(sent)}</pre>"
        shown += "".join(f"<small>{code}</small><pre>{_json(one)}</pre>" for code, one in answers)
        lines.append(f"<details><summary>example</summary>{shown}</details>")
    about = "<br>".join(lines) + _trial(method, path, call, sent)
    return f"<tr><td>{escape(method.upper())}</td><td>{about}</td></tr>"


def _trial(method: str, path: str, call: Mapping[str, Any], sent: Any) -> str:
    """Where `docs.js` puts its form for a call, with what it needs to know of it."""
    given = {
        "method": method.upper(),
        "path": path,
        "params": [
            {"name": one["name"], "in": one["in"], "example": one.get("example", "")}
            for one in call.get("parameters", ())
        ],
        "body": sent if "requestBody" in call else None,
        "has_body": "requestBody" in call,
    }
    return f'<div class="try" data-call="{escape(json.dumps(given))}"></div>'
