"""The replay: what it puts in is what comes out, overlap off is off, and the figures made of its rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval import bench_decode, compare, contenders, profiles, speed_targets, synthetic
from eval import replay as replays
from eval.contenders import FULL, IN_MEMORY, JUDGED_WHOLE, METHODS, NO_REUSE, OWN, PAGED, RELOADS, SINGLE, SLOW, Setting
from eval.studies import speed_budget, speed_group, speed_latency, speed_throughput
from eval.studies.common import Study, main
from hf_offload_cache import DiskSwapCache
from hf_offload_cache.fetch import Choice
from hf_offload_cache.testing import ThrottledStore

TINY = synthetic.Shape(layers=2, heads=4, kv_heads=2, head_dim=64, hidden=32, intermediate=64, vocabulary=128)
FIELDS = {"num_selected": 64, "reuse_capacity": 64, "rank": 16, "group_size": 4, "look_ahead": False}
MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def setting_of(path: Path, tokens: int = 1024, **others: Any) -> Setting:
    return Setting(TINY, tokens, **{"memory": None, "path": str(path), "fields": FIELDS, **others})


def gathered(cache: Any, layer_idx: int, groups: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of groups (B, M), by the way of a decoding step, the tail left out."""
    layer = cache.offloaded[layer_idx]
    fetched = layer.fetcher.gather(layer.history, Choice(groups))
    return layer.history.form.split(fetched.entries[:, : fetched.chosen])


def test_what_is_gathered_is_what_was_put_in(tmp_path: Path) -> None:
    """Bit by bit, from the disk and again from the slots; every row has its own content."""
    setting = setting_of(tmp_path, batch=3)
    one = replays.replay(OWN, setting)
    groups = np.array([[0, 3, 200], [1, 3, 7], [5, 6, 247]])
    try:
        for layer_idx in (0, 1):
            keys, values = synthetic.context(TINY, 1024, layer_idx, 3)
            positions = torch.from_numpy((groups[:, :, None] * 4 + np.arange(4)).reshape(3, -1))
            for _ in range(2):
                found = gathered(one.cache, layer_idx, groups)
                for own, whole in zip(found, (keys, values), strict=True):
                    for row in range(3):
                        assert torch.equal(own[row], whole[row][:, positions[row]])
            assert not torch.equal(keys[0], keys[1])
        assert one.own is not None and one.own.storage.stores[0].reads > 0
    finally:
        one.close()


def test_rows_are_one_sequence_further_on() -> None:
    """Row i begins `i * SHIFT` tokens later; nothing is zero; rows share memory."""
    keys, values = synthetic.context(TINY, 700, 1, 3)
    for tensor in (keys, values):
        assert tensor.shape == (3, 2, 700, 64)
        assert torch.equal(tensor[2, :, : 700 - 509], tensor[1, :, 509:])
        assert (tensor.abs().amax((1, 3)) > 0).all()
        assert tensor.untyped_storage().nbytes() < 2 * tensor.nbytes
    first, _ = synthetic.random_keys_and_values(TINY, 700 + 2 * 509, 1)
    assert torch.equal(keys[0], first[0, :, :700])


def test_records_of_rows_are_their_own(tmp_path: Path) -> None:
    one = replays.replay(OWN, setting_of(tmp_path, batch=2))
    try:
        assert one.own is not None
        ids = one.own.offloaded[0].history.table.ids
        assert len(np.unique(ids)) == ids.size == 2 * (1024 - 32) // 4
    finally:
        one.close()


def test_overlap_off_reads_only_what_is_missing_and_waits(tmp_path: Path) -> None:
    """Nothing is read ahead: what is resident when asked was resident before; the store's seconds and bytes are those
    of the reads. After it the cache reads ahead again."""
    one = replays.replay(OWN, replace(setting_of(tmp_path), fields={**FIELDS, "look_ahead": True, "reuse_capacity": 0}))
    try:
        assert one.own is not None
        one.steps(3, keep=False)
        one.own.storage.reset_counters()
        one.steps(4, "off")
        report, taken = one.own.report(), one.taken["off"]
        assert report.prefetch_hit_rate == report.hit_rate == 0.0
        # 16 groups and the sinks' in each of two layers, each in a record of its own
        assert taken.bytes_read == [2 * 17 * one.own.storage.stores[0].record_bytes] * 4
        assert len(taken.store) == 4 and all(seconds > 0 for seconds in taken.store)
        assert "read" not in vars(one.own.storage.prefetcher) and "ahead" not in vars(one.own.offloaded[0])
        one.own.storage.reset_counters()
        one.steps(4, "on")
        found = one.own.report().prefetch_hit_rate
        assert found is not None and found > 0.2
        assert one.taken["on"].store == []
    finally:
        one.close()


