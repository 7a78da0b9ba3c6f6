"""Prompts that attend to their active blocks: which these are, and that nothing else is attended to."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import prompt
from lanes_in_order import compute_all
from long_llama import long_model
from transformers import DynamicCache

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.core import Filling
from hf_offload_cache.errors import ConfigError, ContextError
from hf_offload_cache.streaming import (
    ActiveBlocks,
    SparsePrefill,
    attend_blocks,
    loader,
    measure_active_blocks,
    sparse_prefill,
)

BLOCK, TOKENS = 32, 200
"""The last block is shorter."""


def ids(count: int = TOKENS) -> torch.Tensor:
    return prompt(long_model(), 1, count)


def weights() -> list[torch.Tensor]:
    """By layer (key heads, queries of a block's heads, T, T)."""
    with torch.no_grad():
        model = long_model()
        model.set_attn_implementation("eager")
        try:
            found = model(ids(), output_attentions=True).attentions
        finally:
            model.set_attn_implementation("sdpa")
    heads = long_model().config.num_key_value_heads
    return [one[0].unflatten(0, (heads, -1)) for one in found]


@pytest.mark.parametrize("mass", [0.5, 0.9, 1.0])
def test_active_blocks_have_the_mass_and_no_fewer_would(mass: float, tmp_path: Path) -> None:
    found = measure_active_blocks(long_model(), ids()[0], mass, BLOCK, most=1.0, path=tmp_path)
    for layer, own in enumerate(weights()):
        active = found.layers[layer]
        for place, start in enumerate(range(0, TOKENS, BLOCK)):
            rows = own[:, :, start : start + BLOCK].sum((1, 2))
            of_blocks = torch.stack([part.sum(-1) for part in rows.split(BLOCK, -1)], -1)[:, : place + 1].numpy()
            for head, each in enumerate(of_blocks):
                chosen = active[head, place, : place + 1]
                assert chosen[-1] and not active[head, place, place + 1 :].any()
                assert each[chosen].sum() >= (mass - 1e-4) * each.sum()
                others = chosen.copy()
                others[-1] = False
                if mass < 1 and others.any():  # without its least one, and the own one where it had not been needed
                    without = each[chosen].sum() - each[others].min()
                    assert without - (each[-1] if each[-1] < each[others].min() else 0) < mass * each.sum() + 1e-4


def test_of_a_layer_that_needs_most_of_them_none_are_told(tmp_path: Path) -> None:
    assert not measure_active_blocks(long_model(), ids()[0], 1.0, BLOCK, most=0.9, path=tmp_path).layers


def sparse_logits(blocks: ActiveBlocks, parts: int, tmp_path: Path) -> torch.Tensor:
    sparse = SparsePrefill(blocks)
    with DiskSwapCache(long_model(), exact=True, path=tmp_path) as cache:
        filling = Filling(cache)
        for part in ids()[:, :-1].split(parts, 1):
            filling.compute(part, lambda layer: True, sparse)
            filling.note(part)
        with torch.no_grad():
            found: torch.Tensor = long_model()(ids()[:, -1:], past_key_values=cache).logits
    assert sparse.share == pytest.approx(blocks.share, abs=0.01)
    return found


@pytest.mark.parametrize("parts", [TOKENS, 64])
def test_with_all_of_them_it_is_attention(parts: int, tmp_path: Path) -> None:
    count, heads = -(-TOKENS // BLOCK), long_model().config.num_key_value_heads
    every = np.tril(np.ones((heads, count, count), dtype=bool))
    found = sparse_logits(ActiveBlocks(BLOCK, {0: every, 1: every}), parts, tmp_path)
    with torch.no_grad():
        expected = long_model()(ids(), past_key_values=DynamicCache(config=long_model().config)).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [TOKENS, 64])
def test_nothing_else_is_attended_to(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model's own attention under a mask of the blocks, a head for itself."""
    count, heads = -(-TOKENS // BLOCK), long_model().config.num_key_value_heads
    chosen = np.tril(np.random.default_rng(0).random((heads, count, count)) < 0.4) | np.eye(count, dtype=bool)
    found = sparse_logits(ActiveBlocks(BLOCK, {1: chosen}), parts, tmp_path)
    seen = torch.from_numpy(chosen).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(heads, -1, -1).clone()
    mask[:, :-1, :-1] &= seen[:, : TOKENS - 1, : TOKENS - 1]
    groups = long_model().config.num_attention_heads // heads
    of_layer = long_model().model.layers[1].self_attn
    own = of_layer.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "attention_mask": mask.repeat_interleave(groups, 0)[None]})

    monkeypatch.setattr(of_layer, "forward", masked)
    with torch.no_grad():
        expected = long_model()(ids(), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_another_context_are_refused() -> None:
    blocks = ActiveBlocks(BLOCK, {0: np.tril(np.ones((2, 7, 7), dtype=bool))})
    tree = blocks.captured()
    again = ActiveBlocks.restored(tree, TOKENS, 2, 2)
    assert again.block == BLOCK and np.array_equal(again.layers[0], blocks.layers[0])
    for tokens, layers, heads in ((300, 2, 2), (TOKENS, 0, 2), (TOKENS, 2, 3)):
        with pytest.raises(ContextError, match="not of this context"):
            ActiveBlocks.restored(tree, tokens, layers, heads)
    layers: Any
    for layers in ({0: torch.zeros(2, 7, 1)}, 3):
        with pytest.raises(ContextError):
            ActiveBlocks.restored({**tree, "layers": layers}, TOKENS, 2, 2)
    for wrong in ({}, {**tree, "block": 0}, {**tree, "block": 10**9}):
        with pytest.raises(ContextError):
            ActiveBlocks.restored(wrong, TOKENS, 2, 2)


def test_a_streamed_context_says_what_it_attended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_TOKENS", 128)
    compute_all(monkeypatch)
    model, own = long_model(), prompt(long_model(), 1, 680)
    with DiskSwapCache(model, path=tmp_path) as cache:
        with torch.no_grad():
            model(own[:, :640], past_key_values=cache)
        options: dict[str, Any] = {"level": "lossless", "chunk_tokens": 128}
        publish_context(cache, str(tmp_path / "plain"), **options)
        publish_context(cache, str(tmp_path / "active"), active_mass=0.1, key=lambda: b"k" * 32, **options)
        with pytest.raises(ConfigError, match="multiple of 128"):
            publish_context(cache, str(tmp_path / "other"), active_mass=0.6, chunk_tokens=64)
        with pytest.raises(ConfigError, match="active_mass must be"):
            publish_context(cache, str(tmp_path / "other"), active_mass=1.5)
    place, key = str(tmp_path / "active"), lambda: b"k" * 32
    with stream_context(place, model, own, path=tmp_path, sparse=True, key=key) as cache:
        report = cache.stream_report
        assert report is not None and not report.trouble and 0 < report.attended < 1
        assert "computed tokens attended to" in str(report) and report.computed == report.cells
    with stream_context(place, model, own, path=tmp_path, key=key) as cache:
        assert cache.stream_report is not None and cache.stream_report.attended == 1
    with stream_context(str(tmp_path / "plain"), model, own, path=tmp_path, sparse=True) as cache:
        report = cache.stream_report
        assert report is not None and report.attended == 1 and "none were published" in report.trouble[0]


@pytest.mark.parametrize(("tokens", "asked", "softcap"), [(200, 200, None), (200, 72, None), (128, 32, 20.0)])
def test_flex_attention_attends_to_the_same(tokens: int, asked: int, softcap: float | None) -> None:
    """Not compiled, as a mask over all scores: which blocks a query and a head see, and of its own what."""
    assert_the_same(tokens, asked, softcap, compiled=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_kernel_leaves_out_what_is_not_active() -> None:
    """On a CPU, where it is not used; blocks are those that its kernel has."""
    assert_the_same(600, 344, None, compiled=True, block=128)


def assert_the_same(tokens: int, asked: int, softcap: float | None, *, compiled: bool, block: int = BLOCK) -> None:
    generator, heads, before = torch.Generator().manual_seed(tokens), 2, tokens - asked
    query = torch.randn(1, 3 * heads, asked, 16, generator=generator)
    keys, values = (torch.randn(1, heads, tokens, dim, generator=generator) for dim in (16, 16))
    count, first = -(-tokens // block), before // block
    active = torch.rand(heads, count, count, generator=generator) < 0.4
    active = (active | torch.eye(count, dtype=torch.bool)).tril()
    found = attend_blocks(
        query, keys, values, active[:, first:], before, block, scaling=0.3, softcap=softcap, compiled=compiled
    )
    seen = active.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, before:tokens, :tokens]
    seen &= torch.ones(asked, tokens, dtype=torch.bool).tril(before)
    scores = query.unflatten(1, (heads, 3)) @ keys.unsqueeze(2).mT * 0.3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    expected = (weights @ values.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("works", [True, False])
def test_where_there_is_a_kernel_it_is_used_and_where_it_fails_it_is_told(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, heads = -(-TOKENS // BLOCK), long_model().config.num_key_value_heads
    chosen = np.tril(np.random.default_rng(1).random((heads, count, count)) < 0.5) | np.eye(count, dtype=bool)
    blocks, calls = ActiveBlocks(BLOCK, {0: chosen, 1: chosen}), list[int]()
    expected = sparse_logits(blocks, 64, tmp_path)

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape[2])
        if not works:
            raise RuntimeError("there is no compiler")
        return attend_blocks(*args, **kwargs, compiled=False)

    monkeypatch.setattr(sparse_prefill, "has_kernel", lambda device: True)
    monkeypatch.setattr(sparse_prefill, "attend_blocks", attend)
    with contextlib.nullcontext() if works else pytest.warns(UserWarning, match="gathered: there is no compiler"):
        found = sparse_logits(blocks, 64, tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == (8 if works else 1)
