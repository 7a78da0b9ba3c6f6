"""What a cache is beside generating: iterated, copied, classed, and gone when nobody holds it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import SMALL, fresh, generate, prompt, tiny
from long_models import long_fresh, long_tiny, sparse, walked
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadCache, OffloadLayer, hybrid
from hf_offload_cache.errors import PromptError
from hf_offload_cache.fetch import areas
from hf_offload_cache.methods.disk_swap import DiskSwapLayer

EXACT: dict[str, Any] = {"exact": True, "engine": "memory", **SMALL}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is freed but by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_iteration_is_as_of_a_dynamic_cache(name: str) -> None:
    """Keys, values and sliding window of each layer, to the bit."""
    model = tiny(name)
    plain = DynamicCache(config=model.config)
    with DiskSwapCache(model, **EXACT) as cache, torch.no_grad():
        for held in (plain, cache):
            model(prompt(model, 2, 70), past_key_values=held)
            model(prompt(model, 2, 1, 4), past_key_values=held)
        assert len(list(cache)) == len(plain)
        for ours, theirs in zip(cache, plain, strict=True):
            keys, values, sliding = ours
            assert keys.shape[2] > 1
            torch.testing.assert_close(keys, theirs[0], rtol=0, atol=2e-3)
            torch.testing.assert_close(values, theirs[1], rtol=0, atol=2e-3)
            assert (sliding is None) == (theirs[2] is None)
            assert sliding is None or torch.equal(sliding, theirs[2])


def test_iteration_before_anything_is_held() -> None:
    with DiskSwapCache(tiny("llama"), **EXACT) as cache:
        assert list(cache) == [(None, None, None)] * 3


def test_copies_name_what_to_do() -> None:
    with DiskSwapCache(tiny("llama"), **EXACT) as cache:
        with pytest.raises(TypeError, match=r"DiskSwapCache cannot be copied shallowly.*fork\(\) it") as caught:
            copy.copy(cache)
        assert "pickl" not in str(caught.value)
        with pytest.raises(TypeError, match=r"cannot be pickled.*fork\(\) or deepcopy.*save\(\)"):
            pickle.dumps(cache)


def test_hybrid_layers_have_one_class_for_each() -> None:
    """Named in the module of the class that they extend; two caches share it."""
    model = walked("falcon_h1")
    with DiskSwapCache(model, **EXACT) as one, DiskSwapCache(model, **EXACT) as other:
        classes = {type(layer) for cache in (one, other) for layer in cache.offloaded}
    assert classes == {hybrid(DiskSwapLayer)}
    for layer_class in (OffloadLayer, DiskSwapLayer):
        assert hybrid(layer_class) is hybrid(layer_class)
        assert hybrid(layer_class).__name__ == f"Hybrid{layer_class.__name__}"
        assert hybrid(layer_class).__module__ == layer_class.__module__
        assert issubclass(hybrid(layer_class), layer_class)


def alternating_model() -> Any:
    """A llama whose odd layers have twice the key heads."""
    model = long_fresh("llama", num_hidden_layers=4)
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 4
    torch.manual_seed(1)
    for layer_idx in (1, 3):
        attention = LlamaAttention(config, layer_idx).eval()
        attention.config = model.config
        model.model.layers[layer_idx].self_attn = attention
    return model


def test_layers_of_alternating_sizes_share_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of two sizes in turns: areas are made for the larger and used for both, however many steps there are."""
    model = alternating_model()
    made: list[int] = []

    class Counted(areas.Staging):
        def __init__(self, nbytes: int, *args: Any) -> None:
            made.append(nbytes)
            super().__init__(nbytes, *args)

    with sparse(model, group_size=16, num_selected=64, reuse_capacity=0) as cache, torch.no_grad():
        model(prompt(model, 1, 620), past_key_values=cache)
        assert [layer.history.form.record_bytes for layer in cache.offloaded] == [4096, 8192] * 2
        monkeypatch.setattr(areas, "Staging", Counted)
        counts = []
        for token in prompt(model, 1, 10, 4).split(1, 1):
            model(token, past_key_values=cache)
            counts.append(len(made))
        assert cache.report().selected_fraction < 0.5
    assert 0 < counts[-1] <= 4
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("kind", ["offload", "exact", "sparse", "hybrid"])
def test_a_cache_goes_with_its_last_reference(kind: str, closed: bool, uncollected: None) -> None:
    model = walked("falcon_h1") if kind == "hybrid" else long_tiny("llama")
    fields: dict[str, Any] = {"engine": "memory", **SMALL}
    cache: Any
    if kind == "offload":
        cache = OffloadCache(model, **fields)
    elif kind == "exact":
        cache = DiskSwapCache(model, exact=True, **fields)
    else:
        cache = sparse(model)
    generate(model, cache, prompt(model, 2, 120 if kind == "hybrid" else 620), max_new_tokens=4)
    parts = [cache, cache.shared, cache.storage, *cache.layers]
    gone = [weakref.ref(part) for part in parts]
    if closed:
        cache.close()
    del cache, parts
    assert [one() for one in gone] == [None] * len(gone)


