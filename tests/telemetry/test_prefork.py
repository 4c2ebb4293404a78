"""A worker that is a pool of processes: what its processes count and trace is not lost in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..servers.redis_server import RedisServer
from .conftest import tracing_to
from .receiver import Receiver
from .services import SECRET, Services, node, page_of, wait_for


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


def test_a_celery_worker_counts_and_traces_the_work_of_its_pool(
    tmp_path: Path, redis_url: str, receiver: Receiver
) -> None:
    services = Services(
        tmp_path,
        DOVETAIL_REDIS_URL=redis_url,
        DOVETAIL_TRANSPORT="celery",
        DOVETAIL_LOG_FORMAT="json",
        **tracing_to(receiver),
    )
    try:
        worker, port = services.watched("worker", "--concurrency", "2", "--handlers", "mine.py")
        api = services.serve("--with", "orchestrator")
        services.wait(worker, "started")
        wait_for(lambda: api.page()("dovetail_workers_alive") == 1, "the worker")
        limited = [node(f"n{at}", "plain", resource_tag="slow") for at in range(6)]
        trace_id = "5" * 32
        run_id = api.run(
            *limited,
            node("talk", "talks"),
            headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        )
        run = api.ended(run_id)
        assert run["status"] == "COMPLETED"
        parked = [event for event in api.events(run_id) if event["type"] == "node.parked"]
        assert parked, "at ten a second some of six have to wait"
        name = "dovetail_rate_limit_wait_seconds_count"
        wait_for(
            lambda: page_of(port)(name, tag="slow") + api.page()(name, tag="slow") == len(parked),
            "what the pool has parked",
        )
        assert page_of(port)(name, tag="slow") > 0
        done = api.page()
        assert done("dovetail_nodes_total", handler="plain", status="COMPLETED") == 6
        wait_for(
            lambda: api.page()("dovetail_node_duration_seconds_count", handler="plain") == 6,
            "how long they took",
        )
        receiver.wait(lambda: len(receiver.trace(trace_id)) == 9, "a trigger, a run, seven nodes")
        spans = receiver.trace(trace_id)
        pool = {span.pid for span in spans if span.service == "dovetail-worker"}
        assert worker.pid not in pool
        assert len({span.span_id for span in spans}) == 9
        assert SECRET not in services.logs()
        services.end(worker)
        assert '"it broke"' in services.log(worker)
    finally:
        services.close()
