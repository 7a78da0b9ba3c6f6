"""Codes of few bits against the keys they are made of, and against bits chosen otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from compact_scores import scores_of
from torch.profiler import ProfilerActivity, profile, record_function
from torch_memory import most_held

from hf_offload_cache.errors import ContextError
from hf_offload_cache.memory import DryRun, MemoryAccount, Workspace
from hf_offload_cache.methods.disk_swap import (
    BLOCK,
    HIDDEN,
    CodedKeys,
    Coding,
    Directions,
    allocate,
    bytes_of,
    coding_bytes,
    compact_keys,
    default_summary_bytes,
    fit_coding,
    fitting_bytes,
    most_bytes,
    most_components,
    rank_units,
    ranking,
)

KV, HEADS, DIM = 2, 6, 16
WIDTH = KV * DIM


def keys_of(batch: int, tokens: int, seed: int = 0, mean: float = 3.0) -> torch.Tensor:
    """Keys (B, Hk, t, D) with a mean, and energy that falls from component to component."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    energy = 4 * 0.85 ** torch.arange(WIDTH)
    flat = (torch.randn(batch, tokens, WIDTH, generator=generator) * energy) @ directions
    flat += mean * torch.randn(WIDTH, generator=generator)
    return flat.unflatten(-1, (KV, DIM)).transpose(1, 2)


def flat_of(keys: torch.Tensor) -> torch.Tensor:
    return keys.transpose(1, 2).flatten(2).flatten(0, 1)


def coding_of(keys: torch.Tensor, nbytes: int, **more: Any) -> Coding:
    parts = more.pop("parts", [keys])
    return fit_coding(lambda: parts, keys.shape[2], KV, more.get("visible"), nbytes, more.get("seen"))


