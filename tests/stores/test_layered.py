"""A layered store against the conformance suite, and against one array of all its records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import needs, put

from hf_offload_cache.errors import CacheClosedError, CorruptRecordError, StalledError, StoreError, StoreFullError
from hf_offload_cache.stores import (
    FreezableStore,
    LateRead,
    LayeredStore,
    MappedStore,
    MemoryStore,
    Transfer,
    aligned_empty,
    choose_engine,
    open_store,
    runs,
)
from hf_offload_cache.testing import (
    RECORD_BYTES,
    FaultyStore,
    FreezableStoreTests,
    WrapperStore,
    fill,
    open_descriptors,
    pattern,
    read,
)


def in_memory() -> FreezableStore:
    return MemoryStore(RECORD_BYTES, "layer 3")


def mapped(directory: Path) -> Callable[[], FreezableStore]:
    return lambda: MappedStore(directory, RECORD_BYTES, "layer 3")


def started(store: LayeredStore, *ids: int, out: torch.Tensor | None = None) -> Transfer:
    """A read of the records that the store has begun."""
    transfer = store.start(np.array(ids), aligned_empty(len(ids), RECORD_BYTES) if out is None else out)
    assert transfer is not None
    return transfer


def frozen(
    count: int, seed: int, make: Callable[[], FreezableStore] = in_memory
) -> tuple[FreezableStore, torch.Tensor]:
    store = make()
    records = fill(store, count, seed=seed)[1] if count else pattern(0)
    store.freeze()
    return store, records


class TestLayeredStoreWithoutParts(FreezableStoreTests):
    grows_when_frozen = True

    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        return LayeredStore((), lambda: MappedStore(directory, record_bytes, "layer 3"))


class TestLayeredStoreOverAnEmptyPart(FreezableStoreTests):
    """So that ids begin at 0, and everything goes through two stores."""

    grows_when_frozen = True

    def make_store(self, directory: Path, record_bytes: int) -> FreezableStore:
        engine = choose_engine("auto", directory)[0]
        part = open_store(engine, directory, record_bytes, "layer 3")
        part.freeze()
        return LayeredStore([part], lambda: open_store(engine, directory, record_bytes, "layer 3"))


ENGINES = ("memory", "mapped", "auto")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_it_is_one_array_of_records(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parts of any size and engine, ids in any order: what is read, and what it counts."""
    directory = tmp_path_factory.mktemp("layers")

    def make(engine: str) -> FreezableStore:
        resolved = choose_engine("auto", directory)[0] if engine == "auto" else engine
        return open_store(resolved, directory, RECORD_BYTES, "layer 3")

    parts, all_records = [], []
    for seed in range(data.draw(st.integers(1, 3))):
        engine, count = data.draw(st.sampled_from(ENGINES)), data.draw(st.integers(0, 9))
        part, records = frozen(count, seed, lambda engine=engine: make(engine))  # type: ignore[misc]
        parts.append(part)
        all_records.append(records)
    engine = data.draw(st.sampled_from(ENGINES))
    with closing(LayeredStore(parts, lambda: make(engine))) as store:
        for seed in range(data.draw(st.integers(0, 3))):
            count = data.draw(st.integers(1, 5))
            ids, records = fill(store, count, seed=50 + seed)
            before = sum(map(len, all_records))
            assert np.array_equal(ids, np.arange(before, before + count))
            all_records.append(records)
            if data.draw(st.booleans()):
                store.freeze()
        expected = torch.cat(all_records)
        if len(expected) == 0:
            return
        ids = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20)))
        if data.draw(st.booleans()):
            ids = np.sort(ids)
        store.reads = store.bytes_read = 0
        store.advise(ids)
        assert torch.equal(read(store, ids), expected[torch.from_numpy(ids)])
        assert store.bytes_read == len(ids) * RECORD_BYTES
        assert len(runs(ids)) <= store.reads <= len(ids)
        out = aligned_empty(len(ids), RECORD_BYTES).fill_(0xEE)
        transfer = store.start(ids, out)
        if transfer is not None:
            transfer.finish()
            assert transfer.done() and transfer.finished_at is not None
            assert torch.equal(out, expected[torch.from_numpy(ids)])


