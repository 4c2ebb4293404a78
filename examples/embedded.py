"""The embedded engine from Python: durable runs in one file, without a server.

python examples/embedded.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from dovetail import Context, Dovetail, PermanentError, handler

Config = dict[str, Any]

INVOICE = {
    "name": "invoice",
    "params": {
        "type": "object",
        "required": ["order"],
        "properties": {"order": {"type": "integer"}},
    },
    "nodes": [
        {"id": "total", "handler": "add_up", "config": {"order": "{{ params.order }}"}},
        {
            "id": "mail",
            "handler": "send_mail",
            "dependencies": ["total"],
            "config": {"text": "You owe us {{ total.output }} coins."},
        },
    ],
}
mailbox: dict[str, str] = {}
mail_server = {"up": False}


@handler("add_up")
async def add_up(config: Config, ctx: Context) -> int:
    """A handler takes the rendered config and returns a JSON value."""
    return config["order"] * 10


@handler("send_mail")
def send_mail(config: Config, ctx: Context) -> str:
    """A plain function may block: it runs in a thread."""
    if not mail_server["up"]:
        raise PermanentError("the mail server is down")
    # Every attempt has the same key, so a crash does not send the mail twice.
    mailbox[ctx.idempotency_key] = config["text"]
    return "sent"


async def main(file: Path) -> None:
    # `Dovetail()` alone keeps its runs in .dovetail/dovetail.db.
    async with Dovetail(file, handlers=[add_up, send_mail]) as dt:
        run = await dt.run(INVOICE, {"order": 7})
        print(f"{run.status}: {run.error and run.error['message']}")
        print({name: node.status for name, node in run.nodes.items()})

    # Later, perhaps in another process: the file has the whole run.
    mail_server["up"] = True
    async with Dovetail(file, handlers=[add_up, send_mail]) as dt:
        await dt.retry(run.run_id)
        run = await dt.wait(run.run_id)
        print(f"{run.status}: {run.result}, {list(mailbox.values())}")
        print([event.type async for event in dt.events(run.run_id) if event.epoch == 2])

        # A registered workflow has a name and a version. A repeated key returns the same run.
        print(await dt.register(INVOICE))
        first = await dt.run("invoice", {"order": 8}, idempotency_key="order-8")
        again = await dt.run("invoice", {"order": 8}, idempotency_key="order-8")
        print(f"order 8: {first.outputs}, once: {first.run_id == again.run_id}")

        batch = await dt.batch("invoice", [{"order": number} for number in range(100, 120)])
        batch = await dt.wait_batch(batch.batch_id)
        print(f"batch: {batch.counts}, {len(mailbox)} mails in all")

        page = await dt.list_runs(workflow="invoice", status="COMPLETED", limit=3)
        print([run.params["order"] for run in page])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "runs.db"))
