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
from dovetail.core.errors import PermanentError, SecretInKey
from dovetail.core.redaction import Redactor, weakness
from dovetail.handlers.failure import describe
from dovetail.handlers.http_rules import HttpResponse, check_status

from .pace import seconds_of

SECRET = 'hu"nter/2+ü &\\=x\n%'
SIMPLE = "hunter2-token"


@pytest.mark.parametrize("secret", [SECRET, SIMPLE, "Päss wörd", "𝕤ecret!!", "tok\ten-xyz"])
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
    assert Redactor({"A": secret}).redact({"a": [{"k": spelled}]}) != {"a": [{"k": spelled}]}
    with pytest.raises(SecretInKey):
        Redactor({"A": secret}).redact({"a": [{f"<{spelled}>": 1}]})


def test_redaction_covers_lists_and_nested_values():
    value = {"a": [1, None, {"hunter2": "x hunter2-token y"}], "b": True, "c": 1.5}
    assert Redactor({"T": SIMPLE}).redact(value) == {
        "a": [1, None, {"hunter2": "x *** y"}],
        "b": True,
        "c": 1.5,
    }


class TestAKey:
    def test_with_a_secret_in_it_is_refused_and_never_rewritten(self):
        with pytest.raises(SecretInKey, match=r"^output\.a\[1\] has a key") as refused:
            Redactor({"T": SIMPLE}).redact({"a": [1, {"x-hunter2-token": 2}]})
        assert SIMPLE not in str(refused.value)

    @given(
        st.recursive(
            st.none() | st.text(),
            lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner),
        ),
        st.sampled_from(["token", "a", "password", "1234567"]),
    )
    def test_stays_even_if_it_is_a_short_or_common_secret(self, value, secret):
        wrapped = {secret: value, f"prompt_{secret}s": [value, secret]}
        redacted = Redactor({"A": secret}).redact(wrapped)
        assert list(redacted) == [secret, f"prompt_{secret}s"]
        assert redacted[f"prompt_{secret}s"][1] == "***"

    def test_of_a_log_record_is_masked(self):
        reported = Redactor({"T": SIMPLE, "S": "token"}).redact_shown(
            {SIMPLE: 1, "token": "a token"}
        )
        assert reported == {"***": 1, "token": "a ***"}


class TestAShortOrCommonSecret:
    @pytest.mark.parametrize("secret", ["token", "Password", "changeme", "x" * 20, "7", " a b "])
    def test_is_masked_as_a_whole_value_only(self, secret):
        redactor = Redactor({"A": secret})
        plain = secret.strip()
        value = {"usage": {"prompt_tokens": 3}, "text": f"the {plain} is {plain}s", plain: plain}
        assert redactor.redact(value) == {**value, plain: "***"}
        assert redactor.redact([secret, [plain]]) == ["***", ["***"]]
        assert redactor.redact(plain) == "***"
        assert redactor.redact(f"a {plain}") == f"a {plain}"

    def test_is_masked_as_a_whole_word_in_a_readable_text(self):
        redactor = Redactor({"A": "token", "B": "s3c"})
        text = "token=s3c: no token in prompt_tokens, Tokens, s3cs"
        assert redactor.redact_shown(text) == "***=***: no *** in prompt_tokens, Tokens, s3cs"

    def test_that_became_a_number_is_masked(self):
        assert Redactor({"A": "1234"}).redact({"a": [1234, 12345]}) == {"a": ["***", 12345]}

    def test_has_a_reason(self):
        assert weakness("1234567") == "it has fewer than 8 characters"
        assert weakness(" token \n") == "it has fewer than 8 characters"
        assert weakness("PassWord") == "it is a common word"
        assert weakness("*" * 30) == "it is one character, repeated"
        assert weakness("hunter2-x") is None


SPLIT_BY = ["", " ", ",", "-", "x", "7", "\n", '"', "é", '","', "', '", '\\",\\"', " - "]


