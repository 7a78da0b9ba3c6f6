"""Slots on a device against their twins: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import slots

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


@EACH_DEVICE
@pytest.mark.parametrize(
    ("rows", "units", "selected", "count", "by_use"),
    [
        (3, 40, 7, 7, False), (2, 100, 20, 33, False), (2, 300, 1, 4, False), (1, 5000, 512, 600, False),
        (1, 6000, 300, 4096, False), (2, 9, 5, 16, False),
        (3, 40, 7, 9, True), (2, 300, 1, 4, True), (1, 1500, 200, 260, True), (2, 9, 5, 16, True),
    ],
)  # fmt: skip
def test_slots_are_given_as_the_twin_gives_them(
    device: str, rows: int, units: int, selected: int, count: int, by_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses are divided by their weight in the second or third step of some rows."""
    kernel, made = kernels("slots_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    order = torch.arange(count, dtype=torch.int32).repeat(rows, 1)
    tables: list[Any] = [torch.full((rows, one), -1, dtype=torch.int32) for one in (units, count)]
    tables.append(torch.zeros(rows, units) if by_use else order)
    # rows of wider tables
    wider = [torch.cat([table, torch.full_like(table[:, :1], -5).repeat(1, 3)], 1).to(device) for table in tables]
    on_device = [table[:, :-3] for table in wider]
    if by_use:
        weight = torch.tensor([1.0, 5e19, 7e19], dtype=torch.float64)[-rows:].clone()
        tables[2:], on_device[2:] = [None, tables[2], weight], [None, on_device[2], weight.to(device).clone()]
    fill_what_is_empty(monkeypatch)
    drawn = min(units, 2 * selected + 1)
    for step in range(12 if by_use else 30):
        first = int(torch.randint(0, units - drawn + 1, (), generator=made)) if step % 3 else 0
        wanted = torch.stack([torch.randperm(drawn, generator=made)[:selected].sort().values for _ in range(rows)])
        wanted = (wanted + first).int()
        for row in range(1, rows):  # which has fewer units, or none
            wanted[row, max(0, selected - row - step % 4 * row) :] = -1
        expected = slots.exchange(wanted, *tables)
        found = kernel.exchange(wanted.to(device), *on_device)
        for one, other in zip((*found, *on_device), (*expected, *tables), strict=True):
            assert one is other is None or torch.equal(one.cpu(), other)
    assert all(bool((table[:, -3:] == -5).all()) for table in wider)
    assert int(expected[2][0].sum()) < rows * selected or units > 4 * count


@EACH_DEVICE
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(37, torch.uint8), (5940, torch.uint8), (264, torch.uint8), (7, torch.float32), (96, torch.bfloat16)],
)
@pytest.mark.parametrize("copied", [64, 16384])
def test_records_arrive_in_their_slots(
    device: str, width: int, dtype: torch.dtype, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("slots_triton", device, monkeypatch), torch.Generator().manual_seed(width)
    monkeypatch.setattr(kernel, "_PROGRAMS", 4)  # which have several rounds
    monkeypatch.setattr(kernel, "_COPIED", copied)
    rows, units, selected, count = 2, 11, 5, 8
    record = -(-width * dtype.itemsize // 512) * 512
    records = torch.randint(0, 256, (rows * units, record), dtype=torch.uint8, generator=made)
    records = records.pin_memory() if device == "cuda" else records
    places = torch.randperm(rows * units, generator=made).view(rows, units)
    absent = torch.stack([torch.randperm(units, generator=made)[:selected] for _ in range(rows)]).int()
    absent[0, 1], absent[1, ::2] = -1, -1
    into = torch.stack([torch.randperm(count, generator=made)[:selected] for _ in range(rows)]).int()
    addresses = records.data_ptr() + places * record
    data = torch.zeros(rows, count, width, dtype=dtype)
    expected = data.clone()
    slots.bring(addresses, absent, into, expected)
    found = data.to(device)
    wider = torch.cat([addresses, torch.zeros_like(addresses)], 1)
    kernel.bring(wider.to(device)[:, :units], absent.to(device), into.to(device), found)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    row = records[places[1, absent[1, 1]], : width * dtype.itemsize]
    assert torch.equal(expected[1, into[1, 1]].view(torch.uint8), row)


@EACH_DEVICE
@pytest.mark.parametrize(
    ("sizes", "dtype", "bits", "group", "each", "later", "moved"),
    [
        ((3, 64, 3, 64), torch.bfloat16, None, 15, 1, 31, 4096), ((8, 128, 8, 128), torch.bfloat16, 8, 4, 2, 32, 4096),
        ((2, 24, 2, 40), torch.float16, 8, 5, 3, 4, 256), ((1, 5, 2, 3), torch.float32, 8, 7, 1, 0, 64),
        ((2, 3, 1, 1), torch.float32, None, 3, 2, 9, 64), ((1, 130, 1, 0), torch.bfloat16, None, 4, 1, 70, 512),
        ((2, 24, 2, 40), torch.float16, None, 16, 1, 3, 1024), ((1, 7, 1, 9), torch.float64, None, 5, 2, 11, 128),
    ],
)  # fmt: skip
def test_what_leaves_a_tail_fills_records(
    device: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, bits: int | None, group: int, each: int,
    later: int, moved: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Byte for byte, and so does what stays and moves: more or fewer entries than a program moves at a time."""
    kernel, form = kernels("slots_triton", device, monkeypatch), RecordFormat(*sizes, dtype, group, bits)
    monkeypatch.setattr(kernel, "_SEALED", moved)
    rows, count = 2, each * group
    tail = torch.randn(rows, count + later + 2, form.entry_width, generator=torch.Generator().manual_seed(group))
    tail = tail.to(dtype)
    tail[:, count + later :] = torch.nan  # not defined yet
    if bits is None:
        tail[0, 0, 0], tail[1, count:, -1] = torch.nan, -torch.inf
    before, found = tail.clone(), tail.to(device, copy=True)
    records = torch.full((rows * each, form.record_bytes), 0xA5, dtype=torch.uint8)
    filled = records.to(device, copy=True)
    left = slots.seal(tail, count + later, records, form)
    fill_what_is_empty(monkeypatch)
    given = kernel.seal(found, count + later, filled, form), filled, found
    for one, other in zip(given, (left, records, tail), strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8)) and one.shape == other.shape
    stored = form.unpacked(form.payload(records)).reshape(left.shape)
    if bits is None:
        torch.testing.assert_close(stored, left, rtol=0, atol=0, equal_nan=True)
    assert not records[:, form.payload_bytes :].any()
    was = [before[:, :count], before[:, count : count + later]]
    torch.testing.assert_close([left, tail[:, :later]], was, rtol=0, atol=0, equal_nan=True)


SHAPES = {
    "smol": (2, 9, 3, 64, 64, 15),
    "llama": (1, 32, 8, 128, 128, 4),
    "odd": (2, 6, 2, 24, 40, 5),
    "wide": (1, 5, 1, 256, 256, 8),
    "many queries": (1, 20, 1, 40, 16, 16),
}
"""Sequences, query heads, key heads, channels of keys and of values, tokens of a record."""
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (2**-7, 1e-3)}
"""Relative and absolute; in bfloat16 the last bit."""


def attention(
    shape: str, dtype: torch.dtype, bits: int | None, apart: bool, selected: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RecordFormat]:
    """The first five arguments of `attend`, on the host."""
    (batch, heads, key_heads, key, value, group), made = SHAPES[shape], torch.Generator().manual_seed(selected)
    rows, own = (batch * key_heads, 1) if apart else (batch, key_heads)
    form, count = RecordFormat(own, key, own, value, dtype, group, bits), selected + 2
    entries = torch.randn(rows * count, group, form.entry_width, generator=made).to(dtype)
    data = torch.empty(rows * count, form.payload_width, dtype=form.payload_dtype)
    form.pack(entries, data)
    query = torch.randn(batch, heads, 2, key, generator=made).to(dtype)[:, :, 1]
    places = torch.stack([torch.randperm(count, generator=made)[:selected] for _ in range(rows)]).int()
    latest = torch.randn(rows, recent + 3, form.entry_width, generator=made).to(dtype)[:, 2 : recent + 2]
    return query, data.view(rows, count, -1), places, latest, form


@EACH_DEVICE
@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "apart", "selected", "recent", "programs"),
    [
        ("smol", torch.bfloat16, 8, False, 9, 70, 7),
        ("smol", torch.bfloat16, None, True, 3, 7, 264),
        ("llama", torch.bfloat16, None, True, 9, 7, 264),
        ("llama", torch.float16, 8, False, 1, 0, 264),
        ("odd", torch.float32, None, False, 23, 70, 7),
        ("odd", torch.float32, 8, True, 19, 7, 264),
        ("odd", torch.bfloat16, 8, True, 3, 5, 264),
        ("odd", torch.float16, None, False, 1, 0, 264),
        ("wide", torch.float32, None, False, 9, 3, 264),
        ("wide", torch.bfloat16, 8, False, 4, 0, 264),
        ("many queries", torch.float32, 8, True, 9, 70, 264),
        ("many queries", torch.float16, None, False, 5, 7, 1),
        ("smol", torch.float32, None, False, 0, 7, 264),
    ],
)
def test_one_softmax_over_slots_the_latest_and_an_estimate(
    device: str, shape: str, dtype: torch.dtype, bits: int | None, apart: bool, selected: int, recent: int,
    programs: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = kernels("slots_triton", device, monkeypatch)
    monkeypatch.setattr(kernels("ranking_triton", device, monkeypatch), "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TILE", 512 * (programs % 2))  # one part after the other is merged, or several
    *given, form = attention(shape, dtype, bits, apart, selected, recent)
    query, scaling, made = given[0], form.key_dim**-0.5, torch.Generator().manual_seed(1)
    value = torch.randn(*query.shape[:2], form.value_dim, generator=made)
    weight = torch.randn(query.shape[:2], generator=made) + 2
    expected = [slots.attend(*given, form, scaling, *more) for more in ((None, None), (value, weight))]
    fill_what_is_empty(monkeypatch)
    moved = [move(one, device) for one in given]
    rtol, atol = TOLERANCES[dtype]
    for more, (output, logarithm) in zip(((None, None), (value.to(device), weight.to(device))), expected, strict=True):
        found = kernel.attend(*moved, form, scaling, *more)
        assert found[0].dtype == dtype
        torch.testing.assert_close(found[0].cpu(), output, rtol=rtol, atol=atol)
        torch.testing.assert_close(found[1].cpu(), logarithm, rtol=min(rtol, 1e-3), atol=atol)
    assert (expected[1][1] > expected[0][1]).all()


@EACH_DEVICE
@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "apart", "selected", "recent", "programs"),
    [
        ("smol", torch.bfloat16, None, True, 9, 7, 264),
        ("llama", torch.float16, 8, False, 40, 0, 264),
        ("odd", torch.float32, None, False, 23, 70, 7),
        ("odd", torch.float32, 8, True, 60, 1, 264),
        ("wide", torch.float32, None, False, 9, 3, 264),
        ("many queries", torch.float16, None, True, 30, 7, 264),
    ],
)
def test_what_is_not_kept_is_not_attended_to(
    device: str, shape: str, dtype: torch.dtype, bits: int | None, apart: bool, selected: int, recent: int,
    programs: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Parts of tokens and complete parts, and slots of -1; what lies there may be NaN. And some of the latest ones."""
    kernel = kernels("slots_triton", device, monkeypatch)
    monkeypatch.setattr(kernels("ranking_triton", device, monkeypatch), "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TILE", 512)  # parts are merged one after the other
    query, data, places, latest, form = attention(shape, dtype, bits, apart, selected, recent)
    rows, made = len(places), torch.Generator().manual_seed(2)
    keep = torch.rand(rows, selected, form.group_size, generator=made) < 0.3
    keep[:, : selected // 2] = False  # the first parts have no key
    keep[0, -1], places[-1, selected * 2 // 3 :] = True, -1
    keep[-1, selected // 2] = True
    if bits is None:
        counts = torch.zeros(rows, data.shape[1] + 1, form.group_size, dtype=torch.bool)
        counts.scatter_(1, places.long().remainder(data.shape[1] + 1)[..., None].expand_as(keep), keep)
        data.view(rows, -1, form.group_size, form.entry_width)[~counts[:, :-1]] = torch.nan
    value = torch.randn(*query.shape[:2], form.value_dim, generator=made)
    weight = torch.randn(query.shape[:2], generator=made)
    given = query, data, places, latest
    wider = torch.rand(rows, recent + 2, generator=made) < 0.5
    seen = [None, wider[:, :-2]]
    rests = ((None, None), (value, weight))
    expected = [
        slots.attend(*given, form, form.key_dim**-0.5, *rest, keep, one) for rest, one in zip(rests, seen, strict=True)
    ]
    fill_what_is_empty(monkeypatch)
    moved = [move(one, device) for one in given]
    rtol, atol = TOLERANCES[dtype]
    for rest, one, (output, logarithm) in zip(rests, seen, expected, strict=True):
        there = [None if part is None else part.to(device) for part in rest]
        masks = keep.to(device), None if one is None else wider.to(device)[:, :-2]
        found = kernel.attend(*moved, form, form.key_dim**-0.5, *there, *masks)
        assert output.isfinite().all()
        torch.testing.assert_close(found[0].cpu(), output, rtol=rtol, atol=atol)
        torch.testing.assert_close(found[1].cpu(), logarithm, rtol=min(rtol, 1e-3), atol=atol)


@EACH_DEVICE
@pytest.mark.parametrize("count", [0, 1, 33, 70])
@pytest.mark.parametrize("programs", [7, 264])
def test_latest_entries_that_do_not_exist_do_not_count(
    device: str, count: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels("slots_triton", device, monkeypatch)
    monkeypatch.setattr(kernels("ranking_triton", device, monkeypatch), "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TILE", 512)
    *given, form = attention("odd", torch.float32, 8, False, 9, 70)
    expected = slots.attend(*given[:3], given[3][:, :count], form, 0.2, None, None)
    given[3][:, count:] = torch.nan
    counted = torch.tensor(count).to(device)
    fill_what_is_empty(monkeypatch)
    found = kernel.attend(*[move(one, device) for one in given], form, 0.2, None, None, count=counted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@EACH_DEVICE
def test_an_estimate_of_no_weight_adds_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("slots_triton", device, monkeypatch)
    *given, form = attention("odd", torch.float32, None, False, 4, 3)
    value = torch.ones(2, 6, 40, device=device)
    moved = [one.to(device) for one in given]
    with_it = kernel.attend(*moved, form, 0.2, value, torch.full((2, 6), -torch.inf, device=device))
    without = kernel.attend(*moved, form, 0.2, None, None)
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))


@EACH_DEVICE
def test_counters_are_zero_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("slots_triton", device, monkeypatch)
    *given, form = attention("odd", torch.float32, None, True, 30, 3)
    kernel.attend(*[one.to(device) for one in given], form, 0.2, None, None)
    counts = kernel.counters(given[0].to(device).device, 4)
    assert counts.tolist() == [0] * 4 and kernel.counters(counts.device, 4) is counts


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("slots_triton", device, monkeypatch)
    *given, form = attention("odd", torch.bfloat16, 8, False, 4, 3)
    query, data, places, recent = (one.to(device) for one in given)
    tables = [places.new_full((2, 50), -1), places.new_full((2, 6), -1), places.new_zeros(2, 6)]
    addresses = torch.zeros(2, 50, dtype=torch.int64, device=device)
    keep = torch.ones(2, 4, form.group_size, dtype=torch.bool, device=device)
    value, weight = torch.ones(2, 6, 40, device=device), torch.ones(2, 6, device=device)
    entries = torch.zeros(2, 24, 3, device=device)
    held = torch.zeros_like(tables[0]), entries.view(2, 6, 12), entries[:, :2]
    kernel.counters(query.device, 4)
    with Launches(kernel, monkeypatch) as launches:
        kernel.exchange(places, *tables)
        assert (launches.count, launches.others) == (1, [])
        kernel.bring(addresses, places, places, data)
        assert (launches.count, launches.others) == (2, [])
        kernel.attend(query, data, places, recent, form, 0.2, value, weight)
        kernel.attend(query, data, places, recent, form, 0.2, None, None, keep)
        assert (launches.count, launches.others) == (4, [])
        for sealed in (form, replace(form, bits=None)):
            records = torch.empty(4, sealed.record_bytes, dtype=torch.uint8, device=device)
            kernel.seal(torch.empty(2, 20, form.entry_width, dtype=form.dtype, device=device), 15, records, sealed)
        assert (launches.count, launches.others) == (6, [])
        kernel.units_at(places, 200, 4, places.shape[1])
        kernel.tokens_at(places, *held, 200, 4, None)
        assert (launches.count, launches.others) == (8, [])


@EACH_DEVICE
@pytest.mark.parametrize(
    ("rows", "units", "group", "count", "width", "dtype", "hides"),
    [
        (2, 40, 3, 17, 37, torch.bfloat16, None), (1, 60, 4, 45, 8, torch.float32, torch.float32),
        (3, 9, 1, 12, 72, torch.float16, torch.bool), (2, 3, 4, 5, 576, torch.bfloat16, torch.bfloat16),
    ],
)  # fmt: skip
def test_tokens_are_read_out_of_slots_as_the_twin_reads_them(
    device: str, rows: int, units: int, group: int, count: int, width: int, dtype: torch.dtype,
    hides: torch.dtype | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel, made = kernels("slots_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    monkeypatch.setattr(kernel, "_UNITS", 16)
    fill_what_is_empty(monkeypatch)
    stored, late = units * group, 3
    places = torch.stack([torch.randperm(stored + late, generator=made)[:count] for _ in range(rows)])
    places[-1, ::4] = -1
    if rows > 1:
        places = places.int()
    wider = torch.cat([places, places], 1)[:, :count]  # rows of a wider tensor
    selected = min(count, units + 1)
    expected = slots.units_at(places, stored, group, selected)
    assert torch.equal(kernel.units_at(wider.to(device), stored, group, selected).cpu(), expected)
    slot_of = torch.stack([torch.randperm(units + 2, generator=made) for _ in range(rows)]).int()[:, :units]
    data = torch.randn(rows, units + 2, group * width, generator=made).to(dtype)
    recent = torch.randn(rows, late + 2, width + 5, generator=made).to(dtype)[:, 1 : late + 1, :width]
    mask = None if hides is None else torch.randn(1, stored + late, generator=made).to(hides)
    if hides == torch.bool:
        mask = torch.rand(rows, stored + late, generator=made) > 0.5
    given = places, slot_of, data, recent, stored, group, mask
    found = kernel.tokens_at(*(move(one, device) if isinstance(one, torch.Tensor) else one for one in given))
    for one, other in zip(found, slots.tokens_at(*given), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other)