def test_reads_are_issued_as_before_after_an_error(tmp_path: Path) -> None:
    with DiskSwapCache(synthetic.build_model(TINY), path=tmp_path) as cache:
        with pytest.raises(KeyError), replays.reads_waited_for(cache):
            raise KeyError
        assert "read" not in vars(cache.storage.prefetcher)
        assert all("ahead" not in vars(layer) for layer in cache.offloaded)


def test_likeness_makes_hits(tmp_path: Path) -> None:
    """Inputs that resemble each other select what was selected before; those that do not, less of it."""
    rates = []
    plain, attached = contenders.models(setting_of(tmp_path))
    for likeness in (0.0, 0.99):
        one = replays.Replay(OWN, setting_of(tmp_path), plain, attached, likeness)
        try:
            one.settle()
            one.steps(8)
            rates.append(one.summary()["hit_rate"])
        finally:
            one.close()
    assert rates[1] > rates[0] + 0.2


def test_the_replay_has_the_large_models_layers() -> None:
    """4 KiB a token and layer, 32 heads on 8, next to no weights."""
    shape = replays.replay_shape()
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 32, 8, 128)
    assert shape.token_bytes == 2 * 4096
    model = synthetic.build_model(shape)
    assert sum(parameter.nbytes for parameter in model.parameters()) < 32 << 20


def test_throttled_caches_read_through_the_device(tmp_path: Path) -> None:
    """Both layers' stores share one clock; the bytes are the same; closing finds the wrapped stores."""
    one = replays.replay(OWN, setting_of(tmp_path, profile="sd"))
    try:
        assert one.own is not None
        stores: list[Any] = one.own.storage.stores
        assert len(stores) == 2 and all(isinstance(store, ThrottledStore) for store in stores)
        assert stores[0].clock is stores[1].clock
        assert stores[0].clock.bytes_per_second == profiles.SD.bytes_per_second
        keys, _ = synthetic.context(TINY, 1024, 0)
        assert torch.equal(gathered(one.cache, 0, np.array([[2, 9]]))[0][0, :, :4], keys[0, :, 8:12])
        one.steps(2, "off")
        least = 2 * one.taken["off"].reads[0] * profiles.SD.seconds_per_request / 2
        assert one.taken["off"].store[0] >= least
    finally:
        one.close()
    assert one.own.storage.stores == []


