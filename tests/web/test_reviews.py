"""Reviews of documents on the page: read, corrected and approved from the keyboard."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ..api.conftest import SCRIPT, Server, environment, on
from ..servers.redis_server import RedisServer
from .conftest import OpenPage, serve
from .test_screens import PAYLOAD

NOTE = f"""Hoffmann & daughter, gardening
{PAYLOAD}
3 April 2026
we mowed the lawn and cut the hedge, please pay when you can
"""


def process(folder: Path, **env: str) -> None:
    command = [SCRIPT, "documents", "process", "inbox"]
    done = subprocess.run(command, cwd=folder, env=environment(**env), capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def write_inbox(folder: Path) -> None:
    inbox = folder / "inbox"
    inbox.mkdir()
    (inbox / "scribbled.txt").write_text(NOTE)
    (inbox / "bill.txt").write_text(
        "Northwind Paper Ltd\nInvoice 17\nInvoice date: 2026-03-16\n"
        "Paper 2 x 10.00 20.00\nTotal: 20.00 GBP\n"
    )


@pytest.fixture(scope="module", params=["embedded", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documents")
    write_inbox(folder)
    documents = ("--handlers", "dovetail.documents")
    if request.param == "embedded":
        running = serve(folder, *documents)
        process(folder)
        yield running
        assert running.stop() == 0
        return
    with RedisServer() as store:
        env = on(store.url)
        running = serve(folder, "--with", "orchestrator,worker", *documents, **env)
        process(folder, **env)
        yield running
        assert running.stop() == 0


def test_documents_are_reviewed_from_the_keyboard_one_after_the_other(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server.url)
    page.get_by_role("link", name="Documents").click()
    expect(page.get_by_role("table")).to_contain_text("scribbled")
    expect(page.get_by_label("Speed")).to_contain_text("2 documents")
    page.get_by_role("link", name=re.compile("^scribbled")).click()
    expect(page.get_by_label("Text of the document")).to_contain_text(PAYLOAD)
    form = page.get_by_role("form", name="Fields")
    # The cursor waits in the field that the extraction is least sure of.
    focused = "document.activeElement.closest('[data-field]').dataset.field"
    assert page.evaluate(focused) in ("currency", "total", "date", "vendor", "type")
    form.get_by_label("Total").fill("120,50")
    form.get_by_label("Currency").fill("euro")
    form.get_by_label("Your name").fill("Ada")
    page.keyboard.press("Enter")
    expect(form.get_by_role("alert")).to_contain_text("currency")
    form.get_by_label("Currency").fill("EUR")
    form.get_by_label("Vendor").fill(PAYLOAD)
    page.keyboard.press("Control+Enter")
    # The next one is loaded.
    expect(page.get_by_role("heading", level=1)).to_contain_text("bill")
    expect(form.get_by_label("Vendor")).to_have_value("Northwind Paper Ltd")
    expect(form.get_by_label("Your name")).to_have_value("Ada")
    form.get_by_role("button", name="Approve, next").click()
    expect(page.get_by_text("All documents are approved.")).to_be_visible()
    page.get_by_role("link", name=re.compile("^approved")).click()
    expect(page.get_by_role("table")).to_contain_text(PAYLOAD)
    api = server.client()
    (review,) = [
        one for one in api.get("/documents/reviews")["items"] if "scribbled" in one["document_id"]
    ]
    assert review["fields"]["total"] == 120.5
    assert review["locked"] == ["vendor", "currency", "total"]
    assert (review["approved_by"], review["corrected_by"]) == ("Ada", "Ada")
    assert api.get("/documents")["counts"] == {"pending": 0, "approved": 2}


def test_a_review_that_was_changed_meanwhile_is_not_approved_unseen(server: Server) -> None:
    api = server.client()
    one = api.get("/documents/reviews?limit=1")["items"][0]
    where = f"/documents/reviews/{one['document_id']}"
    body = {"fields": {"date": "2026-01-02"}, "seen": one["updated_at"], "by": "grace"}
    assert api("POST", f"{where}/correct", json=body).status_code == 200
    late = api("POST", f"{where}/approve", json={"seen": one["updated_at"]})
    assert late.status_code == 409
    assert "changed since" in late.json()["detail"]
    for wrong in ({"fields": {"nothing": 1}}, {"fields": {"date": "soon"}}, {"fields": {}}):
        assert api("POST", f"{where}/correct", json=wrong).status_code == 422
    for unknown in ("nobody", ".hidden", "%2e%2e%2fsecret"):
        assert api("GET", f"/documents/reviews/{unknown}").status_code == 404


def test_a_file_is_given_out_only_as_it_was_reviewed_and_where_documents_may_be(
    server: Server,
) -> None:
    api = server.client()
    bill = next(
        one
        for one in api.get("/documents/reviews")["items"]
        if one["document_id"].startswith("bill")
    )
    where = f"/documents/reviews/{bill['document_id']}"
    path = Path(bill["file_path"])
    content = path.read_bytes()
    got = api("GET", f"{where}/file")
    assert (got.content, got.headers["content-type"]) == (content, "application/octet-stream")
    assert got.headers["content-disposition"] == "attachment"
    try:
        path.write_bytes(content + b"more")
        assert api("GET", f"{where}/file").status_code == 409
        assert "changed" in api.get(f"{where}/text")["problem"]
        # A link out of the roots, with the very same content.
        outside = server.folder.parent / "outside.txt"
        outside.write_bytes(content)
        path.unlink()
        path.symlink_to(outside)
        refused = api("GET", f"{where}/file")
        assert refused.status_code == 403
        assert api.get(f"{where}/text")["text"] is None
    finally:
        path.unlink()
        path.write_bytes(content)


def test_files_that_are_no_documents_are_not_given_out_though_a_run_names_them(
    server: Server,
) -> None:
    """A caller who may trigger runs must not read the settings of the server through a review."""
    api = server.client()
    (server.folder / "dovetail.toml").write_text('[rate_limits]\n# a secret: "x"\n')
    (server.folder / ".env.txt").write_text("SECRET=1\nInvoice total: 3 EUR\n")
    for name in ("dovetail.toml", ".env.txt"):
        params = {
            "document_id": f"stolen-{name.strip('.')}",
            "file_path": str(server.folder / name),
            "out": str(server.folder / "documents"),
        }
        definition = (Path(__file__).resolve().parents[2] / PIPELINE).read_text()
        api("POST", "/workflows", content=definition, headers=YAML)
        run = api.post("/workflows/document_processing/runs", {"params": params})
        api.finished(run["run_id"])
        where = f"/documents/reviews/stolen-{name.strip('.')}"
        if api("GET", where).status_code == 404:
            continue
        assert api("GET", f"{where}/file").status_code == 403
        text = api.get(f"{where}/text")
        assert text["text"] is None
        assert "not given out" in text["problem"]
    (server.folder / "dovetail.toml").unlink()


PIPELINE = "src/dovetail/documents/pipeline.yaml"
YAML = {"content-type": "application/yaml"}


def test_the_screen_is_shown_only_where_documents_are_in_use(
    tmp_path: Path, open_page: OpenPage
) -> None:
    server = serve(tmp_path)
    try:
        found = server.client().get("/documents")
        assert (found["in_use"], found["counts"]) == (False, {"pending": 0, "approved": 0})
        page = open_page(server.url)
        expect(page.get_by_role("link", name="Batches")).to_be_visible()
        expect(page.get_by_role("link", name="Documents")).to_have_count(0)
        assert not (tmp_path / "documents").exists()
    finally:
        server.close()
