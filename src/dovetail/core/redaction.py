"""Removes secrets from what is stored, logged or shown, and limits where a template may use one.

A handler may return a secret in another spelling. `Redactor` writes `***` over these: the secret
in any case, backwards, with a sign between its characters, as a list of characters,
percent-encoded, JSON-escaped or HTML-escaped (each also twice), in hexadecimal digits, and in
base64 of either alphabet, at any alignment, padded or not, in a URL or broken into lines. It cannot
find a secret that was encrypted, hashed or cut to pieces. So a text is redacted before it is cut.

A short secret or a common word occurs in other data too. It is recognised only as a whole value,
and in a text for people as a whole word. Keys of an output are never rewritten: an output with a
secret in a key is refused.

A template may only name a secret, `secrets.NAME`, in a config field that takes secrets: a caller
who may run workflows must not be able to spell a secret differently. The validation checks it, and
a worker checks it again before it renders: it also gets older definitions and forged messages.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson

from dovetail.core.errors import SecretInKey, format_path, shown

MASK = "***"

MIN_SECRET_CHARS = 8
"""Characters of a secret that is searched for anywhere; a shorter one may be part of any word."""
COMMON = frozenset(
    "administrator anything api-key api_key changeme change-me change_me completed default "  # noqa: SIM905
    "dovetail example letmein localhost passphrase password passwort placeholder postgres "
    "postgresql qwertyui qwertyuiop rabbitmq something testing undefined username whatever "
    "12345678 123456789 1234567890".split()
)
"""Words of that length that occur in outputs for other reasons, in any case."""

# Fewer characters than these are likely to occur by chance and would damage innocent data.
MIN_BASE64_CHARS = 6
MIN_LINE_CHARS = 16
MIN_HALF_CHARS = 6
MAX_NEEDLE_CHARS = 24
"""Longer needles are slower to find, and two must fit into one line of broken base64."""
MAX_GAP_CHARS = 8
"""Signs between the characters of a split secret, such as `", "` in JSON, escaped."""

_PLAIN_RUN = re.compile("[A-Za-z0-9]+")
_PLAIN = re.compile("[a-z0-9]")
_NOT_PLAIN = bytes(set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789"))
_JSON_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_JSON_BREAK = re.compile(r"\\[bfnrt]")
_HTML_NAMES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_BASE64_SIGNS = {"+": r"(?:[+-]|%(?:25)?2[Bb]|\\u002[Bb])", "/": r"(?:\\?/|_|%(?:25)?2[Ff])"}
_LINE_END = r"(?:\r?\n[ \t]{0,8}|\\r\\n|\\n)?"
_BASE64_BEFORE = re.compile(r"[A-Za-z0-9+/_-]")
_BASE64_BEHIND = re.compile(r"[A-Za-z0-9+/_-]?(?:=|%(?:25)?3[Dd]|\\u003[Dd]){0,2}")


def weakness(secret: str) -> str | None:
    """Why a secret can be recognised as a whole value only; None if it is found anywhere."""
    plain = secret.strip()
    if len(plain) < MIN_SECRET_CHARS:
        return f"it has fewer than {MIN_SECRET_CHARS} characters"
    if plain.lower() in COMMON:
        return "it is a common word"
    return "it is one character, repeated" if len(set(plain)) == 1 else None


class _Spelling(NamedTuple):
    """A pattern, and pieces of text one of which each match contains.

    Searching for the pieces first is a hundred times faster than the pattern. It also works in
    serialised JSON: the pieces have no character that is ever escaped.
    """

    needles: tuple[str, ...]
    pattern: re.Pattern[str]


class _Folded(NamedTuple):
    """A secret, or its reverse, in lower case: found in any case."""

    text: str
    needle: str
    pattern: re.Pattern[str]


class _View:
    """A text in the forms that are searched."""

    __slots__ = ("folded", "squeezed", "strided", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.folded = _fold(text)
        self.squeezed = _squeezed(self.folded)
        # A secret with one sign between its characters is every second character.
        self.strided = (self.folded[::2], self.folded[1::2])


class Redactor:
    """Replaces all known spellings of the secrets in a JSON value, but never in a key."""

    __slots__ = (
        "_base64",
        "_folded",
        "_hex",
        "_is_active",
        "_needles",
        "_numbers",
        "_quoted",
        "_shortest",
        "_squeezed_needles",
        "_strided_needles",
        "_whole",
        "_words",
    )

    def __init__(self, secrets: Mapping[str, str]) -> None:
        known = {form for secret in secrets.values() for form in _known(secret) if form}
        strong = sorted(one for one in known if weakness(one) is None)
        self._whole = frozenset(one for one in known if weakness(one) is not None)
        self._words = _words(self._whole)
        self._numbers = frozenset(one for one in known if one.lstrip("-").isdecimal())
        self._quoted = tuple(sorted({_json(one) for one in self._whole} | self._numbers))
        self._folded = tuple(
            _as_text(form) for secret in strong for form in dict.fromkeys((secret, secret[::-1]))
        )
        self._hex = tuple(map(_as_hex, strong))
        self._base64 = tuple(one for secret in strong for one in _as_base64(secret))
        needles = dict.fromkeys(n for one in self._base64 for n in one.needles)
        self._needles = tuple(needles)
        self._squeezed_needles = tuple(
            dict.fromkeys(
                [one.needle.encode() for one in self._folded]
                + [one.needles[0].encode() for one in self._hex]
            )
        )
        self._strided_needles = tuple(dict.fromkeys(one.needle for one in self._folded))
        self._shortest = min(map(len, strong), default=0)
        self._is_active = bool(known)

    def __bool__(self) -> bool:
        """Whether there is anything to redact."""
        return self._is_active

    def redact(self, value: Any) -> Any:
        """The value without secrets; the same object if it has none.

        Raises `SecretInKey` if a key has one.
        """
        if not self._is_active:
            return value
        if isinstance(value, str):
            return MASK if value in self._whole else self._text(value)
        if self._is_clean(value):
            return value
        walked = self._walk(value, ("output",))
        return value if walked == value else walked

    def redact_shown(self, value: Any) -> Any:
        """The same for people: a text or a value of a log, an error, a dead letter.

        Short and common secrets are masked where they are whole words, and keys are rewritten.
        """
        if not self._is_active:
            return value
        if isinstance(value, str):
            text = self._text(value)
            return text if self._words is None else self._words.sub(MASK, text)
        if isinstance(value, Mapping):
            return {
                self._text(key) if isinstance(key, str) else key: self.redact_shown(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return self._characters([self.redact_shown(item) for item in value])
        return self._number(value)

    def _is_clean(self, value: Any) -> bool:
        """A fast check by serialising and searching, which is enough for most outputs."""
        try:
            text = orjson.dumps(value).decode()
        except (TypeError, ValueError):  # not plain JSON: it must be walked
            return False
        if any(quoted in text for quoted in self._quoted) or self._may_have(text):
            return False
        # An escaped line break between the characters of a secret is one sign.
        return not ("\\" in text and self._may_have(_JSON_BREAK.sub(" ", text)))

    def _may_have(self, text: str) -> bool:
        if not self._shortest:
            return False
        for needle in self._needles:
            if needle in text:
                return True
        folded = text.lower()
        squeezed = _squeezed(folded)
        for octets in self._squeezed_needles:
            if octets in squeezed:
                return True
        strided = f"{folded[::2]}\0{folded[1::2]}"
        return any(needle in strided for needle in self._strided_needles)

    def _walk(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, str):
            return MASK if value in self._whole else self._text(value)
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and self._spans(key):
                    raise SecretInKey(
                        f"{format_path(path)} has a key with a secret in it, and keys are never "
                        "rewritten; so it is not stored: put it into a value, which is masked, or "
                        "leave it out"
                    )
            return {key: self._walk(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            walked = [self._walk(item, (*path, at)) for at, item in enumerate(value)]
            return self._characters(walked)
        return self._number(value)

    def _number(self, value: Any) -> Any:
        # A handler may turn a PIN into a number.
        if isinstance(value, int) and not isinstance(value, bool) and str(value) in self._numbers:
            return MASK
        return value

    def _characters(self, items: list[Any]) -> list[Any]:
        """The list with the characters of a secret, one by one, masked."""
        if not self._shortest or len(items) < self._shortest:
            return items
        text = "".join(one if isinstance(one, str) and len(one) == 1 else "\0" for one in items)
        left, done = [], 0
        for start, end in _united(self._spans(text)):
            left += [*items[done:start], MASK]
            done = end
        return [*left, *items[done:]] if left else items

    def _text(self, text: str) -> str:
        spans = self._spans(text)
        return _masked(text, spans) if spans else text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        if not self._shortest or len(text) < self._shortest:
            return []
        spans: list[tuple[int, int]] = []
        for one in self._base64:
            if any(needle in text for needle in one.needles):
                spans += _base64_spans(one.pattern, text)
        view = _View(text)
        for folded in self._folded:
            if folded.needle.encode() in view.squeezed:
                spans += _found(folded.pattern, view.folded)
                spans += _apart(folded.text, view)
            if any(folded.needle in every_second for every_second in view.strided):
                spans += _every_second(folded.text, view)
        for spelled in self._hex:
            if spelled.needles[0].encode() in view.squeezed:
                spans += _found(spelled.pattern, view.folded)
        return spans


def _found(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """All matches, overlapping ones too."""
    found = pattern.search(text)
    while found is not None:
        yield found.span()
        found = pattern.search(text, found.start() + 1)


def _base64_spans(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    for start, end in _found(pattern, text):
        # The neighbours share bits with the secret's first and last byte: take them along.
        before = start > 0 and _BASE64_BEFORE.match(text, start - 1) is not None
        behind = _BASE64_BEHIND.match(text, end)
        yield start - before, behind.end() if behind else end


def _every_second(secret: str, view: _View) -> Iterator[tuple[int, int]]:
    """Where the secret occurs with one sign between its characters."""
    for phase, text in enumerate(view.strided):
        at = text.find(secret)
        while at >= 0:
            yield phase + 2 * at, phase + 2 * (at + len(secret)) - 1
            at = text.find(secret, at + 1)


def _apart(secret: str, view: _View) -> Iterator[tuple[int, int]]:
    """Where the secret occurs with the same few signs between its characters."""
    plain = [at for at, char in enumerate(secret) if _PLAIN.fullmatch(char)]
    if len(plain) < 2:
        return
    first, second = plain[:2]
    steps = second - first
    wanted = "".join(secret[at] for at in plain).encode()
    at = view.squeezed.find(wanted)
    if at < 0:
        return
    offsets = [found.start() for found in _PLAIN.finditer(view.folded)]
    while at >= 0:
        start = offsets[at]
        gap, rest = divmod(offsets[at + 1] - start - steps, steps)
        if not rest and 2 <= gap <= MAX_GAP_CHARS:
            between = view.folded[start + 1 : start + 1 + gap]
            begin = start - first * (1 + gap)
            spelled = between.join(secret)
            if begin >= 0 and view.folded.startswith(spelled, begin):
                yield begin, begin + len(spelled)
        at = view.squeezed.find(wanted, at + 1)


def _united(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge overlapping spans, so that no part of a secret stays visible."""
    spans.sort()
    at = 0
    while at < len(spans):
        start, end = spans[at]
        at += 1
        while at < len(spans) and spans[at][0] < end:
            end = max(end, spans[at][1])
            at += 1
        yield start, end


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    pieces, done = [], 0
    for start, end in _united(spans):
        pieces += [text[done:start], MASK]
        done = end
    return "".join([*pieces, text[done:]])


