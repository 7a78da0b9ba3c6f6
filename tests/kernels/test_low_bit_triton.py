"""Attention over elements in a few bits on a device: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import pytest
import torch
from low_bits import entry, states
from triton_kernels import DEVICES, kernels

from hf_offload_cache.kernels import low_bit
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import LowBitCopy, LowBitForm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(("dims", "group"), [((64, 64), 64), ((24, 40), 32), ((7, 3), 64), ((128, 128), 64)])
@pytest.mark.parametrize(("rows", "count", "tokens"), [(2, 3, 320), (1, 17, 64), (1, 8, 4480)])
def test_the_kernels_give_what_their_twins_give(
    device: str, bits: int, dims: tuple[int, int], group: int, rows: int, count: int, tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if device == "cpu" and tokens > 1000 and dims != (24, 40):
        pytest.skip("minutes in the interpreter")
    on_device, form = kernels("low_bit_triton", device, monkeypatch), LowBitForm(entry(*dims), bits, group)
    if rows == 2:
        monkeypatch.setattr(on_device, "_PROGRAMS", 1)  # which sums over several blocks
    keys, values = states(tokens, form.entry, rows)
    copy = LowBitCopy(form, rows, torch.device("cpu"), MemoryAccount(), tokens + 3 * group)
    copy.append([(keys, values)], tokens)
    parts = {
        "keys": copy._keys.to(device)[:, :, : copy.groups], "values": copy._values.to(device)[:, :, :, :tokens]
    }  # fmt: skip
    queries = torch.randn(rows, 2, count, dims[0], generator=torch.Generator().manual_seed(1))
    expected = copy.scores(queries, torch.empty(rows, 2, count, tokens))
    found = torch.full((rows, 2, count, tokens + 1), 7.0, device=device)
    on_device.scores(queries.to(device), parts["keys"], bits, found[..., :-1])
    torch.testing.assert_close(found[..., :-1].cpu(), expected, rtol=1e-5, atol=2e-4)
    assert bool((found[..., -1] == 7).all())
    found[..., :-1] = expected.softmax(-1)
    total = on_device.weighted(found[..., :-1], parts["values"], bits, group)[..., : dims[1]]
    torch.testing.assert_close(total.cpu(), copy.weighted(expected.softmax(-1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_of_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = kernels("low_bit_triton", device, monkeypatch)
    keys, values = torch.empty(1, 2, 0, 8, 20, dtype=torch.uint8), torch.empty(1, 2, 1, 0, 6, dtype=torch.uint8)
    nothing = torch.empty(1, 2, 3, 0, device=device)
    on_device.scores(torch.ones(1, 2, 3, 8, device=device), keys.to(device), 2, nothing)
    assert torch.equal(on_device.weighted(nothing, values.to(device), 2, 64).cpu(), torch.zeros(1, 2, 3, 8))
    assert torch.equal(low_bit.weighted(nothing.cpu(), values, 2, 64), torch.zeros(1, 2, 3, 8))