class Scripted(WrapperStore):
    """Its `start` answers what it was told to, and notes what it was given."""

    def __init__(self, count: int, answer: object) -> None:
        super().__init__(frozen(count, 0)[0])
        self.answer = answer
        self.given: list[tuple[np.ndarray, torch.Tensor]] = []

    def start(self, ids: np.ndarray, out: torch.Tensor) -> Transfer | None:
        self.given.append((ids, out))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


class Step(Transfer):
    """A transfer that notes what is done with it."""

    def __init__(self, errors: tuple[Exception, ...] = (), end: float = 1.0) -> None:
        self.errors = list(errors)
        self.log: list[str] = []
        self.end = end
        self.over = False
        self.finished_at = None

    def done(self) -> bool:
        return self.over

    def drop(self) -> None:
        self.log.append("drop")

    def wait(self) -> None:
        self.log.append("wait")

    def finish(self) -> None:
        self.log.append("finish")
        if self.errors:
            raise self.errors.pop(0)
        self.over, self.finished_at = True, self.end


def layers(*answers: object) -> tuple[LayeredStore, list[Scripted]]:
    stores = [Scripted(10, answer) for answer in answers]
    return LayeredStore(stores, in_memory), stores


def test_parts_of_records_in_memory(tmp_path: Path) -> None:
    """Of frozen and of new ones, as they lie there; where some are on a disk all are read whole."""
    (first, early), (second, later) = frozen(5, 0), frozen(7, 1)
    with closing(LayeredStore([first, second], in_memory)) as store:
        _, latest = fill(store, 3, seed=2)
        made, expected = np.random.default_rng(0), torch.cat([early, later, latest]).numpy()
        ids, begin = made.integers(0, 15, 40), made.integers(0, RECORD_BYTES - 48, 40)
        out = torch.zeros(40, 48, dtype=torch.uint8)
        before = store.bytes_read
        assert store.in_memory
        store.read_parts(ids, begin, out)
        for row, record, at in zip(out.numpy(), ids, begin, strict=True):
            assert np.array_equal(row, expected[record, at : at + 48])
        assert store.bytes_read - before == 40 * 48
    part, _ = frozen(5, 0, lambda: open_store("mapped", tmp_path, RECORD_BYTES, "layer 3"))
    with closing(LayeredStore([part], in_memory)) as store:
        assert not store.in_memory
        with pytest.raises(NotImplementedError, match="read completely"):
            store.read_parts(np.array([0]), np.array([0]), out[:1])


def test_ids_of_one_store_cost_nothing() -> None:
    """Those of the first go on as they are, and its transfer comes back."""
    first, second = Step(), Step()
    store, (below, above) = layers(first, second)
    ids, out = np.arange(4, 9), aligned_empty(5, RECORD_BYTES)
    assert store.start(ids, out) is first
    assert below.given[0][0] is ids and below.given[0][1] is out
    assert store.start(ids + 10, out) is second
    assert above.given[0][0].tolist() == ids.tolist() and above.given[0][1].data_ptr() == out.data_ptr()


def test_stretches_go_to_their_stores() -> None:
    store, (below, above) = layers(first := Step(end=2.0), second := Step(end=1.0))
    out = aligned_empty(6, RECORD_BYTES)
    transfer = started(store, 1, 2, 15, 10, 3, 19, out=out)
    assert [given[0].tolist() for given in below.given] == [[1, 2], [3]]
    assert [given[0].tolist() for given in above.given] == [[5, 0], [9]]
    assert above.given[0][1].data_ptr() == out[2:].data_ptr()
    assert transfer.runs and not transfer.done() and transfer.finished_at is None
    first.over = True
    assert not transfer.done()
    transfer.drop()
    transfer.wait()
    assert first.log == second.log == ["drop", "drop", "wait", "wait"]
    transfer.finish()
    assert transfer.done() and transfer.finished_at == 2.0


