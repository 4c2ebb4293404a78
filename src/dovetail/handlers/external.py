"""`call_external_service`: an HTTP request as a node.

It decides what is sent, which answers are a success and which failures are retried; `http.py` makes
the connection. The operator binds a secret to hosts (`DOVETAIL_SECRET_<NAME>_HOSTS`), whatever a
definition says. The answer of an offline mock depends on its input alone; only its latency may be
random.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from dovetail.config import hosts_variable
from dovetail.core.errors import PermanentError
from dovetail.handlers.context import Context
from dovetail.handlers.http_rules import (
    AddressGuard,
    HttpResponse,
    Resolver,
    check_complete,
    check_status,
    decoded,
    system_resolver,
)
from dovetail.handlers.registry import HandlerFunction

if TYPE_CHECKING:
    from dovetail.config import Settings
    from dovetail.handlers import http


ANYWHERE = "*"
SECRET_HOST = "secret_host"  # noqa: S105  (an error's type)


def bound_hosts(
    bindings: Mapping[str, Collection[str]], names: Collection[str]
) -> Callable[[str], None] | None:
    """A check of each host that a request with these secrets goes to; None if all are allowed.

    A redirect is checked with all secrets of the request, even if it drops a header: the first host
    may have put the secret into the URL of the redirect.
    """
    bound = {name: bindings[name] for name in sorted(names) if name in bindings}
    if not bound:
        return None

    def check(host: str) -> None:
        for name, allowed in bound.items():
            if not any(_fits(host, pattern) for pattern in allowed):
                raise PermanentError(
                    f"secret '{name}' may not be sent to {host}: {hosts_variable(name)} allows "
                    f"{', '.join(allowed)}; nothing was sent there",
                    type=SECRET_HOST,
                )

    return check


def _fits(host: str, pattern: str) -> bool:
    host = host.strip("[]").rstrip(".").lower()
    if pattern == ANYWHERE or host == pattern:
        return True
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    try:  # an IPv6 address has many spellings
        return ip_address(host) == ip_address(pattern)
    except ValueError:
        return False


async def take_time(latency: tuple[float, float]) -> None:
    """Wait for a random time between the two bounds of `DOVETAIL_MOCK_LATENCY`, in seconds."""
    low, high = latency
    if high > 0:
        await asyncio.sleep(random.uniform(low, high))  # noqa: S311  (not about security)


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# They say where a message ends; two different answers to that allow request smuggling.
_OURS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | bool | int | float)


def _scalar(value: Any) -> Any:
    if not _is_scalar(value):
        raise ValueError("must be text, a number or a truth value")
    return value


def _parameter(value: Any) -> Any:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_scalar, values)):
        raise ValueError("must be text, a number, a truth value, null, or a list of the former")
    return value


_PLAIN = ["string", "number", "boolean"]
_LIST = {"type": "array", "items": {"type": _PLAIN}}
# One validator each: a union would report all its branches.
Scalar = Annotated[Any, AfterValidator(_scalar), WithJsonSchema({"type": _PLAIN})]
Parameter = Annotated[
    Any,
    AfterValidator(_parameter),
    WithJsonSchema({"anyOf": [{"type": [*_PLAIN, "null"]}, _LIST]}),
]
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


_METHOD_NAMES = get_args(Method)
# In any case: the handler writes it in upper case.
_METHODS = {
    "anyOf": [
        {"enum": [*_METHOD_NAMES]},
        {
            "type": "string",
            "pattern": "|".join(
                f"^{''.join(f'[{letter}{letter.lower()}]' for letter in name)}$"
                for name in _METHOD_NAMES
            ),
        },
    ]
}


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class ExternalConfig(BaseModel):
    """The config of `call_external_service`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="http://, https://, or mock:// for an offline echo")
    method: Annotated[Method, BeforeValidator(_upper), WithJsonSchema(_METHODS)] = Field(
        default="GET", description="the request's method, in any case"
    )
    headers: dict[str, Scalar] = Field(
        default={}, description="sent beside our own; may have secrets"
    )
    params: dict[str, Parameter] = Field(
        default={},
        description="added to the url's query; a list repeats its key, null drops it; "
        "may have secrets",
    )
    json_: Any = Field(
        default=None, alias="json", description="sent as application/json; may have secrets"
    )
    body: str | None = Field(default=None, description="sent as it is, in UTF-8; may have secrets")
    timeout_seconds: float = Field(
        default=30.0, gt=0, le=3600, allow_inf_nan=False, description="for the whole exchange"
    )
    expect_status: list[Annotated[int, Field(ge=100, le=599)]] | None = Field(
        default=None, min_length=1, description="what counts as success, instead of 200 to 299"
    )

    @field_validator("url")
    @classmethod
    def _one_line(cls, url: str) -> str:
        # A space is sent as %20; a line break could end the request line.
        if _CONTROL.search(url) or "\t" in url:
            raise ValueError("contains line breaks or other control characters")
        return url

    @field_validator("headers")
    @classmethod
    def _sendable(cls, headers: dict[str, Any]) -> dict[str, Any]:
        for name, value in headers.items():
            if not _TOKEN.fullmatch(name):
                raise ValueError(f"{name!r} is no header name")
            if name.lower() in _OURS:
                raise ValueError(f"'{name}' is set by Dovetail itself; leave it out")
            if isinstance(value, str) and _CONTROL.search(value):
                # Not the value: it may be a credential.
                raise ValueError(f"the value of '{name}' contains control characters")
        return headers

    @model_validator(mode="after")
    def _one_body(self) -> ExternalConfig:
        if self.sends_json and self.body is not None:
            raise ValueError("give json or body, not both")
        return self

    @property
    def sends_json(self) -> bool:
        """Whether `json` was given; `json: null` sends null."""
        return "json_" in self.model_fields_set


