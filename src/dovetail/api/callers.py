"""Who asks: the token of a request, and the address it comes from, also behind a proxy.

What a proxy forwards counts only if the proxy is trusted by a setting; anybody can write such a
header. What it must not know: what a caller may do, or how much of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from starlette.types import Scope

IPV6_PREFIX = 64
"""One customer of a provider has all addresses of such a network: they count as one."""
NOWHERE = "an unknown address"
MOST_HOPS = 32
_FOR = re.compile(r'(?:^|[;,\s])for=(?:"([^"]*)"|([^;,\s"]*))', re.IGNORECASE)
_WITH_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::[0-9]{1,5})?")

Network = IPv4Network | IPv6Network


class Caller(NamedTuple):
    """Of one request."""

    address: str
    token: int | None = None
    """Its place in the setting; None where no token is needed."""

    @property
    def name(self) -> str:
        """Two requests with the same name stand in the same line."""
        return self.address if self.token is None else f"token {self.token}"


class Visit:
    """One connection, as far as the application may know it."""

    __slots__ = ("known", "reserved")

    def __init__(self) -> None:
        self.known = False
        """A request of it was let through."""
        self.reserved = False
        """There was no room for it: it may ask for health, and nothing else."""


def address_of(scope: Scope, proxies: Sequence[Network]) -> str:
    """The address that a request comes from: that of the client, or its network."""
    client = scope.get("client")
    peer = client[0] if client else NOWHERE
    if not proxies or not _is_trusted(peer, tuple(proxies)):
        return network_of(peer)
    return network_of(_forwarded(scope["headers"], peer, tuple(proxies)))


def _forwarded(
    headers: Iterable[tuple[bytes, bytes]], peer: str, proxies: Sequence[Network]
) -> str:
    """What the proxies say. Each adds the address that it saw at the end, so the last one that is
    no proxy of ours is the client's; what stands before it is the client's own invention.

    A proxy writes one of the two headers and passes the other on as the client sent it. Where both
    are there and differ, nothing is known but the proxy.
    """
    x, standard = [], []
    for name, value in headers:
        if name == b"x-forwarded-for":
            x += value.decode("latin-1").split(",")
        elif name == b"forwarded":
            standard += [quoted or bare for quoted, bare in _FOR.findall(value.decode("latin-1"))]
    found = {_last(hops[-MOST_HOPS:], peer, proxies) for hops in (x, standard) if hops}
    return found.pop() if len(found) == 1 else peer


def _last(hops: Sequence[str], peer: str, proxies: Sequence[Network]) -> str:
    nearest = peer
    for hop in reversed(hops):
        parts = _WITH_PORT.fullmatch(hop.strip())
        text = (parts[1] or parts[2]) if parts else hop.strip()
        try:
            nearest = str(ip_address(text))
        except ValueError:
            return peer  # hidden on purpose, or nonsense
        if not _is_trusted(nearest, tuple(proxies)):
            return nearest
    return nearest


@lru_cache(1024)
def _is_trusted(address: str, proxies: tuple[Network, ...]) -> bool:
    try:
        found = ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in proxies)


@lru_cache(4096)
def network_of(address: str) -> str:
    """The address itself; of IPv6 its network. What is no address is itself."""
    try:
        found = ip_address(address.split("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(found) if found.is_loopback else str(ip_network((found, IPV6_PREFIX), strict=False))
