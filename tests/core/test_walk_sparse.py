"""The walk with sparse caches: exact where everything is selected; where little is, no error and no wrong gather."""

from __future__ import annotations

import warnings
from typing import Any

import harness
import pytest
import walk
from checked_cache import Gathers, checked
from harness import PAD, generate, padding, prompt, unchanged
from long_models import LENGTH, sparse, walked
from transformers import DynamicCache

from hf_offload_cache.registry import CACHES, cache_class

SEEDS = {"minimax_m3_vl_text": 3}
"""Of weights. With the usual ones a step's choice of experts is a tie: `DynamicCache` itself says something else there
once they change by a millionth, and so does a cache whose entries are summed in another order. With 1, under
transformers 5.17, a choice of blocks is one for beams of padded rows."""


def pairs() -> list[Any]:
    """`DiskSwapCache` with every architecture, the others with representatives. In the default run these take turns:
    each of the caches meets four of the eight in `walk.WITH_EVERY_CACHE`."""
    found = [pytest.param("disk-swap", *one.values, marks=one.marks)
             for one in walk.usually(walk.REPRESENTATIVES, walk.architectures())]  # fmt: skip
    for turn, method in enumerate(sorted(CACHES.keys() - {"disk-swap"})):
        usual = walk.WITH_EVERY_CACHE[turn % 2 :: 2]
        found += [pytest.param(method, *one.values, marks=one.marks)
                  for one in walk.usually(usual, walk.REPRESENTATIVES)]  # fmt: skip
    return found


@pytest.mark.parametrize(("method", "name"), pairs())
def test_everything_selected(method: str, name: str) -> None:
    """Greedy and beams of padded rows, through steps that select, are `DynamicCache`'s; also bitwise."""
    cls = checked(cache_class(method))

    def make(model: Any, exact: bool | str) -> Any:
        fields = {**harness.SMALL, "engine": "memory"}
        if exact == "bitwise":
            return cls(model, exact="bitwise", **fields)
        return cls(model, num_selected=512, reuse_capacity=40, **fields)

    result = walk.walk_one(walk.architectures()[name], make=make, seed=SEEDS.get(name, 0))
    if not result.generates:
        pytest.skip(f"{result.status}: {result.reason}")
    assert result.status == "exact" and result.bitwise, result
    selecting = result.layers["tagged"] - result.layers["chosen by the model"]
    assert len(cls.gathers) >= (walk.NEW - 1) * selecting
    assert bool(cls.gathers) == bool(selecting)


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


@pytest.mark.parametrize("name", walk.usually(walk.REPRESENTATIVES[::2], walk.architectures()))
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
                tagged = {layer.layer_idx for layer in cache.selective if layer.state == "tagged"}
                assert {layer for layer, _ in checked_gathers.calls} == tagged
                assert len(checked_gathers) >= 3 * len(tagged)
                if tagged:
                    assert 0 < report.selected_fraction < 0.5
            checked_gathers.calls.clear()
