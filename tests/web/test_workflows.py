"""Workflows in a browser: list, trigger form, versions and aliases, editor, differences."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import Page, expect

from ..api.conftest import Server, wait_for
from ..pages import BIN, environment
from .conftest import OpenPage, serve, tab_to
from .test_screens import PAYLOAD, node

PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
SCHEMA = {
    "type": "object",
    "required": ["who", "level"],
    "properties": {
        "who": {"type": "string", "description": "who is greeted", "minLength": 2},
        "count": {"type": "integer", "default": 3},
        "ratio": {"type": "number"},
        "loud": {"type": "boolean"},
        "level": {"enum": ["low", "high", 3]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "shape": {"$ref": "#/$defs/shape"},
    },
    "$defs": {"shape": {"type": "object", "properties": {"width": {"type": "number"}}}},
}


def named(what: str) -> str:
    return f"{what}-{uuid4().hex[:8]}"


def greeting(server: Server, **more: Any) -> str:
    definition = {"name": named("greet"), "params": SCHEMA, "nodes": [node("a", "gives")], **more}
    return server.client().register(definition)


def run(server: Server, name: str, params: dict[str, Any] | None = None, **more: Any) -> Any:
    api = server.client()
    made = api.post(f"/workflows/{name}/runs", {"params": params or {}, **more})
    return api.finished(made["run_id"])


def two_versions(server: Server, alias: str | None = None) -> str:
    """The first version works, the second one fails; the alias names the second."""
    api = server.client()
    name = named("ship")
    api.register({"name": name, "nodes": [node("pack", "gives", n=1), node("send", "gives")]})
    if alias:
        api("PUT", f"/workflows/{name}/aliases/{alias}", json={"version": 1})
    run(server, name)
    broken = node("pack", "breaks", file=str(server.folder / "never"))
    api.register({"name": name, "nodes": [broken, node("post", "gives", "pack")]})
    if alias:
        api("PUT", f"/workflows/{name}/aliases/{alias}", json={"version": 2})
    assert run(server, name)["status"] == "FAILED"
    return name


# ── the list ─────────────────────────────────────────────────────────────────────────────


def test_the_list_shows_the_last_runs_and_how_many_of_them_failed(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server, "stable")
    idle = greeting(server)
    page = open_page(f"{server.url}/#/workflows")
    row = page.get_by_role("listitem").filter(has=page.get_by_role("link", name=name, exact=True))
    expect(row).to_contain_text("stable → v2")
    expect(row).to_contain_text("1 of 2 failed")
    expect(row.get_by_role("img")).to_have_attribute("aria-label", re.compile("1 failed"))
    expect(page.get_by_role("listitem").filter(has_text=idle)).to_contain_text("no runs")
    run(server, name, version=1)  # while the list is open
    expect(row).to_contain_text("1 of 3 failed", timeout=20_000)
    page.get_by_label("Search workflows").fill(name)
    expect(page.get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Search workflows").fill("nothing has this")
    expect(page.get_by_text("No workflow matches.")).to_be_visible()


def test_the_list_needs_one_request_for_all_rows(server: Server, open_page: OpenPage) -> None:
    for _ in range(5):
        greeting(server)
    asked: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/#/workflows")
    expect(page.locator(".row.workflow").nth(4)).to_be_visible()
    calls = [url.partition("/api/v1")[2] for url in asked if "/api/v1" in url]
    assert set(calls) <= {"/workflows?limit=50&runs=10", "/events", "/documents"}
    assert len(calls) <= 4


# ── versions and aliases ─────────────────────────────────────────────────────────────────


def test_an_alias_of_a_version_that_fails_is_rolled_back_in_three_clicks(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server, "stable")
    page = open_page(f"{server.url}/#/workflows?q={name}")
    page.get_by_role("link", name=name, exact=True).click()
    row = page.locator(".aliases li").filter(has_text="stable")
    expect(row).to_contain_text("1 of 1 failed")
    row.get_by_role("button", name="Roll back to v1…").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back to v1").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(row).to_contain_text("v1")
    expect(row).to_contain_text("none of 1 failed")
    assert page.evaluate("clicks") == 3
    assert server.client().get(f"/workflows/{name}")["aliases"] == {"stable": 1, "latest": 2}


@pytest.mark.parametrize("alias", ["stable", None])
def test_a_version_that_fails_is_rolled_back_in_three_clicks_from_its_failed_run(
    server: Server, open_page: OpenPage, alias: str | None
) -> None:
    name = two_versions(server, alias)
    page = open_page(f"{server.url}/#/runs?workflow={name}")
    page.get_by_role("listitem").filter(has_text="failed").get_by_role("link").click()
    page.get_by_role("button", name="Roll back v2…").click()
    dialog = page.get_by_role("dialog", name=f"Roll back {alias or name}")
    dialog.get_by_role("button", name="Roll back to v1").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate("clicks") == 3
    aliases = server.client().get(f"/workflows/{name}")["aliases"]
    assert aliases == ({"stable": 1, "latest": 2} if alias else {"latest": 3})
    page.reload()
    expect(page.locator(".aliases")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.go_back()
    page.get_by_role("heading", level=1).get_by_role("link", name=name).click()
    expect(page.get_by_role("form", name="Trigger a run")).to_be_visible()


def test_a_workflow_without_aliases_is_rolled_back_in_three_clicks_too(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server)
    page = open_page(f"{server.url}/#/workflows?q={name}")
    page.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("button", name="Roll back to v1…").click()
    expect(page.get_by_role("dialog")).to_contain_text("registered as the newest version, v3")
    page.get_by_role("dialog").get_by_role("button", name="Roll back to v1").click()
    expect(page.locator(".versions li").first).to_contain_text("v3")
    assert page.evaluate("clicks") == 3
    api = server.client()
    assert api.get(f"/workflows/{name}/diff?from=1&to=3")["changed"] == []
    assert run(server, name)["status"] == "COMPLETED"


def test_an_alias_is_made_changed_and_removed(server: Server, open_page: OpenPage) -> None:
    name = two_versions(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    page.get_by_role("button", name="New alias…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Alias").fill("latest")
    dialog.get_by_role("button", name="Set").click()
    expect(dialog.get_by_role("alert")).to_be_visible()  # the server's own words
    dialog.get_by_label("Alias").fill("canary")
    dialog.get_by_role("button", name="Set").click()
    row = page.locator(".aliases li").filter(has_text="canary")
    expect(row).to_contain_text("v2")
    row.get_by_role("button", name="Change…").click()
    dialog.get_by_label("Version").select_option("1")
    dialog.get_by_role("button", name="Set").click()
    expect(row).to_contain_text("v1")
    row.get_by_role("button", name="Change…").click()
    dialog.get_by_role("button", name="Remove the alias").click()
    expect(row).to_have_count(0)
    assert server.client().get(f"/workflows/{name}")["aliases"] == {"latest": 2}


def test_the_weights_of_an_alias_are_set_and_taken_back(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server, "canary")

    def canary() -> Any:
        return server.client().get(f"/workflows/{name}")["aliases"]["canary"]

    page = open_page(f"{server.url}/#/workflows/{name}")
    row = page.locator(".aliases li").filter(has_text="canary")
    row.get_by_role("button", name="Change…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Divide runs with another version").click()
    expect(dialog.get_by_label("Version")).to_have_count(2)
    expect(dialog.get_by_role("button", name="Add a version")).to_have_count(0)  # it has two
    dialog.get_by_label("Weight").first.fill("3")
    dialog.get_by_label("Weight").last.fill("0")
    dialog.get_by_role("button", name="Set").click()
    expect(dialog.get_by_role("alert")).to_contain_text("above 0")  # the server's own words
    dialog.get_by_label("Weight").last.fill("1")
    expect(dialog).to_contain_text("75 %")
    dialog.get_by_role("button", name="Set").click()
    expect(row).to_contain_text("v2 75 %")
    expect(row).to_contain_text("v1 25 %")
    assert canary() == {"1": 1, "2": 3}
    row.get_by_role("button", name="Change…").click()
    expect(dialog.get_by_label("Weight").last).to_have_value("3")
    dialog.get_by_role("button", name="Without v2").click()
    dialog.get_by_role("button", name="Set").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert canary() == 1


def test_weights_of_an_alias_are_shown_and_rolled_back_to_what_it_named_before(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server)
    api = server.client()
    for body in ({"version": 1}, {"weights": {"1": 90, "2": 10}}):
        assert api("PUT", f"/workflows/{name}/aliases/canary", json=body).status_code == 200
    page = open_page(f"{server.url}/#/workflows?q={name}")
    expect(page.locator(".row.workflow")).to_contain_text("canary → v1 90 %, v2 10 %")
    page.get_by_role("link", name=name, exact=True).click()
    row = page.locator(".aliases li").filter(has_text="canary")
    expect(row).to_contain_text("v1 90 %")
    expect(row).to_contain_text("v2 10 %")
    expect(page.locator(".beside")).to_contain_text("canary → v1 90 %, v2 10 %, before v1")
    row.get_by_role("button", name="Roll back to v1…").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back to v1").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert api.get(f"/workflows/{name}")["aliases"]["canary"] == 1


def test_a_change_of_somebody_else_is_not_overruled(server: Server, open_page: OpenPage) -> None:
    name = two_versions(server, "stable")
    page = open_page(f"{server.url}/#/workflows/{name}")
    row = page.locator(".aliases li").filter(has_text="stable")
    row.get_by_role("button", name="Roll back to v1…").click()
    server.client()("PUT", f"/workflows/{name}/aliases/other", json={"version": 1})
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Roll back to v1").click()
    expect(dialog.get_by_role("alert")).to_contain_text("read it again")
    dialog.get_by_role("button", name="Try again").click()
    expect(page.locator(".aliases")).to_contain_text("other")
    assert server.client().get(f"/workflows/{name}")["aliases"]["stable"] == 2


def test_two_versions_are_compared_as_a_list_as_text_and_as_graphs(
    server: Server, open_page: OpenPage
) -> None:
    name = two_versions(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    page.locator(".versions").get_by_role("link", name="Changes").click()
    changes = page.locator(".changes")
    expect(changes).to_contain_text("1 added, 1 removed, 1 changed")
    expect(changes.locator(".change-removed")).to_contain_text("send")
    expect(changes.locator(".change-added")).to_contain_text("post")
    expect(changes.locator(".change-changed")).to_contain_text("handler")
    expect(page.locator(".cm-mergeView")).to_be_visible()
    expect(page.locator(".cm-content").first).to_contain_text("handler: gives")
    expect(page.locator(".cm-content").last).to_contain_text("handler: breaks")
    page.get_by_role("button", name="graph", exact=True).click()
    old = page.get_by_role("region", name="Version 1")
    new = page.get_by_role("region", name="Version 2")
    expect(old.get_by_role("link", name="send, removed")).to_be_visible()
    expect(new.get_by_role("link", name="post, added")).to_be_visible()
    expect(new.get_by_role("link", name="pack, changed")).to_be_visible()
    page.get_by_role("button", name="Swap").click()
    expect(changes.locator(".change-added")).to_contain_text("send")
    assert "from=2&to=1" in page.url


def test_a_definition_is_shown_as_text_and_as_a_graph(server: Server, open_page: OpenPage) -> None:
    name = two_versions(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    page.get_by_role("link", name="Definition", exact=True).click()
    expect(page.locator(".cm-content")).to_contain_text("handler: breaks")
    page.goto(f"{server.url}/#/workflows/{name}/definition?version=1")
    expect(page.locator(".cm-content")).to_contain_text("id: send")
    page.get_by_role("link", name="Graph", exact=True).click()
    page.get_by_role("link", name=re.compile("^send")).click()
    expect(page.get_by_role("complementary")).to_contain_text("gives")
    page.goto(f"{server.url}/#/workflows/{name}?version=9")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Show the latest version").click()
    expect(page.get_by_role("heading", name=name)).to_contain_text("v2")


def test_the_last_runs_of_an_open_workflow_are_live(server: Server, open_page: OpenPage) -> None:
    name = two_versions(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    recent = page.locator(".recent").filter(has=page.get_by_role("link")).get_by_role("listitem")
    expect(recent).to_have_count(2)
    page.locator("#params-json").fill('{"typed": 1}')
    made = run(server, name, version=1)["run_id"]
    expect(recent).to_have_count(3)
    expect(recent.first).to_contain_text(made[:8])
    expect(recent.first).to_contain_text("completed")
    expect(page.locator("#params-json")).to_have_value('{"typed": 1}')


# ── the trigger form ─────────────────────────────────────────────────────────────────────


def test_a_form_from_the_schema_triggers_a_run_with_typed_params(
    server: Server, open_page: OpenPage
) -> None:
    name = greeting(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    form = page.get_by_role("form", name="Trigger a run")
    expect(form).to_contain_text("who is greeted")
    expect(form.get_by_label("count")).to_have_attribute("placeholder", "3")
    form.get_by_label("who").fill("Ada")
    form.get_by_label("ratio").fill("0.5")
    form.get_by_label("loud").select_option("true")
    form.get_by_label("level").select_option("3")
    form.get_by_label("tags").fill('["a", "b"]')
    form.get_by_label("shape").fill('{"width": 2}')
    form.get_by_role("button", name="Trigger").click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    run_id = page.url.rpartition("/")[2]
    assert server.client().get(f"/runs/{run_id}")["params"] == {
        "who": "Ada",
        "count": 3,
        "ratio": 0.5,
        "loud": True,
        "level": 3,
        "tags": ["a", "b"],
        "shape": {"width": 2},
    }


def test_what_the_server_finds_is_beside_its_field(server: Server, open_page: OpenPage) -> None:
    name = greeting(server)
    page = open_page(f"{server.url}/#/workflows/{name}")
    form = page.get_by_role("form", name="Trigger a run")
    form.get_by_label("who").fill("A")
    form.get_by_label("count").fill("many")
    form.get_by_role("button", name="Trigger").click()
    for field in ("who", "count", "level"):
        expect(form.get_by_label(field)).to_have_attribute("aria-invalid", "true")
    expect(form.locator(".wrong")).to_have_count(3)
    expect(form.get_by_label("who")).to_be_focused()
    form.get_by_label("tags").fill("[1")
    expect(form.locator(".wrong").last).to_contain_text("This is no JSON")
    form.get_by_role("button", name="Trigger").click()
    expect(form.get_by_label("tags")).to_have_attribute("aria-invalid", "true")
    expect(form.get_by_label("tags")).to_be_focused()
    form.get_by_label("tags").fill(" ")
    form.get_by_label("count").fill("1e400")
    form.get_by_role("button", name="Trigger").click()
    expect(form.locator(".wrong").filter(has_text="1e400")).to_be_visible()
    form.get_by_label("who").fill("Ada")
    form.get_by_label("level").select_option("high")
    form.get_by_label("count").fill("9007199254740993")
    expect(form.locator(".wrong")).to_contain_text("exactly")
    form.get_by_label("count").fill(" ")
    form.get_by_role("button", name="Trigger").click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    made = page.url.rpartition("/")[2]
    assert server.client().get(f"/runs/{made}")["params"] == {
        "who": "Ada",
        "level": "high",
        "count": 3,
    }


def test_a_form_is_prefilled_from_a_run_exactly(server: Server, open_page: OpenPage) -> None:
    name = greeting(server)
    first = {"who": "Ada\nLovelace", "level": "low", "count": 0, "loud": False, "tags": ["x"]}
    params = run(server, name, first)["params"]
    run_id = run(server, name, first)["run_id"]
    odd = run(server, name, {"who": "Bob", "level": 3, "extra": {"deep": None}})["run_id"]
    page = open_page(f"{server.url}/#/runs/{run_id}")
    page.get_by_role("link", name="Trigger again…").click()
    form = page.get_by_role("form", name="Trigger a run")
    expect(form.get_by_label("who")).to_have_value("Ada\nLovelace")
    form.get_by_role("button", name="Trigger").click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    again = server.client().get(f"/runs/{page.url.rpartition('/')[2]}")
    assert again["run_id"] != run_id
    assert again["params"] == params
    # The fields cannot hold a param that the schema does not name: then all of it is JSON.
    page.goto(f"{server.url}/#/workflows/{name}")
    form.get_by_label("Params as in an earlier run").select_option(odd)
    expect(form.get_by_label("params", exact=False).last).to_have_value(re.compile('"deep": null'))


@pytest.mark.parametrize("which", ["Command line", "curl", "Python"])
def test_the_same_as_a_command_makes_the_same_run(
    server: Server, open_page: OpenPage, which: str
) -> None:
    name = greeting(server)
    hostile = 'O\'Neil "$(touch hurt)" `id` \\ %s é 😀'
    page = open_page(f"{server.url}/#/workflows/{name}")
    form = page.get_by_role("form", name="Trigger a run")
    form.get_by_label("who").fill(hostile)
    form.get_by_label("level").select_option('"high"')
    form.get_by_label("tags").fill('["it\'s"]' if which != "Command line" else "")
    form.get_by_text("The same on the command line").click()
    form.get_by_role("button", name=which, exact=True).click()
    text = form.locator("pre").inner_text()
    env = environment(PATH=f"{BIN}:/usr/bin:/bin")
    command = [sys.executable, "-c", text] if which == "Python" else ["sh", "-c", text]
    done = subprocess.run(command, cwd=server.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (server.folder / "hurt").exists()

    def runs() -> list[Any]:
        found: list[Any] = server.client().get(f"/runs?workflow={name}")["items"]
        return found

    wait_for(lambda: len(runs()) == 1, "the run is listed")
    expected: dict[str, Any] = {"who": hostile, "level": "high", "count": 3}
    if which != "Command line":
        expected["tags"] = ["it's"]
    assert runs()[0]["params"] == expected


def test_numbers_that_a_browser_cannot_hold_stay_as_they_are(
    server: Server, open_page: OpenPage
) -> None:
    name = greeting(server)
    params = {"who": "Ada", "level": 3, "count": 2**62 + 1, "tags": [str(2**62 + 1)]}
    run_id = run(server, name, params)["run_id"]
    page = open_page(f"{server.url}/#/runs/{run_id}/data")
    expect(page.locator(".json").first).to_contain_text(f"count: {2**62 + 1}")
    page.get_by_role("link", name="Trigger again…").click()
    page.get_by_text("The same on the command line").click()
    expect(page.locator(".same-as pre")).to_contain_text(f'"count":{2**62 + 1}')
    page.get_by_role("button", name="Trigger", exact=True).click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    made = page.url.rpartition("/")[2]
    assert made != run_id
    assert server.client().get(f"/runs/{made}")["params"] == params


def test_a_workflow_without_a_schema_takes_any_object(server: Server, open_page: OpenPage) -> None:
    name = server.client().register({"name": named("any"), "nodes": [node("a", "gives")]})
    page = open_page(f"{server.url}/#/workflows/{name}")
    page.get_by_label("params").fill("[1]")
    expect(page.get_by_text("The params are a JSON object")).to_be_visible()
    page.get_by_label("params").fill('{"a": {"b": 1}}')
    page.get_by_role("button", name="Trigger").click()
    expect(page.get_by_text("The run completed")).to_be_visible()


def test_params_may_be_called_as_what_every_object_has(server: Server, open_page: OpenPage) -> None:
    names = ("constructor", "toString", "__proto__")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    definition = {"name": named("own"), "params": schema, "nodes": [node("a", "gives")]}
    page = open_page(f"{server.url}/#/workflows/{server.client().register(definition)}")
    for name in names:
        field = page.get_by_label(re.compile(f"^{name} string"))
        expect(field).to_have_value("")
        field.fill(f"of {name}")
    page.get_by_role("button", name="Trigger", exact=True).click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    made = page.url.rpartition("/")[2]
    assert server.client().get(f"/runs/{made}")["params"] == {name: f"of {name}" for name in names}
    page.get_by_role("link", name="Trigger again…").click()
    expect(page.get_by_label(re.compile("^__proto__ string"))).to_have_value("of __proto__")


# ── the editor ───────────────────────────────────────────────────────────────────────────


def write(page: Page, text: str) -> None:
    page.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)


def expect_verdict(page: Page, words: str) -> None:
    expect(page.locator(".title .state")).to_have_text(re.compile(f"^.{words}$"))


def test_a_definition_typed_with_an_error_has_a_mark_on_its_line(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/#/workflows")
    page.get_by_role("link", name="New workflow").click()
    expect_verdict(page, "valid, 2 nodes")
    expect(page.get_by_role("button", name="Register")).to_be_enabled()
    text = "name: typo\nnodes:\n  - id: a\n    handler: gives\n  - id: b\n    handler: givs\n"
    write(page, text)
    expect_verdict(page, "1 error")
    expect(page.locator(".cm-lint-marker-error")).to_have_count(1)
    expect(page.locator(".cm-lintRange-error")).to_have_text("givs")
    finding = page.get_by_role("list", name="Findings").get_by_role("listitem")
    expect(finding).to_contain_text("line 6")
    expect(finding).to_contain_text("gives")  # did you mean
    expect(page.get_by_role("button", name="Register")).to_be_disabled()
    expect(page.get_by_text("The graph of the last valid text:")).to_be_visible()
    write(page, text + "  - [")
    expect(page.get_by_role("list", name="Findings")).to_contain_text("line 7")
    write(page, text.replace("givs", "gives"))
    expect_verdict(page, "valid, 2 nodes")
    expect(page.locator(".cm-lint-marker-error")).to_have_count(0)
    expect(page.get_by_role("list", name="Findings")).to_have_count(0)


def test_the_newest_text_decides_whatever_answer_comes_last(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/#/editor")
    expect_verdict(page, "valid, 2 nodes")
    held: list[Any] = []

    def hold(route: Any) -> None:
        if "slow" in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    page.route("**/workflows/validate*", hold)
    write(page, "name: slow\n")
    wait_for(lambda: page.wait_for_timeout(20) or held, "the first text is sent")
    write(page, "name: quick\nnodes: [{id: a, handler: gives}]\n")
    expect_verdict(page, "valid, 1 node")
    for one in held:
        one.abort()
    page.wait_for_timeout(100)
    expect_verdict(page, "valid, 1 node")


def test_a_definition_is_tried_and_registered_from_the_editor(
    server: Server, open_page: OpenPage
) -> None:
    name = named("written")
    page = open_page(f"{server.url}/#/editor")
    config = 'config: {n: "{{ params.n }}"}'
    text = f"# mine\nname: {name}\nnodes:\n  - id: a\n    handler: gives\n    {config}\n"
    write(page, text)
    expect_verdict(page, "valid, 1 node")
    page.get_by_role("button", name="Try run…").click()
    page.get_by_label("Params, JSON").fill('{"n": 5}')
    page.get_by_role("button", name="Run it").click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    assert server.client()("GET", f"/workflows/{name}").status_code == 404
    page.go_back()
    expect(page.locator(".cm-content")).to_contain_text("# mine")  # the draft is kept
    expect(page.get_by_role("button", name="Register")).to_be_enabled()
    page.get_by_role("button", name="Register").click()
    expect(page.get_by_text(f"{name} version 1 is registered")).to_be_visible()
    page.get_by_role("button", name="Register").click()
    expect(page.get_by_text("version 1 has this content already")).to_be_visible()
    page.get_by_role("link", name="Trigger it").click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()


def test_a_version_that_was_registered_meanwhile_is_not_overruled_without_a_word(
    server: Server, open_page: OpenPage
) -> None:
    big = 2**63 - 1
    name = named("both")
    api = server.client()
    api.register({"name": name, "nodes": [node("a", "gives", n=big)]})
    page = open_page(f"{server.url}/#/workflows/{name}")
    page.get_by_role("link", name="Edit", exact=True).click()
    expect(page.locator(".cm-content")).to_contain_text(str(big))
    page.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.insert_text("on_failure: continue\n")
    api.register({"name": name, "nodes": [node("b", "gives")]})
    expect_verdict(page, "valid, 1 node")
    page.get_by_role("button", name="Try run…").click()
    page.get_by_role("button", name="Run it").click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    page.go_back()
    expect(page.locator(".cm-content")).to_contain_text("on_failure: continue")
    page.get_by_role("button", name="Register", exact=True).click()
    expect(page.get_by_text("Another version was registered since you began.")).to_be_visible()
    page.get_by_role("button", name="Register yours all the same").click()
    expect(page.get_by_text(f"{name} version 3 is registered")).to_be_visible()
    config = api.get(f"/workflows/{name}")["definition"]["nodes"][0]["config"]
    assert config == {"n": big}


def test_the_editor_suggests_fields_handlers_and_nodes(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#/editor")
    expect_verdict(page, "valid, 2 nodes")
    options = page.locator(".cm-tooltip-autocomplete li")

    def suggested(text: str) -> list[str]:
        write(page, text)
        page.keyboard.press("Control+Space")
        expect(options.first).to_be_visible()
        found = [one.strip() for one in page.locator(".cm-completionLabel").all_inner_texts()]
        page.keyboard.press("Escape")
        return found

    assert {"name", "nodes"} <= set(suggested("n"))
    nodes = "name: x\nnodes:\n  - id: first\n    handler: input\n  - id: second\n    "
    assert {"handler", "config", "dependencies"} <= set(suggested(nodes))
    assert "id" not in suggested(nodes)
    assert {"sleep", "gives"} <= set(suggested(f"{nodes}handler: "))
    assert suggested(f"{nodes}dependencies: [f") == ["first"]
    assert suggested(f"{nodes}handler: sleep\n    config:\n      ") == ["seconds"]
    write(page, f"{nodes}handler: slee")
    page.keyboard.press("Control+Space")
    options.first.click()
    expect(page.locator(".cm-content")).to_contain_text("handler: sleep")


def test_a_file_is_opened_and_dropped(server: Server, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(f"{server.url}/#/editor")
    file = tmp_path / "flow.json"
    file.write_text('{"name": "dropped", "nodes": [{"id": "only", "handler": "gives"}]}')
    page.locator("input[type=file]").set_input_files(file)
    expect_verdict(page, "valid, 1 node")
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["name: [broken"], "b.yaml"));
          const event = { dataTransfer: data, bubbles: true, cancelable: true };
          document.querySelector("main").dispatchEvent(new DragEvent("drop", event));
        }"""
    )
    expect_verdict(page, "1 error")
    page.reload()
    expect(page.locator(".cm-content")).to_contain_text("[broken")
    page.get_by_role("button", name="Discard changes").click()
    expect_verdict(page, "valid, 2 nodes")
    page.reload()
    expect_verdict(page, "valid, 2 nodes")


