"""The twins of the kernels that choose chunks and tokens: against what the processor chooses, ties to the first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import bounds as twins
from hf_offload_cache.methods.abstract_tree import best_tokens, bounds, front, likely, shares, standing
from hf_offload_cache.predictors import largest


@pytest.mark.parametrize("apart", [False, True])
def test_limits_are_those_of_the_processor(apart: bool) -> None:
    random = torch.Generator().manual_seed(0)
    states = torch.randn(2, 6, 4, 16, generator=random)[:, :, 1]
    keys = torch.randn(*((6, 1) if apart else (2, 3)), 40, 8, 16, generator=random)
    abstracts = torch.stack([keys.amin(3), keys.amax(3)], 1).permute(0, 3, 1, 2, 4).contiguous()
    room = torch.full((len(abstracts), 50, *abstracts.shape[2:]), torch.nan)
    room[:, :40] = abstracts
    for expected, judge in ((True, likely), (False, bounds)):
        found = twins.limits(states, room[:, :40], 0.3, expected)
        own = (states * 0.3).reshape(len(abstracts), -1, 16)
        for one, other in zip(found, judge(own, *abstracts.permute(2, 0, 3, 1, 4)), strict=True):
            torch.testing.assert_close(one, other)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_are_those_of_the_processor(data: st.DataObject) -> None:
    """For any bounds, also those of few keys, where some chunks count with all their tokens; equal ones, too."""
    rows, heads, chunks = (data.draw(st.integers(1, most)) for most in (3, 4, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    high = random.random((rows, heads, chunks), dtype=np.float32)
    if data.draw(st.booleans()):
        high = np.round(8 * high) / np.float32(8)
    low = high - data.draw(st.sampled_from([0.01, 0.2, 2])) * random.random(high.shape, dtype=np.float32)
    budget, group = data.draw(st.integers(1, chunks + 2)), data.draw(st.sampled_from([2, 8, 64]))
    wanted, apart = data.draw(st.integers(1, budget * group)), data.draw(st.integers(0, min(2, budget)))
    places = min(budget, chunks)
    most, least = standing(high, low, places)
    found = twins.stand(torch.from_numpy(high), torch.from_numpy(low), places, apart)
    most[:, :apart] = np.inf
    assert np.array_equal(found[0].numpy(), most)
    assert np.array_equal(found[1].numpy(), np.zeros_like(most) if least is None else least)
    chosen = front(most, least, group, np.full(rows, wanted), budget)
    units = twins.front(*found, group, wanted, budget)
    assert units.shape == (rows, places) and units.dtype == torch.int32
    for row, expected in zip(units.tolist(), chosen.sure | chosen.unsure, strict=True):
        kept = expected.nonzero()[0].tolist()
        assert row == kept + [-1] * (places - len(kept))


@pytest.mark.parametrize("judge", [likely, bounds])
@pytest.mark.parametrize("where", ["queries", "a head", "a chunk", "all", "keys that overflow"])
def test_bounds_that_are_nan_are_the_lowest(where: str, judge: Any) -> None:
    """On the processor too: as many chunks as without them, by the heads and chunks that have scores."""
    random = torch.Generator().manual_seed(2)
    states = torch.randn(2, 3, 8, generator=random)
    ends = torch.randn(2, 10, 2, 1, 8, generator=random).sort(2).values
    usual = standing(*(one.numpy() for one in judge(states, *ends.permute(2, 0, 3, 1, 4))), 3)[0]
    if where in ("queries", "a head", "all"):
        states[:, 1 if where == "a head" else slice(None)] = torch.nan
    if where in ("a chunk", "all"):
        ends[:, 4 if where == "a chunk" else slice(None)] = torch.nan
    if where == "keys that overflow":
        ends[:, 4, 1] = torch.inf
    high, low = judge(states, *ends.permute(2, 0, 3, 1, 4))
    most, least = standing(high.numpy(), low.numpy(), 3)
    found = twins.stand(*twins.limits(states, ends, 1.0, judge is likely), 3, 0)
    assert least is None and np.array_equal(found[0].numpy(), most) and not found[1].any()
    units = twins.front(*found, 64, 36, 3).tolist()
    assert units == largest(most, 3).tolist()
    if where in ("queries", "all"):
        assert units == [[0, 1, 2]] * 2
    elif where != "a head":
        assert not most[:, 4].any() and (usual[:, 4] > 0).any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_tokens_are_those_with_the_largest_shares(apart: bool, bits: int | None) -> None:
    random = torch.Generator().manual_seed(1)
    rows, key_heads = (4, 1) if apart else (2, 2)
    form = RecordFormat(key_heads, 16, key_heads, 24, torch.float32, 5, bits)
    query = torch.randn(2, 6, 4, 16, generator=random)[:, :, 2]
    entries = torch.randn(rows * 9, 5, form.entry_width, generator=random)
    data = torch.zeros(rows * 9, form.payload_width, dtype=form.payload_dtype)
    form.pack(entries, data)
    entries = form.unpacked(data).view(rows, 9, 5, -1)
    slots = torch.stack([torch.randperm(9, generator=random)[:6] for _ in range(rows)]).int()
    slots[1, 4:], slots[-1, 1:] = -1, -1
    recent = torch.randn(rows, key_heads, 7, 16, generator=random)
    keep = twins.look(query, data.view(rows, 9, -1), slots, recent, form, 0.3, 11, 3)
    assert keep.shape == (rows, 6, 5)
    chosen = torch.stack([row[one.long()] for row, one in zip(entries, slots, strict=True)]).flatten(1, 2)
    hidden = (slots < 0).repeat_interleave(5, 1).numpy()
    states, keys = (query * 0.3).reshape(rows, -1, 16), form.split(chosen)[0]
    expected = shares(states, keys, recent, hidden)
    expected[:, :3], expected[hidden] = np.inf, -np.inf
    for row in range(rows):
        best = np.argsort(-expected[row], kind="stable")[:11]
        assert keep[row].flatten().nonzero()[:, 0].tolist() == sorted(best[~hidden[row, best]].tolist())
    assert keep.sum((1, 2)).tolist() == [11] * (rows - 1) + [5] and keep[:, 0, :3].all()
    spoilt = query.clone()
    spoilt[0, 1] = torch.nan  # then no token of its row has a share, here as on the processor
    without = twins.look(spoilt, data.view(rows, 9, -1), slots, recent, form, 0.3, 11, 3).flatten(1)
    expected = shares((spoilt * 0.3).reshape(rows, -1, 16), keys, recent, hidden)
    assert np.isnan(expected[0]).all() and np.isfinite(expected[-1]).all()
    expected[:, :3], expected[hidden] = np.inf, -np.inf
    assert np.array_equal(without.numpy(), best_tokens(expected, 11)) and without[0, :11].all()
    if bits is None:  # what is in no slot of the choice does not matter
        rest = torch.ones(rows, 10, dtype=torch.bool).scatter_(1, slots.long().remainder(10), False)[:, :9]
        data.view(rows, 9, -1)[rest] = torch.nan
        assert torch.equal(twins.look(query, data.view(rows, 9, -1), slots, recent, form, 0.3, 11, 3), keep)


def test_equal_tokens_go_to_the_first() -> None:
    form = RecordFormat(1, 8, 1, 8, torch.float32, 4)
    data, recent = torch.ones(1, 5, form.payload_width), torch.ones(1, 1, 2, 8)
    keep = twins.look(torch.ones(1, 3, 8), data, torch.tensor([[3, 0, 1]]).int(), recent, form, 1.0, 6, 1)
    assert keep.flatten().tolist() == [True] * 6 + [False] * 6
    keep = twins.look(torch.full((1, 3, 8), torch.nan), data, torch.tensor([[3, -1, 1]]).int(), recent, form, 1.0, 6, 0)
    assert keep.flatten().tolist() == [True] * 4 + [False] * 4 + [True] * 2 + [False] * 2
