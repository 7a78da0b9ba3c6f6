"""Elements in 1, 2 or 4 bits and back, and records' replicas in 4 bits."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.kernels.low_bit import (
    LARGEST,
    ReplicaLayout,
    pack,
    pack_replicas,
    packed,
    packed_plainly,
    row_bytes,
    unpack_replicas,
    unpacked,
    unpacked_plainly,
)


def sample(count: int, group: int) -> torch.Tensor:
    """Groups of different sizes and places; one has equal elements alone."""
    made = torch.Generator().manual_seed(0)
    values = torch.randn(count, group, generator=made) * torch.logspace(-2, 2, count)[:, None]
    values += 3 * torch.logspace(-2, 2, count)[:, None] * torch.randn(count, 1, generator=made)
    values[1] = 3.25
    return values


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("group", [8, 40, 64])
@pytest.mark.parametrize("plain", [False, True])
def test_every_element_is_within_half_a_step(bits: int, group: int, plain: bool) -> None:
    values = sample(9, group)
    rows = packed(values.bfloat16(), bits, plain=plain)
    values = values.bfloat16().float()
    assert rows.shape == (9, row_bytes(group, bits)) and rows.dtype == torch.uint8
    width = values.amax(1) - values.amin(1)
    step = width / 2 if bits == 1 and not plain else width / (2**bits - 1)
    slack = 2**-9 * values.abs().amax(1) + 1e-6
    apart = (unpacked(rows, bits) - values).abs()
    assert bool((apart <= (step / 2 + slack)[:, None]).all())
    assert torch.equal(unpacked(rows, bits)[1], values[1])


def test_one_bit_as_the_paper_has_it() -> None:
    """Equation 3: the two values are the middles of the halves of the range; plain, its ends."""
    values = torch.tensor([[0.0, 1, 3, 5, 8, 8, 8, 8]])
    assert unpacked(packed(values, 1), 1).tolist() == [[2, 2, 2, 6, 6, 6, 6, 6]]
    assert unpacked(packed(values, 1, plain=True), 1).tolist() == [[0, 0, 0, 8, 8, 8, 8, 8]]


def test_the_middles_are_nearer_than_the_ends() -> None:
    values = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    middles, ends = (unpacked(packed(values, 1, plain=plain), 1) for plain in (False, True))
    assert (middles - values).square().mean() < 0.5 * (ends - values).square().mean()


@pytest.mark.parametrize(("bits", "plain"), [(1, False), (1, True), (2, False), (4, False)])
def test_what_half_precision_does_not_have(bits: int, plain: bool) -> None:
    """Is cut, and what hardly differs stays what it is."""
    far = unpacked(packed(torch.tensor([[-1e6, 0, 1e6, 5, 0, 0, 0, 0]]), bits, plain=plain), bits)
    assert bool(far.isfinite().all()) and float(far.abs().max()) <= 1.001 * LARGEST
    near = unpacked(packed(torch.linspace(0, 3e-9, 8)[None], bits), bits)
    assert float(near.abs().max()) < 1e-6


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("group", [8, 40, 64])
def test_compiled_code_and_its_twin_say_the_same(bits: int, group: int) -> None:
    rows = packed(sample(30, group), bits).view(2, 15, -1)
    found, twin = unpacked(rows, bits), unpacked_plainly(rows, bits)
    assert found.shape == (2, 15, group) and found.dtype == torch.float32
    torch.testing.assert_close(found, twin, rtol=2e-7, atol=1e-7 * float(twin.abs().max()))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [8, 40, 64])
def test_a_device_packs_as_compiled_code_does(bits: int, group: int) -> None:
    """Byte for byte, also where a scale is below what half precision has, or negative because the zero point rose."""
    values = torch.cat([sample(30, group), torch.full((1, group), 0.3), torch.linspace(0, 3e-9, group)[None]])
    values = torch.cat([values, values * 1e-5, values.bfloat16()])
    assert torch.equal(packed(values, bits), packed_plainly(values, bits, False))


def test_the_last_part_of_a_value_is_filled_up() -> None:
    keys, values = sample(128, 24).view(2, 1, 64, 24), sample(128, 11).view(2, 1, 64, 11)
    key_rows = torch.empty(2, 1, 2, 24, row_bytes(32, 4), dtype=torch.uint8)
    value_rows = torch.empty(2, 1, 2, 64, row_bytes(8, 4), dtype=torch.uint8)
    pack(keys, values, 4, False, key_rows, value_rows)
    assert torch.equal(key_rows[1, 0, 1, 5], packed(keys[1, :, 32:, 5], 4)[0])
    assert torch.equal(value_rows[1, 0, 0, 7], packed(values[1, :, 7, :8], 4)[0])
    assert torch.equal(value_rows[1, 0, 1, 7], packed(values[1, :, 7, [8, 9, 10, 10, 10, 10, 10, 10]], 4)[0])


# Replicas of records

REPLICAS = [(8192, 32), (256, 4), (384, 8), (70000, 28)]


def entries_of(layout: ReplicaLayout, dtype: torch.dtype, count: int = 5) -> torch.Tensor:
    """(count, width): of sizes that differ from group to group; one with equal elements alone."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, layout.width // layout.group).repeat_interleave(layout.group)
    entries = torch.randn(count, layout.width) * sizes + 2 * sizes
    entries[1] = 3.25
    return entries.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), REPLICAS)
