"""The twins of the kernels that rank on a device: against sums in double precision, and against the processor's way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hf_offload_cache.kernels.ranking import BLOCK, HIDDEN, components, encode, pick, project, rest, score, share
from hf_offload_cache.memory import MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import CodedKeys, Coding, compact_keys, fit_coding, predictor, rank_units

SCALING = 0.125


class Made(NamedTuple):
    keys: CodedKeys
    queries: torch.Tensor
    sinks: torch.Tensor
    recent: torch.Tensor


def made(batch: int, heads: int, key_heads: int, dim: int, group: int, units: int, nbytes: int = 24) -> Made:
    """Compact keys of random keys with some large directions, and queries that resemble some of the keys."""
    random = torch.Generator().manual_seed(units)
    shape = batch, key_heads, units * group, dim
    keys = torch.randn(shape, generator=random) * torch.linspace(4, 0.2, dim) + torch.randn(dim, generator=random)
    near = keys[:, :, torch.randint(units * group, (heads // key_heads,), generator=random)]
    queries = (near.flatten(1, 2) + torch.randn(batch, heads, dim, generator=random)).bfloat16()
    keys = keys.bfloat16()
    coding = fit_coding(lambda: iter([keys]), units * group, key_heads, None, nbytes, queries[:, :, None])
    account = MemoryAccount(None)
    compact = CodedKeys(coding, key_heads, batch, account, Workspace(account, "scores"), group)
    compact.append(keys)
    sinks, recent = keys[:, :, :4], torch.randn(batch, 7, key_heads, dim, generator=random).bfloat16().transpose(1, 2)
    return Made(compact, queries, sinks, recent)


def ranked(one: Made, rows: int, apart: int) -> tuple[Any, ...]:
    asked = project(one.queries, *one.keys.asks, one.sinks, one.recent, SCALING)
    best = score(*asked[:2], one.keys.codes, one.keys.coding.counts, one.keys._rows.each, apart)
    return *asked, *best, share(*best, asked[2], rows, apart)


def expected(one: Made, apart: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of all tokens (B, H, U, G), of the exact keys, and importance (B, H, U) by head, in double precision."""
    coding, (batch, heads, dim) = one.keys.coding, one.queries.shape
    states = one.queries.double().view(batch, len(one.sinks[0]), -1, dim)
    low = states @ coding.queries.double().view(states.shape[1], dim, -1) * (coding.query_scale.double() * SCALING)
    low = low.flatten(1, 2).float().bfloat16().double()
    components = one.keys.components(slice(None), torch.arange(one.keys.tokens)).double()
    components = components + torch.from_numpy(coding.offsets)[:, None]
    constant = (states @ coding.mean.double().view(states.shape[1], dim, 1)).view(batch, heads, 1) * SCALING
    scores = (low @ components + constant).unflatten(2, (-1, one.keys._rows.each))
    exact = torch.cat([one.sinks, one.recent], 2).double()
    near = (states @ exact.transpose(2, 3)).view(batch, heads, -1) * SCALING
    best = scores.amax(3)
    best[..., :apart] = -1e30
    weights = torch.cat([best, near], 2).softmax(2)[..., : best.shape[2]]
    return scores.numpy(), near.numpy(), weights.numpy()


