"""The kernels of `low_bit` against their twins, in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_kernels import DEVICES, Launches, kernels, move

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels import low_bit
from hf_offload_cache.kernels.low_bit import LARGEST, ReplicaLayout, row_bytes

EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def states(tokens: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """States (2, 3, tokens, dim), not contiguous. Some groups have equal elements, and some elements are too large."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 3, tokens)[:, None, None] * torch.logspace(-1, 1, dim)
    whole = torch.randn(2, tokens, 3, dim + 5, generator=made)[..., 5:] * sizes
    whole += 3 * sizes * torch.randn(2, 1, 3, dim, generator=made)
    whole[0, :, 0], whole[0, 1::2, 1, dim // 2], whole[1, :, 2, 0] = 0.3, 1e30, 0
    whole[1, 5, 1] = 7e-5
    return whole.to(dtype).transpose(1, 2)


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "plain", "group", "tokens", "dims", "part"),
    [
        (2, False, 64, 64, (64, 64), 64), (2, False, 32, 160, (7, 3), 8), (1, False, 64, 128, (24, 40), 40),
        (1, True, 32, 96, (48, 45), 24), (4, False, 64, 192, (130, 96), 48), (4, False, 32, 32, (16, 16), 16),
    ],
)  # fmt: skip
def test_groups_are_quantised_as_on_the_host(
    device: str, dtype: torch.dtype, bits: int, plain: bool, group: int, tokens: int, dims: tuple[int, int], part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Byte for byte, into rows between others, which stay."""
    kernel, parts = kernels("low_bit_triton", device, monkeypatch), -(-dims[1] // part)
    keys, values = (states(tokens, dim, dtype, seed) for seed, dim in enumerate(dims))
    shapes = (tokens // group + 2, dims[0], row_bytes(group, bits)), (parts, tokens + 2, row_bytes(part, bits))
    expected, found = ([torch.full((2, 3, *shape), 77, dtype=torch.uint8) for shape in shapes] for _ in range(2))
    found = [one.to(device) for one in found]
    low_bit.pack(keys, values, bits, plain, expected[0][:, :, 1:-1], expected[1][:, :, :, 1:-1])
    kernel.pack(
        move(keys, device), move(values, device), bits, plain, found[0][:, :, 1:-1], found[1][:, :, :, 1:-1]
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)
    assert float(low_bit.unpacked(expected[0][:, :, 1:-1].contiguous(), bits).abs().max()) > LARGEST / 2


@EACH_DEVICE
def test_each_is_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels("low_bit_triton", device, monkeypatch)
    keys, values = (torch.ones(1, 2, 64, 16, device=device) for _ in range(2))
    rows = [torch.empty(1, 2, 1, size, row_bytes(group, 2), dtype=torch.uint8, device=device)
            for size, group in ((16, 64), (64, 16))]  # fmt: skip
    with Launches(kernel, monkeypatch) as launches:
        kernel.pack(keys, values, 2, False, *rows)
        kernel.pack(keys[:, :, :0], values[:, :, :0], 2, False, rows[0][:, :, :0], rows[1][:, :, :, :0])
        assert (launches.count, launches.others) == (1, [])
        replicas, out, none = rows[1].flatten(0, 3), torch.empty(64, 8, device=device), rows[0][0, 0, 0, :0, 0]
        kernel.unpack_replicas(ReplicaLayout(8, 8), replicas, replicas[:, 0], out, replicas[:, 0])
        kernel.unpack_replicas(ReplicaLayout(8, 8), replicas, none, out, none)
        form = RecordFormat(1, 5, 1, 5, torch.float32, 3, 8)
        entries, records = (torch.empty(2, *shape, device=device) for shape in ((3, 10), (form.record_bytes // 4,)))
        payloads = form.payload(records.view(torch.uint8))
        for count in (2, 0):
            kernel.pack_entries(entries[:count], payloads[:count], form)
            kernel.unpack_entries(payloads[:count], entries[:count], form)
    assert (launches.count, launches.others) == (4, [])


@EACH_DEVICE
@pytest.mark.parametrize(
    ("sizes", "dtype", "group"),
    [
        ((3, 64, 3, 64), torch.bfloat16, 10), ((2, 24, 2, 40), torch.float16, 5), ((2, 3, 1, 1), torch.bfloat16, 5),
        ((1, 5, 2, 3), torch.float32, 7), ((1, 300, 1, 256), torch.bfloat16, 4),
    ],
)  # fmt: skip
def test_entries_in_8_bits_are_those_of_the_host(
    device: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also zeros, small numbers, and numbers that are not finite; the rest of a record becomes zeros."""
    kernel, form = kernels("low_bit_triton", device, monkeypatch), RecordFormat(*sizes, dtype, group, 8)
    whole = torch.randn(7, group + 2, form.entry_width, generator=torch.Generator().manual_seed(group))
    whole *= torch.logspace(-3, 3, group + 2)[:, None]
    whole[1], whole[2, 1:3, 0], whole[3, 2, -1] = 0, torch.nan, -torch.inf
    whole[4] *= 1e-30
    entries = whole.to(dtype)[:, 1:-1]
    expected, found = (torch.full((7, form.record_bytes), 0xA5, dtype=torch.uint8) for _ in range(2))
    form.fill(entries, expected)
    found = found.to(device)
    kernel.pack_entries(move(entries, device), found, form)
    back = torch.full(entries.shape, 7.0, dtype=dtype, device=device)
    kernel.unpack_entries(form.payload(found), back, form)
    ends = form.largest_at, form.payload_bytes
    for one, other in zip(found.cpu().tensor_split(ends, 1), expected.tensor_split(ends, 1), strict=True):
        if one.shape[1] == ends[1] - ends[0]:  # of NaN there are several
            one, other = one.contiguous().view(dtype), other.contiguous().view(dtype)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back.cpu(), form.unpacked(form.payload(expected)), rtol=0, atol=0, equal_nan=True)
    assert 0 < int(back.isnan().sum()) < back.numel() / 2


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "group"), [(8192, 32), (256, 4), (384, 8), (6020, 28)])
def test_replicas_are_unpacked_as_on_the_host(
    device: str, width: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, layout = kernels("low_bit_triton", device, monkeypatch), ReplicaLayout(width, group)
    torch.manual_seed(0)
    replicas = torch.zeros(5, -(-layout.nbytes // 64) * 64, dtype=torch.uint8)
    low_bit.pack_replicas(layout, torch.randn(5, width).to(dtype), replicas)
    out = torch.full((7, width), float("nan"), dtype=dtype, device=device)
    target, rows = torch.tensor([6, 1, 0, 3, 5]), torch.tensor([4, 0, 1, 1, 3])
    kernel.unpack_replicas(layout, replicas.to(device), rows.to(device), out, target.to(device))
    expected = low_bit.unpacked_plainly(layout.rows(replicas), 4).flatten(1)[rows]
    if dtype == torch.bfloat16:
        assert ((out.cpu()[target].float() - expected).abs() <= expected.abs() * 2**-7).all()
    else:
        assert torch.equal(out.cpu()[target], expected.to(dtype))
    assert out[[2, 4]].isnan().all()
