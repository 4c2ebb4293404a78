"""Operations, batches, palette and keys in a browser, on the embedded engine and on Redis."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis
from playwright.sync_api import Page, expect

from ..api.conftest import Server, wait_for
from .conftest import OpenPage
from .test_screens import PAYLOAD, failing, node


def start(server: Server, definition: dict[str, Any]) -> str:
    return str(server.client().post("/runs", {"definition": definition})["run_id"])


def test_workers_show_what_they_run(server: Server, open_page: OpenPage) -> None:
    file = server.folder / uuid4().hex
    name = f"busy-{uuid4().hex[:6]}"
    run_id = start(server, {"name": name, "nodes": [node("wait", "waits", file=str(file))]})
    page = open_page(f"{server.url}/#/operations")
    card = page.get_by_role("article", name=re.compile("^Worker "))
    expect(card).to_have_count(1)
    expect(card).to_contain_text("alive")
    link = card.get_by_role("link", name=f"{name} · wait")
    expect(link).to_be_visible()
    link.click()
    expect(page).to_have_url(re.compile(f"#/runs/{run_id}/nodes\\?node=wait$"))
    expect(page.get_by_role("complementary")).to_contain_text("wait")
    page.go_back()
    expect(link).to_be_visible()
    file.touch()
    expect(link).to_have_count(0)


def test_a_reply_that_breaks_off_does_not_end_the_screen(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page("about:blank")
    page.route("**/api/v1/workers", lambda route: route.fulfill(body='{"items": [', status=200))
    page.goto(f"{server.url}/#/operations/workers")
    expect(page.get_by_role("alert")).to_contain_text("cannot be read")
    page.unroute("**/api/v1/workers")
    expect(page.get_by_role("article", name=re.compile("^Worker "))).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_queues_are_listed_by_handler(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#/operations/queues")
    row = page.get_by_role("row", name=re.compile("^breaks"))
    expect(row.get_by_role("cell").first).to_have_text("0")
    expect(row.get_by_role("cell").nth(1)).to_have_text("1")
    expect(page.get_by_text("No node waits for a worker.")).to_be_visible()


def test_a_parked_node_starts_when_its_limit_is_raised_on_the_page(
    server: Server, open_page: OpenPage
) -> None:
    tag = f"slow {PAYLOAD} {uuid4().hex[:6]}"
    api = server.client()
    answer = api("PUT", f"/rate-limits/{tag}", json={"rate_per_second": 0.001, "burst": 1})
    assert answer.status_code == 200
    nodes = [node(id_, "gives", n=1) | {"resource_tag": tag} for id_ in ("one", "two", "three")]
    run_id = start(server, {"name": "limited", "nodes": nodes})
    page = open_page(f"{server.url}/#/operations/limits")
    limit = page.get_by_role("form", name=f"Rate limit {tag}")
    expect(limit).to_contain_text("2 nodes parked")
    limit.get_by_label("starts a second").fill("0")
    limit.get_by_role("button", name="Save").click()
    expect(limit.get_by_role("alert")).to_be_visible()
    limit.get_by_label("starts a second").fill("1000")
    limit.get_by_role("button", name="Save").click()
    expect(limit).to_contain_text("no node is parked")
    assert api.finished(run_id)["status"] == "COMPLETED"
    page.get_by_label("Limit for the resource_tag").fill("another one")
    page.keyboard.press("Enter")
    other = page.get_by_role("form", name="Rate limit another one")
    expect(other.get_by_label("starts a second")).to_have_value("10")


def test_a_tag_may_be_called_as_what_every_object_has(server: Server, open_page: OpenPage) -> None:
    limit = {"rate_per_second": 1, "burst": 1}
    assert server.client()("PUT", "/rate-limits/constructor", json=limit).status_code == 200
    page = open_page(f"{server.url}/#/operations/limits")
    form = page.get_by_role("form", name="Rate limit constructor")
    expect(form).to_contain_text("no node is parked")


def test_dead_letters_are_read_requeued_and_dropped(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#/operations/letters")
    expect(page.get_by_text("There are no dead letters.")).to_be_visible()
    if not server.redis_url:
        return
    run_id, file = failing(server)
    with redis.Redis.from_url(server.redis_url) as store:
        fields = {"run_id": run_id, "node_id": "fetch", "token": "1.1.1", "handler": "breaks"}
        letter = {"stream": "tasks:breaks", "id": "1-1", "reason": "crashed 3 workers"}
        store.lpush("wf:dead", json.dumps({**letter, "fields": fields, "time": time.time()}))
        store.xadd("wf:stream:results", {"hello": PAYLOAD})
    wait_for(lambda: len(server.client().get("/dead-letters")["items"]) == 2, "both are there")
    unreadable = page.get_by_role("article").filter(has_text=PAYLOAD)
    expect(unreadable.get_by_role("button", name="Requeue")).to_have_count(0)
    Path(file).touch()
    page.get_by_role("article").filter(has_text="crashed 3 workers").get_by_role(
        "button", name="Requeue"
    ).click()
    expect(page.get_by_role("status").filter(has_text="goes on")).to_be_visible()
    assert server.client().finished(run_id)["status"] == "COMPLETED"
    unreadable.get_by_role("button", name="Drop…").click()
    page.get_by_role("button", name="Drop it").click()
    expect(page.get_by_text("There are no dead letters.")).to_be_visible()


def test_a_letter_is_requeued_only_if_its_run_can_be_retried(server: Server) -> None:
    api = server.client()
    nothing = "0" * 32
    assert api("DELETE", f"/dead-letters/{nothing}").status_code == 404
    assert api("POST", f"/dead-letters/{nothing}/requeue").status_code == 404
    if not server.redis_url:
        return
    done = start(server, {"name": "done", "nodes": [node("a", "gives", n=1)]})
    api.finished(done)
    with redis.Redis.from_url(server.redis_url) as store:
        for run_id in (done, "f" * 32, None):
            fields = {} if run_id is None else {"run_id": run_id}
            letter = {"stream": "x", "id": "1", "reason": "because", "fields": fields, "time": 1.0}
            store.lpush("wf:dead", json.dumps(letter))
    letters = api.get("/dead-letters")["items"]
    words = [
        api("POST", f"/dead-letters/{one['letter_id']}/requeue").json()["detail"] for one in letters
    ]
    assert words[0].startswith("this letter names no run")
    assert words[1].startswith("the run that this letter names is not there")
    assert "COMPLETED" in words[2]
    for one in letters:
        assert api("DELETE", f"/dead-letters/{one['letter_id']}").status_code == 204
    assert api.get("/dead-letters") == {"items": []}


def test_a_batch_shows_its_failed_items_and_retries_them(
    server: Server, open_page: OpenPage
) -> None:
    file = server.folder / uuid4().hex
    api = server.client()
    name = f"mail-{uuid4().hex[:6]}"
    fetch = node("fetch", "breaks", file=str(file), error="no answer from {{ params.to }}")
    fetch["condition"] = "{{ params.to != 'ada' }}"
    api.register({"name": name, "nodes": [node("start", "gives", n=1), fetch]})
    items = [{"to": "ada"}, {"to": "grace"}, {"to": PAYLOAD}]
    api.post(f"/workflows/{name}/batches", {"items": items})
    page = open_page(f"{server.url}/#/batches")
    card = page.get_by_role("listitem").filter(has_text=name)
    expect(card).to_contain_text("2 failed")
    card.get_by_role("link").click()
    rows = page.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(page.get_by_role("table")).to_contain_text(f"no answer from {PAYLOAD}")
    page.get_by_role("link", name="all", exact=True).click()
    expect(rows).to_have_count(4)
    page.get_by_role("link", name="failed (2)").click()
    file.touch()
    page.get_by_role("button", name="Retry 2 failed").click()
    expect(page.locator(".progress")).to_contain_text("3 completed")
    expect(page.get_by_role("button", name=re.compile("Retry"))).to_have_count(0)


# ── palette and keys ─────────────────────────────────────────────────────────────────────


def chosen(page: Page, words: str) -> None:
    """The address has changed before the page draws its screen, which closes every dialog: wait
    for something of the screen first."""
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Find a run")).to_be_focused()
    page.keyboard.type(words)


def test_the_palette_leads_to_runs_workflows_screens_and_actions_by_the_keyboard_alone(
    server: Server, open_page: OpenPage
) -> None:
    run_id, file = failing(server)
    workflow = server.client().get(f"/runs/{run_id}")["workflow"]
    page = open_page(server.url)
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    chosen(page, workflow)
    options = page.get_by_role("option")
    expect(options.filter(has_text="workflow")).to_have_count(1)
    expect(options.filter(has_text=run_id[:8])).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/workflows/{workflow}$"))
    expect(page.get_by_role("heading", name=workflow)).to_be_visible()
    # Enter comes before the server has found the run.
    chosen(page, run_id[:8])
    page.keyboard.press("Enter")
    expect(page.get_by_text("The node fetch failed")).to_be_visible()
    Path(file).touch()
    chosen(page, "retry this")
    expect(options).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator(".plan")).to_contain_text("Runs again (2)")
    expect(page.get_by_role("button", name="Retry", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_have_count(0)
    assert server.client().finished(run_id)["status"] == "COMPLETED"
    chosen(page, "limits")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#/operations/limits$"))
    expect(page.get_by_role("region", name="Rate limits")).to_be_visible()
    chosen(page, "no such thing")
    expect(page.get_by_text("Nothing is called so.")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_keys_lead_to_screens_unless_somebody_types(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.locator("main")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Ctrl-K")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.type("gb")
    expect(page).to_have_url(re.compile("#/batches$"))
    page.keyboard.type("gr")
    expect(page).to_have_url(re.compile("#/runs$"))
    expect(page.get_by_label("Search runs")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("gb?")
    expect(page).to_have_url(re.compile("#/runs"))
    expect(page.get_by_role("dialog")).to_have_count(0)


# ── /docs ────────────────────────────────────────────────────────────────────────────────


def test_the_page_of_the_api_sends_its_calls(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/docs")
    page.get_by_role("button", name="Try POST /api/v1/runs", exact=True).click()
    form = page.get_by_role("form", name="POST /api/v1/runs", exact=True)
    definition = {"name": "tried", "nodes": [node("a", "gives", text=PAYLOAD)]}
    form.get_by_label("body").fill(json.dumps({"definition": definition}))
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("202 Accepted")
    found = re.search('"run_id": "([0-9a-f]+)"', form.get_by_label("Reply").inner_text())
    assert found is not None
    page.get_by_role("button", name="Try GET /api/v1/runs/{run_id}/results", exact=True).click()
    form = page.get_by_role("form", name="GET /api/v1/runs/{run_id}/results", exact=True)
    form.get_by_label("run_id").fill(found[1])
    server.client().finished(found[1])
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_label("Reply")).to_contain_text("onerror=alert(1)")
    assert page.locator("img").count() == 0


def test_the_page_of_the_api_shows_a_stream_as_it_comes_and_leads_to_its_sections(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/docs")
    page.get_by_role("button", name="Try GET /api/v1/events", exact=True).click()
    form = page.get_by_role("form", name="GET /api/v1/events", exact=True)
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_label("Reply")).to_contain_text(": events of all runs")
    run_id = start(server, {"name": "streamed", "nodes": [node("a", "gives", n=1)]})
    expect(form.get_by_label("Reply")).to_contain_text(run_id)
    with page.expect_event("requestfailed") as left:
        form.get_by_role("button", name="Close").click()
    assert left.value.url.endswith("/api/v1/events")
    page.get_by_role("navigation").get_by_role("link", name="Rate limits").click()
    expect(page.get_by_role("heading", name="Rate limits")).to_be_in_viewport()
