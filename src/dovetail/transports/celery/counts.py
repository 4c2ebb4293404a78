"""How many messages a broker was given and gave to workers: counted in Redis, by both ends.

No broker says when a message was sent, or that one was lost. These counts show both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from dovetail.redis_client.pipelined import Command, PipelinedRedis, load_script

COUNTS, WAITING, MARKS = "wf:broker", "wf:broker:waiting", "wf:broker:marks"
"""How many were `sent` and `taken`; how many wait, by handler; when how many had been sent."""
MAX_MARKS = 5000


class Counts(NamedTuple):
    sent: int
    taken: int


def sent(handlers: Iterable[str]) -> list[Command]:
    """What is counted when a task of each of these is sent."""
    by_handler = Counter(handlers)
    return [
        ("HINCRBY", COUNTS, "sent", by_handler.total()),
        *(("HINCRBY", WAITING, handler, count) for handler, count in by_handler.items()),
    ]


def taken(handler: str | None) -> list[Command]:
    """What is counted when a worker gets a message; of none, if it is no task."""
    commands: list[Command] = [("HINCRBY", COUNTS, "taken", 1)]
    if handler is not None:
        commands.append(("HINCRBY", WAITING, handler, -1))
    return commands


async def counts(pipe: PipelinedRedis) -> Counts:
    given, got = await pipe.call("HMGET", COUNTS, "sent", "taken")
    return Counts(int(given or 0), int(got or 0))


async def correct(pipe: PipelinedRedis, known: Counts, by: int) -> bool:
    """So many more count as taken, if the counts are still what is known."""
    return bool(
        await pipe.call_script(
            load_script(__package__, "correct_counts"), [COUNTS], [known.sent, known.taken, by]
        )
    )


async def waiting(pipe: PipelinedRedis) -> dict[str, int]:
    """How many tasks wait, by handler; nearly right, and right again when none waits."""
    flat = await pipe.call("HGETALL", WAITING)
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): int(count) for name, count in pairs if int(count) > 0}


async def none_waits(pipe: PipelinedRedis) -> None:
    """Whatever was lost before is counted no more."""
    await pipe.call("DEL", WAITING)


async def mark(pipe: PipelinedRedis, sent: int, now: float) -> None:
    """Remember that so many have been sent by now."""
    await pipe.call_many(
        [
            ("ZREMRANGEBYSCORE", MARKS, f"({sent}", "+inf"),  # of counts that were lost
            ("ZADD", MARKS, sent, f"{now:.3f}"),
            ("ZREMRANGEBYRANK", MARKS, 0, -MAX_MARKS - 1),
        ]
    )


async def sent_after(pipe: PipelinedRedis, count: int) -> float | None:
    """A time after which all were sent but the first so many; None if that is not remembered."""
    marks = await pipe.call("ZREVRANGEBYSCORE", MARKS, count, "-inf", "LIMIT", 0, 1)
    return float(marks[0]) if marks else None
