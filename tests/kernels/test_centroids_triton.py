"""A choice of clusters on a device against its twins: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.kernels import clusters


@dataclass(frozen=True)
class Shape:
    """Sequences, rows of a sequence, query heads of a row, channels of keys and of values, pages of a cluster, entries
    of a page, and clusters."""

    batch: int
    each: int
    heads: int
    key: int
    value: int
    largest: int
    group: int
    clusters: int

    @property
    def rows(self) -> int:
        return self.batch * self.each


SHAPES = {
    "smol": Shape(2, 3, 3, 64, 64, 6, 4, 130),
    "llama": Shape(1, 2, 4, 128, 128, 3, 16, 65),
    "odd": Shape(2, 1, 5, 24, 40, 5, 5, 64),
    "wide": Shape(1, 1, 1, 256, 256, 2, 7, 3),
    "many heads": Shape(1, 1, 70, 20, 16, 4, 3, 40),
    "many clusters": Shape(1, 1, 2, 16, 16, 2, 2, 1500),
}
EACH_SHAPE = pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


class Inputs:
    """Random inputs of all steps, on the host: rows with fewer clusters than others, clusters of which no key is in a
    page, and some of which keys wait."""

    def __init__(self, shape: Shape, seed: int = 0, ties: bool = False) -> None:
        self.shape, self.made = shape, torch.Generator().manual_seed(seed)
        counts = torch.randint(1, shape.largest * shape.group + 1, (shape.rows, shape.clusters), generator=self.made)
        used = torch.randint(1, shape.clusters + 1, (shape.rows, 1), generator=self.made)
        used[0] = shape.clusters
        counts[torch.arange(shape.clusters) >= used] = 0
        waiting = torch.minimum(torch.randint(0, 9, counts.shape, generator=self.made), counts)
        stored = counts - waiting * (torch.rand(counts.shape, generator=self.made) < 0.1)
        sinks = torch.zeros_like(counts)
        sinks[:, :: max(1, shape.clusters // 3)] = 1
        sinks[0, 0] = 2
        tables = torch.stack([counts, stored, torch.minimum(sinks, stored)]).int()
        self.tables = torch.cat([tables, torch.full((3, shape.rows, 5), -7).int()], 2)[..., :-5]  # of wider tables
        self.centroids = self.normal(shape.rows, shape.clusters + 2, shape.key).half()[:, :-2]
        if ties:
            self.centroids[:] = self.centroids[:, :1]

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.made)

    def scored(self, latest: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states = self.normal(self.shape.batch, self.shape.each * self.shape.heads, self.shape.key)
        recent = self.normal(self.shape.rows, latest, self.shape.key)
        return clusters.score(states, self.centroids, self.tables, recent, 0.3)


def on(device: str, *given: Any) -> list[Any]:
    """`given`, its tensors on `device` with the strides that they have."""
    return [move(one, device) if isinstance(one, torch.Tensor) else one for one in given]


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize(
    ("dtype", "latest"), [(torch.float32, 70), (torch.bfloat16, 64), (torch.float16, 1), (torch.float32, 0)]
)
def test_scores_and_their_softmax(
    device: str, shape: Shape, dtype: torch.dtype, latest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape), kernels("clusters_triton", device, monkeypatch)
    states = given.normal(shape.batch, 2, shape.each * shape.heads, shape.key).to(dtype)[:, 1]
    recent = given.normal(shape.rows, latest + 3, shape.key + 9).to(dtype)[:, 3:, : shape.key]
    args = states, given.centroids, given.tables, recent, shape.key**-0.5
    expected = clusters.score(*args)
    fill_what_is_empty(monkeypatch)
    for found, one in zip(kernel.score(*on(device, *args)), expected, strict=True):
        torch.testing.assert_close(found.cpu(), one, rtol=1e-5, atol=1e-5)


@EACH_DEVICE
@pytest.mark.parametrize("count", [0, 1, 65])
def test_keys_and_clusters_that_do_not_exist_do_not_count(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the latest keys there may be anything; the tables of clusters are zeros."""
    shape = SHAPES["smol"]
    given, kernel = Inputs(shape), kernels("clusters_triton", device, monkeypatch)
    states = given.normal(shape.batch, shape.each * shape.heads, shape.key)
    recent, more = given.normal(shape.rows, 70, shape.key), 5
    pad = torch.nn.functional.pad
    wider = [pad(given.centroids, (0, 0, 0, more)), pad(given.tables, (0, more))]
    alone = clusters.score(states, given.centroids, given.tables, recent[:, :count], 0.3)
    recent[:, count:] = torch.nan
    number = torch.tensor(count)
    twin = clusters.score(states, *wider, recent, 0.3, number)
    fill_what_is_empty(monkeypatch)
    found = kernel.score(*on(device, states, *wider, recent, 0.3, number))
    for one, other in zip(found, twin, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
    limits = 60, 20, 20, shape.largest, shape.group
    fewer, chosen = clusters.choose(*alone, given.tables, *limits), clusters.choose(*twin, wider[1], *limits)
    assert torch.equal(chosen[0], fewer[0]) and torch.equal(chosen[1], fewer[1])
    assert torch.equal(chosen[2][:, :-more], fewer[2]) and not chosen[2][:, -more:].any()
    torch.testing.assert_close(chosen[3][:, :-more], fewer[3])
    torch.testing.assert_close(chosen[4], fewer[4])


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("what", ["query", "centroid", "recent key"])
def test_what_is_not_a_number_counts_for_nothing(
    device: str, shape: Shape, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape, 3), kernels("clusters_triton", device, monkeypatch)
    states = given.normal(shape.batch, shape.each * shape.heads, shape.key)
    recent = given.normal(shape.rows, 9, shape.key)
    some = {"query": states[:1, 0], "centroid": given.centroids[:1, 0], "recent key": recent[:1, 3]}
    some[what][:, -1] = torch.nan
    args = states, given.centroids, given.tables, recent, 0.3
    scored, limits = clusters.score(*args), (9, 99, shape.clusters, shape.largest, shape.group)
    fill_what_is_empty(monkeypatch)
    found = kernel.score(*on(device, *args))
    pairs = zip([*found, *kernel.choose(*on(device, *scored, given.tables), *limits)],
                [*scored, *clusters.choose(*scored, given.tables, *limits)], strict=True)  # fmt: skip
    for own, expected in pairs:
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not scored[0].isnan().any()


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("ties", [False, True])
def test_pages_are_chosen_as_the_twin_chooses_them(
    device: str, shape: Shape, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape, 1, ties), kernels("clusters_triton", device, monkeypatch)
    scored = given.scored()
    of_first = int(((given.tables[1] + shape.group - 1) // shape.group * (given.tables[2] > 0)).sum(1).max())
    total, pages = int(given.tables[0].sum(1).max()), shape.clusters * shape.largest
    limits = [(0, pages), (1, of_first), (7, of_first + 2), (total // 3, pages), (total // 2, of_first + 5)]
    limits.append((2 * total, pages))
    fill_what_is_empty(monkeypatch)
    moved = on(device, *scored, given.tables)
    for wanted, most in limits:
        args = wanted, most, most, shape.largest, shape.group
        expected = clusters.choose(*scored, given.tables, *args)
        units, keep, kept, shares, left = (found.cpu() for found in kernel.choose(*moved, *args))
        assert units.tolist() == expected[0].tolist() and torch.equal(keep, expected[1])
        assert torch.equal(kept, expected[2])
        torch.testing.assert_close(shares, expected[3], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(left, expected[4], rtol=1e-4, atol=1e-6)
        assert int(kept.sum()) == int(keep.sum())
    assert torch.equal(kept, given.tables[1])


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("programs", [264, 1])
def test_the_estimate_of_the_others(
    device: str, shape: Shape, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape, 2), kernels("clusters_triton", device, monkeypatch)
    monkeypatch.setattr(kernels("ranking_triton", device, monkeypatch), "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TILE", 512)  # one part after the other is merged
    kept = (given.normal(shape.rows, shape.clusters) > 0.7).int()
    kept[0] = 1  # nothing is left
    maps = torch.randint(-127, 128, (shape.rows, shape.key + 1, 1, shape.value), dtype=torch.int8, generator=given.made)
    scale = given.normal(shape.rows, shape.key + 1).abs().mul(1e-3)
    ratio = given.normal(shape.rows, shape.heads)
    args = given.scored()[0], given.centroids, given.tables, kept, maps, scale, ratio, shape.batch
    expected = clusters.rest(*args)
    fill_what_is_empty(monkeypatch)
    moved = on(device, *args)
    for _ in range(2):  # the second finds what the first has left in the counters
        for found, one in zip(kernel.rest(*moved), expected, strict=True):
            torch.testing.assert_close(found.cpu(), one, rtol=1e-5, atol=1e-5)
    assert bool(expected[1][0, : shape.heads].isneginf().all())
    assert bool(expected[1].view(-1, shape.heads)[1:].isfinite().all())


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["smol"]
    given, kernel = Inputs(shape), kernels("clusters_triton", device, monkeypatch)
    states, means, tables, recent = on(
        device, given.normal(shape.batch, shape.each * shape.heads, shape.key), given.centroids, given.tables,
        given.normal(shape.rows, 9, shape.key),
    )  # fmt: skip
    maps = torch.zeros(shape.rows, shape.key + 1, 1, shape.value, dtype=torch.int8, device=device)
    scale, ratio = maps[:, :, 0, 0].float(), torch.zeros(shape.rows, shape.heads, device=device)
    kernel.counters(means.device, 8)
    with Launches(kernel, monkeypatch) as launches:
        scored = kernel.score(states, means, tables, recent, 1.0)
        assert (launches.count, launches.others) == (1, [])
        _, _, kept, *_ = kernel.choose(*scored, tables, 30, 40, 40, shape.largest, shape.group)
        assert (launches.count, launches.others) == (2, [])
        kernel.rest(scored[0], means, tables, kept, maps, scale, ratio, shape.batch)
        assert (launches.count, launches.others) == (3, [])
