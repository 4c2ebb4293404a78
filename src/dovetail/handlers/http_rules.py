"""The rules of handlers that use HTTP: where a request may go, and what its response means.

The address guard says which hosts a workflow may connect to. Definitions, DNS answers and redirects
are untrusted. So the guard checks resolved addresses, never the spelling of a host, and returns the
addresses that it checked: a connection to one of them cannot be diverted by a second DNS answer.

Of a name with several addresses only the permitted ones are returned; if there is none, the host is
refused. A name that also has a private address is not refused: split-horizon names are common, and
that address is not returned.

`http.py` makes the connection. This file needs no HTTP library.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
import unicodedata
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from dovetail.core.errors import PermanentError, RetryableError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

SETTING = "DOVETAIL_ALLOW_PRIVATE_ADDRESSES"

# The IANA special-purpose registries and a few more. `ipaddress.is_global` differs between Python
# versions and calls multicast, 6to4, NAT64 and IPv4-compatible addresses global.
_NOT_PUBLIC: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "this network"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local, where clouds keep their metadata service"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "IETF protocol assignments"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmarking"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::1/128", "loopback"),
    ("::/128", "unspecified"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    ("ff00::/8", "multicast"),
    ("2001::/23", "IETF protocol assignments, Teredo among them"),
    ("2001:db8::/32", "documentation"),
    ("3fff::/20", "documentation"),
)
_TABLE: tuple[tuple[Network, str], ...] = tuple((ip_network(n), why) for n, why in _NOT_PUBLIC)

# All public IPv6 hosts are in this block.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_6TO4 = IPv6Network("2002::/16")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = 0x5EFE  # the third group of four bytes, without its two uniqueness bits


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """The addresses from the operating system, in its order."""
    try:
        return [str(ip_address(host))]  # an address needs no lookup, which takes a thread
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class AddressGuard:
    """Resolves a host to its permitted addresses."""

    def __init__(
        self, allowed: Iterable[Network] = (), resolver: Resolver = system_resolver
    ) -> None:
        self._allowed = tuple(allowed)
        self._resolve = resolver

    async def addresses(self, host: str, port: int) -> list[Address]:
        """The permitted addresses of a host, resolved once, in the resolver's order.

        Raises a `PermanentError` of type `forbidden_address` when none is permitted, and
        `OSError` when the host has none.
        """
        answers = await self._resolve(host, port)
        found = list(dict.fromkeys(parse_address(answer) for answer in answers))
        if not found:
            raise OSError(f"host '{host}' has no address")
        permitted = [address for address in found if self.reason_against(address) is None]
        if not permitted:
            raise PermanentError(self._refusal(host, found[0]), type="forbidden_address")
        return permitted

    def reason_against(self, address: Address) -> str | None:
        """Why an address is forbidden; None if it is permitted."""
        if self._is_allowed(address):
            return None
        carried = _carried(address)
        if carried is not None:
            return self._reason_against_a_way_to(carried)
        return _not_public(address) or self._reason_against_a_way_to(_embedded(address))

    def _reason_against_a_way_to(self, address: Address | None) -> str | None:
        if address is None or self._is_allowed(address):
            return None
        reason = _not_public(address)
        return None if reason is None else f"a way to {address}: {reason}"

    def _is_allowed(self, address: Address) -> bool:
        # An IPv4 address is never `in` an IPv6 network, so one test serves both families.
        return any(address in network for network in self._allowed)

    def _refusal(self, host: str, address: Address) -> str:
        what = f"'{host}'" if host == str(address) else f"'{host}' ({address})"
        reason = self.reason_against(address)
        return (
            f"address {what} is not public ({reason}); "
            f"if it is meant, allow its network: {SETTING}={ip_network(address)}"
        )


def parse_address(text: str) -> Address:
    """An address as it is routed: without a zone, and IPv4 if IPv6 only wraps it."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def plain_host(host: str) -> str:
    """A host in the one spelling in which it is resolved, sent and shown.

    Some resolvers read `①②⑦.1`, `0x7f.1`, `0177.0.0.1` and `2130706433` as 127.0.0.1. The guard
    checks resolved addresses, so this is not for safety: it makes results the same on all platforms
    and errors readable.
    """
    # U+3002 is a dot in IDNA, but not in NFKC.
    plain = unicodedata.normalize("NFKC", host).replace("\u3002", ".").lower().rstrip(".")
    # inet_aton reads what C programs read, but ignores everything after a space.
    if not plain or plain.split() != [plain]:
        return plain
    try:
        return str(IPv4Address(socket.inet_aton(plain)))
    except (OSError, ValueError):
        return plain


