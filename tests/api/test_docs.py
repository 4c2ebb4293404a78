"""The page of the API says what a server does, and so does the document it gives out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.api.problems import KIND_OF, STATUS_OF
from dovetail.core.states import NodeStatus, RunStatus

from ..pages import ROOT, typed, write_files
from .conftest import Api, Server, flow

PAGE = ROOT / "docs" / "api.md"
TEXT = PAGE.read_text()


def comparable(text: str) -> str:
    """Without what differs from run to run."""
    ids = r'"((?:run|batch|request)_id|worker|time|\w+_at)":"[^"]*"'
    text = re.sub(ids, r'"\1":"…"', text)
    return re.sub(r'"duration":[\d.e-]+', '"duration":0', text).strip()


def test_every_curl_of_the_page_gets_the_reply_that_it_shows(
    server: Server, tmp_path: Path
) -> None:
    write_files(PAGE, tmp_path)
    place = server.url.removeprefix("http://").replace("127.0.0.1", "localhost")
    reported = typed(PAGE, place, tmp_path)
    assert len(reported) >= 8
    for command, says, printed in reported:
        assert comparable(printed) == comparable(says), command


def test_the_page_lists_exactly_the_existing_endpoints(api: Api) -> None:
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


def test_the_openapi_document_describes_every_reply_and_error(api: Api) -> None:
    document = api.server.document
    assert document["openapi"].startswith("3.1")
    assert "HTTPValidationError" not in document["components"]["schemas"]
    ids = []
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            ids.append(call["operationId"])
            assert call["summary"], (method, path)
            problem = call["responses"]["default"]["content"]["application/problem+json"]
            assert problem["schema"]["$ref"] == "#/components/schemas/ProblemDetails"
            assert {"403", "500"} <= set(call["responses"])
            # What reads a body says which fields it takes, and what is wrong with others.
            writes = method in ("post", "put")
            assert ("requestBody" in call) == writes, (method, path)
            assert ({"408", "413", "415"} <= set(call["responses"])) == writes
            for status, reported in call["responses"].items():
                assert (
                    status == "default"
                    or "$ref" in reported
                    or status[0] in "23"
                    or "content" in reported
                )
    assert len(ids) == len(set(ids))


def test_every_reference_in_the_openapi_document_resolves(api: Api) -> None:
    text = api.http.get("/openapi.json").text
    parts = api.server.document["components"]
    found = set(re.findall(r'"#/components/([^"/]+)/([^"]+)"', text))
    assert len(found) > 40
    for kind, name in found:
        assert name in parts[kind]
    assert "#/$defs" not in text


def test_every_endpoint_has_an_example_and_every_example_is_valid(api: Api) -> None:
    document = api.server.document
    without = []
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            contents = [call.get("requestBody", {}), *call["responses"].values()]
            for content in (c.get("content", {}).get("application/json") for c in contents):
                if content is not None and "example" in content:
                    api.validate(content["schema"], content["example"])
                elif content is not None:
                    without.append(f"{method} {path}")
    assert without == ["get /openapi.json"]
    for reported in document["components"]["responses"].values():
        (content,) = reported["content"].values()
        api.validate(content["schema"], content["example"])


def test_the_examples_of_requests_can_be_sent(api: Api) -> None:
    for method, template, path in (
        ("POST", "/workflows", "/workflows"),
        ("POST", "/workflows/validate", "/workflows/validate"),
        ("PUT", "/workflows/{name}/aliases/{alias}", "/workflows/greet/aliases/stable"),
        ("PUT", "/rate-limits/{tag}", "/rate-limits/search_api"),
        ("POST", "/workflows/{name}/runs", "/workflows/greet/runs"),
        ("POST", "/runs", "/runs"),
        ("POST", "/workflows/{name}/batches", "/workflows/greet/batches"),
        ("POST", "/batches", "/batches"),
    ):
        call = api.server.document["paths"][f"/api/v1{template}"][method.lower()]
        example = call["requestBody"]["content"]["application/json"]["example"]
        answer = api(method, path, json=example)
        assert answer.status_code in (200, 201, 202), answer.text
        reported = call["responses"][str(answer.status_code)]["content"]["application/json"][
            "example"
        ]
        assert set(answer.json()) == set(reported)


@pytest.mark.parametrize("text", ["/api/v1/runs/{run_id}/events", "Idempotency", "dry_run"])
def test_the_page_of_the_server_lists_the_endpoints(api: Api, text: str) -> None:
    answer = api("GET", "//docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert text.lower() in answer.text.lower()


def test_the_page_of_the_server_fits_a_small_screen_and_shows_code_as_code(api: Api) -> None:
    page = api("GET", "//docs").text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "`" not in page
    assert "<code>*</code>: register only a name that is new" in page


def test_the_openapi_document_names_the_schemas_that_generated_clients_need(api: Api) -> None:
    document = api.get("//openapi.json")
    named = document["components"]["schemas"]
    assert named["RunStatus"]["enum"] == list(RunStatus)
    assert named["NodeStatus"]["enum"] == list(NodeStatus)
    assert {"Event", "EventFrame", "TriggerRequest", "RetryRequest", "AliasRequest"} <= set(named)
    assert document["servers"] == [
        {"url": "/", "description": "the server that gives this document"}
    ]
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            for content in call.get("requestBody", {}).get("content", {}).values():
                assert "$ref" in content["schema"], (method, path)
            for answer in call["responses"].values():
                for content in answer.get("content", {}).values():
                    schema = content["schema"]
                    whole = schema.get("items", schema)
                    assert not whole.get("properties"), (method, path)


def test_the_openapi_document_has_the_limits_of_the_server_and_no_nullable_parameter(
    api: Api,
) -> None:
    document = api.get("//openapi.json")
    found: dict[str, Any] = {}
    for path, calls in document["paths"].items():
        for call in calls.values():
            for parameter in call.get("parameters", ()):
                assert "null" not in json.dumps(parameter["schema"]), parameter
                if path.startswith("/api/v1/runs"):
                    found.setdefault(parameter["name"], parameter["schema"])
    key = found["Idempotency-Key"]
    assert (key["minLength"], key["maxLength"]) == (1, 255)
    assert found["Last-Event-ID"]["pattern"] == "^[0-9]{0,15}$"
    assert found["status"]["$ref"] == "#/components/schemas/RunStatus"
    rate = document["components"]["schemas"]["RateLimitRequest"]["properties"]["rate_per_second"]
    for value, status in (
        (rate["minimum"], 200),
        (rate["maximum"], 200),
        (rate["minimum"] / 2, 422),
        (rate["maximum"] * 2, 422),
    ):
        answer = api("PUT", "/rate-limits/bounds", json={"rate_per_second": value})
        assert answer.status_code == status
    for length, status in ((255, 202), (256, 422)):
        headers = {"Idempotency-Key": "k" * length}
        body = {"definition": flow("keyed")}
        assert api("POST", "/runs", json=body, headers=headers).status_code == status
