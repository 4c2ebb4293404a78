"""A DAG inside one Celery task, with real prefork workers on a real Redis."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, _state, chain
from celery.exceptions import NotRegistered

from dovetail import InvalidDefinition, NotFound, StoreError, WorkflowDAG, WorkflowResult, executor
from dovetail.celery import (
    DagGroup,
    DagRefused,
    configure,
    dag_registry,
    register_dag,
    register_handlers,
    run_dag,
    run_dag_group,
    task,
)
from dovetail.celery import task as runner
from dovetail.engine.limits import LATENESS
from dovetail.handlers.registry import HandlerError
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.limits import RedisLimits

from ..servers.redis_server import RedisServer

HERE = Path(__file__).parent
PATIENCE = 60.0
CONDITION = "{{ params.who == 'Bad' }}"
GREET = {
    "name": "greet",
    "params": {"type": "object", "properties": {"who": {"type": "string", "default": "you"}}},
    "nodes": [
        {"id": "loud", "handler": "shout", "config": {"text": "hello {{ params.who }}"}},
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["loud"],
            "config": {"said": "{{ loud.text }}"},
        },
    ],
}


@pytest.fixture(scope="module")
def flows(redis_server: RedisServer, tmp_path_factory: Any) -> Iterator[ModuleType]:
    """The team's module, with a worker of two processes at its queue."""
    redis_server.flush()
    os.environ["FLOWS_BROKER"] = redis_server.url
    spec = importlib.util.spec_from_file_location("celery_flows", HERE / "celery_flows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.app.set_default()
    module.app.set_current()
    log = tmp_path_factory.mktemp("worker") / "log"
    words = ["-A", "celery_flows", "worker", "-c", "2", "--without-gossip", "--without-mingle"]
    with log.open("wb") as out:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", *words], cwd=HERE, stdout=out, stderr=out
        )
    try:
        assert run(module.documents, {"doc_id": 0}).status == "COMPLETED", log.read_text()
        yield module
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()
        module.app.close()
        _state.set_default_app(None)
        _state._set_current_app(None)
        dag_registry._dags.clear()
        dag_registry._handlers.clear()
        dag_registry.known_handlers.cache_clear()
        dag_registry.compiled.cache_clear()
        del os.environ["FLOWS_BROKER"]


@pytest.fixture
def key() -> str:
    return uuid4().hex


def run(dag: Any, context: dict[str, Any] | None = None, **options: Any) -> WorkflowResult:
    sent = run_dag.apply_async((dag, context), **options)
    return WorkflowResult.from_dict(sent.get(timeout=PATIENCE))


def noted(flows: ModuleType, what: str) -> list[str]:
    with flows.seen() as connection:
        return connection.lrange(f"seen:{what}", 0, -1)


def awaited(flows: ModuleType, what: str, count: int) -> list[str]:
    until = time.monotonic() + PATIENCE
    while len(found := noted(flows, what)) < count:
        assert time.monotonic() < until, f"{what}: {found}"
        time.sleep(0.02)
    return found


