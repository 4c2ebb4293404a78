"""Plants known bugs, one at a time, and expects the tests to notice each of them.

A bug is a patch in tools/planted_bugs/: what it breaks, the tests that must see it, a unified
diff. Each is applied to a copy of src/, never to the work tree, and its tests run against that
copy. It fails if a patch no longer applies, if no test notices it, or if the tests fail
without it, for then they prove nothing.

    python tools/planted_bugs.py            every bug, two at a time
    python tools/planted_bugs.py NAME …     only these
    python tools/planted_bugs.py --walks    bugs in the rules, by the random walks alone
    python tools/planted_bugs.py --refresh  write the patches anew where the code has moved

It must not know what the tests test. The patches are applied here rather than by git or patch,
so that a bare machine can run it and a moved line does not matter.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tools" / "planted_bugs"
WALKS = ["tests/core/test_walks.py", "tests/contracts/test_store_equals_core.py"]
AT_ONCE = 2
PATIENCE = 120  # seconds for the tests of one bug; they take two or three

# The copy must be what is imported, or every bug would go unnoticed.
BOOT = """
import sys, pytest, dovetail
assert dovetail.__file__.startswith(sys.argv[1]), dovetail.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


class DoesNotApply(Exception):
    pass


@dataclass(frozen=True)
class Hunk:
    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Bug:
    name: str
    what: str
    tests: list[str]
    hunks: list[Hunk]


def read(path: Path) -> Bug:
    """A patch: `Bug:` and `Tests:` on top, then a unified diff."""
    head, _, diff = path.read_text().partition("\n--- ")
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    hunks = list(_hunks("--- " + diff))
    return Bug(path.stem, fields["Bug"], fields["Tests"].split(), hunks)


def _hunks(diff: str) -> Iterator[Hunk]:
    file, before, after = "", [], []
    for line in [*diff.splitlines(keepends=True), "@@"]:
        if line.startswith(("--- ", "@@")):
            if before or after:
                yield Hunk(file, "".join(before), "".join(after))
            before, after = [], []
        elif line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/").rstrip()
        elif line[:1] in " -":
            before.append(line[1:])
        if line[:1] in " +" and not line.startswith("+++ "):
            after.append(line[1:])


def apply(bug: Bug, tree: Path) -> None:
    """Plant the bug. What it changes must be there exactly once."""
    for hunk in bug.hunks:
        path = tree / hunk.file
        text = path.read_text()
        found = text.count(hunk.before)
        if found != 1:
            raise DoesNotApply(f"{hunk.file} has its lines {found} times, not once")
        path.write_text(text.replace(hunk.before, hunk.after))


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BOOT, str(tree), "-x", "-o", f"cache_dir={tree / 'cache'}"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / "hypothesis"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DOVETAIL_SHRINK": "no",
    }
    return subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def try_bug(bug: Bug | None, tests: list[str]) -> tuple[bool, str]:
    """Whether all is as it should be, and a line that says so. Without a bug: they pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dovetail-bug-") as directory:
        tree = Path(directory).resolve()
        shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            if bug is not None:
                apply(bug, tree)
            ran = run_tests(tree, tests)
        except DoesNotApply as problem:
            return False, f"does not apply: {problem}; write it anew"
        except subprocess.TimeoutExpired:
            return False, f"its tests hang: they should notice it within {PATIENCE} s"
    took = f"{time.monotonic() - began:.1f} s"
    if bug is None:
        return ran.returncode == 0, took if ran.returncode == 0 else f"they fail\n{ran.stdout}"
    if ran.returncode == 1:
        return True, f"{took}  {first_failure(ran.stdout)}"
    if ran.returncode == 0:
        return False, "no test notices it"
    return False, f"its tests do not run\n{ran.stdout}{ran.stderr}"


def first_failure(output: str) -> str:
    failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1] if failed else "?"


def refresh(bug: Bug, path: Path) -> None:
    """Write a patch that applies anew, with the context that is there now."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        shutil.copytree(ROOT / "src", tree / "src")
        apply(bug, tree)
        text = f"Bug: {bug.what}\nTests: {' '.join(bug.tests)}\n\n"
        for file in dict.fromkeys(hunk.file for hunk in bug.hunks):
            before = (ROOT / file).read_text().splitlines(keepends=True)
            after = (tree / file).read_text().splitlines(keepends=True)
            text += "".join(difflib.unified_diff(before, after, f"a/{file}", f"b/{file}", n=1))
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--walks", action="store_true", help="use the random walks alone")
    parser.add_argument("--refresh", action="store_true", help="write the patches anew")
    args = parser.parse_args()
    known = sorted(PATCHES.glob("*.patch"))
    paths = [path for path in known if not args.names or path.stem in args.names]
    if not paths:
        parser.error(f"no such bug; there are: {', '.join(path.stem for path in known)}")
    bugs = [read(path) for path in paths]
    if args.refresh:
        for bug, path in zip(bugs, paths, strict=True):
            refresh(bug, path)
        return 0
    if args.walks:  # they walk the rules, not the engine around them
        bugs = [bug for bug in bugs if all("/core/" in hunk.file for hunk in bug.hunks)]
    jobs: list[tuple[str, Bug | None, list[str]]] = [
        (bug.name, bug, WALKS if args.walks else bug.tests) for bug in bugs
    ]
    everything = sorted({test for _, _, tests in jobs for test in tests})
    jobs.insert(0, ("(no bug: the tests pass)", None, everything))
    width = max(len(name) for name, _, _ in jobs)
    bad = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (name, _, _), (good, said) in zip(
            jobs, pool.map(lambda job: try_bug(job[1], job[2]), jobs), strict=True
        ):
            bad += not good
            print(f"{'✓' if good else '✗'} {name:{width}}  {said}", flush=True)
    print(f"{len(bugs)} planted bugs, {'all noticed' if not bad else f'{bad} WRONG'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
