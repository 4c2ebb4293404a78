"""What the two offline mocks share: the time a real service would have taken.

The answer of a mock depends on its input alone; only how long it takes may be random.
"""

from __future__ import annotations

import asyncio
import random


async def take_time(latency: tuple[float, float]) -> None:
    """Wait for a while between the two bounds of `DOVETAIL_MOCK_LATENCY`, in seconds."""
    low, high = latency
    if high > 0:
        await asyncio.sleep(random.uniform(low, high))  # noqa: S311  (not about security)
