"""Webhooks: which notifications follow from the end of a run, how they are signed, when to retry.

The form is that of Standard Webhooks (https://www.standardwebhooks.com).
"""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from dovetail.core.definition.model import Webhook
from dovetail.core.errors import DovetailError
from dovetail.core.events import RUN_ENDS, Event

FIRST_RETRY_SECONDS = 5.0
GIVE_UP_SECONDS = 86400.0
"""A notification is tried for a day, with doubled pauses: fifteen times."""
SECRET_PREFIX = "whsec_"  # noqa: S105  (of the standard)
STRONG_KEY_BYTES = 24
"""The standard wants 24 to 64. Shorter keys sign, as in its libraries; the doctor warns of them."""


class WrongWebhookSecret(DovetailError):
    """The secret of a webhook is not set, or is no key."""

    type = "invalid_secret"


class Notification(NamedTuple):
    """The end of a run, to be sent to one receiver."""

    id: str
    """The same for each attempt, so that a receiver can tell a repetition."""
    url: str
    secret: str | None
    """The name of the secret. The secret itself is stored nowhere."""
    run_id: str
    workflow: str
    version: int | None
    epoch: int
    type: str
    time: float
    error: dict[str, Any] | None
    attempts: int = 0
    """That failed."""
    first_failed_at: float | None = None
    last_error: str | None = None


def notifications(
    run_id: str,
    workflow: str,
    version: int | None,
    events: Iterable[Event],
    webhooks: Sequence[Webhook],
) -> list[Notification]:
    """What follows from these events for these webhooks; of two that are the same, once."""
    distinct = {(one.url, one.secret): one for one in reversed(webhooks)}
    return [
        Notification(
            id=f"msg_{run_id}_{event.seq}_{_digest(webhook)}",
            url=webhook.url,
            secret=webhook.secret,
            run_id=run_id,
            workflow=workflow,
            version=version,
            epoch=event.epoch,
            type=event.type,
            time=event.time,
            error=(event.data or {}).get("error"),
        )
        for event in events
        if event.type in RUN_ENDS
        for webhook in distinct.values()
        if event.type.removeprefix("run.") in webhook.on
    ]


def _digest(webhook: Webhook) -> str:
    """Tells the receivers of one event apart, whatever else is configured."""
    return blake2b(f"{webhook.secret} {webhook.url}".encode(), digest_size=4).hexdigest()


def retry_at(
    first_failed_at: float,
    attempts: int,
    now: float,
    *,
    first: float = FIRST_RETRY_SECONDS,
    give_up: float = GIVE_UP_SECONDS,
) -> float | None:
    """When to try again after so many attempts that failed; None to give up."""
    at = now + first * 2 ** (attempts - 1)
    return at if at <= first_failed_at + give_up else None


def body_of(notification: Notification, timestamp: str, run: Mapping[str, Any] | None) -> bytes:
    """What is sent. `run` is the run as a list shows it, if it has not gone on since."""
    data = {
        "run_id": notification.run_id,
        "workflow": notification.workflow,
        "version": notification.version,
        "status": RUN_ENDS[notification.type].value,
        "error": notification.error,
        "result": None if run is None else run["result"],
    }
    return orjson.dumps({"type": notification.type, "timestamp": timestamp, "data": data})


def signed_headers(
    notification_id: str, at: int, body: bytes, secret: str | None
) -> dict[str, str]:
    """The headers of the standard; without a secret there is no signature."""
    headers = {
        "content-type": "application/json",
        "webhook-id": notification_id,
        "webhook-timestamp": str(at),
    }
    if secret is not None:
        signed = f"{notification_id}.{at}.".encode() + body
        digest = hmac.digest(_key_of(secret), signed, "sha256")
        headers["webhook-signature"] = f"v1,{b64encode(digest).decode()}"
    return headers


def check_secret(name: str, secrets: Mapping[str, str]) -> str:
    """The secret of that name. Raises `WrongWebhookSecret` if it cannot sign anything."""
    value = secrets.get(name)
    if value is None:
        raise WrongWebhookSecret(f"DOVETAIL_SECRET_{name} is not set where webhooks are sent")
    try:
        _key_of(value)
    except ValueError:
        raise WrongWebhookSecret(
            f"DOVETAIL_SECRET_{name} is no key of a webhook: it must be whsec_ and a key in "
            "base64, as of: echo whsec_$(openssl rand -base64 32)"
        ) from None
    return value


def is_weak(secret: str) -> bool:
    """Whether a secret that can sign is shorter than the standard wants."""
    return len(_key_of(secret)) < STRONG_KEY_BYTES


def _key_of(secret: str) -> bytes:
    """The key: base64 with or without the prefix; any other text without it is the key itself."""
    text = secret.strip()
    try:
        key = b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        if text.startswith(SECRET_PREFIX):
            raise
        key = text.encode()
    if not key:
        raise ValueError("empty")
    return key
