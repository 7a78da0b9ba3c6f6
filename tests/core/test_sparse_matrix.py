"""Sparse decoding on every kind of model: what attention is given is what was put in, whatever happened in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import harness
import pytest
import transformers
from batch_driver import Driver
from checked_cache import Gathers, checking
from harness import PAD, generate, prompt, unchanged
from long_models import LENGTH, long_tiny, sparse
from pairwise import combinations, in_full
from transformers.cache_utils import LinearAttentionLayer

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadLayer
from hf_offload_cache.fetch import Fetched, Fetcher
from hf_offload_cache.history import PositionHistory
from hf_offload_cache.methods.disk_swap import DiskSwapLayer

MATRIX = ("llama", "qwen3", "gemma3", "mistral", "phi3", "opt", "gpt_neox", "gpt_oss", "deepseek_v2")
MODELS = (*MATRIX, "phi", "stablelm", "falcon_h1", "qwen3_next")
TAGGED = {name: 3 for name in MATRIX} | {"gemma3": 2, "gpt_oss": 2, "phi": 4, "stablelm": 4, "falcon_h1": 4}
TAGGED |= {"qwen3_next": 2, "deepseek_v2": 0}
"""Name -> layers that are sparse. DeepSeek-V2 caches what keys are made of, and gets it back whole."""

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be sparse")


def croppable(cache: DiskSwapCache) -> bool:
    """No layer slid over its tokens or holds a state that cannot go back."""
    return all(isinstance(layer, OffloadLayer) and layer.is_croppable for layer in cache.layers)


def linear(cache: DiskSwapCache) -> bool:
    """A layer holds a linear-attention state, alone or beside keys and values."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


REUSE = {"none": {"reuse_capacity": 0}, "some": {"reuse_capacity": 40}, "default": {}}
REUSE |= {"8 bits": {"reuse_capacity": 40, "entry_bits": 8}}
REUSE |= {"heads apart": {"reuse_capacity": 40, "heads_apart": True, "rank": None}}


def assert_sparse(model_name: str, cache: DiskSwapCache, seen: Gathers, steps: int) -> None:
    """Every layer that can be sparse was, in all of the steps; less than everything was attended."""
    report = cache.report()
    assert report.layers["tagged"] == TAGGED[model_name]
    assert len(seen) == steps * TAGGED[model_name]
    if not TAGGED[model_name]:
        assert report.selected_fraction is None
        return
    assert 0 < report.selected_fraction < 0.5
    tagged = [layer for layer in cache.selective if layer.state == "tagged"]
    assert len(tagged) == TAGGED[model_name]
    for layer in tagged:
        assert isinstance(layer, DiskSwapLayer)
        assert layer.predictor is not None
        assert layer.predictor.ready(layer.history.units)


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("name", "engine", "reuse"),
    combinations(MODELS, ("direct", "memory"), REUSE.keys()),
)
def test_changes_of_the_batch(
    name: str, engine: str, reuse: str, tmp_path: Path, checked_gathers: Gathers
) -> None:
    """Three padded rows; beams' copies, repetition, selection, a crop into sealed groups, and a reset in between."""
    model, seen = long_tiny(name), checked_gathers
    fields = {"engine": engine, "path": tmp_path, **REUSE[reuse]}
    with unchanged(model), sparse(model, **fields) as cache:
        driver = Driver(model, cache, length=LENGTH, step=53)
        steps = 0

        def feed() -> None:
            nonlocal steps
            for _ in range(2):
                driver.feed()
            steps += 2

        feed()
        driver.reorder([2, 0, 0])
        feed()
        if not linear(cache):  # transformers' own linear states can neither be repeated nor selected
            driver.repeat(2)
            feed()
            driver.select([5, 0, 3])
            feed()
        driver.feed(9)
        feed()
        if croppable(cache):
            driver.crop(45)
            feed()
            driver.feed(30)
            feed()
        assert_sparse(name, cache, seen, steps)
        cache.reset()
        seen.calls.clear()
        driver.start(3 if linear(cache) else 2, 560, 0)
        steps = 0
        for _ in range(2):
            feed()
        assert_sparse(name, cache, seen, steps)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_reset_beside_linear_states(name: str, checked_gathers: Gathers) -> None:
    """A batch of another size after `reset`, which is what `PromptError` tells users to call for one."""
    model = long_tiny(name)
    ids = prompt(model, 2, LENGTH)
    with sparse(model) as cache:
        Driver(model, cache, length=LENGTH, step=53).feed()
        cache.reset()
        result = generate(model, cache, ids, max_new_tokens=5)
        assert_sparse(name, cache, Gathers(checked_gathers.calls[TAGGED[name] :]), 4)
    with sparse(model) as cache:
        harness.assert_exact(generate(model, cache, ids, max_new_tokens=5), result)


@pytest.mark.parametrize("name", [*MODELS[1::4], *in_full(MODELS[::2]), *in_full(MODELS[3::4])])
def test_everything_selected_is_exact(name: str, checked_gathers: Gathers) -> None:
    """The same gathers, with room for all groups: what `DynamicCache` gives. The adapter exists."""
    model = long_tiny(name)
    mask = harness.padding(2, LENGTH, 101)
    ids = prompt(model, 2, LENGTH).masked_fill(mask == 0, PAD)
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 6}
    expected = generate(model, transformers.DynamicCache(config=model.config), ids, **options)
    with unchanged(model), sparse(model, num_selected=1024) as cache:
        harness.assert_exact(expected, generate(model, cache, ids, **options))
        assert len(checked_gathers) == 5 * TAGGED[name]
        assert cache.report().selected_fraction == (1 if TAGGED[name] else None)


@pytest.mark.parametrize("wrong", ["stale slots", "rows", "tail"])
def test_the_check_notices(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is broken on purpose does not get through `checking`."""
    model = long_tiny("llama")
    if wrong == "stale slots":
        monkeypatch.setattr(DiskSwapLayer, "dropped", lambda layer, records: None)
    elif wrong == "rows":
        monkeypatch.setattr(PositionHistory, "select_rows", lambda history, rows: history.tail.select_rows(rows))
    else:
        gather = Fetcher.gather

        def shifted(*given: Any) -> Fetched:
            fetched = gather(*given)
            return dataclasses.replace(fetched, entries=fetched.entries.roll(1, 1))

        monkeypatch.setattr(Fetcher, "gather", shifted)
    with checking(), sparse(model, num_selected=1024, reuse_capacity=1024) as cache:
        with pytest.raises(AssertionError):
            driver = Driver(model, cache, length=LENGTH, step=0)
            driver.feed()
            driver.reorder([2, 0, 1])
            driver.feed()
            driver.crop(60)
            for _ in range(9):  # one by one: a prefill gives the slots back
                driver.feed()
        cache.reset()
