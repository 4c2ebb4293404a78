"""Reading a large definition without the garbage collector looking on.

A definition becomes some hundred thousand small containers that all stay, so every collection
meanwhile walks through all of them in vain: half of the time that 10,000 nodes take. What it must
not know: what is being read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For work whose size is bounded. What two threads do at once ends with the first of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
