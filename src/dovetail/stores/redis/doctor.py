"""Checks of a deployment on Redis, each finding with its fix; and what services ask of the server
while they run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import hiredis

from dovetail.config import Settings, env_name
from dovetail.core.audit.event_check import inconsistencies
from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.text import counted
from dovetail.engine.clock import StoreClock
from dovetail.engine.ports import DoctorFinding
from dovetail.engine.webhooks import outbox_findings
from dovetail.redis_client.pipelined import (
    NoPassword,
    PipelinedRedis,
    RedisError,
    RedisUnreachable,
    ask_sentinel,
    every_key,
)
from dovetail.redis_client.url import RedisUrl
from dovetail.stores.redis.codec import source
from dovetail.stores.redis.feed import OUTBOX
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.redis.timers import ACTIVE
from dovetail.stores.redis.workers import (
    DEAD,
    TASKS,
    ServiceRegistry,
    WorkerRegistry,
    conflict,
    mixture,
)

OLDEST_VERSION = (6, 2)
MAX_SKEW_SECONDS = 1.0
MAX_MEMORY_SHARE = 0.9
OLDEST_RESULT_SECONDS = 30.0
RESULTS, ORCHESTRATORS = "wf:stream:results", "wf:orchestrators"
BROKER_WAITING = "wf:broker:waiting"
PATIENCE_SECONDS = 5.0
MAX_EXAMINED_RUNS, MAX_REPORTED_RUNS = 200, 20
"""Runs that are examined for damage, and reported; `runs verify --all` examines all."""
WATCH_SECONDS = 30.0
"""Between two looks whether Redis evicts, while services run."""


async def examine(
    redis: PipelinedRedis, settings: Settings, clock: Callable[[], float] = time.time
) -> list[DoctorFinding]:
    """Everything there is to say about the Redis of this connection."""
    nodes = redis.nodes()
    parts = zip(*[await _node(node, settings) for node in nodes], strict=True)
    found = [_worst(nodes, list(part)) for part in parts]
    found += await _sentinels(redis.target, settings)
    found += [await _cluster(redis, settings), await _clock(redis, clock)]
    workers = await WorkerRegistry(redis).workers()
    backlog = await _backlog(redis, workers, settings.max_backlog)
    found += [await _orchestrators(redis), _workers(workers), backlog, await _results(redis)]
    found += [await _dead_letters(redis), await _transports(redis, settings)]
    found += await _outbox(redis)
    return [*found, *await _damaged(redis), *disagreements(settings)]


async def _node(redis: PipelinedRedis, settings: Settings) -> list[DoctorFinding]:
    """What every node of a cluster has to be."""
    info = await redis.info()
    found = [_server(info)]
    found += [await _persistence(redis, settings, info), await _eviction(redis, info)]
    return [*found, _memory(info), _role(info)]


def _worst(nodes: Sequence[PipelinedRedis], found: Sequence[DoctorFinding]) -> DoctorFinding:
    """What is wrong with one of them, and with which, or what there is to say of the first."""
    for node, finding in zip(nodes, found, strict=True):
        if not finding.ok and len(nodes) > 1:
            return finding._replace(message=f"{node.where}: {finding.message}")
        if not finding.ok:
            return finding
    return found[0]


async def reach(settings: Settings, clock: Callable[[], float] = time.time) -> list[DoctorFinding]:
    """The findings of the Redis that the settings name; one finding if it cannot be reached."""
    if settings.redis_url is None:
        return []
    fix = f"start it, or correct {env_name('redis_url')}"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), PipelinedRedis(settings.redis_url) as redis:
            return await examine(redis, settings, clock)
    except RedisError as error:
        return [DoctorFinding("redis", False, str(error), fix)]
    except TimeoutError:
        return [DoctorFinding("redis", False, f"no answer within {PATIENCE_SECONDS:g} s", fix)]


# ── what it is ───────────────────────────────────────────────────────────────────────────


def _server(info: dict[str, str]) -> DoctorFinding:
    version = info.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        least = ".".join(map(str, OLDEST_VERSION))
        message = f"version {version} is too old: at least {least} is needed"
        return DoctorFinding("redis", False, message, f"upgrade Redis to {least} or newer")
    return DoctorFinding("redis", True, f"version {version}, reachable")


async def _persistence(
    redis: PipelinedRedis, settings: Settings, info: dict[str, str]
) -> DoctorFinding:
    check = "persistence"
    if info.get("aof_enabled") != "1":
        message = "nothing is logged (appendonly no): what is not in a snapshot dies with Redis"
        fix = "redis-cli CONFIG SET appendonly yes, and the same in redis.conf"
        return DoctorFinding(check, False, message, fix)
    if info.get("aof_last_write_status", "ok") != "ok":
        message = "the last write to its log failed"
        return DoctorFinding(check, False, message, "free some space on the disk of Redis")
    fsync = await _setting(redis, "appendfsync")
    alone = settings.database_url is None
    if fsync is None:
        if not alone:
            return DoctorFinding(check, True, "logged; how often it is synced cannot be read")
        message = "how often its log is synced cannot be read (CONFIG is forbidden)"
        fix = f"make sure that appendfsync is always, or set {env_name('database_url')}"
        return DoctorFinding(check, False, message, fix)
    if fsync == "no" or (alone and fsync != "always"):
        why = "without PostgreSQL only 'always' keeps every run that was answered"
        if not alone:
            why = "a crash of the machine may cost half a minute"
        fix = f"redis-cli CONFIG SET appendfsync {'always' if alone else 'everysec'}"
        if alone:
            fix += f", or let {env_name('database_url')} name a PostgreSQL"
        return DoctorFinding(check, False, f"appendfsync is {fsync}: {why}", fix)
    return DoctorFinding(check, True, f"logged, appendfsync {fsync}")


async def _eviction(redis: PipelinedRedis, info: dict[str, str]) -> DoctorFinding:
    policy = info.get("maxmemory_policy") or await _setting(redis, "maxmemory-policy")
    if policy is None:
        return DoctorFinding(
            "eviction", False, POLICY_UNKNOWN, f"make sure that it is {NO_EVICTION}"
        )
    if policy != NO_EVICTION:
        return DoctorFinding("eviction", False, _evicts(policy), FIX_EVICTION)
    return DoctorFinding("eviction", True, f"nothing is evicted ({NO_EVICTION})")


async def _cluster(redis: PipelinedRedis, settings: Settings) -> DoctorFinding:
    if not await redis.is_clustered():
        return DoctorFinding("cluster", True, "a single server")
    reply = (await redis.call("CLUSTER", "INFO")).decode()
    state = dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)
    if state.get("cluster_state") != "ok":
        message = f"the cluster's state is {state.get('cluster_state')}"
        return DoctorFinding(
            "cluster", False, message, "redis-cli CLUSTER INFO says which slots lack"
        )
    size = f"a cluster of {state.get('cluster_size')}"
    if settings.transport == "celery" and not redis.keeps_order:
        message = f"{size}: Celery's workers reach only one of them"
        fix = f"set {env_name('transport')}=streams, or let {env_name('redis_url')} name one server"
        return DoctorFinding("cluster", False, message, fix)
    return DoctorFinding("cluster", True, size)


def _memory(info: dict[str, str]) -> DoctorFinding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    shown = f"{used >> 20:,} MiB used"
    if most and used > most * MAX_MEMORY_SHARE:
        message = f"{shown} of {most >> 20:,}: soon nothing can be written"
        fix = f"raise maxmemory, or keep finished runs for less long: {env_name('retention_days')}"
        return DoctorFinding("memory", False, message, fix)
    return DoctorFinding("memory", True, shown + (f" of {most >> 20:,}" if most else ", no limit"))


def _role(info: dict[str, str]) -> DoctorFinding:
    if info.get("role") != "master":
        where = f"{info.get('master_host')}:{info.get('master_port')}"
        fix = f"let {env_name('redis_url')} name its master, {where}"
        return DoctorFinding("role", False, "it is a replica, which cannot be written", fix)
    return DoctorFinding("role", True, "it can be written")


async def _sentinels(target: RedisUrl, settings: Settings) -> list[DoctorFinding]:
    """Whether they can find the next server when this one is gone."""
    if not target.service:
        return []
    asking = (("SENTINEL", "MASTER", target.service),)
    replies = await asyncio.gather(
        *(asyncio.to_thread(ask_sentinel, target, one, asking) for one in target.addresses),
        return_exceptions=True,
    )
    silent = [
        f"{host}:{port}: {answer}"
        for (host, port), answer in zip(target.addresses, replies, strict=True)
        if isinstance(answer, BaseException)
    ]
    if silent:
        message = f"{len(silent)} of {len(replies)} do not answer: {'; '.join(silent)}"
        fix = f"start them, or correct {env_name('redis_url')}"
        return [DoctorFinding("sentinels", False, message, fix)]
    facts = [dict(zip(one[0][::2], one[0][1::2], strict=True)) for one in replies]  # type: ignore[index]
    replicas = max(int(one.get(b"num-slaves", 0)) for one in facts)
    if not replicas:
        message = f"{len(replies)} answer, and know no replica: no server could take over"
        return [DoctorFinding("sentinels", False, message, "start a replica: replicaof HOST PORT")]
    message = f"{len(replies)} answer, {counted(replicas, 'replica')}"
    if settings.database_url is None:
        fix = f"a failover loses what a replica has not got yet: set {env_name('database_url')}"
        return [DoctorFinding("sentinels", True, message, fix)]
    return [DoctorFinding("sentinels", True, message)]


async def _clock(redis: PipelinedRedis, clock: Callable[[], float]) -> DoctorFinding:
    before = clock()
    seconds, micros = await redis.call("TIME")
    there = int(seconds) + int(micros) / 1e6
    apart = there - (before + clock()) / 2
    if abs(apart) > MAX_SKEW_SECONDS:
        way = "ahead of" if apart > 0 else "behind"
        message = f"the clock of Redis is {abs(apart):,.1f} s {way} the one here"
        return DoctorFinding("clock", False, message, "let both machines keep their time by NTP")
    return DoctorFinding("clock", True, f"{abs(apart) * 1000:,.0f} ms apart")


async def _setting(redis: PipelinedRedis, name: str) -> str | None:
    """None where the provider forbids to ask."""
    try:
        found = await redis.call("CONFIG", "GET", name)
    except RedisError:
        return None
    return found[1].decode() if found else None


# ── may a service start on it ────────────────────────────────────────────────────────────

NO_EVICTION = "noeviction"
FIX_EVICTION = "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
POLICY_UNKNOWN = "maxmemory-policy cannot be read (neither INFO nor CONFIG is allowed)"


def _evicts(policy: str) -> str:
    return f"maxmemory-policy is {policy}: Redis may throw away runs that are not finished"


async def eviction_policies(redis: PipelinedRedis) -> dict[str, str | None]:
    """By server: of a cluster every node. None where neither INFO nor CONFIG may be asked."""
    return {node.where: await _policy(node) for node in redis.nodes()}


async def _policy(node: PipelinedRedis) -> str | None:
    try:
        policy = (await node.info("memory")).get("maxmemory_policy")
    except (RedisUnreachable, NoPassword):
        raise
    except RedisError:
        policy = None
    return policy or await _setting(node, "maxmemory-policy")


async def refuse_eviction(
    redis: PipelinedRedis, settings: Settings, warn: Callable[[str], None]
) -> None:
    """Before anything is kept in this Redis. Raises `RedisError` where it evicts keys.

    An evicting Redis answers every write, and drops what was written later, without a word to the
    service. So the start is the last moment to say it. With PostgreSQL, too: half of a run that is
    gone is a run that makes no sense.
    """
    refused, warnings = judge_eviction(await eviction_policies(redis), settings.accept_data_loss)
    if refused:
        raise RedisError(refused)
    for message in warnings:
        warn(message)


def judge_eviction(
    policies: Mapping[str, str | None], accept: bool
) -> tuple[str | None, Sequence[str]]:
    """Why a service must not start on these servers, or None; and what it has to warn of."""
    override = f"{env_name('accept_data_loss')}=1"
    evicting = [
        (at, policy) for at, policy in policies.items() if policy not in (None, NO_EVICTION)
    ]
    unknown = [
        f"Redis at {at}: {POLICY_UNKNOWN}: make sure that it is {NO_EVICTION}"
        for at, policy in policies.items()
        if policy is None
    ]
    if not evicting:
        return None, unknown
    if accept:
        accepted = [
            f"Redis at {at}: {_evicts(str(policy))}; accepted by {override}. "
            f"To keep them: {FIX_EVICTION}"
            for at, policy in evicting
        ]
        return None, [*unknown, *accepted]
    where, policy = evicting[0]
    more = f" (and {len(evicting) - 1} more of its servers)" if len(evicting) > 1 else ""
    return (
        f"Redis at {where}{more}: {_evicts(str(policy))}. Set it right: {FIX_EVICTION}. "
        f"Where losing runs is acceptable, {override} starts anyway"
    ), unknown


async def warn_of_lost_writes(
    redis: PipelinedRedis, settings: Settings, warn: Callable[[str], None]
) -> None:
    """Without PostgreSQL what Redis does not write to its disk is lost with it."""
    if settings.database_url is not None:
        return
    for node in redis.nodes():
        try:
            found = await _persistence(node, settings, await node.info("persistence"))
        except RedisUnreachable:
            raise
        except RedisError:
            continue  # not allowed to ask: the doctor says so
        if not found.ok:
            warn(f"Redis at {node.where}: {found.message}. Set it right: {found.fix}")


async def watch_eviction(
    redis: PipelinedRedis, warn: Callable[[str], None], pause: float = WATCH_SECONDS
) -> None:
    """For ever: warn of a policy that changes while services run, once per change."""
    seen = await eviction_policies(redis)
    while True:
        await asyncio.sleep(pause)
        policies = await eviction_policies(redis)
        for where, policy in policies.items():
            if policy is None or policy == seen.get(where, NO_EVICTION):  # a node may be new
                continue
            if policy == NO_EVICTION:
                warn(f"Redis at {where}: maxmemory-policy is {NO_EVICTION} again")
            else:
                warn(f"Redis at {where}: {_evicts(policy)}. Set it right now: {FIX_EVICTION}")
        seen = policies


# ── services, tasks and results ──────────────────────────────────────────────────────────


async def _orchestrators(redis: PipelinedRedis) -> DoctorFinding:
    """Each holds a lease of a few seconds, scored by its end."""
    seconds, _ = await redis.call("TIME")
    alive = int(await redis.call("ZCOUNT", ORCHESTRATORS, int(seconds), "+inf"))
    if not alive:
        message = "none is alive: no run goes on"
        return DoctorFinding("orchestrators", False, message, "dovetail orchestrator")
    return DoctorFinding("orchestrators", True, f"{alive} alive")


def _workers(workers: list[dict[str, Any]]) -> DoctorFinding:
    alive = [one for one in workers if one["alive"]]
    dead = len(workers) - len(alive)
    lost = f", {dead} fell silent within a day" if dead else ""
    if not alive:
        return DoctorFinding("workers", False, f"none is alive{lost}", "dovetail worker")
    running = sum(one["running"] for one in alive)
    room = sum(one["concurrency"] for one in alive)
    return DoctorFinding(
        "workers", True, f"{len(alive)} alive, {running} of {room} slots busy{lost}"
    )


async def _backlog(
    redis: PipelinedRedis, workers: list[dict[str, Any]], most: int
) -> DoctorFinding:
    """Tasks that wait, by handler. One that was done has left its stream."""
    served = {name for one in workers if one["alive"] for name in one["handlers"]}
    handlers = [
        key.removeprefix(TASKS) for key in await every_key(redis, f"{TASKS}*", kind="stream")
    ]
    in_streams = await WorkerRegistry(redis).waiting(handlers)
    waiting = {name: count for name, count in in_streams.items() if count}
    at_broker = await redis.call("HGETALL", BROKER_WAITING)  # counted by senders and workers
    for name, count in zip(at_broker[::2], at_broker[1::2], strict=True):
        if int(count) > 0:
            waiting[name.decode()] = waiting.get(name.decode(), 0) + int(count)
    if not waiting:
        return DoctorFinding("backlog", True, "no task waits")
    largest = sorted(waiting.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"{name} {count:,}" for name, count in largest[:5])
    many = counted(sum(waiting.values()), "task waits or runs", "tasks wait or run")
    message = f"{many}: {shown}"
    orphans = sorted(set(waiting) - served)
    if orphans:
        names = ", ".join(f"'{name}'" for name in orphans[:5])
        fix = "start a worker that loads them: dovetail worker --handlers FILE"
        return DoctorFinding("backlog", False, f"{message}; no live worker knows {names}", fix)
    if sum(waiting.values()) > most:
        name = env_name("max_backlog")
        fix = f"start more workers: dovetail worker; or raise {name}"
        return DoctorFinding(
            "backlog", False, f"{message}; above {most:,} ({name}) no run is taken", fix
        )
    return DoctorFinding("backlog", True, message)


async def _results(redis: PipelinedRedis) -> DoctorFinding:
    """Results are read within moments, if an orchestrator is there to read them."""
    oldest = await redis.call("XRANGE", RESULTS, "-", "+", "COUNT", 1)
    if not oldest:
        return DoctorFinding("results", True, "none waits")
    seconds, _ = await redis.call("TIME")
    age = max(0.0, int(seconds) - int(oldest[0][0].split(b"-")[0]) / 1000)
    many = counted(int(await redis.call("XLEN", RESULTS)), "result waits", "results wait")
    message = f"{many}, the oldest for {age:,.0f} s"
    fix = "" if age <= OLDEST_RESULT_SECONDS else "dovetail orchestrator"
    return DoctorFinding("results", not fix, message, fix)


async def _transports(redis: PipelinedRedis, settings: Settings) -> DoctorFinding:
    """All services on a Redis must have one: what one sends, the other does not read."""
    alive = await ServiceRegistry(redis).alive()
    name = env_name("transport")
    if (mixed := mixture(alive)) is not None:
        fix = f"stop the services of one of them, or set {name} alike for all and start them again"
        return DoctorFinding("transport", False, mixed, fix)
    if (other := conflict(settings.transport, alive)) is not None:
        return DoctorFinding("transport", False, other, f"set {name}={alive[0].transport} here")
    return DoctorFinding("transport", True, settings.transport)


async def _outbox(redis: PipelinedRedis) -> list[DoctorFinding]:
    waiting, first = await redis.call_many(
        [("ZCARD", OUTBOX), ("ZRANGE", OUTBOX, 0, 0, "WITHSCORES")]
    )
    return outbox_findings(waiting, time.time() - float(first[1]) if first else 0.0)


async def _dead_letters(redis: PipelinedRedis) -> DoctorFinding:
    count = int(await redis.call("LLEN", DEAD))
    if not count:
        return DoctorFinding("dead letters", True, "none")
    fix = "see dovetail dead-letters list; then dovetail dead-letters requeue, or drop"
    refused = counted(count, "message was refused", "messages were refused")
    return DoctorFinding("dead letters", False, refused, fix)


# ── settings against each other ──────────────────────────────────────────────────────────


async def _damaged(redis: PipelinedRedis) -> list[DoctorFinding]:
    """Unfinished runs whose state cannot be read, or disagrees with itself; the newest of them."""
    store, found = RedisStore(redis), []
    for name in await redis.call("ZREVRANGE", ACTIVE, 0, MAX_EXAMINED_RUNS - 1):
        run_id = name.decode(errors="replace")
        try:
            wrong = inconsistencies(await store.load(run_id, outputs=False))
        except NotFound:
            continue  # accepted and not made yet, or over
        except BrokenRun as problem:
            wrong = [str(problem)]
        if wrong:
            fix = f"dovetail runs repair {run_id[:6]}, or end it: dovetail runs cancel {run_id[:6]}"
            found.append(DoctorFinding("damaged", False, f"run {run_id}: {wrong[0]}", fix))
    return found[:MAX_REPORTED_RUNS]


def disagreements(settings: Settings) -> list[DoctorFinding]:
    """Settings that are fine by themselves and not together."""
    found = [DoctorFinding("agreement", False, what, fix) for what, fix in _disagreements(settings)]
    return found or [DoctorFinding("agreement", True, "the settings go together")]


def _disagreements(settings: Settings) -> Iterator[tuple[str, str]]:
    interval, timeout = settings.heartbeat_interval, settings.heartbeat_timeout
    if timeout < 2 * interval:
        yield (
            f"{env_name('heartbeat_timeout')} ({timeout:g}) is less than two heartbeats "
            f"({interval:g}): a worker counts as dead after one that is late",
            f"set it to {3 * interval:g} or more",
        )
    if settings.stale_result_timeout <= settings.lease_seconds:
        yield (
            f"{env_name('stale_result_timeout')} ({settings.stale_result_timeout:g}) is not above "
            f"{env_name('lease_seconds')} ({settings.lease_seconds:g}): results would be taken "
            "from orchestrators that are alive",
            f"set it to {3 * settings.lease_seconds:g} or more",
        )
    if settings.stale_claim_interval > settings.stale_result_timeout:
        yield (
            f"{env_name('stale_claim_interval')} ({settings.stale_claim_interval:g}) is above "
            f"{env_name('stale_result_timeout')} ({settings.stale_result_timeout:g}): results "
            "of a dead orchestrator lie about for longer than they need",
            f"set it to {settings.stale_result_timeout / 2:g} or less",
        )
    if settings.database_url is not None and settings.recovery_timeout < settings.lease_seconds:
        yield (
            f"{env_name('recovery_timeout')} ({settings.recovery_timeout:g}) is below "
            f"{env_name('lease_seconds')} ({settings.lease_seconds:g}): runs may be restored "
            "while they are still being made",
            f"set it to {settings.lease_seconds:g} or more",
        )
    if settings.broker_url is not None and settings.transport != "celery":
        yield (
            f"{env_name('broker_url')} is set, and {env_name('transport')} is not celery: "
            "it is not used",
            f"unset it, or set {env_name('transport')}=celery",
        )


# ── while services run: the clock, the append-only file, refused writes ───────────────────────


CLOCK_SECONDS = 10.0
log = logging.getLogger("dovetail.redis")


async def set_clock(redis: PipelinedRedis, clock: StoreClock) -> None:
    asked = time.monotonic()
    seconds, micros = await redis.call("TIME")
    clock.follow(int(seconds) + int(micros) / 1e6, asked, time.monotonic())


async def follow_clock(redis: PipelinedRedis, clock: StoreClock) -> None:
    """For ever: clocks are set, also that of Redis, and machines sleep."""
    while True:
        with suppress(RedisError):
            await set_clock(redis, clock)
        await asyncio.sleep(CLOCK_SECONDS)


async def watch_restarts(redis: PipelinedRedis) -> AsyncIterator[bool]:
    """As `PipelinedRedis.after_breaks`, with the append-only file renewed first."""
    await renew_log(redis)
    async for is_another in redis.after_breaks():
        if is_another:
            await renew_log(redis)
        yield is_another


async def renew_log(redis: PipelinedRedis) -> None:
    """Have every server rewrite its append-only file, unless it has done so since its start.

    Redis truncates a file that ends within a transaction after the last whole command, and not
    before its `MULTI` (7.0; Valkey fixes that with its pull request 4342). At the next start the
    following commands are read as part of it: half of a transition is executed, long after. A file
    that was rewritten since the start has no such end.
    """
    for node in redis.nodes():
        facts = await node.info("persistence")
        if facts.get("aof_enabled") != "1" or facts.get("aof_last_rewrite_time_sec") != "-1":
            continue
        (answer,) = await node.send([("BGREWRITEAOF",)])
        if isinstance(answer, hiredis.ReplyError):  # it is at it, or we may not ask for that
            log.debug("Redis at %s does not rewrite its log: %s", node.where, answer)


WRITABLE_KEY = "wf:writable"
_REFUSALS = {
    "OOM": "its memory is full",
    "MISCONF": "it could not save its data to its disk",
    "READONLY": "it is a replica",
    "NOREPLICAS": "too few of its replicas are there",
    "LOADING": "it is starting",
    "MASTERDOWN": "it has lost its primary",
    "CLUSTERDOWN": "a part of its cluster is away",
    "NOPERM": "its user may not write",
}


async def check_writable(redis: PipelinedRedis) -> None:
    """Raises `RedisError`, with its reason, if Redis would refuse a write."""
    met = (await redis.call_script(source("writable"), [WRITABLE_KEY], [])).decode()
    if met:
        error = RedisError(f"Redis takes no writes: {met}")
        error.reason = "Redis accepts no writes" + _because(met)
        raise error


def _because(refusal: str) -> str:
    """In a few words, without an address: it is public."""
    for word, why in _REFUSALS.items():
        if word in refusal.split(" ", 1)[0].lstrip("-"):
            return f": {why}"
    return ""
