"""Entries that a device reads out of host memory: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from hf_offload_cache.history.record_format import RecordFormat
from hf_offload_cache.stores.memory import MemoryStore


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.kernels), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_gets_its_tokens(
    device: str, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, wherever the records of a row lie, in several chunks; nothing for no token."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # which Triton looks at when a kernel is defined
    kernel = importlib.import_module("hf_offload_cache.kernels.host_entries_triton")
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
    store.close()
