"""Low-rank queries times 8-bit components, as integers where the processor does that fast."""

from __future__ import annotations

import numpy as np
import torch


def multiplied(
    weights: np.ndarray, components: torch.Tensor, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Queries (h, r) float32 times components (r, n) int8: raw scores (h, n), factors (h, 1) that they are to be
    multiplied by, and the queries as they were used, (h, r), in units of those factors.

    On a CPU the queries are taken to 8 bits and raw scores are int32, in the first bytes of `memory` if given (uint8,
    at least 4 h n); elsewhere all is bfloat16, a copy of the components included.
    """
    if components.device.type != "cpu":
        queries = torch.from_numpy(weights).to(components.device, torch.bfloat16)
        raw = queries @ components.to(torch.bfloat16)
        return raw, np.ones((len(weights), 1), dtype=np.float32), queries.float().numpy(force=True)
    unit = np.maximum(np.maximum.reduce(np.abs(weights), -1, keepdims=True), 1e-30) / 127
    rounded = np.rint(weights / unit)
    query8 = torch.from_numpy(rounded.astype(np.int8))
    if memory is None:
        return torch._int_mm(query8, components), unit, rounded
    size = 4 * len(weights) * components.shape[1]
    out = memory[:size].view(torch.int32).view(len(weights), components.shape[1])
    return torch._int_mm(query8, components, out=out), unit, rounded
