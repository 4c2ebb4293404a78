"""Declares handlers, loads them from files, modules and installed packages, and registers them.

`@handler` only marks a function; an import registers nothing. A `Registry` collects marked
functions, so two registries in one process do not share handlers. Loading runs the user's code:
any error in it becomes one line with the file, the line and the cause.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints, overload

from dovetail.core.errors import DovetailError, NotFound, PermanentError
from dovetail.core.redaction import SecretFields
from dovetail.handlers.config_schema import is_announced, schema_of
from dovetail.handlers.context import Context

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


GROUP = "dovetail.handlers"

# Frames of these modules are not in the user's code.
_IMPORTERS = ("<frozen", str(Path(importlib.__file__).parent), __file__)

_EXAMPLE = 'decorate a function: @handler("name") def name(config, ctx): …'


def load(spec: str) -> list[Handler]:
    """The handlers of `FILE.py` or of `package.module`."""
    spec = spec.strip()
    if not spec:
        raise HandlerError("an empty name to load handlers from; give FILE.py or package.module")
    if spec.endswith(".py") or "/" in spec or "\\" in spec:
        # Not `Path.expanduser`, which raises if the user does not exist.
        return _load_file(Path(os.path.expanduser(spec)), spec)  # noqa: PTH111
    return _load_module(spec)


def load_entry_points() -> list[Handler]:
    """The handlers of installed packages; an entry point names a module or a function."""
    found: list[Handler] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist is not None else "an installed package"
        label = f"entry point '{entry.name}' of {package}"
        with _load_errors(label):
            target = entry.load()
        offered = (
            _scan(target, entry.module)
            if isinstance(target, ModuleType)
            else marked(target, entry.module)
        )
        if not offered:
            raise HandlerError(f"{label}: {entry.value} is no handler; {_EXAMPLE}")
        found += offered
    return found


def _load_file(path: Path, shown: str) -> list[Handler]:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "there is no such file"
        raise HandlerError(f"handlers {shown}: {what}; give FILE.py or package.module")
    path = path.resolve()
    # One module name per path: two files called handlers.py must not replace each other.
    name = f"dovetail_handlers_{sha256(str(path).encode()).hexdigest()[:16]}"
    module = sys.modules.get(name)
    if module is None:
        _make_importable(path.parent)  # so that the file can import its neighbours
        module = _execute(name, path, shown)
    return _some(_scan(module, path.name, path), f"handlers {shown}")


def _execute(name: str, path: Path, shown: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HandlerError(f"handlers {shown}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: pydantic and pickle look up the module of a class there.
    sys.modules[name] = module
    try:
        with _load_errors(f"handlers {shown}", path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> list[Handler]:
    _make_importable(Path.cwd())
    label = f"handlers {name}"
    try:
        with _load_errors(label):
            module = importlib.import_module(name)
    except HandlerError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and _is_part(cause.name, name):
            raise HandlerError(
                f"{label}: there is no module '{cause.name}' here; "
                "is it installed, or did you mean a file, as in FILE.py?"
            ) from cause
        raise
    return _some(_scan(module, name), label)


def _is_part(missing: str | None, name: str) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))


def _some(found: list[Handler], label: str) -> list[Handler]:
    if not found:
        raise HandlerError(f"{label}: no handler in it; {_EXAMPLE}")
    return found


def _scan(module: ModuleType, origin: str, path: Path | None = None) -> list[Handler]:
    """The marked functions of a module, in the order of definition."""
    found: list[Handler] = []
    seen: set[int] = set()
    for value in list(vars(module).values()):
        if id(value) in seen:  # one function under two names
            continue
        seen.add(id(value))
        line_origin = origin
        if path is not None and (line := _line(value, path)):
            line_origin = f"{origin}:{line}"
        found += marked(value, line_origin)
    return found


def _line(value: object, path: Path) -> int | None:
    """The line of a function's `def`, if it is in that file."""
    code = getattr(value, "__code__", None)
    if code is None or Path(code.co_filename) != path:
        return None
    return int(code.co_firstlineno)


