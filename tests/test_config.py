"""Settings: their sources, their defaults, and what is said about a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path

import pytest

from dovetail.config import (
    OTHER_VARIABLES,
    RateLimit,
    Settings,
    SettingsError,
    env_name,
    load_settings,
    reference,
    unknown_variables,
)

DOCS = Path(__file__).parents[1] / "docs" / "settings.md"


def load(tmp_path: Path, toml: str = "", flags: dict | None = None, **environ: str) -> Settings:
    if toml:
        (tmp_path / "dovetail.toml").write_text(toml)
    given = {f"DOVETAIL_{name}": value for name, value in environ.items()}
    return load_settings(environ=given, directory=tmp_path, **(flags or {}))


def refused(tmp_path: Path, toml: str = "", flags: dict | None = None, **environ: str) -> str:
    with pytest.raises(SettingsError) as error:
        load(tmp_path, toml, flags, **environ)
    assert error.value.__cause__ is None
    return str(error.value)


def test_the_defaults_are_those_of_the_contract(tmp_path):
    settings = load(tmp_path)
    assert {
        name: getattr(settings, name)
        for name in Settings.model_fields
        if getattr(settings, name) not in (None, (), {})
    } == {
        "db": Path(".dovetail/dovetail.db"),
        "db_sync": "full",
        "accept_data_loss": False,
        "transport": "streams",
        "mock_latency": (0.0, 0.0),
        "concurrency": 32,
        "lease_seconds": 10.0,
        "heartbeat_interval": 5.0,
        "heartbeat_timeout": 15.0,
        "stale_result_timeout": 30.0,
        "stale_claim_interval": 15.0,
        "checkpoint_interval": 10.0,
        "recovery_timeout": 30.0,
        "max_crashes": 3,
        "drain_seconds": 30.0,
        "shutdown_delay": 0.0,
        "send_timeout": 30.0,
        "log_format": "console",
        "log_level": "INFO",
        "capture_output": True,
        "node_log_bytes": 1 << 20,
        "max_nodes": 10_000,
        "max_edges": 100_000,
        "max_body_bytes": 1 << 20,
        "max_nesting": 32,
        "max_template_bytes": 16 << 10,
        "max_config_bytes": 1 << 20,
        "max_output_bytes": 1 << 20,
        "max_input_bytes": 64 << 20,
        "max_run_bytes": 256 << 20,
        "run_log_bytes": 64 << 20,
        "max_backlog": 100_000,
        "max_connections": 4096,
        "max_waiting_reads": 2000,
        "max_reads": 1000,
        "max_writes": 1000,
        "max_large_bodies": 64,
        "caller_share": 0.5,
    }


CONTRACT = """
    DB DB_SYNC REDIS_URL DATABASE_URL TRANSPORT BROKER_URL TOKENS ALLOWED_HOSTS
    ALLOW_PRIVATE_ADDRESSES LLM_BASE_URL LLM_API_KEY LLM_MODEL LEASE_SECONDS HEARTBEAT_INTERVAL
    HEARTBEAT_TIMEOUT STALE_RESULT_TIMEOUT STALE_CLAIM_INTERVAL CHECKPOINT_INTERVAL RETENTION_DAYS
    ARCHIVE_RETENTION_DAYS RECOVERY_TIMEOUT METRICS_PORT MAX_CRASHES DRAIN_SECONDS LOG_FORMAT
    HANDLERS MOCK_LATENCY SERVER
