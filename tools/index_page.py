"""What an index page shows of the project: the README without links that lead nowhere there.

Hatchling calls it when it builds. A link to another page of the checkout works on an index page
only with an address. Set DOVETAIL_REPOSITORY_URL when you build a release, as in
https://host/owner/dovetail: the links then lead there, and the project has its urls. Without it
the links become plain text, and images are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "DOVETAIL_REPOSITORY_URL"
_OURS = r"\((?!https?://|#|mailto:)([^)\s]+)\)"
_LINK = re.compile(rf"\[([^\]]+)\]{_OURS}")
_IMAGE = re.compile(rf"!\[([^\]]*)\]{_OURS}")
_LINE_OF_IMAGE = re.compile(rf"^{_IMAGE.pattern}\n\n", re.MULTILINE)


def index_readme(text: str, address: str, version: str) -> str:
    """The README with links and images of the checkout made absolute, or removed."""
    if not address:
        return _LINK.sub(r"\1", _LINE_OF_IMAGE.sub("", text))
    text = _IMAGE.sub(rf"![\1]({address}/raw/v{version}/\2)", text)
    return _LINK.sub(rf"[\1]({address}/blob/v{version}/\2)", text)


def index_urls(address: str, version: str) -> dict[str, str]:
    """Only with an address: none is invented."""
    if not address:
        return {}
    pages = f"{address}/blob/v{version}"
    return {
        "Source": address,
        "Documentation": f"{pages}/docs/README.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        address = os.environ.get(VARIABLE, "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text("utf-8")
        version = str(metadata["version"])
        shown = index_readme(text, address, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
        metadata["urls"] = index_urls(address, version)
