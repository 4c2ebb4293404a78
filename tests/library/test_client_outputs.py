"""A run seen through a server is the run itself, however large its outputs are."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import Dovetail, handler
from dovetail.core.outputs import LARGE_OUTPUT

from .places import serving

OUTPUTS: dict[str, Any] = {}


@handler
def reported(config: dict[str, Any], ctx: Any) -> Any:
    """What the test says."""
    return OUTPUTS[config["node"]]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[asyncio.Runner, Dovetail, Dovetail, str]]:
    """A client of a server, and one of the file that the server has."""
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.chdir(folder)

        async def opened() -> tuple[AsyncExitStack, Dovetail, Dovetail, str]:
            stack = AsyncExitStack()
            url = await stack.enter_async_context(serving(folder, [reported]))
            through = await stack.enter_async_context(Dovetail(url))
            direct = await stack.enter_async_context(Dovetail(folder / "served.db"))
            return stack, through, direct, url

        stack, through, direct, url = runner.run(opened())
        try:
            yield runner, through, direct, url
        finally:
            runner.run(stack.aclose())


def flow(names: list[str]) -> dict[str, Any]:
    nodes = [{"id": name, "handler": "reported", "config": {"node": name}} for name in names]
    return {"name": "reported", "nodes": nodes}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$output", "size", "href", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


class Filled(NamedTuple):
    """A text of so many bytes as JSON; what is generated should be small to print."""

    bytes: int


large = st.sampled_from([LARGE_OUTPUT - 1, LARGE_OUTPUT, LARGE_OUTPUT + 1]).map(Filled)
notes = st.builds(lambda inner: {"$output": {"size": 1, "href": inner}}, values | large)


def spelled(value: Any) -> Any:
    if isinstance(value, Filled):
        return "x" * (value.bytes - 2)
    if isinstance(value, dict):
        return {name: spelled(inner) for name, inner in value.items()}
    return value


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(outputs=st.lists(values | large | notes, min_size=1, max_size=5))
def test_a_run_is_the_same_through_a_server(
    both: tuple[asyncio.Runner, Dovetail, Dovetail, str], outputs: list[Any]
) -> None:
    runner, through, direct, _ = both
    OUTPUTS.clear()
    OUTPUTS.update({f"n{nth}": spelled(output) for nth, output in enumerate(outputs)})

    async def compared() -> None:
        run = await through.run(flow(list(OUTPUTS)))
        assert run.status == "COMPLETED", run.error
        assert run.outputs == run.result == OUTPUTS
        assert run.to_dict() == (await direct.get_run(run.run_id)).to_dict()
        assert run.to_dict() == (await through.get_run(run.run_id)).to_dict()
        assert run.to_dict() == (await through.wait(run.run_id)).to_dict()
        listed, known = [(await dt.list_runs(limit=1)).items for dt in (through, direct)]
        assert listed[0].to_dict() == known[0].to_dict()
        results = [await dt._commands.results(run.run_id) for dt in (through, direct)]
        assert results[0] == results[1]
        again = await through.retry(run.run_id, from_node="n0")
        assert {**again.outputs, "n0": OUTPUTS["n0"]} == OUTPUTS
        await through.wait(run.run_id)

    runner.run(compared())


async def test_the_command_line_prints_every_output_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    OUTPUTS.clear()
    OUTPUTS.update(large="x" * LARGE_OUTPUT, odd={"$output": {"size": 1, "href": "/"}})
    async with serving(tmp_path, [reported]) as url, Dovetail(url) as dt:
        run = await dt.run(flow(["large", "odd"]))

        async def printed(*words: str) -> Any:
            script = str(Path(sys.executable).with_name("dovetail"))
            process = await create_subprocess_exec(
                script, *words, "--server", url, stdout=PIPE, stderr=PIPE
            )
            out, err = await process.communicate()
            assert process.returncode == 0, err
            return orjson.loads(out)

        asked = ("show", "--json"), ("results", "--json")
        shown, results = await asyncio.gather(
            *(printed("runs", word, run.run_id, *more) for word, *more in asked)
        )
        assert {node["id"]: node["output"] for node in shown["nodes"]} == OUTPUTS
        assert shown["result"] == results["result"] == results["outputs"] == OUTPUTS
