"""Entries that each key head chose: where they are read from, and what stays from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.errors import BudgetError
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels.mixed_attention import exchange
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import ChosenEntries, Entries, picked, records_of

FORM = RecordFormat(2, 3, 2, 5, torch.float32, 4)
CPU = torch.device("cpu")


def entries(tokens: np.ndarray) -> Entries:
    """Of tokens (rows, heads, m): each number says whose it is."""
    row, head = np.ogrid[: tokens.shape[0], : tokens.shape[1]]
    value = torch.from_numpy(tokens + 1000 * row[..., None] + 10000 * head[..., None]).float()
    parts = value[..., None].expand(-1, -1, -1, 3), -value[..., None].expand(-1, -1, -1, 5)
    return Entries(torch.from_numpy(tokens), *parts)


def same(found: Entries, tokens: np.ndarray) -> None:
    """It holds just these tokens (rows, heads, m), and what is theirs."""
    expected, there = entries(found.tokens.numpy()), found.tokens >= 0
    for own, theirs in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(own[there], theirs[there]) and bool(own.isfinite().all())
    for row, head in np.ndindex(tokens.shape[:2]):
        held, wanted = (one[row, head][one[row, head] >= 0] for one in (found.tokens.numpy(), tokens))
        assert sorted(held) == sorted(wanted)


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_records_and_what_is_picked_of_them(most: int) -> None:
    """So many at a time; each token once."""
    tokens = np.array([[[5, 17, -1], [4, 6, 40]], [[-1, -1, -1], [8, -1, -1]]])
    choices = records_of(tokens, 4, most)
    units = np.concatenate([choice.units for choice in choices], 1)
    assert units.tolist() == [[1, 4, 10], [2, -1, -1]] and all(choice.units.shape[1] <= most for choice in choices)
    found = []
    for choice in choices:
        places = choice.units[:, :, None] * 4 + np.arange(4)
        of = entries(np.repeat(places.reshape(2, 1, -1), 2, 1))
        records = torch.cat([of.keys.transpose(1, 2).flatten(2), of.values.transpose(1, 2).flatten(2)], 2)
        found.append(picked(FORM, records.unflatten(1, (-1, 4)), choice, tokens))
        same(found[-1], found[-1].tokens.numpy())
    assert np.array_equal(np.max([one.tokens.numpy() for one in found], 0), tokens)
    assert sum(int((one.tokens >= 0).sum()) for one in found) == 6
    assert not records_of(np.full((2, 2, 3), -1), 4, most)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_chosen_again_stays_where_it_lies(data: st.DataObject) -> None:
    held = ChosenEntries(FORM, 2, 5, CPU, MemoryAccount())
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 5))
        draw = st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True)
        wanted = np.array([data.draw(draw) for _ in range(4)]).reshape(2, 2, count)
        wanted[data.draw(st.integers(0, 1)), 0, : data.draw(st.integers(0, count))] = -1
        before = held.tokens.numpy().copy()
        absent = held.want(torch.from_numpy(wanted)).numpy()
        assert held.absent is not None and np.array_equal(held.absent.numpy(), absent)
        assert np.array_equal(held.tokens.numpy(), before)
        assert ((absent[:, :, :-1] >= 0) | (absent[:, :, 1:] < 0)).all(), "-1 behind them"
        cut = data.draw(st.integers(0, 9))
        held.take([entries(np.where(absent < cut, absent, -1)), entries(np.where(absent < cut, -1, absent))])
        same(held.entries, wanted)
        stays = (before == held.tokens.numpy()) & (before >= 0)
        assert stays.sum() == (wanted >= 0).sum() - (absent >= 0).sum()
        held.take([])  # nothing is wanted
        same(held.entries, wanted)


def test_what_is_absent_after_a_crop_comes_first() -> None:
    held = ChosenEntries(FORM, 1, 6, CPU, MemoryAccount())
    with torch.inference_mode():
        held.want(torch.tensor([[[3, 90, 7, 80, 1, 2], [91, 92, 4, 5, 6, 93]]]))
    held.truncate(50)
    assert held.absent is not None and held.absent.tolist() == [[[7, 3, 2, 1, -1, -1], [6, 5, 4, -1, -1, -1]]]
    assert held.wanted is not None and int((held.wanted >= 0).sum()) == 7


def test_rows_and_crops_and_the_account() -> None:
    account = MemoryAccount()
    held = ChosenEntries(FORM, 3, 4, CPU, account)
    tokens = np.arange(24).reshape(3, 2, 4)
    held.want(torch.from_numpy(tokens))
    held.take([entries(tokens)])
    assert account.by_owner["chosen entries"] == held.nbytes == ChosenEntries.nbytes_of(FORM, 3, 4)
    held.truncate(20)
    same(held.entries, np.where(tokens < 20, tokens, -1))
    before = held.keys.clone()
    held.select_rows(torch.tensor([2, 0]))
    assert torch.equal(held.keys, before[[2, 0]])
    assert account.by_owner["chosen entries"] == held.nbytes == ChosenEntries.nbytes_of(FORM, 2, 4)
    account.limit = account.current
    with pytest.raises(BudgetError):
        held.select_rows(torch.tensor([0, 1, 1, 1]))
    assert len(held.tokens) == 2 and account.by_owner["chosen entries"] == held.nbytes
    held.close()
    assert account.by_owner["chosen entries"] == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_device_exchanges_the_entries_that_the_processor_does(data: st.DataObject) -> None:
    """After any sequence of steps the same tokens are resident, as many came, and those that stay keep their places."""
    rows, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    count = data.draw(st.integers(1, tokens))
    on_host, table = ChosenEntries(FORM, rows, count, CPU, MemoryAccount()), torch.full((rows, 2, count), -1)
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(0, count))
        each = st.lists(st.integers(0, tokens - 1), unique=True, max_size=width)
        wanted = torch.full((rows, 2, width), -1)
        for row, head in np.ndindex(rows, 2):
            chosen = data.draw(each)
            wanted[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        before = table.clone()
        new, counts = exchange(table, wanted)
        absent = on_host.want(wanted)
        on_host.take([entries(absent.numpy())])
        same(on_host.entries, table.numpy())
        assert torch.equal(counts, (absent >= 0).sum(2))
        assert torch.equal(new.sort(2).values[..., count - width :], absent.sort(2).values)
        stays = (before >= 0) & (before == table)
        assert torch.equal(stays | (new >= 0), table >= 0) and torch.equal(table[new >= 0], new[new >= 0])
    on_host.close()
