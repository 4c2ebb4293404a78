"""Every screen for everybody: axe-core in light and dark, a phone, the focus, tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from ..api.conftest import Server
from .conftest import OpenPage, serve
from .test_reviews import process, write_inbox
from .test_screens import failing, node

AXE = (files("axe_playwright_python") / "axe.min.js").read_text()

SCREENS = [
    "runs",
    "runs?q=nothing+has+this",
    "runs/{run}",
    "runs/{run}/nodes",
    "runs/{run}/nodes?node=fetch",
    "runs/{run}/graph",
    "runs/{run}/graph?collapse=1&group=0",
    "runs/{run}/timeline",
    "runs/{run}/logs",
    "runs/{run}/logs?wrap=1",
    "runs/{run}/events",
    "runs/{run}/data",
    "runs/{running}",
    "runs/nobody",
    "workflows",
    "workflows?q=nothing+has+this",
    "workflows/{workflow}",
    "workflows/{workflow}/definition",
    "workflows/{workflow}/graph",
    "workflows/{workflow}/diff",
    "workflows/nobody",
    "editor",
    "editor?workflow={workflow}",
    "workflows/{workflow}?from={run}",
    "workflows/{workflow}/graph?node=fetch",
    "workflows/{workflow}/diff?as=graph",
    "batches",
    "batches/{batch}",
    "operations/workers",
    "operations/queues",
    "operations/limits",
    "operations/letters",
    "documents",
    "documents/{document}",
    "no-such-screen",
]
"""A new screen is a new line here."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server with something on every screen, and the names that the addresses need."""
    folder = tmp_path_factory.mktemp("site")
    write_inbox(folder)
    server = serve(folder, "--handlers", "dovetail.documents")
    process(folder)
    api = server.client()
    run, _ = failing(server, error="no price for " + "a very long name " * 20, log="\x1b[33mlook")
    nodes = [node("wait", "waits", file="never"), node("end", "gives", "wait")]
    running = api.post("/runs", {"definition": {"name": "waits-" + "x" * 100, "nodes": nodes}})
    workflow = api.get(f"/runs/{run}")["workflow"]
    api.register(api.get(f"/workflows/{workflow}")["definition"] | {"description": "changed"})
    batch = api.post(f"/workflows/{workflow}/batches", {"items": [{"n": 1}, {"n": 2}]})
    definition = api.get(f"/workflows/{workflow}")["definition"]
    api.register({**definition, "on_failure": "continue", "nodes": definition["nodes"][:2]})
    api("PUT", "/rate-limits/search_api", json={"rate_per_second": 5, "burst": 2})
    document = api.get("/documents/reviews?limit=1")["items"][0]["document_id"]
    yield (
        server,
        {
            "run": run,
            "running": running["run_id"],
            "workflow": workflow,
            "batch": batch["batch_id"],
            "document": document,
        },
    )
    server.close()


def violations(page: Page, *rules: str) -> list[str]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = list(rules)
    # Fields of the browser itself and what is scrolled away are judged as drawn.
    found = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{one['id']}: {one['help']}: {at['html'][:200]} {at.get('failureSummary', '')[:300]}"
        for one in found["violations"]
        for at in one["nodes"]
    ]


def settled(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("main").first).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_screen(
    site: tuple[Server, dict[str, str]], open_page: OpenPage, scheme: str
) -> None:
    server, names = site
    page = open_page(server.url, color_scheme=scheme, reduced_motion="reduce")
    rules = () if scheme == "light" else ("color-contrast",)
    found: dict[str, list[str]] = {}
    for screen in SCREENS:
        settled(page, f"{server.url}/#/{screen.format(**names)}")
        if wrong := violations(page, *rules):
            found[screen] = wrong
    page.keyboard.press("Control+k")
    expect(page.get_by_role("option").first).to_be_visible()
    found |= {"the palette": wrong} if (wrong := violations(page, *rules)) else {}
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    found |= {"the keys": wrong} if (wrong := violations(page, *rules)) else {}
    page.goto(f"{server.url}/#/runs/{names['run']}")  # another screen closes it
    page.get_by_role("button", name="Retry…").first.click()
    expect(page.locator(".plan")).to_be_visible()
    found |= {"retry": wrong} if (wrong := violations(page, *rules)) else {}
    page.goto(f"{server.url}/docs")
    page.get_by_role("button", name="Try GET /api/v1/runs", exact=True).click()
    found |= {"/docs": wrong} if (wrong := violations(page, *rules)) else {}
    assert found == {}, json.dumps(found, indent=1)


