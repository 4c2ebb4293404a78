"""A mapped node on the command line: one line with a bar, its items, and why it waits."""

from __future__ import annotations

import json
import re

from dovetail.cli.board import Board, row_line

from .conftest import Shell

FLOW = """\
name: squares
nodes:
  - id: each
    handler: square
    for_each: {items: [1, 2, 3, 4], max_failures: 1}
    config: {x: "{{ item }}"}
"""
HANDLERS = """\
from dovetail import handler

@handler("square")
def square(config, ctx):
    if config["x"] == 3:
        raise ValueError("three is broken")
    return config["x"] ** 2
"""


CACHED = """\
name: cached
params: {type: object, properties: {list: {type: array}}}
nodes:
  - id: each
    handler: square
    for_each: "{{ params.list }}"
    config: {x: "{{ item }}"}
    cache: {ttl_seconds: 60}
"""


def event(kind: str, **fields: object) -> dict[str, object]:
    time = "2026-01-01T00:00:00.000000Z"
    return {"seq": 1, "time": time, "type": kind, "epoch": 1, "node": "m", "attempt": 1, **fields}


def test_the_line_of_a_mapped_node_has_a_bar_of_its_completed_items() -> None:
    board = Board(["m"])
    board.apply(event("node.queued"))
    board.apply(event("node.queued", items=4))
    board.apply(event("node.queued", item=0))
    board.apply(event("node.started", item=0))
    board.apply(event("node.started"))
    board.apply(event("node.completed", item=0))
    board.apply(event("node.failed", item=1, error={"type": "E", "message": "m"}))
    (row,) = board.rows
    text = "".join(piece for piece, _ in row_line(row, 1, row.started or 0.0, bar=True))
    assert "━" in text
    assert text.endswith("25%  1 of 4 items, 1 failed")
    assert row.status == "RUNNING"
    board.apply(event("node.completed"))
    text = "".join(piece for piece, _ in row_line(row, 1, row.started or 0.0))
    assert text.endswith("4 items, 1 failed")


def words(board: Board) -> str:
    (row,) = board.rows
    return "".join(piece for piece, _ in row_line(row, 1, row.started or 0.0))


def test_the_line_of_a_mapped_node_says_what_was_cached() -> None:
    board = Board(["m"])
    board.apply(event("node.queued"))
    board.apply(event("node.queued", items=3))
    for item in (0, 1):
        board.apply(event("node.queued", item=item))
        board.apply(event("node.cached", item=item))
    assert words(board) == "◌ m  queued  2 of 3 items, 2 cached"
    board.apply(event("node.queued", item=2))
    board.apply(event("node.started", item=2))
    board.apply(event("node.started"))
    assert words(board).endswith(" 67%  2 of 3 items, 2 cached")
    board.apply(event("node.completed", item=2))
    board.apply(event("node.completed"))
    assert words(board) == "✓ m  0.0s  3 items, 2 cached"


def test_an_empty_list_has_0_items_and_cached_items_are_cached(shell: Shell) -> None:
    shell.write("flow.yaml", CACHED)
    shell.write("own.py", HANDLERS)
    for items, said in (("[]", "0 items"), ("[1, 2]", None), ("[1, 2]", "cached  2 items")):
        ran = shell("run", "flow.yaml", "--handlers", "own.py", "-p", f"list={items}")
        assert ran.code == 0
        run_id = json.loads(shell("runs", "list", "--json").out)["items"][0]["run_id"]
        shown = shell("runs", "show", run_id).out
        for out in (ran.out, shown, shell("runs", "watch", run_id).out):
            if said is None:
                assert re.search(r"^✓ each  \S+  2 items$", out, re.MULTILINE)
            else:
                assert f"✓ each  {said}\n" in out
        node = shell("runs", "show", run_id, "each").out
        assert re.search(r"^  items +none$" if said == "0 items" else "2 total", node, re.MULTILINE)
        forked = shell("runs", "fork", run_id, "--handlers", "own.py").out
        count = "0 items" if items == "[]" else "2 items"
        assert f"✓ each  reused  {count}\n" in forked
        fork_id = json.loads(shell("runs", "list", "--json").out)["items"][0]["run_id"]
        assert f"✓ each  reused  {count}\n" in shell("runs", "show", fork_id).out


