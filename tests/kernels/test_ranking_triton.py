"""Steps of a choice on a device against their twins: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.kernels import ranking
from hf_offload_cache.kernels.ranking import HIDDEN


@dataclass(frozen=True)
class Shape:
    """Sequences, query heads, key heads, channels of keys and of values, components, tokens of a unit, and units."""

    batch: int
    heads: int
    key_heads: int
    key: int
    value: int
    counts: tuple[int, int, int]
    group: int
    units: int
    inputs: int = 5
    """Components that a map reads."""

    @property
    def rank(self) -> int:
        return sum(self.counts)


SHAPES = {
    "smol": Shape(2, 9, 3, 64, 64, (8, 16, 40), 15, 70, inputs=30),
    "llama": Shape(1, 32, 8, 128, 128, (20, 0, 44), 4, 65, inputs=64),
    "odd": Shape(2, 6, 2, 24, 40, (0, 34, 0), 5, 80, inputs=33),
    "wide": Shape(1, 5, 1, 256, 256, (40, 60, 100), 8, 1, inputs=45),
    "many heads": Shape(1, 70, 2, 16, 20, (3, 2, 4), 16, 17),
}
EACH_SHAPE = pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


class Inputs:
    """Random inputs of all steps, on the host."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.made = shape, torch.Generator().manual_seed(seed)
        self.low = self.normal(shape.batch, shape.heads, shape.rank).mul_(0.01).bfloat16()
        self.constant = self.normal(shape.batch, shape.heads)
        self.offsets = self.normal(shape.rank)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.made)

    def integers(self, *sizes: int) -> torch.Tensor:
        return torch.randint(-128, 128, sizes, dtype=torch.int8, generator=self.made)

    def codes(self, capacity: int | None = None) -> torch.Tensor:
        shape = self.shape
        lines = (shape.counts[0] + shape.counts[1] // 2 + shape.counts[2] // 4) * shape.group
        codes = self.integers(shape.batch, lines, capacity or shape.units).view(torch.uint8)
        return codes[..., : shape.units]


def on(device: str, *given: Any) -> list[Any]:
    """`given`, its tensors on `device` with the strides that they have."""
    return [move(one, device) if isinstance(one, torch.Tensor) else one for one in given]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 37), (2, 0), (0, 0)])
def test_queries_and_exact_scores(
    device: str, shape: Shape, dtype: torch.dtype, sinks: int, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape), kernels("ranking_triton", device, monkeypatch)
    # eighths, whose products with integers have exact sums, so that both round the same number
    states = given.normal(shape.batch, 2, shape.heads, shape.key).mul(8).round().div(8).to(dtype)[:, 1]
    keys = given.normal(shape.batch, sinks + recent + 3, shape.key_heads, shape.key).to(dtype).transpose(1, 2)
    args = (
        states, given.integers(shape.key_heads, shape.key, shape.rank), given.normal(shape.rank).mul(1e-3),
        given.normal(shape.key_heads, shape.key), given.offsets,
        keys[:, :, :sinks].to(torch.float32 if dtype == torch.bfloat16 else dtype),  # of another type than the others
        keys[:, :, sinks + 3 :], shape.key**-0.5,
    )  # fmt: skip
    expected = ranking.project(*args)
    fill_what_is_empty(monkeypatch)
    low, *scores = kernel.project(*on(device, *args))
    assert torch.equal(low.cpu(), expected[0])
    for found, one in zip(scores, expected[1:], strict=True):
        assert_near(found, one, 1e-5 if dtype == torch.float32 else 1e-3)