def test_a_store_that_can_only_block() -> None:
    """First: others read all of it. Later: what was begun goes on, and the rest is read by whoever finishes."""
    ids, out = np.array([9, 10]), aligned_empty(2, RECORD_BYTES)
    store, (_, above) = layers(None, step := Step())
    assert store.start(ids, out) is None and above.given == [] and step.log == []
    store, (below, above) = layers(step := Step(), None)
    transfer = started(store, 9, 10, out=out)
    assert transfer.runs
    transfer.finish()
    assert torch.equal(out[1:], read(above.inner, np.array([0])))
    late, _ = layers(None, None)
    late.parts[0].answer = LateRead(late.parts[0].read, ids[:1], out[:1])  # type: ignore[attr-defined]
    assert not started(late, 9, 10, out=out).runs, "all that is left happens in `finish`"


def test_a_start_that_fails_leaves_nothing_under_way() -> None:
    store, _ = layers(step := Step(), StoreError(5, "broken"))
    with pytest.raises(StoreError, match="broken"):
        started(store, 9, 10)
    assert step.log == ["drop", "wait"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_the_others_have_ended(failing: int) -> None:
    steps = [Step(), Step()]
    steps[failing].errors = [CorruptRecordError(5, "flipped")]
    transfer = started(layers(*steps)[0], 9, 10)
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match="flipped"):
            transfer.finish()
    assert all(step.log[-2:] == ["drop", "wait"] for step in steps)
    assert steps[failing].log.count("finish") == 1, "the same again, from memory"


def test_a_stalled_one_may_be_waited_for_again() -> None:
    transfer = started(layers(Step(), Step((StalledError(110, "no answer"),)))[0], 9, 10)
    with pytest.raises(StalledError):
        transfer.finish()
    transfer.finish()
    assert transfer.done()


def test_dropped_late_reads_say_so() -> None:
    transfer = started(LayeredStore([frozen(4, 0)[0], frozen(4, 1)[0]], in_memory), 3, 4)
    assert not transfer.runs
    transfer.drop()
    with pytest.raises(CacheClosedError):
        transfer.finish()


def test_counters_are_sums() -> None:
    below, _ = frozen(5, 0)
    store = LayeredStore([below], in_memory)
    assert store.bytes_written == 5 * RECORD_BYTES
    ids, _ = fill(store, 3)
    read(store, np.array([0, 2, 6]))
    assert (store.reads, store.bytes_read, store.bytes_written) == (3, 3 * RECORD_BYTES, 8 * RECORD_BYTES)
    store.freeze()
    assert (store.reads, store.bytes_read, store.bytes_written) == (3, 3 * RECORD_BYTES, 8 * RECORD_BYTES)
    store.reads = store.bytes_read = store.bytes_written = 0
    assert (store.reads, below.reads, store.bytes_written) == (0, 0, 0)
    read(store, ids)
    assert store.reads == 1
    with pytest.raises(ValueError, match="0 only, got 5"):
        store.reads = 5


def test_what_is_shared_is_told_from_what_is_not(tmp_path: Path) -> None:
    make = mapped(tmp_path)
    part, _ = frozen(40, 0, make)
    with closing(LayeredStore([part], make)) as store:
        assert (store.own_disk_bytes, store.disk_bytes) == (0, part.disk_bytes)
        tables = store.tables_bytes
        assert tables >= 40 * 8
        fill(store, 10)
        assert store.own_disk_bytes == store.disk_bytes - part.disk_bytes == 10 * RECORD_BYTES
        assert store.tables_bytes >= tables + 64 * 8
        with closing(part.share()) as other, closing(LayeredStore([other], make)) as fork:
            assert (fork.own_disk_bytes, fork.disk_bytes) == (0, part.disk_bytes)
        assert store.memory_bytes == sum(one.memory_bytes for one in store._layout.stores)


