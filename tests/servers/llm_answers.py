"""The process of an LlmStub: an OpenAI-compatible endpoint without a model, over real HTTP.

It answers chat completions after a set time, with fields that it reads out of the prompt itself, so
that equal prompts have equal answers. It keeps a log of every call, and misbehaves on
order. It runs alone, by an interpreter without site-packages, and one call costs it a fraction of a
millisecond: a benchmark on the same cores must not measure it.

    POST /v1/chat/completions   an answer, or the fault whose `where` is in the prompt
    POST /behave                {"delay": seconds, "faults": [{"where", "what", "times", "after"}]}
    GET  /stats                 {"calls": [[began, ended, status, what, key, prompt's hash]], …}
    POST /forget                the log is emptied
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

HOST = "127.0.0.1"
STATUSES = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}
BROKEN = 500
HUNG_UP = 0
"""The status of a call that got no answer: the caller has gone, or was sent away."""

VENDOR = re.compile(r"^(?:Vendor|From):[ \t]*(\S.*)$", re.MULTILINE)
DATE = re.compile(r"\b(\d{4}-\d\d-\d\d)\b")
TOTAL = re.compile(
    r"^Total:?[ \t]*([A-Z]{3})?[ \t]*([0-9]+\.[0-9]{2})[ \t]*([A-Z]{3})?", re.MULTILINE
)
KIND = re.compile(r"\b(invoice|receipt|contract|letter)\b", re.IGNORECASE)
ITEM = re.compile(r"^(\S.*?)  +([0-9]+)  +([0-9.]+)  +([0-9.]+)$", re.MULTILINE)
SURE = 0.95


def fields(text: str) -> dict[str, Any]:
    """What a model would have found in this text."""
    vendor, date, total = VENDOR.search(text), DATE.search(text), TOTAL.search(text)
    kind = KIND.search(text)
    found = {
        "type": kind[1].lower() if kind else "other",
        "vendor": vendor[1].strip() if vendor else None,
        "date": date[1] if date else None,
        "currency": (total[1] or total[3]) if total else None,
        "total": float(total[2]) if total else None,
    }
    items = [
        {
            "description": what,
            "quantity": float(quantity),
            "unit_price": float(price),
            "amount": float(amount),
        }
        for what, quantity, price, amount in ITEM.findall(text)
    ]
    sure = {name: 0.0 if value is None else SURE for name, value in found.items()}
    sure["line_items"] = SURE if items else 0.0
    overall = round(sum(sure.values()) / len(sure), 4)
    return {**found, "line_items": items, "confidence": overall, "confidences": sure}


CONTENTS: dict[str, Callable[[str], str]] = {
    "garbage": lambda _: "I am sorry, but as a model I would rather tell you a story: {once",
    "violating": lambda _: json.dumps({"type": "poem", "total": "many", "line_items": 7}),
}
"""What stands where the fields should: no JSON, or not as the schema has it."""


class Stub:
    """What was asked, and how it is answered from now on."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.faults: list[dict[str, Any]] = []
        self.calls: list[list[Any]] = []
        self.most_at_once = 0
        self._at_once = 0

    def behave(self, wanted: dict[str, Any]) -> None:
        self.delay = float(wanted.get("delay", self.delay))
        self.faults = wanted.get("faults", self.faults)

    def begin(self, key: str, prompt: str) -> tuple[list[Any], dict[str, Any]]:
        """The line of the log that this call has, and what is to happen to it."""
        fault = next((one for one in self.faults if self._is_due(one, prompt)), {"what": ""})
        digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
        call = [time.monotonic(), None, None, fault["what"], key, digest]
        self.calls.append(call)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        return call, fault

    def end(self, call: list[Any], status: int) -> None:
        call[1], call[2] = time.monotonic(), status
        self._at_once -= 1

    def reported(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "calls": self.calls,
            "at_once": self._at_once,
            "most_at_once": self.most_at_once,
        }

    def forget(self) -> None:
        """Those under way are kept: they end in the next log."""
        self.calls = [call for call in self.calls if call[1] is None]
        self.most_at_once = self._at_once

    def _is_due(self, fault: dict[str, Any], prompt: str) -> bool:
        if fault.get("where", "") not in prompt or fault.get("times") == 0:
            return False
        if fault.get("times") is not None:
            fault["times"] -= 1
        return True


class Connection(asyncio.Protocol):
    """HTTP/1.1, kept alive, one request after the other."""

    def __init__(self, stub: Stub, loop: asyncio.AbstractEventLoop) -> None:
        self._stub = stub
        self._loop = loop
        self._received = b""
        self._call: list[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._stub.end(self._call, HUNG_UP)
            self._call = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._received = rest[length:]
        method, path, _ = first.split(" ", 2)
        self._asked(method, path, headers, rest[:length])

    def _asked(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        match method, path:
            case "POST", "/v1/chat/completions":
                self._complete(headers, body)
            case "GET", "/stats":
                self._answer(200, self._stub.reported())
            case "POST", "/behave":
                self._stub.behave(json.loads(body))
                self._answer(200, {})
            case "POST", "/forget":
                self._stub.forget()
                self._answer(200, {})
            case _:
                self._answer(404, {"error": {"message": f"no {method} {path} here"}})

    def _complete(self, headers: dict[str, str], body: bytes) -> None:
        try:
            asked = json.loads(body)
            said = [str(message.get("content")) for message in asked["messages"]]
        except (ValueError, KeyError, AttributeError):
            self._answer(400, {"error": {"message": "this is no chat completion request"}})
            return
        call, fault = self._stub.begin(headers.get("idempotency-key", ""), "\n".join(said))
        self._call = call

        def finish() -> None:
            self._call = self._timer = None
            self._end(call, fault, asked, said[-1])

        if fault["what"] != "hangs":
            self._timer = self._loop.call_later(self._stub.delay, finish)

    def _end(self, call: list[Any], fault: dict[str, Any], asked: Any, prompt: str) -> None:
        match fault["what"]:
            case "busy":
                after = {"Retry-After": str(fault.get("after", 1))}
                self._refuse(call, 429, "rate limit reached", after)
            case "broken":
                self._refuse(call, BROKEN, "the model fell over", {})
            case "drops":
                self._stub.end(call, HUNG_UP)
                self._transport.abort()
            case what:
                content = CONTENTS[what](prompt) if what else json.dumps(fields(prompt))
                self._stub.end(call, 200)
                self._answer(200, completion(asked.get("model", "stub"), content))

    def _refuse(self, call: list[Any], status: int, why: str, headers: dict[str, str]) -> None:
        self._stub.end(call, status)
        self._answer(status, {"error": {"message": why}}, headers)

    def _answer(self, status: int, reported: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(reported).encode()
        lines = [f"HTTP/1.1 {status} {STATUSES.get(status, 'Error')}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + body)


def completion(model: str, content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": "stub",
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


async def serve(port: int) -> None:
    loop, stub = asyncio.get_running_loop(), Stub()
    server = await loop.create_server(lambda: Connection(stub, loop), HOST, port, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