def _known(secret: str) -> Iterator[str]:
    """The secret, and what people and programs usually make of it."""
    plain = secret.strip()
    yield secret
    yield plain  # a secret from a file often ends in a newline that its user strips
    lines = plain.splitlines()
    if len(lines) > 1:  # a key in PEM form is often shown or sent line by line
        yield from (
            line for line in lines if len(line) >= MIN_LINE_CHARS and not line.startswith("-----")
        )


def _fold(text: str) -> str:
    """In lower case, with each character at the same offset."""
    folded = text.lower()
    return folded if len(folded) == len(text) else "".join(map(_fold_one, text))


def _fold_one(char: str) -> str:
    folded = char.lower()
    return folded if len(folded) == 1 else char


def _squeezed(folded: str) -> bytes:
    """Only letters and digits."""
    return folded.encode("utf-8", "replace").translate(None, _NOT_PLAIN)


def _words(whole: frozenset[str]) -> re.Pattern[str] | None:
    if not whole:
        return None
    longest_first = sorted(whole, key=lambda one: (-len(one), one))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


def _json(text: str) -> str:
    try:
        return orjson.dumps(text).decode()
    except TypeError:  # half a character, which no JSON can hold
        return text


def _as_text(secret: str) -> _Folded:
    needle = max(_PLAIN_RUN.findall(secret), key=len, default="")[:MAX_NEEDLE_CHARS]
    pattern = "".join(_any_of(_forms(char)) for char in secret)
    return _Folded(_fold(secret), needle.lower(), re.compile(pattern))


