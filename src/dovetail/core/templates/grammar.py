"""Cuts a template's text into plain text and expressions, and parses an expression.

The grammar is Jinja's own: its `Parser` builds the trees. The tokens are made here. Jinja's lexer
converts literals before they can be refused (a number of 5,000 digits is an exception, `'\\d'` a
warning), rewrites the line ends of plain text, and has lines but no columns. A token's `lineno` is
its offset in the text. So each node of the tree and each error has its position.
"""

from __future__ import annotations

import re
import unicodedata
from copy import copy
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateSyntaxError
from jinja2.lexer import Token, TokenStream, operators
from jinja2.nodes import Expr
from jinja2.parser import Parser

from dovetail.core.values import MAX_INT

# A bracket costs Jinja's recursive parser some fourteen frames, a prefix one. Together they stay
# far from Python's limit of 1,000, so that refusal does not depend on the caller's depth.
MAX_BRACKETS = 24
MAX_PREFIXES = 100
# Jinja's parser takes some ten microseconds for a token: 16 KiB of `a~a~a~…` would be 0.1 s.
MAX_TOKENS = 2000

KEYWORDS = frozenset(
    "true false none True False None and or not in is if else".split()  # noqa: SIM905
)

# A parser to copy, because a new one first tokenizes its own empty text.
_PARSER = Parser(Environment(autoescape=False), "")  # noqa: S701 - it parses, nothing is rendered

_OPENING = re.compile(r"\{[{%#]")

_DIGITS = r"[0-9]++(?:_[0-9]++)*+"
_TOKEN = re.compile(
    rf"""
      (?P<space>\s++)
    | (?P<name>[^\W\d]\w*+)
    | (?P<float>(?<!\.){_DIGITS}(?:\.{_DIGITS}(?:[eE][+-]?{_DIGITS})?|[eE][+-]?{_DIGITS}))
    | (?P<integer>0[xX](?:_?[0-9a-fA-F])++|0[oO](?:_?[0-7])++|0[bB](?:_?[01])++|{_DIGITS})
    | (?P<string>'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+")
    | (?P<operator>//|\*\*|==|!=|>=|<=|[-+/*%~\[\](){{}}><=.:|,;])
    """,
    re.VERBOSE | re.DOTALL,
)

_CLOSING = {"(": ")", "[": "]", "{": "}"}

_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|N\{(?P<N>[^}]*)\}|(?P<octal>[0-7]{1,3})|(?P<one>.))",
    re.DOTALL,
)
_ESCAPED = {
    "\n": "", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


_WORD = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+"|\w++|[^\w\s]""", re.DOTALL
)


