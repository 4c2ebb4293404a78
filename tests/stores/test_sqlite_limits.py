"""Rate limits that all processes on one embedded file share."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.engine.limits import TokenBucket
from dovetail.stores.sqlite.limits import BucketFile

from ..engine.harness import engine

OPERATIONS = st.one_of(
    st.tuples(st.just("book")),
    st.tuples(st.just("start")),
    st.tuples(st.just("unbook"), st.integers(1, 3)),
    st.tuples(st.just("slow"), st.integers(0, 300).map(lambda n: (2 * n + 1) / 128)),
    st.tuples(st.just("rebook"), st.integers(0, 3)),
)


# Times that a float has exactly, whatever is added: else a start at the very moment would differ.
PAUSES = st.integers(0, 32).map(lambda n: n / 64)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2]), PAUSES, OPERATIONS), max_size=20),
    st.sampled_from([(8.0, 1), (4.0, 4)]),
)
def test_three_processes_on_one_file_share_one_bucket(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, float, tuple[str, ...]]],
    limit: tuple[float, int],
) -> None:
    path = tmp_path_factory.mktemp("file") / "runs.db"
    offsets = [0.0, 128.0, -8.0]
    files = [BucketFile(path, time.monotonic) for _ in offsets]
    for file, offset in zip(files, offsets, strict=True):
        file._offset = offset  # processes do not begin at the same time
    buckets = [file.bucket("tag", *limit) for file in files]
    one, now = TokenBucket(*limit), 1000.0
    for who, pause, (name, *given_) in steps:
        now += pause
        ahead = offsets[who]
        if name == "unbook":
            ours, theirs = one.unbook(given_[0]), buckets[who].unbook(given_[0])
        elif name == "slow":
            ours, theirs = one.slow(now + given_[0]), buckets[who].slow(now + given_[0] + ahead)
        elif name == "rebook":
            ours = one.rebook(given_[0], now)
            theirs = [at - ahead for at in buckets[who].rebook(given_[0], now + ahead)]
        else:
            ours, theirs = getattr(one, name)(now), getattr(buckets[who], name)(now + ahead)
            theirs = theirs - ahead if name == "book" else theirs
        assert theirs == pytest.approx(ours, abs=0.001)
    for file in files:
        file.close()


def test_a_limit_set_in_one_process_counts_the_tokens_used_in_another(
    database: Path,
) -> None:
    one = BucketFile(database, time.monotonic).bucket("t", 1.0, 1)
    other = BucketFile(database, time.monotonic).bucket("t", 1.0, 1)
    now = time.monotonic()
    assert one.start(now)
    other.set(100.0, 1, now)
    assert not other.start(now - 0.05)
    assert other.start(now + 0.011)


@pytest.mark.parametrize("text", [b"", b"x", b"not ours" * 50, b"\0" * 4096])
def test_a_damaged_bucket_file_starts_afresh(database: Path, text: bytes) -> None:
    Path(f"{database}-limits").write_bytes(text)
    bucket = BucketFile(database, time.monotonic).bucket("t", 1.0, 1)
    now = time.monotonic()
    assert (bucket.start(now), bucket.start(now)) == (True, False)


def test_a_damaged_record_is_ignored(database: Path) -> None:
    BucketFile(database, time.monotonic).bucket("t").start(time.monotonic())
    path = Path(f"{database}-limits")
    path.write_bytes(path.read_bytes()[:-32] + b"\xff" * 32)
    assert BucketFile(database, time.monotonic).bucket("t").start(time.monotonic())


def test_a_reboot_of_the_machine_starts_the_buckets_afresh(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    BucketFile(database, time.monotonic).bucket("t").slow(now + 1e6)
    assert not BucketFile(database, time.monotonic).bucket("t").start(now)
    monkeypatch.setattr("dovetail.stores.sqlite.limits._boot", lambda: b"another".ljust(16))
    assert BucketFile(database, time.monotonic).bucket("t").start(now)


def test_a_process_that_holds_the_lock_forever_blocks_no_other(database: Path) -> None:
    path = Path(f"{database}-limits")
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    before = time.monotonic()
    bucket = BucketFile(database, time.monotonic).bucket("t", 1.0, 1)
    assert (bucket.start(before), bucket.start(before)) == (True, False)
    assert time.monotonic() - before < 5
    os.close(held)


def test_the_bucket_file_is_private_to_its_user_and_stays_small(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.stores.sqlite.limits.MAX_TAGS", 5)
    file = BucketFile(database, time.monotonic)
    old = os.umask(0)
    try:
        for number in range(23):
            file.bucket(f"t{number}").start(0.0)
    finally:
        os.umask(old)
    found = Path(f"{database}-limits").stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size <= 48 * 6


async def test_engines_of_two_processes_share_one_rate(tmp_path: Path) -> None:
    """Each alone would start 8 in 0.35 s; both together must take twice as long."""
    script = textwrap.dedent("""
        import asyncio, sys, time
        from dovetail import Dovetail
        nodes = [{"id": f"n{i}", "handler": "input", "resource_tag": "shared"} for i in range(8)]
        async def main():
            async with Dovetail(sys.argv[1]) as dt:
                run = await dt.run({"name": "t", "nodes": nodes})
                print(*(node.started_at for node in run.nodes.values()))
        asyncio.run(main())
    """)
    path = tmp_path / "runs.db"
    async with engine(db=path):
        pass
    (tmp_path / "dovetail.toml").write_text(
        "[rate_limits]\nshared = {rate_per_second = 20, burst = 1}\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    texts = [await asyncio.to_thread(process.communicate) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    times = sorted(
        datetime.fromisoformat(word).timestamp() for out, _ in texts for word in out.split()
    )
    assert len(times) == 16
    for first, last in zip(times, times[10:], strict=False):  # any 10 intervals of 50 ms
        assert last - first >= 10 / 20 - 0.12
