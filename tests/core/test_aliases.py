"""Weighted aliases: which version a run gets, and which weights are refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from dovetail.core.aliases import (
    MAX_WEIGHTS,
    check_weights,
    choose_version,
    decode_weights,
    encode_weights,
    main_version,
    versions_named,
)
from dovetail.core.errors import InvalidParams

KEYS = [f"customer-{number}" for number in range(10_000)]


def chosen(weights: Any, keys: list[str] = KEYS) -> dict[str, int]:
    return {key: choose_version(weights, "flow", key) for key in keys}


def test_ten_thousand_keys_are_divided_as_the_weights_say() -> None:
    counts = Counter(chosen({"3": 90, "4": 10}).values())
    assert counts[3] + counts[4] == len(KEYS)
    assert abs(counts[4] - 1_000) <= 100


def test_three_versions_with_fractions_are_divided_as_the_weights_say() -> None:
    counts = Counter(chosen({"1": 0.5, "2": 0.25, "7": 0.25}).values())
    assert [
        abs(counts[one] - share) <= 150 for one, share in ((1, 5000), (2, 2500), (7, 2500))
    ] == [True] * 3


def test_one_key_always_gets_the_same_version() -> None:
    assert chosen({"3": 90, "4": 10}) == chosen({"3": 90, "4": 10})


def test_the_order_of_versions_and_the_scale_of_weights_do_not_matter() -> None:
    one = chosen({"3": 90, "4": 10})
    assert one == chosen({"4": 10, "3": 90})
    assert one == chosen({"3": 0.9, "4": 0.1})


def test_a_larger_weight_takes_keys_and_moves_none_between_the_others() -> None:
    before = chosen({"1": 50, "2": 40, "3": 10})
    after = chosen({"1": 50, "2": 40, "3": 30})
    assert {after[key] for key in KEYS if after[key] != before[key]} == {3}


def test_a_new_version_takes_keys_only_for_itself() -> None:
    before, after = chosen({"1": 90, "2": 10}), chosen({"1": 90, "2": 10, "3": 10})
    assert {after[key] for key in KEYS if after[key] != before[key]} == {3}


def test_another_workflow_gives_the_new_version_to_other_keys() -> None:
    weights = {"1": 90, "2": 10}
    here = {key for key in KEYS if choose_version(weights, "flow", key) == 2}
    there = {key for key in KEYS if choose_version(weights, "other", key) == 2}
    assert len(here & there) < len(here) / 2


def test_a_plain_alias_gives_its_version_to_every_key() -> None:
    assert set(chosen(5).values()) == {5}
    assert main_version(5) == 5
    assert versions_named(5) == [5]


def test_the_smallest_and_the_largest_weights_give_a_version() -> None:
    assert choose_version({"1": 5e-324, "2": 1.7e308}, "flow", "any") == 2
    assert choose_version({"1": 1}, "flow", "lone \ud800 surrogate") == 1


def test_the_main_version_has_the_largest_weight_and_of_several_is_the_newest() -> None:
    assert main_version({"3": 90, "4": 10}) == 3
    assert main_version({"9": 50, "10": 50}) == 10
    assert versions_named({"9": 50, "10": 50}) == [9, 10]


def test_weights_are_kept_in_one_spelling() -> None:
    assert check_weights({"10": 1.0, "9": 2.5}) == {"9": 2.5, "10": 1}
    assert check_weights({4: 10, 3: 90}) == {"3": 90, "4": 10}
    assert encode_weights(check_weights({"10": 1.0, "9": 2.5})) == '{"9":2.5,"10":1}'
    for given in ({"1": 10**200, "2": 1}, {"1": 1e300}, {"1": 5e-324}):
        kept = check_weights(given)
        assert decode_weights(encode_weights(kept)) == kept


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, {}, [], "3=90", 3, True),
        *({"3": 0}, {"3": -1}, {"3": 0.0}, {"3": math.nan}, {"3": math.inf}, {"3": 10**400}),
        *({"3": "90"}, {"3": True}, {"3": None}, {"3": [1]}),
        *({"prod": 1}, {"0": 1}, {"03": 1}, {"-3": 1}, {"3.0": 1}, {"": 1}, {"٣": 1}, {True: 1}),
        {"9" * 19: 1},
    ],
)
def test_wrong_weights_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidParams) as refused:
        check_weights(wrong)
    assert refused.value.problems[0].path.startswith("weights")


def test_every_wrong_weight_is_named() -> None:
    with pytest.raises(InvalidParams) as refused:
        check_weights({"1": 0, "2": 5, "x": 1, "3": -1})
    assert [one.path for one in refused.value.problems] == ["weights.1", "weights.x", "weights.3"]


def test_too_many_versions_are_refused() -> None:
    with pytest.raises(InvalidParams, match="100 are allowed"):
        check_weights({str(number): 1 for number in range(1, MAX_WEIGHTS + 2)})


@pytest.mark.parametrize("damaged", ["", "{}", '{"3":0}', "[]", "nonsense", '{"3":"90"}'])
def test_weights_that_cannot_be_read_are_an_error(damaged: str) -> None:
    with pytest.raises(ValueError):
        decode_weights(damaged)