def test_a_failed_step_leaves_no_cycle(uncollected: None) -> None:
    """Taking back goes through a weak reference."""
    model = fresh("llama")
    cache = DiskSwapCache(model, **EXACT)
    with torch.no_grad():
        model(prompt(model, 1, 60), past_key_values=cache)
        try:
            model(torch.full((1, 1), 10**6), past_key_values=cache)
        except IndexError:
            pass
        else:
            raise AssertionError("a token that does not exist was taken")
        model(prompt(model, 1, 1), past_key_values=cache)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.parametrize("exact", [True, False])
def test_books_are_in_the_account_after_every_step(exact: bool) -> None:
    """They are counted only where units were sealed, slots were made or layers changed: nothing else changes them."""
    model = tiny("llama")
    fields: dict[str, Any] = {"exact": True} if exact else {"num_selected": 8, "reuse_capacity": 0}
    seen: set[int] = set()

    def step(rows: int, tokens: int, seed: int = 0) -> None:
        with torch.no_grad():
            model(prompt(model, rows, tokens, seed), past_key_values=cache)
        books = sum(layer.tables_nbytes for layer in cache.offloaded)
        records = sum(store.memory_bytes for store in cache.storage.stores)
        account = cache.storage.account.by_owner
        assert (account["tables"], account["records in memory"]) == (books, records)
        seen.add(books)

    with DiskSwapCache(model, **{**SMALL, **fields, "engine": "memory"}) as cache:
        step(1, 40)
        for seed in range(30):
            step(1, 1, seed)
        cache.crop(-9)
        step(1, 1)
        cache.batch_repeat_interleave(3)
        step(3, 1)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        step(3, 1)
        cache.reset()
        step(2, 5)
    assert len(seen) > 3


@pytest.mark.parametrize("exact", [True, "bitwise", False])
def test_another_model_is_refused_while_a_step_has_failed(exact: Any) -> None:
    model, other = long_fresh("llama"), long_fresh("llama", seed=1)
    fields = {"exact": exact} if exact else {"group_size": 4, "num_selected": 40}
    with DiskSwapCache(model, engine="memory", **fields) as cache, torch.no_grad():
        model(prompt(model, 1, 600), past_key_values=cache)

        def fail(*_: Any) -> None:
            raise ValueError("of the model itself")

        hook = model.model.norm.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="of the model itself"):
            model(prompt(model, 1, 1), past_key_values=cache)
        hook.remove()
        with pytest.raises(PromptError, match="this cache was made for"):
            other(prompt(model, 1, 1), past_key_values=cache)
        with pytest.raises(RuntimeError, match="an earlier forward was interrupted"):
            model(prompt(model, 1, 1), past_key_values=cache)
        model(prompt(model, 1, 1), past_key_values=cache)
        assert cache.get_seq_length() == 601
