"""The page in a browser: what a person sees and does, on the embedded engine and on Redis."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

from playwright.sync_api import expect

from ..api.conftest import Api, Server, wait_for
from .conftest import OpenPage, tab_to

PAYLOAD = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def node(id_: str, handler: str, *dependencies: str, **config: Any) -> dict[str, Any]:
    return {"id": id_, "handler": handler, "dependencies": list(dependencies), "config": config}


def failing(server: Server, api: Api | None = None, **config: Any) -> tuple[str, str]:
    """A run that failed, and the name of the file that would mend it."""
    file = str(server.folder / uuid4().hex)
    definition = {
        "name": f"shop-{uuid4().hex[:8]}",
        "nodes": [
            node("start", "gives", n=1),
            node("fetch", "breaks", "start", file=file, **config),
            node("report", "gives", "fetch"),
        ],
    }
    api = api or server.client()
    name = api.register(definition)
    run_id = api.post(f"/workflows/{name}/runs", {"params": {}})["run_id"]
    assert api.finished(run_id)["status"] == "FAILED"
    return run_id, file


def test_the_list_shows_runs_and_keeps_its_filters_in_the_address(
    server: Server, open_page: OpenPage
) -> None:
    failed, _ = failing(server)
    page = open_page(server.url)
    row = page.get_by_role("listitem").filter(has_text=failed[:8])
    expect(row).to_contain_text("failed")
    expect(row).to_contain_text("there is no price")
    page.get_by_role("button", name="completed").click()
    expect(row).to_have_count(0)
    assert page.url.endswith("#/runs?status=COMPLETED")
    page.get_by_role("button", name="failed").click()
    page.get_by_label("Search runs").fill(failed[:8])
    expect(page).to_have_url(re.compile(rf"status=FAILED&q={failed[:8]}$"))
    page.reload()
    expect(page.get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Search runs").fill("nothing has this")
    expect(page.get_by_text("No run matches.")).to_be_visible()


def test_what_is_typed_stays_while_the_list_is_live(server: Server, open_page: OpenPage) -> None:
    api = server.client()
    name = api.register({"name": f"typed-{uuid4().hex[:6]}", "nodes": [node("a", "gives")]})
    page = open_page(server.url)
    search = page.get_by_label("Search runs")
    words = "a few words"
    for sign in words:  # the list is drawn anew between the letters
        search.press(sign)
        api.post(f"/workflows/{name}/runs", {"params": {}})
        page.wait_for_timeout(120)
    expect(search).to_have_value(words)
    expect(page).to_have_url(re.compile(r"q=a\+few\+words$"))
    page.get_by_label("Workflow", exact=True).fill(name)
    search.fill("other words")
    expect(page).to_have_url(re.compile(r"q=other\+words"))
    expect(page).to_have_url(re.compile(f"workflow={name}"))
    page.go_back()
    page.go_forward()
    expect(search).to_have_value("other words")


def test_a_time_that_is_emptied_can_be_written_anew(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_label("Time", exact=True).select_option("between…")
    after = page.get_by_label("Created after")
    after.fill("")
    expect(page).to_have_url(re.compile("time=own$"))
    after.fill("2026-01-02T03:04")
    expect(page).to_have_url(re.compile("time=own&after=2026-01-0"))
    page.reload()
    expect(after).to_have_value("2026-01-02T03:04")


def test_a_run_is_watched_live_from_the_trigger_to_its_end(
    server: Server, open_page: OpenPage
) -> None:
    file = server.folder / uuid4().hex
    name = f"live-{uuid4().hex[:8]}"
    server.client().register(
        {
            "name": name,
            "params": {
                "type": "object",
                "required": ["who"],
                "properties": {"who": {"type": "string"}, "count": {"type": "integer"}},
            },
            "nodes": [
                node("wait", "waits", file=str(file)),
                node("end", "gives", "wait", text="Hello {{ params.who }}"),
            ],
        }
    )
    page = open_page(f"{server.url}/#/workflows")
    page.get_by_role("link", name=name).click()
    page.get_by_label("who").fill("Ada")
    page.get_by_label("count").fill("3")
    page.get_by_role("button", name="Trigger").click()
    expect(page.get_by_text("What it waits for")).to_be_visible()
    expect(page.locator(".reasons")).to_contain_text("waits for parent wait")
    file.touch()
    expect(page.get_by_text("The run completed")).to_be_visible()
    expect(page.locator(".json")).to_contain_text("Hello Ada")
    page.get_by_role("link", name="Logs").click()
    expect(page.locator(".log")).to_contain_text("the file is there")
    page.get_by_role("link", name="Events", exact=True).click()
    expect(page.locator(".row.event").first).to_contain_text("run.completed")
    page.get_by_role("link", name="Graph").click()
    expect(page.get_by_role("link", name="end, completed")).to_be_visible()


def test_a_failed_run_opens_on_its_cause_and_is_retried_in_three_clicks(
    server: Server, open_page: OpenPage
) -> None:
    run_id, file = failing(server)
    page = open_page(server.url)
    page.get_by_role("listitem").filter(has_text=run_id[:8]).get_by_role("link").click()
    answer = page.locator(".answer")
    expect(answer).to_contain_text("The node fetch failed")
    expect(answer).to_contain_text("PermanentError: there is no price")
    expect(answer).to_contain_text("Traceback (most recent call last)")
    expect(answer.locator(".log")).to_contain_text("about to break")
    # Colours are colours; other control characters are shown.
    expect(answer.locator(".ansi-red")).to_have_text("red")
    expect(answer.locator(".log")).to_contain_text("and \\x07")
    Path(file).touch()
    answer.get_by_role("button", name="Retry…").click()
    plan = page.locator(".plan")
    expect(plan).to_contain_text("Runs again (2)fetch report")
    expect(plan).to_contain_text("Keeps its output (1)start")
    page.get_by_role("dialog").get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    expect(page.get_by_text("epoch 2")).to_be_visible()
    assert page.evaluate("clicks") == 3


def test_a_failed_run_is_forked_with_a_changed_definition_after_a_preview(
    server: Server, open_page: OpenPage
) -> None:
    run_id, _ = failing(server)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    page.get_by_role("button", name="Fork with a changed definition…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("combobox").first.select_option("text")
    text = dialog.get_by_label("Changed definition")
    expect(text).to_have_value(re.compile("breaks"))
    text.fill("nodes:\n- id: start\n  handler: nothing")
    expect(dialog.get_by_role("alert")).to_be_visible()
    changed = (
        "name: mended\nnodes:\n- {id: start, handler: gives, config: {n: 1}}\n"
        "- {id: fetch, handler: gives, dependencies: [start], config: {price: 4}}\n"
    )
    text.fill(changed)
    expect(dialog.locator(".plan")).to_contain_text("Runs again (1)fetch")
    expect(dialog.locator(".plan")).to_contain_text("Keeps its output (1)start")
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(page.get_by_text("The run completed")).to_be_visible()
    expect(page.get_by_text(f"fork of {run_id[:8]}")).to_be_visible()
    assert run_id not in page.url


def test_the_fork_of_a_run_begins_with_its_definition_registered_or_not(
    server: Server, open_page: OpenPage
) -> None:
    api = server.client()
    nodes = [node("start", "gives", n=2**62 + 1), node("fetch", "fail", "start", message="no")]
    run_id = api.post("/runs", {"definition": {"name": "loose", "nodes": nodes}})["run_id"]
    api.finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    page.get_by_role("button", name="Fork with a changed definition…").click()
    text = page.get_by_label("Changed definition")
    expect(text).to_have_value(re.compile(r"^name: loose\n[\s\S]*handler: fail"))
    text.fill("---\n" + text.input_value().replace("handler: fail", "handler: gives"))
    plan = page.get_by_role("dialog").locator(".plan")
    expect(plan).to_contain_text("Keeps its output (1)start")
    definition = {"name": "loose", "nodes": [nodes[0], {**nodes[1], "handler": "gives"}]}
    text.fill(json.dumps(definition))  # a number that a browser cannot hold
    expect(plan).to_contain_text("Keeps its output (1)start")
    page.get_by_role("dialog").get_by_role("button", name="Fork", exact=True).click()
    expect(page.get_by_text("The run completed")).to_be_visible()


def test_the_critical_path_of_a_run_is_two_clicks_away(server: Server, open_page: OpenPage) -> None:
    nodes = [
        node("quick", "gives", n=1),
        node("slow", "sleep", seconds=0.4),
        node("beside", "gives", "quick", n=2),
        node("end", "gives", "slow", "quick", n=3),
    ]
    api = server.client()
    run_id = api.post("/runs", {"definition": {"name": "chain", "nodes": nodes}})["run_id"]
    api.finished(run_id)
    page = open_page(f"{server.url}/#/runs?q={run_id}")
    page.get_by_role("listitem").get_by_role("link").click()
    page.get_by_role("link", name="Timeline").click()
    rows = page.locator(".row.span")
    expect(rows).to_have_count(4)
    critical = rows.filter(has=page.get_by_title("on the critical path"))
    expect(critical).to_have_count(2)
    assert page.evaluate("clicks") == 2
    page.get_by_label("Only the critical path").check()
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("slow")
    expect(rows.last).to_contain_text("end")


def test_the_log_is_searched_wrapped_and_saved_by_its_address(
    server: Server, open_page: OpenPage
) -> None:
    run_id, _ = failing(server, log="a warning in the log")
    page = open_page(f"{server.url}/#/runs/{run_id}/logs")
    lines = page.locator(".line")
    expect(lines).to_have_count(2)
    page.get_by_label("Level").select_option("WARNING")
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("a warning in the log")
    page.get_by_label("Search the log").fill("nothing like it")
    expect(page.get_by_text("No line matches.")).to_be_visible()
    page.get_by_label("Search the log").fill("IN THE LOG")
    expect(lines).to_have_count(1)
    page.get_by_label("Wrap").check()
    expect(page.locator(".wrapped .line")).to_have_count(1)
    page.get_by_label("Node", exact=True).fill("fetch")
    expect(page).to_have_url(re.compile(r"\?level=WARNING&q=IN\+THE\+LOG&wrap=1&node=fetch$"))
    page.reload()
    expect(page.locator(".wrapped .line")).to_have_count(1)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    text = Path(saved.value.path()).read_text()
    assert "a warning in the log" in text
    assert "red" not in text


def test_a_log_follows_its_end_with_and_without_wrap(server: Server, open_page: OpenPage) -> None:
    nodes = [node("talk", "chats", lines=120, more="word " * 50)]
    api = server.client()
    run_id = api.post("/runs", {"definition": {"name": "talk", "nodes": nodes}})["run_id"]
    api.finished(run_id)
    for wrap in ("", "?wrap=1"):
        page = open_page(f"{server.url}/#/runs/{run_id}/logs{wrap}")
        last = page.locator(".line").filter(has_text="line 119 ")
        expect(last).to_be_in_viewport()
        page.locator(".log .rows").hover()
        page.mouse.wheel(0, -2000)
        expect(page.get_by_label("Follow")).not_to_be_checked()
        expect(last).not_to_be_in_viewport()
        page.get_by_label("Follow").check()
        expect(last).to_be_in_viewport()


def test_what_is_copied_and_saved_is_whole_also_without_a_clipboard(
    server: Server, open_page: OpenPage
) -> None:
    """A large output is a reference in the run. Over HTTP there is no `navigator.clipboard`."""
    api = server.client()
    nodes = [node("big", "chats", lines=0, bytes=70_000), node("small", "gives", n=1)]
    run_id = api.post("/runs", {"definition": {"name": "big", "nodes": nodes}})["run_id"]
    assert "$output" in api.finished(run_id)["result"]["big"]
    page = open_page(f"{server.url}/#/runs/{run_id}/data")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    result = page.locator(".json").filter(has_text="Result")
    with page.expect_download() as saved:
        result.get_by_role("button", name="Download").click()
    whole = {"big": "x" * 70_000, "small": {"n": 1}}
    assert json.loads(Path(saved.value.path()).read_text()) == whole
    page.get_by_role("button", name="Copy", exact=True).first.click()  # the id of the run
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.goto(f"{server.url}/#/runs")
    page.get_by_label("Search runs").focus()
    page.keyboard.press("Control+v")
    expect(page.get_by_label("Search runs")).to_have_value(run_id)


def test_the_panel_has_the_progress_that_was_reported_before_it_was_opened(
    server: Server, open_page: OpenPage
) -> None:
    file = server.folder / uuid4().hex
    definition = {"name": "slow", "nodes": [node("wait", "waits", file=str(file))]}
    api = server.client()
    run_id = api.post("/runs", {"definition": definition})["run_id"]
    reported = lambda: "node.progress" in str(api.get(f"/runs/{run_id}/events"))  # noqa: E731
    wait_for(reported, "it reported")
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=wait")
    expect(page.get_by_role("complementary")).to_contain_text("25 %: looking")
    file.touch()
    expect(page.locator(".title")).to_contain_text("completed")
    expect(page.get_by_role("progressbar")).to_have_count(0)


def test_all_times_are_in_the_zone_of_the_browser(server: Server, open_page: OpenPage) -> None:
    run_id, _ = failing(server)
    api = server.client()
    stored = api.get(f"/runs/{run_id}/logs")["items"][0]["time"]
    at = datetime.fromisoformat(stored).astimezone(ZoneInfo("Asia/Kolkata"))
    page = open_page(f"{server.url}/#/runs/{run_id}/logs", timezone_id="Asia/Kolkata")
    expect(page.locator(".line .at").first).to_have_text(
        f"{at:%H:%M:%S}.{at.microsecond // 1000:03}"
    )
    expect(page.locator(".line .at").first).to_have_attribute("title", stored)
    created = api.get(f"/runs/{run_id}")["created_at"]
    first = datetime.fromisoformat(created).astimezone(ZoneInfo("Asia/Kolkata"))
    page.get_by_role("link", name="Events", exact=True).click()
    expect(page.locator(".row.event time").last).to_contain_text(f"{first:%H:%M:%S}")
    expect(page.locator(".facts time")).to_have_text(f"{first:%H:%M:%S}")


def test_a_running_run_is_cancelled(server: Server, open_page: OpenPage) -> None:
    definition = {"name": "stuck", "nodes": [node("wait", "waits", file="never")]}
    run_id = server.client().post("/runs", {"definition": definition})["run_id"]
    page = open_page(f"{server.url}/#/runs/{run_id}")
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("The run was cancelled")).to_be_visible()


def test_selected_runs_are_retried_together_and_each_outcome_is_shown(
    server: Server, open_page: OpenPage
) -> None:
    run_id, _ = failing(server)
    done = server.client().post(
        "/runs", {"definition": {"name": "done", "nodes": [node("a", "gives", n=1)]}}
    )["run_id"]
    server.client().finished(done)
    page = open_page(server.url)
    for one in (run_id, done):
        page.get_by_label(f"Select run {one}").check()
    page.get_by_role("group", name="Selected runs").get_by_role("button", name="Retry").click()
    # The list then shows just these runs, live, and what became of each.
    expect(page.get_by_role("heading", name="Retried runs")).to_be_visible()
    expect(page.get_by_text("1 of 2 retried")).to_be_visible()
    rows = page.get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text=run_id[:8])).to_contain_text("retried")
    expect(rows.filter(has_text=done[:8])).to_contain_text("name the node to rerun it from")
    page.reload()
    expect(page.get_by_text("1 of 2 retried")).to_be_visible()
    page.get_by_role("link", name="Back to the list").click()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    # Also when the browser has no room to keep it over a reload.
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    page.get_by_label(f"Select run {done}").check()
    page.get_by_role("group", name="Selected runs").get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("0 of 1 cancelled")).to_be_visible()


def test_no_run_stays_selected_when_the_filters_change(server: Server, open_page: OpenPage) -> None:
    run_id, _ = failing(server)
    page = open_page(f"{server.url}/#/runs?q={run_id}")
    page.get_by_label(f"Select run {run_id}").check()
    selected = page.get_by_role("group", name="Selected runs")
    expect(selected).to_be_visible()
    page.get_by_role("button", name="completed").click()
    expect(page.get_by_text("No run matches.")).to_be_visible()
    expect(selected).to_have_count(0)


def test_new_runs_and_counts_come_into_an_open_list_without_a_reload(
    server: Server, open_page: OpenPage
) -> None:
    name = f"fresh-{uuid4().hex[:8]}"
    server.client().register({"name": name, "nodes": [node("a", "gives", n=1)]})
    page = open_page(f"{server.url}/#/runs?workflow={name}")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    page.wait_for_timeout(1000)  # it is read once more when the stream of events has begun
    polls: list[str] = []
    page.on("request", lambda request: polls.append(request.url))
    page.wait_for_timeout(2500)
    assert polls == []
    server.client().post(f"/workflows/{name}/runs", {"params": {}})
    expect(page.get_by_role("listitem")).to_have_count(1)
    expect(page.get_by_role("listitem")).to_contain_text("completed")
    expect(page.get_by_role("button", name="completed")).to_have_text(re.compile(r"completed 1$"))
    expect(page.locator(".sparkline")).to_contain_text("1 run in 24 hours, 0 failed")


def test_runs_are_filtered_by_time_and_the_sparkline_leads_to_an_hour(
    server: Server, open_page: OpenPage
) -> None:
    run_id, _ = failing(server)
    page = open_page(f"{server.url}/#/runs?q={run_id}")
    expect(page.get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Time", exact=True).select_option("15m")
    expect(page).to_have_url(re.compile("time=15m"))
    expect(page.get_by_role("listitem")).to_have_count(1)
    page.goto(f"{server.url}/#/runs?q={run_id}&before=2020-01-01T00:00:00Z")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    page.goto(f"{server.url}/#/runs")
    page.locator(".bars a[tabindex='0']").last.click()
    expect(page).to_have_url(re.compile("after=.*&before="))
    expect(page.get_by_role("listitem").filter(has_text=run_id[:8])).to_have_count(1)


def test_the_panel_of_a_node_has_its_link_and_shows_config_inputs_and_attempts(
    server: Server, open_page: OpenPage
) -> None:
    run_id, _ = failing(server)
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes?node=report")
    panel = page.get_by_role("complementary")
    expect(panel).to_contain_text("A node before it failed. The cause is fetch.")
    panel.get_by_role("link", name="fetch").first.click()
    expect(panel).to_contain_text("there is no price")
    expect(panel).to_contain_text("Config as defined")
    assert page.url.endswith(f"#/runs/{run_id}/nodes?node=fetch")
    panel.get_by_role("link", name="Close the panel").click()
    expect(panel).to_have_count(0)


def test_markup_in_names_params_outputs_errors_and_logs_is_text(
    server: Server, open_page: OpenPage
) -> None:
    file = str(server.folder / uuid4().hex)
    definition = {
        "name": "markup",
        "nodes": [
            node("start", "gives", text=PAYLOAD, **{PAYLOAD: 1}),
            node(
                "fetch", "breaks", "start", file=file, error=f"{PAYLOAD}\x1b[2J\u202e", log=PAYLOAD
            ),
        ],
    }
    api = server.client()
    body = {"definition": definition, "params": {PAYLOAD: PAYLOAD}}
    run_id = api.post("/runs", body)["run_id"]
    api.finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}")
    expect(page.locator(".failure .cause")).to_contain_text(f"{PAYLOAD}\\x1b[2J\\u202e")
    expect(page.locator(".log")).to_contain_text(PAYLOAD)
    for part in ("nodes?node=start", "logs", "events", "data", "graph", "timeline"):
        page.goto(f"{server.url}/#/runs/{run_id}/{part}")
        if part not in ("graph", "timeline"):
            expect(page.locator("main")).to_contain_text("onerror=alert(1)")
    page.goto(f"{server.url}/#/runs?q={PAYLOAD}")
    expect(page.get_by_role("listitem").first).to_contain_text("markup")
    page.goto(f"{server.url}/#/runs/{PAYLOAD}")
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.locator("img, main script").count() == 0


def test_everything_is_reached_by_the_keyboard(server: Server, open_page: OpenPage) -> None:
    run_id, _ = failing(server)
    page = open_page(f"{server.url}/#/runs?q={run_id}")
    expect(page.get_by_role("listitem")).to_have_count(1)

    tab_to(page, "there is no price")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The node fetch failed")).to_be_visible()
    tab_to(page, "Retry…")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.locator(".plan")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_phone_needs_no_sideways_scrolling(server: Server, open_page: OpenPage) -> None:
    run_id, _ = failing(server, error="a" * 300)
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
    page = open_page(server.url, **phone)
    parts = ["", "/nodes", "/nodes?node=fetch", "/graph", "/timeline", "/logs", "/events", "/data"]
    for place in ["runs", "workflows", *(f"runs/{run_id}{part}" for part in parts)]:
        page.goto(f"{server.url}/#/{place}")
        expect(page.locator("main")).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place


def test_a_run_of_2000_nodes_has_a_bounded_document(server: Server, open_page: OpenPage) -> None:
    nodes = [node(f"n{n}", "gives", *([f"n{n - 50}"] if n >= 50 else []), n=n) for n in range(2000)]
    body = {"definition": {"name": "large", "nodes": nodes}}
    run_id = server.client().post("/runs", body)["run_id"]
    server.client().finished(run_id)
    page = open_page(f"{server.url}/#/runs/{run_id}/nodes")
    for part in ("nodes", "graph", "timeline", "events"):
        page.goto(f"{server.url}/#/runs/{run_id}/{part}")
        expect(page.locator(".content")).to_contain_text("2,000 nodes" if part == "graph" else "n")
        assert page.evaluate("document.querySelectorAll('*').length") < 1500, part
    page.goto(f"{server.url}/#/runs/{run_id}/nodes")
    expect(page.get_by_role("link", name="n0 ").first).to_be_visible()
    page.mouse.wheel(0, 10_000_000)
    expect(page.get_by_role("listitem").last).to_contain_text("n1999")


def test_long_names_are_cut_before_their_ends_and_nothing_is_wider_than_a_phone(
    server: Server, open_page: OpenPage
) -> None:
    long = "n" * 190
    nodes = [node(f"{long}_first", "gives", n=1), node(f"{long}_second", "gives", f"{long}_first")]
    definition = {"name": "w" * 128, "description": "d" * 300, "nodes": nodes}
    api = server.client()
    api.register(definition)
    run_id = api.post(f"/workflows/{definition['name']}/runs", {"params": {}})["run_id"]
    api.finished(run_id)
    page = open_page(server.url, viewport={"width": 390, "height": 844})
    for tab in ("", "nodes", "timeline", "graph"):
        page.goto(f"{server.url}/#/runs/{run_id}/{tab}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if tab:
            end = page.locator(".cut > :last-child").filter(has_text="_second")
            expect(end).to_be_visible()
            box = end.bounding_box()
            assert box is not None
            assert 0 < box["x"] < box["x"] + box["width"] <= 390, tab
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    page.goto(f"{server.url}/#/workflows/{definition['name']}")
    expect(page.get_by_text("d" * 300)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
