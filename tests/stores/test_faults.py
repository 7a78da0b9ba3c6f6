"""What the stores say when the disk is full, short or broken; and that the faulty store is faulty as it says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from store_cases import buffered, fails, needs, with_free_space

from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.stores import MemoryStore, Store, aligned_empty, open_store
from hf_offload_cache.testing import RECORD_BYTES, FaultyStore, fill, open_descriptors, pattern, read


@pytest.fixture(params=["direct", "mapped", "mapped, buffered", "uring", "uring, buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    engine, _, without_direct = request.param.partition(", ")
    needs(engine, tmp_path)
    if without_direct:
        buffered(monkeypatch)
    before = open_descriptors()
    store = open_store(engine, tmp_path, RECORD_BYTES, "layer 3")
    yield store
    monkeypatch.undo()
    store.close()
    assert open_descriptors() == before


def test_no_room_to_grow(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ids, records = fill(store, 64)
    with_free_space(monkeypatch, 9 * RECORD_BYTES)
    with pytest.raises(StoreFullError) as caught:
        store.allocate(10)
    assert caught.value.errno == errno.ENOSPC
    for part in ("layer 3", f"{10 * RECORD_BYTES:,}", f"{9 * RECORD_BYTES:,}", str(tmp_path)):
        assert part in str(caught.value)
    assert len(store.allocate(9)) == 9, "nothing was taken by the refusal, and a smaller step still fits"
    with pytest.raises(StoreFullError):  # what is promised and not written yet is not free
        store.allocate(1)
    assert torch.equal(read(store, ids), records)


def test_a_file_system_that_does_not_tell(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result([0] * 10))
    ids, records = fill(store, 3)
    assert torch.equal(read(store, ids), records)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_growing_fails(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ids, records = fill(store, 64)
    monkeypatch.setattr(os, "ftruncate", fails(number))
    with pytest.raises(StoreError, match="layer 3") as caught:
        store.allocate(5)
    assert isinstance(caught.value, StoreFullError) == (number == errno.ENOSPC)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    again, more = fill(store, 5, seed=4)
    assert not set(again.tolist()) & set(ids.tolist())
    assert torch.equal(read(store, np.r_[ids, again]), torch.cat([records, more]))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_fails(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ids, records = fill(store, 8)
    written = store.bytes_written
    fresh = store.allocate(2)
    monkeypatch.setattr(os, "pwrite", fails(number))
    with pytest.raises(StoreError, match=r"layer 3.*records 8\.\.9") as caught:
        store.write(fresh, pattern(2))
    assert isinstance(caught.value, StoreFullError) == (number != errno.EIO)
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, OSError)
    assert store.bytes_written == written
    monkeypatch.undo()
    assert torch.equal(read(store, ids), records)


def test_partial_writes_are_carried_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:4096], offset))
    ids, records = fill(store, 5)
    assert torch.equal(read(store, ids), records)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)  # and one that makes no progress is not
    with pytest.raises(StoreError, match=r"record 0.*short write"):
        store.write(ids[:1], pattern(1))


def test_the_file_ends_too_early(store: Store) -> None:
    ids, records = fill(store, 64)
    os.ftruncate(store._file.fd, 10 * RECORD_BYTES + 4096)
    for last in (10, 40):
        with pytest.raises(StoreError, match=rf"layer 3.*record {last}\b.*short read"):
            read(store, ids[[last]])
    assert torch.equal(read(store, ids[:10]), records[:10]), "others stay readable"


def test_a_read_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(needs("direct", tmp_path), tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 8)
    counted = store.reads, store.bytes_read
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails(errno.EIO))
        with pytest.raises(StoreError, match=r"layer 3.*records 2\.\.4 \(3\)") as caught:
            read(store, ids[2:5])
        assert (caught.value.errno, type(caught.value.__cause__)) == (errno.EIO, OSError)
    assert (store.reads, store.bytes_read) == counted
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:4096]], offset))
    assert torch.equal(read(store, ids), records), "a partial read is carried on"
    store.close()


def test_advice_fails(tmp_path: Path) -> None:
    class RefusingMap:
        def madvise(self, *args: int) -> None:
            raise OSError(errno.ENOMEM, "no")

    store = open_store("mapped", tmp_path, RECORD_BYTES, "layer 3")
    ids, _ = fill(store, 4)
    store._map = (RefusingMap(), store._map[1])
    with pytest.raises(StoreError, match=r"layer 3: advising records 0\.\.3"):
        store.advise(ids)
    with pytest.raises(StoreError, match=r"layer 3: reading records 0\.\.3"):
        read(store, ids)
    store.close()


def test_a_failed_sync_makes_all_reads_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffered(monkeypatch)
    monkeypatch.setattr(os, "fdatasync", fails(errno.EIO))
    store = open_store("mapped", tmp_path, RECORD_BYTES, "layer 3")
    early, _ = fill(store, 10)
    with pytest.raises(StoreError, match=r"layer 3.*writing"):
        fill(store, 128)
    with pytest.raises(StoreError, match="earlier writes may be lost"):
        read(store, early)
    store.close()


class TestFaultyStore:
    def test_fails_the_calls_it_was_told_to(self) -> None:
        store = FaultyStore(MemoryStore(RECORD_BYTES, "layer 3"), "read", 3, errno.ETIMEDOUT, times=2)
        ids, records = fill(store, 2)
        outcomes = []
        for _ in range(6):
            try:
                outcomes.append(torch.equal(read(store, ids), records))
            except StoreError as error:
                outcomes.append(error.errno)
        assert outcomes == [True, True, errno.ETIMEDOUT, errno.ETIMEDOUT, True, True]

    @pytest.mark.parametrize("operation", ["allocate", "free", "write", "advise", "read"])
    def test_every_operation(self, operation: str) -> None:
        store = FaultyStore(MemoryStore(RECORD_BYTES, "layer 3"), operation, 1, errno.ENOSPC)
        ids = store.inner.allocate(1)
        calls = {
            "allocate": lambda: store.allocate(1),
            "free": lambda: store.free(ids),
            "write": lambda: store.write(ids, pattern(1)),
            "advise": lambda: store.advise(ids),
            "read": lambda: read(store, ids),
        }
        with pytest.raises(StoreFullError, match=f"layer 3: {operation}"):
            calls[operation]()
        for name in ("write", "advise", "read", "allocate", "free"):
            calls[name]()

    def test_short(self) -> None:
        for wrong in (("reed", 1), ("read", 0), ("free", 1)):
            with pytest.raises(ValueError, match=r"reed|0 and 1|short"):
                FaultyStore(MemoryStore(RECORD_BYTES, "layer 3"), *wrong, short=wrong[0] == "free")
        store = FaultyStore(MemoryStore(RECORD_BYTES, "layer 3"), "read", 1, short=True)
        ids, records = fill(store, 4)
        out = aligned_empty(4, RECORD_BYTES).zero_()
        with pytest.raises(StoreError):
            store.read(ids, out)
        assert torch.equal(out, torch.cat([records[:2], torch.zeros_like(records[:2])]))
