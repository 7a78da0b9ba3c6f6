"""Layers of `AbstractTreeCache` that differ, its tiers, and its early steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_cache import checked
from harness import COMMON, build, generate, prompt
from long_llama import long_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_offload_cache import AbstractTreeCache, AbstractTreeConfig
from hf_offload_cache.errors import ConfigError, StoreError
from hf_offload_cache.fetch import Fetcher, MostUsed
from hf_offload_cache.model import Geometry

LENGTH = 700
FIELDS: dict[str, Any] = {"chunk_size": 16, "num_selected": 48, "num_opened": 96, "num_recent": 8, "num_sinks": 3}
FIELDS["dense_layers"] = 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dense_layers": -1}, "dense_layers must be at least 0"),
        ({"dense_layers": 1.5}, "dense_layers must be a whole number, or a share .* use dense_layers=2"),
        ({"resident_layers": -1}, "resident_layers must be at least 0"),
        ({"dense_share": 1.5}, "dense_share must be a number above 0, at most 1"),
        ({"dense_chunk_size": 24}, "dense_chunk_size must be a power of two from 2 to 1024.*use dense_chunk_size=16"),
        ({"chunk_size": []}, "chunk_size must have one value for each offloaded layer, got an empty list"),
        ({"chunk_size": [64, 24]}, "chunk_size must be a power of two from 2 to 1024.*use chunk_size=16"),
        ({"chunk_size": [64], "dense_chunk_size": 8}, "dense_chunk_size must be left out if chunk_size has"),
        ({"chunk_size": [128, 16], "block_tokens": 64}, "at least the largest chunk .128."),
        ({"dense_chunk_size": 128, "block_tokens": 64}, "use block_tokens=128"),
        ({"early_steps": -1}, "early_steps must be at least 0"),
        ({"host_slots": "much"}, "host_slots must be a number of bytes or a size"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AbstractTreeConfig(**fields)


def test_chunk_sizes_for_fewer_layers_than_there_are() -> None:
    with pytest.raises(ConfigError, match="chunk_size must have one value for each offloaded layer, got 2"):
        AbstractTreeCache(long_model(), chunk_size=[64, 64])


def test_what_applies_to_each_layer() -> None:
    """Dense ones have small chunks, the least where they are resident, and no fewer tokens than the others."""
    config = AbstractTreeConfig(num_selected=400).for_layers(30)
    first, third = config.of_layer(1), config.of_layer(2)
    assert (first.chunk_size, first.group_size, third.chunk_size) == (8, 8, 64) and third is config
    assert [first.attended(held) for held in (9001, 500)] == [4501, 400]
    assert (first.tokens_fetched(9000), third.tokens_fetched(9000)) == (4500, 1600)
    assert (first.most_tokens_fetched(9000), third.most_tokens_fetched(9000)) == (4500, 3200)
    on_disk = AbstractTreeConfig(resident_layers=0, dense_layers=3)
    assert [on_disk.of_layer(place).chunk_size for place in range(4)] == [16, 16, 16, 64]
    beyond = AbstractTreeConfig(resident_layers=3, dense_layers=0).of_layer(2)
    assert (beyond.chunk_size, beyond.attended(9000)) == (64, 400) and beyond.reuse_capacity > 2**32
    assert AbstractTreeConfig(chunk_size=4, dense_layers=1).of_layer(0).chunk_size == 4


@pytest.mark.parametrize(
    ("dense", "layers", "count"),
    [(None, 3, 0), (None, 8, 0), (None, 12, 1), (None, 30, 2), (None, 32, 2), (0.5, 3, 2), (1.0, 3, 3), (2, 3, 2)],
)
def test_dense_layers_are_a_share_of_the_offloaded_ones(dense: float | None, layers: int, count: int) -> None:
    config = AbstractTreeConfig() if dense is None else AbstractTreeConfig(dense_layers=dense)
    found = config.for_layers(layers)
    assert (found.dense_layers, found.residents) == (count, count)
    assert found.for_layers(1000) is found


def test_a_model_of_few_offloaded_layers_takes_less_than_a_dynamic_cache(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
    kinds = ["sliding_attention", "full_attention"] * 3
    small = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 8192, "layer_types": kinds}
    model, length = build(Gemma3ForCausalLM, Gemma3TextConfig(**{**COMMON, **sizes, **small})), 3500
    ids = prompt(model, 1, length)
    with AbstractTreeCache(model, path=tmp_path) as cache, torch.no_grad():
        assert cache.config.dense_layers == 0
        model(ids, past_key_values=cache, logits_to_keep=1)
        for step in range(3):
            model(ids[:, step : step + 1], past_key_values=cache)
        report = cache.report()
    assert 0 < report.memory_bytes <= report.peak_memory_bytes < report.full_kv_bytes
    plans = [
        AbstractTreeCache.plan(Geometry.of(model), AbstractTreeConfig(**fields), length, 1).peak_bytes
        for fields in ({}, {"dense_layers": 2}, {"dense_layers": 0})
    ]
    assert plans[0] == plans[2] < plans[1]


def test_what_is_left_open_follows_what_is_changed() -> None:
    config = AbstractTreeConfig(dense_layers=2)
    assert (config.residents, config.dense_size) == (2, 8)
    assert dataclasses.replace(config, dense_layers=0).residents == 0
    assert dataclasses.replace(config, resident_layers=0).dense_size == 16
    assert AbstractTreeConfig.load(config, {"chunk_size": 32}).group_size == 32
    assert AbstractTreeConfig.load(config, {"chunk_size": (64, 32)}).of_layer(1).chunk_size == 32
    assert config.as_saved().dense_chunk_size == 8


def test_each_layer_attends_to_its_share_in_its_chunks() -> None:
    cls, model = checked(AbstractTreeCache), long_model()
    with cls(model, engine="memory", early_steps=0, **FIELDS) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        sizes = [layer.history.form.group_size for layer in cache.offloaded]
        held = [layer.history.units * size for layer, size in zip(cache.offloaded, sizes, strict=True)]
    assert sizes == [8, 8, 16]
    # two key heads with chunks of their own, and one chunk for the sinks
    expected = [-(-(held[0] // 2) // 8) + 1] * 2 + [96 // 16 + 1]
    widths = [units.shape for _, units in cls.gathers]
    assert widths == [(2, width) for width in expected] * 3


def held_in(tier: Any) -> int:
    """Records."""
    return int((tier.locate(np.arange(4096)) >= 0).sum())


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_resident_layers_are_read_once(share: float) -> None:
    model, read = long_model(), []
    fields = {**FIELDS, "dense_share": share, "reuse_capacity": 0, "look_ahead": False}
    with AbstractTreeCache(model, **fields) as cache, torch.no_grad():
        ids = prompt(model, 1, LENGTH)
        model(ids, past_key_values=cache)
        for step in range(3):  # after which a chunk is sealed, which is new
            cache.storage.prefetcher.flush()  # what is still to be written is not read
            before = [layer.history.store.bytes_read for layer in cache.offloaded]
            model(ids[:, step : step + 1], past_key_values=cache)
            after = [layer.history.store.bytes_read for layer in cache.offloaded]
            read.append([late - early for early, late in zip(before, after, strict=True)])
        slots = [layer.fetcher.tiers[0] for layer in cache.selective]
        units = [layer.history.rows * layer.history.units for layer in cache.selective]
        assert [held_in(tier) for tier in slots[:2]] == units[:2]
    assert all(read[0]) and all(first == second == 0 and third for first, second, third in read[1:])
    assert [count <= tier.capacity <= 1.2 * count for tier, count in zip(slots, units, strict=True)] == [
        True, True, False,
    ]  # fmt: skip


def test_a_resident_layer_that_cannot_be_read_as_a_whole_brings_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails before the step costs nothing but the slots' filling, which the next step tries again."""
    model = long_model()
    ids = prompt(model, 1, LENGTH)
    with AbstractTreeCache(model, engine="memory", **FIELDS) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        tried: list[str] = []

        def fail(fetcher: Fetcher, history: Any, choice: Any) -> None:
            tried.append("failed")
            raise StoreError("no")

        monkeypatch.setattr(Fetcher, "bring", fail)
        layer = cache.selective[0]
        layer.keep_all()
        assert tried == ["failed"] and held_in(layer.fetcher.tiers[0]) == 0
        monkeypatch.undo()
        layer.keep_all()
        assert held_in(layer.fetcher.tiers[0]) == layer.history.rows * layer.history.units


