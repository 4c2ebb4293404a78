"""Webhooks: delivered at least once, whatever fails or dies, and never in the way of a run.

The same on the embedded file, on Redis and on Redis with PostgreSQL.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest

from dovetail import Dovetail, NotFound, PermanentError, handler
from dovetail.core.definition.model import Webhook
from dovetail.core.events import Event
from dovetail.core.webhooks import Notification, notifications
from dovetail.engine import webhooks as sending
from dovetail.engine.webhooks import RetryTimes
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.redis.feed import NOTIFICATIONS, OUTBOX

from ..api.conftest import Server, on, wait_for
from ..library.places import on_a_file, over_redis
from ..servers.redis_server import RedisServer
from ..webhook_receiver import SECRET, Received, Receiver

SECONDS = 20.0
ENDED = Event(9, 1000.0, "run.completed", 1)
SETTINGS = {"allow_private_addresses": "127.0.0.0/8"}


@handler
async def breaks(config: dict[str, Any], ctx: Any) -> None:
    raise PermanentError("broken")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().serving() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries after 0.05 s instead of 5 s, and a key that signs."""
    quick_times = RetryTimes(first=0.05, give_up=3.0)
    monkeypatch.setitem(sending.WebhookSender.__init__.__kwdefaults__, "times", quick_times)
    monkeypatch.setattr(sending, "CLAIM_SECONDS", 2.0)
    monkeypatch.setattr(sending, "BUSY_SECONDS", 0.05)
    monkeypatch.setenv("DOVETAIL_SECRET_HOOK", SECRET)


