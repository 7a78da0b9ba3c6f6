"""With the default fields no cache uses more memory than `DynamicCache` would, however short the context is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, prompt
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hf_offload_cache import AbstractTreeCache, DiskSwapCache, SpecCache, registry
from hf_offload_cache.core import LayerKind, SelectiveCache, SelectiveLayer, SummaryPredictor
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.model import Geometry
from hf_offload_cache.predictors import Query


@pytest.fixture(scope="module")
def model() -> Any:
    """Of six layers three have full attention, so that what all layers share is large beside what they offload."""
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}
    kinds = ["sliding_attention", "full_attention"] * 3
    small = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 8192, "layer_types": kinds}
    return build(Gemma3ForCausalLM, Gemma3TextConfig(**{**COMMON, **sizes, **small}))


def decode(model: Any, cache: Any, ids: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Logits of `steps` steps behind `ids`, in float64."""
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
        found = [model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1] for at in range(steps)]
    return torch.stack(found, 1).double()


@pytest.mark.parametrize("length", [300, 700, 1500, 3000])
@pytest.mark.parametrize("name", registry.CACHES)
def test_no_step_takes_more_than_the_full_kv(model: Any, name: str, length: int, tmp_path: Path) -> None:
    """After a prefill, whose own buffers are the step's, as those of `DynamicCache` are."""
    if (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    with registry.cache_class(name)(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, length))
        report = cache.report()
    assert 0 < report.memory_bytes <= report.full_kv_bytes, report.memory_by_owner


@pytest.mark.parametrize("name", registry.CACHES)
def test_where_selecting_saves_nothing_steps_are_exact(model: Any, name: str, tmp_path: Path) -> None:
    if (missing := registry.cache_class(name).missing()) is not None:
        pytest.skip(missing)
    ids = prompt(model, 1, 560)  # behind 512 tokens `DiskSwapCache` would select
    expected = decode(model, DynamicCache(config=model.config), ids)
    with registry.cache_class(name)(model, path=tmp_path) as cache:
        found = decode(model, cache, ids)
        report = cache.report()
        assert not cache.selecting.worthwhile
        assert not {"reuse slots", "selection", "staging", "chosen entries"} & set(report.memory_by_owner)
    assert (found - expected).abs().max() < 1e-4  # a softmax of blocks adds in another order
    assert report.bytes_read > 0


def test_a_context_that_grows_begins_to_select(model: Any, tmp_path: Path) -> None:
    """Slots come first in part, then as many as the configuration has."""
    shares = []
    with DiskSwapCache(model, path=tmp_path) as cache, torch.no_grad():
        for _ in range(16):
            model(prompt(model, 1, 128), past_key_values=cache, logits_to_keep=1)
            model(prompt(model, 1, 1), past_key_values=cache)
            selecting = cache.selecting
            shares.append(selecting.slot_share if selecting.worthwhile else -1.0)
            assert cache.report().memory_bytes <= cache.report().full_kv_bytes
        assert shares == sorted(shares)
        assert shares[0] == -1 and any(0 < share < 1 for share in shares) and shares[-1] == 1
        cache.reset()
        decode(model, cache, prompt(model, 1, 300), steps=1)
        assert not cache.selecting.worthwhile


@pytest.mark.parametrize("given", [{"num_selected": 64}, {"reuse_capacity": 64}, {"memory": "64MiB"}])
def test_fields_of_the_user_are_kept(model: Any, given: dict[str, Any], tmp_path: Path) -> None:
    with DiskSwapCache(model, path=tmp_path, **given) as cache:
        decode(model, cache, prompt(model, 1, 560))
        assert cache.selecting.worthwhile and cache.selecting.slot_share == 1
        assert cache.report().memory_by_owner["selection"] > 0


def test_records_in_host_memory_are_not_counted(model: Any) -> None:
    """They are where a budget has no say: an engine that has all records there would never select."""
    with AbstractTreeCache(model, engine="memory") as cache:
        decode(model, cache, prompt(model, 1, 6000), steps=1)
        assert cache.selecting.worthwhile


def test_it_asks_nothing_of_the_model_in_a_step(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every model can be asked for its shapes before it runs; what the layers hold says them."""
    monkeypatch.setattr(Geometry, "of", lambda *_: pytest.fail("a step asked for the shapes"))
    with DiskSwapCache(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, 560))
        assert not cache.selecting.worthwhile


def test_layers_that_keep_everything_keep_their_slots(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 16, "head_dim": 64, "hidden_size": 32, "intermediate_size": 32}
    model = build(LlamaForCausalLM, LlamaConfig(**{**COMMON, **small, "max_position_embeddings": 2048}))
    with AbstractTreeCache(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, 800))
        assert cache.selecting.worthwhile and 0 < cache.selecting.slot_share < 1
        dense, *others = cache.offloaded
        assert dense.slots >= dense.history.rows * dense.history.records
        assert all(0 < layer.slots < layer.history.rows * layer.history.records for layer in others)
        assert cache.report().memory_bytes <= cache.report().full_kv_bytes


def test_exact_steps_tell_nothing_of_reading_ahead(model: Any, tmp_path: Path) -> None:
    with DiskSwapCache(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, 300), steps=24)
        assert not cache.selecting.worthwhile and not any(cache._pace._taken.values())


def test_a_method_without_a_plan_selects(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DiskSwapCache.layer_class.predictor_class, "rehearse")
    with DiskSwapCache(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, 560))
        assert cache.selecting.worthwhile and cache.report().memory_by_owner["selection"] > 0


class _NumpyPredictor(SummaryPredictor):
    """Looks at the numbers of the keys."""

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(keys.numpy().mean(3)).transpose(1, 2)

    def importance(self, query: Query, summaries: torch.Tensor) -> torch.Tensor:
        return summaries.sum((2, 3))


class _NumpyLayer(SelectiveLayer):
    predictor_class = _NumpyPredictor


class _NumpyCache(SelectiveCache):
    layer_class = _NumpyLayer


def test_a_method_that_looks_at_numbers_is_planned(model: Any, tmp_path: Path) -> None:
    with _NumpyCache(model, path=tmp_path) as cache:
        decode(model, cache, prompt(model, 1, 560))
        assert cache.report().memory_by_owner["summaries"] > 0
    with _NumpyCache.for_budget(model, "1/2", 3000, path=tmp_path) as cache:
        plan = _NumpyCache.plan(Geometry.of(model), cache.config, 3000, 1)
        assert plan.decode["summaries"] > 0 and plan.peak_bytes <= cache.storage.account.limit


def test_copies_on_a_device_are_planned() -> None:
    """Entries that come out of host memory pass through a buffer there, and one on the device."""
    kind = LayerKind(RecordFormat(2, 8, 2, 8, torch.float32, 32), 4, 1, 1, "cpu")
    config = SpecCache.config_class(engine="memory")
    plans = [
        SpecCache.layer_class.plan(dataclasses.replace(kind, device=device), config, 4000) for device in ("cpu", "cuda")
    ]
    on_cpu, on_cuda = (plan.shared.decode for plan in plans)
    assert on_cuda["staging"] == on_cuda["staging, host"] == on_cpu["staging"] > 0 and "staging, host" not in on_cpu
