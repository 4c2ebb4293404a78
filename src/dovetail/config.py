"""All settings in one model: name, default, bounds, description.

A flag wins over the environment, the environment over `dovetail.toml` in the current directory.
Wrong values stop the start with one error that names all of them. `load_settings` reads the
sources by hand, because the error must name the source and must never show a secret.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dovetail.core.definition.model import Webhook
from dovetail.core.errors import DovetailError, format_path
from dovetail.core.log_buffer import DEFAULT_LOG_BYTES, MIN_LOG_BYTES
from dovetail.redis_client.url import PREFIX as PREFIX_OF_KEYS
from dovetail.redis_client.url import PREFIX_RULE, WrongUrl, with_prefix
from dovetail.redis_client.url import SCHEMES as REDIS_SCHEMES
from dovetail.redis_client.url import read as read_redis_url

PREFIX = "DOVETAIL_"
HOSTS_SUFFIX = "_HOSTS"
SECRET_PREFIX = "DOVETAIL_SECRET_"  # noqa: S105  (a name, not a secret)
FILE_SUFFIX = "_FILE"
FILE = "dovetail.toml"

KIB = 1024
MIB = 1024 * KIB


REDIS_RETENTION_DAYS = 7.0
"""Memory is dear: finished runs leave Redis also where no setting says when."""


class SettingsError(DovetailError):
    """One or more settings with values that cannot work."""

    type = "invalid_settings"


def _not_bool(value: object) -> object:
    # `lease_seconds = true` would otherwise be read as one second.
    if isinstance(value, bool):
        raise ValueError("must be a number, not a truth value")
    return value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _split(value: object) -> object:
    return _parts(value) if isinstance(value, str) else value


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _networks(value: object) -> object:
    if isinstance(value, str):
        value = _parts(value)
    if not isinstance(value, list | tuple):
        return value
    return tuple(_network(item) for item in value)


def _network(given: object) -> IPv4Network | IPv6Network:
    text = str(given)  # of a number too: `ip_network(3)` would be 0.0.0.3
    try:
        return ip_network(text)
    except ValueError:
        pass
    try:
        meant = ip_interface(text).network
    except ValueError:
        raise ValueError(
            f"'{text}' is no network; write them as in 127.0.0.1/32,10.0.0.0/8"
        ) from None
    raise ValueError(f"'{text}' is an address inside a network; did you mean {meant}?")


def _latency(value: object) -> object:
    """`0.5` → (0.5, 0.5); `1-2` → (1.0, 2.0)."""
    if isinstance(value, tuple):
        return value
    low, dash, high = str(value).partition("-")
    try:
        first = float(low)
        second = float(high) if dash else first
    except ValueError:
        first, second = 1.0, 0.0
    # NaN fails this comparison too.
    if isinstance(value, bool) or not 0 <= first <= second <= 3600:
        raise ValueError("must be seconds as in 0.5, or a range as in 1-2")
    return first, second


def _scheme(*schemes: str) -> BeforeValidator:
    expected = " or ".join(f"{scheme}://" for scheme in schemes)

    def check(value: object) -> object:
        if isinstance(value, str) and not value.startswith(tuple(f"{s}://" for s in schemes)):
            raise ValueError(f"must begin with {expected}")
        return value

    return BeforeValidator(check)


def _redis(value: object) -> object:
    """Check all options of the URL, so that a wrong TLS option is refused before a connection."""
    if isinstance(value, str):
        try:
            read_redis_url(value)
        except WrongUrl as problem:
            raise ValueError(str(problem)) from None
    return value


def _prefix(value: object) -> object:
    if isinstance(value, str) and not PREFIX_OF_KEYS.fullmatch(value):
        raise ValueError(PREFIX_RULE)
    return value


def _broker(value: object) -> object:
    """Check the URL of a Redis broker; Celery checks all others, but reads a word as a host."""
    if isinstance(value, str) and "://" not in value:
        raise ValueError("must be a URL, as in amqp://user:password@host:5672//")
    if isinstance(value, str) and value.startswith(tuple(f"{one}://" for one in REDIS_SCHEMES)):
        return _redis(value)
    if isinstance(value, str) and value.startswith("sentinel://"):
        raise ValueError("write sentinels as in redis+sentinel://host:26379,other:26379/mymaster")
    return value


_HOST_NAME = re.compile(r"(?:\*\.)?[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")


def _hosts(value: object) -> object:
    """Names and addresses in lower case; `*.` before a name means all names under it."""
    found = _split(value)
    if not isinstance(found, list | tuple) or not found:
        raise ValueError("must be names of hosts, such as api.example.com,*.example.org")
    hosts = [str(one).lower().strip("[]").rstrip(".") for one in found]
    for host in hosts:
        if host != "*" and not _HOST_NAME.fullmatch(host) and not _is_address(host):
            raise ValueError(
                "each must be a host alone, such as api.example.com, *.example.org or 192.0.2.7: "
                "without scheme, port or path, in ASCII (xn--…), or * for every host"
            )
    return tuple(hosts)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _sink(value: object) -> object:
    if isinstance(value, str):
        read_sink(value)
    return value


class EventsTarget(NamedTuple):
    """Where events are exported to."""

    kind: Literal["file", "redis", "kafka"]
    address: str
    """A path, the URL of a Redis, or the addresses of brokers."""
    name: str = ""
    """A stream or a topic."""
    max_length: int | None = None


DEFAULT_STREAM = "dovetail:events"
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_BROKER = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")


def _is_broker(text: str) -> bool:
    """A host, perhaps with a port: librdkafka would take any text, and say nothing."""
    found = _BROKER.fullmatch(text)
    return found is not None and 0 < int(found[1] or 9092) < 65536


def read_sink(url: str) -> EventsTarget:
    """Raises `ValueError` for what is no such URL, without showing it."""
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        if not rest.startswith("/") or rest.endswith("/"):
            raise ValueError("must be an absolute path, as in file:///var/log/dovetail.jsonl")
        return EventsTarget("file", unquote(rest))
    if scheme in ("redis+stream", "rediss+stream"):
        address, _, query = rest.partition("?")
        options = dict(parse_qsl(query))
        stream, most = options.pop("stream", DEFAULT_STREAM), options.pop("maxlen", None)
        if most is not None and not (most.isascii() and most.isdigit() and int(most)):
            raise ValueError("maxlen must be a whole number, at least 1")
        more = f"?{urlencode(options)}" if options else ""
        redis_url = f"{scheme.removesuffix('+stream')}://{address}{more}"
        try:
            read_redis_url(redis_url)
        except WrongUrl as problem:
            raise ValueError(str(problem)) from None
        return EventsTarget("redis", redis_url, stream, None if most is None else int(most))
    if scheme == "kafka":
        brokers, _, topic = rest.partition("/")
        if not all(map(_is_broker, brokers.split(","))) or not _TOPIC.fullmatch(topic):
            raise ValueError("must be as in kafka://host:9092,other:9092/topic")
        return EventsTarget("kafka", brokers, topic)
    raise ValueError("must begin with file://, redis+stream://, rediss+stream:// or kafka://")


def _webhooks(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON list of webhooks ({error})") from None
    if not isinstance(value, list | tuple):
        raise ValueError('must be a list, as in [{"url": "https://example.com/hook"}]')
    return tuple(value)


# Larger numbers mean "no limit", but clocks, threads, memory and databases refuse them.
MAX_SECONDS = 1e9
MAX_DAYS = 1e6
MAX_COUNT = 1 << 40
MAX_BODY = 1 << 30

_number = BeforeValidator(_not_bool)
Seconds = Annotated[float, _number, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Patience = Annotated[float, _number, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Days = Annotated[float, _number, Field(gt=0, le=MAX_DAYS, allow_inf_nan=False)]
Count = Annotated[int, _number, Field(ge=1, le=MAX_COUNT)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], BeforeValidator(_networks)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts)]
Latency = Annotated[tuple[float, float], BeforeValidator(_latency)]
HttpUrl = Annotated[str, _scheme("http", "https")]
Webhooks = Annotated[tuple[Webhook, ...], BeforeValidator(_webhooks)]


class RateLimit(BaseModel):
    """One entry of `[rate_limits]`: a token bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The bounds that every other way to set a limit has.
    rate_per_second: Annotated[float, _number, Field(ge=1e-9, le=1e9)] = 10.0
    burst: Annotated[int, _number, Field(ge=1, le=1_000_000_000)] = 1


