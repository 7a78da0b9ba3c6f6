"""A call of the attention function: what one query a row gives, and what goes to the model's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_tolerances import BFLOAT16, FLOAT32
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_offload_cache.model import TAG, AttentionCall, Tag


class _Module(torch.nn.Module):
    """What `sdpa_attention_forward` looks at."""

    num_key_value_groups, is_causal = 3, True


@pytest.mark.parametrize("masked", [None, "bool", "additive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_query_a_row_is_the_models_attention(masked: str | None, dtype: torch.dtype, rows: int) -> None:
    """Folded query heads on strided views give what transformers' own attention gives, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 6, 1, 16, generator=generator).to(dtype)
    entries = torch.randn(rows, 37, 64, generator=generator).to(dtype)
    keys, values = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in entries.split(32, -1))
    mask = None
    if masked is not None:
        mask = torch.rand(rows, 1, 1, 37, generator=generator) < 0.7
        mask[..., 0] = True
        if masked == "additive":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    expected = sdpa_attention_forward(_Module(), query, keys, values, mask, scaling=0.3)[0]
    new = torch.empty(rows, 2, 1, 16, dtype=dtype)
    call = AttentionCall(_refuse, _Module(), query, new, new, None, kwargs={"scaling": 0.3})
    found, weights = call.attend(keys, values, mask)
    assert weights is None
    assert found.shape == expected.shape == (rows, 1, 6, 16)
    assert found.dtype == dtype
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(6)}, {"output_attentions": True}])
def test_what_is_no_plain_softmax_goes_to_the_model(extra: dict[str, Any]) -> None:
    query, keys = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 5, 16)
    mark = object()
    given: list[dict[str, Any]] = []

    def own(*arguments: Any, **kwargs: Any) -> Any:
        given.append(kwargs)
        return mark

    call = AttentionCall(own, _Module(), query, keys[:, :, -1:], keys[:, :, -1:], None, (), {"scaling": 0.3, **extra})
    assert call.attend(keys, keys, None) is mark
    assert given == [{"scaling": 0.3, **extra}]
    assert (call.softcap, call.s_aux, call.wants_weights) == (
        extra.get("softcap"), extra.get("s_aux"), bool(extra.get("output_attentions"))
    )  # fmt: skip


def test_a_soft_cap_that_the_model_drops_is_none() -> None:
    query, keys = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 1, 16)
    call = AttentionCall(sdpa_attention_forward, _Module(), query, keys, keys, None, (), {"softcap": 30.0})
    assert call.softcap is None


MASK = torch.ones(1, 1, 3, 20, dtype=torch.bool)
REPLACEABLE: dict[str, tuple[bool, dict[str, Any]]] = {
    "causal": (True, {}),
    "one query": (True, {"queries": 1, "is_causal": False}),
    "masked": (True, {"mask": MASK, "is_causal": False}),
    "soft cap": (True, {"softcap": 30.0, "s_aux": torch.zeros(6)}),
    "dropout and weights": (True, {"dropout": 0.1, "output_attentions": True}),
    "nothing unknown": (True, {"position_bias": None, "indices": None, "sinks": None}),
    "not causal": (False, {"is_causal": False}),
    "position bias": (False, {"position_bias": torch.zeros(1)}),
    "indices": (False, {"indices": torch.zeros(1)}),
    "sinks": (False, {"sinks": torch.zeros(1)}),
    "by position": (False, {"args": (7,)}),
    "other columns": (False, {"mask": MASK[..., 1:]}),
    "a mask a head": (False, {"mask": MASK.expand(-1, 6, -1, -1)}),
    "a mask of another kind": (False, {"mask": MASK[0]}),
    "wider keys": (False, {"key_dim": 24}),
    "values of another update": (False, {"tag": None}),
}
"""Whether it is attention as we know it, over 20 columns, and what differs from a plain causal call."""


@pytest.mark.parametrize("name", REPLACEABLE)
def test_what_is_replaceable(name: str) -> None:
    expected, given = REPLACEABLE[name]
    given = dict(given)
    query = torch.zeros(1, 6, given.pop("queries", 3), 16)
    key, value = torch.zeros(1, 2, 3, given.pop("key_dim", 16)), torch.zeros(1, 2, 3, 8)
    tag = Tag(None, False)
    key.__dict__[TAG], value.__dict__[TAG] = tag, given.pop("tag", tag)
    call = AttentionCall(_refuse, _Module(), query, key, value, given.pop("mask", None), given.pop("args", ()), given)
    assert call.tag is tag
    assert call.replaceable(20) is expected


def test_what_is_run_is_the_call_on_other_keys() -> None:
    """The module, the query and every further argument are the call's; keys, values and mask are what is given."""
    query, key = torch.randn(1, 6, 3, 16), torch.randn(1, 2, 3, 16)
    module, keys, values, mask = _Module(), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), torch.ones(1, 1, 3, 9)
    given: list[Any] = []
    call = AttentionCall(lambda *a, **k: given.append((a, k)), module, query, key, key, None, (7,), {"dropout": 0.0})
    call.run(keys, values, mask)
    assert given == [((module, query, keys, values, mask, 7), {"dropout": 0.0})]
    assert (call.num_queries, call.scaling, call.tag) == (3, 16**-0.5, None)
    call.attend(keys, values, mask)  # several queries: the model's own too
    assert given[1] == given[0]


@pytest.mark.parametrize("heads", [1, 6])
def test_one_query_under_a_mask(heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 6, 1, 16, generator=generator), torch.randn(2, 2, 9, 16, generator=generator)
    values, mask = torch.randn(2, 2, 9, 16, generator=generator), torch.rand(2, heads, 1, 9, generator=generator) > 0.4
    expected = sdpa_attention_forward(_Module(), query, keys, values, mask)[0]
    found, _ = AttentionCall(_refuse, _Module(), query, keys, values, None).attend(keys, values, mask)
    torch.testing.assert_close(found, expected, rtol=10 * FLOAT32, atol=10 * FLOAT32)


def test_a_stream_is_the_models_attention_over_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 6, 3, 16, generator=generator), torch.randn(2, 2, 23, 16, generator=generator)
    values = torch.randn(2, 2, 23, 16, generator=generator)
    mask = torch.ones(3, 23, dtype=torch.bool).tril(20)[None, None]
    expected = sdpa_attention_forward(_Module(), query, keys, values, mask, scaling=0.3)[0]
    call = AttentionCall(_refuse, _Module(), query, keys[:, :, 20:], values[:, :, 20:], mask, (), {"scaling": 0.3})
    order = torch.randperm(20, generator=generator)
    blocks = [(keys[:, :, part], values[:, :, part], part) for part in order.split(6)]
    found, weights = call.stream(blocks, (call.key, call.value), mask, None)
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=10 * FLOAT32, atol=10 * FLOAT32)


def _refuse(*arguments: Any, **kwargs: Any) -> Any:
    raise AssertionError("the model's own attention was not to be called")