def test_models_share_their_weights(tmp_path: Path) -> None:
    """Transformers' own caches run on a model without seams, with the same weights."""
    plain, attached = contenders.models(setting_of(tmp_path))
    assert plain is not attached
    pairs = zip(plain.parameters(), attached.parameters(), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    with DiskSwapCache(attached, path=tmp_path):
        assert plain.config._attn_implementation != attached.config._attn_implementation or (
            not plain.model.layers[0].self_attn._forward_hooks
        )


# --- the comparison ---------------------------------------------------------------------------------------------


def test_all_methods_are_compared(tmp_path: Path) -> None:
    """Reloads read all in each step, selective ones a part, those in memory nothing; a row a method and mode."""
    by_method = {name: {"rank": 16, "num_selected": 64} for name in ("InfiniGen", "InfiniGen*", "Loki", "ShadowKV")}
    by_method["InfiniGen*+ru"] = {"rank": 16, "num_selected": 64, "reuse_capacity": 64}
    by_method["AbstractTreeCache"] = {"dense_layers": 0, "num_selected": 64}  # else both layers are in memory
    setting = setting_of(tmp_path, by_method=by_method, batch=2)
    found = compare.compare(setting, METHODS, steps=2, reload_steps=1, repetitions=2)
    rows = found["rows"]
    assert list(rows) == list(METHODS) and found["left_out"] == {}
    stored = 2 * (1024 - 36) * TINY.token_bytes
    for name, row in rows.items():
        for mode in ("on", "off"):
            assert len(row[mode]["repetition_medians"]) == 2
            assert row[mode]["tokens_per_second"] == pytest.approx(2 / row[mode]["median_seconds"])
            assert row[mode]["steps"] == (2 if name in SLOW else 4)
    assert rows["SpecCache"]["off"]["bytes_read"] < stored  # or nothing: it keeps what others are not much better than
    for name in set(METHODS) - set(IN_MEMORY) - {PAGED, "SpecCache"}:
        row = rows[name]
        if name in (*RELOADS, *JUDGED_WHOLE):
            assert row["off"]["bytes_read"] >= stored
        elif name in ("InfiniGen", "Loki"):  # a block for 256 bytes
            assert row["disk_bytes"] >= 2 * 2 * 2 * (1024 - 36) * 4096
        else:
            assert 0 < row["off"]["bytes_read"] < stored
        assert row["off"]["store_seconds"] > 0
    assert rows[OWN]["hit_rate"] > rows[NO_REUSE]["hit_rate"] == 0
    assert rows[SINGLE]["group_size"] == 1 and rows[SINGLE]["record_bytes"] == 4096
    assert rows["DynamicCache"]["peak_memory_bytes"] == found["full_kv_bytes"] == 2 * 1024 * TINY.token_bytes
    assert rows[PAGED]["peak_memory_bytes"] == found["full_kv_bytes"] // 13


def test_what_does_not_fit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """By memory, by disk, by device."""
    setting = setting_of(tmp_path, profile="emmc")
    found = compare.compare(setting, (OWN, "StaticCache", PAGED), ("on",), 1, 1, 1)
    assert list(found["rows"]) == [OWN]
    assert all("emmc" in reason for reason in found["left_out"].values()) and len(found["left_out"]) == 2
    found = compare.compare(setting_of(tmp_path), (OWN, FULL), ("on",), 1, 1, 1, disk_limit=1 << 20)
    assert list(found["left_out"]) == [FULL] and "disk" in found["left_out"][FULL]
    none = compare.compare(setting_of(tmp_path, memory=Fraction(1, 500)), (OWN,), ("on",), 1, 1, 1)
    assert none["rows"] == {} and "memory" in none["left_out"][OWN]
    assert contenders.needs("InfiniGen", setting_of(tmp_path))[1] == 16 * contenders.needs(OWN, setting_of(tmp_path))[1]


def row_of(on: float = 1.0, off: float = 1.0, store: float | None = None, **others: Any) -> dict[str, Any]:
    taken = {} if store is None else {"store_seconds": store, "mean_request_bytes": others.pop("request", 4096)}
    first = {"median_seconds": on, "tokens_per_second": 1 / on, "stall_share": 0.1}
    return {"on": first, "off": {"median_seconds": off, **taken}, **others}


def test_figures_of_hand_made_rows() -> None:
    """Each is the ratio that its name says, of the better of the others."""
    result = {
        "rows": {
            OWN: row_of(0.1, 0.2, 0.01),
            NO_REUSE: row_of(0.1, 0.2, 0.03, record_bytes=16384, request=32768),
            SINGLE: row_of(0.1, 0.2, 0.09, record_bytes=4096, request=8192),
            FULL: row_of(2.0, 3.0, 0.5),
            "FlexGen, streamed": row_of(1.0, 4.0, 0.4),
            "DynamicCache": row_of(0.4),
            "StaticCache": row_of(0.3),
        },
    }
    rates = {4096: 100.0, 8192: 200.0, 16384: 400.0, 32768: 500.0}
    assert speed_targets.store_over_reload(result) == pytest.approx(40)
    assert speed_targets.step_over_reload(result) == pytest.approx(10)
    assert speed_targets.step_over_reload(result, "off") == pytest.approx(15)
    assert speed_targets.effect_of_reuse(result) == pytest.approx(3)
    assert speed_targets.rate_over_memory(result) == pytest.approx(3)
    found = speed_targets.effect_of_grouping(result, rates.__getitem__)
    assert found == pytest.approx(
        {"measured": 3, "raw": 4, "share": 0.75, "raw_of_requests": 2.5, "share_of_requests": 1.2}
    )


@pytest.mark.slow
def test_the_promises_name_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each, with its bound and a value, from runs on a tiny shape."""
    monkeypatch.setitem(compare.SHAPES, "replay", TINY)
    monkeypatch.setattr(speed_targets, "raw_rate", lambda size, path: {"bytes_per_second": float(size)})
    sizes = {"steps": 1, "reload_steps": 1, "repetitions": 1}
    found = speed_targets.targets(
        20000, (2, 2), str(tmp_path), say=lambda line: None, shapes=("replay", "replay"), **sizes
    )
    rows = found["must_reach"]
    assert [row["at_least"] or row["at_most"] for row in rows] == [17, 60, 0.85, 1.8, 3, 0.15, 1.5, 2.5]
    assert all(row["measured"] > 0 for row in rows)
    assert rows[2]["figure"].startswith("effect of grouping on store time, no reuse, overlap off")
    assert found["runs"]["replay, emmc"]["profile"] == "emmc"
    assert found["runs"]["replay"]["memory"] == "1/13"
    assert found["beside"]["grouping"]["raw"] == 2.0  # records of 16 tokens of 512 bytes, and of one in a block
    with pytest.raises(ValueError, match="DiskSwapCache cannot run: memory"):
        speed_targets.targets(600, (2, 2), str(tmp_path), say=lambda line: None, **sizes)


# --- the studies ------------------------------------------------------------------------------------------------


def test_parts_of_a_layers_time_add_up(tmp_path: Path) -> None:
    """To the step's; those that were watched are not zero, and nothing is watched afterwards."""
    one = replays.replay(OWN, setting_of(tmp_path))
    try:
        one.settle()
        parts = speed_latency.breakdown(one, 3)
        assert set(parts) == set(speed_latency.PARTS)
        assert parts["predict"] > 0 and parts["gather"] > 0 and parts["compute"] > 0
        assert one.own is not None
        layers: list[Any] = one.own.offloaded
        assert all("choose" not in vars(layer) and "gather" not in vars(layer.fetcher) for layer in layers)
    finally:
        one.close()


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    """With the fields of setting A for our own, of the papers for the others; a full cache by its bytes."""
    shape, total = synthetic.LLAMA_8B, 2000 << 20
    for name in (OWN, "InfiniGen", "Loki", "ShadowKV", "InfiniGen*"):
        batch, fields = speed_budget.largest_batch(name, total, shape, 32768, 32)
        element = 1 if name == OWN else 2
        held = [
            count * speed_budget.bytes_held(name, shape, 32768, count, fields, 32, element) if count else 0
            for count in (batch, batch + 1)
        ]
        assert held[0] <= total < held[1]
    assert speed_budget.largest_batch("DynamicCache", 9 << 30, shape, 32768, 32)[0] == 2
    assert speed_budget.recommended("ShadowKV", shape)["rank"] == 160


@MATPLOTLIB
def test_the_command_writes_rows_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run for each batch and profile, the reason where something was left out, JSON and a plot."""
    monkeypatch.setitem(compare.SHAPES, "smollm2", TINY)
    target, picture = tmp_path / "rows.json", tmp_path / "plot.png"
    words = ["--quick", "--memory", "default", "--batch", "1", "2", "--profile", "own", "ufs", "--threads", "1"]
    words += ["--methods", OWN, "StaticCache", "--json", str(target), "--plot", str(picture), "--path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_decode", *words, "--overlap", "on", "--set", "num_selected=64"])
    assert bench_decode.main() == 0
    runs = json.loads(target.read_text())["runs"]
    assert [(run["batch"], run["profile"]) for run in runs] == [(1, "own"), (1, "ufs"), (2, "own"), (2, "ufs")]
    assert [list(run["left_out"]) for run in runs] == [[], ["StaticCache"]] * 2
    assert runs[0]["rows"][OWN]["fields"]["num_selected"] == 64
    assert picture.stat().st_size > 1000


@MATPLOTLIB
@pytest.mark.parametrize("study", [pytest.param(speed_throughput, marks=pytest.mark.slow), speed_group,
                                   pytest.param(speed_latency, marks=pytest.mark.slow), speed_budget])
def test_studies_run_and_draw(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At tiny sizes: rows with rates, a summary, JSON and a picture."""
    own: Study = study.STUDY
    monkeypatch.setitem(compare.SHAPES, "replay", replace(TINY, kv_heads=4))
    if hasattr(study, "raw_rate"):
        monkeypatch.setattr(study, "raw_rate", lambda size, path: {"bytes_per_second": 1e9})
    small = {"tokens": 16384, "batch": 1, "reload_steps": 1, "steps": 1, "repetitions": 1}
    small |= {"speed_throughput": {"context": [16384], "batch": [1, 2], "methods": [OWN, FULL]}}.get(own.name, {})
    small |= {"speed_group": {"groups": [4, 8]}}.get(own.name, {})
    small |= {"speed_latency": {"methods": [OWN, FULL]}}.get(own.name, {})
    budget = {"batch": [1], "fractions": ["1/4"], "totals": ["100MiB", "1KiB"], "most": 1, "methods": [OWN]}
    small |= {"speed_budget": budget}.get(own.name, {})
    picture = tmp_path / "plot.png"
    arguments = ["--quick", "--path", str(tmp_path), "--plot", str(picture), "--json", str(tmp_path / "rows.json")]
    found = main(replace(own, quick=small), arguments)
    assert found["study"] == own.name == study.__name__.rpartition(".")[2]
    assert len(found["rows"]) >= 2 and found["summary"]
    assert picture.stat().st_size > 1000 and (tmp_path / "rows.json").exists()
    rates = [row["tokens_per_second_on"] for row in found["rows"] if "tokens_per_second_on" in row]
    assert all(rate > 0 for rate in rates)
    if own.name == "speed_group":
        assert all(row["utilisation"] > 0 for row in found["rows"])
    if own.name == "speed_budget":
        assert [row.get("left_out") for row in found["rows"]][-1] == "not one sequence fits"
