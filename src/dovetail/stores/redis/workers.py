"""The registry of workers and services, and the dead letters, in Redis.

A worker is alive while its own key exists; the key expires if the worker falls silent. Its facts
are kept for a day: a dead worker must be visible, and handlers must be known while all workers are
away.

All services on a Redis must have the same transport: a worker that reads streams never sees a node
that was sent to Celery's broker. Each service registers its transport, and a service with another
one is refused while they live.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any, NamedTuple

import orjson

from dovetail.config import env_name
from dovetail.core.errors import StoreError
from dovetail.core.redaction import SecretFields
from dovetail.core.webhooks import Notification
from dovetail.engine.supervisor import supervise
from dovetail.engine.views import dead_letter_view, timestamp
from dovetail.engine.webhooks import requeued
from dovetail.redis_client.pipelined import Argument, PipelinedRedis, RedisError
from dovetail.stores.redis.codec import source
from dovetail.stores.redis.feed import NOTIFICATIONS, OUTBOX

WORKERS = "wf:workers"
SCHEMAS = "wf:schemas"
"""Digest → the schema of a config. Workers name digests in their heartbeats: schemas are larger."""
DEAD = "wf:dead"
TASKS = "tasks:"
REMEMBERED_SECONDS = 86400.0
MAX_DEAD_LETTERS = 1000
VERSION_SECONDS = 2.0
MAX_READ_MESSAGES = 100
"""Messages of a stream of which it is asked how many tasks each holds."""


class WorkerFacts(NamedTuple):
    """What a worker says of itself with every heartbeat."""

    worker_id: str
    host: str
    pid: int
    started_at: float
    handlers: Sequence[str]
    running: int
    concurrency: int
    retries: Mapping[str, int] = {}
    """Of those handlers that have some of their own."""
    secrets: Mapping[str, bool | Sequence[str]] = {}
    """Of those handlers that take secrets: true, or the fields of the config that may have some."""
    quick: Sequence[str] = ()
    """Handlers that took but a moment for many tasks."""
    versions: Mapping[str, int] = {}
    """Of those handlers that are not in their first version."""
    schemas: Mapping[str, str] = {}
    """Of those handlers whose config has a schema: its digest, as `schema_texts` makes it."""


def schema_texts(
    schemas: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, str], dict[str, bytes]]:
    """The digest of each handler's schema, for the facts of a worker, and the text of each."""
    texts = {name: orjson.dumps(schema) for name, schema in schemas.items()}
    digests = {name: sha256(text).hexdigest()[:32] for name, text in texts.items()}
    return digests, {digests[name]: text for name, text in texts.items()}


class Announced(NamedTuple):
    """What is known of a handler that a worker has."""

    retries: int
    secrets: SecretFields | None
    """Where its config may have secrets; None: the worker did not say, as old ones do not."""
    schema: str | None = None
    """The digest of the schema of its config, if it has one."""