def test_what_is_used_often_stays_in_host_memory() -> None:
    model, hits = long_model(), []
    fields = {**FIELDS, "dense_layers": 0, "reuse_capacity": 32, "early_steps": 0}
    geometry = Geometry.of(model)
    payload = 16 * 2 * geometry.layers[0].key_dim * geometry.dtype.itemsize
    for host in (None, 3 * 20 * payload):
        with AbstractTreeCache(model, engine="memory", host_slots=host, **fields) as cache:
            plan = AbstractTreeCache.plan(geometry, cache.config, LENGTH + 10, 1).decode
            generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=10)
            tiers = [layer.fetcher.tiers for layer in cache.selective]
            assert all(len(one) == 1 and isinstance(one[0]._table._policy, MostUsed) for one in tiers)
            assert [one[0].capacity for one in tiers] == [2 * (32 // 16 + 1) + (20 if host else 0)] * 3
            assert cache.storage.account.by_owner["reuse slots"] == plan["reuse slots"]
            hits.append(cache.report().hit_rate)
    assert hits[1] > hits[0] + 0.2


def test_an_earlier_name_of_host_slots_works_on_a_cpu() -> None:
    """There `host_memory` is no limit of its own."""
    model = long_model()
    with AbstractTreeCache(model, host_memory="1MiB") as cache:
        assert (cache.config.host_slots, cache.config.host_memory) == ("1MiB", None)
    with AbstractTreeCache.for_budget(model, "40MiB", max_context=LENGTH, host_memory="1MiB") as cache:
        assert (cache.config.host_slots, cache.config.host_memory) == ("1MiB", None)
    with pytest.raises(ConfigError, match="host_memory='1MiB' is a limit for a model on a GPU"):
        AbstractTreeCache(model, host_memory="1MiB", host_slots="1MiB")


def test_slots_follow_what_is_held() -> None:
    model, ids = long_model(), prompt(long_model(), 1, LENGTH)
    payload = 16 * 2 * 16 * 4
    known: dict[str, Any] = {"resident_layers": 1, "max_context": LENGTH, "host_slots": 2 * 40 * payload}
    fields = {**FIELDS, "dense_layers": 0, "reuse_capacity": 0, **known}
    for begin, first in ((300, 40), (120, 16)):  # at the second one two key heads have 7 chunks, and room for 8
        with AbstractTreeCache(model, engine="memory", early_steps=0, **fields) as cache, torch.no_grad():
            model(ids[:, :begin], past_key_values=cache)
            capacities = []
            for step in range(begin, 560):
                model(ids[:, step : step + 1], past_key_values=cache)
                capacities.append([layer.fetcher.tiers[0].capacity for layer in cache.selective])
        steps = [2 * 16, 2 * 32, 2 * (LENGTH // 16)]
        assert sorted({resident for resident, *_ in capacities}) == steps[1 if begin == 300 else 0 :]
        assert (capacities[0][1:], capacities[-1][1:]) == ([first] * 2, [40, 40])


def test_host_memory_beside_a_device() -> None:
    """Slots of their own, in the plan as "host slots"; no more than there are chunks."""
    geometry = Geometry.uniform(30, 9, 3, 64, device="cuda")
    config = AbstractTreeConfig(host_slots="64MiB", reuse_capacity=256, max_context=8192)
    planned = AbstractTreeCache.plan(geometry, config, 8192, 1)
    chunk = 64 * 2 * 64 * 2
    dense = 3 * (8192 // 8) * 8 * 2 * 64 * 2
    assert planned.host_decode["host slots"] == 28 * (2**26 // 28 // chunk) * chunk  # resident layers need none
    assert planned.decode["reuse slots"] == 28 * 3 * 5 * chunk + 2 * dense and "host slots" not in planned.decode
    without = AbstractTreeCache.plan(geometry, AbstractTreeConfig(reuse_capacity=256), 8192, 1)
    assert "host slots" not in without.host_decode


@pytest.mark.gpu
def test_two_tiers_on_a_gpu() -> None:
    """Gathers are what came; what the device has no slots for stays in host memory; both are in the account."""
    cls, model, hits = checked(AbstractTreeCache), long_model().to("cuda"), []
    fields = {**FIELDS, "dense_layers": 0, "reuse_capacity": 32, "early_steps": 0}
    for host in (None, "1MiB"):
        with cls(model, engine="memory", host_slots=host, **fields) as cache, torch.no_grad():
            ids = prompt(model, 1, LENGTH).to("cuda")
            model(ids, past_key_values=cache)
            for step in range(8):
                model(ids[:, step : step + 1], past_key_values=cache)
            tiers = [layer.fetcher.tiers for layer in cache.selective]
            assert [len(one) for one in tiers] == [2 if host else 1] * 3
            assert ("host slots" in cache.storage.account.by_owner) == bool(host)
            assert all(held_in(tier) for one in tiers for tier in one)
            hits.append(cache.report().hit_rate)
    assert hits[1] > hits[0] + 0.2


def test_early_steps_look_into_twice_as_many() -> None:
    cls, model = checked(AbstractTreeCache), long_model()
    fields = {**FIELDS, "dense_layers": 0, "early_steps": 3, "look_ahead": True}
    with cls(model, engine="memory", **fields) as cache, torch.no_grad():
        ids = prompt(model, 1, LENGTH)
        for turn in range(2):
            cls.gathers.clear()
            model(ids[:, : 400 + 300 * turn][:, cache.tokens and -9 :], past_key_values=cache)
            held: list[int] = []
            for step in range(6):
                model(ids[:, step : step + 1], past_key_values=cache)
                held.append(cache.storage.account.by_owner["selection"])
            widths = [units.shape[1] for _, units in cls.gathers]
            assert widths == [13] * 9 + [7] * 9
            assert held[0] > held[3] == held[5]


def test_early_steps_are_in_the_plan() -> None:
    """A wide view and what is kept of it, at once; chunks that are attended to whole are not more."""
    model, geometry = long_model(), Geometry.of(long_model())
    fields = {**FIELDS, "dense_layers": 0, "num_selected": 200, "num_opened": 256, "look_ahead": False}
    fields["early_steps"] = 1
    with AbstractTreeCache(model, engine="memory", **fields) as cache, torch.no_grad():
        plan = AbstractTreeCache.plan(geometry, cache.config, LENGTH + 8, 1).decode
        ids, owners = prompt(model, 1, LENGTH), ("staging", "selection", "kept")
        model(ids, past_key_values=cache)
        assert cache.selecting is not None
        held = []
        account = cache.storage.account.by_owner
        cache.selecting.watch = lambda layer_idx, choice: held.append([account.get(owner, 0) for owner in owners])
        for step in range(2):
            model(ids[:, step : step + 1], past_key_values=cache)
    wanted = [plan[owner] for owner in owners]
    assert max(map(sum, held)) <= sum(wanted) and all(0 < one[2] <= wanted[2] for one in held)
    assert held[0][1] > held[-1][1]
    whole = AbstractTreeConfig(num_selected=200, num_opened=200)
    assert whole.most_tokens_fetched(LENGTH) == whole.tokens_fetched(LENGTH) == 200


def test_early_steps_go_on_in_what_is_forked_and_opened(tmp_path: Path) -> None:
    model, ids = long_model(), prompt(long_model(), 1, LENGTH)

    def steps(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(ids[:, :1], past_key_values=cache).logits for _ in range(4)])

    fields = {**FIELDS, "dense_layers": 0, "early_steps": 4}
    with AbstractTreeCache(model, path=tmp_path, **fields) as cache:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        cache.save(tmp_path / "context")
        with cache.fork() as twin:
            found = [steps(twin)]
        with AbstractTreeCache.open(tmp_path / "context", model) as opened:
            found.append(steps(opened))
        assert opened.config.early_steps == 4
        found.append(steps(cache))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("candidates", [False, True])
def test_a_budget_is_kept_with_all_of_it(candidates: bool, tmp_path: Path) -> None:
    """Dense layers in memory, host memory, early steps, candidates: no more than was planned, at any time."""
    model = long_model()
    fields = {"num_recent": 8, "num_selected": 48, "chunk_size": 16, "host_slots": "16KiB"}
    fields["dense_layers"] = 2
    arguments: dict[str, Any] = {"prompt_lookup_num_tokens": 4} if candidates else {}
    limits: dict[str, Any] = {"max_context": LENGTH + 64, "max_batch": 1}
    ids = prompt(model, 1, LENGTH)
    with AbstractTreeCache.for_budget(model, "3/1", path=tmp_path, **limits, **fields) as cache:
        assert (cache.config.dense_layers, cache.config.residents) == (2, 2)
        plan = AbstractTreeCache.plan(Geometry.of(model), cache.config, LENGTH + 64, 1)
        generate(model, cache, ids, max_new_tokens=24, **arguments)
        for _ in range(0 if candidates else 2):
            follow = torch.cat([cache.input_ids, prompt(model, 1, 9, seed=5)], 1)
            generate(model, cache, follow, max_new_tokens=4, **arguments)
        assert cache.report().peak_memory_bytes <= plan.peak_bytes <= int(cache.config.memory)
        assert cache.storage.account.pressed == 0
    with AbstractTreeCache.for_budget(model, "1/2", path=tmp_path, **limits, num_recent=8, num_selected=48) as small:
        assert (small.config.dense_layers, small.config.residents) == (0, 0)


def test_layers_that_differ_in_a_context(tmp_path: Path) -> None:
    """Saved, opened in less memory, opened to be exact, and refused with other chunks."""
    model, sizes = long_model(), [8, 32, 16]
    fields: dict[str, Any] = {**FIELDS, "chunk_size": sizes, "dense_layers": 1}

    def answer(cache: Any) -> torch.Tensor:
        question = torch.cat([cache.input_ids, prompt(model, 1, 9, seed=8)], 1)
        return generate(model, cache, question, max_new_tokens=6).logits

    def of_layers(cache: Any) -> Sequence[int]:
        return [layer.history.form.group_size for layer in cache.offloaded]

    with AbstractTreeCache(model, path=tmp_path, **fields) as cache:
        generate(model, cache, prompt(model, 1, LENGTH), max_new_tokens=4)
        cache.save(tmp_path / "context")
        with AbstractTreeCache.open(tmp_path / "context", model, path=tmp_path, chunk_size=tuple(sizes)) as opened:
            assert of_layers(opened) == sizes and torch.equal(answer(opened), answer(cache))
    with AbstractTreeCache.open(tmp_path / "context", model, memory="5MiB", max_context=2 * LENGTH) as less:
        assert of_layers(less) == sizes
        answer(less)
        assert less.report().peak_memory_bytes <= 5 * 2**20
    with AbstractTreeCache.open(tmp_path / "context", model, exact=True) as exact:
        assert of_layers(exact) == sizes and exact.tokens == LENGTH + 3
        answer(exact)
    with pytest.raises(ConfigError, match="chunk_size is fixed in a saved context"):
        AbstractTreeCache.open(tmp_path / "context", model, chunk_size=64)
    with pytest.raises(ConfigError, match="dense_layers is fixed in a saved context"):
        AbstractTreeCache.open(tmp_path / "context", model, dense_layers=2)


def test_a_resident_layer_reads_nothing_to_choose_by_and_has_no_replicas(tmp_path: Path) -> None:
    """Its abstracts are in memory, wherever the others' are; the others' are read."""
    model = long_model()
    fields = {**FIELDS, "abstracts": "disk", "compress": 1.0, "dense_layers": 1, "early_steps": 0, "look_ahead": False}
    with AbstractTreeCache(model, path=tmp_path, **{**fields, "chunk_size": 64}) as cache, torch.no_grad():
        ids = prompt(model, 1, LENGTH)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        first, *others = (layer.history for layer in cache.selective)
        assert first.pages is None and first.replicas is None
        assert all(history.pages is not None and history.replicas is not None for history in others)
        looked = cache.report().look_bytes
        model(ids[:, :1], past_key_values=cache)
        pages = sum(history.pages.table.num_groups * history.rows for history in others)
        assert cache.report().look_bytes - looked == pages * others[0].form.record_bytes


def test_what_a_budget_costs_is_told() -> None:
    """Fewer that are looked into, fewer that are attended to, a dense layer that is none; not what the user chose."""
    geometry = Geometry.uniform(30, 9, 3, 64, dtype=torch.bfloat16)

    def told(part: int, **fields: Any) -> list[str]:
        config = AbstractTreeCache.fit(geometry, geometry.full_kv_bytes(8192, 1) // part, 8192, 1, fields)
        return AbstractTreeCache.shortfalls(config, geometry, fields)

    assert told(4) == told(13) == []
    (looks,) = told(32)
    assert "examines" in looks and "for 400; examining 1600" in looks
    assert any("a step selects" in line for line in told(40))
    assert told(26, num_opened=500) == []
    (dense,) = told(13, dense_layers=2)
    assert "no room for dense_layers=2" in dense