def test_no_screen_needs_sideways_scrolling_on_a_phone(
    site: tuple[Server, dict[str, str]], open_page: OpenPage
) -> None:
    server, names = site
    page = open_page(server.url, viewport={"width": 390, "height": 844}, has_touch=True)
    for screen in SCREENS:
        settled(page, f"{server.url}/#/{screen.format(**names)}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, screen
    page.goto(f"{server.url}/docs")
    expect(page.get_by_role("button", name="Try").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_focus_is_seen_on_every_element_that_the_keyboard_reaches(
    site: tuple[Server, dict[str, str]], open_page: OpenPage
) -> None:
    server, names = site
    page = open_page(server.url)
    for screen in ("operations/limits", "batches/{batch}", "documents/{document}"):
        settled(page, f"{server.url}/#/{screen.format(**names)}")
        for _ in range(25):
            page.keyboard.press("Tab")
            style, tag = page.evaluate(
                "[getComputedStyle(document.activeElement).outlineStyle,"
                " document.activeElement.tagName]"
            )
            assert style != "none" or tag in ("BODY", "HTML"), (screen, tag)


def test_with_tokens_the_page_and_the_docs_ask_once_and_a_reader_is_told_so(
    tmp_path: Path, open_page: OpenPage
) -> None:
    server = serve(tmp_path, DOVETAIL_TOKENS="full,looks:read")
    try:
        page = open_page(f"{server.url}/docs")
        form = page.get_by_role("button", name="Try GET /api/v1/workers", exact=True)
        form.click()
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("status")).to_contain_text("401")
        page.get_by_label("Token").fill("looks")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Calls are sent with the token of this tab.")).to_be_visible()
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("status")).to_contain_text("200")
        # The page of the same tab has the same token.
        page.goto(f"{server.url}/#/operations/limits")
        page.get_by_label("Limit for the resource_tag").fill("mine")
        page.keyboard.press("Enter")
        page.get_by_label("starts a second").fill("3")
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        expect(page.locator("header").get_by_text("read only")).to_be_visible()
        for closed in ("/documents", "/queues", "/batches"):
            assert server.client()("GET", closed).status_code == 401
        api = server.client(authorization="Bearer looks")
        assert api("DELETE", f"/dead-letters/{'0' * 32}").status_code == 403
        assert api("POST", "/documents/reviews/x/approve").status_code == 403
    finally:
        server.close()


def test_a_late_refusal_of_a_call_without_a_token_says_nothing_about_the_token(
    tmp_path: Path, open_page: OpenPage
) -> None:
    server = serve(tmp_path, DOVETAIL_TOKENS="full")
    try:
        page = open_page(f"{server.url}/docs")
        late: list[Route] = []

        def delay(route: Route) -> None:
            """Only the list of runs gets its reply at once."""
            if "authorization" in route.request.headers or "/runs?" in route.request.url:
                route.continue_()
            else:
                late.append(route)

        page.route("**/api/v1/**", delay)
        page.goto(f"{server.url}/#/runs")
        page.get_by_label("Token").fill("full")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Forget the token")).to_be_visible()
        with page.expect_response(lambda reply: reply.status == 401):
            for route in late:
                route.continue_()
        page.wait_for_timeout(200)
        expect(page.get_by_role("heading", name="This server needs a token")).to_have_count(0)
        expect(page.get_by_role("button", name="Forget the token")).to_be_visible()
    finally:
        server.close()


