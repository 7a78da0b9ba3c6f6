"""Products of low-rank queries and 8-bit components (KVSwap, equation 1), by the processor's fastest instructions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from ...kernels.on_a_device import to_device

_WIDENED = 1 << 15
"""Components converted to float32 at a time."""
_MOST_COMPONENTS = 1024
"""Components of a token whose 8-bit products sum to at most 2 ** 24. Up to there, float32 holds every integer."""


def rounded(weights: np.ndarray, device: torch.device) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Round low-rank queries (h, r) float32 for `multiplied`: to 8 bits on a CPU, to bfloat16 elsewhere.

    Returns the rounded queries on `device`, the factors (h, 1) that products are multiplied by, and the rounded
    queries (h, r) in units of those factors. Factors and the latter are float32, on the host.
    """
    if device.type != "cpu":
        whole = torch.from_numpy(weights).bfloat16().float().numpy()
        return to_device(whole, device).bfloat16(), np.ones((len(weights), 1), dtype=np.float32), whole
    unit = np.maximum(np.maximum.reduce(np.abs(weights), -1, keepdims=True), 1e-30) / np.float32(127)
    whole = np.rint(weights / unit)
    return torch.from_numpy(whole.astype(np.int8)), unit, whole


def multiplied(queries: torch.Tensor, components: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`rounded` queries (h, r) times components (r, n) int8: (h, n).

    On a CPU the product is exact, in int32 or float32. It lies in the first bytes of `memory` (uint8, at least 4 h n).
    Elsewhere it is bfloat16, and the components are copied to bfloat16 first.
    """
    if components.device.type != "cpu":
        return queries @ components.to(torch.bfloat16)
    (heads, rank), count = queries.shape, components.shape[1]
    out = memory[: 4 * heads * count]
    if rank > _MOST_COMPONENTS or multiplies_bytes():
        return torch._int_mm(queries, components, out=out.view(torch.int32).view(heads, count))
    return _widened(queries, components, out.view(torch.float32).view(heads, count))


def _widened(queries: torch.Tensor, components: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`multiplied` in float32, into `out` (h, n), with 128 KiB of converted components at a time."""
    wide, piece = queries.float(), max(1, _WIDENED // len(components))
    for first in range(0, components.shape[1], piece):
        columns = slice(first, first + piece)
        torch.mm(wide, components[:, columns].float(), out=out[:, columns])
    return out


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this processor multiplies 8-bit matrices faster than it converts them to float32 and multiplies those.

    With only AVX2 the 8-bit product takes 2 to 14 times as long for many tokens. Timed once a process, in a few
    milliseconds, because torch does not say which instructions it uses. Both ways give the same product.
    """
    queries, components = (torch.ones(shape, dtype=torch.int8, device="cpu") for shape in ((9, 24), (24, 2048)))
    out = torch.empty(9, 2048, dtype=torch.int32, device="cpu")

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(4):  # the first run allocates what the others reuse
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        return min(times)

    integers = seconds(lambda: torch._int_mm(queries, components, out=out))
    return integers <= seconds(lambda: _widened(queries, components, out.view(torch.float32)))


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies small bfloat16 matrices faster than it converts them to float32 first.

    The bfloat16 product takes 0.5 to 0.8 of the time with AVX-512, but 4 to 7 times as long with only AVX2.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