def test_parts_are_neither_freed_nor_written_to() -> None:
    part, records = frozen(5, 0)
    store = LayeredStore([part], in_memory)
    ids, own = fill(store, 4)
    for some in ([4], [4, 5], [5, 0]):
        with pytest.raises(StoreError, match=r"layer 3: record [04] frozen"):
            store.write(np.array(some), pattern(len(some), seed=9))
    assert torch.equal(read(store, np.r_[:5, ids]), torch.cat([records, own]))
    with pytest.raises(StoreError, match=r"record 7000 outside the"):
        store.write(np.array([7000]), pattern(1))
    store.free(np.array([0, 4, 6, 7]))
    assert set(store.allocate(2).tolist()) == {6, 7}
    assert torch.equal(read(store, np.arange(5)), records)
    store.free(np.arange(5))
    for wrong in ([-1], [10**6], [6, 6]):
        with pytest.raises(StoreError, match="layer 3"):
            store.free(np.array(wrong))


def test_errors_call_records_by_their_own_ids(tmp_path: Path) -> None:
    make = mapped(tmp_path)
    parts = [frozen(5, 0, make)[0], frozen(6, 1, make)[0]]
    with closing(LayeredStore(parts, make)) as store:
        ids, _ = fill(store, 3)
        for part, record in ((parts[1], 2), (store._layout.own, 1)):
            put(part, record * RECORD_BYTES, bytes(64))
        with pytest.raises(CorruptRecordError, match=r"layer 3: record 7 is not"):
            read(store, np.arange(11))
        with pytest.raises(CorruptRecordError, match=r"layer 3: record 12 is not"):
            read(store, ids)
        for wrong in (-1, 10**9):
            with pytest.raises(StoreError, match=rf"record {wrong} outside"):
                read(store, np.array([3, wrong]))
        store.freeze()
        with pytest.raises(CorruptRecordError, match=r"layer 3: record 12 is not"):
            read(store, ids)
        with closing(store.share()) as other, pytest.raises(CorruptRecordError, match=r"layer 3: record 12 is not"):
            read(other, ids)


def test_freezing_nothing_adds_no_part(tmp_path: Path) -> None:
    before = open_descriptors()
    part, _ = frozen(3, 0)
    made: list[FreezableStore] = []  # held here: nothing is closed by being forgotten

    def make() -> FreezableStore:
        made.append(MappedStore(tmp_path, RECORD_BYTES, "layer 3"))
        return made[-1]

    with closing(LayeredStore([part], make)) as store:
        store.freeze()
        assert store.parts == (part,)
        store.free(store.allocate(5))
        store.freeze()
        assert store.parts == (part,) and open_descriptors() == before
        assert store.allocate(1).tolist() == [3]


def test_no_room_for_the_own_store(tmp_path: Path) -> None:
    """Nothing has changed then, and it may be tried again."""
    answers = [StoreFullError(28, "layer 3: no room")]

    def make() -> FreezableStore:
        if answers:
            raise answers.pop()
        return in_memory()

    part, records = frozen(3, 0)
    store = LayeredStore([part], make)
    with pytest.raises(StoreFullError):
        store.allocate(1)
    assert torch.equal(read(store, np.arange(3)), records)
    assert store.allocate(1).tolist() == [3]


def test_a_share_that_fails_closes_what_it_made(tmp_path: Path) -> None:
    class NoShare(WrapperStore):
        def share(self) -> FreezableStore:
            raise StoreError(24, "no descriptor left")

    made: list[FreezableStore] = []  # held here: nothing is closed by being forgotten

    class Shares(WrapperStore):
        def share(self) -> FreezableStore:
            made.append(MappedStore(tmp_path, RECORD_BYTES, "layer 3"))
            return made[-1]

    good = Shares(frozen(3, 0)[0])
    before = open_descriptors()
    with closing(LayeredStore([good, NoShare(frozen(2, 1)[0])], in_memory)) as store:
        with pytest.raises(StoreError, match="no descriptor"):
            store.share()
        assert len(made) == 1 and open_descriptors() == before


