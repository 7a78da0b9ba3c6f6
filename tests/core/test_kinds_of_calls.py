"""Attention that is asked in other ways: masks that hide nothing, weights, two types under autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checked_cache import Gathers
from harness import prompt
from long_models import EXACT, LENGTH, dynamic, long_fresh, sparse


@pytest.fixture(scope="module")
def eager() -> Any:
    model = long_fresh("llama")
    model.set_attn_implementation("eager")
    return model


def step(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options)


# ---------------------------------------------------------------------------------------------- masks


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


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("fields", [EXACT, {}, {**EXACT, "exact": "bitwise"}], ids=["exact", "sparse", "bitwise"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_step_that_asks_for_weights_gets_the_whole_layers(
    tokens: int, fields: dict[str, Any], eager: Any, checked_gathers: Gathers
) -> None:
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


# ---------------------------------------------------------------------------------------------- autocast


@pytest.fixture(scope="module")
def full_precision() -> Any:
    """Smaller weights than elsewhere: the tokens of bfloat16 are those of the same sum in another order."""
    return long_fresh("llama")


@pytest.mark.parametrize(
    "fields", [{}, EXACT, {**EXACT, "block_tokens": 1024}, {**EXACT, "exact": "bitwise"}],
    ids=["sparse", "exact", "one block", "bitwise"],
)  # fmt: skip
def test_a_later_step_without_autocast(
    fields: dict[str, Any], full_precision: Any, checked_gathers: Gathers
) -> None:
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
