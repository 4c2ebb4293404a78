"""Whether there is room for a request: ASGI, behind the guard, in front of every endpoint.

A request takes a place in the budget of its kind, and leaves it when it is answered. An endpoint
that begins to wait moves to the budget of those that wait. What it must not know: who may ask, or
what an endpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.api.budgets import Budgets, Kind, OverBudget, Place
from dovetail.api.callers import NOWHERE, Caller, Network, address_of
from dovetail.api.line import Gate
from dovetail.api.problems import Refusal, refuse
from dovetail.api.security import READING_METHODS, READING_POSTS

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
                await refuse(_told(error), scope, receive, send)
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
            raise _told(error) from None


def brings_much(request: Request) -> None:
    """The body of this request is large. Raises `Refusal`, before more of it is read."""
    if place := _place_of(request):
        try:
            place.take("large")
        except OverBudget as error:
            raise _told(error) from None


def caller_of(request: Request) -> str:
    place = _place_of(request)
    return NOWHERE if place is None else place.caller.name


def _place_of(request: Request) -> Place | None:
    place: Place | None = request.scope["state"].get("place")
    return place


def _told(error: OverBudget) -> Refusal:
    return Refusal(429, str(error))
