"""What a cache did and what it holds: the report that users read."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from .counters import Counters

# What `stream_context` did

@dataclass(frozen=True)
class StreamReport:
    """A cell is a chunk of tokens in one layer; those of the first layer, always computed, are not counted."""

    level: str | None
    """What is kept of what was streamed; "lossless": all. None: nothing was."""
    tokens: int
    """Filled in."""
    cells: int
    computed: int
    streamed: int
    cancelled: int
    """Computing overtook them on their way."""
    overtaken: int
    """They had come, and were computed all the same."""
    stolen: int
    """On their way for too long, and computed."""
    lost: int
    """They could not be had: missing, damaged, or of a server that failed."""
    recomputed_tokens: int
    """Computed a second time, since what was to lie above did not come."""
    received_bytes: int
    bandwidth: float | None
    """Bytes a second, between the first and the last that came."""
    seconds: float
    """From the call to the filled cache."""
    computing_seconds: float
    attended: float
    """Share of the blocks of keys before them that what was computed attended to; below 1.0 with `sparse`."""
    whole: str | None
    """Why it was prefilled whole, without the network; None: it was not."""
    trouble: tuple[str, ...]
    first_token_seconds: float | None = None
    """From the call to the end of the first forward of what follows (TTFT); None: there was none yet."""
    unavailable: int = 0
    """Of the cells lost, those that the store refused or failed to give: they may be there."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.whole:
            return f"{self.tokens:,} tokens prefilled in {self.seconds:.2f} s: {self.whole}"
        rate = "" if self.bandwidth is None else f", {self.bandwidth * 8e-6:.1f} Mbit/s"
        text = (
            f"{self.tokens:,} tokens in {self.seconds:.2f} s: {self.computed:,} cells computed, {self.streamed:,} "
            f"streamed ({self.level}, {self.received_bytes:,} bytes{rate})"
        )
        if self.attended < 1:
            text += f", computing attended to {self.attended:.0%} of what came before"
        if self.first_token_seconds is not None:
            text += f", first token after {self.first_token_seconds:.2f} s"
        others = {name: getattr(self, name) for name in ("cancelled", "overtaken", "stolen", "lost")}
        return text + "".join(f", {count:,} {name}" for name, count in others.items() if count)

    def _repr_html_(self) -> str:
        """The report as a table for a notebook; figures that are 0 or unknown are left out."""
        values = {name.replace("_", " "): value for name, value in asdict(self).items() if value not in (None, 0, ())}
        sizes = {"received bytes": size_text, "bandwidth": lambda rate: f"{rate * 8e-6:.1f} Mbit/s"}
        texts = {name: sizes.get(name, _figure_text)(value) for name, value in values.items()}
        return html_table(f"stream_context: {self.tokens:,} tokens", texts.items())


# Numbers as a person reads them

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


