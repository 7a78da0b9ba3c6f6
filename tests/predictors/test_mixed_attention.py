"""Attention over a copy with some entries replaced, against one softmax over what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from low_bits import entry, made, states, stood_for

from hf_offload_cache.methods.spec import Entries, LowBitForm, MixedAttention

TOKENS, LATEST, HEADS = 192, 9, 6


def replaced(keys: torch.Tensor, values: torch.Tensor, count: int, seed: int) -> Entries:
    """Distinct tokens of each row and head, and some that are none."""
    made = np.random.default_rng(seed)
    rows, heads = keys.shape[:2]
    tokens = np.stack([made.permutation(TOKENS)[:count] for _ in range(rows * heads)]).reshape(rows, heads, count)
    tokens[0, 1, 3:5] = -1
    at = torch.from_numpy(np.maximum(tokens, 0))[..., None]
    own = [part.gather(2, at.expand(-1, -1, -1, part.shape[3])) for part in (keys, values)]
    own[0][0, 1, 3:5] = 7.0
    return Entries(torch.from_numpy(tokens), *own)


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "bias"])
@pytest.mark.parametrize("special", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("queries", [1, 2])
def test_equals_one_softmax(mask: str, special: str, queries: int) -> None:
    form = LowBitForm(entry(16, 24), 2, 32)
    keys, values = states(TOKENS + LATEST, form.entry)
    copy = made(form)
    copy.append([(keys[:, :, :TOKENS], values[:, :, :TOKENS])], TOKENS)
    low_keys, low_values = stood_for(form, keys[:, :, :TOKENS], values[:, :, :TOKENS])
    parts = [replaced(keys, values, 20, 0)]
    rest = replaced(keys, values, TOKENS, 1)
    for row, head in np.ndindex(2, 2):
        rest.tokens[row, head, torch.isin(rest.tokens[row, head], parts[0].tokens[row, head])] = -1
    parts.append(rest if special == "plain" else replaced(keys, values, 6, 0))
    if special != "plain":
        parts[1].tokens[:] = -1
    for part in parts:
        for row, head, column in (part.tokens >= 0).nonzero().tolist():
            token = part.tokens[row, head, column]
            low_keys[row, head, token] = keys[row, head, token].float()
            low_values[row, head, token] = values[row, head, token].float()
    every_key = torch.cat([low_keys, keys[:, :, TOKENS:].float()], 2).double()
    every_value = torch.cat([low_values, values[:, :, TOKENS:].float()], 2).double()

    query = torch.randn(2, HEADS, queries, 16, generator=torch.Generator().manual_seed(3))
    seen = torch.ones(2, 1, queries, TOKENS + LATEST, dtype=torch.bool).tril(TOKENS + LATEST - queries)
    bias, given = torch.zeros(seen.shape), None
    if mask != "none":
        seen[1, ..., :40] = False
        given = seen
    if mask == "bias":
        bias = torch.randn(seen.shape, generator=torch.Generator().manual_seed(4))
    if mask in ("additive", "bias"):
        given = bias.masked_fill(~seen, torch.finfo(torch.float32).min)
    softcap = 3.0 if special == "softcap" else None
    s_aux = torch.randn(HEADS, generator=torch.Generator().manual_seed(5)) if special == "sinks" else None

    scores = query.double() * 0.3 @ every_key.repeat_interleave(3, 1).transpose(2, 3)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = (scores + bias).exp() * seen
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.double().exp().view(1, -1, 1, 1)
    weights = weights / total
    expected = (weights @ every_value.repeat_interleave(3, 1)).transpose(1, 2)

    latest = keys[:, :, TOKENS:], values[:, :, TOKENS:]
    mixed = MixedAttention(copy, query, 0.3, latest, given, softcap, s_aux)
    assert mixed.attend([], last=False)[0].shape == expected.shape
    output, nothing = mixed.attend(parts, last=False)
    torch.testing.assert_close(output, expected.float(), rtol=1e-4, atol=1e-5)
    assert nothing == []
    output, every = mixed.attend(parts, range(queries))
    torch.testing.assert_close(output, expected.float(), rtol=1e-4, atol=1e-5)
    for asked, shares in enumerate(every):
        own = weights[:, :, asked, :TOKENS].unflatten(1, (2, 3)).sum(2)
        torch.testing.assert_close(shares, own.float(), rtol=1e-4, atol=1e-6)
