"""Token buckets that all processes on one SQLite file share.

A start must not cost a commit, so the buckets are in a small file beside the database: two numbers
for each tag, read and written under a lock that is held for microseconds. Losing it loses only the
last moment of a rate. Times are of the machine's monotonic clock, which all its processes share;
after a reboot the file begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.engine.clock import Clock
from dovetail.engine.limits import DEFAULT_BURST, DEFAULT_RATE, TokenBucket

SUFFIX = "-limits"
MAGIC = b"dovetail limits1"
MAX_TAGS = 16_384
"""Of a file: half a MiB. One more, and it begins anew."""
LOCK_SECONDS = 0.05
"""A process that was stopped while it held the lock must not stop the others: they go on with what
they know."""
_HEADER = struct.Struct("<16s16s16x")
_RECORD = struct.Struct("<16sdddq")


class BucketFile:
    """Opened when a bucket is first used; closed with the process."""

    def __init__(self, database: Path, clock: Clock) -> None:
        self._path = Path(f"{database.absolute()}{SUFFIX}")  # a handler may change the folder
        self._offset = clock() - time.monotonic()
        self._file: int | None = None
        self._places: dict[bytes, int] = {}

    def bucket(
        self, tag: str, rate: float = DEFAULT_RATE, burst: int = DEFAULT_BURST
    ) -> TokenBucket:
        return FileBucket(self, hashlib.sha256(tag.encode()).digest()[:16], rate, burst)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def state_of(self, bucket: FileBucket, now: float | None) -> Iterator[None]:
        """The bucket as all processes have left it; what is done to it meanwhile is written."""
        if not self._lock():
            yield
            return
        assert self._file is not None  # noqa: S101
        try:
            place = self._find(bucket.key)
            self._read(place, bucket, now)
            yield
            self._write(place, bucket)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                self._file = os.open(self._path, flags, 0o600)
            except OSError:
                return False  # a place that cannot be written: the store says so
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.0002)

    def _find(self, key: bytes) -> int:
        """Where the record of this tag is, or will be."""
        file = self._file
        assert file is not None  # noqa: S101
        header = _HEADER.pack(MAGIC, _boot())
        if os.pread(file, _HEADER.size, 0) != header:
            os.ftruncate(file, 0)
            os.pwrite(file, header, 0)
            self._places.clear()
        place = self._places.get(key)
        if place is not None and os.pread(file, len(key), place) == key:
            return place
        size = os.fstat(file).st_size
        records = os.pread(file, size - _HEADER.size, _HEADER.size)
        count = len(records) // _RECORD.size
        self._places = {
            records[at : at + len(key)]: _HEADER.size + at
            for at in range(0, count * _RECORD.size, _RECORD.size)
        }
        if key not in self._places:
            if count >= MAX_TAGS:
                os.ftruncate(file, _HEADER.size)
                self._places, count = {}, 0
            self._places[key] = _HEADER.size + count * _RECORD.size
        return self._places[key]

    def _read(self, place: int, bucket: FileBucket, now: float | None) -> None:
        assert self._file is not None  # noqa: S101
        kept = os.pread(self._file, _RECORD.size, place)
        if len(kept) < _RECORD.size:
            return
        _, rate, started, booked, burst = _RECORD.unpack(kept)
        if not (0 < rate < math.inf and burst >= 1 and started < math.inf and booked < math.inf):
            return  # damaged
        rate_here, burst_here = bucket.rate, bucket.burst
        bucket.rate, bucket.burst = rate, burst
        bucket.started, bucket.booked = started + self._offset, booked + self._offset
        if (rate, burst) != (rate_here, burst_here):
            # Set here and not there, or there and not yet here: the same tokens at our rate.
            TokenBucket.set(bucket, rate_here, burst_here, self._now(now))

    def _write(self, place: int, bucket: FileBucket) -> None:
        assert self._file is not None  # noqa: S101
        started, booked = bucket.started - self._offset, bucket.booked - self._offset
        values = (bucket.key, bucket.rate, started, booked, bucket.burst)
        os.pwrite(self._file, _RECORD.pack(*values), place)

    def _now(self, now: float | None) -> float:
        return time.monotonic() + self._offset if now is None else now


class FileBucket(TokenBucket):
    """One tag's bucket. The numbers in memory are those of its last use here."""

    __slots__ = ("_of", "key")

    def __init__(self, file: BucketFile, key: bytes, rate: float, burst: int) -> None:
        super().__init__(rate, burst)
        self._of = file
        self.key = key

    def book(self, now: float) -> float:
        with self._of.state_of(self, now):
            return super().book(now)

    def start(self, now: float) -> bool:
        with self._of.state_of(self, now):
            return super().start(now)

    def set(self, rate_per_second: float, burst: int, now: float) -> None:
        with self._of.state_of(self, now):
            super().set(rate_per_second, burst, now)

    def rebook(self, count: int, now: float) -> list[float]:
        with self._of.state_of(self, now):
            self.booked = -math.inf
            return [TokenBucket.book(self, now) for _ in range(count)]

    def unbook(self, count: int) -> None:
        with self._of.state_of(self, None):
            super().unbook(count)

    def slow(self, until: float) -> None:
        with self._of.state_of(self, None):
            super().slow(until)


def _boot() -> bytes:
    """Which start of the machine this is: its monotonic clock began there."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = str(round((time.time() - time.monotonic()) / 60))
    return hashlib.sha256(text.encode()).digest()[:16]
