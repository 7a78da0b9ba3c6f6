"""How large chunks should be: the paper's equation, and what is minimised in its place."""

from __future__ import annotations

import pytest

from hf_offload_cache.methods.abstract_tree import SIZES, best_size, expected_judged, judged_by_equation_2


def test_equation_2_is_written_as_in_the_paper() -> None:
    """m chunks of n / m tokens, log2(n / m) levels: 8 of 4 have two, with a density of .2 the second is .4 of it."""
    assert judged_by_equation_2(8, 32, 0.2) == pytest.approx(8 * (1 + 0.4))
    assert judged_by_equation_2(1, 32, 0.2) == pytest.approx(sum(0.4**level for level in range(5)))


@pytest.mark.parametrize("density", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_equation_2_is_least_at_one_chunk(density: float) -> None:
    """Whatever the density: it cannot be meant as written."""
    judged = {chunks: judged_by_equation_2(chunks, 1024, density) for chunks in (1, 2, 4, 16, 64, 256)}
    assert min(judged, key=lambda chunks: judged[chunks]) == 1


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
