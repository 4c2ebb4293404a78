"""An example for every call: what is sent, and what comes back.

They are part of the OpenAPI document and of `/docs`; the tests hold each against its schema, and
send those that can be sent. What it must not know: how a call is answered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

RUN = "3f9a51c20b7e4d6f8a1c5e7092b4d6f8"
BATCH = "b7e4d6f83f9a51c28a1c5e7092b4d6f8"
AT = "2026-11-16T06:07:54.123456Z"
STARTED = "2026-11-16T06:07:54.125000Z"
ENDED = "2026-11-16T06:07:54.137500Z"

DEFINITION = {
    "name": "greet",
    "params": {"type": "object", "required": ["who"], "properties": {"who": {"type": "string"}}},
    "nodes": [
        {"id": "start", "handler": "input"},
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["start"],
            "config": {"text": "Hello {{ start.who }}"},
        },
    ],
}
_ALIASES = {"latest": 2, "stable": 1}
_TRIGGERED = {
    "run_id": RUN,
    "status": "PENDING",
    "workflow": "greet",
    "version": 2,
    "created_at": AT,
}
_SUMMARY = {
    "run_id": RUN,
    "workflow": "greet",
    "version": 2,
    "status": "COMPLETED",
    "epoch": 1,
    "params": {"who": "Ada"},
    "created_at": AT,
    "started_at": STARTED,
    "finished_at": ENDED,
    "duration": 0.0125,
    "error": None,
    "result": {"text": "Hello Ada"},
}
_NODE = {
    "id": "end",
    "handler": "output",
    "status": "COMPLETED",
    "attempt": 1,
    "epoch": 1,
    "dependencies": ["start"],
    "reason": None,
    "cause": None,
    "error": None,
    "started_at": STARTED,
    "finished_at": ENDED,
    "duration": 0.0125,
    "worker": "host-4711",
    "output": {"text": "Hello Ada"},
}
_LARGE_OUTPUT = {
    "$output": {"size": 912345, "href": f"/api/v1/runs/{RUN}/nodes/fetch/output"},
}
_LARGE = {
    **_NODE,
    "id": "fetch",
    "handler": "call_external_service",
    "dependencies": [],
    "output": _LARGE_OUTPUT,
}
_RUN = {**_SUMMARY, "nodes": [_NODE, _LARGE]}
_RUNNING = {
    **_RUN,
    "status": "RUNNING",
    "epoch": 2,
    "finished_at": None,
    "duration": None,
    "result": None,
}
_BATCH = {
    "batch_id": BATCH,
    "workflow": "greet",
    "count": 2,
    "counts": {"COMPLETED": 2},
    "created_at": AT,
    "finished_at": ENDED,
    "runs": [{"index": 0, "run_id": RUN, "status": "COMPLETED"}],
    "next_cursor": "1",
}
_LIMIT = {"tag": "search_api", "rate_per_second": 10.0, "burst": 1}
_WORKER = {
    "worker_id": "host-4711",
    "host": "host",
    "pid": 4711,
    "started_at": AT,
    "last_heartbeat": ENDED,
    "handlers": ["input", "output"],
    "running": 0,
    "concurrency": 32,
    "alive": True,
}
_ITEMS = [{"who": "Ada"}, {"who": "Grace"}]


class Example(NamedTuple):
    answer: Any
    """What is sent back with the first of the 2xx statuses that has a body."""
    body: Any = None
    other: Any = None
    """Of its other 2xx status, where that is something else."""


EXAMPLES = {
    "POST /workflows": Example({"name": "greet", "version": 1, "created": True}, DEFINITION),
    "POST /workflows/validate": Example(
        {"valid": True, "errors": [], "warnings": [], "layers": [["start"], ["end"]]}, DEFINITION
    ),
    "GET /workflows": Example(
        {
            "items": [
                {
                    "name": "greet",
                    "latest_version": 2,
                    "aliases": _ALIASES,
                    "created_at": AT,
                    "updated_at": AT,
                }
            ],
            "next_cursor": None,
        }
    ),
    "GET /workflows/{name}": Example(
        {
            "name": "greet",
            "version": 2,
            "definition": DEFINITION,
            "aliases": _ALIASES,
            "created_at": AT,
        }
    ),
    "GET /workflows/{name}/versions": Example(
        {"items": [{"version": 2, "sha256": "9f86d081884c7d65" * 4, "created_at": AT}]}
    ),
    "PUT /workflows/{name}/aliases/{alias}": Example(
        {"name": "greet", "alias": "stable", "version": 1}, {"version": 1}
    ),
    "POST /workflows/{name}/runs": Example(_TRIGGERED, {"params": {"who": "Ada"}}),
    "POST /runs": Example(
        {**_TRIGGERED, "version": None}, {"definition": DEFINITION, "params": {"who": "Ada"}}
    ),
    "GET /runs": Example({"items": [_SUMMARY], "next_cursor": "17"}),
    "GET /runs/{run_id}": Example(_RUN),
    "GET /runs/{run_id}/results": Example(
        {
            "status": "COMPLETED",
            "result": {"text": "Hello Ada"},
            "outputs": {"fetch": _LARGE_OUTPUT, "end": {"text": "Hello Ada"}},
        }
    ),
    "GET /runs/{run_id}/result": Example({"text": "Hello Ada"}),
    "GET /runs/{run_id}/nodes/{node_id}/output": Example({"text": "Hello Ada"}),
    "GET /runs/{run_id}/explain": Example(
        {
            "run_id": RUN,
            "status": "RUNNING",
            "nodes": [
                {
                    "id": "fetch",
                    "status": "QUEUED",
                    "code": "rate_limited",
                    "why": "parked by rate limit 'search_api', about 9 s",
                    "details": {"resource_tag": "search_api", "until": AT, "seconds": 9.1},
                },
                {
                    "id": "end",
                    "status": "PENDING",
                    "code": "waiting_for_parents",
                    "why": "waits for parent fetch",
                    "details": {"parents": ["fetch"]},
                },
            ],
            "damage": [],
        }
    ),
    "GET /runs/{run_id}/verify": Example({"run_id": RUN, "divergences": []}),
    "POST /runs/{run_id}/repair": Example(
        {
            "run_id": RUN,
            "differences": ["node 'b' is kept with status COMPLETED, the log makes it QUEUED"],
            "repaired": True,
        },
        {},
    ),
    "GET /run-ids/{beginning}": Example({"run_id": RUN}),
    "POST /runs/{run_id}/retry": Example(
        _RUNNING, {"from": "end"}, {"rerun": ["end"], "reuse": ["start"]}
    ),
    "POST /runs/{run_id}/cancel": Example({**_RUNNING, "epoch": 1, "status": "CANCELLED"}, {}),
    "GET /runs/{run_id}/events": Example(
        [
            {
                "seq": 8,
                "time": ENDED,
                "type": "node.completed",
                "epoch": 1,
                "node": "end",
                "attempt": 1,
            },
            {"seq": 9, "time": ENDED, "type": "run.completed", "epoch": 1},
        ]
    ),
    "POST /workflows/{name}/batches": Example({"batch_id": BATCH, "count": 2}, {"items": _ITEMS}),
    "POST /batches": Example(
        {"batch_id": BATCH, "count": 2}, {"definition": DEFINITION, "items": _ITEMS}
    ),
    "GET /batches/{batch_id}": Example(_BATCH),
    "POST /batches/{batch_id}/retry": Example(_BATCH, {}),
    "GET /rate-limits": Example({"items": [_LIMIT]}),
    "GET /rate-limits/{tag}": Example(_LIMIT),
    "PUT /rate-limits/{tag}": Example(_LIMIT, {"rate_per_second": 10, "burst": 1}),
    "GET /workers": Example({"items": [_WORKER]}),
    "GET /dead-letters": Example(
        {
            "items": [
                {
                    "time": AT,
                    "stream": "wf:stream:results",
                    "id": "1763273274123-0",
                    "reason": "no token",
                    "fields": {"run_id": RUN},
                }
            ]
        }
    ),
    "GET /health/live": Example({"status": "ok"}),
    "GET /health/ready": Example({"status": "ok"}),
    "GET /health/workers": Example({"alive": 1, "dead": 0}),
}

PARAMETERS = {
    "name": ("a workflow's name", "greet"),
    "alias": ("a name for a version", "stable"),
    "run_id": ("the id of a run", RUN),
    "node_id": ("the id of a node", "end"),
    "beginning": ("at least 4 characters of a run's id", RUN[:6]),
    "batch_id": ("the id of a batch", BATCH),
    "tag": ("a `resource_tag`", "search_api"),
}
"""What each name in a path is, and an example of it."""
