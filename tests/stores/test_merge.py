"""Parts of a layered store that are merged: as few as stated, records as they were, nothing changed by a failure."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import KEY, fails, needs, put

from hf_offload_cache.errors import CorruptRecordError, StoreError, StoreFullError
from hf_offload_cache.stores import (
    THROUGH_BYTES,
    Checksums,
    Encryption,
    FreezableStore,
    LayeredStore,
    MappedStore,
    RecordGuard,
    choose_engine,
    open_guard,
    open_named,
    open_store,
)
from hf_offload_cache.stores import layered as merge
from hf_offload_cache.testing import RECORD_BYTES, FaultyStore, WrapperStore, fill, open_descriptors, read

Make = Callable[[], FreezableStore]


def maker(directory: Path, engine: str = "mapped", guard: Callable[[], RecordGuard] = Checksums) -> Make:
    return lambda: open_store(engine, directory, RECORD_BYTES, "layer 3", guard=guard())


def grown(make: Make, sizes: list[int], *, merged: bool = False) -> tuple[LayeredStore, torch.Tensor]:
    """A store of parts of these sizes, and what is in them."""
    store = LayeredStore((), make)
    records = []
    for seed, size in enumerate(sizes):
        records.append(fill(store, size, seed=seed)[1])
        store.freeze()
        if merged:
            store.merge()
    return store, torch.cat(records)


def capacities(store: LayeredStore) -> list[int]:
    return [part.capacity for part in store.parts]


@contextmanager
def folder(path: Path) -> Iterator[int]:
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- which ------------------------------------------------------------------------------------------------------------


def copies(sizes: list[int]) -> tuple[int, int, list[int]]:
    """The most parts that there ever were, the records copied, and the parts left, when these are frozen in turn."""
    parts, most, copied = [], 0, 0
    for size in sizes:
        parts.append(size)
        stay = merge.parts_that_stay(parts)
        if len(parts) - stay > 1:
            copied += sum(parts[stay:])
            parts[stay:] = [sum(parts[stay:])]
        most = max(most, len(parts))
    return most, copied, parts


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000) | st.integers(1, 5), min_size=1, max_size=150))
def test_parts_and_copies_are_bounded(sizes: list[int]) -> None:
    most, copied, parts = copies(sizes)
    rest = sum(sizes[1:])
    assert parts[0] == sizes[0] and sum(parts) == sum(sizes)
    assert most <= 4 + math.log2(max(1, rest))
    assert copied <= rest * (1 + math.log(max(1, rest), 1.5)), "of a part that is half more each time"


def test_what_is_small_beside_the_part_before_it_stays() -> None:
    assert copies([500] * 4) == (4, 0, [500] * 4), "a few parts are not worth copying anything"
    assert copies([1, 1, 1, 500, 1]) == (5, 0, [1, 1, 1, 500, 1])
    assert copies([9000, 500, 100, 40, 19]) == (5, 0, [9000, 500, 100, 40, 19])
    assert copies([9000, 500, 121, 40, 20])[1:] == (60, [9000, 500, 121, 60])
    assert copies([9000, 500, 120, 40, 20])[1:] == (180, [9000, 500, 180])
    assert copies([1, 1, 1, 1, 500]) == (4, 503, [1, 503]), "the first is never copied"
    most, copied, _ = copies([1000, *itertools.repeat(8, 60)])
    assert most == 5 and copied == 3.7 * 8 * 60


@pytest.mark.parametrize("engine", ["memory", "mapped", "direct", "uring"])
def test_sixty_saves(tmp_path: Path, engine: str) -> None:
    """Files, descriptors and bytes copied stay few; every record reads back, from forks of every age too."""
    before = open_descriptors()
    with closing(LayeredStore((), maker(tmp_path, needs(engine, tmp_path)))) as store:
        all_records = [fill(store, 40, seed=99)[1]]
        store.freeze()
        document = store.parts[0]
        one = open_descriptors() - before
        fork: LayeredStore | None = None
        for turn in range(60):
            ids, records = fill(store, 3, seed=turn)
            assert ids.tolist() == list(range(40 + 3 * turn, 43 + 3 * turn))
            all_records.append(records)
            store.freeze()
            store.merge()
            assert store.parts[0] is document
            assert len(store.parts) <= 5
            assert open_descriptors() - before <= one * (5 if fork is None else 5 + len(fork.parts))
            if turn == 30:
                fork = store.share()  # type: ignore[assignment]
        written = (store.bytes_written - 40 * RECORD_BYTES) / (180 * RECORD_BYTES)
        assert 1 < written <= 1 + 4, "written once, and copied four times at most"
        everything = torch.cat(all_records)
        order = np.random.default_rng(0).permutation(220)
        assert torch.equal(read(store, order), everything[torch.from_numpy(order)])
        assert fork is not None
        with closing(fork):
            assert torch.equal(read(fork, np.arange(133)), everything[:133])
    assert open_descriptors() == before


# --- what -------------------------------------------------------------------------------------------------------------


def guards() -> list[Callable[[], RecordGuard]]:
    return [Checksums, lambda: Checksums(False), lambda: Encryption(KEY)]


@pytest.mark.parametrize("guard", guards(), ids=["checked", "trusted", "encrypted"])
@pytest.mark.parametrize("engine", ["memory", "auto"])
def test_a_merged_part_is_saved_and_opened(tmp_path: Path, engine: str, guard: Callable[[], RecordGuard]) -> None:
    """With tags that are right under its own guard."""
    engine = choose_engine("auto", tmp_path)[0] if engine == "auto" else engine
    store, records = grown(maker(tmp_path, engine, guard), [7, 5, 4, 3])
    with closing(store), folder(tmp_path / "context") as context:
        more = fill(store, 200, seed=9)[1]  # more than is copied at once
        store.freeze()
        counted = store.bytes_read, store.bytes_written, store.reads
        parts = store.parts
        store.merge()
        assert capacities(store) == [7, 212] and store.parts[0] is parts[0]
        assert [part.disk_bytes + part.memory_bytes for part in parts[1:]] == [0] * 4, "they are closed"
        assert store.bytes_written == counted[1] + 212 * RECORD_BYTES
        assert store.bytes_read == counted[0] + 212 * RECORD_BYTES and store.reads > counted[2]
        saved = store.parts[1].export(context, "saved")
        opened = open_guard(saved.describe(), saved.tags, KEY, True)
        with closing(open_named("mapped", context, "saved", 212, RECORD_BYTES, "layer 3", guard=opened)) as again:
            assert torch.equal(read(again, np.arange(212)), torch.cat([records[7:], more]))
        assert torch.equal(read(store, np.arange(219)), torch.cat([records, more]))


@pytest.mark.parametrize("engine", ["memory", "mapped"])
def test_what_is_not_needed_is_left_out(tmp_path: Path, engine: str) -> None:
    """Records that were freed, that nobody wrote, or that are not live, at the end too."""
    store, records = grown(maker(tmp_path, engine), [7, 5, 4])
    ids, gone = fill(store, 100, seed=8)
    store.free(ids[10:20])
    last = store.allocate(3)  # the lowest free ones: 26 to 28
    unwritten = store.allocate(40)
    store.free(unwritten[:5])
    store.freeze()
    part, _ = fill(store, 200, seed=9)
    store.freeze()
    live = np.ones(store.capacity, dtype=bool)
    live[[0, 8, part[-1]]] = False
    live[ids[40:60]] = False
    everything = store.written & live
    gaps = np.diff(np.flatnonzero(everything[7:])) - 1
    between = int(gaps[gaps * RECORD_BYTES <= THROUGH_BYTES].sum())
    most = (int(everything[7:].sum()) + between + 1) * RECORD_BYTES  # one for the file system's own
    assert between == 1 and gaps.max() >= 20
    with closing(store), folder(tmp_path / "context") as context:
        store.merge(live)
        assert len(store.parts) == 2 and store.capacity == len(live)
        assert store.written[7:].tolist() == everything[7:].tolist() and store.written[0], "the first part is as it was"
        assert not store.written[last].any() and not store.written[unwritten].any()
        assert store.allocate(1).tolist() == [len(live)]
        kept = ids[np.r_[:10, 20:40, 60:100]]
        assert torch.equal(read(store, kept), gone[torch.from_numpy(kept - ids[0])])
        assert torch.equal(read(store, np.r_[0:8, 9:16]), records[np.r_[0:8, 9:16]])
        if engine == "mapped":
            assert store.parts[1].disk_bytes <= most
            with pytest.raises(CorruptRecordError, match=rf"record {ids[40]} is not"):
                read(store, ids[40:41])
        store.parts[1].export(context, "saved")
        content = (tmp_path / "context" / "saved").read_bytes()
        assert os.stat("saved", dir_fd=context).st_blocks * 512 <= most
        assert records[8].numpy().tobytes() not in content and gone[45].numpy().tobytes() not in content
        assert content[(unwritten[0] - 7) * RECORD_BYTES :][: 40 * RECORD_BYTES].count(0) == 40 * RECORD_BYTES


def test_parts_of_a_context_are_merged_with_what_came_after(tmp_path: Path) -> None:
    """So that a context that is opened and saved again and again has few files, too; the context stays as it is."""
    make = maker(tmp_path)
    with folder(tmp_path / "context") as context:
        parts: list[FreezableStore] = []
        expected = []
        for turn in range(30):
            store = LayeredStore(parts, make)
            expected.append(fill(store, 2, seed=turn)[1])
            store.freeze()
            store.merge()
            counts = capacities(store)
            saved = [part.export(context, f"{turn}.{at}") for at, part in enumerate(store.parts)]
            store.close()
            parts = [
                open_named("mapped", context, f"{turn}.{at}", count, RECORD_BYTES, "layer 3", guard=guard)
                for at, (count, guard) in enumerate(zip(counts, saved, strict=True))
            ]
            assert len(parts) <= 5
        with closing(LayeredStore(parts, make)) as store:
            assert torch.equal(read(store, np.arange(60)), torch.cat(expected))


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", guards(), ids=["checked", "trusted", "encrypted"])
def test_a_damaged_record_gets_no_valid_tag(tmp_path: Path, guard: Callable[[], RecordGuard]) -> None:
    """Also where reads trust the disk."""
    store, records = grown(maker(tmp_path, guard=guard), [7, 5, 4, 3, 4])
    with closing(store):
        put(store.parts[2], 1 * RECORD_BYTES + 100, bytes(range(64)))
        before, parts = open_descriptors(), store.parts
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"layer 3: record 13 is not"):
                store.merge()
            assert store.parts == parts and open_descriptors() == before
        good = np.setdiff1d(np.arange(23), 13)
        assert torch.equal(read(store, good), records[torch.from_numpy(good)])
        live = np.ones(23, dtype=bool)
        live[13] = False
        store.merge(live)
        assert capacities(store) == [7, 16]
        assert torch.equal(read(store, good), records[torch.from_numpy(good)])


@pytest.mark.parametrize(("operation", "most"), [("allocate", 1), ("write", 5)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_store_that_cannot_be_written(tmp_path: Path, operation: str, most: int, number: int) -> None:
    """At whichever call: no room is no reason to fail, all else is; the parts are as they were, and nothing is left."""
    store, records = grown(maker(tmp_path), [7, 5, 4, 3, 130])
    with closing(store):
        parts, before = store.parts, open_descriptors()
        for call in range(1, most + 1):
            made: list[FreezableStore] = []  # held here: nothing is closed by being forgotten

            def make(call: int = call, made: list[FreezableStore] = made) -> FreezableStore:
                made.append(FaultyStore(maker(tmp_path)(), operation, call, number))
                return made[-1]

            store._make_own = make
            if number == errno.ENOSPC:
                store.merge()
            else:
                with pytest.raises(StoreError, match="made to fail") as caught:
                    store.merge()
                assert not isinstance(caught.value, StoreFullError)
            assert len(made) == 1 and store.parts == parts and open_descriptors() == before
            assert torch.equal(read(store, np.arange(149)), records)
        store._make_own = maker(tmp_path)
        store.merge()
        assert capacities(store) == [7, 142] and torch.equal(read(store, np.arange(149)), records)


@pytest.mark.parametrize("what", ["no file can be made", "a part cannot be read"])
def test_a_merge_that_fails_changes_nothing(tmp_path: Path, what: str) -> None:
    store, records = grown(maker(tmp_path), [7, 5, 4, 3, 4])
    with closing(store):
        if what == "a part cannot be read":
            store._arrange((*store.parts[:3], FaultyStore(store.parts[3], "read", 1), store.parts[4]), None)
        else:
            store._make_own = fails(errno.EMFILE)
        parts, before = store.parts, open_descriptors()
        with pytest.raises(OSError, match=r"made to fail|Too many open files"):
            store.merge()
        assert store.parts == parts and open_descriptors() == before
        assert torch.equal(read(store, np.arange(23)), records)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No more than a MiB is read at once."""
    batches: list[int] = []

    class Watched(WrapperStore):
        def read(self, ids: np.ndarray, out: torch.Tensor) -> None:
            batches.append(out.numel())
            self.inner.read(ids, out)

    store, records = grown(maker(tmp_path), [2, 300, 300])
    with closing(store):
        fill(store, 300, seed=5)
        store.freeze()
        parts = (*store.parts, maker(tmp_path)())
        fill(parts[-1], 1)
        parts[-1].freeze()
        store._arrange((parts[0], *(Watched(part) for part in parts[1:4]), parts[4]), None)
        with closing(merge.merge_parts(store.parts[1:], None, maker(tmp_path))) as merged:
            assert merged.capacity == 901 and torch.equal(read(merged, np.arange(600)), records[2:])
        assert max(batches) == 2**20 and sum(batches) == 900 * RECORD_BYTES


