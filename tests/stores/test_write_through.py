"""Records near each other in one request, and what is between them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import buffered, fails

from hf_offload_cache.errors import StoreError
from hf_offload_cache.stores import MOST_PARTS, THROUGH_BYTES, FileStore, choose_engine, open_store, spans
from hf_offload_cache.testing import RECORD_BYTES, pattern, read

MOST = THROUGH_BYTES // RECORD_BYTES


@pytest.fixture(params=["uring or direct", "mapped", "mapped, buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "mapped, buffered":
        buffered(monkeypatch)
    engine = "mapped" if "mapped" in request.param else "auto"
    made = open_store(choose_engine(engine, tmp_path)[0], tmp_path, RECORD_BYTES, "layer 3")
    yield made
    made.close()


def test_zeros_do_not_overwrite_what_another_thread_writes(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, real, mine = store.allocate(5), os.pwritev, pattern(2)
    other = threading.Thread(target=lambda: store.write(ids[[2]], pattern(1, seed=9)))

    def slow(fd: int, parts: list[memoryview], offset: int) -> int:
        other.start()
        other.join(0.2)  # it has noted its tag, and waits
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    store.write(ids[[1, 4]], mine)
    other.join()
    assert torch.equal(read(store, ids[[1, 2, 4]]), torch.cat([mine[:1], pattern(1, seed=9), mine[1:]]))
    assert store._blanks.table.tolist() == [False, False, False, True, False, *[False] * (store.capacity - 5)]


def test_in_any_order_what_is_overwritten_with_zeros_and_then_written_is_not_blank(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a record is given back while it waits to be written: what lies there is to be wiped."""
    ids, seal = store.allocate(6), store._guard.seal

    def forgotten(some: np.ndarray, records: torch.Tensor) -> torch.Tensor:
        sealed = seal(some, records)
        store._guard.forget(ids[[2]])
        return sealed

    monkeypatch.setattr(store._guard, "seal", forgotten)
    store.write(ids[[1, 4, 2]], pattern(3))
    assert np.flatnonzero(store._blanks.table).tolist() == [3]


def raw(store: FileStore, record: int) -> bytes:
    memory = mmap.mmap(-1, RECORD_BYTES)
    assert os.preadv(store._file.fd, [memory], record * RECORD_BYTES) == RECORD_BYTES
    return bytes(memory)


def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset of each request that writes, from now on, in records."""
    found, one, many = list[int](), os.pwrite, os.pwritev

    def writes(fd: int, data: Any, offset: int) -> int:
        found.append(offset // RECORD_BYTES)
        return one(fd, data, offset)

    def writes_parts(fd: int, parts: Any, offset: int) -> int:
        found.append(offset // RECORD_BYTES)
        return many(fd, parts, offset)

    monkeypatch.setattr(os, "pwrite", writes)
    monkeypatch.setattr(os, "pwritev", writes_parts)
    return found


def test_which_are_together() -> None:
    holding = np.zeros(4000, dtype=bool)
    holding[7] = True
    ids = np.array([0, 1, 3, 6, 8, 12, 13, 10, 9, 2000])
    found = list(spans(ids, 3, lambda some: holding[some]))
    at = [[(run.start, run.stop) for run in span] for span in found]
    assert at == [[(0, 2), (2, 3), (3, 4)], [(4, 5), (5, 7)], [(7, 8)], [(8, 9)], [(9, 10)]]
    assert [len(span) for span in spans(np.arange(0, 4000, 2), 3, lambda some: np.zeros(1))] == [
        MOST_PARTS // 2, MOST_PARTS // 2, MOST_PARTS // 2, 2000 - 3 * (MOST_PARTS // 2)
    ]  # fmt: skip
    assert [len(span) for span in spans(np.arange(0, 8, 2), 0, lambda some: np.zeros(1))] == [1] * 4
    assert list(spans(np.arange(0), 3, lambda some: np.zeros(1))) == []


def test_one_request_and_zeros_between(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = store.allocate(40 + 2 * MOST)
    rubbish = pattern(1, seed=5)
    store.write(ids[3:4], rubbish)
    store.free(ids[3:4])
    assert store.allocate(1).tolist() == [3], "it holds nothing again, though something lies there"
    asked, before = requests(monkeypatch), store.bytes_written
    near = np.array([0, 1, 4, 5, 9, 9 + MOST + 1, 9 + MOST + 1 + MOST + 2])
    records = pattern(len(near), seed=1)
    store.write(ids[near], records)
    assert asked == [0, near[-1]], "a distance of so many is bridged, and one more is not"
    assert torch.equal(read(store, ids[near]), records)
    assert raw(store, 3) == raw(store, 7) == bytes(RECORD_BYTES)
    assert store.bytes_written - before == (near[-2] + 1 + 1) * RECORD_BYTES, "zeros are counted"


def test_a_partial_write_is_carried_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, real = store.allocate(12), os.pwritev

    def little(fd: int, parts: list[memoryview], offset: int) -> int:
        return real(fd, [parts[0][:4096]] if len(parts[0]) > 4096 else [*parts[:1], *parts[1:2]], offset)

    monkeypatch.setattr(os, "pwritev", little)
    records = pattern(7, seed=4)
    store.write(ids[[0, 1, 2, 5, 8, 9, 11]], records)
    assert torch.equal(read(store, ids[[0, 1, 2, 5, 8, 9, 11]]), records)
    assert raw(store, 3) == raw(store, 10) == bytes(RECORD_BYTES)


def test_a_write_that_fails(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = store.allocate(12)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails(errno.EIO))
        with pytest.raises(StoreError, match=r"layer 3: writing records 2\.\.5 \(2\)"):
            store.write(ids[[2, 5]], pattern(2))
        patch.setattr(os, "pwritev", lambda fd, parts, offset: 0)
        with pytest.raises(StoreError, match="short write"):
            store.write(ids[[2, 5]], pattern(2))
    assert not store._blanks.table.any(), "nobody knows what lies there"
    store.write(ids[[2, 5]], records := pattern(2, seed=6))
    assert torch.equal(read(store, ids[[2, 5]]), records)


def test_only_what_may_be_of_someone_is_wiped_before_it_is_saved(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = store.allocate(10)
    store.write(ids[[0, 3, 6, 9]], pattern(4))
    store.write(ids[[4]], secret := pattern(1, seed=7))  # once zeros, then cropped
    store.free(ids[[4]])
    assert store.allocate(1).tolist() == [4]
    store.freeze()
    wiped, real = list[tuple[int, int]](), store._file.wipe

    def wipe(start: int, stop: int) -> None:
        wiped.append((start // RECORD_BYTES, stop // RECORD_BYTES))
        real(start, stop)

    monkeypatch.setattr(store._file, "wipe", wipe)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        store.export(folder, "saved")
    finally:
        os.close(folder)
    assert wiped == [(4, 5)]
    saved = (tmp_path / "saved").read_bytes()
    assert secret.numpy().tobytes() not in saved
    for place in (1, 2, 4, 5, 7, 8):
        assert saved[place * RECORD_BYTES :][:RECORD_BYTES] == bytes(RECORD_BYTES)
