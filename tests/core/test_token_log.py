"""The token log against plain lists; unknown places match anything; the account after every operation."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.core import TokenLog
from hf_offload_cache.memory import MemoryAccount

operation = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6), st.integers(-4, 3)),
    st.tuples(st.just("truncate"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("select_rows"), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.just(0)),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(operation, max_size=15))
def test_any_sequence_is_like_lists(steps: list[tuple]) -> None:
    """Steps may begin before the end (after a crop of which the log was not told) or after it (ids not seen)."""
    account, batch, given_ids = MemoryAccount(), 2, 100
    log, rows = TokenLog(account), [[], []]
    longest = 0
    for kind, amount, shift in steps:
        longest = max(longest, log.length + shift + (amount if kind == "append" else 0))
        if kind == "append":
            at = max(0, log.length + shift)
            new = torch.arange(given_ids, given_ids + batch * amount, dtype=torch.int32).reshape(batch, amount)
            given_ids += batch * amount
            log.append(new, at)
            rows = [
                (row + [TokenLog.UNKNOWN] * at)[:at] + part for row, part in zip(rows, new.tolist(), strict=True)
            ]
        elif kind == "truncate":
            log.truncate(amount)
            rows = [row[:amount] for row in rows]
        elif rows[0]:
            chosen = [row % batch for row in amount]
            log.select_rows(torch.tensor(chosen))
            rows, batch = [list(rows[row]) for row in chosen], len(chosen)
        assert log.length == len(rows[0])
        assert log.batch == (batch if rows[0] else 0)
        assert account.current == account.by_owner["token ids"] == log.nbytes
        assert 8 * batch * log.length <= log.nbytes <= 8 * batch * (2 * longest + 128)
        known = torch.tensor(rows)
        if rows[0]:
            assert log.first_difference(known.masked_fill(known == TokenLog.UNKNOWN, 7)) is None
            for position in {0, len(rows[0]) // 2, len(rows[0]) - 1}:
                wrong = known.masked_fill(known == TokenLog.UNKNOWN, 7)
                wrong[-1, position] = 1
                found = None if rows[-1][position] == TokenLog.UNKNOWN else position
                assert log.first_difference(wrong) == found
    log.truncate(0)
    assert account.current == 0


def test_what_cannot_be_compared_is_no_difference() -> None:
    """An empty log, another batch, and the part beyond what either side has."""
    log = TokenLog(MemoryAccount())
    ids = torch.arange(6).reshape(2, 3)
    assert log.first_difference(ids) is None
    log.append(ids, 0)
    assert log.first_difference(ids[:1] + 1) is None
    assert log.first_difference(torch.cat([ids, ids], 1)) is None
    assert log.first_difference(ids[:, :2]) is None


def test_ids_are_copied() -> None:
    log = TokenLog(MemoryAccount())
    ids = torch.arange(6).reshape(2, 3)
    log.append(ids, 0)
    ids.zero_()
    assert log.first_difference(torch.arange(6).reshape(2, 3)) is None