@EACH_DEVICE
def test_a_query_is_rounded_to_the_nearest_even_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("ranking_triton", device, monkeypatch)
    scale = 1 + torch.arange(64) / 256  # every other one lies in the middle between two numbers of bfloat16
    states, keys = torch.zeros(1, 1, 16), torch.zeros(1, 1, 0, 16)
    states[..., 3] = 1
    queries = torch.zeros(1, 16, 64, dtype=torch.int8)
    queries[:, 3] = torch.tensor([1, -1], dtype=torch.int8).repeat(32).roll(1)
    args = states, queries, scale, torch.zeros(1, 16), torch.ones(64), keys, keys, 1.0
    low, constant, _ = kernel.project(*on(device, *args))
    rounded = (scale * queries[0, 3]).bfloat16()
    assert torch.equal(low.cpu()[0, 0], rounded)
    assert constant.item() == rounded.float().sum().item()


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize(("capacity", "apart"), [(None, 0), (96, 2), (83, 1000)])
def test_the_best_token_of_each_unit(
    device: str, shape: Shape, capacity: int | None, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape), kernels("ranking_triton", device, monkeypatch)
    args = given.low, given.constant, given.codes(capacity), shape.counts, shape.group, apart
    expected = ranking.score(*args)
    fill_what_is_empty(monkeypatch)
    for found, one in zip(kernel.score(*on(device, *args)), expected, strict=True):
        assert_near(found, one)
    assert bool((expected[0][..., :apart] == HIDDEN).all())


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("near", [0, 300])
@pytest.mark.parametrize("apart", [False, True])
def test_importance_is_a_share_of_one_softmax(
    device: str, shape: Shape, near: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kernel = Inputs(shape), kernels("ranking_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "_UNITS", 64)
    first = min(2, shape.units - 1)
    best, tops, sums = ranking.score(given.low, given.constant, given.codes(), shape.counts, shape.group, first)
    rows = shape.batch * (shape.key_heads if apart else 1)
    args = best, tops, sums, given.normal(shape.batch, shape.heads, near).mul(2), rows, first
    expected = ranking.share(*args)
    fill_what_is_empty(monkeypatch)
    found = kernel.share(*on(device, *args)).cpu()
    assert bool(found[:, :first].isinf().all())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    if near:  # a head with a score that is NaN does not count
        best[0, -1], tops[0, -1, 0], args[3][-1, 0, 7] = torch.nan, torch.nan, torch.nan
        found, expected = kernel.share(*on(device, *args)).cpu(), ranking.share(*args)
        assert not bool(found.isnan().any()) and bool((found[-1, first:] < expected[-1, first:] + 1e-3).all())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@EACH_DEVICE
@pytest.mark.parametrize(
    ("units", "wanted", "among"),
    [
        (1, 1, 1), (5, 0, 5), (70, 70, 70), (1000, 3, 999), (5000, 400, 400), (16384, 9, 800), (32768, 9, 32768),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_the_first_of_equal_ones_is_chosen(
    device: str, units: int, wanted: int, among: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, made = kernels("ranking_triton", device, monkeypatch), torch.Generator().manual_seed(units)
    importance = torch.randn(3, units, generator=made)
    if ties:
        values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40, 3.0, -2.0])
        importance[0] = values[torch.randint(0, len(values), (units,), generator=made)]
        importance[1] = values[torch.randint(0, 2, (units,), generator=made)]
    expected = ranking.pick(importance, wanted, among)
    fill_what_is_empty(monkeypatch)
    *found, left = kernel.pick(importance.to(device), wanted, among)
    for one, other in zip(found, expected[:2], strict=True):
        assert torch.equal(one.cpu(), other)
    torch.testing.assert_close(left.cpu(), expected[2], rtol=1e-5, atol=1e-5)


@EACH_DEVICE
@pytest.mark.parametrize(
    ("name", "apart", "count", "programs"),
    [
        ("smol", False, 9, 264),
        ("smol", True, 3, 1),
        ("llama", True, 9, 264),
        ("llama", False, 20, 264),
        ("odd", True, 60, 264),
        ("odd", False, 60, 1),
        ("wide", False, 1, 264),
        ("many heads", False, 17, 264),
        ("many heads", True, 4, 1),
    ],
)
def test_the_estimate_of_the_others(
    device: str, name: str, apart: bool, count: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    given, kernel = Inputs(shape), kernels("ranking_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TILE", 512)  # one part after the other is merged
    rows = shape.batch * (shape.key_heads if apart else 1)
    others = torch.stack([torch.randperm(shape.units, generator=given.made)[:count].sort().values for _ in range(rows)])
    inputs = shape.inputs
    args = (
        given.low, given.constant, given.codes(83), shape.counts, shape.group, others.int(),
        given.integers(shape.batch, inputs + 1, shape.key_heads, shape.value),
        given.normal(shape.batch, inputs + 1).abs().mul(1e-4), given.normal(shape.batch, shape.heads), given.offsets,
    )  # fmt: skip
    expected = ranking.rest(*args)
    fill_what_is_empty(monkeypatch)
    moved = on(device, *args)
    for _ in range(2):  # the second finds what the first has left in the counters
        for found, one in zip(kernel.rest(*moved), expected, strict=True):
            assert_near(found, one)


@EACH_DEVICE
@EACH_SHAPE
@pytest.mark.parametrize("missing", [0, 1, 66])
def test_what_does_not_exist_does_not_count(
    device: str, shape: Shape, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for keys and units of which a number on the device exist."""
    given, kernel = Inputs(shape), kernels("ranking_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "_TILE", 512)
    exist, recent, room = torch.tensor(max(1, shape.units - missing)), torch.tensor(max(0, 37 - missing)), shape.units
    keys = given.normal(shape.batch, shape.key_heads, 41, shape.key)
    keys[:, :, 4 + int(recent) :] = torch.nan
    args = (
        given.normal(shape.batch, shape.heads, shape.key),
        given.integers(shape.key_heads, shape.key, shape.rank), given.normal(shape.rank).mul(1e-3),
        given.normal(shape.key_heads, shape.key), given.offsets, keys[:, :, :4], keys[:, :, 4:], 0.2, recent,
    )  # fmt: skip
    of_codes = given.low, given.constant, given.codes(room + 13), shape.counts, shape.group
    near = ranking.project(*args)[2]
    scores = ranking.score(*of_codes, 1, exist)
    importance = ranking.share(*scores, near, shape.batch, 1, exist)
    order = torch.arange(room - 1, -1, -1).repeat(shape.batch, 1).int()  # missing ones first
    maps = (
        order, given.integers(shape.batch, 4, shape.key_heads, shape.value),
        given.normal(shape.batch, 4).abs().mul(1e-4),
        given.normal(shape.batch, shape.heads), given.offsets, exist,
    )  # fmt: skip
    estimate = ranking.rest(*of_codes, *maps)
    fill_what_is_empty(monkeypatch)
    assert_near(kernel.project(*on(device, *args))[2], near)
    for found, one in zip(kernel.score(*on(device, *of_codes, 1, exist)), scores, strict=True):
        assert_near(found, one)
    found = kernel.share(*on(device, *scores, near, shape.batch, 1, exist)).cpu()
    torch.testing.assert_close(found, importance, rtol=1e-5, atol=1e-8)
    assert bool(found[:, int(exist) :].isneginf().all()) and bool((found[:, 1 : int(exist)] >= 0).all())
    for found, one in zip(kernel.rest(*on(device, *of_codes, *maps)), estimate, strict=True):
        assert_near(found, one)


ENCODED = {
    "smol": (SHAPES["smol"], torch.bfloat16, 7, (1, 40, 9)),
    "llama": (SHAPES["llama"], torch.bfloat16, 3, (37,)),
    "odd": (SHAPES["odd"], torch.float32, 0, (33, 2)),
    "wide": (SHAPES["wide"], torch.float32, 1, (6, 1)),
    "many tokens": (SHAPES["many heads"], torch.float16, 5, (1500, 30)),
    "no 8 bits": (Shape(2, 3, 3, 24, 24, (0, 16, 40), 15, 4), torch.bfloat16, 16, (1, 31)),
    "only 8 bits": (Shape(2, 1, 1, 40, 40, (33, 0, 0), 7, 8), torch.float32, 20, (34,)),
    "only 2 bits": (Shape(1, 3, 3, 80, 80, (0, 0, 256), 16, 3), torch.bfloat16, 0, (17, 20)),
}
"""Shape, type of keys, first token, and tokens of each call."""


@EACH_DEVICE
@pytest.mark.parametrize("case", ENCODED)
def test_codes_of_keys_and_no_other_bytes(device: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product within 1e-4 of an integer may be rounded to either side of it."""
    (shape, dtype, first, pieces), kernel = ENCODED[case], kernels("ranking_triton", device, monkeypatch)
    given, tokens, width = Inputs(shape), sum(pieces), shape.key_heads * shape.key
    units = (first + tokens) // shape.group + 3
    around = torch.full((shape.batch, tokens + 2, shape.key_heads + 1, shape.key + 8), torch.nan).to(dtype)
    keys = around[:, 1:-1, :-1, : shape.key].transpose(1, 2)
    keys.copy_(given.normal(*keys.shape))
    deviations = torch.tensor([60.0, 5.0, 1.5]).repeat_interleave(torch.tensor(shape.counts))
    mean, projection, scale = given.normal(width), given.integers(width, shape.rank), deviations / 105 / width**0.5
    expected = given.integers(shape.batch, given.codes().shape[1] + 2, units + 5).view(torch.uint8)
    found, at = move(expected.clone(), device), first
    fill_what_is_empty(monkeypatch)
    for piece in keys.split(pieces, 2):
        args = piece, mean, projection, scale, shape.counts
        ranking.encode(*args, expected[:, 1:-1, :units], shape.group, at)
        kernel.encode(*on(device, *args), found[:, 1:-1, :units], shape.group, at)
        at += piece.shape[2]
    flat = keys.transpose(1, 2).flatten(2).double() - mean
    products = (flat @ projection.double() * scale).transpose(1, 2)
    either, token = torch.zeros(shape.batch, shape.rank, shape.group, units + 5).bool(), torch.arange(first, at)
    either[:, :, token % shape.group, token // shape.group] = (products - products.round()).abs() < 1e-4
    assert either.float().mean() < 1e-3
    found = found.cpu()
    assert torch.equal(found[:, [0, -1]], expected[:, [0, -1]])
    differ = torch.ne(*(ranking.components(one[:, 1:-1], shape.counts, shape.group) for one in (found, expected)))
    assert not bool((differ & ~either).any())


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_that_is_an_integer_is_its_code(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sums are exact here, and many products are integers or beyond what their bits hold."""
    kernel, shape, tokens = kernels("ranking_triton", device, monkeypatch), SHAPES["many heads"], 40
    given, width = Inputs(shape), shape.key_heads * shape.key
    keys = given.normal(shape.batch, shape.key_heads, tokens, shape.key).mul(8).round().div(8).to(dtype)
    mean, projection = given.normal(width).mul(8).round().div(8), given.integers(width, shape.rank) // 16
    scale = torch.tensor([4.0, 0.25, 0.125]).repeat_interleave(torch.tensor(shape.counts))
    products = (keys.transpose(1, 2).flatten(2) - mean) @ projection.float() * scale
    for some in (products == products.round(), products[..., :3].abs() > 200):
        assert some.float().mean() > 0.05
    args, expected = (keys, mean, projection, scale, shape.counts), given.codes()
    found = move(expected.clone(), device)
    ranking.encode(*args, expected, shape.group, 9)
    kernel.encode(*on(device, *args), found, shape.group, 9)
    assert torch.equal(found.cpu(), expected)


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, shape = kernels("ranking_triton", device, monkeypatch), SHAPES["smol"]
    given = Inputs(shape)
    keys = given.normal(shape.batch, 6, shape.key_heads, shape.key).transpose(1, 2)
    maps = given.integers(shape.batch, 4, shape.key_heads, shape.value)
    states, low, constant, codes, queries, offsets, mean, keys, maps = on(
        device, given.normal(shape.batch, 2, shape.heads, shape.key)[:, 1], given.low, given.constant, given.codes(83),
        given.integers(shape.key_heads, shape.key, shape.rank), given.offsets,
        given.normal(shape.key_heads, shape.key), keys, maps,
    )  # fmt: skip
    kernel.counters(torch.device(low.device), 2)
    others = torch.zeros(shape.batch, 3, dtype=torch.int32, device=device)
    scale, code_args = constant.new_empty(shape.batch, 4), (low, constant, codes, shape.counts, shape.group)
    with Launches(kernel, monkeypatch) as launches:
        kernel.project(states, queries, offsets, mean, offsets, keys[:, :, :2], keys[:, :, 2:], 1.0)
        assert (launches.count, launches.others) == (1, [])
        scores = kernel.score(*code_args, 1)
        assert (launches.count, launches.others) == (2, [])
        importance = kernel.share(*scores, constant[..., None], shape.batch, 1)
        assert (launches.count, launches.others) == (3, [])
        kernel.pick(importance, 3, 9)
        assert (launches.count, launches.others) == (4, [])
        kernel.rest(*code_args, others, maps, scale, constant, offsets)
        assert (launches.count, launches.others) == (5, [])
        kernel.encode(keys, mean.view(-1), queries.view(-1, shape.rank), offsets, shape.counts, codes, shape.group, 1)
        assert (launches.count, launches.others) == (6, [])
