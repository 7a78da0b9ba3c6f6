"""Every store of ours against the conformance suite, and what is particular to each."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_offload_cache.errors import StalledError, StoreError
from hf_offload_cache.stores import (
    DirectStore,
    FreeList,
    FreezableStore,
    MappedStore,
    MemoryStore,
    Ring,
    ScratchFile,
    UringStore,
    aligned_empty,
    choose_engine,
    engines,
    open_store,
    probe_direct,
    probe_uring,
)
from hf_offload_cache.stores.uring import queues as io_uring
from hf_offload_cache.stores.uring import uring_store as uring
from hf_offload_cache.testing import (
    RECORD_BYTES,
    FaultyStore,
    FreezableStoreTests,
    LatencyStore,
    fill,
    open_descriptors,
    pattern,
    read,
)


@pytest.fixture
def needs_direct(tmp_path: Path) -> None:
    works, reason = probe_direct(tmp_path)
    if not works:
        pytest.skip(reason)


@pytest.fixture
def needs_uring(tmp_path: Path) -> None:
    works, reason = probe_uring(tmp_path)
    if not works:
        pytest.skip(reason)


@pytest.fixture
def no_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose seccomp profile forbids it."""
    refuse_rings(monkeypatch, errno.EPERM)


def refuse_rings(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(io_uring, "_system_call", lambda: refuse)


@pytest.fixture
def needs_a_disk(tmp_path: Path) -> None:
    if "tmpfs" in choose_engine("mapped", tmp_path)[1]:
        pytest.skip("pages of a disk in memory cannot be dropped")


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchFile, "try_direct", lambda self: "O_DIRECT refused by this test")


class TestMemoryStore(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return MemoryStore(record_bytes, "layer 3")


@pytest.mark.usefixtures("needs_direct")
class TestDirectStore(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return DirectStore(directory, record_bytes, "layer 3")


@pytest.mark.usefixtures("needs_uring")
class TestUringStore(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return UringStore(directory, record_bytes, "layer 3")


@pytest.mark.usefixtures("no_direct")
class TestUringStoreThroughThePageCache(TestUringStore):
    pass


class TestUringStoreOfALittleRing(TestUringStore):
    """Two reads in flight at most: every batch is more than the ring holds."""

    @pytest.fixture(autouse=True)
    def _little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uring, "Ring", functools.partial(Ring, 2))


class TestMappedStore(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return MappedStore(directory, record_bytes, "layer 3")


@pytest.mark.usefixtures("no_direct")
class TestMappedStoreWithBufferedWrites(TestMappedStore):
    pass


class TestMappedStoreOnAPlatformWithLess(TestMappedStore):
    """As on macOS: no O_TMPFILE, O_DIRECT, posix_fadvise or fdatasync."""

    @pytest.fixture(autouse=True)
    def _less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("O_TMPFILE", "O_DIRECT", "posix_fadvise", "fdatasync"):
            monkeypatch.delattr(os, name, raising=False)


class TestMappedStoreWithPagesLargerThanRecords(TestMappedStore):
    @pytest.fixture(autouse=True)
    def _pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mmap, "PAGESIZE", 65536)


class TestLatencyStore(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return LatencyStore(MemoryStore(record_bytes, "layer 3"), 0.0)


class TestFaultyStoreBeforeItsFault(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return FaultyStore(MappedStore(directory, record_bytes, "layer 3"), "read", 10**9, advises=True)


def test_free_list_prefers_a_gap_that_holds_all() -> None:
    free = FreeList("layer 3")
    free.grow(20)
    free.take(20)
    free.give(np.array([2, 5, 6, 7, 12, 13]))
    assert free.take(3).tolist() == [5, 6, 7]
    assert free.take(1).tolist() == [2]
    free.grow(2)
    assert free.take(3).tolist() == [12, 13, 20]
    assert (free.available, free.capacity) == (1, 22)


@pytest.mark.usefixtures("needs_direct")
def test_probe_leaves_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    assert probe_direct(tmp_path) == (True, "")
    assert open_descriptors() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["fcntl", "pwrite"])
def test_probe_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    import fcntl

    if failing == "pwrite":
        monkeypatch.setattr(os, "pwrite", refuse)
    else:
        real = fcntl.fcntl
        monkeypatch.setattr(
            fcntl,
            "fcntl",
            lambda fd, command, *rest: refuse() if rest and rest[0] & os.O_DIRECT else real(fd, command, *rest),
        )
    before = open_descriptors()
    works, reason = probe_direct(tmp_path)
    assert not works
    assert "Invalid argument" in reason and str(tmp_path) in reason
    assert choose_engine("auto", tmp_path)[0] == "mapped"
    assert "Invalid argument" in choose_engine("auto", tmp_path)[1]
    for call in (lambda: choose_engine("direct", tmp_path), lambda: DirectStore(tmp_path, 4096, "layer 3")):
        with pytest.raises(StoreError, match=r'Invalid argument.*engine="mapped"'):
            call()
    assert open_descriptors() == before


def test_probe_without_the_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert probe_direct(tmp_path) == (False, "this platform has no O_DIRECT")


def test_choose_engine(tmp_path: Path) -> None:
    best = "mapped"
    if probe_direct(tmp_path)[0]:
        best = "uring" if probe_uring(tmp_path)[0] else "direct"
    assert choose_engine("auto", tmp_path)[0] == best
    assert choose_engine("mapped", tmp_path)[0] == "mapped"
    assert choose_engine("memory", tmp_path / "missing")[0] == "memory"
    with pytest.raises(ValueError, match=r"auto, uring, direct, mapped, memory.*'fast'"):
        choose_engine("fast", tmp_path)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("memory", MemoryStore), ("uring", UringStore), ("direct", DirectStore), ("mapped", MappedStore)],
)
def test_open_store(tmp_path: Path, engine: str, kind: type[FreezableStore]) -> None:
    if engine == "direct" and not probe_direct(tmp_path)[0]:
        pytest.skip("no O_DIRECT here")
    if engine == "uring" and not probe_uring(tmp_path)[0]:
        pytest.skip(probe_uring(tmp_path)[1])
    store = open_store(engine, tmp_path, 4096, "layer 7")
    assert (type(store), store.name, store.record_bytes) == (kind, "layer 7", 4096)
    store.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EPERM, "seccomp"), (errno.ENOSYS, "kernel has none"), (errno.ENOMEM, "ulimit"), (errno.EMFILE, "left")],
)
def test_without_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    refuse_rings(monkeypatch, number)
    before = open_descriptors()
    works, why = probe_uring(tmp_path)
    assert not works and reason in why
    chosen, line = choose_engine("auto", tmp_path)
    assert chosen == ("direct" if probe_direct(tmp_path)[0] else "mapped")
    assert chosen == "mapped" or reason in line
    with pytest.raises(StoreError, match=rf'engine="uring".*{reason}.*engine="auto"'):
        choose_engine("uring", tmp_path)
    with pytest.raises(OSError, match=reason):
        UringStore(tmp_path, 4096, "layer 3")
    assert open_descriptors() == before


