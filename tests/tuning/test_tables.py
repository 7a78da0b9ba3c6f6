"""Tables and profiles: what lies between what was measured, and JSON and back."""

from __future__ import annotations

import numpy as np
import pytest

from hf_offload_cache.methods.disk_swap.tuning import CompressionTable, IoProfile, ModelProfile, ReuseTable, along

REUSE = ReuseTable(
    [0, 100, 400], {4: [0.0, 0.2, 0.8], 8: [0.0, 0.3, 0.9]}, {4: [0.0] * 3, 8: [0.0] * 3},
    {4: [0.0] * 3, 8: [0.0] * 3}, {4: [0.0] * 3, 8: [0.0] * 3},
)  # fmt: skip
IO = IoProfile(
    {4096: [1, 11, 101], 8192: [1]}, {4096: [0.001, 0.002, 0.011], 8192: [0.003]}, {1: 4096, 4: 4096, 8: 8192}
)
BATCHES, CONTEXTS, RANKS, CAPACITIES = [1, 4], [1000, 3000], [8, 40], [0, 400, 1600]
MODEL = ModelProfile(
    BATCHES, CONTEXTS, RANKS,
    [[[1 + b * 2 + b * s * r * 1e-5 for r in RANKS] for s in CONTEXTS] for b in BATCHES],
    CAPACITIES, [[b * c * 1e-4 for c in CAPACITIES] for b in BATCHES],
)  # fmt: skip
COMPRESSION = CompressionTable(384, 1, [48, 12], [0.9, 0.7], [0.8, 0.5])


def test_a_rate_is_in_proportion_between_capacities_and_stays_after_the_last() -> None:
    assert REUSE.rate(4, 0) == 0.0
    assert REUSE.rate(4, 50) == pytest.approx(0.1)
    assert REUSE.rate(8, 250) == pytest.approx(0.6)
    assert REUSE.rate(8, 9999) == 0.9


def test_sigma_counts_bytes() -> None:
    assert [COMPRESSION.sigma(rank) for rank in (48, 12)] == [8.0, 32.0]
    assert CompressionTable(384, 2, [48], [1.0], [1.0]).sigma(48) == 4.0  # 16-bit compact keys


def test_reads_take_their_size_of_record_and_none_take_no_time() -> None:
    assert IO.time(1, 0) == 0.0
    assert IO.time(4, 0.5) == pytest.approx(0.0005)
    assert IO.time(1, 6) == pytest.approx(0.0015)
    assert IO.time(4, 56) == pytest.approx(0.0065)
    assert IO.time(1, 201) == pytest.approx(0.021)
    assert IO.time(8, 2) == pytest.approx(0.006)


def test_a_block_is_interpolated_on_each_axis_and_continued_beyond_the_last() -> None:
    points = ((1, 1000, 8, 0), (2, 2000, 20, 100), (4, 3000, 40, 1600), (3, 1500, 12, 700))
    for batch, context, rank, capacity in points:
        expected = 1 + batch * 2 + batch * context * rank * 1e-5 + batch * capacity * 1e-4
        assert MODEL.time(batch, context, rank, capacity) == pytest.approx(expected)
    assert MODEL.time(8, 6000, 40, 400) == pytest.approx(1 + 16 + 8 * 6000 * 40 * 1e-5 + 8 * 400 * 1e-4)
    assert MODEL.time(1, 10, 8, 0) == MODEL.time(1, 1000, 8, 0)  # before the first: as the first


def test_one_point_stands_for_all() -> None:
    assert along([5], np.array([[1.0, 2.0]]), 99).tolist() == [1.0, 2.0]
