"""Webhooks as rules: which notifications follow, how they are signed, when they are tried again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
from typing import Any

import orjson
import pytest

from dovetail.core.definition.model import STORED, Webhook, Workflow
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import check
from dovetail.core.events import Event
from dovetail.core.webhooks import (
    FIRST_RETRY_SECONDS,
    GIVE_UP_SECONDS,
    Notification,
    WrongWebhookSecret,
    body_of,
    check_secret,
    is_weak,
    notifications,
    retry_at,
    signed_headers,
)

KEY = base64.b64encode(b"k" * 24).decode()
CREATED = Event(1, 1.0, "run.created", 1, None, None, {"workflow": "w", "version": 2})
FAILED = Event(9, 5.0, "run.failed", 1, None, None, {"error": {"type": "X", "message": "m"}})


def hook(url: str = "https://example.com/a", **more: Any) -> Webhook:
    return Webhook.model_validate({"url": url, **more})


def made(events: list[Event], *webhooks: Webhook) -> list[Notification]:
    return notifications("r1", "w", 2, events, webhooks)


def test_an_end_is_notified_to_each_webhook_that_wants_it() -> None:
    wanted, other = hook(on=["failed"], secret="S"), hook("https://example.com/b")
    unwanted = hook("https://example.com/c", on=["completed", "cancelled"])
    found = made([CREATED, FAILED], wanted, other, unwanted)
    assert {(one.url, one.secret) for one in found} == {(wanted.url, "S"), (other.url, None)}
    assert {one.error and one.error["message"] for one in found} == {"m"}
    assert made([CREATED], wanted, other) == []


def test_the_id_is_the_same_whatever_else_is_configured_and_distinct_by_receiver() -> None:
    one, two = hook(), hook("https://example.com/b")
    alone, (again, other) = made([FAILED], two), made([FAILED], one, two)
    assert alone[0].id in (again.id, other.id)
    assert again.id != other.id
    assert len(made([FAILED], one, one)) == 1, "the same receiver is notified once"
    later = FAILED._replace(seq=30, epoch=2)
    assert made([later], one)[0].id != made([FAILED], one)[0].id


def test_the_body_is_that_of_the_standard() -> None:
    (one,) = made([FAILED], hook())
    body = orjson.loads(body_of(one, "1970-01-01T00:00:05Z", {"result": {"n": 1}}))
    assert body == {
        "type": "run.failed",
        "timestamp": "1970-01-01T00:00:05Z",
        "data": {
            "run_id": "r1",
            "workflow": "w",
            "version": 2,
            "status": "FAILED",
            "error": {"type": "X", "message": "m"},
            "result": {"n": 1},
        },
    }
    assert orjson.loads(body_of(one, "t", None))["data"]["result"] is None


@pytest.mark.parametrize("secret", [f"whsec_{KEY}", KEY])
def test_the_signature_is_verified_as_the_standard_says(secret: str) -> None:
    headers = signed_headers("msg_1", 1700000000, b'{"a":1}', secret)
    expected = hmac.new(b"k" * 24, b'msg_1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
    assert headers["webhook-id"] == "msg_1"
    assert headers["webhook-timestamp"] == "1700000000"
    assert "webhook-signature" not in signed_headers("msg_1", 1, b"", None)


def test_the_vector_of_the_standards_own_libraries_is_met() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, secret)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("plain", ["my-own-secret", "x" * 33, "geheim ü"])
def test_a_text_that_is_no_base64_is_the_key_itself(plain: str) -> None:
    headers = signed_headers("msg_1", 1, b"{}", check_secret("HOOK", {"HOOK": plain}))
    expected = hmac.new(plain.encode(), b"msg_1.1.{}", hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"


@pytest.mark.parametrize(
    ("secret", "weak"), [(KEY, False), ("whsec_c2hvcnQ=", True), ("my-own-secret", True)]
)
def test_a_short_key_signs_and_is_known_to_be_weak(secret: str, weak: bool) -> None:
    assert is_weak(check_secret("HOOK", {"HOOK": secret})) is weak


@pytest.mark.parametrize("wrong", ["", " ", "whsec_", "whsec_é", "whsec_abc", "whsec_not base64"])
def test_a_secret_that_is_no_key_is_refused_with_what_would_work(wrong: str) -> None:
    with pytest.raises(WrongWebhookSecret, match="openssl rand -base64 32") as refused:
        check_secret("HOOK", {"HOOK": wrong})
    assert len(wrong) < 7 or wrong not in str(refused.value)
    with pytest.raises(WrongWebhookSecret, match="DOVETAIL_SECRET_HOOK is not set"):
        check_secret("HOOK", {})


def test_the_pauses_double_for_a_day() -> None:
    now, attempts, pauses = 0.0, 1, []
    while (at := retry_at(0.0, attempts, now)) is not None:
        pauses.append(at - now)
        now, attempts = at, attempts + 1
    assert pauses[0] == FIRST_RETRY_SECONDS == 5.0
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(pauses))
    assert GIVE_UP_SECONDS / 2 < now <= GIVE_UP_SECONDS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("- {on: [failed]}", "'url' is required"),
        ("- {url: ftp://example.com}", "must be as in https://example.com/hook"),
        ("- {url: 'https://'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://:80/x'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://user@/x'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://x:99999/'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://x:port/'}", "must be as in https://example.com/hook"),
        ("- {url: 'http://[::1/x'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://x\\\\@y/'}", "must be as in https://example.com/hook"),
        ("- {url: 'https://x/{{ params.a }}'}", "templates are not rendered here"),
        ("- {url: https://x, on: [done]}", "'completed', 'failed' or 'cancelled', not 'done'"),
        ("- {url: https://x, on: []}", "must not be empty"),
        ("- {url: https://x, secret: 'a b'}", "is not a valid secret"),
        ("- {url: https://x, when: failed}", "unknown"),
        ("- just text", "must be a mapping"),
    ],
)
def test_a_wrong_webhook_is_a_problem_with_its_line(line: str, message: str) -> None:
    text = f"name: w\nnodes: [{{id: a, handler: input}}]\nnotify:\n  {line}\n"
    (problem,) = check(read_text(text, format="yaml")).errors
    assert message in problem.message
    assert problem.line == 4
    assert problem.path.startswith("notify[0]")


def test_a_url_that_is_refused_today_does_not_make_a_stored_definition_unreadable() -> None:
    stored = {
        "name": "w",
        "nodes": [{"id": "a", "handler": "input"}],
        "notify": [{"url": "https://example.com:99999/hook"}],
    }
    with pytest.raises(ValueError, match="must be as in"):
        Workflow.model_validate(stored)
    (webhook,) = Workflow.model_validate(stored, context=STORED).notify
    assert webhook.url == "https://example.com:99999/hook"
