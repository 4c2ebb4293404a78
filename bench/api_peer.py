"""The floor of the API's bench: a bare FastAPI route that durably writes one row per request.

    python bench/api_peer.py FILE      prints the address it serves

The same server, event loop and SQLite durability (WAL, `synchronous=FULL`) as `dovetail serve`;
nothing is checked, and nothing follows from what is written.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
import uuid
from typing import Any

import uvicorn
from fastapi import FastAPI, Request


def application(file: str) -> FastAPI:
    app = FastAPI()
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE rows (id TEXT PRIMARY KEY, params TEXT)")

    @app.post("/rows", status_code=202)
    async def write(request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        made = uuid.uuid4().hex
        connection.execute("INSERT INTO rows VALUES (?, ?)", (made, json.dumps(body["params"])))
        return {"id": made, "status": "PENDING"}

    return app


def main() -> None:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    config = uvicorn.Config(
        application(sys.argv[1]), http="h11", loop="uvloop", log_config=None, access_log=False
    )
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
