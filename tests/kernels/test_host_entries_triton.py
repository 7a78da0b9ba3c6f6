"""Entries that a device reads out of host memory: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import host_entries
from hf_offload_cache.stores import MemoryStore

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


@EACH_DEVICE
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_gets_its_tokens(
    device: str, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels("host_entries_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "_PROGRAMS", 2)  # which have several rounds
    made = torch.Generator().manual_seed(0)
    rows, heads, units, group, count = 3, 2, 9, 32, 13
    form = RecordFormat(heads, dims[0], heads, dims[1], dtype, group)
    store = MemoryStore(form.record_bytes, "layer 3", pinned=device == "cuda")
    store._chunk_records = 4
    entries = torch.randn(rows * units, group, form.entry_width, generator=made).to(dtype)
    records = torch.zeros(rows * units, form.record_bytes, dtype=torch.uint8)
    form.payload(records).copy_(entries.flatten(1))
    ids = store.allocate(rows * units)[torch.randperm(rows * units, generator=made).numpy()]
    store.write(ids, records)
    if device == "cuda":
        addresses = store.addresses(ids)
        assert addresses is not None
    else:
        assert store.addresses(ids) is None
        chunk, row = np.divmod(ids, 4)
        addresses = np.array([one.data_ptr() for one in store._chunks])[chunk] + row * form.record_bytes
    tokens = torch.randint(-1, units * group, (rows, heads, count), generator=made)
    where = torch.from_numpy(addresses).view(rows, units)
    found, twins = (
        [torch.full((rows, heads, count, dim), 7.0, dtype=dtype, device=place) for dim in dims]
        for place in (device, "cpu")
    )  # fmt: skip
    kernel.bring(where.to(device), tokens.to(device), form, *found)
    host_entries.bring(where, tokens, form, *twins)
    every = form.split(entries.view(rows, units * group, form.entry_width))
    at = tokens.clamp(min=0)[..., None]
    for own, twin, part in zip(found, twins, every, strict=True):
        expected = part.gather(2, at.expand(-1, -1, -1, part.shape[3])).masked_fill(tokens[..., None] < 0, 7)
        assert torch.equal(own.cpu(), expected) and torch.equal(twin, expected)
    store.close()


@EACH_DEVICE
@pytest.mark.parametrize(
    ("count", "most", "dtype"), [(5, 5, torch.int32), (68, 60, torch.int64), (256, 256, torch.int32)]
)
def test_tokens_are_exchanged_as_the_twin_exchanges_them(
    device: str, count: int, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("host_entries_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    tokens = torch.full((2, 3, count), -1)
    on_device = tokens.clone().to(device)
    fill_what_is_empty(monkeypatch)
    for step in range(5):
        wanted = torch.stack([torch.randperm(2 * count, generator=made)[:most] for _ in range(6)]).view(2, 3, most)
        wanted[0, 1, torch.randperm(most, generator=made)[: step * most // 5]] = -1
        before, wanted = tokens.clone(), wanted.to(dtype)
        new, counts = host_entries.exchange(tokens, wanted)
        found = kernel.exchange(on_device, wanted.to(device))
        for own, twin in zip((*found, on_device), (new, counts, tokens), strict=True):
            assert torch.equal(own.cpu(), twin)
        same = (before[..., None] == wanted[:, :, None]) & (before >= 0)[..., None]
        stays = same.any(3)
        assert torch.equal(tokens[stays], before[stays]) and bool((new[stays] == -1).all())
        assert torch.equal(new[~stays], tokens[~stays]) and torch.equal(counts, (new >= 0).sum(2))
        held = [sorted(row[row >= 0].tolist()) for row in tokens.flatten(0, 1)]
        assert held == [sorted(row[row >= 0].tolist()) for row in wanted.flatten(0, 1)]
    assert int(counts.sum()) < 6 * most


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("host_entries_triton", device, monkeypatch)
    tokens, addresses = torch.full((2, 3, 5), -1, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    form = RecordFormat(3, 8, 3, 4, torch.float32, 4)
    keys, values = (torch.zeros(2, 3, 5, dim, device=device) for dim in (8, 4))
    with Launches(kernel, monkeypatch) as launches:
        kernel.exchange(tokens, tokens)
        assert (launches.count, launches.others) == (1, [])
        kernel.bring(addresses, tokens, form, keys, values)
        assert (launches.count, launches.others) == (2, [])