class TestSentDags:
    def test_a_registered_graph_of_functions_runs_in_a_worker(self, flows: ModuleType) -> None:
        result = run(flows.documents, {"doc_id": 7})
        assert (result.status, result.completed, result.skipped) == ("COMPLETED", 3, 0)
        assert result.outputs["save"] == "7.json"
        assert result.steps["review"].output == "somebody looks"
        assert 0 < result.steps["extract"].duration <= result.duration

    def test_a_dag_by_name_and_a_dag_built_for_its_context_run_in_a_worker(
        self, flows: ModuleType
    ) -> None:
        assert run("documents", {"doc_id": 2}).skipped == 1
        assert run(flows.fan, {"width": 3}).outputs == {"n0": 0, "n1": 10, "n2": 20}

    def test_a_definition_runs_with_the_handlers_of_the_team(
        self, flows: ModuleType, tmp_path: Path
    ) -> None:
        sent = run_dag.delay(GREET, {"who": "Ada"})
        reported = sent.get(timeout=PATIENCE)
        assert reported["outputs"]["end"] == {"said": "HELLO ADA"}
        assert reported["outputs"]["loud"]["key"] == f"{sent.id}:loud:1", "equal at every delivery"
        text = "name: one\nnodes:\n  - {id: a, handler: shout, config: {text: x}}\n"
        assert run(text).outputs["a"]["text"] == "X"
        (tmp_path / "one.yaml").write_text(text)
        assert run(tmp_path / "one.yaml").outputs["a"]["text"] == "X"
        assert run(str(tmp_path / "one.yaml")).outputs["a"]["text"] == "X"

    def test_a_definition_with_an_allowed_failure_completes(self, flows: ModuleType) -> None:
        definition = {
            "name": "allowed",
            "nodes": [
                {"id": "fetch", "handler": "fail", "allow_failure": True},
                {
                    "id": "report",
                    "handler": "output",
                    "dependencies": ["fetch"],
                    "config": {"why": "{{ fetch.status }}"},
                },
            ],
        }
        result = run(definition)
        assert (result.status, result.completed, result.failed) == ("COMPLETED", 1, 1)
        assert result.outputs == {"report": {"why": "FAILED"}}

    def test_run_dag_is_an_ordinary_task_in_a_canvas(self, flows: ModuleType, key: str) -> None:
        for begin in (run_dag.s(flows.documents, {"doc_id": 7}), run_dag.si(dag=GREET)):
            chain(begin, flows.count_completed.s(key)).apply_async()
        assert sorted(awaited(flows, f"completed:{key}", 2)) == ["2", "3"]

    def test_an_output_that_is_not_json_stays_in_the_process(self, flows: ModuleType) -> None:
        reported = run_dag.delay("opaque").get(timeout=PATIENCE)
        assert reported["outputs"] == {"count": 3}
        assert reported["steps"]["load"]["status"] == "COMPLETED"
        assert reported["steps"]["load"]["output"] is None
        assert "is not a JSON value" in reported["withheld"]["load"]

    @pytest.mark.parametrize(
        ("dag", "context", "kind", "says"),
        [
            ("dokuments", None, "not_found", "did you mean 'documents'"),
            (GREET, {"who": 7}, "invalid_params", "who"),
            (
                {"name": "x", "nodes": [{"id": "a", "handler": "shoot"}]},
                None,
                "invalid_definition",
                "shout",
            ),
            ("documents", [1], "refused", "context is a JSON object"),
            ("fan", {}, None, "width"),
        ],
    )
    def test_a_dag_that_cannot_run_fails_the_task_with_a_reason(
        self, flows: ModuleType, dag: Any, context: Any, kind: str | None, says: str
    ) -> None:
        with pytest.raises(Exception, match=says) as caught:
            run(dag, context)
        if kind is not None:
            assert isinstance(caught.value, DagRefused)
            assert caught.value.type == kind


class TestFailures:
    def test_a_failed_dag_is_a_result_and_is_not_retried(self, flows: ModuleType, key: str) -> None:
        before = len(noted(flows, "failed"))
        sent = run_dag.delay(flows.failing, {"key": key})
        result = WorkflowResult.from_dict(sent.get(timeout=PATIENCE))
        assert sent.state == "SUCCESS"
        counts = (result.completed, result.failed, result.skipped)
        assert (result.status, counts) == ("FAILED", (1, 1, 1))
        assert result.error is not None
        assert (result.error["node"], result.error["message"]) == ("bad", "broken")
        assert result.steps["below"].error == "Dependency failed"
        assert len(noted(flows, "failed")) == before + 1

    @pytest.mark.parametrize("failures", [2, 9])
    def test_infrastructure_errors_are_retried_three_times(
        self, flows: ModuleType, key: str, failures: int
    ) -> None:
        sent = run_dag.delay("shaky", {"key": key, "failures": failures})
        if failures == 2:
            assert sent.get(timeout=PATIENCE)["outputs"] == {"only": "done"}
        else:
            with pytest.raises(ConnectionError, match="catalogue"):
                sent.get(timeout=PATIENCE)
        with flows.seen() as connection:
            assert int(connection.get(f"made:{key}")) == min(failures + 1, 4)

    def test_a_dag_that_kills_its_process_fails_and_the_others_end(self, flows: ModuleType) -> None:
        group = run_dag_group("mortal", [{}, {"die": True}, {}])
        reported = group.wait(PATIENCE)
        assert reported.counts == {"COMPLETED": 2, "FAILED": 1}
        assert reported.failures[1]["type"] == "worker_lost"

    @pytest.mark.parametrize("deaths", [1, 2, 9])
    def test_a_dag_whose_process_is_killed_restarts_up_to_the_crash_limit(
        self, flows: ModuleType, key: str, deaths: int
    ) -> None:
        result = run("unlucky", {"key": key, "deaths": deaths})
        with flows.seen() as connection:
            assert int(connection.get(f"starts:{key}")) == min(deaths + 1, 3)
        if deaths < 3:
            assert result.outputs == {"only": deaths + 1}
        else:
            assert result.error is not None
            assert result.error["type"] == "worker_lost"
            assert "DOVETAIL_MAX_CRASHES" in result.error["message"]

    def test_a_result_is_resumed_by_another_task(self, flows: ModuleType, key: str) -> None:
        first = run_dag.delay(flows.failing, {"key": key}).get(timeout=PATIENCE)
        first["outputs"]["good"] = "kept"
        again = run_dag.delay(flows.failing, {"key": key}, resume=first).get(timeout=PATIENCE)
        assert again["outputs"] == {"good": "kept"}
        assert again["steps"]["good"]["duration"] == 0.0
        first["outputs"] = {"bad": "mended", "good": "kept"}
        last = run_dag.delay(flows.failing, resume=WorkflowResult.from_dict(first))
        reported = last.get(timeout=PATIENCE)
        assert (reported["status"], reported["failed"]) == ("COMPLETED", 0)

    def test_a_definition_is_resumed_by_another_task(self, flows: ModuleType) -> None:
        first = run_dag.delay(GREET, {"who": "Ada"}).get(timeout=PATIENCE)
        first["outputs"] = {"loud": {"text": "KEPT"}}
        reported = run_dag.delay(GREET, resume=first).get(timeout=PATIENCE)
        assert reported["outputs"]["end"] == {"said": "KEPT"}

    @pytest.mark.parametrize("resume", [{}, {"status": "ODD"}, {"status": 5}])
    def test_an_invalid_resume_value_is_refused_with_a_hint(
        self, flows: ModuleType, resume: dict[str, Any]
    ) -> None:
        with pytest.raises(DagRefused, match="what run_dag answered"):
            run_dag.delay(GREET, resume=resume).get(timeout=PATIENCE)


