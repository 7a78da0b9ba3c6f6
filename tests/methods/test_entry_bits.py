"""Keys and values in 8 bits: steps, saved contexts, crops, engines and budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from checked_cache import as_stored
from long_models import LENGTH, long_tiny, sparse
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.contexts import read_manifest
from hf_offload_cache.errors import ConfigError, ContextError
from hf_offload_cache.model import Geometry

FIELDS: dict[str, Any] = {"entry_bits": 8, "reuse_capacity": 40}


def prefilled(cache: DiskSwapCache, model: Any, tokens: int = LENGTH) -> torch.Tensor:
    ids = harness.prompt(model, 1, tokens + 40)
    with torch.no_grad():
        model(ids[:, :tokens], past_key_values=cache)
    return ids[:, tokens:]


def step(model: Any, cache: Any, token: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token, past_key_values=cache).logits[:, -1]
        return logits


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "phi3"])
def test_a_step_that_selects_everything_attends_to_what_is_stored(name: str) -> None:
    """Its logits are those of `DynamicCache` over the keys and values that the cache shows, to a rounding error."""
    model = long_tiny(name)
    with sparse(model, **FIELDS, num_selected=2 * LENGTH) as cache:
        new = prefilled(cache, model)
        compared = 0
        for token in new.split(1, 1):
            twin = DynamicCache(config=model.config)
            for layer_idx, layer in enumerate(cache.layers):
                twin.update(layer.keys.clone(), layer.values.clone(), layer_idx)
                if hasattr(twin.layers[layer_idx], "cumulative_length"):
                    twin.layers[layer_idx].cumulative_length = cache.get_seq_length()
            units = [layer.history.units for layer in cache.selective]
            found = step(model, cache, token)
            if units == [layer.history.units for layer in cache.selective]:  # others were not rounded before
                torch.testing.assert_close(found, step(model, twin, token), rtol=2e-4, atol=2e-4)
                compared += 1
        assert compared > 20


def test_stored_tokens_are_rounded_and_the_latest_are_not() -> None:
    model = long_tiny("llama")
    with sparse(model, **FIELDS) as cache, sparse(model) as plain:
        for one in (cache, plain):
            prefilled(one, model)
        for layer, other in zip(cache.selective, plain.selective, strict=True):
            form, held = layer.history.form, layer.history.units * layer.history.form.group_size
            came = torch.cat(other.whole(), 3)
            if layer.layer_idx == 0:  # the others' inputs differ
                assert torch.equal(torch.cat(layer.whole(), 3)[:, :, held:], came[:, :, held:])
                assert torch.equal(torch.cat(layer.whole(), 3)[:, :, :held], as_stored(form, came[:, :, :held]))
                assert not torch.equal(torch.cat(layer.whole(), 3)[:, :, :held], came[:, :, :held])


def test_a_saved_context_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Also after a crop into what is stored, which packs again what it read back."""
    model = long_tiny("llama")
    with sparse(model, **FIELDS) as cache:
        new = prefilled(cache, model)
        cache.save(tmp_path / "saved")
        with DiskSwapCache.open(tmp_path / "saved", model) as opened:
            assert opened.config.entry_bits == 8
            for token in new.split(1, 1):
                assert torch.equal(step(model, cache, token), step(model, opened, token))
            before = [layer.whole() for layer in cache.selective]
            for one in (cache, opened):
                one.crop(LENGTH - 30)
            for layer, (keys, values) in zip(cache.selective, before, strict=True):
                held, stored = LENGTH - 30, layer.history.units * layer.history.form.group_size
                assert torch.equal(layer.whole()[0][:, :, :stored], keys[:, :, :stored])
                assert torch.equal(layer.whole()[1][:, :, :held], values[:, :, :held])
            for token in new.split(1, 1):
                assert torch.equal(step(model, cache, token), step(model, opened, token))


def test_a_saved_context_says_its_bits(tmp_path: Path) -> None:
    model = long_tiny("llama")
    for name, fields in (("packed", FIELDS), ("plain", {})):
        with sparse(model, **fields) as cache:
            prefilled(cache, model)
            cache.save(tmp_path / name)
    assert read_manifest(tmp_path / "packed").config["entry_bits"] == 8
    with pytest.raises(ConfigError, match=r"entry_bits is fixed in a saved context, to 8, and cannot be None"):
        DiskSwapCache.open(tmp_path / "packed", model, entry_bits=None)
    with pytest.raises(ConfigError, match=r"entry_bits is fixed in a saved context, to None, and cannot be 8"):
        DiskSwapCache.open(tmp_path / "plain", model, entry_bits=8)
    with pytest.raises(ConfigError, match=r"exact=True attends to the model's own keys and values, .*entry_bits=8"):
        DiskSwapCache.open(tmp_path / "packed", model, exact=True)
    with DiskSwapCache.open(tmp_path / "plain", model, exact=True) as opened:
        assert opened.config.entry_bits is None


def test_a_state_of_other_bits_is_refused(tmp_path: Path) -> None:
    """A changed state cannot make a history read records as what they are not."""
    model = long_tiny("llama")
    with sparse(model, **FIELDS) as cache:
        prefilled(cache, model)
        layer = cache.selective[0]
        tree, parts = layer.history.capture(), layer.history.freeze()
        for bits, words in ((4, "its entries have the form"), (None, "bits=None, the configuration has bits=8")):
            changed = {**tree, "form": {**tree["form"], "bits": bits}}
            with pytest.raises(ContextError, match=words):
                type(layer.history).restore(
                    cache.storage, changed, parts, layer.history.device, cache.config, "layer 0"
                )


@pytest.mark.parametrize("engine", ["direct", "mapped", "memory"])
def test_every_engine_and_encryption(engine: str, tmp_path: Path) -> None:
    model = long_tiny("llama")
    fields = {**FIELDS, "engine": engine, "path": tmp_path}
    with sparse(model, **FIELDS) as cache, sparse(model, **fields, encryption_key=lambda: bytes(32)) as other:
        new = prefilled(cache, model)
        prefilled(other, model)
        for token in new[:, :5].split(1, 1):
            assert torch.equal(step(model, cache, token), step(model, other, token))


def test_the_same_budget_has_nearly_twice_the_slots() -> None:
    """And the disk holds about half the bytes."""
    geometry = Geometry.uniform(30, 9, 3, 64)
    config = {
        bits: DiskSwapCache.fit(geometry, geometry.full_kv_bytes(8192, 1) // 13, 8192, 1, {"entry_bits": bits})
        for bits in (None, 8)
    }
    assert config[8].reuse_capacity > 1.7 * config[None].reuse_capacity
    disk = {bits: DiskSwapCache.plan(geometry, one, 8192, 1).disk_bytes for bits, one in config.items()}
    assert disk[8] < 0.55 * disk[None]


def test_exact_steps_need_the_models_own_type() -> None:
    with pytest.raises(ConfigError, match=r"exact='bitwise' attends to .*entry_bits=8.*leave out one of the two"):
        DiskSwapCache(long_tiny("llama"), exact="bitwise", entry_bits=8)
    with pytest.raises(ConfigError, match=r"entry_bits must be one of \(None, 8\), got 4"):
        DiskSwapCache(long_tiny("llama"), entry_bits=4)
