"""Caches of models whose layers keep more than keys and values: forked, saved, opened, reordered and planned whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import COMMON, build, generate, prompt
from layered_models import LAYERED, layered
from pairwise import combinations
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

from hf_offload_cache import AbstractTreeCache, ClusterCache, DiskSwapCache, SpecCache, offload_cache
from hf_offload_cache.errors import ReadOnlyError, UnsupportedModelError
from hf_offload_cache.model import Geometry, may_crop
from hf_offload_cache.testing.model_walk import TOLERANCE

LENGTH, NEW = 70, 5
MORE_THAN_KEYS = ["blocks of keys", "compressed"]


def logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYERED)
def test_a_fork_and_an_opened_context_go_on_as_a_dynamic_cache(name: str, tmp_path: Path) -> None:
    model = layered(name)
    ids, plain = prompt(model, 1, LENGTH), DynamicCache(config=model.config)
    first = generate(model, plain, ids, max_new_tokens=NEW)
    turn = torch.cat([first.tokens, ids[:, :9]], 1)
    with DiskSwapCache(model, exact=True, path=tmp_path) as cache:
        assert torch.equal(generate(model, cache, ids, max_new_tokens=NEW).tokens, first.tokens)
        cache.save(tmp_path / "context")
        with cache.fork() as twin, DiskSwapCache.open(tmp_path / "context", model, path=tmp_path) as opened:
            expected = generate(model, plain, turn, max_new_tokens=NEW)
            found = [generate(model, one, turn, max_new_tokens=NEW) for one in (twin, opened)]
        assert cache.tokens == LENGTH + NEW - 1  # neither has changed it
    for one in found:
        assert torch.equal(one.tokens, expected.tokens)
        torch.testing.assert_close(one.logits, expected.logits, rtol=TOLERANCE, atol=TOLERANCE)


ROWS: dict[str, tuple[list[int], Any]] = {
    "reorder": ([1, 1], lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    "repeat": ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
    "select": ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "select by a mask": ([0], lambda cache: cache.batch_select_indices(torch.tensor([True, False]))),
}


@pytest.mark.parametrize(("name", "how"), combinations(list(LAYERED), list(ROWS), times=2))
def test_sequences_go_on_as_if_they_had_always_been_there(name: str, how: str, tmp_path: Path) -> None:
    model, (rows, change) = layered(name), ROWS[how]
    ids, more = prompt(model, 2, LENGTH), prompt(model, 4, 3, seed=5)
    with DiskSwapCache(model, exact=True, path=tmp_path) as cache:
        logits(model, cache, ids)
        change(cache)
        found = [logits(model, cache, more[: len(rows), at : at + 1]) for at in range(3)]
    plain = DynamicCache(config=model.config)
    logits(model, plain, ids[rows])
    for at, own in enumerate(found):
        expected = logits(model, plain, more[: len(rows), at : at + 1])
        torch.testing.assert_close(own, expected, rtol=TOLERANCE, atol=TOLERANCE)


class Counting(DynamicLayer):
    """What a model might define: besides keys and values a state whose sequences nobody can tell."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.seen: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = torch.zeros(7, key_states.shape[0])
        return super().update(key_states, value_states, *args, **kwargs)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "counting_attention", Counting)
    config = MistralConfig(**{**COMMON, "sliding_window": None, "layer_types": ["full_attention"] * 3})
    model = build(MistralForCausalLM, config)
    object.__setattr__(model.config, "layer_types", ["full_attention", "counting_attention", "full_attention"])
    return model


def test_what_cannot_follow_is_refused_by_name_with_nothing_changed(counting: Any, tmp_path: Path) -> None:
    ids = prompt(counting, 2, LENGTH)
    with DiskSwapCache(counting, exact=True, path=tmp_path) as cache:
        first = logits(counting, cache, ids)
        for _, change in ROWS.values():
            with pytest.raises(UnsupportedModelError, match=r"a Counting keeps 'seen' of shape \(7, 2\)"):
                change(cache)
        with pytest.raises(UnsupportedModelError, match="a Counting cannot be cropped"):
            cache.crop(-3)
        assert not cache.is_croppable and cache.tokens == LENGTH and len(first) == 2
        with cache.fork() as twin:
            step = ids[:, :1]
            assert torch.equal(logits(counting, twin, step), logits(counting, cache, step))


def test_compressed_entries_are_not_cropped(tmp_path: Path) -> None:
    """transformers' own layer takes back keys and values alone."""
    model = layered("compressed")
    with DiskSwapCache(model, exact=True, path=tmp_path) as cache:
        logits(model, cache, prompt(model, 1, LENGTH))
        assert not cache.is_croppable and not may_crop(model)
        with pytest.raises(UnsupportedModelError, match="a DeepseekV4HCACache cannot be cropped"):
            cache.crop(-3)
        assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize(
    ("name", "cache_class"),
    combinations(MORE_THAN_KEYS, [DiskSwapCache, ClusterCache, AbstractTreeCache, SpecCache]),
)
def test_the_warning_says_what_stays_in_memory(name: str, cache_class: Any) -> None:
    model = layered(name)
    with pytest.warns(UserWarning, match=r"layers that keep more than keys and values \(.*\): they are not offloaded"):
        cache = cache_class(model)
    with cache:
        assert not any("nothing to offload" in one for one in cache.report().warnings)
    if name != "blocks of keys":
        with pytest.raises(UnsupportedModelError, match="layers that keep more than keys and values"):
            offload_cache(model, "1/2", 200)


@pytest.mark.parametrize("name", LAYERED)
def test_all_that_stays_in_memory_is_in_the_account_and_in_plans(name: str, tmp_path: Path) -> None:
    model = layered(name)
    ids, plain = prompt(model, 2, LENGTH), DynamicCache(config=model.config)
    logits(model, plain, ids)
    held = 0
    for layer in plain.layers:
        states = {one.data_ptr(): one for one in tensors(vars(layer))}
        held += sum(one.nbytes for one in states.values())
    with DiskSwapCache.for_budget(model, "4MiB", LENGTH, 2, path=tmp_path, exact=True) as cache:
        logits(model, cache, ids)
        report = cache.report()
        assert report.full_kv_bytes == held
        planned = DiskSwapCache.plan(Geometry.of(model), cache.config, LENGTH, 2)
        assert report.peak_memory_bytes <= planned.peak_bytes
        assert held <= planned.full_kv_bytes <= 1.2 * held


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.ndim and value.numel() else []
    parts = value.values() if isinstance(value, dict) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_layers_that_stay_in_memory_keep_their_places() -> None:
    with DiskSwapCache(layered("window")) as cache, pytest.raises(ReadOnlyError):
        cache.layers[0] = cache.layers[2]
