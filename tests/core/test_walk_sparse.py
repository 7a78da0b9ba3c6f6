"""The walk with sparse caches: exact where everything is selected; where little is, no error and no wrong gather."""

from __future__ import annotations

import warnings
from typing import Any

import harness
import pytest
import walk
from gathers import Gathers, checking
from harness import PAD, generate, padding, prompt, unchanged
from long_models import LENGTH, sparse, walked
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache

REPRESENTATIVES = (*walk.REPRESENTATIVES, "jamba", "opt", "phi", "stablelm", "gpt_neox", "bamba", "mixtral", "qwen3")
"""What the default run takes; the others are slow. With some test_every_cache.py selects everything by every cache."""
FURTHER = set(REPRESENTATIVES) - set(walk.WITH_EVERY_CACHE)
_TIES = harness.since("5.23", "two blocks tie in the indexer of that model itself, and rounding decides")


def all_selected(model: Any, exact: bool | str) -> DiskSwapCache:
    """A sparse cache with room for every group; `exact` matters only to the bitwise part of the walk."""
    fields = {**harness.SMALL, "engine": "memory"}
    if exact == "bitwise":
        return DiskSwapCache(model, exact="bitwise", **fields)
    return DiskSwapCache(model, num_selected=512, reuse_capacity=40, **fields)


def check(result: walk.Result) -> None:
    """Skips where there is nothing to compare with."""
    if not result.generates:
        pytest.skip(f"{result.status}: {result.reason}")
    assert result.status == "exact", result
    assert result.bitwise, result


@pytest.mark.parametrize(
    "name", [pytest.param(*each.values, marks=[*each.marks, _TIES]) if "minimax_m3_vl_text" in each.values else each
             for each in walk.usually(FURTHER, walk.architectures())],
)  # fmt: skip
def test_everything_selected(name: str) -> None:
    """Greedy, and beams of padded rows, as with `DynamicCache`; tagged layers gather, in every step."""
    with checking() as seen:
        result = walk.walk_one(walk.architectures()[name], make=all_selected)
    check(result)
    steps = walk.NEW - 1
    assert len(seen) >= steps * result.layers["tagged"]
    assert bool(len(seen)) == bool(result.layers["tagged"])


def dynamic_runs(model: Any, cases: list[dict[str, Any]]) -> bool:
    try:
        for case in cases:
            cache = DynamicCache(config=model.config)
            out = generate(model, cache, **case)
            if not out.logits.isfinite().any() or out.logits.isnan().any():
                return False
        return any(getattr(layer, "is_initialized", False) for layer in cache.layers)
    except Exception:
        return False


@pytest.mark.parametrize("name", walk.usually(REPRESENTATIVES, walk.architectures()))
def test_little_selected(name: str, checked_gathers: Gathers) -> None:
    """A prompt long enough for the adapter, alone and padded beams: no error, right gathers in every tagged layer."""
    mask = padding(2, LENGTH, 101)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = walked(name)
        except Exception as error:
            pytest.skip(f"not buildable: {error}")
        ids = prompt(model, 2, LENGTH)
        cases: list[dict[str, Any]] = [
            {"input_ids": ids[:1], "max_new_tokens": 4},
            {
                "input_ids": ids.masked_fill(mask == 0, PAD),
                "attention_mask": mask,
                "num_beams": 2,
                "max_new_tokens": 4,
            },
        ]
        runnable = [case for case in cases if dynamic_runs(model, [case])]
        if not runnable:
            pytest.skip("DynamicCache does not generate with this prompt")
        for case in runnable:
            with unchanged(model), sparse(model, reuse_capacity=40) as cache:
                out = generate(model, cache, **case)
                assert out.tokens.shape == (len(case["input_ids"]), LENGTH + 4)
                assert out.logits.isfinite().any()
                assert not out.logits.isnan().any()
                report = cache.report()
                tagged = {layer.layer_idx for layer in cache.offloaded if layer.state == "tagged"}
                assert {layer for layer, _ in checked_gathers.calls} == tagged
                assert len(checked_gathers) >= 3 * len(tagged)
                if tagged:
                    assert 0 < report.selected_fraction < 0.5
            checked_gathers.calls.clear()
