"""Whatever a handler does, and whatever its objects do when they are looked at, harms its own node.

Each hostile handler runs beside two neighbours that must end as if they were alone: one that never
waits and one that does. What a handler can do to its whole process is in docs/handlers.md.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from dovetail import PermanentError, RetryableError, WorkflowDAG, WorkflowExecutor
from dovetail.core.run import RunState
from dovetail.engine.views import run_view

from .harness import engine

ENDS: list[type[BaseException]] = [
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    RecursionError,
]
"""What ends more than a call, where nothing stops it."""


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise error("from within")

    return method


def subclass(base: type, *names: str, error: type[BaseException]) -> Any:
    """A subclass whose methods of these names raise."""
    return type("Hostile", (base,), dict.fromkeys(names, raises(error)))


def endless(*_: Any) -> Iterator[int]:
    return itertools.count()


class Slippery(str):
    """A text that is something else once it is cut or encoded."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        raise SystemExit("cut")

    def encode(self, *_: Any) -> Any:
        raise SystemExit("encoded")

    def __format__(self, spec: str) -> str:
        raise SystemExit("formatted")


def nameless(error: type[BaseException]) -> type:
    return type("Meta", (type,), {"__name__": property(raises(error))})


def errors() -> Iterator[tuple[str, BaseException]]:
    for end in ENDS:
        name = end.__name__
        yield f"str_{name}", subclass(Exception, "__str__", error=end)()
        yield f"repr_{name}", subclass(Exception, "__repr__", "__str__", error=end)()
        hostile = property(raises(end))
        yield f"class_{name}", type("Hostile", (Exception,), {"__class__": hostile})()
        yield f"type_{name}", type("Hostile", (PermanentError,), _settable({"type": hostile}))("x")
        late = {"after": hostile, "at_least": hostile}
        yield f"after_{name}", type("Hostile", (RetryableError,), _settable(late))("x")
        yield f"name_{name}", nameless(end)("Hostile", (Exception,), {})()
        traced = {"__traceback__": hostile, "__cause__": hostile}
        yield f"traceback_{name}", type("Hostile", (Exception,), traced)()
        number = subclass(int, "__float__", "__le__", "__ge__", error=end)
        yield f"delay_{name}", RetryableError("x", after=number(1))
    yield "slippery", type("Hostile", (Exception,), {"__str__": lambda _: Slippery("x")})()
    yield "no_text", type("Hostile", (Exception,), {"__str__": lambda _: 5})()
    yield "slippery_type", PermanentError("x", type=Slippery("kind"))


def _settable(fields: dict[str, Any]) -> dict[str, Any]:
    """An `__init__` that leaves the properties alone."""
    return {**fields, "__init__": Exception.__init__}


def outputs() -> Iterator[tuple[str, Any]]:
    for end in ENDS:
        name = end.__name__
        yield f"list_{name}", subclass(list, "__iter__", "__len__", error=end)([1])
        yield f"tuple_{name}", subclass(tuple, "__iter__", error=end)((1,))
        yield f"dict_{name}", subclass(dict, "__iter__", "items", "values", error=end)(a=1)
        yield f"object_{name}", type("Hostile", (), {"__class__": property(raises(end))})()
        yield f"repr_{name}", subclass(object, "__repr__", "__str__", error=end)()
        yield f"named_{name}", nameless(end)("Hostile", (), {})()
        yield f"nested_{name}", {"a": [subclass(list, "__iter__", error=end)([1])]}
    yield "endless_list", type("Endless", (list,), {"__iter__": endless})()
    yield "endless_tuple", type("Endless", (tuple,), {"__iter__": endless})()


WHOLE = [
    ("text", subclass(str, "isascii", "encode", "__str__", error=SystemExit)("x"), "x"),
    ("integer", subclass(int, "__le__", "__ge__", "__lt__", error=SystemExit)(5), 5),
    ("float", subclass(float, "__float__", "__le__", error=SystemExit)(0.5), 0.5),
    ("key", {subclass(str, "isascii", "encode", error=SystemExit)("k"): 1}, {"k": 1}),
]
"""Outputs that need no method of theirs to be read."""

KEPT: list[Any] = []


def cancelling() -> Iterator[tuple[str, Any]]:
    """Handlers that cancel the asyncio task they run in, now or when another uses it."""

    async def at_once(config: Any, ctx: Any) -> str:
        _mine().cancel()
        return "done"

    async def and_raise(config: Any, ctx: Any) -> str:
        _mine().cancel()
        raise ValueError("after it")

    async def after_a_wait(config: Any, ctx: Any) -> str:
        await asyncio.sleep(0)
        _mine().cancel()
        return "done"

    async def soon(config: Any, ctx: Any) -> str:
        asyncio.get_running_loop().call_soon(_mine().cancel)
        return "done"

    async def later(config: Any, ctx: Any) -> str:
        asyncio.get_running_loop().call_later(0.005, _mine().cancel)
        return "done"

    async def kept(config: Any, ctx: Any) -> str:
        KEPT.append(_mine())
        asyncio.get_running_loop().call_later(0.002, lambda: KEPT.pop().cancel())
        return "done"

    async def waits_and_keeps(config: Any, ctx: Any) -> str:
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(_mine().cancel)
        return "done"

    async def thrice(config: Any, ctx: Any) -> str:
        for _ in range(3):
            _mine().cancel()
        return "done"

    async def from_a_child(config: Any, ctx: Any) -> str:
        mine = _mine()

        async def child() -> None:
            mine.cancel()

        asyncio.create_task(child())  # noqa: RUF006
        return "done"

    every = [at_once, and_raise, after_a_wait, soon, later, kept, waits_and_keeps, thrice]
    for one in [*every, from_a_child]:
        yield one.__name__, one


