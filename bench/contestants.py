"""Who runs the workloads, each as it would be used.

`prepare` builds the graph in the contestant's own form, outside the timing, once: Dask gets its
dictionary of tasks, asyncio the bare adjacency, Dovetail a `WorkflowDAG` or a compiled definition.
It returns a function that runs the graph once and gives the outputs of its exits; a call of that
function is what is timed. Dovetail's engine is made and closed within it. An event loop and Dask's
pool of threads exist before and are kept: an application has them already. What a loop of its own
for each call adds is the row `execute_sync`; Dask's synchronous scheduler needs neither.

The no-op is a coroutine function for callers that await it and a plain one for Dask. Peers are
imported when they are prepared: without Dask the rest can still be measured.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from workloads import Graph, Outputs, Workload, definition, node

Run = Callable[[], Outputs]
Prepare = Callable[[Workload], Run]


@cache
def event_loop() -> asyncio.Runner:
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def in_loop(work: Coroutine[Any, Any, Outputs]) -> Outputs:
    # Not Runner.run: it sets a signal handler each time, which no program that awaits pays for.
    return event_loop().get_loop().run_until_complete(work)


FEW = 10
"""Up to here Dask gets a node's parents as arguments of their own."""


def dovetail_library(workload: Workload) -> Run:
    """`WorkflowExecutor` with its default settings, awaited."""
    from dovetail import WorkflowExecutor

    dag, executor = _dag(workload), WorkflowExecutor()

    async def execute() -> Outputs:
        outputs = (await executor.execute(dag)).outputs
        return [outputs[name] for name in workload.exits]

    return lambda: in_loop(execute())


def dovetail_library_sync(workload: Workload) -> Run:
    """The same from a script: each call makes and closes an event loop of its own."""
    from dovetail import WorkflowExecutor

    dag, executor = _dag(workload), WorkflowExecutor()

    def run() -> Outputs:
        outputs = executor.execute_sync(dag).outputs
        return [outputs[name] for name in workload.exits]

    return run


def _dag(workload: Workload) -> Any:
    from dovetail import WorkflowDAG

    def step(parents: list[str]) -> Callable[[dict[str, Any]], Any]:
        async def run(ctx: dict[str, Any]) -> dict[str, Any]:
            outputs = ctx["step_outputs"]
            return node(*[outputs[parent] for parent in parents])

        return run

    dag = WorkflowDAG(workload.name)
    for name, parents in workload.graph.items():
        dag.add_step(name, step(parents), depends_on=parents)
    return dag


def dovetail_definition(workload: Workload) -> Run:
    """A validated definition in the memory engine: templates, a registered handler, all events.

    Each edge is a template, outputs are copied as JSON, and the log of the run is kept.
    """
    from dovetail import Context
    from dovetail.config import Settings
    from dovetail.core.dag import build_graph
    from dovetail.core.definition.validation import check
    from dovetail.core.transitions import Submit
    from dovetail.engine.commands import new_id
    from dovetail.handlers.builtin import builtin_registry
    from dovetail.handlers.calls import RegistryCalls
    from dovetail.handlers.registry import describe
    from dovetail.wiring.embedded import LocalEngine

    async def noop(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return node(*config["of"])

    settings = Settings()
    registry = builtin_registry(settings)
    registry.add(describe(noop, name="noop", max_retries=0, origin="bench"))
    checked = check(definition(workload), registry)
    assert checked.workflow is not None, checked.errors[:3]
    graph = build_graph(checked.workflow, registry.default_retries())
    calls = RegistryCalls(
        registry,
        secrets={},
        sensitive={},
        max_config_bytes=settings.max_config_bytes,
        max_output_bytes=settings.max_output_bytes,
    )

    async def execute() -> Outputs:
        async with LocalEngine(calls, concurrency=settings.concurrency) as engine:
            run_id = new_id()
            await engine.orchestrator.submit(Submit(run_id, graph, {}))
            ended = await engine.wait(run_id)
            return [ended.node(name).output for name in workload.exits]

    return lambda: in_loop(execute())


def dask_synchronous(workload: Workload) -> Run:
    import dask.local

    graph = _tuples(workload.graph)
    return lambda: list(dask.local.get_sync(graph, workload.exits))


def dask_synchronous_tasks(workload: Workload) -> Run:
    """The same with the graph in Dask's own form, which spares it the conversion at each call."""
    import dask.local
    from dask.task_spec import List, Task, TaskRef

    graph = {}
    for name, parents in workload.graph.items():
        refs = [TaskRef(parent) for parent in parents]
        if len(refs) <= FEW:
            graph[name] = Task(name, node, *refs)
        else:
            graph[name] = Task(name, _join, List(*refs))
    return lambda: list(dask.local.get_sync(graph, workload.exits))


def dask_threaded(workload: Workload) -> Run:
    import dask.threaded

    graph = _tuples(workload.graph)
    return lambda: list(dask.threaded.get(graph, workload.exits, num_workers=2))


def _tuples(graph: Graph) -> dict[str, Any]:
    """The quickest of the forms that Dask takes: positional arguments, a list only for the join."""
    return {
        name: (node, *parents) if len(parents) <= FEW else (_join, parents)
        for name, parents in graph.items()
    }


def _join(parents: list[dict[str, Any]]) -> dict[str, Any]:
    return node(*parents)


def asyncio_tasks(workload: Workload) -> Run:
    """One bare asyncio task per node: no limits, no retries, no state, no API."""
    graph = workload.graph

    async def execute() -> Outputs:
        tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}

        async def one(parents: list[str]) -> dict[str, Any]:
            return node(*[await tasks[parent] for parent in parents])

        for name, parents in graph.items():
            tasks[name] = asyncio.create_task(one(parents))
        await asyncio.gather(*tasks.values())
        return [tasks[name].result() for name in workload.exits]

    return lambda: in_loop(execute())


BASELINE = "dask synchronous"

CONTESTANTS: dict[str, Prepare] = {
    "dovetail library": dovetail_library,
    "dovetail execute_sync": dovetail_library_sync,
    "dovetail definition": dovetail_definition,
    BASELINE: dask_synchronous,
    "dask synchronous, task graph": dask_synchronous_tasks,
    "dask threaded, 2 workers": dask_threaded,
    "asyncio, a task per node": asyncio_tasks,
}
