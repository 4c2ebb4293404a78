"""Runs a workflow in memory, with mocks, on a clock that does not wait."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dovetail.client.answers import InspectedNode, Run
from dovetail.client.arguments import FORMATS, read_definition
from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.params import check_params
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import DefinitionLimits, check
from dovetail.core.errors import (
    DovetailError,
    InvalidDefinition,
    NotFound,
    Suggester,
    shown,
)
from dovetail.core.events import Event
from dovetail.core.recording import Recording, read_recording
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Submit
from dovetail.engine.commands import new_id
from dovetail.engine.limits import LocalLimits
from dovetail.engine.node_detail import NodeDetail
from dovetail.engine.ports import Call, Calls, OnLines, RateLimiter, Report, Task
from dovetail.engine.views import event_view, run_view
from dovetail.engine.worker import Threads
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.context import Context
from dovetail.handlers.registry import (
    BUILT_IN,
    Handler,
    HandlerError,
    Registry,
    describe,
    load,
    load_entry_points,
    marked,
)
from dovetail.testing.virtual_time import VirtualTimeLoop
from dovetail.wiring.embedded import LocalEngine, buckets, registry_versions

Handlers = str | ModuleType | Callable[..., Any]
"""FILE.py, a module or its name, or a function that `@handler` marks."""
T = TypeVar("T")

_NEVER_OUTSIDE = frozenset({"input", "output", "sleep", "fail"})
"""Built-in handlers that wait for nothing but the loop's own timers."""
_NO_MOCK: Any = object()
CONCURRENCY: int = Settings.model_fields["concurrency"].default
"""The default of a worker."""


