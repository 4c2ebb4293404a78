"""Compiles one expression into a function, if everything in it is allowed.

The allowlist is the table of constructs: one without a row cannot be compiled, so it cannot run.
Jinja's code generator, optimiser and runtime are never used. The function is made of plain
closures over `operations` and `filters`; nothing is evaluated before a node is about to run, not
even a constant. A plain dotted path is recognised from its tokens and needs no parsing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.lexer import Token

from dovetail.core.errors import MissingValue, Suggester, TemplateError, shown
from dovetail.core.templates.filters import (
    COMPARING_TESTS,
    FILTERS,
    REQUIRED,
    TESTS,
    Filter,
    ItemTest,
)
from dovetail.core.templates.grammar import KEYWORDS, Span, TemplateRefused, parse, too_deep
from dovetail.core.templates.operations import (
    ABSENT,
    CALCULATIONS,
    COMPARISONS,
    NOTHING,
    SIGNS,
    WITHOUT_OUTPUT,
    Frame,
    Missing,
    NodeValue,
    Path,
    concatenate,
    kind,
    settle,
    step,
    text,
)

MAX_DEPTH = 100

Evaluate = Callable[[Frame], Any]

DEFAULT = (("default_value", ""), ("boolean", False))
FILTER_NAMES = (*FILTERS, "default", "d")
TEST_NAMES = (*TESTS, *COMPARING_TESTS, "defined", "undefined")

_ALLOWED = (
    "allowed are names, attributes, items, literals, comparisons, `and or not`, `in`, `if else`, "
    "`~ + - / // %`, filters and tests"
)
_FORBIDDEN: dict[type[nodes.Node], str] = {
    nodes.Call: "a call",
    nodes.Mul: "`*`",
    nodes.Pow: "`**`",
    nodes.Slice: "a slice",
}


class Read(NamedTuple):
    """A name that an expression reads.

    `guarded`: the expression handles a node without output: the name is under `default` or a test
    `is defined` or `is none`, reads the `status`, or comes after such a test.
    """

    name: str
    guarded: bool


def check_name(name: str, offset: int) -> None:
    if name.startswith("_"):  # other characters that Python takes for `_` cannot begin a token
        hint = "" if name.startswith("__") else f"a key is read in brackets: [{shown(name)}]"
        raise _forbid(f"the underscored name {shown(name)}", offset, hint)


def check_key(key: str | int, offset: int) -> None:
    """A key in quotes may begin with one underscore, as `_id` often does, but not with two."""
    if isinstance(key, str) and key.startswith("__"):
        raise _forbid(f"the underscored key {shown(key)}", offset)


def _forbid(what: str, offset: int, hint: str = "") -> TemplateRefused:
    return TemplateRefused(
        "template_forbidden", f"{what} is not allowed; {hint or _ALLOWED}", offset
    )


def settled(loose: Evaluate) -> Evaluate:
    return lambda frame: settle(loose(frame))


class Compiler:
    """Compiles one expression and notes what it reads.

    Two kinds of functions: a *value* gives JSON and raises if something is missing. A *loose* one
    may also give `Missing`, `NOTHING` or a `NodeValue`, for `default` and tests around it.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.paths: list[Path] = []
        """The same reads, with their steps."""
        self.secret_at: int | None = None
        """The offset where it first does more with a secret than name it."""
        self._guarded = False  # inside `default(…)` or a test
        self._guarded_names: frozenset[str] = frozenset()  # behind a test of the name

    def value(self, node: nodes.Node | None, depth: int) -> Evaluate:
        run = self.loose(node, depth)
        return settled(run) if isinstance(node, _LOOSE) else run

    def loose(self, node: nodes.Node | None, depth: int) -> Evaluate:
        assert node is not None  # noqa: S101 - Jinja's types allow a filter of nothing, a block
        if depth <= 0:
            raise too_deep(node.lineno)
        rule = _RULES.get(type(node))
        if rule is None:
            raise _forbid(_FORBIDDEN.get(type(node), "this construct"), node.lineno)
        return rule(self, node, depth - 1)

    # --- names, attributes, items ---

    def path(self, node: nodes.Expr, depth: int) -> Evaluate:
        """A name or another expression with any number of steps, as one function."""
        steps: list[str | int] = []
        start = node
        while True:
            if isinstance(start, nodes.Getattr):
                check_name(start.attr, start.lineno)
                steps.append(start.attr)
            elif isinstance(start, nodes.Getitem) and (key := _fixed_key(start.arg)) is not None:
                check_key(key, start.lineno)
                steps.append(key)
            else:
                break
            start = start.node
        steps.reverse()
        if isinstance(start, nodes.Name):
            return self.name(Path(start.name, tuple(steps)), start.lineno)
        if isinstance(start, nodes.Getitem) and not steps:
            return self._item(start, depth)
        return _stepping(self.loose(start, depth), steps)

    def name(self, path: Path, offset: int, *, as_it_is: bool = False) -> Evaluate:
        """`as_it_is`: the expression is this name and its steps, and nothing is done with it."""
        if path.root in KEYWORDS:
            raise TemplateRefused("template_syntax", f"unexpected '{path.root}'", offset)
        check_name(path.root, offset)
        if path.root == "secrets" and not (path.steps and isinstance(path.steps[0], str)):
            what = "`secrets` as a whole, or with a calculated name,"
            raise _forbid(what, offset, "name the one you need: secrets.NAME")
        if path.root == "secrets" and not as_it_is and self.secret_at is None:
            self.secret_at = offset
        guarded = self._guarded or path.root in self._guarded_names
        self.reads.append(Read(path.root, guarded or path.steps[:1] == ("status",)))
        self.paths.append(path)
        return lambda frame: path.read(frame.get)

    def _item(self, node: nodes.Getitem, depth: int) -> Evaluate:
        """`a[b]`, the key calculated."""
        inner = self.loose(node.node, depth)
        with self._guarding(False):
            key = self.value(node.arg, depth)

        def run(frame: Frame) -> Any:
            value, at = inner(frame), key(frame)
            if not isinstance(at, (str, int)):
                raise TemplateError(f"a key is text or a whole number, not {kind(at)}")
            found = step(value, at)
            if found is ABSENT:
                # The key may be a secret: the message has only the kind of its owner.
                return Missing(partial(_lacks, None, value))
            return found

        return run

    # --- literals ---

    def constant(self, node: nodes.Const, depth: int) -> Evaluate:
        value = node.value
        return lambda frame: value

    def sequence(self, node: nodes.List | nodes.Tuple, depth: int) -> Evaluate:
        parts = [self.value(item, depth) for item in node.items]

        def run(frame: Frame) -> Any:
            weight = 2
            found = []
            for part in parts:
                found.append(part(frame))
                weight += frame.weigh(found[-1]) + 1
                if weight > frame.limit:
                    break
            frame.grow(weight)
            return frame.weighed(found, weight)

        return run

    def mapping(self, node: nodes.Dict, depth: int) -> Evaluate:
        pairs = [(self.value(p.key, depth), self.value(p.value, depth)) for p in node.items]

        def run(frame: Frame) -> Any:
            weight = 2
            found = {}
            for name, part in pairs:
                key, value = name(frame), part(frame)
                if not isinstance(key, str):
                    raise TemplateError(f"the keys of a mapping are text, not {kind(key)}")
                found[key] = value
                weight += len(key) + frame.weigh(value) + 4
                if weight > frame.limit:
                    break
            frame.grow(weight)
            return frame.weighed(found, weight)

        return run

    # --- operators ---

    def calculation(self, node: nodes.BinExpr, depth: int) -> Evaluate:
        if node.operator == "%" and _is_text(node.left):
            raise _forbid("`%` on text", node.lineno, "it works on numbers; ~ joins text")
        left, right = self.value(node.left, depth), self.value(node.right, depth)
        apply = CALCULATIONS[node.operator]
        return lambda frame: apply(frame, left(frame), right(frame))

    def sign(self, node: nodes.UnaryExpr, depth: int) -> Evaluate:
        inner = self.value(node.node, depth)
        apply = SIGNS[node.operator]
        return lambda frame: apply(inner(frame))

    def concatenation(self, node: nodes.Concat, depth: int) -> Evaluate:
        parts = [self.value(part, depth) for part in node.nodes]
        return lambda frame: concatenate(frame, [part(frame) for part in parts])

    def comparison(self, node: nodes.Compare, depth: int) -> Evaluate:
        first = self.value(node.expr, depth)
        rest = [(COMPARISONS[op.op], self.value(op.expr, depth)) for op in node.ops]

        def run(frame: Frame) -> bool:
            left = first(frame)
            for compare, operand in rest:
                right = operand(frame)
                if not compare(frame, left, right):
                    return False
                left = right
            return True

        return run

    def conjunction(self, node: nodes.And, depth: int) -> Evaluate:
        left, right = self._sides(node, depth)
        return lambda frame: left(frame) and right(frame)

    def disjunction(self, node: nodes.Or, depth: int) -> Evaluate:
        left, right = self._sides(node, depth)
        return lambda frame: left(frame) or right(frame)

    def _sides(self, node: nodes.BinExpr, depth: int) -> tuple[Evaluate, Evaluate]:
        left, tested = self._testing(node.left, depth)
        with self._behind(tested):
            return left, self.value(node.right, depth)

    def negation(self, node: nodes.Not, depth: int) -> Evaluate:
        inner = self.value(node.node, depth)
        return lambda frame: not inner(frame)

    def choice(self, node: nodes.CondExpr, depth: int) -> Evaluate:
        """`a if test else b`; without an `else` none, which `default` replaces."""
        test, tested = self._testing(node.test, depth)
        with self._behind(tested):
            then = self.loose(node.expr1, depth)
            other = self.loose(node.expr2, depth) if node.expr2 is not None else _nothing
        return lambda frame: then(frame) if test(frame) else other(frame)

    # --- filters and tests ---

    def filter(self, node: nodes.Filter, depth: int) -> Evaluate:
        if node.name in ("default", "d"):
            return self._default(node, depth)
        known = FILTERS.get(node.name)
        if known is None:
            raise _unknown("filter", node.name, FILTER_NAMES, node.lineno)
        inner = self.value(node.node, depth)
        if known.chooses:
            return self._choosing(node, known, inner, depth)
        if known.by_name and node.args:
            what = f"an argument of '{node.name}' without its name"
            raise _forbid(what, node.lineno, f"write {node.name}({known.takes[0][0]}='a.b')")
        arguments = self._arguments(node, node.args, known.takes, depth)
        apply = known.apply
        if not arguments:
            return lambda frame: apply(frame, inner(frame))
        return lambda frame: apply(frame, inner(frame), *[given(frame) for given in arguments])

    def _default(self, node: nodes.Filter, depth: int) -> Evaluate:
        with self._guarding(True):
            inner = self.loose(node.node, depth)
        fallback, boolean = self._arguments(node, node.args, DEFAULT, depth, loose=True)

        def run(frame: Frame) -> Any:
            value = inner(frame)
            if not _defined(value):
                return fallback(frame)
            if settle(boolean(frame)) and not settle(value):
                return fallback(frame)
            return value

        return run

    def _choosing(self, node: nodes.Filter, known: Filter, inner: Evaluate, depth: int) -> Evaluate:
        """`select('gt', 5)` or `selectattr('a', 'gt', 5)`: behind the filter's own arguments come
        the name of a test, in quotes, so that it is checked here, and its operand."""
        own = len(known.takes)
        if node.kwargs:
            what = f"the argument {shown(str(node.kwargs[0].key))} of '{node.name}'"
            raise _forbid(what, node.lineno, "its arguments have no names")
        arguments = self._arguments(node, node.args[:own], known.takes, depth)
        test = self._item_test(node, node.args[own:], depth)
        apply = known.apply

        def run(frame: Frame) -> Any:
            value = inner(frame)
            given = [argument(frame) for argument in arguments]
            return apply(frame, value, test(frame), *given)

        return run

    def _item_test(
        self, node: nodes.Filter, written: list[nodes.Expr], depth: int
    ) -> Callable[[Frame], ItemTest | None]:
        """The test that `select` and the like were given; None if they choose what is true."""
        if not written:
            return _constantly(None)
        first, *operands = written
        name = first.value if isinstance(first, nodes.Const) else None
        if not isinstance(name, str):
            what = f"a test of '{node.name}' that is not a name in quotes"
            raise _forbid(what, node.lineno, f"tests are: {' '.join(TEST_NAMES)}")
        operand = self._operand(name, operands, node, depth)
        if name in ("defined", "undefined"):
            wanted = name == "defined"
            is_wanted = ItemTest(lambda _, value: (value is not ABSENT) is wanted, True)
            return _constantly(is_wanted)
        if operand is None:
            test = TESTS[name]
            return _constantly(ItemTest(lambda _, value: test(value)))
        compare = COMPARING_TESTS[name]

        def for_one_rendering(frame: Frame) -> ItemTest:
            right = operand(frame)
            return ItemTest(lambda frame, value: compare(frame, value, right))

        return for_one_rendering

    def test(self, node: nodes.Test, depth: int) -> Evaluate:
        name = node.name
        operand = self._operand(name, node.args, node, depth)
        if name in ("defined", "undefined"):
            with self._guarding(True):
                inner = self.loose(node.node, depth)
            wanted = name == "defined"
            return lambda frame: _defined(inner(frame)) is wanted
        with self._guarding(self._guarded or name == "none"):
            inner = self.value(node.node, depth)
        if operand is None:
            apply = TESTS[name]
            return lambda frame: apply(inner(frame))
        compare = COMPARING_TESTS[name]
        return lambda frame: compare(frame, inner(frame), operand(frame))

    def _operand(
        self,
        name: str,
        given: list[nodes.Expr],
        node: nodes.Filter | nodes.Test,
        depth: int,
    ) -> Evaluate | None:
        """The operand of a test, if the test is known and takes one."""
        if name not in TEST_NAMES:
            raise _unknown("test", name, TEST_NAMES, node.lineno)
        takes = 1 if name in COMPARING_TESTS else 0
        if node.kwargs or node.dyn_args or node.dyn_kwargs or len(given) > takes:
            hint = "it takes one value" if takes else "it takes none"
            raise _forbid(f"such an argument of the test '{name}'", node.lineno, hint)
        if not takes:
            return None
        if not given:
            raise _forbid(f"the test '{name}' without a value", node.lineno, f"write {name}(5)")
        return self.value(given[0], depth)

    def _arguments(
        self,
        node: nodes.Filter,
        args: list[nodes.Expr],
        takes: tuple[tuple[str, Any], ...],
        depth: int,
        *,
        loose: bool = False,
    ) -> list[Evaluate]:
        """A filter's arguments in its own order, missing ones by their defaults."""
        names = [name for name, _ in takes]
        listed = f"it takes ({', '.join(names)})"
        given: dict[str, nodes.Expr] = dict(zip(names, args, strict=False))
        if node.dyn_args or node.dyn_kwargs or len(args) > len(names):
            raise _forbid(f"such an argument of '{node.name}'", node.lineno, listed)
        for keyword in node.kwargs:
            name = str(keyword.key)
            if name not in names or name in given:
                what = f"the argument {shown(name)} of '{node.name}'"
                raise _forbid(what, node.lineno, listed)
            given[name] = keyword.value
        compiled: list[Evaluate] = []
        for name, otherwise in takes:
            if name in given:
                compile_ = self.loose if loose else self.value
                compiled.append(compile_(given[name], depth))
            elif otherwise is REQUIRED:
                raise _forbid(f"'{node.name}' without '{name}'", node.lineno, listed)
            else:
                compiled.append(_constantly(otherwise))
        return compiled

    # --- what guards a read ---

    @contextmanager
    def _guarding(self, guarded: bool) -> Iterator[None]:
        before, self._guarded = self._guarded, guarded
        try:
            yield
        finally:
            self._guarded = before

    @contextmanager
    def _behind(self, names: frozenset[str]) -> Iterator[None]:
        before, self._guarded_names = self._guarded_names, self._guarded_names | names
        try:
            yield
        finally:
            self._guarded_names = before

    def _testing(self, node: nodes.Expr, depth: int) -> tuple[Evaluate, frozenset[str]]:
        """A deciding operand, and the names whose absence it tests."""
        already = len(self.reads)
        run = self.value(node, depth)
        return run, frozenset(read.name for read in self.reads[already:] if read.guarded)


