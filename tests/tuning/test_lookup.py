"""Reuse rates and compression measured on text: against the cache's own counters, and against a real prefill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import LAYERS, tiny_llama, token_ids

from hf_offload_cache import DiskSwapCache, DiskSwapConfig, calibrate
from hf_offload_cache.methods.disk_swap import principal_directions
from hf_offload_cache.methods.disk_swap.tuning import Reader, Selections, recorded, replay
from hf_offload_cache.testing import open_descriptors

CONTEXT, STEPS = 640, 6
FIELDS: dict[str, Any] = {"num_selected": 32, "num_recent": 8}
SETTINGS = DiskSwapConfig(**FIELDS, summary_dtype="int8")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before


def run(capacity: int, group_size: int, batch: int = 1) -> tuple[Selections, int, int]:
    """What a real cache selects on the way of the reader's text, after a real prefill; groups resident and selected."""
    model = tiny_llama()
    ids = torch.stack([token_ids(CONTEXT + STEPS, seed) for seed in range(batch)])
    fields = {**FIELDS, "engine": "memory", "look_ahead": False, "summary_dtype": "int8"}
    with DiskSwapCache(model, group_size=group_size, reuse_capacity=capacity, **fields) as cache, torch.no_grad():
        model(input_ids=ids[:, :CONTEXT], past_key_values=cache)
        with recorded(cache) as selections:
            for position in range(CONTEXT, CONTEXT + STEPS):
                model(input_ids=ids[:, position : position + 1], past_key_values=cache)
        counters = cache.storage.counters
        return selections, counters.units_resident, counters.units_selected


@pytest.mark.parametrize(("capacity", "group_size", "batch"), [(16, 4, 1), (32, 4, 2), (64, 8, 1), (20, 8, 3)])
def test_replaying_gives_the_rate_that_the_cache_itself_counted(capacity: int, group_size: int, batch: int) -> None:
    selections, resident, selected = run(capacity, group_size, batch)
    first = sum(steps[0].size for steps in selections.values())
    assert 0 < resident < selected  # slots are empty in the first step only
    assert replay(selections, capacity, group_size) == pytest.approx(resident / (selected - first), abs=1e-12)


def test_one_run_serves_every_capacity() -> None:
    none, some = run(0, 4)[0], run(64, 4)[0]
    assert sorted(none) == sorted(some) == list(range(LAYERS))
    for layer_idx, steps in none.items():
        assert np.array_equal(steps, some[layer_idx])


def test_replay_of_what_is_known() -> None:
    same = {0: [np.array([[0, 1, 2, 3]])] * 3}
    turns = {0: [np.array([[0, 1]]), np.array([[2, 3]])] * 3}
    assert replay(same, 16, 4, num_sinks=0) == 1.0
    assert replay(same, 8, 4, num_sinks=0) == 0.5  # two slots keep two of four
    assert replay(same, 8, 4, num_sinks=4) == 0.75  # and the sinks' slot a third
    assert replay(same, 0, 4, num_sinks=4) == 0.0
    assert replay(turns, 8, 4, num_sinks=0) == 0.0
    assert replay(turns, 16, 4, num_sinks=0) == pytest.approx(0.8)  # all but the second step
    rows = {0: [np.array([[0], [1]]), np.array([[1], [0]])]}
    assert replay(rows, 8, 4, num_sinks=0) == 0.0  # rows share no records
    assert replay({0: [np.array([[0]])]}, 8, 4) == 0.0  # a first step alone is nothing to go by


@pytest.fixture(scope="module")
def reader() -> Reader:
    read = Reader(tiny_llama(), (4, 8), [0, 16, 32, 1024], SETTINGS)
    seen: list[tuple[float, str]] = []
    for seed in range(2):
        read.read(token_ids(CONTEXT + STEPS, seed), CONTEXT, lambda *step: seen.append(step))
    assert [share for share, _ in seen] == pytest.approx([0, 1 / 3, 2 / 3] * 2)
    return read


def test_the_reader_decodes_as_a_cache_that_was_prefilled(reader: Reader) -> None:
    for size in (4, 8):
        selections = run(0, size)[0]
        assert reader.rates[size][0] == [replay(selections, capacity, size) for capacity in (0, 16, 32, 1024)]


def test_the_reuse_table_is_over_the_texts(reader: Reader) -> None:
    table, rates = reader.reuse_table(), np.array(reader.rates[4])
    assert reader.samples == 2
    assert table.capacities == [0, 16, 32, 1024]
    assert table.mean[4] == pytest.approx(rates.mean(0).tolist(), abs=1e-6)
    assert table.least[4] == pytest.approx(rates.min(0).tolist(), abs=1e-6)
    assert table.most[4] == pytest.approx(rates.max(0).tolist(), abs=1e-6)
    assert table.deviation[4] == pytest.approx(rates.std(0).tolist(), abs=1e-6)
    assert table.mean[4][0] == 0.0
    assert table.mean[4] == sorted(table.mean[4])
    assert table.deviation[4][2] > 0


def test_the_adapter_is_calibrates(reader: Reader) -> None:
    expected = calibrate(tiny_llama(), [token_ids(CONTEXT + STEPS, seed)[:CONTEXT] for seed in range(2)], rank=8)
    found = reader.moments.projections(8)
    assert sorted(found) == sorted(expected.projections)
    for layer_idx, projection in found.items():
        torch.testing.assert_close(projection, expected.projections[layer_idx])


def test_energy_is_what_the_projection_keeps(reader: Reader) -> None:
    table = reader.compression_table([16, 8, 2])
    assert (table.key_bytes, table.component_bytes, table.sizes) == (2 * 16 * 4, 1, [16, 8, 2])
    shares = []
    for moment in reader.moments.by_layer.values():
        projection = principal_directions(moment, 8)
        shares.append(float(((moment @ projection) * projection).sum() / moment.trace()))
    assert table.kept[1] == pytest.approx(np.mean(shares), rel=1e-4)
    assert table.least_kept[1] == pytest.approx(min(shares), rel=1e-4)
    assert table.kept == sorted(table.kept, reverse=True)


def test_recording_changes_nothing_and_ends() -> None:
    with DiskSwapCache(tiny_llama(), engine="memory") as cache:
        assert cache.selecting is not None
        with pytest.raises(KeyError), recorded(cache):
            assert cache.selecting.watch is not None
            raise KeyError
        assert cache.selecting.watch is None


def test_an_exact_cache_has_nothing_to_record() -> None:
    cache = DiskSwapCache(tiny_llama(), engine="memory", exact=True)
    with cache, pytest.raises(ValueError, match="selects nothing"), recorded(cache):
        raise AssertionError("entered")
