"""Attention that is asked in other ways: masks that hide nothing, weights, two types under autocast."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gathers import Gathers
from harness import PAD, Decoded, assert_exact, compare, generate, padding, prompt
from long_models import long_fresh, sparse
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.core import OffloadCache, Step

LENGTH = 620
EXACT: dict[str, Any] = {"exact": True, "rank": None, "num_selected": 400}
"""Over the fields of `sparse`."""


BFLOAT16 = 0.1
"""Largest difference of a logit, in standard deviations, of sums in bfloat16 that are made in another order."""


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


@pytest.fixture(scope="module")
def eager() -> Any:
    model = long_fresh("llama")
    model.set_attn_implementation("eager")
    return model


def step(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options)


# ---------------------------------------------------------------------------------------------- masks


def test_a_mask_that_hides_nothing_is_none(eager: Any, checked_gathers: Gathers) -> None:
    """Eager attention makes one for every step: as many units are selected as without, and the same."""
    plain = long_fresh("llama")
    ids = prompt(eager, 2, LENGTH)
    chosen = []
    for model in (plain, eager):
        with sparse(model) as cache:
            step(model, cache, ids)
            for token in prompt(model, 2, 5, 3).split(1, 1):
                step(model, cache, token)
            assert cache.selecting is not None
            assert not cache.selecting.padded
        chosen.append([units for _, units in checked_gathers.calls])
        checked_gathers.calls.clear()
    assert len(chosen[0]) == len(chosen[1]) == 5 * 3
    for without, with_mask in zip(*chosen, strict=True):
        assert without.shape == with_mask.shape == (2, 32 // 4 + 1)
        assert np.array_equal(without, with_mask)


@pytest.mark.parametrize("exact", [True, False])
def test_a_bias_is_attended_with(exact: bool, checked_gathers: Gathers) -> None:
    """A finite additive mask hides nothing, so that it is no padding; what it adds to the scores counts."""
    model = long_fresh("llama")
    ids, token = prompt(model, 1, LENGTH), prompt(model, 1, 1, 3)
    bias = torch.zeros(1, 1, 1, LENGTH + 1)
    bias[..., :300] = -2.0
    plain = dynamic(model)
    step(model, plain, ids)
    unbiased = copy.deepcopy(plain)
    expected = step(model, plain, token, attention_mask=bias).logits
    with sparse(model, **(EXACT if exact else {"num_selected": 2048})) as cache:
        step(model, cache, ids)
        found = step(model, cache, token, attention_mask=bias).logits
        assert cache.selecting is None or not cache.selecting.padded
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # float32, in another order
    assert (step(model, unbiased, token).logits - expected).abs().max() > 0.1, "the bias counts"
    assert bool(checked_gathers) is not exact


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_looked_at_once_a_step(
    padded: bool, eager: Any, monkeypatch: pytest.MonkeyPatch, checked_gathers: Gathers
) -> None:
    """However many layers are given it."""
    looked: list[int] = []
    asked: list[Any] = []
    end_step, visible = OffloadCache.end_step, Step.visible

    def ended(cache: OffloadCache, output: Any = None) -> Any:
        assert cache.shared.step is not None
        looked.append(len(cache.shared.step._masks))
        return end_step(cache, output)

    def watched(self: Step, mask: Any) -> Any:
        seen = visible(self, mask)
        asked.append(seen)
        return seen

    monkeypatch.setattr(OffloadCache, "end_step", ended)
    monkeypatch.setattr(Step, "visible", watched)
    mask = padding(2, LENGTH, 101 if padded else 0)
    ids = prompt(eager, 2, LENGTH).masked_fill(mask == 0, PAD)
    with sparse(eager) as cache:
        generate(eager, cache, ids, attention_mask=mask, max_new_tokens=5)
    assert looked[1:] == [1] * 4
    assert len(asked) >= 4 * 3
    assert all((seen is not None) == padded for seen in asked[-12:])
    assert len(checked_gathers) == 4 * 3


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("fields", [EXACT, {}, {**EXACT, "exact": "bitwise"}], ids=["exact", "sparse", "bitwise"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_step_that_asks_for_weights_gets_the_whole_layers(
    tokens: int, fields: dict[str, Any], eager: Any, checked_gathers: Gathers
) -> None:
    """Those of all tokens, in that step alone: the next one selects again."""
    ids, late = prompt(eager, 2, LENGTH), prompt(eager, 2, tokens, 4)
    further = prompt(eager, 2, 3, 6).split(1, 1)
    with sparse(eager, **fields) as cache:
        step(eager, cache, ids)
        plain = dynamic(eager)
        for layer_idx, layer in enumerate(cache.offloaded):
            plain.update(*layer.whole(), layer_idx)
        out, expected = (step(eager, held, late, output_attentions=True) for held in (cache, plain))
        assert len(out.attentions) == 3
        for got, wanted in zip(out.attentions, expected.attentions, strict=True):
            assert got.shape == (2, 4, tokens, LENGTH + tokens)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.sum(-1), torch.ones(2, 4, tokens), rtol=0, atol=1e-4)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-3, atol=1e-3)
        assert len(checked_gathers) == 0
        for token in further:
            result, wanted = step(eager, cache, token).logits, step(eager, plain, token).logits
            if fields:
                torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)
        assert len(checked_gathers) == (0 if fields else 3 * 3)
        full = fields.get("exact") == "bitwise"
        assert cache.report().layers == {"unknown": 0, "tagged": 0 if full else 3, "full": 3 if full else 0, "kept": 0}


@pytest.mark.parametrize("fields", [EXACT, {"num_selected": 2048}], ids=["exact", "all"])
def test_generate_with_weights(fields: dict[str, Any], eager: Any) -> None:
    """As `DynamicCache`'s, step by step."""
    ids = prompt(eager, 1, 90)
    results = []
    with sparse(eager, **fields) as cache:
        for held in (dynamic(eager), cache):
            with torch.no_grad():
                results.append(
                    eager.generate(
                        ids,
                        past_key_values=held,
                        max_new_tokens=4,
                        do_sample=False,
                        return_dict_in_generate=True,
                        output_attentions=True,
                    )
                )
    assert torch.equal(results[0].sequences, results[1].sequences)
    for wanted, got in zip(results[0].attentions, results[1].attentions, strict=True):
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- autocast


