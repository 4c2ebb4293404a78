"""Plants known bugs, one at a time, and expects the tests to notice each of them.

A bug is a patch in tools/planted_bugs/: what it breaks, the tests that must see it, a unified
diff. Each is applied to a copy of src/, never to the work tree, and its tests run against that
copy. It fails if a patch no longer applies, if no test notices it, or if the tests fail
without it, for then they prove nothing.

    python tools/planted_bugs.py            every bug, five at a time
    python tools/planted_bugs.py NAME …     only these
    python tools/planted_bugs.py --walks    bugs in the rules, by the random walks alone
    python tools/planted_bugs.py --passing  the tests are known to pass: they have just run
    python tools/planted_bugs.py --sixth    a sixth of them, another sixth each day
    python tools/planted_bugs.py --refresh  write the patches anew where the code has moved

The patches are applied here rather than by git or patch,
so that a bare machine can run it and a moved line does not matter. Starting pytest takes longer
than most of these tests: one process that has it loaded forks for each bug, and what is not
broken is compiled once.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import gc
import importlib.util
import multiprocessing
import os
import shutil
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
AT_ONCE = 5  # most of the time they wait, many for what never comes
DAY_SECONDS = 86_400
PATIENCE = 120  # seconds for the tests of one bug; they take two or three

# What every test run loads, and nothing of ours: that comes from the copy with the bug.
WARM = ["pytest", "pytest_asyncio.plugin", "hypothesis.strategies", "fastapi", "jinja2", "httpx2"]
WARM += ["asyncpg", "redis.asyncio", "celery", "structlog"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(WARM)
# A plain assert fails as well, and what was loaded before pytest began cannot be rewritten.
OPTIONS = ["-x", "--assert=plain", "-p", "no:schemathesis"]


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
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def copy_files(bug: Bug, tree: Path) -> None:
    """What the bug would change, and nothing else."""
    for file in {hunk.file for hunk in bug.hunks}:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tree / file)


def run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    """The exit code of pytest over the copy in this folder, and what it said."""
    process = FORKS.Process(target=_test, args=(str(tree), tests))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError
    return process.exitcode, (tree / "said").read_text(errors="replace")


def _test(tree: str, tests: list[str]) -> None:
    said = os.open(f"{tree}/said", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)
    os.chdir(ROOT)
    os.environ |= {
        "PYTHONPATH": f"{tree}/src",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{tree}/hypothesis",
        "DOVETAIL_SHRINK": "no",
    }
    sys.path.insert(0, f"{tree}/src")
    import pytest

    import dovetail

    # The copy must be what is imported, or every bug would go unnoticed.
    assert str(dovetail.__file__).startswith(tree), dovetail.__file__
    gc.freeze()  # pytest collects garbage often at its end; what was preloaded is none
    sys.exit(pytest.main([*OPTIONS, "-o", f"cache_dir={tree}/cache", *tests]))


def compiled_copy(folder: Path) -> Path:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder / "src", quiet=1)
    return folder / "src"


def try_bug(bug: Bug | None, tests: list[str], source: Path) -> tuple[bool, str]:
    """Whether all is as it should be, and a line that says so. Without a bug: they pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dovetail-bug-") as directory:
        tree = Path(directory).resolve()
        shutil.copytree(source, tree / "src")
        try:
            if bug is not None:
                apply(bug, tree)
            code, said = run_tests(tree, tests)
        except DoesNotApply as problem:
            return False, f"does not apply: {problem}; write it anew"
        except TimeoutError:
            return False, f"its tests hang: they should notice it within {PATIENCE} s"
    took = f"{time.monotonic() - began:.1f} s"
    if bug is None:
        return code == 0, took if code == 0 else f"they fail\n{said}"
    if code == 1:
        return True, f"{took}  {first_failure(said)}"
    if code == 0:
        return False, "no test notices it"
    return False, f"its tests do not run\n{said}"


def first_failure(output: str) -> str:
    failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1] if failed else "?"


def refresh(bug: Bug, path: Path) -> None:
    """Write a patch that applies anew, with the context that is there now."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_files(bug, tree)
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
    parser.add_argument("--passing", action="store_true", help="do not try them without a bug")
    parser.add_argument("--sixth", action="store_true", help="only a sixth, another each day")
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
    if args.sixth:
        bugs = bugs[int(time.time() // DAY_SECONDS) % 6 :: 6]
    if args.walks:  # they walk the rules, not the engine around them
        bugs = [bug for bug in bugs if all("/core/" in hunk.file for hunk in bug.hunks)]
    jobs: list[tuple[str, Bug | None, list[str]]] = [
        (bug.name, bug, WALKS if args.walks else bug.tests) for bug in bugs
    ]
    everything = sorted({test for _, _, tests in jobs for test in tests})
    if not args.passing:
        jobs.insert(0, ("(no bug: the tests pass)", None, everything))
    width = max(len(name) for name, _, _ in jobs)
    missed = []
    with tempfile.TemporaryDirectory() as directory:
        source = compiled_copy(Path(directory))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            tried = pool.map(lambda job: try_bug(job[1], job[2], source), jobs)
            for job, (good, said) in zip(jobs, tried, strict=True):
                print(f"{'✓' if good else '?'} {job[0]:{width}}  {said}", flush=True)
                if not good:
                    missed.append(job)
        # Some bugs are races: on a busy machine their test may miss one. Each gets a second try
        # alone. The tests without a bug get none: they must pass at the first try.
        wrong = []
        for name, bug, tests in missed:
            good, said = (False, "") if bug is None else try_bug(bug, tests, source)
            print(f"{'✓' if good else '✗'} {name:{width}}  alone: {said}", flush=True)
            if not good:
                wrong.append(name)
    found = f"{len(wrong)} WRONG: {', '.join(wrong)}" if wrong else "all noticed"
    print(f"{len(bugs)} planted bugs, {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
