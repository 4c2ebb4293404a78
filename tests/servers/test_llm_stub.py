"""The stub is a model's endpoint as far as anybody can tell, and tells what it was asked."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from .llm_stub import Fault, LlmStub, most_within

TEXT = """Invoice
Vendor: Norrland Paper AB
Date: 2026-03-04
Paper, white  2  10.00  20.00
Total: 20.00 EUR
"""


def ask(llm: LlmStub, text: str = TEXT, key: str = "k", seconds: float = 30) -> httpx2.Response:
    question = {"model": "m", "messages": [{"role": "user", "content": text}]}
    with httpx2.Client(trust_env=False, timeout=seconds) as http:
        return http.post(
            f"{llm.url}/chat/completions", json=question, headers={"Idempotency-Key": key}
        )


def content(answer: httpx2.Response) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


def test_the_stub_replies_with_the_fields_of_the_prompt(llm: LlmStub) -> None:
    found = json.loads(content(ask(llm)))
    assert found["type"] == "invoice"
    assert found["vendor"] == "Norrland Paper AB"
    assert (found["date"], found["total"], found["currency"]) == ("2026-03-04", 20.0, "EUR")
    assert found["line_items"] == [
        {"description": "Paper, white", "quantity": 2.0, "unit_price": 10.0, "amount": 20.0}
    ]
    assert content(ask(llm)) == content(ask(llm))


def test_the_stub_delays_its_replies_and_keeps_a_log(llm: LlmStub) -> None:
    llm.behave(delay=0.3)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(llm, f"{TEXT}{n // 2}", key=str(n)), range(8)))
    assert all(answer.status_code == 200 for answer in answers)
    calls = llm.calls()
    assert llm.most_at_once() >= 2
    assert {call.idempotency_key for call in calls} == set(map(str, range(8)))
    assert len({call.prompt for call in calls}) == 4
    for call in calls:
        assert began <= call.began
        assert call.ended is not None
        assert call.ended - call.began >= 0.29
    llm.forget()
    assert llm.calls() == []


@pytest.mark.parametrize(
    ("what", "status"), [("busy", 429), ("broken", 500), ("garbage", 200), ("violating", 200)]
)
def test_the_stub_misbehaves_for_the_given_prompts_and_the_given_times(
    llm: LlmStub, what: Any, status: int
) -> None:
    llm.behave(faults=[Fault(what, where="Norrland", times=2, after=7)])
    assert json.loads(content(ask(llm, "Vendor: Other")))["vendor"] == "Other"
    for _ in range(2):
        answer = ask(llm)
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == ("7" if what == "busy" else None)
        if what == "garbage":
            with pytest.raises(ValueError, match="Expecting"):
                json.loads(content(answer))
        if what == "violating":
            assert json.loads(content(answer))["type"] == "poem"
    assert json.loads(content(ask(llm)))["type"] == "invoice"
    assert [call.fault for call in llm.calls()] == ["", what, what, ""]


def test_a_hanging_call_is_in_flight_until_its_caller_leaves(llm: LlmStub) -> None:
    llm.behave(faults=[Fault("hangs", times=1), Fault("drops")])
    with pytest.raises(httpx2.TimeoutException):
        ask(llm, seconds=0.2)
    while llm.at_once():
        time.sleep(0.01)
    with pytest.raises(httpx2.TransportError):
        ask(llm)
    assert [(call.fault, call.status) for call in llm.calls()] == [("hangs", 0), ("drops", 0)]


def test_most_within_counts_the_busiest_period() -> None:
    times = [0.0, 1.4, 0.5, 0.9, 3.0, 1.0]
    assert most_within(times, 1.0) == 4
    assert most_within(times, 10.0) == 6
    assert most_within([], 1.0) == 0


def test_the_stub_has_the_same_port_after_a_crash(llm: LlmStub) -> None:
    port = llm.port
    llm.kill()
    llm.start()
    assert llm.port == port
    assert ask(llm).status_code == 200
