"""Frozen stores that get a name, by a link or a copy, and are opened again by every engine; shared descriptors."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import KEY, buffered, content_of, fails, needs, with_free_space

from hf_offload_cache.errors import StoreError, StoreFullError
from hf_offload_cache.stores import (
    BOUNCE_BYTES,
    DirectStore,
    Encryption,
    FreezableStore,
    MappedStore,
    MemoryStore,
    RecordFile,
    RecordGuard,
    Ring,
    ScratchFile,
    Store,
    UringStore,
    aligned_empty,
    choose_engine,
    copy_file,
    open_guard,
    open_named,
    open_store,
    probe_uring,
)
from hf_offload_cache.testing import RECORD_BYTES, fill, open_descriptors, pattern, read


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    os.mkdir(tmp_path / "contexts")
    descriptor = os.open(tmp_path / "contexts", os.O_RDONLY)
    before = open_descriptors()
    yield descriptor
    assert open_descriptors() == before
    os.close(descriptor)


def frozen(directory: Path, count: int = 6, guard: RecordGuard | None = None) -> tuple[FreezableStore, torch.Tensor]:
    store = open_store(choose_engine("auto", directory)[0], directory, RECORD_BYTES, "layer 3", guard=guard)
    _, records = fill(store, count)
    store.freeze()
    return store, records


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("uring", UringStore), ("direct", DirectStore), ("mapped", MappedStore), ("memory", MappedStore)],
)
def test_every_engine_reads_a_saved_store(tmp_path: Path, folder: int, engine: str, kind: type[FreezableStore]) -> None:
    needs(engine, tmp_path)
    store, records = frozen(tmp_path, 200)
    with closing(store):
        guard = store.export(folder, "saved")
    opened = open_named(engine, folder, "saved", 200, RECORD_BYTES, "layer 9", guard=guard)
    with closing(opened):
        assert (type(opened), opened.name, opened.capacity) == (kind, "layer 9", 200)
        order = np.random.default_rng(0).permutation(200)
        assert torch.equal(read(opened, order), records[torch.from_numpy(order)])
        assert opened.disk_bytes == 200 * RECORD_BYTES
        with pytest.raises(StoreError, match=r"layer 9.*frozen"):
            opened.allocate(1)
        with closing(opened.share()) as share:
            assert type(share) is kind
            assert torch.equal(read(share, order), records[torch.from_numpy(order)])


def test_a_folder_without_o_direct(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for cannot be: the next one that can reads instead."""
    store, records = frozen(tmp_path)
    with closing(store):
        guard = store.export(folder, "saved")
    buffered(monkeypatch)
    expected: list[tuple[str, bool, type[FreezableStore]]] = [("direct", False, MappedStore)]
    if probe_uring(tmp_path)[0]:
        expected += [("direct", True, UringStore), ("memory", True, UringStore), ("uring", False, UringStore)]
    for engine, with_ring, kind in expected:
        ring = Ring() if with_ring else None
        with closing(open_named(engine, folder, "saved", 6, RECORD_BYTES, "layer 3", ring, guard)) as opened:
            assert type(opened) is kind
            assert torch.equal(read(opened, np.arange(6)), records)
        if ring is not None:
            ring.close()
    with closing(open_named("mapped", folder, "saved", 6, RECORD_BYTES, "layer 3")) as opened:  # without tags: trusted
        assert torch.equal(read(opened, np.arange(6)), records)


def test_a_store_without_records(tmp_path: Path, folder: int) -> None:
    store, _ = frozen(tmp_path, 0)
    with closing(store):
        guard = store.export(folder, "saved")
    for engine in ("mapped", choose_engine("auto", tmp_path)[0]):
        with closing(open_named(engine, folder, "saved", 0, RECORD_BYTES, "layer 3", guard=guard)) as opened:
            assert opened.capacity == 0
            with pytest.raises(StoreError, match="outside the 0 records"):
                read(opened, np.array([0]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("auto", 6, 8192), "choose_engine"), (("mapped", -1, 8192), "-1 and"), (("mapped", 6, 5000), "4096.*5000")],
)
def test_arguments_that_cannot_be(folder: int, arguments: tuple[str, int, int], words: str) -> None:
    engine, count, record_bytes = arguments
    with pytest.raises(ValueError, match=words):
        open_named(engine, folder, "saved", count, record_bytes, "layer 3")


