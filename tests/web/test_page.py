"""What the server gives out as the page: files, headers, tokens, and a restart under it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder
from playwright.sync_api import expect

from ..api.conftest import Server, on
from ..servers.redis_server import RedisServer
from .conftest import OpenPage, serve

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "src" / "dovetail" / "web"


def assets(server: Server) -> list[str]:
    page = httpx2.get(server.url, trust_env=False).text
    base = re.search(r"/assets/[0-9a-f]{16}/", page)
    assert base is not None
    files = [p for p in WEB.rglob("*") if p.suffix in (".js", ".mjs", ".css")]
    return [base[0] + path.relative_to(WEB).as_posix() for path in files]


def test_the_static_files_need_no_token_and_are_cached_for_good(tmp_path: Path) -> None:
    server = serve(tmp_path, DOVETAIL_TOKENS="secret")
    try:
        with httpx2.Client(base_url=server.url, trust_env=False) as http:
            page = http.get("/")
            assert page.status_code == 200
            assert page.headers["cache-control"] == "no-cache"
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert http.get("/", headers={"if-none-match": page.headers["etag"]}).status_code == 304
            for path in assets(server):
                reply = http.get(path, headers={"accept-encoding": "gzip"})
                assert reply.status_code == 200, path
                assert "immutable" in reply.headers["cache-control"]
                assert reply.headers["content-encoding"] == "gzip"
                plain = http.get(path, headers={"accept-encoding": "identity"})
                assert plain.content == reply.content
            # Beside the static files everything needs a token.
            for closed in ("/api/v1/runs", "/assets/", "/assets/0/app.js", "/docs", "/index.html"):
                assert http.get(closed).status_code == 401, closed
    finally:
        server.close()


def test_the_vendored_files_are_as_they_were_published() -> None:
    vendor = WEB / "vendor"
    packages = json.loads((vendor / "manifest.json").read_text())["packages"]
    listed = {"manifest.json"}
    for package in packages:
        assert package["license_file"] in package["files"]
        for name, file in package["files"].items():
            assert sha256((vendor / name).read_bytes()).hexdigest() == file["sha256"], name
            listed.add(name)
    assert {path.name for path in vendor.iterdir()} == listed


def test_the_inputs_of_the_editor_bundle_are_those_it_was_made_of() -> None:
    packages = json.loads((WEB / "vendor" / "manifest.json").read_text())["packages"]
    (bundle,) = (package for package in packages if "made_by" in package)
    for name, digest in bundle["made_by"].items():
        assert sha256((ROOT / name).read_bytes()).hexdigest() == digest, name
    lock = (ROOT / "tools" / "codemirror" / "package-lock.json").read_text()
    assert "://" not in lock, "it names no registry, so yours is used"
    locked = json.loads(lock)["packages"]
    assert all("integrity" in one for path, one in locked.items() if path)
    for name, version in bundle["made_of"].items():
        assert locked[f"node_modules/{name}"]["version"] == version


def test_the_editor_bundle_is_what_its_inputs_make_where_npm_is_there() -> None:
    """Without npm only the digests above are compared: bringing Node would cost every run of the
    tests more than it finds, as the inputs rarely change. docs/page.md says so."""
    if shutil.which("npm") is None:
        return
    script = ROOT / "tools" / "codemirror" / "build.py"
    command = [sys.executable, script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_every_file_of_the_page(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(wheel) as packed:
        names = set(packed.namelist())
    kept = {path.relative_to(WEB.parent) for path in WEB.rglob("*") if path.is_file()}
    assert {f"dovetail/{path.as_posix()}" for path in kept} <= names
    assert "dovetail/web/vendor/preact.LICENSE" in names


def test_the_page_never_makes_markup_of_data_and_asks_no_other_server() -> None:
    for path in [*WEB.glob("*.js"), *WEB.glob("*.html"), *WEB.glob("*.css")]:
        text = path.read_text()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in text, (path.name, forbidden)
        addresses = set(re.findall(r"https?://[^\s'\"`]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


def test_a_token_is_asked_for_once(tmp_path: Path, open_page: OpenPage) -> None:
    server = serve(tmp_path, DOVETAIL_TOKENS="right")
    try:
        page = open_page(server.url)
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_text("The server does not know this token.")).to_be_visible()
        page.get_by_label("Token").fill("ключ")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not know this token.")).to_be_visible()
        page.get_by_label("Token").fill("right")
        page.keyboard.press("Enter")
        expect(page.get_by_text("There are no runs yet.")).to_be_visible()
        page.reload()
        expect(page.get_by_text("There are no runs yet.")).to_be_visible()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    finally:
        server.close()


@pytest.fixture(params=["embedded", "redis"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server, again and again, on the same store."""
    if request.param == "embedded":
        yield lambda *args: serve(tmp_path, *args)
        return
    with RedisServer() as store:
        settings = {**on(store.url), "DOVETAIL_LEASE_SECONDS": "1"}
        yield lambda *args: serve(tmp_path, "--with", "orchestrator,worker", *args, **settings)


def test_an_open_page_survives_the_death_of_its_server(
    start: Callable[..., Server], tmp_path: Path, open_page: OpenPage
) -> None:
    file = tmp_path / "go"
    server = start()
    port = server.url.rpartition(":")[2]
    definition = {
        "name": "long",
        "nodes": [{"id": "wait", "handler": "waits", "config": {"file": str(file)}}],
    }
    try:
        run_id = server.client().post("/runs", {"definition": definition})["run_id"]
        page = open_page(f"{server.url}/#/runs/{run_id}")
        expect(page.get_by_text("What it waits for")).to_be_visible()
        server.stop(signal.SIGKILL)
        expect(page.get_by_text("The server does not answer.").first).to_be_visible()
        expect(page.get_by_role("heading", name="long")).to_be_visible()
        asked: list[str | None] = []
        page.on(
            "request",
            lambda one: (
                one.url.endswith(f"/runs/{run_id}/events")
                and asked.append(one.headers.get("last-event-id"))
            ),
        )
        server = start("--port", port)
        expect(page.get_by_text("The server does not answer.")).to_have_count(0)
        file.touch()
        expect(page.get_by_text("The run completed")).to_be_visible()
        assert asked
        assert all(int(after or 0) > 0 for after in asked)
        # It continued after the last event that it had: each is there once.
        page.get_by_role("link", name="Events", exact=True).click()
        expect(page.locator(".row.event").first).to_contain_text("run.completed")
        numbers = page.locator(".row .c-seq").all_inner_texts()
        assert numbers == [str(n) for n in range(len(numbers), 0, -1)]
    finally:
        server.close()


def test_an_open_list_goes_on_after_a_restart_of_its_server(
    start: Callable[..., Server], open_page: OpenPage
) -> None:
    server = start()
    port = server.url.rpartition(":")[2]
    definition = {"name": "after", "nodes": [{"id": "a", "handler": "gives", "config": {}}]}
    try:
        page = open_page(server.url)
        expect(page.get_by_text("There are no runs yet.")).to_be_visible()
        server.stop(signal.SIGKILL)
        expect(page.get_by_text("The server does not answer.").first).to_be_visible()
        server = start("--port", port)
        expect(page.get_by_text("The server does not answer.")).to_have_count(0)
        server.client().post("/runs", {"definition": definition})
        expect(page.get_by_role("listitem")).to_contain_text("completed")
    finally:
        server.close()
