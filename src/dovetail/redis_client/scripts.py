"""Lua scripts, read from the `.lua` files of a package."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def load_script(package: str, *names: str) -> str:
    """The text of these files, joined in this order."""
    folder = resources.files(package)
    return "\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names)