def _as_hex(secret: str) -> _Spelling:
    """In hexadecimal digits, with or without a sign between the pairs."""
    octets = [f"{octet:02x}" for octet in secret.encode("utf-8", "replace")]
    needle = "".join(octets)[:MAX_NEEDLE_CHARS]
    return _Spelling((needle,), re.compile("%?" + "[^0-9a-z]?".join(octets)))


def _as_base64(secret: str) -> Iterator[_Spelling]:
    for form in _base64_forms(secret.encode("utf-8", "replace")):
        signs = (_BASE64_SIGNS.get(char, char) for char in form)
        run = max(_PLAIN_RUN.findall(form), key=len, default="")
        half = min(len(run) // 2, MAX_NEEDLE_CHARS)
        # If a line ends within one of the two needles, the other is whole.
        needles = (run[:half], run[half : 2 * half]) if half >= MIN_HALF_CHARS else (run,)
        yield _Spelling(needles, re.compile(_LINE_END.join(signs)))


@lru_cache(512)
def _forms(char: str) -> tuple[str, ...]:
    """The spellings of a character in lower case: raw, percent-encoded, form-encoded, JSON-escaped
    and HTML-escaped, once and twice. The encodings of its two cases differ."""
    if _PLAIN_RUN.fullmatch(char):
        return (char.lower(),)
    found: set[str] = set()
    for cased in {char, char.lower(), char.upper()}:
        if len(cased) == 1:
            found |= _encoded(cased)
    # Longest first, so that an escaped backslash is not taken for two.
    return tuple(sorted({_fold(form) for form in found}, key=lambda form: (-len(form), form)))


def _encoded(char: str) -> set[str]:
    percent = "".join(f"%{octet:02x}" for octet in char.encode("utf-8", "replace"))
    twice = percent.replace("%", "%25")
    units = char.encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    found = {char, percent, twice, escaped}
    if char == " ":
        found.add("+")
    elif char in '"\\/':
        found.add("\\" + char)
    elif char in _JSON_SHORT:
        found.add(_JSON_SHORT[char])
    found |= {form.replace("\\", "\\\\") for form in found if form != char}
    if char in '"\\':
        found.add(orjson.dumps(orjson.dumps(char).decode()[1:-1]).decode()[1:-1])
    if char in _HTML_NAMES:
        number = ord(char)
        found |= {f"&{name};" for name in (_HTML_NAMES[char], f"#{number}", f"#0{number}")}
        found.add(f"&#x{number:x};")
    return found


def _any_of(forms: tuple[str, ...]) -> str:
    escaped = [re.escape(form) for form in forms]
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


def _base64_forms(secret: bytes) -> list[str]:
    """The secret inside base64 at each of the three alignments."""
    found = set()
    for shift in range(3):
        padded = b"\0" * shift + secret
        first = (shift * 8 + 5) // 6  # the characters that the secret alone decides
        last = len(padded) * 8 // 6
        form = b64encode(padded).decode()[first:last]
        if len(form) >= MIN_BASE64_CHARS:
            found.add(form)
    return sorted(found)


SecretFields = bool | Collection[str]
"""Where a config may have secrets: True, anywhere; a collection: these fields; False, nowhere."""

PLAIN_ONLY = (
    "a secret may stand only as its plain name, alone or inside a text: {{ secrets.NAME }} or "
    "'Bearer {{ secrets.NAME }}'; no filter, operator, condition, item or attribute"
)
PLAIN_BESIDE = (
    "beside a secret only plain expressions may stand, such as {{ params.user }}: no filter, "
    "operator or condition; calculate the value in a node before, and read its output"
)


@runtime_checkable
class KnowsSecretFields(Protocol):
    """Known handlers that also say which of them take secrets."""

    def secret_fields(self, name: str) -> SecretFields | None:
        """Where the config of a handler may have secrets; None if only the handler is known."""
        ...


def misplaced(handler: str, fields: SecretFields | None, field: object) -> str | None:
    """Why a secret is not allowed in this field of the handler's config; None if it is."""
    if fields is True:
        return None
    name = shown(handler)
    if fields is None:
        return (
            f"it is not known whether the handler {name} takes secrets, so it gets none: the "
            "worker that announced it does not say so; start it with this version of dovetail"
        )
    if fields is False or not fields:
        return (
            f"the handler {name} takes no secrets; call_external_service does, and a handler of "
            "your own that declares it: @handler(…, secrets=True)"
        )
    if field in fields:
        return None
    allowed = ", ".join(sorted(fields))
    return f"{name} takes secrets in {allowed} of its config, not in {shown(str(field))}"
