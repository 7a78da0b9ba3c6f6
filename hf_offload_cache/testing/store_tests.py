"""The conformance suites of stores: the guarantees of `Store` and `FreezableStore`, as tests."""

from __future__ import annotations

import os
import re
import socket
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from ..errors import CorruptRecordError, StoreError
from ..stores.base import FreezableStore, Store, aligned_empty
from ..stores.encryption import open_guard
from ..stores.engines import open_named
from ..stores.guard import RecordGuard

RECORD_BYTES = 8192


def pattern(count: int, *, seed: int = 0, record_bytes: int = RECORD_BYTES) -> torch.Tensor:
    """Random records (count, record_bytes), aligned, equal for equal arguments."""
    records = aligned_empty(count, record_bytes)
    records.numpy()[:] = np.random.default_rng(seed).integers(0, 256, (count, record_bytes), dtype=np.uint8)
    return records


def fill(store: Store, count: int, *, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Allocate and write `count` random records. Returns their ids and content."""
    ids, records = store.allocate(count), pattern(count, seed=seed, record_bytes=store.record_bytes)
    store.write(ids, records)
    return ids, records


def read(store: Store, ids: np.ndarray) -> torch.Tensor:
    """The records `ids`, read into memory that held other bytes before."""
    out = aligned_empty(len(ids), store.record_bytes).fill_(0xEE)
    store.read(ids, out)
    return out


def open_descriptors() -> int:
    """Number of open descriptors of this process; -1 if the platform does not tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else -1


def file_maps(directory: Path) -> int:
    """Number of this process's maps of files in `directory`; -1 if the platform does not tell."""
    maps = Path("/proc/self/maps")
    return sum(str(directory) in line for line in maps.read_text().splitlines()) if maps.exists() else -1


@contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[None]:
    """As `pytest.raises`, without pytest."""
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), f"{error} does not match {match!r}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


