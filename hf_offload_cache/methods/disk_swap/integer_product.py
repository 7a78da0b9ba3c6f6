"""Low-rank queries times 8-bit components: whole numbers, by whichever instructions this processor has for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch

_WIDENED = 1 << 15
"""Components that are taken to float32 at a time."""
_MOST_COMPONENTS = 1024
"""Of a token, whose products with a query of 8 bits sum up to 2 ** 24 at most, and float32 has such whole numbers."""


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
    """`rounded` queries (h, r) times components (r, n) int8: (h, n). On a CPU it is exact, in int32 or in float32, and
    in the first bytes of `memory` (uint8, at least 4 h n); elsewhere in bfloat16, a copy of the components included."""
    if components.device.type != "cpu":
        return queries @ components.to(torch.bfloat16)
    (heads, rank), count = queries.shape, components.shape[1]
    out = memory[: 4 * heads * count]
    if rank > _MOST_COMPONENTS or multiplies_bytes():
        return torch._int_mm(queries, components, out=out.view(torch.int32).view(heads, count))
    return _widened(queries, components, out.view(torch.float32).view(heads, count))


def _widened(queries: torch.Tensor, components: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in float32, as many components at a time as take 128 KiB."""
    wide, piece = queries.float(), max(1, _WIDENED // len(components))
    for first in range(0, components.shape[1], piece):
        some = slice(first, first + piece)
        torch.mm(wide, components[:, some].float(), out=out[:, some])
    return out


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this processor multiplies matrices of bytes faster than it takes them to float32 first. With AVX2
    alone it takes 2 to 14 times as long, of many tokens. Tried once in a process, in some milliseconds: what torch has
    a path for is not told, and both ways say the same."""
    queries, components = (torch.ones(shape, dtype=torch.int8, device="cpu") for shape in ((9, 24), (24, 2048)))
    out = torch.empty(9, 2048, dtype=torch.int32, device="cpu")

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        taken = []
        for _ in range(4):  # the first one makes what the others use
            start = time.perf_counter()
            product()
            taken.append(time.perf_counter() - start)
        return min(taken)

    integers = seconds(lambda: torch._int_mm(queries, components, out=out))
    return integers <= seconds(lambda: _widened(queries, components, out.view(torch.float32)))