class TestTimeLimits:
    def test_the_time_limits_are_those_of_the_contract(self, flows: ModuleType) -> None:
        found = flows.app.tasks["dovetail.run_dag"]
        assert (found.soft_time_limit, found.time_limit, found.max_retries) == (270, 300, 3)
        assert found.acks_late
        assert found.reject_on_worker_lost
        assert found.track_started

    def test_an_app_has_the_configuration_of_the_design(self) -> None:
        app = Celery("theirs", set_as_current=False)
        assert configure(app) is app
        conf = app.conf
        assert (conf.task_time_limit, conf.task_soft_time_limit) == (300, 270)
        assert (conf.task_acks_late, conf.task_reject_on_worker_lost) == (True, True)
        assert (conf.worker_prefetch_multiplier, conf.task_track_started) == (1, True)
        assert (conf.task_serializer, conf.accept_content) == ("json", ["json"])

    def test_a_dag_that_exceeds_its_soft_limit_is_stopped_and_keeps_its_outputs(
        self, flows: ModuleType, key: str
    ) -> None:
        result = run("slow", {"key": key}, soft_time_limit=1, time_limit=30)
        assert (result.status, result.outputs) == ("FAILED", {"quick": "kept"})
        assert result.error == {
            "type": "timeout",
            "message": "did not finish within 1 s (the task's soft time limit)",
        }
        assert result.steps["slow"].status == result.steps["never"].status == "CANCELLED"
        assert noted(flows, f"ended:{key}") == ["cancelled"]

    def test_a_plain_handler_is_asked_to_stop(self, flows: ModuleType, key: str) -> None:
        dag = {"name": "d", "nodes": [{"id": "a", "handler": "dawdle"}]}
        result = run(dag, {"key": key}, soft_time_limit=1, time_limit=30)
        assert result.error is not None
        assert result.error["type"] == "timeout"
        assert awaited(flows, f"ended:{key}", 1) == ["asked to stop"]

    def test_one_that_cannot_be_stopped_is_reported_before_the_hard_limit(
        self, flows: ModuleType
    ) -> None:
        result = run("blocking", soft_time_limit=1, time_limit=5)
        assert (result.status, result.steps) == ("FAILED", {})
        assert result.error is not None
        assert result.error["type"] == "timeout"