"""


def test_every_variable_of_the_contract_is_known():
    known = set(map(env_name, Settings.model_fields))
    assert {f"DOVETAIL_{name}" for name in CONTRACT.split()} <= known


def test_a_flag_overrides_the_environment_and_the_environment_overrides_the_file(tmp_path):
    toml = "lease_seconds = 1\nmax_crashes = 1\nconcurrency = 1\n"
    settings = load(
        tmp_path, toml, {"concurrency": 3, "db": None}, CONCURRENCY="2", MAX_CRASHES="2"
    )
    assert (settings.lease_seconds, settings.max_crashes, settings.concurrency) == (1.0, 2, 3)
    assert settings.db == Path(".dovetail/dovetail.db")


def test_the_process_environment_and_directory_are_the_default_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOVETAIL_CONCURRENCY", "5")
    (tmp_path / "dovetail.toml").write_text("max_nodes = 7")
    settings = load_settings()
    assert (settings.concurrency, settings.max_nodes) == (5, 7)


def test_an_empty_variable_is_unset(tmp_path):
    assert load(tmp_path, REDIS_URL="", LEASE_SECONDS="  ").lease_seconds == 10.0


def test_lists_are_comma_separated(tmp_path):
    settings = load(
        tmp_path,
        'allowed_hosts = ["a.example", "b.example"]',
        HANDLERS="a.py, package.module,",
        TOKENS="one,two:read",
        ALLOW_PRIVATE_ADDRESSES="127.0.0.1/32, 10.0.0.0/8,::1",
    )
    assert settings.handlers == ("a.py", "package.module")
    assert settings.tokens == ("one", "two:read")
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.allow_private_addresses == (
        ip_network("127.0.0.1/32"), ip_network("10.0.0.0/8"), ip_network("::1/128"),
    )  # fmt: skip


def test_networks_may_be_a_list_in_the_file(tmp_path):
    settings = load(tmp_path, 'allow_private_addresses = ["10.0.0.0/8"]')
    assert settings.allow_private_addresses == (ip_network("10.0.0.0/8"),)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("0", (0, 0)), ("0.5", (0.5, 0.5)), ("1-2", (1, 2)), ("0-0.1", (0, 0.1)), (" 3 ", (3, 3))],
)
def test_mock_latency_is_a_time_or_a_range(tmp_path, text, bounds):
    assert load(tmp_path, MOCK_LATENCY=text).mock_latency == bounds


@pytest.mark.parametrize("text", ["2-1", "-1", "1-", "a", "nan", "inf", "1-2-3", "99999", "1 2"])
def test_mock_latency_refuses_other_values(tmp_path, text):
    said = refused(tmp_path, MOCK_LATENCY=text)
    assert said == (
        f"DOVETAIL_MOCK_LATENCY = {text!r}: must be seconds as in 0.5, or a range as in 1-2 "
        "(default: 0)"
    )


def test_mock_latency_may_be_given_as_bounds():
    assert Settings(mock_latency=(0.1, 0.2)).mock_latency == (0.1, 0.2)


@pytest.mark.parametrize("name", ["RETENTION_DAYS", "ARCHIVE_RETENTION_DAYS"])
@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "soon", "7d"])
def test_a_retention_time_without_meaning_is_refused_with_its_name(tmp_path, name, text):
    with pytest.raises(
        SettingsError, match=rf"DOVETAIL_{name} = '{text}': must be .*default: unset"
    ):
        load(tmp_path, **{name: text})


def test_a_retention_time_may_be_a_part_of_a_day_and_redis_has_a_default(tmp_path):
    assert load(tmp_path, RETENTION_DAYS="0.25").redis_retention_days == 0.25
    settings = load(tmp_path)
    assert (settings.retention_days, settings.archive_retention_days) == (None, None)
    assert settings.redis_retention_days == 7.0


def test_mock_latency_refuses_a_boolean(tmp_path):
    assert "mock_latency in dovetail.toml = True" in refused(tmp_path, "mock_latency = true")


def test_secrets_come_from_the_environment_with_their_names(tmp_path):
    settings = load(tmp_path, SECRET_API_KEY="hunter2", SECRET_lower="x", SECRET_="no name")
    assert settings.secrets == {"API_KEY": "hunter2", "lower": "x"}


def test_a_secret_is_bound_to_hosts_by_a_variable_that_is_not_secret(tmp_path):
    settings = load(
        tmp_path,
        SECRET_KEY="hunter2",
        SECRET_KEY_HOSTS="API.example.com., *.example.org,192.0.2.7,[2001:DB8::1],*",
        SECRET_HOSTS="a secret of that name",
        SECRET_OTHER_HOSTS=" ",
    )
    assert settings.secrets == {"KEY": "hunter2", "HOSTS": "a secret of that name"}
    assert settings.secret_hosts == {
        "KEY": ("api.example.com", "*.example.org", "192.0.2.7", "2001:db8::1", "*")
    }
    assert unknown_variables({"DOVETAIL_SECRET_KEY_HOSTS": "x"}) == {}


@pytest.mark.parametrize(
    "hosts",
    ["https://x.example", "x.example:443", "x.example/p", "a b", "*x.example", "a.*.b", "**",
     "ü.example", "user@x.example", ",", "x..y", "[::1]:80", "-,x/"],
)  # fmt: skip
def test_a_bound_host_must_be_a_bare_host_and_its_value_is_not_shown(tmp_path, hosts):
    with pytest.raises(SettingsError) as said:
        load(tmp_path, SECRET_KEY_HOSTS=hosts)
    assert str(said.value).startswith("DOVETAIL_SECRET_KEY_HOSTS (value not shown): ")
    assert "api.example.com" in str(said.value)
    assert f"'{hosts}'" not in str(said.value)


def test_secrets_are_refused_in_a_file(tmp_path):
    said = refused(tmp_path, '[secrets]\nA = "b"')
    assert "set DOVETAIL_SECRET_<NAME> instead" in said


def test_rate_limits_come_from_the_file(tmp_path):
    settings = load(
        tmp_path,
        "[rate_limits]\ngemini_api = {rate_per_second = 2.5, burst = 3}\nother = {}\n",
        RATE_LIMITS="ignored: a table has no spelling there",
    )
    assert settings.rate_limits == {
        "gemini_api": RateLimit(rate_per_second=2.5, burst=3),
        "other": RateLimit(rate_per_second=10.0, burst=1),
    }


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[rate_limits]\na = {rate_per_second = 0}", "rate_limits.a.rate_per_second in"),
        ("[rate_limits]\na = {burst = 0}", "a.burst in dovetail.toml: must be greater"),
        ("[rate_limits]\na = {burst = 1000000001}", "a.burst in dovetail.toml: must be less"),
        ("[rate_limits]\na = {rate_per_second = 1e10}", "a.rate_per_second in dovetail.toml: must"),
        ("[rate_limits]\na = {rate = 1}", "a.rate in dovetail.toml: Extra inputs are not"),
        ("rate_limits = 3", "rate_limits in dovetail.toml: must be a valid dictionary"),
        ("leas_seconds = 3", "unknown setting 'leas_seconds'; did you mean 'lease_seconds'?"),
        ("DOVETAIL_DB = 'x'", "did you mean 'db'?"),
        ("zzzzz = 3", "unknown setting 'zzzzz'; it knows: db, db_sync"),
        ("a = ", "dovetail.toml: not valid TOML: Invalid value (at"),
        ("lease_seconds = true", "lease_seconds in dovetail.toml = True: must be a number"),
        ("allowed_hosts = 3", "allowed_hosts in dovetail.toml = 3: must be a valid tuple"),
        ("allow_private_addresses = 3", "must be a valid tuple"),
        ("allow_private_addresses = [3]", "'3' is no network"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_reported(tmp_path, toml, said):
    assert said in refused(tmp_path, toml)


def test_tokens_with_names_come_from_the_file_and_hold_beside_those_of_the_environment(tmp_path):
    secret = tmp_path / "ci_token"
    secret.write_text("token-of-ci\n")
    toml = (
        f"[tokens.ci]\ntoken_file = '{secret}'\n[tokens.page]\ntoken = 'of-page'\nscope = 'read'\n"
    )
    settings = load(tmp_path, toml, TOKENS="other,more:read")
    assert settings.tokens == ("other", "more:read")
    assert settings.named_tokens == {
        "ci": ("token-of-ci", "full", secret),
        "page": ("of-page", "read", None),
    }
    assert {"token-of-ci", "of-page"} < set(settings.sensitive().values())
    assert "of-page" not in repr(settings)
    assert load(tmp_path, "tokens = ['a', 'b']").tokens == ("a", "b")


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[tokens.ci]", "[tokens] in dovetail.toml (value not shown): tokens.ci must have either"),
        ("[tokens.ci]\ntoken = 'sesame'\ntoken_file = 'x'", "tokens.ci must have either token or"),
        ("[tokens.ci]\ntoken_file = 'none'", "tokens.ci has a token_file: none cannot be read: No"),
        ("[tokens.ci]\ntoken = ''", "tokens.ci has a token that no header can send"),
        ("[tokens.ci]\ntoken = 'sesame open'", "tokens.ci has a token that no header can send"),
        ("[tokens.ci]\ntoken = 3", "tokens.ci must have a text as token"),
        ("[tokens.ci]\ntoken = 'sesame'\nscope = 'rw'", "has a wrong scope; it is full or read"),
        ("[tokens.ci]\ntoken = 'sesame'\nname = 'x'", "unknown field 'name'; it knows: token, "),
        ("[tokens]\nci = 'sesame'", "tokens.ci must be a table"),
        ("[tokens.'a b']\ntoken = 'sesame'", "tokens.a b has a wrong name"),
        (
            "[tokens.a]\ntoken = 'sesame'\n[tokens.b]\ntoken = 'sesame'\n[tokens.c]",
            "tokens.b is the same token as tokens.a; give each its own; tokens.c must have either",
        ),
    ],
)
def test_a_mistake_in_a_named_token_is_reported_without_the_token(tmp_path, toml, said):
    reported = refused(tmp_path, toml)
    assert said in reported
    assert "sesame" not in reported


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "dovetail.toml").mkdir()
    assert refused(tmp_path).startswith("dovetail.toml: cannot be read: ")
    (tmp_path / "dovetail.toml").rmdir()
    (tmp_path / "dovetail.toml").write_bytes(b"\xff")
    assert "not valid TOML" in refused(tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LEASE_SECONDS", "10s", "= '10s': must be a valid number"),
        ("LEASE_SECONDS", "0", "must be greater than 0 (default: 10)"),
        ("LEASE_SECONDS", "inf", "must be less than or equal to 1000000000"),
        ("DRAIN_SECONDS", "-1", "must be greater than or equal to 0"),
        ("MAX_CRASHES", "1.5", "must be a valid integer"),
        ("METRICS_PORT", "70000", "must be less than or equal to 65535"),
        ("DB_SYNC", "ful", "= 'ful': must be 'full' or 'normal' (default: full)"),
        ("TRANSPORT", "kafka", "must be 'streams' or 'celery'"),
        ("SERVER", "host:8700", "must begin with http:// or https://"),
        ("ALLOW_PRIVATE_ADDRESSES", "10.0.0.1/8", "did you mean 10.0.0.0/8?"),
        ("ALLOW_PRIVATE_ADDRESSES", "home", "'home' is no network; write them as in 127.0.0.1/32"),
    ],
)
def test_an_invalid_variable_is_named_with_a_valid_value(tmp_path, variable, value, said):
    message = refused(tmp_path, **{variable: value})
    assert message.startswith(f"DOVETAIL_{variable} = ")
    assert said in message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REDIS_URL", "http://u:hunter2@h"),
        ("DATABASE_URL", "mysql://u:hunter2@h"),
        ("LLM_BASE_URL", "u:hunter2@h"),
    ],
)
def test_an_invalid_value_that_may_be_a_secret_is_not_shown(tmp_path, variable, value):
    message = refused(tmp_path, **{variable: value})
    assert message.startswith(f"DOVETAIL_{variable} (value not shown): must begin with ")
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "must be a JSON list of webhooks"),
        ("{}", "must be a list, as in"),
        ('[{"url": "ftp://x"}]', "must be as in https://example.com/hook"),
        ('[{"url": "https://x", "on": ["done"]}]', "must be 'completed', 'failed' or 'cancelled'"),
        ('[{"url": "https://x", "when": "failed"}]', "S[0].when: no such field; there are url, on"),
        ('[{"on": ["failed"]}]', "S[0].url = {'on': ['failed']}: Field required"),
        ('["https://x"]', "S[0] = 'https://x': must be an object"),
    ],
)
def test_wrong_webhooks_stop_the_start_with_what_would_work(tmp_path, value, message):
    assert message in refused(tmp_path, WEBHOOKS=value)


def test_all_mistakes_are_reported_at_once(tmp_path):
    said = refused(tmp_path, "max_nodes = 0", LEASE_SECONDS="x", DB_SYNC="y")
    assert said.count("; ") == 2


def test_a_wrong_flag_is_reported_as_a_flag(tmp_path):
    assert refused(tmp_path, flags={"concurrency": 0}).startswith("--concurrency = 0: must be")
    said = refused(tmp_path, flags={"conurrency": 1})
    assert "--conurrency: no such setting; did you mean 'concurrency'?" in said
    assert "no such setting" in refused(tmp_path, flags={"zzzzz": 1})


def test_the_heartbeat_timeout_must_exceed_the_interval(tmp_path):
    said = refused(tmp_path, HEARTBEAT_TIMEOUT="5")
    assert said.startswith("DOVETAIL_HEARTBEAT_TIMEOUT (5) must be longer than")


def test_a_broker_that_is_no_url_is_refused(tmp_path):
    assert "must be a URL, as in amqp://" in refused(tmp_path, BROKER_URL="rabbit.example.org")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DRAIN_SECONDS", "1e308"),
        ("LEASE_SECONDS", "1000000001"),
        ("RETENTION_DAYS", "1000001"),
        ("MAX_RUN_BYTES", "99999999999999999999999"),
        ("NODE_LOG_BYTES", "99999999999999999999999"),
        ("MAX_BODY_BYTES", "1099511627776"),
    ],
)
def test_a_number_that_no_clock_and_no_store_takes_is_refused(tmp_path, name, value):
    said = refused(tmp_path, **{name: value})
    assert said.startswith(f"DOVETAIL_{name} = '{value}': must be less than or equal to ")


@pytest.mark.parametrize(
    "name", ["ALLOW_PRIVATE_ADDRESSES", "LLM_API_KEY", "SECRET_KEY", "SECRET_KEY_HOSTS", "EVENTS"]
)
def test_a_variable_that_is_not_utf_8_is_refused_by_its_name(tmp_path, name):
    said = refused(tmp_path, **{name: "hunter2\udcff"})
    assert said == f"DOVETAIL_{name} (value not shown) is not UTF-8 text"
    assert load(tmp_path, DB="dove\udcff.db").db == Path("dove\udcff.db")


def test_a_repr_shows_no_secret(tmp_path):
    settings = load(
        tmp_path, TOKENS="hunter2", TOKEN="hunter2", SECRET_A="hunter2", LLM_API_KEY="hunter2",
        REDIS_URL="redis://:hunter2@h", DATABASE_URL="postgresql://u:hunter2@h/d",
        BROKER_URL="amqp://u:hunter2@h", LLM_BASE_URL="http://u:hunter2@h",
    )  # fmt: skip
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings)


def test_values_that_must_not_be_shown_are_listed_for_the_redactor(tmp_path):
    given = {"TOKENS": "one,two:read", "TOKEN": "five", "SECRET_A": "three", "LLM_API_KEY": "four"}
    settings = load(tmp_path, **given)
    assert sorted(settings.sensitive().values()) == ["five", "four", "one", "three", "two"]
    assert load(tmp_path).sensitive() == {}


def test_settings_are_immutable(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).lease_seconds = 3


def test_the_documentation_has_the_table_of_the_code():
    assert reference() in DOCS.read_text(), "docs/settings.md: replace its table; see its top"
    for name in Settings.model_fields:
        assert f"`{env_name(name)}`" in DOCS.read_text() or name in (
            "rate_limits",
            "secrets",
            "secret_hosts",
            "named_tokens",
        )


def test_a_variable_that_is_no_setting_is_reported_with_the_one_that_is_meant():
    page = DOCS.with_name("documents.md").read_text()
    of_documents = set(re.findall(r"DOVETAIL_DOCUMENTS_[A-Z_]+[A-Z]", page))
    assert of_documents < set(OTHER_VARIABLES)
    known = re.findall(r"^\| `(DOVETAIL_[A-Z_]+)`", reference(), re.MULTILINE)
    assert (
        unknown_variables(dict.fromkeys([*known, *OTHER_VARIABLES, "DOVETAIL_SECRET_X"], "1")) == {}
    )
    of_kubernetes = {
        "DOVETAIL_PORT": "tcp://10.0.0.1:8700",
        "DOVETAIL_PORT_8700_TCP_ADDR": "10.0.0.1",
        "DOVETAIL_SERVICE_PORT_HTTP": "8700",
    }
    assert unknown_variables(of_kubernetes) == {}
    wrong = ("DOVETAIL_LEASE_SECOND", "DOVETAIL_METRIC_PORT", "DOVETAIL_XYZZY")
    assert unknown_variables(dict.fromkeys(wrong, "1")) == {
        "DOVETAIL_LEASE_SECOND": "DOVETAIL_LEASE_SECONDS",
        "DOVETAIL_METRIC_PORT": "DOVETAIL_METRICS_PORT",
        "DOVETAIL_XYZZY": None,
    }


def test_declaring_a_handler_imports_nothing_heavy():
    code = (
        "import sys, dovetail.handlers.registry, dovetail.handlers.context; "
        "print([name for name in ('pydantic', 'httpx2', 'jinja2', 'typer') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
