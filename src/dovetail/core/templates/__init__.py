"""Templates in a definition: parse them once, render them when a node is about to run.

    Scope ──► ConfigTemplate.render ──► Rendered(config, deferred) ──► render_deferred (worker)

A string with `{{ … }}` is a template. If it is one whole expression it gives the native value,
otherwise text. A string that reads `secrets` is not rendered here but handed to the worker as a
`Deferred`, with just the values it needs: secrets exist only in the worker's memory.

Outputs are data: what a template reads is never parsed as a template again. Native values are not
copied: a caller that passes them to code that may change them copies first.

`grammar` cuts and parses a text, `compiler` has the allowlist, `operations` and `filters` do the
work, `template_index` checks the templates of a whole definition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from dovetail.core.errors import TemplateError, TemplateForbidden, TooLarge, format_path
from dovetail.core.redaction import MASK, PLAIN_BESIDE, PLAIN_ONLY, SecretFields, misplaced
from dovetail.core.templates.compiler import (
    Expression,
    Read,
    compile_expression,
    dotted_path,
    paths_read,
)
from dovetail.core.templates.grammar import Span, TemplateRefused, cut, place, too_deep
from dovetail.core.templates.operations import (
    NOTHING,
    UNSETTLED,
    WITH_ITEMS,
    Frame,
    NodeValue,
    Path,
    Scope,
    json_size,
    settle,
)

__all__ = [
    "MAX_CONFIG_SIZE",
    "MAX_TEMPLATE_SIZE",
    "ROOTS",
    "Condition",
    "ConfigTemplate",
    "Deferred",
    "ItemScope",
    "NodeValue",
    "Read",
    "Rendered",
    "Scope",
    "Template",
    "TemplateRefused",
    "compile_config",
    "compile_list",
    "keys_read",
    "masked_config",
    "parse_condition",
    "parse_template",
    "render_deferred",
    "secrets_read",
]

MAX_TEMPLATE_SIZE = 16 * 1024
MAX_CONFIG_SIZE = 1 << 20
MAX_LIST_SIZE = 16 << 20
"""Characters that an expression of `for_each` may make. A list that it only reads may be longer."""

ROOTS = frozenset({"params", "run", "secrets"})
"""The names a template may read that are not nodes."""

# A compiled template takes a hundred times the memory of its text; only short ones repeat.
_CACHED_LENGTH = 256
_CACHED = 2048
_SHORT = 256  # a text up to this length is not measured: its largest possible size counts

# Sent to the worker beside the config: the ancestors that strings with secrets read.
_DEFERRED_SHARE = 4


Place = tuple[str | int, ...]


class Template:
    """A string with expressions, parsed and compiled."""

    __slots__ = ("_misuse", "_parts", "expression", "reads", "secrets", "source", "uses_secrets")

    def __init__(self, source: str, parts: Sequence[str | Expression]) -> None:
        self.source = source
        self.reads = tuple(
            dict.fromkeys(r for p in parts if not isinstance(p, str) for r in p.reads)
        )
        self.uses_secrets = any(read.name == "secrets" for read in self.reads)
        self.secrets: tuple[str, ...] = ()
        """The names of its secrets."""
        self._misuse: tuple[str, int] | None = None
        if self.uses_secrets:
            made = [part for part in parts if not isinstance(part, str)]
            self.secrets = tuple(dict.fromkeys(one.secret for one in made if one.secret))
            self._misuse = _misuse(made)
        self._parts: list[str | Expression] = []
        self.expression: Expression | None = None
        """Set if the text is one whole expression."""
        first, *rest = parts
        # A YAML block scalar ends in a newline that is not part of the expression.
        if isinstance(first, Expression) and rest in ([], ["\n"], ["\r\n"]):
            self.expression = first
        else:
            self._parts = [p if isinstance(p, str) else p.as_text() for p in parts]

    @property
    def whole(self) -> bool:
        return self.expression is not None

    @property
    def refusal(self) -> TemplateRefused | None:
        """Why the template is forbidden although it compiles: what it does with a secret.

        Parsing does not refuse it: a definition from before this rule can still be read, and its
        node fails.
        """
        if self._misuse is None:
            return None
        message, offset = self._misuse
        where = place(self.source, offset)
        return TemplateRefused("template_forbidden", f"{message} ({where})", offset)

    def __repr__(self) -> str:
        return f"Template({self.source!r})"

    def render(self, scope: Scope, limit: int = MAX_CONFIG_SIZE) -> Any:
        """The native value if it is one whole expression, else text.

        Raises `MissingValue`, `TooLarge` above `limit` characters of text or JSON, or another
        `TemplateError`; each names the expression.
        """
        frame = Frame(scope, limit)
        value = self.evaluate(frame)
        if isinstance(value, WITH_ITEMS) and max(len(value), frame.weigh(value) - 2) > limit:
            raise TooLarge(f"the value takes more than the {limit:,} characters that are allowed")
        return value

    def evaluate(self, frame: Frame) -> Any:
        """As `render`, within the budget of `frame`."""
        if self.expression is not None:
            return self.expression.evaluate(frame)
        texts: list[str] = []
        size = 0
        for part in self._parts:
            texts.append(part if isinstance(part, str) else part.evaluate(frame))
            size += len(texts[-1])
            if size > frame.limit:
                raise TooLarge(f"the text takes more than {frame.limit:,} characters")
        return "".join(texts)


def _misuse(made: Sequence[Expression]) -> tuple[str, int] | None:
    for one in made:
        if one.secret_at is not None:
            return PLAIN_ONLY, one.secret_at
    for one in made:
        if not one.is_plain:
            return PLAIN_BESIDE, one.offset
    return None


def parse_template(text: str, *, max_size: int = MAX_TEMPLATE_SIZE) -> Template | None:
    """Parse and compile; None if there is no template in the text.

    Raises `TemplateRefused`. Nothing is evaluated, whatever the text contains.
    """
    if "{{" not in text and "{%" not in text and "{#" not in text:
        return None
    try:
        size = len(text) if len(text) > max_size else len(text.encode())
    except UnicodeEncodeError as error:
        where = place(text, error.start)
        message = f"half a character, which is no valid text ({where})"
        raise TemplateRefused("template_syntax", message, error.start) from None
    if size > max_size:
        raise TemplateRefused(
            "too_large", f"the template is longer than {max_size:,} bytes; move data to params"
        )
    return _parse_cached(text) if len(text) <= _CACHED_LENGTH else _parse(text)


def _parse(text: str) -> Template:
    try:
        if (dotted := dotted_path(text)) is not None:
            return Template(text, [dotted])
        parts = [compile_expression(p) if isinstance(p, Span) else p for p in cut(text)]
    except TemplateRefused as refused:
        where = place(text, refused.offset or 0)
        message = f"{refused.message} ({where})"
        raise TemplateRefused(refused.code, message, refused.offset) from None
    except RecursionError:  # only if the caller is itself close to Python's limit
        raise too_deep(0) from None
    return Template(text, parts)


_parse_cached = lru_cache(_CACHED)(_parse)


def keys_read(text: str) -> Iterator[tuple[str, str]]:
    """The names that a valid template reads, each with its fixed keys: `a.b.c` as a and b.c."""
    for span in cut(text):
        if isinstance(span, Span):
            for path in paths_read(span):
                keys = takewhile(lambda step: isinstance(step, str), path.steps)
                yield path.root, ".".join(map(str, keys))


class Condition:
    """Whether a node runs: `condition(scope)`."""

    __slots__ = ("_expression", "_fixed", "reads", "source")

    def __init__(self, source: str, expression: Expression | None, fixed: bool = True) -> None:
        self.source = source
        self.reads: tuple[Read, ...] = expression.reads if expression else ()
        self._expression = expression
        self._fixed = fixed

    def __call__(self, scope: Scope) -> bool:
        if self._expression is None:
            return self._fixed
        return bool(self._expression.evaluate(Frame(scope, MAX_CONFIG_SIZE)))


def parse_condition(text: str | bool, *, max_size: int = MAX_TEMPLATE_SIZE) -> Condition:
    """A condition is one whole expression, or a boolean. It may not read secrets."""
    if isinstance(text, bool):
        return Condition("true" if text else "false", None, text)
    template = parse_template(text.strip(), max_size=max_size)
    if template is None or template.expression is None:
        example = text.strip() if template is None and 0 < len(text) <= 80 else "params.depth > 1"
        raise TemplateRefused(
            "template_syntax",
            "a condition is one expression; write the whole condition inside {{ }}: "
            f"{{{{ {example} }}}}",
        )
    if template.uses_secrets:
        raise TemplateRefused(
            "template_forbidden",
            "a condition may not read secrets: it is decided where no secret is known",
        )
    return Condition(text, template.expression)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A string with secrets, for the worker: its path in the config and what else it reads.

    JSON throughout; a node is `{"id", "status", "output", "error"}` under its id, and what belongs
    to an item `{"value"}`.
    """

    path: Place
    source: str
    scope: dict[str, Any]