def _fixed_key(node: nodes.Expr) -> str | int | None:
    """The key in `a['b']`, `a[0]` or `a[-1]`; None if it must be calculated."""
    negative = isinstance(node, nodes.Neg)
    inner = node.node if isinstance(node, nodes.Neg) else node
    if not isinstance(inner, nodes.Const):
        return None
    key = inner.value
    if key.__class__ is int:
        return -key if negative else key
    return key if isinstance(key, str) and not negative else None


def _is_text(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Const):
        return isinstance(node.value, str)
    return isinstance(node, nodes.Concat)


def _stepping(start: Evaluate, steps: list[str | int]) -> Evaluate:
    """Steps from an expression that is not a name, such as `(a if b else c).d`."""

    def run(frame: Frame) -> Any:
        value = start(frame)
        for key in steps:
            found = step(value, key)
            if found is ABSENT:
                return Missing(partial(_lacks, key, value))
            value = found
        return value

    return run


def _lacks(key: str | int | None, value: Any) -> str:
    named = "such key" if key is None else shown(key)
    return f"has no {named} in {kind(value.output if isinstance(value, NodeValue) else value)}"


def _defined(value: Any) -> bool:
    if isinstance(value, NodeValue):
        return value.status not in WITHOUT_OUTPUT
    return value is not NOTHING and not isinstance(value, Missing)


