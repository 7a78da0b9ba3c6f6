"""The predictor against a dense oracle: exact q·K over full keys, group by group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compact_scores import scores_of
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload_cache.memory import MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import (
    BLOCK,
    LowRankKeys,
    low_rank_keys,
    principal_directions,
    query_moment,
    rank_among,
    rank_units,
    reconstruction,
    roots_of,
    scaled_directions,
)

HEADS, KV, DIM, GROUP = 6, 2, 8, 4
WIDTH = KV * DIM


def ranking(summary: LowRankKeys, *arguments: Any) -> torch.Tensor:
    """The importance of (query, scaling, group size, wanted, visible) as a tensor."""
    return torch.from_numpy(rank_units(summary, *arguments).importance)


def keys_of(batch: int, tokens: int, rank: int = WIDTH, seed: int = 0) -> torch.Tensor:
    """Keys (B, Hk, t, D) whose joined rows span `rank` directions, up to noise, with decaying energy."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0][:, :rank]
    energy = 0.8 ** torch.arange(rank)
    flat = (torch.randn(batch, tokens, rank, generator=generator) * energy) @ directions.T
    flat += 0.01 * torch.randn(flat.shape, generator=generator)
    return flat.unflatten(-1, (KV, DIM)).transpose(1, 2)


def flat_of(keys: torch.Tensor) -> torch.Tensor:
    return keys.transpose(1, 2).flatten(2)


def predictor(
    keys: torch.Tensor,
    rank: int,
    dtype: torch.dtype = torch.float32,
    account: MemoryAccount | None = None,
    workspace: Workspace | None = None,
) -> LowRankKeys:
    """Fitted on `keys`, empty."""
    flat = flat_of(keys).flatten(0, 1)
    adapter = principal_directions(flat.T @ flat, rank)
    deviation = (flat @ adapter).square().mean(0).sqrt()
    return LowRankKeys(adapter, deviation, dtype, KV, keys.shape[0], account or MemoryAccount(), workspace)


