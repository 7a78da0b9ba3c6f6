"""Planned bytes in use, by owner, before anything is allocated. `DryRun` makes them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..report.report import html_table, kv_share_text, size_text
from .account import LATENTS

Bytes = Mapping[str, int]
"""Bytes by owner."""


@dataclass(frozen=True)
class Planned:
    """Maximum bytes in use, by owner, in a prefill and in decoding.

    The prefill is one over a history, such as a conversation's next turn: what decoding allocated still exists.
    """

    prefill: Bytes = field(default_factory=dict)
    decode: Bytes = field(default_factory=dict)

    @classmethod
    def always(cls, held: Bytes) -> Self:
        """The same bytes in both."""
        return cls(held, held)

    def __add__(self, other: Planned) -> Planned:
        """The sum, for parts in use at the same time."""
        return Planned.sum_of([(self, 1), (other, 1)])

    @classmethod
    def sum_of(cls, parts: Iterable[tuple[Planned, int]]) -> Self:
        """The sum of parts in use at the same time, each counted so many times."""
        prefill: dict[str, int] = {}
        decode: dict[str, int] = {}
        for part, times in parts:  # one loop: a search for a budget makes many plans
            for total, held in ((prefill, part.prefill), (decode, part.decode)):
                for owner, nbytes in held.items():
                    total[owner] = total.get(owner, 0) + nbytes * times
        return cls(prefill, decode)

    @classmethod
    def largest_of(cls, parts: Iterable[Planned]) -> Self:
        """The largest by owner, for parts that are in use one at a time."""
        prefill: dict[str, int] = {}
        decode: dict[str, int] = {}
        for part in parts:
            for most, held in ((prefill, part.prefill), (decode, part.decode)):
                for owner, nbytes in held.items():
                    most[owner] = max(most.get(owner, 0), nbytes)
        return cls(prefill, decode)

    def or_else(self, other: Planned, host: Container[str]) -> Planned:
        """For two ways of doing the same, of which only one is in use at a time: the larger, in each phase. Owners on
        the `host` side count by themselves."""
        phases = []
        for own, others in ((self.prefill, other.prefill), (self.decode, other.decode)):
            larger = max(own, others, key=lambda held: sum([held[owner] for owner in held if owner not in host]))
            beside = {owner: max(own.get(owner, 0), others.get(owner, 0)) for owner in {**own, **others}}
            phases.append({owner: beside[owner] if owner in host else larger.get(owner, 0) for owner in beside})
        return Planned(*phases)


@dataclass(frozen=True)
class LayerPlan:
    """Memory of one layer: `own` adds to the other layers'; `shared` serves one layer at a time."""

    own: Planned = field(default_factory=Planned)
    shared: Planned = field(default_factory=Planned)
    store_bytes: int = 0
    """Bytes on the disk, or wherever the store is."""
    alone: bool = False
    """Steps run on a device without the host."""
    over_host: LayerPlan | None = None
    """The memory of steps that go over the host in spite of that, instead of this; None: there are no such steps."""

    @staticmethod
    def of_layers(layers: Iterable[tuple[LayerPlan, int]], others: Planned) -> tuple[Planned, int]:
        """Memory of all layers, given as pairs (plan, number of such layers), and the bytes in their stores.

        `others`: memory that is in use in turns with the layers' shared memory."""
        counted = list(layers)
        shared = Planned.largest_of([others, *(layer.shared for layer, _ in counted)])
        own_plans = [(layer.own, count) for layer, count in counted]
        return Planned.sum_of([*own_plans, (shared, 1)]), sum([layer.store_bytes * count for layer, count in counted])


_TOTALS = "prefill_bytes", "decode_bytes", "peak_bytes", "host_bytes", "needless"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by owner, named as in the account, at the worst moment of a prefill and of decoding."""

    prefill: dict[str, int]
    decode: dict[str, int]
    disk_bytes: int
    """Bytes the store needs. It takes up to an eighth more, at most 64 MiB a layer, while the disk has room."""
    full_kv_bytes: int
    weight_bytes: int
    host_prefill: dict[str, int] = field(default_factory=dict)
    """Of the owners on the host side, which `memory` does not limit: see `host_side`."""
    host_decode: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    """Type of the device that attention runs on."""

    @classmethod
    def of(
        cls, planned: Planned, disk_bytes: int, full_kv_bytes: int, weight_bytes: int, host: Container[str] = (),
        device: str = "cpu",
    ) -> Self:  # fmt: skip
        """The sum over all owners, those of the `host` side apart."""
        prefill, decode, host_prefill, host_decode = (
            {owner: held for owner, held in each.items() if held and (owner in host) == on_host}
            for on_host in (False, True)
            for each in (planned.prefill, planned.decode)
        )
        return cls(prefill, decode, disk_bytes, full_kv_bytes, weight_bytes, host_prefill, host_decode, device)

    @property
    def needless(self) -> str | None:
        """The reason why no cache is needed: the full KV takes no more memory than this plan, without what is used only
        if there is room. None if it takes more."""
        least = max(self.prefill_bytes - self.prefill.get(LATENTS, 0), self.decode_bytes)
        if self.full_kv_bytes > least:
            return None
        return (
            f"no cache is needed: this plan takes {size_text(least)}, and the full KV (DynamicCache) "
            f"{size_text(self.full_kv_bytes)}; leave the cache out, or plan for more tokens"
        )

    @property
    def share(self) -> str:
        """The maximum memory in use, as a share of the full KV."""
        return kv_share_text(self.peak_bytes, self.full_kv_bytes)

    @property
    def prefill_bytes(self) -> int:
        return sum(self.prefill.values())

    @property
    def decode_bytes(self) -> int:
        return sum(self.decode.values())

    @property
    def peak_bytes(self) -> int:
        return max(self.prefill_bytes, self.decode_bytes)

    @property
    def host_bytes(self) -> int:
        """Peak of the host side."""
        return max(sum(self.host_prefill.values()), sum(self.host_decode.values()))

    def rows(self) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
        """Owner, and bytes in a prefill and in decoding, as text: of the memory that `memory` limits, and of the host
        side, which has no rows if it is empty. The last row is the sum."""
        sides = (self.prefill, self.decode), (self.host_prefill, self.host_decode)
        words = ("device memory", "host memory") if self.device == "cuda" else ("sum", "host memory")
        tables = []
        for (prefill, decode), word in zip(sides, words, strict=True):
            rows = [(owner, prefill.get(owner, 0), decode.get(owner, 0)) for owner in {**prefill, **decode}]
            if rows or word != "host memory":
                rows.append((word, sum(prefill.values()), sum(decode.values())))
            tables.append([(name, size_text(first), size_text(second)) for name, first, second in rows])
        return tables[0], tables[1]

    def _repr_html_(self) -> str:
        """The plan as a table for a notebook: memory by owner, at the worst moment of a prefill and of decoding."""
        own, host = self.rows()
        others = {"full KV": self.full_kv_bytes, "on disk": self.disk_bytes, "weights": self.weight_bytes}
        rows = [*own, *host, *((name, size_text(nbytes), "") for name, nbytes in others.items())]
        return html_table(f"memory plan: {size_text(self.peak_bytes)}", rows, ("", "prefill", "decode"))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; "needless" is None if a cache is useful."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        return {**asdict(self), **totals}