class TestRates:
    async def test_all_processes_share_one_rate_limit(self, flows: ModuleType, key: str) -> None:
        rate, dags = 10, 2
        async with PipelinedRedis(os.environ["FLOWS_BROKER"]) as pipe:
            await RedisLimits(pipe).set("slow_api", rate, 1)
        items = [{"key": key, "parties": dags}] * dags
        began = time.time()  # before the first, which a busy machine may start late
        reported = run_dag_group(flows.limited, items).wait(PATIENCE)
        assert reported.counts == {"COMPLETED": dags}
        assert len(set(noted(flows, f"met:{key}"))) == dags, "each in a process of its own"
        starts = sorted(map(float, noted(flows, f"starts:{key}")))
        assert len(starts) == 12
        assert starts[-1] - began >= (len(starts) - 1) / rate - LATENESS - 0.005

    def test_without_redis_rate_limits_hold_per_process_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(task, "redis_of", lambda app: None)
        runner._warn_once.cache_clear()
        starts: list[float] = []
        dag = WorkflowDAG("here")
        for place in range(3):
            dag.add_step(f"n{place}", lambda ctx: starts.append(time.monotonic()), resource_tag="x")
        began = time.monotonic()
        for _ in range(2):
            assert run_dag(dag)["status"] == "COMPLETED"
        assert max(starts) - began >= 5 / 10 - LATENESS - 0.005, "the default, for both"
        assert caplog.text.count("set DOVETAIL_REDIS_URL") == 1

    def test_an_unreachable_redis_is_an_infrastructure_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(task, "redis_of", lambda app: "redis://localhost:1")
        dag = WorkflowDAG("away").add_step("a", lambda ctx: 1, resource_tag="x")
        with pytest.raises(StoreError, match="cannot be reached"):
            run_dag(dag)
        assert run_dag(WorkflowDAG("untagged").add_step("a", lambda ctx: 1))["completed"] == 1


class TestGroups:
    def test_a_group_has_the_results_of_its_dags_in_their_order(self, flows: ModuleType) -> None:
        definition = {
            **GREET,
            "on_failure": "continue",
            "nodes": [*GREET["nodes"], {"id": "odd", "handler": "fail", "condition": CONDITION}],
        }
        items: list[dict[str, Any]] = [{"who": "Ada"}, {"who": "Bad"}, {"who": 7}, {}]
        group = run_dag_group(definition, items)
        reported = DagGroup(group.id, group.task_ids).wait(PATIENCE)  # as another process would
        assert reported.counts == {"COMPLETED": 2, "FAILED": 2}
        said = [one and one.outputs.get("end", {}).get("said") for one in reported.results]
        assert said == ["HELLO ADA", "HELLO BAD", None, "HELLO YOU"]
        assert {place: error["type"] for place, error in reported.failures.items()} == {
            1: "RuntimeError",
            2: "invalid_params",
        }
        assert reported.failures[1]["node"] == "odd"
        assert reported.duration == sum(one.duration for one in reported.results if one) > 0

    def test_one_without_a_worker_does_not_hide_the_others(self, flows: ModuleType) -> None:
        one, lost = (
            run_dag_group("documents", [{"doc_id": 1}], **to) for to in ({}, {"queue": "nobody"})
        )
        one.wait(PATIENCE)
        both = DagGroup("both", one.task_ids + lost.task_ids)
        with pytest.raises(TimeoutError, match=r"1 of 2 DAGs have ended within 0\.2 s"):
            both.wait(0.2)
        reported = both.collect()
        assert reported.counts == {"COMPLETED": 1, "PENDING": 1}
        assert reported.results[0] is not None
        assert reported.results[1] is None
        assert reported.failures == {}

    def test_a_revoked_dag_is_cancelled(self, flows: ModuleType, key: str) -> None:
        group = run_dag_group("slow", [{"key": key}])
        awaited(flows, f"began:{key}", 1)
        group.revoke(terminate=True)
        reported = group.wait(PATIENCE)
        assert reported.counts == {"CANCELLED": 1}
        assert reported.failures[0]["type"] == "revoked"

    def test_an_empty_group_has_nothing_to_wait_for(self) -> None:
        reported = run_dag_group("documents", []).wait(1)
        assert (reported.results, reported.counts, reported.duration) == ([], {}, 0)


