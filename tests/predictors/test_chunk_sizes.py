"""How large chunks should be."""

from __future__ import annotations

import pytest

from hf_offload_cache.methods.abstract_tree import SIZES, best_size, expected_judged


def test_what_is_judged_is_counted_split_by_split() -> None:
    """1,024 tokens in 16 chunks of 64: a half are split, into 16 of 32, and a quarter of all 32 of these again."""
    shares = {64: 0.5, 32: 0.25, 16: 0.9}
    assert expected_judged(64, 1024, shares) == 16 + 2 * 8 + 2 * 8
    assert expected_judged(32, 1024, shares) == 32 + 2 * 8
    assert expected_judged(16, 1024, shares) == 64  # the least is not split


@pytest.mark.parametrize(("share", "best"), [(0.1, 64), (0.49, 64), (0.5, 8), (0.9, 8)])
def test_chunks_are_large_where_less_than_half_of_them_are_split(share: float, best: int) -> None:
    assert best_size(dict.fromkeys(SIZES, share)) == best
    assert best_size(dict.fromkeys(SIZES, share), (64, 16)) == max(best, 16)


def test_each_size_is_weighed_by_its_own_share() -> None:
    assert best_size({64: 0.9, 32: 0.4, 16: 0.1, 8: 0.1}) == 32