def _figure_text(value: Any) -> str:
    """A count, a number or texts."""
    if isinstance(value, tuple):
        return "; ".join(map(str, value))
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def html_table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table for a notebook: `rows` of cells, the first of which names the row, below a `head`. Texts are escaped."""
    lines = [f"<table><caption>{html.escape(title)}</caption>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>")
    for name, *cells in rows:
        texts = "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in cells)
        lines.append(f'<tr><th style="text-align: left">{html.escape(name)}</th>{texts}</tr>')
    return "\n".join([*lines, "</table>"])


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


class Account(Protocol):
    """What a report needs of a memory account."""

    limit: int | None
    peak: int
    @property
    def apart(self) -> int: ...
    @property
    def by_owner(self) -> Mapping[str, int]: ...


class StoreTotals(Protocol):
    """What a report needs of a store."""

    bytes_read: int
    bytes_written: int
    reads: int


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
    host_bytes: int
    """Of `memory_bytes`, records in host memory that the budget does not count (`SpecCache` with engine="memory")."""
    peak_memory_bytes: int
    memory_by_owner: dict[str, int]
    disk_bytes: int
    replica_bytes: int
    """Of `disk_bytes`, the 4-bit replicas of what is stored."""
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
    compressed_fraction: float | None
    """Records that came as 4-bit replicas, over records read for selections; None: there are no replicas."""
    unpack_seconds: float
    """What unpacking them took, on the model's thread."""
    look_bytes: int
    """Of `bytes_read`, what was read to choose by alone: abstracts of chunks that lie on the disk."""
    stall_seconds: float
    """Waits, corrective reads and faulting gathers."""
    decode_steps: int
    """Steps that selected, and single-query calls over a history."""
    decode_seconds: float
    decode_stall_seconds: float
    """What of `stall_seconds` was in those."""
    decode_flight_seconds: float
    """How long the reads of those were under way, each counted by itself, from its submission: until its last byte was
    there ("direct"); until that was noticed, at the latest when the next read was made or waited for ("uring"); until
    the end of the gather that used it ("mapped", "memory": the kernel does not tell when advised pages come). The
    latter two are the most that it can have been."""
    overlap: float | None
    """Share of `decode_flight_seconds` that nobody waited for: 1 where reads hide behind compute, 0 where each is
    waited for as it is made. Prefill is left out: there reads are large, in order, and never in the way of a token. An
    upper bound where the time under way is; what reading costs is `decode_stall_seconds` over `decode_seconds`. None:
    no reads."""
    store: str
    """The read engine, and why it was taken."""
    layers: dict[str, int]
    """How many layers are in each state: unknown, tagged, full, kept (not offloaded)."""
    warnings: list[str] = field(default_factory=list)
    memory_budget: int | None = None
    """The most that `memory_bytes` may ever be; None: no limit was given."""

    @classmethod
    def of(
        cls, *, account: Account, counters: Counters, stores: Sequence[StoreTotals], **figures: Any
    ) -> CacheReport:
        """A report of `figures`, which are fields, and of what the books say."""
        return cls(
            host_bytes=account.apart,
            peak_memory_bytes=account.peak,
            memory_by_owner={owner: held for owner, held in account.by_owner.items() if held},
            memory_budget=account.limit,
            bytes_read=sum(store.bytes_read for store in stores),
            bytes_written=sum(store.bytes_written for store in stores),
            reads=sum(store.reads for store in stores),
            hit_rate=_ratio(counters.units_resident, counters.units_selected),
            prefetch_hit_rate=_ratio(counters.units_ready, counters.units_selected),
            selected_fraction=_ratio(counters.tokens_attended, counters.tokens_visible),
            compressed_fraction=_ratio(counters.records_compressed, counters.records_read),
            unpack_seconds=counters.unpack_seconds,
            look_bytes=counters.look_bytes,
            stall_seconds=counters.stall_seconds,
            decode_steps=counters.decode_steps,
            decode_seconds=counters.decode_seconds,
            decode_stall_seconds=counters.decode_stall_seconds,
            decode_flight_seconds=counters.decode_flight_seconds,
            overlap=counters.overlap,
            **figures,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return dataclasses.asdict(self)

    def _rows(self) -> dict[str, str]:
        share = kv_share_text(self.memory_bytes, self.full_kv_bytes)
        ratio = f" ({share})" if share else ""
        return {
            "full KV": size_text(self.full_kv_bytes),
            "memory now": size_text(self.memory_bytes)
            + ratio
            + (f"; {size_text(self.host_bytes)} of it beside the budget, in host memory" if self.host_bytes else ""),
            "memory peak": size_text(self.peak_memory_bytes),
            "memory budget": "-" if self.memory_budget is None else size_text(self.memory_budget),
            "  of it now": ", ".join(f"{k} {size_text(v)}" for k, v in self.memory_by_owner.items() if v),
            "on disk": size_text(self.disk_bytes)
            + (f"; {size_text(self.replica_bytes)} of it in 4 bits" if self.replica_bytes else ""),
            "read / written": f"{size_text(self.bytes_read)} in {self.reads:,} reads / {size_text(self.bytes_written)}"
            + (f"; {size_text(self.look_bytes)} read to choose by" if self.look_bytes else ""),
            "resident before prefetch": share_text(self.hit_rate),
            "resident when asked": share_text(self.prefetch_hit_rate),
            "tokens attended": share_text(self.selected_fraction),
            "of what was read, in 4 bits": share_text(self.compressed_fraction)
            + (f", unpacked in {self.unpack_seconds:.3f} s" if self.compressed_fraction else ""),
            "decode": f"{self.decode_steps:,} steps, {self.decode_seconds:.2f} s"
            + (f" ({self.decode_steps / self.decode_seconds:.1f} tokens/s a sequence)" if self.decode_seconds else ""),
            "time waited": f"{self.stall_seconds:.3f} s, of it in decode steps {self.decode_stall_seconds:.3f} s"
            + (f" ({self.decode_stall_seconds / self.decode_seconds:.1%} of them)" if self.decode_seconds else ""),
            "reads overlapped": share_text(self.overlap),
            "store": self.store,
            "layers": ", ".join(f"{count} {state}" for state, count in self.layers.items() if count),
        }

    def _repr_html_(self) -> str:
        """The report as a table for a notebook."""
        rows = [*self._rows().items(), *(("warning", warning) for warning in self.warnings)]
        return html_table(f"{self.cache}: {self.tokens:,} tokens", rows)

    def __str__(self) -> str:
        """The report as a table for a terminal."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.cache}: {self.tokens:,} tokens", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in self._rows().items():
            table.add_row(name, value)
        for warning in self.warnings:
            table.add_row("[yellow]warning", warning)
        console = Console(width=100, force_jupyter=False)  # in a notebook a capture shows an empty output, too
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None
