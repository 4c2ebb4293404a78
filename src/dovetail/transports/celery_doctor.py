"""What could keep Celery's broker from carrying tasks, each with what to do about it."""

from __future__ import annotations

import asyncio

from dovetail.config import Settings, env_name
from dovetail.core.errors import StoreError
from dovetail.engine.ports import Finding
from dovetail.pipe import Pipe, RedisError
from dovetail.transports.celery import QUEUE, broker_url, is_redis, make_app
from dovetail.transports.celery_sender import BROKER_SECONDS, Broker, KombuBroker, RedisBroker

CHECK = "broker"
PATIENCE_SECONDS = 2 * BROKER_SECONDS


async def examine(settings: Settings) -> list[Finding]:
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
        return [Finding(CHECK, False, f"{kind}: {error}", fix)]
    except TimeoutError:
        return [Finding(CHECK, False, f"{kind}: no answer within {PATIENCE_SECONDS:g} s", fix)]
    finally:
        await broker.close()
    many = "1 message waits" if count == 1 else f"{count:,} messages wait"
    return [Finding(CHECK, True, f"{kind}, reachable; {many} in queue '{QUEUE}'")]


async def _of_redis(url: str) -> Finding | None:
    async with Pipe(url) as pipe:
        if await pipe.clustered():
            message = "redis: it is a cluster, which Celery cannot use as a broker"
            return Finding(CHECK, False, message, f"let {env_name('broker_url')} name another one")
        try:
            policy = (await pipe.call("CONFIG", "GET", "maxmemory-policy"))[1].decode()
        except RedisError:
            return None  # its provider forbids to ask
    if policy != "noeviction":
        message = f"redis: maxmemory-policy is {policy}: it may throw away what waits"
        fix = "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        return Finding(CHECK, False, message, fix)
    return None
