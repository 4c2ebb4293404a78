"""The long search: `python -m tests.model`, or with words only the scenarios that have them.

Prints each scenario's states, steps and depth, and the shortest way to whatever is broken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from .scenarios import LONG
from .search import search
from .world import World


def main(words: Sequence[str]) -> int:
    chosen = [one for one in LONG if all(word in one.name for word in words)]
    if not chosen:
        print(f"no scenario has '{' '.join(words)}' in its name", file=sys.stderr)
        return 2
    states = steps = deepest = violations = 0
    began = time.process_time()
    print(f"{'scenario':<45} {'states':>9} {'steps':>9} {'depth':>5}  faults")
    for scenario in chosen:
        found = search(World(scenario))
        luck = ", ".join(f"{name} {count}" for name, count in scenario.luck.items())
        size = f"{found.states:>9,} {found.transitions:>9,} {found.depth:>5}"
        print(f"{scenario.name:<45} {size}  {luck}", flush=True)
        states += found.states
        steps += found.transitions
        deepest = max(deepest, found.depth)
        if found.violation is not None:
            violations += 1
            print(found.story())
    seconds = time.process_time() - began
    print(
        f"{states:,} states, {steps:,} steps, depth {deepest}, {violations} violations, "
        f"{seconds:.0f} s of CPU"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
