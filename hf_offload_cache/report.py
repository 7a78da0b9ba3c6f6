"""What a cache did and what it holds: counters, the memory account, and the report that users read."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class MemoryAccount:
    """Bytes that a cache holds, by owner, and the most it ever held at once.

    Each owner of an allocation calls `hold` when it allocates and `release` when it frees; any thread may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_owner: Counter[str] = Counter()
        self.current = 0
        self.peak = 0

    def hold(self, owner: str, nbytes: int) -> None:
        with self._lock:
            self.by_owner[owner] += nbytes
            self.current += nbytes
            self.peak = max(self.peak, self.current)

    def release(self, owner: str, nbytes: int) -> None:
        self.hold(owner, -nbytes)


@dataclass
class Counters:
    """What the model's thread counts while it decodes; all since construction or `reset`."""

    units_selected: int = 0
    units_resident: int = 0
    units_ready: int = 0
    tokens_visible: int = 0
    tokens_attended: int = 0
    stall_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class CacheReport:
    """Figures since construction or `reset`; bytes, seconds, and shares from 0 to 1 (None: nothing to share)."""

    cache: str
    tokens: int
    """Tokens a sequence that the cache holds."""
    full_kv_bytes: int
    """What `DynamicCache` would hold now: all rows, padding and layers that are not offloaded included."""
    memory_bytes: int
    """What the cache holds now in compute and host memory, layers that are not offloaded included."""
    peak_memory_bytes: int
    memory_by_owner: dict[str, int]
    disk_bytes: int
    bytes_read: int
    """From the device, alignment included."""
    bytes_written: int
    reads: int
    hit_rate: float | None
    """Selected units resident before this step's prefetch, over selected."""
    prefetch_hit_rate: float | None
    """Selected units resident when attention asked, over selected."""
    selected_fraction: float | None
    """Tokens attended over tokens visible, in sparse steps."""
    stall_seconds: float
    """Waits, corrective reads and faulting gathers."""
    decode_steps: int
    """Single-query calls over a history."""
    decode_seconds: float
    store: str
    """The read engine, and why it was taken."""
    layers: dict[str, int]
    """How many layers are in each state: unknown, tagged, full, kept (not offloaded)."""
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The report as a table for a terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.cache}: {self.tokens:,} tokens", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        ratio = f" (1/{self.full_kv_bytes / self.memory_bytes:.1f} of the full KV)" if self.memory_bytes else ""
        rows = {
            "full KV": _size(self.full_kv_bytes),
            "memory now": _size(self.memory_bytes) + ratio,
            "memory peak": _size(self.peak_memory_bytes),
            "  of it now": ", ".join(f"{k} {_size(v)}" for k, v in self.memory_by_owner.items() if v),
            "on disk": _size(self.disk_bytes),
            "read / written": f"{_size(self.bytes_read)} in {self.reads:,} reads / {_size(self.bytes_written)}",
            "resident before prefetch": _share(self.hit_rate),
            "resident when asked": _share(self.prefetch_hit_rate),
            "tokens attended": _share(self.selected_fraction),
            "decode": f"{self.decode_steps:,} steps, {self.decode_seconds:.2f} s"
            + (f" ({self.decode_steps / self.decode_seconds:.1f} tokens/s a sequence)" if self.decode_seconds else ""),
            "time waited": f"{self.stall_seconds:.3f} s",
            "store": self.store,
            "layers": ", ".join(f"{count} {state}" for state, count in self.layers.items() if count),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        for warning in self.warnings:
            table.add_row("[yellow]warning", warning)
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
