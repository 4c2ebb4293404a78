"""The small worlds that are searched: each graph with the faults that could hurt it most.

Some are searched by every run of the tests, all of them by `python -m tests.model`. A scenario with
`every_order` mixes the processes in every way; the others leave out what comes to the same.
"""

from __future__ import annotations

from ..core.walk import graph
from .world import Scenario

ONE_RETRY = {
    "max_retries": 1,
    "retry": {"base_delay_seconds": 1, "max_delay_seconds": 1, "jitter": 0},
}
ONCE = {"delivery": "at_most_once"}
TAGGED = {"resource_tag": "api"}
IF_A = {"condition": "{{ a.go }}"}
IF_B = {"condition": "{{ b.go }}"}
ALLOWED = {"allow_failure": True}
IF_A_FAILED = {"condition": "{{ a.status == 'FAILED' }}"}
YES_OR_NO = ("yes", "no")

one = graph({"a": []})
chain = graph({"a": [], "b": ["a"]})
fork = graph({"a": [], "b": ["a"], "c": ["a"]})
join = graph({"a": [], "b": [], "c": ["a", "b"]})
diamond = graph({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
side_by_side = graph({"a": [], "b": []})
going_on = graph({"a": [], "b": [], "c": ["a", "b"]}, on_failure="continue")
tried_again = graph({"a": [], "b": ["a"]}, b=ONE_RETRY)
at_most_once = graph({"a": [], "b": ["a"]}, a=ONCE)
one_at_a_time = graph({"a": [], "b": [], "c": ["a"]}, max_concurrency=1)
parked_in_turn = graph({"a": [], "b": []}, max_concurrency=1, a=TAGGED)
two_conditions = graph({"a": [], "b": [], "c": ["a"], "d": ["b"]}, c=IF_A, d=IF_B)
condition_at_join = graph({"a": [], "b": [], "c": ["a", "b"], "d": ["c"]}, c=IF_A)
condition = graph({"a": [], "b": ["a"]}, b=IF_A)
allowed = graph({"a": [], "b": ["a"]}, a=ALLOWED)
allowed_at_join = graph({"a": [], "b": [], "c": ["a", "b"]}, a=ALLOWED)
allowed_condition = graph({"a": [], "b": ["a"]}, a=ALLOWED, b=IF_A_FAILED)
limited = graph({"a": []}, a={**TAGGED, **ONE_RETRY})
EACH = {"for_each": [1, 2]}
mapped = graph({"m": [], "b": ["m"]}, m=EACH)
mapped_window = graph(
    {"m": [], "b": ["m"]}, m={"for_each": {"items": [1, 2], "max_concurrency": 1}}
)
mapped_failures = graph({"m": [], "b": ["m"]}, m={"for_each": {"items": [1, 2], "max_failures": 1}})
mapped_once = graph({"m": [], "b": ["m"]}, m={**EACH, **ONCE})
mapped_in_turn = graph({"m": [], "a": []}, m=EACH, max_concurrency=1)
mapped_sibling = graph({"m": [], "a": []}, m=EACH)


SHORT = (
    Scenario("a diamond without faults or sweeps", diamond, {}, sweeps=False),
    Scenario("a chain, two deaths", chain, {"kill": 2}, workers=1),
    Scenario("a chain in every order, a death", chain, {"kill": 1}, every_order=True),
    Scenario("a fan-in, a death", join, {"kill": 1}),
    Scenario("messages doubled and lost", one, {"double": 1, "lose": 1, "kill": 1}),
    Scenario("a lease that ends too early", chain, {"expire": 1, "double": 1}),
    Scenario("a failure and its backoff", tried_again, {"fail": 1, "kill": 1}, workers=1),
    Scenario("at most once", at_most_once, {"kill": 1, "expire": 1}),
    Scenario("cancel and retry", chain, {"cancel": 1, "retry": 1}),
    Scenario("a rerun over a death", one, {"retry": 1, "kill": 1}, rerun_from=("a",)),
    Scenario("a rerun in every order", one, {"retry": 1}, rerun_from=("a",), every_order=True),
    Scenario("a failed run and its running sibling", side_by_side, {"fail": 1, "retry": 1}),
    Scenario("a failure that is allowed", allowed, {"fail": 2, "kill": 1}, workers=1),
    Scenario("an allowed failure above a join", allowed_at_join, {"fail": 2, "retry": 1}),
    Scenario("a condition on an allowed failure", allowed_condition, {"fail": 1, "kill": 1}),
    Scenario("one at a time", one_at_a_time, {"kill": 1}),
    Scenario("parked", limited, {"park": 1, "kill": 1}),
    Scenario("cached", chain, {"kill": 1}, cached=("b",)),
    Scenario("a condition", condition, {"kill": 1}, outputs={"a": YES_OR_NO}),
    Scenario("two conditions at once", two_conditions, {}, outputs={"a": YES_OR_NO}),
    Scenario("calls that time out", chain, {"repeat": 1, "kill": 1}),
    Scenario("duties that come too early", one, {"haste": 1, "kill": 1}),
    Scenario("a Redis that forgets", one, {"rollback": 1, "expire": 1}),
    Scenario("two items, a death", mapped, {"kill": 1}),
    Scenario("two items, a doubled message", mapped, {"double": 1}),
    Scenario("two items one after the other", mapped_window, {"kill": 1}),
    Scenario("two items, one may fail", mapped_failures, {"fail": 2, "kill": 1}, workers=1),
    Scenario("two items retried", mapped_failures, {"fail": 2, "retry": 1}, rerun_from=("m",)),
    Scenario("two items and one slot", mapped_in_turn, {"kill": 1}),
    Scenario("two items cancelled and retried", mapped, {"cancel": 1, "retry": 1}),
)

LONG = (
    *SHORT,
    Scenario("a chain, three deaths", chain, {"kill": 3}),
    Scenario("a fork, two deaths", fork, {"kill": 2}),
    Scenario("a diamond, a death", diamond, {"kill": 1}),
    Scenario("a diamond, two deaths, one worker", diamond, {"kill": 2}, workers=1),
    Scenario("a diamond, a false end of a lease", diamond, {"expire": 1}),
    Scenario(
        "a chain in every order, a lost lease", chain, {"expire": 1, "kill": 1}, every_order=True
    ),
    Scenario("a fan-in, doubled messages", join, {"double": 2}),
    Scenario("two false ends, two deaths, a double", one, {"kill": 2, "expire": 2, "double": 1}),
    Scenario(
        "everything happens to one node", one, {"kill": 1, "double": 1, "lose": 1, "expire": 1}
    ),
    Scenario("tried again and lost", tried_again, {"fail": 2, "kill": 1, "expire": 1}),
    Scenario(
        "at most once, retried", at_most_once, {"kill": 1, "expire": 1, "fail": 1, "retry": 1}
    ),
    Scenario("cancelled and retried over deaths", chain, {"cancel": 1, "retry": 1, "kill": 1}),
    Scenario(
        "failed, retried, and a lease lost", side_by_side, {"fail": 1, "retry": 1, "expire": 1}
    ),
    Scenario(
        "an allowed failure, retried and lost",
        allowed_at_join,
        {"fail": 2, "retry": 1, "kill": 1},
        rerun_from=("a", "b"),
    ),
    Scenario("going on after a failure", going_on, {"fail": 1, "retry": 1, "kill": 1}),
    Scenario(
        "rerun from the middle", chain, {"retry": 1, "kill": 1, "lose": 1}, rerun_from=("a", "b")
    ),
    Scenario("one at a time, deaths and leases", one_at_a_time, {"kill": 1, "expire": 1}),
    Scenario("parked in turn", parked_in_turn, {"park": 2, "kill": 1}),
    Scenario("conditions and deaths", two_conditions, {"kill": 1}, outputs={"a": YES_OR_NO}),
    Scenario("a condition at a join", condition_at_join, {"kill": 1}, outputs={"a": YES_OR_NO}),
    Scenario(
        "a condition decided over a rerun",
        condition,
        {"cancel": 1, "retry": 1, "kill": 1},
        outputs={"a": YES_OR_NO},
        rerun_from=("a",),
    ),
    Scenario("timeouts and deaths", chain, {"repeat": 2, "kill": 1, "fail": 1}),
    Scenario("hasty duties", chain, {"haste": 2, "kill": 1}),
    Scenario("a Redis that forgets, and deaths", one, {"rollback": 1, "expire": 2, "kill": 1}),
    Scenario("a Redis that forgets a chain", chain, {"rollback": 1, "kill": 1}),
    Scenario("two items, two deaths, a double", mapped, {"kill": 2, "double": 1}),
    Scenario("two items, a lost lease, a double", mapped, {"expire": 1, "double": 1}),
    Scenario("two items, a lost message, a death", mapped, {"lose": 1, "kill": 1}),
    Scenario("two items in every order, a death", mapped, {"kill": 1}, every_order=True),
    Scenario("two items at most once", mapped_once, {"kill": 1, "expire": 1}),
    Scenario("two items from the cache", mapped, {"kill": 1}, cached=("m",)),
    Scenario("two items that Redis forgets", mapped, {"rollback": 1}),
    Scenario("two items adopted by a retry", mapped_sibling, {"fail": 1, "retry": 1}),
    Scenario(
        "two items failed, retried, and a death",
        mapped_failures,
        {"fail": 2, "retry": 1, "kill": 1},
        workers=1,
        rerun_from=("m",),
    ),
)