def test_every_element_of_a_replica_is_within_half_a_step(width: int, group: int, dtype: torch.dtype) -> None:
    layout = ReplicaLayout(width, group)
    entries = entries_of(layout, dtype)
    replicas = torch.full((len(entries), layout.nbytes + 100), 255, dtype=torch.uint8)
    pack_replicas(layout, entries, replicas)
    assert (replicas[:, layout.nbytes :] == 0).all()
    groups = entries.float().unflatten(1, (-1, group))
    apart = groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)
    most = groups.abs().amax(2, keepdim=True)
    allowed = apart / 30 + most * (2 * 2**-11 + torch.finfo(dtype).eps) + 2**-20
    out = torch.full((7, width), float("nan"), dtype=dtype)
    target = torch.tensor([6, 1, 0, 3, 5])
    unpack_replicas(layout, replicas, torch.tensor([4, 0, 1, 2, 3]), out, target)
    got = out[target].float().unflatten(1, (-1, group))
    assert ((got - groups[[4, 0, 1, 2, 3]]).abs() <= allowed[[4, 0, 1, 2, 3]]).all()
    assert out[[2, 4]].isnan().all()
    assert torch.equal(out[0], entries[1])  # equal elements are what they were


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), REPLICAS)
def test_a_device_unpacks_replicas_as_the_host(width: int, group: int, dtype: torch.dtype) -> None:
    layout = ReplicaLayout(width, group)
    replicas = torch.empty(5, layout.nbytes, dtype=torch.uint8)
    pack_replicas(layout, entries_of(layout, dtype), replicas)
    out = torch.empty(5, width, dtype=dtype)
    unpack_replicas(layout, replicas, torch.arange(5), out, torch.arange(5))
    assert torch.equal(out, unpacked_plainly(layout.rows(replicas), 4).flatten(1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_elements_of_replicas_stay_finite(dtype: torch.dtype) -> None:
    """Steps are rounded up at the worst."""
    layout = ReplicaLayout(64, 32)
    ends = torch.tensor([-LARGEST, LARGEST, 0, 17.0, -LARGEST / 3]).to(dtype)
    ends = ends[ends.abs() <= LARGEST]
    entries = torch.stack([a.repeat(64).index_fill(0, torch.arange(0, 64, 3), float(b)) for a in ends for b in ends])
    replicas = torch.empty(len(entries), layout.nbytes, dtype=torch.uint8)
    pack_replicas(layout, entries, replicas)
    out = torch.empty(len(entries), 64, dtype=dtype)
    unpack_replicas(layout, replicas, torch.arange(len(entries)), out, torch.arange(len(entries)))
    assert out.isfinite().all() and unpacked_plainly(layout.rows(replicas), 4).flatten(1).to(dtype).isfinite().all()


def test_entries_that_lie_apart() -> None:
    layout = ReplicaLayout(384, 8)
    entries = torch.randn(20, 512)
    replicas, other = (torch.zeros(20, layout.nbytes, dtype=torch.uint8) for _ in range(2))
    pack_replicas(layout, entries[:, :384], replicas)
    pack_replicas(layout, entries[:, :384].contiguous(), other)
    assert torch.equal(replicas, other)


def test_groups_divide_every_part() -> None:
    found = [ReplicaLayout.of(32, *widths) for widths in ((64, 64), (96, 64), (12, 20), (6, 64), (0, 64))]
    assert [None if one is None else (one.width, one.group) for one in found] == [
        (128, 32), (160, 32), (32, 4), None, (64, 32),
    ]  # fmt: skip
    assert ReplicaLayout(8192, 32).nbytes == 8192 // 2 + 8192 // 32 * 4
