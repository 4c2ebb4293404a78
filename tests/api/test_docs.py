"""The page of the API says what a server does, and so does the document it gives out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dovetail.api.problems import KIND_OF, STATUS_OF

from ..pages import ROOT, commands, write_files
from .conftest import Api, Server

PAGE = ROOT / "docs" / "api.md"
TEXT = PAGE.read_text()


def curl(server: Server, folder: Path, command: str) -> httpx2.Response:
    """Does what this curl would: a machine without it shall test the page, too."""
    program, *words = shlex.split(command)
    assert program == "curl"
    options: dict[str, Any] = {"headers": {}}
    method, url = "GET", ""
    while words:
        word = words.pop(0)
        if word in ("-s", "-sN"):
            continue
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            options["headers"][name] = value
        elif word in ("-d", "--data-binary"):
            given = words.pop(0)
            content = (folder / given[1:]).read_bytes() if given[0] == "@" else given.encode()
            method, options["content"] = "POST", content
        else:
            assert not word.startswith("-"), f"{word}: teach it to the test"
            url = word
    path = url.removeprefix("localhost:8700")
    assert path != url
    return server.client().http.request(method, path, **options)


def comparable(text: str) -> str:
    """Without what differs from run to run."""
    ids = r'"((?:run|batch|request)_id|worker|time|\w+_at)":"[^"]*"'
    text = re.sub(ids, r'"\1":"…"', text)
    return re.sub(r'"duration":[\d.e-]+', '"duration":0', text).strip()


def test_every_curl_of_the_page_gets_the_answer_it_shows(server: Server, tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    assert len(commands(PAGE)) >= 8
    run_id = ""
    for command, printed in commands(PAGE):
        answer = curl(server, tmp_path, command.replace("$RUN", run_id))
        assert comparable(answer.text) == comparable(printed), command
        if "runs -H" in command and answer.status_code == 202:
            run_id = answer.json()["run_id"]


def test_the_page_has_every_call_and_no_other(api: Api) -> None:
    listed = set(re.findall(r"`(GET|POST|PUT|DELETE) (/[\w/{}.-]*)`", TEXT))
    known = {
        (method.upper(), path.removeprefix("/api/v1"))
        for path, calls in api.server.document["paths"].items()
        for method in calls
    }
    assert listed == known


def test_the_page_has_every_kind_of_problem() -> None:
    for kind in {*KIND_OF.values(), *STATUS_OF} - {"bad_request"}:
        assert f"`{kind}`" in TEXT, kind


def test_the_document_describes_every_answer_and_error(api: Api) -> None:
    document = api.server.document
    assert document["openapi"].startswith("3.1")
    assert "HTTPValidationError" not in document["components"]["schemas"]
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            assert call["summary"], (method, path)
            problem = call["responses"]["default"]["content"]["application/problem+json"]
            assert problem["schema"]["$ref"] == "#/components/schemas/ProblemDetails"
            # What reads a body says which fields it takes.
            writes = method in ("post", "put")
            assert ("requestBody" in call) == writes, (method, path)


def test_no_reference_of_the_document_leads_nowhere(api: Api) -> None:
    text = api.http.get("/openapi.json").text
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in api.server.document["components"]["schemas"]
    assert "#/$defs" not in text


@pytest.mark.parametrize("text", ["/api/v1/runs/{run_id}/events", "Idempotency", "dry_run"])
def test_the_page_of_the_server_lists_the_calls(api: Api, text: str) -> None:
    answer = api("GET", "//docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert text.lower() in answer.text.lower()
