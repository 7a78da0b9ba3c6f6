"""Reports that users read: what a cache stores and did, and what `stream_context` did."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .counters import Counters


@dataclass(frozen=True)
class StreamReport:
    """Figures of `stream_context`. A cell is a chunk of tokens in one layer; the first layer, which is always computed,
    is not counted."""

    level: str | None
    """Compression level of the streamed cells, such as "lossless"; None: nothing was streamed."""
    tokens: int
    """Tokens added to the cache."""
    cells: int
    computed: int
    streamed: int
    cancelled: int
    """Cells computed while their transfer was still running."""
    overtaken: int
    """Cells that arrived but had been computed already."""
    stolen: int
    """Cells computed because their transfer took too long."""
    lost: int
    """Cells that could not be fetched: missing, damaged, or the server failed."""
    recomputed_tokens: int
    """Tokens computed twice because cells of layers above them did not arrive."""
    received_bytes: int
    bandwidth: float | None
    """Bytes per second between the first and the last byte received."""
    seconds: float
    """From the call to the filled cache."""
    computing_seconds: float
    attended: float
    """Share of the preceding key blocks that computed tokens attended to; below 1.0 with `sparse`."""
    whole: str | None
    """Why the complete prompt was prefilled without the network; None: it was not."""
    trouble: tuple[str, ...]
    first_token_seconds: float | None = None
    """Time to first token: from the call to the end of the first forward after it; None: no forward yet."""
    unavailable: int = 0
    """Lost cells that the store refused or failed to deliver; they may exist."""

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
            text += f", computed tokens attended to {self.attended:.0%} of the tokens before them"
        if self.first_token_seconds is not None:
            text += f", first token after {self.first_token_seconds:.2f} s"
        others = {name: getattr(self, name) for name in ("cancelled", "overtaken", "stolen", "lost")}
        return text + "".join(f", {count:,} {name}" for name, count in others.items() if count)

    def _repr_html_(self) -> str:
        """The report as a table for a notebook, without figures that are 0 or unknown."""
        values = {name.replace("_", " "): value for name, value in asdict(self).items() if value not in (None, 0, ())}
        sizes = {"received bytes": size_text, "bandwidth": lambda rate: f"{rate * 8e-6:.1f} Mbit/s"}
        texts = {name: sizes.get(name, _figure_text)(value) for name, value in values.items()}
        return html_table(f"stream_context: {self.tokens:,} tokens", texts.items())


_UNITS = (("B", 1, 0), ("KiB", 2**10, 1), ("MiB", 2**20, 1), ("GiB", 2**30, 2))
"""Unit, its bytes, and the decimals shown."""


def _unit(nbytes: int) -> tuple[str, int, int]:
    """The largest of `_UNITS` that `nbytes` fills."""
    return next((unit for unit in _UNITS if abs(nbytes) < 1024 * unit[1]), _UNITS[-1])


def size_text(nbytes: int) -> str:
    unit, size, digits = _unit(nbytes)
    return f"{nbytes / size:.{digits}f} {unit}"


def least_size_text(nbytes: int) -> str:
    """As `size_text`, rounded up: a size to ask for that is at least `nbytes`."""
    unit, size, digits = _unit(nbytes)
    steps = math.ceil(nbytes * 10**digits / size)
    while steps * size < nbytes * 10**digits:  # the division above was rounded
        steps += 1
    return f"{steps / 10**digits:.{digits}f} {unit}"


def _figure_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "; ".join(map(str, value))
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def html_table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table for a notebook. Each row's first cell is its name. Texts are escaped."""
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
    """`nbytes` as a share such as "1/13.0 of the full KV", or "1.1 times the full KV"; empty if either is 0."""
    if not nbytes or not full_kv_bytes:
        return ""
    if nbytes < full_kv_bytes:
        return f"1/{full_kv_bytes / nbytes:.1f} of the full KV"
    return f"{nbytes / full_kv_bytes:.1f} times the full KV"