@pytest.mark.usefixtures("no_uring", "no_direct")
def test_neither_io_uring_nor_direct(tmp_path: Path) -> None:
    assert choose_engine("auto", tmp_path)[0] == "mapped"


@pytest.mark.usefixtures("needs_uring")
def test_a_kernel_whose_ring_has_no_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_uring, "OP_READ", 255)
    before = open_descriptors()
    works, why = probe_uring(tmp_path)
    assert not works and "Invalid argument" in why
    assert choose_engine("auto", tmp_path)[0] != "uring"
    assert open_descriptors() == before


def test_open_store_wants_a_resolved_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose_engine"):
        open_store("auto", tmp_path, 4096, "layer 7")


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "missing", tmp_path / "file"):
        for engine in ("auto", "uring", "direct", "mapped"):
            with pytest.raises(StoreError, match=f"{wrong}.*`path`"):
                choose_engine(engine, wrong)
        with pytest.raises(StoreError, match=f"layer 7.*{wrong}.*`path`"):
            open_store("mapped", wrong, 4096, "layer 7")


def test_a_file_that_cannot_be_unlinked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(os, "unlink", refuse)
    before = open_descriptors()
    with pytest.raises(StoreError, match="not here"):
        ScratchFile(tmp_path, "layer 7")
    assert open_descriptors() == before


def test_scratch_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        scratch = ScratchFile(tmp_path, "layer 7")
        assert os.fstat(scratch.fd).st_mode & 0o777 == 0o600
        assert os.fstat(scratch.fd).st_nlink == 0
        assert not os.get_inheritable(scratch.fd)
        scratch.close()
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at a known place")
def test_a_disk_that_is_memory_is_named() -> None:
    for engine in ("auto", "mapped"):
        assert "tmpfs" in choose_engine(engine, "/dev/shm")[1]


def test_file_system_of_a_mount_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import io

    mounts = "disk / ext4 rw 0 0\nram /a\\040b tmpfs rw 0 0\nnet /a\\040b/c nfs rw 0 0\n"
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: io.StringIO(mounts))
    places = ("/", "/a b", "/a b/x", "/a bc", "/a b/c/d")
    kinds = [engines._file_system(path) for path in places]
    monkeypatch.undo()
    assert kinds == ["ext4", "tmpfs", "tmpfs", "ext4", "nfs"]