class TestRefusalsBeforeSending:
    """What the caller learns at once; nothing of it reaches a queue."""

    def test_a_graph_that_is_unknown_to_workers_is_refused(self) -> None:
        dag = WorkflowDAG("mine").add_step("a", print)
        for send in (run_dag.delay, run_dag.s, lambda dag: run_dag_group(dag, [{}])):
            with pytest.raises(DagRefused, match="call register_dag"):
                send(dag)

    @pytest.mark.parametrize("text", ["os:system", "name: x", "{", "- 1", "a/b.yml: 1"])
    def test_a_text_is_a_definition_and_never_names_code(self, text: str) -> None:
        with pytest.raises(InvalidDefinition):
            run_dag.delay(text)

    def test_all_problems_of_a_definition_are_reported(self, tmp_path: Path) -> None:
        nodes = [{"id": "a", "handler": "x", "dependencies": ["b"]}, {"id": "a", "handler": "x"}]
        with pytest.raises(InvalidDefinition) as caught:
            run_dag.s({"name": "x", "nodes": nodes})
        assert {p.code for p in caught.value.problems} == {"missing_dependency", "duplicate_id"}
        with pytest.raises(InvalidDefinition, match="JSON"):
            run_dag.s({"name": "x", "nodes": [{"id": "a", "handler": "x", "config": {"a": {1}}}]})
        with pytest.raises(InvalidDefinition, match="at most 1,048,576 are allowed") as caught:
            run_dag.s({**GREET, "description": "x" * (1 << 20)})
        assert [p.code for p in caught.value.problems] == ["too_large"]
        with pytest.raises(NotFound, match="no file"):
            run_dag.s(tmp_path / "nothing.yaml")
        with pytest.raises(TypeError, match="not int"):
            run_dag.s(7)

    def test_at_most_once_is_refused(self) -> None:
        node = {"id": "pay", "handler": "x", "delivery": "at_most_once"}
        with pytest.raises(InvalidDefinition, match="'pay' is at_most_once") as caught:
            run_dag_group({"name": "x", "nodes": [node]}, [{}])
        assert caught.value.problems[0].path == "nodes[0].delivery"

    def test_two_graphs_with_one_name_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dag_registry, "_dags", {})
        dag = register_dag(WorkflowDAG("twice"))
        assert register_dag(dag) is dag
        with pytest.raises(ValueError, match="another DAG 'twice'"):
            register_dag(WorkflowDAG("twice"))
        register_dag(WorkflowDAG("twice"), name="second")
        with pytest.raises(ValueError, match="cannot name a DAG"):
            register_dag(WorkflowDAG("a b"))

    def test_a_function_that_is_no_handler_is_refused(self) -> None:
        with pytest.raises(HandlerError, match="decorate it"):
            register_handlers(print)


class TestResultBackend:
    """Of apps of its own: the backend that a team has chosen is the one that is used."""

    @pytest.mark.parametrize(
        ("given", "class_name"),
        [
            ({"broker": "redis://a"}, "RedisBackend"),
            ({"broker": "redis+socket:///a.sock?virtual_host=3"}, "RedisBackend"),
            ({"broker": "amqp://a"}, "DisabledBackend"),
            ({"broker": "redis://a", "backend": "rpc://"}, "RPCBackend"),
            ({"broker": "redis://a", "backend": "disabled://"}, "DisabledBackend"),
        ],
    )
    def test_results_go_to_redis_unless_the_app_has_a_backend(
        self, given: dict[str, str], class_name: str
    ) -> None:
        with Celery("other", set_as_current=False, **given) as app:
            found = app.tasks["dovetail.run_dag"]
            assert type(found.backend).__name__ == class_name
            if class_name == "RedisBackend":
                assert type(app.backend).__name__ == "DisabledBackend", "for its other tasks"

    @pytest.mark.parametrize(
        ("broker", "url"),
        [
            ("redis://h:1/2", "redis://h:1/2"),
            ("rediss://h:1/2;redis://second", "rediss://h:1/2"),
            ("redis+socket:///run/r.sock?virtual_host=3", "unix:///run/r.sock?db=3"),
            ("amqp://h", None),
            ("sentinel://h", None),
        ],
    )
    def test_the_broker_is_shared_if_it_is_redis(self, broker: str, url: str | None) -> None:
        conf = SimpleNamespace(broker_read_url=None, broker_url=broker)
        assert task.redis_of(SimpleNamespace(conf=conf)) == url

    def test_every_app_has_the_task_after_the_module_is_imported(self) -> None:
        with Celery("later", set_as_current=False) as app:
            assert "dovetail.run_dag" in app.tasks
            with pytest.raises(NotRegistered):
                app.tasks["dovetail.nothing"]


def test_a_dag_in_a_task_is_reported_when_it_has_ended(
    flows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(executor, "_ended_run_listeners", [ended.append])
    assert run_dag.apply(args=(flows.documents, {"doc_id": 1})).get()["status"] == "COMPLETED"
    assert [(one.graph.name, one.status) for one in ended] == [(flows.documents.name, "COMPLETED")]
