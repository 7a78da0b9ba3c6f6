"""Replicas in 4 bits of records."""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload_cache.config import OffloadConfig
from hf_offload_cache.errors import ContextError, StoreError
from hf_offload_cache.fetch import ByteRows, Storage
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels.low_bit import pack_replicas, unpacked
from hf_offload_cache.methods.abstract_tree import ChunkHistory, ReplicaFormat
from hf_offload_cache.stores import MemoryStore, aligned_empty

FORM = RecordFormat(1, 16, 1, 16, torch.float32, 64)
CPU = torch.device("cpu")
CONFIG: Any = types.SimpleNamespace(
    stored_bits=None,
    leave_together=1, num_recent=8, block_tokens=256, group_size=64, keeps_pages=False, keeps_replicas=True
)


@pytest.fixture(params=["memory", "direct"])
def storage(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Storage]:
    storage = Storage(OffloadConfig(engine=request.param), tmp_path)
    yield storage
    storage.close()


def history(storage: Storage, rows: int = 2, config: Any = CONFIG) -> ChunkHistory:
    return ChunkHistory(storage, FORM, rows, CPU, config, "layer 3")


def tokens(rows: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 1, count, 16, generator=generator) for _ in range(2))


def image(payloads: torch.Tensor) -> torch.Tensor:
    """What a replica of payloads (n, payload width) gives back."""
    form = ReplicaFormat.of(FORM)
    assert form is not None
    replicas = torch.empty(len(payloads), form.record_bytes, dtype=torch.uint8)
    pack_replicas(form.layout, payloads, replicas)
    return unpacked(form.layout.rows(replicas), 4).flatten(1)


def read(storage: Storage, store: Any, ids: np.ndarray) -> torch.Tensor:
    out = aligned_empty(ids.size, store.record_bytes)
    storage.prefetcher.read(store, ids, out).wait()
    return out


def assert_replicas(storage: Storage, held: ChunkHistory) -> int:
    """Every record of the history has a replica of its own, which is of its payload; how many there are."""
    assert held.replicas is not None
    records = np.unique(held.table.ids).astype(np.int64)
    replicas = held.replicas.locate(records)
    assert (replicas >= 0).all() and len(np.unique(replicas)) == len(replicas)
    assert np.array_equal(held.replicas.records, records)
    into = ByteRows(torch.full((records.size, FORM.payload_width), float("nan")))
    order = np.arange(records.size)[::-1].copy()
    held.replicas.unpack(read(storage, held.replicas.store, replicas), order, into, order)
    assert torch.equal(into.tensor, image(FORM.payload(read(storage, held.store, records))))
    return records.size


def test_what_a_replica_takes() -> None:
    forms = [
        RecordFormat(1, 64, 1, 64, torch.bfloat16, 64),  # SmolLM2's: 16 KiB
        RecordFormat(1, 128, 1, 128, torch.bfloat16, 64),  # an 8B shape's: 32 KiB
        RecordFormat(8, 128, 8, 128, torch.bfloat16, 64),
        RecordFormat(1, 64, 1, 64, torch.bfloat16, 16),  # 4 KiB
        RecordFormat(1, 2, 1, 4, torch.float32, 1024),
    ]
    found = [ReplicaFormat.of(form) for form in forms]
    assert [None if one is None else (one.layout.group, one.record_bytes) for one in found] == [
        (32, 8192), (32, 12288), (64, 73728), None, None,
    ]  # fmt: skip


def test_replicas_follow_their_records(storage: Storage) -> None:
    """Sealed in one piece and one by one, cut, sealed anew in freed records, and shared by rows."""
    held = history(storage)
    held.append(*tokens(2, 500))
    assert assert_replicas(storage, held) == 14
    for step in range(70):
        held.append(*tokens(2, 1, seed=step))
    assert assert_replicas(storage, held) == 16
    held.truncate(300)
    held.append(*tokens(2, 100, seed=99))
    assert assert_replicas(storage, held) == 12
    held.select_rows(torch.tensor([1, 1, 0]))
    held.append(*tokens(3, 64, seed=100))
    assert assert_replicas(storage, held) == 15
    held.select_rows(torch.tensor([1]))
    held.sweep(always=True)
    assert assert_replicas(storage, held) == 7
    held.close()


def test_what_half_precision_does_not_hold_has_none(storage: Storage) -> None:
    held = history(storage, rows=1)
    keys, values = tokens(1, 64 * 3 + 8)
    keys[0, 0, 70, 3], values[0, 0, 130, 3] = 65001.0, float("nan")
    held.append(keys, values)
    assert held.replicas is not None
    assert (held.replicas.locate(held.table.ids[0].astype(np.int64)) >= 0).tolist() == [True, False, False]


