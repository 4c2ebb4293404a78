"""The one place that takes secrets out of what is stored, logged or shown.

A secret may come back changed: inside a URL, inside a JSON text, inside a Basic header. The
redactor knows those spellings and writes `***` over them: raw, in lower case as host names are,
percent-encoded, JSON-escaped and HTML-escaped, each also twice over, in hexadecimal digits, and
base64 of either alphabet, at any alignment, padded or not, in a URL or broken into lines. It must
not know what a secret is for or where a value goes next. What it cannot see: a secret that was
encrypted, hashed or cut to pieces; so a text is redacted before it is cut, never after.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

MASK = "***"

# Fewer characters than these are likely to occur by chance and would damage innocent data.
SHORTEST_BASE64 = 6
SHORTEST_LOWER_CASE = 8
SHORTEST_HEX = 12
SHORTEST_LINE = 16
SHORTEST_HALF = 6
LONGEST_NEEDLE = 24
"""Longer ones are slower to look for, and two are to fit into a line of broken base64."""

_PLAIN_RUN = re.compile("[A-Za-z0-9]+")
_JSON_SHORT = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_HTML_NAMES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_BASE64_SIGNS = {"+": r"(?:[+-]|%(?:25)?2[Bb]|\\u002[Bb])", "/": r"(?:\\?/|_|%(?:25)?2[Ff])"}
_LINE_END = r"(?:\r?\n[ \t]{0,8}|\\r\\n|\\n)?"
_BASE64_BEFORE = re.compile(r"[A-Za-z0-9+/_-]")
_BASE64_BEHIND = re.compile(r"[A-Za-z0-9+/_-]?(?:=|%(?:25)?3[Dd]|\\u003[Dd]){0,2}")


class _Spelling(NamedTuple):
    """A pattern, and pieces of text without any of which it cannot match.

    Looking for the pieces first is a hundred times faster than the pattern, and it looks the
    same inside serialised JSON: they have no character that is ever escaped.
    """

    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    is_base64: bool = False


class Redactor:
    """Replaces every known spelling of the secrets, in any JSON value, keys included."""

    __slots__ = ("_needles", "_numbers", "_spellings")

    def __init__(self, secrets: Mapping[str, str]) -> None:
        known = sorted({form for secret in secrets.values() for form in _known(secret) if form})
        # As the host of a URL; a short one would be found in innocent words.
        hosts = sorted({one.lower() for one in known if len(one) >= SHORTEST_LOWER_CASE})
        self._spellings = (
            *(one for secret in known for one in _spellings(secret)),
            *(_as_text(host) for host in hosts if host not in known),
        )
        self._needles = tuple(dict.fromkeys(n for one in self._spellings for n in one.needles))
        self._numbers = frozenset(secret for secret in known if secret.lstrip("-").isdecimal())

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
        spans = [
            span
            for one in self._spellings
            if any(needle in text for needle in one.needles)
            for span in _spans(one, text)
        ]
        return _masked(text, spans) if spans else text


def _spans(spelling: _Spelling, text: str) -> Iterator[tuple[int, int]]:
    """Where it stands, also where one begins inside another."""
    found = spelling.pattern.search(text)
    while found is not None:
        start, end = found.span()
        if spelling.is_base64:
            # The neighbours share bits with the secret's first and last byte: take them along.
            start -= start > 0 and _BASE64_BEFORE.match(text, start - 1) is not None
            behind = _BASE64_BEHIND.match(text, end)
            end = behind.end() if behind else end
        yield start, end
        found = spelling.pattern.search(text, found.start() + 1)


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    """Of spans that overlap one mask is made: no secret keeps an end that another one hid."""
    pieces, done = [], -1
    for start, end in sorted(spans):
        if start >= done:
            pieces += [text[max(done, 0) : start], MASK]
        done = max(done, end)
    return "".join([*pieces, text[done:]])


def _known(secret: str) -> Iterator[str]:
    """What to look for: the secret, and what people and programs usually make of it."""
    plain = secret.strip()
    yield secret
    yield plain  # one that was read from a file often ends in a newline that its user strips
    lines = plain.splitlines()
    if len(lines) > 1:  # a key in PEM form is often shown or sent line by line
        yield from (
            line for line in lines if len(line) >= SHORTEST_LINE and not line.startswith("-----")
        )


def _as_text(secret: str) -> _Spelling:
    needle = max(_PLAIN_RUN.findall(secret), key=len, default="")
    pattern = "".join(_any_of(_forms(char)) for char in secret)
    return _Spelling((needle[:LONGEST_NEEDLE],), re.compile(pattern))


def _spellings(secret: str) -> Iterator[_Spelling]:
    yield _as_text(secret)
    octets = secret.encode("utf-8", "replace")
    spelled = [octets.hex()] if len(octets) * 2 >= SHORTEST_HEX else []
    spelled.append("".join(f"%{octet:02x}" for octet in octets))
    for form in spelled:
        for cased in dict.fromkeys((form, form.upper())):
            yield _Spelling((cased[:LONGEST_NEEDLE],), re.compile(re.escape(cased)))
    for form in _base64_forms(octets):
        signs = (_BASE64_SIGNS.get(char, char) for char in form)
        run = max(_PLAIN_RUN.findall(form), key=len, default="")
        half = min(len(run) // 2, LONGEST_NEEDLE)
        # A line that ends within one of the two leaves the other whole.
        needles = (run[:half], run[half : 2 * half]) if half >= SHORTEST_HALF else (run,)
        yield _Spelling(needles, re.compile(_LINE_END.join(signs)), is_base64=True)


def _forms(char: str) -> list[str]:
    """A character raw, percent-encoded, form-encoded, JSON- and HTML-escaped, once and twice."""
    if _PLAIN_RUN.fullmatch(char):
        return [char]
    percent = "".join(f"%{octet:02X}" for octet in char.encode("utf-8", "replace"))
    twice = percent.replace("%", "%25")
    units = char.encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    upper = "".join(f"\\u{units[at : at + 4].upper()}" for at in range(0, len(units), 4))
    found = {char, percent, percent.lower(), twice, twice.lower(), escaped, upper}
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
        found |= {f"&#x{number:x};", f"&#x{number:X};"}
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
        form = b64encode(padded).decode()[first:last]
        if len(form) >= SHORTEST_BASE64:
            found.add(form)
    return sorted(found)
