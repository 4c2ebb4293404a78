"""Finding handlers in files, modules and installed packages.

Loading runs the user's code, so everything it can raise is told as one line that names the
file, the line and the cause. It must not know what is already registered: it returns what it
found, and the registry decides.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from dovetail.handlers.registry import Handler, HandlerError, marked

GROUP = "dovetail.handlers"

# Frames of these say nothing about the user's mistake.
_IMPORTERS = ("<frozen", str(Path(importlib.__file__).parent), __file__)

_EXAMPLE = 'decorate a function: @handler("name") def name(config, ctx): …'


def load(spec: str) -> list[Handler]:
    """The handlers of `FILE.py` or of `package.module`."""
    spec = spec.strip()
    if not spec:
        raise HandlerError("an empty name to load handlers from; give FILE.py or package.module")
    if spec.endswith(".py") or "/" in spec or "\\" in spec:
        # Not by Path, which raises for a home that nobody has.
        return _load_file(Path(os.path.expanduser(spec)), spec)  # noqa: PTH111
    return _load_module(spec)


def load_entry_points() -> list[Handler]:
    """The handlers that installed packages offer; an entry point names a module or a function."""
    found: list[Handler] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist is not None else "an installed package"
        label = f"entry point '{entry.name}' of {package}"
        with _told(label):
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
    # One name per path: two files called handlers.py must not take each other's place.
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
    # Before it runs: pydantic and pickle look a class's module up there.
    sys.modules[name] = module
    try:
        with _told(f"handlers {shown}", path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> list[Handler]:
    _make_importable(Path.cwd())
    label = f"handlers {name}"
    try:
        with _told(label):
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
    """The marked functions among a module's names, in the order of definition."""
    found: list[Handler] = []
    seen: set[int] = set()
    for value in list(vars(module).values()):
        if id(value) in seen:  # one function under two names
            continue
        seen.add(id(value))
        place = origin
        if path is not None and (line := _line(value, path)):
            place = f"{origin}:{line}"
        found += marked(value, place)
    return found


def _line(value: object, path: Path) -> int | None:
    """The line of a function's def, if it stands in that very file."""
    code = getattr(value, "__code__", None)
    if code is None or Path(code.co_filename) != path:
        return None
    return int(code.co_firstlineno)


def _make_importable(directory: Path) -> None:
    # At the end: a neighbour called like an installed package must not take its place.
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


@contextmanager
def _told(label: str, path: Path | None = None) -> Iterator[None]:
    """Turn whatever the user's code raises into one line that says what and where."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # SystemExit too: a script without a main guard must not end Dovetail without a word.
        raise HandlerError(f"{label}{_place(error, path)}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    if isinstance(error, HandlerError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException, path: Path | None) -> str:
    """`:line` in the loaded file; else, in brackets, the innermost place outside the importer."""
    steps = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        steps.append((error.filename, error.lineno))
    own = [line for file, line in steps if path is not None and Path(file) == path]
    if own:
        return f":{own[-1]}"
    foreign = [(file, line) for file, line in steps if not file.startswith(_IMPORTERS)]
    return f" ({Path(foreign[-1][0]).name}:{foreign[-1][1]})" if foreign else ""