# ── what holds for all of it ─────────────────────────────────────────────────────────────


def test_markup_in_definitions_params_and_findings_is_text(
    server: Server, open_page: OpenPage
) -> None:
    api = server.client()
    name = named("markup")
    schema = {
        "type": "object",
        "properties": {
            PAYLOAD: {"type": "string", "description": PAYLOAD, "default": PAYLOAD},
            "one": {"enum": [PAYLOAD]},
        },
    }
    first = {"name": name, "description": PAYLOAD, "params": schema, "nodes": [node("a", "gives")]}
    api.register(first)
    api.register({**first, "nodes": [node("a", "gives", **{PAYLOAD: PAYLOAD})]})
    run_id = run(server, name, {PAYLOAD: PAYLOAD})["run_id"]
    page = open_page(f"{server.url}/#/workflows/{name}?from={run_id}")
    expect(page.locator(".facts")).to_have_text(PAYLOAD)
    form = page.get_by_role("form", name="Trigger a run")
    expect(form).to_contain_text(PAYLOAD)
    form.get_by_text("The same on the command line").click()
    for part in ("definition", "graph?node=a", "diff?from=1&to=2", "diff?from=1&to=2&as=graph"):
        page.goto(f"{server.url}/#/workflows/{name}/{part}")
        expect(page.locator("main")).to_contain_text("onerror=alert(1)")
    page.goto(f"{server.url}/#/workflows/{PAYLOAD}")
    expect(page.get_by_role("alert")).to_be_visible()
    page.goto(f"{server.url}/#/editor")
    write(page, f"name: x\nnodes: []\n'{PAYLOAD}': 1\n")
    expect(page.get_by_role("list", name="Findings")).to_contain_text("onerror=alert(1)")
    assert page.locator("img, main script").count() == 0


