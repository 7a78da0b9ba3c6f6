"""The rolling buffer against slices of one long sequence; the account after every operation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.history import RecordFormat, RollingTail
from hf_offload_cache.memory import MemoryAccount

OWNER = "rolling tail"


def sequence(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (B, 2, T, 3) and values (B, 3, T, 5), all elements different."""
    keys = torch.arange(batch * tokens * 6, dtype=torch.float32).reshape(batch, 2, tokens, 3)
    values = -1 - torch.arange(batch * tokens * 15, dtype=torch.float32).reshape(batch, 3, tokens, 5)
    return keys, values


def make(batch: int, num_recent: int, group: int) -> tuple[RollingTail, MemoryAccount]:
    account = MemoryAccount()
    form = RecordFormat(2, 3, 3, 5, torch.float32, group)
    return RollingTail(form, batch, num_recent + group, torch.device("cpu"), account), account


def holds(tail: RollingTail, keys: torch.Tensor, values: torch.Tensor) -> None:
    assert tail.length == keys.shape[2]
    back = tail.form.split(tail.entries)
    assert torch.equal(back[0], keys)
    assert torch.equal(back[1], values)


operation = st.one_of(
    st.tuples(st.sampled_from(["append", "drop_first", "drop_last"]), st.integers(0, 9)),
    st.tuples(st.just("select_rows"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
)


@settings(max_examples=80, deadline=None)
@given(num_recent=st.integers(1, 7), group=st.integers(1, 5), steps=st.lists(operation, max_size=15))
def test_any_sequence_is_like_slices(num_recent: int, group: int, steps: list[tuple]) -> None:
    tail, account = make(2, num_recent, group)
    assert tail.capacity == num_recent + group
    keys, values = (part[:, :, :0] for part in sequence(2, 1))
    fed = 0
    for kind, amount in steps:
        if kind == "append":
            count = min(amount, tail.capacity - tail.length)
            fed += 10
            new = [part[:, :, fed - 10 : fed - 10 + count] for part in sequence(keys.shape[0], fed)]
            tail.append(*new)
            keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
        elif kind == "select_rows":
            rows = torch.tensor(amount) % keys.shape[0]
            tail.select_rows(rows)
            keys, values = keys[rows], values[rows]
        else:
            count = min(amount, tail.length)
            getattr(tail, kind)(count)
            kept = slice(count, None) if kind == "drop_first" else slice(0, tail.length)
            keys, values = keys[:, :, kept], values[:, :, kept]
        holds(tail, keys, values)
        expected = keys.shape[0] * tail.capacity * 21 * 4
        assert account.current == account.by_owner[OWNER] == expected
    tail.close()
    assert account.current == account.by_owner[OWNER] == 0


def test_replace_by_an_overlapping_view_of_itself() -> None:
    tail, _ = make(2, 6, 4)
    keys, values = sequence(2, 10)
    tail.append(keys, values)
    tail.replace(tail.entries[:, 1:])
    holds(tail, keys[:, :, 1:], values[:, :, 1:])


def test_arguments_are_copied() -> None:
    tail, _ = make(1, 2, 2)
    keys, values = sequence(1, 3)
    given_keys, given_values = keys.clone(), values.clone()
    tail.append(given_keys, given_values)
    given_keys.zero_()
    given_values.zero_()
    holds(tail, keys, values)


def test_more_than_it_holds_is_our_own_error() -> None:
    tail, _ = make(1, 2, 2)
    with pytest.raises(AssertionError, match="4 asked to hold 5"):
        tail.append(*sequence(1, 5))


def test_made_in_inference_mode_and_written_outside() -> None:
    keys, values = sequence(1, 3)
    with torch.inference_mode():
        tail, _ = make(1, 2, 2)
        tail.append(keys[:, :, :1], values[:, :, :1])
        tail.select_rows(torch.tensor([0]))
    tail.append(keys[:, :, 1:], values[:, :, 1:])
    holds(tail, keys, values)
