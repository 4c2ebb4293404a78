"""`/docs`: the OpenAPI document as one page, made here, without a script or a foreign server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { font: 14px ui-monospace, monospace } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem }
table { border-collapse: collapse; table-layout: fixed; width: 100% }
td { border-top: 1px solid #8884; padding: .4rem .6rem .4rem 0; vertical-align: top;
overflow-wrap: anywhere } td:first-child { width: 4.5rem; font-weight: 600 }
pre { font: 13px ui-monospace, monospace; overflow-x: auto; margin: .2rem 0 .6rem }
small, summary { opacity: .75 } :root { color-scheme: light dark }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{_words(document['info']['description'])} "
        '<a href="/openapi.json">openapi.json</a> has every field.</p>'
        f"{''.join(_sections(document))}</body></html>"
    )


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            rows = sections.setdefault(call.get("tags", ["more"])[0], [])
            rows.append(_row(method, path, call, document["components"]["schemas"]))
    for name, rows in sections.items():
        yield f"<h2>{escape(name.capitalize())}</h2><table>{''.join(rows)}</table>"


def _words(text: str) -> str:
    """What is between backticks there, as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _json(value: Any) -> str:
    return escape(json.dumps(value, indent=1))


def _row(method: str, path: str, call: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    lines = [f"<code>{escape(path)}</code><br>{_words(call['summary'])}"]
    for parameter in call.get("parameters", ()):
        if parameter["in"] != "path":
            said = _words(parameter.get("description", ""))
            lines.append(f"<small><code>{escape(parameter['name'])}</code> {said}</small>")
    body = call.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = named.get(body.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
    # The fields of a definition are many, and its page has them.
    fields = () if schema.get("title") == "Dovetail workflow" else schema.get("properties", ())
    lines += [f"<small>body: <code>{escape(name)}</code></small>" for name in fields]
    codes = ", ".join(code for code in call["responses"] if code != "default")
    lines.append(f"<small>{escape(codes)}</small>")
    sent = body.get("example")
    answers = [
        (code, reply["content"]["application/json"]["example"])
        for code, reply in call["responses"].items()
        if "example" in reply.get("content", {}).get("application/json", {})
    ]
    if answers:
        shown = "" if sent is None else f"<pre>{_json(sent)}</pre>"
        shown += "".join(f"<small>{code}</small><pre>{_json(one)}</pre>" for code, one in answers)
        lines.append(f"<details><summary>example</summary>{shown}</details>")
    return f"<tr><td>{escape(method.upper())}</td><td>{'<br>'.join(lines)}</td></tr>"
