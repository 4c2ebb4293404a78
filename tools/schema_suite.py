"""Brings the official tests of JSON Schema, which are not ours to keep: `./dev test` runs it.

They come with the source package of `jsonschema`, from the index that uv is set to, and are taken
only if the package has the digest below.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from pathlib import Path

PACKAGE, VERSION = "jsonschema", "4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
WANTED = f"{PACKAGE}-{VERSION}/json/tests/draft2020-12/"
SECONDS = 60


def address(uv: str) -> str:
    """Where the index has the source package."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, found = Path(folder) / "wanted.in", Path(folder) / "pylock.toml"
        wanted.write_text(f"{PACKAGE}=={VERSION}\n")
        command = [uv, "pip", "compile", "--quiet", "--no-deps", "--no-binary", PACKAGE]
        form = ["--format", "pylock.toml", "--output-file", str(found), str(wanted)]
        subprocess.run([*command, *form], check=True, timeout=SECONDS, capture_output=True)
        return str(tomllib.loads(found.read_text())["packages"][0]["sdist"]["url"])


def fetch(uv: str, folder: Path) -> None:
    """Put the files of draft 2020-12 into the folder, all of them or none."""
    context = ssl.create_default_context()
    with urllib.request.urlopen(address(uv), timeout=SECONDS, context=context) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError("the package is not the one that is pinned")
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        for member in package:
            if member.isfile() and member.name.startswith(WANTED):
                target = made / member.name.removeprefix(WANTED)
                target.parent.mkdir(parents=True, exist_ok=True)
                file = package.extractfile(member)
                target.write_bytes(file.read() if file else b"")
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def main() -> None:
    uv, folder = sys.argv[1], Path(sys.argv[2])
    try:
        fetch(uv, folder)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        sys.exit(f"could not fetch the official tests of JSON Schema: {error}")


if __name__ == "__main__":
    main()