class TestATransformedSecret:
    @pytest.mark.parametrize("secret", [SIMPLE, "Hunter2-ToKen", "sk_live.51AbC/+x", "ünter-päß-1"])
    @pytest.mark.parametrize("case", [str, str.upper, str.lower, str.title, str.swapcase])
    @pytest.mark.parametrize("turned", [False, True])
    def test_is_masked(self, secret, case, turned):
        if case is not str and not secret.isascii():
            return  # ß has no single character in upper case
        redactor = Redactor({"A": secret})
        spelled = case(secret)[::-1] if turned else case(secret)
        for between in SPLIT_BY:
            text = f"<{between.join(spelled)}>"
            assert redactor.redact(text) == "<***>", text
            assert redactor.redact({"a": [text]}) == {"a": ["<***>"]}, text
            assert redactor.redact_shown(text) == "<***>"
        characters = ["<", *spelled, ">", 1]
        assert redactor.redact({"a": characters}) == {"a": ["<", "***", ">", 1]}
        assert redactor.redact([json.dumps(characters, ensure_ascii=False)]) == [
            '["<", "***", ">", 1]'
        ]
        assert redactor.redact([str(characters)]) == ["['<', '***', '>', 1]"]

    @pytest.mark.parametrize("between", ["", ":", " ", "-", ",", "%", "\n"])
    def test_in_hexadecimal_pairs_is_masked(self, between):
        spelled = between.join(f"{octet:02X}" for octet in SIMPLE.encode())
        assert Redactor({"A": SIMPLE}).redact([f"<{spelled}>"]) == ["<***>"]

    @given(st.text(alphabet="hunter2-tok", max_size=40), st.sampled_from(SPLIT_BY))
    def test_is_not_redacted_where_a_text_only_looks_similar(self, text, between):
        """What has not all its characters in its order is left."""
        spelled = between.join(text)
        if SIMPLE in text or SIMPLE in text[::-1] or SIMPLE[0::1] in text[::2] + " " + text[1::2]:
            return
        redactor = Redactor({"A": SIMPLE})
        letters = [c for c in spelled.lower() if c.isalnum()]
        wanted = [c for c in SIMPLE if c.isalnum()]
        if not _is_within(wanted, letters) and not _is_within(wanted[::-1], letters):
            assert redactor.redact([spelled]) == [spelled]


def _is_within(wanted, letters):
    """Whether they follow each other there, whatever stands between."""
    rest = iter(letters)
    return all(letter in rest for letter in wanted)


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


def test_of_two_secrets_with_the_same_beginning_the_longer_is_redacted():
    redactor = Redactor({"A": "token-xyz", "B": "token-xyz-and-more"})
    assert redactor.redact("token-xyz-and-more token-xyz") == "*** ***"


def test_a_secret_from_a_file_is_redacted_without_its_newline():
    assert Redactor({"A": "hunter2-token\n"}).redact("Bearer hunter2-token") == "Bearer ***"


def test_a_secret_that_became_a_number_is_redacted():
    redactor = Redactor({"PIN": "12345678"})
    assert redactor.redact({"pin": 12345678, "n": 1, "t": True}) == {
        "pin": "***",
        "n": 1,
        "t": True,
    }


def test_a_secret_of_punctuation_only_is_redacted():
    secret = "€&!€&!€&!"
    spelled = [secret, quote(secret, safe=""), secret[::-1]]
    assert Redactor({"A": secret}).redact(spelled) == ["***", "***", "***"]


def test_values_that_are_not_json_are_redacted_as_far_as_possible():
    thing = object()
    redacted = Redactor({"A": SIMPLE}).redact({"a": thing, "b": (SIMPLE,), 3: {1, 2}})
    assert redacted == {"a": thing, "b": ["***"], 3: {1, 2}}


def test_base64_of_a_short_secret_does_not_damage_other_data():
    innocent = base64.b64encode(bytes(range(256)) * 300).decode()
    assert Redactor({"A": "abc"}).redact({"data": innocent}) == {"data": innocent}


def test_base64_characters_that_share_bits_with_a_secret_are_redacted():
    spelled = base64.b64encode(b"a" + SIMPLE.encode() + b"b").decode()
    redacted = Redactor({"A": SIMPLE}).redact(spelled)
    assert redacted == spelled[0] + "***" + spelled[-1]