def _mine() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def near(config: dict[str, Any], ctx: Any) -> str:
    return "near"


async def waiting(config: dict[str, Any], ctx: Any) -> str:
    await asyncio.sleep(0.01)
    return "waited"


def handlers_that_raise(error: BaseException) -> Iterator[Any]:
    async def hostile(config: Any, ctx: Any) -> None:
        raise error

    async def hostile_later(config: Any, ctx: Any) -> None:
        await asyncio.sleep(0)
        raise error

    def hostile_in_a_thread(config: Any, ctx: Any) -> None:
        raise error

    yield from (hostile, hostile_later, hostile_in_a_thread)


def handlers_that_return(output: Any) -> Iterator[Any]:
    async def hostile(config: Any, ctx: Any) -> Any:
        return output

    def hostile_in_a_thread(config: Any, ctx: Any) -> Any:
        return output

    yield from (hostile, hostile_in_a_thread)


async def beside_neighbours(hostile: Any, concurrency: int = 2) -> RunState:
    """The run of the hostile node, whose neighbours have ended as they should."""
    name = hostile.__name__
    async with engine(hostile, near, waiting, concurrency=concurrency) as it:
        one = await it.trigger({"a": name})
        others = [await it.trigger({"b": "near", "c": "waiting", "d": "near"}) for _ in range(3)]
        run = await it.wait(one)
        for other in others:
            ended = await it.wait(other)
            assert ended.status == "COMPLETED", ended.error
            assert [node.output for node in ended.nodes] == ["near", "waited", "near"]
            assert [node.attempt for node in ended.nodes] == [1, 1, 1]
        assert (await it.run({"b": "near"})).status == "COMPLETED"
    orjson.dumps(run_view(run))
    return run


@pytest.mark.parametrize("name", [name for name, _ in errors()])
async def test_an_exception_that_cannot_be_inspected_fails_only_its_node(name: str) -> None:
    for hostile in handlers_that_raise(dict(errors())[name]):
        run = await beside_neighbours(hostile)
        assert run.status == "FAILED"
        assert run.nodes[0].error is not None
        assert run.nodes[0].error["message"]


@pytest.mark.parametrize("name", [name for name, _ in outputs()])
async def test_an_output_that_cannot_be_inspected_fails_only_its_node(name: str) -> None:
    for hostile in handlers_that_return(dict(outputs())[name]):
        run = await beside_neighbours(hostile)
        assert run.status == "FAILED"
        assert run.nodes[0].error is not None
        kinds = {"invalid_output", "too_large", name.partition("_")[2]}
        assert run.nodes[0].error["type"] in kinds


@pytest.mark.parametrize("at", range(len(WHOLE)), ids=[name for name, _, _ in WHOLE])
async def test_only_the_underlying_value_of_an_output_subclass_is_stored(at: int) -> None:
    _, output, plain = WHOLE[at]
    for hostile in handlers_that_return(output):
        run = await beside_neighbours(hostile)
        assert run.status == "COMPLETED"
        assert run.nodes[0].output == plain


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(("name", "hostile"), list(cancelling()), ids=lambda value: str(value)[:20])
async def test_a_handler_that_cancels_its_task_cancels_no_other_node(
    name: str, hostile: Any, concurrency: int
) -> None:
    run = await beside_neighbours(hostile, concurrency)
    assert run.status in ("COMPLETED", "FAILED")
    assert run.nodes[0].attempt == 1


async def test_a_cancelled_task_still_reports_immediately() -> None:
    """Nothing else happens here that would take an unsent result along."""

    async def hostile(config: Any, ctx: Any) -> str:
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_soon(_mine().cancel)
        _mine().cancel()
        return "done"

    async with engine(hostile, concurrency=1) as it:
        run = await it.run({"a": "hostile"})
    assert run.nodes[0].output == "done"


@pytest.mark.parametrize("length", [4, 5000])
async def test_a_progress_message_of_a_custom_class_is_stored_as_text(length: int) -> None:
    async def hostile(config: Any, ctx: Any) -> str:
        ctx.progress(0.5, Slippery("x" * length))
        await asyncio.sleep(0.1)
        return "done"

    assert (await beside_neighbours(hostile)).status == "COMPLETED"


@pytest.mark.parametrize("end", ENDS)
async def test_a_library_step_whose_condition_raises_a_base_exception_fails_alone(
    end: type[BaseException],
) -> None:
    dag = WorkflowDAG("d")
    dag.add_step("a", lambda ctx: 1, condition=raises(end))
    dag.add_step("b", lambda ctx: 2)
    result = await WorkflowExecutor().execute(dag)
    assert result.steps["a"].status == "FAILED"
    assert result.steps["b"].output == 2


async def test_nodes_without_a_kept_task_share_one_task() -> None:
    """The check for a kept task must not cost a task for each node."""
    tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    async def plain(config: Any, ctx: Any) -> str:
        tasks.add(_mine())
        return "done"

    async with engine(plain, concurrency=4) as it:
        await it.run({f"n{i}": "plain" for i in range(50)})
        assert len(tasks) <= 2
        assert sys.getrefcount(plain)
