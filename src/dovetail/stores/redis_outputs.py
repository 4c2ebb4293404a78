"""Outputs of runs in Redis, read in parts: each may be a megabyte, and a run may have thousands.

Whoever else wants something of Redis waits for as long as one answer takes, so no answer has much
more than `PART_BYTES`. The parts are of different moments. That does no harm within one epoch of
their run: who is completed in it stays so, with the output that it has. What it must not know: who
wants them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from dovetail.pipe import Argument, Command, Pipe
from dovetail.stores.redis_lists import source

PART_BYTES = 4 << 20
MOST_PLACES = 4000
"""That are asked for at once."""


class Part(NamedTuple):
    epoch: bytes | None
    """That they are of. None if the run is not there."""
    outputs: list[bytes | None]
    """Of the first of the places that were asked for."""


@cache
def bounded(name: str) -> str:
    """A script that gives as many outputs as are `within` bounds."""
    return "\n".join([source("within"), source(name)])


class Outputs:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def first(self, wanted: Mapping[str, Sequence[int]], most: int) -> dict[str, Part]:
        """By run, as many of the wanted ones as have together so many bytes; maybe none."""
        asked = [self._asking(run_id, places, most, 0) for run_id, places in wanted.items()]
        answers = await self._pipe.many(asked)
        return {run_id: Part(*part) for run_id, part in zip(wanted, answers, strict=True)}

    async def all(
        self, run_id: str, places: Sequence[int], epoch: bytes
    ) -> dict[int, bytes] | None:
        """Those of these places that are there. None if the run has left this epoch."""
        found: dict[int, bytes] = {}
        while places:
            (answer,) = await self._pipe.many([self._asking(run_id, places, PART_BYTES, 1)])
            part = Part(*answer)
            if part.epoch != epoch:
                return None
            found |= there(places, part.outputs)
            places = places[len(part.outputs) :]
        return found

    def _asking(self, run_id: str, places: Sequence[int], most: int, least: int) -> Command:
        own = f"wf:{{{run_id}}}:"
        args: list[Argument] = [most, least, *places[:MOST_PLACES]]
        return self._pipe.evaluation(bounded("outputs"), (own + "meta", own + "out"), args)


def there(places: Sequence[int], outputs: Sequence[bytes | None]) -> dict[int, bytes]:
    """Outputs by place, of the first of these places."""
    pairs = zip(places, outputs, strict=False)
    return {place: output for place, output in pairs if output is not None}
