"""What an index page shows: made by the build itself, from this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from trove_classifiers import classifiers

from .pages import ROOT

ADDRESS = "https://code.example/team/dovetail"
VENDOR = ROOT / "src" / "dovetail" / "web" / "vendor"
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]+\]\(([^)\s]+)\)")


def built(folder: Path, address: str) -> Message:
    """The metadata of a wheel."""
    script = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=ROOT,
        env={**os.environ, "DOVETAIL_REPOSITORY_URL": address},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    with zipfile.ZipFile(folder / done.stdout.strip()) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        (points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "dovetail = dovetail.pytest_plugin" in wheel.read(points).decode()
        assert "dovetail/py.typed" in names
        licences = {name.rpartition("/")[2] for name in names if "dist-info/licenses" in name}
        assert licences == {"LICENSE"} | {path.name for path in VENDOR.glob("*.LICENSE")}
        assert not any(name.startswith(("tests/", "tools/")) for name in names)
        return Parser().parsestr(wheel.read(metadata).decode())


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_an_index_page_has_words_classifiers_and_links_that_lead_somewhere(
    tmp_path: Path, address: str
) -> None:
    found = built(tmp_path, address)
    assert set(found.get_all("Classifier", [])) <= classifiers
    assert len(found["Keywords"].split(",")) > 10
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    text = found.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# Dovetail")
    assert all(f"`{extra}`" in text for extra in found.get_all("Provides-Extra", []))
    elsewhere = [link for link in LINK.findall(text) if not link.startswith("#")]
    assert all(link.startswith("https://") for link in elsewhere)
    urls = dict(entry.split(", ") for entry in found.get_all("Project-URL", []))
    assert set(urls) == ({"Source", "Documentation", "Changelog", "Issues"} if address else set())
    assert all(url.startswith(ADDRESS) for url in urls.values())
    for link in elsewhere:
        if link.startswith(ADDRESS):
            path = re.sub(r"^.*/(?:blob|raw)/v[^/]+/([^#]+).*$", r"\1", link)
            assert (ROOT / path).exists(), link
    # The page of a file would be no picture, and a picture without an address none either.
    images = IMAGE.findall(text)
    assert bool(images) is bool(address)
    assert all(image.startswith(f"{ADDRESS}/raw/") for image in images)
    assert len(images) == len(re.findall(r"^!", text, re.MULTILINE))
