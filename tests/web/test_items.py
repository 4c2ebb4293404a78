"""A node with `for_each` on the page: its counts, its items, what a failed one says."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from ..api.conftest import Server
from .conftest import OpenPage
from .test_graph import started
from .test_screens import PAYLOAD, node


def mapped(items: list[Any], handler: str = "picky", **for_each: Any) -> dict[str, Any]:
    return {
        **node("each", handler, item="{{ item }}"),
        "for_each": {"items": items, **for_each},
    }


def test_the_items_of_a_node_are_counted_and_listed_failed_ones_first(
    server: Server, open_page: OpenPage
) -> None:
    items = [*range(120), PAYLOAD]
    run_id = started(server, [mapped(items, max_failures=1), node("end", "gives", "each")])
    assert server.client().finished(run_id)["status"] == "COMPLETED"
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=each")
    expect(page.locator(".row.node").first).to_contain_text("120 of 121 items, 1 failed")
    table = page.locator(".items")
    expect(table.locator(".item").first).to_contain_text("each[120]")
    expect(table.locator(".item").first).to_contain_text(f"picky about {PAYLOAD}")
    expect(table.locator(".item")).to_have_count(51)
    table.get_by_role("button", name="More items").click()
    expect(table.locator(".item")).to_have_count(101)
    table.get_by_role("button", name=re.compile("failed 1")).click()
    expect(table.locator(".item")).to_have_count(1)
    expect(page).to_have_url(re.compile("items=FAILED"))
    table.get_by_role("button", name="each[120]").click()
    expect(table.locator(".item-detail")).to_contain_text("PermanentError")
    expect(table.locator(".item-detail")).to_contain_text("attempt 1 on")
    table.get_by_role("link", name="Log").click()
    expect(page.locator(".line")).to_have_count(1)
    expect(page.locator(".line")).to_contain_text(PAYLOAD)
    page.goto(f"{server.url}/#/runs/{run_id}/graph")
    expect(page.get_by_role("link", name="each, completed")).to_contain_text("120 / 121, 1 failed")


def test_a_failed_item_is_listed_while_others_go_on(server: Server, open_page: OpenPage) -> None:
    items: list[Any] = [*[0] * 200, "bad", *[0] * 2000]
    run_id = started(server, [mapped(items, "lingers", max_concurrency=4, max_failures=1)])
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=each")
    table = page.locator(".items")
    expect(table.get_by_role("button", name="More items")).to_be_visible()
    table.get_by_role("button", name="More items").click()
    expect(table.locator(".item")).to_have_count(100)
    expect(table.locator(".item").first).to_contain_text("each[200]")
    expect(table.locator(".item")).to_have_count(101)
    api = server.client()
    assert api.get(f"/runs/{run_id}")["status"] == "RUNNING"
    api.post(f"/runs/{run_id}/cancel")
    expect(table.get_by_role("button", name=re.compile("cancelled"))).to_be_visible()


def test_a_run_that_failed_by_an_item_opens_on_that_item(
    server: Server, open_page: OpenPage
) -> None:
    run_id = started(server, [mapped([1, "bad", 3]), node("end", "gives", "each")])
    assert server.client().finished(run_id)["status"] == "FAILED"
    page = open_page(f"{server.url}/#/runs/{run_id}")
    answer = page.locator(".answer")
    expect(answer).to_contain_text("The node each failed")
    expect(answer.locator(".item")).to_have_count(1)
    expect(answer.locator(".item")).to_contain_text("picky about bad")
    expect(answer.locator(".log")).to_contain_text("bad")


def test_pending_items_can_be_chosen_and_an_item_says_its_attempt_and_reason(
    server: Server, open_page: OpenPage
) -> None:
    slow = mapped([0] * 4000, "lingers", max_concurrency=3)
    run_id = started(server, [slow])
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=each")
    table = page.locator(".items")
    # None comes or goes while counts change: it would move the others from under the pointer.
    states = table.get_by_role("group", name="State of the items").get_by_role("button")
    words = ["all", "failed 0", "running", "pending", "completed"]
    expect(states).to_have_text([re.compile(word) for word in words])
    table.get_by_role("button", name=re.compile("pending")).click()
    expect(page).to_have_url(re.compile("items=PENDING"))
    expect(table.locator(".item")).to_have_count(50)
    table.get_by_role("button", name="More items").click()
    expect(table.locator(".item")).to_have_count(100)
    server.client().post(f"/runs/{run_id}/cancel")
    table.get_by_role("button", name=re.compile("cancelled")).click()
    # By its name: the running items join the list before it once they are cancelled, too.
    name = table.locator(".item").nth(40).get_by_role("button").inner_text()
    late = table.locator(".item", has_text=name)
    late.get_by_role("button").click()
    expect(late.locator(".item-detail")).to_contain_text("reason: run cancelled")
    expect(late.locator(".item-detail")).to_contain_text("never started")


def test_an_empty_list_says_so(server: Server, open_page: OpenPage) -> None:
    run_id = started(server, [mapped([])])
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=each")
    expect(page.get_by_text("The list has no items.")).to_be_visible()