def query_of(batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def exact_scores(query: torch.Tensor, keys: torch.Tensor) -> np.ndarray:
    found: np.ndarray = torch.einsum("bhd,bhtd->bht", query, keys.repeat_interleave(HEADS // KV, 1)).numpy()
    return found


def coded(
    keys: torch.Tensor, coding: Coding, account: MemoryAccount | None = None, unit_size: int = 1
) -> CodedKeys:
    account = account or MemoryAccount()
    made = CodedKeys(coding, KV, keys.shape[0], account, Workspace(account, "scores"), unit_size)
    made.append(keys)
    return made


@pytest.mark.parametrize("counts", [(0, 2, 0), (1, 0, 4), (2, 6, 8), (3, 4, 0), (0, 0, 4), (5, 2, 12)])
def test_every_code_comes_back(counts: tuple[int, int, int]) -> None:
    """Each component alone takes all values that its bits have, whatever the others are, and clips beyond."""
    rank = sum(counts)
    one = torch.ones(rank)
    coding = Coding(torch.zeros(rank), torch.eye(rank).to(torch.int8), one, torch.eye(rank).to(torch.int8), one, counts)
    limits = np.repeat([128, 8, 2], counts)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.stack([torch.randint(-int(limit), int(limit), (700,), generator=generator) for limit in limits], 1)
    values = wanted + 0.25  # codes are whole numbers below
    values[0], values[1] = 1e6, -1e6
    codes = coding.encode(values)
    assert codes.shape == (coding.nbytes, 700) and codes.dtype == torch.uint8
    assert coding.nbytes == bytes_of(counts) == sum(counts[0:1]) + counts[1] // 2 + counts[2] // 4
    found = coding.unpacked(codes).t().float() + torch.from_numpy(coding.offsets)
    torch.testing.assert_close(found[2:], wanted[2:] + 0.5, rtol=0, atol=0)
    torch.testing.assert_close(found[0], torch.from_numpy(limits - 0.5).float(), rtol=0, atol=0)
    torch.testing.assert_close(found[1], torch.from_numpy(0.5 - limits).float(), rtol=0, atol=0)
    out = torch.zeros(rank, 700, dtype=torch.uint8)
    assert torch.equal(coding.unpacked(codes, out), coding.unpacked(codes)) and bool(out.any())
    assert coding.rough == (rank if counts[0] + counts[1] < counts[2] / 2 else counts[0] + counts[1])
    rough = torch.zeros(coding.rough, 700, dtype=torch.uint8)
    assert torch.equal(coding.unpacked(codes, rough), coding.unpacked(codes)[: coding.rough])


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5])
def test_bits_are_given_where_they_save_most(nbytes: int) -> None:
    generator = np.random.default_rng(nbytes)
    variance = generator.uniform(0.1, 5.0, 8) ** 2
    errors = {0: variance, 2: variance * 0.12, 4: variance * 0.012, 8: variance * 1e-4}
    chosen = allocate(errors, nbytes)
    assert len(np.unique(np.concatenate(chosen))) == sum(map(len, chosen))
    assert bytes_of([len(part) for part in chosen]) <= nbytes and not len(chosen[1]) % 2 and not len(chosen[2]) % 4

    def error_of(bits: tuple[int, ...]) -> float:
        return float(sum(errors[one][place] for place, one in enumerate(bits)))

    own = [0] * 8
    for bits, part in zip((8, 4, 2), chosen, strict=True):
        for place in part:
            own[place] = bits
    best = min(
        error_of(bits)
        for bits in itertools.product((0, 2, 4, 8), repeat=8)
        if sum(bits) <= 8 * nbytes and not bits.count(4) % 2 and not bits.count(2) % 4
    )
    assert error_of(tuple(own)) <= 1.02 * best  # classes are chosen one after another


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_scores_are_near_and_nearer_with_more_bytes(nbytes: int) -> None:
    keys, query = keys_of(1, 3000), query_of(1)
    coding = coding_of(keys[:, :, :2000], nbytes)
    assert coding.nbytes <= nbytes
    later = keys[:, :, 2000:]
    found = coded(later, coding)
    scores = scores_of(found, found.low_rank_query(query)[0], 0, np.arange(1000), 1, None)[..., 0]
    exact = exact_scores(query, later)[0]
    left = np.square(scores - exact).mean() / exact.var()
    flat = flat_of(keys[:, :, :2000])
    centred = flat - flat.mean(0)
    values = torch.linalg.svd(centred, full_matrices=False)[1].square()
    assert left < float(values[nbytes:].sum() / values.sum())
    assert left < {4: 0.4, 8: 0.1, 16: 0.01}[nbytes]


def test_the_mean_is_taken_off_and_comes_back() -> None:
    """A large mean takes no bits: codes are the same without it, and scores have it."""
    keys, query = keys_of(1, 2000, mean=0.0), query_of(1)
    shift = 30 * torch.randn(KV, DIM, generator=torch.Generator().manual_seed(5))
    shifted = keys + shift[None, :, None]
    plain, other = (coded(each, coding_of(each, 8)) for each in (keys, shifted))
    scores = [
        scores_of(each, each.low_rank_query(query)[0], 0, np.arange(2000), 1, None)[..., 0] for each in (plain, other)
    ]
    constant = torch.einsum("hd,hd->h", query[0], shift.repeat_interleave(HEADS // KV, 0)).numpy()
    spread = scores[0].std()
    assert np.abs(scores[1] - scores[0] - constant[:, None]).mean() < 0.1 * spread


def test_components_lie_where_queries_look() -> None:
    """Keys are largest where no query points: in the queries' metric the scores of such queries come out far nearer."""
    generator = torch.Generator().manual_seed(0)
    looked = torch.arange(DIM) >= DIM // 2
    keys = torch.randn(1, KV, 2500, DIM, generator=generator) * torch.where(looked, 1.0, 1.5)
    queries = torch.randn(1, HEADS, 600, DIM, generator=generator) * looked
    errors = []
    for seen in (None, queries):
        found = coded(keys, coding_of(keys, 4, seen=seen))
        scores = scores_of(found, found.low_rank_query(queries[:, :, -1])[0], 0, np.arange(2500), 1, None)[..., 0]
        errors.append(np.square(scores - exact_scores(queries[:, :, -1], keys)[0]).mean())
    assert errors[1] < 0.5 * errors[0]


def test_no_code_is_longer_than_most_bytes() -> None:
    coding = coding_of(keys_of(1, 600), 1000)
    assert coding.rank == most_components(WIDTH) == WIDTH
    assert coding.nbytes == most_bytes(WIDTH) == 20


def test_a_heavy_tail_is_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, KV, 4000, DIM, generator=generator)
    rare = torch.rand(4000, generator=generator) < 0.02
    keys[0, 0, :, 0] += 25 * rare
    found = coded(keys, coding_of(keys, 6))
    query = torch.zeros(1, HEADS, DIM)
    query[0, 0, 0] = 1.0
    scores = scores_of(found, found.low_rank_query(query)[0], 0, np.arange(4000), 1, None)[0, :, 0]
    assert scores[rare.numpy()].min() > scores[~rare.numpy()].max()


def test_padding_and_sinks_are_no_part_of_the_fit() -> None:
    keys = keys_of(2, 1500)
    visible = torch.ones(2, 1500, dtype=torch.bool)
    visible[1, :300] = False
    other = keys.clone()
    other[1, :, :300] = 1e4
    other[0, :, :16] *= -50
    other[1, :, 300:316] *= -50
    one, two = (coding_of(each, 8, visible=visible) for each in (keys, other))
    assert one.counts == two.counts
    for name in ("mean", "keys", "key_scale", "queries", "query_scale"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=0, atol=0)


def test_parts_of_any_length_make_the_same() -> None:
    keys = keys_of(1, 1536 + 16)
    whole = coding_of(keys, 8)
    pieces = coding_of(keys, 8, parts=[keys[:, :, :128], keys[:, :, 128:640], keys[:, :, 640:]])
    assert whole.counts == pieces.counts
    torch.testing.assert_close(whole.mean, pieces.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.key_scale, pieces.key_scale, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("unit_size", [1, 4])
def test_padding_is_below_everything(unit_size: int) -> None:
    keys, query = keys_of(2, 64), query_of(2)
    visible = torch.ones(2, 64, dtype=torch.bool)
    visible[1, :10] = False
    found = coded(keys, coding_of(keys_of(1, 1000), 8), unit_size=unit_size)
    low = found.low_rank_query(query)[1]
    best, plain = (found.best_of_units(low, 1, 4, seen) for seen in (visible, None))
    assert (best[:, :2] < -1e6).all()
    assert (best[:, 3:] == plain[:, 3:]).all()
    scores = scores_of(found, low, 1, np.array([5, 2, 0]), 4, visible)
    assert (scores[:, 2] == HIDDEN).all() and (scores[:, 1, :2] == HIDDEN).all() and (scores[:, 0] > HIDDEN).all()
    np.testing.assert_allclose(best[:, 5], scores[:, 0].max(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_scores_stay_as_they_were_said(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_keys, "multiplies_bytes", lambda: fast)
    found, query = coded(keys_of(1, 64), coding_of(keys_of(1, 1000), 8)), query_of(1)
    low = found.low_rank_query(query)[0]
    first = scores_of(found, low, 0, np.array([1, 2]), 4, None)
    kept = first.copy()
    scores_of(found, low, 0, np.array([7, 9]), 4, None)
    assert (first == kept).all()
    monkeypatch.setattr(compact_keys, "multiplies_bytes", lambda: not fast)
    assert (scores_of(found, low, 0, np.array([1, 2]), 4, None) == kept).all()


@pytest.mark.parametrize("unit_size", [1, 4])
def test_many_tokens_are_scored_some_at_a_time(unit_size: int) -> None:
    account = MemoryAccount()
    keys, query = keys_of(1, 2 * BLOCK + 12), query_of(1)
    coding = coding_of(keys, 8)
    found = coded(keys, coding, account, unit_size)
    best = found.best_of_units(found.low_rank_query(query)[0], 0, 4, None)
    assert account.by_owner["scores"] == BLOCK * (coding.rank + 4 * HEADS)
    whole = scores_of(found, found.low_rank_query(query)[0], 0, np.arange(best.shape[1]), 4, None).max(-1)
    np.testing.assert_allclose(best, whole, rtol=1e-5, atol=1e-4)


def test_units_side_by_side_score_as_tokens_side_by_side() -> None:
    """Best tokens, all tokens, of some units and of all, roughly too, with padding."""
    keys, query = keys_of(2, 4 * BLOCK + 600), query_of(2)
    visible = torch.rand(2, keys.shape[2], generator=torch.Generator().manual_seed(3)) < 0.9
    visible[1, :41] = False
    coding, accounts = coding_of(keys, 10), (MemoryAccount(), MemoryAccount())
    tokens, side = (coded(keys, coding, account, size) for account, size in zip(accounts, (1, 4), strict=True))
    some = np.array([7, 0, 2000, 12, 13])
    for row, seen in itertools.product(range(2), (None, visible)):
        low = tokens.low_rank_query(query)[row]
        for options in ({}, {"roughly": True}, {"units": some}):
            expected, found = (each.best_of_units(low, row, 4, seen, **options) for each in (tokens, side))
            np.testing.assert_array_equal(found, expected)
        expected, found = (scores_of(each, low, row, some, 4, seen) for each in (tokens, side))
        np.testing.assert_array_equal(found, expected)
    for account in accounts:
        assert account.by_owner["scores"] == 2 * BLOCK * (coding.rank + 4 * HEADS)


@pytest.mark.parametrize("tokens", [640, 641, 655])
def test_whole_units_are_planned(tokens: int) -> None:
    coding, account = coding_of(keys_of(2, 640), 8), MemoryAccount()
    CodedKeys(coding, KV, 2, account, Workspace(account, "scores"), 16).reserve(tokens)
    run = DryRun()
    CodedKeys.rehearse(run, WIDTH, coding.nbytes, tokens, 2, HEADS, 16, 4)
    planned = run.by_owner["compact keys"]
    assert account.by_owner["compact keys"] == planned == 2 * -(-tokens // 16) * 16 * coding.nbytes


def test_codes_of_units_of_another_size_raise() -> None:
    keys, account = keys_of(2, 1200), MemoryAccount()
    coding = coding_of(keys, 8)
    tree = coded(keys, coding, unit_size=4).capture()
    given = KV, account, Workspace(account, "scores")
    sizes = {"rows": 2, "places": 300, "width": KV * DIM}
    assert CodedKeys.restore(tree, *given, 4, **sizes).tokens == 1200
    assert account.by_owner["compact keys"] == 2 * 1200 * coding.nbytes
    for name in sizes:
        with pytest.raises(ContextError, match=f"is .* expected .*{name}={sizes[name] + 1}"):
            CodedKeys.restore(tree, *given, 4, **{**sizes, name: sizes[name] + 1})
    for unit_size in (1, 7):
        with pytest.raises(ContextError, match=f"codes of its coded keys is .* bytes={unit_size * coding.nbytes}, "):
            CodedKeys.restore(tree, *given, unit_size)


def test_few_of_many_are_found_by_a_rough_pass_and_a_close_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rough pass unpacks the first components; what it passes on is ranked as if all had been."""
    keys, query = keys_of(2, 1600), query_of(2)
    coding = coding_of(keys, 10)
    assert coding.rough < coding.rank
    found, unpacked = coded(keys, coding), Coding.unpacked
    shapes: list[int] = []

    def watched(self: Coding, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shapes.append(len(out))
        return unpacked(self, codes, out)

    visible = torch.ones(2, 1600, dtype=torch.bool)
    visible[1, :40] = False
    last, apart = np.random.default_rng(0).normal(size=(2, HEADS, 5)).astype(np.float32), np.array([[0], [10]])
    monkeypatch.setattr(Coding, "unpacked", watched)

    def ranked() -> np.ndarray:
        del shapes[:]
        return rank_units(found, query, 0.3, 4, 6, visible=visible, exact=last, apart=apart).importance

    rough = ranked()
    assert shapes == [coding.rough, coding.rank] * 2
    monkeypatch.setattr(ranking, "_FEW", 10**6)
    close = ranked()
    assert shapes == [coding.rank] * 2
    for row in range(2):
        best = np.argsort(-close[row])[:6]
        assert set(best) == set(np.argsort(-rough[row])[:6])
        np.testing.assert_allclose(rough[row, best], close[row, best], rtol=0.04)  # others count roughly
        assert rough[row, apart[row]] < 0 and close[row, apart[row]] < 0
    assert (rough[1, :10] < 1e-6).all()


@pytest.mark.parametrize("unit_size", [1, 4])
def test_rows_pieces_truncation_and_the_account(unit_size: int) -> None:
    """Appended in pieces as at once; rows and lengths follow; what is held is in the account, and is given back."""
    account = MemoryAccount()
    keys = keys_of(2, 900)
    coding = coding_of(keys, 8)
    whole = coded(keys, coding)
    found = CodedKeys(coding, KV, 2, account, Workspace(account, "scores"), unit_size)
    query = query_of(1)

    def check(rows: list[int], tokens: int) -> None:
        assert found.tokens == tokens
        for row, source in enumerate(rows):
            own, expected = (
                scores_of(each, each.low_rank_query(query)[0], place, np.arange(-(-tokens // size)), size, None)
                for each, place, size in ((found, row, unit_size), (whole, source, 1))
            )
            own = own.reshape(len(own), -1)[:, :tokens]
            np.testing.assert_array_equal(own, expected[..., 0])
        assert account.by_owner["adapters"] == coding.own_bytes <= Coding.most_own_bytes(WIDTH, coding.nbytes, "cpu")

    for start, stop in ((0, 1), (1, 4), (4, 300), (300, 300), (300, 900)):
        found.append(keys[:, :, start:stop])
        check([0, 1], stop)
    found.truncate(650)
    found.append(keys[:, :, 650:900])
    check([0, 1], 900)
    found.select_rows(torch.tensor([1, 0, 1]))
    check([1, 0, 1], 900)
    tree = found.capture()
    again = CodedKeys.restore(tree, KV, MemoryAccount(), Workspace(MemoryAccount(), "scores"), unit_size)
    again.append(keys[[1, 0, 1], :, :8])
    check([1, 0, 1], 900)
    assert again.tokens == 908
    found.close()
    assert account.by_owner["compact keys"] == account.by_owner["adapters"] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["coding"].update(counts=torch.tensor([1, 2])),
        lambda tree: tree["coding"].update(counts=torch.tensor([-1, 2, 4])),
        lambda tree: tree["coding"].update(counts=tree["coding"]["counts"].int()),
        lambda tree: tree["coding"].update(counts=tree["coding"]["counts"] + 1),
        lambda tree: tree["coding"].update(mean=tree["coding"]["mean"][1:]),
        lambda tree: tree["coding"].update(keys=tree["coding"]["keys"].float()),
        lambda tree: tree["coding"].update(query_scale=tree["coding"]["query_scale"][1:]),
        lambda tree: tree.update(codes=tree["codes"][:, 1:]),
        lambda tree: tree.update(codes=tree["codes"].float()),
    ],
)
def test_what_does_not_hold_together_is_refused(change: Any) -> None:
    keys = keys_of(1, 600)
    tree = coded(keys, coding_of(keys, 8)).capture()
    change(tree)
    with pytest.raises(ContextError):
        CodedKeys.restore(tree, KV, MemoryAccount(), Workspace(MemoryAccount(), "scores"), 1)


@pytest.mark.parametrize(("width", "nbytes", "components"), [(32, 8, 32), (192, 24, 64), (1024, 128, 256)])
def test_what_is_taken_where_nothing_is_given(width: int, nbytes: int, components: int) -> None:
    assert default_summary_bytes(width) == nbytes
    assert most_components(width) == components


@pytest.mark.parametrize("padded", [True, False])
def test_long_parts_fit_as_short_ones(padded: bool) -> None:
    """Keys decoded from the codes of either coding are as far from the keys."""
    keys, tokens = keys_of(3, 1100), 1100
    visible = (torch.arange(tokens) > torch.tensor([[0], [60], [300]])) if padded else None
    seen, wrong = torch.randn(3, HEADS, 600, DIM, generator=torch.Generator().manual_seed(2)), []
    for part in (128, 1 << 14):
        coding = fit_coding(lambda: iter(keys.split(512, 2)), tokens, KV, visible, 12, seen, part)
        account = MemoryAccount()
        made = CodedKeys(coding, KV, 3, account, Workspace(account, "scores"), 4)
        made.append(keys, part)
        found = made.components(slice(None), torch.arange(tokens)) + torch.from_numpy(coding.offsets)[:, None]
        decoded = coding.mean + found.mT @ (coding.queries.float() * coding.query_scale).t()
        wrong.append(float((decoded - keys.transpose(1, 2).flatten(2))[:, 300:].square().mean()))
    assert wrong[1] == pytest.approx(wrong[0], rel=0.01) and 0 < wrong[0] < 0.1 * float(keys.var())


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "shared", "dim", "tokens", "dtype"),
    [
        (1, 1, 4, 256, 3000, torch.bfloat16), (1, 3, 3, 64, 3000, torch.bfloat16),
        pytest.param(1, 8, 4, 128, 1600, torch.bfloat16, marks=pytest.mark.slow), (1, 4, 4, 128, 800, torch.bfloat16),
        (1, 2, 7, 64, 2000, torch.bfloat16), (4, 2, 7, 64, 600, torch.bfloat16), (1, 4, 16, 64, 2000, torch.bfloat16),
        (4, 3, 3, 64, 600, torch.float32), (2, 4, 2, 64, 800, torch.float16),
    ],
)  # fmt: skip
def test_fitting_takes_what_the_plan_says(
    rows: int, heads: int, shared: int, dim: int, tokens: int, dtype: torch.dtype, seen: bool, padded: bool
) -> None:
    """Codes, and truncated keys; LAPACK's workspace is torch's."""
    keys = torch.randn(rows, heads, tokens, dim, dtype=torch.float32).to(dtype)
    metric = torch.randn(rows, shared * heads, 600, dim, dtype=torch.float32).to(dtype) if seen else None
    visible = (torch.arange(tokens) > 60).expand(rows, -1) if padded else None
    width = heads * dim

    def fit(rank: int | None) -> None:
        if rank is None:
            fit_coding(lambda: iter(keys.split(1024, 2)), tokens, heads, visible, width // 8, metric)
        else:
            Directions.of(iter(keys.split(1024, 2)), width, heads, visible, rank, None, metric)

    truncated = [(rank, fitting_bytes(width, 1, rank, rows * tokens)) for rank in (width // 4, width)]
    for rank, planned in ((None, coding_bytes(width, dtype.itemsize, rows, tokens)), *truncated):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as held, record_function("fit"):
            fit(rank)
        assert 0.7 * planned < most_held(held, "fit") <= planned