class NamedToken(NamedTuple):
    """One entry of `[tokens]`: a bearer token of the API whose holder a history names."""

    token: str
    scope: Literal["full", "read"]
    file: Path | None
    """The file that has it."""

    def __repr__(self) -> str:
        return f"NamedToken(***, {self.scope})"


_TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_FIELDS = ("token", "token_file", "scope")


def _named_tokens(value: object) -> object:
    """From the tables of `[tokens]`. No message shows a token."""
    if not isinstance(value, dict):
        raise ValueError("must be tables such as [tokens.ci], each with token or token_file")
    found: dict[str, NamedToken] = {}
    problems: list[str] = []
    for name, entry in value.items():
        try:
            token = _named_token(name, entry)
            same = next((one for one, known in found.items() if known.token == token.token), None)
            if same is not None:
                raise ValueError(f"is the same token as tokens.{same}; give each its own")
            found[name] = token
        except ValueError as problem:
            problems.append(f"tokens.{name} {problem}")
    if problems:
        raise ValueError("; ".join(problems))
    return found


def _named_token(name: str, entry: object) -> NamedToken:
    if not _TOKEN_NAME.fullmatch(name):
        raise ValueError("has a wrong name: up to 64 letters, digits, '.', '_' and '-'")
    if not isinstance(entry, dict):
        raise ValueError('must be a table with token or token_file, such as {token = "…"}')
    if unknown := [field for field in entry if field not in _TOKEN_FIELDS]:
        known = ", ".join(_TOKEN_FIELDS)
        raise ValueError(f"has an unknown field '{unknown[0]}'; it knows: {known}")
    token, file, scope = (entry.get(field) for field in _TOKEN_FIELDS)
    if (token is None) == (file is None):
        raise ValueError("must have either token or token_file")
    scope = "full" if scope is None else scope
    if scope not in ("full", "read"):
        raise ValueError("has a wrong scope; it is full or read")
    if not isinstance(token if file is None else file, str):
        raise ValueError(f"must have a text as {'token' if file is None else 'token_file'}")
    if file is not None:
        try:
            token = _content(file, "token_file").strip()
        except SettingsError as error:
            raise ValueError(f"has a {error}") from None
    if not token or not _BEARER.fullmatch(str(token)):
        raise ValueError("has a token that no header can send: use letters, digits and -._~+/=")
    path = None if file is None else Path(file)
    return NamedToken(str(token), "read" if scope == "read" else "full", path)


