"""Every store of ours against the conformance suite, and what is particular to each."""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import functools
import gc
import io
import mmap
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from store_cases import OfAnEngine, buffered, fails, needs

from hf_offload_cache.errors import StalledError, StoreError, StoreFullError
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
    read,
)


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
    buffered(monkeypatch)


class TestMappedStore(OfAnEngine):
    pass


class TestMemoryStore(OfAnEngine):
    engine = "memory"


class TestDirectStore(OfAnEngine):
    engine = "direct"


class TestUringStore(OfAnEngine):
    engine = "uring"


@pytest.mark.usefixtures("no_direct")
class TestUringStoreThroughThePageCache(TestUringStore):
    pass


class TestUringStoreOfALittleRing(TestUringStore):
    """Two reads in flight at most: every batch is more than the ring holds."""

    @pytest.fixture(autouse=True)
    def _little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uring, "Ring", functools.partial(Ring, 2))


@pytest.mark.usefixtures("no_direct")
class TestMappedStoreWithBufferedWrites(TestMappedStore):
    pass


class TestMappedStoreOnAPlatformWithLess(TestMappedStore):
    """As on macOS; and pages are larger than records."""

    @pytest.fixture(autouse=True)
    def _less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mmap, "PAGESIZE", 65536)
        for name in ("O_TMPFILE", "O_DIRECT", "posix_fadvise", "fdatasync"):
            monkeypatch.delattr(os, name, raising=False)


class TestFaultyStoreBeforeItsFault(FreezableStoreTests):
    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        latent = LatencyStore(MappedStore(directory, record_bytes, "layer 3"), 0.0)
        return FaultyStore(latent, "read", 10**9, advises=True)


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


def test_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("direct", tmp_path)
    before = open_descriptors()
    assert probe_direct(tmp_path) == (True, "")
    assert open_descriptors() == before and list(tmp_path.iterdir()) == []
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert probe_direct(tmp_path) == (False, "this platform has no O_DIRECT")


@pytest.mark.parametrize("failing", ["fcntl", "pwrite"])
def test_probe_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    refuse, real = fails(errno.EINVAL), fcntl.fcntl

    def without_direct(fd: int, command: int, *rest: int) -> int:
        return refuse() if rest and rest[0] & os.O_DIRECT else real(fd, command, *rest)

    monkeypatch.setattr(*((os, "pwrite", refuse) if failing == "pwrite" else (fcntl, "fcntl", without_direct)))
    before = open_descriptors()
    works, reason = probe_direct(tmp_path)
    assert not works and "Invalid argument" in reason and str(tmp_path) in reason
    engine, said = choose_engine("auto", tmp_path)
    assert engine == "mapped" and "Invalid argument" in said
    for call in (lambda: choose_engine("direct", tmp_path), lambda: DirectStore(tmp_path, 4096, "layer 3")):
        with pytest.raises(StoreError, match=r'Invalid argument.*engine="mapped"'):
            call()
    assert open_descriptors() == before


@pytest.mark.parametrize("failing", ["open", "pwrite"])
def test_a_full_disk_is_no_reason_against_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Nor an error of another kind: whoever catches `StoreFullError` may make room."""
    needs("direct", tmp_path)
    monkeypatch.setattr(os, failing, fails(errno.ENOSPC))
    before = len(list(Path("/proc/self/fd").glob("*")))
    calls = [probe_direct, probe_uring, *(lambda at, name=name: choose_engine(name, at) for name in ("auto", "direct"))]
    for call in (*calls, lambda at: DirectStore(at, 4096, "layer 3")):
        with pytest.raises(StoreFullError, match=str(tmp_path)) as raised:
            call(tmp_path)
        assert raised.value.errno == errno.ENOSPC
    assert len(list(Path("/proc/self/fd").glob("*"))) == before


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
    with closing(open_store(needs(engine, tmp_path), tmp_path, 4096, "layer 7")) as store:
        assert (type(store), store.name, store.record_bytes) == (kind, "layer 7", 4096)
    with pytest.raises(ValueError, match="choose_engine"):
        open_store("auto", tmp_path, 4096, "layer 7")


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


def test_a_kernel_whose_ring_has_no_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("uring", tmp_path)
    monkeypatch.setattr(io_uring, "OP_READ", 255)
    before = open_descriptors()
    works, why = probe_uring(tmp_path)
    assert not works and "Invalid argument" in why
    assert choose_engine("auto", tmp_path)[0] != "uring"
    assert open_descriptors() == before


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "missing", tmp_path / "file"):
        for engine in ("auto", "uring", "direct", "mapped"):
            with pytest.raises(StoreError, match=f"{wrong}.*`path`"):
                choose_engine(engine, wrong)
        with pytest.raises(StoreError, match=f"layer 7.*{wrong}.*`path`"):
            open_store("mapped", wrong, 4096, "layer 7")


def test_a_file_that_cannot_be_unlinked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(os, "unlink", fails(errno.EPERM))
    before = open_descriptors()
    with pytest.raises(StoreError, match="not permitted"):
        ScratchFile(tmp_path, "layer 7")
    assert open_descriptors() == before


@pytest.mark.parametrize("umask", [0, 0o777])
@pytest.mark.parametrize("unnamed", [True, False])
def test_scratch_files_are_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, unnamed: bool
) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    before = os.umask(umask)
    try:
        scratch = ScratchFile(tmp_path, "layer 7")
    finally:
        os.umask(before)
    with closing(scratch):
        status = os.fstat(scratch.fd)
        assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0) and not os.get_inheritable(scratch.fd)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at a known place")
def test_a_disk_that_is_memory_is_named() -> None:
    for engine in ("auto", "mapped"):
        assert "tmpfs" in choose_engine(engine, "/dev/shm")[1]


def test_file_system_of_a_mount_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "disk / ext4 rw 0 0\nram /a\\040b tmpfs rw 0 0\nnet /a\\040b/c nfs rw 0 0\n"
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: io.StringIO(mounts))
    places = ("/", "/a b", "/a b/x", "/a bc", "/a b/c/d")
    kinds = [engines._file_system(path) for path in places]
    monkeypatch.undo()
    assert kinds == ["ext4", "tmpfs", "tmpfs", "ext4", "nfs"]


@pytest.mark.usefixtures("needs_a_disk")
@pytest.mark.parametrize("engine", ["direct", "uring", "uring, buffered"])
def test_reads_leave_the_page_cache_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    needs("direct", tmp_path)
    if engine.endswith("buffered"):
        buffered(monkeypatch)
    store = open_store(needs(engine.partition(",")[0], tmp_path), tmp_path, RECORD_BYTES, "layer 3")
    ids, _ = fill(store, 256)  # 2 MiB: a multiple of what is synced at once
    read(store, ids)
    assert cached_pages(store._file.fd, 256 * RECORD_BYTES) == 0
    store.close()


@pytest.mark.usefixtures("needs_a_disk")
@pytest.mark.parametrize("direct_writes", [True, False])
def test_mapped_store_drops_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_writes: bool) -> None:
    if not direct_writes:
        buffered(monkeypatch)
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


def test_a_stalled_read_is_told_from_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which records, and may be waited for again."""
    needs("uring", tmp_path)
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
