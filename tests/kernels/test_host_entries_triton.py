"""Entries that a device reads out of host memory: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_kernels import DEVICES, kernels

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.stores import MemoryStore


@pytest.mark.parametrize("device", DEVICES)
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
    where = torch.from_numpy(addresses).view(rows, units).to(device)
    keys, values = (part.cpu() for part in kernel.gather(where, tokens.to(device), form))
    every_key, every_value = form.split(entries.view(rows, units * group, form.entry_width))
    at = tokens.clamp(min=0)[..., None]
    for found, every in ((keys, every_key), (values, every_value)):
        expected = every.gather(2, at.expand(-1, -1, -1, every.shape[3])).masked_fill(tokens[..., None] < 0, 0)
        assert torch.equal(found, expected)
    old = [torch.full((rows, heads, count, dim), 7.0, dtype=dtype, device=device) for dim in dims]
    kernel.gather_into(where, tokens.to(device), form, tuple(old), keeps=True)
    for found, every in zip(old, (every_key, every_value), strict=True):
        expected = every.gather(2, at.expand(-1, -1, -1, every.shape[3])).masked_fill(tokens[..., None] < 0, 7)
        assert torch.equal(found.cpu(), expected)
    store.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "least", "most"), [(5, 0, 5), (68, 68, 68), (256, 100, 256)])
def test_what_is_wanted_again_stays(
    device: str, count: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("host_entries_triton", device, monkeypatch), np.random.default_rng(0)
    tokens = torch.full((2, 3, count), -1, device=device)
    for _ in range(4):
        wanted = np.stack([made.permutation(3 * count)[:most] for _ in range(6)]).reshape(2, 3, most)
        wanted[0, 1, made.integers(least, most + 1) :] = -1
        before = tokens.cpu().numpy().copy()
        new, counts = kernel.exchange(tokens, torch.from_numpy(wanted).to(device))
        now, new = tokens.cpu().numpy(), new.cpu().numpy()
        came = 0
        for row, head in np.ndindex(2, 3):
            asked, held = wanted[row, head], now[row, head]
            assert sorted(held[held >= 0]) == sorted(asked[asked >= 0])
            stays = np.isin(before[row, head], asked) & (before[row, head] >= 0)
            assert (held[stays] == before[row, head][stays]).all() and (new[row, head][stays] == -1).all()
            assert (new[row, head][~stays] == held[~stays]).all()
            came += int((new[row, head] >= 0).sum())
        assert counts.tolist() == [int((wanted >= 0).sum()), came]
