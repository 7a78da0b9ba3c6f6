"""Numbers as a person reads them."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def share_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