def test_a_token_that_only_reads_sees_all_and_is_told_why_it_changes_nothing(
    tmp_path: Path, open_page: OpenPage
) -> None:
    server = serve(tmp_path, DOVETAIL_TOKENS="full,look:read")
    try:
        api = server.client(authorization="Bearer full")
        name = api.register({"name": "greet", "params": SCHEMA, "nodes": [node("a", "gives")]})
        page = open_page(f"{server.url}/#/workflows/{name}")
        page.get_by_label("Token").fill("look")
        page.keyboard.press("Enter")
        form = page.get_by_role("form", name="Trigger a run")
        form.get_by_label("who").fill("Ada")
        trigger = form.get_by_role("button", name="Trigger")
        expect(trigger).to_be_disabled()
        expect(trigger).to_have_attribute("title", "This token may only read.")
        form.get_by_text("The same on the command line").click()
        for which in ("Command line", "curl", "Python"):
            form.get_by_role("button", name=which, exact=True).click()
            expect(form.locator("pre")).to_contain_text("greet")
            expect(form.locator("pre")).not_to_contain_text("look")
        page.goto(f"{server.url}/#/editor?workflow={name}")
        expect_verdict(page, "valid, 1 node")
        expect(page.get_by_role("button", name="Register")).to_be_disabled()
        # A key is not seen to be disabled: it gets the server's own words.
        page.locator(".cm-content").click()
        page.keyboard.press("Control+s")
        expect(page.get_by_role("alert")).to_contain_text("This token may only read.")
    finally:
        server.close()


