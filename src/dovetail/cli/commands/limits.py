"""`dovetail limits`: the rate limits that all processes on this store share."""

from __future__ import annotations

from typing import Any

from dovetail.cli import output as streams
from dovetail.cli.output import print_json
from dovetail.cli.target import ask
from dovetail.cli.text import Line, plain, table
from dovetail.engine.api import EngineApi


def list_limits(*, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.rate_limits()

    limits = ask(question)
    if as_json:
        print_json(limits)
        return
    if not limits["items"]:
        streams.say("none set: every resource_tag has 10 per second, burst 1")
        return
    head: Line = [("TAG", "dim"), ("PER SECOND", "dim"), ("BURST", "dim")]
    for line in table([head, *(_row(limit) for limit in limits["items"])], streams.room()):
        streams.say(line)


def set_limit(tag: str, rate: float, burst: int, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any]:
        return await commands.set_rate_limit(tag, rate, burst)

    limit = ask(question, keeps=True)
    if as_json:
        print_json(limit)
        return
    said = f"{limit['rate_per_second']:g} per second, burst {limit['burst']}"
    streams.say([(f"{plain(limit['tag'])}: ", "bold"), (said, "")])


def _row(limit: dict[str, Any]) -> Line:
    return [
        (plain(limit["tag"]), "bold"),
        (f"{limit['rate_per_second']:g}", ""),
        (str(limit["burst"]), ""),
    ]
