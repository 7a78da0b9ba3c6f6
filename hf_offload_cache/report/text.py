"""Numbers as a person reads them."""

from __future__ import annotations

import math

_UNITS = (("B", 1, 0), ("KiB", 2**10, 1), ("MiB", 2**20, 1), ("GiB", 2**30, 2))
"""With their bytes, and the digits behind the point."""


def size_text(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def least_size_text(nbytes: int) -> str:
    """Like `size_text`, but rounded up: giving that size gives at least `nbytes`."""
    unit, size, digits = next((one for one in _UNITS if nbytes < 1024 * one[1]), _UNITS[-1])
    steps = math.ceil(nbytes * 10**digits / size)
    while steps * size < nbytes * 10**digits:  # the division above was rounded
        steps += 1
    return f"{steps / 10**digits:.{digits}f} {unit}"


def share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def kv_share_text(nbytes: int, full_kv_bytes: int) -> str:
    """`nbytes` as a share of the full KV: "1/13.0 of the full KV", or, if it is no less, "1.1 times the full KV"; empty
    without either."""
    if not nbytes or not full_kv_bytes:
        return ""
    if nbytes < full_kv_bytes:
        return f"1/{full_kv_bytes / nbytes:.1f} of the full KV"
    return f"{nbytes / full_kv_bytes:.1f} times the full KV"
