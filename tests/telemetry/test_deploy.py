"""What is in deploy/ fits what is in src/: metrics, settings, ports, commands, times.

Nothing here starts a container: see docs/deploy.md for what was run and what was not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from dovetail.cli.app import app
from dovetail.config import Settings, env_name, load_settings
from dovetail.telemetry.counters import METRICS, Metric
from dovetail.wiring.embedded import redis_findings

from ..servers.binaries import find
from ..servers.redis_server import RedisServer
from ..servers.server import free_port
from .conftest import Three

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SERVICES = ("api", "orchestrator", "worker")
# The pipeline's own, as a handler's are.
DOCUMENT_METRICS = (
    Metric("documents_processed_total", "counter", ("status",), ""),
    Metric("processing_duration_seconds", "histogram", (), ""),
    Metric("extraction_confidence", "histogram", (), ""),
)
KNOWN = {metric.name: metric for metric in (*METRICS, *DOCUMENT_METRICS)}
SETTINGS = {env_name(name) for name in Settings.model_fields}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


# ── the dashboard ────────────────────────────────────────────────────────────────────────────

BOARD = json.loads((DEPLOY / "grafana" / "dovetail.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
_METRIC = re.compile(
    r"\b(dovetail_\w+|documents_\w+|processing_\w+|extraction_\w+|gen_ai_client_\w+)"
)
_PARTS = ("_bucket", "_count", "_sum")


def queries() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for document in documents(KUBERNETES / "autoscaling.yaml"):
        found += [trigger["metadata"]["query"] for trigger in document["spec"]["triggers"]]
    return found


def metric_of(word: str) -> str:
    """The metric that a word of a query belongs to."""
    for part in _PARTS:
        whole = word.removesuffix(part)
        if whole != word and whole in KNOWN and KNOWN[whole].kind == "histogram":
            return whole
    return word


@pytest.mark.parametrize("query", queries())
def test_every_query_names_a_metric_that_is_exported_and_its_labels(query: str) -> None:
    words = set(_METRIC.findall(query))
    assert len(words) == 1, f"one metric for each query: {query}"
    (word,) = words
    metric = KNOWN[metric_of(word)]
    grouped = [name for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(",")]
    filtered = re.findall(r"(\w+)\s*=~?\s*\"", query)
    labels = {name.strip() for name in (*grouped, *filtered)}
    assert labels <= {*metric.labels, *(["le"] if metric.kind == "histogram" else [])}
    # Each process counts for itself, and all of them see the same queue.
    if metric.kind == "gauge":
        assert re.search(rf"max( by \([^)]*\))? \({word}\)|max\({word}\)", query)
    else:
        assert re.search(rf"(rate|increase)\({word}", query)
    if metric.kind == "histogram":
        assert word.endswith("_bucket")


def test_a_query_of_an_unknown_metric_is_noticed() -> None:
    assert metric_of("dovetail_runs_started_total") not in KNOWN
    assert metric_of("dovetail_runs_total_bucket") not in KNOWN
    assert metric_of("dovetail_node_duration_seconds_bucket") in KNOWN


def test_the_dashboard_shows_every_metric() -> None:
    shown = {metric_of(word) for query in queries() for word in _METRIC.findall(query)}
    assert shown == set(KNOWN)


def test_grafana_can_lay_out_the_dashboard() -> None:
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
    for panel in PANELS:
        for target in panel["targets"]:
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= set(KNOWN[metric_of(_METRIC.findall(target["expr"])[0])].labels)


# ── the image ────────────────────────────────────────────────────────────────────────────────


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_slim_runs_not_as_root_and_has_a_health_check() -> None:
    made = instructions()
    assert all("-slim" in rest for word, rest in made if word == "FROM")
    assert [rest for word, rest in made if word == "USER"] == ["10001:10001"]
    last_stage = made[max(at for at, (word, _) in enumerate(made) if word == "FROM") :]
    words = [word for word, _ in last_stage]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "HEALTHCHECK" in words
    # In the form that is no shell: a shell would not pass SIGTERM on.
    assert json.loads(dict(last_stage)["ENTRYPOINT"]) == ["dovetail"]
    install = next(rest for word, rest in made if word == "RUN" and "run.txt" in rest)
    assert "--require-hashes" in install


def test_the_files_that_the_image_copies_exist_and_are_not_ignored() -> None:
    kept = [
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied: set[str] = set()
    for word, rest in instructions():
        if word == "COPY" and "--from" not in rest:
            copied.update(shlex.split(rest)[:-1])
    assert copied == set(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_sets_only_settings_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"DOVETAIL_\w+", text)) <= SETTINGS


def test_the_health_check_distinguishes_a_live_service_from_a_dead_one(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("healthcheck", DEPLOY / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    assert check.API_PORT == 8700
    monkeypatch.setattr(check, "API_PORT", free_port())
    monkeypatch.setenv("DOVETAIL_METRICS_PORT", str(three.worker_port))
    assert check.main() == 0
    monkeypatch.setenv("DOVETAIL_METRICS_PORT", str(free_port()))
    assert check.main() == 1
    monkeypatch.setenv("DOVETAIL_METRICS_PORT", "")
    monkeypatch.setattr(check, "API_PORT", int(three.api.url.rpartition(":")[2]))
    assert check.main() == 0


# ── compose ──────────────────────────────────────────────────────────────────────────────────

RULES = yaml.safe_load((DEPLOY / "rules.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def starts(words: list[str]) -> dict[str, Any]:
    """What the command line makes of these words, without doing it."""
    name, *rest = map(str, words)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, rest) as context:
        found: dict[str, Any] = context.params
        return found


@pytest.mark.parametrize("name", SERVICES)
def test_a_compose_service_is_a_command_with_existing_settings(name: str) -> None:
    service = COMPOSE[name]
    starts(service["command"])
    given = {k: str(v) for k, v in service["environment"].items() if k.startswith("DOVETAIL_")}
    assert set(given) <= SETTINGS
    filled = {k: re.sub(r"\$\{(\w+)[^}]*\}", r"\1", v) for k, v in given.items()}
    settings = load_settings(environ=filled, directory=DEPLOY)
    assert seconds(service["stop_grace_period"]) > settings.drain_seconds
    assert settings.tokens
    assert settings.database_url is not None
    assert set(service["depends_on"]) == {"redis", "postgres"}
    assert service["read_only"] is True


def test_the_ports_of_the_compose_file_agree() -> None:
    api = starts(COMPOSE["api"]["command"])
    assert COMPOSE["api"]["ports"] == [f"127.0.0.1:{api['port']}:{api['port']}"]
    exposed = dict(instructions())["EXPOSE"].split()
    metrics = COMPOSE["worker"]["environment"]["DOVETAIL_METRICS_PORT"]
    assert exposed == [str(api["port"]), metrics]
    first, second = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert first["static_configs"][0]["targets"] == [f"api:{api['port']}"]
    # It is asked by that name, which the API then has to answer to.
    assert "api" in COMPOSE["api"]["environment"]["DOVETAIL_ALLOWED_HOSTS"].split(",")
    (found,) = second["dns_sd_configs"]
    assert str(found["port"]) == metrics
    assert set(found["names"]) == {"orchestrator", "worker"}


async def test_the_redis_of_the_compose_file_passes_the_doctor() -> None:
    words = COMPOSE["redis"]["command"][1:]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    given = {name.removeprefix("--"): value for name, value in flags.items()}
    assert given["appendonly"] == "yes"
    with RedisServer(settings=given) as redis:
        found = await redis_findings(
            Settings(redis_url=redis.url, database_url="postgresql://localhost/x")
        )
    about = {one.check: one for one in found}
    for check in ("persistence", "eviction"):
        names = [name for name in about if check in name]
        assert names, sorted(about)
        assert all(about[name].ok for name in names), [about[name].message for name in names]


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────

# fmt: off
# What Kubernetes knows of the fields that are used here: one that is misspelt would be ignored.
FIELDS = {
    "pod": {"terminationGracePeriodSeconds", "automountServiceAccountToken", "securityContext",
            "containers", "volumes", "topologySpreadConstraints"},
    "container": {"name", "image", "args", "envFrom", "env", "ports", "startupProbe",
                  "livenessProbe", "readinessProbe", "resources", "securityContext",
                  "volumeMounts", "lifecycle"},
    "probe": {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"},
    "deployment": {"replicas", "selector", "strategy", "template"},
    "httpGet": {"path", "port", "httpHeaders"},
}
# fmt: on


def deployment(name: str) -> dict[str, Any]:
    (found,) = [d for d in documents(KUBERNETES / f"{name}.yaml") if d["kind"] == "Deployment"]
    return found


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = deployment(name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    (settings,) = documents(KUBERNETES / "settings.yaml")
    (named,) = [one["secretRef"] for one in container["envFrom"] if "secretRef" in one]
    secrets = documents(KUBERNETES / "secret.example.yaml")
    (secret,) = [one for one in secrets if one["metadata"]["name"] == named["name"]]
    own = {one["name"]: one.get("value", "10.0.0.1") for one in container.get("env", [])}
    whole = {**settings["data"], **secret["stringData"], **own}
    return {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in whole.items()}


def probes(container: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_pod_has_existing_settings_and_time_to_drain(name: str) -> None:
    spec, container = pod(name)
    given = environment_of(container)
    assert {key for key in given if key.startswith("DOVETAIL_")} <= SETTINGS
    settings = load_settings(environ=given, directory=DEPLOY)
    before = container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
    first = int(before["exec"]["command"][1]) + settings.shutdown_delay
    assert spec["terminationGracePeriodSeconds"] > first + settings.drain_seconds + 5
    assert settings.shutdown_delay == (5 if name == "api" else 0)
    assert starts(container["args"]) is not None
    assert settings.log_format == "json"


@pytest.mark.parametrize("name", SERVICES)
def test_the_probes_of_a_pod_use_ports_that_it_serves(name: str) -> None:
    _, container = pod(name)
    given = environment_of(container)
    (port,) = container["ports"]
    listens = starts(container["args"]).get("port", int(given["DOVETAIL_METRICS_PORT"]))
    assert port["containerPort"] == listens
    asked = [probe["httpGet"] for probe in probes(container)]
    assert [one["port"] for one in asked] == [port["name"]] * 3
    assert [one["path"] for one in asked] == ["/health/live", "/health/live", "/health/ready"]
    if name == "api":  # it answers only to names that it knows
        assert all(one["httpHeaders"] == [{"name": "Host", "value": "localhost"}] for one in asked)
        hosts = given["DOVETAIL_ALLOWED_HOSTS"].split(",")
        assert {"api", "api.dovetail.svc", "10.0.0.1"} <= set(hosts)
    notes = deployment(name)["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(listens)


@pytest.mark.parametrize("name", SERVICES)
def test_a_pod_has_only_known_fields_and_needed_permissions(
    name: str,
) -> None:
    spec, container = pod(name)
    assert deployment(name)["spec"].keys() <= FIELDS["deployment"]
    assert spec.keys() <= FIELDS["pod"]
    assert container.keys() <= FIELDS["container"]
    for probe in probes(container):
        assert probe.keys() <= FIELDS["probe"]
        assert probe["httpGet"].keys() <= FIELDS["httpGet"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert user == dict(instructions())["USER"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    labels = deployment(name)["spec"]["selector"]["matchLabels"].items()
    assert labels <= deployment(name)["spec"]["template"]["metadata"]["labels"].items()
    (budget,) = [
        d for d in documents(KUBERNETES / f"{name}.yaml") if d["kind"] == "PodDisruptionBudget"
    ]
    assert budget["spec"]["selector"]["matchLabels"].items() == labels


def test_the_kustomization_names_every_file_except_those_applied_by_hand() -> None:
    (whole,) = documents(KUBERNETES / "kustomization.yaml")
    by_hand = {"kustomization.yaml", "secret.example.yaml", "autoscaling.yaml", "alerts.yaml"}
    by_hand.add("migrate.yaml")
    files = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert set(whole["resources"]) == files - by_hand
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert [image["newTag"] for image in whole["images"]] == [version[1]]
    (job,) = documents(KUBERNETES / "migrate.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"dovetail:{version[1]}"
    assert COMPOSE["worker"]["image"] == f"dovetail:{version[1]}"


@pytest.mark.parametrize("name", SERVICES)
def test_pods_of_a_service_are_spread_over_zones_and_nodes(name: str) -> None:
    spec, _ = pod(name)
    labels = deployment(name)["spec"]["selector"]
    spread = spec["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == [
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    ]
    assert all(one["labelSelector"] == labels for one in spread)


def test_each_service_has_its_own_secret_with_only_the_values_that_it_needs() -> None:
    secrets = {
        one["metadata"]["name"].removeprefix("dovetail-"): one["stringData"]
        for one in documents(KUBERNETES / "secret.example.yaml")
    }
    assert set(secrets) == set(SERVICES)
    assert "DOVETAIL_DATABASE_URL" not in secrets["worker"]
    for name in ("orchestrator", "worker"):
        assert all(token.endswith(":read") for token in secrets[name]["DOVETAIL_TOKENS"].split(","))


def test_the_network_policy_opens_only_ports_of_pods() -> None:
    policies = {
        one["metadata"]["name"]: one["spec"] for one in documents(KUBERNETES / "network.yaml")
    }
    assert policies.pop("nothing") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    reached = {}
    for spec in policies.values():
        (rule,) = spec["ingress"]
        selector = spec["podSelector"]
        names = [selector["matchLabels"].get("app.kubernetes.io/component")]
        for expression in selector.get("matchExpressions", ()):
            names = expression["values"]
        reached |= {name: [port["port"] for port in rule["ports"]] for name in names}
    assert reached == {name: [one["name"] for one in pod(name)[1]["ports"]] for name in SERVICES}


def test_every_alert_uses_exported_metrics_and_has_a_summary() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    alerts = [rule for rule in rules if "alert" in rule]
    for rule in rules:
        words = set(re.findall(r"[a-z_:0-9]+", rule["expr"])) & recorded
        of_ours = {metric_of(word) for word in _METRIC.findall(rule["expr"])}
        assert words or of_ours, rule
        assert {one for one in of_ours if not any(one in word for word in recorded)} <= set(KNOWN)
    for rule in alerts:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    tested = yaml.safe_load((DEPLOY / "rules_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in alerts}, "each has a test in which it fires"


def test_kubernetes_has_the_same_rules() -> None:
    (rules,) = documents(KUBERNETES / "alerts.yaml")
    assert rules["spec"] == RULES


@pytest.mark.parametrize(
    "words",
    [
        ["check", "rules", "rules.yaml"],
        ["test", "rules", "rules_test.yaml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ],
)
def test_prometheus_accepts_the_rules_and_their_tests_pass(words: list[str]) -> None:
    promtool = find("promtool")
    done = subprocess.run(
        [promtool.path, *words],
        cwd=DEPLOY,
        env={**os.environ, **promtool.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workers_are_scaled_by_the_backlog_and_the_concurrency_of_a_worker() -> None:
    (scaled,) = documents(KUBERNETES / "autoscaling.yaml")
    target = scaled["spec"]["scaleTargetRef"]
    assert target["name"] == deployment("worker")["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    at_once = starts(pod("worker")[1]["args"])["concurrency"]
    assert int(trigger["metadata"]["threshold"]) == 2 * at_once