def _make_importable(directory: Path) -> None:
    # At the end: a file with the name of an installed package must not replace it.
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


@contextmanager
def _load_errors(label: str, path: Path | None = None) -> Iterator[None]:
    """Turn any error of the user's code into one line with its file, line and cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # SystemExit too: a script without a main guard must not end Dovetail silently.
        raise HandlerError(f"{label}{_location(error, path)}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    if isinstance(error, HandlerError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _location(error: BaseException, path: Path | None) -> str:
    """`:line` in the loaded file; else, in brackets, the innermost line outside the importer."""
    steps = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        steps.append((error.filename, error.lineno))
    own = [line for file, line in steps if path is not None and Path(file) == path]
    if own:
        return f":{own[-1]}"
    foreign = [(file, line) for file, line in steps if not file.startswith(_IMPORTERS)]
    return f" ({Path(foreign[-1][0]).name}:{foreign[-1][1]})" if foreign else ""


HandlerFunction = Callable[[Any, Context], Any | Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])

BUILT_IN = "built in"
MARK = "__dovetail_handlers__"

# Names become stream names and metric labels, so only plain characters are allowed.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class HandlerError(DovetailError):
    """A handler that cannot work, or a file or module without handlers."""

    type = "handler_error"


@dataclass(frozen=True, slots=True)
class Handler:
    """One handler. `origin` says for people where it was loaded from."""

    name: str
    fn: HandlerFunction
    max_retries: int = 0
    version: int = 1
    """The node cache does not use outputs of another version."""
    is_async: bool = True
    config_model: type[BaseModel] | None = None
    origin: str = BUILT_IN
    description: str = ""
    secrets: SecretFields = False
    """Where its config may have secrets: anywhere, in these fields, nowhere."""

    def prepare(self, config: dict[str, Any]) -> Any:
        """The config for the handler: its pydantic model if it has one, else the dict.

        Raises a `PermanentError` of type `invalid_config` with all violations.
        """
        if self.config_model is None:
            return config
        from pydantic import ValidationError

        try:
            return self.config_model.model_validate(config)
        except ValidationError as error:
            # Without the cause: pydantic's own text repeats the input, which may be a secret.
            raise PermanentError(
                f"config of handler '{self.name}': {_violations(error, self.config_model)}",
                type="invalid_config",
            ) from None

    def announcement(self) -> dict[str, Any]:
        """What other processes know of it: a handler of `GET /workers`."""
        fields, schema = self.secrets, self.checkable_schema()
        return {
            "name": self.name,
            "max_retries": self.max_retries,
            "secrets": fields if isinstance(fields, bool) else sorted(fields),
            "version": self.version,
            "config_schema": schema if schema is not None and is_announced(schema) else None,
        }

    def checkable_schema(self) -> dict[str, Any] | None:
        """What is known beforehand of the configs that it refuses; None if that is nothing."""
        if self.config_model is None:
            return None
        try:
            return schema_of(self.config_model)
        except Exception:  # a model that is not complete, or of a later pydantic
            return None

    def config_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the config, if the handler declares a model."""
        return None if self.config_model is None else self.config_model.model_json_schema()


@dataclass(frozen=True, slots=True)
class _Mark:
    """The arguments of the decorator, kept on the function until a registry collects it."""

    name: str
    max_retries: int
    secrets: SecretFields = False
    version: int = 1