def _nothing(_: Frame) -> Any:
    return NOTHING


def _constantly(value: Any) -> Evaluate:
    return lambda frame: value


def _unknown(what: str, name: str, names: Sequence[str], offset: int) -> TemplateRefused:
    meant = Suggester().did_you_mean(name, names)
    return TemplateRefused(
        "template_forbidden",
        f"there is no {what} {shown(name)}{meant}; allowed are: {' '.join(names)}",
        offset,
    )


_LOOSE = (nodes.Name, nodes.Getattr, nodes.Getitem, nodes.CondExpr, nodes.Filter)

_RULES: dict[type[nodes.Node], Callable[[Compiler, Any, int], Evaluate]] = {
    nodes.Name: Compiler.path,
    nodes.Getattr: Compiler.path,
    nodes.Getitem: Compiler.path,
    nodes.Const: Compiler.constant,
    nodes.List: Compiler.sequence,
    nodes.Tuple: Compiler.sequence,
    nodes.Dict: Compiler.mapping,
    nodes.Add: Compiler.calculation,
    nodes.Sub: Compiler.calculation,
    nodes.Div: Compiler.calculation,
    nodes.FloorDiv: Compiler.calculation,
    nodes.Mod: Compiler.calculation,
    nodes.Neg: Compiler.sign,
    nodes.Pos: Compiler.sign,
    nodes.Concat: Compiler.concatenation,
    nodes.Compare: Compiler.comparison,
    nodes.And: Compiler.conjunction,
    nodes.Or: Compiler.disjunction,
    nodes.Not: Compiler.negation,
    nodes.CondExpr: Compiler.choice,
    nodes.Filter: Compiler.filter,
    nodes.Test: Compiler.test,
}


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
        """The offset where it does more with a secret than that, which is forbidden."""

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
    """Raises `TemplateRefused` for everything that is not on the allowlist."""
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


def paths_read(span: Span) -> list[Path]:
    """The names that an expression reads, each with the fixed steps from it. Raises
    `TemplateRefused`."""
    path = _plain_path(span.tokens)
    if path is not None:
        return [path]
    compiler = Compiler()
    compiler.value(parse(span), MAX_DEPTH)
    return compiler.paths


# Most templates: `{{ node.key }}`, without leading underscores.
_DOTTED = re.compile(r"\{\{(\s*([A-Za-z]\w*)((?:\.[A-Za-z]\w*)+)\s*)\}\}", re.ASCII)


def dotted_path(template: str) -> Expression | None:
    """The expression of a text that is one plain dotted path, without a tokenizer."""
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