def test_nothing_is_merged_before_it_is_frozen_and_parts_may_hold_nothing(tmp_path: Path) -> None:
    store, records = grown(maker(tmp_path), [3, 2, 2, 2])
    with closing(store):
        fill(store, 2, seed=7)
        with pytest.raises(StoreError, match=r"layer 3.*freeze"):
            store.merge()
        assert capacities(store) == [3, 2, 2, 2] and torch.equal(read(store, np.arange(9)), records)
        store.freeze()
        store.merge(np.zeros(11, dtype=bool))
        assert capacities(store) == [3, 8] and not store.written[3:].any()
        assert store.parts[1].disk_bytes == 0 and torch.equal(read(store, np.arange(3)), records[:3])


def test_an_error_holds_no_map(tmp_path: Path) -> None:
    """Whoever keeps a `CorruptRecordError` keeps frames, but neither a descriptor nor a map."""
    before = open_descriptors()
    store = MappedStore(tmp_path, RECORD_BYTES, "layer 3")
    ids, _ = fill(store, 4)
    put(store, 2 * RECORD_BYTES + 100, bytes(range(64)))
    with pytest.raises(CorruptRecordError) as caught:
        read(store, ids)
    os.truncate(f"/proc/self/fd/{store._file.fd}", RECORD_BYTES)
    with pytest.raises(CorruptRecordError, match="short read") as short:
        read(store, ids)
    store.close()
    assert caught.value.__traceback__ is not None and short.value.__traceback__ is not None
    assert open_descriptors() == before