def exact_importance(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """(B, groups) from exact scores of every query head with its key head: the softmax of the groups' best tokens."""
    scores = torch.einsum("bhd,bhtd->bht", query.double(), keys.double().repeat_interleave(HEADS // KV, 1))
    return torch.softmax(scores.unflatten(2, (-1, GROUP)).amax(-1) * scaling, -1).sum(1)


def all_scores(summary: LowRankKeys, query: torch.Tensor) -> torch.Tensor:
    """Scores (B, tokens, H) in units of exact ones."""
    rows = []
    for row, low in enumerate(summary.low_rank_query(query)):
        scores = scores_of(summary, low, row, np.arange(summary.tokens), 1)
        rows.append(torch.from_numpy(scores[..., 0].T))
    return torch.stack(rows)


def query_of(batch: int, seed: int = 1) -> torch.Tensor:
    return 3 * torch.randn(batch, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [GROUP, 44, 200])
def test_full_rank_in_float32_is_exact(tokens: int) -> None:
    keys, query = keys_of(3, tokens), query_of(3)
    summary = predictor(keys, WIDTH)
    summary.append(keys)
    importance = ranking(summary, query, 0.3, GROUP, tokens // GROUP)
    expected = exact_importance(query, keys, 0.3)
    assert importance.shape == (3, tokens // GROUP)
    torch.testing.assert_close(importance.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [1, 5, 40])
def test_the_best_are_among_the_candidates(wanted: int) -> None:
    """Full rank, float32, ten samples: of the groups wanted hardly one is not the oracle's."""
    shares = []
    for seed in range(10):
        keys, query = keys_of(3, 1600, seed=seed), query_of(3, seed + 10)
        summary = predictor(keys, WIDTH)
        summary.append(keys)
        importance = ranking(summary, query, 1.0, GROUP, wanted)
        assert importance.shape == (3, 400)
        shares.append(overlap(exact_importance(query, keys, 1.0), importance, wanted))
    assert sum(shares) / len(shares) >= 0.9


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_compact_types_are_near(dtype: torch.dtype) -> None:
    """Scores are off by at most 3% of their spread: components are rounded to 5/127 and 1/127 of their scale."""
    keys, query = keys_of(2, 1600), query_of(2)
    exact, compact = predictor(keys, WIDTH), predictor(keys, WIDTH, dtype)
    exact.append(keys)
    compact.append(keys)
    scores = [all_scores(p, query) for p in (exact, compact)]
    difference = (scores[0] - scores[1]).abs()
    assert difference.mean() < 0.03 * scores[0].std()
    assert difference.max() < 0.25 * scores[0].std()
    expected = exact_importance(query, keys, 0.3)
    chosen = ranking(compact, query, 0.3, GROUP, 40)
    assert overlap(expected, chosen, 40) >= 0.9


def overlap(expected: torch.Tensor, found: torch.Tensor, count: int) -> float:
    """Share of the `count` most important groups that both name."""
    tops = [set(row.tolist()) for part in (expected, found) for row in part.topk(count, 1).indices]
    half = len(tops) // 2
    return sum(len(a & b) for a, b in zip(tops[:half], tops[half:], strict=True)) / (half * count)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_a_rank_that_holds_the_structure_selects_well(dtype: torch.dtype) -> None:
    """Keys of six directions in sixteen: rank six chooses as the dense oracle, rank two does not."""
    keys, query = keys_of(2, 1600, rank=6), query_of(2)
    expected = exact_importance(query, keys, 0.3)
    found = {}
    for rank in (2, 6):
        summary = predictor(keys, rank, dtype)
        summary.append(keys)
        found[rank] = overlap(expected, ranking(summary, query, 0.3, GROUP, 40), 40)
    assert found[6] >= 0.85
    assert found[2] < found[6] - 0.2


def test_heads_are_normalised_before_they_are_summed() -> None:
    keys = 0.01 * torch.randn(1, KV, 64, DIM, generator=torch.Generator().manual_seed(0))
    query = torch.zeros(1, HEADS, DIM)
    query[0, :, 0] = 1.0
    keys[0, 0, :32, 0] += 50.0  # first key head: half of the groups, all alike
    keys[0, 1, 60, 0] = 20.0  # second: the last group
    summary = predictor(keys, WIDTH)
    summary.append(keys)
    assert int(ranking(summary, query, 1.0, GROUP, 3).argmax()) == 15


def test_clipped_components_do_not_wrap() -> None:
    """A key far outside of what the scale was made for stays the largest."""
    keys = keys_of(1, 400)
    summary = predictor(keys, WIDTH, torch.int8)
    outlier = keys.clone()
    outlier[:, :, 100] *= 40
    summary.append(outlier)
    query = outlier[:, :, 100].repeat_interleave(HEADS // KV, 1)
    assert int(all_scores(summary, query).sum(-1).argmax()) == 100


def test_the_tail_shares_the_softmax() -> None:
    keys, query = keys_of(2, 240), query_of(2)
    summary = predictor(keys[:, :, :200], WIDTH)
    summary.append(keys[:, :, :200])
    last = torch.einsum("bhd,bhtd->bht", query, keys[:, :, 200:].repeat_interleave(HEADS // KV, 1)) * 0.3
    peaks = rank_units(summary, query, 0.3, GROUP, 50, exact=last.numpy())
    scores = torch.einsum("bhd,bhtd->bht", query, keys.repeat_interleave(HEADS // KV, 1)) * 0.3
    best = torch.cat([scores[..., :200].unflatten(2, (-1, GROUP)).amax(-1), scores[..., 200:]], 2)
    shares = torch.softmax(best, -1).sum(1)[:, :50]
    torch.testing.assert_close(torch.from_numpy(peaks.importance), shares, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_ranking_among_candidates_is_the_ranking_of_these(dtype: torch.dtype) -> None:
    """The same shares as a ranking of all gives them, where there are no others; `beyond` says what others take."""
    keys, query = keys_of(2, 800), query_of(2)
    summary = predictor(keys, WIDTH, dtype)
    summary.append(keys)
    candidates = np.stack([np.random.default_rng(row).permutation(200)[:60] for row in range(2)])
    found, _ = rank_among(summary, query, 0.3, GROUP, candidates)
    alone = predictor(keys, WIDTH, dtype)
    parts = [keys[row].unflatten(1, (-1, GROUP))[:, candidates[row]].flatten(1, 2) for row in range(2)]
    alone.append(torch.stack(parts))
    expected = rank_units(alone, query, 0.3, GROUP, 60).importance
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    twice = np.full((2, HEADS), 2, dtype=np.float32)
    halved, _ = rank_among(summary, query, 0.3, GROUP, candidates, beyond=twice)
    np.testing.assert_allclose(halved, expected / 2, rtol=1e-4, atol=1e-5)
    exact = np.random.default_rng(0).normal(size=(2, HEADS, 9)).astype(np.float32)
    some, _ = rank_among(summary, query, 0.3, GROUP, candidates, exact=exact, apart=candidates[:, 7:9])
    where = np.array([[7, 8], [7, 8]])
    expected = rank_units(alone, query, 0.3, GROUP, 50, exact=exact, apart=where).importance
    expected[:, 7:9] = 0  # those are below all others there
    np.testing.assert_allclose(some, expected, rtol=1e-4, atol=1e-5)


def test_a_step_of_the_same_size_allocates_nothing() -> None:
    """The scores' workspace is taken once, held in the account, and given back."""
    account = MemoryAccount()
    workspace = Workspace(account, "scores")
    keys, query = keys_of(3, 800), query_of(3)
    summary = predictor(keys, 8, torch.int8, account, workspace)
    summary.append(keys)
    before = account.current
    rank_units(summary, query, 1.0, GROUP, 10)
    assert account.by_owner["scores"] == account.current - before == HEADS * 800 * 4  # of all tokens: they are few
    held = workspace._bytes.data_ptr()
    rank_units(summary, query, 1.0, GROUP, 10)
    assert workspace._bytes.data_ptr() == held
    workspace.release()
    assert account.current == before


@pytest.mark.parametrize("rank", [1, 5, WIDTH])
def test_principal_directions(rank: int) -> None:
    """Orthonormal, and they span the leading right singular vectors, most energy first."""
    flat = flat_of(keys_of(2, 300)).flatten(0, 1)
    found = principal_directions(flat.T @ flat, rank)
    assert found.shape == (WIDTH, rank)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.T @ found, torch.eye(rank), rtol=0, atol=1e-5)
    true = torch.linalg.svd(flat.double(), full_matrices=False)[2][:rank].T
    assert torch.linalg.svdvals(true.T @ found.double()).min() > 0.9999
    energy = (flat @ found).square().sum(0)
    assert (energy[:-1] >= energy[1:] * (1 - 1e-4)).all()


def test_directions_of_a_space_with_fewer_dimensions_hold_all_of_it() -> None:
    flat = flat_of(keys_of(1, 5)).flatten(0, 1)
    found = principal_directions(flat.T @ flat, 5)
    torch.testing.assert_close(flat @ found @ found.T, flat, rtol=0, atol=1e-4)


def test_reserved_room_is_not_exceeded() -> None:
    """A prompt of known length takes what it needs and no more."""
    account = MemoryAccount()
    keys = keys_of(2, 500)
    summary = predictor(keys, 7, torch.int8, account)
    summary.reserve(500)
    for start in range(0, 500, 100):
        summary.append(keys[:, :, start : start + 100])
    assert account.by_owner["compact keys"] == 2 * 500 * 7


def test_a_prior_lends_no_keys() -> None:
    """What is appended after it is copied nowhere, as it is after a capture, which others go on looking at."""
    account, keys = MemoryAccount(), keys_of(2, 500)
    summary = predictor(keys, 7, torch.int8, account)
    summary.reserve(500)
    summary.append(keys[:, :, :100])
    assert summary.fitted_state()["keys"].shape == (2, 0, 7)
    summary.append(keys[:, :, 100:200])
    assert account.peak == account.current
    summary.capture()
    summary.truncate(150)
    summary.append(keys[:, :, 150:200])
    assert account.peak > account.current


def test_the_metric_of_queries_decides_what_is_kept() -> None:
    """Keys are largest where no query points: half the rank in the queries' metric beats the keys' own directions."""
    generator = torch.Generator().manual_seed(0)
    energy = torch.cat([torch.full((DIM // 2,), 1.5), torch.ones(DIM // 2)])
    keys = torch.randn(1, KV, 800, DIM, generator=generator) * energy
    queries = torch.randn(1, HEADS, 600, DIM, generator=generator) * (energy == 1.0)
    flat = flat_of(keys).flatten(0, 1)
    moment = flat.T @ flat
    errors = []
    exact = torch.einsum("bhd,bhtd->bht", queries[:, :, -1], keys.repeat_interleave(HEADS // KV, 1))
    for adapter in (principal_directions(moment, 8), scaled_directions(moment, roots_of(query_moment(queries, KV)), 8)):
        deviation = (flat @ adapter).square().mean(0).sqrt()
        back = reconstruction(moment, adapter)
        summary = LowRankKeys(adapter, deviation, torch.float32, KV, 1, MemoryAccount(), queries=back)
        summary.append(keys)
        scores = all_scores(summary, queries[:, :, -1]).transpose(1, 2)
        errors.append(float((scores - exact).square().mean() / exact.square().mean()))
    assert errors[0] > 0.9  # they keep the large half
    assert errors[1] < 0.1


def test_roots_of_a_moment_give_the_directions_of_symmetric_ones() -> None:
    """Their product is the moment with what is added for other queries. Which roots they are changes only signs."""
    queries, flat = keys_of(2, 300), flat_of(keys_of(1, 500)).flatten(0, 1)
    moment, metric = flat.T @ flat, query_moment(queries, KV)
    roots, others = roots_of(metric, 0.5), metric.diagonal(dim1=1, dim2=2).mean(1) / 2
    shifted = metric + others[:, None, None] * torch.eye(DIM)
    torch.testing.assert_close(roots.mT @ roots, shifted)
    values, vectors = torch.linalg.eigh(shifted)
    symmetric = (vectors * values.sqrt()[:, None]) @ vectors.mT
    found, expected = (scaled_directions(moment, each, 8) for each in (roots, symmetric))
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-3, atol=1e-3)


def test_reconstruction_of_orthonormal_directions_is_these() -> None:
    flat = flat_of(keys_of(2, 300)).flatten(0, 1)
    moment = flat.T @ flat
    adapter = principal_directions(moment, 6)
    torch.testing.assert_close(reconstruction(moment, adapter), adapter, rtol=0, atol=1e-3)


class _Casts(TorchDispatchMode):
    """Notes how large what is cast to another type is."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_scores_are_made_some_tokens_at_a_time(dtype: torch.dtype) -> None:
    """Many tokens come out as few do; what is made of them at a time is no larger than for `BLOCK` tokens."""
    account = MemoryAccount()
    workspace = Workspace(account, "scores")
    keys, query = keys_of(1, 2 * BLOCK + 3 * GROUP), query_of(1)
    summary = predictor(keys, WIDTH, dtype, account, workspace)
    summary.append(keys)
    low = summary.low_rank_query(query)[0]
    best = summary.best_of_units(low, 0, GROUP, None)
    expected = all_scores(summary, query)[0].T.unflatten(1, (-1, GROUP)).amax(2)
    torch.testing.assert_close(torch.from_numpy(best), expected, rtol=1e-5, atol=1e-4)
    if dtype == torch.int8:
        assert account.by_owner["scores"] == HEADS * (2 * BLOCK + 3 * GROUP) * 4  # by `all_scores`
        workspace.release()
        summary.best_of_units(low, 0, GROUP, None)
        assert account.by_owner["scores"] == HEADS * BLOCK * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_a_wide_projection_is_not_expanded_to_be_multiplied(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key_heads, per_head, dim, rank = 8, 4, 128, 160
    torch.manual_seed(0)
    projection = torch.randn(key_heads * dim, rank)
    query = torch.randn(batch, key_heads * per_head, dim).bfloat16()
    found = {}
    for fast in (True, False):
        monkeypatch.setattr(low_rank_keys, "multiplies_bfloat16", lambda fast=fast: fast)
        keys = LowRankKeys(projection, torch.ones(rank), torch.int8, key_heads, batch, MemoryAccount())
        with _Casts() as casts:
            found[fast] = keys.low_rank_query(query)
        assert (projection.numel() in casts.sizes) is not fast
    grouped, exact = query.double().unflatten(1, (key_heads, -1)), projection.bfloat16().double()
    expected = torch.einsum("bkgd,kdr->bkgr", grouped, exact.view(key_heads, dim, rank)).flatten(1, 2).numpy()
    expected *= keys.scale.double().numpy()
    assert found[False] == pytest.approx(expected, rel=1e-5, abs=1e-5 * np.abs(expected).max())
    # The product is rounded to bfloat16 once more: 2 ** -9 of each value, and of the sum's own rounding as much again.
    assert np.abs(found[True] - expected).max() <= 2**-8 * np.abs(expected).max()
    assert found[True].shape == (batch, key_heads * per_head, rank) and found[True].dtype == np.float32
