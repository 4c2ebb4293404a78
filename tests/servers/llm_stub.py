"""A language model's endpoint of our own: as slow, busy or broken as a test wants it.

    with LlmStub(delay=3) as llm:
        llm.url                                     # for DOVETAIL_LLM_BASE_URL
        llm.behave(faults=[Fault("busy", where="ACME", times=1, after=1)])
        len(llm.calls())                            # what was really asked, with its times

Its process is `llm_answers.py`, a real HTTP server on a private port, which ends with its user.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .binaries import Program
from .server import HOST, Server

SECONDS = 10.0


@dataclass(frozen=True)
class Fault:
    """What happens to a call whose prompt has this text in it; the first that fits."""

    what: Literal["", "busy", "broken", "garbage", "violating", "hangs", "drops"]
    """429, 500, a text that is no JSON, JSON against the schema, no answer, a connection that is
    closed. The empty one answers well: for texts that a later fault would hit."""
    where: str = ""
    times: int | None = None
    """How often, then no more; None: always."""
    after: float = 1
    """The `Retry-After` of a 429."""


@dataclass(frozen=True)
class Call:
    began: float
    """In seconds of `time.monotonic`, which all processes of a machine share."""
    ended: float | None
    """None while it is under way."""
    status: int | None
    """0: no answer, because either side has hung up."""
    fault: str
    idempotency_key: str
    prompt: str
    """A hash of it: equal prompts have equal ones."""


class LlmStub(Server):
    name = "llm"

    def __init__(self, *, delay: float = 0.0, faults: Sequence[Fault] = ()) -> None:
        super().__init__(Program(Path(sys.executable), {}))
        self._wanted = {"delay": delay, "faults": [asdict(fault) for fault in faults]}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which Dovetail asks it."""
        return {"DOVETAIL_LLM_BASE_URL": self.url, "DOVETAIL_LLM_MODEL": "stub"}

    def command(self) -> list[str]:
        script = Path(__file__).with_name("llm_answers.py")
        return [str(self.program.path), "-I", "-S", str(script), str(self.port)]

    def answers(self) -> bool:
        try:
            return bool(self._ask("GET", "/stats")["pid"] == self.pid)
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError):
            return False

    def start(self) -> None:
        super().start()
        self._ask("POST", "/behave", self._wanted)

    def behave(self, *, delay: float | None = None, faults: Sequence[Fault] | None = None) -> None:
        """From now on; what is not said stays as it is."""
        if delay is not None:
            self._wanted["delay"] = delay
        if faults is not None:
            self._wanted["faults"] = [asdict(fault) for fault in faults]
        self._ask("POST", "/behave", self._wanted)

    def calls(self) -> list[Call]:
        """Every call since it was started or asked to forget, in the order of their begins."""
        return [Call(*call) for call in self._ask("GET", "/stats")["calls"]]

    def at_once(self) -> int:
        """Calls that are under way."""
        found: int = self._ask("GET", "/stats")["at_once"]
        return found

    def most_at_once(self) -> int:
        found: int = self._ask("GET", "/stats")["most_at_once"]
        return found

    def forget(self) -> None:
        """Empties the log, but for what is under way."""
        self._ask("POST", "/forget")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=SECONDS)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def most_within(times: Sequence[float], seconds: float) -> int:
    """The largest number of these times that lie within any stretch of so many seconds."""
    ordered = sorted(times)
    first = most = 0
    for last, at in enumerate(ordered):
        while at - ordered[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
