"""Keys and values in 8 bits: steps, saved contexts, crops, engines and budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from long_models import LENGTH, SPARSE, long_tiny
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache import AbstractTreeCache, AbstractTreeConfig, ClusterCache, DiskSwapCache, SpecCache
from hf_offload_cache.contexts import read_manifest
from hf_offload_cache.errors import ConfigError, ContextError
from hf_offload_cache.model import Geometry

FIELDS: dict[str, Any] = {"entry_bits": 8, "reuse_capacity": 40}
CACHES = DiskSwapCache, AbstractTreeCache, ClusterCache
OWN: dict[Any, dict[str, Any]] = {
    AbstractTreeCache: {"early_steps": 0, "dense_layers": 1, "dense_chunk_size": 8},
    ClusterCache: {"cluster_size": 8, "append_buffer": 6, "join_every": 4},
    DiskSwapCache: {"rank": 8},
}


def small(cls: type[Any], model: Any, **fields: Any) -> Any:
    """A cache of any of the classes, with the fields of `sparse`."""
    shared = {name: value for name, value in SPARSE.items() if name != "rank"}
    return cls(model, **{**shared, **OWN[cls], **fields})


def rounded(entries: torch.Tensor) -> torch.Tensor:
    """Keys or values (..., D) in 8 bits and back: multiples of a 127th of each head's largest magnitude."""
    scales = entries.abs().amax(-1, keepdim=True) / 127
    return (entries / scales).round() * scales


def in_records(history: Any) -> torch.Tensor:
    """Which tokens of each row are in records, (rows, tokens) bool: the others are in the tail, or buffered."""
    mask = np.zeros((history.rows, history.length), dtype=bool)
    mask[:, : history.length - history.recent.shape[1]] = True
    if history.extra_entries is not None:
        for row, tokens in enumerate(history.extra_entries[1]):
            mask[row, tokens[tokens >= 0]] = False
    return torch.from_numpy(mask)


def prefilled(cache: Any, model: Any, tokens: int = LENGTH) -> torch.Tensor:
    ids = harness.prompt(model, 1, tokens + 40)
    with torch.no_grad():
        model(ids[:, :tokens], past_key_values=cache)
    return ids[:, tokens:]


def step(model: Any, cache: Any, token: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token, past_key_values=cache).logits[:, -1]
        return logits


@pytest.mark.parametrize(
    ("cls", "name"), combinations(CACHES, ("llama", "gemma3", "gpt_oss", "phi3"), times=2)
)
def test_a_step_that_selects_everything_attends_to_what_is_stored(cls: type[Any], name: str) -> None:
    """Its logits are those of `DynamicCache` over the keys and values that the cache shows, to a rounding error."""
    model = long_tiny(name)
    with small(cls, model, **FIELDS, num_selected=2 * LENGTH) as cache:
        new = prefilled(cache, model)
        compared = 0
        for token in new[:, :20].split(1, 1):
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
        assert 10 < compared < 20


@pytest.mark.parametrize("cls", CACHES)
def test_tokens_in_records_are_rounded_once(cls: type[Any]) -> None:
    """Also after a long output, which rewrites clusters and splits some. Latest and buffered tokens are not rounded."""
    model = long_tiny("llama")
    ids = harness.prompt(model, 2, LENGTH + (160 if cls is ClusterCache else 120))
    with small(cls, model, **FIELDS) as cache, small(cls, model) as plain, torch.no_grad():
        layer, other = cache.selective[0], plain.selective[0]  # the others' inputs differ
        clusters = []
        for part in ids.tensor_split(tuple(range(LENGTH, ids.shape[1])), 1):
            for one in (cache, plain):
                model(part, past_key_values=one)
            clusters.append(layer.history.units)
            if cache.get_seq_length() % 40:
                continue
            tokens, stored = layer.length, in_records(layer.history)
            stored = stored.view(2, -1, tokens).expand(2, layer.keys.shape[1], tokens)
            for found, came in ((layer.keys, other.keys), (layer.values, other.values)):
                came = came[:, :, :tokens]
                assert torch.equal(found[~stored], came[~stored])
                torch.testing.assert_close(found[stored], rounded(came)[stored], rtol=1e-5, atol=1e-6)
                assert (found[stored] != came[stored]).any(1).float().mean() > 0.99
    assert len(set(clusters)) > 10  # units were added, or clusters split


