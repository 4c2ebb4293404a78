"""Secrets, in every spelling that a handler or a service may give back."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.handlers.redaction import Redactor

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
    ],
)
def test_every_spelling_of_a_secret_is_redacted(secret, spell):
    spelled = spell(secret)
    redacted = Redactor({"A": secret}).redact(f"<{spelled}>")
    assert redacted.count("***") == 1
    assert len(redacted) <= len("<***>") + 4  # quotes, or base64 of what stood before it
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


def test_a_megabyte_takes_milliseconds():
    redactor = Redactor({f"S{n}": f"secret/{n:04d} value" for n in range(10)})
    value = {"body": "lorem ipsum dolor sit amet " * 40_000}
    started = time.perf_counter()
    assert redactor.redact(value) is value
    assert time.perf_counter() - started < 0.5


@given(st.text(min_size=1).filter(str.strip), st.text(), st.text())
def test_no_secret_is_left_wherever_it_stands(secret, before, after):
    redacted = Redactor({"A": secret}).redact({secret: [before + secret + after, [secret]]})
    assert redacted["***"][1] == ["***"]
    assert secret not in redacted["***"][0].replace("***", "") or secret in before + after
