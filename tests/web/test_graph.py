"""The graph and the timeline of a run, in a browser, on the embedded engine and on Redis."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import uuid4

from playwright.sync_api import Page, expect

from ..api.conftest import Server
from .conftest import OpenPage
from .test_screens import node

ELK = "elk-worker.min.js"


def started(server: Server, nodes: list[dict[str, Any]], name: str = "drawn") -> str:
    body = {"definition": {"name": name, "nodes": nodes}}
    return str(server.client().post("/runs", body)["run_id"])


def layered(count: int, width: int) -> list[dict[str, Any]]:
    """Layers of so many nodes; each node waits for one of the layer above."""
    return [
        node(f"n{n}", "gives", *([f"n{n - width}"] if n >= width else []), n=n)
        for n in range(count)
    ]


def diamond(server: Server) -> str:
    nodes = [
        node("top", "gives", n=1),
        node("left", "gives", "top", n=2),
        node("right", "gives", "top", n=3),
        node("end", "gives", "left", "right", n=4),
    ]
    run_id = started(server, nodes)
    server.client().finished(run_id)
    return run_id


def asked_for(page: Page) -> list[str]:
    """The addresses of all requests from now on."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    return found


def places(page: Page) -> dict[str, tuple[float, float]]:
    """The middle of each box."""
    boxes = page.locator(".box")
    found = {}
    for at in range(boxes.count()):
        box = boxes.nth(at).bounding_box()
        assert box is not None
        name = boxes.nth(at).locator(".name").inner_text()
        found[name] = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return found


def test_a_small_graph_is_painted_first_and_improved_once(
    server: Server, open_page: OpenPage
) -> None:
    run_id = diamond(server)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    asked = asked_for(page)
    with page.expect_worker() as worker:
        page.get_by_role("link", name="Graph").click()
    assert ELK in worker.value.url
    expect(page.get_by_role("link", name="end, completed")).to_be_visible()
    expect(page.locator("[data-layout=elk]")).to_be_visible()
    found = places(page)
    assert found["top"][1] < found["left"][1] < found["end"][1]
    assert abs(found["left"][1] - found["right"][1]) < 2
    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("link", name="Graph").click()
    expect(page.locator(".box")).to_have_count(4)
    assert sum(ELK in one for one in asked) <= 1
    assert sum(one.endswith("/graph") for one in asked) == 1


def test_the_arrow_keys_follow_the_edges_and_enter_opens_a_node(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/#/runs/{diamond(server)}/graph")
    expect(page.locator("[data-layout=elk]")).to_be_visible()
    expect(page.locator(".box")).to_have_count(4)
    page.locator(".canvas").focus()
    under = page.locator(".graph [role=status]")
    for key, name in (
        ("ArrowDown", "top"),
        ("ArrowDown", "left|right"),
        ("ArrowDown", "end"),
        ("ArrowUp", "left|right"),
        ("ArrowUp", "top"),
    ):
        page.keyboard.press(key)
        expect(under).to_have_text(re.compile(rf"^({name}), completed"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="Node top")).to_be_visible()
    assert page.url.endswith("graph?node=top")


def test_a_node_is_found_by_its_name_and_comes_into_view(
    server: Server, open_page: OpenPage
) -> None:
    run_id = started(server, layered(600, 60))
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    asked = asked_for(page)
    page.get_by_role("link", name="Graph").click()
    page.get_by_label("Search the graph").fill("n59")
    expect(page.get_by_text("11 found")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".box.cursor")).to_have_text(re.compile("n59"))
    assert page.url.endswith("graph?find=n59")
    # It is too large to be improved.
    assert not any(ELK in one for one in asked)


def test_dragging_and_zooming_move_the_graph_and_open_nothing(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/#/runs/{diamond(server)}/graph")
    box = page.get_by_role("link", name="top, completed")
    expect(page.locator("[data-layout=elk]")).to_be_visible()
    page.wait_for_timeout(200)
    before = box.bounding_box()
    assert before is not None
    x, y = before["x"] + 20, before["y"] + 10
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 90, y + 40, steps=4)
    page.mouse.up()
    page.wait_for_timeout(100)
    after = box.bounding_box()
    assert after is not None
    assert (round(after["x"] - before["x"]), round(after["y"] - before["y"])) == (90, 40)
    assert "node=" not in page.url
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(100)
    smaller = box.bounding_box()
    assert smaller is not None
    assert smaller["width"] < after["width"]
    page.get_by_role("button", name="Fit").click()
    box.click()
    expect(page).to_have_url(re.compile("node=top"))