SHAPES = [(1, 9, 3, 64, 16, 130), (2, 8, 2, 24, 5, 64), (3, 4, 4, 128, 4, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [0, 1])
def test_importance_is_the_softmax_of_each_units_best_token(shape: tuple[int, ...], apart: int) -> None:
    one = made(*shape)
    batch, heads, key_heads = shape[:3]
    scores, near_of, weights = expected(one, apart)
    for rows in (batch, batch * key_heads):
        _, _, near, best, tops, sums, importance = ranked(one, rows, apart)
        np.testing.assert_allclose(near, near_of, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(best[..., apart:], scores.max(3)[..., apart:], rtol=1e-4, atol=1e-4)
        assert (best[..., :apart] == HIDDEN).all() and torch.isinf(importance[:, :apart]).all()
        by_row = weights.reshape(rows, -1, weights.shape[2]).sum(1)
        np.testing.assert_allclose(importance[:, apart:], by_row[:, apart:], rtol=1e-4, atol=1e-6)
        assert tops.shape == sums.shape == (batch, heads, -(-shape[5] // BLOCK))
        assert (sums >= (tops > HIDDEN).float() - 1e-6).all() and (sums <= BLOCK).all()


def in_bfloat16(low: np.ndarray, device: torch.device) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """`rounded` as for a device."""
    whole = torch.from_numpy(low).bfloat16().float()
    return whole, np.ones((len(low), 1), dtype=np.float32), whole.numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart_heads", [False, True])
def test_choices_equal_the_processors(
    shape: tuple[int, ...], apart_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the processor ranks all units, with queries rounded as on a device and products in single precision."""
    monkeypatch.setattr(compact_keys, "rounded", in_bfloat16)
    monkeypatch.setattr(compact_keys, "multiplied", lambda queries, stored, memory: queries @ stored.float())
    one, (batch, _, key_heads, _, group, units) = made(*shape), shape
    each = key_heads if apart_heads else 1
    *_, near, _, _, _, importance = ranked(one, batch * each, 1)
    apart = np.zeros((batch, 1), dtype=np.int64)
    asked = one.keys, one.queries, SCALING, group, units
    host = rank_units(*asked, exact=near.numpy(), apart=apart, heads=each).importance
    np.testing.assert_allclose(importance[:, 1:], host[:, 1:], rtol=1e-3, atol=1e-6)
    host[:, 0] = np.inf
    for wanted in (1, max(1, units // 8), units):
        chosen, others, left = pick(importance, wanted, units)
        assert not left.any()
        order = np.argsort(-host, 1, kind="stable")
        assert chosen.tolist() == np.sort(order[:, :wanted]).tolist()
        assert others.tolist() == np.sort(order[:, wanted:]).tolist()


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("apart_heads", [False, True])
@pytest.mark.parametrize("where", ["query", "recent", "sinks"])
def test_heads_whose_scores_are_nan_do_not_count(
    where: str, apart_heads: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device and a processor: the other heads decide, and other rows do not change."""
    monkeypatch.setattr(compact_keys, "rounded", in_bfloat16)
    monkeypatch.setattr(compact_keys, "multiplied", lambda queries, stored, memory: queries @ stored.float())
    one, (batch, heads, key_heads, _, group, units) = made(*shape), shape
    each, (_, _, weights) = key_heads if apart_heads else 1, expected(one, 1)
    if where == "query":
        one.queries[0, 1, 3] = torch.nan
        weights[0, 1] = 0
    else:
        getattr(one, where)[0, 0, 2, 5] = torch.nan  # for all query heads of a key head
        weights[0, : heads // key_heads] = 0
    *_, near, _, _, _, importance = ranked(one, batch * each, 1)
    by_row = weights.reshape(batch * each, -1, units).sum(1)
    np.testing.assert_allclose(importance[:, 1:], by_row[:, 1:], rtol=1e-4, atol=1e-6)
    exact: dict[str, Any] = {"exact": near.numpy(), "apart": np.zeros((batch, 1), dtype=np.int64), "heads": each}
    host = rank_units(one.keys, one.queries, SCALING, group, units, **exact).importance
    np.testing.assert_allclose(host[:, 1:], by_row[:, 1:], rtol=1e-3, atol=1e-6)
    host[:, 0] = np.inf
    assert pick(importance, 8, units)[0].tolist() == np.sort(np.argsort(-host, 1, kind="stable")[:, :8]).tolist()
    ranking = rank_units(one.keys, one.queries, SCALING, group, 1, **exact)  # after a rough pass, if there is one
    assert one.keys.has_rough_form == (ranking.beyond is not None) == (shape == SHAPES[0])
    assert np.isfinite(ranking.importance).all()
    if ranking.beyond is not None:
        assert (ranking.beyond >= 0.9).all() and ranking.beyond[0, int(where == "query")] == 1


def test_the_best_units_are_picked_in_order_and_ties_go_to_the_lower_index() -> None:
    importance = torch.tensor([[3.0, torch.inf, 1, 3, 3, 0, 2, 3], [0, 0, 0, 0, 0, 0, 0, 0]])
    units, others, left = pick(importance, 3, 6)
    assert left.tolist() == [1, 0] and pick(importance - 2, 0, 0)[2].tolist() == [4, 0]
    assert units.tolist() == [[0, 1, 3], [0, 1, 2]] and others.tolist() == [[4, 6, 7], [3, 4, 5]]
    on_host = predictor._best(importance.numpy(), 3, 6)
    assert on_host.units.tolist() == units.tolist() and on_host.next is not None
    assert on_host.next.tolist() == others.tolist()
    assert predictor._best(importance.numpy(), 3).units.tolist() == units.tolist()
    importance[0] = torch.nan  # the other row has as many equal ones as both should get
    for among in (6, None):
        assert predictor._best(importance.numpy(), 3, among).units.tolist() == [[0, 1, 2], [0, 1, 2]]
    units, others, _ = pick(importance, 8, 8)
    assert units.tolist() == [list(range(8))] * 2 and others.shape == (2, 0) and units.dtype == torch.int32


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rest_is_the_mapped_mean_of_components(shape: tuple[int, ...]) -> None:
    one, random = made(*shape), torch.Generator().manual_seed(1)
    batch, heads, key_heads, units = *shape[:3], shape[5]
    inputs, value_dim = one.keys.leading, 10
    maps = torch.randint(-127, 128, (batch, inputs + 1, key_heads, value_dim), generator=random).to(torch.int8)
    scale = torch.rand(batch, inputs + 1, generator=random) * 0.01
    log_ratio = torch.randn(batch, heads, generator=random)
    scores = torch.from_numpy(expected(one, 0)[0])
    components = one.keys.components(slice(None), torch.arange(one.keys.tokens)).double()[:, :inputs]
    components = components + torch.from_numpy(one.keys.coding.offsets[:inputs])[:, None]
    low, constant, _ = project(one.queries, *one.keys.asks, one.sinks, one.recent, SCALING)
    asked = low, constant, one.keys.codes, one.keys.coding.counts, shape[4]
    for rows in (batch, batch * key_heads):
        others = torch.stack([torch.randperm(units, generator=random)[:5].sort().values for _ in range(rows)]).int()
        value, weight = rest(*asked, others, maps, scale, log_ratio, one.keys.asks.offsets)
        for sequence in range(batch):
            for head in range(heads):
                row = sequence * (rows // batch) + head // (heads // (rows // batch))
                of_head = scores[sequence, head, others[row].long()].flatten()
                tokens = (others[row].long()[:, None] * shape[4] + torch.arange(shape[4])).flatten()
                mean = components[sequence][:, tokens] @ of_head.softmax(0)
                wide = maps[sequence, :, head // (heads // key_heads)].double() * scale[sequence, :, None]
                wanted = mean @ wide[:-1] + wide[-1]
                torch.testing.assert_close(value[sequence, head].double(), wanted, rtol=1e-3, atol=1e-4)
                mass = of_head.logsumexp(0) + log_ratio[sequence, head]
                assert float(weight[sequence, head]) == pytest.approx(float(mass), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("counts", [(3, 10, 8), (0, 6, 4), (4, 0, 8), (5, 2, 0), (0, 0, 12), (9, 0, 0)])
@pytest.mark.parametrize(("group", "first", "pieces"), [(15, 7, (1, 40, 9)), (4, 0, (2, 3, 6, 1)), (1, 5, (4, 3))])
def test_codes_equal_those_that_compact_keys_store(
    counts: tuple[int, int, int], group: int, first: int, pieces: tuple[int, ...]
) -> None:
    """All sums are exact here, so that their order makes no difference."""
    random, batch, heads, dim, rank = torch.Generator().manual_seed(group), 2, 3, 16, sum(counts)
    projection = torch.randint(-8, 8, (heads * dim, rank), generator=random).to(torch.int8)
    scale = torch.tensor([4.0, 0.25, 0.125]).repeat_interleave(torch.tensor(counts))
    mean = torch.randn(heads * dim, generator=random).mul(8).round().div(8)
    tokens = first + sum(pieces)
    keys = torch.randn(batch, tokens + 2, heads, dim, generator=random).mul(8).round().div(8).bfloat16()
    keys = keys[:, 1:-1].transpose(1, 2)
    account = MemoryAccount(None)
    coding = Coding(mean, projection, scale, projection, scale, counts)
    stored = CodedKeys(coding, heads, batch, account, Workspace(account, "scores"), group)
    for piece in keys.split((first, *pieces), 2):
        stored.append(piece)
    before = torch.randint(0, 256, (batch, stored.codes.shape[1], stored.codes.shape[2] + 2), generator=random)
    codes, at = before.byte(), first
    for piece in keys[:, :, first:].split(pieces, 2):
        encode(piece, mean, projection, scale, counts, codes, group, at)
        at += piece.shape[2]

    def by_token(lines: torch.Tensor) -> torch.Tensor:
        return components(lines, counts, group).transpose(2, 3).flatten(2)

    found, others = by_token(codes), by_token(before.byte())
    assert torch.equal(found[..., first:tokens], by_token(stored.codes)[..., first:tokens])
    assert torch.equal(found[..., :first], others[..., :first])
    assert torch.equal(found[..., tokens:], others[..., tokens:])
    for own, least, most in zip(found[..., first:tokens].split(counts, 1), (-128, 0, 0), (127, 15, 3), strict=True):
        assert not own.numel() or (own.min() == least and own.max() == most)


@pytest.mark.parametrize(("missing", "rows"), [(0, 1), (1, 2), (BLOCK + 3, 1)])
def test_units_and_keys_that_do_not_exist_do_not_count(missing: int, rows: int) -> None:
    """Room with anything in it, and a number of the device of those that exist: as without the room."""
    random = torch.Generator().manual_seed(missing)
    heads, dim, group, counts, units, room = 4, 8, 3, (5, 4, 8), 70, 70 + missing
    codes = torch.randint(256, (rows, 9 * group, room), dtype=torch.uint8, generator=random)
    low = torch.randn(rows, heads, 17, generator=random).mul(0.01).bfloat16()
    constant, exist = torch.randn(rows, heads, generator=random), torch.tensor(units)
    keys = torch.randn(rows, 2, 7, dim, generator=random)
    beyond = torch.cat([keys, torch.full((rows, 2, missing, dim), torch.nan)], 2)
    made_of = torch.randn(rows, heads, dim, generator=random), torch.ones(2, dim, 17, dtype=torch.int8), torch.ones(17)
    made_of = *made_of, torch.ones(2, dim), torch.ones(17)
    near = project(*made_of, keys[:, :, :2], keys[:, :, 2:], SCALING)[2]
    counted = project(*made_of, keys[:, :, :2], beyond[:, :, 2:], SCALING, torch.tensor(5))[2]
    torch.testing.assert_close(counted[..., :7], near)
    assert bool(counted[..., 7:].isneginf().all())
    scores = score(low, constant, codes[..., :units], counts, group, 1)
    in_room = score(low, constant, codes, counts, group, 1, exist)
    assert torch.equal(in_room[0][..., :units], scores[0]) and bool((in_room[0][..., units:] == HIDDEN).all())
    importance = share(*scores, near, rows, 1)
    found = share(*in_room, counted, rows, 1, exist)
    torch.testing.assert_close(found[:, :units], importance)
    assert bool(found[:, units:].isneginf().all())
    others = pick(importance, 9, units)[1]
    maps = torch.ones(rows, 4, 2, dim, dtype=torch.int8), torch.ones(rows, 4), torch.zeros(rows, heads), torch.ones(17)
    expected = rest(low, constant, codes[..., :units], counts, group, others, *maps)
    more = torch.cat([others, torch.arange(units, room).int().expand(rows, -1)], 1)
    for one, other in zip(rest(low, constant, codes, counts, group, more, *maps, exist), expected, strict=True):
        torch.testing.assert_close(one, other)
