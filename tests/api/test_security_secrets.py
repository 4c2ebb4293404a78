"""A secret that handlers give away in every way they can is nowhere to be found afterwards.

Not in an answer, a stream or a log, and not in the bytes of any store. A secret that was cut is
looked for, too: no eight characters of it may be left.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from urllib.parse import quote

import asyncpg
import pytest
import redis

from dovetail.config import Settings
from dovetail.core.templates import Template
from dovetail.wiring.distributed import commanding

from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer
from .conftest import SECONDS, Api, Server, flow, node, on, wait_for

CANARY = 'cAnArY"7f3e/91bd+ü 2c8a&Zq5x'
TOKEN = "full-token-of-the-server-4711"
PASSWORD = "passw0rd-of-the-redis"

LEAKS = """
import asyncio, base64, html, json, logging, warnings
from urllib.parse import quote, quote_plus
from dovetail import PermanentError, RetryableError, handler

SPELLINGS = {
    "raw": str,
    "quoted": lambda s: quote(s, safe=""),
    "form": quote_plus,
    "twice": lambda s: quote(quote(s, safe=""), safe=""),
    "json": json.dumps,
    "plain json": lambda s: json.dumps(s, ensure_ascii=False),
    "html": html.escape,
    "hex": lambda s: s.encode().hex(),
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "basic": lambda s: base64.b64encode(b"me:" + s.encode()).decode(),
    "url base64": lambda s: base64.urlsafe_b64encode(b"x" + s.encode() + b"y").decode(),
    "lines": lambda s: base64.encodebytes(b"x" * 40 + s.encode() * 3).decode(),
    "host": lambda s: f"https://{s.lower()}.example/",
    "turned": lambda s: s[::-1],
    "upper": str.upper,
    "title": str.title,
    "swapped": lambda s: s.swapcase()[::-1],
    "spaced": " ".join,
    "dashed": lambda s: "x-" + "-".join(s[::-1]),
    "listed": lambda s: json.dumps(list(s), ensure_ascii=False),
    "shown": lambda s: repr(list(s)),
    "pairs": lambda s: s.encode().hex(":"),
}

@handler(secrets=True)
async def returns(config, ctx):
    found = {name: spell(ctx.secrets["CANARY"]) for name, spell in SPELLINGS.items()}
    listed = list(ctx.secrets["CANARY"])
    return {**found, "all": list(found.values()), "deep": {"er": [[found]]}, "one by one": listed}

@handler(secrets=True)
async def keyed(config, ctx):
    return {"deep": [{ctx.secrets["CANARY"]: 1}]}

@handler(secrets=True)
async def echoes(config, ctx):
    return config

@handler
async def pries(config, ctx):
    assert ctx.secrets == {}, "it did not ask for any"
    return ctx.secrets["CANARY"]

@handler(secrets=True)
async def tells(config, ctx):
    secret = ctx.secrets["CANARY"]
    ctx.progress(0.5, "x" * 990 + secret)
    for name, spell in SPELLINGS.items():
        ctx.progress(0.5, spell(secret))
        ctx.log.warning("%s: %s", name, spell(secret), extra={"given": {secret: [secret]}})
        logging.getLogger("mine").warning("mine\\nERROR forged: %s", spell(secret))
    try:
        raise ValueError(secret)
    except ValueError:
        ctx.log.exception("failed with %s", secret)
        logging.getLogger("mine").exception("failed")
    warnings.warn("careful: " + secret)
    async def forgotten():
        raise RuntimeError(f"nobody asked for {secret}")
    asyncio.get_running_loop().create_task(forgotten())
    await asyncio.sleep(0.01)
    return "reported"