def test_a_workflow_is_written_registered_and_triggered_by_the_keyboard_alone(
    server: Server, open_page: OpenPage
) -> None:
    name = named("keys")
    page = open_page(f"{server.url}/#/workflows")
    tab_to(page, "^New workflow$")
    page.keyboard.press("Enter")
    expect_verdict(page, "valid, 2 nodes")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.shadowRoot?.activeElement?.ariaLabel"):
            break
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(f"name: {name}\nnodes:\n- id: a\n  handler: gives\n")
    page.keyboard.type("# gr ?/")  # keys of the page elsewhere
    expect_verdict(page, "valid, 1 node")
    expect(page.locator(".cm-content")).to_contain_text("# gr ?/")
    page.keyboard.press("Control+s")
    expect(page.get_by_text(f"{name} version 1 is registered")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")  # leaves the text
    assert page.evaluate("document.activeElement.shadowRoot") is None
    page.goto(f"{server.url}/#/workflows/{name}")
    expect(page.get_by_role("form", name="Trigger a run")).to_be_visible()
    tab_to(page, "^Trigger$")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The run completed")).to_be_visible()


def test_workflows_fit_on_a_phone(server: Server, open_page: OpenPage) -> None:
    name = f"{named('long')}-{'x' * 100}"
    api = server.client()
    long = {"properties": {"p" * 100: {"type": "string", "default": "d" * 200}}}
    api.register({"name": name, "params": long, "nodes": [node("n" * 100, "gives")]})
    api.register({"name": name, "params": long, "nodes": [node("m" * 100, "gives", t="w" * 300)]})
    api("PUT", f"/workflows/{name}/aliases/{'a' * 100}", json={"version": 1})
    run(server, name)
    page = open_page(server.url, **PHONE)
    parts = ["", "/definition", "/graph", "/diff", "/diff?as=graph"]
    places = [
        "workflows",
        *(f"workflows/{name}{part}" for part in parts),
        f"editor?workflow={name}",
    ]
    for place in places:
        page.goto(f"{server.url}/#/{place}")
        expect(page.locator("main")).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