@overload
def handler(name: F) -> F: ...
@overload
def handler(
    name: str | None = None,
    *,
    max_retries: int = 0,
    version: int = 1,
    secrets: SecretFields = False,
) -> Callable[[F], F]: ...
def handler(
    name: Any = None, *, max_retries: int = 0, version: int = 1, secrets: SecretFields = False
) -> Any:
    """Mark a function `(config, ctx)`, async or plain, as a handler.

    `@handler`, `@handler("name")` and `@handler("name", max_retries=3)` all work; the default name
    is the function's. The function is unchanged and can be called in tests. Raise `version` when
    the function returns other outputs than before: nodes with `cache` then run it again.

    With `secrets=True` a definition may have `{{ secrets.NAME }}` anywhere in the config, and
    `ctx.secrets` has all secrets; with `secrets=("headers",)` only in those fields. Such a handler
    decides where secrets go: a config must not be able to send them to another host.
    """
    if callable(name):
        return handler()(name)

    def mark(fn: F) -> F:
        # Errors are raised here, at the `def`.
        named = describe(fn, name=name, max_retries=max_retries, version=version, secrets=secrets)
        mark = _Mark(named.name, named.max_retries, named.secrets, named.version)
        marks = (*getattr(fn, MARK, ()), mark)
        try:
            setattr(fn, MARK, marks)
        except AttributeError:
            raise HandlerError(
                f"@handler({named.name!r}): {fn!r} cannot be marked; decorate a function"
            ) from None
        return fn

    return mark


def describe(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    max_retries: int = 0,
    version: int = 1,
    origin: str | None = None,
    secrets: SecretFields = False,
) -> Handler:
    """The handler of a function; raises `HandlerError` if it cannot be one."""
    name = getattr(fn, "__name__", None) if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise HandlerError(
            f"@handler({name!r}): a name is 1 to 128 letters, digits, '_', '.' or '-' "
            "and does not begin with '.' or '-'"
        )
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise HandlerError(
            f"@handler({name!r}): max_retries must be a whole number ≥ 0, not {max_retries!r}"
        )
    if not isinstance(secrets, bool):
        listed = isinstance(secrets, list | tuple | set | frozenset)
        if not listed or not all(isinstance(field, str) for field in secrets):
            raise HandlerError(
                f"@handler({name!r}): secrets is True, False or the names of config fields, "
                "as in secrets=('headers',)"
            )
        secrets = frozenset(secrets)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise HandlerError(
            f"@handler({name!r}): version must be a whole number ≥ 1, not {version!r}"
        )
    if inspect.isclass(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise HandlerError(
            f"@handler({name!r}): a handler is a function that returns its output, "
            "not a class and not a generator"
        )
    signature = inspect.signature(fn)
    try:
        signature.bind(None, None)
    except TypeError:
        raise HandlerError(
            f"@handler({name!r}): a handler takes (config, ctx); this one takes {signature}"
        ) from None
    call = getattr(fn, "__call__", None)  # noqa: B004  (an object with an async __call__)
    return Handler(
        name=name,
        fn=fn,
        max_retries=max_retries,
        version=version,
        is_async=inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call),
        config_model=_config_model(fn, signature),
        origin=origin if origin is not None else getattr(fn, "__module__", None) or "unknown",
        description=_first_paragraph(fn),
        secrets=secrets,
    )


