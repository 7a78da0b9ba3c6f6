"""A copy in a few bits of a small history, and what it stands for."""

from __future__ import annotations

import torch

from hf_offload_cache.history import RecordFormat
from hf_offload_cache.kernels.low_bit import packed, unpacked
from hf_offload_cache.memory import MemoryAccount
from hf_offload_cache.methods.spec import LowBitCopy, LowBitForm

CPU = torch.device("cpu")


def entry(key_dim: int = 24, value_dim: int = 40) -> RecordFormat:
    return RecordFormat(2, key_dim, 2, value_dim, torch.bfloat16, 4)


def states(tokens: int, form: RecordFormat, rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    channels = torch.randn(2, 1, form.key_dim, generator=made) * 4
    keys = torch.randn(rows, 2, tokens, form.key_dim, generator=made) + channels
    return keys.to(form.dtype), torch.randn(rows, 2, tokens, form.value_dim, generator=made).to(form.dtype)


def stood_for(form: LowBitForm, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the copy stands for, group by group: keys along tokens, values along channels."""

    def there_and_back(groups: torch.Tensor) -> torch.Tensor:
        rows = packed(groups.reshape(-1, groups.shape[-1]), form.bits, plain=form.plain)
        return unpacked(rows, form.bits).view(groups.shape)

    found = there_and_back(keys.unflatten(2, (-1, form.group)).transpose(3, 4)).transpose(3, 4).flatten(2, 3)
    filling = values[..., -1:].expand(*values.shape[:3], form.value_dim - values.shape[3])
    filled = torch.cat([values, filling], 3)
    low = there_and_back(filled.unflatten(3, (-1, form.value_group))).flatten(3)
    return found, low[..., : values.shape[3]]


def made(form: LowBitForm, rows: int = 2, account: MemoryAccount | None = None, reserve: int = 0) -> LowBitCopy:
    return LowBitCopy(form, rows, CPU, account or MemoryAccount(), reserve)
