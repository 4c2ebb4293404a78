"""Keeps the house as drawn: imports go one way, the core stays pure, files stay readable.

It reads source text, so that an import inside a function counts as much as one on top.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "dovetail"
FILES = sorted(SOURCE.rglob("*.py"))

# Each part of the package and what it may import beside itself. A new part is a new row.
INSIDE = {"core", "engine", "config", "handlers"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "redis_client": {"core"},
    "config": {"core", "redis_client"},
    "engine": {"core"},
    "handlers": {"core", "engine", "config"},
    "postgres_url": {"core"},
    "stores": {"core", "engine", "config", "redis_client", "postgres_url"},
    "transports": {"core", "engine", "config", "redis_client"},
    "sinks": {"core", "engine", "redis_client"},
    # Only wiring names concrete stores, transports and sinks.
    "wiring": {*INSIDE, "redis_client", "stores", "transports", "sinks"},
    # The client only for the class of events that both give out.
    "executor": {*INSIDE, "wiring", "client"},
    "client": {*INSIDE, "redis_client", "wiring"},
    "celery": {*INSIDE, "redis_client", "wiring", "executor"},
    # The API speaks to the engine's commands. The process that serves it hands them over.
    "api": {"core", "engine", "config"},
    # Listens to the engine; only the edge knows it.
    "telemetry": {"core", "engine", "config"},
    # An application: the public face, the settings and the tasks of Celery are all it may know.
    "documents": {"dovetail", "config", "celery", "postgres_url"},
    # Its calls over HTTP, which the command line hands to the API.
    "documents.api": {"core", "api", "documents"},
    # Its commands, which the command line loads by name.
    "documents.commands": {*INSIDE, "cli", "documents", "telemetry", "wiring", "dovetail"},
    # Tools for agents, over the engine's commands; another edge of it.
    "mcp": {"core", "engine"},
    # Tests of workflows: the engine in memory, and the answers of the client.
    "testing": {*INSIDE, "wiring", "client"},
    "pytest_plugin": {"testing"},
    "cli": {
        *INSIDE,
        "mcp",
        "testing",
        "documents",
        "documents.api",
        "telemetry",
        "wiring",
        "executor",
        "client",
        "api",
        "dovetail",
    },
    # Counts what the library runs, for a program that asks for it.
    "dag_metrics": {"core", "executor"},
    "__main__": {"cli"},
    # The public face hands out names of every part; no part may import it but the edge.
    "dovetail": {*INSIDE, "wiring", "executor", "client", "dag_metrics"},
}

# What decides without acting: no clock, chance, file, network, thread, event loop among them.
# fmt: off
PURE = {
    "__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "contextlib",
    "copy", "dataclasses", "decimal", "difflib", "enum", "functools", "gc", "graphlib", "hashlib",
    "heapq", "hmac", "itertools", "json", "keyword", "math", "operator", "re", "string", "sys",
    "textwrap", "types", "typing", "unicodedata", "urllib.parse", "zlib", "jinja2", "jsonschema_rs",
    "markupsafe", "orjson", "pydantic", "pydantic_core", "yaml",
}
# fmt: on
PURE_SYS = {"intern", "maxsize"}  # of sys, which also has the terminal and the arguments
IMPURE_CALLS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}

# The engine speaks through ports; a vendor's library belongs to a store, a transport or a handler.
ENGINE_LIBRARIES = {"orjson", "pydantic"}

# What takes long to import, or serves only some commands.
# fmt: off
HEAVY = {
    "asyncpg", "celery", "docx", "fastapi", "httpx2", "jinja2", "jsonschema_rs", "lxml", "mcp",
    "mcp_types", "openai", "opentelemetry", "prometheus_client", "pyarrow", "pydantic",
    "pydantic_settings", "pypdfium2", "rich", "sqlalchemy", "starlette", "structlog", "uvicorn",
    "yaml",
}
# fmt: on


def part_of(module: str) -> str:
    """`dovetail.core.dag` is of the part `core`; `dovetail` itself is of the part `dovetail`."""
    names = module.split(".")
    if names[1:3] in (["documents", "commands"], ["documents", "api"]):
        return ".".join(names[1:3])
    return names[1] if len(names) > 1 else names[0]


def module_name(path: Path) -> str:
    names = ["dovetail", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


PARTS = {part_of(module_name(path)) for path in FILES}


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Every import in the file, wherever it stands, as line and full module name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base]).strip(".")
            if base == "dovetail":  # `from dovetail import core` is an import of the part
                for alias in node.names:
                    yield node.lineno, f"dovetail.{alias.name}" if alias.name in PARTS else base
            else:
                yield node.lineno, base


def within(name: str, allowed: set[str]) -> bool:
    return any(name == known or name.startswith(known + ".") for known in allowed)


def wrong_imports(text: str, module: str) -> list[str]:
    """Each import that goes against the drawing, as a line to act on."""
    part = part_of(module)
    found = []
    for line, name in imports(ast.parse(text), module):
        target = part_of(name) if within(name, {"dovetail"}) else None
        if target is not None:
            if target != part and target not in MAY_IMPORT[part]:
                allowed = ", ".join(sorted(MAY_IMPORT[part])) or "nothing else of dovetail"
                found.append(f"{module}:{line}: {part} may not import {name}; it may: {allowed}")
        elif part == "core" and not within(name, PURE):
            found.append(f"{module}:{line}: core is pure and may not import {name}; see PURE")
        elif (
            part == "engine"
            and name.split(".")[0] not in sys.stdlib_module_names
            and not within(name, ENGINE_LIBRARIES)
        ):
            found.append(f"{module}:{line}: engine may not import {name}: put it behind a port")
    return found


def calls(path: Path, names: set[str]) -> list[str]:
    tree = ast.parse(path.read_text())
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


# --- what is imported --------------------------------------------------------------------------


def test_every_part_of_the_package_has_a_row_in_the_table() -> None:
    assert set(MAY_IMPORT) >= PARTS, "a new part: say in MAY_IMPORT what it may import"


def test_the_table_has_no_cycle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError, with the circle


def test_imports_follow_the_table_and_the_core_is_pure() -> None:
    wrong = [w for path in FILES for w in wrong_imports(path.read_text(), module_name(path))]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("dovetail.core.step", "from dovetail.engine.ports import Store"),
        ("dovetail.core.step", "def step():\n    import time"),
        ("dovetail.core.step", "from random import random"),
        ("dovetail.core.step", "import urllib.request"),
        ("dovetail.core.step", "if TYPE_CHECKING:\n    from ..engine import ports"),
        ("dovetail.core.step", "from dovetail import handlers"),
        ("dovetail.core.step", "from dovetail import handler"),
        ("dovetail.engine.worker", "from dovetail.stores.memory import MemoryStore"),
        ("dovetail.engine.worker", "async def work():\n    import redis"),
        ("dovetail.stores.memory", "import dovetail.transports.local"),
        ("dovetail.executor", "from dovetail.stores.memory import MemoryStore"),
        ("dovetail.wiring.embedded", "from dovetail.cli import main"),
        ("dovetail.documents.handlers", "from dovetail.core.errors import PermanentError"),
    ],
)
def test_an_import_against_the_direction_is_noticed(module: str, text: str) -> None:
    assert wrong_imports(text, module)


def test_an_import_along_the_direction_passes() -> None:
    text = "import re\nfrom dovetail.core.dag import Graph\nfrom . import ports\nimport asyncio"
    assert not wrong_imports(text, "dovetail.engine.worker")


def test_the_core_neither_awaits_nor_opens_files_nor_prints() -> None:
    found = []
    for path in sorted((SOURCE / "core").rglob("*.py")):
        found += calls(path, IMPURE_CALLS)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: async")
                case ast.Attribute(ast.Name("sys"), name) if name not in PURE_SYS:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: sys.{name}")
    assert not found, "\n" + "\n".join(found)


# --- how it reads ------------------------------------------------------------------------------


def test_only_the_cli_prints() -> None:
    edges = {SOURCE / "cli", SOURCE / "documents" / "commands"}
    found = [c for p in FILES if not edges & set(p.parents) for c in calls(p, {"print"})]
    assert not found, "\n" + "\n".join(found)


def test_every_file_starts_with_its_purpose() -> None:
    silent = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(str(path.relative_to(ROOT)))
    assert not silent


def test_no_file_is_a_collection_of_unrelated_helpers() -> None:
    drawers = {"util", "utils", "helper", "helpers", "common", "misc"}
    folders = [ROOT / name for name in ("src", "tests", "bench", "tools", "examples")]
    found = [p for folder in folders for p in folder.rglob("*") if p.stem.strip("_") in drawers]
    assert not found


# --- how it starts -----------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after this statement."""
    script = f"{statement}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=clean()
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def clean() -> dict[str, str]:
    """The environment as a user has it: byte code is kept between starts."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


@pytest.mark.parametrize(
    "statement", ["import dovetail", "import dovetail.cli", "import dovetail.documents"]
)
def test_importing_dovetail_loads_no_heavy_module(statement: str) -> None:
    assert sorted(loaded_by(statement) & HEAVY) == []


def test_the_embedded_engine_needs_no_client_of_a_server() -> None:
    statement = (
        "import asyncio, dovetail, dovetail.cli.session, dovetail.cli.commands.run\n"
        "async def main():\n    async with dovetail.Dovetail(FILE): pass\nasyncio.run(main())"
    )
    with TemporaryDirectory() as folder:
        loaded = loaded_by(statement.replace("FILE", repr(f"{folder}/runs.db")))
    watching = {"structlog", "prometheus_client", "opentelemetry"}
    assert sorted(loaded & {"httpx2", "redis", "hiredis", "asyncpg", *watching}) == []


def test_help_imports_only_what_help_needs() -> None:
    ask = "import sys; sys.argv = ['dovetail', '--help']\nfrom dovetail.cli import main\n"
    loaded = loaded_by(ask + "try: main()\nexcept SystemExit: pass")
    assert sorted(loaded & (HEAVY - {"rich"})) == []


def processor_seconds() -> float:
    """Of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_printed_within_four_tenths_of_a_second() -> None:
    command = [str(Path(sys.executable).with_name("dovetail")), "--help"]
    best = float("inf")
    for _ in range(10):  # the best of some: a busy machine says nothing about the program
        start = processor_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
        best = min(best, processor_seconds() - start)
        assert done.returncode == 0, done.stderr
        if best < 0.4:
            break
    assert best < 0.4
