"""Asks the API as a careful client does: until it is answered, and under a key of its own.

A caller without a reply does not know whether it was done, so it asks again; the key sees to it
that a run is made once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

HOST = "127.0.0.1"
ANSWER_SECONDS = 10.0
"""After so long no caller waits for an answer any more."""
PATIENCE = 60.0
RETRY_SECONDS = 0.1
CONFLICT = 409


class Unanswered(Exception):
    """No server answered, however often it was asked."""


class Front:
    def __init__(self, port: int) -> None:
        self._port = port
        self.complaints: list[str] = []
        """Answers that no caller should get."""

    async def trigger(self, key: str, definition: dict[str, Any], params: dict[str, Any]) -> str:
        """The id of the run that this key stands for."""
        body = {"definition": definition, "params": params}
        answer = await self._answer("POST", "/runs", body, key)
        return str(answer["run_id"])

    async def batch(self, key: str, definition: dict[str, Any], items: list[Any]) -> list[str]:
        """The ids of the runs that this key stands for."""
        answer = await self._answer(
            "POST", "/batches", {"definition": definition, "items": items}, key
        )
        made = [run["run_id"] for run in await self.list_runs(f"&batch={answer['batch_id']}")]
        if len(made) != len(items):
            self.complaints.append(f"of batch {answer} {len(made)} runs are listed")
        return made

    async def cancel(self, run_id: str) -> int:
        """The epoch that was cancelled; 0 if there was nothing to cancel."""
        answer = await self._answer("POST", f"/runs/{run_id}/cancel", {})
        return int(answer.get("epoch", 0))

    async def retry(self, run_id: str, first: str | None) -> int:
        """The epoch that it is in then; 0 if there was nothing to retry."""
        body = {"from": first} if first else {}
        answer = await self._answer("POST", f"/runs/{run_id}/retry", body)
        return int(answer.get("epoch", 0))

    async def list_runs(self, which: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = await self._answer("GET", f"/runs?limit=100{which}{cursor}")
            found += page["items"]
            if page["next_cursor"] is None:
                return found
            cursor = f"&cursor={page['next_cursor']}"

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, key: str | None = None
    ) -> Any:
        """What is answered; a conflict is an answer too: it was done the first time."""
        why: object = None
        give_up = asyncio.get_running_loop().time() + PATIENCE
        while asyncio.get_running_loop().time() < give_up:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    status, answer = await self._ask(method, path, body, key)
            except (OSError, TimeoutError, ValueError) as problem:
                why = problem
            else:
                if status < 300 or status == CONFLICT:
                    return answer
                why = answer
                if status not in (429, 503):
                    self.complaints.append(f"{method} {path} was answered {status}: {answer}")
            await asyncio.sleep(RETRY_SECONDS)
        raise Unanswered(f"{method} {path}: {why!r}")

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, key: str | None
    ) -> tuple[int, Any]:
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            head = [f"{method} /api/v1{path} HTTP/1.1", f"Host: {HOST}:{self._port}"]
            head += ["Connection: close", f"Content-Length: {len(content)}"]
            head += ["Content-Type: application/json"] if content else []
            head += [f"Idempotency-Key: {key}"] if key else []
            writer.write("\r\n".join([*head, "", ""]).encode() + content)
            top, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
            return int(top.split()[1]), json.loads(rest)
        except IndexError:
            raise ValueError("the answer is cut off") from None
        finally:
            writer.transport.abort()
