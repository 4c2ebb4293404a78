"""Sends notifications of runs that ended to the receivers that want them, at least once.

The store keeps a notification from the commit of the run's end until a receiver has accepted it, or
until it is given up and becomes a dead letter. Any number of processes send: one claims a
notification for a while, and another one sends it if the first died. No run waits for any of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from dovetail.core.errors import DovetailError, NotFound, StoreError
from dovetail.core.outputs import OutputReference
from dovetail.core.text import counted
from dovetail.core.webhooks import (
    FIRST_RETRY_SECONDS,
    GIVE_UP_SECONDS,
    Notification,
    body_of,
    check_secret,
    retry_at,
    signed_headers,
)
from dovetail.engine.clock import Clock
from dovetail.engine.ports import DoctorFinding
from dovetail.engine.views import timestamp

MAX_SENDING = 32
MAX_SENDING_TO_ONE = 8
"""Of one receiver: if it hangs, others still get theirs."""
SEND_SECONDS = 15.0
CLAIM_SECONDS = 2 * SEND_SECONDS
"""For the attempt and what is written after it; then another process tries."""
LOOK_SECONDS = 1.0
BUSY_SECONDS = 0.5
"""So much later comes the turn of a notification to a receiver that is busy with others."""
TURN_SECONDS = 0.004
"""Between two of these turns."""
DRAIN_CLAIMS = 0.8
"""So much of the time in which a process ends, it claims notifications. A claim that is cut short
lasts until its end."""
RELEASE_SECONDS = 1.0
"""For giving claims back at the end of a process, whose store may be away."""
MAX_RESULT_BYTES = 256 << 10
"""A larger result is a reference, as in the API."""
REFUSALS = frozenset({"forbidden_address", "invalid_url", "secret_host"})
"""The types of errors after which nothing may be sent to a URL at all."""
MAX_ERROR_CHARS = 500
MAX_KNOWN = 1000
"""URLs of which something is remembered."""
WEBHOOKS = "webhooks"
"""The `stream` of dead letters that are notifications."""
LATE_SECONDS = 60.0
"""A notification that is due for so long is sent by no process."""

log = logging.getLogger("dovetail.webhooks")

Post = Callable[[str, Mapping[str, str], bytes], Awaitable[int]]
"""Sends a body to a URL; returns the status. Raises `DovetailError`."""
Summary = Callable[[str, int], Awaitable[dict[str, Any]]]
"""A run as a list shows it, its result up to so many bytes. Raises `NotFound`."""


class Outbox(Protocol):
    """Notifications that no receiver has accepted yet."""

    async def claim(self, now: float, until: float, limit: int) -> list[Notification]:
        """Some that are due, for this process alone until then. None is claimed twice meanwhile."""
        ...

    async def settle(self, notification: Notification) -> None:
        """A receiver has accepted it. Safe to repeat."""
        ...

    async def postpone(self, notification: Notification, at: float) -> None:
        """Due again then, with its new attempts and error; nothing if it was settled meanwhile."""
        ...

    async def bury(self, notification: Notification, reason: str) -> None:
        """It is given up: a dead letter."""
        ...

    async def news(self, now: float, seconds: float) -> None:
        """Returns when something may be due, or so much later."""
        ...


def outbox_findings(waiting: int, late_seconds: float) -> list[DoctorFinding]:
    """For a doctor: notifications that no process sends; the first is due for so long."""
    if late_seconds <= LATE_SECONDS:
        return []
    wait = counted(waiting, "notification waits", "notifications wait")
    fix = "start what sends them: dovetail serve, or dovetail orchestrator on Redis"
    return [DoctorFinding("webhooks", False, f"{wait}, the first for {late_seconds:.0f} s", fix)]


def dead_letter(notification: Notification, reason: str) -> dict[str, Any]:
    """A notification that is given up: the fields of `GET /dead-letters` but for the time, and
    `notification`, which is kept so that it can be sent again, and is not shown."""
    fields = {
        "run_id": notification.run_id,
        "type": notification.type,
        "url": _shown(notification.url),
        "attempts": str(notification.attempts),
    }
    return {
        "stream": WEBHOOKS,
        "id": notification.id,
        "reason": reason,
        "fields": fields,
        "notification": notification._asdict(),
    }


def requeued(letter: Mapping[str, Any]) -> Notification | None:
    """The notification of a dead letter as it was at first; None if the letter has none."""
    found = letter.get("notification")
    if found is None:
        return None
    return Notification(**{**found, "attempts": 0, "first_failed_at": None, "last_error": None})


def _shown(url: str) -> str:
    """Without a password and without a query, which may be a key."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class RetryTimes(NamedTuple):
    first: float = FIRST_RETRY_SECONDS
    give_up: float = GIVE_UP_SECONDS


