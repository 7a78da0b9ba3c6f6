"""The conformance suite of stores that can be frozen: shared, saved, opened again, and damaged."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from ..errors import CorruptRecordError, StoreError
from ..stores.base import FreezableStore, aligned_empty
from ..stores.encryption import open_guard
from ..stores.engines import open_named
from ..stores.guard import RecordGuard
from .store_tests import RECORD_BYTES, StoreTests, fill, open_descriptors, pattern, read


class FreezableStoreTests(StoreTests):
    """What every store that can be frozen must do, beside what every store must.

    Attributes:
        key: what the store's guard encrypts with, if it does.
        grows_when_frozen: what is allocated after `freeze` goes elsewhere, instead of being refused.
    """

    key: bytes | None = None
    grows_when_frozen = False

    @abstractmethod
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        """A new, empty store called "layer 3" that keeps what it keeps in `directory`."""

    def test_a_frozen_store_does_not_change(self, tmp_path: Path) -> None:
        import pytest

        with closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 70)
            store.free(ids[60:])
            for call in (lambda: store.share(), lambda: store.export(-1, "name")):
                with pytest.raises(StoreError, match=r"layer.*freeze"):
                    call()
            before = store.disk_bytes, store.memory_bytes
            for _ in range(2):
                store.freeze()
            assert store.capacity == 60, "the unused end is given back"
            assert store.disk_bytes <= before[0] and store.memory_bytes <= before[1]
            with pytest.raises(StoreError, match=r"layer.*frozen"):
                store.write(ids[:1], records[1:2])
            if self.grows_when_frozen:
                more, new = fill(store, 5, seed=7)
                assert np.array_equal(more, np.arange(60, 65))
                assert torch.equal(read(store, more), new)
            else:
                with pytest.raises(StoreError, match=r"layer.*frozen"):
                    store.allocate(1)
            store.free(ids[:30])
            assert torch.equal(read(store, ids[:60]), records[:60])

    def test_a_share_reads_the_same_and_outlives_the_store(self, tmp_path: Path) -> None:
        import pytest

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
            with pytest.raises(StoreError):
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
        """Others are nowhere in the file, and take no space; the store itself, and who shares it, has them still."""
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
        """Where nothing is left out, the file itself gets a name, as without `live`."""
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
        """Until it is written again, which may fail: what was there before is not taken for it, nor saved."""
        import pytest

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
                with pytest.raises(CorruptRecordError, match="record 2"):
                    read(opened, again[1:2])

    def test_a_name_that_is_taken(self, tmp_path: Path) -> None:
        import pytest

        with self.folder(tmp_path) as folder, closing(self.make_store(tmp_path, RECORD_BYTES)) as store:
            ids, records = fill(store, 3)
            store.freeze()
            (tmp_path / "saved").write_text("another's")
            with pytest.raises(StoreError, match=r"layer.*saved"):
                store.export(folder, "saved")
            assert (tmp_path / "saved").read_text() == "another's"
            for wrong in ("", "..", "a/b"):
                with pytest.raises(ValueError, match="plain name"):
                    store.export(folder, wrong)
            assert torch.equal(read(store, ids), records)

    def test_files_that_are_not_what_was_saved(self, tmp_path: Path) -> None:
        import pytest

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
                with pytest.raises(CorruptRecordError, match=f"layer.*{name}.*{reason}"):
                    self.reopen(folder, guard, 5, name)
            for size in (4 * RECORD_BYTES, 5 * RECORD_BYTES - 1, 6 * RECORD_BYTES):
                os.truncate(tmp_path / "saved", size)
                with pytest.raises(CorruptRecordError, match=f"layer.*saved.*{size:,} bytes.*{5 * RECORD_BYTES:,}"):
                    self.reopen(folder, guard, 5)
            assert open_descriptors() == before
            with pytest.raises(ValueError, match="plain name"):
                self.reopen(folder, guard, 5, "../saved")
            with pytest.raises(ValueError, match="tag for each of 4"):
                self.reopen(folder, guard, 4)
            os.truncate(tmp_path / "saved", 5 * RECORD_BYTES)
            with closing(self.reopen(folder, guard, 5)) as store:
                os.truncate(tmp_path / "saved", 4 * RECORD_BYTES + 4096)
                with pytest.raises(CorruptRecordError, match=r"layer.*record 4\b.*short read"):
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
        import pytest

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
                    with pytest.raises(CorruptRecordError, match=rf"layer.*record {wrong} is not what was written"):
                        store.read(some, out)
                    assert out[1].unique().tolist() == [0xFF], "no number, in every type of float"
                with pytest.raises(CorruptRecordError, match=r"records 17\.\.28 \(4\) are not"):
                    read(store, ids)
                good = np.setdiff1d(ids, [17, 20, 25, 28])
                assert torch.equal(read(store, good), records[torch.from_numpy(good)])

    def test_what_was_damaged_is_not_saved_again(self, tmp_path: Path) -> None:
        import pytest

        with self.saved(tmp_path, 30) as (folder, guard, ids, records), self.reopened(folder, guard, 30) as store:
            store.export(folder, "whole")
            with open(tmp_path / "saved", "r+b") as file:
                file.seek(17 * RECORD_BYTES + 5)
                file.write(bytes(20))
            before = sorted(os.listdir(folder))
            without = np.arange(30) != 3
            for live in (None, without):
                with pytest.raises(CorruptRecordError, match=r"layer.*record 17 is not what was written"):
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
        """`count` records in a file "saved", whatever the umask: the open folder, guard, ids and content."""
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
        """What becomes of a guard that is saved and opened again."""
        return open_guard(guard.describe(), guard.tags, self.key, verify=True)

    def reopened(self, folder: int, guard: RecordGuard, count: int) -> closing[FreezableStore]:
        """The result of `reopen`, closed at the end of a `with`."""
        return closing(self.reopen(folder, guard, count))

    def reopen(self, folder: int, guard: RecordGuard, count: int, name: str = "saved") -> FreezableStore:
        return open_named("mapped", folder, name, count, RECORD_BYTES, "layer 3", guard=guard)
