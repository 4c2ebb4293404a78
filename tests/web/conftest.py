"""A real browser before a real server. Every page counts dialogs, errors and violations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ..api.conftest import Server, on
from ..servers.binaries import find_browser
from ..servers.redis_server import RedisServer

HANDLERS = """
import asyncio
from pathlib import Path
from dovetail import PermanentError, handler

@handler
async def waits(config, ctx):
    ctx.progress(0.25, "looking")
    while not Path(config["file"]).exists():
        await asyncio.sleep(0.02)
    ctx.log.info("the file is there")
    return {"seen": config["file"]}

@handler
async def breaks(config, ctx):
    print("\\x1b[31mred\\x1b[0m and \\x07")
    ctx.log.warning(config.get("log", "about to break"))
    if not Path(config["file"]).exists():
        raise PermanentError(config.get("error", "there is no price"))
    return {"price": 3}

@handler
def gives(config, ctx):
    return config

@handler
def chats(config, ctx):
    for n in range(config["lines"]):
        print("line", n, config.get("more", ""))
    return "x" * config.get("bytes", 0)

@handler
def picky(config, ctx):
    if isinstance(config["item"], str):
        ctx.log.warning("here is %s", config["item"])
        raise PermanentError(f"picky about {config['item']}")
    return config["item"]

@handler
async def lingers(config, ctx):
    await asyncio.sleep(0.02)
    return picky(config, ctx)

@handler
def shaky(config, ctx):
    if not Path(config["file"]).exists():
        raise RuntimeError(f"attempt {ctx.attempt} breaks")
    return "steady"
"""


expect.set_options(timeout=15_000)  # the machine may be busy
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: while it is open, its event loop is in the way of asynchronous tests."""
    program = find_browser()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=str(program.path),
            env={**os.environ, **program.environment},
            args=FLAGS,
        )
        yield opened
        opened.close()


def serve(folder: Path, *args: str, **env: str) -> Server:
    (folder / "paged.py").write_text(HANDLERS)
    return Server(folder, "--handlers", "paged.py", *args, **env)


@pytest.fixture(scope="module", params=["embedded", "redis"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    if request.param == "embedded":
        running = serve(folder)
        yield running
        assert running.stop() == 0
        return
    with RedisServer() as store:
        running = serve(folder, "--with", "orchestrator,worker", **on(store.url))
        running.redis_url = store.url
        yield running
        assert running.stop() == 0


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address in a browser of its own, and finds what went wrong there."""
    wrong: list[str] = []
    contexts = []

    def begin(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.add_init_script(
            "window.violations = []; addEventListener('securitypolicyviolation',"
            " (e) => violations.push(e.violatedDirective + ' ' + e.blockedURI));"
            " window.clicks = 0; addEventListener('click', () => clicks++, true)"
        )
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        page.on("pageerror", lambda error: wrong.append(f"an error: {error}"))
        page.goto(url)
        return page

    yield begin
    for context in contexts:
        for page in context.pages:
            wrong += page.evaluate("window.violations")
        context.close()
    assert wrong == []


def tab_to(page: Page, words: str) -> None:
    """Press Tab until the focus, which must be visible, is on a text with this pattern."""
    for _ in range(60):
        page.keyboard.press("Tab")
        text, outline = page.evaluate(
            "(() => { const at = document.activeElement; return [(at.innerText || at.ariaLabel ||"
            " at.labels?.[0]?.innerText || '').trim(), getComputedStyle(at).outlineStyle]; })()"
        )
        if re.search(words, text):
            assert outline != "none", "the focus is visible"
            return
    raise AssertionError(f"no tab leads to {words}")
