"""Checks all templates of a definition and finds what they read, with few of them parsed.

The templates of a large definition mostly differ only in names, numbers and quoted texts. So an
expression is reduced to its shape (`n17.total > 5` to `v0.k > 1`), each shape is parsed once, and
the names are put back. A plain path is not parsed at all. Everything that decides whether a
template is allowed (keywords, escapes, braces, underscores) stays in the shape, or the expression
has none. A refused template is parsed as it is written, so that messages are about the real text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dovetail.core.templates import (
    MAX_TEMPLATE_SIZE,
    ROOTS,
    Read,
    Template,
    TemplateRefused,
    parse_condition,
    parse_template,
)
from dovetail.core.templates.compiler import DEFAULT, FILTER_NAMES, TEST_NAMES
from dovetail.core.templates.filters import FILTERS
from dovetail.core.templates.grammar import KEYWORDS, MAX_TOKENS, weigh

_PLAIN = r"[^{]++|\{(?![{%#])"
_NAME = r"[A-Za-z][A-Za-z0-9_]*+"
_PATHS = re.compile(rf"(?:{_PLAIN}|\{{\{{[ ]*+{_NAME}(?:\.{_NAME})*+[ ]*+\}}\}})*+")
_PATH = re.compile(rf"\{{\{{[ ]*+({_NAME})(?:\.({_NAME}))?+(\.?+)")
# Without a backslash, a brace in quotes or a mapping in a mapping, and ASCII outside quotes.
_INSIDE = r"""[\t\n !#-&(-\[\]-z|~]|'[^'\\{}]*+'|"[^"\\{}]*+\""""
_EXPRESSION = rf"\{{\{{((?:{_INSIDE}|\{{(?:{_INSIDE})*+\}})*+)\}}\}}"
_WHOLE = re.compile(_EXPRESSION)
_EXPRESSIONS = re.compile(rf"(?:{_PLAIN}|{_EXPRESSION})*+")
_PIECE = re.compile(r"""'[^']*+'|"[^"]*+"|\.\s*+[A-Za-z]\w*+|[^\W\d]\w*+|\d[\w.]*+""", re.ASCII)
_SIDE_BY_SIDE = re.compile(r"""'s'\s*+['"]|['"]\s*+'s'""")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")

_NO_NODES = KEYWORDS | ROOTS
_FIXED = (
    _NO_NODES
    | {*FILTER_NAMES, *TEST_NAMES, "status"}
    | {name for known in FILTERS.values() for name, _ in known.takes}
    | {name for name, _ in DEFAULT}
)
"""The keywords; they belong to a shape."""


class _Shape(NamedTuple):
    """What all expressions of one shape have in common."""

    reads: tuple[Read, ...]
    is_plain: bool
    """Whether it is allowed beside a secret, or is a plain secret itself."""


class _Outline(NamedTuple):
    """A template reduced to its reads, or to its shapes."""

    reads: tuple[Read, ...] = ()
    """If all expressions are plain paths."""
    shapes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Else the shape of each expression, with the names to put back."""


class TemplateIndex:
    """The different templates of one definition, and their sizes."""

    def __init__(self, max_size: int = MAX_TEMPLATE_SIZE) -> None:
        self.words = 0
        """About how many words and signs all templates have."""
        self.parsed_words = 0
        """The same for what must be parsed; grows with each refused template."""
        self._max_size = max_size
        self._outlines: dict[str, _Outline | None] = {}
        """None: the template must be parsed as it is written."""
        self._weights: dict[str, int] = {}
        self._parsed: dict[str, _Shape | None] = {}

    def __len__(self) -> int:
        return len(self._outlines)

    def __contains__(self, text: str) -> bool:
        return text in self._outlines

    def add(self, text: str) -> None:
        """Add a template; a hundred times faster than parsing it."""
        outline = None
        if len(text) <= self._max_size:  # else it is refused for its size
            outline = _of_paths(text) or _of_expressions(text)
            if outline is None:
                weight = min(weigh(text), MAX_TOKENS)  # a longer template is not parsed
                self.words += weight
                self.parsed_words += weight
            else:
                self.words += len(outline.reads)
                for shape, _ in outline.shapes:
                    self.words += self._weigh(shape)
        self._outlines[text] = outline

    def reads(self, text: str, *, is_condition: bool = False) -> tuple[Read, ...]:
        """What a template that was added reads. Raises `TemplateRefused`."""
        outline = self._outlines[text]
        if outline is not None:
            reads = self._known_reads(outline, text)
            if reads is not None and not (is_condition and _is_no_condition(text, reads)):
                return reads
            self.parsed_words += min(weigh(text), MAX_TOKENS)
        parse = parse_condition if is_condition else parse_template
        parsed = parse(text, max_size=self._max_size)
        if isinstance(parsed, Template) and (refusal := parsed.refusal) is not None:
            raise refusal
        return parsed.reads if parsed else ()

    def _known_reads(self, outline: _Outline, text: str) -> tuple[Read, ...] | None:
        if not text.isascii() and not self._fits(text):
            return None
        found = list(outline.reads)
        all_plain = True
        for shape, names in outline.shapes:
            known = self._shape(shape)
            if known is None:
                return None
            all_plain = all_plain and known.is_plain
            put_back = {f"v{place}": name for place, name in enumerate(names)}
            found += [
                Read(put_back.get(read.name, read.name), read.guarded) for read in known.reads
            ]
        if not all_plain and any(read.name == "secrets" for read in found):
            return None  # parsing the real text finds the error
        return tuple(dict.fromkeys(found))

    def _fits(self, text: str) -> bool:
        try:
            return len(text.encode()) <= self._max_size
        except UnicodeEncodeError:  # half a character
            return False

    def _shape(self, shape: str) -> _Shape | None:
        """None if it is refused."""
        if shape not in self._parsed:
            try:
                parsed = parse_template(f"{{{{{shape}}}}}")
            except TemplateRefused:
                self._parsed[shape] = None
            else:
                assert parsed is not None  # noqa: S101 - it has braces
                expression = parsed.expression
                is_plain = expression is not None and expression.is_plain
                self._parsed[shape] = _Shape(parsed.reads, is_plain and parsed.refusal is None)
        return self._parsed[shape]

    def _weigh(self, shape: str) -> int:
        if shape not in self._weights:
            self._weights[shape] = weigh(f"{{{{{shape}}}}}")
            self.parsed_words += self._weights[shape]
        return self._weights[shape]


def _is_no_condition(text: str, reads: tuple[Read, ...]) -> bool:
    return not _WHOLE.fullmatch(text.strip()) or any(read.name == "secrets" for read in reads)


def _of_paths(text: str) -> _Outline | None:
    """The outline if all expressions are plain paths such as `{{ node.key }}`."""
    if not _PATHS.fullmatch(text):
        return None
    reads = []
    for name, step, deeper in _PATH.findall(text):
        if name in _NO_NODES and (name in KEYWORDS or not step):
            return None
        if deeper and name == "secrets":
            return None
        reads.append(Read(name, step == "status"))
    if len(reads) + 2 * text.count(".") > MAX_TOKENS:
        return None
    return _Outline(tuple(reads))


def _of_expressions(text: str) -> _Outline | None:
    """The outline if all expressions are simple enough to have a shape."""
    if not _EXPRESSIONS.fullmatch(text):
        return None
    found = _WHOLE.findall(text)
    if sum(map(len, found)) > MAX_TOKENS:
        return None
    shapes = tuple(map(_shape, found))
    if any(_SIDE_BY_SIDE.search(shape) for shape, _ in shapes):
        return None  # they are one text, of which not every part may have been left out
    return _Outline(shapes=shapes)


def _shape(expression: str) -> tuple[str, tuple[str, ...]]:
    names: dict[str, str] = {}

    def reduced(piece: re.Match[str]) -> str:
        word = piece.group()
        first = word[0]
        if first.isalpha():
            return word if word in _FIXED else names.setdefault(word, f"v{len(names)}")
        if first == ".":
            return word if word[1:].lstrip() in _FIXED else ".k"
        if first in "'\"":
            # A key may not begin with underscores.
            return "'s'" if word[1].isalnum() and word[1:-1] not in _FIXED else word
        return "1" if _NUMBER.fullmatch(word) else word

    return _PIECE.sub(reduced, expression), tuple(names)
