"""Builds what sends notifications to webhooks, over any outbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from dovetail.config import Hosts, Settings
from dovetail.core.redaction import Redactor
from dovetail.engine.clock import Clock
from dovetail.engine.listener import Listener, SafeListener
from dovetail.engine.webhooks import SEND_SECONDS, Outbox, Summary, WebhookSender
from dovetail.handlers.external import bound_hosts, http_client
from dovetail.handlers.http_rules import AddressGuard

MAX_ANSWER_BYTES = 1024
"""Of a receiver's answer: only its status counts."""
REDIRECTS = range(300, 400)

Outcome = Callable[[str, float], None]


def webhook_sender(
    settings: Settings,
    outbox: Outbox,
    summary: Summary,
    clock: Clock,
    listener: Listener | None = None,
) -> WebhookSender:
    """The sender with the address guard of `call_external_service`; redirects are not followed."""
    guard = AddressGuard(settings.allow_private_addresses)
    redactor = Redactor(settings.sensitive())
    count: Outcome = _uncounted if listener is None else SafeListener(listener).on_notification
    return WebhookSender(
        *(outbox, partial(_post, guard), summary, settings.secrets, clock),
        redact=redactor.redact_shown,
        count=count,
        check_host=partial(_check_host, settings.secret_hosts),
    )


def _check_host(bindings: Mapping[str, Hosts], secret: str, url: str) -> None:
    check = bound_hosts(bindings, [secret])
    if check is not None:
        with suppress(ValueError):  # a URL that cannot be sent to: `_post` says so
            check(urlsplit(url).hostname or "")


async def _post(guard: AddressGuard, url: str, headers: Mapping[str, str], body: bytes) -> int:
    client = await http_client("http")
    request = client.OutgoingRequest("POST", client.parse_url(url), headers, body)
    answer = await client.exchange(
        request,
        guard,
        timeout_seconds=SEND_SECONDS,
        max_bytes=MAX_ANSWER_BYTES,
        stop_at=REDIRECTS,
    )
    return int(answer.status_code)


def _uncounted(outcome: str, seconds: float) -> None: ...