# As RFC 6750 spells a bearer token, and the colon, which tokens of `DOVETAIL_TOKENS` may have.
_BEARER = re.compile(r"[A-Za-z0-9\-._~+/:]+=*")


def _secret(default: Any = None, *, description: str) -> Any:
    """A field whose value is never shown in an error or a repr."""
    return Field(default, description=description, repr=False, json_schema_extra={"secret": True})


class Settings(BaseModel):
    """All settings. A field `lease_seconds` is `DOVETAIL_LEASE_SECONDS` in the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # stores and transport
    db: Path = Field(Path(".dovetail/dovetail.db"), description="the file of the embedded engine")
    db_sync: Literal["full", "normal"] = Field(
        "full", description="`full` survives a power cut, `normal` the crash of a process"
    )
    redis_url: Annotated[str, BeforeValidator(_redis)] | None = _secret(
        description="the Redis of a distributed setup, as in `redis://host:6379/0`"
    )
    redis_prefix: Annotated[str, BeforeValidator(_prefix)] | None = Field(
        None, description="prefix of all keys in Redis, as in `team1:`; the same for all services"
    )
    database_url: Annotated[str, _scheme("postgresql", "postgres")] | None = _secret(
        description="the PostgreSQL archive; unset: Redis alone"
    )
    accept_data_loss: bool = Field(
        False, description="`1`: services start on a Redis that may evict runs"
    )
    transport: Literal["streams", "celery"] = Field(
        "streams", description="how tasks are sent in a distributed setup"
    )
    broker_url: Annotated[str, BeforeValidator(_broker)] | None = _secret(
        description="Celery's broker; unset: the Redis URL"
    )
    server: HttpUrl | None = Field(
        None, description="the API server that commands use, as in `http://host:8700`"
    )
    token: str | None = _secret(description="the bearer token that commands send to that server")

    # security
    tokens: Names = _secret(
        (), description="bearer tokens of the API; `:read` after one makes it read-only"
    )
    named_tokens: Annotated[Mapping[str, Any], BeforeValidator(_named_tokens)] = _secret(
        {}, description="`[tokens]` by name, as `NamedToken`"
    )
    allowed_hosts: Names = Field((), description="host names of the API, beside loopback")
    allow_private_addresses: Networks = Field(
        (), description="networks that `call_external_service` may reach though not public"
    )
    trusted_proxies: Networks = Field(
        (), description="networks of proxies whose `X-Forwarded-For` or `Forwarded` is trusted"
    )
    secrets: Mapping[str, str] = _secret({}, description="read in templates as `secrets.<NAME>`")
    secret_hosts: Mapping[str, Hosts] = _secret(
        {}, description="hosts that `call_external_service` may send a secret to, by its name"
    )

    # notifications
    webhooks: Webhooks = Field(
        (),
        description="webhooks that are notified of all runs: a JSON list of what `notify` of a "
        "definition has",
    )

    events: Annotated[str, BeforeValidator(_sink)] | None = _secret(
        description="where every event is exported to: `file:///path.jsonl`, "
        "`redis+stream://host:6379/0?stream=NAME` or `kafka://host:9092/topic`; unset: nowhere"
    )

    # handlers
    handlers: Names = Field((), description="files and modules to load handlers from")
    llm_base_url: HttpUrl | None = _secret(
        description="OpenAI-compatible endpoint of `llm_service`; unset: the offline mock"
    )
    llm_api_key: str | None = _secret(description="the API key of that endpoint")
    llm_model: str | None = Field(None, description="the model of nodes that name none")
    mock_latency: Latency = Field(
        (0.0, 0.0), description="how long the offline mocks take: `0.5`, or a range `1-2`"
    )
    concurrency: Count = Field(32, description="nodes that one worker process runs at once")

    # time
    lease_seconds: Seconds = Field(
        10.0, description="the lease of a claim; a worker renews it every third of this time"
    )
    heartbeat_interval: Seconds = Field(5.0, description="time between heartbeats of a worker")
    heartbeat_timeout: Seconds = Field(
        15.0, description="a worker without a heartbeat for this long counts as dead"
    )
    stale_result_timeout: Seconds = Field(
        30.0, description="age at which another orchestrator takes over a result"
    )
    stale_claim_interval: Seconds = Field(
        15.0, description="how often an orchestrator looks for such results"
    )
    checkpoint_interval: Seconds = Field(10.0, description="how far the archive may lag behind")
    retention_days: Days | None = Field(
        None,
        description="how many days finished runs are kept, as in `0.5`; unset: 7 in Redis, "
        "for ever in the embedded file; the archive keeps them longer",
    )
    archive_retention_days: Days | None = Field(
        None, description="how many days the archive keeps finished runs; unset: for ever"
    )
    recovery_timeout: Patience = Field(
        30.0, description="unfinished runs younger than this are not restored"
    )
    max_crashes: Count = Field(3, description="lost starts after which a node is FAILED")
    drain_seconds: Patience = Field(30.0, description="time for running nodes after SIGTERM")
    shutdown_delay: Patience = Field(
        0.0, description="after SIGTERM the API reports not ready and still serves for this long"
    )
    send_timeout: Seconds = Field(
        30.0, description="a client that does not read its answer for this long is disconnected"
    )

    # telemetry
    metrics_port: Annotated[int, _number, Field(ge=1, le=65535)] | None = Field(
        None, description="port for metrics of orchestrator and worker; unset: none"
    )
    log_format: Literal["console", "json"] = Field("console", description="how logs are written")
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)
    ] = Field("INFO", description="what handlers log from this level on is kept in their logs")
    capture_output: bool = Field(True, description="what handlers print is kept in their logs, too")
    node_log_bytes: Annotated[int, _number, Field(ge=MIN_LOG_BYTES, le=MAX_COUNT)] = Field(
        DEFAULT_LOG_BYTES, description="the log of one attempt: its first quarter and the newest"
    )

    # limits
    max_nodes: Count = Field(10_000, description="nodes of a workflow")
    max_edges: Count = Field(100_000, description="dependencies of a workflow")
    max_body_bytes: Annotated[Count, Field(le=MAX_BODY)] = Field(
        MIB, description="a definition's text, or a request's body"
    )
    max_nesting: Count = Field(32, description="levels of nesting in that text")
    max_template_bytes: Count = Field(16 * KIB, description="one template")
    max_config_bytes: Count = Field(MIB, description="a node's rendered config")
    max_output_bytes: Count = Field(MIB, description="a node's output")
    max_input_bytes: Count = Field(
        64 * MIB, description="all that a node reads of its parents' outputs"
    )
    max_run_bytes: Count = Field(
        256 * MIB, description="all outputs of a run; fixed when the run is created"
    )
    run_log_bytes: Count = Field(
        64 * MIB, description="the log of a run in Redis; then its oldest lines go"
    )
    max_backlog: Count = Field(
        100_000, description="nodes waiting for a worker; with more the API accepts no runs"
    )

    max_connections: Count = Field(
        4096, description="connections to the API; fewer if a process may open few files"
    )
    max_waiting_reads: Count = Field(
        2000, description="event streams and `?wait=` at once; at most half of the connections"
    )
    max_reads: Count = Field(
        1000, description="other requests that read; at most a quarter of the connections"
    )
    max_writes: Count = Field(
        1000, description="requests that write; at most a quarter of the connections"
    )
    max_large_bodies: Count = Field(64, description="bodies above 16 KiB, being read or waiting")
    caller_share: Annotated[float, _number, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.5,
        description="the share of one token in each of these four; of an address half of the rest",
    )

    rate_limits: dict[str, RateLimit] = Field(
        default_factory=dict, description="`[rate_limits]` by `resource_tag`"
    )

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Settings:
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ValueError(
                f"DOVETAIL_HEARTBEAT_TIMEOUT ({self.heartbeat_timeout:g}) must be longer than "
                f"DOVETAIL_HEARTBEAT_INTERVAL ({self.heartbeat_interval:g}), "
                "or every worker would count as dead between two heartbeats"
            )
        return self

    @model_validator(mode="after")
    def _keys_have_their_prefix(self) -> Settings:
        """Put the prefix into the URLs: all connections are made from them."""
        for name in ("redis_url", "broker_url"):
            url = getattr(self, name)
            if self.redis_prefix and url and url.partition("://")[0] in REDIS_SCHEMES:
                try:
                    object.__setattr__(self, name, with_prefix(url, self.redis_prefix))
                except WrongUrl as problem:
                    raise ValueError(f"{env_name(name)}: {problem}") from None
        return self

    @property
    def redis_retention_days(self) -> float:
        return REDIS_RETENTION_DAYS if self.retention_days is None else self.retention_days

    def sensitive(self) -> dict[str, str]:
        """All values that a log, an error or an output must not show, for the `Redactor`."""
        known = {f"secret {name}": value for name, value in self.secrets.items()}
        if self.llm_api_key:
            known["llm_api_key"] = self.llm_api_key
        for number, token in enumerate(self.tokens):
            known[f"token {number}"] = token.removesuffix(":read")
        for name, entry in self.named_tokens.items():
            known[f"token {name}"] = entry.token
        if self.token:
            known["token"] = self.token
        for name in _URLS:
            known |= _credentials(name, getattr(self, name))
        return known


_URLS = ("events", "redis_url", "database_url", "broker_url", "llm_base_url", "server")
MIN_PASSWORD_CHARS = 12
"""A shorter password may be a word that outputs contain, such as `postgres`."""


def _credentials(name: str, url: str | None) -> dict[str, str]:
    """The credentials in a URL: user and password together, a long password also by itself, and
    options whose name ends in `password`."""
    rest, _, query = (url or "").partition("://")[2].partition("?")
    known = {
        f"{name} {option}": value
        for option, value in parse_qsl(query)
        if option.endswith("password") and len(value) >= MIN_PASSWORD_CHARS
    }
    user, colon, password = rest.rpartition("@")[0].partition(":")
    if not colon or not password or "/" in user:
        return known
    user, password = unquote(user), unquote(password)
    known[f"{name} user and password"] = f"{user}:{password}"
    if len(password) >= MIN_PASSWORD_CHARS:
        known[f"{name} password"] = password
    return known


OTHER_VARIABLES = (
    "DOVETAIL_DEBUG",
    "DOVETAIL_DOCUMENTS_MAX_BYTES",
    "DOVETAIL_DOCUMENTS_MAX_PAGES",
    "DOVETAIL_DOCUMENTS_MODEL_SECONDS",
    "DOVETAIL_DOCUMENTS_OUT",
    "DOVETAIL_DOCUMENTS_ROOTS",
)
"""Known variables that are not settings; they are read where they are used."""
_FORMER_PREFIX = "ORCHESTRATOR_"
"""`ORCHESTRATOR_CHECKPOINT_INTERVAL` was the former name of `DOVETAIL_CHECKPOINT_INTERVAL`."""
# Variables that Kubernetes sets for a Service whose name begins with `dovetail`.
_OF_A_SERVICE = re.compile(
    r"_SERVICE_HOST=|_SERVICE_PORT(_[A-Z0-9_]+)?=|_PORT_\d+_[A-Z_]+=|_PORT=(tcp|udp|sctp)://"
)

# A table has no good spelling in the environment. Secrets must not be in a file that is committed.
_NOT_IN_ENVIRONMENT = frozenset({"rate_limits", "secrets", "secret_hosts", "named_tokens"})
_NOT_IN_FILE = frozenset({"secrets", "secret_hosts"})
_MAY_NAME_ANY_FILE = frozenset({"DOVETAIL_DB", "DOVETAIL_HANDLERS"})
"""A file's name is bytes, not text."""