class TemplateRefused(Exception):
    """A template that is not allowed in a definition.

    `code` is `template_syntax`, `template_forbidden` or `too_large`. `offset` is the character in
    the text, from 0, if it is known.
    """

    def __init__(self, code: str, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Span:
    """One `{{ … }}` of a text: its content and its tokens."""

    source: str
    offset: int
    end: int
    tokens: tuple[Token, ...]


def cut(text: str) -> list[str | Span]:
    """The text's parts in order. Empty text is left out; all other text is kept unchanged."""
    parts: list[str | Span] = []
    at = tokens = 0
    strip = False  # the expression before ended in `-}}`
    while (opening := _OPENING.search(text, at)) is not None:
        start = opening.start()
        if text[start + 1] != "{":
            raise _statement(text, start)
        inside = start + 2
        plain = text[at:start]
        if strip:
            plain = plain.lstrip()
        if text.startswith(("-", "+"), inside):  # `+` keeps whitespace, which is the default here
            if text[inside] == "-":
                plain = plain.rstrip()
            inside += 1
        if plain:
            parts.append(plain)
        span, at, strip = _expression(text, start, inside)
        parts.append(span)
        tokens += len(span.tokens)
        if tokens > MAX_TOKENS:
            raise too_long(start)
    rest = text[at:].lstrip() if strip else text[at:]
    if rest:
        parts.append(rest)
    return parts


def weigh(text: str) -> int:
    """About how many words and signs its expressions have; a hundred times faster than parsing."""
    spans = [piece.partition("}}")[0] for piece in text.split("{{")[1:]]
    return 4 * len(spans) + sum(len(_WORD.findall(span)) for span in spans)


def parse(span: Span) -> Expr:
    """The tree of one expression, built by Jinja's parser. Nothing is evaluated."""
    parser = copy(_PARSER)
    end = Token(span.end, "variable_end", "}}")
    try:
        parser.stream = TokenStream(iter((*span.tokens, end)), None, None)
        tree = parser.parse_tuple(with_condexpr=True)
        parser.stream.expect("variable_end")
    except TemplateSyntaxError as error:
        reason = str(error.message).replace("end of print statement", "}}")
        raise TemplateRefused("template_syntax", reason, error.lineno) from None
    return tree


def too_deep(offset: int) -> TemplateRefused:
    return TemplateRefused(
        "template_forbidden",
        "the expression is nested too deeply; split it over several nodes or keys",
        offset,
    )


def too_long(offset: int) -> TemplateRefused:
    return TemplateRefused(
        "too_large", f"the template has more than {MAX_TOKENS:,} words and signs", offset
    )


def place(text: str, offset: int) -> str:
    """A position for people: `at character 4`, with the line if there are several."""
    before = text[:offset]
    column = offset - (before.rfind("\n") + 1) + 1
    if "\n" not in text.rstrip("\n"):
        return f"at character {column}"
    return f"at line {before.count(chr(10)) + 1}, character {column}"


def _expression(text: str, start: int, at: int) -> tuple[Span, int, bool]:
    """One expression from `at`; also the offset after it, and whether to strip the text there."""
    inside = at
    tokens: list[Token] = []
    brackets: list[str] = []
    prefixes = 0
    while True:
        if not brackets:
            strip = text.startswith("-}}", at)
            if strip or text.startswith("}}", at):
                if not tokens:
                    raise TemplateRefused("template_syntax", "the expression is empty", start)
                span = Span(text[inside:at].strip(), start, at, tuple(tokens))
                return span, at + (3 if strip else 2), strip
        match = _TOKEN.match(text, at)
        if match is None:
            raise _stuck(text, start, at)
        kind = match.lastgroup or ""
        found = match.group()
        if kind == "operator":
            if found in _CLOSING:
                brackets.append(_CLOSING[found])
                if len(brackets) > MAX_BRACKETS:
                    raise too_deep(start)
            elif found in ")]}":
                _close(brackets, found, at)
            elif found in "+-" and tokens and tokens[-1].type in ("add", "sub"):
                prefixes += 1
            tokens.append(Token(at, operators[found], found))
        elif kind == "name":
            prefixes += found in ("not", "else")
            if not found.isidentifier():
                raise TemplateRefused("template_syntax", f"{found!r} is not a name", at)
            tokens.append(Token(at, "name", found))
        elif kind != "space":
            tokens.append(Token(at, kind, _literal(kind, found, at)))
        if prefixes > MAX_PREFIXES:
            raise too_deep(start)
        if len(tokens) > MAX_TOKENS:
            raise too_long(start)
        at = match.end()


def _close(brackets: list[str], found: str, at: int) -> None:
    if not brackets:
        raise TemplateRefused("template_syntax", f"unexpected '{found}'", at)
    if (expected := brackets.pop()) != found:
        raise TemplateRefused("template_syntax", f"expected '{expected}', got '{found}'", at)


def _stuck(text: str, start: int, at: int) -> TemplateRefused:
    """No token begins here: the text ends, a string is not closed, or a character is unknown."""
    if at >= len(text):
        return TemplateRefused("template_syntax", "'{{' is never closed with '}}'", start)
    if text[at] in "'\"":
        return TemplateRefused("template_syntax", "the quoted text never ends", at)
    return TemplateRefused("template_syntax", f"unexpected character {text[at]!r}", at)


def _statement(text: str, start: int) -> TemplateRefused:
    opening = text[start : start + 2]
    what = "statements" if opening == "{%" else "comments"
    return TemplateRefused(
        "template_forbidden",
        f"'{opening}' begins one of Jinja's {what}, and only {{{{ expressions }}}} are allowed; "
        f"for the characters themselves write {{{{ '{opening}' }}}}",
        start,
    )


def _literal(kind: str, found: str, at: int) -> Any:
    match kind:
        case "integer":
            return _integer(found.replace("_", ""), at)
        case "float":
            number = float(found.replace("_", ""))
            if number in (float("inf"), float("-inf")):
                raise TemplateRefused("template_forbidden", "the number is too large", at)
            return number
        case _:
            return _unescape(found[1:-1], at)


def _integer(digits: str, at: int) -> int:
    decimal = digits.isdigit()
    if decimal and digits[0] == "0" and digits.strip("0"):
        raise TemplateRefused("template_syntax", "a number may not begin with 0", at)
    # 66 characters hold any 64-bit number in base 2; Python itself refuses 4,300 decimal digits.
    number = int(digits, 10 if decimal else 0) if len(digits) <= 66 else MAX_INT + 1
    if number > MAX_INT:
        raise TemplateRefused("template_forbidden", "the number does not fit in 64 bits", at)
    return number


def _unescape(text: str, at: int) -> str:
    """Python's escapes, as in Jinja. An unknown one stays as it is written."""
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        kind = match.lastgroup or ""
        code = match.group(kind or 0)
        match kind:
            case "one" if code in "xuUN":
                raise TemplateRefused("template_syntax", f"'\\{code}' is not complete", at)
            case "one":
                return _ESCAPED.get(code, "\\" + code)
            case "N":
                try:
                    return unicodedata.lookup(code)
                except KeyError:
                    raise TemplateRefused(
                        "template_syntax", "no character has the name in '\\N{…}'", at
                    ) from None
        number = int(code, 8 if kind == "octal" else 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise TemplateRefused(
                "template_syntax",
                "the escape is half a character or none; write the character itself",
                at,
            )
        return chr(number)

    return _ESCAPE.sub(one, text)