READ_ONLY = "This token may only read."


def test_with_a_token_that_reads_no_button_writes_and_each_says_why(
    tmp_path: Path, open_page: OpenPage
) -> None:
    write_inbox(tmp_path)
    server = serve(tmp_path, "--handlers", "dovetail.documents", DOVETAIL_TOKENS="all,looks:read")
    try:
        process(tmp_path)
        api = server.client(authorization="Bearer all")
        run, _ = failing(server, api=api)
        workflow = api.get(f"/runs/{run}")["workflow"]
        api.register(api.get(f"/workflows/{workflow}")["definition"] | {"description": "changed"})
        batch = api.post(f"/workflows/{workflow}/batches", {"items": [{}]})["batch_id"]
        api("PUT", "/rate-limits/search_api", json={"rate_per_second": 5, "burst": 2})
        running = api.post("/runs", {"definition": {"name": "w", "nodes": [
            node("wait", "waits", file="never")]}})["run_id"]  # fmt: skip
        document = api.get("/documents/reviews?limit=1")["items"][0]["document_id"]
        writing = {
            f"runs/{run}": ["Retry…", "Retry from here…", "Fork with a changed definition…"],
            f"runs/{run}/nodes?node=fetch": ["Retry from here…", "Fork from here…", "Fork…"],
            f"runs/{running}": ["Cancel…", "Fork…"],
            f"workflows/{workflow}": ["Trigger", "Roll back to v1…", "New alias…"],
            f"workflows/{workflow}?rollback=2": ["Roll back to v1"],
            f"editor?workflow={workflow}": ["Try run…", "Register"],
            f"batches/{batch}": ["Retry 1 failed"],
            "operations/limits": ["Save"],
            f"documents/{document}": ["Approve, next", "Save"],
        }
        page = open_page(server.url)
        page.get_by_label("Token").fill("looks")
        page.keyboard.press("Enter")
        expect(page.get_by_text("read only")).to_be_visible()
        for screen, names in writing.items():
            page.goto(f"{server.url}/#/{screen}")
            for name in names:
                button = page.get_by_role("button", name=name, exact=True).first
                expect(button, screen).to_be_disabled()
                expect(button).to_have_attribute("title", READ_ONLY)
        page.goto(f"{server.url}/#/runs")
        page.get_by_role("checkbox").nth(1).check()
        expect(page.get_by_role("button", name="Retry")).to_be_disabled()
        page.goto(f"{server.url}/#/runs/{run}")
        page.keyboard.press("Control+k")
        page.get_by_role("combobox").fill("this")
        expect(page.get_by_role("option", name="Copy the address of this screen")).to_be_visible()
        expect(page.get_by_role("option", name="Retry this run")).to_have_count(0)
        # Another token of the same tab may write.
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Forget the token").click()
        page.get_by_label("Token").fill("all")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Retry…").first).to_be_enabled()
        expect(page.get_by_text("read only")).to_have_count(0)
    finally:
        server.close()


def test_an_open_screen_survives_a_restart_of_its_server(
    tmp_path: Path, open_page: OpenPage
) -> None:
    server = serve(tmp_path)
    port = server.url.rpartition(":")[2]
    try:
        page = open_page(f"{server.url}/#/operations/workers")
        card = page.get_by_role("article", name=re.compile("^Worker "))
        expect(card).to_contain_text(f"pid {server.process.pid}")
        server.close()
        expect(page.get_by_text("The server does not answer.").first).to_be_visible()
        expect(card).to_be_visible()
        server = serve(tmp_path, "--port", port)
        expect(card).to_contain_text(f"pid {server.process.pid}")
        expect(page.get_by_text("The server does not answer.")).to_have_count(0)
    finally:
        server.close()