def load_settings(
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    **flags: Any,
) -> Settings:
    """Read the settings; a flag that is None was not given. Raises `SettingsError`."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in _read_file((directory or Path()) / FILE).items():
        values[name] = value
        source[name] = f"[tokens] in {FILE}" if name == "named_tokens" else f"{name} in {FILE}"
    for name in Settings.model_fields:
        # An empty variable counts as unset: shells and compose files write it so.
        text, variable = _variable(environ, env_name(name))
        if text and name not in _NOT_IN_ENVIRONMENT:
            values[name], source[name] = text, variable
    for name, value in flags.items():
        if value is not None:
            values[name], source[name] = value, f"--{name.replace('_', '-')}"
    values["secrets"], values["secret_hosts"] = _secrets(environ)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        # Without the cause: pydantic's text repeats the input, which may be a secret.
        raise SettingsError(_explained(error, source)) from None


def _variable(environ: Mapping[str, str], variable: str) -> tuple[str, str]:
    """The value of a variable, or of the file that `<variable>_FILE` names, and which of the two.

    Containers provide secrets as files, because other processes can read a variable.
    """
    text, file = environ.get(variable, "").strip(), environ.get(f"{variable}_FILE", "").strip()
    if not file:
        if variable not in _MAY_NAME_ANY_FILE:
            _refuse_bytes(variable, text)
        return text, variable
    if text:
        raise SettingsError(f"{variable} and {variable}_FILE are both set: unset one of them")
    return _content(file, f"{variable}_FILE").strip(), f"{variable}_FILE"


def _refuse_bytes(variable: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # Python reads such bytes as lone surrogates
        raise SettingsError(f"{variable} (value not shown) is not UTF-8 text") from None


def _content(file: str, variable: str) -> str:
    try:
        text = Path(file).read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"{variable}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{variable}: {file} is not UTF-8 text") from None
    if not text.strip():
        raise SettingsError(f"{variable}: {file} is empty")
    return text


def _secrets(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The secrets by name, and the hosts that each is bound to.

    A variable that ends in `_HOSTS` or `_FILE` is never a secret, whatever other variables are set.
    A secret from a file is read without its last newline.
    """
    secrets: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for variable, value in environ.items():
        name = variable.removeprefix(SECRET_PREFIX)
        if not name or name == variable:
            continue
        if (kept_in := name.removesuffix(FILE_SUFFIX)) != name and kept_in:
            if f"{SECRET_PREFIX}{kept_in}" in environ:
                plain = f"{SECRET_PREFIX}{kept_in}"
                raise SettingsError(f"{plain} and {variable} are both set: unset one of them")
            if value:
                secrets[kept_in] = _content(value, variable).rstrip("\r\n")
            continue
        _refuse_bytes(variable, value)
        bound = name.removesuffix(HOSTS_SUFFIX)
        if bound == name or not bound:
            secrets[name] = value
        elif value.strip():  # an empty variable is not set
            hosts[bound] = value
    return secrets, hosts