class FinishedRun(Run):
    """A run that has finished, with the fields of `dovetail.Run`. Its times are virtual."""

    _state: RunState
    _log: Sequence[Event]

    def __init__(self, state: RunState, log: Sequence[Event]) -> None:
        super().__init__(**vars(Run.from_api(run_view(state))))
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_log", log)

    def node(self, node_id: str) -> InspectedNode:
        """One node with its `config`, `inputs`, `output`, `error` and `attempts`."""
        state = self._state
        index = state.graph.index.get(node_id)
        if index is None:
            hint = Suggester().did_you_mean(node_id, state.graph.index)
            known = ", ".join(state.graph.index)
            raise NotFound(f"the run has no node {shown(node_id)}{hint or f'; it has: {known}'}")
        view = NodeDetail(state, index).view(self._log, None)
        # Whole, however large they are.
        parents = [
            (state.graph.nodes[i].id, state.nodes[i]) for i in state.graph.nodes[index].parents
        ]
        view["inputs"] = {n: p.output for n, p in parents if p.status is NodeStatus.COMPLETED}
        view["output"] = state.nodes[index].output
        return InspectedNode.from_api(view)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the run, as the API has them."""
        return [event_view(event) for event in self._log]


class Runner:
    """Runs workflows for tests. Nothing is stored, and no setting is read."""

    def __init__(
        self, folder: Path | None = None, *, handlers: Handlers | Iterable[Handlers] = ()
    ) -> None:
        """A file that is not in the current directory is looked for in `folder`. `handlers` are
        loaded for each run."""
        self._folder = Path() if folder is None else folder
        self._handlers = _several(handlers)

    def run(
        self,
        workflow: Mapping[str, Any] | str | PathLike[str],
        params: Mapping[str, Any] | None = None,
        *,
        mock: Mapping[str, Any] | None = None,
        fail: Mapping[str, Any] | None = None,
        handlers: Handlers | Iterable[Handlers] = (),
        secrets: Mapping[str, str] | None = None,
        rate_limits: Mapping[str, Any] | None = None,
    ) -> FinishedRun:
        """Run a definition (a dict, or a path) to its end.

        `mock` has, by node id or handler name, what replaces the handler: a value that is the
        output, a function `(config, ctx)`, or an exception. In a list with exceptions or functions
        each entry is one start, and the last one holds for all later starts. `fail` has exceptions,
        and None for a start that does not fail, in turn; after them the node does what it does
        otherwise. An `assert` that fails in a mock is raised here.

        `handlers` are loaded beside the built-in and the installed ones. `rate_limits` is as in
        `dovetail.toml`. Raises `InvalidDefinition` or `InvalidParams` with all problems, and
        `NotFound` for the mock of something that the workflow does not have.
        """
        settings = Settings(secrets=dict(secrets or {}), rate_limits=dict(rate_limits or {}))
        registry = self._registry(settings, [*self._handlers, *_several(handlers)])
        given = _Given(mock or {}, fail or {}, registry)
        checked = given.check(self._definition(workflow))
        graph = build_graph(checked, registry.default_retries())
        given.check_names({spec.id: spec.handler for spec in graph.nodes})
        applied, _ = check_params(checked.params, params or {})
        submit = Submit(new_id(), graph, applied)
        threads = Threads()

        def calls(abort: Callable[[BaseException], None]) -> Calls:
            plans = {
                spec.id: given.plan(spec.id, spec.handler, threads, abort) for spec in graph.nodes
            }
            return _PlannedCalls(plans, settings)

        versions = registry_versions(registry)
        limits = LocalLimits(buckets(settings))
        try:
            return in_virtual_time(
                lambda: execute(submit, calls, limits, versions=versions, secrets=settings.secrets)
            )
        finally:
            threads.close()

    def replay(
        self,
        recording: str | PathLike[str],
        *,
        definition: Mapping[str, Any] | str | PathLike[str] | None = None,
    ) -> FinishedRun:
        """Run a recorded run again, or another `definition` with its params and outputs.

        The handlers `input` and `output`, templates and conditions are computed; every other output
        comes from the recording. Raises `ReplayDiffers` with the first difference.
        """
        from dovetail.testing.replay import replay

        other = None if definition is None else self._definition(definition)
        return replay(self.read(recording), other)

    def read(self, recording: str | PathLike[str]) -> Recording:
        """The recording in a file. Raises `InvalidRecording`, or `NotFound`."""
        path = self._find(Path(recording))
        try:
            return read_recording(path.read_bytes())
        except DovetailError as error:
            raise type(error)(f"{path}: {error}") from None
        except OSError as error:
            raise DovetailError(f"{path} cannot be read: {error.strerror}") from None

    def _definition(
        self, workflow: Mapping[str, Any] | str | PathLike[str]
    ) -> Mapping[str, Any] | Source:
        if isinstance(workflow, Mapping):
            return workflow
        path = Path(workflow)
        if path.suffix.lower() not in FORMATS:
            raise DovetailError(
                f"{shown(str(workflow))} is no definition; give a dict or a path (.yaml .yml .json)"
            )
        return read_definition(self._find(path), DefinitionLimits())

    def _find(self, path: Path) -> Path:
        if path.exists():
            return path
        beside = self._folder / path
        if not beside.exists():
            raise NotFound(
                f"there is no file {path}, neither in {Path.cwd()} nor in {self._folder}"
            )
        return beside

    def _registry(self, settings: Settings, handlers: Iterable[Handlers]) -> Registry:
        registry = builtin_registry(settings)
        for known in _installed():
            registry.add(known)
        for one in handlers:
            for known in self._load(one):
                registry.add(known)
        return registry

    def _load(self, one: Handlers) -> list[Handler]:
        if isinstance(one, ModuleType):
            one = one.__name__
        if isinstance(one, str):
            return load(str(self._find(Path(one))) if one.endswith(".py") else one)
        found = marked(one, getattr(one, "__module__", "a test"))
        if not found:
            raise HandlerError(f'{one!r} is no handler; decorate it: @handler("name")')
        return found


def _several(handlers: Handlers | Iterable[Handlers]) -> list[Handlers]:
    if isinstance(handlers, str | ModuleType) or callable(handlers):
        return [handlers]
    return list(handlers)


@cache
def _installed() -> list[Handler]:
    return load_entry_points()


# ── mocks ────────────────────────────────────────────────────────────────────────────────


class _Given:
    """What a test gave as `mock` and `fail`, by node id or handler name."""

    def __init__(
        self, mock: Mapping[str, Any], fail: Mapping[str, Any], registry: Registry
    ) -> None:
        self._mock = mock
        self._fail = {name: _failures(name, given) for name, given in fail.items()}
        for name, given in mock.items():
            _check_mock(name, given)
        self._registry = registry
        self._aliases = registry.aliases()

    def check(self, definition: Mapping[str, Any] | Source) -> Any:
        """The valid workflow. A handler that is mocked wherever it is used need not be known."""
        data = definition.data if isinstance(definition, Source) else definition
        nodes = _nodes(data)
        mocked = {index for index, node in enumerate(nodes) if self._is_mocked(*node)}
        for _, handler in (nodes[index] for index in mocked):
            others = (i for i, (_, other) in enumerate(nodes) if other == handler)
            if handler not in self._registry and mocked.issuperset(others):
                self._add_unknown(handler)
        checked = check(definition, self._registry, DefinitionLimits())
        if checked.workflow is None:
            hidden = {f"nodes[{index}].handler" for index in mocked}
            raise InvalidDefinition(
                [
                    problem
                    for problem in checked.errors
                    if problem.code != "unknown_handler" or problem.path not in hidden
                ]
            )
        return checked.workflow

    def _add_unknown(self, handler: str) -> None:
        try:
            self._registry.add(describe(_unknown, name=handler, secrets=True, origin="a mock"))
        except HandlerError:  # no name of a handler: the validation reports it
            return

    def _is_mocked(self, node_id: str, handler: str) -> bool:
        return self._find(self._mock, node_id, handler) is not None

    def check_names(self, nodes: Mapping[str, str]) -> None:
        """Raises `NotFound` for a name that is neither a node's nor a handler's."""
        known = {*nodes, *nodes.values(), *self._registry}
        for kind, given in (("mock", self._mock), ("fail", self._fail)):
            for name in given:
                if name not in known:
                    hint = Suggester().did_you_mean(name, [*nodes, *nodes.values()])
                    handlers = ", ".join(dict.fromkeys(nodes.values()))
                    raise NotFound(
                        f"{kind}: the workflow has no node and no handler {shown(name)}"
                        f"{hint or '.'} Nodes: {', '.join(nodes)}. Handlers: {handlers}"
                    )

    def plan(
        self,
        node_id: str,
        handler: str,
        threads: Threads,
        abort: Callable[[BaseException], None],
    ) -> _NodePlan:
        known = self._registry.get(handler)
        mock, fail = (self._find(one, node_id, handler) for one in (self._mock, self._fail))
        return _NodePlan(
            *(handler, None if known.fn is _unknown else known),
            _NO_MOCK if mock is None else self._mock[mock],
            () if fail is None else self._fail[fail],
            threads,
            abort,
        )

    def _find(self, given: Mapping[str, Any], node_id: str, handler: str) -> str | None:
        """The name under which something was given for a node; its id comes first."""
        if node_id in given:
            return node_id
        meant = self._aliases.get(handler, handler)
        return next((name for name in given if self._aliases.get(name, name) == meant), None)


def _nodes(data: Any) -> list[tuple[str, str]]:
    """The id and the handler of each node of a definition that may be wrong in any way."""
    listed = data.get("nodes") if isinstance(data, Mapping) else None
    nodes = listed if isinstance(listed, list | tuple) else ()
    entries = [node if isinstance(node, Mapping) else {} for node in nodes]
    return [(_text(node.get("id")), _text(node.get("handler"))) for node in entries]


def _text(value: Any) -> str:
    """Not `str(value)`: a value that is no text may refuse to be written."""
    return value if isinstance(value, str) else ""


def _unknown(config: dict[str, Any], ctx: Context) -> None:
    """A handler that is known by its name only."""


def _is_error(given: Any) -> bool:
    if isinstance(given, type):
        return issubclass(given, BaseException)
    return isinstance(given, BaseException)


def _is_in_turn(given: Any) -> bool:
    """Whether a list has one entry for each start: such entries can be no part of an output."""
    return isinstance(given, list | tuple) and any(_is_error(one) or callable(one) for one in given)


def _check_mock(name: str, given: Any) -> None:
    for one in given if _is_in_turn(given) else (given,):
        if callable(one) and not _is_error(one):
            try:
                describe(one, name="mock")
            except HandlerError as error:
                words = str(error).removeprefix("@handler('mock'): ")
                raise HandlerError(f"mock of {shown(name)}: {words}") from None


def _failures(name: str, given: Any) -> Sequence[Any] | BaseException | type[BaseException]:
    if _is_error(given):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, list | tuple) or not all(e is None or _is_error(e) for e in given):
        raise DovetailError(
            f"fail of {shown(name)}: an exception, or a list of exceptions and None, as in "
            "[TimeoutError, None]"
        )
    return given


def _raised(given: Any, start: int, ctx: Context) -> BaseException:
    if not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    try:
        return given(f"start {start} of '{ctx.node_id}' fails, as the test says")  # type: ignore[no-any-return]
    except TypeError:  # it takes other arguments
        return given()  # type: ignore[no-any-return]


class _NodePlan:
    """What the starts of a node do."""

    def __init__(
        self,
        name: str,
        known: Handler | None,
        mock: Any,
        fail: Any,
        threads: Threads,
        abort: Callable[[BaseException], None],
    ) -> None:
        self._known = known
        self._mock = mock
        self._fail = fail
        self._threads = threads
        self._abort = abort
        self._starts: Counter[Any] = Counter()
        self._mocked: Counter[Any] = Counter()
        own = describe(mock, name=name) if _is_function(mock) else None
        self.handler = _PlannedHandler(
            name=name,
            fn=self,
            config_model=None if own is None else own.config_model,
            secrets=True if known is None else known.secrets,
            version=1 if known is None else known.version,
            known=known,
            is_mocked=mock is not _NO_MOCK,
        )

    async def __call__(self, config: Any, ctx: Context) -> Any:
        item = getattr(ctx, "index", None)
        self._starts[item] += 1
        start = self._starts[item]
        planned = self._fail
        if isinstance(planned, list | tuple):
            planned = planned[start - 1] if start <= len(planned) else None
        if planned is not None:
            raise _raised(planned, start, ctx)
        if self._mock is _NO_MOCK:
            return await self._call_known(config, ctx)
        self._mocked[item] += 1
        return await self._call_mock(config, ctx, self._mocked[item])

    async def _call_mock(self, config: Any, ctx: Context, start: int) -> Any:
        mock = self._mock
        if _is_in_turn(mock):
            mock = mock[min(start, len(mock)) - 1]
        if _is_error(mock):
            raise _raised(mock, start, ctx)
        if not callable(mock):
            return copy.deepcopy(mock)
        try:
            output = mock(config, ctx)
            return await output if inspect.isawaitable(output) else output
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # An assert or a `pytest.fail` in a mock is about the test, not about the node.
            if isinstance(error, AssertionError) or not isinstance(error, Exception):
                self._abort(error)
            raise

    async def _call_known(self, config: Any, ctx: Context) -> Any:
        known = self._known
        assert known is not None  # noqa: S101  (the validation knows it)
        if known.origin == BUILT_IN and known.name in _NEVER_OUTSIDE:
            return await known.fn(config, ctx)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)  # noqa: S101
        if known.is_async:
            work: Any = known.fn(config, ctx)
            with loop.watching(work):
                return await work
        with loop.waiting_outside():
            output = await self._threads.submit(partial(known.fn, config, ctx))
        return await output if inspect.isawaitable(output) else output


def _is_function(mock: Any) -> bool:
    return callable(mock) and not _is_error(mock)


@dataclass(frozen=True, slots=True)
class _PlannedHandler(Handler):
    known: Handler | None = None
    is_mocked: bool = False

    def prepare(self, config: dict[str, Any]) -> Any:
        """A mock gets the dict, which the handler's own model has checked; or its own model."""
        checked = config if self.known is None else self.known.prepare(config)
        return Handler.prepare(self, config) if self.is_mocked else checked


