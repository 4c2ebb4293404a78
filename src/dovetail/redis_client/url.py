"""A Redis URL with its options: where Redis is, how its certificate is checked, how long to wait.

It is parsed once for every connection: pipelined, blocking, to cluster nodes, to sentinels, and
Celery's. An option that would have no effect is refused by name: a certificate that is named must
be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from dovetail.core.errors import StoreError

if TYPE_CHECKING:
    import ssl


Address = tuple[str, int]

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
SERVER_PORT, SENTINEL_PORT = 6379, 26379
SHORTEST_SOCKET_TIMEOUT = 2.0
"""Redis itself waits for a second before it answers that a stream has nothing new."""
LONGEST_SECONDS = 3600.0

PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")
PREFIX_RULE = "is 1 to 64 letters, digits and the signs . _ : -, as in team1:"
_WHOLE = re.compile(r"([a-z+]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]*)(?::(\d{1,5}))?")
_REQUIREMENTS = {"required": "CERT_REQUIRED", "optional": "CERT_OPTIONAL", "none": "CERT_NONE"}
_VERSIONS = {"1.2": "TLSv1_2", "1.3": "TLSv1_3"}
"""Names in `ssl`, which takes long to import and which few commands need."""
_USELESS = {
    "max_connections": "every process keeps a few connections and shares them",
    "retry_on_timeout": "what was not answered is always asked again",
    "retry_on_error": "what was not answered is always asked again",
    "timeout": "there is no pool to wait for; socket_timeout and socket_connect_timeout exist",
    "socket_read_size": "it is chosen by the operating system",
    "decode_responses": "replies are read as bytes",
    "encoding": "everything is written as UTF-8",
    "encoding_errors": "everything is written as UTF-8",
    "legacy_responses": "replies are read by Dovetail itself",
    "ssl_ca_data": "write the certificate to a file and name it with ssl_ca_certs",
}
"""Options of redis-py that would have no effect here, each with the reason."""


class WrongUrl(StoreError):
    """A Redis URL that cannot work. Its text shows no part of the URL that may be a password."""


@dataclass(frozen=True, slots=True)
class Tls:
    ca_certs: str | None = None
    ca_path: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    password: str | None = field(default=None, repr=False)
    requirement: str = "required"
    check_hostname: bool = True
    min_version: str | None = None
    ciphers: str | None = None

    def context(self) -> ssl.SSLContext:
        """Made anew for each connection: certificates are renewed while services run."""
        import ssl

        for option, name in (
            ("ssl_ca_certs", self.ca_certs),
            ("ssl_certfile", self.certfile),
            ("ssl_keyfile", self.keyfile),
        ):
            if name is not None and not Path(name).is_file():
                raise WrongUrl(f"there is no file {name}, which {option} names")
        if self.ca_path is not None and not Path(self.ca_path).is_dir():
            raise WrongUrl(f"there is no folder {self.ca_path}, which ssl_ca_path names")
        try:
            made = ssl.create_default_context(cafile=self.ca_certs, capath=self.ca_path)
        except OSError as error:
            where = self.ca_certs or self.ca_path
            raise WrongUrl(f"ssl_ca_certs: {where} holds no certificates: {error}") from None
        made.check_hostname = self.check_hostname and self.requirement != "none"
        made.verify_mode = getattr(ssl, _REQUIREMENTS[self.requirement])
        if self.min_version is not None:
            made.minimum_version = ssl.TLSVersion[_VERSIONS[self.min_version]]
        if self.ciphers is not None:
            try:
                made.set_ciphers(self.ciphers)
            except ssl.SSLError:
                raise WrongUrl("ssl_ciphers: OpenSSL knows none of these") from None
        if self.certfile is not None:
            try:
                # A function, or OpenSSL would ask for the password on the terminal.
                made.load_cert_chain(self.certfile, self.keyfile, lambda: self.password or "")
            except (OSError, ValueError) as error:
                pair = self.certfile + (f" and {self.keyfile}" if self.keyfile else "")
                raise WrongUrl(
                    f"ssl_certfile, ssl_keyfile: {pair} cannot be used: {error}"
                ) from None
        return made

    def redis_py_options(self) -> dict[str, Any]:
        """The same for redis-py, which Celery uses."""
        import ssl

        version = None if self.min_version is None else _VERSIONS[self.min_version]
        given = {
            "ssl_ca_certs": self.ca_certs,
            "ssl_ca_path": self.ca_path,
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_password": self.password,
            "ssl_min_version": None if version is None else ssl.TLSVersion[version],
            "ssl_ciphers": self.ciphers,
        }
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        found["ssl_cert_reqs"] = getattr(ssl, _REQUIREMENTS[self.requirement])
        found["ssl_check_hostname"] = self.check_hostname and self.requirement != "none"
        return found


@dataclass(frozen=True, slots=True)
class RedisUrl:
    scheme: str
    addresses: tuple[Address, ...]
    """Of the server, or of its sentinels."""
    path: str = ""
    """Of a socket, instead of an address."""
    service: str = ""
    """The name of the primary at the sentinels."""
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    tls: Tls | None = None
    client_name: str = ""
    keepalive: bool = False
    connect_seconds: float | None = None
    silence_seconds: float | None = None
    health_seconds: float | None = None
    prefix: str = ""
    """Before every key."""

    def shown(self) -> str:
        """For messages: no user, no password."""
        if self.path:
            return self.path
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"{hosts}/{self.service}" if self.service else hosts

    def greetings(self) -> list[tuple[str | int, ...]]:
        """Commands that begin a connection."""
        found = _auth(self.username, self.password)
        if self.client_name:
            found.append(("CLIENT", "SETNAME", self.client_name))
        if self.db:
            found.append(("SELECT", self.db))
        return found

    def sentinel_greetings(self) -> list[tuple[str | int, ...]]:
        return _auth(self.sentinel_username, self.sentinel_password)


def _auth(username: str, password: str) -> list[tuple[str | int, ...]]:
    if not password:
        return []
    return [("AUTH", username, password) if username else ("AUTH", password)]


# ── reading ──────────────────────────────────────────────────────────────────────────────


def read(url: str) -> RedisUrl:
    """Raises `WrongUrl`, which says what would have worked."""
    whole = _WHOLE.fullmatch(url)
    if whole is None or whole[1] not in SCHEMES:
        raise WrongUrl(f"must begin with {' or '.join(f'{one}://' for one in SCHEMES)}")
    scheme, place, path, query = whole[1], whole[2], whole[3], whole[4] or ""
    sentinel, secure = scheme.endswith("+sentinel"), scheme.startswith("rediss")
    given = _options(query, secure=secure, sentinel=sentinel)
    user, _, hosts = place.rpartition("@")
    name, _, password = user.partition(":")
    found: dict[str, Any] = {
        "username": given.get("username", unquote(name)),
        "password": given.get("password", unquote(password)),
    }
    if scheme == "unix":
        if hosts or not path.strip("/"):
            raise WrongUrl("a socket is named by its path alone, as in unix:///run/redis.sock")
        found |= {"path": unquote(path), "addresses": ()}
    else:
        usual = SENTINEL_PORT if sentinel else SERVER_PORT
        found["addresses"] = _addresses(hosts, usual)
        words = [unquote(word) for word in path.split("/") if word]
        if sentinel:
            found["service"] = _service(words)
            words = words[1:]
        elif len(found["addresses"]) > 1:
            raise WrongUrl(
                "several hosts are sentinels, as in redis+sentinel://host:26379,other:26379/service"
            )
        found["db"] = _database(words)
    known = {name: given[name] for name in _KEPT if name in given}
    if secure:
        known["tls"] = _tls(given)
    return RedisUrl(scheme, **{**found, **known})


_KEPT = (
    *("db", "sentinel_username", "sentinel_password", "client_name", "keepalive"),
    *("connect_seconds", "silence_seconds", "health_seconds", "prefix"),
)


def _addresses(hosts: str, usual: int) -> tuple[Address, ...]:
    found = []
    for one in hosts.split(","):
        match = _HOST.fullmatch(one)
        if match is None or (match[2] and not 0 < int(match[2]) < 65536):
            raise WrongUrl("its host and port cannot be read; write them as in host:6379")
        found.append((unquote(match[1].strip("[]")) or "localhost", int(match[2] or usual)))
    return tuple(found)


def _service(words: list[str]) -> str:
    if not words or not re.fullmatch(r"[A-Za-z0-9._-]+", words[0]):
        raise WrongUrl(
            "the name by which sentinels know the server is missing, as in "
            "redis+sentinel://host:26379,other:26379/mymaster"
        )
    return words[0]


def _database(words: list[str]) -> int:
    if not words:
        return 0
    if len(words) > 1 or not words[0].isascii() or not words[0].isdigit():
        raise WrongUrl("the database is a number, as in redis://host:6379/0")
    return int(words[0])


def _options(query: str, *, secure: bool, sentinel: bool) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise WrongUrl("what follows '?' cannot be read; write it as in ?db=0&x=y") from None
    found: dict[str, Any] = {}
    seen = set()
    for name, text in pairs:
        if name in _USELESS:
            raise WrongUrl(f"the option '{name}' would have no effect: {_USELESS[name]}")
        if name not in _OPTIONS:
            near = get_close_matches(name, _OPTIONS, n=1)
            known = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(_OPTIONS)}"
            raise WrongUrl(f"there is no option '{name[:80]}'; {known}")
        if name in seen:
            raise WrongUrl(f"the option '{name}' is given twice")
        seen.add(name)
        if name.startswith("ssl_") and not secure:
            instead = "rediss+sentinel" if sentinel else "rediss"
            raise WrongUrl(f"the option '{name}' needs TLS: begin with {instead}://")
        if name.startswith("sentinel_") and not sentinel:
            raise WrongUrl(f"the option '{name}' is for redis+sentinel://")
        field_name, understood = _OPTIONS[name]
        try:
            value = understood(text)
        except _RefusedOption as reason:
            raise WrongUrl(f"the option '{name}' {reason}") from None
        if value is not None:
            found[field_name] = value
    return found


class _RefusedOption(Exception):
    pass


def _text(value: str) -> str:
    if not value:
        raise _RefusedOption("has no value")
    return value


def _word(value: str) -> str:
    if not re.fullmatch(r"[!-~]+", value):
        raise _RefusedOption("is one word without blanks")
    return value


def _prefix(value: str) -> str:
    if not PREFIX.fullmatch(value):
        raise _RefusedOption(PREFIX_RULE)
    return value


def _bool(value: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in known:
        raise _RefusedOption("is true or false")
    return known[value.lower()]


def _number(value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise _RefusedOption("is a number, as in 0")
    return int(value)


def _seconds(least: float, why: str = "") -> Callable[[str], float | None]:
    def read_seconds(value: str) -> float | None:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not least <= seconds <= LONGEST_SECONDS:
            most = f"{LONGEST_SECONDS:g}"
            raise _RefusedOption(f"is a number of seconds between {least:g} and {most}{why}")
        return seconds or None

    return read_seconds


def _of(known: Mapping[str, Any], *, prefix: str = "") -> Callable[[str], str]:
    def read_one(value: str) -> str:
        name = value.lower().removeprefix(prefix)
        if name not in known:
            raise _RefusedOption(f"is {' or '.join(known)}")
        return name

    return read_one


def _protocol(value: str) -> None:
    if value != "2":
        raise _RefusedOption(
            "is 2: Dovetail reads replies in the form of RESP2, which every Redis knows"
        )


_WAITS = ": Redis itself waits for a second before it says that a stream has nothing new"
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "db": ("db", _number),
    "username": ("username", _text),
    "password": ("password", _text),
    "client_name": ("client_name", _word),
    "key_prefix": ("prefix", _prefix),
    "protocol": ("protocol", _protocol),
    "socket_timeout": ("silence_seconds", _seconds(SHORTEST_SOCKET_TIMEOUT, _WAITS)),
    "socket_connect_timeout": ("connect_seconds", _seconds(0.1)),
    "socket_keepalive": ("keepalive", _bool),
    "health_check_interval": ("health_seconds", _seconds(0.0)),
    "sentinel_username": ("sentinel_username", _text),
    "sentinel_password": ("sentinel_password", _text),
    "ssl_ca_certs": ("ca_certs", _text),
    "ssl_ca_path": ("ca_path", _text),
    "ssl_certfile": ("certfile", _text),
    "ssl_keyfile": ("keyfile", _text),
    "ssl_password": ("ssl_password", _text),
    "ssl_cert_reqs": ("requirement", _of(_REQUIREMENTS, prefix="cert_")),
    "ssl_check_hostname": ("check_hostname", _bool),
    "ssl_min_version": ("min_version", _of(_VERSIONS, prefix="tlsv")),
    "ssl_ciphers": ("ciphers", _text),
}
"""By name: the field it sets, and the parser of its text."""


def _tls(given: dict[str, Any]) -> Tls:
    if "keyfile" in given and "certfile" not in given:
        raise WrongUrl("the option 'ssl_keyfile' needs ssl_certfile, whose key it is")
    names = ("ca_certs", "ca_path", "certfile", "keyfile", "requirement", "check_hostname")
    found = {name: given[name] for name in (*names, "min_version", "ciphers") if name in given}
    return Tls(**found, password=given.get("ssl_password"))


def with_prefix(url: str, prefix: str) -> str:
    """The same place, with this prefix. Raises `WrongUrl` if the URL names another one."""
    named = read(url).prefix
    if named == prefix or not prefix:
        return url
    if named:
        raise WrongUrl(f"its option key_prefix is '{named}', and the setting is '{prefix}'")
    url, hash_sign, rest = url.partition("#")
    return f"{url}{'&' if '?' in url else '?'}key_prefix={quote(prefix)}{hash_sign}{rest}"


# ── as Celery spells it ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CeleryConnection:
    """Arguments for kombu to reach the same Redis in the same way."""

    url: str
    use_ssl: dict[str, Any] | None
    transport_options: dict[str, Any]


def to_celery(target: RedisUrl) -> CeleryConnection:
    options: dict[str, Any] = {}
    if target.client_name:
        options["client_name"] = target.client_name
    if target.keepalive:
        options["socket_keepalive"] = True
    if target.connect_seconds is not None:
        options["socket_connect_timeout"] = target.connect_seconds
    if target.silence_seconds is not None:
        options["socket_timeout"] = target.silence_seconds
    if target.health_seconds is not None:
        options["health_check_interval"] = target.health_seconds
    if target.prefix:
        options["global_keyprefix"] = target.prefix
    use_ssl = None if target.tls is None else target.tls.redis_py_options()
    user = _user(target)
    if target.path:
        database = urlencode({"virtual_host": target.db})
        return CeleryConnection(
            f"redis+socket://{user}{quote(target.path)}?{database}", None, options
        )
    if not target.service:
        ((host, port),) = target.addresses
        return CeleryConnection(
            f"{target.scheme}://{user}{_host(host)}:{port}/{target.db}", use_ssl, options
        )
    options["master_name"] = target.service
    asking: dict[str, Any] = {"socket_connect_timeout": 1.0, "socket_timeout": 1.0}
    if target.sentinel_password:
        asking["password"] = target.sentinel_password
        if target.sentinel_username:
            asking["username"] = target.sentinel_username
    if use_ssl is not None:
        asking |= {"ssl": True, **use_ssl}
    options["sentinel_kwargs"] = asking
    # Each URL is complete: kombu tries the next one when the first is lost.
    urls = [f"sentinel://{user}{_host(host)}:{port}/{target.db}" for host, port in target.addresses]
    return CeleryConnection(";".join(urls), use_ssl, options)


def _user(target: RedisUrl) -> str:
    if not target.password:
        return ""
    return f"{quote(target.username, safe='')}:{quote(target.password, safe='')}@"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def from_celery(
    urls: Sequence[str], use_ssl: Any, transport_options: Mapping[str, Any]
) -> str | None:
    """The broker of a Celery app as a URL of ours; None if it is no Redis. Options that only Celery
    knows are left out."""
    first = urls[0] if urls else ""
    if first.startswith("redis+socket://"):
        path, _, database = first.removeprefix("redis+socket://").partition("?virtual_host=")
        return f"unix://{path}?db={database or 0}"
    whole = _WHOLE.fullmatch(first)
    if whole is None:
        return None
    scheme, place, path, query = whole[1], whole[2], whole[3], whole[4] or ""
    known = {name: text for name, text in parse_qsl(query) if name in _OPTIONS}
    tls = {name: text for name, text in known.items() if name.startswith("ssl_")}
    if isinstance(use_ssl, Mapping):
        given = {name: one for name, one in use_ssl.items() if one is not None}
        tls |= {name: _spelled(one) for name, one in given.items() if name in _OPTIONS}
    secure = scheme == "rediss" or bool(use_ssl)
    others = {name: text for name, text in known.items() if not name.startswith("ssl_")}
    if PREFIX.fullmatch(str(transport_options.get("global_keyprefix") or "")):
        others["key_prefix"] = str(transport_options["global_keyprefix"])
    asked = f"?{urlencode(others | (tls if secure else {}))}".rstrip("?")
    if scheme in ("redis", "rediss"):
        return f"{'rediss' if secure else 'redis'}://{place}{path}{asked}"
    service = transport_options.get("master_name")
    if scheme != "sentinel" or not service:
        return None
    user, at, _ = place.rpartition("@")
    hosts = [found[2].rpartition("@")[2] for url in urls if (found := _WHOLE.fullmatch(url))]
    asking = transport_options.get("sentinel_kwargs") or {}
    extra = {f"sentinel_{n}": str(asking[n]) for n in ("username", "password") if asking.get(n)}
    asked = f"?{urlencode(others | (tls if secure else {}) | extra)}".rstrip("?")
    scheme = "rediss+sentinel" if secure else "redis+sentinel"
    return f"{scheme}://{user}{at}{','.join(hosts)}/{quote(str(service))}{path}{asked}"


def _spelled(value: Any) -> str:
    """A value of `broker_use_ssl`, which may be a constant of `ssl`."""
    name = getattr(value, "name", None)
    return str(value) if name is None else str(name).replace("TLSv1_", "1.")
