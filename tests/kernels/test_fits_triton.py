"""The kernels with which maps are fitted against their twins: in Triton's interpreter (`make test-kernels`), and on a
GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_kernels import DEVICES, Launches, fill_what_is_empty, kernels, move

from hf_offload_cache.history import RecordFormat, Sealed
from hf_offload_cache.kernels import clusters, fits
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.cluster import remainder
from hf_offload_cache.predictors import value_maps

SHAPES = {"smol": (2, 3, 3, 130, 70, 64), "odd": (1, 2, 5, 33, 64, 24), "many clusters": (1, 1, 2, 1100, 9, 16)}
"""Rows, queries, query heads of each, clusters, tokens and channels."""
EACH = pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def normal(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def on(device: str, *given: Any) -> list[Any]:
    """`given`, its tensors on `device` with the strides that they have."""
    return [move(one, device) if isinstance(one, torch.Tensor) else one for one in given]


@EACH_DEVICE
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_tokens_are_the_twins(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clusters, some of which are empty or equal, and of tokens, some of which are padding and NaN."""
    (rows, queries, heads, count, tokens, dim), kernel = shape, kernels("fits_triton", device, monkeypatch)
    means, states = normal(rows, count, dim).half(), normal(rows, queries * heads, dim, seed=1).to(dtype)
    means[:, 5:9] = means[:, 4:5]
    made = torch.Generator().manual_seed(2)
    members = torch.randint(0, 20, (rows, count + 3), generator=made).int()[:, :count]
    labels = torch.randint(0, count, (rows, tokens + 1), generator=made).int()[:, 1:]
    keys = (means.float().gather(1, labels.long()[..., None].expand(-1, -1, dim)) + normal(rows, tokens, dim, seed=3))
    keys, seen = keys.to(dtype), torch.rand(rows, tokens, generator=made) < 0.9
    keys[~seen] = torch.nan
    scored = clusters.score(states, means, members[None], means[:, :0], dim**-0.5)
    asked = *scored, members, heads, int(members[0].sum()) // 3
    left, total = fits.unselected(*asked)
    assert left.any() and not left.all() and not left[(members == 0)[:, None].expand_as(left)].any()
    weighing = states, keys, labels, left, total, scored[0], seen, dim**-0.5, (3, 3 * tokens, 50)
    fill_what_is_empty(monkeypatch)
    for found, twin in zip(kernel.unselected(*on(device, *asked)), (left, total), strict=True):
        torch.testing.assert_close(found.cpu(), twin, rtol=1e-5, atol=1e-5)
    alone = states, keys.nan_to_num(0), labels, left, total, None, None, dim**-0.5, (1, tokens - 2, 4)
    for given in (weighing, alone):
        for found, twin in zip(kernel.weigh(*on(device, *given)), fits.weigh(*given), strict=True):
            torch.testing.assert_close(found.cpu(), twin, rtol=1e-4, atol=1e-6)
    assert not fits.weigh(*weighing)[0][~seen].any() and not fits.weigh(*alone)[1][1].any()


@EACH_DEVICE
@pytest.mark.parametrize("coded", [False, True])
def test_sums_of_a_regression_are_the_twins(device: str, coded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, whose channels lie side by side, and of codes, whose tokens do; with padding, and added twice."""
    kernel, (rows, rank, heads, count, dim) = kernels("fits_triton", device, monkeypatch), (2, 37, 2, 45, 40)
    components, values = normal(rows, count, rank).bfloat16().mT, normal(rows, heads, count, dim, seed=1).bfloat16()
    offsets, seen, padding = None, None, torch.zeros(rows, count, dtype=torch.bool)
    if coded:
        components, offsets = (20 * normal(rows, rank, count + 3)).to(torch.int8)[..., 3:], normal(rank, seed=2)
        padding[0, :9] = True
        seen = ~padding
    weights = normal(rows, heads, count, seed=3).abs()
    sums, squares = torch.zeros(rows, heads, rank + 1, rank + 1 + dim), torch.zeros(rows, rank + 1)
    given, added = (components, offsets, values, weights, seen), on(device, sums.clone(), squares.clone())
    for _ in range(2):
        fits.add_squares(*given, sums, squares)
        kernel.add_squares(*on(device, *given), *added)
    for found, twin in zip(added, (sums, squares), strict=True):
        torch.testing.assert_close(found.cpu() / twin.abs().max(), twin / twin.abs().max(), rtol=0, atol=1e-6)


@EACH_DEVICE
def test_a_fit_to_every_third_token_has_the_twins_maps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with padding, whose keys and values are NaN."""
    (rows, heads, count, tokens, dim), kernel = (2, 2, 9, 64, 16), kernels("fits_triton", device, monkeypatch)
    monkeypatch.setattr(remainder, "_TOKENS", 22)
    keys, values, queries = (normal(rows, size, tokens, dim, seed=size) for size in (1, 1, heads))
    visible = torch.arange(tokens) >= torch.tensor([[30], [4]])
    keys, values = (one.masked_fill(~visible[:, None, :, None], torch.nan) for one in (keys, values + keys))
    labels, found = np.random.default_rng(3).integers(0, count, (rows, tokens), np.uint16), []
    sizes = np.stack([np.bincount(own, minlength=count) for own in labels])
    means = normal(rows, count, dim, seed=4).half().numpy()
    form = RecordFormat.of_sizes((1, dim, 1, dim), keys.dtype, 8)
    for where in ("cpu", device):
        *parts, asked, seen = on(where, keys, values, queries, visible)
        given = Sealed(count, tokens, [(parts[0], parts[1])], lambda: iter(())), form, labels, means, sizes, asked
        found.append(remainder.fit_maps(*given, dim**-0.5, 20, seen, MemoryAccount(), rows))
        for module in (remainder, value_maps):  # on a CPU, the second fit is the interpreter's
            for name in {"unselected", "weigh", "add_squares"} & vars(module).keys():
                monkeypatch.setattr(module, name, getattr(kernel, name))
    twins, made = found
    assert (twins.maps.int() - made.maps.int()).abs().max() <= 1 and twins.maps.float().std() > 10
    torch.testing.assert_close(made.ratio, twins.ratio, rtol=1e-4, atol=0)


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("fits_triton", device, monkeypatch)
    states, keys, labels = normal(1, 4, 16), normal(1, 8, 16), torch.zeros(1, 8, dtype=torch.int32)
    scored = clusters.score(states, keys, labels[None] + 1, keys[:, :0], 1.0)
    left, total = fits.unselected(*scored, labels + 1, 2, 3)
    sums = torch.zeros(1, 1, 17, 33), torch.zeros(1, 17)
    calls: dict[str, tuple[Any, ...]] = {
        "unselected": (*scored, labels + 1, 2, 3),
        "weigh": (states, keys, labels, left, total, scored[0], None, 1.0, (1, 8, 1)),
        "add_squares": (keys.mT, None, keys[:, None], keys[:, None, :, 0], None, *sums),
    }
    moved = {name: on(device, *given) for name, given in calls.items()}
    with Launches(module, monkeypatch) as launches:
        for number, (name, args) in enumerate(moved.items(), 1):
            getattr(module, name)(*args)
            assert (launches.count, launches.others) == (number, []), name