class StoreTests:
    """Tests for every store. Subclass it as `class TestMyStore(StoreTests)` and implement `make_store`.

    For a store that can be frozen, subclass `FreezableStoreTests`, which contains these tests too.
    """

    @abstractmethod
    def make_store(self, directory: Path, record_bytes: int) -> Store:
        """A new, empty store called "layer 3" that keeps its files in `directory`."""

    def test_records_come_back_in_any_order(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 20)
            order = np.random.default_rng(0).permutation(20)
            assert torch.equal(read(store, ids[order]), records[order])
            assert torch.equal(read(store, ids[::-1]), records.flip(0))
            assert torch.equal(read(store, ids[[1, 1, 0, 1]]), records[[1, 1, 0, 1]])
            ids.flags.writeable = False
            assert torch.equal(read(store, ids), records)

    def test_reads_that_were_started(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 60)
            chosen = [ids[::2], ids[1:50:3], ids[20:40]]
            outs = [aligned_empty(len(some), RECORD_BYTES).fill_(0xEE) for some in chosen]
            transfers = [store.start(some, out) for some, out in zip(chosen, outs, strict=True)]
            if None in transfers:
                assert transfers == [None] * 3, "a store that can only block starts no read"
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
            with raises(StoreError, match="layer"):
                lost = store.start(np.array([10**9]), outs[0][:1])
                assert lost is not None
                lost.finish()

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
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 4)
            store.free(ids[:1])
            for wrong in (ids[:2], ids[[1, 1]], np.array([-1]), np.array([10**9])):
                with raises(StoreError, match="layer"):
                    store.free(wrong)
            assert not set(store.allocate(200).tolist()) & set(ids[1:].tolist())
            assert torch.equal(read(store, ids[1:]), records[1:])

    def test_records_that_do_not_exist(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            row = aligned_empty(1, RECORD_BYTES)
            with raises(StoreError, match="layer"):
                store.read(np.array([0]), row)  # nothing was ever allocated
            fill(store, 2)
            for wrong in (-1, 10**9):
                with raises(StoreError, match=str(wrong)):
                    store.read(np.array([wrong]), row)
                with raises(StoreError, match=str(wrong)):
                    store.write(np.array([wrong]), row)
            with raises(ValueError, match="-1"):
                store.allocate(-1)

    def test_arguments_of_the_wrong_kind(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 2)
            wide = aligned_empty(2, 2 * RECORD_BYTES)
            for call in (store.read, store.write):
                with raises(TypeError, match="int64"):
                    call(ids.astype(np.int32), records)
                with raises(TypeError, match="uint8"):
                    call(ids, records.view(torch.int8))
                with raises(ValueError, match="shape"):
                    call(ids[:1], records)
                with raises(ValueError, match="contiguous"):
                    call(ids, wide[:, ::2])
            with raises(ValueError, match="aligned"):
                store.read(ids, wide.view(-1)[1 : 1 + 2 * RECORD_BYTES].view(2, RECORD_BYTES))
            assert torch.equal(read(store, ids), records)

    def test_records_of_the_wrong_size(self, tmp_path: Path) -> None:
        for wrong in (0, -4096, 5000):
            with raises(ValueError, match=str(wrong)):
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
            assert store.bytes_written - before[2] >= 5 * 64 * RECORD_BYTES, "a store may write those between, too"
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


class FreezableStoreTests(StoreTests):
    """Tests for every store that can be frozen, in addition to those for every store.

    Attributes:
        key: the encryption key of the store's guard, if it encrypts.
        grows_when_frozen: records allocated after `freeze` go elsewhere; otherwise that raises `StoreError`.
    """

    key: bytes | None = None
    grows_when_frozen = False

    @abstractmethod
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        """A new, empty store called "layer 3" that keeps its files in `directory`."""

    def test_a_frozen_store_does_not_change(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 70)
            store.free(ids[60:])
            for call in (lambda: store.share(), lambda: store.export(-1, "name")):
                with raises(StoreError, match=r"layer.*freeze"):
                    call()
            before = store.disk_bytes, store.memory_bytes
            for _ in range(2):
                store.freeze()
            assert store.capacity == 60, "the unused end is given back"
            assert store.disk_bytes <= before[0] and store.memory_bytes <= before[1]
            with raises(StoreError, match=r"layer.*frozen"):
                store.write(ids[:1], records[1:2])
            if self.grows_when_frozen:
                more, new = fill(store, 5, seed=7)
                assert np.array_equal(more, np.arange(60, 65))
                assert torch.equal(read(store, more), new)
            else:
                with raises(StoreError, match=r"layer.*frozen"):
                    store.allocate(1)
            store.free(ids[:30])
            assert torch.equal(read(store, ids[:60]), records[:60])

    def test_a_share_reads_the_same_and_outlives_the_store(self, tmp_path: Path) -> None:
        descriptors = open_descriptors()
        store = self.make_store(tmp_path, RECORD_BYTES)
        ids, records = fill(store, 40)
        store.freeze()
        shares = [store.share() for _ in range(3)]
        taken = store.disk_bytes + store.memory_bytes
        counted = store.reads
        for share in shares:
            assert torch.equal(read(share, ids[::-1]), records.flip(0))
            assert (share.capacity, share.name, share.disk_bytes + share.memory_bytes) == (40, store.name, taken)
        assert store.reads == counted and shares[0].reads == 40
        store.close()
        store.close()
        shares[1].close()
        for closed in (store, shares[1]):
            with raises(StoreError):
                read(closed, ids[:1])
        for share in (shares[0], shares[2]):
            assert torch.equal(read(share, ids), records)
            share.close()
        assert open_descriptors() == descriptors

    def test_what_is_saved_can_be_opened(self, tmp_path: Path) -> None:
        with self.saved(tmp_path, 50) as (folder, guard, ids, records):
            status = os.stat("saved", dir_fd=folder)
            assert status.st_mode & 0o777 == 0o600
            assert status.st_size == 50 * RECORD_BYTES
            assert len(guard.tags) == 50
            with closing(self.reopen(folder, guard, 50)) as store:
                assert torch.equal(read(store, ids[::-1]), records.flip(0))
                store.freeze()  # it is already
                os.mkdir(tmp_path / "another")
                other = os.open(tmp_path / "another", os.O_RDONLY)
                try:
                    store.export(other, "again")
                    with closing(self.reopen(other, guard, 50, "again")) as again:
                        assert torch.equal(read(again, ids), records)
                    assert os.stat("again", dir_fd=other).st_ino == status.st_ino, "one file with two names"
                finally:
                    os.close(other)

    def test_what_was_given_back_is_not_saved(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store, self.folder(tmp_path) as folder:
            ids, records = fill(store, 20)
            secret = records[7].numpy().tobytes()
            store.write(ids[7:8], records[7:8])
            store.free(ids[5:9])
            store.freeze()
            guard = store.export(folder, "saved")
            content = (tmp_path / "saved").read_bytes()
            assert secret not in content and content[7 * RECORD_BYTES : 8 * RECORD_BYTES] == bytes(RECORD_BYTES)
            assert np.flatnonzero(~guard.written).tolist() == [5, 6, 7, 8]
            kept = np.r_[ids[:5], ids[9:]]
            with closing(self.reopen(folder, guard, 20)) as again:
                assert torch.equal(read(again, kept), records[torch.from_numpy(kept)])

    def test_only_what_is_live_is_saved(self, tmp_path: Path) -> None:
        """Other records are not in the file and take no space; the store and its shares still have them."""
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store, self.folder(tmp_path) as folder:
            ids, records = fill(store, 200)
            store.free(ids[:3])
            store.freeze()
            assert np.flatnonzero(~store.written).tolist() == [0, 1, 2]
            live = np.ones(200, dtype=bool)
            live[:3] = live[100:150] = live[190:] = False
            guard = store.export(folder, "saved", live)
            assert np.array_equal(guard.written, live) and guard.tags[~live].max() == 0
            content = (tmp_path / "saved").read_bytes()
            status = os.stat("saved", dir_fd=folder)
            assert len(content) == 200 * RECORD_BYTES and status.st_mode & 0o777 == 0o600
            assert status.st_blocks * 512 <= (int(live.sum()) + 2) * RECORD_BYTES, "holes take no space"
            rows = np.frombuffer(content, dtype=np.uint8).reshape(200, RECORD_BYTES)
            assert rows[~live].max() == 0 and not any(row.numpy().tobytes() in content for row in records[100:103])
            kept = np.flatnonzero(live)
            with closing(self.reopen(folder, self.kept(guard), 200)) as again:
                assert torch.equal(read(again, kept), records[torch.from_numpy(kept)])
                assert np.array_equal(again.written, live)
            assert torch.equal(read(store, ids[3:]), records[3:])
            live[:] = True
            assert store.export(folder, "all", live).written.sum() == 197

    def test_records_that_are_not_live_are_not_missed_where_they_hold_nothing(self, tmp_path: Path) -> None:
        """If no data is left out, the file itself gets a name, as without `live`."""
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store, self.folder(tmp_path) as folder:
            ids, _ = fill(store, 20)
            store.free(ids[5:9])
            store.freeze()
            live = np.ones(20, dtype=bool)
            live[5:9] = False
            guards = [store.export(folder, "plain"), store.export(folder, "live", live)]
            assert [np.array_equal(guard.written, live) for guard in guards] == [True, True]
            if os.stat("plain", dir_fd=folder).st_nlink > 1:
                assert os.path.samestat(os.stat("plain", dir_fd=folder), os.stat("live", dir_fd=folder))

    def test_what_was_freed_and_taken_again_holds_nothing(self, tmp_path: Path) -> None:
        """Until it is written again, which may fail, the earlier data is neither read nor saved."""
        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store, self.folder(tmp_path) as folder:
            ids, old = fill(store, 6)
            store.free(ids[1:4])
            again = store.allocate(3)
            assert again.tolist() == [1, 2, 3]
            store.write(again[:1], pattern(1, seed=5))
            store.freeze()
            assert store.written.tolist() == [True, True, False, False, True, True]
            guard = store.export(folder, "saved", np.ones(6, dtype=bool))
            assert old[2].numpy().tobytes() not in (tmp_path / "saved").read_bytes()
            with closing(self.reopen(folder, self.kept(guard), 6)) as opened:
                assert torch.equal(read(opened, again[:1]), pattern(1, seed=5))
                with raises(CorruptRecordError, match="record 2"):
                    read(opened, again[1:2])

    def test_a_name_that_is_taken(self, tmp_path: Path) -> None:
        with self.folder(tmp_path) as folder, closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 3)
            store.freeze()
            (tmp_path / "saved").write_text("another's")
            with raises(StoreError, match=r"layer.*saved"):
                store.export(folder, "saved")
            assert (tmp_path / "saved").read_text() == "another's"
            for wrong in ("", "..", "a/b"):
                with raises(ValueError, match="plain name"):
                    store.export(folder, wrong)
            assert torch.equal(read(store, ids), records)

    def test_files_that_are_not_what_was_saved(self, tmp_path: Path) -> None:
        with self.saved(tmp_path, 5) as (folder, guard, ids, _):
            before = open_descriptors()
            os.symlink("saved", tmp_path / "link")
            os.mkdir(tmp_path / "folder")
            os.mkfifo(tmp_path / "pipe")
            with closing(socket.socket(socket.AF_UNIX)) as listening:
                listening.bind(f"/proc/self/fd/{folder}/socket")  # a short path: a socket's may have 107 bytes
            for name, reason in (
                ("missing", "No such file"), ("link", "symbolic link"), ("folder", "not a regular file"),
                ("pipe", "not a regular file"), ("socket", "not a regular file"),
            ):  # fmt: skip
                with raises(CorruptRecordError, match=f"layer.*{name}.*{reason}"):
                    self.reopen(folder, guard, 5, name)
            for size in (4 * RECORD_BYTES, 5 * RECORD_BYTES - 1, 6 * RECORD_BYTES):
                os.truncate(tmp_path / "saved", size)
                with raises(CorruptRecordError, match=f"layer.*saved.*{size:,} bytes.*{5 * RECORD_BYTES:,}"):
                    self.reopen(folder, guard, 5)
            assert open_descriptors() == before
            with raises(ValueError, match="plain name"):
                self.reopen(folder, guard, 5, "../saved")
            with raises(ValueError, match="tag for each of 4"):
                self.reopen(folder, guard, 4)
            os.truncate(tmp_path / "saved", 5 * RECORD_BYTES)
            with closing(self.reopen(folder, guard, 5)) as store:
                os.truncate(tmp_path / "saved", 4 * RECORD_BYTES + 4096)
                with raises(CorruptRecordError, match=r"layer.*record 4\b.*short read"):
                    read(store, ids[4:])

    def test_every_flipped_byte_is_noticed(self, tmp_path: Path) -> None:
        with self.saved(tmp_path, 3) as (_, guard, ids, records):
            stored = torch.frombuffer(bytearray((tmp_path / "saved").read_bytes()), dtype=torch.uint8)
            row = stored.view(3, RECORD_BYTES)[1:2]
            for position in range(RECORD_BYTES):
                flipped = row.clone()
                flipped[0, position] ^= 1 << position % 8
                assert guard.check(ids[1:2], flipped).tolist() == [0]
            assert guard.check(ids[1:2], row).tolist() == [] and torch.equal(row, records[1:2])

    def test_records_that_changed_are_named_and_not_handed_out(self, tmp_path: Path) -> None:
        with self.saved(tmp_path, 30) as (folder, guard, ids, records):
            content = bytearray((tmp_path / "saved").read_bytes())
            content[17 * RECORD_BYTES + 4000] ^= 8
            one, other = slice(20 * RECORD_BYTES, 21 * RECORD_BYTES), slice(25 * RECORD_BYTES, 26 * RECORD_BYTES)
            content[one], content[other] = content[other], content[one]
            content[28 * RECORD_BYTES : 29 * RECORD_BYTES] = bytes(RECORD_BYTES)
            (tmp_path / "saved").write_bytes(content)
            with closing(self.reopen(folder, guard, 30)) as store:
                for wrong in (17, 20, 25, 28):
                    out = aligned_empty(3, RECORD_BYTES)
                    some = np.array([0, wrong, 1])
                    with raises(CorruptRecordError, match=rf"layer.*record {wrong} is not what was written"):
                        store.read(some, out)
                    assert out[1].unique().tolist() == [0xFF], "no number, in every type of float"
                with raises(CorruptRecordError, match=r"records 17\.\.28 \(4\) are not"):
                    read(store, ids)
                good = np.setdiff1d(ids, [17, 20, 25, 28])
                assert torch.equal(read(store, good), records[torch.from_numpy(good)])

    def test_what_was_damaged_is_not_saved_again(self, tmp_path: Path) -> None:
        with self.saved(tmp_path, 30) as (folder, guard, ids, records), self.reopened(folder, guard, 30) as store:
            store.export(folder, "whole")
            with open(tmp_path / "saved", "r+b") as file:
                file.seek(17 * RECORD_BYTES + 5)
                file.write(bytes(20))
            before = sorted(os.listdir(folder))
            without = np.arange(30) != 3
            for live in (None, without):
                with raises(CorruptRecordError, match=r"layer.*record 17 is not what was written"):
                    store.export(folder, "again", live)
                assert sorted(os.listdir(folder)) == before
            store.export(folder, "again", without & (ids != 17))
            good = np.setdiff1d(ids, [3, 17])
            assert torch.equal(read(store, good), records[torch.from_numpy(good)])

    @contextmanager
    def folder(self, tmp_path: Path) -> Iterator[int]:
        descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def saved(self, tmp_path: Path, count: int) -> Iterator[tuple[int, RecordGuard, np.ndarray, torch.Tensor]]:
        """`count` records in a file "saved", whatever the umask. Yields the open folder, guard, ids and content."""
        umask = os.umask(0o777)
        try:
            with self.folder(tmp_path) as folder:
                with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
                    ids, records = fill(store, count)
                    store.freeze()
                    os.umask(0)
                    guard = store.export(folder, "saved")
                os.umask(umask)
                yield folder, self.kept(guard), ids, records
        finally:
            os.umask(umask)

    def kept(self, guard: RecordGuard) -> RecordGuard:
        """The guard after saving and opening it."""
        return open_guard(guard.describe(), guard.tags, self.key, verify=True)

    def reopened(self, folder: int, guard: RecordGuard, count: int) -> closing[FreezableStore]:
        """The result of `reopen`, closed at the end of a `with`."""
        return closing(self.reopen(folder, guard, count))

    def reopen(self, folder: int, guard: RecordGuard, count: int, name: str = "saved") -> FreezableStore:
        return open_named("mapped", folder, name, count, RECORD_BYTES, "layer 3", guard=guard)
