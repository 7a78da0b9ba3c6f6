"""Attention over a low-bit copy, and reads of entries, against twins: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from low_bits import states
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import mixed_attention
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import LowBitCopy, LowBitForm
from hf_offload_cache.stores import MemoryStore

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (2**-7, 1e-3)}
"""Relative and absolute; in bfloat16 the last bit."""


class Shape(NamedTuple):
    heads: int
    dims: tuple[int, int]
    group: int
    queries: int = 2
    guesses: int = 1


SHAPES = {
    "smol": Shape(6, (64, 64), 64), "odd": Shape(6, (24, 40), 32), "two parts": Shape(4, (48, 128), 64),
    "no guess": Shape(2, (7, 3), 64, 1, 0), "three parts": Shape(2, (128, 96), 32, 3, 2),
    "many queries": Shape(70, (16, 16), 64),
}  # fmt: skip
"""Of two key heads."""


def given(shape: Shape, dtype: torch.dtype, bits: int, tokens: int, chosen: int, mask: str) -> list[Any]:
    """The arguments of `attend` without the last four, on the host, as views of larger tensors."""
    heads, dims, group, queries, guesses = shape
    entry = RecordFormat(2, dims[0], 2, dims[1], dtype, 4)
    form, made, latest = LowBitForm(entry, bits, group), torch.Generator().manual_seed(tokens), 73
    copy = LowBitCopy(form, 2, torch.device("cpu"), MemoryAccount(), tokens + 3 * group)
    keys, values = states(tokens + latest + guesses, entry)
    copy.append([(keys[:, :, :tokens], values[:, :, :tokens])], tokens)
    query = torch.randn(2, queries, heads, dims[0], generator=made).to(dtype).transpose(1, 2)
    places = [torch.randperm(max(1, tokens), generator=made)[: chosen if tokens else 0] for _ in range(4)]
    chosen_tokens = torch.stack(places).view(2, 2, -1)
    chosen_tokens[0, 1, 3:5] = -1
    at = chosen_tokens.clamp(min=0)[..., None]
    own = [part.gather(2, at.expand(-1, -1, -1, part.shape[3])) for part in (keys, values)]
    parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (keys, values)]
    recent = [part[:, :, tokens : tokens + latest] for part in parts]
    guess = [part[:, :, tokens + latest :] if guesses else None for part in parts]
    columns, hides = tokens + latest + guesses, None
    if mask != "none":
        hides = torch.ones(2, 1, queries + 1, columns, dtype=torch.bool).tril(columns - queries - 1)[:, :, 1:]
        hides[1, ..., : tokens // 2 + 7] = False
        hides[1, :, 0] = False  # which sees nothing
    if mask == "additive":
        bias = torch.randn(2, 1, queries, columns, generator=made)
        hides = bias.masked_fill(~hides, torch.finfo(torch.float32).min)[:1]
    return [query, copy.keys, copy.values, bits, chosen_tokens, *own, *recent, *guess, hides]


CASES = [
    ("smol", torch.bfloat16, 2, 320, 20, "none", None, False),
    ("smol", torch.float32, 4, 64, 20, "boolean", None, True),
    ("odd", torch.float32, 1, 608, 70, "none", None, False),
    ("odd", torch.float16, 2, 320, 20, "additive", None, False),
    ("odd", torch.float32, 2, 352, 150, "boolean", 20.0, True),
    ("two parts", torch.float32, 2, 320, 20, "none", None, False),
    ("two parts", torch.bfloat16, 4, 0, 0, "boolean", None, False),
    ("no guess", torch.float32, 1, 192, 5, "none", None, True),
    ("no guess", torch.float32, 2, 0, 0, "none", None, False),
    ("three parts", torch.float32, 4, 320, 33, "additive", 5.0, False),
    ("three parts", torch.float32, 2, 96, 9, "none", None, True),
    ("many queries", torch.float32, 2, 192, 9, "boolean", None, True),
]


@EACH_DEVICE
@pytest.mark.parametrize(("shape", "dtype", "bits", "tokens", "chosen", "mask", "softcap", "sinks"), CASES)
@pytest.mark.parametrize("programs", [1, 528], ids=["many groups each", "few each"])
def test_one_softmax_over_a_copy_and_stored_entries(
    device: str, shape: str, dtype: torch.dtype, bits: int, tokens: int, chosen: int, mask: str, softcap: float | None,
    sinks: bool, programs: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = kernels("mixed_attention_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    arguments = given(SHAPES[shape], dtype, bits, tokens, chosen, mask)
    sink = torch.randn(SHAPES[shape].heads, generator=torch.Generator().manual_seed(9)) + 2 if sinks else None
    moved = [move(one, device) if isinstance(one, torch.Tensor) else one for one in arguments]
    output, scores, logarithm = mixed_attention.attend(*arguments, sink, 0.2, softcap, True)
    fill_what_is_empty(monkeypatch)
    found = kernel.attend(*moved, None if sink is None else sink.to(device), 0.2, softcap, True)
    rtol, atol = TOLERANCES[dtype]
    assert found[0].dtype == dtype and bool(found[0].isfinite().all()) and scores is not None
    torch.testing.assert_close(found[0].cpu(), output, rtol=rtol, atol=atol)
    torch.testing.assert_close(found[2].cpu(), logarithm, rtol=min(rtol, 1e-3), atol=atol)
    torch.testing.assert_close(found[1].cpu(), scores, rtol=min(rtol, 1e-3), atol=max(atol, 1e-4))
    if mask == "boolean" and not sinks:
        assert bool((output[1, 0] == 0).all()) and bool((logarithm[1] == 0).any())
    again = kernel.attend(*moved, None if sink is None else sink.to(device), 0.2, softcap, False)
    assert torch.equal(again[0], found[0]) and again[1] is None and torch.equal(again[2], found[2])
    assert not bool(kernel.counters(moved[0].device, 4).any())


@EACH_DEVICE
@pytest.mark.parametrize(("shape", "tokens", "latest"), [("smol", 64, 1), ("odd", 96, 40), ("no guess", 192, 73)])
@pytest.mark.parametrize("programs", [1, 528], ids=["many groups each", "few each"])
def test_tokens_that_do_not_exist_do_not_count(
    device: str, shape: str, tokens: int, latest: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the copy and of the latest ones: what their memory contains does not matter."""
    kernel = kernels("mixed_attention_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    query, keys, values, bits, chosen, *parts, _ = given(SHAPES[shape], torch.float32, 2, 320, 9, "none")
    chosen = torch.where(chosen < tokens, chosen, -1)
    entries, recent, guesses = parts[:2], parts[2:4], parts[4:]
    group = SHAPES[shape].group
    alone = keys[:, :, : tokens // group], values[:, :, :, :tokens]
    near = [part[:, :, :latest] for part in recent]
    more = None, None, 0.2, 5.0, True
    expected = mixed_attention.attend(query, *alone, bits, chosen, *entries, *near, *guesses, *more)
    keys, values = keys.clone(), values.clone()
    keys[:, :, tokens // group :], values[:, :, :, tokens:] = 255, 255  # half precision's NaN, too
    for part in recent:
        part[:, :, latest:] = torch.nan
    numbers = torch.tensor(tokens), torch.tensor(latest)
    arguments = [query, keys, values, bits, chosen, *entries, *recent, *guesses, *more, *numbers]
    twin = mixed_attention.attend(*arguments)
    fill_what_is_empty(monkeypatch)
    found = kernel.attend(*[move(one, device) if isinstance(one, torch.Tensor) else one for one in arguments])
    queries, held = SHAPES[shape].queries, chosen.masked_fill(chosen < 0, -1)
    shared = queries, 0, queries, held, 4.0, 2, None
    for one in (twin, found):
        output, scores, logarithm = (part.cpu() for part in one)
        torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logarithm, expected[2], rtol=1e-5, atol=1e-5)
        assert expected[1] is not None
        torch.testing.assert_close(scores[..., :tokens], expected[1], rtol=1e-4, atol=1e-4)
    importance = mixed_attention.share(expected[1], expected[2], *shared)
    of_twin = mixed_attention.share(twin[1], twin[2], *shared, numbers[0])
    scores, logarithm = found[1], found[2]
    of_kernel = kernel.share(
        scores, logarithm, queries, 0, queries, held.to(device), 4.0, 2, None, numbers[0].to(device)
    ).cpu()
    for one in (of_twin, of_kernel):
        torch.testing.assert_close(one[:, :tokens], importance, rtol=1e-4, atol=1e-5)
        assert (one[:, tokens:] == -torch.inf).all()


@EACH_DEVICE
@pytest.mark.parametrize(
    ("tokens", "queries", "first", "stop", "held", "sinks", "padded"),
    [
        (320, 2, 0, 2, 20, 4, False), (1500, 2, 0, 2, 150, 4, True), (129, 3, 1, 2, 0, 2, False),
        (1030, 4, 1, 4, 7, 0, True), (3, 1, 0, 1, 2, 5, True),
    ],
)  # fmt: skip
def test_shares_of_a_copy(
    device: str, tokens: int, queries: int, first: int, stop: int, held: int, sinks: int, padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel, made = kernels("mixed_attention_triton", device, monkeypatch), torch.Generator().manual_seed(tokens)
    scores = torch.randn(2, 3, 2 * queries, tokens, generator=made)
    scores[0, :, :, : tokens // 3] = -torch.inf
    logarithm = scores.logsumexp(3) + 0.5
    logarithm[1, 2, first] = torch.nan  # as of a query that has one
    resident = torch.stack([torch.randperm(tokens, generator=made)[:held] for _ in range(6)]).view(2, 3, -1)
    resident[1, 0, :1] = -1
    begin = torch.tensor([tokens // 3, tokens - 1]) if padded else None
    numbers, more = (queries, first, stop), (4.0, sinks)
    expected = mixed_attention.share(scores, logarithm, *numbers, resident if held else None, *more, begin)
    fill_what_is_empty(monkeypatch)
    moved = [None if one is None else one.to(device) for one in (resident if held else None, begin)]
    found = kernel.share(scores.to(device), logarithm.to(device), *numbers, moved[0], *more, moved[1])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    finite = expected.masked_fill(expected.isinf(), 0)
    assert not finite[5].any() and finite[3:5].any(1).all()
    infinite = 3 * (min(sinks, tokens - tokens // 3) + (sinks > 0)) if padded else 6 * sinks
    assert int(expected.isinf().sum()) == infinite


@EACH_DEVICE
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_gets_its_tokens(
    device: str, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels("mixed_attention_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "_READERS", 2)  # which have several rounds
    made = torch.Generator().manual_seed(0)
    rows, heads, units, group, count = 3, 2, 9, 32, 13
    form = RecordFormat(heads, dims[0], heads, dims[1], dtype, group)
    store = MemoryStore(form.record_bytes, "layer 3", pinned=device == "cuda")
    store._chunk_records = 4
    entries = torch.randn(rows * units, group, form.entry_width, generator=made).to(dtype)
    records = torch.zeros(rows * units, form.record_bytes, dtype=torch.uint8)
    form.payload(records).copy_(entries.flatten(1))
    ids = store.allocate(rows * units)[torch.randperm(rows * units, generator=made).numpy()]
    store.write(ids, records)
    if device == "cuda":
        addresses = store.addresses(ids)
        assert addresses is not None
    else:
        assert store.addresses(ids) is None
        chunk, row = np.divmod(ids, 4)
        addresses = np.array([one.data_ptr() for one in store._chunks])[chunk] + row * form.record_bytes
    tokens = torch.randint(-1, units * group, (rows, heads, count), generator=made)
    where = torch.from_numpy(addresses).view(rows, units)
    found, twins = (
        [torch.full((rows, heads, count, dim), 7.0, dtype=dtype, device=place) for dim in dims]
        for place in (device, "cpu")
    )  # fmt: skip
    kernel.bring(where.to(device), tokens.to(device), form, *found)
    mixed_attention.bring(where, tokens, form, *twins)
    every = form.split(entries.view(rows, units * group, form.entry_width))
    at = tokens.clamp(min=0)[..., None]
    for own, twin, part in zip(found, twins, every, strict=True):
        expected = part.gather(2, at.expand(-1, -1, -1, part.shape[3])).masked_fill(tokens[..., None] < 0, 7)
        assert torch.equal(own.cpu(), expected) and torch.equal(twin, expected)
    store.close()


@EACH_DEVICE
@pytest.mark.parametrize(
    ("count", "most", "dtype"), [(5, 5, torch.int32), (68, 60, torch.int64), (256, 256, torch.int32)]
)
def test_tokens_are_exchanged_as_the_twin_exchanges_them(
    device: str, count: int, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("mixed_attention_triton", device, monkeypatch), torch.Generator().manual_seed(count)
    tokens = torch.full((2, 3, count), -1)
    on_device = tokens.clone().to(device)
    fill_what_is_empty(monkeypatch)
    for step in range(5):
        wanted = torch.stack([torch.randperm(2 * count, generator=made)[:most] for _ in range(6)]).view(2, 3, most)
        wanted[0, 1, torch.randperm(most, generator=made)[: step * most // 5]] = -1
        before, wanted = tokens.clone(), wanted.to(dtype)
        new, counts = mixed_attention.exchange(tokens, wanted)
        found = kernel.exchange(on_device, wanted.to(device))
        for own, twin in zip((*found, on_device), (new, counts, tokens), strict=True):
            assert torch.equal(own.cpu(), twin)
        same = (before[..., None] == wanted[:, :, None]) & (before >= 0)[..., None]
        stays = same.any(3)
        assert torch.equal(tokens[stays], before[stays]) and bool((new[stays] == -1).all())
        assert torch.equal(new[~stays], tokens[~stays]) and torch.equal(counts, (new >= 0).sum(2))
        held = [sorted(row[row >= 0].tolist()) for row in tokens.flatten(0, 1)]
        assert held == [sorted(row[row >= 0].tolist()) for row in wanted.flatten(0, 1)]
    assert int(counts.sum()) < 6 * most


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("mixed_attention_triton", device, monkeypatch)
    arguments = given(SHAPES["odd"], torch.bfloat16, 2, 320, 20, "boolean")
    moved = [move(one, device) if isinstance(one, torch.Tensor) else one for one in arguments]
    scores, sums = torch.ones(2, 2, 6, 320, device=device), torch.ones(2, 2, 6, device=device)
    kernel.counters(moved[0].device, 4)
    tokens, addresses = torch.full((2, 3, 5), -1, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    form = RecordFormat(3, 8, 3, 4, torch.float32, 4)
    keys, values = (torch.zeros(2, 3, 5, dim, device=device) for dim in (8, 4))
    with Launches(kernel, monkeypatch) as launches:
        for mask in (moved[-1], None):
            kernel.attend(*moved[:-1], mask, sums[0, 0], 0.2, 5.0, True)
        assert (launches.count, launches.others) == (2, [])
        kernel.share(scores, sums, 2, 0, 2, moved[4], 4.0, 2, None)
        assert (launches.count, launches.others) == (3, [])
        kernel.exchange(tokens, tokens)
        assert (launches.count, launches.others) == (4, [])
        kernel.bring(addresses, tokens, form, keys, values)
        assert (launches.count, launches.others) == (5, [])
