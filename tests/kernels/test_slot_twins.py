"""The twins of the kernels that keep records in slots: against the processor's table, and against plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload_cache.fetch import MostUsed, SlotTable
from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels.slots import attend, bring, exchange, tokens_at, units_at
from hf_offload_cache.stores import MemoryStore


class AllGetSlots(MostUsed):
    """`MostUsed` that gives a slot to each record that a step selects, and the first slot to the first of them: which
    slot decides between records of equal use."""

    def _worth(self, records: np.ndarray) -> np.ndarray:
        worth = super()._worth(records)
        worth[self._record_in.size :] = np.inf
        return worth

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        taken, slots = super().place(records, in_use, wanted=wanted)
        self._record_in[np.sort(slots)] = records[np.sort(taken)]
        return np.sort(taken), np.sort(slots)


@pytest.mark.parametrize("by_use", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_slots_are_exchanged_as_the_processors_table_does(by_use: bool, data: st.DataObject) -> None:
    """A row is a table: the same units are in the same slots after any sequence of steps. Uses and their weights are
    equal bit by bit, also after they were divided. Rows with fewer units than others end in -1, which are in no slot.
    """
    units, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    most = data.draw(st.integers(1, units))
    count = data.draw(st.integers(most, units + 5))
    slot_of = torch.full((rows, units), -1, dtype=torch.int32)
    unit_in, order = torch.full((rows, count), -1, dtype=torch.int32), torch.arange(count).int().repeat(rows, 1)
    tables, given = [SlotTable(count) for _ in range(rows)], (order, None, None)
    uses, weight = torch.zeros(rows, units), torch.full((rows,), data.draw(st.sampled_from([1.0, 6e19])))
    if by_use:
        weight = weight.double()
        tables, given = [SlotTable(count, AllGetSlots) for _ in range(rows)], (None, uses, weight)
        for table in tables:
            table._policy._one = float(weight[0])  # type: ignore[attr-defined]
    for _ in range(data.draw(st.integers(1, 8))):
        width = data.draw(st.integers(1, most))
        chosen = [sorted(data.draw(st.sets(st.integers(0, units - 1), max_size=width))) for _ in tables]
        padded = torch.full((rows, width + data.draw(st.integers(0, 3))), -1, dtype=torch.int32)
        for row, one in zip(padded, chosen, strict=True):
            row[: len(one)] = torch.tensor(one)
        slots, absent, counts = exchange(padded, slot_of, unit_in, *given)
        for row, table in enumerate(tables):
            wanted = np.array(chosen[row], dtype=np.int64)
            before, end = table.locate(wanted), len(wanted)
            table.used(before[before >= 0])
            table.insert(wanted[before < 0], before[before >= 0])
            now = table.locate(np.arange(units))
            assert slots[row, :end].tolist() == slot_of[row, wanted].tolist()
            assert absent[row, :end].tolist() == np.where(before < 0, wanted, -1).tolist()
            assert (slots[row, end:] == -1).all() and (absent[row, end:] == -1).all()
            assert counts[:, row].tolist() == [(before < 0).sum(), (before >= 0).sum()]
            assert slot_of[row].tolist() == now.tolist()
            if by_use:
                policy: Any = table._policy
                ours = np.zeros(units, dtype=np.float32)
                ours[: min(64, units)] = policy._uses[:units]
                assert np.array_equal(uses[row], ours) and float(weight[row]) == policy._one
            full = (unit_in[row] >= 0).nonzero()[:, 0]
            assert slot_of[row][unit_in[row][full].long()].tolist() == full.tolist()
            assert sorted(order[row].tolist()) == list(range(count))


def form_of(bits: int | None, dtype: torch.dtype = torch.float32) -> RecordFormat:
    return RecordFormat(2, 24, 2, 40, dtype, 5, bits)


@pytest.mark.parametrize("bits", [None, 8])
def test_absent_records_are_read_into_their_slots_and_others_stay(bits: int | None) -> None:
    form, random = form_of(bits), torch.Generator().manual_seed(0)
    store = MemoryStore(form.record_bytes, "layer 0")
    store._chunk_records = 4
    records = torch.randint(256, (12, form.record_bytes), generator=random).to(torch.uint8)
    ids = store.allocate(12)[torch.randperm(12, generator=random).numpy()]
    store.write(ids, records)
    chunk, row = np.divmod(ids, 4)
    begins = np.array([one.data_ptr() for one in store._chunks])[chunk] + row * form.record_bytes
    data = torch.zeros(2, 5, form.payload_width, dtype=form.payload_dtype)
    absent, slots = torch.tensor([[3, -1, 5], [-1, 0, -1]]).int(), torch.tensor([[4, 1, 0], [2, 3, 1]]).int()
    bring(torch.from_numpy(begins).view(2, 6), absent, slots, data)
    payloads = form.payload(records).view(torch.uint8)
    expected = torch.zeros_like(data).view(torch.uint8)
    expected[0, 4], expected[0, 0], expected[1, 3] = payloads[3], payloads[5], payloads[6]
    assert torch.equal(data.view(torch.uint8), expected)
    store.close()


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("estimated", [False, True])
def test_attention_is_one_softmax_over_slots_latest_entries_and_the_estimate(
    bits: int | None, apart: bool, estimated: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    heads, key_heads, rows = 6, 2, 4 if apart else 2
    form = RecordFormat(1 if apart else 2, 24, 1 if apart else 2, 40, torch.float32, 5, bits)
    query = torch.randn(2, heads, 24, generator=random)
    query = torch.cat([query, query], 1)[:, :heads]  # as of a model that projects queries, keys and values together
    entries = torch.randn(rows * 7, 5, form.entry_width, generator=random)
    data = torch.zeros(rows * 7, form.payload_width, dtype=form.payload_dtype)
    form.pack(entries, data)
    entries = form.unpacked(data).view(rows, 7, 5, -1)
    slots = torch.stack([torch.randperm(7, generator=random)[:3] for _ in range(rows)]).int()
    recent = torch.randn(rows, 9, form.entry_width, generator=random)[:, 2:]
    value, weight = torch.randn(2, heads, 40, generator=random), torch.randn(2, heads, generator=random)
    rest = (value, weight) if estimated else (None, None)
    output, logarithm = attend(query, data.view(rows, 7, -1), slots, recent, form, 0.2, *rest)
    room = torch.cat([recent, torch.full((rows, 5, form.entry_width), torch.nan)], 1)
    counted = attend(query, data.view(rows, 7, -1), slots, room, form, 0.2, *rest, count=torch.tensor(7))
    for one, other in zip(counted, (output, logarithm), strict=True):
        torch.testing.assert_close(one, other)
    for sequence in range(2):
        for head in range(heads):
            of_keys = head // (heads // key_heads)
            row, at = (sequence * 2 + of_keys, 0) if apart else (sequence, of_keys)
            held = torch.cat([entries[row, slots[row].long()].flatten(0, 1), recent[row]])
            keys, values = (part[0, at] for part in form.split(held[None]))
            scores = keys @ query[sequence, head] * 0.2
            if estimated:
                scores = torch.cat([scores, weight[sequence, head][None]])
                values = torch.cat([values, value[sequence, head][None]])
            torch.testing.assert_close(output[sequence, head], scores.softmax(0) @ values)
            torch.testing.assert_close(logarithm[sequence, head], scores.logsumexp(0))


@pytest.mark.parametrize("estimated", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_entries_that_a_choice_does_not_keep_do_not_count_whatever_they_are(estimated: bool, kept: bool) -> None:
    """Nor do slots of -1: attention equals that to the other entries alone, in a row with nothing in slots too."""
    random = torch.Generator().manual_seed(0)
    form = RecordFormat(2, 24, 2, 40, torch.float32, 5)
    query = torch.randn(2, 6, 24, generator=random)
    data = torch.randn(2, 7, form.payload_width, generator=random)
    slots = torch.tensor([[3, 0, 6], [2, -1, -1]]).int()
    keep = torch.rand(2, 3, 5, generator=random) < 0.4 if kept else torch.ones(2, 3, 5, dtype=torch.bool)
    keep[0, 1] = not kept
    recent = torch.randn(2, 4, form.entry_width, generator=random)
    value, weight = torch.randn(2, 6, 40, generator=random), torch.randn(2, 6, generator=random)
    rest = (value, weight) if estimated else (None, None)
    entries = data.view(2, 7, 5, -1)
    alone = [
        [entries[0, 3][keep[0, 0]], entries[0, 0][keep[0, 1]], entries[0, 6][keep[0, 2]]], [entries[1, 2][keep[1, 0]]]
    ]
    counted = torch.zeros(2, 7, 5, dtype=torch.bool)
    for row, at in ((0, 0), (0, 1), (0, 2), (1, 0)):
        counted[row, slots[row, at]] = keep[row, at]
    entries[~counted] = torch.nan
    given = query, data, slots, recent, form, 0.2, *rest
    output, logarithm = attend(*given, keep) if kept else attend(*given)
    for row in range(2):
        own = torch.cat([*alone[row], recent[row]])[None, None]
        every = torch.zeros(1, 1, dtype=torch.int32)
        form_of_all = RecordFormat(2, 24, 2, 40, torch.float32, own.shape[2])
        more = [None if one is None else one[row : row + 1] for one in rest]
        expected = attend(
            query[row : row + 1], own.flatten(2), every, recent[row : row + 1, :0], form_of_all, 0.2, *more
        )  # fmt: skip
        torch.testing.assert_close(output[row], expected[0][0])
        torch.testing.assert_close(logarithm[row], expected[1][0])


def test_latest_entries_that_are_not_seen_do_not_count() -> None:
    """Attention equals that to the others alone."""
    random = torch.Generator().manual_seed(0)
    form = RecordFormat(2, 24, 2, 40, torch.float32, 5)
    query = torch.randn(2, 6, 24, generator=random)
    data, slots = torch.randn(2, 7, form.payload_width, generator=random), torch.tensor([[3, 0], [2, -1]]).int()
    recent = torch.randn(2, 8, form.entry_width, generator=random)
    seen = torch.tensor([[1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1, 1]]).bool()
    output, logarithm = attend(query, data, slots, recent, form, 0.2, None, None, None, seen)
    for row in range(2):
        some = slice(row, row + 1)
        expected = attend(query[some], data[some], slots[some], recent[some, seen[row]], form, 0.2, None, None)
        torch.testing.assert_close(output[some], expected[0])
        torch.testing.assert_close(logarithm[some], expected[1])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_are_found_in_the_slots_of_their_units(data: st.DataObject) -> None:
    """Each entry has its row and position in it. Of unsealed tokens it is among the latest ones."""
    rows, group, units, late = (data.draw(st.integers(1, most)) for most in (3, 4, 9, 5))
    stored, total, count = units * group, units * group + late, data.draw(st.integers(1, units * group + late))
    chosen = [data.draw(st.permutations(range(total)))[:count] for _ in range(rows)]
    places = torch.tensor(chosen, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    places[:, data.draw(st.integers(0, count)) :] = -1
    width = data.draw(st.integers(min(count, units), count))
    found = units_at(places, stored, group, width)
    for row, one in zip(found.tolist(), places, strict=True):
        expected = sorted({int(token) // group for token in one if 0 <= token < stored})
        assert row == (expected + [-1] * width)[:width]
    named = torch.stack([torch.arange(rows)[:, None].expand(-1, total), torch.arange(total).expand(rows, -1)], 2)
    slot_of = torch.stack([torch.randperm(units + 3)[:units] for _ in range(rows)]).int()
    slots = torch.full((rows, units + 3, 2 * group), -7)
    slots.scatter_(1, slot_of.long()[..., None].expand(-1, -1, 2 * group), named[:, :stored].reshape(rows, units, -1))
    mask = data.draw(st.sampled_from([None, torch.arange(total)[None] % 3 == 0, -torch.rand(rows, total)]))
    entries, seen = tokens_at(places, slot_of, slots, named[:, stored:], stored, group, mask)
    there = places >= 0
    assert torch.equal(entries[there], named.gather(1, places.clamp(min=0).long()[..., None].expand(-1, -1, 2))[there])
    assert not entries[~there].any()
    if mask is None or mask.dtype == torch.bool:
        expected = there if mask is None else there & (places % 3 == 0)
    else:
        kept = mask.gather(1, places.clamp(min=0).long())
        expected = torch.where(there, kept, torch.finfo(mask.dtype).min)
    assert torch.equal(seen, expected)