@pytest.mark.parametrize("cls", CACHES)
def test_a_saved_context_goes_on_with_the_same_tokens(cls: type[Any], tmp_path: Path) -> None:
    """Also after a crop into what is stored, which packs again what it read back."""
    model = long_tiny("llama")
    with small(cls, model, **FIELDS) as cache:
        new = prefilled(cache, model)[:, :20]
        cache.save(tmp_path / "saved")
        with cls.open(tmp_path / "saved", model) as opened:
            assert opened.config.entry_bits == 8
            for token in new.split(1, 1):
                assert torch.equal(step(model, cache, token), step(model, opened, token))
            held = LENGTH - 30
            before = [layer.whole(held) for layer in cache.selective]
            for one in (cache, opened):
                one.crop(held)
            for layer, (keys, values) in zip(cache.selective, before, strict=True):
                assert torch.equal(layer.whole()[0], keys) and torch.equal(layer.whole()[1], values)
            for token in new.split(1, 1):
                assert torch.equal(step(model, cache, token), step(model, opened, token))
            for layer, (keys, values) in zip(cache.selective, before, strict=True):
                stored = in_records(layer.history)[:, :held].all(0)
                assert stored[: held - 20].any()
                assert torch.equal(layer.whole(held)[0][:, :, : held - 20], keys[:, :, : held - 20])
                assert torch.equal(layer.whole(held)[1][:, :, : held - 20], values[:, :, : held - 20])


@pytest.mark.parametrize("cls", CACHES)
def test_a_saved_context_says_its_bits(cls: type[Any], tmp_path: Path) -> None:
    """A budget does not change them either, whatever it would choose for a new cache."""
    model = long_tiny("llama")
    for name, fields in (("packed", FIELDS), ("plain", {})):
        with small(cls, model, **fields) as cache:
            prefilled(cache, model)
            cache.save(tmp_path / name)
    assert read_manifest(tmp_path / "packed").config["entry_bits"] == 8
    with pytest.raises(ConfigError, match=r"entry_bits is fixed in a saved context, to 8, and cannot be None"):
        cls.open(tmp_path / "packed", model, entry_bits=None)
    with pytest.raises(ConfigError, match=r"entry_bits is fixed in a saved context, to None, and cannot be 8"):
        cls.open(tmp_path / "plain", model, entry_bits=8)
    with pytest.raises(ConfigError, match=r"exact=True attends to the model's own keys and values, .*entry_bits=8"):
        cls.open(tmp_path / "packed", model, exact=True)
    with cls.open(tmp_path / "plain", model, exact=True) as opened:
        assert opened.config.entry_bits is None
    for name, bits in (("packed", 8), ("plain", None)):
        saved = cls.config_class.load(None, read_manifest(tmp_path / name).config)
        assert cls.stored_fields(saved, Geometry.of(model))["entry_bits"] == bits


@pytest.mark.parametrize("cls", CACHES)
def test_a_state_of_other_bits_is_refused(cls: type[Any], tmp_path: Path) -> None:
    """A changed state cannot make a history read records as what they are not."""
    model = long_tiny("llama")
    with small(cls, model, **FIELDS) as cache:
        prefilled(cache, model)
        layer = cache.selective[0]
        parts, tree = layer.history.freeze(), layer.history.capture()
        for bits, words in ((4, "its entries have the form"), (None, "bits=None, the configuration has bits=8")):
            changed = {**tree, "form": {**tree["form"], "bits": bits}}
            with pytest.raises(ContextError, match=words):
                layer.restore_history(changed, parts, layer.history.device)


@pytest.mark.parametrize(("cls", "engine"), combinations(CACHES, ("direct", "mapped", "memory")))
def test_every_engine_and_encryption(cls: type[Any], engine: str, tmp_path: Path) -> None:
    model = long_tiny("llama")
    fields = {**FIELDS, "engine": engine, "path": tmp_path, "encryption_key": lambda: bytes(32)}
    with small(cls, model, **FIELDS) as cache, small(cls, model, **fields) as other:
        new = prefilled(cache, model)
        prefilled(other, model)
        for token in new[:, :5].split(1, 1):
            assert torch.equal(step(model, cache, token), step(model, other, token))


