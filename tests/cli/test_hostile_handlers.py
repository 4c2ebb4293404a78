"""What a handler starts in the event loop of its process cannot end that process."""

from __future__ import annotations

import json

from .conftest import Shell

HANDLERS = """
import asyncio, sys
from dovetail import handler

def ends():
    sys.exit(0)

async def leaves(error):
    raise error

@handler
async def task_exits(config, ctx):
    task = asyncio.create_task(leaves(SystemExit(0)))
    await asyncio.sleep(0.01)
    return "survived"

@handler
async def gathers_an_exit(config, ctx):
    await asyncio.gather(leaves(SystemExit(0)), leaves(KeyboardInterrupt()))

@handler
async def callback_exits(config, ctx):
    asyncio.get_running_loop().call_soon(ends)
    await asyncio.sleep(0.01)
    return "survived"

@handler
async def stops_the_loop(config, ctx):
    asyncio.get_running_loop().stop()
    return "survived"

@handler
async def text_exits(config, ctx):
    raise type("Hostile", (Exception,), {"__str__": lambda _: sys.exit(0)})()

@handler
async def output_interrupts(config, ctx):
    def interrupt(_):
        raise KeyboardInterrupt
    return type("Hostile", (list,), {"__iter__": interrupt})()

@handler
async def waits(config, ctx):
    await asyncio.sleep(0.3)
    return "survived"
"""
SURVIVE = {"task_exits", "callback_exits", "stops_the_loop", "waits"}
FAIL = {
    "gathers_an_exit": "SystemExit",
    "text_exits": "Hostile",
    "output_interrupts": "invalid_output",
}


def test_no_task_that_a_handler_starts_in_the_loop_ends_the_command(shell: Shell) -> None:
    shell.write("hostile.py", HANDLERS)
    nodes = [{"id": name, "handler": name} for name in [*sorted(SURVIVE), *FAIL]]
    shell.write("flow.json", json.dumps({"name": "t", "on_failure": "continue", "nodes": nodes}))
    done = shell("run", "flow.json", "--handlers", "hostile.py", "--json")
    assert done.code == 1, done.err
    ended = {node["id"]: node for node in json.loads(done.out)["nodes"]}
    assert {name for name, node in ended.items() if node["output"] == "survived"} == SURVIVE
    assert {name: ended[name]["error"]["type"] for name in FAIL} == FAIL
    assert "Traceback" not in done.err
