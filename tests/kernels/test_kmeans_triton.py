"""K-means on a device gives what its twins give: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_memory import most_held
from triton_kernels import DEVICES, kernels

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import clusters as kmeans
from hf_offload_cache.methods.cluster import ClusterForm, clusters_of_rows
from hf_offload_cache.methods.cluster.arrivals import Arrivals
from hf_offload_cache.methods.cluster.plan import clustering_there

SIZES = [(1, 1, 1, 1), (2, 77, 5, 9), (3, 130, 70, 64), (1, 200, 129, 24), (2, 33, 7, 200)]
"""Rows, points, centroids, channels."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def filled_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves out is no number, or no label."""
    empty, like = torch.empty, torch.empty_like

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", lambda *args, **given: filled(empty(*args, **given)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **given: filled(like(*args, **given)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_give_what_their_twins_give(
    device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device, (rows, count, clusters, dim) = kernels("clusters_triton", device, monkeypatch), sizes
    wide = random(rows, count, dim + 3).to(dtype)
    points, centroids = wide[..., :dim], random(rows, clusters, dim, seed=1)
    closed = random(rows, clusters, seed=2) > 1
    closed[:, 0] = False
    there = wide.to(device)[..., :dim]
    for hidden in (None, closed):
        own = None if hidden is None else hidden.to(device)
        expected = kmeans.assign(points, centroids, hidden)
        labels = on_device.assign(there, centroids.to(device), own).cpu()
        assert labels.dtype == torch.int32
        by_twin, by_kernel = (kmeans.apart(points, each, centroids) for each in (expected, labels))
        torch.testing.assert_close(by_kernel, by_twin, rtol=1e-5, atol=1e-5)
        assert (labels == expected).float().mean() > 0.98
        assert hidden is None or not hidden.gather(1, labels.long()).any()
    narrow = random(rows, clusters + 2, dim, seed=1).half()[:, 1:-1]  # as means that are kept: rows are apart
    labels = on_device.assign(there, narrow.to(device), None).cpu()
    expected = kmeans.assign(points, narrow)
    by_twin, by_kernel = (kmeans.apart(points, each, narrow.float()) for each in (expected, labels))
    torch.testing.assert_close(by_kernel, by_twin, rtol=1e-5, atol=1e-5)
    found, counts = on_device.means(there, labels.to(device), centroids.to(device))
    expected_means, expected_counts = kmeans.means(points, labels, centroids)
    torch.testing.assert_close(found.cpu(), expected_means, rtol=1e-5, atol=1e-5)
    assert torch.equal(counts.cpu(), expected_counts)
    distances = on_device.apart(there, labels.to(device), found)
    torch.testing.assert_close(distances.cpu(), kmeans.apart(points, labels, expected_means), rtol=1e-5, atol=1e-5)
    for capacity in (1, 3, 1000):
        parts = on_device.parted(labels.to(device), clusters, capacity)
        assert torch.equal(parts.cpu(), kmeans.parted(labels, clusters, capacity))
    pages = torch.stack([torch.arange(rows * clusters).view(rows, clusters), 1 - 2 * closed.long()]).int()
    for group in (1, 4, 7):
        places = on_device.placed(labels.to(device), pages.to(device), group)
        assert torch.equal(places.cpu(), kmeans.placed(labels, pages, group)) and places.dtype == torch.int64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dims", "held"), [((1, 1), (64, 64), 33), ((3, 2), (7, 150), 0), ((2, 1), (5, 9), 99)]
)
def test_entries_are_put_as_their_twin_puts_them(
    device: str, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], held: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of tokens in the tail, new ones, or both, of adjacent rows of more; all places, or a part of them."""
    on_device, tokens = kernels("clusters_triton", device, monkeypatch), min(90, held + 80)
    widths = [count * dim for count, dim in zip(heads, dims, strict=True)]
    width = sum(widths)
    old = random(4, held, width + 3).to(dtype).to(device)[1:, :, :width]
    new = [random(4, 80, count, dim, seed=dim).to(dtype).to(device).transpose(1, 2)[1:]
           for count, dim in zip(heads, dims, strict=True)]  # fmt: skip
    targets = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(1)).view(3, tokens)
    for first, size in ((0, 3 * tokens), (50, 77), (3 * tokens - 5, 20)):
        out = torch.full((size, width), float("nan"), dtype=dtype)
        there = out.to(device)
        on_device.put(old, *new, targets.to(device), first, there)
        kmeans.put(old.cpu(), *(part.cpu() for part in new), targets, first, out)
        assert torch.equal(there.cpu().nan_to_num(-9.0), out.nan_to_num(-9.0))
        assert out.isnan().any(1).sum() == max(0, first + size - 3 * tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_distances_the_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, whose products are exact; and no label for what is no number."""
    on_device = kernels("clusters_triton", device, monkeypatch)
    points, centroids = (random(2, size, 16, seed=size).round() for size in (90, 75))
    centroids[:, 40:] = centroids[:, :35]
    expected = kmeans.assign(points, centroids)
    assert torch.equal(on_device.assign(points.to(device), centroids.to(device)).cpu(), expected)
    centroids[0] = float("nan")
    labels = on_device.assign(points.to(device), centroids.to(device)).cpu()
    assert torch.equal(labels, kmeans.assign(points, centroids)) and not labels[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_label_of_many_points(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = kernels("clusters_triton", device, monkeypatch)
    points, labels = random(1, 300, 8), torch.full((1, 300), 2, dtype=torch.int32)
    before = random(1, 4, 8, seed=1)
    found, counts = on_device.means(points.to(device), labels.to(device), before.to(device))
    expected, _ = kmeans.means(points, labels, before)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert counts.tolist() == [[0, 0, 300, 0]] and torch.equal(found[0, 0].cpu(), before[0, 0])
    again, _ = on_device.means(points.to(device), labels.to(device), before.to(device))
    assert torch.equal(found, again)
    assert torch.equal(on_device.parted(labels.to(device), 4, 7).cpu(), kmeans.parted(labels, 4, 7))


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "capacity"), [(1, 32), (3, 16)])
def test_clusters_take_no_more_than_booked(rows: int, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what torch holds, with the keys, of bfloat16: the kernels hold nothing else."""
    on_device = kernels("clusters_triton", "cpu", monkeypatch)
    for name in ("assign", "means", "apart", "parted"):
        monkeypatch.setattr(kmeans, name, getattr(on_device, name))
    form, sizes = RecordFormat(1, 64, 1, 64, torch.bfloat16, 16), ClusterForm(size=12, capacity=capacity)
    new, held = random(rows, 1, 200, 64).bfloat16(), random(rows, 60, 128, seed=1).bfloat16()
    coming = Arrivals(form, held, new, new, 260)
    clusters_of_rows(held[:, :9, :64], np.full(rows, 2), capacity)  # which compiles
    with torch.profiler.profile(profile_memory=True) as seen, torch.profiler.record_function("clustering"):
        made = clusters_of_rows(coming.points_of(np.arange(rows), 0, 260), np.full(rows, 260 // 12), capacity)
    booked = clustering_there(form, sizes, 260, (rows, 0))
    assert 0.3 * booked < most_held(seen, "clustering") + sum(part.nbytes for part in made) <= booked