def test_run_and_show_have_the_items(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    shell.write("own.py", HANDLERS)
    own = ("--handlers", "own.py")
    assert shell("validate", "flow.yaml", *own).code == 0
    ran = shell("run", "flow.yaml", *own)
    assert ran.code == 0
    assert "4 items, 1 failed" in ran.out
    run_id = json.loads(shell("runs", "list", "--json").out)["items"][0]["run_id"]
    shown = shell("runs", "show", run_id, "each").out
    assert "4 total, 3 completed, 1 failed" in shown
    assert "failed items: 1" in shown
    assert "2  ValueError: three is broken" in shown
    assert f"see one of them:  dovetail runs show {run_id[:6]} 'each[2]'" in shown
    assert shell("runs", "verify", run_id).code == 0


def test_an_item_is_shown_by_its_name(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW + "  - {id: end, handler: output, dependencies: [each]}\n")
    shell.write("own.py", HANDLERS.replace("    if", "    print('item', ctx.index)\n    if"))
    assert shell("run", "flow.yaml", "--handlers", "own.py").code == 0
    run_id = json.loads(shell("runs", "list", "--json").out)["items"][0]["run_id"]
    failed = shell("runs", "show", run_id, "each[2]").out
    assert failed.startswith(f"FAILED each[2] of run {run_id[:6]}")
    assert "ValueError: three is broken" in failed
    assert "own.py:7 in square" in failed
    assert f"dovetail runs logs {run_id[:6]} --node each --item 2" in failed
    assert failed.count("stdout: item") == 1
    done = shell("runs", "show", run_id, "each[3]").out
    assert done.startswith("COMPLETED each[3]")
    words = [line.split() for line in done.splitlines()]
    assert ["attempt", "1"] in words
    assert ["output", "16"] in words
    assert {"worker", "started", "finished", "took"} <= {line[0] for line in words}
    item = json.loads(shell("runs", "show", run_id, "each[3]", "--json").out)
    assert (item["index"], item["status"], item["output"]) == (3, "COMPLETED", 16)
    for name, said in [
        ("each[4]", "no item 4 of node 'each': it has 4 items, counted from 0"),
        ("end[0]", "node 'end' has no for_each"),
        ("eachh[0]", "no node 'eachh[0]'; did you mean 'each'?"),
        ("each[x]", "no node 'each[x]'; did you mean 'each'?"),
    ]:
        wrong = shell("runs", "show", run_id, name)
        assert wrong.code != 0
        assert said in wrong.err, name


def test_the_end_of_a_failed_run_has_the_log_of_the_failed_item_alone(shell: Shell) -> None:
    flow = FLOW.replace("max_failures: 1}", "max_failures: 0}\n    max_retries: 1")
    shell.write("flow.yaml", flow + "    retry: {base_delay_seconds: 0}\n")
    shell.write("own.py", HANDLERS.replace("    if", "    print('item', ctx.index)\n    if"))
    ran = shell("run", "flow.yaml", "--handlers", "own.py")
    assert ran.code == 1
    end = ran.err + ran.out
    end = end[end.index("the end of the log") :]
    assert "the end of the log of item 2, attempt 2:" in end
    assert end.count("stdout: item") == 1
    run_id = json.loads(shell("runs", "list", "--json").out)["items"][0]["run_id"]
    assert f"dovetail runs logs {run_id[:6]} --node each --item 2" in end
    lines = shell("runs", "logs", run_id, "--item", "2").out.splitlines()
    assert [line.split()[-2:] for line in lines] == [["item", "2"]] * 2
    shown = shell("runs", "show", run_id, "each").out
    assert 'raise ValueError("three is broken")' in shown


def test_a_list_that_is_none_names_its_template_and_why_offers_what_to_do(shell: Shell) -> None:
    shell.write(
        "flow.yaml",
        """\
name: no-list
nodes:
  - {id: fetch, handler: output, config: {value: {docs: text}}}
  - id: each
    handler: output
    dependencies: [fetch]
    for_each: "{{ fetch.value.docs }}"
    config: {value: "{{ item }}"}
""",
    )
    ran = shell("run", "flow.yaml")
    assert ran.code == 1
    cause = "each: not_a_list: for_each needs a list, and {{ fetch.value.docs }} is text"
    for said in (ran.out, shell("runs", "why").out):
        assert cause in said
        assert "dovetail runs fork" in said
        *_, retry = (line for line in said.splitlines() if "runs retry" in line)
        assert retry.endswith("--from fetch      reruns 2, reuses 0")
    assert "would rerun 2" in shell("runs", "retry", "--from", "fetch", "--dry-run").out
