"""Single tokens' entries, chosen by each key head, out of records in pinned host memory, without the host.

Shapes: B sequences, K key heads, n places a key head; a record holds the entries of G tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .on_a_device import with_kernel

MOST_EXCHANGED = 256
"""Upper bound on the entries per head of `exchange`."""


@with_kernel()
def exchange(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `tokens` (B, K, n) int64, -1: an empty place, those that are `wanted`. Tokens that stay keep their places,
    the others get the first free ones, in their order.

    Args:
        wanted: (B, K, m) of integers, distinct, -1: none; m at most n, and n at most `MOST_EXCHANGED`.

    Returns the new tokens at their places (B, K, n) int64, -1: none, and their number (B, K) int64.
    """
    same = (tokens[..., None] == wanted[:, :, None]) & (wanted >= 0)[:, :, None]
    stays, absent = same.any(3), (wanted >= 0) & ~same.any(2)
    counts = absent.sum(2)
    first = wanted.gather(2, (~absent).byte().sort(dim=2, stable=True).indices).long()
    turn = (~stays).cumsum(2)  # of each free place
    comes = first.gather(2, (turn - 1).clamp(0, wanted.shape[2] - 1)) if wanted.shape[2] else torch.zeros_like(tokens)
    new = torch.where(~stays & (turn <= counts[..., None]), comes, -1)
    tokens.copy_(torch.where(stays, tokens, new))
    return new, counts


@with_kernel()
def bring(
    addresses: torch.Tensor, tokens: torch.Tensor, form: Any, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Read each head's entries of `tokens` (B, K, n) int64 from host memory into keys (B, K, n, D) and values (B, K, n,
    Dv), contiguous, in `form`'s type. Places without a token, -1, stay as they are.

    Args:
        addresses: (B, units) int64, the begin of each record, of `form.group_size` tokens, in pinned host memory, which
            must stay until this has run.
        form: a `RecordFormat`. Each head has both a key and a value.
    """
    item, units = form.dtype.itemsize, tokens // form.group_size
    of_head = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    begin = addresses.gather(1, units.clamp(min=0).flatten(1)).view(tokens.shape)
    begin = begin + tokens % form.group_size * form.entry_width * item
    parts = (keys, begin + of_head * form.key_dim * item), (
        values, begin + (form.key_width + of_head * form.value_dim) * item
    )  # fmt: skip
    places = (tokens >= 0).flatten().numpy().nonzero()[0]
    for into, at in parts:
        nbytes = into.shape[3] * item
        rows, every = into.view(-1, into.shape[3]).view(torch.uint8).numpy(), at.flatten().numpy()
        for place in places:
            rows[place] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(every[place])))
