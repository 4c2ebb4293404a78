"""The bench of the API asks what was promised, and tells what was missed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..pages import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    import api

    yield api
    for name in set(sys.modules) - before:
        if name in ("api", "measuring"):
            del sys.modules[name]


def verdict(what: str, found: float, wanted: str, reached: bool) -> dict[str, Any]:
    return {"what": what, "reached": reached}


def missed(bench: Any, **found: Any) -> list[str]:
    good = {"times": 0.5, "p99 idle": 0.004, "p99 loaded": 0.054, "history": {}}
    return [one["what"] for one in bench.verdicts(good | found, verdict) if not one["reached"]]


def test_each_missed_target_of_the_api_bench_is_reported(bench: Any) -> None:
    assert missed(bench) == []
    assert "triggers" in missed(bench, times=0.49)[0]
    assert "p99" in missed(bench, **{"p99 loaded": 0.0541})[0]
    slow = {"GET /runs": {"times": 1.6}, "GET /workflows": {"times": 1.5}}
    (reported,) = missed(bench, history=slow)
    assert reported.endswith("GET /runs")


def test_the_load_comes_from_another_process_and_counts_the_replies(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "SECONDS", 0.3)
    with bench.dovetail(tmp_path / "ours") as ours, bench.bare_route(tmp_path / "peer") as peer:
        run_id = bench.ask(ours, "POST", "/workflows/bench/runs", {})["run_id"]
        path = "/api/v1/workflows/bench/runs"
        found = bench.load(ours, path, clients=4, look=f"/api/v1/runs/{run_id}")
        listed = bench.ask(ours, "GET", "/runs?workflow=bench&limit=1000")["items"]
        assert len(listed) == found["count"] + 1
        assert len(found["looks"]) >= 1
        assert bench.load(peer, "/rows", clients=4)["count"] >= 1
