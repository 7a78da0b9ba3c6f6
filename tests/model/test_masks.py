"""What a mask is told to be, and that a prompt's pieces go without one that hides the future alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import fresh
from pairwise import combinations
from transformers import DynamicCache

from hf_offload_cache import ClusterCache, DiskSwapCache
from hf_offload_cache.model import seen_before
from hf_offload_cache.model import stream_attention as streaming


def causal(rows: int, queries: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, 1, queries, columns, dtype=torch.bool).tril(columns - queries)


@pytest.mark.parametrize(("queries", "columns"), [(1, 1), (1, 9), (5, 5), (4, 11)])
@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32 lowest"])
def test_hiding_the_future_alone(queries: int, columns: int, kind: str) -> None:
    def made(seen: torch.Tensor) -> torch.Tensor:
        if kind == "bool":
            return seen
        if kind == "bfloat16":
            return torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))
        return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)

    plain = causal(2, queries, columns)
    assert (found := seen_before(made(plain))) is not None
    assert found[0].shape == (2, 1, 1, columns - queries)
    assert bool(found[0].all()) and found[1] and found[2]
    for query, column in {(0, 0), (queries - 1, 0), (queries - 1, columns - 1), (0, columns - 1)}:
        other = plain.clone()
        other[1, 0, query, column] ^= True
        found = seen_before(made(other))
        before = column < columns - queries
        assert found is None if before and queries > 1 else found is not None and found[1] == before
        assert found is None or bool(found[0].all()) == found[2] != before
    if kind != "bool":
        biased = made(plain)
        biased[0, 0, -1, 0] = 0.5
        found = seen_before(biased)
        assert found is None or (columns == queries and not found[1])
    if columns > queries:
        padded = plain.clone()
        padded[1, ..., :2] = False  # of one row, to all of its queries
        assert (found := seen_before(made(padded))) is not None
        assert (~found[0]).nonzero().tolist() == [[1, 0, 0, 0], [1, 0, 0, 1]] and found[1] and not found[2]
        padded[1, ..., : columns - queries + 1] = False  # into what these queries bring
        assert (found := seen_before(made(padded))) is not None
        assert not bool(found[0][1].any()) and bool(found[0][0].all()) and not found[1]


def test_fewer_columns_than_queries_are_not_causal() -> None:
    assert seen_before(torch.ones(1, 1, 3, 2, dtype=torch.bool)) is None


@pytest.mark.parametrize(("method", "padded"), combinations((DiskSwapCache, ClusterCache), (0, 7, 60)))
def test_pieces_of_a_prompt_go_without_a_row_of_a_mask_for_each_query(
    padded: int, method: type[DiskSwapCache | ClusterCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, masks = fresh("llama"), list[torch.Tensor | None]()
    attend = streaming.attend_block

    def watched(query: torch.Tensor, keys: Any, values: Any, mask: torch.Tensor | None, **more: Any) -> Any:
        masks.append(mask)
        return attend(query, keys, values, mask, **more)

    monkeypatch.setattr(streaming, "attend_block", watched)
    ids = torch.randint(1, 190, (2, 120), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(2, 120, dtype=torch.long)
    seen[1, :padded] = 0
    with torch.no_grad(), method(model, exact=True, block_tokens=16, num_recent=8, group_size=4) as cache:
        for stop in (48, 96, 120):
            start = cache.get_seq_length()
            out = model(ids[:, start:stop], attention_mask=seen[:, :stop], past_key_values=cache).logits[:, -1]
        whole = model(ids, attention_mask=seen).logits[:, -1]
    assert len(masks) > 3 * 2
    rows = [mask.shape[2] for mask in masks if mask is not None]
    assert {1} <= set(rows) if padded or method is ClusterCache else not rows
    assert rows.count(48) == (3 if padded == 60 else 0) and set(rows) <= {1, 48}  # of the second piece, a layer
    assert any(mask is None for mask in masks)  # of what a piece sees of itself
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_one_row_for_all_queries_is_not_causal(dtype: torch.dtype) -> None:
    """A piece that sees all of itself goes on doing so."""
    model, logits = fresh("llama"), []
    ids = torch.randint(1, 190, (1, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), DiskSwapCache(model, exact=True, block_tokens=16, num_recent=8, group_size=4) as own:
        for cache in (own, DynamicCache(config=model.config)):
            for start, stop in ((0, 48), (48, 96), (96, 120)):
                shape = 1, 1, 1, stop
                mask = torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.zeros(shape)
                out = model(ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits
            logits.append(out)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_pieces_in_float64() -> None:
    model, ids = fresh("llama").double(), torch.randint(1, 190, (1, 120))
    with torch.no_grad(), DiskSwapCache(model, exact=True, block_tokens=16, num_recent=8, group_size=4) as cache:
        for start, stop in ((0, 48), (48, 96), (96, 120)):
            out = model(ids[:, start:stop], past_key_values=cache).logits
        torch.testing.assert_close(out, model(ids).logits[:, 96:], rtol=0, atol=1e-4)
