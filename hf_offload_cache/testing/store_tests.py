"""The conformance suite of stores: what `Store` promises, as tests."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from ..errors import StoreError
from ..stores.base import Store, aligned_empty

# Random records, put into a store and read back; and what a process has open

RECORD_BYTES = 8192


def pattern(count: int, *, seed: int = 0, record_bytes: int = RECORD_BYTES) -> torch.Tensor:
    """Random records (count, record_bytes), aligned, the same for the same arguments."""
    records = aligned_empty(count, record_bytes)
    records.numpy()[:] = np.random.default_rng(seed).integers(0, 256, (count, record_bytes), dtype=np.uint8)
    return records


def fill(store: Store, count: int, *, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Allocate and write `count` random records: their ids and content."""
    ids, records = store.allocate(count), pattern(count, seed=seed, record_bytes=store.record_bytes)
    store.write(ids, records)
    return ids, records


def read(store: Store, ids: np.ndarray) -> torch.Tensor:
    """The records `ids`, read into memory that held other bytes before."""
    out = aligned_empty(len(ids), store.record_bytes).fill_(0xEE)
    store.read(ids, out)
    return out


def open_descriptors() -> int:
    """Descriptors that this process has open; -1 where the platform does not tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else -1


def file_maps(directory: Path) -> int:
    """Maps that this process has of files in `directory`; -1 where the platform does not tell."""
    maps = Path("/proc/self/maps")
    return sum(str(directory) in line for line in maps.read_text().splitlines()) if maps.exists() else -1


class StoreTests:
    """What every store must do. Subclass it as `class TestMyStore(StoreTests)` and implement `make_store`.

    For a store that can be frozen there is `FreezableStoreTests`, which holds these too.
    """

    @abstractmethod
    def make_store(self, directory: Path, record_bytes: int) -> Store:
        """A new, empty store called "layer 3" that keeps what it keeps in `directory`."""

    def test_records_come_back_in_any_order(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 20)
            order = np.random.default_rng(0).permutation(20)
            assert torch.equal(read(store, ids[order]), records[order])
            assert torch.equal(read(store, ids[::-1]), records.flip(0))

    def test_reads_that_were_started(self, tmp_path: Path) -> None:
        import pytest

        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 60)
            chosen = [ids[::2], ids[1:50:3], ids[20:40]]
            outs = [aligned_empty(len(some), RECORD_BYTES).fill_(0xEE) for some in chosen]
            transfers = [store.start(some, out) for some, out in zip(chosen, outs, strict=True)]
            if None in transfers:
                assert transfers == [None] * 3, "this store can only block"
                return
            counted = store.reads, store.bytes_read
            for index in (1, 2, 0):
                transfer = transfers[index]
                assert transfer is not None
                for _ in range(2):
                    transfer.finish()
                    assert transfer.done() and transfer.finished_at is not None
                assert torch.equal(outs[index], records[chosen[index]])
            moved = sum(len(some) for some in chosen)
            assert (store.reads - counted[0], store.bytes_read - counted[1]) == (30 + 17 + 1, moved * RECORD_BYTES)
            with pytest.raises(StoreError, match="layer"):
                lost = store.start(np.array([10**9]), outs[0][:1])
                assert lost is not None
                lost.finish()

    def test_one_id_may_be_asked_for_twice(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 3)
            assert torch.equal(read(store, ids[[1, 1, 0, 1]]), records[[1, 1, 0, 1]])

    def test_read_only_ids(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 3)
            ids.flags.writeable = False
            assert torch.equal(read(store, ids), records)

    def test_nothing_asked_for(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            for _ in range(2):
                none = store.allocate(0)
                assert none.dtype == np.int64 and len(none) == 0
                store.write(none, torch.empty(0, RECORD_BYTES, dtype=torch.uint8))
                store.advise(none)
                store.read(none, aligned_empty(0, RECORD_BYTES))
                store.free(none)
                assert (store.reads, store.bytes_read, store.bytes_written) == (0, 0, 0)
                store.free(store.allocate(1))

    def test_adjacent_records_are_one_request(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, _ = fill(store, 12)
            assert np.array_equal(np.diff(ids), np.ones(11)), "a new store should hand out adjacent records"
            assert store.bytes_written == 12 * RECORD_BYTES
            before = store.reads, store.bytes_read
            read(store, ids[[0, 1, 2, 5, 6, 9]])
            assert store.reads - before[0] == 3
            assert store.bytes_read - before[1] == 6 * RECORD_BYTES

    def test_unaligned_input(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            records = pattern(300, seed=5)  # more than a bounce buffer of 1 MiB
            raw = torch.empty(records.numel() + 64, dtype=torch.uint8)
            shift = (1 - raw.data_ptr()) % 64
            unaligned = raw[shift : shift + records.numel()].view_as(records).copy_(records)
            assert unaligned.data_ptr() % 64 == 1
            ids = store.allocate(300)
            store.write(ids, unaligned)
            assert torch.equal(read(store, ids), records)

    def test_growth_keeps_what_was_written(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            parts = [fill(store, count, seed=count) for count in (1, 70, 500, 900)]
            ids = np.concatenate([ids for ids, _ in parts])
            assert len(np.unique(ids)) == 1471
            assert torch.equal(read(store, ids), torch.cat([records for _, records in parts]))

    def test_freed_records_are_used_again(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 64)
            store.free(ids[10:30])
            again, new = fill(store, 20, seed=9)
            assert set(again.tolist()) == set(ids[10:30].tolist())
            assert torch.equal(read(store, again), new)
            kept = np.r_[ids[:10], ids[30:]]
            assert torch.equal(read(store, kept), torch.cat([records[:10], records[30:]]))

    def test_free_refuses_what_is_not_taken(self, tmp_path: Path) -> None:
        import pytest

        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 4)
            store.free(ids[:1])
            for wrong in (ids[:2], ids[[1, 1]], np.array([-1]), np.array([10**9])):
                with pytest.raises(StoreError, match="layer"):
                    store.free(wrong)
            assert not set(store.allocate(200).tolist()) & set(ids[1:].tolist())
            assert torch.equal(read(store, ids[1:]), records[1:])

    def test_records_that_do_not_exist(self, tmp_path: Path) -> None:
        import pytest

        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            row = aligned_empty(1, RECORD_BYTES)
            with pytest.raises(StoreError, match="layer"):
                store.read(np.array([0]), row)  # nothing was ever allocated
            fill(store, 2)
            for wrong in (-1, 10**9):
                with pytest.raises(StoreError, match=str(wrong)):
                    store.read(np.array([wrong]), row)
                with pytest.raises(StoreError, match=str(wrong)):
                    store.write(np.array([wrong]), row)
            with pytest.raises(ValueError, match="-1"):
                store.allocate(-1)

    def test_arguments_of_the_wrong_kind(self, tmp_path: Path) -> None:
        import pytest

        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 2)
            wide = aligned_empty(2, 2 * RECORD_BYTES)
            for call in (store.read, store.write):
                with pytest.raises(TypeError, match="int64"):
                    call(ids.astype(np.int32), records)
                with pytest.raises(TypeError, match="uint8"):
                    call(ids, records.view(torch.int8))
                with pytest.raises(ValueError, match="shape"):
                    call(ids[:1], records)
                with pytest.raises(ValueError, match="contiguous"):
                    call(ids, wide[:, ::2])
            with pytest.raises(ValueError, match="aligned"):
                store.read(ids, wide.view(-1)[1 : 1 + 2 * RECORD_BYTES].view(2, RECORD_BYTES))
            assert torch.equal(read(store, ids), records)

    def test_records_of_the_wrong_size(self, tmp_path: Path) -> None:
        import pytest

        for wrong in (0, -4096, 5000):
            with pytest.raises(ValueError, match=str(wrong)):
                self.make_store(tmp_path, wrong)

    def test_threads_read_and_write_other_records_at_once(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            old, old_records = fill(store, 64)
            new, new_records = store.allocate(64), pattern(64, seed=3)
            results: list[bool] = []
            errors: list[BaseException] = []
            start = threading.Barrier(8)

            def work(index: int) -> None:
                mine = slice(index, None, 4)
                try:
                    start.wait()
                    for _ in range(5):
                        if index < 4:
                            results.append(torch.equal(read(store, old[mine]), old_records[mine]))
                        else:
                            share = slice(index - 4, None, 4)
                            store.write(new[share], new_records[share].contiguous())
                except BaseException as error:
                    errors.append(error)

            before = store.bytes_read, store.reads, store.bytes_written
            threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert results == [True] * 20
            assert store.bytes_read - before[0] == 5 * 64 * RECORD_BYTES
            assert store.reads - before[1] == 5 * 64
            assert store.bytes_written - before[2] >= 5 * 64 * RECORD_BYTES, "a store may write what is between, too"
            assert torch.equal(read(store, new), new_records)

    def test_growth_while_another_thread_reads(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 32)
            stop = threading.Event()
            results: list[bool] = []

            def work() -> None:
                while not stop.is_set():
                    store.advise(ids)
                    results.append(torch.equal(read(store, ids), records))

            thread = threading.Thread(target=work)
            thread.start()
            try:
                for _ in range(10):
                    store.allocate(400)
            finally:
                stop.set()
                thread.join()
            assert all(results)
            assert torch.equal(read(store, ids), records)

    def test_advice_changes_no_bytes(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 40)
            store.advise(ids[5:35:2])
            assert torch.equal(read(store, ids), records)
            store.advise(ids)
            store.free(ids)
            ids, records = fill(store, 40, seed=8)
            assert torch.equal(read(store, ids), records)

    def test_close_gives_everything_back(self, tmp_path: Path) -> None:
        descriptors, maps = open_descriptors(), file_maps(tmp_path)
        store = self.make_store(tmp_path, RECORD_BYTES)
        fill(store, 100)
        read(store, fill(store, 300)[0][:1])
        assert store.disk_bytes + store.memory_bytes > 0
        assert list(tmp_path.iterdir()) == [], "a scratch file has no name"
        store.close()
        assert (store.disk_bytes, store.memory_bytes) == (0, 0)
        assert (open_descriptors(), file_maps(tmp_path)) == (descriptors, maps)
        store.close()
        assert open_descriptors() == descriptors

    def test_forgetting_to_close_leaks_nothing(self, tmp_path: Path) -> None:
        descriptors, maps = open_descriptors(), file_maps(tmp_path)
        store = self.make_store(tmp_path, RECORD_BYTES)
        fill(store, 100)
        del store
        assert (open_descriptors(), file_maps(tmp_path)) == (descriptors, maps)