@pytest.fixture(params=["file", "redis", "archive"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def at(**settings: Any) -> AsyncIterator[Dovetail]:
        given = {**SETTINGS, **settings}
        if request.param == "file":
            async with on_a_file(tmp_path, [breaks], given) as dt:
                yield dt
            return
        if request.param == "archive":
            given["database_url"] = request.getfixturevalue("postgres_url")
        async with over_redis(request.getfixturevalue("redis_url"), [breaks], given) as dt:
            yield dt

    return at


def flow(url: str, *, handler: str = "output", **hook: Any) -> dict[str, Any]:
    return {
        "name": "flow",
        "notify": [{"url": url, "secret": "HOOK", **hook}],
        "nodes": [{"id": "a", "handler": handler, "config": {"value": {"n": 1}}}],
    }


async def heard(receiver: Receiver, run_id: str, count: int = 1) -> list[Received]:
    async with asyncio.timeout(SECONDS):
        while len(found := receiver.of(run_id)) < count:
            await asyncio.sleep(0.01)
    return found


async def test_the_end_of_a_run_is_delivered_signed(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    async with place() as dt:
        await dt.register(flow(f"{receiver.url}/hook?k=1"))
        run = await dt.run("flow", timeout=SECONDS)
        (one,) = await heard(receiver, run.run_id)
    assert one.path == "/hook?k=1"
    assert one.is_signed()
    assert one.headers["content-type"] == "application/json"
    message = one.message
    assert message.pop("timestamp") == run.finished_at
    assert message == {
        "type": "run.completed",
        "data": {
            "run_id": run.run_id,
            "workflow": "flow",
            "version": 1,
            "status": "COMPLETED",
            "error": None,
            "result": run.result,
        },
    }


async def test_only_the_wanted_ends_are_delivered_with_the_error(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    async with place() as dt:
        completed = await dt.run(flow(receiver.url, on=["failed"]), timeout=SECONDS)
        failed = await dt.run(flow(receiver.url, handler="breaks"), timeout=SECONDS)
        (one,) = await heard(receiver, failed.run_id)
        assert receiver.of(completed.run_id) == []
    assert one.message["type"] == "run.failed"
    assert one.message["data"]["error"]["message"] == "broken"
    assert one.message["data"]["error"]["node"] == "a"


async def test_webhooks_of_all_runs_come_from_the_setting(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    everywhere = [{"url": f"{receiver.url}/all", "on": ["completed"]}]
    async with place(webhooks=everywhere) as dt:
        run = await dt.run(flow(f"{receiver.url}/own"), timeout=SECONDS)
        found = await heard(receiver, run.run_id, 2)
    assert sorted(one.path for one in found) == ["/all", "/own"]
    assert "webhook-signature" not in next(o for o in found if o.path == "/all").headers


async def test_a_shell_without_the_setting_that_cancels_a_run_lets_the_webhooks_of_all_runs_know(
    redis_url: str, receiver: Receiver
) -> None:
    settings = {**SETTINGS, "webhooks": [{"url": f"{receiver.url}/all", "on": ["cancelled"]}]}
    waits = {"id": "w", "handler": "sleep", "config": {"seconds": 300}}
    async with over_redis(redis_url, [], settings) as dt, Dovetail(redis_url) as shell:
        run = await dt.trigger({"name": "waits", "nodes": [waits]})
        await shell.cancel(run.run_id)
        (one,) = await heard(receiver, run.run_id)
    assert (one.path, one.message["type"]) == ("/all", "run.cancelled")


async def test_a_receiver_that_fails_for_a_while_gets_it_under_the_same_id(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    statuses = iter([500, 404, 302, 503])
    receiver.answer = lambda one: next(statuses, 200)
    async with place() as dt:
        run = await dt.run(flow(receiver.url), timeout=SECONDS)
        found = await heard(receiver, run.run_id, 5)
        await asyncio.sleep(0.3)
    assert len(receiver.of(run.run_id)) == 5, "it is not sent again once it was accepted"
    assert len({one.headers["webhook-id"] for one in found}) == 1
    assert all(one.is_signed() and one.path == "/" for one in found)
    assert receiver.reached_by_redirects == []
    pauses = [later.at - one.at for one, later in itertools.pairwise(found)]
    assert pauses[-1] > 0.05 * 2**3 * 0.9


async def test_a_receiver_that_hangs_delays_no_run_and_no_other_receiver(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    release = threading.Event()

    def hang(one: Received) -> int:
        if one.path == "/hangs":
            release.wait(10.0)
        return 200

    receiver.answer = hang
    async with place() as dt:
        began = time.monotonic()
        runs = [await dt.run(flow(f"{receiver.url}/hangs"), timeout=SECONDS) for _ in range(12)]
        assert time.monotonic() - began < 9.0, "no run waits for the receiver"
        other = await dt.run(flow(f"{receiver.url}/well"), timeout=SECONDS)
        asked = time.monotonic()
        (one,) = await heard(receiver, other.run_id)
        assert one.at - asked < 3.0
        release.set()
        for run in runs:
            await heard(receiver, run.run_id)


async def test_a_notification_that_nobody_accepts_becomes_a_dead_letter(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    receiver.answer = lambda one: 500
    async with place() as dt:
        run = await dt.run(flow(f"{receiver.url}/x?key=hidden"), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (letters := await dead_letters(dt)):
                await asyncio.sleep(0.02)
        count = len(receiver.of(run.run_id))
        await asyncio.sleep(0.2)
        assert len(receiver.of(run.run_id)) == count >= 4
    (letter,) = letters
    assert letter["stream"] == "webhooks"
    assert letter["fields"]["run_id"] == run.run_id
    assert "the receiver answered 500" in letter["reason"]
    assert "hidden" not in str(letter)


async def test_a_dead_notification_that_is_requeued_is_sent_again_and_leaves_its_run_alone(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    receiver.answer = lambda one: 500
    async with place() as dt:
        run = await dt.run(flow(f"{receiver.url}/x?key=k", handler="breaks"), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (letters := await dead_letters(dt)):
                await asyncio.sleep(0.02)
        before = receiver.of(run.run_id)
        receiver.answer = lambda one: 200
        requeued = await dt.requeue_dead_letter(letters[0]["letter_id"])
        assert (requeued.run_id, requeued.status) == (run.run_id, "FAILED")
        again = (await heard(receiver, run.run_id, len(before) + 1))[-1]
        assert again.path == "/x?key=k"
        assert again.headers["webhook-id"] == before[0].headers["webhook-id"]
        assert again.message == before[0].message
        assert await dead_letters(dt) == []
        with pytest.raises(NotFound):
            await dt.requeue_dead_letter(letters[0]["letter_id"])
        assert (await dt.get_run(run.run_id)).epoch == 1


async def dead_letters(dt: Dovetail) -> list[dict[str, Any]]:
    return [letter.to_dict() for letter in await dt.dead_letters()]


async def test_private_addresses_are_refused_unless_they_are_allowed(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    async with place(allow_private_addresses="192.0.2.0/24") as dt:
        await dt.run(flow(receiver.url), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (letters := await dead_letters(dt)):
                await asyncio.sleep(0.02)
    assert "is not public" in letters[0]["reason"]
    assert letters[0]["fields"]["attempts"] == "1", "it is not tried again"
    assert receiver.received == []


async def test_a_secret_that_is_bound_to_other_hosts_signs_nothing(
    place: Callable[..., Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_SECRET_HOOK_HOSTS", "hooks.example.com")
    async with place() as dt:
        await dt.run(flow(receiver.url), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (letters := await dead_letters(dt)):
                await asyncio.sleep(0.02)
    assert "DOVETAIL_SECRET_HOOK_HOSTS allows hooks.example.com" in letters[0]["reason"]
    assert receiver.received == []


async def test_a_secret_that_is_not_set_is_said_and_nothing_is_sent_unsigned(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    async with place() as dt:
        await dt.run(flow(receiver.url, secret="OTHER"), timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (letters := await dead_letters(dt)):
                await asyncio.sleep(0.02)
    assert "DOVETAIL_SECRET_OTHER is not set" in letters[0]["reason"]
    assert receiver.received == []


async def test_a_run_that_was_retried_meanwhile_is_notified_of_each_end(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    statuses = iter([500])
    receiver.answer = lambda one: next(statuses, 200)
    async with place() as dt:
        run = await dt.run(flow(receiver.url, handler="breaks"), timeout=SECONDS)
        await heard(receiver, run.run_id)
        await dt.retry(run.run_id)
        await dt.wait(run.run_id, timeout=SECONDS)
        found = await heard(receiver, run.run_id, 3)
    assert [one.message["type"] for one in found] == ["run.failed"] * 3
    assert len({one.headers["webhook-id"] for one in found}) == 2


async def test_what_was_claimed_by_a_process_that_died_is_sent_by_another(
    place: Callable[..., Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def releases_nothing(sender: sending.WebhookSender) -> None:
        sender._cancel_sending()

    with monkeypatch.context() as patch:
        patch.setattr("dovetail.wiring.webhooks._post", never_answers)
        patch.setattr("dovetail.wiring.embedded.LAST_SEND_SECONDS", 0.01)
        patch.setattr(sending.WebhookSender, "_release", releases_nothing)
        async with place() as dt:
            run = await dt.run(flow(receiver.url), timeout=SECONDS)
            await asyncio.sleep(0.2)  # it is claimed, and never answered
    assert receiver.received == []
    async with place():
        (one,) = await heard(receiver, run.run_id)
    assert one.is_signed()


async def never_answers(*_: Any) -> int:
    await asyncio.Event().wait()
    return 0


async def test_what_a_process_that_ends_has_not_sent_is_sent_at_once_by_another(
    place: Callable[..., Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "CLAIM_SECONDS", 300.0)
    with monkeypatch.context() as patch:
        patch.setattr("dovetail.wiring.webhooks._post", never_answers)
        patch.setattr("dovetail.wiring.embedded.LAST_SEND_SECONDS", 0.01)
        async with place() as dt:
            run = await dt.run(flow(receiver.url), timeout=SECONDS)
            await asyncio.sleep(0.2)
    async with place():
        (one,) = await heard(receiver, run.run_id)
    assert one.is_signed()


async def test_a_claim_whose_reply_has_not_arrived_when_a_process_ends_is_given_back() -> None:
    claimed, answers = asyncio.Event(), asyncio.Event()
    given_back: list[str] = []

    class SlowOutbox:
        async def claim(self, now: float, until: float, limit: int) -> list[Notification]:
            claimed.set()
            await answers.wait()
            kind, url = "run.completed", "http://receiver.example/"
            return [Notification("n", url, None, "r", "flow", 1, 1, kind, 1000.0, None)]

        async def postpone(self, notification: Notification, at: float) -> None:
            given_back.append(notification.id)

    sender = sending.WebhookSender(
        *(cast(Any, SlowOutbox()), never_answers, cast(Any, never_answers), {}, time.time)
    )
    sends = asyncio.create_task(sender.run())
    await claimed.wait()
    sends.cancel()
    await asyncio.sleep(0.01)
    answers.set()
    await asyncio.gather(sends, return_exceptions=True)
    assert given_back == ["n"]


async def test_what_a_process_leaves_behind_when_it_closes_is_sent_at_once_by_the_next(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "CLAIM_SECONDS", 300.0)
    monkeypatch.setattr("dovetail.wiring.embedded.LAST_SEND_SECONDS", 1.5)

    def slow(one: Received) -> int:
        time.sleep(0.2)
        return 200

    receiver.answer = slow
    async with on_a_file(tmp_path, [], SETTINGS) as dt:
        await dt.register(flow(receiver.url))
        batch = await dt.batch("flow", [{}] * 100)
        runs = (await dt.wait_batch(batch.batch_id)).runs
    assert len(receiver.received) < 100
    async with on_a_file(tmp_path, [], SETTINGS):
        for run in runs:
            await heard(receiver, run.run_id)
    assert len(receiver.received) <= 108, "only what was being sent is sent again"


def test_a_notification_survives_the_kill_of_the_process_that_sends_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Embedded, and on Redis with an orchestrator and a worker inside the server; with the real
    pause of 5 s before the first retry, in which the process is killed."""
    receiver.answer = lambda one: 500
    with RedisServer() as redis:
        env = {"DOVETAIL_SECRET_HOOK": SECRET, "DOVETAIL_ALLOW_PRIVATE_ADDRESSES": "127.0.0.0/8"}
        setups: list[tuple[Path, list[str], dict[str, str]]] = [
            (tmp_path / "file", [], env),
            (tmp_path / "redis", ["--with", "orchestrator,worker"], {**env, **on(redis.url)}),
        ]
        servers, run_ids = [], []
        for folder, words, own in setups:
            folder.mkdir()
            servers.append(Server(folder, *words, **own))
            api = servers[-1].client()
            body = {"definition": flow(f"{receiver.url}/{folder.name}")}
            run_ids.append(api.post("/runs", body)["run_id"])
        for server, run_id in zip(servers, run_ids, strict=True):
            wait_for(lambda run_id=run_id: receiver.of(run_id), "the first attempt was made")
            server.process.kill()
            server.process.wait()
            server.close()
        receiver.answer = lambda one: 200
        tried = {run_id: len(receiver.of(run_id)) for run_id in run_ids}
        servers = [Server(folder, *words, **own) for folder, words, own in setups]
        for run_id, count in tried.items():
            wait_for(lambda r=run_id, n=count: len(receiver.of(r)) > n, "it was sent again")
            *_, one, again = receiver.of(run_id)
            assert one.headers["webhook-id"] == again.headers["webhook-id"]
            assert again.is_signed()
            assert again.message["data"]["status"] == "COMPLETED"
            assert again.at - one.at < 60.0
        assert all(server.stop() == 0 for server in servers)


async def test_notifications_that_wait_are_put_back_if_redis_is_emptied(
    redis_url: str, postgres_url: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.wiring.distributed.RESTORE_SECONDS", 0.1)
    times = RetryTimes(first=0.3, give_up=60.0)
    monkeypatch.setitem(sending.WebhookSender.__init__.__kwdefaults__, "times", times)
    receiver.answer = lambda one: 500 if one.path == "/waits" else 200
    settings = {**SETTINGS, "database_url": postgres_url}
    async with over_redis(redis_url, [breaks], settings) as dt, PipelinedRedis(redis_url) as pipe:
        accepted = await dt.run(flow(f"{receiver.url}/well"), timeout=SECONDS)
        waits = await dt.run(flow(f"{receiver.url}/waits"), timeout=SECONDS)
        await heard(receiver, accepted.run_id)
        await heard(receiver, waits.run_id)
        async with asyncio.timeout(SECONDS):
            while not await copies(postgres_url):
                await asyncio.sleep(0.02)
            while not await archived(postgres_url, accepted.run_id, waits.run_id):
                await asyncio.sleep(0.02)
        await pipe.call("FLUSHALL")
        emptied = time.monotonic()
        receiver.answer = lambda one: 200
        async with asyncio.timeout(SECONDS):
            while receiver.of(waits.run_id)[-1].at < emptied:
                await asyncio.sleep(0.02)
        *_, again = receiver.of(waits.run_id)
        assert again.is_signed()
        assert again.message["data"]["result"] == {"value": {"n": 1}}
        assert len({one.headers["webhook-id"] for one in receiver.of(waits.run_id)}) == 1
        async with asyncio.timeout(SECONDS):
            while await copies(postgres_url):
                await asyncio.sleep(0.02)
        count = len(receiver.received)
        await asyncio.sleep(0.5)
        assert len(receiver.received) == count, "it is not put back once it was accepted"
        assert len(receiver.of(accepted.run_id)) == 1


async def copies(postgres_url: str) -> int:
    async with PostgresPool(postgres_url) as pool:
        return len(await pool.rows("copied_notifications", "", 10))


async def archived(postgres_url: str, *run_ids: str) -> bool:
    async with PostgresPool(postgres_url) as pool:
        found = await PostgresArchive(pool).kept(run_ids)
    return len(found) == len(run_ids) and all(one.finished for one in found.values())


async def test_a_run_without_webhooks_costs_no_notification(
    place: Callable[..., Any], receiver: Receiver
) -> None:
    async with place() as dt:
        quiet = flow(receiver.url)
        del quiet["notify"]
        await dt.run(quiet, timeout=SECONDS)
        outbox = await waiting_notifications(dt)
    assert outbox == 0


async def waiting_notifications(dt: Dovetail) -> int:
    if dt._settings.redis_url is None:
        store = dt._commands.store  # type: ignore[attr-defined]
        return int(store.rows("count_notifications")[0][0])
    async with PipelinedRedis(dt._settings.redis_url) as pipe:
        return int(await pipe.call("EXISTS", OUTBOX, NOTIFICATIONS))


def test_the_dead_letter_of_an_older_version_is_shown_and_dropped_and_never_retries_its_run(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    api = server.client()
    one = notifications("r1", "w", None, [ENDED], [Webhook(url="https://example.com/a?key=k")])[0]
    letter = {**sending.dead_letter(one, "given up"), "time": 1000.0}
    del letter["notification"]
    with closing(sqlite3.connect(tmp_path / ".dovetail" / "dovetail.db")) as connection, connection:
        row = (json.dumps(letter).encode(),)
        connection.execute("INSERT INTO dead_letters (content) VALUES (?)", row)
    (found,) = api.get("/dead-letters")["items"]
    assert found["fields"]["url"] == "https://example.com/a"
    path = f"/dead-letters/{found['letter_id']}"
    refused = api("POST", f"{path}/requeue", json={})
    assert refused.status_code == 409
    assert "is a notification that an older version gave up" in refused.json()["detail"]
    assert api("DELETE", path).status_code == 204
    assert api("DELETE", path).status_code == 404
    assert api("DELETE", "/dead-letters/x").status_code == 404
    assert api.get("/dead-letters")["items"] == []
    assert server.stop() == 0
