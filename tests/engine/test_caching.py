"""The node cache gives a node what its handler would have made, and never what another run made of
other data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit
from dovetail.handlers import calls
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.registry import Registry, describe, handler
from dovetail.wiring.embedded import LocalEngine, registry_versions

from .harness import engine, registry_of

CACHED = {"cache": {"ttl_seconds": 60}}


class TestCacheIsolationBetweenRuns:
    async def test_input_returns_the_params_of_its_own_run(self) -> None:
        async with engine() as it:
            nodes = {"a": {"handler": "input", **CACHED}}
            people = ("alice", "bob", "alice", "bob")
            runs = [await it.run(nodes, {"who": who}) for who in people]
        assert [run.node("a").output for run in runs] == [{"who": who} for who in people]
        assert [run.node("a").attempt for run in runs] == [1, 1, 0, 0]

    async def test_output_returns_its_own_parents(self) -> None:
        async with engine() as it:
            nodes = {"a": "input", "b": {"handler": "output", "after": ["a"], **CACHED}}
            people = ("alice", "bob", "alice")
            runs = [await it.run(nodes, {"who": who}) for who in people]
        assert [run.node("b").output for run in runs] == [{"a": {"who": who}} for who in people]
        assert [run.node("b").attempt for run in runs] == [1, 1, 0]

    async def test_values_that_a_handler_did_not_read_do_not_affect_the_cache(self) -> None:
        async def fixed(config: dict[str, Any], ctx: Any) -> str:
            ctx.log.info("of %s", ctx.run_id)
            ctx.progress(0.5, "half")
            return ctx.idempotency_key and "fixed"

        async with engine(fixed, secrets={"KEY": "s3cr3t-value"}) as it:
            nodes = {"a": {"handler": "fixed", **CACHED}}
            runs = [await it.run(nodes, {"who": who}) for who in ("alice", "bob")]
        assert [run.node("a").attempt for run in runs] == [1, 0]

    async def test_a_handler_may_declare_that_its_config_decides(self) -> None:
        async def digested(config: dict[str, Any], ctx: Any) -> str:
            assert ctx.params["path"]
            ctx.decided_by_config()
            return config["sha256"]

        async with engine(digested, secrets={"KEY": "s3cr3t-value"}) as it:
            nodes = {"a": {"handler": "digested", "config": {"sha256": "abc"}, **CACHED}}
            runs = [await it.run(nodes, {"path": path}) for path in ("one", "two")]
        assert [run.node("a").attempt for run in runs] == [1, 0]

    async def test_an_absent_parent_affects_the_cache(self) -> None:
        async def counts(config: dict[str, Any], ctx: Any) -> list[str]:
            return list(ctx.inputs)

        async def idle(config: dict[str, Any], ctx: Any) -> None: ...

        async with engine(counts, idle) as it:
            nodes = {
                "a": "idle",
                "b": {"handler": "idle", "condition": "{{ params.both }}"},
                "c": {"handler": "counts", "after": ["a", "b"], **CACHED},
            }
            runs = [await it.run(nodes, {"both": both}) for both in (False, True, False)]
        assert [run.node("c").output for run in runs] == [["a"], ["a", "b"], ["a"]]

    async def test_an_output_made_with_another_secret_is_not_reused(self, tmp_path: Any) -> None:
        calls: list[str] = []

        @handler("costly", secrets=True)
        async def costly(config: dict[str, Any], ctx: Any) -> int:
            calls.append(config["k"] if config else ctx.secrets["KEY"])
            return len(calls)

        nodes = {
            "a": {"handler": "costly", "config": {"k": "{{ secrets.KEY }}"}, **CACHED},
            "b": {"handler": "costly", "after": ["a"], **CACHED},
        }
        for secret in ("first-secret", "first-secret", "other-secret"):
            fields: dict[str, Any] = {"db": tmp_path / "runs.db", "secrets": {"KEY": secret}}
            async with engine(costly, **fields) as it:
                await it.run(nodes)
        assert calls == ["first-secret"] * 2 + ["other-secret"] * 2
        assert b"secret" not in (tmp_path / "runs.db").read_bytes().replace(b"secrets", b"")

    async def test_a_new_version_of_a_handler_is_run(self) -> None:
        def versioned(version: int) -> Registry:
            def costly(config: dict[str, Any], ctx: Any) -> int:
                return version

            registry = registry_of()
            registry.add(describe(costly, name="costly", version=version))
            return registry

        store = None
        found = []
        for version in (1, 1, 2, 2, 1):
            registry = versioned(version)
            made = local(registry)
            if store is not None:
                made.store._cache = store  # type: ignore[attr-defined]
            async with made:
                store = dict(made.store._cache)  # type: ignore[attr-defined]
                run = await ran(made, {"a": {"handler": "costly", **CACHED}}, {})
                store = dict(made.store._cache)  # type: ignore[attr-defined]
            found.append((run.node("a").output, run.node("a").attempt))
        assert found == [(1, 1), (1, 0), (2, 1), (2, 0), (1, 1)]


# ── any handler, any data ────────────────────────────────────────────────────────────────


def local(registry: Registry) -> LocalEngine:
    calls = RegistryCalls(registry)
    return LocalEngine(calls, concurrency=4, versions=registry_versions(registry))


async def ran(it: LocalEngine, nodes: dict[str, Any], params: dict[str, Any]) -> RunState:
    listed = [{"id": name, **fields} for name, fields in nodes.items()]
    for node in listed:
        node["dependencies"] = node.pop("after", [])
    graph = build_graph(Workflow.model_validate({"name": "t", "nodes": listed}), {})
    run_id = f"r{len(it.store._runs)}"  # type: ignore[attr-defined]
    await it.orchestrator.submit(Submit(run_id, graph, params))
    return await it.wait(run_id)


READS = st.sampled_from(
    ["params", "x", "inputs", "a", "b", "names", "len", "in", "if x then a else b", "get"]
)
PROGRAMS = st.lists(READS, max_size=3)
VALUES = st.sampled_from([0, 1, "y" * 300])
PARAMS = st.fixed_dictionaries({"x": VALUES, "z": VALUES, "b": st.booleans()})
RUNS = st.lists(PARAMS, min_size=2, max_size=8)


def executed(program: list[str], params: dict[str, Any], given: dict[str, Any]) -> list[Any]:
    """What a handler makes that reads these, from a plain dict or from `ctx`."""
    found: list[Any] = []
    for read in program:
        match read:
            case "params":
                found.append(dict(params))
            case "x":
                found.append(params["x"])
            case "inputs":
                found.append(dict(given))
            case "a" | "b":
                found.append(given[read] if read in given else None)  # noqa: SIM401
            case "names":
                found.append(list(given))
            case "len":
                found.append(len(given))
            case "in":
                found.append("b" in given)
            case "get":
                found.append(given.get("b", "none"))
            case _:
                found.append(given.get("a" if params["x"] else "b"))
    return found


class Lazily:
    """Params and inputs that are asked for when something of them is read, as a handler does."""

    def __init__(self, ctx: Any, what: str) -> None:
        self._ctx, self._what = ctx, what

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._ctx, self._what), name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._ctx, self._what)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self._ctx, self._what))

    def __len__(self) -> int:
        return len(getattr(self._ctx, self._what))

    def __contains__(self, name: object) -> bool:
        return name in getattr(self._ctx, self._what)


@pytest.fixture(params=["at once", "one by one"])
def travelling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one by one":
        monkeypatch.setattr(calls, "INLINE_BYTES", 100)


@pytest.mark.usefixtures("travelling")
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(program=PROGRAMS, runs=RUNS)
async def test_a_cached_output_equals_the_output_of_the_handler(
    program: list[str], runs: list[dict[str, Any]]
) -> None:
    async def reads(config: dict[str, Any], ctx: Any) -> Any:
        made = executed(config["program"], Lazily(ctx, "params"), Lazily(ctx, "inputs"))  # type: ignore[arg-type]
        given = ctx.params if "params" in config["program"] else None
        if given is not None:
            given["x"] = "changed by its handler"
        return made

    async def gives(config: dict[str, Any], ctx: Any) -> Any:
        return config["value"]

    registry = registry_of(reads, gives)
    async with local(registry) as it:
        for params in runs:
            nodes = {
                "a": {"handler": "gives", "config": {"value": "{{ params.x }}"}},
                "b": {
                    "handler": "gives",
                    "config": {"value": "{{ params.z }}"},
                    "condition": "{{ params.b }}",
                },
                "c": {
                    "handler": "reads",
                    "config": {"program": program},
                    "after": ["a", "b"],
                    **CACHED,
                },
            }
            run = await ran(it, nodes, params)
            outputs = {"a": params["x"], **({"b": params["z"]} if params["b"] else {})}
            assert run.node("c").output == executed(program, params, outputs)
            if not program:
                continue
            again = await ran(it, nodes, params)
            assert again.node("c").output == run.node("c").output
            assert again.node("c").attempt == 0, "the same again is not run again"
