"""`FusedAttention` beside `MixedAttention`: in Triton's interpreter (`make test-kernels`), and on a GPU."""

from __future__ import annotations

import pytest
import torch
from low_bits import entry, states
from triton_kernels import DEVICES, kernels

from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import Entries, FusedAttention, LowBitCopy, LowBitForm, MixedAttention

LATEST, HEADS = 39, 6


def on(device: str, held: Entries) -> Entries:
    return Entries(held.tokens.to(device), held.keys.to(device), held.values.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(("dims", "group"), [((64, 64), 64), ((24, 40), 32), ((128, 128), 64)])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [320, 0])
@pytest.mark.parametrize("programs", [1, 1056], ids=["many blocks each", "one each"])
def test_it_gives_what_mixed_attention_gives(
    device: str, bits: int, dims: tuple[int, int], group: int, queries: int, padded: bool, tokens: int, programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = kernels("mixed_attention_triton", device, monkeypatch)
    monkeypatch.setattr(kernel, "_PROGRAMS", programs)
    monkeypatch.setattr(kernel, "_TOKENS", 128)  # shares of 320 tokens are several programs'
    form = LowBitForm(entry(*dims), bits, group)
    keys, values = states(tokens + LATEST, form.entry)
    copies = [LowBitCopy(form, 2, torch.device(place), MemoryAccount(), tokens + group) for place in ("cpu", device)]
    copies[0].append([(keys[:, :, :tokens], values[:, :, :tokens])], tokens)
    copies[1].restore(copies[0].capture(), tokens, "layer 0")  # elements between two codes may get another on a device
    made = torch.Generator().manual_seed(3)
    query = torch.randn(2, HEADS, queries, dims[0], generator=made).bfloat16()
    chosen = torch.stack([torch.randperm(max(1, tokens), generator=made)[:20] for _ in range(4)]).view(2, 2, -1)
    chosen[0, 1, 3:5] = -1
    chosen = chosen[:, :, : 20 if tokens else 0]
    at = chosen.clamp(min=0)[..., None]
    own = [part.gather(2, at.expand(-1, -1, -1, part.shape[3])) for part in (keys, values)]
    leaving = Entries(torch.full((2, 2, 3), -1), keys[:, :, :3], values[:, :, :3])
    replaced = [Entries(chosen, *own), leaving]
    mask = None
    if padded:
        mask = torch.ones(2, 1, queries, tokens + LATEST, dtype=torch.bool).tril(tokens + LATEST - queries)
        mask[1, ..., : tokens // 2 + 7] = False
    latest = keys[:, :, tokens:], values[:, :, tokens:]
    expected, every = MixedAttention(copies[0], query, 0.2, latest, mask).attend(replaced, range(queries))
    there = tuple(part.transpose(1, 2).contiguous().transpose(1, 2).to(device) for part in latest)
    last = LATEST - queries + 1
    halves = [tuple(part[:, :, :last] for part in there), tuple(part[:, :, last:] for part in there)]
    given = halves[: 1 + (queries > 1)], None if mask is None else mask.to(device)
    fused = FusedAttention(copies[1], query.to(device), 0.2, *given)
    for _ in range(2):  # it keeps nothing
        output, shares = fused.attend([on(device, one) for one in replaced], range(queries))
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-2, atol=1e-2)
        assert len(shares) == queries
        for found, wanted in zip(shares, every, strict=True):
            torch.testing.assert_close(found.cpu(), wanted, rtol=2e-2, atol=2e-4)
    (one,) = fused.attend([on(device, one) for one in replaced], [queries - 1])[1]
    assert torch.equal(one, shares[-1])