def _carried(address: Address) -> IPv4Address | None:
    """The IPv4 address to which a translator or tunnel takes an IPv6 packet."""
    if isinstance(address, IPv6Address):
        if address in _6TO4:
            return address.sixtofour
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address at the end of an ISATAP address, to which a host may tunnel."""
    if isinstance(address, IPv6Address) and int(address) >> 32 & 0xFCFFFFFF == _ISATAP:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _not_public(address: Address) -> str | None:
    for network, why in _TABLE:
        if address in network:
            return why
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "outside the public IPv6 range"
    return None


# ── responses ────────────────────────────────────────────────────────────────────────────

MAX_RETRY_AFTER = 3600.0
SHOWN_OF_A_FAILURE = 300

_SECONDS = re.compile(r"\d{1,18}(\.\d{1,18})?", re.ASCII)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([a-z0-9._-]+)")
# Python also has codecs that are no charsets, and some that take quadratic time (punycode, idna).
_TEXT_CHARSET = re.compile(
    r"utf-?(8|16|32)([-_]?[lb]e)?|(us-)?ascii|latin-?1|iso[-_]?8859[-_]\d+|(cp|windows-)\d+"
    r"|koi8-[rut]|shift[-_]jis|euc[-_](jp|kr)|gb(2312|k|18030)|big5"
)
_TEXT_TYPE = re.compile(r"text/|[^;]*[/+](json|xml|javascript|yaml|x-www-form-urlencoded)\b")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. Header names are lower case; `where` is the request, as it may be shown.

    `complete` is false if reading stopped at the size limit.
    """

    status_code: int
    headers: dict[str, str]
    content: bytes
    where: str
    complete: bool = True


def check_status(
    answer: HttpResponse,
    expected: Collection[int] | None = None,
    *,
    redact: Callable[[str], str],
) -> None:
    """Return if the answer is a success, else raise the right error.

    The error quotes the beginning of the answer. Services may quote a key that they refuse, so the
    answer is redacted before it is cut: the beginning of a cut secret would stay.
    """
    status = answer.status_code
    if status in expected if expected else 200 <= status < 300:
        return
    message = f"{answer.where} answered {status}{_phrase(status)}"
    if expected:
        message += f", expected {' or '.join(map(str, expected))}"
    text, is_text = decoded(answer)
    beginning = " ".join(redact(text)[: 4 * SHOWN_OF_A_FAILURE].split())[:SHOWN_OF_A_FAILURE]
    if beginning and is_text:
        message += f": {beginning}"
    kind = f"http_{status}"
    if status == HTTPStatus.TOO_MANY_REQUESTS or 500 <= status < 600:
        asked = retry_after(answer.headers, time.time())
        raise RetryableError(message, at_least=asked, type=kind)
    raise PermanentError(message, type=kind)


def check_complete(answer: HttpResponse, max_bytes: int) -> None:
    """Raise if only the beginning of the answer was read."""
    if not answer.complete:
        raise PermanentError(
            f"{answer.where}: the answer is larger than {max_bytes} bytes, "
            "which is all that an output may have",
            type="too_large",
        )


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """The seconds of `Retry-After`, at most an hour; None if it has no usable value."""
    text = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER)
    until = _timestamp(text)
    if until is None:
        return None
    # By the service's own clock if it sends one: ours may differ.
    start = _timestamp(headers.get("date", ""))
    return min(max(0.0, until - (now if start is None else start)), MAX_RETRY_AFTER)


def decoded(answer: HttpResponse) -> tuple[str, bool]:
    """The body as text and True; as base64 and False if text would destroy it."""
    kind = answer.headers.get("content-type", "").lower()
    declared = _CHARSET.search(kind)
    charset = declared[1] if declared and _TEXT_CHARSET.fullmatch(declared[1]) else ""
    if charset or _TEXT_TYPE.match(kind):
        try:
            return answer.content.decode(charset or "utf-8", "replace"), True
        except LookupError:  # Python has no charset of that name
            return answer.content.decode("utf-8", "replace"), True
    try:
        text = answer.content.decode()
    except UnicodeDecodeError:
        return b64encode(answer.content).decode(), False
    return (b64encode(answer.content).decode(), False) if "\0" in text else (text, True)


def _phrase(status: int) -> str:
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""


def _timestamp(text: str) -> float | None:
    if not text or len(text) > 64:
        return None
    try:
        moment = parsedate_to_datetime(text)
        # A date without a zone (-0000) is UTC in HTTP, not the zone of this machine.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
