"""What kernels over low-bit elements share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def half(at, there):  # type: ignore[no-untyped-def]
    """The number in half precision whose bytes, at any address, are here."""
    low = tl.load(at, mask=there, other=0).to(tl.int16)
    high = tl.load(at + 1, mask=there, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


def wide(size: int) -> int:
    """At least the width that tensor cores need."""
    return max(16, triton.next_power_of_2(size))
