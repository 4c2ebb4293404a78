"""The one place that takes secrets out of what is stored, logged or shown.

A secret may come back changed: inside a URL, inside a JSON text, inside a Basic header. The
redactor knows those spellings (raw, percent-encoded, JSON-escaped, base64 at any alignment)
and writes `***` over them. It must not know what a secret is for or where a value goes next.
What it cannot see: a secret that was encrypted, hashed, cut to pieces or encoded twice.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

MASK = "***"

# Fewer base64 characters than this are likely to occur by chance and would damage innocent data.
SHORTEST_BASE64 = 6

_UNRESERVED = "A-Za-z0-9._~-"
_PLAIN_RUN = re.compile(f"[{_UNRESERVED}]+")
_JSON_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _Spelling(NamedTuple):
    """A pattern, and a piece of text without which it cannot match.

    Looking for the piece first is a hundred times faster than the pattern, and it looks the
    same inside serialised JSON: it has no character that is ever escaped.
    """

    needle: str
    pattern: re.Pattern[str]


class Redactor:
    """Replaces every known spelling of the secrets, in any JSON value, keys included."""

    __slots__ = ("_needles", "_numbers", "_spellings")

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # A secret read from a file often ends in a newline that its user strips.
        known = {form for secret in secrets.values() for form in (secret, secret.strip()) if form}
        # Longest first: of two secrets that begin alike the longer must win, or its tail stays.
        ordered = sorted(known, key=lambda secret: (-len(secret), secret))
        self._spellings = tuple(one for secret in ordered for one in _spellings(secret))
        self._needles = tuple(dict.fromkeys(one.needle for one in self._spellings))
        self._numbers = frozenset(secret for secret in ordered if secret.lstrip("-").isdecimal())

    def __bool__(self) -> bool:
        """Whether there is anything to redact."""
        return bool(self._spellings)

    def redact(self, value: Any) -> Any:
        """The value without secrets; the very same object if there were none in it."""
        if not self._spellings:
            return value
        if isinstance(value, str):
            return self._text(value)
        try:
            text = orjson.dumps(value).decode()
        except (TypeError, ValueError):  # not plain JSON, so it has to be looked at piece by piece
            return self._walk(value)
        # Serialising and searching cost a fraction of a walk in Python; most outputs end here.
        for needle in self._needles:
            if needle in text:
                return self._walk(value)
        return value

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._walk(key): self._walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item) for item in value]
        # A PIN that a handler turned into a number is still the PIN.
        if isinstance(value, int) and not isinstance(value, bool) and str(value) in self._numbers:
            return MASK
        return value

    def _text(self, text: str) -> str:
        for needle, pattern in self._spellings:
            if needle in text:
                text = pattern.sub(MASK, text)
        return text


def _spellings(secret: str) -> Iterator[_Spelling]:
    runs = _PLAIN_RUN.findall(secret)
    pattern = "".join(_any_of(_forms(char)) for char in secret)
    yield _Spelling(max(runs, key=len, default=""), re.compile(pattern))
    for form in _base64_forms(secret.encode("utf-8", "replace")):
        # The neighbours share bits with the secret's first and last byte: take them along.
        around = f"[A-Za-z0-9+/_-]?{re.escape(form)}[A-Za-z0-9+/_-]?={{0,2}}"
        yield _Spelling(form, re.compile(around))


def _forms(char: str) -> list[str]:
    """A character raw, percent-encoded, form-encoded and JSON-escaped."""
    if _PLAIN_RUN.fullmatch(char):
        return [char]
    percent = "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "replace"))
    units = char.encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    upper = "".join(f"\\u{units[at : at + 4].upper()}" for at in range(0, len(units), 4))
    found = {char, percent, percent.lower(), escaped, upper}
    if char == " ":
        found.add("+")
    elif char in '"\\/':
        found.add("\\" + char)
    elif char in _JSON_SHORT:
        found.add(_JSON_SHORT[char])
    # Longest first, so that an escaped backslash is not taken for two.
    return sorted(found, key=lambda form: (-len(form), form))


def _any_of(forms: list[str]) -> str:
    escaped = [re.escape(form) for form in forms]
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


def _base64_forms(secret: bytes) -> list[str]:
    """What the secret looks like inside base64 at each of the three alignments."""
    found = set()
    for shift in range(3):
        padded = b"\0" * shift + secret
        first = (shift * 8 + 5) // 6  # the characters that the secret alone decides
        last = len(padded) * 8 // 6
        for encode in (b64encode, urlsafe_b64encode):
            form = encode(padded).decode()[first:last]
            if len(form) >= SHORTEST_BASE64:
                found.add(form)
    return sorted(found, key=lambda form: (-len(form), form))
