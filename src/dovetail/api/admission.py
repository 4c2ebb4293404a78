"""Whether there is room for a request: ASGI, behind the guard, in front of every endpoint.

Each kind of request (reads, writes, waits, health) has a budget. One token has a share of it, and
one address a larger share, so that no caller takes all of it. Clients that wait for runs do not
keep others from triggering. The address of a caller comes from a forwarded header only if the
proxy is trusted by a setting. Large bodies are worked on one at a time, in turn by caller.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal, NamedTuple

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.api.problems import Refusal, refuse
from dovetail.api.security import READING_METHODS, READING_POSTS
from dovetail.config import Settings, env_name

IPV6_PREFIX = 64
"""One customer of a provider has all addresses of such a network: they count as one."""
NOWHERE = "an unknown address"
MAX_HOPS = 32
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
    found = {_last(hops[-MAX_HOPS:], peer, proxies) for hops in (x, standard) if hops}
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


Kind = Literal["health", "waiting", "read", "write", "large"]

MAX_HEALTH_REQUESTS = 128
"""Health is answered from what is known; only while a store hangs do requests pile up."""
PARTS: Mapping[Kind, float] = {"waiting": 0.5, "read": 0.25, "write": 0.25}
"""Of the connections there may be: a request holds one for as long as it takes."""
SETTING_OF: Mapping[Kind, str] = {
    "waiting": "max_waiting_reads",
    "read": "max_reads",
    "write": "max_writes",
    "large": "max_large_bodies",
}
_WORDS: Mapping[Kind, str] = {
    "health": "questions about health",
    "waiting": "requests that wait (event streams and ?wait=)",
    "read": "requests that read",
    "write": "requests that write",
    "large": "large bodies",
}


class Limit(NamedTuple):
    most: int
    of_token: int
    of_address: int
    """More than one token's: many may be behind one address, and one of them must not use up what
    the others have."""


class OverBudget(Exception):
    """One request more would be too many."""


def limits_of(settings: Settings, connections: int) -> dict[Kind, Limit]:
    """The budgets of a server that may have so many connections."""
    found: dict[Kind, Limit] = {"health": _limit(MAX_HEALTH_REQUESTS, settings.caller_share)}
    for kind, name in SETTING_OF.items():
        most = getattr(settings, name)
        if kind in PARTS:
            most = max(1, min(most, int(connections * PARTS[kind])))
        found[kind] = _limit(most, settings.caller_share)
    return found


def _limit(most: int, share: float) -> Limit:
    return Limit(most, max(1, int(most * share)), max(1, int(most * (1 + share) / 2)))


class Budgets:
    """Counts what is under way."""

    def __init__(self, limits: Mapping[Kind, Limit]) -> None:
        self._limits = limits
        self._held: dict[Kind, int] = dict.fromkeys(limits, 0)
        self._by: dict[Kind, dict[int | str, int]] = {kind: {} for kind in limits}

    def held(self, kind: Kind) -> int:
        return self._held[kind]

    def take(self, kind: Kind, caller: Caller) -> None:
        """One more of this kind; `give` it back. Raises `OverBudget`, and counts nothing then."""
        limit, by = self._limits[kind], self._by[kind]
        token, address = caller.token, caller.address
        of_address = by.get(address, 0)
        of_token = 0 if token is None else by.get(token, 0)
        if self._held[kind] >= limit.most:
            raise OverBudget(f"{limit.most:,} {_WORDS[kind]} are under way{_named(kind)}")
        if of_token >= limit.of_token:
            raise OverBudget(_share(limit.of_token, kind, "token"))
        if of_address >= limit.of_address:
            raise OverBudget(_share(limit.of_address, kind, "address"))
        self._held[kind] += 1
        by[address] = of_address + 1
        if token is not None:
            by[token] = of_token + 1

    def give(self, kind: Kind, caller: Caller) -> None:
        self._held[kind] -= 1
        by = self._by[kind]
        for name in (caller.address, caller.token):
            if name is not None:
                by[name] -= 1
                if not by[name]:
                    del by[name]  # addresses come and go


def _share(most: int, kind: Kind, which: str) -> str:
    return (
        f"{most:,} {_WORDS[kind]} of this {which} are under way, which is its share"
        f"{_named(kind)} and {env_name('caller_share')}"
    )


def _named(kind: Kind) -> str:
    return f"; see {env_name(SETTING_OF[kind])}" if kind in SETTING_OF else ""


class Place:
    """What one request holds."""

    __slots__ = ("_budgets", "_held", "caller")

    def __init__(self, budgets: Budgets, caller: Caller) -> None:
        self._budgets = budgets
        self._held: list[Kind] = []
        self.caller = caller

    def take(self, kind: Kind) -> None:
        """Raises `OverBudget`. What the request holds already, it does not take twice."""
        if kind not in self._held:
            self._budgets.take(kind, self.caller)
            self._held.append(kind)

    def turn_into(self, kind: Kind) -> None:
        """From here on it counts as this kind alone. Raises `OverBudget`."""
        if self._held == [kind]:
            return
        self._budgets.take(kind, self.caller)
        self.leave()
        self._held.append(kind)

    def leave(self) -> None:
        for kind in self._held:
            self._budgets.give(kind, self.caller)
        self._held.clear()


class TooLong(Exception):
    """The line was too long to wait for."""


class FairLine:
    def __init__(self, patience: float) -> None:
        """`patience`: so many seconds a piece may wait."""
        self._patience = patience
        self._busy = False
        self._last = ""
        # The first caller is the next; it goes to the end when its piece is done.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, caller: str, *, goes_on: bool = False) -> AsyncIterator[None]:
        """Nothing else of this line is done meanwhile. Raises `TooLong`.

        `goes_on`: with something begun, which comes before what this caller has not begun.
        """
        if self._busy:
            await self._wait(caller, goes_on)
        self._busy, self._last = True, caller
        try:
            yield
        finally:
            self._busy = False
            self._call_next()

    async def _wait(self, caller: str, goes_on: bool) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pieces = self._waiting.setdefault(caller, deque())
        if goes_on:
            pieces.appendleft(called)
        else:
            pieces.append(called)
        try:
            await asyncio.wait_for(asyncio.shield(called), self._patience)
        except BaseException as error:
            if called.done():  # and yet it was called: the turn is another's
                self._busy = False
                self._call_next()
            else:
                self._leave(caller, called)
            if isinstance(error, TimeoutError):
                raise TooLong from None
            raise

    def _leave(self, caller: str, called: asyncio.Future[None]) -> None:
        called.cancel()
        if pieces := self._waiting.get(caller):
            pieces.remove(called)
            if not pieces:
                del self._waiting[caller]

    def _call_next(self) -> None:
        if self._last in self._waiting:  # it has just had its turn: all others are before it
            self._waiting[self._last] = self._waiting.pop(self._last)
        if not self._waiting:
            return
        self._last = caller = next(iter(self._waiting))
        pieces = self._waiting[caller]
        called = pieces.popleft()
        if not pieces:
            del self._waiting[caller]
        self._busy = True  # from now on: no other caller may come between
        called.set_result(None)


class Gate:
    """Lets a few begin in each turn of the event loop, in turn by caller.

    A thousand requests that arrive together would otherwise all begin in the same turn of the
    loop, and all other requests would wait until the last of them has begun. If none waits, passing
    costs next to nothing.
    """

    def __init__(self, each_turn: int = 2) -> None:
        self._each_turn = each_turn
        self._left = each_turn
        self._opening = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def pass_through(self, caller: str) -> None:
        if passes := self.enter(caller):
            await passes  # a cancelled request is passed over

    def enter(self, caller: str) -> asyncio.Future[None] | None:
        """None if the caller may begin at once; else a future that is done when it may."""
        if self._left:
            self._left -= 1
            self._open_soon()
            return None
        passes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(passes)
        return passes

    def _open_soon(self) -> None:
        if not self._opening:
            self._opening = True
            asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        self._opening = False
        self._left = self._each_turn
        while self._left and self._waiting:
            caller = next(iter(self._waiting))
            waiting = self._waiting.pop(caller)
            passes = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting
            if not passes.done():
                passes.set_result(None)
                self._left -= 1
        if self._left < self._each_turn:
            self._open_soon()


LIVE = "/health/live"
"""Never refused: it waits for nothing."""
HEALTH_PATHS = frozenset({LIVE, "/health/ready", "/health/workers"})


class Admission:
    """ASGI: the application, as long as there is room for a request; else 429."""

    def __init__(self, app: ASGIApp, budgets: Budgets, proxies: Sequence[Network] = ()) -> None:
        self._app = app
        self._budgets = budgets
        self._proxies = proxies
        self._gate = Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == LIVE:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        caller = Caller(address_of(scope, self._proxies), state.get("token"))
        place = state["place"] = Place(self._budgets, caller)
        try:
            try:
                kind = kind_of(scope)
                if kind != "health" and (visit := state.get("visit")) and visit.reserved:
                    raise OverBudget("too many connections are open: only health is answered here")
                place.take(kind)
                if kind != "health":
                    await self._gate.pass_through(caller.name)
            except OverBudget as error:
                await refuse(_refusal(error), scope, receive, send)
                return
            await self._app(scope, receive, send)
        finally:
            place.leave()


def kind_of(scope: Scope) -> Kind:
    path = scope["path"]
    if path in HEALTH_PATHS:
        return "health"
    reads = scope["method"] in READING_METHODS or path in READING_POSTS
    return "read" if reads else "write"


def waits(request: Request) -> None:
    """This request waits from here on: for a run's end, or for its events.

    It no longer counts as one that reads. Raises `Refusal` if as many wait as may.
    """
    if place := _place_of(request):
        try:
            place.turn_into("waiting")
        except OverBudget as error:
            raise _refusal(error) from None


def brings_much(request: Request) -> None:
    """The body of this request is large. Raises `Refusal`, before more of it is read."""
    if place := _place_of(request):
        try:
            place.take("large")
        except OverBudget as error:
            raise _refusal(error) from None


def caller_of(request: Request) -> str:
    place = _place_of(request)
    return NOWHERE if place is None else place.caller.name


def _place_of(request: Request) -> Place | None:
    place: Place | None = request.scope["state"].get("place")
    return place


def _refusal(error: OverBudget) -> Refusal:
    return Refusal(429, str(error))