class WorkerRegistry:
    def __init__(
        self,
        redis: PipelinedRedis,
        *,
        heartbeat_timeout: float = 15.0,
        schemas: Mapping[str, bytes] | None = None,
    ) -> None:
        """`schemas`: what the worker of this process announces, by digest."""
        self._redis = redis
        self._heartbeat_timeout = heartbeat_timeout
        self._to_announce = dict(schemas or {})
        self._has_announced = False

    # ── workers ──────────────────────────────────────────────────────────────────────────

    async def beat(self, worker: WorkerFacts) -> None:
        """It is alive, for as long as a heartbeat may take."""
        fields: list[Argument] = [
            *("worker_id", worker.worker_id, "host", worker.host, "pid", worker.pid),
            *("started_at", repr(worker.started_at), "handlers", orjson.dumps(worker.handlers)),
            *("running", worker.running, "concurrency", worker.concurrency),
        ]
        life = max(1, int(self._heartbeat_timeout * 1000))
        now = await self._redis.call_script(
            source("workers_beat"), [_worker(worker.worker_id)], [life, *fields]
        )
        facts = {**worker._asdict(), "last_heartbeat": float(now)}
        is_new = await self._remember(worker.worker_id, facts)
        if self._to_announce and (is_new or not self._has_announced):
            # Once for each start, and again if Redis has lost what it knew of this worker.
            fields = [part for field in self._to_announce.items() for part in field]
            await self._redis.call("HSET", SCHEMAS, *fields)
            self._has_announced = True

    async def leave(self, worker_id: str) -> None:
        """It has ended in order, so it is not listed any more. Its handlers are still known."""
        await self._redis.call("DEL", _worker(worker_id))
        kept = await self._redis.call("HGET", WORKERS, worker_id)
        if kept is not None:
            await self._remember(worker_id, {**orjson.loads(kept), "running": 0, "left": True})

    async def _remember(self, worker_id: str, known: dict[str, Any]) -> bool:
        """Whether nothing was known of it."""
        return bool(await self._redis.call("HSET", WORKERS, worker_id, orjson.dumps(known)))

    async def workers(self, *, with_schemas: bool = False) -> list[dict[str, Any]]:
        """In the fields of `GET /workers`; workers that died within a day included.

        Only `with_schemas` the schemas are read, which takes one more command.
        """
        schemas = await self._all_schemas() if with_schemas else None
        known = [one for one in await self._remembered() if "left" not in one]
        alive = await self._alive(known)
        return [
            {
                "worker_id": one["worker_id"],
                "host": one["host"],
                "pid": one["pid"],
                "started_at": timestamp(one["started_at"]),
                "last_heartbeat": timestamp(one["last_heartbeat"]),
                "handlers": sorted(one["handlers"]),
                "handler_details": [
                    _announcement(one, name, schemas) for name in sorted(one["handlers"])
                ],
                "running": one["running"] if is_alive else 0,
                "concurrency": one["concurrency"],
                "alive": bool(is_alive),
            }
            for one, is_alive in zip(known, alive, strict=True)
        ]

    async def _alive(self, known: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        return await asyncio.gather(
            *(self._redis.call("EXISTS", _worker(one["worker_id"])) for one in known)
        )

    async def handlers(self) -> frozenset[str]:
        """Every handler that a worker announced within the last day."""
        return frozenset(await self.announced())

    async def served(self) -> frozenset[str]:
        """Every handler of a worker that is alive."""
        alive = [one for one in await self.workers() if one["alive"]]
        return frozenset(name for one in alive for name in one["handlers"])

    async def quick(self) -> frozenset[str]:
        """Handlers for which a worker that is alive took but a moment lately."""
        known = [one for one in await self._remembered() if "left" not in one and one.get("quick")]
        replies = zip(known, await self._alive(known), strict=True)
        return frozenset(name for one, is_alive in replies if is_alive for name in one["quick"])

    async def announced(self) -> dict[str, Announced]:
        """The same with what is known of each, as the worker that was started last has them."""
        return {
            name: Announced(
                int(one.get("retries", {}).get(name, 0)),
                _secret_fields(one, name),
                one.get("schemas", {}).get(name),
            )
            for one in await self._remembered()
            for name in one["handlers"]
        }

    async def versions(self) -> dict[str, int]:
        """Of every handler, as the worker that was started last has it."""
        return {
            name: int(one.get("versions", {}).get(name, 1))
            for one in await self._remembered()
            for name in one["handlers"]
        }

    async def catalogue(self) -> list[dict[str, Any]]:
        """Every handler that was announced within the last day, as the worker that was started
        last has it, with the workers that are alive and have it."""
        serving: dict[str, list[str]] = {}
        schemas = await self._all_schemas()
        for worker in await self.workers():
            for name in worker["handlers"] if worker["alive"] else ():
                serving.setdefault(name, []).append(worker["worker_id"])
        known = {
            name: _announcement(one, name, schemas)
            for one in await self._remembered()
            for name in one["handlers"]
        }
        return [{**known[name], "workers": serving.get(name, [])} for name in sorted(known)]

    async def schemas(self, digests: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The schemas with these digests, as far as they are there."""
        if not digests:
            return {}
        texts = await self._redis.call("HMGET", SCHEMAS, *digests)
        found = zip(digests, texts, strict=True)
        return {digest: orjson.loads(text) for digest, text in found if text is not None}

    async def _all_schemas(self) -> dict[str, Any]:
        flat = await self._redis.call("HGETALL", SCHEMAS)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return {digest.decode(): orjson.loads(text) for digest, text in pairs}

    async def waiting(self, handlers: Sequence[str]) -> dict[str, int]:
        """How many tasks of each lie in its stream; where many messages do, about how many."""
        depth = source("workers_depth")
        asked = [
            self._redis.script_command(depth, [TASKS + name], [MAX_READ_MESSAGES])
            for name in handlers
        ]
        return dict(zip(handlers, await self._redis.call_many(asked), strict=True))

    async def _remembered(self) -> list[dict[str, Any]]:
        seconds, _ = await self._redis.call("TIME")
        since = int(seconds) - REMEMBERED_SECONDS
        facts = [orjson.loads(text) for text in await self._redis.call("HVALS", WORKERS)]
        old = [one for one in facts if one["last_heartbeat"] < since]
        recent = [one for one in facts if one["last_heartbeat"] >= since]
        if old:
            await self._redis.call("HDEL", WORKERS, *(one["worker_id"] for one in old))
            if unused := _digests(old) - _digests(recent):
                await self._redis.call("HDEL", SCHEMAS, *unused)
        return sorted(recent, key=lambda one: (one["started_at"], one["worker_id"]))

    # ── dead letters ─────────────────────────────────────────────────────────────────────

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Messages that were refused as malformed or poison, the newest first."""
        return [
            dead_letter_view(_letter_id(text), orjson.loads(text)) for text in await self._letters()
        ]

    async def drop_dead_letter(self, letter_id: str) -> bool:
        """Whether it was there. Of two letters with the same text one goes."""
        text = await self._letter(letter_id)
        return text is not None and bool(await self._redis.call("LREM", DEAD, 1, text))

    async def requeue_notification(self, letter_id: str, now: float) -> Notification | None:
        text = await self._letter(letter_id)
        if text is None or (found := requeued(orjson.loads(text))) is None:
            return None
        again = orjson.dumps(found._asdict())
        # The letter goes last: if this process dies in between, it can be requeued once more.
        await self._redis.call_many(
            [
                ("HSET", NOTIFICATIONS, found.id, again),
                ("ZADD", OUTBOX, repr(now), found.id),
                ("LREM", DEAD, 1, text),
            ]
        )
        return found

    async def _letter(self, letter_id: str) -> bytes | None:
        return next((t for t in await self._letters() if _letter_id(t) == letter_id), None)

    async def _letters(self) -> list[bytes]:
        texts: list[bytes] = await self._redis.call("LRANGE", DEAD, 0, MAX_DEAD_LETTERS - 1)
        return texts


def _letter_id(text: bytes) -> str:
    """By its text: letters are pushed and trimmed, so a place in the list is no name."""
    return sha256(text).hexdigest()[:32]


def _digests(workers: Iterable[Mapping[str, Any]]) -> set[str]:
    return {digest for one in workers for digest in one.get("schemas", {}).values()}


def _announcement(
    worker: Mapping[str, Any], name: str, schemas: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A handler as this worker has it, in the fields of `GET /workers`."""
    fields = _secret_fields(worker, name)
    found: dict[str, Any] = {
        "name": name,
        "max_retries": int(worker.get("retries", {}).get(name, 0)),
        "secrets": sorted(fields) if isinstance(fields, frozenset) else fields,
        "version": int(worker.get("versions", {}).get(name, 1)),
    }
    if schemas is not None:
        found["config_schema"] = schemas.get(worker.get("schemas", {}).get(name))
    return found


def _secret_fields(worker: Mapping[str, Any], name: str) -> SecretFields | None:
    secrets = worker.get("secrets")
    if not isinstance(secrets, dict):
        return None
    fields = secrets.get(name, False)
    return fields if isinstance(fields, bool) else frozenset(map(str, fields))


def _unknown(name: str) -> None:
    return None


class Handlers:
    """Handlers of this process, and handlers that workers announced within a day."""

    def __init__(
        self,
        own: Mapping[str, int],
        fleet: WorkerRegistry,
        own_secrets: Callable[[str], SecretFields | None] = _unknown,
        own_schemas: Callable[[str], Mapping[str, Any] | None] = _unknown,
    ) -> None:
        """`own` are those known here, with their retries; `own_secrets` says where each of them
        takes secrets, `own_schemas` what its config may be."""
        self._own = dict(own)
        self._own_secrets = own_secrets
        self._own_schemas = own_schemas
        self._schemas: dict[str, dict[str, Any]] = {}
        """By digest, of the handlers that only workers have."""
        self._fleet = fleet
        self._heard: dict[str, tuple[float, Announced]] = {}
        """When of each, and what: a Redis that was emptied knows of none for a moment."""
        self.retries = dict(self._own)

    async def learn(self) -> None:
        now = time.monotonic()
        announced = {name: (now, said) for name, said in (await self._fleet.announced()).items()}
        kept = {name: at for name, at in self._heard.items() if now - at[0] < REMEMBERED_SECONDS}
        self._heard = kept | announced
        await self._learn_schemas()
        self.retries.clear()
        heard = {name: said.retries for name, (_, said) in self._heard.items()}
        self.retries.update(heard | self._own)

    async def _learn_schemas(self) -> None:
        """Read the schemas that are not known yet: a schema never changes under its digest."""
        named = (said.schema for name, (_, said) in self._heard.items() if name not in self._own)
        used = {digest for digest in named if digest is not None}
        known = {digest: one for digest, one in self._schemas.items() if digest in used}
        self._schemas = known | await self._fleet.schemas(sorted(used - known.keys()))

    def config_schema(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a handler's config; None if no worker has announced one."""
        if name in self._own:
            return self._own_schemas(name)
        heard = self._heard.get(name)
        digest = None if heard is None else heard[1].schema
        return None if digest is None else self._schemas.get(digest)

    def secret_fields(self, name: str) -> SecretFields | None:
        """Where the config of a handler may have secrets; None: no worker has said so."""
        if name in self._own:
            return self._own_secrets(name)
        heard = self._heard.get(name)
        return None if heard is None else heard[1].secrets

    def __contains__(self, name: object) -> bool:
        return name in self.retries

    def __iter__(self) -> Iterator[str]:
        return iter(self.retries)


class AnnouncedVersions:
    """The versions of handlers that workers announce, asked for now and then."""

    def __init__(self, fleet: WorkerRegistry) -> None:
        self._fleet = fleet
        self._known: dict[str, int] = {}
        self._ask_at = -math.inf

    async def of(self, handler: str) -> int:
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + VERSION_SECONDS
            # Over what was known: a Redis that was emptied knows of none for a moment.
            self._known |= await self._fleet.versions()
        return self._known.get(handler, 1)


def _worker(worker_id: str) -> str:
    return f"wf:worker:{worker_id}"


SERVICES = "wf:services"
SEPARATOR = "|"
FAREWELL_SECONDS = 1.0

log = logging.getLogger("dovetail.redis")


class AnnouncedService(NamedTuple):
    transport: str
    kind: str
    """`api`, `orchestrator` or `worker`."""
    service_id: str


class OtherTransport(RedisError):
    """Services with another transport are alive on this Redis."""


class ServiceRegistry:
    def __init__(self, redis: PipelinedRedis, *, heartbeat_timeout: float = 15.0) -> None:
        self._redis = redis
        self._timeout = heartbeat_timeout

    async def alive(self) -> list[AnnouncedService]:
        """Writes nothing: a replica, or a Redis that is full, can be asked, too."""
        seconds, micros = await self._redis.call("TIME")
        now = int(seconds) + int(micros) / 1e6
        return _read(await self._redis.call("ZRANGEBYSCORE", SERVICES, f"({now:.3f}", "+inf"))

    async def join(self, me: AnnouncedService) -> None:
        """Raises `OtherTransport` if live services have another one."""
        refused = conflict(me.transport, await self._asked(SEPARATOR.join(me), beside=False))
        if refused is not None:
            raise OtherTransport(refused)

    async def beat(self, me: AnnouncedService) -> str | None:
        """It is alive; says what is wrong if others came with another transport."""
        return conflict(me.transport, await self._asked(SEPARATOR.join(me), beside=True))

    async def leave(self, me: AnnouncedService) -> None:
        await self._redis.call("ZREM", SERVICES, SEPARATOR.join(me))

    async def _asked(self, member: str, *, beside: bool) -> list[AnnouncedService]:
        given: list[Argument] = [member, repr(self._timeout), int(beside)]
        members = await self._redis.call_script(source("services_join"), [SERVICES], given)
        return _read(members)


def _read(members: Iterable[bytes]) -> list[AnnouncedService]:
    parts = [text.decode().split(SEPARATOR, 2) for text in members]
    return [AnnouncedService(*part) for part in parts if len(part) == len(AnnouncedService._fields)]


@asynccontextmanager
async def announced(
    redis: PipelinedRedis, me: AnnouncedService, *, heartbeat_timeout: float, pause: float
) -> AsyncIterator[None]:
    """A service that others can see while it works. Raises `OtherTransport`."""
    services = ServiceRegistry(redis, heartbeat_timeout=heartbeat_timeout)
    await services.join(me)

    async def beat() -> None:
        logged: str | None = None
        while True:
            await asyncio.sleep(pause)
            wrong = await services.beat(me)
            if wrong is not None and wrong != logged:
                log.warning("%s", wrong)
            logged = wrong

    beating = asyncio.create_task(supervise("announcing", beat))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with suppress(StoreError, TimeoutError):  # silence says the same, a little later
            async with asyncio.timeout(FAREWELL_SECONDS):
                await services.leave(me)


def conflict(transport: str, alive: Iterable[AnnouncedService]) -> str | None:
    """Why one with this transport cannot work beside these services, as a sentence."""
    others = [one for one in alive if one.transport != transport]
    if not others:
        return None
    theirs, name = others[0].transport, env_name("transport")
    return (
        f"services on this Redis have the transport {theirs} ({_named(others)}), and this one has "
        f"{transport}: their tasks would never meet. Set {name}={theirs}, or stop them first"
    )


def mixture(alive: Sequence[AnnouncedService]) -> str | None:
    """That live services have different transports, as a sentence."""
    transports = sorted({one.transport for one in alive})
    if len(transports) < 2:
        return None
    parts = [
        f"{transport} ({_named([one for one in alive if one.transport == transport])})"
        for transport in transports
    ]
    return f"services with different transports are alive on this Redis: {' and '.join(parts)}"


def _named(services: Iterable[AnnouncedService]) -> str:
    """`1 orchestrator, 2 workers`."""
    kinds = Counter(one.kind for one in services)
    return ", ".join(
        f"{count} {kind if kind == 'api' or count == 1 else kind + 's'}"
        for kind, count in sorted(kinds.items())
    )