def cast(model: Any, cache: Any, rows: int = 2, **options: Any) -> Decoded:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return generate(model, cache, prompt(model, rows, LENGTH), max_new_tokens=8, **options)


@pytest.fixture(scope="module")
def full_precision() -> Any:
    """Smaller weights than elsewhere: the tokens of bfloat16 are those of the same sum in another order."""
    return long_fresh("llama")


def test_autocast_bitwise(full_precision: Any) -> None:
    """Keys of float32 (rotated so) and values of bfloat16, kept in one type: what attention gets is the same."""
    with sparse(full_precision, **{**EXACT, "exact": "bitwise"}) as cache:
        found = compare(cast(full_precision, dynamic(full_precision)), cast(full_precision, cache))
        assert found.same_tokens
        assert found.deviation <= BFLOAT16, found


def test_autocast_exact(full_precision: Any) -> None:
    expected = cast(full_precision, dynamic(full_precision))
    with sparse(full_precision, **EXACT) as cache:
        result = cast(full_precision, cache)
        assert cache.report().layers["tagged"] == 3
    close = compare(Decoded(expected.tokens, expected.logits[:2]), Decoded(expected.tokens, result.logits[:2]))
    assert close.deviation <= BFLOAT16, close


def test_autocast_sparse(full_precision: Any, checked_gathers: Gathers) -> None:
    with sparse(full_precision) as cache:
        out = cast(full_precision, cache)
        assert out.logits.isfinite().all()
        assert 0 < cache.report().selected_fraction < 0.5
    assert len(checked_gathers) == 7 * 3


@pytest.mark.parametrize(
    "fields", [{}, EXACT, {**EXACT, "block_tokens": 1024}, {**EXACT, "exact": "bitwise"}],
    ids=["sparse", "exact", "one block", "bitwise"],
)  # fmt: skip
def test_a_later_step_without_autocast(
    fields: dict[str, Any], full_precision: Any, checked_gathers: Gathers
) -> None:
    """What was kept under autocast goes on in a step of float32, and back."""
    model, ids = full_precision, prompt(full_precision, 1, LENGTH)
    with sparse(model, **fields) as cache:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(model, cache, ids)
            step(model, cache, prompt(model, 1, 1))
        assert step(model, cache, prompt(model, 1, 1)).logits.isfinite().all()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert step(model, cache, prompt(model, 1, 1)).logits.isfinite().all()
        assert cache.get_seq_length() == LENGTH + 3
    assert len(checked_gathers) == (0 if fields else 3 * 3)


def test_an_attached_model_without_autocast_is_as_ever(full_precision: Any) -> None:
    with DiskSwapCache(full_precision, exact=True, engine="memory") as cache:
        ids = prompt(full_precision, 1, 90)
        assert_exact(
            generate(full_precision, dynamic(full_precision), ids, max_new_tokens=4),
            generate(full_precision, cache, ids, max_new_tokens=4),
        )