@handler(secrets=True)
async def raises(config, ctx):
    secret = ctx.secrets["CANARY"]
    kind = config["kind"]
    if kind == "type":
        raise PermanentError("no", type=secret)
    if kind == "retry":
        raise RetryableError(f"busy: {secret}", after=0.01)
    if kind == "long":
        raise PermanentError("x" * 9990 + secret)
    if kind == "cause":
        try:
            raise KeyError(secret)
        except KeyError as error:
            raise PermanentError(f"because of {error}") from error
    if kind == "name":
        raise type(secret, (Exception,), {})("no")
    if kind == "output":
        return {"a": [secret, object()]}
    if kind == "key":
        return {secret: {1: 2}}
    return {}[secret]
"""

KINDS = ("type", "retry", "long", "cause", "name", "output", "key", "other")
AUTHORIZATION = {"Authorization": "Bearer {{ secrets.CANARY }}", "X": "{{ secrets.CANARY }}"}
NODES = [
    node("returned", "returns", config={}),
    node("again", "output", "returned", config={"all": "{{ returned }}"}),
    node("reported", "tells", config={}),
    node("keyed", "keyed", config={}),
    node("pried", "pries", config={}),
    node("rendered", "echoes", config={"k": "{{ secrets.CANARY }}", "t": "<{{ secrets.CANARY }}>"}),
    node("kept", "echoes", config={"k": "{{ secrets.CANARY }}"}, cache={"ttl_seconds": 60}),
    node("echoed", "call_external_service",
         config={"url": "mock://x", "headers": AUTHORIZATION,
                 "json": {"{{ not a template }}": "{{ secrets.CANARY }}"}}),
    node("called", "call_external_service", max_retries=0,
         config={"url": "http://127.0.0.1:1/", "headers": AUTHORIZATION,
                 "body": "{{ secrets.CANARY }}", "params": {"k": "{{ secrets.CANARY }}"}}),
    node("tokens", "echoes", config={"k": "{{ secrets.TOKEN }}"}),
    *(node(f"raised_{kind}", "raises", config={"kind": kind}, max_retries=1,
           retry={"base_delay_seconds": 0.01}) for kind in KINDS),
]  # fmt: skip
REFUSED = [
    node("shown", config={"k": "{{ secrets.CANARY }}"}),
    node("turned", config={"k": "{{ secrets.CANARY | reverse }}"}),
    node("listed", "echoes", config={"k": "{{ secrets.CANARY | list }}"}),
    node("joined", "echoes", config={"k": "{{ secrets.CANARY | join('-') }}"}),
    node("upper", "call_external_service",
         config={"url": "mock://x", "headers": {"X": "{{ secrets.CANARY|lower }}"}}),
    node("called", "call_external_service",
         config={"url": "http://u:{{ secrets.CANARY }}@127.0.0.1:1/{{ secrets.CANARY }}"}),
    node("spelled", "call_external_service", config={"url": "{{ secrets.CANARY }}"}),
    node("posted", "call_external_service",
         config={"url": "http://x.example", "method": "{{ secrets.CANARY }}"}),
    node("counted", "sleep", config={"seconds": "{{ secrets.CANARY }}"}),
    node("computed", "echoes", config={"k": "{{ secrets.CANARY + 1 }}"}),
    node("chosen", "echoes", config={"k": "{{ 1 if secrets.CANARY else 2 }}"}),
    node("asked", "llm_service", config={"prompt": "say {{ secrets.CANARY }}"}),
]  # fmt: skip
"""What a definition from before the rule may have."""


class Place(NamedTuple):
    server: Server
    kept: Callable[[], bytes]
    """Everything that its stores hold."""
    redis_url: str | None = None
    database: str | None = None


@contextmanager
def embedded(folder: Path, **env: str) -> Iterator[Place]:
    server = Server(folder, "--handlers", "leaks.py", **env)
    yield Place(server, lambda: b"".join(p.read_bytes() for p in (folder / ".dovetail").iterdir()))


@contextmanager
def distributed(folder: Path, **env: str) -> Iterator[Place]:
    with RedisServer() as store, PostgresServer() as archive:
        store.ask("CONFIG", "SET", "requirepass", PASSWORD)
        url = store.url.replace("://", f"://:{PASSWORD}@")
        database = archive.new_database()
        env |= on(url, DOVETAIL_DATABASE_URL=database)
        beside = ("--with", "orchestrator,worker", "--handlers", "leaks.py")
        server = Server(folder, *beside, **env)
        yield Place(
            server,
            lambda: kept_in_redis(url) + asyncio.run(kept_in_postgres(database)),
            url,
            database,
        )
        with redis.Redis.from_url(url) as client:
            client.config_set("requirepass", "")


def kept_in_redis(url: str) -> bytes:
    with redis.Redis.from_url(url) as client:
        found = []
        for key in client.scan_iter(count=1000):
            read: dict[bytes, Callable[[Any], Any]] = {
                b"string": client.get,
                b"hash": client.hgetall,
                b"list": lambda key: client.lrange(key, 0, -1),
                b"set": client.smembers,
                b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
                b"stream": client.xrange,
                b"none": lambda key: None,  # it was there a moment ago: the services go on
            }
            found.append(repr((key, read[client.type(key)](key))))  # type: ignore[index]
        return "\n".join(found).encode()


async def kept_in_postgres(url: str) -> bytes:
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        )
        rows = [await connection.fetch(f"SELECT * FROM {table['name']}") for table in tables]
        return repr([tuple(row.values()) for table in rows for row in table]).encode()
    finally:
        await connection.close()


def traces(of: str) -> set[bytes]:
    """Pieces of eight or more that would be left of it, in whatever spelling."""
    pieces = {of[at : at + 8] for at in range(len(of) - 7)}
    pieces |= {piece[::-1] for piece in pieces}
    pieces |= {between.join(piece) for piece in pieces for between in " -"}
    found = {piece.encode() for piece in pieces} | {
        quote(piece, safe="").encode() for piece in pieces
    }
    cased = [piece for piece in pieces if any(map(str.isdigit, piece))]
    found |= {case(piece).encode() for piece in cased for case in (str.lower, str.upper, str.title)}
    octets = of.encode()
    for shift in range(3):
        spelled = base64.b64encode(b"\0" * shift + octets)[4:-4]
        found |= {spelled[at : at + 12] for at in range(len(spelled) - 11)}
    spelled = octets.hex().encode()
    return found | {spelled[at : at + 16] for at in range(0, len(spelled) - 15, 2)}


def left_in(data: bytes, of: str) -> list[bytes]:
    return sorted(piece for piece in traces(of) if piece in data)


SETUPS = {"embedded": embedded, "distributed": distributed}


@pytest.mark.parametrize(("setup", "form"), [("embedded", "console"), ("distributed", "json")])
def test_a_secret_appears_nowhere_whatever_handlers_do_with_it(
    setup: str, form: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    env = {
        "DOVETAIL_SECRET_CANARY": CANARY,
        "DOVETAIL_SECRET_TOKEN": TOKEN,
        "DOVETAIL_TOKENS": TOKEN,
        "DOVETAIL_LOG_FORMAT": form,
    }
    with SETUPS[setup](tmp_path, **env) as (server, kept, redis_url, database):
        try:
            api = server.client(authorization=f"Bearer {TOKEN}")
            shown = everything_shown(api, flow(name, *NODES, on_failure="continue"), setup)
            shown += refused_when_it_is_checked(api, flow(name, *REFUSED))
            if redis_url is not None:
                old = flow(f"{name}-old", *REFUSED, on_failure="continue")
                shown += refused_by_the_worker(api, old, redis_url, database)
                poison(redis_url, api)
                shown += api("GET", "/dead-letters").content
                wait_for(lambda: b"raised_long" in kept(), "the archive has it")
            stored = kept()
            server.process.terminate()
            assert server.process.wait(SECONDS) == 0
        finally:
            server.close()
    logged = server.log.read_bytes()
    for where, data in (("shown", shown), ("stored", stored), ("logged", logged)):
        assert b"***" in data, where
        for secret in (CANARY, TOKEN, PASSWORD):
            assert left_in(data, secret) == [], (where, secret)
    check_lines(logged.decode(), form)


def everything_shown(api: Api, definition: dict[str, Any], setup: str) -> bytes:
    name = api.register(definition)
    first = api.post(f"/workflows/{name}/runs")["run_id"]
    run = api.finished(first)
    states = {one["id"]: one["status"] for one in run["nodes"]}
    assert states["returned"] == states["reported"] == states["rendered"] == "COMPLETED"
    assert states["called"] == states["raised_long"] == states["keyed"] == "FAILED"
    errors = {one["id"]: one["error"] for one in run["nodes"] if one["error"]}
    assert errors["keyed"]["type"] == "secret_in_key"
    assert "@handler('pries', secrets=True)" in errors["pried"]["message"]
    second = api.post(f"/workflows/{name}/runs")["run_id"]
    api.finished(second)
    found = [api("GET", "/runs").content, api("GET", "//openapi.json").content]
    for run_id in (first, second):
        paths = ("", "/results", "/explain", "/results?partial=true", "/verify", "/events")
        found += [api("GET", f"/runs/{run_id}{path}").content for path in paths]
        accept = {"accept": "text/event-stream"}
        found.append(api("GET", f"/runs/{run_id}/events", headers=accept).content)
    kinds = {
        json.loads(line[6:])["type"]
        for line in b"\n".join(found).split(b"\n")  # of both: progress may be overtaken by the end
        if line[:6] == b"data: "
    }
    # Over Redis only a worker has secrets, so it alone knows the key of a node that has one: such
    # a node is started, and completes with what is kept.
    cached = set() if setup == "distributed" else {"node.cached"}
    assert {"node.progress", "node.failed", "node.retrying", *cached} <= kinds
    return b"\n".join(found)


def refused_when_it_is_checked(api: Api, definition: dict[str, Any]) -> bytes:
    """Every one of them, whichever way it comes."""
    found = b""
    for path, body in (("/workflows", definition), ("/runs", {"definition": definition})):
        answer = api("POST", path, json=body)
        assert answer.status_code == 422, answer.text
        problems = [(one["code"], one["path"]) for one in answer.json()["errors"]]
        assert {code for code, _ in problems} == {"template_forbidden"}
        places = {int(path.partition("[")[2].partition("]")[0]) for _, path in problems}
        assert places == set(range(len(REFUSED)))
        found += answer.content
    return found


def refused_by_the_worker(
    api: Api, definition: dict[str, Any], redis_url: str, database: str | None
) -> bytes:
    """As a server from before the rule would have stored it: each node fails, nothing is sent."""
    settings = Settings(redis_url=redis_url, database_url=database)

    async def trigger() -> str:
        async with commanding(settings) as commands:
            lenient = replace(commands, known_handlers=None)
            return (await lenient.trigger(definition)).run_id

    with patch.object(Template, "refusal", None):
        run_id = asyncio.run(trigger())
    run = api.finished(run_id)
    assert {one["id"]: one["error"]["type"] for one in run["nodes"]} == {
        one["id"]: "template_forbidden" for one in REFUSED
    }
    return api("GET", f"/runs/{run_id}").content


def poison(url: str, api: Api) -> None:
    """A message of another program that has the secret in it."""
    with redis.Redis.from_url(url) as client:
        client.xadd("tasks:returns", {"run_id": "x", "config": "y" * 1990 + CANARY, CANARY: "z"})
        client.xadd("wf:stream:results", {"output": CANARY, "token": CANARY})
    wait_for(lambda: len(api.get("/dead-letters")["items"]) >= 2, "both were refused")


def check_lines(text: str, form: str) -> None:
    """A record is a line; what is below it is marked; and none is forged."""
    for line in text.splitlines():
        assert line.isprintable(), line
        assert not line.startswith("ERROR forged"), line
        if form == "json":
            record = json.loads(line)
            assert record["message"]
            assert record["level"] in ("info", "warning", "error")
    assert "mine" + chr(92) * (2 if form == "json" else 1) + "nERROR forged" in text
    assert "nobody asked for ***" in text