@pytest.mark.parametrize(("cls", "share"), [(DiskSwapCache, 13), (AbstractTreeCache, 4), (ClusterCache, 4)])
def test_the_same_budget_has_nearly_twice_the_slots(cls: type[Any], share: int) -> None:
    """And the disk holds about half the bytes of heads together; a single head's fill fewer of its 4 KiB blocks."""
    geometry, fields = Geometry.uniform(30, 9, 3, 64), {"num_selected": 800}
    memory, config = geometry.full_kv_bytes(8192, 1) // share, {}
    for bits in (None, 8):
        config[bits] = cls.fit(geometry, memory, 8192, 1, {**fields, "entry_bits": bits, "candidates": True})
        assert cls.plan(geometry, config[bits], 8192, 1).peak_bytes <= memory

    def tokens(one: Any) -> float:
        """Number of tokens that the slots of a layer hold."""
        host = int(getattr(one, "host_slots", None) or 0)
        return float(one.reuse_capacity + host / (30 * 2 * 3 * 64 * (2 if one.entry_bits is None else 1)))

    assert tokens(config[8]) > 1.7 * tokens(config[None])
    disk = {bits: cls.plan(geometry, one, 8192, 1).disk_bytes for bits, one in config.items()}
    most = {DiskSwapCache: 0.55, AbstractTreeCache: 0.8, ClusterCache: 1}
    assert disk[8] <= most[cls] * disk[None]


@pytest.mark.parametrize("cls", CACHES)
def test_exact_steps_need_the_models_own_type(cls: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"exact='bitwise' attends to .*entry_bits=8.*leave out one of the two"):
        cls(long_tiny("llama"), exact="bitwise", entry_bits=8)
    for bits in (4, 16, True, "8"):
        with pytest.raises(ConfigError, match=rf"entry_bits must be one of \(None, 8\), got {bits!r}"):
            cls(long_tiny("llama"), entry_bits=bits)


@pytest.mark.parametrize("share", [0.5, "auto", 0])
def test_replicas_in_4_bits_need_the_models_own_type(share: Any) -> None:
    with pytest.raises(ConfigError, match=rf"compress={share!r} reads 4-bit replicas .*entry_bits=8.*leave out one"):
        AbstractTreeConfig(compress=share, entry_bits=8)


def test_other_caches_have_no_such_field() -> None:
    """`SpecCache` has its own copy in few bits."""
    with pytest.raises(ConfigError, match="SpecConfig has no field 'entry_bits'"):
        SpecCache(long_tiny("llama"), entry_bits=8)


def test_a_record_smaller_than_an_abstract_is_refused() -> None:
    """Before anything is added; with the chunk size that it names, and with abstracts in memory, it works."""
    model = long_tiny("llama")
    fields: dict[str, Any] = {"entry_bits": 8, "dense_layers": 0, "engine": "memory", "num_selected": 32}
    said = r"abstracts of \d+ bytes in records, and a chunk of 2 tokens has \d+: use chunk_size=4, or abstracts='memory"
    with AbstractTreeCache(model, chunk_size=2, abstracts="disk", **fields) as cache:
        with pytest.raises(ConfigError, match=said):
            prefilled(cache, model)
        assert not cache.get_seq_length()
    for works in ({"chunk_size": 4, "abstracts": "disk"}, {"chunk_size": 2, "abstracts": "memory"}):
        with AbstractTreeCache(model, **works, **fields) as cache:
            prefilled(cache, model)
            assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("abstracts", ["memory", "disk"])
def test_abstracts_are_of_keys_as_given(abstracts: str) -> None:
    """Abstracts on the disk share records with 8-bit entries, but are not rounded."""
    model, chosen = long_tiny("llama"), []
    for bits in (None, 8):
        fields = {"entry_bits": bits, "dense_layers": 0, "abstracts": abstracts}
        with small(AbstractTreeCache, model, **fields) as cache:
            prefilled(cache, model)
            layer = cache.selective[0]
            if abstracts == "memory":
                chosen.append(layer.predictor._held[:, : layer.predictor.units])
            else:
                pages = layer.history.pages
                chosen.append(pages.joined(layer.fetcher.look(layer.history, pages.extents())))
                assert pages.table.num_groups > 3
    assert torch.equal(*chosen)