def test_colours_change_while_it_runs_without_a_new_layout(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / uuid4().hex
    nodes = [node("wait", "waits", file=str(file)), node("after", "gives", "wait", n=1)]
    run_id = started(server, nodes)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    asked = asked_for(page)
    page.get_by_role("link", name="Graph").click()
    expect(page.get_by_role("link", name="wait, running")).to_be_visible()
    expect(page.get_by_role("link", name="after, pending")).to_be_visible()
    file.touch()
    expect(page.get_by_role("link", name="after, completed")).to_be_visible()
    assert sum(one.endswith("/graph") for one in asked) == 1


def test_thousands_of_nodes_collapse_by_layer_and_state(
    server: Server, open_page: OpenPage
) -> None:
    nodes = layered(1998, 500)
    nodes += [node("bad", "fail", message="no"), node("behind", "gives", "bad", n=1)]
    run_id = started(server, nodes, "wide")
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}/graph")
    expect(page.get_by_text("Layer 0: 501 nodes")).to_be_visible()
    page.get_by_role("application").focus()
    for key, layer in (("ArrowDown", 0), ("ArrowDown", 1), ("ArrowUp", 0)):
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=f"Layer {layer}: 501")).to_be_visible()
    page.get_by_label("Layer 0: 1 failed").click()
    expect(page.get_by_role("heading", name="Layer 0, failed: 1")).to_be_visible()
    page.get_by_role("list", name="Nodes of the layer").get_by_role("link", name="bad").click()
    expect(page.get_by_role("complementary", name="Node bad")).to_be_visible()
    page.get_by_label("Collapse layers").uncheck()
    expect(page.get_by_role("link", name="bad, failed")).to_be_visible()
    assert page.locator("*").count() < 1500


def test_a_run_of_one_node_and_a_very_long_name_are_drawn(
    server: Server, open_page: OpenPage
) -> None:
    name = "a_very_long_name_" * 6
    run_id = started(server, [node(name, "gives", n=1)], "w" * 120)
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}/graph")
    box = page.get_by_role("link", name=f"{name}, completed")
    expect(box).to_be_visible()
    shown = box.bounding_box()
    assert shown is not None
    assert shown["width"] < 250
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_epochs_and_attempts_are_chosen_in_the_timeline(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / uuid4().hex
    again = {
        **node("shaky", "shaky", file=str(file)),
        "max_retries": 1,
        "retry": {"base_delay_seconds": 0.05, "jitter": 0},
    }
    run_id = started(server, [again])
    api = server.client()
    assert api.finished(run_id)["status"] == "FAILED"
    file.touch()
    api.post(f"/runs/{run_id}/retry", {})
    assert api.finished(run_id)["status"] == "COMPLETED"
    page = open_page(f"{server.url}/#/runs/{run_id}/timeline")
    expect(page.get_by_label(re.compile("^shaky running: "))).to_have_count(1)
    expect(page.locator(".part.part-failed")).to_have_count(0)
    page.get_by_label("Epoch").select_option("1")
    assert page.url.endswith("timeline?epoch=1")
    parts = page.locator(".part.part-running")
    expect(parts).to_have_count(2)
    expect(page.get_by_label(re.compile("^shaky running: .* failed$"))).to_have_count(1)
    expect(page.locator(".part.part-failed")).to_have_count(2)
    expect(page.locator(".part.part-backoff")).to_have_count(1)
    parts.nth(1).click()
    panel = page.get_by_role("complementary")
    expect(panel.get_by_role("button", name="attempt 2").first).to_have_attribute(
        "aria-pressed", "true"
    )
    expect(panel.locator(".failure")).to_contain_text("attempt 2 breaks")
    panel.get_by_role("button", name="attempt 1").first.click()
    expect(panel.locator(".failure")).to_contain_text("attempt 1 breaks")
    expect(page).to_have_url(re.compile(r"at=1\.1"))


def test_the_minimap_is_there_only_while_a_part_of_the_graph_is_out_of_view(
    server: Server, open_page: OpenPage
) -> None:
    for count, width in ((1, 1), (6, 2), (40, 8)):
        page = open_page(f"{server.url}/#/runs/{started(server, layered(count, width))}/graph")
        expect(page.locator(".boxes > *").first).to_be_visible()
        expect(page.locator(".minimap"), f"{count} nodes").to_be_hidden()
    for _ in range(6):
        page.get_by_role("button", name="Zoom in").click()
    expect(page.locator(".minimap")).to_be_visible()
    page.get_by_role("button", name="Fit").click()
    expect(page.locator(".minimap")).to_be_hidden()
