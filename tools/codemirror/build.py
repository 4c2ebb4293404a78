#!/usr/bin/env python3
"""Makes `vendor/codemirror.mjs` of the page, CodeMirror 6 in one file, and its manifest.

    tools/codemirror/build.py            # make it again
    tools/codemirror/build.py --check    # exit code 1 if that gives other files

It needs Node and npm, and the npm registry that npm is set to. `package-lock.json` has each package
with its version and digest, so the same inputs give the same file. Users and contributors of the
page need none of this.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENDOR = ROOT / "src" / "dovetail" / "web" / "vendor"
INPUTS = ("build.py", "entry.mjs", "package.json", "package-lock.json")
BUNDLE = "codemirror.mjs"
LICENSE = "codemirror.LICENSE"
NAME = "CodeMirror 6, one file made of several packages"
BANNER = "/* CodeMirror 6, MIT: see codemirror.LICENSE. Made by tools/codemirror/build.py. */"
FLAGS = ("--bundle", "--minify", "--format=esm", "--target=es2022", "--legal-comments=none")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = build(Path(folder))
    manifest = VENDOR / "manifest.json"
    packages = json.loads(manifest.read_text())["packages"]
    entry = made.pop("manifest")
    others = [one for one in packages if one["package"] != NAME]
    if check:
        wrong = [name for name, body in made.items() if (VENDOR / name).read_bytes() != body]
        wrong += [] if entry in packages else [manifest.name]
        print("\n".join(f"{name} is not what its inputs make" for name in wrong) or "as made")
        return 1 if wrong else 0
    for name, body in made.items():
        (VENDOR / name).write_bytes(body)
    manifest.write_text(json.dumps({"packages": [*others, entry]}, indent=2) + "\n")
    return 0


def build(folder: Path) -> dict[str, Any]:
    """The bytes of each file, and the entry of the manifest."""
    for name in INPUTS:
        shutil.copy(HERE / name, folder)
    run(folder, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    out = folder / BUNDLE
    run(folder, "node_modules/.bin/esbuild", "entry.mjs", *FLAGS, f"--outfile={out}")
    body = f"{BANNER}\n".encode() + out.read_bytes()
    bundled = packages_of(folder)
    licenses = licenses_of(folder, bundled).encode()
    files = {BUNDLE: body, LICENSE: licenses}
    entry = {
        "package": NAME,
        "version": bundled["@codemirror/view"],
        "license": "MIT",
        "license_file": LICENSE,
        "made_of": bundled,
        "made_by": {f"tools/codemirror/{name}": digest(folder / name) for name in INPUTS},
        "files": {
            name: {"from": "tools/codemirror/build.py", "sha256": sha256(made).hexdigest()}
            for name, made in files.items()
        },
    }
    return {**files, "manifest": entry}


def packages_of(folder: Path) -> dict[str, str]:
    """Name and version of what is in the bundle: all that is locked, without the bundler."""
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    named = {
        path.removeprefix("node_modules/"): one["version"] for path, one in locked.items() if path
    }
    return {name: version for name, version in sorted(named.items()) if "esbuild" not in name}


def licenses_of(folder: Path, packages: dict[str, str]) -> str:
    """The text of each licence once, below the packages that have it."""
    by_text: dict[str, list[str]] = {}
    for name in packages:
        text = (folder / "node_modules" / name / "LICENSE").read_text().strip()
        by_text.setdefault(text, []).append(name)
    parts = (f"{', '.join(names)}:\n\n{text}\n" for text, names in by_text.items())
    return "\n\n".join(parts)


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
