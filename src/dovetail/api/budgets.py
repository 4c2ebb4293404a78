"""How much may be under way at once, by kind: in all, and by one caller.

Each kind has a budget of its own, so that a thousand clients that wait for runs keep nobody from
starting one. Of each budget one token has a share, and one address a larger one, so that nobody
takes all of it. Health has the smallest, and takes nothing of another. What it must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from dovetail.api.callers import Caller
from dovetail.config import Settings, env_name

Kind = Literal["health", "waiting", "read", "write", "large"]

HEALTH_AT_ONCE = 128
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
    found: dict[Kind, Limit] = {"health": _limit(HEALTH_AT_ONCE, settings.caller_share)}
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
