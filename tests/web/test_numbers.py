"""Exact counts of what the page loads and draws. `bench/page.py` has the times."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Response, expect

from ..api.conftest import Server
from .conftest import OpenPage, serve
from .test_graph import layered, started

MAX_FIRST_LOAD = 100_000
"""Bytes, compressed, of all that is loaded before a person does something."""
NODES = 10_000
MAX_ELEMENTS = 1_200
TABS = ("", "nodes", "graph", "timeline", "logs", "events", "data")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = serve(tmp_path_factory.mktemp("numbers"))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def large(server: Server) -> str:
    run_id = started(server, layered(NODES, 1000), "large")
    server.client().finished(run_id)
    return run_id


def calls(page: Page) -> list[str]:
    """What the page asks of the API from now on."""
    found: list[str] = []

    def note(response: Response) -> None:
        address = urlsplit(response.url)
        if address.path.startswith("/api/v1"):
            found.append(address.path.removeprefix("/api/v1"))

    page.on("response", note)
    return found


def elements(page: Page) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def test_the_first_load_is_small_and_has_no_lazy_part(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.locator("main")).to_contain_text("Runs")
    sizes = page.evaluate(
        "performance.getEntriesByType('resource').filter((one) => one.name.includes('/assets/'))"
        ".concat(performance.getEntriesByType('navigation'))"
        ".map((one) => [one.name, one.encodedBodySize])"
    )
    assert 10_000 < sum(size for _, size in sizes) <= MAX_FIRST_LOAD
    assert not [name for name, _ in sizes if "elk" in name]


@pytest.mark.parametrize("tab", TABS)
def test_a_run_of_10000_nodes_has_few_elements_on_every_tab(
    server: Server, large: str, open_page: OpenPage, tab: str
) -> None:
    page = open_page(f"{server.url}/#/runs/{large}/{tab}")
    expect(page.locator(".content > *").first).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)
    if tab in ("nodes", "timeline", "events"):
        expect(page.locator(".row").first).to_be_visible()
    assert elements(page) <= MAX_ELEMENTS
    if tab == "graph":
        page.get_by_label("Collapse layers").uncheck()
        for button in ("Fit", *["Zoom in"] * 8):
            page.get_by_role("button", name=button).click()
            page.wait_for_timeout(100)
            assert elements(page) <= MAX_ELEMENTS


def test_a_run_is_opened_with_few_requests(server: Server, large: str, open_page: OpenPage) -> None:
    page = open_page("about:blank")
    asked = calls(page)
    page.goto(f"{server.url}/#/runs/{large}/nodes")
    expect(page.locator(".row.node").first).to_be_visible()
    # The run, the stream that says when it changes, and whether there is a screen of documents.
    # Its events are not read for the list.
    assert sorted(asked) == ["/documents", "/events", f"/runs/{large}"]
    page.get_by_role("link", name="Graph").click()
    expect(page.get_by_text("Layer 0")).to_be_visible()
    assert asked[3:] == [f"/runs/{large}/graph"]


def test_a_run_at_rest_is_not_asked_for_again(server: Server, open_page: OpenPage) -> None:
    run_id = started(server, layered(3, 1))
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes")
    expect(page.locator(".row.node")).to_have_count(3)
    page.wait_for_timeout(500)
    asked = calls(page)
    page.wait_for_timeout(3000)
    assert asked == []
    # A retry from elsewhere is seen at once.
    server.client().post(f"/runs/{run_id}/retry", {"from": "n0"})
    expect(page.get_by_text("epoch 2")).to_be_visible()


def test_older_runs_come_while_the_list_is_scrolled_and_few_are_in_the_document(
    server: Server, open_page: OpenPage
) -> None:
    api = server.client()
    name = api.register({"name": "many", "nodes": [{"id": "a", "handler": "gives", "config": {}}]})
    batch = api.post(f"/workflows/{name}/batches", {"items": [{"n": n} for n in range(330)]})
    while api.get(f"/batches/{batch['batch_id']}?limit=1")["finished_at"] is None:
        pass
    page = open_page(f"{server.url}/#/runs?workflow={name}")
    expect(page.get_by_role("button", name="completed")).to_contain_text("330")
    expect(page.get_by_role("button", name="Older runs")).to_be_attached()
    older = page.locator(".more button")  # while it reads, its words are others
    for _ in range(60):
        if older.count() == 0:
            break
        page.mouse.wheel(0, 5000)
        page.wait_for_timeout(100)
    expect(older).to_have_count(0)
    assert page.evaluate("document.querySelector('.rows .extent').offsetHeight") == 330 * 40
    assert elements(page) <= MAX_ELEMENTS


def test_a_hidden_tab_gives_its_streams_back_and_goes_on_when_it_is_shown(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/#/runs?workflow=hidden")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_event("requestfailed") as closed:
        page.evaluate(hide, True)
    assert closed.value.url.endswith("/api/v1/events")
    definition = {"name": "hidden", "nodes": [{"id": "a", "handler": "gives", "config": {}}]}
    server.client().post("/runs", {"definition": definition})
    with page.expect_request("**/api/v1/events") as again:
        page.evaluate(hide, False)
    assert again.value.headers["last-event-id"]
    expect(page.get_by_role("listitem")).to_contain_text("completed")
