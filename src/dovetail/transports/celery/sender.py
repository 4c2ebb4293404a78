"""The orchestrators' end of Celery: tasks become its messages, on Redis or any other broker.

Celery makes one message, and all others are filled in like it: its own way of sending one costs as
much as everything else that happens to a node. While the broker is away, messages are kept.
Messages that are lost with it, or with a queue that was emptied, show in the counts of messages
sent and taken, and are published again from the runs.

`examine` is the doctor's check of the broker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import orjson
from celery import Celery, group  # type: ignore[import-untyped]
from kombu.messaging import Producer

from dovetail.config import Settings, env_name
from dovetail.core.errors import StoreError
from dovetail.core.text import counted
from dovetail.engine.clock import Clock
from dovetail.engine.ports import DoctorFinding, Task
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.transports.celery.application import (
    GRACE_SECONDS,
    QUEUE,
    TASK,
    broker_url,
    is_redis,
    make_app,
)
from dovetail.transports.celery.counts import correct, counts, mark, none_waits, sent, sent_after
from dovetail.transports.celery.counts import waiting as by_handler
from dovetail.transports.messages import task_fields
from dovetail.transports.streams.sender import StreamSender

MAX_UNSENT = 100_000
RESEND_SECONDS = 0.5
BROKER_SECONDS = 5.0
"""So long an orchestrator waits for the broker before it goes on without."""
SEEN_SECONDS = 0.5
LOOKS = 3
"""So often in a row something is missing before it counts as lost."""
MAX_AGAIN, MAX_AGAIN_EACH = 100, 10
DOUBTFUL_SECONDS = 60.0
"""So rarely a few count as lost that might be in the hands of workers."""
LONG_AGO = 0.0
JSON = "application/json"

log = logging.getLogger("dovetail.celery")


class BrokerError(StoreError):
    """Celery's broker cannot be reached, or refuses."""


# ── messages ─────────────────────────────────────────────────────────────────────────────


class Envelope(NamedTuple):
    """A message of Celery's protocol 2."""

    id: str
    headers: dict[str, Any]
    body: bytes


class _Collector(Producer):
    """Keeps what Celery would have sent."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app.connection_for_write(), auto_declare=False)  # type: ignore[no-untyped-call]
        self.kept: list[Envelope] = []

    def publish(  # type: ignore[override]
        self, body: Any, headers: Any = None, **_: Any
    ) -> None:
        self.kept.append(Envelope(headers["id"], headers, orjson.dumps(body)))


class Envelopes:
    """Makes messages of tasks."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        like = self._sent_by(lambda how: app.send_task(TASK, **how))[0]
        self._headers = like.headers
        self._rest = orjson.loads(like.body)[2]

    def made(self, tasks: Sequence[Task]) -> list[Envelope]:
        # The beginnings of many runs are a batch, and go out as Celery's own group.
        if len({task.run_id for task in tasks}) > 1 and not any(task.source for task in tasks):
            return self._group(tasks)
        return [self._made(task) for task in tasks]

    def _made(self, task: Task) -> Envelope:
        name = message_id(task)
        headers = {
            **self._headers,
            "id": name,
            "root_id": name,
            "timelimit": [task.timeout_seconds + GRACE_SECONDS, task.timeout_seconds],
            "kwargsrepr": shown(task),
        }
        return Envelope(name, headers, orjson.dumps(((), fields_of(task), self._rest)))

    def _group(self, tasks: Sequence[Task]) -> list[Envelope]:
        together = group([self._signature(task) for task in tasks], app=self._app)
        return self._sent_by(lambda how: together.apply_async(add_to_parent=False, **how))

    def _signature(self, task: Task) -> Any:
        return self._app.signature(
            TASK,
            kwargs=fields_of(task),
            task_id=message_id(task),
            time_limit=task.timeout_seconds + GRACE_SECONDS,
            soft_time_limit=task.timeout_seconds,
            kwargsrepr=shown(task),
            ignore_result=True,
            immutable=True,
        )

    def _sent_by(self, send: Callable[[dict[str, Any]], object]) -> list[Envelope]:
        collector = _Collector(self._app)
        send({"producer": collector, "queue": QUEUE, "ignore_result": True})
        return collector.kept