class Rendered(NamedTuple):
    """A config with its templates rendered; deferred strings are in it unrendered."""

    config: dict[str, Any]
    deferred: tuple[Deferred, ...] = ()


class _Leaf(NamedTuple):
    """The location of a template: a key in one of the containers that a rendering copies."""

    container: int
    key: Any
    name: str | None
    """The name that it reads, if that is the whole template: `{{ node }}`."""
    dotted: Path | None
    template: Template
    path: Place


class ConfigTemplate:
    """A node's config with the locations of its templates.

    `render` copies only the containers on the way to a template and shares the rest.
    """

    __slots__ = (
        "_copies",
        "_deferred",
        "_leaves",
        "fixed_size",
        "plain",
        "raw",
        "reads",
        "templates",
    )

    def __init__(self, raw: dict[str, Any], templates: list[tuple[Place, Template]]) -> None:
        self.raw = raw
        self.plain = Rendered(raw)
        """The rendering of a config without templates."""
        self.templates = templates
        self.reads = frozenset(read.name for _, found in templates for read in found.reads)
        at: dict[Place, int] = {(): 0}
        self._copies: list[tuple[int, Any]] = []
        self._leaves: list[_Leaf] = []
        self._deferred: list[tuple[Place, Template]] = []
        # The size of the config itself; the sizes of rendered values are added later.
        self.fixed_size = json_size(raw)
        for path, template in templates:
            if template.uses_secrets:
                self._deferred.append((path, template))
                continue
            for depth in range(1, len(path)):
                if path[:depth] not in at:
                    at[path[:depth]] = len(at)
                    self._copies.append((at[path[: depth - 1]], path[depth - 1]))
            dotted = template.expression.path if template.expression else None
            name = dotted.root if dotted and not dotted.steps else None
            self._leaves.append(_Leaf(at[path[:-1]], path[-1], name, dotted, template, path))
            self.fixed_size -= json_size(template.source)

    def render(self, scope: Scope, limit: int = MAX_CONFIG_SIZE) -> Rendered:
        """The config for one start of the node. An error names its path, such as `config.url`.

        Raises `TemplateError`; `TooLarge` if the config would be above `limit` bytes as JSON.
        """
        size = self.fixed_size
        if not self.templates:
            if size > limit:
                raise _too_large(size, limit)
            return self.plain
        config = self.raw.copy()
        containers: list[Any] = [config]
        for parent, key in self._copies:
            containers.append(containers[parent][key].copy())
            containers[parent][key] = containers[-1]
        frame = None
        rough = 0  # the largest possible size of short values
        get = scope.get
        for container, key, name, dotted, template, path in self._leaves:
            # The usual case is a dotted path that exists: 1.3 µs for a config with one, 0.1 µs for
            # a config without templates. Everything else needs a budget.
            if name is not None:
                try:
                    value = get(name)
                except KeyError:
                    value = NOTHING  # the error is raised below
            else:
                value = dotted.read(get) if dotted is not None else NOTHING
            if value.__class__ is NodeValue:
                value = settle(value)
            elif value.__class__ in UNSETTLED:
                frame = frame or Frame(scope, limit)
                try:
                    value = template.evaluate(frame)
                except TemplateError as error:
                    raise type(error)(f"{_named(path)}: {error}") from None
            containers[container][key] = value
            if isinstance(value, str) and len(value) < _SHORT:
                rough += 6 * len(value) + 2
            elif isinstance(value, WITH_ITEMS):
                size += json_size(value)
                if size > limit:
                    raise _too_large(size, limit, f"with {_named(path)} ")
            else:
                rough += 24
        if size + rough > limit and (size := json_size(config)) > limit:
            raise _too_large(size, limit)
        return Rendered(config, self._defer(scope, limit) if self._deferred else ())

    def _defer(self, scope: Scope, limit: int) -> tuple[Deferred, ...]:
        deferred: list[Deferred] = []
        room = _DEFERRED_SHARE * limit
        for path, template in self._deferred:
            values: dict[str, Any] = {}
            for name in {read.name: None for read in template.reads if read.name != "secrets"}:
                try:
                    value = scope.get(name)
                except KeyError:
                    continue  # the worker reports it as missing, unless a default replaces it
                if isinstance(value, NodeValue):
                    value = {**value._asdict(), "status": str(value.status)}
                elif name not in ROOTS:
                    value = {"value": value}
                values[name] = value
            room -= json_size(values)
            if room < 0:
                raise TooLarge(
                    f"{_named(path)}: strings with secrets are rendered in the worker, and what "
                    f"they read takes more than {_DEFERRED_SHARE * limit:,} bytes; read smaller "
                    "outputs, or put the secret into a string of its own"
                )
            deferred.append(Deferred(path, template.source, values))
        return tuple(deferred)


