"""A caller that asks too much is refused, and no other notices: budgets, shares, lines, proxies.

The same with thousands of connections, and with a clock, is `./dev faults --api`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Any, get_args

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api import service
from dovetail.api.admission import (
    PARTS,
    Budgets,
    Caller,
    FairLine,
    Gate,
    Kind,
    Limit,
    OverBudget,
    Place,
    TooLong,
    address_of,
    limits_of,
    network_of,
)
from dovetail.api.app import create_app
from dovetail.api.service import ApiService
from dovetail.config import Settings
from dovetail.core.definition.validation import Checked

from .conftest import SECONDS, Server, flow, node, wait_for

KINDS = get_args(Kind)
CALLERS = [Caller(address, token) for address in ("a", "b") for token in (None, 0, 1)]


# ── budgets ──────────────────────────────────────────────────────────────────────────────


@given(
    limits=st.fixed_dictionaries(
        {
            kind: st.builds(Limit, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
            for kind in KINDS
        }
    ),
    moves=st.lists(
        st.tuples(
            st.sampled_from(CALLERS),
            st.sampled_from(["take", "turn_into", "leave"]),
            st.sampled_from(KINDS),
            st.integers(0, 99),
        ),
        max_size=60,
    ),
)
def test_no_budget_and_no_share_is_ever_exceeded_and_none_leaks(
    limits: dict[Kind, Limit], moves: list[tuple[Caller, str, Kind, int]]
) -> None:
    budgets = Budgets(limits)
    places: list[tuple[Place, set[Kind]]] = []
    for caller, move, kind, number in moves:
        if move == "take" and number % 2:
            places.append((Place(budgets, caller), set()))
        if not places:
            continue
        place, held = places[number % len(places)]
        total = sum(kind in kinds for _, kinds in places)
        by: Counter[Any] = Counter()
        for one, kinds in places:
            by.update([name for name in one.caller if name is not None and kind in kinds])
        limit = limits[kind]
        room = total < limit.most and by[place.caller.address] < limit.of_address
        if place.caller.token is not None:
            room = room and by[place.caller.token] < limit.of_token
        if move == "leave":
            place.leave()
            held.clear()
            continue
        has = kind in held if move == "take" else held == {kind}
        try:
            getattr(place, move)(kind)
        except OverBudget:
            assert not has
            assert not room
            continue
        assert has or room
        if move == "turn_into":
            held.clear()
        held.add(kind)
        for each in KINDS:
            assert budgets.held(each) == sum(each in kinds for _, kinds in places)
    for place, _ in places:
        place.leave()
    assert all(budgets.held(kind) == 0 for kind in KINDS)
    for kind in KINDS:  # and no caller is remembered
        assert budgets._by[kind] == {}


@pytest.mark.parametrize("connections", [1, 4, 16, 752, 4096])
def test_the_sum_of_all_budgets_fits_into_the_connections(connections: int) -> None:
    limits = limits_of(
        Settings(max_reads=9999, max_writes=9999, max_waiting_reads=9999), connections
    )
    assert sum(limits[kind].most for kind in PARTS) <= max(connections, len(PARTS))
    for limit in limits.values():
        assert 1 <= limit.of_token <= limit.of_address <= limit.most


def test_a_refusal_names_the_exceeded_share_and_the_setting() -> None:
    budgets = Budgets({**limits_of(Settings(max_reads=4), 100)})
    budgets.take("read", Caller("a", 0))
    budgets.take("read", Caller("a", 0))
    with pytest.raises(OverBudget, match=r"of this token .*MAX_READS and DOVETAIL_CALLER_SHARE"):
        budgets.take("read", Caller("b", 0))
    budgets.take("read", Caller("a", 1))  # of the same address, and yet there is room
    with pytest.raises(OverBudget, match="of this address"):
        budgets.take("read", Caller("a", 2))
    budgets.take("read", Caller("b", 1))
    with pytest.raises(OverBudget, match=r"^4 requests that read are under way; see DOVETAIL_MAX"):
        budgets.take("read", Caller("c", 2))


# ── behind a proxy ───────────────────────────────────────────────────────────────────────

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
FORWARDED: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    "from no trusted proxy": ("203.0.113.9", [("x-forwarded-for", "198.51.100.1")], "203.0.113.9"),
    "nothing forwarded": ("10.0.0.1", [], "10.0.0.1"),
    "one proxy": ("10.0.0.1", [("x-forwarded-for", "198.51.100.1")], "198.51.100.1"),
    "invented in front": (
        "10.0.0.1", [("x-forwarded-for", "1.1.1.1, 198.51.100.1")], "198.51.100.1",
    ),
    "two lines": (
        "10.0.0.1", [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "198.51.100.1")],
        "198.51.100.1",
    ),
    "two proxies": ("10.0.0.1", [("x-forwarded-for", "198.51.100.1, 10.2.2.2")], "198.51.100.1"),
    "proxies only": ("10.0.0.1", [("x-forwarded-for", "10.3.3.3, 10.2.2.2")], "10.3.3.3"),
    "with a port": ("10.0.0.1", [("x-forwarded-for", "198.51.100.1:4711")], "198.51.100.1"),
    "nonsense": ("10.0.0.1", [("x-forwarded-for", "198.51.100.1, ev;il")], "10.0.0.1"),
    "empty": ("10.0.0.1", [("x-forwarded-for", "")], "10.0.0.1"),
    "the standard": ("10.0.0.1", [("forwarded", "for=198.51.100.1;proto=https")], "198.51.100.1"),
    "the standard, twice": (
        "10.0.0.1", [("forwarded", 'for=1.1.1.1, for="198.51.100.1:80";by=10.0.0.1')],
        "198.51.100.1",
    ),
    "the standard, IPv6": ("10.0.0.1", [("forwarded", 'For="[2001:db8::7]:80"')], "2001:db8::/64"),
    "the standard, hidden": ("10.0.0.1", [("forwarded", "for=_hidden")], "10.0.0.1"),
    "both agree": (
        "10.0.0.1", [("forwarded", "for=198.51.100.1"), ("x-forwarded-for", "198.51.100.1")],
        "198.51.100.1",
    ),
    "both differ, so one is the client's own": (
        "10.0.0.1", [("forwarded", "for=192.0.2.7"), ("x-forwarded-for", "198.51.100.1")],
        "10.0.0.1",
    ),
    "IPv4 in IPv6": ("::ffff:10.0.0.1", [("x-forwarded-for", "198.51.100.1")], "198.51.100.1"),
    "a proxy by IPv6": ("fd00::1", [("x-forwarded-for", "2001:db8::1:2")], "2001:db8::/64"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORWARDED)
def test_forwarded_addresses_count_only_from_a_trusted_proxy(case: str) -> None:
    peer, headers, expected = FORWARDED[case]
    assert address_of(scope_of(peer, headers), PROXIES) == expected
    assert address_of(scope_of(peer, headers), ()) == network_of(peer)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x-forwarded-for", "forwarded"]),
            st.text('0123456789.:,;= for"[]_x', max_size=40)
            | st.ip_addresses().map(str)
            | st.ip_addresses().map("for={}".format),
        ),
        max_size=4,
    )
)
def test_a_client_without_a_proxy_cannot_forge_its_address_by_headers(
    headers: list[tuple[str, str]],
) -> None:
    assert address_of(scope_of("203.0.113.9", headers), PROXIES) == "203.0.113.9"
    found = address_of(scope_of("10.0.0.1", headers), PROXIES)
    ip_address(found.partition("/")[0])


def scope_of(peer: str, headers: list[tuple[str, str]]) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return {"client": (peer, 1234), "headers": pairs}


# ── lines ────────────────────────────────────────────────────────────────────────────────


async def test_callers_take_turns_even_if_one_sends_much_more() -> None:
    line, done, first = FairLine(SECONDS), [], asyncio.Event()

    async def piece(caller: str, number: int) -> None:
        async with line.turn(caller):
            if number == 0:
                await first.wait()
            done.append((caller, number))

    pieces = [asyncio.create_task(piece("a", number)) for number in range(5)]
    await asyncio.sleep(0)
    pieces += [asyncio.create_task(piece("b", number)) for number in (1, 2)]
    pieces += [asyncio.create_task(piece("c", 1))]
    await asyncio.sleep(0)
    first.set()
    await asyncio.gather(*pieces)
    assert done == [
        ("a", 0), ("b", 1), ("c", 1), ("a", 1), ("b", 2), ("a", 2), ("a", 3), ("a", 4),
    ]  # fmt: skip


async def test_a_turn_that_waits_too_long_is_refused_and_the_queue_continues() -> None:
    line, release = FairLine(0.05), asyncio.Event()

    async def hold() -> None:
        async with line.turn("a"):
            await release.wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    with pytest.raises(TooLong):
        async with line.turn("b"):
            raise AssertionError("it is another's turn")
    release.set()
    await holding
    async with line.turn("b"):
        pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
def test_a_cancelled_waiter_leaves_the_fair_queue_consistent(
    pieces: list[tuple[str, bool]],
) -> None:
    async def act() -> None:
        line, inside, done = FairLine(SECONDS), 0, 0

        async def piece(caller: str) -> None:
            nonlocal inside, done
            async with line.turn(caller):
                inside += 1
                try:
                    assert inside == 1
                    await asyncio.sleep(0)
                    done += 1
                finally:
                    inside -= 1

        tasks = []
        for caller, leaves in pieces:
            task = asyncio.create_task(piece(caller))
            tasks.append(task)
            await asyncio.sleep(0)
            if leaves:
                task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert done + sum(isinstance(one, asyncio.CancelledError) for one in found) >= len(pieces)
        async with line.turn("z"):  # no caller holds it
            pass

    asyncio.run(asyncio.wait_for(act(), SECONDS))


async def test_of_many_simultaneous_requests_a_few_start_in_each_turn_of_the_loop() -> None:
    gate, begun = Gate(each_turn=2), []

    async def one(caller: str, number: int) -> None:
        await gate.pass_through(caller)
        begun.append((caller, number))

    tasks = [asyncio.create_task(one("a", number)) for number in range(9)]
    tasks.append(asyncio.create_task(one("b", 0)))
    tasks[5].cancel()  # and no caller waits for it
    most = 0
    while not all(task.done() for task in tasks):
        before = len(begun)
        await asyncio.sleep(0)
        most = max(most, len(begun) - before)
    assert most == 2
    assert len(begun) == 9
    assert begun.index(("b", 0)) <= 4  # though it came last
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.wait_for(gate.pass_through("c"), SECONDS)


# ── the application ──────────────────────────────────────────────────────────────────────

LARGE = b'{"name": "x", "nodes": [' + b" " * 20_000 + b"]}"
MIDDLE = b'{"name": "x", "nodes": [' + b" " * 3_000 + b"]}"
WRITER, READER, OTHER = "writer", "reader", "other"


class Waiting:
    """Commands of an engine in which runs never end, and large bodies are checked when they may."""

    def __init__(self) -> None:
        self.waiting = 0
        self.checked: list[Any] = []
        self.may_check = threading.Event()
        self.checking = threading.Event()

    async def ended(self, run_id: str) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1

    async def summary(self, run_id: str, *, max_result_bytes: int | None) -> dict[str, Any]:
        return {"run_id": run_id, "finished_at": None}

    async def last_seq(self, run_id: str) -> int:
        return 0

    async def watch(self, run_id: str, after: int) -> AsyncIterator[Any]:
        await self.ended(run_id)
        yield

    async def list_runs(self, *_: Any) -> dict[str, Any]:
        return {"items": []}

    async def learn_handlers(self) -> None:
        pass

    def validate(self, source: Any) -> Checked:
        self.checking.set()
        if len(source.text) > 16 * 1024:
            assert self.may_check.wait(SECONDS)
        self.checked.append(source.data)
        return Checked(None, (), (), [])

    async def cancel(self, run_id: str, **_: Any) -> Any:
        raise service.Overloaded("not under test")


class Alone:
    async def check(self) -> None:
        pass

    async def backlog(self) -> int:
        return 0


@asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[tuple[Waiting, Callable[..., Any]]]:
    commands = Waiting()
    tokens = (WRITER, f"{READER}:read", f"{OTHER}:read")
    given_ = Settings(tokens=tokens, **settings)
    served = ApiService(commands, Alone(), given_)  # type: ignore[arg-type]
    app = create_app(served, "1")
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://localhost", timeout=SECONDS
    ) as client:
        started: list[asyncio.Task[httpx2.Response]] = []

        def ask(
            method: str, path: str, token: str = READER, **more: Any
        ) -> asyncio.Task[httpx2.Response]:
            headers = {"authorization": f"Bearer {token}", **more.pop("headers", {})}
            if path == WAITS["events"]:
                headers["accept"] = "text/event-stream"
            task = asyncio.create_task(client.request(method, path, headers=headers, **more))
            started.append(task)
            return task

        try:
            yield commands, ask
        finally:
            commands.may_check.set()
            served.closing.set()
            await asyncio.gather(*started, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


WAITS = {"wait": "/api/v1/runs/x?wait=600", "events": "/api/v1/runs/x/events"}


@pytest.mark.parametrize("how", WAITS)
async def test_a_waiting_request_uses_no_read_or_write_budget_and_not_all_waiting_reads(
    how: str,
) -> None:
    async with asking(max_waiting_reads=4, max_reads=2, max_writes=2) as (commands, ask):
        for _ in range(2):
            ask("GET", WAITS[how])
        await until(lambda: commands.waiting == 2)
        refused = await ask("GET", WAITS[how])
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "DOVETAIL_MAX_WAITING_READS" in refused.json()["detail"]
        for path in ("/api/v1/runs", "/health/live"):
            assert (await ask("GET", path)).status_code == 200
        written = await ask("POST", "/api/v1/runs/x/cancel", WRITER)
        assert written.json()["detail"] == "not under test"  # the endpoint was reached


@pytest.mark.parametrize("how", WAITS)
async def test_a_finished_wait_frees_its_budget(how: str) -> None:
    async with asking(max_waiting_reads=2) as (commands, ask):
        first = ask("GET", WAITS[how])
        await until(lambda: commands.waiting == 1)
        first.cancel()
        await until(lambda: commands.waiting == 0)
        ask("GET", WAITS[how])
        await until(lambda: commands.waiting == 1)


@pytest.mark.parametrize("length", [True, False])
async def test_large_bodies_of_one_token_are_bounded_and_another_token_is_served_next(
    length: bool,
) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        yield body

    def large(token: str, body: bytes = LARGE) -> asyncio.Task[httpx2.Response]:
        content = body if length else pieces(body)
        headers = {"content-type": "application/json"}
        return ask("POST", "/api/v1/workflows/validate", token, content=content, headers=headers)

    async with asking(max_large_bodies=8) as (commands, ask):
        flood = [large(READER) for _ in range(9)]
        await until(commands.checking.is_set)
        await until(lambda: sum(one.done() for one in flood) == 5)  # four of eight are its share
        refused = next(one.result() for one in flood if one.done())
        assert refused.status_code == 429
        assert "DOVETAIL_MAX_LARGE_BODIES" in refused.json()["detail"]
        other = large(OTHER, LARGE.replace(b'"x"', b'"z"'))
        for _ in range(20):
            await asyncio.sleep(0.001)
        small = await ask(
            "POST", "/api/v1/workflows/validate", OTHER, json={"name": "y", "nodes": []}
        )
        assert small.status_code == 200  # while the large one is under way
        commands.may_check.set()
        assert (await other).status_code == 200
        answers = Counter([one.status_code for one in await asyncio.gather(*flood)])
        assert answers == {200: 4, 429: 5}
        # It came last, and was neither last nor behind what had waited before it.
        assert [one["name"] for one in commands.checked].index("z") <= 3


async def test_a_large_body_that_waits_too_long_is_429_with_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "MAX_QUEUE_SECONDS", 0.05)
    async with asking() as (commands, ask):
        headers = {"content-type": "application/json"}
        path = "/api/v1/workflows/validate"
        first = ask("POST", path, content=LARGE, headers=headers)
        await until(commands.checking.is_set)
        refused = await ask("POST", path, content=LARGE, headers=headers)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        commands.may_check.set()
        assert (await first).status_code == 200


async def test_other_requests_are_served_between_two_medium_bodies() -> None:
    async with asking() as (commands, ask):
        headers = {"content-type": "application/json"}
        path = "/api/v1/workflows/validate"
        flood = [ask("POST", path, content=MIDDLE, headers=headers) for _ in range(30)]
        most, turns = 0, 0
        while not all(one.done() for one in flood):
            before = len(commands.checked)
            await asyncio.sleep(0)
            most, turns = max(most, len(commands.checked) - before), turns + 1
        assert len(commands.checked) == 30
        assert most <= 2  # the one that is called, and the one that called it
        assert turns > 30


# ── a real server ────────────────────────────────────────────────────────────────────────


def test_runs_are_triggered_while_other_requests_wait_for_runs(
    start: Callable[..., Server], name: str
) -> None:
    server = start(
        DOVETAIL_TOKENS=f"{WRITER},{READER}:read",
        DOVETAIL_MAX_WAITING_READS="4",
        DOVETAIL_MAX_WRITES="2",
        DOVETAIL_MAX_READS="2",
    )
    api = server.client(authorization=f"Bearer {WRITER}")
    reader = server.client(authorization=f"Bearer {READER}")
    api.register(flow(name, node("a", "until", config={"file": "go"})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    path = f"/api/v1/runs/{run_id}"

    def waits() -> None:
        headers = {"authorization": f"Bearer {READER}"}
        status = 429
        while status == 429:  # a look at whether we wait takes a place for a moment
            url = f"{server.url}{path}?wait=30"
            status = httpx2.get(url, headers=headers, timeout=60, trust_env=False).status_code

    waiting = [threading.Thread(target=waits) for _ in range(2)]
    for one in waiting:
        one.start()
    wait_for(
        lambda: reader("GET", f"/runs/{run_id}?wait=0.01").status_code == 429, "both of them wait"
    )
    for feed in ("events", "logs"):
        answer = reader("GET", f"/runs/{run_id}/{feed}", headers={"accept": "text/event-stream"})
        assert answer.status_code == 429
    assert reader("GET", f"/runs/{run_id}/logs").status_code == 200
    for _ in range(3):
        api.post(f"/workflows/{name}/runs")
        assert reader("GET", f"/runs/{run_id}").status_code == 200
        assert reader("GET", "//health/live").status_code == 200
    (server.folder / "go").touch()
    for one in waiting:
        one.join(SECONDS)
    assert server.stop() == 0