def hosts_variable(secret: str) -> str:
    """The variable that binds a secret to hosts."""
    return f"{SECRET_PREFIX}{secret}{HOSTS_SUFFIX}"


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Variables that look like settings and are not, each with the setting that may be meant.

    They do not stop a start: other programs may use them.
    """
    environ = os.environ if environ is None else environ
    known = [env_name(name) for name in Settings.model_fields if name not in _NOT_IN_ENVIRONMENT]
    known += [f"{name}{FILE_SUFFIX}" for name in known]
    known += OTHER_VARIABLES
    found: dict[str, str | None] = {}
    for name in sorted(environ):
        if name.startswith(_FORMER_PREFIX):
            meant = PREFIX + name.removeprefix(_FORMER_PREFIX)
            if meant in known:  # other programs use this prefix too
                found[name] = meant
            continue
        if not name.startswith(PREFIX) or name in known or name.startswith(SECRET_PREFIX):
            continue
        if _OF_A_SERVICE.search(f"{name}={environ[name]}"):
            continue
        near = get_close_matches(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known])
        found[name] = PREFIX + near[0] if near else None
    return found


def env_name(field: str) -> str:
    """`lease_seconds` → `DOVETAIL_LEASE_SECONDS`."""
    return PREFIX + field.upper()


def reference() -> str:
    """The settings as a Markdown table, from the model; docs/settings.md contains it."""
    rows = ["| variable | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if name in _NOT_IN_ENVIRONMENT:
            continue
        rows.append(f"| `{env_name(name)}` | {_shown_default(name)} | {field.description} |")
    return "\n".join(rows)


def _shown_default(name: str) -> str:
    default = Settings.model_fields[name].default
    if default is None or default == ():
        return "unset"
    if name == "mock_latency":
        return "`0`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{FILE}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{FILE}: not valid TOML: {error}") from None
    known = [n for n in Settings.model_fields if n not in {*_NOT_IN_FILE, "named_tokens"}]
    wrong = [_unknown_key(name, known) for name in found if name not in known]
    if wrong:
        raise SettingsError("; ".join(wrong))
    if isinstance(found.get("tokens"), dict):  # beside those of the environment
        found["named_tokens"] = found.pop("tokens")
    return found


def _unknown_key(name: str, known: list[str]) -> str:
    if name in _NOT_IN_FILE:
        return f"{FILE}: secrets do not belong in a file; set {SECRET_PREFIX}<NAME> instead"
    plain = name.lower().removeprefix(PREFIX.lower())
    near = get_close_matches(plain, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; it knows: {', '.join(known)}"
    return f"{FILE}: unknown setting '{name}'{hint}"


def _explained(error: ValidationError, source: Mapping[str, str]) -> str:
    messages: dict[str, None] = {}  # a union reports each of its branches; once is enough
    for problem in error.errors(include_url=False):
        what = problem["msg"].removeprefix("Value error, ")
        what = what.replace("Input should be", "must be", 1)
        if not problem["loc"]:
            messages[what] = None
            continue
        field = str(problem["loc"][0])
        within = "".join(f".{part}" for part in problem["loc"][1:] if isinstance(part, str | int))
        label = source.get(field, f"setting '{field}'")
        if field not in Settings.model_fields:
            near = get_close_matches(field, list(Settings.model_fields), n=1)
            what = f"no such setting; did you mean '{near[0]}'?" if near else "no such setting"
        elif field == "rate_limits":
            label = label.replace(field, field + within, 1)
        elif field == "webhooks" and problem["loc"][1:]:
            label += format_path(problem["loc"][1:])
            if problem["type"] == "extra_forbidden":
                what = f"no such field; there are {', '.join(Webhook.model_fields)}"
            else:
                what = what.replace("a valid dictionary or instance of Webhook", "an object")
                label += f" = {problem['input']!r}"
        elif field == "secret_hosts" and len(problem["loc"]) > 1:
            # Not shown: it may be a secret of that name.
            label = f"{hosts_variable(str(problem['loc'][1]))} (value not shown)"
        elif _is_secret(field):
            label += " (value not shown)"
        else:
            label += f" = {problem['input']!r}"
        messages[f"{label}: {what}{_default_hint(field)}"] = None
    return "; ".join(messages)


def _default_hint(field: str) -> str:
    if field not in Settings.model_fields or field in _NOT_IN_ENVIRONMENT:
        return ""
    return f" (default: {_shown_default(field).strip('`')})"


def _is_secret(field: str) -> bool:
    extra = Settings.model_fields[field].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("secret"))