class Registry:
    """Handlers by name and alias."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._aliases: dict[str, str] = {}

    def add(self, known: Handler, *aliases: str) -> None:
        """Register a handler. The same function again changes nothing; another function of that
        name is refused, so that the order of loading never matters."""
        for name in (known.name, *aliases):
            earlier = self._find(name)
            if earlier is None or earlier.fn is known.fn:
                continue
            if earlier.origin == BUILT_IN:
                raise HandlerError(
                    f"{known.origin}: handler '{name}' is built in and cannot be replaced; "
                    "choose another name"
                )
            raise HandlerError(
                f"{known.origin}: handler '{name}' is already defined in {earlier.origin}; "
                "rename one of the two"
            )
        if known.name not in self._handlers:
            self._handlers[known.name] = known
        self._aliases.update(dict.fromkeys(aliases, known.name))

    def get(self, name: str) -> Handler:
        """The handler of that name or alias; `NotFound` with a did-you-mean otherwise."""
        found = self._find(name)
        if found is not None:
            return found
        near = get_close_matches(name, list(self), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(sorted(self))}"
        raise NotFound(f"no handler '{name}'; {hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._handlers or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        """All names that a definition may use, aliases included."""
        yield from self._handlers
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._handlers) + len(self._aliases)

    def handlers(self) -> list[Handler]:
        """Each handler once, in the order of loading."""
        return list(self._handlers.values())

    def aliases(self) -> Mapping[str, str]:
        """Alias → the handler's own name."""
        return dict(self._aliases)

    def items(self) -> Iterator[tuple[str, Handler]]:
        """All names and aliases with their handlers."""
        for name in self:
            yield name, self.get(name)

    def default_retries(self) -> dict[str, int]:
        """Name and alias → the handler's own `max_retries`."""
        return {name: known.max_retries for name, known in self.items()}

    def secret_fields(self, name: str) -> SecretFields | None:
        """Where the config of that handler may have secrets; None if it is unknown."""
        found = self._find(name)
        return None if found is None else found.secrets

    def taking_secrets(self) -> dict[str, bool | list[str]]:
        """Name and alias of each handler that takes secrets → true, or the fields; as JSON."""
        return {
            name: True if known.secrets is True else sorted(known.secrets)
            for name, known in self.items()
            if not isinstance(known.secrets, bool) or known.secrets
        }

    def config_schema(self, name: str) -> dict[str, Any] | None:
        """What is known beforehand of the configs that this handler refuses."""
        found = self._find(name)
        return None if found is None else found.checkable_schema()

    def announced_schemas(self) -> dict[str, dict[str, Any]]:
        """Name and alias → `config_schema`, without schemas that are too large to be announced."""
        found = {name: known.checkable_schema() for name, known in self.items()}
        return {name: schema for name, schema in found.items() if schema and is_announced(schema)}

    def later_versions(self) -> dict[str, int]:
        """Name and alias → the handler's `version`, for versions above 1."""
        return {name: known.version for name, known in self.items() if known.version != 1}

    def load(self, spec: str) -> list[Handler]:
        """Register the handlers of `FILE.py` or `package.module`; loading twice changes nothing."""

        return self._take(load(spec))

    def load_entry_points(self) -> list[Handler]:
        """Register the handlers of installed packages (entry point group `dovetail.handlers`)."""

        return self._take(load_entry_points())

    def _take(self, found: list[Handler]) -> list[Handler]:
        for known in found:
            self.add(known)
        return found

    def _find(self, name: str) -> Handler | None:
        return self._handlers.get(self._aliases.get(name, name))


def marked(fn: object, origin: str) -> list[Handler]:
    """The handlers of a decorated function; none if it is not decorated."""
    marks: tuple[_Mark, ...] = getattr(fn, MARK, ()) if callable(fn) else ()
    return [
        replace(
            describe(
                fn,
                name=mark.name,
                max_retries=mark.max_retries,
                version=mark.version,
                secrets=mark.secrets,
            ),
            origin=origin,
        )
        for mark in marks
        if callable(fn)
    ]


def _config_model(fn: Callable[..., Any], signature: inspect.Signature) -> type[BaseModel] | None:
    first = next(iter(signature.parameters.values()))
    annotation = first.annotation
    if isinstance(annotation, str):  # from __future__ import annotations
        annotation = _resolved(fn, first.name, annotation)
    # If the annotation is a pydantic model, pydantic is imported already.
    pydantic = sys.modules.get("pydantic")
    if pydantic and inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return cast("type[BaseModel]", annotation)
    return None


def _resolved(fn: Callable[..., Any], name: str, text: str) -> object:
    """The value of an annotation written as text; None if it cannot be evaluated."""
    written = fn if inspect.isfunction(fn) else getattr(type(fn), "__call__", fn)  # noqa: B004
    try:
        return get_type_hints(written).get(name)
    except Exception:  # another annotation uses a name that does not exist at run time
        return getattr(written, "__globals__", {}).get(text.strip("'\""))


def _first_paragraph(fn: Callable[..., Any]) -> str:
    text = inspect.getdoc(fn) or ""
    return " ".join(text.split("\n\n")[0].split())


def _violations(error: ValidationError, model: type[BaseModel]) -> str:
    known = [field.alias or name for name, field in model.model_fields.items()]
    said = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"])
        what = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            near = get_close_matches(where, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it knows: {', '.join(known)}"
            what = f"unknown field; {hint}"
        said.append(f"{where}: {what}" if where else what)
    return "; ".join(said)