@pytest.mark.usefixtures("needs_direct", "needs_a_disk")
@pytest.mark.parametrize("engine", ["direct", "uring", "uring, buffered"])
def test_reads_leave_the_page_cache_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    if engine != "direct" and not probe_uring(tmp_path)[0]:
        pytest.skip(probe_uring(tmp_path)[1])
    if engine.endswith("buffered"):
        monkeypatch.setattr(ScratchFile, "try_direct", lambda self: "not in this test")
    store = open_store(engine.partition(",")[0], tmp_path, RECORD_BYTES, "layer 3")
    ids, _ = fill(store, 256)  # 2 MiB: a multiple of what is synced at once
    read(store, ids)
    assert cached_pages(store._file.fd, 256 * RECORD_BYTES) == 0
    store.close()


@pytest.mark.usefixtures("needs_a_disk")
@pytest.mark.parametrize("direct_writes", [True, False])
def test_mapped_store_drops_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_writes: bool) -> None:
    if not direct_writes:
        monkeypatch.setattr(ScratchFile, "try_direct", lambda self: "not in this test")
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 256)  # 2 MiB: a multiple of what is synced at once
    assert (store.memory_bytes, cached_pages(store._file.fd, 256 * RECORD_BYTES)) == (0, 0)
    chosen = np.r_[ids[10:40], ids[80:200:3]]
    store.advise(chosen)
    assert store.memory_bytes == len(chosen) * RECORD_BYTES
    assert torch.equal(read(store, chosen), records[chosen])
    assert store.memory_bytes == 0
    assert cached_pages(store._file.fd, 256 * RECORD_BYTES) == 0
    store.advise(ids[:50])
    store.free(ids[:20])
    assert store.memory_bytes == 30 * RECORD_BYTES
    for wrong in (-1, 10**9):
        with pytest.raises(StoreError, match=f"layer 3.*{wrong}"):
            store.advise(np.array([wrong]))
    assert store.memory_bytes == 30 * RECORD_BYTES
    store.close()


def test_buffered_writes_are_synced_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_direct: None
) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd))[1])
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3")
    fill(store, 100)
    assert (len(synced), store.memory_bytes) == (0, 100 * RECORD_BYTES)
    fill(store, 28)
    assert (len(synced), store.memory_bytes) == (1, 0)
    store.close()


def test_old_maps_go_when_the_file_grows(tmp_path: Path) -> None:
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3")
    store.allocate(64)
    descriptors = open_descriptors()
    for _ in range(5):
        store.allocate(500)
    gc.disable()  # reference counts alone must do it
    try:
        assert open_descriptors() == descriptors
    finally:
        gc.enable()
    store.close()


@pytest.mark.parametrize("record_bytes", [4096, 2**20, 128 * 2**20])
def test_the_file_grows_in_bounded_steps(tmp_path: Path, record_bytes: int) -> None:
    store = MappedStore(tmp_path, record_bytes, "layer 3")
    store.allocate(1)
    sizes = [store._file.size]
    for _ in range(60):
        store.allocate(store._free.available + 1)
        sizes.append(store._file.size)
    steps = np.diff([0, *sizes])
    assert sizes[0] == max(min(64 * record_bytes, 64 * 2**20), record_bytes)
    assert steps.max() <= max(64 * 2**20, record_bytes)
    if record_bytes == 4096:
        assert steps[-1] == 64 * 2**20, "small records should have reached the largest step"
    store.close()


def test_a_batch_that_is_written_while_another_is_read_twice_is_whole(tmp_path: Path) -> None:
    """Reused records: what the map showed before must not come back."""
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, _ = fill(store, 32)
    for round_ in range(10):
        store.advise(ids)
        thread = threading.Thread(target=read, args=(store, ids))
        thread.start()
        thread.join()
        store.free(ids)
        ids = store.allocate(32)
        new = pattern(32, seed=100 + round_)
        store.write(ids, new)
        assert torch.equal(read(store, ids), new)
    store.close()


def test_a_stalled_read_is_told_from_a_failed_one(
    tmp_path: Path, needs_uring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which records, and may be waited for again."""
    store = UringStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, records = fill(store, 4)
    out = aligned_empty(2, RECORD_BYTES)
    transfer = store.start(ids[1:3], out)

    def stall(self: Ring, batch: object) -> None:
        raise StalledError(errno.ETIMEDOUT, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Ring, "wait", stall)
        with pytest.raises(StalledError, match=r"layer 3: reading records 1\.\.2 \(2\).*no answer"):
            transfer.finish()
    transfer.finish()
    assert torch.equal(out, records[1:3])
    store.close()


def test_memory_store_counts_memory() -> None:
    store = MemoryStore(RECORD_BYTES, "layer 3")
    assert store.memory_bytes == 0
    store.allocate(1)
    assert store.memory_bytes == 4 * 2**20
    store.allocate(512)
    assert store.memory_bytes == 8 * 2**20
    store.close()
    with pytest.raises(StoreError):
        store.read(np.array([0]), aligned_empty(1, RECORD_BYTES))


def cached_pages(fd: int, size: int) -> int:
    """Pages of the file that the page cache holds, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    view = mmap.mmap(fd, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    resident = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(flag & 1 for flag in resident)