@dataclass(frozen=True)
class CacheReport:
    """Figures since construction or `reset`, in bytes and seconds; shares are from 0 to 1, or None if undefined."""

    cache: str
    tokens: int
    """Tokens stored per sequence."""
    full_kv_bytes: int
    """Memory that `DynamicCache` would use now, including padding and layers that are not offloaded."""
    memory_bytes: int
    """Device and host memory in use by the cache now, including layers that are not offloaded."""
    host_bytes: int
    """The part of `memory_bytes` that `memory` does not limit: host memory, with a model on a GPU; on a CPU the records
    of `SpecCache` with engine="memory"."""
    peak_memory_bytes: int
    """The most memory in use at a time, without `host_bytes`: what `memory` limits."""
    memory_by_owner: dict[str, int]
    disk_bytes: int
    replica_bytes: int
    """The part of `disk_bytes` that is 4-bit copies."""
    bytes_read: int
    """Bytes read from the device, including alignment."""
    bytes_written: int
    reads: int
    hit_rate: float | None
    """Share of the selected units that were resident before this step's prefetch."""
    prefetch_hit_rate: float | None
    """Share of the selected units that were resident when attention needed them."""
    selected_fraction: float | None
    """Tokens attended to over tokens visible, in sparse steps."""
    estimated_mass: float | None
    """Share of the attention mass that steps estimated instead of reading it, by their own estimate: mean over layers
    and steps, of which a sixteenth is looked at. None: nothing was estimated. It follows the true share, but does not
    predict the distance to full attention."""
    lost_mass: float | None
    """As `estimated_mass`, of the attention mass that steps neither attended to nor estimated. None: steps attended to
    all, or the method does not know. `DiskSwapCache` counts the best token of each group, which is two thirds of the
    true share where nothing is estimated."""
    compressed_fraction: float | None
    """Share of the records read for selections that were read as 4-bit copies; None: there are no copies."""
    unpack_seconds: float
    """Time to unpack those copies, on the model's thread."""
    look_bytes: int
    """The part of `bytes_read` that was read only to select: chunk summaries on the disk."""
    stall_seconds: float
    """I/O wait: waits for reads, corrective reads, and page faults while gathering."""
    decode_steps: int
    """Steps that selected, and single-query calls over a history."""
    decode_seconds: float
    decode_stall_seconds: float
    """The part of `stall_seconds` in `decode_steps`."""
    decode_flight_seconds: float
    """Sum of the times that each read of a decoding step was in flight, from its submission. With "direct", a read ends
    with its last byte. With "uring", it ends when its completion is noticed, at the latest at the next read or wait.
    With "mapped" and "memory", it ends with the gather that used it, because the kernel does not report when pages
    arrive. The latter three are upper bounds."""
    overlap: float | None
    """I/O hidden behind compute: share of `decode_flight_seconds` that nobody waited for. 1: reads are hidden; 0: every
    read is waited for in full; None: no reads. Prefill is left out, because its reads delay no token. An upper bound
    wherever the time in flight is one; the cost of reading is `decode_stall_seconds` over `decode_seconds`."""
    store: str
    """The read engine, and the reason for choosing it."""
    layers: dict[str, int]
    """Number of layers in each state: unknown, tagged, full, kept (not offloaded)."""
    warnings: list[str] = field(default_factory=list)
    memory_budget: int | None = None
    """Upper limit of `peak_memory_bytes`; None: no limit."""
    host_budget: int | None = None
    """Upper limit of `host_peak_bytes`; None: no limit."""
    host_peak_bytes: int = 0
    """The most of `host_bytes` at a time."""
    device: str = "cpu"
    """Type of the device that attention runs on: "cuda" or "cpu"."""
    chosen_by_model: int = 0
    """Offloaded layers whose model chooses by an indexer what it attends to: their steps are exact."""
    chosen_ahead: int = 0
    """Of these, the layers whose reads began in the layer before, in the latest step that reads ahead."""
    steps_ahead: int = 0
    """The part of `decode_steps` that read ahead. With `look_ahead=None` the others were faster, or are compared."""
    steps: str = ""
    """With a model on a GPU: how many layers' latest steps ran on it alone, and why others needed the host. Empty
    before the first step that selects."""

    @classmethod
    def of(cls, *, account: Any, counters: Counters, stores: Sequence[Any], **figures: Any) -> CacheReport:
        """A report of a memory account, counters, the totals of stores, and `figures`, which are other fields."""
        counters.fold()
        estimated = _ratio(counters.estimated_millionths / 1e6, counters.times_estimated)
        lost = _ratio(counters.lost_millionths / 1e6, counters.times_lost)
        return cls(
            host_bytes=account.host_bytes,
            host_peak_bytes=account.host_peak,
            host_budget=account.host_limit,
            peak_memory_bytes=account.peak,
            memory_by_owner={owner: nbytes for owner, nbytes in account.by_owner.items() if nbytes},
            memory_budget=account.limit,
            bytes_read=sum(store.bytes_read for store in stores),
            bytes_written=sum(store.bytes_written for store in stores),
            reads=sum(store.reads for store in stores),
            hit_rate=_ratio(counters.units_resident, counters.units_selected),
            prefetch_hit_rate=_ratio(counters.units_ready, counters.units_selected),
            selected_fraction=_ratio(counters.tokens_attended, counters.tokens_visible),
            estimated_mass=None if estimated is None else estimated * (1 - (lost or 0)),
            lost_mass=lost,
            compressed_fraction=_ratio(counters.records_compressed, counters.records_read),
            **{name: getattr(counters, name) for name in _COUNTED},
            **figures,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values that JSON can store."""
        return asdict(self)

    def _rows(self) -> dict[str, str]:
        def and_also(nbytes: int, what: str) -> str:
            return f"; {size_text(nbytes)} {what}" if nbytes else ""

        def limit(budget: int | None) -> str:
            return "-" if budget is None else size_text(budget)

        own, kind = self.memory_bytes - self.host_bytes, "device memory" if self.device == "cuda" else "memory"
        share = kv_share_text(own, self.full_kv_bytes)
        memory = {
            f"{kind} now": size_text(own) + (f" ({share})" if share else ""),
            f"{kind} peak": size_text(self.peak_memory_bytes),
            f"{kind} budget": limit(self.memory_budget),
        }
        if self.device == "cuda" or self.host_peak_bytes:
            memory["host memory now"] = size_text(self.host_bytes)
            memory["host memory peak"] = size_text(self.host_peak_bytes)
            memory["host memory budget"] = limit(self.host_budget)
        copies = f", unpacked in {self.unpack_seconds:.3f} s" if self.compressed_fraction else ""
        decode = f"{self.decode_steps:,} steps, {self.decode_seconds:.2f} s"
        wait = f"{self.stall_seconds:.3f} s, {self.decode_stall_seconds:.3f} s of it while decoding"
        if self.decode_seconds:
            decode += f" ({self.decode_steps / self.decode_seconds:.1f} tokens/s per sequence)"
            wait += f" ({self.decode_stall_seconds / self.decode_seconds:.1%} of that time)"
        return {
            "full KV": size_text(self.full_kv_bytes),
            **memory,
            "memory by component": ", ".join(f"{k} {size_text(v)}" for k, v in self.memory_by_owner.items() if v),
            "on disk": size_text(self.disk_bytes) + and_also(self.replica_bytes, "of it 4-bit copies"),
            "read / written": f"{size_text(self.bytes_read)} in {self.reads:,} reads / {size_text(self.bytes_written)}"
            + and_also(self.look_bytes, "read only to select"),
            "hit rate before prefetch": share_text(self.hit_rate),
            "hit rate": share_text(self.prefetch_hit_rate),
            "tokens attended to": share_text(self.selected_fraction),
            **({"chosen by the model": self._chosen_text()} if self.chosen_by_model else {}),
            "attention mass estimated": share_text(self.estimated_mass),
            "attention mass lost": share_text(self.lost_mass),
            "read as 4-bit copies": share_text(self.compressed_fraction) + copies,
            "decode": decode,
            **({"steps": self.steps} if self.steps else {}),
            "I/O wait": wait,
            "I/O hidden behind compute": share_text(self.overlap),
            "store": self.store,
            "layers": ", ".join(f"{count} {state}" for state, count in self.layers.items() if count),
        }

    def _chosen_text(self) -> str:
        text, ahead = f"exact, in {self.chosen_by_model} layers", self.chosen_ahead if self.steps_ahead else 0
        if ahead and self.hit_rate is not None and self.prefetch_hit_rate is not None:
            text += f"; {self.prefetch_hit_rate - self.hit_rate:.1%} read ahead, in {ahead} layers"
            if self.steps_ahead < self.decode_steps:
                text += f" and {self.steps_ahead:,} of {self.decode_steps:,} steps"
        others = self.chosen_by_model - ahead
        return text + (f"; {others} layers read when needed" if others else "")

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


_COUNTED = (
    "unpack_seconds", "look_bytes", "stall_seconds", "decode_steps", "decode_seconds", "decode_stall_seconds",
    "decode_flight_seconds", "overlap", "steps_ahead",
)  # fmt: skip
"""Fields of a report that are figures of `Counters` as they are."""


def _ratio(part: float, total: int) -> float | None:
    return part / total if total else None
