"""Secrets, in every spelling that a handler or a service may give back."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import Settings
from dovetail.core.errors import PermanentError
from dovetail.core.redaction import Redactor
from dovetail.handlers.answers import Answer, check_status
from dovetail.handlers.failure import describe

from .pace import seconds_of

SECRET = 'hu"nter/2+ü &\\=x\n%'
SIMPLE = "hunter2-token"


@pytest.mark.parametrize("secret", [SECRET, SIMPLE, "päss wörd", "𝕤ecret!", "tok\ten"])
@pytest.mark.parametrize(
    "spell",
    [
        str,
        quote,
        quote_plus,
        lambda s: quote(s, safe=""),
        lambda s: quote(s, safe="").lower() if s.islower() else quote(s, safe=""),
        lambda s: urlencode({"k": s})[2:],
        json.dumps,
        lambda s: json.dumps(s, ensure_ascii=False),
        lambda s: json.dumps(s).replace("/", "\\/"),
        lambda s: base64.b64encode(s.encode()).decode(),
        lambda s: base64.urlsafe_b64encode(s.encode()).decode().rstrip("="),
        lambda s: base64.b64encode(b"u:" + s.encode()).decode(),
        lambda s: base64.b64encode(b"x" + s.encode() + b"y").decode(),
        lambda s: base64.b64encode(b"xy" + s.encode() + b"z").decode(),
        lambda s: quote(base64.b64encode(b"u:" + s.encode()).decode(), safe=""),
        lambda s: json.dumps(base64.b64encode(s.encode()).decode()).replace("/", "\\/"),
        lambda s: base64.encodebytes(s.encode()).decode().strip(),
        lambda s: "".join(f"%{octet:02X}" for octet in s.encode()),
        lambda s: "".join(f"%{octet:02x}" for octet in s.encode()),
        lambda s: quote(quote(s, safe=""), safe=""),
        lambda s: json.dumps(json.dumps(s))[2:-2],
        lambda s: json.dumps({"k": json.dumps({"k": s}, ensure_ascii=False)})[15:-4],
        lambda s: html.escape(s),
        lambda s: s.encode().hex(),
        lambda s: s.encode().hex().upper(),
        lambda s: f"https://user:{quote(s, safe='')}@",
    ],
)
def test_every_spelling_of_a_secret_is_redacted(secret, spell):
    spelled = spell(secret)
    redacted = Redactor({"A": secret}).redact(f"<{spelled}>")
    assert redacted.count("***") == 1
    assert len(redacted) <= len("<***>") + len("https://user:@")  # quotes, or what stood before it
    assert Redactor({"A": secret}).redact({spelled: [{"k": spelled}]}) != {
        spelled: [{"k": spelled}]
    }


def test_it_goes_through_keys_lists_and_nested_values():
    value = {"a": [1, None, {"hunter2-token": "x hunter2-token y"}], "b": True, "c": 1.5}
    assert Redactor({"T": SIMPLE}).redact(value) == {
        "a": [1, None, {"***": "x *** y"}],
        "b": True,
        "c": 1.5,
    }


def test_a_value_without_secrets_is_the_same_object():
    value = {"a": ["hunter", 2]}
    assert Redactor({"T": SIMPLE}).redact(value) is value
    assert Redactor({}).redact(value) is value


def test_the_original_is_not_changed():
    value = {"a": [SIMPLE]}
    assert Redactor({"T": SIMPLE}).redact(value) == {"a": ["***"]}
    assert value == {"a": [SIMPLE]}


def test_an_empty_secret_redacts_nothing():
    redactor = Redactor({"EMPTY": "", "BLANK": ""})
    assert not redactor
    assert redactor.redact("abc") == "abc"


def test_of_two_secrets_that_begin_alike_the_longer_wins():
    redactor = Redactor({"A": "token", "B": "token-and-more"})
    assert redactor.redact("token-and-more token") == "*** ***"


def test_a_secret_from_a_file_is_known_without_its_newline():
    assert Redactor({"A": "hunter2-token\n"}).redact("Bearer hunter2-token") == "Bearer ***"


def test_a_secret_that_became_a_number_is_redacted():
    redactor = Redactor({"PIN": "12345678"})
    assert redactor.redact({"pin": 12345678, "n": 1, "t": True}) == {
        "pin": "***",
        "n": 1,
        "t": True,
    }


def test_a_secret_of_special_signs_only_is_redacted():
    assert Redactor({"A": "€&"}).redact(["€&", "%E2%82%AC%26"]) == ["***", "***"]


def test_what_is_no_json_is_looked_at_as_far_as_possible():
    thing = object()
    redacted = Redactor({"A": SIMPLE}).redact({"a": thing, "b": (SIMPLE,), 3: {1, 2}})
    assert redacted == {"a": thing, "b": ["***"], 3: {1, 2}}


def test_base64_of_a_short_secret_does_not_damage_innocent_data():
    innocent = base64.b64encode(bytes(range(256)) * 300).decode()
    assert Redactor({"A": "abc"}).redact({"data": innocent}) == {"data": innocent}


def test_the_characters_that_share_bits_with_a_secret_go_with_it():
    spelled = base64.b64encode(b"a" + SIMPLE.encode() + b"b").decode()
    redacted = Redactor({"A": SIMPLE}).redact(spelled)
    assert redacted == spelled[0] + "***" + spelled[-1]


@pytest.mark.parametrize("width", [60, 64, 76])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n  "])
@pytest.mark.parametrize("secret", ["hunter2/token+of-some-length", "hunter2-token" * 30])
def test_base64_in_lines_is_redacted_wherever_a_line_ends(width, end, secret):
    redactor = Redactor({"A": secret})
    for before in range(80):
        lines = in_lines(b"x" * before + secret.encode() + b"yz", width, end)
        redacted = redactor.redact(f"<{lines}>")
        assert redacted.count("***") == 1
        left = redacted.replace(end, "").replace("***", "")
        assert len(left) <= len("<>") + before * 4 / 3 + 8


def in_lines(octets, width, end):
    spelled = base64.b64encode(octets).decode()
    return end.join(spelled[at : at + width] for at in range(0, len(spelled), width))


def test_of_secrets_that_overlap_nothing_is_left():
    redactor = Redactor({"A": "abcdefgh", "B": "fghijklm"})
    assert redactor.redact("<abcdefghijklm>") == "<***>"
    assert Redactor({"A": "abcab"}).redact("<abcabcab>") == "<***>"
    assert Redactor({"A": "abcab"}).redact("<abcababcab>") in ("<******>", "<***>")


def test_a_secret_that_became_a_host_is_redacted_in_lower_case():
    redactor = Redactor({"A": "Hunter2-Token"})
    assert redactor.redact("cannot resolve 'hunter2-token.example'") == (
        "cannot resolve '***.example'"
    )
    assert Redactor({"A": "Abc"}).redact("abc Abc") == "abc ***"  # too short to be sure


def test_a_key_of_many_lines_is_redacted_line_by_line():
    lines = ["-----BEGIN KEY-----", "MIIEvgIBADANBgkqhkiG9w0B", "AQEFAASCBKgwggSkAgEAAoIB", "ab"]
    redactor = Redactor({"KEY": "\n".join([*lines, "-----END KEY-----", ""])})
    assert redactor.redact(lines) == [lines[0], "***", "***", "ab"]
    assert redactor.redact("\n".join([*lines, "-----END KEY-----"])) == "***"


def test_a_megabyte_takes_milliseconds():
    redactor = Redactor({f"S{n}": f"secret/{n:04d} value" for n in range(10)})
    value = {"body": "lorem ipsum dolor sit amet " * 40_000}
    assert redactor.redact(value) is value
    assert seconds_of(lambda: redactor.redact(value), 0.1) <= 0.1


@pytest.mark.parametrize(
    "text",
    ["hunter2" * 150_000, "hunter2-toke" * 90_000, "%68" * 350_000, "aHVudGVyMi10b2tl\n" * 60_000,
     "\\" * 1_000_000 + "hunter2", '\\"' * 500_000 + "hunter2", "hunter2" + "%25" * 350_000,
     "=" * 1_000_000 + "aHVudGVyMi10b2tlbg"],
    ids=lambda text: ascii(text[:20]),
)  # fmt: skip
def test_a_megabyte_that_nearly_is_the_secret_takes_no_longer(text):
    for secret in (SIMPLE, '"\\hunter2-token', 'hunter2%%%%"'):
        redactor = Redactor({"A": secret})
        assert seconds_of(lambda redactor=redactor: redactor.redact([text]), 0.3) <= 0.3


def test_what_is_cut_is_redacted_before():
    """Of a secret that a cut goes through, the beginning would stay."""
    redact = Redactor({"A": SIMPLE}).redact
    for before in range(9_980, 10_010):
        told = describe(ValueError("x" * before + SIMPLE), redact)
        assert "hunt" not in told["message"]
    for before in range(280, 310):
        body = b"x" * before + SIMPLE.encode()
        answer = Answer(400, {"content-type": "text/plain"}, body, "GET http://h/")
        with pytest.raises(PermanentError) as failed:
            check_status(answer, redact=redact)
        assert "hunt" not in str(failed.value)


def test_settings_name_everything_that_must_not_be_shown():
    settings = Settings(
        secrets={"A": "secret-a"},
        tokens=("full-token", "reading:read"),
        llm_api_key="the-key",
        redis_url="redis://:p%40ss-of-redis-xyz@host:6379/0",
        database_url="postgresql://me:word@host/db",
    )
    redactor = Redactor(settings.sensitive())
    for shown in ("secret-a", "full-token", "reading", "the-key", "p@ss-of-redis-xyz",
                  "p%40ss-of-redis-xyz", "me:word"):  # fmt: skip
        assert redactor.redact(f"<{shown}>") == "<***>"
    # A password that is a word is hidden with its user only, or outputs would suffer.
    assert redactor.redact("a word") == "a word"
    for url in ("redis://host", "redis://host:6379/0", "redis://host/a:b@c", "redis://user@host"):
        assert Settings(redis_url=url).sensitive() == {}


@given(st.text(min_size=1).filter(str.strip), st.text(), st.text())
def test_no_secret_is_left_wherever_it_stands(secret, before, after):
    redacted = Redactor({"A": secret}).redact({secret: [before + secret + after, [secret]]})
    assert redacted["***"][1] == ["***"]
    assert secret not in redacted["***"][0].replace("***", "") or secret in before + after
