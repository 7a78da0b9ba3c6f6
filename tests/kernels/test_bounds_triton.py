"""The choice of chunks and tokens on a device against its twins: in Triton's interpreter (`make test-kernels`), and on
a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import bounds

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor that is made from now on, filled with what is no result."""
    fill_what_is_empty(monkeypatch)
    empty, sizes = torch.empty, list[int]()

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    return sizes


@EACH_DEVICE
@pytest.mark.parametrize("expected", [True, False])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "dim", "chunks", "apart", "dtype"),
    [
        (1, 9, 3, 64, 70, True, torch.bfloat16), (2, 6, 2, 24, 130, False, torch.float32),
        (2, 32, 8, 128, 5, True, torch.float16), (1, 20, 1, 40, 64, False, torch.float32),
        (2, 4, 2, 256, 1, True, torch.float32),
    ],
)  # fmt: skip
def test_limits_are_the_twins(
    device: str, batch: int, heads: int, key_heads: int, dim: int, chunks: int, apart: bool, dtype: torch.dtype,
    expected: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(chunks)
    rows, own = (batch * key_heads, 1) if apart else (batch, key_heads)
    states = torch.randn(batch, heads, 3, dim, generator=made).to(dtype)[:, :, 1]
    ends = torch.randn(rows, chunks + 5, 2, own, dim, generator=made).sort(2).values.to(dtype)
    ends[:, chunks:] = torch.nan
    twin = bounds.limits(states, ends[:, :chunks], 0.3, expected)
    sizes = allocated(monkeypatch)
    found = kernel.limits(move(states, device), ends.to(device)[:, :chunks], 0.3, expected)
    for one, other in zip(found, twin, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-5)
    assert sum(sizes) < bounds.chunk_bytes(rows, heads // key_heads * own, chunks)


@EACH_DEVICE
@pytest.mark.parametrize("count", [1, 70, 133])
def test_chunks_that_do_not_exist_stand_last(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the chosen ones are those of the chunks that exist, and what the others contain does not matter."""
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    states, ends = torch.randn(2, 6, 24, generator=made), torch.randn(4, 140, 2, 1, 24, generator=made).sort(2).values
    alone = bounds.limits(states, ends[:, :count], 0.3, True)
    ends[:, count:] = torch.nan
    twin = bounds.limits(states, ends, 0.3, True, torch.tensor(count))
    fill_what_is_empty(monkeypatch)
    found = kernel.limits(*(one.to(device) for one in (states, ends)), 0.3, True, torch.tensor(count, device=device))
    for one, other, exist in zip(found, twin, alone, strict=True):
        torch.testing.assert_close(other[..., :count], exist)
        assert (other[..., count:] == -torch.inf).all()
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-5)
    places = max(1, count // 3)
    chosen = bounds.front(*bounds.stand(*alone, places, 1), 8, 40, places)
    assert torch.equal(bounds.front(*bounds.stand(*twin, places, 1), 8, 40, places), chosen)
    assert torch.equal(kernel.front(*kernel.stand(*found, places, 1), 8, 40, places).cpu(), chosen)


@EACH_DEVICE
@pytest.mark.parametrize("count", [0, 1, 33, 70])
@pytest.mark.parametrize("bits", [None, 8])
def test_latest_keys_that_do_not_exist_do_not_count(
    device: str, count: int, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    form = RecordFormat(2, 24, 2, 24, torch.float32, 5, bits)
    data = torch.empty(18, form.payload_width, dtype=form.payload_dtype)
    form.pack(torch.randn(18, 5, form.entry_width, generator=made), data)
    query, latest = torch.randn(2, 6, 24, generator=made), 3 * torch.randn(2, 2, 70, 24, generator=made)
    places, data = torch.stack([torch.randperm(9, generator=made)[:6] for _ in range(2)]).int(), data.view(2, 9, -1)
    alone = bounds.look(query, data, places, latest[:, :, :count], form, 0.3, 11, 2)
    latest[:, :, count:] = torch.nan
    twin = bounds.look(query, data, places, latest, form, 0.3, 11, 2, torch.tensor(count))
    fill_what_is_empty(monkeypatch)
    given = [one.to(device) for one in (query, data, places, latest)]
    found = kernel.look(*given, form, 0.3, 11, 2, torch.tensor(count, device=device))
    assert torch.equal(twin, alone) and torch.equal(found.cpu(), twin)


@EACH_DEVICE
def test_scores_that_are_nan_are_the_twins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(0)
    states, ends = torch.randn(1, 6, 32, generator=made), torch.randn(1, 70, 2, 2, 32, generator=made).sort(2).values
    states[:, 1], ends[:, 5], ends[:, 66, 1] = torch.nan, torch.nan, torch.inf
    twin = bounds.limits(states, ends, 0.3, True)
    found = kernel.limits(states.to(device), ends.to(device), 0.3, True)
    for one, other in zip(found, twin, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-5)
        assert not other.isnan().any() and (other[:, 1] < -1e38).all() and (other[:, :, 5] < -1e38).all()
    form = RecordFormat(2, 32, 2, 32, torch.float32, 4)
    data, latest = torch.randn(1, 9, form.payload_width, generator=made), torch.randn(1, 2, 5, 32, generator=made)
    places = torch.tensor([[4, 2, -1, 7]]).int()
    kept = bounds.look(states, data, places, latest, form, 0.3, 7, 1)
    found_kept = kernel.look(*(one.to(device) for one in (states, data, places, latest)), form, 0.3, 7, 1)
    assert torch.equal(found_kept.cpu(), kept) and kept.flatten().nonzero()[:, 0].tolist() == [*range(7)]


@EACH_DEVICE
@pytest.mark.parametrize(
    ("rows", "heads", "chunks", "budget", "group", "wanted", "loose"),
    [
        (3, 3, 70, 27, 64, 404, 2.0), (2, 4, 300, 9, 64, 60, 0.01), (1, 1, 1, 4, 8, 3, 0.1),
        (2, 7, 129, 200, 8, 300, 0.1), (3, 2, 500, 250, 8, 900, 0.02), (2, 3, 64, 5, 16, 2, 0.3),
        (5, 2, 40, 20, 64, 500, 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("equal", [False, True])
def test_the_front_is_the_twins(
    device: str, rows: int, heads: int, chunks: int, budget: int, group: int, wanted: int, loose: float, equal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """To the chunk: also if some are equal, and if some count with all their tokens, so that fewer are enough."""
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(chunks)
    high = torch.randn(rows, heads, chunks, generator=made)
    high = high.mul(2).round().div(2) if equal else high
    low = high - loose * torch.rand(rows, heads, chunks, generator=made)
    places, apart = min(budget, chunks), min(1, chunks)
    standings = bounds.stand(high, low, places, apart)
    units = bounds.front(*standings, group, wanted, budget)
    sizes = allocated(monkeypatch)
    found = kernel.stand(high.to(device), low.to(device), places, apart)
    for one, other in zip(found, standings, strict=True):
        assert torch.equal(one.cpu(), other)
    assert torch.equal(kernel.front(*found, group, wanted, budget).cpu(), units)
    assert sum(sizes) + high.nbytes + low.nbytes <= bounds.chunk_bytes(rows, heads, chunks)
    counts = kernel.counters(found[0].device, 1 << (rows - 1).bit_length())
    assert counts.tolist() == [0] * len(counts)
    if chunks == 300 and not equal:
        assert (units < 0).any()


@EACH_DEVICE
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "dim", "group", "selected", "recent", "apart", "bits", "dtype", "wanted"),
    [
        (1, 9, 3, 64, 64, 7, 90, True, None, torch.bfloat16, 101),
        (2, 6, 2, 24, 5, 11, 3, False, None, torch.float32, 20),
        (2, 32, 8, 128, 16, 3, 64, True, 8, torch.float16, 47),
        (1, 20, 1, 40, 8, 40, 0, False, 8, torch.float32, 99),
        (1, 4, 2, 256, 4, 1, 5, True, 8, torch.bfloat16, 9),
        (2, 6, 2, 24, 5, 11, 70, True, None, torch.float32, 55),
    ],
)  # fmt: skip
def test_the_tokens_are_the_twins(
    device: str, batch: int, heads: int, key_heads: int, dim: int, group: int, selected: int, recent: int, apart: bool,
    bits: int | None, dtype: torch.dtype, wanted: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """To the token, in a row with fewer chunks too; what is in other slots may be NaN."""
    kernel, made = kernels("bounds_triton", device, monkeypatch), torch.Generator().manual_seed(dim)
    rows, own = (batch * key_heads, 1) if apart else (batch, key_heads)
    form, count = RecordFormat(own, dim, own, 40, dtype, group, bits), selected + 2
    data = torch.empty(rows * count, form.payload_width, dtype=form.payload_dtype)
    form.pack(torch.randn(rows * count, group, form.entry_width, generator=made).to(dtype), data)
    query = torch.randn(batch, heads, 2, dim, generator=made).to(dtype)[:, :, 1]
    places = torch.stack([torch.randperm(count, generator=made)[:selected] for _ in range(rows)]).int()
    places[-1, selected * 2 // 3 + 1 :] = -1
    latest = torch.randn(rows, recent + 3, own, dim, generator=made).to(dtype)[:, 2 : recent + 2].transpose(1, 2)
    data, scaling = data.view(rows, count, -1), dim**-0.5
    if bits is None:
        there = torch.zeros(rows, count + 1, dtype=torch.bool)
        data[~there.scatter_(1, places.long().remainder(count + 1), True)[:, :-1]] = torch.nan
    twin = bounds.look(query, data, places, latest, form, scaling, wanted, 2)
    sizes = allocated(monkeypatch)
    given = [move(one, device) for one in (query, data, places, latest)]
    found = kernel.look(*given, form, scaling, wanted, 2)
    assert found.dtype == torch.bool and torch.equal(found.cpu(), twin)
    assert sum(sizes) <= bounds.look_bytes(rows, heads // key_heads * own, selected * group, recent)
    counts = kernel.counters(found.device, 1 << (rows - 1).bit_length())
    assert counts.tolist() == [0] * len(counts)


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, form = kernels("bounds_triton", device, monkeypatch), RecordFormat(1, 24, 1, 24, torch.float32, 8)
    states, ends = torch.ones(2, 6, 24, device=device), torch.ones(4, 70, 2, 1, 24, device=device)
    data, places = torch.ones(4, 9, form.payload_width, device=device), torch.ones(4, 5, device=device).int()
    recent = torch.ones(4, 1, 3, 24, device=device)
    kernel.counters(states.device, 4)
    with Launches(kernel, monkeypatch) as launches:
        high, low = kernel.limits(states, ends, 0.3, True)
        assert (launches.count, launches.others) == (1, [])
        most, least = kernel.stand(high, low, 9, 1)
        kernel.front(most, least, 8, 30, 9)
        assert (launches.count, launches.others) == (3, [])
        kernel.look(states, data, places, recent, form, 0.3, 20, 2)
        assert (launches.count, launches.others) == (4, [])