def test_linking_takes_no_space(tmp_path: Path, folder: int) -> None:
    """On one file system the scratch file itself gets the name: no byte is copied."""
    store, _ = frozen(tmp_path, 50)
    if os.fstat(store._file.fd).st_nlink or not hasattr(os, "O_TMPFILE"):  # type: ignore[attr-defined]
        pytest.skip("no unnamed files here")
    with closing(store):
        store.export(folder, "one")
        with closing(store.share()) as share:
            share.export(folder, "two")
        status = os.stat("one", dir_fd=folder)
        assert status.st_ino == os.stat("two", dir_fd=folder).st_ino == os.fstat(store._file.fd).st_ino  # type: ignore[attr-defined]
        assert status.st_nlink == 2


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS]
)
@pytest.mark.parametrize("without_direct", [False, True])
def test_where_linking_is_refused_it_is_copied(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, number: int, without_direct: bool
) -> None:
    if without_direct:
        buffered(monkeypatch)
    count = 2 * BOUNCE_BYTES // RECORD_BYTES + 3
    store, records = frozen(tmp_path, count, Encryption(KEY))
    with closing(store):
        monkeypatch.setattr(os, "link", fails(number))
        umask = os.umask(0)
        try:
            guard = store.export(folder, "saved")
        finally:
            os.umask(umask)
        status = os.stat("saved", dir_fd=folder)
        assert status.st_mode & 0o777 == 0o600 and status.st_nlink == 1
        assert status.st_ino != os.fstat(store._file.fd).st_ino  # type: ignore[attr-defined]
        sealed = content_of(store).read_bytes()
        assert (tmp_path / "contexts" / "saved").read_bytes() == sealed, "ciphertext is copied as it is"
    opened = open_named(
        "mapped", folder, "saved", count, RECORD_BYTES, "layer 3",
        guard=open_guard(guard.describe(), guard.tags, KEY, True),
    )  # fmt: skip
    with closing(opened):
        assert torch.equal(read(opened, np.arange(count)), records)


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST, errno.EDQUOT])
def test_other_refusals_are_errors(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, records = frozen(tmp_path)
    with closing(store):
        monkeypatch.setattr(os, "link", fails(number))
        with pytest.raises(StoreError, match=r"layer 3: saving as 'saved'") as caught:
            store.export(folder, "saved")
        assert caught.value.errno == number and os.listdir(folder) == []
        assert isinstance(caught.value, StoreFullError) == (number == errno.EDQUOT)
        assert torch.equal(read(store, np.arange(6)), records)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_no_room_for_a_copy(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The numbers, before anything is made."""
    store: Store
    if kind == "file":
        store, records = frozen(tmp_path)
        monkeypatch.setattr(os, "link", fails(errno.EXDEV))
    else:
        store = MemoryStore(RECORD_BYTES, "layer 3")
        records = fill(store, 6)[1]
        store.freeze()
    with closing(store):
        with monkeypatch.context() as patch:
            with_free_space(patch, 6 * RECORD_BYTES - 1)
            with pytest.raises(StoreFullError, match=rf"layer 3.*{6 * RECORD_BYTES:,} .*{6 * RECORD_BYTES - 1:,} free"):
                store.export(folder, "saved")
            assert os.listdir(folder) == []
            store.export(folder, "less", np.arange(6) != 2)  # holes need no room
            os.unlink("less", dir_fd=folder)
        store.export(folder, "saved")
        assert os.listdir(folder) == ["saved"]
        assert torch.equal(read(store, np.arange(6)), records)


@pytest.mark.parametrize("call", ["open", "fchmod", "pwrite", "ftruncate", "fsync", "preadv"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_copy_that_fails_leaves_no_name(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, call: str, after: int, number: int
) -> None:
    """At whichever call: an error, nothing of that name, and the records are as they were."""
    store, records = frozen(tmp_path, 2 * BOUNCE_BYTES // RECORD_BYTES)
    with closing(store):
        monkeypatch.setattr(os, "link", fails(errno.EXDEV))
        with monkeypatch.context() as patch:
            buffered(patch)
            failing = fails(number, after=after, real=getattr(os, call))
            patch.setattr(os, call, failing)
            try:
                store.export(folder, "saved")
            except StoreError as error:
                assert error.errno == number and "layer 3" in str(error)
                assert isinstance(error, StoreFullError) == (number == errno.ENOSPC)
                assert os.listdir(folder) == []
            else:
                assert after > 0, "the call is made at least once"
                os.unlink("saved", dir_fd=folder)
        if call != "fsync":  # after that error nobody knows what the disk has
            assert torch.equal(read(store, np.arange(len(records))), records)


def test_a_sync_that_failed_is_not_forgotten(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a lost page once: a second try must not find all well."""
    store, _ = frozen(tmp_path)
    with closing(store):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails(errno.EIO))
            with pytest.raises(StoreError, match="layer 3"):
                store.export(folder, "saved")
        assert os.listdir(folder) == []
        with pytest.raises(StoreError, match="earlier writes may be lost"):
            store.export(folder, "saved")


@pytest.mark.parametrize("copied", [False, True])
def test_content_is_synced_before_it_has_a_name(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    order: list[Any] = []
    sync, link = os.fsync, fails(errno.EXDEV) if copied else os.link

    def fsync(fd: int) -> None:
        sync(fd)
        order.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda *args, **more: (order.append("link"), link(*args, **more))[1])
    store, _ = frozen(tmp_path)
    with closing(store):
        store.export(folder, "saved")
    synced = os.stat("saved", dir_fd=folder).st_ino, 6 * RECORD_BYTES
    assert order[-1] == synced if copied else order == [synced, "link"]


def test_a_file_that_had_a_name_once_is_copied(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_TMPFILE: what was unlinked cannot be linked again."""
    with monkeypatch.context() as patch:
        patch.delattr(os, "O_TMPFILE", raising=False)
        store, records = frozen(tmp_path)
    with closing(store):
        guard = store.export(folder, "saved")
        assert os.stat("saved", dir_fd=folder).st_ino != os.fstat(store._file.fd).st_ino  # type: ignore[attr-defined]
    with closing(open_named("mapped", folder, "saved", 6, RECORD_BYTES, "layer 3", guard=guard)) as opened:
        assert torch.equal(read(opened, np.arange(6)), records)


def test_a_file_system_that_keeps_nothing_private(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vfat, where every file has the mode of the mount: scratch files can be, saved ones cannot."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        found = real(fd)
        return os.stat_result((found.st_mode | 0o044, *found[1:]), {"st_blocks": found.st_blocks})

    store, _ = frozen(tmp_path)
    with closing(store):
        monkeypatch.setattr(os, "link", fails(errno.EPERM))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat)
            with pytest.raises(StoreError, match="cannot keep a file from other users"):
                store.export(folder, "saved")
        assert os.listdir(folder) == []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fchmod", fails(errno.EPERM))
            patch.setattr(os, "fstat", fstat)
            scratch = ScratchFile(tmp_path, "layer 3")
        scratch.close()


def test_the_descriptor_is_shared_and_closed_with_the_last(tmp_path: Path) -> None:
    before = open_descriptors()
    file = ScratchFile(tmp_path, "layer 3")
    assert open_descriptors() == before + 1 and not file.shared
    shares = [file.share() for _ in range(50)]
    assert open_descriptors() == before + 1 and file.shared
    fd = file.fd
    file.close()
    file.close()
    assert (file.fd, file.disk_bytes, open_descriptors()) == (-1, 0, before + 1)
    assert all(share.fd == fd for share in shares)
    for share in shares[1:]:
        share.close()
    assert open_descriptors() == before + 1 and not shares[0].shared
    shares.clear()  # forgotten, not closed
    assert open_descriptors() == before


def test_closing_a_share_leaves_the_reads_of_another_alone(tmp_path: Path) -> None:
    """On one ring and one descriptor."""
    needs("uring", tmp_path)
    ring = Ring(1)
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3", ring)
    ids, records = fill(store, 8)
    store.freeze()
    before = open_descriptors()
    share, last = store.share(ring), store.share(ring)
    assert open_descriptors() == before, "neither a descriptor nor a ring of its own"
    into, out = np.zeros(512, np.uint8), aligned_empty(4, RECORD_BYTES)
    reading, writing = os.pipe()
    stalled = ring.read(reading, np.zeros(1, np.int64), np.array([into.ctypes.data]), np.array([512]), into)
    transfer = share.start(ids[::2], out)  # waits for its turn
    store.close()
    os.write(writing, bytes(512))
    assert transfer is not None
    transfer.finish()
    assert torch.equal(out, records[::2])
    ring.wait(stalled)
    # And its own reads are given up and waited for.
    stalled = ring.read(reading, np.zeros(1, np.int64), np.array([into.ctypes.data]), np.array([512]), into)
    started = share.start(ids[::2], out)
    feeder = threading.Thread(target=os.write, args=(writing, bytes(512)))
    feeder.start()
    share.close()
    feeder.join()
    assert started is not None and started.done()
    assert torch.equal(read(last, ids), records)
    last.close()
    ring.close()
    os.close(reading)
    os.close(writing)


def test_copies_move_bounded_pieces(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = frozen(tmp_path, 3 * BOUNCE_BYTES // RECORD_BYTES)
    sizes: list[int] = []
    real = RecordFile.write
    monkeypatch.setattr(
        RecordFile, "write", lambda self, data, offset: (sizes.append(len(data)), real(self, data, offset))[1]
    )
    with closing(store):
        size = 3 * BOUNCE_BYTES
        checked: list[int] = []
        copy_file(
            store._file, size, [(0, size)], folder, "saved", RECORD_BYTES,  # type: ignore[attr-defined]
            lambda start, piece: checked.append(start),
        )  # fmt: skip
    assert max(sizes) == BOUNCE_BYTES and sum(sizes) - 3 * BOUNCE_BYTES in (0, 4096)


@pytest.mark.parametrize("seekable", [True, False])
def test_a_range_is_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seekable: bool) -> None:
    """All of it and no more; a hole in it stays one where the platform tells."""
    if not seekable:
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    size, block = 4 * BOUNCE_BYTES, 4096
    content = np.random.default_rng(0).integers(1, 256, size, dtype=np.uint8)
    content[BOUNCE_BYTES : 2 * BOUNCE_BYTES] = 0
    with closing(ScratchFile(tmp_path, "layer 3")) as file:
        file.write(memoryview(content[:BOUNCE_BYTES]), 0)
        file.write(memoryview(content[2 * BOUNCE_BYTES :]), 2 * BOUNCE_BYTES)
        before = file.disk_bytes
        file.wipe(3 * block, size - 5 * block)
        content[3 * block : size - 5 * block] = 0
        assert Path(f"/proc/self/fd/{file.fd}").read_bytes() == content.tobytes()
        if seekable and before < size:
            assert file.disk_bytes == before
        file.resize(2 * size)
        file.wipe(size, 2 * size)
        assert file.size == 2 * size and (not seekable or file.disk_bytes == before)


def test_memory_is_saved_without_what_it_never_held(tmp_path: Path, folder: int) -> None:
    """Records that were allocated and not written hold other memory of the process."""
    store = MemoryStore(RECORD_BYTES, "layer 3")
    gone = store.allocate(3)
    ids, records = fill(store, 2)
    for chunk in store._chunks:
        chunk[:3] = 0x5A
    store.free(gone)
    store.freeze()
    guard = store.export(folder, "saved")
    content = (tmp_path / "contexts" / "saved").read_bytes()
    assert content == bytes(3 * RECORD_BYTES) + records.numpy().tobytes()
    assert guard.written.tolist() == [False] * 3 + [True] * 2
    assert store.memory_bytes == 4 * 2**20
    assert guard.check(ids, pattern(2)).tolist() == []


def test_every_file_of_a_store_in_memory_has_tags_of_its_own(tmp_path: Path, folder: int) -> None:
    """What is saved later does not change what described the first file."""
    store = MemoryStore(RECORD_BYTES, "layer 3", Encryption(KEY))
    _, records = fill(store, 4)
    store.freeze()
    guards = {name: store.export(folder, name) for name in ("one", "two")}
    for name, guard in guards.items():
        opened = open_guard(guard.describe(), guard.tags, KEY, True)
        with closing(open_named("mapped", folder, name, 4, RECORD_BYTES, "layer 3", guard=opened)) as again:
            assert torch.equal(read(again, np.arange(4)), records)
    assert guards["one"].describe() != guards["two"].describe(), "the same nonces need another key"


def test_memory_behind_the_last_record_is_given_back() -> None:
    store = MemoryStore(RECORD_BYTES, "layer 3")
    ids, records = fill(store, 1200)
    assert store.memory_bytes == 3 * 4 * 2**20
    store.free(ids[400:])
    store.freeze()
    assert (store.memory_bytes, store.capacity) == (4 * 2**20, 400)
    assert torch.equal(read(store, ids[:400]), records[:400])