def fields_of(task: Task) -> dict[str, str]:
    """The fields of a task for the worker that runs it; see `messages`."""
    flat = [part if isinstance(part, str) else part.decode() for part in task_fields(task)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def message_id(task: Task) -> str:
    """Another one each time: what was revoked under this name shall not stay so for ever."""
    epoch, attempt, _ = task.token
    return f"{task.run_id}:{task.node_id}:{epoch}.{attempt}:{os.urandom(4).hex()}"


def shown(task: Task) -> str:
    """For tools that monitor Celery."""
    return (
        f"{{'run_id': '{task.run_id}', 'node_id': '{task.node_id}', 'handler': '{task.handler}'}}"
    )


# ── brokers ──────────────────────────────────────────────────────────────────────────────


class Broker(Protocol):
    """Whatever carries Celery's messages. Every call raises `StoreError` while it is away."""

    pipe: PipelinedRedis | None
    """An open connection to use, where the broker is a Redis that has one."""

    async def put(self, messages: Sequence[Envelope]) -> None: ...
    async def waiting(self) -> int:
        """How many messages wait."""
        ...

    async def close(self) -> None: ...


class RedisBroker:
    """A list in Redis, as kombu keeps it: many messages in one roundtrip."""

    def __init__(self, url: str, shared: PipelinedRedis | None = None) -> None:
        self._url = url
        self.pipe = shared
        self._own: PipelinedRedis | None = None
        self._opening = asyncio.Lock()

    async def put(self, messages: Sequence[Envelope]) -> None:
        texts = [redis_message(message) for message in messages]
        await (await self._opened()).call("LPUSH", QUEUE, *texts)

    async def waiting(self) -> int:
        return int(await (await self._opened()).call("LLEN", QUEUE))

    async def _opened(self) -> PipelinedRedis:
        if self.pipe is None:
            async with self._opening:
                if self.pipe is None:
                    made = PipelinedRedis(self._url, patience=BROKER_SECONDS)
                    self.pipe = self._own = await made.__aenter__()
        return self.pipe

    async def close(self) -> None:
        if self._own is not None:
            await self._own.__aexit__()


def redis_message(message: Envelope) -> bytes:
    """As kombu's transport for Redis writes one, but for a body that is text already."""
    return orjson.dumps(
        {
            "body": message.body.decode(),
            "content-encoding": "utf-8",
            "content-type": JSON,
            "headers": message.headers,
            "properties": {
                "correlation_id": message.id,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": QUEUE},
                "priority": 0,
                "body_encoding": "utf-8",
                "delivery_tag": message.id,
            },
        }
    )


class KombuBroker:
    """RabbitMQ, and whatever else kombu knows; it blocks, so it has a thread of its own."""

    pipe: PipelinedRedis | None = None

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._thread = ThreadPoolExecutor(1, "dovetail-broker")
        self._producer: Producer | None = None
        self._connection: Any = None

    async def put(self, messages: Sequence[Envelope]) -> None:
        await self._in_thread(lambda: self._put(messages))

    async def waiting(self) -> int:
        return await self._in_thread(self._count)

    async def close(self) -> None:
        with suppress(BrokerError):
            await self._in_thread(self._drop)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], int | None]) -> int:
        done = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._or_broker_error, work
        )
        return done or 0

    def _or_broker_error(self, work: Callable[[], int | None]) -> int | None:
        try:
            return work()
        except Exception as error:  # whichever of many libraries it comes from
            self._drop()
            raise BrokerError(f"Celery's broker: {error or type(error).__name__}") from None

    def _put(self, messages: Sequence[Envelope]) -> None:
        producer = self._opened()
        for message in messages:
            producer.publish(  # type: ignore[no-untyped-call]
                message.body,
                routing_key=QUEUE,
                headers=message.headers,
                correlation_id=message.id,
                content_type=JSON,
                content_encoding="utf-8",
                delivery_mode=2,
            )
        self._count()  # in order: once this is answered, it has them all

    def _count(self) -> int:
        channel = self._opened().channel
        return int(channel.queue_declare(queue=QUEUE, passive=True).message_count)

    def _opened(self) -> Producer:
        if self._producer is None:
            self._connection = self._app.connection_for_write(connect_timeout=BROKER_SECONDS)
            self._connection.ensure_connection(max_retries=1, timeout=BROKER_SECONDS)
            channel = self._connection.default_channel
            self._app.amqp.queues[QUEUE](channel).declare()
            self._producer = Producer(channel, auto_declare=False)  # type: ignore[no-untyped-call]
        return self._producer

    def _drop(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.release()


def broker_at(url: str, app: Celery, pipe: PipelinedRedis, pipe_url: str | None) -> Broker:
    """`pipe` is a connection that is there already; it does for a broker at the same place."""
    if is_redis(url):
        return RedisBroker(url, pipe if url == pipe_url else None)
    return KombuBroker(app)


# ── the sender ───────────────────────────────────────────────────────────────────────────


class CelerySender(StreamSender):
    """Tasks go to the broker; everything else is as with streams."""

    def __init__(
        self,
        app: Celery,
        broker: Broker,
        pipe: PipelinedRedis,
        hands: Callable[[], Awaitable[int]],
        clock: Clock = time.time,
    ) -> None:
        """`hands` says how many messages workers may hold at once."""
        super().__init__(pipe)
        # Along with other commands go messages to the Redis that takes those commands.
        self.sends_ahead = broker.pipe is pipe
        self._envelopes = Envelopes(app)
        self._broker = broker
        self._unsent: list[Envelope] = []
        self._resending: asyncio.Task[None] | None = None
        self._hands = hands
        self._clock = clock
        self._missing: list[tuple[int, int]] = []
        """Of the last looks, one after the other, that missed some: how many, and how many wait."""
        self._not_before = float("-inf")
        self._seen_at = float("-inf")
        self._oldest: float | None = None

    async def __aenter__(self) -> CelerySender:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.gather(self._resending, return_exceptions=True)
        await self._broker.close()

    def sending(self, tasks: Sequence[Task]) -> Awaitable[object]:
        return asyncio.create_task(self.send(tasks))

    async def send(self, tasks: Sequence[Task]) -> None:
        messages = self._envelopes.made(tasks)
        # Before they are sent: if we die in between, they are missed.
        self._pipe.enqueue(sent(task.handler for task in tasks))
        if not self._unsent:
            try:
                await self._broker.put(messages)
                return
            except StoreError as error:
                log.warning("%s; what is to be sent is kept", error)
        self._unsent += messages
        del self._unsent[:-MAX_UNSENT]  # those are missed, and published again
        if self._resending is None or self._resending.done():
            self._resending = asyncio.create_task(self._resend())

    async def _resend(self) -> None:
        while self._unsent:
            await asyncio.sleep(RESEND_SECONDS)
            some, self._unsent = self._unsent, []
            try:
                await self._broker.put(some)
            except StoreError:
                self._unsent[:0] = some
        log.info("the broker is back, and has what was kept for it")

    # ── what lies about ──────────────────────────────────────────────────────────────────

    async def waiting(self) -> int:
        """How many messages wait; 0 if the broker cannot say."""
        try:
            return await self._broker.waiting()
        except StoreError:
            return 0

    async def oldest_waiting(self, handler: str) -> float | None:
        """Of any handler: all share one queue. Workers take in order, so of n messages that wait
        the oldest is the n-th before the last that was sent."""
        if time.monotonic() - self._seen_at > SEEN_SECONDS:
            self._oldest = await self._oldest_of_all()
            self._seen_at = time.monotonic()
        return self._oldest

    async def _oldest_of_all(self) -> float | None:
        if self._unsent:
            return LONG_AGO
        try:
            waiting = await self._broker.waiting()
        except StoreError:
            return LONG_AGO  # unknown: to be patient is never wrong
        if not waiting:
            return None
        after = (await counts(self._pipe)).sent - waiting
        found = await sent_after(self._pipe, after)
        return LONG_AGO if found is None else found

    async def lost(self) -> list[str]:
        """The queue was emptied by hand, or with its broker."""
        before = await counts(self._pipe)
        await mark(self._pipe, before.sent, self._clock())
        if self._unsent:
            return self._nothing_lost()
        try:
            waiting = await self._broker.waiting()
        except StoreError:
            return self._nothing_lost()
        after = await counts(self._pipe)
        if (surplus := after.sent - before.taken - waiting) < 0:  # of messages that came twice
            await correct(self._pipe, after, surplus)
        missing = before.sent - after.taken - waiting
        if not waiting and before.sent == after.sent:
            await none_waits(self._pipe)
        if missing < 1:
            return self._nothing_lost()
        self._missing.append((missing, waiting))
        if not await self._are_lost() or not await correct(self._pipe, after, self._least()):
            return []
        log.warning(
            "%s lost: published again",
            counted(self._least(), "message is", "messages are"),
        )
        self._nothing_lost()
        return [*await by_handler(self._pipe)] or [QUEUE]

    async def _are_lost(self) -> bool:
        """Whether what is missing is not merely on its way between a broker and its workers."""
        looks = self._missing[-LOOKS:]
        if len(looks) < LOOKS:
            return False
        if not any(waiting for _, waiting in looks):
            return True
        # All that waits is sent again, too, so that must not be much.
        least = self._least()
        if looks[-1][1] > MAX_AGAIN + least * MAX_AGAIN_EACH:
            return False
        if least > await self._hands():
            return True
        if len(self._missing) > LOOKS and time.monotonic() >= self._not_before:
            self._not_before = time.monotonic() + DOUBTFUL_SECONDS
            return True
        return False

    def _least(self) -> int:
        return min(missing for missing, _ in self._missing[-LOOKS:])

    def _nothing_lost(self) -> list[str]:
        self._missing.clear()
        return []


CHECK = "broker"
PATIENCE_SECONDS = 2 * BROKER_SECONDS


async def examine(settings: Settings) -> list[DoctorFinding]:
    """Nothing to say where tasks travel otherwise."""
    if settings.transport != "celery":
        return []
    url = broker_url(settings)
    kind = url.partition("://")[0]
    fix = f"start it, or correct {env_name('broker_url')}"
    redis = is_redis(url)
    broker: Broker = RedisBroker(url) if redis else KombuBroker(make_app(settings))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            count = await broker.waiting()
            if redis and (problem := await _of_redis(url)):
                return [problem]
    except StoreError as error:
        return [DoctorFinding(CHECK, False, f"{kind}: {error}", fix)]
    except TimeoutError:
        return [
            DoctorFinding(CHECK, False, f"{kind}: no answer within {PATIENCE_SECONDS:g} s", fix)
        ]
    finally:
        await broker.close()
    many = "1 message waits" if count == 1 else f"{count:,} messages wait"
    return [DoctorFinding(CHECK, True, f"{kind}, reachable; {many} in queue '{QUEUE}'")]


async def _of_redis(url: str) -> DoctorFinding | None:
    async with PipelinedRedis(url) as pipe:
        if await pipe.is_clustered():
            message = "redis: it is a cluster, which Celery cannot use as a broker"
            return DoctorFinding(
                CHECK, False, message, f"let {env_name('broker_url')} name another one"
            )
        try:
            policy = (await pipe.call("CONFIG", "GET", "maxmemory-policy"))[1].decode()
        except RedisError:
            return None  # its provider forbids to ask
    if policy != "noeviction":
        message = f"redis: maxmemory-policy is {policy}: it may throw away what waits"
        fix = "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        return DoctorFinding(CHECK, False, message, fix)
    return None