@pytest.mark.parametrize("width", [60, 64, 76])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n  "])
@pytest.mark.parametrize("secret", ["hunter2/token+of-some-length", "hunter2-token" * 30])
def test_base64_in_lines_is_redacted_for_any_line_length(width, end, secret):
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


def test_overlapping_secrets_are_redacted_completely():
    redactor = Redactor({"A": "abcdefgh", "B": "fghijklm"})
    assert redactor.redact("<abcdefghijklm>") == "<***>"
    twice = Redactor({"A": "abcdeabc"})
    assert twice.redact("<abcdeabcdeabc>") == "<***>"
    assert twice.redact("<abcdeabcabcdeabc>") in ("<******>", "<***>")


def test_a_secret_used_as_a_host_name_is_redacted_in_lower_case():
    redactor = Redactor({"A": "Hunter2-Token"})
    assert redactor.redact("cannot resolve 'hunter2-token.example'") == (
        "cannot resolve '***.example'"
    )
    assert Redactor({"A": "Abc"}).redact_shown("abc Abc") == "abc ***"  # too short to be sure


def test_a_key_of_many_lines_is_redacted_line_by_line():
    lines = ["-----BEGIN KEY-----", "MIIEvgIBADANBgkqhkiG9w0B", "AQEFAASCBKgwggSkAgEAAoIB", "ab"]
    redactor = Redactor({"KEY": "\n".join([*lines, "-----END KEY-----", ""])})
    assert redactor.redact(lines) == [lines[0], "***", "***", "ab"]
    assert redactor.redact("\n".join([*lines, "-----END KEY-----"])) == "***"


def test_a_megabyte_is_redacted_in_milliseconds():
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
def test_a_megabyte_of_near_matches_is_redacted_just_as_fast(text):
    for secret in (SIMPLE, '"\\hunter2-token', 'hunter2%%%%"'):
        redactor = Redactor({"A": secret})
        assert seconds_of(lambda redactor=redactor: redactor.redact([text]), 0.3) <= 0.3


def test_a_text_is_redacted_before_it_is_cut():
    """Of a secret that a cut goes through, the beginning would stay."""
    redact = Redactor({"A": SIMPLE}).redact
    for before in range(9_980, 10_010):
        reported = describe(ValueError("x" * before + SIMPLE), redact)
        assert "hunt" not in reported["message"]
    for before in range(280, 310):
        body = b"x" * before + SIMPLE.encode()
        answer = HttpResponse(400, {"content-type": "text/plain"}, body, "GET http://h/")
        with pytest.raises(PermanentError) as failed:
            check_status(answer, redact=redact)
        assert "hunt" not in str(failed.value)


def test_settings_name_every_value_that_must_not_be_shown():
    settings = Settings(
        secrets={"A": "secret-a"},
        tokens=("full-token", "reading-token:read"),
        llm_api_key="the-llm-key",
        redis_url="redis://:p%40ss-of-redis-xyz@host:6379/0",
        database_url="postgresql://me:word@host/db",
    )
    redactor = Redactor(settings.sensitive())
    for shown in ("secret-a", "full-token", "reading-token", "the-llm-key", "p@ss-of-redis-xyz",
                  "p%40ss-of-redis-xyz", "me:word"):  # fmt: skip
        assert redactor.redact_shown(f"<{shown}>") == "<***>"
    # A password that is a word is hidden with its user only, or outputs would suffer.
    assert redactor.redact_shown("a word") == "a word"
    for url in ("redis://host", "redis://host:6379/0", "redis://user@host"):
        assert Settings(redis_url=url).sensitive() == {}


@given(st.text(min_size=1).filter(str.strip), st.text(), st.text())
def test_no_secret_is_left_in_any_position(secret, before, after):
    redacted = Redactor({"A": secret}).redact({"a": [before + secret + after, [secret]]})
    assert redacted["a"][1] == ["***"]
    if weakness(secret) is None:
        assert secret not in redacted["a"][0].replace("***", "") or secret in before + after
