"""The plain functions of k-means, against loops over rows and points."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload_cache.kernels import clusters as kmeans
from hf_offload_cache.kernels import on_a_device


def some_points(rows: int, count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers: distances between them are exact, and many are equal."""
    return torch.randint(-2, 3, (rows, count, dim), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("at_once", [1 << 24, 50])
def test_each_point_gets_the_first_of_the_nearest(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "_AT_ONCE", at_once)
    points, centroids = some_points(2, 57, 3), some_points(2, 9, 3, 1)
    closed = torch.zeros(2, 9, dtype=torch.bool)
    closed[0, :4] = True
    distances = ((points[:, :, None] - centroids[:, None]) ** 2).sum(3)
    assert kmeans.assign(points, centroids).tolist() == distances.numpy().argmin(2).tolist()
    distances[0, :, :4] = torch.inf
    labels = kmeans.assign(points, centroids, closed)
    assert labels.tolist() == distances.numpy().argmin(2).tolist() and labels.dtype == torch.int32
    assert not kmeans.assign(points, centroids, torch.ones_like(closed)).any()
    assert torch.equal(kmeans.assign(points, centroids.half(), closed), labels)
    centroids[1, :2] = torch.nan
    assert set(kmeans.assign(points, centroids)[1].unique().tolist()) <= set(range(2, 9))


def test_means_and_distances_are_those_of_the_members() -> None:
    points, labels = some_points(3, 40, 5), torch.randint(0, 7, (3, 40), generator=torch.Generator().manual_seed(2))
    labels[labels == 4] = 3
    before = some_points(3, 7, 5, 3) + 100
    found, counts = kmeans.means(points.bfloat16(), labels.int(), before)
    for row in range(3):
        for label in range(7):
            members = points[row, labels[row] == label]
            assert counts[row, label] == len(members) and counts.dtype == torch.int32
            torch.testing.assert_close(found[row, label], members.mean(0) if len(members) else before[row, label])
    assert not counts[:, 4].any()
    expected = torch.stack([((points[row] - found[row][labels[row]]) ** 2).sum(1) for row in range(3)])
    torch.testing.assert_close(kmeans.apart(points, labels.int(), found), expected)


@pytest.mark.parametrize("capacity", [1, 4, 100])
def test_parts_are_runs_of_equal_length(capacity: int) -> None:
    labels = torch.randint(0, 12, (2, 90), generator=torch.Generator().manual_seed(0))
    labels[labels == 5], labels[0] = 6, labels[0].clamp(max=3)
    found = kmeans.parted(labels.int(), 12, capacity).numpy()
    for own, parts in zip(labels.numpy(), found, strict=True):
        expected, number = np.full(90, -1), 0
        for label in np.unique(own):
            runs = np.array_split((own == label).nonzero()[0], -(-(own == label).sum() // capacity))
            assert max(map(len, runs)) <= capacity
            for run in runs:
                lengths = np.bincount(parts[own == label] - number)
                expected[run] = parts[run]
            assert lengths.max() - lengths.min() <= 1 and len(lengths) == len(runs)
            members = parts[own == label]
            assert (np.diff(members) >= 0).all() and members.min() == number and members.max() == number + len(runs) - 1
            number += len(runs)
        assert (expected >= 0).all()


@pytest.mark.parametrize("group", [1, 4])
def test_points_fill_the_pages_of_their_label(group: int) -> None:
    """In their order: forwards from a label's first page, or backwards. Label 5 has none."""
    labels = torch.randint(0, 9, (2, 70), generator=torch.Generator().manual_seed(0))
    labels[labels == 5] = 6
    pages = torch.stack([100 * torch.arange(1, 19).view(2, 9), torch.tensor([1, -1]).repeat(9).view(2, 9)]).int()
    found, expected = kmeans.placed(labels.int(), pages, group), torch.empty(2, 70, dtype=torch.int64)
    for row in range(2):
        for label in range(9):
            members = (labels[row] == label).nonzero()[:, 0].tolist()
            begin, step = pages[:, row, label].tolist()
            for rank, point in enumerate(members):
                expected[row, point] = (begin + step * (rank // group)) * group + rank % group
    assert torch.equal(found, expected)


def test_entries_are_put_where_they_fit() -> None:
    """Those of the first tokens, which are packed, and of the next ones; not those of other places."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 10), (2, 2, 8, 3), (2, 1, 8, 4)
    held, keys, values = (torch.randn(*shape, generator=generator) for shape in shapes)
    targets = torch.randperm(24, generator=generator).view(2, 12)
    entries = torch.cat([held, torch.cat([keys.transpose(1, 2).flatten(2), values[:, 0]], 2)], 1)[:, :12]
    every = torch.empty(24, 10)
    every[targets.flatten()] = entries.flatten(0, 1)
    for first, size in ((0, 24), (7, 9), (20, 8)):
        out = torch.full((size, 10), -5.0)
        kmeans.put(held, keys, values, targets, first, out)
        written = min(size, 24 - first)
        assert torch.equal(out[:written], every[first : first + written]) and (out[written:] == -5).all()


def test_a_device_without_triton_runs_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_a_device, "_triton", lambda: False)
    on_a_device._kernel.cache_clear()
    try:
        twin, launches = on_a_device.TWINS["clusters.assign"]
        assert on_a_device._kernel(twin) is twin and launches == 1
    finally:
        on_a_device._kernel.cache_clear()
