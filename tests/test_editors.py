"""VS Code's own language server for YAML reads the schema: it completes, explains and checks.

It is asked over LSP, as an editor asks it, about a file that `dovetail new` wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .pages import call

HOME = Path(os.environ.get("TEST_YAML_SERVER", ""))
SECONDS = 60


class LanguageServer:
    """The server, and one file that is open in it."""

    def __init__(self, folder: Path) -> None:
        found = HOME / "node-path"
        assert found.is_file(), "./dev test brings the language server, and says where it is"
        node = found.read_text().strip()
        program = HOME / "node_modules" / "yaml-language-server" / "bin" / "yaml-language-server"
        self._process = subprocess.Popen(
            [node, str(program), "--stdio"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._folder = folder
        self._number = 0
        self.problems: dict[str, list[dict[str, Any]]] = {}
        root = folder.as_uri()
        self.ask("initialize", processId=None, rootUri=root, capabilities={}, workspaceFolders=None)
        self._tell("initialized")
        # What VS Code's extension sends: without it nothing is checked or completed.
        wanted = dict.fromkeys(("validate", "hover", "completion"), True)
        settings = {"yaml": {**wanted, "schemaStore": {"enable": False}}}
        self._tell("workspace/didChangeConfiguration", settings=settings)

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        size = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size = int(value)
        assert size, "the server has ended"
        message: dict[str, Any] = json.loads(self._process.stdout.read(size))
        if message.get("method") == "textDocument/publishDiagnostics":
            self.problems[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif "method" in message and "id" in message:  # such as workspace/configuration
            wanted = message.get("params", {}).get("items", [])
            self._send({"id": message["id"], "result": [None] * len(wanted) or None})
        return message

    def _tell(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == self._number and "method" not in message:
                assert "error" not in message, message
                return message["result"]

    def open(self, name: str, text: str) -> str:
        uri = (self._folder / name).as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self._tell("textDocument/didOpen", textDocument=document)
        return uri

    def checked(self, name: str, text: str) -> list[dict[str, Any]]:
        """What it finds wrong with this text."""
        uri = self.open(name, text)
        while uri not in self.problems:
            self._receive()
        return self.problems[uri]

    def completed(self, name: str, text: str) -> dict[str, dict[str, Any]]:
        """What it offers where the text has a `|`."""
        uri, place = self._at(name, text)
        found = self.ask("textDocument/completion", textDocument={"uri": uri}, position=place)
        return {item["label"]: item for item in found["items"]}

    def hovered(self, name: str, text: str) -> str:
        uri, place = self._at(name, text)
        found = self.ask("textDocument/hover", textDocument={"uri": uri}, position=place)
        return str(found["contents"]["value"]) if found else ""

    def _at(self, name: str, text: str) -> tuple[str, dict[str, int]]:
        before, _, after = text.partition("|")
        lines = before.split("\n")
        place = {"line": len(lines) - 1, "character": len(lines[-1])}
        return self.open(name, before + after), place

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editor")
    (folder / "mine.py").write_text(
        "from typing import Literal\n"
        "from pydantic import BaseModel, Field\n"
        "from dovetail import handler\n"
        "class Paint(BaseModel):\n"
        "    colour: Literal['red', 'blue'] = Field(description='which one')\n"
        "@handler('paint')\n"
        "def paint(config: Paint, ctx):\n"
        '    """Paints the town."""\n'
    )
    assert call("dovetail new starter", folder).returncode == 0
    schema = call("dovetail schema --handlers mine.py", folder).stdout
    (folder / "dovetail.schema.json").write_text(schema)
    return folder


@pytest.fixture(scope="module")
def editor(folder: Path) -> Iterator[LanguageServer]:
    server = LanguageServer(folder)
    yield server
    server.close()


HEAD = "# yaml-language-server: $schema=./dovetail.schema.json\nname: x\n"
CALL = f"{HEAD}nodes:\n  - id: a\n    handler: call_external_service\n    config:\n"


def test_a_new_file_has_no_problem(editor: LanguageServer, folder: Path) -> None:
    text = (folder / "starter.dovetail.yaml").read_text()
    assert editor.checked("starter.dovetail.yaml", text) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{HEAD}nodez: []\n", "nodez"),
        (f"{HEAD}on_failure: never\nnodes: []\n", "fail_fast"),
        (f"{CALL}      url: x\n      methd: GET\n", "methd"),
        (f"{CALL}      method: GET\n", "url"),
        (f"{HEAD}nodes:\n  - id: a\n    handler: paint\n    config: {{colour: green}}\n", "red"),
    ],
)
def test_a_mistake_is_marked(editor: LanguageServer, text: str, word: str) -> None:
    name = f"wrong{abs(hash(text))}.dovetail.yaml"
    found = editor.checked(name, text)
    assert any(word in problem["message"] for problem in found), found


def test_fields_handlers_enums_and_configs_are_completed(editor: LanguageServer) -> None:
    offered = editor.completed("a.dovetail.yaml", f"{HEAD}|\n")
    assert {"on_failure", "params", "defaults", "nodes", "max_concurrency"} <= offered.keys()
    assert "name" not in offered
    fields = editor.completed("b.dovetail.yaml", f"{HEAD}nodes:\n  - id: a\n    |\n")
    assert {"handler", "dependencies", "condition", "retry", "cache"} <= fields.keys()
    handlers = editor.completed("c.dovetail.yaml", f"{HEAD}nodes:\n  - id: a\n    handler: |\n")
    assert {"call_external_service", "llm_service", "sleep", "paint"} <= handlers.keys()
    policies = editor.completed("d.dovetail.yaml", f"{HEAD}on_failure: |\n")
    assert {"fail_fast", "continue"} <= policies.keys()
    config = editor.completed("e.dovetail.yaml", f"{CALL}      |\n")
    assert {"url", "method", "headers", "json", "timeout_seconds"} <= config.keys()
    methods = editor.completed("f.dovetail.yaml", f"{CALL}      method: |\n")
    assert {"GET", "POST"} <= methods.keys()
    mine = f"{HEAD}nodes:\n  - id: a\n    handler: paint\n    config:\n      colour: |\n"
    assert {"red", "blue"} <= editor.completed("g.dovetail.yaml", mine).keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}on_|failure: continue\nnodes: []\n", "stop the run when a node fails"),
        (f"{HEAD}nodes:\n  - id: a\n    hand|ler: sleep\n", "Waits for some seconds"),
        (f"{CALL}      u|rl: x\n", "mock:// for an offline echo"),
        (
            f"{HEAD}nodes:\n  - id: a\n    handler: paint\n    config:\n      col|our: red\n",
            "which one",
        ),
    ],
)
def test_a_field_is_explained(editor: LanguageServer, text: str, words: str) -> None:
    assert words in editor.hovered(f"hover{abs(hash(text))}.dovetail.yaml", text)
