"""The DAGs that a Celery worker runs: DAGs that its modules registered, and definitions.

Other programs may write to a queue. So a message has a definition, which is untrusted data, or a
name that is looked up here. It never names code to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

from dovetail.config import Settings, load_settings
from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.source import Source, read_text
from dovetail.core.definition.validation import check
from dovetail.core.errors import DovetailError, InvalidDefinition, NotFound, Problem
from dovetail.core.values import NotJson, encode
from dovetail.executor import WorkflowDAG
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import HandlerError, Registry, marked
from dovetail.wiring.embedded import definition_limits

Builder = Callable[[dict[str, Any]], WorkflowDAG]
Dag = WorkflowDAG | Builder | Mapping[str, Any] | str | PathLike[str]
B = TypeVar("B", bound=WorkflowDAG | Builder)

MAX_COMPILED = 64
# A definition's text has a colon in it, a name has none.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_dags: dict[str, WorkflowDAG | Builder] = {}
_handlers: list[Any] = []


class DagRefused(DovetailError):
    """A DAG that cannot be run at all; trying again would not help."""

    def __init__(self, message: str, type: str = "refused") -> None:  # noqa: A002
        super().__init__(message, type)  # both: a result backend rebuilds it from its arguments
        self.type = type

    def __str__(self) -> str:
        return str(self.args[0])


def register_dag(dag: B, *, name: str | None = None) -> B:
    """Make a `WorkflowDAG` known to `run_dag` in this process, by its name.

    Call it in a module that your workers import. It also takes a function that makes the graph
    from the context, as a decorator: `@register_dag`. Returns what it was given.
    """
    known_as = name or (dag.name if isinstance(dag, WorkflowDAG) else dag.__name__)
    if not _NAME.fullmatch(known_as):
        raise ValueError(
            f"{known_as!r} cannot name a DAG: 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit; give another with name="
        )
    if _dags.setdefault(known_as, dag) is not dag:
        raise ValueError(
            f"another DAG '{known_as}' is registered here; rename one of the two: which of them "
            "runs must not depend on what is imported first"
        )
    return dag


def register_handlers(*sources: str | PathLike[str] | Callable[..., Any]) -> None:
    """Make handlers known to definitions that `run_dag` runs in this process.

    `sources` are functions with `@handler`, or files and modules to load them from. Handlers that
    are built in, of installed packages and of `DOVETAIL_HANDLERS` are known already.
    """
    for source in sources:
        if callable(source) and not marked(source, ""):
            raise HandlerError(f"{source!r} is no handler: decorate it with @handler")
    _handlers.extend(sources)
    known_handlers.cache_clear()
    compiled.cache_clear()


@cache
def settings() -> Settings:
    return load_settings()


@cache
def known_handlers() -> Registry:
    files = [str(source) for source in _handlers if not callable(source)]
    registry = load_registry(settings(), files)
    for source in _handlers:
        for known in marked(source, getattr(source, "__module__", "unknown")):
            registry.add(known)
    return registry


def sendable(dag: Any) -> str:
    """The form of a DAG in a message: its name, or its definition as text.

    It is checked here as far as possible, so that the caller gets the error.
    """
    if isinstance(dag, WorkflowDAG) or (callable(dag) and not isinstance(dag, PathLike)):
        return _name_of(dag)
    if isinstance(dag, PathLike) or _is_path(dag):
        dag = _file_text(Path(dag))
    if is_name(dag):
        return str(dag)  # the worker checks whether it is registered
    text = text_of(dag)
    _checked(text)
    return text


def _name_of(dag: Any) -> str:
    for name, known in _dags.items():
        if known is dag:
            return name
    what = f"WorkflowDAG '{dag.name}'" if isinstance(dag, WorkflowDAG) else repr(dag)
    raise DagRefused(
        f"{what} is code and cannot be sent: call register_dag with it in a module that your "
        "workers import, and its name is sent"
    )


def _is_path(dag: Any) -> bool:
    return isinstance(dag, str) and "\n" not in dag and dag.endswith((".yaml", ".yml", ".json"))


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DovetailError(f"{path} cannot be read: {error}") from None


def text_of(definition: Any) -> str:
    if isinstance(definition, str):
        return definition
    if not isinstance(definition, Mapping):
        raise TypeError(
            "a DAG is a registered WorkflowDAG or its name, or a definition: a dict, YAML or JSON "
            f"text, a file; not {type(definition).__name__}"
        )
    plain = dict(definition)
    try:
        return encode(plain, max_bytes=definition_limits(settings()).max_body_bytes).decode()
    except NotJson as error:
        _valid(plain, None)  # raises with all problems of its values
        raise InvalidDefinition([Problem(error.code, str(error), "")]) from None


@lru_cache(MAX_COMPILED)
def _checked(text: str, registry: Registry | None = None) -> Workflow:
    """Cached: a group sends the same definition with every item."""
    limits = definition_limits(settings())
    form: Literal["yaml", "json"] = "json" if text.lstrip().startswith("{") else "yaml"
    source = read_text(
        text, format=form, max_bytes=limits.max_body_bytes, max_depth=limits.max_depth
    )
    return _valid(source, registry)


def _valid(definition: Source | Mapping[str, Any], registry: Registry | None) -> Workflow:
    checked = check(definition, registry, definition_limits(settings()))
    if checked.workflow is None:
        raise InvalidDefinition(checked.errors)
    # If its worker dies, the task is delivered again and starts from the beginning.
    impossible = [
        Problem(
            "invalid_field",
            f"'{node.id}' is at_most_once, which a DAG inside one task cannot promise: trigger "
            "the workflow with DOVETAIL_TRANSPORT=celery instead",
            f"nodes[{index}].delivery",
        )
        for index, node in enumerate(checked.workflow.nodes)
        if node.delivery == "at_most_once"
    ]
    if impossible:
        raise InvalidDefinition(impossible)
    return checked.workflow


def is_name(dag: Any) -> bool:
    return isinstance(dag, str) and _NAME.fullmatch(dag) is not None


def known_dag(name: str) -> WorkflowDAG | Builder:
    if name not in _dags:
        near = get_close_matches(name, _dags, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(_dags) or 'none'}"
        raise NotFound(
            f"no DAG '{name}' is registered in this worker ({hint}): call register_dag in a "
            "module that it imports"
        )
    return _dags[name]


@lru_cache(MAX_COMPILED)
def compiled(definition: str) -> tuple[Graph, dict[str, Any] | None]:
    """The graph of a definition's text, and the schema of its params."""
    registry = known_handlers()
    workflow = _checked(definition, registry)
    return build_graph(workflow, registry.default_retries()), workflow.params
