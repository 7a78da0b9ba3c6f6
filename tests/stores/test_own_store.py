"""A store written from outside, with nothing but `Store` and its helpers: the shipped suite, a prefetcher and a
cache run on it, and what needs a store that can be frozen says so."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import fresh, generate, prompt
from transformers import DynamicCache

from hf_offload_cache import OffloadCache
from hf_offload_cache.errors import StoreError
from hf_offload_cache.fetch import Prefetcher, Storage
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.stores import Store, aligned_empty, check_batch, check_range, require_freezable, runs
from hf_offload_cache.testing import RECORD_BYTES, FaultyStore, StoreTests, fill, pattern, read


class DictStore(Store):
    """Records in a dictionary; None: allocated, and nothing written yet."""

    def __init__(self, record_bytes: int, name: str) -> None:
        super().__init__(record_bytes, name)
        self._records: dict[int, torch.Tensor | None] = {}
        self._capacity = 0

    def allocate(self, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        while self._capacity - len(self._records) < count:
            self._capacity += 64
        free = (identity for identity in range(self._capacity) if identity not in self._records)
        ids = np.array([next(free) for _ in range(count)], dtype=np.int64)
        self._records.update(dict.fromkeys(ids.tolist()))
        return ids

    def free(self, ids: np.ndarray) -> None:
        wanted = ids.tolist()
        if len(set(wanted)) < len(wanted) or not set(wanted) <= self._records.keys():
            raise StoreError(errno.EINVAL, f"{self.name}: {wanted} are not all allocated")
        for identity in wanted:
            del self._records[identity]

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        check_batch(ids, records, self.record_bytes)
        check_range(self.name, ids, self.capacity)
        self._records.update(zip(ids.tolist(), records.clone(), strict=True))
        self.count_written(records.numel())

    def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
        check_batch(ids, out, self.record_bytes, aligned=True)
        check_range(self.name, ids, self.capacity)
        for row, identity in zip(out, ids.tolist(), strict=True):
            record = self._records.get(identity)
            if record is not None:
                row.copy_(record)
        self.count_read(len(runs(ids)), out.numel())

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def disk_bytes(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> int:
        return len(self._records) * self.record_bytes

    @property
    def tables_bytes(self) -> int:
        return len(self._records) * 8

    def close(self) -> None:
        self._records.clear()


class TestDictStore(StoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> Store:
        return DictStore(record_bytes, "layer 3")


def test_a_prefetcher_reads_and_writes_it() -> None:
    prefetcher, store = Prefetcher(MemoryAccount(), 2**20), DictStore(RECORD_BYTES, "layer 3")
    with closing(prefetcher), closing(store):
        ids, records = store.allocate(40), pattern(40)
        prefetcher.write(store, ids, records.clone())
        prefetcher.flush(store)
        out = aligned_empty(20, RECORD_BYTES)
        prefetcher.read(store, ids[::2], out).wait()
        assert torch.equal(out, records[::2])


def test_freezing_it_is_refused_with_what_is_missing() -> None:
    store = DictStore(RECORD_BYTES, "layer 3")
    with pytest.raises(TypeError, match=r"layer 3 is in a DictStore, which is not a FreezableStore: implement freeze"):
        require_freezable(store)
    around = FaultyStore(store, "read", 10**9)
    ids, records = fill(around, 3)
    assert torch.equal(read(around, ids), records) and around.first_id == 0
    for call in (around.freeze, around.share, lambda: around.export(-1, "saved"), lambda: around.written):
        with pytest.raises(TypeError, match="layer 3 is in a DictStore"):
            call()
    assert torch.equal(read(around, ids), records), "it is as it was"


def test_a_cache_generates_over_it_and_says_why_it_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "_new_store", lambda storage, record_bytes, name: DictStore(record_bytes, name))
    model = fresh("llama")
    ids = prompt(model, 1, 200)
    expected = generate(model, DynamicCache(config=model.config), ids, max_new_tokens=6)
    with OffloadCache(model, path=tmp_path) as cache:
        got = generate(model, cache, ids, max_new_tokens=3)
        for call in (lambda: cache.save(tmp_path / "context"), cache.fork):
            with pytest.raises(TypeError, match=r"saving and forking need .* layer 0 is in a DictStore"):
                call()
        assert not (tmp_path / "context").exists()
        got = generate(model, cache, got.tokens, max_new_tokens=3)
    assert torch.equal(got.tokens, expected.tokens), "the context is as it was"
