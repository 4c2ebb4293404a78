"""One `{{ … }}` as an object: what it reads, and its value in a scope.

A plain dotted path is recognised from its tokens; everything else is parsed and compiled.
What this file must not know: text around expressions, configs, stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2.lexer import Token

from dovetail.core.errors import MissingValue, TemplateError
from dovetail.core.templates.compiler import (
    MAX_DEPTH,
    Compiler,
    Evaluate,
    Read,
    check_key,
    check_name,
    settled,
)
from dovetail.core.templates.grammar import KEYWORDS, Span, parse
from dovetail.core.templates.operations import Frame, Path, text

_SHOWN_SOURCE = 80


class Expression:
    """One `{{ … }}`, compiled. `path` is set if it is a plain dotted path."""

    __slots__ = ("_run", "is_plain", "offset", "path", "reads", "secret", "secret_at", "source")

    def __init__(
        self,
        source: str,
        run: Evaluate,
        reads: tuple[Read, ...],
        path: Path | None = None,
        *,
        offset: int = 0,
        is_plain: bool = True,
        secret: str | None = None,
        secret_at: int | None = None,
    ) -> None:
        self.source = source
        self.path = path
        self.reads = reads
        self._run = run
        self.offset = offset
        self.is_plain = is_plain
        """A path or a literal: no filter, operator or condition."""
        self.secret = secret
        """The secret's name, if the expression is `secrets.NAME` and nothing else."""
        self.secret_at = secret_at
        """Where it does more with a secret than that, which no definition may do."""

    def as_text(self) -> Expression:
        """The same expression between other text."""
        run = self._run
        return Expression(self.source, lambda frame: text(frame, run(frame)), self.reads)

    def evaluate(self, frame: Frame) -> Any:
        """Its value. An error says in which expression it happened."""
        try:
            return self._run(frame)
        except MissingValue as error:
            raise MissingValue(f"{self} {error}") from None
        except TemplateError as error:
            raise type(error)(f"{self}: {error}") from None
        except RecursionError:
            raise TemplateError(f"{self}: a value is nested too deeply") from None

    def __str__(self) -> str:
        line = " ".join(self.source.split())
        return f"{{{{ {line if len(line) <= _SHOWN_SOURCE else line[:_SHOWN_SOURCE] + '…'} }}}}"


def compile_expression(span: Span) -> Expression:
    """Raises `TemplateRefused` for everything that is not on the list."""
    compiler = Compiler()
    path = _plain_path(span.tokens)
    secret = None
    if path is not None:
        if path.root == "secrets" and [one.type for one in span.tokens] == ["name", "dot", "name"]:
            secret = str(path.steps[0])
        run = settled(compiler.name(path, span.offset, as_it_is=secret is not None))
    else:
        run = compiler.value(parse(span), MAX_DEPTH)
    is_literal = len(span.tokens) == 1  # else it would be a path
    return Expression(
        span.source,
        run,
        tuple(dict.fromkeys(compiler.reads)),
        path,
        offset=span.offset,
        is_plain=path is not None or is_literal,
        secret=secret,
        secret_at=compiler.secret_at,
    )


# Almost every template there is: `{{ node.key }}`, without a leading underscore anywhere.
_DOTTED = re.compile(r"\{\{(\s*([A-Za-z]\w*)((?:\.[A-Za-z]\w*)+)\s*)\}\}", re.ASCII)


def dotted_path(template: str) -> Expression | None:
    """The expression of a text that is one plain dotted path, without making tokens of it."""
    found = _DOTTED.fullmatch(template)
    if found is None or found[2] in KEYWORDS:
        return None
    compiler = Compiler()
    path = Path(found[2], tuple(found[3].split(".")[1:]))
    secret = path.steps[0] if path.root == "secrets" and len(path.steps) == 1 else None
    run = settled(compiler.name(path, found.start(2), as_it_is=secret is not None))
    return Expression(
        found[1],
        run,
        tuple(compiler.reads),
        path,
        secret=None if secret is None else str(secret),
        secret_at=compiler.secret_at,
    )


def _plain_path(tokens: Sequence[Token]) -> Path | None:
    """`a.b[0]['c']` from its tokens: most templates are one, and parsing costs 50 times more."""
    if tokens[0].type != "name" or tokens[0].value in KEYWORDS:
        return None
    steps: list[str | int] = []
    at = 1
    while at < len(tokens):
        here = [token.type for token in tokens[at : at + 3]]
        if here[:2] == ["dot", "name"]:
            check_name(tokens[at + 1].value, tokens[at].lineno)
            steps.append(tokens[at + 1].value)
            at += 2
        elif here in (["lbracket", "integer", "rbracket"], ["lbracket", "string", "rbracket"]):
            check_key(tokens[at + 1].value, tokens[at].lineno)
            steps.append(tokens[at + 1].value)
            at += 3
        else:
            return None
    return Path(tokens[0].value, tuple(steps))
