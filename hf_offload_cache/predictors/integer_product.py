"""Low-rank queries times 8-bit components, as integers where the processor does that fast."""

from __future__ import annotations

import numpy as np
import torch


def rounded(weights: np.ndarray, device: torch.device) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Queries (h, r) float32 as `multiplied` takes them, on `device`; the factors (h, 1) that its products are to be
    multiplied by; and the queries as they are used, (h, r), in units of those factors.

    On a CPU they are taken to 8 bits, elsewhere to bfloat16.
    """
    if device.type != "cpu":
        queries = torch.from_numpy(weights).to(device, torch.bfloat16)
        return queries, np.ones((len(weights), 1), dtype=np.float32), queries.float().numpy(force=True)
    unit = np.maximum(np.maximum.reduce(np.abs(weights), -1, keepdims=True), 1e-30) / np.float32(127)
    whole = np.rint(weights / unit)
    return torch.from_numpy(whole.astype(np.int8)), unit, whole


def multiplied(queries: torch.Tensor, components: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`rounded` queries (h, r) times components (r, n) int8: (h, n), in int32 on a CPU and in the first bytes of
    `memory` (uint8, at least 4 h n); elsewhere in bfloat16, a copy of the components included."""
    if components.device.type != "cpu":
        return queries @ components.to(torch.bfloat16)
    size = 4 * len(queries) * components.shape[1]
    out = memory[:size].view(torch.int32).view(len(queries), components.shape[1])
    return torch._int_mm(queries, components, out=out)
