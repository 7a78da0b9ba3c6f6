"""The mask of what a step has gathered, column by column of the model's own."""

from __future__ import annotations

import numpy as np
import torch

from ..fetch.choice import Choice
from ..fetch.fetcher import Fetched
from ..history.base import History
from ..model.attention_call import AttentionCall


def gathered_mask(call: AttentionCall, history: History, choice: Choice, fetched: Fetched) -> torch.Tensor:
    """The mask (B, 1 or H, q, N + t) of what was fetched: for each query head where key heads have rows of their own.

    Columns of the model's mask (None: causal, aligned at the lower right), hidden where there is no entry.
    """
    batch, length, device = call.query.shape[0], history.length, history.device
    if call.mask is None and call.num_queries == 1 and fetched.valid is not None:  # all that is there is visible
        seen = np.pad(fetched.valid, ((0, 0), (0, history.recent.shape[1])), constant_values=True)
        return _of_query_heads(call, torch.from_numpy(seen).to(device).unflatten(0, (batch, -1))[:, :, None])
    places = fetched.of_chosen(history.positions(choice.units))
    recent = np.arange(length - history.recent.shape[1], length)
    there = places >= 0 if fetched.valid is None else fetched.valid & (places >= 0)
    places = np.concatenate([places.clip(min=0), np.broadcast_to(recent, (len(places), len(recent)))], 1)
    columns = torch.from_numpy(places).to(device).unflatten(0, (batch, -1))[:, :, None]
    mask = call.mask
    if mask is None:
        mask = torch.ones(1, 1, call.num_queries, length, dtype=torch.bool, device=device)
        mask = mask.tril(length - call.num_queries)
    mask = mask.expand(batch, columns.shape[1], -1, -1)
    mask = mask.gather(-1, columns.expand(-1, -1, mask.shape[2], -1))
    if not there.all():
        least = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        hidden = ~torch.from_numpy(there).to(device).unflatten(0, (batch, -1))[:, :, None]
        mask[..., : there.shape[1]] = mask[..., : there.shape[1]].masked_fill(hidden, least)
    return _of_query_heads(call, mask)


def _of_query_heads(call: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1 or key heads, q, n) for each query head."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(call.query.shape[1] // mask.shape[1], 1)
