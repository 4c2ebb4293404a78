"""`dovetail graph`: the layers in every format, and what hostile names cannot do to them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from dovetail.cli.commands.graph import MAX_BENDS, lay_out
from dovetail.core.dag import layers

from .conftest import Outcome, Shell
from .test_live import watch

Command = Callable[..., Outcome]
SVG = "{http://www.w3.org/2000/svg}"

FLOW = """\
name: docs
nodes:
  - {id: extract, handler: input}
  - {id: save_json, handler: output, dependencies: [extract]}
  - {id: end, handler: output, dependencies: [extract, save_json], condition: "{{ params.x }}"}
"""

HOSTILE = r"""
name: hostile
nodes:
  - {id: a, handler: "</text><script>alert(1)</script>\"]; } \\N `x` #quot; & \e[31m\u202e\nb"}
  - {id: b, handler: input, dependencies: [a]}
"""


def test_the_text_graph_has_a_row_per_node_with_its_layer_and_its_parents(
    command: Command, shell: Shell
) -> None:
    shell.write("flow.yaml", FLOW)
    done = command("graph", "flow.yaml")
    assert done.code == 0
    assert done.out.splitlines() == [
        "0  extract    input",
        "1  save_json  output  ← extract",
        "2  end        output  ← extract, save_json  if params.x",
    ]


def test_names_are_cut_on_a_terminal_only(command: Command, shell: Shell) -> None:
    name = "a" * 60
    shell.write("flow.yaml", f"name: f\nnodes: [{{id: {name}, handler: input}}]\n")
    assert command("graph", "flow.yaml").out == f"0  {name}  input\n"
    assert watch(shell, "graph", "flow.yaml").saw(f"^0  {'a' * 39}…  input$")


def test_mermaid_has_every_node_and_edge_and_avoids_reserved_words(
    command: Command, shell: Shell
) -> None:
    shell.write("flow.yaml", FLOW)
    done = command("graph", "flow.yaml", "--format", "mermaid")
    assert done.out.splitlines() == [
        "---",
        'title: "docs"',
        "---",
        "flowchart LR",
        '    extract("extract<br/>input")',
        '    save_json("save_json<br/>output")',
        '    node_end{{"end<br/>output"}}',
        "    extract --> save_json",
        "    extract --> node_end",
        "    save_json --> node_end",
    ]


def test_dot_has_every_node_and_edge(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    done = command("graph", "flow.yaml", "--format", "dot")
    lines = done.out.splitlines()
    assert lines[0] == 'digraph "docs" {'
    assert r'    "save_json" [label="save_json\noutput"];' in lines
    assert r'    "end" [label="end\noutput", style="rounded,dashed"];' in lines
    assert '    "extract" -> "end";' in lines
    assert lines[-1] == "}"


def test_svg_is_one_self_contained_picture(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    done = command("graph", "flow.yaml", "--format", "svg")
    picture = ElementTree.fromstring(done.out)
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert words[::2] == ["extract", "save_json", "end"]
    assert len(picture.findall(f"{SVG}path")) == 3
    assert "@media (prefers-color-scheme: dark)" in done.out
    assert "fill=" not in done.out, "what has a colour of its own would keep it in the dark"
    assert done.out.count("http") == 1  # the name space, which is never fetched
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for box in picture.iter(f"{SVG}rect"):
        if "x" in box.attrib:
            assert float(box.attrib["x"]) >= 0
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) >= 0
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


@pytest.mark.parametrize("form", ["text", "mermaid", "dot", "svg"])
def test_a_hostile_handler_name_stays_a_name(command: Command, shell: Shell, form: str) -> None:
    shell.write("flow.yaml", HOSTILE)
    done = command("graph", "flow.yaml", "--format", form)
    assert done.code == 0
    for char in "\x1b\u202e":
        assert char not in done.out
    if form == "svg":
        ElementTree.fromstring(done.out)
        assert "<script" not in done.out
    if form == "dot":
        (label,) = re.findall(r'"a" \[label="((?:[^"\\]|\\.)*)"\];', done.out)
        assert r"\"]; } \\N" in label
    if form == "mermaid":
        (label,) = re.findall(r'^    a\("([^"]*)"\)$', done.out, re.MULTILINE)
        assert "<script" not in label
        assert "`" not in label


@pytest.mark.parametrize("form", ["text", "svg"])
def test_an_invalid_definition_is_reported_instead_of_drawn(
    command: Command, shell: Shell, form: str
) -> None:
    shell.write("flow.yaml", FLOW.replace("[extract]", "[extrcat]"))
    done = command("graph", "flow.yaml", "--format", form)
    assert done.code == 2
    assert done.out == ""
    assert "flow.yaml:4:53: missing_dependency there is no node 'extrcat'; did you" in done.err


def test_an_unknown_handler_is_still_drawn(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", FLOW.replace("handler: input", "handler: somewhere_else"))
    assert "somewhere_else" in command("graph", "flow.yaml").out


@pytest.mark.parametrize("shape", ["chain", "fan"])
def test_ten_thousand_nodes_are_drawn_in_seconds(
    command: Command, shell: Shell, shape: str
) -> None:
    nodes = [
        f"- {{id: n{n}, handler: input, dependencies: [n{n - 1 if shape == 'chain' else 0}]}}"
        for n in range(1, 10_000)
    ]
    shell.write("flow.yaml", "\n".join(["name: f", "nodes:", "- {id: n0, handler: input}", *nodes]))
    began = time.process_time()
    done = command("graph", "flow.yaml", "--format", "svg")
    assert done.out.count("<rect class=") == 10_000
    assert time.process_time() - began < 8


# --- the layout --------------------------------------------------------------------------------


def crossings(parents: list[list[int]], columns: list[list[int]]) -> int:
    """Of edges between neighbouring columns."""
    place = {point: at for column in columns for at, point in enumerate(column)}
    edges = [(place[p], place[c], c) for c, above in enumerate(parents) for p in above]
    column_of = {point: n for n, column in enumerate(columns) for point in column}
    return sum(
        (a[0] - b[0]) * (a[1] - b[1]) < 0 and column_of[a[2]] == column_of[b[2]]
        for at, a in enumerate(edges)
        for b in edges[:at]
    )


def test_the_layout_removes_avoidable_crossings() -> None:
    # Two columns of five, connected in reverse order: sorted, no edge crosses another.
    parents: list[list[int]] = [[] for _ in range(5)] + [[4 - n] for n in range(5)]
    layout = lay_out(layers(parents), parents)
    assert crossings(parents, layout.columns) == 0


def test_points_of_a_column_keep_their_gaps() -> None:
    parents: list[list[int]] = [[], [], [0], [0, 1], [1], [2, 0], [3], [3, 4, 1]]
    layout = lay_out(layers(parents), parents)
    for column in layout.columns:
        for above, below in pairwise(column):
            gap = (layout.heights[above] + layout.heights[below]) / 2
            assert layout.y[below] - layout.y[above] >= gap - 1e-9
    assert min(layout.y) >= 0


def test_a_long_edge_bends_around_the_columns_between() -> None:
    parents = [[], [0], [1], [2, 0]]
    route = lay_out(layers(parents), parents).routes[0, 3]
    assert len(route) == 4


def test_with_too_many_bends_the_edges_are_drawn_straight() -> None:
    size = 300
    parents = [list(range(n)) for n in range(size)]  # 44,850 edges, each as long as it can be
    layout = lay_out(layers(parents), parents)
    assert sum(n - p - 1 for n in range(size) for p in range(n)) > MAX_BENDS
    assert len(layout.y) == size
    assert layout.routes[0, size - 1] == [0, size - 1]


def test_graph_loads_handlers_and_checks_them(shell: Shell) -> None:
    shell.write("mine.py", "from dovetail import handler\n\n@handler\nasync def greet(c, x): ...\n")
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: greet}]")
    done = shell("graph", "flow.yaml", "--handlers", "mine.py")
    assert (done.code, done.err) == (0, "")
    shell.write("other.yaml", "name: f\nnodes: [{id: a, handler: nobody}]")
    refused = shell("graph", "other.yaml", "--handlers", "mine.py")
    assert refused.code == 2
    assert "unknown_handler" in refused.err
