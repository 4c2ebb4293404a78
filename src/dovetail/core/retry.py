"""The delay before a retry. Chance is an argument."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RETRY_AFTER_SECONDS = 3600.0
# 2^63 times any delay is past every cap, and a larger exponent would overflow a float.
MAX_DOUBLINGS = 63


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    base_delay_seconds: float = 10.0
    max_delay_seconds: float = 300.0
    jitter: float = 0.5


DEFAULT_RETRY = RetryPolicy()


def delay(
    policy: RetryPolicy,
    n: int,
    chance: float,
    *,
    after: float | None = None,
    at_least: float | None = None,
) -> float:
    """Seconds before retry `n` (1, 2, …), with `chance` drawn from [0, 1).

    `after` comes from the handler and replaces the formula. `at_least` is the `Retry-After` of a
    service: it wins if it is longer, up to an hour.
    """
    if after is not None:
        return max(0.0, after)
    base = policy.base_delay_seconds * 2.0 ** min(n - 1, MAX_DOUBLINGS)
    wait = min(base + chance * policy.jitter * base, policy.max_delay_seconds)
    if at_least is not None:
        wait = max(wait, min(at_least, MAX_RETRY_AFTER_SECONDS))
    return wait
