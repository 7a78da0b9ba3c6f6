"""Replacement policies: which slots go, in what order, and that each is given once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.fetch.policy import FirstIn, LeastRecent, Policy

POLICIES = [FirstIn, LeastRecent]


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("policy_class", POLICIES)
def test_the_slot_that_was_filled_longest_ago_goes_first(policy_class: Callable[[int], Policy]) -> None:
    policy = policy_class(4)
    assert policy.evict(2, slots()).tolist() == [0, 1]
    assert policy.evict(3, slots()).tolist() == [2, 3, 0]
    assert policy.evict(4, slots()).tolist() == [1, 2, 3, 0]
    assert policy.evict(0, slots()).tolist() == []


@pytest.mark.parametrize(("policy_class", "following"), [(FirstIn, [0, 1, 2, 3]), (LeastRecent, [1, 3, 2, 0])])
def test_what_is_wanted_again_counts_as_filled_anew_or_not(
    policy_class: Callable[[int], Policy], following: list[int]
) -> None:
    policy = policy_class(4)
    policy.used(slots(2, 0))
    assert policy.evict(4, slots()).tolist() == following


@pytest.mark.parametrize("policy_class", POLICIES)
def test_slots_in_use_stay(policy_class: Callable[[int], Policy]) -> None:
    policy = policy_class(4)
    assert policy.evict(3, slots(0, 2, 2)).tolist() == [1, 3]
    assert policy.evict(3, slots(0, 1, 2, 3)).tolist() == []
    assert policy.evict(3, slots()).tolist() == [0, 2, 1]


@pytest.mark.parametrize("policy_class", POLICIES)
def test_emptied_slots_are_the_next(policy_class: Callable[[int], Policy]) -> None:
    policy = policy_class(5)
    policy.evict(5, slots())
    policy.emptied(slots(3, 1))
    assert policy.evict(3, slots()).tolist() == [3, 1, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), capacity=st.integers(0, 6), policy_class=st.sampled_from(POLICIES))
def test_every_slot_once_whatever_happens(
    data: st.DataObject, capacity: int, policy_class: Callable[[int], Policy]
) -> None:
    """What is evicted is distinct, and all slots are always there; books do not grow."""
    policy = policy_class(capacity)
    some = st.lists(st.integers(0, max(0, capacity - 1)), unique=True, max_size=capacity)
    nbytes = policy.nbytes
    for _ in range(6):
        what = data.draw(st.sampled_from(["evict", "used", "emptied"]))
        if what == "evict":
            count = data.draw(st.integers(0, capacity))
            in_use = slots(*data.draw(some))
            got = policy.evict(count, in_use).tolist()
            assert len(got) == len(set(got)) == min(count, capacity - len(in_use))
            assert not set(got) & set(in_use.tolist())
        else:
            getattr(policy, what)(slots(*data.draw(some)))
        assert policy.nbytes == nbytes
    assert sorted(policy.evict(capacity, slots()).tolist()) == list(range(capacity))
