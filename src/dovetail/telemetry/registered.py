"""The metrics that handlers make themselves: what they have registered with `prometheus_client`.

A process that runs handlers tells what is in its default registry. One that forks a pool gives the
library a folder before handlers are loaded, in which each process of the pool keeps its values; the
sum over them is told, with those that have ended. What it must not know: what is measured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from dovetail.telemetry.tally import METRICS

ENDED = "ended"
"""In a file's name in place of a pid: the sum over processes that have ended."""
PARTS = ("_bucket", "_sum", "_count")
# Of the library's mode for several processes nothing is typed.
_Values: Any = MmapedDict
_Pool: Any = MultiProcessCollector

log = logging.getLogger("dovetail.metrics")


def registered(folder: Path | None = None, is_alive: Callable[[int], bool] | None = None) -> bytes:
    """Lines for the page. `folder` is where a pool keeps its values; whoever made it says by
    `is_alive` which processes are left, and what others counted is taken together.

    Without what the library tells of every process, and without what has the name of a metric of
    ours: to Prometheus a name that comes twice is a broken page.
    """
    try:
        with _reading:  # two may ask at once, and what is moved must not be read twice
            if folder is not None and is_alive is not None:
                _take_over(folder, is_alive)
            return generate_latest(_Theirs(folder))
    except Exception:  # it is their code that is asked: what fails there must not cost our metrics
        log.exception("the metrics of handlers are left out of the page")
        return b""


class _Theirs(Collector):
    def __init__(self, folder: Path | None) -> None:
        self._source = REGISTRY if folder is None else _Pool(None, str(folder))

    def collect(self) -> Iterator[Family]:
        for family in self._source.collect():
            names = {family.name, *(sample.name for sample in family.samples)}
            if names & _names_of_ours():
                _warn_of(family.name)
            elif family.name not in _names_of_every_process():
                yield family


@cache
def _names_of_ours() -> frozenset[str]:
    found = set()
    for name, kind, *_ in METRICS:
        found |= {name, name.removesuffix("_total")}
        if kind == "histogram":
            found |= {name + part for part in PARTS}
    return frozenset(found)


@cache
def _names_of_every_process() -> frozenset[str]:
    standard = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)
    return frozenset(family.name for one in standard for family in one.collect())


@cache
def _warn_of(name: str) -> None:
    log.warning("%s of a handler is left out: Dovetail has a metric of that name", name)


# ── a pool of processes ──────────────────────────────────────────────────────────────────

_reading = threading.Lock()


def _take_over(folder: Path, is_alive: Callable[[int], bool]) -> None:
    """Add what processes that have ended counted to one file: a pool may have thousands of them.

    A gauge that is to live as long as its process goes; of others the last value stays.
    """
    for path in sorted(folder.glob("*.db")):
        kind, _, pid = path.stem.rpartition("_")
        if pid == ENDED or is_alive(int(pid)):
            continue
        if kind.startswith("gauge_live"):
            path.unlink()
        elif not kind.startswith("gauge"):
            _add(path, folder / f"{kind}_{ENDED}.db")
            path.unlink()


def _add(path: Path, whole: Path) -> None:
    kept = _Values(str(whole))
    try:
        for key, value, *_ in _Values.read_all_values_from_file(path):
            before, _ = kept.read_value(key)
            kept.write_value(key, before + value, 0.0)
    finally:
        kept.close()
