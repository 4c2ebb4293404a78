"""What decides whether an output that is kept is the answer for another node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.caching import (
    Caching,
    base_key,
    digest_of,
    entries,
    entry_key,
    is_facts,
    names_digest,
    secrets_digest,
)

FACTS = st.dictionaries(st.sampled_from(["params", "names", "input:a", "secrets"]), st.text("01"))


def test_the_cache_key_depends_on_the_handler_the_config_and_the_names_of_secrets() -> None:
    key = base_key("h", {"a": 1, "b": 2}, [])
    assert key == base_key("h", {"b": 2, "a": 1}, [])
    others = [
        base_key("g", {"a": 1, "b": 2}, []),
        base_key("h", {"a": 1}, []),
        base_key("h", {"a": 1, "b": 2}, [[["k"], "{{ secrets.K }}", {}]]),
    ]
    assert len({key, *others}) == 4


@given(FACTS, FACTS)
def test_an_output_is_found_again_only_if_everything_that_was_read_is_equal(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert (entry_key("k", one) == entry_key("k", other)) == (one == other)


@given(FACTS)
def test_the_read_names_are_stored_under_the_key_and_the_output_under_its_digest(
    read: dict[str, str],
) -> None:
    facts = {"version": "3", **read}
    kept = dict(entries(Caching("k", 1.0, facts), "output"))
    if not read:
        assert kept == {"k": {"reads": [], "version": "3", "output": "output"}}
    else:
        found = {entry_key("k", facts): {"output": "output"}}
        assert kept == {"k": {"reads": sorted(facts)}, **found}
    assert entries(Caching("k", 1.0), "output") == []


def test_the_order_of_names_matters_and_the_order_of_keys_does_not() -> None:
    assert names_digest(["a", "b"]) != names_digest(["b", "a"])
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of(1) != digest_of(True) != digest_of("1")


def test_a_digest_of_secrets_changes_with_the_value_and_does_not_contain_it() -> None:
    one = secrets_digest({"KEY": "first-value"})
    assert one == secrets_digest({"KEY": "first-value"})
    assert len({one, secrets_digest({"KEY": "second"}), secrets_digest({"K": "first-value"})}) == 3
    assert one != digest_of([["KEY", "first-value"]]), "a plain hash of it is quickly tried"


@pytest.mark.parametrize("value", [None, [], "x", {"a": 1}, {"a": None}, 1])
def test_only_an_object_of_texts_is_accepted_as_facts(value: object) -> None:
    assert not is_facts(value)
    assert is_facts({"params": "d"})
