"""Streamed attention against one softmax in float64, written down here; masks and what they leave visible."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from attention_tolerances import BFLOAT16, FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch_memory import most_held

from hf_offload_cache.model import (
    AttentionCall,
    additive_mask,
    attend_block,
    attend_block_reference,
    attend_to_latents,
    bytes_of_call,
    mask_at,
    planned_bytes,
    shown,
)
from hf_offload_cache.model.masks import hiding
from hf_offload_cache.model.stream_attention import _efficient, _flash, stream_attention
from hf_offload_cache.testing import stream_attention_reference


def tensors(
    batch: int, heads: int, kv: int, queries: int, tokens: int, dim: int, value_dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, kv, tokens, dim), (batch, kv, tokens, value_dim)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return 2 * query, keys, values


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax in float64 (B, q, H, Dv); zeros for a query that sees nothing. `visible` (·, 1, q, T)."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(repeats, 1) for part in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    weights = scores.exp() * visible
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.double().exp().view(1, -1, 1, 1)
    return ((weights / total.clamp_min(1e-300)) @ values).transpose(1, 2)


def split(keys: torch.Tensor, values: torch.Tensor, edges: list[int], own: int):
    """History blocks with those edges, and the block of the last `own` tokens."""
    stop = keys.shape[2] - own
    cuts = sorted({0, stop, *(edge % (stop + 1) for edge in edges)})
    blocks = [(keys[:, :, a:b], values[:, :, a:b]) for a, b in pairwise(cuts)]
    return blocks, (keys[:, :, stop:], values[:, :, stop:])


def error(result: torch.Tensor, expected: torch.Tensor, values: torch.Tensor) -> float:
    assert result.shape == expected.shape
    assert result.is_contiguous()
    assert not result.isnan().any()
    return float((result.double() - expected).abs().max() / values.abs().max())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_one_softmax(data: st.DataObject) -> None:
    """Any split into blocks; shared key heads; every kind of mask; soft caps, sinks, value heads of another width."""
    draw = data.draw
    kv, repeats, batch = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    queries, extra = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    dim = draw(st.sampled_from([4, 8]))
    value_dim = draw(st.sampled_from([dim, dim, 6]))
    kind = draw(st.sampled_from(["none", "bool", "min", "-inf", "bias"]))
    own = queries + (extra if queries == 1 or kind != "none" else 0)
    tokens = own + draw(st.integers(0, 50))
    seed = draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = tensors(batch, kv * repeats, kv, queries, tokens, dim, value_dim, seed)
    options = {
        "scaling": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "s_aux": torch.randn(kv * repeats, generator=generator) if draw(st.booleans()) else None,
    }

    causal = torch.arange(tokens) <= torch.arange(queries)[:, None] + (tokens - queries)
    visible = causal.expand(batch, 1, -1, -1).clone()
    mask, bias = None, None
    if kind != "none":
        visible &= torch.rand(visible.shape, generator=generator) < 0.7
        if draw(st.booleans()):  # left padding that hides whole blocks
            visible[-1, ..., : draw(st.integers(0, tokens))] = False
        if draw(st.booleans()):
            visible[0, :, 0] = False
        mask = visible
    if kind in ("min", "-inf"):
        hidden = torch.finfo(torch.float32).min if kind == "min" else float("-inf")
        mask = torch.zeros(visible.shape).masked_fill(~visible, hidden)
    elif kind == "bias":
        bias = torch.randn(visible.shape, generator=generator)
        mask = bias.masked_fill(~visible, torch.finfo(torch.float32).min)

    blocks, last = split(keys, values, draw(st.lists(st.integers(0, 60), max_size=6)), own)
    result = stream_attention(query, iter(blocks), last, mask, **options)
    expected = dense(query, keys, values, visible, **options, bias=None if bias is None else bias.double())
    assert error(result, expected, values) < FLOAT32 * 10
    assert not result.transpose(1, 2)[~visible.any(-1).expand(-1, kv * repeats, -1)].any()


@pytest.mark.parametrize("padded", [0, 40])
@pytest.mark.parametrize("queries", [1, 7])
def test_bfloat16(queries: int, padded: int) -> None:
    query, keys, values = (part.bfloat16() for part in tensors(2, 4, 2, queries, 300, 16, 16, 0))
    visible = (torch.arange(300) <= torch.arange(queries)[:, None] + 300 - queries).expand(2, 1, -1, -1).clone()
    visible[1, ..., :padded] = False
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    blocks, last = split(keys, values, list(range(0, 293, 32)), queries)
    result = stream_attention(query, blocks, last, mask if padded else None)
    assert result.dtype == torch.bfloat16
    assert error(result, dense(query, keys, values, visible), values) < BFLOAT16


@pytest.mark.parametrize("hidden", ["bool", "min", "-inf"])
def test_a_query_that_sees_nothing_gives_zeros(hidden: str) -> None:
    query, keys, values = tensors(2, 4, 2, 3, 20, 8, 8, 1)
    visible = torch.ones(2, 1, 3, 20, dtype=torch.bool)
    visible[0, :, 1] = False
    visible[1, ..., :15] = False
    fill = {"min": torch.finfo(torch.float32).min, "-inf": float("-inf")}
    mask = visible if hidden == "bool" else torch.zeros(visible.shape).masked_fill(~visible, fill[hidden])
    blocks, last = split(keys, values, [5, 10], 3)
    for s_aux in (None, torch.zeros(4)):
        result = stream_attention(query, blocks, last, mask, s_aux=s_aux)
        assert not result[0, 1].any()
        assert error(result, dense(query, keys, values, visible, s_aux=s_aux), values) < FLOAT32 * 10


def test_blocks_may_be_overwritten() -> None:
    """A block is used before the next one is asked for: the same buffer may hold all of them, one after the other."""
    query, keys, values = tensors(1, 2, 1, 1, 40, 8, 8, 2)
    blocks, last = split(keys, values, [10, 20, 30], 4)

    def reused():
        for block in blocks:
            copies = [part.clone() for part in block]
            yield tuple(copies)
            for copy in copies:
                copy.fill_(torch.nan)

    result = stream_attention(query, reused(), last, None)
    assert error(result, dense(query, keys, values, torch.ones(1, 1, 1, 40)), values) < FLOAT32 * 10


CASES = pytest.mark.parametrize(
    ("case", "heads", "kv", "queries"),
    [
        (case, *heads, queries)
        for case in ("plain", "causal", "masked", "own masked wholly")
        for heads in ((4, 4), (6, 2))
        for queries in (1, 5, 33)
    ],
)


def fused_case(case: str, heads: int, kv: int, queries: int, device: str, dtype: torch.dtype):
    """A call of `attend_block`: query, keys, values, mask, and its options."""
    tokens = queries if case == "causal" else 37
    query, keys, values = (part.to(device, dtype) for part in tensors(2, heads, kv, queries, tokens, 16, 16, 3))
    mask = None
    if "masked" in case:
        mask = torch.zeros(2, 1, queries, tokens, device=device)
        mask[1, ..., : 20 if case == "masked" else tokens] = float("-inf")
        mask[0, :, -1] = float("-inf")
    keys, values = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (keys, values))  # as in a record
    return (query, keys, values, mask), {"causal": case == "causal", "scaling": 0.25, "softcap": None}


def compare_with_reference(call, options, tolerance: float) -> None:
    """Outputs, and log-sum-exps, which weigh the block against others."""
    output, log_sum = attend_block(*call, **options)
    expected, expected_log_sum = attend_block_reference(*call, **options)
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(log_sum, expected_log_sum, rtol=0, atol=tolerance)


@CASES
def test_fused_equals_the_reference(case: str, heads: int, kv: int, queries: int) -> None:
    call, options = fused_case(case, heads, kv, queries, "cpu", torch.float32)
    compare_with_reference(call, options, 2e-5)
    if case == "own masked wholly":
        output, log_sum = attend_block(*call, **options)
        assert (log_sum[1] == float("-inf")).all()
        assert not output[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_fused_equals_the_reference_on_a_gpu(
    case: str, heads: int, kv: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16: the kernel rounds what it returns to 8 bits, and values are below 4."""
    call, options = fused_case(case, heads, kv, queries, "cuda", dtype)
    compare_with_reference(call, options, 2e-5 if dtype == torch.float32 else 2e-2)
    monkeypatch.setattr("hf_offload_cache.model.stream_attention.attend_block_reference", None)
    attend_block(*call, **options)