class _PlannedCalls:
    """The calls of one run: each node has its own handler."""

    def __init__(self, plans: Mapping[str, _NodePlan], settings: Settings) -> None:
        self._calls: dict[str, RegistryCalls] = {}
        for node_id, plan in plans.items():
            registry = Registry()
            registry.add(plan.handler)
            self._calls[node_id] = RegistryCalls(registry, secrets=settings.secrets)

    def open(self, task: Task, report: Report, on_lines: OnLines) -> Call:
        return self._calls[node_of(task)].open(task, report, on_lines)


def node_of(task: Task) -> str:
    """Its node; an item of a mapped node is called `node[3]`."""
    return task.node_id.partition("[")[0]


# ── the run ──────────────────────────────────────────────────────────────────────────────


async def execute(
    submit: Submit,
    calls: Callable[[Callable[[BaseException], None]], Calls],
    limits: RateLimiter,
    *,
    versions: Any = None,
    secrets: Mapping[str, str] | None = None,
    concurrency: int = CONCURRENCY,
    beside: Callable[[LocalEngine], Coroutine[Any, Any, None]] | None = None,
) -> FinishedRun:
    """Run it in memory; `calls` gets a function that ends the run with an error, which is raised
    here. `beside` runs until the run has ended."""
    loop = asyncio.get_running_loop()
    epoch = time.time()
    engine: LocalEngine

    def abort(error: BaseException) -> None:
        engine.crash(error)

    engine = LocalEngine(
        calls(abort),
        concurrency=concurrency,
        limits=limits,
        clock=lambda: epoch + loop.time(),
        versions=versions,
        secrets=secrets,
        chance=lambda: 0.0,
        watches_loop=False,
    )
    async with engine:
        await engine.orchestrator.submit(submit)
        also = None if beside is None else asyncio.ensure_future(beside(engine))
        try:
            state = await engine.wait(submit.run_id)
            log = [event async for event in engine.store.watch(submit.run_id)]
        finally:
            if also is not None:
                also.cancel()
    return FinishedRun(state, log)


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a clock that jumps. In an async test, whose loop runs in this thread, it
    has a thread of its own, and the test waits."""

    def play() -> T:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(work())

    return _in_thread(play) if _has_a_loop() else play()


def _has_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Callable[[], T]) -> T:
    outcome: list[T] = []
    errors: list[BaseException] = []

    def main() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(main,), name="dovetail-runner")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
