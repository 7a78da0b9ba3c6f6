"""A model's attention masks: boolean (True: visible) or additive, one column per stored position."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.on_a_device import to_device, to_host


def shown(mask: torch.Tensor) -> torch.Tensor:
    """Visible places of a mask, or of a part: bool of its shape. A finite bias hides nothing."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def seen_before(mask: torch.Tensor) -> tuple[torch.Tensor, bool, bool] | None:
    """Visible tokens before the last q: bool (·, 1, 1, T - q), of a mask (·, 1, q, T) that shows each of those to all
    queries or to none, as padding does; attention is then faster than with a row per query. And whether the mask hides,
    of these q, exactly the tokens after each; and whether it hides none before. None: another kind of mask.

    A CUDA device is waited for once."""
    queries, columns = mask.shape[-2:]
    if columns < queries:
        return None
    before, latest = mask.split([columns - queries, queries], -1)
    least, most = before.amin(-2, keepdim=True), before.amax(-2, keepdim=True)
    seen = least if mask.dtype == torch.bool else (least == 0) & (most == 0)
    plain = (shown(most) == seen).all()
    causal = torch.ones(queries, queries, dtype=torch.bool, device=mask.device).tril_()
    is_causal = (shown(latest) == causal).all()
    if mask.dtype != torch.bool:
        is_causal &= ((latest == 0) == causal).all()
    plainly, causally, wholly = to_host(torch.stack([plain, is_causal, seen.all()]))[0].tolist()
    return (seen, causally, wholly) if plainly else None


def additive_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask (·, 1, q, T), boolean (True: visible) or additive, as an additive float32 mask whose hidden places are
    -inf."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.float().masked_fill(~shown(mask), float("-inf"))


def hiding(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An additive mask (B, H, 1, t) on a device, which hides entries where `hidden` (B, H, t) is True. Its rows begin
    at multiples of 16 elements, because attention on a GPU copies others."""
    length = hidden.shape[-1]
    rows = torch.zeros(*hidden.shape[:2], 1, -(-length // 16) * 16, dtype=dtype, device="cpu")
    rows[..., :length].masked_fill_(torch.from_numpy(hidden)[:, :, None], float("-inf"))
    return to_device(rows, device)[..., :length]


def mask_at(mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Columns of `mask` (·, 1, q, T; None: all visible, q is 1) at `positions`, additive; hidden where a position is
    -1.

    `positions` are integers (t,), (B, t) or (B, Hkv, t) on the mask's device; a mask of one row applies to all B.
    Returns float32 (·, 1 or Hkv, q, t).
    """
    if positions.ndim < 3:
        positions = positions.reshape(-1, 1, positions.shape[-1])
    index = positions.clamp_min(0).unsqueeze(2).expand(-1, -1, 1 if mask is None else mask.shape[2], -1)
    if mask is None:
        picked = torch.zeros(index.shape, dtype=torch.float32, device=positions.device)
    else:
        rows = max(mask.shape[0], index.shape[0])
        whole = mask.expand(rows, index.shape[1], -1, -1)
        additive = additive_mask(whole.gather(-1, index.expand(rows, -1, -1, -1)))
        assert additive is not None
        picked = additive
    return picked.masked_fill((positions < 0).unsqueeze(2), float("-inf"))