RETRY_TIMES = RetryTimes()


class WebhookSender:
    def __init__(
        self,
        outbox: Outbox,
        post: Post,
        summary: Summary,
        secrets: Mapping[str, str],
        clock: Clock,
        *,
        redact: Callable[[str], str] = str,
        count: Callable[[str, float], None] = lambda outcome, seconds: None,
        check_host: Callable[[str, str], None] = lambda secret, url: None,
        times: RetryTimes = RETRY_TIMES,
    ) -> None:
        """`check_host` raises if the secret of that name may not be used for a URL. `count` gets
        the outcome of each attempt, `delivered` or `failed`, and of a notification that is given
        up, `dead`; each with the seconds since the run's end."""
        self._outbox = outbox
        self._post = post
        self._summary = summary
        self._secrets = secrets
        self._clock = clock
        self._redact = redact
        self._count = count
        self._check_host = check_host
        self._times = times
        self._sending: dict[asyncio.Task[None], Notification] = {}
        self._postponed = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._claim: asyncio.Task[int] | None = None
        self._draining = False
        self._turns: dict[str, float] = {}
        """The last turn that was given, by URL."""
        self._failing: set[str] = set()
        """The URLs whose last attempt in this process failed."""

    async def run(self) -> None:
        """Send what is due, until `drain` is called. If this is cancelled, other processes send at
        once what was not accepted."""
        try:
            while not self._draining:
                room = MAX_SENDING - len(self._sending)
                if not room:
                    await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
                    continue
                # Shielded: what is claimed must be known, so that it can be given back.
                self._claim = asyncio.create_task(self._send_due(room))
                if await asyncio.shield(self._claim) < room:
                    await self._news()
        finally:
            if not self._draining:
                await self._release()

    async def drain(self, seconds: float) -> None:
        """Give what is due a first attempt, within this time; leave the rest to other processes."""
        self._draining = True
        last_claim = self._clock() + DRAIN_CLAIMS * seconds
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(seconds):
                await self._drain(last_claim)
        await self._release()

    async def _drain(self, last_claim: float) -> None:
        while True:
            room = MAX_SENDING - len(self._sending)
            if room and self._clock() <= last_claim:
                await self._send_due(room)
            if self._sending:
                await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
            elif self._clock() < min(last_claim, max(self._turns.values(), default=0.0)):
                await asyncio.sleep(TURN_SECONDS)
            else:
                return

    async def _release(self) -> None:
        """Cancel what is being sent, and end its claims."""
        with suppress(TimeoutError, StoreError):  # then they are sent when their claims end
            async with asyncio.timeout(RELEASE_SECONDS):
                if self._claim is not None:
                    await asyncio.gather(self._claim, return_exceptions=True)
                left = [*self._sending.values()]
                self._cancel_sending()
                now = self._clock()
                await asyncio.gather(*(self._outbox.postpone(one, now) for one in left))
        self._cancel_sending()

    def _cancel_sending(self) -> None:
        for task in self._sending:
            task.cancel()

    async def _news(self) -> None:
        """Returns when something may be due."""
        news = asyncio.ensure_future(self._outbox.news(self._clock(), LOOK_SECONDS))
        postponed = asyncio.ensure_future(self._postponed.wait())
        try:
            await asyncio.wait({news, postponed}, return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                news.result()
        finally:
            self._postponed.clear()
            for one in (news, postponed):
                one.cancel()
            await asyncio.gather(news, postponed, return_exceptions=True)

    async def _postpone(self, one: Notification, at: float) -> None:
        await self._outbox.postpone(one, at)
        self._postponed.set()

    async def _send_due(self, limit: int) -> int:
        """Begin with so many that are due; returns how many these are."""
        async with self._claiming:
            now = self._clock()
            due = await self._outbox.claim(now, now + CLAIM_SECONDS, limit)
            await asyncio.gather(*map(self._begin, due))
            return len(due)

    async def _begin(self, one: Notification) -> None:
        if sum(other.url == one.url for other in self._sending.values()) >= MAX_SENDING_TO_ONE:
            await self._postpone(one, self._turn_of(one.url))
            return
        task = asyncio.create_task(self._send(one))
        self._sending[task] = one
        task.add_done_callback(self._sent)

    def _turn_of(self, url: str) -> float:
        """When the next notification to a busy receiver is looked at again. Thousands may wait, and
        to look at all of them at once would be in the way of runs."""
        now = self._clock()
        if len(self._turns) >= MAX_KNOWN:
            self._turns = {one: at for one, at in self._turns.items() if at > now}
        at = max(now + BUSY_SECONDS, self._turns.get(url, 0.0) + TURN_SECONDS)
        self._turns[url] = at
        return at

    def _sent(self, task: asyncio.Task[None]) -> None:
        del self._sending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its claim ends by itself, and it is tried again.
            log.warning("a notification is sent again: %s", error)

    async def _send(self, one: Notification) -> None:
        is_refused = False
        try:
            status = await self._attempt(one)
            error = None if 200 <= status < 300 else f"the receiver answered {status}"
        except StoreError:
            raise
        except DovetailError as problem:
            error = self._redact(str(problem))
            is_refused = problem.type in REFUSALS
        if error is None:
            self._failing.discard(one.url)
            await self._outbox.settle(one)
            self._count("delivered", self._clock() - one.time)
            return
        self._count("failed", self._clock() - one.time)
        now = self._clock()
        since = now if one.first_failed_at is None else one.first_failed_at
        failed = one._replace(
            attempts=one.attempts + 1, first_failed_at=since, last_error=error[:MAX_ERROR_CHARS]
        )
        first, give_up = self._times
        at = retry_at(since, failed.attempts, now, first=first, give_up=give_up)
        if at is not None and not is_refused:
            self._warn(one, error)
            await self._postpone(failed, at)
            return
        tries = f"given up after {counted(failed.attempts, 'attempt')}: {failed.last_error}"
        await self._outbox.bury(failed, tries)
        self._count("dead", now - one.time)
        log.error("run %s: the webhook %s is %s", one.run_id, one.id, tries)

    def _warn(self, one: Notification, error: str) -> None:
        """Of the first failure of a receiver, and of the first after it has accepted something."""
        if one.url not in self._failing:
            if len(self._failing) >= MAX_KNOWN:
                self._failing.clear()
            self._failing.add(one.url)
            log.warning("the webhook %s fails: %s", self._redact(_shown(one.url)), error)

    async def _attempt(self, one: Notification) -> int:
        secret = None
        if one.secret is not None:
            self._check_host(one.secret, one.url)
            secret = check_secret(one.secret, self._secrets)
        body = body_of(one, timestamp(one.time) or "", await self._run(one))
        headers = signed_headers(one.id, int(self._clock()), body, secret)
        return await self._post(one.url, headers, body)

    async def _run(self, one: Notification) -> dict[str, Any] | None:
        """The run, unless it is gone or was retried since."""
        try:
            run = await self._summary(one.run_id, MAX_RESULT_BYTES)
        except NotFound:
            return None
        if run["epoch"] != one.epoch:
            return None
        if isinstance(run["result"], OutputReference):
            href = f"/api/v1/runs/{one.run_id}/result"
            run["result"] = {"$output": {"size": run["result"].size, "href": href}}
        return run