def call_external_service(
    settings: Settings, resolver: Resolver = system_resolver
) -> HandlerFunction:
    """The handler, bound to the settings of this process."""
    guard = AddressGuard(settings.allow_private_addresses, resolver)

    async def call(config: ExternalConfig, ctx: Context) -> dict[str, Any]:
        """Sends an HTTP request and returns status_code, headers, body and json."""
        if config.url.lower().startswith("mock://"):
            await take_time(settings.mock_latency)
            return _echo(config, ctx)
        client = await http_client("http")
        answer = await client.exchange(
            _request(config, ctx, client),
            guard,
            check_host=bound_hosts(settings.secret_hosts, ctx.secret_names),
            timeout_seconds=config.timeout_seconds,
            max_bytes=settings.max_output_bytes,
            stop_at=config.expect_status or (),
        )
        check_status(answer, config.expect_status, redact=ctx.redact)
        check_complete(answer, settings.max_output_bytes)
        return _output(answer, settings.max_output_bytes)

    return call


_http: Any = None


async def http_client(extra: str) -> Any:
    """The module `http`, imported in a thread: the import would block the event loop too long."""
    global _http
    if _http is not None:
        return _http
    try:
        # Kept only when complete: sys.modules also has modules that are being imported.
        _http = await asyncio.to_thread(import_module, "dovetail.handlers.http")
        return _http
    except ModuleNotFoundError as error:
        raise PermanentError(
            f"the package '{error.name}' is not installed: pip install 'dovetail[{extra}]'",
            type="missing_package",
        ) from None


def _request(config: ExternalConfig, ctx: Context, client: Any) -> http.OutgoingRequest:
    params = {name: value for name, value in config.params.items() if value is not None}
    headers = {name.lower(): value for name, value in _headers(config, ctx).items()}
    content: bytes | None = None
    if config.sends_json:
        content = orjson.dumps(config.json_)
        headers.setdefault("content-type", "application/json")
    elif config.body is not None:
        content = config.body.encode()
        headers.setdefault("content-type", "text/plain; charset=utf-8")
    request: http.OutgoingRequest = client.OutgoingRequest(
        config.method, client.parse_url(config.url, params), headers, content
    )
    return request


def _headers(config: ExternalConfig, ctx: Context) -> dict[str, str]:
    headers = {name: _text(value) for name, value in config.headers.items()}
    if "idempotency-key" not in {name.lower() for name in headers}:
        headers["Idempotency-Key"] = ctx.idempotency_key
    return headers


def _text(value: str | bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip(" \t")


def _echo(config: ExternalConfig, ctx: Context) -> dict[str, Any]:
    """The answer of `mock://`: the request, as a success."""
    echo = {
        "mock": True,
        "url": config.url,
        "method": config.method,
        "params": config.params,
        "headers": _headers(config, ctx),
        "json": config.json_,
        "body": config.body,
    }
    return {
        "status_code": config.expect_status[0] if config.expect_status else 200,
        "headers": {"content-type": "application/json"},
        "body": orjson.dumps(echo).decode(),
        "json": echo,
    }


def _output(answer: HttpResponse, max_bytes: int) -> dict[str, Any]:
    body, is_text = decoded(answer)
    output = {
        "status_code": answer.status_code,
        "headers": answer.headers,
        "body": body,
        "json": _parsed(body) if is_text else None,
    }
    if not is_text:
        output["encoding"] = "base64"
    # `body` and `json` have the same data, so the output may be too large though the answer is not.
    if len(answer.content) * 16 > max_bytes and len(orjson.dumps(output)) > max_bytes:
        raise PermanentError(
            f"{answer.where}: the answer of {len(answer.content)} bytes, as text and as json, "
            f"is larger than the {max_bytes} bytes that an output may have",
            type="too_large",
        )
    return output


def _parsed(body: str) -> Any:
    try:
        return orjson.loads(body.removeprefix("\ufeff"))
    except orjson.JSONDecodeError:
        return None