def test_all_are_closed_when_one_raises(tmp_path: Path) -> None:
    class NoClose(WrapperStore):
        def close(self) -> None:
            raise StalledError(110, "stalled")

    before = open_descriptors()
    good = frozen(3, 0, lambda: MappedStore(tmp_path, RECORD_BYTES, "layer 3"))[0]
    store = LayeredStore([NoClose(frozen(2, 1)[0]), good], in_memory)
    with pytest.raises(StalledError):
        store.close()
    assert open_descriptors() == before


def test_parts_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match=r"\[8192, 4096\]"):
        LayeredStore([frozen(2, 0)[0], MemoryStore(4096, "layer 3")], in_memory)
    wrong = MemoryStore(4096, "layer 3")
    fill(wrong, 1)
    store = LayeredStore([frozen(2, 0)[0]], lambda: wrong)
    with pytest.raises(ValueError, match="8192 bytes, got 4096"):
        store.allocate(1)
    assert wrong.memory_bytes == 0, "it is closed"
    with pytest.raises(StoreError, match="made to fail"):  # a failing one is reported as it is
        fill(LayeredStore([frozen(2, 0)[0]], lambda: FaultyStore(in_memory(), "write", 1)), 1)


def test_direct_parts_are_left_to_other_threads(tmp_path: Path) -> None:
    engine = needs("direct", tmp_path)
    part, records = frozen(3, 0, lambda: open_store(engine, tmp_path, RECORD_BYTES, "layer 3"))
    with closing(LayeredStore([part], lambda: open_store(engine, tmp_path, RECORD_BYTES, "layer 3"))) as store:
        ids, own = fill(store, 2)
        assert store.start(np.array([2, 3]), aligned_empty(2, RECORD_BYTES)) is None and not store.advises
        assert torch.equal(read(store, np.r_[0:3, ids]), torch.cat([records, own]))


def test_adjacent_records_of_pinned_memory_are_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one chunk. They are written where they are; other stores, records and memory have no such place."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    store = MemoryStore(4096, "records", pinned=True)
    store._chunk_records = 4
    ids = store.allocate(8)
    into = store.in_place(ids[1:3])
    assert into is not None and into.shape == (2, 4096)
    into.fill_(7)
    store.write(ids[1:3], into)
    out = aligned_empty(2, 4096)
    store.read(ids[1:3], out)
    assert (out == 7).all() and store.written.tolist() == [False, True, True, *[False] * 5]
    for apart in (ids[[1, 3]], ids[3:5], ids[:0], ids[[2, 1]]):
        assert store.in_place(apart) is None
    plain = MemoryStore(4096, "plain")
    assert plain.in_place(np.arange(1)) is None is plain.pinned_runs(plain.allocate(1))
    store.write(ids, aligned_empty(8, 4096).copy_(torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 4096)))
    store.freeze()
    assert store.in_place(ids[:1]) is None

    def runs_of(store: Any, *some: int) -> list[list[int]]:
        return [run[:, 0].tolist() for run in store.pinned_runs(np.array(some, dtype=np.int64))]

    assert runs_of(store, 1, 2, 3, 4, 5, 7, 6, 6) == [[1, 2, 3], [4, 5], [7], [6], [6]] and runs_of(store) == []
    layered = LayeredStore([store], lambda: MemoryStore(4096, "own", pinned=True))
    more = layered.allocate(2)
    place = layered.in_place(more)
    assert layered.in_place(ids[:1]) is None and place is not None
    place.fill_(9)
    layered.write(more, place)
    layered.read(more, out)
    assert (out == 9).all() and runs_of(layered, 2, 3, *more.tolist()) == [[2, 3], [9, 9]]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    assert layered.pinned_runs(more) is None is store.pinned_runs(ids)
    layered.close()
