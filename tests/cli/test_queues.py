"""`dovetail queues` and `dovetail dead-letters`: on a file, on Redis and on a server."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from typing import Any

import pytest
from redis import Redis

from .conftest import SECONDS, Shell
from .test_server import Command, Served, node, on, server, write

__all__ = ["on", "server"]


def shown(call: Command, words: str) -> str:
    """What `dovetail queues` prints once it has these words."""
    give_up = time.monotonic() + SECONDS
    while words not in (said := call("queues").out):
        assert time.monotonic() < give_up, said
        time.sleep(0.05)
    return said


def test_what_runs_and_waits_on_a_server_is_shown(
    on: Command, server: Served, shell: Shell
) -> None:
    on("workflows", "register", write(shell, "w-q", node("a", "sleep", seconds=60)))
    run_id = json.loads(on("trigger", "w-q", "--json").out)["run_id"]
    said = shown(on, run_id[:6])
    assert "no node waits for a worker" in said
    assert "w-q" in said
    reply = json.loads(on("queues", "--json").out)
    assert reply.keys() == server.get("/queues").keys()
    assert [one["node"] for one in reply["running"]] == ["a"]
    on("runs", "cancel", run_id)


def test_dead_letters_are_listed_requeued_and_dropped_on_redis(
    command: Command, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_REDIS_URL", redis_url)
    assert command("dead-letters", "list").out == "there are no dead letters\n"
    with Redis.from_url(redis_url) as store:
        for number in range(2):
            letter = {"stream": "tasks:x", "id": f"1-{number}", "reason": "crashed 3 workers"}
            letter |= {"fields": {"run_id": "f" * 32} if number else {}, "time": time.time()}
            store.lpush("wf:dead", json.dumps(letter))
    items: list[Any] = json.loads(command("dead-letters", "list", "--json").out)["items"]
    named, nameless = [one["letter_id"] for one in items]
    said = command("dead-letters", "list").out
    assert named in said
    assert "ffffff" in said
    refused = command("dead-letters", "requeue", named, nameless)
    assert refused.code == 1
    assert "the run that this letter names is not there any more" in refused.err
    assert "names no run" in refused.err
    dropped = command("dead-letters", "drop", named, nameless, "nothing")
    assert dropped.code == 1
    assert dropped.out.splitlines() == [f"dropped {named}", f"dropped {nameless}"]
    assert "there is no dead letter 'nothing'" in dropped.err
    assert json.loads(command("dead-letters", "list", "--json").out) == {"items": []}
    assert json.loads(command("queues", "--json").out)["complete"] is True


def test_a_file_has_its_queues_and_its_letters_too(command: Command, shell: Shell) -> None:
    two = [node(name, "sleep", seconds=60) for name in "ab"]
    shell.start("run", write(shell, "w", *two), DOVETAIL_CONCURRENCY="1")
    said = shown(command, "WORKER\n").splitlines()
    assert said[1].split() == ["sleep", "1", "1"]  # one waits, and one process has the handler
    assert said[-1].split()[1:4] == ["w", "a", "sleep"]
    file = shell.directory / ".dovetail" / "dovetail.db"
    letter = {"stream": "webhooks", "id": "m", "reason": "gone", "fields": {}, "time": 1.0}
    with closing(sqlite3.connect(file)) as connection, connection:
        row = (json.dumps(letter).encode(),)
        connection.execute("INSERT INTO dead_letters (content) VALUES (?)", row)
    (found,) = json.loads(command("dead-letters", "list", "--json").out)["items"]
    refused = command("dead-letters", "requeue", found["letter_id"])
    assert (refused.code, "is a notification" in refused.err) == (1, True)
    assert command("dead-letters", "drop", found["letter_id"]).code == 0
    assert command("dead-letters", "list").out == "there are no dead letters\n"
