"""What is measured, with a clock and a store of the test's own; no figure here is this machine's."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama, token_ids

from hf_offload_cache import DiskSwapConfig
from hf_offload_cache.errors import StoreError, UnsupportedModelError
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.methods.disk_swap import DiskSwapCache
from hf_offload_cache.methods.disk_swap.tuning import profile, random_keys_and_values, two_blocks
from hf_offload_cache.stores import MemoryStore
from hf_offload_cache.testing import open_descriptors

FORM = RecordFormat(2, 16, 2, 16, torch.float32, 4)
"""256 bytes a token: 16 fill a block."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before


class Clock:
    """Stands for the module `time`: goes on by what a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def silent(fraction: float, detail: str) -> None:
    assert 0 <= fraction <= 1
    assert detail


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Reads take a millisecond a record and a tenth of one a KiB."""
    own = Clock()
    read = MemoryStore.read

    def slow(store: MemoryStore, ids: Any, out: Any) -> None:
        read(store, ids, out)
        own.now += len(ids) * (1e-3 + store.record_bytes / 1024 * 1e-4)

    monkeypatch.setattr(MemoryStore, "read", slow)
    monkeypatch.setattr(profile, "time", own)
    monkeypatch.setattr(profile, "_LEAST_FILE", 1 << 20)
    return own


def test_reads_are_timed_by_size_and_number(clock: Clock, tmp_path: Path) -> None:
    found = profile.measure_io(FORM, {8: 30, 16: 40, 32: 20}, "memory", tmp_path, 0.1, silent, points=4)
    assert found.record_bytes == {8: 4096, 16: 4096, 32: 8192}
    assert found.counts == {4096: [1, 3, 12, 40], 8192: [1, 3, 7, 20]}
    assert found.seconds[4096] == pytest.approx([count * 1.4e-3 for count in found.counts[4096]])
    assert found.time(32, 11) == pytest.approx(11 * 1.8e-3)


def test_reads_are_of_other_records_each_time(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    read = MemoryStore.read
    monkeypatch.setattr(MemoryStore, "read", lambda store, ids, out: (asked.append(tuple(ids)), read(store, ids, out)))
    profile.measure_io(FORM, {16: 128}, "memory", tmp_path, 0.1, silent, points=1)
    assert all(len(set(ids)) == len(ids) and list(ids) == sorted(ids) for ids in asked)
    large = [ids for ids in asked if len(ids) == 128]
    assert len(large) >= 4
    assert len(set(large)) == len(large)
    assert max(max(ids) for ids in large) >= 1024  # spread over a file many times as large


def test_a_failed_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(store: MemoryStore, ids: Any, out: Any) -> None:
        raise StoreError(5, "no more")

    monkeypatch.setattr(MemoryStore, "read", broken)
    monkeypatch.setattr(profile, "_LEAST_FILE", 1 << 20)
    with pytest.raises(StoreError, match="no more"):
        profile.measure_io(FORM, {16: 4}, "memory", tmp_path, 0.1, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_real_scratch_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_LEAST_FILE", 1 << 20)
    names: list[Any] = []
    found = profile.measure_io(
        FORM, {16: 8}, "mapped", tmp_path, 0.0, lambda *step: names.extend(tmp_path.iterdir()), points=2
    )
    assert names == []
    assert found.counts == {4096: [1, 8]}
    assert all(seconds > 0 for seconds in found.seconds[4096])


SETTINGS = DiskSwapConfig(num_selected=32, num_recent=8)
AXES: dict[str, Any] = {"batches": [1, 2], "contexts": [600, 1200], "sizes": [8, 16], "capacities": [0, 32, 64]}


def model_profile(clock: Any, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    monkeypatch.setattr(profile, "time", clock)
    axes = {**AXES, **changed}
    return profile.measure_model(
        tiny_llama(), FORM, **axes, settings=SETTINGS, group_size=4, seconds=0.0, on_step=silent
    )


def test_a_block_is_timed_from_its_entry_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on with each attention, by what tells the point: rows, context, rank and slots."""
    clock = Clock()
    attend = DiskSwapCache.layer_class.decode

    def slow(layer: Any, *args: Any, **kwargs: Any) -> Any:
        clock.now += layer.batch + layer.length // 100 * 100 * layer.selecting.settings.rank * 1e-5
        clock.now += layer.selecting.settings.reuse_capacity * 1e-3
        return attend(layer, *args, **kwargs)

    monkeypatch.setattr(DiskSwapCache.layer_class, "decode", slow)
    found = model_profile(clock, monkeypatch)
    for batch in (1, 2):
        for context in (600, 1200):
            for rank in (8, 16):
                for capacity in (0, 32, 64):
                    expected = batch + context * rank * 1e-5 + capacity * 1e-3
                    assert found.time(batch, context, rank, capacity) == pytest.approx(expected)


def test_contexts_that_memory_does_not_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"SC_AVPHYS_PAGES": 8 * 2 * 2 * 600 * 256 // 64, "SC_PAGE_SIZE": 64}
    monkeypatch.setattr(profile.os, "sysconf", page.__getitem__)
    assert model_profile(time, monkeypatch, sizes=[8], capacities=[32]).contexts == [600]
    page["SC_AVPHYS_PAGES"] = 1
    assert model_profile(time, monkeypatch, sizes=[8], capacities=[32], batches=[1]).contexts == [600]


def test_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = copy.deepcopy(model.config.to_dict()), [p.data_ptr() for p in model.parameters()]
    model_profile(time, monkeypatch, batches=[1], contexts=[600], sizes=[8], capacities=[32])
    assert (model.config.to_dict(), [p.data_ptr() for p in model.parameters()]) == before
    assert len(model.model.layers) == 3
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_two_blocks_are_the_models_own() -> None:
    model = tiny_llama(1)  # asking for hidden states leaves hooks of transformers' own behind
    twin = two_blocks(model)
    ids = token_ids(20)[None]
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[2]
        torch.testing.assert_close(twin(ids).last_hidden_state, model.model.norm(hidden))
    assert {p.data_ptr() for p in twin.parameters()} <= {p.data_ptr() for p in model.parameters()}
    assert (twin.config.num_hidden_layers, model.config.num_hidden_layers) == (2, 3)


def test_one_block_is_not_enough() -> None:
    with pytest.raises(UnsupportedModelError, match="two or more"):
        two_blocks(tiny_llama(num_hidden_layers=1))


def test_made_up_contexts_are_the_same_again_and_never_zeros() -> None:
    keys, values = random_keys_and_values(FORM, 200, torch.device("cpu"), 3)
    assert keys.shape == values.shape == (1, 2, 200, 16)
    again = random_keys_and_values(FORM, 200, torch.device("cpu"), 3)
    assert torch.equal(keys, again[0])
    assert torch.equal(values, again[1])
    assert bool((keys != 0).all())
    assert not torch.equal(keys, random_keys_and_values(FORM, 200, torch.device("cpu"), 4)[0])
