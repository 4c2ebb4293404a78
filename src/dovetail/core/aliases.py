"""Aliases of a workflow: each names one version, or divides runs between versions by weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import orjson

from dovetail.core.errors import InvalidParams, Problem, shown
from dovetail.core.text import counted

Weights = Mapping[str, int | float]
"""By the number of a version, as JSON spells it; in the order of the numbers."""
AliasTarget = int | Weights

MAX_WEIGHTS = 100
_FRACTION_BITS = 53


def choose_version(target: AliasTarget, workflow: str, key: str) -> int:
    """The version of a run that is triggered by this alias. `key` is the run's idempotency key,
    else its id: one key always gets the same version while the weights are the same.

    Weighted rendezvous hashing: each version draws a time from an exponential distribution with
    its weight as the rate, by a hash of the key, and the earliest wins. A version whose weight
    grows takes keys from the others, and no key moves between two others.
    """
    if isinstance(target, int):
        return target
    draws = ((_draw(workflow, key, number, weight), number) for number, weight in _pairs(target))
    return min(draws)[1]


def main_version(target: AliasTarget) -> int:
    """The version to show for an alias: that with the largest weight, of several the newest."""
    if isinstance(target, int):
        return target
    return max((weight, number) for number, weight in _pairs(target))[1]


def versions_named(target: AliasTarget) -> list[int]:
    return [target] if isinstance(target, int) else [number for number, _ in _pairs(target)]


def _pairs(weights: Weights) -> list[tuple[int, int | float]]:
    return [(int(number), weight) for number, weight in weights.items()]


def _draw(workflow: str, key: str, version: int, weight: float) -> float:
    # With the workflow's name: a customer's key is not the first to get every new version.
    text = f"{workflow}\0{version}\0{key}".encode(errors="surrogatepass")
    number = int.from_bytes(hashlib.sha256(text).digest()[:8]) >> (64 - _FRACTION_BITS)
    fraction = (number + 0.5) / (1 << _FRACTION_BITS)
    # The logarithm of the time: the smallest and the largest weights give a number.
    return math.log(-math.log(fraction)) - math.log(weight)


def check_weights(given: Any) -> dict[str, int | float]:
    """Weights in the order of the versions. Raises `InvalidParams` with every problem."""
    if not isinstance(given, Mapping) or not given:
        what = "an empty object" if given == {} else shown(given)
        message = f'must be weights by version, such as {{"3": 90, "4": 10}}, not {what}'
        raise InvalidParams([Problem("invalid_field", message, "weights")])
    if len(given) > MAX_WEIGHTS:
        message = f"has {counted(len(given), 'version')}, and {MAX_WEIGHTS} are allowed"
        raise InvalidParams([Problem("too_large", message, "weights")])
    problems: list[Problem] = []
    found: dict[int, int | float] = {}
    for version, weight in given.items():
        number = _version_number(version)
        if number is None:
            message = f"{shown(version)} is no version's number"
            problems.append(Problem("invalid_field", message, f"weights.{str(version)[:40]}"))
        elif not _is_weight(weight):
            message = f"must be a number above 0, not {shown(weight)}"
            problems.append(Problem("invalid_field", message, f"weights.{number}"))
        else:
            found[number] = _plain(float(weight))
    if problems:
        raise InvalidParams(problems)
    return {str(number): found[number] for number in sorted(found)}


def _version_number(given: Any) -> int | None:
    text = str(given)
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    is_number = text.isascii() and text.isdigit() and text[0] != "0" and len(text) < 19
    return int(text) if is_number else None


def _is_weight(given: Any) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    try:
        return 0 < float(given) < math.inf  # false for NaN too
    except OverflowError:
        return False


def _plain(weight: float) -> int | float:
    """90 and 90.0 are one weight."""
    is_whole = weight.is_integer() and weight < 1 << _FRACTION_BITS
    return int(weight) if is_whole else weight


def encode_weights(weights: Weights) -> str:
    """As stores keep them: equal weights have one spelling."""
    return orjson.dumps(dict(weights)).decode()


def decode_weights(text: str | bytes) -> dict[str, int | float]:
    """What `encode_weights` wrote. Raises `ValueError` for anything else."""
    found = orjson.loads(text)
    try:
        return check_weights(found)
    except InvalidParams as error:
        raise ValueError(str(error)) from None
