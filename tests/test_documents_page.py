"""The page "Documents" is true: its commands print what it shows, its code runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.documents import extraction, reading
from dovetail.documents import files as folder
from dovetail.documents.fields import TYPES, Fields

from .pages import ROOT, blocks, call, commands, comparable, environment, services

PAGE = ROOT / "docs" / "documents.md"
TEXT = PAGE.read_text()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where the reader of the page is: beside a copy of our samples."""
    shutil.copytree(ROOT / "examples" / "documents", tmp_path / "inbox")
    shutil.copy(ROOT / "examples" / "long_invoice.pdf", tmp_path)
    return tmp_path


def same(printed: str, here: Path) -> str:
    """Without what depends on the place: the end of an id is made of the document's path."""
    printed = printed.replace(str(here.resolve()), "/home/user")
    return comparable(re.sub(r"-[0-9a-f]{10}\b", "-ID", printed))


def test_the_commands_of_the_page_print_the_shown_output(here: Path) -> None:
    for command, printed in commands(PAGE):
        done = call(command, here)
        assert done.returncode == 0, done.stdout
        assert same(done.stdout, here) == same(printed, here), command
    for block in blocks(PAGE, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block.text],
            cwd=here,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_services_behave_as_their_page_shows(here: Path, redis_url: str) -> None:
    with services(PAGE, here, redis_url) as env:
        for command, printed in commands(PAGE, "on redis"):
            done = call(command, here, **env)
            assert same(done.stdout, here) == same(printed, here), command


def rows(title: str) -> list[str]:
    """The first cells of the table whose head begins with this title."""
    table = re.search(rf"^\| {title} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert table
    return [line.split("|")[1] for line in table[1].splitlines()]


def names(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_has_every_field_and_type() -> None:
    assert names(rows("field")) == set(Fields.model_fields)
    (types,) = re.findall(r"^\| `type` \|(.*)\|$", TEXT, re.MULTILINE)
    assert names([types]) == set(TYPES)


def test_the_page_has_every_error_of_a_document() -> None:
    source = "".join(path.read_text() for path in Path(folder.__file__).parent.glob("*.py"))
    raised = set(re.findall(r'type="(\w+)"', source)) | {"no_ocr"}
    for name in names(rows("error")):
        assert f'"{name}"' in source, name
    # Messages that say that something around documents is wrong, not a document.
    around = {"invalid_config", "invalid_params", "not_installed", "missing_package"}
    around |= {"database_down", "locked", "reader_lost", "invalid_review", "invalid_input"}
    assert raised - around <= names(rows("error"))


def test_the_page_has_every_setting() -> None:
    sources = [path.read_text() for path in Path(folder.__file__).parent.glob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(DOVETAIL_DOCUMENTS_\w+)"', text)}
    assert names(rows("variable")) == read
    assert f"`{reading.MAX_BYTES}`" in TEXT
    assert f"`{reading.MAX_PAGES}`" in TEXT
    assert f"`{extraction.MODEL_SECONDS:g}`" in TEXT


def test_the_limits_of_the_page_are_the_real_ones() -> None:
    assert f"{reading.MAX_BYTES // 1_000_000} MB (`{reading.MAX_BYTES_SETTING}`)" in TEXT
    assert f"{reading.MAX_TEXT_LENGTH:,} characters" in TEXT
    most = f"{reading.MAX_ALLOWED_PAGES:,}"
    assert f"{reading.MAX_PAGES} pages (`{reading.MAX_PAGES_SETTING}`, up to {most})" in TEXT