def compile_config(config: Mapping[str, Any]) -> ConfigTemplate:
    """Find and compile all templates of a valid config, in their order."""
    raw = dict(config)
    templates: list[tuple[Place, Template]] = []
    stack: list[tuple[Place, Any]] = [((), raw)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            # The size was checked when the definition was, by the limit of that time.
            template = parse_template(value, max_size=sys.maxsize)
            if template is not None:
                templates.append((path, template))
        elif isinstance(value, dict):
            stack += [((*path, key), value[key]) for key in reversed(value)]
        elif isinstance(value, list):
            stack += [((*path, at), value[at]) for at in reversed(range(len(value)))]
    return ConfigTemplate(raw, templates)


def compile_list(items: str | list[Any]) -> Callable[[Scope], Any]:
    """What makes the items of a mapped node: from a template, or from a list with templates."""
    if isinstance(items, list):
        config = compile_config({"items": items})

        def listed(scope: Scope) -> Any:
            try:
                return config.render(scope, MAX_LIST_SIZE).config["items"]
            except TemplateError as error:  # its place is not in the config of the node
                raise type(error)(str(error).removeprefix("config.")) from None

        return listed
    # Spaces around the expression, as in a condition, do not make the list a text.
    template = parse_template(items.strip(), max_size=sys.maxsize)
    if template is None:
        return lambda scope: items
    return lambda scope: template.evaluate(Frame(scope, MAX_LIST_SIZE))


class ItemScope:
    """What the config of a mapped node reads: its run, and one item."""

    __slots__ = ("_get", "_own")

    def __init__(self, scope: Scope, item: Any, index: int) -> None:
        self._get = scope.get
        self._own = {"item": item, "index": index}

    def get(self, name: str) -> Any:
        return self._own[name] if name in self._own else self._get(name)


def secrets_read(deferred: Sequence[Deferred]) -> frozenset[str]:
    """The names of the secrets in these strings."""
    parsed = [parse_template(one.source, max_size=sys.maxsize) for one in deferred]
    return frozenset(name for one in parsed if one is not None for name in one.secrets)


def render_deferred(
    config: dict[str, Any],
    deferred: Sequence[Deferred],
    secrets: Mapping[str, str],
    limit: int = MAX_CONFIG_SIZE,
    *,
    handler: str = "",
    fields: SecretFields | None = True,
) -> dict[str, Any]:
    """The config for the handler, with its deferred strings rendered. Copies, as `render` does.

    Raises `TemplateForbidden` for a secret in a field where the handler takes none (`fields`), or
    in an expression that does more than name it. Messages have keys and kinds, never values; redact
    them all the same.
    """
    if not deferred:
        return config
    rendered = config.copy()
    copied: dict[Place, Any] = {(): rendered}
    known = dict(secrets)
    frame = Frame(_Handed({}, known), limit)
    size = json_size(config)
    for each in deferred:
        path = tuple(each.path)
        for depth in range(1, len(path)):
            owner, key = copied[path[: depth - 1]], path[depth - 1]
            if path[:depth] not in copied:
                copied[path[:depth]] = owner[key] = owner[key].copy()
        frame.get = _Handed(each.scope, known).get
        try:
            template = parse_template(each.source, max_size=sys.maxsize)
            if template is not None and template.uses_secrets:
                _check_secret(template, handler, fields, path)
            value = each.source if template is None else template.evaluate(frame)
        except TemplateRefused as refused:  # a forged task: no valid definition has this template
            kind = TemplateForbidden if refused.code == TemplateForbidden.type else TemplateError
            raise kind(f"{_named(path)}: {refused}") from None
        except TemplateError as error:
            raise type(error)(f"{_named(path)}: {error}") from None
        size += json_size(value) - json_size(each.source)
        if size > limit:
            raise _too_large(size, limit, f"with {_named(path)} ")
        copied[path[:-1]][path[-1]] = value
    return rendered


def masked_config(template: ConfigTemplate, scope: Scope, limit: int) -> dict[str, Any]:
    """A rendered config as users see it, secrets as `***`. Raises `TemplateError`."""
    config, deferred = template.render(scope, limit)
    masked = dict.fromkeys(secrets_read(deferred), MASK)
    return render_deferred(config, deferred, masked, limit)


def _check_secret(
    template: Template, handler: str, fields: SecretFields | None, path: Place
) -> None:
    if (refused := template.refusal) is not None:
        raise TemplateForbidden(refused.message)
    if (why := misplaced(handler, fields, path[0] if path else "")) is not None:
        raise TemplateForbidden(why)


class _Handed:
    """The scope of a worker: the values that came with the task, and its own secrets."""

    __slots__ = ("_secrets", "_values")

    def __init__(self, values: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        self._values = values
        self._secrets = secrets

    def get(self, name: str) -> Any:
        if name == "secrets":
            return self._secrets
        value = self._values[name]
        if name in ROOTS:
            return value
        return value["value"] if "value" in value else NodeValue(**value)


def _named(path: Place) -> str:
    return format_path(("config", *path))


def _too_large(size: int, limit: int, where: str = "") -> TooLarge:
    return TooLarge(
        f"the config {where}takes {size:,} bytes as JSON; at most {limit:,} are allowed"
    )