def test_a_write_that_fails_leaves_no_replica(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    held = history(storage)
    held.append(*tokens(2, 200))
    assert held.replicas is not None
    before, write, calls = held.replicas.records, storage.prefetcher.write, []

    def fails(store: Any, *given: Any) -> None:
        calls.append(store)
        if len(calls) == 4:  # the second replicas
            raise OSError("no")
        write(store, *given)

    monkeypatch.setattr(storage.prefetcher, "write", fails)
    monkeypatch.setattr("hf_offload_cache.history.position_history.piece_groups", lambda *given: 1)
    with pytest.raises(OSError, match="no"):
        held.append(*tokens(2, 300))
    assert np.array_equal(held.replicas.records, before) and held.length == 200
    monkeypatch.undo()
    held.append(*tokens(2, 300))
    assert assert_replicas(storage, held) == 14


@pytest.mark.parametrize("keeps", [True, False])
def test_captured_and_restored(storage: Storage, keeps: bool) -> None:
    """Replicas go with the records, but not into a history that keeps none; what is damaged is told."""
    held = history(storage)
    held.append(*tokens(2, 300))
    parts = held.freeze()
    sizes = [part.record_bytes for part in parts]
    assert sizes == [8192, 4096]
    live = held.live(parts)
    assert [one.sum() for one in live] == [8, 8]
    tree = held.capture()
    config = types.SimpleNamespace(**{**vars(CONFIG), "keeps_replicas": keeps})
    again = ChunkHistory.restore(storage, tree, [part.share() for part in parts], CPU, config, "layer 3")
    again.append(*tokens(2, 128, seed=1))
    if keeps:
        assert assert_replicas(storage, again) == 12
    assert len(again.freeze()) == (4 if keeps else 2)
    assert (again.capture()["replicas"] is not None) is keeps
    config.keeps_replicas = True
    of = tree["replicas"]["of"]
    for wrong in ({"more": 3}, {"of": None}, {"of": of[:60]}, {"of": torch.zeros(70)}, {"of": of + 9}, {"of": of + 1}):
        damaged = {**tree, "replicas": {**tree["replicas"], **wrong}}
        with pytest.raises(ContextError, match="layer 3 of the context does not hold together"):
            ChunkHistory.restore(storage, damaged, [part.share() for part in parts], CPU, config, "layer 3")


class Unwritten(MemoryStore):
    """Cannot be written to, the first time."""

    fails = True

    def write(self, ids: np.ndarray, records: torch.Tensor) -> None:
        if self.fails:
            self.fails = False
            raise StoreError(errno.EIO, "not written")
        super().write(ids, records)


def test_replicas_that_were_not_written_are_forgotten_by_a_freeze(storage: Storage) -> None:
    """The history is whole: nothing of it is refused, and what comes after has replicas."""
    held = history(storage, rows=1)
    assert held.replicas is not None
    unwritten = Unwritten(4096, "unwritten")
    storage.stores[storage.stores.index(held.replicas.store)] = unwritten
    held.replicas.store = unwritten
    held.append(*tokens(1, 64 * 3 + 8))
    with pytest.raises(StoreError, match="not written"):
        storage.prefetcher.flush(held.replicas.store)
    held.freeze()
    assert not held.replicas.records.size
    held.append(*tokens(1, 64))
    assert len(held.replicas.records) == 1


def test_damaged_replicas_that_are_to_be_merged_are_forgotten(tmp_path: Any) -> None:
    storage = Storage(OffloadConfig(engine="direct"), tmp_path)
    held = history(storage, rows=1)
    assert held.replicas is not None
    held.append(*tokens(1, 64 * 20 + 8))
    held.freeze()
    for turn in range(8):
        held.append(*tokens(1, 64, seed=turn))
        if turn == 2:
            storage.prefetcher.flush()
            newest = held.replicas.locate(held.replicas.records[-1:])
            layout = held.replicas.store._layout  # type: ignore[attr-defined]
            place = os.open(f"/proc/self/fd/{layout.own._file.fd}", os.O_WRONLY)
            os.pwrite(place, bytes(4096), (int(newest[0]) - layout.base) * 4096)
            os.close(place)
        held.freeze()
    assert 20 <= len(held.replicas.records) < 28 and held.units == 28
    records = held.replicas.records
    read(storage, held.replicas.store, held.replicas.locate(records))
    storage.close()