@pytest.mark.parametrize("kernel", [_flash, _efficient])
@CASES
def test_kernels_of_a_gpu_take_the_call(kernel: Any, case: str, heads: int, kv: int, queries: int) -> None:
    if kernel is _flash and "masked" in case:
        return  # not asked
    (query, keys, values, mask), options = fused_case(case, heads, kv, queries, "meta", torch.bfloat16)
    keys, values = (part.repeat_interleave(heads // kv, 1) for part in (keys, values))
    output, log_sum = kernel(query, keys, values, mask, options["causal"], options["scaling"])
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
    assert (log_sum.shape, log_sum.dtype) == (query.shape[:3], torch.float32)


def test_the_fused_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload_cache.model.stream_attention.attend_block_reference", None)
    query, keys, values = tensors(1, 2, 1, 3, 9, 8, 8, 0)
    blocks, last = split(keys, values, [4], 3)
    assert stream_attention(query, blocks, last, None).shape == (1, 3, 2, 8)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_key_head_is_read_once_for_its_query_heads(queries: int) -> None:
    """By the kernel of a CPU, without a copy of keys and values for each query head."""
    query, keys, values = tensors(2, 6, 2, queries, 37, 16, 16, 3)
    calls: list[list[int]] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors_given = [one.data_ptr() for one in args if isinstance(one, torch.Tensor)]
            calls.append(tensors_given if "flash_attention" in str(function) else [])
            return function(*args, **(kwargs or {}))

    with Calls():
        output, _ = attend_block(query, keys, values, None, causal=False, scaling=0.25, softcap=None)
    assert output.shape == (2, 6, queries, 16)
    assert [call[1:] for call in calls if call] == [[keys.data_ptr(), values.data_ptr()]]


def test_the_reference_works_through_many_queries_in_parts() -> None:
    """More queries than it computes at a time, with a mask and causally."""
    query, keys, values = tensors(1, 2, 1, 600, 610, 4, 6, 5)
    visible = torch.arange(610) <= torch.arange(600)[:, None] + 10
    expected = dense(query, keys, values, visible)
    options = {"scaling": 0.5, "softcap": None}
    by_position, _ = attend_block_reference(query, keys, values, None, causal=True, **options)
    by_mask, _ = attend_block_reference(
        query, keys, values, additive_mask(visible[None, None]), causal=False, **options
    )
    assert error(by_position.transpose(1, 2).contiguous(), expected, values) < FLOAT32 * 10
    assert error(by_mask.transpose(1, 2).contiguous(), expected, values) < FLOAT32 * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks(dtype: torch.dtype) -> None:
    """Hidden is -inf or the type's lowest value; a bias stays a bias, and hides nothing."""
    low = torch.finfo(dtype).min
    mask = torch.tensor([[0.0, -3.0, low, float("-inf")], [0.0, low, -8.0, 0.0]], dtype=dtype)[None, None]
    expected = torch.tensor([[0.0, -3.0, float("-inf"), float("-inf")], [0.0, float("-inf"), -8.0, 0.0]])
    assert torch.equal(additive_mask(mask), expected[None, None])
    assert shown(mask)[0, 0].tolist() == [[True, True, False, False], [True, False, True, True]]
    boolean = mask > low / 2
    assert torch.equal(additive_mask(boolean).isinf(), ~boolean)
    assert shown(boolean) is boolean
    assert additive_mask(None) is None


def shuffled(
    keys: torch.Tensor, values: torch.Tensor, tokens: int, rows: str, padding: int, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The first `tokens` entries as blocks of 7 in a random order, the same for all, or one a row or a key head; with
    `padding` entries strewn in that would weigh much at position -1."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads = keys.shape[:2]
    shape = {"shared": (1, 1), "row": (batch, 1), "head": (batch, heads)}[rows]
    positions = torch.cat([torch.arange(tokens), torch.full((padding,), -1)])
    orders = [torch.randperm(len(positions), generator=generator) for _ in range(shape[0] * shape[1])]
    positions = torch.stack([positions[order] for order in orders]).unflatten(0, shape)
    whole = positions.expand(batch, heads, -1)
    index = whole.clamp_min(0).unsqueeze(-1)
    blocks = []
    for start in range(0, whole.shape[2], 7):
        part = slice(start, start + 7)
        real = (whole[:, :, part] >= 0).unsqueeze(-1)
        picked = [
            torch.where(real, states.gather(2, index[:, :, part].expand(-1, -1, -1, states.shape[3])), 50.0)
            for states in (keys, values)
        ]
        named = {"shared": positions[0, 0, part], "row": positions[:, 0, part], "head": positions[:, :, part]}
        blocks.append((picked[0], picked[1], named[rows]))
    return blocks


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "scaling": 0.4}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", ["shared", "row", "head"])
@pytest.mark.parametrize("queries", [1, 3])
def test_blocks_in_any_order(queries: int, rows: str, masked: bool, options: dict) -> None:
    """Shuffled blocks, with padding within them, are what the ordered ones are, and what the twin gives."""
    query, keys, values = tensors(2, 4, 2, queries, 40 + queries, 8, 8, 7)
    visible = (torch.arange(40 + queries) <= torch.arange(queries)[:, None] + 40).expand(2, 1, -1, -1).clone()
    if masked:
        visible &= torch.rand(visible.shape, generator=torch.Generator().manual_seed(1)) < 0.6
        visible[1, ..., :9] = False
    mask = visible if masked else None
    ordered, own = split(keys, values, [10, 20, 30], queries)
    blocks = shuffled(keys, values, 40, rows, 0 if rows == "shared" and not masked else 5, 3)
    expected = dense(query, keys, values, visible, **options)
    for history in (ordered, blocks):
        for attention in (stream_attention, stream_attention_reference):
            result = attention(query, iter(history), own, mask, **options)
            assert error(result, expected, values) < FLOAT32 * 10


@pytest.mark.parametrize("masked", [False, True])
def test_ragged_rows(masked: bool) -> None:
    """Heads and rows that hold different positions, and different numbers of them: each as if it were alone."""
    query, keys, values = tensors(2, 4, 2, 2, 30, 8, 8, 9)
    visible = (torch.arange(30) <= torch.arange(2)[:, None] + 28).expand(2, 1, -1, -1).clone()
    if masked:
        visible[0, ..., :4] = False
    own = keys[:, :, 28:], values[:, :, 28:]
    held = torch.rand(2, 2, 28, generator=torch.Generator().manual_seed(0)) < 0.5
    held[1, 1] = False  # a head that holds nothing before its own tokens
    positions = torch.where(held, torch.arange(28), -1)
    order = torch.randperm(28, generator=torch.Generator().manual_seed(2))
    blocks = [(keys[:, :, part], values[:, :, part], positions[:, :, part]) for part in order.split(9)]
    seen = torch.cat([held, torch.ones(2, 2, 2, dtype=torch.bool)], 2).repeat_interleave(2, 1).unsqueeze(2) & visible
    for attention in (stream_attention, stream_attention_reference):
        result = attention(query, blocks, own, visible if masked else None)
        assert error(result, dense(query, keys, values, seen), values) < FLOAT32 * 10


def test_blocks_with_masks_of_their_own() -> None:
    """They hide what is no entry, and each key head has some: as blocks with positions, without asking who is blind."""
    query, keys, values = tensors(2, 4, 2, 3, 30, 8, 8, 9)
    held = torch.rand(2, 2, 27, generator=torch.Generator().manual_seed(0)) < 0.5
    held[..., ::9] = True
    positions, own = torch.where(held, torch.arange(27), -1), (keys[:, :, 27:], values[:, :, 27:])
    parts = [slice(first, first + 9) for first in range(0, 27, 9)]
    masks = [hiding(~held[..., part].numpy(), torch.float32, keys.device) for part in parts]
    assert all(mask.shape == (2, 2, 1, 9) and mask.stride() == (32, 16, 16, 1) for mask in masks)
    with mock.patch.object(torch.Tensor, "amax", None):
        found = stream_attention(
            query, [(keys[:, :, part], values[:, :, part], mask) for part, mask in zip(parts, masks, strict=True)],
            own, None,
        )  # fmt: skip
    blocks = [(keys[:, :, part], values[:, :, part], positions[..., part]) for part in parts]
    wanted = stream_attention(query, blocks, own, None)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", ["none", "some", "one mask for all rows"])
def test_a_row_of_a_mask_for_all_queries(positions: bool, dtype: torch.dtype, hidden: str) -> None:
    query, keys, values = (part.to(dtype) for part in tensors(2, 4, 2, 600, 700, 8, 8, 5))
    seen = torch.ones(1 if hidden == "one mask for all rows" else 2, 1, 1, 100, dtype=torch.bool)
    seen[-1, ..., : 0 if hidden == "none" else 30] = False
    visible = torch.ones(2, 1, 600, 700, dtype=torch.bool).tril(100)
    visible[..., :100] &= seen
    own = keys[:, :, 100:], values[:, :, 100:]
    blocks = shuffled(keys, values, 100, "head", 5, 3) if positions else split(keys, values, [40], 600)[0]
    expected = dense(query, keys, values, visible)
    for attention in (stream_attention, stream_attention_reference):
        result = attention(query, iter(blocks), own, None, seen=None if hidden == "none" else seen)
        assert error(result, expected, values) < (FLOAT32 * 10 if dtype == torch.float32 else BFLOAT16)


@pytest.mark.parametrize("positions", [False, True])
def test_a_row_for_what_comes_before_and_a_mask_of_their_own(positions: bool) -> None:
    query, keys, values = tensors(2, 4, 2, 40, 140, 8, 8, 5)
    seen, visible = torch.ones(2, 1, 1, 100, dtype=torch.bool), torch.ones(2, 1, 40, 140, dtype=torch.bool).tril(100)
    seen[1], visible[1, ..., :110] = False, False  # so that the first ten of these queries see nothing
    own = keys[:, :, 100:], values[:, :, 100:]
    blocks = shuffled(keys, values, 100, "head", 5, 3) if positions else split(keys, values, [40], 40)[0]
    given, expected = visible.clone(), dense(query, keys, values, visible)
    given[..., :100] = ~given[..., :100]
    for attention in (stream_attention, stream_attention_reference):
        result = attention(query, iter(blocks), own, given, seen=seen)
        assert error(result, expected, values) < FLOAT32 * 10
        assert not result[1, :10].any()


def test_columns_of_a_mask_of_one_row_go_for_all_rows() -> None:
    mask = torch.tensor([[True, False, True, True]])[None, None]
    found = mask_at(mask, torch.tensor([[3, 1, -1], [0, 2, 1]]))
    hidden = float("-inf")
    assert found.tolist() == [[[[0.0, hidden, hidden]]], [[[0.0, 0.0, hidden]]]]


def test_attention_to_latents_that_each_query_chose() -> None:
    """Of 600 stored latents each query sees up to 20, with a bias; keys and values are a linear map of them. One query
    sees none, and one row begins with padding. Then cases for which there is another way."""
    generator = torch.Generator().manual_seed(0)
    heads, stored, queries, widths, most = 3, 600, 40, (6, 2), 20
    latents = [torch.randn(2, 1, stored + queries, width, generator=generator) for width in widths]
    matrix = torch.randn(6, heads * 9, generator=generator)
    query = torch.randn(2, heads, queries, 7, generator=generator)

    def expand(latent: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (latent[:, 0] @ matrix).unflatten(2, (heads, 9)).transpose(1, 2).split([5, 4], 3)
        return torch.cat([keys, other.expand(-1, heads, -1, -1)], 3), values

    chosen = torch.rand(2, queries, stored + queries, generator=generator).topk(most).indices
    chosen[:, 3], chosen[:, :, :2] = -1, -1
    visible = torch.zeros(2, queries, stored + queries + 1, dtype=torch.bool)
    visible.scatter_(2, chosen.masked_fill(chosen < 0, stored + queries), True)[1, :, :90] = False
    visible = visible[:, None, :, :-1]
    bias = torch.randn(2, 1, queries, stored + queries, generator=generator)
    mask = bias.masked_fill(~visible, torch.finfo(torch.float32).min)
    own = latents[0][:, :, stored:], latents[1][:, :, stored:]

    def blocks() -> Any:
        for start in range(0, stored, 70):
            yield (*(part[:, :, start : min(start + 70, stored)] for part in latents), None)

    def attend(mask: torch.Tensor, chosen: torch.Tensor = chosen, expand: Any = expand, **more: Any):
        with record_function("attention"):
            return attend_to_latents(asked(mask, **more), expand, chosen, mask, own, blocks())

    def asked(mask: torch.Tensor, **more: Any) -> AttentionCall:
        return AttentionCall(None, None, query, query, query, mask, kwargs={"scaling": 0.4, **more})  # type: ignore[arg-type]

    keys, values = expand(*latents)
    for hides, softcap in ((mask, None), (visible, 2.0)):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            found = attend(hides, softcap=softcap)
        booked = bytes_of_call(asked(hides), chosen, own, stored, stored, 70, 4)
        assert booked is not None and 0.7 * booked < most_held(seen, "attention") <= booked
        assert booked <= planned_bytes(2, stored + queries, heads, 8, most, 70)
        assert found is not None and bool((found[1][:, :, 3] == float("-inf")).all())
        expected = dense(
            query, keys[:, :, :stored], values[:, :, :stored], visible[..., :stored], 0.4, softcap,
            bias=bias[..., :stored] if hides is mask else None,
        )  # fmt: skip
        assert error(found[0].transpose(1, 2).contiguous(), expected, values) < FLOAT32 * 10
        sinks = torch.randn(heads, generator=generator)
        output = stream_attention(
            query, (), expand(*own), hides, attended=found, scaling=0.4, softcap=softcap, s_aux=sinks
        )
        expected = dense(query, keys, values, visible, 0.4, softcap, sinks, bias if hides is mask else None)
        assert error(output, expected, values) < FLOAT32 * 10
    assert bytes_of_call(asked(mask), chosen, own, 6 * most - 1, stored, 70, 4) is None
    repeated = chosen.clone().index_fill_(2, torch.tensor([5, 6]), 8)
    assert attend(torch.ones_like(visible), repeated) is None
    for unfit in (lambda keys, values: (keys + 1, values), lambda keys, values: (keys, values.abs())):
        assert attend(mask, expand=lambda *parts, unfit=unfit: unfit(*expand(*parts))) is None
