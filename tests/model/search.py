"""Every state that can be reached, breadth first, and the shortest way to one that must not be.

Two kinds of promises: of each step (`Broken` by the world), and that from every state, without any
further fault, the run can still reach its end with nothing left behind.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

from .world import Broken, Label, World


@dataclass
class Found:
    """What a search found."""

    states: int
    transitions: int
    depth: int
    whole: bool
    """There was nothing left to search."""
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def story(self) -> str:
        return "\n".join([f"VIOLATION: {self.violation}", *self.trace])


def search(world: World, most: int = 10_000_000) -> Found:
    """All states; or the first `most`, which says less: nothing of whether they come to an end."""
    first = world.first()
    numbers = {first: 0}
    order = [first]
    came_from = array("i", [-1])
    quiet = array("I")  # the steps without faults: where they lead to, state after state
    offsets = array("I", [0])
    transitions = depth = 0
    layer_ends = 1
    at = 0
    while at < len(order) and len(order) < most:
        if at == layer_ends:
            depth, layer_ends = depth + 1, len(order)
        try:
            for _, after, without_fault in world.successors(order[at]):
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(order)
                    order.append(after)
                    came_from.append(at)
                if without_fault:
                    quiet.append(number)
                transitions += 1
        except Broken as broken:
            trace = _way(world, order, came_from, at)
            trace.append(f"{world.tell(broken.label)}  ← here")
            return Found(len(order), transitions, depth, False, broken.what, trace)
        offsets.append(len(quiet))
        at += 1
    whole = at == len(order)
    found = Found(len(order), transitions, depth, whole)
    if whole:
        stuck = _first_stuck(world, order, quiet, offsets)
        if stuck is not None:
            found.violation = "from here the run never ends, or something of it is left behind"
            found.trace = _way(world, order, came_from, stuck)
    return found


def _first_stuck(
    world: World, order: list[int], quiet: array[int], offsets: array[int]
) -> int | None:
    """The first state from which no step without a fault leads to the end any more."""
    ends = bytearray(map(world.is_done, order))
    if not any(ends):
        return 0
    news = True
    while news:
        news = False
        for at in range(len(order) - 1, -1, -1):
            if not ends[at]:
                for to in quiet[offsets[at] : offsets[at + 1]]:
                    if ends[to]:
                        ends[at] = news = True
                        break
    stuck = ends.find(0)
    return None if stuck < 0 else stuck


def _way(world: World, order: list[int], came_from: array[int], at: int) -> list[str]:
    """From the first state to this one, as sentences."""
    way = [at]
    while came_from[way[-1]] >= 0:
        way.append(came_from[way[-1]])
    way.reverse()
    reported = [f"{'at first':<60} {world.show(order[way[0]])}"]
    for before, after in pairwise(way):
        label = _label(world, order[before], order[after])
        reported.append(f"{world.tell(label):<60} {world.show(order[after])}")
    return reported


def _label(world: World, before: int, after: int) -> Label:
    return next(label for label, to, _ in world.successors(before) if to == after)
