"""Dovetail as a library: a graph of Python functions, run in this process.

It uses the same core, orchestrator and worker as the services. A step is a node: its handler is
the function, and its condition is a function instead of a template.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from dovetail.core import events as core_events
from dovetail.core.dag import (
    Graph,
    MapSpec,
    NodeSpec,
    children_of,
    cycles,
    layers,
    ready_nodes,
    spell_out,
)
from dovetail.core.effects import COMPLETED, FAILED
from dovetail.core.errors import InvalidDefinition, Problem, TemplateError
from dovetail.core.items import MAX_ITEMS, split_name
from dovetail.core.retry import DEFAULT_RETRY, RetryPolicy
from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.core.templates import Scope, compile_config
from dovetail.core.transitions import Dispatch, Submit
from dovetail.engine.limits import DEFAULT_BURST, DEFAULT_RATE, LocalLimits, TokenBucket
from dovetail.engine.ports import Calls, OnLines, Report, Task
from dovetail.engine.views import event_view
from dovetail.handlers.failure import describe
from dovetail.wiring.embedded import LocalEngine

if TYPE_CHECKING:
    from dovetail.client.answers import Event

OnFailure = Literal["continue", "fail_fast"]
Step = Callable[[dict[str, Any]], Any]
Predicate = Callable[[dict[str, Any]], object]
Items = Callable[[dict[str, Any]], Iterable[Any]]
T = TypeVar("T")

log = logging.getLogger("dovetail.executor")
_PLAIN = ("completed", "failed", "skipped", "duration", "error", "outputs")
_NO_CONFIG = compile_config({})
_DEPENDENCY_FAILED = "Dependency failed"


@dataclass(frozen=True, slots=True)
class _Step:
    id: str
    fn: Step
    depends_on: tuple[str, ...]
    condition: Predicate | None
    resource_tag: str | None
    max_retries: int
    timeout_seconds: float
    retry: RetryPolicy
    allow_failure: bool
    is_async: bool
    for_each: Items | None = None


class WorkflowDAG:
    """Steps and their dependencies."""

    def __init__(
        self,
        name: str = "workflow",
        *,
        on_failure: OnFailure | None = None,
        on_end: Callable[[RunStatus], object] | None = None,
    ) -> None:
        """`on_end` is called in a thread with the final status of an execution; CANCELLED if
        `execute` was cancelled. Its errors are logged."""
        _check_policy(on_failure)
        if on_end is not None and (not callable(on_end) or _is_async(on_end)):
            raise TypeError("on_end must be a plain function of a status, not async")
        self.name = name
        self.on_failure = on_failure
        self.on_end = on_end
        self._steps: list[_Step] = []
        self._graphs: dict[OnFailure, Graph] = {}
        self._step_calls: _StepCalls | None = None

    def add_step(
        self,
        step_id: str,
        fn: Step,
        *,
        depends_on: Iterable[str] | None = None,
        condition: Predicate | None = None,
        resource_tag: str | None = None,
        max_retries: int = 0,
        timeout_seconds: float = 300.0,
        retry: RetryPolicy = DEFAULT_RETRY,
        allow_failure: bool = False,
        for_each: Items | None = None,
    ) -> WorkflowDAG:
        """Add a step `fn(ctx)`, async or plain. Returns the graph, so that calls can chain.

        With `for_each`, a function of ctx that returns a list, the step runs once for each item,
        with `ctx["item"]` and `ctx["index"]`. Its output is the list of the outputs.

        With `allow_failure` the steps after it run even if it fails, and the workflow does not
        fail by it.
        """
        if not isinstance(step_id, str) or not step_id:
            raise ValueError(f"a step's id is a non-empty string, not {step_id!r}")
        if not callable(fn):
            raise TypeError(f"step '{step_id}': fn must be callable, not {type(fn).__name__}")
        if condition is not None and not callable(condition):
            raise TypeError(f"step '{step_id}': condition must be a function of ctx")
        if condition is not None and _is_async(condition):
            raise TypeError(f"step '{step_id}': condition must be a plain function, not async")
        if for_each is not None and not callable(for_each):
            raise TypeError(
                f"step '{step_id}': for_each must be a plain function of ctx, not "
                f"{type(for_each).__name__}: write for_each=lambda ctx: …"
            )
        if for_each is not None and _is_async(for_each):
            raise TypeError(
                f"step '{step_id}': for_each must be a plain function of ctx, not async"
            )
        if isinstance(depends_on, str):
            raise TypeError(f"step '{step_id}': depends_on is a list: write [{depends_on!r}]")
        if not isinstance(depends_on, Iterable | None):
            kind = type(depends_on).__name__
            raise TypeError(f"step '{step_id}': depends_on is a list of ids, not {kind}")
        parents = tuple(depends_on or ())
        for parent in parents:
            if not isinstance(parent, str):
                kind = type(parent).__name__
                raise TypeError(f"step '{step_id}': depends_on is a list of ids, and has {kind}")
        if not isinstance(retry, RetryPolicy):
            kind = type(retry).__name__
            raise TypeError(f"step '{step_id}': retry must be a RetryPolicy, not {kind}")
        for name, number in (("max_retries", max_retries), ("timeout_seconds", timeout_seconds)):
            if not isinstance(number, Real):
                kind = type(number).__name__
                raise TypeError(f"step '{step_id}': {name} must be a number, not {kind}")
        if max_retries < 0:
            raise ValueError(f"step '{step_id}': max_retries must not be negative")
        if not timeout_seconds > 0:
            raise ValueError(f"step '{step_id}': timeout_seconds must be above 0")
        self._graphs.clear()
        self._step_calls = None
        self._steps.append(
            _Step(
                step_id,
                fn,
                parents,
                condition,
                resource_tag,
                max_retries,
                timeout_seconds,
                retry,
                allow_failure,
                is_async=_is_async(fn),
                for_each=for_each,
            )
        )
        return self

    def validate(self) -> None:
        """Raise `InvalidDefinition` with all problems: no steps, wrong ids, cycles."""
        problems = self._problems()
        if problems:
            raise InvalidDefinition(problems)

    def get_execution_layers(self) -> list[list[str]]:
        """Steps by distance from the roots; the steps of one layer can run in parallel."""
        self.validate()
        return [[self._steps[i].id for i in layer] for layer in layers(self._parents())]

    def get_ready_nodes(self, completed: Collection[str] = ()) -> list[str]:
        """The steps that are not in `completed` and whose dependencies all are."""
        self.validate()
        done = {i for i, step in enumerate(self._steps) if step.id in completed}
        return [self._steps[i].id for i in ready_nodes(self._parents(), done)]

    def _index(self) -> dict[str, int]:
        return {step.id: i for i, step in enumerate(self._steps)}

    def _parents(self) -> list[tuple[int, ...]]:
        index = self._index()
        return [tuple(index[d] for d in dict.fromkeys(s.depends_on)) for s in self._steps]

    def _problems(self) -> list[Problem]:
        if not self._steps:
            return [Problem("empty_graph", f"'{self.name}' has no steps: add_step first", "")]
        problems = []
        seen: set[str] = set()
        index = self._index()
        for number, step in enumerate(self._steps):
            path = f"steps[{number}]"
            if step.id in seen:
                problems.append(Problem("duplicate_id", f"a second step '{step.id}'", path))
            seen.add(step.id)
            of, item = split_name(step.id)
            if item is not None and of in index and self._steps[index[of]].for_each is not None:
                message = f"step '{step.id}' has the name of an item of step '{of}'"
                problems.append(Problem("duplicate_id", message, path))
            if step.for_each is not None and not {"[", "]"}.isdisjoint(step.id):
                message = f"step '{step.id}' has for_each: its items are called '{step.id}[0]' and "
                message += "so on, so there can be no [ or ] in its id"
                problems.append(Problem("invalid_field", message, path))
            for name in step.depends_on:
                if name == step.id:
                    message = f"step '{name}' depends on itself"
                    problems.append(Problem("self_dependency", message, path))
                elif name not in index:
                    message = f"step '{step.id}' depends on '{name}', which does not exist"
                    problems.append(Problem("missing_dependency", message, path))
        if not problems:
            for cycle in cycles(self._parents()):
                names = [self._steps[i].id for i in cycle.way]
                message = f"a cycle of {len(cycle.members):,} steps: {spell_out(names)}"
                problems.append(Problem("cycle", message, f"steps[{cycle.way[0]}]"))
        return problems

    def _compiled(self, on_failure: OnFailure) -> Graph:
        """The graph of the core, made once and kept until a step is added."""
        policy = self.on_failure or on_failure
        if policy not in self._graphs:
            self.validate()
            self._graphs[policy] = self._compile(policy)
        return self._graphs[policy]

    def _calls(self) -> _StepCalls:
        if self._step_calls is None:
            mapped = self._mapped()
            calls = {step.id: _StepCall(step, mapped) for step in self._steps}
            self._step_calls = _StepCalls(calls)
        return self._step_calls

    def _mapped(self) -> tuple[int, ...]:
        return tuple(i for i, step in enumerate(self._steps) if step.for_each is not None)

    def _compile(self, policy: OnFailure) -> Graph:
        parents = self._parents()
        mapped = self._mapped()
        children = children_of(parents)
        nodes = tuple(
            NodeSpec(
                index=i,
                id=step.id,
                handler=step.id,
                config=_NO_CONFIG,
                condition=None if step.condition is None else _condition(step.condition, mapped),
                parents=parents[i],
                children=tuple(children[i]),
                timeout_seconds=step.timeout_seconds,
                max_retries=step.max_retries,
                retry=step.retry,
                cache_ttl=None,
                resource_tag=step.resource_tag,
                at_most_once=False,
                allow_failure=step.allow_failure,
                for_each=None if step.for_each is None else _map_spec(step.for_each, mapped),
            )
            for i, step in enumerate(self._steps)
        )
        return Graph(
            name=self.name,
            nodes=nodes,
            index=self._index(),
            fail_fast=policy == "fail_fast",
            max_concurrency=None,
            roots=tuple(i for i, above in enumerate(parents) if not above),
            exits=tuple(i for i, below in enumerate(children) if not below),
            output_node=None,
        )


class StepResult(NamedTuple):
    status: NodeStatus
    output: Any
    error: str | None
    duration: float
    retry_count: int


class WorkflowResult:
    """How a workflow ended; the counts are steps by status."""

    def __init__(self, run: RunState) -> None:
        assert run.started_at is not None and run.finished_at is not None  # noqa: S101, PT018
        self.status: RunStatus = run.status
        self.outputs: dict[str, Any] = {
            spec.id: node.output
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
            if node.status is COMPLETED
        }
        self.completed = len(self.outputs)
        self.failed = sum(node.status is FAILED for node in run.nodes)
        """With the failures that are allowed; `status` and `error` do not count these."""
        self.skipped = len(run.nodes) - self.completed - self.failed - run.cancelled
        self.duration = run.finished_at - run.started_at
        self.error: dict[str, Any] | None = run.error
        """The first error, or None: `type`, `message` and the step as `node`."""
        self._run = run

    @cached_property
    def steps(self) -> dict[str, StepResult]:
        """All steps by id. Made on first use: most callers want only the outputs."""
        nodes = zip(self._run.graph.nodes, self._run.nodes, strict=True)
        return {spec.id: _step_result(node) for spec, node in nodes}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; JSON if the outputs are."""
        steps = {
            step_id: {**step._asdict(), "status": step.status.value}
            for step_id, step in self.steps.items()
        }
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {"status": self.status.value, **plain, "steps": steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkflowResult:
        """The result of a `to_dict`, also from another process."""
        result = cls.__new__(cls)
        result.status = RunStatus(data["status"])
        for name in _PLAIN:
            setattr(result, name, data[name])
        result.steps = {
            step_id: StepResult(**{**step, "status": NodeStatus(step["status"])})
            for step_id, step in data["steps"].items()
        }
        return result

    def __repr__(self) -> str:
        return (
            f"WorkflowResult(status={self.status.value!r}, completed={self.completed}, "
            f"failed={self.failed}, skipped={self.skipped}, duration={self.duration:.3f})"
        )


class TokenBucketRateLimiter:
    """At most `rate_per_second` starts per second, and `burst` at once. Executors may share one."""

    def __init__(self, rate_per_second: float = DEFAULT_RATE, burst: int = DEFAULT_BURST) -> None:
        self.bucket = TokenBucket(rate_per_second, burst)

    @property
    def rate_per_second(self) -> float:
        return self.bucket.rate

    @property
    def burst(self) -> int:
        return self.bucket.burst

    async def acquire(self) -> None:
        """Wait for a token and take it."""
        while True:
            # The clock of executors, because they may share the limiter.
            now = time.monotonic()
            await asyncio.sleep(self.bucket.book(now) - now)
            if self.bucket.start(time.monotonic()):
                return


class WorkflowExecutor:
    """Runs a `WorkflowDAG` with at most `max_concurrency` steps at once."""

    def __init__(
        self,
        max_concurrency: int = 4,
        rate_limiters: Mapping[str, TokenBucketRateLimiter] | None = None,
        *,
        on_failure: OnFailure = "continue",
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        """`on_event` is called with each event of a run, in order; keep it short. Its errors are
        logged and do not affect the run."""
        _check_policy(on_failure)
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {max_concurrency}")
        self.max_concurrency = max_concurrency
        self.rate_limiters = dict(rate_limiters or {})
        self.on_failure: OnFailure = on_failure
        if on_event is not None and (not callable(on_event) or _is_async(on_event)):
            raise TypeError("on_event must be a plain function of one event, not async")
        self.on_event = on_event

    async def execute(
        self,
        dag: WorkflowDAG,
        context: Mapping[str, Any] | None = None,
        *,
        resume: WorkflowResult | None = None,
    ) -> WorkflowResult:
        """Run each step as soon as its dependencies are done; a failed step never raises.

        `resume` is the result of an earlier execution: its completed steps keep their outputs and
        do not run again; all others run.
        """
        submit, calls = submission(os.urandom(8).hex(), dag, context, self.on_failure, resume)
        limits = LocalLimits({tag: rl.bucket for tag, rl in self.rate_limiters.items()})
        report = None
        if self.on_event is not None:
            submit = submit._replace(logged=True)
            report = _reporter(self.on_event, submit.graph.index)
        engine = LocalEngine(
            calls,
            on_event=report,
            concurrency=self.max_concurrency,
            limits=limits,
            isolate=False,
            clock=time.monotonic,
        )
        try:
            async with engine:
                await engine.orchestrator.submit(submit)
                run = await engine.wait(submit.run_id)
        except asyncio.CancelledError:
            call_on_end(dag.on_end, RunStatus.CANCELLED)  # an await would be cancelled too
            raise
        report_ended(run)
        if dag.on_end is not None:
            await asyncio.to_thread(call_on_end, dag.on_end, run.status)
        return WorkflowResult(run)

    def execute_sync(
        self,
        dag: WorkflowDAG,
        context: Mapping[str, Any] | None = None,
        *,
        resume: WorkflowResult | None = None,
    ) -> WorkflowResult:
        """`execute` for scripts that have no event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.execute(dag, context, resume=resume))
        raise RuntimeError("execute_sync inside a running event loop: await execute() instead")


def submission(
    run_id: str,
    dag: WorkflowDAG,
    context: Mapping[str, Any] | None = None,
    on_failure: OnFailure = "continue",
    resume: WorkflowResult | None = None,
) -> tuple[Submit, Calls]:
    """The submit of one run of the graph, and the calls of its steps."""
    graph = dag._compiled(on_failure)
    reused = reusable(graph, resume)
    ctx = {**(context or {}), "step_outputs": dict(reused)}
    return Submit(run_id, graph, ctx, logged=False, reused=reused), dag._calls()


def reusable(graph: Graph, resume: WorkflowResult | None) -> dict[str, Any]:
    """The outputs of an earlier result with which a run of this graph begins."""
    if resume is None:
        return {}
    if not isinstance(resume, WorkflowResult):
        raise TypeError(f"resume is a WorkflowResult, not {type(resume).__name__}")
    return {name: output for name, output in resume.outputs.items() if name in graph.index}


def call_on_end(on_end: Callable[[RunStatus], object] | None, status: RunStatus) -> None:
    """Call a graph's `on_end`; its error does not affect the run."""
    if on_end is None:
        return
    try:
        on_end(status)
    except Exception:
        log.exception("on_end failed")


_ended_run_listeners: list[Callable[[RunState], object]] = []


def hear_ended_runs(listener: Callable[[RunState], object]) -> None:
    """From now on it is called with each run that ends in this process, of any executor."""
    _ended_run_listeners.append(listener)


def report_ended(run: RunState) -> None:
    """An error of a listener does not affect the run."""
    for listener in _ended_run_listeners:
        try:
            listener(run)
        except Exception:
            log.exception("a listener failed")


def _reporter(
    on_event: Callable[[Event], object], steps: Container[str]
) -> Callable[[core_events.Event], None]:
    """Converts times: the engine of the library counts from the start of the machine."""
    from dovetail.client.answers import Event  # only programs with `on_event` load the client

    offset = time.time() - time.monotonic()

    def report(event: core_events.Event) -> None:
        data = event.data
        if data is not None and "until" in data:
            data = {**data, "until": data["until"] + offset}
        try:
            view = event_view(event._replace(time=event.time + offset, data=data))
            if "item" in view and event.node in steps:  # such as 'a[1]', which has no for_each
                del view["item"]
                view["node"] = event.node
            on_event(Event.from_api(view))
        except Exception:
            log.exception("on_event failed at %s", event.type)

    return report


class _StepCalls:
    """The `Calls` of a worker for steps. Outputs stay Python objects."""

    def __init__(self, steps: dict[str, _StepCall]) -> None:
        self._steps = steps

    def open(self, task: Task, report: Report, on_lines: OnLines) -> _StepCall:
        item = task.item_index
        return self._steps[task.node_id if item is None else split_name(task.node_id)[0]]


class _StepCall:
    """Calls one step; the run comes with the task."""

    __slots__ = ("_fn", "_id", "_mapped", "is_async")
    is_logged = False

    def __init__(self, step: _Step, mapped: tuple[int, ...]) -> None:
        self._id = step.id
        self._mapped = mapped
        self._fn = step.fn
        self.is_async = step.is_async

    def begin(self, task: Task) -> Any:
        if not self._mapped:
            return self._fn(task.params.copy())  # type: ignore[union-attr]  # in this process
        assert isinstance(task.source, Dispatch)  # noqa: S101 - in this process
        ctx = _context(task.source.run, self._mapped)
        if task.item_index is not None:
            ctx |= {"item": task.item, "index": task.item_index}
        return self._fn(ctx)

    def cancel(self) -> None:
        """A step has no cancel event: an async step is cancelled, a thread runs on."""

    def warn(self, message: str) -> None:
        """A step has no log: what it prints is printed."""

    def end_log(self) -> None:
        """There is none."""

    def seal(self, task: Task, output: Any) -> Any:
        if task.item_index is None:
            task.params["step_outputs"][self._id] = output  # type: ignore[index]
        return output

    def caching(self, task: Task) -> None:
        """The output of a step is not cached."""

    def describe(self, error: BaseException) -> dict[str, Any]:
        return describe(error)


def _context(run: RunState, mapped: Iterable[int]) -> dict[str, Any]:
    """The ctx of a step, with the lists of the mapped steps that are completed."""
    for index in mapped:
        if run.nodes[index].status is COMPLETED:
            run.params["step_outputs"][run.graph.nodes[index].id] = run.nodes[index].output
    return run.params.copy()


def _condition(predicate: Predicate, mapped: tuple[int, ...]) -> Callable[[Scope], bool]:
    # An array has no truth: asking for it raises, so that is a part of the call.
    def decide(ctx: dict[str, Any]) -> bool:
        return bool(predicate(ctx))

    # Read the run directly: by name, a step called "params" would hide the params.
    def holds(run: Any) -> bool:
        return _called(decide, _context(run, mapped))

    return holds


def _map_spec(items: Items, mapped: tuple[int, ...]) -> MapSpec:
    def read(ctx: dict[str, Any]) -> Any:
        values = items(ctx)
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            return values
        # It may be endless, or a range of a terabyte: one item too many is enough to say so.
        return list(values if isinstance(values, list | tuple) else islice(values, MAX_ITEMS + 1))

    # A generator raises while it is read, so that is a part of the call.
    def listed(run: Any) -> Any:
        return _called(read, _context(run, mapped))

    return MapSpec(listed)


def _called(fn: Callable[[dict[str, Any]], T], ctx: dict[str, Any]) -> T:
    """What the function returns. If its own code raises, the step fails."""
    try:
        return fn(ctx)
    except BaseException as error:
        data = describe(error)
        raise TemplateError(f"raised {data['type']}: {data['message']}") from error


def _step_result(node: NodeState) -> StepResult:
    began, ended = node.started_at, node.finished_at
    return StepResult(
        status=node.status,
        output=node.output,
        error=None if node.status is COMPLETED else _error(node),
        duration=0.0 if began is None or ended is None else ended - began,
        retry_count=max(0, node.attempt - 1),
    )


def _error(node: NodeState) -> str | None:
    if node.reason is Reason.DEPENDENCY_FAILED:
        return _DEPENDENCY_FAILED
    if node.status is FAILED and node.error is not None:
        return f"{node.error['type']}: {node.error['message']}"
    return None


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    )


def _check_policy(on_failure: str | None) -> None:
    if on_failure not in ("continue", "fail_fast", None):
        raise ValueError(f"on_failure is 'continue' or 'fail_fast', not {on_failure!r}")
