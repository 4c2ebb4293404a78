"""Every threat that the page names has a defence, and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()


def threats() -> dict[str, str]:
    """The cell with the tests, by threat."""
    table = PAGE.partition("| threat | defence | tests |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()]
    assert all(len(row) == 3 for row in rows), [row for row in rows if len(row) != 3]
    return {threat.strip(): tests for threat, _, tests in rows}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_threat_has_tests_that_exist() -> None:
    found = threats()
    assert len(found) >= 25
    for threat, cell in found.items():
        named = re.findall(r"`(tests/[\w/]+\.py): (test_\w+)`", cell)
        assert named, threat
        assert len(named) == cell.count("`") // 2, threat
        for path, name in named:
            assert name in functions_of(path), f"{threat}: no {name} in {path}"


def test_the_page_has_the_correct_counts() -> None:
    from .api.test_security_connections import REFUSED
    from .core.test_hostile_templates import HOSTILE as TEMPLATES
    from .core.test_hostile_texts import HOSTILE as TEXTS
    from .handlers.test_addresses import HOSTILE_URLS

    for corpus, words in (
        (TEMPLATES, "templates"),
        (TEXTS, "texts, schemas and definitions"),
        (HOSTILE_URLS, "spellings of addresses"),
        (REFUSED, "broken requests"),
    ):
        assert f"{len(corpus)} {words}" in PAGE
